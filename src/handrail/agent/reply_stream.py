"""The task that reads one reply, so that a slow listener, a deadline or a stop never leaves a stream half open.

That one task opens, reads and closes the connection. Also here: bounded retries of a busy provider.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from handrail.agent.model_protocol import (
    BlockEvent,
    Model,
    ModelRequest,
    ProviderBusy,
    ProviderError,
    ReplyStreamCut,
    TokenUsage,
)
from handrail.agent.reply_assembly import EVENT_UNITS, MAX_REPLY_UNITS, ReplyTooLong
from handrail.contract.struct import Struct

# Retries of a busy provider: bounded, with back-off, and only before the reply begins to arrive.
#
# After the first block a second request could repeat its calls, so from then on every failure is a
# :class:`~handrail.agent.model_protocol.ReplyStreamCut`.


class RetryDelayed(Struct, frozen=True):
    """The provider was busy, and the request is sent again after ``delay_s`` seconds."""

    attempt: int
    attempts: int
    delay_s: float
    reason: str


class RetryPolicy(Struct, frozen=True):
    """The number of requests and the delays between them.

    :param attempts: requests altogether, including the first
    :param min_delay_s: seconds before the second request; doubled each time, up to ``max_delay_s``
    :param max_delay_s: the longest delay in seconds if the provider asks for none
    :param max_requested_delay_s: the longest delay in seconds that a provider may ask for. If it asks for more, the
        request is not sent again
    :param sleep: waits the given seconds; tests may replace it
    """

    attempts: int = 5
    min_delay_s: float = 1.0
    max_delay_s: float = 60.0
    max_requested_delay_s: float = 3600.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def compute_retry_delay_s(self, attempt: int, asked_for_s: float | None) -> float:
        """Return the seconds to wait after the failed ``attempt``, counted from 1.

        Up to a quarter is added at random, so that clients do not retry together.
        """
        # The provider knows when it has room again. A guess would only add another refused request.
        if asked_for_s is not None and asked_for_s > 0:
            return asked_for_s
        delay = min(self.min_delay_s * 2 ** (attempt - 1), self.max_delay_s)
        return min(delay * (1 + random.random() / 4), self.max_delay_s)  # noqa: S311 - jitter is no secret


async def stream_with_retries(
    model: Model, request: ModelRequest, policy: RetryPolicy
) -> AsyncGenerator[BlockEvent | RetryDelayed, None]:
    """Yield the reply to ``request``, with a :class:`RetryDelayed` before each further attempt.

    :raises ProviderBusy: if the provider was busy at every attempt; the last error
    :raises ProviderError: any other error of the model
    """
    for attempt in range(1, policy.attempts + 1):
        begun = False
        events: AsyncIterator[BlockEvent] = model.stream(request)
        try:
            async for event in events:
                # Some providers report the tokens of the request first, which is not a part of the reply.
                begun = begun or not isinstance(event, TokenUsage)
                yield event
            return
        except (ProviderBusy, ReplyStreamCut) as error:
            asked_for_s = error.retry_after_s if isinstance(error, ProviderBusy) else None
            is_too_long = asked_for_s is not None and asked_for_s > policy.max_requested_delay_s
            if begun:
                if asked_for_s is not None and not is_too_long:  # the next turn sends the request again
                    yield RetryDelayed(attempt, policy.attempts, asked_for_s, str(error))
                    await policy.sleep(asked_for_s)
                raise error if isinstance(error, ReplyStreamCut) else ReplyStreamCut(str(error)) from error
            # A wait of hours is for the user to decide, not for a run that holds a session.
            if is_too_long:
                raise ProviderBusy(
                    f"{error} The provider asks you to wait {asked_for_s:,.0f} seconds. Resume the run after that.",
                    retry_after_s=asked_for_s,
                ) from error
            if attempt == policy.attempts:
                raise ProviderBusy(
                    f"{str(error).rstrip('.')}. All {attempt} attempts failed. Resume the run later, or choose another model."
                ) from error
            delay_s = policy.compute_retry_delay_s(attempt, asked_for_s)
            yield RetryDelayed(attempt, policy.attempts, delay_s, str(error))
        finally:
            # An adapter holds a connection, which is closed before the next attempt opens another one.
            if isinstance(events, AsyncGenerator):
                await events.aclose()
        await policy.sleep(delay_s)


T = TypeVar("T")

_STEPS_A_TURN = 64
"""The number of events after which other tasks may run."""
_TOLD = 4
"""The number of steps that a reported event counts for, because it may have started a call."""


class ReplyDeadlineExceeded(Exception):
    """The deadline passed while the reply was read."""


class ReplyReadingStopped(Exception):
    """:meth:`ReplyStreamTask.close_stream` was called while the reply was read."""


class _EndOfStream:
    """The last item in the queue.

    :param why: None if the stream ended by itself
    """

    def __init__(self, why: Exception | None = None) -> None:
        self.why = why


EventHandler = Callable[[BlockEvent | RetryDelayed], Awaitable[Iterable[T]]]


class ReplyStreamTask(Generic[T]):
    """A task that reads one reply: it handles each event on arrival and yields the results in order.

    :param deadline: on the running loop's clock; None for none
    :param handle: awaited with each event, even if no reader takes the results; returns the results
    """

    def __init__(
        self, model: Model, request: ModelRequest, policy: RetryPolicy, deadline: float | None, handle: EventHandler[T]
    ) -> None:
        self._queue: asyncio.Queue[T | _EndOfStream] = asyncio.Queue()
        self._handle = handle
        self._stopped = False
        self._task = asyncio.create_task(self._read(model, request, policy, deadline))
        self._task.add_done_callback(self._on_task_done)

    def close_stream(self) -> None:
        """Close the stream; :meth:`iterate_results` then ends with :class:`ReplyReadingStopped`."""
        self._stopped = True
        self._task.cancel()

    async def aclose(self) -> None:
        """Close the stream and wait until it is closed."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def iterate_results(self) -> AsyncGenerator[T, None]:
        """Yield the results of the event handler in order.

        :raises ReplyTooLong: if the handler raises it
        :raises ProviderError: see :func:`stream_with_retries`
        :raises ReplyDeadlineExceeded: at the deadline
        :raises ReplyReadingStopped: after :meth:`close_stream`
        """
        while not isinstance(value := await self._queue.get(), _EndOfStream):
            yield value
        if value.why is not None:
            raise value.why

    def _put(self, item: T | _EndOfStream) -> None:
        # Not at once, so that a call that the event started runs first.
        asyncio.get_running_loop().call_soon(self._queue.put_nowait, item)

    async def _read(self, model: Model, request: ModelRequest, policy: RetryPolicy, deadline: float | None) -> None:
        units = steps = 0
        timer = asyncio.timeout_at(deadline)
        try:
            async with timer:
                stream = stream_with_retries(model, request, policy)
                try:
                    async for event in stream:
                        # Bounds the queue of a slow reader. The assembly of the reply has the exact limit.
                        units += EVENT_UNITS + len(getattr(event, "text", ""))
                        if units > MAX_REPLY_UNITS + EVENT_UNITS:
                            raise ReplyStreamCut(
                                f"The reply is longer than {MAX_REPLY_UNITS:,} characters. Ask the model for a shorter one."
                            )
                        steps += 1
                        for item in await self._handle(event):
                            self._put(item)
                            steps += _TOLD
                        # Many events may have come at once, and then nothing here waits for a moment.
                        if steps >= _STEPS_A_TURN:
                            steps = 0
                            await asyncio.sleep(0)
                finally:
                    await stream.aclose()
            self._put(_EndOfStream())
        except TimeoutError:
            # The same exception comes from the run's deadline and from a silent provider. Only the first is the end of
            # the run.
            late = (
                ReplyDeadlineExceeded()
                if timer.expired()
                else ReplyStreamCut("The provider sent nothing for too long. Try again later.")
            )
            self._put(_EndOfStream(late))
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        except (ProviderError, ReplyTooLong) as error:
            self._put(_EndOfStream(error))
        except Exception as error:  # a bug in an adapter: the run ends with its name, and open calls are answered
            text = f"Reading the reply of {model.name} failed: {type(error).__name__}: {str(error)[:500]}"
            self._put(_EndOfStream(ProviderError(text)))

    def _on_task_done(self, _: asyncio.Task[None]) -> None:
        """End the queue if the task was stopped, maybe before its first step."""
        self._queue.put_nowait(_EndOfStream(ReplyReadingStopped()))
