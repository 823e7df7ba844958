"""A tiny request and its answer over the wire between joined processes, beside a bare JSON round trip.

    python bench/joining.py        prints a table; exit code 1 if the target is missed

The peer is the least that asyncio allows: a Protocol on a Unix socket, orjson, one object a line, a counter for an id and
a future per request. Both answer from one second process and are asked in interleaved rounds; the figure is the median
of single round trips. Target: ours at most 1.3 times the bare one.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import orjson

from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import connect_to_lease_holder, listen_on_socket

TARGET = 1.3
ROUNDS, CALLS = 40, 250
BODY = {"a": 1, "b": 2}
STARTED = (sys.executable, __file__)
"""How the process that answers is started."""


class Bare(asyncio.Protocol):
    """One JSON object a line."""

    def __init__(self) -> None:
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.line(orjson.loads(line))

    def line(self, message: Message) -> None:
        self.transport.write(orjson.dumps({"id": message["id"], "ok": message["body"]}) + b"\n")


class BareClient(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.next = 0
        self.waiting: dict[int, asyncio.Future[Any]] = {}

    def line(self, message: Message) -> None:
        self.waiting.pop(message["id"]).set_result(message["ok"])

    async def request(self, body: Any) -> Any:
        self.next += 1
        self.waiting[self.next] = answer = asyncio.get_running_loop().create_future()
        self.transport.write(orjson.dumps({"id": self.next, "op": "echo", "body": body}) + b"\n")
        return await answer


async def serve(folder: Path) -> None:
    async def echo(body: Any) -> Any:
        return body

    async def wait_once(body: Any) -> Any:
        await asyncio.sleep(0)
        return body

    operations = OperationTable(
        {
            "echo": OperationSpec(echo, inline=True),
            "wait": OperationSpec(wait_once, inline=True),
            "task": OperationSpec(echo),
        }
    )

    def accept(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
        return operations, {}

    await listen_on_socket(folder, "ours", accept)
    await asyncio.get_running_loop().create_unix_server(Bare, str(folder / "bare"))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def measure(folder: Path) -> dict[str, list[float]]:
    _transport, bare = await asyncio.get_running_loop().create_unix_connection(BareClient, str(folder / "bare"))
    ours = await connect_to_lease_holder(folder, "ours")
    contenders: dict[str, Callable[[], Awaitable[Any]]] = {
        "bare asyncio + orjson, a line each": lambda: bare.request(BODY),
        "ours, a handler that does not wait": lambda: ours.request("echo", BODY),
        "ours, a handler that waits once": lambda: ours.request("wait", BODY),
        "ours, a task for each request": lambda: ours.request("task", BODY),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(ROUNDS + 1):
        for name, ask in contenders.items():
            for _ in range(CALLS):
                began = time.perf_counter_ns()
                answer = await ask()
                spent = (time.perf_counter_ns() - began) / 1000
                assert answer == BODY
                if round_number:
                    times[name].append(spent)
    await ours.aclose()
    return times


def main() -> int:
    if len(sys.argv) > 1:
        asyncio.run(serve(Path(sys.argv[1])))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        holder = subprocess.Popen([*STARTED, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with holder:
            assert holder.stdin and holder.stdout
            assert holder.stdout.readline() == "ready\n"
            times = asyncio.run(measure(folder))
            holder.stdin.close()
    medians = {name: statistics.median(kept) for name, kept in times.items()}
    base, ours, *_ = medians.values()
    print(f"{'one request and its answer':45} {'p50 µs':>9} {'× bare':>8}")
    for name, p50 in medians.items():
        print(f"{name:45} {p50:9.1f} {p50 / base:8.2f}")
    missed = ours > TARGET * base
    print(f"target: at most {TARGET} × bare: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
