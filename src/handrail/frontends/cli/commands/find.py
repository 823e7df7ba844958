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
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="Tools to list at most.")
@click.option("--words", is_flag=True, help="Go by words only, which needs no model to be loaded.")
@click.option(
    "--wait",
    type=Amount("seconds"),
    metavar="SECONDS",
    help="How long to wait until it can compare meanings. Default: as long as loading usually takes, at most 20 seconds. A large "
    "catalogue is read once, about 100 tools a second.",
)
@equipped
def command(setting: Setting, query: str, limit: int, words: bool, wait: float | None) -> int:
    """Find the tools that serve a need, said in plain words, in English.

    Each is listed with how sure it is that it serves the need (0 to 1, as measured), how it stands beside the first, and
    what speaks for it. It says so where nothing fits, and exits with 1. It looks where find_tools looks for a model, and
    brings nothing into anybody's view.
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
        note(f"nothing fits, by {found.means}{strange}" + ("; the nearest there are:" if found.hits else ""))
    else:
        note(f"by {found.means}")
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
