"""Sandboxed shells against the same shell without a sandbox, as ratios within one run.

python bench/sandbox.py [ROUNDS]

The peer is ``bash -c true`` by posix_spawn, with pipes, read to their end and waited for. Every sandboxed variant runs
the same text through the provider's own interface, up to the moment that nobody is left; the whole call adds the nine
steps, with rules, locks and log. Run as whoever is to use it: as root, bubblewrap's own work is more.

Two ratios stand in each line, of the medians and of the shortest runs; a bound counts as missed where both are above
it. On a busy machine the second says more: a sandbox is three processes one after the other where the peer is one, and
waits for the kernel's own threads, so each other runnable process makes it wait several times as often. Root can have
both put before the others for the twenty seconds it takes: ``chrt -f 1 python bench/sandbox.py 20``.

The last two lines are bursts of whole calls, without a pause: a row of commands, and several at once. Their peer is
``subprocess.run``, in a row and in as many threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from handrail import open_kernel
from handrail.contract.sandbox_protocol import SHELL_ARGV, ProgramSpec, Sandbox, SandboxProfile
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires
from handrail.sandbox import tier_probe
from handrail.sandbox.bubblewrap import BubblewrapSandbox, build_bubblewrap_options
from handrail.sandbox.filters import seccomp
from handrail.sandbox.start.ready_sandbox_pool import SandboxPool
from handrail.sandbox.start.sandboxed_process import wait_until_sandboxes_dismantled
from handrail.sandbox.start.spawn import find_bubblewrap_programs

ARGV = (*SHELL_ARGV, "true")
BWRAP = next(find_bubblewrap_programs())
PAUSE_S = 0.03
"""Between two runs: the kernel takes network namespaces down later, and holds up who makes one meanwhile."""


ROW, AT_ONCE, BURSTS = 100, 8, 8
"""Calls in a row, calls at once, and how often several are made at once."""
WANTED = 2.0
"""The ratio of a burst to the same by ``subprocess``."""


@dataclass
class Variant:
    """One way to run the shell.

    :param at_most: the ratio to the peer that is wanted; None where there is none
    :param between: what is waited for, untimed, after each run
    """

    name: str
    run: Callable[[], Awaitable[object]]
    at_most: float | None = None
    between: Callable[[], Awaitable[object]] = wait_until_sandboxes_dismantled


def spawned(program: str, argv: Sequence[str]) -> None:
    """By posix_spawn, with pipes; read to their end and waited for."""
    stdin, stdin_here = os.pipe()
    stdout_here, stdout = os.pipe()
    moved = [(os.POSIX_SPAWN_DUP2, here, there) for here, there in ((stdin, 0), (stdout, 1), (stdout, 2))]
    pid = os.posix_spawn(program, list(argv), {}, file_actions=moved)
    for descriptor in (stdin, stdin_here, stdout):
        os.close(descriptor)
    while os.read(stdout_here, 1 << 16):
        pass
    os.close(stdout_here)
    assert os.waitpid(pid, 0)[1] == 0


async def unconfined() -> None:
    spawned(ARGV[0], ARGV)


async def by_asyncio() -> None:
    process = await asyncio.create_subprocess_exec(
        *ARGV, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    await process.communicate(b"")


def bare(options: list[str]) -> Callable[[], Awaitable[None]]:
    """bubblewrap with the same namespaces, mounts and filter, and bash as what it starts: no launcher, no Landlock."""
    filtered = seccomp.build_filter()

    async def run() -> None:
        descriptor = os.memfd_create("filter", 0)
        os.write(descriptor, filtered)
        os.lseek(descriptor, 0, os.SEEK_SET)
        spawned(BWRAP, ["bwrap", *options, "--seccomp", str(descriptor), "--", *ARGV])
        os.close(descriptor)

    return run


def started(sandbox: Sandbox, capabilities: CapabilitySet, profile: SandboxProfile) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        process = await sandbox.start(capabilities, profile, ProgramSpec(ARGV, merge_stderr=True))
        await process.communicate(b"", 1 << 20)
        assert await process.wait() == 0
        await process.kill()

    return run


async def measured(rounds: int, variants: list[Variant]) -> Mapping[str, list[float]]:
    """Milliseconds of each run, interleaved, so that a busy moment hits all alike."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in variants * 2:
        await variant.run()
        await variant.between()
    for _ in range(rounds):
        for variant in variants:
            begun = time.perf_counter()
            await variant.run()
            times[variant.name].append((time.perf_counter() - begun) * 1e3)
            await variant.between()
            await asyncio.sleep(PAUSE_S)
    return times


def by_subprocess(_: object = None) -> None:
    subprocess.run(ARGV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)


async def bursts(call: Callable[[], Awaitable[None]]) -> int:
    """Print the bursts, and return how many miss their bound."""
    await call()
    await asyncio.sleep(10 * PAUSE_S)  # as an agent that has thought meanwhile
    row: list[float] = []
    for _ in range(ROW):
        begun = time.perf_counter()
        await call()
        row.append(time.perf_counter() - begun)
    peer_row: list[float] = []
    for _ in range(ROW):
        begun = time.perf_counter()
        by_subprocess()
        peer_row.append(time.perf_counter() - begun)
    at_once, peer_at_once = list[float](), list[float]()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in range(BURSTS + 1):
            begun = time.perf_counter()
            await asyncio.gather(*(call() for _ in range(AT_ONCE)))
            at_once.append(time.perf_counter() - begun)
            await asyncio.sleep(10 * PAUSE_S)
            begun = time.perf_counter()
            list(threads.map(by_subprocess, range(AT_ONCE)))
            peer_at_once.append(time.perf_counter() - begun)
    del at_once[0], peer_at_once[0]  # the first burst of a session: one sandbox is ready
    missed = 0
    for name, ours, peer in (
        (f"{ROW} calls in a row, each", [sum(row) / ROW], [sum(peer_row) / ROW]),
        (f"{AT_ONCE} calls at once", at_once, peer_at_once),
    ):
        ratio, of_least = statistics.median(ours) / statistics.median(peer), min(ours) / min(peer)
        print(
            f"{name:40}{statistics.median(ours) * 1e3:10.2f}{min(ours) * 1e3:12.2f}{ratio:10.2f}{of_least:11.2f}{WANTED:8.1f}"
        )
        missed += min(ratio, of_least) > WANTED
    return missed


async def main(rounds: int) -> int:
    sandbox = tier_probe.choose_sandbox()
    if not isinstance(sandbox, BubblewrapSandbox):
        print(json.dumps({"withheld": sandbox.tier.detail, "remedy": sandbox.tier.remedy}))
        return 5
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        top = Path(folder).resolve()
        workspace, scratch = top / "workspace", top / "scratch"
        for place in (workspace, scratch, top / "called"):
            place.mkdir()
        (top / "handrail.toml").write_text("")
        (top / "called" / "README.md").write_text("")
        layer = CapabilityLayer("bench", (str(workspace),), (str(workspace),), (), (ShellRequires(cmd="*"),))
        hosts = CapabilityLayer(
            "bench", (str(workspace),), (str(workspace),), ("example.org",), (ShellRequires(cmd="*"),)
        )
        capabilities, connected = CapabilitySet((layer,)), CapabilitySet((hosts,))
        profile = SandboxProfile(str(workspace), str(scratch))
        pool = SandboxPool(sandbox)
        without = BubblewrapSandbox(BWRAP, sandbox.tier, landlock_abi=0)
        kernel_at = open_kernel(
            top / "called", rules=["allow bash", "allow shell.run"], state=top / "state", config=top / "handrail.toml"
        )
        async with kernel_at as kernel:
            session = await kernel.session()

            async def call() -> None:
                result = await session.call("bash", {"command": "true"})
                assert result.ok, result

            peer = "bash -c true, unconfined"
            variants = [
                Variant(peer, unconfined),
                Variant("the same by asyncio", by_asyncio),
                Variant("warm, pooled", started(pool, capabilities, profile), 1.0, pool.wait_until_successors_ready),
                Variant(
                    "warm, pooled, with the proxy",
                    started(pool, connected, profile),
                    between=pool.wait_until_successors_ready,
                ),
                Variant(
                    "cold, namespaces and seccomp alone", bare(build_bubblewrap_options(capabilities, profile)), 6.0
                ),
                Variant("cold, the same by the launcher, limits", started(without, capabilities, profile)),
                Variant("cold, with Landlock too", started(sandbox, capabilities, profile), 14.0),
                Variant("cold, without Landlock, with the proxy", started(without, connected, profile), 9.0),
                Variant("cold, with all of it", started(sandbox, connected, profile)),
                Variant("the whole call", call),
            ]
            times = await measured(rounds, variants)
            missed = shown(times, variants, peer) + await bursts(call)
        await pool.aclose()
    return 1 if missed else 0


def shown(times: Mapping[str, list[float]], variants: list[Variant], peer: str) -> int:
    median, least = statistics.median(times[peer]), min(times[peer])
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    print(f"as {who}, load {' '.join(f'{load:.1f}' for load in os.getloadavg())}, {len(times[peer])} rounds")
    print(f"{'':40}{'median ms':>10}{'minimum ms':>12}{'x median':>10}{'x minimum':>11}{'wanted':>8}")
    missed = 0
    for variant in variants:
        taken = times[variant.name]
        ratio, of_least = statistics.median(taken) / median, min(taken) / least
        wanted = "" if variant.at_most is None else f"{variant.at_most:.1f}"
        print(
            f"{variant.name:40}{statistics.median(taken):10.2f}{min(taken):12.2f}{ratio:10.2f}{of_least:11.2f}{wanted:>8}"
        )
        missed += variant.at_most is not None and min(ratio, of_least) > variant.at_most
    return missed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)))
