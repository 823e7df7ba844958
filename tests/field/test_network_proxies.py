"""Reports from networks that require a proxy: fetch tools and sandboxed programs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.field.test_sign_in_proxies import Proxy
from tests.web import LoopbackServer, authority, ok

from handrail import tool
from handrail.contract.network_route import OutboundConnectionSettings
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.host_names import parse_host_address
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.network.egress_check import EgressCheck
from handrail.testing.scripted_kernel import temporary_kernel

NAME = "site.corp.test"
"""A name that only the proxy can resolve."""
PASSWORD = "ada:s%cret"


@tool(id="look", side_effect="read", locks=[], requires={"net": {"hosts": ["*:*"]}})
async def look(url: str, runtime: Runtime) -> dict[str, Any]:
    """Fetch a URL."""
    answer = await runtime.net.request("GET", url)
    return {"status": answer.status, "text": answer.body.decode()}


@tool(id="send", side_effect="external", locks=[], requires={"net": {"hosts": ["*:*"]}})
async def send(url: str, runtime: Runtime) -> int:
    """Send a text to a URL."""
    return (await runtime.net.request("POST", url, body=b"a text")).status


@dataclass
class ProxyFixture:
    """Two sites and a proxy that leads to both, and a session behind it."""

    plain: LoopbackServer
    tls: LoopbackServer
    proxy: Proxy
    session: Any

    def urls(self) -> tuple[str, str]:
        return f"http://{NAME}:{self.plain.port}/a?b=c", f"https://{NAME}:{self.tls.port}/a?b=c"


@asynccontextmanager
async def network(folder: Path, table: str = 'proxy = { secret = "PROXY" }') -> AsyncGenerator[ProxyFixture]:
    made = authority(NAME)
    (folder / "corporate.pem").write_text(made.pem)
    async with LoopbackServer({"*": ok(b"plain")}) as plain, LoopbackServer({"*": ok(b"tls")}, tls=made.server) as tls:
        places = {f"{NAME}:{site.port}": site.port for site in (plain, tls)}
        proxy = Proxy(places, PASSWORD)
        serving = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = serving.sockets[0].getsockname()[1]
        secret = folder / "proxy"
        secret.write_text(f"http://ada:s%25cret@127.0.0.1:{proxy.port}")
        secret.chmod(0o600)
        settings = (
            f'[network]\n{table}\nca_file = "{folder / "corporate.pem"}"\n[secrets]\nPROXY = {{ file = "{secret}" }}\n'
        )
        rules = ["allow look", "allow send", "allow bash", "allow net.fetch *:*"]
        try:
            async with temporary_kernel(folder, tools=[look, send], rules=rules, settings=settings) as kernel:
                yield ProxyFixture(plain, tls, proxy, await kernel.session(headless=True))
        finally:
            serving.close()


async def test_a_tool_reaches_hosts_through_the_proxy_with_its_password(tmp_path: Path) -> None:
    async with network(tmp_path) as found:
        plain, tls = found.urls()
        for url, text in ((plain, "plain"), (tls, "tls")):
            result = await found.session.call("look", {"url": url})
            assert result.data == {"status": 200, "text": text}, result.error_text
            assert (await found.session.call("send", {"url": url})).data == 200
        assert found.proxy.asked == [
            f"GET {plain}",
            f"POST {plain}",
            *[f"CONNECT {NAME}:{found.tls.port}"] * 2,
        ]
        assert [one.body for one in found.plain.asked] == [b"", b"a text"]
        assert found.plain.asked[0].line == "GET /a?b=c HTTP/1.1"


PROGRAM = """
import ssl, sys, urllib.request
context = ssl._create_unverified_context()
for url in sys.argv[1:]:
    print(urllib.request.urlopen(url, context=context).read().decode())
"""


async def test_a_program_in_the_sandbox_reaches_hosts_through_the_proxy(tmp_path: Path) -> None:
    async with network(tmp_path) as found:
        (tmp_path / "ws" / "fetch.py").write_text(PROGRAM)
        plain, tls = found.urls()
        result = await found.session.call("bash", {"command": f"python3 fetch.py '{plain}' '{tls}'"})
        assert result.data["exit_code"] == 0, result.data
        assert "plain" in str(result.data) and "tls" in str(result.data)
        assert found.proxy.asked == [f"GET {plain}", f"CONNECT {NAME}:{found.tls.port}"]
        assert "s%cret" not in str(result.data) and "s%25cret" not in str(result.data)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('proxy = "http://127.0.0.1:1"', "The proxy cannot be used"),
        ('proxy = "https://127.0.0.1:1"', "at http:// only"),
        ('proxy = "socks5://127.0.0.1:1"', "not an HTTP proxy"),
        ('proxy = { secret = "NONE" }', "NONE"),
    ],
)
async def test_an_unusable_proxy_is_named_in_the_error_and_not_bypassed(tmp_path: Path, table: str, why: str) -> None:
    async with network(tmp_path, table) as found:
        for url in found.urls():
            result = await found.session.call("look", {"url": url})
            assert result.error_kind in ("backend", "unavailable") and why in str(result.error_text)
        assert not found.plain.asked and not found.tls.asked


async def test_a_refusal_by_the_proxy_is_named_in_the_error(tmp_path: Path) -> None:
    async with network(tmp_path) as found:
        found.proxy.password = "another"
        plain, tls = found.urls()
        assert (await found.session.call("look", {"url": plain})).data["status"] == 407
        refused = await found.session.call("look", {"url": tls})
        assert refused.error_kind == "backend" and "it answered 407" in str(refused.error_text)


class KnownNamesResolver:
    """A resolver that knows some names."""

    def __init__(self, **names: str) -> None:
        self._names = {name.replace("_", "."): address for name, address in names.items()}

    async def resolve(self, name: str) -> list[str]:
        if name not in self._names:
            raise socket.gaierror("unknown")
        return [self._names[name]]


ROUTE = OutboundConnectionSettings({"https": "http://proxy.test:3128"}, ("direct.test",))


@pytest.mark.parametrize(
    ("host", "through", "why"),
    [
        ("public.test:443", True, None),
        ("unknown.test:443", True, None),
        ("direct.test:443", False, None),
        ("8.8.8.8:443", True, None),
        ("private.test:443", True, "private, local or reserved"),
        ("metadata.test:443", True, "metadata service"),
        ("10.1.2.3:443", True, "private, local or reserved"),
        ("169.254.169.254:80", True, "metadata service"),
        ("127.0.0.1:443", True, "private, local or reserved"),
        ("localhost:443", True, "a name of this machine"),
        ("metadata.google.internal:443", True, "private network"),
        ("printer.local:443", True, "private network"),
        ("printer:443", True, "private network"),
    ],
)
async def test_address_checks_apply_with_a_proxy_too(host: str, through: bool, why: str | None) -> None:
    known = KnownNamesResolver(
        public_test="8.8.4.4", direct_test="8.8.4.4", private_test="10.0.0.1", metadata_test="169.254.169.254"
    )
    everything = CapabilitySet((CapabilityLayer("all", hosts=("*",)),))
    egress = EgressCheck(everything, None, known, is_own=lambda _: False, route=ROUTE)
    if why is not None:
        with pytest.raises(Exception, match=why):
            await egress.authorize_and_resolve_host(parse_host_address(host))
    else:
        way = await egress.authorize_and_resolve_host(parse_host_address(host))
        assert bool(way.proxy) is through
