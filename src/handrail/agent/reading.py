"""Reading one reply of a model to its end, or as far as it comes. How it ended is recorded in the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from handrail.agent.events import LoopEvent
from handrail.agent.model import Model, ModelRequest, ProviderError, StreamCut
from handrail.agent.run import Run
from handrail.agent.streaming.pump import Heed, OutOfTime, ReplyPump, StoppedReading
from handrail.agent.streaming.retry import RetryPolicy
from handrail.agent.streaming.stream import ReplyAssembly, ReplyTooLong


async def read_reply(
    run: Run,
    assembly: ReplyAssembly,
    model: Model,
    request: ModelRequest,
    retry: RetryPolicy,
    heed: Heed[LoopEvent],
) -> AsyncGenerator[LoopEvent, None]:
    """Read one reply and tell of it; what cuts it short is left in ``run``.

    :param heed: puts each event into ``assembly``, whether or not anybody watches
    """
    run.error = None
    if run.stopped is not None:  # since the turn began, or while a watcher was told of it: nothing is asked any more
        return
    pump = run.pump = ReplyPump(model, request, retry, run.deadline, heed)
    try:
        async with aclosing(pump.events()) as events:
            async for event in events:
                yield event
        if assembly.reason is None:
            run.error = StreamCut("the reply ended without the provider's closing sign")
    except ReplyTooLong as error:
        run.error = StreamCut(str(error))
    except ProviderError as error:
        if assembly.reason is None:  # what goes wrong after the closing sign takes nothing from the reply
            run.error = error
    except OutOfTime:
        run.stopped = run.stopped or "budget"
    except StoppedReading:
        assert run.stopped is not None
    finally:
        run.pump = None
        await pump.aclose()
