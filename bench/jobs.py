"""A thousand background jobs at once: what they cost while they are idle, and how soon a stop reaches a running program.

Idle jobs are calls of a Python tool that waits; their cost is the process's own processor time and memory. A stop is timed
from the call of ``stop`` to the moment at which the program's process is gone, as the kernel of the operating system says.
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
    from handrail import Session

JOBS, IDLE_S, STOPS = 1_000, 10.0, 20


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def alive(mark: str) -> list[int]:
    """Processes whose command line holds ``write_marker_file``."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


async def main() -> None:
    from handrail import Runtime, open_kernel, tool

    logging.disable(logging.WARNING)
    over = asyncio.Event()

    @tool(id="bench.idle", side_effect="external", mode="background", locks=[])
    async def idle(number: int, runtime: Runtime) -> int:
        """Wait."""
        runtime.write_output(f"job {number}\n")
        await over.wait()
        return number

    with tempfile.TemporaryDirectory() as folder:
        workspace, state = Path(folder, "ws"), Path(folder, "state")
        workspace.mkdir()
        script = workspace / "wait.sh"
        script.write_text("#!/bin/sh\nsleep infinity\n")
        script.chmod(0o755)
        empty = Path(folder, "handrail.toml")
        empty.touch()
        rules = ["allow bench.idle", "allow bash ./wait.sh *"]
        async with open_kernel(workspace, tools=[idle], rules=rules, state=state, config=empty) as kernel:
            session = await kernel.session()
            before_mb, began = memory_mb(), time.perf_counter()
            answers = await session.call_all([("bench.idle", {"number": number}) for number in range(JOBS)])
            assert all(answer.ok for answer in answers)
            print(f"{JOBS:,} jobs begun in {time.perf_counter() - began:.2f} s")
            await kernel.log.flush()
            begun_mb, used = memory_mb(), processor_s()
            print(
                f"memory {before_mb:.0f} MB before, {begun_mb:.0f} MB with them ({(begun_mb - before_mb) * 1000 / JOBS:.0f} kB a job)"
            )
            await asyncio.sleep(IDLE_S)
            share = (processor_s() - used) / IDLE_S
            print(f"idle for {IDLE_S:g} s: {share:.2%} of a processor, memory {memory_mb() - begun_mb:+.1f} MB")
            over.set()
            began = time.perf_counter()
            jobs = await session.jobs.list()
            for job in jobs:
                assert (await session.jobs.wait(job.id, timeout_ms=60_000)) is not None
            print(f"all ended and on record after {time.perf_counter() - began:.2f} s")
            if kernel.sandbox_tier.is_confining:
                await stops(session)


async def stops(session: Session) -> None:
    times: list[float] = []
    for number in range(STOPS):
        mark = f"7{os.getpid()}{number:03}"
        begun = await session.call("bash", {"command": f"./wait.sh {mark}", "background": True})
        assert begun.ok, begun.error_text
        while not (programs := [pid for pid in alive(mark) if pid != os.getpid()]):
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        stopping = asyncio.ensure_future(session.jobs.stop(begun.data["job_id"]))
        while any(Path(f"/proc/{pid}").exists() for pid in programs):
            await asyncio.sleep(0.0005)
        times.append((time.perf_counter() - began) * 1000)
        assert (await stopping).state == "cancelled"
    print(
        f"a stop ends a running program after {statistics.median(times):.1f} ms (p50), {max(times):.1f} ms at most of {STOPS}"
    )


if __name__ == "__main__":
    asyncio.run(main())
