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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, SandboxProfile
from handrail.contract.text.host_names import Address, parse_host_address
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.program_lookup import ProgramRefused, find_own_interpreter
from handrail.sandbox.network.egress_check import EgressCheck, HostResolver
from handrail.sandbox.network.egress_proxy import EgressProxy, ProxyLimits, TcpForwarder
from handrail.sandbox.start.spawn import ProcessWrapper, spawn
from handrail.sandbox.view.cached_folder_tree import SHORTAGE_ERRORS

PROXY_PORT = 3128
PERL = "/usr/bin/perl"
_NS_GET_USERNS = 0xB701
_HANDOVER_TIMEOUT_S = 20.0
_SYSTEM_CALLS: Mapping[str, tuple[int, int]] = {
    "x86_64": (308, 46),
    "aarch64": (268, 211),
    "riscv64": (268, 211),
    "loongarch64": (268, 211),
    "ppc64le": (350, 341),
    "s390x": (339, 370),
}
"""The numbers of setns(2) and sendmsg(2) by machine. Other machines use the listener in Python."""
_PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "127.0.0.0/8")  # noqa: S104 - where a client connects


def needs_proxy(capabilities: CapabilitySet, profile: SandboxProfile) -> bool:
    """Return whether a sandbox has a proxy: if its program may reach a host, and if it is a server."""
    return profile.serves or capabilities.may_allow_any_target("net.fetch")


def build_proxy_environment(capabilities: CapabilitySet) -> dict[str, str]:
    """Return the variables that direct a program's requests to the proxy.

    A program reaches servers on the sandbox's own loopback directly. If an address of the loopback is granted, it means
    the machine's loopback.
    """
    address = _format_proxy_address(PROXY_PORT)
    granted = [
        read
        for layer in capabilities.layers
        for pattern in layer.hosts
        if (read := _parse_granted_loopback(pattern)) is not None
    ]
    direct = [name for name in _LOOPBACK if name == "localhost" or not granted]
    found: dict[str, str] = {}
    for name in _PROXY_VARIABLES:
        found[name] = address
    found["no_proxy"] = found["NO_PROXY"] = ",".join(direct)
    found["NODE_USE_ENV_PROXY"] = "1"
    return found


def replace_proxy_port(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """Return an environment that directs requests to the proxy behind this port."""
    address = _format_proxy_address(port)
    return {name: address if name in _PROXY_VARIABLES else value for name, value in environment.items()}


def _format_proxy_address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


class ProxiedProcess(ProcessWrapper):
    """A process with a proxy and forwarders, which are closed together with it."""

    def __init__(self, process: Process, proxy: EgressProxy, forwarders: Sequence[TcpForwarder] = ()) -> None:
        super().__init__(process)
        self.proxy = proxy
        self._forwarders = forwarders

    async def wait(self) -> int:
        code = await super().wait()
        await self._close_network()
        return code

    async def kill(self) -> None:
        try:
            await super().kill()
        finally:
            await self._close_network()

    async def _close_network(self) -> None:
        for one in (self.proxy, *self._forwarders):
            await one.aclose()


class WaitingSandbox(Process, Protocol):
    """A sandbox that is ready and whose program has not begun."""

    @property
    def first_process_pid(self) -> int:
        """The process id of its first process on this machine."""
        ...

    async def wait_until_pid_known(self) -> bool:
        """Wait until :attr:`first_process_pid` is known; return False if the sandbox ended instead."""
        ...


class ListenerSource(Protocol):
    """A source of the listening socket for a proxy."""

    async def take_socket(self) -> socket.socket:
        """Return the socket, which the caller then owns.

        :raises ToolError: ``backend`` if there is none
        """
        ...


class EarlyProxyListener:
    """A listening socket for the proxy of a waiting sandbox, made while the sandbox waits.

    The caller of :meth:`take_socket` owns the socket. Otherwise :meth:`close_untaken_socket` closes it.
    """

    def __init__(self, process: WaitingSandbox) -> None:
        self._process = process
        self._listener = asyncio.ensure_future(_make_listener(process))
        self._taken = False

    async def take_socket(self) -> socket.socket:
        """Return the socket, which the caller then owns.

        :raises ToolError: ``backend`` if it could not be made
        """
        self._taken = True
        try:
            return await self._listener
        except ToolError:  # a shortage while the sandbox waited may be over
            return await _make_listener(self._process)

    async def wait_until_socket_made(self) -> bool:
        """Wait for the socket; return False if it could not be made."""
        await asyncio.wait((self._listener,))
        return not self._listener.cancelled() and self._listener.exception() is None

    def close_untaken_socket(self) -> None:
        """Close the socket unless it was taken."""
        if self._taken:
            return
        if self._listener.done():
            _close_made(self._listener)
        else:
            self._listener.cancel()
            self._listener.add_done_callback(_close_made)


def _close_made(made: asyncio.Future[socket.socket]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


async def begin_program_with_proxy(
    process: WaitingSandbox,
    begin: Callable[[], None],
    capabilities: CapabilitySet,
    profile: SandboxProfile,
    ahead: ListenerSource | None = None,
) -> ProxiedProcess:
    """Start a proxy for a waiting sandbox, then let its program begin. End the sandbox if that fails.

    :param begin: lets the program begin
    :param ahead: the listening socket, if it is already being made
    :raises ToolError: ``backend`` if the network cannot be set up
    """
    proxy: EgressProxy | None = None
    forwarders: list[TcpForwarder] = []
    try:
        listener = await (_make_listener(process) if ahead is None else ahead.take_socket())
        proxy = await start_proxy(listener, capabilities, profile)
        for text in profile.tcp:
            target = parse_host_address(text)
            assert target.port is not None
            inside = await open_listener_in_sandbox(process.first_process_pid, process.pid, target.port)
            forwarders.append(TcpForwarder(EgressCheck(capabilities, profile.check_host), target, profile.on_attempt))
            forwarders[-1].serve(inside)
        begin()
        return ProxiedProcess(process, proxy, forwarders)
    except BaseException:
        for one in (*([proxy] if proxy is not None else []), *forwarders):
            await one.aclose()
        await process.kill()
        raise


async def _make_listener(process: WaitingSandbox) -> socket.socket:
    if not await process.wait_until_pid_known():
        await process.wait()  # raises with the reason
        raise ToolError("The sandbox ended before its network was set up. Try again.", kind="backend")
    return await open_listener_in_sandbox(process.first_process_pid, process.pid)


async def start_proxy(
    listener: socket.socket,
    capabilities: CapabilitySet,
    profile: SandboxProfile,
    *,
    resolver: HostResolver | None = None,
    limits: ProxyLimits | None = None,
) -> EgressProxy:
    """Start a proxy on ``listener`` that lets through the hosts of this set and profile."""
    egress = EgressCheck(capabilities, profile.check_host, resolver, request=profile.request_host, route=profile.route)
    proxy = EgressProxy(egress, profile.on_attempt, limits)
    proxy.serve(listener)
    return proxy


async def open_listener_in_sandbox(child: int, parent: int, port: int = PROXY_PORT) -> socket.socket:
    """Return a socket that listens on a port in a sandbox's network namespace.

    :param child: the process id of the sandbox's first process
    :param parent: that of the bubblewrap that started it and was not reaped yet
    :raises ToolError: ``backend`` if that fails, ``unavailable`` if the system is short of a resource
    """
    opened: list[int] = []
    try:
        user, network = open_sandbox_namespaces(child, parent, opened)
        return await open_namespace_listener(user, network, port)
    except OSError as error:
        raise _make_setup_error(error) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


async def open_namespace_listener(user: int, network: int, port: int) -> socket.socket:
    """Return a socket that listens on a port in a network namespace.

    :param user: the user namespace that owns it
    :raises ToolError: as :func:`open_listener_in_sandbox`
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        here.setblocking(False)
        command = _build_listener_argv()
        names = {"user": 3, "network": 4, "channel": 5, "port": port}
        argv = [word.format(**names) for word in command]
        pid = spawn(argv[0], argv, {}, {0: there.fileno(), 3: user, 4: network, 5: there.fileno()})
        there.close()
        return await _receive_listening_socket(here, pid)
    except ProgramRefused as error:
        raise ToolError(
            f"The network of the sandbox could not be set up: {error}. Ask the user to run 'handrail doctor'.",
            kind="unavailable",
        ) from None
    except OSError as error:
        raise _make_setup_error(error) from None
    finally:
        here.close()
        there.close()


def _make_setup_error(error: OSError) -> ToolError:
    kind = "unavailable" if error.errno in SHORTAGE_ERRORS else "backend"
    return ToolError(
        f"The network of the sandbox could not be set up: {error.strerror or error}. Try again.", kind=kind
    )


def open_sandbox_namespaces(child: int, parent: int, opened: list[int]) -> tuple[int, int]:
    """Return the user and network namespace of ``child`` as descriptors, and add them to ``opened``.

    :raises OSError: if the process has ended, or is not the first one of a sandbox
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
    # If it is still alive, everything above was read of this process, and not of a later one with the same id.
    signal.pidfd_send_signal(held, 0)
    if started_by != parent:
        raise OSError("its first process was started by another process")
    return user, network


@lru_cache(maxsize=1)
def _build_listener_argv() -> tuple[str, ...]:
    """Return the listener's argv, with placeholders for its descriptors."""
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is not None and sys.maxsize > 1 << 32 and os.access(PERL, os.X_OK):
        script = Path(__file__).with_name("listener.pl").read_text("utf-8").replace("{", "{{").replace("}", "}}")
        return (PERL, "-f", "-e", script, "--", "{user}", "{network}", "{channel}", *map(str, calls), "{port}")
    return build_python_listener_argv()


def build_python_listener_argv() -> tuple[str, ...]:
    """Return the argv of the listener in Python, for the interpreter that runs Handrail.

    :raises ProgramRefused: if the interpreter lies in an open workspace
    """
    script = Path(__file__).with_name("listener_python.py").read_text("utf-8").replace("{", "{{").replace("}", "}}")
    return (find_own_interpreter(), "-I", "-S", "-c", script, "{user}", "{network}", "{channel}", "{port}")


async def _receive_listening_socket(channel: socket.socket, pid: int) -> socket.socket:
    """Return the socket that the listener's process sends.

    :raises OSError: with the message of the process
    """
    loop = asyncio.get_running_loop()
    said: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, lambda: said.done() or said.set_result(None))
    received: list[int] = []
    try:
        async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
            await said
        text, received, _, _ = socket.recv_fds(channel, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if len(received) == 1 and text == b"l":
            listener = socket.socket(fileno=received.pop())
            listener.setblocking(False)
            return listener
        if text == b"l":  # the kernel drops a descriptor if no number is free
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise OSError(text[1:].decode("utf-8", "replace") or "the listener sent no message")
    except TimeoutError:
        raise OSError(f"the listener did not answer within {_HANDOVER_TIMEOUT_S:g} s") from None
    finally:
        for descriptor in received:
            os.close(descriptor)
        loop.remove_reader(channel)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has nothing left to do
        with contextlib.suppress(ChildProcessError):  # an embedding program reaps all children itself
            os.waitpid(pid, 0)  # noqa: ASYNC222 - it was just killed


def _parse_granted_loopback(pattern: str) -> Address | None:
    """Return the loopback address that ``pattern`` names literally; else None."""
    try:
        address = parse_host_address(pattern.removesuffix(":*")).address
    except ValueError:
        return None
    return address if address is not None and address.is_loopback else None
