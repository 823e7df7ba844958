"""All odd servers behind one gateway: none affects another."""

from __future__ import annotations

from pathlib import Path

from tests.mcp_suite.odd_upstreams import SERVERS, call_odd_servers


async def test_all_odd_servers_work_together(tmp_path: Path) -> None:
    assert len(SERVERS) >= 30
    assert await call_odd_servers(tmp_path) == []
