"""``handrail doctor``: what this machine can enforce, what is missing, and what to do about it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from handrail.faces.cli.app import CANNOT_START, OUTPUT
from handrail.faces.cli.driving import Interruption, drive, opened
from handrail.faces.cli.options import Setting, configured
from handrail.faces.cli.show import console, out_json, visible

if TYPE_CHECKING:
    from handrail.doctor import Check

MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "fault": ("✗", "red")}


@click.command("doctor")
@configured
def command(setting: Setting) -> int:
    """Say what this machine can enforce, and what to do about the rest.

    Exits with 5 when Handrail could not start here, or could not confine what it runs.
    """
    return drive(lambda interruption: _doctor(setting, interruption))


async def _doctor(setting: Setting, interruption: Interruption) -> int:
    from handrail.contract.errors import LoadError, StartError
    from handrail.doctor import Check, of_machine

    try:
        async with opened(setting) as kernel:
            checks = kernel.doctor()
    except (LoadError, StartError) as error:  # what can be said without a kernel is said all the same
        about = "state" if isinstance(error, StartError) else "configuration"
        checks = [*of_machine(setting.workspace), Check(about, "fault", str(error))]
    if setting.json:
        out_json([check.to_dict() for check in checks])
    else:
        _shown(checks)
    # A single tool that is withheld stops nothing else.
    faults = [check for check in checks if check.state == "fault" and not check.name.startswith("tool ")]
    return CANNOT_START if faults else OUTPUT


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
