"""``python -m tests.mcp_suite.upstreams``: nine public MCP servers, installed once, then all at once behind the gateway.

They come from npm and PyPI by ``handrail mcp import``, as a person would do it, into a cache (``MCP_CONFORMANCE_CACHE``
names another). From there on nothing is fetched: every server runs in its sandbox without any network. Each lists its tools;
harmless ones are called under a policy that allows those and nothing else, and one that no rule allows is refused. Ends with 1
where any of it did not go so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from handrail import Kernel
from handrail.contract.result import Result
from handrail.holding import HeldKernel
from handrail.registry.pins import Definition, StoredPins

CONNECT_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """One public server, and calls of it that harm nothing.

    :param settings: more of its ``[mcp.servers.NAME]``, as TOML
    :param beside: packages that it needs in other versions than it asks for
    :param calls: tool, arguments, and what the answer has in it, after ``!`` what the refusal has in it; None for any answer
    """

    name: str
    command: Sequence[str]
    calls: Sequence[tuple[str, Mapping[str, Any], str | None]]
    settings: str = ""
    beside: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def servers(workspace: Path) -> list[Server]:
    ws = str(workspace)
    return [
        Server(
            "everything",
            ("npx", "-y", "@modelcontextprotocol/server-everything"),
            [("echo", {"message": "hello"}, "hello"), ("get-sum", {"a": 2, "b": 3}, "5")],
        ),
        Server(
            "files",
            ("npx", "-y", "@modelcontextprotocol/server-filesystem", ws),
            [
                ("read_text_file", {"path": f"{ws}/notes.txt"}, "forty-two"),
                ("list_directory", {"path": ws}, "notes.txt"),
            ],
            'read = ["**"]',
        ),
        Server(
            "memory",
            ("npx", "-y", "@modelcontextprotocol/server-memory"),
            [("read_graph", {}, "entities")],
        ),
        Server(
            "thinking",
            ("npx", "-y", "@modelcontextprotocol/server-sequential-thinking"),
            [
                (
                    "sequentialthinking",
                    {"thought": "one", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
                    "thoughtNumber",
                )
            ],
        ),
        Server("browser", ("npx", "-y", "@playwright/mcp", "--headless"), [("browser_close", {}, None)]),
        Server(
            "git",
            ("uvx", "mcp-server-git", "--repository", ws),
            [("git_log", {"repo_path": ws}, "a first commit"), ("git_status", {"repo_path": ws}, "branch")],
            'read = ["**"]',
        ),
        Server(
            "time",
            ("uvx", "mcp-server-time", "--local-timezone", "UTC"),
            [("get_current_time", {"timezone": "UTC"}, "UTC")],
        ),
        Server("fetch", ("uvx", "mcp-server-fetch"), [("fetch", {"url": "http://127.0.0.1:9/"}, "!outside what")]),
        Server(
            "sqlite",
            ("uvx", "mcp-server-sqlite", "--db-path", "/tmp/test.db"),
            [("list_tables", {}, "["), ("read_query", {"query": "select 6 * 7 as answer"}, "42")],
            beside=("mcp<2",),
        ),
    ]


def prepare(root: Path) -> None:
    """Configuration, workspace and installed servers, where they are not there from before."""
    workspace, config = root / "ws", root / "config" / "handrail.toml"
    for folder in (workspace, config.parent, root / "state"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (workspace / "notes.txt").write_text("forty-two\n")
    if not (workspace / ".git").exists():
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        for command in (["init", "-q"], ["add", "notes.txt"], [*who, "commit", "-q", "-m", "a first commit"]):
            subprocess.run(["git", *command], cwd=workspace, check=True)
    place = ["-C", str(workspace), "--state", str(root / "state"), "--config", str(config)]
    if not config.exists():
        config.touch(mode=0o600)
        said = {one.name: {"command": one.command[0], "args": list(one.command[1:])} for one in servers(workspace)}
        given = root / "mcpServers.json"
        given.write_text(json.dumps({"mcpServers": said}))
        _handrail("mcp", "import", str(given), "--yes", "--no-install", *place)
        text = config.read_text()
        for one in servers(workspace):
            table = f"[mcp.servers.{one.name}]\n"
            text = text.replace(table, table + (one.settings + "\n" if one.settings else ""))
        config.write_text(text)
    listed = {one["name"]: one for one in json.loads(_handrail("mcp", "list", "--json", *place))}
    for one in servers(workspace):
        if "version" not in listed[one.name]:
            beside = [word for package in one.beside for word in ("--with", package)]
            print(f"installing {one.name}: {' '.join(one.command)}", flush=True)
            _handrail("mcp", "install", one.name, "--yes", *beside, *place)


def _handrail(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "handrail.faces.cli", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"handrail {' '.join(words)} ended with {done.returncode}")
    return done.stdout


async def tried(root: Path) -> int:
    """How much did not go as it is to go; a line is printed for each server."""
    workspace = root / "ws"
    wrong = 0
    rules = [f"allow mcp:{one.name}:{tool}" for one in servers(workspace) for tool, _, _ in one.calls]
    async with Kernel.open(
        workspace, state=root / "state", config=root / "config" / "handrail.toml", rules=rules
    ) as kernel:
        assert isinstance(kernel, HeldKernel), "somebody else holds this workspace"
        upstreams = kernel.rooms.upstreams
        names = [one.name for one in servers(workspace)]
        async with asyncio.timeout(CONNECT_S):
            ended = await asyncio.gather(*(upstreams[name].connected() for name in names), return_exceptions=True)
        for name, problem in zip(names, ended, strict=True):
            if isinstance(problem, BaseException):
                wrong += 1
                print(f"{name:12} NOT CONNECTED: {problem}", flush=True)
        pins = StoredPins(kernel.rooms.store.folders.state)
        for source in upstreams.sources:
            await kernel.rooms.look_again(source)
            own = [
                entry.spec
                for entry in kernel.generation.entries.values()
                if entry.foreign is not None and entry.foreign.name == source.name
            ]
            pins.approve(source.name, [Definition.of(spec) for spec in own])
            await kernel.rooms.look_again(source)
        session = await kernel.session(headless=True)
        try:
            wrong += sum(await asyncio.gather(*(_used(kernel, session, one) for one in servers(workspace))))
        finally:
            await session.close()
    return wrong


async def _used(kernel: HeldKernel, session: Any, server: Server) -> int:
    entries = {
        entry.id: entry
        for entry in kernel.generation.entries.values()
        if entry.foreign is not None and entry.foreign.name == server.name
    }
    off = [entry.id for entry in entries.values() if entry.withheld is not None]
    told: list[str] = [] if entries and not off else [f"{len(off)} of {len(entries)} tools are off"]
    for tool, arguments, wanted in server.calls:
        result: Result = await session.call(f"{server.name}_{tool}", dict(arguments))
        said = json.dumps(result.data, default=str) if result.ok else str(result.error_text)
        refusal = wanted is not None and wanted.startswith("!")
        if wanted is not None and (result.ok is refusal or wanted.lstrip("!") not in said):
            told.append(f"{tool} answered {said[:300]}")
    others = [tool_id for tool_id in entries if tool_id not in {f"{server.name}_{tool}" for tool, _, _ in server.calls}]
    if others:
        refused: Result = await session.call(others[0], {})
        if refused.error_kind not in ("denied", "invalid_input"):
            told.append(f"{others[0]}, which no rule allows, was answered {refused.error_kind}")
    print(
        f"{server.name:12} {len(entries):>3} tools, {len(server.calls)} calls {'ok' if not told else '; '.join(told)}",
        flush=True,
    )
    return len(told)


def main() -> int:
    root = Path(os.environ.get("MCP_CONFORMANCE_CACHE") or platformdirs.user_cache_path("handrail") / "conformance")
    place = root / "upstreams"
    prepare(place)
    with contextlib.suppress(KeyboardInterrupt):
        return 1 if asyncio.run(tried(place)) else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
