"""``handrail log purge``: what was recorded is removed for good, after it was shown and agreed to."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.options import Setting
from handrail.frontends.cli.show import amount, confirm, note, out, out_json

if TYPE_CHECKING:
    from handrail.record.retention import Purged, Selection, Survey
    from handrail.record.verification import Verification
    from handrail.store.folders import Folders


def purge(setting: Setting, before: str | None, session: str | None, *, dry_run: bool, yes: bool) -> int:
    """Carry the command out. Gives its exit code.

    :raises UsageError: for a moment that is none, nothing chosen, or nobody to ask and no ``--yes``
    :raises StartError: when another process holds the workspace, or the log cannot be written
    """
    from handrail.record.noted import noted
    from handrail.record.reading import LogReader
    from handrail.record.retention import Selection, survey
    from handrail.store.folders import check_session_id, locate

    if before is None and session is None:
        raise click.UsageError("say what is to go: --before 30 (days), --before 2026-01-31, or --session ID")
    if session is not None:
        check_session_id(session)
    selection = Selection(None if before is None else moment(before, datetime.now().astimezone()), session)
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
        if setting.json:
            out_json({"dry_run": True, **_counted(found)})
        else:
            _show(found, selection)
        return OUTPUT
    check_alone(folders, "a purge")
    if not setting.json or not yes:
        _show(found, selection)
    agreed(yes, "Remove that for good?")
    done, verified = asyncio.run(_purge(setting, folders, selection))
    if setting.json:
        out_json({"dry_run": False, **asdict(done), "verification": asdict(verified)})
    else:
        out(f"removed {done.records:,} bodies, {done.sessions:,} sessions, {done.files:,} files and folders")
        for problem in done.problems:
            note(f"handrail log purge: {problem}")
        out(str(verified)) if verified.ok else note(f"handrail log purge: {verified}")
    return OUTPUT if verified.ok and not done.problems else ERROR


def check_alone(folders: Folders, what: str) -> None:
    """:param what: needs the workspace to itself
    :raises StartError: when another process holds the workspace, with what to do"""
    from handrail.contract.errors import StartError
    from handrail.store.holder import holder_of

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
    from handrail.store.database.compaction import compact
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
