"""Upstream servers over HTTP: gone, forgetful, slow, oversized, asking on streams, and asking who comes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from handrail import Result, ToolError, config
from handrail.contract.session import Session
from handrail.holding import HeldKernel
from handrail.registry.sources.mcp.oauth import Prompt
from handrail.signing_in import sign_in, sign_out
from handrail.store.folders import locate
from handrail.testing.kernels import ScriptedPeer, temporary_kernel
from handrail.testing.upstreams import Answering, Asked, HttpServer, approved, http_server, listed

Opened = tuple[HeldKernel, Session, HttpServer]
Opens = Callable[..., AbstractAsyncContextManager[Opened]]


@pytest.fixture
def opened(tmp_path: Path) -> Opens:
    @asynccontextmanager
    async def opens(
        server: dict[str, Any] | None = None, *, session: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncGenerator[Opened]:
        async with (
            http_server(**(server or {})) as http,
            temporary_kernel(tmp_path, rules=["allow mcp:h:*"]) as kernel,
            kernel.mcp.connect("h", url=http.url, **settings) as connected,
        ):
            await connected.approve()
            yield kernel, await kernel.session(**(session or {})), http

    return opens


def text_of(result: Result) -> str:
    assert result.ok, result.error_text
    return str(result.data)


def state_of(kernel: HeldKernel) -> str:
    return kernel.rooms.upstreams["h"].state


@pytest.mark.proves("F-04")
async def test_its_tools_are_called_in_one_session_with_the_fields_that_were_configured(opened: Opens) -> None:
    async with opened(headers={"X-Team": "blue"}) as (_, session, http):
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x"
        assert text_of(await session.call("h_echo", {"text": "y"})) == "y"
        calls = [one for one in http.asked if one.rpc == "tools/call"]
        assert {one.headers["mcp-session-id"] for one in calls} == {"session-1"}
        assert all(one.headers["x-team"] == "blue" for one in http.asked)
        assert all(one.headers["mcp-protocol-version"] == "2025-11-25" for one in calls)
    assert http.asked[-1].method == "DELETE" and not http.sessions


async def test_a_gateway_that_times_out_fails_one_call_by_name_and_the_next_goes_on(opened: Opens) -> None:
    async def late(asked: Asked, answering: Answering) -> bool:
        await answering.send(504, b"<html>gateway", "text/html")
        return True

    async with opened() as (kernel, session, http):
        http.replies.append(late)
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "failed" and "504" in str(result.error_text)
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x" and state_of(kernel) == "connected"


async def test_a_session_that_was_forgotten_is_begun_anew_once_and_the_call_that_was_refused_is_made_again(
    opened: Opens,
) -> None:
    async with opened() as (_, session, http):
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x"
        http.forget()
        assert text_of(await session.call("h_echo", {"text": "again"})) == "again"
        assert [one.rpc for one in http.asked].count("initialize") == 2


async def test_a_server_that_forgets_every_session_is_given_up_until_the_next_attempt(opened: Opens) -> None:
    async def forget(asked: Asked, answering: Answering) -> bool:
        if asked.rpc == "tools/call":
            await answering.send(404)
        return asked.rpc == "tools/call"

    async with opened() as (_, session, http):
        http.any_request = forget
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "unavailable" and "forgotten" in str(result.error_text)
        assert [one.rpc for one in http.asked].count("initialize") <= 3


async def test_one_that_is_gone_is_unavailable_with_the_time_of_the_next_attempt(opened: Opens) -> None:
    async with opened() as (kernel, session, http):
        kernel.rooms.upstreams["h"].backoff_s = (60,)
        http.port_closed()
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "unavailable" and "cannot be reached" in str(result.error_text)
        while state_of(kernel) != "waiting":
            await asyncio.sleep(0.01)
        result = await session.call("h_echo", {"text": "x"})
        assert "next attempt in" in str(result.error_text)


async def test_a_tool_that_hangs_holds_up_nobody(opened: Opens) -> None:
    asked_for, let_go = asyncio.Event(), asyncio.Event()

    async def hang(asked: Asked, answering: Answering) -> bool:
        asked_for.set()
        await let_go.wait()
        return False

    async with opened() as (_, session, http):
        http.replies.append(hang)
        hanging = asyncio.create_task(session.call("h_echo", {"text": "slow"}))
        await asked_for.wait()
        assert text_of(await session.call("h_echo", {"text": "quick"})) == "quick"
        let_go.set()
        assert text_of(await hanging) == "slow"


async def test_a_cancelled_call_tells_the_server(opened: Opens) -> None:
    let_go = asyncio.Event()

    async def hang(asked: Asked, answering: Answering) -> bool:
        await let_go.wait()
        return False

    async with opened(timeout_ms=200) as (_, session, http):
        http.replies.append(hang)
        assert (await session.call("h_echo", {"text": "slow"})).error_kind == "timeout"
        while not [one for one in http.asked if one.rpc == "notifications/cancelled"]:
            await asyncio.sleep(0.01)
        let_go.set()
        (call,) = (one for one in http.asked if one.rpc == "tools/call")
        (told,) = (one for one in http.asked if one.rpc == "notifications/cancelled")
        assert told.body["params"]["requestId"] == call.body["id"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_without_end_is_cut_off(opened: Opens, streamed: bool) -> None:
    async def endless(asked: Asked, answering: Answering) -> bool:
        if streamed:
            await answering.stream()
            await answering.raw(b"data: ")
        else:
            await answering.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        while True:
            await answering.raw(b"x" * 2**20)

    async with opened() as (_, session, http):
        http.replies.append(endless)
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "limit" and "16 MiB" in str(result.error_text)
        assert text_of(await session.call("h_echo", {"text": "x"})) == "x"


async def test_a_stream_that_breaks_off_is_taken_up_again_where_it_was(opened: Opens) -> None:
    waiting: list[Any] = []

    async def breaks(asked: Asked, answering: Answering) -> bool:
        waiting.append(asked.body["id"])
        await answering.stream()
        await answering.event("", id="e-1", retry=10)
        return True

    async def again(asked: Asked, answering: Answering) -> bool:
        if asked.method != "GET" or asked.headers.get("last-event-id") != "e-1":
            return False
        result = {"content": [{"type": "text", "text": "after all"}]}
        await answering.stream()
        await answering.event({"jsonrpc": "2.0", "id": waiting[0], "result": result}, id="e-2")
        return True

    async with opened() as (_, session, http):
        http.replies.append(breaks)
        http.any_request = again
        assert text_of(await session.call("h_echo", {"text": "x"})) == "after all"


async def test_what_it_asks_on_the_stream_of_a_call_goes_to_the_client_of_that_call(opened: Opens) -> None:
    both, answers = asyncio.Barrier(2), dict[str, asyncio.Future[Any]]()
    form = {"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}

    async def asks(asked: Asked, answering: Answering) -> bool:
        mine = asked.body["params"]["arguments"]["text"]
        answers[mine] = asyncio.get_running_loop().create_future()
        await both.wait()
        await answering.stream()
        await answering.event({"jsonrpc": "2.0", "id": mine, "method": "elicitation/create", "params": form})
        said = (await answers[mine])["content"]["name"]
        result = {"content": [{"type": "text", "text": f"{mine} is {said}"}]}
        await answering.event({"jsonrpc": "2.0", "id": asked.body["id"], "result": result})
        return True

    async def answered(asked: Asked, answering: Answering) -> bool:
        if asked.body and "result" in asked.body:
            answers[asked.body["id"]].set_result(asked.body["result"])
        return False

    def person(name: str) -> dict[str, Any]:
        return {"peer": ScriptedPeer([{"it": {"action": "accept", "content": {"name": name}}}])}

    async with opened(session=person("Ada"), elicitation=True) as (kernel, ada, http):
        grace = await kernel.session(**person("Grace"))
        http.replies.extend([asks, asks])
        http.any_request = answered
        one, other = await asyncio.gather(ada.call("h_echo", {"text": "a"}), grace.call("h_echo", {"text": "b"}))
        assert (text_of(one), text_of(other)) == ("a is Ada", "b is Grace")


async def test_nothing_leads_to_a_server_that_was_not_granted(opened: Opens) -> None:
    async with http_server() as elsewhere:

        async def away(asked: Asked, answering: Answering) -> bool:
            await answering.send(307, location=elsewhere.url)
            return True

        async def sign_in(asked: Asked, answering: Answering) -> bool:
            await answering.send(401, www_authenticate=f'Bearer resource_metadata="{elsewhere.url}"')
            return True

        async with opened() as (_, session, http):
            http.replies.extend([away, sign_in])
            assert "redirects elsewhere" in str((await session.call("h_echo", {"text": "x"})).error_text)
            refused = await session.call("h_echo", {"text": "x"})
            assert not refused.ok and "not among the hosts" in str(refused.error_text)
        assert not elsewhere.asked


class SignInServer:
    """A server with its own authorization server, by OAuth's metadata, registration, codes and refreshing."""

    def __init__(self) -> None:
        self.tokens = 0
        self.grants: list[str] = []

    async def __call__(self, asked: Asked, answering: Answering) -> bool:
        path = urlsplit(asked.path).path
        origin = f"http://{asked.headers['host']}"
        if path == "/mcp":
            if asked.headers.get("authorization") == f"Bearer token-{self.tokens}" and self.tokens:
                return False
            place = f'Bearer resource_metadata="{origin}/.well-known/oauth-protected-resource"'
            await answering.send(401, www_authenticate=place)
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
            token = {"access_token": f"token-{self.tokens}", "token_type": "Bearer", "expires_in": 3600}
            await self.say(answering, {**token, "refresh_token": "again"})
        else:
            await answering.send(404)
        return True

    @staticmethod
    async def say(answering: Answering, what: dict[str, Any], status: int = 200) -> None:
        await answering.send(status, json.dumps(what).encode())


async def test_a_person_signs_in_once_the_token_is_kept_for_this_user_alone_and_refreshed_once_when_refused(
    tmp_path: Path,
) -> None:
    visited: list[str] = []

    async def visit(address: str) -> str:
        visited.append(address)
        asked = parse_qs(urlsplit(address).query)
        return f"{asked['redirect_uri'][0]}?code=c&state={asked['state'][0]}"

    prompt, guard = Prompt("http://127.0.0.1:9/callback", visit), SignInServer()
    async with http_server(any_request=guard) as http, temporary_kernel(tmp_path, rules=["allow mcp:h:*"]) as kernel:
        with pytest.raises(ToolError, match="handrail mcp login h"):
            async with kernel.mcp.connect("h", url=http.url):
                pass
        async with kernel.mcp.connect("h", url=http.url, prompt=prompt) as connected:
            await connected.approve()
            session = await kernel.session()
            assert text_of(await session.call("h_echo", {"text": "x"})) == "x" and len(visited) == 1
            (kept,) = (kernel.rooms.store.folders.state / "mcp" / "tokens").iterdir()
            assert os.stat(kept).st_mode & 0o777 == 0o600
            guard.tokens += 1  # the token that it has is refused from now on
            assert text_of(await session.call("h_echo", {"text": "y"})) == "y"
            assert guard.grants == ["authorization_code", "refresh_token"] and len(visited) == 1
        async with kernel.mcp.connect("h", url=http.url):
            assert len(visited) == 1


def test_a_tool_that_marks_arguments_for_header_fields_has_them_there() -> None:
    from handrail.registry.sources.mcp.definition import ServerDefinition
    from handrail.registry.sources.mcp.tools import McpTool

    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    definition = ServerDefinition("h", "here", "http", url="http://127.0.0.1:1/mcp")
    tool = McpTool(listed("echo") | {"inputSchema": schema}, None, definition, definition.requires)
    assert tool.header_fields({"region": "north", "other": 1}) == {"mcp-param-Region": "north"}


async def test_signing_in_from_the_command_line_leaves_a_token_that_a_kernel_then_uses(tmp_path: Path) -> None:
    guard = SignInServer()
    async with http_server(any_request=guard) as http:
        file = tmp_path / "config" / "handrail.toml"
        file.parent.mkdir()
        (tmp_path / "ws").mkdir()
        settings = f'[mcp.servers.h]\nurl = "{http.url}"\n'
        file.write_text(settings)
        folders = locate(tmp_path / "ws", tmp_path / "state")
        visits: set[asyncio.Task[None]] = set()

        def browser(address: str) -> None:
            visits.add(asyncio.create_task(_agrees(address)))

        assert await sign_in(config.load(file), folders, "h", browser) == 1
        await asyncio.gather(*visits)
        async with temporary_kernel(tmp_path, settings=settings, rules=["allow mcp:h:*"]) as kernel:
            await approved(kernel, "h")
            assert text_of(await (await kernel.session()).call("h_echo", {"text": "x"})) == "x"
        assert guard.grants == ["authorization_code"]
        assert sign_out(config.load(file), folders, "h") and not sign_out(config.load(file), folders, "h")


async def _agrees(address: str) -> None:
    """What a browser does: it goes where it is sent back to."""
    asked = parse_qs(urlsplit(address).query)
    back = urlsplit(asked["redirect_uri"][0])
    reader, writer = await asyncio.open_connection(back.hostname, back.port)
    writer.write(f"GET {back.path}?code=c&state={asked['state'][0]} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert b"You are signed in" in await reader.read()
    writer.close()


class Apart(SignInServer):
    """A server that names an authorization server elsewhere.

    :param elsewhere: its origin
    """

    def __init__(self, elsewhere: str, issued: SignInServer) -> None:
        super().__init__()
        self.elsewhere = elsewhere
        self.issued = issued
        self.told: list[str] = []

    async def __call__(self, asked: Asked, answering: Answering) -> bool:
        path = urlsplit(asked.path).path
        self.tokens = self.issued.tokens
        if path == "/.well-known/oauth-protected-resource":
            about = {"resource": f"http://{asked.headers['host']}/mcp", "authorization_servers": [self.elsewhere]}
            await self.say(answering, about)
            return True
        if path != "/mcp":
            self.told.append(path)
            await answering.send(404)
            return True
        return await super().__call__(asked, answering)


def origin_of(url: str) -> str:
    return f"http://{urlsplit(url).netloc}"


async def agreed(address: str) -> str:
    asked = parse_qs(urlsplit(address).query)
    return f"{asked['redirect_uri'][0]}?code=c&state={asked['state'][0]}"


async def test_what_refreshes_a_token_goes_to_nobody_but_who_gave_it_also_after_a_new_start(tmp_path: Path) -> None:
    issuer = SignInServer()
    async with http_server(any_request=issuer) as other:
        server = Apart(origin_of(other.url), issuer)
        async with http_server(any_request=server) as http, temporary_kernel(tmp_path) as kernel:
            settings: dict[str, Any] = {"url": http.url, "hosts": [urlsplit(other.url).netloc]}
            prompt = Prompt("http://127.0.0.1:9/callback", agreed)
            async with kernel.mcp.connect("h", prompt=prompt, **settings):
                assert issuer.grants == ["authorization_code"]
            issuer.tokens += 1  # what it was given is refused from now on
            async with kernel.mcp.connect("h", **settings):
                assert issuer.grants == ["authorization_code", "refresh_token"]
            assert "/token" not in server.told


async def test_a_client_with_an_id_signs_in_as_that_and_at_the_authorization_server_that_its_operator_trusts(
    tmp_path: Path,
) -> None:
    issuer, visited = SignInServer(), list[str]()

    async def visit(address: str) -> str:
        visited.append(address)
        return await agreed(address)

    async with (
        http_server(any_request=issuer) as other,
        http_server(any_request=Apart(origin_of(other.url), issuer)) as http,
        temporary_kernel(tmp_path) as kernel,
    ):
        prompt = Prompt("http://127.0.0.1:9/callback", visit)
        settings: dict[str, Any] = {"url": http.url, "hosts": [urlsplit(other.url).netloc], "prompt": prompt}
        oauth = {"client_id": "ours", "issuer": "https://auth.example.org"}
        with pytest.raises(ToolError, match=r"https://auth\.example\.org is configured"):
            async with kernel.mcp.connect("h", oauth=oauth, **settings):
                pass
        assert not visited
        async with kernel.mcp.connect("h", oauth={**oauth, "issuer": origin_of(other.url)}, **settings):
            assert parse_qs(urlsplit(visited[0]).query)["client_id"] == ["ours"]


async def test_a_call_that_is_made_again_on_a_new_connection_is_made_by_no_definition_that_changed_meanwhile(
    opened: Opens,
) -> None:
    async with opened() as (_, session, http):
        http.forget()
        http.tools = [listed("echo", "Something else by now")]
        calls = [one.rpc for one in http.asked].count("tools/call")
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "conflict" and "does not describe echo any more" in str(result.error_text)
        assert [one.rpc for one in http.asked].count("tools/call") == calls + 1, "only that which was refused unseen"
