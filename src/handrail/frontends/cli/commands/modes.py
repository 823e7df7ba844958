"""``handrail modes``: the modes, which define how much runs without approval, each with its rules."""

from __future__ import annotations

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import out, out_json


@click.command("modes")
@configured
def command(setting: Setting) -> int:
    """List the permission modes and their rules.

    The configured mode is marked. Set a mode with `--mode`, `HANDRAIL_MODE`, an agent's manifest or `mode` in handrail.toml.
    The rules of a mode have a separate scope, and `handrail explain` names them like other rules. The command starts nothing.
    """
    from handrail.frontends.cli.commands.config import read
    from handrail.policy.rules.rules import MEANINGS, MODES, TEXTS, in_brief

    chosen = read(setting).settings.mode
    if setting.json:
        out_json(
            [
                {"mode": mode, "meaning": MEANINGS[mode], "rules": list(TEXTS[mode]), "configured": mode == chosen}
                for mode in MODES
            ]
        )
        return OUTPUT
    for number, mode in enumerate(MODES):
        if number:
            out()
        out(f"{mode}{' (configured)' if mode == chosen else ''}: {MEANINGS[mode]}")
        for text in in_brief(mode):
            out(f"  {text}")
    return OUTPUT
