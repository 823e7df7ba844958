"""The result of a call whose answer was lost, read from the log. Nothing is run."""

from __future__ import annotations

from handrail.arbiter.calls.repeats import recorded_result
from handrail.arbiter.delegating import naming
from handrail.arbiter.output.exposure import views
from handrail.arbiter.output.shaper import Shaper
from handrail.contract.call import Answer
from handrail.contract.doors.agents import Tree
from handrail.contract.generation import Generation
from handrail.contract.result import Result
from handrail.record.log import CommitLog

_INTERRUPTED = (
    "Handrail ended while this call was running, and nobody knows how far it came; it is not run again. "
    "Look at what it did before you do anything like it"
)
_NOT_BEGUN = "Handrail ended before this call began, so it had no effect; call again if that is still wanted"
_NO_RECORD = (
    "Handrail ended before anything about this call was on record: as far as is known it did not run. "
    "Look before you call again"
)
_REMOVED = "what this call gave has been removed from the log, or is damaged there; call again if it is still needed"
_ANOTHERS = (
    "this call was proposed in the session that this one was forked from, and has no answer there yet; here it is not run. "
    "Call again if that is wanted"
)
_TOOL_GONE = "this call has ended, but its tool is not there any more, and so nobody can tell what may be shown of it"


async def recalled(
    log: CommitLog, shaper: Shaper, generation: Generation, session_id: str, call_id: str, tree: Tree | None = None
) -> Answer:
    """The answer to a call by what is on record.

    :param session_id: whose history it is part of
    :param generation: has the tool, which says what its model may see of a result
    :param tree: knows whom it handed work to
    :raises LogUnavailable: when the log cannot tell
    """
    proposal = await log.proposal_of(call_id)
    # A job is what its proposer was answered, whatever has become of it since.
    outcome = await log.detachment_of(call_id) or await log.outcome_of(call_id)
    tool = (proposal.tool if proposal is not None else None) or ""
    if outcome is None and proposal is not None and proposal.session_id != session_id:
        result = Result.error("cancelled", _ANOTHERS, recorded=True)
    elif outcome is None:
        # A call with side effects does not begin before its intent is durable, so what is only proposed had none. Where
        # nothing at all is on record, records may also have been purged.
        result = _ended(_NO_RECORD) if proposal is None else Result.error("cancelled", _NOT_BEGUN, recorded=True)
    elif outcome.kind == "interrupted":
        result = naming(_ended(_INTERRUPTED), () if tree is None else tree.begun_by(session_id, call_id))
    elif (recorded := recorded_result(outcome)) is None:
        result = Result.error("unavailable", _REMOVED, recorded=True)
    else:
        found = recorded.with_metadata(recorded=True)
        if outcome.kind in ("refused", "detached"):  # its text is the kernel's own
            return Answer(call_id, tool, found, found)
        entry = generation.resolve(tool)
        if entry is not None:
            return Answer(call_id, tool, *views(entry.spec, found))
        return Answer(call_id, tool, found, Result.error("unavailable", _TOOL_GONE, recorded=True))
    return Answer(call_id, tool, result, result)


def _ended(text: str) -> Result:
    return Result.error("interrupted", text, recorded=True)
