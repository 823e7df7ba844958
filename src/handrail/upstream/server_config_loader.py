"""The upstream MCP servers of a configuration: read from its files and tables, and checked together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.config.foreign_server_files import (
    INPUT,
    ForeignMcpServer,
    expand_variables,
    read_env_file,
    read_foreign_server_file,
)
from handrail.config.loader import MergedConfiguration
from handrail.config.mcp_settings import (
    SERVER_NAME_PATTERN,
    ExpandableText,
    PrefixedSecretReference,
    ServerText,
    UpstreamServerSettings,
    find_mcp_server_faults,
)
from handrail.config.secret_detection import (
    MIN_SECRET_CHARS,
    find_argument_secrets,
    find_secrets_in_named_value,
    find_secrets_in_text_urls,
    find_url_secrets,
    is_secret_value,
)
from handrail.contract.errors import Diagnostic
from handrail.contract.struct import Struct, field
from handrail.contract.text.host_names import find_host_pattern_fault, parse_http_url
from handrail.runtime.secret_store import NO_SECRETS, SecretStore

if TYPE_CHECKING:
    from handrail.upstream.server_definition import OauthSignInOptions, ServerDefinition


_REPEATED_SCHEME = re.compile(r"(?i)\A(bearer)\s+(?:bearer\s+)+")
_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE = re.compile(r"[\t\x20-\x7e]*")

NamedServers = dict[str, tuple[UpstreamServerSettings, str]]
"""Servers by name, each with its place in the configuration."""


class _ReadServers(Struct):
    """The servers of a configuration while they are read.

    A fault costs its server and nothing else, so that no command stops for it.

    :ivar faults: the faults of each server, by its name
    :ivar general: the faults of files, and of servers without a valid name
    """

    servers: NamedServers = field(default_factory=dict[str, tuple[UpstreamServerSettings, str]])
    faults: dict[str, list[Diagnostic]] = field(default_factory=dict[str, list[Diagnostic]])
    general: list[Diagnostic] = field(default_factory=list[Diagnostic])

    def add_fault(self, name: str, fault: Diagnostic) -> None:
        """Add a fault of a server."""
        if re.fullmatch(SERVER_NAME_PATTERN, name) is None:
            self.general.append(fault)
        else:
            self.faults.setdefault(name, []).append(fault)


def load_enabled_servers(
    config: MergedConfiguration,
    secrets: SecretStore = NO_SECRETS,
    register_secret: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> list[ServerDefinition]:
    """Return the enabled servers of a configuration. A faulty server is included, with the reason why it cannot be used.

    :param secrets: the operator's secrets; a server that needs a missing one is faulty
    :param register_secret: called with every value that may be a secret
    :param environment: the variables that servers may name; None for those of this process
    """
    from handrail.upstream.server_definition import ServerDefinition

    known = os.environ if environment is None else environment
    read = _read_servers(config, known, register_secret)
    found = [
        build_server_definition(name, server, place, secrets, register_secret, known)
        for name, (server, place) in read.servers.items()
        if server.enabled and name not in read.faults
    ]
    for name, faults in read.faults.items():
        reason = "; ".join(dict.fromkeys(": ".join(filter(None, (one.location, one.problem))) for one in faults))
        found.append(ServerDefinition(name, faults[0].source, "stdio", missing_reason=reason))
    return found


def list_general_config_faults(config: MergedConfiguration) -> list[Diagnostic]:
    """Return the faults that belong to no server: of files under ``[mcp] files``, and of invalid names."""
    return _read_servers(config, os.environ, lambda value: None).general


def _read_servers(
    config: MergedConfiguration, environment: Mapping[str, str], register_secret: Callable[[str], None]
) -> _ReadServers:
    """Return all servers of a configuration, with the faults of each."""
    read = _ReadServers()
    _read_server_files(read, config, environment, register_secret)
    _add_tables(read, config.settings.mcp.servers)
    for name, faults in config.unsound_servers.items():
        for fault in faults:
            read.add_fault(name, fault)
    _find_shared_faults(read)
    return read


def _read_server_files(
    read: _ReadServers,
    config: MergedConfiguration,
    environment: Mapping[str, str],
    register_secret: Callable[[str], None],
) -> None:
    """Read the servers of the files under ``[mcp] files``."""
    for file in config.settings.mcp.files:
        path = Path(file).expanduser()
        if not path.is_absolute():
            path = config.folder / path
        if _is_in_workspace(path, config):
            problem = "is in the workspace, where a model can write; move it out of the workspace"
            read.general.append(Diagnostic("mcp.files", file, problem))
            continue
        try:
            servers = read_foreign_server_file(path, None).servers
        except ValueError as error:
            read.general.append(Diagnostic(str(path), "", str(error)))
            continue
        for server in servers:
            if server.enabled:
                _add_foreign_server(read, server, path, config, environment, register_secret)


def _is_in_workspace(path: Path, config: MergedConfiguration) -> bool:
    return config.workspace_folder is not None and is_path_inside(path, config.workspace_folder)


def _add_foreign_server(
    read: _ReadServers,
    server: ForeignMcpServer,
    file: Path,
    config: MergedConfiguration,
    environment: Mapping[str, str],
    register_secret: Callable[[str], None],
) -> None:
    """Add a server of a file of another program."""
    path = str(file)
    where = f"mcpServers.{server.name[:60]}"
    if re.fullmatch(SERVER_NAME_PATTERN, server.name) is None:
        problem = "is not a valid name; expected letters, digits, '-' and '_', a letter first, at most 40 characters"
        read.general.append(Diagnostic(path, where, problem))
    elif server.name in read.servers:
        problem = f"is also in {read.servers[server.name][1]}; rename one of the two"
        read.add_fault(server.name, Diagnostic(path, where, problem))
    elif server.problem:
        read.add_fault(server.name, Diagnostic(path, where, server.problem))
    else:
        try:
            variables = _read_variables(server, file.parent, config)
            read.servers[server.name] = _to_settings(server, variables, environment, register_secret), path
        except ValueError as error:
            read.add_fault(server.name, Diagnostic(path, where, str(error)))


def _read_variables(server: ForeignMcpServer, folder: Path, config: MergedConfiguration) -> Mapping[str, str]:
    """Return the variables of a server, with those of its ``envFile``, which are weaker.

    :param folder: the folder that the path of its ``envFile`` is relative to
    :raises ValueError: if its ``envFile`` cannot be read, or a model can write it
    """
    if not server.env_file:
        return server.env
    file = folder / Path(server.env_file).expanduser()
    if _is_in_workspace(file, config):
        raise ValueError(f"envFile: {file} is in the workspace, where a model can write; move it out of the workspace")
    try:
        return {**read_env_file(file), **server.env}
    except ValueError as error:
        raise ValueError(f"envFile: {error}") from None


def _to_settings(
    server: ForeignMcpServer,
    variables: Mapping[str, str],
    environment: Mapping[str, str],
    register_secret: Callable[[str], None],
) -> UpstreamServerSettings:
    """Return the settings of a server of another program, with its variables replaced.

    :param variables: the variables that the server gets
    :raises ValueError: if they are not valid, or a variable is not set
    """

    def learn(name: str, value: str) -> None:
        _register_secrets_of(name, value, register_secret)

    def text(value: str) -> str:
        if (asked := INPUT.search(value)) is not None:
            raise ValueError(f"has {asked[0]}, which asks a user; import the file with handrail mcp import instead")
        return expand_variables(value, environment, learn)

    def fields(given: Mapping[str, str]) -> dict[str, str]:
        return {key: text(value) for key, value in given.items()}

    given: dict[str, Any] = {}
    if server.url:
        given = {"url": text(server.url), "transport": server.transport, "headers": fields(server.headers)}
        if server.oauth:
            given["oauth"] = {key: text(one) if key == "client_id" else one for key, one in server.oauth.items()}
    else:
        given = {"command": text(server.command), "args": [text(one) for one in server.args], "env": fields(variables)}
        given["cwd"] = text(server.cwd)
    given |= {key: value for key in ("timeout_ms", "connect_timeout_ms") if (value := getattr(server, key)) is not None}
    if problems := find_mcp_server_faults(server.name, given := {key: one for key, one in given.items() if one}):
        raise ValueError("; ".join(f"{place}: {problem}" if place else problem for place, problem in problems.items()))
    return UpstreamServerSettings.model_validate(given)


def _register_secrets_of(name: str, value: str, register_secret: Callable[[str], None]) -> None:
    """Register the secrets in a value, if its name or its form says that it has any."""
    if is_secret_value(value) and len(value) >= MIN_SECRET_CHARS:
        register_secret(value)
    for one in (*find_secrets_in_named_value(name, value), *find_secrets_in_text_urls(value)):
        register_secret(one)


def _add_tables(read: _ReadServers, tables: Mapping[str, UpstreamServerSettings]) -> None:
    """Add the servers of the tables ``[mcp.servers.NAME]``.

    A table without command and url changes the server of that name from a file.
    """
    for name, own in tables.items():
        place = f"[mcp.servers.{name}]"
        if own.command is not None or own.url is not None:
            if name in read.servers:
                problem = f"is also in {read.servers[name][1]}; remove command and url, or rename one"
                read.add_fault(name, Diagnostic(place, "", problem))
            else:
                read.servers[name] = own, place
        elif name in read.servers:
            base, file = read.servers[name]
            merged = {**base.model_dump(exclude_unset=True), **own.model_dump(exclude_unset=True)}
            if problems := find_mcp_server_faults(name, merged):
                read.add_fault(name, Diagnostic(place, "", "; ".join(problems.values())))
            else:
                read.servers[name] = UpstreamServerSettings.model_validate(merged), f"{place} and {file}"
        elif name not in read.faults and own.enabled:
            problem = "has neither command nor url, and no file under [mcp] files has this server; add one of them"
            read.add_fault(name, Diagnostic(place, "", problem))


def build_server_definition(
    name: str,
    server: UpstreamServerSettings,
    place: str,
    secrets: SecretStore,
    register_secret: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> ServerDefinition:
    """Build the definition of one server, with the values of its secrets.

    :param place: its place in the configuration, for messages
    :param register_secret: called with every value that may be a secret
    :param environment: the variables that its texts may name; None for those of this process
    """
    from handrail.upstream.server_definition import ServerDefinition

    missing: list[str] = []

    def value(key: str, given: ServerText) -> str:
        if isinstance(given, str):
            found = given
        elif isinstance(given, ExpandableText):
            try:
                found = expand_variables(
                    given.expand,
                    os.environ if environment is None else environment,
                    lambda name, one: _register_secrets_of(name, one, register_secret),
                )
            except ValueError as problem:
                missing.append(f"{key} {problem}; set it")
                return ""
        elif (why := secrets.explain_missing_secret(given.secret)) is not None:
            missing.append(why)
            return ""
        else:
            found = given.prefix + secrets.select([given.secret])[given.secret]
        _register_secrets_of(key, found, register_secret)
        return found

    def header(key: str, given: ServerText) -> str:
        text = _REPEATED_SCHEME.sub(r"\1 ", value(key, given).strip())
        if _FIELD_NAME.fullmatch(key) is None or _FIELD_VALUE.fullmatch(text) is None:
            missing.append(f"headers.{key[:60]} has a character that no header field can have; correct it")
            return ""
        return text

    for one in (*find_url_secrets(server.url or ""), *find_argument_secrets(server.args)):
        register_secret(one)
    grants = [grant for grant in ("sampling", "elicitation", "roots") if getattr(server, grant)]
    return ServerDefinition(
        name,
        place,
        "stdio" if server.url is None else server.transport,
        command=server.command or "",
        args=server.args,
        environment={key: value(key, one) for key, one in server.env.items()},
        url=server.url or "",
        headers={key: header(key, one) for key, one in server.headers.items()},
        oauth=_build_oauth(server, value),
        prefix=server.prefix,
        about=server.about,
        hosts=server.hosts,
        tcp=server.tcp,
        read=server.read,
        write=server.write,
        folders=server.folders,
        grants=frozenset(grants),
        side_effects=server.side_effects,
        trust_hints=server.trust_hints,
        url_arguments=server.url_arguments,
        cwd=server.cwd,
        timeout_ms=server.timeout_ms,
        connect_timeout_ms=server.connect_timeout_ms,
        missing_reason="; ".join(missing),
    )


def _build_oauth(
    server: UpstreamServerSettings, value: Callable[[str, str | PrefixedSecretReference], str]
) -> OauthSignInOptions:
    """Build the sign-in settings of a server.

    :param value: returns the text of a setting that may name a secret
    """
    from handrail.upstream.server_definition import OauthSignInOptions

    options = server.oauth
    if options is None:
        return OauthSignInOptions()

    def secret(given: str | PrefixedSecretReference | None) -> str:
        return "" if given is None else value("secret", given)

    return OauthSignInOptions(
        options.grant,
        options.client_id,
        secret(options.client_secret),
        options.scopes,
        secret(options.private_key),
        options.signing_algorithm,
        options.client_metadata_url,
        options.issuer,
        options.identity_exchange,
        options.identity_client_id,
        secret(options.identity_token),
        options.callback_host,
        options.callback_port,
    )


def _faults_in_addresses(server: UpstreamServerSettings, place: str) -> Iterator[Diagnostic]:
    for host in server.hosts:
        if problem := find_host_pattern_fault(host):
            yield Diagnostic(place, "hosts", problem)
    if server.url is not None:
        try:
            parse_http_url(server.url)
        except ValueError as error:
            yield Diagnostic(place, "url", str(error))
    for folder in server.folders:
        if not folder.startswith("/"):
            yield Diagnostic(place, "folders", f"{folder!r} is not an absolute path")


def _find_shared_faults(read: _ReadServers) -> None:
    """Find the faults of addresses and folders, and the prefixes that two servers share."""
    prefixes: dict[str, str] = {}
    for name, (server, place) in read.servers.items():
        if not server.enabled:
            continue
        for fault in _faults_in_addresses(server, place):
            read.add_fault(name, fault)
        requires = build_server_definition(name, server, place, NO_SECRETS).requires
        for where, problem in requires.find_faults():
            read.add_fault(name, Diagnostic(place, where.removeprefix("requires.fs."), problem))
        prefix = name if server.prefix is None else server.prefix
        if prefix in prefixes:
            problem = f"{prefix!r} is also the prefix of {prefixes[prefix]}; choose another prefix"
            read.add_fault(name, Diagnostic(place, "prefix", problem))
        else:
            prefixes[prefix] = name
    for prefix, name in prefixes.items():
        for other, other_name in prefixes.items():
            if other and prefix.startswith(f"{other}_"):
                problem = f"{prefix!r} begins with {other + '_'!r}, as the tools of {other_name} do, so two tools could have one id"
                fault = Diagnostic(
                    read.servers[name][1], "prefix", f"{problem}; set another prefix for one of the two servers"
                )
                read.add_fault(name, fault)


def is_path_inside(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is in ``folder``, as written or with links resolved."""
    return path.resolve().is_relative_to(folder.resolve()) or path.absolute().is_relative_to(folder)
