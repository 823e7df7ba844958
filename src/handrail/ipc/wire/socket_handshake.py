"""The socket of the lease holder, a file in the workspace's private state folder that both sides check, and the handshake.

The folder is opened once, and everything else goes through its descriptor. A path may therefore be longer than the 108 bytes
of a socket address, and no other program can swap a file in between.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import StartError, UsageError
from handrail.ipc.wire.message_frames import Message, encode_frame
from handrail.ipc.wire.operation_dispatch import OperationTable, RemoteRequestError, logger
from handrail.ipc.wire.peer_connection import IpcConnection, explain_user_mismatch, read_peer_credentials

PROTOCOL_VERSION = 3
"""The version of the messages. Two processes with different versions cannot communicate."""

GREETING_SECONDS = 5.0
MAX_GREETING_BYTES = 16 * 1024 * 1024
"""The maximum size of the first message in bytes: a process gets no more memory before it is accepted."""

CONTROL_GREETING = {"only": "control"}
"""The greeting of a process that only answers approval requests or stops work. The lease holder prepares no sessions for it."""
MAX_CONNECTIONS = 512
_BACKLOG = 1024
_RETRY_SECONDS = 0.02


class NoLeaseHolder(StartError):
    """No process listens there: the socket does not exist, or its process has ended.

    The next step is to take the lease.
    """


class SocketListener:
    """The listening socket of the lease holder, created by :func:`listen_on_socket`."""

    def __init__(self, server: asyncio.Server, folder: Path, name: str, made: os.stat_result) -> None:
        self._server = server
        self._folder = folder
        self._name = name
        self._made = made
        self.connections: set[IpcConnection] = set()
        """The open connections, before and after their handshake."""

    @property
    def path(self) -> Path:
        return self._folder / self._name

    async def aclose(self, reason: str = "the process that holds the workspace is shutting down") -> None:
        """Stop listening, close all connections, and remove the socket file if it is still ours."""
        self._server.close()
        await asyncio.gather(*(connection.aclose(reason) for connection in list(self.connections)))
        try:
            with _open_private_folder(self._folder) as folder:
                found = os.stat(self._name, dir_fd=folder, follow_symlinks=False)
                # Another process may have taken over, with its own socket under this name.
                if os.path.samestat(found, self._made):
                    os.unlink(self._name, dir_fd=folder)
        except (OSError, StartError):
            pass  # removed with its folder, or replaced by another process


async def listen_on_socket(
    folder: Path,
    name: str,
    accept: AcceptClient,
    *,
    seconds: float = GREETING_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
) -> SocketListener:
    """Let other processes of this user connect. Replace only an own socket that no process listens on.

    :param folder: a private folder of this user (mode 0700)
    :param name: the name of the socket file in it
    :param accept: accepts or rejects each process that sends a greeting
    :param seconds: the time limit for a complete greeting
    :raises StartError: if the folder or an existing file is unsuitable; the text says what to do
    """
    _check_name(name)
    path = folder / name
    with _open_private_folder(folder) as descriptor:
        _remove_dead_socket(descriptor, name, path)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.setblocking(False)
            os.fchmod(door.fileno(), 0o600)  # Linux gives the file this mode, so it never has another
            # The path goes through the open folder. It is also short enough for a socket address, which has 108 bytes.
            door.bind(f"/proc/self/fd/{descriptor}/{name}")
            # The file is checked before the first connection, in case another process of this user replaced it.
            with _open_socket_file(descriptor, name, path) as (_file, made):
                door.listen(_BACKLOG)
        except OSError as error:
            door.close()
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"Another process created {path} at the same time. It holds the workspace now. Try again."
                ) from None
            raise StartError(
                f"Cannot create the socket {path}: {error.strerror or error}. Check the state folder and its free space."
            ) from None
        except BaseException:
            door.close()
            raise
    listener: SocketListener | None = None

    def admit(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
        if listener is None or len(listener.connections) > max_connections:
            raise RemoteRequestError(
                "full", f"Too many connected processes: {max_connections}. Close one of them, then try again."
            )
        return accept(connection, hello)

    def arrived() -> IpcConnection:
        connection = IpcConnection(gate=HandshakeServer(admit, seconds=seconds))
        if listener is not None:
            connections = listener.connections
            connections.add(connection)
            connection.add_loss_callback(lambda _: connections.discard(connection))
        return connection

    # Otherwise Python would remove the file by the path that it was bound to, whose descriptor is closed by then.
    options: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
    server = await asyncio.get_running_loop().create_unix_server(arrived, sock=door, start_serving=False, **options)
    listener = SocketListener(server, folder, name, made)
    await server.start_serving()
    return listener


async def connect_to_lease_holder(
    folder: Path,
    name: str,
    operations: OperationTable | None = None,
    hello: Message | None = None,
    *,
    seconds: float = GREETING_SECONDS,
    lost: Callable[[str], None] | None = None,
) -> IpcConnection:
    """Connect to the process that listens there, and do the handshake.

    :param operations: the operations that it may request of this process
    :param hello: the fields of the greeting; the answer is the connection's :attr:`~IpcConnection.peer_greeting`
    :param seconds: the time limit for the connection and the handshake together
    :param lost: called with the reason if the connection is lost later
    :raises NoLeaseHolder: if no process listens there
    :raises LeaseHolderNotResponding: if the listening process does not answer the greeting in time
    :raises ConnectionRejected: if it rejects this process; the text has the reason
    :raises StartError: if the file is not a socket of this user; the text says what to do
    """
    _check_name(name)
    check_greeting_length(hello or {})
    path = folder / name
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    with (
        _open_private_folder(folder, NoLeaseHolder) as descriptor,
        _open_socket_file(descriptor, name, path) as (socket_file, _status),
    ):
        line = await _connect_checked_socket(socket_file, path, deadline)
    introduction = HandshakeClient(operations or OperationTable(), hello or {})
    try:
        peer = read_peer_credentials(line)
        # The file belongs to this user, but another user's process could have inherited its socket. The secrets in the
        # greeting must not reach it.
        if (reason := explain_user_mismatch(peer)) is not None:
            raise ConnectionRejected("user", f"Cannot connect to the process at {path}. {reason}")
    except OSError as error:
        line.close()
        raise StartError(
            f"Cannot identify the process that listens at {path}: {error}. Check that /proc is mounted."
        ) from None
    except BaseException:
        line.close()
        raise
    _transport, connection = await loop.create_unix_connection(lambda: IpcConnection(gate=introduction), sock=line)
    try:
        async with asyncio.timeout_at(deadline):
            await introduction.done
    except TimeoutError:
        connection.drop("it did not answer the greeting in time", quietly=True)
        raise LeaseHolderNotResponding(
            f"Process {peer.pid} holds the workspace but did not answer within {seconds:g} s. "
            "If it is stopped, continue or end it."
        ) from None
    except BaseException:
        connection.drop("the connection attempt was cancelled", quietly=True)
        raise
    connection.peer = peer
    if lost is not None:
        connection.add_loss_callback(lost)
    return connection


async def _connect_checked_socket(socket_file: int, path: Path, deadline: float) -> socket.socket:
    """Return a socket that is connected to exactly the file that was checked."""
    loop = asyncio.get_running_loop()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.setblocking(False)
    try:
        while True:
            try:
                # The descriptor leads to the checked file, even if its name belongs to another one by now.
                line.connect(f"/proc/self/fd/{socket_file}")
                return line
            except BlockingIOError:  # its queue of new connections is full
                if loop.time() >= deadline:
                    raise LeaseHolderNotResponding(
                        f"The process that listens at {path} accepts no connections. If it is stopped, continue or end it."
                    ) from None
                await asyncio.sleep(_RETRY_SECONDS)
    except ConnectionRefusedError:
        line.close()
        raise NoLeaseHolder(f"No process listens at {path} any longer. Try again.") from None
    except OSError as error:
        line.close()
        raise StartError(f"Cannot connect to {path}: {error.strerror or error}.{_NEEDS_PROC_TEXT}") from None
    except BaseException:
        line.close()
        raise


_NEEDS_PROC_TEXT = (
    "" if Path("/proc/self/fd").is_dir() else " Connecting requires /proc, which is not mounted. Mount it."
)


def _check_name(name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > 64:
        raise UsageError(f"Invalid socket file name: {name[:80]!r}. Expected at most 64 bytes without '/'.")
    if sys.platform != "linux":
        raise StartError(
            "Several processes can share a workspace only on Linux. Stop the process that holds it, then try again."
        )


@contextmanager
def _open_private_folder(folder: Path, missing: type[StartError] = StartError) -> Generator[int]:
    """Open the folder, check that only this user can access it, and yield its descriptor."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise missing(f"The state folder {folder} does not exist.") from None
    except OSError as error:
        raise StartError(
            f"Cannot open the state folder {folder}: {error.strerror or error}. Check its permissions."
        ) from None
    try:
        found = os.fstat(descriptor)
        if (reason := _ownership_problem(found)) is not None:
            raise StartError(
                f"The state folder {folder} {reason}. Check whether another user changed it, then run: chmod 700 {folder}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _open_socket_file(
    folder: int, name: str, path: Path, *, any_mode: bool = False
) -> Generator[tuple[int, os.stat_result]]:
    """Open the socket file itself, check that it belongs to this user alone, and yield its descriptor.

    It must not be a link or another file. Later changes of the name have no effect.

    :raises NoLeaseHolder: if it does not exist
    :raises StartError: if it is another kind of file
    """
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise NoLeaseHolder(f"No process listens at {path}. Start a Handrail process for this workspace.") from None
    except OSError as error:
        raise StartError(f"Cannot open {path}: {error.strerror or error}. Check its permissions.") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "not a socket"
            raise StartError(
                f"{path} is {what}, but Handrail expects its socket there. Check who created it, then move it away."
            )
        if (reason := _ownership_problem(found, any_mode=any_mode)) is not None:
            raise StartError(f"The socket {path} {reason}. Check who created it, then remove it.")
        yield descriptor, found
    finally:
        os.close(descriptor)


def _ownership_problem(found: os.stat_result, *, any_mode: bool = False) -> str | None:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to you (user {os.geteuid()})"
    if not any_mode and found.st_mode & 0o077:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _remove_dead_socket(folder: int, name: str, path: Path) -> None:
    """Remove an own socket that no process listens on.

    :raises StartError: if a process listens there, or the file is not a socket
    """
    try:
        with _open_socket_file(folder, name, path, any_mode=True) as (descriptor, _status):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(f"/proc/self/fd/{descriptor}")
                except ConnectionRefusedError:
                    # Only a refused connection proves that no process listens. A full queue or an error does not.
                    os.unlink(name, dir_fd=folder)
                    return
                except BlockingIOError:
                    pass  # alive, with a full queue
            raise StartError(f"Another process listens at {path}. Connect to it, or stop it.")
    except NoLeaseHolder:
        return
    except OSError as error:
        raise StartError(
            f"Cannot remove the old socket {path}: {error.strerror or error}. Remove it, then try again."
        ) from None


# ── the handshake: identity, version and admission ───────────────────────────────────────────────

_NOT_ADMITTED_TEXT = "The process that holds the workspace did not accept this process"


class ConnectionRejected(StartError):
    """The process that holds the workspace rejected this one.

    :param kind: ``version``, ``user``, ``full``, or another word that the lease holder chose
    :param holder_text: the lease holder's own text, if it sent one
    """

    def __init__(self, kind: str, text: str, *, holder_text: str | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.holder_text = text if holder_text is None else holder_text


class LeaseHolderNotResponding(StartError):
    """A process listens but does not answer: it is stopped or overloaded, or has just ended."""


@cache
def get_handrail_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("handrail")
    except PackageNotFoundError:
        return "unknown"


AcceptClient = Callable[[IpcConnection, Message], tuple[OperationTable, Message]]
"""Accepts a process: returns the operations that it may request and the answer to its greeting, or raises :class:`RemoteRequestError`."""


class HandshakeServer:
    """The lease holder's side of one handshake.

    :param accept: called with the connection and the fields of the greeting; it must not send on the connection yet
    :param seconds: the time limit for a complete greeting
    """

    def __init__(self, accept: AcceptClient, *, seconds: float = GREETING_SECONDS) -> None:
        self._accept = accept
        self._seconds = seconds
        self._late: asyncio.TimerHandle | None = None

    def start(self, connection: IpcConnection) -> None:
        try:
            connection.peer = read_peer_credentials(connection.transport.get_extra_info("socket"))
            reason = explain_user_mismatch(connection.peer)
        except OSError as error:
            reason = f"The user of the connecting process is unknown: {error}."
        if reason is not None:  # nothing was read, and nothing will be read
            self._reject(connection, "user", reason)
            return
        connection.limit_frame_size(MAX_GREETING_BYTES)
        # A process that connects and sends nothing would otherwise occupy a place forever.
        self._late = asyncio.get_running_loop().call_later(
            self._seconds, connection.drop, f"no complete greeting within {self._seconds:g} s"
        )

    def receive(self, connection: IpcConnection, message: Message) -> None:
        hello = message.get("hello")
        if not isinstance(hello, dict):
            connection.drop("the first message is not a greeting; the other end is not a Handrail process")
            return
        values = cast("Message", hello)
        # Different versions encode values differently, so nothing else in the greeting is read.
        if (reason := _version_problem(values, "The connecting process")) is not None:
            self._reject(connection, "version", reason)
            return
        try:
            operations, welcome = self._accept(connection, values)
        except RemoteRequestError as refusal:
            self._reject(connection, refusal.kind, refusal.text)
            return
        self.end("")
        connection.send_handshake_message({"welcome": {**welcome, **_version_fields()}})
        connection.finish_handshake(operations, values)

    def end(self, reason: str) -> None:
        if self._late is not None:
            self._late.cancel()

    def _reject(self, connection: IpcConnection, kind: str, text: str) -> None:
        logger.warning("rejected a process: %s", text)
        connection.send_handshake_message({"refused": {"kind": kind, "text": text}})
        connection.drop(text, quietly=True)


class HandshakeClient:
    """The client's side of one handshake. :attr:`done` receives the result.

    :param operations: the operations that the lease holder may request
    :param hello: the fields of the greeting
    """

    def __init__(self, operations: OperationTable, hello: Message) -> None:
        self._operations = operations
        self._hello = hello
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, connection: IpcConnection) -> None:
        connection.send_handshake_message(_make_greeting(self._hello))

    def receive(self, connection: IpcConnection, message: Message) -> None:
        welcome, refused = message.get("welcome"), message.get("refused")
        if isinstance(welcome, dict):
            values = cast("Message", welcome)
            reason = _version_problem(values, "The process that holds the workspace")
            if reason is None:
                connection.finish_handshake(self._operations, values)
                if not self.done.done():
                    self.done.set_result(None)
                return
            error: StartError = ConnectionRejected("version", reason)
        elif isinstance(refused, dict):
            fields = cast("Message", refused)
            text = str(fields.get("text"))[:2000]
            error = ConnectionRejected(str(fields.get("kind"))[:80], f"Connection rejected: {text}", holder_text=text)
        elif type(reason_text := message.get("bye")) is str:  # it is shutting down
            error = LeaseHolderNotResponding(f"{_NOT_ADMITTED_TEXT}: {reason_text[:500]}")
        else:
            error = StartError(
                "The process that listens at the workspace's socket did not answer the greeting. "
                "It is not a Handrail process. Stop it, then try again."
            )
        self._fail(error)
        connection.drop(str(error), quietly=True)

    def end(self, reason: str) -> None:
        self._fail(LeaseHolderNotResponding(f"{_NOT_ADMITTED_TEXT}: {reason}"))

    def _fail(self, error: StartError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def check_greeting_length(hello: Message) -> None:
    """Check that the greeting is not too long.

    :raises StartError: if it is longer than :data:`MAX_GREETING_BYTES`
    """
    size = len(encode_frame(_make_greeting(hello)))
    if size > MAX_GREETING_BYTES:
        raise StartError(
            f"The tools, rules and secrets of this process take {size:,} bytes. The maximum for a workspace that another "
            f"process holds is {MAX_GREETING_BYTES:,} bytes. Register fewer, or start this process first."
        )


def _make_greeting(hello: Message) -> Message:
    return {"hello": {**hello, **_version_fields()}}


def _version_fields() -> dict[str, Any]:
    return {"handrail": get_handrail_version(), "protocol": PROTOCOL_VERSION}


def _version_problem(fields: Message, who: str) -> str | None:
    protocol = fields.get("protocol")
    if type(protocol) is int and protocol == PROTOCOL_VERSION:
        return None
    theirs = str(fields.get("handrail"))[:40]
    return (
        f"{who} is Handrail {theirs} with protocol {str(protocol)[:20]}, "
        f"the other is Handrail {get_handrail_version()} with protocol {PROTOCOL_VERSION}. Use the same version for both: "
        "update the older one, then stop the process that holds the workspace and start again."
    )
