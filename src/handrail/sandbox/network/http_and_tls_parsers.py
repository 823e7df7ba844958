"""Strict readers of HTTP/1 heads and TLS hellos, which refuse everything that two readers could read differently.

So nothing can be smuggled past the proxy: lines end in CRLF, a head has one meaning of where its body ends, names are
tokens, no value has control characters, and nothing is continued on a next line (RFC 9112).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily

MAX_HEAD_BYTES = 32 * 1024
MAX_FIELDS = 128
MAX_BODY_BYTES = 1 << 40

_TOKEN = compile_regex_lazily(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = compile_regex_lazily(rb"[\t\x20-\x7e\x80-\xff]*")
_REQUEST_LINE = compile_regex_lazily(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS_LINE = compile_regex_lazily(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = compile_regex_lazily(rb"[0-9]{1,15}")
_CHUNK = compile_regex_lazily(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")

_HOP_BY_HOP_FIELDS = frozenset(
    (
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"upgrade",
        b"transfer-encoding",
        b"content-length",
    )
)
"""Fields that concern one connection only. The framing is written again."""

HeadFields = list[tuple[bytes, bytes]]
BodyFraming = int | Literal["chunked", "to the end"]
"""The length of a body, or how its end is recognised."""


class MalformedHead(ValueError):
    """An error for a head or a body framing that is not strictly HTTP/1."""


class RequestHead(Struct, frozen=True):
    """The head of an HTTP request.

    :param framing: how long the body is
    :param is_http_1_0: whether it is HTTP/1.0
    """

    method: str
    target: str
    fields: HeadFields
    framing: int | Literal["chunked"]
    is_http_1_0: bool


class ResponseHead(Struct, frozen=True):
    """The head of an HTTP response.

    :param line: the status line without its end
    """

    line: bytes
    status: int
    fields: HeadFields
    framing: BodyFraming


def parse_request_head(head: bytes) -> RequestHead:
    """Parse the head of a request.

    :param head: up to and including the empty line
    :raises MalformedHead: with the problem
    """
    line, fields = _split_head(head)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise MalformedHead("the first line is not 'METHOD TARGET HTTP/1.1'")
    framing = _parse_framing(fields)
    old = match[3] == b"0"
    if old and framing == "chunked":
        raise MalformedHead("an HTTP/1.0 request cannot be chunked")
    if sum(name == b"host" for name, _ in fields) > 1:
        raise MalformedHead("the head has more than one Host field")
    return RequestHead(match[1].decode(), match[2].decode(), fields, 0 if framing is None else framing, old)


def parse_response_head(head: bytes, method: str) -> ResponseHead:
    """Parse the head of a response.

    :param method: of the request that it answers
    :raises MalformedHead: with the problem
    """
    line, fields = _split_head(head)
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise MalformedHead("the first line is not an HTTP/1 status line")
    status = int(match[1])
    framing = _parse_framing(fields)
    if method == "HEAD" or status < 200 or status in (204, 304):
        return ResponseHead(line, status, fields, 0)
    return ResponseHead(line, status, fields, "to the end" if framing is None else framing)


def remove_hop_by_hop_fields(fields: HeadFields) -> HeadFields:
    """Return ``fields`` without those that concern one connection only."""
    named = {
        part.strip().lower()
        for name, value in fields
        if name in (b"connection", b"proxy-connection")
        for part in value.split(b",")
    }
    return [(name, value) for name, value in fields if name not in _HOP_BY_HOP_FIELDS and name not in named]


def encode_http_head(line: bytes, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head in the form in which it is sent."""
    return b"\r\n".join((line, *(name + b": " + value for name, value in fields), b"", b""))


def parse_chunk_size(line: bytes) -> int:
    """Return the length of the next chunk from its line, without the line end.

    :raises MalformedHead: for anything but hexadecimal digits and extensions
    """
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise MalformedHead("a chunk does not begin with its length")
    return int(match[1], 16)


def _split_head(head: bytes) -> tuple[bytes, HeadFields]:
    first, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(rest) > MAX_FIELDS:
        raise MalformedHead(f"the head has more than {MAX_FIELDS} fields")
    fields: HeadFields = []
    for line in rest:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise MalformedHead("a field has no name, or has invalid characters")
        fields.append((name.lower(), value))
    return first, fields


def _parse_framing(fields: HeadFields) -> int | Literal["chunked"] | None:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    if codings:
        if lengths or [coding.lower() for coding in codings] != [b"chunked"]:
            raise MalformedHead("the length of the body is ambiguous or unknown")
        return "chunked"
    if not lengths:
        return None
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > MAX_BODY_BYTES:
        raise MalformedHead("Content-Length is not a single number of bytes")
    return int(lengths[0])


# The TLS ClientHello, which names the intended server in the clear (RFC 8446, RFC 6066).
#
# A tunnel is opened to one host; a ClientHello with another name would reach another site on the same address. The
# reader is strict: it refuses a hello that it cannot read completely, and an encrypted one (ECH, whose outer name means
# nothing).

MAX_HELLO_BYTES = 64 * 1024

HANDSHAKE, CHANGE_CIPHER_SPEC, APPLICATION_DATA = 22, 20, 23
CLIENT_HELLO, SERVER_HELLO = 1, 2
_MOST_IN_A_RECORD = 16 * 1024 + 256
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_RETRY_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")

UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
"""The alert that ends a handshake for another host name."""


class NotTlsHandshake(ValueError):
    """An error for data that is not a TLS handshake, or cannot be read in the clear."""


class ClientHello(Struct, frozen=True):
    """A TLS ClientHello.

    :param server_name: as the client wrote it; None without one
    :param is_encrypted: whether it contains an encrypted hello
    """

    server_name: str | None
    is_encrypted: bool


def explain_forbidden_client_hello(hello: ClientHello, name: str, *, is_address: bool) -> str | None:
    """Return why a tunnel to the host ``name`` must not carry this hello; None if it may."""
    if hello.is_encrypted:
        return (
            f"The TLS hello is encrypted (ECH), so Handrail cannot check that it is for {name}. Turn off ECH "
            "in the client."
        )
    if hello.server_name is None:
        return (
            None
            if is_address
            else (
                f"The TLS hello names no server (no SNI), and the tunnel was opened to {name}. Use a client that "
                "sends SNI."
            )
        )
    if hello.server_name.lower().removesuffix(".") == name:
        return None
    return (
        f"The TLS hello is for {hello.server_name[:253]!r}, and the tunnel was opened to {name}. Use the "
        "same host for both."
    )


class HandshakeReader:
    """A reader that collects the first handshake message from the records of one side.

    :param kind: the expected type of message
    :param again: whether it is a second hello, before which the client may send early data that the server skips
    """

    def __init__(self, kind: int, *, again: bool = False) -> None:
        self._kind = kind
        self._skipped = (CHANGE_CIPHER_SPEC, APPLICATION_DATA) if again else ()
        self._message = b""
        self.records = b""
        """The complete records that were read, to be forwarded unchanged."""
        self.rest = b""
        """The data after these records."""
        self.body = b""
        """The body of the message, once it is complete."""

    def feed(self, data: bytes) -> bool:
        """Add data, and return whether the message is complete.

        :raises NotTlsHandshake: if it cannot become a handshake message
        """
        self.rest += data
        while (record := self._next_record()) is not None:
            kind, content = record
            if kind == HANDSHAKE:
                self._message += content
                if self._message[0] != self._kind:
                    raise NotTlsHandshake("another handshake message was expected")
                if self._is_complete():
                    return True
            elif self._message:
                raise NotTlsHandshake("the handshake message is interrupted")
        return False

    def _next_record(self) -> tuple[int, bytes] | None:
        """Return the type and content of the next record; None if it is incomplete."""
        if not self.rest:
            return None
        kind = self.rest[0]
        if kind != HANDSHAKE and kind not in self._skipped:
            raise NotTlsHandshake("the data is not a TLS handshake")
        if len(self.rest) < 5:
            return None
        length = int.from_bytes(self.rest[3:5])
        if self.rest[1] != 3 or not 0 < length <= _MOST_IN_A_RECORD:
            raise NotTlsHandshake("the data is not a TLS record")
        if len(self.records) + 5 + length > MAX_HELLO_BYTES:
            raise NotTlsHandshake("the handshake message is too long")
        if len(self.rest) < 5 + length:
            return None
        content, self.records = self.rest[5 : 5 + length], self.records + self.rest[: 5 + length]
        self.rest = self.rest[5 + length :]
        return kind, content

    def _is_complete(self) -> bool:
        size = 4 + int.from_bytes(self._message[1:4])
        if len(self._message) < max(4, size):
            return False
        if len(self._message) > size and self._kind == CLIENT_HELLO:
            raise NotTlsHandshake("data follows the hello in its record")
        self.body = self._message[4:size]
        return True


def parse_hello(body: bytes) -> ClientHello:
    """Parse the body of a ClientHello.

    :raises NotTlsHandshake: if the body is not exactly one
    """
    reader = _HelloReader(body)
    reader.take(2 + 32)  # version, random
    reader.take(reader.number(1))  # session id
    reader.take(reader.number(2))  # cipher suites
    reader.take(reader.number(1))  # compression methods
    if reader.is_fully_consumed:
        return ClientHello(None, False)
    extensions = _HelloReader(reader.take(reader.number(2)))
    reader.require_end()
    server_name: str | None = None
    hidden = False
    seen: set[int] = set()
    while not extensions.is_fully_consumed:
        kind = extensions.number(2)
        data = extensions.take(extensions.number(2))
        if kind in seen:
            raise NotTlsHandshake("the hello has a duplicate extension")
        seen.add(kind)
        if kind == _SERVER_NAME:
            server_name = _parse_server_name(data)
        hidden = hidden or kind == _ENCRYPTED_HELLO
    return ClientHello(server_name, hidden)


def is_hello_retry_request(server_hello: bytes) -> bool:
    """Return whether a ServerHello is a HelloRetryRequest, after which the client sends another hello."""
    return server_hello[2:34] == _RETRY_RANDOM


def _parse_server_name(data: bytes) -> str:
    reader = _HelloReader(data)
    names = _HelloReader(reader.take(reader.number(2)))
    reader.require_end()
    kind = names.number(1)
    name = names.take(names.number(2))
    names.require_end()  # two names would be ambiguous
    if kind != 0 or not name or not name.isascii():
        raise NotTlsHandshake("the server name in the hello is not a host name")
    return name.decode()


class _HelloReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_fully_consumed(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise NotTlsHandshake("the hello is shorter than its length field says")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def require_end(self) -> None:
        if not self.is_fully_consumed:
            raise NotTlsHandshake("data follows the end of the hello")
