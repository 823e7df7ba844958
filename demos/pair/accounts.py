"""Whether everything is really there: looked up in the repository, the channels, the conversations and the log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from demos.pair.parts import FIRST, FIXER, REPORTS, REVIEWER, SECOND, WATCH, WORK
from demos.tour.effects import Effect, survivors
from demos.tour.project import PRICING_BUG, PRICING_FIX, RECEIPT_BUG, RECEIPT_FIX, Project
from handrail import LogReader, LogVerification

if TYPE_CHECKING:
    from demos.pair.guide import Worker


def effects(
    place: Project, reviewer: Worker, fixer: Worker, reader: LogReader, verification: LogVerification
) -> list[Effect]:
    """With the kernel closed."""
    return [
        _tests(reviewer, "before", "the tests fail at first", 1, "FAILED (failures=2)"),
        _not_its_own(reviewer),
        _woken(fixer),
        _messages(reader),
        _tests(fixer, "first-test", "the fixer's test of the first change passes, in its sandbox", 0, "OK"),
        _tests(fixer, "second-test", "and that of the second", 0, "OK"),
        _tests(reviewer, "after", "all tests pass at the end", 0, "OK"),
        _diff(place),
        _whose(reviewer, fixer, reader),
        _commit(place, reviewer),
        _told(reader, reviewer, fixer),
        *(_ended(worker) for worker in (reviewer, fixer)),
        _one_outcome(reviewer, fixer, reader),
        Effect("the commit log is intact", verification.ok, str(verification)),
        _nobody_left(place),
    ]


def _tests(worker: Worker, label: str, name: str, code: int, said: str) -> Effect:
    fact = worker.facts.calls.get(label)
    if fact is None:
        return Effect(name, False, "they were not run")
    last = str(fact.field("output")).rstrip().rpartition("\n")[2]
    confined = fact.result.metadata.get("sandbox") not in (None, "none", "runtime")
    so = fact.field("exit_code") == code and last == said and confined
    return Effect(name, so, f"{fact.result.to_dict()}")


def _not_its_own(reviewer: Worker) -> Effect:
    fact = reviewer.facts.calls.get("own")
    so = fact is not None and fact.refused
    return Effect("the reviewer could not change the file itself", so, "the log has no such refusal")


def _woken(fixer: Worker) -> Effect:
    """Each by one notice of its trigger, with another message."""
    told = [(notice.kind, notice.source) for notice in fixer.heard]
    so = told == [("trigger", WATCH)] * 2 and len({notice.id for notice in fixer.heard}) == 2
    so = so and all(work in notice.text for work, notice in zip((FIRST, SECOND), fixer.heard, strict=False))
    return Effect("each piece of work woke the fixer, once", so, f"{told}")


def _messages(reader: LogReader) -> Effect:
    sql = "SELECT channel, consumed, body FROM channel_message WHERE scope = '' ORDER BY number"
    kept = [(channel, taken, json.loads(body)["sender"]) for channel, taken, body in reader.connection.execute(sql)]
    there = (WORK.partition("/")[2], 1, REVIEWER)
    back = (REPORTS.partition("/")[2], 1, FIXER)
    return Effect("four messages went over the channels, each taken", kept == [there, back] * 2, f"{kept}")


def _diff(place: Project) -> Effect:
    lines = place.diff(committed=True).splitlines()
    changed = {
        line[0] + line[1:].strip() for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
    }
    wanted = {f"-{PRICING_BUG}", f"+{PRICING_FIX}"}
    so = wanted < changed and len(changed) == 4
    so = so and any(RECEIPT_BUG in line for line in changed) and any(RECEIPT_FIX in line for line in changed)
    return Effect("exactly the two wrong lines are changed", so, f"{sorted(changed)}")


def _whose(reviewer: Worker, fixer: Worker, reader: LogReader) -> Effect:
    edits = Counter((row.session_id, row.state) for row in reader.calls(limit=10_000) if row.tool == "edit")
    so = edits == {(fixer.session.id, "output"): 2, (reviewer.session.id, "rejected"): 1}
    return Effect("both edits were the fixer's", so, f"{dict(edits)}")


def _commit(place: Project, reviewer: Worker) -> Effect:
    fact = reviewer.facts.calls.get("commit")
    commits = place.git("rev-list", "--count", f"{place.base}..HEAD").strip()
    so = fact is not None and fact.result.ok and commits == "1"
    return Effect("the reviewer made one commit of it", so, f"{commits} commits; {fact and fact.result.to_dict()}")


def _told(reader: LogReader, reviewer: Worker, fixer: Worker) -> Effect:
    """What each conversation, as it is kept, holds of the other's words."""
    said = {worker.name: _conversation(reader, worker.session.id) for worker in (reviewer, fixer)}
    lacking = [FIXER for text in (FIRST, SECOND) if text not in said[FIXER]]
    lacking += [REVIEWER] * (2 - min(said[REVIEWER].count("ends with exit code 0"), 2))
    return Effect("the conversations hold what was handed over", not lacking, f"missing in that of {lacking}")


def _conversation(reader: LogReader, session_id: str) -> str:
    rows = reader.connection.execute("SELECT body FROM message WHERE session = ? ORDER BY position", (session_id,))
    texts = [json.loads(body) for (body,) in rows]
    heard = [str(text["text"]) for text in texts if text.get("notices")]
    results = [str(one["text"]) for text in texts for one in cast("list[Mapping[str, Any]]", text.get("results") or [])]
    return "\n".join((*heard, *results))


def _ended(worker: Worker) -> Effect:
    outcome, left = worker.facts.outcome, worker.facts.unplayed
    so = outcome is not None and outcome.ok and left == 0
    how = "it did not come to an end" if outcome is None else f"{outcome.status}: {outcome.detail}"
    return Effect(f"the {worker.name}'s script was played to its end", so, f"{how}; {left} turns are left")


def _one_outcome(reviewer: Worker, fixer: Worker, reader: LogReader) -> Effect:
    made = sum(worker.facts.proposed for worker in (reviewer, fixer))
    answered = sum(worker.facts.answered for worker in (reviewer, fixer))
    proposed = Counter(record.call_id for record in reader.records(kind="proposed"))
    ended = Counter(
        record.call_id for kind in ("committed", "rejected", "interrupted") for record in reader.records(kind=kind)
    )
    so = made == answered == proposed.total() and proposed == ended and set(ended.values()) == {1}
    found = f"{made} made, {answered} answered; in the log {proposed.total()} and {ended.total()}"
    return Effect("every call has one answer, and one outcome on record", so, found)


def _nobody_left(place: Project) -> Effect:
    left = survivors(place.folder)
    return Effect("with the kernel closed no process is left", not left, "; ".join(left))
