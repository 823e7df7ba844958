"""A language server for a small language of words, with scripted misbehaviour: ``python scripted_language_server.py PLAN.json``.

It is a separate program and needs only Python. In its language, ``def NAME`` defines a word, and a line with ``BAD`` has a
problem. The plan lists its misbehaviour; see :class:`LanguageServerProgram`. A plan that changes on disk applies from the next
message on.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit


class LanguageServerProgram:
    """A language server over stdin and stdout, in a separate folder.

    :param plan: its misbehaviour, each for a method such as ``textDocument/hover``, or ``*`` for all: ``mute`` (never answers),
        ``dies`` (ends), ``garbage`` (writes other text), ``huge`` (announces a message of 1 GB), ``grows`` (allocates 3 GB), ``floods`` (reports 100 MB about other files), ``asks`` (sends a request with an id of 1 MB);
        ``progress``: it still indexes until it was asked so often; ``partial``: how often its references are incomplete
        without a word; ``writes``, ``reads`` and ``connects``: paths and ports that a hover tries; ``late``: diagnostics of the first version come instead of the present ones; ``silent``: no
        diagnostics; ``suffix``: that of its files, by default ``.words``; ``name``: that it says of itself; ``unversioned``: diagnostics without a version; ``pull``: diagnostics on request only;
        ``registers``: the same, said only after a document is open
    """

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.folder = folder / "language-server"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "server.py"
        self.path.write_bytes(Path(__file__).read_bytes())
        self._plan = self.folder / "plan.json"
        self.set_plan(**plan)

    def set_plan(self, **plan: Any) -> None:
        """Set the misbehaviour of the server from its next message on."""
        fresh = self._plan.with_suffix(".new")
        fresh.write_text(json.dumps(plan))
        fresh.replace(self._plan)

    @property
    def argv(self) -> tuple[str, ...]:
        return (sys.executable, "-I", str(self.path), str(self._plan))

    def settings_toml(self, language: str = "words", pattern: str = "*.words") -> str:
        """Return the server as a table of ``handrail.toml``."""
        command, files, folders = (json.dumps(one) for one in (self.argv, [pattern], [str(self.folder)]))
        return f"[language_servers.{language}]\ncommand = {command}\nfiles = {files}\nfolders = {folders}\n"


_documents: dict[str, tuple[int, str]] = {}
_asked = {"all": 0, "references": 0}
_root = ["/"]
_registered: list[bool] = []
_progress = [False]
_suffix = [".words"]
_first_diagnostics: dict[str, list[Any]] = {}


def _read_plan() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text())


def _send(message: dict[str, Any]) -> None:
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    sys.stdout.buffer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    sys.stdout.buffer.flush()


def _read_message() -> dict[str, Any]:
    length = 0
    while line := sys.stdin.buffer.readline().strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    if not length:
        sys.exit(0)
    return json.loads(sys.stdin.buffer.read(length))


def _misbehave(plan: dict[str, Any], method: str) -> bool:
    """Do what the plan says for a method; return whether the method then has no answer."""

    def wants(name: str) -> bool:
        return method in plan.get(name, ()) or "*" in plan.get(name, ())

    if wants("dies"):
        sys.stderr.write("the plan ends this server\n")
        sys.exit(3)
    if wants("garbage"):
        sys.stdout.write("Starting up, please wait...\n" * 400)
        sys.stdout.flush()
    if wants("huge"):
        sys.stdout.write("Content-Length: 1073741824\r\n\r\n{")
        sys.stdout.flush()
        time.sleep(600)
    if wants("floods"):
        for number in range(100):
            about: dict[str, Any] = {"uri": f"file:///flood/{number}", "diagnostics": [{"message": "x" * 1_000_000}]}
            _send({"method": "textDocument/publishDiagnostics", "params": about})
            begun = {"kind": "begin", "title": "x" * 1_000_000}
            _send({"method": "$/progress", "params": {"token": "t" * 1_000_000, "value": begun}})
            _send({"method": "$/progress", "params": {"token": "t" * 1_000_000, "value": {"kind": "end"}}})
    if wants("asks"):
        _send({"id": "x" * 1_000_000, "method": "workspace/configuration", "params": {}})
    if wants("grows"):
        kept = [b"x" * (1 << 20) for _ in range(3 * 1024)]
        time.sleep(600)
        return bool(kept)
    return wants("mute")


def _list_texts() -> dict[str, str]:
    """Return the text of each file by URI, as a server knows it."""
    found: dict[str, str] = {}
    for folder, _, names in os.walk(_root[0]):
        for name in names:
            if name.endswith(_suffix[0]):
                path = Path(folder, name)
                uri = path.as_uri()
                try:
                    found[uri] = path.read_text(errors="replace")
                except OSError:
                    continue
    return {**found, **{uri: text for uri, (_, text) in _documents.items()}}


def _find(word: str, pattern: str = r"\b{}\b") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for uri, text in sorted(_list_texts().items()):
        for number, line in enumerate(text.split("\n")):
            for match in re.finditer(pattern.format(re.escape(word)), line):
                found.append({"uri": uri, "range": _range(number, match.end() - len(word), match.end())})
    return found


def _range(line: int, start: int, end: int) -> dict[str, Any]:
    return {"start": {"line": line, "character": start}, "end": {"line": line, "character": end}}


def _word_at(params: dict[str, Any]) -> str:
    line: int = params["position"]["line"]
    at: int = params["position"]["character"]
    text = _list_texts()[str(params["textDocument"]["uri"])].split("\n")[line]
    return next((match.group() for match in re.finditer(r"\w+", text) if match.start() <= at <= match.end()), "")


def _diagnose(uri: str) -> list[dict[str, Any]]:
    lines = _documents[uri][1].split("\n")
    return [
        {"range": _range(number, 0, len(line)), "severity": 1, "message": f"bad line: {line}"}
        for number, line in enumerate(lines)
        if "BAD" in line
    ]


def _publish(plan: dict[str, Any], uri: str) -> None:
    version = _documents[uri][0]
    found = _diagnose(uri)
    first = _first_diagnostics.setdefault(uri, found)
    if plan.get("registers") and not _registered:
        _registered.append(True)
        entry = {"id": "diagnostics", "method": "textDocument/diagnostic"}
        _send({"id": "register", "method": "client/registerCapability", "params": {"registrations": [entry]}})
    if any(plan.get(one) for one in ("silent", "pull", "registers")):
        return
    if plan.get("late") and version > 1:
        version, found = 1, first
    params: dict[str, Any] = {"uri": uri, "diagnostics": found}
    if not plan.get("unversioned"):
        params["version"] = version
    _send({"method": "textDocument/publishDiagnostics", "params": params})


def _list_document_symbols(uri: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, line in enumerate(_list_texts()[uri].split("\n")):
        if match := re.match(r"def (\w+)", line):
            span = _range(number, match.start(1), match.end(1))
            found.append({"name": match[1], "kind": 12, "range": span, "selectionRange": span})
    return found


def _try_actions(plan: dict[str, Any]) -> list[str]:
    """Try what a server must not be able to do, and return what happened."""
    messages: list[str] = []
    for path in plan.get("writes", ()):
        try:
            Path(path).write_text("written by a server")
            messages.append(f"wrote {path}")
        except OSError as error:
            messages.append(f"cannot write: {error.strerror}")
    for path in plan.get("reads", ()):
        try:
            messages.append(f"read {Path(path).read_text()}")
        except OSError as error:
            messages.append(f"cannot read: {error.strerror}")
    for port in plan.get("connects", ()):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            messages.append("connected")
        except OSError:
            messages.append("cannot connect")
    return messages


def _answer(plan: dict[str, Any], method: str, params: dict[str, Any]) -> Any:
    match method:
        case "initialize":
            _root[0] = unquote(urlsplit(str(params["rootUri"])).path)
            _suffix[0] = str(plan.get("suffix", _suffix[0]))
            pulls = {"diagnosticProvider": {"interFileDependencies": True}} if plan.get("pull") else {}
            provides = {"positionEncoding": "utf-32", "textDocumentSync": 1, **pulls}
            return {"capabilities": provides, "serverInfo": {"name": str(plan.get("name", "words"))}}
        case "textDocument/definition":
            return _find(_word_at(params), r"^def {}\b")
        case "textDocument/references":
            found = _find(_word_at(params))
            _asked["references"] += 1
            return found[:1] if _asked["references"] <= plan.get("partial", 0) else found
        case "textDocument/hover":
            tried = "".join(f"; {one}" for one in _try_actions(plan))
            return {"contents": {"kind": "plaintext", "value": f"the word {_word_at(params)}{tried}"}}
        case "textDocument/documentSymbol":
            return _list_document_symbols(params["textDocument"]["uri"])
        case "workspace/symbol":
            found = _find(params["query"], r"^def {}\b")
            return [{"name": params["query"], "kind": 12, "location": one} for one in found]
        case "textDocument/diagnostic":
            return {"kind": "full", "items": _diagnose(params["textDocument"]["uri"])}
        case "textDocument/rename":
            changes: dict[str, list[Any]] = {}
            for one in _find(_word_at(params)):
                changes.setdefault(one["uri"], []).append({"range": one["range"], "newText": params["newName"]})
            return {"changes": changes}
        case _:
            return None


def _note(plan: dict[str, Any], method: str, params: dict[str, Any]) -> None:
    """Handle a notification."""
    if method == "exit":
        sys.exit(0)
    if method == "initialized" and plan.get("progress"):
        _progress[0] = True
        _send({"id": "create", "method": "window/workDoneProgress/create", "params": {"token": "index"}})
        value = {"kind": "begin", "title": "Indexing", "percentage": 40}
        _send({"method": "$/progress", "params": {"token": "index", "value": value}})
    if method in ("textDocument/didOpen", "textDocument/didChange"):
        document = params["textDocument"]
        text = document["text"] if "text" in document else params["contentChanges"][0]["text"]
        _documents[document["uri"]] = document["version"], text
        _publish(plan, document["uri"])
    if method == "textDocument/didClose":
        _documents.pop(params["textDocument"]["uri"], None)


def _end_progress(plan: dict[str, Any]) -> None:
    _asked["all"] += 1
    if _progress[0] and _asked["all"] > plan["progress"]:
        _progress[0] = False
        _send({"method": "$/progress", "params": {"token": "index", "value": {"kind": "end"}}})


def main() -> None:
    """Serve until stdin is closed."""
    while True:
        message = _read_message()
        if "method" not in message:
            continue
        plan, method = _read_plan(), message["method"]
        params = cast("dict[str, Any]", message.get("params") or {})
        if "id" not in message:
            _note(plan, method, params)
        elif not _misbehave(plan, method):
            _send({"id": message["id"], "result": _answer(plan, method, params)})
            _end_progress(plan)


if __name__ == "__main__":
    main()
