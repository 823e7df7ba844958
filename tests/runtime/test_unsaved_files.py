"""Unsaved files of an editor: reads return its text, and no write overwrites it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import Capability
from handrail.runtime.files import editor_file_service
from handrail.runtime.files.editor_file_service import EditorFiles
from handrail.runtime.files.rooted_file_service import SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots

pytestmark = [
    pytest.mark.proves("F-05"),
    pytest.mark.skipif(os.name == "nt", reason="file times say something else there"),
]


class EditorBuffers:
    """An editor that shows a text of each file, and does something when it is asked."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.asked: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.hangs = False

    async def read_unsaved_text(self, path: str) -> str | None:
        self.asked.append(path)
        self.meanwhile()
        if self.hangs:
            await asyncio.Event().wait()
        return self.texts.get(path)


def allowed(capability: Capability, target: str | Sequence[str]) -> None:
    return None


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, EditorBuffers, EditorFiles]:
    """A workspace without recent changes, and the file service with its editor."""
    workspace = tmp_path / "ws"
    (workspace / "src").mkdir(parents=True)
    (workspace / "src" / "a.txt").write_text("saved\n")
    monkeypatch.setattr(editor_file_service, "FRESH_NS", -(10**12))
    monkeypatch.setattr(editor_file_service, "SETTLED_NS", -(10**12))
    buffers = EditorBuffers()
    return workspace, buffers, EditorFiles(SessionRoots(str(workspace)), SeenFileHashes(), allowed, buffers)


Place = tuple[Path, EditorBuffers, EditorFiles]


async def read(files: EditorFiles) -> str:
    return "\n".join((await files.read_lines("src/a.txt")).lines)


async def test_unsaved_editor_text_is_read_and_blocks_every_change_to_the_file(editor: Place) -> None:
    workspace, buffers, files = editor
    path = str(workspace / "src" / "a.txt")
    assert await read(files) == "saved" and buffers.asked == [path]
    buffers.texts[path] = "typed\nmore"
    assert await read(files) == "typed\nmore"
    assert (await files.read_bytes("src/a.txt")).data == b"typed\nmore"
    for change in (files.read_for_edit("src/a.txt"), files.write("src/a.txt", b"mine")):
        with pytest.raises(ToolError, match=r"`src/a\.txt` was not changed: the user has unsaved changes") as refused:
            await change
        assert refused.value.kind == "conflict"
    assert (workspace / "src" / "a.txt").read_text() == "saved\n"
    del buffers.texts[path]
    assert (await files.write("src/a.txt", b"mine")).previous_content == b"saved\n"


async def test_a_text_that_the_editor_has_not_reloaded_is_not_treated_as_unsaved(editor: Place) -> None:
    workspace, buffers, files = editor
    buffers.texts[str(workspace / "src" / "a.txt")] = "saved"
    assert await read(files) == "saved"
    await files.write("src/a.txt", b"written\n")
    assert await read(files) == "written", "a session reads what it wrote"
    await files.write("src/a.txt", b"again\n")
    assert await read(files) == "again"


@pytest.mark.parametrize("codec", ["latin-1", "cp1252", "utf-16", "utf-8-sig", "cp932"])
async def test_a_text_in_another_encoding_is_unsaved_only_if_it_differs(editor: Place, codec: str) -> None:
    workspace, buffers, files = editor
    file = workspace / "src" / "a.txt"
    text = "これはテスト\n" if codec == "cp932" else "déjà vu, l'été\n"
    file.write_bytes(text.encode(codec))
    for shown in (text, text.encode(codec).decode("utf-8", "replace")):
        buffers.texts[str(file)] = shown
        assert await read(files) == text.removesuffix("\n")
        assert await files.read_for_edit("src/a.txt") == text.encode(codec)
    buffers.texts[str(file)] = text + "more"
    assert await read(files) == text + "more"
    with pytest.raises(ToolError, match="unsaved changes"):
        await files.read_for_edit("src/a.txt")


async def test_a_link_swapped_in_during_an_editor_read_does_not_expose_another_file(
    editor: Place, tmp_path: Path
) -> None:
    workspace, buffers, files = editor
    folder, file = workspace / "src", workspace / "src" / "a.txt"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("secret")
    buffers.texts[str(file)] = "secret"

    def swap_file() -> None:
        file.rename(folder / "kept")
        file.symlink_to(outside / "a.txt")
        file.unlink()
        (folder / "kept").rename(file)

    def swap_folder() -> None:
        folder.rename(workspace / "kept")
        folder.symlink_to(outside)
        folder.unlink()
        (workspace / "kept").rename(folder)

    assert await read(files) == "secret", "without a swap the text counts: what follows shows that it is the swap"
    for swap in (swap_file, swap_folder):
        _until_the_clock_ticks(workspace)
        buffers.meanwhile = swap
        assert await read(files) == "saved"
        buffers.meanwhile = lambda: None


def _until_the_clock_ticks(folder: Path) -> None:
    """The clocks of file systems advance in steps; a test may be faster than one."""
    before = folder.parent.stat().st_ctime_ns
    probe = folder.parent / "tick"
    while True:
        probe.touch()
        now = probe.stat().st_ctime_ns
        probe.unlink()
        if now > max(before, folder.stat().st_ctime_ns, (folder / "src").stat().st_ctime_ns):
            return


async def test_the_editor_is_not_asked_about_a_file_in_a_recently_changed_folder(
    editor: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, buffers, files = editor
    buffers.texts[str(workspace / "src" / "a.txt")] = "typed"
    monkeypatch.setattr(editor_file_service, "SETTLED_NS", 10**12)
    assert await read(files) == "saved" and buffers.asked == []
    monkeypatch.setattr(editor_file_service, "SETTLED_NS", -(10**12))
    monkeypatch.setattr(editor_file_service, "FRESH_NS", 10**12)
    assert await read(files) == "saved" and buffers.asked == []


async def test_a_read_does_not_wait_for_an_editor_that_does_not_answer(
    editor: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, buffers, files = editor
    monkeypatch.setattr(editor_file_service, "EDITOR_TIMEOUT_S", 0.0)
    buffers.hangs = True
    assert await read(files) == "saved" and len(buffers.asked) == 1


async def test_editor_text_with_broken_characters_is_read_and_oversized_editor_text_is_ignored(
    editor: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, buffers, files = editor
    buffers.texts[str(workspace / "src" / "a.txt")] = "half \ud800 of one"
    assert "half" in await read(files)
    monkeypatch.setattr(editor_file_service, "MAX_EDIT_BYTES", 3)
    assert await read(files) == "saved"


async def test_the_editor_is_not_asked_for_a_file_that_rules_deny(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    buffers = EditorBuffers()

    def never(capability: Capability, target: str | Sequence[str]) -> str:
        return "a rule says no"

    files = EditorFiles(SessionRoots(str(tmp_path)), SeenFileHashes(), never, buffers)
    with pytest.raises(ToolError, match="a rule says no"):
        await files.read_lines("a.txt")
    assert buffers.asked == []
