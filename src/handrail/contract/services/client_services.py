"""The Protocol of a client that can do more than call tools: answer forms, lend its model, name its roots.

These are MCP's client features, in MCP's own shapes. A frontend with such a client gives the session a :class:`ClientHandler`.
A tool reaches it through ``runtime.client``; each request has its own capability: ``elicit``, ``sample``, ``roots``.

Source: https://modelcontextprotocol.io/specification/2025-11-25/client
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct

ClientMethod = Literal["elicitation/create", "sampling/createMessage", "roots/list"]

METHOD_CAPABILITIES: Mapping[ClientMethod, str] = {
    "elicitation/create": "elicit",
    "sampling/createMessage": "sample",
    "roots/list": "roots",
}
"""The capability that a tool must require for each method."""


class UnsupportedClientRequest(ToolError):
    """An error for requests that the client of the session does not support.

    The result of a call that fails for it names the methods under ``unsupported_client_requests``. A frontend may word it in
    the terms of its protocol.

    :param before: what failed for it, as the beginning of the text
    """

    def __init__(self, *methods: ClientMethod, before: str = "") -> None:
        text = f"{before}The client of this session does not support {', '.join(methods)} of this kind. Continue without it."
        super().__init__(text, kind="unavailable")
        self.methods = methods


LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
"""The levels of RFC 5424, the least severe first."""

LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

ClientRequestKind = Literal["form", "url", "sample", "sample-tools", "sample-context", "roots"]
"""The kinds of requests that a client can support independently."""

CLIENT_REQUEST_KINDS: Mapping[ClientRequestKind, tuple[ClientMethod, Mapping[str, Any]]] = {
    "form": ("elicitation/create", {"mode": "form"}),
    "url": ("elicitation/create", {"mode": "url"}),
    "sample": ("sampling/createMessage", {}),
    "sample-tools": ("sampling/createMessage", {"tools": []}),
    "sample-context": ("sampling/createMessage", {"includeContext": "thisServer"}),
    "roots": ("roots/list", {}),
}
"""Each kind with its minimal request."""


def classify_client_request(method: ClientMethod, params: Mapping[str, Any]) -> ClientRequestKind:
    """Return the kind of a request."""
    if method == "elicitation/create":
        return "url" if params.get("mode") == "url" else "form"
    if method == "sampling/createMessage":
        if params.get("tools") is not None or params.get("toolChoice") is not None:
            return "sample-tools"
        return "sample" if params.get("includeContext") in (None, "none") else "sample-context"
    return "roots"


class RequestToClient(Struct, frozen=True):
    """One request to the client.

    :param params: in MCP's form
    :param origin: the name of the third-party source that asks; ``""`` for the operator's own tool
    """

    method: ClientMethod
    params: Mapping[str, Any]
    origin: str = ""


class ClientHandler(Protocol):
    """The handler of requests to a client. A frontend gives it to the session."""

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        """Return whether the client supports such a request with these parameters (a form, a URL, tools).

        :param call_id: as for :meth:`send_requests`: a client without a session states its features with each request
        """
        ...

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Send several requests at once, each under a key, and return the results under the same keys.

        It may take as long as a person takes. It is cancelled if the call is stopped.

        :param call_id: the call that the client made, even if a nested call asks
        :raises ToolError: ``unavailable`` if the client does not support such requests, or is disconnected
        """
        ...

    def detach(self, call_id: str) -> None:
        """Detach the client from the call.

        If the transport allows it, the connection is closed, and the client asks for the answer later.
        """


@runtime_checkable
class EditorClientHandler(Protocol):
    """An extension of :class:`ClientHandler` for a client that is an editor on this machine."""

    async def read_unsaved_text(self, path: str) -> str | None:
        """Return the text of a file as the editor shows it, saved or not; None if the editor does not say.

        The rules have evaluated the path. The text is as untrusted as the content of the file.

        :param path: absolute and canonical
        """
        ...


class ClientService(Protocol):
    """The client of the session, as tools see it: ``runtime.client``."""

    def supports(self, method: ClientMethod, params: Mapping[str, Any] | None = None) -> bool:
        """Return whether the tool may send such a request, and the client supports it."""
        ...

    async def send_requests(self, requests: Mapping[str, RequestToClient]) -> Mapping[str, Mapping[str, Any]]:
        """Send requests; see :meth:`ClientHandler.send_requests`. The tool's time-out does not count the wait.

        :raises ToolError: ``denied`` without the capability of each method; ``unavailable`` if the session has no
            such client
        """
        ...

    def detach(self) -> None:
        """Detach the client; see :meth:`ClientHandler.detach`."""
