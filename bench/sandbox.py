"""Cold start of a sandboxed program against the same program without a sandbox, as a ratio within one run.

python bench/sandbox.py [ROUNDS]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from handrail.contract.requires import CapabilitySet, Layer, ShellRequires
from handrail.contract.sandbox import Profile
from handrail.runtime.roots import Roots
from handrail.runtime.shell import SandboxedShell
from handrail.sandbox import tiers

LIMIT = 6.0
"""The cold start is to stay below so many times the unsandboxed one."""


async def unsandboxed() -> None:
    process = await asyncio.create_subprocess_exec(
        "/bin/bash",
        "--noprofile",
        "--norc",
        "-c",
        "true",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    await process.communicate(b"")


async def measured(rounds: int, *runs: Callable[[], Awaitable[object]]) -> list[list[float]]:
    """Milliseconds of each run, interleaved, so that a busy moment hits all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        await run()
    for _ in range(rounds):
        for run, kept in zip(runs, times, strict=True):
            begun = time.perf_counter()
            await run()
            kept.append((time.perf_counter() - begun) * 1e3)
    return times


async def main(rounds: int) -> int:
    sandbox = tiers.choose()
    if not sandbox.tier.confines:
        print(json.dumps({"withheld": sandbox.tier.detail, "remedy": sandbox.tier.remedy}))
        return 5
    with tempfile.TemporaryDirectory() as folder:
        workspace, scratch = Path(folder).resolve() / "workspace", Path(folder).resolve() / "scratch"
        workspace.mkdir()
        scratch.mkdir()
        place = str(workspace)
        layer = Layer("bench", (place,), (place,), (), (ShellRequires(cmd="*"),))
        shell = SandboxedShell(
            sandbox,
            Profile(place, str(scratch)),
            CapabilitySet((layer,)),
            Roots(place),
            lambda capability, target: None,
        )
        plain, confined = await measured(rounds, unsandboxed, lambda: shell.run("true"))
    ratio = statistics.median(confined) / statistics.median(plain)
    print(f"{'':14}{'median ms':>10}{'minimum ms':>12}")
    print(f"{'bash -c true':14}{statistics.median(plain):10.2f}{min(plain):12.2f}")
    print(f"{'sandboxed':14}{statistics.median(confined):10.2f}{min(confined):12.2f}")
    print(f"ratio of medians {ratio:.2f}, of minima {min(confined) / min(plain):.2f}; at most {LIMIT:.1f} is wanted")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)))
