"""Wake-ups between processes: none is lost, several are merged, and none reaches another workspace."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from handrail.store.database import group_writer
from handrail.store.database.group_writer import EventLoopWakeup, WakeupSignal, create_wakeup

pytestmark = pytest.mark.proves("G-01")

KINDS = ["counters", "none left", "plain"] if group_writer.HAS_EVENTFD else ["plain"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's counters, as where too many files are open for one, and as where there are none."""

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if request.param == "none left":
        monkeypatch.setattr(os, "eventfd", no_more)
    elif request.param == "plain":
        monkeypatch.setattr(group_writer, "HAS_EVENTFD", False)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("kind")
def test_a_signal_without_a_waiter_is_kept_and_several_signals_count_as_one() -> None:
    bell: WakeupSignal = create_wakeup()
    bell.set()
    bell.set()
    bell.wait()
    assert not bell.wait_for(0.0)
    bell.set()
    assert bell.wait_for(60)
    bell.close()


@pytest.mark.usefixtures("kind")
def test_a_signal_set_after_each_change_is_never_lost() -> None:
    bell: WakeupSignal = create_wakeup()
    done: list[int] = []
    seen = 0

    def ringing(which: int) -> None:
        for number in range(300):
            done.append(which * 1000 + number)
            bell.set()

    threads = [threading.Thread(target=ringing, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    while seen < 900:
        assert bell.wait_for(60)  # else a ring was lost, and this would wait for ever
        seen = len(done)
    for thread in threads:
        thread.join()
    bell.close()


@pytest.mark.skipif(not group_writer.HAS_EVENTFD, reason="no counters here")
def test_a_closed_signal_does_not_write_to_a_reused_descriptor() -> None:
    before = open_descriptors()
    bell = create_wakeup()
    bell.close()
    reading, writing = os.pipe2(os.O_NONBLOCK)
    bell.set()
    with pytest.raises(BlockingIOError):
        os.read(reading, 8)
    os.close(reading)
    os.close(writing)
    bell.close()
    assert open_descriptors() == before


@pytest.mark.usefixtures("kind")
async def test_an_event_loop_runs_callbacks_from_other_threads_in_order_and_on_close() -> None:
    loop = asyncio.get_running_loop()
    bell, called, all_called = EventLoopWakeup(loop), list[int](), asyncio.Event()

    def call(number: int) -> Callable[[], object]:
        def calling() -> None:
            assert threading.current_thread() is threading.main_thread()
            called.append(number)
            if number == 500:
                all_called.set()

        return calling

    def ask() -> None:
        for number in range(250):
            bell.schedule(call(number))

    await asyncio.to_thread(ask)
    for number in range(250, 400):
        bell.schedule(call(number))
    bell.close()
    for number in range(400, 501):  # it is closed soon, or by now
        bell.schedule(call(number))
    await asyncio.wait_for(all_called.wait(), 60)
    assert called == list(range(501))
    bell.schedule(call(501))  # closed: it is called all the same
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert called[-1] == 501


@pytest.mark.skipif(not group_writer.HAS_EVENTFD, reason="needs Linux's eventfd")
async def test_an_event_loop_blocked_on_its_wakeup_runs_the_scheduled_callbacks() -> None:
    bell, called = EventLoopWakeup(asyncio.get_running_loop()), list[int]()
    bell.block_until_callback(0)
    bell.schedule(lambda: called.append(0))
    bell._run_callbacks()  # pyright: ignore[reportPrivateUsage] - as when it is rung once more while it calls
    ringing = threading.Thread(target=lambda: bell.schedule(lambda: called.append(1)))
    ringing.start()
    bell.block_until_callback(300)
    assert called == [0, 1]
    ringing.join()
    bell.block_until_callback(0)  # it was rung for nothing else
    bell.close()
    await asyncio.sleep(0)
    bell.block_until_callback(300)  # closed: nobody rings any more
    assert called == [0, 1]


async def test_a_blocked_event_loop_handles_an_already_seen_wake_up_without_errors() -> None:
    loop, called, complaints = asyncio.get_running_loop(), list[int](), list[Mapping[str, Any]]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    bell, over = EventLoopWakeup(loop), asyncio.Event()

    def ring() -> None:
        bell.schedule(lambda: called.append(1))
        loop.call_soon(stand_still)  # before what the loop is about to see

    def stand_still() -> None:
        bell.block_until_callback(0)
        loop.call_soon(over.set)

    loop.call_soon(ring)
    await over.wait()
    assert called == [1] and complaints == []
    bell.close()


@pytest.mark.usefixtures("kind")
def test_a_closed_event_loop_runs_no_callback_and_leaves_no_open_descriptor() -> None:
    before = open_descriptors()
    made: list[EventLoopWakeup] = []

    async def make() -> None:
        made.append(EventLoopWakeup(asyncio.get_running_loop()))

    asyncio.run(make())
    (bell,) = made
    assert bell.is_closed
    bell.schedule(lambda: pytest.fail("it was called"))
    bell.close()
    bell.schedule(lambda: pytest.fail("it was called"))
    bell.close()
    assert open_descriptors() == before


@pytest.mark.usefixtures("kind")
async def test_a_wake_up_does_not_keep_context_values_of_its_creator_alive() -> None:
    class Thing:
        pass

    made: list[EventLoopWakeup] = []
    working_with: ContextVar[Thing] = ContextVar("working_with")

    def make() -> weakref.ref[Thing]:
        thing = Thing()
        working_with.set(thing)
        made.append(EventLoopWakeup(asyncio.get_running_loop()))
        return weakref.ref(thing)

    thing = copy_context().run(make)
    gc.collect()
    assert thing() is None and len(made) == 1
    made[0].close()
