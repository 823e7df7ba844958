"""``handrail call``: one tool call from a shell, answered with a result and an exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.faces.cli.app import DENIED, ERROR, OUTPUT
from handrail.faces.cli.completing import tool_ids
from handrail.faces.cli.driving import Interruption, attendant, drive, opened
from handrail.faces.cli.options import Setting, common
from handrail.faces.cli.show import note, out_json, shown_result

if TYPE_CHECKING:
    from handrail.contract.events import Event
    from handrail.contract.result import Result


@click.command("call")
@click.argument("tool", shell_complete=tool_ids)
@click.argument("arguments", metavar="JSON|-|@FILE", default="{}")
@common
def command(setting: Setting, tool: str, arguments: str) -> int:
    """Carry out one tool call and print its result.

    TOOL is an id, an alias or a wire name. The arguments are one JSON object: as text, from stdin (-), or from
    a file (@FILE).
    """
    text = read_arguments(arguments)
    return drive(lambda interruption: _call(setting, tool, text, interruption))


async def _call(setting: Setting, tool: str, arguments: bytes, interruption: Interruption) -> int:
    from handrail.contract.call import ProposedCall

    person = attendant(setting)
    async with opened(setting) as kernel:
        session = await kernel.session(attendant=person)
        if sys.stderr.isatty():
            session.watch(_shown)
        interruption.stop = session.cancel
        answers = await session.turn().call_all([ProposedCall(tool, arguments)])
        interruption.stop = None
        result = answers[0].result
        if "output_path" not in result.metadata:  # closing removes the session's output, which is still to be read
            await session.close()
    if setting.json:
        out_json(result.to_dict())
    else:
        shown_result(result)
        if result.error_kind == "denied" and person is None:
            note("handrail explain, with the same arguments, says what would change that")
    return exit_code(result)


def exit_code(result: Result) -> int:
    """0 for an output, 3 for a denial, 1 for any other error."""
    if result.ok:
        return OUTPUT
    return DENIED if result.error_kind == "denied" else ERROR


def read_arguments(text: str) -> bytes:
    """The JSON text itself, what stdin holds for ``-``, or what a file holds for ``@FILE``.

    One byte more than a call may carry is read at most, so that the call is refused with the reason.
    """
    from handrail.contract.jsontext import MAX_ARGUMENT_BYTES

    if text == "-":
        return sys.stdin.buffer.read(MAX_ARGUMENT_BYTES + 1)
    if text.startswith("@"):
        try:
            with Path(text[1:]).open("rb") as file:
                return file.read(MAX_ARGUMENT_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.UsageError(f"{text[1:]!r} cannot be read: {reason}; give a file of JSON after the @") from None
    return os.fsencode(text)


def _shown(event: Event) -> None:
    """What a person should see while a call goes on."""
    if event.kind == "progress":
        fraction = event.data.get("fraction")
        share = f" {fraction:.0%}" if isinstance(fraction, float) else ""
        note(f"{event.tool_id}{share}: {event.data.get('message', '')}")
    elif event.kind == "waiting":
        note(f"{event.tool_id} waits for locks")
