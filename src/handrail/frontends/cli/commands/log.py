"""``handrail log``: the log of a workspace, its verification, and its purge."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from handrail.contract.errors import StartError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_workspace_options
from handrail.frontends.cli.command_runner import print_former_paths, warn_about_missing_records
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import call_ids, session_ids
from handrail.frontends.cli.terminal_output import (
    ask_yes_or_no,
    escape_to_one_line,
    format_byte_count,
    print_escaped_line,
    print_json,
    print_stderr_note,
)
from handrail.record.hash_chain import GENESIS
from handrail.record.log_reader import LoggedCallSummary, LogReader
from handrail.store.database.sqlite_connection import compact
from handrail.store.state_folders import check_session_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from handrail.frontends.cli.text_layout import StyledText
    from handrail.record.log_reader import LoggedRecord, LogReader, SessionOpener
    from handrail.record.record_purge import PurgePlan, PurgeResult, PurgeSelection
    from handrail.record.verification import LogVerification
    from handrail.store.state_folders import StateFolders


_HASH = re.compile(r"[0-9a-f]{64}")
_TOPIC_CHARACTERS = 60
"""Maximum characters of a topic in the line of a call."""
_NO_CALLS = ("provider-tool-used", "instructions-read", "compacted", "turn-finished", "undone")
"""Kinds of records that are listed among the calls, although they are not calls."""


@click.command("log")
@click.argument(
    "action",
    required=False,
    type=click.Choice(["list", "verify", "acknowledge", "purge"]),
    metavar="[list|verify|acknowledge|purge]",
)
@click.option("--head", metavar="HASH", help="verify: head of an earlier verification. Default: none.")
@click.option("--before", metavar="DAYS|DATE", help="purge: age in days, or date, of the newest content to remove.")
@click.option("--dry-run", is_flag=True, help="purge: only show what would be removed.")
@click.option("--yes", is_flag=True, help="purge, acknowledge: do not ask.")
@click.option("--call", metavar="ID", shell_complete=call_ids, help="Call whose records are shown in full.")
@click.option("--session", metavar="ID", shell_complete=session_ids, help="Session to show or purge. Default: all.")
@click.option("--records", is_flag=True, help="Show every record instead of one line per call.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of entries.")
@add_workspace_options
def command(
    setting: CommandOptions,
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

    Without an action, shows each call, the newest last: its arguments, its end, and who or what allowed it. Calls are below
    their session, with its client and what its models used; --call shows a call in full. The list also contains provider tool uses, and instruction files that were read from folders above the workspace.
    Showing and verifying work while Handrail runs.

    verify checks that the log is intact, prints its head, and exits with 1 if it is not intact. Keep the head: with --head, a
    later verification detects whether earlier records were removed or changed. verify also detects a database that was
    replaced by an older copy. Handrail does not start with such a log. acknowledge accepts it, and records how many records
    are missing.

    purge permanently removes the content of old records, sessions that are entirely older, and files that are no longer
    referenced: --before 30, --session ID. Afterwards the log still verifies, and shows how many records were redacted.
    """
    if action != "purge" and (before is not None or dry_run or (yes and action != "acknowledge")):
        raise click.UsageError(
            "`--before`, `--dry-run` and `--yes` are options of `purge`. Run: handrail log purge --before DAYS|DATE"
        )
    _check_head(action, head)
    if action == "purge":
        if call is not None or records:
            raise click.UsageError(
                "`--call` and `--records` are not options of `purge`. Select with `--before` or `--session`."
            )
        return run_log_purge(setting, before, session, dry_run=dry_run, yes=yes)
    if action == "acknowledge":
        return run_log_acknowledge(setting, yes=yes)
    folders = setting.folders
    if not folders.database_file.exists():
        return _report_missing_log(setting, folders, action, head)
    with LogReader.open_database(folders.database_file) as reader:
        warn_about_missing_records("log", folders, reader)
        if action == "verify":
            return _verify(setting, reader, folders, head)
        return _show_log(setting, reader, folders, session, call, records=records, limit=limit)


def _check_head(action: str | None, head: str | None) -> None:
    if action != "verify" and head is not None:
        raise click.UsageError("`--head` is an option of `verify`. Run: handrail log verify --head HASH")
    if head is not None and not _HASH.fullmatch(head):
        raise click.UsageError(
            f"Invalid value for `--head`: {head!r}. Expected the 64 hexadecimal digits from `handrail log verify`."
        )


def _show_log(
    setting: CommandOptions,
    reader: LogReader,
    folders: StateFolders,
    session: str | None,
    call: str | None,
    *,
    records: bool,
    limit: int,
) -> int:
    from sqlite3 import DatabaseError

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
            _show_calls(setting, reader, rows, beside)
    except DatabaseError as error:
        raise StartError(
            f"The log {folders.database_file} is damaged: {error}. Keep a copy, and run `handrail log verify` to find the damage."
        ) from None
    return OUTPUT


def _report_missing_log(setting: CommandOptions, folders: StateFolders, action: str | None, head: str | None) -> int:
    """Report a missing log. It is an error only if records are known to have been written."""
    from handrail.record.verification import LogVerification
    from handrail.store.database.journal import read_log_head

    what = f"The state folder {folders.state} has no records of the workspace {folders.workspace}."
    noted = head is not None and head != GENESIS.hex()
    known = read_log_head(folders)
    gone = noted or known is not None
    why = f"no record has the hash {head}" if noted or known is None else f"record {known[0]} is missing"
    if action == "verify" and setting.json:
        problem = f"{why}. {what}" if gone else None
        print_json(asdict(LogVerification(not gone, 0, GENESIS.hex(), problem=problem)))
    elif gone:
        print_stderr_note(f"handrail log: not intact: {why}. {what}")
    else:
        print_stderr_note(what)
        print_former_paths(folders)
    return ERROR if gone else OUTPUT


def _verify(setting: CommandOptions, reader: LogReader, folders: StateFolders, head: str | None) -> int:
    from handrail.record.verification import verify_log
    from handrail.store.database.journal import read_log_head

    found = verify_log(reader, head, lambda: read_log_head(folders))
    if setting.json:
        print_json(asdict(found))
    elif found.ok:
        print_escaped_line(str(found))
    else:
        sys.stdout.flush()
        print_stderr_note(f"handrail log: {found}")
    return OUTPUT if found.ok else ERROR


def _show_calls(
    setting: CommandOptions, reader: LogReader, rows: list[LoggedCallSummary], beside: list[LoggedRecord]
) -> None:
    """Print the calls, and the other records among them.

    :param beside: records that are not calls
    """
    whole = sorted([(row.first, row) for row in rows] + [(one.sequence, one) for one in beside], key=lambda one: one[0])
    if setting.json:
        for _, row in whole:
            print_json(_call_data(row), lines=True)
        return
    shown = [row for _, row in whole if isinstance(row, LoggedCallSummary) or row.kind != "turn-finished"]
    if not shown:
        print_stderr_note("No calls are recorded.")
        return
    view, session = TerminalRenderer(), ""
    for row in shown:
        if row.session_id != session:
            if session:
                view.write_line()
            session = row.session_id
            _print_session(view, reader, session, row.opener if isinstance(row, LoggedCallSummary) else None)
        _print_call(view, row) if isinstance(row, LoggedCallSummary) else _print_other(view, row)


def _print_session(view: TerminalRenderer, reader: LogReader, session_id: str, opener: SessionOpener | None) -> None:
    """Print the head of the calls of one session: its client, its agent, and what its models used."""
    opener = opener or next(reversed(reader.list_session_openers(session_id)), None)
    session_text = "" if opener is None else f"  {opener}, agent {opener.agent}, mode {opener.mode}"
    view.print_text((session_id, "bold cyan"), session_text, further="    ")
    for used in reader.read_session_model_usage(session_id):
        view.print_text((str(used), "dim"), indent="  ", further="    ")


_MARKS: Mapping[str, StyledText] = {
    "output": ("✓", "green"),
    "error": ("✗", "red"),
    "rejected": ("✗", "red"),
    "interrupted": ("!", "red"),
    "running": ("▸", "cyan"),
    "awaiting-approval": ("?", "yellow"),
    "suspended": ("?", "yellow"),
}


def _print_call(view: TerminalRenderer, row: LoggedCallSummary) -> None:
    """Print one call: when, what, how it ended, and who or what allowed it."""
    mark = _MARKS.get(row.state, ("·", "dim"))
    notes: list[StyledText] = []
    if row.state not in ("output", "error"):
        notes.append((row.state, mark[1]))
    if row.ended_ns is not None and row.started_ns is not None:
        notes.append((f"{(row.ended_ns - row.proposed_ns) / 1e6:.0f} ms", "dim"))
    if row.topic is not None:
        cut = row.topic if len(row.topic) <= _TOPIC_CHARACTERS else f"{row.topic[:_TOPIC_CHARACTERS]}…"
        notes.append((f"topic: {escape_to_one_line(cut)}", "dim"))
    view.write_line((_format_time(row.proposed_ns), "dim"), (f"  {row.call_id}", "dim"))
    view.print_call(mark, row.tool or "?", row.arguments, *notes, indent="  ")
    if row.error_kind is not None:
        view.print_text((row.error_kind, "red"), f": {row.error_text or ''}", indent="    ")
    if row.permission is not None:
        view.print_text((str(row.permission), "dim"), indent="    ")


def _print_other(view: TerminalRenderer, row: LoggedRecord) -> None:
    body = row.body or {}
    name, about = row.kind, "redacted"
    if row.kind == "instructions-read":
        name, about = "instructions", ", ".join(map(_make_reading_hint, body.get("files") or ()))
    elif row.kind == "undone":
        calls = ", ".join(map(str, body.get("calls") or ()))
        kept = sum(one.get("outcome") not in ("restored", "removed") for one in body.get("paths") or ())
        about = f"{body.get('path_count')} paths of {calls}" + (f"; {kept} of them left as they are" if kept else "")
        name = f"undo {body.get('undo_id') or ''}".rstrip()
    elif row.kind == "compacted":
        name = "conversation"
        about = f"{body.get('removed_messages')} messages removed, {body.get('kept_messages')} kept"
    elif row.body is not None:
        name = str(body.get("tool") or body.get("name") or "?")
        how = "failed" if body.get("failed") else "done"
        asked = json.dumps(body.get("arguments"), ensure_ascii=False)
        about = f"{how} by {body.get('provider') or 'the provider'}: {asked}"
    view.write_line((_format_time(row.at_ns), "dim"))
    text = escape_to_one_line(about if row.body is not None else "redacted")
    view.print_text(
        "• ", (escape_to_one_line(name), "bold"), (f"  {row.kind}", "dim"), f"  {text}", indent="  ", further="    "
    )


def _make_reading_hint(file: dict[str, Any]) -> str:
    how = f"sha256 {str(file.get('sha256'))[:12]}" if "sha256" in file else f"skipped: {file.get('skipped_by')}"
    return f"{file.get('path')} ({how})"


def _call_data(row: LoggedCallSummary | LoggedRecord) -> dict[str, Any]:
    if isinstance(row, LoggedCallSummary):
        return asdict(row)
    about = {"call_id": "", "session_id": row.session_id, "state": row.kind, "at_ns": row.at_ns, "first": row.sequence}
    return {**(row.body or {}), **about}


def _show_records(setting: CommandOptions, records: list[LoggedRecord], *, whole: bool) -> None:
    if setting.json:
        for record in records:
            print_json(asdict(record), lines=True)
        return
    if not records:
        print_stderr_note("No records match. `handrail log` lists the calls.")
    for record in records:
        body = "redacted" if record.body is None else json.dumps(record.body, ensure_ascii=False, default=str)
        shown = body if whole or len(body) <= 120 else body[:119] + "…"
        about = escape_to_one_line(f"{record.kind}  {record.call_id or record.session_id}  {shown}")
        print_escaped_line(f"{record.sequence}  {_format_time(record.at_ns)}  {about}")


def _format_time(at_ns: int) -> str:
    """Return local time: short on a terminal, otherwise with milliseconds and the offset from UTC."""
    local = datetime.fromtimestamp(at_ns / 1e9).astimezone()
    if sys.stdout.isatty():
        return local.strftime("%Y-%m-%d %H:%M:%S")
    return local.isoformat(sep=" ", timespec="milliseconds")


# ``handrail log purge``: permanent removal of recorded data, after the user has seen it and agreed.


def run_log_purge(setting: CommandOptions, before: str | None, session: str | None, *, dry_run: bool, yes: bool) -> int:
    """Run ``handrail log purge``, and return its exit code.

    :raises UsageError: for an invalid time or an empty selection, and without a terminal or ``--yes``
    :raises StartError: if another process holds the workspace, or the log cannot be written
    """
    from handrail.record.commit_log import read_unwritten_records
    from handrail.record.record_purge import plan_purge

    selection = _selection(before, session)
    folders = setting.folders
    if not folders.database_file.exists():
        return _report_nothing(setting)
    with LogReader.open_database(folders.database_file) as reader:
        found = plan_purge(reader, folders, selection)
        missing = read_unwritten_records(reader.connection, folders.workspace_state_folder)
    if found.is_empty and not missing:
        return _report_nothing(setting)
    if missing:
        print_stderr_note(
            f"{len(missing)} records are not in the log yet. They are written first, and then selected like the others."
        )
    if dry_run:
        print_json({"dry_run": True, **_purge_counts(found)}) if setting.json else _print_plan(found, selection)
        return OUTPUT
    ensure_workspace_not_held(folders, "a purge")
    if not setting.json or not yes:
        _print_plan(found, selection)
    require_confirmation(yes, "Remove this permanently?")
    done, verified = asyncio.run(_purge(setting, folders, selection))
    _print_purge_result(setting, done, verified)
    return OUTPUT if verified.ok and not done.problems else ERROR


def _selection(before: str | None, session: str | None) -> PurgeSelection:
    from handrail.record.record_purge import PurgeSelection

    if before is None and session is None:
        raise click.UsageError(
            "The selection is missing. Pass `--before 30` (days), `--before 2026-01-31` or `--session ID`."
        )
    if session is not None:
        check_session_id(session)
    return PurgeSelection(None if before is None else parse_time_or_days(before, datetime.now().astimezone()), session)


def _print_purge_result(setting: CommandOptions, done: PurgeResult, verified: LogVerification) -> None:
    if setting.json:
        print_json({"dry_run": False, **asdict(done), "verification": asdict(verified)})
        return
    print_escaped_line(
        f"removed the content of {done.records:,} records, {done.sessions:,} sessions, {done.files:,} files and folders, "
        f"{done.kept_changes:,} changes kept for undo"
    )
    for problem in done.problems:
        print_stderr_note(f"handrail log purge: {problem}")
    print_escaped_line(str(verified)) if verified.ok else print_stderr_note(f"handrail log purge: {verified}")


def ensure_workspace_not_held(folders: StateFolders, what: str) -> None:
    """Check that no other process holds the workspace.

    :param what: the action that needs exclusive access
    :raises StartError: if another process holds the workspace
    """
    from handrail.store.lease import find_lease_holder

    if (holder := find_lease_holder(folders)) is not None and holder.state == "alive":
        how = "End that process" if holder.pid is None else f"End that process (kill {holder.pid})"
        raise StartError(
            f"The workspace {folders.workspace} is in use by {holder}, and {what} requires exclusive access. {how} and the "
            "processes that are connected to it, then run the command again. `--dry-run` works without exclusive access."
        )


def require_confirmation(yes: bool, question: str, done: str = "removed") -> None:
    """Ask the user to confirm, unless ``yes`` is set.

    :raises UsageError: without a terminal
    :raises click.Abort: if the user does not agree
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"Nothing was {done}, because there is no terminal to ask for confirmation. Pass `--yes` to agree"
            + (", or `--dry-run` to see the selection." if done == "removed" else ".")
        )
    if not ask_yes_or_no(question, err=True):
        raise click.Abort


def parse_time_or_days(text: str, now: datetime) -> int:
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


async def _purge(
    setting: CommandOptions, folders: StateFolders, selection: PurgeSelection
) -> tuple[PurgeResult, LogVerification]:
    from dataclasses import replace

    from handrail.record.commit_log import CommitLog
    from handrail.record.record_purge import purge_records
    from handrail.record.verification import verify_log
    from handrail.store.workspace_store import WorkspaceStore

    store = WorkspaceStore.open(setting.workspace, setting.state, frontend="log purge", allow_home=setting.allow_home)
    try:
        log = CommitLog(store.database)
        await log.record_interrupted_calls()
        done = await purge_records(log, store.database, folders, selection, reason=f"handrail log purge: {selection}")
        await asyncio.to_thread(store.database.close)
        compaction = await asyncio.to_thread(compact, folders.database_file)
    finally:
        await store.aclose()
    if compaction.problem is not None:
        done = replace(done, problems=(*done.problems, compaction.problem))
    with LogReader.open_database(folders.database_file) as reader:
        return done, await asyncio.to_thread(verify_log, reader)


def _report_nothing(setting: CommandOptions) -> int:
    if setting.json:
        print_json({"dry_run": False, "records": 0, "sessions": 0, "files": 0})
    else:
        print_stderr_note("Nothing to remove.")
    return OUTPUT


def _print_plan(found: PurgePlan, selection: PurgeSelection) -> None:
    print_escaped_line(f"{selection}:")
    span = ""
    if found.oldest_ns is not None and found.newest_ns is not None:
        begin, end = (datetime.fromtimestamp(at / 1e9).astimezone() for at in (found.oldest_ns, found.newest_ns))
        span = f", from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
    print_escaped_line(
        f"  records   {found.records:,}, of {found.calls:,} calls, {format_byte_count(found.bytes)}{span}"
    )
    print_escaped_line(f"  sessions  {len(found.sessions):,}, with the state of their tools")
    for session in found.sessions[:20]:
        print_escaped_line(f"            {session}")
    if len(found.sessions) > 20:
        print_escaped_line(f"            and {len(found.sessions) - 20:,} more")
    left_over = found.orphans
    print_escaped_line(
        f"  files     {len(left_over.paths):,} that are no longer referenced, {format_byte_count(left_over.bytes)}"
    )
    print_escaped_line(f"  undo      {found.kept_changes:,} changes that could be undone")
    print_escaped_line(f"  memory    {found.facts:,} facts that are unconfirmed or replaced")


def _purge_counts(found: PurgePlan) -> dict[str, object]:
    return {
        "records": found.records,
        "bytes": found.bytes,
        "calls": found.calls,
        "oldest_ns": found.oldest_ns,
        "newest_ns": found.newest_ns,
        "sessions": list(found.sessions),
        "files": [str(path) for path in found.orphans.paths],
        "file_bytes": found.orphans.bytes,
        "kept_changes": found.kept_changes,
        "facts": found.facts,
    }


# ``handrail log acknowledge``: continue with a log that misses its last records, if the user agrees.


def run_log_acknowledge(setting: CommandOptions, *, yes: bool) -> int:
    """Run ``handrail log acknowledge``, and return its exit code.

    :raises UsageError: without a terminal or ``--yes``
    :raises StartError: if another process holds the workspace, or the log cannot be written
    """
    from handrail.record.commit_log import CommitLog
    from handrail.store.database.journal import read_log_head
    from handrail.store.workspace_store import WorkspaceStore

    folders = setting.folders
    ensure_workspace_not_held(folders, "acknowledging its log")
    store = WorkspaceStore.open(
        setting.workspace, setting.state, frontend="log acknowledge", allow_home=setting.allow_home
    )
    try:
        log = CommitLog(store.database, acknowledged=True)
        reader = LogReader(store.database.shared_read_connection)
        try:
            known = read_log_head(folders)
            missing = reader.describe_missing_records(known)
        except StartError as error:  # the file with the last written record is damaged
            known, missing = None, str(error)
        if missing is None:
            print_stderr_note(
                "The log contains all records that are known to have been written. Nothing to acknowledge."
            )
            return OUTPUT
        if not setting.json:
            print_escaped_line(f"the log {folders.database_file}: {missing}")
        require_confirmation(yes, "Continue with this log?", "acknowledged")
        count = max(0, (0 if known is None else known[0]) - reader.head().sequence)
        asyncio.run(_record_acknowledgement(log, store, count, missing))
    finally:
        asyncio.run(store.aclose())
    if setting.json:
        print_json({"acknowledged": missing, "records": count})
    else:
        print_escaped_line(
            f"acknowledged: the log records that {count:,} records are missing. `handrail log verify` counts them as lost."
        )
    return OUTPUT


async def _record_acknowledgement(log: object, store: object, count: int, missing: str) -> None:
    """Record the acknowledgement, and set the known end of the log to its current head."""
    from handrail.record.commit_log import CommitLog, Record
    from handrail.store.database.journal import LogHeadFile
    from handrail.store.workspace_store import WorkspaceStore

    assert isinstance(log, CommitLog)
    assert isinstance(store, WorkspaceStore)
    await log.record_interrupted_calls()
    await log.commit([Record("records-dropped", "", "", {"records": count, "acknowledged": missing})])
    head = log.reader.head()
    with closing(LogHeadFile(store.folders)) as file:
        file.overwrite_log_head(head.sequence, bytes.fromhex(head.hash))
