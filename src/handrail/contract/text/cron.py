"""What a schedule may be written as: five fields, as cron has them."""

from __future__ import annotations

from datetime import datetime

from handrail.contract.errors import ToolError

MAX_CRON = 200
"""Characters."""
_SOME_DAY = datetime(1970, 1, 1)
_FIELDS = (
    "minutes go from 0 to 59, hours from 0 to 23, days from 1 to 31 and no further than the months named have, months from 1 to "
    "12, weekdays from 0 (Sunday) to 7"
)


def plain_cron(cron: str) -> str:
    """A schedule in its plain form.

    :raises ToolError: ``invalid_input`` for a text that is none, or one that never comes
    """
    from cronsim import CronSim, CronSimError

    cron = " ".join(cron.split())
    if len(cron) > MAX_CRON or len(cron.split(" ")) != 5:
        text = f"{cron[:80]!r} is no schedule: five fields, minute hour day month weekday, as in '30 8 * * 1-5'"
        raise ToolError(text, kind="invalid_input")
    try:
        comes = next(CronSim(cron, _SOME_DAY), None) is not None
    except (CronSimError, ValueError) as error:
        raise ToolError(f"{cron!r} is no schedule: {error}; {_FIELDS}", kind="invalid_input") from None
    if not comes:
        raise ToolError(f"{cron!r} names a day that never comes", kind="invalid_input")
    return cron
