"""The executables that ``handrail build`` makes from source folders, each by its tool's build command.

A build runs in a sandbox, on a copy of the tool's folder: without network, with nothing else to write, for a bounded time. The
operator's own folder stays as it is. What the copy holds afterwards is what the bundle gets.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from handrail.contract.errors import Fault, LoadError, ToolError
from handrail.contract.sandbox import Profile, Program, Sandbox
from handrail.contract.tool.requires import CapabilitySet, Layer, ShellRequires
from handrail.registry.sources.executables import ExecutableTool
from handrail.registry.sources.folders import problem_with_executable
from handrail.sandbox.operated import Operated

MAX_SHOWN = 16 * 1024 * 1024
"""Bytes of a build's output that are shown; the rest is read and dropped."""
MAX_FILES, MAX_BYTES = 20_000, 1024 * 1024 * 1024
"""The bounds of a built folder."""
Tell = Callable[[str], None]
"""Is given text to show, in whole lines."""


def built(tools: Iterable[ExecutableTool], sandbox: Sandbox, room: Path, tell: Tell) -> dict[str, Path]:
    """Run the build commands of tools, one after the other. Tools that share a folder share its copy.

    :param tools: those with a build command
    :param room: an empty folder for the copies
    :param tell: is given what runs and what it writes, as it comes
    :returns: by a tool's own folder, the copy that was built
    :raises LoadError: with every build that failed
    """
    folders: dict[str, dict[str, ExecutableTool]] = {}
    for tool in tools:
        folders.setdefault(tool.folder, {})[tool.executable] = tool
    if not folders:
        return {}
    with ThreadPoolExecutor(1, "handrail-build") as thread:  # the caller may run an event loop
        return thread.submit(asyncio.run, _built(folders, sandbox, room, tell)).result()


async def _built(
    folders: Mapping[str, Mapping[str, ExecutableTool]], sandbox: Sandbox, room: Path, tell: Tell
) -> dict[str, Path]:
    made: dict[str, Path] = {}
    faults: list[Fault] = []
    try:
        for number, (own, tools) in enumerate(folders.items()):
            place = room / str(number)
            place.mkdir(mode=0o711)
            made[own] = folder = place / Path(own).name
            try:
                shutil.copytree(own, folder, symlinks=True)
            except OSError as error:  # of several files at once
                faults.append(Fault(own, "", f"cannot be copied to be built: {error}"))
                continue
            done: set[tuple[str, ...]] = set()
            for tool in tools.values():
                try:
                    if tool.spec.build not in done:
                        await _run(tool, sandbox, folder, tell)
                        done.add(tool.spec.build)
                    _check(tool, folder)
                except ToolError as error:
                    faults.append(Fault(tool.spec.id, "runtime.build", error.text))
    finally:
        if isinstance(sandbox, Operated):
            await sandbox.aclose()
    if faults:
        raise LoadError(faults)
    return made


async def _run(tool: ExecutableTool, sandbox: Sandbox, folder: Path, tell: Tell) -> None:
    """:raises ToolError: when the build cannot run, takes too long or fails"""
    spec, here, home = tool.spec, str(folder), folder.parent / "home"
    command, lines = shlex.join(spec.build), _Lines(f"{spec.id}: ", tell)
    if not sandbox.tier.confines:
        raise ToolError(f"it cannot be built: {sandbox.tier.detail}. Build it where programs can be confined")
    home.mkdir(mode=0o755, exist_ok=True)
    tell(f"{spec.id}: {command}\n")
    any_program = ShellRequires(cmd="*")
    capabilities = CapabilitySet((Layer("handrail build", (here,), (here,), (), (any_program,)),))
    process = await sandbox.start(capabilities, Profile(here, str(home)), Program(spec.build, merge_stderr=True))
    try:
        async with asyncio.timeout(spec.build_timeout_ms / 1000):
            await process.communicate(b"", MAX_SHOWN, lines.feed)
            code = await process.wait()
    except TimeoutError:
        raise ToolError(
            f"{command} took more than {spec.build_timeout_ms} ms and was stopped; allow more with build_timeout_ms"
        ) from None
    finally:
        await process.kill()
        lines.end()
    if code != 0:
        said = f" Its last line: {lines.last}" if lines.last else ""
        raise ToolError(f"{command} ended with exit code {code}.{said}")


def _check(tool: ExecutableTool, folder: Path) -> None:
    """:raises ToolError: when there is nothing to freeze, or something that must not be frozen"""
    command = shlex.join(tool.spec.build)
    named = str(Path(tool.executable).relative_to(Path(tool.folder).parent))
    executable = folder.parent / named
    if not executable.exists():
        raise ToolError(f"{command} made no {named!r}; expected the executable that exec_path names")
    if problem := problem_with_executable(folder.parent, named, executable.resolve()):
        raise ToolError(f"{command} made what cannot be run: {problem}")
    if problem := next(_problems_in(folder), None):
        raise ToolError(f"{command} made what cannot be frozen: {problem}")


def _problems_in(folder: Path) -> Iterator[str]:
    count = size = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        try:
            found = path.stat()
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            yield f"{name} leads out of the tool's own folder; put the file itself there"
        elif not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            yield f"{name} is not a regular file"
        count, size = count + 1, size + found.st_size
    if count > MAX_FILES or size > MAX_BYTES:
        yield f"{count:,} files of {size:,} bytes together; at most {MAX_FILES:,} files of {MAX_BYTES:,} bytes are frozen"


class _Lines:
    """Puts a build's output together to whole lines, with the tool's id in front of each."""

    def __init__(self, begin: str, tell: Tell) -> None:
        self._begin, self._tell = begin, tell
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self.last = ""

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + self._decode(piece)).split("\n")
        for line in lines:
            self._show(line)

    def end(self) -> None:
        if self._rest:
            self._show(self._rest)
            self._rest = ""

    def _show(self, line: str) -> None:
        self.last = line[:500] if line.strip() else self.last
        with contextlib.suppress(OSError):  # the reader has gone
            self._tell(f"{self._begin}{line}\n")
