"""The proxy of a sandbox: it checks every request and tunnel, and limits everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Callable

import pytest
from tests.sandbox.test_hello import client_hello, record
from tests.web import LoopbackServer, authority, ok, redirect

from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.network import http_and_tls_parsers
from handrail.sandbox.network.egress_check import EgressCheck
from handrail.sandbox.network.egress_proxy import EgressProxy, ProxyLimits
from handrail.testing.scripted_kernel import ScriptedResolver

pytestmark = pytest.mark.proves("S-02")


class ProxyClient:
    """A client of one proxy, and the proxy's reports."""

    def __init__(self, port: int, proxy: EgressProxy, attempts: list[ConnectionAttempt]) -> None:
        self.port = port
        self.proxy = proxy
        self.attempts = attempts

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, request: bytes) -> bytes:
        """All that is answered to ``request``."""
        reader, writer = await self.connect()
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    async def get(self, url: str, *fields: str) -> tuple[int, bytes]:
        head = "\r\n".join([f"GET {url} HTTP/1.1", "Host: ignored.example", *fields, "", ""])
        head_back, _, body = (await self.raw(head.encode())).partition(b"\r\n\r\n")
        return int(head_back.split()[1]), body

    async def tunnel(self, target: str) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1]), reader, writer


@contextlib.asynccontextmanager
async def front(
    *hosts: str,
    names: ScriptedResolver | None = None,
    gate: Callable[[str, int], str | None] | None = None,
    limits: ProxyLimits | None = None,
) -> AsyncGenerator[ProxyClient]:
    attempts: list[ConnectionAttempt] = []
    egress = EgressCheck(CapabilitySet((CapabilityLayer("tool t", hosts=hosts),)), gate, names or ScriptedResolver({}))
    proxy = EgressProxy(egress, attempts.append, limits)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy.serve(listener)
    try:
        yield ProxyClient(listener.getsockname()[1], proxy, attempts)
    finally:
        await proxy.aclose()


# ── plain requests ───────────────────────────────────────────────────────────────────────────────


async def test_the_proxy_fetches_a_granted_host_and_records_the_attempt() -> None:
    async with LoopbackServer({"/a?b=c": ok(b"hello")}) as site, front(site.authority) as proxy:
        assert await proxy.get(site.url("/a?b=c")) == (200, b"hello")
    assert site.asked[0].line == "GET /a?b=c HTTP/1.1"
    assert site.asked[0].fields["host"] == site.authority
    assert proxy.attempts == [ConnectionAttempt("127.0.0.1", site.port, "GET")]
    assert proxy.proxy.bytes_out > 0
    assert proxy.proxy.bytes_in > len(b"hello")


async def test_another_host_gets_403_with_the_layer_and_the_next_step() -> None:
    async with LoopbackServer({"*": ok()}) as site, front("api.example.org") as proxy:
        status, text = await proxy.get(site.url())
        refused, _, writer = await proxy.tunnel(site.authority)
        writer.close()
    assert status == refused == 403
    for word in (site.authority.encode(), b"tool t", b'"net"', b"requires"):
        assert word in text
    assert site.asked == []
    assert [attempt.refusal_reason is None for attempt in proxy.attempts] == [False, False]


async def test_the_proxy_answers_403_with_the_deny_rule_for_a_granted_but_denied_host() -> None:
    def gate(host: str, port: int) -> str | None:
        return f"{host}:{port} is denied by the rule 'deny net.fetch 127.0.0.1'"

    async with LoopbackServer({"*": ok()}) as site, front(site.authority, gate=gate) as proxy:
        status, text = await proxy.get(site.url())
    assert status == 403
    assert b"deny net.fetch" in text
    assert site.asked == []


async def test_a_redirect_becomes_the_next_request_of_the_client_and_is_checked() -> None:
    async with (
        LoopbackServer({"/": redirect("http://169.254.169.254/latest/meta-data/")}) as site,
        front(site.authority, "*") as proxy,
    ):
        status, _ = await proxy.get(site.url())
        assert status == 302
        status, text = await proxy.get("http://169.254.169.254/latest/meta-data/")
    assert status == 403
    assert b"metadata" in text


async def test_a_host_name_that_resolves_to_an_internal_address_is_refused() -> None:
    names = ScriptedResolver({"evil.example": ["127.0.0.1"], "gone.example": [[]]})
    async with LoopbackServer({"*": ok()}) as site, front("*", names=names) as proxy:
        status, text = await proxy.get(site.url(host="evil.example"))
        assert (await proxy.get(site.url(host="gone.example")))[0] == 502
    assert status == 403
    assert b"literal grant" in text
    assert site.asked == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET https://api.example.org/ HTTP/1.1\r\n\r\n",
        b"GET ftp://api.example.org/ HTTP/1.1\r\n\r\n",
        b"GET http://user@api.example.org/ HTTP/1.1\r\n\r\n",
        b"GET http://api.example.org\\@evil.example/ HTTP/1.1\r\n\r\n",
        b"GET http://2130706433/ HTTP/1.1\r\n\r\n",
        b"GET http://api.example.org/ HTTP/2.0\r\n\r\n",
        b"GET http://api.example.org/\r\n\r\n",
        b"GET  http://api.example.org/ HTTP/1.1\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\nHost: x\n\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\r\nA: b\rc\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\r\nA: b\0c\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST http://api.example.org/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST http://api.example.org/ HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
        b"POST http://api.example.org/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST http://api.example.org/ HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        b"POST http://api.example.org/ HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"POST http://api.example.org/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT api.example.org HTTP/1.1\r\n\r\n",
        b"CONNECT api.example.org:443 HTTP/1.1\r\nContent-Length: 4\r\n\r\n",
        b"CONNECT user@api.example.org:443 HTTP/1.1\r\n\r\n",
        b"CONNECT api.example.org:443/ HTTP/1.1\r\n\r\n",
        b"CONNECT 0x7f.1:443 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
        b"GET http://api.example.org/" + b"a" * http_and_tls_parsers.MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET http://api.example.org/ HTTP/1.1\r\n" + b"a: b\r\n" * (http_and_tls_parsers.MAX_FIELDS + 1) + b"\r\n",
    ],
)
async def test_the_proxy_refuses_an_ambiguous_request(request_bytes: bytes) -> None:
    async with front("*") as proxy:
        answer = await proxy.raw(request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert proxy.attempts == []


async def test_the_proxy_serves_only_one_request_per_connection() -> None:
    async with LoopbackServer({"*": ok(b"once")}) as site, front(site.authority) as proxy:
        one = f"GET {site.url('/one')} HTTP/1.1\r\n\r\n"
        two = "GET http://evil.example/two HTTP/1.1\r\n\r\n"
        answer = await proxy.raw((one + two).encode())
        body = f"POST {site.url('/three')} HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody" + two
        await proxy.raw(body.encode())
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer
    assert [asked.line.split()[1] for asked in site.asked] == ["/one", "/three"]
    assert site.asked[1].body == b"body"


async def test_the_proxy_does_not_forward_connection_and_proxy_headers() -> None:
    async with LoopbackServer({"*": ok()}) as site, front(site.authority) as proxy:
        await proxy.get(
            site.url(),
            "Proxy-Authorization: Basic c2VjcmV0",
            "Connection: x-own",
            "X-Own: 1",
            "Upgrade: h2c",
            "X-Kept: 2",
        )
    fields = site.asked[0].fields
    assert not {"proxy-authorization", "x-own", "upgrade"} & set(fields)
    assert fields["x-kept"] == "2"
    assert fields["connection"] == "close"


async def test_the_proxy_reframes_a_chunked_body_in_both_directions() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    async with LoopbackServer({"*": answer}) as site, front(site.authority) as proxy:
        head = f"POST {site.url()} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;ext\r\nhello\r\n0\r\nT: x\r\n\r\n"
        back = await proxy.raw(head.encode())
        old = await proxy.raw(f"GET {site.url()} HTTP/1.0\r\n\r\n".encode())
    assert site.asked[0].body == b"hello"
    assert back.endswith(b"\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert old.endswith(b"\r\n\r\nabcde")
    assert b"chunked" not in old


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\x01\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"HTTP/1.1 200 OK\r\n" + b"a" * http_and_tls_parsers.MAX_HEAD_BYTES * 3,
    ],
)
async def test_a_malformed_response_becomes_a_502(answer: bytes) -> None:
    async with LoopbackServer({"*": answer}) as site, front(site.authority) as proxy:
        assert b"HTTP/1.1 502 Bad Gateway" in await proxy.raw(f"GET {site.url()} HTTP/1.1\r\n\r\n".encode())


async def test_an_interim_response_is_passed_on_before_the_final_one() -> None:
    async with (
        LoopbackServer({"*": b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"done")}) as site,
        front(site.authority) as proxy,
    ):
        answer = await proxy.raw(f"HEAD {site.url()} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert b"content-length: 4" in answer
    assert answer.endswith(b"\r\n\r\n")


# ── peers that do not end ────────────────────────────────────────────────────────────────────────


async def test_the_proxy_disconnects_silent_and_slow_clients_after_a_timeout() -> None:
    async with front("*", limits=ProxyLimits(head_s=0.05)) as proxy:
        assert await proxy.raw(b"") == b""
        assert await proxy.raw(b"GET http://api.example.org/ HTTP/1.1\r\n") == b""


async def test_the_proxy_returns_502_for_a_silent_server_after_a_timeout() -> None:
    async def silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with LoopbackServer({"*": silent}) as site, front(site.authority, limits=ProxyLimits(idle_s=0.05)) as proxy:
        assert (await proxy.get(site.url()))[0] == 502


async def test_an_endless_body_stops_at_the_byte_limit() -> None:
    async def endless(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    limits = ProxyLimits(bytes_in=1 << 20)
    async with LoopbackServer({"*": endless}) as site, front(site.authority, limits=limits) as proxy:
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await proxy.raw(f"GET {site.url()} HTTP/1.1\r\n\r\n".encode())
    assert len(answer) <= 1 << 20
    assert proxy.proxy.bytes_in > 1 << 20


async def test_connections_above_the_limit_are_not_accepted() -> None:
    async with front("*", limits=ProxyLimits(connections=1)) as proxy:
        _, writer = await proxy.connect()
        writer.write(b"GET ")
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert await proxy.raw(b"GET http://2130706433/ HTTP/1.1\r\n\r\n") == b""
        writer.close()


async def test_closing_the_proxy_ends_every_connection() -> None:
    async with front("*") as proxy:
        reader, writer = await proxy.connect()
        writer.write(b"GET ")
        await writer.drain()
        await proxy.proxy.aclose()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        with pytest.raises(OSError, match=r"."):
            await proxy.connect()


# ── tunnels ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_tunnel_carries_tls_to_its_granted_host() -> None:
    trust = authority("api.example.org", "127.0.0.1")
    names = ScriptedResolver({"api.example.org": ["127.0.0.1"]})
    async with LoopbackServer({"*": ok(b"over tls")}, trust.server) as site:
        granted = (f"api.example.org:{site.port}", site.authority)
        async with front(*granted, names=names) as proxy:
            status, reader, writer = await proxy.tunnel(f"api.example.org:{site.port}")
            assert status == 200
            await writer.start_tls(trust.client, server_hostname="api.example.org")
            writer.write(b"GET / HTTP/1.1\r\nHost: api.example.org\r\n\r\n")
            assert (await reader.read()).endswith(b"over tls")
            writer.close()
    assert [attempt.refusal_reason for attempt in proxy.attempts] == [None]


@pytest.mark.parametrize("server_name", ["evil.example", "api.example.org.evil.example", "example.org", None])
async def test_a_tls_hello_for_another_server_ends_the_tunnel(server_name: str | None) -> None:
    trust = authority("api.example.org", "evil.example")
    names = ScriptedResolver({"api.example.org": ["127.0.0.1"]})
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    site = LoopbackServer({"*": ok()}, trust.server)
    async with site, front("api.example.org:*", "127.0.0.1:*", names=names) as proxy:
        status, _, writer = await proxy.tunnel(f"api.example.org:{site.port}")
        assert status == 200
        with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
            await writer.start_tls(context, server_hostname=server_name or "")
    assert site.asked == []
    assert proxy.attempts[-1].refusal_reason is not None
    assert "api.example.org" in proxy.attempts[-1].refusal_reason


async def test_a_second_tls_hello_cannot_name_another_server() -> None:
    """After a HelloRetryRequest the client says hello again."""
    names = ScriptedResolver({"api.example.org": ["127.0.0.1"]})
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.readexactly(len(first)))
        retry = b"\x03\x03" + http_and_tls_parsers._RETRY_RANDOM + b"\0" + b"\x13\x01\0" + b"\0\0"  # pyright: ignore[reportPrivateUsage]
        writer.write(record(b"\x02" + len(retry).to_bytes(3) + retry))
        got.put_nowait(await reader.read())
        writer.close()

    first, second = client_hello("api.example.org"), client_hello("evil.example")
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, front(f"api.example.org:{port}", f"127.0.0.1:{port}", names=names) as proxy:
        _, reader, writer = await proxy.tunnel(f"api.example.org:{port}")
        writer.write(first + b"\x14\x03\x03\0\1\1" + second)  # both at once, before the server could ask
        assert (await reader.read()).endswith(http_and_tls_parsers.UNRECOGNIZED_NAME)
        writer.close()
        assert await got.get() == first
        assert await got.get() == b""
    assert "evil.example" in (proxy.attempts[-1].refusal_reason or "")


async def test_a_tunnel_to_port_443_carries_only_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.read())
        writer.close()

    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    monkeypatch.setattr("handrail.sandbox.network.egress_proxy.TLS_PORT", port)
    async with listener, front(f"127.0.0.1:{port}") as proxy:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\xff\xff", b"\x16\x02\0\0\1\1"):
            _, reader, writer = await proxy.tunnel(f"127.0.0.1:{port}")
            writer.write(said)
            assert await reader.read() == http_and_tls_parsers.UNRECOGNIZED_NAME
            writer.close()
            assert await got.get() == b""


async def test_a_tunnel_to_another_port_carries_any_protocol() -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        writer.write(b"you said " + await reader.readline())
        writer.close()

    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, front(f"127.0.0.1:{port}") as proxy:
        _, reader, writer = await proxy.tunnel(f"127.0.0.1:{port}")
        assert await reader.readline() == b"220 ready\r\n"
        writer.write(b"EHLO\r\n")
        assert await reader.read() == b"you said EHLO\r\n"
        writer.close()


async def test_a_tunnel_ends_when_changed_rules_deny_its_host() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    denied: list[str] = []
    listener = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, front(f"127.0.0.1:{port}", gate=lambda host, port: denied[0] if denied else None) as proxy:
        _, reader, writer = await proxy.tunnel(f"127.0.0.1:{port}")
        for said in (b"one\n", b"two\n"):
            writer.write(said)
            assert await reader.readline() == said
        denied.append("the call is over")
        writer.write(b"three\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    assert proxy.attempts[-1].refusal_reason == "the call is over"
