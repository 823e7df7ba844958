"""Idempotency keys: a call proposed again under the same durable key gets the recorded answer and does not run twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from handrail.arbiter.calls.call import Call
from handrail.arbiter.output.exposure import views
from handrail.arbiter.output.shaper import Shaper
from handrail.contract.call import Answer
from handrail.contract.result import Result
from handrail.record.log import CommitLog
from handrail.record.reading import LoggedRecord

_MAY_PASS = frozenset({"unavailable", "cancelled", "timeout"})
"""Kinds of refusals that a later try need not meet: a full disk, a stop, a lock that was not to be had in time."""


def recorded_result(outcome: LoggedRecord) -> Result | None:
    """What a call gave, by the record that ended it; None where that was removed or is damaged."""
    wire: Any = (outcome.body or {}).get("result")
    if not isinstance(wire, Mapping):
        return None
    told = cast("Mapping[str, Any]", wire)
    sound = (
        told.get("type") in ("output", "error")
        and isinstance(told.get("error_text") or "", str)
        and isinstance(told.get("metadata", {}), Mapping)
    )
    return Result.from_dict(told) if sound else None


class Repeats:
    """Looks a call's key up in the log."""

    def __init__(self, log: CommitLog, shaper: Shaper) -> None:
        self._log = log
        self._shaper = shaper

    async def answer_to(self, call: Call) -> Answer | None:
        """What was answered before under the key that is this call's durable id, or None."""
        before = await self._log.proposal_of(call.id)
        outcome = await self._log.detachment_of(call.id) or await self._log.outcome_of(call.id)
        if before is None or outcome is None:
            return None  # never proposed, or proposed and not begun
        body = outcome.body
        if before.body is not None and before.body.get("key_hash") != self.key_hash(call):
            kind, text = "conflict", "was used before with another tool or arguments; use a new key"
        elif outcome.kind == "interrupted":
            kind, text = (
                "interrupted",
                "was begun before and nobody knows how it ended; it is not run again. Look at what it did, then use a new key",
            )
        elif body is None:
            kind, text = (
                "unavailable",
                "was answered before and its result has been removed from the log; use a new key",
            )
        elif (recorded := recorded_result(outcome)) is None:
            kind, text = (
                "unavailable",
                "was answered before and what was recorded of that is damaged; it is not run again. "
                "Look at what it did, then use a new key",
            )
        elif outcome.kind == "refused" and recorded.error_kind in _MAY_PASS:
            return None  # nothing was run, and what stood in the way may be over
        else:
            result = recorded.with_metadata(recorded=True)
            entry = call.generation.resolve(before.tool or call.proposed.name)  # of a step: the tool that was open
            at_face, model = (result, result) if entry is None else views(entry.spec, result)
            return Answer(call.id, call.proposed.name, at_face, model)
        result = call.answer_error(kind, f"the key of call {call.id} {text}")
        return Answer(call.id, call.proposed.name, result, result)

    def key_hash(self, call: Call) -> str:
        proposed = call.proposed
        entry = call.generation.resolve(proposed.name)
        return self._shaper.hash([entry.spec.id if entry else proposed.name, proposed.arguments])
