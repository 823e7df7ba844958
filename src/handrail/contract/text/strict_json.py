"""Strict, bounded JSON parsing of arguments, in the text that a model or a shell sends."""

from __future__ import annotations

import copy
import itertools
import json
import math
import operator
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, cast

import orjson

from handrail.contract.errors import quote_text_or_length
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.text_encodings import decode_settings_text

MAX_ARGUMENT_BYTES = 512 * 1024
MAX_ARGUMENT_VALUES = 20_000
"""JSON values in the arguments of a call, keys not counted. Each step of a call visits all of them."""
MAX_ARGUMENT_DEPTH = 64
_STRING = compile_regex_lazily(r'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)', re.DOTALL)
"""Possessive, and a string may end with the text: so every position is read once, for any text."""
_STRING_OR_NEXT = compile_regex_lazily(rf"{_STRING.pattern}|[,\[{{]", re.DOTALL)
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class InvalidJsonTextError(ValueError):
    """A text that is not acceptable JSON. ``str()`` says what was wrong and what was expected."""


class PreparsedArgumentText(str):
    """The text of arguments with its parsed value.

    :func:`parse_arguments`, :func:`try_parse_model_json_fast` and :func:`parse_arguments_fast` return a copy of the value instead of parsing
        again. Each caller gets its own copy: a tool may change it, and the history keeps the arguments of the model.
    """

    __slots__ = ("_compact", "_value", "note")

    _compact: bytes | None
    _value: dict[str, Any]
    note: str
    """The difference from JSON; ``""`` for JSON."""

    @staticmethod
    def parse(text: str) -> PreparsedArgumentText:
        """Parse ``text``.

        :raises InvalidJsonTextError: if :func:`parse_arguments` rejects it
        """
        made = PreparsedArgumentText(text)
        quick = try_parse_model_json_fast(text)
        (made._value, made.note), made._compact = (
            (_parse_unwrapped(text), None) if quick is None else ((quick[0], ""), quick[1])
        )
        return made

    @property
    def compact_json(self) -> bytes | None:
        """The compact JSON of the value; None if only the strict parser could read the text."""
        return self._compact

    def copy_parsed_value(self) -> dict[str, Any]:
        value = self._value
        if not any(type(member) is dict or type(member) is list for member in value.values()):
            return value.copy()  # the usual case
        return copy.deepcopy(value) if self._compact is None else orjson.loads(self._compact)


def parse_arguments(text: str | bytes, *, max_bytes: int = MAX_ARGUMENT_BYTES) -> dict[str, Any]:
    """Parse a JSON object; see :func:`parse_json_object` for what is rejected.

    Empty text is an empty object: several providers send it for a tool without parameters. A string may contain a raw line
    feed or tab, which several models write instead of the escape. An object may be encoded twice, as a JSON string, or be in a
    Markdown fence.

    :raises InvalidJsonTextError: if the text is rejected
    """
    if type(text) is PreparsedArgumentText:
        return text.copy_parsed_value()
    return _parse_unwrapped(text, max_bytes)[0]


def parse_arguments_with_note(text: str | bytes) -> tuple[dict[str, Any], str]:
    """Parse a JSON object as :func:`parse_arguments` does, or text that is almost JSON and has one reading.

    Use it where the note is reported, because nothing may be read silently as what it is not.

    :return: the object, and what was different from JSON; ``""`` for JSON
    :raises InvalidJsonTextError: if the text is rejected
    """
    if type(text) is PreparsedArgumentText:
        return text.copy_parsed_value(), text.note
    try:
        return _parse_unwrapped(text)
    except InvalidJsonTextError:
        if len(text) > MAX_ARGUMENT_BYTES:
            raise
        with suppress(InvalidJsonTextError, UnicodeDecodeError):
            decoded = text.decode() if isinstance(text, bytes) else text
            if (rewritten := _rewrite_as_json_object(decoded)) is not None:
                return _parse_with_limits(rewritten[0], MAX_ARGUMENT_BYTES), f"almost JSON ({rewritten[1]})"
        raise


def _parse_unwrapped(text: str | bytes, max_bytes: int = MAX_ARGUMENT_BYTES) -> tuple[dict[str, Any], str]:
    stripped = text.strip()
    if not stripped:
        return {}, ""
    note = ""
    if isinstance(stripped, str) and stripped[:1] in "`\ufeff" and (fenced := _FENCED.match(stripped)) is not None:
        text, note = fenced[1], "JSON text with other text around it"
    if stripped[:1] in ('"', b'"') and len(text) <= max_bytes and (inner := _parse_inner_object(stripped)) is not None:
        text, note = inner, "an object encoded as a JSON string"
    try:
        return parse_json_object(text, max_bytes=max_bytes, max_values=MAX_ARGUMENT_VALUES), note
    except InvalidJsonTextError:
        value = _parse_with_limits(text, max_bytes)
        return value, note or "JSON text with raw control characters in strings"


def _parse_with_limits(text: str | bytes, max_bytes: int) -> dict[str, Any]:
    return parse_json_object(text, max_bytes=max_bytes, max_values=MAX_ARGUMENT_VALUES, raw_controls=True)


_FENCED = compile_regex_lazily(r"(?s)\ufeff?(?:```(?:json)?\s*)?(\{.*\})(?:\s*```)?\Z")


def _parse_inner_object(text: str | bytes) -> str | None:
    """Return the text of an object that is encoded in a JSON string, or None if it is another string."""
    try:
        inner: Any = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(inner, str) and inner.startswith('"'):
        return _parse_inner_object(inner)
    return inner if isinstance(inner, str) and inner.lstrip().startswith("{") else None


# Arguments that are almost JSON, rewritten as JSON if they have only one reading.
#
# The strict parser reads the rewritten text, so its limits and its refusals hold for it too. Nothing is added to a text that
# was cut: an open bracket or string stays an error.

_MAX_REWRITTEN = 64 * 1024
_NOTHING = frozenset({"null", "none", '""', "''"})
"""Texts of a call without arguments, in lower case."""
_LEAD = compile_regex_lazily(
    r"\s*(?:\ufeff|(?:```|~~~)[\w+-]*|<(?:tool_call|function_call|arguments|parameters|json)>|json(?=\s*\{))\s*"
)
_TAIL = compile_regex_lazily(
    r"(?:```|~~~|</(?:tool_call|function_call|function|arguments|parameters|parameter|json|s)>|<\|[\w▁]{1,40}\|>|<｜[^｜]{1,40}｜>|[;,])\Z"
)
_LONGEST_TAIL = 64
_MOST_WRAPPERS = 8
_MOST_TOKENS = 20_000
_REWRITTEN_TOKEN = compile_regex_lazily(
    r"""(?sx) (?P<double>"(?:[^"\\]++|\\.)*+") | (?P<single>'(?:[^'\\]++|\\.)*+') | (?P<space>\s+)
    | (?P<comment>//[^\n]*+|/\*.*?\*/) | (?P<word>[A-Za-z_$][\w$]*+) | (?P<number>-?\d[\w.+-]*+) | (?P<mark>[{}\[\],:])"""
)
_COLON = compile_regex_lazily(r"\s*:")
_ESCAPE_OR_QUOTE = compile_regex_lazily(r'(?s)\\(.)|"')
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def _rewrite_as_json_object(text: str) -> tuple[str, str] | None:
    """Return the JSON of an object that is almost JSON, and what was different; None if there is no single reading."""
    if len(text) > _MAX_REWRITTEN:
        return None
    inner = text.strip().strip("\ufeff").strip()
    if inner.lower() in _NOTHING:
        return "{}", "no arguments"
    changes: dict[str, None] = {}
    for _ in range(_MOST_WRAPPERS):
        if (lead := _LEAD.match(inner)) is not None and lead.end():
            inner, changes["other text around it"] = inner[lead.end() :], None
        inner, end = inner.rstrip(), inner.rstrip()[-_LONGEST_TAIL:]
        if (tail := _TAIL.search(end)) is not None:
            inner, changes["other text around it"] = inner[: len(inner) - len(end) + tail.start()], None
    values = _read_values(inner, changes)
    if len(values) > 1 and "{}" in values:
        values.remove("{}")
        changes["an empty object next to it"] = None
    if len(values) != 1 or not changes:
        return None
    return values[0], ", ".join(changes)


def _read_values(text: str, changes: dict[str, None]) -> list[str]:
    """Return the JSON of each object in a row, without repetitions; empty if the text has anything else.

    :param changes: receives what was different
    """
    values: list[str] = []
    pieces: list[str] = []
    depth, comma, at, earlier, left = 0, "", 0, "", _MOST_TOKENS
    while at < len(text):
        left -= 1
        if not left or depth > MAX_ARGUMENT_DEPTH or len(values) > 2:
            return []
        if (token := _REWRITTEN_TOKEN.match(text, at)) is None:
            return []
        at, piece, kind = token.end(), token[0], token.lastgroup or ""
        if kind == "comment":
            changes["comments"] = None
        if kind in ("comment", "space"):
            continue
        is_opening, is_closing = piece in ("{", "["), piece in ("}", "]")
        if (depth == 0 and not is_opening) or {kind, earlier} <= {"word", "number"}:
            return []
        earlier = kind
        if piece == "," and not comma:
            comma = ","
            continue
        if comma and is_closing:
            changes["a trailing comma"] = None
        else:
            pieces.append(comma)
        comma = ""
        pieces.append(_rewrite_token(kind, piece, text, at, changes))
        depth += is_opening - is_closing
        if depth == 0:
            value = "".join(pieces)
            if value.startswith("[{") and value.endswith("}]"):
                value, changes["a list around it"] = value[1:-1], None
            if value in values:
                changes["the same object again"] = None
            else:
                values.append(value)
            pieces.clear()
    return [] if depth else values


def _rewrite_token(kind: str | None, piece: str, text: str, end: int, changes: dict[str, None]) -> str:
    if kind == "single":
        changes["single quotes"] = None
        return f'"{_ESCAPE_OR_QUOTE.sub(_rewrite_escape, piece[1:-1])}"'
    if kind == "double" and "\\'" in piece:
        rewritten = f'"{_ESCAPE_OR_QUOTE.sub(_rewrite_escape, piece[1:-1])}"'
        if rewritten != piece:
            changes["escaped single quotes"] = None
        return rewritten
    if kind == "word":
        if _COLON.match(text, end):
            changes["names without quotes"] = None
            return f'"{piece}"'
        if piece in _WORDS and _WORDS[piece] != piece:
            changes["the constants of Python"] = None
        return _WORDS.get(piece, piece)
    return piece


def _rewrite_escape(found: re.Match[str]) -> str:
    if found[0] == '"':
        return '\\"'
    return "'" if found[1] == "'" else found[0]


def parse_json_object(
    text: str | bytes,
    *,
    what: str = "the arguments",
    max_bytes: int = MAX_ARGUMENT_BYTES,
    max_depth: int = MAX_ARGUMENT_DEPTH,
    max_values: int | None = None,
    raw_controls: bool = False,
) -> dict[str, Any]:
    """Parse one JSON object.

    Rejected, each with its own message: more than ``max_bytes`` or ``max_values``, nesting deeper than ``max_depth``,
    duplicate keys, NaN and infinities, invalid UTF-8, half surrogate pairs, and anything that is not one object.

    :param what: the subject of the messages, in the plural
    :param raw_controls: whether strings may contain control characters that JSON requires to be escaped
    :raises InvalidJsonTextError: if the text is rejected
    """
    if len(text) > max_bytes:
        raise InvalidJsonTextError(
            f"{what} are too large: {len(text):,} bytes. The maximum is {max_bytes:,} bytes. Make them smaller, or refer to a file"
        )
    try:
        decoded = decode_settings_text(text) if isinstance(text, bytes) else text
        if not decoded.isascii():
            decoded.encode()
        check_nesting_depth(decoded, max_depth)
        if max_values is not None:
            _check_number(decoded, max_values)
        value: Any = (_LENIENT_DECODER if raw_controls else _DECODER).decode(decoded)
        if isinstance(value, dict) and ("\\ud" in decoded or "\\uD" in decoded):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidJsonTextError(f"{what} are not UTF-8 (byte {error.start}); send JSON encoded as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidJsonTextError(
            f"{what} are not JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}; {_find_json_advice(error)}"
        ) from None
    except InvalidJsonTextError as error:
        raise InvalidJsonTextError(f"{what} {error}") from None
    except UnicodeEncodeError:
        raise InvalidJsonTextError(_LONE_SURROGATE.format(what=what)) from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise InvalidJsonTextError(
            f"{what} contain a number that cannot be read: {error}; send a shorter number"
        ) from None
    if not isinstance(value, dict):
        raise InvalidJsonTextError(
            f'{what} are a JSON {get_json_type_name(value)}; expected an object such as {{"path": "…"}}'
        )
    return value  # pyright: ignore[reportUnknownVariableType] - a cast is a call, and this is the way of each one


def _find_json_advice(error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Extra data"):
        return "send one JSON object and nothing after it; a further object is a further call"
    if error.msg.startswith("Invalid \\"):
        return "write each backslash in a string as two"
    if error.pos >= len(error.doc.rstrip()):
        return "the text ends too early; send the whole JSON object"
    return "send one JSON object"


def _check_number(text: str, max_values: int) -> None:
    if compute_value_count_bound(text, max_values) > max_values:
        raise InvalidJsonTextError(
            f"contain more than {max_values:,} values; split the call into several, or pass the path of a file"
        )


def get_json_type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (list, tuple)):
        return "array"
    return "object" if isinstance(value, dict) else type(value).__name__


def check_nesting_depth(text: str, limit: int = MAX_ARGUMENT_DEPTH) -> None:
    """Check the depth of nesting before a recursive parser sees the text.

    :raises InvalidJsonTextError: if the text nests deeper than ``limit``
    """
    if text.count("[") + text.count("{") <= limit:
        return
    brackets = _STRING.sub("", text).encode("utf-8", "replace").translate(_AS_SQUARE, _NO_BRACKET)
    opened = itertools.accumulate(map(len, brackets.split(b"]")))  # before each closing bracket, and before the end
    if (
        max(map(operator.sub, opened, itertools.count())) > limit
    ):  # unclosed brackets count too: a parser would recurse into them
        raise InvalidJsonTextError(f"are nested deeper than {limit} levels; flatten them")


def compute_value_count_bound(text: str, enough: int) -> int:
    """Return an upper bound of the number of values in a JSON text.

    The count stops just past ``enough``. It is exact only if a rough count exceeds ``enough``.
    """
    rough = text.count(",") + text.count("[") + text.count("{") + 1
    if rough <= enough:
        return rough
    count = 1
    for token in _STRING_OR_NEXT.finditer(text):
        if text[token.start()] != '"':
            count += 1
            if count > enough:
                break
    return count


def find_arguments_size_fault(arguments: Mapping[str, Any]) -> str | None:
    """Return why a program's arguments exceed the limits of a call, or None.

    The check does not write them as JSON.
    """
    values = characters = 0
    rest: list[Any] = [arguments]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            keyed = cast("Mapping[Any, Any]", one)
            members: Collection[Any] = keyed.values()
            for key in keyed if len(keyed) <= MAX_ARGUMENT_VALUES else ():
                characters += len(key) if isinstance(key, str) else 0
        else:
            members = cast("Collection[Any]", one)
        values += len(members)
        if values > MAX_ARGUMENT_VALUES:
            return f"the arguments contain more than {MAX_ARGUMENT_VALUES:,} values; split the call into several, or pass the path of a file"
        for member in members:
            if isinstance(member, str):
                characters += len(member)
            elif isinstance(member, (dict, list, tuple)):
                rest.append(member)
        if characters > MAX_ARGUMENT_BYTES:
            return (
                f"the arguments have more than {characters:,} characters; the maximum is {MAX_ARGUMENT_BYTES:,} bytes. "
                "Pass the path of a file instead"
            )
    return None


_LONE_SURROGATE = "{what} contain half of a surrogate pair (\\udXXX), which is not a character; send whole characters"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = sorted({key for key, _ in pairs if key in seen or seen.add(key)})
        raise InvalidJsonTextError(
            f"contain duplicate keys in one object: {', '.join(quote_text_or_length(k, 80) for k in twice[:5])}; use each key once"
        )
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    shown = text if len(text) <= 40 else f"a number of {len(text):,} characters"
    raise InvalidJsonTextError(f"contain {shown}, which is too large for a number; send a smaller one")


def _no_constant(name: str) -> Any:
    raise InvalidJsonTextError(f"contain {name}, which is not JSON; use a number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
_LENIENT_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, strict=False
)
"""Made once: ``json.loads`` with hooks makes a decoder for every text."""


def try_parse_model_json_fast(text: str | bytes) -> tuple[dict[str, Any], bytes] | None:
    """Parse text in the usual form of models quickly, and return the object with its compact JSON.

    The compact JSON must equal the text, except for one space after the colon of a name and before a name. So nothing
    was dropped or changed: no name is there twice, and every number is exact.

    :return: None if only :func:`~handrail.contract.text.strict_json.parse_arguments` can decide; it returns an equal object
        for every text that is accepted here
    """
    if type(text) is PreparsedArgumentText:
        return None if text.compact_json is None else (text.copy_parsed_value(), text.compact_json)
    if len(text) > MAX_ARGUMENT_BYTES:
        return None
    try:
        value = orjson.loads(text)
        compact = orjson.dumps(value)
    except (ValueError, TypeError):
        return None
    given = text.encode() if isinstance(text, str) else text
    if compact != given and compact != given.replace(b'": ', b'":').replace(b', "', b',"'):
        return None
    if type(value) is not dict:
        return None
    if len(compact) > 2 * MAX_ARGUMENT_VALUES and find_arguments_size_fault(cast("dict[str, Any]", value)):
        return None
    if len(compact) > MAX_ARGUMENT_DEPTH and compact.count(b"[") + compact.count(b"{") > MAX_ARGUMENT_DEPTH:
        return None
    return value, compact  # pyright: ignore[reportUnknownVariableType]


def parse_arguments_fast(text: str | bytes) -> dict[str, Any]:
    """Return the value of :func:`~handrail.contract.text.strict_json.parse_arguments`, the quick way if possible.

    :raises InvalidJsonTextError: if the text is rejected
    """
    return parse_arguments(text) if (quick := try_parse_model_json_fast(text)) is None else quick[0]


_encode_slowly = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
"""Made once: ``json.dumps`` makes an encoder for every text."""


def encode_canonical_json(value: object) -> bytes:
    """Return the JSON of a value with sorted keys and no spaces, which is the same for equal values."""
    try:
        return orjson.dumps(value, None, orjson.OPT_SORT_KEYS)
    except TypeError:  # half a surrogate pair, or a very large integer
        return _encode_slowly(value).encode("utf-8", "surrogatepass")
