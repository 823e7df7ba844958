"""``handrail explain``: how a call would be decided, and the changes that would reverse the decision. Nothing runs."""

from __future__ import annotations

import click

from handrail.contract.errors import ToolError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_call_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    choose_approval_handler,
    find_approval_request,
    open_configured_kernel,
    run_on_event_loop,
    warn_about_missing_records,
)
from handrail.frontends.cli.commands.call import read_json_argument
from handrail.frontends.cli.shell_completion import tools_or_calls
from handrail.frontends.cli.terminal_output import print_escaped_lines, print_json, print_stderr_note


@click.command("explain")
@click.argument("tool", metavar="TOOL|CALL_ID", shell_complete=tools_or_calls)
@click.argument("arguments", metavar="[JSON|-|@FILE]", required=False)
@add_call_options
def command(setting: CommandOptions, tool: str, arguments: str | None) -> int:
    """Explain how a call is decided, or what became of it.

    With a TOOL, takes the same arguments as `handrail call`, and shows the decision with its rule. It runs and records
    nothing. With a CALL_ID from `handrail log`, or the ID of an approval request, shows from the log which tools the call was
    made with, what decided it, which locks it waited for, and how it ended. That works while Handrail runs. Exits with 0 for
    every decision.
    """
    if tool.startswith("apr_") and arguments is None and (row := find_approval_request(setting, tool)) is not None:
        tool = row.request.call_id
    if "/" in tool:
        if arguments is not None:
            raise click.UsageError(f"{tool[:80]!r} is a call ID, which takes no arguments. Leave out the arguments.")
        return _print_account(setting, tool)
    text = read_json_argument(arguments if arguments is not None else "{}")
    return run_on_event_loop(lambda interruption: _explain(setting, tool, text, interruption))


def _print_account(setting: CommandOptions, call_id: str) -> int:
    """Print what became of a call, from the log."""
    from handrail.record.call_timeline import read_timeline
    from handrail.record.log_reader import LogReader

    folders = setting.folders
    account = None
    if folders.database_file.exists():
        with LogReader.open_database(folders.database_file) as reader:
            if (account := read_timeline(reader, call_id)) is None:
                warn_about_missing_records("explain", folders, reader)
    if account is None:
        print_stderr_note(f"Call {call_id[:80]!r} is not in this workspace's log. `handrail log` lists the calls.")
        return ERROR
    if setting.json:
        print_json(account.to_dict())
    else:
        print_escaped_lines(str(account))
    return OUTPUT


async def _explain(setting: CommandOptions, tool: str, text: bytes, interruption: InterruptHandler) -> int:
    from handrail.contract.text.strict_json import InvalidJsonTextError, parse_arguments

    try:
        arguments = parse_arguments(text)
    except InvalidJsonTextError as error:
        print_stderr_note(f"invalid_input: {error}")
        return ERROR
    async with open_configured_kernel(setting) as kernel:
        try:
            explanation = await kernel.explain_call(tool, arguments, headless=choose_approval_handler(setting) is None)
        except ToolError as error:
            print_stderr_note(f"{error.kind}: {error}")
            return ERROR
    if setting.json:
        print_json(explanation.to_dict())
    else:
        print_escaped_lines(str(explanation))
    return OUTPUT
