"""Reports about sign-ins: changing ports, lost registrations, concurrent refreshes, and waits."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.field.sign_in_server import Browser, StrictSignInServer
from tests.kernel.test_joined import second
from tests.upstream.scripted_mcp_servers import UpstreamHttpServer, approve_server_tools, run_upstream_http_server

from handrail import ToolError, UsageError, config
from handrail.kernel.upstream_mcp_servers import sign_in_to_server
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.oauth_sign_in import SignInPrompt

PROCESS = """
import asyncio, json, sys
from pathlib import Path
import httpx2
from handrail.upstream.oauth_sign_in import UpstreamSignIn
from handrail.upstream.server_definition import ServerDefinition

async def main(url, state):
    async with httpx2.AsyncClient(auth=UpstreamSignIn(ServerDefinition("h", "", "http", url=url), Path(state))) as client:
        answer = await client.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "server/discover"})
        print(answer.status_code)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass
class SignInFixture:
    """A server that requires a sign-in, and an operator who has configured it."""

    folder: Path
    http: UpstreamHttpServer
    guard: StrictSignInServer
    browser: Browser = field(default_factory=Browser)
    oauth: str = ""
    connection: str = ""
    secrets: str = ""

    @property
    def settings(self) -> str:
        return f'{self.secrets}[mcp.servers.h]\nurl = "{self.http.url}"\n{self.connection}\n' + (
            f"[mcp.servers.h.oauth]\n{self.oauth}\n" if self.oauth else ""
        )

    async def sign_in(self) -> int:
        """Run ``handrail mcp login h``."""
        (file := self.folder / "config" / "handrail.toml").parent.mkdir(exist_ok=True)
        (self.folder / "ws").mkdir(exist_ok=True)
        file.write_text(self.settings)
        folders = locate_folders(self.folder / "ws", self.folder / "state")
        return await sign_in_to_server(config.load_configuration(file), folders, "h", self.browser.open)

    @property
    def ports(self) -> list[int | None]:
        return [urlsplit(parse_qs(urlsplit(one).query)["redirect_uri"][0]).port for one in self.browser.shown]


@asynccontextmanager
async def bench(folder: Path) -> AsyncGenerator[SignInFixture]:
    guard = StrictSignInServer()
    async with run_upstream_http_server(any_request=guard) as http:
        yield SignInFixture(folder, http, guard)


async def test_a_new_sign_in_uses_the_port_of_the_registration(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        for _ in range(3):
            assert await it.sign_in() == 1
            it.guard.expire_token()
            it.guard._refresh = ""  # pyright: ignore[reportPrivateUsage] - the whole sign-in has ended
        assert len(set(it.ports)) == 1 and len(it.ports) == 3 and [*it.guard.clients] == ["c-1"]


async def test_an_occupied_callback_port_leads_to_a_new_registration(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        it.guard.expire_token()
        it.guard._refresh = ""  # pyright: ignore[reportPrivateUsage]
        (port,) = it.ports
        with socket.create_server(("127.0.0.1", port or 0)):
            assert await it.sign_in() == 1
        assert [*it.guard.clients] == ["c-1", "c-2"] and it.ports[1] != port


async def test_callback_port_and_host_can_be_configured(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        async with bench(tmp_path) as it:
            it.oauth = f'callback_port = {port}\ncallback_host = "localhost"'
            with pytest.raises(UsageError, match=f"Port {port} for the return of the browser cannot be used"):
                await it.sign_in()
            held.close()
            assert await it.sign_in() == 1
            assert it.guard.clients == {"c-1": [f"http://localhost:{port}/callback"]}
            assert it.browser.returned[0].startswith(f"http://localhost:{port}/callback?code=")


UNKNOWN = [
    (401, {"error": "invalid_client"}),
    (400, {"error": "invalid_client", "error_description": "Client not found"}),
    (400, {"error": "unauthorized_client"}),
    (400, {"error": "invalid_request", "error_description": "Client ID 'c-1' not found"}),
    (403, {"error": "access_denied", "message": "Unknown client"}),
]


@pytest.mark.parametrize("unknown", UNKNOWN, ids=str)
async def test_a_registration_that_the_server_dropped_is_renewed_once(
    tmp_path: Path, unknown: tuple[int, dict[str, str]]
) -> None:
    async with bench(tmp_path) as it:
        it.guard.unknown_client = unknown
        assert await it.sign_in() == 1
        it.guard.drop_clients()
        assert await it.sign_in() == 1
        assert [*it.guard.clients] == ["c-2"] and len(it.browser.shown) == 2, "the user saw no page of an error"
        assert it.guard.grants == ["authorization_code"] * 2


async def test_a_lost_registration_reported_only_in_the_redirect_is_renewed_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        it.guard.drop_clients()
        it.guard.redirect_error = "unauthorized_client"
        assert await it.sign_in() == 1
        assert [*it.guard.clients] == ["c-2"]


async def test_a_configured_client_id_is_never_replaced_by_a_registration(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.redirect_error = "unauthorized_client"
        it.oauth = 'client_id = "mine"'
        with pytest.raises(UsageError, match="does not know this client"):
            await it.sign_in()
        assert not it.guard.clients and len(it.browser.shown) == 1


async def test_a_gateway_without_a_user_registers_no_client(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, temporary_kernel(tmp_path) as kernel:
        with pytest.raises(ToolError, match="handrail mcp login h"):
            async with kernel.mcp_servers.connect("h", url=it.http.url):
                pass
        assert not it.guard.clients


async def test_two_processes_that_need_a_new_token_refresh_it_only_once(tmp_path: Path) -> None:
    """The server accepts each refresh token once, and ends the sign-in if one comes again."""
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        for _ in range(3):
            it.guard.expire_token()
            it.guard.awaited = 2
            it.guard._together.clear()  # pyright: ignore[reportPrivateUsage]
            it.guard._waiting = 0  # pyright: ignore[reportPrivateUsage]
            words = [sys.executable, "-c", PROCESS, it.http.url, str(tmp_path / "state")]
            running = [await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE) for _ in range(2)]
            answers = [(await one.communicate())[0].decode().strip() for one in running]
            assert answers == ["400", "400"], "both were let in; the server then has no session"
        assert it.guard.grants == ["authorization_code", *["refresh_token"] * 3] and not it.guard.refused


async def test_a_gateway_reads_the_token_that_another_process_has_refreshed(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        async with temporary_kernel(tmp_path, settings=it.settings, rules=["allow mcp:h:*"]) as kernel:
            await approve_server_tools(kernel, "h")
            session = await kernel.session()
            it.guard.expire_token()
            words = [sys.executable, "-c", PROCESS, it.http.url, str(tmp_path / "state")]
            other = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            assert (await other.communicate())[0] == b"400\n"
            assert (await session.call("h_echo", {"text": "x"})).ok
        assert it.guard.grants == ["authorization_code", "refresh_token"] and not it.guard.refused


async def test_a_running_gateway_continues_immediately_after_a_sign_in_elsewhere(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as it,
        temporary_kernel(tmp_path, settings=it.settings, rules=["allow mcp:h:*"]) as kernel,
    ):
        upstream = kernel.components.upstreams["h"]
        upstream.backoff_s = (3600.0,)  # no attempt of its own follows within the test
        with pytest.raises(ToolError, match="handrail mcp login h"):
            await upstream.ensure_connected()
        with pytest.raises(ToolError, match="next attempt in"):
            await upstream.ensure_connected()
        assert await it.sign_in() == 1
        await approve_server_tools(kernel, "h")
        session = await kernel.session()
        assert (await session.call("h_echo", {"text": "x"})).ok
        it.guard.expire_token()  # and while it is connected
        it.guard._refresh = ""  # pyright: ignore[reportPrivateUsage]
        assert "handrail mcp login h" in str((await session.call("h_echo", {"text": "x"})).error_text)
        assert await it.sign_in() == 1
        assert (await session.call("h_echo", {"text": "x"})).ok


async def test_a_joined_process_asks_its_own_user_to_sign_in(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, temporary_kernel(tmp_path), second(tmp_path) as joined:
        prompt = SignInPrompt("http://127.0.0.1:9/callback", it.browser.agree)
        async with joined.mcp_servers.connect("h", url=it.http.url, prompt=prompt) as connected:
            assert [*connected.tool_availability] == ["h_echo"] and it.guard.grants == ["authorization_code"]
        assert len(it.browser.shown) == 1
        (kept,) = (tmp_path / "state" / "mcp" / "tokens").iterdir()
        assert json.loads(kept.read_text())["tokens"]["access_token"] == "token-1"


async def test_a_sign_in_rejected_by_the_user_is_an_error_in_the_joined_process(tmp_path: Path) -> None:
    async def refuse(address: str) -> str:
        state = parse_qs(urlsplit(address).query)["state"][0]
        return f"http://127.0.0.1:9/callback?error=access_denied&state={state}"

    async with bench(tmp_path) as it, temporary_kernel(tmp_path), second(tmp_path) as joined:
        with pytest.raises(ToolError, match="the sign-in was rejected: access_denied"):
            async with joined.mcp_servers.connect(
                "h", url=it.http.url, prompt=SignInPrompt("http://127.0.0.1:9/callback", refuse)
            ):
                pass
