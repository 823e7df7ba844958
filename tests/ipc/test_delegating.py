"""Delegation to the process that has the model, over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.ipc.workshop import connected

from handrail.contract.errors import ToolError
from handrail.contract.services.subagent_services import SubagentTask
from handrail.ipc.server.client_proxies import RemoteSubagentRunner
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable


async def test_a_lost_connection_interrupts_delegated_work_and_later_work_is_unavailable() -> None:
    theirs, ours = await connected()
    begun = asyncio.Event()

    async def at_work(body: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    theirs.finish_handshake(OperationTable({"model.run": OperationSpec(at_work)}, {}), {})
    ours.finish_handshake(OperationTable({}, {}), {})
    delegates = RemoteSubagentRunner(ours, "ses_1")
    delegation = SubagentTask("helper", "mend it", "", None)
    handed = asyncio.create_task(delegates.run("ses_1/1.0", delegation))
    await begun.wait()
    await theirs.aclose()
    with pytest.raises(ToolError, match="Check what it has done") as lost:
        await handed
    assert lost.value.kind == "interrupted"
    await ours.closed.wait()
    with pytest.raises(ToolError, match="Nothing was delegated") as gone:
        await delegates.run("ses_1/1.1", delegation)
    assert gone.value.kind == "unavailable"
    await ours.aclose()
