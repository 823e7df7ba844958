"""The services by which tools reach background jobs, terminals and the tool catalog.

Only the Protocols and their values are here, so that tools, the arbiter and the implementations agree on them. A runtime
has such a service if its kernel was built with an implementation. Otherwise no tool can require its capability.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

if TYPE_CHECKING:
    from handrail.contract.sandbox_protocol import CompletedProcess


JobState = Literal["pending", "running", "done", "failed", "cancelled", "interrupted"]
"""``pending``: the job waits for its locks, or for its session to be opened again. The last four states are final;
``interrupted`` means that the outcome is unknown."""
FINAL_JOB_STATES = frozenset[JobState]({"done", "failed", "cancelled", "interrupted"})


class Job(Struct, frozen=True):
    """A background job: a call that outlives its turn. Times are wall-clock nanoseconds.

    :param summary: the arguments as one short line for people
    :param attempt: 1, and one more for each new run after a restart
    :param output_bytes: how much of the output can be read
    :param is_suspended: the job has not ended, and no process runs it: it continues when its session is opened again
    """

    id: str
    tool_id: str
    call_id: str
    session_id: str
    state: JobState
    created_ns: int
    ended_ns: int | None = None
    summary: str = ""
    attempt: int = 1
    output_bytes: int = 0
    is_suspended: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in FINAL_JOB_STATES


class JobOutputChunk(Struct, frozen=True):
    """A piece of a job's output.

    :param cursor: the position in bytes at which to continue reading
    :param has_more: whether there is more to read, or the output may still grow
    :param first_line: if lines were requested, the number of the first one, from 0
    :param skipped_bytes: requested bytes before ``text`` that are no longer kept
    """

    text: str
    cursor: int
    has_more: bool
    first_line: int | None = None
    skipped_bytes: int = 0


class JobService(Protocol):
    """The jobs of one session or of a whole workspace.

    For a job that does not exist, or belongs to another session, the methods raise
    :class:`~handrail.contract.errors.ToolError` of kind ``invalid_input``, which names the existing jobs.
    """

    async def list(self) -> Sequence[Job]:
        """Return all jobs that are kept, the oldest first."""
        ...

    async def get(self, job_id: str) -> Job:
        """Return one job."""
        ...

    async def read_output_bytes(self, job_id: str, *, cursor: int = 0, max_bytes: int = 65_536) -> JobOutputChunk:
        """Read the output of a job from a position in bytes."""
        ...

    async def read_line_range(self, job_id: str, *, offset: int = 0, count: int = 200) -> JobOutputChunk:
        """Read ``count`` lines of a job's output from line ``offset``. A negative offset counts from the end."""
        ...

    async def wait(self, job_id: str, *, timeout_ms: int) -> Result | None:
        """Wait for a job and return its result as a model may see it; None if the time expires first.

        A wait never stops the job.
        """
        ...

    async def stop(self, job_id: str) -> Job:
        """Stop a job, wait until it has ended, within the grace period, and return its new state.

        A job that ended before is unchanged.
        """
        ...


class BackgroundableCall(Struct, frozen=True):
    """A running call that could move to the background.

    :param summary: the arguments as one short line for people
    """

    call_id: str
    session_id: str
    tool_id: str
    summary: str
    elapsed_ms: int


class WorkspaceJobService(JobService, Protocol):
    """The jobs of a whole workspace, and the running calls that could become jobs."""

    async def list_running_calls(self) -> Sequence[BackgroundableCall]:
        """Return the calls of all sessions and processes that can move to the background now."""
        ...

    async def move_to_background(self, call_id: str) -> Job:
        """Move a call to the background; see :meth:`handrail.contract.session_protocols.Session.move_to_background`.

        :raises ToolError: as that does; ``invalid_input`` names the calls that can be moved
        """
        ...


UNLISTED_PREFIX = "mcp:"
"""A prefix that no category's name has."""


class ToolCategory(Struct, frozen=True):
    """A group of tools under one name.

    A name that begins with :data:`UNLISTED_PREFIX` is a source that has not listed its tools yet.

    :param tool_count: how many of its tools can be called now and are not core tools
    """

    name: str
    description: str
    tool_count: int


class ToolLoadResult(Struct, frozen=True):
    """The result of loading a category or a tool.

    :param name: the category's name, or the tool's id
    :param tools: the ids of all its tools that can be called
    :param added: those that were not active before, in order
    :param is_core: whether it is a core tool, which is always active
    :param unloaded: tools that were unloaded to make room: searches had loaded them, and no call used them
    """

    name: str
    kind: Literal["category", "tool"]
    tools: tuple[str, ...]
    added: tuple[str, ...]
    is_core: bool = False
    unloaded: tuple[str, ...] = ()


class ToolMatch(Struct, frozen=True):
    """A tool that matches a query.

    :param relevance: the match in comparison with the other hits, from 0 to 1
    :param confidence: the probability that the tool serves the query, regardless of the other hits, from 0 to 1
    :param is_weak: whether the match is doubtful
    :param is_below_threshold: whether the match is too weak, alone or in comparison, for a search to load the tool
    :param reason: why the tool matched, for people
    :param source: the third-party source that wrote the description; ``""`` for the operator's own
    """

    tool_id: str
    description: str
    relevance: float
    confidence: float = 1.0
    is_weak: bool = False
    reason: str = ""
    source: str = ""
    is_below_threshold: bool = False


class ToolSearchResult(Struct, frozen=True):
    """The result of a tool search.

    :param matches: the best first
    :param no_match: whether no tool serves the query; ``matches`` may still have the nearest ones
    :param search_method: what was compared, in an operator's words: words only, or words and meaning
    :param query_problem: if nothing matches: why the query may not have been understood, and what to do; else empty
    :param unloaded: tools that were unloaded to make room for the new ones
    """

    matches: tuple[ToolMatch, ...]
    no_match: bool = False
    search_method: str = ""
    query_problem: str = ""
    unloaded: tuple[str, ...] = ()


class ToolDocumentation(Struct, frozen=True):
    """The documentation of one tool: everything that a model may read about it before a call.

    Of the tool's runtime view it has only the category, documentation and guidance.

    :param name: the name under which a model calls it
    :param source: the third-party source that wrote these texts; ``""`` for the operator's own
    """

    id: str
    name: str
    category: str
    description: str
    parameters: Mapping[str, Any]
    documentation: str
    guidance: str
    example: Mapping[str, Any] | None = None
    """Minimal arguments that match the parameters; None if none could be generated."""
    source: str = ""


class CatalogService(Protocol):
    """The registry as the model of one interaction sees it.

    Loaded tools are visible from the next turn. Loading gives no permission, and a tool that is not loaded can still
    be called.
    """

    async def list_active(self) -> Sequence[str]:
        """Return the ids of the active tools: the core tools and the loaded ones, in a stable order."""
        ...

    async def list_categories(self) -> Sequence[ToolCategory]:
        """Return the categories with tools that can be called and are not core tools.

        Then follow the built-in categories without tools, and the sources that have not listed their tools yet.
        """
        ...

    async def load(self, name: str, *, kind: Literal["category", "tool"] | None = None) -> ToolLoadResult:
        """Load a category, or one tool by its id. Loading twice has no further effect.

        :param kind: what the name names; None for a category, or a tool if no category has the name
        :raises ToolError: ``invalid_input`` for an unknown name, with the known ones; ``unavailable`` for a tool that
            is not available
        """
        ...

    async def search_and_load(self, query: str, *, limit: int = 5, extensions_only: bool = False) -> ToolSearchResult:
        """Search all tools that can be called and load the best matches.

        Matches of the tail are left out.

        :param extensions_only: leave out built-in tools
        :raises ToolError: ``invalid_input`` for a query without any words
        """
        ...

    async def read_documentation(self, tool: str) -> ToolDocumentation:
        """Return the documentation of a tool, by its id, alias or wire name.

        From now on it counts as read in this session.

        :raises ToolError: ``unknown_tool`` with the nearest names
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
"""The characters that each key sends, as on terminals of the VT100 family."""
_KEY_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "return": "enter",
        "cr": "enter",
        "esc": "escape",
        "bspace": "backspace",
        "bs": "backspace",
        "dc": "delete",
        "del": "delete",
        "ic": "insert",
        "ins": "insert",
        "spc": "space",
        "npage": "page-down",
        "ppage": "page-up",
        "pgdn": "page-down",
        "pgup": "page-up",
        "pagedown": "page-down",
        "pageup": "page-up",
        **{f"arrow{one}": one for one in ("up", "down", "left", "right")},
        "ctrl-\\": "ctrl-backslash",
        "ctrl-[": "escape",
    }
)
"""Names of tmux and of other tools, in lower case, with ours."""
_CTRL = compile_regex_lazily(r"(?:c-|\^|ctrl\+|control[-+])(?=.)")


def parse_key_names(text: str) -> tuple[str, ...]:
    """Return the names of :data:`KEYS` for names separated by spaces, also in the spelling of tmux (``C-c``, ``Enter``, ``BSpace``).

    :raises ToolError: ``invalid_input`` for an unknown name
    """
    found: list[str] = []
    for name in text.split():
        low = _CTRL.sub("ctrl-", name.lower(), count=1)
        low = _KEY_ALIASES.get(low, low)
        if low not in KEYS:
            near = " or ".join(f"`{one}`" for one in nearest_names(low, KEYS, 2))
            raise ToolError(
                f"The key {quote_text_or_length(name, 40)} is unknown. {f'Did you mean {near}?' if near else ''} Keys are enter, tab, space, "
                "escape, backspace, delete, insert, up, down, left, right, home, end, page-up, page-down, ctrl-a to ctrl-z and "
                "ctrl-backslash, or C-c and the other names of tmux. Type other text with `text`.".replace("  ", " "),
                kind="invalid_input",
            )
        found.append(low)
    if len(found) > MAX_KEYS:
        raise ToolError(
            f"`keys` has {len(found)} keys. The limit is {MAX_KEYS}. Send the rest in another call.",
            kind="invalid_input",
        )
    return tuple(found)


MAX_KEYS = 64
TERMINAL_START_ID = "terminal.start"
"""The tool that opens a terminal."""
DEFAULT_COMMAND = "bash --noprofile --norc"
"""The command of a terminal if none is given."""


class TypedInputResult(Struct, frozen=True):
    """The result of typing into a terminal.

    :param sent_bytes: bytes that the terminal has accepted
    :param unsent_bytes: bytes that it did not accept in time; they are discarded
    """

    sent_bytes: int
    unsent_bytes: int = 0


class TerminalService(Protocol):
    """The terminals of one session, each by the id of its job.

    The methods raise :class:`~handrail.contract.errors.ToolError` for a terminal that has ended or does not exist.
    """

    async def run(self, command: str, *, cwd: str | None = None, columns: int, rows: int) -> CompletedProcess:
        """Run a shell text in a new terminal, which is the job of this call, until it ends.

        The text on the screen is the output of the job.

        :raises ToolError: as :meth:`handrail.contract.services.tool_runtime.ShellService.run`; ``limit`` if the session has too many
            terminals
        """
        ...

    async def type_input(self, terminal_id: str, text: str, keys: tuple[str, ...]) -> TypedInputResult:
        """Type ``text`` and then press ``keys``.

        :raises ToolError: ``invalid_input`` for a line that the terminal would cut; ``conflict`` if the terminal
            differs from the one that the call was evaluated for
        """
        ...

    async def resize(self, terminal_id: str, columns: int, rows: int) -> None:
        """Change the size of a terminal."""

    async def is_open(self, terminal_id: str) -> bool:
        """Return whether the terminal is open."""
        ...

    async def has_existed(self, terminal_id: str) -> bool:
        """Return whether the terminal is open or was open before."""
        ...

    async def change_count(self) -> int:
        """Return a counter that grows when a terminal of the session opens, shows output or ends."""
        ...

    async def wait_for_change(self, since: int, timeout_s: float) -> bool:
        """Wait until the counter of :meth:`change_count` is above ``since``; return False if the time expires first."""
        ...

    async def explain_failures(self, terminal_id: str, text: str) -> Sequence[str]:
        """Return notes on failures in ``text``, the output of an open terminal, that its sandbox can have caused."""
        ...

    async def track_read_position(self, terminal_id: str, cursor: int | None = None) -> int:
        """Return the position in the output at which the last look ended.

        :param cursor: set that position
        """
        ...
