"""Triggers (add_timer, add_schedule, watch_channel, list_triggers, remove_trigger) and channels between agents."""

from __future__ import annotations

from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.services.channels_and_triggers import CHANNEL_CAPACITY, check_channel_name
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool.trigger_tools import TRIGGER_NAME, TRIGGER_PROMPT, format_trigger_for_model, normalise_cron
from handrail.tools.tool_declarations import make_closed_object_schema

# send_message and wait_channel: messages between agents.

MAX_WAIT_MS = 600_000
DEFAULT_WAIT_MS = 60_000
_CHANNELS = Requires(capabilities=("channels",))
CHANNEL = {
    "type": "string",
    "minLength": 1,
    "maxLength": 80,
    "examples": ["reviews"],
    "description": "Channel of this session and its sub-agents, or shared/NAME for all sessions of the workspace",
}


class SendChannelMessageTool(Tool):
    spec = ToolSpec(
        id="send_message",
        description=(
            "Send a text message to other agents over a channel, which is created if it does not exist. A "
            "queue delivers each message to one reader, a broadcast to every reader."
        ),
        parameters=make_closed_object_schema(
            {
                "channel": CHANNEL,
                "message": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 65_536,
                    "description": "Text of the message",
                },
                "kind": {"enum": ["queue", "broadcast"], "description": "Kind of a new channel. Default: queue"},
            },
            ["channel", "message"],
        ),
        requires=_CHANNELS,
        side_effect="write",
        locks=(),
        category="agent",
        kind="other",
    )

    def check(self, args: dict[str, Any]) -> None:
        check_channel_name(args["channel"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        waiting = await runtime.channels.send(args["channel"], args["message"], kind=args.get("kind"))
        return {"channel": args["channel"], "sent": True, "unread": min(waiting, CHANNEL_CAPACITY)}


class WaitForChannelMessageTool(Tool):
    spec = ToolSpec(
        id="wait_channel",
        description=(
            "Wait for the next message from another agent on a channel and read it, e.g. a reply. If none "
            "arrives in time, `message` is null; call it again to keep waiting."
        ),
        parameters=make_closed_object_schema(
            {
                "channel": CHANNEL,
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": MAX_WAIT_MS,
                    "default": DEFAULT_WAIT_MS,
                    "description": "Maximum wait in milliseconds. 0 checks once",
                },
                "sender": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 64,
                    "description": "Only messages from this agent. Default: all",
                },
            },
            ["channel"],
        ),
        requires=_CHANNELS,
        side_effect="write",
        locks=(),
        timeout_ms=MAX_WAIT_MS + 60_000,
        category="agent",
        kind="other",
    )

    def check(self, args: dict[str, Any]) -> None:
        check_channel_name(args["channel"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        received = await runtime.channels.receive(
            args["channel"], timeout_ms=args.get("timeout_ms", DEFAULT_WAIT_MS), sender=args.get("sender")
        )
        if (message := received.message) is None:
            return {"channel": args["channel"], "message": None}
        answer: dict[str, object] = {"channel": args["channel"], "message": message.text, "sender": message.sender}
        if message.data is not None:
            answer["data"] = dict(message.data)
        if received.missed:
            answer["missed_messages"] = received.missed
        return answer


CHANNEL_TOOLS = (SendChannelMessageTool(), WaitForChannelMessageTool())


_TRIGGERS = Requires(capabilities=("triggers",))
_SCHEDULE_FORMS = ("every_minutes", "hourly_at", "daily_at", "cron")
_TIME = compile_regex_lazily(r"([01]?\d|2[0-3]):([0-5]\d)\Z")


def _spec(id: str, description: str, properties: dict[str, Any], *required: str, reads: bool = False) -> ToolSpec:
    return ToolSpec(
        id=id,
        description=description,
        parameters=make_closed_object_schema(properties, required),
        requires=_TRIGGERS,
        side_effect="read" if reads else "write",
        locks=(),
        idempotent=reads,
        category="hooks",
        kind="other",
    )


class AddTimerTool(Tool):
    spec = _spec(
        "add_timer",
        "Set a timer or reminder (trigger): get notified after an interval, repeatedly or once, e.g. to poll something. "
        "Lasts as long as the session.",
        {
            "interval": {"type": "number", "minimum": 1, "maximum": 31_622_400, "description": "Interval in seconds"},
            "prompt": TRIGGER_PROMPT,
            "once": {"type": "boolean", "default": False, "description": "Fire only once"},
            "immediate": {"type": "boolean", "default": False, "description": "Fire for the first time immediately"},
            "name": TRIGGER_NAME,
        },
        "interval",
        "prompt",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return format_trigger_for_model(
            await runtime.triggers.add_timer(
                round(args["interval"] * 1000),
                args["prompt"],
                name=args.get("name"),
                once=args.get("once", False),
                immediate=args.get("immediate", False),
            )
        )


class AddScheduleTool(Tool):
    spec = _spec(
        "add_schedule",
        "Add a schedule (trigger, cron job): get notified at fixed local times, e.g. every weekday at 9:00. Give exactly one of "
        "every_minutes, hourly_at, daily_at and cron.",
        {
            "every_minutes": {
                "type": "integer",
                "minimum": 1,
                "maximum": 59,
                "description": (
                    "Interval in minutes, counted from the full hour if it divides 60, otherwise from now. Default: "
                    "none"
                ),
            },
            "hourly_at": {
                "type": "integer",
                "minimum": 0,
                "maximum": 59,
                "description": "Minute of each hour. Default: none",
            },
            "daily_at": {
                "type": "string",
                "maxLength": 20,
                "description": "Time of each day, e.g. 08:30. Default: none",
            },
            "cron": {
                "type": "string",
                "maxLength": 200,
                "description": "Minute hour day month weekday, e.g. 30 8 * * 1-5. Default: none",
            },
            "prompt": TRIGGER_PROMPT,
            "name": TRIGGER_NAME,
        },
        "prompt",
    )

    def check(self, args: dict[str, Any]) -> None:
        ways = [way for way in _SCHEDULE_FORMS if way in args]
        if len(ways) != 1:
            given = ", ".join(ways) or "none"
            text = f"Pass exactly one of `every_minutes`, `hourly_at`, `daily_at` and `cron`. Given: {given}."
            raise ToolError(text, kind="invalid_input")
        normalise_cron(_to_cron(ways[0], args[ways[0]]))

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        way, name = next(way for way in _SCHEDULE_FORMS if way in args), args.get("name")
        if way == "every_minutes" and 60 % args[way]:  # as a cron schedule it would restart every hour
            return format_trigger_for_model(
                await runtime.triggers.add_timer(args[way] * 60_000, args["prompt"], name=name)
            )
        return format_trigger_for_model(
            await runtime.triggers.add_schedule(_to_cron(way, args[way]), args["prompt"], name=name)
        )


class WatchChannelTool(Tool):
    spec = _spec(
        "watch_channel",
        "Watch a channel (trigger): get notified of each message that arrives. The messages are then read by this trigger, "
        "not by wait_channel.",
        {
            "channel": CHANNEL,
            "prompt": TRIGGER_PROMPT,
            "filter_sender": {
                "type": "string",
                "minLength": 1,
                "maxLength": 64,
                "description": "Only messages from this agent. Default: all",
            },
            "name": TRIGGER_NAME,
        },
        "channel",
        "prompt",
    )

    def check(self, args: dict[str, Any]) -> None:
        check_channel_name(args["channel"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        sender = args.get("filter_sender")
        return format_trigger_for_model(
            await runtime.triggers.watch_channel(args["channel"], args["prompt"], name=args.get("name"), sender=sender)
        )


class ListTriggersTool(Tool):
    spec = _spec(
        "list_triggers",
        "List the timers, reminders, schedules and watched channels (triggers) of this session, with when each fires next.",
        {},
        reads=True,
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {"triggers": [format_trigger_for_model(trigger) for trigger in await runtime.triggers.list_triggers()]}


class RemoveTriggerTool(Tool):
    spec = _spec(
        "remove_trigger",
        "Remove (cancel, delete) a timer, reminder, schedule or watched channel by its name.",
        {"name": {**TRIGGER_NAME, "description": "Name of the trigger"}},
        "name",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        removed = await runtime.triggers.remove(args["name"])
        return {"trigger_id": removed.name, "removed": True, "fired": removed.fire_count}


def _to_cron(way: str, value: Any) -> str:
    if way == "every_minutes":
        return f"*/{value} * * * *"
    if way == "hourly_at":
        return f"{value} * * * *"
    if way == "cron":
        return value
    found = _TIME.match(value.strip())
    if found is None:
        text = f"`daily_at` is invalid: {value[:40]!r}. Use hours and minutes, such as 08:30."
        raise ToolError(text, kind="invalid_input")
    return f"{int(found[2])} {int(found[1])} * * *"


TRIGGER_TOOLS = (AddTimerTool(), AddScheduleTool(), WatchChannelTool(), ListTriggersTool(), RemoveTriggerTool())
