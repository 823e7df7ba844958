"""The one check of every connection that leaves on behalf of a call: host, address and socket.

Used by the proxy in front of a sandbox and by the runtime's own fetches. A host is authorised by its canonical name
(:mod:`handrail.contract.text.host_names`) and resolved once. All its addresses are checked, and one of the *checked* addresses
is dialled, so a name that resolves differently the second time (rebinding) has no effect. An address that is not public is
reached only if every layer of the call's set names it literally.

If the operator has set a proxy, the connection goes to the proxy, which resolves the name again. The addresses that this
machine finds for the name are checked all the same. A name that it cannot resolve is left to the proxy, except names that
belong to a private network.

Open: a network's own NAT64 prefix (one other than ``64:ff9b::/96``) or a router that sends public addresses inwards cannot
be seen from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv6Address, ip_address
from typing import Protocol
from urllib.parse import urlsplit

from handrail.contract.errors import ToolError
from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings, build_proxy_authorization_header
from handrail.contract.text.host_names import (
    Address,
    HostAddress,
    bracket_ipv6_host,
    explain_private_refusal,
    grant_names_address,
)
from handrail.contract.text.public_addresses import explain_blocked_address
from handrail.contract.tool.requires import CapabilitySet

HostGate = Callable[[str, int], str | None]
"""A function that evaluates the rules for a host (an IPv6 address in brackets) and port: the reason for a denial, or
None."""
HostRequest = Callable[[str, int], Awaitable[str | None]]
"""A function that may ask the user about a host that the rules do not allow; it returns the same."""

RESOLVE_S = 10.0
CONNECT_S = 10.0
"""For each address."""
_MAX_DIALLED = 8
_MAX_LOOKUPS = 32
_MAX_PROXY_HEAD = 16 * 1024
_PRIVATE_NAMES = (
    ".local",
    ".internal",
    ".localdomain",
    ".lan",
    ".home.arpa",
    ".intranet",
    ".private",
    ".corp",
    ".home",
)
"""The ends of names that no public name has."""


class HostResolver(Protocol):
    """A resolver of host names."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Return the addresses of ``name`` as text.

        :raises OSError: if it has none, or the resolver does not answer
        """
        ...


class SystemResolver:
    """The resolver of the machine, in separate threads, so that a slow lookup blocks nothing else."""

    def __init__(self, timeout_s: float = RESOLVE_S) -> None:
        self._timeout_s = timeout_s
        self._pending = 0

    async def resolve(self, name: str) -> Sequence[str]:
        # A lookup cannot be cancelled, so a program that asks for many names would otherwise fill the process with
        # threads.
        if self._pending >= _MAX_LOOKUPS:
            raise OSError("too many host names are being resolved at once")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def settle(addresses: list[str], error: OSError | None) -> None:
            self._pending -= 1
            if not found.done():
                found.set_result(addresses) if error is None else found.set_exception(error)

        def look_up() -> None:
            addresses: list[str] = []
            failure: OSError | None = None
            try:
                rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(row[4][0]) for row in rows))
            except OSError as error:
                failure = error
            except UnicodeError as error:
                failure = OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
                loop.call_soon_threadsafe(settle, addresses, failure)

        self._pending += 1
        # The pool of the loop is not used: a few slow lookups would block all other work in it.
        threading.Thread(target=look_up, name="handrail-resolve", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await found
        except TimeoutError:
            raise OSError(f"no answer within {self._timeout_s:g} s") from None


@dataclass(frozen=True, slots=True)  # a struct shows every field, also a password
class CheckedHostAddresses:
    """A host that may be reached, with its checked addresses.

    :ivar proxy: the address of the proxy that leads there; empty for none
    """

    host: HostAddress
    addresses: tuple[Address, ...]
    proxy: str = field(default="", repr=False)


class EgressCheck:
    """A check of hosts and addresses for one capability set.

    :param gate: evaluates the rules, in addition to the set
    :param is_own: whether an address belongs to this machine
    :param request: may ask the user about a host that ``gate`` refuses
    :param route: the way to the hosts
    """

    def __init__(
        self,
        capabilities: CapabilitySet,
        gate: HostGate | None = None,
        resolver: HostResolver | None = None,
        is_own: Callable[[Address], bool] | None = None,
        request: HostRequest | None = None,
        route: OutboundConnectionSettings = DIRECT_ROUTE,
    ) -> None:
        self._route = route
        self._capabilities = capabilities
        self._gate = gate
        self._resolver = resolver or SystemResolver()
        self._is_own = is_own or is_address_of_this_machine
        self._request = request

    def explain_refusal(self, host: HostAddress) -> str | None:
        """Return why ``host`` (with its port) must not be reached, by its name alone; None if it may be."""
        assert host.port is not None
        # A deny rule is the better reason, because the user can change it.
        if self._gate is not None and (refused := self._gate(bracket_ipv6_host(host.name), host.port)) is not None:
            return refused
        layer = self._capabilities.find_denying_layer("net.fetch", str(host))
        if layer is None:
            return None
        if (fault := explain_private_refusal(layer.hosts, str(host))) is not None:
            return _format_private_refusal(str(host), fault, layer.owner, str(host))
        return (
            f"{host} is not an allowed host of {layer.owner}. Continue without it, or ask the user to add it to "
            f"{_describe_grant(layer.owner, str(host))}."
        )

    async def authorize_and_resolve_host(self, host: HostAddress, scheme: str = "https") -> CheckedHostAddresses:
        """Authorise ``host``, resolve it once, and check all its addresses.

        :param scheme: ``http`` for a plain request, for which the operator may have set another proxy
        :raises ToolError: ``denied`` with the reason, ``backend`` if the name cannot be resolved
        """
        refused = self.explain_refusal(host)
        if refused is not None and self._request is not None:
            # The question comes before the lookup, which would tell a name server a name that no rule allows.
            assert host.port is not None
            refused = await self._request(bracket_ipv6_host(host.name), host.port) or self.explain_refusal(host)
        if refused is not None:
            raise ToolError(refused, kind="denied")
        if self._route.problem:
            raise ToolError(
                f"{host} cannot be reached: {self._route.problem}. Ask the user to correct it.", kind="backend"
            )
        assert host.port is not None
        proxy = self._route.find_proxy(scheme, host.name, host.port)
        try:
            addresses = (host.address,) if host.address is not None else await self._resolve_addresses(host)
        except ToolError as error:
            # Behind a proxy, this machine may be unable to resolve public names. The proxy resolves them.
            if not proxy or error.kind != "backend":
                raise
            # The proxy is inside the private network, so it could reach what the check of the addresses refuses.
            if "." not in host.name or host.name.endswith(_PRIVATE_NAMES):
                raise ToolError(
                    f"{host} is a name of a private network, and its address cannot be checked. Use a public host, or ask "
                    "the user to add it to `no_proxy` of [network].",
                    kind="denied",
                ) from None
            addresses = ()
        for address in addresses:
            # One refused address refuses the host: a name server could give a public and a private address, and the
            # client would choose.
            if (refused := self._explain_address_refusal(host, address)) is not None:
                raise ToolError(refused, kind="denied")
        return CheckedHostAddresses(host, addresses[:_MAX_DIALLED], proxy)

    async def connect_to_checked_address(
        self, way: CheckedHostAddresses, timeout_s: float = CONNECT_S
    ) -> socket.socket:
        """Return a connected, non-blocking socket to one of the checked addresses, through the proxy if there is one.

        :param timeout_s: for each address
        :raises ToolError: ``backend`` if none of them answers
        """
        if way.proxy:
            connection = await self.connect_to_proxy(way)
            try:
                async with asyncio.timeout(timeout_s):
                    await _open_tunnel(connection, way)
            except TimeoutError:
                connection.close()
                raise _make_proxy_error(f"no answer within {timeout_s:g} s") from None
            except OSError as error:
                connection.close()
                raise _make_proxy_error(error.strerror or str(error)) from None
            except BaseException:
                connection.close()
                raise
            return connection
        loop = asyncio.get_running_loop()
        problem = "it has no address"
        assert way.host.port is not None
        for address in way.addresses:
            family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                problem = str(error)
                continue
            try:
                connection.setblocking(False)
                async with asyncio.timeout(timeout_s):
                    await loop.sock_connect(connection, (str(address), way.host.port))
                # A proxy forwards small pieces, which would otherwise wait for each other's acknowledgement.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            except TimeoutError:
                problem = f"no answer within {timeout_s:g} s"
            except OSError as error:
                problem = error.strerror or str(error)
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise ToolError(
            f"{way.host} could not be reached: {problem}. Check the host and the port, or try again later.",
            kind="backend",
        )

    async def connect_to_proxy(self, way: CheckedHostAddresses, timeout_s: float = CONNECT_S) -> socket.socket:
        """Return a connected, non-blocking socket to the proxy of a checked host. A plain request can be sent on it.

        :raises ToolError: ``backend`` if it cannot be reached
        """
        parts = urlsplit(way.proxy)
        if parts.scheme != "http" or parts.hostname is None:
            raise _make_proxy_error("tools and programs use a proxy at http:// only. Set such an address")
        loop = asyncio.get_running_loop()
        problem = "it has no address"
        try:
            async with asyncio.timeout(timeout_s):
                rows = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
                for family, kind, protocol, _, place in rows:
                    connection = socket.socket(family, kind, protocol)
                    try:
                        connection.setblocking(False)
                        await loop.sock_connect(connection, place)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return connection
                    except OSError as error:
                        problem = error.strerror or str(error)
                        connection.close()
                    except BaseException:
                        connection.close()
                        raise
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s"
        except OSError as error:
            problem = error.strerror or str(error)
        raise _make_proxy_error(problem)

    async def _resolve_addresses(self, host: HostAddress) -> tuple[Address, ...]:
        try:
            texts = await self._resolver.resolve(host.name)
        except OSError as error:
            raise ToolError(
                f"{host.name} could not be resolved: {error.strerror or error}. Check the host name.", kind="backend"
            ) from None
        addresses: list[Address] = []
        for text in dict.fromkeys(texts):
            try:
                addresses.append(ip_address(text))
            except (ValueError, AddressValueError):
                raise ToolError(
                    f"{host.name} resolves to {text[:100]!r}, which is not an IP address. Use another host.",
                    kind="denied",
                ) from None
        if not addresses:
            raise ToolError(
                f"{host.name} could not be resolved: it has no address. Check the host name.", kind="backend"
            )
        return tuple(addresses)

    def _explain_address_refusal(self, host: HostAddress, address: Address) -> str | None:
        # The machine's own public address is global, but its servers may trust connections from the machine.
        fault = explain_blocked_address(address)
        if fault is None and self._is_own(address):
            fault = "an address of this machine"
        if fault is None:
            return None
        assert host.port is not None
        literal = f"{bracket_ipv6_host(str(address))}:{host.port}"
        for layer in self._capabilities.layers:
            # A wildcard does not count: it was granted for public hosts. Only the address itself shows that the
            # operator means it.
            if not any(grant_names_address(pattern, address, host.port) for pattern in layer.hosts):
                leads = f"{host}" if host.address is not None else f"{host} resolves to {address}, which"
                return _format_private_refusal(leads, fault, layer.owner, literal)
        if host.address is None and self._gate is not None:
            return self._gate(bracket_ipv6_host(str(address)), host.port)
        return None


def _format_private_refusal(leads: str, fault: str, owner: str, literal: str) -> str:
    """Return why a host that is not public is refused.

    :param leads: the host, and the address that it leads to
    """
    return (
        f"{leads} is {fault}. Only a literal grant opens such an address, and {owner} has none. Use a public host, or ask the "
        f"user to add it to {_describe_grant(owner, literal)}."
    )


def _describe_grant(owner: str, host: str) -> str:
    """Return where an operator grants a host to the owner of a layer."""
    server = owner.removeprefix("mcp server ")
    if server != owner:
        return f'hosts of [mcp.servers.{server}], as in hosts = ["{host}"]'
    return f'`requires`, as in {{"net": {{"hosts": ["{host}"]}}}}'


async def _open_tunnel(connection: socket.socket, way: CheckedHostAddresses) -> None:
    """Have the proxy connect to the host.

    :raises ToolError: ``backend`` if it does not
    """
    loop = asyncio.get_running_loop()
    place = f"{bracket_ipv6_host(way.host.name)}:{way.host.port}"
    credentials = build_proxy_authorization_header(way.proxy)
    more = f"Proxy-Authorization: {credentials}\r\n" if credentials else ""
    await loop.sock_sendall(connection, f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{more}\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # byte by byte, because the next one may be the host's
        piece = await loop.sock_recv(connection, 1)
        head += piece
        if not piece or len(head) > _MAX_PROXY_HEAD:
            raise _make_proxy_error("its answer is not an HTTP response")
    status = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)[1:]
    if not status or not status[0].startswith("2"):
        raise _make_proxy_error(f"it answered {' '.join(status)[:100] or 'nothing'} for {place}")


def _make_proxy_error(problem: str) -> ToolError:
    text = f"The proxy cannot be used: {problem}. Try again later, or tell the user."
    return ToolError(text, kind="backend")


def is_address_of_this_machine(address: Address) -> bool:
    """Return whether ``address`` belongs to this machine. Sends nothing."""
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # For a datagram socket this only chooses the route. The kernel answers from the same address if it is its
            # own.
            probe.connect((str(address), 9))
            return ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except (OSError, ValueError):  # there is no route to it
        return False
