"""HTTP heads and TLS hellos are parsed strictly or refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.sandbox.network import http_and_tls_parsers

pytestmark = pytest.mark.proves("S-02")


def record(message: bytes) -> bytes:
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message


def client_hello(server_name: str | None, *extensions: tuple[int, bytes]) -> bytes:
    every = list(extensions)
    if server_name is not None:
        name = b"\0" + len(server_name).to_bytes(2) + server_name.encode()
        every.append((0, len(name).to_bytes(2) + name))
    listed = b"".join(kind.to_bytes(2) + len(data).to_bytes(2) + data for kind, data in every)
    body = b"\x03\x03" + b"r" * 32 + b"\0" + b"\0\x02\x13\x01" + b"\x01\0" + len(listed).to_bytes(2) + listed
    return record(b"\x01" + len(body).to_bytes(3) + body)


def parse_in_pieces(data: bytes, size: int = 1 << 16) -> http_and_tls_parsers.ClientHello:
    gathering = http_and_tls_parsers.HandshakeReader(http_and_tls_parsers.CLIENT_HELLO)
    for at in range(0, len(data), size):
        if gathering.feed(data[at : at + size]):
            return http_and_tls_parsers.parse_hello(gathering.body)
    raise AssertionError("the hello did not end")


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_a_tls_hello_is_parsed_from_pieces_of_any_size(size: int) -> None:
    assert parse_in_pieces(client_hello("api.example.org"), size) == http_and_tls_parsers.ClientHello(
        "api.example.org", False
    )
    whole = client_hello("api.example.org")[5:]
    assert parse_in_pieces(record(whole[:9]) + record(whole[9:]), size).server_name == "api.example.org"


@pytest.mark.parametrize(
    ("said", "name", "is_address", "words"),
    [
        (http_and_tls_parsers.ClientHello("api.example.org", False), "api.example.org", False, None),
        (http_and_tls_parsers.ClientHello("API.example.org.", False), "api.example.org", False, None),
        (http_and_tls_parsers.ClientHello(None, False), "127.0.0.1", True, None),
        (http_and_tls_parsers.ClientHello(None, False), "api.example.org", False, "no SNI"),
        (http_and_tls_parsers.ClientHello("evil.example", False), "api.example.org", False, "evil.example"),
        (http_and_tls_parsers.ClientHello("evil.example", False), "127.0.0.1", True, "evil.example"),
        (http_and_tls_parsers.ClientHello("api.example.org", True), "api.example.org", False, "ECH"),
    ],
)
def test_a_tls_hello_must_name_the_host_of_its_tunnel_unencrypted(
    said: http_and_tls_parsers.ClientHello, name: str, is_address: bool, words: str | None
) -> None:
    refused = http_and_tls_parsers.explain_forbidden_client_hello(said, name, is_address=is_address)
    assert refused is None if words is None else words in (refused or "")


def test_an_encrypted_tls_hello_is_detected() -> None:
    assert parse_in_pieces(client_hello("public.example", (0xFE0D, b"secret"))).is_encrypted


@pytest.mark.parametrize(
    "data",
    [
        client_hello("a", (5, b""), (5, b"")),
        client_hello(None, (0, b"\0\0")),
        client_hello(None, (0, b"\0\x08\0\0\1a\0\0\1b")),
        client_hello(None, (0, b"\0\x04\1\0\1a")),
        record(b"\x02\0\0\0"),
        record(client_hello("a")[5:] + b"more"),
        b"\x15\x03\x01\0\2\2\0",
        b"\x16\x03\x01\0\0",
    ],
)
def test_a_malformed_tls_hello_is_refused(data: bytes) -> None:
    with pytest.raises((http_and_tls_parsers.NotTlsHandshake, AssertionError)):
        parse_in_pieces(data)


@given(st.binary(max_size=200))
def test_the_http_and_tls_parsers_raise_only_expected_errors_on_any_bytes(data: bytes) -> None:
    for candidate in (data, record(data) if data else data, client_hello("a")[:43] + data):
        with contextlib.suppress(http_and_tls_parsers.NotTlsHandshake, AssertionError):
            parse_in_pieces(candidate)
    with contextlib.suppress(http_and_tls_parsers.MalformedHead):
        http_and_tls_parsers.parse_request_head(data + b"\r\n\r\n")
    with contextlib.suppress(http_and_tls_parsers.MalformedHead):
        http_and_tls_parsers.parse_response_head(data + b"\r\n\r\n", "GET")


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_a_parsed_request_head_contains_no_line_end_or_nul(name: bytes, value: bytes) -> None:
    with contextlib.suppress(http_and_tls_parsers.MalformedHead):
        head = http_and_tls_parsers.parse_request_head(
            b"GET http://a.example/ HTTP/1.1\r\n" + name + b":" + value + b"\r\n\r\n"
        )
        again = http_and_tls_parsers.encode_http_head(b"GET / HTTP/1.1", head.fields)
        assert again.count(b"\r\n") == len(head.fields) + 2
        assert not set(b"".join(part for field in head.fields for part in field)) & set(b"\r\n\0")
