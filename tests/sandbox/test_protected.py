"""Protected files stay unchanged while a program runs, also if their folders are renamed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.sandbox.view import protected_mounts
from handrail.sandbox.view.cached_folder_tree import FolderTree
from handrail.sandbox.view.sandbox_user import LookupCache

pytestmark = pytest.mark.proves("S-07")

WAYS = {
    "write the hook": "echo x > .git/hooks/pre-commit",
    "another hook": "echo x > .git/hooks/post-checkout",
    "rename the repository": "mv .git .git2; mkdir -p .git/hooks; echo x > .git/hooks/pre-commit",
    "rename the hooks": "mv .git/hooks .git/h2 && mkdir .git/hooks && echo x > .git/hooks/pre-commit",
    "remove the hooks": "rm -rf .git/hooks; mkdir .git/hooks; echo x > .git/hooks/pre-commit",
    "swap folders": "python3 -c \"import os; os.rename('.git', 'g'); os.makedirs('.git/hooks')\"",
    "exchange": "mkdir -p evil/hooks; mv --exchange evil .git 2>/dev/null || mv -T evil .git",
    "a link instead": "rm -rf .git; ln -s evil .git",
    "git config": "git config core.fsmonitor 'touch /tmp/owned'",
    "config by rename": "echo '[core] fsmonitor = x' > .git/config.new; mv -f .git/config.new .git/config",
    "hard link": "ln .git/config alias && echo x > alias",
    "core.hooksPath": "git config core.hooksPath evil",
    "nested": "mv deep/er away; mkdir -p deep/er/.vscode; echo x > deep/er/.vscode/tasks.json",
    "nested from above": "mv deep away; mkdir -p deep/er/.vscode; echo x > deep/er/.vscode/tasks.json",
    "unmount": "umount .git/hooks; umount -l .git/config; mount -o remount,rw .git/hooks; echo x > .git/hooks/pre-commit",
    "through /proc": "echo x > /proc/self/cwd/.git/hooks/pre-commit; echo x > /proc/self/root$PWD/.git/config",
}


def state(workspace: Path) -> dict[str, str]:
    names = (".git/hooks/pre-commit", ".git/config", "deep/er/.vscode/tasks.json")
    return {name: (workspace / name).read_text() for name in names}


def furnish(workspace: Path) -> None:
    for name in (".git/objects", ".git/refs", ".git/hooks", "deep/er/.vscode"):
        (workspace / name).mkdir(parents=True)
    (workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (workspace / ".git" / "config").write_text("[core]\n\tbare = false\n")
    (workspace / ".git" / "hooks" / "pre-commit").write_text("theirs")
    (workspace / "deep" / "er" / ".vscode" / "tasks.json").write_text("theirs")


@pytest.mark.parametrize("way", WAYS)
async def test_a_program_cannot_change_a_pinned_path_by_any_known_method(confined: SandboxFolders, way: str) -> None:
    furnish(confined.workspace)
    before = state(confined.workspace)
    tree = FolderTree(str(confined.workspace))
    tree.refresh()
    pinned = protected_mounts.find_read_only_protected_paths(tree)
    await confined.bash(f"{WAYS[way]}; true", pinned=pinned)
    assert state(confined.workspace) == before
    assert sorted(os.listdir(confined.workspace / ".git" / "hooks")) == ["pre-commit"]
    assert not (confined.workspace / ".git").is_symlink()


async def test_ordinary_git_work_succeeds_in_a_repository_with_pinned_paths(confined: SandboxFolders) -> None:
    furnish(confined.workspace)
    tree = FolderTree(str(confined.workspace))
    tree.refresh()
    script = "echo a > a && git add a && git commit -qm one && git checkout -qb other && git log --oneline | wc -l"
    ran = await confined.bash(script, pinned=protected_mounts.find_read_only_protected_paths(tree))
    assert (ran.code, ran.out.strip()) == (0, "1"), ran.errors


@pytest.mark.proves("P-01")
async def test_a_masked_file_is_neither_read_nor_renamed_out_of_its_mask(confined: SandboxFolders) -> None:
    hidden = ("secrets/a/key", ".env", "vault/x")
    for name in (*hidden, "secrets/b", "plain"):
        (confined.workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (confined.workspace / name).write_text("TOP-SECRET" if name in hidden else "to be seen")
    masked = tuple(str(confined.workspace / name) for name in ("secrets/a/key", ".env", "vault"))
    script = (
        "cat secrets/a/key .env vault/x; cp -r secrets c1; mv secrets s2; mv secrets/a a2; mv .env e2; ln .env e3;"
        "ls -la vault; chmod 777 .env vault; cat .env vault/x; umount .env; cat .env; tar c . | strings | grep TOP;"
        "cat /proc/self/cwd/.env; head -c 20 < .env; python3 -c \"print(open('.env').read())\"; rm -rf secrets vault;"
        "cat secrets/b plain c1/b"
    )
    ran = await confined.bash(script, masked=masked)
    assert "TOP-SECRET" not in ran.out + ran.errors
    for name in hidden:
        assert (confined.workspace / name).read_text() == "TOP-SECRET"
    others = [path for path in confined.workspace.rglob("*") if path.is_file()]
    names = {path.relative_to(confined.workspace).as_posix(): path.read_text() for path in others}
    assert {name for name, text in names.items() if "TOP-SECRET" in text} == set(hidden)


@pytest.mark.proves("P-01")
async def test_a_masked_file_is_hidden_in_a_read_only_workspace(confined: SandboxFolders) -> None:
    (confined.workspace / ".env").write_text("TOP-SECRET")
    ran = await confined.bash(
        "cat .env; cat -- ./.env", masked=(str(confined.workspace / ".env"),), workspace_writable=False
    )
    assert "TOP-SECRET" not in ran.out and "Permission denied" in ran.errors


def test_the_state_of_mounted_paths_changes_after_a_file_is_replaced(ground: SandboxFolders) -> None:
    furnish(ground.workspace)
    (ground.workspace / ".env").write_text("one")
    profile = ground.profile(pinned=(str(ground.workspace / ".git/hooks"),), masked=(str(ground.workspace / ".env"),))
    seen = protected_mounts.read_mounted_path_states(profile, LookupCache())
    assert protected_mounts.read_mounted_path_states(profile, LookupCache()) == seen
    (ground.workspace / "new").write_text("two")
    (ground.workspace / "new").rename(ground.workspace / ".env")
    changed = protected_mounts.read_mounted_path_states(profile, LookupCache())
    assert changed != seen
    (ground.workspace / ".git").rename(ground.workspace / "g2")
    (ground.workspace / ".git").mkdir()
    (ground.workspace / "g2" / "hooks").rename(ground.workspace / ".git" / "hooks")
    assert protected_mounts.read_mounted_path_states(profile, LookupCache()) not in (seen, changed)
    (ground.workspace / "handrail.toml").write_text("")
    assert len(protected_mounts.read_mounted_path_states(profile, LookupCache())) > len(changed)


def scattered(root: Path, count: int, name: str = ".env", around: str = "") -> None:
    for number in range(count):
        folder = root / around / f"d{number}"
        folder.mkdir(parents=True)
        (folder / name).write_text("TOP-SECRET")
        (folder / "plain").write_text("plain")


def looked(root: Path) -> FolderTree:
    tree = FolderTree(str(root))
    tree.refresh()
    return tree


def hides_env(path: str) -> bool:
    return path.endswith("/.env")


@pytest.mark.parametrize(("count", "around"), [(451, ""), (451, "services"), (900, ""), (5_000, "a/b")])
async def test_many_hidden_files_in_many_folders_do_not_stop_programs_from_running(
    confined: SandboxFolders, count: int, around: str
) -> None:
    scattered(confined.workspace, count, around=around)
    (confined.workspace / "other").mkdir()
    tree = looked(confined.workspace)
    pinned, masked = protected_mounts.fold_mounts_into_folders(
        [tree], (), protected_mounts.find_hidden_and_unreadable_paths(tree, hides_env, "k")
    )
    assert len(masked) <= protected_mounts.MAX_MOUNTS and str(confined.workspace) not in masked
    ran = await confined.bash(
        "grep -rs TOP-SECRET . ; find . -name .env -exec cat {} + ; echo x > other/new; echo worked",
        pinned=pinned,
        masked=masked,
    )
    assert ran.out.endswith("worked\n") and "TOP-SECRET" not in ran.out
    assert (confined.workspace / "other" / "new").read_text() == "x\n"


@pytest.mark.parametrize("around", ["", "a/b"])
async def test_many_protected_files_in_many_folders_do_not_stop_programs_from_running(
    confined: SandboxFolders, around: str
) -> None:
    scattered(confined.workspace, 700, name=".envrc", around=around)
    tree = looked(confined.workspace)
    pinned, masked = protected_mounts.fold_mounts_into_folders(
        [tree], protected_mounts.find_read_only_protected_paths(tree), ()
    )
    assert masked == () and len(pinned) <= protected_mounts.MAX_MOUNTS
    ran = await confined.bash("for f in $(find . -name .envrc); do echo evil > $f; done; echo worked", pinned=pinned)
    assert ran.out == "worked\n"
    assert {path.read_text() for path in confined.workspace.rglob(".envrc")} == {"TOP-SECRET"}


def test_too_many_hidden_files_in_the_root_folder_are_refused_with_a_remedy(tmp_path: Path) -> None:
    for number in range(protected_mounts.MAX_MOUNTS + 1):
        (tmp_path / f"{number}.env").write_text("x")
    tree = looked(tmp_path)
    with pytest.raises(ToolError, match=r"1,001 paths.*allow.*\.env") as caught:
        protected_mounts.fold_mounts_into_folders(
            [tree], (), protected_mounts.find_hidden_and_unreadable_paths(tree, lambda path: path.endswith(".env"), "k")
        )
    assert caught.value.kind == "unavailable" and str(tmp_path) in caught.value.text


def test_folders_with_the_fewest_other_files_are_hidden_completely(tmp_path: Path) -> None:
    for number in range(450):
        (tmp_path / "keys").mkdir(exist_ok=True)
        (tmp_path / "keys" / f"{number}.env").write_text("x")
    (tmp_path / "src").mkdir()
    for number in range(50):
        (tmp_path / "src" / f"{number}.py").write_text("x")
    for number in range(20):
        (tmp_path / "src" / f"{number}.env").write_text("x")
    tree = looked(tmp_path)
    masked = protected_mounts.find_hidden_and_unreadable_paths(tree, lambda path: path.endswith(".env"), "k")
    pinned, masked = protected_mounts.fold_mounts_into_folders([tree], (), masked)
    assert pinned == () and str(tmp_path / "keys") in masked and len(masked) == 21
    assert protected_mounts.fold_mounts_into_folders([tree], (), masked) == ((), masked)
