"""``handrail call``: one tool call from a shell, answered with a result and an exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import DENIED, ERROR, OUTPUT, PARKED
from handrail.frontends.cli.completing import approval_ids, tool_ids
from handrail.frontends.cli.driving import Interruption, as_its_caller, attendant, drive, opened
from handrail.frontends.cli.options import Setting, common
from handrail.frontends.cli.show import note, one_line, out, out_json, shown_result

if TYPE_CHECKING:
    from handrail.contract.call import Event, Result
    from handrail.contract.session import Session
    from handrail.kernel.kernel import Kernel


@click.command("call")
@click.argument("tool", required=False, shell_complete=tool_ids)
@click.argument("arguments", metavar="JSON|-|@FILE", required=False)
@click.option("--wait", is_flag=True, help="Without a terminal: wait for an answer from handrail approve.")
@click.option(
    "--resume",
    metavar="ID",
    shell_complete=approval_ids,
    help="Instead of TOOL: go on with the call that waited under this id.",
)
@common
def command(setting: Setting, tool: str | None, arguments: str | None, wait: bool, resume: str | None) -> int:
    """Carry out one tool call and print its result.

    TOOL is an id, an alias or a wire name. The arguments are one JSON object: as text, from stdin (-), or from
    a file (@FILE).

    What has to be asked is asked on the terminal. Without one the call is parked: it exits with 4 and prints the id to
    answer (handrail approve ID) and to go on with (handrail call --resume ID).
    """
    if resume is not None:
        if tool is not None:
            raise click.UsageError("--resume takes the call as it was proposed: give no TOOL with it")
        return drive(lambda interruption: _resume(as_its_caller(setting, resume), resume, interruption, wait=wait))
    if tool is None:
        raise click.UsageError("name a tool: handrail call TOOL [JSON]; handrail tools lists them")
    text = read_arguments("{}" if arguments is None else arguments)
    return drive(lambda interruption: _call(setting, tool, text, interruption, wait=wait))


async def _call(setting: Setting, tool: str, arguments: bytes, interruption: Interruption, *, wait: bool) -> int:
    from handrail.contract.call import ProposedCall

    person = attendant(setting, waits=wait)
    async with opened(setting) as kernel:
        session = await kernel.session(attendant=person)
        if sys.stderr.isatty():
            session.watch(_shown)
        interruption.stop = session.cancel
        answers = await session.turn().call_all([ProposedCall(tool, arguments)])
        if (wanted := answers[0].result.metadata.get("manual_first")) is not None:
            await _show_manual(session, str(wanted))
            answers = await session.turn().call_all([ProposedCall(tool, arguments)])
        interruption.stop = None
        result = answers[0].result
        if "job" in result.metadata:
            result = await _through(kernel, str(result.metadata["job"]), result, interruption)
        await _leave(session, result)
    code = _shown_result(setting, result)
    if result.error_kind == "denied" and person is None and not setting.json:
        note("handrail explain, with the same arguments, says what would change that")
    return code


async def _show_manual(session: Session, tool: str) -> None:
    """A tool that models may call only once they have read its manual: a person is shown it beside the result."""
    manual = await session.call("info", {"tool": tool})
    if manual.ok:
        note(f"{tool}, before it is called: {manual.data.get('documentation', '')}")


async def _resume(setting: Setting, approval_id: str, interruption: Interruption, *, wait: bool) -> int:
    """Take up a call that was parked: approved, it runs now; still waiting, it is asked again or stays parked."""
    from handrail.contract.errors import ToolError

    async with opened(setting) as kernel:
        try:
            request = kernel.approvals.get(approval_id).request
        except ToolError as error:
            note(f"{error.kind}: {error}")
            return ERROR
        session = await kernel.session(request.session_id, attendant=attendant(setting, waits=wait))
        if sys.stderr.isatty():
            session.watch(_shown)
        interruption.stop = session.cancel
        result = (await session.recall(request.call_id)).result
        interruption.stop = None
        if kernel.approvals.pending(session.id):
            await session.suspend()
        else:
            await _leave(session, result)
    return _shown_result(setting, result)


async def _through(kernel: Kernel, job_id: str, answered: Result, interruption: Interruption) -> Result:
    """A job ends with the process that holds the workspace: where that is this one it is waited for. Else it goes on there.

    Interrupted, it is stopped.
    """
    from handrail.kernel.held import HeldKernel

    if not isinstance(kernel, HeldKernel):
        return answered
    note(f"{job_id} runs in this process, which waits for it; handrail jobs read {job_id} shows what it writes")
    interruption.stop = kernel.rooms.arbiter.jobs.stop_all
    while (result := await kernel.jobs.wait(job_id, timeout_ms=60_000)) is None:
        pass
    interruption.stop = None
    return result


async def _leave(session: Session, result: Result) -> None:
    """Close the session of one call, unless something of it is still needed: its output, or a person's answer."""
    if {"output_path", "parked", "job"} & result.metadata.keys():
        await session.suspend()
    else:
        await session.close()


def _shown_result(setting: Setting, result: Result) -> int:
    parked = result.metadata.get("parked")
    if setting.json:
        out_json(result.to_dict())
    elif parked is not None:
        out(str(parked))
        note(f"waits for a person: handrail approve {parked}, then handrail call --resume {parked}")
    else:
        shown_result(result)
    return exit_code(result)


def exit_code(result: Result) -> int:
    """0 for an output, 3 for a denial, 4 for a call that waits for a person, 1 for any other error."""
    if result.ok:
        return OUTPUT
    if "parked" in result.metadata:
        return PARKED
    return DENIED if result.error_kind == "denied" else ERROR


def read_arguments(text: str) -> bytes:
    """The JSON text itself, what stdin holds for ``-``, or what a file holds for ``@FILE``.

    One byte more than a call may carry is read at most, so that the call is refused with the reason.
    """
    from handrail.contract.text.json import MAX_ARGUMENT_BYTES

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
        note(f"{one_line(event.tool_id)}{share}: {one_line(str(event.data.get('message', '')))}")
    elif event.kind == "log":
        said = event.data.get("data", "")
        text = said if isinstance(said, str) else json.dumps(said)
        note(one_line(f"{event.tool_id} {event.data.get('level', '')}: {text}"))
    elif event.kind == "waiting":
        note(f"{one_line(event.tool_id)} waits for locks")
