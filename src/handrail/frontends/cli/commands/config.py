"""``handrail config``: each setting with its origin, and the settings without effect."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from handrail.contract.errors import Diagnostic, LoadError, StartError
from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.renderer import Cell, TerminalRenderer
from handrail.frontends.cli.terminal_output import (
    escape_to_one_line,
    format_terminal_json,
    print_json,
    print_stderr_note,
    print_terminal_safe_text,
)

if TYPE_CHECKING:
    from handrail.config import LayerValue, MergedConfiguration


@click.command("config")
@click.argument("action", required=False, type=click.Choice(["list"]), metavar="[list]")
@click.option("--schema", is_flag=True, help="Print the JSON schema of handrail.toml.")
@add_configuration_options
def command(setting: CommandOptions, action: str | None, schema: bool) -> int:
    """Show each setting and its origin.

    Reads the defaults, both handrail.toml files, the HANDRAIL_* variables and the options, as a command with a kernel would.
    It starts nothing. If the configuration is faulty, it prints every fault and exits with 5.
    """
    if schema:
        from handrail.config.template import build_config_json_schema as described

        print_terminal_safe_text(format_terminal_json(described(), indent=2))
        return OUTPUT
    config = load_and_validate_configuration(setting)
    if setting.json:
        print_json(_config_data(config))
    else:
        _show(config)
        warn_about_outdated_lease_holder(setting)
    return OUTPUT


def warn_about_outdated_lease_holder(setting: CommandOptions) -> None:
    """Print a note if a running process still uses an earlier configuration."""
    from handrail.store.lease import find_lease_holder

    with suppress(StartError):  # handrail doctor reports the problem
        if (holder := find_lease_holder(setting.folders)) is not None:
            print_stderr_note(f"{holder} holds this workspace, and still uses the settings from its start.")


def load_and_validate_configuration(setting: CommandOptions) -> MergedConfiguration:
    """Load the configuration that the options describe.

    :raises LoadError: with every fault, including invalid rules
    :raises StartError: if the workspace or the state folder is unusable
    """
    from handrail.config import load_configuration
    from handrail.policy.rules.rule_sets import parse_entry
    from handrail.policy.rules.validation import find_failing_example

    folders = setting.folders
    config = load_configuration(setting.config, folders=folders, flags=setting.settings)
    faults: list[Diagnostic] = []
    for rule in (*config.rules, *config.inactive_rules):
        try:
            parsed = parse_entry(rule.text, scope=rule.scope, source=rule.source)
            if problem := find_failing_example(parsed[0], rule.match, rule.not_match, None):
                raise ValueError(problem)
        except ValueError as error:
            faults.append(Diagnostic(rule.source, "", str(error)))
    if faults:
        raise LoadError(faults)
    return config


def to_one_line_json(value: object) -> str:
    return format_terminal_json(value)


def _show(config: MergedConfiguration) -> None:
    """Print the settings in groups by their table, then those without effect."""
    view = TerminalRenderer()
    groups: dict[str, list[tuple[Cell, ...]]] = {}
    for value in config.values:
        if not value.inactive_reason:
            key, text, origin = _rows([value])[0]
            style = "dim" if origin == "default" else ""
            groups.setdefault(key.partition(".")[0].partition("[")[0], []).append(
                ((key, style), (text, style), (origin, "dim"))
            )
    singles = [name for name, rows in groups.items() if len(rows) == 1]
    ordered = [("general", [row for name in singles for row in groups[name]])] if singles else []
    ordered += [(name, rows) for name, rows in groups.items() if name not in singles]
    view.print_grouped_table(("KEY", "VALUE", "ORIGIN"), ordered)
    if out_of_force := [value for value in config.values if value.inactive_reason]:
        view.write_line()
        view.print_heading("without effect")
        rows = [(*row, value.inactive_reason) for row, value in zip(_rows(out_of_force), out_of_force, strict=True)]
        view.print_table(("KEY", "VALUE", "ORIGIN", "REASON"), rows)
    if config.unsound_servers:
        view.write_line()
        view.print_heading("MCP servers that cannot be used")
        for name, faults in config.unsound_servers.items():
            view.print_text(escape_to_one_line(f"{name}: {'; '.join(map(str, faults))}"), further="  ")
    view.write_line()
    view.print_text(("configuration: ", "dim"), str(config.file or f"none (searched in {config.folder})"), further="  ")
    if config.workspace is not None:
        state = "trusted" if config.workspace.trusted else "not trusted"
        view.print_text(
            ("workspace: ", "dim"), f"{escape_to_one_line(str(config.workspace.path))} ({state})", further="  "
        )


def _rows(values: Iterable[LayerValue]) -> list[tuple[str, str, str]]:
    return [(value.key, to_one_line_json(value.value), str(value.origin)) for value in values]


def _config_data(config: MergedConfiguration) -> dict[str, object]:
    own = config.workspace
    return {
        "settings": config.settings.model_dump(mode="json"),
        "values": [value.to_dict() for value in config.values],
        "file": None if config.file is None else str(config.file),
        "folder": str(config.folder),
        "unsound_servers": {name: [str(one) for one in faults] for name, faults in config.unsound_servers.items()},
        "workspace": None if own is None else {"file": str(own.path), "sha256": own.sha256, "trusted": own.trusted},
    }
