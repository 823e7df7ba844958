"""A thousand connections to servers: descriptors, processes, tasks, objects and memory stay constant."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.upstream.scripted_mcp_servers import StdioServerProgram, run_upstream_http_server

from handrail.sandbox.start.sandboxed_process import wait_until_sandboxes_dismantled
from handrail.testing.scripted_kernel import temporary_kernel

CYCLES, WARMING = 1_000, 100
FEW, FIRST = {"http": 8, "stdio": 4}, 2
PAGES = 6_000
"""Calls that fill what the database keeps of its pages in memory, up to a bound of its own."""
STRAY = 4
"""Objects of ours that come and go in any case, such as what is on its way to the log."""
TURNS = 10
"""Of the loop, in which it puts away what threads let go of."""
MOST_BYTES = 3 * 1024
"""Of memory of its own that the process may have more, a cycle: a tool's definition with what is made of it is more."""

Cycles = Callable[[int], Coroutine[Any, Any, None]]


class _Slow(ThreadPoolExecutor):
    """Threads that hold what they were given until they are joined, as one may that gets no time of a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[object] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._given.append((fn, args, kwargs))
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._given.clear()


def _own_memory() -> int:
    """Return the anonymous memory in bytes, without the free part."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library has no such thing
        ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


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


def _held() -> tuple[int, int, int]:
    """Descriptors, tasks and processes."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), _children()


def _ours() -> Counter[str]:
    gc.collect()
    kinds: list[type] = [type(one) for one in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("handrail."))


async def _cycled(
    tmp_path: Path,
    over: str,
    tried: Callable[[Any, Cycles], Coroutine[Any, Any, None]],
    made: Callable[[], ThreadPoolExecutor] = ThreadPoolExecutor,
) -> None:
    """Connect and disconnect a server this many times, with one call each.

    :param made: gives the threads that the loop has for what blocks
    """
    program = StdioServerProgram(tmp_path)
    loop, threads = asyncio.get_running_loop(), made()
    loop.set_default_executor(threads)

    async def let_go() -> None:
        """Wait until all threads have released their objects, which may take a moment after the answer."""
        nonlocal threads
        held, threads = threads, made()
        loop.set_default_executor(threads)
        await asyncio.to_thread(held.shutdown)
        gc.collect()
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async with run_upstream_http_server() as http, temporary_kernel(tmp_path, rules=["allow mcp:t:*"]) as kernel:
        session = await kernel.session()
        given: dict[str, Any] = program.make_connect_arguments() if over == "stdio" else {"url": http.url}

        async def cycles(count: int) -> None:
            for _ in range(count):
                async with kernel.mcp_servers.connect("t", **given) as connected:
                    await connected.approve_tool_definitions()
                    result = await session.call("t_echo", {"text": "x"})
                    assert result.data == "x", result.error_text
                http.requests.clear()
            await wait_until_sandboxes_dismantled()
            await kernel.log.flush()
            await let_go()

        await tried(session, cycles)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.proves("F-04")
@pytest.mark.parametrize("over", ["stdio", "http"])
async def test_a_thousand_connections_leave_no_resources_or_memory_behind(tmp_path: Path, over: str) -> None:
    async def tried(session: Any, cycles: Cycles) -> None:
        for _ in range(PAGES):
            await session.call("todo", {"todos": []})
        await cycles(WARMING)
        held, ours, before = _held(), _ours(), _own_memory()
        await cycles(CYCLES)
        after = _own_memory()
        assert all(now <= then for now, then in zip(_held(), held, strict=True)), (held, _held())
        more = _ours() - ours
        assert more.total() <= STRAY, more.most_common(10)
        assert (after - before) / CYCLES <= MOST_BYTES

    await _cycled(tmp_path, over, tried)


@pytest.mark.proves("F-04")
@pytest.mark.parametrize("over", ["stdio", "http"])
async def test_a_few_connections_leave_no_resources_behind(tmp_path: Path, over: str) -> None:
    async def tried(session: Any, cycles: Cycles) -> None:
        await cycles(FIRST)
        held, ours = _held(), _ours()
        await cycles(FEW[over])
        assert all(now <= then for now, then in zip(_held(), held, strict=True)), (held, _held())
        more = _ours() - ours
        assert more.total() <= STRAY, more.most_common(10)

    await _cycled(tmp_path, over, tried, _Slow)
