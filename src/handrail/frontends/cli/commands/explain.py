"""``handrail explain``: how a call would be decided, and the changes that would reverse the decision. Nothing runs."""

from __future__ import annotations

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.commands.call import read_arguments
from handrail.frontends.cli.completing import tools_or_calls
from handrail.frontends.cli.driving import Interruption, asked_as, attendant, drive, opened, say_what_is_missing
from handrail.frontends.cli.options import Setting, common
from handrail.frontends.cli.show import note, out_block, out_json


@click.command("explain")
@click.argument("tool", metavar="TOOL|CALL_ID", shell_complete=tools_or_calls)
@click.argument("arguments", metavar="[JSON|-|@FILE]", required=False)
@common
def command(setting: Setting, tool: str, arguments: str | None) -> int:
    """Explain how a call is decided, or what became of it.

    With a TOOL, takes the same arguments as `handrail call`, and shows the decision with its rule. It runs and records
    nothing. With a CALL_ID from `handrail log`, or the ID of an approval request, shows from the log which tools the call was
    made with, what decided it, which locks it waited for, and how it ended. That works while Handrail runs. Exits with 0 for
    every decision.
    """
    if tool.startswith("apr_") and arguments is None and (row := asked_as(setting, tool)) is not None:
        tool = row.request.call_id
    if "/" in tool:
        if arguments is not None:
            raise click.UsageError(f"{tool[:80]!r} is a call ID, which takes no arguments. Leave out the arguments.")
        return _told(setting, tool)
    text = read_arguments(arguments if arguments is not None else "{}")
    return drive(lambda interruption: _explain(setting, tool, text, interruption))


def _told(setting: Setting, call_id: str) -> int:
    """Print what became of a call, from the log."""
    from handrail.record.account import account_of
    from handrail.record.reading import LogReader
    from handrail.store.folders import locate

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    account = None
    if folders.database.exists():
        with LogReader.at(folders.database) as reader:
            account = account_of(reader, call_id)
            if account is None:
                say_what_is_missing("explain", folders, reader)
    if account is None:
        note(f"Call {call_id[:80]!r} is not in this workspace's log. `handrail log` lists the calls.")
        return ERROR
    if setting.json:
        out_json(account.to_dict())
    else:
        out_block(str(account))
    return OUTPUT


async def _explain(setting: Setting, tool: str, text: bytes, interruption: Interruption) -> int:
    from handrail.contract.errors import ToolError
    from handrail.contract.text.json import ArgumentText, parse_arguments

    try:
        arguments = parse_arguments(text)
    except ArgumentText as error:
        note(f"invalid_input: {error}")
        return ERROR
    async with opened(setting) as kernel:
        try:
            explanation = await kernel.explain(tool, arguments, headless=attendant(setting) is None)
        except ToolError as error:
            note(f"{error.kind}: {error}")
            return ERROR
    if setting.json:
        out_json(explanation.to_dict())
    else:
        out_block(str(explanation))
    return OUTPUT
