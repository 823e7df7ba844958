"""Reports from networks that require a proxy and have a private certificate authority."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.field.sign_in_server import Browser, StrictSignInServer, say
from tests.upstream.scripted_mcp_servers import HttpResponseWriter, ReceivedHttpRequest, UpstreamHttpServer
from tests.web import authority

from handrail import HandrailError, UsageError, config
from handrail.config.operator_settings import McpSettings
from handrail.kernel.upstream_mcp_servers import fetch_and_store_tool_list, sign_in_to_server
from handrail.runtime.secret_store import SecretStore
from handrail.store.state_folders import StateFolders, locate_folders
from handrail.upstream.network_route import make_network_route

NAME = "mcp.corp.test"
"""A name that only the proxy can resolve."""


@dataclass
class Proxy:
    """A real proxy on loopback: CONNECT, and plain requests with a whole address.

    :param places: the port on this machine of each host and port
    :param password: the required credentials of the form ``user:password``; empty for none
    """

    places: dict[str, int]
    password: str = ""
    asked: list[str] = field(default_factory=list[str])
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
            self.asked.append(f"{method} {target}")
            expected = b"basic " + base64.b64encode(self.password.encode())
            if self.password and expected.lower() not in head.lower():
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            elif method == "CONNECT" and target in self.places:
                inner = await asyncio.open_connection("127.0.0.1", self.places[target])
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))
            elif method != "CONNECT":
                host = target.split("/")[2]
                inner = await asyncio.open_connection("127.0.0.1", self.places[host])
                inner[1].write(head.replace(target.encode(), b"/" + target.split("/", 3)[3].encode(), 1))
                await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))
            else:
                writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


class TlsSignInServer(StrictSignInServer):
    """The sign-in server under its name, whose addresses begin with https."""

    async def __call__(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        origin = f"https://{asked.headers['host']}"
        if asked.path == "/mcp" and asked.headers.get("authorization") != f"Bearer {self._token}":
            place = f'Bearer resource_metadata="{origin}/.well-known/oauth-protected-resource"'
            await answering.send_response(401, www_authenticate=place)
            return True
        if asked.path.startswith("/.well-known/oauth-protected-resource"):
            await say(answering, {"resource": f"{origin}/mcp", "authorization_servers": [origin]})
            return True
        if asked.path.startswith("/.well-known/oauth-authorization-server"):
            more = {"response_types_supported": ["code"], "code_challenge_methods_supported": ["S256"]}
            places = {f"{name}_endpoint": f"{origin}/{name}" for name in ("authorization", "token", "registration")}
            await say(answering, {"issuer": origin, **places, **more})
            return True
        return await super().__call__(asked, answering)


@dataclass
class CorporateNetwork:
    """A server by TLS, a proxy in front of it, and the authority that vouches for it."""

    folder: Path
    http: UpstreamHttpServer
    proxy: Proxy
    ca_file: Path
    port: int

    def write(self, table: str, url: str = "") -> tuple[config.MergedConfiguration, StateFolders]:
        (self.folder / "ws").mkdir(exist_ok=True)
        (file := self.folder / "cfg" / "handrail.toml").parent.mkdir(exist_ok=True)
        address = url or f"https://{NAME}:{self.port}/mcp"
        file.write_text(f'[mcp]\n{table}\n[mcp.servers.h]\nurl = "{address}"\n')
        return config.load_configuration(file), locate_folders(self.folder / "ws", self.folder / "state")

    async def connect(self, table: str, url: str = "") -> int | None:
        return await fetch_and_store_tool_list(*self.write(table, url), "h")


@asynccontextmanager
async def corporate_network(folder: Path, guard: StrictSignInServer | None = None) -> AsyncGenerator[CorporateNetwork]:
    made = authority(NAME)
    (ca_file := folder / "corporate.pem").write_text(made.pem)
    http = UpstreamHttpServer(any_request=guard)
    serving = await asyncio.start_server(http._serve, "127.0.0.1", 0, ssl=made.server)  # pyright: ignore[reportPrivateUsage]
    http.port = serving.sockets[0].getsockname()[1]
    proxy = Proxy({f"{NAME}:{http.port}": http.port})
    listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listening.sockets[0].getsockname()[1]
    try:
        yield CorporateNetwork(folder, http, proxy, ca_file, http.port)
    finally:
        serving.close()
        listening.close()


async def test_a_server_is_reached_through_the_proxy_and_verified_with_the_configured_authority(tmp_path: Path) -> None:
    async with corporate_network(tmp_path) as network:
        table = f'proxy = "http://127.0.0.1:{network.proxy.port}"\nca_file = "{network.ca_file}"'
        assert await network.connect(table) == 1
        assert {*network.proxy.asked} == {f"CONNECT {NAME}:{network.port}"}


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
async def test_proxy_variables_apply_only_if_the_operator_enables_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
    async with corporate_network(tmp_path) as network:
        monkeypatch.setenv(name, f"127.0.0.1:{network.proxy.port}")
        ca_file = f'ca_file = "{network.ca_file}"'
        with pytest.raises(UsageError, match="could not be resolved"):
            await network.connect(ca_file)
        assert not network.proxy.asked
        assert await network.connect(f'proxy = "environment"\n{ca_file}') == 1
        monkeypatch.setenv("NO_PROXY", ".corp.test,other.test")
        with pytest.raises(UsageError, match="could not be resolved"):
            await network.connect(f'proxy = "environment"\n{ca_file}')


async def test_every_request_of_a_sign_in_goes_through_the_proxy(tmp_path: Path) -> None:
    guard = TlsSignInServer()
    async with corporate_network(tmp_path, guard) as network:
        table = f'proxy = "http://127.0.0.1:{network.proxy.port}"\nca_file = "{network.ca_file}"'

        class OutsideBrowser(Browser):
            """A browser of the same network, whose own way to the server is not under test."""

            async def agree(self, address: str) -> str:
                return await super().agree(
                    address.replace(f"https://{NAME}:{network.port}", f"http://127.0.0.1:{plain}")
                )

        page = UpstreamHttpServer(any_request=guard)
        serving = await asyncio.start_server(page._serve, "127.0.0.1", 0)  # pyright: ignore[reportPrivateUsage]
        plain = serving.sockets[0].getsockname()[1]
        browser = OutsideBrowser()
        assert await sign_in_to_server(*network.write(table), "h", browser.open) == 1
        assert guard.grants == ["authorization_code"] and [*guard.clients] == ["c-1"]
        serving.close()


async def test_an_untrusted_certificate_error_names_the_ca_file_setting(tmp_path: Path) -> None:
    async with corporate_network(tmp_path) as network:
        with pytest.raises(UsageError, match=r"certificate cannot be trusted.*set ca_file under"):
            await network.connect(f'proxy = "http://127.0.0.1:{network.proxy.port}"')


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read"), ("", "has no certificate"), ("-----BEGIN x", "is not valid|no certificate")],
)
async def test_an_invalid_certificate_file_is_reported_with_the_reason(
    tmp_path: Path, content: str | None, why: str
) -> None:
    async with corporate_network(tmp_path) as network:
        file = tmp_path / "odd.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(HandrailError, match=why):
            await network.connect(f'ca_file = "{file}"')


async def test_a_proxy_password_comes_from_a_secret_and_is_absent_from_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with corporate_network(tmp_path) as network:
        network.proxy.password = "ann:s p@ce/1234"
        monkeypatch.setenv("CORP", f"http://ann:s%20p%40ce%2F1234@127.0.0.1:{network.proxy.port}")
        table = f'proxy = {{ secret = "CORP" }}\nca_file = "{network.ca_file}"\n[secrets.CORP]\nenv = "CORP"'
        assert await network.connect(table) == 1
        monkeypatch.setenv("CORP", f"http://ann:wrong-5678@127.0.0.1:{network.proxy.port}")
        with pytest.raises(UsageError, match="the proxy refused the connection: 407") as caught:
            await network.connect(table)
        assert "wrong-5678" not in str(caught.value)


class ElsewhereServer(TlsSignInServer):
    """A server that sends its clients to a host that its operator has not named."""

    async def __call__(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.path.startswith("/.well-known/oauth-protected-resource"):
            about = {
                "resource": f"https://{asked.headers['host']}/mcp",
                "authorization_servers": ["https://other.test"],
            }
            await say(answering, about)
            return True
        return await super().__call__(asked, answering)


async def test_a_proxy_does_not_widen_the_hosts_that_a_server_may_reach(tmp_path: Path) -> None:
    async with corporate_network(tmp_path, ElsewhereServer()) as network:
        network.proxy.places["other.test:443"] = network.port
        table = f'proxy = "http://127.0.0.1:{network.proxy.port}"\nca_file = "{network.ca_file}"'
        with pytest.raises(UsageError, match=r"other\.test"):
            await sign_in_to_server(*network.write(table), "h", Browser().open)
        assert not [one for one in network.proxy.asked if "other.test" in one]


async def test_a_server_on_this_machine_is_reached_without_the_proxy(tmp_path: Path) -> None:
    http = UpstreamHttpServer()
    serving = await asyncio.start_server(http._serve, "127.0.0.1", 0)  # pyright: ignore[reportPrivateUsage]
    http.port = serving.sockets[0].getsockname()[1]
    async with corporate_network(tmp_path) as network:
        table = f'proxy = "http://127.0.0.1:{network.proxy.port}"'
        assert await network.connect(table, http.url) == 1 and not network.proxy.asked
    serving.close()


@pytest.mark.parametrize("proxy", ["ftp://x:1", "http://", "http://x:99999", "socks5://x:1080"])
async def test_an_invalid_proxy_setting_fails_the_connection_with_a_reason(tmp_path: Path, proxy: str) -> None:
    async with corporate_network(tmp_path) as network:
        with pytest.raises(HandrailError, match="is not an HTTP proxy"):
            await network.connect(f'proxy = "{proxy}"')


@pytest.mark.parametrize(
    ("entry", "host", "port", "is_direct"),
    [
        ("corp.test", "corp.test", 443, True),
        ("corp.test", "mcp.corp.test", 443, True),
        (".corp.test", "mcp.corp.test", 443, True),
        ("*.corp.test", "mcp.corp.test", 443, True),
        ("CORP.test", "mcp.corp.TEST", 443, True),
        ("corp.test", "notcorp.test", 443, False),
        ("corp.test:8443", "corp.test", 8443, True),
        ("corp.test:8443", "corp.test", 443, False),
        ("*", "anything.test", 443, True),
        ("10.0.0.0/8", "10.1.2.3", 443, True),
        ("10.0.0.0/8", "11.1.2.3", 443, False),
        ("10.1.2.3", "10.1.2.3", 443, True),
        ("[fd00::1]:443", "fd00::1", 443, True),
        ("fd00::/8", "fd00::1", 443, True),
        ("", "corp.test", 443, False),
        (".", "corp.test", 443, False),
    ],
)
def test_no_proxy_entries_match_as_in_other_programs(entry: str, host: str, port: int, is_direct: bool) -> None:
    for settings, environment in (
        (McpSettings(proxy="http://p.test:3128", no_proxy=(entry,)), {}),
        (McpSettings(proxy="environment"), {"HTTPS_PROXY": "p.test:3128", "NO_PROXY": f"a.test, {entry},b.test"}),
    ):
        route = make_network_route(settings, SecretStore(), environment=environment)
        assert (route.find_proxy("https", host, port) == "") is is_direct
