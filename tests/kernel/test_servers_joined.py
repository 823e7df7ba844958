"""Upstream servers of a client process: the lease holder runs them for all processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.upstream.scripted_mcp_servers import StdioServerProgram, approve_server_tools

from handrail import open_kernel
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.mark.proves("F-04")
async def test_a_connected_process_uses_the_mcp_servers_of_the_lease_holder(tmp_path: Path) -> None:
    server = StdioServerProgram(tmp_path)
    state, config = tmp_path / "state", tmp_path / "config" / "handrail.toml"
    async with temporary_kernel(tmp_path, settings=server.settings_toml("t"), rules=["allow mcp:t:*"]) as kernel:
        await approve_server_tools(kernel, "t")
        async with open_kernel(tmp_path / "ws", rules=["allow mcp:t:*"], state=state, config=config) as joined:
            assert not isinstance(joined, LocalKernel)
            assert (
                [one.name for one in joined.mcp_servers.server_statuses]
                == ["t"]
                == [one.name for one in kernel.mcp_servers.server_statuses]
            )
            result = await (await joined.session()).call("t_echo", {"text": "hi"})
            assert (result.ok, result.data) == (True, "hi")
