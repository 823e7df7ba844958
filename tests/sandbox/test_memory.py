"""The memory of a whole sandbox: counted once for all processes, and ended at the limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SandboxLimits
from handrail.sandbox.filters import memory_monitor
from handrail.sandbox.filters.resource_limits import compute_sandbox_memory_limit, compute_total_memory_limit
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.sandboxed_process import SandboxedProcess

MIB = 1 << 20
HOLDS = {
    "what it maps and shares with nobody": "import mmap; held = mmap.mmap(-1, SIZE); held[::4096] = b'x' * (SIZE // 4096)",
    "a file in memory that nothing maps": (
        "import os; held = os.memfd_create('x'); [os.write(held, bytes(1 << 20)) for _ in range(SIZE >> 20)]"
    ),
    "the same, from whom nobody may look into": (
        "import ctypes, os; held = os.memfd_create('x'); [os.write(held, bytes(1 << 20)) for _ in range(SIZE >> 20)]\n"
        "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"
    ),
    "a file in memory that is mapped too": (
        "import mmap, os; file = os.memfd_create('x'); os.ftruncate(file, SIZE)\n"
        "held = mmap.mmap(file, SIZE); held[::4096] = b'x' * (SIZE // 4096)"
    ),
    "many processes a little": (
        "import mmap, os\nfor _ in range(7):\n    if not os.fork():\n        break\n"
        "held = mmap.mmap(-1, SIZE // 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); held[::4096] = b'x' * (SIZE // 8 // 4096)"
    ),
}


async def holding(ground: SandboxFolders, code: str, size: int) -> SandboxedProcess:
    """A sandbox whose programs have ``size`` bytes, all of it written to."""
    (ground.workspace / "hold.py").write_text(
        f"SIZE = {size}\n{code}\nimport os, time\nos.write(1, b'.')\ntime.sleep(600)\n"
    )
    process = await ground.start("python3", "hold.py", limits=SandboxLimits(call_memory_bytes=None))
    assert isinstance(process, SandboxedProcess)
    wanted = 8 if "fork" in code else 1
    while wanted:
        said = await process.read(100)
        assert said, await process.wait()
        wanted -= len(said)
    return process


@pytest.mark.proves("S-04")
@pytest.mark.parametrize("how", HOLDS)
async def test_memory_held_by_a_sandbox_is_counted_once(ground: SandboxFolders, how: str) -> None:
    size = 160 * MIB
    process = await holding(ground, HOLDS[how], size)
    try:
        used = memory_monitor.read_memory_use().shared if "nobody may look" in how else 0
        held = memory_monitor.measure_memory_if_exceeding(process.first_process_pid, size - MIB)
        assert held is not None and size <= held < size + 100 * MIB + used
        if not used:
            assert memory_monitor.measure_memory_if_exceeding(process.first_process_pid, size + 100 * MIB) is None
    finally:
        await process.kill()


@pytest.mark.proves("S-04")
async def test_a_call_above_its_memory_limit_is_ended_with_an_error_naming_the_limit(ground: SandboxFolders) -> None:
    script = f'echo begun; exec python3 -c "{HOLDS["a file in memory that nothing maps"].replace("SIZE", str(64 * MIB))}\nimport time; time.sleep(600)"'
    process = await ground.start("/bin/bash", "-c", script, limits=SandboxLimits(call_memory_bytes=48 * MIB))
    out, _, _ = await process.communicate(b"", 100)
    assert out == b"begun\n"  # what it had said is kept
    with pytest.raises(ToolError, match=r"sandbox\.call_memory_mib") as caught:
        await process.wait()
    assert caught.value.kind == "limit"
    await process.kill()


async def test_a_call_below_its_memory_limit_ends_normally(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    seen = asyncio.Event()
    real = memory_monitor.measure_memory_if_exceeding

    def counted(first: int, bound: int) -> int | None:
        nonlocal looks
        looks += 1
        loop.call_soon_threadsafe(seen.set) if looks > 1 else None
        return real(first, bound)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(memory_monitor, "measure_memory_if_exceeding", counted)
    process = await ground.start("/bin/cat", limits=SandboxLimits(call_memory_bytes=64 * MIB))
    await seen.wait()
    await process.close_stdin()
    assert await process.wait() == 0
    await process.kill()


def test_the_memory_limit_of_a_call_is_capped_below_the_machines_memory() -> None:
    assert compute_sandbox_memory_limit(SandboxLimits(call_memory_bytes=None)) is None
    assert compute_sandbox_memory_limit(SandboxLimits(call_memory_bytes=1 << 50)) == compute_total_memory_limit()
    assert compute_sandbox_memory_limit(SandboxLimits(call_memory_bytes=MIB)) == MIB
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert compute_total_memory_limit() < int(total.split()[1]) * 1024


async def test_sandbox_memory_is_not_checked_before_the_mounts_are_made(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its /tmp is the machine's, with all files of everybody in it."""
    looked: list[int] = []
    passed = asyncio.Event()

    def again(watch: memory_monitor.MemoryMonitor) -> None:
        passed.set()

    def files_of(first: int) -> int:
        looked.append(first)
        return 1 << 40

    def nothing_yet(said: bytes) -> None:
        return None

    monkeypatch.setattr(memory_monitor.MemoryMonitor, "_schedule_poll", again)
    monkeypatch.setattr(memory_monitor, "count_tmpfs_files", files_of)
    monkeypatch.setattr(launcher_messages, "split_mount_report", nothing_yet)
    process = await ground.start("true")
    assert isinstance(process, SandboxedProcess)
    try:
        assert await process.wait_until_pid_known() and not process.has_checked_mounts
        passed.clear()
        memory_monitor.MemoryMonitor(process, None, 1)
        await passed.wait()
        assert not looked
    finally:
        await process.kill()
