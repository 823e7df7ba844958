"""Who sees what of an output: the people at the face, the lane's model, both, or the log alone."""

from __future__ import annotations

from typing import Any, cast

from handrail.arbiter.output.neutral import for_model
from handrail.contract.result import Result
from handrail.contract.tool.spec import ToolSpec

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
