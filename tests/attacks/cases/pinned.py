"""Pinned files stay unchanged and forbidden files are removed, also during a run and from outside."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.attacks.case import Case
from tests.attacks.victim import VictimHome, put, said_by

from handrail.contract.session_protocols import Session

_Probe = Callable[[VictimHome], Awaitable[str | None]]
_GIT = ("git", "-c", "init.defaultBranch=main", "-c", "user.name=v", "-c", "user.email=v@example.org")


def _repository(workspace: Path) -> None:
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run([*_GIT, *words], cwd=workspace, check=True, env={"PATH": os.environ["PATH"], "HOME": "/"})


async def _until(condition: Callable[[], bool], rounds: int = 600) -> bool:
    for _ in range(rounds):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return condition()


async def _job(session: Session, command: str, workspace: Path, sign: str) -> str:
    """A bash job that has made ``sign``. Its text is in a file, so that the text itself is not refused."""
    put(workspace / "job.sh", command)
    started = await session.call("bash", {"command": "bash job.sh", "background": True})
    assert await _until((workspace / sign).exists), repr(started)
    return started.data["job_id"]


def _replaced_while_it_runs(name: str, script: str, outside: Callable[[Path], None]) -> _Probe:
    """A victim replaces a file while a job runs, and the job then writes what it finds there."""

    async def tried(home: VictimHome) -> str | None:
        async with home.elsewhere() as (session, workspace):
            _repository(workspace)
            put(workspace / ".envrc", "theirs")
            put(workspace / "handrail.toml", "")
            before = (workspace / name).read_text()
            text = f"touch up; while [ ! -e go ]; do sleep 0.05; done; {script}; touch done; sleep 300"
            job = await _job(session, text, workspace, "up")
            outside(workspace)
            (workspace / "go").touch()
            await _until((workspace / "done").exists, 100)  # it may have been ended for the mount that it lost
            await session.call("stop_task", {"job_id": job})
            now = (workspace / name).read_text() if (workspace / name).is_file() else None
            return None if now is not None and "evil" not in now else f"{name} was {before!r} and is {now!r}"

    return tried


def _by_rename(name: str) -> Callable[[Path], None]:
    def outside(workspace: Path) -> None:
        put(workspace / "edited", "edited")
        (workspace / "edited").rename(workspace / name)

    return outside


def _by_git(workspace: Path) -> None:
    subprocess.run([*_GIT, "config", "--file", ".git/config", "user.name", "victim"], cwd=workspace, check=True)


async def _live_while_it_runs(home: VictimHome) -> str | None:
    async with home.elsewhere() as (session, workspace):
        made = (
            "mkdir -p .vscode sub/.git/hooks; echo evil > .vscode/tasks.json; echo evil > sub/.git/hooks/post-checkout"
        )
        job = await _job(session, f"{made}; touch up; sleep 300", workspace, "up")
        gone = await _until(
            lambda: not (workspace / ".vscode").exists() and not (workspace / "sub" / ".git" / "hooks").exists()
        )
        await session.call("stop_task", {"job_id": job})
        return None if gone else f"after half a minute there are {sorted(map(str, workspace.rglob('*')))}"[:600]


async def _second_names(home: VictimHome) -> str | None:
    """Of a pinned file in the workspace, and of a workspace's file in a store."""
    async with home.elsewhere() as (session, workspace):
        _repository(workspace)
        put(workspace / ".vscode" / "tasks.json", "theirs")
        store = home.path / "store"
        put(store / "index.js", "theirs")
        os.link(workspace / ".git" / "config", workspace / "a")
        os.link(workspace / ".vscode" / "tasks.json", workspace / "b")
        (workspace / "node_modules").mkdir()
        os.link(store / "index.js", workspace / "node_modules" / "index.js")
        try:
            text = "for f in a b node_modules/index.js; do chmod 777 $f; echo evil >> $f; truncate -s 1 $f; done; echo DONE"
            said = said_by(await session.call("bash", {"command": text}))
            found = [(workspace / ".vscode" / "tasks.json"), store / "index.js"]
            texts = [path.read_text() for path in found] + [(workspace / ".git" / "config").read_text()]
            held = texts[:2] == ["theirs", "theirs"] and "evil" not in texts[2] and len(texts[2]) > 10
            return None if held and "DONE" in said else f"{texts!r}: {said!r}"[:600]
        finally:
            shutil.rmtree(store)


async def _too_deep(home: VictimHome) -> str | None:
    async with home.elsewhere() as (session, workspace):
        code = (
            "import os\n"
            "for n in range(60): os.mkdir('n' * 200); os.chdir('n' * 200)\n"
            "os.makedirs('.vscode'); open('.vscode/tasks.json', 'w').write('evil')"
        )
        put(workspace / "deep.py", code)
        result = await session.call("bash", {"command": "python3 deep.py"})
        left = [folder for folder, folders, _ in os.walk(workspace) if ".vscode" in folders]
        deepest = max((len(folder) for folder, _, _ in os.walk(workspace)), default=0)
        if left or deepest > 4_000 or result.ok:
            return f"{left!r} {deepest}: {result!r}"[:600]
        return None


async def _waits_for_ever(home: VictimHome) -> str | None:
    async with home.elsewhere() as (session, workspace):
        for name in (
            ".git/config",
            ".git/packed-refs",
            ".git/info/exclude",
            ".gitignore",
            ".gitattributes",
            ".git/HEAD",
        ):
            shutil.rmtree(workspace / ".git", ignore_errors=True)
            _repository(workspace)
            (workspace / name).unlink(missing_ok=True)
            os.mkfifo(workspace / name)
            for tool, arguments in (
                ("git.status", {}),
                ("bash", {"command": "git status"}),
                ("grep", {"pattern": "x"}),
            ):
                try:
                    async with asyncio.timeout(30):
                        await session.call(tool, arguments)
                except TimeoutError:
                    return f"{tool} waits for {name}"
            (workspace / name).unlink()
        return None


async def _switched_off(home: VictimHome) -> str | None:
    async with home.elsewhere() as (session, workspace):
        for number in range(451):
            put(workspace / f"d{number}" / ".env", "TOP-SECRET")
        said = said_by(await session.call("bash", {"command": "cat d*/.env; echo WORKS; touch new; echo DONE"}))
        if "WORKS" not in said or "TOP-SECRET" in said or not (workspace / "new").exists():
            return f"{said!r}"[:600]
        return None


def _links_on_the_way(workspace: Path) -> dict[str, str]:
    """Furnish a workspace with protected ends that further links lead to. Return these links, each with its end."""
    _repository(workspace)
    for name in ("v1/pre-commit", "v1/hook", "v1/env", "conf/tasks.json"):
        put(workspace / name, "theirs")
    (workspace / "tools").mkdir()
    (workspace / ".vscode").mkdir()
    for name, target in (
        ("hooks", "v1"),
        ("tools/hook", "../v1/hook"),
        (".git/hooks/post-merge", "../../tools/hook"),
        ("tools/env", "../v1/env"),
        (".envrc", "tools/env"),
        (".vscode/tasks.json", "../conf/tasks.json"),
        (".bashrc", "absent/bashrc"),
    ):
        (workspace / name).unlink(missing_ok=True)
        (workspace / name).symlink_to(target)
    subprocess.run([*_GIT, "config", "core.hooksPath", "hooks"], cwd=workspace, check=True)
    return {"hooks": "hooks/pre-commit", "tools/hook": ".git/hooks/post-merge", "tools/env": ".envrc"}


async def _turned_links(home: VictimHome) -> str | None:
    async with home.elsewhere() as (session, workspace):
        links = _links_on_the_way(workspace)
        made = "mkdir -p evil; for n in pre-commit x; do echo evil > evil/$n; done"
        for link, end in links.items():
            for turn in ("ln -s $PWD/evil{0} {1}", "cp -r evil{0} {1}"):
                text = f"{made}; rm -rf {link}; {turn.format('' if link == 'hooks' else '/x', link)}"
                put(workspace / "turn.sh", text)
                said = said_by(await session.call("bash", {"command": "bash turn.sh; echo DONE"}))
                if (workspace / end).read_text() != "theirs":
                    return f"{end} is the program's by {text!r}: {said!r}"[:600]
        return None


async def _ends_of_links(home: VictimHome) -> str | None:
    async with home.elsewhere() as (session, workspace):
        _links_on_the_way(workspace)
        for text in (
            "echo evil > conf/tasks.json; mv conf c; mkdir conf; echo evil > conf/tasks.json",
            "mkdir absent; echo evil > absent/bashrc",
            "rm -rf absent; mkdir e; echo evil > e/bashrc; ln -s e absent",
        ):
            put(workspace / "make.sh", text)
            said = said_by(await session.call("bash", {"command": "bash make.sh; echo DONE"}))
            if (workspace / ".bashrc").exists() or (workspace / ".vscode/tasks.json").read_text() != "theirs":
                return f"{text!r}: {said!r}"[:600]
        said = said_by(await session.call("write", {"path": "conf/tasks.json", "content": "evil"}))
        return None if (workspace / "conf/tasks.json").read_text() == "theirs" else f"by the tool: {said!r}"


CASES = [
    *(
        Case(f"{name} replaced while a job runs, {how}", "configuration",
             "a mount over a file ends when its name is given to another file", "it is put back, or harmless",
             _replaced_while_it_runs(name, script, outside))
        for name, how, script, outside in (
            (".git/config", "by git", "git config core.fsmonitor evil; git config alias.x '!evil'", _by_git),
            (".git/config", "in place", "printf '[core]\\n\\tfsmonitor = evil\\n' >> .git/config", _by_git),
            (".envrc", "in place", "echo evil > .envrc", _by_rename(".envrc")),
            (".envrc", "by rename", "echo evil > t && mv t .envrc", _by_rename(".envrc")),
            ("handrail.toml", "in place", "echo '# evil' >> handrail.toml", _by_rename("handrail.toml")),
        )
    ),
    Case("live while a job runs", "configuration", "a person opens the folder while a job runs",
         "what is new under a protected name is moved away within seconds", _live_while_it_runs),
    Case("second names", "files", "hard links of pinned files, and into a package manager's store",
         "none is written by the other name", _second_names),
    Case("deeper than anyone looks", "files", "protected names below a path of 12,000 bytes", "moved away",
         _too_deep),
    Case("a FIFO in the place of git's files", "files", "git waits for a writer that never comes",
         "every call ends soon", _waits_for_ever),
    Case("links on the way to hooks and protected names", "configuration",
         "git, a shell or an editor follows a link that a program can turn", "the link is put back", _turned_links),
    Case("ends of protected links", "configuration", "a person links a protected name to a file of the project",
         "the file is neither written nor made", _ends_of_links),
    Case("451 hidden files", "sandbox", "more mounts than a sandbox can have", "programs run, and see none of them",
         _switched_off),
]  # fmt: skip
