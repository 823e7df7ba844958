"""Holders that are killed while they start a sandbox: a program that adopts and lists the orphans.

python -m tests.sandbox.nursery WORKSPACE SCRATCH ROUNDS

It prints how many rounds left nobody, and for each that did, who.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
import time
from pathlib import Path

from handrail.contract.sandbox_protocol import ProgramSpec, SandboxProfile
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires
from handrail.sandbox import tier_probe
from handrail.sandbox.bubblewrap import BubblewrapSandbox

_ADOPT_ORPHANS = 36
_LEAVING_S = 20


async def hold_sandbox(workspace: str, scratch: str, telling: int, at_once: bool) -> None:
    """Start a sandbox and stay. ``at_once``: die before bubblewrap has reported its child."""
    sandbox = tier_probe.choose_sandbox()
    assert isinstance(sandbox, BubblewrapSandbox)
    layer = CapabilityLayer("test", (workspace,), (workspace,), (), (ShellRequires(cmd="*"),))
    capabilities = CapabilitySet((layer,))
    plan = await sandbox.make_plan(
        capabilities, SandboxProfile(workspace, scratch), ProgramSpec(["/bin/sleep", "1000"])
    )
    os.write(telling, b"!")
    process = sandbox.start_waiting_sandbox(plan)
    if at_once:
        os.kill(os.getpid(), signal.SIGKILL)
    process.begin_program(plan.call)
    await process.wait()


def list_survivors(workspace: str, scratch: str, delay_s: float) -> list[str]:
    """Return the processes left after a holder was killed ``delay_s`` into a start; below 0: immediately."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(reading)
        asyncio.run(hold_sandbox(workspace, scratch, writing, delay_s < 0))
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    if delay_s >= 0:
        time.sleep(delay_s)
        os.kill(holder, signal.SIGKILL)

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_LEAVING_S)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return []
    except TimeoutError:
        return [line for pid in children() if (line := _line(pid))]
    finally:
        signal.alarm(0)


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _line(pid: str) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:60]
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    except (OSError, ChildProcessError):
        return ""
    return f"{pid}: {line}"


def main(workspace: str, scratch: str, rounds: int) -> None:
    tier_probe.choose_sandbox()  # once, before the holders are copies of this process
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    chance = random.Random(5)
    clean = 0
    for turn in range(rounds):
        found = list_survivors(workspace, scratch, -1.0 if turn % 4 == 0 else chance.uniform(0.0, 0.025))
        clean += not found
        for line in found:
            print(f"round {turn} left {line}")
    print(clean)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
