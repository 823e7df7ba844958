"""A proposed call's arguments: as the object that is checked and run, and as they go on record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson

from handrail.arbiter.secrets.redaction import Redactor
from handrail.contract.call import ProposedCall
from handrail.contract.text.json import (
    MAX_ARGUMENT_BYTES,
    ArgumentText,
    fault_in_size,
    json_type,
    parse_arguments,
    parse_compact,
)
from handrail.store.encoding import decode, encode

_MAX_LOOKED_AT = 64 * 1024
"""Bytes of it that are read as text."""
MAX_NUMBERED = 20_000
"""Characters that arguments write by their number, as HTML does. A look for secrets takes 0.5 µs for each, on the loop."""
_MAX_HEAD = 2_000
"""Characters that are kept of text which is no JSON."""


def arguments_of(proposed: ProposedCall) -> tuple[dict[str, Any] | None, bytes | None, str]:
    """The arguments as an object, their compact JSON where it is known already, and what is wrong where there is none."""
    given: Any = proposed.arguments
    if proposed.fault is not None:
        return None, None, proposed.fault
    if isinstance(given, (str, bytes)):
        if (quick := parse_compact(given)) is not None:
            return *quick, ""
        try:
            return parse_arguments(given), None, ""
        except ArgumentText as error:
            return None, None, str(error)
    if isinstance(given, Mapping):
        sent = cast("Mapping[str, Any]", given)
        if fault := fault_in_size(sent):
            return None, None, fault
        return (sent if isinstance(sent, dict) else dict(sent)), None, ""
    return None, None, f"the arguments are a JSON {json_type(given)}; expected an object"


def unrun(given: Any, redactor: Redactor) -> Any:
    """Arguments that no tool gets, as they go on record: the head of what is text, for whoever asks what was sent, and the
    kind alone of what is too much."""
    if isinstance(given, (str, bytes)):
        text = given if isinstance(given, str) else given[:_MAX_LOOKED_AT].decode("utf-8", "replace")
        return {"unparsed": redactor.head(text, _MAX_HEAD)}
    if isinstance(given, (Mapping, list, tuple)) and fault_in_size(cast("Mapping[str, Any]", given)):
        return {"$oversized": json_type(cast("object", given))}
    return given  # pyright: ignore[reportUnknownVariableType] - whatever it is, it is only recorded


def for_the_record(arguments: Any, compact: bytes | None, redactor: Redactor) -> tuple[Any, str | None]:
    """The arguments as they go on record, redacted and out of reach of a tool that changes its own; and what is wrong
    where they are too much to be kept whole.

    :param compact: their JSON, where it is known
    """
    plain = True
    if compact is None:
        try:
            compact = orjson.dumps(arguments)
        except TypeError:  # half surrogate pairs, huge integers, depth, cycles: the log keeps what it can of them
            compact, plain = encode(arguments, max_bytes=2**62), False
    if len(compact) > MAX_ARGUMENT_BYTES:
        size = f"{len(compact):,} bytes of JSON; at most {MAX_ARGUMENT_BYTES:,} are taken"
        return {"$oversized": len(compact)}, f"the arguments are {size}. Pass a path to a file instead"
    if redactor.active and (numbered := compact.count(b"&#")) > MAX_NUMBERED:
        count = f"{numbered:,} characters by their number (&#…;); at most {MAX_NUMBERED:,} are taken"
        return {"$oversized": len(compact)}, f"the arguments write {count}. Send the characters themselves"
    if not plain:
        arguments = decode(compact)
    if redactor.active and not (plain and not redactor.found_in(compact)):
        return redactor.value(arguments), None
    # A copy: what orjson gives keeps a buffer of 4 KB alive for as long as the record waits.
    return (orjson.Fragment(bytes(memoryview(compact))) if plain else arguments), None
