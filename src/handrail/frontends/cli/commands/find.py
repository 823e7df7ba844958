"""``handrail find``: the tools that fit a need, with confidence and evidence."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.driving import Interruption, drive, opened
from handrail.frontends.cli.options import Amount, Setting, equipped
from handrail.frontends.cli.show import MOST_NAME, columns, note, one_line, out_json, out_styled

if TYPE_CHECKING:
    from handrail.contract.doors.jobs import Hit


@click.command("find")
@click.argument("query")
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="Maximum number of tools.")
@click.option("--words", is_flag=True, help="Compare keywords only, without an embedding model.")
@click.option(
    "--wait",
    type=Amount("seconds"),
    metavar="SECONDS",
    help="Maximum wait for the embedding model, in seconds. Default: the usual loading time, at most 20. The first search "
    "of a large catalog takes about 1 second per 100 tools.",
)
@equipped
def command(setting: Setting, query: str, limit: int, words: bool, wait: float | None) -> int:
    """Search tools by description.

    QUERY describes the capability in English. Each match is listed with its confidence (0 to 1), its relevance compared with
    the first match, and the reason. If no tool matches, the command says so and exits with 1. It searches the same tools as
    find_tools, and loads none of them for a model.
    """
    return drive(lambda interruption: _find(setting, query, limit, words, wait, interruption))


async def _find(
    setting: Setting, query: str, limit: int, words: bool, wait: float | None, interruption: Interruption
) -> int:
    from handrail.contract.errors import ToolError, UsageError

    async with opened(setting) as kernel:
        try:
            found = await kernel.find(query, limit=limit, patience_s=wait, by_words=words)
        except ToolError as error:
            raise UsageError(error.text) from None
    code = ERROR if found.nothing_fits else OUTPUT
    if setting.json:
        out_json(asdict(found))
        return code
    if found.nothing_fits:
        strange = f"; {found.unread}" if found.unread else ""
        note(f"No tool matches, by {found.means}{strange}." + (" The nearest tools:" if found.hits else ""))
    else:
        note(f"Search by {found.means}:")
    _show(found.hits)
    return code


def _show(hits: tuple[Hit, ...]) -> None:
    rows = columns(
        (
            hit.tool_id,
            f"{hit.confidence:.2f}{' weak' if hit.weak else ''}",
            f"{hit.relevance:.2f}",
            hit.reason or "-",
            " ".join(hit.description.split()),
        )
        for hit in hits
    )
    for hit, row in zip(hits, rows, strict=True):
        name, style = len(one_line(hit.tool_id, MOST_NAME)), "dim" * hit.weak
        out_styled((row[:name], f"bold {style}"), (row[name:], style), cut=True)
