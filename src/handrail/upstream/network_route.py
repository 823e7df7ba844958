"""The way of Handrail's own connections to servers with a URL: through a proxy or without one, and the trusted authorities."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from handrail.contract.errors import UsageError

if TYPE_CHECKING:
    from handrail.config.operator_settings import McpSettings
    from handrail.runtime.secret_store import SecretStore

FROM_ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class NetworkRoute:
    """The proxies and authorities for connections to servers.

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


DIRECT_ROUTE = NetworkRoute()


def make_network_route(
    settings: McpSettings,
    secrets: SecretStore,
    register_secret: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> NetworkRoute:
    """Return the route of a configuration.

    :param register_secret: called with the password of a proxy
    :param environment: the variables; None for those of this process
    """
    known = os.environ if environment is None else environment
    without, proxies, problem = settings.no_proxy, dict[str, str](), ""
    if settings.proxy == FROM_ENVIRONMENT:
        without += tuple(
            one.strip() for one in _variable(known, "no_proxy").replace(" ", ",").split(",") if one.strip()
        )
        every = _variable(known, "all_proxy")
        proxies = {scheme: _variable(known, f"{scheme}_proxy") or every for scheme in ("http", "https")}
    elif isinstance(settings.proxy, str):
        proxies = dict.fromkeys(("http", "https"), settings.proxy)
    elif (why := secrets.explain_missing(settings.proxy.secret)) is not None:
        problem = f"proxy of [mcp]: {why}"
    else:
        value = settings.proxy.prefix + secrets.select([settings.proxy.secret])[settings.proxy.secret]
        proxies = dict.fromkeys(("http", "https"), value)
    written = {scheme: _with_scheme(proxy) for scheme, proxy in proxies.items() if proxy}
    for proxy in written.values():
        problem = problem or _explain_unusable(proxy)
        with contextlib.suppress(ValueError):
            if password := urlsplit(proxy).password:
                register_secret(password)
                register_secret(unquote(password))
    return NetworkRoute(written, without, settings.ca_file, problem)


def _variable(environment: Mapping[str, str], name: str) -> str:
    """Return a variable in either case; the lower one is stronger, as for curl."""
    return environment.get(name) or environment.get(name.upper()) or ""


def _with_scheme(proxy: str) -> str:
    return proxy if "://" in proxy else f"http://{proxy}"


def _explain_unusable(proxy: str) -> str:
    """Return why a proxy cannot be used, without its credentials; empty if it can."""
    try:
        parts = urlsplit(proxy)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return ""
    except ValueError:
        pass
    return "the proxy of [mcp] is not an HTTP proxy; expected http://HOST:PORT or https://HOST:PORT"


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


def check_authorities(ca_file: str) -> None:
    """Check that a file of authorities can be read.

    :raises UsageError: with the reason
    """
    try:
        with open(ca_file, "rb") as file:  # noqa: PTH123 - only opened
            if b"-----BEGIN" not in file.read(16 * 1024 * 1024):
                raise UsageError(f"The `ca_file` of [mcp] has no certificate: {ca_file}. Give a file in PEM format.")
    except OSError as error:
        raise UsageError(
            f"The `ca_file` of [mcp] cannot be read: {ca_file}: {error.strerror or error}. Give a file in PEM format."
        ) from None
