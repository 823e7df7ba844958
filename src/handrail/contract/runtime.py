"""The typed surface a tool sees: the only way from ``execute`` to the world.

Every door here is a Protocol; the implementations live in the ``runtime`` room and above. A door that the
tool did not require raises :class:`~handrail.contract.errors.ToolError` of kind ``denied`` when it is
touched, with the line to add to ``requires``. All paths that a tool passes are workspace-relative or
absolute text as the model wrote it; all that come back are the form to show (relative inside the workspace).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from handrail.contract.arrivals import Channels, Triggers
from handrail.contract.delegation import Agents
from handrail.contract.doors import Catalog, Jobs
from handrail.contract.offering import Offers
from handrail.contract.opened import Opened
from handrail.contract.peer import LogLevel, PeerDoor
from handrail.contract.requires import CapabilitySet
from handrail.contract.result import Result
from handrail.contract.skills import Skills
from handrail.contract.terminals import Terminals
from handrail.contract.transcript import Transcript

FileKind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class FileStat:
    path: str
    kind: FileKind
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A range of a file: ``data`` is ``[start, start + len(data))`` of ``size`` bytes."""

    path: str
    data: bytes
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class FileLines:
    """Whole lines ``first … last`` (1-based) without their ends; ``next`` is where to go on, or None at the end.

    ``total`` is the number of lines, or None where the end was not reached. ``cut`` lists the line numbers
    that were longer than the limit for one line and were shortened.
    """

    path: str
    lines: tuple[str, ...]
    first: int
    next: int | None
    total: int | None
    size: int
    cut: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1


@dataclass(frozen=True, slots=True)
class Written:
    path: str
    created: bool
    size: int
    sha256: str
    before: bytes | None
    """What was there, for a diff; None if nothing was."""


class Files(Protocol):
    """Files beneath the roots, resolved by the operating system so that no link or race leaves them.

    Reading a whole or part of a file remembers the hash of its content for the session; writing over an
    existing file demands that this hash is still true (kind ``conflict`` otherwise, also if never read).
    """

    async def stat(self, path: str) -> FileStat: ...

    async def read_bytes(self, path: str, *, start: int = 0, max_bytes: int | None = None) -> FileBytes:
        """``start`` below 0 counts from the end."""
        ...

    async def read_lines(
        self, path: str, *, first: int = 1, count: int | None = None, max_bytes: int = 200_000, max_line: int = 2_000
    ) -> FileLines:
        """``first`` below 0 counts lines from the end (-1 is the last). Invalid UTF-8 is shown as U+FFFD."""
        ...

    async def list(self, path: str) -> Sequence[FileStat]: ...

    async def read_for_edit(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The whole content, checked against what this session has read.

        :raises ToolError: ``conflict`` if never read or changed since; ``limit`` if larger
        """
        ...

    async def write(self, path: str, data: bytes, *, over: bytes | Literal["new", "seen"] = "seen") -> Written:
        """Replace atomically, creating parent folders.

        :param over: what must be there now: these exact bytes, ``"new"`` (nothing), or ``"seen"``
            (nothing, or what this session has read)
        :raises ToolError: ``conflict`` when something else is there
        """
        ...


@dataclass(frozen=True, slots=True)
class Match:
    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """Search results, at most as many as asked for; ``more`` if the search was stopped there."""

    matches: tuple[Match, ...] = ()
    paths: tuple[str, ...] = ()
    more: bool = False
    skipped: int = 0
    """Paths left out because a rule denies the file. Matches left out are not counted: how many there are for one
    pattern and another would tell what is in the file."""


class Search(Protocol):
    """ripgrep beneath the roots: honours ignore files, follows no links, is bounded, harmless on hostile patterns."""

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        max_matches: int = 10_000,
    ) -> Found: ...

    async def glob(self, pattern: str, path: str = ".", *, hidden: bool = False, max_paths: int = 100_000) -> Found: ...


@dataclass(frozen=True, slots=True)
class Completed:
    """A process that has ended. ``output`` is stdout and stderr as they came, at most 64 MiB; ``dropped`` counts what came after.

    ``signal`` is the number that ended it, or None. ``limit`` says which bound of the sandbox it came upon, as far as
    its end or its last words show; ``notes`` why files that it speaks of could not be read or written, where the
    sandbox kept them from it. ``errors`` is stderr where it was asked for apart.
    """

    exit_code: int
    output: bytes
    dropped: int = 0
    signal: int | None = None
    limit: str | None = None
    notes: tuple[str, ...] = ()
    errors: bytes = b""


class Shell(Protocol):
    """Programs in the sandbox of this call's capability set; nothing they start outlives the call."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        on_output: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run a shell text, or an argv without a shell. The call's own time-out ends it, and so does cancelling this.

        :param environment: further variables of the program, for an argv only: rules judge a text by its words, so it has
            to bring what it means with it. They are the tool's own choice, never a name that a model gave; those that
            decide where programs and libraries are found, where HOME is and how the network is reached stay as they are
        :param apart: keep stderr out of ``output``, for what is read by its form
        :param on_output: told each kept piece of output as it comes, so that a stopped run leaves what it wrote
        """
        ...

    async def hidden(self, paths: Sequence[str]) -> Sequence[str]:
        """Those of ``paths`` that programs of this call do not see, since rules keep them from being read; by name, so
        also of what is there no more."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered, whatever its status.

    :param url: of the last hop, in canonical form
    :param headers: in order, names in lower case
    :param body: decoded (gzip, deflate), at most as many bytes as were asked for
    :param more: whether there was more of it
    :param passed: the URLs of the hops before the last
    """

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    more: bool = False
    passed: tuple[str, ...] = ()

    def header(self, name: str) -> str | None:
        """The first value of a header, by its name in any case."""
        return next((value for key, value in self.headers if key == name.lower()), None)


class Net(Protocol):
    """Fetches over http and https from the hosts that the call may reach.

    Every hop is judged by the call's capability set and the rules, where ask counts as deny, and so is every address that
    its host leads to. An address that is not public is reached only by a literal grant.
    """

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        max_bytes: int = 16 * 1024 * 1024,
        timeout_ms: int = 30_000,
        max_redirects: int = 5,
        on_body: Callable[[bytes], None] | None = None,
    ) -> Response:
        """Fetch one URL.

        Redirects are followed, each as a new request; to another origin only the plainest headers go with it and no
        body, so a redirect that would take one there is answered as it is.

        :param max_bytes: of the decoded body; what comes after is not read
        :param timeout_ms: for all hops together
        :param on_body: told each kept piece of the last hop's body as it comes
        :raises ToolError: ``denied`` where a host may not be reached; ``invalid_input`` for a URL or header that is none;
            ``timeout``; ``limit`` for too many redirects; ``backend`` where a server cannot be reached or understood
        """
        ...


class State(Protocol):
    """A tool's own values in the session, JSON-able, kept across restarts."""

    async def get(self, key: str) -> Any: ...

    async def put(self, key: str, value: Any) -> None: ...


class Secrets(Protocol):
    """The secrets that the tool declared, by name. A value that it returns, tells or writes into the log is redacted."""

    def get(self, name: str) -> str:
        """:raises ToolError: ``denied`` unless the tool declared the secret, ``unavailable`` where nobody gave it"""
        ...


@dataclass(frozen=True, slots=True)
class Option:
    label: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    question: str
    header: str = ""
    options: tuple[Option, ...] = ()
    multi_select: bool = False


class People(Protocol):
    """Whoever sits at the face."""

    async def answer(self, questions: Sequence[Question]) -> list[list[str]]:
        """One list of answers per question.

        :raises ToolError: ``unavailable`` when nobody is attached to the session
        """
        ...


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What the face knows of the person's surroundings; every field may be unknown."""

    time: str | None = None
    place: str | None = None
    locale: str | None = None
    device: str | None = None


class Cancellation(Protocol):
    @property
    def requested(self) -> bool: ...

    def check(self) -> None:
        """:raises ToolError: ``cancelled`` or ``timeout``, for code that runs in a thread."""
        ...


class Runtime(Protocol):
    """What ``execute`` is handed. Attributes that cost something are made when first touched."""

    @property
    def tool_id(self) -> str: ...
    @property
    def call_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def agent(self) -> str: ...
    @property
    def topic(self) -> str | None: ...
    @property
    def client(self) -> ClientContext | None: ...
    @property
    def workdir(self) -> str:
        """The workspace's canonical folder, absolute."""
        ...

    @property
    def capabilities(self) -> CapabilitySet: ...
    @property
    def config(self) -> Mapping[str, str]: ...
    @property
    def files(self) -> Files: ...
    @property
    def search(self) -> Search: ...
    @property
    def shell(self) -> Shell: ...
    @property
    def net(self) -> Net: ...
    @property
    def secrets(self) -> Secrets: ...
    @property
    def state(self) -> State: ...
    @property
    def people(self) -> People: ...
    @property
    def channels(self) -> Channels: ...
    @property
    def triggers(self) -> Triggers: ...
    @property
    def transcript(self) -> Transcript: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def jobs(self) -> Jobs:
        """The jobs of this session."""
        ...

    @property
    def agents(self) -> Agents:
        """Sub-agents that work can be handed to."""
        ...

    @property
    def skills(self) -> Skills:
        """The session's skills."""
        ...

    @property
    def cancellation(self) -> Cancellation: ...

    @property
    def peer(self) -> PeerDoor:
        """The client at the face, where that can do more than call. What is asked of it needs a capability each."""
        ...

    @property
    def terminals(self) -> Terminals:
        """Programs of the session that are typed to."""
        ...

    @property
    def offers(self) -> Offers:
        """What sources have beside tools."""
        ...

    @property
    def opened(self) -> Opened:
        """What this call goes on with; only for the built-in tools that do."""
        ...

    def progress(
        self,
        message: str = "",
        *,
        fraction: float | None = None,
        done: float | None = None,
        total: float | None = None,
    ) -> None:
        """Tell the face how far it is: ``fraction`` from 0 to 1, or ``done`` of a ``total``, where known. Safe from any
        thread, never blocks."""
        ...

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        """Tell whoever watches the call something, JSON-able, beside what it gives. Safe from any thread, never blocks.

        :param logger: which part of the tool says it
        :raises ToolError: ``invalid_input`` for a level that there is not
        """
        ...

    def output(self, piece: str | bytes) -> None:
        """Show a piece of what it gives, as it comes: to whoever watches the call, and where that is a job to whoever
        reads the job. It is text; bytes are read as UTF-8, also where a character is cut in two. What the call gives is
        what ``execute`` returns all the same. Safe from any thread, never blocks."""
        ...

    def partial(self, data: Any) -> None:
        """Keep ``data`` as what to show should the call be stopped before it returns; the last one counts."""
        ...

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        """Call another tool through the arbiter, under the locks this call holds."""
        ...
