"""Files named in git's settings are found as git does: for the repository, the user and the machine."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from tests.runtime.test_guard import GuardFixture, ground  # noqa: F401  # pyright: ignore[reportUnusedImport]

from handrail.contract.errors import ToolError
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.guard import git_config_checks as vcs
from handrail.runtime.guard import git_config_reader
from handrail.sandbox.view.cached_folder_tree import FolderTree

pytestmark = pytest.mark.proves("S-07")

NAMING = [
    ("[core]\n\thooksPath = tools/hooks", "tools/hooks"),
    ("[core]\n\tfsmonitor = tools/watch", "tools/watch"),
    ("[core]\n\tfsmonitor = ./watch", "watch"),
    ("[core]\n\teditor = ./tools/edit --wait", "tools/edit"),
    ("[core]\n\tpager = less | tools/page", "tools/page"),
    ("[core]\n\tsshCommand = sh ssh.sh -x", "ssh.sh"),
    ("[core]\n\taskPass = tools/ask", "tools/ask"),
    ("[core]\n\tgitProxy = tools/proxy for example.org", "tools/proxy"),
    ("[core]\n\talternateRefsCommand = tools/refs", "tools/refs"),
    ("[core]\n\tattributesFile = conf/attributes", "conf/attributes"),
    ("[core]\n\texcludesFile = conf/excludes", "conf/excludes"),
    ("[sequence]\n\teditor = python3 todo.py", "todo.py"),
    ("[gpg]\n\tprogram = bin/gpg", "bin/gpg"),
    ('[gpg "ssh"]\n\tprogram = bin/sign', "bin/sign"),
    ('[gpg "ssh"]\n\tdefaultKeyCommand = bin/key', "bin/key"),
    ("[credential]\n\thelper = !bin/credential", "bin/credential"),
    ('[credential "https://example.org"]\n\thelper = "!f() { bin/c; }; f"', "bin/c"),
    ('[filter "x"]\n\tclean = python3 scripts/clean.py %f', "scripts/clean.py"),
    ('[filter "x"]\n\tsmudge = ./smudge', "smudge"),
    ('[filter "x"]\n\tprocess = "sh -c \'./process; true\'"', "process"),
    ('[diff "x"]\n\ttextconv = scripts/conv', "scripts/conv"),
    ('[diff "x"]\n\tcommand = scripts/diff', "scripts/diff"),
    ("[diff]\n\texternal = scripts/external", "scripts/external"),
    ('[merge "x"]\n\tdriver = scripts/merge %O %A %B', "scripts/merge"),
    ('[mergetool "x"]\n\tcmd = scripts/tool', "scripts/tool"),
    ('[difftool "x"]\n\tpath = scripts/difftool', "scripts/difftool"),
    ("[interactive]\n\tdiffFilter = scripts/filter", "scripts/filter"),
    ("[pager]\n\tlog = scripts/log", "scripts/log"),
    ("[alias]\n\tst = !./status.sh", "status.sh"),
    ("[alias]\n\tlg = -c core.pager=./page log", "page"),
    ("[blame]\n\tignoreRevsFile = .git-blame-ignore-revs", ".git-blame-ignore-revs"),
    ("[commit]\n\ttemplate = .gitmessage", ".gitmessage"),
    ("[init]\n\ttemplateDir = template", "template"),
    ("[uploadpack]\n\tpackObjectsHook = scripts/pack", "scripts/pack"),
    ('[submodule "x"]\n\tupdate = !scripts/update', "scripts/update"),
    ('[remote "x"]\n\tuploadpack = scripts/upload', "scripts/upload"),
    ('[hook "x"]\n\tcommand = scripts/hook', "scripts/hook"),
    ('[trailer "x"]\n\tcommand = scripts/trailer', "scripts/trailer"),
    ('[tar "x"]\n\tcommand = scripts/tar', "scripts/tar"),
    ("[sendemail]\n\tsendmailCmd = scripts/send", "scripts/send"),
    ("[gc]\n\trecentObjectsHook = scripts/gc", "scripts/gc"),
    ("[core]\n\tpager = $(git rev-parse --show-toplevel)/tools/page", "tools/page"),
    ('[core]\n\tpager = "`pwd`/tools/page"', "tools/page"),
    ("[core]\n\tpager = ${PWD}/tools/page", "tools/page"),
    ("[core]\n\tsshCommand = ssh -F./conf/ssh", "conf/ssh"),
    ("[core]\n\tsshCommand = ssh -F conf/ssh", "conf/ssh"),
    ("[alias]\n\tup = !cd tools && ./update", "tools/update"),
    ("[alias]\n\tcheck = rebase -x ./tools/check main", "tools/check"),
    ("[alias]\n\tcheck = rebase --exec=tools/check", "tools/check"),
    ("[alias]\n\tbad = bisect run ./tools/check", "tools/check"),
    ("[alias]\n\tall = submodule foreach ./tools/all", "tools/all"),
    ("[alias]\n\td = difftool --extcmd tools/diff", "tools/diff"),
    ('[some "key"]\n\tofTomorrow = scripts/tomorrow', "scripts/tomorrow"),
]
NAMING_NOTHING = [
    "[core]\n\tfsmonitor = true\n\teditor = vim\n\tpager = less -R",
    "[user]\n\tname = A B\n\temail = a.b@example.org",
    '[remote "origin"]\n\turl = ../other/repo.git\n\tfetch = +refs/heads/*:refs/remotes/origin/*',
    "[alias]\n\tlg = log --graph src/a.py",
    "[safe]\n\tdirectory = src",
    '[branch "a/b.c"]\n\tmerge = refs/heads/a',
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")] + ["EDITOR", "VISUAL", "PAGER"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("home", "xdg/git", "ws/.git"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path.resolve() / "ws"


def pointed(workspace: Path) -> set[str]:
    tree = FolderTree(str(workspace))
    tree.refresh()
    return {os.path.relpath(path, workspace) for path in vcs.find_paths_named_by_git(tree).targets}


def files(workspace: Path) -> RootedFiles:
    return RootedFiles(SessionRoots(workspace), SeenFileHashes(), lambda capability, target: None)


@pytest.mark.parametrize("where", ["repository", "home", "xdg", "system", "included", "environment"])
@pytest.mark.parametrize(("text", "path"), NAMING)
def test_a_path_named_by_a_git_setting_is_found_in_every_configuration_source(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, where: str, text: str, path: str
) -> None:
    home = workspace.parent / "home"
    if where == "repository":
        (workspace / ".git" / "config").write_text(text)
    elif where == "home":
        (home / ".gitconfig").write_text(text)
    elif where == "xdg":
        (workspace.parent / "xdg" / "git" / "config").write_text(text)
    elif where == "system":
        (home / "system").write_text(text)
        monkeypatch.delenv("GIT_CONFIG_NOSYSTEM")
        monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(home / "system"))
    elif where == "included":
        (home / ".gitconfig").write_text('[includeIf "gitdir:~/never/"]\n\tpath = one\n')
        (home / "one").write_text("[include]\n\tpath = ~/two\n")
        (home / "two").write_text(text)
    else:
        section, _, entry = text[1:].partition("]\n\t")
        section, _, middle = section.partition(" ")
        name, _, value = entry.partition(" = ")
        if value.startswith('"'):
            value = value[1:-1]
        key = f"{section}.{middle.strip(chr(34))}.{name}" if middle else f"{section}.{name}"
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", key)
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", value)
    assert path in pointed(workspace)


@pytest.mark.parametrize(
    "value", ["$HOME/ws/edit", '\\"${HOME}/ws/edit\\" -w', "~/ws/edit", "~somebody/ws/edit", "~nobody-here/x ~/ws/edit"]
)
def test_a_home_folder_has_several_names(workspace: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOME", str(workspace.parent))
    users = {"somebody": pwd.struct_passwd(("somebody", "x", 1, 1, "", str(workspace.parent), "/bin/sh"))}
    monkeypatch.setattr(pwd, "getpwnam", users.__getitem__)
    (workspace.parent / ".gitconfig").write_text(f'[core]\n\teditor = "{value}"\n')
    assert "edit" in pointed(workspace)


@pytest.mark.parametrize("text", NAMING_NOTHING)
def test_git_settings_without_file_names_protect_no_path(workspace: Path, text: str) -> None:
    (workspace / ".git" / "config").write_text(text)
    assert pointed(workspace) == set()


def test_a_folder_argument_in_a_git_alias_is_not_protected_as_a_program(workspace: Path) -> None:
    (workspace.parent / "home" / ".gitconfig").write_text("[alias]\n\tb = !make -C ./build && ./run.sh\n")
    (workspace / "build").mkdir()
    assert pointed(workspace) == {"run.sh"}


def test_git_environment_variables_count_as_settings(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_EDITOR", "./edit")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.hooksPath=hooks.d' 'core.pager'='./page'")
    assert pointed(workspace) == {"edit", "hooks.d", "page"}


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "huge", "broken", "loop", "binary"])
def test_an_unreadable_git_configuration_is_skipped_without_delay(workspace: Path, kind: str) -> None:
    path = workspace.parent / "home" / ".gitconfig"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "broken":
        path.write_text("[core\nhooksPath = x/y")
    elif kind == "loop":
        path.write_text("[include]\n\tpath = .gitconfig\n[core]\n\thooksPath = hooks.d\n")
    else:
        path.write_bytes(b"\0\xff[core]")
    assert pointed(workspace) <= {"hooks.d"}


def test_a_change_of_the_git_settings_is_detected(workspace: Path) -> None:
    path = workspace.parent / "home" / ".gitconfig"
    assert pointed(workspace) == set()
    path.write_text("[core]\n\thooksPath = one\n")
    assert pointed(workspace) == {"one"}
    path.write_text("[core]\n\thooksPath = seven\n")
    assert pointed(workspace) == {"seven"}


async def test_file_tools_cannot_write_paths_named_by_git_settings(workspace: Path) -> None:
    (workspace.parent / "home" / ".gitconfig").write_text("[core]\n\thooksPath = my-hooks\n[alias]\n\tx = !sh x.sh\n")
    (workspace / "sub" / ".git").mkdir(parents=True)
    (workspace / "sub" / ".git" / "config").write_text("[core]\n\tfsmonitor = ./watch\n")
    for name in ("my-hooks/pre-commit", "x.sh", "sub/my-hooks/pre-commit", "sub/watch", "sub/x.sh"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files(workspace).write(name, b"x")
    assert (await files(workspace).write("sub/other.sh", b"x")).created


async def test_the_git_settings_of_a_repository_also_protect_subfolders_and_linked_work_trees(workspace: Path) -> None:
    (workspace / ".git" / "config").write_text("[core]\n\thooksPath = inner/hooks.d\n")
    (workspace / "inner" / "deep").mkdir(parents=True)
    assert pointed(workspace / "inner") == {"hooks.d"}
    with pytest.raises(ToolError, match="no rule can allow it"):
        await files(workspace / "inner").write("hooks.d/pre-commit", b"x")
    (workspace / ".git" / "worktrees" / "w").mkdir(parents=True)
    (workspace / ".git" / "worktrees" / "w" / "commondir").write_text("../..\n")
    (workspace.parent / "linked").mkdir()
    (workspace.parent / "linked" / ".git").write_text(f"gitdir: {workspace}/.git/worktrees/w\n")
    with pytest.raises(ToolError, match="no rule can allow it"):
        await files(workspace.parent / "linked").write("inner/hooks.d/x", b"x")


def test_cached_git_settings_of_the_user_are_read_again_without_opening_files(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace.parent / "home" / ".gitconfig").write_text("[core]\n\thooksPath = one\n")
    first = git_config_reader.read_user_and_system_git_paths()
    monkeypatch.setattr(os, "open", None)
    assert git_config_reader.read_user_and_system_git_paths() == first


async def test_programs_cannot_write_paths_named_by_the_users_git_settings(
    ground: GuardFixture,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ground.place / "gitconfig"
    settings.write_text("[core]\n\thooksPath = my-hooks\n\tfsmonitor = ./watch\n[alias]\n\tb = !make -C ./build\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    (ground.workspace / "my-hooks").mkdir()
    (ground.workspace / "my-hooks" / "pre-commit").write_text("theirs")
    code, _ = await ground.run(
        "echo x > my-hooks/pre-commit; echo x > my-hooks/new; mkdir build; echo x > build/out; true"
    )
    assert code == 0 and os.listdir(ground.workspace / "my-hooks") == ["pre-commit"]
    assert (ground.workspace / "my-hooks" / "pre-commit").read_text() == "theirs"
    assert (ground.workspace / "build" / "out").exists()
    error = await ground.vetoed("echo x > watch")
    assert "watch" in error.text and not (ground.workspace / "watch").exists()


async def test_the_target_of_a_link_in_a_hooks_folder_is_protected(workspace: Path) -> None:
    hooks = workspace / ".git" / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").symlink_to("../../scripts/check.sh")
    (workspace / "team").mkdir()
    (workspace / "team" / "commit-msg").symlink_to("../scripts/message.sh")
    (workspace / ".git" / "config").write_text("[core]\n\thooksPath = team\n")
    assert pointed(workspace) == {"scripts/check.sh", "scripts/message.sh", "team"}
    for name in ("scripts/check.sh", "scripts/message.sh"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files(workspace).write(name, b"x")
    assert (await files(workspace).write("scripts/other.sh", b"x")).created


async def test_file_tools_cannot_write_the_target_of_a_link_with_a_protected_name(workspace: Path) -> None:
    (workspace / "conf").mkdir()
    (workspace / ".envrc").symlink_to("conf/env.sh")
    (workspace / ".vscode").symlink_to("conf/editor")
    (workspace / "conf" / "lefthook.yml").symlink_to("hooks.yml")
    (workspace / "README").symlink_to("conf/readme.md")
    for name in ("conf/env.sh", "conf/editor/tasks.json", "conf/hooks.yml"):
        with pytest.raises(ToolError, match="no rule can allow it"):
            await files(workspace).write(name, b"x")
    assert (await files(workspace).write("conf/readme.md", b"x")).created


async def test_programs_cannot_write_the_target_of_a_link_in_the_hooks_folder(ground: GuardFixture) -> None:  # noqa: F811
    for name in (".git/hooks", ".git/objects", ".git/refs", "scripts"):
        (ground.workspace / name).mkdir(parents=True)
    (ground.workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (ground.workspace / "scripts" / "check.sh").write_text("theirs")
    (ground.workspace / ".git" / "hooks" / "pre-commit").symlink_to("../../scripts/check.sh")
    (ground.workspace / ".git" / "hooks" / "post-merge").symlink_to("../../scripts/later.sh")
    await ground.run("echo x > scripts/check.sh; mv scripts moved; true")
    assert (ground.workspace / "scripts" / "check.sh").read_text() == "theirs"
    await ground.vetoed("echo x > scripts/later.sh")
    assert not (ground.workspace / "scripts" / "later.sh").exists()
