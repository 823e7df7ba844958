"""What starting calls while their reply is read saves, and how soon a call starts once its block is closed.

    python bench/streaming.py          prints two tables; exit code 1 if a target is missed

A recorded reply with four calls is played at the pace at which it came: text, four blocks, text, the end. The tools take
the time that theirs took; two of them need the same file, so the later waits for the earlier one: their *chain*. No turn can
end before the stream has, nor before any call's block has closed and its chain has run: the largest of these is the
*earliest possible end*. Beside it: the turn as Handrail's loop carries it out, and the same calls by a loop that waits for the
stream's end. Both keep the conversation and the log on disk.

The second table: from the moment at which the closing chunk is handed over to the first line of the tool, over many replies
of one call, for a tool that reads and for one with side effects. The latter's intent is durable first, which takes one sync of
the disk that no dispatch can do without; a bare one, of about as many bytes, in place and from rest as the call's is, stands
beside it.

Targets: the turn ends at most 10 % after the earliest possible end (the median); the delay's p50 is under 1 ms for both, that
sync included.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from handrail import tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import (
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    ModelRequest,
    ReplyFinished,
    TextDelta,
)
from handrail.agent.run_budget import Budget
from handrail.catalog.provider_dialects import MCP, ProviderSchemaDialect
from handrail.kernel.kernel_interface import Kernel
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.workspace_opening import open_kernel

TARGET_LATE = 1.10
TARGET_DELAY_MS = 1.0
ROUNDS = 7
DELAYS = 300
NOTED = 800
"""Bytes that are noted of such a call before it begins, with the reply that it is of; about."""


@dataclass(frozen=True)
class Recorded:
    """A call of the recorded reply: when its block began and closed, what it locks, and how long its tool took. In ms."""

    opened: float
    closed: float
    file: str
    took: float


REPLY = (
    Recorded(120, 310, "a", 420),
    Recorded(330, 560, "b", 350),
    Recorded(580, 790, "a", 260),  # waits for the first
    Recorded(820, 1_060, "c", 480),
)
STREAM_MS = 1_240.0
"""When the provider said that the reply was whole."""
PIECES = 12


class PlayedBack:
    """A model that plays the recorded reply at its own pace, and then answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.began = 0.0

    @property
    def name(self) -> str:
        return "recorded:reply"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return MCP

    async def aclose(self) -> None:
        pass

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        self.asked += 1
        if self.asked > 1:
            yield TextDelta("done")
            yield ReplyFinished("end")
            return
        self.began = time.perf_counter()
        for at_ms, event in chunks():
            if (left := at_ms / 1000 - (time.perf_counter() - self.began)) > 0:
                await asyncio.sleep(left)
            yield event


def chunks() -> list[tuple[float, BlockEvent]]:
    """The reply as it came: each chunk with its time."""
    found: list[tuple[float, BlockEvent]] = [(40, TextDelta("I look at "))]
    for index, call in enumerate(REPLY):
        arguments = json.dumps({"file": call.file, "ms": call.took, "note": "x" * 400})
        size = -(-len(arguments) // PIECES)
        found.append((call.opened, CallBlockOpened(index, None, "bench__work")))
        for piece in range(PIECES):
            at = call.opened + (call.closed - call.opened) * piece / PIECES
            found.append((at, CallArgumentsDelta(index, arguments[piece * size : (piece + 1) * size])))
        found.append((call.closed, CallBlockClosed(index)))
    return [*found, (STREAM_MS - 60, TextDelta("these four.")), (STREAM_MS, ReplyFinished("calls"))]


def earliest_ms() -> float:
    """When a turn that loses no time ends."""
    free: dict[str, float] = {}
    ends = [STREAM_MS]
    for call in REPLY:
        free[call.file] = max(call.closed, free.get(call.file, 0.0)) + call.took
        ends.append(free[call.file])
    return max(ends)


@tool(id="bench.work", side_effect="write", locks=["file:{file}:X"])
async def work(file: str, ms: float, note: str) -> str:
    """Take as long as the recorded one did."""
    await asyncio.sleep(ms / 1000)
    return file


async def turn_ms(kernel: Kernel, *, waits: bool) -> float:
    """From the request to the last answer of its calls."""
    session = await kernel.session()
    model = PlayedBack()
    if waits:
        history = session.history
        assert history is not None
        calls: list[tuple[str, str]] = []
        pieces: dict[int, list[str]] = {}
        async for event in model.stream(ModelRequest("", (), ())):
            match event:
                case CallBlockOpened(index):
                    pieces[index] = []
                case CallArgumentsDelta(index, text):
                    pieces[index].append(text)
                case CallBlockClosed(index):
                    calls.append(("bench__work", "".join(pieces[index])))
                case _:
                    pass
        await history.store_messages([(0, {"v": 1, "role": "assistant", "parts": [{"text": repr(calls)}]})])
        answers = await session.start_turn().call_all(calls)
        ended = time.perf_counter()
        assert all(answer.result.ok for answer in answers)
    else:
        agent = Agent(session, model)
        ended = 0.0
        async for event in agent.run("go"):
            if type(event).__name__ == "CallAnswered":
                ended = time.perf_counter()
        assert ended
    spent = (ended - model.began) * 1000
    await session.close()
    return spent


async def delays_ms(kernel: Kernel, name: str, started: list[float]) -> list[float]:
    """From each closing chunk to the tool's first line."""
    session = await kernel.session()
    closed: list[float] = []

    class OneCall(PlayedBack):
        async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
            yield TextDelta("again ")
            if len(closed) < DELAYS:
                yield CallBlockOpened(0, None, name)
                yield CallArgumentsDelta(0, '{"n":1}')
                await asyncio.sleep(0.002)  # the chunk is one of its own
                closed.append(time.perf_counter())
                yield CallBlockClosed(0)
                await asyncio.sleep(0.01)  # the reply goes on
                yield ReplyFinished("calls")
            else:
                yield ReplyFinished("end")

    started.clear()
    outcome = await Agent(session, OneCall(), budget=Budget(turns=DELAYS + 1)).complete("go")
    assert outcome.ok and len(started) == len(closed) == DELAYS
    await session.close()
    return [(at - since) * 1000 for at, since in zip(started, closed, strict=True)]


async def main() -> int:
    started: list[float] = []

    @tool(id="bench.look", side_effect="read", locks=[])
    async def look(n: int) -> int:
        """Say when."""
        started.append(time.perf_counter())
        return n

    @tool(id="bench.act", side_effect="write", locks=["file:act:X"])
    async def act(n: int) -> int:
        """Say when."""
        started.append(time.perf_counter())
        return n

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ws").mkdir()
        (folder / "config").mkdir()
        config = folder / "config" / "handrail.toml"
        config.write_text("")
        opened = open_kernel(
            folder / "ws", tools=[work, look, act], rules=["allow bench.*"], state=folder / "state", config=config
        )
        async with opened as kernel:
            assert isinstance(kernel, LocalKernel)
            streamed: list[float] = []
            waited: list[float] = []
            for _ in range(ROUNDS):
                streamed.append(await turn_ms(kernel, waits=False))
                waited.append(await turn_ms(kernel, waits=True))
            reading = await delays_ms(kernel, "bench__look", started)
            acting = await delays_ms(kernel, "bench__act", started)
            syncs = await syncs_ms(folder / "bare")
    return told(streamed, waited, {"a tool that reads": reading, "one with side effects": acting}, syncs)


async def syncs_ms(path: Path) -> list[float]:
    """What the disk alone takes for the bytes of an intent, each time from rest."""
    spent: list[float] = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, bytes(NOTED), 0)
        os.fsync(descriptor)
        for _ in range(DELAYS):
            await asyncio.sleep(0.012)
            os.pwrite(descriptor, os.urandom(NOTED), 0)
            begun = time.perf_counter()
            os.fdatasync(descriptor)
            spent.append((time.perf_counter() - begun) * 1000)
    finally:
        os.close(descriptor)
    return spent


def told(
    streamed: Sequence[float], waited: Sequence[float], delays: dict[str, list[float]], syncs: Sequence[float]
) -> int:
    """Print the tables; the exit code."""
    earliest = earliest_ms()
    late = statistics.median(streamed) / earliest
    print(f"a reply of {STREAM_MS:,.0f} ms with four calls{'median':>14}{'least':>10}{'of the earliest':>18}")
    print(f"{'earliest possible end':42}{earliest:9,.0f} ms")
    for what, spent in (("calls start as their blocks close", streamed), ("calls wait for the stream's end", waited)):
        median = statistics.median(spent)
        print(f"{what:42}{median:9,.0f} ms{min(spent):7,.0f} ms{median / earliest:15.2f} ×")
    print(f"\n{'from the closing chunk to the first line':42}{'p50':>9}{'least':>13}{'p95':>10}")
    middles: list[float] = []
    for what, spent in {**delays, "(a bare sync of the disk)": list(syncs)}.items():
        middles.append(statistics.median(spent))
        most = statistics.quantiles(spent, n=20)[-1]
        print(f"{what:42}{middles[-1]:9.3f} ms{min(spent):7.3f} ms{most:7.3f} ms")
    reading, acting, sync = middles
    print(f"{'one with side effects, without the sync':42}{acting - sync:9.3f} ms")
    met = late <= TARGET_LATE and max(reading, acting) < TARGET_DELAY_MS
    print(f"targets {TARGET_LATE:.2f} × and {TARGET_DELAY_MS:g} ms: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
