"""The language servers of a kernel: started at the first question, shared, stopped when idle, and restarted once after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, ProgramSpec, Sandbox, SandboxLimits, SandboxProfile
from handrail.contract.text.text_encodings import decode_file_text, replace_invalid_bytes
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.runtime.files import secure_open
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.language_servers.running_server import RunningLanguageServer, ServerTimeouts, StaleServerError
from handrail.runtime.language_servers.server_connection import LanguageServerFailure, ServerErrorResponse
from handrail.runtime.language_servers.server_programs import (
    ConfiguredServer,
    LanguageDefinition,
    find_server_program,
    merge_configured_languages,
)
from handrail.runtime.language_servers.workspace_files import WorkspaceFileSnapshot

MEMORY_BYTES = 2 * 1024 * 1024 * 1024
"""The maximum memory of all processes of one server together."""
MAX_SERVERS = 6
"""The maximum number of servers of one kernel. For another one, Handrail stops the one that was unused for longest."""
MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
_MOST_FAILURES = 2
_MOST_TIMEOUTS = 2
_MOST_REPLACED = 3
_PROCESSES = 512
_T = TypeVar("_T")


class LanguageServerEnvironment(NamedTuple):
    """The folders, rules and capabilities in which a server of a session runs.

    :param root: the folder of the project
    :param profile: of the session
    """

    root: str
    roots: SessionRoots
    profile: SandboxProfile
    capabilities: CapabilitySet

    def make_sharing_key(self, definition: LanguageDefinition) -> Hashable:
        """Return a key that is equal for sessions that may share a server."""
        profile = self.profile
        folders = (profile.workspace, profile.writable, profile.read_only_roots, profile.hidden)
        reads = tuple(layer.fs_read for layer in self.capabilities.layers)
        return (
            self.root,
            definition.language,
            definition.commands,
            folders,
            reads,
            None if profile.denials is None else profile.denials.read_denials_cache_key,
        )

    def is_hidden(self, path: str) -> bool:
        """Return whether rules hide a path from programs."""
        return self.profile.denials is not None and self.profile.denials.is_hidden(path)

    def read_text(self, path: str) -> str:
        """Return the text of a file below the roots.

        :raises ToolError: if it cannot be read
        """
        located = self.roots.locate_canonical_path(path)
        if not located.is_inside:
            raise ToolError(self.roots.explain_path_outside_roots(located), kind="denied")
        if self.is_hidden(path):
            raise ToolError(
                f"`{located.display_path}` is hidden from programs by a rule, so a language server cannot read it. Use another "
                "file.",
                kind="denied",
            )
        try:
            descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS)
        except OSError as error:
            raise secure_open.translate_os_error_for_model(error, located, "reading") from error
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                secure_open.require_regular_file(descriptor, located)
            if found.st_size > MAX_DOCUMENT_BYTES:
                raise ToolError(
                    f"`{located.display_path}` has {found.st_size:,} bytes. A language server gets files of up to "
                    f"{MAX_DOCUMENT_BYTES:,} bytes. Use grep.",
                    kind="limit",
                )
            return replace_invalid_bytes(decode_file_text(file.read(MAX_DOCUMENT_BYTES)).text)


class ServerSlot:
    """The slot of one server: at most one process at a time, with the failures of the last ones."""

    def __init__(
        self, pool: LanguageServerPool, definition: LanguageDefinition, ground: LanguageServerEnvironment
    ) -> None:
        self.definition = definition
        self.last_used_s = 0.0
        self.server: RunningLanguageServer | None = None
        self._pool = pool
        self._ground = ground
        self._home = ""
        self._lock = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._failures: list[str] = []
        self._failed_until_s = 0.0
        self._timeouts = 0
        self._loop = asyncio.get_running_loop()

    @property
    def is_busy(self) -> bool:
        """Whether a question is being answered."""
        return self._lock.locked()

    async def ask(
        self, ground: LanguageServerEnvironment, question: Callable[[RunningLanguageServer], Awaitable[_T]]
    ) -> _T:
        """Answer a question with the server, after it has got all changes. A server that ends is started once more.

        :param ground: of the session that asks
        :raises ToolError: ``unavailable`` if there is no server; ``timeout`` if it does not answer
        """
        try:
            async with asyncio.timeout(self._pool.times.queue_s):
                await self._lock.acquire()
        except TimeoutError:
            raise ToolError(
                f"The language server for {self.definition.language} is busy with another question. Try again later.",
                kind="timeout",
            ) from None
        try:
            self._cancel_timer()
            self._ground = ground
            return await self._ask_until_answered(question)
        finally:
            self.last_used_s = self._loop.time()
            self._lock.release()
            if self.server is not None and not self._pool.is_closed:
                self._idle = self._loop.call_later(self._pool.times.idle_s, self.schedule_idle_stop)

    async def _ask_until_answered(self, question: Callable[[RunningLanguageServer], Awaitable[_T]]) -> _T:
        replaced = 0
        while True:
            try:
                server = self.server or await self._start()
                await server.sync_files_before_request()
                answer = await question(server)
            except StaleServerError:
                await self.stop_server()
                replaced += 1
                if replaced > _MOST_REPLACED:
                    raise ToolError(
                        f"The language server for {self.definition.language} gave no answer: hidden files or installed packages "
                        "change all the time. Ask again when the program that changes them has ended.",
                        kind="conflict",
                    ) from None
                continue
            except LanguageServerFailure as lost:
                await self.stop_server()
                self._failures.append(str(lost).rstrip("."))
                if len(self._failures) >= _MOST_FAILURES:
                    raise self._refuse_starts() from None
                continue
            except TimeoutError:
                raise await self._note_timeout() from None
            self._failures.clear()
            self._timeouts = 0
            return answer

    def _refuse_starts(self) -> ToolError:
        """Start no server for ``failed_s`` seconds, and return the error with the reason."""
        self._failed_until_s = self._loop.time() + self._pool.times.failed_s
        return self._failed_error()

    def _failed_error(self) -> ToolError:
        left = max(1, round(self._failed_until_s - self._loop.time()))
        return ToolError(
            f"The language server for {self.definition.language} failed: {self._failures[-1]}. The next start is possible "
            f"in {left} s. Use grep and read meanwhile, and tell the user.",
            kind="unavailable",
        )

    async def _note_timeout(self) -> ToolError:
        self._timeouts += 1
        if self._timeouts >= _MOST_TIMEOUTS:
            await self.stop_server()
        return ToolError(
            f"The language server for {self.definition.language} did not answer in time. Ask again, or use grep and read.",
            kind="timeout",
        )

    async def _start(self) -> RunningLanguageServer:
        if self._pool.is_closed:
            raise make_kernel_closing_error()
        if self._loop.time() < self._failed_until_s:
            raise self._failed_error()
        if len(self._failures) >= _MOST_FAILURES:
            self._failures.clear()
        ground, definition = self._ground, self.definition
        found = await asyncio.to_thread(find_server_program, definition, ground.profile.workspace)
        await self._pool.make_room()
        self._home = await asyncio.to_thread(self._pool.create_server_home)
        files = WorkspaceFileSnapshot(ground.root, ground.is_hidden)
        try:
            await asyncio.to_thread(files.look)
            process = await self._start_process(found.argv, found.folders)
        except BaseException:
            await self.stop_server()
            raise
        server = self.server = RunningLanguageServer(
            definition, process, ground.root, files, ground.read_text, self._pool.times
        )
        try:
            await server.initialize(found.argv[0])
        except (TimeoutError, ServerErrorResponse) as error:
            reason = str(error) or f"it did not initialise within {self._pool.times.start_s:.0f} s"
            self._failures = [reason] * _MOST_FAILURES
            await self.stop_server()
            raise self._refuse_starts() from None
        except BaseException:
            await self.stop_server()
            raise
        if self._pool.is_closed:
            await self.stop_server()
            raise make_kernel_closing_error()
        return server

    async def _start_process(self, argv: tuple[str, ...], folders: tuple[str, ...]) -> Process:
        """Start a program that reads the workspace, writes into its own HOME only, and has no network."""
        given = self._ground.profile
        profile = replace(
            given,
            scratch=self._home,
            workspace_writable=False,
            readable=folders,
            writable=(),
            read_only_roots=(*given.read_only_roots, *given.writable),
            cwd=self._ground.root,
            environment={**self._pool.environment, "GOPROXY": "off", "GOTOOLCHAIN": "local"},
            limits=SandboxLimits(call_memory_bytes=MEMORY_BYTES, processes=_PROCESSES),
            quarantine="",
            tool="lsp",
            on_file_needed=lambda: self._loop.call_soon_threadsafe(self.schedule_idle_stop),
        )
        layers = tuple(CapabilityLayer(one.owner, fs_read=one.fs_read) for one in self._ground.capabilities.layers)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:  # a descriptor prevents a prepared successor, which a long-running program does not need
            async with asyncio.timeout(self._pool.times.start_s):
                return await self._pool.sandbox.start(CapabilitySet(layers), profile, ProgramSpec(argv, {3: nothing}))
        finally:
            os.close(nothing)

    def schedule_idle_stop(self) -> None:
        """Stop the server as soon as it answers no question."""
        if self._stopping is None or self._stopping.done():
            self._stopping = self._loop.create_task(self._stop_when_idle())

    async def _stop_when_idle(self) -> None:
        async with self._lock:
            await self.stop_server()

    async def stop_server(self) -> None:
        """Stop the server now, and remove its HOME."""
        self._cancel_timer()
        server, self.server = self.server, None
        home, self._home = self._home, ""
        ending = asyncio.ensure_future(_end_server(server, home))
        await asyncio.shield(ending)

    async def aclose(self) -> None:
        """Stop the server, also in the middle of a question."""
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)
        await self.stop_server()

    def _cancel_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


async def _end_server(server: RunningLanguageServer | None, home: str) -> None:
    if server is not None:
        await server.aclose()
    if home:
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)


def make_kernel_closing_error() -> ToolError:
    """Return the error for a question while the kernel closes."""
    return ToolError("The kernel is closing, so language servers are not available. Stop here.", kind="unavailable")


class LanguageServerPool:
    """The language servers of one kernel, for its sessions.

    :param homes: returns the folder in which each server gets its own HOME; nothing else is in it
    :param environment: the variables of the operator's environment that programs get
    """

    def __init__(
        self,
        sandbox: Sandbox,
        homes: Callable[[], str],
        configured: Mapping[str, ConfiguredServer],
        environment: Mapping[str, str],
        times: ServerTimeouts | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.environment = environment
        self.times = times or ServerTimeouts()
        self.languages = merge_configured_languages(configured)
        self.is_closed = False
        self._homes = homes
        self._slots: dict[Hashable, ServerSlot] = {}
        self._is_swept = False

    def list_running_servers(self) -> list[RunningLanguageServer]:
        return [slot.server for slot in self._slots.values() if slot.server is not None]

    def find_language_of_file(self, path: str) -> LanguageDefinition | None:
        return next((one for one in self.languages if one.matches_file_name(path)), None)

    def get_or_create_slot(self, definition: LanguageDefinition, ground: LanguageServerEnvironment) -> ServerSlot:
        """Return the place of the server for a language and a session.

        :raises ToolError: ``unavailable`` if the kernel closes
        """
        if self.is_closed:
            raise make_kernel_closing_error()
        key = ground.make_sharing_key(definition)
        slot = self._slots.get(key)
        if slot is None:
            for other, idle in list(self._slots.items()):
                if idle.server is None and not idle.is_busy and len(self._slots) >= 4 * MAX_SERVERS:
                    del self._slots[other]
            slot = self._slots[key] = ServerSlot(self, definition, ground)
        return slot

    async def make_room(self) -> None:
        """Stop the server that was unused for longest, if there are too many."""
        running = [slot for slot in self._slots.values() if slot.server is not None and not slot.is_busy]
        if len(self.list_running_servers()) >= MAX_SERVERS and running:
            await min(running, key=lambda slot: slot.last_used_s).stop_server()

    def create_server_home(self) -> str:
        """Return a new, empty HOME for a server. The first one removes what a killed kernel left."""
        base = self._homes()
        if not self._is_swept:
            self._is_swept = True
            for entry in os.scandir(base):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
        return tempfile.mkdtemp(dir=base)

    async def aclose(self) -> None:
        """Stop all servers."""
        self.is_closed = True
        with contextlib.suppress(ToolError):
            await asyncio.gather(*(slot.aclose() for slot in self._slots.values()))
