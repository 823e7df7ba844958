"""The sandbox provider on bubblewrap: separate namespaces, no network, and only the folders of the call set."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, ProgramSpec, SandboxProfile, SandboxTier
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.program_lookup import list_open_workspaces
from handrail.sandbox.filters import landlock, memory_monitor
from handrail.sandbox.filters.resource_limits import (
    build_rlimits,
    compute_sandbox_inotify_limits,
    compute_sandbox_memory_limit,
    compute_total_memory_limit,
    make_limiting_cgroups,
    start_in_cgroups,
    submit_start_in_cgroups,
)
from handrail.sandbox.network import sandbox_network
from handrail.sandbox.network.session_network import NSENTER, ProxyPort, SessionNetwork, SessionNetworks
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start import sandboxed_process as terminal
from handrail.sandbox.start.launcher_messages import LauncherProgram, LaunchMode
from handrail.sandbox.start.sandboxed_process import HolderDescriptors, SandboxedProcess
from handrail.sandbox.start.spawn import is_inside, spawn
from handrail.sandbox.view import mount_options, sandbox_user, toolchains
from handrail.sandbox.view.cached_folder_tree import SHORTAGE_ERRORS
from handrail.sandbox.view.launch_plans import (
    LaunchPlan,
    LaunchPlanner,
    SandboxSetup,
    find_default_start_folder,
    find_free_descriptor_number,
)
from handrail.sandbox.view.mount_comparison import ExpectedMounts
from handrail.sandbox.view.sandbox_user import LookupCache

_FIXED_OPTIONS = (
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--cap-drop",
    "ALL",
    "--cap-add",
    "CAP_SYS_RESOURCE",  # in the sandbox's user namespace alone; the launcher gives it up before it makes a process
    "--as-pid-1",
    "--new-session",
    "--hostname",
    "handrail",
    "--clearenv",
)


class SessionNetworkMembership(Struct, frozen=True):
    """The place of one sandbox in the network of its session.

    :param port: for its proxy; None without hosts
    """

    network: SessionNetwork
    port: ProxyPort | None


class BubblewrapSandbox:
    """A sandbox that starts programs with bubblewrap: :class:`handrail.contract.sandbox_protocol.Sandbox`.

    :param binary: the bubblewrap to start
    :param first: the launcher that is the sandbox's first process
    :param landlock_abi: the version of Landlock to enforce; 0 for none
    :param system_calls: a filter that replaces the shipped one; empty for none
    """

    def __init__(
        self,
        binary: str,
        tier: SandboxTier,
        *,
        first: LauncherProgram | None = None,
        landlock_abi: int | None = None,
        system_calls: bytes | None = None,
    ) -> None:
        self._binary = binary
        self._tier = tier
        self._chosen_launcher = first
        self._landlock_abi = landlock.probe_abi() if landlock_abi is None else landlock_abi
        self._planning = LaunchPlanner(system_calls)
        self._networks = SessionNetworks(binary)

    @property
    def tier(self) -> SandboxTier:
        return self._tier

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        plan = await self.make_plan(capabilities, profile, program)
        # The network is found before the sandbox starts, because its namespaces and proxy port are options of
        # bubblewrap.
        place = await self.find_network(capabilities, profile)
        process = self.start_waiting_sandbox(plan, program.descriptors, place)
        if plan.terminal is None:
            return await self.begin_program(process, plan, capabilities, profile, place)
        held = terminal.SandboxTerminal(process)
        return held.replace_wrapped_process(await self.begin_program(process, plan, capabilities, profile, place))

    async def find_network(
        self, capabilities: CapabilitySet, profile: SandboxProfile
    ) -> SessionNetworkMembership | None:
        """Return the place of a sandbox in the network of its session; None if it has its own.

        It has its own also if programs of the session occupy the ports for its proxy.
        """
        if not profile.network:
            return None
        network = await self._networks.get(profile.network, profile.scratch)
        # A closed network is not an error: the sandbox then gets a separate one, which only loses the shared loopback.
        if network is None or network.is_closed:
            return None
        if not sandbox_network.needs_proxy(capabilities, profile):
            return SessionNetworkMembership(network, None)
        try:
            return SessionNetworkMembership(network, await network.acquire_proxy_port())
        except ToolError:
            return None

    def close_networks(self, scratch: str | None = None) -> None:
        """Close the networks of the sandboxes with this HOME; all of them if it is None."""
        self._networks.close(scratch)

    async def begin_program(
        self,
        process: SandboxedProcess,
        plan: LaunchPlan,
        capabilities: CapabilitySet,
        profile: SandboxProfile,
        ahead: sandbox_network.EarlyProxyListener | SessionNetworkMembership | None = None,
    ) -> Process:
        """Let the program of a waiting sandbox begin, behind a proxy if the call has hosts.

        :param ahead: the socket for that proxy, if it is already being made, or the place in the session's network
        :raises ToolError: ``backend`` if the network cannot be set up; the sandbox is ended then
        """
        port = ahead.port if isinstance(ahead, SessionNetworkMembership) else None
        call = plan.call if port is None else plan.with_proxy_port(port.number).call

        def begin() -> None:
            process.begin_program(call, plan.secrets or b"")

        begun: Process = process
        if sandbox_network.needs_proxy(capabilities, profile):
            source = port if isinstance(ahead, SessionNetworkMembership) else ahead
            begun = await sandbox_network.begin_program_with_proxy(process, begin, capabilities, profile, source)
            if port is not None:
                port.proxy = begun.proxy
        else:
            begin()
        # The kernel bounds each process, but not all processes of a call together. Watching them starts with the
        # program.
        limits = plan.made.limits
        memory_monitor.MemoryMonitor(
            process,
            compute_sandbox_memory_limit(limits),
            memory_monitor.compute_max_memory_files(limits.tmp_bytes + limits.shm_bytes),
        )
        return begun

    async def make_plan(
        self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec, *, ready_made: bool = False
    ) -> LaunchPlan:
        """Return the plan of what :meth:`start` would start.

        :param ready_made: whether the sandbox starts before its call; then a waiting shell reads the shell text
        :raises ToolError: as :meth:`start`
        """
        return await self._planning.plan(capabilities, profile, program, ready_made=ready_made)

    def start_waiting_sandbox(
        self,
        plan: LaunchPlan,
        descriptors: Mapping[int, int] | None = None,
        place: SessionNetworkMembership | None = None,
    ) -> SandboxedProcess:
        """Start the sandbox of a plan; its program waits until it gets the start message.

        Its port of the session's network is released when it has ended.
        """
        with self._prepare_launch(plan, descriptors, place) as launch:
            return launch.make_process(start_in_cgroups(launch.groups, launch.program, launch.argv, launch.spawn))

    async def start_waiting_sandbox_in_thread(
        self, plan: LaunchPlan, place: SessionNetworkMembership | None
    ) -> SandboxedProcess:
        """Start the same as :meth:`start_waiting_sandbox` does, while the event loop continues."""
        with self._prepare_launch(plan, None, place) as launch:
            submitted = submit_start_in_cgroups(launch.groups, launch.program, launch.argv, launch.spawn)
            spawned = asyncio.wrap_future(submitted)
            cancelled: asyncio.CancelledError | None = None
            while not spawned.done():
                try:
                    await asyncio.wait({spawned})
                except asyncio.CancelledError as error:  # the thread still uses the descriptors
                    cancelled = error
            process = launch.make_process(spawned.result())
        if cancelled is not None:
            await process.kill()
            raise cancelled
        return process

    @contextlib.contextmanager
    def _prepare_launch(
        self, plan: LaunchPlan, descriptors: Mapping[int, int] | None, place: SessionNetworkMembership | None
    ) -> Generator[_PreparedLaunch]:
        """Open all that bubblewrap gets for a plan, and close afterwards what is not for the process.

        As root, bubblewrap must be marked for the kernel's out-of-memory killer before it starts another process, so
        that these inherit the mark. It reads all its options first, and the first options come from a socket that is
        closed only once bubblewrap is marked.
        """
        # Everything that can fail without descriptors comes first, so a refusal here has nothing to close.
        first = self._get_launcher()
        launch: _PreparedLaunch | None = None
        port = None if place is None else place.port
        if port is not None:
            plan = plan.with_proxy_port(port.number)
        made = plan.made
        given = _move_beyond_standard(descriptors or {})
        ours: dict[str, int] = {}
        theirs: dict[int, int] = {}
        held_back = socket.socketpair() if os.geteuid() == 0 else None
        try:
            # From here on, each descriptor is in one of two tables as soon as it is open. The block at the end closes
            # them by these tables, whatever fails between.
            _open_program_streams(plan, ours, theirs)
            number = find_free_descriptor_number(given)
            # Secrets travel in a file in memory. Neither the environment nor the arguments have them, which other
            # processes of this user can read.
            if plan.secrets is not None:
                ours["secrets"] = os.memfd_create("handrail-secrets", os.MFD_CLOEXEC)
                theirs[number] = os.dup(ours["secrets"])
                number += 1
            # The channel carries the reports of the launcher and the byte that lets the program begin.
            here, there = socket.socketpair()
            ours["channel"], theirs[number] = here.detach(), there.detach()
            shared = () if place is None else ("--share-net",)
            # A plan may be older than the files of /etc. A mount point that has vanished since would fail the whole
            # start.
            options, table = mount_options.refresh_mount_options(made.options, made.table)
            ours["letter"] = _memory_file(self._encode_preparation(plan, table))
            theirs[number + 1] = os.dup(ours["letter"])
            here, there = socket.socketpair()
            ours["lifeline"], theirs[number + 2] = here.detach(), there.detach()
            # The options go through a file instead of the arguments, which have a limit and are visible to every
            # process.
            theirs[number + 3] = _memory_file(
                os.fsencode("\0".join([*_FIXED_OPTIONS, *shared, *options, "--chdir", made.start]))
            )
            ours["status"], theirs[number + 4] = os.pipe()
            # bubblewrap reports its child before it lets the child continue. Without a reader, because the holder
            # has died, it would end there, and the child would wait forever.
            theirs[number + 6] = os.dup(ours["status"])
            filtered: list[str] = []
            if made.filter:
                theirs[number + 5] = _memory_file(made.filter)
                filtered = ["--seccomp", str(number + 5)]
            # A blocking read or write in the event loop would let one program stop all others.
            for descriptor in ours.values():
                os.set_blocking(descriptor, False)
            gate: list[str] = []
            if held_back is not None:
                theirs[number + 7] = held_back[1].detach()
                gate = ["--args", str(number + 7)]
            command = [
                "bwrap",
                *gate,
                *("--args", str(number + 3)),
                *("--json-status-fd", str(number + 4)),
                *filtered,
                "--",
                *first.argv,
                *(str(number + place) for place in (0, 1, 2, 6)),
                *(str(other) for other in sorted(theirs.keys() | given.keys()) if 2 < other < number),
            ]
            program, command, groups = self._complete_command(made, command, None if place is None else place.network)
            launch = _PreparedLaunch(program, command, groups, {**theirs, **given}, ours, table, held_back, port)
            yield launch
        finally:
            # The process owns the holder's ends only once it exists. Before that, this call owns both sides.
            handed_over = launch is not None and launch.process is not None
            if port is not None and not handed_over:
                port.release()
            if held_back is not None:
                _release_held_back(held_back)
                for end in held_back:
                    end.close()
            for descriptor in theirs.values() if handed_over else (*ours.values(), *theirs.values()):
                os.close(descriptor)

    def _get_launcher(self) -> LauncherProgram:
        first = self._chosen_launcher or launcher_messages.find_launcher()
        if first is None:
            raise ToolError(
                "No program can be started in a sandbox here: perl is missing. Ask the user to install perl (apt "
                "install perl-base).",
                kind="unavailable",
            )
        return first

    def _complete_command(
        self, made: SandboxSetup, command: list[str], network: SessionNetwork | None
    ) -> tuple[str, list[str], tuple[Path, ...]]:
        """Return the program and argv that start bubblewrap as the user that the sandbox is for, and its control groups."""
        program, processes = self._binary, made.limits.processes
        # A workspace may have been opened after the sandbox was chosen. A bubblewrap that a call can replace confines
        # nothing.
        if is_inside(program, list_open_workspaces()):
            raise ToolError(
                f"The sandbox could not be started: {program} is in an open workspace, where a call could change "
                "it. Ask the user to install bubblewrap outside the workspace (apt install bubblewrap).",
                kind="unavailable",
            )
        if made.person is not None:
            program, command = sandbox_user.build_command_as_user(made.person, made.staged, program, command)
            processes = None  # the kernel counts the processes of that user
        # Entering the namespaces of the network comes first: bubblewrap shares the network in which it is started.
        if network is not None:
            program, command = NSENTER, [*network.namespace_entry_argv, program, *command[1:]]
        # The operator sets one bound, for a call. Without it, no control group limits memory.
        bound = None if made.limits.call_memory_bytes is None else compute_total_memory_limit()
        return program, command, make_limiting_cgroups(processes, bound)

    def _encode_preparation(self, plan: LaunchPlan, table: ExpectedMounts) -> bytes:
        made = plan.made
        limits = tuple(build_rlimits(made.limits).items())
        return _encode_restrictions(
            plan.mode,
            self._landlock_abi,
            made.folders,
            made.tcp,
            made.connect,
            limits,
            plan.environment,
            table,
            terminal=plan.terminal is not None,
        )


@lru_cache(maxsize=64)
def _encode_restrictions(
    mode: LaunchMode,
    landlock_abi: int,
    folders: tuple[tuple[str, mount_options.MountAccess], ...],
    tcp: bool,
    connect: tuple[int, ...],
    limits: tuple[tuple[int, tuple[int, int]], ...],
    environment: tuple[tuple[str, str], ...],
    table: ExpectedMounts,
    *,
    terminal: bool = False,
) -> bytes:
    """Return the first part of the letter, cached for equal arguments."""
    ruleset = landlock.compute_ruleset(landlock_abi, dict(folders), tcp=tcp, connect=connect) if landlock_abi else None
    counts = compute_sandbox_inotify_limits()
    return launcher_messages.encode_launcher_setup(
        mode, ruleset, dict(limits), dict(environment), counts=counts, terminal=terminal, table=table
    )


def build_bubblewrap_options(capabilities: CapabilitySet, profile: SandboxProfile) -> list[str]:
    """Return all bubblewrap options for one call.

    :raises ToolError: ``unavailable`` if the capability set cannot be enforced
    """
    look = LookupCache()
    folders = mount_options.compute_mount_access(
        capabilities, profile, toolchains.find_toolchains(profile.workspace, look), look
    )
    options, _ = mount_options.refresh_mount_options(
        mount_options.build_mount_options(folders, profile, look), ExpectedMounts()
    )
    return [*_FIXED_OPTIONS, *options, "--chdir", find_default_start_folder(folders, profile)]


def _move_beyond_standard(descriptors: Mapping[int, int]) -> dict[int, int]:
    if any(number < 3 for number in descriptors):
        raise ValueError(
            f"Descriptors {sorted(descriptors)} were given, but 0, 1 and 2 belong to the process itself. Use "
            "numbers from 3."
        )
    return dict(descriptors)


def _open_program_streams(plan: LaunchPlan, ours: dict[str, int], theirs: dict[int, int]) -> None:
    """Open the program's standard streams: a terminal, or pipes. Each end is recorded once it is open."""
    if plan.terminal is not None:
        ours["stdin"], theirs[0] = terminal.open_terminal_pair(plan.terminal)
        ours["stdout"], theirs[1], theirs[2] = os.dup(ours["stdin"]), os.dup(theirs[0]), os.dup(theirs[0])
        return
    theirs[0], ours["stdin"] = os.pipe()
    ours["stdout"], theirs[1] = os.pipe()
    if plan.merge_stderr:
        theirs[2] = os.dup(theirs[1])
    else:
        ours["stderr"], theirs[2] = os.pipe()


class _PreparedLaunch(Struct):
    """One start of bubblewrap: what :meth:`spawn` needs in any thread, and what the process gets.

    :param descriptors: number in the child to descriptor here
    :param ours: the holder's descriptors
    :param held_back: the socket that holds root's bubblewrap back until it is marked
    :ivar process: has the descriptors and the port, once it is made
    """

    program: str
    argv: list[str]
    groups: tuple[Path, ...]
    descriptors: Mapping[int, int]
    ours: Mapping[str, int]
    table: ExpectedMounts
    held_back: tuple[socket.socket, socket.socket] | None
    port: ProxyPort | None
    process: SandboxedProcess | None = None

    def spawn(self, program: str, argv: Sequence[str]) -> int:
        """Start a program that becomes bubblewrap, mark it as root, and return its process id."""
        try:
            pid = spawn(program, argv, {}, self.descriptors)
        except OSError as error:
            why = "the command line is too long" if error.errno == errno.E2BIG else error.strerror
            # A shortage ends by itself or by the user, so a model can try again later. Anything else is a defect.
            kind = "unavailable" if error.errno in SHORTAGE_ERRORS else "backend"
            raise ToolError(f"The sandbox could not be started: {why}. Try again.", kind=kind) from error
        if self.held_back is not None:
            memory_monitor.prefer_for_oom_kill(pid)  # root's launcher cannot: its /proc is read-only
            _release_held_back(self.held_back)
        return pid

    def make_process(self, pid: int) -> SandboxedProcess:
        """Return the started process, which has the holder's descriptors now."""
        try:
            self.process = SandboxedProcess(pid, HolderDescriptors(**{"stderr": None, **self.ours}), self.table)  # pyright: ignore[reportArgumentType]
        except OSError:  # it ends by itself, because its lifeline is closed
            threading.Thread(target=_reap, args=(pid,), name="handrail-reap", daemon=True).start()
            raise
        if self.port is not None:
            self.process.add_sandbox_empty_callback(self.port.release)
        return self.process


def _release_held_back(pair: tuple[socket.socket, socket.socket]) -> None:
    with contextlib.suppress(OSError):  # it was released
        pair[0].shutdown(socket.SHUT_WR)  # a copy of this process may have it open too


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("handrail-sandbox", os.MFD_CLOEXEC)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
