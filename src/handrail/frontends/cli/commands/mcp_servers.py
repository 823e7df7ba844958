"""``handrail mcp import``, ``install`` and ``list``: the configuration of upstream MCP servers by their operator."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.completing import files
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import confirm, note, one_line, out, out_json, out_rows

if TYPE_CHECKING:
    from handrail.authoring.importing import Imported
    from handrail.upstream.definition import ServerDefinition
    from handrail.upstream.install import Installed, Package


_SECRETS = "secrets"
"""The folder next to the configuration, with a file for each secret of an imported server."""


@click.command("import")
@click.argument("file", required=False, type=click.Path(path_type=Path), shell_complete=files)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Server to import. Can be repeated. Default: all.")
@click.option("--yes", is_flag=True, help="Import and install without asking.")
@click.option("--no-install", is_flag=True, help="Do not install; see handrail mcp install NAME.")
@configured
def import_command(setting: Setting, file: Path | None, names: tuple[str, ...], yes: bool, no_install: bool) -> int:
    """Import the MCP servers of another program.

    FILE is the configuration of Claude Desktop, Claude Code, Cursor, VS Code, Windsurf or Gemini. Without FILE, lists the
    files that were found. The command shows the servers, and writes them into your handrail.toml after you agree. Values that
    look like secrets are stored in separate files next to it, which only you can read.

    If a server would be downloaded by npx, uvx or a similar program, you can install it now. From then on it starts from
    there, without network access. A server has access only to the hosts and files in its configuration.
    """
    from handrail.authoring.importing import known_places, servers_of
    from handrail.store.folders import locate

    workspace = locate(setting.workspace, setting.state, allow_home=setting.allow_home).workspace
    if file is None:
        return _name_files(setting, [(who, path) for who, path in known_places(workspace) if path.is_file()])
    found = servers_of(file, workspace, _secrets_taken(setting))
    if names:
        found = _named(file, found, names)
    _mark_known(setting, found)
    good = [one for one in found if not one.problem]
    if not setting.json:
        _show_imports(found)
    if not good:
        return _nothing_written(setting, found)
    _agreed(setting, yes, f"Write {', '.join(one.name for one in good)} into your configuration?")
    path = _write(setting, good)
    note(f"handrail mcp import: wrote {path}")
    installed = {} if no_install else _install(setting, {one.name for one in good}, yes)
    if setting.json:
        out_json(_import_report(found, [one.name for one in good], installed))
    return OUTPUT


def _named(file: Path, found: Iterable[Imported], names: tuple[str, ...]) -> list[Imported]:
    """Return the servers with these names.

    :raises UsageError: for an unknown name
    """
    named = [one for one in found if one.name in names]
    if unknown := set(names) - {one.name for one in named}:
        raise click.UsageError(f"Server {min(unknown)!r} is not in {file}.")
    return named


def _nothing_written(setting: Setting, found: Iterable[Imported]) -> int:
    if setting.json:
        out_json(_import_report(found, [], {}))
    note("handrail mcp import: No server was imported.")
    return ERROR


def _mark_known(setting: Setting, found: Iterable[Imported]) -> None:
    """Set the problem of each server whose name is already in use."""
    from handrail.authoring.importing import meet

    seen = {definition.name for definition in _definitions(setting)} | read(setting).settings.mcp.servers.keys()
    for one in found:
        if one.problem:
            continue
        if meeting := next((name for name in seen if meet(name, one.name)), None):
            one.problem = f"its name is already in use, or too similar to one in use: {meeting}. Rename one of them"
        seen.add(one.name)


def _install(setting: Setting, names: Collection[str], yes: bool) -> dict[str, str]:
    """Offer to install the servers with these names, and return the installed packages by server name."""
    installed: dict[str, str] = {}
    for definition in _definitions(setting):
        if definition.name in names and (text := _offered(setting, definition, yes)) is not None:
            installed[definition.name] = text
    return installed


def _name_files(setting: Setting, found: list[tuple[str, Path]]) -> int:
    from handrail.authoring.importing import servers_of
    from handrail.contract.errors import UsageError
    from handrail.store.folders import locate

    workspace = locate(setting.workspace, setting.state, allow_home=setting.allow_home).workspace
    rows: list[dict[str, object]] = []
    for who, path in found:
        try:
            names = [one.name for one in servers_of(path, workspace)]
        except UsageError:
            continue
        rows.append({"program": who, "file": str(path), "servers": names})
    if setting.json:
        out_json(rows)
        return OUTPUT
    for row in rows:
        out(f"{row['program']}: handrail mcp import {one_line(str(row['file']))}")
        out(f"  {one_line(', '.join(map(str, row['servers'])))}")  # pyright: ignore[reportArgumentType]
    if not rows:
        out("No MCP servers of other programs were found. Pass a file: handrail mcp import FILE")
    return OUTPUT


def _show_imports(found: Iterable[Imported]) -> None:
    for one in found:
        if one.problem:
            out(f"{one_line(one.name)}: not imported: {one_line(one.problem)}")
            continue
        how = one.table.get("url") or " ".join((one.table["command"], *one.table.get("args", ())))
        out(f"{one_line(one.name)}: {one_line(str(how))}")
        if one.secrets:
            out(f"  secrets: {one_line(', '.join(one.secrets))}")
        if one.variables:
            out(f"  required environment variables: {one_line(', '.join(dict.fromkeys(one.variables.values())))}")
        for left in one.left:
            out(f"  not imported: {one_line(left)}")


def _import_report(found: Iterable[Imported], written: list[str], installed: dict[str, str]) -> dict[str, object]:
    return {
        "written": written,
        "installed": installed,
        "servers": [
            {
                "name": one.name,
                "problem": one.problem or None,
                "secrets": [*one.secrets],
                "variables": [*dict.fromkeys(one.variables.values())],
                "left": one.left,
            }
            for one in found
        ],
    }


def _write(setting: Setting, servers: list[Imported]) -> Path:
    """Add the servers to the operator's configuration, with each secret in a separate file next to it.

    :raises UsageError: if the configuration would be invalid; then nothing is written
    """
    import tomllib

    from handrail.authoring.importing import as_toml
    from handrail.config.settings import Settings
    from handrail.contract.errors import UsageError
    from handrail.store import decisions

    path = _configuration(setting)
    folder = path.parent / _SECRETS
    places = {name: folder / name for one in servers for name in one.secrets}
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        text = before.rstrip("\n") + "\n" * bool(before.strip()) + as_toml(servers, places)
        text.encode("utf-8")
        Settings.model_validate(tomllib.loads(text))
    except (ValueError, OSError) as error:
        raise UsageError(f"Nothing was written, because {path} would be invalid with these servers: {error}") from None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if places:
        folder.mkdir(mode=0o700, exist_ok=True)
    made: list[Path] = []
    try:
        for name, value in ((name, value) for one in servers for name, value in one.secrets.items()):
            if places[name].is_symlink() or decisions.once(places[name], content := value.encode()) != content:
                raise UsageError(f"Nothing was written, because {places[name]} already exists. Run the import again.")
            made.append(places[name])
        decisions.write_private(path.resolve(), text.lstrip("\n").encode())
    except BaseException:
        for place in made:
            place.unlink(missing_ok=True)
        raise
    return path


def _configuration(setting: Setting) -> Path:
    from handrail.config import FILE_NAME, default_folder

    return Path(setting.config).absolute() if setting.config is not None else default_folder() / FILE_NAME


def _secrets_taken(setting: Setting) -> set[str]:
    """Return the names of secrets that are defined, referenced, or still have a file.

    A new secret must not take such a name: it would replace or provide the value of another one.
    """
    folder = _configuration(setting).parent / _SECRETS
    kept = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    settings = read(setting).settings
    return kept | settings.secrets.keys() | set(_named_in(settings.model_dump()))


def _named_in(value: object) -> Iterator[str]:
    """Yield the names in all ``{ secret = "NAME" }`` references of a configuration."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        if isinstance(name := table.get("secret"), str):
            yield name
        for inner in table.values():
            yield from _named_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast("Sequence[object]", value):
            yield from _named_in(inner)


@click.command("install")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Install without asking.")
@click.option(
    "--with", "further", multiple=True, metavar="PACKAGE", help="Further package, such as 'mcp<2'. Can be repeated."
)
@click.option("--scripts", is_flag=True, help="npm: allow packages to run install scripts.")
@configured
def install_command(setting: Setting, name: str, yes: bool, further: tuple[str, ...], scripts: bool) -> int:
    """Install an MCP server that npx or uvx would download.

    The server is installed into the state folder, with the current versions or those in its command, and the hash of each
    file is recorded. From then on it starts from there. If a file has changed, the server does not start. To change the
    version, install it again.
    """
    definition = _definition(setting, name)
    package = _package(definition)
    if package is None:
        note(f"handrail mcp install: {name} downloads nothing at its start. Nothing to install.")
        return ERROR
    package = _with(package, further)
    _agreed(setting, yes, f"Install {package} for {name}? Its code will run here, in a sandbox.")
    done = _installed(setting, definition, package, scripts=scripts)
    if setting.json:
        out_json({"name": name, "package": done.package.name, "version": done.version, "versions": dict(done.versions)})
    else:
        out(
            f"installed {done.package.name} {done.version} for {name} ({done.files:,} files). It starts from there now."
        )
    return OUTPUT


@click.command("list")
@configured
def list_command(setting: Setting) -> int:
    """List the configured MCP servers and their state."""
    rows = [_row(setting, definition) for definition in _definitions(setting)]
    if setting.json:
        out_json(rows)
        return OUTPUT
    out_rows((str(row["name"]), str(row["where"]), str(row["state"])) for row in rows)
    if not rows:
        out("No MCP servers are configured. To import those of other programs: handrail mcp import")
    return OUTPUT


def _row(setting: Setting, definition: ServerDefinition) -> dict[str, object]:
    from handrail.contract.errors import UsageError
    from handrail.registry.pins import StoredPins, reviews
    from handrail.store.folders import locate
    from handrail.upstream.install import package_of, recorded
    from handrail.upstream.source import McpSource

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    row: dict[str, object] = {"name": definition.name, "where": definition.where, "transport": definition.transport}
    try:
        package = package_of(definition)
    except UsageError as problem:
        return row | {"state": f"cannot be installed: {problem}"}
    if package is not None:
        if (found := recorded(definition, folders.state)) is None:
            return row | {"state": f"not installed: handrail mcp install {definition.name}"}
        row |= {"package": found[0], "version": found[1]}
    if definition.missing:
        return row | {"state": definition.missing}
    source = McpSource(definition, folders.state, str(folders.workspace))
    if fault := source.fault():
        return row | {"state": fault}
    if source.listing is None:
        return row | {"state": f"never connected. To connect and see its tools: handrail sources review {source.name}"}
    loaded = source.load()
    tools, pins = [found.tool.spec for found in loaded.tools], StoredPins(folders.state)
    state = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
    if waiting := len(reviews(source.name, tools, pins)):
        state += f", {waiting} to review: handrail sources review {source.name}"
    if loaded.faults:
        state += f"; {len(loaded.faults)} invalid"
    return row | {"tools": len(tools), "waiting": waiting, "state": state}


def _definitions(setting: Setting) -> list[ServerDefinition]:
    from handrail.runtime.secrets import SecretStore
    from handrail.upstream.configured import configured as servers

    config = read(setting)
    return servers(config, SecretStore(dict.fromkeys(config.settings.secrets, "")))


def _definition(setting: Setting, name: str) -> ServerDefinition:
    from handrail.contract.tool.names import nearest

    known = {definition.name: definition for definition in _definitions(setting)}
    if name not in known:
        close = nearest(name, known, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The configured servers are: {', '.join(known) or 'none'}."
        raise click.UsageError(f"MCP server {name!r} is not configured. {hint}")
    return known[name]


def _package(definition: ServerDefinition) -> Package | None:
    from handrail.upstream.install import package_of

    return package_of(definition)


def _with(package: Package, further: tuple[str, ...]) -> Package:
    from dataclasses import replace

    if unfit := [one for one in further if one.startswith("-") or not one.strip()]:
        raise click.UsageError(f"Invalid value for `--with`: {unfit[0]!r}. Expected a package, such as 'mcp<2'.")
    return replace(package, further=(*package.further, *further))


def _installed(setting: Setting, definition: ServerDefinition, package: Package, *, scripts: bool) -> Installed:
    from handrail.store.folders import locate
    from handrail.upstream.install import install

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    note(f"handrail mcp: installing {package} for {definition.name}")
    return install(definition, package, folders.state, str(folders.workspace), scripts=scripts)


def _offered(setting: Setting, definition: ServerDefinition, yes: bool) -> str | None:
    """Install one imported server if it requires it and the user agrees, and return its package, or None."""
    from handrail.contract.errors import UsageError

    try:
        if (package := _package(definition)) is None:
            return None
        if not yes and not confirm(f"Install {package} for {definition.name}?", err=True):
            note(f"To install it later: handrail mcp install {definition.name}")
            return None
        done = _installed(setting, definition, package, scripts=False)
    except UsageError as problem:
        note(f"handrail mcp import: {definition.name} is configured but not installed: {problem}")
        return None
    note(f"handrail mcp import: installed {done.package.name} {done.version} for {definition.name}")
    return f"{done.package.name} {done.version}"


def _agreed(setting: Setting, yes: bool, question: str) -> None:
    """Ask the user to confirm, unless ``yes`` is set. If the user does not agree, end the command.

    :raises UsageError: without a terminal
    """
    if yes:
        return
    if setting.headless or setting.json or not sys.stdin.isatty():
        raise click.UsageError("Confirmation is required, and there is no terminal to ask. Pass `--yes` to agree.")
    if not confirm(question):
        note("Nothing was done.")
        raise SystemExit(ERROR)
