"""``handrail log``: what happened in a workspace, and whether the record of it is still what was written."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from handrail.faces.cli.app import ERROR, OUTPUT
from handrail.faces.cli.options import Setting, common
from handrail.faces.cli.show import columns, note, out, out_json, visible

if TYPE_CHECKING:
    from handrail.record.reading import CallRow, LoggedRecord, LogReader

_HASH = re.compile(r"[0-9a-f]{64}")


@click.command("log")
@click.argument("action", required=False, type=click.Choice(["verify"]), metavar="[verify]")
@click.option("--head", metavar="HASH", help="verify: this record must still be there.")
@click.option("--call", metavar="ID", help="Every record of one call, whole.")
@click.option("--session", metavar="ID", help="One session only.")
@click.option("--records", is_flag=True, help="Every record, instead of one line per call.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The newest so many.")
@common
def command(
    setting: Setting,
    action: str | None,
    head: str | None,
    call: str | None,
    session: str | None,
    records: bool,
    limit: int,
) -> int:
    """Show what happened in this workspace, or verify the record of it.

    Works beside a running Handrail. Note the head that verify prints: with --head it tells later whether
    anything up to there was cut off or rewritten. Exits with 1 when the log is not intact. On a terminal a line
    per call is cut at its edge; --call shows one whole.
    """
    from sqlite3 import DatabaseError

    from handrail.contract.errors import StartError
    from handrail.record.reading import LogReader
    from handrail.store.folders import locate

    if action is None and head is not None:
        raise click.UsageError("--head belongs to verify: handrail log verify --head HASH")
    if head is not None and not _HASH.fullmatch(head):
        raise click.UsageError(
            f"--head {head!r} is no head; expected the 64 hexadecimal digits that log verify printed"
        )
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    with LogReader.at(folders.database) as reader:
        if action == "verify":
            return _verify(setting, reader, head)
        try:
            if call is not None or records:
                chosen = list(reader.records(session=session, call=call, limit=limit, newest_first=True))
                _show_records(setting, chosen[::-1], whole=call is not None)
            else:
                _show_calls(setting, reader.calls(session=session, limit=limit))
        except DatabaseError as error:
            raise StartError(
                f"the log {folders.database} is damaged: {error}. handrail log verify says where; keep a copy for inspection"
            ) from None
    return OUTPUT


def _verify(setting: Setting, reader: LogReader, head: str | None) -> int:
    from handrail.record.verification import verify

    found = verify(reader, head)
    if setting.json:
        out_json(asdict(found))
    elif found.ok:
        out(str(found))
    else:
        sys.stdout.flush()
        note(f"handrail log: {found}")
    return OUTPUT if found.ok else ERROR


def _show_calls(setting: Setting, rows: list[CallRow]) -> None:
    if setting.json:
        for row in rows:
            out(json.dumps(asdict(row), ensure_ascii=False))
        return
    if not rows:
        note("no calls are recorded")
    table = [
        (_time(row.proposed_ns), row.call_id, row.tool or "?", row.state, _about(row).replace("\n", "\\n"))
        for row in rows
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in columns(table):
        shown = line if width is None else visible(line)
        out(shown if width is None or len(shown) <= width else shown[: width - 1] + "…")


def _about(row: CallRow) -> str:
    if row.error_kind is not None:
        return f"{row.error_kind}: {row.error_text or ''}"
    if row.ended_ns is not None:
        return f"{(row.ended_ns - row.proposed_ns) / 1e6:.0f} ms"
    return ""


def _show_records(setting: Setting, records: list[LoggedRecord], *, whole: bool) -> None:
    if setting.json:
        for record in records:
            out(json.dumps(asdict(record), ensure_ascii=False, default=str))
        return
    if not records:
        note("there are no such records")
    for record in records:
        body = "redacted" if record.body is None else json.dumps(record.body, ensure_ascii=False, default=str)
        shown = body if whole or len(body) <= 120 else body[:119] + "…"
        out(f"{record.sequence}  {_time(record.at_ns)}  {record.kind}  {record.call_id or record.session_id}  {shown}")


def _time(at_ns: int) -> str:
    """With its offset from UTC where a program may read it, without where a line is short."""
    local = datetime.fromtimestamp(at_ns / 1e9).astimezone()
    if sys.stdout.isatty():
        return local.strftime("%Y-%m-%d %H:%M:%S")
    return local.isoformat(sep=" ", timespec="milliseconds")
