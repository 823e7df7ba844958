"""One call of each shipped tool, and calls that fail: run in a temporary kernel, for the reference and its test.

``python -m tests.tools.example_calls`` runs them and writes ``examples.json``, from which :mod:`tests.tool_reference` takes
its examples. ``test_reference.py`` runs them again and compares. Ids, hashes, times and folders that differ between runs are
replaced.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from tests.kernel.test_agents import put_agent
from tests.registry.test_operator_resources import put_offering
from tests.tools.githost import GitHost
from tests.tools.repositories import create_repository
from tests.tools.scripted_language_server import LanguageServerProgram
from tests.web import ok

from handrail.agent.agent_loop import Agent
from handrail.contract.calls_and_results import Result
from handrail.contract.session_protocols import Session
from handrail.contract.tool.decorator import tool
from handrail.contract.tool.tool_ids_and_wire_names import STATE_IDS, TERMINAL_IDS
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.forge_servers import GitHubServer
from handrail.testing.provider_request_checks import PlaybackModel, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

EXAMPLES = Path(__file__).parent / "examples.json"

CALLS: dict[str, dict[str, Any]] = {
    "write": {"path": "a.txt", "content": "one\ntwo\n"},
    "read": {"path": "a.txt"},
    "edit": {"path": "a.txt", "old": "one", "new": "uno"},
    "file.patch": {"path": "a.txt", "operations": [{"op": "append", "content": "three\n"}]},
    "glob": {"pattern": "*.txt"},
    "grep": {"pattern": "uno"},
    "bash": {"command": "echo hi"},
    "todo": {"todos": [{"id": "1", "content": "Fix the parser", "status": "pending"}]},
    "question": {
        "questions": [{"question": "Which database?", "options": [{"label": "SQLite"}, {"label": "PostgreSQL"}]}]
    },
    "plan": {},
    "plan_exit": {"plan": "1. Read the parser.\n2. Mend it."},
    "task": {"subagent_type": "default", "prompt": "Say hello."},
    "skill": {"name": "tool-builder"},
    "browse_tools": {},
    "load_tools": {"category": "git"},
    "find_tools": {"query": "show what git has recorded"},
    "tool_search": {"query": "send a letter"},
    "info": {"tool": "read"},
    "multi_edit": {"path": "a.txt", "edits": [{"old": "two", "new": "due"}]},
    "apply_patch": {
        "patch": "*** Begin Patch\n*** Update File: a.txt\n@@\n-due\n+zwei\n*** Add File: c.txt\n+3\n*** End Patch\n"
    },
    "file.move": {"path": "draft.txt", "to": "notes.txt"},
    "file.delete": {"path": "notes.txt"},
    "tree": {},
    "lsp": {"action": "references", "symbol": "launch"},
    "repo_overview": {"focus": "where is uno used"},
    "json_write": {"path": "a.json", "value": {"a": [1]}},
    "json_read": {"path": "a.json", "pointer": "/a/0"},
    "python": {"code": "print(6 * 7)"},
    "jobs": {},
    "wait": {"job_id": "…"},
    "read_job": {"job_id": "…"},
    "stop_task": {"job_id": "…"},
    "terminal.start": {"command": "cat"},
    "terminal.send": {"id": "…", "keys": "enter"},
    "terminal.read": {"id": "…"},
    "terminal.resize": {"id": "…", "columns": 80, "rows": 24},
    "terminal.stop": {"id": "…"},
    "tool.step": {"id": "…"},
    "tool.close": {"id": "…"},
    "scratchpad": {"action": "set", "key": "port", "value": "8080"},
    "search_memory": {"query": "uno"},
    "artifact.read": {"ref": "…", "limit": 4},
    "memory.upsert": {"text": "The user wants commit messages in English.", "key": "user/commits"},
    "memory.query": {"query": "language of commit messages"},
    "memory.compact": {},
    "create_task": {"title": "Mend the parser", "owner": "ada"},
    "list_tasks": {"status": ["pending"]},
    "edit_task": {"id": 1, "status": "completed"},
    "get_task": {"id": 1},
    "send_message": {"channel": "reviews", "message": "Ready for review."},
    "wait_channel": {"channel": "reviews", "timeout_ms": 0},
    "add_timer": {"interval": 3600, "prompt": "Check the build.", "name": "build"},
    "add_schedule": {"daily_at": "08:30", "prompt": "Summarize open issues."},
    "watch_channel": {"channel": "alerts", "prompt": "Look at the alert."},
    "list_triggers": {},
    "remove_trigger": {"name": "build"},
    "git.init": {"path": "new"},
    "git.add": {"paths": ["a.txt"]},
    "git.commit": {"message": "Add a.txt"},
    "git.status": {},
    "git.log": {},
    "git.diff": {},
    "git.show": {},
    "git.blame": {"path": "a.txt"},
    "git.branches": {},
    "git.create_branch": {"name": "more"},
    "git.checkout": {"ref": "more"},
    "git.merge": {"ref": "main"},
    "git.stash": {"message": "Work in progress"},
    "git.clone": {"source": ".", "path": "copy"},
    "git.push": {},
    "git.pr": {"title": "Mend the parser", "head": "topic", "remote": "forge"},
    "web_search": {"query": "ships"},
    "web_fetch": {"url": "https://example.org/ships"},
    "http.post": {"url": "https://example.org/notes", "json": {"title": "Ships"}},
    "resource.list": {},
    "resource.read": {"uri": "note:1"},
    "resource.subscribe": {"uri": "note:1"},
    "resource.unsubscribe": {"uri": "note:1"},
    "prompt.list": {},
    "prompt.get": {"name": "greet", "arguments": {"who": "Ada"}},
    "prompt.complete": {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "who", "value": "A"}},
}
"""One of each, in an order in which they work."""

FAILURES: Sequence[tuple[str, dict[str, Any]]] = (
    ("read", {"path": "missing.txt"}),
    ("read", {"path": "../other/notes.txt"}),
    ("write", {"path": "b.txt", "content": "2\n"}),
    ("edit", {"path": "a.txt", "old": "four", "new": "4"}),
    ("edit", {"path": "a.txt", "old": "e", "new": "E"}),
    ("file.patch", {"path": "a.txt", "operations": [{"op": "insert", "line": 90, "content": "x\n"}]}),
    ("glob", {"pattern": "*.txt", "path": "missing"}),
    ("grep", {"pattern": "("}),
    ("memory.upsert", {"text": "Use tabs."}),
    ("bash", {"command": "sleep 60", "timeout_ms": 200}),
    ("bash", {"cmd": "ls"}),
    ("python", {"code": "import time; time.sleep(60)", "timeout_ms": 500}),
    (
        "todo",
        {
            "todos": [
                {"id": "1", "content": "Read", "status": "pending"},
                {"id": "1", "content": "Write", "status": "pending"},
            ]
        },
    ),
    ("question", {"questions": []}),
    ("plan_exit", {"plan": "1. Mend the parser."}),
    ("task", {"subagent_type": "critic", "prompt": "Review the change."}),
    ("skill", {"name": "missing"}),
    ("load_tools", {"category": "gti"}),
    ("find_tools", {}),
    ("tool_search", {"query": "!"}),
    ("info", {"tool": "raed"}),
    ("multi_edit", {"path": "a.txt", "edits": [{"old": "four", "new": "4"}]}),
    (
        "apply_patch",
        {"patch": "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n uno\n-four\n+4\n"},
    ),
    ("file.move", {"path": "missing.txt", "to": "b.txt"}),
    ("file.delete", {"path": "missing.txt"}),
    ("tree", {"path": "missing"}),
    ("lsp", {"action": "rename_preview", "symbol": "launch"}),
    ("lsp", {"action": "diagnostics", "path": "a.txt"}),
    ("repo_overview", {"path": "missing"}),
    ("json_read", {"path": "a.json", "pointer": "/b"}),
    ("json_write", {"path": "a.json", "pointer": "/b/c", "value": 1}),
    ("scratchpad", {"action": "get", "key": "host"}),
    ("search_memory", {"id": "missing"}),
    ("artifact.read", {"ref": f"sha256:{'0' * 64}"}),
    ("create_task", {"title": "Release", "blocked_by": [9]}),
    ("edit_task", {"id": 1, "blocked_by": [1]}),
    ("get_task", {"id": 9}),
    ("send_message", {"channel": "reviews", "message": "x", "kind": "broadcast"}),
    ("wait_channel", {"channel": "re views"}),
    ("add_timer", {"interval": 3600, "prompt": "Check the build.", "name": "daily build"}),
    ("add_schedule", {"cron": "99 * * * *", "prompt": "Check the build."}),
    ("watch_channel", {"channel": "re views", "prompt": "Look at it."}),
    ("remove_trigger", {"name": "missing"}),
    *((one, {"job_id": "job_missing"}) for one in ("read_job", "wait", "stop_task")),
    ("terminal.start", {"cwd": "missing"}),
    ("terminal.send", {"id": "job_missing", "text": "ls\n"}),
    ("terminal.read", {"id": "job_missing"}),
    ("terminal.resize", {"id": "job_missing", "columns": 80, "rows": 24}),
    ("terminal.stop", {"id": "job_missing"}),
    ("tool.step", {"id": "state_missing"}),
    ("tool.close", {"id": "state_missing"}),
    ("git.status", {"repository": "missing"}),
    ("git.log", {"ref": "missing"}),
    ("git.diff", {"from": "missing"}),
    ("git.show", {"file": "missing.txt"}),
    ("git.blame", {"path": "missing.txt"}),
    ("git.branches", {"repository": "missing"}),
    ("git.add", {}),
    ("git.commit", {"message": "Add nothing"}),
    ("git.create_branch", {"name": "more"}),
    ("git.checkout", {"ref": "missing"}),
    ("git.merge", {"ref": "missing"}),
    ("git.stash", {"action": "pop", "index": 7}),
    ("git.init", {}),
    ("git.clone", {"url": "https://example.org/x.git", "source": "."}),
    ("git.push", {"remote": "missing"}),
    ("git.pr", {"title": "Release", "head": "main", "remote": "forge"}),
    ("web_search", {"query": ""}),
    ("web_fetch", {"url": "ftp://example.org/"}),
    ("http.post", {"url": "https://example.org/notes"}),
    ("resource.read", {"uri": "note:9"}),
    ("resource.subscribe", {"uri": "note:9"}),
    ("prompt.get", {"name": "great"}),
    ("prompt.complete", {"ref": {"type": "ref/prompt", "name": "great"}, "argument": {"name": "who", "value": "A"}}),
)
"""Calls that fail in the same session."""
ANSWERS = ("SQLite", "Enter plan mode", "Carry out, and ask before edits")
"""What the user answers to the questions, in order."""
SEARCH = '[tools.web_search.config]\nproviders = "searxng"\n'
"""The beginning of the settings of `web_search`."""
ONLINE = {"git.push": "x.git", "web_fetch": "ships", "http.post": "notes"}
"""The tools that reach the server, each with the path of its URL."""
PAGE = """<html><head><title>Ships</title></head><body><nav><a href="/home">Home</a></nav><main><h1>Ships</h1>
<p>A ship is larger than a boat, and crosses <a href="/seas">seas</a>.</p></main></body></html>"""

RULES = (
    "allow *",
    "allow file.delete notes.txt",
    "allow fs.write **",
    "allow fs.read **",
    "allow shell.run *",
    "allow shell.run python3 -",
)


@tool(mode="stateful", side_effect="read", locks=[])
async def pages() -> AsyncGenerator[int, None]:
    """Go through two pages."""
    yield 1
    yield 2


@asynccontextmanager
async def served(folder: Path) -> AsyncGenerator[GitHost]:
    """A server with one repository, which takes pushes."""
    bare = folder / "served" / "x.git"
    bare.parent.mkdir()
    create_repository(folder / "source").git("init", "--quiet", "--bare", "--initial-branch=main", str(bare))
    with (bare / "config").open("a") as file:
        file.write("[http]\n\treceivepack = true\n")
    html, data = ok(PAGE.encode(), "Content-Type: text/html"), ok(b'{"id": 7}', "Content-Type: application/json")
    hits = ok(
        b'{"results": [{"title": "Ships", "url": "https://example.org/ships", "content": "About ships"}]}',
        "Content-Type: application/json",
    )
    async with GitHost(
        bare.parent, pages={"/ships": html, "/notes": data, "/search?q=ships&format=json": hits}
    ) as host:
        yield host


@asynccontextmanager
async def opened(folder: Path, host: GitHost) -> AsyncGenerator[Session]:
    """A session in a small repository, in which every call is allowed."""
    async with opened_kernel(folder, host, *RULES) as (_, session):
        yield session


@asynccontextmanager
async def opened_kernel(folder: Path, host: GitHost, *rules: str) -> AsyncGenerator[tuple[LocalKernel, Session]]:
    """A session in a small repository with its kernel, and with these rules; the hosts of the calls are allowed."""
    async with GitHubServer() as forge, _opened(folder, host, forge, rules) as both:
        yield both


@asynccontextmanager
async def _opened(
    folder: Path, host: GitHost, forge: GitHubServer, given: Sequence[str]
) -> AsyncGenerator[tuple[LocalKernel, Session]]:
    repo = create_repository(folder / "ws")
    repo.commit("first", b__txt="1\n")
    repo.git("remote", "add", "origin", host.url("x.git"))
    repo.git("remote", "add", "forge", forge.clone_url)
    online = [f'[requires.tools."{one}".net]\nhosts = ["{host.authority}"]' for one in (*ONLINE, "web_search")]
    online.append(f'[requires.tools."git.pr".net]\nhosts = ["{forge.authority}"]')
    program = LanguageServerProgram(folder, suffix=".py", name="ty")
    settings = f'agent = "caller"\n{SEARCH}searxng_url = "{host.url("")}"\n[tools."git.pr".config]\ngithub_url = "{forge.url}"\n'
    settings += f'github_host = "{forge.authority}"\ngithub_token = {{ secret = "FORGE" }}\n'
    settings += program.settings_toml("python", "*.py")
    put_agent(folder, "caller", "\n".join(online))
    put_offering(folder)
    rules = [f"allow net.fetch {host.authority}", f"allow net.fetch {forge.authority}", *given]
    secrets = {"FORGE": forge.token}
    async with temporary_kernel(folder, rules=rules, tools=[pages], settings=settings, secrets=secrets) as kernel:
        person = ScriptedApprovalHandler(answers=[[[answer]] for answer in ANSWERS])
        session = await kernel.session(approval_handler=person)
        Agent(session, PlaybackModel(text_reply("Hello.")))
        yield kernel, session


async def decisions(folder: Path) -> dict[str, str]:
    """Return how the shipped rules of the mode ``ask`` decide the calls of `CALLS`, by tool."""
    put_offering(folder)
    settings = f'{SEARCH}searxng_url = "https://example.org"'
    async with temporary_kernel(folder, tools=[pages], settings=settings) as kernel:
        calls = CALLS | {"artifact.read": {"ref": f"sha256:{'0' * 64}"}}
        return {one: (await kernel.explain_call(one, calls[one], headless=False)).action for one in CALLS}


@dataclass(frozen=True)
class ExampleCall:
    """One call and its answer."""

    tool_id: str
    arguments: Mapping[str, Any]
    result: Result


async def play(session: Session, host: GitHost) -> AsyncGenerator[ExampleCall]:
    """Run every call of `CALLS`, then every one of `FAILURES`."""
    for tool_id, arguments in CALLS.items():
        more: dict[str, Any] = {"url": host.url(ONLINE[tool_id])} if tool_id in ONLINE else {}
        if "job_id" in arguments:
            more = {"job_id": (await session.jobs.list())[0].id}
        elif tool_id in TERMINAL_IDS and "id" in arguments:
            more = {"id": (await session.jobs.list())[-1].id}
        elif tool_id in STATE_IDS:
            more = {"id": (await session.call("pages", {})).data["state_id"]}
        elif tool_id == "artifact.read":
            Path(session.workdir, "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(8))
            more = {"ref": (await session.call("read", {"path": "a.png"})).data["image"]["artifact"]}
        elif tool_id == "jobs":
            assert (await session.call("bash", {"command": "echo later", "background": True})).ok
            await session.call("wait", {"job_id": (await session.jobs.list())[0].id})
        elif tool_id == "lsp":
            Path(session.workdir, "ships.py").write_text("def launch(name):\n    return name\n\n\nlaunch('Argo')\n")
        elif tool_id == "json_write":
            Path(session.workdir, "ships.py").unlink()
        elif tool_id == "file.move":
            Path(session.workdir, "draft.txt").write_text("1\n")
        elif tool_id == "git.diff":
            Path(session.workdir, "b.txt").write_text("1\n2\n")
        yield ExampleCall(tool_id, called := {**arguments, **more}, await session.call(tool_id, called))
    for tool_id, arguments in FAILURES:
        yield ExampleCall(tool_id, arguments, await session.call(tool_id, arguments))


_CHANGING = re.compile(
    r"(?P<hash>\b[0-9a-f]{40}\b)"
    r"|(?P<when>\b20\d\d-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)"
    r"|(?P<id>\b(?P<kind>ses|mem|[a-z_]+(?=_[0-9a-f]{8}\b))_[0-9a-zA-Z]{8,}\b)"
    r"|(?P<output>(?<=/output/)[0-9a-f]{24})"
    r"|(?P<range>\b[0-9a-f]{7,12}\.\.[0-9a-f]{7,12}\b)"
    r"|(?P<host>127\.0\.0\.1:\d+|localhost:\d+)"
)
_FIGURES = {"confidence": 0.9, "duration_ms": 3.2, "lock_wait_ms": 0.4}


class StableText:
    """Replaces what differs between two runs by the same text each time."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._known: dict[str, str] = {}
        self._numbers = count(1)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return _CHANGING.sub(self._replaced, value.replace(self._folder, "/home/ada"))
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self(key): self._member(key, inner) for key, inner in items}
        return [self(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value

    def _member(self, key: str, value: Any) -> Any:
        return _FIGURES.get(key) or self(value)

    def _replaced(self, match: re.Match[str]) -> str:
        text = match[0]
        if match["when"]:
            return "2026-01-05T08:30:00+00:00"
        if match["output"]:
            return "ws"
        if match["host"]:
            return "example.org"
        if match["range"]:
            return "5d40f2c..9b1e77a"
        if text not in self._known:
            number = next(self._numbers)
            self._known[text] = f"{number:x}" * 40 if match["hash"] else f"{match['kind']}_{number:08d}"
            self._known[text] = self._known[text][:40]
        return self._known[text]


def recorded(played: Sequence[ExampleCall], decided: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return the decision, the example and the errors of each tool, in the form of the file."""
    steady = StableText(folder)
    found: dict[str, Any] = {}
    for one in played:
        arguments = steady(dict(one.arguments))
        if one.tool_id not in found:
            found[one.tool_id] = {
                "decision": decided[one.tool_id],
                "arguments": arguments,
                "data": steady(one.result.data),
            }
            found[one.tool_id]["errors"] = []
        else:
            error = {"arguments": arguments, "kind": one.result.error_kind, "text": steady(one.result.error_text)}
            found[one.tool_id]["errors"].append(error)
    return found


async def _main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with served(folder) as host, opened(folder, host) as session:
            played = [one async for one in play(session, host)]
        (plain := folder / "plain").mkdir()
        found = recorded(played, await decisions(plain), folder)
    faults = [f"{one.tool_id}: {one.result.error_text}" for one in played[: len(CALLS)] if not one.result.ok]
    faults += [f"{one.tool_id} {one.arguments}: no error" for one in played[len(CALLS) :] if one.result.ok]
    EXAMPLES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(*faults, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(_main())
