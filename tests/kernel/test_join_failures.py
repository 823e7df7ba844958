"""Faults around a workspace with several processes: each gets an error text, and no other process is harmed."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import greeting, joined_kernel, second
from tests.kernel.members import members

from handrail import Kernel, StartError, open_kernel
from handrail.ipc.client import reconnecting_client
from handrail.ipc.wire.message_frames import Message, encode_frame
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import PROTOCOL_VERSION, HandshakeServer
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.record.verification import verify_log
from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.store.lease import WorkspaceLease, find_lease_holder
from handrail.store.state_folders import StateFolders, locate_folders
from handrail.store.workspace_store import WorkspaceStore
from handrail.testing.scripted_kernel import temporary_kernel

JOIN = """
import asyncio, sys
from pathlib import Path
from handrail import Kernel, StartError, open_kernel
from handrail.kernel.remote_kernel import RemoteKernel

folder = Path(sys.argv[1])

async def main():
    try:
        async with open_kernel(folder / "ws", state=folder / "state", config=folder / "config" / "handrail.toml") as kernel:
            result = await (await kernel.session()).call("read", {"path": "a.txt"})
            print("joined" if isinstance(kernel, RemoteKernel) else "holds", result.type)
    except StartError as error:
        print("refused:", error)

asyncio.run(main())
"""
HELLO: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "handrail": "", **greeting()}


async def dialled(kernel: Kernel) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection to the socket where others join, however long its path is."""
    folder = os.open(kernel.state_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        (socket,) = Path(kernel.state_folder).glob("*.sock")
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{socket.name}")
    finally:
        os.close(folder)


@pytest.mark.proves("L-07")
@pytest.mark.parametrize("sent", ["half a greeting", "half a message"])
async def test_an_unfinished_message_of_one_process_delays_no_other_process(tmp_path: Path, sent: str) -> None:
    options = {"state": tmp_path / "state", "config": tmp_path / "config" / "handrail.toml", "rules": ["allow write"]}
    async with temporary_kernel(tmp_path, rules=["allow write"]) as held:
        reader, writer = await dialled(held)
        greeting = encode_frame({"hello": HELLO})
        if sent == "half a greeting":
            writer.write(greeting[:-2])
        else:
            writer.write(greeting)
            await reader.readexactly(4)  # it was let in
            writer.write(encode_frame({"id": 1, "op": "open", "body": {}})[:-2])
        async with open_kernel(tmp_path / "ws", **options) as joined:  # pyright: ignore[reportArgumentType]
            assert isinstance(joined, RemoteKernel)
            for number, kernel in enumerate((held, joined)):
                session = await kernel.session()
                for _ in range(20):
                    assert (await session.call("write", {"path": f"{number}", "content": "x"})).ok
        writer.close()


@pytest.mark.proves("L-07")
async def test_a_process_cannot_join_a_kernel_on_the_home_folder_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, config = tmp_path / "home", tmp_path / "handrail.toml"
    home.mkdir()
    config.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with open_kernel(home, state=tmp_path / "state", config=config, allow_home=True) as held:
        for workspace in (home, Path("/")):
            with pytest.raises(StartError, match="--allow-home"):
                async with open_kernel(workspace, state=tmp_path / "state", config=config):
                    pass
        async with open_kernel(home, state=tmp_path / "state", config=config, allow_home=True) as joined:
            assert isinstance(joined, RemoteKernel) and joined.workdir == held.workdir


@pytest.mark.proves("L-07", "G-10")
async def test_a_full_disk_prevents_a_takeover_until_space_is_available(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = {"state": tmp_path / "state", "config": tmp_path / "config" / "handrail.toml", "rules": ["allow write"]}
    async with members(tmp_path, ()) as (holder,):
        opened = open_kernel(tmp_path / "ws", **options)  # pyright: ignore[reportArgumentType]
        async with opened as kernel:
            assert isinstance(kernel, RemoteKernel)
            session = await kernel.session()
            assert (await session.call("write", {"path": "a.txt", "content": "1"})).ok
            resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
            try:
                holder.kill()
                await holder.process.wait()
                for _ in range(2):
                    refused = await session.call("write", {"path": "b.txt", "content": "2"})
                    assert refused.error_kind == "unavailable"
                    assert re.search(
                        r"[Nn]othing was run.*cannot be written: .*(check the disk|Free some disk space)", str(refused)
                    )
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert not (tmp_path / "ws" / "b.txt").exists()
            # A call shares the search for a holder that is under way, which may have begun while there was no room.
            while not (result := await session.call("write", {"path": "c.txt", "content": "3"})).ok:
                assert result.error_kind == "unavailable"
            await kernel.log.flush()
            assert verify_log(kernel.log.reader).ok
            taken = find_lease_holder(locate_folders(tmp_path / "ws", tmp_path / "state"))
            assert taken is not None and taken.pid == os.getpid()


@pytest.mark.proves("L-07", "G-10")
async def test_a_process_with_read_only_state_gets_an_error_and_others_keep_working(tmp_path: Path) -> None:
    bwrap = next(find_bubblewrap_programs(), None)
    state = str(tmp_path / "state")
    async with temporary_kernel(tmp_path, rules=["allow write"]) as held:
        around = [bwrap or "", "--dev-bind", "/", "/", "--ro-bind", state, state, "--"]
        if bwrap is None or subprocess.run([*around, "true"], capture_output=True).returncode != 0:
            pytest.skip("nothing here can mount a folder read-only")
        session = await held.session()
        assert (await session.call("write", {"path": "a.txt", "content": "x"})).ok
        told = await asyncio.to_thread(
            subprocess.run,
            [*around, sys.executable, "-c", JOIN, str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert told.stderr == ""
        assert "cannot be written" in told.stdout or told.stdout == "joined output\n", told.stdout
        assert (await session.call("write", {"path": "a.txt", "content": "y"})).ok


@pytest.mark.proves("L-07")
async def test_all_connected_processes_find_a_new_lease_holder_while_the_old_one_is_paused(tmp_path: Path) -> None:
    async with members(tmp_path, (), (), (), ()) as (holder, *others):
        holder.pause()
        for _ in range(3):
            told = await asyncio.gather(*(each.call("glob", {"pattern": "*"}) for each in others))
            assert [each["result"]["type"] for each in told] == ["output"] * 3, told
        os.kill(holder.process.pid, signal.SIGKILL)
        for each in others:
            await each.leave()


@pytest.mark.proves("L-07")
async def test_a_client_waits_longer_for_a_slow_lease_holder_at_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, greetings = HandshakeServer.receive, 0

    def late(self: HandshakeServer, connection: IpcConnection, message: Message) -> None:
        nonlocal greetings
        greetings += 1

        def now() -> None:
            if connection.lost_reason is None:
                heard(self, connection, message)

        asyncio.get_running_loop().call_later(0.3, now)

    monkeypatch.setattr(HandshakeServer, "receive", late)
    monkeypatch.setattr(reconnecting_client, "_GREETING_TIMEOUT_S", 0.05)
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path) as joined:
        assert greetings > 1
        assert (await (await joined.session()).call("glob", {"pattern": "*"})).ok


async def test_opening_a_workspace_waits_for_a_process_that_writes_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ws").mkdir()
    waits, until_free = asyncio.Event(), WorkspaceLease.wait_until_free

    async def seen(folders: StateFolders, *, interval_s: float) -> None:
        waits.set()
        await until_free(folders, interval_s=interval_s)

    async def opened() -> int:
        async with second(tmp_path) as kernel:
            return kernel.components.store.lease.token if isinstance(kernel, LocalKernel) else 0

    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "handrail.toml").write_text("")
    monkeypatch.setattr(WorkspaceLease, "wait_until_free", staticmethod(seen))
    store = WorkspaceStore.open(tmp_path / "ws", tmp_path / "state", frontend="approve", protocol=PROTOCOL_VERSION)
    opening = asyncio.ensure_future(opened())
    await waits.wait()
    assert not opening.done()
    await store.aclose()
    assert await opening == store.lease.token + 1
