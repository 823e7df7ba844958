"""``python -m tests.mcp_suite.upstreams``: nine public MCP servers, installed once, behind one gateway.

They come from npm and PyPI by ``handrail mcp import``, as a person would do it, into a cache (``MCP_CONFORMANCE_CACHE``
names another). From there on nothing is fetched: every server runs in its sandbox without any network. Each lists its tools, and
each tool is called once, under a policy that allows these servers' tools; what one cannot do there it says by name. Before that
each is refused to a session that no rule allows anything. Prints a line for each tool, and ends with 1 where any of it did not
go so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import platformdirs
from tests.mcp_suite.odd_upstreams import SERVERS, call_odd_servers

from handrail import open_kernel
from handrail.contract.calls_and_results import Result
from handrail.kernel.local_kernel import LocalKernel
from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition

CONNECT_S = 120.0
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A picture of one point."""


Called = tuple[str, Mapping[str, Any], str | None]


@dataclass(frozen=True, slots=True)
class Server:
    """One public server, and a call of each of its tools.

    :param settings: more of its ``[mcp.servers.NAME]``, as TOML
    :param beside: packages that it needs in other versions than it asks for
    :param calls: tool, arguments, and what the answer has in it, after ``!`` what the refusal has in it; None for any answer
    """

    name: str
    command: Sequence[str]
    calls: Sequence[Called]
    settings: str = ""
    beside: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])


PAGE = "data:text/html," + quote(
    "<title>A page</title><form><input id=name><select id=pick><option>one<option>two</select></form>"
    "<button id=go onclick=\"document.title='went'\">Go</button><p id=end ondragover='event.preventDefault()'>forty-two</p>"
)
UNIX_SOCKETS = "\n[sandbox]\nunix_sockets = true\n"
"""Playwright and its browser speak to each other over one, which no sandbox lets them have unless its operator says so."""
READ_ONLY = "!read-only"
"""What a program is told that may only read."""


def browser() -> str | None:
    """A Chromium of this machine's: none is fetched."""
    for name in ("chromium-headless-shell", "chrome-headless-shell"):
        if (found := shutil.which(name)) is not None:
            return found
    return None


def servers(workspace: Path) -> list[Server]:
    ws = str(workspace)
    everything: list[Called] = [
        ("echo", {"message": "hello"}, "hello"),
        ("get-annotated-message", {"messageType": "error", "includeImage": True}, "Error"),
        ("get-env", {}, "PATH"),
        ("get-resource-links", {"count": 2}, "resource"),
        ("get-resource-reference", {"resourceType": "Text", "resourceId": 1}, "Resource 1"),
        ("get-structured-content", {"location": "Chicago"}, "temperature"),
        ("get-sum", {"a": 2, "b": 3}, "5"),
        ("get-tiny-image", {}, "image/png"),
        (
            "gzip-file-as-resource",
            {"name": "a.gz", "data": "data:text/plain,hello", "outputType": "resourceLink"},
            "a.gz",
        ),
        ("toggle-simulated-logging", {}, "ogging"),
        ("toggle-subscriber-updates", {}, "pdates"),
        ("trigger-long-running-operation", {"duration": 0.2, "steps": 2}, "completed"),
        ("simulate-research-query", {"topic": "tools", "ambiguous": False}, "tools"),  # a task
    ]
    box = f"{ws}/box"
    files: list[Called] = [
        ("read_file", {"path": f"{ws}/notes.txt"}, "forty-two"),
        ("read_text_file", {"path": f"{ws}/notes.txt"}, "forty-two"),
        ("read_media_file", {"path": f"{ws}/dot.png"}, "image/png"),
        ("read_multiple_files", {"paths": [f"{ws}/notes.txt", f"{ws}/dot.png"]}, "forty-two"),
        ("write_file", {"path": f"{box}/a.txt", "content": "one\n"}, "a.txt"),
        ("edit_file", {"path": f"{box}/a.txt", "edits": [{"oldText": "one", "newText": "two"}]}, "two"),
        ("create_directory", {"path": f"{box}/inner"}, "inner"),
        ("list_directory", {"path": ws}, "notes.txt"),
        ("list_directory_with_sizes", {"path": ws}, "notes.txt"),
        ("directory_tree", {"path": box}, "inner"),
        ("move_file", {"source": f"{box}/a.txt", "destination": f"{box}/inner/{time.time_ns()}.txt"}, "inner"),
        ("search_files", {"path": ws, "pattern": "**/*.txt"}, "notes.txt"),
        ("get_file_info", {"path": f"{ws}/notes.txt"}, "size"),
        ("list_allowed_directories", {}, ws),
    ]
    ada: dict[str, Any] = {"name": "Ada", "entityType": "person", "observations": ["counts"]}
    engine: dict[str, Any] = {"name": "Engine", "entityType": "thing", "observations": []}
    relation = {"from": "Ada", "to": "Engine", "relationType": "programs"}
    memory: list[Called] = [
        ("create_entities", {"entities": [ada, engine]}, "Ada"),
        ("create_relations", {"relations": [relation]}, "programs"),
        ("add_observations", {"observations": [{"entityName": "Ada", "contents": ["writes"]}]}, "writes"),
        ("read_graph", {}, "counts"),
        ("search_nodes", {"query": "Ada"}, "person"),
        ("open_nodes", {"names": ["Engine"]}, "thing"),
        ("delete_observations", {"deletions": [{"entityName": "Ada", "observations": ["counts"]}]}, "success"),
        ("delete_relations", {"relations": [relation]}, "success"),
        ("delete_entities", {"entityNames": ["Ada", "Engine"]}, "success"),
    ]
    thought = {"thought": "one", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    field = {"target": "#name", "name": "name", "type": "textbox", "value": "Ada"}
    pages: list[Called] = [
        ("browser_navigate", {"url": PAGE}, "A page"),
        ("browser_resize", {"width": 640, "height": 480}, ""),
        ("browser_snapshot", {}, "forty-two"),
        ("browser_find", {"text": "forty-two"}, "forty-two"),
        ("browser_evaluate", {"function": "() => 6 * 7"}, "42"),
        ("browser_run_code_unsafe", {"code": "async (page) => await page.title()"}, "A page"),
        ("browser_type", {"target": "#name", "text": "Ada"}, ""),
        ("browser_fill_form", {"fields": [field]}, ""),
        ("browser_press_key", {"key": "Tab"}, ""),
        ("browser_select_option", {"target": "#pick", "values": ["two"]}, ""),
        ("browser_hover", {"target": "#go"}, ""),
        ("browser_drag", {"startTarget": "#go", "endTarget": "#end"}, ""),
        ("browser_drop", {"target": "#end", "data": {"text/plain": "x"}}, ""),
        ("browser_click", {"target": "#go"}, ""),
        ("browser_wait_for", {"text": "forty-two"}, ""),
        ("browser_emulate_media", {"colorScheme": "dark"}, ""),
        ("browser_take_screenshot", {"scale": "css"}, "image"),
        ("browser_console_messages", {"level": "error"}, ""),
        ("browser_network_requests", {"static": False}, ""),
        ("browser_network_request", {"index": 99}, None),
        ("browser_handle_dialog", {"accept": True}, "!modal state"),
        ("browser_file_upload", {"paths": []}, "!modal state"),
        ("browser_navigate_back", {}, ""),
        ("browser_tabs", {"action": "list"}, "0"),
        ("browser_close", {}, ""),
    ]
    chromium = browser()
    if chromium is None:  # then each says that, but for the last, which has nothing to close
        pages = [(tool, given, "!chrom" if tool != "browser_close" else None) for tool, given, _ in pages]
    shown = ("--executable-path", chromium, "--no-sandbox", "--isolated") if chromium is not None else ()
    repo = {"repo_path": ws}
    git: list[Called] = [
        ("git_status", repo, "branch"),
        ("git_log", repo, "a first commit"),
        ("git_show", {**repo, "revision": "HEAD"}, "forty-two"),
        ("git_branch", {**repo, "branch_type": "local"}, "ma"),
        ("git_diff", {**repo, "target": "HEAD"}, ""),
        ("git_diff_unstaged", repo, ""),
        ("git_diff_staged", repo, ""),
        # It may read the workspace, and no server writes into .git.
        ("git_add", {**repo, "files": ["dot.png"]}, READ_ONLY),
        ("git_commit", {**repo, "message": "x"}, "!staged"),
        ("git_reset", repo, READ_ONLY),
        ("git_create_branch", {**repo, "branch_name": "other"}, "!lock"),
        ("git_checkout", {**repo, "branch_name": "nowhere"}, "!nowhere"),
    ]
    clock: list[Called] = [
        ("get_current_time", {"timezone": "UTC"}, "UTC"),
        (
            "convert_time",
            {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
            "21:00",
        ),
    ]
    sqlite: list[Called] = [
        ("list_tables", {}, "["),
        ("create_table", {"query": "create table if not exists t (n integer)"}, "success"),
        ("write_query", {"query": "insert into t values (42)"}, "affected_rows"),
        ("read_query", {"query": "select 6 * 7 as answer"}, "42"),
        ("describe_table", {"table_name": "t"}, "integer"),
        ("append_insight", {"insight": "it is forty-two"}, "Insight"),
    ]
    return [
        Server("everything", ("npx", "-y", "@modelcontextprotocol/server-everything"), everything),
        Server(
            "files",
            ("npx", "-y", "@modelcontextprotocol/server-filesystem", ws),
            files,
            'read = ["**"]\nwrite = ["box", "box/**"]',
        ),
        Server(
            "memory",
            ("npx", "-y", "@modelcontextprotocol/server-memory"),
            memory,
            'env = { MEMORY_FILE_PATH = "/tmp/memory.json" }',
        ),
        Server(
            "thinking",
            ("npx", "-y", "@modelcontextprotocol/server-sequential-thinking"),
            [("sequentialthinking", thought, "thoughtNumber")],
        ),
        Server("browser", ("npx", "-y", "@playwright/mcp", "--headless", *shown), pages, "timeout_ms = 120000"),
        Server("git", ("uvx", "mcp-server-git", "--repository", ws), git, 'read = ["**"]'),
        Server("time", ("uvx", "mcp-server-time", "--local-timezone", "UTC"), clock),
        Server(
            "fetch", ("uvx", "mcp-server-fetch"), [("fetch", {"url": "http://127.0.0.1:9/"}, "!not among its hosts")]
        ),
        Server(
            "sqlite",
            ("uvx", "mcp-server-sqlite", "--db-path", "/tmp/test.db"),
            sqlite,
            beside=("mcp<2",),
        ),
    ]


def prepare(root: Path) -> None:
    """Configuration, workspace and installed servers, where they are not there from before."""
    workspace, config = root / "ws", root / "config" / "handrail.toml"
    shutil.rmtree(root / "state" / "ws", ignore_errors=True)  # the log of a run before, maybe of another version of it
    for folder in (workspace, config.parent, root / "state"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (workspace / "notes.txt").write_text("forty-two\n")
    (workspace / "dot.png").write_bytes(DOT)
    (workspace / "box").mkdir(exist_ok=True)
    if not (workspace / ".git").exists():
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        for command in (["init", "-q"], ["add", "notes.txt"], [*who, "commit", "-q", "-m", "a first commit"]):
            subprocess.run(["git", *command], cwd=workspace, check=True)
    place = ["-C", str(workspace), "--state", str(root / "state"), "--config", str(config)]
    said = {one.name: {"command": one.command[0], "args": list(one.command[1:])} for one in servers(workspace)}
    given, whole = root / "mcpServers.json", json.dumps({"mcpServers": said})
    mark, now = (
        root / "configured",
        whole + UNIX_SOCKETS + f"{CONNECT_S}" + "".join(one.settings for one in servers(workspace)),
    )
    if not config.exists() or not mark.exists() or mark.read_text() != now:
        config.unlink(missing_ok=True)
        config.touch(mode=0o600)
        given.write_text(whole)
        _handrail("mcp", "import", str(given), "--yes", "--no-install", *place)
        text = config.read_text()
        for one in servers(workspace):
            table = f"[mcp.servers.{one.name}]\n"
            text = text.replace(table, f"{table}connect_timeout_ms = {round(CONNECT_S * 1000)}\n{one.settings}\n")
        if browser() is not None:
            text += UNIX_SOCKETS
        config.write_text(text)
        mark.write_text(now)
    listed = {one["name"]: one for one in json.loads(_handrail("mcp", "list", "--json", *place))}
    for one in servers(workspace):
        if "version" not in listed[one.name]:
            beside = [word for package in one.beside for word in ("--with", package)]
            print(f"installing {one.name}: {' '.join(one.command)}", flush=True)
            _handrail("mcp", "install", one.name, "--yes", *beside, *place)


def _handrail(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "handrail", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"handrail {' '.join(words)} ended with {done.returncode}")
    return done.stdout


async def tried(root: Path) -> int:
    """How much did not go as it is to go; a line is printed for each server."""
    workspace = root / "ws"
    wrong = 0
    rules = [f"allow mcp:{one.name}:{tool}" for one in servers(workspace) for tool, _, _ in one.calls]
    async with open_kernel(workspace, state=root / "state", config=root / "config" / "handrail.toml") as kernel:
        assert isinstance(kernel, LocalKernel), "somebody else holds this workspace"
        upstreams = kernel.components.upstreams
        names = [one.name for one in servers(workspace)]
        async with asyncio.timeout(CONNECT_S):
            ended = await asyncio.gather(
                *(upstreams[name].ensure_connected() for name in names), return_exceptions=True
            )
        for name, problem in zip(names, ended, strict=True):
            if isinstance(problem, BaseException):
                wrong += 1
                print(f"{name:12} NOT CONNECTED: {problem}", flush=True)
        pins = StoredPins(kernel.components.store.folders.state)
        for source in upstreams.sources:
            await kernel.components.publish_source_tools(source)
            own = [
                entry.spec
                for entry in kernel.generation.entries.values()
                if entry.third_party is not None and entry.third_party.name == source.name
            ]
            pins.approve(source.name, [ThirdPartyDefinition.from_spec(spec) for spec in own])
            await kernel.components.publish_source_tools(source)
        stranger = await kernel.session(headless=True)
        wrong += await _refused(kernel, stranger)
        await stranger.close()
        session = await kernel.session(headless=True, rules=rules)
        try:
            wrong += sum(await asyncio.gather(*(_used(kernel, session, one) for one in servers(workspace))))
        finally:
            await session.close()
    return wrong


async def _used(kernel: LocalKernel, session: Any, server: Server) -> int:
    entries = {
        entry.id: entry
        for entry in kernel.generation.entries.values()
        if entry.third_party is not None and entry.third_party.name == server.name
    }
    wrong: list[tuple[str, str]] = []
    lines: list[tuple[str, str]] = []
    if off := [entry.id for entry in entries.values() if entry.unavailable_reason is not None]:
        wrong.append(("*", f"{len(off)} tools are off"))
    called = {f"{server.name}_{tool}" for tool, _, _ in server.calls}
    wrong += [(tool_id, "is not called here") for tool_id in sorted(entries.keys() ^ called)]
    for tool, arguments, wanted in server.calls:
        result: Result = await session.call(f"{server.name}_{tool}", dict(arguments))
        said = json.dumps(result.data, default=str) if result.ok else str(result.error_text)
        refusal = wanted is not None and wanted.startswith("!")
        told = " ".join(said.split())
        if wanted is not None and (result.ok is refusal or wanted.lstrip("!").lower() not in said.lower()):
            wrong.append((tool, f"answered {told[:600]}"))
        else:
            lines.append((tool, "ok" if result.ok else f"{result.error_kind}: {told[:100]}"))
    for tool, outcome in lines:
        print(f"{server.name:10} {tool:32} {outcome}", flush=True)
    for tool, outcome in wrong:
        print(f"{server.name:10} {tool:32} WRONG: {outcome}", flush=True)
    return len(wrong)


async def _refused(kernel: LocalKernel, session: Any) -> int:
    """Return how many tools a headless session without rules may call."""
    ids = [entry.id for entry in kernel.generation.entries.values() if entry.third_party is not None]
    wrong = 0
    for tool_id in ids:
        result: Result = await session.call(tool_id, {})
        if result.error_kind not in ("denied", "invalid_input"):
            wrong += 1
            print(f"{tool_id}, which no rule allows, was answered {result.error_kind}", flush=True)
    print(f"{len(ids)} tools are listed; to a session without a rule for them {wrong} were not refused", flush=True)
    return wrong


def main() -> int:
    root = Path(os.environ.get("MCP_CONFORMANCE_CACHE") or platformdirs.user_cache_path("handrail") / "conformance")
    with tempfile.TemporaryDirectory() as folder:
        odd = asyncio.run(call_odd_servers(Path(folder)))
    for line in odd:
        print(f"odd server {line}", flush=True)
    print(f"{len(SERVERS) - len(odd)} of {len(SERVERS)} odd servers are usable", flush=True)
    place = root / "upstreams"
    prepare(place)
    with contextlib.suppress(KeyboardInterrupt):
        return 1 if asyncio.run(tried(place)) or odd else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
