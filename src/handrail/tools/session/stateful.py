"""tool.step, tool.close: going on with what a stateful tool has opened, and ending it.

They are declared here and judged, locked and timed as the tool that is open: what they do is that tool's.
"""

from __future__ import annotations

from typing import Any

from handrail.contract.doors.opened import GoesOn
from handrail.contract.doors.runtime import Runtime
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema

_STATE_ID = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    "description": "The state_id that the call was answered with which opened it",
}


class Step(Tool):
    goes_on = GoesOn("id", "input")
    spec = ToolSpec(
        id="tool.step",
        description=(
            "Take the next step of what a stateful tool has opened: a tool whose answer had a state_id. "
            "Returns that step, or done when there is none left."
        ),
        parameters=object_schema(
            {
                "id": _STATE_ID,
                "input": {"description": "What the tool is sent, of the form that it asks for; left out: null"},
            },
            ["id"],
        ),
        side_effect="external",
        locks=(),
        mode="stateful",
        category="system",
        kind="other",
        guidance=(
            "A tool that answers with a state_id goes on step by step: look at each step before you ask for the next one by "
            "tool.step, one at a time, and end it by tool.close once you have what you need. A state ends by itself with its "
            "last step, when a step fails or is stopped, and when no step comes for long; then call the tool anew."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.opened.step()


class Close(Tool):
    goes_on = GoesOn("id")
    spec = ToolSpec(
        id="tool.close",
        description="End what a stateful tool has opened, when no further step of it is needed. Twice is once.",
        parameters=object_schema({"id": _STATE_ID}, ["id"]),
        side_effect="external",
        locks=(),
        idempotent=True,
        mode="stateful",
        category="system",
        kind="other",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.opened.close()


STATE_TOOLS: tuple[Tool, ...] = (Step(), Close())
