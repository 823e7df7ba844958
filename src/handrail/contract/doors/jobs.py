"""The services by which tools reach background jobs, terminals and the tool catalog.

Only the Protocols and their values are here, so that tools, the arbiter and the implementations agree on them. A runtime
has such a service if its kernel was built with an implementation. Otherwise no tool can require its capability.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from handrail.contract.call import Result

if TYPE_CHECKING:
    from handrail.contract.sandbox import Completed


JobState = Literal["pending", "running", "done", "failed", "cancelled", "interrupted"]
"""``pending`` until the job has its locks, or until its session is opened again. The last four are final; ``interrupted``
means that its outcome is unknown."""
ENDED_STATES = frozenset[JobState]({"done", "failed", "cancelled", "interrupted"})


@dataclass(frozen=True, slots=True)
class Job:
    """A call that outlives its turn. Times are wall-clock nanoseconds.

    :param about: its arguments, as one short line for people
    :param attempt: 1, and one more each time it was run again after a restart
    :param output_bytes: how much of its output can be read
    :param rests: it has not ended and no process is running it: it goes on when its session is opened again
    """

    id: str
    tool_id: str
    call_id: str
    session_id: str
    state: JobState
    created_ns: int
    ended_ns: int | None = None
    about: str = ""
    attempt: int = 1
    output_bytes: int = 0
    rests: bool = False

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True)
class JobOutput:
    """A piece of a job's output.

    :param cursor: position in bytes from which to read on
    :param more: there is more to read, or the output may still grow
    :param first: when lines were asked for, the number of the first one, counted from 0
    :param skipped: bytes before ``text`` that were asked for and are no longer kept
    """

    text: str
    cursor: int
    more: bool
    first: int | None = None
    skipped: int = 0


class Jobs(Protocol):
    """The jobs of one session or of a whole workspace.

    For a job that does not exist, or is another session's, the methods raise
    :class:`~handrail.contract.errors.ToolError` of kind ``invalid_input``, which names the existing jobs.
    """

    async def list(self) -> Sequence[Job]:
        """All jobs that are kept, the oldest first."""
        ...

    async def get(self, job_id: str) -> Job: ...

    async def read(self, job_id: str, *, cursor: int = 0, max_bytes: int = 65_536) -> JobOutput:
        """Its output from a cursor on."""
        ...

    async def lines(self, job_id: str, *, offset: int = 0, count: int = 200) -> JobOutput:
        """Its output by lines: ``count`` lines from line ``offset`` on; a negative offset counts from the end."""
        ...

    async def wait(self, job_id: str, *, timeout_ms: int) -> Result | None:
        """Its result as a model may see it, or None when it has not ended within the time. A wait never stops the job."""
        ...

    async def stop(self, job_id: str) -> Job:
        """Stop it and wait until it has ended, within the grace period. Gives it as it is afterwards; a job that had ended
        before is unchanged."""
        ...


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that is being waited for and could go on in the background.

    :param about: its arguments, as one short line for people
    """

    call_id: str
    session_id: str
    tool_id: str
    about: str
    elapsed_ms: int


class WorkspaceJobs(Jobs, Protocol):
    """The jobs of a whole workspace, and the running calls that could become jobs."""

    async def promotable(self) -> Sequence[RunningCall]:
        """The calls of all sessions and processes that can be promoted now."""
        ...

    async def promote(self, call_id: str) -> Job:
        """Move a call to the background; see :meth:`handrail.contract.session.Session.promote`.

        :raises ToolError: as that does; ``invalid_input`` names those that can be promoted
        """
        ...


NOT_HEARD = "mcp:"
"""A prefix that no category's name has."""


@dataclass(frozen=True, slots=True)
class Category:
    """A group of tools under one name. ``tool_count`` counts those that can be called now and are not core.

    One that starts with :data:`NOT_HEARD` is a source of tools that has not said yet what it has.
    """

    name: str
    description: str
    tool_count: int


@dataclass(frozen=True, slots=True)
class BroughtIn:
    """What was brought into a model's view.

    :param name: the category's, or the tool's id
    :param tools: all that it stands for and that can be called, by id
    :param added: those of them that were not in view before, in order
    :param core: it is a core tool, which is always in view
    :param left: what is no longer in view, to make room: searches had found it, and nobody called it
    """

    name: str
    kind: Literal["category", "tool"]
    tools: tuple[str, ...]
    added: tuple[str, ...]
    core: bool = False
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """A tool that fits a query.

    :param relevance: how well, beside the other hits; between 0 and 1
    :param confidence: how sure it is that the tool serves the query, whatever else was found; between 0 and 1
    :param weak: it may well not fit
    :param tail: so little speaks for it, at all or beside the others, that a search does not bring it into view
    :param reason: what spoke for it, for people
    :param source: whose text the description is, where that is not the operator's; else ``""``
    """

    tool_id: str
    description: str
    relevance: float
    confidence: float = 1.0
    weak: bool = False
    reason: str = ""
    source: str = ""
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """What a search came to.

    :param hits: best first
    :param nothing_fits: there are tools, and none of them serves the query; ``hits`` may still hold the nearest
    :param means: what was compared, as an operator would say it: words only, or words and meaning
    :param unread: where nothing fits, why the query may not have been understood, and what to do, as half a sentence; else
        empty
    :param left: what is no longer in view, to make room for what was found
    """

    hits: tuple[Hit, ...]
    nothing_fits: bool = False
    means: str = ""
    unread: str = ""
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manual:
    """The manual of one tool: what a model may know of it before a call.

    Of the tool's runtime view, only its category, documentation and guidance are in it.

    :param name: as a model calls it
    :param source: whose text all this is, where that is not the operator's; else ``""``
    """

    id: str
    name: str
    category: str
    description: str
    parameters: Mapping[str, Any]
    documentation: str
    guidance: str
    example: Mapping[str, Any] | None = None
    """Arguments of the least kind that fit the parameters; None where none could be made up."""
    source: str = ""


class Catalog(Protocol):
    """What one interaction's model sees of the registry. What is brought into view is seen from the next turn on; it gives
    no right to run anything, and what is not in view can be called all the same."""

    async def active(self) -> Sequence[str]:
        """The ids of the tools in view, in a stable order: the core tools, and what was brought."""
        ...

    async def categories(self) -> Sequence[Category]:
        """Those that have tools which can be called and are not core; then those that ship and are empty, each with what belongs in
        it; then the sources that have not said yet what they have."""
        ...

    async def load(self, name: str, *, kind: Literal["category", "tool"] | None = None) -> BroughtIn:
        """Bring a category, or one tool by its id, into view. Twice is once.

        :param kind: what the name is of; None for a category, or a tool where there is no category of that name
        :raises ToolError: ``invalid_input`` for a name that there is not, with those there are; ``unavailable`` for a tool
            that is withheld
        """
        ...

    async def search(self, query: str, *, limit: int = 5, extensions_only: bool = False) -> Findings:
        """What fits ``query`` of all that can be called, and bring that into view; hits of the tail are left out.

        :param extensions_only: leave out what ships with Handrail
        :raises ToolError: ``invalid_input`` for a query without any words
        """
        ...

    async def manual(self, tool: str) -> Manual:
        """A tool's manual, by its id, alias or wire name; from now on it counts as read in this session.

        :raises ToolError: ``unknown_tool`` with the nearest there are
        """
        ...


# Terminals of a session: programs that receive typed input from tools with the capability ``terminals``.

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "enter": "\r",
        "tab": "\t",
        "space": " ",
        "escape": "\x1b",
        "backspace": "\x7f",
        "up": "\x1b[A",
        "down": "\x1b[B",
        "right": "\x1b[C",
        "left": "\x1b[D",
        "home": "\x1b[H",
        "end": "\x1b[F",
        "insert": "\x1b[2~",
        "delete": "\x1b[3~",
        "page-up": "\x1b[5~",
        "page-down": "\x1b[6~",
        "ctrl-backslash": "\x1c",
        **{f"ctrl-{letter}": chr(ord(letter) - 96) for letter in string.ascii_lowercase},
    }
)
"""What each key sends, as terminals of the VT100 family do."""
MOST_KEYS = 64
START = "terminal.start"
"""The tool that opens one."""
DEFAULT_COMMAND = "bash --noprofile --norc"
"""What a terminal runs where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Typed:
    """What became of what was typed.

    :param sent: bytes that its program's terminal has taken
    :param left: those that it has not, within the time there was; they are not typed any more
    """

    sent: int
    left: int = 0


class Terminals(Protocol):
    """The terminals of one session, each by the id of its job. One that has ended, or is not there, is a
    :class:`~handrail.contract.errors.ToolError`."""

    async def run(self, command: str, *, cwd: str | None = None, columns: int, rows: int) -> Completed:
        """Run a shell text in a new terminal, which is this call's job, until it ends. What it shows is the job's output.

        :raises ToolError: as :meth:`handrail.contract.doors.runtime.Shell.run`; ``limit`` where the session has too many
        """
        ...

    async def type(self, terminal_id: str, text: str, keys: tuple[str, ...]) -> Typed:
        """Type ``text``, and then press ``keys``.

        :raises ToolError: ``invalid_input`` for a line that the terminal would cut; ``conflict`` where it is not what this
            call was judged for
        """
        ...

    async def resize(self, terminal_id: str, columns: int, rows: int) -> None: ...

    async def is_open(self, terminal_id: str) -> bool: ...

    async def was_open(self, terminal_id: str) -> bool:
        """Whether it is, or has been."""
        ...

    async def changes(self) -> int:
        """How often a terminal of the session was opened, has shown something, or has ended."""
        ...

    async def changed(self, since: int, timeout_s: float) -> bool:
        """Wait until there was a change after the first ``since``. False: there was none in time."""
        ...

    async def read_up_to(self, terminal_id: str, cursor: int | None = None) -> int:
        """Where in its output the last look has ended; ``cursor``: that it ends there now."""
        ...
