"""How a job is described: the state and the notice of its end, and its arguments in one line."""

from __future__ import annotations

from typing import Any, cast

import orjson

from handrail.contract.doors import JobState
from handrail.contract.notices import Notice
from handrail.contract.result import Result
from handrail.contract.spec import ToolSpec
from handrail.store.jobs import JobRow

MAX_ABOUT = 160
MAX_IN_NOTICE = 2_000
"""Characters of a result that its session is told when the job ends; the rest is asked for."""


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
