"""Canonical paths and their displayed form."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import StartError, ToolError
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.runtime.files.session_roots import SessionRoots, is_beneath, resolve_canonical_path


def test_different_spellings_of_one_file_resolve_to_one_canonical_path(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("")
    (tmp_path / "link").symlink_to("src")
    roots = SessionRoots(tmp_path)
    spellings = ["src/a.py", "./src//a.py", "src/../src/a.py", "link/a.py", str(tmp_path / "src" / "a.py")]
    assert {roots.resolve_path(spelling).absolute for spelling in spellings} == {
        os.path.realpath(tmp_path / "src" / "a.py")
    }
    assert roots.resolve_path("link/a.py").display_path == "src/a.py"


def test_a_path_that_does_not_exist_yet_resolves_to_its_full_name(tmp_path: Path) -> None:
    located = SessionRoots(tmp_path).resolve_path("new/deep/file.txt")
    assert (located.display_path, located.is_inside, located.is_writable) == ("new/deep/file.txt", True, True)


def test_a_folder_whose_name_starts_like_the_workspace_is_outside(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws_secret").mkdir()
    located = SessionRoots(tmp_path / "ws").resolve_path("../ws_secret/key")
    assert not located.is_inside
    assert located.display_path == os.path.realpath(tmp_path / "ws_secret" / "key")


def test_a_readable_extra_root_is_inside_and_not_writable(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "out").mkdir()
    roots = SessionRoots(tmp_path / "ws", [tmp_path / "out"])
    located = roots.resolve_path(str(tmp_path / "out" / "1.txt"))
    assert (located.is_inside, located.is_writable) == (True, False)
    assert roots.resolve_path(".").display_path == "."


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 256, "d/" * 2100, "\ud800"])
def test_text_that_cannot_name_a_file_is_invalid_input(tmp_path: Path, path: str) -> None:
    with pytest.raises(ToolError) as caught:
        SessionRoots(tmp_path).resolve_path(path)
    assert caught.value.kind == "invalid_input"
    assert "\0" not in caught.value.text


def test_a_workspace_that_is_not_a_folder_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="not a folder"):
        SessionRoots(tmp_path / "absent")


def test_control_characters_and_invalid_bytes_in_names_are_shown_escaped(tmp_path: Path) -> None:
    roots = SessionRoots(tmp_path)
    assert roots.resolve_path("a\nb").display_path == "a⟦U+000A⟧b"
    assert roots.resolve_path("\x1b[31mred").display_path == "⟦U+001B⟧[31mred"
    assert roots.resolve_path(os.fsdecode(b"bad\xff")).display_path == "bad⟦U+DCFF⟧"
    assert roots.resolve_path("a\u202etxt").display_path == "a⟦U+202E⟧txt"
    assert roots.resolve_path("grün/日本.md").display_path == "grün/日本.md"


@given(st.text())
def test_shown_text_is_printable_and_encodable(text: str) -> None:
    shown = escape_terminal_controls(text)
    assert shown.isprintable()
    shown.encode()


def test_a_folder_contains_itself_and_paths_below_it_by_whole_names() -> None:
    assert is_beneath("/ws", "/ws")
    assert is_beneath("/ws/a", "/ws")
    assert is_beneath("/anything", "/")
    assert not is_beneath("/ws_secret", "/ws")


@given(st.lists(st.sampled_from(["src", "a.py", "link", "loop", "dangling", "up", ".hidden", "..", ".", "absent", ""])))
def test_the_fast_canonical_path_equals_the_slow_one(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    tree = tmp_path_factory.getbasetemp() / "canonical"
    if not tree.exists():
        (tree / "src" / "src").mkdir(parents=True)
        (tree / ".hidden").mkdir()
        for folder in (tree, tree / "src", tree / ".hidden"):
            (folder / "a.py").write_text("")
            for link, target in (("link", "src"), ("loop", "loop"), ("dangling", "nowhere/at/all"), ("up", "..")):
                (folder / link).symlink_to(target)
    path = "/".join([str(tree), *names])
    assert resolve_canonical_path(path) == os.path.realpath(path)
