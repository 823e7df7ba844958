"""The Protocol between code that starts a process and the provider that confines it.

A provider receives the *call set* and a *profile*, and must refuse everything that it cannot enforce. No flag asks
for less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Protocol

from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings
from handrail.contract.struct import Struct, field
from handrail.contract.tool.requires import CapabilitySet

SHELL_ARGV = ("/bin/bash", "--noprofile", "--norc", "-c", "--")
"""The argv for a shell text, which follows as the last argument. After ``--`` a text that begins with a dash is a
command, as the rules evaluated it, and not an option of the shell. A provider may start such a shell before the
text is known."""


class SandboxLimits(Struct, frozen=True):
    """The resources that the processes of one sandbox may use. None means no limit."""

    cpu_s: int | None = 3600
    """Processor seconds of each process."""
    memory_bytes: int | None = 8 * 1024 * 1024 * 1024
    """Private memory of each process."""
    call_memory_bytes: int | None = 16 * 1024 * 1024 * 1024
    """Memory of all processes of the sandbox together; shared memory counts once."""
    processes: int | None = 2048
    """Processes and threads of the sandbox together."""
    file_bytes: int | None = 16 * 1024 * 1024 * 1024
    """The largest file that a process may write."""
    open_files: int | None = 4096
    tmp_bytes: int = 256 * 1024 * 1024
    """The size of the private ``/tmp``."""
    shm_bytes: int = 64 * 1024 * 1024
    """The size of the private ``/dev/shm``."""

    def restrict_to(self, other: SandboxLimits) -> SandboxLimits:
        """Return these limits, or those of ``other`` where they are lower than both these and the defaults."""
        standard = SandboxLimits()
        lower: dict[str, int] = {}
        for one in fields(self):
            own, wanted, usual = (getattr(limits, one.name) for limits in (self, other, standard))
            if wanted is not None and wanted < usual and (own is None or wanted < own):
                lower[one.name] = wanted
        return replace(self, **lower)


class ConnectionAttempt(Struct, frozen=True):
    """An attempt of a sandboxed program to reach a host, with the decision.

    :param host: in canonical form, an IPv6 address in brackets
    :param method: ``CONNECT`` for a tunnel, else the request's own
    :param refusal_reason: why it was refused, or None
    """

    host: str
    port: int
    method: str
    refusal_reason: str | None = None


class PathDenials(Protocol):
    """The paths that the rules of a session deny to programs, for any call."""

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal answers."""
        ...

    @property
    def read_denials_cache_key(self) -> Hashable:
        """A key that is equal for equal answers about reading below the workspace."""
        ...

    def is_hidden(self, path: str, /) -> bool:
        """Return whether programs may not read an absolute, canonical path."""
        ...

    @property
    def has_read_only(self) -> bool:
        """Whether there is any path that programs may read but not write."""
        ...

    def is_read_only(self, path: str, /) -> bool:
        """Return whether programs may not write a path."""
        ...

    def is_protected_write_allowed(self, path: str, /) -> bool:
        """Return whether a rule names a protected path and allows programs to write it."""
        ...


class CallConfinement(Struct, frozen=True):
    """The narrow sandbox of a call that a rule with ``{confined}`` allows: no network, writes in the workspace only.

    :param changes_repository: whether the text of the call has a command that changes version control data, and none
        that runs other code. Otherwise that data is read-only, so that no program can destroy the history
    """

    changes_repository: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SandboxProfile:
    """The folders and limits of one sandbox, in addition to its capability set.

    Paths are absolute and canonical. The workspace, ``writable`` and ``read_only_roots`` are mounted where the
    capability set also reaches; ``readable`` extras such as a tool's own folder are always mounted. Without
    ``workspace_writable`` only ``scratch``, which is HOME, is writable. ``hidden`` paths are masked, and so are
    ``masked`` files, which rules deny. ``pinned`` paths inside writable folders are read-only and cannot be moved.
    ``secrets`` go through a file descriptor, never the environment. ``check_host`` evaluates each host and port that the
    program wants to reach, in addition to the set's hosts; it returns the reason of a refusal, or None.
    ``request_host`` does the same, and may ask the user first. ``on_attempt`` receives each attempt with its decision. A guard derives the masked and pinned paths from
    ``denials``; it moves files that a program made under a protected name to ``quarantine``.
    """

    workspace: str
    scratch: str
    workspace_writable: bool = True
    readable: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """The folders in ``readable`` with outputs that Handrail saved. Root gives them to the user that programs run as."""
    writable: tuple[str, ...] = ()
    read_only_roots: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    cwd: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)
    masked: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    """Folders of which a program sees exactly the entries that they list now, each by this name. It makes no entry in them."""
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)
    check_host: Callable[[str, int], str | None] | None = None
    request_host: Callable[[str, int], Awaitable[str | None]] | None = None
    on_attempt: Callable[[ConnectionAttempt], None] | None = None
    route: OutboundConnectionSettings = DIRECT_ROUTE
    """The way from the sandbox's proxy to the hosts."""
    denials: PathDenials | None = None
    may_read: Callable[[str], bool] | None = None
    """Return whether this call may read a path that ``denials`` hide from programs."""
    quarantine: str = ""
    tool: str = ""
    """The id of the tool whose program it is; empty for the kernel's own programs."""
    call: str = ""
    """The id of the job or call that it runs for, for texts; empty if there is none."""
    callers: tuple[str, ...] = ()
    """The ids of the call, its job, and the calls and jobs above it. Their programs do not wait for each other."""
    network: str = ""
    """The name of the loopback that it shares with all sandboxes of the same name and HOME; empty for its own."""
    serves: bool = False
    """Whether the program is a server that outlives calls. It may listen on its own loopback, and has a proxy even if it may
    reach no host, so that its attempts are seen."""
    tcp: tuple[str, ...] = ()
    """Addresses that the program can reach without HTTP, each at the same port of its loopback. The capability set must
    name them."""
    unix_sockets: bool = False
    """Whether programs may create Unix sockets, and so reach every server that listens in a folder they see."""
    confined: bool = False
    """Whether the call runs under a rule with ``{confined}``: without Unix sockets, whatever the operator set."""
    on_file_needed: Callable[[], None] | None = None
    """Called if a tool waits for a file that the running program has mounted over; the program then ends soon. None for a
    program that does not end for that."""
    repositories_read_only: bool = False
    """Whether version control data is read-only. A guard finds the folders."""


class TerminalSize(Struct, frozen=True):
    """The size of a terminal in characters."""

    columns: int
    rows: int


class ProgramSpec(Struct, frozen=True):
    """A program to start.

    :param descriptors: number in the child to number here, inherited besides 0, 1 and 2
    :param merge_stderr: whether stderr goes to stdout
    :param terminal: if set, 0, 1 and 2 are a new controlling terminal of this size, and the process is a
        :class:`TerminalProcess`
    """

    argv: Sequence[str]
    descriptors: Mapping[int, int] = field(default_factory=dict[int, int])
    merge_stderr: bool = False
    terminal: TerminalSize | None = None


class Process(Protocol):
    """A sandboxed process. Its end also ends everything that it started."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to stdin. Does nothing after the process has closed it."""

    async def close_stdin(self) -> None:
        """Close stdin."""

    async def read_line(self, max_bytes: int) -> bytes:
        """Read one line of stdout with its newline; ``b""`` at the end.

        :raises ToolError: ``limit`` for a line longer than ``max_bytes``
        """
        ...

    async def read(self, max_bytes: int) -> bytes:
        """Wait for output and return at most ``max_bytes`` of stdout; ``b""`` at the end."""
        ...

    async def communicate(
        self, stdin: bytes, max_bytes: int, on_output: Callable[[bytes], None] | None = None
    ) -> tuple[bytes, bytes, int]:
        """Write stdin, wait for the *exit* (not for closed pipes), and read the remaining output.

        :param on_output: called with each piece of stdout, also of what is not kept
        :return: stdout, stderr (each cut at ``max_bytes``, the rest is counted), and the number of dropped bytes
        """
        ...

    async def wait(self) -> int:
        """Wait for the exit and return its code; below 0 for the signal that ended the process."""
        ...

    async def kill(self) -> None:
        """End the process and all that it started, and return when none of them is left."""


class TerminalProcess(Process, Protocol):
    """A sandboxed process with a terminal. Written data is typed into it."""

    def resize(self, size: TerminalSize) -> None:
        """Resize the terminal and notify its foreground programs. Does nothing after the end."""

    def is_line_buffered(self) -> bool:
        """Return whether the system passes whole lines to the program now.

        The program then gets no line that is too long for that.
        """
        ...

    def is_at_prompt(self) -> bool:
        """Return whether the first program waits at its prompt and has read all input.

        No program that it started is in the foreground. False also if that is unknown.
        """
        ...

    def current_folders(self) -> tuple[str, ...]:
        """Return the current folders of the first program and the foreground program, as far as known."""
        ...

    def discard_pending_input(self) -> int:
        """Discard typed input that no program has read, and return its number of bytes."""
        ...

    def read_rest(self, max_bytes: int) -> bytes:
        """Return output that was not read before the process ended."""
        ...

    def hang_up(self) -> None:
        """Disconnect the terminal (SIGHUP). Nothing is read or written any more."""


class SandboxMechanism(Struct, frozen=True):
    """One mechanism of the sandbox, with the result of a trial on this machine.

    :param is_enforced: whether it is enforced; None if it was not tried because its base failed
    """

    name: str
    is_enforced: bool | None
    detail: str
    remedy: str = ""


_LAYERS = frozenset({"namespaces", "landlock", "seccomp"})


class SandboxTier(Struct, frozen=True):
    """The confinement that this machine can enforce. With the name ``none`` no program starts."""

    name: str
    detail: str
    remedy: str = ""
    mechanisms: tuple[SandboxMechanism, ...] = ()
    """The mechanisms in the order of the layers."""
    unconfined: frozenset[str] = frozenset()
    """Tools whose programs run without a sandbox because the operator said so."""

    @property
    def is_confining(self) -> bool:
        """Whether programs are confined at all."""
        return self.name != "none"

    @property
    def missing_confinement_layers(self) -> tuple[str, ...]:
        """The layers of confinement that this machine lacks although programs are confined by the others."""
        return tuple(one.name for one in self.mechanisms if one.name in _LAYERS and one.is_enforced is False)

    @property
    def supports_per_host_network(self) -> bool:
        """Whether a sandbox's network can be opened to single hosts."""
        return any(one.name == "hosts" and one.is_enforced is True for one in self.mechanisms)


class Sandbox(Protocol):
    """A provider that starts confined processes."""

    @property
    def tier(self) -> SandboxTier:
        """The confinement that this provider enforces."""
        ...

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        """Start ``program`` confined.

        :raises ToolError: ``unavailable`` if the tier cannot enforce the set, with the reason and the remedy
        """
        ...


class CompletedProcess(Struct, frozen=True):
    """A process that has ended.

    :param output: stdout and stderr in order, at most 64 MiB
    :param dropped_bytes: the number of bytes after that, which are not passed to ``on_output`` either
    :param signal: the number of the signal that ended the process, or None
    :param exceeded_limit: the sandbox limit that it exceeded, as far as its end or its last output shows
    :param notes: why the sandbox kept it from files that its output names
    :param stderr: stderr, if it was requested separately
    :param tail: the end of an output that is longer than ``keep_bytes``, at most 512 KiB
    """

    exit_code: int
    output: bytes
    dropped_bytes: int = 0
    signal: int | None = None
    exceeded_limit: str | None = None
    notes: tuple[str, ...] = ()
    stderr: bytes = b""
    tail: bytes = b""
