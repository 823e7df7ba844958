"""``handrail config``: each setting with its origin, and the settings without effect."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import columns, json_text, note, one_line, out, out_block, out_json

if TYPE_CHECKING:
    from handrail.config import Configuration, Value


@click.command("config")
@click.option("--schema", is_flag=True, help="Print the JSON schema of handrail.toml.")
@configured
def command(setting: Setting, schema: bool) -> int:
    """Show each setting and its origin.

    Reads the defaults, both handrail.toml files, the HANDRAIL_* variables and the options, as a command with a kernel would.
    It starts nothing. If the configuration is faulty, it prints every fault and exits with 5.
    """
    if schema:
        from handrail.config.template import schema as described

        out_block(json_text(described(), indent=2))
        return OUTPUT
    config = read(setting)
    if setting.json:
        out_json(_whole(config))
    else:
        _show(config)
        note_holder(setting)
    return OUTPUT


def note_holder(setting: Setting) -> None:
    """Print a note if a running process still uses an earlier configuration."""
    from handrail.contract.errors import StartError
    from handrail.store.folders import locate
    from handrail.store.lease import holder_of

    with suppress(StartError):  # handrail doctor reports the problem
        if (holder := holder_of(locate(setting.workspace, setting.state, allow_home=setting.allow_home))) is not None:
            note(f"{holder} holds this workspace, and still uses the settings from its start.")


def read(setting: Setting) -> Configuration:
    """Load the configuration that the options describe.

    :raises LoadError: with every fault, including invalid rules
    :raises StartError: if the workspace or the state folder is unusable
    """
    from handrail.config import load
    from handrail.contract.errors import Fault, LoadError
    from handrail.policy.rules.checking import fault_in_examples
    from handrail.policy.rules.rules import parse_rule
    from handrail.store.folders import locate

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    config = load(setting.config, folders=folders, flags=setting.settings)
    faults: list[Fault] = []
    for rule in (*config.rules, *config.held_rules):
        try:
            parsed = parse_rule(rule.text, scope=rule.scope, source=rule.source)
            if problem := fault_in_examples(parsed, rule.match, rule.not_match, None):
                raise ValueError(problem)
        except ValueError as error:
            faults.append(Fault(rule.source, "", str(error)))
    if faults:
        raise LoadError(faults)
    return config


def shown(value: object) -> str:
    """Return a value as JSON on one line."""
    return json_text(value)


def _show(config: Configuration) -> None:
    in_force = _rows(value for value in config.values if not value.not_in_force)
    for line in columns([("KEY", "VALUE", "ORIGIN"), *in_force]):
        out(line)
    out_of_force = [value for value in config.values if value.not_in_force]
    if out_of_force:
        out()
        out("without effect")
        for line in columns(
            (*row, value.not_in_force) for row, value in zip(_rows(out_of_force), out_of_force, strict=True)
        ):
            out(f"  {line}")
    note("")
    note(f"configuration: {config.file or f'none (searched in {config.folder})'}")
    if config.workspace is not None:
        state = "trusted" if config.workspace.trusted else "not trusted"
        note(f"workspace: {one_line(str(config.workspace.path))} ({state})")


def _rows(values: Iterable[Value]) -> list[tuple[str, str, str]]:
    return [(value.key, shown(value.value), str(value.origin)) for value in values]


def _whole(config: Configuration) -> dict[str, object]:
    own = config.workspace
    return {
        "settings": config.settings.model_dump(mode="json"),
        "values": [value.to_dict() for value in config.values],
        "file": None if config.file is None else str(config.file),
        "folder": str(config.folder),
        "workspace": None if own is None else {"file": str(own.path), "sha256": own.sha256, "trusted": own.trusted},
    }
