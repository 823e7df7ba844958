"""Tools that a test can pause and inspect, and their kernel."""

from __future__ import annotations

import asyncio
import threading

from handrail import Kernel, Runtime, ToolError, tool


class Gate:
    """A tool's inside, opened from outside: proves an interleaving without sleeping."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.ran: list[str] = []

    async def pass_through(self, name: str) -> str:
        self.ran.append(name)
        self.entered.set()
        await self.open.wait()
        return name


gate = Gate()


@tool(id="test.add", side_effect="read", locks=["sums:S"])
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(id="test.note", side_effect="external", locks=["notes:X"])
async def note(text: str) -> dict[str, str]:
    """Note a text."""
    gate.ran.append(text)
    return {"noted": text}


@tool(id="test.hold", side_effect="external", locks=["notes:X"])
async def hold(name: str) -> str:
    """Wait at the gate, holding the notes."""
    return await gate.pass_through(name)


@tool(id="test.look", side_effect="read", locks=["notes:S"])
async def look() -> str:
    """Look at the notes."""
    gate.ran.append("look")
    return "looked"


@tool(id="test.glance", side_effect="read", locks=["elsewhere:S"])
async def glance() -> str:
    """Look at something else."""
    gate.ran.append("glance")
    return "glanced"


@tool(id="test.slow", side_effect="read", locks=[], timeout_ms=30)
async def slow(runtime: Runtime) -> str:
    """Never ends by itself."""
    runtime.set_partial_result({"so far": "half"})
    await asyncio.Event().wait()
    return "never"


@tool(id="test.stubborn", side_effect="external", locks=["stubborn:X"], timeout_ms=30)
async def stubborn() -> str:
    """Does not heed its cancellation until the gate opens."""
    while not gate.open.is_set():
        try:
            await gate.open.wait()
        except asyncio.CancelledError:
            gate.entered.set()
    return "late"


thread_may_end = threading.Event()


@tool(id="test.thread", side_effect="external", locks=["thread:X"], timeout_ms=30)
def thread() -> str:
    """Holds a thread until told to end."""
    thread_may_end.wait(30)
    return "late"


@tool(id="test.thread_free", side_effect="external", locks=[], timeout_ms=5)
def thread_free() -> str:
    """Holds a thread, and no lock, until told to end."""
    thread_may_end.wait(30)
    return "late"


@tool(id="test.fail", side_effect="read", locks=[])
async def fail(how: str) -> str:
    """Fail in some way."""
    if how == "tool":
        raise ToolError("the printer is out of paper; refill it", kind="failed", data={"pages": 3})
    raise RuntimeError("boom in the tool")


@tool(id="test.outer", side_effect="external", locks=["notes:X"], requires={"capabilities": ["call"]})
async def outer(inner: str, runtime: Runtime) -> dict[str, object]:
    """Call another tool."""
    result = await runtime.call(inner, {"text": "from inside"} if inner == "test.note" else {})
    return result.to_dict()


TOOLS = (add, note, hold, look, glance, slow, stubborn, thread, thread_free, fail, outer)
ALLOW = ["allow test.*"]


async def kinds_of(kernel: Kernel, call_id: str) -> list[str]:
    """The kinds of a call's records, in order."""
    await kernel.log.flush()
    return [record.kind for record in kernel.log.reader.records(call=call_id)]
