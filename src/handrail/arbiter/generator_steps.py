"""The task that runs a stateful tool's generator, and the runtime that always belongs to the current step.

One task takes every step, so a context that the generator opens around a ``yield`` (a time-out, a connection) is left in
the task that entered it. Between steps nothing runs, and the runtime gives access to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, cast

from handrail.contract.errors import ToolError
from handrail.contract.services.tool_runtime import Runtime

_DOORS = frozenset(
    {
        *(
            "files",
            "search",
            "shell",
            "net",
            "secrets",
            "state",
            "people",
            "channels",
            "triggers",
            "transcript",
            "memory",
            "terminals",
        ),
        *("catalog", "jobs", "agents", "skills", "cancellation", "peer", "resources"),
    }
)
_MOST_CLOSES = 8
"""How often a generator that yields although it is closed is closed again."""


class EndOfSteps:
    """The value that :meth:`GeneratorSteps.take_step` returns if there is no further step."""


END_OF_STEPS: Final = EndOfSteps()


class GeneratorIgnoredClose(Exception):
    """A generator kept yielding although it was closed."""


class GeneratorSteps:
    """The steps of one generator, which are taken one at a time.

    :param begin: makes the generator for the given runtime
    :param name: the name of its tool
    :param none: the error text of its runtime between steps
    """

    def __init__(self, begin: Callable[[Runtime], AsyncGenerator[object, Any]], name: str, none: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.current_runtime: Runtime | None = None
        """The runtime of the running step."""
        self._generator = begin(cast("Runtime", CurrentStepRuntimeProxy(lambda: self._get_runtime(none))))
        self._requested: asyncio.Queue[tuple[Any, bool, asyncio.Future[object]]] = asyncio.Queue()
        self.on_cancelled: Callable[[], None] | None = None
        """Called when a step is cancelled, before its generator is."""
        self._fresh = True
        self._busy = False
        self._cancelled = False
        self.has_ended = False
        """Whether it has ended or can take no further step."""
        self.task = self._loop.create_task(self._run_steps(), name=f"handrail-steps-{name}")

    async def take_step(self, runtime: Runtime, sent: object = None) -> object:
        """Take the next step. A cancellation cancels the generator at its present wait, and waits for its end.

        :return: the value that it yields, or :data:`END_OF_STEPS`
        :raises Exception: as the generator raises
        """
        return END_OF_STEPS if self.has_ended else await self._request_step(runtime, sent, closes=False)

    async def close(self, runtime: Runtime | None = None) -> None:
        """Close the generator, which runs its ``finally`` blocks.

        :param runtime: the runtime that they may use; None for none
        :raises GeneratorIgnoredClose: if it does not end
        :raises Exception: as the generator raises
        """
        if not self.has_ended:
            await self._request_step(runtime, None, closes=True)

    async def _request_step(self, runtime: Runtime | None, sent: object, *, closes: bool) -> object:
        self.current_runtime = runtime
        answer: asyncio.Future[object] = self._loop.create_future()
        self._requested.put_nowait((sent, closes, answer))
        try:
            while not answer.done() and not self.task.done():
                try:
                    await asyncio.wait((answer, self.task), return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    if not answer.done():
                        self._cancel_step()
            if not answer.done():  # the event loop ends
                self.has_ended = True
                raise asyncio.CancelledError
            return answer.result()
        finally:
            self.current_runtime = None

    def _cancel_step(self) -> None:
        self._cancelled = True
        if self.on_cancelled is not None:
            self.on_cancelled()
        if self._busy:
            self.task.cancel()

    def _get_runtime(self, none: str) -> Runtime:
        if self.current_runtime is None:
            raise ToolError(none, kind="cancelled")
        return self.current_runtime

    async def _run_steps(self) -> None:
        while not self.has_ended:
            sent, closes, answer = await self._requested.get()
            result: object = END_OF_STEPS
            failure: BaseException | None = None
            self._busy = True
            try:
                if self._cancelled:
                    raise asyncio.CancelledError
                if closes:
                    await self._end()
                else:
                    result = await self._advance(sent)
            except BaseException as error:  # the sys.exit() of a tool would end the event loop
                self.has_ended = True
                failure = error
            finally:
                self._busy = False
            if self._cancelled:
                while self.task.uncancel():
                    pass
                failure = await self._close_after_ignored_cancel(failure)
            _settle(answer, result, failure, cancellation_received=self._cancelled)
        await self._abandon()

    async def _advance(self, sent: object) -> object:
        try:
            value = await self._generator.asend(None if self._fresh else sent)
        except StopAsyncIteration:
            self.has_ended = True
            return END_OF_STEPS
        self._fresh = False
        return value

    async def _close_after_ignored_cancel(self, failure: BaseException | None) -> BaseException | None:
        """Close a generator that yielded although it was cancelled."""
        if failure is None and not self.has_ended:
            try:
                await self._end()
            except (Exception, asyncio.CancelledError) as error:
                failure = error
        self.has_ended = True
        return failure

    async def _end(self) -> None:
        self.has_ended = True
        for _ in range(_MOST_CLOSES):
            try:
                await self._generator.athrow(GeneratorExit)
            except (GeneratorExit, StopAsyncIteration):
                return
        raise GeneratorIgnoredClose

    async def _abandon(self) -> None:
        """Abandon the generator and close it once more, so that the event loop does not have to."""
        while not self._requested.empty():
            _, _, answer = self._requested.get_nowait()
            _settle(answer, END_OF_STEPS, None, cancellation_received=False)
        with contextlib.suppress(BaseException):
            await self._generator.aclose()


def _settle(
    answer: asyncio.Future[object], result: object, failure: BaseException | None, *, cancellation_received: bool
) -> None:
    if answer.done():
        return
    if isinstance(failure, Exception) and not isinstance(failure, StopIteration):
        answer.set_exception(failure)
    elif cancellation_received:
        answer.cancel()
    elif failure is None:
        answer.set_result(result)
    elif isinstance(failure, asyncio.CancelledError):
        answer.set_exception(RuntimeError("the tool awaited a task that was cancelled (CancelledError)"))
    else:
        answer.set_exception(RuntimeError(f"the tool raised {type(failure).__name__}: {failure}"))


class CurrentStepRuntimeProxy:
    """The runtime of the running step, also for services that a tool keeps: each access asks the present step.

    :param now: returns the present runtime, or raises between steps
    """

    __slots__ = ("now",)

    def __init__(self, now: Callable[[], Runtime]) -> None:
        self.now = now

    def __getattr__(self, name: str) -> Any:
        if name == "opened":
            raise ToolError(
                "A stateful tool cannot continue its own tool session. Yield a value instead.", kind="denied"
            )
        return _forward(self.now, name, door=name in _DOORS)


class _StepService:
    """One service of the present runtime."""

    __slots__ = ("_of",)

    def __init__(self, of: Callable[[], Any]) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return _forward(self._of, name)


def _forward(of: Callable[[], Any], name: str, *, door: bool = False) -> Any:
    found = getattr(of(), name)
    if door:
        return _StepService(lambda: getattr(of(), name))
    if not callable(found):
        return found

    def asked(*args: Any, **kwargs: Any) -> Any:
        return getattr(of(), name)(*args, **kwargs)

    return asked


def get_current_step_runtime(runtime: Runtime) -> Runtime:
    """Return the runtime of the running step behind the one that a generator received."""
    return runtime.now() if isinstance(runtime, CurrentStepRuntimeProxy) else runtime
