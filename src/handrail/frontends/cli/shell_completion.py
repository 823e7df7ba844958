"""Completions for the shell's Tab key, read from files without starting a kernel.

No function here may fail or print a message. An unreadable source gives no completions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from handrail.frontends.cli.terminal_output import escape_to_one_line

if TYPE_CHECKING:
    from sqlite3 import Connection

_MAX_ITEMS = 200
_SEARCHED_RECORDS = 50_000
"""Number of records at the end of the log that are searched for calls. Users complete recent calls."""

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete folders. The shell does the work."""
    return [CompletionItem(incomplete, type="dir")]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def _completer(look: Callable[[click.Context, str], Iterable[str | tuple[str, str]]]) -> Completer:
    def completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        items: list[CompletionItem] = []
        try:
            for found in look(ctx, incomplete):
                value, about = (found, None) if isinstance(found, str) else found
                if value.startswith(incomplete) and escape_to_one_line(value) == value:
                    items.append(CompletionItem(value, help=about))
                if len(items) == _MAX_ITEMS:
                    break
        except Exception:  # a message would disturb the shell's prompt
            return []
        return items

    return completed


def _tools(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """Yield the tools of the last generation in the log, or else the built-in ones."""
    tools: dict[str, Any] = {}
    with _log(ctx) as connection:
        if connection is not None:
            from handrail.record.hash_chain import SALT_BYTES
            from handrail.store.json_fallback_encoding import decode_json_with_fallback

            newest = (
                "SELECT body FROM record WHERE kinds = 'generation' AND body IS NOT NULL ORDER BY sequence DESC LIMIT 1"
            )
            row = connection.execute(newest).fetchone()
            tools = decode_json_with_fallback(row[0][SALT_BYTES:])[0]["tools"] if row is not None else {}
    if tools:
        yield from sorted(tool for tool, about in tools.items() if not about.get("unavailable"))
    else:
        from handrail.tools import BUILTINS

        yield from sorted(tool.spec.id for tool in BUILTINS)


def _sessions(ctx: click.Context, incomplete: str, which: str = "") -> Iterator[tuple[str, str]]:
    """:param which: a further SQL condition"""
    with _log(ctx) as connection:
        if connection is not None:
            newest = f"SELECT id, topic FROM session WHERE substr(id, 1, ?) = ? {which} ORDER BY opened_ns DESC LIMIT ?"  # noqa: S608 - of this file
            for session, topic in connection.execute(newest, (len(incomplete), incomplete, _MAX_ITEMS)):
                yield session, _one_line(topic)


_HAS_MESSAGES = "AND closed_ns IS NULL AND EXISTS (SELECT 1 FROM message WHERE message.session = session.id)"


def _sessions_to_fork(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Return the sessions with stored messages."""
    return _sessions(ctx, incomplete, _HAS_MESSAGES)


def _sessions_to_resume(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Return the sessions with stored messages that are not sub-agents' sessions."""
    return _sessions(ctx, incomplete, f"{_HAS_MESSAGES} AND parent_session IS NULL")


def _calls(ctx: click.Context, incomplete: str) -> Iterator[str]:
    with _log(ctx) as connection:
        if connection is not None:
            newest = (
                "SELECT call FROM record WHERE substr(kinds, 1, 8) = 'proposed' AND substr(call, 1, ?) = ? "
                "AND sequence > (SELECT max(sequence) FROM record) - ? ORDER BY sequence DESC LIMIT ?"
            )
            for (call,) in connection.execute(newest, (len(incomplete), incomplete, _SEARCHED_RECORDS, _MAX_ITEMS)):
                yield call


def _running_work(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the sessions, calls and jobs that run now in any workspace."""
    from handrail.kernel.workspace_activity import list_active_workspaces
    from handrail.store.state_folders import resolve_state_root

    for one in list_active_workspaces(resolve_state_root(ctx.params.get("state"))):
        for session in one.sessions:
            yield session.id, _one_line(session.task)
            yield from ((call.call_id, call.tool or "") for call in session.calls)
        if one.holder is not None:
            yield from ((job.id, _one_line(job.summary)) for job in one.jobs)


def _approvals(ctx: click.Context, incomplete: str) -> Iterator[str]:
    with _log(ctx) as connection:
        if connection is not None:
            newest = "SELECT id FROM approval WHERE answered = 0 ORDER BY created_ns DESC LIMIT ?"
            for (approval,) in connection.execute(newest, (_MAX_ITEMS,)):
                yield approval


def _tools_or_calls(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """Yield tool IDs. Yield call or approval IDs only if one was begun, because they are many and long."""
    if "/" in incomplete or incomplete.startswith("ses_"):
        yield from _calls(ctx, incomplete)
    elif incomplete.startswith("apr_"):
        yield from _approvals(ctx, incomplete)
    else:
        yield from _tools(ctx, incomplete)


def _agents(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    from pathlib import Path

    from handrail.registry.agent_folders import load_agent_manifests
    from handrail.store.state_folders import default_config_folder

    given = ctx.params.get("config")
    folder = default_config_folder() if given is None else Path(given).absolute().parent
    for name, checked in load_agent_manifests(folder).items():
        yield name, _one_line(checked.manifest.description)


def _state_keys(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    from handrail.store.state_folders import resolve_state_root
    from handrail.store.state_inventory import list_stored_state

    for kept in list_stored_state(resolve_state_root(ctx.params.get("state"))):
        yield kept.key, _one_line(None if kept.workspace is None else str(kept.workspace))


def _memory_ids(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    from handrail.store.memory.knowledge_store import KnowledgeStore
    from handrail.store.state_folders import resolve_state_root

    with closing(KnowledgeStore(resolve_state_root(ctx.params.get("state")))) as knowledge:
        for entry in knowledge.list_entries(history=True, limit=_MAX_ITEMS):
            yield entry.id, _one_line(entry.text)


tool_ids = _completer(_tools)
session_ids = _completer(_sessions)
resumable_ids = _completer(_sessions_to_resume)
forkable_ids = _completer(_sessions_to_fork)
call_ids = _completer(_calls)
stoppable_ids = _completer(_running_work)
approval_ids = _completer(_approvals)
tools_or_calls = _completer(_tools_or_calls)
state_keys = _completer(_state_keys)
memory_ids = _completer(_memory_ids)
agents = _completer(_agents)


@contextmanager
def _log(ctx: click.Context) -> Generator[Connection | None]:
    """Open the log of the workspace in the options so far, or yield None without a log."""
    from handrail.store.database.workspace_database import open_reader
    from handrail.store.state_folders import locate_folders

    given = ctx.params
    found = locate_folders(given.get("workspace") or ".", given.get("state"), allow_home=bool(given.get("allow_home")))
    if not found.database_file.exists():
        yield None
        return
    with closing(open_reader(found.database_file)) as connection:
        yield connection


def _one_line(text: str | None) -> str:
    return escape_to_one_line((text or "")[:80])
