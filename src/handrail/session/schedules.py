"""When a trigger that goes by the clock fires: by its interval, or by its cron expression in the machine's local time."""

from __future__ import annotations

from datetime import datetime

from handrail.contract.arrivals import Trigger
from handrail.contract.errors import ToolError

SECOND_NS = 1_000_000_000


def next_after(trigger: Trigger, now_ns: int) -> int | None:
    """When it fires after ``now_ns``; None for never again."""
    if trigger.every_ns is not None:
        if trigger.once and (trigger.next_ns is None or trigger.next_ns <= now_ns):
            return None
        begun = trigger.next_ns if trigger.next_ns is not None else trigger.created_ns
        return begun + max((now_ns - begun) // trigger.every_ns + 1, 1) * trigger.every_ns
    if trigger.cron is not None:
        return _next_of(trigger.cron, now_ns)
    return None


def _next_of(cron: str, now_ns: int) -> int | None:
    from cronsim import CronSim, CronSimError

    try:
        found = next(CronSim(cron, datetime.fromtimestamp(now_ns / 1e9)))
    except (CronSimError, StopIteration, OverflowError, ValueError):
        return None
    return int(found.timestamp()) * SECOND_NS


def checked(cron: str, now_ns: int) -> str:
    """A schedule in its plain form.

    :raises ToolError: ``invalid_input`` for a text that is none, or one that never comes
    """
    from cronsim import CronSim, CronSimError

    cron = " ".join(cron.split())
    if len(cron) > 200 or len(cron.split(" ")) != 5:
        text = f"{cron[:80]!r} is no schedule: five fields, minute hour day month weekday, as in '30 8 * * 1-5'"
        raise ToolError(text, kind="invalid_input")
    try:
        CronSim(cron, datetime.fromtimestamp(now_ns / 1e9))
    except (CronSimError, ValueError) as error:
        raise ToolError(f"{cron!r} is no schedule: {error}", kind="invalid_input") from None
    if _next_of(cron, now_ns) is None:
        raise ToolError(f"{cron!r} names a day that never comes; nothing was added", kind="invalid_input")
    return cron


def when(trigger: Trigger) -> str:
    """How it comes that it fires, for whoever is told."""
    if trigger.tool is not None:
        how = trigger.tool
    elif trigger.every_ns is not None:
        how = "once" if trigger.once else f"every {trigger.every_ns / SECOND_NS:g} s"
    else:
        how = f"at {trigger.cron}"
    return f"The trigger {trigger.name} ({how}) fired"
