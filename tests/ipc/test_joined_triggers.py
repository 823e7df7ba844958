"""Trigger classes of a joined process: the holder stores the triggers, and the process waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.ipc.workshop import workshop
from tests.kernel.test_joined import second

from handrail import Runtime, TriggerContext, TriggerEvent, TriggerTool, make_trigger_spec
from handrail.contract.session_protocols import Session
from handrail.session.inbound import trigger_waits
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("A-07")


class ManualTrigger(TriggerTool):
    """Fires when it is rung."""

    spec = make_trigger_spec("add_bell", "Trigger: be told of each ring.", {"how": {"type": "string"}}, "how")

    def __init__(self) -> None:
        self.rings: asyncio.Queue[str] = asyncio.Queue()
        self.seen: asyncio.Queue[TriggerContext] = asyncio.Queue()

    async def wait(self, context: TriggerContext) -> TriggerEvent:
        self.seen.put_nowait(context)
        if context.arguments["how"] == "broken":
            raise ValueError("it has no clapper")
        ring = await self.rings.get()
        return TriggerEvent(ring, {"after": ring, "huge": 1 << 80}, is_last=ring == "last")


class Hour(TriggerTool):
    spec = make_trigger_spec("add_hour", "Trigger: be told at times.", {"in_ns": {"type": "integer"}}, "in_ns")

    def next_ns(self, arguments: Mapping[str, Any], now_ns: int) -> int | None:
        if arguments["in_ns"] == 7:
            raise ValueError("no such hour")
        return (
            None if arguments["in_ns"] < 0 or now_ns > arguments.get("until", 1 << 62) else now_ns + arguments["in_ns"]
        )


class Own(ManualTrigger):
    spec = make_trigger_spec("add_own", "Trigger: add one in a way of its own.", {"how": {"type": "string"}}, "how")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await super().execute(args, runtime)


async def take_notice_texts(session: Session, count: int = 1) -> list[str]:
    """Return the texts of this many notifications, and mark them delivered."""
    texts: list[str] = []
    assert session.notifications is not None
    while len(texts) < count:
        await session.notifications.wait_until_pending()
        pending = await session.notifications.list_pending()
        await session.notifications.mark_delivered([one.id for one in pending])
        texts += [one.text for one in pending]
    return texts


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigger_waits, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(trigger_waits, "_SECOND_NS", 1)


async def test_a_client_trigger_waits_in_its_process_and_resumes_from_its_last_position(
    tmp_path: Path, at_once: None
) -> None:
    bell = ManualTrigger()
    async with workshop(tmp_path, bell) as there:
        session = there.session
        added = await session.call("add_bell", {"how": "gladly", "prompt": "Answer the door.", "name": "door"})
        assert added.data["trigger_id"] == "door", added.error_text
        first = await bell.seen.get()
        assert (first.name, first.arguments, first.position, first.fire_count) == ("door", {"how": "gladly"}, None, 0)
        assert first.workdir == there.kernel.workdir and first.since_ns > 0
        bell.rings.put_nowait("once")
        assert "once" in (await take_notice_texts(session))[0]
        again = await bell.seen.get()
        assert (again.position, again.fire_count) == ({"after": "once", "huge": 1 << 80}, 1)
        (listed,) = (await session.call("list_triggers", {})).data["triggers"]
        assert (listed["tool"], listed["fired"]) == ("add_bell", 1) and "fault" not in listed
        bell.rings.put_nowait("last")
        assert "last" in (await take_notice_texts(session))[0]
        assert (await session.call("list_triggers", {})).data["triggers"] == []

        await session.call("add_bell", {"how": "broken", "prompt": "Never.", "name": "broken"})
        assert "was stopped: ValueError: it has no clapper" in (await take_notice_texts(session))[0]


async def test_a_timed_client_trigger_fires_at_its_time_and_an_invalid_time_is_refused(
    tmp_path: Path, at_once: None
) -> None:
    async with workshop(tmp_path, Hour()) as there:
        session = there.session
        never = await session.call("add_hour", {"in_ns": -1, "prompt": "x"})
        assert never.error_kind == "invalid_input" and "never fire" in str(never.error_text)
        wrong = await session.call("add_hour", {"in_ns": 7, "prompt": "x"})
        assert wrong.error_kind == "failed" and "no such hour" in str(wrong.error_text)
        assert (await session.call("list_triggers", {})).data["triggers"] == []
        await session.call("add_hour", {"in_ns": 1_000_000, "prompt": "It is time."})
        assert all("It is time." in text for text in await take_notice_texts(session, 2))


async def test_a_client_trigger_with_a_custom_execute_method_is_awaited_in_its_process(
    tmp_path: Path, at_once: None
) -> None:
    own = Own()
    async with workshop(tmp_path, own) as there:
        added = await there.session.call("add_own", {"how": "x", "prompt": "Answer."})
        assert added.ok and added.data["tool"] == "add_own", added
        await own.seen.get()
        own.rings.put_nowait("once")
        assert "once" in (await take_notice_texts(there.session))[0]


async def test_a_client_trigger_pauses_without_its_class_and_continues_in_the_next_process(
    tmp_path: Path, at_once: None
) -> None:
    async with temporary_kernel(tmp_path) as held:
        bell = ManualTrigger()
        async with second(tmp_path, tools=[bell], rules=["allow add_bell"]) as joined:
            session = await joined.session()
            await session.call("add_bell", {"how": "gladly", "prompt": "Answer.", "name": "door"})
            await bell.seen.get()
            bell.rings.put_nowait("once")
            assert "once" in (await take_notice_texts(session))[0]
            await bell.seen.get()
        other = ManualTrigger()
        async with second(tmp_path, tools=[other], rules=["allow add_bell"]) as joined:
            session = await joined.session(session.id)
            assert (await other.seen.get()).position["after"] == "once"
            other.rings.put_nowait("twice")
            assert "twice" in (await take_notice_texts(session))[0]
            await session.close()
        assert held.inbound_services.triggers.list_triggers(session.id) == []
