"""Reads one reply in a task of its own, so that a slow watcher, a deadline or a stop never leaves a stream half open.

The connection is opened, read and closed by that one task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from handrail.agent.model import BlockEvent, Model, ModelRequest, ProviderError, StreamCut
from handrail.agent.retry import Delayed, RetryPolicy, stream_with_retries
from handrail.agent.stream import EVENT_UNITS, MAX_REPLY_UNITS


class OutOfTime(Exception):
    """The deadline passed while the reply was read."""


class StoppedReading(Exception):
    """:meth:`ReplyPump.stop` was called while the reply was read."""


class ReplyPump:
    """One request's events, buffered.

    :param deadline: on the running loop's clock; None: none
    """

    def __init__(self, model: Model, request: ModelRequest, policy: RetryPolicy, deadline: float | None) -> None:
        self._events: asyncio.Queue[BlockEvent | Delayed | Exception | None] = asyncio.Queue()
        self._stopped = False
        self._task = asyncio.create_task(self._read(model, request, policy, deadline))

    def stop(self) -> None:
        """Close the stream; :meth:`events` then ends with :class:`StoppedReading`."""
        self._stopped = True
        self._task.cancel()

    async def aclose(self) -> None:
        """Close the stream and wait until it is closed."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def events(self) -> AsyncGenerator[BlockEvent | Delayed, None]:
        """The events as they come.

        :raises ProviderError: as :func:`stream_with_retries` does
        :raises OutOfTime: at the deadline
        :raises StoppedReading: after :meth:`stop`
        """
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

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
                        self._events.put_nowait(event)
                finally:
                    await stream.aclose()
            self._events.put_nowait(None)
        except TimeoutError:
            self._events.put_nowait(
                OutOfTime() if timer.expired() else StreamCut("the provider sent nothing for too long")
            )
        except asyncio.CancelledError:
            self._events.put_nowait(StoppedReading())
            if not self._stopped:
                raise
        except ProviderError as error:
            self._events.put_nowait(error)
        except Exception as error:  # a defect in an adapter: the run ends with its name, and open calls are answered
            self._events.put_nowait(
                ProviderError(f"reading the reply of {model.name} failed: {type(error).__name__}: {str(error)[:500]}")
            )
