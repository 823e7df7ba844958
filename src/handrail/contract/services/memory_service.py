"""Memory: the notes and the conversation of a session, and the facts that agents store for the user."""

from __future__ import annotations

from typing import Literal, Protocol

from handrail.contract.struct import Struct

MemoryStoreName = Literal["working", "session", "knowledge"]
"""The notes of the session, its conversation and calls, or the user's facts in all workspaces."""
MemoryMode = Literal["semantic", "hash", "range"]
"""By words and meaning; by exact id, key or text; or by time."""


class MemoryQuery(Struct, frozen=True):
    """A query. Times are wall-clock nanoseconds.

    :param from_ns: only entries from this time on
    :param to_ns: only entries before this time
    """

    query: str = ""
    mode: MemoryMode = "semantic"
    store: MemoryStoreName = "knowledge"
    from_ns: int | None = None
    to_ns: int | None = None
    limit: int = 10


class RecalledMemory(Struct, frozen=True):
    """One entry that a query found.

    :param at_ns: when it was stored; None for a note
    :param kind: the kind of a passage of the conversation
    :param untrusted: why it may not come from the user; None for an entry that a model may rely on
    """

    id: str
    text: str
    at_ns: int | None = None
    key: str | None = None
    tags: tuple[str, ...] = ()
    kind: str | None = None
    untrusted: str | None = None


class MemoryQueryResult(Struct, frozen=True):
    """The entries that a query found, the best first, and how many match."""

    memories: tuple[RecalledMemory, ...]
    total: int


class MemoryWriteRequest(Struct, frozen=True):
    """A fact to store.

    :param key: its subject. The latest fact with a key counts
    :param replaces: the id of the fact that it replaces
    """

    text: str
    key: str | None = None
    tags: tuple[str, ...] = ()
    replaces: str | None = None


class StoredMemory(Struct, frozen=True):
    """A stored fact.

    :param is_merged: whether a stored fact that says the same was kept instead
    :param untrusted: why a person has to confirm it; None if a model may rely on it
    """

    id: str
    text: str
    is_merged: bool = False
    untrusted: str | None = None


class FactCompactionResult(Struct, frozen=True):
    """The result of a compaction of the facts.

    :param number: the number by which a person can undo it
    :param ids: the facts that became history, because a later one has their key
    """

    number: int
    ids: tuple[str, ...]


class MemoryService(Protocol):
    """The memory of one session, for one call."""

    async def recall(self, query: MemoryQuery) -> MemoryQueryResult:
        """Find notes, passages or facts.

        :raises ToolError: ``invalid_input`` for a query without any word, ``unavailable`` if the store cannot be used
        :raises LogUnavailable: if the conversation cannot be read
        """
        ...

    async def remember(self, write: MemoryWriteRequest) -> StoredMemory:
        """Store a fact for the user, if it passes the checks.

        :raises ToolError: with the reason why it is not stored
        """
        ...

    async def fold_facts(self) -> FactCompactionResult:
        """Fold facts with the same key into the latest one.

        :raises ToolError: ``unavailable`` if the store cannot be used
        """
        ...


class SessionMemoryService(Protocol):
    """The memory of a session."""

    def for_call(self, call_id: str) -> MemoryService:
        """Return the memory for one call, which becomes the origin of what it stores."""
        ...
