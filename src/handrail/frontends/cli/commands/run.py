"""``handrail run``: a model works on a task through the tools, shown live on the terminal."""

from __future__ import annotations

import json
import re
import sys
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.command_group import AWAITING_APPROVAL, ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, ModelOptions, call_options, model_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    approval_handler_for,
    find_resumable_session,
    open_configured_kernel,
    run_on_event_loop,
    use_session_agent,
)
from handrail.frontends.cli.shell_completion import forkable_ids, resumable_ids
from handrail.frontends.cli.terminal_output import (
    print_json,
    print_note,
    print_requested_text,
    print_styled_line,
    to_one_line,
)

if TYPE_CHECKING:
    from handrail.agent.run_events import (
        AgentEvent,
        ConversationCompacted,
        ProviderToolUnavailable,
        ProviderToolUsed,
        ReplyInterrupted,
        RetryDelayed,
        RunOutcome,
    )
    from handrail.contract.calls_and_results import Result
    from handrail.contract.session_protocols import Session
    from handrail.kernel.kernel_interface import Kernel

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_SHOWN_CHARACTERS = 160
"""Maximum characters of a call's arguments or result in the live view. Approvals and the log show everything."""


@click.command("run")
@click.argument("task", required=False)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    shell_complete=resumable_ids,
    help="Session to resume. Without ID: the last one that is not open.",
)
@click.option(
    "--fork", metavar="ID", shell_complete=forkable_ids, help="Session whose messages a new session starts with."
)
@click.option(
    "--compact",
    is_flag=True,
    help="With --resume or --fork: first compact older messages. Without TASK, stop after that.",
)
@model_options("")
@call_options
def command(
    setting: CommandOptions,
    task: str | None,
    resume: str | None,
    fork: str | None,
    compact: bool,
    asked: ModelOptions,
) -> int:
    """Run a task with a model.

    The model works on TASK through the tools. Its text is printed on stdout, its calls on stderr. Exits with 0 only if the
    run ends with an answer, and with 4 if calls wait for approval: answer them with handrail approve, then continue with
    handrail run --resume. Messages are saved, also if the run is killed. Without TASK, a resumed session continues where it
    stopped.
    """
    if resume is not None and fork is not None:
        raise click.UsageError("`--resume` and `--fork` exclude each other. Pass only one of them.")
    if resume and task is None and not SESSION_ID.fullmatch(resume):
        task, resume = resume, ""  # handrail run --resume "a task": an ID contains no blanks
    if resume is None and fork is None:
        if task is None:
            raise click.UsageError("TASK is missing. Pass a task, or resume a session with `--resume`.")
        if compact:
            raise click.UsageError("`--compact` requires a session: handrail run --resume ID --compact")
    if resume is not None:
        resume = find_resumable_session(setting, resume).id
    if before := resume or fork:
        setting = use_session_agent(setting, before)
    begin = RunStart(task, resume, fork, compact)

    return run_on_event_loop(lambda interruption: _run(setting, begin, asked, interruption))


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run.

    :param task: the task; None to continue where a session stopped
    :param resume: the session to resume; None for a new one
    :param fork: the session whose messages a new session starts with
    :param compact: compact older messages first; without a task, stop after that
    """

    task: str | None
    resume: str | None = None
    fork: str | None = None
    compact: bool = False


async def _open_session(setting: CommandOptions, kernel: Kernel, begin: RunStart) -> Session:
    """Open the session of a run.

    :raises UsageError: if the session does not exist
    """
    session_id = begin.resume if begin.fork is None else await kernel.fork_session(begin.fork)
    return await kernel.session(session_id, approval_handler=approval_handler_for(setting))


async def _run(
    setting: CommandOptions,
    begin: RunStart,
    asked: ModelOptions,
    interruption: InterruptHandler,
) -> int:
    from handrail.agent.agent_loop import Agent
    from handrail.agent.providers import MODEL_FORMS
    from handrail.agent.run_events import RunFinished

    outcome: RunOutcome | None = None
    async with AsyncExitStack() as at_the_end, open_configured_kernel(setting) as kernel:
        manifest = kernel.default_agent
        model = asked.open_model_for(
            manifest,
            f"No model is set. Pass --model {MODEL_FORMS}, or set HANDRAIL_MODEL or the agent's model.",
        )
        at_the_end.push_async_callback(model.aclose)  # sub-agents use the model until the kernel ends
        session = await _open_session(setting, kernel, begin)
        view = JsonEventView() if setting.json else TerminalRunView(asked.resume_options)
        view.show_session(session.id)
        agent = Agent(
            session,
            model,
            workspace=session.workdir,
            instructions=manifest.prompt,
            budget=asked.make_run_budget(manifest),
        )
        interruption.stop = agent.cancel
        if begin.compact:
            view.print_event(await agent.compact())
            if begin.task is None:
                interruption.stop = None
                await session.suspend()
                return OUTPUT
        async with aclosing(agent.run(begin.task, until="idle")) as events:
            async for event in events:
                view.print_event(event)
                if isinstance(event, RunFinished):
                    outcome = event.outcome
        interruption.stop = None
        await session.suspend()
    if outcome is not None and outcome.status == "awaiting_approval":
        return AWAITING_APPROVAL
    return OUTPUT if outcome is not None and outcome.ok else ERROR


class JsonEventView:
    """A view that prints one JSON object per line on stdout."""

    def show_session(self, session_id: str) -> None:
        print_json({"event": "session", "id": session_id}, lines=True)
        sys.stdout.flush()

    def print_event(self, event: AgentEvent) -> None:
        line = event_data(event)
        if line is not None:
            print_json(line, lines=True)
            sys.stdout.flush()


_WHOLE_EVENTS = {
    "ProviderToolUsed": "provider-tool",
    "ConversationCompacted": "compacted",
    "AgentIdle": "idle",
    "BudgetExhausted": "budget-spent",
    "ReplyInterrupted": "reply-cut",
}
"""Events whose JSON has all their fields, with their names in JSON."""


def event_data(event: AgentEvent) -> dict[str, Any] | None:
    """Return an event as JSON data, with its kind in ``event``."""
    from dataclasses import asdict

    from handrail.agent import run_events as kinds

    match event:
        case kinds.TurnStarted(number):
            return {"event": "turn", "number": number}
        case kinds.TextDelta(text):
            return {"event": "text", "text": text}
        case kinds.CallProposed(position, call):
            return {"event": "call", "position": position, "tool": call.name, "arguments": call.arguments}
        case kinds.CallAnswered(position, call, answer):
            told = {"position": position, "call_id": answer.call_id, "tool": answer.tool_id or call.name}
            return {"event": "result", **told, "result": answer.result.to_dict()}
        case kinds.RunFinished(outcome):
            return {"event": "finished", **asdict(outcome)}
        case kinds.ProviderToolUnavailable(tool_id, reason):
            return {"event": "provider-tool-unavailable", "tool": tool_id, "reason": reason}
        case kinds.NotificationsDelivered(notices):
            told = [{"id": one.id, "kind": one.kind, "from": one.source, "text": one.text} for one in notices]
            return {"event": "notifications", "notices": told}
        case (
            kinds.ProviderToolUsed()
            | kinds.ConversationCompacted()
            | kinds.AgentIdle()
            | kinds.BudgetExhausted()
            | kinds.ReplyInterrupted()
        ):
            return {"event": _WHOLE_EVENTS[type(event).__name__], **asdict(event)}
        case kinds.RetryDelayed(attempt, attempts, delay_s, reason):
            return {"event": "delayed", "attempt": attempt, "of": attempts, "delay_s": delay_s, "reason": reason}


class TerminalRunView:
    """A view for the user: the model's text as it arrives, one line per call, and one per result.

    :param again: the model options for the command that resumes the session
    """

    def __init__(self, again: str) -> None:
        self._again = again
        self._in_text = False
        self._session_id = ""

    def show_session(self, session_id: str) -> None:
        self._session_id = session_id

    def print_event(self, event: AgentEvent) -> None:
        from handrail.agent import run_events as kinds

        match event:
            case kinds.TextDelta(text):
                print_requested_text(text, end="")
                sys.stdout.flush()
                self._in_text = not text.endswith("\n")
            case kinds.CallProposed(_, call):
                self._print_row("→ ", call.name, shorten_to_line(_text_of(call.arguments)), "cyan")
            case kinds.CallAnswered(_, call, answer):
                self._print_answer(answer.tool_id or call.name, answer.result)
            case kinds.ProviderToolUsed():
                self._print_provider_tool(event)
            case (
                kinds.ProviderToolUnavailable()
                | kinds.ReplyInterrupted()
                | kinds.RetryDelayed()
                | kinds.ConversationCompacted()
            ):
                self._print_row("! ", *_warning_text(event), "yellow")
            case kinds.NotificationsDelivered(notices):
                for notice in notices:
                    self._print_row("• ", f"{notice.kind} {notice.source}", shorten_to_line(notice.text), "blue")
            case kinds.AgentIdle():
                self._end_text()
                print_note("Waiting for background work. Press Ctrl-C to stop.")
            case kinds.RunFinished(outcome):
                self._print_outcome(outcome)
            case _:
                pass

    def _print_answer(self, name: str, result: Result) -> None:
        if result.ok:
            took = f"{result.metadata.get('duration_ms', 0):.0f} ms"
            self._print_row("✓ ", name, f"{took}  {shorten_to_line(_text_of(result.data))}", "green")
        else:
            self._print_row("✗ ", name, f"{result.error_kind}: {result.error_text}", "red")

    def _print_provider_tool(self, event: ProviderToolUsed) -> None:
        asked = shorten_to_line(_text_of(dict(event.arguments))) if event.arguments else ""
        kept = (event.problem and f"not saved: {event.problem}") or ", ".join(event.artifacts)
        mark, colour = ("✗ ", "red") if event.failed or event.problem else ("✓ ", "green")
        self._print_row(mark, event.name, f"by the provider  {asked}  {kept}", colour)

    def _print_outcome(self, outcome: RunOutcome) -> None:
        self._end_text()
        if not outcome.ok:
            print_note(f"{outcome.status}: {outcome.detail}")
            if outcome.pending_approvals:
                only = f" {outcome.pending_approvals[0]}" if len(outcome.pending_approvals) == 1 else ""
                print_note(f"to answer: handrail approve{only}")
            print_note(f"to resume: handrail run --resume {self._session_id}{self._again}")
        about = "about " if outcome.tokens_estimated else ""
        tokens = f"{about}{outcome.input_tokens + outcome.output_tokens:,} tokens"
        print_note(f"{outcome.turns} turns, {outcome.calls} calls, {tokens}, {outcome.seconds:.1f} s")

    def _print_row(self, mark: str, name: str, about: str, colour: str) -> None:
        self._end_text()
        further = about.replace("\r\n", "\n").replace("\n", "\n    ")
        with suppress(OSError):
            print_styled_line((mark, colour), (to_one_line(name), "bold"), (f"  {further}", ""), stream=sys.stderr)

    def _end_text(self) -> None:
        if self._in_text:
            print_requested_text("")
            sys.stdout.flush()
            self._in_text = False


def _warning_text(
    event: ProviderToolUnavailable | ReplyInterrupted | RetryDelayed | ConversationCompacted,
) -> tuple[str, str]:
    """Return the subject and the text of a warning."""
    from handrail.agent import run_events as kinds

    match event:
        case kinds.ProviderToolUnavailable(tool_id, reason):
            return tool_id, f"unavailable for this model: {reason}"
        case kinds.ReplyInterrupted(reason, again):
            return "the reply was cut off", f"{reason}{'; retrying' if again else ''}"
        case kinds.RetryDelayed(attempt, attempts, delay_s, reason):
            return "no reply yet", f"{reason}; retrying in {delay_s:.0f} s ({attempt} of {attempts})"
        case kinds.ConversationCompacted():
            return "the conversation was compacted" if event.was_requested else "the conversation is long", str(event)


def _text_of(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def shorten_to_line(text: str, most: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return text as one line of at most ``most`` characters, with the number of left-out ones."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more)"
