"""Step 4, lock: take all locks of a call at once, or a place in the queue; background calls included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

from handrail.arbiter.call_state import Call, CallRejection
from handrail.arbiter.client_requests import pause_timeouts
from handrail.arbiter.lock_table import LockGrant, LockResolver, LockTable, LockTimeout, do_locks_conflict, format_locks
from handrail.contract.errors import ToolError
from handrail.contract.tool.spec import ToolSpec

OPEN_SESSION_RESOURCE = "open state"
"""The root of the locks that keep two steps of one tool session apart."""


def becomes_background_job(call: Call, spec: ToolSpec, arguments: Mapping[str, Any]) -> bool:
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


def set_required_locks(call: Call, resources: LockResolver) -> None:
    """Set the locks that a call requires, and whether it becomes a job, from its validated arguments.

    :raises CallRejection: if an argument cannot name a resource
    """
    assert call.entry is not None and call.arguments is not None
    spec, roots = call.entry.spec, call.lane.environment.roots
    try:
        call.background = becomes_background_job(call, spec, call.arguments)
        call.required_locks = resources.resolve(spec, call.arguments, roots, background=call.background)
        if call.is_tool_session_step and call.session_step is not None and call.parent is None:
            call.required_locks = (
                *call.required_locks,
                ((OPEN_SESSION_RESOURCE, call.session_step.id), "X"),
            )  # one step at a time
    except ToolError as error:
        raise CallRejection("validate", error.kind, error.text) from None


class CallLockManager:
    """The locks of calls: acquires and releases them.

    :ivar wait_ms: how long a call may wait for its locks
    """

    def __init__(self, locks: LockTable, wait_ms: int) -> None:
        self.locks = locks
        self.wait_ms = wait_ms

    def acquire(self, call: Call, predecessors: Sequence[Call]) -> Awaitable[None] | None:
        """Acquire the locks now, or return an awaitable that waits for them.

        :param predecessors: the earlier calls of the same model reply, in its order
        :raises CallRejection: ``conflict`` if the locks of a calling call do not cover a nested call
        """
        if call.parent is not None and (held := _find_parent_grant(call)) is not None:
            _run_under_parent_locks(call, call.parent, held)
            return None
        if predecessors:
            return self._acquire_after(call, predecessors)
        if call.required_locks:
            call.grant = self.locks.try_acquire(call.required_locks, call.id)
            if call.grant is None:
                return self._wait_for_turn(call)
        if call.queued is not None:
            call.mark_lock_queued()
        return None

    async def _acquire_after(self, call: Call, predecessors: Sequence[Call]) -> None:
        assert call.entry is not None
        for earlier in predecessors:
            if (
                earlier.queued is not None
                and not earlier.queued.done()
                and (
                    call.entry.spec.side_effect != "read"
                    or do_locks_conflict(call.required_locks, earlier.required_locks)
                )
            ):
                call.copy_arguments()
                await call.await_interruptible("lock", partial(_wait_until_queued, earlier.queued))
        if waits := self.acquire(call, ()):
            await waits

    async def _wait_for_turn(self, call: Call) -> None:
        call.copy_arguments()
        call.submit_queued_records()
        began = time.monotonic_ns()
        request = self.locks.queue_for_locks(call.required_locks, call.id)
        call.mark_lock_queued()
        call.emit("awaiting-locks", {"for": self.locks.describe_lock_wait(request)})
        try:
            budget_s = self.wait_ms / 1000
            with pause_timeouts(call):  # the wait does not use up the time-out of a calling tool
                call.grant = await call.await_interruptible("lock", lambda: request.wait_until_granted(budget_s))
        except LockTimeout as error:
            text = f"`{call.tool_id}` waited {self.wait_ms} ms for a lock: {error}. Nothing was run. Try again later."
            raise CallRejection("lock", "timeout", text) from None
        finally:
            if call.grant is None:
                request.withdraw_from_queue()
            call.lock_wait_ms = (time.monotonic_ns() - began) / 1e6

    def release(self, call: Call) -> None:
        grant: LockGrant | None = call.grant
        if grant is not None:
            call.grant = None
            self.locks.release_grant(grant)


def _find_parent_grant(call: Call) -> LockGrant | None:
    """Return the grant of the nearest calling call that holds locks; None if there is none.

    The lock on a tool session does not count: a nested call never asks for one, so no cycle can form through it.
    """
    above = call.parent
    while above is not None:
        if above.grant is not None and any(
            resource[0] != OPEN_SESSION_RESOURCE for resource, _ in above.required_locks
        ):
            return above.grant
        above = above.parent
    return None


def _run_under_parent_locks(call: Call, caller: Call, held: LockGrant) -> None:
    """Check that a nested call may run under the locks of a calling call. It never waits for others, so no cycle can form.

    :raises CallRejection: ``conflict``
    """
    if call.required_locks and not held.covers(call.required_locks):
        needed = ", ".join(format_locks(call.required_locks))
        text = f"`{call.tool_id}` needs the locks {needed}, which its caller `{caller.tool_id}` does not hold. Nothing was run."
        hint = (
            f"Call `{call.tool_id}` directly, or ask the user to declare these locks in `locks` of `{caller.tool_id}`."
        )
        raise CallRejection("lock", "conflict", f"{text} {hint}")


async def _wait_until_queued(entered: asyncio.Future[None]) -> None:
    await asyncio.shield(entered)
