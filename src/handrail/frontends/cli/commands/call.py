"""``handrail call``: one tool call from a shell, answered with a result and an exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.contract.errors import ToolError
from handrail.frontends.cli.command_group import AWAITING_APPROVAL, DENIED, ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_call_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    apply_approval_request_agent,
    choose_approval_handler,
    open_configured_kernel,
    run_on_event_loop,
)
from handrail.frontends.cli.shell_completion import approval_ids, tool_ids
from handrail.frontends.cli.terminal_output import (
    escape_to_one_line,
    print_escaped_line,
    print_json,
    print_result,
    print_stderr_note,
)

if TYPE_CHECKING:
    from handrail.contract.calls_and_results import Event, Result
    from handrail.contract.session_protocols import Session
    from handrail.kernel.kernel_interface import Kernel


@click.command("call")
@click.argument("tool", required=False, shell_complete=tool_ids)
@click.argument("arguments", metavar="JSON|-|@FILE", required=False)
@click.option("--wait", is_flag=True, help="Without a terminal, wait for an answer by handrail approve.")
@click.option(
    "--resume",
    metavar="ID",
    shell_complete=approval_ids,
    help="Approval ID of a waiting call to resume, instead of TOOL.",
)
@add_call_options
def command(setting: CommandOptions, tool: str | None, arguments: str | None, wait: bool, resume: str | None) -> int:
    """Call a tool and print the result.

    TOOL is an ID, an alias or a wire name. The arguments are one JSON object: as text, from stdin (-), or from
    a file (@FILE).

    If the call requires approval, you are asked on the terminal. Without a terminal, the command prints the ID of the approval
    request and exits with code 4. To answer, run handrail approve ID. Then resume the call with handrail call --resume ID.
    """
    if resume is not None:
        if tool is not None:
            raise click.UsageError(
                f"TOOL {tool!r} cannot be combined with `--resume`, which resumes the call as proposed. Leave TOOL out."
            )
        return run_on_event_loop(
            lambda interruption: _resume(apply_approval_request_agent(setting, resume), resume, interruption, wait=wait)
        )
    if tool is None:
        raise click.UsageError(
            "TOOL is missing. Pass it, as in: handrail call TOOL [JSON]. `handrail tools` lists the tools."
        )
    text = read_json_argument("{}" if arguments is None else arguments)
    return run_on_event_loop(lambda interruption: _call(setting, tool, text, interruption, wait=wait))


async def _call(
    setting: CommandOptions, tool: str, arguments: bytes, interruption: InterruptHandler, *, wait: bool
) -> int:
    from handrail.contract.calls_and_results import ProposedCall

    person = choose_approval_handler(setting, waits=wait)
    async with open_configured_kernel(setting) as kernel:
        session = await kernel.session(approval_handler=person)
        if sys.stderr.isatty():
            session.watch_events(_print_event)
        interruption.stop = session.cancel_running_calls
        answers = await session.start_turn().call_all([ProposedCall(tool, arguments)])
        if (wanted := answers[0].result.metadata.get("documentation_required")) is not None:
            await _print_documentation(session, str(wanted))
            answers = await session.start_turn().call_all([ProposedCall(tool, arguments)])
        interruption.stop = None
        result = answers[0].result
        if "job_id" in result.metadata:
            result = await _wait_for_job(kernel, str(result.metadata["job_id"]), result, interruption)
        await _close_session(session, result)
    code = _print_result(setting, result)
    if result.error_kind == "denied" and person is None and not setting.json:
        print_stderr_note("Run handrail explain with the same arguments to see which rule would allow the call.")
    is_refused = result.error_kind == "invalid_input" and (result.error_text or "").startswith(f"{tool}: ")
    if is_refused and not setting.json:
        about = json.dumps({"tool": tool})
        print_stderr_note(f"Pass the arguments as JSON. To see them, run: handrail call info '{about}'")
    return code


async def _print_documentation(session: Session, tool: str) -> None:
    """Print the documentation of a tool that requires reading it before the first call."""
    manual = await session.call("info", {"tool": tool})
    if manual.ok:
        print_stderr_note(f"Documentation of {tool}: {manual.data.get('documentation', '')}")


async def _resume(setting: CommandOptions, approval_id: str, interruption: InterruptHandler, *, wait: bool) -> int:
    """Resume a call that waits for approval: run it if it is approved, or else ask the user again."""
    async with open_configured_kernel(setting) as kernel:
        try:
            request = kernel.approvals.get(approval_id).request
        except ToolError as error:
            print_stderr_note(f"{error.kind}: {error}")
            return ERROR
        session = await kernel.session(
            request.session_id, approval_handler=choose_approval_handler(setting, waits=wait)
        )
        if sys.stderr.isatty():
            session.watch_events(_print_event)
        interruption.stop = session.cancel_running_calls
        result = (await session.recover_result(request.call_id)).result
        interruption.stop = None
        if kernel.approvals.list_pending(session.id):
            await session.suspend()
        else:
            await _close_session(session, result)
    return _print_result(setting, result)


async def _wait_for_job(kernel: Kernel, job_id: str, answered: Result, interruption: InterruptHandler) -> Result:
    """Wait for a job if this process holds the workspace, because the job ends with it.

    Otherwise the job continues in the other process. An interruption stops the job.
    """
    from handrail.kernel.local_kernel import LocalKernel

    if not isinstance(kernel, LocalKernel):
        return answered
    print_stderr_note(
        f"{job_id} runs in this process, which waits for it. To see its output: handrail jobs read {job_id}"
    )
    interruption.stop = kernel.components.arbiter.jobs.request_stop_of_jobs
    while (result := await kernel.jobs.wait(job_id, timeout_ms=60_000)) is None:
        pass
    interruption.stop = None
    return result


async def _close_session(session: Session, result: Result) -> None:
    """Close the session of one call, or suspend it if its output, job or approval is still needed."""
    if {"output_path", "awaiting_approval", "job_id"} & result.metadata.keys():
        await session.suspend()
    else:
        await session.close()


def _print_result(setting: CommandOptions, result: Result) -> int:
    approval_id = result.metadata.get("awaiting_approval")
    if setting.json:
        print_json(result.to_dict())
    elif approval_id is not None:
        print_escaped_line(str(approval_id))
        print_stderr_note(
            f"The call waits for approval. Run handrail approve {approval_id}, then handrail call --resume {approval_id}."
        )
    else:
        print_result(result)
    return get_exit_code(result)


def get_exit_code(result: Result) -> int:
    """Return the exit code: 0 for an output, 3 if denied, 4 if waiting for approval, 1 for other errors."""
    if result.ok:
        return OUTPUT
    if "awaiting_approval" in result.metadata:
        return AWAITING_APPROVAL
    return DENIED if result.error_kind == "denied" else ERROR


def read_json_argument(text: str) -> bytes:
    """Return the JSON text: the argument itself, stdin for ``-``, or the content of a file for ``@FILE``.

    At most one byte over the limit of a call is read, so that the call itself reports the limit.

    :raises UsageError: if the file cannot be read
    """
    from handrail.contract.text.strict_json import MAX_ARGUMENT_BYTES

    if text == "-":
        return sys.stdin.buffer.read(MAX_ARGUMENT_BYTES + 1)
    if text.startswith("@"):
        try:
            with Path(text[1:]).open("rb") as file:
                return file.read(MAX_ARGUMENT_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            why = f"Could not read {text[1:]!r}: {reason}. Expected a JSON file after the @."
            raise click.UsageError(why) from None
    return os.fsencode(text)


def _print_event(event: Event) -> None:
    """Print the progress, log and lock events of a running call."""
    if event.kind == "progress":
        fraction = event.data.get("fraction")
        share = f" {fraction:.0%}" if isinstance(fraction, float) else ""
        print_stderr_note(
            f"{escape_to_one_line(event.tool_id)}{share}: {escape_to_one_line(str(event.data.get('message', '')))}"
        )
    elif event.kind == "log":
        value = event.data.get("data", "")
        text = value if isinstance(value, str) else json.dumps(value)
        print_stderr_note(escape_to_one_line(f"{event.tool_id} {event.data.get('level', '')}: {text}"))
    elif event.kind == "awaiting-locks":
        print_stderr_note(f"{escape_to_one_line(event.tool_id)}: waiting for locks")
