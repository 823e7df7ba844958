"""A program cannot redirect a protected link, or a path that git executes, by another link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.test_guard import GuardFixture, ground

from handrail.contract.errors import ToolError

pytestmark = pytest.mark.proves("S-07")
__all__ = ["ground"]

EVIL = "#!/bin/sh\necho evil\n"


def _repository(workspace: Path, settings: str = "") -> None:
    for name in (".git/objects", ".git/refs", ".git/hooks", "tools", "v1"):
        (workspace / name).mkdir(parents=True)
    (workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (workspace / ".git" / "config").write_text("[core]\n\tbare = false\n" + settings)
    (workspace / "v1" / "pre-commit").write_text("theirs")


def _named_folder(workspace: Path) -> Path:
    _repository(workspace, "\thooksPath = hooks\n")
    (workspace / "hooks").symlink_to("v1")
    return workspace / "hooks" / "pre-commit"


def _named_through_two(workspace: Path) -> Path:
    _repository(workspace, "\thooksPath = tools/hooks\n")
    (workspace / "tools" / "hooks").symlink_to("../current")
    (workspace / "current").symlink_to("v1")
    return workspace / "tools" / "hooks" / "pre-commit"


def _hook(workspace: Path) -> Path:
    _repository(workspace)
    (workspace / ".git" / "hooks" / "pre-commit").symlink_to("../../tools/hook")
    (workspace / "tools" / "hook").symlink_to("../v1/pre-commit")
    return workspace / ".git" / "hooks" / "pre-commit"


def _hook_by_a_folder(workspace: Path) -> Path:
    _repository(workspace)
    (workspace / "current").symlink_to("v1")
    (workspace / ".git" / "hooks" / "pre-commit").symlink_to("../../current/pre-commit")
    return workspace / ".git" / "hooks" / "pre-commit"


def _included(workspace: Path) -> Path:
    _repository(workspace, "[include]\n\tpath = ../settings\n")
    (workspace / "settings").symlink_to("v1/pre-commit")
    return workspace / "settings"


def _protected(workspace: Path) -> Path:
    _repository(workspace)
    (workspace / ".envrc").symlink_to("tools/envrc")
    (workspace / "tools" / "envrc").symlink_to("../v1/pre-commit")
    return workspace / ".envrc"


def _protected_folder(workspace: Path) -> Path:
    _repository(workspace)
    (workspace / ".vscode").symlink_to("current")
    (workspace / "current").symlink_to("v1")
    return workspace / ".vscode" / "pre-commit"


@pytest.mark.parametrize(
    ("furnish", "links"),
    [
        (_named_folder, "hooks"),
        (_named_through_two, "tools/hooks"),
        (_named_through_two, "current"),
        (_hook, "tools/hook"),
        (_hook_by_a_folder, "current"),
        (_included, "settings"),
        (_protected, "tools/envrc"),
        (_protected_folder, "current"),
    ],
)
@pytest.mark.parametrize(
    "script",
    [
        "mkdir -p evil; printf '#!/bin/sh\\necho evil\\n' > evil/pre-commit; cp evil/pre-commit evil.sh; "
        "t=evil.sh; test -d {0} && t=evil; rm {0}; ln -s $PWD/$t {0}",
        "printf '#!/bin/sh\\necho evil\\n' > evil.sh; if test -d {0}; then rm {0}; mkdir {0}; mv evil.sh {0}/pre-commit; "
        "else mv evil.sh {0}; fi",
    ],
    ids=["another link", "no link"],
)
async def test_a_replaced_link_on_the_path_to_a_protected_target_is_restored(
    ground: GuardFixture, furnish: Callable[[Path], Path], links: str, script: str
) -> None:
    end = furnish(ground.workspace)
    target = os.readlink(ground.workspace / links)
    assert end.read_text() == "theirs"
    with pytest.raises(ToolError, match=links):
        await ground.shell().run(script.format(links))
    assert end.read_text() == "theirs"
    assert os.readlink(ground.workspace / links) == target


@pytest.mark.parametrize("name", [".envrc", ".vscode/tasks.json", ".vscode"])
async def test_a_program_cannot_create_the_missing_target_of_a_protected_link(ground: GuardFixture, name: str) -> None:
    link = ground.workspace / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(ground.workspace / "missing")
    with pytest.raises(ToolError, match="missing"):
        await ground.shell().run("echo evil > missing")
    assert not (ground.workspace / "missing").exists() and link.is_symlink()


async def test_a_file_that_a_protected_folder_links_to_is_read_only(ground: GuardFixture) -> None:
    for name in (".vscode", "conf"):
        (ground.workspace / name).mkdir()
    (ground.workspace / "conf" / "tasks.json").write_text("theirs")
    (ground.workspace / ".vscode" / "tasks.json").symlink_to("../conf/tasks.json")
    code, _ = await ground.run(
        "echo evil > conf/tasks.json; mv conf conf2; rm conf/tasks.json; echo fine > conf/beside"
    )
    assert code == 0 and (ground.workspace / "conf" / "beside").read_text() == "fine\n"
    assert (ground.workspace / ".vscode" / "tasks.json").read_text() == "theirs"


async def test_a_missing_link_target_cannot_be_created_behind_another_link(ground: GuardFixture) -> None:
    (ground.workspace / ".envrc").symlink_to("conf/envrc")
    with pytest.raises(ToolError, match="conf"):
        await ground.shell().run("mkdir evil; echo evil > evil/envrc; ln -s evil conf")
    assert not (ground.workspace / ".envrc").exists()


async def test_a_missing_hooks_folder_cannot_be_created_behind_a_link(ground: GuardFixture) -> None:
    _repository(ground.workspace, "\thooksPath = conf/hooks\n")
    with pytest.raises(ToolError, match="conf"):
        await ground.shell().run("mkdir -p evil/hooks; echo evil > evil/hooks/pre-commit; ln -s evil conf")
    assert not (ground.workspace / "conf").exists()


async def test_a_link_retargeted_by_the_user_between_two_programs_protects_its_new_target(ground: GuardFixture) -> None:
    hook = _named_folder(ground.workspace)
    assert await ground.run("echo up") == (0, "up\n")
    (ground.workspace / "v2").mkdir()
    (ground.workspace / "v2" / "pre-commit").write_text("newer")
    assert await ground.run("echo up") == (0, "up\n")
    (ground.workspace / "hooks").unlink()
    (ground.workspace / "hooks").symlink_to("v2")
    await ground.run("echo evil > v2/pre-commit")
    assert hook.read_text() == "newer"
