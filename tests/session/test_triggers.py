"""One-time triggers and watched channels, also across interruptions, and as tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.session.arriving import SECOND, Clock, place

from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.services.channels_and_triggers import Trigger
from handrail.kernel.local_kernel import LocalKernel
from handrail.session.inbound import channel_broker as channelling
from handrail.session.inbound import channel_broker as noticing
from handrail.session.inbound.trigger_scheduler import compute_next_firing_ns
from handrail.session.local_session import LocalSession
from handrail.store.tables.inbound_tables import TriggerTable
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("A-07")


# ── triggers ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_timer_fires_at_its_interval_or_only_once(tmp_path: Path) -> None:
    clock = Clock()
    async with place(tmp_path, clock) as there:
        triggers = there.triggers("s")
        await triggers.add_timer(10_000, "look again", name="poll")
        await triggers.add_timer(15_000, "only once", name="soon", once=True)
        await triggers.add_timer(60_000, "now", name="now", immediate=True)
        assert [notice.text for notice in await there.told("s")] == ["The trigger now (every 60 s) fired: now"]
        clock.now += 9 * SECOND
        await there.clockwork.fire_due_triggers()
        assert len(await there.told("s")) == 1
        for _ in range(3):
            clock.now += 10 * SECOND
            await there.clockwork.fire_due_triggers()
        fired = [notice.source for notice in await there.told("s")]
        assert fired == ["now", "poll", "poll", "soon", "poll"] or sorted(fired) == ["now", *["poll"] * 3, "soon"]
        assert [trigger.name for trigger in await triggers.list_triggers()] == ["now", "poll"]
        notice = (await there.told("s"))[1]
        assert notice.kind == "trigger" and notice.data is not None and notice.data["trigger"] == "poll"


async def test_a_trigger_name_is_unique_in_its_session_and_a_removed_trigger_stops_firing(tmp_path: Path) -> None:
    clock = Clock()
    async with place(tmp_path, clock) as there:
        triggers = there.triggers("s")
        await triggers.add_timer(10_000, "p", name="t")
        with pytest.raises(ToolError, match="already") as taken:
            await triggers.add_timer(10_000, "p", name="t")
        assert taken.value.kind == "conflict"
        await there.triggers("other").add_timer(10_000, "p", name="t")
        await triggers.remove("t")
        with pytest.raises(ToolError, match="Triggers: none"):
            await triggers.remove("t")
        clock.now += 20 * SECOND
        await there.clockwork.fire_due_triggers()
        assert await there.told("s") == [] and len(await there.told("other")) == 1


async def test_triggers_that_are_added_in_parallel_are_all_kept(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        triggers = there.triggers("s")
        made = await asyncio.gather(*(triggers.add_timer(10_000, str(number)) for number in range(5)))
        assert [trigger.prompt for trigger in sorted(made, key=lambda one: one.name)] == list("01234")
        assert await triggers.list_triggers() == sorted(made, key=lambda one: one.name)
        same = (triggers.add_timer(10_000, "p", name="t"), triggers.add_schedule("* * * * *", "p", name="t"))
        first, second = await asyncio.gather(*same, return_exceptions=True)
        assert isinstance(first, Trigger) and isinstance(second, ToolError) and second.kind == "conflict"


@pytest.mark.parametrize("turns", range(4))
async def test_a_trigger_that_is_removed_while_it_fires_stays_removed(tmp_path: Path, turns: int) -> None:
    clock = Clock()
    async with place(tmp_path, clock) as there:
        await there.triggers("s").add_timer(10_000, "p", name="t")
        clock.now += 10 * SECOND
        firing = asyncio.ensure_future(there.clockwork.fire_due_triggers())
        for _ in range(turns):
            await asyncio.sleep(0)
        await there.triggers("s").remove("t")
        await firing
        assert await there.triggers("s").list_triggers() == [] and there.clockwork.table.list_all() == []


async def test_a_cancelled_firing_is_repeated(tmp_path: Path) -> None:
    clock = Clock()
    async with place(tmp_path, clock) as there:
        await there.triggers("s").add_timer(10_000, "p", name="t")
        clock.now += 10 * SECOND
        firing = asyncio.ensure_future(there.clockwork.fire_due_triggers())
        await asyncio.sleep(0)
        firing.cancel()
        await asyncio.wait({firing})
        await there.clockwork.fire_due_triggers()
        assert len(await there.told("s")) == 1
        assert [trigger.fire_count for trigger in await there.triggers("s").list_triggers()] == [1]


async def test_a_trigger_due_while_no_kernel_ran_fires_once_and_is_marked_late(tmp_path: Path) -> None:
    clock = Clock()
    async with place(tmp_path, clock) as there:
        await there.triggers("s").add_timer(60_000, "poll", name="poll")
        await there.triggers("s").add_schedule("0 9 * * *", "report", name="daily")
        await there.triggers("s").add_timer(30_000, "once", name="once", once=True)
    clock.now += 3 * 3600 * SECOND
    async with place(tmp_path, clock) as there:
        await there.clockwork.start_stored_triggers()
        told = {notice.source: notice.text for notice in await there.told("s")}
        assert told == {
            "poll": "The trigger poll (every 60 s) fired (late) (179 firings before it were missed): poll",
            "daily": "The trigger daily (at 0 9 * * *) fired (late): report",
            "once": "The trigger once (once) fired (late): once",
        }
        await there.clockwork.start_stored_triggers()
        assert len(await there.told("s")) == 3
        assert [trigger.name for trigger in await there.triggers("s").list_triggers()] == ["daily", "poll"]


async def test_a_firing_posted_before_a_crash_is_not_posted_again_after_the_restart(tmp_path: Path) -> None:
    clock = Clock()
    async with place(tmp_path, clock) as there:
        made = await there.triggers("s").add_timer(10_000, "p", name="t")
        clock.now += 10 * SECOND
        assert made.next_ns is not None
        await there.clockwork.post_firing_notification(
            made, f"{made.next_ns}", clock.now, about="x"
        )  # told, and then it ends
    async with place(tmp_path, clock) as there:
        await there.clockwork.start_stored_triggers()
        assert len(await there.told("s")) == 1
        (after,) = await there.triggers("s").list_triggers()
        assert after.next_ns == clock.now + 10 * SECOND


@pytest.mark.parametrize(
    ("cron", "said"),
    [
        ("61 * * * *", r"Bad minute\). Minutes range from 0 to 59"),
        ("* * *", "five fields"),
        ("@daily", "five fields"),
        ("0 0 31 4 *", r"days from 1 to 31 \(or to the end of the named months\)"),
        ("0 0 30 2 *", r"days from 1 to 31 \(or to the end of the named months\)"),
        ("0 0 */30 2 1#5", "names a day that never occurs"),
    ],
)
async def test_an_invalid_or_never_due_schedule_is_refused(tmp_path: Path, cron: str, said: str) -> None:
    async with place(tmp_path) as there:
        with pytest.raises(ToolError, match=said):
            await there.triggers("s").add_schedule(cron, "p")
        assert await there.triggers("s").list_triggers() == []


@given(every=st.integers(1, 10**6), begun=st.integers(0, 10**9), passed=st.integers(0, 10**9))
def test_the_next_firing_is_in_the_future_and_a_multiple_of_the_interval(every: int, begun: int, passed: int) -> None:
    trigger = Trigger("t", "s", "timer", "p", begun, interval_ns=every, next_ns=begun)
    following = compute_next_firing_ns(trigger, begun + passed)
    assert following is not None and following > begun + passed and (following - begun) % every == 0
    assert following - (begun + passed) <= every


async def test_a_one_time_trigger_waits_until_its_notification_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticing, "MAX_PENDING", 1)
    clock = Clock()
    async with place(tmp_path, clock) as there:
        for name in ("first", "second"):
            await there.triggers("s").add_timer(10_000, name, name=name, once=True)
        clock.now += 10 * SECOND
        await there.clockwork.fire_due_triggers()
        (told,) = await there.told("s")
        assert [trigger.name for trigger in there.clockwork.list_triggers("s")] == ["second"]
        await there.board.attach_session("s").mark_delivered([told.id])
        clock.now += 60 * SECOND
        await there.clockwork.fire_due_triggers()
        assert [told.source for told in await there.told("s")] == ["second"] and not there.clockwork.list_triggers("s")


async def test_a_trigger_added_while_its_sub_agent_ends_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session, clockwork = await kernel.session(), kernel.inbound_services.triggers
        put, reached, go_on, kept = clockwork.table.put, asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slowly(trigger: Trigger) -> None:
            reached.set()
            await go_on.wait()
            await put(trigger)
            kept.set()

        monkeypatch.setattr(clockwork.table, "put", slowly)
        assert session.lane.triggers is not None
        adding = asyncio.ensure_future(session.lane.triggers.add_timer(60_000, "x"))
        await reached.wait()
        adding.cancel()
        ending = asyncio.ensure_future(kernel.inbound_services.remove_triggers_of_subagent(session.id))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(ending, kept.wait())
        assert clockwork.list_triggers(session.id) == clockwork.table.list_all() == []


@pytest.fixture
def clocks_change(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local time that goes back an hour at 01:00 UTC on 25 October 2026, and forward at 01:00 UTC on 29 March."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("clocks_change")
@pytest.mark.parametrize(
    ("cron", "from_", "times"),
    [
        ("*/30 * * * *", "2026-10-24T23:40", "25 00:00, 25 00:30, 25 01:00, 25 01:30, 25 02:00"),
        ("30 2 * * *", "2026-10-24T23:40", "25 00:30, 26 01:30"),
        ("30 2 * * *", "2026-10-25T01:10", "25 01:30, 26 01:30"),
        ("0 3 * * *", "2026-10-25T00:30", "25 02:00, 26 02:00"),
        ("30 2 * * *", "2026-03-28T23:40", "29 01:30, 30 00:30"),
        ("0 * * * *", "2026-03-28T23:40", "29 00:00, 29 01:00, 29 02:00"),
    ],
)
def test_a_schedule_holds_across_daylight_saving_changes(cron: str, from_: str, times: str) -> None:
    now = int(datetime.fromisoformat(f"{from_}+00:00").timestamp()) * SECOND
    trigger = Trigger("t", "s", "schedule", "x", now, cron=cron)
    found: list[str] = []
    for _ in times.split(", "):
        following = compute_next_firing_ns(trigger, now)
        assert following is not None and following > now
        now = following
        found.append(datetime.fromtimestamp(now / SECOND, UTC).strftime("%d %H:%M"))
    assert ", ".join(found) == times


async def test_a_watched_channel_notifies_its_session_of_each_message_once(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        sender = there.channels("s", agent="worker")
        await sender.send("done", "before")
        await there.triggers("s").watch_channel("done", "check it", name="w", sender="worker")
        await sender.send("done", "after \x1b[31m")
        await there.channels("s", agent="other").send("done", "not for it")
        told = [notice.text for notice in await there.told("s")]
        assert len(told) == 2 and "worker: before" in told[0] and "check it" in told[0] and "\x1b" not in told[1]
        assert (await there.told("s"))[0].untrusted == "a message of the agent worker"
        left = (await sender.receive("done", timeout_ms=0)).message
        assert left is not None and left.text == "not for it"


async def test_messages_that_a_watcher_cannot_deliver_stay_in_the_channel_and_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticing, "MAX_PENDING", 2)
    monkeypatch.setattr(channelling, "CHANNEL_CAPACITY", 3)
    async with place(tmp_path) as there:
        sender = there.channels("s", agent="worker")
        await there.triggers("s").watch_channel("c", "look", name="w")
        for number in range(5):
            await sender.send("c", str(number))
        with pytest.raises(ToolError, match="is full"):
            await sender.send("c", "one too many")
        heard: list[str] = []
        while told := await there.told("s"):
            heard += [notice.text.rpartition(": ")[2] for notice in told]
            await there.board.attach_session("s").mark_delivered([notice.id for notice in told])
            await sender.send("c", "more") if len(heard) < 4 else None
        assert heard == ["0", "1", "2", "3"]
        message = (await sender.receive("c", timeout_ms=0)).message
        assert message is not None and message.text == "4"


async def test_shared_channels_make_room_and_removed_triggers_and_sessions_are_no_longer_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channelling, "MAX_CHANNELS", 2)
    async with place(tmp_path) as there:
        sender = there.channels("s")
        for name in ("shared/a", "shared/b", "shared/c"):
            await sender.send(name, "x")
            message = (await there.channels("t").receive(name, timeout_ms=0)).message
            assert message is not None and message.channel == name
        await sender.send("shared/news", "x", kind="broadcast")
        await sender.send("shared/d", "x")
        with pytest.raises(ToolError, match="maximum of 2 channels"):
            await sender.send("shared/e", "x")
        for session in ("t", "u"):
            await there.triggers(session).watch_channel("shared/news", "look", name="w")
        assert "on shared/news," in (await there.told("t"))[0].text
        await there.triggers("t").remove("w")
        await there.clockwork.remove_session("u")
        await there.switchboard.remove_session("u")
        key = sender.resolve_key("shared/news")
        assert [there.switchboard.table.find_reader_position(key, f"trigger/{one}/w") for one in "tu"] == [None, None]


# ── as tools ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_tools_send_receive_and_add_triggers_and_a_closed_session_keeps_no_triggers(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow add_timer", "allow add_schedule"]) as kernel:
        session = await kernel.session(headless=True)
        shared = await session.call("send_message", {"channel": "shared/c", "message": "hello"})
        assert shared.error_kind == "denied"
        sent = await session.call("send_message", {"channel": "c", "message": "hello"})
        assert sent.data == {"channel": "c", "sent": True, "unread": 1}
        got = await session.call("wait_channel", {"channel": "c"})
        assert got.data == {"channel": "c", "message": "hello", "sender": "default"}
        assert (await session.call("wait_channel", {"channel": "c", "timeout_ms": 0})).data["message"] is None
        made = await session.call("add_timer", {"interval": 1, "prompt": "go on", "immediate": True, "name": "t"})
        assert made.ok and made.data["trigger_id"] == "t"
        assert session.notifications is not None
        await session.notifications.wait_until_pending()
        (notice,) = await session.notifications.list_pending()
        assert notice.text == "The trigger t (every 1 s) fired: go on"
        both = await session.call("add_schedule", {"prompt": "x", "daily_at": "8:30", "hourly_at": 5})
        assert both.error_kind == "invalid_input" and "daily_at" in str(both.error_text)
        daily = await session.call("add_schedule", {"prompt": "x", "daily_at": "8:05"})
        assert daily.data["cron"] == "5 8 * * *"
        listed = (await session.call("list_triggers", {})).data["triggers"]
        assert [trigger["trigger_id"] for trigger in listed] == ["t", "schedule-1"]
        await session.close()
        other = await kernel.session(headless=True)
        assert (await other.call("list_triggers", {})).data == {"triggers": []}


async def test_a_schedule_of_every_n_minutes_fires_every_n_minutes(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow add_schedule"]) as kernel:
        session = await kernel.session(headless=True)
        for minutes in range(1, 60):
            added = await session.call("add_schedule", {"prompt": "x", "every_minutes": minutes, "name": f"t{minutes}"})
            assert added.ok, added.error_text
        made = kernel.inbound_services.triggers.table.list_all()
        assert len(made) == 59
        for trigger in made:
            at = compute_next_firing_ns(trigger, 1_700_000_000 * SECOND)
            for _ in range(70):
                assert at is not None
                at, before = compute_next_firing_ns(trigger, at), at
                assert at is not None and at - before == int(trigger.name[1:]) * 60 * SECOND


async def test_the_scratchpad_stores_notes_by_name(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)

        async def pad(**arguments: str) -> object:
            result = await session.call("scratchpad", arguments)
            return result.data if result.ok else result.error_text

        assert await pad(action="set", key="plan", value="a") == {"key": "plan", "replaced": False}
        assert await pad(action="set", key="plan", value="b") == {"key": "plan", "replaced": True}
        assert await pad(action="get", key="plan") == {"key": "plan", "value": "b"}
        assert await pad(action="list") == {"keys": ["plan"]}
        assert "reserved" in str(await pad(action="set", key="__x__", value="b"))
        assert "'plan'" in str(await pad(action="get", key="plam")) or "plan" in str(
            await pad(action="get", key="plam")
        )
        assert "`key` and `value`" in str(await pad(action="set", key="x"))
        results = await session.call_all(
            [("scratchpad", {"action": "set", "key": str(n), "value": "v"}) for n in range(20)]
        )
        assert all(result.ok for result in results)
        assert len((await session.call("scratchpad", {"action": "list"})).data["keys"]) == 21
        assert await pad(action="clear") == {"cleared": 21}


RULES = ["allow watch_channel", "allow send_message"]


async def told_of_a_message(kernel: LocalKernel, session: LocalSession) -> list[str]:
    """Return the notifications of the agent after a message on the channel that it watches."""
    assert (await session.call("send_message", {"channel": "news", "message": "it rains"})).ok
    return [
        notice.source
        for notice in await kernel.sessions.arrivals.notifications.attach_session(session.id).list_pending()
    ]


async def test_triggers_of_sessions_that_open_concurrently_all_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        ids: list[str] = []
        for _ in range(3):
            session = await kernel.session()
            assert (await session.call("watch_channel", {"channel": "news", "prompt": "read", "name": "news"})).ok
            ids.append(session.id)
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        removes = TriggerTable.remove_subagent_triggers

        async def takes_its_time(table: TriggerTable) -> None:  # as where a killed process left some
            await kernel.components.store.database.writer.flush()
            await removes(table)

        monkeypatch.setattr(TriggerTable, "remove_subagent_triggers", takes_its_time)
        opened = await asyncio.gather(*map(kernel.session, ids))
        assert [await told_of_a_message(kernel, session) for session in opened] == [["news"]] * 3


@pytest.mark.parametrize("broken", ["cancelled", "failed"])
async def test_triggers_resume_after_the_first_opening_of_a_session_was_cancelled_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        session = await kernel.session()
        assert (await session.call("watch_channel", {"channel": "news", "prompt": "read", "name": "news"})).ok
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        with monkeypatch.context() as breaking:
            begun = asyncio.Event()

            async def breaks_off(_: TriggerTable) -> None:
                begun.set()
                if broken == "failed":
                    raise LogUnavailable("the disk is full")
                await asyncio.Event().wait()

            breaking.setattr(TriggerTable, "remove_subagent_triggers", breaks_off)
            opening = asyncio.ensure_future(kernel.session())
            await begun.wait()
            opening.cancel()
            await asyncio.wait({opening})
        again = await kernel.session(session.id)
        assert await told_of_a_message(kernel, again) == ["news"]
