"""Loopback web servers for network tests: plain or TLS, correct or hostile, with recorded requests."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Answer = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Raw bytes, or whatever a hostile server does with the connection after the head of a request."""


def ok(body: bytes = b"", *fields: str, status: str = "200 OK") -> bytes:
    """A whole response."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(head).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return ok(b"elsewhere", f"Location: {location}", status=status)


@dataclass(frozen=True)
class ReceivedRequest:
    """One received request: its first line, fields by lower-case name, and body."""

    line: str
    fields: Mapping[str, str]
    body: bytes


class LoopbackServer:
    """A server on 127.0.0.1.

    :param routes: by path with query; ``*`` for the others
    :param tls: its own certificate where it speaks TLS
    """

    def __init__(self, routes: Mapping[str, Answer], tls: ssl.SSLContext | None = None) -> None:
        self.routes = dict(routes)
        self.asked: list[ReceivedRequest] = []
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}{path}"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *rest = head.removesuffix("\r\n\r\n").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
            body = await self._body(reader, fields)
            self.asked.append(ReceivedRequest(line, fields, body))
            answer = self.routes.get(line.split(" ")[1], self.routes.get("*", ok(status="404 Not Found")))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _body(self, reader: asyncio.StreamReader, fields: Mapping[str, str]) -> bytes:
        if fields.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
            return body
        return await reader.readexactly(int(fields.get("content-length", "0")))


@dataclass(frozen=True)
class Authority:
    """A certificate authority for one test run, and a certificate for some names."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    pem: str


@lru_cache
def authority(*names: str) -> Authority:
    """Trust only a new certificate authority, which vouches for ``names``."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    day = datetime.timedelta(days=1)

    def certificate(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(root_name).public_key(public)
        return builder.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)

    root = certificate(root_name, key.public_key()).add_extension(x509.BasicConstraints(True, None), critical=True)
    root_pem = root.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    leaf_key = ec.generate_private_key(ec.SECP256R1())
    shown = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    alternatives = [_alternative(name) for name in names]
    leaf = certificate(shown, leaf_key.public_key()).add_extension(
        x509.SubjectAlternativeName(alternatives), critical=False
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as folder:
        file = Path(folder, "both.pem")
        private = leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file.write_bytes(private + leaf.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        server.load_cert_chain(file)
    return Authority(server, ssl.create_default_context(cadata=root_pem), root_pem)


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
