"""kill -9 at every step: started calls are interrupted once, and no acknowledged effect is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.session.crashing import CrashingWorkspace, die_by_itself, records_of

from handrail import tool
from handrail.record.verification import verify_log
from handrail.testing.scripted_kernel import temporary_kernel

EACH_STEP = """
import asyncio, os, sqlite3, sys
from pathlib import Path
from handrail import tool
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

folder = Path(sys.argv[1])
effects = os.open(folder / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
other = None

@tool(id="crash.write", side_effect="external", locks=["file:{name}:X"])
async def write(name: str) -> str:
    "Have an effect."
    os.write(effects, (name + "\\n").encode())
    return name

@tool(id="crash.hold", side_effect="external", locks=["file:held:X"])
async def hold() -> str:
    "Never end."
    os.write(effects, b"executing\\n")
    await asyncio.Event().wait()
    return ""

@tool(id="crash.last", side_effect="external", locks=[])
async def last() -> str:
    "Have an effect, and see to it that nothing can be recorded from then on."
    global other
    other = sqlite3.connect(next((folder / "state").rglob("handrail.db")), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    os.write(effects, b"executed\\n")
    return "done"

async def until(condition):
    while not condition():
        await asyncio.sleep(0)

async def main():
    person = ScriptedApprovalHandler()
    person.may_answer.clear()
    rules = ["allow crash.*", "ask crash.write name=asking"]
    async with temporary_kernel(folder, tools=(write, hold, last), rules=rules) as kernel:
        session = await kernel.session("ses_each", approval_handler=person)
        steps, events = [], {}
        session.watch_events(lambda event: events.setdefault(event.call_id, []).append(event.kind))
        assert (await session.call("crash.write", {"name": "acknowledged"}, key="done")).ok
        call = lambda *a, **k: steps.append(asyncio.ensure_future(session.call(*a, **k)))
        call("crash.write", {"name": "asking"}, key="asking")
        await person.request_received.wait()
        call("crash.hold", {}, key="executing")
        await until(lambda: "started" in events.get("ses_each/key:executing", ()))
        call("crash.write", {"name": "held"}, key="waiting")
        await until(lambda: "awaiting-locks" in events.get("ses_each/key:waiting", ()))
        await kernel.log.flush()
        call("crash.last", {}, key="executed")
        await until(lambda: other is not None)
        call("crash.write", {"name": "intending"})
        await until(lambda: "proposed" in events.get("ses_each/1.0", ()))
        DIE

asyncio.run(main())
"""


@pytest.mark.proves("G-05", "G-01", "L-10")
async def test_calls_are_recovered_after_a_kill_at_each_step(tmp_path: Path) -> None:
    die_by_itself(tmp_path, EACH_STEP)
    ran = (tmp_path / "effects").read_text().split()
    assert ran == ["acknowledged", "executing", "executed"]
    again: list[str] = []

    @tool(id="crash.write", side_effect="external", locks=["file:{name}:X"])
    async def write(name: str) -> str:
        """Have an effect."""
        again.append(name)
        return name

    @tool(id="crash.hold", side_effect="external", locks=["file:held:X"])
    async def hold() -> str:
        """Never run again."""
        again.append("hold")
        return ""

    tools = (write, hold)
    async with temporary_kernel(tmp_path, tools=tools, rules=["allow crash.*"]) as kernel:
        # The last one's intent may have been noted by then or not, and it ran in neither case.
        lost = {lost.call_id.rpartition(":")[2]: lost.tool for lost in kernel.interrupted_calls}
        unsure = lost.pop("ses_each/1.0", None)
        assert lost == {"executing": "crash.hold", "executed": "crash.last"} and unsure in (None, "crash.write")
        assert verify_log(kernel.log.reader).ok
        rows = {row.call_id.rpartition(":")[2]: row for row in kernel.log.reader.calls()}
        states = {name: row.state for name, row in rows.items()}
        assert states.pop("ses_each/1.0", "not-run") == ("not-run" if unsure is None else "interrupted")
        assert states == {
            "done": "output",
            "asking": "suspended",
            "executing": "interrupted",
            "waiting": "not-run",
            "executed": "interrupted",
        }
        session = await kernel.session("ses_each")
        done = await session.call("crash.write", {"name": "acknowledged"}, key="done")
        assert done.data == "acknowledged" and done.metadata["replayed"] is True
        for key in ("executing", "executing"):
            lost = await session.call("crash.hold", {}, key=key)
            assert lost.error_kind == "interrupted"
        assert again == []
        for name, key in (("asking", "asking"), ("held", "waiting")):  # these may be tried again: they never ran
            assert (await session.call("crash.write", {"name": name}, key=key)).data == name
        assert again == ["asking", "held"]
    shown = {row["call_id"].rpartition(":")[2]: row["state"] for row in CrashingWorkspace(tmp_path, 0).shown()}
    assert shown["executing"] == shown["executed"] == "interrupted"
    assert shown["asking"] == shown["waiting"] == "output"
    async with temporary_kernel(tmp_path) as kernel:
        assert kernel.interrupted_calls == ()


@pytest.mark.proves("G-05", "G-01")
async def test_repeated_kills_of_a_busy_workspace_lose_no_acknowledged_result(tmp_path: Path) -> None:
    crashes = CrashingWorkspace(tmp_path, seed=1)
    for _ in range(5):
        crashes.live_and_die()
    await crashes.settle()
    assert crashes.interrupted and crashes.acknowledged
    shown = {row["call_id"] for row in crashes.shown() if row["state"] == "interrupted"}
    assert shown == set(crashes.interrupted)
    assert len(records_of(tmp_path)) >= len(crashes.acknowledged)
