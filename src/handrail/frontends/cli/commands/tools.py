"""``handrail tools``: the tools, the reason why some are unavailable, and their token costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.driving import Interruption, drive, opened
from handrail.frontends.cli.options import Setting, equipped
from handrail.frontends.cli.show import MOST_NAME, columns, note, one_line, out, out_json, out_styled

if TYPE_CHECKING:
    from handrail.catalog.prompt import Costs, Share, ToolCost
    from handrail.catalog.view import View
    from handrail.contract.generation import Entry, ToolStatus


@click.command("tools")
@click.option("--cost", is_flag=True, help="Show how many tokens of a model's context the tools take.")
@click.option("--category", metavar="NAME", help="Category to list, as browse_tools names it, or core. Default: all.")
@equipped
def command(setting: Setting, cost: bool, category: str | None) -> int:
    """List tools and why some are unavailable.

    A status is system (ready), connected (ready after configuration or approval), available (requires configuration),
    disabled, offline, error or quarantined (requires review). For a tool that is not ready, the reason follows. Each tool has a
    category. The next column shows whether it is loaded when a model's turn begins: core, in view (loaded), or to be loaded.
    The mode of new sessions is printed on stderr.

    With --json, prints both views of each tool: the model's view and the kernel's. With --cost, prints the approximate
    number of tokens of each tool, category and source, and how many are loaded at the start of a turn.
    """
    return drive(lambda interruption: _costs(setting) if cost else _tools(setting, category, interruption))


async def _costs(setting: Setting) -> int:
    from handrail.kernel.doctor.machine import costs_for

    async with opened(setting) as kernel:
        costs = costs_for(kernel.generation, kernel.config, kernel.agent)
    if setting.json:
        out_json(costs.to_dict())
    else:
        show_costs(costs)
    return OUTPUT


async def _tools(setting: Setting, category: str | None, interruption: Interruption) -> int:
    from handrail.catalog.view import view_of
    from handrail.policy.rules.rules import MEANINGS, read_mode

    async with opened(setting) as kernel:
        view = view_of(kernel.generation, kernel.config.settings.catalog.options(kernel.agent.core))
        entries = list(kernel.generation.entries.values())
        number, mode = kernel.generation.number, read_mode(kernel.rules.mode)
        told = await kernel.tool_statuses()
    empty = view.empty
    statuses = _statuses(entries, told)
    others = [one for one in told if statuses.get(one.tool) is not one]
    if category is not None:
        entries = _of_category(category, entries, view)
        empty = {name: text for name, text in empty.items() if name == category and not entries}
    if setting.json:
        tools = [_whole(entry, view, statuses[entry.id]) for entry in entries]
        out_json({"generation": number, "mode": mode, "tools": tools, "others": [one._asdict() for one in others]})
        return OUTPUT
    note(f"handrail: mode {mode}: {MEANINGS[mode]}")
    _show_tools(entries, view, statuses)
    if category is None:
        _show_others(others)
    for name, text in empty.items():
        note(f"handrail: category {name}: {text}")
    return OUTPUT


def _show_others(others: Iterable[ToolStatus]) -> None:
    for line in columns((one.tool or "-", one.status, one.source, one.reason) for one in others):
        out_styled((line, "dim"), cut=False)


def _statuses(entries: Iterable[Entry], told: Sequence[ToolStatus]) -> dict[str, ToolStatus]:
    """Return the status of each tool by its ID."""
    statuses = {entry.id: _status(entry) for entry in entries}
    return statuses | {one.tool: one for one in reversed(told) if one.tool in statuses}  # of two, the tool's own


def _show_tools(entries: Sequence[Entry], view: View, statuses: Mapping[str, ToolStatus]) -> None:
    head = ("TOOL", "STATUS", "CATEGORY", "LOADING", "EFFECT", "SOURCE", "DESCRIPTION")
    rows = [
        (
            *(entry.spec.id, statuses[entry.id].status, view.category_of(entry), view.standing(entry)),
            *(entry.spec.side_effect, entry.source, _about(entry, statuses[entry.id])),
        )
        for entry in entries
    ]
    if not rows:
        return
    title, *lines = columns([head, *rows])
    out_styled((title, "bold"), cut=True)
    for entry, line in zip(entries, lines, strict=True):
        name, style = len(one_line(entry.spec.id, MOST_NAME)), "dim" * (entry.withheld is not None)
        out_styled((line[:name], f"bold {style}"), (line[name:], style), cut=not statuses[entry.id].reason)


def _status(entry: Entry) -> ToolStatus:
    from handrail.contract.generation import ToolStatus

    return ToolStatus(entry.id, entry.status, entry.withheld or "", entry.source)


def _about(entry: Entry, status: ToolStatus) -> str:
    if entry.withheld is not None:
        return f"unavailable: {entry.withheld}"
    return status.reason or entry.spec.description.strip().split("\n")[0]


def _of_category(name: str, entries: list[Entry], view: View) -> list[Entry]:
    """Return the tools of a category.

    :raises UsageError: for an unknown category
    """
    from handrail.contract.errors import UsageError

    there = sorted({*(view.category_of(entry) for entry in entries), *view.empty})
    if name not in there:
        raise UsageError(f"Category {name!r} does not exist. The categories are: {', '.join(there)}.")
    return [entry for entry in entries if view.category_of(entry) == name]


def _whole(entry: Entry, view: View, status: ToolStatus) -> dict[str, object]:
    spec, behind = entry.spec, entry.behind
    return {
        "id": spec.id,
        "status": status.status,
        "reason": status.reason or None,
        "answered_by": None if behind is None else behind.id,
        "category": view.category_of(entry),
        "view": view.standing(entry),
        "source": entry.source,
        "withheld": entry.withheld,
        "definition_hash": entry.definition_hash,
        "llm": spec.llm_view(),
        "runtime": _in_force(entry),
    }


def _in_force(entry: Entry) -> dict[str, object]:
    """Return the runtime view with the effective limits, and each setting with its value and default."""
    spec, declared = entry.spec, entry.declared or entry.spec
    view = spec.runtime_view()
    for key, setting in declared.config.items():
        view["config"][key] |= {"value": view["config"][key]["default"]}
        view["config"][key]["default"] = None if setting.secret else setting.default
    return view


# ``handrail tools --cost``: the tools' share of a model's context, the most expensive first.

_BAR = 20
"""Characters of a bar for 100 percent."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_costs(costs: Costs) -> None:
    """Print the token costs as tables."""
    rate = f" ({_percent(costs.in_view, costs.whole)})" if costs.whole else ""
    out(
        f"about {costs.in_view:,} tokens loaded at the start of a turn, of {costs.whole:,} with every tool loaded{rate}"
    )
    out(f"  {len(costs.shown)} of {len(costs.tools)} tools, and an index of the others with {costs.index:,} tokens")
    out(f"  in the form for {costs.dialect}, the longest of all providers")
    for title, shares in (("CATEGORY", costs.categories), ("SOURCE", costs.sources)):
        out()
        _print((title, "TOOLS", "LOADED", "TOKENS", "SHARE"), (_share(one, costs.whole) for one in shares))
    out()
    _print(("TOOL", "CATEGORY", "AT START", "TOKENS", "SHARE"), (_tool(one, costs.whole) for one in costs.tools))


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
    """Print columns. A column with only numbers is aligned to the right."""
    table = [tuple(one_line(cell, MOST_NAME) for cell in row) for row in rows]
    numeric = [all(row[at].replace(",", "").isdigit() for row in table) for at in range(len(head))]
    widths = [max(len(row[at]) for row in (head, *table)) for at in range(len(head))]
    for row in (head, *table):
        cells = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        out("  ".join(cells).rstrip())
