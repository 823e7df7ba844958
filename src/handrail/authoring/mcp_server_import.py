"""The import of MCP servers from files of other programs, as tables of ``handrail.toml``, and the way back.

Values that look like secrets never reach the configuration: each goes into a separate file of mode 0600, and the configuration
names it. Permissions in a file (``autoApprove`` and similar) are reported and left out, since only rules grant permissions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from handrail.config.foreign_server_files import (
    INPUT,
    VARIABLE,
    ForeignMcpServer,
    VsCodeInputDeclaration,
    expand_variables,
    read_env_file,
    read_foreign_server_file,
)
from handrail.config.mcp_settings import SERVER_NAME_PATTERN
from handrail.config.secret_detection import is_secret_name, is_secret_value
from handrail.contract.errors import UsageError

MAX_NAME_CHARS = 100
_SCHEME = re.compile(r"^(Bearer|Basic|Token)\s+(.+)$", re.DOTALL)
_CHOICE = re.compile(
    r"(?i:true|false|yes|no|on|off|none|null|auto|required|optional|oauth2?|basic|bearer|sso|browser|interactive|enabled"
    r"|disabled)|\d{1,3}"
)
_PATH = re.compile(r"(?:~|\.{0,2})(?:/[\w.@ -]+)+/?")
_RANDOM = re.compile(r"(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*\d)[^/.]{16,}")


@dataclass(slots=True)
class ImportedMcpServer:
    """A server from a file of another program.

    :ivar table: its ``[mcp.servers.NAME]``
    :ivar secrets: the secret values, by the names that the table has for them
    :ivar variables: the environment variables with its other secrets, by the names that the table has for them
    :ivar required: further environment variables that the user has to set
    :ivar ignored_keys: the parts that are left out or changed, each with the reason
    :ivar problem: the reason why it cannot be imported; empty if it can
    :ivar is_handrail: whether it is Handrail's own server, which is never imported
    """

    name: str
    table: dict[str, Any] = field(default_factory=dict[str, Any])
    secrets: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    variables: dict[str, str] = field(default_factory=dict[str, str])
    required: list[str] = field(default_factory=list[str])
    ignored_keys: list[str] = field(default_factory=list[str])
    problem: str = ""
    is_handrail: bool = False


class SecretNameAllocator:
    """An allocator of unique names for the secrets of servers, and for the variables that a user sets for them.

    :param taken: names in use, such as those of the operator's own secrets and files
    :param variables: the variables that have other values
    """

    def __init__(self, taken: Iterable[str] = (), variables: Iterable[str] = ()) -> None:
        self._taken = {name.casefold() for name in taken}
        self._variables = {name.casefold() for name in variables}

    def allocate_name(self, *parts: str, is_variable: bool = False) -> str:
        """Return a new name made of ``parts``, unique without regard to case.

        :param is_variable: whether it is also the name of a new environment variable
        """
        written = [re.sub(r"[^A-Za-z0-9_]", "_", part).upper() for part in parts]
        if len(written) > 1 and written[-1].startswith(f"{written[-2]}_"):  # GITHUB_TOKEN of the server github
            del written[-2]
        base = "_".join(written)[:MAX_NAME_CHARS]
        used = self._taken | self._variables if is_variable else self._taken
        name = next(name for name in _iterate_numbered_names(base) if name.casefold() not in used)
        self._taken.add(name.casefold())
        return name


def _iterate_numbered_names(base: str) -> Iterator[str]:
    yield base
    yield from (f"{base}_{number}" for number in itertools.count(2))


def do_server_names_collide(name: str, other: str) -> bool:
    """Return whether two servers cannot exist together.

    That is so if their names differ only in case or punctuation, or if tools of the two could have the same id.
    """
    one, two = (re.sub(r"[-_]+", "-", given.casefold()) for given in (name, other))
    return one == two or name.startswith(f"{other}_") or other.startswith(f"{name}_")


def import_mcp_servers(
    path: Path, workspace: Path, taken: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> list[ImportedMcpServer]:
    """Import the servers of one file.

    :param taken: names of secrets that are in use
    :param workspace: the value of ``${workspaceFolder}``, and the project whose part of Claude Code's file counts
    :param environment: the variables for texts that are written with their present values; None for those of this process
    :raises UsageError: if the file cannot be read or has no servers
    """
    try:
        read = read_foreign_server_file(path, workspace)
    except ValueError as error:
        raise UsageError(f"{path} {error}.") from None
    known = os.environ if environment is None else environment
    names = SecretNameAllocator(taken, itertools.chain(known, _find_variables(read.servers, workspace)))
    importer = _ServerImporter(workspace, names, read.inputs, known)
    return [importer.convert_foreign_server(server) for server in read.servers]


def _find_variables(servers: Iterable[ForeignMcpServer], workspace: Path) -> Iterator[str]:
    """Yield the variables that servers and their files name. A variable for another value must have another name."""
    for server in servers:
        in_file: Mapping[str, str] = {}
        with contextlib.suppress(ValueError, RuntimeError):  # reported where the server is converted
            in_file = read_env_file(workspace / Path(server.env_file).expanduser()) if server.env_file else {}
        for text in (
            server.url,
            server.command,
            server.cwd,
            *server.args,
            *server.env.values(),
            *server.headers.values(),
            *in_file.values(),
            server.oauth.get("client_id", ""),
            *server.oauth.get("scopes", ()),
        ):
            yield from (match[1] for match in VARIABLE.finditer(text))


class _ServerImporter:
    """An importer of the servers of one file."""

    def __init__(
        self,
        workspace: Path,
        names: SecretNameAllocator,
        inputs: Mapping[str, VsCodeInputDeclaration],
        environment: Mapping[str, str],
    ) -> None:
        self._workspace = workspace
        self._names = names
        self._inputs = inputs
        self._environment = environment
        self._variables_of_inputs: dict[str, bool] = {}
        """Whether the value is a secret, by the variable that the user sets."""

    def convert_foreign_server(self, server: ForeignMcpServer) -> ImportedMcpServer:
        """Return one server as a table, or with the reason why it cannot be one."""
        self._variables_of_inputs.clear()  # no other server may refer to them
        found = ImportedMcpServer(_to_name(server.name), ignored_keys=list(server.left_out), problem=server.problem)
        if re.fullmatch(SERVER_NAME_PATTERN, found.name) is None:
            found.name = server.name
            found.problem = "its name has no character that a server name can contain; rename it in the file"
            return found
        if is_handrail(server):
            found.is_handrail = True
            return found
        if found.name != server.name:
            found.ignored_keys.append(f"the name {server.name!r}: a server name has letters, digits, '-' and '_'")
        if not found.problem:
            try:
                self._fill_table(found, _unwrap_remote_bridge(server, found))
            except ValueError as error:
                found.problem = str(error)
        return found

    def _fill_table(self, found: ImportedMcpServer, server: ForeignMcpServer) -> None:
        """Fill in the table of a server.

        :raises ValueError: with the reason why it cannot be imported
        """
        table = found.table
        if server.url:
            table["url"] = self._resolve_and_write(found, "url", server.url)
            _refuse_secret_address(table["url"])
            if server.transport == "sse":
                table["transport"] = "sse"
            if headers := self._write_values(found, server.headers):
                table["headers"] = headers
            if server.oauth:
                self._fill_sign_in(found, server.oauth)
        else:
            table["command"] = self._resolve_and_write(found, "command", server.command)
            args = [self._resolve_and_write(found, "args", one) for one in server.args]
            _refuse_secret_arguments(args)
            if args:
                table["args"] = args
            if env := self._write_values(found, self._all_variables(found, server)):
                table["env"] = env
            self._fill_folder(found, server)
        if not server.enabled:
            table["enabled"] = False
        for key in ("timeout_ms", "connect_timeout_ms"):
            if (value := getattr(server, key)) is not None:
                table[key] = min(value, 3_600_000) if key == "connect_timeout_ms" else value

    def _fill_sign_in(self, found: ImportedMcpServer, oauth: Mapping[str, Any]) -> None:
        table: dict[str, Any] = {}
        for key, value in oauth.items():
            try:
                table[key] = self._resolve_sign_in_value(found, value)
            except ValueError as error:
                found.ignored_keys.append(f"oauth: {error}")
        if table:
            found.table["oauth"] = table

    def _resolve_sign_in_value(self, found: ImportedMcpServer, value: object) -> object:
        if isinstance(value, list):
            return [self._resolve_sign_in_value(found, one) for one in cast("list[object]", value)]
        return self._resolve_and_write(found, "oauth", value) if isinstance(value, str) else value

    def _fill_folder(self, found: ImportedMcpServer, server: ForeignMcpServer) -> None:
        if not server.cwd:
            return
        try:
            found.table["cwd"] = self._resolve_and_write(found, "cwd", server.cwd)
            found.ignored_keys.append(
                "cwd: its program can access this folder if you add it to folders, or read = ['.'] for the workspace"
            )
        except ValueError as error:
            found.ignored_keys.append(f"cwd: {error}")

    def _all_variables(self, found: ImportedMcpServer, server: ForeignMcpServer) -> dict[str, str]:
        """Return the variables of a server, with those of its ``envFile``, which are weaker."""
        if not server.env_file:
            return server.env
        try:
            given = read_env_file(self._workspace / Path(server.env_file).expanduser())
        except (ValueError, RuntimeError) as error:  # a home folder that is not known
            found.ignored_keys.append(f"envFile: {error}")
            return server.env
        found.ignored_keys.append(f"envFile: its {len(given)} variables are written as they are now")
        return {**given, **server.env}

    def _fill_inputs(self, found: ImportedMcpServer, key: str, text: str) -> str:
        """Return a text with each ``${input:ID}`` replaced: by its default, or by a variable that the user sets."""

        def value(match: re.Match[str]) -> str:
            said = self._inputs.get(match[1], VsCodeInputDeclaration())
            secret = said.is_password or is_secret_name(key) or is_secret_name(match[1])
            if said.default and not secret and VARIABLE.search(said.default) is None:
                return said.default
            is_part = secret and INPUT.fullmatch(text) is None and not is_secret_name(key)
            parts = ("mcp", found.name, key, *(["secret"] if is_part else []))  # so that its value is redacted
            name = self._names.allocate_name(*parts, is_variable=True)
            self._variables_of_inputs[name] = secret
            found.required.append(name)
            return f"${{{name}}}"

        return INPUT.sub(value, text)

    def _resolve_and_write(self, found: ImportedMcpServer, what: str, text: str) -> str:
        """Return a text with the present values of its variables, since it is stored in plain text.

        :raises ValueError: for a variable that is not set, or that may be a secret
        """
        given = text

        def fill_input(asked: re.Match[str]) -> str:
            declaration = self._inputs.get(asked[1], VsCodeInputDeclaration())
            if not declaration.default or declaration.is_password or is_secret_name(asked[1]):
                raise ValueError(
                    f"its {what} has {asked[0]}, which is possible only in env and headers; write the value itself, "
                    "or pass it by env"
                )
            return declaration.default

        text = INPUT.sub(fill_input, text)

        def check(name: str, value: str) -> None:
            if is_secret_value(value) or (is_secret_name(name) and not _is_plain(value)):
                raise ValueError(
                    f"its {what} has ${{{name}}}, which looks like a secret, and is stored in plain text; pass it by a "
                    "variable in env or by a header"
                )

        try:
            filled = expand_variables(text, self._environment, check)
        except ValueError as error:
            message = str(error)
            raise ValueError(
                message if message.startswith("its") else f"its {what} {message}; set it, or write the value"
            ) from None
        if filled != given:
            found.ignored_keys.append(f"{what} {given}: written as {filled}")
        return filled

    def _write_values(self, found: ImportedMcpServer, given: Mapping[str, str]) -> dict[str, Any]:
        """Return variables or header fields, each as a text, a reference to a secret, or a text with variables."""
        written: dict[str, Any] = {}
        for key, value in given.items():
            try:
                written[key] = self._write_value(found, key, value)
            except ValueError as error:
                found.ignored_keys.append(f"{key}: {error}")
        return written

    def _write_value(self, found: ImportedMcpServer, key: str, value: str) -> Any:
        """Return the form of one value in the table.

        :raises ValueError: if it has none
        """
        text = self._fill_inputs(found, key, value)
        scheme = _SCHEME.match(text)
        prefix, bare = (f"{scheme[1]} ", scheme[2]) if scheme else ("", text)
        reference = {"prefix": prefix} if prefix else {}
        whole = VARIABLE.fullmatch(bare)
        if whole is not None and whole[2] is None and self._is_secret_variable(key, prefix, whole[1]):
            name = whole[1] if whole[1] in self._variables_of_inputs else self._names.allocate_name(found.name, key)
            found.variables[name] = whole[1]
            return {"secret": name, **reference}
        if (literal := VARIABLE.sub("", bare)) != bare:
            if is_secret_value(literal):
                raise ValueError(f"it has a secret and a variable; write one of them in the file instead of {key}")
            written = self._without_secret_defaults(found, text)
            found.required += [match[1] for match in VARIABLE.finditer(written) if match[2] is None]
            return {"expand": written}
        named = is_secret_name(key) and bare and not _is_plain(bare)
        if bare and (prefix or named or is_secret_value(bare)):
            name = self._names.allocate_name(found.name, key)
            found.secrets[name] = bare
            return {"secret": name, **reference}
        return text

    def _is_secret_variable(self, key: str, prefix: str, variable: str) -> bool:
        """Return whether the name or the present value of a variable says that it is a secret."""
        value = self._environment.get(variable, "")
        if prefix or self._variables_of_inputs.get(variable) or is_secret_value(value):
            return True
        return (is_secret_name(key) or is_secret_name(variable)) and not (value and _is_plain(value))

    @staticmethod
    def _without_secret_defaults(found: ImportedMcpServer, text: str) -> str:
        """Return a text without the defaults that look like secrets."""

        def value(match: re.Match[str]) -> str:
            name, default = match.groups()
            named = is_secret_name(name) and default and not _is_plain(default)
            if not named and not is_secret_value(default or ""):
                return match[0]
            found.ignored_keys.append(f"the default of {name}: it looks like a secret; set the variable {name}")
            return f"${{{name}}}"

        return VARIABLE.sub(value, text)


def _is_plain(value: str) -> bool:
    """Return whether a value is no secret under any name: a choice, a small number or a path."""
    if _CHOICE.fullmatch(value):
        return True
    is_long = value.strip("/").count("/") > 0 or PurePath(value).suffix != ""
    return is_long and _PATH.fullmatch(value) is not None and _RANDOM.search(value) is None


def is_handrail(server: ForeignMcpServer) -> bool:
    """Return whether a server is Handrail's own, which must not be behind itself."""
    if server.url:
        try:
            host = urlsplit(server.url).hostname or ""
        except ValueError:
            return False
        return server.name.casefold() == "handrail" and host in ("localhost", "127.0.0.1", "::1")
    words = [server.command, *server.args]
    for one in server.args:  # the text of a shell
        if " " in one and "handrail" in one:
            try:
                words += shlex.split(one)
            except ValueError:
                words += one.split()
    names = [
        re.split(r"[\[@=<>~]", PurePath(one.replace("\\", "/")).name.lower().removesuffix(".exe"))[0] for one in words
    ]
    if names[0] == "handrail":
        return True
    runner = names[0] in ("uvx", "uv", "pipx", "python", "python3", "py") or re.fullmatch(r"python3?\.\d+", names[0])
    for at, name in enumerate(names[1:], 1):
        if name == "handrail" and (names[at + 1 : at + 2] in (["mcp"], ["acp"]) or (runner and words[at - 1] == "-m")):
            return True
    return False


_BRIDGE_FLAGS = frozenset(("--allow-http", "--debug", "--silent", "--enable-proxy"))
_BRIDGE_OPTIONS = frozenset(("--host", "--auth-timeout"))
"""Options of ``mcp-remote`` about itself, the latter with a value."""


def _unwrap_remote_bridge(server: ForeignMcpServer, found: ImportedMcpServer) -> ForeignMcpServer:
    """Return the remote server that ``mcp-remote`` bridges to, since Handrail reaches it itself; else the same server."""
    words = [server.command, *server.args]
    at = next((at for at, one in enumerate(words) if re.fullmatch(r"(?:.*/)?mcp-remote(?:@[\w.-]+)?", one)), None)
    if at is None or at + 1 >= len(words) or not words[at + 1].startswith(("http://", "https://")):
        return server
    headers: dict[str, str] = {}
    transport = "sse" if words[at + 1].rstrip("/").endswith("/sse") else "http"
    rest = words[at + 2 :]
    while rest:
        if (option := rest.pop(0)) == "--header" and rest:
            name, colon, value = rest.pop(0).partition(":")
            if not colon:
                return server
            # The bridge replaces variables, which its own table of variables has.
            if name.strip().lower() in map(str.lower, headers):
                raise ValueError(f"its headers have {name.strip()!r} twice; remove one of the two")
            headers[name.strip()] = VARIABLE.sub(lambda one: server.env.get(one[1], one[0]), value.strip())
        elif option == "--transport" and rest:
            transport = "sse" if rest.pop(0).startswith("sse") else "http"
        elif option in _BRIDGE_FLAGS or option.isdigit():
            continue
        elif option in _BRIDGE_OPTIONS and rest:
            rest.pop(0)
        else:
            return server
    found.ignored_keys.append("mcp-remote: Handrail reaches the url itself")
    return ForeignMcpServer(
        server.name,
        url=words[at + 1],
        transport=transport,
        headers=headers,
        enabled=server.enabled,
        timeout_ms=server.timeout_ms,
    )


def _refuse_secret_arguments(args: list[str]) -> None:
    """Reject secrets among arguments, which every process of this machine can read.

    :raises ValueError: for a secret
    """
    for index, one in enumerate(args):
        name, equals, value = one.partition("=")
        given = value if equals else args[index + 1] if one.startswith("-") and index + 1 < len(args) else ""
        named = one.startswith("-") and is_secret_name(name) and given and not given.startswith("-")
        if (named and not _is_plain(given)) or is_secret_value(one) or is_secret_value(value):
            raise ValueError(
                f"its argument {name if one.startswith('-') else index + 1} looks like a secret, and every "
                "process of this machine can read arguments; pass it by a variable in env"
            )


def _refuse_secret_address(url: str) -> None:
    """Reject secrets in a URL, which is stored and shown in plain text.

    :raises ValueError: for a secret
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"its url is not valid: {error}") from None
    given = parse_qsl(f"{parts.query}&{parts.fragment}", keep_blank_values=True)
    named = any(value and (is_secret_name(name) or is_secret_value(value)) for name, value in given)
    if named or "@" in parts.netloc or any(is_secret_value(unquote(part)) for part in parts.path.split("/")):
        raise ValueError(
            "its url has a part that looks like a secret, and a url is stored in plain text; pass it by a header"
        )


def _to_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_").lstrip("0123456789-_")[:40].rstrip("-_")


def format_server_tables(servers: Iterable[ImportedMcpServer], secret_files: Mapping[str, Path]) -> str:
    """Return the tables to add to a configuration.

    :param secret_files: the file of each secret's value, by name
    """
    lines: list[str] = []
    for server in servers:
        lines += ["", f"[mcp.servers.{server.name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in server.table.items()]
        references = {name: {"file": str(secret_files[name])} for name in server.secrets}
        references |= {name: {"env": variable} for name, variable in server.variables.items()}
        for name, reference in references.items():
            lines += ["", f"[secrets.{name}]", *(f"{key} = {_toml(value)}" for key, value in reference.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in cast("list[object]", value)) + "]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in cast("dict[str, object]", value).items())
        return f"{{ {pairs} }}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
