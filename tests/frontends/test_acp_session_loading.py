"""Sessions that fail to load: the client gets an error text and can load the session again."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from acp import RequestError, schema
from acp.client.connection import ClientSideConnection
from tests.frontends.acp_clients import Editor, EditorFixture, ask

from handrail.agent.run_budget import Budget
from handrail.contract.errors import LogUnavailable, UsageError
from handrail.contract.services.history_and_skill_services import HistoryEntry
from handrail.frontends.acp.editor_updates import UpdateSender
from handrail.session.session_store import SessionHistory
from handrail.store.state_folders import locate_folders

pytestmark = pytest.mark.proves("F-05")


@pytest.fixture
def desk(tmp_path: Path) -> EditorFixture:
    return EditorFixture(tmp_path)


@asynccontextmanager
async def client_with_closed_session(desk: EditorFixture) -> AsyncGenerator[tuple[ClientSideConnection, Editor, str]]:
    """A client that has one session open, and another that it has worked in and left; with that one's id."""
    async with desk.connected({"text": "Seen."}) as (client, editor):
        await client.new_session(cwd=str(desk.workspace))
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        await client.close_session(session_id=opened.session_id)
        yield client, editor, opened.session_id


def state(desk: EditorFixture, session_id: str) -> str:
    with desk.reading(str(desk.workspace)) as reader:
        found = reader.get(session_id)
    assert found is not None
    return found.state


def damaged(desk: EditorFixture, session_id: str) -> None:
    """Insert a message with arguments nested deeper than allowed."""
    arguments: dict[str, Any] = {}
    for _ in range(300):
        arguments = {"inner": arguments}
    parts = [{"call": "c", "name": "read", "arguments": arguments, "id": f"{session_id}/1.0"}]
    body = json.dumps({"v": 1, "role": "assistant", "parts": parts}).encode()
    folders = locate_folders(str(desk.workspace), str(desk.folder / "state"), allow_home=False)
    with sqlite3.connect(folders.database_file) as connection:
        changed = connection.execute(
            "UPDATE message SET body = ? WHERE session = ? AND position = 1", (body, session_id)
        )
        assert changed.rowcount == 1
    connection.close()


async def test_a_message_that_cannot_be_replayed_is_an_error_and_suspends_the_session(desk: EditorFixture) -> None:
    async with client_with_closed_session(desk) as (client, editor, session_id):
        damaged(desk, session_id)
        for _ in range(2):
            editor.updates.clear()
            with pytest.raises(RequestError, match=r"depth.*session/resume"):
                await client.load_session(cwd=str(desk.workspace), session_id=session_id)
            assert state(desk, session_id) == "suspended"
        with pytest.raises(RequestError, match="is not open"):
            await ask(client, session_id)
        await client.resume_session(cwd=str(desk.workspace), session_id=session_id)
        assert (await ask(client, session_id)).stop_reason == "end_turn"


async def test_an_unreadable_conversation_is_an_error_and_suspends_the_session(
    desk: EditorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(_: SessionHistory) -> Sequence[HistoryEntry]:
        raise LogUnavailable("the database cannot be read: disk I/O error")

    async with client_with_closed_session(desk) as (client, editor, session_id):
        with monkeypatch.context() as broken:
            broken.setattr(SessionHistory, "read_stored_messages", read)
            with pytest.raises(RequestError, match="disk I/O error"):
                await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        assert state(desk, session_id) == "suspended"
        editor.updates.clear()
        await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        assert editor.said == "Seen."


async def test_a_client_that_stops_receiving_during_a_load_leaves_no_open_session(
    desk: EditorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_with_closed_session(desk) as (client, _, session_id):
        tell = UpdateSender.replay_user_text

        def gone(telling: UpdateSender, words: str) -> None:
            async def send(_: object) -> None:
                raise BrokenPipeError

            monkeypatch.setattr(telling, "_send", send)
            tell(telling, words)

        monkeypatch.setattr(UpdateSender, "replay_user_text", gone)
        with pytest.raises(RequestError, match="before the conversation was sent"):
            await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        assert state(desk, session_id) == "suspended"


async def test_closing_a_session_while_it_loads_stops_the_loading(
    desk: EditorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = asyncio.Event(), asyncio.Event()
    read = SessionHistory.read_stored_messages

    async def slowly(history: SessionHistory) -> Sequence[HistoryEntry]:
        found = await read(history)
        reading.set()
        await go_on.wait()
        return found

    async with client_with_closed_session(desk) as (client, _, session_id):
        monkeypatch.setattr(SessionHistory, "read_stored_messages", slowly)
        loading = asyncio.create_task(client.load_session(cwd=str(desk.workspace), session_id=session_id))
        await reading.wait()
        await client.close_session(session_id=session_id)
        go_on.set()
        with pytest.raises(RequestError, match="before the conversation was sent"):
            await loading
        assert state(desk, session_id) == "suspended"


async def test_a_session_can_be_loaded_again_after_its_client_disconnects_during_loading(
    desk: EditorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = asyncio.Event()

    async def never(_: SessionHistory) -> Sequence[HistoryEntry]:
        reading.set()
        await asyncio.Event().wait()
        return []

    async with client_with_closed_session(desk) as (client, _, session_id):
        with monkeypatch.context() as broken:
            broken.setattr(SessionHistory, "read_stored_messages", never)
            loading = asyncio.create_task(client.load_session(cwd=str(desk.workspace), session_id=session_id))
            await reading.wait()
            await client.close()
    with pytest.raises(ConnectionError):
        await loading
    async with desk.connected({"text": "never said"}) as (client, editor):
        await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        assert editor.said == "Seen."


async def test_a_session_is_suspended_when_its_agent_cannot_be_created(
    desk: EditorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(_: object) -> Budget:
        raise UsageError("no such budget")

    async with client_with_closed_session(desk) as (client, _, session_id):
        with monkeypatch.context() as broken:
            broken.setattr(Budget, "combine_limits", of)
            with pytest.raises(RequestError, match="no such budget"):
                await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        assert state(desk, session_id) == "suspended"
        assert isinstance(
            await client.load_session(cwd=str(desk.workspace), session_id=session_id), schema.LoadSessionResponse
        )
