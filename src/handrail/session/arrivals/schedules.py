"""When a trigger that goes by the clock fires: by its interval, or by its cron expression in the machine's local time.

Where the clocks change, a schedule of every hour (its hour is ``*``) comes each time that the clock shows what it names: twice
where they are put back, not at all for what they pass over as they are put forward. Any other comes once for each time that it
names: at the first of two, and for one that is passed over as late as if the clocks had not been put forward yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from handrail.contract.doors.channels import Trigger

SECOND_NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1)
_NEAR_S = 26 * 3600
"""So many seconds before and after a clock in UTC shows something, any zone's time is that before and after a change which is
near where its own clocks show it: they are 14 hours ahead at most, and changes lie days apart."""
_EVERY_HOUR = set(range(24))
Zone = Callable[[int], int]
"""How many seconds clocks are ahead of UTC, at a time in seconds."""


def local(at_s: int) -> int:
    """The machine's."""
    return time.localtime(at_s).tm_gmtoff


def next_after(trigger: Trigger, now_ns: int, zone: Zone = local) -> int | None:
    """When it fires after ``now_ns``; None for never again."""
    if trigger.every_ns is not None:
        if trigger.once and (trigger.next_ns is None or trigger.next_ns <= now_ns):
            return None
        begun = trigger.next_ns if trigger.next_ns is not None else trigger.created_ns
        return begun + max((now_ns - begun) // trigger.every_ns + 1, 1) * trigger.every_ns
    if trigger.cron is not None:
        return _next_of(trigger.cron, now_ns, trigger.created_ns, zone)
    return None


def _next_of(cron: str, now_ns: int, created_ns: int, zone: Zone) -> int | None:
    from cronsim import CronSim, CronSimError

    now, found = now_ns // SECOND_NS, None
    try:
        begin = now + min(zone(now - _NEAR_S), zone(now), zone(now + _NEAR_S))
        times = CronSim(cron, _EPOCH + timedelta(seconds=begin))
        hourly = times.hours == _EVERY_HOUR
        for shown in times:
            wall = int((shown - _EPOCH).total_seconds())
            before, after = zone(wall - _NEAR_S), zone(wall + _NEAR_S)
            if found is not None and wall - max(before, after) >= found:
                break
            for at in _fires(wall, before, after, zone, created_ns // SECOND_NS, hourly=hourly):
                if at > now and (found is None or at < found):
                    found = at
            if found is not None and before == after:
                break
    except (CronSimError, OverflowError, ValueError, OSError):
        return None
    return None if found is None else found * SECOND_NS


def _fires(wall: int, before: int, after: int, zone: Zone, created: int, *, hourly: bool) -> list[int]:
    """When a schedule fires for what a clock shows, all in seconds.

    :param before: how far clocks are ahead of UTC before a change that is near, and ``after`` it
    :param created: since when there is the schedule: the second of two times counts where the first was before that
    """
    if before == after:
        return [wall - before]
    shown = sorted({wall - ahead for ahead in (before, after) if zone(wall - ahead) == ahead})
    if hourly:
        return shown
    if not shown:
        return [wall - before]
    return shown[1:] if len(shown) > 1 and shown[0] <= created else shown[:1]


def when(trigger: Trigger) -> str:
    """How it comes that it fires, for whoever is told."""
    if trigger.tool is not None:
        how = trigger.tool
    elif trigger.every_ns is not None:
        how = "once" if trigger.once else f"every {trigger.every_ns / SECOND_NS:g} s"
    else:
        how = f"at {trigger.cron}"
    return f"The trigger {trigger.name} ({how}) fired"
