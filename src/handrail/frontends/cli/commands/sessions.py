"""``handrail sessions``: the conversations of a workspace, shown, forked or closed."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, DurationParamType, add_agent_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    apply_session_agent,
    make_unknown_session_error,
    open_configured_kernel,
    open_session_and_log_readers,
    run_on_event_loop,
)
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import session_ids
from handrail.frontends.cli.terminal_output import (
    escape_to_one_line,
    format_time_since,
    print_escaped_line,
    print_escaped_lines,
    print_json,
    print_stderr_note,
    shorten,
)

if TYPE_CHECKING:
    from handrail.session.transcript_search import StoredSessionSummary

_DAY_NS = 86_400 * 10**9


@click.command("sessions")
@click.argument(
    "action", required=False, type=click.Choice(["list", "show", "fork", "close"]), metavar="[list|show|fork|close]"
)
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=session_ids)
@click.option(
    "--unused-for",
    type=DurationParamType("days"),
    metavar="DAYS",
    help="close: sessions unused for more than DAYS days.",
)
@click.option("--all", "closed", is_flag=True, help="List closed sessions too.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of sessions.")
@add_agent_options
def command(
    setting: CommandOptions,
    action: str | None,
    ids: tuple[str, ...],
    unused_for: float | None,
    closed: bool,
    limit: int,
) -> int:
    """List, show, fork or close sessions.

    Lists the sessions of this workspace, the latest first. To continue a suspended session: handrail run --resume ID. fork
    creates a session with the messages of another, and prints its ID. close removes messages and folders permanently; the
    log of the calls stays. Listing and showing work while Handrail runs.
    """
    if unused_for is not None and action != "close":
        raise click.UsageError("`--unused-for` is an option of `close`. Run: handrail sessions close --unused-for DAYS")
    if action == "close" and not ids and unused_for is None:
        raise click.UsageError("The sessions to close are missing. Pass their IDs, or `--unused-for DAYS`.")
    named = _single_id(action, ids) if action in ("show", "fork") else ""
    from handrail.store.database.sqlite_connection import DatabaseNotCreated

    try:
        if action in (None, "list"):
            with open_session_and_log_readers(setting) as (reader, _):
                none = (
                    "No sessions." if closed else "No session is open or can be resumed. `--all` lists closed ones too."
                )
                _list(setting, reader.list_sessions(limit=limit, closed=closed), none)
        elif action == "show":
            _show(setting, named)
        elif action == "fork":
            return run_on_event_loop(lambda _: _fork(apply_session_agent(setting, named), named))
        else:
            return run_on_event_loop(lambda interruption: _close(setting, ids, unused_for, interruption))
    except DatabaseNotCreated:
        if ids:
            raise click.UsageError(
                f"Session {ids[0][:80]!r} does not exist. This workspace has no sessions yet. Start one with `handrail run`."
            ) from None
        _list(setting, [])
    return OUTPUT


def _single_id(action: str, ids: Sequence[str]) -> str:
    if len(ids) != 1:
        raise click.UsageError(f"Expected exactly one session: handrail sessions {action} ID")
    return ids[0]


def _list(setting: CommandOptions, found: Sequence[StoredSessionSummary], none: str = "No sessions.") -> None:
    if setting.json:
        for facts in found:
            print_json(asdict(facts), lines=True)
        return
    if not found:
        print_stderr_note(none)
        return
    view = TerminalRenderer()
    for facts in found:
        used = f"used {format_time_since(facts.used_ns)}, {facts.frontend}, agent {facts.agent}"
        counts = f"{_plural(facts.messages, 'message')}, {_plural(facts.calls, 'call')}"
        state = (f"  {facts.state}", "green" if facts.state == "open" else "")
        view.print_text((facts.id, "bold"), state, (f"  {used}, {counts}", "dim"), further="    ")
        for model in facts.usage:
            view.print_text((str(model), "dim"), indent="    ", further="      ")
        if summary := _session_summary(facts):
            view.print_text(escape_to_one_line(summary), indent="    ", further="    ")


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _session_summary(facts: StoredSessionSummary) -> str:
    items = [facts.topic or facts.task or ""]
    if facts.parent_session:
        items.insert(0, f"[sub-agent of {facts.parent_session}]")
    if facts.awaiting_approval:
        items.insert(0, f"[waits for approval: {', '.join(facts.awaiting_approval)}]")
    if facts.decided:
        items.insert(0, f"[answered: {', '.join(facts.decided)}]")
    return " ".join(items).strip()


def _show(setting: CommandOptions, session_id: str) -> None:
    with open_session_and_log_readers(setting) as (reader, log):
        if (facts := reader.get(session_id)) is None:
            raise make_unknown_session_error(reader, session_id)
        messages = reader.read_messages(session_id)
        calls = log.calls(session=session_id)
    if setting.json:
        whole = {"session": asdict(facts), "messages": messages, "calls": [asdict(row) for row in calls]}
        print_json(whole, lines=True)
        return
    fields: dict[str, Any] = {
        **asdict(facts),
        "awaiting_approval": ", ".join(facts.awaiting_approval),
        "decided": ", ".join(facts.decided),
    }
    for name, value in fields.items():
        if value not in (None, (), ""):
            print_escaped_line(
                f"{name.removesuffix('_ns')}: {format_time_since(value) if name.endswith('_ns') else escape_to_one_line(str(value))}"
            )
    for line in _conversation_lines(messages):
        print_escaped_lines(line)


def _conversation_lines(kept: Sequence[Mapping[str, Any]]) -> Generator[str]:
    """Yield the conversation as readable lines. Results are shortened; the log has them in full."""
    from handrail.agent.conversation import restore_conversation
    from handrail.agent.model_protocol import (
        AssistantMessage,
        CallResultsMessage,
        HistoryCallPart,
        TextPart,
        UserMessage,
    )

    found = restore_conversation(enumerate(kept))
    for message in (*found.messages, *([found.open.message] if found.open is not None else [])):
        match message:
            case UserMessage(text):
                yield "\n> " + text.replace("\n", "\n  ")
            case AssistantMessage(parts):
                for part in parts:
                    if isinstance(part, TextPart):
                        yield "  " + part.text.replace("\n", "\n  ")
                    elif isinstance(part, HistoryCallPart):
                        yield f"→ {escape_to_one_line(part.name)}  {escape_to_one_line(shorten(json.dumps(dict(part.arguments), ensure_ascii=False)))}"
            case CallResultsMessage(results):
                for result in results:
                    yield f"{'✗' if result.is_error else '✓'} {escape_to_one_line(shorten(result.text))}"
    if found.open is not None:
        yield f"({len(found.open.unanswered_calls)} calls without a result yet)"


async def _fork(setting: CommandOptions, parent: str) -> int:
    async with open_configured_kernel(setting) as kernel:
        forked = await kernel.fork_session(parent)
    if setting.json:
        print_json({"session": forked, "parent": parent}, lines=True)
    else:
        print_escaped_line(forked)
    return OUTPUT


async def _close(
    setting: CommandOptions, ids: Sequence[str], unused_for: float | None, interruption: InterruptHandler
) -> int:
    with open_session_and_log_readers(setting) as (reader, _):
        chosen = list(ids)
        if unused_for is not None:
            before = time.time_ns() - int(unused_for * _DAY_NS)
            found = reader.list_sessions(limit=1_000_000)
            chosen += [f.id for f in found if f.state == "suspended" and f.used_ns <= before and f.id not in ids]
        for session_id in ids:
            if reader.get(session_id) is None:
                raise make_unknown_session_error(reader, session_id)
    closed: list[str] = []
    if chosen:
        async with open_configured_kernel(setting) as kernel:
            for session_id in chosen:
                if interruption.is_interrupted:
                    break
                await kernel.close_session(session_id)
                closed.append(session_id)
    if setting.json:
        print_json({"closed": closed}, lines=True)
    else:
        print_stderr_note(f"closed {len(closed)} session{'' if len(closed) == 1 else 's'}")
    return OUTPUT
