"""The export of Handrail's own MCP server, or of its upstream servers, in the form of another MCP client's configuration.

Secrets are never written: each becomes a variable, an input or a placeholder, as the client can read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from handrail.config.foreign_server_files import VARIABLE
from handrail.config.mcp_settings import (
    ExpandableText,
    McpOauthSettings,
    PrefixedSecretReference,
    ServerText,
    UpstreamServerSettings,
)
from handrail.config.operator_settings import SecretReference
from handrail.config.secret_detection import (
    find_argument_secrets,
    find_url_secrets,
    is_ordinary_value,
    is_secret_name,
    is_secret_value,
)
from handrail.contract.struct import Struct, field

CLIENT_FILES: Mapping[str, str] = {
    "claude-code": ".mcp.json of the project",
    "claude-desktop": "claude_desktop_config.json",
    "cline": "cline_mcp_settings.json",
    "codex": "~/.codex/config.toml",
    "copilot": "~/.copilot/mcp-config.json",
    "cursor": "~/.cursor/mcp.json",
    "gemini": "~/.gemini/settings.json",
    "opencode": "~/.config/opencode/opencode.json",
    "qwen": "~/.qwen/settings.json",
    "vscode": ".vscode/mcp.json of the project",
    "windsurf": "~/.codeium/windsurf/mcp_config.json",
    "zed": "~/.config/zed/settings.json",
}
"""By client, the file into which the export belongs."""
_VARIABLE_FORMS: Mapping[str, str] = {
    "claude-code": "${NAME}",
    "copilot": "${NAME}",
    "cursor": "${env:NAME}",
    "gemini": "${NAME}",
    "opencode": "{env:NAME}",
    "qwen": "${NAME}",
    "vscode": "${input:NAME}",
    "windsurf": "${env:NAME}",
}
"""By client, the form of a variable in its file. The other clients have none."""
_URL_KEYS: Mapping[str, str] = {"gemini": "httpUrl", "qwen": "httpUrl", "windsurf": "serverUrl"}
_TABLES: Mapping[str, str] = {"vscode": "servers", "opencode": "mcp", "zed": "context_servers"}
_FURTHER_KEYS: Mapping[str, Mapping[str, str]] = {
    "claude-code": {"oauth": "oauth"},
    "cline": {"cwd": "cwd", "timeout_ms": "timeout"},
    "codex": {"cwd": "cwd", "timeout_ms": "tool_timeout_sec", "connect_timeout_ms": "startup_timeout_sec"},
    "gemini": {"cwd": "cwd", "timeout_ms": "timeout", "oauth": "oauth"},
    "opencode": {"oauth": "oauth"},
    "qwen": {"cwd": "cwd", "timeout_ms": "timeout", "oauth": "oauth"},
    "vscode": {"cwd": "cwd"},
}
"""By client, its keys for further settings. The other clients have none."""
_IN_SECONDS = frozenset({"timeout cline", "tool_timeout_sec codex", "startup_timeout_sec codex"})
GATEWAY = "handrail"
"""The name of Handrail's own entry."""


class ClientConfigExport(Struct):
    """The configuration of one client.

    :ivar text: the text for the client's file
    :ivar placeholders: the values that the user has to provide, by the names of their placeholders
    :ivar left_out: the reason for each server that the client cannot use, by its name
    :ivar ignored: the settings of servers that the client does not have
    """

    text: str = ""
    placeholders: dict[str, str] = field(default_factory=dict[str, str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    ignored: list[str] = field(default_factory=list[str])


def export_client_configuration(
    client: str, servers: Mapping[str, UpstreamServerSettings], secrets: Mapping[str, SecretReference]
) -> ClientConfigExport:
    """Return servers as a client's configuration.

    :param client: a key of ``CLIENT_FILES``
    :param secrets: the places of secrets, whose variables keep their names
    """
    writer = _ClientWriter(client, secrets)
    entries = {name: writer.make_server_entry(name, server) for name, server in servers.items()}
    written = {name: entry for name, entry in entries.items() if entry is not None}
    return writer.finish(written)


class _ClientWriter:
    """A writer of servers in the form of one client."""

    def __init__(self, client: str, secrets: Mapping[str, SecretReference]) -> None:
        self._client = client
        self._secrets = secrets
        self._export = ClientConfigExport()
        self._defaults: dict[str, str] = {}
        """The defaults of variables that VS Code asks for."""

    def make_server_entry(self, name: str, server: UpstreamServerSettings) -> dict[str, Any] | None:
        """Return the entry of one server; None if the client cannot use it, or it has a secret in an argument or a url."""
        if (*find_argument_secrets(server.args), *find_url_secrets(server.url or "")) or any(
            map(is_secret_value, server.args)
        ):
            self._export.left_out[name] = "its arguments or its url have a secret; keep it in env or headers"
            return None
        if server.url is not None:
            if self._client == "claude-desktop":
                self._export.left_out[name] = "Claude Desktop reads no servers with a url from its file"
                return None
            entry = self._write_remote(server)
        else:
            entry = self._write_local(server)
        entry |= self._write_further_settings(name, server)
        if not server.enabled:
            entry |= {"enabled": False} if self._client in ("codex", "opencode", "zed") else {"disabled": True}
        return entry

    def _write_further_settings(self, name: str, server: UpstreamServerSettings) -> dict[str, Any]:
        """Return the working directory, the timeouts and the sign-in of a server, as far as the client has them."""
        given: dict[str, Any] = {key: getattr(server, key) for key in ("cwd", "timeout_ms", "connect_timeout_ms")}
        given = {key: value for key, value in given.items() if key in server.model_fields_set and value}
        if server.oauth is not None and (sign_in := self._write_sign_in(server.oauth)):
            given["oauth"] = sign_in
        keys, found = _FURTHER_KEYS.get(self._client, dict[str, str]()), dict[str, Any]()
        for setting, value in given.items():
            if (key := keys.get(setting)) is None:
                self._export.ignored.append(f"{name}: {setting}: {self._client} has no such setting")
            elif f"{key} {self._client}" in _IN_SECONDS:
                found[key] = value / 1000 if value % 1000 else value // 1000
            else:
                found[key] = value
        return found

    def _write_sign_in(self, options: McpOauthSettings) -> dict[str, Any]:
        """Return the settings of a sign-in that are not secret."""
        scope: object = " ".join(options.scopes) if self._client == "opencode" else [*options.scopes]
        port = options.callback_port if self._client == "claude-code" else 0
        found: dict[str, object] = {"clientId": options.client_id, "callbackPort": port}
        found["scope" if self._client == "opencode" else "scopes"] = scope
        return {key: value for key, value in found.items() if value}

    def _write_local(self, server: UpstreamServerSettings) -> dict[str, Any]:
        assert server.command is not None
        values = {key: self._write_value(key, value) for key, value in server.env.items()}
        if self._client == "opencode":
            entry: dict[str, Any] = {"type": "local", "command": [server.command, *server.args]}
            return entry | ({"environment": values} if values else {}) | {"enabled": True}
        entry = {"type": "stdio"} if self._client in ("claude-code", "vscode") else {}
        entry |= {"type": "local", "tools": ["*"]} if self._client == "copilot" else {}
        entry |= {"command": server.command, "args": [*server.args]}
        if self._client == "codex":  # Codex replaces no variables, but passes those that are named
            named = {key for key, value in server.env.items() if not isinstance(value, str)}
            same = sorted(
                key for key in named if self._variable_name(key, server.env[key]) == key and values[key] == f"<{key}>"
            )
            values = {key: value for key, value in values.items() if key not in same}
            entry |= {"env_vars": same} if same else {}
        return entry | ({"env": values} if values else {})

    def _write_remote(self, server: UpstreamServerSettings) -> dict[str, Any]:
        is_sse = server.transport == "sse"
        if self._client == "codex":
            return self._write_codex_remote(server)
        headers = {key: self._write_value(key, value) for key, value in server.headers.items()}
        kind = {"opencode": "remote", "cline": "sse" if is_sse else "streamableHttp"}.get(
            self._client, "sse" if is_sse else "http"
        )
        url_key = "url" if is_sse else _URL_KEYS.get(self._client, "url")
        if self._client == "windsurf":
            url_key = "serverUrl"
        entry: dict[str, Any] = (
            {"type": kind} if self._client not in ("gemini", "qwen", "windsurf", "zed", "cursor") else {}
        )
        entry |= {"tools": ["*"]} if self._client == "copilot" else {}
        entry |= {url_key: server.url} | ({"headers": headers} if headers else {})
        return entry | ({"enabled": True} if self._client == "opencode" else {})

    def _write_codex_remote(self, server: UpstreamServerSettings) -> dict[str, Any]:
        entry: dict[str, Any] = {"url": server.url}
        plain: dict[str, str] = {}
        named: dict[str, str] = {}
        for key, value in server.headers.items():
            variable = self._variable_name(key, value)
            if isinstance(value, str):
                plain[key] = self._write_value(key, value)
            elif key.lower() == "authorization" and getattr(value, "prefix", "") == "Bearer ":
                entry["bearer_token_env_var"] = variable
                self._export.placeholders[variable] = f"the environment variable {variable}"
            elif not getattr(value, "prefix", "") and variable:
                named[key] = variable
                self._export.placeholders[variable] = f"the environment variable {variable}"
            else:
                plain[key] = self._write_value(key, value)
        entry |= {"http_headers": plain} if plain else {}
        return entry | ({"env_http_headers": named} if named else {})

    def _variable_name(self, key: str, value: ServerText) -> str:
        """Return the variable that has a value; empty if there is none."""
        if isinstance(value, PrefixedSecretReference):
            place = self._secrets.get(value.secret)
            return place.env if place is not None and place.env is not None else value.secret
        if isinstance(value, ExpandableText) and (whole := VARIABLE.fullmatch(value.expand)) is not None:
            return whole[1]
        return ""

    def _write_value(self, key: str, value: ServerText) -> str:
        """Return the text of a value, with a placeholder for what is secret or a variable."""
        if isinstance(value, str):
            is_secret = is_secret_value(value) or (is_secret_name(key) and not is_ordinary_value(value))
            return self._write_placeholder(key.upper(), "") if is_secret else value
        if isinstance(value, PrefixedSecretReference):
            return value.prefix + self._write_placeholder(self._variable_name(key, value), "")
        return VARIABLE.sub(lambda match: self._write_placeholder(match[1], match[2]), value.expand)

    def _write_placeholder(self, name: str, default: str | None) -> str:
        name = re.sub(r"\W", "_", name)
        form = _VARIABLE_FORMS.get(self._client)
        is_public = bool(default) and not is_secret_name(name) and not is_secret_value(default or "")
        if default and is_public and self._client not in ("claude-code", "vscode"):
            return default  # the client would pass nothing if the variable is not set
        if form is None:
            self._export.placeholders[name] = f"replace <{name}> with the value"
            return f"<{name}>"
        if default and is_public and self._client == "claude-code":
            return f"${{{name}:-{default}}}"
        if default and is_public:
            self._defaults[name] = default
        variable = f"the environment variable {name}"
        self._export.placeholders[name] = "VS Code asks for it" if self._client == "vscode" else variable
        return form.replace("NAME", name)

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> ClientConfigExport:
        if self._client == "codex":
            self._export.text = "\n\n".join(_format_codex_table(name, entry) for name, entry in entries.items()) + "\n"
            return self._export
        whole: dict[str, Any] = {_TABLES.get(self._client, "mcpServers"): dict(entries)}
        if self._client == "vscode" and self._export.placeholders:
            whole["inputs"] = [
                {"type": "promptString", "id": name, "description": name}
                | ({"default": self._defaults[name]} if name in self._defaults else {"password": True})
                for name in self._export.placeholders
            ]
        self._export.text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        return self._export


def _format_codex_table(name: str, entry: Mapping[str, Any]) -> str:
    """Return one ``[mcp_servers.NAME]`` of Codex."""
    lines = [f"[mcp_servers.{name}]"]
    lines += [f"{key} = {_format_toml(value)}" for key, value in entry.items()]
    return "\n".join(lines)


def _format_toml(value: Any) -> str:
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        return "{ " + ", ".join(f"{json.dumps(key)} = {_format_toml(one)}" for key, one in given.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False)
