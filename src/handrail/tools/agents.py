"""task: work handed to a sub-agent, which does it in a session of its own."""

from __future__ import annotations

from typing import Any

from handrail.contract.delegation import Delegation
from handrail.contract.requires import Requires
from handrail.contract.runtime import Runtime
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool

_DAY_MS = 24 * 60 * 60 * 1000
_PROMPT = {
    "type": "string",
    "minLength": 1,
    "description": "The whole task. The agent sees nothing of this conversation",
}
_ABOUT = {"type": "string", "maxLength": 200, "description": "The task in a few words, for people"}
_METADATA = {"type": "object", "description": "Kept with its session"}


class Task(Tool):
    # What its sub-agent does are calls of their own, each of which is judged and recorded; the task itself only opens a
    # session. So it may be used wherever one may only read: its sub-agent may no more than that, either.
    spec = ToolSpec(
        id="task",
        description=(
            "Hand a task to a sub-agent and wait for its last message. It works on its own, with its own tools and "
            "conversation, in the same workspace, and may do at most what you may. Use it for a part of the work whose "
            "details you need not see; several tasks in one reply run side by side."
        ),
        parameters={
            "type": "object",
            "properties": {
                "subagent_type": {"type": "string", "minLength": 1, "description": "Which agent"},
                "prompt": _PROMPT,
                "description": _ABOUT,
                "metadata": _METADATA,
            },
            "required": ["subagent_type", "prompt"],
            "additionalProperties": False,
        },
        requires=Requires(capabilities=("agents",)),
        side_effect="read",
        locks=(),
        promotable=True,
        timeout_ms=_DAY_MS,
        category="agent",
        tier="core",
        kind="other",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.agents.run(
            Delegation(args["subagent_type"], args["prompt"], args.get("description", ""), args.get("metadata"))
        )
