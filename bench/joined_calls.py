"""What a call costs in a process that joined, alone and among fifty clients.

    python bench/joined_calls.py [--rounds 25] [--seconds 60] [--clients 50] [--skip-load]

First, one complete call of a short read-only tool over the socket, beside the same call in the process that holds the
workspace and one bare round trip of JSON over a Unix socket, in interleaved rounds; the figures are medians of single
times. Bound: at most 3 times the call in process plus one bare round trip, in the median of the rounds.

Then fifty processes that joined, forked once Handrail is imported, each with one session (a lane) in which it begins 20
calls a second at fixed times, whether or not the last was answered; one in 20 has an effect, which is durable. A call's
time is counted from when it was due. Bounds: no call lost, none answered twice, order kept in each lane, p99 of
reads under 50 ms.

The tool comes as an entry point of a package, so that whoever holds the workspace carries it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

BOUND, P99_MS, RATE = 3, 50, 20
CALLS = 100
TEXT = '{"a": 1, "b": 2}'
RULES = ["allow bench.*"]
PACKAGE = '''
import os
from pathlib import Path
from handrail import tool

effects = os.open(Path(__file__).parents[1] / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

@tool(id="bench.add", side_effect="read", locks=["bench:S"])
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@tool(id="bench.note", side_effect="external", locks=["lane:{lane}:X"])
async def note(lane: str, number: int) -> int:
    """Leave a trace."""
    os.write(effects, f"{lane} {number}\\n".encode())
    return number

TOOLS = [add, note]
'''


def opened(folder: Path) -> Any:
    from handrail import open_kernel

    return open_kernel(folder / "ws", state=folder / "state", config=folder / "handrail.toml", rules=RULES)


def prepare(folder: Path) -> None:
    """A workspace, and the package where Python finds it in this process and those it starts."""
    (folder / "ws").mkdir()
    (folder / "handrail.toml").touch()
    package = folder / "packages"
    described = package / "bench_tools-1.dist-info"
    described.mkdir(parents=True)
    (package / "bench_tools.py").write_text(PACKAGE)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-tools\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[handrail.tools]\nadd = bench_tools:add\nnote = bench_tools:note\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    sys.path.insert(0, str(package))


# ── the process that holds the workspace ─────────────────────────────────────────────────────────


async def hold(folder: Path) -> None:
    """Hold it, answer bare round trips as well, and measure calls in process when told."""
    from joining import Bare

    loop = asyncio.get_running_loop()
    async with opened(folder) as kernel:
        session = await kernel.session()
        await loop.create_unix_server(Bare, str(folder / "bare"))
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        print("ready", flush=True)
        while await lines.readline():
            times = await timed(lambda: session.call("bench.add", TEXT), CALLS)
            await kernel.log.flush()
            print(json.dumps(times), flush=True)


async def timed(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Microseconds of each."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter_ns()
        await call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return times


# ── one call ─────────────────────────────────────────────────────────────────────────────────────


async def one_call(folder: Path, holder: subprocess.Popen[str], rounds: int) -> bool:
    from joining import BODY, BareClient

    assert holder.stdin is not None and holder.stdout is not None
    names = ("one bare round trip", "in process", "over the socket")
    times: dict[str, list[float]] = {name: [] for name in names}
    parts: list[float] = []
    """Of the bound, that each round took: a machine that others use as well has moods, which last for some rounds."""
    _transport, bare = await asyncio.get_running_loop().create_unix_connection(BareClient, str(folder / "bare"))
    async with opened(folder) as kernel:
        session = await kernel.session()
        assert (await session.call("bench.add", TEXT)).data == 3
        for number in range(rounds + 1):
            found = [await timed(lambda: bare.request(BODY), CALLS)]
            holder.stdin.write("measure\n")
            holder.stdin.flush()
            found.append(json.loads(holder.stdout.readline()))
            found.append(await timed(lambda: session.call("bench.add", TEXT), CALLS))
            await kernel.log.flush()
            if number:
                for name, some in zip(names, found, strict=True):
                    times[name] += some
                bare_us, inside, outside = map(statistics.median, found)
                parts.append(outside / (BOUND * inside + bare_us))
    medians = {name: statistics.median(kept) for name, kept in times.items()}
    print(f"{'one call of add(1, 2)':45} {'p50 µs':>9}")
    for name, p50 in medians.items():
        print(f"{name:45} {p50:9.1f}")
    bare_us, inside, outside = medians.values()
    bound = BOUND * inside + bare_us
    part = statistics.median(parts)
    met = part <= 1
    print(
        f"over the socket: bound {BOUND} × in process + one bare = {bound:.1f} µs, of which it took {outside / bound:.2f},"
    )
    print(f"{part:.2f} in the median of {rounds} rounds: {'met' if met else 'MISSED'}\n")
    return met


# ── fifty clients ────────────────────────────────────────────────────────────────────────────────


async def client(folder: Path, number: int, of: int, seconds: float, ready: int, go: int, told: int) -> None:
    """One process that joined: says that it is ready, begins with the others, tells each answer."""
    lane = f"ses_lane_{number}"
    async with opened(folder) as kernel:
        session = await kernel.session(lane)
        assert (await session.call("bench.add", TEXT)).data == 3
        os.write(ready, b".")
        await asyncio.to_thread(os.read, go, 1)  # closed when all are ready
        count = round(seconds * RATE)
        begin = time.monotonic() + 0.2 + number / of / RATE
        answers: list[list[Any]] = []

        async def call(n: int, due: float, turn: Any) -> None:
            effect = n % 20 == 0
            proposed = ("bench.note", {"lane": lane, "number": n}) if effect else ("bench.add", {"a": n, "b": 0})
            for answer in await turn.call_all([proposed]):
                spent = (time.monotonic() - due) * 1000
                answers.append([n, turn.number, answer.call_id, answer.result.data, effect, spent])

        async with asyncio.TaskGroup() as calls:
            for n in range(count):
                due = begin + n / RATE
                await asyncio.sleep(max(0, due - time.monotonic()))
                calls.create_task(call(n, due, session.start_turn()))
        await kernel.log.flush()
    with os.fdopen(told, "w") as file:
        json.dump(answers, file)


def load(folder: Path, clients: int, seconds: float) -> bool:
    """Whether every bound is met."""
    import handrail.kernel.remote_kernel  # noqa: F401 - imported once, before the processes are forked

    ready, all_ready = os.pipe()
    wait, go = os.pipe()
    processes: list[int] = []
    for number in range(clients):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            status = 1
            try:
                told = os.open(folder / f"told-{number}", os.O_WRONLY | os.O_CREAT, 0o600)
                asyncio.run(client(folder, number, clients, seconds, all_ready, wait, told))
                status = 0
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(status)
        processes.append(pid)
    os.close(all_ready)
    arrived = 0
    while arrived < clients and (some := os.read(ready, clients)):
        arrived += len(some)
    os.close(go)
    failed = sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in processes)
    count = round(seconds * RATE)
    lost = doubled = disordered = 0
    reads: list[float] = []
    effects: list[float] = []
    traces: dict[str, list[int]] = {}
    for line in (folder / "effects").read_text().splitlines():
        lane, number = line.split()
        traces.setdefault(lane, []).append(int(number))
    for number in range(clients):
        lane, path = f"ses_lane_{number}", folder / f"told-{number}"
        answers = json.loads(path.read_text() or "[]") if path.exists() else []
        by_call: dict[int, list[Any]] = {}
        for answer in answers:
            doubled += answer[0] in by_call
            by_call[answer[0]] = answer
            (effects if answer[4] else reads).append(answer[5])
        lost += sum(n not in by_call or by_call[n][3] != n for n in range(count))
        disordered += sum(answer[2] != f"{lane}/{answer[1]}.0" for answer in answers)
        turns = [by_call[n][1] for n in sorted(by_call)]
        disordered += turns != sorted(set(turns))
        made = traces.get(lane, [])
        disordered += made != sorted(made)
        doubled += len(made) - len(set(made))
        lost += len(set(range(0, count, 20)) - set(made))
    print(f"{clients} processes, {RATE} calls a second each, {seconds:g} s: {clients * count:,} calls")
    print(f"{'':10} {'calls':>8} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'most ms':>8}")
    for name, times in (("reads", reads), ("effects", effects)):
        if len(times) > 1:
            cut = statistics.quantiles(times, n=100)
            print(f"{name:10} {len(times):8,} {cut[49]:8.1f} {cut[89]:8.1f} {cut[98]:8.1f} {max(times):8.1f}")
    good = True
    for what, found in (
        ("processes that failed", failed),
        ("calls lost", lost),
        ("answered or carried out twice", doubled),
        ("lanes or calls out of order", disordered),
    ):
        print(f"{what}: {found} (bound 0): {'met' if not found else 'MISSED'}")
        good = good and not found
    p99 = statistics.quantiles(reads, n=100)[98] if len(reads) > 1 else float("inf")
    print(f"p99 of reads: {p99:.1f} ms (bound {P99_MS} ms): {'met' if p99 < P99_MS else 'MISSED'}")
    return good and p99 < P99_MS


def main() -> int:
    if sys.argv[1:2] == ["--hold"]:
        asyncio.run(hold(Path(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--skip-load", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        command = [sys.executable, __file__, "--hold", name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdin is not None and holder.stdout is not None
            try:
                assert holder.stdout.readline() == "ready\n"
                good = asyncio.run(one_call(folder, holder, options.rounds))
                if not options.skip_load:
                    good = load(folder, options.clients, options.seconds) and good
            finally:
                holder.stdin.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
