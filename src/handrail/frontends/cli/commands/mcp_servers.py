"""``handrail mcp import``, ``install`` and ``list``: the configuration of upstream MCP servers by their operator."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, configuration_options
from handrail.frontends.cli.commands.config import read_configuration
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import complete_files
from handrail.frontends.cli.terminal_output import (
    ask_yes_or_no,
    print_escaped_line,
    print_json,
    print_note,
    to_one_line,
)

if TYPE_CHECKING:
    from handrail.authoring.mcp_server_import import ImportedMcpServer
    from handrail.upstream.server_definition import ServerDefinition
    from handrail.upstream.server_programs import InstalledServer, ServerPackage


_SECRETS = "secrets"
"""The folder next to the configuration, with a file for each secret of an imported server."""


@click.command("import")
@click.argument("file", required=False, type=click.Path(path_type=Path), shell_complete=complete_files)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Server to import. Can be repeated. Default: all.")
@click.option("--yes", is_flag=True, help="Import and install without asking.")
@click.option("--no-install", is_flag=True, help="Do not install; see handrail mcp install NAME.")
@configuration_options
def import_command(
    setting: CommandOptions, file: Path | None, names: tuple[str, ...], yes: bool, no_install: bool
) -> int:
    """Import the MCP servers of another program.

    FILE is the configuration of Claude Desktop, Claude Code, Cursor, VS Code, Windsurf or Gemini. Without FILE, lists the
    files that were found. The command shows the servers, and writes them into your handrail.toml after you agree. Values that
    look like secrets are stored in separate files next to it, which only you can read.

    If a server would be downloaded by npx, uvx or a similar program, you can install it now. From then on it starts from
    there, without network access. A server has access only to the hosts and files in its configuration.
    """
    from handrail.authoring.mcp_server_import import import_mcp_servers, list_foreign_server_files
    from handrail.store.state_folders import locate_folders

    workspace = locate_folders(setting.workspace, setting.state, allow_home=setting.allow_home).workspace
    if file is None:
        return _print_candidate_files(
            setting, [(who, path) for who, path in list_foreign_server_files(workspace) if path.is_file()]
        )
    found = import_mcp_servers(file, workspace, _used_secret_names(setting))
    if names:
        found = _select_servers(file, found, names)
    _mark_existing_names(setting, found)
    good = [one for one in found if not one.problem]
    if not setting.json:
        _show_imports(found)
    if not good:
        return _report_nothing_written(setting, found)
    _require_agreement(setting, yes, f"Write {', '.join(one.name for one in good)} into your configuration?")
    path = _write_servers(setting, good)
    print_note(f"handrail mcp import: wrote {path}")
    installed = {} if no_install else _install_servers(setting, {one.name for one in good}, yes)
    if setting.json:
        print_json(_import_report(found, [one.name for one in good], installed))
    return OUTPUT


def _select_servers(file: Path, found: Iterable[ImportedMcpServer], names: tuple[str, ...]) -> list[ImportedMcpServer]:
    """Return the servers with these names.

    :raises UsageError: for an unknown name
    """
    named = [one for one in found if one.name in names]
    if unknown := set(names) - {one.name for one in named}:
        raise click.UsageError(f"Server {min(unknown)!r} is not in {file}. Leave out the names to see its servers.")
    return named


def _report_nothing_written(setting: CommandOptions, found: Iterable[ImportedMcpServer]) -> int:
    if setting.json:
        print_json(_import_report(found, [], {}))
    print_note("handrail mcp import: No server was imported.")
    return ERROR


def _mark_existing_names(setting: CommandOptions, found: Iterable[ImportedMcpServer]) -> None:
    """Set the problem of each server whose name is already in use."""
    from handrail.authoring.mcp_server_import import do_server_names_collide

    seen = {definition.name for definition in _definitions(setting)} | read_configuration(
        setting
    ).settings.mcp.servers.keys()
    for one in found:
        if one.problem:
            continue
        if meeting := next((name for name in seen if do_server_names_collide(name, one.name)), None):
            one.problem = f"its name is already in use, or too similar to one in use: {meeting}. Rename one of them"
        seen.add(one.name)


def _install_servers(setting: CommandOptions, names: Collection[str], yes: bool) -> dict[str, str]:
    """Offer to install the servers with these names, and return the installed packages by server name."""
    installed: dict[str, str] = {}
    for definition in _definitions(setting):
        if definition.name in names and (text := _offer_server_install(setting, definition, yes)) is not None:
            installed[definition.name] = text
    return installed


def _print_candidate_files(setting: CommandOptions, found: list[tuple[str, Path]]) -> int:
    from handrail.authoring.mcp_server_import import import_mcp_servers
    from handrail.contract.errors import UsageError
    from handrail.store.state_folders import locate_folders

    workspace = locate_folders(setting.workspace, setting.state, allow_home=setting.allow_home).workspace
    rows: list[dict[str, object]] = []
    for who, path in found:
        try:
            names = [one.name for one in import_mcp_servers(path, workspace)]
        except UsageError:
            continue
        rows.append({"program": who, "file": str(path), "servers": names})
    if setting.json:
        print_json(rows)
        return OUTPUT
    for row in rows:
        print_escaped_line(f"{row['program']}: handrail mcp import {to_one_line(str(row['file']))}")
        print_escaped_line(f"  {to_one_line(', '.join(map(str, row['servers'])))}")  # pyright: ignore[reportArgumentType]
    if not rows:
        print_escaped_line("No MCP servers of other programs were found. Pass a file: handrail mcp import FILE")
    return OUTPUT


def _show_imports(found: Iterable[ImportedMcpServer]) -> None:
    for one in found:
        if one.problem:
            print_escaped_line(f"{to_one_line(one.name)}: not imported: {to_one_line(one.problem)}")
            continue
        how = one.table.get("url") or " ".join((one.table["command"], *one.table.get("args", ())))
        print_escaped_line(f"{to_one_line(one.name)}: {to_one_line(str(how))}")
        if one.secrets:
            print_escaped_line(f"  secrets: {to_one_line(', '.join(one.secrets))}")
        if one.variables:
            print_escaped_line(
                f"  required environment variables: {to_one_line(', '.join(dict.fromkeys(one.variables.values())))}"
            )
        for left in one.ignored_keys:
            print_escaped_line(f"  not imported: {to_one_line(left)}")


def _import_report(
    found: Iterable[ImportedMcpServer], written: list[str], installed: dict[str, str]
) -> dict[str, object]:
    return {
        "written": written,
        "installed": installed,
        "servers": [
            {
                "name": one.name,
                "problem": one.problem or None,
                "secrets": [*one.secrets],
                "variables": [*dict.fromkeys(one.variables.values())],
                "left": one.ignored_keys,
            }
            for one in found
        ],
    }


def _write_servers(setting: CommandOptions, servers: list[ImportedMcpServer]) -> Path:
    """Add the servers to the operator's configuration, with each secret in a separate file next to it.

    :raises UsageError: if the configuration would be invalid; then nothing is written
    """
    import tomllib

    from handrail.authoring.mcp_server_import import format_server_tables
    from handrail.config.operator_settings import Settings
    from handrail.contract.errors import UsageError
    from handrail.contract.text.text_encodings import read_file_text, read_settings_text
    from handrail.store import operator_decisions

    path = _configuration_file(setting)
    folder = path.parent / _SECRETS
    places = {name: folder / name for one in servers for name in one.secrets}
    try:
        raw = path.read_bytes() if path.exists() else b""
        before = read_settings_text(raw).replace("\r\n", "\n")
        text = before.rstrip("\n") + "\n" * bool(before.strip()) + format_server_tables(servers, places)
        windows = b"\r\n" in raw
        written = read_file_text(raw).encoding.encode(text.lstrip("\n").replace("\n", "\r\n" if windows else "\n"))
        Settings.model_validate(tomllib.loads(text))
    except (ValueError, OSError) as error:
        raise UsageError(f"Nothing was written, because {path} would be invalid with these servers: {error}") from None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if places:
        folder.mkdir(mode=0o700, exist_ok=True)
    made: list[Path] = []
    try:
        for name, value in ((name, value) for one in servers for name, value in one.secrets.items()):
            if (
                places[name].is_symlink()
                or operator_decisions.create_private_file(places[name], content := value.encode()) != content
            ):
                raise UsageError(f"Nothing was written, because {places[name]} already exists. Run the import again.")
            made.append(places[name])
        operator_decisions.write_private_file(path.resolve(), written)
    except BaseException:
        for place in made:
            place.unlink(missing_ok=True)
        raise
    return path


def _configuration_file(setting: CommandOptions) -> Path:
    from handrail.config import FILE_NAME, default_config_folder

    return Path(setting.config).absolute() if setting.config is not None else default_config_folder() / FILE_NAME


def _used_secret_names(setting: CommandOptions) -> set[str]:
    """Return the names of secrets that are defined, referenced, or still have a file.

    A new secret must not take such a name: it would replace or provide the value of another one.
    """
    folder = _configuration_file(setting).parent / _SECRETS
    kept = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    settings = read_configuration(setting).settings
    return kept | settings.secrets.keys() | set(_secret_references(settings.model_dump()))


def _secret_references(value: object) -> Iterator[str]:
    """Yield the names in all ``{ secret = "NAME" }`` references of a configuration."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        if isinstance(name := table.get("secret"), str):
            yield name
        for inner in table.values():
            yield from _secret_references(inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast("Sequence[object]", value):
            yield from _secret_references(inner)


@click.command("install")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Install without asking.")
@click.option(
    "--with", "further", multiple=True, metavar="PACKAGE", help="Further package, such as 'mcp<2'. Can be repeated."
)
@click.option("--scripts", is_flag=True, help="npm: allow packages to run install scripts.")
@configuration_options
def install_command(setting: CommandOptions, name: str, yes: bool, further: tuple[str, ...], scripts: bool) -> int:
    """Install an MCP server that npx or uvx would download.

    The server is installed into the state folder, with the current versions or those in its command, and the hash of each
    file is recorded. From then on it starts from there. If a file has changed, the server does not start. To change the
    version, install it again.
    """
    definition = _definition(setting, name)
    package = _package(definition)
    if package is None:
        print_note(f"handrail mcp install: {name} downloads nothing at its start. Nothing to install.")
        return ERROR
    package = _add_packages(package, further)
    _require_agreement(setting, yes, f"Install {package} for {name}? Its code will run here, in a sandbox.")
    done = _install_package(setting, definition, package, scripts=scripts)
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
@configuration_options
def list_command(setting: CommandOptions) -> int:
    """List the configured MCP servers and their state."""
    rows = [_row(setting, definition) for definition in _definitions(setting)]
    if setting.json:
        print_json(rows)
        return OUTPUT
    table = [((str(row["name"]), "bold"), str(row["where"]), str(row["state"])) for row in rows]
    TerminalRenderer().print_table(("SERVER", "ADDRESS", "STATE"), table)
    if not rows:
        print_escaped_line("No MCP servers are configured. To import those of other programs: handrail mcp import")
    return OUTPUT


def _row(setting: CommandOptions, definition: ServerDefinition) -> dict[str, object]:
    from handrail.contract.errors import UsageError
    from handrail.registry.definition_pins import StoredPins, find_unapproved_definitions
    from handrail.store.state_folders import locate_folders
    from handrail.upstream.mcp_source import McpSource
    from handrail.upstream.server_programs import find_installed, find_package

    folders = locate_folders(setting.workspace, setting.state, allow_home=setting.allow_home)
    row: dict[str, object] = {
        "name": definition.name,
        "where": definition.url_or_command,
        "transport": definition.transport,
    }
    try:
        package = find_package(definition)
    except UsageError as problem:
        return row | {"state": f"cannot be installed: {problem}"}
    if package is not None:
        if (found := find_installed(definition, folders.state)) is None:
            return row | {"state": f"not installed: handrail mcp install {definition.name}"}
        row |= {"package": found[0], "version": found[1]}
    if definition.missing_reason:
        return row | {"state": definition.missing_reason}
    source = McpSource(definition, folders.state, str(folders.workspace))
    if fault := source.explain_misconfiguration():
        return row | {"state": fault}
    if source.last_listing is None:
        return row | {"state": f"never connected. To connect and see its tools: handrail sources review {source.name}"}
    loaded = source.load()
    tools, pins = [found.tool.spec for found in loaded.tools], StoredPins(folders.state)
    state = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
    if waiting := len(find_unapproved_definitions(source.name, tools, pins)):
        state += f", {waiting} to review: handrail sources review {source.name}"
    if loaded.faults:
        state += f"; {len(loaded.faults)} invalid"
    return row | {"tools": len(tools), "waiting": waiting, "state": state}


def _definitions(setting: CommandOptions) -> list[ServerDefinition]:
    from handrail.runtime.secret_store import SecretStore
    from handrail.upstream.server_config_loader import load_enabled_servers as servers

    config = read_configuration(setting)
    return servers(config, SecretStore(dict.fromkeys(config.settings.secrets, "")))


def _definition(setting: CommandOptions, name: str) -> ServerDefinition:
    from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

    known = {definition.name: definition for definition in _definitions(setting)}
    if name not in known:
        close = nearest_names(name, known, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The configured servers are: {', '.join(known) or 'none'}."
        raise click.UsageError(f"MCP server {name!r} is not configured. {hint}")
    return known[name]


def _package(definition: ServerDefinition) -> ServerPackage | None:
    from handrail.upstream.server_programs import find_package

    return find_package(definition)


def _add_packages(package: ServerPackage, further: tuple[str, ...]) -> ServerPackage:
    from dataclasses import replace

    if unfit := [one for one in further if one.startswith("-") or not one.strip()]:
        raise click.UsageError(f"Invalid value for `--with`: {unfit[0]!r}. Expected a package, such as 'mcp<2'.")
    return replace(package, extra_packages=(*package.extra_packages, *further))


def _install_package(
    setting: CommandOptions, definition: ServerDefinition, package: ServerPackage, *, scripts: bool
) -> InstalledServer:
    from handrail.store.state_folders import locate_folders
    from handrail.upstream.server_programs import install_server

    folders = locate_folders(setting.workspace, setting.state, allow_home=setting.allow_home)
    print_note(f"handrail mcp: installing {package} for {definition.name}")
    return install_server(definition, package, folders.state, str(folders.workspace), scripts=scripts)


def _offer_server_install(setting: CommandOptions, definition: ServerDefinition, yes: bool) -> str | None:
    """Install one imported server if it requires it and the user agrees, and return its package, or None."""
    from handrail.contract.errors import UsageError

    try:
        if (package := _package(definition)) is None:
            return None
        if not yes and not ask_yes_or_no(f"Install {package} for {definition.name}?", err=True):
            print_note(f"To install it later: handrail mcp install {definition.name}")
            return None
        done = _install_package(setting, definition, package, scripts=False)
    except UsageError as problem:
        print_note(f"handrail mcp import: {definition.name} is configured but not installed: {problem}")
        return None
    print_note(f"handrail mcp import: installed {done.package.name} {done.version} for {definition.name}")
    return f"{done.package.name} {done.version}"


def _require_agreement(setting: CommandOptions, yes: bool, question: str) -> None:
    """Ask the user to confirm, unless ``yes`` is set. If the user does not agree, end the command.

    :raises UsageError: without a terminal
    """
    if yes:
        return
    if setting.headless or setting.json or not sys.stdin.isatty():
        raise click.UsageError("Confirmation is required, and there is no terminal to ask. Pass `--yes` to agree.")
    if not ask_yes_or_no(question):
        print_note("Nothing was done.")
        raise SystemExit(ERROR)
