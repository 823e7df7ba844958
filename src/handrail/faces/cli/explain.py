"""``handrail explain``: how a call would be decided here, and what would change that. Nothing runs."""

from __future__ import annotations

import click

from handrail.faces.cli.app import ERROR, OUTPUT
from handrail.faces.cli.call import read_arguments
from handrail.faces.cli.completing import tools_or_calls
from handrail.faces.cli.driving import Interruption, attendant, drive, opened
from handrail.faces.cli.options import Setting, common
from handrail.faces.cli.show import note, out, out_json


@click.command("explain")
@click.argument("tool", shell_complete=tools_or_calls)
@click.argument("arguments", metavar="JSON|-|@FILE", default="{}")
@common
def command(setting: Setting, tool: str, arguments: str) -> int:
    """Say how a call would be decided, and by which rule.

    Takes what `handrail call` takes, runs nothing and records nothing. Exits with 0 whatever the decision is.
    """
    text = read_arguments(arguments)
    return drive(lambda interruption: _explain(setting, tool, text, interruption))


async def _explain(setting: Setting, tool: str, text: bytes, interruption: Interruption) -> int:
    from handrail.contract.errors import ToolError
    from handrail.contract.jsontext import ArgumentText, parse_arguments

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
        out(str(explanation))
    return OUTPUT
