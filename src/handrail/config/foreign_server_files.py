"""The configuration files of other MCP clients, read as servers in one common form.

The files are JSON with comments, TOML for Codex, or YAML for Continue and Goose. Each server is read alone: an unexpected value costs at most its server, and
an unexpected key only itself. Variables become ``${NAME}`` or ``${NAME:-default}``, however the client writes them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.text_encodings import decode_settings_text
from handrail.origins.program_lookup import find_home_folder

MAX_BYTES = 16 * 1024 * 1024
_MAX_ENV_BYTES = 1024 * 1024
VARIABLE = compile_regex_lazily(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
"""A variable in a text, with an optional default."""
INPUT = compile_regex_lazily(r"\$\{input:([^{}]+)\}")
"""A value that VS Code asks the user for."""
_OTHER_VARIABLE = compile_regex_lazily(
    r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)((?::-[^}]*)?)\}|(?<!\$)\{env:([A-Za-z_][A-Za-z0-9_]*)\}"
)
"""A variable as VS Code, Cursor and Windsurf write it, and as opencode does."""
_BARE_VARIABLE = compile_regex_lazily(r"\$([A-Za-z_][A-Za-z0-9_]*)")
"""A variable as Gemini CLI writes it, also without braces."""
_FOLDER = compile_regex_lazily(
    r"\$\{(workspaceFolder(?::[^}]*)?|workspaceFolderBasename|workspaceRoot|userHome|pathSeparator|/)\}"
)
_UNKNOWN = compile_regex_lazily(r"\$?\{file:[^}]*\}|\$\{(?:command|config|file|workspaceFolder|workspaceRoot)\b[^}]*\}")
"""A placeholder that Handrail cannot fill in."""
_ENV_LINE = compile_regex_lazily(
    r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_][\w.]*)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\r\n]*))""",
    re.MULTILINE,
)
_PERMISSION_KEYS = frozenset(
    [
        "autoApprove",
        "alwaysAllow",
        "alwaysAllowTools",
        "trust",
        "includeTools",
        "excludeTools",
        "tools",
        "disabledTools",
        "enabledTools",
        "enabled_tools",
        "disabled_tools",
        "autoApproveTools",
        "default_tools_approval_mode",
    ]
)
_MEANINGLESS_KEYS = frozenset(
    [
        "type",
        "transport",
        "description",
        "about",
        "name",
        "source",
        "required",
        "startupTimeout",
        "metadata",
        "icon",
        "settings",
        "gallery",
        "version",
        "bundled",
        "display_name",
        "available_tools",
        "env_keys",
        "envs",
        "faviconUrl",
        "sourceFile",
    ]
)
_YAML = (".yaml", ".yml")
_YAML_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_TEMPLATE_VARIABLE = re.compile(r"\$\{\{\s*(?:secrets|inputs|env)\.(\w+)\s*\}\}")
_BEARER = re.compile(r"(?i)\s*bearer\s+")
_TRANSPORTS = {
    **dict.fromkeys(("stdio", "local", "command", "process", "program", "custom"), "stdio"),
    **dict.fromkeys(("http", "https", "streamablehttp", "httpstream", "httpstreamable"), "http"),
    "remote": "remote",
    "sse": "sse",
}
_TABLE_KEYS = ("mcpServers", "servers", "mcp_servers", "context_servers", "amp.mcpServers", "mcp.servers")


@dataclasses.dataclass(slots=True)
class ForeignMcpServer:
    """A server from a file of another program.

    :ivar oauth: the client's id, scopes and port of a sign-in, by the names of ``[mcp.servers.NAME.oauth]``
    :ivar left_out: the parts that are not used, each with the reason
    :ivar problem: the reason why it cannot be used; empty if it can
    """

    name: str
    command: str = ""
    args: list[str] = dataclasses.field(default_factory=list[str], repr=False)
    env: dict[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)
    cwd: str = ""
    env_file: str = ""
    url: str = dataclasses.field(default="", repr=False)
    transport: str = "http"
    headers: dict[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)
    oauth: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any], repr=False)
    enabled: bool = True
    timeout_ms: int | None = None
    connect_timeout_ms: int | None = None
    left_out: list[str] = dataclasses.field(default_factory=list[str])
    problem: str = ""


class VsCodeInputDeclaration(Struct, frozen=True):
    """A value that VS Code asks the user for, as ``${input:ID}``."""

    is_password: bool = False
    default: str = ""


class ForeignMcpServerFile(Struct, frozen=True):
    """The servers of one file.

    :param inputs: the inputs that it declares, by id
    """

    servers: tuple[ForeignMcpServer, ...]
    inputs: Mapping[str, VsCodeInputDeclaration] = field(default_factory=dict[str, VsCodeInputDeclaration])


def list_candidate_server_files(workspace: Path) -> list[tuple[str, Path]]:
    """Return the files in which other programs keep their servers, whether they exist or not."""
    home = Path(find_home_folder() or "/nonexistent")
    own = {"darwin": home / "Library/Application Support", "win32": Path(os.environ.get("APPDATA", home))}
    xdg = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    config = own.get(sys.platform, xdg)
    codex = Path(os.environ.get("CODEX_HOME") or home / ".codex")
    editors = config / "Code/User"
    opencode = [base / name for base in (xdg / "opencode", workspace) for name in ("opencode.json", "opencode.jsonc")]
    return [
        ("Claude Desktop", config / "Claude/claude_desktop_config.json"),
        ("Claude Code", home / ".claude.json"),
        ("Claude Code, this project", workspace / ".mcp.json"),
        ("Cursor", home / ".cursor/mcp.json"),
        ("Cursor, this project", workspace / ".cursor/mcp.json"),
        ("VS Code", editors / "mcp.json"),
        ("VS Code, older settings", editors / "settings.json"),
        ("VS Code, this project", workspace / ".vscode/mcp.json"),
        ("Codex", codex / "config.toml"),
        ("Codex, this project", workspace / ".codex/config.toml"),
        *(("opencode" + ", this project" * (path.parent == workspace), path) for path in opencode),
        ("Zed", (home / ".config" if sys.platform == "darwin" else xdg) / "zed/settings.json"),
        ("Zed, this project", workspace / ".zed/settings.json"),
        ("Gemini CLI", home / ".gemini/settings.json"),
        ("Gemini CLI, this project", workspace / ".gemini/settings.json"),
        ("Qwen Code", home / ".qwen/settings.json"),
        ("Qwen Code, this project", workspace / ".qwen/settings.json"),
        ("Windsurf", home / ".codeium/windsurf/mcp_config.json"),
        ("Cline", editors / "globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json"),
        ("Roo Code", editors / "globalStorage/rooveterinaryinc.roo-cline/settings/mcp_settings.json"),
        ("Roo Code, this project", workspace / ".roo/mcp.json"),
        ("Copilot CLI", home / ".copilot/mcp-config.json"),
        ("Copilot in JetBrains IDEs", xdg / "github-copilot/intellij/mcp.json"),
        ("LM Studio", home / ".lmstudio/mcp.json"),
        ("Kiro", home / ".kiro/settings/mcp.json"),
        ("Kiro, this project", workspace / ".kiro/settings/mcp.json"),
        ("Amp", xdg / "amp/settings.json"),
        ("Amp, this project", workspace / ".amp/settings.json"),
        ("Amazon Q", home / ".aws/amazonq/mcp.json"),
        ("Amazon Q, this project", workspace / ".amazonq/mcp.json"),
        ("Junie", home / ".junie/mcp/mcp.json"),
        ("Junie, this project", workspace / ".junie/mcp/mcp.json"),
        ("Crush", xdg / "crush/crush.json"),
        ("Crush, this project", workspace / "crush.json"),
        ("Continue", home / ".continue/config.yaml"),
        *(("Continue, this project", path) for path in sorted((workspace / ".continue/mcpServers").glob("*.y*ml"))),
        ("Goose", config / "Block/goose/config/config.yaml" if sys.platform == "win32" else xdg / "goose/config.yaml"),
    ]


def read_foreign_server_file(path: Path, workspace: Path | None) -> ForeignMcpServerFile:
    """Read the servers of one file.

    :param workspace: the value of ``${workspaceFolder}``, and the project whose part of Claude Code's file counts; None for none
    :raises ValueError: if the file cannot be read or has no servers; the text continues a sentence about the file
    """
    try:
        content = _read_regular_file(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}. Check the path and its permissions") from None
    except ValueError as error:
        raise ValueError(f"{error}. Pass a configuration file of MCP servers") from None
    whole = _parse(path, content)
    _reject_repeated_tables(whole)
    tables = list(_find_server_tables(whole, workspace))
    if path.suffix.lower() in _YAML and (extensions := _object(_object(whole).get("extensions"))):
        tables.append(extensions)
    if not tables:
        raise ValueError(
            'has no "mcpServers" (or "servers", "mcp", "context_servers", "extensions", [mcp_servers]) object. Pass the file '
            "that has the servers"
        )
    named = [(str(name), said) for table in tables for name, said in table.items()]
    bare = bool({".gemini", ".qwen"} & {*path.parts}) or any("httpUrl" in _object(said) for _, said in named)
    servers = [_normalize_server(name, said, workspace, bare=bare) for name, said in named]
    for table in tables:
        for one in servers:
            if one.name in _get_repeated_keys(table):
                one.problem = f"{one.name[:80]!r} occurs twice in one object; remove one of the two"
    return ForeignMcpServerFile(tuple(servers), _read_inputs(whole))


def _read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, without waiting for a pipe or a device.

    :raises OSError: if it cannot be opened or read
    :raises ValueError: if it is not a regular file, or too large; the text continues a sentence about the file
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"is too large. The limit is {max_bytes // 2**20} MiB")
    return content


def _parse(path: Path, content: bytes) -> Any:
    """Return the content of a file.

    :raises ValueError: if it is not JSON, TOML or YAML, as its name says
    """
    kind = "TOML" if path.suffix.lower() == ".toml" else "YAML" if path.suffix.lower() in _YAML else "JSON"
    try:
        text = decode_settings_text(content)
        if kind == "TOML":
            return tomllib.loads(text)
        if kind == "YAML":
            return _parse_yaml(text)
        return json.loads(remove_json_comments(text), object_pairs_hook=_RepeatingObject.from_pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid {kind}: {error}. Correct the file, or pass another one") from None


class _RepeatingObject(dict[str, Any]):
    """An object with the keys that occur twice in it. Programs differ in which value they use.

    :ivar repeated: these keys
    """

    repeated: frozenset[str] = frozenset()

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object; a plain one if no key occurs twice."""
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        counts = Counter(name for name, _ in pairs)
        repeating = cls(found)
        repeating.repeated = frozenset(name for name, count in counts.items() if count > 1)
        return repeating


def _get_repeated_keys(value: object) -> frozenset[str]:
    return value.repeated if isinstance(value, _RepeatingObject) else frozenset()


def _reject_repeated_tables(whole: object) -> None:
    """Reject a file that has the table of its servers twice. Other repeated keys cost nothing, or their own server.

    :raises ValueError: for such a table; the text continues a sentence about the file
    """
    top = _object(whole)
    places = [top, *(_object(top.get(key)) for key in ("mcp", "settings", "projects"))]
    tables = {*_TABLE_KEYS, "mcp", "settings", "projects", "extensions"}
    for place in places:
        if twice := sorted(_get_repeated_keys(place) & (tables if place is top else {*_TABLE_KEYS})):
            raise ValueError(f"is ambiguous: {twice[0]!r} occurs twice in one object. Remove one of the two")


def _find_repeated_key(value: object) -> str:
    """Return a key that occurs twice in a value or in one within it; empty if there is none."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if repeated := _get_repeated_keys(one):
            return min(repeated)
        if isinstance(one, dict | list):
            waiting += cast("dict[str, object]", one).values() if isinstance(one, dict) else cast("list[object]", one)
    return ""


def _parse_yaml(text: str) -> Any:
    """Return the content of a YAML file, in which only true, false, null and numbers are not texts.

    :raises ValueError: if it is not valid, has an alias, or cannot be read here
    """
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise ValueError("this needs PyYAML, which is in the extra 'mcp'") from None

    base: Any = yaml.BaseLoader

    class PlainValueLoader(base):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias (*NAME); write the value itself")
            return base.compose_node(self, parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                return _RepeatingObject.from_pairs(
                    [(str(self.construct_object(key)), self.construct_object(value)) for key, value in node.value]
                )
            if isinstance(node, yaml.SequenceNode):
                return [self.construct_object(one) for one in node.value]
            return node.value if node.style is not None else _read_plain_scalar(node.value)

    try:
        return yaml.load(text, Loader=PlainValueLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None


def _read_plain_scalar(text: str) -> Any:
    """Return the value of a YAML scalar without quotation marks."""
    known = {"": None, "~": None, "null": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    return float(text) if re.fullmatch(r"-?\d+\.\d+", text) else int(text) if _YAML_INTEGER.fullmatch(text) else text


def remove_json_comments(text: str) -> str:
    """Return JSON without comments and trailing commas, as editors accept them."""
    token = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n\r]*|/\*.*?\*/', re.DOTALL)
    bare = token.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    comma = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])', re.DOTALL)
    return comma.sub(lambda match: match[0] if match[0].startswith('"') else "", bare)


def _object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _find_server_tables(whole: object, workspace: Path | None) -> Iterator[Mapping[str, Any]]:
    """Yield the tables of servers: at the top, under ``mcp`` or ``settings``, and for this project."""
    top = _object(whole)
    places: list[Mapping[str, Any]] = [top]
    for key in ("mcp", "settings", "dev.containers", "amp"):
        places += [_object(top.get(key)), _object(_object(top.get(key)).get("mcp"))]
    places += [
        _object(said)
        for folder, said in _object(top.get("projects")).items()
        if workspace is not None and Path(folder) in (workspace, workspace.resolve())
    ]
    places.append(_object(_object(_object(top.get("customizations")).get("vscode")).get("mcp")))
    for place in places:
        for key in _TABLE_KEYS:
            if table := _object(_by_name(place.get(key))):
                yield table
    named = _object(top.get("mcp")).items()
    older = _object(top.get("experimental")).get("modelContextProtocolServers")
    if table := _object(_by_name(older)):
        yield table
    opencode = {name: said for name, said in named if _is_server(said)}
    if opencode:
        yield opencode
    alone = _object(_by_name(cast("object", whole)) if isinstance(whole, list) else whole)  # the file is the table
    if alone and not alone.keys() & {*_TABLE_KEYS} and all(map(_is_server, alone.values())):
        yield alone


def _is_server(value: object) -> bool:
    return bool({"command", "url"} & _object(value).keys())


def _by_name(value: object) -> object:
    """Return a list of servers with names as an object; another value as it is. A list without an object has none."""
    if not isinstance(value, list):
        return value
    found: dict[str, Any] = {}
    listed = cast("list[object]", value)
    for number, one in enumerate(listed if any(isinstance(one, dict) for one in listed) else [], 1):
        name = str(_object(one).get("name") or f"server {number}")
        while name in found:
            name = f"{name} {number}"
        found[name] = one
    return found


def _read_inputs(whole: object) -> dict[str, VsCodeInputDeclaration]:
    top = _object(whole)
    given: Any = top.get("inputs") or _object(top.get("mcp")).get("inputs")
    found: dict[str, VsCodeInputDeclaration] = {}
    for one in cast("list[object]", given) if isinstance(given, list) else []:
        fields = _object(one)
        if isinstance(name := fields.get("id"), str):
            default = fields.get("default")
            found[name] = VsCodeInputDeclaration(
                fields.get("password") is True, default if isinstance(default, str) else ""
            )
    return found


def _normalize_server(name: str, entry: object, workspace: Path | None, *, bare: bool) -> ForeignMcpServer:
    """Return a server in the common form.

    :param bare: whether ``$NAME`` is a variable
    """
    found = ForeignMcpServer(name)
    if not isinstance(entry, dict):
        found.problem = "it is not an object"
        return found
    if repeated := _find_repeated_key(cast("object", entry)):
        found.problem = f"{repeated[:80]!r} occurs twice in one object; remove one of the two"
        return found
    given = {key: value for key, value in cast("dict[str, Any]", entry).items() if value is not None}
    for key in ("transport", "command"):  # an object in the place of a text: its members belong to the server
        if inner := _object(given.get(key)):
            del given[key]
            given = {("command" if inner_key == "path" else inner_key): one for inner_key, one in inner.items()} | given
    try:
        _fill_server(found, given, _ForeignTextReader(found, workspace, bare=bare))
    except ValueError as error:
        found.problem = str(error)
    return found


def _fill_server(found: ForeignMcpServer, given: dict[str, Any], texts: _ForeignTextReader) -> None:
    """Fill in a server.

    :raises ValueError: with the reason why it cannot be used
    """
    used: set[str] = set()

    def take(*keys: str) -> Any:
        used.update(keys)
        return next((given[key] for key in keys if given.get(key) is not None), None)

    url_key = next((key for key in ("httpUrl", "serverUrl", "url", "uri", "endpoint") if given.get(key)), "url")
    url, command = take(url_key), take("command", "cmd")
    take("httpUrl", "serverUrl", "url")
    words = cast("list[Any]", command) if isinstance(command, list) else [command]
    line = command if isinstance(command, str) else None
    command, args = (words[0], words[1:]) if words else (None, [])
    if line is not None and not given.get("args"):
        command, args = texts.split_command(line)
    if (shell := _unwrap_shell(command, args or given.get("args"))) is not None:
        command, args = shell if shell[1] else texts.split_command(shell[0])
        given["args"] = []
    written_type = take("type", "transport", "transportType")
    kind = _TRANSPORTS.get(re.sub(r"[^a-z]", "", str(written_type).lower())) if written_type is not None else None
    has_command, has_url = isinstance(command, str) and command.strip(), isinstance(url, str) and url.strip()
    parts = ("builtin", "platform", "frontend", "inline_python")
    if not has_command and not has_url and (given.get("source") == "extension" or written_type in parts):
        raise ValueError("it is an extension, which only its own program can start")
    if not has_command and not has_url:
        raise ValueError("it has neither command nor url; add one of them in the file")
    if has_url and (not has_command or (kind in ("http", "sse", "remote"))):
        if written_type is not None and kind in (None, "stdio") and not has_command:
            if kind is None:
                raise ValueError(f"its type is {written_type!r}; expected 'http' or 'sse' for a server with a url")
            found.left_out.append(f"type: {written_type!r} does not match a server with a url; read as 'http'")
        found.url = texts.read("url", url)
        found.transport = (
            kind if kind in ("http", "sse") else "sse" if found.url.rstrip("/").endswith("/sse") else "http"
        )
        within = _object(take("requestOptions", "requestInit")).get("headers")
        found.headers = texts.parse_named_values("headers", take("headers", "http_headers") or within)
        more = texts.parse_named_values("env_http_headers", take("env_http_headers"))
        _reject_ambiguous_names("headers", [*found.headers, *more])
        found.headers |= {field_name: f"${{{variable}}}" for field_name, variable in more.items()}
        key, variable = take("apiKey", "authorization_token"), take("bearer_token_env_var")
        if "authorization" not in map(str.lower, found.headers):
            if isinstance(key, str) and key:
                found.headers["Authorization"] = f"Bearer {texts.read('apiKey', _BEARER.sub('', key, count=1))}"
            elif isinstance(variable, str) and variable:
                found.headers["Authorization"] = f"Bearer ${{{variable}}}"
        sign_in = _object(take("oauth")) or _object(given.get("auth"))
        found.oauth = _read_oauth(sign_in, take("scopes"), texts)
        if found.oauth and sign_in is given.get("auth"):  # another kind of `auth`, such as a token, is left out
            used.add("auth")
        if any("secret" in key.lower() for key in sign_in):
            found.left_out.append("oauth: its client secret; store it as a secret, and name it in client_secret")
        others = {"command", "cmd", "args", "env", "environment", "cwd", "envFile"} & given.keys()
        found.left_out += [f"{key}: the server has a url" for key in sorted(others) if given[key]]
        used.update(others)
    else:
        found.command = texts.read("command", command)
        found.args = texts.read_list("args", args) + texts.read_list("args", take("args", "arguments"))
        found.env = texts.parse_named_values("env", take("env", "environment", "envs"))
        for variable in texts.read_list("env_vars", take("env_vars", "env_keys")):
            found.env.setdefault(variable, f"${{{variable}}}")
        found.cwd = texts.parse_optional_text("cwd", take("cwd", "workingDirectory", "working_directory"))
        found.env_file = texts.parse_optional_text("envFile", take("envFile", "env_file"))
        if has_url:
            found.left_out.append("url: the server has a command")
        if given.get("headers"):
            found.left_out.append("headers: the server has a command")
        used.add("headers")
    is_off = _read_flag(take("disabled")) is True
    found.enabled = not is_off and False not in [_read_flag(take(key)) for key in _ENABLED_KEYS]
    found.timeout_ms = _read_timeout(take("timeout", "timeout_ms", "timeoutMs"), take("tool_timeout_sec"))
    found.connect_timeout_ms = _read_timeout(None, take("startup_timeout_sec", "initTimeout"))
    if found.connect_timeout_ms is None:
        found.connect_timeout_ms = _read_timeout(take("startup_timeout_ms", "connectionTimeout"), None)
    for key in given:
        if key in _PERMISSION_KEYS:
            found.left_out.append(f"{key}: rules grant permissions in Handrail")
        elif key not in used and key not in _MEANINGLESS_KEYS:
            found.left_out.append(f"{key}: Handrail has no such setting")


def _unwrap_shell(command: object, args: object) -> tuple[str, list[Any]] | None:
    """Return the command that ``cmd /c`` starts, as clients on Windows need it; None for any other command."""
    words = cast("list[Any]", args) if isinstance(args, list) else []
    is_shell = isinstance(command, str) and re.fullmatch(r"(?i)(?:.*[\\/])?cmd(?:\.exe)?", command.strip()) is not None
    while is_shell and words and re.fullmatch("(?i)/[a-z]", str(words[0])) is not None:
        option, words = str(words[0]).lower(), words[1:]
        if option == "/c":
            return (words[0], words[1:]) if words and isinstance(words[0], str) else None
    return None


def _read_oauth(given: Mapping[str, Any], scopes: object, texts: _ForeignTextReader) -> dict[str, Any]:
    """Return the settings of a sign-in that do not contain a secret."""
    found: dict[str, Any] = {}
    written = next((given[key] for key in ("clientId", "client_id", "CLIENT_ID") if given.get(key)), None)
    if client := texts.parse_optional_text("oauth", written):
        found["client_id"] = client
    port: object = given.get("callbackPort", given.get("callback_port"))
    if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65_536:
        found["callback_port"] = port
    scope: object = scopes or given.get("scopes") or given.get("scope")
    words = scope.split() if isinstance(scope, str) else cast("list[object]", scope) if isinstance(scope, list) else []
    if wanted := [texts.read("oauth", one) for one in words if isinstance(one, str)]:
        found["scopes"] = wanted
    return found


_ENABLED_KEYS = ("enabled", "isActive", "active")


def _read_flag(value: object) -> bool | None:
    """Return a truth, which some programs write as text or as a number; None for another value."""
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    return {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }.get(word)


def _read_timeout(given: object, seconds: object) -> int | None:
    """Return a timeout in milliseconds; small numbers without a unit are seconds."""
    for written, unit in ((given, 0), (seconds, 1000)):
        value, factor = written, unit
        if isinstance(written, str) and (text := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*(ms|s)?\s*", written)):
            value, factor = float(text[1]), {"ms": 1, "s": 1000}.get(text[2], unit)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            continue
        return int(min(value * (factor or (1 if value >= 1_000 else 1_000)), 86_400_000)) or None
    return None


class _ForeignTextReader:
    """A reader of the texts of one server, which fills in folders and writes variables in one form."""

    def __init__(self, server: ForeignMcpServer, workspace: Path | None, *, bare: bool) -> None:
        self._server = server
        self._bare = bare
        self._folders = {"userHome": find_home_folder() or "", "pathSeparator": os.sep, "/": os.sep}
        if workspace is not None:
            names = {"workspaceFolder": str(workspace), "workspaceRoot": str(workspace)}
            self._folders |= {**names, "workspaceFolderBasename": workspace.name}

    def read(self, what: str, value: object) -> str:
        """Return a text.

        :raises ValueError: if it cannot be one
        """
        if isinstance(value, bool):
            value = str(value).lower()
        if not isinstance(value, str | int | float):
            raise ValueError(f"its {what} is not a string; correct it in the file")
        text = str(value).strip() if what in ("url", "command") else str(value)
        if what == "url":
            text = re.sub(r"(?i)\Ahttps?://", lambda scheme: scheme[0].lower(), text)
        filled = _TEMPLATE_VARIABLE.sub(r"${\1}", text)
        filled = _FOLDER.sub(lambda match: self._folders.get(match[1].partition(":")[0], match[0]), filled)
        filled = _OTHER_VARIABLE.sub(lambda match: f"${{{match[1] or match[3]}{match[2] or ''}}}", filled)
        if self._bare:
            filled = _BARE_VARIABLE.sub(r"${\1}", filled)
        if (match := _UNKNOWN.search(filled)) is not None:
            raise ValueError(
                f"its {what} has {match[0]}, whose value only the other program knows; write the value itself"
            )
        if "\0" in filled or _is_half_of_a_pair(filled):
            raise ValueError(f"its {what} has a character that programs cannot receive; correct it in the file")
        return filled

    def split_command(self, command: str) -> tuple[str, list[str]]:
        """Return the program and the arguments of a command line. The path of a program may have spaces."""
        if not re.search(r"\s", command.strip()) or "\\" in command or self._names_program(command):
            return command, []
        try:
            words = shlex.split(command)
        except ValueError:
            return command, []
        return (words[0], words[1:]) if words else (command, [])

    def _names_program(self, path: str) -> bool:
        filled = _FOLDER.sub(lambda match: self._folders.get(match[1].partition(":")[0], match[0]), path.strip())
        try:
            return Path(self._folders.get("workspaceFolder", ""), Path(filled).expanduser()).is_file()
        except (OSError, RuntimeError, ValueError):  # it is no path, or has an unknown user
            return False

    def parse_optional_text(self, what: str, value: object) -> str:
        """Return a text, or an empty one, and note that the value is left out, if it cannot be a text."""
        if value is None:
            return ""
        try:
            return self.read(what, value)
        except ValueError as error:
            self._server.left_out.append(f"{what}: {str(error).replace(f'its {what}', 'it', 1)}")
            return ""

    def read_list(self, what: str, value: object) -> list[str]:
        """Return the texts of a list; a single text counts as a list of one.

        :raises ValueError: if it is not a list of texts
        """
        if isinstance(value, str):
            raise ValueError(f'its {what} are not a list of strings; write ["…", "…"] in the file')
        if value is None:
            return []
        if not isinstance(value, list):
            raise ValueError(f"its {what} are not a list of strings; correct them in the file")
        found: list[str] = []
        for one in cast("list[object]", value):
            if one is None:
                self._server.left_out.append(f"{what}: null, which is not an argument")
            else:
                found.append(self.read(what, _object(one).get("name", one) if what == "env_vars" else one))
        return found

    def parse_named_values(self, what: str, value: object) -> dict[str, str]:
        """Return variables or header fields; one that cannot be used is left out with the reason.

        :raises ValueError: if they are not an object, or ambiguous
        """
        if isinstance(value, list):  # pairs, as some programs write them
            pairs = [_read_pair(one, ":" if what == "headers" else "=") for one in cast("list[object]", value)]
            _reject_ambiguous_names(what, [name for name, _ in pairs])
            value = dict(pairs)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"its {what} are not an object; correct them in the file")
        fields = cast("dict[str, Any]", value)
        _reject_ambiguous_names(what, fields)
        found: dict[str, str] = {}
        for key, one in fields.items():
            if one is None:
                self._server.left_out.append(f"{key}: null, which is not a value")
            elif not key or any(char in key for char in "=\0\r\n"):
                self._server.left_out.append(f"{key!r}: it is not a valid name")
            else:
                if (text := self.parse_optional_text(key, one)) or one == "":
                    found[key] = text
        return found


def _read_pair(written: object, sign: str) -> tuple[str, object]:
    """Return the name and the value of a variable or a header field, which may be one text."""
    if isinstance(written, str):
        name, _, text = written.partition(sign)
        return name.strip(), text.strip() if sign == ":" else text
    fields = _object(written)
    return str(fields.get("name", fields.get("key"))), fields.get("value")


def _is_half_of_a_pair(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which JSON can name and UTF-8 cannot."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def _reject_ambiguous_names(what: str, names: Iterable[str]) -> None:
    """Reject a name that occurs twice, since either value could be used. Header fields are one if only their case differs.

    :raises ValueError: for such a name
    """
    seen: set[str] = set()
    for name in names:
        same = name if what == "env" else name.lower()
        if same in seen:
            raise ValueError(f"{name!r} occurs twice in its {what}; remove one of the two")
        seen.add(same)


def read_env_file(file: Path) -> dict[str, str]:
    """Return the variables of an ``envFile``, with lines such as ``NAME=value``.

    :raises ValueError: if the file cannot be read
    """
    try:
        text = decode_settings_text(_read_regular_file(file, _MAX_ENV_BYTES))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; check its path") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} cannot be read: it is not UTF-8 text; check its path") from None
    except ValueError as error:
        raise ValueError(f"{file} {error}; check its path") from None
    found: dict[str, str] = {}
    for match in _ENV_LINE.finditer(text):
        name, double, single, plain = match.groups()
        if double is not None:
            found[name] = re.sub(r"\\(.)", lambda one: {"n": "\n", "t": "\t"}.get(one[1], one[1]), double)
        else:
            found[name] = single if single is not None else re.sub(r"\s+#.*", "", plain or "").strip()
    return found


def expand_variables(
    text: str, environment: Mapping[str, str], on_value: Callable[[str, str], None] = lambda name, value: None
) -> str:
    """Return a text with its variables replaced.

    :param environment: the variables
    :param on_value: called with the name and value of each variable
    :raises ValueError: for a variable that is not set and has no default
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if environment.get(name) or (name in environment and default is None):
            on_value(name, environment[name])
            return environment[name]
        if default is None:
            raise ValueError(f"names the variable {name}, which is not set")
        return default

    return VARIABLE.sub(value, text)
