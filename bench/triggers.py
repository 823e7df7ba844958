"""Ten thousand pending triggers beside a thousand background jobs: what they cost while idle, after a restart, and how soon
one fires.

The triggers are schedules, timers and watched channels of ten sessions. Idle cost is the process's own processor time and
memory; a firing is timed from the moment it was due to the moment at which its notice is durable, by the wall clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.contract.services.channels_and_triggers import Notification, TriggerService
    from handrail.kernel.local_kernel import LocalKernel
    from handrail.store.database.workspace_database import TableWork

SESSIONS, EACH, JOBS, IDLE_S, FIRINGS = 10, 1_000, 1_000, 5.0, 200
SOONEST_MS, APART_MS = 1_000, 10
DAY_MS = 24 * 3600 * 1000


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def idle(what: str) -> None:
    """What doing nothing costs."""
    memory, used = memory_mb(), processor_s()
    await asyncio.sleep(IDLE_S)
    share = (processor_s() - used) / IDLE_S
    print(f"{what}, idle for {IDLE_S:g} s: {share:.2%} of a processor, memory {memory_mb() - memory:+.1f} MB")


async def add(kernel: LocalKernel, ids: list[str]) -> None:
    """Ten thousand, by the doors that the tools use."""
    for _ in range(SESSIONS):
        session = await kernel.session()
        ids.append(session.id)
        assert session.lane.triggers is not None
        for first in range(0, EACH, 100):
            await asyncio.gather(*(one(session.lane.triggers, number) for number in range(first, first + 100)))


async def one(triggers: TriggerService, number: int) -> None:
    name = f"t{number}"
    if number % 10 == 0:
        await triggers.watch_channel(f"channel-{number % 100}", "look", name=name)
    elif number % 2:
        await triggers.add_schedule(f"{number % 60} {number % 24} {1 + number % 28} 1 *", "look", name=name)
    else:
        await triggers.add_timer(DAY_MS + number, "look", name=name)


async def accuracy(kernel: LocalKernel, session_id: str) -> None:
    """Timers that fire once, one after the other, beside all others."""
    session = await kernel.session(session_id)
    triggers, board = session.lane.triggers, kernel.inbound_services.notifications
    assert triggers is not None
    for number in range(FIRINGS):
        await triggers.remove(f"t{number}")
    told: dict[str, int] = {}
    done, post = asyncio.Event(), board.store_notification

    async def posted(notice: Notification, *along: TableWork) -> None:
        await post(notice, *along)
        told[notice.source] = time.time_ns()
        if len(told) == FIRINGS:
            done.set()

    board.store_notification = posted
    due: dict[str, int] = {}
    for number in range(FIRINGS):
        made = await triggers.add_timer(SOONEST_MS + number * APART_MS, "now", name=f"f{number}", once=True)
        assert made.next_ns is not None
        due[made.name] = made.next_ns
    await done.wait()
    late = sorted((told[name] - at) / 1e6 for name, at in due.items())
    print(
        f"{FIRINGS} firings over {FIRINGS * APART_MS / 1000:g} s: {statistics.median(late):.1f} ms after they were due (p50), "
        f"{late[int(FIRINGS * 0.99)]:.1f} (p99), {late[-1]:.1f} at most"
    )


async def main() -> None:
    from handrail import Runtime, open_kernel, tool
    from handrail.kernel.local_kernel import LocalKernel

    logging.disable(logging.WARNING)
    over = asyncio.Event()

    @tool(id="bench.idle", side_effect="external", mode="background", locks=[])
    async def waits(number: int, runtime: Runtime) -> int:
        """Wait."""
        await over.wait()
        return number

    with tempfile.TemporaryDirectory() as folder:
        workspace, state = Path(folder, "ws"), Path(folder, "state")
        workspace.mkdir()
        empty = Path(folder, "handrail.toml")
        empty.touch()
        opened = {"tools": [waits], "rules": ["allow bench.idle"], "state": state, "config": empty}
        ids: list[str] = []
        count = SESSIONS * EACH
        async with open_kernel(workspace, **opened) as kernel:  # pyright: ignore[reportArgumentType]
            assert isinstance(kernel, LocalKernel)
            session = await kernel.session()
            await idle("without any")
            answers = await session.call_all([("bench.idle", {"number": number}) for number in range(JOBS)])
            assert all(answer.ok for answer in answers)
            await kernel.log.flush()
            await idle(f"{JOBS:,} jobs")
            before_mb, began = memory_mb(), time.perf_counter()
            await add(kernel, ids)
            took, with_mb = time.perf_counter() - began, memory_mb()
            each_kb = (with_mb - before_mb) * 1000 / count
            print(f"{count:,} triggers added in {took:.2f} s ({took / count * 1e3:.2f} ms each), {each_kb:.1f} kB each")
            await idle(f"{JOBS:,} jobs and {count:,} triggers")
            over.set()
        began = time.perf_counter()
        async with open_kernel(workspace, **opened) as kernel:  # pyright: ignore[reportArgumentType]
            assert isinstance(kernel, LocalKernel)
            opening = time.perf_counter() - began
            before_mb, began = memory_mb(), time.perf_counter()
            await kernel.session()
            first = time.perf_counter() - began
            print(f"restart: opened in {opening:.2f} s, the first session, which takes them up, in {first:.2f} s")
            assert len(kernel.inbound_services.triggers.table.list_all()) == count
            await idle(f"after the restart, {count:,} triggers")
            await accuracy(kernel, ids[0])


if __name__ == "__main__":
    asyncio.run(main())
