"""One running language server: its start, its documents, and questions that it answers for the present files.

A server keeps its own picture of the files. So before each question, it gets every change since the last one: open documents
with their new text, other files as changed on disk. It is replaced when a file appears that rules hide, which its sandbox does
not mask, and when the installed packages change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process
from handrail.contract.struct import Struct, field
from handrail.runtime.language_servers.code_positions import PositionEncoding, convert_path_to_uri, split_lines
from handrail.runtime.language_servers.server_connection import LanguageServerConnection, ServerErrorResponse
from handrail.runtime.language_servers.server_programs import LanguageDefinition
from handrail.runtime.language_servers.workspace_files import (
    FileChanges,
    FileStamp,
    WorkspaceFileSnapshot,
    read_file_stamp,
)

UNUSED_QUESTIONS = 20
"""After so many questions without use, a document is closed."""
_CHECK_AGAIN_S = 0.3
_CHANGES_PER_MESSAGE = 500
_REPEATED_CODES = (-32801, -32802, -32800, -32002)
"""Errors after which a request is sent again: the content changed, or the server is not ready."""
_MOST_REPEATS = 5
_MAX_NAME = 40
_CREATED, _CHANGED, _DELETED = 1, 2, 3
_FULL_TEXT: dict[str, Any] = {"contentFormat": ["markdown", "plaintext"]}
_CAPABILITIES: dict[str, Any] = {
    "general": {"positionEncodings": ["utf-32", "utf-16"]},
    "offsetEncoding": ["utf-32", "utf-16"],
    "window": {"workDoneProgress": True},
    "workspace": {
        "workspaceFolders": True,
        "configuration": True,
        "didChangeWatchedFiles": {"dynamicRegistration": True, "relativePatternSupport": True},
        "symbol": {},
        "workspaceEdit": {"documentChanges": True, "resourceOperations": ["create", "rename", "delete"]},
    },
    "textDocument": {
        "synchronization": {},
        "hover": _FULL_TEXT,
        "definition": {"linkSupport": True},
        "references": {},
        "documentSymbol": {"hierarchicalDocumentSymbolSupport": True},
        "diagnostic": {"dynamicRegistration": True},
        "publishDiagnostics": {"versionSupport": True},
        "rename": {"prepareSupport": True},
    },
}


class ServerTimeouts(Struct, frozen=True):
    """The times of a server, in seconds.

    :param start_s: how long a server may take to initialise
    :param question_s: how long all requests of one question may take
    :param settling_s: how long a question waits for a server that still indexes
    :param pushed_s: how long a question waits for diagnostics that the server sends by itself
    :param queue_s: how long a question waits for other questions
    :param idle_s: after this time without a question, a server is stopped
    :param failed_s: how long a server that failed twice is not started again
    """

    start_s: float = 30.0
    question_s: float = 60.0
    settling_s: float = 10.0
    pushed_s: float = 3.0
    queue_s: float = 60.0
    idle_s: float = 300.0
    failed_s: float = 60.0


class StaleServerError(Exception):
    """The server must be replaced before it answers: its sandbox or its packages are of another time."""


class OpenDocument(Struct):
    """A document that the server has open.

    :param stamp: of the file when ``text`` was read
    :param last_question: the number of the last question that used it
    """

    path: str
    uri: str
    text: str
    stamp: FileStamp | None
    last_question: int
    version: int = 1
    lines: list[str] = field(default_factory=list[str])


class RunningLanguageServer:
    """A running server with its documents, for one question at a time.

    :param files: the files of the workspace, looked at when the server was started
    :param read_text: returns the text of a file; raises ToolError if it cannot be read
    """

    def __init__(
        self,
        definition: LanguageDefinition,
        process: Process,
        root: str,
        files: WorkspaceFileSnapshot,
        read_text: Callable[[str], str],
        times: ServerTimeouts,
    ) -> None:
        self.definition = definition
        self.name = definition.language
        self.files = files
        self.documents: dict[str, OpenDocument] = {}
        self.encoding: PositionEncoding = "utf-16"
        self._root = root
        self._read_text = read_text
        self._times = times
        self._hidden = files.hidden
        self._packages = files.packages
        self._pulls = False
        self._provides: dict[str, Any] = {}
        self._question = 0
        self._deadline = 0.0
        self._is_settled = False
        self._fresh: dict[str, int] = {}
        """For each file with diagnostics that are current: how many changes the server had got then."""
        self._changes_sent = 0
        self.connection = LanguageServerConnection(process, self._answer_request)

    async def initialize(self, program: str) -> None:
        """Initialise the server.

        :raises TimeoutError: if it does not answer
        """
        self.name = Path(program).name
        uri = convert_path_to_uri(self._root)
        found = await self.connection.request(
            "initialize",
            {
                "processId": None,
                "clientInfo": {"name": "handrail"},
                "rootUri": uri,
                "rootPath": self._root,
                "workspaceFolders": [{"uri": uri, "name": Path(self._root).name}],
                "capabilities": _CAPABILITIES,
            },
            self._times.start_s,
        )
        answer = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        provides: Any = answer.get("capabilities")
        self._provides = cast("dict[str, Any]", provides) if isinstance(provides, dict) else {}
        encoding = self._provides.get("positionEncoding", answer.get("offsetEncoding"))
        if encoding in ("utf-8", "utf-16", "utf-32"):
            self.encoding = encoding
        info: Any = answer.get("serverInfo")
        if isinstance(info, dict) and isinstance(name := cast("dict[str, Any]", info).get("name"), str) and name:
            self.name = name[:_MAX_NAME]
        self._pulls = bool(self._provides.get("diagnosticProvider"))
        self.connection.notify("initialized", {})

    def _answer_request(self, method: str, params: Any) -> Any:
        """Answer a request of the server: it changes nothing and asks the user nothing."""
        fields = cast("dict[str, Any]", params) if isinstance(params, dict) else {}
        if method == "workspace/configuration":
            items: Any = fields.get("items")
            return [None] * min(len(cast("list[Any]", items)), 100) if isinstance(items, list) else []
        if method == "workspace/workspaceFolders":
            return [{"uri": convert_path_to_uri(self._root), "name": Path(self._root).name}]
        if method == "client/registerCapability":
            several: Any = fields.get("registrations")
            for one in cast("list[Any]", several) if isinstance(several, list) else []:
                if isinstance(one, dict) and cast("dict[str, Any]", one).get("method") == "textDocument/diagnostic":
                    self._pulls = True
            return None
        if method == "workspace/applyEdit":
            return {"applied": False, "failureReason": "Handrail only previews changes."}
        known = ("window/workDoneProgress/create", "window/showMessageRequest", "client/unregisterCapability")
        refreshes = method.startswith("workspace/") and method.endswith("/refresh")
        return None if method in known or refreshes else NotImplemented

    # Questions.

    async def sync_files_before_request(self) -> None:
        """Tell the server every change of the files since the last question.

        :raises StaleServerError: if the server must be replaced first
        """
        self._question += 1
        self._deadline = asyncio.get_running_loop().time() + self._times.question_s
        changes = await asyncio.to_thread(self.files.look)
        if not self.files.hidden.items() <= self._hidden.items() or self.files.packages != self._packages:
            raise StaleServerError
        if not changes.is_empty:
            await self._send_changes(changes)
        for document in list(self.documents.values()):
            if document.path not in self.files.stamps and read_file_stamp(document.path) != document.stamp:
                await self._refresh(document)  # a file in a folder that is not compared, such as one of packages
            if self._question - document.last_question > UNUSED_QUESTIONS and document.path in self.documents:
                self._close(document)

    async def _send_changes(self, changes: FileChanges) -> None:
        for path in (*changes.changed, *changes.created):
            if (document := self.documents.get(path)) is not None:
                await self._refresh(document)
        for path in changes.deleted:
            if (document := self.documents.get(path)) is not None:
                self._close(document)
        events = [
            {"uri": convert_path_to_uri(path), "type": kind}
            for kind, paths in ((_DELETED, changes.deleted), (_CREATED, changes.created), (_CHANGED, changes.changed))
            for path in paths
        ]
        for at in range(0, len(events), _CHANGES_PER_MESSAGE):
            some = events[at : at + _CHANGES_PER_MESSAGE]
            self.connection.notify("workspace/didChangeWatchedFiles", {"changes": some})
        self._changes_sent += 1

    async def _refresh(self, document: OpenDocument) -> None:
        stamp = read_file_stamp(document.path)
        try:
            text = await asyncio.to_thread(self._read_text, document.path)
        except ToolError:
            self._close(document)
            return
        document.stamp = stamp
        if text != document.text:
            self._send_text(document, text)

    def _send_text(self, document: OpenDocument, text: str) -> None:
        document.text, document.lines = text, split_lines(text)
        document.version += 1
        self._changes_sent += 1
        # `forceRebuild` is clangd's: without it, a text that did not change has no new diagnostics.
        self.connection.notify(
            "textDocument/didChange",
            {
                "textDocument": {"uri": document.uri, "version": document.version},
                "contentChanges": [{"text": text}],
                "forceRebuild": True,
            },
        )

    def _close(self, document: OpenDocument) -> None:
        del self.documents[document.path]
        self._fresh.pop(document.path, None)
        self.connection.notify("textDocument/didClose", {"textDocument": {"uri": document.uri}})
        self.connection.diagnostics.pop(document.uri, None)

    async def open_document(self, path: str) -> OpenDocument:
        """Return the document of a file, which the server has open from now on.

        :raises ToolError: if the file cannot be read
        """
        if (document := self.documents.get(path)) is None:
            stamp = read_file_stamp(path)
            text = await asyncio.to_thread(self._read_text, path)
            document = OpenDocument(
                path, convert_path_to_uri(path), text, stamp, self._question, lines=split_lines(text)
            )
            self.documents[path] = document
            language = self.definition.get_language_id(path)
            about = {"uri": document.uri, "languageId": language, "version": 1, "text": text}
            self.connection.notify("textDocument/didOpen", {"textDocument": about})
            self._changes_sent += 1
        document.last_question = self._question
        return document

    def have_files_changed(self, paths: Sequence[str]) -> bool:
        """Return whether one of these files is not as it was when the question began."""
        for path in paths:
            document = self.documents.get(path)
            known = self.files.stamps.get(path) or (document.stamp if document is not None else None)
            if known is not None and read_file_stamp(path) != known:
                return True
        return False

    @property
    def _left_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    async def ask(self, method: str, params: object) -> Any:
        """Send a request, and again if the server asks for that.

        :raises ServerErrorResponse: if the server answers with another error
        """
        for attempt in range(_MOST_REPEATS + 1):
            try:
                return await self.connection.request(method, params, max(self._left_s, 0.001))
            except ServerErrorResponse as refusal:
                if refusal.code not in _REPEATED_CODES or attempt == _MOST_REPEATS:
                    raise
            await self.connection.wait_for_change(_CHECK_AGAIN_S)
        raise AssertionError

    async def ask_all(self, method: str, params: object) -> tuple[Any, str]:
        """Send a request, and wait until the server knows all files; return the result and why it may be incomplete.

        A server that has just started may answer before it has read all files, and not say so. So the first requests are
        sent until two results are equal.
        """
        loop = asyncio.get_running_loop()
        until = min(loop.time() + self._times.settling_s, self._deadline - 1)
        result = await self.ask(method, params)
        while self.connection.progress or not self._is_settled:
            left = until - loop.time()
            if left <= 0:
                return result, self._explain_unsettled()
            await self.connection.wait_for_change(min(_CHECK_AGAIN_S, left))
            if self.connection.progress:
                continue
            if (again := await self.ask(method, params)) == result and not self.connection.progress:
                self._is_settled = True
            result = again
        if not self.files.is_complete:
            return (
                result,
                f"the workspace has more than {len(self.files.stamps):,} files, and changes of the rest are unknown",
            )
        return result, ""

    def _explain_unsettled(self) -> str:
        tasks = "; ".join(map(str, list(self.connection.progress.values())[:3]))
        return (
            f"{self.name} is still indexing ({tasks}). Ask again later"
            if tasks
            else (f"{self.name} has just started and is still collecting results. Ask again later")
        )

    async def fetch_diagnostics(self, document: OpenDocument) -> tuple[list[Any], str]:
        """Return the diagnostics of a document, and why they may be old; empty if they are current."""
        if not self._pulls and (pushed := await self._wait_for_pushed(document)) is not None:
            return pushed
        found = await self.ask("textDocument/diagnostic", {"textDocument": {"uri": document.uri}})
        items: Any = cast("dict[str, Any]", found).get("items") if isinstance(found, dict) else None
        return (cast("list[Any]", items) if isinstance(items, list) else []), ""

    async def _wait_for_pushed(self, document: OpenDocument) -> tuple[list[Any], str] | None:
        """Wait for the diagnostics of the present version; return None if they have to be requested.

        A server may say only after its start that it answers requests for them.
        If anything changed since the last ones, the text is sent again: only then does a new version tell them apart.
        """
        if (known := self._fresh.get(document.path)) is not None and known != self._changes_sent:
            self._send_text(document, document.text)
        before = self.connection.diagnostics_count
        until = asyncio.get_running_loop().time() + self._times.pushed_s
        while True:
            found = self.connection.diagnostics.get(document.uri)
            if found is not None and found.version == document.version:
                self._fresh[document.path] = self._changes_sent
                return found.diagnostics, ""
            if self._pulls:
                return None
            left = until - asyncio.get_running_loop().time()
            if left <= 0 or self.connection.lost_reason is not None:
                break
            await self.connection.wait_for_change(left)
        self._fresh[document.path] = -1
        if found is not None and found.version is None and found.number > before:
            return found.diagnostics, f"{self.name} does not say for which version of the file they are"
        return [], f"{self.name} sent none for the current content within {self._times.pushed_s:.0f} s. Ask again"

    async def aclose(self) -> None:
        """End the server. A polite request comes first, so that it can save its index."""
        if self.connection.lost_reason is None:
            with contextlib.suppress(Exception):
                await self.connection.request("shutdown", None, 0.5)
                self.connection.notify("exit", None)
        await self.connection.aclose()
