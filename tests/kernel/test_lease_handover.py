"""A lease holder that ends lets running calls finish, and hands over the others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from handrail import ApprovalAnswer, Kernel, open_kernel, tool
from handrail.ipc.server import ipc_server
from handrail.record.verification import verify_log
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


async def joined(stack: AsyncExitStack, folder: Path, **options: object) -> Kernel:
    config = folder / "config" / "handrail.toml"
    opening = open_kernel(folder / "ws", state=folder / "state", config=config, **options)  # pyright: ignore[reportArgumentType]
    return await stack.enter_async_context(opening)


@pytest.mark.proves("L-07")
async def test_client_calls_finish_or_move_to_the_next_holder_when_the_holder_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ipc_server, "DRAIN_LOG_DELAY_S", 0.01)
    begun, leave = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @tool(id="test.write", side_effect="write", locks=["file:a.txt:X"])
    async def write(name: str) -> str:
        """Leave a trace."""
        ran.append(name)
        if name == "first":
            begun.set()
            await leave.wait()
        return name

    async with AsyncExitStack() as stack:
        holding = AsyncExitStack()
        holder = await holding.enter_async_context(temporary_kernel(tmp_path))
        kernel = await joined(stack, tmp_path, tools=[write], rules=["allow test.write"])
        session = await kernel.session("ses_guest")
        queued = asyncio.Event()
        session.watch_events(lambda event: queued.set() if event.kind == "awaiting-locks" else None)
        first = asyncio.create_task(session.call("test.write", {"name": "first"}))
        await begun.wait()
        reply = asyncio.create_task(session.call_all([("glob", {"pattern": "*"}), ("test.write", {"name": "second"})]))
        keyed = asyncio.create_task(session.call("test.write", {"name": "third"}, key="k"))
        await queued.wait()
        ending = asyncio.create_task(holding.aclose())
        while not holder.server.is_shutting_down:
            await asyncio.sleep(0)
        for _ in range(500):  # time enough for a stop to arrive, were there one
            await asyncio.sleep(0)
        assert not first.done() and not ending.done()
        while "shutdown waits" not in caplog.text:
            await asyncio.sleep(0)
        assert "at most 10 s: test.write (ses_guest/1.0)" in caplog.text and "/2.1" not in caplog.text
        leave.set()
        assert (await first).data == "first"
        looked, second = await reply
        assert looked.ok and second.data == "second"
        assert (await keyed).data == "third"
        await ending
        assert sorted(ran) == ["first", "second", "third"] and ran[0] == "first"
        await kernel.log.flush()
        # What had not begun was stopped by the old holder, and is another call of the next one's.
        handed_on = kernel.log.reader.records(call="ses_guest/2.1", kind="rejected")
        assert [(record.body or {})["result"]["metadata"]["stopped_by"] for record in handed_on] == ["shutdown"]
        assert verify_log(kernel.log.reader).ok


@pytest.mark.proves("L-07", "P-09")
async def test_an_open_approval_request_is_asked_again_by_the_next_holder(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    person.may_answer.clear()
    async with AsyncExitStack() as stack:
        holding = AsyncExitStack()
        await holding.enter_async_context(temporary_kernel(tmp_path))
        kernel = await joined(stack, tmp_path)
        session = await kernel.session("ses_guest", approval_handler=person)
        writing = asyncio.create_task(session.call("write", {"path": "a.txt", "content": "x"}))
        await person.request_received.wait()
        await holding.aclose()
        person.may_answer.set()
        assert (await writing).ok
        assert (tmp_path / "ws" / "a.txt").read_text() == "x"
        assert len({request.id for request in person.requests}) == 1, "the same request, asked anew"
