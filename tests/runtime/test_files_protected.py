"""Protected files are not written and keys are not read, whatever the rules say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.runtime.conftest import RecordingAccessCheck

from handrail.contract.errors import ToolError
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots

pytestmark = pytest.mark.proves("P-15", "F-11")


@pytest.mark.parametrize(
    "path",
    ["handrail.toml", "HANDRAIL.toml", "./src/../handrail.toml", "link", "src/up/handrail.toml", "handrail.toml."],
)
@pytest.mark.parametrize("there", [True, False])
async def test_the_workspace_configuration_is_not_created_or_overwritten_under_any_spelling(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck, path: str, there: bool
) -> None:
    (workspace / "src").mkdir()
    (workspace / "src" / "up").symlink_to("..")
    (workspace / "link").symlink_to("handrail.toml")
    if there:
        (workspace / "handrail.toml").write_text("theirs")
        await files.read_bytes("handrail.toml")
    with pytest.raises(ToolError, match="No tool can write it, and no rule can allow it") as caught:
        await files.write(path, b'rules = ["allow *"]')
    assert caught.value.kind == "denied" and "the user" in caught.value.text
    assert [entry for entry in os.listdir(workspace) if entry.lower().startswith("handrail")] == [
        "handrail.toml"
    ] * there
    assert not there or (workspace / "handrail.toml").read_text() == "theirs"
    assert not [asked for asked in judge.asked if asked[0] == "fs.write"]  # no rule is even looked at


async def test_a_hard_link_to_a_protected_file_is_not_written(files: RootedFiles, workspace: Path) -> None:
    (workspace / "handrail.toml").write_text("theirs")
    os.link(workspace / "handrail.toml", workspace / "other")
    await files.read_bytes("other")
    with pytest.raises(ToolError, match="2 hard links"):
        await files.write("other", b"mine")
    assert (workspace / "handrail.toml").read_text() == "theirs"


async def test_the_configuration_is_readable_and_namesakes_in_other_folders_are_writable(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck, seen: SeenFileHashes
) -> None:
    (workspace / "handrail.toml").write_text("theirs")
    assert (await files.read_bytes("handrail.toml")).data == b"theirs"
    assert (await files.write("examples/handrail.toml", b"x")).created
    assert (
        await RootedFiles(SessionRoots(workspace / "examples"), seen, judge).read_bytes("handrail.toml")
    ).data == b"x"


@pytest.mark.parametrize(
    "path",
    [
        *(".git/hooks/post-commit", ".git/config", ".GIT/config", ".git./hooks/x", "sub/.git/config", ".git"),
        *(".vscode/tasks.json", ".envrc", "a/.bashrc", ".ssh/authorized_keys", ".mcp.json", ".claude/settings.json"),
        *(".git::$DATA/config", ".g\u200bit/config", "GIT~1/config", "hub/../.git/config", "link/config"),
    ],
)
async def test_a_protected_path_is_not_written_under_any_spelling(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck, path: str
) -> None:
    (workspace / "hub").mkdir()
    (workspace / ".git").mkdir()
    (workspace / "link").symlink_to(".git")
    with pytest.raises(ToolError, match="no rule can allow it") as caught:
        await files.write(path, b"x")
    assert caught.value.kind == "denied" and "the user" in caught.value.text
    assert not judge.asked
    assert sorted(os.listdir(workspace)) == [".git", "hub", "link"] and not os.listdir(workspace / ".git")


async def test_private_keys_are_not_read_and_public_keys_are(files: RootedFiles, workspace: Path) -> None:
    (workspace / ".ssh").mkdir()
    for name in ("id_rsa", ".ssh/work", ".ssh/id_rsa.pub"):
        (workspace / name).write_text("KEY")
    (workspace / "notes").symlink_to("id_rsa")
    for name in ("id_rsa", "./ID_RSA/../id_rsa", ".ssh/work", "notes"):
        with pytest.raises(ToolError, match="private key") as caught:
            await files.read_bytes(name)
        assert caught.value.kind == "denied"
    assert (await files.read_bytes(".ssh/id_rsa.pub")).data == b"KEY"


async def test_a_folder_cannot_be_made_a_git_directory_in_steps(files: RootedFiles, workspace: Path) -> None:
    """git takes its configuration from any folder with a HEAD, objects and refs, whatever it is called."""
    for data in (b"ref: refs/heads/main\n", b"0" * 40):
        with pytest.raises(ToolError, match="marks its folder"):
            await files.write("trap/HEAD", data)
    assert (await files.write("docs/HEAD", b"the beginning")).created
    (workspace / "half").mkdir()
    (workspace / "half" / "HEAD").write_text("ref: refs/heads/main")
    for name in ("config", "objects/x", "refs/heads/main", "hooks/post-checkout", "commondir"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files.write(f"half/{name}", b"x")
    (workspace / "half" / "objects").mkdir()
    (workspace / "half" / "refs").mkdir()
    for name in ("config", "CONFIG", "hooks/post-checkout"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files.write(f"half/{name}", b"x")
    for name in ("refs/heads/main", "objects/ab/cd", "index", "logs/HEAD", "info/attributes", "sequencer/todo"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files.write(f"half/{name}", b"0" * 40)
    assert (await files.write("config", b"ordinary")).created and (await files.write("src/hooks/use.ts", b"x")).created


async def test_hooks_and_included_configuration_that_git_settings_name_are_not_written(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / ".git").mkdir()
    config = workspace / ".git" / "config"
    config.write_text("[core]\n\thooksPath = tools/hooks\n[include]\n\tpath = ../common.ini\n")
    for name in ("tools/hooks/pre-commit", "tools/x/../hooks/post-checkout", "common.ini"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files.write(name, b"x")
    assert (await files.write("tools/other", b"x")).created
    config.write_text("[core]\n\tbare = false\n")
    assert (await files.write("tools/hooks/pre-commit", b"x")).created


async def test_a_file_that_a_protected_folder_links_to_is_not_written(files: RootedFiles, workspace: Path) -> None:
    for name in (".vscode", "conf"):
        (workspace / name).mkdir()
    (workspace / ".vscode" / "tasks.json").symlink_to("../conf/tasks.json")
    with pytest.raises(ToolError, match="no rule can allow it"):
        await files.write("conf/tasks.json", b"evil")
    assert not (workspace / "conf" / "tasks.json").exists()
    await files.write("conf/other.json", b"fine")
