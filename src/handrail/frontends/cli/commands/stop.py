"""``handrail stop``: a call, a job, a session or everything is stopped, also in another process."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from handrail.contract.errors import StartError, ToolError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_workspace_options
from handrail.frontends.cli.command_runner import run_on_event_loop
from handrail.frontends.cli.commands.ps import read_selected_workspace_activity
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import stoppable_ids
from handrail.frontends.cli.terminal_output import print_json, print_stderr_note

if TYPE_CHECKING:
    from handrail.contract.session_protocols import StoppedWork
    from handrail.kernel.workspace_activity import WorkspaceActivity

STOPPED_BY = "handrail stop"


@click.command("stop")
@click.argument("target", metavar="[CALL|JOB|SESSION]", required=False, shell_complete=stoppable_ids)
@click.option("--all", "everything", is_flag=True, help="Stop all sessions and jobs of all workspaces.")
@add_workspace_options
def command(setting: CommandOptions, target: str | None, everything: bool) -> int:
    """Stop a running call, a job, a session or everything.

    `handrail ps` shows the IDs. A stopped call gets the result `cancelled`, and its agent continues. A stopped session
    accepts no further calls, so its agent ends. You can resume it later. With --all, stops every session and job. With
    --workspace, searches and stops only in that workspace. The process that holds the workspace stops the work and records
    your request. The command exits with 1 if nothing was stopped.
    """
    if (target is None) != everything:
        raise click.UsageError(
            "Pass the ID of a call, a job or a session, or `--all`. `handrail ps` shows what runs."
            if target is None
            else "`--all` stops everything. Leave out the ID, or `--all`."
        )
    return run_on_event_loop(lambda _: _stop(setting, target or ""))


async def _stop(setting: CommandOptions, target: str) -> int:
    from handrail.kernel.workspace_activity import stop_work_through_lease_holder

    found = read_selected_workspace_activity(setting)
    held = [one for one in found if one.holder is not None]
    chosen = held if not target else [one for one in held if _has(one, target)] or held
    stopped: list[tuple[WorkspaceActivity, StoppedWork]] = []
    problems: list[str] = []
    for one in chosen:
        try:
            stopped.append((one, await stop_work_through_lease_holder(one, target, by=STOPPED_BY)))
        except ToolError as error:
            problems.append(str(error))
        except StartError as error:
            problems.append(f"{one.folders.workspace}: {error}")
    if setting.json:
        print_json([{"workspace": str(one.folders.workspace), **asdict(work)} for one, work in stopped])
    else:
        _print_stopped(stopped)
    has_stopped = any(work.sessions or work.calls or work.jobs for _, work in stopped)
    if not stopped:
        for problem in dict.fromkeys(problems):
            print_stderr_note(problem)
    if not has_stopped and not problems:
        print_stderr_note(_nothing_text(found, target))
    return OUTPUT if has_stopped or (not target and not problems) else ERROR


def _has(one: WorkspaceActivity, target: str) -> bool:
    """Return whether an ID is known to belong to this workspace. A call that has just started may not be listed yet."""
    session = target.partition("/")[0]
    return any(session == known.id for known in one.sessions) or any(target == job.id for job in one.jobs)


def _nothing_text(found: list[WorkspaceActivity], target: str) -> str:
    what = f"{target[:80]!r} does not run" if target else "Nothing runs"
    unheld = [one for one in found if one.holder is None]
    if any(one.holder is not None for one in found) or not unheld:
        return f"{what}: no process holds a workspace here." if not found else f"{what}."
    return f"{what}: no process holds {', '.join(str(one.folders.workspace) for one in unheld)}."


def _print_stopped(stopped: list[tuple[WorkspaceActivity, StoppedWork]]) -> None:
    view = TerminalRenderer()
    for _, work in stopped:
        for name, ids in (("session", work.sessions), ("call", work.calls), ("job", work.jobs)):
            for stopped_id in ids:
                view.print_text(("stopped", "yellow"), f"  {name} {stopped_id}")
