"""Triggers (add_timer, add_schedule, watch_channel, list_triggers, remove_trigger) and channels between agents."""

from __future__ import annotations

import re
from typing import Any

from handrail.contract.doors.channels import HISTORY
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.contract.tool.triggers import TRIGGER_NAME, TRIGGER_PROMPT, described, plain_cron
from handrail.tools.declaring import object_schema

# send_message and wait_channel: messages between agents.

LONGEST_WAIT_MS = 600_000
USUAL_WAIT_MS = 60_000
_CHANNELS = Requires(capabilities=("channels",))
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
        requires=_CHANNELS,
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
        requires=_CHANNELS,
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


_NEEDS = Requires(capabilities=("triggers",))
_WAYS = ("every_minutes", "hourly_at", "daily_at", "cron")
_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\Z")


def _spec(id: str, description: str, properties: dict[str, Any], *required: str, reads: bool = False) -> ToolSpec:
    return ToolSpec(
        id=id,
        description=description,
        parameters=object_schema(properties, required),
        requires=_NEEDS,
        side_effect="read" if reads else "write",
        locks=(),
        idempotent=reads,
        category="hooks",
        kind="other",
    )


class AddTimer(Tool):
    spec = _spec(
        "add_timer",
        "Trigger: be told something again and again after an interval, or once. It lasts as long as the session.",
        {
            "interval": {"type": "number", "minimum": 1, "maximum": 31_622_400, "description": "Seconds"},
            "prompt": TRIGGER_PROMPT,
            "once": {"type": "boolean", "default": False, "description": "Fire once only"},
            "immediate": {"type": "boolean", "default": False, "description": "Fire for the first time at once"},
            "name": TRIGGER_NAME,
        },
        "interval",
        "prompt",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return described(
            await runtime.triggers.timer(
                round(args["interval"] * 1000),
                args["prompt"],
                name=args.get("name"),
                once=args.get("once", False),
                immediate=args.get("immediate", False),
            )
        )


class AddSchedule(Tool):
    spec = _spec(
        "add_schedule",
        "Trigger: be told something at fixed times of the machine's local clock. Give exactly one of the four ways to say when.",
        {
            "every_minutes": {
                "type": "integer",
                "minimum": 1,
                "maximum": 59,
                "description": "Every n minutes: counted from the full hour where n divides 60, else from now",
            },
            "hourly_at": {"type": "integer", "minimum": 0, "maximum": 59, "description": "This minute of each hour"},
            "daily_at": {"type": "string", "maxLength": 20, "description": "This time each day, as in 08:30"},
            "cron": {
                "type": "string",
                "maxLength": 200,
                "description": "Minute hour day month weekday, as in 30 8 * * 1-5",
            },
            "prompt": TRIGGER_PROMPT,
            "name": TRIGGER_NAME,
        },
        "prompt",
    )

    def check(self, args: dict[str, Any]) -> None:
        ways = [way for way in _WAYS if way in args]
        if len(ways) != 1:
            given = ", ".join(ways) or "none of them"
            text = f"give exactly one of every_minutes, hourly_at, daily_at and cron; given: {given}"
            raise ToolError(text, kind="invalid_input")
        plain_cron(_as_cron(ways[0], args[ways[0]]))

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        way, name = next(way for way in _WAYS if way in args), args.get("name")
        if way == "every_minutes" and 60 % args[way]:  # as a schedule it would begin anew with each hour
            return described(await runtime.triggers.timer(args[way] * 60_000, args["prompt"], name=name))
        return described(await runtime.triggers.schedule(_as_cron(way, args[way]), args["prompt"], name=name))


class WatchChannel(Tool):
    spec = _spec(
        "watch_channel",
        "Trigger: be told of each message that comes over a channel. They are then read by this trigger, not by wait_channel.",
        {
            "channel": CHANNEL,
            "prompt": TRIGGER_PROMPT,
            "filter_sender": {
                "type": "string",
                "minLength": 1,
                "maxLength": 64,
                "description": "Only what this agent sends",
            },
            "name": TRIGGER_NAME,
        },
        "channel",
        "prompt",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        sender = args.get("filter_sender")
        return described(
            await runtime.triggers.watch(args["channel"], args["prompt"], name=args.get("name"), sender=sender)
        )


class ListTriggers(Tool):
    spec = _spec(
        "list_triggers", "List this session's triggers: what each waits for and when it fires next.", {}, reads=True
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {"triggers": [described(trigger) for trigger in await runtime.triggers.list()]}


class RemoveTrigger(Tool):
    spec = _spec("remove_trigger", "Remove one of this session's triggers by its name.", {"name": TRIGGER_NAME}, "name")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        removed = await runtime.triggers.remove(args["name"])
        return {"trigger_id": removed.name, "removed": True, "fired": removed.fired}


def _as_cron(way: str, value: Any) -> str:
    if way == "every_minutes":
        return f"*/{value} * * * *"
    if way == "hourly_at":
        return f"{value} * * * *"
    if way == "cron":
        return value
    found = _TIME.match(value.strip())
    if found is None:
        raise ToolError(f"{value[:40]!r} is no time of day; write hours and minutes, as in 08:30", kind="invalid_input")
    return f"{int(found[2])} {int(found[1])} * * *"


TRIGGER_TOOLS = (AddTimer(), AddSchedule(), WatchChannel(), ListTriggers(), RemoveTrigger())
