"""Background jobs and the tool sessions of stateful tools, as durable rows.

A job's row moves from ``pending`` to ``running``, back when it is to run again after a restart, and from both to one of four
final states. Each move is a statement that is true of one row in one state, so the second of two competing moves changes
nothing. Rows of ended jobs are removed by age and by number.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from handrail.contract.services.job_and_tool_services import FINAL_JOB_STATES, Job, JobState
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import OutputExposure, StateEnd
from handrail.store.database.sqlite_connection import make_damaged_row_error
from handrail.store.database.workspace_database import (
    SingleRowStatement,
    Statement,
    TableWork,
    WorkspaceTable,
    make_statement_work,
)
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

_COLUMNS = "id, session, call, tool, state, created_ns, ended_ns, attempt, notified, details"
_OPEN = "state IN ('pending', 'running')"


class JobRow(Struct, frozen=True):
    """One job in its stored form.

    :param arguments: the arguments for another attempt after a restart; None if it may not run again
    :param definition: the hash of its tool's definition
    :param output: the file of its output; ``""`` if there is none
    :param untrusted: the origin of its output, unless that is the operator
    :param notified: whether its session was notified of its end, or need not be
    :param exposure: who may see its result, together with ``prompt_mask``
    :param given_up: whether a user stopped it while it waited for another attempt
    """

    job: Job
    arguments: Mapping[str, Any] | None = None
    definition: str = ""
    output: str = ""
    untrusted: str = ""
    notified: bool = False
    exposure: OutputExposure = "both"
    prompt_mask: bool = False
    given_up: bool = False

    @property
    def id(self) -> str:
        return self.job.id

    def with_state(self, state: JobState, ended_ns: int | None = None, *, attempt: int | None = None) -> JobRow:
        number = self.job.attempt if attempt is None else attempt
        return replace(self, job=replace(self.job, state=state, ended_ns=ended_ns, attempt=number))


class JobRetention(Struct, frozen=True):
    """How many jobs that ended are kept, and for how long.

    :param min_age_ns: the minimum age, also if there are more than ``max_jobs``
    """

    max_jobs: int = 1_000
    age_ns: int = 7 * 24 * 3600 * 1_000_000_000
    min_age_ns: int = 15 * 60 * 1_000_000_000


class JobTable(WorkspaceTable):
    """The table of jobs, for the holder of the workspace.

    Methods that write return a :data:`~handrail.store.database.workspace_database.TableWork`.
    """

    def add(self, row: JobRow) -> TableWork:
        return make_statement_work(_insert_statement(row))

    def build_update_unfinished_job_work(self, row: JobRow) -> TableWork:
        """Move an unfinished job to the state and attempt of ``row``. Has no effect if it has ended."""
        sql = f"UPDATE job SET state = ?, attempt = ? WHERE id = ? AND {_OPEN}"  # noqa: S608 - our own words
        return make_statement_work((sql, (row.job.state, row.job.attempt, row.id)))

    def end(self, row: JobRow) -> TableWork:
        """Move an unfinished job to its final state. The whole commit fails if it has already ended."""
        sql = f"UPDATE job SET state = ?, ended_ns = ?, details = ? WHERE id = ? AND {_OPEN}"  # noqa: S608
        values = (row.job.state, row.job.ended_ns, _encode_details(row), row.id)
        return make_statement_work(SingleRowStatement(sql, values))

    def build_mark_notified_work(self, job_id: str) -> TableWork:
        """Mark the session of a job as notified of its end."""
        return make_statement_work(("UPDATE job SET notified = 1 WHERE id = ?", (job_id,)))

    def remove(self, ids: Iterable[str]) -> TableWork:
        """Remove jobs that ended."""
        sql = f"DELETE FROM job WHERE id = ? AND NOT {_OPEN}"  # noqa: S608
        return make_statement_work(*((sql, (job_id,)) for job_id in ids))

    # ── reading: all methods raise LogUnavailable if the database cannot be read ─────────────────

    def get(self, job_id: str) -> JobRow | None:
        found = self._read_jobs("WHERE id = ?", (job_id,)) if job_id.isascii() else []
        return found[0] if found else None

    def list_for_session(self, session_id: str) -> list[JobRow]:
        """Return the jobs of a session, the oldest first."""
        return self._read_jobs("WHERE session = ? ORDER BY created_ns, id", (session_id,))

    def list_newest(self, *, limit: int = 10_000) -> list[JobRow]:
        """Return the newest ``limit`` jobs, the oldest first."""
        return self._read_jobs("ORDER BY created_ns DESC, id DESC LIMIT ?", (limit,))[::-1]

    def list_unfinished(self) -> list[JobRow]:
        """Return the unfinished jobs, the oldest first."""
        return self._read_jobs(f"WHERE {_OPEN} ORDER BY created_ns, id")

    def list_jobs_by_end_time(self) -> list[JobRow]:
        """Return all jobs, the ended ones in the order of their ends."""
        return self._read_jobs("ORDER BY ended_ns, id")

    def list_jobs_without_end_notification(self, session_id: str) -> list[JobRow]:
        """Return the jobs of a session that are unfinished, or ended without a notification, the oldest first."""
        return self._read_jobs("WHERE session = ? AND notified = 0 ORDER BY created_ns, id", (session_id,))

    def list_removable(self, now_ns: int, retention: JobRetention) -> list[JobRow]:
        """Return the jobs to remove, by age and by number.

        A job whose session is not notified yet is not removed because of others.
        """
        newest = f"SELECT id FROM job WHERE NOT {_OPEN} ORDER BY ended_ns DESC, id DESC LIMIT ?"  # noqa: S608
        where = f"WHERE NOT {_OPEN} AND (ended_ns < ? OR (notified = 1 AND ended_ns < ? AND id NOT IN ({newest})))"
        return self._read_jobs(where, (now_ns - retention.age_ns, now_ns - retention.min_age_ns, retention.max_jobs))

    def _read_jobs(self, where: str, values: tuple[str | int, ...] = ()) -> list[JobRow]:
        return self._read_rows(f"SELECT {_COLUMNS} FROM job {where}", values, _parse_job)  # noqa: S608


def _insert_statement(row: JobRow) -> Statement:
    job = row.job
    call_id = job.call_id.encode("utf-8", "backslashreplace").decode()
    last = (job.created_ns, job.ended_ns, job.attempt, int(row.notified), _encode_details(row))
    sql = f"INSERT INTO job ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - our own words
    return sql, (job.id, job.session_id, call_id, job.tool_id, job.state, *last)


_DETAILS = ("about", "arguments", "definition", "output", "untrusted", "exposure", "prompt_mask", "given_up")


def _encode_details(row: JobRow) -> bytes:
    what = (row.job.summary, row.arguments, row.definition, row.output, row.untrusted, row.exposure)
    return encode_json_with_fallback(
        dict(zip(_DETAILS, (*what, row.prompt_mask, row.given_up), strict=True)), max_bytes=2**62
    )


def _parse_job(row: tuple[Any, ...]) -> JobRow:
    """Parse a row.

    :raises sqlite3.Error: if it is damaged
    """
    id, session, call, tool, state, created_ns, ended_ns, attempt, is_notified, encoded = row
    try:
        details = cast("dict[str, Any]", decode_json_with_fallback(encoded))
        about, arguments, definition, output, untrusted, exposure, masked, up = (details[name] for name in _DETAILS)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise make_damaged_row_error(f"the row of job {str(id)[:80]!r}") from None
    texts = (id, session, call, tool, about, definition, output, untrusted)
    numbers = (created_ns, attempt, is_notified, 0 if ended_ns is None else ended_ns)
    sound = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) for number in numbers)
        and state in get_args(JobState)
        and exposure in get_args(OutputExposure)
        and (state in FINAL_JOB_STATES) == (ended_ns is not None)
        and (arguments is None or isinstance(arguments, dict))
    )
    if not sound:
        raise make_damaged_row_error(f"the row of job {str(id)[:80]!r}")
    job = Job(id, tool, call, session, state, created_ns, ended_ns, about, attempt)
    given = cast("dict[str, Any] | None", arguments)
    return JobRow(job, given, definition, output, untrusted, bool(is_notified), exposure, bool(masked), bool(up))


def read_unfinished_jobs(connection: sqlite3.Connection) -> list[JobRow]:
    """Return the unfinished jobs through any connection, the oldest first.

    :raises sqlite3.Error: if the database cannot be read
    """
    found = connection.execute(f"SELECT {_COLUMNS} FROM job WHERE {_OPEN} ORDER BY created_ns, id")  # noqa: S608
    return [_parse_job(row) for row in found]


# Tool sessions of stateful tools: the session itself is in memory, and its row records that it existed.
#
# A row is durable before the caller gets its id, so a step after a crash is answered with how the tool session ended.

_STATE_COLUMNS = "id, session, call, tool, opened_ns, ended_ns, end_reason"
_DAY_NS = 24 * 3600 * 1_000_000_000
MAX_ENDED_SESSIONS = 1_000
"""How many ended tool sessions are kept in a workspace, for later requests for them."""
ENDED_RETENTION_NS = 7 * _DAY_NS


class ToolSessionRow(Struct, frozen=True):
    """One tool session in its stored form. Times are wall-clock nanoseconds.

    :param call_id: the call that opened it
    :param ended: how it ended; None while it is open
    """

    id: str
    session_id: str
    call_id: str
    tool_id: str
    opened_ns: int
    ended_ns: int | None = None
    ended: StateEnd | None = None


class ToolSessionTable(WorkspaceTable):
    """The table of tool sessions, for the holder of the workspace.

    Methods that read raise ``LogUnavailable`` if the database cannot be read.
    """

    async def add(self, row: ToolSessionRow) -> None:
        """Add a tool session. Durable on return.

        :raises LogUnavailable: if it cannot be made durable
        """
        values = (row.id, row.session_id, row.call_id, row.tool_id, row.opened_ns, row.ended_ns, row.ended or "")
        sql = f"INSERT INTO tool_session ({_STATE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - our own words
        await self._write((sql, values))

    def end(self, state_id: str, ended: StateEnd, at_ns: int) -> None:
        """Store soon how a tool session ended; the first end counts."""
        sql = "UPDATE tool_session SET end_reason = ?, ended_ns = ? WHERE id = ? AND end_reason = ''"
        self.write_soon(make_statement_work((sql, (ended, at_ns, state_id))))

    async def mark_open_sessions_interrupted(self, now_ns: int) -> None:
        """Mark open tool sessions as interrupted, and remove old ones. Call it at start.

        :raises LogUnavailable: if that cannot be made durable
        """
        newest = "SELECT id FROM tool_session ORDER BY ended_ns DESC, id DESC LIMIT ?"
        await self._write(
            ("UPDATE tool_session SET end_reason = 'interrupted', ended_ns = ? WHERE end_reason = ''", (now_ns,)),
            ("DELETE FROM tool_session WHERE ended_ns < ?", (now_ns - ENDED_RETENTION_NS,)),
            (f"DELETE FROM tool_session WHERE id NOT IN ({newest})", (MAX_ENDED_SESSIONS,)),  # noqa: S608
        )

    def remove_old(self, now_ns: int) -> None:
        """Remove soon the tool sessions that ended long ago or exceed the limit."""
        newest = "SELECT id FROM tool_session WHERE end_reason <> '' ORDER BY ended_ns DESC, id DESC LIMIT ?"
        sql = f"DELETE FROM tool_session WHERE end_reason <> '' AND (ended_ns < ? OR id NOT IN ({newest}))"  # noqa: S608
        self.write_soon(make_statement_work((sql, (now_ns - ENDED_RETENTION_NS, MAX_ENDED_SESSIONS))))

    def get(self, state_id: str, session_id: str) -> ToolSessionRow | None:
        """Return a tool session of a session; None if there is none."""
        if not state_id.isascii():
            return None
        sql = f"SELECT {_STATE_COLUMNS} FROM tool_session WHERE id = ? AND session = ?"  # noqa: S608
        return next(iter(self._read_rows(sql, (state_id, session_id), _parse_tool_session)), None)


def _parse_tool_session(row: tuple[Any, ...]) -> ToolSessionRow:
    """Parse a row.

    :raises sqlite3.Error: if it is damaged
    """
    id, session, call, tool, opened_ns, ended_ns, ended = row
    texts = (id, session, call, tool)
    whole = isinstance(opened_ns, int) and (ended_ns is None or isinstance(ended_ns, int))
    if not whole or not all(isinstance(text, str) for text in texts) or ended not in ("", *get_args(StateEnd)):
        raise make_damaged_row_error(f"the row of tool session {str(row[0])[:80]!r}")
    return ToolSessionRow(id, session, call, tool, opened_ns, ended_ns, cast("StateEnd", ended) if ended else None)
