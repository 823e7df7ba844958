"""A process killed at any step of a trigger: nothing fires twice, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.session.arriving import SECOND, Clock, InboundFixture, place

from handrail.agent.agent_loop import deliver_notifications
from handrail.agent.conversation import Conversation
from handrail.contract.services.history_and_skill_services import HistoryEntry
from handrail.record.log_reader import LogReader
from handrail.store.json_fallback_encoding import decode_json_with_fallback
from handrail.store.workspace_store import WorkspaceStore

pytestmark = pytest.mark.proves("A-07", "G-05")


class StoredRows:
    """The rows of a conversation, in the database of its notifications."""

    def __init__(self, store: WorkspaceStore) -> None:
        self._store = store

    async def read_stored_messages(self) -> list[HistoryEntry]:
        return await self._store.messages.read("s")

    def store_messages(self, entries: Any) -> Any:
        return self._store.messages.queue_message_writes("s", entries, 1)

    async def store_attachment(self, data: bytes, media_type: str) -> str:
        raise AssertionError("nobody here shows anything")

    async def load_attachment(self, ref: str) -> bytes:
        raise AssertionError("nobody here shows anything")

    async def record_turn(self, usage: Any) -> None:
        return None

    async def record_compaction(self, summary: Any) -> None:
        pass

    async def record_provider_tool_use(self, about: Any, content: Any) -> list[str]:
        return []


async def heard_after(folder: Path, there: InboundFixture, clock: Clock, store: WorkspaceStore) -> list[str]:
    """Continue: fire due triggers, deliver notifications, and return all lines of the conversation."""
    await there.clockwork.start_stored_triggers()
    conversation = Conversation(StoredRows(store))
    await conversation.load_stored_messages()
    await deliver_notifications(there.board.attach_session("s"), conversation)
    rows = await store.messages.read("s")
    return [line for _, data in rows for line in str(data["text"]).splitlines()[1:]]


async def test_a_kill_after_any_commit_leaves_each_notification_delivered_exactly_once(tmp_path: Path) -> None:
    clock, left = Clock(), list[Path]()

    def killed_here(store: WorkspaceStore) -> None:
        """Keep the database as a kill at this moment would leave it."""
        copy = tmp_path / f"kill-{len(left)}"
        (copy / "ws").mkdir(parents=True)
        with closing(sqlite3.connect(copy / "db")) as to, closing(sqlite3.connect(store.database.path)) as of:
            of.backup(to)
        left.append(copy)

    async with place(tmp_path, clock) as there:
        store = there.store
        commit = store.database.write_durably

        async def and_look(table: Any, payload: Any) -> None:
            await commit(table, payload)
            killed_here(store)

        store.database.write_durably = and_look  # type: ignore[method-assign]
        await there.triggers("s").add_timer(10_000, "every", name="every")
        await there.triggers("s").add_timer(10_000, "once", name="once", once=True)
        added = len(left)
        clock.now += 10 * SECOND
        whole = await heard_after(tmp_path, there, clock, store)
    assert len(whole) == 2 and len(left) >= added + 5  # two notices, two rows, and that both are heard
    for number, copy in enumerate(left[added - 1 :], added - 1):
        (copy / "state").mkdir()
        async with place(copy, clock) as there:
            there_db = there.store.database.path
            with closing(sqlite3.connect(copy / "db")) as of, closing(sqlite3.connect(there_db)) as to:
                to.execute("PRAGMA busy_timeout = 5000")
                for table in ("session_trigger", "notification", "message"):
                    rows = of.execute(f"SELECT * FROM {table}").fetchall()
                    if rows:
                        to.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
                to.commit()
            again = await heard_after(copy, there, clock, there.store)
            assert sorted(again) == sorted(whole), f"after commit {number}"
            (trigger,) = there.clockwork.list_triggers("s")
            assert trigger.name == "every" and trigger.next_ns == clock.now + 10 * SECOND


_PROGRAM = """
import asyncio, sys
from pathlib import Path
from handrail.agent.agent_loop import Agent
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply

async def main(folder, id):
    async with temporary_kernel(folder, rules=["allow add_timer"]) as kernel:
        session = await kernel.session(id or None)
        print(session.id, flush=True)
        add = [call_reply(("add_timer", {"interval": 1, "prompt": "beat", "name": "t", "immediate": True})), text_reply("ok")]
        agent = Agent(session, PlaybackModel(*([] if id else add), *([text_reply("heard")] * 1000)))
        async for event in agent.serve(None if id else "begin"):
            print(type(event).__name__, flush=True)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.slow
def test_an_agent_killed_repeatedly_receives_each_trigger_event_once(tmp_path: Path) -> None:
    session_id, signs = "", ("RunFinished", "AgentIdle", "NotificationsDelivered", "TurnStarted", "TextDelta")
    for round_ in range(15):
        command = [sys.executable, "-c", _PROGRAM, str(tmp_path), session_id]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            session_id = session_id or program.stdout.readline().strip()
            wanted, seen = signs[round_ % len(signs)], 0
            for line in program.stdout:  # killed after the second of some event, from the second beat on
                seen += line.strip() == wanted
                if seen == 2 + (round_ == 0):
                    break
            os.kill(program.pid, signal.SIGKILL)
    (database,) = (tmp_path / "state").glob("ws/*/handrail.db")
    with LogReader.open_database(database) as reader:
        rows = [
            decode_json_with_fallback(body)
            for (body,) in reader.connection.execute("SELECT body FROM message ORDER BY position")
        ]
        told = [id for row in rows for id in row.get("notices", ())]
        kept = [
            decode_json_with_fallback(body) for (body,) in reader.connection.execute("SELECT body FROM session_trigger")
        ]
        (pending,) = reader.connection.execute("SELECT count(*) FROM notification WHERE delivered = 0").fetchone()
    beats = [int(id.rpartition("/")[2]) for id in told]
    assert len(beats) >= 15 and len(set(beats)) == len(beats) and beats == sorted(beats)
    assert len(kept) == 1 and kept[0]["fired"] in (len(beats) + pending - 1, len(beats) + pending)
