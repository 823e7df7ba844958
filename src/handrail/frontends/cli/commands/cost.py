"""``handrail tools --cost``: what the tools take of a model's context, the dearest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from handrail.frontends.cli.show import MOST_NAME, one_line, out

if TYPE_CHECKING:
    from handrail.catalog.costs import Costs, Share, ToolCost

_BAR = 20
"""Characters of a bar that stands for the whole."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_costs(costs: Costs) -> None:
    """Print them for a person."""
    rate = f" ({_percent(costs.in_view, costs.whole)})" if costs.whole else ""
    out(
        f"about {costs.in_view:,} tokens in view at the start of a turn, of {costs.whole:,} with every tool in view{rate}"
    )
    out(f"  {len(costs.shown)} of {len(costs.tools)} tools, and an index of the others of {costs.index:,} tokens")
    out(f"  in the form that {costs.dialect} is given, who of all providers is given the most")
    for title, shares in (("category", costs.categories), ("source", costs.sources)):
        out()
        _print((title, "tools", "in view", "tokens", "share"), (_share(one, costs.whole) for one in shares))
    out()
    _print(("tool", "category", "at the start", "tokens", "share"), (_tool(one, costs.whole) for one in costs.tools))


def _share(one: Share, whole: int) -> tuple[str, ...]:
    return one.name, f"{one.tools:,}", f"{one.in_view:,}", f"{one.tokens:,}", _bar(one.tokens, whole)


def _tool(one: ToolCost, whole: int) -> tuple[str, ...]:
    return one.id, one.category, one.standing, f"{one.tokens:,}", _bar(one.tokens, whole)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def _bar(part: int, whole: int) -> str:
    eighths = round(8 * _BAR * part / whole) if whole else 0
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{_percent(part, whole):>7}  {bar}".rstrip()


def _print(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Columns; what is a number in every row stands to the right."""
    table = [tuple(one_line(cell, MOST_NAME) for cell in row) for row in rows]
    numeric = [all(row[at].replace(",", "").isdigit() for row in table) for at in range(len(head))]
    widths = [max(len(row[at]) for row in (head, *table)) for at in range(len(head))]
    for row in (head, *table):
        cells = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        out("  ".join(cells).rstrip())
