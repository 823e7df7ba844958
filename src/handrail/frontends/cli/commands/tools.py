"""``handrail tools``: the tools, the reason why some are unavailable, and their token costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, agent_options
from handrail.frontends.cli.command_runner import InterruptHandler, open_configured_kernel, run_on_event_loop
from handrail.frontends.cli.terminal_output import (
    MAX_NAME,
    align_columns,
    print_escaped_line,
    print_json,
    print_note,
    print_styled_line,
    to_one_line,
)

if TYPE_CHECKING:
    from handrail.catalog.tool_prompt import CatalogTokenCosts, GroupTokenCost, ToolTokenCost
    from handrail.catalog.view import CatalogView
    from handrail.contract.tool_generation import ToolEntry, ToolStatus


@click.command("tools")
@click.option("--cost", is_flag=True, help="Show how many tokens of a model's context the tools take.")
@click.option("--category", metavar="NAME", help="Category to list, as browse_tools names it, or core. Default: all.")
@agent_options
def command(setting: CommandOptions, cost: bool, category: str | None) -> int:
    """List tools and why some are unavailable.

    A status is system (ready), connected (ready after configuration or approval), available (requires configuration),
    disabled, offline, error or quarantined (requires review). For a tool that is not ready, the reason follows. Each tool has a
    category. The next column shows whether it is loaded when a model's turn begins: core, in view (loaded), or to be loaded.
    The mode of new sessions is printed on stderr.

    With --json, prints both views of each tool: the model's view and the kernel's. With --cost, prints the approximate
    number of tokens of each tool, category and source, and how many are loaded at the start of a turn.
    """
    return run_on_event_loop(lambda interruption: _costs(setting) if cost else _tools(setting, category, interruption))


async def _costs(setting: CommandOptions) -> int:
    from handrail.kernel.doctor.machine_checks import compute_agent_token_costs

    async with open_configured_kernel(setting) as kernel:
        costs = compute_agent_token_costs(kernel.generation, kernel.config, kernel.default_agent)
    if setting.json:
        print_json(costs.to_dict())
    else:
        print_costs(costs)
    return OUTPUT


async def _tools(setting: CommandOptions, category: str | None, interruption: InterruptHandler) -> int:
    from handrail.catalog.view import get_view
    from handrail.policy.rules.rules_and_modes import MODE_DESCRIPTIONS, parse_mode

    async with open_configured_kernel(setting) as kernel:
        view = get_view(kernel.generation, kernel.config.settings.catalog.to_options(kernel.default_agent.core))
        entries = list(kernel.generation.entries.values())
        number, mode = kernel.generation.number, parse_mode(kernel.initial_rules.mode)
        told = await kernel.tool_statuses()
    empty = view.empty_categories
    statuses = _statuses(entries, told)
    others = [one for one in told if statuses.get(one.tool) is not one]
    if category is not None:
        entries = _entries_in_category(category, entries, view)
        empty = {name: text for name, text in empty.items() if name == category and not entries}
    if setting.json:
        tools = [_tool_data(entry, view, statuses[entry.id]) for entry in entries]
        print_json({"generation": number, "mode": mode, "tools": tools, "others": [one._asdict() for one in others]})
        return OUTPUT
    print_note(f"handrail: mode {mode}: {MODE_DESCRIPTIONS[mode]}")
    _show_tools(entries, view, statuses)
    if category is None:
        _show_others(others)
    for name, text in empty.items():
        print_note(f"handrail: category {name}: {text}")
    return OUTPUT


def _show_others(others: Iterable[ToolStatus]) -> None:
    for line in align_columns((one.tool or "-", one.status, one.source, one.reason) for one in others):
        print_styled_line((line, "dim"), cut=False)


def _statuses(entries: Iterable[ToolEntry], told: Sequence[ToolStatus]) -> dict[str, ToolStatus]:
    """Return the status of each tool by its ID."""
    statuses = {entry.id: _status(entry) for entry in entries}
    return statuses | {one.tool: one for one in reversed(told) if one.tool in statuses}  # of two, the tool's own


def _show_tools(entries: Sequence[ToolEntry], view: CatalogView, statuses: Mapping[str, ToolStatus]) -> None:
    head = ("TOOL", "STATUS", "CATEGORY", "LOADING", "EFFECT", "SOURCE", "DESCRIPTION")
    rows = [
        (
            *(entry.spec.id, statuses[entry.id].status, view.category_of_any_tool(entry), view.status_of(entry)),
            *(entry.spec.side_effect, entry.source, _about(entry, statuses[entry.id])),
        )
        for entry in entries
    ]
    if not rows:
        return
    title, *lines = align_columns([head, *rows])
    print_styled_line((title, "bold"), cut=True)
    for entry, line in zip(entries, lines, strict=True):
        name, style = len(to_one_line(entry.spec.id, MAX_NAME)), "dim" * (entry.unavailable_reason is not None)
        print_styled_line((line[:name], f"bold {style}"), (line[name:], style), cut=not statuses[entry.id].reason)


def _status(entry: ToolEntry) -> ToolStatus:
    from handrail.contract.tool_generation import ToolStatus

    return ToolStatus(entry.id, entry.status, entry.unavailable_reason or "", entry.source)


def _about(entry: ToolEntry, status: ToolStatus) -> str:
    if entry.unavailable_reason is not None:
        return f"unavailable: {entry.unavailable_reason}"
    return status.reason or entry.spec.description.strip().split("\n")[0]


def _entries_in_category(name: str, entries: list[ToolEntry], view: CatalogView) -> list[ToolEntry]:
    """Return the tools of a category.

    :raises UsageError: for an unknown category
    """
    from handrail.contract.errors import UsageError

    there = sorted({*(view.category_of_any_tool(entry) for entry in entries), *view.empty_categories})
    if name not in there:
        raise UsageError(f"Category {name!r} does not exist. The categories are: {', '.join(there)}.")
    return [entry for entry in entries if view.category_of_any_tool(entry) == name]


def _tool_data(entry: ToolEntry, view: CatalogView, status: ToolStatus) -> dict[str, object]:
    spec, behind = entry.spec, entry.answering_spec
    return {
        "id": spec.id,
        "status": status.status,
        "reason": status.reason or None,
        "answered_by": None if behind is None else behind.id,
        "category": view.category_of_any_tool(entry),
        "view": view.status_of(entry),
        "source": entry.source,
        "unavailable": entry.unavailable_reason,
        "definition_hash": entry.definition_hash,
        "llm": spec.llm_view(),
        "runtime": _effective_settings(entry),
    }


def _effective_settings(entry: ToolEntry) -> dict[str, object]:
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


def print_costs(costs: CatalogTokenCosts) -> None:
    """Print the token costs as tables."""
    rate = f" ({_percent(costs.active_tokens, costs.total_tokens)})" if costs.total_tokens else ""
    print_escaped_line(
        f"about {costs.active_tokens:,} tokens loaded at the start of a turn, of {costs.total_tokens:,} with every tool loaded{rate}"
    )
    print_escaped_line(
        f"  {len(costs.active_tools)} of {len(costs.tools)} tools, and an index of the others with {costs.index_tokens:,} tokens"
    )
    print_escaped_line(f"  in the form for {costs.dialect}, the longest of all providers")
    for title, shares in (("CATEGORY", costs.costs_by_category), ("SOURCE", costs.costs_by_source)):
        print_escaped_line()
        _print_columns(
            (title, "TOOLS", "LOADED", "TOKENS", "SHARE"), (_share_row(one, costs.total_tokens) for one in shares)
        )
    print_escaped_line()
    _print_columns(
        ("TOOL", "CATEGORY", "AT START", "TOKENS", "SHARE"), (_tool_row(one, costs.total_tokens) for one in costs.tools)
    )


def _share_row(one: GroupTokenCost, whole: int) -> tuple[str, ...]:
    return one.name, f"{one.tools:,}", f"{one.in_view:,}", f"{one.tokens:,}", _bar(one.tokens, whole)


def _tool_row(one: ToolTokenCost, whole: int) -> tuple[str, ...]:
    return one.id, one.category, one.standing, f"{one.tokens:,}", _bar(one.tokens, whole)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def _bar(part: int, whole: int) -> str:
    eighths = round(8 * _BAR * part / whole) if whole else 0
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{_percent(part, whole):>7}  {bar}".rstrip()


def _print_columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print columns. A column with only numbers is aligned to the right."""
    table = [tuple(to_one_line(cell, MAX_NAME) for cell in row) for row in rows]
    numeric = [all(row[at].replace(",", "").isdigit() for row in table) for at in range(len(head))]
    widths = [max(len(row[at]) for row in (head, *table)) for at in range(len(head))]
    for row in (head, *table):
        cells = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        print_escaped_line("  ".join(cells).rstrip())
