"""The views of an output for the user, the model and the log, and its neutralised form for the model."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import orjson

from handrail.contract.calls_and_results import Result
from handrail.contract.text.neutralisation import find_characters_to_escape, may_need_escaping, neutralise_text
from handrail.contract.tool.spec import ToolSpec

# Neutralisation: dangerous characters in foreign text are spelled out for the model
# (:mod:`handrail.contract.text.neutralisation`), counted and flagged.
#
# Users, programs, the log, artifacts and sidecars get the original text.

NEUTRALISED_KEY = "neutralised"
"""The metadata key with the number of neutralised places by kind."""


def neutralise_for_model(result: Result, encoded: bytes | None = None) -> Result:
    """Return ``result`` with active, hidden and deceptive characters spelled out in data, error text and metadata.

    The same object is returned if there are none.

    :param encoded: the JSON of its data, if known
    """
    counts: Counter[str] = Counter()
    data = result.data
    # The check of the encoded bytes is one native scan. Most outputs contain nothing to spell out and need no walk.
    if data is not None and may_need_escaping(orjson.dumps(data) if encoded is None else encoded):
        data = _neutralise_value(data, counts)
    if (error_text := result.error_text) is not None:
        error_text = _neutralise_text(error_text, counts)
    metadata = cast("dict[str, Any]", result.metadata)
    if may_need_escaping(orjson.dumps(metadata, default=str)):
        metadata = _neutralise_value(metadata, counts)
    if not counts:
        return result
    return Result(result.type, data, error_text, {**metadata, NEUTRALISED_KEY: dict(sorted(counts.items()))})


def _neutralise_value(value: Any, counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return _neutralise_text(value, counts)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        walked = {_neutralise_text(key, counts): _neutralise_value(item, counts) for key, item in members.items()}
        # Keys that become equal would overwrite each other: a list of pairs keeps all of them.
        return (
            walked if len(walked) == len(members) else {"pairs": [list(pair) for pair in _neutralise_members(members)]}
        )
    if isinstance(value, (list, tuple)):
        return [_neutralise_value(item, counts) for item in cast("list[Any]", value)]
    return value


def _neutralise_members(members: dict[str, Any]) -> list[tuple[str, Any]]:
    unused: Counter[str] = Counter()
    return [(_neutralise_text(key, unused), _neutralise_value(item, unused)) for key, item in members.items()]


def _neutralise_text(text: str, counts: Counter[str]) -> str:
    if not (pieces := find_characters_to_escape(text)):
        return text
    counts.update(piece.kind for piece in pieces)
    return neutralise_text(text)


SEEN_BY_MODEL = frozenset({"both", "core"})
SEEN_BY_FRONTEND = frozenset({"both", "edge"})
MAX_SUMMARY = 500
"""Characters."""

_OF_THE_CALL = frozenset(
    {
        "duration_ms",
        "lock_wait_ms",
        "sandbox",
        "error_kind",
        "still_running",
        "stopped_by",
        "replayed",
        "log_error",
        "untrusted_source",
        "job_id",
        "skipped_locks",
    }
)
"""Metadata about the call."""
_OF_THE_OUTPUT = frozenset(
    {
        "truncated",
        "output_path",
        "output_bytes",
        "omitted_bytes",
        "omitted_at",
        "entries",
        "omitted_entries",
        "output_save_error",
        "artifact",
    }
)
"""Metadata about the place and size of the output."""


def make_audience_results(spec: ToolSpec, result: Result) -> tuple[Result, Result]:
    """Return ``result`` as the frontend and as the model may see it, by the tool's exposure and mask."""
    at_face = result if spec.exposure in SEEN_BY_FRONTEND else _hidden_result(spec, result, "the user")
    if spec.exposure not in SEEN_BY_MODEL:
        return at_face, neutralise_for_model(_hidden_result(spec, result, "the model"))
    return at_face, neutralise_for_model(_masked_result(result) if spec.prompt_mask else result)


def _hidden_result(spec: ToolSpec, result: Result, audience: str) -> Result:
    """Return the result without its output, for an audience that may not see it."""
    # An allow-list: a tool may put parts of its output into its own metadata, which must stay hidden as well.
    known = {key: value for key, value in result.metadata.items() if key in _OF_THE_CALL}
    known["hidden_by"] = f"exposure: {spec.exposure}"
    data = {"summary": f"The tool ran. Its output is not shown to {audience}."} if result.ok else None
    return Result(result.type, data, result.error_text, known)


def _masked_result(result: Result) -> Result:
    """Return the result with a summary and the place of its output, for a prompt that leaves the output out."""
    known = {key: value for key, value in result.metadata.items() if key in _OF_THE_CALL or key in _OF_THE_OUTPUT}
    known["hidden_by"] = "prompt_mask"
    whole: object = result.data
    data: dict[str, Any] | None = None
    if whole is not None:
        # A tool that masks its output knows best how to sum it up, so its own summary goes first.
        own = cast("dict[str, object]", whole).get("summary") if isinstance(whole, dict) else None
        summary = (
            own[:MAX_SUMMARY]
            if isinstance(own, str)
            else f"The output ({_describe_kind(result.data)}) is kept out of the prompt."
        )
        data = {"summary": summary, "artifact": result.metadata.get("artifact")}
    return Result(result.type, data, result.error_text, known)


def _describe_kind(data: object) -> str:
    if isinstance(data, str):
        return f"a text of {len(data)} characters"
    return "an object" if isinstance(data, dict) else "a list" if isinstance(data, list) else "one value"
