"""The Protocol of a client that can do more than call tools: answer forms, lend its model, name its roots.

These are MCP's client features, in MCP's own shapes. A frontend with such a client gives the session a :class:`Peer`. A
tool reaches it through ``runtime.peer``; each request has its own capability: ``elicit``, ``sample``, ``roots``.

Source: https://modelcontextprotocol.io/specification/2025-11-25/client
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

AskMethod = Literal["elicitation/create", "sampling/createMessage", "roots/list"]

CAPABILITY_OF: Mapping[AskMethod, str] = {
    "elicitation/create": "elicit",
    "sampling/createMessage": "sample",
    "roots/list": "roots",
}
"""What a tool must require to ask for it."""

NOT_ANSWERED = "the client of this session did not say that it answers"
"""What a tool is told that asks for something else, followed by the method. A face may say it in its protocol's own way."""

LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
"""Of RFC 5424, the least grave first."""

LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

AskKind = Literal["form", "url", "sample", "sample-tools", "sample-context", "roots"]
"""What a client can say that it answers, apart."""

ASK_KINDS: Mapping[AskKind, tuple[AskMethod, Mapping[str, Any]]] = {
    "form": ("elicitation/create", {"mode": "form"}),
    "url": ("elicitation/create", {"mode": "url"}),
    "sample": ("sampling/createMessage", {}),
    "sample-tools": ("sampling/createMessage", {"tools": []}),
    "sample-context": ("sampling/createMessage", {"includeContext": "thisServer"}),
    "roots": ("roots/list", {}),
}
"""Each with the least request of its kind."""


def kind_of(method: AskMethod, params: Mapping[str, Any]) -> AskKind:
    """Which of them a request is."""
    if method == "elicitation/create":
        return "url" if params.get("mode") == "url" else "form"
    if method == "sampling/createMessage":
        if params.get("tools") is not None or params.get("toolChoice") is not None:
            return "sample-tools"
        return "sample" if params.get("includeContext") in (None, "none") else "sample-context"
    return "roots"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the client.

    :param params: as MCP writes them
    :param origin: who asks, where that is not the operator's own tool: the name of a foreign source
    """

    method: AskMethod
    params: Mapping[str, Any]
    origin: str = ""


class Peer(Protocol):
    """What a face gives a session."""

    def offers(self, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
        """Whether the client said that it answers such a request, with these parameters (a form, a URL, tools).

        :param call_id: as for :meth:`ask`: a client without a session says it anew with each request
        """
        ...

    async def ask(self, call_id: str, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        """Put several requests at once, each under a key, and give every answer under its key, as MCP writes results.
        It may take as long as a person takes; cancelled when the call is stopped.

        :param call_id: the call on whose behalf: the one that the client made, whatever calls that one has made since
        :raises ToolError: ``unavailable`` where the client does not answer such requests, or has gone
        """
        ...

    def let_go(self, call_id: str) -> None:
        """The client need not hold the line: where its transport allows, it is hung up and comes back for the answer."""
        ...


@runtime_checkable
class Buffers(Protocol):
    """What a :class:`Peer` has beside, whose client is an editor on this machine."""

    async def unsaved(self, path: str) -> str | None:
        """What the editor shows of a file now, saved or not; None where it does not say. Rules have judged the path; what
        comes back is as foreign as a file's content.

        :param path: absolute and canonical
        """
        ...


class PeerDoor(Protocol):
    """What a tool sees of it: ``runtime.peer``."""

    def offers(self, method: AskMethod, params: Mapping[str, Any] | None = None) -> bool:
        """Whether asking makes sense: the tool has the capability, and the client answers such requests."""
        ...

    async def ask(self, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        """See :meth:`Peer.ask`. The time that it takes is not the tool's: no time-out counts it.

        :raises ToolError: ``denied`` without the capability of each method; ``unavailable`` where there is no such client
        """
        ...

    def let_go(self) -> None:
        """See :meth:`Peer.let_go`."""
        ...
