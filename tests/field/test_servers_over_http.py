"""Servers over HTTP with ended sessions, failing streams, and invalid Unicode."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from tests.upstream.scripted_mcp_servers import (
    HttpResponseWriter,
    ReceivedHttpRequest,
    ReplyHandler,
    UpstreamHttpServer,
    make_tool_entry,
    run_upstream_http_server,
)

from handrail.contract.errors import ToolError, UsageError
from handrail.contract.session_protocols import Session
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.client.checked_http_client import keep_secure_scheme


@asynccontextmanager
async def connected(
    folder: Path, any_request: ReplyHandler | None = None
) -> AsyncGenerator[tuple[LocalKernel, Session, UpstreamHttpServer]]:
    async with (
        run_upstream_http_server(any_request=any_request) as http,
        temporary_kernel(folder, rules=["allow mcp:h:*"]) as kernel,
        kernel.mcp_servers.connect("h", url=http.url) as server,
    ):
        await server.approve_tool_definitions()
        yield kernel, await kernel.session(), http


def rpc_error(code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}).encode()


ENDED = {
    "400 in JSON-RPC": (400, rpc_error(-32000, "Bad Request: No valid session ID provided"), "application/json"),
    "400 as text": (400, b"Invalid session id", "text/plain"),
    "400 as JSON": (400, b'{"error": "Session expired"}', "application/json"),
    "400 as HTML": (400, b"<h1>Missing Mcp-Session-Id</h1>", "text/html"),
    "404 as HTML": (404, b"<h1>Not Found</h1>", "text/html"),
    "404 in JSON-RPC": (404, rpc_error(-32001, "Session not found"), "application/json"),
    "410": (410, b"Gone", "text/plain"),
    "422": (422, b'{"detail": "unknown SESSION"}', "application/json"),
    "500 in the words of the protocol": (500, b"Unknown Mcp-Session-Id", "text/plain"),
    "403 in JSON-RPC": (403, rpc_error(-32001, "Session not found"), "application/json"),
    "503 as text": (503, b"No valid session ID provided", "text/plain"),
    "200 in JSON-RPC": (200, rpc_error(-32001, "Session not found"), "application/json"),
    "200 in other words": (200, rpc_error(-32000, "Bad Request: No valid session ID provided"), "application/json"),
    "200 as an event": (
        200,
        b"data: " + rpc_error(-32001, "Session not found") + b"\n\n",
        "text/event-stream",
    ),
}


@pytest.mark.parametrize(("status", "body", "kind"), ENDED.values(), ids=ENDED)
async def test_concurrent_calls_reopen_an_ended_session_once(
    tmp_path: Path, status: int, body: bytes, kind: str
) -> None:
    server: UpstreamHttpServer

    async def ended(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        known = asked.headers.get("mcp-session-id", "")
        if known and known not in server.sessions and asked.method == "POST":
            await answering.send_response(status, body, kind)
            return True
        return False

    async with connected(tmp_path) as (_, session, server):
        server.any_request = ended
        assert (await session.call("h_echo", {"text": "x"})).data == "x"
        for _ in range(2):
            server.forget_sessions()
            five = await asyncio.gather(*(session.call("h_echo", {"text": str(n)}) for n in range(5)))
            assert [one.data for one in five] == ["0", "1", "2", "3", "4"], [one.error_text for one in five]
        assert [one.rpc_method for one in server.requests].count("initialize") == 3


async def test_a_server_that_refuses_every_session_makes_the_call_fail_with_its_text(tmp_path: Path) -> None:
    async def refuses(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.rpc_method == "tools/call":
            await answering.send_response(400, rpc_error(-32000, "Session belongs to another user"))
        return asked.rpc_method == "tools/call"

    async with connected(tmp_path, refuses) as (_, session, http):
        result = await session.call("h_echo", {"text": "x"})
        assert result.error_kind == "unavailable" and "belongs to another user" in str(result.error_text)
        assert [one.rpc_method for one in http.requests].count("initialize") <= 3


async def test_an_error_about_the_session_of_a_tool_does_not_end_the_connection(tmp_path: Path) -> None:
    async def refuses(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        error = {"code": -32000, "message": "Browser session not found: 7"}
        await answering.send_response(
            200, json.dumps({"jsonrpc": "2.0", "id": asked.body["id"], "error": error}).encode()
        )
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(refuses)
        assert "Browser session not found: 7" in str((await session.call("h_echo", {"text": "x"})).error_text)
        assert (await session.call("h_echo", {"text": "x"})).data == "x"
        assert [one.rpc_method for one in http.requests].count("initialize") == 1


async def test_a_refusal_unrelated_to_sessions_does_not_end_the_session(tmp_path: Path) -> None:
    async def refuses(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.send_response(400, b"too many arguments", "text/plain")
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(refuses)
        assert "400" in str((await session.call("h_echo", {"text": "x"})).error_text)
        assert (await session.call("h_echo", {"text": "x"})).data == "x"
        assert [one.rpc_method for one in http.requests].count("initialize") == 1


STREAMS = {
    "404": (404, b"", "text/plain"),
    "405": (405, b"", "text/plain"),
    "406": (406, rpc_error(-32000, "Not Acceptable"), "application/json"),
    "400 about sessions": (400, b"Missing session", "text/plain"),
    "401": (401, b"", "text/plain"),
    "500": (500, b"oops", "text/plain"),
    "501": (501, b"", "text/html"),
    "a page": (200, b"<html>Welcome</html>", "text/html"),
    "JSON": (200, b"{}", "application/json"),
    "an empty stream": (200, b"", "text/event-stream"),
    "redirect": (302, b"", "text/html"),
}


@pytest.mark.parametrize(("status", "body", "kind"), STREAMS.values(), ids=STREAMS)
async def test_a_failed_optional_stream_leaves_calls_and_the_connection_intact(
    tmp_path: Path, status: int, body: bytes, kind: str
) -> None:
    asked_for = asyncio.Event()

    async def answers(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method == "GET":
            asked_for.set()
            await answering.send_response(status, body, kind)
        return asked.method == "GET"

    async with connected(tmp_path, answers) as (kernel, session, http):
        await asked_for.wait()
        for _ in range(3):
            assert (await session.call("h_echo", {"text": "x"})).data == "x"
        assert [one.rpc_method for one in http.requests].count("initialize") == 1
        assert kernel.components.upstreams["h"].state == "connected"


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "closes at once"])
async def test_an_optional_stream_that_hangs_or_closes_delays_no_call(tmp_path: Path, hangs: bool) -> None:
    asked_for, end = asyncio.Event(), asyncio.Event()

    async def answers(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method == "GET":
            asked_for.set()
            if hangs:
                await end.wait()
        return asked.method == "GET"

    async with connected(tmp_path, answers) as (kernel, session, _):
        await asked_for.wait()
        assert (await session.call("h_echo", {"text": "x"})).data == "x"
        assert kernel.components.upstreams["h"].attempts == 1
        end.set()


HALF = r'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "cut off \ud83d"}]}}'
RAW = '{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "cut off '


@pytest.mark.parametrize("raw", [False, True], ids=["escaped", "bytes"])
@pytest.mark.parametrize("stream", [False, True], ids=["JSON", "events"])
async def test_half_a_character_in_a_reply_is_replaced_and_the_next_call_works(
    tmp_path: Path, raw: bool, stream: bool
) -> None:
    async def half(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        number = asked.body["id"]
        body = (RAW % number).encode() + b'\xff"}]}}' if raw else (HALF % number).encode()
        if stream:
            await answering.start_event_stream()
            await answering.raw(b"data: " + body + b"\n\n")
        else:
            await answering.send_response(200, body)
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(half)
        assert (await session.call("h_echo", {"text": "x"})).data == "cut off \ufffd"
        assert (await session.call("h_echo", {"text": "x"})).data == "x"


async def test_events_that_are_not_answers_are_skipped(tmp_path: Path) -> None:
    async def odd(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.start_event_stream()
        for data in ("ping", "{}", "[db] Connected", '{"id": 1, "result": {}}', '"text"'):
            await answering.event(data)
        await answering.event('{"jsonrpc": "2.0", "method": "notifications/progress", "params": 7}')
        await answering.event({"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": "said"}})
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(odd)
        assert (await session.call("h_echo", {"text": "x"})).data == "said"


@pytest.mark.parametrize(
    "kind",
    [
        *("", "text/plain", "application/json; charset=utf-8", "text/json", "application/problem+json"),
        *("application/json-rpc", "text/html; charset=utf-8", "application/octet-stream", "APPLICATION/JSON"),
    ],
)
async def test_an_answer_with_an_unusual_content_type_is_accepted(tmp_path: Path, kind: str) -> None:
    async def plain(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        body = {"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": [{"type": "text", "text": "said"}]}}
        await answering.send_response(200, json.dumps(body).encode(), kind)
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(plain)
        assert (await session.call("h_echo", {"text": "x"})).data == "said"


CODED_BODIES: dict[str, tuple[Callable[[bytes], bytes], str, dict[str, str]]] = {
    "gzip": (gzip.compress, "application/json", {"content_encoding": "gzip"}),
    "deflate": (zlib.compress, "application/json", {"content_encoding": "Deflate"}),
    "Latin-1": (lambda body: body.decode().encode("latin-1"), "application/json; charset=ISO-8859-1", {}),
    "UTF-16": (lambda body: body.decode().encode("utf-16"), "application/json; charset=utf-16", {}),
    "an unknown charset": (lambda body: body, "application/json; charset=mine", {}),
    "a charset that has no other texts": (lambda body: body, "application/json; charset=idna", {}),
    "a charset for nothing": (lambda body: body, "application/json; charset=undefined", {}),
}


@pytest.mark.parametrize(("code", "kind", "headers"), CODED_BODIES.values(), ids=CODED_BODIES)
async def test_a_body_in_another_coding_is_read(
    tmp_path: Path, code: Callable[[bytes], bytes], kind: str, headers: dict[str, str]
) -> None:
    async def coded(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        text = {"type": "text", "text": "caf\u00e9"}
        body = {"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": [text]}}
        await answering.send_response(200, code(json.dumps(body, ensure_ascii=False).encode()), kind, **headers)
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(coded)
        assert (await session.call("h_echo", {"text": "x"})).data == "caf\u00e9"


@pytest.mark.parametrize(
    "body",
    [gzip.compress(b" " * (17 << 20)), b"{}", gzip.compress(b"{}")[:-9]],
    ids=["too long", "not coded", "cut"],
)
async def test_a_coded_body_that_is_too_long_or_damaged_fails_its_call_only(tmp_path: Path, body: bytes) -> None:
    async def coded(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.send_response(200, body, content_encoding="gzip")
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(coded)
        assert "valid" in str((await session.call("h_echo", {"text": "x"})).error_text)
        assert (await session.call("h_echo", {"text": "x"})).data == "x"


async def test_the_text_of_an_error_event_reaches_the_caller(tmp_path: Path) -> None:
    async def fails(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.start_event_stream()
        await answering.event('{"detail": "no such table"}', name="error")
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(fails)
        assert "no such table" in str((await session.call("h_echo", {"text": "x"})).error_text)


STREAM_FORMS: dict[str, bytes] = {
    "no empty line at the end": b"data: %s\n",
    "no line end": b"data: %s",
    "a byte order mark": b"\xef\xbb\xbfdata: %s\n\n",
    "another event name": b"event: response\ndata: %s\n\n",
    "no field name": b"%s\n",
    "spaces before the field": b"  data: %s\n\n",
    "no empty line between": b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}\ndata: %s\n\n',
    "an event without data": b"id: 7\ndata:\n\ndata: %s\n\n",
    "carriage returns": b"data: %s\r\r",
    "data in several lines": b"data: [\ndata: %s\ndata: ]\n\n",
    "the id behind the data": b"data: %s\nid: 7\n\n",
}


@pytest.mark.parametrize("form", STREAM_FORMS)
async def test_an_answer_in_an_unusual_stream_is_read(tmp_path: Path, form: str) -> None:
    async def answers(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        body = {"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": [{"type": "text", "text": "said"}]}}
        await answering.start_event_stream()
        await answering.raw(STREAM_FORMS[form] % json.dumps(body).encode())
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(answers)
        assert (await session.call("h_echo", {"text": "x"})).data == "said"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (500, b'{"error": "no such table"}', "application/json"),
        (422, b'{"detail": [{"msg": "no such table"}]}', "application/json"),
        (502, b"<html><style>p {}</style><title>no such table</title></html>", "text/html"),
        (503, b"no such table", "text/plain"),
    ],
)
async def test_the_text_of_an_http_error_reaches_the_caller(
    tmp_path: Path, status: int, body: bytes, kind: str
) -> None:
    async def refuses(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.send_response(status, body, kind)
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(refuses)
        said = str((await session.call("h_echo", {"text": "x"})).error_text)
        assert "no such table" in said and str(status) in said and "<" not in said
        assert (await session.call("h_echo", {"text": "x"})).data == "x"


@pytest.mark.parametrize("status", [202, 500])
async def test_an_answer_with_another_status_is_read(tmp_path: Path, status: int) -> None:
    async def answers(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        body = {"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": [{"type": "text", "text": "said"}]}}
        await answering.send_response(status, json.dumps(body).encode())
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(answers)
        assert (await session.call("h_echo", {"text": "x"})).data == "said"


async def test_a_page_in_the_place_of_an_answer_is_refused_with_its_type(tmp_path: Path) -> None:
    async def page(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        await answering.send_response(200, b"<html>Please sign in</html>", "text/html")
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies.append(page)
        assert "content type text/html" in str((await session.call("h_echo", {"text": "x"})).error_text)


REDIRECTS = {
    "moved to a slash": (301, "/mcp/"),
    "found at a slash": (302, "/mcp/"),
    "permanently at a slash": (308, "/mcp/"),
    "temporarily elsewhere": (307, "/other"),
    "an absolute address": (308, "ORIGIN/mcp/"),
}


@pytest.mark.parametrize(("status", "place"), REDIRECTS.values(), ids=REDIRECTS)
async def test_a_redirect_within_the_server_is_followed_with_the_message(
    tmp_path: Path, status: int, place: str
) -> None:
    arrived: list[str] = []

    async def redirects(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.path != "/mcp":
            arrived.append(asked.rpc_method or asked.method)
            return False
        await answering.send_response(status, location=place.replace("ORIGIN", f"http://{asked.headers['host']}"))
        return True

    async with connected(tmp_path, redirects) as (_, session, _):
        assert (await session.call("h_echo", {"text": "x"})).data == "x"
    assert {"initialize", "notifications/initialized", "tools/call", "DELETE"} <= {*arrived}


@pytest.mark.parametrize(
    ("status", "place"), [(302, "/login"), (301, "/login"), (303, "/mcp/"), (307, "http://127.0.0.1:9/mcp")]
)
async def test_a_redirect_that_is_not_followed_names_its_target(tmp_path: Path, status: int, place: str) -> None:
    async def redirects(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.rpc_method == "tools/call":
            await answering.send_response(status, location=place)
        return asked.rpc_method == "tools/call"

    async with connected(tmp_path, redirects) as (_, session, http):
        text = str((await session.call("h_echo", {"text": "x"})).error_text)
        assert "redirects to" in text and place in text
        assert not [one for one in http.requests if one.path == "/login"]


async def test_an_address_with_https_stays_so_behind_a_proxy_that_writes_http() -> None:
    def kept(before: str, after: str) -> str:
        return str(keep_secure_scheme(httpx2.URL(before), httpx2.URL(after)))

    assert kept("https://a.example/mcp", "http://a.example/mcp/") == "https://a.example/mcp/"
    assert kept("https://a.example:8443/mcp", "http://a.example:8443/mcp/") == "https://a.example:8443/mcp/"
    for other in ("http://b.example/mcp/", "http://a.example:8080/mcp/", "https://a.example/x"):
        assert kept("https://a.example/mcp", other) == other


async def test_answers_to_parallel_calls_on_one_stream_reach_their_own_calls(tmp_path: Path) -> None:
    first: list[ReceivedHttpRequest] = []
    both = asyncio.Event()

    def said(asked: ReceivedHttpRequest) -> dict[str, object]:
        text = {"type": "text", "text": asked.body["params"]["arguments"]["text"]}
        return {"jsonrpc": "2.0", "id": asked.body["id"], "result": {"content": [text]}}

    async def collects(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        first.append(asked)
        await answering.start_event_stream()
        if len(first) == 2:
            both.set()
            await asyncio.Event().wait()  # nothing comes on this stream
        await both.wait()
        for one in reversed(first):
            await answering.event(said(one))
        return True

    async with connected(tmp_path) as (_, session, http):
        http.replies += [collects, collects]
        results = await asyncio.gather(*(session.call("h_echo", {"text": text}) for text in ("a", "b")))
        assert [one.data for one in results] == ["a", "b"], [one.error_text for one in results]


class OlderServer:
    """A server with the transport of 2024-11-05: a stream of events, and POSTs to an address that the stream names.

    :param status: the status of a POST to the address of the stream
    :param endpoint: the address that the stream names, in which ORIGIN is the server's
    """

    def __init__(self, status: int, endpoint: str) -> None:
        self._status = status
        self._endpoint = endpoint
        self._stream: HttpResponseWriter | None = None
        self.methods: list[str] = []

    async def __call__(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        if asked.method == "GET":
            self._stream = answering
            await answering.start_event_stream()
            place = self._endpoint.replace("ORIGIN", f"http://{asked.headers['host']}")
            await answering.event(place, name="endpoint")
            await asyncio.Event().wait()
        if not asked.path.startswith("/messages"):
            await answering.send_response(self._status, b"Cannot POST", "text/plain")
            return True
        assert self._stream is not None
        self.methods.append(asked.rpc_method)
        await answering.send_response(202, b"Accepted", "text/plain")
        if "id" in asked.body:
            await self._stream.event({"jsonrpc": "2.0", "id": asked.body["id"], "result": self._result(asked)})
        return True

    @staticmethod
    def _result(asked: ReceivedHttpRequest) -> dict[str, object]:
        if asked.rpc_method == "initialize":
            return {"protocolVersion": "2024-11-05", "capabilities": {"tools": {}}, "serverInfo": {"name": "o"}}
        if asked.rpc_method == "tools/list":
            return {"tools": [make_tool_entry("echo")]}
        return {"content": [{"type": "text", "text": asked.body["params"]["arguments"]["text"]}]}


@pytest.mark.parametrize("status", [400, 404, 405])
@pytest.mark.parametrize("endpoint", ["/messages?id=1", "ORIGIN/messages?id=1", " /messages?id=1"])
async def test_a_server_with_only_the_older_transport_is_used_without_a_setting(
    tmp_path: Path, status: int, endpoint: str
) -> None:
    server = OlderServer(status, endpoint)
    async with connected(tmp_path, server) as (kernel, session, _):
        for text in ("x", "y"):
            assert (await session.call("h_echo", {"text": text})).data == text
        assert server.methods.count("initialize") == 1 and kernel.components.upstreams["h"].attempts == 1


@pytest.mark.parametrize("endpoint", ["http://127.0.0.2:9/messages", "http://[::1/messages", "/messages\0"])
async def test_an_endpoint_on_another_server_or_none_is_not_used(tmp_path: Path, endpoint: str) -> None:
    server = OlderServer(404, endpoint)
    with pytest.raises(ToolError, match="does not exist"):
        async with connected(tmp_path, server):
            pass
    assert not server.methods


@pytest.mark.parametrize(
    "written", ["Bearer sesame-1234", " Bearer sesame-1234 ", "Bearer sesame-1234\n", "Bearer Bearer sesame-1234", "bearer  BEARER sesame-1234"]
)  # fmt: skip
async def test_a_configured_header_is_sent_without_what_no_server_reads(tmp_path: Path, written: str) -> None:
    async with (
        run_upstream_http_server() as http,
        temporary_kernel(tmp_path) as kernel,
        kernel.mcp_servers.connect("h", url=http.url, headers={"Authorization": written}),
    ):
        assert {one.headers["authorization"].lower() for one in http.requests} == {"bearer sesame-1234"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-A", "a\nX-B: c"), ("X A", "sesame"), ("X-A:", "sesame"), ("X-A", "caf\u00e9"), ("", "sesame")],
)
async def test_a_header_that_cannot_be_sent_is_a_fault_of_its_server(tmp_path: Path, name: str, value: str) -> None:
    async with run_upstream_http_server() as http, temporary_kernel(tmp_path) as kernel:
        with pytest.raises((ToolError, UsageError), match=r"headers\.") as raised:
            async with kernel.mcp_servers.connect("h", url=http.url, headers={name: value}):
                pass
        assert value not in str(raised.value) and not http.requests
