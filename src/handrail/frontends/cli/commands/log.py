"""``handrail log``: the log of a workspace, its verification, and its purge."""

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
"""Maximum characters of a topic in the line of a call."""
_NO_CALLS = ("provided", "instructions-read", "compacted")
"""Kinds of records that are listed among the calls, although they are not calls."""


@click.command("log")
@click.argument(
    "action",
    required=False,
    type=click.Choice(["verify", "acknowledge", "purge"]),
    metavar="[verify|acknowledge|purge]",
)
@click.option("--head", metavar="HASH", help="verify: head of an earlier verification. Default: none.")
@click.option("--before", metavar="DAYS|DATE", help="purge: maximum age in days, or a date.")
@click.option("--dry-run", is_flag=True, help="purge: only show what would be removed.")
@click.option("--yes", is_flag=True, help="purge, acknowledge: do not ask.")
@click.option("--call", metavar="ID", shell_complete=call_ids, help="Call whose records are shown in full.")
@click.option("--session", metavar="ID", shell_complete=session_ids, help="Session to show or purge. Default: all.")
@click.option("--records", is_flag=True, help="Show every record instead of one line per call.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of entries.")
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
    """Show, verify or purge the log of a workspace.

    Without an action, shows one line per call, the newest last. On a terminal, long lines are cut; --call shows a call in
    full. The list also contains provider tool uses, and instruction files that were read from folders above the workspace.
    Showing and verifying work while Handrail runs.

    verify checks that the log is intact, prints its head, and exits with 1 if it is not intact. Keep the head: with --head, a
    later verification detects whether earlier records were removed or changed. verify also detects a database that was
    replaced by an older copy. Handrail does not start with such a log. acknowledge accepts it, and records how many records
    are missing.

    purge permanently removes the content of old records, sessions that are entirely older, and files that are no longer
    referenced: --before 30, --session ID. Afterwards the log still verifies, and shows how many records were redacted.
    """
    from handrail.record.reading import LogReader
    from handrail.store.folders import locate

    if action != "purge" and (before is not None or dry_run or (yes and action != "acknowledge")):
        raise click.UsageError(
            "`--before`, `--dry-run` and `--yes` require `purge`: handrail log purge --before DAYS|DATE"
        )
    _check_head(action, head)
    if action == "purge":
        if call is not None or records:
            raise click.UsageError("`purge` accepts `--before` and `--session`, but not `--call` or `--records`.")
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
        raise click.UsageError("`--head` requires `verify`: handrail log verify --head HASH")
    if head is not None and not _HASH.fullmatch(head):
        raise click.UsageError(
            f"Invalid value for `--head`: {head!r}. Expected the 64 hexadecimal digits from `handrail log verify`."
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
            f"The log {folders.database} is damaged: {error}. Keep a copy, and run `handrail log verify` to find the damage."
        ) from None
    return OUTPUT


def _without_one(setting: Setting, folders: Folders, action: str | None, head: str | None) -> int:
    """Report a missing log. It is an error only if records are known to have been written."""
    from handrail.record.chain import GENESIS
    from handrail.record.verification import Verification
    from handrail.store.database.journal import written

    what = f"The state folder {folders.state} has no records of the workspace {folders.workspace}."
    noted = head is not None and head != GENESIS.hex()
    known = written(folders)
    gone = noted or known is not None
    why = f"no record has the hash {head}" if noted or known is None else f"record {known[0]} is missing"
    if action == "verify" and setting.json:
        problem = f"{why}. {what}" if gone else None
        out_json(asdict(Verification(not gone, 0, GENESIS.hex(), problem=problem)))
    elif gone:
        note(f"handrail log: not intact: {why}. {what}")
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
    """Print the calls, and the other records among them.

    :param beside: records that are not calls
    """
    whole = sorted([(row.first, row) for row in rows] + [(one.sequence, one) for one in beside], key=lambda one: one[0])
    if setting.json:
        for _, row in whole:
            out_json(_as_data(row), lines=True)
        return
    if not whole:
        note("No calls are recorded.")
        return
    out_rows([("TIME", "CALL", "TOOL", "STATE", "RESULT"), *(_line(row) for _, row in whole)])


def _line(row: CallRow | LoggedRecord) -> tuple[str, ...]:
    from handrail.record.reading import CallRow

    if isinstance(row, CallRow):
        return _time(row.proposed_ns), row.call_id, row.tool or "?", row.state, _about(row)
    body = row.body or {}
    if row.kind == "instructions-read":
        files = ", ".join(map(_read_above, body.get("files") or ())) if row.body is not None else "redacted"
        return _time(row.at_ns), row.session_id, "instructions", row.kind, files
    if row.kind == "compacted":
        told = f"{body.get('messages')} messages removed, {body.get('kept')} kept"
        return _time(row.at_ns), row.session_id, "conversation", row.kind, told if row.body is not None else "redacted"
    how = "failed" if body.get("failed") else "done"
    about = (
        f"{how} by {body.get('provider') or 'the provider'}: {json.dumps(body.get('arguments'), ensure_ascii=False)}"
    )
    name = str(body.get("tool") or body.get("name") or "?")
    return _time(row.at_ns), row.session_id, name, "provided", about if row.body is not None else "redacted"


def _read_above(file: dict[str, Any]) -> str:
    how = f"sha256 {str(file.get('sha256'))[:12]}" if "sha256" in file else f"skipped: {file.get('left_out')}"
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
        note("No records match. `handrail log` lists the calls.")
    for record in records:
        body = "redacted" if record.body is None else json.dumps(record.body, ensure_ascii=False, default=str)
        shown = body if whole or len(body) <= 120 else body[:119] + "…"
        about = one_line(f"{record.kind}  {record.call_id or record.session_id}  {shown}")
        out(f"{record.sequence}  {_time(record.at_ns)}  {about}")


def _time(at_ns: int) -> str:
    """Return local time: short on a terminal, otherwise with milliseconds and the offset from UTC."""
    local = datetime.fromtimestamp(at_ns / 1e9).astimezone()
    if sys.stdout.isatty():
        return local.strftime("%Y-%m-%d %H:%M:%S")
    return local.isoformat(sep=" ", timespec="milliseconds")


# ``handrail log purge``: permanent removal of recorded data, after the user has seen it and agreed.


def purge(setting: Setting, before: str | None, session: str | None, *, dry_run: bool, yes: bool) -> int:
    """Run ``handrail log purge``, and return its exit code.

    :raises UsageError: for an invalid time or an empty selection, and without a terminal or ``--yes``
    :raises StartError: if another process holds the workspace, or the log cannot be written
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
            f"{len(missing)} records are not in the log yet. They are written first, and then selected like the others."
        )
    if dry_run:
        out_json({"dry_run": True, **_counted(found)}) if setting.json else _show(found, selection)
        return OUTPUT
    check_alone(folders, "a purge")
    if not setting.json or not yes:
        _show(found, selection)
    agreed(yes, "Remove this permanently?")
    done, verified = asyncio.run(_purge(setting, folders, selection))
    _show_purged(setting, done, verified)
    return OUTPUT if verified.ok and not done.problems else ERROR


def _selection(before: str | None, session: str | None) -> Selection:
    from handrail.record.retention import Selection
    from handrail.store.folders import check_session_id

    if before is None and session is None:
        raise click.UsageError(
            "The selection is missing. Pass `--before 30` (days), `--before 2026-01-31` or `--session ID`."
        )
    if session is not None:
        check_session_id(session)
    return Selection(None if before is None else moment(before, datetime.now().astimezone()), session)


def _show_purged(setting: Setting, done: Purged, verified: Verification) -> None:
    if setting.json:
        out_json({"dry_run": False, **asdict(done), "verification": asdict(verified)})
        return
    out(
        f"removed the content of {done.records:,} records, {done.sessions:,} sessions, {done.files:,} files and folders"
    )
    for problem in done.problems:
        note(f"handrail log purge: {problem}")
    out(str(verified)) if verified.ok else note(f"handrail log purge: {verified}")


def check_alone(folders: Folders, what: str) -> None:
    """Check that no other process holds the workspace.

    :param what: the action that needs exclusive access
    :raises StartError: if another process holds the workspace
    """
    from handrail.contract.errors import StartError
    from handrail.store.lease import holder_of

    holder = holder_of(folders)
    if holder is not None and holder.state == "alive":
        how = "End that process" if holder.pid is None else f"End that process (kill {holder.pid})"
        raise StartError(
            f"The workspace {folders.workspace} is in use by {holder}, and {what} requires exclusive access. {how} and the "
            "processes that are connected to it, then run the command again. `--dry-run` works without exclusive access."
        )


def agreed(yes: bool, question: str, done: str = "removed") -> None:
    """Ask the user to confirm, unless ``yes`` is set.

    :raises UsageError: without a terminal
    :raises Abort: if the user does not agree
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"Nothing was {done}, because there is no terminal to ask for confirmation. Pass `--yes` to agree"
            + (", or `--dry-run` to see the selection." if done == "removed" else ".")
        )
    if not confirm(question, err=True):
        raise click.Abort


def moment(text: str, now: datetime) -> int:
    """Parse a time: ``30`` or ``30d`` for days ago, or a date or time in ISO form.

    :return: wall-clock nanoseconds
    :raises UsageError: for an invalid time, or one in the future
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
            f"Invalid value for `--before`: {text[:80]!r}. Expected days (30), a date (2026-01-31) or a time "
            "(2026-01-31T18:00)."
        ) from None
    if then > now:
        raise click.UsageError(
            f"Invalid value for `--before`: {text!r} is in the future. `--before 0` selects everything until now."
        )
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
        note("Nothing to remove.")
    return OUTPUT


def _show(found: Survey, selection: Selection) -> None:
    out(f"{selection}:")
    span = ""
    if found.oldest_ns is not None and found.newest_ns is not None:
        begin, end = (datetime.fromtimestamp(at / 1e9).astimezone() for at in (found.oldest_ns, found.newest_ns))
        span = f", from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
    out(f"  records   {found.records:,}, of {found.calls:,} calls, {amount(found.bytes)}{span}")
    out(f"  sessions  {len(found.sessions):,}, with the state of their tools")
    for session in found.sessions[:20]:
        out(f"            {session}")
    if len(found.sessions) > 20:
        out(f"            and {len(found.sessions) - 20:,} more")
    left_over = found.left_over
    out(f"  files     {len(left_over.paths):,} that are no longer referenced, {amount(left_over.bytes)}")


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


# ``handrail log acknowledge``: continue with a log that misses its last records, if the user agrees.


def acknowledge(setting: Setting, *, yes: bool) -> int:
    """Run ``handrail log acknowledge``, and return its exit code.

    :raises UsageError: without a terminal or ``--yes``
    :raises StartError: if another process holds the workspace, or the log cannot be written
    """
    from handrail.contract.errors import StartError
    from handrail.record.log import CommitLog
    from handrail.record.reading import LogReader
    from handrail.store.database.journal import written
    from handrail.store.folders import locate
    from handrail.store.opening import Store

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    check_alone(folders, "acknowledging its log")
    store = Store.open(setting.workspace, setting.state, face="log acknowledge", allow_home=setting.allow_home)
    try:
        log = CommitLog(store.database, acknowledged=True)
        reader = LogReader(store.database.reading)
        try:
            known = written(folders)
            missing = reader.missing(known)
        except StartError as error:  # the file with the last written record is damaged
            known, missing = None, str(error)
        if missing is None:
            note("The log contains all records that are known to have been written. Nothing to acknowledge.")
            return OUTPUT
        if not setting.json:
            out(f"the log {folders.database}: {missing}")
        agreed(yes, "Continue with this log?", "acknowledged")
        count = max(0, (0 if known is None else known[0]) - reader.head().sequence)
        asyncio.run(_acknowledged(log, store, count, missing))
    finally:
        asyncio.run(store.aclose())
    if setting.json:
        out_json({"acknowledged": missing, "records": count})
    else:
        out(
            f"acknowledged: the log records that {count:,} records are missing. `handrail log verify` counts them as lost."
        )
    return OUTPUT


async def _acknowledged(log: object, store: object, count: int, missing: str) -> None:
    """Record the acknowledgement, and set the known end of the log to its current head."""
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
