"""Calls to tools whose schema the model has not seen: what the refusal tells it when the arguments do not fit.

Whether a tool is in view decides nothing about its calls. But arguments that were guessed are answered with the schema that
they were guessed of, and a tool that wants its manual read first is not run before.
"""

from __future__ import annotations

from typing import Any

import orjson

from handrail.arbiter.calls.call import Call, Refusal
from handrail.catalog.manuals import READER
from handrail.contract.tool.names import wire_name

MAX_SCHEMA = 32 * 1024
"""Bytes of JSON; of a larger schema only the way to it is told."""


def near(call: Call) -> str:
    """What a call to a tool that there is not may have meant."""
    catalog, name = call.lane.catalog, call.proposed.name
    if awaited := call.generation.awaited(name):
        return awaited
    close = call.generation.nearest(name) if catalog is None else catalog.near(call.generation, name)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return call.generation.awaited(name, else_any=True) or "no tool has a name like it."


def unseen(call: Call) -> dict[str, Any]:
    """What goes with the refusal of arguments to a tool that the model has not seen: its schema, once. From its next request
    on the model has the tool in view. Nothing where it has seen it."""
    entry, catalog = call.entry, call.lane.catalog
    assert entry is not None
    if catalog is None or call.parent is not None or call.proposed.fault is not None:
        return {}
    if catalog.was_shown(call.generation, entry.id):
        return {}
    catalog.bring(call.generation, (entry.id,))
    told: dict[str, Any] = {"tool": entry.id, "description": entry.spec.description}
    if len(orjson.dumps(entry.spec.parameters, default=str)) <= MAX_SCHEMA:
        told["parameters"] = dict(entry.spec.parameters)
    else:
        told["manual"] = f"the schema is long: {_reading(entry.id)} shows it"
    details: dict[str, Any] = {"data": call.redactor.value(told) if call.redactor.active else told}
    if entry.untrusted:
        details["untrusted"] = f"it comes from {entry.untrusted}"
    return details


async def read_first(call: Call) -> None:
    """Go on only if the session has read the tool's manual. What a tool calls is its author's matter.

    :raises Refusal: ``conflict``, with the call that reads it; or, where the agent cannot read it, with the manual
    :raises LogUnavailable: when it cannot be told what was read
    """
    entry, catalog = call.entry, call.lane.catalog
    assert entry is not None
    if catalog is None or catalog.manuals is None or call.parent is not None or await catalog.manuals.has(entry):
        return
    reader = call.generation.resolve(READER)
    if reader is not None and reader.withheld is None:
        text = (
            f"{entry.id} wants its manual read first: {_reading(entry.id)}, then make this call again. Nothing was run"
        )
        raise Refusal("validate", "conflict", text, manual_first=entry.id)
    await catalog.manuals.note(entry)
    text = f"{entry.id} wants its manual read first, and here it is: make this call again if it still is right"
    raise Refusal("validate", "conflict", text, data={"manual": call.redactor.text(entry.spec.documentation)})


def _reading(tool_id: str) -> str:
    return f'call {wire_name(READER)} with {{"tool": "{tool_id}"}}'
