"""JSON-RPC messages as text: what a server's line, body or event contains, and what Handrail sends.

Servers are other people's programs. Their text may have a banner before a message, half of a surrogate pair, or numbers that JSON
does not have. Such text costs the odd character at most, and never the message or the connection.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

import orjson

Message = dict[str, Any]

MAX_BATCH_MESSAGES = 100
"""The most messages in one list."""
_MAX_BEGINNINGS = 3
_REPLACEMENT = "\ufffd"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ANSWER = re.compile(rb'\A\s*\{\s*"(?:jsonrpc|id|result|error)"\s*:')
_BEGINNING = re.compile(r'\{\s*"(?:jsonrpc|id|method|result|error|params)"\s*:|\[\s*\{\s*"(?:jsonrpc|id)"\s*:')
"""Where a message begins in a line that has other text before it."""


def parse_json_rpc_messages(text: bytes) -> list[Message]:
    """Return the messages of a line, an HTTP body or an event; an empty list if it contains none.

    Only objects of JSON-RPC 2.0 with a method, a result or an error are messages.
    """
    found = _parse_json(text)
    several = cast("list[Any]", found)[:MAX_BATCH_MESSAGES] if isinstance(found, list) else [found]
    return [cast("Message", one) for one in several if _is_message(one)]


def is_rpc_message(text: bytes) -> bool:
    """Return whether a text is exactly one message in strict JSON."""
    try:
        return _is_message(orjson.loads(text))
    except orjson.JSONDecodeError:
        return False


def looks_like_rpc_response(text: bytes) -> bool:
    """Return whether a text begins like an answer, and not like a line of a log."""
    return _ANSWER.match(text) is not None


def is_truncated_rpc_response(text: bytes) -> bool:
    """Return whether a text is an answer that broke off, so that its request waits for no other."""
    return looks_like_rpc_response(text) and _parse_json(text) is None


def encode_message(message: Message) -> bytes:
    """Return a message as JSON. Half of a surrogate pair becomes U+FFFD."""
    try:
        return orjson.dumps(message)
    except TypeError:
        return _encode_any_text(message)


def _encode_any_text(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _LONE_SURROGATE.sub(_REPLACEMENT, text).encode()


def _is_message(one: object) -> bool:
    if not isinstance(one, dict):
        return False
    fields = cast("dict[str, Any]", one)
    return fields.get("jsonrpc") in ("2.0", 2) and (
        isinstance(fields.get("method"), str) or "result" in fields or fields.get("error") is not None
    )


def _parse_json(text: bytes) -> object:
    """Return the value of a JSON text, or the list of the messages in any other text; None without any."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    loose, position, failures = text.decode("utf-8", "replace"), 0, 0
    found: list[object] = []
    while failures < _MAX_BEGINNINGS and len(found) < MAX_BATCH_MESSAGES:
        if (match := _BEGINNING.search(loose, position)) is None:
            break
        try:
            value, position = _LENIENT.raw_decode(loose, match.start())
            mended: object = orjson.loads(_encode_any_text(value))
            found += cast("list[object]", mended) if isinstance(mended, list) else [mended]
        except (ValueError, RecursionError):
            position, failures = match.end(), failures + 1
    return found or None


def _ignore_constant(_: str) -> None:
    return None


def _read_float(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text


def _read_integer(text: str) -> int | str:
    return int(text) if len(text) < _MAX_DIGITS else text


_MAX_DIGITS = 300
_LENIENT = json.JSONDecoder(
    strict=False, parse_constant=_ignore_constant, parse_float=_read_float, parse_int=_read_integer
)
"""A decoder for text that is not quite JSON: NaN becomes null, control characters are text, and a number that is too large
becomes its text."""
