"""The views of an output for the user, the model and the log, and its neutralised form for the model."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import orjson

from handrail.contract.call import Result
from handrail.contract.text.neutral import found, may_have_any, neutralised
from handrail.contract.tool.spec import ToolSpec

# Neutralisation: dangerous characters in foreign text are spelled out for the model
# (:mod:`handrail.contract.text.neutral`), counted and flagged.
#
# Users, programs, the log, artifacts and sidecars get the original text.

FLAG = "neutralised"
"""In the metadata: how many places of which kind were spelled out."""


def for_model(result: Result, encoded: bytes | None = None) -> Result:
    """``result`` with what acts, hides or imitates spelled out in data, error text and metadata; the same object where
    there is nothing of it.

    :param encoded: the JSON of its data, where that is at hand
    """
    counts: Counter[str] = Counter()
    data = result.data
    if data is not None and may_have_any(orjson.dumps(data) if encoded is None else encoded):
        data = _walked(data, counts)
    error_text = result.error_text
    if error_text is not None:
        error_text = _text(error_text, counts)
    metadata = cast("dict[str, Any]", result.metadata)
    if may_have_any(orjson.dumps(metadata, default=str)):
        metadata = _walked(metadata, counts)
    if not counts:
        return result
    return Result(result.type, data, error_text, {**metadata, FLAG: dict(sorted(counts.items()))})


def _walked(value: Any, counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return _text(value, counts)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        walked = {_text(key, counts): _walked(item, counts) for key, item in members.items()}
        # Keys that are shown alike would hide one another: as a list of pairs all of them stay.
        return walked if len(walked) == len(members) else {"pairs": [list(pair) for pair in _pairs(members)]}
    if isinstance(value, (list, tuple)):
        return [_walked(item, counts) for item in cast("list[Any]", value)]
    return value


def _pairs(members: dict[str, Any]) -> list[tuple[str, Any]]:
    unused: Counter[str] = Counter()
    return [(_text(key, unused), _walked(item, unused)) for key, item in members.items()]


def _text(text: str, counts: Counter[str]) -> str:
    pieces = found(text)
    if not pieces:
        return text
    counts.update(piece.kind for piece in pieces)
    return neutralised(text)


SEEN_BY_MODEL = frozenset({"both", "core"})
SEEN_AT_FACE = frozenset({"both", "edge"})
MAX_SUMMARY = 500
"""Characters."""

_OF_THE_CALL = frozenset(
    {
        "duration_ms",
        "lock_wait_ms",
        "confined_by",
        "error_kind",
        "still_running",
        "stopped_by",
        "recorded",
        "unrecorded",
        "untrusted",
        "job",
        "not_locked",
    }
)
"""Metadata on how the call went."""
_OF_THE_OUTPUT = frozenset(
    {
        "truncated",
        "output_path",
        "output_bytes",
        "omitted_bytes",
        "entries",
        "omitted_entries",
        "output_lost",
        "artifact",
    }
)
"""Metadata on where the output is and how large."""


def views(spec: ToolSpec, result: Result) -> tuple[Result, Result]:
    """``result`` as the face and as the model may see it, by the tool's exposure and mask."""
    at_face = result if spec.exposure in SEEN_AT_FACE else _hidden(spec, result, "the people at the face")
    if spec.exposure not in SEEN_BY_MODEL:
        return at_face, for_model(_hidden(spec, result, "the model"))
    return at_face, for_model(_masked(result) if spec.prompt_mask else result)


def _hidden(spec: ToolSpec, result: Result, audience: str) -> Result:
    """What one side is told of an output that is not meant for it: that there is one, and how the call went."""
    known = {key: value for key, value in result.metadata.items() if key in _OF_THE_CALL}
    known["withheld"] = f"exposure: {spec.exposure}"
    data = {"summary": f"The tool ran. Its output is not shown to {audience}."} if result.ok else None
    return Result(result.type, data, result.error_text, known)


def _masked(result: Result) -> Result:
    """What a prompt has of an output that is kept out of prompts: a summary, and where the output is."""
    known = {key: value for key, value in result.metadata.items() if key in _OF_THE_CALL or key in _OF_THE_OUTPUT}
    known["withheld"] = "prompt_mask"
    whole: object = result.data
    data: dict[str, Any] | None = None
    if whole is not None:
        own = cast("dict[str, object]", whole).get("summary") if isinstance(whole, dict) else None
        summary = (
            own[:MAX_SUMMARY]
            if isinstance(own, str)
            else f"The output ({_kind(result.data)}) is kept out of the prompt."
        )
        data = {"summary": summary, "artifact": result.metadata.get("artifact")}
    return Result(result.type, data, result.error_text, known)


def _kind(data: object) -> str:
    if isinstance(data, str):
        return f"a text of {len(data)} characters"
    return "an object" if isinstance(data, dict) else "a list" if isinstance(data, list) else "one value"
