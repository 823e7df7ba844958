"""``handrail log``: what a model's provider carried out stands among the calls, in the order in which it happened."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.faces.conftest import Here, Program

from handrail.record.log import CommitLog, Record
from handrail.store.opening import Store


@pytest.mark.proves("R-10")
def test_what_a_provider_carried_out_is_shown_among_the_calls(here: Here, handrail: Program) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    store = Store.open(handrail.workspace, handrail.state, face="test")
    try:
        about: dict[str, Any] = {"provider": "anthropic:m", "name": "web_search", "tool": "native.web_search"}
        told = {**about, "arguments": {"query": "two\nlines"}, "failed": False, "artifacts": ["sha256:1"]}
        asyncio.run(CommitLog(store.database).commit([Record("provided", "ses_x", "", told)]))
    finally:
        store.database.close()
        store.lease.release()
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    before, line, after = here("log").out.splitlines()
    assert "read" in before and "read" in after
    assert "ses_x" in line and "native.web_search" in line and "provided" in line
    assert r'done by anthropic:m: {"query": "two\nlines"}' in line
    rows = [json.loads(row) for row in here("log", "--json").out.splitlines()]
    assert [row["state"] for row in rows] == ["output", "provided", "output"]
    assert rows[1]["artifacts"] == ["sha256:1"] and rows[1]["call_id"] == ""
    (only,) = here("log", "--session", "ses_x").out.splitlines()
    assert "provided" in only
    assert "provided" not in here("log", "--limit", "1").out, "older than the calls that are shown"
