"""HTTP/1 heads, read the strict way: what two readers could take apart differently is refused.

So nothing can be smuggled past the proxy: lines end in CRLF, a head has one meaning of where its body ends, names are
tokens, no value has control characters, and nothing is continued on a next line (RFC 9112).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MAX_HEAD_BYTES = 32 * 1024
MAX_FIELDS = 128
MAX_BODY_BYTES = 1 << 40

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")

_ONE_HOP = frozenset(
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
"""What is between two neighbours only; the framing is written anew."""

Fields = list[tuple[bytes, bytes]]
Framing = int | Literal["chunked", "to the end"]
"""The length of a body, or how its end is seen."""


class Malformed(ValueError):
    """A head, or a body's framing, that is not strictly HTTP/1."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """:param framing: how much of a body follows
    :param old: whether it is HTTP/1.0
    """

    method: str
    target: str
    fields: Fields
    framing: int | Literal["chunked"]
    old: bool


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """:param line: the status line without its end"""

    line: bytes
    status: int
    fields: Fields
    framing: Framing


def read_request(head: bytes) -> RequestHead:
    """:param head: up to and including the empty line
    :raises Malformed: saying what it is not"""
    line, fields = _lines(head)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Malformed("its first line is not 'METHOD TARGET HTTP/1.1'")
    framing = _framing(fields)
    old = match[3] == b"0"
    if old and framing == "chunked":
        raise Malformed("an HTTP/1.0 request cannot be chunked")
    if sum(name == b"host" for name, _ in fields) > 1:
        raise Malformed("it has more than one Host")
    return RequestHead(match[1].decode(), match[2].decode(), fields, 0 if framing is None else framing, old)


def read_response(head: bytes, method: str) -> ResponseHead:
    """:param method: of the request that it answers
    :raises Malformed: saying what it is not"""
    line, fields = _lines(head)
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise Malformed("its first line is no HTTP/1 status line")
    status = int(match[1])
    framing = _framing(fields)
    if method == "HEAD" or status < 200 or status in (204, 304):
        return ResponseHead(line, status, fields, 0)
    return ResponseHead(line, status, fields, "to the end" if framing is None else framing)


def passed_on(fields: Fields) -> Fields:
    """``fields`` without what concerns one connection only."""
    named = {
        part.strip().lower()
        for name, value in fields
        if name in (b"connection", b"proxy-connection")
        for part in value.split(b",")
    }
    return [(name, value) for name, value in fields if name not in _ONE_HOP and name not in named]


def written(line: bytes, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A head as it goes over a connection."""
    return b"\r\n".join((line, *(name + b": " + value for name, value in fields), b"", b""))


def read_chunk_size(line: bytes) -> int:
    """The length of the next chunk, from its line without its end.

    :raises Malformed: for anything but hexadecimal digits and extensions
    """
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise Malformed("a chunk does not begin with its length")
    return int(match[1], 16)


def _lines(head: bytes) -> tuple[bytes, Fields]:
    first, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(rest) > MAX_FIELDS:
        raise Malformed(f"it has more than {MAX_FIELDS} fields")
    fields: Fields = []
    for line in rest:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Malformed("one of its fields has no name, or characters that none can have")
        fields.append((name.lower(), value))
    return first, fields


def _framing(fields: Fields) -> int | Literal["chunked"] | None:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    if codings:
        if lengths or [coding.lower() for coding in codings] != [b"chunked"]:
            raise Malformed("it says in two ways, or in an unknown one, where its body ends")
        return "chunked"
    if not lengths:
        return None
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > MAX_BODY_BYTES:
        raise Malformed("its Content-Length is no single number of bytes")
    return int(lengths[0])
