"""``handrail mcp install`` and ``list``: the programs and the state of upstream MCP servers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import click

from handrail.contract.errors import UsageError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import ask_yes_or_no, print_escaped_line, print_json, print_stderr_note

if TYPE_CHECKING:
    from handrail.upstream.server_definition import ServerDefinition
    from handrail.upstream.server_programs import InstalledServer, ServerPackage


@click.command("install")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Install without asking.")
@click.option(
    "--with", "further", multiple=True, metavar="PACKAGE", help="Further package, such as 'mcp<2'. Can be repeated."
)
@click.option("--scripts", is_flag=True, help="npm: allow packages to run install scripts.")
@add_configuration_options
def install_command(setting: CommandOptions, name: str, yes: bool, further: tuple[str, ...], scripts: bool) -> int:
    """Install an MCP server that npx or uvx would download.

    The server is installed into the state folder, with the current versions or those in its command, and the hash of each
    file is recorded. From then on it starts from there. If a file has changed, the server does not start. To change the
    version, install it again.
    """
    definition = _definition(setting, name)
    if definition.missing_reason and not definition.url_or_command:
        raise click.UsageError(f"MCP server {name!r} cannot be used: {definition.missing_reason}. Correct it first.")
    if (package := find_server_package(definition)) is None:
        print_stderr_note(f"handrail mcp install: {name} downloads nothing at its start. Nothing to install.")
        return ERROR
    package = _add_packages(package, further)
    confirm_or_exit(setting, yes, f"Install {package} for {name}? Its code will run here, in a sandbox.")
    done = install_server_package(setting, definition, package, scripts=scripts)
    if setting.json:
        print_json(
            {"name": name, "package": done.package.name, "version": done.version, "versions": dict(done.versions)}
        )
    else:
        print_escaped_line(
            f"installed {done.package.name} {done.version} for {name} ({done.files:,} files). It starts from there now."
        )
    return OUTPUT


@click.command("list")
@add_configuration_options
def list_command(setting: CommandOptions) -> int:
    """List the configured MCP servers and their state."""
    from handrail.upstream.server_config_loader import list_general_config_faults

    rows = [_row(setting, definition) for definition in load_configured_servers(setting)]
    for fault in list_general_config_faults(load_and_validate_configuration(setting)):
        rows.append({"name": fault.location, "where": fault.source, "state": f"cannot be used: {fault.problem}"})
    if setting.json:
        print_json(rows)
        return OUTPUT
    table = [((str(row["name"]), "bold"), str(row["where"]), str(row["state"])) for row in rows]
    TerminalRenderer().print_table(("SERVER", "ADDRESS", "STATE"), table)
    for row in rows:
        for line in cast("list[str]", row.get("requested", [])):
            print_escaped_line(f"{row['name']} {line}")
    if not rows:
        print_escaped_line("No MCP servers are configured. To import those of other programs: handrail mcp import")
    return OUTPUT


def _row(setting: CommandOptions, definition: ServerDefinition) -> dict[str, object]:
    from handrail.registry.definition_pins import StoredPins, find_unapproved_definitions
    from handrail.upstream.mcp_source import McpSource
    from handrail.upstream.requested_hosts import describe_denied_hosts
    from handrail.upstream.server_programs import find_installed_package, identify_server_package

    folders = setting.folders
    row: dict[str, object] = {
        "name": definition.name,
        "where": definition.url_or_command,
        "transport": definition.transport,
    }
    try:
        package = identify_server_package(definition)
    except UsageError as problem:
        return row | {"state": f"cannot be installed: {problem}"}
    if package is not None:
        if (found := find_installed_package(definition, folders.state)) is None:
            return row | {"state": f"not installed: handrail mcp install {definition.name}"}
        row |= {"package": found[0], "version": found[1]}
    if definition.missing_reason:
        return row | {"state": f"cannot be used: {definition.missing_reason}"}
    source = McpSource(definition, folders.state, str(folders.workspace))
    if fault := source.explain_misconfiguration():
        return row | {"state": fault}
    if source.last_listing is None:
        return row | {"state": f"never connected. To connect and see its tools: handrail sources review {source.name}"}
    if requested := describe_denied_hosts(folders.state, definition.name, definition.hosts):
        row["requested"] = requested
    loaded = source.load()
    tools, pins = [found.tool.spec for found in loaded.tools], StoredPins(folders.state)
    state = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
    if waiting := len(find_unapproved_definitions(source.name, tools, pins)):
        state += f", {waiting} to review: handrail sources review {source.name}"
    if loaded.faults:
        state += f"; {len(loaded.faults)} invalid"
    return row | {"tools": len(tools), "waiting": waiting, "state": state}


def load_configured_servers(setting: CommandOptions) -> list[ServerDefinition]:
    from handrail.runtime.secret_store import SecretStore
    from handrail.upstream.server_config_loader import load_enabled_servers as servers

    config = load_and_validate_configuration(setting)
    return servers(config, SecretStore(dict.fromkeys(config.settings.secrets, "")))


def _definition(setting: CommandOptions, name: str) -> ServerDefinition:
    from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

    known = {definition.name: definition for definition in load_configured_servers(setting)}
    if name not in known:
        close = nearest_names(name, known, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The configured servers are: {', '.join(known) or 'none'}."
        raise click.UsageError(f"MCP server {name!r} is not configured. {hint}")
    return known[name]


def find_server_package(definition: ServerDefinition) -> ServerPackage | None:
    from handrail.upstream.server_programs import identify_server_package

    return identify_server_package(definition)


def _add_packages(package: ServerPackage, further: tuple[str, ...]) -> ServerPackage:
    from dataclasses import replace

    if unfit := [one for one in further if one.startswith("-") or not one.strip()]:
        raise click.UsageError(f"Invalid value for `--with`: {unfit[0]!r}. Expected a package, such as 'mcp<2'.")
    return replace(package, extra_packages=(*package.extra_packages, *further))


def install_server_package(
    setting: CommandOptions, definition: ServerDefinition, package: ServerPackage, *, scripts: bool
) -> InstalledServer:
    from handrail.upstream.server_programs import install_server

    folders = setting.folders
    print_stderr_note(f"handrail mcp: installing {package} for {definition.name}")
    return install_server(definition, package, folders.state, str(folders.workspace), scripts=scripts)


def confirm_or_exit(setting: CommandOptions, yes: bool, question: str) -> None:
    """Ask the user to confirm, unless ``yes`` is set. If the user does not agree, end the command.

    :raises UsageError: without a terminal
    """
    if yes:
        return
    if setting.headless or setting.json or not sys.stdin.isatty():
        raise click.UsageError("Confirmation is required, and there is no terminal to ask. Pass `--yes` to agree.")
    if not ask_yes_or_no(question):
        print_stderr_note("Nothing was done.")
        raise SystemExit(ERROR)
