"""task, and agents as tools: delegation to sub-agents."""

from __future__ import annotations

from functools import partial
from typing import Any

from handrail.contract.agent_manifest import AGENT_TOOL_PREFIX
from handrail.contract.services.subagent_services import SubagentTask
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import make_closed_object_schema

_DAY_MS = 24 * 60 * 60 * 1000
_PROMPT = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200_000,
    "description": "Complete task: the agent does not see this conversation",
}
_ABOUT = {"type": "string", "maxLength": 200, "description": "Title in a few words. Default: none"}
_BACKGROUND = {"type": "boolean", "description": "Do not wait: you are notified when it ends. Default: false"}
_METADATA = {"type": "object", "maxProperties": 100, "description": "Data to store with its session. Default: none"}
_delegation_spec = partial(
    ToolSpec,
    requires=Requires(capabilities=("agents",)),
    side_effect="external",
    locks=(),
    promotable=True,
    background_argument="background",
    timeout_ms=_DAY_MS,
    category="agent",
)


class DelegateTaskTool(Tool):
    # A sub-agent's calls are evaluated and recorded as calls too. It may do no more than its parent, so delegation counts as
    # reading and needs no further permission.
    spec = _delegation_spec(
        id="task",
        description=(
            "Delegate a self-contained task to a sub-agent and return its final message. It has its own "
            "tools and conversation, the same workspace, and at most your permissions. The user does not see "
            "its message. Several tasks in one reply run in parallel."
        ),
        parameters=make_closed_object_schema(
            {
                "subagent_type": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 128,
                    "description": "ID of the agent, from the list in the system prompt",
                },
                "prompt": _PROMPT,
                "description": _ABOUT,
                "background": _BACKGROUND,
                "metadata": _METADATA,
            },
            ["subagent_type", "prompt"],
        ),
        tier="core",
    )

    def delegation_target(self, args: dict[str, Any]) -> str | None:
        return args["subagent_type"]

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.subagents.run(
            SubagentTask(args["subagent_type"], args["prompt"], args.get("description", ""), args.get("metadata"))
        )


class AgentDelegationTool(Tool):
    """A tool that delegates to one agent.

    :param agent: the agent's id
    :param about: the description in its manifest
    """

    def __init__(self, agent: str, about: str) -> None:
        self._agent = agent
        does = " ".join(about.split())
        self.spec = _delegation_spec(
            id=f"{AGENT_TOOL_PREFIX}{agent}",
            description=f"Delegate a task to the agent {agent} and return its final message.{f' {does}' if does else ''}",
            parameters=make_closed_object_schema(
                {"prompt": _PROMPT, "description": _ABOUT, "background": _BACKGROUND}, ["prompt"]
            ),
        )

    def delegation_target(self, args: dict[str, Any]) -> str | None:
        return self._agent

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.subagents.run(SubagentTask(self._agent, args["prompt"], args.get("description", "")))
