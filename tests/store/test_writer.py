"""The writer: group commits, failures reported to all who wait, and no lost write."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from handrail.contract.errors import LogUnavailable
from handrail.store.database.group_writer import GroupWriter, SinkPermanentlyLost, SinkUnavailable


class MemorySink:
    """A sink in memory whose disk can be full, slow or given a poisoned item."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.full = False
        self.taken_away = False
        self.promises = False
        self.promised: list[list[str]] = []
        self.roused = 0
        self.awake = threading.Event()
        self.reopened = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    @property
    def items(self) -> list[str]:
        return [item for batch in self.batches for item in batch]

    def write_ahead(self, batch: Sequence[str]) -> bool:
        if self.promises:
            self.promised.append(list(batch))
        return self.promises

    def warm_up(self) -> None:
        self.roused += 1
        self.awake.set()

    def write(self, batch: Sequence[str]) -> None:
        self.entered.set()
        self.gate.wait()
        if self.taken_away:
            raise SinkPermanentlyLost("somebody else's")
        if self.full:
            raise SinkUnavailable("the disk is full")
        if "poison" in batch:
            raise ValueError("poisoned")
        self.batches.append(list(batch))

    def reopen(self) -> None:
        self.reopened += 1
        if self.taken_away:
            raise SinkPermanentlyLost("still somebody else's")
        if self.full:
            raise SinkUnavailable("the disk is still full")

    def close(self) -> None:
        pass


@pytest.fixture
def shelf() -> MemorySink:
    return MemorySink()


@pytest.mark.proves("G-01")
async def test_callers_that_arrive_during_a_sync_share_the_next_sync(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    shelf.gate.clear()
    first = asyncio.create_task(writer.commit("first"))
    await asyncio.to_thread(shelf.entered.wait)
    others = [asyncio.create_task(writer.commit(f"n{n}")) for n in range(64)]
    await asyncio.sleep(0)
    shelf.gate.set()
    await asyncio.gather(first, *others)
    assert [len(batch) for batch in shelf.batches] == [1, 64]
    assert (writer.transactions, writer.commits) == (2, 65)
    writer.close()


async def test_appended_items_are_written_in_order_before_a_later_commit(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    for number in range(100):
        writer.queue_without_waiting(f"n{number}")
    await writer.commit("last")
    assert shelf.items == [*(f"n{n}" for n in range(100)), "last"]
    writer.close()


async def test_an_appended_item_is_written_without_a_waiting_caller(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    writer.queue_without_waiting("alone")
    await asyncio.to_thread(shelf.entered.wait, 30)
    await writer.flush()
    assert shelf.items == ["alone"] and writer.backlog == 0
    writer.close()


async def test_closing_the_writer_writes_its_queue_and_later_commits_fail(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    writer.queue_without_waiting("left")
    await asyncio.to_thread(writer.close)
    assert shelf.items == ["left"]
    with pytest.raises(LogUnavailable, match="closed"):
        await writer.commit("late")
    writer.queue_without_waiting("later")
    assert writer.lost == 1


@pytest.mark.proves("G-10")
async def test_every_caller_gets_the_error_of_a_failing_sink_until_it_recovers(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    shelf.full = True
    outcomes = await asyncio.gather(*(writer.commit(f"n{n}") for n in range(5)), return_exceptions=True)
    assert all(isinstance(outcome, LogUnavailable) for outcome in outcomes)
    assert writer.unavailable_reason == "the disk is full" or writer.unavailable_reason == "the disk is still full"
    with pytest.raises(LogUnavailable, match="still full"):
        await writer.flush()
    shelf.full = False
    await writer.commit("after")
    assert writer.unavailable_reason is None and shelf.items == ["after"]
    writer.close()


async def test_queued_items_survive_a_failure_in_order_and_failed_commits_are_dropped(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, retry_s=60)
    shelf.full = True
    writer.queue_without_waiting("a")
    with pytest.raises(LogUnavailable):
        await writer.commit("intent")
    writer.queue_without_waiting("b")
    with pytest.raises(LogUnavailable):
        await writer.commit("intent 2")
    writer.queue_without_waiting("c")
    shelf.full = False
    await writer.commit("d")
    assert shelf.items == ["a", "b", "c", "d"] and writer.lost == 0
    writer.close()


async def test_the_writer_retries_queued_items_without_a_caller(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, retry_s=0.01)
    shelf.full = True
    with pytest.raises(LogUnavailable):
        await writer.commit("x")
    writer.queue_without_waiting("kept")
    while shelf.reopened < 3:
        await asyncio.sleep(0)
    shelf.full = False
    while writer.unavailable_reason is not None:
        await asyncio.sleep(0)
    assert shelf.items == ["kept"]
    writer.close()


async def test_items_that_exceed_the_retention_limit_are_counted_as_lost(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, retry_s=60, max_retained=3)
    shelf.full = True
    for number in range(10):
        writer.queue_without_waiting(f"n{number}")
    with pytest.raises(LogUnavailable):
        await writer.commit("x")
    shelf.full = False
    await writer.flush()
    kept = len(shelf.items)
    assert 1 <= kept <= 3 and writer.lost == 10 - kept
    assert shelf.items == [f"n{n}" for n in range(10 - kept, 10)]
    writer.close()


async def test_a_faulty_item_does_not_fail_other_items_of_its_batch(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    shelf.gate.clear()
    first = asyncio.create_task(writer.commit("first"))
    await asyncio.to_thread(shelf.entered.wait)
    group = [asyncio.create_task(writer.commit(item)) for item in ("a", "poison", "b")]
    await asyncio.sleep(0)
    writer.queue_without_waiting("poison")
    writer.queue_without_waiting("c")
    shelf.gate.set()
    outcomes = await asyncio.gather(first, *group, return_exceptions=True)
    await writer.flush()
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), LogUnavailable, type(None)]
    assert shelf.items == ["first", "a", "b", "c"]
    assert writer.unavailable_reason is None and writer.lost == 1
    writer.close()


async def test_a_cancelled_wait_withdraws_no_item_and_does_not_affect_other_callers(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    shelf.gate.clear()
    tasks = [asyncio.create_task(writer.commit(f"n{n}")) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    shelf.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] is None and outcomes[2] is None and isinstance(outcomes[1], asyncio.CancelledError)
    assert shelf.items == ["n0", "n1", "n2"]
    writer.close()


async def test_a_producer_can_wait_until_the_backlog_is_short(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    shelf.gate.clear()
    for number in range(20):
        writer.queue_without_waiting(f"n{number}")
    waiting = asyncio.create_task(writer.wait_for_backlog(5))
    await asyncio.to_thread(shelf.entered.wait)
    assert not waiting.done()
    shelf.gate.set()
    await waiting
    assert writer.backlog < 5
    writer.close()


async def test_callers_in_two_event_loops_are_both_answered(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)

    async def many(name: str) -> None:
        await asyncio.gather(*(writer.commit(f"{name}{n}") for n in range(50)))

    await asyncio.gather(many("a"), asyncio.to_thread(asyncio.run, many("b")))
    assert sorted(shelf.items) == sorted([*(f"a{n}" for n in range(50)), *(f"b{n}" for n in range(50))])
    writer.close()


@pytest.mark.proves("L-07")
async def test_items_queued_for_a_sink_that_was_taken_over_are_dropped_and_counted(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, max_batch=2)
    shelf.gate.clear()
    shelf.taken_away = True
    for number in range(5):
        writer.queue_without_waiting(f"n{number}")
    waiting = asyncio.create_task(writer.commit("last"))
    await asyncio.to_thread(shelf.entered.wait)
    shelf.gate.set()
    with pytest.raises(LogUnavailable, match="somebody else's"):
        await waiting
    writer.queue_without_waiting("n5")
    with pytest.raises(LogUnavailable, match="still somebody else's"):
        await writer.flush()
    await asyncio.to_thread(writer.close)
    assert writer.lost == 6 and shelf.items == []


async def test_a_commit_behind_a_long_backlog_is_refused_on_a_full_disk(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, max_batch=2)
    shelf.full = True
    for number in range(5):
        writer.queue_without_waiting(f"n{number}")
    with pytest.raises(LogUnavailable, match="full"):
        await asyncio.wait_for(writer.commit("never"), 300)
    shelf.full = False
    await writer.commit("last")
    assert shelf.items == ["n0", "n1", "n2", "n3", "n4", "last"]
    await asyncio.to_thread(writer.close)


async def test_a_cancelled_caller_of_a_commit_waits_until_the_outcome_is_known(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    shelf.gate.clear()
    written = writer.start_commit("intent")

    async def wait() -> None:
        await written

    waiting = asyncio.create_task(wait())
    await asyncio.to_thread(shelf.entered.wait)
    waiting.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    shelf.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert written.result() is None
    assert shelf.items == ["intent"]
    await asyncio.to_thread(writer.close)


async def test_a_queued_item_becomes_durable_shortly_afterwards_without_a_further_call(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=0.001)
    taken = writer.queue_awaitable("said")
    assert not taken.is_durable
    while not taken.is_durable:
        await asyncio.to_thread(shelf.entered.wait)
    assert shelf.items == ["said"]
    await asyncio.to_thread(writer.close)


class ClosedInBetween(GroupWriter[str]):
    """A connection that another thread closes right after a check that it is open."""

    def _check_open(self) -> None:
        super()._check_open()
        closing = threading.Thread(target=self.close)
        closing.start()
        closing.join()


def open_when_entered(shelf: MemorySink) -> None:
    shelf.entered.wait()
    shelf.gate.set()


async def test_a_call_made_while_the_writer_closes_fails_and_does_not_wait() -> None:
    ways: list[Callable[[GroupWriter[str]], Awaitable[None]]] = [
        lambda writer: writer.commit("late"),
        lambda writer: writer.flush(),
        lambda writer: writer.wait_for_backlog(1),
    ]
    for way in ways:
        shelf = MemorySink()
        shelf.gate.clear()
        writer = ClosedInBetween(shelf)
        writer.queue_without_waiting("first")
        threading.Thread(target=open_when_entered, args=(shelf,)).start()
        with pytest.raises(LogUnavailable, match="closed"):
            await way(writer)
        assert shelf.items == ["first"]


async def test_wakeup_descriptors_are_closed_with_the_writer_or_with_their_event_loop(shelf: MemorySink) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what other tests have left
    before = descriptors()
    writer = GroupWriter(shelf)
    await writer.commit("here")
    own = descriptors()
    for number in range(20):
        await asyncio.to_thread(asyncio.run, writer.commit(f"n{number}"))
    assert descriptors() <= own + 1  # the last one's goes when the next one comes
    await asyncio.to_thread(writer.close)
    await asyncio.sleep(0)
    assert descriptors() == before
