"""Reads one reply in a task of its own, so that a slow watcher, a deadline or a stop never leaves a stream half open.

The connection is opened, read and closed by that one task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from handrail.agent.model import BlockEvent, Model, ModelRequest, ProviderError, StreamCut
from handrail.agent.streaming.retry import Delayed, RetryPolicy, stream_with_retries
from handrail.agent.streaming.stream import EVENT_UNITS, MAX_REPLY_UNITS, ReplyTooLong

T = TypeVar("T")


class OutOfTime(Exception):
    """The deadline passed while the reply was read."""


class StoppedReading(Exception):
    """:meth:`ReplyPump.stop` was called while the reply was read."""


class _End:
    """The last thing in the queue.

    :param why: None when the stream ended by itself
    """

    def __init__(self, why: Exception | None = None) -> None:
        self.why = why


Heed = Callable[[BlockEvent | Delayed], Awaitable[Iterable[T]]]


class ReplyPump(Generic[T]):
    """One request's events, heeded as they come and told in order.

    :param deadline: on the running loop's clock; None: none
    :param heed: awaited with each event, whether or not anybody watches; gives what is told of it
    """

    def __init__(
        self, model: Model, request: ModelRequest, policy: RetryPolicy, deadline: float | None, heed: Heed[T]
    ) -> None:
        self._told: asyncio.Queue[T | _End] = asyncio.Queue()
        self._heed = heed
        self._stopped = False
        self._task = asyncio.create_task(self._read(model, request, policy, deadline))
        self._task.add_done_callback(self._cut)

    def stop(self) -> None:
        """Close the stream; :meth:`events` then ends with :class:`StoppedReading`."""
        self._stopped = True
        self._task.cancel()

    async def aclose(self) -> None:
        """Close the stream and wait until it is closed."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def events(self) -> AsyncGenerator[T, None]:
        """What is told of the events, as they come.

        :raises ReplyTooLong: as the heeding did
        :raises ProviderError: as :func:`stream_with_retries` does
        :raises OutOfTime: at the deadline
        :raises StoppedReading: after :meth:`stop`
        """
        while not isinstance(told := await self._told.get(), _End):
            yield told
        if told.why is not None:
            raise told.why

    def _tell(self, told: T | _End) -> None:
        # In a while: what the event has begun, such as a call, goes first.
        asyncio.get_running_loop().call_soon(self._told.put_nowait, told)

    async def _read(self, model: Model, request: ModelRequest, policy: RetryPolicy, deadline: float | None) -> None:
        units = 0
        timer = asyncio.timeout_at(deadline)
        try:
            async with timer:
                stream = stream_with_retries(model, request, policy)
                try:
                    async for event in stream:
                        # Bounds what waits for a slow watcher; the assembly of the reply counts the same more closely.
                        units += EVENT_UNITS + len(getattr(event, "text", ""))
                        if units > MAX_REPLY_UNITS + EVENT_UNITS:
                            raise StreamCut(f"the reply is longer than {MAX_REPLY_UNITS:,} characters")
                        for told in await self._heed(event):
                            self._tell(told)
                finally:
                    await stream.aclose()
            self._tell(_End())
        except TimeoutError:
            late = OutOfTime() if timer.expired() else StreamCut("the provider sent nothing for too long")
            self._tell(_End(late))
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        except (ProviderError, ReplyTooLong) as error:
            self._tell(_End(error))
        except Exception as error:  # a defect in an adapter: the run ends with its name, and open calls are answered
            text = f"reading the reply of {model.name} failed: {type(error).__name__}: {str(error)[:500]}"
            self._tell(_End(ProviderError(text)))

    def _cut(self, _: asyncio.Task[None]) -> None:
        """It reads no more: where nothing else has told of that, it was stopped, maybe before its first step."""
        self._told.put_nowait(_End(StoppedReading()))
