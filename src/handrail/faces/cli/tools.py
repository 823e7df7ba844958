"""``handrail tools``: which tools there are, and which are withheld for what reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from handrail.faces.cli.app import OUTPUT
from handrail.faces.cli.driving import Interruption, drive, opened
from handrail.faces.cli.options import Setting, equipped
from handrail.faces.cli.show import MOST_NAME, columns, note, one_line, out_json, out_styled

if TYPE_CHECKING:
    from handrail.catalog.view import View
    from handrail.registry.generation import Entry


@click.command("tools")
@click.option("--cost", is_flag=True, help="What the tools take of a model's context, in tokens, the dearest first.")
@click.option("--category", metavar="NAME", help="Only those of a category, as browse_tools names it, or core.")
@equipped
def command(setting: Setting, cost: bool, category: str | None) -> int:
    """List the tools there are, and what is withheld; on stderr, the mode in which sessions begin.

    Each has its category, and how it stands when a model's turn begins: core, in view, or to be loaded. With --json, both views of each: what a model sees, and what the kernel acts on. With --cost, about how many tokens
    each tool, each category and each source takes, and how many of them are in view at the start of a turn.
    """
    return drive(lambda interruption: _costs(setting) if cost else _tools(setting, category, interruption))


async def _costs(setting: Setting) -> int:
    from handrail.doctor.tokens import costs_for

    async with opened(setting) as kernel:
        costs = costs_for(kernel.generation, kernel.config, kernel.agent)
    if setting.json:
        out_json(costs.to_dict())
    else:
        from handrail.faces.cli.cost import show_costs

        show_costs(costs)
    return OUTPUT


async def _tools(setting: Setting, category: str | None, interruption: Interruption) -> int:
    from handrail.catalog.view import view_of
    from handrail.policy.modes import MEANINGS, read_mode

    async with opened(setting) as kernel:
        view = view_of(kernel.generation, kernel.config.settings.catalog.options(kernel.agent.core))
        entries = list(kernel.generation.entries.values())
        number, mode = kernel.generation.number, read_mode(kernel.rules.mode)
    empty = view.empty
    if category is not None:
        entries = _of_category(category, entries, view)
        empty = {name: text for name, text in empty.items() if name == category and not entries}
    if setting.json:
        out_json({"generation": number, "mode": mode, "tools": [_whole(entry, view) for entry in entries]})
        return OUTPUT
    note(f"handrail: in the mode {mode}: {MEANINGS[mode]}")
    lines = columns(
        (
            *(entry.spec.id, view.category_of(entry), view.standing(entry), entry.spec.side_effect),
            *(entry.source, _about(entry)),
        )
        for entry in entries
    )
    for entry, line in zip(entries, lines, strict=True):
        name, style = len(one_line(entry.spec.id, MOST_NAME)), "dim" * (entry.withheld is not None)
        out_styled((line[:name], f"bold {style}"), (line[name:], style), cut=entry.withheld is None)
    for name, text in empty.items():
        note(f"handrail: category {name}: {text}")
    return OUTPUT


def _about(entry: Entry) -> str:
    if entry.withheld is not None:
        return f"withheld: {entry.withheld}"
    return entry.spec.description.strip().split("\n")[0]


def _of_category(name: str, entries: list[Entry], view: View) -> list[Entry]:
    """:raises UsageError: naming the categories there are"""
    from handrail.contract.errors import UsageError

    there = sorted({*(view.category_of(entry) for entry in entries), *view.empty})
    if name not in there:
        raise UsageError(f"there is no category {name!r}; there are {', '.join(there)}")
    return [entry for entry in entries if view.category_of(entry) == name]


def _whole(entry: Entry, view: View) -> dict[str, object]:
    spec = entry.spec
    return {
        "id": spec.id,
        "category": view.category_of(entry),
        "view": view.standing(entry),
        "source": entry.source,
        "withheld": entry.withheld,
        "definition_hash": entry.definition_hash,
        "llm": spec.llm_view(),
        "runtime": spec.runtime_view(),
    }
