"""The past of a session: a search in its stored conversation and calls, and a reader for other processes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from handrail.contract.errors import ToolError
from handrail.contract.services.history_and_skill_services import (
    PassageKind,
    SessionArtifact,
    TranscriptPassage,
    TranscriptSearchResult,
)
from handrail.contract.struct import Struct
from handrail.record.artifacts import ArtifactStore
from handrail.record.log_reader import LoggedRecord, LogReader, ModelUsage
from handrail.session.memory.meaning_comparer import EmbeddingComparer
from handrail.session.memory.transcript_index import (
    PassageFilter,
    TranscriptIndex,
    cut_excerpt,
    filter_json_objects,
    is_hidden_from_model,
    list_ancestor_call_ids,
)
from handrail.session.memory.write_checks import RecalledTexts
from handrail.store.database.sqlite_connection import map_to_log_unavailable
from handrail.store.database.workspace_database import WorkspaceDatabase
from handrail.store.memory.passage_index import MOST_CANDIDATES, MOST_COMPARED, QueryTerms, parse_query, rank_passages
from handrail.store.tables.approval_tables import ApprovalReader
from handrail.store.tables.session_messages import read_session_messages, search_session_messages
from handrail.store.tables.session_tables import SessionRow, select_session_rows

_PROVIDER_TOOL_SOURCE = "it comes from a tool of the model's provider"


class SessionTranscriptSearch:
    """A search in the stored conversation and calls of a session, within bounds.

    Implements :class:`~handrail.contract.services.history_and_skill_services.TranscriptService`. Every call first takes what is new in
    the database.

    :param comparer: compares the meaning of passages; None for words only
    """

    def __init__(self, session_id: str, database: WorkspaceDatabase, comparer: EmbeddingComparer | None = None) -> None:
        self._session_id = session_id
        self._database = database
        self._comparer = comparer
        self._index: TranscriptIndex | None = None
        self.recalled = RecalledTexts()
        """What the memory tools have shown in this session."""

    async def search(self, query: str, *, limit: int = 10, kinds: Sequence[PassageKind] = ()) -> TranscriptSearchResult:
        found = await self.search_filtered_passages(query, PassageFilter(frozenset(kinds)), limit)
        for one in found.passages:
            self.recalled.add(one.id, one.text)
        return found

    async def search_filtered_passages(self, query: str, chosen: PassageFilter, limit: int) -> TranscriptSearchResult:
        """Find passages among those that a filter chooses; see :meth:`search`."""
        terms = parse_query(query)
        if not terms.texts:
            text = f"`query` contains no word to search for: {query[:80]!r}. Pass one or more words."
            raise ToolError(text, kind="invalid_input")
        index = await self.refresh_index()
        found = await asyncio.to_thread(index.find, terms, chosen)
        meaning = None
        if self._comparer is not None and not terms.is_single and len(found) > 1:
            numbers = [one.number for one in found[:MOST_COMPARED]]
            texts = await asyncio.to_thread(index.load, numbers)
            compared = {number: one.text for number, one in zip(numbers, texts, strict=True)}
            meaning = await self._comparer.compare(query, compared)
        ranked = [one.number for one in rank_passages(found, terms, meaning)]
        return await asyncio.to_thread(self._make_result, index, terms, chosen, ranked, limit)

    @staticmethod
    def _make_result(
        index: TranscriptIndex, terms: QueryTerms, chosen: PassageFilter, ranked: Sequence[int], limit: int
    ) -> TranscriptSearchResult:
        passages = index.load(ranked[:limit])
        shown = tuple(replace(one, text=cut_excerpt(one.text, terms.texts)) for one in passages)
        total = len(ranked) if len(ranked) < MOST_CANDIDATES else max(len(ranked), index.count(terms, chosen))
        return TranscriptSearchResult(shown, total, index.count_matching_passages(chosen), index.is_partial)

    async def read_passage(self, id: str, *, start: int = 0, most: int = 16_000) -> TranscriptPassage:
        index = await self.refresh_index()
        if (found := await asyncio.to_thread(index.find_by_id, id)) is None:
            text = f"Passage {id[:80]!r} does not exist in this session. Use an `id` from a search result."
            raise ToolError(text, kind="invalid_input")
        end = start + most
        self.recalled.add(id, found.text[start:end])
        return replace(found, text=found.text[start:end], next=end if end < len(found.text) else None)

    async def read_artifact(self, ref: str) -> SessionArtifact:
        await self._database.writer.flush()
        return await asyncio.to_thread(self._artifact, ref)

    def _artifact(self, ref: str) -> SessionArtifact:
        with LogReader.open_database(self._database.path) as reader, map_to_log_unavailable(reader.connection):
            untrusted = _find_third_party_origin(reader, self._session_id, ref)
        found = ArtifactStore(self._database.folders.artifact_folder).get(ref)
        return SessionArtifact(ref, found.media_type, found.data, untrusted)

    async def refresh_index(self) -> TranscriptIndex:
        """Return the index with everything that is stored by now.

        :raises LogUnavailable: if the store cannot be read
        """
        await self._database.writer.flush()  # so that the latest records are read too
        if self._index is None:
            self._index = TranscriptIndex(self._session_id)
        await asyncio.to_thread(self._refresh, self._index)
        return self._index

    def _refresh(self, index: TranscriptIndex) -> None:
        with LogReader.open_database(self._database.path) as reader, map_to_log_unavailable(reader.connection):
            index.refresh(reader)


def _find_third_party_origin(reader: LogReader, session_id: str, ref: str) -> str | None:
    """Return the third-party origin of a session's artifact, or None for the operator and the user.

    :raises ToolError: if the session has no such artifact, or the model may not see it
    """
    known = hidden = False
    source: str | None = None
    for outcome in _outcomes_with(reader, session_id, ref):
        body = outcome.body or {}
        metadata = _as_mapping(_as_mapping(body.get("result")).get("metadata"))
        placed: object = metadata.get("artifacts")
        if metadata.get("artifact") == ref:  # the full output of a tool that hides it from the model
            hidden = True
        elif isinstance(placed, list) and ref in placed:
            if "hidden_by" in body or any(
                is_hidden_from_model(reader, one) is not False for one in list_ancestor_call_ids(outcome.call_id)
            ):
                hidden = True
                continue
            known = True
            given = metadata.get("untrusted_source")
            source = given if isinstance(given, str) else source
    for message in search_session_messages(reader.connection, session_id, ref):
        known = known or any(one.get("artifact") == ref for one in filter_json_objects(message.get("pictures")))
        if any(
            ref in cast("list[object]", one.get("artifacts") or ()) for one in filter_json_objects(message.get("parts"))
        ):
            known, source = True, source or _PROVIDER_TOOL_SOURCE
    if not known:
        if hidden:
            raise ToolError(
                f"Artifact {ref} is hidden from the model by its tool. Ask the user for the content.", kind="denied"
            )
        text = f"Artifact {ref} does not exist in this session. Use a reference from a result of your own calls."
        raise ToolError(text, kind="invalid_input")
    return source


def _outcomes_with(reader: LogReader, session_id: str, ref: str) -> Iterator[LoggedRecord]:
    """Yield the outcomes that name an artifact, including those of the parent before the fork."""
    until = None
    passed: set[str] = set()
    while session_id not in passed:
        passed.add(session_id)
        yield from reader.search_committed_records(session_id, ref, **({} if until is None else {"until_ns": until}))
        rows = select_session_rows(reader.connection, "WHERE id = ?", (session_id,))
        parent = rows[0].details.get("parent") if rows else None
        if not isinstance(parent, str):
            return
        until = rows[0].opened_ns if until is None else min(until, rows[0].opened_ns)
        session_id = parent


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


# Reading sessions from any process: the sessions of a workspace, their state, and their messages.

SessionState = Literal[
    "open",  # a process has it open now
    "suspended",  # no process has it open; it can be resumed
    "closed",  # its messages and folders are removed; the log of its calls stays
]
_MAX_TASK = 200
_RESUMABLE = "WHERE closed_ns IS NULL AND parent_session IS NULL AND EXISTS (SELECT 1 FROM message WHERE message.session = session.id)"


class StoredSessionSummary(Struct, frozen=True):
    """The stored state of a session. Times are wall-clock nanoseconds.

    :param used_ns: when it was last opened or suspended, or got a message
    :param task: the beginning of its first user message, on one line; None if it has none
    :param forked_from: the session from which it was forked
    :param parent_session: the parent session of a sub-agent's session
    :param parent_call: the call of the parent session that started it
    :param messages: the number of stored messages
    :param calls: the number of proposed calls in the log
    :param awaiting_approval: the ids of approval requests that are not answered
    :param decided: the ids of answered approval requests whose calls run when the session is resumed
    :param usage: what its models used, without its sub-agents
    """

    id: str
    state: SessionState
    agent: str
    frontend: str
    topic: str | None
    task: str | None
    forked_from: str | None
    headless: bool
    opened_ns: int
    used_ns: int
    closed_ns: int | None
    messages: int
    calls: int
    awaiting_approval: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    parent_session: str | None = None
    parent_call: str | None = None
    usage: tuple[ModelUsage, ...] = ()


class StoredSessionReader:
    """A reader of stored sessions through one connection.

    :param holder: the fencing token of the process that holds the workspace now; None if none does
    :raises sqlite3.Error: by every method, if the database cannot be read
    """

    def __init__(self, connection: sqlite3.Connection, holder: int | None) -> None:
        self.connection = connection
        self._holder = holder

    def list_sessions(self, *, limit: int = 1000, closed: bool = True) -> list[StoredSessionSummary]:
        """Return the sessions, the most recently used first.

        :param closed: whether to include closed sessions
        """
        which = "" if closed else "WHERE closed_ns IS NULL "
        rows = select_session_rows(self.connection, f"{which}ORDER BY used_ns DESC, id DESC LIMIT ?", (limit,))
        return [self._make_facts(row) for row in rows]

    def list_resumable(self, *, limit: int = 1000) -> list[StoredSessionSummary]:
        """Return the sessions with messages that a user can resume, the most recently used first."""
        rows = select_session_rows(self.connection, f"{_RESUMABLE} ORDER BY used_ns DESC, id DESC LIMIT ?", (limit,))
        return [self._make_facts(row) for row in rows]

    def get(self, session_id: str) -> StoredSessionSummary | None:
        rows = select_session_rows(self.connection, "WHERE id = ?", (session_id,))
        return self._make_facts(rows[0]) if rows else None

    def find_latest_resumable(self) -> StoredSessionSummary | None:
        """Return the most recently used session with messages that no process has open."""
        where = f"{_RESUMABLE} AND (lease_token IS NULL OR lease_token IS NOT ?) ORDER BY used_ns DESC, id DESC LIMIT 1"
        rows = select_session_rows(self.connection, where, (-1 if self._holder is None else self._holder,))
        return self._make_facts(rows[0]) if rows else None

    def read_messages(self, session_id: str) -> list[Mapping[str, Any]]:
        """Return the stored messages in the format of :mod:`handrail.agent.conversation`."""
        return [data for _, data in read_session_messages(self.connection, session_id)]

    def _make_facts(self, row: SessionRow) -> StoredSessionSummary:
        unresolved = ApprovalReader(self.connection).list_unresolved_requests(row.id)
        asked = [request for request in unresolved if request.kind != "host"]  # no call waits for these across a stop
        parent = row.details.get("parent")
        state: SessionState = "closed" if row.closed_ns is not None else "suspended"
        if state == "suspended" and row.holder is not None and row.holder == self._holder:
            state = "open"
        return StoredSessionSummary(
            id=row.id,
            state=state,
            agent=row.agent,
            frontend=row.frontend,
            topic=row.topic,
            task=self._first_task(row.id),
            forked_from=parent if isinstance(parent, str) else None,
            headless=row.headless,
            opened_ns=row.opened_ns,
            used_ns=row.used_ns,
            closed_ns=row.closed_ns,
            messages=self._count("SELECT count(*) FROM message WHERE session = ?", row.id),
            calls=self._count(
                "SELECT count(*) FROM record WHERE session = ? AND substr(kinds, 1, 8) = 'proposed'", row.id
            ),
            awaiting_approval=tuple(approval.id for approval in asked if approval.state == "pending"),
            decided=tuple(approval.id for approval in asked if approval.state in ("approved", "rejected")),
            parent_session=row.parent_session,
            parent_call=row.parent_call,
            usage=tuple(LogReader(self.connection).read_session_model_usage(row.id)),
        )

    def _count(self, sql: str, session_id: str) -> int:
        return cast("int", self.connection.execute(sql, (session_id,)).fetchone()[0])

    def _first_task(self, session_id: str) -> str | None:
        """Return the beginning of the first message. A forked history begins with its parent's user."""
        for _, data in read_session_messages(self.connection, session_id, limit=1):
            text = data.get("text")
            if isinstance(text, str):
                line = " ".join(text.split())
                return line if len(line) <= _MAX_TASK else f"{line[:_MAX_TASK]}…"
        return None
