"""The network of a sandbox: its own loopback, and on it one port behind which the host's proxy answers.

No program in the sandbox has a socket to the outside. A separate process enters the sandbox's network namespace,
listens there and hands the *listening* socket back. A socket stays in the namespace that it was made in, so the proxy
on the host's side accepts connections from inside. The kernel's own process never changes its namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Process, Profile
from handrail.contract.text.hosts import Address, read_host
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.programs import ProgramRefused, own_interpreter
from handrail.sandbox.network.egress import Egress, Resolver
from handrail.sandbox.network.proxy import Proxy, ProxyLimits
from handrail.sandbox.start.spawn import Delegating, spawn
from handrail.sandbox.view.tree import PASSING

PROXY_PORT = 3128
PERL = "/usr/bin/perl"
_NS_GET_USERNS = 0xB701
_HANDED_OVER_S = 20.0
_CALLS: Mapping[str, tuple[int, int]] = {
    "x86_64": (308, 46),
    "aarch64": (268, 211),
    "riscv64": (268, 211),
    "loongarch64": (268, 211),
    "ppc64le": (350, 341),
    "s390x": (339, 370),
}
"""setns(2) and sendmsg(2) by machine; elsewhere the listener in Python is used, which has them from its library."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def environment(capabilities: CapabilitySet) -> dict[str, str]:
    """The variables that send a program's requests to the proxy.

    What a program serves on the sandbox's own loopback is reached directly, except where an address of the loopback
    is granted: then the machine's is meant.
    """
    address = f"http://127.0.0.1:{PROXY_PORT}"
    granted = [
        read for layer in capabilities.layers for pattern in layer.hosts if (read := _loopback(pattern)) is not None
    ]
    direct = [name for name in _LOOPBACK if name == "localhost" or not granted]
    found: dict[str, str] = {}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        found[name] = found[name.upper()] = address
    found["no_proxy"] = found["NO_PROXY"] = ",".join(direct)
    found["NODE_USE_ENV_PROXY"] = "1"
    return found


class Fronted(Delegating):
    """A process with a proxy in front of it, which ends with it."""

    def __init__(self, process: Process, proxy: Proxy) -> None:
        super().__init__(process)
        self.proxy = proxy

    async def wait(self) -> int:
        code = await super().wait()
        await self.proxy.aclose()
        return code

    async def kill(self) -> None:
        try:
            await super().kill()
        finally:
            await self.proxy.aclose()


class Waiting(Process, Protocol):
    """A sandbox that is there and whose program has not begun."""

    @property
    def inner_pid(self) -> int:
        """Its first process, as this machine numbers it."""
        ...

    async def until_known(self) -> bool:
        """Wait for that. False: it ended instead."""
        ...


class Ahead:
    """The socket that a waiting sandbox's proxy will accept on, made while it waits.

    Whoever takes it owns it; :meth:`close` ends it where nobody has.
    """

    def __init__(self, process: Waiting) -> None:
        self._made = asyncio.ensure_future(_listener_of(process))
        self._taken = False

    async def taken(self) -> socket.socket:
        """
        :raises ToolError: ``backend`` when it could not be had
        """
        self._taken = True
        return await self._made

    async def until_made(self) -> bool:
        """Wait for it. False: it could not be had."""
        await asyncio.wait((self._made,))
        return not self._made.cancelled() and self._made.exception() is None

    def close(self) -> None:
        if self._taken:
            return
        if self._made.done():
            _discarded(self._made)
        else:
            self._made.cancel()
            self._made.add_done_callback(_discarded)


def _discarded(made: asyncio.Future[socket.socket]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


async def fronted(
    process: Waiting,
    begin: Callable[[], None],
    capabilities: CapabilitySet,
    profile: Profile,
    ahead: Ahead | None = None,
) -> Fronted:
    """Let the program of a waiting sandbox begin once a proxy answers in it. Ends the sandbox where that fails.

    :param begin: lets it begin
    :param ahead: its listening socket, where that is being made already
    :raises ToolError: ``backend`` when its network cannot be set up
    """
    proxy: Proxy | None = None
    try:
        listener = await (_listener_of(process) if ahead is None else ahead.taken())
        proxy = await front(listener, capabilities, profile)
        begin()
        return Fronted(process, proxy)
    except BaseException:
        if proxy is not None:
            await proxy.aclose()
        await process.kill()
        raise


async def _listener_of(process: Waiting) -> socket.socket:
    if not await process.until_known():
        await process.wait()  # which says why
        raise ToolError("The sandbox ended before its network was set up. Try again.", kind="backend")
    return await listener_in(process.inner_pid, process.pid)


async def front(
    listener: socket.socket,
    capabilities: CapabilitySet,
    profile: Profile,
    *,
    resolver: Resolver | None = None,
    limits: ProxyLimits | None = None,
) -> Proxy:
    """A proxy that accepts on ``listener`` and lets through what this set and this profile's gate let."""
    proxy = Proxy(Egress(capabilities, profile.gate, resolver), profile.on_attempt, limits)
    await proxy.serve(listener)
    return proxy


async def listener_in(child: int, parent: int) -> socket.socket:
    """A socket that listens on the proxy's port in the network namespace of a sandbox's first process.

    :param child: its process id
    :param parent: that of the bubblewrap which started it and which nobody has waited for yet
    :raises ToolError: ``backend`` when it cannot be had, ``unavailable`` where the system is short of something
    """
    descriptors: list[int] = []
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        here.setblocking(False)
        user, network = _namespaces(child, parent, descriptors)
        command = _command()
        names = {"user": 3, "network": 4, "channel": 5}
        argv = [word.format(**names) for word in command]
        pid = spawn(argv[0], argv, {}, {0: there.fileno(), 3: user, 4: network, 5: there.fileno()})
        there.close()
        return await _handed_over(here, pid)
    except ProgramRefused as error:
        raise ToolError(
            f"The network of the sandbox could not be set up: {error}. Ask the user to run 'handrail doctor'.",
            kind="unavailable",
        ) from None
    except OSError as error:
        kind = "unavailable" if error.errno in PASSING else "backend"
        raise ToolError(
            f"The network of the sandbox could not be set up: {error.strerror or error}. Try again.", kind=kind
        ) from None
    finally:
        here.close()
        there.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _namespaces(child: int, parent: int, opened: list[int]) -> tuple[int, int]:
    """The user and network namespace of ``child``, as descriptors that are also put into ``opened``.

    :raises OSError: when it has gone, or would be anything but a sandbox of its own
    """
    opened.append(held := os.pidfd_open(child))
    opened.append(network := os.open(f"/proc/{child}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    opened.append(user := fcntl.ioctl(network, _NS_GET_USERNS))
    os.set_inheritable(user, False)
    for kind, descriptor in (("net", network), ("user", user)):
        if os.fstat(descriptor).st_ino == Path(f"/proc/self/ns/{kind}").stat().st_ino:
            raise OSError(f"it shares the {kind} namespace of this machine")
    with Path(f"/proc/{child}/stat").open("rb") as file:
        started_by = int(file.read().rpartition(b")")[2].split()[1])
    # Alive, then everything read above was of this process and of no later one with its number.
    signal.pidfd_send_signal(held, 0)
    if started_by != parent:
        raise OSError("its first process was started by another process")
    return user, network


@lru_cache(maxsize=1)
def _command() -> tuple[str, ...]:
    """The listener's argv, with places for its descriptors' numbers."""
    calls = _CALLS.get(platform.machine())
    if calls is not None and sys.maxsize > 1 << 32 and os.access(PERL, os.X_OK):
        script = Path(__file__).with_name("listener.pl").read_text("utf-8").replace("{", "{{").replace("}", "}}")
        numbers = (str(number) for number in (*calls, PROXY_PORT))
        return (PERL, "-f", "-e", script, "--", "{user}", "{network}", "{channel}", *numbers)
    return python_command()


def python_command() -> tuple[str, ...]:
    """The same by the interpreter that Handrail runs on.

    :raises ProgramRefused: where that lies in an open workspace
    """
    script = Path(__file__).with_name("listener_python.py").read_text("utf-8").replace("{", "{{").replace("}", "}}")
    return (own_interpreter(), "-I", "-S", "-c", script, "{user}", "{network}", "{channel}", str(PROXY_PORT))


async def _handed_over(channel: socket.socket, pid: int) -> socket.socket:
    """The socket that the listener's process sends, once that has ended.

    :raises OSError: with what it said
    """
    loop = asyncio.get_running_loop()
    said: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, lambda: said.done() or said.set_result(None))
    received: list[int] = []
    try:
        async with asyncio.timeout(_HANDED_OVER_S):
            await said
        text, received, _, _ = socket.recv_fds(channel, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if len(received) == 1 and text == b"l":
            listener = socket.socket(fileno=received.pop())
            listener.setblocking(False)
            return listener
        if text == b"l":  # the kernel leaves out a descriptor that there is no number for
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise OSError(text[1:].decode("utf-8", "replace") or "the listener sent no message")
    except TimeoutError:
        raise OSError(f"the listener did not answer within {_HANDED_OVER_S:g} s") from None
    finally:
        for descriptor in received:
            os.close(descriptor)
        loop.remove_reader(channel)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has nothing left to do
        with contextlib.suppress(ChildProcessError):  # an embedding program reaps all children itself
            os.waitpid(pid, 0)  # noqa: ASYNC222 - it was just killed


def _loopback(pattern: str) -> Address | None:
    """The loopback address that ``pattern`` names itself."""
    try:
        address = read_host(pattern.removesuffix(":*")).address
    except ValueError:
        return None
    return address if address is not None and address.is_loopback else None
