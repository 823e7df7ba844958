"""Trigger classes: further kinds of triggers, each a tool that adds one. Timers, schedules and channels are built in.

Write one as a tool, and register it like any other (``open_kernel(tools=[…])``, or a package's entry point)::

    class Tide(TriggerTool):
        spec = trigger_spec("add_tide", "Trigger: notify at each high tide.", {"harbour": {"type": "string"}}, "harbour")

        def next_ns(self, arguments, now_ns):
            return table_of(arguments["harbour"]).next_high(now_ns)

It is the operator's own code in the kernel's process, so the policy does not check its work while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.services.channels_and_triggers import Trigger
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool

COMMON_PARAMETERS = ("prompt", "name")
"""Parameters of every tool that adds a trigger."""
TRIGGER_PROMPT = {
    "type": "string",
    "minLength": 1,
    "maxLength": 8192,
    "description": "Message that you receive when it fires, with all you need to know then",
}
TRIGGER_NAME = {
    "type": "string",
    "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
    "description": "Unique name of the trigger. Default: assigned",
}


class TriggerEvent(Struct, frozen=True):
    """One firing of a trigger.

    :param text: what happened, for the model; if empty, the model gets only the prompt. It is data, labelled as
        untrusted
    :param position: JSON-able, up to 64 KiB: where the next wait continues; stored together with the firing
    :param is_last: whether the trigger is finished: it is removed
    """

    text: str = ""
    position: Any = None
    is_last: bool = False


class TriggerContext(Struct, frozen=True):
    """The context of one wait.

    :param arguments: of the tool call, without prompt and name
    :param position: of the last firing; None before the first
    :param fire_count: how often the trigger has fired
    :param workdir: the canonical path of the workspace
    :param since_ns: when the trigger was added, in wall-clock nanoseconds
    """

    name: str
    session_id: str
    workdir: str
    arguments: Mapping[str, Any]
    position: Any
    fire_count: int
    since_ns: int = 0


def make_trigger_spec(id: str, description: str, properties: Mapping[str, Any], *required: str) -> ToolSpec:
    """Return the spec of a tool that adds triggers.

    :param properties: JSON Schemas of its own parameters, in addition to ``prompt`` and ``name``
    :param required: those of them that are required
    :raises ValueError: for a parameter named like one of those
    """
    if taken := set(COMMON_PARAMETERS) & set(properties):
        raise ValueError(f"{id}: the parameter {', '.join(sorted(taken))} exists in every trigger; choose another name")
    return ToolSpec(
        id=id,
        description=description,
        parameters={
            "type": "object",
            "properties": {**properties, "prompt": TRIGGER_PROMPT, "name": TRIGGER_NAME},
            "required": [*required, "prompt"],
            "additionalProperties": False,
        },
        requires=Requires(capabilities=("triggers",)),
        side_effect="write",
        locks=(),
        category="hooks",
        kind="other",
    )


class TriggerTool(Tool):
    """A class of triggers. Set ``spec`` with :func:`make_trigger_spec`, and write :meth:`wait` or :meth:`next_ns`.

    A trigger waits until its session is closed, in the process that has the session open and knows the class. If
    :meth:`wait` raises five times in a row, or :meth:`next_ns` once, the session gets the error, and the trigger
    waits no more until the session is opened again.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.wait is TriggerTool.wait and cls.next_ns is TriggerTool.next_ns:
            raise TypeError(
                f"{cls.__name__} defines neither wait() nor next_ns(). Define one of them: it decides when the trigger fires."
            )

    async def wait(self, context: TriggerContext) -> TriggerEvent:
        """Wait until the trigger fires.

        The kernel calls it again with the returned position, also in a new process. Each firing is delivered once,
        whatever ends in between. A trigger fires at most once a second. The wait may be cancelled at any time.
        """
        raise TypeError(f"{type(self).__name__} fires by time. Call next_ns(), not wait().")

    def next_ns(self, arguments: Mapping[str, Any], now_ns: int) -> int | None:
        """Return the first time after ``now_ns`` at which it fires, in wall-clock nanoseconds; None for never."""
        raise TypeError(f"{type(self).__name__} does not fire by time. Call wait(), not next_ns().")

    @property
    def is_scheduled(self) -> bool:
        """Whether it fires at known times."""
        return type(self).next_ns is not TriggerTool.next_ns

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        arguments = {key: value for key, value in args.items() if key not in COMMON_PARAMETERS}
        return format_trigger_for_model(
            await runtime.triggers.add_custom_trigger(self, arguments, args["prompt"], name=args.get("name"))
        )


def format_trigger_for_model(trigger: Trigger) -> dict[str, object]:
    """Return a trigger in the form for a model."""
    shown: dict[str, object] = {"trigger_id": trigger.name, "kind": trigger.kind, "prompt": trigger.prompt}
    if trigger.interval_ns is not None:
        shown["interval"] = trigger.interval_ns / 1e9
        shown["once"] = trigger.is_one_shot
    for name in ("cron", "channel", "sender", "tool"):
        if (value := getattr(trigger, name)) is not None:
            shown[name] = value
    if trigger.problem is not None:
        shown["fault"] = trigger.problem
    if trigger.arguments is not None:
        shown["arguments"] = dict(trigger.arguments)
    if trigger.next_ns is not None:
        at = datetime.fromtimestamp(trigger.next_ns / 1e9, tz=UTC).astimezone()
        shown["next"] = at.isoformat(timespec="seconds")
    if trigger.fire_count:
        shown["fired"] = trigger.fire_count
    return shown


# Schedules: the five fields of cron, read strictly.

MAX_CRON = 200
"""Characters."""
_SOME_DAY = datetime(1970, 1, 1)
_FIELDS = (
    "Minutes range from 0 to 59, hours from 0 to 23, days from 1 to 31 (or to the end of the named months), months from 1 to 12, "
    "weekdays from 0 (Sunday) to 7."
)


def normalise_cron(cron: str) -> str:
    """Return a schedule with single spaces between its fields.

    :raises ToolError: ``invalid_input`` for a text that is not a schedule, or for a time that never comes
    """
    from cronsim import CronSim, CronSimError

    cron = " ".join(cron.split())
    if len(cron) > MAX_CRON or len(cron.split(" ")) != 5:
        text = f"Invalid cron expression: {cron[:80]!r}. Use five fields, minute hour day month weekday, as in '30 8 * * 1-5'."
        raise ToolError(text, kind="invalid_input")
    try:
        comes = next(CronSim(cron, _SOME_DAY), None) is not None
    except (CronSimError, ValueError) as error:
        raise ToolError(f"Invalid cron expression: {cron!r} ({error}). {_FIELDS}", kind="invalid_input") from None
    if not comes:
        raise ToolError(
            f"Invalid cron expression: {cron!r}. It names a day that never occurs; choose another day or month.",
            kind="invalid_input",
        )
    return cron
