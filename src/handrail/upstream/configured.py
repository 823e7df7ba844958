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

from handrail.config.loading import Configuration
from handrail.config.mcp import NAME, McpServer, SecretValue
from handrail.contract.errors import Fault, LoadError
from handrail.contract.text.hosts import fault_in_host, read_url
from handrail.runtime.secrets import NO_SECRETS, SecretStore

if TYPE_CHECKING:
    from handrail.upstream.definition import Oauth, ServerDefinition


# Search for secrets in plain text in a server's configuration, so that they are redacted, whole and in parts.
#
# A server may send back any part of a secret that it received: the token without the scheme, or the password decoded from
# base64.

_NAME = re.compile(r"token|key|secret|passw|auth|credential|cookie|(?:^|[_-])(?:pass|pwd)(?:[_-]|$)", re.IGNORECASE)
_NO_SECRET = re.compile(r"(?:file|path|dir|folder|type|mode|method|name|id|url|uri|scheme|env|var)$", re.IGNORECASE)
"""Endings of names of options that describe a secret and do not contain one."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_WORD = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
LEAST = 8
"""The minimum length in characters of a secret to redact; shorter texts occur in ordinary text."""
LEAST_PASSWORD = 6
"""The minimum length in characters of a known password."""


def secrets_in(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in a variable, a header field or a parameter of a URL.

    :param name: the name of the field, which decides whether it may have a secret
    """
    if not _NAME.search(name):
        return
    if len(value) >= LEAST:
        yield value
    if name.lower() == "cookie":
        parts = [part.partition("=")[2].strip() for part in value.split(";")]
        yield from (part for part in parts if len(part) >= LEAST)
        return
    scheme, _, credentials = value.strip().partition(" ")
    credentials = credentials.strip()
    if not scheme.isalpha() or not credentials or "=" in scheme:
        return
    if len(credentials) >= LEAST:
        yield credentials
    if scheme.lower() == "basic":
        yield from _of_basic(credentials)


def secrets_in_url(url: str) -> Iterator[str]:
    """Yield the secrets in a URL's parameters and before its host, both decoded and as written."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    for name, value in parse_qsl(parts.query):
        yield from secrets_in(name, value)
    for part in parts.query.split("&"):
        name, _, written = part.partition("=")
        if written != unquote(written):
            yield from secrets_in(unquote(name), written)
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    for written in {password, unquote(password)}:
        if len(written) >= LEAST_PASSWORD:
            yield written
    if not colon and parts.scheme in ("http", "https"):  # in other schemes, a name alone is not a secret
        yield from (written for written in {user, unquote(user)} if len(written) >= LEAST)


def secrets_in_text(text: str) -> Iterator[str]:
    """Yield the secrets in the URLs of a value, whatever its name."""
    for found in _URL.finditer(text):
        yield from secrets_in_url(found[0])


def secrets_in_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the secrets in a program's arguments, such as ``--token X``, ``-e TOKEN=X`` and those in URLs.

    Also ``--token=X``, ``--header 'Authorization: X'`` and ``{"token": "X"}``.
    """
    option = ""
    for argument in arguments:
        yield from secrets_in_text(argument)
        name, equals, value = argument.partition("=")
        field, colon, rest = argument.partition(":")
        if argument.startswith("{"):
            yield from _of_json(argument)
        elif option and not argument.startswith("-"):
            yield from _of_option(option, argument)
        if equals and _WORD.fullmatch(name):
            yield from _of_option(name, value)
            field, colon, rest = value.partition(":")  # --header=Authorization:X
        if colon and _WORD.fullmatch(field):
            yield from secrets_in(field, rest.strip())
        option = name if argument.startswith("-") and not equals else ""


def _of_option(name: str, value: str) -> Iterator[str]:
    if not _NO_SECRET.search(name):
        yield from secrets_in(name.lstrip("-"), value)


def _of_json(text: str) -> Iterator[str]:
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
            yield from _of_option(name, value)


def _of_basic(credentials: str) -> Iterator[str]:
    try:
        both = base64.b64decode(credentials + "=" * (-len(credentials) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return
    if len(both) >= LEAST:
        yield both
    password = both.partition(":")[2]
    if len(password) >= LEAST_PASSWORD:
        yield password


Named = dict[str, tuple[McpServer, str]]
"""Servers by name, each with its place in the configuration."""


def configured(
    config: Configuration,
    secrets: SecretStore = NO_SECRETS,
    learn: Callable[[str], None] = lambda value: None,
    environment: Mapping[str, str] | None = None,
) -> list[ServerDefinition]:
    """Return the enabled servers of a configuration.

    :param secrets: the operator's secrets; a server that needs a missing one is included, with the reason
    :param learn: called with every value that may be a secret
    :param environment: the variables that the files may name; None for those of this process
    :raises LoadError: with every fault
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
    """Read the servers of the files under ``[mcp] files``, and add their faults to ``faults``."""
    if not config.settings.mcp.files:
        return {}

    servers: Named = {}
    for file in config.settings.mcp.files:
        path = Path(file).expanduser()
        if not path.is_absolute():
            path = config.folder / path
        if (workspace := config.workspace) is not None and is_beneath(path, workspace.path.parent):
            problem = "is in the workspace, where a model can write; move it out of the workspace"
            faults.append(Fault("mcp.files", file, problem))
            continue
        found, problems = servers_in(path, environment, learn)
        faults += problems
        for name, server in found.items():
            if name in servers:
                problem = f"is also in {servers[name][1]}; rename one of the two"
                faults.append(Fault(str(path), f"mcpServers.{name}", problem))
            else:
                servers[name] = server, str(path)
    return servers


def _add_tables(servers: Named, tables: Mapping[str, McpServer], faults: list[Fault]) -> None:
    """Add the servers of the tables ``[mcp.servers.NAME]``, and their faults to ``faults``.

    A table without command and url changes the server of that name from a file.
    """
    for name, own in tables.items():
        place = f"[mcp.servers.{name}]"
        if own.command is not None or own.url is not None:
            if name in servers:
                problem = f"is also in {servers[name][1]}; remove command and url, or rename one"
                faults.append(Fault(place, "", problem))
            else:
                servers[name] = own, place
        elif name not in servers:
            problem = "has neither command nor url, and no file under [mcp] files has this server; add one of them"
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
    """Build the definition of one server, with the values of its secrets.

    :param place: its place in the configuration, for messages
    :param learn: called with every value that may be a secret
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
    """Build the sign-in settings of a server.

    :param value: returns the text of a setting that may name a secret
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


def _faults_in_addresses(server: McpServer, place: str) -> Iterator[Fault]:
    for host in server.hosts:
        if problem := fault_in_host(host):
            yield Fault(place, "hosts", problem)
    if server.url is not None:
        try:
            read_url(server.url)
        except ValueError as error:
            yield Fault(place, "url", str(error))
    for folder in server.folders:
        if not folder.startswith("/"):
            yield Fault(place, "folders", f"{folder!r} is not an absolute path")


def _faults_together(servers: Mapping[str, tuple[McpServer, str]]) -> list[Fault]:
    found: list[Fault] = []
    prefixes: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, (server, place) in servers.items():
        prefix = name if server.prefix is None else server.prefix
        if prefix in prefixes and server.enabled:
            found.append(
                Fault(place, "prefix", f"{prefix!r} is also the prefix of {prefixes[prefix]}; choose another prefix")
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
                found.append(Fault(place, "prefix", f"{problem}; give one of the two servers another prefix"))
    for name, (server, place) in servers.items():
        requires = definition_of(name, server, place, NO_SECRETS).requires
        found += [Fault(place, where.removeprefix("requires.fs."), problem) for where, problem in requires.faults()]
    return found


def is_beneath(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is in ``folder``, as written or with links resolved."""
    return path.resolve().is_relative_to(folder.resolve()) or path.absolute().is_relative_to(folder)


# The ``mcpServers`` object in files of other programs, read as upstream servers.
#
# Rights in such a file (``autoApprove``, ``alwaysAllow`` and similar) have no effect here. ``${VARIABLE}`` and
# ``${VARIABLE:-default}`` are replaced by variables of this process, as in those programs.

MAX_BYTES = 4 * 1024 * 1024
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


def servers_in(
    path: Path, environment: Mapping[str, str], learn: Callable[[str], None] = lambda value: None
) -> tuple[dict[str, McpServer], list[Fault]]:
    """Read the servers of one file, by name, and its faults.

    :param environment: the variables that it may name
    :param learn: called with each value of a variable, since it may be a secret
    """
    table = _table_of(path)
    if isinstance(table, Fault):
        return {}, [table]
    found: dict[str, McpServer] = {}
    faults: list[Fault] = []
    for name, said in table.items():
        where = f"mcpServers.{name[:60]}"
        if re.fullmatch(NAME, name) is None:
            faults.append(
                Fault(
                    str(path),
                    where,
                    "is not a valid name; expected letters, digits, '-' and '_', a letter first, at most 40 characters",
                )
            )
        elif not isinstance(said, dict):
            faults.append(Fault(str(path), where, "is not an object"))
        else:
            try:
                found[name] = _server(cast("dict[str, Any]", said), environment, learn)
            except pydantic.ValidationError as error:
                problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                faults.append(Fault(str(path), where, problems))
            except ValueError as error:
                faults.append(Fault(str(path), where, str(error)))
    return found, faults


def _table_of(path: Path) -> dict[str, Any] | Fault:
    """Return the object with the servers of a file, by name, or the fault of the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return Fault(str(path), "", f"cannot be read: {error.strerror or error}")
    if len(content) > MAX_BYTES:
        return Fault(str(path), "", f"is larger than {MAX_BYTES // 2**20} MiB")
    try:
        whole: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Fault(str(path), "", f"is not valid JSON: {error}")
    table: Any = cast("dict[str, Any]", whole).get("mcpServers") if isinstance(whole, dict) else None
    if table is None and isinstance(whole, dict):
        table = cast("dict[str, Any]", whole).get("servers")
    if not isinstance(table, dict):
        return Fault(str(path), "mcpServers", "is missing; expected an object with a server under each name")
    return cast("dict[str, Any]", table)


def _filled(value: object, environment: Mapping[str, str], learn: Callable[[str], None]) -> object:
    """Return a value with the variables in its texts replaced."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _value(match, environment, learn), value)
    if isinstance(value, list):
        return [_filled(one, environment, learn) for one in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _filled(one, environment, learn) for key, one in cast("dict[str, object]", value).items()}
    return value


def _arguments(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments and variables of a program."""
    given = {"args": said.get("args"), "env": said.get("env", said.get("environment"))}
    return {key: value for key, value in given.items() if value}


def _server(said: Mapping[str, Any], environment: Mapping[str, str], learn: Callable[[str], None]) -> McpServer:
    """Parse one server.

    :raises ValueError: if it is not a valid server; may be a pydantic error
    """
    given: dict[str, Any] = {}
    url = said.get("url", said.get("serverUrl", said.get("httpUrl")))
    kind = _TRANSPORTS.get(str(said.get("type", said.get("transport", "http" if url else "stdio"))))
    if kind is None:
        raise ValueError(f"type is {said.get('type')!r}; expected stdio, http or sse")
    command: Any = said.get("command")
    if isinstance(command, list) and command:  # some programs write the whole command line here
        given["command"], given["args"] = cast("list[Any]", command)[0], [*cast("list[Any]", command)[1:]]
    elif command is not None:
        given["command"] = command
    if url is not None and kind != "stdio":
        given |= {"url": url, "transport": kind}
        if said.get("headers"):
            given["headers"] = said["headers"]
    elif command is not None:
        given |= _arguments(said)
    else:
        raise ValueError("has neither command nor url; add one of them")
    given = {key: _filled(value, environment, learn) for key, value in given.items()}
    if said.get("disabled") is True or said.get("enabled") is False:
        given["enabled"] = False
    return McpServer.model_validate_json(json.dumps(given), strict=True)


def _value(match: re.Match[str], environment: Mapping[str, str], learn: Callable[[str], None]) -> str:
    name, default = match.groups()
    if name in environment:
        learn(environment[name])
        return environment[name]
    if default is None:
        raise ValueError(f"names the variable {name}, which is not set")
    return default
