"""``handrail jobs``: the background jobs of a workspace, from any terminal, and calls to move to the background."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from handrail.contract.errors import ToolError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, DurationParamType, add_agent_options
from handrail.frontends.cli.command_runner import open_configured_kernel, run_on_event_loop
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import (
    format_byte_count,
    print_escaped_line,
    print_json,
    print_result,
    print_stderr_note,
    print_terminal_safe_text,
)

if TYPE_CHECKING:
    from handrail.contract.services.job_and_tool_services import Job, JobService

ACTIONS = ("list", "read", "wait", "stop", "background")
_READ_TIMEOUT_MS = 10_000
_PIECE = 256 * 1024


@click.command("jobs")
@click.argument("action", required=False, default="list", type=click.Choice(ACTIONS), metavar=f"[{'|'.join(ACTIONS)}]")
@click.argument("job_id", required=False, metavar="[ID]")
@click.option("--session", "session_id", metavar="ID", help="list: session of the jobs. Default: all.")
@click.option("--running", is_flag=True, help="list: show only running jobs.")
@click.option("--lines", type=click.IntRange(min=1), metavar="N", help="read: number of last lines. Default: all.")
@click.option("--follow", is_flag=True, help="read: continue until the job ends.")
@click.option(
    "--timeout", type=DurationParamType("seconds"), metavar="SECONDS", help="wait: maximum seconds. Default: no limit."
)
@add_agent_options
def command(
    setting: CommandOptions,
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
    code, and never stops the job. background CALL moves a running call to the background; without CALL, it lists the calls that
    can be moved. The command works while Handrail runs.
    """
    given = {"--lines": lines, "--follow": follow or None, "--timeout": timeout, "--session": session_id}
    goes_with = {"--lines": "read", "--follow": "read", "--timeout": "wait", "--session": "list"}
    for option, belongs in goes_with.items():
        if given[option] is not None and action != belongs:
            raise click.UsageError(
                f"`{option}` is an option of `handrail jobs {belongs}`, not of `{action}`. Leave it out."
            )
    if running and action != "list":
        raise click.UsageError(f"`--running` is an option of `handrail jobs list`, not of `{action}`. Leave it out.")
    if action == "list":
        if job_id is not None:
            raise click.UsageError(
                f"`list` takes no ID, and got {job_id!r}. To see the output of a job, run: handrail jobs read ID"
            )
        return run_on_event_loop(lambda _: _list(setting, session_id, running=running))
    if action == "background":
        return run_on_event_loop(lambda _: _move_to_background(setting, job_id))
    if job_id is None:
        raise click.UsageError(
            f"The job ID is missing. Pass it, as in: handrail jobs {action} ID. `handrail jobs` lists the jobs."
        )
    return run_on_event_loop(lambda _: _run_action(setting, action, job_id, lines, timeout, follow=follow))


async def _list(setting: CommandOptions, session_id: str | None, *, running: bool) -> int:
    async with open_configured_kernel(setting) as kernel:
        found = [
            job
            for job in await kernel.jobs.list()
            if session_id in (None, job.session_id) and not (running and job.has_ended)
        ]
    if setting.json:
        for job in found:
            print_json(asdict(job))
    elif found:
        TerminalRenderer().print_table(("JOB", "STATE", "OUTPUT", "DESCRIPTION"), map(_row, found), right=(2,))
    else:
        print_stderr_note(
            "No jobs. A call runs as a job if its tool supports it, for example bash with background: true."
        )
    return OUTPUT


def _row(job: Job) -> tuple[str, str, str, str]:
    again = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    return job.id, job.state + again, format_byte_count(job.output_bytes), job.summary


async def _move_to_background(setting: CommandOptions, call_id: str | None) -> int:
    async with open_configured_kernel(setting) as kernel:
        if call_id is None:
            found = await kernel.jobs.list_running_calls()
            if setting.json:
                for call in found:
                    print_json(asdict(call))
            elif found:
                rows = [(call.call_id, call.tool_id, f"{call.elapsed_ms / 1000:.0f} s", call.summary) for call in found]
                TerminalRenderer().print_table(("CALL", "TOOL", "RUNNING", "DESCRIPTION"), rows, right=(2,))
            else:
                print_stderr_note(
                    "No running call can be moved to the background. Tools such as bash and task support it."
                )
            return OUTPUT
        try:
            job = await kernel.jobs.move_to_background(call_id)
        except ToolError as error:
            print_stderr_note(f"{error.kind}: {error}")
            return ERROR
    if setting.json:
        print_json(asdict(job))
    else:
        print_escaped_line(f"{job.id}: {job.state}")
    return OUTPUT


async def _run_action(
    setting: CommandOptions, action: str, job_id: str, lines: int | None, timeout: float | None, *, follow: bool
) -> int:
    async with open_configured_kernel(setting) as kernel:
        try:
            if action == "read":
                return await _read(setting, kernel.jobs, job_id, lines, follow=follow)
            if action == "stop":
                return await _stop(setting, kernel.jobs, job_id)
            return await _wait(setting, kernel.jobs, job_id, timeout)
        except ToolError as error:
            print_stderr_note(f"{error.kind}: {error}")
            return ERROR


async def _read(setting: CommandOptions, jobs: JobService, job_id: str, lines: int | None, *, follow: bool) -> int:
    found = await (
        jobs.read_output_bytes(job_id, max_bytes=_PIECE)
        if lines is None
        else jobs.read_line_range(job_id, offset=-lines, count=lines)
    )
    _print_output(setting, found.text, found.cursor)
    while found.has_more:
        job = await jobs.get(job_id)
        found = await jobs.read_output_bytes(job_id, cursor=found.cursor, max_bytes=_PIECE)
        if found.text:
            _print_output(setting, found.text, found.cursor)
        elif job.has_ended or job.is_suspended or not follow:
            break
        else:
            await jobs.wait(job_id, timeout_ms=200)
    return OUTPUT


def _print_output(setting: CommandOptions, text: str, cursor: int) -> None:
    if setting.json:
        print_json({"text": text, "cursor": cursor})
    elif text:
        print_terminal_safe_text(text.removesuffix("\n"))
    sys.stdout.flush()


async def _wait(setting: CommandOptions, jobs: JobService, job_id: str, timeout: float | None) -> int:
    from handrail.frontends.cli.commands.call import get_exit_code

    left_ms = None if timeout is None else round(timeout * 1000)
    while True:
        asked_ms = _READ_TIMEOUT_MS if left_ms is None else min(left_ms, _READ_TIMEOUT_MS)
        if (result := await jobs.wait(job_id, timeout_ms=asked_ms)) is not None:
            break
        if (job := await jobs.get(job_id)).is_suspended:
            print_stderr_note(f"{job_id} continues when its session is resumed: handrail run --resume {job.session_id}")
            return ERROR
        if left_ms is not None and (left_ms := left_ms - asked_ms) <= 0:
            print_stderr_note(f"{job_id} has not ended within the timeout. It is {job.state}, and continues.")
            return ERROR
    if setting.json:
        print_json(result.to_dict())
    else:
        print_result(result)
    return get_exit_code(result)


async def _stop(setting: CommandOptions, jobs: JobService, job_id: str) -> int:
    before = await jobs.get(job_id)
    job = await jobs.stop(job_id)
    if setting.json:
        print_json(asdict(job))
    else:
        print_escaped_line(f"{job.id}: {job.state}")
        if before.has_ended:
            print_stderr_note(f"{job.id} had already ended.")
    return OUTPUT if job.has_ended else ERROR
