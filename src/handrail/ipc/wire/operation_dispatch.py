"""The closed table of operations that a peer may request, and the concurrent dispatch of its requests."""

from __future__ import annotations

import asyncio
import logging
import types
from asyncio.tasks import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage] - documented for making tasks
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import copy_context
from typing import Any

from handrail.contract.errors import HandrailError
from handrail.contract.struct import Struct, field
from handrail.ipc.wire.message_frames import Message

MAX_RUNNING = 16_384
"""The maximum number of open requests of one peer; further ones are refused."""

logger = logging.getLogger("handrail.ipc")

OperationHandler = Callable[[Any], Coroutine[Any, Any, Any]]
"""Answers one request: takes its body, returns the body of the answer, raises :class:`RemoteRequestError`. JSON, hence ``Any``."""

LEAVING = "leaving"
"""The kind of refusal of a lease holder that shuts down: nothing was started. Repeat the request with the next holder."""
TRANSFERRED = "handed-on"
"""The kind of refusal of a lease holder that shuts down after it accepted calls. The log shows how far each call came; the
next holder takes those that had not started."""


class RemoteRequestError(HandrailError):
    """The peer refused a request. A handler raises it to refuse one.

    :param kind: a word for programs; the wire itself uses ``unknown_op``, ``limit``, ``answer_too_large``, ``cancelled``
        and ``defect``, and any other :class:`HandrailError` of a handler arrives under the name of its class
    :param text: the text for users: what was wrong, what was expected, what to do next
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class OperationSpec(Struct, frozen=True):
    """One operation that a peer may request.

    Handlers with the same flags start in the order in which their requests arrive.

    :param handler: answers the request, concurrently with other handlers
    :param inline: run it up to its first wait before the next message is read. A handler that never waits needs no task.
        Until its first wait it has no current task, so it may use ``asyncio.timeout`` and task groups only afterwards
    :param eager: also run it up to its first wait immediately, but with a current task: for handlers that usually end
        without waiting, and need a task if they wait
    :param cancel_when_lost: cancel it if the connection is lost. Otherwise it continues: a lost connection does not abort
    """

    handler: OperationHandler
    inline: bool = False
    eager: bool = False
    cancel_when_lost: bool = False


class OperationTable(Struct, frozen=True):
    """The operations that a peer may request, and the notifications that it may send.

    :param requests: the operations by name
    :param notifications: the notification handlers by name; called in order of arrival with the body, and must not block
    """

    requests: Mapping[str, OperationSpec] = field(default_factory=dict[str, OperationSpec])
    notifications: Mapping[str, Callable[[Any], None]] = field(default_factory=dict[str, Callable[[Any], None]])


class RequestDispatcher:
    """A dispatcher that handles the requests of one peer.

    :param reply: sends the answer to a request; called once for each request, even if the peer no longer waits
    """

    def __init__(self, operations: OperationTable, reply: Callable[[Message], None]) -> None:
        self.operations = operations
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, tuple[asyncio.Task[None], OperationSpec]] = {}
        self._standby: _StandbyCoroutine | None = None
        self._is_lost = False

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._running)

    def handle_request(self, number: int, name: str, body: Any) -> None:
        """Start to answer a request, or refuse it."""
        if (op := self.operations.requests.get(name)) is None:
            self._refuse(
                number,
                "unknown_op",
                f"The other process has no operation {name[:80]!r}. Use the same Handrail version for all processes.",
            )
        elif len(self._running) >= MAX_RUNNING:
            self._refuse(
                number,
                "limit",
                f"Too many open requests: {MAX_RUNNING:,}. Wait until some are answered, then try again.",
            )
        elif op.inline:
            self._run_inline(number, op, body)
        elif op.eager:
            self._run_in_standby(number, op, body)
        else:
            self._running[number] = (self._loop.create_task(self._run_handler(number, op.handler, body)), op)

    def handle_notification(self, name: str, body: Any) -> None:
        if (call := self.operations.notifications.get(name)) is None:
            logger.info("ignored a notification of an unknown kind: %.80r", name)
            return
        try:
            call(body)
        except Exception:
            logger.exception("the notification %r failed", name)

    def cancel_request_handler(self, number: int) -> None:
        """Cancel the handler of a request, if it is still running."""
        if (running := self._running.get(number)) is not None:
            self._cancel(running[0])

    def handle_disconnect(self) -> None:
        """Cancel the handlers that must not continue after the peer has disconnected."""
        self._is_lost = True
        if self._standby is not None:
            self._standby.task.cancel()
        for task, op in list(self._running.values()):
            if op.cancel_when_lost:
                self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        # Not before the task's first step, which is in the loop's queue already: every started task enters its handler's
        # code, and can clean up.
        self._loop.call_soon(task.cancel)

    def _run_in_standby(self, number: int, op: OperationSpec, body: Any) -> None:
        """Run a handler immediately up to its first wait, in the standby task."""
        standby, self._standby = self._standby, None
        if standby is None:
            standby = _StandbyCoroutine(self._loop)
        if not standby.run_first_step(self._run_handler(number, op.handler, body)):
            self._running[number] = (standby.task, op)
            if self._is_lost and op.cancel_when_lost:
                self._cancel(standby.task)
        elif standby.is_reusable and not self._is_lost:
            self._standby = standby
        else:
            standby.task.cancel()

    def _run_inline(self, number: int, op: OperationSpec, body: Any) -> None:
        """Run a handler immediately up to its first wait; a task runs the rest, if any."""
        context = copy_context()
        handling = context.run(op.handler, body)
        try:
            waited: Any = context.run(handling.send, None)
        except StopIteration as end:
            self._reply({"id": number, "ok": end.value})
        except (Exception, asyncio.CancelledError) as error:
            self._reply(_make_failure(number, error))
        else:
            rest = self._run_handler(number, lambda _: _continue_coroutine(handling, waited), None)
            self._running[number] = (self._loop.create_task(rest, context=context), op)

    async def _run_handler(self, number: int, handler: Callable[[Any], Any], body: Any) -> None:
        try:
            message = {"id": number, "ok": await handler(body)}
        except asyncio.CancelledError as error:
            self._reply(_make_failure(number, error))
            raise
        except Exception as error:
            message = _make_failure(number, error)
        finally:
            self._running.pop(number, None)
        self._reply(message)

    def _refuse(self, number: int, kind: str, text: str) -> None:
        self._reply({"id": number, "error": {"kind": kind, "text": text}})


def _make_failure(number: int, error: BaseException) -> Message:
    """Return the answer for a handler that raised.

    It contains only errors that Handrail raises on purpose. Defects are logged here.
    """
    if isinstance(error, RemoteRequestError):
        kind, text = error.kind, error.text
    elif isinstance(error, HandrailError):
        kind, text = type(error).__name__, str(error)
    elif isinstance(error, asyncio.CancelledError):
        kind, text = "cancelled", "The request was cancelled."
    else:
        logger.error("a request failed", exc_info=error)
        kind, text = "defect", f"The other process failed with {type(error).__name__}. Its log has the details."
    return {"id": number, "error": {"kind": kind, "text": text}}


class _StandbyCoroutine(Coroutine[Any, Any, None]):
    """The coroutine of a standby task for requests.

    Each handler runs its first step immediately, with this task as the current one. Creating a task per request would cost as
    much as a call. If a handler ends in its first step, the task stays on standby. If it waits, the task continues with it.
    """

    __slots__ = ("_context", "_idle", "_idling", "_loop", "_unchanged", "_waits_for", "_work", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: asyncio.Future[None] = loop.create_future()
        self._idling = self._idle.__await__()
        self._work: Coroutine[Any, Any, None] | None = None
        self._waits_for: Any = _NOTHING
        self._context = copy_context()
        self._unchanged = copy_context()
        self.task: asyncio.Task[None] = loop.create_task(self, context=self._context)

    def run_first_step(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run the first step of ``work``, and return whether it has ended.

        If it has not, the task continues with ``work`` and ends with it.
        """
        _enter_task(self._loop, self.task)
        try:
            self._waits_for = self._context.run(work.send, None)
        except (StopIteration, asyncio.CancelledError):
            return True
        finally:
            _leave_task(self._loop, self.task)
        self._work = work
        if not self._idle.done():
            self._idle.set_result(None)
        return False

    @property
    def is_reusable(self) -> bool:
        """Whether the task is unchanged, so that the next request can use it."""
        return not self._idle.done() and not self.task.cancelling() and self._context == self._unchanged

    def send(self, value: Any, /) -> Any:
        if self._work is None:
            return next(self._idling)
        if self._waits_for is _NOTHING:
            return self._work.send(value)
        waits_for, self._waits_for = self._waits_for, _NOTHING
        return waits_for

    def throw(self, *error: Any) -> Any:
        self._waits_for = _NOTHING  # the work receives the exception at this wait
        return (self._idling if self._work is None else self._work).throw(*error)

    def close(self) -> None:
        if self._work is not None:
            self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("Only a task can run this coroutine.")


_NOTHING = object()


@types.coroutine
def _continue_coroutine(handling: Coroutine[Any, Any, Any], waited: Any) -> Generator[Any, Any, Any]:
    """Continue a coroutine whose first step has run and that waits for ``waited``."""
    while True:
        try:
            sent = yield waited
        except GeneratorExit:
            handling.close()
            raise
        except BaseException as error:
            step, value = handling.throw, error
        else:
            step, value = handling.send, sent
        try:
            waited = step(value)
        except StopIteration as end:
            return end.value
