"""The editor's own view of files: what its user has not saved yet, for tools that read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from acp import schema
from acp.exceptions import RequestError

from handrail.contract.doors.peer import NOT_ANSWERED, Ask, AskMethod
from handrail.contract.errors import ToolError


class Client(Protocol):
    """What is needed of the connection here."""

    async def read_text_file(self, session_id: str, path: str) -> schema.ReadTextFileResponse: ...


class Editor:
    """A :class:`~handrail.contract.doors.peer.Peer` with :class:`~handrail.contract.doors.peer.Buffers`. The rest of what MCP clients
    answer it does not."""

    def __init__(self, client: Client) -> None:
        self.session_id = ""
        self._client = client

    async def unsaved(self, path: str) -> str | None:
        try:
            return (await self._client.read_text_file(self.session_id, path)).content
        except (OSError, RequestError, ValueError):  # it has gone, knows no such file, or said nothing sensible
            return None

    def offers(self, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
        return False

    async def ask(self, call_id: str, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        raise ToolError(f"{NOT_ANSWERED} {', '.join(ask.method for ask in asks.values())}", kind="unavailable")

    def let_go(self, call_id: str) -> None:
        pass
