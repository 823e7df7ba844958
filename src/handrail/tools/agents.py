"""task, memory.compact and agents as tools: delegation to sub-agents, and compaction of this conversation."""

from __future__ import annotations

from functools import partial
from typing import Any

from handrail.contract.agent import AGENT_TOOL
from handrail.contract.doors.agents import Delegation
from handrail.contract.doors.runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema

_DAY_MS = 24 * 60 * 60 * 1000
_PROMPT = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200_000,
    "description": "The whole task. The agent sees nothing of this conversation",
}
_ABOUT = {"type": "string", "maxLength": 200, "description": "The task in a few words, for people"}
_BACKGROUND = {"type": "boolean", "description": "Do not wait: you are told when it has ended"}
_METADATA = {"type": "object", "maxProperties": 100, "description": "Kept with its session"}
_delegating = partial(
    ToolSpec,
    requires=Requires(capabilities=("agents",)),
    side_effect="external",
    locks=(),
    promotable=True,
    background_argument="background",
    timeout_ms=_DAY_MS,
    category="agent",
)


class Task(Tool):
    # What its sub-agent does are calls of their own, each judged and recorded. It may do no more than its parent, so that this
    # may be used wherever its parent may work at all, also where that may only read; and what came of it is never guessed.
    spec = _delegating(
        id="task",
        description=(
            "Hand a task to a sub-agent and wait for its last message. It works on its own, with its own tools and "
            "conversation, in the same workspace, and may do at most what you may. Use it for a part of the work whose "
            "details you need not see; several tasks in one reply run side by side."
        ),
        parameters=object_schema(
            {
                "subagent_type": {"type": "string", "minLength": 1, "maxLength": 128, "description": "Which agent"},
                "prompt": _PROMPT,
                "description": _ABOUT,
                "background": _BACKGROUND,
                "metadata": _METADATA,
            },
            ["subagent_type", "prompt"],
        ),
        tier="core",
    )

    def hands_to(self, args: dict[str, Any]) -> str | None:
        return args["subagent_type"]

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.agents.run(
            Delegation(args["subagent_type"], args["prompt"], args.get("description", ""), args.get("metadata"))
        )


class Compact(Tool):
    spec = ToolSpec(
        id="memory.compact",
        description=(
            "Make room in your context: older messages of this conversation are replaced by an outline or a summary before your "
            "next reply. Use it when earlier parts of long work no longer matter. Returns how many messages are removed and "
            "kept, or that there is nothing to compact. search_memory still finds what was removed."
        ),
        parameters=object_schema({}),
        requires=Requires(capabilities=("agents",)),
        side_effect="read",
        locks=(),
        category="memory",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.agents.compact()


class AgentTool(Tool):
    """One agent as a tool of its own.

    :param agent: its id
    :param about: its manifest's description
    """

    def __init__(self, agent: str, about: str) -> None:
        self._agent = agent
        does = " ".join(about.split())
        self.spec = _delegating(
            id=f"{AGENT_TOOL}{agent}",
            description=f"Hand a task to the agent {agent} and wait for its last message.{f' {does}' if does else ''}",
            parameters=object_schema({"prompt": _PROMPT, "description": _ABOUT, "background": _BACKGROUND}, ["prompt"]),
        )

    def hands_to(self, args: dict[str, Any]) -> str | None:
        return self._agent

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.agents.run(Delegation(self._agent, args["prompt"], args.get("description", "")))
