"""What carries the messages of one connection, and what it tells of its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message of a server; a longer one is not kept."""


class RpcError(Exception):
    """A server answered a request with an error, or its transport did."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class TooLong(Exception):
    """An answer is longer than is kept; everything else goes on."""


class Lost(Exception):
    """The connection is no more.

    :param unsent: whether the request is known not to have reached the server's tools
    :param forgotten: the server is there, and knows nothing of this connection any more
    """

    def __init__(self, why: str, *, unsent: bool = False, forgotten: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.unsent = unsent or forgotten
        self.forgotten = forgotten


_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_TASKS = "io.modelcontextprotocol/tasks"


def extensions_of(method: str) -> dict[str, Any]:
    """What the client says that it can do beside, in the newer era: follow a task, where a call may become one."""
    follows = method in ("tools/call", "subscriptions/listen") or method.startswith("tasks/")
    return {"extensions": {_TASKS: {}}} if follows else {}


def headers_of(version: str, method: str, params: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a transport over HTTP says beside the message, in the newer era."""
    found = {"mcp-protocol-version": version, "mcp-method": method}
    key = _NAMED.get(method, "taskId" if method.startswith("tasks/") else None)
    if key is not None and params is not None and isinstance(name := params.get(key), str):
        found["mcp-name"] = name
    return found


def refusal(number: str | int, code: int, text: str) -> Message:
    """The answer to a request of a server that is not carried out."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


class Ears(Protocol):
    """Who is told what comes over a channel. None of these blocks, none raises."""

    def heard(self, message: Message, related: int | None) -> None:
        """:param related: the request of ours on whose stream it came, where the transport tells"""
        ...

    def failed(self, request: int | None, error: Exception) -> None:
        """A request will not be answered; None where nobody can tell which."""
        ...

    def lost(self, why: Lost) -> None:
        """Nothing will come any more."""
        ...


class Channel(Protocol):
    """Opened, closed and read by one task; written to by any."""

    async def open(self, ears: Ears) -> None:
        """
        :raises Lost: where the server cannot be reached
        """
        ...

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        """
        :param headers: further fields, for a transport that has such
        :raises Lost: where it cannot be sent
        """
        ...

    def abandon(self, request: int) -> bool:
        """Nobody waits for the answer any more. Whether the transport itself tells the server so."""
        ...

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Around a call of a server that may write: what it made under a protected name meanwhile fails the call.

        :raises ToolError: ``denied``, when it ends
        """
        ...

    def settled(self, protocol: str, *, modern: bool) -> None:
        """The version that is spoken from now on."""
        ...

    async def aclose(self) -> None:
        """End it, and return when nothing of it is left. Never raises."""
        ...
