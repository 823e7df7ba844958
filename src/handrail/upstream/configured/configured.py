"""The upstream MCP servers that a configuration names: read from its files and tables, and checked together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.config.loading import Configuration
from handrail.config.mcp import McpServer, SecretValue
from handrail.contract.errors import Fault, LoadError
from handrail.contract.text.hosts import fault_in_host, read_url
from handrail.runtime.secrets import NO_SECRETS, SecretStore
from handrail.upstream.configured.secrets import secrets_in, secrets_in_arguments, secrets_in_text, secrets_in_url

if TYPE_CHECKING:
    from handrail.upstream.definition import Oauth, ServerDefinition

Named = dict[str, tuple[McpServer, str]]
"""Servers by name, each with the place in the configuration that names it."""


def configured(
    config: Configuration,
    secrets: SecretStore = NO_SECRETS,
    learn: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> list[ServerDefinition]:
    """The enabled servers of a configuration.

    :param secrets: the operator's; a server that needs one that is not there is listed and says so
    :param learn: told every value that may be a secret
    :param environment: for the variables that the files name; None for this process's own
    :raises LoadError: with everything that is wrong
    """
    known = os.environ if environment is None else environment
    faults: list[Fault] = []
    servers = _of_files(config, known, learn, faults)
    _add_tables(servers, config.settings.mcp.servers, faults)
    faults += _faults_together(servers)
    if faults:
        raise LoadError(faults)
    return [
        definition_of(name, server, place, secrets, learn)
        for name, (server, place) in servers.items()
        if server.enabled
    ]


def _of_files(
    config: Configuration, environment: Mapping[str, str], learn: Callable[[str], None], faults: list[Fault]
) -> Named:
    """The servers of the files under ``[mcp] files``. What is wrong with them is added to ``faults``."""
    if not config.settings.mcp.files:
        return {}
    from handrail.upstream.configured.files import servers_in

    servers: Named = {}
    for file in config.settings.mcp.files:
        path = Path(file).expanduser()
        if not path.is_absolute():
            path = config.folder / path
        if (workspace := config.workspace) is not None and is_beneath(path, workspace.path.parent):
            problem = "lies in the workspace, where a model can write; keep it apart from it"
            faults.append(Fault("mcp.files", file, problem))
            continue
        found, problems = servers_in(path, environment, learn)
        faults += problems
        for name, server in found.items():
            if name in servers:
                problem = f"is in {servers[name][1]} too; rename one of the two"
                faults.append(Fault(str(path), f"mcpServers.{name}", problem))
            else:
                servers[name] = server, str(path)
    return servers


def _add_tables(servers: Named, tables: Mapping[str, McpServer], faults: list[Fault]) -> None:
    """Add the servers of the tables ``[mcp.servers.NAME]``. A table without command and url changes the server of that
    name from a file. What is wrong is added to ``faults``."""
    for name, own in tables.items():
        place = f"[mcp.servers.{name}]"
        if own.command is not None or own.url is not None:
            if name in servers:
                problem = f"is in {servers[name][1]} too; leave command and url out, or rename one"
                faults.append(Fault(place, "", problem))
            else:
                servers[name] = own, place
        elif name not in servers:
            problem = "says neither command nor url, and no file under [mcp] files has this server"
            faults.append(Fault(place, "", problem))
        else:
            base, file = servers[name]
            merged = {**base.model_dump(exclude_unset=True), **own.model_dump(exclude_unset=True)}
            try:
                servers[name] = McpServer.model_validate(merged), f"{place} and {file}"
            except ValueError as error:
                faults.append(Fault(place, "", str(error)))


def definition_of(
    name: str, server: McpServer, place: str, secrets: SecretStore, learn: Callable[[str], None] = lambda value: None
) -> ServerDefinition:
    """One server as its owner takes it, with the values of its secrets.

    :param place: where the configuration names it, for messages
    :param learn: told every value that may be a secret
    """
    from handrail.upstream.definition import ServerDefinition

    missing: list[str] = []

    def value(key: str, given: str | SecretValue) -> str:
        if isinstance(given, str):
            found = given
        elif (why := secrets.reason_missing(given.secret)) is not None:
            missing.append(why)
            return ""
        else:
            found = given.prefix + secrets.chosen([given.secret])[given.secret]
        for one in (*secrets_in(key, found), *secrets_in_text(found)):
            learn(one)
        return found

    for one in (*secrets_in_url(server.url or ""), *secrets_in_arguments(server.args)):
        learn(one)
    grants = [grant for grant in ("sampling", "elicitation", "roots") if getattr(server, grant)]
    return ServerDefinition(
        name,
        place,
        "stdio" if server.url is None else server.transport,
        command=server.command or "",
        args=server.args,
        environment={key: value(key, one) for key, one in server.env.items()},
        url=server.url or "",
        headers={key: value(key, one) for key, one in server.headers.items()},
        oauth=_oauth_of(server, value),
        prefix=server.prefix,
        about=server.about,
        hosts=server.hosts,
        read=server.read,
        write=server.write,
        folders=server.folders,
        grants=frozenset(grants),
        side_effects=server.side_effects,
        trust_hints=server.trust_hints,
        timeout_ms=server.timeout_ms,
        connect_timeout_ms=server.connect_timeout_ms,
        missing="; ".join(missing),
    )


def _oauth_of(server: McpServer, value: Callable[[str, str | SecretValue], str]) -> Oauth:
    """How a server is signed in to.

    :param value: gives the text of a setting that may name a secret
    """
    from handrail.upstream.definition import Oauth

    said = server.oauth
    if said is None:
        return Oauth()

    def secret(given: str | SecretValue | None) -> str:
        return "" if given is None else value("secret", given)

    return Oauth(
        said.grant,
        said.client_id,
        secret(said.client_secret),
        said.scopes,
        secret(said.private_key),
        said.signing_algorithm,
        said.client_metadata_url,
        said.issuer,
        said.identity_exchange,
        said.identity_client_id,
        secret(said.identity_token),
    )


def _faults_together(servers: Mapping[str, tuple[McpServer, str]]) -> list[Fault]:
    found: list[Fault] = []
    prefixes: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, (server, place) in servers.items():
        prefix = name if server.prefix is None else server.prefix
        if prefix in prefixes and server.enabled:
            found.append(
                Fault(place, "prefix", f"is {prefix!r}, which is that of {prefixes[prefix]}; each has its own")
            )
        elif server.enabled:
            prefixes[prefix] = name
            places[prefix] = place
        found += [Fault(place, "hosts", problem) for host in server.hosts if (problem := fault_in_host(host))]
        if server.url is not None:
            try:
                read_url(server.url)
            except ValueError as error:
                found.append(Fault(place, "url", str(error)))
        for folder in server.folders:
            if not folder.startswith("/"):
                found.append(Fault(place, "folders", f"{folder!r} is no absolute path"))
    for prefix, place in places.items():
        for other, name in prefixes.items():
            if other and prefix.startswith(f"{other}_"):
                problem = f"{prefix!r} begins with {other + '_'!r}, as the tools of {name} do: two could have one id"
                found.append(Fault(place, "prefix", f"{problem}; give one of the two servers another prefix"))
    for name, (server, place) in servers.items():
        requires = definition_of(name, server, place, NO_SECRETS).requires
        found += [Fault(place, where.removeprefix("requires.fs."), problem) for where, problem in requires.faults()]
    return found


def is_beneath(path: Path, folder: Path) -> bool:
    """Whether ``path`` lies in ``folder``, as it is written or where its links lead."""
    return path.resolve().is_relative_to(folder.resolve()) or path.absolute().is_relative_to(folder)
