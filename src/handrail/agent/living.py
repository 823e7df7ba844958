"""An agent that stays alive: it waits for jobs that end, triggers that fire and messages from its user, and works on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from handrail.agent.dispatch import Session
from handrail.agent.events import LoopEvent, RunFinished, RunStatus, Waiting
from handrail.contract.session import StopReason

LONGEST_PAUSE_S = 60.0
"""Pauses between attempts to go on, while the provider is away or calls wait for a person."""
LONGEST_AGAIN_S = 3600.0
"""Where nothing new has come, until the provider is asked again for what it gave no whole answer to: that may cost each time."""


class Worker(Protocol):
    """The part of an agent that a :class:`Life` needs."""

    @property
    def session(self) -> Session: ...

    def run(self, task: str | None) -> AsyncGenerator[LoopEvent, None]: ...

    async def unanswered(self) -> bool: ...

    def cancel(self, reason: StopReason = "user") -> None: ...


class Life:
    """The life of one agent, until it is stopped. Each piece of work is a run with a budget of its own."""

    def __init__(self, agent: Worker) -> None:
        self._agent = agent
        self._said: list[str] = []
        self._heard = asyncio.Event()
        self._stopped = False

    def say(self, text: str) -> None:
        """Take a user's message. The work under way is finished first."""
        self._said.append(text)
        self._heard.set()

    def stop(self, reason: StopReason) -> None:
        """Stop the work under way, and end."""
        self._stopped = True
        self._heard.set()
        self._agent.cancel(reason)

    async def events(self, task: str | None, ended: Callable[[], None]) -> AsyncGenerator[LoopEvent, None]:
        """Work on ``task``, then wait, and work on whatever comes; call ``ended`` at the end."""
        if task is not None:
            self._said.insert(0, task)
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event
        finally:
            ended()

    async def _events(self) -> AsyncGenerator[LoopEvent, None]:
        in_vain, why = 0, None
        owed = await self._agent.unanswered()  # what a process before heard, and did not come to
        while not self._stopped:
            if not self._said and (in_vain or not owed):
                yield Waiting()
                await self._comes(in_vain, _again_s(in_vain, why) if owed else None)
                if self._stopped:
                    return
            if not self._said and not owed and not await self._is_told():
                continue
            text = self._said.pop(0) if self._said else None
            async with aclosing(self._agent.run(text)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, RunFinished):
                        why = event.outcome.status
            in_vain = 0 if why == "answered" else in_vain + 1
            owed = why in ("failed", "parked") and await self._agent.unanswered()

    async def _is_told(self) -> bool:
        notices = self._agent.session.notices
        return notices is not None and bool(await notices.pending())

    async def _comes(self, in_vain: int, again_s: float | None) -> None:
        """Return when there is something to do: at once if something waits, later if the last attempts failed.

        :param again_s: seconds until what they left is tried again; None for never
        """
        self._heard.clear()
        if self._said or self._stopped:
            return
        pause_s = _pause_s(in_vain)
        if in_vain and await self._until(None, pause_s):
            return
        if again_s is not None and again_s <= pause_s:
            return
        notices = self._agent.session.notices
        left_s = None if again_s is None else again_s - pause_s
        await self._until(None if notices is None else notices.arrived(), left_s)

    async def _until(self, arrival: Coroutine[Any, Any, None] | None, seconds: float | None) -> bool:
        """Wait for a user's message, ``arrival``, or the time to pass. Gives whether it was a message."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._heard.wait())]
        if arrival is not None:
            waits.append(asyncio.ensure_future(arrival))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if len(waits) > 1 and waits[1].done():
                waits[1].result()
            return self._heard.is_set()
        finally:
            for wait in waits:
                wait.cancel()


def _pause_s(in_vain: int) -> float:
    """Seconds without any further attempt, after so many that failed."""
    return min(2.0 ** min(in_vain - 1, 32), LONGEST_PAUSE_S) if in_vain else 0.0


def _again_s(in_vain: int, why: RunStatus | None) -> float:
    """Seconds until what they left is tried again. Whether a person has answered costs nothing to look up."""
    return _pause_s(in_vain) if why == "parked" else min(2.0 ** min(in_vain - 1, 32), LONGEST_AGAIN_S)
