"""The lock table against a simple list as its model: equal grants after every step."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from handrail.arbiter.lock_table import LockGrant, LockTable, LockTimeout, QueuedLockRequest, RequiredLock

pytestmark = pytest.mark.proves("L-02", "L-03", "L-05")

RESOURCES = (
    ("w",),
    ("w", "a"),
    ("w", "a", "1"),
    ("w", "a", "2"),
    ("w", "b"),
    ("w", "b", "1"),
    ("m",),
    ("m", "x"),
)
want: st.SearchStrategy[RequiredLock] = st.tuples(st.sampled_from(RESOURCES), st.sampled_from(("S", "X")))
wanted = st.lists(want, min_size=1, max_size=3)


def clash(some: list[RequiredLock], others: list[RequiredLock]) -> bool:
    """Return whether two locks conflict by definition: one contains the other, and one is a write lock."""
    return any(
        "X" in (mode, other_mode) and resource[: len(other)] == other[: len(resource)]
        for resource, mode in some
        for other, other_mode in others
    )


@dataclass(eq=False)
class Live:
    wants: list[RequiredLock]
    request: QueuedLockRequest | None
    grant: LockGrant | None = None


class Locks(RuleBasedStateMachine):
    """Every request that is alive, in arrival order; one has its turn when no earlier one clashes with it."""

    @initialize()
    def empty(self) -> None:
        self.table = LockTable()
        self.live: list[Live] = []

    def may_run(self, one: Live) -> bool:
        earlier = self.live[: self.live.index(one)]
        return not any(clash(one.wants, other.wants) for other in earlier)

    @rule(wants=wanted)
    def enqueue(self, wants: list[RequiredLock]) -> None:
        self.live.append(Live(wants, self.table.queue_for_locks(wants)))

    @rule(wants=wanted)
    def try_acquire(self, wants: list[RequiredLock]) -> None:
        grant = self.table.try_acquire(wants)
        assert (grant is not None) is not any(clash(wants, other.wants) for other in self.live)
        if grant is not None:
            self.live.append(Live(wants, None, grant))

    @precondition(lambda self: any(self.may_run(one) for one in self.live))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.live if self.may_run(one)]))
        if one.grant is not None:
            self.table.release_grant(one.grant)
        else:
            assert one.request is not None
            one.request.withdraw_from_queue()
        self.live.remove(one)

    @precondition(lambda self: not all(self.may_run(one) for one in self.live))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.live if not self.may_run(one)]))
        assert one.request is not None
        one.request.withdraw_from_queue()
        self.live.remove(one)

    @invariant()
    def the_same_ones_have_their_turn(self) -> None:
        for one in self.live:
            assert (one.grant is not None or (one.request is not None and one.request.is_grant_ready)) is self.may_run(
                one
            )

    @invariant()
    def resources_without_anybody_are_forgotten(self) -> None:
        named = {r[:depth] for one in self.live for r, _ in one.wants for depth in range(1, len(r) + 1)}
        assert self.table.active_resource_count == len(named)

    def teardown(self) -> None:
        while self.live:
            self.finish_first()
        assert self.table.active_resource_count == 0

    def finish_first(self) -> None:
        one = self.live.pop(0)
        if one.grant is not None:
            self.table.release_grant(one.grant)
        else:
            assert one.request is not None and one.request.is_grant_ready, "the earliest always has its turn"
            one.request.withdraw_from_queue()


TestLocks = Locks.TestCase
TestLocks.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(
        st.tuples(wanted, st.sampled_from(("runs", "times out", "is cancelled")), st.integers(0, 6), st.integers(0, 4)),
        max_size=25,
    )
)
def test_any_mix_of_finished_late_and_cancelled_calls_leaves_an_empty_lock_table(
    calls: list[tuple[list[RequiredLock], str, int, int]],
) -> None:
    table = LockTable()
    running: list[list[RequiredLock]] = []
    outcomes: list[str] = []

    async def call(wants: list[RequiredLock], fate: str, steps: int) -> None:
        request = table.queue_for_locks(wants)
        try:
            grant = await request.wait_until_granted(0 if fate == "times out" else None)
        except LockTimeout:
            outcomes.append("late")
            return
        try:
            assert not any(clash(wants, other) for other in running)
            running.append(wants)
            for _ in range(steps):
                await asyncio.sleep(0)
            outcomes.append("ran")
        finally:
            running.remove(wants)
            table.release_grant(grant)

    async def everything() -> None:
        tasks: list[asyncio.Task[None]] = []
        for wants, fate, steps, pause in calls:
            task = asyncio.create_task(call(wants, fate, steps))
            tasks.append(task)
            for _ in range(pause):
                await asyncio.sleep(0)
            if fate == "is cancelled":
                task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(everything())
    assert table.active_resource_count == 0
    assert outcomes.count("ran") >= sum(fate == "runs" for _, fate, _, _ in calls)
