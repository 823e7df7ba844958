"""Properties that only a second process can show: another user, and a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.ipc.doors import NAME, house, line_of, process

from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable
from handrail.ipc.wire.peer_connection import ConnectionLost
from handrail.ipc.wire.socket_handshake import (
    ConnectionRejected,
    LeaseHolderNotResponding,
    NoLeaseHolder,
    connect_to_lease_holder,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

HOLDER = """
import asyncio, sys
from pathlib import Path
from handrail.ipc.wire.socket_handshake import listen_on_socket
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable

async def main():
    async def park(body):
        print("asked", body, flush=True)
        await asyncio.Event().wait()
    await listen_on_socket(Path(sys.argv[1]), sys.argv[2], lambda *_: (OperationTable({"park": OperationSpec(park)}), {}))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""

GUEST = """
import asyncio, sys
from pathlib import Path
from handrail.ipc.wire.socket_handshake import connect_to_lease_holder

async def main():
    joined = await connect_to_lease_holder(Path(sys.argv[1]), sys.argv[2])
    await joined.request("park", 1)

asyncio.run(main())
"""

STRANGER = """
import os, socket, sys
place = os.open(sys.argv[1], os.O_PATH)
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
line = socket.socket(socket.AF_UNIX)
line.connect(f"/proc/self/fd/{place}")
said = b""
while more := line.recv(65536):
    said += more
print(said[4:].decode())
"""

STRANGE_HOLDER = """
import os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o600)
os.setresuid(65534, 65534, 65534)
door.listen()
print("ready", flush=True)
line, _ = door.accept()
print("heard", len(line.recv(65536)), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "own"
    made.mkdir(mode=0o700)
    return made


@as_root
async def test_a_process_of_another_user_is_refused_before_its_messages_are_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(folder) as doors:
        (folder / NAME).chmod(0o666)  # as if somebody had opened it: the system's word on the peer still holds
        with process(STRANGER, folder / NAME) as stranger:
            said = await line_of(stranger)
        assert '"kind":"user"' in said and "The other process belongs to user 65534, this process to user 0" in said
        assert "belongs to user 65534" in caplog.text
        assert doors.accepted.empty() and not doors.listener.connections


@as_root
async def test_a_client_sends_nothing_to_a_process_of_another_user_at_the_holders_socket(folder: Path) -> None:
    with process(STRANGE_HOLDER, folder / NAME) as stranger:
        assert await line_of(stranger) == "ready"
        with pytest.raises(ConnectionRejected, match="The other process belongs to user 65534"):
            await connect_to_lease_holder(folder, NAME)
        assert await line_of(stranger) == "heard 0"


async def test_a_killed_holder_fails_pending_requests_and_can_be_replaced(folder: Path) -> None:
    with process(HOLDER, folder, NAME) as holder:
        assert await line_of(holder) == "ready"
        heard: list[str] = []
        joined = await connect_to_lease_holder(folder, NAME, lost=heard.append)
        assert joined.peer is not None and joined.peer.pid == holder.pid
        pending = [asyncio.create_task(joined.request("park", number)) for number in range(3)]
        assert [await line_of(holder) for _ in pending] == ["asked 0", "asked 1", "asked 2"]
        holder.kill()
        for failed in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(failed, ConnectionLost)
        await joined.closed.wait()
        assert heard == [joined.lost_reason]
        with pytest.raises(NoLeaseHolder):
            await connect_to_lease_holder(folder, NAME)
    async with house(folder) as doors:
        await doors.join()


async def test_a_call_continues_after_its_client_is_killed(folder: Path) -> None:
    begun, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def park(body: Any) -> None:
        begun.set()
        await go.wait()
        ended.set()

    async with house(folder, OperationTable({"park": OperationSpec(park, inline=True)})) as doors:
        with process(GUEST, folder, NAME) as guest:
            held = await doors.accepted.get()
            await begun.wait()
            guest.kill()
            await held.closed.wait()
        assert held.unanswered_peer_request_count == 1
        go.set()
        await ended.wait()
        await doors.join()
        assert held.unanswered_peer_request_count == 0


async def test_a_stopped_holder_is_distinguished_from_a_dead_one(folder: Path) -> None:
    with process(HOLDER, folder, NAME) as holder:
        assert await line_of(holder) == "ready"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(
            LeaseHolderNotResponding, match=rf"Process {holder.pid} holds the workspace but did not answer"
        ):
            await connect_to_lease_holder(folder, NAME, seconds=0.3)
        holder.send_signal(signal.SIGCONT)
        await (await connect_to_lease_holder(folder, NAME)).aclose()
