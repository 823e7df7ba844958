"""The shell door of the runtime: one program or script in the sandbox of its call, and nothing left of it after."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import SHELL_ARGV, Completed, Process, Profile, Program, Sandbox, TerminalSize
from handrail.contract.text.neutral import visible
from handrail.contract.tool.requires import CapabilitySet, May
from handrail.origins.places import folder_around
from handrail.origins.programs import ProgramRefused, find_program
from handrail.runtime.files.roots import Roots, is_beneath, lost_root
from handrail.runtime.guard.guard import GuardedProcess, Vetoed, explained
from handrail.sandbox.filters.limits import ended_by
from handrail.sandbox.view import toolchains

_FEW_PATHS = 200
"""Paths that are looked at on the event loop, each for about 25 µs."""
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""How much output is kept of one run; the rest is read and counted, so the program does not block."""

_SH = ("/bin/sh", "-c")
_REDIRECTING = frozenset("<>")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FIXED = frozenset(("PATH", "HOME", "TMPDIR", "SHELL", "IFS", "ENV", "NODE_USE_ENV_PROXY"))
_FIXED_BEGIN = ("LD_", "BASH", "HANDRAIL", "DYLD_")


class SandboxedShell:
    """Implements :class:`handrail.contract.doors.runtime.Shell` on a sandbox.

    :param profile: the session's folders; each run has its own working directory in it
    :param may: judges ``shell.run``: a shell text is handed over as one text, a program with its arguments as a sequence
    :param as_argv: a shell text as the program and arguments that it is without any shell; None where it needs one
    """

    def __init__(
        self,
        sandbox: Sandbox,
        profile: Profile,
        capabilities: CapabilitySet,
        roots: Roots,
        may: May,
        as_argv: Callable[[str], Sequence[str] | None] | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._profile = profile
        self._capabilities = capabilities
        self._roots = roots
        self._may = may
        self._as_argv = as_argv

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        trusted: bool = False,
        on_output: Callable[[bytes], None] | None = None,
    ) -> Completed:
        process = await self.start(command, cwd=cwd, environment=environment, apart=apart, trusted=trusted)
        try:
            output, errors, dropped = await process.communicate(stdin, MAX_OUTPUT_BYTES, on_output)
            try:
                code = await process.wait()
            except Vetoed as veto:
                said = (output + errors).decode("utf-8", "replace")
                raise ToolError(veto.text, kind="denied", data={"exit_code": veto.exit_code, "output": said}) from None
            except ToolError as error:
                said = (output + errors).decode("utf-8", "replace")
                raise ToolError(error.text, kind=error.kind, data={"output": said} if said else None) from None
        except asyncio.CancelledError:
            await ended(process)
            if on_output is not None and isinstance(process, GuardedProcess) and process.veto is not None:
                on_output(f"\n[handrail: {process.veto.text}]\n".encode())
            raise
        finally:
            await ended(process)
        said = errors or output
        bound = None if self._profile.tool in self._sandbox.tier.unconfined else ended_by(code, said)
        limit = bound.about if bound else None
        return Completed(code, output, dropped, -code if code < 0 else None, limit, explained(process, said), errors)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        trusted: bool = False,
        terminal: TerminalSize | None = None,
    ) -> Process:
        """Judge and start a program; whoever asks for it ends it. See :meth:`run`.

        :param terminal: of this size, where it is to have one
        """
        given = _variables(command, environment or {})
        argv = self._argv(command)
        folder = self._folder(cwd)
        if isinstance(command, str) and folder != self._profile.workspace and not _REDIRECTING.isdisjoint(command):
            raise ToolError(
                "a text with '<' or '>' in it is judged from the workspace's folder; leave cwd out and name files from "
                "there, or give an argv",
                kind="denied",
            )
        if trusted:
            argv, given = self._trusted(argv, given)
        profile = dataclasses.replace(self._profile, cwd=folder, environment={**self._profile.environment, **given})
        program = Program(argv, merge_stderr=not apart, terminal=terminal)
        return await self._sandbox.start(self._capabilities, profile, program)

    async def hidden(self, paths: Sequence[str]) -> Sequence[str]:
        if len(paths) > _FEW_PATHS:
            return await asyncio.to_thread(self._hidden, paths)
        return self._hidden(paths)

    def _hidden(self, paths: Sequence[str]) -> Sequence[str]:
        denials = self._profile.denials
        found: list[str] = []
        for path in paths:
            absolute = self._roots.locate(path).absolute
            if (denials is not None and denials.hides(absolute)) or self._may("fs.read", absolute) is not None:
                found.append(path)
        return found

    def _argv(self, command: str | Sequence[str]) -> Sequence[str]:
        if not self._capabilities.uses("shell.run"):
            layer = self._capabilities.refusing_layer("shell.run", ("",))
            owner = layer.owner if layer else "nothing"
            raise ToolError(f"running programs is not in the capability set of this call ({owner})", kind="denied")
        if isinstance(command, str):
            if not command.strip():
                raise ToolError("the command is empty; give a shell text or an argv", kind="invalid_input")
            if "\0" in command:
                raise ToolError("the command has a NUL character in it", kind="invalid_input")
            self._judge(command)
            return (self._as_argv(command) if self._as_argv is not None else None) or (*_shell(), command)
        argv = tuple(command)
        if not argv or not argv[0]:
            raise ToolError("the argv is empty; give a program and its arguments", kind="invalid_input")
        if self._capabilities.refusing_layer("shell.run", argv) is not None:
            raise ToolError(
                f"{visible(argv[0])} with these arguments is not in the capability set of this call", kind="denied"
            )
        self._judge(argv)
        return argv

    def _trusted(self, argv: Sequence[str], given: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        """The argv with a program from outside of the workspace, and variables with such a PATH."""
        workspace = self._profile.workspace
        folders = [one for one in toolchains.find(workspace).path if folder_around(one, (workspace,)) is None]
        try:
            program = find_program(argv[0], outside=(workspace,), path=folders)
        except ProgramRefused as error:
            raise ToolError(str(error), kind="unavailable") from None
        return (program, *argv[1:]), {**given, "PATH": ":".join(folders)}

    def _judge(self, command: str | tuple[str, ...]) -> None:
        refusal = self._may("shell.run", command)
        if refusal is not None:
            raise ToolError(refusal, kind="denied")

    def _folder(self, cwd: str | None) -> str:
        if (lost := lost_root(self._profile.workspace)) is not None:
            raise lost
        if cwd is None:
            return self._profile.cwd or self._profile.workspace
        located = self._roots.locate(cwd)
        if not is_beneath(located.absolute, self._profile.workspace):
            raise ToolError(
                f"the working directory {located.shown} is outside the workspace {visible(self._profile.workspace)}; name a folder in it",
                kind="denied",
            )
        if not Path(located.absolute).is_dir():
            raise ToolError(f"the working directory {located.shown} is no folder", kind="failed")
        return located.absolute


def _variables(command: str | Sequence[str], given: Mapping[str, str]) -> Mapping[str, str]:
    """
    :raises ToolError: ``invalid_input`` for what is no variable, or not a tool's to set
    """
    if given and isinstance(command, str):
        raise ToolError(
            "a shell text is judged by its words alone, so it gets no further variables; give an argv",
            kind="invalid_input",
        )
    for name, value in given.items():
        if _VARIABLE.fullmatch(name) is None:
            raise ToolError(f"{visible(name)!r} is no name of a variable", kind="invalid_input")
        if name in _FIXED or name.startswith(_FIXED_BEGIN) or name.lower().endswith("_proxy"):
            raise ToolError(f"{name} is set by the sandbox; leave it out of environment", kind="invalid_input")
        if "\0" in value:
            raise ToolError(f"the value of {name} has a NUL character in it", kind="invalid_input")
    return given


def _shell() -> tuple[str, ...]:
    return SHELL_ARGV if Path(SHELL_ARGV[0]).exists() else _SH


async def ended(process: Process) -> None:
    """End the process and all it started, also when this very task is being cancelled."""
    ending = asyncio.ensure_future(process.kill())
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    ending.result()
    if cancelled is not None:
        raise cancelled
