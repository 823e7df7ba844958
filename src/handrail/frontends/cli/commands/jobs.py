"""``handrail jobs``: the background jobs of a workspace, from any terminal, and calls to move to the background."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.driving import drive, opened
from handrail.frontends.cli.options import Amount, Setting, equipped
from handrail.frontends.cli.show import amount, columns, note, out, out_json, out_payload, shown_result

if TYPE_CHECKING:
    from handrail.contract.doors.jobs import Job, Jobs

ACTIONS = ("list", "read", "wait", "stop", "promote")
_AT_ONCE_MS = 10_000
_PIECE = 256 * 1024


@click.command("jobs")
@click.argument("action", required=False, default="list", type=click.Choice(ACTIONS), metavar=f"[{'|'.join(ACTIONS)}]")
@click.argument("job_id", required=False, metavar="[ID]")
@click.option("--session", "session_id", metavar="ID", help="list: session of the jobs. Default: all.")
@click.option("--running", is_flag=True, help="list: show only running jobs.")
@click.option("--lines", type=click.IntRange(min=1), metavar="N", help="read: number of last lines. Default: all.")
@click.option("--follow", is_flag=True, help="read: continue until the job ends.")
@click.option("--timeout", type=Amount("seconds"), metavar="SECONDS", help="wait: maximum seconds. Default: no limit.")
@equipped
def command(
    setting: Setting,
    action: str,
    job_id: str | None,
    session_id: str | None,
    running: bool,
    lines: int | None,
    follow: bool,
    timeout: float | None,
) -> int:
    """List, read, wait for or stop background jobs.

    list shows the jobs, the oldest first. read prints the output of a job. wait prints its result, exits with the job's exit
    code, and never stops the job. promote CALL moves a running call to the background; without CALL, it lists the calls that
    can be moved. The command works while Handrail runs.
    """
    given = {"--lines": lines, "--follow": follow or None, "--timeout": timeout, "--session": session_id}
    goes_with = {"--lines": "read", "--follow": "read", "--timeout": "wait", "--session": "list"}
    for option, belongs in goes_with.items():
        if given[option] is not None and action != belongs:
            raise click.UsageError(f"`{option}` is an option of `handrail jobs {belongs}`, not of `{action}`.")
    if running and action != "list":
        raise click.UsageError(f"`--running` is an option of `handrail jobs list`, not of `{action}`.")
    if action == "list":
        if job_id is not None:
            raise click.UsageError("`list` takes no ID. To see the output of a job: handrail jobs read ID")
        return drive(lambda _: _list(setting, session_id, running=running))
    if action == "promote":
        return drive(lambda _: _promote(setting, job_id))
    if job_id is None:
        raise click.UsageError(f"The job ID is missing: handrail jobs {action} ID. `handrail jobs` lists the jobs.")
    return drive(lambda _: _about_one(setting, action, job_id, lines, timeout, follow=follow))


async def _list(setting: Setting, session_id: str | None, *, running: bool) -> int:
    async with opened(setting) as kernel:
        found = [
            job
            for job in await kernel.jobs.list()
            if session_id in (None, job.session_id) and not (running and job.ended)
        ]
    if setting.json:
        for job in found:
            out_json(asdict(job))
    elif found:
        for line in columns([("JOB", "STATE", "OUTPUT", "DESCRIPTION"), *(_row(job) for job in found)]):
            out(line)
    else:
        note("No jobs. A call runs as a job if its tool supports it, for example bash with background: true.")
    return OUTPUT


def _row(job: Job) -> tuple[str, str, str, str]:
    again = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    return job.id, job.state + again, amount(job.output_bytes), job.about


async def _promote(setting: Setting, call_id: str | None) -> int:
    from handrail.contract.errors import ToolError

    async with opened(setting) as kernel:
        if call_id is None:
            found = await kernel.jobs.promotable()
            if setting.json:
                for call in found:
                    out_json(asdict(call))
            elif found:
                rows = [(call.call_id, call.tool_id, f"{call.elapsed_ms / 1000:.0f} s", call.about) for call in found]
                for line in columns([("CALL", "TOOL", "RUNNING", "DESCRIPTION"), *rows]):
                    out(line)
            else:
                note("No running call can be moved to the background. Tools such as bash and task support it.")
            return OUTPUT
        try:
            job = await kernel.jobs.promote(call_id)
        except ToolError as error:
            note(f"{error.kind}: {error}")
            return ERROR
    if setting.json:
        out_json(asdict(job))
    else:
        out(f"{job.id}: {job.state}")
    return OUTPUT


async def _about_one(
    setting: Setting, action: str, job_id: str, lines: int | None, timeout: float | None, *, follow: bool
) -> int:
    from handrail.contract.errors import ToolError

    async with opened(setting) as kernel:
        try:
            if action == "read":
                return await _read(setting, kernel.jobs, job_id, lines, follow=follow)
            if action == "stop":
                return await _stop(setting, kernel.jobs, job_id)
            return await _wait(setting, kernel.jobs, job_id, timeout)
        except ToolError as error:
            note(f"{error.kind}: {error}")
            return ERROR


async def _read(setting: Setting, jobs: Jobs, job_id: str, lines: int | None, *, follow: bool) -> int:
    found = await (
        jobs.read(job_id, max_bytes=_PIECE) if lines is None else jobs.lines(job_id, offset=-lines, count=lines)
    )
    _shown(setting, found.text, found.cursor)
    while found.more:
        job = await jobs.get(job_id)
        found = await jobs.read(job_id, cursor=found.cursor, max_bytes=_PIECE)
        if found.text:
            _shown(setting, found.text, found.cursor)
        elif job.ended or job.rests or not follow:
            break
        else:
            await jobs.wait(job_id, timeout_ms=200)
    return OUTPUT


def _shown(setting: Setting, text: str, cursor: int) -> None:
    if setting.json:
        out_json({"text": text, "cursor": cursor})
    elif text:
        out_payload(text.removesuffix("\n"))
    sys.stdout.flush()


async def _wait(setting: Setting, jobs: Jobs, job_id: str, timeout: float | None) -> int:
    from handrail.frontends.cli.commands.call import exit_code

    left_ms = None if timeout is None else round(timeout * 1000)
    while True:
        asked_ms = _AT_ONCE_MS if left_ms is None else min(left_ms, _AT_ONCE_MS)
        if (result := await jobs.wait(job_id, timeout_ms=asked_ms)) is not None:
            break
        if (job := await jobs.get(job_id)).rests:
            note(f"{job_id} continues when its session is resumed: handrail run --resume {job.session_id}")
            return ERROR
        if left_ms is not None and (left_ms := left_ms - asked_ms) <= 0:
            note(f"{job_id} has not ended within the timeout. It is {job.state}, and continues.")
            return ERROR
    if setting.json:
        out_json(result.to_dict())
    else:
        shown_result(result)
    return exit_code(result)


async def _stop(setting: Setting, jobs: Jobs, job_id: str) -> int:
    before = await jobs.get(job_id)
    job = await jobs.stop(job_id)
    if setting.json:
        out_json(asdict(job))
    else:
        out(f"{job.id}: {job.state}")
        if before.ended:
            note(f"{job.id} had already ended.")
    return OUTPUT if job.ended else ERROR
