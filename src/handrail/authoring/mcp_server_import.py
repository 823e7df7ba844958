"""The import of MCP servers from files of other programs, as tables of ``handrail.toml``.

It reads the files of Claude Desktop and Claude Code, Cursor, VS Code, Windsurf, Gemini and every other program that writes an
object with a server under each name. Values that look like secrets never reach the configuration: each goes into a separate
file of mode 0600, and the configuration names it. Permissions in a file (``autoApprove`` and similar) are reported and left
out, since only rules grant permissions.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from handrail.config.mcp_settings import SERVER_NAME_PATTERN
from handrail.contract.errors import UsageError
from handrail.contract.text.text_encodings import read_settings_text

MAX_BYTES = 16 * 1024 * 1024
MAX_NAME_CHARS = 100
SECRET_NAME = re.compile(r"token|key|secret|passw|pwd|auth|credential|cookie|dsn|connection_?string", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"^(sk-|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|AKIA|ya29\.|eyJ)[\w.-]{8,}|^[A-Za-z][\w+.-]*://[^/\s:@]*:[^/\s@]+@"
    r"|(?i:(?:^|[?&;\s])[\w.-]*(?:token|secret|key|passwo?r?d|pwd)\s*=\s*[^\s&;]"
    r"|^(?:(?:proxy-)?authorization|cookie|[\w-]*(?:token|secret|key))\s*:\s*\S)"
)
"""Tokens by their first characters, and a password or key in a URL, a connection string, an assignment or a header field."""
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-[^}]*)?\}")
_INPUT = re.compile(r"\$\{input:([\w.-]+)\}")
_PLACE = re.compile(r"\$\{(workspaceFolder|userHome|pathSeparator|/)\}")
_SCHEME = re.compile(r"^(Bearer|Basic|Token)\s+(.+)$")
_TRANSPORTS = {
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "streamable_http": "http",
    "sse": "sse",
}
_PERMISSION_KEYS = ("autoApprove", "alwaysAllow", "trust", "includeTools", "excludeTools", "tools", "disabledTools")
_KNOWN_KEYS = frozenset(
    {
        "command",
        "args",
        "env",
        "environment",
        "url",
        "serverUrl",
        "httpUrl",
        "headers",
        "type",
        "transport",
        "disabled",
        "enabled",
        "timeout",
        *_PERMISSION_KEYS,
    }
)


@dataclass(slots=True)
class ImportedMcpServer:
    """A server from a file of another program.

    :ivar table: its ``[mcp.servers.NAME]``
    :ivar secrets: the secret values, by the names that the table has for them
    :ivar variables: the environment variables with its other secrets, by the names that the table has for them
    :ivar ignored_keys: the parts that are left out or changed, each with the reason
    :ivar problem: the reason why it cannot be imported; empty if it can
    """

    name: str
    table: dict[str, Any] = field(default_factory=dict[str, Any])
    secrets: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    variables: dict[str, str] = field(default_factory=dict[str, str])
    ignored_keys: list[str] = field(default_factory=list[str])
    problem: str = ""


class SecretNameAllocator:
    """An allocator of unique names for the secrets of servers.

    :param taken: names in use, such as those of the operator's own secrets and files
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {name.casefold() for name in taken}

    def allocate_name(self, *parts: str) -> str:
        """Return a new name made of ``parts``, unique without regard to case."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", "_".join(parts)).upper()[:MAX_NAME_CHARS]
        name = next(name for name in _numbered(base) if name.casefold() not in self._taken)
        self._taken.add(name.casefold())
        return name


def _numbered(base: str) -> Iterator[str]:
    yield base
    yield from (f"{base}_{number}" for number in count(2))


def do_server_names_collide(name: str, other: str) -> bool:
    """Return whether two servers cannot exist together.

    That is so if their names differ only in case or punctuation, or if tools of the two could have the same id.
    """
    one, two = (re.sub(r"[-_]+", "-", given.casefold()) for given in (name, other))
    return one == two or name.startswith(f"{other}_") or other.startswith(f"{name}_")


def list_foreign_server_files(workspace: Path) -> list[tuple[str, Path]]:
    """Return the files in which other programs keep their servers, whether they exist or not."""
    home = Path.home()
    own = {"darwin": home / "Library/Application Support", "win32": Path(os.environ.get("APPDATA", home))}
    config = own.get(sys.platform, Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config"))
    return [
        ("Claude Desktop", config / "Claude/claude_desktop_config.json"),
        ("Claude Code", home / ".claude.json"),
        ("Claude Code, this project", workspace / ".mcp.json"),
        ("Cursor", home / ".cursor/mcp.json"),
        ("Cursor, this project", workspace / ".cursor/mcp.json"),
        ("VS Code", config / "Code/User/mcp.json"),
        ("VS Code, this project", workspace / ".vscode/mcp.json"),
        ("Windsurf", home / ".codeium/windsurf/mcp_config.json"),
        ("Gemini", home / ".gemini/settings.json"),
    ]


def import_mcp_servers(path: Path, workspace: Path, taken: Iterable[str] = ()) -> list[ImportedMcpServer]:
    """Import the servers of one file.

    :param taken: names of secrets that are in use
    :param workspace: the value of ``${workspaceFolder}``, and the project whose part of Claude Code's file counts
    :raises UsageError: if the file cannot be read or has no servers
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}. Check the path and its permissions."
        ) from None
    if len(content) > MAX_BYTES:
        raise UsageError(
            f"{path} is too large. The limit is {MAX_BYTES // 2**20} MiB. Give a configuration file of MCP servers."
        )
    try:
        whole: Any = json.loads(
            _without_comments(read_settings_text(content)), object_pairs_hook=_reject_duplicate_keys
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}. Correct the file, or give another one.") from None
    tables = list(_find_server_tables(whole, workspace))
    if not tables:
        raise UsageError(f'{path} has no "mcpServers" (or "servers") object. Give the file that has the servers.')
    names = SecretNameAllocator(taken)
    return [_import_server(str(name), said, workspace, names) for table in tables for name, said in table.items()]


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, and reject duplicate keys, since programs differ in which value they use.

    :raises ValueError: for a duplicate key
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} occurs twice in one object; remove one of the two")
    return found


def _find_server_tables(whole: object, workspace: Path) -> Iterable[Mapping[str, Any]]:
    if not isinstance(whole, dict):
        return
    fields = cast("dict[str, Any]", whole)
    projects: Any = fields.get("projects")
    inner: Any = cast("dict[str, Any]", projects).get(str(workspace)) if isinstance(projects, dict) else None
    more: Any = fields.get("mcp")
    places = (fields.get("mcpServers"), fields.get("servers"), inner, more)
    for place in places:
        table: Any = place
        if (place is inner or place is more) and isinstance(place, dict):
            table = cast("dict[str, Any]", place).get("mcpServers", cast("dict[str, Any]", place).get("servers"))
        if isinstance(table, dict) and table:
            yield cast("dict[str, Any]", table)


def _import_server(name: str, said: object, workspace: Path, names: SecretNameAllocator) -> ImportedMcpServer:
    found = ImportedMcpServer(_to_name(name))
    if not found.name or re.fullmatch(SERVER_NAME_PATTERN, found.name) is None:
        found.name, found.problem = name, "its name has no letters that a server name can have; rename it in the file"
        return found
    if found.name != name:
        found.ignored_keys.append(f"the name {name!r}: a server name has letters, digits, '-' and '_'")
    if not isinstance(said, dict):
        found.problem = "it is not an object"
        return found
    given = cast("dict[str, Any]", said)
    try:
        _fill_server_table(found, given, workspace, names)
    except ValueError as error:
        found.problem = str(error)
    return found


def _fill_server_table(
    found: ImportedMcpServer, given: Mapping[str, Any], workspace: Path, names: SecretNameAllocator
) -> None:
    """Fill in the table of a server.

    :raises ValueError: with the reason why it cannot be imported
    """
    url: Any = given.get("url", given.get("serverUrl", given.get("httpUrl")))
    command, args = _command_and_args(given)
    if isinstance(url, str):
        _fill_url_server(found, url, given, workspace, names)
    elif isinstance(command, str) and command:
        _fill_command_server(found, command, args, workspace)
        if env := _import_values(found, given.get("env", given.get("environment")), workspace, names):
            found.table["env"] = env
    else:
        raise ValueError("it has neither command nor url")
    if given.get("disabled") is True or given.get("enabled") is False:
        found.table["enabled"] = False
    timeout: Any = given.get("timeout")
    if isinstance(timeout, int) and not isinstance(timeout, bool) and timeout > 0:
        found.table["timeout_ms"] = min(timeout if timeout >= 1_000 else timeout * 1_000, 86_400_000)
    for key in given:
        if key in _PERMISSION_KEYS:
            found.ignored_keys.append(f"{key}: rules grant permissions in Handrail")
        elif key not in _KNOWN_KEYS:
            found.ignored_keys.append(f"{key}: Handrail has no such setting")


def _fill_url_server(
    found: ImportedMcpServer, url: str, given: Mapping[str, Any], workspace: Path, names: SecretNameAllocator
) -> None:
    """Fill in the table of a server with a URL.

    :raises ValueError: with the reason why it cannot be imported
    """
    kind = str(given.get("type", given.get("transport", "sse" if url.rstrip("/").endswith("/sse") else "http")))
    if kind not in _TRANSPORTS:
        raise ValueError(f"its type is {kind!r}; expected 'http' or 'sse' for a server with a url")
    found.table["url"] = address = _expand_folder_placeholders(found, "url", url, workspace)
    _refuse_secret_address(address)
    if _TRANSPORTS[kind] == "sse":
        found.table["transport"] = "sse"
    if headers := _import_values(found, _reject_ambiguous_headers(given.get("headers")), workspace, names):
        found.table["headers"] = headers


def _command_and_args(given: Mapping[str, Any]) -> tuple[Any, Any]:
    command: Any = given.get("command")
    args: Any = given.get("args", [])
    if isinstance(command, list) and command:
        return cast("list[Any]", command)[0], [*cast("list[Any]", command)[1:], *cast("list[Any]", args)]
    return given.get("command"), args


def _fill_command_server(found: ImportedMcpServer, command: str, args: object, workspace: Path) -> None:
    """Fill in the table of a server with a command.

    :raises ValueError: with the reason why it cannot be imported
    """
    if not isinstance(args, list) or not all(isinstance(one, str) for one in cast("list[Any]", args)):
        raise ValueError("its args are not a list of strings")
    found.table["command"] = _expand_folder_placeholders(found, "command", command, workspace)
    written = [_expand_folder_placeholders(found, "args", one, workspace) for one in cast("list[str]", args)]
    _refuse_secret_arguments(written)
    if written:
        found.table["args"] = written


def _expand_folder_placeholders(found: ImportedMcpServer, what: str, text: str, workspace: Path) -> str:
    """Return a text with its placeholders for folders replaced.

    :raises ValueError: for a variable, since its value would be stored in plain text
    """
    places = {"workspaceFolder": str(workspace), "userHome": str(Path.home()), "pathSeparator": os.sep, "/": os.sep}
    filled = _PLACE.sub(lambda match: places[match[1]], text)
    if (match := _VARIABLE.search(filled) or _INPUT.search(filled)) is not None:
        raise ValueError(
            f"its {what} has {match[0]}, which is possible only in env and headers; write the value "
            "itself, or pass it by env"
        )
    if filled != text:
        found.ignored_keys.append(f"{text}: written as {filled}")
    return filled


def _refuse_secret_arguments(args: list[str]) -> None:
    """Reject secrets among arguments, which every process of this machine can read.

    :raises ValueError: for a secret
    """
    for index, one in enumerate(args):
        name, equals, value = one.partition("=")
        given = value if equals else args[index + 1] if one.startswith("-") and index + 1 < len(args) else ""
        named = one.startswith("-") and SECRET_NAME.search(name) and given and not given.startswith("-")
        if named or _SECRET_VALUE.search(one) or _SECRET_VALUE.search(value):
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
    named = any(value and (SECRET_NAME.search(name) or _SECRET_VALUE.search(value)) for name, value in given)
    if named or "@" in parts.netloc or any(_SECRET_VALUE.search(unquote(part)) for part in parts.path.split("/")):
        raise ValueError(
            "its url has a part that looks like a secret, and a url is stored in plain text; pass it by a header"
        )


def _reject_ambiguous_headers(given: object) -> object:
    """Reject header fields whose names differ only in case, since either could be sent.

    :raises ValueError: for such fields
    """
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else dict[str, Any]()
    seen: set[str] = set()
    for key in fields:
        if key.lower() in seen:
            raise ValueError(f"its headers have {key!r} twice, in different cases; remove one of the two")
        seen.add(key.lower())
    return cast("object", given)


def _import_values(
    found: ImportedMcpServer, given: object, workspace: Path, names: SecretNameAllocator
) -> dict[str, Any]:
    """Return variables or header fields, each as a text or a reference to a secret.

    :raises ValueError: if it is not an object
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError("its env or headers are not an object")
    written: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", given).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        scheme = _SCHEME.match(text)
        prefix, bare = (f"{scheme[1]} ", scheme[2]) if scheme else ("", text)
        name = _find_secret_name(found, key, bare, names, is_secret=bool(prefix))
        if name is None:
            written[key] = _expand_folder_placeholders(found, key, text, workspace)
        else:
            written[key] = {"secret": name, **({"prefix": prefix} if prefix else {})}
    return written


def _find_secret_name(
    found: ImportedMcpServer, key: str, value: str, names: SecretNameAllocator, *, is_secret: bool
) -> str | None:
    """Return the name of the secret that a value is or refers to, or None."""
    whole = _VARIABLE.fullmatch(value) or _INPUT.fullmatch(value)
    if whole is not None:
        asked = value.startswith("${input:")  # the user will have to set this variable
        name = names.allocate_name(*(("mcp",) if asked else ()), found.name, key)
        found.variables[name] = name if asked else whole[1]
        return name
    if is_secret or (value and SECRET_NAME.search(key)) or _SECRET_VALUE.search(value):
        name = names.allocate_name(found.name, key)
        found.secrets[name] = value
        return name
    return None


def _to_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:40].lstrip("0123456789-_")


def _without_comments(text: str) -> str:
    """Return JSON without comments and trailing commas, as editors accept them."""
    kept: list[str] = []
    at = 0
    token = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/|,(?=\s*[}\]])', re.DOTALL)
    for match in token.finditer(text):
        kept.append(text[at : match.start()])
        if match[0].startswith('"'):
            kept.append(match[0])
        at = match.end()
    return "".join(kept) + text[at:]


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
