"""The network service: it checks each redirect and address, and limits each response."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from tests.runtime.conftest import RecordingAccessCheck
from tests.web import Answer, LoopbackServer, authority, ok, redirect

from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.runtime.http_service import CheckedNetworkService
from handrail.testing.scripted_kernel import ScriptedResolver

pytestmark = pytest.mark.proves("K-11b", "S-02")


def packed(plain: bytes) -> bytes:
    """With gzip, the same bytes each time: they name a test, which all workers must collect alike."""
    return gzip.compress(plain, mtime=0)


def net(
    *hosts: str,
    judge: RecordingAccessCheck | None = None,
    names: ScriptedResolver | None = None,
    attempts: list[ConnectionAttempt] | None = None,
) -> CheckedNetworkService:
    capabilities = CapabilitySet((CapabilityLayer("tool t", hosts=hosts),))
    trust = authority("api.example.org", "other.example.org", "127.0.0.1").client
    on_attempt = None if attempts is None else attempts.append
    return CheckedNetworkService(
        capabilities, judge or RecordingAccessCheck(), on_attempt, resolver=names or ScriptedResolver({}), trust=trust
    )


async def refused(door: CheckedNetworkService, url: str, kind: ErrorKind, method: str = "GET", **given: object) -> str:
    with pytest.raises(ToolError) as raised:
        await door.request(method, url, **given)  # pyright: ignore[reportArgumentType]
    assert raised.value.kind == kind, raised.value
    return raised.value.text


async def test_a_request_and_its_response_are_transmitted_unchanged() -> None:
    attempts: list[ConnectionAttempt] = []
    async with LoopbackServer({"/a?b=c": ok(b"hello", "X-One: 1", "Set-Cookie: a", "Set-Cookie: b")}) as site:
        door = net(site.authority, attempts=attempts)
        answer = await door.request("post", site.url("/a?b=c#d"), headers={"X-Token": "é"}, body=b"body")
    assert (answer.status, answer.body, answer.is_truncated, answer.redirects) == (200, b"hello", False, ())
    assert answer.url == site.url("/a?b=c")
    assert answer.header("X-ONE") == "1"
    assert [value for name, value in answer.headers if name == "set-cookie"] == ["a", "b"]
    asked = site.asked[0]
    assert asked.line == "POST /a?b=c HTTP/1.1"
    assert (asked.body, asked.fields["host"], asked.fields["x-token"]) == (b"body", site.authority, "é")
    assert attempts == [ConnectionAttempt("127.0.0.1", site.port, "POST")]


async def test_an_http_error_status_is_returned_as_an_answer() -> None:
    async with LoopbackServer({"*": ok(b"no", status="404 Not Found")}) as site:
        assert (await net(site.authority).request("GET", site.url())).status == 404


async def test_a_host_is_dialled_at_its_checked_address_and_verified_by_its_certificate() -> None:
    trust = authority("api.example.org", "other.example.org", "127.0.0.1")
    names = ScriptedResolver({"api.example.org": ["127.0.0.1"], "unknown.example.org": ["127.0.0.1"]})
    async with LoopbackServer({"*": ok(b"over tls")}, trust.server) as site:
        door = net(f"*.example.org:{site.port}", site.authority, names=names)
        answer = await door.request("GET", site.url(host="api.example.org"))
        assert answer.body == b"over tls"
        assert site.asked[0].fields["host"] == f"api.example.org:{site.port}"
        assert "certificate" in await refused(door, site.url(host="unknown.example.org"), "backend")
    assert names.queries == ["api.example.org", "unknown.example.org"]
    assert len(site.asked) == 1


async def test_a_host_is_checked_by_capability_set_rules_and_resolved_address() -> None:
    names = ScriptedResolver({"inside.example.org": ["127.0.0.1"]})
    async with LoopbackServer({"*": ok()}) as site:
        attempts: list[ConnectionAttempt] = []
        judge = RecordingAccessCheck({site.authority: "denied by a rule"})
        assert (
            await refused(net(site.authority, judge=judge, attempts=attempts), site.url(), "denied")
            == "denied by a rule"
        )
        assert attempts == [ConnectionAttempt("127.0.0.1", site.port, "GET", "denied by a rule")]
        assert judge.asked == [("net.fetch", site.authority)]
        assert "tool t" in await refused(net("other.example.org"), site.url(), "denied")
        door = net("*", names=names)
        assert "literal grant" in await refused(door, site.url(host="inside.example.org"), "denied")
        assert "literal grant" in await refused(door, site.url(), "denied")
        await refused(door, "http://gone.example.org/", "backend")
    assert site.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/",
        "https://user:secret@example.org/",
        "https://example.org\\@evil.example/",
        "https://①②⑦.0.0.1/",
        "https://0x7f.1/",
        "https://2130706433/",
        "https://0177.0.0.1/",
        "https://example.org/\r\nX: y",
        "https://example.org/\0",
        "example.org",
        "",
    ],
)
async def test_an_invalid_or_obfuscated_url_is_refused(url: str) -> None:
    await refused(net("*"), url, "invalid_input")


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("CONNECT", {}),
        ("TRACE", {}),
        ("GET /x HTTP/1.1\r\nX:", {}),
        ("", {}),
        ("GET", {"Host": "evil.example"}),
        ("GET", {"Transfer-Encoding": "chunked"}),
        ("GET", {"Content-Length": "9"}),
        ("GET", {"X": "a\r\nHost: evil.example"}),
        ("GET", {"X": "a\0"}),
        ("GET", {"X": "☃"}),
        ("GET", {"X y": "a"}),
        ("GET", {"": "a"}),
    ],
)
async def test_a_method_or_header_that_could_change_framing_or_host_is_refused(
    method: str, headers: dict[str, str]
) -> None:
    async with LoopbackServer({"*": ok()}) as site:
        await refused(net(site.authority), site.url(), "invalid_input", method, headers=headers)
    assert site.asked == []


# ── redirects ────────────────────────────────────────────────────────────────────────────────────


async def test_each_redirect_is_checked_again() -> None:
    async with LoopbackServer({"*": ok(b"end")}) as last, LoopbackServer({"/self": redirect("/")}) as first:
        first.routes["/"] = redirect(last.url("/x"))
        both = (first.authority, last.authority)
        answer = await net(*both).request("GET", first.url("/self"))
        assert (answer.body, answer.url) == (b"end", last.url("/x"))
        assert answer.redirects == (first.url("/self"), first.url("/"))
        judge = RecordingAccessCheck({last.authority: "denied by a rule"})
        assert await refused(net(*both, judge=judge), first.url(), "denied") == "denied by a rule"
        assert last.authority in await refused(net(first.authority), first.url(), "denied")
    assert len(last.asked) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://2852039166/",
        "http://0xa9fea9fe/",
        "//127.0.0.1:1/",
        "http://metadata.example.org/",
        "http://user@example.org/",
        "http://example.org\\@127.0.0.1/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http://①⑥⑨.254.169.254/",
        "http://[::1/",
        "http://[x]/",
        "http://example.org:99999/",
    ],
)
async def test_a_redirect_to_an_internal_address_or_an_invalid_host_is_refused(location: str) -> None:
    names = ScriptedResolver({"metadata.example.org": ["169.254.169.254"], "example.org": ["127.0.0.1"]})
    async with LoopbackServer({"*": redirect(location)}) as site:
        await refused(net("*", site.authority, names=names), site.url(), "denied")


async def test_a_host_that_resolves_differently_after_a_redirect_is_checked_again() -> None:
    async with LoopbackServer({"/": redirect("/again"), "/again": ok(b"NEVER")}) as site:
        names = ScriptedResolver({"rebinds.example.org": [["127.0.0.1"], ["127.0.0.2"]]})
        door = net("*:*", site.authority, names=names)
        assert "127.0.0.2" in await refused(door, site.url(host="rebinds.example.org"), "denied")


async def test_credential_headers_are_not_sent_to_another_origin() -> None:
    async with (
        LoopbackServer({"*": ok()}) as other,
        LoopbackServer({"/here": redirect("/x"), "/there": redirect(other.url()), "/x": ok()}) as site,
    ):
        door = net(site.authority, other.authority)
        headers = {"Authorization": "Bearer s", "Cookie": "c", "X-Api-Key": "k", "Accept": "text/html"}
        await door.request("GET", site.url("/here"), headers=headers)
        await door.request("GET", site.url("/there"), headers=headers)
    assert {"authorization", "cookie", "x-api-key"} <= set(site.asked[1].fields)
    assert not {"authorization", "cookie", "x-api-key"} & set(other.asked[0].fields)
    assert other.asked[0].fields["accept"] == "text/html"


@pytest.mark.parametrize(
    ("status", "method", "sent"),
    [
        ("301 Moved", "POST", ("GET", b"")),
        ("302 Found", "POST", ("GET", b"")),
        ("303 See Other", "PUT", ("GET", b"")),
        ("307 Temporary", "POST", ("POST", b"body")),
        ("308 Permanent", "POST", ("POST", b"body")),
    ],
)
async def test_the_status_of_a_redirect_decides_whether_the_method_changes(
    status: str, method: str, sent: tuple[str, bytes]
) -> None:
    async with LoopbackServer({"/": redirect("/x", status), "/x": ok()}) as site:
        await net(site.authority).request(method, site.url(), body=b"body", headers={"Content-Type": "text/plain"})
    assert (site.asked[1].line.split()[0], site.asked[1].body) == sent


async def test_a_request_body_is_not_sent_to_another_origin() -> None:
    async with (
        LoopbackServer({"*": ok()}) as other,
        LoopbackServer({"*": redirect(other.url(), "307 Temporary")}) as site,
    ):
        door = net(site.authority, other.authority)
        answer = await door.request("POST", site.url(), body=b"for this origin")
    assert (answer.status, answer.header("location")) == (307, other.url())
    assert other.asked == []


async def test_redirects_are_limited_and_can_be_returned_to_the_tool() -> None:
    async with LoopbackServer({"*": redirect("/again")}) as site:
        door = net(site.authority)
        assert "more than 3" in await refused(door, site.url(), "limit", max_redirects=3)
        assert len(site.asked) == 4
        assert (await door.request("GET", site.url(), max_redirects=0)).status == 302


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def encoded(body: bytes, coding: str) -> bytes:
    return ok(body, f"Content-Encoding: {coding}")


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (encoded(packed(b"packed"), "gzip"), b"packed"),
        (encoded(packed(b"two ") + packed(b"members") + b"\0" * 9, "gzip"), b"two members"),
        (encoded(zlib.compress(b"packed"), "deflate"), b"packed"),
        (encoded(raw_deflate(b"packed"), "deflate"), b"packed"),
        (encoded(b"plain", "identity"), b"plain"),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok(b"after"), b"after"),
    ],
)
async def test_a_response_body_is_decoded(answer: bytes, body: bytes) -> None:
    async with LoopbackServer({"*": answer}) as site:
        assert (await net(site.authority).request("GET", site.url())).body == body


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity"])
async def test_a_response_body_is_truncated_at_its_limit_in_any_encoding(coding: str) -> None:
    plain = b"\0" * 20_000_000
    body = {"gzip": gzip.compress, "deflate": zlib.compress}.get(coding, bytes)(plain)
    pieces: list[bytes] = []
    async with LoopbackServer({"*": encoded(body, coding)}) as site:
        answer = await net(site.authority).request("GET", site.url(), max_bytes=70_000, on_body=pieces.append)
    assert (len(answer.body), answer.is_truncated) == (70_000, True)
    assert b"".join(pieces) == answer.body


async def test_a_response_body_of_exactly_the_limit_is_not_truncated() -> None:
    async with LoopbackServer({"*": encoded(packed(b"x" * 1000), "gzip")}) as site:
        answer = await net(site.authority).request("GET", site.url(), max_bytes=1000)
    assert (len(answer.body), answer.is_truncated) == (1000, False)


async def test_compressed_data_that_expands_to_nothing_fails_with_a_limit() -> None:
    async def empty_blocks(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + packed(b"")[:10])
        while True:
            writer.write(b"\0\0\0\xff\xff" * 10_000)
            await writer.drain()

    async with LoopbackServer({"*": empty_blocks}) as site:
        await refused(net(site.authority), site.url(), "limit", max_bytes=1000)


async def _endless_body(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65_536)
        await writer.drain()


async def _endless_head(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: y\r\n" * 1000)
        await writer.drain()


async def _silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def test_an_endless_response_body_is_truncated() -> None:
    async with LoopbackServer({"*": _endless_body}) as site:
        answer = await net(site.authority).request("GET", site.url(), max_bytes=100_000)
    assert (len(answer.body), answer.is_truncated) == (100_000, True)


async def test_a_server_that_does_not_answer_in_time_causes_a_timeout() -> None:
    async with LoopbackServer({"*": _silent}) as site:
        assert "50 ms" in await refused(net(site.authority), site.url(), "timeout", timeout_ms=50)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        encoded(b"not packed", "gzip"),
        encoded(packed(b"x" * 1000)[:-9], "gzip"),
        encoded(b"whatever", "br"),
        encoded(packed(packed(b"x")), "gzip, gzip"),
        _endless_head,
    ],
)
async def test_a_malformed_answer_is_an_error_without_a_partial_body(answer: Answer) -> None:
    async with LoopbackServer({"*": answer}) as site:
        await refused(net(site.authority), site.url(), "backend")


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_a_response_without_a_body_is_empty_despite_its_encoding_header(status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\nContent-Encoding: gzip\r\n\r\n".encode()
    async with LoopbackServer({"*": answer}) as site:
        assert (await net(site.authority).request("GET", site.url())).body == b""
    async with LoopbackServer({"*": encoded(b"", "gzip")}) as site:
        assert (await net(site.authority).request("HEAD", site.url())).body == b""


@pytest.mark.parametrize("given", [{"max_bytes": -1}, {"timeout_ms": 0}, {"max_redirects": 99}])
async def test_invalid_request_limits_are_refused(given: dict[str, int]) -> None:
    await refused(net("*"), "http://example.org/", "invalid_input", "GET", **given)
