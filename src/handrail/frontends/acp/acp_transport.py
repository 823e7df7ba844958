"""The transport of one client's messages, which checks each before the SDK sees it.

The SDK assumes that every line is an object of the right form. An invalid one would end its connection, and the client's
``_meta`` would become arguments of its handlers. Here an invalid message gets an error, or is dropped if it expects no
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from acp import schema
from pydantic import BaseModel, ValidationError

from handrail.frontends.mcp.client_messages import (
    INVALID_REQUEST,
    PARSE_ERROR,
    make_json_rpc_error,
    parse_message,
    to_json_line,
    validate_client_message,
)

if TYPE_CHECKING:
    from handrail.frontends.mcp.mcp_stdio_server import ClientLineWriter

KNOWN_NOTIFICATIONS: Mapping[str, type[BaseModel]] = {"session/cancel": schema.CancelNotification}
"""The supported notifications with their form. Others, and invalid ones, are dropped."""


class MessageTransport(Protocol):
    """One side of a connection, in the form that the SDK requires."""

    async def send(self, message: dict[str, Any]) -> None: ...
    async def receive(self) -> dict[str, Any] | None: ...
    async def close(self) -> None: ...


class JsonLinesTransport:
    """A transport with messages as lines of JSON.

    :param lines: the lines, already limited in length and depth
    """

    def __init__(self, lines: AsyncIterator[str], output: ClientLineWriter) -> None:
        self._lines = lines
        self._output = output

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. An answer to a disconnected client is dropped.

        :raises OSError: for a request or notification, if the client has disconnected
        """
        try:
            await self._output.write(to_json_line(message).decode())
            await self._output.flush()
        except (BrokenPipeError, ConnectionResetError):
            if "method" in message:
                raise

    async def receive(self) -> dict[str, Any] | None:
        async for line in self._lines:
            if not line.strip():
                continue
            try:
                message: Any = parse_message(line)
            except ValueError as error:
                await self.send(make_json_rpc_error(None, PARSE_ERROR, f"Invalid JSON in a line: {error}"))
                continue
            if message is not None:
                return message
            await self.send(
                make_json_rpc_error(None, INVALID_REQUEST, "Invalid message. Expected one JSON object, not null.")
            )  # None means the end of messages
        return None

    async def close(self) -> None:
        pass  # the owner of the pipe closes it


class ValidatingTransport:
    """A transport that passes on only valid messages of another transport."""

    def __init__(self, messages: MessageTransport) -> None:
        self._messages = messages
        self._until: float | None = None
        self._sending: set[asyncio.Timeout] = set()

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. An answer that times out is dropped.

        :raises OSError: for a request or notification, if the client has disconnected or no longer reads
        """
        try:
            async with asyncio.timeout_at(self._until) as bound:
                self._sending.add(bound)
                try:
                    await self._messages.send(message)
                finally:
                    self._sending.discard(bound)
        except TimeoutError:  # a subclass of OSError
            if "method" in message:
                raise

    def limit_send_time(self, seconds: float) -> None:
        """Limit the time of all sends from now on, because a disconnected client may have left the pipe open."""
        self._until = asyncio.get_running_loop().time() + seconds
        for bound in self._sending:
            bound.reschedule(self._until)

    async def close(self) -> None:
        await self._messages.close()

    async def receive(self) -> dict[str, Any] | None:
        while (message := cast("object", await self._messages.receive())) is not None:
            if (answer := validate_client_message(message)) is not None:
                await self.send(answer)
            elif (sound := _sanitize_message(cast("dict[str, Any]", message))) is not None:
                return sound
        return None


def _sanitize_message(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return a message in the form for the SDK, or None to drop it."""
    if "method" not in message:
        return _sanitize_answer(message)
    method, params = message["method"], cast("object", message.get("params") or {})
    if not isinstance(params, dict) or not isinstance(method, str):
        return None
    own = {key: value for key, value in cast("dict[str, Any]", params).items() if key != "_meta"}
    return {**message, "params": own} if "id" in message or _is_known_notification(method, own) else None


def _sanitize_answer(message: dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(message.get("id"), bool) or not isinstance(message.get("id"), int):
        return None  # not an answer to one of our requests, whose IDs are integers
    if (error := message.get("error")) is None:
        return message
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    code, text = fields.get("code"), fields.get("message")
    return {
        **message,
        "error": {
            "code": code if isinstance(code, int) else -32603,
            "message": text if isinstance(text, str) else "The client returned an error without a message.",
        },
    }


def _is_known_notification(method: str, params: dict[str, Any]) -> bool:
    """Return whether a notification is supported and valid.

    An invalid one gets no error, because it expects no answer.
    """
    if (form := KNOWN_NOTIFICATIONS.get(method)) is None:
        return False
    try:
        form.model_validate(params)
    except ValidationError:
        return False
    return True
