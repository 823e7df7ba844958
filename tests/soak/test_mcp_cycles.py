"""Servers that come and go a thousand times: descriptors, processes, tasks and memory stay flat."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from handrail.sandbox.process import settled
from handrail.testing.kernels import temporary_kernel
from handrail.testing.upstreams import Program, http_server

CYCLES = 1_000
SLACK_BYTES = 24 * 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _children() -> int:
    mine = str(os.getpid())
    found = 0
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                found += (place / "stat").read_text().rpartition(") ")[2].split()[1] == mine
            except OSError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.proves("F-04")
@pytest.mark.parametrize("over", ["stdio", "http"])
async def test_a_thousand_connections_leave_nothing_behind(tmp_path: Path, over: str) -> None:
    program = Program(tmp_path)
    async with http_server() as http, temporary_kernel(tmp_path, rules=["allow mcp:t:*"]) as kernel:
        session = await kernel.session()
        given: dict[str, Any] = program.given() if over == "stdio" else {"url": http.url}

        async def cycles(count: int) -> tuple[int, int, int]:
            for _ in range(count):
                async with kernel.mcp.connect("t", **given) as connected:
                    await connected.approve()
                    result = await session.call("t_echo", {"text": "x"})
                    assert result.data == "x", result.error_text
                http.asked.clear()
            await settled()
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), _children()

        before, resident = await cycles(CYCLES // 10), _resident()
        after = await cycles(CYCLES)
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
        assert _resident() - resident < SLACK_BYTES
