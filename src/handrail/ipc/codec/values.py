"""A tool's values on their way between two processes: they arrive as if tool and arbiter were in one.

What a tool returns is made plain where it ran (:mod:`handrail.arbiter.output.plain`), so that no class of its has to exist on
the other side. Binary parts travel beside the data, each with its place, so nothing in the data can be mistaken for
one. Single bytes are ``{"$bytes": "<base64>"}``, which is how the wire writes them by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from handrail.arbiter.output.plain import MAX_PARTS, Binary, Plain, TooLarge, encoded_as_it_is
from handrail.contract.call import Blob, Result
from handrail.contract.codec import Malformed, a_list, an_object, reader_of
from handrail.contract.errors import ERROR_KINDS, LogUnavailable, ToolError
from handrail.ipc.wire.framing import Message

INLINE_PARTS = 2_000
"""How many parts of a value are gone through on the event loop; more are a thread's work."""

_text, _some_bytes = reader_of(str), reader_of(bytes)

# ── results ──────────────────────────────────────────────────────────────────────────────────────


def pack(value: object, max_parts: int = MAX_PARTS) -> Message:
    """Whatever a tool returned, as a message.

    :raises TooLarge: when it has more parts than that
    """
    if not isinstance(value, Result):
        return _pack_data(value, max_parts)
    packed = _pack_data(value.data, max_parts)
    packed["result"] = {
        "type": "error" if value.type == "error" else "output",
        "error_text": None if value.error_text is None else _as_text(value.error_text),
        "metadata": Plain(dict(value.metadata), max_parts).data,
    }
    return packed


def _pack_data(value: object, max_parts: int) -> Message:
    if (encoded := encoded_as_it_is(value)) is not None:
        return {"data": orjson.Fragment(encoded)}
    plain = Plain(value, max_parts)
    packed: Message = {"data": plain.data}
    if plain.binaries:
        packed["blobs"] = _located(plain.data, plain.binaries)
    if plain.notes:
        extra = [f"and {plain.more_notes} more"] if plain.more_notes else []
        packed["notes"] = [*plain.notes, *extra]
    return packed


def _located(data: Any, binaries: Sequence[Binary]) -> list[list[Any]]:
    """Each binary part with the way to its place."""
    wanted = {id(binary.place): binary for binary in binaries}
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


def unpack(message: object) -> object:
    """The inverse of :func:`pack`: data with its blobs in it, or a :class:`Result` where one was returned or where
    something is to be said about what was changed.

    :raises Malformed: for what :func:`pack` never makes
    """
    packed = an_object(message)
    if "data" not in packed:
        raise Malformed("a packed value has no data")
    data = packed["data"]
    for blob in a_list(packed.get("blobs", [])):
        data = _with_blob(data, a_list(blob))
    metadata: dict[str, Any] = {}
    if "notes" in packed:
        metadata["adapted"] = [_text(note) for note in a_list(packed["notes"])]
    if (result := packed.get("result")) is None:
        return Result("output", data, None, metadata) if metadata else data
    told = an_object(result)
    if told.get("type") not in ("output", "error"):
        raise Malformed(f"a result's type is {str(told.get('type'))[:40]!r}; expected output or error")
    said = told.get("error_text")
    return Result(
        told["type"], data, None if said is None else _text(said), {**an_object(told.get("metadata", {})), **metadata}
    )


def _with_blob(data: Any, located: list[Any]) -> Any:
    if len(located) != 3:
        raise Malformed("a binary part is not its way, its bytes and its media type")
    way = a_list(located[0])
    blob = Blob(_some_bytes(located[1]), _text(located[2]))
    if not way:
        return blob
    inner = data
    try:
        for step in way[:-1]:
            inner = inner[_step(step, inner)]
        last = _step(way[-1], inner)
        inner[last]  # it takes the place of something
        inner[last] = blob
    except (KeyError, IndexError, TypeError):
        raise Malformed(f"a binary part has no place in the data: {way[:8]!r:.200}") from None
    return data


def _step(step: object, inside: object) -> Any:
    if (type(step) is str and isinstance(inside, dict)) or (type(step) is int and isinstance(inside, list)):
        return step
    raise KeyError


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def of_failure(error: BaseException) -> Message:
    """A :class:`ToolError` with all it says, anything else by its class and text: its traceback would not help."""
    if isinstance(error, LogUnavailable):  # told as the arbiter tells it where nobody has joined
        error = ToolError(str(error), kind="unavailable")
    if not isinstance(error, ToolError):
        return {"raised": [type(error).__name__, _as_text(error)]}
    told: Message = {"kind": error.kind if error.kind in ERROR_KINDS else "failed", "text": _as_text(error.text)}
    if error.data is not None:
        try:
            told["data"] = pack(error.data)
        except (TooLarge, MemoryError) as reason:
            told["data"] = pack(f"<partial output that cannot be shown ({type(reason).__name__})>")
    return {"error": told}


def failure_of(message: Mapping[str, Any]) -> Exception | None:
    """The inverse of :func:`of_failure`, to raise here; None where the message tells of none.

    What is no :class:`ToolError` becomes an exception of a class by the same name, which reads as the original would.

    :raises Malformed: for what :func:`of_failure` never makes
    """
    if "error" in message:
        told = an_object(message["error"])
        kind = _text(told.get("kind"))
        data = None if told.get("data") is None else unpack(told["data"])
        return ToolError(
            _text(told.get("text")),
            kind=kind if kind in ERROR_KINDS else "failed",  # pyright: ignore[reportArgumentType]
            data=data.data if isinstance(data, Result) else data,
        )
    if "raised" not in message:
        return None
    raised = a_list(message["raised"])
    if len(raised) != 2:
        raise Malformed("an exception is not its class and its text")
    name, said = _text(raised[0]), _text(raised[1])
    return type(name if name.isidentifier() else "Exception", (_Elsewhere,), {})(said)


class _Elsewhere(Exception):
    """Raised in another process."""


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # its own code runs here
        return f"<{type(value).__name__}: {type(error).__name__}>"
