"""Channels: messages are read once, by their addressee, also after interruptions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.session.arriving import Clock, place

from handrail import Requires, Runtime, tool
from handrail.contract.errors import ToolError
from handrail.contract.services.channels_and_triggers import ChannelKind
from handrail.session.inbound import channel_broker as channelling
from handrail.store.tables import inbound_tables as storing
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("A-07")

HISTORY = 12
"""Messages of a channel that is full soon."""


async def test_one_reader_gets_a_queue_message_and_all_readers_get_a_broadcast(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        a, b, c = (there.channels(name, top="a") for name in "abc")
        assert await a.send("work", "one") == 1 and await a.send("work", "two") == 2
        read = [(await one.receive("work", timeout_ms=0)).message for one in (b, c, b)]
        assert [message and message.text for message in read] == ["one", "two", None]
        await a.send("news", "all", kind="broadcast")
        read = [(await one.receive("news", timeout_ms=0)).message for one in (b, c, b)]
        assert [message and message.text for message in read] == ["all", "all", None]
        with pytest.raises(ToolError, match="is a broadcast, not a queue"):
            await a.send("news", "x", kind="queue")


async def test_each_waiting_session_receives_a_different_message(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        waits = [asyncio.ensure_future(there.channels(n, top="a").receive("c", timeout_ms=60_000)) for n in "bcd"]
        await asyncio.sleep(0)
        for text in ("1", "2", "3"):
            await there.channels("a").send("c", text)
        got = [(await wait).message for wait in waits]
        assert sorted(message.text for message in got if message is not None) == ["1", "2", "3"]


async def test_waiting_readers_receive_messages_in_the_order_they_started_waiting(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        sender = there.channels("a")
        waits = [
            asyncio.ensure_future(there.channels(f"r{n}", top="a").receive("c", timeout_ms=60_000)) for n in range(20)
        ]
        await asyncio.sleep(0)
        for n in range(10):
            await sender.send("c", str(n))
            message = (await waits[n]).message  # and not some other
            assert message is not None and message.text == str(n)
        for n in range(10, 20):
            await sender.send("c", str(n))
        assert [wait.message and wait.message.text for wait in await asyncio.gather(*waits)] == list(
            map(str, range(20))
        )


async def test_a_late_reader_takes_only_messages_that_the_waiting_readers_do_not_match(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        one, other = (there.channels("a", agent=name) for name in ("one", "other"))
        late = there.channels("z", top="a")
        waits = [
            asyncio.ensure_future(there.channels(f"r{n}", top="a").receive("c", timeout_ms=60_000, sender="one"))
            for n in range(2)
        ]
        await asyncio.sleep(0)
        for number in range(2):
            sending = asyncio.ensure_future(one.send("c", str(number)))
            taking = asyncio.ensure_future(late.receive("c", timeout_ms=0))  # before those who wait have heard of it
            await sending
            assert (await taking).message is None
            message = (await waits[number]).message
            assert message is not None and message.text == str(number)
        waits = [asyncio.ensure_future(late.receive("c", timeout_ms=60_000, sender="one"))]
        await asyncio.sleep(0)
        await other.send("c", "for anybody")
        message = (await there.channels("y", top="a").receive("c", timeout_ms=0)).message
        assert message is not None and message.text == "for anybody"
        await one.send("c", "the last")
        await asyncio.wait(waits)


@pytest.mark.parametrize("steps", range(12))
async def test_a_cancelled_reader_leaves_its_message_to_the_next_reader(tmp_path: Path, steps: int) -> None:
    async with place(tmp_path) as there:
        first, second = (
            asyncio.ensure_future(there.channels(n, top="a").receive("c", timeout_ms=60_000)) for n in "bc"
        )
        await asyncio.sleep(0)
        sending = asyncio.ensure_future(there.channels("a").send("c", "1"))
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first,))
        await sending
        if not first.cancelled():  # it had it already
            assert first.result().message is not None
            await there.channels("a").send("c", "2")
        assert (await second).message is not None


async def test_a_reader_that_timed_out_leaves_the_next_message_to_the_next_reader(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        for number in range(30):
            reading = [
                asyncio.ensure_future(there.channels(n, top="a").receive("c", timeout_ms=wait))
                for n, wait in (("b", 1), ("c", 60_000))
            ]
            if number % 2:
                await asyncio.wait(reading[:1])
            await there.channels("a").send("c", "1")
            if (await reading[0]).message is not None:
                await there.channels("a").send("c", "2")
            assert (await reading[1]).message is not None


async def test_a_cancelled_wait_leaves_the_message_in_the_channel(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        wait = asyncio.ensure_future(there.channels("b", top="a").receive("c", timeout_ms=60_000))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.wait({wait})
        await there.channels("a").send("c", "still there")
        message = (await there.channels("b", top="a").receive("c", timeout_ms=0)).message
        assert message is not None and message.text == "still there"


async def test_only_shared_channels_are_visible_outside_their_session_tree(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.channels("a", agent="writer").send("c", "mine")
        assert (await there.channels("z").receive("c", timeout_ms=0)).message is None
        await there.channels("a", agent="writer").send("shared/c", "ours")
        message = (await there.channels("z").receive("shared/c", timeout_ms=0)).message
        assert message is not None and (message.text, message.sender) == ("ours", "writer")
        for name in ("", "../x", "a b", "shared/", "x" * 65, "a\n"):
            with pytest.raises(ToolError, match="Invalid channel name"):
                there.channels("a").resolve_key(name)


async def test_an_unread_channel_fills_and_a_late_broadcast_reader_gets_the_missed_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (channelling, storing):
        monkeypatch.setattr(room, "CHANNEL_CAPACITY", HISTORY)
    async with place(tmp_path) as there:
        sender, reader = there.channels("a"), there.channels("b", top="a")
        for number in range(HISTORY):
            await sender.send("c", str(number))
        with pytest.raises(ToolError, match="is full") as full:
            await sender.send("c", "one too many")
        assert full.value.kind == "limit"
        assert (await reader.receive("c", timeout_ms=0)).message is not None
        assert await sender.send("c", "fits again") == HISTORY
        await sender.send("news", "0", kind="broadcast")
        first = await reader.receive("news", timeout_ms=0)
        assert first.message is not None and first.message.text == "0"
        for number in range(1, HISTORY + 11):
            await sender.send("news", str(number))
            if number % 5 == 0:
                await sender.send("elsewhere", "x")  # what goes over other channels is not missed here
        late = await reader.receive("news", timeout_ms=0)
        assert late.message is not None and (late.message.text, late.missed) == ("11", 10)


async def test_a_broadcast_reader_can_later_read_messages_that_its_sender_filter_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (channelling, storing):
        monkeypatch.setattr(room, "CHANNEL_CAPACITY", HISTORY)
    async with place(tmp_path) as there:
        anna, ben = (there.channels("a", agent=name) for name in ("anna", "ben"))
        reader = there.channels("b", top="a")

        async def read(sender: str | None = None) -> tuple[str | None, int]:
            received = await reader.receive("news", timeout_ms=0, sender=sender)
            return received.message and received.message.text, received.missed

        for number in range(4):
            await anna.send("news", f"anna {number}", kind="broadcast")
        await ben.send("news", "ben")
        assert [await read("ben"), await read("ben")] == [("ben", 0), (None, 0)]
        assert [await read(), await read("anna")] == [("anna 0", 0), ("anna 1", 0)]
        for number in range(HISTORY - 2):  # anna 2, which the reader has left out, is dropped, and anna 3 the oldest
            await ben.send("news", f"ben {number}")
        assert [await read("ben"), await read(), await read()] == [("ben 0", 1), ("anna 3", 0), ("ben 1", 0)]
        await anna.send("news", "anna 4")
        assert await read("anna") == ("anna 4", 0)
        for number in range(2 * HISTORY):
            await anna.send("news", f"anna {number}")
        assert await read("anna") == (f"anna {HISTORY}", HISTORY - 4 + HISTORY)
        count = there.store.database.shared_read_connection.execute("SELECT count(*) FROM channel_delivery").fetchone()
        assert count == (0,)  # nothing is kept of what is there no more


async def test_a_message_of_a_cancelled_sender_still_reaches_waiting_readers_and_watchers(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        for turns in range(8):
            waits = asyncio.ensure_future(there.channels("b", top="a").receive(f"c{turns}", timeout_ms=60_000))
            await there.triggers("a").watch_channel(f"w{turns}", "Look.")
            for channel in (f"c{turns}", f"w{turns}"):
                sending = asyncio.ensure_future(there.channels("a").send(channel, "it"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                sending.cancel()
                await asyncio.wait({sending})
            sent = there.switchboard.table.find_kind(there.channels("a").resolve_key(f"c{turns}")) is not None
            if not sent:
                await there.channels("a").send(f"c{turns}", "it")
            message = (await waits).message
            assert message is not None and message.text == "it"
            watched = there.channels("a").resolve_key(f"w{turns}")
            while there.switchboard.table.list_messages_after(watched):
                await asyncio.sleep(0.001)
            assert len(await there.told("a")) <= turns + 1


@pytest.mark.parametrize("kind", ["queue", "broadcast"])
@pytest.mark.parametrize("call", ["", "call"])
async def test_the_next_reader_receives_the_message_of_a_cancelled_wait(
    tmp_path: Path, kind: ChannelKind, call: str
) -> None:
    async with place(tmp_path) as there:
        for turns in range(8):
            sender, waits = there.channels("a"), there.channels("b", top="a").for_call(call and f"{call}{turns}")
            await sender.send(f"c{turns}", "it", kind=kind)
            wait = asyncio.ensure_future(waits.receive(f"c{turns}", timeout_ms=60_000))
            for _ in range(turns):
                await asyncio.sleep(0)
            wait.cancel()
            await asyncio.wait({wait})
            if wait.cancelled():
                message = (await there.channels("b", top="a").receive(f"c{turns}", timeout_ms=5_000)).message
                assert message is not None and message.text == "it", turns
            again = await there.channels("b", top="a").receive(f"c{turns}", timeout_ms=0)
            assert again.message is None, turns


@pytest.mark.parametrize("kind", ["queue", "broadcast"])
async def test_a_message_received_by_a_call_counts_as_read_once_the_call_has_succeeded(
    tmp_path: Path, kind: ChannelKind
) -> None:
    outcomes: dict[str, bool | None] = {}
    async with place(tmp_path, outcomes=outcomes) as there:
        door = there.channels("b", top="a")
        for text in ("1", "2", "3"):
            await there.channels("a").send("c", text, kind=kind)
        got = [(await door.for_call(call).receive("c", timeout_ms=0)).message for call in ("good", "bad")]
        assert [one and one.text for one in got] == ["1", "2"]
        outcomes.update(good=True, bad=False)
        left = [(await door.for_call(f"later{n}").receive("c", timeout_ms=0)).message for n in range(3)]
        assert [one and one.text for one in left] == ["2", "3", None]
    async with place(tmp_path, outcomes={"later1": True}) as there:  # a process that ended in the middle of later0
        left = [(await there.channels("b", top="a").receive("c", timeout_ms=0)).message for _ in range(2)]
        assert [one and one.text for one in left] == ["2", None]


async def test_an_idle_broadcast_is_removed_and_its_message_numbers_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channelling, "MAX_CHANNELS", 2)
    clock = Clock()
    async with place(tmp_path, clock) as there:
        sender, reader = there.channels("s"), there.channels("t")
        await sender.send("shared/a", "x", kind="broadcast")
        await reader.receive("shared/a", timeout_ms=0)
        clock.now += channelling.IDLE_NS // 2
        await sender.send("shared/b", "y", kind="broadcast")
        with pytest.raises(ToolError, match="maximum of 2 channels"):
            await sender.send("shared/c", "z")
        before = there.switchboard.table.list_messages_after(sender.resolve_key("shared/b"))[0].number
        clock.now += channelling.IDLE_NS // 2 + 1
        await sender.send("shared/c", "z")
        assert there.switchboard.table.list_names("") == ["b", "c"]
        assert there.switchboard.table.find_reader_position(sender.resolve_key("shared/a"), "t") is None
        clock.now += 2 * channelling.IDLE_NS
        await reader.receive("shared/c", timeout_ms=0)
        await there.switchboard.table.remove_idle_channels("", clock.now)
        await sender.send("shared/d", "w")
        assert there.switchboard.table.list_messages_after(sender.resolve_key("shared/d"))[0].number > before + 1


async def test_messages_and_read_positions_of_a_broadcast_survive_a_restart(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        for text in ("1", "2"):
            await there.channels("a").send("news", text, kind="broadcast")
        await there.channels("b", top="a").receive("news", timeout_ms=0)
    async with place(tmp_path) as there:
        message = (await there.channels("b", top="a").receive("news", timeout_ms=0)).message
        assert message is not None and message.text == "2"


async def test_no_state_remains_of_channels_waited_on_or_of_removed_readers(tmp_path: Path) -> None:
    outcomes: dict[str, bool | None] = {}
    async with place(tmp_path, outcomes=outcomes) as there:
        board, reader = there.switchboard, there.channels("a")
        turns, waiting, calls = board._locks, board._waiting, board._calls  # pyright: ignore[reportPrivateUsage]
        for number in range(3):
            assert (await reader.receive(f"never-{number}", timeout_ms=0)).message is None
            await reader.send(f"sent-{number}", "x")
        waits = asyncio.ensure_future(reader.receive("c", timeout_ms=60_000))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait({waits})
        while turns or waiting:  # what was cut off is given back by a task of its own
            await asyncio.sleep(0)
        for text in ("1", "2"):
            await there.channels("s").send("shared/news", text, kind="broadcast")
            await reader.for_call(f"call {text}").receive("shared/news", timeout_ms=0)
            await reader.for_call(f"own {text}").receive("sent-0", timeout_ms=0)
        await board.remove_session("a")
        outcomes.update({"call 1": False, "call 2": False})
        await there.channels("b").receive("shared/news", timeout_ms=0)
        await there.channels("s").send("shared/news", "3")
        assert not calls
        assert there.store.database.shared_read_connection.execute("SELECT * FROM channel_delivery").fetchall() == []


@tool(id="mail.handle", side_effect="write", locks=[], requires=Requires(capabilities=("channels",)))
async def handle(well: bool, runtime: Runtime) -> str:
    """Receive a message, and do something with it."""
    received = await runtime.channels.receive("c", timeout_ms=0)
    if not well:
        raise ToolError("it went wrong")
    return received.message.text if received.message is not None else "none"


async def test_the_next_call_receives_a_message_that_a_failed_call_received(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[handle], rules=["allow mail.handle"]) as kernel:
        session = await kernel.session()
        await session.call("send_message", {"channel": "c", "message": "one"})
        assert not (await session.call("mail.handle", {"well": False})).ok
        assert (await session.call("mail.handle", {"well": True})).data == "one"
        assert (await session.call("mail.handle", {"well": True})).data == "none"
        await session.call("send_message", {"channel": "c", "message": "two"})
        assert (await session.call("wait_channel", {"channel": "c"})).data["message"] == "two"
        await session.suspend()
        table = kernel.inbound_services.channels.table
        assert len(table.list_channels_with_unsettled_deliveries()) == 1
        await kernel.inbound_services.channels.aclose()  # as when the kernel ends
        assert table.list_channels_with_unsettled_deliveries() == []
