"""Options that take an amount of time: a finite number, no larger than anybody means it."""

from __future__ import annotations

from typing import Any, Literal

import click

_TEN_YEARS = {"seconds": 10 * 365 * 86_400, "days": 10 * 365}


class Amount(click.FloatRange):
    """A number of a unit, up to ten years of it. It refuses what a range lets through: what is no number (``nan``), and what
    is more than a clock can be asked for.

    :param above: more than ``least``, not as much
    """

    def __init__(
        self, unit: Literal["seconds", "days"], least: int = 0, most: int | None = None, *, above: bool = False
    ) -> None:
        self._unit, self._least, self._most, self._above = unit, least, most or _TEN_YEARS[unit], above
        super().__init__(self._least, self._most, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if self._least <= number <= self._most and not (self._above and number == self._least):
            return number
        bounds = f"{'more than' if self._above else 'from'} {self._least:g} to {self._most:,.0f}"
        ten_years = " (ten years)" if self._most == _TEN_YEARS[self._unit] else ""
        expected = f"expected a number of {self._unit}, {bounds}{ten_years}"
        raise click.BadParameter(f"{str(value)[:80]!r} was given; {expected}", ctx, param)
