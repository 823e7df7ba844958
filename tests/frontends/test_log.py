"""``handrail log``: what a model's provider carried out, and what was read above the workspace, stands among the calls, in the order in which it happened."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from tests.frontends.conftest import Here, Program
from tests.frontends.test_mcp import connected

from handrail.record.commit_log import CommitLog, Record
from handrail.store.workspace_store import WorkspaceStore


@pytest.mark.proves("R-10")
def test_log_shows_provider_tools_and_read_instructions_among_the_calls(here: Here, handrail: Program) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    store = WorkspaceStore.open(handrail.workspace, handrail.state, frontend="test")
    try:
        about: dict[str, Any] = {"provider": "anthropic:m", "name": "web_search", "tool": "native.web_search"}
        told = {**about, "arguments": {"query": "two\nlines"}, "failed": False, "artifacts": ["sha256:1"]}
        read = {"files": [{"path": "/above/AGENTS.md", "sha256": "ab" * 32, "characters": 7}]}
        read["files"].append({"path": "/above/CLAUDE.md", "skipped_by": "a rule"})
        records = [Record("provider-tool-used", "ses_x", "", told), Record("instructions-read", "ses_x", "", read)]
        asyncio.run(CommitLog(store.database).commit(records))
    finally:
        store.database.close()
        store.lease.release()
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    before, between, after = here("log").out.split("\n\n")
    assert "✓ read" in before and "✓ read" in after
    head, _, *lines = between.splitlines()
    shown = " ".join(" ".join(lines).split())
    assert head == "ses_x" and "• native.web_search provider-tool-used" in shown
    assert r'done by anthropic:m: {"query": "two\nlines"}' in shown
    assert "• instructions instructions-read /above/AGENTS.md (sha256 abababababab), /above/CLAUDE.md" in shown
    assert "(skipped: a rule)" in shown
    rows = [json.loads(row) for row in here("log", "--json").out.splitlines()]
    assert [row["state"] for row in rows] == ["output", "provider-tool-used", "instructions-read", "output"]
    assert rows[1]["artifacts"] == ["sha256:1"] and rows[1]["call_id"] == ""
    only = here("log", "--session", "ses_x").out
    assert "provider-tool-used" in only and "instructions-read" in only and "✓ read" not in only
    assert "provider-tool-used" not in here("log", "--limit", "1").out, "older than the calls that are shown"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_log_names_an_mcp_client_by_its_reported_name_and_version(
    handrail: Program, here: Here, mode: Literal["auto", "legacy"]
) -> None:
    async with connected(handrail, mode=mode) as client:
        await client.call_tool("read", {"path": "note.txt"})
    (row,) = [json.loads(line) for line in here("log", "--json").out.splitlines()]
    opener = row["opener"]
    assert opener["frontend"] == "mcp" and opener["client"] not in ("", "mcp-server") and opener["client_version"]
    assert f"{opener['client']} {opener['client_version']}" in here("log").out.splitlines()[0]
