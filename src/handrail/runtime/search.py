"""The search door of the runtime: ripgrep in the sandbox, its results judged file by file.

In a sandbox nothing but the roots is there to be read. Where this machine has none, ripgrep starts in a folder
opened beneath the root, follows no links, and a result whose file does not lie where it was found is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import stat
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from handrail.contract.errors import ToolError
from handrail.contract.files import Found, Match
from handrail.contract.requires import CapabilitySet
from handrail.contract.sandbox import Profile, Program, Sandbox
from handrail.runtime import beneath
from handrail.runtime.ripgrep import (
    PathFilter,
    Records,
    failure,
    files_arguments,
    grep_arguments,
    installed,
    names,
)
from handrail.runtime.roots import Located, May, Roots, is_beneath

_PIECE = 64 * 1024


class RipgrepSearch:
    """Implements :class:`handrail.contract.files.Search`.

    :param profile: the session's; the search runs with its workspace read-only
    :param may: judges each file that has a result, by its canonical path, for ``fs.read``
    """

    def __init__(self, roots: Roots, sandbox: Sandbox, profile: Profile, capabilities: CapabilitySet, may: May) -> None:
        self._roots = roots
        self._sandbox = sandbox
        self._profile = profile
        self._capabilities = capabilities
        self._may = may

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        max_matches: int = 10_000,
    ) -> Found:
        place = self._place(path)
        wanted = PathFilter()
        if glob is not None:
            wanted = PathFilter.of(glob, hidden=place.file is not None, anywhere=True)
        arguments = grep_arguments(pattern, wanted, ignore_case=ignore_case, literal=literal, target=place.target)
        if place.file is not None:
            self._refuse_denied(place.file)
        judge = _Judge(self._roots, self._may, place.folder.absolute, confined=self._sandbox.tier.confines)
        records = Records()
        matches: list[Match] = []
        more = False
        async with contextlib.aclosing(self._output(place.folder, arguments, records)) as output:
            async for piece in output:
                for raw, line, text, whole in records.feed(piece):
                    shown = judge.shown(raw, None if glob is None else wanted)
                    if shown is None or (whole != raw and judge.shown(whole, None) is None):
                        continue
                    if len(matches) >= max_matches:
                        more = True
                        break
                    matches.append(Match(shown, line, text.decode("utf-8", "replace").removesuffix("\r")))
                if more:
                    break
        matches.sort(key=lambda match: (match.path, match.line))
        return Found(matches=tuple(matches), more=more)

    async def glob(self, pattern: str, path: str = ".", *, hidden: bool = False, max_paths: int = 100_000) -> Found:
        place = self._place(path)
        if place.file is not None:
            raise ToolError(
                f"{place.file.shown} is a file; glob lists what is in a folder, and read shows a file",
                kind="invalid_input",
            )
        wanted = PathFilter.of(pattern, hidden=hidden)
        judge = _Judge(self._roots, self._may, place.folder.absolute, confined=self._sandbox.tier.confines)
        records = Records()
        paths: list[str] = []
        skipped = 0
        more = False
        async with contextlib.aclosing(self._output(place.folder, files_arguments(wanted), records)) as output:
            async for piece in output:
                found, records.rest = names(records.rest, piece)
                for raw in found:
                    if not wanted.wants(os.fsdecode(raw.removeprefix(b"./"))):
                        continue
                    shown = judge.shown(raw, None)
                    if shown is None:
                        skipped += 1
                    elif len(paths) < max_paths:
                        paths.append(shown)
                    else:
                        more = True
                        break
                if more:
                    break
        paths.sort()
        return Found(paths=tuple(paths), more=more, skipped=skipped)

    def _place(self, path: str) -> _Place:
        located = self._roots.locate(path)
        if not located.inside:
            raise ToolError(f"{located.shown} lies outside the workspace; search inside it", kind="denied")
        try:
            mode = Path(located.absolute).lstat().st_mode
        except OSError as error:
            raise beneath.explained(error, located, "searching") from error
        if stat.S_ISDIR(mode):
            return _Place(located, None)
        if not stat.S_ISREG(mode):
            raise beneath.not_regular(located)
        return _Place(self._roots.of_canonical(str(Path(located.absolute).parent)), located)

    def _refuse_denied(self, file: Located) -> None:
        refusal = self._may("fs.read", file.absolute)
        if refusal is not None:
            raise ToolError(refusal, kind="denied")

    async def _output(self, folder: Located, arguments: Sequence[str], records: Records) -> AsyncGenerator[bytes]:
        """What ripgrep writes, in pieces. Leaving early ends it.

        :raises ToolError: when it ends by itself and says that it could not do its work
        """
        process = await self._start(folder, arguments)
        try:
            while piece := await process.read(_PIECE):
                yield piece
            error = failure(await process.wait(), records.rest)
        finally:
            await asyncio.shield(asyncio.ensure_future(process.kill()))  # a second cancellation does not stop it
        if error is not None:
            raise error

    async def _start(self, folder: Located, arguments: Sequence[str]) -> _Process:
        confined = self._sandbox.tier.confines
        program = installed(self._roots.workspace, confined=confined)
        if not confined:
            return await _Direct.start(program, arguments, folder)
        beside = [
            str(Path(one).parent)
            for one in dict.fromkeys((program, os.path.realpath(program)))
            if not is_beneath(one, "/usr")
        ]
        profile = dataclasses.replace(
            self._profile,
            workspace_writable=False,
            denials=None,  # each file that has a result is judged, by the rules about the tool too
            cwd=folder.absolute,
            readable=(*self._profile.readable, *beside),
        )
        return await self._sandbox.start(self._capabilities, profile, Program((program, *arguments), merge_stderr=True))


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where to search: a folder, and the one file in it if a file was named."""

    folder: Located
    file: Located | None

    @property
    def target(self) -> str:
        return "." if self.file is None else f"./{Path(self.file.absolute).name}"


class _Judge:
    """Decides once per file whether its results may be shown, and how its path is written."""

    def __init__(self, roots: Roots, may: May, folder: str, *, confined: bool) -> None:
        self._roots = roots
        self._may = may
        self._folder = folder.rstrip("/")
        self._confined = confined
        self._known: dict[tuple[bytes, bool], str | None] = {}

    def shown(self, raw: bytes, wanted: PathFilter | None) -> str | None:
        """The path to show, or None for a file that is not wanted or not to be shown."""
        key = (raw, wanted is None)
        if key in self._known:
            return self._known[key]
        path = os.fsdecode(raw.removeprefix(b"./"))
        answer = None if wanted is not None and not wanted.wants(path) else self._judged(f"{self._folder}/{path}")
        self._known[key] = answer
        return answer

    def _judged(self, absolute: str) -> str | None:
        if not self._confined and os.path.realpath(absolute) != absolute:
            return None  # a link was put on the way while ripgrep walked it
        if self._may("fs.read", absolute) is not None:
            return None
        return self._roots.shown(absolute)


class _Process(Protocol):
    async def read(self, max_bytes: int) -> bytes: ...

    async def wait(self) -> int: ...

    async def kill(self) -> None: ...


class _Direct:
    """ripgrep without a sandbox: it starts nothing itself, so ending it ends all of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @staticmethod
    async def start(program: str, arguments: Sequence[str], folder: Located) -> _Direct:
        try:
            descriptor = beneath.open_beneath(folder, beneath.FOLDER)
        except OSError as error:
            raise beneath.explained(error, folder, "searching") from error
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=f"/proc/self/fd/{descriptor}",
                env={"LC_ALL": "C.UTF-8"},
                start_new_session=True,
                limit=4 * _PIECE,
            )
        finally:
            os.close(descriptor)
        return _Direct(process)

    async def read(self, max_bytes: int) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(max_bytes)

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
