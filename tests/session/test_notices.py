"""Notifications for a session's agent: stored, in order, delivered once."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from handrail.contract.errors import UsageError
from handrail.contract.services.channels_and_triggers import Notification
from handrail.session.inbound import channel_broker as noticing
from handrail.store.tables.inbound_tables import MAX_NOTIFICATIONS_AT_ONCE
from handrail.testing.scripted_kernel import temporary_kernel


def notice(session_id: str, id: str = "n1", text: str = "it is done") -> Notification:
    return Notification(id, session_id, "job", "bash_00000001", text, 1, {"exit_code": 0}, "bash")


async def test_notifications_keep_their_order_across_restarts_and_are_delivered_once(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert session.notifications is not None and session.lane.notifications is not None
        await session.lane.notifications.post(notice(session.id, "b"))
        await kernel.inbound_services.notifications.store_notification(notice(session.id, "a"))
        await kernel.inbound_services.notifications.store_notification(
            notice(session.id, "b", "the same delivery again")
        )
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(session.id)
        assert session.notifications is not None
        waiting = await session.notifications.list_pending()
        assert waiting == [notice(session.id, "b"), notice(session.id, "a")]
        await session.notifications.mark_delivered(["b"])
        await session.notifications.mark_delivered(["b"])
        await kernel.inbound_services.notifications.store_notification(notice(session.id, "b"))
        assert [one.id for one in await session.notifications.list_pending()] == ["a"]


async def test_a_session_sees_only_its_notifications_and_closing_removes_them(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        mine, other = await kernel.session(), await kernel.session()
        await kernel.inbound_services.notifications.store_notification(notice(other.id))
        assert mine.notifications is not None and not await mine.notifications.list_pending()
        await mine.notifications.mark_delivered(["n1"])
        assert other.notifications is not None and len(await other.notifications.list_pending()) == 1
        forked = await kernel.session(await kernel.fork_session(other.id))
        assert forked.notifications is not None and not await forked.notifications.list_pending(), (
            "it was told to the other"
        )
        await other.close()
        assert kernel.inbound_services.notifications.table.count_pending(other.id) == 0


async def test_a_waiter_wakes_for_a_notification_and_when_no_more_can_arrive(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        notices = kernel.inbound_services.notifications.attach_session(session.id)
        assert not await notices.wait_for_next(), "nothing runs"
        notices.expect_from("bash_00000001")
        notices.expect_from("bash_00000002")
        lives, idles = asyncio.create_task(notices.wait_until_pending()), asyncio.create_task(notices.wait_for_next())
        await kernel.inbound_services.notifications.store_notification(notice(session.id))
        await lives
        assert await idles
        await notices.mark_delivered(["n1"])
        idles = asyncio.create_task(notices.wait_for_next())
        notices.stop_expecting("bash_00000002")
        assert not await idles


async def test_a_released_session_drops_its_notification_state_once_all_its_jobs_have_ended(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        board = kernel.inbound_services.notifications
        left = board.attach_session("ses_left")
        left.expect_from("bash_1")
        left.expect_from("bash_2")
        board.release_session("ses_left")
        left.stop_expecting("bash_1")
        assert board.attach_session("ses_left") is left, "opened again, it is still told of the other"
        board.release_session("ses_left")
        left.stop_expecting("bash_2")
        opened = board.attach_session("ses_left")
        assert opened is not left
        left.stop_expecting("bash_2")
        assert board.attach_session("ses_left") is opened


async def test_stored_notifications_contain_no_secrets_and_are_bounded_in_size_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with temporary_kernel(tmp_path, secrets={"KEY": "hunter2hunter2"}) as kernel:
        session = await kernel.session()
        await kernel.inbound_services.notifications.store_notification(
            notice(session.id, text="the key is hunter2hunter2 " + "x" * 100_000)
        )
        (kept,) = kernel.inbound_services.notifications.table.list_pending(session.id)
        assert "hunter2" not in kept.text and "more characters are omitted" in kept.text
        monkeypatch.setattr(noticing, "MAX_PENDING", 2)
        await kernel.inbound_services.notifications.store_notification(notice(session.id, "n2"))
        with pytest.raises(UsageError, match="2 pending notifications"):
            await kernel.inbound_services.notifications.store_notification(notice(session.id, "n3"))
        other = await kernel.session()
        await kernel.inbound_services.notifications.store_notification(replace(notice(other.id), id="n3"))


async def test_pending_notifications_are_listed_in_batches_and_a_damaged_one_blocks_no_waiter(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        notices = kernel.inbound_services.notifications.attach_session(session.id)
        for n in range(MAX_NOTIFICATIONS_AT_ONCE + 5):
            await notices.post(notice(session.id, f"n{n:03}"))
        assert [one.id for one in await notices.list_pending()] == [
            f"n{n:03}" for n in range(MAX_NOTIFICATIONS_AT_ONCE)
        ]
        await notices.mark_delivered([one.id for one in await notices.list_pending()])
        with contextlib.closing(sqlite3.connect(kernel.components.store.database.path)) as other:
            other.execute("UPDATE notification SET body = x'00' WHERE delivered = 0")
            other.commit()
        while kernel.inbound_services.notifications.table.count_pending(session.id):
            assert not await notices.list_pending()
            await asyncio.sleep(0)
        assert not await notices.wait_for_next()


async def test_the_oldest_delivered_notifications_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        notices = kernel.inbound_services.notifications.attach_session(session.id)
        for n in range(1_005):
            await notices.post(notice(session.id, f"n{n}"))
        await notices.mark_delivered([f"n{n}" for n in range(1_005)])
        rows = kernel.components.store.database.shared_read_connection.execute(
            "SELECT count(*) FROM notification"
        ).fetchone()[0]
        assert rows == 1_000 and not await notices.list_pending()
