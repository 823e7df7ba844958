"""A session whose editor leaves or loses its connection while a sub-agent works in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from acp.client.connection import ClientSideConnection
from tests.frontends.acp_clients import Editor, EditorFixture, ask

from handrail.agent.model_protocol import BlockEvent, ModelRequest
from handrail.agent.subagents import ROLE
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.calls_and_results import Result
from handrail.frontends.acp.editor_session_setup import OpenWorkspacePool
from handrail.kernel.kernel_interface import Kernel
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply

pytestmark = pytest.mark.proves("A-10", "A-03", "F-05")

BEGINS = call_reply(("task", {"subagent_type": "worker", "prompt": "Work.", "background": True}))
WRITES = call_reply(("write", {"path": "a", "content": "a"}))


class SharedModel(PlaybackModel):
    """The model of an agent and of its sub-agents, which have replies of their own."""

    def __init__(self, worker: PlaybackModel, *replies: list[BlockEvent]) -> None:
        super().__init__(*replies)
        self.worker = worker

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        assert not self.closed, "somebody works with it"
        played = self.worker.stream(request) if ROLE in request.system else super().stream(request)
        async with aclosing(played) as events:
            async for event in events:
                yield event


class DelegatingFixture(EditorFixture):
    """An editor fixture whose agents may delegate to a worker, with a kernel that can stay open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept: Kernel | None = None
        self.opened: list[Kernel] = []
        for agent, text in {
            "default": "[delegation]\ncan_ask_user = true",
            "worker": 'role = "subagent"\ntools = ["write"]',
        }.items():
            place = folder / "config" / "agents" / agent
            place.mkdir(parents=True, mode=0o755)
            (place / "agent.toml").write_text(f'id = "{agent}"\n{text}')

    @asynccontextmanager
    async def kernel(self, workspace: str, **more: Any) -> AsyncGenerator[Kernel]:
        own = super().kernel(workspace, **more)
        async with own if self.kept is None else nullcontext(self.kept) as kernel:
            self.opened.append(kernel)
            yield kernel

    async def ended(self) -> Result:
        """Return the result of the only job."""
        jobs = self.opened[-1].jobs
        (job,) = await jobs.list()
        result = await jobs.wait(job.id, timeout_ms=60_000)
        assert result is not None
        return result


@pytest.fixture
def desk(tmp_path: Path) -> DelegatingFixture:
    return DelegatingFixture(tmp_path)


def opening(*models: SharedModel) -> Any:
    """One model after the other."""
    each = iter(models)

    def opened(_: AgentManifest) -> SharedModel:
        return next(each)

    return opened


async def start_prompt(client: ClientSideConnection, desk: EditorFixture, pause: ReplyPause) -> str:
    opened = await client.new_session(cwd=str(desk.workspace))
    await ask(client, opened.session_id)
    await pause.reached.wait()
    return opened.session_id


def read_last_messages(model: SharedModel) -> str:
    said = str(model.requests[-1].messages)
    assert said.count("Job task_") == 1
    return said


async def test_a_background_sub_agent_continues_after_its_editor_closes_the_session(desk: DelegatingFixture) -> None:
    pause = ReplyPause()
    first = SharedModel(PlaybackModel([pause, *text_reply("Worked.")]), BEGINS, text_reply("Begun."))
    second = SharedModel(PlaybackModel(), text_reply("Heard."))
    async with desk.connected(model=opening(first, second)) as (client, editor):
        session_id = await start_prompt(client, desk, pause)
        await client.close_session(session_id=session_id)
        assert not first.closed
        pause.proceed.set()
        await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        assert (await desk.ended()).ok
        await ask(client, session_id, "And?")
        assert "Worked." in read_last_messages(second) and editor.of("agent_thought_chunk")
    assert first.closed and second.closed


async def test_the_workspace_is_closed_once_its_last_background_work_has_ended(
    desk: DelegatingFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, leave = asyncio.Event(), OpenWorkspacePool.release_workspace

    async def left(self: OpenWorkspacePool, folder: str) -> None:
        await leave(self, folder)
        closed.set()

    monkeypatch.setattr(OpenWorkspacePool, "release_workspace", left)
    pause = ReplyPause()
    first = SharedModel(PlaybackModel([pause, *text_reply("Worked.")]), BEGINS, text_reply("Begun."))
    second = SharedModel(PlaybackModel(), text_reply("Heard."))
    async with desk.connected(model=opening(first, second)) as (client, _):
        session_id = await start_prompt(client, desk, pause)
        await client.close_session(session_id=session_id)
        assert not closed.is_set()
        pause.proceed.set()
        await closed.wait()
        assert first.closed
        await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        await ask(client, session_id, "And?")
        assert "Worked." in read_last_messages(second)


async def test_a_background_sub_agent_survives_a_lost_connection_and_the_next_gets_its_result(
    desk: DelegatingFixture,
) -> None:
    pause = ReplyPause()
    first = SharedModel(PlaybackModel([pause, *text_reply("Worked.")]), BEGINS, text_reply("Begun."))
    second = SharedModel(PlaybackModel(), text_reply("Heard."))
    async with desk.kernel(str(desk.workspace)) as desk.kept:
        async with desk.connected(model=opening(first)) as (client, _):
            session_id = await start_prompt(client, desk, pause)
        assert not first.closed
        pause.proceed.set()
        assert (await desk.ended()).ok
        async with desk.connected(model=opening(second)) as (client, _):
            await client.load_session(cwd=str(desk.workspace), session_id=session_id)
            await ask(client, session_id, "And?")
            assert "Worked." in read_last_messages(second)
    assert first.closed and second.closed


@pytest.mark.proves("P-12")
@pytest.mark.parametrize("again", ["load_session", "resume_session"])
async def test_a_request_left_open_by_a_lost_connection_is_asked_on_the_next(
    desk: DelegatingFixture, again: str
) -> None:
    pause, editor, back = ReplyPause(), Editor(), Editor()
    pause.proceed.set()
    editor.answering = lambda _call, _options: None
    back.answering = lambda _call, _options: "allow_once"
    worker = PlaybackModel([pause, *WRITES], text_reply("Written."))
    first = SharedModel(worker, BEGINS, text_reply("Begun."))
    async with desk.kernel(str(desk.workspace)) as desk.kept:
        async with desk.connected(model=opening(first), editor=editor) as (client, _):
            session_id = await start_prompt(client, desk, pause)
            await editor.until(lambda: editor.asked)
        assert len(desk.kept.approvals.list_pending()) == 1
        async with desk.connected(model=opening(SharedModel(PlaybackModel())), editor=back) as (client, _):
            await getattr(client, again)(cwd=str(desk.workspace), session_id=session_id)
            await back.until(lambda: back.asked)
            assert (await desk.ended()).data["text"] == "Written."
            assert len(back.asked) == 1
    assert (desk.workspace / "a").read_text() == "a"


async def test_a_background_sub_agent_ends_with_its_kernel_and_the_session_is_informed(desk: DelegatingFixture) -> None:
    pause = ReplyPause()
    first = SharedModel(PlaybackModel([pause, *text_reply("never")]), BEGINS, text_reply("Begun."))
    second = SharedModel(PlaybackModel(), text_reply("Heard."))
    async with desk.connected(model=opening(first)) as (client, _):
        session_id = await start_prompt(client, desk, pause)
    assert first.closed and not first.worker.open_streams
    async with desk.connected(model=opening(second)) as (client, _):
        await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        await ask(client, session_id, "And?")
        assert "the kernel is shutting down" in read_last_messages(second)
