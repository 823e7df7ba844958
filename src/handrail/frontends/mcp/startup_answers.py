"""The answers to a client's first requests: its handshake and its request for the tools, in their simplest form.

The kernel gives the answers as soon as it is open. Some clients wait less than a second for a server, and Python takes that
long to load a kernel on a busy machine. So each start stores its answers, and the next start of the same command sends them
while the kernel is loaded. The server then receives the same requests. If it would have listed other tools, the client gets a
notification that the list has changed. A stored list gives no rights: calls wait for the kernel.

This module imports nothing that takes long to load.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import orjson

from handrail.contract.struct import Struct

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
STATELESS_VERSION = "2026-07-28"
"""The protocol versions whose first requests are answered here: the handshake versions and the stateless one."""
_ENVELOPE = "io.modelcontextprotocol/"
_CAPABILITIES = {"roots", "sampling", "elicitation", "experimental", "extensions", "tasks"}
_MAX_STORED_BYTES = 8 * 1024 * 1024
_MAX_FILES = 16
"""The files of one workspace, each for one set of options and variables."""
_MAX_EARLY_BYTES = 256 * 1024
"""The bytes of a client that are read before the kernel is open."""
_PIECE = 64 * 1024
_Json = dict[str, Any]


class StartupContent(Protocol):
    """The content of the first answers."""

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The server's capabilities, name and instructions."""
        ...

    @property
    def extensions(self) -> Mapping[str, Any]:
        """The protocol extensions, which only the stateless version declares."""
        ...

    @property
    def tools(self) -> Mapping[str, Any]:
        """The first page of the list of tools."""
        ...


class StoredContent(Struct, frozen=True):
    """The content of the answers of an earlier start."""

    server_info: dict[str, Any]
    extensions: dict[str, Any]
    tools: dict[str, Any]

    @staticmethod
    def copy(content: StartupContent) -> StoredContent:
        """Return the present content."""
        return StoredContent(dict(content.server_info), dict(content.extensions), dict(content.tools))


class HandshakeResponder:
    """A responder to the first requests of one client.

    :param content: returns the content of the answers
    """

    def __init__(self, content: Callable[[], StartupContent]) -> None:
        self._content = content
        self.received: list[str] = []
        """All lines of the client so far."""
        self.answered: dict[object, _Json] = {}
        """The answers by request ID."""
        self.client_info: _Json | None = None
        """The client's description: the handshake, or the ``_meta`` of each stateless request."""

    def answer_request(self, message: _Json) -> _Json | None:
        """Return the result of a request as the server would give it, or None to leave it to the server.

        :param message: the last of the received lines
        """
        method, params = message.get("method"), message.get("params", {})
        if not is_request_id(message.get("id")) or message["id"] in self.answered or not isinstance(params, dict):
            return None
        given = cast("_Json", params)
        try:
            if method == "initialize":
                answer = self._initialize(given)
            elif method == "server/discover":
                answer = self._discover(given)
            else:
                answer = self._list(given) if method == "tools/list" else None
        except (orjson.JSONEncodeError, RecursionError):
            return None
        if answer is not None:
            self.answered[message["id"]] = answer
        return answer

    def _initialize(self, params: _Json) -> _Json | None:
        if self.received and all(_is_discovery(line) for line in self.received[:-1]):
            # The answer was too late for the client, or not usable. It begins again, with a handshake.
            del self.received[:-1]
            self.client_info = None
        if self.client_info is not None or params.keys() != {"protocolVersion", "capabilities", "clientInfo"}:
            return None
        wanted = params["protocolVersion"]
        if wanted not in HANDSHAKE_VERSIONS or not _is_plain_client(params["clientInfo"], params["capabilities"]):
            return None
        self.client_info = params
        return {"protocolVersion": wanted, **self._content().server_info}

    def _discover(self, params: _Json) -> _Json | None:
        if params.keys() != {"_meta"} or not self._is_same_client(params["_meta"]):
            return None
        content = self._content()
        capabilities = {**content.server_info["capabilities"], "extensions": content.extensions}
        about = {"capabilities": capabilities, "instructions": content.server_info["instructions"]}
        return self._complete_result({"supportedVersions": [STATELESS_VERSION], **about})

    def _list(self, params: _Json) -> _Json | None:
        newer = self.client_info is None or "protocolVersion" not in self.client_info
        if newer and (params.keys() != {"_meta"} or not self._is_same_client(params["_meta"])):
            return None
        if not newer and (params.keys() - {"_meta"} or not is_plain_meta(params.get("_meta", {}))):
            return None
        page = dict(self._content().tools)
        return self._complete_result(page) if newer else page

    def _complete_result(self, result: _Json) -> _Json:
        """Return a result with the members that every stateless result has."""
        stamp = {f"{_ENVELOPE}serverInfo": self._content().server_info["serverInfo"]}
        return {"cacheScope": "private", "resultType": "complete", "ttlMs": 0, **result, "_meta": stamp}

    def _is_same_client(self, envelope: object) -> bool:
        """Return whether a stateless request comes from the known client, which the first request sets."""
        if not isinstance(envelope, dict) or (self.client_info is not None and envelope != self.client_info):
            return False
        envelope_fields = cast("_Json", envelope)
        if envelope_fields.keys() != {
            f"{_ENVELOPE}{key}" for key in ("protocolVersion", "clientInfo", "clientCapabilities")
        }:
            return False
        client, capabilities = (
            envelope_fields[f"{_ENVELOPE}clientInfo"],
            envelope_fields[f"{_ENVELOPE}clientCapabilities"],
        )
        if envelope_fields[f"{_ENVELOPE}protocolVersion"] != STATELESS_VERSION or not _is_plain_client(
            client, capabilities
        ):
            return False
        self.client_info = envelope_fields
        return True


class StartupCache:
    """The file with the answers of the last start of one command.

    :param path: the file, in the state folder of the workspace
    :param fingerprint: what the answers follow from, apart from servers and the machine
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._loaded: StoredContent | None = None

    def load(self) -> StoredContent | None:
        """Return the stored answers; None if there are none for this configuration and this version of Handrail."""
        from handrail.store.operator_decisions import read_private_file

        try:
            stored = orjson.loads(read_private_file(self._path, _MAX_STORED_BYTES) or b"")
            if stored["fingerprint"] != self._fingerprint:
                return None
            found = StoredContent(stored["server_info"], stored["extensions"], stored["tools"])
            _check_content(found)
        except (ValueError, TypeError, KeyError):
            return None  # the kernel answers, and stores its answers again
        self._loaded = found
        return found

    def save(self, content: StoredContent) -> None:
        """Store the content of the answers, if it differs from what was loaded. Blocks, so call it in a thread.

        The oldest files of commands with other options are deleted.
        """
        from handrail.contract.errors import StartError
        from handrail.store.operator_decisions import write_private_file

        if content == self._loaded:
            return
        fields = {"server_info": content.server_info, "extensions": content.extensions, "tools": content.tools}
        with contextlib.suppress(OSError, StartError, orjson.JSONEncodeError, RecursionError):
            write_private_file(self._path, orjson.dumps({"fingerprint": self._fingerprint, **fields}))
            files = sorted(self._path.parent.glob("mcp-start-*.json"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-_MAX_FILES]:
                file.unlink(missing_ok=True)


def locate_startup_cache(
    workspace: str, state: str | None, config: str | None, options: Sequence[object], *, allow_home: bool
) -> StartupCache | None:
    """Return the cache of a command's first answers; None if its workspace or state folder is unsuitable.

    :param options: the other options of the command from which its answers follow
    """
    from handrail.contract.errors import HandrailError
    from handrail.store.state_folders import default_config_folder, locate_folders

    try:
        folders = locate_folders(workspace, state, allow_home=allow_home)
    except (HandrailError, OSError):
        return None
    configured = Path(config) if config is not None else default_config_folder() / "handrail.toml"
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("HANDRAIL_"))
    command = hashlib.sha256(repr((options, str(configured), variables, sys.version)).encode("utf-8", "replace"))
    trusted, approved = folders.workspace_state_folder / "trust.json", folders.state / "sources"
    files = (configured, folders.workspace / "handrail.toml", trusted, approved, __file__)
    return StartupCache(
        folders.workspace_state_folder / f"mcp-start-{command.hexdigest()[:16]}.json",
        repr([_describe_file(file) for file in files]),
    )


def _describe_file(file: str | Path) -> tuple[int, ...]:
    try:
        status = os.stat(file)  # noqa: PTH116 - one import less
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


class EarlyAnswers:
    """The answers that a client has had before the kernel was open, and what it sent.

    :param consumed: the bytes of the client
    :param given: the answers by request ID
    :param unwritten: the end of an answer that the client has not taken yet
    """

    def __init__(self) -> None:
        self.consumed = bytearray()
        self.given: dict[object, _Json] = {}
        self.unwritten = b""
        self.cache: StartupCache | None = None


@contextlib.contextmanager
def answer_from_cache(cache: StartupCache | None) -> Generator[Callable[[], EarlyAnswers]]:
    """Answer the first requests on stdin with stored answers, in a thread, until the yielded function is called.

    Without stored answers, or if stdin is a terminal or a file, nothing is read.
    """
    early = EarlyAnswers()
    early.cache = cache
    content = None if cache is None else cache.load()
    if content is None or sys.platform == "win32" or not (_is_pipe(0) and _is_pipe(1)):
        yield lambda: early
        return
    stopping, stop = os.pipe()
    thread = threading.Thread(
        target=_answer_lines, args=(early, HandshakeResponder(lambda: content), stopping), name="mcp: early answers"
    )
    thread.start()

    def finish() -> EarlyAnswers:
        if thread.is_alive():
            os.write(stop, b"s")
            thread.join()
        return early

    try:
        yield finish
    finally:
        finish()
        os.close(stopping)
        os.close(stop)


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _answer_lines(early: EarlyAnswers, responder: HandshakeResponder, stopping: int) -> None:
    """Answer the lines of stdin up to the first that is left to the kernel."""
    done = 0
    while len(early.consumed) < _MAX_EARLY_BYTES:
        try:
            if not _wait_until_ready(0, select.POLLIN, stopping):
                return
            piece = os.read(0, _PIECE)
        except BlockingIOError:
            continue
        except OSError:
            return
        early.consumed += piece
        while (end := early.consumed.find(b"\n", done)) >= 0:
            line, done = bytes(early.consumed[done : end + 1]), end + 1
            if not _answer_line(early, responder, line, stopping):
                return
        if not piece:  # the reader after this one meets the same end
            return


def _answer_line(early: EarlyAnswers, responder: HandshakeResponder, line: bytes, stopping: int) -> bool:
    """Answer one line; return False if all further lines are left to the kernel."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return False
    message = parse_message(text)
    if message is None:
        return False
    responder.received.append(text)
    answer = responder.answer_request(message)
    if answer is None:
        return message.get("method") == "notifications/initialized"
    early.given[message["id"]] = answer
    left = memoryview(orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}) + b"\n")
    try:
        while left:
            if not _wait_until_ready(1, select.POLLOUT, stopping):
                return False
            # A pipe that is ready takes this many bytes. More could block the thread until the client reads.
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(1, left[: select.PIPE_BUF]) :]
    except OSError:
        return False
    finally:
        early.unwritten = bytes(left)
    return True


def _wait_until_ready(descriptor: int, event: int, stopping: int) -> bool:
    """Wait until a descriptor is ready; return False if the thread is stopped first."""
    poll = select.poll()
    poll.register(descriptor, event)
    poll.register(stopping, select.POLLIN)
    return all(ready != stopping for ready, _ in poll.poll())


def _check_content(content: StoredContent) -> None:
    """Check the form of stored content.

    :raises TypeError: if it is not what :meth:`StartupCache.save` stores
    :raises KeyError: likewise
    """
    about = content.server_info
    if not all(isinstance(one, dict) for one in (about, content.extensions, content.tools, about["capabilities"])):
        raise TypeError
    if not isinstance(about["instructions"], str) or not isinstance(about["serverInfo"], dict):
        raise TypeError
    if not isinstance(content.tools["tools"], list):
        raise TypeError


def _is_discovery(text: str) -> bool:
    message = parse_message(text)
    return message is not None and message.get("method") == "server/discover"


def parse_message(request: str) -> _Json | None:
    """Return the line as a JSON-RPC message, or None."""
    with contextlib.suppress(orjson.JSONDecodeError):
        message: object = orjson.loads(request)
        if isinstance(message, dict):
            found = cast("_Json", message)
            known = found.keys() <= {"jsonrpc", "id", "method", "params", "result", "error"}
            return found if known and found.get("jsonrpc") == "2.0" else None
    return None


def is_request_id(given: object) -> bool:
    """Return whether a value can be the ID of a request."""
    return isinstance(given, (int, str)) and not isinstance(given, bool)


def is_plain_meta(meta: object) -> bool:
    """Return whether the ``_meta`` of a request has at most a progress token."""
    return (
        isinstance(meta, dict) and meta.keys() <= {"progressToken"} and all(map(is_request_id, meta.values()))  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
    )


def _is_plain_client(about: object, capabilities: object) -> bool:
    """Return whether a client describes itself in the simplest form, which all versions accept."""
    if not isinstance(about, dict) or not isinstance(capabilities, dict):
        return False
    texts, can = cast("_Json", about), cast("_Json", capabilities)
    if not {"name", "version"} <= texts.keys() or not all(isinstance(one, str) for one in texts.values()):
        return False
    return can.keys() <= _CAPABILITIES and all(map(_is_plain_object, can.values()))


def _is_plain_object(value: object) -> bool:
    """Return whether a value is an object of such objects, apart from boolean ``listChanged`` members."""
    if not isinstance(value, dict):
        return False
    items = cast("_Json", value).items()
    return all(isinstance(one, bool) if key == "listChanged" else _is_plain_object(one) for key, one in items)
