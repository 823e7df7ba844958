"""Tasks that take their first step at once, as Python 3.12 has it for eager tasks.

The next turn of the event loop may have much else to do first, and from rest even an empty one costs as much as a step of a call.
"""

from __future__ import annotations

import asyncio
from asyncio import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage] - documented, for tasks of another kind
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def begin_at_once(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], known: Callable[[asyncio.Task[T]], object]
) -> asyncio.Task[T]:
    """A task of ``loop``, the running one, that does ``work`` and has taken its first step: in that task and its context.

    :param known: given the task before that step, which may already stop it
    """
    context, begun = copy_context(), BegunInTask(work)
    task: asyncio.Task[T] = loop.create_task(begun, context=context)
    known(task)
    caller = asyncio.current_task(loop)
    if caller is not None:
        _leave_task(loop, caller)
    _enter_task(loop, task)
    try:
        context.run(begun.begin)
    finally:
        _leave_task(loop, task)
        if caller is not None:
            _enter_task(loop, caller)
    return task


class BegunInTask(Coroutine[Any, Any, Any]):
    """What such a task runs. How the first step ends is told in the task's first turn."""

    __slots__ = ("_ended", "_first", "_is_first", "_owed", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._is_first = True
        self._first: Any = None
        """What it waits for then."""
        self._ended: BaseException | None = None
        """How it ended with that."""
        self._owed: asyncio.CancelledError | None = None
        """To be raised once what it waits for is there, which could not be cancelled."""

    def begin(self) -> None:
        """Take the first step."""
        try:
            self._first = self._work.send(None)
        except BaseException as ended:
            self._ended = ended

    def send(self, value: Any) -> Any:
        if self._is_first:
            return self._took_first()
        if self._owed is not None:
            return self.throw(self._owed)
        return self._work.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        if self._is_first:
            if self._ended is not None:
                return self._took_first()
            first: object = self._first
            if isinstance(error, asyncio.CancelledError) and asyncio.isfuture(first) and not first.done():
                if not first.cancel():  # as a task does where it waits
                    self._owed = error
                return self._took_first()
        self._is_first = False
        if self._owed is not None:
            error, more, self._owed = self._owed, (), None
        return self._work.throw(error, *more)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            first = self.send(None)
        except StopIteration as ended:
            return ended.value
        return (yield from Begun(self, first).__await__())

    def _took_first(self) -> Any:
        self._is_first = False
        first, ended = self._first, self._ended
        self._first = self._ended = None  # not kept alive while the work goes on
        if ended is not None:
            raise ended
        return first


class Begun:
    """Awaits a coroutine whose first step was already taken, in the same task."""

    __slots__ = ("_first", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], first: Any) -> None:
        self._work = work
        self._first = first

    def __await__(self) -> Generator[Any, Any, Any]:
        waited_for = self._first
        try:
            while True:
                try:
                    sent = yield waited_for
                except GeneratorExit:
                    self._work.close()
                    raise
                except BaseException as error:
                    waited_for = self._work.throw(error)
                else:
                    waited_for = self._work.send(sent)
        except StopIteration as ended:
            return ended.value
