"""jobs, read_job, wait, stop_task: management of the session's background jobs."""

from __future__ import annotations

from functools import partial
from typing import Any

from handrail.contract.services.job_and_tool_services import Job
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import JobArgumentSpec, ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import make_closed_object_schema

MAX_WAIT_MS = 600_000
DEFAULT_WAIT_MS = 60_000
MOST_SHOWN = 200
MOST_LINES = 2_000
MOST_BYTES = 100_000
_spec = partial(
    ToolSpec,
    requires=Requires(capabilities=("jobs",)),
    side_effect="read",
    locks=(),
    idempotent=True,
    category="system",
)
_JOB_ID = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    "description": "ID of the job, as returned by the call that started it",
}


class ListJobsTool(Tool):
    spec = _spec(
        id="jobs",
        description=(
            "List the background jobs (processes) of this session, running and recently ended, with their state."
        ),
        parameters=make_closed_object_schema(
            {
                "running_only": {"type": "boolean", "description": "Leave out jobs that have ended. Default: false"},
            }
        ),
        max_entries=MOST_SHOWN,
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        found = [job for job in await runtime.jobs.list() if not (args.get("running_only") and job.has_ended)]
        answer: dict[str, object] = {"jobs": [_job_data(job) for job in found[-MOST_SHOWN:]]}
        if len(found) > MOST_SHOWN:
            answer["omitted_older_jobs"] = len(found) - MOST_SHOWN
        return answer


class ReadJobTool(Tool):
    job_argument = JobArgumentSpec("job_id")
    spec = _spec(
        id="read_job",
        description=(
            "Read the output (logs) of a background job, such as a build or server, so far. Pass cursor for "
            "output since the previous read, or offset and lines, e.g. for the tail. Returns the text, up to "
            "100 KB, and the next cursor."
        ),
        parameters={
            **make_closed_object_schema(
                {
                    "job_id": _JOB_ID,
                    "cursor": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "Position in bytes, as returned by the previous read. Default: 0",
                    },
                    "offset": {
                        "type": "integer",
                        "description": "First line, counted from 0. -20 starts 20 lines before the end. Default: 0",
                    },
                    "lines": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MOST_LINES,
                        "description": "Maximum number of lines. Default: 200",
                    },
                },
                ["job_id"],
            ),
            "not": {"anyOf": [{"required": ["cursor", "offset"]}, {"required": ["cursor", "lines"]}]},
        },
        max_output=2 * MOST_BYTES,
        kind="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        job_id, jobs = args["job_id"], runtime.jobs
        if "cursor" in args or ("offset" not in args and "lines" not in args):
            found = await jobs.read_output_bytes(job_id, cursor=args.get("cursor", 0), max_bytes=MOST_BYTES)
        else:
            found = await jobs.read_line_range(job_id, offset=args.get("offset", 0), count=args.get("lines", 200))
        job = await jobs.get(job_id)
        answer: dict[str, object] = {"job_id": job.id, "state": job.state, "text": found.text, "cursor": found.cursor}
        if found.skipped_bytes:
            answer["dropped_bytes"] = found.skipped_bytes
        if found.first_line is not None:
            answer["first_line"] = found.first_line
        answer["has_more"] = found.cursor < job.output_bytes or not job.has_ended
        return answer


class WaitForJobTool(Tool):
    job_argument = JobArgumentSpec("job_id")
    spec = _spec(
        id="wait",
        description=(
            "Wait for a background job to finish and return its result. If the timeout expires first, the "
            "job keeps running: wait again, or continue with other work."
        ),
        parameters=make_closed_object_schema(
            {
                "job_id": _JOB_ID,
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 0,
                    "description": f"Maximum wait in milliseconds, at most {MAX_WAIT_MS}. Default: {DEFAULT_WAIT_MS}",
                },
            },
            ["job_id"],
        ),
        timeout_ms=MAX_WAIT_MS + 30_000,
        max_output=256 * 1024,
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        job_id, asked = args["job_id"], args.get("timeout_ms", DEFAULT_WAIT_MS)
        result = await runtime.jobs.wait(job_id, timeout_ms=min(asked, MAX_WAIT_MS))
        job = await runtime.jobs.get(job_id)
        answer: dict[str, Any] = {"job_id": job.id, "state": job.state}
        if result is not None:
            return {**answer, "result": result.to_dict()}
        answer["note"] = f"The job has not ended after {min(asked, MAX_WAIT_MS)} ms and keeps running."
        if asked > MAX_WAIT_MS:
            answer["note"] += f" The longest wait is {MAX_WAIT_MS} ms. Call wait again to wait longer."
        return answer


class StopJobTool(Tool):
    job_argument = JobArgumentSpec("job_id")
    spec = _spec(
        id="stop_task",
        description=(
            "Stop a background job: cancel it and kill its process. Returns its state; a job that has "
            "already ended is unchanged."
        ),
        parameters=make_closed_object_schema({"job_id": _JOB_ID}, ["job_id"]),
        side_effect="write",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        before = await runtime.jobs.get(args["job_id"])
        job = await runtime.jobs.stop(args["job_id"])
        return {"job_id": job.id, **describe_stopped_job(before, job)}


def describe_stopped_job(before: Job, job: Job) -> dict[str, object]:
    """Return the state of a job after a stop, with a note if the stop did not end it.

    :param before: the job before the stop
    :param job: the job after the stop
    """
    answer: dict[str, object] = {"state": job.state}
    if before.has_ended:
        answer["note"] = f"The job had ended before: {before.state}."
    elif not job.has_ended:
        answer["note"] = "The job was asked to stop and is still running. Check it again with read_job or wait."
    return answer


def _job_data(job: Job) -> dict[str, object]:
    shown: dict[str, object] = {"job_id": job.id, "tool": job.tool_id, "state": job.state, "about": job.summary}
    shown["output_bytes"] = job.output_bytes
    if job.attempt > 1:
        shown["attempt"] = job.attempt
    return shown


JOB_TOOLS: tuple[Tool, ...] = (ListJobsTool(), ReadJobTool(), WaitForJobTool(), StopJobTool())
