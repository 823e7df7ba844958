"""The wire form of a tool's values: they arrive as if tool and arbiter ran in the same process.

The process of the tool converts results to plain values (:mod:`handrail.arbiter.output.json_conversion`), so that the other side needs
none of its classes. Binary parts are sent next to the data, each with its path, so that data cannot be mistaken for a binary
part. A bytes value alone is ``{"$bytes": "<base64>"}``, the standard form of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from handrail.arbiter.output.json_conversion import (
    MAX_PARTS,
    BinaryPart,
    JsonConversion,
    ValueTooLarge,
    encode_if_plain_json,
)
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.errors import ERROR_KINDS, LogUnavailable, ToolError
from handrail.contract.json_codec import MalformedDataError, expect_json_list, expect_json_object, reader_of
from handrail.ipc.wire.message_frames import Message

INLINE_PARTS = 2_000
"""The maximum number of parts of a value that are packed on the event loop; larger values are packed in a thread."""

_read_text, _read_bytes = reader_of(str), reader_of(bytes)

# ── results ──────────────────────────────────────────────────────────────────────────────────────


def encode_return_value(value: object, max_parts: int = MAX_PARTS) -> Message:
    """Encode the return value of a tool as a message.

    :raises ValueTooLarge: if it has more than ``max_parts`` parts
    """
    if not isinstance(value, Result):
        return _pack_data(value, max_parts)
    packed = _pack_data(value.data, max_parts)
    packed["result"] = {
        "type": "error" if value.type == "error" else "output",
        "error_text": None if value.error_text is None else _as_text(value.error_text),
        "metadata": JsonConversion(dict(value.metadata), max_parts).data,
    }
    return packed


def _pack_data(value: object, max_parts: int) -> Message:
    if (encoded := encode_if_plain_json(value)) is not None:
        return {"data": orjson.Fragment(encoded)}
    plain = JsonConversion(value, max_parts)
    packed: Message = {"data": plain.data}
    if plain.binaries:
        packed["blobs"] = _locate_binaries(plain.data, plain.binaries)
    if plain.notes:
        extra = [f"and {plain.more_notes} more"] if plain.more_notes else []
        packed["notes"] = [*plain.notes, *extra]
    return packed


def _locate_binaries(data: Any, binaries: Sequence[BinaryPart]) -> list[list[Any]]:
    """Return each binary part with the path to its place."""
    wanted = {id(binary.placeholder): binary for binary in binaries}
    found: list[list[Any]] = []
    to_look: list[tuple[list[str | int], Any]] = [([], data)]
    while to_look:
        way, value = to_look.pop()
        if (binary := wanted.get(id(value))) is not None:
            found.append([way, binary.data, binary.media_type])
        elif isinstance(value, dict):
            to_look += [([*way, key], inner) for key, inner in cast("dict[str, Any]", value).items()]
        elif isinstance(value, list):
            to_look += [([*way, index], inner) for index, inner in enumerate(cast("list[Any]", value))]
    return found


def decode_return_value(message: object) -> object:
    """Decode a value that :func:`encode_return_value` encoded: the data with its blobs, or a :class:`Result`.

    It is a :class:`Result` if the tool returned one, or if there are notes about converted values.

    :raises MalformedDataError: if :func:`encode_return_value` cannot have produced the message
    """
    packed = expect_json_object(message)
    if "data" not in packed:
        raise MalformedDataError("a packed value has no data")
    data = packed["data"]
    for blob in expect_json_list(packed.get("blobs", [])):
        data = _insert_blob(data, expect_json_list(blob))
    metadata: dict[str, Any] = {}
    if "notes" in packed:
        metadata["conversions"] = [_read_text(note) for note in expect_json_list(packed["notes"])]
    if (result := packed.get("result")) is None:
        return Result("output", data, None, metadata) if metadata else data
    fields = expect_json_object(result)
    if fields.get("type") not in ("output", "error"):
        raise MalformedDataError(f"a result's type is {str(fields.get('type'))[:40]!r}; expected output or error")
    value = fields.get("error_text")
    return Result(
        fields["type"],
        data,
        None if value is None else _read_text(value),
        {**expect_json_object(fields.get("metadata", {})), **metadata},
    )


def _insert_blob(data: Any, located: list[Any]) -> Any:
    if len(located) != 3:
        raise MalformedDataError("expected a binary part as path, bytes and media type")
    way = expect_json_list(located[0])
    blob = Blob(_read_bytes(located[1]), _read_text(located[2]))
    if not way:
        return blob
    inner = data
    try:
        for step in way[:-1]:
            inner = inner[_check_step(step, inner)]
        last = _check_step(way[-1], inner)
        inner[last]  # raises if the place does not exist
        inner[last] = blob
    except (KeyError, IndexError, TypeError):
        raise MalformedDataError(f"a binary part has no place in the data: {way[:8]!r:.200}") from None
    return data


def _check_step(step: object, inside: object) -> Any:
    if (type(step) is str and isinstance(inside, dict)) or (type(step) is int and isinstance(inside, list)):
        return step
    raise KeyError


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def encode_tool_error(error: BaseException) -> Message:
    """Encode an error: a :class:`ToolError` completely, any other error by its class and text."""
    if isinstance(error, LogUnavailable):  # reported as the arbiter reports it in its own process
        error = ToolError(str(error), kind="unavailable")
    if not isinstance(error, ToolError):
        return {"raised": [type(error).__name__, _as_text(error)]}
    fields: Message = {"kind": error.kind if error.kind in ERROR_KINDS else "failed", "text": _as_text(error.text)}
    if error.data is not None:
        try:
            fields["data"] = encode_return_value(error.data)
        except (ValueTooLarge, MemoryError) as reason:
            fields["data"] = encode_return_value(f"<partial output cannot be shown ({type(reason).__name__})>")
    return {"error": fields}


def decode_tool_error(message: Mapping[str, Any]) -> Exception | None:
    """Decode the error of a message for raising it here; return None if the message has none.

    An error that is not a :class:`ToolError` becomes an exception of a new class with the same name and text.

    :raises MalformedDataError: if :func:`encode_tool_error` cannot have produced the message
    """
    if "error" in message:
        fields = expect_json_object(message["error"])
        kind = _read_text(fields.get("kind"))
        data = None if fields.get("data") is None else decode_return_value(fields["data"])
        return ToolError(
            _read_text(fields.get("text")),
            kind=kind if kind in ERROR_KINDS else "failed",  # pyright: ignore[reportArgumentType]
            data=data.data if isinstance(data, Result) else data,
        )
    if "raised" not in message:
        return None
    raised = expect_json_list(message["raised"])
    if len(raised) != 2:
        raise MalformedDataError("expected an exception as class name and text")
    name, error_text = _read_text(raised[0]), _read_text(raised[1])
    return type(name if name.isidentifier() else "Exception", (_RemoteException,), {})(error_text)


class _RemoteException(Exception):
    """An exception that was raised in another process."""


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # its own code runs here
        return f"<{type(value).__name__}: {type(error).__name__}>"
