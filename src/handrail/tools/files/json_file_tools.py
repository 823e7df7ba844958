"""json_read and json_write: one value of a JSON file, by its JSON Pointer."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import OPEN, EscapedText, neutralise_text
from handrail.contract.text.strict_json import get_json_type_name
from handrail.contract.text.text_encodings import UTF_8, DecodedFileText, TextEncoding, decode_file_text
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.editing_tools import describe_text_format, try_read_for_edit
from handrail.tools.files.lines_and_diffs import (
    convert_line_ends,
    detect_line_end,
    make_diff_of_texts,
    normalise_line_ends,
)
from handrail.tools.files.text_changes import EscapeWarnings
from handrail.tools.tool_declarations import FILE, file_change_spec, file_read_spec, make_closed_object_schema

# Places in a JSON text, by JSON Pointer (RFC 6901): the value there, and the text with another value there. Pure functions.
#
# A change replaces the characters of one value and leaves all others unchanged: order, numbers, blanks and line ends.

_BLANK = compile_regex_lazily(r"[ \t\n\r]*")
_INDENT = compile_regex_lazily(r"[{\[]\n([ \t]+)\S")
_INVALID_BYTE = compile_regex_lazily("[\udc80-\udcff]")
_INDEX = compile_regex_lazily(r"(?:0|[1-9][0-9]{0,17})\Z")


def _reject_constant(name: str) -> Any:
    raise ToolError(f"The file contains {name}, which JSON does not allow. Correct it with edit.", kind="invalid_input")


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    shown = text if len(text) <= 40 else f"a number of {len(text):,} characters"
    text = f"The file contains {shown}, which is too large for a number. Read or change the file as text."
    raise ToolError(text, kind="invalid_input")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    key, count = Counter(key for key, _ in pairs).most_common(1)[0]
    text = f"Key {_short(key)} occurs {count} times in one object. Read or change the file as text."
    raise ToolError(text, kind="invalid_input")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
"""Finds the end of a value."""
_VALUES = json.JSONDecoder(
    parse_constant=_reject_constant, parse_float=_parse_finite, object_pairs_hook=_reject_duplicates
)
"""Decodes a value. It rejects duplicate keys and numbers outside the range, which have no clear meaning."""


MAX_STEPS = 100
"""The most steps of a pointer. Each step reads the value again."""


class JsonValueSpan(NamedTuple):
    """The place of a value: ``text[start:end]``.

    :param depth: the number of objects and lists around it
    """

    start: int
    end: int
    depth: int


class MissingJsonValuePlace(NamedTuple):
    """The place of a missing value: the last step of a pointer leads into ``within`` but to no value.

    :param key: the missing key; None to append to a list
    """

    within: JsonValueSpan
    key: str | None


def parse_json_pointer(pointer: str) -> list[str]:
    """Parse a pointer: ``""`` is the whole value, ``"/a/0"`` the first item of ``a``.

    :raises ToolError: ``invalid_input`` if the text is not a pointer
    """
    if pointer and not pointer.startswith("/"):
        hint = "/" + pointer.removeprefix("$").lstrip(".").replace(".", "/")
        raise ToolError(
            f"`pointer` is invalid: {_short(pointer)}. A JSON Pointer begins with /, such as {_short(hint)}.",
            kind="invalid_input",
        )
    if pointer.count("/") > MAX_STEPS:
        raise ToolError(f"`pointer` has more than {MAX_STEPS} steps. Address an outer value.", kind="invalid_input")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def locate_json_value(text: str, pointer: str) -> JsonValueSpan | MissingJsonValuePlace:
    """Find the value at ``pointer`` in ``text``.

    :raises ToolError: ``invalid_input`` if the text is not JSON, or the pointer leads nowhere
    """
    path = parse_json_pointer(pointer)
    start, end = _find_value(text, _skip_blanks(text, 0))
    if _skip_blanks(text, end) != len(text):
        raise _invalid_json(text, end, "more text follows the value")
    place = JsonValueSpan(start, end, 0)
    for number, step in enumerate(path):
        message = "/".join(("", *path[: number + 1]))
        last = number == len(path) - 1
        if text[place.start] == "{":
            found = [inner for key, inner in _members(text, place) if key == step]
            if not found and OPEN in step:  # as a model saw the key
                found = [inner for key, inner in _members(text, place) if neutralise_text(key) == step]
            if len(found) > 1:
                raise ToolError(
                    f"Key {_short(message)} occurs {len(found)} times. Read or change the file as text.",
                    kind="invalid_input",
                )
            if not found and last:
                return MissingJsonValuePlace(place, step)
            if not found:
                keys = ", ".join(_short(key) for key, _ in list(_members(text, place))[:20])
                raise ToolError(
                    f"No value exists at {_short(message)}. Keys of the object: {keys}.", kind="invalid_input"
                )
            place = found[0]
        elif text[place.start] == "[":
            items = list(_items(text, place))
            if last and step in ("-", str(len(items))):
                return MissingJsonValuePlace(place, None)
            if not _INDEX.match(step) or int(step) >= len(items):
                text = f"No value exists at {_short(message)}. The list has length {len(items)}, counted from 0."
                raise ToolError(text, kind="invalid_input")
            place = items[int(step)]
        else:
            value = _short(text[place.start : place.end])
            text = f"No value exists at {_short(message)}. The outer value is {value}, not an object or a list."
            raise ToolError(text, kind="invalid_input")
    return place


def extract_json_value(text: str, pointer: str) -> Any:
    """Return the value at a pointer.

    :raises ToolError: see :func:`locate_json_value`; also if the value is missing
    """
    place = locate_json_value(text, pointer)
    if isinstance(place, MissingJsonValuePlace):
        outer = text[place.within.start : place.within.end]
        text = f"No value exists at {_short(pointer)}. The outer value is {_short(outer)}."
        raise ToolError(text, kind="invalid_input")
    return _decode_value(_VALUES, text, place.start)[0]


def put_json_value(text: str, pointer: str, value: Any) -> str:
    """Return ``text`` with ``value`` at the pointer: replaced, under a new key, or appended to a list.

    :raises ToolError: see :func:`locate_json_value`
    """
    place = locate_json_value(text, pointer)
    if isinstance(place, JsonValueSpan):
        return text[: place.start] + _format_value(value, text, place.depth) + text[place.end :]
    within = place.within
    inner = _format_value(value, text, within.depth + 1)
    if place.key is not None:
        inner = f"{json.dumps(place.key, ensure_ascii=False)}: {inner}"
    ends = (
        [member.end for _, member in _members(text, within)]
        if place.key is not None
        else [p.end for p in _items(text, within)]
    )
    on_lines = "\n" in text[within.start : within.end] or (not ends and _detect_indent(text) is not None)
    unit, end = _detect_indent(text) or "  ", detect_line_end(text)
    break_ = end + unit * (within.depth + 1) if on_lines else " "
    if ends:
        return text[: ends[-1]] + "," + break_ + inner + text[ends[-1] :]
    opened, closed = text[within.start], text[within.end - 1]
    around = (break_, end + unit * within.depth) if on_lines else ("", "")
    return text[: within.start] + opened + around[0] + inner + around[1] + closed + text[within.end :]


def remove_json_value(text: str, pointer: str) -> str:
    """Return ``text`` without the value at the pointer, its key and its comma.

    :raises ToolError: see :func:`locate_json_value`; also if the value is missing, or is the whole text
    """
    place = locate_json_value(text, pointer)
    if isinstance(place, MissingJsonValuePlace):
        raise ToolError(
            f"No value exists at {_short(pointer)}, so nothing was removed. Read the file, and correct `pointer`.",
            kind="invalid_input",
        )
    if not pointer:
        raise ToolError(
            "The whole value cannot be removed. Write another value, or delete the file.", kind="invalid_input"
        )
    outer = locate_json_value(text, pointer.rpartition("/")[0])
    assert isinstance(outer, JsonValueSpan)
    pieces = list(_find_pieces(text, outer))
    at = next(n for n, piece in enumerate(pieces) if piece[1] == place.end)
    if len(pieces) == 1:
        return text[: outer.start + 1] + text[outer.end - 1 :]
    if at:
        return text[: pieces[at - 1][1]] + text[pieces[at][1] :]
    return text[: pieces[0][0]] + text[pieces[1][0] :]


def _format_value(value: Any, text: str, depth: int) -> str:
    """Format a value as JSON, indented like ``text`` if that has lines."""
    unit = _detect_indent(text)
    if unit is None:
        return json.dumps(value, ensure_ascii=False)
    written = json.dumps(value, ensure_ascii=False, indent=unit).replace("\n", "\n" + unit * depth)
    return convert_line_ends(written, detect_line_end(text))


def _detect_indent(text: str) -> str | None:
    found = _INDENT.search(normalise_line_ends(text))
    return None if found is None else found[1]


def _find_value(text: str, at: int) -> tuple[int, int]:
    return at, _decode_value(_DECODER, text, at)[1]


def _decode_value(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int]:
    """Return the value at a position, and its end."""
    try:
        return decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _invalid_json(text, error.pos, error.msg) from None
    except ValueError:  # Python rejects longer integers, because parsing takes very long
        text = "The JSON contains an integer of more than 4,300 digits. Read or change the file as text."
        raise ToolError(text, kind="invalid_input") from None
    except RecursionError:
        raise ToolError(
            "The JSON is nested too deeply. Read or change the file as text.", kind="invalid_input"
        ) from None


def _invalid_json(text: str, at: int, why: str) -> ToolError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    text = f"The file is not valid JSON: line {line}, column {column}: {why}. Correct it with edit."
    return ToolError(text, kind="invalid_input")


def _members(text: str, place: JsonValueSpan) -> Iterator[tuple[str, JsonValueSpan]]:
    for start, end in _find_pieces(text, place):
        key, after = _key(text, start)
        begin = _skip_blanks(text, _skip_blanks(text, after) + 1)
        yield key, JsonValueSpan(begin, end, place.depth + 1)


def _items(text: str, place: JsonValueSpan) -> Iterator[JsonValueSpan]:
    for start, end in _find_pieces(text, place):
        yield JsonValueSpan(start, end, place.depth + 1)


def _find_pieces(text: str, place: JsonValueSpan) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each member (with its key) or item of a well-formed object or list."""
    at = _skip_blanks(text, place.start + 1)
    while text[at] not in "}]":
        start = at
        if text[place.start] == "{":
            at = _skip_blanks(text, _skip_blanks(text, _key(text, start)[1]) + 1)
        _, end = _find_value(text, at)
        yield start, end
        at = _skip_blanks(text, end)
        if text[at] == ",":
            at = _skip_blanks(text, at + 1)


def _key(text: str, at: int) -> tuple[str, int]:
    key, end = _DECODER.raw_decode(text, at)
    return cast("str", key), end


def _skip_blanks(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    assert blank is not None, "it matches nothing too"
    return blank.end()


def _short(text: str) -> str:
    return quote_text_or_length(text, 80)


MAX_FILE = 4 * 1024 * 1024
_POINTER = {
    "type": "string",
    "maxLength": 10_000,
    "default": "",
    "description": "JSON Pointer of the value, e.g. /servers/0/name. Empty: the whole file",
}


class JsonReadTool(Tool):
    spec = file_read_spec(
        id="json_read",
        description=("Read one value (key, field) of a JSON file, by JSON Pointer. Returns the value and its type."),
        parameters=make_closed_object_schema({"path": FILE, "pointer": _POINTER}, ["path"]),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        found = await runtime.files.read_bytes(args["path"], max_bytes=MAX_FILE)
        if found.size > len(found.data):
            text = f"{found.path} has {found.size:,} bytes. The maximum for JSON is {MAX_FILE:,}. Use grep, or read a part."
            raise ToolError(text, kind="limit")
        pointer: str = args.get("pointer", "")
        file = await asyncio.to_thread(lambda: _read_json_text(found.data))
        value = await asyncio.to_thread(lambda: extract_json_value(file.text, pointer))
        answer = {"path": found.path, "pointer": pointer, "type": get_json_type_name(value), "value": value}
        return answer if file.encoding == UTF_8 else {**answer, "encoding": file.encoding.label}


class JsonWriteTool(Tool):
    spec = file_change_spec(
        id="json_write",
        description=(
            "Set, add or remove one value (key, field) of a JSON file that you have read, e.g. a version in "
            "package.json, by JSON Pointer. `/list/-` appends to a list. Without a pointer, writes the whole "
            "file, which may be new. Returns a unified diff."
        ),
        parameters=make_closed_object_schema(
            {
                "path": FILE,
                "pointer": _POINTER,
                "value": {"description": "New value, any JSON. Required unless `remove` is true"},
                "remove": {"type": "boolean", "default": False, "description": "Remove the value instead"},
            },
            ["path"],
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        if args.get("remove", False) == ("value" in args):
            raise ToolError("Pass either `value` or `remove: true`, but not both.", kind="invalid_input")
        parse_json_pointer(args.get("pointer", ""))

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path, pointer, remove = args["path"], args.get("pointer", ""), args.get("remove", False)
        notes = EscapeWarnings()
        replaces_whole = not pointer and not remove
        if replaces_whole:
            before = await try_read_for_edit(path, runtime, max_bytes=MAX_FILE)
        else:
            before = await runtime.files.read_for_edit(path, max_bytes=MAX_FILE)

        def change() -> tuple[DecodedFileText, str, bytes]:
            file = decode_file_text(before or b"") if replaces_whole else _read_json_text(before or b"")
            if remove:
                text = remove_json_value(file.text, pointer)
            else:
                value = _restore_strings(args["value"], file.text, pointer, notes)
                text = _format_whole(value, file.text) if replaces_whole else put_json_value(file.text, pointer, value)
            text = _escape_missing_characters(text, file.encoding)
            return file, text, file.encoding.encode(text)

        file, text, after = await asyncio.to_thread(change)
        written = await runtime.files.write(path, after, expected="seen" if before is None else before)
        created = written.previous_content is None
        diff = await asyncio.to_thread(lambda: make_diff_of_texts(written.path, file.text, text, created=created))
        return {
            "path": written.path,
            "pointer": pointer,
            "created": created,
            "size": written.size,
            **diff.to_data(),
            **describe_text_format(file, text, notes),
        }


def _escape_missing_characters(text: str, encoding: TextEncoding) -> str:
    """Return a JSON text in which each character that its encoding does not have is a JSON escape."""
    if encoding.codec.startswith("utf-"):
        return text
    for character in set(text):
        if not character.encode(encoding.codec, "ignore"):
            text = text.replace(character, json.dumps(character)[1:-1])
    return text


def _format_whole(value: Any, before: str) -> str:
    """Format a whole file, with the indent, the line ends and the final line end of the old text."""
    text = json.dumps(value, ensure_ascii=False, indent=_detect_indent(before) or 2)
    end = "" if before.strip() and not before.endswith(("\n", "\r")) else "\n"
    return convert_line_ends(text + end, detect_line_end(before))


def _restore_strings(value: Any, before: str, pointer: str, notes: EscapeWarnings) -> Any:
    """Return a value with the escapes in its texts restored that a model copied from the old value, or from the file."""
    if OPEN not in json.dumps(value, ensure_ascii=False):
        return value
    try:
        place = locate_json_value(before, pointer)
        whole, _ = _decode_value(_VALUES, before, _skip_blanks(before, 0))
        old = None if isinstance(place, MissingJsonValuePlace) else _decode_value(_VALUES, before, place.start)[0]
    except ToolError:
        whole = old = None
    near = "\n".join(_list_strings(old))
    view = EscapedText("\n".join((near, *_list_strings(whole))))

    def restore(item: Any) -> Any:
        if isinstance(item, str):
            return notes.take(view.restore_copied_escapes(item, 0, len(near)))
        if isinstance(item, dict):
            return {restore(key): restore(one) for key, one in cast("dict[str, Any]", item).items()}
        return [restore(one) for one in cast("list[Any]", item)] if isinstance(item, list) else item

    return restore(value)


def _list_strings(value: Any) -> Iterator[str]:
    """Yield each text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield key
            yield from _list_strings(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _list_strings(item)


def _read_json_text(data: bytes) -> DecodedFileText:
    file = decode_file_text(data)
    if file.encoding.is_utf8 and (invalid := _INVALID_BYTE.search(file.text)) is not None:
        start = len(UTF_8.encode(file.text[: invalid.start()]))
        text = f"The file is not valid JSON: byte {start} is not UTF-8. Check that `path` is a JSON file."
        raise ToolError(text, kind="invalid_input")
    return file
