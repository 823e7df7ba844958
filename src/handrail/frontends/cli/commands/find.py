"""``handrail find``: the tools that fit a need, with confidence and evidence."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from handrail.contract.errors import ToolError, UsageError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, DurationParamType, add_agent_options
from handrail.frontends.cli.command_runner import InterruptHandler, open_configured_kernel, run_on_event_loop
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import first_sentence, print_json, print_stderr_note

if TYPE_CHECKING:
    from handrail.contract.services.job_and_tool_services import ToolSearchResult


@click.command("find")
@click.argument("query")
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="Maximum number of tools.")
@click.option("--keywords-only", is_flag=True, help="Compare keywords only, without an embedding model.")
@click.option(
    "--wait",
    type=DurationParamType("seconds"),
    metavar="SECONDS",
    help="Maximum wait for the embedding model, in seconds. Default: the usual loading time, at most 20. The first search "
    "of a large catalog takes about 1 second per 100 tools.",
)
@add_agent_options
def command(setting: CommandOptions, query: str, limit: int, keywords_only: bool, wait: float | None) -> int:
    """Search tools by description.

    QUERY describes the capability in English, and is compared by keywords and, if installed, by meaning. Each match is listed with its confidence (0 to 1), its relevance compared with
    the first match, and the reason. If no tool matches, the command says so and exits with 1. It searches the same tools as
    find_tools, and loads none of them for a model.
    """
    return run_on_event_loop(lambda interruption: _find(setting, query, limit, keywords_only, wait, interruption))


async def _find(
    setting: CommandOptions,
    query: str,
    limit: int,
    keywords_only: bool,
    wait: float | None,
    interruption: InterruptHandler,
) -> int:
    async with open_configured_kernel(setting) as kernel:
        try:
            found = await kernel.find_tools(query, limit=limit, timeout_s=wait, keywords_only=keywords_only)
        except ToolError as error:
            raise UsageError(error.text) from None
    code = ERROR if found.no_match else OUTPUT
    if setting.json:
        print_json(asdict(found))
        return code
    if found.no_match:
        strange = f"; {found.query_problem}" if found.query_problem else ""
        print_stderr_note(
            f"No tool matches, by {found.search_method}{strange}." + (" The nearest tools:" if found.matches else "")
        )
    _show(found)
    return code


def _show(found: ToolSearchResult) -> None:
    rows = [
        (
            (hit.tool_id, "dim" if hit.is_weak else "bold"),
            f"{hit.confidence:.2f}{' weak' if hit.is_weak else ''}",
            f"{hit.relevance:.2f}",
            (f"{first_sentence(hit.description)} ({hit.reason or 'no shared words'})", "dim" * hit.is_weak),
        )
        for hit in found.matches
    ]
    view = TerminalRenderer()
    view.print_table(("TOOL", "CONFIDENCE", "RELEVANCE", "DESCRIPTION AND REASON"), rows)
    if rows:
        view.print_text((f"search by {found.search_method}", "dim"))
