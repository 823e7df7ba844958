"""Durations on the command line: finite and within sensible limits."""

from __future__ import annotations

import pytest
from tests.frontends.conftest import Here

OPTIONS = [
    ("jobs wait X --timeout", "seconds", "from 0 to 315,360,000 (ten years)"),
    ("sessions close --unused-for", "days", "from 0 to 3,650 (ten years)"),
    ("run task --max-seconds", "seconds", "more than 0 to 315,360,000 (ten years)"),
    ("find need --wait", "seconds", "from 0 to 315,360,000 (ten years)"),
    ("mcp --wait", "seconds", "from 1 to 86,400"),
]


@pytest.mark.parametrize(("command", "unit", "expected"), OPTIONS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e308", "1e400", "-1", "soon", ""])
def test_an_invalid_amount_of_time_is_a_usage_error(
    here: Here, command: str, unit: str, expected: str, value: str
) -> None:
    name, *arguments = command.split()
    ended = here(name, *arguments, value)
    assert ended.code == 2, ended.err
    assert f"{value!r}. Expected a number of {unit}, {expected}." in " ".join(ended.err.split())
    assert arguments[-1] in ended.err


def test_ten_years_are_accepted_and_zero_seconds_are_refused(here: Here) -> None:
    assert here("sessions", "close", "--unused-for", "3650").code == 0
    assert here("jobs", "wait", "job_x", "--timeout", "315360000").code == 1, "there is no such job"
    assert here("run", "task", "--max-seconds", "0").code == 2
