"""An index in memory of one session's conversation and calls.

The index is made at the first search. Later searches add only what is new. The index is not stored, so no copy of the data
remains after a purge, or after the session is closed.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

from handrail.contract.services.history_and_skill_services import PassageKind, TranscriptPassage
from handrail.contract.struct import Struct
from handrail.record.log_reader import LogReader
from handrail.store.memory.passage_index import CREATE_INDEX, QueryTerms, RankedPassage, count_passages, find_passages
from handrail.store.tables.session_messages import StoredSessionMessage, read_latest_session_messages

MOST_MESSAGES = 20_000
MOST_CALLS = 5_000
"""The maximum number of searched calls that are in no message, such as those of programs."""
MOST_BYTES = 64 * 1024 * 1024
_MOST_COUNTED = 1_000
_CONTEXT_CHARACTERS = 400
EXCERPT_CHARACTERS = 400
_CHARACTERS_BEFORE = 120
"""The number of characters in an excerpt before the match."""
_MAX_DEPTH = 32
_HIDDEN_OUTPUT = "(its output is kept from the model)"
RECALL_TOOLS = frozenset({"search_memory", "memory_search", "memory.query", "memory__query"})
"""The tools that search memory, by id and wire name. Their calls are no passages: they repeat others."""


class PassageFilter(NamedTuple):
    """The passages to search: of some kinds, and from a time to another (wall clock, nanoseconds)."""

    kinds: frozenset[PassageKind] = frozenset()
    from_ns: int | None = None
    to_ns: int | None = None

    @property
    def sql_condition(self) -> str:
        """The condition on ``passage.rowid``; empty for all passages."""
        wheres = [f"at_ns >= {self.from_ns:d}"] if self.from_ns is not None else []
        wheres += [f"at_ns < {self.to_ns:d}"] if self.to_ns is not None else []
        if self.kinds:
            wheres.append(f"kind IN ({', '.join(repr(str(kind)) for kind in sorted(self.kinds))})")
        return f"rowid IN (SELECT number FROM item WHERE {' AND '.join(wheres)})" if wheres else ""  # noqa: S608


ALL_PASSAGES = PassageFilter()


class TranscriptIndex:
    """The index of one session's passages. Thread-safe.

    :param session_id: the session
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._lock = threading.RLock()
        self._start_empty()

    def _start_empty(self) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._connection.execute(CREATE_INDEX)
        self._connection.execute(
            "CREATE TABLE item (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, "
            "at_ns INTEGER NOT NULL, tool TEXT, untrusted TEXT)"
        )
        self.is_partial = False
        """Whether older passages are left out."""
        self._first_position: int = -1
        self._last_position: int = -1
        self._resume_position: int = -1
        self._has_reply = False
        self._last_record = 0
        self._unanswered: set[str] = set()
        """Calls of the log that had no outcome when they were read."""
        self._last_context = ""
        self._last_head = ""

    def refresh(self, reader: LogReader) -> None:
        """Add to the index what the database has and the index lacks.

        :raises sqlite3.Error: if the database cannot be read
        """
        with self._lock:
            sql = "SELECT min(position), max(position) FROM message WHERE session = ?"
            first, last = reader.connection.execute(sql, (self._session_id,)).fetchone()
            if self._last_position >= 0 and (first != self._first_position or last < self._last_position):
                self._connection.close()
                self._start_empty()
            messages, older = read_latest_session_messages(
                reader.connection,
                self._session_id,
                most=MOST_MESSAGES,
                max_bytes=MOST_BYTES,
                since=max(self._resume_position, 0),
            )
            is_first = self._last_position < 0 and not self._last_record
            if isinstance(first, int) and isinstance(last, int):
                self._first_position, self._last_position = first, last
            # Results complete the calls of the last reply, so it is read again.
            replies = [one.position for one in messages if one.data.get("role") == "assistant"]
            if replies or self._resume_position < 0 or not self._has_reply:
                self._resume_position = max(replies, default=self._last_position)
            self._has_reply = self._has_reply or bool(replies)
            message_passages = list(extract_message_passages(messages))
            calls = self._read_calls(reader, {one.id for one in message_passages})
            if is_first:
                self.is_partial = older or calls.is_partial
            with self._connection:
                self._connection.execute("BEGIN")
                self._store(sorted((*message_passages, *calls.passages), key=lambda one: one.at_ns))

    def _read_calls(self, reader: LogReader, said: set[str]) -> LogPassages:
        since, again = self._last_record, self._unanswered
        newest = reader.head().sequence

        def is_known(id: str) -> bool:
            sql = "SELECT 1 FROM item WHERE id = ?"
            return id in said or (id not in again and self._connection.execute(sql, (id,)).fetchone() is not None)

        calls = extract_log_passages(reader, self._session_id, is_known, since, again)
        self._last_record, self._unanswered = max(since, newest), calls.unanswered - said
        return calls

    def _store(self, passages: Iterable[TranscriptPassage]) -> None:
        connection = self._connection
        for one in passages:
            found = connection.execute("SELECT number FROM item WHERE id = ?", (one.id,)).fetchone()
            if found is not None:
                number = found[0]
                text = connection.execute("SELECT text FROM passage WHERE rowid = ?", (number,)).fetchone()[0]
                if text != one.text:
                    connection.execute("UPDATE passage SET text = ? WHERE rowid = ?", (one.text, number))
                connection.execute("UPDATE item SET untrusted = ? WHERE number = ?", (one.untrusted, number))
                continue
            sql = "INSERT INTO item (id, kind, at_ns, tool, untrusted) VALUES (?, ?, ?, ?, ?)"
            number = connection.execute(sql, (one.id, one.kind, one.at_ns, one.tool, one.untrusted)).lastrowid
            head = one.text[:_CONTEXT_CHARACTERS]
            if self._last_context and number is not None:
                both = f"{self._last_context} {head}"
                connection.execute("UPDATE passage SET context = ? WHERE rowid = ?", (both, number - 1))
            self._last_context = f"{_format_date(one.at_ns)} {self._last_head}"
            self._last_head = head
            sql = "INSERT INTO passage (rowid, text, context) VALUES (?, ?, ?)"
            connection.execute(sql, (number, one.text, self._last_context))

    def find(self, terms: QueryTerms, chosen: PassageFilter = ALL_PASSAGES) -> list[RankedPassage]:
        """Return the best passages by words; see :func:`~handrail.store.memory.passage_index.find_passages`."""
        with self._lock:
            return find_passages(self._connection, terms, chosen.sql_condition)

    def count(self, terms: QueryTerms, chosen: PassageFilter = ALL_PASSAGES) -> int:
        """Return how many passages contain a term, at most 1,000."""
        with self._lock:
            return count_passages(self._connection, terms, chosen.sql_condition, most=_MOST_COUNTED)

    def count_matching_passages(self, chosen: PassageFilter = ALL_PASSAGES) -> int:
        """Return how many passages ``chosen`` selects."""
        where = chosen.sql_condition.replace("rowid", "number", 1)
        with self._lock:
            sql = f"SELECT count(*) FROM item{f' WHERE {where}' if where else ''}"  # noqa: S608
            return int(self._connection.execute(sql).fetchone()[0])

    def load(self, numbers: Sequence[int]) -> list[TranscriptPassage]:
        """Return whole passages, in the order of ``numbers``."""
        sql = (
            "SELECT id, kind, at_ns, text, tool, untrusted FROM item JOIN passage ON passage.rowid = number "
            "WHERE number = ?"
        )
        with self._lock:
            return [TranscriptPassage(*self._connection.execute(sql, (number,)).fetchone()) for number in numbers]

    def find_by_id(self, id: str) -> TranscriptPassage | None:
        """Return the passage with an id, or None."""
        with self._lock:
            row = self._connection.execute("SELECT number FROM item WHERE id = ?", (id,)).fetchone()
            return None if row is None else self.load([row[0]])[0]

    def list_latest(self, chosen: PassageFilter, limit: int) -> list[TranscriptPassage]:
        """Return the latest passages, the latest first."""
        where = chosen.sql_condition.replace("rowid", "number", 1)
        sql = f"SELECT number FROM item{f' WHERE {where}' if where else ''} ORDER BY at_ns DESC, number DESC LIMIT ?"  # noqa: S608
        with self._lock:
            return self.load([row[0] for row in self._connection.execute(sql, (limit,)).fetchall()])


def _format_date(at_ns: int) -> str:
    """Return a date in the form in which people write about it."""
    at = datetime.fromtimestamp(at_ns / 1e9, UTC)
    return f"{at.day} {at:%B %Y}"


def cut_excerpt(text: str, terms: Sequence[str]) -> str:
    """Return the part of ``text`` around the first of ``terms`` in it."""
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    places = (re.search(re.escape(term), text, re.IGNORECASE) for term in terms)
    first = min((place.start() for place in places if place is not None), default=0)
    start = max(0, min(first - _CHARACTERS_BEFORE, len(text) - EXCERPT_CHARACTERS))
    end = start + EXCERPT_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


class _TranscriptCall(Struct):
    """A call of a message, until its answer is read."""

    id: str
    at_ns: int
    tool: str
    arguments: object
    result: object = None


def extract_message_passages(kept: Sequence[StoredSessionMessage]) -> Iterator[TranscriptPassage]:
    """Yield the passages of messages, each call with its result."""
    open_: dict[str, _TranscriptCall] = {}
    for position, at_ns, data in kept:
        role, id = data.get("role"), f"message/{position}"
        if role == "user" and isinstance(text := data.get("text"), str):
            yield TranscriptPassage(id, "notice" if "notices" in data else "user", at_ns, text)
        elif role == "assistant":
            yield from (_call_passage(call) for call in open_.values())
            open_ = {}
            parts = filter_json_objects(data.get("parts"))
            texts = [str(part["text"]) for part in parts if isinstance(part.get("text"), str)]
            if any(text.strip() for text in texts):
                yield TranscriptPassage(id, "assistant", at_ns, "\n".join(texts))
            for part in parts:
                wire, name = part.get("call"), part.get("name")
                if isinstance(wire, str) and isinstance(name, str) and name not in RECALL_TOOLS:
                    known = part.get("id")
                    call_id = known if isinstance(known, str) and known else f"{id}/{wire}"
                    open_[wire] = _TranscriptCall(call_id, at_ns, name, part.get("arguments"))
        elif role == "results":
            for one in filter_json_objects(data.get("results")):
                if (call := open_.get(str(one.get("of")))) is not None:
                    call.result = _parse_json(one.get("text"))
    yield from (_call_passage(call) for call in open_.values())


class LogPassages(NamedTuple):
    """Passages of calls in the log.

    :param unanswered: the calls that may still get an outcome
    :param is_partial: whether older calls are left out
    """

    passages: list[TranscriptPassage]
    unanswered: set[str]
    is_partial: bool = False


def extract_log_passages(
    reader: LogReader, session_id: str, is_known: Callable[[str], bool], since: int, again: Iterable[str]
) -> LogPassages:
    """Return the latest calls of a session that are in no message.

    :param is_known: returns whether a message has the call with this id
    :param since: the last record that was read before
    :param again: calls before it to read again
    """
    found: list[TranscriptPassage] = []
    unanswered: set[str] = set()
    size = 0
    new = reader.records(session=session_id, kind="proposed", since=since, newest_first=True)
    earlier = (proposal for one in again if (proposal := reader.find_proposal(one)) is not None)
    for proposal in (*new, *earlier) if again else new:
        if proposal.tool in RECALL_TOOLS or proposal.body is None or is_known(proposal.call_id):
            continue
        if len(found) >= MOST_CALLS or size > MOST_BYTES:
            return LogPassages(found, unanswered, is_partial=True)
        hidden = [is_hidden_from_model(reader, one) for one in list_ancestor_call_ids(proposal.call_id)]
        outcome = reader.find_outcome(proposal.call_id)
        if outcome is None or None in hidden:
            unanswered.add(proposal.call_id)
        if any(one is not False for one in hidden):
            continue
        result = None if outcome is None or outcome.body is None else outcome.body.get("result")
        if is_hidden_from_model(reader, proposal.call_id):
            result = {"type": "output", "data": _HIDDEN_OUTPUT}
        call = _TranscriptCall(
            proposal.call_id, proposal.at_ns, proposal.tool or "?", proposal.body.get("arguments"), result
        )
        found.append(shown := _call_passage(call))
        size += len(shown.text)
    return LogPassages(found, unanswered)


def is_hidden_from_model(reader: LogReader, call_id: str) -> bool | None:
    """Return whether the log hides a call's result from the model; None if the call has not ended."""
    outcome = reader.find_outcome(call_id)
    return None if outcome is None else outcome.body is None or "hidden_by" in outcome.body


def list_ancestor_call_ids(call_id: str) -> Iterator[str]:
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


def filter_json_objects(value: object) -> list[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]
