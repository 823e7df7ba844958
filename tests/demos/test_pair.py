"""Two agents that exchange work over channels: the whole demo and a small form."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from demos.demonstration import drive
from demos.pair import parts
from demos.pair.guide import shown
from tests.frontends.conftest import Terminals

from handrail.agent.agent_loop import Agent
from handrail.agent.run_events import AgentIdle, NotificationsDelivered
from handrail.sandbox import tier_probe
from handrail.session.local_session import LocalSession
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

ROOT = str(Path(__file__).parents[2])

needs_sandbox = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)
pytestmark = pytest.mark.proves("A-07")


async def test_a_message_from_another_agent_wakes_a_serving_agent_that_edits_and_reports(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("one wrong line\n")
    rules = ["allow edit a.txt", "allow send_message *", "allow wait_channel *", "allow watch_channel *"]
    watch = {"channel": "shared/work", "prompt": "Mend it.", "name": "work"}
    fixes = PlaybackModel(
        call_reply(("watch_channel", watch)),
        text_reply("I wait."),
        call_reply(("read", {"path": "a.txt"})),
        call_reply(("edit", {"path": "a.txt", "old": "wrong", "new": "right"})),
        call_reply(("send_message", {"channel": "shared/reports", "message": "a.txt is mended"})),
        text_reply("Done."),
    )
    reviews = PlaybackModel(
        call_reply(("send_message", {"channel": "shared/work", "message": "a.txt: one line is wrong"})),
        call_reply(("wait_channel", {"channel": "shared/reports"})),
        text_reply("Good."),
    )
    async with temporary_kernel(tmp_path, rules=rules) as kernel:
        fixer = Agent(await kernel.session(), fixes)
        reviewer = Agent(await kernel.session(), reviews)
        held = fixer.session
        assert isinstance(held, LocalSession)
        waits, told = asyncio.Event(), list[str]()

        async def live() -> None:
            async with aclosing(fixer.serve("Have yourself woken.")) as life:
                async for event in life:
                    (waits.set if isinstance(event, AgentIdle) else waits.clear)()
                    told.extend(notice.text for notice in getattr(event, "notifications", ()))
                    assert not isinstance(event, NotificationsDelivered) or held.is_headless

        living = asyncio.create_task(live())
        await waits.wait()
        outcome = await reviewer.complete("Have a.txt mended.")
        await waits.wait()
        fixer.stop()
        await living
    assert outcome.ok and "a.txt is mended" in str(reviewer.messages)
    assert (tmp_path / "ws" / "a.txt").read_text() == "one right line\n"
    assert len(told) == 1 and "a.txt: one line is wrong" in told[0]


@pytest.mark.slow
@needs_sandbox
def test_the_pair_demo_shows_every_effect_and_fits_a_terminal(on_a_terminal: Terminals, tmp_path: Path) -> None:
    apart = ("GIT_", "HANDRAIL_", "XDG_", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)} | {"PYTHONPATH": ROOT}
    environment = {**kept, "TMPDIR": str(tmp_path), "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": ""}
    terminal = on_a_terminal(sys.executable, "-m", "demos.pair", environment=environment)
    assert terminal.end() == 0, terminal.shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", terminal.shown)
    assert "All 16 effects are there." in plain and [line for line in plain.splitlines() if len(line) > 80] == []
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@needs_sandbox
def test_the_demo_detects_work_that_an_agent_left_undone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = parts.scripts()
    fixer = shorter[parts.FIXER]
    shorter[parts.FIXER] = fixer.model_copy(update={"turns": fixer.turns[:7]})  # stops before it mends the second
    monkeypatch.setattr(parts, "scripts", lambda: shorter)
    assert drive(lambda interruption: shown(interruption, keep=False)) == 1
    said = capsys.readouterr().out
    assert "✓ the tests fail at first" in said and "✗ and that of the second" in said
