"""A sandbox with its operator's settings: limits, and the named tools that run without a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import replace

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, ProgramSpec, Sandbox, SandboxLimits, SandboxProfile, SandboxTier
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.program_lookup import build_clean_path
from handrail.sandbox.start.process_pipes import PipedProcess
from handrail.sandbox.start.ready_sandbox_pool import SandboxPool
from handrail.sandbox.start.spawn import spawn
from handrail.sandbox.view import toolchains

# Programs without any sandbox: only for tools that their operator has named, and never as a fallback for a failed
# sandbox.
#
# Such a program may do everything that the operator may do. It is a separate process group, which ends with its call. A
# process that leaves the group survives.

UNCONFINED_NAME = "nothing"
"""The name of the sandbox in results of unconfined programs."""
SECRETS_VARIABLE = "HANDRAIL_SECRETS_FD"
_CHDIR_COMMAND = ("/bin/sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh")
_KEPT_VARIABLES = ("HOME",)


class UnconfinedSandbox:
    """A sandbox that confines nothing: :class:`handrail.contract.sandbox_protocol.Sandbox`."""

    @property
    def tier(self) -> SandboxTier:
        return SandboxTier(UNCONFINED_NAME, "the operator has listed its tool in [sandbox] unconfined")

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        argv = program.argv
        if not argv:
            raise ToolError("The argv list is empty. Pass a program and its arguments.", kind="invalid_input")
        if program.terminal is not None:
            raise ToolError(
                f"Tool `{profile.tool}` is set to run without a sandbox, and terminals open only in a sandbox. "
                "Run the command without a terminal.",
                kind="unavailable",
            )
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment["PATH"] = build_clean_path(outside=(profile.workspace,))
        environment |= {**toolchains.select_locale_variables(os.environ), "TERM": "dumb", **profile.environment}
        given = dict(program.descriptors)
        ours: list[int] = []
        theirs: dict[int, int] = {}
        try:
            theirs[0], stdin = os.pipe()
            ours.append(stdin)
            stdout, theirs[1] = os.pipe()
            ours.append(stdout)
            stderr = None
            if program.merge_stderr:
                theirs[2] = os.dup(theirs[1])
            else:
                stderr, theirs[2] = os.pipe()
                ours.append(stderr)
            if profile.secrets:
                number = max((2, *given)) + 1
                theirs[number] = _memory_file(json.dumps(dict(profile.secrets)).encode())
                environment[SECRETS_VARIABLE] = str(number)
            for descriptor in ours:
                os.set_blocking(descriptor, False)
            command = [*_CHDIR_COMMAND, profile.cwd or profile.workspace, *argv]
            pid = spawn(command[0], command, environment, {**theirs, **given})
            free = _UnconfinedProcess(pid, stdin, stdout, stderr)
            ours.clear()
            return free
        except ValueError as error:
            raise ToolError(
                f"The program could not be started: {error}. Correct its arguments.", kind="invalid_input"
            ) from None
        except OSError as error:
            raise ToolError(
                f"`{argv[0]}` could not be started: {error.strerror}. Check that the program exists and can be run.",
                kind="backend",
            ) from error
        finally:
            for descriptor in (*ours, *theirs.values()):
                os.close(descriptor)


class _UnconfinedProcess(PipedProcess):
    """A process in its own process group: :class:`handrail.contract.sandbox_protocol.Process`.

    :raises ToolError: if Handrail cannot wait for the program; then it has been ended, and the caller still owns the
        descriptors
    """

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int | None) -> None:
        self._pid = pid
        self._pidfd = self._open_pidfd()  # first: if that fails, nothing else was made
        super().__init__(asyncio.get_running_loop(), stdin, stdout, stderr)
        self._loop.add_reader(self._pidfd, self._end_group_after_exit)

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self._pid)
        except OSError as error:  # its end could not be noticed, and nothing would limit it
            self._end_group()
            with contextlib.suppress(ChildProcessError):  # an embedding program reaps all children itself
                os.waitpid(self._pid, 0)
            text = (
                "The program was stopped right after its start, because Handrail could not wait for it: "
                f"{error.strerror}. Try again."
            )
            raise ToolError(text, kind="backend") from error

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        return await self._wait_for_exit()

    async def kill(self) -> None:
        if not self._exit_code.done():
            self._end_group()
            await self._wait_for_exit()
        self._close()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _end_group_after_exit(self) -> None:
        """Handle the end of the program: end its group while the group's number is still in use."""
        self._loop.remove_reader(self._pidfd)
        self._end_group()
        try:
            _, status = os.waitpid(self._pid, 0)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # an embedding program reaps all children itself
            code = 255
        os.close(self._pidfd)
        self._input.close()
        self._drain()
        self._resolve_exit(code)


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("handrail-secrets", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class ConfiguredSandbox:
    """A sandbox with the operator's settings around another :class:`handrail.contract.sandbox_protocol.Sandbox`.

    :param limits: for every program
    :param unix_sockets: whether programs may make Unix sockets
    :param unconfined: ids of the tools whose programs run without ``sandbox``
    """

    def __init__(
        self, sandbox: Sandbox, limits: SandboxLimits, *, unix_sockets: bool = False, unconfined: Iterable[str] = ()
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._unix_sockets = unix_sockets
        self._unconfined = frozenset(unconfined)
        self._unconfined_sandbox = UnconfinedSandbox()
        self._tier = replace(sandbox.tier, unconfined=self._unconfined)

    @property
    def tier(self) -> SandboxTier:
        return self._tier

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        chosen = self._unconfined_sandbox if profile.tool in self._unconfined else self._sandbox
        limits = self._limits.restrict_to(profile.limits)
        profile = replace(profile, limits=limits, unix_sockets=self._unix_sockets and not profile.confined)
        return await chosen.start(capabilities, profile, program)

    async def end_ready_sandboxes(self, scratch: str) -> None:
        """End the ready sandboxes of the session with this scratch folder."""
        if isinstance(self._sandbox, SandboxPool):
            await self._sandbox.end_ready_sandboxes(scratch)

    async def aclose(self) -> None:
        """End all ready sandboxes."""
        if isinstance(self._sandbox, SandboxPool):
            await self._sandbox.aclose()
