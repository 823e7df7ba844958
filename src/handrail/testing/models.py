"""Models in process for tests: replies written in Python, and recorded requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from handrail.agent.model import (
    BlockEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Finished,
    ModelRequest,
    ProviderError,
    TextDelta,
)
from handrail.catalog.dialects import MCP, Dialect


@dataclass(slots=True)
class Pause:
    """Where a reply waits until the test lets it go on: await :attr:`reached`, then set :attr:`proceed`."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    proceed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Tell the test that the reply is here, and wait for it."""
        self.reached.set()
        await self.proceed.wait()


Step = BlockEvent | Pause | Exception


def text_reply(text: str) -> list[BlockEvent]:
    """A whole reply of text."""
    return [TextDelta(text), Finished("end")]


def call_reply(*calls: tuple[str, Mapping[str, Any]], text: str = "") -> list[BlockEvent]:
    """A whole reply of calls, ``(name, arguments)`` each, after ``text``."""
    events: list[BlockEvent] = [TextDelta(text)] if text else []
    for index, (name, arguments) in enumerate(calls):
        events.append(CallOpened(index, None, name))
        events.append(CallArguments(index, json.dumps(arguments)))
        events.append(CallClosed(index))
    return [*events, Finished("calls")]


class PlayedModel:
    """Plays one list of steps a request: block events, a :class:`Pause`, or an exception to raise there.

    For a model that also checks what it is asked, see :class:`handrail.agent.providers.script.ScriptModel`.
    """

    def __init__(self, *replies: Iterable[Step], dialect: Dialect = MCP) -> None:
        """:param dialect: what its provider's schemas can say"""
        self.dialect = dialect
        self._replies = [list(reply) for reply in replies]
        self.requests: list[ModelRequest] = []
        """What was asked, in order, repeated attempts included."""
        self.closed = False
        self.open_streams = 0
        """Streams that were begun and neither ended nor were closed."""

    @property
    def name(self) -> str:
        return "played:model"

    async def aclose(self) -> None:
        self.closed = True

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """See :meth:`handrail.agent.model.Model.stream`.

        :raises ProviderError: when there is no reply left to play
        """
        self.requests.append(request)
        if len(self.requests) > len(self._replies):
            raise ProviderError(f"the played model has {len(self._replies)} replies and was asked for one more")
        steps: Sequence[Step] = self._replies[len(self.requests) - 1]
        self.open_streams += 1
        try:
            for step in steps:
                if isinstance(step, Pause):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.open_streams -= 1
