"""``handrail doctor``: what this machine can enforce, what is missing, and what to do about it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from handrail.faces.cli.app import CANNOT_START, OUTPUT
from handrail.faces.cli.options import Setting, configured
from handrail.faces.cli.show import console, out_json, visible

if TYPE_CHECKING:
    from handrail.doctor import Check

MARKS = {"ok": ("✓", "green"), "warning": ("·", "yellow"), "problem": ("✗", "red")}


@click.command("doctor")
@configured
def command(setting: Setting) -> int:
    """Say what this machine can enforce, how the state is, and what to do about the rest.

    Only looks, so it works beside a running Handrail and where nothing can start. Exits with 5 when Handrail could
    not start here, or could not confine what it runs.
    """
    from handrail.doctor import check_up

    checks = check_up(
        setting.workspace, setting.state, setting.config, flags=setting.settings, allow_home=setting.allow_home
    )
    if setting.json:
        out_json([check.to_dict() for check in checks])
    else:
        _shown(checks)
    # A single tool that is withheld stops nothing else.
    problems = [check for check in checks if check.state == "problem" and not check.name.startswith("tool ")]
    return CANNOT_START if problems else OUTPUT


def _shown(checks: list[Check]) -> None:
    from rich.text import Text

    terminal = console(sys.stdout)
    width = max(len(check.name) for check in checks)
    margin = " " * (width + 4)
    for check in checks:
        mark, colour = MARKS[check.state]
        line = Text(f"{mark} ", style=colour)
        line.append(check.name.ljust(width), style="bold")
        line.append(f"  {visible(check.detail)}".replace("\n", f"\n{margin}"))
        terminal.print(line)
        if check.remedy:
            terminal.print(Text(f"{margin}→ {visible(check.remedy)}"))
