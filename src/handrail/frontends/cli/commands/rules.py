"""``handrail rules``: the rule sets that ship, and the rules of each."""

from __future__ import annotations

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, configuration_options
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json

_DEFAULT = "default"
_DEFAULT_DESCRIPTION = "The shipped rules, which every session has. They answer only where no other rule matches."


@click.command("rules")
@click.argument("name", metavar="[NAME]", required=False)
@configuration_options
def command(setting: CommandOptions, name: str | None) -> int:
    """List the rule sets that ship, or print the rules of one.

    Sets that the configuration selects are marked. Select a set with `--rule @NAME`, `"@NAME"` in `rules` of handrail.toml or of
    an agent's manifest, or `open_kernel(rules=["@NAME"])`. The set `default` always applies. The command starts nothing.
    """
    from handrail.frontends.cli.commands.config import read_configuration
    from handrail.policy.rules.rule_sets import RULE_SETS, find_rule_set, find_selected, format_rule_set
    from handrail.policy.rules.rules_and_modes import default_rules

    chosen = find_selected(rule.text for rule in read_configuration(setting).rules)
    if name is None:
        rows = [
            (_DEFAULT, _DEFAULT_DESCRIPTION, True),
            *((n, s.description, n in chosen) for n, s in RULE_SETS.items()),
        ]
        if setting.json:
            print_json([{"name": n, "meaning": meaning, "in_force": used} for n, meaning, used in rows])
        for n, meaning, used in () if setting.json else rows:
            print_escaped_line(f"{n}{' (in force)' if used else ''}: {meaning}")
        return OUTPUT
    if name == _DEFAULT:
        rules = default_rules()
        texts, lines = tuple(rule.text for rule in rules), [rule.text for rule in rules if not rule.any_case]
        lines.append(
            f"ask fs.read **/NAME, for each of {len(rules) - len(lines)} names of secret files (--json lists them)"
        )
    else:
        try:
            found = find_rule_set(f"@{name.removeprefix('@')}")
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        assert found is not None
        texts, lines = found.texts, format_rule_set(found)
    if setting.json:
        print_json({"name": name, "rules": list(texts)})
        return OUTPUT
    for line in lines:
        print_escaped_line(line)
    return OUTPUT
