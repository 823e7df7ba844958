"""If the lease holder dies or is paused, one of the client processes takes over."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.members import Member, member, members

from handrail import tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.errors import StartError
from handrail.contract.session_protocols import Session
from handrail.kernel import remote_kernel
from handrail.record.verification import verify_log
from handrail.session.session_context import ClientProcessRegistrations
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


async def wait_until_tool_started(folder: Path, name: str) -> None:
    """Return when the hanging tool has begun: it waits on a pipe that it made."""
    path = folder / f"begun-{name}"
    while not path.exists():
        await asyncio.sleep(0)


async def call_after_takeover(process: Member, name: str, session: str) -> dict[str, Any]:
    """Return the result of a call after the process has found the holder; until then nothing runs."""
    for number in count():
        told = await process.call("glob", {"pattern": f"{number}*"}, session=session)
        if told.get("result", {}).get("metadata", {}).get("error_kind") not in ("unavailable", "cancelled"):
            break
    return await process.call("test.pid", {"name": name}, session=session)


@pytest.mark.proves("L-07", "G-05")
async def test_a_connected_process_takes_over_when_the_lease_holder_is_killed(tmp_path: Path) -> None:
    async with members(tmp_path, ("tools",), (), ()) as (holder, one, other):
        assert [each.hello["holds"] for each in (holder, one, other)] == [True, False, False]
        hanging = holder.call("test.hang", {"name": "lost"}, session="ses_lost")
        first = await one.call("write", {"path": "a.txt", "content": "1"}, session="ses_one")
        assert first["result"]["type"] == "output"
        await wait_until_tool_started(tmp_path, "lost")
        holder.kill()
        results = await asyncio.gather(
            one.call("write", {"path": "b.txt", "content": "2"}, session="ses_one"),
            other.call("write", {"path": "c.txt", "content": "3"}, session="ses_other"),
        )
        assert [told.get("result", told).get("type") for told in results] == ["output", "output"], results
        with pytest.raises(EOFError):
            await hanging
        found = [await each.order(interrupted=True) for each in (one, other)]
        assert sorted(told["interrupted"] for told in found) == [[], ["ses_lost/1.0"]]
        await one.leave()
        last = await other.call("read", {"path": "b.txt"}, session="ses_other")
        assert last["result"]["data"]["text"] == "2"
        await other.leave()
    async with temporary_kernel(tmp_path) as kernel:
        assert kernel.interrupted_calls == ()
        assert verify_log(kernel.log.reader).ok
        assert (tmp_path / "effects").read_text() == "lost\n"


@pytest.mark.proves("L-07", "G-05")
async def test_a_call_that_a_dead_lease_holder_had_begun_returns_interrupted(tmp_path: Path) -> None:
    async with members(tmp_path, (), ("tools",), ()) as (holder, one, other):
        # The tool runs in the process that brought it; its call is the holder's all the same.
        waiting = one.call("test.hang", {"name": "mine"}, session="ses_mine")
        await wait_until_tool_started(tmp_path, "mine")
        holder.kill()
        told = await waiting
        assert told["result"]["metadata"]["error_kind"] == "interrupted"
        again = await one.call("test.pid", {"name": "after"}, session="ses_mine")
        assert again["result"]["data"] == one.hello["pid"]
        assert (await other.call("glob", {"pattern": "*"}))["result"]["type"] == "output"
    assert (tmp_path / "effects").read_text() == "mine\nafter\n"


@pytest.mark.proves("L-07")
async def test_a_replaced_lease_holder_commits_nothing_after_a_pause(tmp_path: Path) -> None:
    async with members(tmp_path, ("tools",), ()) as (holder, one):
        assert (await holder.call("test.pid", {"name": "before"}, session="ses_h"))["result"]["type"] == "output"
        holder.pause()
        told = await one.call("write", {"path": "a.txt", "content": "by the next"}, session="ses_one")
        assert "result" in told and told["result"]["type"] == "output", told
        late = holder.call("test.pid", {"name": "late"}, session="ses_h")
        holder.resume()
        answer = await late
        assert answer["result"]["metadata"]["error_kind"] == "unavailable", answer
        assert (await one.call("read", {"path": "a.txt"}, session="ses_one"))["result"]["data"]["text"] == "by the next"
        again = await call_after_takeover(holder, "again", "ses_h")
        assert again["result"].get("data") == holder.hello["pid"], again
        assert (await call_after_takeover(holder, "new", "ses_new"))["result"]["data"] == holder.hello["pid"], (
            "and so does its kernel"
        )
        assert (await holder.call("write", {"path": "b.txt", "content": "x"}, session="ses_h"))["result"][
            "type"
        ] == "output"
        await one.leave()
        assert (await call_after_takeover(holder, "last", "ses_h"))["result"]["data"] == holder.hello["pid"], (
            "it holds it once more"
        )
    assert (tmp_path / "effects").read_text() == "before\nagain\nnew\nlast\n"
    async with temporary_kernel(tmp_path) as kernel:
        assert verify_log(kernel.log.reader).ok
        proposed = [json.dumps(record.body) for record in kernel.log.reader.records(session="ses_h", kind="proposed")]
        assert not [body for body in proposed if "late" in body] and len([b for b in proposed if "again" in b]) == 1


@pytest.mark.proves("L-07")
async def test_a_replaced_lease_holder_rejoins_with_its_watchdogs_and_resources(tmp_path: Path) -> None:
    async with members(tmp_path, ("tools", "watchdogs", "offerings"), ()) as (holder, one):
        assert (await holder.call("test.pid", {"name": "before"}, session="ses_h"))["result"]["type"] == "output"
        holder.pause()
        told = await one.call("write", {"path": "a.txt", "content": "by the next"}, session="ses_one")
        assert told["result"]["type"] == "output", told
        late = holder.call("test.pid", {"name": "late"}, session="ses_h")
        holder.resume()
        assert (await late)["result"]["metadata"]["error_kind"] == "unavailable", "it finds itself replaced"
        assert (await call_after_takeover(holder, "again", "ses_h"))["result"]["data"] == holder.hello["pid"]
        barred = await holder.call("write", {"path": "barred.txt", "content": "x"}, session="ses_h")
        assert "The watchdog look denied this call of write: it is barred" in barred["result"]["error_text"], barred
        assert (await holder.call("write", {"path": "b.txt", "content": "x"}, session="ses_h"))["result"][
            "type"
        ] == "output"
        note = await holder.call("resource.read", {"uri": "note:1"}, session="ses_new")
        assert f"by {holder.hello['pid']}" in str(note), note
        theirs = await one.call("write", {"path": "barred.txt", "content": "x"}, session="ses_one")
        assert theirs["result"]["type"] == "output", "its watchdogs look at its own sessions' calls only"
    assert (tmp_path / "effects").read_text() == "before\nagain\n"


@pytest.mark.proves("L-07")
async def test_a_paused_holder_with_incompatible_settings_reports_how_to_continue(tmp_path: Path) -> None:
    async with members(tmp_path, ("tools", "settings"), ()) as (holder, one):
        assert (await holder.call("test.pid", {"name": "before"}, session="ses_h"))["result"]["type"] == "output"
        holder.pause()
        told = await one.call("write", {"path": "a.txt", "content": "by the next"}, session="ses_one")
        assert told["result"]["type"] == "output", told
        late = holder.call("test.pid", {"name": "late"}, session="ses_h")
        holder.resume()
        bound = "limits.grace_ms can"
        for answer in (await late, await holder.call("write", {"path": "b.txt", "content": "x"}, session="ses_h")):
            assert answer["result"]["metadata"]["error_kind"] == "unavailable", answer
            text = answer["result"]["error_text"]
            assert bound in text and f"pid {one.hello['pid']}" in text, text
            assert "End that process, and start this one again" in text, text
        new = await holder.call("test.pid", {"name": "new"}, session="ses_new")
        assert bound in new["error"], new
        assert (await one.call("read", {"path": "a.txt"}, session="ses_one"))["result"]["type"] == "output"
    assert (tmp_path / "effects").read_text() == "before\n"
    assert [path.name for path in (tmp_path / "ws").iterdir()] == ["a.txt"]


@pytest.mark.proves("L-07")
async def test_rules_set_in_code_hold_after_a_takeover(tmp_path: Path) -> None:
    async with members(tmp_path, ("tools",), ()) as (holder, one):
        denied = {"rules": ["deny write a.txt"], "further": ["deny write b.txt"]}
        assert "result" in await holder.call("test.pid", {"name": "before"}, session="ses_h", **denied)
        holder.pause()
        told = await one.call("write", {"path": "c.txt", "content": "by the next"}, session="ses_one")
        assert told["result"]["type"] == "output", told
        late = holder.call("test.pid", {"name": "late"}, session="ses_h")
        holder.resume()
        assert (await late)["result"]["metadata"]["error_kind"] == "unavailable", "it finds itself replaced"
        assert (await call_after_takeover(holder, "again", "ses_h"))["result"]["data"] == holder.hello["pid"]
        for path in ("a.txt", "b.txt"):
            told = await holder.call("write", {"path": path, "content": "x"}, session="ses_h")
            assert told["result"]["metadata"]["error_kind"] == "denied", told
    assert sorted(path.name for path in (tmp_path / "ws").iterdir()) == ["c.txt"]


async def test_rules_and_mode_set_during_a_takeover_apply_at_the_next_holder(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path / "old") as old, temporary_kernel(tmp_path / "next") as following:
        await old.session("ses_x", rules=["allow write"])
        session = old.sessions.sessions_by_id["ses_x"]

        async def open_late(**how: Any) -> Session:
            session.add_rules("deny write a.txt", "deny bash there-is-no-such-*")
            session.set_mode("plan")
            return await following.session("ses_x", **how)

        await session.continue_in_new_holder(open_late)
        await session.call("read", {"path": "a.txt"})  # comes after what is on its way there
        there = following.sessions.sessions_by_id["ses_x"].rules
        texts = {rule.text for rule in there}
        assert {"allow write", "deny write a.txt", "deny bash there-is-no-such-*"} <= texts
        assert there.mode == "plan"


async def test_a_takeover_does_not_restore_a_removed_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @tool(id="test.gone", side_effect="external", locks=[])
    async def gone() -> None:
        """Taken away."""

    brought: list[ClientProcessRegistrations] = []

    def refuse(_held: object, _config: object, given: ClientProcessRegistrations, _hold: object) -> None:
        brought.append(given)
        raise StartError("it is full")

    monkeypatch.setattr(remote_kernel, "open_remote_kernel", refuse)
    async with temporary_kernel(tmp_path, tools=[gone]) as kernel:
        await kernel.reload_tools([])
        kernel.handle_takeover()
        leaving = kernel._takeover_task  # pyright: ignore[reportPrivateUsage]
        assert leaving is not None
        await leaving
    assert [one.tools for one in brought] == [()]


async def test_a_headless_turn_stays_headless_after_a_takeover(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    async with temporary_kernel(tmp_path / "old") as old, temporary_kernel(tmp_path / "next") as following:
        await old.session("ses_x", approval_handler=person, headless=False)
        session = old.sessions.sessions_by_id["ses_x"]
        await session.start_interaction(headless=True)
        await session.continue_in_new_holder(
            partial(following.session, "ses_x", approval_handler=person, headless=False)
        )
        assert not (await session.call("write", {"path": "a.txt", "content": "x"})).ok
        assert not person.requests
        assert not (tmp_path / "next" / "ws" / "a.txt").exists()
        await session.start_interaction()
        assert (await session.call("write", {"path": "a.txt", "content": "x"})).ok


@pytest.mark.proves("L-07")
async def test_kernels_that_start_concurrently_share_one_lease_holder(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    started = await asyncio.gather(*(member(tmp_path) for _ in range(5)))
    try:
        assert sum(each.hello["holds"] for each in started) == 1
        told = await asyncio.gather(
            *(each.call("write", {"path": f"{n}.txt", "content": ""}) for n, each in enumerate(started))
        )
        assert [each["result"]["type"] for each in told] == ["output"] * 5
    finally:
        for each in started:
            await each.leave()


@pytest.mark.proves("L-07")
async def test_a_call_never_runs_after_a_lost_lease_even_with_a_recorded_intent(tmp_path: Path) -> None:
    ran: list[str] = []

    @tool(id="test.send", side_effect="external", locks=[])
    async def send() -> str:
        """Leave a trace."""
        ran.append("sent")
        return "sent"

    async with temporary_kernel(tmp_path, tools=[send], rules=["allow test.send"]) as kernel:
        session, lease = await kernel.session(), kernel.components.store.lease
        assert (await session.call("test.send", {})).ok
        # As its own thread finds out: the database still takes the intent, since nobody has counted a token.
        lease._lost = "another process has taken over"  # pyright: ignore[reportPrivateUsage]
        refused = await session.call("test.send", {})
        assert refused.error_kind == "unavailable" and "another process has taken over" in (refused.error_text or "")
        assert ran == ["sent"]
        lease._lost = None  # pyright: ignore[reportPrivateUsage]
        await kernel.log.flush()
        kinds = [record.kind for record in kernel.log.reader.records(call=f"{session.id}/2.0")]
        assert kinds == ["proposed", "authorised", "intended", "rejected"]
