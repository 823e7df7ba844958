"""200 clients at once call one tool over HTTP, in both eras of the protocol: no error, and nobody waits much longer than others.

The server is a process of its own, with all nine steps and its log; each client has a connection that it keeps and asks its
next question when it has the answer to the last. What is printed is how long one call took, among 200 that ran.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLIENTS, CALLS = 200, 20
BOUND = 5.0
STARTED = (sys.executable, __file__)
"""How the server is started."""
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
ENVELOPE: dict[str, Any] = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}


async def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": a + b}


async def serve(folder: Path) -> None:
    from handrail import open_kernel, tool
    from handrail.frontends.mcp.http.http_server import HttpFrontendSettings, serve_http
    from handrail.frontends.mcp.tool_listing import McpFrontendSettings

    ours = tool(id="add", side_effect="read", locks=[])(add)
    workspace = folder / "workspace"
    workspace.mkdir()
    async with open_kernel(workspace, tools=[ours], rules=["allow add"], state=folder / "state", config=None) as kernel:
        await serve_http(
            kernel,
            McpFrontendSettings(),
            HttpFrontendSettings.from_options("127.0.0.1:0"),
            lambda where: print(where, flush=True),
        )


class Caller:
    """One client on one connection."""

    def __init__(self, port: int, *, modern: bool) -> None:
        self.port = port
        self.modern = modern
        self.session = ""

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        if not self.modern:
            await self.request("initialize", HELLO)
            await self.request("notifications/initialized", {}, number=None)

    async def call(self, number: int) -> None:
        params: dict[str, Any] = {"name": "add", "arguments": {"a": number, "b": 1}}
        body = await self.request("tools/call", {**params, "_meta": ENVELOPE} if self.modern else params, number)
        if f'"sum":{number + 1}'.encode() not in body.replace(b" ", b"").replace(b"\\", b""):
            raise SystemExit(f"a call gave {body[:500]!r}")

    async def request(self, method: str, params: Any, number: int | None = 0) -> bytes:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        if number is not None:
            message["id"] = number
        body = json.dumps(message).encode()
        headers = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Accept": "application/json, text/event-stream",
        }
        if self.modern:
            headers |= {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method, "Mcp-Name": "add"}
        elif self.session:
            headers |= {"Mcp-Session-Id": self.session, "MCP-Protocol-Version": "2025-11-25"}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body)
        return await self._answer()

    async def _answer(self) -> bytes:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if not status.split(" ")[1].startswith("2"):
            raise SystemExit(f"the server answered {status}")
        self.session = fields.get("mcp-session-id", self.session)
        if "content-length" in fields:
            return await self.reader.readexactly(int(fields["content-length"]))
        found = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            found += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return found


async def measure(port: int, *, modern: bool) -> list[float]:
    callers = [Caller(port, modern=modern) for _ in range(CLIENTS)]
    for caller in callers:
        await caller.open()
    taken: list[float] = []

    async def work(caller: Caller, rounds: int, keep: list[float]) -> None:
        for number in range(rounds):
            began = time.perf_counter()
            await caller.call(number)
            keep.append(time.perf_counter() - began)

    await asyncio.gather(*(work(caller, 2, []) for caller in callers))
    await asyncio.gather(*(work(caller, CALLS, taken) for caller in callers))
    for caller in callers:
        caller.writer.close()
    return taken


async def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        server = await asyncio.create_subprocess_exec(*STARTED, "--serve", folder, stdout=asyncio.subprocess.PIPE)
        assert server.stdout is not None
        try:
            port = int((await server.stdout.readline()).decode().rpartition(":")[2].partition("/")[0])
            worst = 0.0
            print(f"{CLIENTS} clients at once, {CLIENTS * CALLS:,} calls: one call, in ms")
            print(f"{'':14} {'p50':>8} {'p99':>8} {'calls/s':>9}   p99 × p50")
            for era, modern in (("2025-11-25", False), ("2026-07-28", True)):
                began = time.perf_counter()
                taken = await measure(port, modern=modern)
                rate = len(taken) / (time.perf_counter() - began)
                p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[-1]
                worst = max(worst, p99 / p50)
                print(f"{era:14} {p50 * 1e3:8.1f} {p99 * 1e3:8.1f} {rate:9.0f}   {p99 / p50:.2f}")
        finally:
            server.terminate()
            await server.wait()
    print(f"\nno call failed; p99 is {worst:.2f} × p50 (bound {BOUND}): {'met' if worst < BOUND else 'MISSED'}")
    return 0 if worst < BOUND else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
    else:
        sys.exit(asyncio.run(main()))
