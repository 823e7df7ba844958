"""When a trigger that goes by the clock fires: by its interval, or by its cron expression in the machine's local time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice

from handrail.contract.arrivals import Trigger
from handrail.contract.errors import ToolError

SECOND_NS = 1_000_000_000
_FIELDS = (
    "minutes go from 0 to 59, hours from 0 to 23, days from 1 to 31 and no further than the months named have, months from 1 to "
    "12, weekdays from 0 (Sunday) to 7"
)


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
    from cronsim import CronSimError

    now = datetime.fromtimestamp(now_ns / 1e9)
    try:
        # Where clocks were put back, the time that is found may have been an hour ago, and comes once more.
        following = next(at for at in _times(cron, now) if at * SECOND_NS > now_ns)
        if cron.split(" ")[1] == "*" and (again_s := now.replace(fold=1).timestamp() - now.timestamp()) > 0:
            # They will be put back: what comes each hour comes in the hour that is shown again, too.
            before = now - timedelta(seconds=again_s)
            repeated = (at for at in islice(_times(cron, before, fold=1), 60) if at * SECOND_NS > now_ns)
            following = min(following, next(repeated, following))
    except (CronSimError, StopIteration, OverflowError, ValueError):
        return None
    return following * SECOND_NS


def _times(cron: str, after: datetime, fold: int = 0) -> Iterator[int]:
    """When it comes after what the clock shows, in seconds: each of the times that are shown twice."""
    from cronsim import CronSim

    for found in CronSim(cron, after):
        for one in range(fold, 2):
            yield int(found.replace(fold=one).timestamp())


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
        raise ToolError(f"{cron!r} is no schedule: {error}; {_FIELDS}", kind="invalid_input") from None
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
