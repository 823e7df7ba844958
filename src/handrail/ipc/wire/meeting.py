"""Where a holder is met, a socket file in the workspace's private state folder that both sides check, and how the two greet.

The folder is opened once and everything else goes through its descriptor, so a path may be longer than the 108 bytes
that a socket address holds, and nothing can be swapped in between.
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
from handrail.ipc.wire.connection import Connection, foreign, peer_of
from handrail.ipc.wire.framing import Message, frame
from handrail.ipc.wire.operations import Operations, Refused, logger

PROTOCOL = 2
"""Of the messages. Another number means that the two sides cannot understand each other."""

GREETING_SECONDS = 5.0
MAX_HELLO = 16 * 1024 * 1024
"""Bytes of the first message: a process that is not let in yet gets no more memory."""

ONLY_ANSWERS = {"only": "approvals"}
"""The greeting of a process that answers requests to people and opens no session: the holder makes nothing for it."""
MAX_CONNECTIONS = 512
_BACKLOG = 1024
_RETRY_SECONDS = 0.02


class NoHolder(StartError):
    """Nobody listens there: no socket, or one whose process is gone. Taking the lease is the next step."""


class Listener:
    """A holder's open door. Made by :func:`listen`."""

    def __init__(self, server: asyncio.Server, folder: Path, name: str, made: os.stat_result) -> None:
        self._server = server
        self._folder = folder
        self._name = name
        self._made = made
        self.connections: set[Connection] = set()
        """Those that stand, greeted or not."""

    @property
    def path(self) -> Path:
        return self._folder / self._name

    async def aclose(self, reason: str = "the process that holds the workspace ends") -> None:
        """Let nobody in any more, end every connection, and take the socket file away if it is still ours."""
        self._server.close()
        await asyncio.gather(*(connection.aclose(reason) for connection in list(self.connections)))
        try:
            with _opened(self._folder) as folder:
                found = os.stat(self._name, dir_fd=folder, follow_symlinks=False)
                if os.path.samestat(found, self._made):
                    os.unlink(self._name, dir_fd=folder)
        except (OSError, StartError):
            pass  # gone with its folder, or somebody else's by now


async def listen(
    folder: Path,
    name: str,
    accept: Accept,
    *,
    seconds: float = GREETING_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
) -> Listener:
    """Let other processes of this user join. Replaces a socket of ours that nobody listens at, and nothing else.

    :param folder: a private folder of ours (mode 0700)
    :param name: of the socket file in it
    :param accept: decides on each one that greets
    :param seconds: within which a greeting must be complete
    :raises StartError: when the folder or what stands there already is unfit, with what to do
    """
    _check_name(name)
    path = folder / name
    with _opened(folder) as descriptor:
        _clear(descriptor, name, path)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.setblocking(False)
            os.fchmod(door.fileno(), 0o600)  # Linux gives the file this mode, so it never has another
            door.bind(f"/proc/self/fd/{descriptor}/{name}")
            with _found(descriptor, name, path) as (_file, made):
                door.listen(_BACKLOG)
        except OSError as error:
            door.close()
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"{path} appeared while it was made; another process holds the workspace") from None
            raise StartError(f"no socket can be made at {path}: {error.strerror or error}") from None
        except BaseException:
            door.close()
            raise
    listener: Listener | None = None

    def admit(connection: Connection, hello: Message) -> tuple[Operations, Message]:
        if listener is None or len(listener.connections) > max_connections:
            raise Refused("full", f"{max_connections} processes have joined already; close one of them first")
        return accept(connection, hello)

    def arrived() -> Connection:
        connection = Connection(gate=Reception(admit, seconds=seconds))
        if listener is not None:
            connections = listener.connections
            connections.add(connection)
            connection.when_lost(lambda _: connections.discard(connection))
        return connection

    # Python would else remove the file by the path it was bound to, which begins with a descriptor that is closed by then.
    options: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
    server = await asyncio.get_running_loop().create_unix_server(arrived, sock=door, start_serving=False, **options)
    listener = Listener(server, folder, name, made)
    await server.start_serving()
    return listener


async def connect(
    folder: Path,
    name: str,
    operations: Operations | None = None,
    hello: Message | None = None,
    *,
    seconds: float = GREETING_SECONDS,
    lost: Callable[[str], None] | None = None,
) -> Connection:
    """Join the process that listens there, and greet.

    :param operations: what it may ask of this process
    :param hello: fields of the greeting; its answer is the connection's :attr:`~Connection.about`
    :param seconds: for connecting and greeting together
    :param lost: called with the reason when the connection is lost later
    :raises NoHolder: when nobody listens there
    :raises NoAnswer: when whoever listens does not greet in time
    :raises NotLetIn: when it refuses, with its reason
    :raises StartError: when what stands there is not a socket of ours, with what to do
    """
    _check_name(name)
    check_greeting(hello or {})
    path = folder / name
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    with _opened(folder, NoHolder) as descriptor, _found(descriptor, name, path) as (socket_file, _status):
        line = await _dial(socket_file, path, deadline)
    introduction = Introduction(operations or Operations(), hello or {})
    try:
        peer = peer_of(line)
        if (reason := foreign(peer)) is not None:
            raise NotLetIn("user", f"the process that listens at {path} is not spoken to: {reason}")
    except OSError as error:
        line.close()
        raise StartError(f"who listens at {path} cannot be known: {error}") from None
    except BaseException:
        line.close()
        raise
    _transport, connection = await loop.create_unix_connection(lambda: Connection(gate=introduction), sock=line)
    try:
        async with asyncio.timeout_at(deadline):
            await introduction.done
    except TimeoutError:
        connection.drop("it did not greet in time", quietly=True)
        raise NoAnswer(
            f"process {peer.pid} holds the workspace but did not answer within {seconds:g} s; "
            "if it is stopped, continue or end it"
        ) from None
    except BaseException:
        connection.drop("joining was given up", quietly=True)
        raise
    connection.peer = peer
    if lost is not None:
        connection.when_lost(lost)
    return connection


async def _dial(socket_file: int, path: Path, deadline: float) -> socket.socket:
    """A connection to exactly the file that was looked at."""
    loop = asyncio.get_running_loop()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.setblocking(False)
    try:
        while True:
            try:
                line.connect(f"/proc/self/fd/{socket_file}")
                return line
            except BlockingIOError:  # its queue of newcomers is full
                if loop.time() >= deadline:
                    raise NoAnswer(f"whoever listens at {path} takes nobody in; it may be stopped") from None
                await asyncio.sleep(_RETRY_SECONDS)
    except ConnectionRefusedError:
        line.close()
        raise NoHolder(f"nobody listens at {path} any more") from None
    except OSError as error:
        line.close()
        raise StartError(f"{path} cannot be connected to: {error.strerror or error}{_NEEDS_PROC}") from None
    except BaseException:
        line.close()
        raise


_NEEDS_PROC = "" if Path("/proc/self/fd").is_dir() else " (joining needs /proc, which is not mounted here)"


def _check_name(name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > 64:
        raise UsageError(f"{name[:80]!r} is no name for a socket file; expected at most 64 bytes without '/'")
    if sys.platform != "linux":
        raise StartError("several processes can share a workspace on Linux only; stop the one that holds it")


@contextmanager
def _opened(folder: Path, missing: type[StartError] = StartError) -> Generator[int]:
    """The folder, ours alone, as a descriptor."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise missing(f"there is no folder {folder}") from None
    except OSError as error:
        raise StartError(f"the folder {folder} cannot be opened: {error.strerror or error}") from None
    try:
        found = os.fstat(descriptor)
        if (reason := _not_ours(found)) is not None:
            raise StartError(
                f"the state folder {folder} {reason}; look whether somebody changed it, then run chmod 700 {folder}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _found(folder: int, name: str, path: Path, *, any_mode: bool = False) -> Generator[tuple[int, os.stat_result]]:
    """The socket file itself, ours alone: not a link, not another file, whatever happens to the name later.

    :raises NoHolder: when there is none
    :raises StartError: when it is something else
    """
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise NoHolder(f"nobody listens at {path}") from None
    except OSError as error:
        raise StartError(f"{path} cannot be looked at: {error.strerror or error}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "not a socket"
            raise StartError(
                f"{path} is {what}, where Handrail's socket should be; look who put it there, then move it"
            )
        if (reason := _not_ours(found, any_mode=any_mode)) is not None:
            raise StartError(f"the socket {path} {reason}; look who made it, then remove it")
        yield descriptor, found
    finally:
        os.close(descriptor)


def _not_ours(found: os.stat_result, *, any_mode: bool = False) -> str | None:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to you (user {os.geteuid()})"
    if not any_mode and found.st_mode & 0o077:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _clear(folder: int, name: str, path: Path) -> None:
    """Take a dead socket of ours out of the way.

    :raises StartError: when somebody listens there, or it is something else
    """
    try:
        with _found(folder, name, path, any_mode=True) as (descriptor, _status):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(f"/proc/self/fd/{descriptor}")
                except ConnectionRefusedError:
                    os.unlink(name, dir_fd=folder)
                    return
                except BlockingIOError:
                    pass  # alive, with a full queue
            raise StartError(f"another process listens at {path}; join it, or stop it")
    except NoHolder:
        return
    except OSError as error:
        raise StartError(f"{path} is in the way: {error.strerror or error}") from None


# ── the greeting: who is there, in which version, and whether it may come in ─────────────────────

_NOT_IN = "the process that holds the workspace did not let this one in"


class NotLetIn(StartError):
    """The process that holds the workspace refused this one.

    :param kind: ``version``, ``user``, ``full``, or a word of the holder's own
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class NoAnswer(StartError):
    """Somebody listens, and does not greet: stopped, overloaded, or gone while we waited."""


@cache
def own_version() -> str:
    """The installed version of Handrail."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("handrail")
    except PackageNotFoundError:
        return "unknown"


Accept = Callable[[Connection, Message], tuple[Operations, Message]]
"""Decides on one who greeted: what it may ask for and what it is told. Raises :class:`Refused` to turn it away."""


class Reception:
    """The holder's side of one greeting.

    :param accept: called with the connection and the greeting's fields; may not send anything on it yet
    :param seconds: within which the greeting must be complete
    """

    def __init__(self, accept: Accept, *, seconds: float = GREETING_SECONDS) -> None:
        self._accept = accept
        self._seconds = seconds
        self._late: asyncio.TimerHandle | None = None

    def begun(self, connection: Connection) -> None:
        try:
            connection.peer = peer_of(connection.transport.get_extra_info("socket"))
            reason = foreign(connection.peer)
        except OSError as error:
            reason = f"who it is cannot be known: {error}"
        if reason is not None:  # nothing has been read yet, and nothing will be
            self._turn_away(connection, "user", reason)
            return
        connection.limit(MAX_HELLO)
        self._late = asyncio.get_running_loop().call_later(
            self._seconds, connection.drop, f"no whole greeting came within {self._seconds:g} s"
        )

    def heard(self, connection: Connection, message: Message) -> None:
        hello = message.get("hello")
        if not isinstance(hello, dict):
            connection.drop("the first message was no greeting; the other end is no Handrail process")
            return
        told = cast("Message", hello)
        if (reason := _another_version(told, "the process that wants to join")) is not None:
            self._turn_away(connection, "version", reason)
            return
        try:
            operations, welcome = self._accept(connection, told)
        except Refused as refusal:
            self._turn_away(connection, refusal.kind, refusal.text)
            return
        self.lost("")
        connection.say({"welcome": {**welcome, **_self()}})
        connection.open(operations, told)

    def lost(self, reason: str) -> None:
        if self._late is not None:
            self._late.cancel()

    def _turn_away(self, connection: Connection, kind: str, text: str) -> None:
        logger.warning("a process was not let in: %s", text)
        connection.say({"refused": {"kind": kind, "text": text}})
        connection.drop(text, quietly=True)


class Introduction:
    """The joining side of one greeting. :attr:`done` gets the result.

    :param operations: what the holder may ask of us
    :param hello: fields of our own
    """

    def __init__(self, operations: Operations, hello: Message) -> None:
        self._operations = operations
        self._hello = hello
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begun(self, connection: Connection) -> None:
        connection.say(_hello(self._hello))

    def heard(self, connection: Connection, message: Message) -> None:
        welcome, refused = message.get("welcome"), message.get("refused")
        if isinstance(welcome, dict):
            told = cast("Message", welcome)
            reason = _another_version(told, "the process that holds the workspace")
            if reason is None:
                connection.open(self._operations, told)
                if not self.done.done():
                    self.done.set_result(None)
                return
            error: StartError = NotLetIn("version", reason)
        elif isinstance(refused, dict):
            fields = cast("Message", refused)
            error = NotLetIn(str(fields.get("kind"))[:80], f"joining was refused: {str(fields.get('text'))[:2000]}")
        elif type(bye := message.get("bye")) is str:  # it ends just now
            error = NoAnswer(f"{_NOT_IN}: {bye[:500]}")
        else:
            error = StartError("what listens at the workspace's socket did not greet; it is no Handrail process")
        self._fail(error)
        connection.drop(str(error), quietly=True)

    def lost(self, reason: str) -> None:
        self._fail(NoAnswer(f"{_NOT_IN}: {reason}"))

    def _fail(self, error: StartError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def check_greeting(hello: Message) -> None:
    """
    :raises StartError: when nobody would read so much of it
    """
    size = len(frame(_hello(hello)))
    if size > MAX_HELLO:
        raise StartError(
            f"what this process brings (its tools, rules and secrets) is {size:,} bytes long; at most {MAX_HELLO:,} "
            "can be brought to a workspace that another process holds: bring less, or start this process first"
        )


def _hello(hello: Message) -> Message:
    return {"hello": {**hello, **_self()}}


def _self() -> dict[str, Any]:
    return {"handrail": own_version(), "protocol": PROTOCOL}


def _another_version(told: Message, who: str) -> str | None:
    protocol = told.get("protocol")
    if type(protocol) is int and protocol == PROTOCOL:
        return None
    theirs = str(told.get("handrail"))[:40]
    return (
        f"{who} is Handrail {theirs} and speaks protocol {str(protocol)[:20]}, "
        f"the other is Handrail {own_version()} and speaks protocol {PROTOCOL}; use the same version for both: "
        "update the older one, then stop the process that holds the workspace and start again"
    )
