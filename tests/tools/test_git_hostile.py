"""Repositories that try to run programs: no tool runs any of them.

Each of its programs would leave a file in HOME, which may be written in every sandbox. That they do run where git is not
kept from it is shown by ``bash``, in the same sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tools.desk import BuiltinToolFixture, refused
from tests.tools.repositories import Repo, create_repository

from handrail.contract.errors import ToolError
from handrail.tools.git import GIT_TOOLS, git_repository

pytestmark = pytest.mark.proves("T-05a", "S-07")


class TrapPrograms:
    """Programs that leave a sign when they are run."""

    def __init__(self, desk: BuiltinToolFixture) -> None:
        self._signs = Path(desk.around.scratch) / "ran"
        self._signs.mkdir(exist_ok=True)
        self._folder = desk.workspace / ".git" / "traps"
        self._folder.mkdir(exist_ok=True)

    def program(self, name: str) -> str:
        """An executable file of that name."""
        file = self._folder / name
        file.write_text(f"#!/bin/sh\n{self.text(name)}\ncat 2>/dev/null\nexit 0\n")
        file.chmod(0o755)
        return str(file)

    def text(self, name: str) -> str:
        return f"touch {self._signs}/{name}"

    def sprung(self) -> list[str]:
        """Which ran since the last look."""
        found = sorted(file.name for file in self._signs.iterdir())
        for name in found:
            (self._signs / name).unlink()
        return found


HOOKS = (
    *(
        "pre-commit",
        "prepare-commit-msg",
        "commit-msg",
        "post-commit",
        "post-checkout",
        "post-merge",
        "pre-merge-commit",
    ),
    *("pre-push", "reference-transaction", "post-index-change", "post-rewrite", "pre-auto-gc", "pre-applypatch"),
)
PROGRAMS = (
    *("core.fsmonitor", "core.editor", "core.pager", "core.askPass", "core.sshCommand", "core.gitProxy"),
    *("core.alternateRefsCommand", "sequence.editor", "diff.external", "gpg.program", "gpg.ssh.program"),
    *("pager.log", "pager.diff", "pager.status", "pager.show", "pager.branch", "credential.helper"),
    *(
        "diff.evil.command",
        "diff.evil.textconv",
        "merge.evil.driver",
        "interactive.diffFilter",
        "uploadpack.packObjectsHook",
    ),
    *("alias.status", "alias.log", "alias.commit", "trailer.sign.command", "submodule.x.update", "remote.origin.vcs"),
    *(
        "remote.origin.uploadpack",
        "remote.origin.receivepack",
        "hook.mine.command",
        "credential.https://example.org.helper",
    ),
)
SWITCHES = {
    "commit.gpgSign": "true",
    "tag.gpgSign": "true",
    "log.showSignature": "true",
    "merge.verifySignatures": "true",
    "hook.mine.event": "pre-commit",
    "merge.default": "evil",
    "commit.verbose": "true",
    "submodule.recurse": "true",
    "core.hooksPath": "",
    "gc.auto": "1",
    "protocol.ext.allow": "always",
}


def spring(repo: Repo, traps: TrapPrograms) -> None:
    """Put everything that would be run into a repository's hooks and configuration; part of it in an included file."""
    hooks = repo.folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in HOOKS:
        Path(traps.program(name)).rename(hooks / name)
    lines: list[str] = []
    for key in PROGRAMS:
        section, _, name = key.rpartition(".")
        first, dot, rest = section.partition(".")
        head = f'[{first} "{rest}"]' if dot else f"[{first}]"
        # One that waited for the other end to speak first would keep both waiting.
        program = traps.text(key) if key.endswith("pack") else traps.program(key.replace("/", "-"))
        lines.append(
            f"{head}\n\t{name} = {'!' if key.startswith(('alias', 'submodule', 'credential')) else ''}{program}\n"
        )
    for key, value in SWITCHES.items():
        section, _, name = key.rpartition(".")
        first, dot, rest = section.partition(".")
        head = f'[{first} "{rest}"]' if dot else f"[{first}]"
        if value:
            lines.append(f"{head}\n\t{name} = {value}\n")
    included = repo.put(".git/more", "".join(lines[len(lines) // 2 :]))
    repo.configure("".join(lines[: len(lines) // 2]) + f"[include]\n\tpath = {included}\n")
    repo.configure('[includeIf "gitdir:**"]\n\tpath = more\n[branch "main"]\n\tmergeOptions = --strategy=evil\n')
    repo.put(".git/info/attributes", "* diff=evil merge=evil\n")


@pytest.fixture
def traps(desk: BuiltinToolFixture, repo: Repo) -> TrapPrograms:
    """A repository with two branches in conflict, a change, and all its traps set."""
    repo.commit("first", a="1\n", b="1\n")
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("side", a="side\n")
    repo.git("checkout", "--quiet", "main")
    repo.commit("main", c="main\n")
    repo.put("b", "changed\n")
    found = TrapPrograms(desk)
    spring(repo, found)
    return found


async def test_git_in_bash_runs_the_programs_of_a_hostile_repository(
    desk: BuiltinToolFixture, traps: TrapPrograms
) -> None:
    await desk.call("bash", command="git status; git diff; git commit -a -m x; git checkout side")
    assert {"core.fsmonitor", "diff.evil.command", "post-checkout"} <= set(traps.sprung())


async def test_no_git_tool_runs_a_program_configured_in_the_repository(
    desk: BuiltinToolFixture, traps: TrapPrograms, repo: Repo
) -> None:
    calls: Sequence[tuple[str, dict[str, Any]]] = (
        ("git.status", {}),
        ("git.log", {"paths": ["a"]}),
        ("git.diff", {}),
        ("git.diff", {"from": "side"}),
        ("git.show", {"ref": "side"}),
        ("git.blame", {"path": "b"}),
        ("git.branches", {}),
        ("git.add", {"paths": ["b"]}),
        ("git.commit", {"message": "x"}),
        ("git.create_branch", {"name": "more"}),
        ("git.checkout", {"ref": "side"}),
        ("git.checkout", {"ref": "main"}),
        ("git.merge", {"ref": "side"}),
    )
    for name, arguments in calls:
        await desk.call(name, **arguments)
        assert traps.sprung() == [], name
    assert repo.folder.joinpath("a").read_text() == "side\n"
    repo.put("a", "again\n")
    for action in ("push", "list", "show", "apply", "drop"):
        await desk.call("git.stash", action=action)
        assert traps.sprung() == [], action


async def test_a_merge_driver_of_the_repository_does_not_run_and_leaves_a_conflict(
    desk: BuiltinToolFixture, traps: TrapPrograms, repo: Repo
) -> None:
    repo.put("a", "ours\n")
    await desk.call("git.commit", message="ours", all=True)
    error = await refused(desk.call("git.merge", ref="side"), "conflict")
    assert error.data == {"conflicts": [{"path": "a", "change": "modified by both"}]}
    assert traps.sprung() == []


async def test_clones_and_pushes_by_path_run_no_program_of_either_repository(
    desk: BuiltinToolFixture, traps: TrapPrograms, repo: Repo
) -> None:
    cloned = await desk.call("git.clone", source=".", path="copy")
    assert (cloned["branch"], (desk.workspace / "copy/c").read_text()) == ("main", "main\n")
    copy = Repo(desk.workspace / "copy")
    copy.git("checkout", "--quiet", "-b", "fresh")
    copy.commit("from the copy", d="1\n")
    spring(copy, traps)
    # What would turn the push elsewhere is no program, and refused as such.
    await refused(desk.call("git.push", repository="copy"), "denied", "remote.origin.vcs")
    more = desk.workspace / "copy/.git/more"
    more.write_text(re.sub(r"\tvcs = .*\n", "", more.read_text()))
    assert "\treceivepack = " in more.read_text()
    bare = repo.git("init", "--quiet", "--bare", "bare.git")
    assert bare == ""
    for name in ("pre-receive", "update", "post-receive", "post-update", "reference-transaction", "proc-receive"):
        hooks = desk.workspace / "bare.git/hooks"
        hooks.mkdir(exist_ok=True)
        Path(traps.program(name)).rename(hooks / name)
    with (desk.workspace / "bare.git/config").open("a") as file:
        file.write(f"[core]\n\thooksPath = {hooks}\n")
    config = desk.workspace / "copy/.git/config"
    config.write_text(config.read_text().replace(f"url = {desk.workspace}", "url = ../bare.git"))
    pushed = await desk.call("git.push", repository="copy", set_upstream=True)
    assert pushed["result"] == "new branch"
    with (desk.workspace / "bare.git/config").open("a") as file:
        file.write("[receive]\n\tprocReceiveRefs = refs/heads\n")  # leaves references to a hook, which does not run
    copy.put("d", "2\n")
    await desk.call("git.commit", repository="copy", message="more", all=True)
    await refused(desk.call("git.push", repository="copy"), "conflict", "rejected fresh")
    assert traps.sprung() == []


RECEIVER = "receivepack = {program}; git-receive-pack"
ENDS: Sequence[str] = (
    f'[remote "loc"]\n\turl = ../target\n\t{RECEIVER}\n',
    f'[remote "loc"]\n\t{RECEIVER}\n\turl = ../target\n\treceivepack = git-receive-pack\n',
    '[remote "loc"]\n\turl = ../target\n\treceivepack = git-receive-pack\n',
    f'[remote "loc"]\n\turl = ../target\n[include]\n\tpath = more\n#{RECEIVER}\n',
    f'[extensions]\n\tworktreeConfig = true\n[remote "loc"]\n\turl = ../target\n#{RECEIVER}\n',
    f'[remote "loc"]\n\turl = ../elsewhere\n\tpushurl = ../target\n\t{RECEIVER}\n',
    f'[remote "loc"]\n\turl = up:x\n\t{RECEIVER}\n'
    '[url "../target"]\n\tpushInsteadOf = up:x\n\tpushInsteadOf = up\n[url "ext::{program} "]\n\tinsteadOf = up:\n',
    '[remote "loc"]\n\turl = up:get\n[url "../tar"]\n\tinsteadOf = no\n\tinsteadOf = up:\n'
    '[url "ext::{program} "]\n\tinsteadOf = up\n[core]\n\tgitProxy = {program}\n\tgitProxy = {program} for x\n',
    # What is there already would be asked for first, of a remote that is named by its address.
    '[remote "loc"]\n\turl = ../target\n[push]\n\tnegotiate = true\n'
    '[remote "../target"]\n\turl = ../target\n\tuploadpack = {program}; git-upload-pack\n',
    # An object that is missing would be fetched from a remote that promises it.
    '[remote "loc"]\n\turl = ../target\n[core]\n\trepositoryFormatVersion = 1\n[extensions]\n\tpartialClone = far\n'
    '[remote "far"]\n\turl = ../target\n\tpromisor = true\n\tuploadpack = {program}; git-upload-pack\n',
)
"""Configurations whose ``loc`` is a push to ``../target``, with what would run something on the way."""


@pytest.mark.parametrize("configuration", ENDS, ids=[f"end{n}" for n in range(len(ENDS))])
async def test_a_push_or_clone_by_path_runs_no_configured_program(
    desk: BuiltinToolFixture, repo: Repo, configuration: str
) -> None:
    source, target = create_repository(desk.workspace / "source"), create_repository(desk.workspace / "target")
    first, _ = source.commit("first", a="1\n"), target.commit("there", b="1\n")
    blob = source.git("rev-parse", "HEAD:a")
    source.git("branch", "fresh")
    traps = TrapPrograms(desk)
    for one in (source, target):
        for name in (*HOOKS, "pre-receive", "update", "post-receive", "post-update", "push-to-checkout"):
            (one.folder / ".git/hooks").mkdir(exist_ok=True)
            Path(traps.program(name)).rename(one.folder / ".git/hooks" / name)
    program = traps.text("program")
    source.configure(configuration.replace("{program}", program))
    # Files that are read beside it, and what is read of the folder that a clone is started in.
    named = f'[remote "loc"]\n\t{RECEIVER}\n'.replace("{program}", program)
    for name in ("more", "config.worktree"):
        source.put(f".git/{name}", named)
    repo.configure(f'[remote "origin"]\n\tuploadpack = {program}; git-upload-pack\n')
    push = desk.call("git.push", repository="source", remote="loc", branch="fresh")
    if "promisor" in configuration:
        (source.folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
        with pytest.raises(ToolError):
            await push
    else:
        assert (await push)["result"] == "new branch"
        assert target.git("rev-parse", "fresh") == first
        assert (await desk.call("git.clone", source="source", path="copy"))["branch"] == "main"
    assert traps.sprung() == []


async def test_programs_configured_in_a_submodule_are_not_run(desk: BuiltinToolFixture, repo: Repo) -> None:
    inner = create_repository(desk.workspace / "sub")
    inner.commit("inner", x="1\n")
    repo.put(".gitmodules", '[submodule "sub"]\n\tpath = sub\n\turl = ./sub\n\tignore = none\n')
    repo.commit("with a submodule", a="1\n")
    traps = TrapPrograms(desk)
    inner.configure(f"[core]\n\tfsmonitor = {traps.program('inner')}\n")
    inner.put("x", "2\n")
    repo.put("a", "2\n")
    await desk.call("bash", command="git status")
    assert traps.sprung() == ["inner"]
    for name, arguments in (
        ("git.status", {}),
        ("git.diff", {}),
        ("git.diff", {"from": "HEAD"}),
        ("git.add", {"all": True}),
        ("git.commit", {"message": "x"}),
        ("git.commit", {"message": "x", "amend": True, "all": True}),
        ("git.create_branch", {"name": "more"}),
        ("git.checkout", {"ref": "more"}),
        ("git.merge", {"ref": "main"}),
        ("git.checkout", {"ref": "main", "paths": ["a"]}),
    ):
        await desk.call(name, **arguments)
        assert traps.sprung() == [], name
    await refused(desk.call("git.stash"), "unavailable", "submodules")
    await refused(desk.call("git.commit", message="nothing"), "failed", "Nothing is staged")
    assert traps.sprung() == []


async def test_a_filter_program_does_not_run_and_changes_to_its_files_are_refused(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    repo.commit("first", a="1\n", b__big="pointer\n")
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("side", a="side\n", b__big="another pointer\n")
    repo.git("checkout", "--quiet", "main")
    repo.commit("attributes", __gitattributes="*.big filter=large\n")
    traps = TrapPrograms(desk)
    for direction in ("clean", "smudge", "process"):
        repo.configure(f'[filter "large"]\n\t{direction} = {traps.program(direction)}\n')
    repo.put("a", "2\n")
    repo.put("b.big", "the whole\n")
    status = await desk.call("git.status")
    assert [one["path"] for one in status["unstaged"]] == ["a", "b.big"]
    assert "large" in status["skipped_filters"]
    assert "+the whole" in (await desk.call("git.diff"))["patch"]
    await refused(desk.call("git.add", all=True), "unavailable", "large", "bash")
    assert (await desk.call("git.status"))["staged"] == []
    assert (await desk.call("git.add", paths=["a"]))["staged"] == ["a"]
    await desk.call("git.commit", message="only a")
    await refused(desk.call("git.commit", message="x", all=True), "unavailable", "large")
    await refused(desk.call("git.stash"), "unavailable", "large")
    await refused(desk.call("git.checkout", paths=["b.big"]), "unavailable", "large")
    await refused(desk.call("git.checkout", ref="side"), "unavailable", "large")
    await refused(desk.call("git.merge", ref="side"), "unavailable", "large")
    assert (desk.workspace / "b.big").read_text() == "the whole\n"
    assert traps.sprung() == []


OPTION = "--upload-pack=touch x"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("git.log", {"ref": "--output=x"}),
        ("git.show", {"ref": "--ext-diff"}),
        ("git.diff", {"from": "-O/etc/passwd"}),
        ("git.blame", {"path": "a", "ref": "--contents=/etc/passwd"}),
        ("git.create_branch", {"name": "x", "start": OPTION}),
        ("git.checkout", {"ref": "-b"}),
        ("git.merge", {"ref": "--strategy=x"}),
        ("git.clone", {"source": ".", "path": "c", "branch": OPTION}),
        ("git.log", {"ref": "main\nx"}),
    ],
)  # fmt: skip
async def test_no_argument_is_passed_to_git_as_an_option(
    desk: BuiltinToolFixture, repo: Repo, name: str, arguments: dict[str, Any]
) -> None:
    repo.commit("first", a="1\n")
    await refused(desk.call(name, **arguments), "invalid_input", "")


async def test_paths_that_look_like_options_or_patterns_are_treated_as_paths(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    names = ["--output=x", ":(exclude)a", "*", "-O"]
    repo.commit("first", a="1\n")
    for name in names:
        repo.put(name, "1\n")
    assert set((await desk.call("git.add", paths=names))["staged"]) == set(names)
    await desk.call("git.commit", message="odd names")
    assert [one["subject"] for one in (await desk.call("git.log", paths=["*"]))["commits"]] == ["odd names"]
    assert len((await desk.call("git.blame", path="--output=x"))["lines"]) == 1
    assert (await desk.call("git.show", file=":(exclude)a"))["content"] == "1\n"
    await desk.call("git.clone", source=".", path="--mirror")
    assert (desk.workspace / "--mirror/.git/HEAD").exists()


async def test_a_configuration_with_too_many_programs_is_refused(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.configure("".join(f'[filter "f{n}"]\n\tclean = x\n' for n in range(300)))
    await refused(desk.call("git.status"), "limit", ".git/config")


async def test_a_git_version_that_ignores_the_protective_settings_is_unsafe() -> None:
    ours = git_repository.GitConfigEntry("command", "core.hookspath", "/dev/null")
    assert not git_repository.is_unsafe_git_version([ours])
    assert git_repository.is_unsafe_git_version([])
    assert git_repository.is_unsafe_git_version([ours, git_repository.GitConfigEntry("global", "user.name", "x")])


def test_every_program_that_a_git_configuration_could_name_is_overridden() -> None:
    found = [
        git_repository.GitConfigEntry("local", key.lower() if key.count(".") == 1 else key, "x") for key in PROGRAMS
    ]
    around = git_repository.make_git_environment("/ws", found)
    count = int(around["GIT_CONFIG_COUNT"])
    settings = {around[f"GIT_CONFIG_KEY_{n}"].lower(): around[f"GIT_CONFIG_VALUE_{n}"] for n in range(count)}
    harmless = {"", ":", "cat", "false", "/dev/null"}
    left = [key for key in PROGRAMS if settings.get(key.lower()) not in harmless]
    # These are of commands, transports and options that no tool uses, or that variables or options of ours set.
    assert left == [
        *("core.gitProxy", "sequence.editor", "pager.log", "pager.diff", "pager.status", "pager.show", "pager.branch"),
        *("interactive.diffFilter", "uploadpack.packObjectsHook", "alias.status", "alias.log", "alias.commit"),
        *("trailer.sign.command", "submodule.x.update", "remote.origin.vcs"),
        *("remote.origin.uploadpack", "remote.origin.receivepack", "hook.mine.command"),
    ]
    assert settings["hook.mine.enabled"] == "false"
    assert {"GIT_SEQUENCE_EDITOR", "GIT_PAGER", "GIT_ALLOW_PROTOCOL"} <= around.keys()


def test_every_git_tool_describes_its_arguments() -> None:
    for spec, name in itertools.product((tool.spec for tool in GIT_TOOLS), ("parameters",)):
        assert all(one.get("description") for one in getattr(spec, name)["properties"].values()), spec.id
        assert spec.category == "git"
        assert spec.tier is None
        assert spec.id.startswith("git.")


OPENED_BY_GIT = (
    *(".git/config", ".git/HEAD", ".git/index", ".git/packed-refs", ".git/commondir", ".git/config.worktree"),
    *(".git/info/exclude", ".git/info/attributes", ".git/info/grafts", ".git/shallow", ".git/refs/heads/other"),
    *(".git/objects/info/alternates", ".git/MERGE_HEAD", ".git/refs/heads/main", ".git/info/sparse-checkout"),
    *(".gitignore", "sub/.gitignore", ".gitattributes", "sub/.gitattributes", ".gitmodules", ".mailmap"),
    *("elsewhere.ini", "sub/excludes", "sub/.git"),
)


def stand_in(place: Path, kind: str, repo: Repo) -> None:
    """Replace a file with a special file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink() or place.exists():
        place.unlink()
    match kind:
        case "fifo":
            os.mkfifo(place)
        case "socket":
            folder = os.open(place.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as here:  # whose name has to be short
                here.bind(f"/proc/self/fd/{folder}/{place.name}")
            os.close(folder)
        case "folder":
            place.mkdir()
        case "loop":
            place.symlink_to(place.name)
        case "link to a fifo":
            os.mkfifo(repo.folder / "far away") if not (repo.folder / "far away").exists() else None
            place.symlink_to(repo.folder / "far away")
        case "link out":
            place.symlink_to("/dev/zero" if place.name != "HEAD" else "/etc/passwd")
        case _:
            with place.open("wb") as file:
                file.truncate(1 << 40)


@pytest.mark.parametrize("name", OPENED_BY_GIT)
@pytest.mark.parametrize("kind", ["fifo", "link to a fifo"])
async def test_git_does_not_block_on_a_fifo_in_place_of_a_file(
    desk: BuiltinToolFixture, repo: Repo, name: str, kind: str
) -> None:
    repo.commit("one", a="1")
    repo.git("branch", "other")
    repo.configure("[include]\n\tpath = ../elsewhere.ini\n[core]\n\texcludesFile = ./sub/excludes\n")
    stand_in(repo.folder / name, kind, repo)
    (repo.folder / "sub").mkdir(exist_ok=True)
    (repo.folder / "sub" / "new").write_text("x")
    async with asyncio.timeout(60):
        for tool in ("git.status", "git.log", "git.branches", "git.diff"):
            with contextlib.suppress(ToolError):
                await desk.call(tool)
        if name != "sub/excludes":  # a person's own setting; only the git tools look at every FIFO
            await desk.call("bash", command="git status > /dev/null 2>&1; echo done")
        await desk.call("grep", pattern="x")
        await desk.call("glob", pattern="**")


async def test_the_error_names_a_fifo_in_place_of_a_git_file(desk: BuiltinToolFixture, repo: Repo) -> None:
    stand_in(repo.folder / ".git/config", "fifo", repo)
    await refused(desk.call("git.status"), "failed", "`.git/config` is a FIFO")


@pytest.mark.parametrize(
    "name",
    [
        *(".git/commondir", ".git/shallow", ".git/objects/info/alternates", ".git/refs/heads/other", ".git/MERGE_HEAD"),
        *(".mailmap", "sub/.gitignore", "sub/.git"),
    ],
)
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/../dev/urandom", "/proc/self/environ"])
async def test_git_does_not_start_where_it_would_read_a_device(
    desk: BuiltinToolFixture, repo: Repo, name: str, target: str
) -> None:
    repo.commit("one", a="1")
    (repo.folder / name).parent.mkdir(parents=True, exist_ok=True)
    (repo.folder / name).symlink_to(target)
    await refused(desk.call("git.log"), "failed", f"`{name}` is a link to /")
    (repo.folder / name).unlink()
    (repo.folder / name).symlink_to("/dev/null")
    with contextlib.suppress(ToolError):  # git may have a fault of its own to report
        await desk.call("git.log")


@pytest.mark.parametrize("value", ["/dev/zero", "//dev//random", "/proc/self/mem"])
async def test_git_does_not_run_with_a_device_in_its_configuration(
    desk: BuiltinToolFixture, repo: Repo, value: str
) -> None:
    repo.commit("one", a="1")
    repo.configure(f"[mailmap]\n\tfile = {value}\n")
    await refused(desk.call("git.log"), "failed", "mailmap.file")


async def test_git_runs_with_the_null_device_in_its_configuration(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.commit("one", a="1")
    repo.configure("[mailmap]\n\tfile = /dev/null\n")
    await desk.call("git.log")


@pytest.mark.parametrize("name", [".git/config", ".git/HEAD", ".git/index", ".git/info/exclude", ".gitignore"])
@pytest.mark.parametrize("kind", ["socket", "folder", "loop", "link out", "sparse"])
async def test_git_status_ends_with_a_special_file_in_place_of_a_git_file(
    desk: BuiltinToolFixture, repo: Repo, name: str, kind: str
) -> None:
    repo.commit("one", a="1")
    stand_in(repo.folder / name, kind, repo)
    async with asyncio.timeout(120):
        with contextlib.suppress(ToolError):
            await desk.call("git.status")


async def test_the_event_loop_keeps_running_while_many_paths_are_checked_against_rules(
    desk: BuiltinToolFixture,
) -> None:
    runtime = desk.runtime(next(tool for tool in GIT_TOOLS if tool.spec.id == "git.add"))
    desk.refuse[f"{desk.workspace}/f7"] = "a rule"
    few = [f"{desk.workspace}/f{number}" for number in range(10)]
    assert await runtime.shell.list_hidden_paths(few) == [f"{desk.workspace}/f7"]
    work = asyncio.ensure_future(
        runtime.shell.list_hidden_paths([f"{desk.workspace}/f{number}" for number in range(5_000)])
    )
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    assert work.result() == [f"{desk.workspace}/f7"]
    assert turns > 2


async def test_long_lists_of_files_are_truncated_and_unmatched_paths_are_named(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    for number in range(700):
        (desk.workspace / f"f{number:03}").touch()
    (desk.workspace / "f0").mkdir()
    (desk.workspace / "f0/in").touch()
    found = await desk.call(
        "git.add", paths=[*(f"f{number:03}" for number in range(700)), "f0", "f", "f00", "f0/i", "g"]
    )
    assert len(found["staged"]) == 500 and found["staged_not_listed"] == 201
    assert set(found["not_staged"]) == {"f", "f00", "f0/i", "g"}
    status = await desk.call("git.status")
    assert len(status["staged"]) == 500 and status["staged_not_listed"] == 201 and not status["clean"]
    assert all(row["change"] == "added" for row in status["staged"])
    difference = await desk.call("git.diff", staged=True, counts_only=True)
    assert len(difference["files"]) == 500 and difference["files_not_listed"] == 201
