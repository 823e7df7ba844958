"""The pictures in the documentation match the output of the commands."""

from __future__ import annotations

import re

import pytest
from tests.terminal_pictures import FOLDER, WIDTHS, draw_all


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_terminal_pictures_of_the_documentation_are_up_to_date(columns: int) -> None:
    made = draw_all(columns)
    assert sorted(made) == ["approve", "chat", "log", "run"]
    for name, text in made.items():
        assert (FOLDER / f"{name}-{columns}.svg").read_text(encoding="utf-8") == text, "run: make docs"


def test_no_line_of_a_terminal_picture_is_wider_than_its_terminal() -> None:
    for path in FOLDER.glob("*.svg"):
        columns = int(path.stem.rpartition("-")[2])
        ends = [
            float(x) + float(length)
            for x, length in re.findall(r'x="([0-9.]+)" y="[0-9]+" textLength="([0-9.]+)"', path.read_text())
        ]
        assert ends and max(ends) <= columns * 8.4 + 16.5, path.name
