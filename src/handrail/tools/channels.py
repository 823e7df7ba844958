"""send_message and wait_channel: messages between agents."""

from __future__ import annotations

from typing import Any

from handrail.contract.doors.channels import HISTORY
from handrail.contract.doors.runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema

LONGEST_WAIT_MS = 600_000
USUAL_WAIT_MS = 60_000
_NEEDS = Requires(capabilities=("channels",))
CHANNEL = {
    "type": "string",
    "minLength": 1,
    "maxLength": 80,
    "description": "A name of this session's and its sub-agents', or shared/NAME for all sessions of the workspace",
}


class SendMessage(Tool):
    spec = ToolSpec(
        id="send_message",
        description=(
            "Send a text to other agents over a channel. A queue gives each message to one reader; a broadcast gives each to "
            "every reader. A channel that is not there yet is made."
        ),
        parameters=object_schema(
            {
                "channel": CHANNEL,
                "message": {"type": "string", "minLength": 1, "maxLength": 65_536},
                "kind": {"enum": ["queue", "broadcast"], "description": "Of a channel that is made; queue if left out"},
            },
            ["channel", "message"],
        ),
        requires=_NEEDS,
        side_effect="write",
        locks=(),
        category="agent",
        kind="other",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        waiting = await runtime.channels.send(args["channel"], args["message"], kind=args.get("kind"))
        return {"channel": args["channel"], "sent": True, "unread": min(waiting, HISTORY)}


class WaitChannel(Tool):
    spec = ToolSpec(
        id="wait_channel",
        description=(
            "Wait for the next message on a channel and read it. Gives message null when none came in time; "
            "call it again to go on waiting."
        ),
        parameters=object_schema(
            {
                "channel": CHANNEL,
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": LONGEST_WAIT_MS,
                    "default": USUAL_WAIT_MS,
                    "description": "0 looks once",
                },
                "sender": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 64,
                    "description": "Only what this agent sends",
                },
            },
            ["channel"],
        ),
        requires=_NEEDS,
        side_effect="write",
        locks=(),
        timeout_ms=LONGEST_WAIT_MS + 60_000,
        category="agent",
        kind="other",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        received = await runtime.channels.receive(
            args["channel"], timeout_ms=args.get("timeout_ms", USUAL_WAIT_MS), sender=args.get("sender")
        )
        if (message := received.message) is None:
            return {"channel": args["channel"], "message": None}
        answer: dict[str, object] = {"channel": args["channel"], "message": message.text, "sender": message.sender}
        if message.data is not None:
            answer["data"] = dict(message.data)
        if received.missed:
            answer["missed"] = received.missed
        return answer


CHANNEL_TOOLS = (SendMessage(), WaitChannel())
