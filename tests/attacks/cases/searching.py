"""Access to hidden files through searches while a program renames entries."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.attacks.case import Case
from tests.attacks.victim import SECRET, VictimHome, put

from handrail.contract.session_protocols import Session

_ROUNDS = 4
_MORE = 200
"""Calls at most of a tool that no call came through of, while names move ever more slowly."""
_NAME = "customer-list"
"""Stands in the name of a file in a hidden folder: names of hidden folders are not shown either."""
_RULES = ("deny fs.read **/.env", "deny fs.read private/**", "allow bash *")

_MOVING = """\
import ctypes, os, shutil, time
libc = ctypes.CDLL(None, use_errno=True)
rest = 0.005
open("running", "w").close()

def exchange(one, other):
    libc.renameat2(-100, one.encode(), -100, other.encode(), 2)

def attempt(work):
    try:
        work()
    except OSError:
        pass

for name, to in (("to-env", ".env"), ("to-private", "private"), ("src/to-env", "../.env")):
    attempt(lambda: os.symlink(to, name))
while not os.path.exists("stop"):
    STEPS
    if os.path.exists("slower"):
        time.sleep(rest)
        rest = min(rest * 1.1, 1)
"""

_SWAPS = {
    "a file and a link": 'exchange("notes.txt", "to-env"); exchange("src/a.json", "src/to-env")',
    "a folder and a link": 'exchange("open", "to-private"); exchange("src", "to-private")',
    "a file and the hidden file": """exchange("notes.txt", ".env"); exchange(".env", "notes.txt")
    attempt(lambda: os.rename(".env", "notes.txt")); attempt(lambda: os.rename("private", "open2"))
    exchange("open", "private"); exchange("open", "private")
    attempt(lambda: shutil.copy(".env", "copied")); attempt(lambda: os.link(".env", "linked"))
    attempt(lambda: os.link("private/customer-list.txt", "linked-too"))""",
}

_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("grep", {"pattern": "TOKEN"}),
    ("grep", {"pattern": "TOKEN", "glob": "{*,.*}"}),
    ("grep", {"pattern": "TOKEN", "path": "notes.txt"}),
    ("grep", {"pattern": "TOKEN", "path": "open"}),
    ("glob", {"pattern": "**/*"}),
    ("glob", {"pattern": "**", "path": "open", "hidden": True}),
    ("tree", {"path": ".", "hidden": True, "depth": 4}),
    ("tree", {"path": "open"}),
    ("read", {"path": "notes.txt"}),
    ("read", {"path": "notes.txt", "unit": "bytes"}),
    ("read", {"path": "open/customer-list.txt"}),
    ("edit", {"path": "notes.txt", "old": "TOKEN=", "new": "TOKEN ="}),
    ("file.patch", {"path": "notes.txt", "operations": [{"op": "append", "content": "more"}]}),
    ("apply_patch", {"patch": "--- a/notes.txt\n+++ b/notes.txt\n@@ -1 +1 @@\n-TOKEN\n+TOKEN =\n"}),
    ("json_read", {"path": "src/a.json"}),
    ("repo_overview", {}),
    ("repo_overview", {"focus": "customer TOKEN"}),
    ("repo_overview", {"path": "open"}),
    ("multi_edit", {"path": "notes.txt", "edits": [{"old": "TOKEN=", "new": "TOKEN ="}]}),
    ("lsp", {"action": "symbols", "path": "src/a.json"}),
    ("file.move", {"path": "notes.txt", "to": "moved.txt"}),
    ("read", {"path": "moved.txt"}),
    ("file.move", {"path": "moved.txt", "to": "notes.txt"}),
    ("read", {"path": "book.ipynb"}),
    ("git.diff", {}),
    ("git.status", {}),
    ("git.blame", {"path": "notes.txt"}),
)
_WANTED = frozenset(("grep", "glob", "tree", "read"))
"""At least one call of each has to come through, or nothing was put to the test."""


def _made(workspace: Path) -> None:
    put(workspace / ".env", f"TOKEN={SECRET}-ENV\n")
    put(workspace / "private" / f"{_NAME}.txt", f"TOKEN={SECRET}-PRIVATE\n")
    put(workspace / "notes.txt", "TOKEN=mine\n")
    put(workspace / "open" / "a.txt", "TOKEN=open\n")
    put(workspace / "src" / "a.json", '{"TOKEN": 1}\n')
    put(workspace / "book.ipynb", '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}\n')
    for number in range(60):
        put(workspace / "many" / f"{number:03}" / "f.txt", "TOKEN=many\n")


def _moved(id: str, what: str) -> Case:
    async def tried(home: VictimHome) -> str | None:
        async with home.elsewhere(rules=_RULES) as (session, workspace):
            _made(workspace)
            home.git("init", "-q", "-b", "main", cwd=workspace)
            home.git("add", "notes.txt", "src", "open", cwd=workspace)
            home.git("commit", "-q", "-m", "first", cwd=workspace)
            put(workspace / "moving.py", _MOVING.replace("STEPS", _SWAPS[what]))
            begun = await session.call("bash", {"command": "python3 moving.py", "background": True})
            if not begun.ok:
                return f"the program that moves names did not start: {begun!r}"[:600]
            try:
                return await _watched(session, workspace)
            finally:
                put(workspace / "stop", "")
                await session.call("stop_task", {"job_id": _job(begun.data)})

    return Case(
        id,
        "files",
        f"{what} change places while tools walk and open",
        "no answer of any tool holds what a rule hides, nor a name out of a hidden folder",
        tried,
    )


async def _watched(session: Session, workspace: Path) -> str | None:
    for _ in range(600):
        if (workspace / "running").exists():
            break
        await asyncio.sleep(0.05)
    else:
        return "the program that moves names did not begin"
    answered: set[str] = set()

    async def call(tool: str, arguments: dict[str, Any]) -> str | None:
        result = await session.call(tool, arguments)
        said = repr(result)
        if SECRET in said or (_NAME in said and _NAME not in repr(arguments)):
            return f"{tool} {arguments}: {said}"[:800]
        if result.ok:
            answered.add(tool)
        return None

    for _ in range(_ROUNDS):
        for tool, arguments in _CALLS:
            if (shown := await call(tool, arguments)) is not None:
                return shown
    put(workspace / "slower", "")
    for tool, arguments in {tool: arguments for tool, arguments in reversed(_CALLS) if tool in _WANTED}.items():
        for _ in range(_MORE):
            if tool in answered:
                break
            if (shown := await call(tool, arguments)) is not None:
                return shown
    if missing := _WANTED - answered:
        return f"no call of {sorted(missing)} ever came through, so nothing was put to the test"
    return None


def _job(data: Any) -> str:
    return str(data.get("job_id", "")) if isinstance(data, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


CASES = (
    _moved("search-link", "a file and a link"),
    _moved("search-folder", "a folder and a link"),
    _moved("search-hidden", "a file and the hidden file"),
)
