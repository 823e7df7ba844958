"""``handrail rules``: the rule sets that ship, and the rules of each."""

from __future__ import annotations

import os
from pathlib import Path

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json

_DEFAULT = "default"
_DEFAULT_DESCRIPTION = "The shipped rules, which every session has. They apply only if no other rule matches."


@click.command("rules")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--share", metavar="DIR", help="Apply the stored answers of another workspace here too.")
@click.option("--unshare", metavar="DIR", help="Stop applying the stored answers of another workspace here.")
@click.option("--adopt", is_flag=True, help="Apply the stored answers of this path to the folder that is here now.")
@add_configuration_options
def command(setting: CommandOptions, name: str | None, share: str | None, unshare: str | None, adopt: bool) -> int:
    """List the rule sets that ship, or print the rules of one.

    Sets that the configuration selects are marked. Select a set with `--rule @NAME`, `"@NAME"` in `rules` of handrail.toml or of
    an agent's manifest, or `open_kernel(rules=["@NAME"])`. The set `default` always applies. The command starts nothing.

    Answers "for this project" belong to the folder of the workspace. If another folder takes its path, they do not hold there
    before you pass --adopt. If you moved the folder, `handrail state adopt` takes its answers along. With --share, the answers of
    another workspace, such as a worktree of the same project, hold here too.
    """
    if share is not None or unshare is not None or adopt:
        return _change_project(setting, share, unshare, adopt=adopt)
    from handrail.frontends.cli.commands.config import load_and_validate_configuration
    from handrail.policy.rules.rule_sets import (
        RULE_SETS,
        format_rule_set,
        list_selected_rule_sets,
        resolve_rule_set_reference,
    )
    from handrail.policy.rules.rules_and_modes import build_default_rules

    chosen = list_selected_rule_sets(rule.text for rule in load_and_validate_configuration(setting).rules)
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
        rules = build_default_rules()
        texts, lines = tuple(rule.text for rule in rules), [rule.text for rule in rules if not rule.any_case]
        lines.append(
            f"ask fs.read **/NAME, for each of {len(rules) - len(lines)} names of secret files (--json lists them)"
        )
    else:
        try:
            found = resolve_rule_set_reference(f"@{name.removeprefix('@')}")
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


def _change_project(setting: CommandOptions, share: str | None, unshare: str | None, *, adopt: bool) -> int:
    """Change which folder the stored answers hold for, or whose answers hold here."""
    from handrail.store.project_identity import (
        bind_state_to_current_folder,
        is_recorded_project_folder,
        set_grant_sharing,
    )
    from handrail.store.state_folders import prepare_folders, resolve_workspace_path

    folders = prepare_folders(setting.workspace, setting.state, allow_home=setting.allow_home)
    if adopt:
        bind_state_to_current_folder(folders)
        print_escaped_line(f"The stored answers apply to {folders.workspace}.")
    is_recorded_project_folder(folders)  # which records a folder that was never opened
    for text, shares in ((share, True), (unshare, False)):
        if text is not None:
            other = resolve_workspace_path(Path(text), allow_home=True) if shares else Path(os.path.realpath(text))
            set_grant_sharing(folders, other, shares=shares)
            how = "hold here too" if shares else "hold here no longer"
            print_escaped_line(f"The stored answers of {other} {how}.")
    return OUTPUT
