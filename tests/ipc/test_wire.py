"""Requests, responses, notifications and cancellations over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from tests.ipc.doors import ListenerFixture, house, next_message

from handrail.contract.errors import UsageError
from handrail.ipc.wire import message_frames
from handrail.ipc.wire import peer_connection as wire
from handrail.ipc.wire.message_frames import MAX_FRAME, encode_frame
from handrail.ipc.wire.operation_dispatch import MAX_RUNNING, OperationSpec, OperationTable, RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost

MARK: ContextVar[Any] = ContextVar("MARK", default="none")


class HolderOperations:
    """The operations of the holder in these tests, with a record of their ends."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[Any] = asyncio.Queue()
        self.ended: asyncio.Queue[tuple[Any, str]] = asyncio.Queue()
        self.go = asyncio.Event()
        self.told: list[Any] = []

    async def echo(self, body: Any) -> Any:
        return body

    async def park(self, body: Any) -> Any:
        self.begun.put_nowait(body)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.ended.put_nowait((body, "cancelled"))
            raise
        self.ended.put_nowait((body, "went on"))
        return body

    async def refuse(self, body: Any) -> Any:
        raise RemoteRequestError("conflict", f"no: {body}")

    async def misuse(self, body: Any) -> Any:
        raise UsageError("used wrongly")

    async def fail(self, body: Any) -> Any:
        raise ValueError("secret of the holder")

    async def long(self, body: int) -> str:
        return "x" * body

    async def who(self, body: Any) -> bool:
        return asyncio.current_task() is None

    async def mark(self, body: Any) -> Any:
        """Leave a value behind where the next request of this connection would find it; gives the one that was there."""
        found, _ = MARK.get(), MARK.set(body)
        return found

    async def doom(self, body: Any) -> None:
        """End well, having asked for the end of its own task."""
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def strike(self, body: Any) -> str:
        """Cancelled, by what runs in its first step, where it waits next."""
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            task.uncancel()
            return "heard"
        return "missed"

    @property
    def operations(self) -> OperationTable:
        requests = {
            "echo": OperationSpec(self.echo),
            "echo.inline": OperationSpec(self.echo, inline=True),
            "echo.at once": OperationSpec(self.echo, eager=True),
            "park": OperationSpec(self.park),
            "park.inline": OperationSpec(self.park, inline=True),
            "park.at once": OperationSpec(self.park, eager=True),
            "strike.at once": OperationSpec(self.strike, eager=True),
            "mark.at once": OperationSpec(self.mark, eager=True),
            "doom.at once": OperationSpec(self.doom, eager=True),
            "who.at once": OperationSpec(self.who, eager=True),
            "fail.at once": OperationSpec(self.fail, eager=True),
            "park.with": OperationSpec(self.park, cancel_when_lost=True),
            "refuse": OperationSpec(self.refuse),
            "misuse": OperationSpec(self.misuse),
            "fail": OperationSpec(self.fail, inline=True),
            "long": OperationSpec(self.long),
            "who.inline": OperationSpec(self.who, inline=True),
        }
        return OperationTable(requests, {"note": self.told.append})


@pytest.fixture
def holder() -> HolderOperations:
    return HolderOperations()


@pytest.fixture
async def doors(tmp_path: Path, holder: HolderOperations) -> AsyncGenerator[ListenerFixture]:
    async with house(tmp_path / "own", holder.operations) as made:
        yield made


@pytest.mark.parametrize("op", ["echo", "echo.inline", "echo.at once"])
@pytest.mark.parametrize("body", [None, 0, "ü\n\ud800", [1, {"a": 2**70}], {"deep": [[[0]]]}])
async def test_a_request_receives_its_answer(doors: ListenerFixture, op: str, body: Any) -> None:
    joined = await doors.join()
    assert await joined.request(op, body) == body


async def test_both_sides_send_requests(doors: ListenerFixture) -> None:
    async def twice(body: int) -> int:
        return 2 * body

    joined, held = await doors.both(OperationTable({"twice": OperationSpec(twice)}))
    assert await asyncio.gather(held.request("twice", 21), joined.request("echo", 1)) == [42, 1]
    with pytest.raises(RemoteRequestError, match="has no operation 'twice'"):
        await joined.request("twice", 1)


@pytest.mark.parametrize("op", ["__class__", "aclose", "request", "_send", "", "Echo", "echo "])
async def test_only_listed_operations_can_be_requested(doors: ListenerFixture, op: str) -> None:
    joined = await doors.join()
    with pytest.raises(RemoteRequestError) as caught:
        await joined.request(op, None)
    assert caught.value.kind == "unknown_op"
    assert await joined.request("echo", 1) == 1


@pytest.mark.parametrize(
    ("op", "kind", "text"),
    [
        ("refuse", "conflict", "no: 5"),
        ("misuse", "UsageError", "used wrongly"),
        ("fail", "defect", "The other process failed with ValueError. Its log has the details."),
    ],
)
async def test_a_handler_error_reaches_the_client_and_an_internal_error_hides_its_text(
    doors: ListenerFixture, op: str, kind: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    joined = await doors.join()
    with pytest.raises(RemoteRequestError) as caught:
        await joined.request(op, 5)
    assert (caught.value.kind, caught.value.text) == (kind, text)
    assert ("secret of the holder" in caplog.text) == (op == "fail")


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["park", "park.inline", "park.at once"])
async def test_handlers_start_in_the_order_of_the_requests(
    doors: ListenerFixture, holder: HolderOperations, op: str, count: int
) -> None:
    count = min(count, MAX_RUNNING)
    joined = await doors.join()
    asked = [asyncio.create_task(joined.request(op, number)) for number in range(count)]
    assert [await holder.begun.get() for _ in range(count)] == list(range(count))
    holder.go.set()
    assert await asyncio.gather(*asked) == list(range(count))


async def test_an_inline_handler_runs_without_a_task_and_waits_without_blocking_others(
    doors: ListenerFixture, holder: HolderOperations
) -> None:
    joined = await doors.join()
    assert await joined.request("who.inline") is True
    parked = asyncio.create_task(joined.request("park.inline", 1))
    assert await asyncio.gather(joined.request("echo", 2), joined.request("echo.inline", 3)) == [2, 3]
    assert holder.begun.get_nowait() == 1
    holder.go.set()
    assert await parked == 1


async def test_an_eager_handler_runs_in_a_task_and_waits_without_blocking_others(
    doors: ListenerFixture, holder: HolderOperations
) -> None:
    joined = await doors.join()
    assert await joined.request("who.at once") is False
    parked = asyncio.create_task(joined.request("park.at once", 1))
    assert await asyncio.gather(joined.request("echo", 2), joined.request("echo.at once", 3)) == [2, 3]
    assert holder.begun.get_nowait() == 1
    assert await joined.request("strike.at once") == "heard"
    with pytest.raises(RemoteRequestError, match="ValueError"):
        await joined.request("fail.at once")
    holder.go.set()
    assert await parked == 1


async def test_consecutive_eager_handlers_do_not_affect_each_other(
    doors: ListenerFixture, holder: HolderOperations
) -> None:
    joined = await doors.join()
    for number in range(3):
        assert await joined.request("mark.at once", number) == "none"
        await joined.request("doom.at once")
        parked = asyncio.create_task(joined.request("park.at once", number))
        assert await holder.begun.get() == number
        assert await joined.request("echo.at once", number) == number
        holder.go.set()
        assert await parked == number
        holder.go.clear()


async def test_a_connection_that_ends_leaves_no_task_behind(doors: ListenerFixture) -> None:
    before = asyncio.all_tasks()
    joined, held = await doors.both()
    assert await joined.request("echo.at once", 1) == 1
    left = asyncio.all_tasks() - before
    await joined.aclose()
    await held.closed.wait()
    await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 300)
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_concurrent_requests_in_both_directions_are_each_answered_once(
    doors: ListenerFixture, count: int
) -> None:
    async def sometimes_waits(body: int) -> int:
        if body % 3:
            await asyncio.sleep(0)
        return -body

    joined, held = await doors.both(OperationTable({"negate": OperationSpec(sometimes_waits, inline=True)}))
    late: list[int] = []

    async def there(number: int) -> int:
        body = {"number": number, "text": "x" * (number % 700)}
        answer: dict[str, Any] = await joined.request(("echo", "echo.inline", "echo.at once")[number % 3], body)
        late.append(number)
        return answer["number"]

    async def back(number: int) -> int:
        return await held.request("negate", number)

    answers = await asyncio.gather(*(way(number) for number in range(count) for way in (there, back)))
    assert answers[::2] == list(range(count))
    assert answers[1::2] == [-number for number in range(count)]
    assert sorted(late) == list(range(count))
    assert held.unanswered_peer_request_count == joined.unanswered_peer_request_count == 0


@pytest.mark.parametrize("op", ["park", "park.inline", "park.at once"])
async def test_a_cancelled_request_cancels_only_its_own_handler(
    doors: ListenerFixture, holder: HolderOperations, op: str
) -> None:
    joined = await doors.join()
    kept, given_up = (asyncio.create_task(joined.request(op, name)) for name in ("kept", "given up"))
    assert [await holder.begun.get(), await holder.begun.get()] == ["kept", "given up"]
    given_up.cancel()
    assert await holder.ended.get() == ("given up", "cancelled")
    holder.go.set()
    assert await kept == "kept"
    with pytest.raises(asyncio.CancelledError):
        await given_up


@pytest.mark.parametrize("op", ["park", "park.inline", "park.at once"])
async def test_a_handler_cancelled_immediately_still_starts_and_cleans_up(
    doors: ListenerFixture, holder: HolderOperations, op: str
) -> None:
    joined = await doors.join()
    asked = asyncio.create_task(joined.request(op, 1))
    await asyncio.sleep(0)
    asked.cancel()
    assert await holder.ended.get() == (1, "cancelled")


async def test_a_cancelled_request_can_wait_until_the_handler_has_ended(
    doors: ListenerFixture, holder: HolderOperations
) -> None:
    joined = await doors.join()
    asked = asyncio.create_task(joined.request("park", 1, settle=True))
    await holder.begun.get()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert holder.ended.get_nowait() == (1, "cancelled")
    assert await joined.request("echo", 2) == 2


async def test_a_lost_peer_fails_pending_requests_and_handlers_continue_or_stop_as_declared(
    doors: ListenerFixture, holder: HolderOperations
) -> None:
    joined, held = await doors.both(OperationTable({"park": OperationSpec(HolderOperations().park)}))
    heard: list[str] = []
    held.add_loss_callback(heard.append)
    asked = [asyncio.create_task(joined.request(op, op)) for op in ("park", "park.inline", "park.with")]
    for _ in asked:
        await holder.begun.get()
    pending = [asyncio.create_task(held.request("park", number)) for number in range(3)]
    await asyncio.sleep(0)
    joined.transport.abort()
    for failed in await asyncio.gather(*pending, *asked, return_exceptions=True):
        assert isinstance(failed, ConnectionLost) and failed.sent
    await held.closed.wait()
    assert heard == [held.lost_reason]
    assert await holder.ended.get() == ("park.with", "cancelled")
    assert held.unanswered_peer_request_count == 2
    holder.go.set()
    assert {await holder.ended.get(), await holder.ended.get()} == {("park", "went on"), ("park.inline", "went on")}
    with pytest.raises(ConnectionLost) as caught:
        await held.request("park", 1)
    assert caught.value.sent is False
    assert held.notify("note", 1) is False


async def test_closing_sends_a_reason_after_delivering_earlier_answers(doors: ListenerFixture) -> None:
    joined, held = await doors.both()
    answer = await joined.request("echo", "x" * 3_000_000)
    assert len(answer) == 3_000_000
    held.notify("unknown", "y" * 3_000_000)
    await held.aclose("the workspace moves")
    await held.aclose()
    await joined.closed.wait()
    assert joined.lost_reason in ("the other side ended it: the workspace moves", "the other side closed it")
    with pytest.raises(ConnectionLost):
        await joined.request("echo", 1)


async def test_notices_arrive_in_order_despite_unknown_ones(doors: ListenerFixture, holder: HolderOperations) -> None:
    joined = await doors.join()
    for number in range(100):
        assert joined.notify("note", number)
        joined.notify("no such", number)
    assert await joined.request("echo.inline", 1) == 1
    assert holder.told == list(range(100))


async def test_a_slow_peer_may_miss_notifications_but_receives_every_answer(doors: ListenerFixture) -> None:
    reader, writer, held = await doors.greeted()
    sent = 0
    while held.notify("progress", "x" * 100_000, skip_when_behind=True):
        sent += 1
    assert 10 <= sent < 100
    assert held.skipped_notifications == 1
    for number in (1, 2, 3):
        writer.write(encode_frame({"id": number, "op": "echo.inline", "body": number}))
    came = [await next_message(reader) for _ in range(sent + 3)]
    assert [message.get("op") for message in came[:sent]] == ["progress"] * sent
    assert came[sent:] == [{"id": number, "ok": number} for number in (1, 2, 3)]
    assert held.notify("progress", 1, skip_when_behind=True)


async def test_a_peer_that_never_reads_is_dropped_before_it_fills_memory(
    doors: ListenerFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "MAX_QUEUED_BYTES", 2_000_000)
    _reader, writer, held = await doors.greeted()
    for number in range(1, 20):
        writer.write(encode_frame({"id": number, "op": "long", "body": 500_000}))
    await held.closed.wait()
    assert "did not read" in str(held.lost_reason) and "did not read" in caplog.text
    assert await (await doors.join()).request("echo", 1) == 1


async def test_an_oversized_answer_or_request_fails_without_ending_the_connection(
    doors: ListenerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_frames, "MAX_FRAME", 10_000)
    joined = await doors.join()
    for op, body, kind in (("long", 10_001, "answer_too_large"), ("echo", "x" * 10_001, "limit")):
        with pytest.raises(RemoteRequestError) as caught:
            await joined.request(op, body)
        assert caught.value.kind == kind, "it says whether the operation ran"
    assert len(await joined.request("long", 9_000)) == 9_000


@pytest.mark.parametrize("size", [1_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
async def test_long_arguments_arrive_in_both_directions(doors: ListenerFixture, size: int) -> None:
    assert size < MAX_FRAME
    joined = await doors.join()
    body = {"content": "x" * size}
    assert await joined.request("echo", body) == body


async def test_a_slow_reading_peer_stays_connected(doors: ListenerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_QUEUED_BYTES", 4_000_000)
    reader, writer, held = await doors.greeted()
    for begin in (1, 21, 41):
        for number in range(begin, begin + 10):
            writer.write(encode_frame({"id": number, "op": "long", "body": 400_000}))
        for number in range(begin, begin + 10):
            assert (await next_message(reader))["id"] == number
    assert held.lost_reason is None


async def test_requests_over_the_limit_of_open_requests_are_refused(
    doors: ListenerFixture, holder: HolderOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.ipc.wire.operation_dispatch.MAX_RUNNING", 3)
    joined = await doors.join()
    asked = [asyncio.create_task(joined.request("park", number)) for number in range(5)]
    for refused in await asyncio.gather(*asked[3:], return_exceptions=True):
        assert isinstance(refused, RemoteRequestError) and refused.kind == "limit"
    holder.go.set()
    assert await asyncio.gather(*asked[:3]) == [0, 1, 2]
    assert await joined.request("echo", 1) == 1


async def test_a_peer_that_stops_sending_and_reading_is_disconnected_at_once(doors: ListenerFixture) -> None:
    _reader, writer, held = await doors.greeted()
    while held.notify("progress", "x" * 100_000, skip_when_behind=True):
        pass
    pending = asyncio.create_task(held.request("park", 1))
    await asyncio.sleep(0)
    writer.write_eof()
    with pytest.raises(ConnectionLost):
        await pending
    await held.closed.wait()
