"""Messages to and from a persistent tool in the middle of a call: one JSON object per line, like all the others.

From the program, each with the call's id:

- ``{"id": "…", "progress": {"done", "total", "fraction", "message"}}``, whichever it knows
- ``{"id": "…", "log": {"level", "data", "logger"?}}``
- ``{"id": "…", "ask": {KEY: {"method", "params"}, …}}`` of the client at the face; it waits for the next line
- ``{"id": "…", "let_go": true}``: the client need not hold the line

To the program: ``{"id": "…", "answers": {KEY: …}}``, or ``{"id": "…", "refused": "why"}``.

It is told which requests its client answers with the call itself, under ``offers``, where its manifest requires any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from handrail.contract.doors.peer import ASK_KINDS, CAPABILITY_OF, LOG_LEVELS, Ask, AskMethod
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.spec import ToolSpec

MOST_SAID = 100_000
"""Messages in the middle of one call."""
MAX_SAID_BYTES = 64 * 1024 * 1024
"""Of all of them together."""
_A_TURN = 64
"""Messages after which others have their turn on the event loop."""
_FIGURES = ("done", "total", "fraction")
_OF_CLIENTS = frozenset(CAPABILITY_OF.values())
WAYS = ("progress", "log", "ask", "let_go")


class Midway:
    """One call's messages before its answer.

    :param exit: ends when the program does, whose client is then asked no more
    """

    def __init__(self, runtime: Runtime, exit: asyncio.Future[int]) -> None:
        self._runtime = runtime
        self._exit = exit
        self._said = 0
        self._bytes = 0
        self.has_asked = False
        """What it asked was answered by somebody, who is not asked the same again."""

    async def heard(self, message: Mapping[str, Any], size: int) -> dict[str, Any] | None:
        """Heed one message. Gives what the program is told, where it waits for that; None too where it has ended meanwhile.

        :param size: of it, in bytes
        :raises ToolError: ``limit`` for too many, ``backend`` for what is none
        """
        self._said += 1
        self._bytes += size
        if self._said > MOST_SAID or self._bytes > MAX_SAID_BYTES:
            raise ToolError(
                f"it said more than {MOST_SAID:,} things, or {MAX_SAID_BYTES:,} bytes, in the middle of one call",
                kind="limit",
            )
        if not self._said % _A_TURN:
            await asyncio.sleep(0)
        if "ask" in message:
            return await self._asked(message["ask"])
        if "progress" in message:
            self._progress(_an_object(message["progress"], "progress"))
        elif "log" in message:
            self._log(_an_object(message["log"], "log"))
        elif message["let_go"] is True:
            self._runtime.peer.let_go()
        return None

    def _progress(self, told: Mapping[str, Any]) -> None:
        figures: dict[str, Any] = {name: told.get(name) for name in _FIGURES}
        said: Any = told.get("message", "")
        if not isinstance(said, str) or any(
            one is not None and (isinstance(one, bool) or not isinstance(one, (int, float))) for one in figures.values()
        ):
            raise _odd("progress has done, total and fraction as numbers, and message as text")
        self._runtime.progress(said, **figures)

    def _log(self, told: Mapping[str, Any]) -> None:
        level: Any = told.get("level")
        logger: Any = told.get("logger")
        if level not in LOG_LEVELS or "data" not in told or not (logger is None or isinstance(logger, str)):
            raise _odd(f"log has a level ({', '.join(LOG_LEVELS)}), data, and logger as text if any")
        self._runtime.log(level, told["data"], logger)

    async def _asked(self, asks: object) -> dict[str, Any] | None:
        try:
            put = _asks(asks)
        except ToolError as error:
            return {"refused": error.text}
        self.has_asked = True
        asking = asyncio.ensure_future(self._runtime.peer.ask(put))
        try:
            await asyncio.wait((asking, self._exit), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            return {"answers": dict(asking.result())}
        except ToolError as error:
            return {"refused": error.text}
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait((asking,))


def offered_to(spec: ToolSpec, runtime: Runtime) -> list[AskMethod] | None:
    """Which requests a tool may make, and its client answers; None for a tool that makes none."""
    if _OF_CLIENTS.isdisjoint(spec.requires.capabilities):
        return None
    peer = runtime.peer
    return list(dict.fromkeys(method for method, params in ASK_KINDS.values() if peer.offers(method, params)))


def _asks(asks: object) -> dict[str, Ask]:
    """:raises ToolError: for what are no requests; how many and how large is judged where they are made"""
    if not isinstance(asks, Mapping):
        raise _odd("ask is an object: a request under each key")
    found: dict[str, Ask] = {}
    for key, one in cast("Mapping[str, Any]", asks).items():
        told = _an_object(one, "a request")
        method: Any = told.get("method")
        params: Any = told.get("params", {})
        if not isinstance(method, str) or method not in CAPABILITY_OF or not isinstance(params, Mapping):
            raise ToolError(f"{key[:80]!r} is no request: a method ({', '.join(CAPABILITY_OF)}) and its params")
        found[key] = Ask(cast("AskMethod", method), cast("Mapping[str, Any]", params))
    return found


def _an_object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _odd(f"{what} is an object")
    return cast("Mapping[str, Any]", value)


def _odd(expected: str) -> ToolError:
    return ToolError(f"it said what cannot be read in the middle of its call: {expected}", kind="backend")
