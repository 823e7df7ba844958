"""The transport of one client's messages, which checks each before the SDK sees it.

The SDK assumes that every line is an object of the right form. A wrong one would end its connection, and the client's
``_meta`` would become arguments of its handlers. Here a message of a wrong form gets an error, or is dropped if it expects no
answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson
from acp import schema
from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from handrail.frontends.mcp.stdio import LineWriter

INVALID_REQUEST, PARSE_ERROR = -32600, -32700
HEARD: Mapping[str, type[BaseModel]] = {"session/cancel": schema.CancelNotification}
"""Notifications that mean something here, with their form; others are dropped, and so are those of another form."""
_NO_OBJECT = "a message is one JSON object"


class Messages(Protocol):
    """One side of a connection, as the SDK has it."""

    async def send(self, message: dict[str, Any]) -> None: ...
    async def receive(self) -> dict[str, Any] | None: ...
    async def close(self) -> None: ...


class Piped:
    """Messages as lines of JSON.

    :param lines: bounded in length and depth already
    """

    def __init__(self, lines: AsyncIterator[str], output: LineWriter) -> None:
        self._lines = lines
        self._output = output

    async def send(self, message: dict[str, Any]) -> None:
        """
        :raises OSError: when the client has gone, for what somebody here waits to have put to it. An answer to it is
            dropped then: nobody is left to want it, and reading tells that the connection is over
        """
        try:
            await self._output.write(as_line(message))
            await self._output.flush()
        except (BrokenPipeError, ConnectionResetError):
            if "method" in message:
                raise

    async def receive(self) -> dict[str, Any] | None:
        async for line in self._lines:
            if not line.strip():
                continue
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                await self.send(refusal(None, PARSE_ERROR, f"a line is not JSON: {error}"))
                continue
            if message is not None:
                return message
            await self.send(refusal(None, INVALID_REQUEST, f"{_NO_OBJECT}, not null"))  # None says that no more comes
        return None

    async def close(self) -> None:
        pass  # whoever opened the pipe closes it


class Checked:
    """A connection's messages, of which only sound ones come through."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._until: float | None = None
        self._sending: set[asyncio.Timeout] = set()

    async def send(self, message: dict[str, Any]) -> None:
        """
        :raises OSError: when the client has gone, or reads no more
        """
        try:
            async with asyncio.timeout_at(self._until) as bound:
                self._sending.add(bound)
                try:
                    await self._messages.send(message)
                finally:
                    self._sending.discard(bound)
        except TimeoutError:  # an OSError; of an answer nobody is left to hear
            if "method" in message:
                raise

    def end_within(self, seconds: float) -> None:
        """What is not sent by then is not sent any more: who has hung up may have left a pipe that nobody reads."""
        self._until = asyncio.get_running_loop().time() + seconds
        for bound in self._sending:
            bound.reschedule(self._until)

    async def close(self) -> None:
        await self._messages.close()

    async def receive(self) -> dict[str, Any] | None:
        while (message := cast("object", await self._messages.receive())) is not None:
            if not isinstance(message, dict):
                await self.send(refusal(None, INVALID_REQUEST, _NO_OBJECT))
                continue
            found = cast("dict[str, Any]", message)
            if (answer := self._refused(found)) is not None:
                await self.send(answer)
            elif (sound := _sound(found)) is not None:
                return sound
        return None

    def _refused(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request that is none."""
        if "id" not in message or ("method" not in message and message.keys() & {"result", "error"}):
            return None
        asked, method, params = message["id"], message.get("method"), message.get("params")
        if isinstance(asked, bool) or not isinstance(asked, (str, int)):
            return refusal(None, INVALID_REQUEST, "the id of a request is a text or a whole number")
        if not isinstance(method, str):
            return refusal(asked, INVALID_REQUEST, "a request names its method")
        if params is not None and not isinstance(params, dict):
            return refusal(asked, INVALID_REQUEST, "the params of a request are a JSON object")
        return None


def _sound(message: dict[str, Any]) -> dict[str, Any] | None:
    """A message as the SDK can take it, or None for one that nobody needs."""
    if "method" not in message:
        return _sound_answer(message)
    method, params = message["method"], cast("object", message.get("params") or {})
    if not isinstance(params, dict) or not isinstance(method, str):
        return None
    own = {key: value for key, value in cast("dict[str, Any]", params).items() if key != "_meta"}
    return {**message, "params": own} if "id" in message or _heard(method, own) else None


def _sound_answer(message: dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(message.get("id"), bool) or not isinstance(message.get("id"), int):
        return None  # the answer to nothing that was asked: our ids are whole numbers
    error = message.get("error")
    if error is None:
        return message
    told = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    code, text = told.get("code"), told.get("message")
    return {
        **message,
        "error": {
            "code": code if isinstance(code, int) else -32603,
            "message": text if isinstance(text, str) else "the client gave an error without words",
        },
    }


def _heard(method: str, params: dict[str, Any]) -> bool:
    """Whether a notification means something here. Nobody waits for an answer who could be told that its form is wrong."""
    form = HEARD.get(method)
    if form is None:
        return False
    try:
        form.model_validate(params)
    except ValidationError:
        return False
    return True


def refusal(asked: str | int | None, code: int, text: str) -> dict[str, Any]:
    """An error, as it goes to the client."""
    return {"jsonrpc": "2.0", "id": asked, "error": {"code": code, "message": text}}


def as_line(message: dict[str, Any]) -> str:
    """A message on one line. What JSON has no form for becomes text."""
    try:
        return orjson.dumps(message, default=str, option=orjson.OPT_APPEND_NEWLINE).decode()
    except (orjson.JSONEncodeError, TypeError):  # half a character, a number too large
        return json.dumps(message, default=str) + "\n"
