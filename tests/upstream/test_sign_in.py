"""Sign-in at MCP servers: by the user, with stored tokens, and the hosts that receive a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from tests.upstream.scripted_mcp_servers import (
    HttpResponseWriter,
    ReceivedHttpRequest,
    approve_server_tools,
    run_upstream_http_server,
)

from handrail import Result, ToolError, config
from handrail.kernel.upstream_mcp_servers import delete_server_tokens, sign_in_to_server
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.identity_assertion import ID_JAG, IdentityAssertionSignIn
from handrail.upstream.oauth_sign_in import OauthTokenStore, SignInPrompt
from handrail.upstream.server_definition import ServerDefinition


def text_of(result: Result) -> str:
    assert result.ok, result.error_text
    return str(result.data)


class SignInServer:
    """A server with its own authorization server, by OAuth's metadata, registration, codes and refreshing."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret
        self.tokens = 0
        self.grants: list[str] = []

    async def __call__(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        path = urlsplit(asked.path).path
        origin = f"http://{asked.headers['host']}"
        if path == "/mcp":
            if asked.headers.get("authorization") == f"Bearer token-{self.tokens}{self.secret}" and self.tokens:
                return False
            place = f'Bearer resource_metadata="{origin}/.well-known/oauth-protected-resource"'
            await answering.send_response(401, www_authenticate=place)
        elif path == "/.well-known/oauth-protected-resource":
            await self.say(answering, {"resource": f"{origin}/mcp", "authorization_servers": [origin]})
        elif path.startswith("/.well-known/oauth-authorization-server"):
            more = {"response_types_supported": ["code"], "code_challenge_methods_supported": ["S256"]}
            places = {f"{name}_endpoint": f"{origin}/{name}" for name in ("authorization", "token", "registration")}
            await self.say(answering, {"issuer": origin, **places, **more})
        elif path == "/registration":
            await self.say(answering, {**asked.body, "client_id": "c-1"}, 201)
        elif path == "/token":
            form = parse_qs(asked.body)
            self.grants.append(form["grant_type"][0])
            self.tokens += 1
            token = {"access_token": f"token-{self.tokens}{self.secret}", "token_type": "Bearer", "expires_in": 3600}
            await self.say(answering, {**token, "refresh_token": f"again{self.secret}"})
        else:
            await answering.send_response(404)
        return True

    @staticmethod
    async def say(answering: HttpResponseWriter, what: dict[str, Any], status: int = 200) -> None:
        await answering.send_response(status, json.dumps(what).encode())


async def test_a_user_signs_in_once_and_the_stored_token_is_refreshed_when_refused(
    tmp_path: Path,
) -> None:
    visited: list[str] = []

    async def visit(address: str) -> str:
        visited.append(address)
        asked = parse_qs(urlsplit(address).query)
        return f"{asked['redirect_uri'][0]}?code=c&state={asked['state'][0]}"

    prompt, guard = SignInPrompt("http://127.0.0.1:9/callback", visit), SignInServer()
    async with (
        run_upstream_http_server(any_request=guard) as http,
        temporary_kernel(tmp_path, rules=["allow mcp:h:*"]) as kernel,
    ):
        with pytest.raises(ToolError, match="handrail mcp login h"):
            async with kernel.mcp_servers.connect("h", url=http.url):
                pass
        async with kernel.mcp_servers.connect("h", url=http.url, prompt=prompt) as connected:
            await connected.approve_tool_definitions()
            session = await kernel.session()
            assert text_of(await session.call("h_echo", {"text": "x"})) == "x" and len(visited) == 1
            (kept,) = (kernel.components.store.folders.state / "mcp" / "tokens").iterdir()
            assert os.stat(kept).st_mode & 0o777 == 0o600
            guard.tokens += 1  # the token that it has is refused from now on
            assert text_of(await session.call("h_echo", {"text": "y"})) == "y"
            assert guard.grants == ["authorization_code", "refresh_token"] and len(visited) == 1
        async with kernel.mcp_servers.connect("h", url=http.url):
            assert len(visited) == 1


async def test_an_access_token_that_a_server_echoes_is_kept_only_in_the_token_store(
    tmp_path: Path,
) -> None:
    async def visit(address: str) -> str:
        asked = parse_qs(urlsplit(address).query)
        return f"{asked['redirect_uri'][0]}?code=c&state={asked['state'][0]}"

    async def tells(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        text = f"{asked.headers['authorization']} and again{guard.secret}"
        await answering.result(asked, {"content": [{"type": "text", "text": text}]})
        return True

    prompt, guard = SignInPrompt("http://127.0.0.1:9/callback", visit), SignInServer("-of-many-letters")
    async with run_upstream_http_server(any_request=guard) as http:
        for signs_in in (prompt, None):  # the second time by what was kept
            async with (
                temporary_kernel(tmp_path, rules=["allow mcp:h:*"]) as kernel,
                kernel.mcp_servers.connect("h", url=http.url, prompt=signs_in) as connected,
            ):
                await connected.approve_tool_definitions()
                http.replies.append(tells)
                result = await (await kernel.session()).call("h_echo", {"text": "x"})
                assert result.ok and guard.secret not in str(result) and "[secret" in text_of(result).lower()
                if signs_in is None:
                    continue
                guard.tokens += 1  # and after it was refreshed
                http.replies.append(tells)
                assert guard.secret not in str(await (await kernel.session()).call("h_echo", {"text": "y"}))
    assert guard.grants == ["authorization_code", "refresh_token"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent.name for path in files if guard.secret.encode() in path.read_bytes()] == ["tokens"]


async def test_a_kernel_uses_the_token_of_a_sign_in_from_the_command_line(tmp_path: Path) -> None:
    guard = SignInServer()
    async with run_upstream_http_server(any_request=guard) as http:
        file = tmp_path / "config" / "handrail.toml"
        file.parent.mkdir()
        (tmp_path / "ws").mkdir()
        settings = f'[mcp.servers.h]\nurl = "{http.url}"\n'
        file.write_text(settings)
        folders = locate_folders(tmp_path / "ws", tmp_path / "state")
        visits: set[asyncio.Task[None]] = set()

        def browser(address: str) -> None:
            visits.add(asyncio.create_task(_agrees(address)))

        assert await sign_in_to_server(config.load_configuration(file), folders, "h", browser) == 1
        await asyncio.gather(*visits)
        async with temporary_kernel(tmp_path, settings=settings, rules=["allow mcp:h:*"]) as kernel:
            await approve_server_tools(kernel, "h")
            assert text_of(await (await kernel.session()).call("h_echo", {"text": "x"})) == "x"
        assert guard.grants == ["authorization_code"]
        assert delete_server_tokens(config.load_configuration(file), folders, "h") and not delete_server_tokens(
            config.load_configuration(file), folders, "h"
        )


async def _agrees(address: str) -> None:
    """Follow the redirect, as a browser does."""
    asked = parse_qs(urlsplit(address).query)
    back = urlsplit(asked["redirect_uri"][0])
    reader, writer = await asyncio.open_connection(back.hostname, back.port)
    writer.write(f"GET {back.path}?code=c&state={asked['state'][0]} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert b"You are signed in" in await reader.read()
    writer.close()


class SeparateIssuer(SignInServer):
    """A server that names an authorization server elsewhere.

    :param elsewhere: its origin
    """

    def __init__(self, elsewhere: str, issued: SignInServer) -> None:
        super().__init__()
        self.elsewhere = elsewhere
        self.issued = issued
        self.told: list[str] = []

    async def __call__(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        path = urlsplit(asked.path).path
        self.tokens = self.issued.tokens
        if path == "/.well-known/oauth-protected-resource":
            about = {"resource": f"http://{asked.headers['host']}/mcp", "authorization_servers": [self.elsewhere]}
            await self.say(answering, about)
            return True
        if path != "/mcp":
            self.told.append(path)
            await answering.send_response(404)
            return True
        return await super().__call__(asked, answering)


def origin_of(url: str) -> str:
    return f"http://{urlsplit(url).netloc}"


async def agreed(address: str) -> str:
    asked = parse_qs(urlsplit(address).query)
    return f"{asked['redirect_uri'][0]}?code=c&state={asked['state'][0]}"


async def test_a_refresh_token_is_sent_only_to_its_issuer_even_after_a_restart(tmp_path: Path) -> None:
    issuer = SignInServer()
    async with run_upstream_http_server(any_request=issuer) as other:
        server = SeparateIssuer(origin_of(other.url), issuer)
        async with run_upstream_http_server(any_request=server) as http, temporary_kernel(tmp_path) as kernel:
            settings: dict[str, Any] = {"url": http.url, "hosts": [urlsplit(other.url).netloc]}
            prompt = SignInPrompt("http://127.0.0.1:9/callback", agreed)
            async with kernel.mcp_servers.connect("h", prompt=prompt, **settings):
                assert issuer.grants == ["authorization_code"]
            issuer.tokens += 1  # what it was given is refused from now on
            async with kernel.mcp_servers.connect("h", **settings):
                assert issuer.grants == ["authorization_code", "refresh_token"]
            assert "/token" not in server.told


async def test_a_configured_client_id_is_used_only_at_the_trusted_authorisation_server(
    tmp_path: Path,
) -> None:
    issuer, visited = SignInServer(), list[str]()

    async def visit(address: str) -> str:
        visited.append(address)
        return await agreed(address)

    async with (
        run_upstream_http_server(any_request=issuer) as other,
        run_upstream_http_server(any_request=SeparateIssuer(origin_of(other.url), issuer)) as http,
        temporary_kernel(tmp_path) as kernel,
    ):
        prompt = SignInPrompt("http://127.0.0.1:9/callback", visit)
        settings: dict[str, Any] = {"url": http.url, "hosts": [urlsplit(other.url).netloc], "prompt": prompt}
        oauth = {"client_id": "ours", "issuer": "https://auth.example.org"}
        with pytest.raises(ToolError, match=r"https://auth\.example\.org is configured"):
            async with kernel.mcp_servers.connect("h", oauth=oauth, **settings):
                pass
        assert not visited
        async with kernel.mcp_servers.connect("h", oauth={**oauth, "issuer": origin_of(other.url)}, **settings):
            assert parse_qs(urlsplit(visited[0]).query)["client_id"] == ["ours"]


@pytest.mark.parametrize("exchange", ["https://idp.example/token", "https://IDP.example:443/token"])
async def test_an_identity_assertion_goes_to_the_authorization_server_only(tmp_path: Path, exchange: str) -> None:
    at = "https://as.example"
    answers = {
        "https://mcp.example/.well-known/oauth-protected-resource/mcp": {
            "resource": "https://mcp.example/mcp",
            "authorization_servers": [at],
        },
        f"{at}/.well-known/oauth-authorization-server": {
            "issuer": at,
            "authorization_endpoint": f"{at}/authorize",
            "token_endpoint": f"{at}/token",
            "response_types_supported": ["code"],
        },
        "https://idp.example/token": {"access_token": "voucher", "token_type": "Bearer", "issued_token_type": ID_JAG},
        f"{at}/token": {"access_token": "token-of-the-server", "token_type": "Bearer"},
    }
    store = OauthTokenStore(ServerDefinition("h", "here", "http", url="https://mcp.example/mcp"), tmp_path)
    sign_in = IdentityAssertionSignIn(
        "https://mcp.example/mcp",
        store,
        client_id="c",
        client_secret="sesame-1234",
        id_token="of-the-user",
        identity_client_id="i",
        exchange=exchange,
    )
    request = httpx2.Request("POST", "https://mcp.example/mcp")
    flow = sign_in.async_auth_flow(request)
    sent = await anext(flow)
    with contextlib.suppress(StopAsyncIteration):
        while True:
            answer = answers.get(str(sent.url))
            status = 200 if answer is not None or "authorization" in sent.headers else 401
            sent = await flow.asend(httpx2.Response(status, json=answer, request=sent))
    assert (
        request.headers["authorization"] == "Bearer token-of-the-server" and store.access_token == "token-of-the-server"
    )
