"""The way to hosts outside: through a proxy of the operator's network or without one, and the trusted authorities."""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True)
class OutboundConnectionSettings:
    """The proxies and authorities for connections.

    :param proxies: by scheme, the address of the proxy, which may have credentials
    :param without_proxy: the hosts that need no proxy, as in ``NO_PROXY``
    :param ca_file: a file with further authorities; empty for none
    :param problem: the reason why no connection is possible as configured; empty if one is
    """

    proxies: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    without_proxy: tuple[str, ...] = ()
    ca_file: str = ""
    problem: str = ""

    def find_proxy(self, scheme: str, host: str, port: int) -> str:
        """Return the proxy for a host; empty for none. This machine is always reached without one."""
        proxy = self.proxies.get(scheme, "")
        if not proxy or _is_this_machine(host) or any(_covers(one, host, port) for one in self.without_proxy):
            return ""
        return proxy


DIRECT_ROUTE = OutboundConnectionSettings()


def build_proxy_authorization_header(proxy: str) -> str:
    """Return the value of ``Proxy-Authorization`` for a proxy; empty if its address has no credentials."""
    parts = urlsplit(proxy)
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def _is_this_machine(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _covers(pattern: str, host: str, port: int) -> bool:
    """Return whether an entry of ``NO_PROXY`` covers a host."""
    if pattern == "*":
        return True
    host = host.strip("[]").lower().rstrip(".")
    name, colon, number = pattern.lower().rpartition(":")
    if colon and number.isdigit() and (":" not in name or name.endswith("]")):
        if int(number) != port:
            return False
        pattern = name
    pattern = pattern.lower().strip("[]").removeprefix("*").strip(".")
    try:
        return ip_address(host) in ip_network(pattern, strict=False)
    except ValueError:
        return bool(pattern) and (host == pattern or host.endswith(f".{pattern}"))
