"""The loopback that the sandboxes of one session share: a server in a job is reached by the session's later calls.

It is a network namespace without any way out, which bubblewrap makes once and a descriptor keeps. Sandboxes join it with
nsenter before they make their other namespaces. Each sandbox that may reach hosts has its own port there, behind which its
own proxy answers. The proxies of a session differ only in the call that a host is recorded for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess

import orjson

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct, field
from handrail.origins.program_lookup import list_open_workspaces
from handrail.sandbox.network import sandbox_network
from handrail.sandbox.network.egress_proxy import EgressProxy
from handrail.sandbox.start.spawn import is_inside

NSENTER = "/usr/bin/nsenter"
_HOLDER_OPTIONS = ("--unshare-user", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--cap-drop", "ALL")
_TIMEOUT_S = 20
_MAX_NETWORKS = 64
_MAX_PORT_FAULTS = 16


class ProxyPort(Struct, eq=False):
    """The use of a port of a session's loopback, which listens for the proxy of one sandbox.

    :ivar proxy: the proxy that answers there
    """

    network: SessionNetwork
    number: int
    listener: socket.socket
    proxy: EgressProxy | None = None
    is_released: bool = False

    async def take_socket(self) -> socket.socket:
        """Return the listening socket for a proxy, which then owns it.

        :raises ToolError: ``backend`` if the sandbox has ended
        """
        if self.is_released:
            raise ToolError("The sandbox ended before its network was set up. Try again.", kind="backend")
        return self.listener.dup()

    def release(self) -> None:
        """Leave the port to another sandbox. Connections that nobody has accepted end."""
        if self.is_released:
            return
        self.is_released = True
        if self.proxy is not None:
            self.proxy.stop_accepting()
        with contextlib.suppress(OSError):
            while True:
                self.listener.accept()[0].close()
        if self.network.is_closed:
            self.listener.close()
        else:
            self.network.free_ports.append(ProxyPort(self.network, self.number, self.listener))


class SessionNetwork(Struct, eq=False):
    """A network namespace, kept by a descriptor of it and of the user namespace that owns it."""

    user: int
    network: int
    free_ports: list[ProxyPort] = field(default_factory=list[ProxyPort])
    next_number: int = sandbox_network.PROXY_PORT
    is_closed: bool = False

    @property
    def namespace_entry_argv(self) -> list[str]:
        """The arguments before a program that starts it in this namespace."""
        own = f"/proc/{os.getpid()}/fd"
        user = [f"--user={own}/{self.user}"] if os.geteuid() != 0 else []  # real root may enter any network namespace
        return ["nsenter", "--preserve-credentials", *user, f"--net={own}/{self.network}", "--"]

    async def acquire_proxy_port(self) -> ProxyPort:
        """Return a port that no other sandbox uses.

        :raises ToolError: ``backend`` if none can be listened on
        """
        if self.free_ports:
            return self.free_ports.pop()
        for tries_left in reversed(range(_MAX_PORT_FAULTS)):
            number, self.next_number = self.next_number, self.next_number + 1
            try:
                listener = await sandbox_network.open_namespace_listener(self.user, self.network, number)
            except ToolError:  # a program may listen there
                if not tries_left:
                    raise
            else:
                return ProxyPort(self, number, listener)
        raise AssertionError("the loop returns or raises")

    def close(self) -> None:
        """Let the namespace end with its last process."""
        if not self.is_closed:
            self.is_closed = True
            for port in self.free_ports:
                port.listener.close()
            for descriptor in (self.user, self.network):
                os.close(descriptor)


class SessionNetworks:
    """The networks of the sessions of one sandbox provider, by name. Belongs to one event loop.

    :param binary: the bubblewrap to start
    """

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._made: dict[tuple[str, str], asyncio.Future[SessionNetwork | None]] = {}

    async def get(self, name: str, scratch: str) -> SessionNetwork | None:
        """Return the network of this name; None if this machine cannot share one.

        :param scratch: the HOME of its sandboxes, with which it is closed
        """
        key = name, scratch
        if key not in self._made:
            self._made[key] = asyncio.ensure_future(asyncio.to_thread(_make_network, self._binary))
            while len(self._made) > _MAX_NETWORKS:
                _close_when_made(self._made.pop(next(iter(self._made))))
        return await asyncio.shield(self._made[key])

    def close(self, scratch: str | None = None) -> None:
        """Close the networks of this scratch folder; all of them if it is None."""
        for key in [key for key in self._made if scratch in (None, key[1])]:
            _close_when_made(self._made.pop(key))


def _close_when_made(made: asyncio.Future[SessionNetwork | None]) -> None:
    def close(done: asyncio.Future[SessionNetwork | None]) -> None:
        if not done.cancelled() and (network := done.result()) is not None:
            network.close()

    if made.done():
        close(made)
    else:
        made.add_done_callback(close)


def _make_network(binary: str) -> SessionNetwork | None:
    if not os.access(NSENTER, os.X_OK) or any(is_inside(one, list_open_workspaces()) for one in (binary, NSENTER)):
        return None
    try:
        network = SessionNetwork(*_make_namespaces(binary))
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return None
    try:
        tried = subprocess.run(
            [NSENTER, *network.namespace_entry_argv[1:], "/bin/true"],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if tried.returncode == 0:
            return network
    except (OSError, subprocess.SubprocessError):
        pass
    network.close()
    return None


def _make_namespaces(binary: str) -> tuple[int, int]:
    """Return descriptors of a new user namespace and of a new network namespace, whose loopback is up."""
    read_end, tell = os.pipe()
    try:
        with subprocess.Popen(
            [binary, *_HOLDER_OPTIONS, "--info-fd", str(tell), "--", "/bin/cat"],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(tell,),
            cwd="/",
        ) as holder:
            os.close(tell)
            tell = -1
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.write(b"x")
            holder.stdin.flush()
            if holder.stdout.read(1) != b"x":  # it runs, so bubblewrap has set up everything
                raise OSError("bubblewrap could not make a network namespace")
            child = orjson.loads(_read_whole(read_end))["child-pid"]
            opened: list[int] = []
            try:
                user, network = sandbox_network.open_sandbox_namespaces(child, holder.pid, opened)
                return os.dup(user), os.dup(network)
            finally:
                for descriptor in opened:
                    os.close(descriptor)
                holder.stdin.close()
    finally:
        os.close(read_end)
        if tell >= 0:
            os.close(tell)


def _read_whole(descriptor: int) -> bytes:
    text = b""
    while not text.rstrip().endswith(b"}"):
        piece = os.read(descriptor, 4096)
        if not piece:
            raise OSError("bubblewrap did not name its first process")
        text += piece
    return text
