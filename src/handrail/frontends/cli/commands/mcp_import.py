"""``handrail mcp import`` and ``export``: the servers of other MCP clients, taken over and given back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from handrail.contract.errors import UsageError
from handrail.contract.struct import Struct, field
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.commands.mcp_servers import (
    confirm_or_exit,
    find_server_package,
    install_server_package,
    load_configured_servers,
)
from handrail.frontends.cli.shell_completion import complete_files
from handrail.frontends.cli.terminal_output import (
    ask_for_line,
    ask_yes_or_no,
    escape_to_one_line,
    print_escaped_line,
    print_json,
    print_stderr_note,
    print_terminal_safe_text,
)

if TYPE_CHECKING:
    from handrail.authoring.mcp_server_import import ImportedMcpServer
    from handrail.config import MergedConfiguration
    from handrail.upstream.server_definition import ServerDefinition

CLIENTS = (
    *("claude-code", "claude-desktop", "cline", "codex", "copilot", "cursor"),
    *("gemini", "opencode", "qwen", "vscode", "windsurf", "zed"),
)
_SECRETS = "secrets"
"""The folder next to the configuration, with a file for each secret of an imported server."""


class ServerImportResult(Struct):
    """The outcome of an import, by server name.

    :ivar installed: the package of each installed server
    :ivar not_installed: the reason for each server whose installation failed
    """

    written: list[str] = field(default_factory=list[str])
    installed: dict[str, str] = field(default_factory=dict[str, str])
    not_installed: dict[str, str] = field(default_factory=dict[str, str])


@click.command("import")
@click.argument("file", required=False, type=click.Path(path_type=Path), shell_complete=complete_files)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Server to import. Can be repeated. Default: all.")
@click.option("--yes", is_flag=True, help="Import and install without asking.")
@click.option("--no-install", is_flag=True, help="Do not install; see handrail mcp install NAME.")
@add_configuration_options
def import_command(
    setting: CommandOptions, file: Path | None, names: tuple[str, ...], yes: bool, no_install: bool
) -> int:
    """Import the MCP servers of other programs.

    FILE is the configuration of Claude Desktop, Claude Code, Cursor, VS Code, Codex, opencode, Zed, Gemini CLI, Qwen Code, Windsurf,
    Cline or Copilot CLI. Without FILE, the command finds these files and asks which to import. Without a terminal, it lists them.

    The command shows the servers, and writes them into your handrail.toml after you agree. A server that cannot be used is left
    out with the reason. Values that look like secrets are stored in separate files next to handrail.toml, which only you can read.

    If a server would be downloaded by npx, uvx or a similar program, you can install it now. From then on it starts from
    there, without network access. A server has access only to the hosts and files in its configuration.

    If a server could not be imported or installed, the command exits with 1.
    """

    workspace = setting.folders.workspace
    files = [file] if file is not None else _choose_files(setting, workspace, yes=yes)
    if files is None:
        return OUTPUT
    found = _read_files(setting, files, workspace)
    if names:
        found = _select_servers(found, names)
    _check_servers(setting, found)
    good = [one for one in found if not one.problem and not one.is_handrail]
    if not setting.json:
        _show_imports(found)
    outcome = ServerImportResult()
    if good:
        confirm_or_exit(setting, yes, f"Write {', '.join(one.name for one in good)} into your configuration?")
        path = _write_servers(setting, good)
        outcome.written = [one.name for one in good]
        print_stderr_note(f"handrail mcp import: wrote {path}")
        if not no_install:
            _install_servers(setting, outcome, yes)
    if setting.json:
        print_json(_import_report(found, outcome))
    print_stderr_note(f"handrail mcp import: {_summarize(found, outcome)}")
    failed = any(one.problem for one in found) or outcome.not_installed
    return ERROR if failed or (not good and not any(one.is_handrail for one in found)) else OUTPUT


def _read_files(setting: CommandOptions, files: Sequence[Path], workspace: Path) -> list[ImportedMcpServer]:
    """Return the servers of all files.

    :raises UsageError: if the only file cannot be read
    """
    from handrail.authoring.mcp_server_import import import_mcp_servers

    taken = _used_secret_names(setting)
    found: list[ImportedMcpServer] = []
    for file in files:
        try:
            servers = import_mcp_servers(file, workspace, taken)
        except UsageError as problem:
            if len(files) == 1:
                raise
            print_stderr_note(f"handrail mcp import: {problem}")
            continue
        taken |= {name for one in servers for name in (*one.secrets, *one.variables, *one.required)}
        found += servers
    return found


def _select_servers(found: Iterable[ImportedMcpServer], names: tuple[str, ...]) -> list[ImportedMcpServer]:
    """Return the servers with these names.

    :raises UsageError: for an unknown name
    """
    named = [one for one in found if one.name in names]
    if unknown := set(names) - {one.name for one in named}:
        raise click.UsageError(f"Server {min(unknown)!r} is not in the file. Leave out the names to see its servers.")
    return named


def _check_servers(setting: CommandOptions, found: Iterable[ImportedMcpServer]) -> None:
    """Check each server as it would be loaded, and set the problem of each that would not be usable."""
    from handrail.authoring.mcp_server_import import do_server_names_collide

    config = load_and_validate_configuration(setting)
    seen = {definition.name for definition in load_configured_servers(setting)}
    seen |= config.settings.mcp.servers.keys() | config.unsound_servers.keys()
    for one in found:
        if one.problem or one.is_handrail:
            continue
        if meeting := next((name for name in seen if do_server_names_collide(name, one.name)), None):
            one.problem = f"its name is already in use, or too similar to one in use: {meeting}. Rename one of them"
            continue
        config, problem = _load_with_server(config, one)
        if problem:
            one.problem = problem
        else:
            seen.add(one.name)


def _load_with_server(config: MergedConfiguration, server: ImportedMcpServer) -> tuple[MergedConfiguration, str]:
    """Return the configuration with one more server, and the reason why this server could not be used; empty if it can."""
    import tomllib

    from handrail.authoring.mcp_server_import import format_server_tables
    from handrail.config.mcp_settings import find_mcp_server_faults
    from handrail.config.operator_settings import Settings
    from handrail.runtime.secret_store import SecretStore
    from handrail.upstream.server_config_loader import load_enabled_servers

    places = {name: Path("/", name) for name in server.secrets}
    try:
        switched_on = replace(server, table={key: value for key, value in server.table.items() if key != "enabled"})
        text = format_server_tables([switched_on], places)
        text.encode("utf-8")
        table = tomllib.loads(text)
        if problems := find_mcp_server_faults(server.name, table["mcp"]["servers"][server.name]):
            return config, "; ".join(f"{place}: {one}" if place else one for place, one in problems.items())
        added = Settings.model_validate(table)
    except ValueError as error:
        return config, str(error)
    mcp = config.settings.mcp
    merged = mcp.model_copy(update={"servers": {**mcp.servers, **added.mcp.servers}})
    wider = replace(config, settings=config.settings.model_copy(update={"mcp": merged}))
    known = SecretStore(dict.fromkeys((*config.settings.secrets, *server.secrets, *server.variables), ""))
    environment = _AnyVariable()
    for definition in load_enabled_servers(wider, known, environment=environment):
        if definition.name == server.name and definition.missing_reason:
            return config, definition.missing_reason
    return wider, ""


class _AnyVariable(dict[str, str]):
    """An environment in which every variable is set, since the user may set it later."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> str:
        return "x"

    def get(self, key: str, default: object = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "x"


def _install_servers(setting: CommandOptions, outcome: ServerImportResult, yes: bool) -> None:
    """Offer to install the written servers that require it."""
    for definition in load_configured_servers(setting):
        if definition.name in outcome.written:
            _offer_server_install(setting, definition, outcome, yes)


def _offer_server_install(
    setting: CommandOptions, definition: ServerDefinition, outcome: ServerImportResult, yes: bool
) -> None:
    """Install one imported server if it requires it and the user agrees."""
    try:
        if (package := find_server_package(definition)) is None:
            return
        if not yes and not ask_yes_or_no(f"Install {package} for {definition.name}?", err=True):
            print_stderr_note(f"To install it later: handrail mcp install {definition.name}")
            return
        done = install_server_package(setting, definition, package, scripts=False)
    except UsageError as problem:
        outcome.not_installed[definition.name] = str(problem)
        print_stderr_note(f"handrail mcp import: {definition.name} is configured but not installed: {problem}")
        return
    outcome.installed[definition.name] = f"{done.package.name} {done.version}"
    print_stderr_note(f"handrail mcp import: installed {done.package.name} {done.version} for {definition.name}")


def _choose_files(setting: CommandOptions, workspace: Path, *, yes: bool) -> list[Path] | None:
    """Return the files to import: with ``--yes`` all that were found, else those that the user chooses; None for none."""
    rows = list(_find_files(workspace))
    if setting.json and not yes:
        print_json([{"program": who, "file": str(path), "servers": names} for who, path, names in rows])
        return None
    if not rows:
        print_escaped_line("No MCP servers of other programs were found. Pass a file: handrail mcp import FILE")
        return None
    is_asking = not yes and not setting.headless and sys.stdin.isatty()
    if not setting.json:
        for number, (who, path, names) in enumerate(rows, 1):
            shown = escape_to_one_line(str(path))
            listed = f"{who}: {shown}" if yes else f"{who}: handrail mcp import {shown}"
            print_escaped_line(f"{number}  {who}: {shown}" if is_asking else listed)
            print_escaped_line(f"   {escape_to_one_line(', '.join(names))}")
    if yes:
        return [path for _, path, _ in rows]
    if not is_asking:
        return None
    while True:
        text = ask_for_line("Files to import, such as 1 3, or all (nothing to stop)")
        if (words := text.replace(",", " ").split()) == ["all"]:
            return [path for _, path, _ in rows]
        if all(word.isascii() and word.isdigit() and 0 < int(word) <= len(rows) for word in words):
            if not (chosen := [rows[int(word) - 1][1] for word in dict.fromkeys(words)]):
                print_stderr_note("Nothing was done.")
            return chosen or None
        print_stderr_note(f"Expected numbers from 1 to {len(rows)}, or all.")


def _find_files(workspace: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield the program, the file and the names of its servers, for each file that has servers other than Handrail."""
    from handrail.authoring.mcp_server_import import is_handrail
    from handrail.config.foreign_server_files import list_candidate_server_files, read_foreign_server_file

    seen: set[Path] = set()
    for who, path in list_candidate_server_files(workspace):
        if (real := path.resolve()) in seen or not path.is_file():
            continue
        seen.add(real)
        try:
            servers = read_foreign_server_file(path, workspace).servers
        except ValueError as problem:
            if " object. Pass the file" not in str(problem):  # a file without servers is not worth a word
                print_stderr_note(f"handrail mcp import: {path} {problem}.")
            continue
        if names := [one.name for one in servers if not is_handrail(one)]:
            yield who, path, names


def _show_imports(found: Iterable[ImportedMcpServer]) -> None:
    for one in found:
        if one.is_handrail:
            print_escaped_line(f"{escape_to_one_line(one.name)}: not imported, since it is Handrail itself")
            continue
        if one.problem:
            print_escaped_line(f"{escape_to_one_line(one.name)}: not imported: {escape_to_one_line(one.problem)}")
            continue
        how = one.table.get("url") or " ".join((one.table["command"], *one.table.get("args", ())))
        print_escaped_line(f"{escape_to_one_line(one.name)}: {escape_to_one_line(str(how))}{_describe_state(one)}")
        if one.secrets:
            print_escaped_line(f"  secrets: {escape_to_one_line(', '.join(one.secrets))}")
        if required := _required_variables(one):
            print_escaped_line(f"  required environment variables: {escape_to_one_line(', '.join(required))}")
        for left in one.ignored_keys:
            print_escaped_line(f"  not imported as it is: {escape_to_one_line(left)}")


def _describe_state(server: ImportedMcpServer) -> str:
    return " (disabled)" if server.table.get("enabled") is False else ""


def _required_variables(server: ImportedMcpServer) -> list[str]:
    return [*dict.fromkeys((*server.variables.values(), *server.required))]


def _summarize(found: Sequence[ImportedMcpServer], outcome: ServerImportResult) -> str:
    """Return the counts of an import, as one sentence."""
    failed = sum(bool(one.problem) for one in found)
    own = sum(one.is_handrail for one in found)
    parts = [f"{len(outcome.written)} of {len(found)} servers imported"]
    parts += [f"{failed} left out"] if failed else []
    parts += ["Handrail itself skipped"] if own else []
    parts += [f"{len(outcome.installed)} installed"] if outcome.installed else []
    parts += [f"{len(outcome.not_installed)} not installed"] if outcome.not_installed else []
    return f"{', '.join(parts)}."


def _import_report(found: Iterable[ImportedMcpServer], outcome: ServerImportResult) -> dict[str, object]:
    return {
        "written": outcome.written,
        "installed": outcome.installed,
        "not_installed": outcome.not_installed,
        "servers": [
            {
                "name": one.name,
                "problem": one.problem or None,
                "is_handrail": one.is_handrail,
                "secrets": [*one.secrets],
                "variables": _required_variables(one),
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
    from handrail.config.layers import ConfigLayer, separate_invalid_servers
    from handrail.contract.text.text_encodings import decode_file_text, decode_settings_text
    from handrail.store import operator_decisions

    path = _configuration_file(setting)
    folder = path.parent / _SECRETS
    places = {name: folder / name for one in servers for name in one.secrets}
    try:
        raw = path.read_bytes() if path.exists() else b""
        before = decode_settings_text(raw).replace("\r\n", "\n")
        text = before.rstrip("\n") + "\n" * bool(before.strip()) + format_server_tables(servers, places)
        ends = text.lstrip("\n").replace("\n", "\r\n" if b"\r\n" in raw else "\n")
        content = decode_file_text(raw).encoding.encode(ends)
        layer = ConfigLayer("configuration", tomllib.loads(text), lambda where: str(path))
    except (ValueError, OSError) as error:
        raise UsageError(f"Nothing was written, because {path} would be invalid with these servers: {error}") from None
    sound, unsound = separate_invalid_servers(layer)
    if faults := [*sound.find_faults(), *(fault for one in servers for fault in unsound.get(one.name, ()))]:
        raise UsageError(f"Nothing was written, because {path} would be invalid with these servers: {faults[0]}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if places:
        folder.mkdir(mode=0o700, exist_ok=True)
    made: list[Path] = []
    try:
        for name, value in ((name, value) for one in servers for name, value in one.secrets.items()):
            if (
                places[name].is_symlink()
                or operator_decisions.create_private_file(places[name], secret := value.encode()) != secret
            ):
                raise UsageError(f"Nothing was written, because {places[name]} already exists. Run the import again.")
            made.append(places[name])
        operator_decisions.write_private_file(path.resolve(), content)
    except BaseException:
        for place in made:
            place.unlink(missing_ok=True)
        raise
    return path


def _configuration_file(setting: CommandOptions) -> Path:
    from handrail.config import FILE_NAME
    from handrail.store.state_folders import default_config_folder

    return Path(setting.config).absolute() if setting.config is not None else default_config_folder() / FILE_NAME


def _used_secret_names(setting: CommandOptions) -> set[str]:
    """Return the names of secrets that are defined, referenced, or still have a file, and of the variables in use.

    A new secret must not take such a name: it would replace or provide the value of another one. Servers that are faulty or
    switched off count too, since they may be used later.
    """
    import tomllib

    from handrail.contract.text.text_encodings import decode_settings_text

    path = _configuration_file(setting)
    folder = path.parent / _SECRETS
    kept = {one.name for one in folder.iterdir()} if folder.is_dir() else set[str]()
    settings = load_and_validate_configuration(setting).settings
    try:
        written: object = tomllib.loads(decode_settings_text(path.read_bytes()))
    except (OSError, ValueError):
        written = {}
    return kept | settings.secrets.keys() | {*_named_values(settings.model_dump())} | {*_named_values(written)}


def _named_values(value: object) -> Iterator[str]:
    """Yield the names in all references of a configuration: of secrets, and of environment variables."""
    from handrail.config.foreign_server_files import VARIABLE

    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        yield from (name for key in ("secret", "env") if isinstance(name := table.get(key), str))
        if isinstance(text := table.get("expand"), str):
            yield from (match[1] for match in VARIABLE.finditer(text))
        for inner in table.values():
            yield from _named_values(inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast("Sequence[object]", value):
            yield from _named_values(inner)


@click.command("export")
@click.argument("client", type=click.Choice(sorted(CLIENTS)), metavar="CLIENT")
@click.option("--servers", "is_servers", is_flag=True, help="Print your servers instead of Handrail's entry.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="Server to print. Can be repeated. Default: all.")
@add_configuration_options
def export_command(setting: CommandOptions, client: str, is_servers: bool, names: tuple[str, ...]) -> int:
    """Print the configuration for another MCP client.

    CLIENT is claude-code, claude-desktop, cline, codex, copilot, cursor, gemini, opencode, qwen, vscode, windsurf or zed. By default
    the command prints an entry that starts Handrail, which then gives the client the tools of all your servers under your rules.
    With --servers it prints your servers themselves, which the client then starts without Handrail.

    Secrets are never printed: each becomes a variable or a placeholder. If a server cannot be printed for this client, the command
    exits with 1.
    """
    from handrail.authoring.mcp_server_export import CLIENT_FILES, GATEWAY, export_client_configuration
    from handrail.config.mcp_settings import UpstreamServerSettings

    settings = load_and_validate_configuration(setting).settings
    if is_servers or names:
        servers = dict(settings.mcp.servers)
        if unknown := set(names) - servers.keys():
            raise click.UsageError(
                f"MCP server {min(unknown)!r} is not configured. List the servers: handrail mcp list"
            )
        servers = {name: one for name, one in servers.items() if not names or name in names}
    else:
        workspace = setting.folders.workspace
        command = _get_own_command()
        args = (
            *command[1:],
            "mcp",
            *(("-C", str(workspace)) if client == "claude-desktop" or setting.workspace else ()),
        )
        servers = {GATEWAY: UpstreamServerSettings(command=command[0], args=args)}
    done = export_client_configuration(client, servers, settings.secrets)
    if setting.json:
        print_json(
            {
                "text": done.text,
                "placeholders": done.placeholders,
                "left_out": done.left_out,
                "ignored": done.ignored,
            }
        )
    else:
        print_terminal_safe_text(done.text, end="")
    print_stderr_note(f"handrail mcp export: add this to {CLIENT_FILES[client]}.")
    for name, how in done.placeholders.items():
        print_stderr_note(f"  {name}: {how}")
    for text in done.ignored:
        print_stderr_note(f"  {text}")
    for name, why in done.left_out.items():
        print_stderr_note(f"  {name}: left out: {why}")
    return ERROR if done.left_out or not servers else OUTPUT


def _get_own_command() -> tuple[str, ...]:
    """Return the command that starts this very program, by its absolute path, since a client may have another PATH."""
    program = Path(sys.argv[0]).absolute()
    if program.name in ("handrail", "handrail.exe") and program.is_file():
        return (str(program),)
    return (sys.executable, "-m", "handrail")
