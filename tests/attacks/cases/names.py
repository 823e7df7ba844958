"""File names that configure programs and agents or contain secrets, all tried on a whole kernel."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.attacks.case import Case, Probe, breach
from tests.attacks.victim import VictimHome, put, said_by
from tests.contract import protected_lists as lists
from tests.policy.test_secret_names import SECRETS, names

from handrail.contract.protected.path_protection import find_tool_write_protection
from handrail.contract.session_protocols import Session

_EVERYTHING = ("allow *", "allow fs.write", "allow fs.write **", "allow write **", "allow bash", "allow bash *")
"""What a person who wants no questions allows; nobody is there to be asked."""


@asynccontextmanager
async def _alone(home: VictimHome, rules: Iterable[str]) -> AsyncGenerator[tuple[Session, Path]]:
    """A headless session in a temporary workspace, and that workspace."""
    with TemporaryDirectory(dir=home.path) as folder:
        workspace = Path(folder, "ws")
        workspace.mkdir()
        async with home.kernel(workspace=workspace, rules=rules, name=Path(folder).name) as kernel:
            yield await kernel.session(), workspace


def _by_tool(paths: str) -> Probe:
    async def tried(home: VictimHome) -> str | None:
        written: list[str] = []
        async with _alone(home, rules=[*_EVERYTHING, "allow fs.read"]) as (session, workspace):
            for path in paths.split():
                result = await session.call("write", {"path": path, "content": "planted\n"})
                if result.ok or (workspace / path).is_file():
                    written.append(path)
        return breach(written, "written by a tool without a word of a person")

    return tried


def _by_program(paths: str) -> Probe:
    """Each in its own folder, so that one failure does not affect another."""

    async def tried(home: VictimHome) -> str | None:
        held = [
            path
            for path in paths.split()
            if (found := find_tool_write_protection(path)) is not None and found.applies_to_programs
        ]
        script = "".join(
            f"mkdir -p \"$(dirname 'd{number}/{path}')\" && echo planted > 'd{number}/{path}'\n"
            for number, path in enumerate(held)
        )
        async with _alone(home, rules=_EVERYTHING) as (session, workspace):
            put(workspace / "plant.sh", script)
            result = await session.call("bash", {"command": "bash plant.sh", "timeout_ms": 60_000})
            left = [path for number, path in enumerate(held) if (workspace / f"d{number}" / path).exists()]
        if result.ok:
            return f"the call did not fail: {result!r}"[:600]
        return breach(left, "left by a program")

    return tried


async def _there_already(home: VictimHome) -> str | None:
    """Instructions and settings that are there stay as they are."""
    there = [
        "AGENTS.md",
        ".npmrc",
        ".github/instructions/a.instructions.md",
        "gradle/wrapper/w.jar",
        ".husky/pre-commit",
    ]
    async with _alone(home, rules=_EVERYTHING) as (session, workspace):
        for path in there:
            put(workspace / path, "theirs\n")
        script = "".join(
            f"echo x >> {p}; rm -f {p}; echo y > new; mv -f new {p}; ln -sf new {p}; mv {p.partition('/')[0]} moved\n"
            for p in there
        )
        put(workspace / "plant.sh", script)
        await session.call("bash", {"command": "bash plant.sh", "timeout_ms": 60_000})
        changed = [p for p in there if not (workspace / p).is_file() or (workspace / p).read_text() != "theirs\n"]
    return breach(changed, "changed by a program")


async def _state_of_git(home: VictimHome) -> str | None:
    """File tools write nothing beneath a git directory, whatever its name."""
    async with _alone(home, rules=_EVERYTHING) as (session, workspace):
        home.git("init", "-q", cwd=workspace)
        home.git("init", "-q", "--bare", str(workspace / "bare"), cwd=workspace)
        written: list[str] = []
        for name in (
            *("rebase-merge/git-rebase-todo", "sequencer/todo", "info/attributes", "MERGE_MSG", "index", "HEAD", "x"),
            *("refs/heads/evil", "objects/ab/cd", "worktrees/w/gitdir", "modules/m/HEAD", "BISECT_RUN", "logs/HEAD"),
        ):
            for folder in (".git", "bare"):
                result = await session.call("write", {"path": f"{folder}/{name}", "content": "ref: planted\n"})
                written += [f"{folder}/{name}"] if result.ok else []
    return breach(written, "written beneath a git directory")


async def _rebase(home: VictimHome) -> str | None:
    """A program inserts a command into a rebase that the user continues."""
    async with _alone(home, rules=_EVERYTHING) as (session, workspace):
        git = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        home.git("init", "-q", "-b", "main", cwd=workspace)
        for number in range(3):
            put(workspace / "a.txt", f"{number}\n")
            home.git("add", "a.txt", cwd=workspace)
            home.git(*git, "commit", "-qm", str(number), cwd=workspace)
        home.git(*git, "-c", "sequence.editor=sed -i 1ibreak", "rebase", "-q", "-i", "HEAD~2", cwd=workspace)
        todo = ".git/rebase-merge/git-rebase-todo"
        put(workspace / "plant.sh", f"echo 'exec touch {home.canary}' > t; cat {todo} >> t; cp t {todo}\n")
        result = await session.call("bash", {"command": "bash plant.sh"})
        home.git(*git, "-c", "core.editor=true", "rebase", "--continue", cwd=workspace)
        if home.canary.exists():
            home.canary.unlink()
            return f"the person's git ran it: {said_by(result)!r}"[:600]
    return None


async def _settings_of_the_person(home: VictimHome) -> str | None:
    """A script in the workspace that the user's ~/.gitconfig names."""
    config = Path.home() / ".gitconfig"
    was = config.read_bytes() if config.exists() else None
    config.write_text("[core]\n\thooksPath = team-hooks\n[alias]\n\tst = !./tools/status.sh\n")
    try:
        async with _alone(home, rules=_EVERYTHING) as (session, workspace):
            home.git("init", "-q", cwd=workspace)
            planted: list[str] = []
            for path in ("team-hooks/pre-commit", "tools/status.sh"):
                await session.call("write", {"path": path, "content": "#!/bin/sh\n"})
                await session.call("bash", {"command": f"mkdir -p {path.partition('/')[0]}; echo x > {path}"})
                planted += [path] if (workspace / path).exists() else []
    finally:
        config.unlink() if was is None else config.write_bytes(was)
    return breach(planted, "planted where the person's git runs it")


async def _secrets(home: VictimHome) -> str | None:
    """Files with names that look like secrets, read by a tool and by a program that were allowed everything."""
    async with _alone(home, rules=["allow bash", "allow bash *"]) as (session, workspace):
        for name in names(SECRETS):
            put(workspace / name, "TOPSECRET\n")
        put(
            workspace / "look.sh",
            "find . -type f ! -name look.sh -exec cat {} + 2>/dev/null | grep -c TOPSECRET; true\n",
        )
        result = await session.call("bash", {"command": "bash look.sh", "timeout_ms": 60_000})
        read = [name for name in names(SECRETS) if (await session.call("read", {"path": name})).ok]
        said = said_by(result)
    if "TOPSECRET" in said or (result.ok and said.strip().splitlines()[:1] != ["0"]):
        return f"read by a program: {said!r}"[:600]
    return breach(read, "read by a tool")


_HELD = "a tool does not write it, and what a program makes of it is moved away"
CASES: list[Case] = [
    Case(f"{what} by {who}", "configuration", source, _HELD, probe(paths))
    for what, source, paths in [
        ("agents' settings", "MCP servers, hooks and commands of other agents", lists.AGENTS_NEVER),
        ("agents' instructions", "the next agent does what they say", lists.AGENTS_ASK),
        ("editors' settings", "tasks, build commands and language servers", lists.EDITORS),
        ("what entering a folder runs", "direnv, mise, autoenv and the shells themselves", lists.ENTERING + lists.ENTERING_ASK),
        ("managers of hooks", "they run with the next commit", lists.HOOKS + lists.HOOKS_ASK),
        ("start-up files of prompts", "interpreters, debuggers and database prompts", lists.REPL),
        ("settings of tools", "linters, package managers, build tools", lists.TOOLS),
    ]
    for who, probe in (("a tool", _by_tool), ("a program", _by_program))
] + [
    Case("instructions that are there already", "configuration", "a program rewrites what the next agent reads",
         "they stay as they are", _there_already),
    Case("state of git by a tool", "configuration", "rebase, sequencer, index, references", "nothing is written", _state_of_git),
    Case("a command in a rebase", "configuration", "exec lines of git-rebase-todo", "it is taken out again", _rebase),
    Case("a person's git settings", "configuration", "core.hooksPath and aliases of ~/.gitconfig name files of the workspace",
         "neither tools nor programs write them", _settings_of_the_person),
    Case("names that look like secrets", "secrets", "a key under a name of its own", "neither tools nor programs read it", _secrets),
]  # fmt: skip
