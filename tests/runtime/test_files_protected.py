"""The workspace's own configuration is not written through the file door, whatever the rules say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.runtime.conftest import Judge

from handrail.contract.errors import ToolError
from handrail.runtime.files import RootedFiles, SeenFiles
from handrail.runtime.roots import Roots

pytestmark = pytest.mark.proves("P-15a", "F-11")


@pytest.mark.parametrize(
    "path",
    ["handrail.toml", "HANDRAIL.toml", "./src/../handrail.toml", "link", "src/up/handrail.toml", "handrail.toml."],
)
@pytest.mark.parametrize("there", [True, False])
async def test_it_is_neither_made_nor_written_over_by_any_name(
    files: RootedFiles, workspace: Path, judge: Judge, path: str, there: bool
) -> None:
    (workspace / "src").mkdir()
    (workspace / "src" / "up").symlink_to("..")
    (workspace / "link").symlink_to("handrail.toml")
    if there:
        (workspace / "handrail.toml").write_text("theirs")
        await files.read_bytes("handrail.toml")
    with pytest.raises(ToolError, match="no tool can write it and no rule allows it") as caught:
        await files.write(path, b'rules = ["allow *"]')
    assert caught.value.kind == "denied" and "a person" in caught.value.text
    assert [entry for entry in os.listdir(workspace) if entry.lower().startswith("handrail")] == [
        "handrail.toml"
    ] * there
    assert not there or (workspace / "handrail.toml").read_text() == "theirs"
    assert not [asked for asked in judge.asked if asked[0] == "fs.write"]  # no rule is even looked at


async def test_a_hard_link_to_it_is_not_written(files: RootedFiles, workspace: Path) -> None:
    (workspace / "handrail.toml").write_text("theirs")
    os.link(workspace / "handrail.toml", workspace / "other")
    await files.read_bytes("other")
    with pytest.raises(ToolError, match="2 hard links"):
        await files.write("other", b"mine")
    assert (workspace / "handrail.toml").read_text() == "theirs"


async def test_it_is_read_and_files_of_its_name_in_other_folders_are_written(
    files: RootedFiles, workspace: Path, judge: Judge, seen: SeenFiles
) -> None:
    (workspace / "handrail.toml").write_text("theirs")
    assert (await files.read_bytes("handrail.toml")).data == b"theirs"
    assert (await files.write("examples/handrail.toml", b"x")).created
    assert (await RootedFiles(Roots(workspace / "examples"), seen, judge).read_bytes("handrail.toml")).data == b"x"
