"""What is known of each call of the tour: its answer, and what the commit log says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from handrail import CallAnswer, LoggedRecord, Result, RunOutcome

Decision = Literal["allowed", "approved", "denied", "withheld"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One call, answered.

    :param label: the script's name for it
    :param records: what the log holds of it, in order
    """

    label: str
    answer: CallAnswer
    records: Sequence[LoggedRecord]

    @property
    def result(self) -> Result:
        return self.answer.result

    def field(self, name: str) -> Any:
        """A member of the result's data; None where it has no such member."""
        data: object = self.result.data
        return cast("dict[str, Any]", data).get(name) if isinstance(data, dict) else None

    def record(self, kind: str) -> LoggedRecord | None:
        return next((record for record in self.records if record.kind == kind), None)

    def sequence(self, kind: str) -> int | None:
        """Where in the log its record of this kind stands."""
        record = self.record(kind)
        return None if record is None else record.sequence

    def noted(self, kind: str, name: str) -> Any:
        """A member of its record of this kind; None where there is none."""
        record = self.record(kind)
        return None if record is None or record.body is None else record.body.get(name)

    @property
    def refused(self) -> bool:
        """Refused before anything ran: the log has a refusal and no intent."""
        return self.record("rejected") is not None and self.record("intended") is None

    @property
    def decision(self) -> Decision:
        if self.refused:
            return "withheld" if self.result.error_kind == "unavailable" else "denied"
        return "approved" if self.noted("authorised", "by") == "person" else "allowed"

    @property
    def why(self) -> str:
        """What decided, as recorded, without repeating what was decided about."""
        if self.refused:
            return self.result.error_text or ""
        if self.decision == "approved":
            return f"{self.noted('approval-requested', 'reason')} A scripted person said: once."
        reason = str(self.noted("authorised", "reason") or "")
        return f"by {deciding}" if (deciding := reason.partition(" is allowed by ")[2]) else reason

    @property
    def locks(self) -> list[str]:
        """The locks it ran under, as recorded: ``workspace/shop/pricing.py:X``."""
        return [str(lock) for lock in cast("list[object]", self.noted("intended", "locks") or [])]

    @property
    def lock_wait_ms(self) -> float:
        return float(self.result.metadata.get("lock_wait_ms", 0))


@dataclass(slots=True)
class Facts:
    """The whole run."""

    calls: dict[str, Fact] = field(default_factory=dict[str, Fact])
    proposed: int = 0
    """Calls that the model made."""
    answered: int = 0
    """Answers that came back to the loop."""
    outcome: RunOutcome | None = None
    unplayed: int = 0
    """Turns of the script that the run did not come to."""
    sidecar: str | None = None
    """The file with the whole of the truncated output, read while its session was open."""

    def locks_of(self, label: str) -> list[str]:
        fact = self.calls.get(label)
        return [] if fact is None else fact.locks

    def result_of(self, label: str) -> Result | None:
        fact = self.calls.get(label)
        return None if fact is None else fact.result
