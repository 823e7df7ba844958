"""A process that has lost its lease holder finds the next one, also under repeated and concurrent requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from handrail.contract.errors import StartError
from handrail.ipc.client.reconnecting_client import ReconnectingClient
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.store.state_folders import locate_folders


@pytest.mark.proves("L-07")
async def test_a_request_after_a_failed_holder_search_starts_a_new_search(tmp_path: Path) -> None:
    searches = 0
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def take_over() -> bool:
        nonlocal searches
        searches += 1
        begun.set()
        await go_on.wait()
        raise StartError("there is no room")

    async def ask(times: int) -> None:
        for _ in range(times):
            with pytest.raises(StartError, match="no room"):
                await membership.wait_for_connection()

    (tmp_path / "ws").mkdir()
    membership = ReconnectingClient(
        locate_folders(tmp_path / "ws", tmp_path / "state"), take_over, dict, OperationTable({}, {})
    )
    first = asyncio.create_task(ask(1))
    await begun.wait()
    go_on.set()  # the search fails in the loop's next round, and so before the second one asks in it
    await asyncio.gather(first, asyncio.create_task(ask(3)))
    assert searches == 4
    await membership.aclose()
