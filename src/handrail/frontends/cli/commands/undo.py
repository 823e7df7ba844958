"""``handrail undo``: what calls changed in the workspace, given back."""

from __future__ import annotations

from dataclasses import asdict

import click

from handrail.contract.errors import ToolError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.command_runner import open_configured_kernel, run_on_event_loop
from handrail.frontends.cli.renderer import format_undo_report
from handrail.frontends.cli.shell_completion import call_ids
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json, print_stderr_note


@click.command("undo")
@click.argument("call", required=False, metavar="[CALL]", shell_complete=call_ids)
@click.option(
    "--session",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    help="Undo all calls of a session. Default: that of the last change.",
)
@click.option("--overwrite", is_flag=True, help="Also undo files that changed since. Their newer versions are kept.")
@click.option("--dry-run", is_flag=True, help="Only show what would be undone.")
@add_configuration_options
def command(setting: CommandOptions, call: str | None, session: str | None, overwrite: bool, dry_run: bool) -> int:
    """Give back what a call changed or removed in the workspace.

    CALL is the ID of a call, a job or an earlier undo. Without CALL and --session, undoes the last call whose changes are
    still in place, so repeated use goes back step by step.

    A file that has changed since the call is a conflict, and its newer version stays. Files that were too large to keep are listed.
    The command works while Handrail runs. It prints the ID of the undo, which can itself be undone. Exits with 1 if
    something could not be given back.
    """
    if call is not None and session is not None:
        raise click.UsageError("CALL and `--session` exclude each other. Pass only one of them.")
    return run_on_event_loop(lambda _: _undo(setting, call, session, overwrite=overwrite, dry_run=dry_run))


async def _undo(
    setting: CommandOptions, call: str | None, session: str | None, *, overwrite: bool, dry_run: bool
) -> int:
    async with open_configured_kernel(setting) as kernel:
        try:
            report = await kernel.undo(call, session, dry_run=dry_run, overwrite=overwrite)
        except ToolError as error:
            print_stderr_note(f"handrail undo: {error}")
            return ERROR
    if setting.json:
        print_json({**asdict(report), "is_complete": report.is_complete})
    else:
        for line in format_undo_report(report):
            print_escaped_line(line)
        if report.id:
            print_stderr_note(f"To undo this: handrail undo {report.id}")
    return OUTPUT if report.is_complete else ERROR
