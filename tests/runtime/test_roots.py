"""Canonical names and the form in which they are shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import StartError, ToolError
from handrail.contract.text.neutral import visible
from handrail.runtime.files.roots import Roots, canonical, is_beneath


def test_two_spellings_of_one_file_are_one_canonical_path(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("")
    (tmp_path / "link").symlink_to("src")
    roots = Roots(tmp_path)
    spellings = ["src/a.py", "./src//a.py", "src/../src/a.py", "link/a.py", str(tmp_path / "src" / "a.py")]
    assert {roots.locate(spelling).absolute for spelling in spellings} == {os.path.realpath(tmp_path / "src" / "a.py")}
    assert roots.locate("link/a.py").shown == "src/a.py"


def test_a_tail_that_does_not_exist_yet_is_kept(tmp_path: Path) -> None:
    located = Roots(tmp_path).locate("new/deep/file.txt")
    assert (located.shown, located.inside, located.writable) == ("new/deep/file.txt", True, True)


def test_a_folder_whose_name_only_begins_like_the_workspace_is_outside(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws_secret").mkdir()
    located = Roots(tmp_path / "ws").locate("../ws_secret/key")
    assert not located.inside
    assert located.shown == os.path.realpath(tmp_path / "ws_secret" / "key")


def test_an_extra_root_is_inside_and_not_writable(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "out").mkdir()
    roots = Roots(tmp_path / "ws", [tmp_path / "out"])
    located = roots.locate(str(tmp_path / "out" / "1.txt"))
    assert (located.inside, located.writable) == (True, False)
    assert roots.locate(".").shown == "."


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 256, "d/" * 2100, "\ud800"])
def test_text_that_can_name_no_file_is_invalid_input(tmp_path: Path, path: str) -> None:
    with pytest.raises(ToolError) as caught:
        Roots(tmp_path).locate(path)
    assert caught.value.kind == "invalid_input"
    assert "\0" not in caught.value.text


def test_a_workspace_that_is_no_folder_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="not a folder"):
        Roots(tmp_path / "absent")


def test_newlines_escapes_and_bad_bytes_in_names_are_shown_spelled_out(tmp_path: Path) -> None:
    roots = Roots(tmp_path)
    assert roots.locate("a\nb").shown == "a\\nb"
    assert roots.locate("\x1b[31mred").shown == "\\x1b[31mred"
    assert roots.locate(os.fsdecode(b"bad\xff")).shown == "bad\\xff"
    assert roots.locate("a\u202etxt").shown == "a\\u202etxt"
    assert roots.locate("grün/日本.md").shown == "grün/日本.md"


@given(st.text())
def test_shown_text_is_printable_and_encodable(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    shown.encode()


def test_a_folder_holds_itself_and_whole_names_only() -> None:
    assert is_beneath("/ws", "/ws")
    assert is_beneath("/ws/a", "/ws")
    assert is_beneath("/anything", "/")
    assert not is_beneath("/ws_secret", "/ws")


@given(st.lists(st.sampled_from(["src", "a.py", "link", "loop", "dangling", "up", ".hidden", "..", ".", "absent", ""])))
def test_the_quick_canonical_path_is_the_slow_one(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    tree = tmp_path_factory.getbasetemp() / "canonical"
    if not tree.exists():
        (tree / "src" / "src").mkdir(parents=True)
        (tree / ".hidden").mkdir()
        for folder in (tree, tree / "src", tree / ".hidden"):
            (folder / "a.py").write_text("")
            for link, target in (("link", "src"), ("loop", "loop"), ("dangling", "nowhere/at/all"), ("up", "..")):
                (folder / link).symlink_to(target)
    path = "/".join([str(tree), *names])
    assert canonical(path) == os.path.realpath(path)
