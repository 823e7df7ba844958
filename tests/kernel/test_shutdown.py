"""Shutdown of a holding or joined process: it ends all its work, also if it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel, second, sizes
from tests.kernel.test_joined_shutdown import SHORT, held, hold, until

from handrail import tool
from handrail.arbiter import tool_runner
from handrail.ipc.client import remote_session as sessions
from handrail.kernel.remote_kernel import TakeoverCandidate
from handrail.session.session_store import SessionStore
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("L-07")


@pytest.fixture(autouse=True)
def afresh() -> None:
    held.__init__()


async def test_a_process_that_leaves_an_ending_holder_neither_waits_nor_takes_over(tmp_path: Path) -> None:
    holding = temporary_kernel(tmp_path)
    holder = await holding.__aenter__()
    async with joined_kernel(tmp_path, tools=[hold], rules=["allow test.*"]) as working:
        work = asyncio.create_task((await working.session()).call("test.hold", {}))
        await held.entered.wait()
        joining = second(tmp_path)
        leaving = await joining.__aenter__()
        session = await leaving.session("ses_left")
        ending = asyncio.create_task(holding.__aexit__(None, None, None))
        await until(lambda: holder.server.is_shutting_down)
        await joining.__aexit__(None, None, None)
        assert session.is_closed and not ending.done() and not work.done(), "it waited for another's call"
        held.open.set()
        assert (await work).data == "held"
        await ending


async def test_a_connected_process_closes_without_an_answer_from_the_lease_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LEAVE_TIMEOUT_S", 0.01)
    async with temporary_kernel(tmp_path, settings=SHORT) as holder:
        joining = second(tmp_path)
        joined = await joining.__aenter__()
        session = await joined.session("ses_1")
        may_answer = asyncio.Event()

        async def late(_: SessionStore, session_id: str) -> None:
            await may_answer.wait()

        monkeypatch.setattr(SessionStore, "record_suspended", late)
        await joining.__aexit__(None, None, None)
        assert session.is_closed and sizes(holder)["sessions"] == 1
        may_answer.set()
        await until(lambda: sizes(holder)["sessions"] == 0)


@pytest.mark.parametrize("end", ["close", "suspend"])
@pytest.mark.parametrize("by", ["holder", "joined"])
async def test_a_session_still_ends_when_its_close_or_suspension_is_cancelled(
    tmp_path: Path, end: str, by: str
) -> None:
    options: dict[str, Any] = {"tools": [hold], "rules": ["allow test.*"]}
    async with temporary_kernel(tmp_path, settings=SHORT, **options) as holder, second(tmp_path, **options) as joined:
        kernel = holder if by == "holder" else joined
        for steps in range(0, 40, 3):
            held.__init__()
            session = await kernel.session("ses_1")
            work = asyncio.create_task(session.call("test.hold", {}))
            await held.entered.wait()
            ending = asyncio.create_task(session.close() if end == "close" else session.suspend())
            for _ in range(steps):
                await asyncio.sleep(0)
            ending.cancel()
            (ended,) = await asyncio.gather(ending, return_exceptions=True)
            assert ended is None or isinstance(ended, asyncio.CancelledError)
            if not session.is_closed:  # it was cancelled before it began
                await session.close()
            assert (await work).error_kind == "cancelled"
            await until(lambda: sizes(holder)["sessions"] == 0)


async def test_a_lease_holder_releases_socket_and_lease_when_its_shutdown_is_cancelled(tmp_path: Path) -> None:
    holding = temporary_kernel(tmp_path, settings=SHORT)
    holder = await holding.__aenter__()
    async with joined_kernel(tmp_path, tools=[hold], rules=["allow test.*"]) as joined:
        work = asyncio.create_task((await joined.session("ses_1")).call("test.hold", {}))
        await held.entered.wait()
        (socket,) = Path(holder.state_folder).glob("*.sock")
        connection = joined.ipc_client.current_connection
        ending = asyncio.create_task(holding.__aexit__(None, None, None))
        await until(lambda: holder.server.is_shutting_down)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert connection is not None and connection.lost_reason is not None, "nobody would ever answer there"
        assert not socket.exists() and not holder.components.store.lease.is_held
        assert (await work).error_kind in ("cancelled", "interrupted")


async def test_a_closing_kernel_logs_which_call_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool_runner, "SETTLE_WARNING_S", 0.01)
    entered, may_return = threading.Event(), threading.Event()

    @tool(id="test.thread", side_effect="external", locks=[])
    def thread() -> None:
        """Heed nothing."""
        entered.set()
        may_return.wait()

    holding = temporary_kernel(tmp_path, tools=[thread], rules=["allow test.*"], settings=SHORT)
    session = await (await holding.__aenter__()).session("ses_1")
    call = asyncio.create_task(session.call("test.thread", {}))
    await asyncio.to_thread(entered.wait)
    ending = asyncio.create_task(holding.__aexit__(None, None, None))
    assert (await call).metadata.get("still_running") is True
    await until(lambda: "the kernel waits for work that was asked to stop" in caplog.text)
    assert "asked to stop: test.thread (ses_1/1.0)" in caplog.text and not ending.done()
    may_return.set()
    await ending


async def test_a_cancelled_second_takeover_does_not_disturb_the_first(tmp_path: Path) -> None:
    holding = temporary_kernel(tmp_path)
    await holding.__aenter__()
    async with joined_kernel(tmp_path, tools=[hold], rules=["allow test.*"]) as joined:
        session = await joined.session("ses_1")
        await holding.__aexit__(None, None, None)
        work = asyncio.create_task(session.call("test.hold", {}))  # which makes it take over
        await held.entered.wait()
        successor: TakeoverCandidate = joined._successor  # pyright: ignore[reportPrivateUsage] - as when it is replaced
        again = asyncio.create_task(successor.take_over())
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        held.open.set()
        assert (await work).data == "held"
        await successor.aclose()
        assert not list(Path(joined.state_folder).glob("*.sock"))
