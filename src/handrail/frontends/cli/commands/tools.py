"""``handrail tools``: the tools, the reason why some are unavailable, and their token costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from handrail.contract.errors import UsageError
from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_agent_options
from handrail.frontends.cli.command_runner import InterruptHandler, open_configured_kernel, run_on_event_loop
from handrail.frontends.cli.renderer import Cell, TerminalRenderer
from handrail.frontends.cli.terminal_output import first_sentence, print_escaped_line, print_json

if TYPE_CHECKING:
    from handrail.catalog.tool_prompt import CatalogTokenCosts, GroupTokenCost, ToolTokenCost
    from handrail.catalog.view import CatalogView
    from handrail.contract.tool_generation import ToolEntry, ToolStatus


@click.command("tools")
@click.argument("action", required=False, type=click.Choice(["list"]), metavar="[list]")
@click.option("--cost", is_flag=True, help="Show how many tokens of a model's context the tools take.")
@click.option("--category", metavar="NAME", help="Category to list, as browse_tools names it, or core. Default: all.")
@add_agent_options
def command(setting: CommandOptions, action: str | None, cost: bool, category: str | None) -> int:
    """List tools and why some are unavailable.

    A status is system (ready), connected (ready after configuration or approval), available (requires configuration),
    disabled, offline, error or quarantined (requires review). For a tool that is not ready, the reason follows. The tools are
    grouped by category. LOADING shows whether a tool is loaded when a model's turn begins: core, in view (loaded), or
    deferred.

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
        print_token_costs(costs)
    return OUTPUT


async def _tools(setting: CommandOptions, category: str | None, interruption: InterruptHandler) -> int:
    from handrail.catalog.view import get_view
    from handrail.policy.rules.rules_and_modes import parse_mode

    async with open_configured_kernel(setting) as kernel:
        view = get_view(
            kernel.generation, kernel.config.settings.catalog.to_catalog_options(kernel.default_agent.core_tools)
        )
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
    printed = TerminalRenderer()
    _show_tools(printed, entries, view, statuses)
    if category is None:
        _show_others(printed, others)
    for name, text in empty.items():
        printed.write_line()
        printed.print_heading(name, f"no tools: {text}")
    return OUTPUT


def _show_others(printed: TerminalRenderer, others: Sequence[ToolStatus]) -> None:
    """Print what sources offer and did not become a tool."""
    if others:
        printed.write_line()
        printed.print_heading("other offers", "of sources, which are not tools now")
        rows = [(one.tool or "-", one.status, one.source, (one.reason, "dim")) for one in others]
        printed.print_table(("OFFER", "STATUS", "SOURCE", "REASON"), rows)


def _statuses(entries: Iterable[ToolEntry], told: Sequence[ToolStatus]) -> dict[str, ToolStatus]:
    statuses = {entry.id: _status(entry) for entry in entries}
    return statuses | {one.tool: one for one in reversed(told) if one.tool in statuses}  # of two, the tool's own


def _show_tools(
    printed: TerminalRenderer, entries: Sequence[ToolEntry], view: CatalogView, statuses: Mapping[str, ToolStatus]
) -> None:
    """Print the tools in groups by category, the core first."""
    groups: dict[str, list[tuple[Cell, ...]]] = {}
    for entry in entries:
        style = "dim" * (entry.unavailable_reason is not None)
        name, status = f"bold {style}".strip(), statuses[entry.id].status
        row = (
            (entry.spec.id, name),
            (status, style),
            (view.get_tool_status(entry), style),
            (entry.spec.side_effect, style),
        )
        about = (_describe_tool(entry, statuses[entry.id]), style)
        groups.setdefault(view.find_category_of_entry(entry), []).append((*row, about))
    titles = {name: f"{name} ({len(rows)})" for name, rows in groups.items()}
    ordered = sorted(groups, key=lambda name: name != "core")
    head = ("TOOL", "STATUS", "LOADING", "EFFECT", "DESCRIPTION")
    printed.print_grouped_table(head, [(titles[name], groups[name]) for name in ordered])


def _status(entry: ToolEntry) -> ToolStatus:
    from handrail.contract.tool_generation import ToolStatus

    return ToolStatus(entry.id, entry.status, entry.unavailable_reason or "", entry.source)


def _describe_tool(entry: ToolEntry, status: ToolStatus) -> str:
    """Return why a tool is not ready, or what it does, and where it comes from."""
    if entry.unavailable_reason is not None:
        return f"unavailable: {entry.unavailable_reason}"
    origin = "" if entry.source == "built-in" else f" (from {entry.source})"
    return f"{status.reason or first_sentence(entry.spec.description)}{origin}"


def _entries_in_category(name: str, entries: list[ToolEntry], view: CatalogView) -> list[ToolEntry]:
    """Return the tools of a category.

    :raises UsageError: for an unknown category
    """
    there = sorted({*(view.find_category_of_entry(entry) for entry in entries), *view.empty_categories})
    if name not in there:
        raise UsageError(f"Category {name!r} does not exist. Pass one of: {', '.join(there)}.")
    return [entry for entry in entries if view.find_category_of_entry(entry) == name]


def _tool_data(entry: ToolEntry, view: CatalogView, status: ToolStatus) -> dict[str, object]:
    spec, behind = entry.spec, entry.answering_spec
    return {
        "id": spec.id,
        "status": status.status,
        "reason": status.reason or None,
        "answered_by": None if behind is None else behind.id,
        "category": view.find_category_of_entry(entry),
        "view": view.get_tool_status(entry),
        "source": entry.source,
        "unavailable": entry.unavailable_reason,
        "definition_hash": entry.definition_hash,
        "llm": spec.build_llm_view(),
        "runtime": _effective_settings(entry),
    }


def _effective_settings(entry: ToolEntry) -> dict[str, object]:
    """Return the runtime view with the effective limits, and each setting with its value and default."""
    spec, declared = entry.spec, entry.declared or entry.spec
    view = spec.build_runtime_view()
    for key, setting in declared.config.items():
        view["config"][key] |= {"value": view["config"][key]["default"]}
        view["config"][key]["default"] = None if setting.secret else setting.default
    return view


# ``handrail tools --cost``: the tools' share of a model's context, the most expensive first.

_BAR = 20
"""Characters of a bar for 100 percent."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_token_costs(costs: CatalogTokenCosts) -> None:
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
        _print_cost_columns(
            (title, "TOOLS", "LOADED", "TOKENS", "SHARE"), (_share_row(one, costs.total_tokens) for one in shares)
        )
    print_escaped_line()
    _print_cost_columns(
        ("TOOL", "CATEGORY", "AT START", "TOKENS", "SHARE"), (_tool_row(one, costs.total_tokens) for one in costs.tools)
    )


def _share_row(one: GroupTokenCost, whole: int) -> tuple[str, ...]:
    return one.name, f"{one.tools:,}", f"{one.in_view:,}", f"{one.tokens:,}", _format_bar(one.tokens, whole)


def _tool_row(one: ToolTokenCost, whole: int) -> tuple[str, ...]:
    return one.id, one.category, one.standing, f"{one.tokens:,}", _format_bar(one.tokens, whole)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def _format_bar(part: int, whole: int) -> str:
    eighths = round(8 * _BAR * part / whole) if whole else 0
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{_percent(part, whole):>7}  {bar}".rstrip()


def _print_cost_columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print columns. A column with only numbers is aligned to the right."""
    table = list(rows)
    numeric = [at for at in range(len(head)) if all(row[at].replace(",", "").isdigit() for row in table)]
    TerminalRenderer().print_table(head, table, right=numeric)
