"""A fake internet: DNS, web servers and listeners that record connections. Only for the outer sandbox."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.attacks.first import INTERNET, METADATA, PRIVATE

ALLOWED, OTHER = "allowed.example", "other.example"
REBINDING = "rebinding.example"
"""A name with a good address the first time that it is asked for, and the machine's own every time after."""
_NAMES = {
    ALLOWED: INTERNET[0],
    OTHER: INTERNET[1],
    "metadata.example": METADATA,
    "private.example": PRIVATE,
    "inside.example": "127.0.0.1",
}
_ARRIVED = "/arrived"
_BOMB_BYTES = 512 * 1024 * 1024

_arrived: list[str] = []
_asked: dict[str, int] = {}


def serve(sockets: Mapping[str, socket.socket]) -> None:
    """Begin to serve, in threads that end with the process."""
    if not sockets:
        return
    web = ThreadingHTTPServer(("", 0), _Web, bind_and_activate=False)
    web.socket.close()
    web.socket = sockets["web"]
    web.server_name, web.server_port = "web", 80
    for work in (web.serve_forever, lambda: _names(sockets["names"])):
        threading.Thread(target=work, daemon=True).start()
    for name in ("tls", "other"):
        threading.Thread(target=_listen, args=(name, sockets[name]), daemon=True).start()


def arrived() -> list[str]:
    """Return the new connections as ``kind what``. For code outside Handrail's sandbox.

    :raises OSError: where there is no fake internet
    """
    with urllib.request.urlopen(f"http://{INTERNET[0]}{_ARRIVED}", timeout=10) as answer:
        return json.load(answer)


class _Web(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == _ARRIVED:
            told = json.dumps(list(_arrived)).encode()
            _arrived.clear()
            self._answer(200, told)
            return
        _arrived.append(f"web {self.headers.get('Host')} {self.path} {self.headers.get('Authorization', '')}".strip())
        length = int(self.headers.get("Content-Length") or 0)
        if length:
            _arrived.append(f"body {self.rfile.read(min(length, 1 << 20)).decode('latin-1')}")
        url = urlsplit(self.path)
        match url.path:
            case "/redirect":
                self._answer(302, b"", Location=unquote(parse_qs(url.query)["to"][0]))
            case "/bomb":
                piece = gzip.compress(bytes(_BOMB_BYTES // 8))
                self._answer(200, piece * 8, **{"Content-Encoding": "gzip"})
            case "/endless":
                self._endless(b"x" * 65_536)
            case "/slow":
                self._endless(b"x", pause=threading.Event())
            case _:
                self._answer(200, b"hello from " + str(self.headers.get("Host")).encode())

    do_POST = do_PUT = do_GET

    def _answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # whoever asked has had enough
            self.close_connection = True

    def _endless(self, piece: bytes, pause: threading.Event | None = None) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        try:
            while pause is None or not pause.wait(0.2):
                self.wfile.write(piece)
        except OSError:
            pass


def _listen(name: str, one: socket.socket) -> None:
    while True:
        connection, _ = one.accept()
        _arrived.append(f"{name} connected")
        threading.Thread(target=_heard, args=(name, connection), daemon=True).start()


def _heard(name: str, connection: socket.socket) -> None:
    with connection:
        connection.settimeout(20)
        try:
            if said := connection.recv(4096):
                _arrived.append(f"{name} {said[:200]!r}")
        except OSError:
            pass


def _names(one: socket.socket) -> None:
    while True:
        question, whom = one.recvfrom(2048)
        if (answer := _named(question)) is not None:
            one.sendto(answer, whom)


def _named(question: bytes) -> bytes | None:
    """The answer of a name server: an address for a name that there is, nothing for others."""
    labels: list[str] = []
    at = 12
    while at < len(question) and (length := question[at]):
        labels.append(question[at + 1 : at + 1 + length].decode("latin-1"))
        at += 1 + length
    if at + 5 > len(question):
        return None
    kind = struct.unpack_from(">H", question, at + 1)[0]
    name = ".".join(labels).lower()
    _arrived.append(f"name {name}")
    address = _NAMES.get(name)
    if name == REBINDING and kind == 1:
        _asked[name] = _asked.get(name, 0) + 1
        address = INTERNET[0] if _asked[name] == 1 else "127.0.0.1"
    records = b""
    if kind == 1 and address is not None:
        records = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(address)
    code = 0x8180 if address is not None or name == REBINDING else 0x8183
    head = question[:2] + struct.pack(">HHHHH", code, 1, 1 if records else 0, 0, 0)
    return head + question[12 : at + 5] + records
