"""The way to hosts outside, as the configuration and the environment have it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from handrail.contract.network_route import OutboundConnectionSettings

if TYPE_CHECKING:
    from handrail.config.operator_settings import NetworkSettings, Settings
    from handrail.runtime.secret_store import SecretStore

FROM_ENVIRONMENT = "environment"


def make_network_route(
    settings: NetworkSettings,
    secrets: SecretStore,
    register_secret: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> OutboundConnectionSettings:
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
    elif (why := secrets.explain_missing_secret(settings.proxy.secret)) is not None:
        problem = f"the proxy cannot be used: {why}"
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
    return OutboundConnectionSettings(written, without, settings.ca_file, problem)


def make_server_route(
    settings: Settings, secrets: SecretStore, register_secret: Callable[[str], None] = lambda value: None
) -> OutboundConnectionSettings:
    """Return the route to the servers of ``[mcp]``: its own if it sets one, or else that of ``[network]``."""
    own = {"proxy", "no_proxy", "ca_file"} & settings.mcp.model_fields_set
    return make_network_route(settings.mcp if own else settings.network, secrets, register_secret)


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
    return "the proxy is not an HTTP proxy; expected http://HOST:PORT or https://HOST:PORT"
