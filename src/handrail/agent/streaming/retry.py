"""Asking a busy provider again: bounded, with back-off, and only while nothing of the reply has arrived.

Once a block has arrived a second request could bring its calls a second time, so from then on every failure
is a :class:`~handrail.agent.model.StreamCut`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from handrail.agent.model import BlockEvent, Model, ModelRequest, ProviderBusy, StreamCut, Usage


@dataclass(frozen=True, slots=True)
class Delayed:
    """The provider was busy; it is asked again after ``delay_s`` seconds."""

    attempt: int
    attempts: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently.

    :param attempts: requests altogether, the first one included
    :param first_s: seconds before the second request; doubled each time, up to ``longest_s``
    :param longest_s: also the most that a provider's own ``retry-after`` is followed
    :param sleep: waits the given seconds; another one makes a test quick
    """

    attempts: int = 5
    first_s: float = 1.0
    longest_s: float = 60.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def delay_s(self, attempt: int, asked_for_s: float | None) -> float:
        """Seconds to wait after the failed ``attempt`` (from 1); up to a quarter is added so that clients spread."""
        if asked_for_s is not None and asked_for_s >= 0:
            return min(asked_for_s, self.longest_s)
        delay = min(self.first_s * 2 ** (attempt - 1), self.longest_s)
        return min(delay * (1 + random.random() / 4), self.longest_s)  # noqa: S311 - jitter is no secret


async def stream_with_retries(
    model: Model, request: ModelRequest, policy: RetryPolicy
) -> AsyncGenerator[BlockEvent | Delayed, None]:
    """The reply to ``request``, with a :class:`Delayed` before each further attempt.

    :raises ProviderBusy: the last one, when every attempt found the provider busy
    :raises ProviderError: anything else, as the model raised it
    """
    for attempt in range(1, policy.attempts + 1):
        begun = False
        events: AsyncIterator[BlockEvent] = model.stream(request)
        try:
            async for event in events:
                begun = begun or not isinstance(event, Usage)
                yield event
            return
        except (ProviderBusy, StreamCut) as error:
            if begun:
                raise error if isinstance(error, StreamCut) else StreamCut(str(error)) from error
            if attempt == policy.attempts:
                raise ProviderBusy(f"{error} (asked {attempt} times)") from error
            asked_for_s = error.retry_after_s if isinstance(error, ProviderBusy) else None
            delay_s = policy.delay_s(attempt, asked_for_s)
            yield Delayed(attempt, policy.attempts, delay_s, str(error))
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()
        await policy.sleep(delay_s)
