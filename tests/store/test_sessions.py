"""Sessions and the values that tools keep in them, across restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.store.places import Place

from handrail.contract.errors import LogUnavailable, UsageError
from handrail.store.tables.session_tables import SessionRow


async def test_a_session_survives_a_restart_and_keeps_its_opening_time(place: Place) -> None:
    store = place.open()
    row = SessionRow(
        "ses_1", 10, agent="default", topic="bugs", frontend="cli", headless=False, details={"client": "x"}
    )
    await store.sessions.record_opened(row)
    await store.aclose()
    store = place.open()
    assert store.sessions.get("ses_1") == replace(row, used_ns=10, holder=store.database.token - 1)
    await store.sessions.close("ses_1", 20)
    await store.sessions.record_opened(SessionRow("ses_1", 99))
    again = store.sessions.get("ses_1")
    assert again is not None and (again.opened_ns, again.closed_ns) == (10, None)
    await store.sessions.record_opened(SessionRow("ses_2", 11))
    assert [s.id for s in store.sessions.list_latest()] == ["ses_2", "ses_1"]
    assert store.sessions.get("ses_9") is None
    await store.aclose()


async def test_stored_values_survive_a_restart_and_belong_to_one_tool_and_session(place: Place) -> None:
    store = place.open()
    await store.session_values.put("ses_1", "todo", "items", [{"text": "half a pair \ud800", "n": 2**80}])
    await store.session_values.put("ses_1", "other", "items", 1)
    await store.session_values.put("ses_2", "todo", "items", 2)
    await store.aclose()
    store = place.open()
    assert await store.session_values.get("ses_1", "todo", "items") == [{"text": "half a pair \ud800", "n": 2**80}]
    await store.session_values.put("ses_1", "todo", "items", None)
    assert await store.session_values.get("ses_1", "todo", "items") is None
    assert await store.session_values.get("ses_1", "other", "items") == 1
    await store.sessions.close("ses_1", 1)
    assert await store.session_values.get("ses_1", "other", "items") is None
    assert await store.session_values.get("ses_2", "todo", "items") == 2
    await store.aclose()


async def test_concurrently_stored_values_are_all_kept(place: Place) -> None:
    store = place.open()
    state = store.session_values
    await asyncio.gather(*(state.put("ses_1", "tool", f"k{n}", n) for n in range(50)))
    assert [await state.get("ses_1", "tool", f"k{n}") for n in range(50)] == list(range(50))
    await store.aclose()


async def test_a_value_above_the_size_limit_is_refused(place: Place) -> None:
    store = place.open()
    with pytest.raises(UsageError, match=r"'big' is too large: .* bytes"):
        await store.session_values.put("ses_1", "tool", "big", "x" * 5_000_000)
    assert await store.session_values.get("ses_1", "tool", "big") is None
    with pytest.raises(UsageError, match="session id"):
        await store.sessions.record_opened(SessionRow("../x", 1))
    await store.aclose()
    with pytest.raises(LogUnavailable, match="closed"):
        await store.session_values.put("ses_1", "tool", "late", 1)
