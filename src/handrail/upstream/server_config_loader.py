"""The upstream MCP servers of a configuration: read from its files and tables, and checked together."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import pydantic

from handrail.config.loader import MergedConfiguration
from handrail.config.mcp_settings import SERVER_NAME_PATTERN, PrefixedSecretReference, UpstreamServerSettings
from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.text.host_names import fault_in_host_pattern, parse_url
from handrail.runtime.secret_store import NO_SECRETS, SecretStore

if TYPE_CHECKING:
    from handrail.upstream.server_definition import OauthSignInOptions, ServerDefinition


# Search for secrets in plain text in a server's configuration, so that they are redacted, whole and in parts.
#
# A server may send back any part of a secret that it received: the token without the scheme, or the password decoded from
# base64.

_NAME = re.compile(r"token|key|secret|passw|auth|credential|cookie|(?:^|[_-])(?:pass|pwd)(?:[_-]|$)", re.IGNORECASE)
_NO_SECRET = re.compile(r"(?:file|path|dir|folder|type|mode|method|name|id|url|uri|scheme|env|var)$", re.IGNORECASE)
"""Endings of names of options that describe a secret and do not contain one."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_WORD = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
MIN_SECRET_CHARS = 8
"""The minimum length in characters of a secret to redact; shorter texts occur in ordinary text."""
MIN_PASSWORD_CHARS = 6
"""The minimum length in characters of a known password."""


def find_secrets_by_name(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in a variable, a header field or a parameter of a URL.

    :param name: the name of the field, which decides whether it may have a secret
    """
    if not _NAME.search(name):
        return
    if len(value) >= MIN_SECRET_CHARS:
        yield value
    if name.lower() == "cookie":
        parts = [part.partition("=")[2].strip() for part in value.split(";")]
        yield from (part for part in parts if len(part) >= MIN_SECRET_CHARS)
        return
    scheme, _, credentials = value.strip().partition(" ")
    credentials = credentials.strip()
    if not scheme.isalpha() or not credentials or "=" in scheme:
        return
    if len(credentials) >= MIN_SECRET_CHARS:
        yield credentials
    if scheme.lower() == "basic":
        yield from _find_basic_secrets(credentials)


def find_url_secrets(url: str) -> Iterator[str]:
    """Yield the secrets in a URL's parameters and before its host, both decoded and as written."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    for name, value in parse_qsl(parts.query):
        yield from find_secrets_by_name(name, value)
    for part in parts.query.split("&"):
        name, _, written = part.partition("=")
        if written != unquote(written):
            yield from find_secrets_by_name(unquote(name), written)
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    for written in {password, unquote(password)}:
        if len(written) >= MIN_PASSWORD_CHARS:
            yield written
    if not colon and parts.scheme in ("http", "https"):  # in other schemes, a name alone is not a secret
        yield from (written for written in {user, unquote(user)} if len(written) >= MIN_SECRET_CHARS)


def find_secrets_in_text_urls(text: str) -> Iterator[str]:
    """Yield the secrets in the URLs of a value, whatever its name."""
    for found in _URL.finditer(text):
        yield from find_url_secrets(found[0])


def find_argument_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the secrets in a program's arguments, such as ``--token X``, ``-e TOKEN=X`` and those in URLs.

    Also ``--token=X``, ``--header 'Authorization: X'`` and ``{"token": "X"}``.
    """
    option = ""
    for argument in arguments:
        yield from find_secrets_in_text_urls(argument)
        name, equals, value = argument.partition("=")
        field, colon, rest = argument.partition(":")
        if argument.startswith("{"):
            yield from _find_json_secrets(argument)
        elif option and not argument.startswith("-"):
            yield from _find_option_secrets(option, argument)
        if equals and _WORD.fullmatch(name):
            yield from _find_option_secrets(name, value)
            field, colon, rest = value.partition(":")  # --header=Authorization:X
        if colon and _WORD.fullmatch(field):
            yield from find_secrets_by_name(field, rest.strip())
        option = name if argument.startswith("-") and not equals else ""


def _find_option_secrets(name: str, value: str) -> Iterator[str]:
    if not _NO_SECRET.search(name):
        yield from find_secrets_by_name(name.lstrip("-"), value)


def _find_json_secrets(text: str) -> Iterator[str]:
    try:
        waiting: list[tuple[str, object]] = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += cast("dict[str, object]", value).items()
        elif isinstance(value, list):
            waiting += ((name, one) for one in cast("list[object]", value))
        elif isinstance(value, str):
            yield from _find_option_secrets(name, value)


def _find_basic_secrets(credentials: str) -> Iterator[str]:
    try:
        both = base64.b64decode(credentials + "=" * (-len(credentials) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return
    if len(both) >= MIN_SECRET_CHARS:
        yield both
    password = both.partition(":")[2]
    if len(password) >= MIN_PASSWORD_CHARS:
        yield password


NamedServers = dict[str, tuple[UpstreamServerSettings, str]]
"""Servers by name, each with its place in the configuration."""


def load_enabled_servers(
    config: MergedConfiguration,
    secrets: SecretStore = NO_SECRETS,
    register_secret: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> list[ServerDefinition]:
    """Return the enabled servers of a configuration.

    :param secrets: the operator's secrets; a server that needs a missing one is included, with the reason
    :param register_secret: called with every value that may be a secret
    :param environment: the variables that the files may name; None for those of this process
    :raises LoadError: with every fault
    """
    known = os.environ if environment is None else environment
    faults: list[Diagnostic] = []
    servers = _read_server_files(config, known, register_secret, faults)
    _add_tables(servers, config.settings.mcp.servers, faults)
    faults += _find_shared_faults(servers)
    if faults:
        raise LoadError(faults)
    return [
        build_definition(name, server, place, secrets, register_secret)
        for name, (server, place) in servers.items()
        if server.enabled
    ]


def _read_server_files(
    config: MergedConfiguration,
    environment: Mapping[str, str],
    register_secret: Callable[[str], None],
    faults: list[Diagnostic],
) -> NamedServers:
    """Read the servers of the files under ``[mcp] files``, and add their faults to ``faults``."""
    if not config.settings.mcp.files:
        return {}

    servers: NamedServers = {}
    for file in config.settings.mcp.files:
        path = Path(file).expanduser()
        if not path.is_absolute():
            path = config.folder / path
        if (workspace := config.workspace) is not None and is_path_inside(path, workspace.path.parent):
            problem = "is in the workspace, where a model can write; move it out of the workspace"
            faults.append(Diagnostic("mcp.files", file, problem))
            continue
        found, problems = read_servers_file(path, environment, register_secret)
        faults += problems
        for name, server in found.items():
            if name in servers:
                problem = f"is also in {servers[name][1]}; rename one of the two"
                faults.append(Diagnostic(str(path), f"mcpServers.{name}", problem))
            else:
                servers[name] = server, str(path)
    return servers


def _add_tables(servers: NamedServers, tables: Mapping[str, UpstreamServerSettings], faults: list[Diagnostic]) -> None:
    """Add the servers of the tables ``[mcp.servers.NAME]``, and their faults to ``faults``.

    A table without command and url changes the server of that name from a file.
    """
    for name, own in tables.items():
        place = f"[mcp.servers.{name}]"
        if own.command is not None or own.url is not None:
            if name in servers:
                problem = f"is also in {servers[name][1]}; remove command and url, or rename one"
                faults.append(Diagnostic(place, "", problem))
            else:
                servers[name] = own, place
        elif name not in servers:
            problem = "has neither command nor url, and no file under [mcp] files has this server; add one of them"
            faults.append(Diagnostic(place, "", problem))
        else:
            base, file = servers[name]
            merged = {**base.model_dump(exclude_unset=True), **own.model_dump(exclude_unset=True)}
            try:
                servers[name] = UpstreamServerSettings.model_validate(merged), f"{place} and {file}"
            except ValueError as error:
                faults.append(Diagnostic(place, "", str(error)))


def build_definition(
    name: str,
    server: UpstreamServerSettings,
    place: str,
    secrets: SecretStore,
    register_secret: Callable[[str], None] = lambda value: None,
) -> ServerDefinition:
    """Build the definition of one server, with the values of its secrets.

    :param place: its place in the configuration, for messages
    :param register_secret: called with every value that may be a secret
    """
    from handrail.upstream.server_definition import ServerDefinition

    missing: list[str] = []

    def value(key: str, given: str | PrefixedSecretReference) -> str:
        if isinstance(given, str):
            found = given
        elif (why := secrets.explain_missing(given.secret)) is not None:
            missing.append(why)
            return ""
        else:
            found = given.prefix + secrets.select([given.secret])[given.secret]
        for one in (*find_secrets_by_name(key, found), *find_secrets_in_text_urls(found)):
            register_secret(one)
        return found

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
        headers={key: value(key, one) for key, one in server.headers.items()},
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

    said = server.oauth
    if said is None:
        return OauthSignInOptions()

    def secret(given: str | PrefixedSecretReference | None) -> str:
        return "" if given is None else value("secret", given)

    return OauthSignInOptions(
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


def _faults_in_addresses(server: UpstreamServerSettings, place: str) -> Iterator[Diagnostic]:
    for host in server.hosts:
        if problem := fault_in_host_pattern(host):
            yield Diagnostic(place, "hosts", problem)
    if server.url is not None:
        try:
            parse_url(server.url)
        except ValueError as error:
            yield Diagnostic(place, "url", str(error))
    for folder in server.folders:
        if not folder.startswith("/"):
            yield Diagnostic(place, "folders", f"{folder!r} is not an absolute path")


def _find_shared_faults(servers: Mapping[str, tuple[UpstreamServerSettings, str]]) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    prefixes: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, (server, place) in servers.items():
        prefix = name if server.prefix is None else server.prefix
        if prefix in prefixes and server.enabled:
            found.append(
                Diagnostic(
                    place, "prefix", f"{prefix!r} is also the prefix of {prefixes[prefix]}; choose another prefix"
                )
            )
        elif server.enabled:
            prefixes[prefix] = name
            places[prefix] = place
        found += _faults_in_addresses(server, place)
    for prefix, place in places.items():
        for other, name in prefixes.items():
            if other and prefix.startswith(f"{other}_"):
                problem = (
                    f"{prefix!r} begins with {other + '_'!r}, as the tools of {name} do, so two tools could have one id"
                )
                found.append(Diagnostic(place, "prefix", f"{problem}; give one of the two servers another prefix"))
    for name, (server, place) in servers.items():
        requires = build_definition(name, server, place, NO_SECRETS).requires
        found += [
            Diagnostic(place, where.removeprefix("requires.fs."), problem) for where, problem in requires.find_faults()
        ]
    return found


def is_path_inside(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is in ``folder``, as written or with links resolved."""
    return path.resolve().is_relative_to(folder.resolve()) or path.absolute().is_relative_to(folder)


# The ``mcpServers`` object in files of other programs, read as upstream servers.
#
# Rights in such a file (``autoApprove``, ``alwaysAllow`` and similar) have no effect here. ``${VARIABLE}`` and
# ``${VARIABLE:-default}`` are replaced by variables of this process, as in those programs.

MAX_SERVERS_FILE_BYTES = 4 * 1024 * 1024
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_TRANSPORTS = {
    "stdio": "stdio",
    "local": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "streamable_http": "http",
    "remote": "http",
    "sse": "sse",
}


def read_servers_file(
    path: Path, environment: Mapping[str, str], register_secret: Callable[[str], None] = lambda value: None
) -> tuple[dict[str, UpstreamServerSettings], list[Diagnostic]]:
    """Read the servers of one file, by name, and its faults.

    :param environment: the variables that it may name
    :param register_secret: called with each value of a variable, since it may be a secret
    """
    table = _read_server_tables(path)
    if isinstance(table, Diagnostic):
        return {}, [table]
    found: dict[str, UpstreamServerSettings] = {}
    faults: list[Diagnostic] = []
    for name, said in table.items():
        where = f"mcpServers.{name[:60]}"
        if re.fullmatch(SERVER_NAME_PATTERN, name) is None:
            faults.append(
                Diagnostic(
                    str(path),
                    where,
                    "is not a valid name; expected letters, digits, '-' and '_', a letter first, at most 40 characters",
                )
            )
        elif not isinstance(said, dict):
            faults.append(Diagnostic(str(path), where, "is not an object"))
        else:
            try:
                found[name] = _parse_server(cast("dict[str, Any]", said), environment, register_secret)
            except pydantic.ValidationError as error:
                problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                faults.append(Diagnostic(str(path), where, problems))
            except ValueError as error:
                faults.append(Diagnostic(str(path), where, str(error)))
    return found, faults


def _read_server_tables(path: Path) -> dict[str, Any] | Diagnostic:
    """Return the object with the servers of a file, by name, or the fault of the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return Diagnostic(str(path), "", f"cannot be read: {error.strerror or error}")
    if len(content) > MAX_SERVERS_FILE_BYTES:
        return Diagnostic(str(path), "", f"is larger than {MAX_SERVERS_FILE_BYTES // 2**20} MiB")
    try:
        whole: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Diagnostic(str(path), "", f"is not valid JSON: {error}")
    table: Any = cast("dict[str, Any]", whole).get("mcpServers") if isinstance(whole, dict) else None
    if table is None and isinstance(whole, dict):
        table = cast("dict[str, Any]", whole).get("servers")
    if not isinstance(table, dict):
        return Diagnostic(str(path), "mcpServers", "is missing; expected an object with a server under each name")
    return cast("dict[str, Any]", table)


def _expand_variables(value: object, environment: Mapping[str, str], register_secret: Callable[[str], None]) -> object:
    """Return a value with the variables in its texts replaced."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _expand_match(match, environment, register_secret), value)
    if isinstance(value, list):
        return [_expand_variables(one, environment, register_secret) for one in cast("list[object]", value)]
    if isinstance(value, dict):
        return {
            key: _expand_variables(one, environment, register_secret)
            for key, one in cast("dict[str, object]", value).items()
        }
    return value


def _parse_program(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments and variables of a program."""
    given = {"args": fields.get("args"), "env": fields.get("env", fields.get("environment"))}
    return {key: value for key, value in given.items() if value}


def _parse_server(
    fields: Mapping[str, Any], environment: Mapping[str, str], register_secret: Callable[[str], None]
) -> UpstreamServerSettings:
    """Parse one server.

    :raises ValueError: if it is not a valid server; may be a pydantic error
    """
    given: dict[str, Any] = {}
    url = fields.get("url", fields.get("serverUrl", fields.get("httpUrl")))
    kind = _TRANSPORTS.get(str(fields.get("type", fields.get("transport", "http" if url else "stdio"))))
    if kind is None:
        raise ValueError(f"type is {fields.get('type')!r}; expected stdio, http or sse")
    command: Any = fields.get("command")
    if isinstance(command, list) and command:  # some programs write the whole command line here
        given["command"], given["args"] = cast("list[Any]", command)[0], [*cast("list[Any]", command)[1:]]
    elif command is not None:
        given["command"] = command
    if url is not None and kind != "stdio":
        given |= {"url": url, "transport": kind}
        if fields.get("headers"):
            given["headers"] = fields["headers"]
    elif command is not None:
        given |= _parse_program(fields)
    else:
        raise ValueError("has neither command nor url; add one of them")
    given = {key: _expand_variables(value, environment, register_secret) for key, value in given.items()}
    if fields.get("disabled") is True or fields.get("enabled") is False:
        given["enabled"] = False
    return UpstreamServerSettings.model_validate_json(json.dumps(given), strict=True)


def _expand_match(match: re.Match[str], environment: Mapping[str, str], register_secret: Callable[[str], None]) -> str:
    name, default = match.groups()
    if name in environment:
        register_secret(environment[name])
        return environment[name]
    if default is None:
        raise ValueError(f"names the variable {name}, which is not set")
    return default
