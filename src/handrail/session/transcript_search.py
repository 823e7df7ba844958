"""The past of a session: a search in its stored conversation and calls, and a reader for other processes."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from handrail.contract.errors import ToolError
from handrail.contract.services.history_and_skill_services import (
    PassageKind,
    SessionArtifact,
    TranscriptPassage,
    TranscriptSearchResult,
)
from handrail.record.artifacts import ArtifactStore
from handrail.record.log_reader import LoggedRecord, LogReader, ModelUsage
from handrail.store.database.sqlite_connection import map_to_log_unavailable
from handrail.store.database.workspace_database import WorkspaceDatabase
from handrail.store.tables.approval_tables import ApprovalReader
from handrail.store.tables.session_messages import (
    StoredSessionMessage,
    read_latest_session_messages,
    read_session_messages,
    search_session_messages,
)
from handrail.store.tables.session_tables import SessionRow, read_session_rows

MOST_MESSAGES = 20_000
MOST_CALLS = 5_000
"""The most calls that are searched without being in a message: those of programs, or of earlier agents."""
MOST_BYTES = 64 * 1024 * 1024
MOST_TERMS = 20
EXCERPT_CHARACTERS = 400
_CHARACTERS_BEFORE = 120
"""The number of characters in an excerpt before the match."""
_MAX_DEPTH = 32
_TERM = re.compile(r'"([^"]+)"|(\S+)')
_TRIMMED_CHARACTERS = ".,;:!?()[]{}<>'\"`*"
_PROVIDER_TOOL_SOURCE = "it comes from a tool of the model's provider"
_HIDDEN_OUTPUT = "(its output is kept from the model)"
SEARCH_TOOL = "search_memory"
"""The search tool. Its calls are left out of the results."""


class SessionTranscript:
    """A search in the stored conversation and calls of a session, within bounds.

    Implements :class:`~handrail.contract.services.history_and_skill_services.TranscriptService`. Every call reads the database again.
    """

    def __init__(self, session_id: str, database: WorkspaceDatabase) -> None:
        self._session_id = session_id
        self._database = database

    async def search(self, query: str, *, limit: int = 10, kinds: Sequence[PassageKind] = ()) -> TranscriptSearchResult:
        terms = parse_query_terms(query)
        if not terms:
            text = f"`query` contains no word to search for: {query[:80]!r}. Pass one or more words."
            raise ToolError(text, kind="invalid_input")
        await self._database.writer.flush()  # so that the latest records are read too
        return await asyncio.to_thread(self._search, terms, limit, frozenset(kinds))

    async def read_passage(self, id: str, *, start: int = 0, most: int = 16_000) -> TranscriptPassage:
        await self._database.writer.flush()
        return await asyncio.to_thread(self._passage, id, start, most)

    async def read_artifact(self, ref: str) -> SessionArtifact:
        await self._database.writer.flush()
        return await asyncio.to_thread(self._artifact, ref)

    def _artifact(self, ref: str) -> SessionArtifact:
        with LogReader.open_database(self._database.path) as reader, map_to_log_unavailable(reader.connection):
            untrusted = _find_third_party_origin(reader, self._session_id, ref)
        found = ArtifactStore(self._database.folders.artifact_folder).get(ref)
        return SessionArtifact(ref, found.media_type, found.data, untrusted)

    def _search(self, terms: Sequence[str], limit: int, kinds: frozenset[PassageKind]) -> TranscriptSearchResult:
        there, older = self._load_passages()
        chosen = [one for one in there if not kinds or one.kind in kinds]
        ranked = rank_passages(chosen, terms)
        shown = tuple(replace(one, text=cut_excerpt(one.text, terms)) for one in ranked[:limit])
        return TranscriptSearchResult(shown, len(ranked), len(chosen), older)

    def _passage(self, id: str, start: int, most: int) -> TranscriptPassage:
        there, _ = self._load_passages()
        found = next((one for one in there if one.id == id), None)
        if found is None:
            text = f"Passage {id[:80]!r} does not exist in this session. Use an `id` from a search result."
            raise ToolError(text, kind="invalid_input")
        end = start + most
        return replace(found, text=found.text[start:end], next=end if end < len(found.text) else None)

    def _load_passages(self) -> tuple[list[TranscriptPassage], bool]:
        """Return the passages in the order of time, and whether older passages are left out."""
        with LogReader.open_database(self._database.path) as reader, map_to_log_unavailable(reader.connection):
            kept, older = read_latest_session_messages(
                reader.connection, self._session_id, most=MOST_MESSAGES, max_bytes=MOST_BYTES
            )
            said = list(_passages_of_messages(kept))
            known = {one.id for one in said}
            calls, more = _passages_of_log(reader, self._session_id, known)
        return sorted((*said, *calls), key=lambda one: one.at_ns), older or more


def parse_query_terms(query: str) -> list[str]:
    """Return the phrases and words of a query, each once, in lower case."""
    terms = (phrase or word.strip(_TRIMMED_CHARACTERS) for phrase, word in _TERM.findall(query))
    return list(dict.fromkeys(term.casefold() for term in terms if term.strip()))[:MOST_TERMS]


def rank_passages(passages: Sequence[TranscriptPassage], terms: Sequence[str]) -> list[TranscriptPassage]:
    """Return the passages that contain any of ``terms``, the best first.

    A passage ranks higher if it contains more terms and rarer terms, and if it is shorter. Of equal ones the latest is first.
    """
    counted: list[tuple[TranscriptPassage, list[int]]] = []
    length = 0
    for one in passages:
        text = one.text.casefold()
        length += len(text)
        counts = [text.count(term) for term in terms]
        if any(counts):
            counted.append((one, counts))
    average = max(length / max(len(passages), 1), 1.0)
    within = [sum(1 for _, counts in counted if counts[n]) for n in range(len(terms))]
    rare = [math.log(1 + (len(passages) - many + 0.5) / (many + 0.5)) for many in within]

    def weight(one: TranscriptPassage, counts: Sequence[int]) -> float:
        norm = 1.2 * (0.25 + 0.75 * len(one.text) / average)
        return sum(r * count / (count + norm) for r, count in zip(rare, counts, strict=True) if count)

    ranked = sorted(counted, key=lambda entry: (-weight(*entry), -entry[0].at_ns))
    return [one for one, _ in ranked]


def cut_excerpt(text: str, terms: Sequence[str]) -> str:
    """Return the part of ``text`` around the first of ``terms`` in it."""
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    places = (re.search(re.escape(term), text, re.IGNORECASE) for term in terms)
    first = min((place.start() for place in places if place is not None), default=0)
    start = max(0, min(first - _CHARACTERS_BEFORE, len(text) - EXCERPT_CHARACTERS))
    end = start + EXCERPT_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


@dataclass(slots=True)
class _TranscriptCall:
    """A call of a message, until its answer is read."""

    id: str
    at_ns: int
    tool: str
    arguments: object
    result: object = None


def _passages_of_messages(kept: Sequence[StoredSessionMessage]) -> Iterator[TranscriptPassage]:
    open_: dict[str, _TranscriptCall] = {}
    for position, at_ns, data in kept:
        role, id = data.get("role"), f"message/{position}"
        if role == "user" and isinstance(text := data.get("text"), str):
            yield TranscriptPassage(id, "notice" if "notices" in data else "user", at_ns, text)
        elif role == "assistant":
            yield from (_call_passage(call) for call in open_.values())
            open_ = {}
            parts = _as_objects(data.get("parts"))
            texts = [str(part["text"]) for part in parts if isinstance(part.get("text"), str)]
            if any(text.strip() for text in texts):
                yield TranscriptPassage(id, "assistant", at_ns, "\n".join(texts))
            for part in parts:
                wire, name = part.get("call"), part.get("name")
                if isinstance(wire, str) and isinstance(name, str) and name != SEARCH_TOOL:
                    known = part.get("id")
                    call_id = known if isinstance(known, str) and known else f"{id}/{wire}"
                    open_[wire] = _TranscriptCall(call_id, at_ns, name, part.get("arguments"))
        elif role == "results":
            for one in _as_objects(data.get("results")):
                if (call := open_.get(str(one.get("of")))) is not None:
                    call.result = _parse_json(one.get("text"))
    yield from (_call_passage(call) for call in open_.values())


def _passages_of_log(reader: LogReader, session_id: str, known: set[str]) -> tuple[list[TranscriptPassage], bool]:
    """Return the latest calls of a session that are in no message, and whether older ones exist."""
    found: list[TranscriptPassage] = []
    size = 0
    for proposal in reader.records(session=session_id, kind="proposed", newest_first=True):
        if proposal.call_id in known or proposal.tool == SEARCH_TOOL or proposal.body is None:
            continue
        if len(found) >= MOST_CALLS or size > MOST_BYTES:
            return found, True
        known.add(proposal.call_id)
        if any(_is_hidden_from_model(reader, above) is not False for above in _list_calling_call_ids(proposal.call_id)):
            continue
        outcome = reader.find_outcome(proposal.call_id)
        result = None if outcome is None or outcome.body is None else outcome.body.get("result")
        if _is_hidden_from_model(reader, proposal.call_id):
            result = {"type": "output", "data": _HIDDEN_OUTPUT}
        call = _TranscriptCall(
            proposal.call_id, proposal.at_ns, proposal.tool or "?", proposal.body.get("arguments"), result
        )
        found.append(shown := _call_passage(call))
        size += len(shown.text)
    return found, False


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
                _is_hidden_from_model(reader, one) is not False for one in _list_calling_call_ids(outcome.call_id)
            ):
                hidden = True
                continue
            known = True
            given = metadata.get("untrusted_source")
            source = given if isinstance(given, str) else source
    for message in search_session_messages(reader.connection, session_id, ref):
        known = known or any(one.get("artifact") == ref for one in _as_objects(message.get("pictures")))
        if any(ref in cast("list[object]", one.get("artifacts") or ()) for one in _as_objects(message.get("parts"))):
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
        yield from reader.find_outcomes_containing(session_id, ref, **({} if until is None else {"until_ns": until}))
        rows = read_session_rows(reader.connection, "WHERE id = ?", (session_id,))
        parent = rows[0].details.get("parent") if rows else None
        if not isinstance(parent, str):
            return
        until = rows[0].opened_ns if until is None else min(until, rows[0].opened_ns)
        session_id = parent


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _is_hidden_from_model(reader: LogReader, call_id: str) -> bool | None:
    """Return whether the log hides a call's result from the model; None if the call has not ended."""
    outcome = reader.find_outcome(call_id)
    return None if outcome is None else outcome.body is None or "hidden_by" in outcome.body


def _list_calling_call_ids(call_id: str) -> Iterator[str]:
    """Return the ids of the calls that led to this call, the outermost first.

    A call id is ``session/turn.index``, with a further number for each level.
    """
    session, _, numbers = call_id.rpartition("/")
    parts = numbers.split(".")
    return (f"{session}/{'.'.join(parts[:many])}" for many in range(2, len(parts)))


def _call_passage(call: _TranscriptCall) -> TranscriptPassage:
    result, untrusted = _result_data(call.result)
    lines = [f"{call.tool}:", *_json_as_text_lines(call.arguments, 0), "→", *_json_as_text_lines(result, 0)]
    return TranscriptPassage(call.id, "call", call.at_ns, "\n".join(lines), call.tool, untrusted)


def _result_data(result: object) -> tuple[object, str | None]:
    """Return the data of a result, and its third-party origin if it has one."""
    if not isinstance(result, Mapping):
        return result, None
    fields = cast("Mapping[str, Any]", result)
    metadata: object = fields.get("metadata")
    given = cast("Mapping[str, object]", metadata).get("untrusted_source") if isinstance(metadata, Mapping) else None
    untrusted = given if isinstance(given, str) else None
    if fields.get("type") == "error":
        return f"error: {fields.get('error_text')}", untrusted
    return fields.get("data", fields), untrusted


def _json_as_text_lines(value: object, depth: int) -> Iterator[str]:
    """Yield a JSON value as lines of text, without quotes and escapes."""
    if depth > _MAX_DEPTH:
        yield "…"
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            if isinstance(inner, (Mapping, list)):
                yield f"{key}:"
                yield from _json_as_text_lines(cast("object", inner), depth + 1)
            else:
                yield f"{key}: {_to_text(inner)}"
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _json_as_text_lines(inner, depth + 1)
    elif value is not None:
        yield _to_text(value)


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _parse_json(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return text


def _as_objects(value: object) -> list[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


# Reading sessions from any process: the sessions of a workspace, their state, and their messages.

SessionState = Literal[
    "open",  # a process has it open now
    "suspended",  # no process has it open; it can be resumed
    "closed",  # its messages and folders are removed; the log of its calls stays
]
_MAX_TASK = 200
_RESUMABLE = "WHERE closed_ns IS NULL AND parent_session IS NULL AND EXISTS (SELECT 1 FROM message WHERE message.session = session.id)"


@dataclass(frozen=True, slots=True)
class StoredSessionFacts:
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


class SessionReader:
    """A reader of stored sessions through one connection.

    :param holder: the fencing token of the process that holds the workspace now; None if none does
    :raises sqlite3.Error: by every method, if the database cannot be read
    """

    def __init__(self, connection: sqlite3.Connection, holder: int | None) -> None:
        self._connection = connection
        self._holder = holder

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, for other readers of the same database."""
        return self._connection

    def list_sessions(self, *, limit: int = 1000, closed: bool = True) -> list[StoredSessionFacts]:
        """Return the sessions, the most recently used first.

        :param closed: whether to include closed sessions
        """
        which = "" if closed else "WHERE closed_ns IS NULL "
        rows = read_session_rows(self._connection, f"{which}ORDER BY used_ns DESC, id DESC LIMIT ?", (limit,))
        return [self._make_facts(row) for row in rows]

    def list_resumable(self, *, limit: int = 1000) -> list[StoredSessionFacts]:
        """Return the sessions with messages that a user can resume, the most recently used first."""
        rows = read_session_rows(self._connection, f"{_RESUMABLE} ORDER BY used_ns DESC, id DESC LIMIT ?", (limit,))
        return [self._make_facts(row) for row in rows]

    def get(self, session_id: str) -> StoredSessionFacts | None:
        rows = read_session_rows(self._connection, "WHERE id = ?", (session_id,))
        return self._make_facts(rows[0]) if rows else None

    def find_latest_resumable(self) -> StoredSessionFacts | None:
        """Return the most recently used session with messages that no process has open."""
        where = f"{_RESUMABLE} AND (lease_token IS NULL OR lease_token IS NOT ?) ORDER BY used_ns DESC, id DESC LIMIT 1"
        rows = read_session_rows(self._connection, where, (-1 if self._holder is None else self._holder,))
        return self._make_facts(rows[0]) if rows else None

    def read_messages(self, session_id: str) -> list[Mapping[str, Any]]:
        """Return the stored messages in the format of :mod:`handrail.agent.conversation`."""
        return [data for _, data in read_session_messages(self._connection, session_id)]

    def _make_facts(self, row: SessionRow) -> StoredSessionFacts:
        unresolved = ApprovalReader(self._connection).list_unresolved_requests(row.id)
        asked = [request for request in unresolved if request.kind != "host"]  # no call waits for these across a stop
        parent = row.details.get("parent")
        state: SessionState = "closed" if row.closed_ns is not None else "suspended"
        if state == "suspended" and row.holder is not None and row.holder == self._holder:
            state = "open"
        return StoredSessionFacts(
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
            calls=self._count("SELECT count(*) FROM record WHERE session = ? AND kind = 'proposed'", row.id),
            awaiting_approval=tuple(approval.id for approval in asked if approval.state == "pending"),
            decided=tuple(approval.id for approval in asked if approval.state in ("approved", "rejected")),
            parent_session=row.parent_session,
            parent_call=row.parent_call,
            usage=tuple(LogReader(self._connection).read_usage(row.id)),
        )

    def _count(self, sql: str, session_id: str) -> int:
        return cast("int", self._connection.execute(sql, (session_id,)).fetchone()[0])

    def _first_task(self, session_id: str) -> str | None:
        """Return the beginning of the first message. A forked history begins with its parent's user."""
        for _, data in read_session_messages(self._connection, session_id, limit=1):
            text = data.get("text")
            if isinstance(text, str):
                line = " ".join(text.split())
                return line if len(line) <= _MAX_TASK else f"{line[:_MAX_TASK]}…"
        return None
