"""``handrail log``: what happened in a workspace, and whether the record of it is still what was written."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.completing import call_ids, session_ids
from handrail.frontends.cli.missing import say_what_is_missing
from handrail.frontends.cli.options import Setting, located
from handrail.frontends.cli.show import note, one_line, out, out_json, out_rows

if TYPE_CHECKING:
    from handrail.record.reading import CallRow, LoggedRecord, LogReader
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
    from sqlite3 import DatabaseError

    from handrail.contract.errors import StartError
    from handrail.record.reading import LogReader
    from handrail.store.folders import locate

    if action != "purge" and (before is not None or dry_run or (yes and action != "acknowledge")):
        raise click.UsageError("--before, --dry-run and --yes belong to purge: handrail log purge --before DAYS|DATE")
    if action != "verify" and head is not None:
        raise click.UsageError("--head belongs to verify: handrail log verify --head HASH")
    if head is not None and not _HASH.fullmatch(head):
        raise click.UsageError(
            f"--head {head!r} is no head; expected the 64 hexadecimal digits that log verify printed"
        )
    if action == "purge":
        if call is not None or records:
            raise click.UsageError("purge goes by --before and --session; --call and --records only show")
        from handrail.frontends.cli.commands.purge import purge

        return purge(setting, before, session, dry_run=dry_run, yes=yes)
    if action == "acknowledge":
        from handrail.frontends.cli.commands.acknowledging import acknowledge

        return acknowledge(setting, yes=yes)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    if not folders.database.exists():
        return _without_one(setting, folders, action, head)
    with LogReader.at(folders.database) as reader:
        say_what_is_missing("log", folders, reader)
        if action == "verify":
            return _verify(setting, reader, folders, head)
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
    from handrail.store.database.head import written

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
    from handrail.store.database.head import written

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
