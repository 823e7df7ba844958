"""``handrail log``: the events in a workspace, a verification of their record, and its purge."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.completing import call_ids, session_ids
from handrail.frontends.cli.driving import say_what_is_missing
from handrail.frontends.cli.options import Setting, located
from handrail.frontends.cli.show import amount, confirm, note, one_line, out, out_json, out_rows

if TYPE_CHECKING:
    from handrail.record.reading import CallRow, LoggedRecord, LogReader
    from handrail.record.retention import Purged, Selection, Survey
    from handrail.record.verification import Verification
    from handrail.store.folders import Folders


_HASH = re.compile(r"[0-9a-f]{64}")
_OF_A_TOPIC = 60
"""Characters of a topic that a line of a call shows."""
_NO_CALLS = ("provided", "instructions-read", "compacted")
"""Kinds of records that stand among the calls: what was done for a model otherwise."""


@click.command("log")
@click.argument(
    "action",
    required=False,
    type=click.Choice(["verify", "acknowledge", "purge"]),
    metavar="[verify|acknowledge|purge]",
)
@click.option("--head", metavar="HASH", help="verify: this record must still be there.")
@click.option("--before", metavar="DAYS|DATE", help="purge: what is older than so many days, or than a date.")
@click.option("--dry-run", is_flag=True, help="purge: only show what would go.")
@click.option("--yes", is_flag=True, help="purge, acknowledge: do not ask.")
@click.option("--call", metavar="ID", shell_complete=call_ids, help="Every record of one call, whole.")
@click.option("--session", metavar="ID", shell_complete=session_ids, help="One session only.")
@click.option("--records", is_flag=True, help="Every record, instead of one line per call.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The newest so many.")
@located
def command(
    setting: Setting,
    action: str | None,
    head: str | None,
    before: str | None,
    dry_run: bool,
    yes: bool,
    call: str | None,
    session: str | None,
    records: bool,
    limit: int,
) -> int:
    """Show what happened in this workspace, verify the record of it, or purge it of what is old.

    Showing and verifying work beside a running Handrail. Note the head that verify prints: with --head it tells later whether
    anything up to there was cut off or rewritten. Exits with 1 when the log is not intact. On a terminal a line
    per call is cut at its edge; --call shows one whole. What a model's provider carried out itself stands among the calls,
    and so do the project's instruction files that were read above the workspace.

    verify also tells where the database was replaced by an older copy: how far the log was written is kept apart from it.
    Handrail does not start with such a log. acknowledge goes on with it, and records how many records are missing.

    purge removes what was recorded, for good, with the sessions that are older as a whole and the files that
    nothing else refers to: --before 30, --session ID. The log still verifies afterwards, and says how many records
    were redacted.
    """
    from handrail.record.reading import LogReader
    from handrail.store.folders import locate

    if action != "purge" and (before is not None or dry_run or (yes and action != "acknowledge")):
        raise click.UsageError("--before, --dry-run and --yes belong to purge: handrail log purge --before DAYS|DATE")
    _check_head(action, head)
    if action == "purge":
        if call is not None or records:
            raise click.UsageError("purge goes by --before and --session; --call and --records only show")
        return purge(setting, before, session, dry_run=dry_run, yes=yes)
    if action == "acknowledge":
        return acknowledge(setting, yes=yes)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    if not folders.database.exists():
        return _without_one(setting, folders, action, head)
    with LogReader.at(folders.database) as reader:
        say_what_is_missing("log", folders, reader)
        if action == "verify":
            return _verify(setting, reader, folders, head)
        return _show_log(setting, reader, folders, session, call, records=records, limit=limit)


def _check_head(action: str | None, head: str | None) -> None:
    if action != "verify" and head is not None:
        raise click.UsageError("--head belongs to verify: handrail log verify --head HASH")
    if head is not None and not _HASH.fullmatch(head):
        raise click.UsageError(
            f"--head {head!r} is no head; expected the 64 hexadecimal digits that log verify printed"
        )


def _show_log(
    setting: Setting,
    reader: LogReader,
    folders: Folders,
    session: str | None,
    call: str | None,
    *,
    records: bool,
    limit: int,
) -> int:
    from sqlite3 import DatabaseError

    from handrail.contract.errors import StartError

    try:
        if call is not None or records:
            chosen = list(reader.records(session=session, call=call, limit=limit, newest_first=True))
            _show_records(setting, chosen[::-1], whole=call is not None)
        else:
            rows = reader.calls(session=session, limit=limit)
            since = rows[0].first if len(rows) == limit else 0
            beside: list[LoggedRecord] = []
            for kind in _NO_CALLS:
                beside += reader.records(session=session, kind=kind, since=since, limit=limit, newest_first=True)
            _show_calls(setting, rows, beside)
    except DatabaseError as error:
        raise StartError(
            f"the log {folders.database} is damaged: {error}. handrail log verify says where; keep a copy for inspection"
        ) from None
    return OUTPUT


def _without_one(setting: Setting, folders: Folders, action: str | None, head: str | None) -> int:
    """No log is none that was cut, unless somebody has noted a head of it."""
    from handrail.record.chain import GENESIS
    from handrail.record.verification import Verification
    from handrail.store.database.journal import written

    what = f"nothing is recorded yet for the workspace {folders.workspace} in the state folder {folders.state}"
    noted = head is not None and head != GENESIS.hex()
    known = written(folders)
    gone = noted or known is not None
    why = f"no record has the hash {head}" if noted or known is None else f"record {known[0]} was written"
    if action == "verify" and setting.json:
        problem = f"{why}: {what}" if gone else None
        out_json(asdict(Verification(not gone, 0, GENESIS.hex(), problem=problem)))
    elif gone:
        note(f"handrail log: not intact: {why}: {what}")
    else:
        note(what)
    return ERROR if gone else OUTPUT


def _verify(setting: Setting, reader: LogReader, folders: Folders, head: str | None) -> int:
    from handrail.record.verification import verify
    from handrail.store.database.journal import written

    found = verify(reader, head, lambda: written(folders))
    if setting.json:
        out_json(asdict(found))
    elif found.ok:
        out(str(found))
    else:
        sys.stdout.flush()
        note(f"handrail log: {found}")
    return OUTPUT if found.ok else ERROR


def _show_calls(setting: Setting, rows: list[CallRow], beside: list[LoggedRecord]) -> None:
    """:param beside: what is no call"""
    whole = sorted([(row.first, row) for row in rows] + [(one.sequence, one) for one in beside], key=lambda one: one[0])
    if setting.json:
        for _, row in whole:
            out_json(_as_data(row), lines=True)
        return
    if not whole:
        note("no calls are recorded")
    out_rows(_line(row) for _, row in whole)


def _line(row: CallRow | LoggedRecord) -> tuple[str, ...]:
    from handrail.record.reading import CallRow

    if isinstance(row, CallRow):
        return _time(row.proposed_ns), row.call_id, row.tool or "?", row.state, _about(row)
    body = row.body or {}
    if row.kind == "instructions-read":
        files = ", ".join(map(_read_above, body.get("files") or ())) if row.body is not None else "redacted"
        return _time(row.at_ns), row.session_id, "instructions", row.kind, files
    if row.kind == "compacted":
        told = f"{body.get('messages')} messages left out, {body.get('kept')} kept"
        return _time(row.at_ns), row.session_id, "conversation", row.kind, told if row.body is not None else "redacted"
    how = "failed" if body.get("failed") else "done"
    about = (
        f"{how} by {body.get('provider') or 'the provider'}: {json.dumps(body.get('arguments'), ensure_ascii=False)}"
    )
    name = str(body.get("tool") or body.get("name") or "?")
    return _time(row.at_ns), row.session_id, name, "provided", about if row.body is not None else "redacted"


def _read_above(file: dict[str, Any]) -> str:
    how = f"sha256 {str(file.get('sha256'))[:12]}" if "sha256" in file else f"left out: {file.get('left_out')}"
    return f"{file.get('path')} ({how})"


def _as_data(row: CallRow | LoggedRecord) -> dict[str, Any]:
    from handrail.record.reading import CallRow

    if isinstance(row, CallRow):
        return asdict(row)
    about = {
        "call_id": "",
        "session_id": row.session_id,
        "state": row.kind,
        "at_ns": row.at_ns,
        "first": row.sequence,
    }
    return {**(row.body or {}), **about}


def _about(row: CallRow) -> str:
    if row.error_kind is not None:
        ended = f"{row.error_kind}: {row.error_text or ''}"
    else:
        ended = "" if row.ended_ns is None else f"{(row.ended_ns - row.proposed_ns) / 1e6:.0f} ms"
    if row.topic is None:
        return ended
    cut = row.topic if len(row.topic) <= _OF_A_TOPIC else f"{row.topic[:_OF_A_TOPIC]}…"
    return f"{ended}; topic: {cut}" if ended else f"topic: {cut}"


def _show_records(setting: Setting, records: list[LoggedRecord], *, whole: bool) -> None:
    if setting.json:
        for record in records:
            out_json(asdict(record), lines=True)
        return
    if not records:
        note("there are no such records; handrail log lists the calls there are")
    for record in records:
        body = "redacted" if record.body is None else json.dumps(record.body, ensure_ascii=False, default=str)
        shown = body if whole or len(body) <= 120 else body[:119] + "…"
        about = one_line(f"{record.kind}  {record.call_id or record.session_id}  {shown}")
        out(f"{record.sequence}  {_time(record.at_ns)}  {about}")


def _time(at_ns: int) -> str:
    """With its offset from UTC where a program may read it, without where a line is short."""
    local = datetime.fromtimestamp(at_ns / 1e9).astimezone()
    if sys.stdout.isatty():
        return local.strftime("%Y-%m-%d %H:%M:%S")
    return local.isoformat(sep=" ", timespec="milliseconds")


# ``handrail log purge``: permanent removal of recorded data, after a person has seen it and agreed.


def purge(setting: Setting, before: str | None, session: str | None, *, dry_run: bool, yes: bool) -> int:
    """Carry the command out. Gives its exit code.

    :raises UsageError: for a moment that is none, nothing chosen, or nobody to ask and no ``--yes``
    :raises StartError: when another process holds the workspace, or the log cannot be written
    """
    from handrail.record.log import noted
    from handrail.record.reading import LogReader
    from handrail.record.retention import survey
    from handrail.store.folders import locate

    selection = _selection(before, session)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    if not folders.database.exists():
        return _nothing(setting)
    with LogReader.at(folders.database) as reader:
        found = survey(reader, folders, selection)
        missing = noted(reader.connection, folders.own)
    if found.empty and not missing:
        return _nothing(setting)
    if missing:
        note(
            f"{len(missing)} records are noted and not in the log yet: they are written first, and then chosen as the others"
        )
    if dry_run:
        out_json({"dry_run": True, **_counted(found)}) if setting.json else _show(found, selection)
        return OUTPUT
    check_alone(folders, "a purge")
    if not setting.json or not yes:
        _show(found, selection)
    agreed(yes, "Remove that for good?")
    done, verified = asyncio.run(_purge(setting, folders, selection))
    _show_purged(setting, done, verified)
    return OUTPUT if verified.ok and not done.problems else ERROR


def _selection(before: str | None, session: str | None) -> Selection:
    from handrail.record.retention import Selection
    from handrail.store.folders import check_session_id

    if before is None and session is None:
        raise click.UsageError("say what is to go: --before 30 (days), --before 2026-01-31, or --session ID")
    if session is not None:
        check_session_id(session)
    return Selection(None if before is None else moment(before, datetime.now().astimezone()), session)


def _show_purged(setting: Setting, done: Purged, verified: Verification) -> None:
    if setting.json:
        out_json({"dry_run": False, **asdict(done), "verification": asdict(verified)})
        return
    out(f"removed {done.records:,} bodies, {done.sessions:,} sessions, {done.files:,} files and folders")
    for problem in done.problems:
        note(f"handrail log purge: {problem}")
    out(str(verified)) if verified.ok else note(f"handrail log purge: {verified}")


def check_alone(folders: Folders, what: str) -> None:
    """:param what: needs the workspace to itself
    :raises StartError: when another process holds the workspace, with what to do"""
    from handrail.contract.errors import StartError
    from handrail.store.lease import holder_of

    holder = holder_of(folders)
    if holder is not None and holder.state == "alive":
        how = "end that process" if holder.pid is None else f"end that process (kill {holder.pid})"
        raise StartError(
            f"the workspace {folders.workspace} is in use by {holder}; {what} needs it to itself: {how} and those that "
            "joined it, then do this again (--dry-run looks without that)"
        )


def agreed(yes: bool, question: str, done: str = "removed") -> None:
    """Return when a person agrees or has agreed with ``--yes``.

    :raises UsageError: when nobody can be asked
    :raises Abort: when they do not agree
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"nothing was {done}: nobody can be asked here. Pass --yes to agree"
            + (", or --dry-run to look" if done == "removed" else "")
        )
    if not confirm(question, err=True):
        raise click.Abort


def moment(text: str, now: datetime) -> int:
    """``30`` or ``30d`` as so many days ago, or a date or time in ISO form; wall-clock nanoseconds.

    :raises UsageError: for what is neither, or lies in the future
    """
    days = text.removesuffix("d")
    try:
        if days.isascii() and days.isdigit():
            then = now - timedelta(days=int(days))
        else:
            then = datetime.fromisoformat(text)
            then = then if then.tzinfo is not None else then.astimezone()
        nanoseconds = int(then.timestamp()) * 1_000_000_000 + then.microsecond * 1000
    except (ValueError, OverflowError, OSError):
        raise click.UsageError(
            f"--before {text[:80]!r} is no moment; expected days (30), a date (2026-01-31) or a time (2026-01-31T18:00)"
        ) from None
    if then > now:
        raise click.UsageError(f"--before {text!r} lies in the future; --before 0 stands for everything until now")
    return nanoseconds


async def _purge(setting: Setting, folders: Folders, selection: Selection) -> tuple[Purged, Verification]:
    from dataclasses import replace

    from handrail.record.log import CommitLog
    from handrail.record.reading import LogReader
    from handrail.record.retention import purge
    from handrail.record.verification import verify
    from handrail.store.database.connection import compact
    from handrail.store.opening import Store

    store = Store.open(setting.workspace, setting.state, face="log purge", allow_home=setting.allow_home)
    try:
        log = CommitLog(store.database)
        await log.recover()
        done = await purge(log, store.database, folders, selection, reason=f"handrail log purge: {selection}")
        await asyncio.to_thread(store.database.close)
        compaction = await asyncio.to_thread(compact, folders.database)
    finally:
        await store.aclose()
    if compaction.problem is not None:
        done = replace(done, problems=(*done.problems, compaction.problem))
    with LogReader.at(folders.database) as reader:
        return done, await asyncio.to_thread(verify, reader)


def _nothing(setting: Setting) -> int:
    if setting.json:
        out_json({"dry_run": False, "records": 0, "sessions": 0, "files": 0})
    else:
        note("there is nothing to remove")
    return OUTPUT


def _show(found: Survey, selection: Selection) -> None:
    out(f"{selection}:")
    span = ""
    if found.oldest_ns is not None and found.newest_ns is not None:
        begin, end = (datetime.fromtimestamp(at / 1e9).astimezone() for at in (found.oldest_ns, found.newest_ns))
        span = f", from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
    out(f"  bodies    {found.records:,} records of {found.calls:,} calls, {amount(found.bytes)}{span}")
    out(f"  sessions  {len(found.sessions):,}, with what their tools remember")
    for session in found.sessions[:20]:
        out(f"            {session}")
    if len(found.sessions) > 20:
        out(f"            and {len(found.sessions) - 20:,} more")
    left_over = found.left_over
    out(f"  files     {len(left_over.paths):,} that nothing else refers to, {amount(left_over.bytes)}")


def _counted(found: Survey) -> dict[str, object]:
    return {
        "records": found.records,
        "bytes": found.bytes,
        "calls": found.calls,
        "oldest_ns": found.oldest_ns,
        "newest_ns": found.newest_ns,
        "sessions": list(found.sessions),
        "files": [str(path) for path in found.left_over.paths],
        "file_bytes": found.left_over.bytes,
    }


# ``handrail log acknowledge``: continue with a log that ends earlier than it was written, if a person agrees.


def acknowledge(setting: Setting, *, yes: bool) -> int:
    """Carry the command out. Gives its exit code.

    :raises UsageError: when nobody can be asked and there is no ``--yes``
    :raises StartError: when another process holds the workspace, or the log cannot be written
    """
    from handrail.contract.errors import StartError
    from handrail.record.log import CommitLog
    from handrail.record.reading import LogReader
    from handrail.store.database.journal import written
    from handrail.store.folders import locate
    from handrail.store.opening import Store

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    check_alone(folders, "this")
    store = Store.open(setting.workspace, setting.state, face="log acknowledge", allow_home=setting.allow_home)
    try:
        log = CommitLog(store.database, acknowledged=True)
        reader = LogReader(store.database.reading)
        try:
            known = written(folders)
            missing = reader.missing(known)
        except StartError as error:  # the file that tells it is damaged
            known, missing = None, str(error)
        if missing is None:
            note("the log holds all that is known to have been written; there is nothing to acknowledge")
            return OUTPUT
        if not setting.json:
            out(f"the log {folders.database}: {missing}")
        agreed(yes, "Go on with it?", "acknowledged")
        count = max(0, (0 if known is None else known[0]) - reader.head().sequence)
        asyncio.run(_acknowledged(log, store, count, missing))
    finally:
        asyncio.run(store.aclose())
    if setting.json:
        out_json({"acknowledged": missing, "records": count})
    else:
        out(
            f"acknowledged; the log says that {count:,} records are missing, and handrail log verify counts them as lost"
        )
    return OUTPUT


async def _acknowledged(log: object, store: object, count: int, missing: str) -> None:
    """Record it, and begin with what the log holds then."""
    from handrail.record.log import CommitLog, Record
    from handrail.store.database.journal import HeadFile
    from handrail.store.opening import Store

    assert isinstance(log, CommitLog)
    assert isinstance(store, Store)
    await log.recover()
    await log.commit([Record("lost", "", "", {"records": count, "acknowledged": missing})])
    head = log.reader.head()
    file = HeadFile(store.folders)
    try:
        file.replace(head.sequence, bytes.fromhex(head.hash))
    finally:
        file.close()
