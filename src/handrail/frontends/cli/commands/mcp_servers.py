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
"""The folder beside the configuration with a file for each secret of an imported server."""


@click.command("import")
@click.argument("file", required=False, type=click.Path(path_type=Path), shell_complete=files)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this server of the file. Can be repeated.")
@click.option("--yes", is_flag=True, help="Do not ask: write them, and install what has to be installed.")
@click.option("--no-install", is_flag=True, help="Write them only; install them later with: handrail mcp install NAME")
@configured
def import_command(setting: Setting, file: Path | None, names: tuple[str, ...], yes: bool, no_install: bool) -> int:
    """Take over the MCP servers of another program.

    FILE is what Claude Desktop, Claude Code, Cursor, VS Code, Windsurf or Gemini keeps its servers in; without it, the
    files that are found are named. The servers are shown, and written into your handrail.toml when you agree. Values that
    look like secrets go into files of their own beside it, which only you can read.

    A server that npx, uvx or the like would fetch is installed at once, when you agree to that too, and is started from
    there from then on, without the network. It reaches no host and no file before its table says so.
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
    """Those of these names.

    :raises UsageError: for a name that the file does not have
    """
    named = [one for one in found if one.name in names]
    if unknown := set(names) - {one.name for one in named}:
        raise click.UsageError(f"{file} has no server {min(unknown)!r}")
    return named


def _nothing_written(setting: Setting, found: Iterable[Imported]) -> int:
    if setting.json:
        out_json(_import_report(found, [], {}))
    note("handrail mcp import: nothing was written")
    return ERROR


def _mark_known(setting: Setting, found: Iterable[Imported]) -> None:
    """Note as a problem where there is a server of a name already."""
    from handrail.authoring.importing import meet

    seen = {definition.name for definition in _definitions(setting)} | read(setting).settings.mcp.servers.keys()
    for one in found:
        if one.problem:
            continue
        if meeting := next((name for name in seen if meet(name, one.name)), None):
            one.problem = f"there is a server of that name already, or of one that meets it: {meeting}; rename one"
        seen.add(one.name)


def _install(setting: Setting, names: Collection[str], yes: bool) -> dict[str, str]:
    """Offer to install the servers of these names. Gives what was installed, by the server's name."""
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
        out("no other program's MCP servers were found; name the file: handrail mcp import FILE")
    return OUTPUT


def _show_imports(found: Iterable[Imported]) -> None:
    for one in found:
        if one.problem:
            out(f"{one_line(one.name)}: left out: {one_line(one.problem)}")
            continue
        how = one.table.get("url") or " ".join((one.table["command"], *one.table.get("args", ())))
        out(f"{one_line(one.name)}: {one_line(str(how))}")
        if one.secrets:
            out(f"  kept apart, as secrets: {one_line(', '.join(one.secrets))}")
        if one.variables:
            out(f"  from variables that you set: {one_line(', '.join(dict.fromkeys(one.variables.values())))}")
        for left in one.left:
            out(f"  not taken over: {one_line(left)}")


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
    """Add the tables to the operator's configuration; the values of secrets lie beside it, each in a file of its own.

    :raises UsageError: when the whole would not be a sound configuration; nothing was written then
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
        raise UsageError(f"with these servers {path} would not be sound, and nothing was written: {error}") from None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if places:
        folder.mkdir(mode=0o700, exist_ok=True)
    made: list[Path] = []
    try:
        for name, value in ((name, value) for one in servers for name, value in one.secrets.items()):
            if places[name].is_symlink() or decisions.once(places[name], content := value.encode()) != content:
                raise UsageError(f"{places[name]} is there already, and nothing was written; import once more")
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
    """Return the names that stand for a secret, or stood for one, or are asked for: the file of a server that was removed
    may still be there, and a name that has no value yet would get that of the imported server.
    """
    folder = _configuration(setting).parent / _SECRETS
    kept = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    settings = read(setting).settings
    return kept | settings.secrets.keys() | set(_named_in(settings.model_dump()))


def _named_in(value: object) -> Iterator[str]:
    """Yield the names that ``{ secret = "NAME" }`` asks for anywhere in a configuration."""
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
@click.option("--yes", is_flag=True, help="Do not ask; you know what is fetched.")
@click.option(
    "--with", "further", multiple=True, metavar="PACKAGE", help="Install this beside it, as 'mcp<2'. Can be repeated."
)
@click.option("--scripts", is_flag=True, help="npm: let packages run programs of their own while they are installed.")
@configured
def install_command(setting: Setting, name: str, yes: bool, further: tuple[str, ...], scripts: bool) -> int:
    """Install an MCP server that npx, uvx or the like would fetch at every start.

    It goes into a folder of its own in the state folder, with the versions that are current now or that its command names,
    and what each file is to be is written down. From then on it is started from there; a file that is not as it was
    installed keeps it from starting. Install it again for another version.
    """
    definition = _definition(setting, name)
    package = _package(definition)
    if package is None:
        note(f"handrail mcp install: {name} fetches nothing when it is started; there is nothing to install")
        return ERROR
    package = _with(package, further)
    _agreed(setting, yes, f"Install {package} for {name}? Its code will run here, in a sandbox.")
    done = _installed(setting, definition, package, scripts=scripts)
    if setting.json:
        out_json({"name": name, "package": done.package.name, "version": done.version, "versions": dict(done.versions)})
    else:
        out(
            f"installed {done.package.name} {done.version} for {name}, {done.files:,} files; it is started from there now"
        )
    return OUTPUT


@click.command("list")
@configured
def list_command(setting: Setting) -> int:
    """List the MCP servers that are configured, and what each waits for."""
    rows = [_row(setting, definition) for definition in _definitions(setting)]
    if setting.json:
        out_json(rows)
        return OUTPUT
    out_rows((str(row["name"]), str(row["where"]), str(row["state"])) for row in rows)
    if not rows:
        out("no MCP server is configured; handrail mcp import takes those of other programs over")
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
            return row | {"state": f"to be installed: handrail mcp install {definition.name}"}
        row |= {"package": found[0], "version": found[1]}
    if definition.missing:
        return row | {"state": definition.missing}
    source = McpSource(definition, folders.state, str(folders.workspace))
    if fault := source.fault():
        return row | {"state": fault}
    if source.listing is None:
        return row | {"state": f"never connected; connect it and see its tools: handrail sources review {source.name}"}
    loaded = source.load()
    tools, pins = [found.tool.spec for found in loaded.tools], StoredPins(folders.state)
    state = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
    if waiting := len(reviews(source.name, tools, pins)):
        state += f", {waiting} to be reviewed: handrail sources review {source.name}"
    if loaded.faults:
        state += f"; {len(loaded.faults)} of what it lists cannot be used"
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
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known) or 'none'}"
        raise click.UsageError(f"no MCP server {name!r} is configured; {hint}")
    return known[name]


def _package(definition: ServerDefinition) -> Package | None:
    from handrail.upstream.install import package_of

    return package_of(definition)


def _with(package: Package, further: tuple[str, ...]) -> Package:
    from dataclasses import replace

    if unfit := [one for one in further if one.startswith("-") or not one.strip()]:
        raise click.UsageError(f"{unfit[0]!r} is no package")
    return replace(package, further=(*package.further, *further))


def _installed(setting: Setting, definition: ServerDefinition, package: Package, *, scripts: bool) -> Installed:
    from handrail.store.folders import locate
    from handrail.upstream.install import install

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    note(f"handrail mcp: installing {package} for {definition.name}")
    return install(definition, package, folders.state, str(folders.workspace), scripts=scripts)


def _offered(setting: Setting, definition: ServerDefinition, yes: bool) -> str | None:
    """Install one imported server where it has to be and a person agrees; what was installed, None for nothing."""
    from handrail.contract.errors import UsageError

    try:
        if (package := _package(definition)) is None:
            return None
        if not yes and not confirm(f"Install {package} for {definition.name}?", err=True):
            note(f"later: handrail mcp install {definition.name}")
            return None
        done = _installed(setting, definition, package, scripts=False)
    except UsageError as problem:
        note(f"handrail mcp import: {definition.name} is configured and not installed: {problem}")
        return None
    note(f"handrail mcp import: installed {done.package.name} {done.version} for {definition.name}")
    return f"{done.package.name} {done.version}"


def _agreed(setting: Setting, yes: bool, question: str) -> None:
    """:raises UsageError: where nobody can be asked; ends the command where the person says no"""
    if yes:
        return
    if setting.headless or setting.json or not sys.stdin.isatty():
        raise click.UsageError("a person agrees to this; say --yes if you are that person")
    if not confirm(question):
        note("nothing was done")
        raise SystemExit(ERROR)
