"""``handrail ps``: the sessions, calls, jobs and open approval requests of all workspaces, and the processes that hold them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_workspace_options
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import escape_to_one_line, format_time_since, print_json, print_stderr_note

if TYPE_CHECKING:
    from handrail.kernel.workspace_activity import ActiveCallStatus, SessionActivity, WorkspaceActivity


@click.command("ps")
@add_workspace_options
def command(setting: CommandOptions) -> int:
    """Show what agents do now, in all workspaces.

    Shows each workspace of the state folder with the process that holds it, and its open sessions with their clients. Below
    a session are its running calls and jobs, and the requests that wait for your approval. With --workspace, shows only
    that workspace. It reads files only, and works while the processes run. To stop something: handrail stop ID
    """
    found = [one for one in read_selected_workspace_activity(setting) if not one.is_idle]
    if setting.json:
        print_json([_activity_data(one) for one in found])
        return OUTPUT
    if not found:
        print_stderr_note("Nothing runs, and nothing waits for approval.")
        return OUTPUT
    view = TerminalRenderer()
    for number, one in enumerate(found):
        if number:
            view.write_line()
        _print_workspace(view, one)
    sys.stdout.flush()
    return OUTPUT


def read_selected_workspace_activity(setting: CommandOptions) -> list[WorkspaceActivity]:
    """Return the activity in the workspace that ``--workspace`` names, or in all workspaces without that option.

    :raises StartError: if the workspace or the state folder cannot be used
    """
    from handrail.kernel.workspace_activity import list_active_workspaces, read_workspace_activity
    from handrail.store.state_folders import resolve_state_root

    source = click.get_current_context().get_parameter_source("workspace")
    if source is click.core.ParameterSource.DEFAULT:
        return list_active_workspaces(resolve_state_root(setting.state))
    folders = setting.folders
    return [read_workspace_activity(folders)] if folders.database_file.exists() else []


def _print_workspace(view: TerminalRenderer, one: WorkspaceActivity) -> None:
    held = "no process holds it" if one.holder is None else f"held by {one.holder}"
    state = "" if one.holder is None or one.holder.state == "alive" else f" ({one.holder.state})"
    view.print_text((escape_to_one_line(str(one.folders.workspace)), "bold cyan"), further="    ")
    view.print_text((f"{held}{state}", "dim"), indent="  ", further="    ")
    if one.problem:
        view.print_text((one.problem, "red"), indent="  ", further="    ")
    for session in one.sessions:
        _print_session(view, session)
        for call in session.calls:
            _print_running_call(view, call)
        for approval in one.approvals:
            if approval.request.session_id == session.id:
                _print_waiting(view, approval.id, approval.request)
        for job in one.jobs:
            if job.session_id == session.id:
                _print_job(view, job.id, job.tool_id, job.summary, job.created_ns, job.state)
    shown = {session.id for session in one.sessions}
    others = [approval for approval in one.approvals if approval.request.session_id not in shown]
    jobs = [job for job in one.jobs if job.session_id not in shown]
    if others or jobs:
        view.print_text(("sessions that no process has open", "bold"), indent="  ")
    for approval in others:
        _print_waiting(view, approval.id, approval.request)
    for job in jobs:
        _print_job(view, job.id, job.tool_id, job.summary, job.created_ns, "waits for its session")


def _print_session(view: TerminalRenderer, session: SessionActivity) -> None:
    client = "unknown client" if session.opener is None else str(session.opener)
    above = f"  sub-agent of {session.parent_session}" if session.parent_session else ""
    session_text = f"  {client}, agent {session.agent}, opened {format_time_since(session.opened_ns)}{above}"
    view.print_text((session.id, "bold"), session_text, indent="  ", further="      ")
    if session.task:
        view.print_text(("task: ", "dim"), escape_to_one_line(session.task), indent="    ", further="      ")
    for used in session.usage:
        view.print_text((str(used), "dim"), indent="    ", further="      ")


def _print_running_call(view: TerminalRenderer, call: ActiveCallStatus) -> None:
    since = format_time_since(call.since_ns).removesuffix(" ago")
    state = "runs" if call.is_running else "waits for locks"
    parts = ((call.call_id, "dim"), (state if since == "now" else f"{state} since {since}", "dim"))
    mark = ("▸", "green") if call.is_running else ("·", "dim")
    view.print_call(mark, call.tool or "?", call.arguments, *parts, indent="    ")


def _print_waiting(view: TerminalRenderer, approval_id: str, request: Any) -> None:
    parts = (("waits for approval", "yellow"), (f"handrail approve {approval_id}", "cyan"))
    view.print_call(("?", "yellow"), request.tool_id, request.arguments, *parts, indent="    ")


def _print_job(view: TerminalRenderer, job_id: str, tool: str, summary: str, created_ns: int, state: str) -> None:
    parts = ((job_id, "dim"), (state, "dim"), (f"since {format_time_since(created_ns).removesuffix(' ago')}", "dim"))
    view.print_call(("↻", "blue"), tool, {"summary": summary} if summary else None, *parts, indent="    ")


def _activity_data(one: WorkspaceActivity) -> Mapping[str, Any]:
    return {
        "workspace": str(one.folders.workspace),
        "key": one.folders.key,
        "holder": None if one.holder is None else asdict(one.holder),
        "sessions": [asdict(session) for session in one.sessions],
        "approvals": [approval.to_dict() for approval in one.approvals],
        "jobs": [asdict(job) for job in one.jobs],
        "problem": one.problem or None,
    }
