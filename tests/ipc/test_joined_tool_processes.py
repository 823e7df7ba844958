"""Tools in another process that is killed or stopped during a call."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.arbiter.toolbox import kinds_of
from tests.ipc.doors import NAME, line_of, process

from handrail import Event, Kernel, tool
from handrail.ipc.server.client_tools import ClientProcessTools
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import listen_on_socket
from handrail.testing.scripted_kernel import temporary_kernel

BRINGER = """
import asyncio, sys, threading
from pathlib import Path
from handrail import Runtime, tool
from handrail.ipc.wire.socket_handshake import connect_to_lease_holder
from handrail.ipc.client.tool_host import ToolHost, describe_client_tools
from handrail.ipc.wire.operation_dispatch import OperationTable

@tool(id="far.write", side_effect="external", locks=["place:X"], requires={"fs": {"write": ["{workspace}"]}})
async def write(path: str, runtime: Runtime) -> str:
    "Write a file, then wait for ever."
    await runtime.files.write(path, b"written")
    runtime.set_partial_result({"written": path})
    print("writing", flush=True)
    await asyncio.Event().wait()

@tool(id="far.hold", side_effect="external", locks=["place:X"], timeout_ms=30)
def hold() -> str:
    "Hold a thread until told to end by a line."
    print("holding", flush=True)
    sys.stdin.readline()
    return "released"

@tool(id="far.pid", side_effect="read", locks=[])
async def pid() -> int:
    "The process it runs in."
    import os
    return os.getpid()

@tool(id="far.soon", side_effect="read", locks=[], timeout_ms=100)
async def soon() -> None:
    "Nothing, and at once."

async def main():
    tools = [write, hold, pid, soon]
    bench = ToolHost(tools)
    operations = OperationTable(bench.requests, bench.notifications)
    joined = await connect_to_lease_holder(Path(sys.argv[1]), sys.argv[2], operations, {"tools": describe_client_tools(tools)})
    bench.attach_connection(joined)
    print("joined", flush=True)
    await joined.closed.wait()

asyncio.run(main())
"""


@tool(id="near.next", side_effect="external", locks=["place:X"])
async def following() -> str:
    """Needs the place."""
    return "mine"


@asynccontextmanager
async def holder(folder: Path, brought: ClientProcessTools) -> AsyncGenerator[Kernel]:
    given = [*brought.tools, following]
    rules = ["allow far.*", "allow near.*", "allow fs.write *"]
    async with temporary_kernel(folder, tools=given, rules=rules, settings="[limits]\ngrace_ms = 20\n") as kernel:
        yield kernel


@asynccontextmanager
async def door(folder: Path) -> AsyncGenerator[asyncio.Queue[ClientProcessTools]]:
    """Where processes bring tools."""
    (folder / "own").mkdir(mode=0o700)
    came: asyncio.Queue[ClientProcessTools] = asyncio.Queue()

    def accept(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
        brought = ClientProcessTools(connection, hello["tools"])
        came.put_nowait(brought)
        return OperationTable(brought.requests, brought.notifications), {}

    listener = await listen_on_socket(folder / "own", NAME, accept)
    try:
        yield came
    finally:
        await listener.aclose()


@pytest.mark.proves("L-07")
async def test_a_killed_process_leaves_an_interrupted_call_record_and_unavailable_tools(
    tmp_path: Path,
) -> None:
    async with door(tmp_path) as came:
        with process(BRINGER, tmp_path / "own", NAME) as bringer:
            assert await line_of(bringer) == "joined"
            brought = await came.get()
            assert brought.process_display_name == f"process {bringer.pid}"
            async with holder(tmp_path, brought) as kernel:
                session = await kernel.session()
                assert (await session.call("far.pid", {})).data == bringer.pid != os.getpid()
                running = asyncio.create_task(session.call("far.write", {"path": "a.txt"}))
                assert await line_of(bringer) == "writing"
                os.kill(bringer.pid, signal.SIGKILL)
                result = await running
                assert result.error_kind == "interrupted"
                assert "The process of `far.write` disconnected during the call" in str(result.error_text)
                assert (tmp_path / "ws" / "a.txt").read_bytes() == b"written"
                call = f"{session.id}/2.0"
                assert await kinds_of(kernel, call) == ["proposed", "authorised", "intended", "committed"]
                *_, last = kernel.log.reader.records(call=call)
                assert last.body is not None
                assert last.body["result"]["metadata"]["error_kind"] == "interrupted"
                assert (await session.call("near.next", {})).data == "mine"  # its locks are free
                later = await session.call("far.pid", {})
                assert later.error_kind == "unavailable"
                assert "Nothing was run" in str(later.error_text)


@pytest.mark.proves("L-07")
async def test_a_thread_in_another_process_keeps_its_locks_until_it_returns(tmp_path: Path) -> None:
    async with door(tmp_path) as came:
        with process(BRINGER, tmp_path / "own", NAME) as bringer:
            assert await line_of(bringer) == "joined"
            async with holder(tmp_path, await came.get()) as kernel:
                session = await kernel.session()
                result = await session.call("far.hold", {})
                assert (result.error_kind, result.metadata["still_running"]) == ("timeout", True)
                waiting = asyncio.Event()

                def watch(event: Event) -> None:
                    if event.kind == "awaiting-locks":
                        waiting.set()

                session.watch_events(watch)
                wanting = asyncio.create_task(session.call("near.next", {}))
                await waiting.wait()
                assert not wanting.done()
                assert bringer.stdin
                bringer.stdin.write("end\n")
                bringer.stdin.flush()
                assert (await wanting).data == "mine"


async def test_a_call_times_out_when_the_process_of_its_tool_is_stopped(tmp_path: Path) -> None:
    async with door(tmp_path) as came:
        with process(BRINGER, tmp_path / "own", NAME) as bringer:
            assert await line_of(bringer) == "joined"
            async with holder(tmp_path, await came.get()) as kernel:
                session = await kernel.session()
                os.kill(bringer.pid, signal.SIGSTOP)
                result = await session.call("far.soon", {})
                assert (result.error_kind, result.metadata["still_running"]) == ("timeout", True)
                os.kill(bringer.pid, signal.SIGCONT)
                assert (await session.call("far.pid", {})).data == bringer.pid
