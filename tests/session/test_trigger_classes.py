"""Triggers of registered classes: durable, limited, delivered once, and isolated from faults of a class."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.session.arriving import place

from handrail import TriggerContext, TriggerEvent, TriggerTool, make_trigger_spec
from handrail.contract.services.channels_and_triggers import Notification, Trigger
from handrail.contract.session_protocols import Session
from handrail.registry.sources.code_sources import ToolEntryPointsSource
from handrail.session.inbound import trigger_scheduler as triggering
from handrail.session.inbound import trigger_waits
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("A-07")


class LineTrigger(TriggerTool):
    """Fires at each line that a file of the workspace gets."""

    spec = make_trigger_spec(
        "add_line_watch", "Trigger: be told of each new line.", {"path": {"type": "string"}}, "path"
    )

    def __init__(self) -> None:
        self.looked = asyncio.Condition()
        self.waits = 0

    async def wait(self, context: TriggerContext) -> TriggerEvent:
        path, seen = Path(context.workdir, context.arguments["path"]), context.position or 0
        self.waits += 1
        try:
            async with self.looked:
                await self.looked.wait_for(lambda: path.exists() and len(path.read_text().splitlines()) > seen)
        finally:
            self.waits -= 1
        line = path.read_text().splitlines()[seen]
        return TriggerEvent(line, seen + 1, is_last=line == "end")

    async def look(self) -> None:
        async with self.looked:
            self.looked.notify_all()


class Beat(TriggerTool):
    spec = make_trigger_spec("clock.add_beat", "Trigger: be told at times.", {"times": {"type": "array"}}, "times")

    def next_ns(self, arguments: Mapping[str, Any], now_ns: int) -> int | None:
        times = arguments["times"]
        if times == ["never"]:
            return None
        return times[0] if isinstance(times[0], str) else now_ns + times[0]


class Broken(TriggerTool):
    spec = make_trigger_spec("add_broken", "Trigger: fail.", {"how": {"type": "string"}}, "how")

    async def wait(self, context: TriggerContext) -> TriggerEvent:
        match context.arguments["how"]:
            case "raise":
                raise ValueError("no such place \x1b[31m")
            case "cancel":
                raise asyncio.CancelledError
            case "exit":
                sys.exit("no place to go")
            case "position":
                return TriggerEvent("x", "y" * trigger_waits.MAX_POSITION)
            case _:
                return "text"  # type: ignore[return-value]


RULES = ("allow add_line_watch", "allow clock.add_beat", "allow add_broken")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigger_waits, "MIN_PAUSE_S", 0.0)


async def wait_for_notices(session: Session, count: int) -> Sequence[Notification]:
    """Wait for this many notifications."""
    assert session.notifications is not None
    while len(found := await session.notifications.list_pending()) < count:
        await asyncio.sleep(0.001)
    return found


async def test_a_trigger_class_notifies_once_with_a_label_and_resumes_in_a_new_process(tmp_path: Path) -> None:
    file, line = tmp_path / "ws" / "log", LineTrigger()
    async with temporary_kernel(tmp_path, tools=[line, Beat(), Broken()], rules=RULES) as kernel:
        session = await kernel.session()
        added = {"path": "log", "prompt": "Read it.", "name": "log"}
        made = await session.call("add_line_watch", added)
        assert made.data == {
            "trigger_id": "log",
            "kind": "class",
            "prompt": "Read it.",
            "tool": "add_line_watch",
            "arguments": {"path": "log"},
        }
        assert (await session.call("add_line_watch", added)).error_kind == "conflict"
        file.write_text("one \x1b[31m\n")
        await line.look()
        (first,) = await wait_for_notices(session, 1)
        assert "log (add_line_watch) fired: Read it." in first.text and "\x1b" not in first.text
        assert first.untrusted == "what add_line_watch has seen" and first.kind == "trigger"
        while (before := kernel.inbound_services.triggers.list_triggers(session.id)[0]).fire_count < 1:
            await asyncio.sleep(0.001)
        file.write_text("one\ntwo\n")
        await line.look()
        await wait_for_notices(session, 2)
        while kernel.inbound_services.triggers.list_triggers(session.id)[0].fire_count < 2:
            await asyncio.sleep(0.001)
        await kernel.inbound_services.triggers.table.put(before)  # as a process leaves it that ends after it has told
        await session.suspend()
    file.write_text("one\ntwo\nthree\nend\n")
    async with temporary_kernel(tmp_path, rules=()) as kernel:  # without the class
        session = await kernel.session(session.id)
        (listed,) = (await session.call("list_triggers", {})).data["triggers"]
        assert "Tool add_line_watch is not available" in listed["fault"] and listed["fired"] == 1
        await session.suspend()
    async with temporary_kernel(tmp_path, tools=[LineTrigger(), Beat(), Broken()], rules=RULES) as kernel:
        session = await kernel.session(session.id)
        lines = [notice.text.splitlines()[1] for notice in await wait_for_notices(session, 4)]
        assert lines == [lines[0], "two", "three", "end"]
        while kernel.inbound_services.triggers.list_triggers(session.id):  # that was the last one
            await asyncio.sleep(0.001)
        assert kernel.inbound_services.triggers.table.list_all() == []


async def test_a_removed_trigger_stops_waiting_and_a_session_has_a_trigger_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggering, "MAX_CLASS_TRIGGERS", 2)
    line = LineTrigger()
    async with temporary_kernel(tmp_path, tools=[line, Beat(), Broken()], rules=[*RULES, "allow add_timer"]) as kernel:
        session = await kernel.session()
        for number in range(2):
            assert (await session.call("add_line_watch", {"path": str(number), "prompt": "x"})).ok
        made = await session.call("add_line_watch", {"path": "2", "prompt": "x"})
        assert made.error_kind == "limit" and "2 triggers of registered classes" in str(made.error_text)
        assert (await session.call("add_timer", {"interval": 60, "prompt": "x"})).ok
        while line.waits < 2:
            await asyncio.sleep(0.001)
        for name in ("line_watch-1", "line_watch-2"):
            assert (await session.call("remove_trigger", {"name": name})).ok
        while line.waits:
            await asyncio.sleep(0.001)
        await session.call("add_line_watch", {"path": "a", "prompt": "x"})
        await session.close()
        while line.waits:
            await asyncio.sleep(0.001)
        assert kernel.inbound_services.triggers.table.list_all() == []


async def test_a_failing_trigger_class_is_reported_once_and_stopped(tmp_path: Path) -> None:
    line, ways = LineTrigger(), ("raise", "cancel", "exit", "position", "other")
    async with temporary_kernel(tmp_path, tools=[Broken(), Beat(), line], rules=RULES) as kernel:
        session = await kernel.session()
        await session.call("add_line_watch", {"path": "log", "prompt": "x", "name": "log"})
        for how in ways:
            await session.call("add_broken", {"how": how, "prompt": "Do it.", "name": how})
        failed = {notice.source: notice.text for notice in await wait_for_notices(session, len(ways))}
        assert set(failed) == set(ways)
        while any(
            one.problem is None
            for one in kernel.inbound_services.triggers.list_triggers(session.id)
            if one.name != "log"
        ):
            await asyncio.sleep(0.001)
        listed = {one["trigger_id"]: one for one in (await session.call("list_triggers", {})).data["triggers"]}
        for how in ways:
            assert f"{how} (add_broken) failed too often and was stopped" in failed[how] and (
                "Error" in listed[how]["fault"] or how == "exit"
            )
        assert "\x1b" not in listed["raise"]["fault"] and "fault" not in listed["log"]
        (tmp_path / "ws" / "log").write_text("still\n")
        await line.look()
        assert "still" in (await wait_for_notices(session, len(ways) + 1))[-1].text


async def test_a_timed_trigger_class_fires_on_time_and_invalid_times_are_refused(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[LineTrigger(), Beat(), Broken()], rules=RULES) as kernel:
        session, clockwork = await kernel.session(), kernel.inbound_services.triggers
        add = {"times": [3_600 * 10**9], "prompt": "Beat.", "name": "hour"}
        made = await session.call("clock.add_beat", add)
        assert made.ok and "next" in made.data
        now = clockwork.clock()
        clockwork.clock = lambda: now + 3_601 * 10**9
        await clockwork.fire_due_triggers()
        assert [notice.text for notice in await wait_for_notices(session, 1)] == [
            "The trigger hour (clock.add_beat) fired: Beat."
        ]
        (trigger,) = clockwork.list_triggers(session.id)
        assert trigger.fire_count == 1 and trigger.next_ns == now + 7_201 * 10**9
        never = await session.call("clock.add_beat", {**add, "times": ["never"], "name": "n"})
        assert never.error_kind == "invalid_input" and "never fire" in str(never.error_text)
        for times in ([], ["soon"], [-(2**70)]):
            wrong = await session.call("clock.add_beat", {**add, "times": times, "name": "w"})
            assert wrong.error_kind == "failed" and "Traceback" not in str(wrong.error_text), times
        assert len(clockwork.list_triggers(session.id)) == 1


async def test_a_trigger_that_fires_last_while_its_class_is_missing_is_removed(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[LineTrigger(), Beat(), Broken()], rules=RULES) as kernel:
        session, clockwork = await kernel.session(), kernel.inbound_services.triggers
        await session.call("clock.add_beat", {"times": [3_600 * 10**9], "prompt": "Last.", "name": "last"})
        (trigger,) = clockwork.list_triggers(session.id)
        await clockwork.table.put(replace(trigger, next_ns=1, arguments={"times": ["never"]}))
        await session.suspend()
    async with temporary_kernel(tmp_path, tools=[LineTrigger(), Beat(), Broken()], rules=RULES) as kernel:
        session = await kernel.session(session.id)
        assert [notice.source for notice in await wait_for_notices(session, 1)] == ["last"]
        assert (await session.call("list_triggers", {})).data == {"triggers": []}
        assert kernel.inbound_services.triggers.table.list_all() == []


async def test_a_firing_and_the_position_of_the_next_wait_are_committed_together(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        clockwork, commits = there.clockwork, list[str]()
        await clockwork.add(Trigger("t", "s", "class", "Read it.", 1, tool="add_line_watch", arguments={}), "t")
        commit, together = there.store.database.write_durably, there.store.database.write_works_atomically

        async def counted(table: Any, payload: Any) -> None:
            commits.append("alone")
            await commit(table, payload)

        async def counted_together(works: Any) -> None:
            commits.append("together")
            await together(works)

        there.store.database.write_durably = counted  # type: ignore[method-assign]
        there.store.database.write_works_atomically = counted_together  # type: ignore[method-assign]
        assert await clockwork.record_wait_result(("s", "t"), trigger_waits.WaitResult("one", position=[1]))
        (kept,) = clockwork.table.list_all()
        assert (kept.fire_count, kept.position, len(await there.told("s"))) == (1, [1], 1)
        assert await clockwork.record_wait_result(("s", "t"), trigger_waits.WaitResult("two", last=True))
        assert clockwork.table.list_all() == [] and len(await there.told("s")) == 2
        assert commits == ["together", "together"]  # nothing can end between telling and noting


def test_a_trigger_class_defines_when_it_fires_and_avoids_reserved_parameter_names() -> None:
    with pytest.raises(TypeError, match="neither wait"):
        type("Nothing", (TriggerTool,), {})
    with pytest.raises(ValueError, match="choose another name"):
        make_trigger_spec("add_x", "x", {"prompt": {}})


@pytest.mark.proves("R-09")
def test_packages_register_trigger_classes_by_entry_point() -> None:
    point = metadata.EntryPoint("line", f"{__name__}:LineTrigger", "handrail.tools")
    loaded = ToolEntryPointsSource(entry_points=lambda: [point]).load()
    assert [declared.tool.spec.id for declared in loaded.tools] == ["add_line_watch"] and not loaded.faults
