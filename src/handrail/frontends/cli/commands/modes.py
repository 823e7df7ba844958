"""``handrail modes``: the modes, which define how much runs without approval, each with its rules."""

from __future__ import annotations

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import print_json


@click.command("modes")
@click.argument("action", required=False, type=click.Choice(["list"]), metavar="[list]")
@add_configuration_options
def command(setting: CommandOptions, action: str | None) -> int:
    """List the permission modes and their rules.

    The configured mode is marked. Set a mode with `--mode`, `HANDRAIL_MODE`, an agent's manifest or `mode` in handrail.toml.
    The rules of a mode have a separate scope, and `handrail explain` names them like other rules. The command starts nothing.
    """
    from handrail.frontends.cli.commands.config import load_and_validate_configuration
    from handrail.policy.rules.rules_and_modes import MODE_DESCRIPTIONS, MODE_RULE_TEXTS, MODES, format_mode_rules

    chosen = load_and_validate_configuration(setting).settings.mode
    if setting.json:
        print_json(
            [
                {
                    "mode": mode,
                    "meaning": MODE_DESCRIPTIONS[mode],
                    "rules": list(MODE_RULE_TEXTS[mode]),
                    "configured": mode == chosen,
                }
                for mode in MODES
            ]
        )
        return OUTPUT
    view = TerminalRenderer()
    for number, mode in enumerate(MODES):
        if number:
            view.write_line()
        view.print_heading(f"{mode}{' (configured)' if mode == chosen else ''}")
        view.print_text(MODE_DESCRIPTIONS[mode], indent="  ")
        for text in format_mode_rules(mode):
            view.print_text((text, "cyan"), indent="    ", further="      ")
    return OUTPUT
