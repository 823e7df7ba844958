"""Doors that are prepared for what tools will ask of upper rooms: jobs, agents, the catalog, channels.

Only their shapes are here, so that a tool, the arbiter and whoever implements a door agree on them before it opens. A
runtime has a door once a kernel is built with it; until then no tool can require its capability.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from handrail.contract.result import Result
from handrail.contract.spec import ToolSpec

JobState = Literal["pending", "running", "done", "failed", "cancelled", "interrupted"]
"""One terminal state each; ``interrupted`` when nobody knows how it ended."""


@dataclass(frozen=True, slots=True)
class Job:
    """A call that outlives its turn. Times are wall-clock nanoseconds."""

    id: str
    tool_id: str
    call_id: str
    session_id: str
    state: JobState
    created_ns: int
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True)
class JobOutput:
    """A piece of a job's output: ``text``, and the cursor to read on from; ``more`` while it may still grow."""

    text: str
    cursor: int
    more: bool


class Jobs(Protocol):
    """The jobs of one session."""

    async def list(self) -> Sequence[Job]: ...

    async def read(self, job_id: str, *, cursor: int = 0, max_bytes: int = 65_536) -> JobOutput:
        """:raises ToolError: ``invalid_input`` for a job that is not this session's"""
        ...

    async def wait(self, job_id: str, *, timeout_ms: int) -> Result | None:
        """Its result, or None when it has none in time. A wait never stops the job."""
        ...

    async def stop(self, job_id: str) -> Job:
        """Its state afterwards; one that had ended stays as it was."""
        ...


@dataclass(frozen=True, slots=True)
class Delegation:
    """A task for a sub-agent. Its rights are at most those of whoever delegates."""

    agent: str
    task: str
    background: bool = False


class Agents(Protocol):
    """Sub-agents: child sessions with a conversation of their own."""

    async def run(self, delegation: Delegation) -> Result:
        """What it answered; in the background, its session's id at once.

        :raises ToolError: ``invalid_input`` for an agent that there is not; ``limit`` too many levels down
        """
        ...


@dataclass(frozen=True, slots=True)
class Category:
    """A group of tools under one name."""

    name: str
    description: str
    tool_count: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A tool that fits a query; ``relevance`` is between 0 and 1."""

    tool_id: str
    description: str
    relevance: float


class Catalog(Protocol):
    """What one interaction's model sees of the registry."""

    @property
    def active(self) -> Sequence[ToolSpec]:
        """In view now, in a stable order: the core set, and what was loaded."""
        ...

    def categories(self) -> Sequence[Category]: ...

    def load(self, name: str) -> Sequence[str]:
        """Bring a category, or one tool by its id, into view. Gives the ids that were added.

        :raises ToolError: ``invalid_input`` for a name that there is not, with those there are
        """
        ...

    async def search(self, query: str, *, limit: int = 5) -> Sequence[Hit]:
        """What fits ``query``, best first; nothing where nothing does."""
        ...


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """What was sent over a channel, by whom. ``at_ns`` is wall-clock time."""

    channel: str
    sender: str
    text: str
    at_ns: int
    data: Mapping[str, Any] | None = None


class Channels(Protocol):
    """Named channels between sessions: a queue is read by one, a broadcast by all who subscribed."""

    async def send(self, channel: str, text: str, *, data: Mapping[str, Any] | None = None) -> None:
        """:raises ToolError: ``invalid_input`` for a channel that there is not, or that is not this session's"""
        ...

    def receive(self, channel: str) -> AsyncIterator[ChannelMessage]:
        """Messages from now on, until the session ends."""
        ...
