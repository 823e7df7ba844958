"""``handrail sessions``: which conversations a workspace has, what was said in one, and how one is closed for good."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from handrail.faces.cli.app import OUTPUT
from handrail.faces.cli.completing import session_ids
from handrail.faces.cli.driving import Interruption, drive, opened
from handrail.faces.cli.options import Setting, common
from handrail.faces.cli.show import columns, note, out, visible

if TYPE_CHECKING:
    from handrail.record.reading import LogReader
    from handrail.session.facts import SessionFacts, SessionReader

_DAY_NS = 86_400 * 10**9
_UNITS = ((_DAY_NS, "d"), (3_600 * 10**9, "h"), (60 * 10**9, "min"), (10**9, "s"))


@click.command("sessions")
@click.argument("action", required=False, type=click.Choice(["show", "fork", "close"]), metavar="[show|fork|close]")
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=session_ids)
@click.option("--older", type=click.FloatRange(min=0), metavar="DAYS", help="close: every one unused for so long.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The latest so many.")
@common
def command(setting: Setting, action: str | None, ids: tuple[str, ...], older: float | None, limit: int) -> int:
    """List the sessions of this workspace, the latest first; show, fork or close some.

    A suspended one goes on with: handrail run --resume ID. fork begins another with what was said in one, and
    prints its id. close removes messages and folders for good; the log of the calls stays. Listing and showing
    work beside a running Handrail.
    """
    if older is not None and action != "close":
        raise click.UsageError("--older belongs to close: handrail sessions close --older DAYS")
    if action is None:
        with reading(setting) as (reader, _):
            _list(setting, reader.all(limit=limit))
        return OUTPUT
    if action == "show":
        _show(setting, _one(action, ids))
        return OUTPUT
    if action == "fork":
        parent = _one(action, ids)
        return drive(lambda _: _fork(setting, parent))
    if not ids and older is None:
        raise click.UsageError("name the sessions to close, or give --older DAYS")
    return drive(lambda interruption: _close(setting, ids, older, interruption))


def _one(action: str, ids: Sequence[str]) -> str:
    if len(ids) != 1:
        raise click.UsageError(f"name one session: handrail sessions {action} ID")
    return ids[0]


@contextmanager
def reading(setting: Setting) -> Generator[tuple[SessionReader, LogReader]]:
    """What is kept of the workspace, whoever holds it.

    :raises StartError: where nothing is kept, or it cannot be read
    """
    from handrail.record.reading import LogReader
    from handrail.session.facts import SessionReader
    from handrail.store.folders import locate
    from handrail.store.lease import Lease

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    with LogReader.at(folders.database) as log:
        holder = Lease.holder_of(folders)
        yield SessionReader(log.connection, None if holder is None else holder.token), log


def to_resume(setting: Setting, session_id: str) -> str:
    """The id of the session to go on with.

    :param session_id: ``""`` for the last one that nobody has open and in which something was said
    :raises UsageError: when there is none, or it cannot go on
    """
    with reading(setting) as (reader, _):
        if not session_id:
            latest = reader.latest()
            if latest is None:
                raise click.UsageError("there is no session to go on with; handrail sessions lists those there are")
            return latest.id
        found = reader.get(session_id)
        if found is None:
            raise _unknown(reader, session_id)
    if found.state == "closed":
        raise click.UsageError(f"session {session_id} was closed for good: nothing that was said in it is kept")
    if found.under:
        raise click.UsageError(
            f"session {session_id} is a sub-agent's and does not go on by itself; begin another with what was said in it: "
            f"handrail run --fork {session_id}"
        )
    if found.state == "open":
        raise click.UsageError(
            f"session {session_id} is open elsewhere; it goes on where it is, or when that has ended"
        )
    return session_id


def _list(setting: Setting, found: Sequence[SessionFacts]) -> None:
    if setting.json:
        for facts in found:
            out(json.dumps(asdict(facts), ensure_ascii=False))
        return
    if not found:
        note("no sessions are kept")
        return
    rows = [("SESSION", "STATE", "USED", "FACE", "AGENT", "MESSAGES", "CALLS", "ABOUT")]
    rows += [
        (
            facts.id,
            facts.state,
            age(facts.used_ns),
            facts.face,
            facts.agent,
            str(facts.messages),
            str(facts.calls),
            _about(facts),
        )
        for facts in found
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in columns(rows):
        shown = line if width is None else visible(line)
        out(shown if width is None or len(shown) <= width else shown[: width - 1] + "…")


def _about(facts: SessionFacts) -> str:
    told = [facts.topic or facts.task or ""]
    if facts.under:
        told.insert(0, f"[sub-agent of {facts.under}]")
    if facts.parked:
        told.insert(0, f"[waits for {', '.join(facts.parked)}]")
    if facts.decided:
        told.insert(0, f"[decided: {', '.join(facts.decided)}]")
    return " ".join(told).replace("\n", "\\n").strip()


def age(at_ns: int) -> str:
    """How long ago, in its largest unit."""
    passed = max(0, time.time_ns() - at_ns)
    for size, unit in _UNITS:
        if passed >= size:
            return f"{passed // size} {unit} ago"
    return "now"


def _show(setting: Setting, session_id: str) -> None:
    with reading(setting) as (reader, log):
        facts = reader.get(session_id)
        if facts is None:
            raise _unknown(reader, session_id)
        messages = reader.messages(session_id)
        calls = log.calls(session=session_id)
    if setting.json:
        whole = {"session": asdict(facts), "messages": messages, "calls": [asdict(row) for row in calls]}
        out(json.dumps(whole, ensure_ascii=False, default=str))
        return
    told: dict[str, Any] = {**asdict(facts), "parked": ", ".join(facts.parked), "decided": ", ".join(facts.decided)}
    for name, value in told.items():
        if value not in (None, (), ""):
            out(f"{name.removesuffix('_ns')}: {age(value) if name.endswith('_ns') else value}")
    for line in _said(messages):
        out(line)


def _said(kept: Sequence[Mapping[str, Any]]) -> Generator[str]:
    """The conversation as a person reads it. What calls were answered with stands whole in the log."""
    from handrail.agent.history import restored
    from handrail.agent.model import AssistantMessage, CallPart, ResultsMessage, TextPart, UserMessage
    from handrail.faces.cli.run import shortened

    found = restored(enumerate(kept))
    for message in (*found.messages, *([found.open.message] if found.open is not None else [])):
        match message:
            case UserMessage(text):
                yield f"\n> {text}"
            case AssistantMessage(parts):
                for part in parts:
                    if isinstance(part, TextPart):
                        yield part.text
                    elif isinstance(part, CallPart):
                        yield f"→ {part.name}  {shortened(json.dumps(dict(part.arguments), ensure_ascii=False))}"
            case ResultsMessage(results):
                for result in results:
                    yield f"{'✗' if result.is_error else '✓'} {shortened(result.text)}"
    if found.open is not None:
        yield f"({len(found.open.missing)} without an answer yet)"


def _unknown(reader: SessionReader, session_id: str) -> click.UsageError:
    from handrail.contract.names import nearest

    near = nearest(session_id, [facts.id for facts in reader.all(limit=200)], 1)
    hint = f"did you mean {near[0]}?" if near else "handrail sessions lists those there are"
    return click.UsageError(f"there is no session {session_id[:80]!r}; {hint}")


async def _fork(setting: Setting, parent: str) -> int:
    async with opened(setting) as kernel:
        forked = await kernel.fork(parent)
    out(json.dumps({"session": forked, "parent": parent}) if setting.json else forked)
    return OUTPUT


async def _close(setting: Setting, ids: Sequence[str], older: float | None, interruption: Interruption) -> int:
    with reading(setting) as (reader, _):
        chosen = list(ids)
        if older is not None:
            before = time.time_ns() - int(older * _DAY_NS)
            found = reader.all(limit=1_000_000)
            chosen += [f.id for f in found if f.state == "suspended" and f.used_ns <= before and f.id not in ids]
        for session_id in ids:
            if reader.get(session_id) is None:
                raise _unknown(reader, session_id)
    closed: list[str] = []
    if chosen:
        async with opened(setting) as kernel:
            for session_id in chosen:
                if interruption.happened:
                    break
                await kernel.close_session(session_id)
                closed.append(session_id)
    if setting.json:
        out(json.dumps({"closed": closed}))
    else:
        note(f"closed {len(closed)} session{'' if len(closed) == 1 else 's'}")
    return OUTPUT
