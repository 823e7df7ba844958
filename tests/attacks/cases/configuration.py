"""Files of the workspace that would make a program outside the sandbox run the attacker's code later."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable

from tests.attacks.case import Case
from tests.attacks.victim import REACHED, VictimHome, put, said_by

from handrail.kernel.doctor import check_kernel

_Probe = Callable[[VictimHome], Awaitable[str | None]]


def _by_program(text: str, path: str, *, absent: bool = True) -> _Probe:
    """A program writes ``path``: afterwards it is as it was, and where something was made the call has failed."""

    async def tried(home: VictimHome) -> str | None:
        target = home.workspace / path
        was = target.read_bytes() if target.is_file() else None
        result = await home.call("bash", command=text, timeout_ms=60_000)
        now = target.read_bytes() if target.is_file() else None
        if now == was:
            return None
        if target.exists() and was is None:
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        elif was is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(was)
        return f"{path} now holds {now!r}; the call: ok={result.ok} {said_by(result)!r}"[:900]

    return tried


def _by_tool(path: str) -> _Probe:
    async def tried(home: VictimHome) -> str | None:
        target = home.workspace / path
        was = target.read_bytes() if target.is_file() else None
        result = await home.call("write", path=path, content="planted\n")
        now = target.read_bytes() if target.is_file() else None
        if was is None and now is not None:
            target.unlink()
        return None if not result.ok and now == was else f"write {path}: {result!r}"[:600]

    return tried


async def _told(home: VictimHome) -> str | None:
    """A file that a program creates under a protected name fails its call with a reason."""
    result = await home.call("bash", command="mkdir -p .vscode && echo '{}' > .vscode/tasks.json; echo DONE")
    there = (home.workspace / ".vscode" / "tasks.json").exists()
    if there:
        shutil.rmtree(home.workspace / ".vscode")
        return f"it is there: {result!r}"[:600]
    said = repr(result)
    return None if "tasks.json" in said and not result.ok else f"the answer does not say so: {said}"[:900]


_MOVE = (
    "mv .git .git2 && mkdir -p .git/hooks && printf '#!/bin/sh\\n' > .git/hooks/pre-commit && chmod +x .git/hooks/pre-commit; "
    "[ -d .git2 ] && { cp .git/hooks/pre-commit .git2/hooks/; rm -rf .git; mv .git2 .git; }"
)


async def _planted_settings(home: VictimHome) -> str | None:
    """A repository whose own settings name programs: Handrail opens it, looks at it and works in it, and none runs
    outside the sandbox."""
    evil = f"touch {home.canary}"
    async with home.elsewhere(rules=["allow bash git *"]) as (session, workspace):
        home.git("init", "-q", cwd=workspace)
        put(workspace / "evil.sh", f"#!/bin/sh\n{evil}\n")
        (workspace / "evil.sh").chmod(0o755)
        for hook in ("pre-commit", "post-checkout", "post-index-change", "fsmonitor-watchman"):
            put(workspace / ".git" / "hooks" / hook, f"#!/bin/sh\n{evil}\n")
            (workspace / ".git" / "hooks" / hook).chmod(0o755)
        with (workspace / ".git" / "config").open("a") as file:
            file.write(
                f'[core]\n fsmonitor = "{evil};"\n sshCommand = "{evil}"\n pager = "{evil}"\n editor = "{evil}"\n'
                f' askPass = "{workspace}/evil.sh"\n[diff]\n external = "{evil}"\n'
                f'[filter "x"]\n clean = "{evil}"\n smudge = "{evil}"\n process = "{evil}"\n'
                f'[alias]\n status = "!{evil}"\n[credential]\n helper = "!{evil}"\n[gpg]\n program = "{workspace}/evil.sh"\n'
            )
        put(workspace / ".gitattributes", "* filter=x\n")
        put(workspace / ".envrc", evil)
        put(workspace / "sitecustomize.py", f"import os; os.system({evil!r})\n")
        put(workspace / "rg", f"#!/bin/sh\n{evil}\n")
        (workspace / "rg").chmod(0o755)
        put(workspace / ".ripgreprc", f"--pre={workspace}/evil.sh\n")
        put(workspace / "a.txt", "x\n")
        for name, arguments in (
            ("glob", {"pattern": "**"}),
            ("grep", {"pattern": "x"}),
            ("read", {"path": "a.txt"}),
            ("write", {"path": "b.txt", "content": "x\n"}),
            (
                "bash",
                {"command": "git status; git add a.txt; git diff; git commit -m x; git log", "timeout_ms": 60_000},
            ),
        ):
            await session.call(name, arguments)
        if home.canary.exists():
            home.canary.unlink()
            return "a program that the repository names ran outside the sandbox"
        async with home.kernel(workspace=workspace, name="after") as kernel:
            check_kernel(kernel)
            await kernel.explain_call("bash", {"command": "git status"})
    if home.canary.exists():
        home.canary.unlink()
        return "a program that the repository names ran as Handrail looked at it"
    return None


async def _own_rules(home: VictimHome) -> str | None:
    """The rules and tools of a workspace: only denying and asking rules apply until it is trusted."""
    async with home.elsewhere() as (_, workspace):
        put(workspace / "handrail.toml", 'rules = ["allow bash", "allow fs.write"]\n')
        put(workspace / "tools" / "evil.json", '{"llm": {"name": "evil", "description": "x", "parameters": {}}}')
        put(workspace / "agents" / "evil" / "agent.toml", 'id = "evil"\n')
        async with home.kernel(workspace=workspace, name="brought") as kernel:
            session = await kernel.session()
            result = await session.call("bash", {"command": f"mkdir {REACHED}"})
            if result.ok:
                return f"its rules allowed a command: {result!r}"
            written = await session.call("write", {"path": "x", "content": "x"})
            if written.ok or "evil" in kernel.generation.entries:
                return f"{written!r}, {sorted(kernel.generation.entries)}"
    return None


_WRITTEN = "echo planted >"
CASES: list[Case] = [
    Case(id, "configuration", source, "it is as it was, or the call failed and says what was taken away", tried)
    for id, source, tried in [
        ("git hook by a program", "hooks run with the next commit, outside",
         _by_program("printf '#!/bin/sh\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
                     ".git/hooks/pre-commit")),
        ("git hook by moving .git away", "a read-only bind on the hooks is walked around by renaming the folder above",
         _by_program(_MOVE, ".git/hooks/pre-commit")),
        ("git config by a program", "core.fsmonitor runs with the next git status",
         _by_program("git config core.fsmonitor ./evil.sh; echo '[core] pager=x' >> .git/config", ".git/config")),
        ("git config by another name", "config.worktree and include.path",
         _by_program(f"{_WRITTEN} .git/config.worktree", ".git/config.worktree")),
        ("a worktree's .git file", "a file .git that names a folder with a configuration of its own",
         _by_program("mkdir -p sub; echo 'gitdir: ../evil-git' > sub/.git", "sub/.git")),
        ("a repository within", "a nested .git with hooks of its own",
         _by_program("mkdir -p nested/.git/hooks; printf x > nested/.git/hooks/pre-commit", "nested/.git/hooks/pre-commit")),
        ("submodule configuration", "modules/*/config is a configuration too",
         _by_program("mkdir -p .git/modules/x/hooks; echo x > .git/modules/x/config", ".git/modules/x/config")),
        ("direnv", ".envrc runs when a person enters the folder", _by_program(f"{_WRITTEN} .envrc", ".envrc")),
        ("editor tasks", "tasks.json runs when the folder is opened",
         _by_program(f"mkdir -p .vscode; {_WRITTEN} .vscode/tasks.json", ".vscode/tasks.json")),
        ("editor settings", "settings.json names interpreters and terminals",
         _by_program(f"mkdir -p .vscode; {_WRITTEN} .vscode/settings.json", ".vscode/settings.json")),
        ("IDE run configurations", ".idea runs before launch",
         _by_program(f"mkdir -p .idea; {_WRITTEN} .idea/workspace.xml", ".idea/workspace.xml")),
        ("MCP servers", ".mcp.json starts programs with the next agent", _by_program(f"{_WRITTEN} .mcp.json", ".mcp.json")),
        ("MCP servers of an editor", "mcp.json in an editor's folder",
         _by_program(f"mkdir -p .cursor; {_WRITTEN} .cursor/mcp.json", ".cursor/mcp.json")),
        ("agent settings", "hooks and permissions of another agent",
         _by_program(f"mkdir -p .claude; {_WRITTEN} .claude/settings.json", ".claude/settings.json")),
        ("Handrail's file in the workspace", "rules that the workspace gives itself",
         _by_program(f"{_WRITTEN} handrail.toml", "handrail.toml")),
        ("shell start-up file", ".bashrc in a workspace that is somebody's home",
         _by_program(f"{_WRITTEN} .bashrc", ".bashrc")),
        ("ssh keys in the workspace", "authorized_keys in a workspace that is somebody's home",
         _by_program(f"mkdir -p .ssh; {_WRITTEN} .ssh/authorized_keys", ".ssh/authorized_keys")),
    ]
] + [
    Case(f"write {path}", "configuration", "the write tool instead of a program", "refused, whoever agrees", _by_tool(path))
    for path in (
        ".git/hooks/pre-commit", ".git/config", "sub/.git", ".envrc",
        ".vscode/tasks.json", ".idea/workspace.xml", ".mcp.json", ".cursor/mcp.json", ".claude/settings.json",
        "handrail.toml", ".bashrc", ".ssh/authorized_keys",
    )
] + [
    Case("a protected file that was absent", "configuration", "what does not exist yet is simply created",
         "the call fails, says so, and the file is gone", _told),
    Case("a repository that names programs", "configuration",
         "fsmonitor, sshCommand, filters, pagers, aliases, hooks, ripgreprc, sitecustomize",
         "none of them runs outside the sandbox", _planted_settings),
    Case("a workspace with rules and tools of its own", "configuration", "configuration supplied by the repository",
         "it can only narrow; tools are not read from it", _own_rules),
]  # fmt: skip
