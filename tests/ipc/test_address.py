"""The socket file: private, also with a long path, and replaced only if it is ours and dead."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
from tests.ipc.doors import NAME, house

from handrail.contract.errors import StartError, UsageError
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import NoLeaseHolder, connect_to_lease_holder, listen_on_socket

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


async def echo(body: object) -> object:
    return body


OPERATIONS = OperationTable({"echo": OperationSpec(echo, inline=True)})


def accept(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
    return OPERATIONS, {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "own"
    made.mkdir(mode=0o700)
    return made


def dead_socket(path: Path, mode: int = 0o600) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    path.chmod(mode)


async def test_a_socket_path_can_be_longer_than_a_socket_address(folder: Path) -> None:
    deep = folder / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True, mode=0o700)
    async with house(deep, OPERATIONS) as doors:
        assert await (await doors.join()).request("echo", 1) == 1
        assert doors.listener.path.is_socket()
    assert not list(deep.iterdir())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_the_socket_is_private_to_its_owner_under_any_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with house(folder, OPERATIONS):
            assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
    finally:
        os.umask(before)


async def test_a_client_finds_no_holder_when_no_process_listens(folder: Path) -> None:
    for place in (folder, folder / "missing"):
        with pytest.raises(NoLeaseHolder):
            await connect_to_lease_holder(place, NAME)
    dead_socket(folder / NAME)
    with pytest.raises(NoLeaseHolder, match="any longer"):
        await connect_to_lease_holder(folder, NAME)


@pytest.mark.parametrize("mode", [0o600, 0o777])
async def test_a_dead_socket_of_the_same_user_is_replaced(folder: Path, mode: int) -> None:
    dead_socket(folder / NAME, mode)
    async with house(folder, OPERATIONS) as doors:
        assert await (await doors.join()).request("echo", 1) == 1


async def test_a_live_socket_is_not_replaced(folder: Path) -> None:
    async with house(folder, OPERATIONS) as doors:
        with pytest.raises(StartError, match="Another process listens"):
            await listen_on_socket(folder, NAME, accept)
        assert await (await doors.join()).request("echo", 1) == 1


async def test_a_live_socket_with_a_full_queue_is_not_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(folder / NAME))
        (folder / NAME).chmod(0o600)
        busy.listen(0)
        first.connect(str(folder / NAME))
        with pytest.raises(StartError, match="Another process listens"):
            await listen_on_socket(folder, NAME, accept)
        with pytest.raises(StartError, match="accepts no connections"):
            await connect_to_lease_holder(folder, NAME, seconds=0.1)


@pytest.mark.parametrize("kind", ["file", "folder", "fifo", "link to a file", "link to nothing", "link to a socket"])
async def test_a_path_other_than_a_socket_is_neither_connected_to_nor_changed(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    place, elsewhere = folder / NAME, tmp_path / "elsewhere"
    if kind == "file":
        place.write_text("mine")
    elif kind == "folder":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(elsewhere)
        if kind == "link to a file":
            elsewhere.write_text("mine")
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(asyncio.Protocol, elsewhere) if kind == "link to a socket" else None
    before = place.lstat()
    for attempt in (connect_to_lease_holder(folder, NAME), listen_on_socket(folder, NAME, accept)):
        with pytest.raises(
            StartError, match=r"is (not a socket|a link), but Handrail expects its socket there"
        ) as caught:
            await attempt
        assert not isinstance(caught.value, NoLeaseHolder)
    assert os.path.samestat(place.lstat(), before)
    assert elsewhere.exists() == (kind in ("link to a file", "link to a socket"))
    if server is not None:
        server.close()


async def test_a_socket_folder_open_to_other_users_is_refused(folder: Path) -> None:
    folder.chmod(0o750)
    for attempt in (connect_to_lease_holder(folder, NAME), listen_on_socket(folder, NAME, accept)):
        with pytest.raises(StartError, match=r"is open to other users \(mode 0750\).*chmod 700"):
            await attempt
    assert not list(folder.iterdir())


async def test_a_link_instead_of_the_socket_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    for attempt in (connect_to_lease_holder(link, NAME), listen_on_socket(link, NAME, accept)):
        with pytest.raises(StartError, match="Cannot open the state folder"):
            await attempt


async def test_a_live_socket_open_to_other_users_is_not_joined(folder: Path) -> None:
    async with house(folder, OPERATIONS) as doors:
        (folder / NAME).chmod(0o666)
        with pytest.raises(StartError, match=r"is open to other users \(mode 0666\)"):
            await doors.join()


@as_root
async def test_a_folder_or_socket_of_another_user_is_refused(folder: Path) -> None:
    dead_socket(folder / NAME)
    os.chown(folder / NAME, 65534, 65534)
    for attempt in (connect_to_lease_holder(folder, NAME), listen_on_socket(folder, NAME, accept)):
        with pytest.raises(StartError, match="belongs to user 65534, not to you"):
            await attempt
    assert (folder / NAME).is_socket()
    os.chown(folder, 65534, 65534)
    with pytest.raises(StartError, match=r"folder .* belongs to user 65534"):
        await connect_to_lease_holder(folder, NAME)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x", "a\0b", "x" * 65])
async def test_a_socket_file_name_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    for attempt in (connect_to_lease_holder(folder, name), listen_on_socket(folder, name, accept)):
        with pytest.raises(UsageError, match="Invalid socket file name"):
            await attempt


async def test_a_closing_listener_removes_only_its_own_socket(folder: Path) -> None:
    first = await listen_on_socket(folder, NAME, accept)
    (folder / NAME).unlink()
    async with house(folder, OPERATIONS) as doors:
        await first.aclose()
        assert await (await doors.join()).request("echo", 1) == 1
    assert not (folder / NAME).exists()


async def test_a_closing_listener_disconnects_clients_even_after_its_folder_is_removed(folder: Path) -> None:
    async with house(folder, OPERATIONS) as doors:
        joined = await doors.join()
        (folder / NAME).unlink()
        folder.rmdir()
        await doors.listener.aclose()
        await joined.closed.wait()
        assert joined.lost_reason == "the other side ended it: the process that holds the workspace is shutting down"


async def test_repeated_joining_and_leaving_leaks_no_file_descriptor(folder: Path) -> None:
    async with house(folder, OPERATIONS) as doors:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            joined = await connect_to_lease_holder(folder, NAME)
            held = await doors.accepted.get()
            await joined.aclose()
            await held.closed.wait()
        for _ in range(100):  # turns of the loop: a transport closes its socket one later than it says so
            if len(os.listdir("/proc/self/fd")) == before:
                break
            await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before
        assert not doors.listener.connections
