"""Step 4, lock: take all locks of a call at once, or a place in the queue; background calls included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

from handrail.arbiter.call import Call, Refusal
from handrail.arbiter.locks import Grant, LockTable, LockTimeout, Resources, conflict, lock_names
from handrail.arbiter.peers import not_counted
from handrail.contract.errors import ToolError
from handrail.contract.tool.spec import ToolSpec

OPEN_STATE = "open state"
"""The root of the locks that keep two steps of one tool session apart."""


def in_background(call: Call, spec: ToolSpec, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call is answered with a job. A nested call never is, since it runs under its caller's locks.

    :raises ToolError: ``invalid_input`` if a nested call asks for it
    """
    asked = spec.background_argument is not None and arguments.get(spec.background_argument) is True
    if call.parent is None:
        return asked or spec.mode == "background"
    if asked:
        raise ToolError(
            f"`{spec.background_argument}` is not available for a call that a tool makes. Leave it out.",
            kind="invalid_input",
        )
    return False


def choose_locks(call: Call, resources: Resources) -> None:
    """Set the locks that a call requires, and whether it becomes a job, from its validated arguments.

    :raises Refusal: if an argument cannot name a resource
    """
    assert call.entry is not None and call.arguments is not None
    spec, roots = call.entry.spec, call.lane.around.roots
    try:
        call.background = in_background(call, spec, call.arguments)
        call.wants = resources.wants(spec, call.arguments, roots, background=call.background)
        if call.steps and call.going is not None and call.parent is None:
            call.wants = (*call.wants, ((OPEN_STATE, call.going.id), "X"))  # one step at a time
    except ToolError as error:
        raise Refusal("validate", error.kind, error.text) from None


class Locking:
    """The locks of calls: acquires and releases them.

    :ivar wait_ms: how long a call may wait for its locks
    """

    def __init__(self, locks: LockTable, wait_ms: int) -> None:
        self.locks = locks
        self.wait_ms = wait_ms

    def lock(self, call: Call, predecessors: Sequence[Call]) -> Awaitable[None] | None:
        """Acquire the locks now, or return an awaitable that waits for them.

        :param predecessors: the earlier calls of the same model reply, in its order
        :raises Refusal: ``conflict`` if the locks of a calling call do not cover a nested call
        """
        if call.parent is not None and (held := _held_above(call)) is not None:
            _borrow(call, call.parent, held)
            return None
        if predecessors:
            return self._after(call, predecessors)
        if call.wants:
            call.grant = self.locks.try_acquire(call.wants, call.id)
            if call.grant is None:
                return self._in_turn(call)
        if call.entered is not None:
            call.has_entered()
        return None

    async def _after(self, call: Call, predecessors: Sequence[Call]) -> None:
        assert call.entry is not None
        for earlier in predecessors:
            if (
                earlier.entered is not None
                and not earlier.entered.done()
                and (call.entry.spec.side_effect != "read" or conflict(call.wants, earlier.wants))
            ):
                call.own_arguments()
                await call.interruptible("lock", partial(_until, earlier.entered))
        if waits := self.lock(call, ()):
            await waits

    async def _in_turn(self, call: Call) -> None:
        call.own_arguments()
        call.flush()
        began = time.monotonic_ns()
        request = self.locks.enqueue(call.wants, call.id)
        call.has_entered()
        call.emit("waiting", {"for": self.locks.waiting_for(request)})
        try:
            budget_s = self.wait_ms / 1000
            with not_counted(call):  # the wait does not use up the time-out of a calling tool
                call.grant = await call.interruptible("lock", lambda: request.granted(budget_s))
        except LockTimeout as error:
            text = f"`{call.tool_id}` waited {self.wait_ms} ms for a lock: {error}. Nothing was run. Try again later."
            raise Refusal("lock", "timeout", text) from None
        finally:
            if call.grant is None:
                request.withdraw()
            call.lock_wait_ms = (time.monotonic_ns() - began) / 1e6

    def release(self, call: Call) -> None:
        """Release the locks of a call."""
        grant: Grant | None = call.grant
        if grant is not None:
            call.grant = None
            self.locks.release(grant)


def _held_above(call: Call) -> Grant | None:
    """Return the grant of the nearest calling call that holds locks; None if there is none.

    The lock on a tool session does not count: a nested call never asks for one, so no cycle can form through it.
    """
    above = call.parent
    while above is not None:
        if above.grant is not None and any(resource[0] != OPEN_STATE for resource, _ in above.wants):
            return above.grant
        above = above.parent
    return None


def _borrow(call: Call, caller: Call, held: Grant) -> None:
    """Check that a nested call may run under the locks of a calling call. It never waits for others, so no cycle can form.

    :raises Refusal: ``conflict``
    """
    if call.wants and not held.covers(call.wants):
        needed = ", ".join(lock_names(call.wants))
        text = f"`{call.tool_id}` needs the locks {needed}, which its caller `{caller.tool_id}` does not hold. Nothing was run."
        hint = (
            f"Call `{call.tool_id}` directly, or ask the user to declare these locks in `locks` of `{caller.tool_id}`."
        )
        raise Refusal("lock", "conflict", f"{text} {hint}")


async def _until(entered: asyncio.Future[None]) -> None:
    await asyncio.shield(entered)
