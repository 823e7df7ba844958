"""Compare the usual calls of an agent with the same work without a kernel, and measure long outputs.

python bench/real_tools.py

The peers do only the work itself: ``open().read()``, a durable replacement of a file, and ripgrep. A call adds the nine
steps with rules, locks and log. An edit has four flushes to the disk where its peer has two: its intent and its
outcome are on record, too. The last lines run a command that prints a gigabyte; they show the memory above what the
process had before, and the longest time in which the event loop did nothing else.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from handrail import open_kernel

ROUNDS, REPLIES, LINES, FILES = 300, 30, 200, 32
READS = 16
PRINTED_MB = 1000
READ_BOUND, EDIT_BOUND, GREP_BOUND = 4.0, 4.0, 2.0
PEAK_MB_BOUND, STALL_MS_BOUND = 40.0, 10.0
RIPGREP = Path(sys.executable).with_name("rg")


def text(number: int = 0) -> str:
    return "".join(f"    def method_{n}(self, value: int) -> str:  # {number}\n" for n in range(LINES))


def durable_replacement(folder: Path, number: int) -> None:
    new = folder / ".new"
    with new.open("w") as file:
        file.write(text(number))
        file.flush()
        os.fdatasync(file.fileno())
    new.replace(folder / "peer.py")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


async def compare_with_peer(
    name: str,
    rounds: int,
    ours: Callable[[int], Awaitable[object]],
    peer: Callable[[int], object],
    bound: float,
) -> int:
    """Print both, interleaved, and return 1 if the bound is missed by the medians and by the minima."""
    taken, peers = list[float](), list[float]()
    for number in range(rounds + 2):
        began = time.perf_counter()
        await ours(number)
        taken.append(time.perf_counter() - began)
        began = time.perf_counter()
        peer(number)
        peers.append(time.perf_counter() - began)
    del taken[:2], peers[:2]
    ratio, of_least = statistics.median(taken) / statistics.median(peers), min(taken) / min(peers)
    missed = min(ratio, of_least) > bound
    print(
        f"{name:38}{statistics.median(taken) * 1e6:10.0f}{statistics.median(peers) * 1e6:10.0f} us"
        f"{ratio:8.2f}{of_least:8.2f}   {bound:.1f} {'MISSED' if missed else 'met'}"
    )
    return int(missed)


def memory_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


async def longest_stall(until: asyncio.Event) -> float:
    longest, last = 0.0, time.perf_counter()
    while not until.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last - 0.001), now
    return longest


async def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        top = Path(folder).resolve()
        workspace = top / "workspace"
        workspace.mkdir()
        (top / "handrail.toml").write_text("")
        for number in range(FILES):
            (workspace / f"file{number:02}.py").write_text(text(number))
        rules = ["allow edit", "allow fs.write", "allow bash", "allow shell.run"]
        async with open_kernel(workspace, rules=rules, state=top / "state", config=top / "handrail.toml") as kernel:
            session = await kernel.session()

            async def call(tool: str, **arguments: object) -> object:
                result = await session.call(tool, arguments)
                assert result.ok, result
                return result

            async def edit(number: int) -> None:
                old, new = f"method_{number % LINES}(", f"method_{number % LINES}_("
                if number // LINES % 2:
                    old, new = new, old
                await call("edit", path="file00.py", old=old, new=new)

            def search(_: int) -> None:
                subprocess.run([RIPGREP, "-n", "method_100", "."], cwd=workspace, stdout=subprocess.PIPE, check=True)

            print(f"{'':38}{'handrail':>10}{'peer':>10}   {'x median':>8}{'x min':>8}   wanted")
            missed += await compare_with_peer(
                f"read, {LINES} lines",
                ROUNDS,
                lambda n: call("read", path=f"file{n % FILES:02}.py"),
                lambda n: (workspace / f"file{n % FILES:02}.py").open().read(),
                READ_BOUND,
            )
            missed += await compare_with_peer(
                f"{READS} reads of one reply",
                REPLIES,
                lambda _: asyncio.gather(*(call("read", path=f"file{n:02}.py") for n in range(READS))),
                lambda _: [(workspace / f"file{n:02}.py").open().read() for n in range(READS)],
                READ_BOUND,
            )
            missed += await compare_with_peer("edit", REPLIES, edit, lambda n: durable_replacement(top, n), EDIT_BOUND)
            missed += await compare_with_peer(
                f"grep, {FILES} files", REPLIES, lambda _: call("grep", pattern="method_100"), search, GREP_BOUND
            )
            await call("bash", command="true")
            await asyncio.sleep(0.3)
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            before, over = memory_mb("VmRSS"), asyncio.Event()
            stall = asyncio.create_task(longest_stall(over))
            began = time.perf_counter()
            await call("bash", command=f"yes 'a line of an output' | head -c {PRINTED_MB}M; echo the end")
            seconds = time.perf_counter() - began
            over.set()
            for what, found, bound in (
                ("peak memory over idle, MB", memory_mb("VmHWM") - before, PEAK_MB_BOUND),
                ("longest stall of the loop, ms", await stall * 1e3, STALL_MS_BOUND),
            ):
                print(
                    f"{PRINTED_MB} MB printed in {seconds:.1f} s: {what:32}{found:8.1f}   {bound:.1f} "
                    f"{'met' if found <= bound else 'MISSED'}"
                )
                missed += found > bound
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
