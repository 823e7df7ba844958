"""The memory of one session: its notes, its conversation, and the facts of its user."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.errors import ToolError
from handrail.contract.services.memory_service import (
    FactCompactionResult,
    MemoryQuery,
    MemoryQueryResult,
    MemoryService,
    MemoryWriteRequest,
    RecalledMemory,
    StoredMemory,
)
from handrail.contract.session_protocols import SessionValueStore
from handrail.contract.struct import Struct, field
from handrail.record.log_reader import LogReader
from handrail.session.memory.meaning_comparer import EmbeddingComparer
from handrail.session.memory.transcript_index import PassageFilter, filter_json_objects
from handrail.session.memory.write_checks import (
    find_untrusted_content_reason,
    normalise_memory_write,
    read_instruction_files,
    reject_repeated_write,
    reject_secrets_in_write,
)
from handrail.session.transcript_search import SessionTranscriptSearch
from handrail.store.database.sqlite_connection import map_to_log_unavailable
from handrail.store.database.workspace_database import WorkspaceDatabase
from handrail.store.memory.knowledge_store import (
    MOST_WRITES_PER_SESSION,
    KnowledgeEntry,
    KnowledgeStore,
    KnowledgeUnavailable,
    SessionWriteLimitError,
    UnknownKnowledgeEntry,
)
from handrail.store.memory.passage_index import (
    CREATE_INDEX,
    MOST_COMPARED,
    QueryTerms,
    find_passages,
    parse_query,
    rank_passages,
)

MAX_ENTRY_CHARACTERS = 2_000
"""The maximum number of characters of a note or passage in an answer."""


class SessionMemoryFactory(Struct, frozen=True):
    """The memory of one session (:class:`~handrail.contract.services.memory_service.SessionMemoryService`).

    :param instructions: the operator's text for the agent, which every session of it has
    :param clock: returns wall-clock time in nanoseconds
    """

    session_id: str
    agent: str
    workspace: Path
    knowledge: KnowledgeStore
    transcript: SessionTranscriptSearch
    values: SessionValueStore
    database: WorkspaceDatabase
    redactor: SecretRedactor
    comparer: EmbeddingComparer | None
    instructions: str = ""
    clock: Callable[[], int] = field(default=time.time_ns)

    def for_call(self, call_id: str) -> MemoryService:
        return _CallMemory(self, call_id)


class _CallMemory(Struct, frozen=True):
    """The memory for one call."""

    memory: SessionMemoryFactory
    call_id: str

    async def recall(self, query: MemoryQuery) -> MemoryQueryResult:
        if query.mode != "range" and not query.query.strip():
            raise ToolError(f"Mode {query.mode!r} needs `query`. Pass words, an ID or a key.", kind="invalid_input")
        match query.store:
            case "working":
                found = await self._recall_notes(query)
            case "session":
                found = await self._recall_passages(query)
            case "knowledge":
                with _map_store_failures():
                    found = await self._recall_facts(query)
        for one in found.memories:
            self.memory.transcript.recalled.add(one.id, one.text)
        return found

    async def remember(self, write: MemoryWriteRequest) -> StoredMemory:
        memory, write = self.memory, normalise_memory_write(write)
        reject_secrets_in_write(write, memory.redactor.redact_text)
        instructions = await asyncio.to_thread(lambda: [*read_instruction_files(memory.workspace)])
        own = [("the operator's instructions of this agent", memory.instructions)] if memory.instructions else []
        with _map_store_failures():
            if not await asyncio.to_thread(memory.knowledge.contains, write.text):
                texts = [*instructions, *own]
                await asyncio.to_thread(reject_repeated_write, write, memory.transcript.recalled, texts)
        await memory.database.writer.flush()
        untrusted = await asyncio.to_thread(self._find_untrusted_view)
        new = KnowledgeEntry(
            "",
            write.text,
            write.key,
            write.tags,
            memory.clock(),
            str(memory.workspace),
            memory.session_id,
            self.call_id,
            memory.agent,
            memory.redactor.redact_text(untrusted),
            replaces=write.replaces,
        )
        with _map_store_failures():
            try:
                stored = await asyncio.to_thread(memory.knowledge.store, new)
            except UnknownKnowledgeEntry:
                raise ToolError(
                    f"The fact was not stored: `replaces` names {write.replaces!r:.80}, which is not a current fact. Use "
                    "the ID of a fact from memory.query.",
                    kind="invalid_input",
                ) from None
            except SessionWriteLimitError:
                raise ToolError(
                    f"The fact was not stored: this session has stored {MOST_WRITES_PER_SESSION} facts, the maximum. "
                    "Tell the user what else is worth keeping.",
                    kind="limit",
                ) from None
        entry = stored.entry
        return StoredMemory(entry.id, entry.text, stored.is_merged, None if entry.is_confirmed else entry.untrusted)

    async def fold_facts(self) -> FactCompactionResult:
        with _map_store_failures():
            folded = await asyncio.to_thread(self.memory.knowledge.compact)
        return FactCompactionResult(folded.number, folded.folded)

    def _find_untrusted_view(self) -> str:
        with LogReader.open_database(self.memory.database.path) as reader, map_to_log_unavailable(reader.connection):
            return find_untrusted_content_reason(reader, self.memory.session_id)

    # The user's facts

    async def _recall_facts(self, query: MemoryQuery) -> MemoryQueryResult:
        knowledge = self.memory.knowledge
        if query.mode == "semantic":
            return await self._rank_facts(query)
        if query.mode == "hash":
            entries = await asyncio.to_thread(knowledge.find_exact_matches, query.query.strip())
            entries = [one for one in entries if _is_within(one.created_ns, query)]
            return MemoryQueryResult(tuple(map(_to_recalled_fact, entries[: query.limit])), len(entries))
        entries = await asyncio.to_thread(
            knowledge.list_entries, from_ns=query.from_ns, to_ns=query.to_ns, latest_only=True, limit=query.limit
        )
        total = await asyncio.to_thread(
            knowledge.count_entries, from_ns=query.from_ns, to_ns=query.to_ns, latest_only=True
        )
        return MemoryQueryResult(tuple(map(_to_recalled_fact, entries)), total)

    async def _rank_facts(self, query: MemoryQuery) -> MemoryQueryResult:
        knowledge, comparer, terms = self.memory.knowledge, self.memory.comparer, _parse_terms(query.query)
        found = await asyncio.to_thread(knowledge.find, terms, query.from_ns, query.to_ns)
        meaning = None
        if comparer is not None and len(found) > 1 and not terms.is_single:
            entries = await asyncio.to_thread(knowledge.load, [one.number for one in found[:MOST_COMPARED]])
            texts = {number: entry.text for number, entry in entries.items()}
            meaning = await comparer.compare(query.query, texts, vectors=knowledge)
        ranked = [one.number for one in rank_passages(found, terms, meaning, neighbours=False)]
        # Some are left out, because a later one has their key.
        loaded = ranked[: 3 * query.limit]
        entries = [*(await asyncio.to_thread(knowledge.load, loaded)).values()]
        total = len(ranked) - (len(loaded) - len(entries))
        return MemoryQueryResult(tuple(map(_to_recalled_fact, entries[: query.limit])), total)

    # The conversation and calls of the session

    async def _recall_passages(self, query: MemoryQuery) -> MemoryQueryResult:
        transcript, chosen = self.memory.transcript, PassageFilter(from_ns=query.from_ns, to_ns=query.to_ns)
        if query.mode == "semantic":
            found = await transcript.search_filtered_passages(query.query, chosen, query.limit)
            passages, total = list(found.passages), found.total
        else:
            index = await transcript.refresh_index()
            if query.mode == "hash":
                one = await asyncio.to_thread(index.find_by_id, query.query.strip())
                passages = [one] if one is not None and _is_within(one.at_ns, query) else []
                total = len(passages)
            else:
                passages = await asyncio.to_thread(index.list_latest, chosen, query.limit)
                total = await asyncio.to_thread(index.count_matching_passages, chosen)
        shown = tuple(
            RecalledMemory(
                one.id, one.text[:MAX_ENTRY_CHARACTERS], one.at_ns, kind=one.tool or one.kind, untrusted=one.untrusted
            )
            for one in passages
        )
        return MemoryQueryResult(shown, total)

    # The notes of the session

    async def _recall_notes(self, query: MemoryQuery) -> MemoryQueryResult:
        if query.from_ns is not None or query.to_ns is not None:
            raise ToolError("Notes have no time. Omit `from` and `to` for the store `working`.", kind="invalid_input")
        notes = await self._read_notes()
        if query.mode == "hash":
            wanted = query.query.strip()
            notes = [one for one in notes if wanted in (one.id, one.key, one.text)]
        elif query.mode == "semantic":
            notes = await asyncio.to_thread(_rank_notes, notes, query.query)
        return MemoryQueryResult(tuple(notes[: query.limit]), len(notes))

    async def _read_notes(self) -> list[RecalledMemory]:
        memory = self.memory
        notes: object = await memory.values.get(memory.session_id, "scratchpad", "notes")
        todos: object = await memory.values.get(memory.session_id, "todo", "todos")
        found = [
            RecalledMemory(f"note/{key}", str(text)[:MAX_ENTRY_CHARACTERS], key=key)
            for key, text in (cast("dict[str, Any]", notes) if isinstance(notes, dict) else {}).items()
        ]
        return found + [
            RecalledMemory(f"todo/{todo.get('id')}", f"{todo.get('status')}: {todo.get('content')}")
            for todo in filter_json_objects(todos)
        ]


@contextmanager
def _map_store_failures() -> Generator[None]:
    """Map a failure of the store to an error of the tool.

    :raises ToolError: ``unavailable`` if the store cannot be used
    """
    try:
        yield
    except KnowledgeUnavailable as error:
        raise ToolError(str(error), kind="unavailable") from None


def _rank_notes(notes: list[RecalledMemory], query: str) -> list[RecalledMemory]:
    terms = _parse_terms(query)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(CREATE_INDEX)
        rows = [(number, f"{one.key or ''} {one.text}", "") for number, one in enumerate(notes)]
        connection.executemany("INSERT INTO passage (rowid, text, context) VALUES (?, ?, ?)", rows)
        return [notes[one.number] for one in find_passages(connection, terms)]


def _parse_terms(query: str) -> QueryTerms:
    terms = parse_query(query)
    if not terms.texts:
        text = f"`query` contains no word to search for: {query[:80]!r}. Pass one or more words."
        raise ToolError(text, kind="invalid_input")
    return terms


def _is_within(at_ns: int, query: MemoryQuery) -> bool:
    return (query.from_ns is None or at_ns >= query.from_ns) and (query.to_ns is None or at_ns < query.to_ns)


def _to_recalled_fact(entry: KnowledgeEntry) -> RecalledMemory:
    untrusted = None if entry.is_confirmed else entry.untrusted
    return RecalledMemory(entry.id, entry.text, entry.created_ns, entry.key, entry.tags, untrusted=untrusted)
