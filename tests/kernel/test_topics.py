"""The topic of a session: in the record of each call, without secrets, also for sub-agents and provider tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_sub_agents import READER, kernel_of, models, task

from handrail.agent.agent_loop import Agent
from handrail.frontends.cli.commands import log as log_command
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.record.call_timeline import read_timeline
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("G-06a")

SECRET = "s3cr3t-of-the-test"


async def records(kernel: Any, **chosen: str) -> list[tuple[str, Any]]:
    await kernel.log.flush()
    return [(one.kind, dict(one.body or {}).get("topic")) for one in kernel.log.reader.records(**chosen)]


async def test_a_topic_is_recorded_with_each_call_and_with_its_session(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        named, plain = await kernel.session(topic="the build"), await kernel.session()
        for session in (named, plain):
            await session.call("glob", {"pattern": "*"})
        assert (await records(kernel, session=named.id))[:2] == [
            ("session-opened", "the build"),
            ("proposed", "the build"),
        ]
        assert [topic for _, topic in await records(kernel, session=plain.id)] == [None] * 5
        row, other = kernel.log.reader.calls()
        assert (row.topic, other.topic) == ("the build", None)
        account = read_timeline(kernel.log.reader, row.call_id)
        assert account is not None and account.session["topic"] == "the build" and "topic the build" in str(account)


async def test_a_call_keeps_the_topic_that_its_session_had_at_that_time(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        for topic in ("first", None, "second"):
            session = await kernel.session("ses_1", topic=topic)
            await session.call("glob", {"pattern": "*"})
            await session.suspend()
        await kernel.log.flush()
        rows = kernel.log.reader.calls(session="ses_1")
        assert [row.topic for row in rows] == ["first", "first", "second"]
        account = read_timeline(kernel.log.reader, rows[0].call_id)
        assert account is not None and account.session["topic"] == "first"


async def test_the_calls_of_a_sub_agent_have_the_topic_of_its_parent_session(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        (tmp_path / "ws" / "note.txt").write_text("42\n")
        reader = PlaybackModel(call_reply(("read", {"path": "note.txt"})), text_reply("42."))
        session = await kernel.session(topic="the answer")
        top = PlaybackModel(call_reply(task("reader")), text_reply("."))
        await Agent(session, top, models=models(reader=reader)).complete("Go.")
        await kernel.log.flush()
        assert {row.tool: row.topic for row in kernel.log.reader.calls()} == {
            "task": "the answer",
            "read": "the answer",
        }


async def test_a_provider_tool_use_is_recorded_with_the_topic(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(topic="the build")
        assert session.history is not None
        await session.history.record_provider_tool_use({"provider": "p", "name": "web_search"}, {"found": 1})
        assert ("provider-tool-used", "the build") in await records(kernel, session=session.id)


async def test_a_recorded_topic_contains_no_secret_and_is_truncated(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, secrets={"token": SECRET}) as kernel:
        session = await kernel.session(topic=f"with {SECRET}" + "x" * 10_000)
        await session.call("glob", {"pattern": "*"})
        await kernel.log.flush()
        (row,) = kernel.log.reader.calls()
        assert row.topic is not None and SECRET not in row.topic and len(row.topic) == 500
        kept = kernel.components.store.sessions.get(session.id)
        assert kept is not None and SECRET not in str(kept.topic)


async def test_handrail_log_prints_a_topic_without_line_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(topic="the\nbuild \x1b[2J" + "y" * 100)
        await session.call("glob", {"pattern": "*"})
        await kernel.log.flush()
        (row,) = kernel.log.reader.calls()
    log_command._print_call(TerminalRenderer(), row)  # pyright: ignore[reportPrivateUsage] - as the command shows it
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and not any(line.startswith("build") for line in shown.splitlines())
    assert "topic: the\\nbuild" in shown and "y" * 61 not in shown
    assert log_command._call_data(row)["topic"].startswith("the\nbuild")  # pyright: ignore[reportPrivateUsage]
