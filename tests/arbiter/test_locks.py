"""Locks: exclusion, order, and the state after a cancelled or late wait."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from handrail.arbiter.lock_table import (
    LockGrant,
    LockTable,
    LockTimeout,
    QueuedLockRequest,
    RequiredLock,
    do_locks_conflict,
)
from handrail.contract.errors import UsageError

WORKSPACE_X: list[RequiredLock] = [(("workspace",), "X")]
WORKSPACE_S: list[RequiredLock] = [(("workspace",), "S")]


def file(*parts: str, mode: str = "X") -> list[RequiredLock]:
    return [(("workspace", *parts), "X" if mode == "X" else "S")]


def acquire(table: LockTable, wants: list[RequiredLock], owner: str = "") -> LockGrant:
    grant = table.try_acquire(wants, owner)
    assert grant is not None
    return grant


async def waiting(request: QueuedLockRequest, timeout_s: float | None = None) -> asyncio.Task[LockGrant]:
    """A task that has begun to wait for ``request``."""
    task = asyncio.create_task(request.wait_until_granted(timeout_s))
    await asyncio.sleep(0)
    return task


@pytest.mark.proves("L-02")
def test_readers_share_a_lock_and_a_writer_excludes_all_others() -> None:
    table = LockTable()
    first, second = acquire(table, file("a", mode="S")), acquire(table, file("a", mode="S"))
    assert table.try_acquire(file("a")) is None
    table.release_grant(first)
    assert table.try_acquire(file("a")) is None
    table.release_grant(second)
    writer = acquire(table, file("a"))
    assert table.try_acquire(file("a", mode="S")) is None
    table.release_grant(writer)
    assert table.active_resource_count == 0


@pytest.mark.proves("L-03")
@pytest.mark.parametrize(
    ("held", "asked", "free"),
    [
        (WORKSPACE_X, file("a.py"), False),
        (WORKSPACE_X, file("src", "deep", "a.py", mode="S"), False),
        (file("src", "deep", "a.py", mode="S"), WORKSPACE_X, False),
        (file("src", "deep", "a.py"), WORKSPACE_S, False),
        (file("src", mode="S"), file("src", "a.py"), False),
        (file("src", mode="S"), file("src", "a.py", mode="S"), True),
        (file("src", mode="S"), file("srcs", "a.py"), True),
        (file("a.py"), file("b.py"), True),
        (WORKSPACE_X, [(("memory",), "X")], True),
        (WORKSPACE_X, [(("account:alice",), "X")], True),
    ],
)
def test_a_lock_conflicts_with_locks_below_and_above_its_resource(
    held: list[RequiredLock], asked: list[RequiredLock], free: bool
) -> None:
    table = LockTable()
    acquire(table, held)
    assert (table.try_acquire(asked) is not None) is free
    assert do_locks_conflict(held, asked) is do_locks_conflict(asked, held) is not free


@pytest.mark.proves("L-02")
def test_a_lock_request_takes_all_its_locks_or_none() -> None:
    table = LockTable()
    other = acquire(table, file("b"))
    assert table.try_acquire([*file("a"), *file("b")]) is None
    acquire(table, file("a"))
    table.release_grant(other)
    assert table.try_acquire([*file("a"), *file("b")]) is None


@pytest.mark.parametrize(
    "wants",
    [
        [*file("a", mode="S"), *file("a")],
        [*WORKSPACE_S, *file("src", "a")],
        [*file("src", "a"), *WORKSPACE_X],
        [*file("src", mode="S"), *file("src", "a"), *file("src", "b"), *file("src", "a")],
    ],
)
def test_a_request_never_conflicts_with_itself(wants: list[RequiredLock]) -> None:
    table = LockTable()
    grant = acquire(table, wants)
    assert grant.covers(wants)
    table.release_grant(grant)
    assert table.active_resource_count == 0


def test_the_same_resource_in_both_modes_is_exclusive() -> None:
    table = LockTable()
    acquire(table, [*file("a", mode="S"), *file("a")])
    assert table.try_acquire(file("a", mode="S")) is None


def test_a_lock_to_read_a_folder_and_write_in_it_excludes_other_writers() -> None:
    table = LockTable()
    acquire(table, [*file("src", mode="S"), *file("src", "a")])
    assert table.try_acquire(file("src", "b")) is None
    assert table.try_acquire(file("src", mode="S")) is None
    assert table.try_acquire(file("src", "b", mode="S")) is not None


@pytest.mark.proves("L-05")
async def test_a_waiting_writer_is_not_starved_by_later_readers() -> None:
    table = LockTable()
    reader = acquire(table, file("a", mode="S"))
    writer = table.queue_for_locks(file("a"))
    assert table.try_acquire(file("a", mode="S")) is None
    late = table.queue_for_locks(file("a", mode="S"))
    assert not writer.is_grant_ready and not late.is_grant_ready
    table.release_grant(reader)
    assert writer.is_grant_ready and not late.is_grant_ready
    table.release_grant(await writer.wait_until_granted())
    assert late.is_grant_ready


@pytest.mark.proves("L-05")
async def test_a_waiting_reader_is_not_overtaken_by_later_writers() -> None:
    table = LockTable()
    writer = acquire(table, file("a"))
    reader = table.queue_for_locks(file("a", mode="S"))
    late = table.queue_for_locks(file("a"))
    table.release_grant(writer)
    assert reader.is_grant_ready and not late.is_grant_ready


@pytest.mark.proves("L-05", "L-06")
def test_a_request_without_conflicts_passes_earlier_waiters() -> None:
    table = LockTable()
    acquire(table, file("a", mode="S"))
    table.queue_for_locks(file("a"))
    assert table.try_acquire(file("b")) is not None
    table.queue_for_locks([*file("a"), *file("c")])
    assert table.try_acquire(file("c")) is None, "an earlier request waits as a whole, so it has its place at c"
    assert table.try_acquire(file("d")) is not None


def test_waiting_readers_acquire_a_lock_together() -> None:
    table = LockTable()
    writer = acquire(table, file("a"))
    readers = [table.queue_for_locks(file("a", mode="S")) for _ in range(5)]
    last = table.queue_for_locks(file("a"))
    table.release_grant(writer)
    assert all(reader.is_grant_ready for reader in readers) and not last.is_grant_ready


@pytest.mark.proves("L-02")
async def test_opposite_orders_of_two_files_cannot_deadlock() -> None:
    table = LockTable()
    first = acquire(table, [*file("a"), *file("b")])
    second = table.queue_for_locks([*file("b"), *file("a")])
    third = table.queue_for_locks([*file("a"), *file("b")])
    table.release_grant(first)
    assert second.is_grant_ready and not third.is_grant_ready
    table.release_grant(await second.wait_until_granted())
    table.release_grant(await third.wait_until_granted())
    assert table.active_resource_count == 0


@pytest.mark.proves("L-05")
async def test_a_lock_wait_times_out_and_the_error_names_the_holder() -> None:
    table = LockTable()
    holder = acquire(table, file("a.py"), "call-1 edit")
    request = table.queue_for_locks(file("a.py"), "call-2")
    behind = table.queue_for_locks(file("a.py", mode="S"))
    with pytest.raises(LockTimeout, match=r"workspace/a\.py:X held by call-1 edit \(X\)"):
        await request.wait_until_granted(0)
    assert not behind.is_grant_ready
    table.release_grant(holder)
    assert behind.is_grant_ready and not request.is_grant_ready
    table.release_grant(await behind.wait_until_granted(0))
    assert table.active_resource_count == 0


def test_a_wait_description_names_a_few_holders_and_counts_the_rest() -> None:
    table = LockTable()
    for number in range(5):
        acquire(table, file("a", mode="S"), f"call-{number}")
    writer = table.queue_for_locks(file("a"))
    assert table.describe_lock_wait(writer) == "workspace/a:X held by call-0 (S), call-1 (S), call-2 (S) and 2 more"
    assert table.describe_lock_wait(table.queue_for_locks(WORKSPACE_X)).startswith("workspace:X held by call-0 (IS)")
    free = table.queue_for_locks([(("memory",), "X")])
    assert free.is_grant_ready and table.describe_lock_wait(free) == ""
    acquire(table, [(("serial",), "S")])
    table.queue_for_locks([*file("a"), (("other",), "X")])
    assert (
        table.describe_lock_wait(table.queue_for_locks([(("other",), "S")])) == "other:S behind earlier waiting calls"
    )


@pytest.mark.proves("L-05")
async def test_a_cancelled_wait_leaves_every_queue_and_unblocks_later_requests() -> None:
    table = LockTable()
    reader = acquire(table, file("a", mode="S"))
    task = await waiting(table.queue_for_locks([*file("a"), *file("b")]))
    behind_a, behind_b = table.queue_for_locks(file("a", mode="S")), table.queue_for_locks(file("b"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert behind_a.is_grant_ready and behind_b.is_grant_ready
    for request in (behind_a, behind_b):
        table.release_grant(await request.wait_until_granted())
    table.release_grant(reader)
    assert table.active_resource_count == 0


@pytest.mark.proves("L-05")
@pytest.mark.parametrize("order", ["grant first", "cancel first"])
async def test_a_simultaneous_grant_and_cancel_leak_no_lock(order: str) -> None:
    table = LockTable()
    holder = acquire(table, file("a"))
    task = await waiting(table.queue_for_locks(file("a")))
    if order == "grant first":
        table.release_grant(holder)
        task.cancel()
    else:
        task.cancel()
        table.release_grant(holder)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert table.active_resource_count == 0


@pytest.mark.proves("L-05")
@pytest.mark.parametrize("order", ["grant first", "time-out first"])
async def test_a_simultaneous_grant_and_timeout_give_one_consistent_outcome(order: str) -> None:
    table = LockTable()
    holder = acquire(table, file("a"))
    request = table.queue_for_locks(file("a"))
    loop = asyncio.get_running_loop()
    if order == "grant first":
        loop.call_later(0, table.release_grant, holder)
        task = asyncio.create_task(request.wait_until_granted(0))
        table.release_grant(await task)
    else:
        task = await waiting(request, 0)
        loop.call_later(0, table.release_grant, holder)
        with pytest.raises(LockTimeout):
            await task
    assert table.active_resource_count == 0


async def test_a_simultaneous_timeout_and_cancel_leak_no_lock(caplog: pytest.LogCaptureFixture) -> None:
    table = LockTable()
    holder = acquire(table, file("a"))
    task = await waiting(table.queue_for_locks(file("a")), 0)
    asyncio.get_running_loop().call_later(0, task.cancel)
    with contextlib.suppress(asyncio.CancelledError, LockTimeout):
        await task
    table.release_grant(holder)
    assert table.active_resource_count == 0 and not caplog.records


async def test_a_lock_request_can_be_withdrawn_at_any_time() -> None:
    table = LockTable()
    holder = acquire(table, file("a"))
    queued, ready = table.queue_for_locks(file("a")), table.queue_for_locks(file("b"))
    for request in (queued, ready, queued, ready):
        request.withdraw_from_queue()
    assert not ready.is_grant_ready
    had = table.queue_for_locks(file("c"))
    grant = await had.wait_until_granted()
    had.withdraw_from_queue()
    assert table.try_acquire(file("c")) is None, "a grant that was taken is its taker's to release"
    table.release_grant(grant)
    table.release_grant(holder)
    assert table.active_resource_count == 0
    with pytest.raises(UsageError, match="withdrawn"):
        await queued.wait_until_granted()


async def test_a_withdrawn_lock_request_wakes_its_waiter_with_an_error() -> None:
    table = LockTable()
    acquire(table, file("a"))
    request = table.queue_for_locks(file("a"))
    task = await waiting(request)
    with pytest.raises(UsageError, match="Await a request once"):
        await request.wait_until_granted()
    request.withdraw_from_queue()
    with pytest.raises(UsageError, match="withdrawn"):
        await task


def test_releasing_twice_is_an_error_that_changes_nothing() -> None:
    table = LockTable()
    grant = acquire(table, file("a"), "call-1")
    table.release_grant(grant)
    again = acquire(table, file("a"))
    with pytest.raises(UsageError, match="call-1"):
        table.release_grant(grant)
    with pytest.raises(UsageError, match="not held"):
        LockTable().release_grant(again)
    assert table.try_acquire(file("a")) is None


@pytest.mark.proves("L-08")
@pytest.mark.parametrize(
    ("held", "asked", "covered"),
    [
        (file("a"), file("a", mode="S"), True),
        (file("a", mode="S"), file("a"), False),
        (file("a", mode="S"), file("a", mode="S"), True),
        (WORKSPACE_X, file("src", "a"), True),
        (WORKSPACE_S, file("src", "a", mode="S"), True),
        (WORKSPACE_S, file("src", "a"), False),
        (file("src", "a"), file("src", "b", mode="S"), False),
        (file("src", "a"), file("src", mode="S"), False),
        ([*WORKSPACE_S, *file("src", "a")], file("src", "b", mode="S"), True),
        ([*WORKSPACE_S, *file("src", "a")], file("src", "b"), False),
        (file("a"), [(("memory",), "S")], False),
        ([], [], True),
        ([], file("a", mode="S"), False),
    ],
)
def test_a_grant_covers_only_the_locks_that_it_contains(
    held: list[RequiredLock], asked: list[RequiredLock], covered: bool
) -> None:
    assert acquire(LockTable(), held).covers(asked) is covered


def test_an_empty_lock_request_is_granted_at_once() -> None:
    table = LockTable()
    acquire(table, WORKSPACE_X)
    grant = acquire(table, [])
    assert table.queue_for_locks([]).is_grant_ready
    table.release_grant(grant)


@pytest.mark.parametrize("wants", [[((), "S")], [(("a",), "Z")], [(("a",), "X"), ((), "S")], [("a",)], ["ab"]])
def test_a_malformed_lock_request_is_refused_and_leaves_no_lock(wants: list[RequiredLock]) -> None:
    table = LockTable()
    for ask in (table.try_acquire, table.queue_for_locks):
        with pytest.raises(UsageError, match="Expected pairs"):
            ask(wants)
    assert table.active_resource_count == 0


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
async def test_an_invalid_wait_budget_is_refused(budget: float) -> None:
    request = LockTable().queue_for_locks(file("a"))
    with pytest.raises(UsageError, match="0 or more"):
        await request.wait_until_granted(budget)
