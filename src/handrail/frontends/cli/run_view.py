"""The views of a run: one JSON object per event for programs, and text, calls and results for people."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from handrail.frontends.cli.renderer import MarkdownFormatter, TerminalRenderer, format_call_arguments
from handrail.frontends.cli.terminal_output import escape_to_one_line, print_json, print_terminal_safe_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from handrail.agent.run_events import (
        AgentEvent,
        ConversationCompacted,
        ProviderToolUnavailable,
        ProviderToolUsed,
        ReplyInterrupted,
        RetryDelayed,
        RunOutcome,
    )
    from handrail.contract.calls_and_results import CallAnswer, ProposedCall


class JsonLinesRunView:
    """A view that prints one JSON object per line on stdout."""

    def receive_session_opened(self, session_id: str) -> None:
        print_json({"event": "session", "id": session_id}, lines=True)
        sys.stdout.flush()

    def show(self, event: AgentEvent) -> None:
        if (line := event_data(event)) is not None:
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
            fields = {"position": position, "call_id": answer.call_id, "tool": answer.tool_id or call.name}
            return {"event": "result", **fields, "result": answer.result.to_dict()}
        case kinds.RunFinished(outcome):
            return {"event": "finished", **asdict(outcome)}
        case kinds.ProviderToolUnavailable(tool_id, reason):
            return {"event": "provider-tool-unavailable", "tool": tool_id, "reason": reason}
        case kinds.NotificationsDelivered(notices):
            fields = [{"id": one.id, "kind": one.kind, "from": one.source, "text": one.text} for one in notices]
            return {"event": "notifications", "notices": fields}
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
    """A view of a run for people: the model's text on stdout, calls and results on stderr.

    On a terminal, the text is rendered as Markdown, line by line as it arrives. Elsewhere it is exact.

    :param again: the model options for the command that resumes the session; None in a conversation, which goes on
    """

    def __init__(self, again: str | None) -> None:
        self._again = again
        self._text = TerminalRenderer(sys.stdout)
        self._calls = TerminalRenderer(sys.stderr)
        self._is_rendered = sys.stdout.isatty()
        self._markdown = MarkdownFormatter()
        self._line = ""
        """The incomplete last line of the model's text."""
        self._in_text = False
        self._is_after_call = False
        self._session_id = ""

    def receive_session_opened(self, session_id: str) -> None:
        self._session_id = session_id

    def show(self, event: AgentEvent) -> None:
        from handrail.agent import run_events as kinds

        match event:
            case kinds.TextDelta(text):
                self._show_text(text)
            case kinds.CallProposed(_, call):
                self._print_call(call)
            case kinds.CallAnswered(_, call, answer):
                self._print_answer(call, answer)
            case kinds.ProviderToolUsed():
                self._print_provider_tool(event)
            case (
                kinds.ProviderToolUnavailable()
                | kinds.ReplyInterrupted()
                | kinds.RetryDelayed()
                | kinds.ConversationCompacted()
            ):
                self._print_note("!", "yellow", *_warning_text(event))
            case kinds.NotificationsDelivered(notices):
                for notice in notices:
                    self._print_note("•", "blue", f"{notice.kind} {notice.source}", notice.text)
            case kinds.AgentIdle():
                self._print("Waiting for background work. Press Ctrl-C to stop.", style="dim")
            case kinds.RunFinished(outcome):
                self._print_outcome(outcome)
            case _:
                pass

    def _show_text(self, text: str) -> None:
        if self._is_after_call and self._is_rendered and text.strip():
            self._text.write_line()
        self._is_after_call = self._is_after_call and not text.strip()
        if not self._is_rendered:
            print_terminal_safe_text(text, end="")
            sys.stdout.flush()
            self._in_text = not text.endswith("\n")
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._text.print_markdown_line(self._markdown, line)
        self._in_text = bool(self._line)
        sys.stdout.flush()

    def end_text(self) -> None:
        """End the model's text: what is printed next begins another line."""
        if self._in_text:
            if self._is_rendered:
                self._text.print_markdown_line(self._markdown, self._line)
            else:
                print_terminal_safe_text("")
            sys.stdout.flush()
        self._line, self._in_text, self._is_after_call = "", False, True

    def _print_call(self, call: ProposedCall) -> None:
        self.end_text()
        with suppress(OSError):
            self._calls.print_call(("→", "cyan"), call.name, _arguments_of(call))
            sys.stderr.flush()

    def _print_answer(self, call: ProposedCall, answer: CallAnswer) -> None:
        self.end_text()
        result, view = answer.result, self._calls
        mark, style = ("✓", "green") if result.ok else ("✗", "red")
        note = f"{result.metadata.get('duration_ms', 0):.0f} ms" if result.ok else str(result.error_kind)
        head = f"{mark} {escape_to_one_line(answer.tool_id or call.name)}  {note}  "
        subject = escape_to_one_line(format_call_arguments(_arguments_of(call) or {}))
        room = max(0, view.width - len(head))
        with suppress(OSError):
            view.write_line(
                (f"{mark} ", style),
                (escape_to_one_line(answer.tool_id or call.name), "bold"),
                (f"  {note}", "" if result.ok else "red"),
                (
                    f"  {subject if len(subject) <= room else f'{subject[: max(0, room - 1)]}…'}" if subject else "",
                    "dim",
                ),
            )
            view.print_result(result)
            sys.stderr.flush()

    def _print_provider_tool(self, event: ProviderToolUsed) -> None:
        kept = (event.problem and f"not saved: {event.problem}") or ", ".join(event.artifacts)
        mark, style = ("✗", "red") if event.failed or event.problem else ("✓", "green")
        asked = format_call_arguments(event.arguments) if event.arguments else ""
        self._print_note(mark, style, event.name, "  ".join(part for part in ("by the provider", asked, kept) if part))

    def _print_outcome(self, outcome: RunOutcome) -> None:
        if not outcome.ok:
            self._print(f"{outcome.status}: {outcome.detail}", style="yellow")
            if outcome.pending_approvals:
                only = f" {outcome.pending_approvals[0]}" if len(outcome.pending_approvals) == 1 else ""
                self._print_command(f"to answer: handrail approve{only}")
            if self._again is not None:
                self._print_command(f"to resume: handrail run --resume {self._session_id}{self._again}")
        self._print(format_run_statistics(outcome), style="dim")

    def _print_note(self, mark: str, style: str, subject: str, about: str) -> None:
        self.end_text()
        with suppress(OSError):
            text = about.replace("\r\n", "\n")
            self._calls.print_text(
                (mark, style), " ", (escape_to_one_line(subject), "bold"), f"  {text}", further="    "
            )
            sys.stderr.flush()

    def _print(self, text: str, *, style: str = "") -> None:
        self.end_text()
        with suppress(OSError):
            self._calls.print_text((text, style), further="  ")
            sys.stderr.flush()

    def _print_command(self, text: str) -> None:
        """Print a command to copy, on one line however long it is."""
        self.end_text()
        with suppress(OSError):
            self._calls.write_line((text, "cyan"))
            sys.stderr.flush()


def format_run_statistics(outcome: RunOutcome) -> str:
    """Return the turns, calls, tokens, cost and time of a run in one line."""
    about = "about " if outcome.tokens_estimated else ""
    tokens = f"{about}{outcome.input_tokens + outcome.output_tokens:,} tokens"
    cost = "" if outcome.cost is None else f"cost {outcome.cost:.4f}, "
    turns = f"{outcome.turns} turn{'' if outcome.turns == 1 else 's'}"
    calls = f"{outcome.calls} call{'' if outcome.calls == 1 else 's'}"
    return f"{turns}, {calls}, {tokens}, {cost}{outcome.seconds:.1f} s"


def _arguments_of(call: ProposedCall) -> Mapping[str, Any] | None:
    """Return the arguments of a proposed call; None if they are not an object."""
    given: object = call.arguments
    if isinstance(given, (str, bytes)):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return cast("Mapping[str, Any]", given) if isinstance(given, dict) else None


def _warning_text(
    event: ProviderToolUnavailable | ReplyInterrupted | RetryDelayed | ConversationCompacted,
) -> tuple[str, str]:
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
