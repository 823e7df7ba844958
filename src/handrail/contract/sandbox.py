"""The Protocol between code that starts a process and the provider that confines it.

A provider receives the *call set* and a *profile*, and must refuse everything that it cannot enforce. No flag asks for
less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from handrail.contract.tool.requires import CapabilitySet

SHELL_ARGV = ("/bin/bash", "--noprofile", "--norc", "-c", "--")
"""What a shell text is started with, as the last argument. ``--``: a text that begins with a dash is a command, as it
was judged, and no option of the shell. A provider may have such a shell ready before the text is known."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the processes of one sandbox may use up. None: no bound of its own."""

    cpu_s: int | None = 3600
    """Processor seconds of each process."""
    memory_bytes: int | None = 8 * 1024 * 1024 * 1024
    """Private memory of each process."""
    call_memory_bytes: int | None = 16 * 1024 * 1024 * 1024
    """Memory of all processes of the sandbox together, what they share counted once."""
    processes: int | None = 2048
    """Processes and threads of the sandbox together."""
    file_bytes: int | None = 16 * 1024 * 1024 * 1024
    """The longest file that a process may write."""
    open_files: int | None = 4096
    tmp_bytes: int = 256 * 1024 * 1024
    """The private ``/tmp``."""
    shm_bytes: int = 64 * 1024 * 1024
    """The private ``/dev/shm``."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A host that a program in a sandbox wanted to reach, as it was decided.

    :param host: in canonical form, an IPv6 address in brackets
    :param method: ``CONNECT`` for a tunnel, else the request's own
    :param refused: why it was not let through; None where it was
    """

    host: str
    port: int
    method: str
    refused: str | None = None


class Denials(Protocol):
    """What the rules of a session keep from programs, whichever call started them."""

    @property
    def key(self) -> Hashable:
        """Equal for equal answers."""
        ...

    def hides(self, path: str, /) -> bool:
        """Whether an absolute, canonical path is not to be read."""
        ...

    @property
    def fixes_any(self) -> bool:
        """Whether there is any that :meth:`fixes` says yes to."""
        ...

    def fixes(self, path: str, /) -> bool:
        """Whether it is not to be written."""
        ...

    def opens(self, path: str, /) -> bool:
        """Whether a rule names a path that is asked about always, and allows programs to write it."""
        ...


@dataclass(frozen=True, slots=True)
class Profile:
    """The folders and bounds of one sandbox, beside its capability set.

    Paths are absolute and canonical. The workspace, ``writable`` and ``further`` (to be read only) are mounted where
    the capability set also reaches; ``readable`` extras such as a tool's own folder are mounted as they are. Without
    ``workspace_writable`` nothing is writable but ``scratch``, which is HOME. ``hidden`` paths are masked, and so are
    ``masked`` files, which rules keep from being read. ``pinned`` paths inside what is writable are read-only and stay
    where they are. ``secrets`` are handed over by a descriptor, never in the environment. ``gate`` judges each host
    (and port) that the program wants to reach, on top of the set's hosts; it gives the reason of a refusal, or None.
    ``on_attempt`` is told of each such host when it is decided. From ``denials`` a guard finds what is to be masked and
    pinned; to ``quarantine`` it moves what a program made under a protected name.
    """

    workspace: str
    scratch: str
    workspace_writable: bool = True
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    cwd: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    limits: Limits = field(default_factory=Limits)
    masked: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    gate: Callable[[str, int], str | None] | None = None
    on_attempt: Callable[[Attempt], None] | None = None
    denials: Denials | None = None
    shows: Callable[[str], bool] | None = None
    """Says which of the paths that ``denials`` hide this very call may read all the same."""
    quarantine: str = ""
    tool: str = ""
    """The id of the tool whose program it is; empty for the kernel's own."""
    call: str = ""
    """The id of the job or call that it runs for, to name it in answers; empty where there is none."""
    callers: tuple[str, ...] = ()
    """The ids of the call and its job, and of the calls and jobs that made it: their programs do not wait for each other."""
    unix_sockets: bool = False
    """Whether programs may make Unix sockets, and so reach every server that listens in a folder they see."""


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """In characters."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be started.

    :param descriptors: number in the child to number here, inherited besides 0, 1 and 2
    :param merge_stderr: whether what it writes to stderr comes with its stdout
    :param terminal: where set, its controlling terminal, which is all of 0, 1 and 2, is a new one of this size; its
        process is a :class:`TerminalProcess`
    """

    argv: Sequence[str]
    descriptors: Mapping[int, int] = field(default_factory=dict[int, int])
    merge_stderr: bool = False
    terminal: TerminalSize | None = None


class Process(Protocol):
    """A confined process. Ending it ends everything it started."""

    @property
    def pid(self) -> int: ...

    async def write(self, data: bytes) -> None:
        """To its stdin; quietly does nothing once the process has closed it."""
        ...

    async def close_stdin(self) -> None: ...

    async def read_line(self, max_bytes: int) -> bytes:
        """One line of stdout with its newline; ``b""`` at the end.

        :raises ToolError: ``limit`` when a line is longer than ``max_bytes``
        """
        ...

    async def read(self, max_bytes: int) -> bytes:
        """At most ``max_bytes`` of stdout as soon as there are any; ``b""`` at the end."""
        ...

    async def communicate(
        self, stdin: bytes, max_bytes: int, on_output: Callable[[bytes], None] | None = None
    ) -> tuple[bytes, bytes, int]:
        """Feed stdin, wait for the *exit* (not for the pipes to close), then drain what is there.

        :param on_output: told each kept piece of stdout as it comes, and that there is more, where it is not kept
        :return: stdout, stderr (each cut at ``max_bytes``, then drained and counted), and the number of bytes dropped
        """
        ...

    async def wait(self) -> int:
        """The exit code; below 0 for the signal that ended it."""
        ...

    async def kill(self) -> None:
        """End it and all it started, and return when none of them is left."""
        ...


class TerminalProcess(Process, Protocol):
    """A confined process with a terminal, of which only the holder has the other end: what is written is typed."""

    def resize(self, size: TerminalSize) -> None:
        """Give the terminal another size; its foreground programs are told. Quietly does nothing once it has ended."""
        ...

    def reads_lines(self) -> bool:
        """Whether its program is given whole lines as of now, by the system; it takes no line that is too long for that."""
        ...

    def at_prompt(self) -> bool:
        """Whether its first program, and none that this has started, edits a line there now, and has read all before it.
        False also where that cannot be told."""
        ...

    def folders(self) -> tuple[str, ...]:
        """The folders that its first program and the one in the foreground are in, as far as that can be told."""
        ...

    def give_up(self) -> int:
        """Have what is being written, and nobody has taken, not written any more. Gives how many bytes that are."""
        ...

    def rest(self, max_bytes: int) -> bytes:
        """What was shown and nobody has read, once it has ended."""
        ...

    def hang_up(self) -> None:
        """Take the terminal away, as if its line were cut (SIGHUP). Nothing is read or written any more."""
        ...


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One thing that confinement is made of, as it was found when it was tried.

    :param held: None where nobody tried, because what it stands on failed
    """

    name: str
    held: bool | None
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Tier:
    """What this machine can enforce. ``name`` says what confines; with ``none`` nothing is started."""

    name: str
    detail: str
    remedy: str = ""
    mechanisms: tuple[Mechanism, ...] = ()
    """Each in the order of the layers."""
    unconfined: frozenset[str] = frozenset()
    """Tools whose programs run without any of it, by their operator's word."""

    @property
    def confines(self) -> bool:
        return self.name != "none"

    @property
    def opens_hosts(self) -> bool:
        """Whether a sandbox's network can be opened to single hosts."""
        return any(one.name == "hosts" and one.held is True for one in self.mechanisms)


class Sandbox(Protocol):
    @property
    def tier(self) -> Tier: ...

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        """Start ``program`` confined.

        :raises ToolError: ``unavailable`` when the tier cannot enforce the set, with the reason and the remedy
        """
        ...


@dataclass(frozen=True, slots=True)
class Completed:
    """A process that has ended. ``output`` is stdout and stderr as they came, at most 64 MiB; ``dropped`` counts what came after.

    ``signal`` is the number of the signal that ended it, or None. ``limit`` names the bound of the sandbox that it hit, as
    far as its end or its last output shows. ``notes`` explain why files that its output names could not be read or
    written, when the sandbox kept them from it. ``errors`` is stderr, when it was asked for apart.
    """

    exit_code: int
    output: bytes
    dropped: int = 0
    signal: int | None = None
    limit: str | None = None
    notes: tuple[str, ...] = ()
    errors: bytes = b""
