"""Guarantees of the writer: durable before the answer, in order, and never dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tests.store.test_writer import MemorySink

from handrail.contract.errors import LogUnavailable
from handrail.store.database import group_writer as writing
from handrail.store.database.group_writer import GroupWriter

pytestmark = pytest.mark.proves("G-01")


@pytest.fixture
def shelf() -> MemorySink:
    shelf = MemorySink()
    shelf.promises = True
    return shelf


async def test_a_producer_that_needs_durability_continues_before_the_database_write(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    writer.queue_without_waiting("before")
    taken = writer.queue_awaitable("said")
    await writer.start_journalled_write("intent")
    assert shelf.promised == [["before", "said", "intent"]] and shelf.batches == [] and writer.backlog >= 3
    assert taken.is_durable and taken.failure is None
    await writer.start_journalled_write("second")
    assert shelf.promised[1:] == [["second"]] and shelf.batches == []
    await writer.commit("outcome")
    assert shelf.batches == [["before", "said", "intent", "second", "outcome"]]
    assert writer.transactions == 1
    writer.close()


async def test_a_lone_journalled_write_is_durable_on_return_on_a_fast_disk(
    shelf: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 300.0)  # whatever else this machine does
    writer = GroupWriter(shelf, linger_s=60)
    first = writer.start_journalled_write("of a disk that nobody knows")
    assert not first.done()
    await first
    await writer.commit("outcome")
    await asleep(writer)
    said = writer.queue_awaitable("said")
    assert writer.start_journalled_write("intent").done() and said.is_durable
    assert shelf.promised[1:] == [["said", "intent"]] and shelf.items[1:] == ["outcome"]
    writer.close()


async def test_a_journal_write_never_blocks_the_event_loop_on_a_slow_or_busy_disk(
    shelf: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, goes_on, entered = GroupWriter(shelf, linger_s=60), threading.Event(), threading.Event()

    def slow(batch: Sequence[str]) -> bool:
        entered.set()
        goes_on.wait()
        return True

    goes_on.set()
    monkeypatch.setattr(shelf, "write_ahead", slow)
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 0.0)
    await writer.start_journalled_write("of a disk that is slow from now on")
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 300.0)
    await writer.commit("outcome")
    await asleep(writer)
    goes_on.clear()
    slowly = writer.start_journalled_write("stood still for, this would never be")
    assert not slowly.done()
    goes_on.set()
    await slowly  # which was quick by now
    assert writer._quick  # pyright: ignore[reportPrivateUsage]
    entered.clear()
    goes_on.clear()
    one = writer.start_journalled_write("one")
    await asyncio.to_thread(entered.wait)
    other = writer.start_journalled_write("other")
    assert not other.done()
    goes_on.set()
    await asyncio.gather(one, other)
    writer.close()


async def asleep(writer: GroupWriter[Any]) -> None:
    while not writer._asleep:  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)


async def test_the_disk_is_woken_for_a_journalled_write_that_may_follow(
    shelf: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 300.0)
    writer, entered = GroupWriter(shelf, linger_s=60), threading.Event()

    def rouse() -> None:
        entered.set()
        while not writer._urgent:  # pyright: ignore[reportPrivateUsage] - until the promise is there
            time.sleep(0)

    monkeypatch.setattr(shelf, "warm_up", rouse)
    await writer.start_journalled_write("first")
    await writer.commit("outcome")
    await asleep(writer)
    writer.warm_up()
    await asyncio.to_thread(entered.wait)
    writer.queue_without_waiting("meanwhile")
    assert writer.start_journalled_write("intent").done(), "nobody else is at it"
    assert shelf.promised == [["first"], ["meanwhile", "intent"]]
    await writer.flush()
    assert shelf.items == ["first", "outcome", "meanwhile", "intent"]
    writer.close()


async def test_the_disk_is_not_woken_for_a_journalled_write_that_follows_immediately(
    shelf: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 300.0)
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("first")
    await writer.commit("outcome")
    await asleep(writer)
    writer.warm_up()
    assert writer.start_journalled_write("second").done()
    written = writer.start_commit("its outcome")
    while not writer._asleep:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0)  # all in one turn of this event loop
    await written
    writer.close()  # and before it ends it would have done what it was rung for
    assert shelf.roused == 0


async def test_the_writer_does_not_warm_up_an_unused_sink(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    await asleep(writer)
    writer.warm_up()
    await asyncio.sleep(0)
    writer.close()
    assert shelf.roused == 0


async def test_the_writer_warms_up_an_idle_sink_only(shelf: MemorySink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 300.0)
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("first")
    await writer.commit("outcome")
    shelf.gate.clear()
    shelf.entered.clear()
    others = asyncio.ensure_future(writer.commit("of somebody else"))
    await asyncio.to_thread(shelf.entered.wait)
    writer.warm_up()
    await asyncio.sleep(0)
    shelf.gate.set()
    await others
    await asleep(writer)
    writer.warm_up()
    await asyncio.to_thread(shelf.awake.wait, 60)
    assert shelf.roused == 1
    writer.close()
    writer.warm_up()
    await asyncio.sleep(0)


async def test_a_journalled_item_is_written_shortly_afterwards_without_a_further_call(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    await writer.start_journalled_write("intent")
    await asyncio.to_thread(shelf.entered.wait, 30)
    await writer.flush()
    assert shelf.items == ["intent"]
    writer.close()


async def test_the_writer_journals_no_item_while_a_commit_waits(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf)
    shelf.gate.clear()
    first = asyncio.ensure_future(writer.commit("first"))
    await asyncio.to_thread(shelf.entered.wait)
    promised, read = writer.start_journalled_write("intent"), asyncio.ensure_future(writer.commit("to be read"))
    await asyncio.sleep(0)
    shelf.gate.set()
    await asyncio.gather(first, promised, read)
    assert shelf.batches == [["first"], ["intent", "to be read"]] and shelf.promised == []
    writer.close()


async def test_an_item_that_cannot_be_journalled_is_written(shelf: MemorySink) -> None:
    shelf.promises = False
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("intent")
    assert shelf.batches == [["intent"]]
    writer.close()


@pytest.mark.proves("G-10")
async def test_a_journalled_write_survives_a_full_disk_and_is_written_first_afterwards(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60, retry_s=60, max_retained=2)
    await writer.start_journalled_write("intent")
    shelf.full = True
    with pytest.raises(LogUnavailable, match="the disk is full"):
        await writer.commit("never")
    for number in range(4):
        writer.queue_without_waiting(f"n{number}")
    with pytest.raises(LogUnavailable, match="still full"):
        await writer.start_journalled_write("refused")  # nothing is promised by a log that cannot write
    shelf.full = False
    await writer.commit("after")
    assert shelf.items == ["intent", "n0", "n1", "n2", "n3", "after"] or shelf.items[0] == "intent"
    assert "never" not in shelf.items and "refused" not in shelf.items
    assert shelf.promised == [["intent"]]
    writer.close()


@pytest.mark.proves("G-10")
async def test_a_journalled_write_does_not_raise_the_limit_of_retained_items(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60, retry_s=60, max_retained=3)
    await writer.start_journalled_write("intent")
    shelf.full = True
    for number in range(9):
        writer.queue_without_waiting(f"n{number}")
    with pytest.raises(LogUnavailable, match="the disk is full"):
        await writer.commit("never")
    while writer.backlog != 3:  # who waits is told first; what they ask for next would count
        await asyncio.sleep(0)
    shelf.full = False
    await writer.flush()
    assert shelf.items == ["intent", "n7", "n8"] and writer.lost == 7
    writer.close()


async def test_a_faulty_item_does_not_split_a_batch_of_journalled_writes(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("intent")
    await writer.start_journalled_write("another")
    writer.queue_without_waiting("neighbour")
    with pytest.raises(LogUnavailable, match="poisoned"):
        await writer.commit("poison")
    assert shelf.batches == [["intent", "another"], ["neighbour"]] and writer.lost == 0
    writer.close()


async def test_a_journalled_item_is_not_lost_when_a_successor_takes_over(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("intent")
    shelf.taken_away = True
    with pytest.raises(LogUnavailable, match="somebody else's"):
        await writer.commit("too late")
    writer.queue_without_waiting("dropped")
    with pytest.raises(LogUnavailable):
        await writer.flush()
    assert writer.lost == 1 and shelf.batches == []
    await asyncio.to_thread(writer.close)
    assert writer.lost == 1


async def test_closing_the_writer_writes_the_journalled_items(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("intent")
    await asyncio.to_thread(writer.close)
    assert shelf.items == ["intent"]


async def test_a_producer_waiting_for_a_short_backlog_is_not_delayed_by_journalled_items(shelf: MemorySink) -> None:
    writer = GroupWriter(shelf, linger_s=60)
    await writer.start_journalled_write("intent")
    waiting = asyncio.ensure_future(writer.wait_for_backlog(1))
    await asyncio.wait_for(waiting, 300)
    assert shelf.items == ["intent"]
    writer.close()
