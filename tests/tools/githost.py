"""A git server on loopback for real clones and pushes: ``git http-backend`` behind a small HTTP server."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass
class GitHost:
    """Serves the bare repositories in ``folder``.

    :param password: where not empty, whoever does not send it is answered 401
    :param elsewhere: where not empty, every request is sent on to this address
    :param pages: whole responses by path, for other tools that reach the network
    """

    folder: Path
    password: str = ""
    elsewhere: str = ""
    asked: list[str] = field(default_factory=list[str])
    pages: dict[str, bytes] = field(default_factory=dict[str, bytes])
    port: int = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, name: str) -> str:
        return f"http://{self.authority}/{name}"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            self.asked.append(head[0])
            writer.write(await self._answer(head[0], fields, await _body(reader, fields)))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, line: str, fields: dict[str, str], body: bytes) -> bytes:
        method, target, _ = line.split(" ")
        if target in self.pages:
            return self.pages[target]
        if self.elsewhere:
            return f"HTTP/1.1 302 Found\r\nLocation: {self.elsewhere}{target}\r\nContent-Length: 0\r\n\r\n".encode()
        if self.password and fields.get("authorization") != self.password:
            return b'HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm="x"\r\nContent-Length: 0\r\n\r\n'
        path, _, query = target.partition("?")
        around = {
            "PATH": os.environ.get("PATH", os.defpath),
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_PROJECT_ROOT": str(self.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": fields.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": fields.get("content-encoding", ""),
            "GIT_PROTOCOL": fields.get("git-protocol", ""),
            "REMOTE_ADDR": "127.0.0.1",
        }
        process = await asyncio.create_subprocess_exec(
            "git", "http-backend", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=around
        )
        output, _ = await process.communicate(body)
        head, _, rest = output.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = next((one.partition(":")[2].strip() for one in lines if one.lower().startswith("status:")), "200 OK")
        kept = [one for one in lines if one and not one.lower().startswith("status:")]
        told = "\r\n".join([f"HTTP/1.1 {status}", *kept, f"Content-Length: {len(rest)}", "Connection: close", "", ""])
        return told.encode("latin-1") + rest


async def _body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if fields.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(fields.get("content-length", "0")))
    found = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        found += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return bytes(found)
