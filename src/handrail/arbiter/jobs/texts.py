"""How a job is described: the state and the notice of its end, and its arguments in one line."""

from __future__ import annotations

from typing import Any, cast

import orjson

from handrail.contract.doors.jobs import JobState
from handrail.contract.doors.notices import Notice
from handrail.contract.result import Result
from handrail.contract.tool.spec import ToolSpec
from handrail.store.tables.jobs import JobRow

MAX_ABOUT = 160
MAX_IN_NOTICE = 2_000
"""Characters of a result that its session is told when the job ends; the rest is asked for."""


MOST_ATTEMPTS = 5
"""How often a job is started in all when each attempt ends with its process: the job may be what ends it."""
NOT_BEGUN = "Handrail ended before this job began, so it had no effect; call again if that is still wanted"
_UNKNOWN = (
    "Handrail ended while this job ran, and nobody knows how far it came; it is not run again. Look at what it did"
)
_GIVEN_UP = (
    "Handrail ended while this job ran, and nobody knows how far it came; a further attempt was stopped by the user. "
    "Look at what it did"
)
_TOO_OFTEN = (
    f"this job was begun {MOST_ATTEMPTS} times and Handrail ended each time while it ran; it is not begun again"
)


def cut_short(row: JobRow, *, begun: bool) -> Result:
    """The result of a job that has ended with its process."""
    if row.given_up:
        return Result.error("interrupted", _GIVEN_UP, job=row.id, stopped_by="user")
    text = NOT_BEGUN if not begun else _TOO_OFTEN if row.job.attempt >= MOST_ATTEMPTS else _UNKNOWN
    return Result.error("interrupted", text, job=row.id)


def state_of(result: Result) -> JobState:
    """The end that a result is."""
    if result.ok:
        return "done"
    return (
        "cancelled"
        if result.error_kind == "cancelled"
        else "interrupted"
        if result.error_kind == "interrupted"
        else "failed"
    )


def notice_id(job_id: str) -> str:
    """Of the notice that a job leaves when it ends."""
    return f"job/{job_id}"


def notice_of(row: JobRow, model: Result, now_ns: int) -> Notice:
    """What the session is told when a job ends."""
    text = as_text(model).strip()
    if len(text) > MAX_IN_NOTICE:
        text = f"{text[:MAX_IN_NOTICE]}\n[…] read_job has the rest"
    said = f"The job {row.id} ({row.job.tool_id}) is {row.job.state}."
    return Notice(
        notice_id(row.id),
        row.job.session_id,
        "job",
        row.id,
        f"{said}\n{text}" if text else said,
        now_ns,
        data={"job_id": row.id, "state": row.job.state},
        untrusted=f"the output of {row.untrusted}" if row.untrusted else f"the output of {row.job.tool_id}",
    )


def as_text(result: Result) -> str:
    parts = [result.error_text] if result.error_text else []
    if isinstance(result.data, str):
        parts.append(result.data)
    elif result.data is not None:
        parts.append(orjson.dumps(result.data, option=orjson.OPT_INDENT_2).decode())
    return "\n".join(parts) + "\n" if parts else ""


def about(shown: object, spec: ToolSpec) -> str:
    """Its arguments in one line."""
    if not isinstance(shown, dict):
        return ""
    arguments = cast("dict[str, Any]", shown)
    given = {name: value for name, value in arguments.items() if name != spec.background_argument}
    if len(given) == 1:
        (only,) = given.values()
        text = only if isinstance(only, str) else orjson.dumps(only).decode()
    else:
        text = orjson.dumps(given).decode() if given else ""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ABOUT else f"{line[: MAX_ABOUT - 1]}…"
