"""Configuration files of other clients: found, selected, imported with counts, and exported."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import OnATerminal
from tests.prefork import command as prefork

from handrail.authoring.mcp_server_export import CLIENT_FILES, export_client_configuration
from handrail.authoring.mcp_server_import import import_mcp_servers
from handrail.config.foreign_server_files import list_candidate_server_files, read_foreign_server_file
from handrail.config.mcp_settings import UpstreamServerSettings
from handrail.config.operator_settings import SecretReference
from handrail.frontends.cli.command_group import run_command_line
from handrail.frontends.cli.commands.mcp_import import CLIENTS

BEARER = {"Authorization": {"secret": "REMOTE_AUTHORIZATION", "prefix": "Bearer "}}
FILES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "claude desktop": (
        "~/xdg/Claude/claude_desktop_config.json",
        '{"mcpServers": {"local": {"command": "npx", "args": ["-y", "a"], "env": {"A_TOKEN": "sesame-1234"}}}}',
        {"local": {"command": "npx", "args": ["-y", "a"], "env": {"A_TOKEN": {"secret": "LOCAL_A_TOKEN"}}}},
    ),
    "claude code": (
        "~/.claude.json",
        '{"numStartups": 5, "mcpServers": {"remote": {"type": "http", "url": "https://a.example/mcp", "headers": '
        '{"Authorization": "Bearer ${KEY}"}, "oauth": {"clientId": "c-1", "callbackPort": 8123}}}, "projects": {"WS": '
        '{"mcpServers": {"local": {"type": "stdio", "command": "x", "args": [], "env": {}}}}, "/other": {"mcpServers": '
        '{"theirs": {"command": "y"}}}}}',
        {
            "remote": {
                "url": "https://a.example/mcp",
                "headers": BEARER,
                "oauth": {"client_id": "c-1", "callback_port": 8123},
            },
            "local": {"command": "x"},
        },
    ),
    "claude code, project": (
        "WS/.mcp.json",
        '{"mcpServers": {"remote": {"type": "sse", "url": "${BASE:-https://a.example}/sse"}}}',
        {"remote": {"url": "https://a.example/sse", "transport": "sse"}},
    ),
    "cursor": (
        "~/.cursor/mcp.json",
        '{"mcpServers": {"remote": {"url": "https://a.example/mcp", "headers": {"Authorization": "Bearer ${env:KEY}"}}}}',
        {"remote": {"url": "https://a.example/mcp", "headers": BEARER}},
    ),
    "vs code": (
        "WS/.vscode/mcp.json",
        '{"inputs": [{"id": "k", "type": "promptString", "password": true}], "servers": {"local": {"type": "stdio", '
        '"command": "x", "env": {"K": "${input:k}"}, "dev": {"watch": "**"}}}}',
        {"local": {"command": "x", "env": {"K": {"secret": "MCP_LOCAL_K"}}}},
    ),
    "vs code, older settings": (
        "~/xdg/Code/User/settings.json",
        '{"editor.fontSize": 12, "mcp": {"servers": {"local": {"command": "x"}}}}',
        {"local": {"command": "x"}},
    ),
    "codex": (
        "~/.codex/config.toml",
        'model = "m"\n[mcp_servers.local]\ncommand = "x"\nargs = ["a"]\nenv_vars = ["A_TOKEN"]\nstartup_timeout_sec = 20\n'
        'tool_timeout_sec = 90.5\nenabled_tools = ["t"]\n[mcp_servers.remote]\nurl = "https://a.example/mcp"\n'
        'bearer_token_env_var = "KEY"\nhttp_headers = { X-Region = "eu" }\nenv_http_headers = { X-Org = "ORG" }\n',
        {
            "local": {
                "command": "x",
                "args": ["a"],
                "env": {"A_TOKEN": {"secret": "LOCAL_A_TOKEN"}},
                "timeout_ms": 90_500,
                "connect_timeout_ms": 20_000,
            },
            "remote": {
                "url": "https://a.example/mcp",
                "headers": {"X-Region": "eu", "X-Org": {"expand": "${ORG}"}} | BEARER,
            },
        },
    ),
    "opencode": (
        "~/xdg/opencode/opencode.jsonc",
        '{"$schema": "x", /* mine */ "mcp": {"local": {"type": "local", "command": ["bun", "x", "a"], "environment": '
        '{"A": "{env:HOST}"}}, "remote": {"type": "remote", "url": "https://a.example/mcp", "enabled": false, "headers": '
        '{"Authorization": "Bearer {env:KEY}"},},}}',
        {
            "local": {"command": "bun", "args": ["x", "a"], "env": {"A": {"expand": "${HOST}"}}},
            "remote": {"url": "https://a.example/mcp", "headers": BEARER, "enabled": False},
        },
    ),
    "zed": (
        "~/xdg/zed/settings.json",
        '// Zed\n{"theme": "x", "context_servers": {"local": {"command": {"path": "node", "args": ["/s.js"], "env": null}, '
        '"settings": {}}, "custom": {"source": "custom", "command": "x", "args": [], "env": {}}, "extension": {"source": '
        '"extension", "settings": {}}, "remote": {"url": "https://a.example/mcp"}}}',
        {
            "local": {"command": "node", "args": ["/s.js"]},
            "custom": {"command": "x"},
            "remote": {"url": "https://a.example/mcp"},
        },
    ),
    "gemini": (
        "~/.gemini/settings.json",
        '{"mcpServers": {"remote": {"httpUrl": "https://a.example/mcp", "headers": {"Authorization": "Bearer $KEY"}, '
        '"timeout": 600000, "trust": true}, "local": {"command": "x", "env": {"A": "$HOST", "B": "${HOST}"}}}}',
        {
            "remote": {"url": "https://a.example/mcp", "headers": BEARER, "timeout_ms": 600_000},
            "local": {"command": "x", "env": {"A": {"expand": "${HOST}"}, "B": {"expand": "${HOST}"}}},
        },
    ),
    "qwen": ("WS/.qwen/settings.json", '{"mcpServers": {"local": {"command": "x"}}}', {"local": {"command": "x"}}),
    "windsurf": (
        "~/.codeium/windsurf/mcp_config.json",
        '{"mcpServers": {"remote": {"serverUrl": "https://a.example/mcp", "disabled": true, "disabledTools": ["t"]}}}',
        {"remote": {"url": "https://a.example/mcp", "enabled": False}},
    ),
    "cline": (
        "~/xdg/Code/User/globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json",
        '{"mcpServers": {"remote": {"type": "streamableHttp", "url": "https://a.example/mcp", "timeout": 60, '
        '"alwaysAllow": ["t"]}}}',
        {"remote": {"url": "https://a.example/mcp", "timeout_ms": 60_000}},
    ),
    "copilot": (
        "~/.copilot/mcp-config.json",
        '{"mcpServers": {"local": {"type": "local", "command": "x", "tools": ["*"]}}}',
        {"local": {"command": "x"}},
    ),
    "roo": (
        "WS/.roo/mcp.json",
        '{"mcpServers": {"remote": {"type": "streamable-http", "url": "https://a.example/mcp", "alwaysAllow": [], '
        '"disabled": false, "timeout": 60}}}',
        {"remote": {"url": "https://a.example/mcp", "timeout_ms": 60_000}},
    ),
    "kiro": (
        "~/.kiro/settings/mcp.json",
        '{"mcpServers": {"local": {"command": "uvx", "args": ["a@latest"], "env": {"LEVEL": "ERROR"}, "disabled": true, '
        '"autoApprove": ["*"]}}, "powers": {"mcpServers": {"p": {"command": "q"}}}}',
        {"local": {"command": "uvx", "args": ["a@latest"], "env": {"LEVEL": "ERROR"}, "enabled": False}},
    ),
    "lm studio": (
        "~/.lmstudio/mcp.json",
        '{"mcpServers": {"remote": {"url": "https://a.example/mcp", "headers": {"Authorization": "Bearer ${KEY}"}}}}',
        {"remote": {"url": "https://a.example/mcp", "headers": BEARER}},
    ),
    "amp": (
        "~/xdg/amp/settings.json",
        '{"amp.notifications.enabled": true, "amp.mcpServers": {"local": {"command": "npx", "args": ["a"]}, "remote": '
        '{"url": "https://a.example/sse"}}}',
        {
            "local": {"command": "npx", "args": ["a"]},
            "remote": {"url": "https://a.example/sse", "transport": "sse"},
        },
    ),
    "amazon q": (
        "WS/.amazonq/mcp.json",
        '{"mcpServers": {"local": {"command": "x", "timeout": 120000, "disabled": false}}}',
        {"local": {"command": "x", "timeout_ms": 120_000}},
    ),
    "junie": (
        "WS/.junie/mcp/mcp.json",
        '{"mcpServers": {"local": {"command": "java", "args": ["-jar", "a.jar"], "enabled": false}}}',
        {"local": {"command": "java", "args": ["-jar", "a.jar"], "enabled": False}},
    ),
    "copilot in jetbrains": (
        "~/xdg/github-copilot/intellij/mcp.json",
        '{"servers": {"local": {"command": "x"}, "remote": {"url": "https://a.example/mcp", "requestInit": {"headers": '
        '{"Authorization": "Bearer ${KEY}"}}}}}',
        {"local": {"command": "x"}, "remote": {"url": "https://a.example/mcp", "headers": BEARER}},
    ),
    "crush": (
        "WS/crush.json",
        '{"$schema": "https://charm.land/crush.json", "mcp": {"local": {"type": "stdio", "command": "node", "args": ["s"], '
        '"timeout": 120, "disabled": false}, "remote": {"type": "sse", "url": "https://a.example/x"}}}',
        {
            "local": {"command": "node", "args": ["s"], "timeout_ms": 120_000},
            "remote": {"url": "https://a.example/x", "transport": "sse"},
        },
    ),
    "continue": (
        "~/.continue/config.yaml",
        """
name: My Agent # mine
schema: v1
models: []
mcpServers:
  - name: local
    type: stdio
    command: uvx
    args: [a, --mode, no, "--port", 8080]
    env:
      A_TOKEN: ${{ secrets.A_TOKEN }}
      ANSWER: yes
    cwd: /srv
    connectionTimeout: 5000
  - name: remote
    type: streamable-http
    url: https://a.example/mcp
    requestOptions:
      headers:
        Authorization: "Bearer ${{ secrets.KEY }}"
""",
        {
            "local": {
                "command": "uvx",
                "args": ["a", "--mode", "no", "--port", "8080"],
                "env": {"A_TOKEN": {"secret": "LOCAL_A_TOKEN"}, "ANSWER": "yes"},
                "cwd": "/srv",
                "connect_timeout_ms": 5_000,
            },
            "remote": {"url": "https://a.example/mcp", "headers": BEARER},
        },
    ),
    "continue, project": (
        "WS/.continue/mcpServers/local.yaml",
        "name: A\nversion: 0.0.1\nschema: v1\nmcpServers:\n  - name: local\n    command: x\n    args:\n    - a\n",
        {"local": {"command": "x", "args": ["a"]}},
    ),
    "goose": (
        "~/xdg/goose/config.yaml",
        """
GOOSE_PROVIDER: openai
extensions:
  developer:
    bundled: true
    enabled: true
    name: developer
    timeout: 300
    type: builtin
  local:
    args:
    - mcp-server-fetch
    bundled: null
    cmd: uvx
    description: ''
    enabled: false
    env_keys:
    - A_TOKEN
    envs:
      LEVEL: 'on'
    name: local
    timeout: 300
    type: stdio
  remote:
    enabled: true
    headers:
      Authorization: Bearer ${KEY}
    name: remote
    type: streamable_http
    uri: https://a.example/mcp
""",
        {
            "local": {
                "command": "uvx",
                "args": ["mcp-server-fetch"],
                "env": {"A_TOKEN": {"secret": "LOCAL_A_TOKEN"}, "LEVEL": "on"},
                "enabled": False,
                "timeout_ms": 300_000,
            },
            "remote": {"url": "https://a.example/mcp", "headers": BEARER},
        },
    ),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, a workspace in ``ws``, and a configuration in ``cfg``."""
    home = tmp_path.resolve()
    for name in ("ws", "cfg"):
        (home / name).mkdir(mode=0o700)
    (home / "cfg" / "handrail.toml").write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    monkeypatch.delenv("CODEX_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return home


def write_file(home: Path, client: str) -> Path:
    place, text, _ = FILES[client]
    path = Path(place.replace("~", str(home)).replace("WS", str(home / "ws")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("WS", str(home / "ws")))
    return path


def place_of(home: Path) -> list[str]:
    return ["-C", str(home / "ws"), "--state", str(home / "st"), "--config", str(home / "cfg" / "handrail.toml")]


def tables(home: Path) -> dict[str, Any]:
    return tomllib.loads((home / "cfg" / "handrail.toml").read_text()).get("mcp", {}).get("servers", {})


@pytest.mark.parametrize("client", FILES)
def test_the_file_of_each_client_is_found_and_its_servers_are_imported(
    home: Path, client: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_file(home, client)
    assert run_command_line(["mcp", "import", "--json", *place_of(home)]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["file"] == str(path) and not tables(home), "a list changes nothing"
    code = run_command_line(["mcp", "import", "--yes", "--no-install", *place_of(home)])
    assert tables(home) == FILES[client][2]
    assert code == (1 if client in ("zed", "goose") else 0), "an extension of their own is left out"


def test_client_files_on_macos_are_found_in_their_macos_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = [str(path) for _, path in list_candidate_server_files(home / "ws")]
    own = f"{home}/Library/Application Support"
    assert {
        f"{own}/Claude/claude_desktop_config.json",
        f"{own}/Code/User/mcp.json",
        f"{home}/.config/zed/settings.json",
    } <= {*found}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mcpServers:\n  - name: a\n   command: x\n", "is not valid YAML"),
        ("a: &x [1]\nb: *x\n", r"has an alias"),
        ("mcpServers:\n  a: {command: x}\nmcpServers:\n  a: {command: y}\n", "'mcpServers' occurs twice"),
        ("\tmcpServers: []\n", "is not valid YAML"),
        ("- a\n- b\n", 'has no "mcpServers"'),
        ("", 'has no "mcpServers"'),
        ("!!python/object/apply:os.system [id]\n", 'has no "mcpServers"'),
    ],
)
def test_an_unusable_yaml_file_is_refused_with_the_reason(home: Path, text: str, why: str) -> None:
    (path := home / "other.yaml").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_foreign_server_file(path, None)


def test_yaml_list_servers_with_the_same_name_get_distinct_names(home: Path) -> None:
    (path := home / "other.yml").write_text(
        "mcpServers: [{name: a, command: x}, {name: a, command: y}, {command: z}]\n"
    )
    assert [one.name for one in read_foreign_server_file(path, None).servers] == ["a", "a 2", "server 3"]


def test_a_damaged_client_file_does_not_prevent_the_import_of_others(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_file(home, "cursor").write_text('{"mcpServers": {')
    write_file(home, "gemini")
    write_file(home, "codex").write_text("a = = b")
    assert run_command_line(["mcp", "import", "--yes", "--no-install", *place_of(home)]) == 0
    assert "not valid JSON" in (err := capfd.readouterr().err) and "not valid TOML" in err
    assert tables(home).keys() == {"remote", "local"}


def test_an_import_ends_with_counts_and_its_exit_code_shows_failures(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(servers: object, *more: str) -> tuple[int, str]:
        (home / "other.json").write_text(json.dumps({"mcpServers": servers}))
        code = run_command_line(["mcp", "import", str(home / "other.json"), "--yes", *more, *place_of(home)])
        return code, capfd.readouterr().err.splitlines()[-1]

    own = {"command": "handrail", "args": ["mcp"]}
    assert run({"a": {"command": "/x"}, "handrail": own}) == (
        0,
        "handrail mcp import: 1 of 2 servers imported, Handrail itself skipped.",
    )
    assert run({"handrail": own}) == (0, "handrail mcp import: 0 of 1 servers imported, Handrail itself skipped.")
    assert run({"b": {"command": "/x"}, "bad": {"url": "ws://x"}, "c": {"url": "https://u@x"}}) == (
        1,
        "handrail mcp import: 1 of 3 servers imported, 2 left out.",
    )
    docker = {"d": {"command": "docker", "args": ["run", "image"]}, "e": {"command": "/x"}}
    assert run(docker) == (1, "handrail mcp import: 2 of 2 servers imported, 1 not installed.")
    assert {*tables(home)} == {"a", "b", "d", "e"}


def test_each_imported_server_is_checked_like_a_configured_server(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "cfg" / "handrail.toml").write_text('[mcp.servers.git]\ncommand = "/x"\n[mcp.servers.broken]\nurl = 5\n')
    servers = {
        "git_hub": {"command": "/x"},
        "broken": {"command": "/x"},
        "port": {"url": "https://a.example:99999/mcp"},
        "space": {"url": "https://a b/"},
        "late": {"command": "/x", "timeout": 60, "initTimeout": 10**9},
        "good": {"command": "/x"},
    }
    (home / "other.json").write_text(json.dumps({"mcpServers": servers}))
    assert run_command_line(["mcp", "import", str(home / "other.json"), "--yes", *place_of(home)]) == 1
    shown = capfd.readouterr().out
    assert {*tables(home)} == {"git", "broken", "late", "good"}
    for name in ("git_hub", "broken", "port", "space"):
        assert f"{name}: not imported: " in shown
    capfd.readouterr()
    assert run_command_line(["mcp", "list", "--json", *place_of(home)]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)}
    assert states["broken"].startswith("cannot be used: url:") and "cannot be used" not in states["good"]


BY_HAND = """
[mcp.servers.good]
command = "/bin/true"
[mcp.servers.both]
command = "x"
url = "https://a.example"
env = { TOKEN = "sesame-1234" }
[mcp.servers.typo]
comand = "x"
[mcp.servers."two words"]
command = "x"
[mcp.servers.up]
command = "x"
read = ["../up"]
[mcp.servers.off]
comand = "x"
"""


@pytest.mark.parametrize(
    "command", [["tools", "list"], ["call", "glob", '{"pattern": "*"}'], ["mcp", "list"], ["config"], ["find", "read"]]
)
def test_an_invalid_server_in_the_configuration_does_not_stop_any_command(
    home: Path, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "cfg" / "handrail.toml").write_text('rules = ["allow glob"]\n[mcp]\nfiles = ["gone.json"]\n' + BY_HAND)
    assert run_command_line([*command, *place_of(home)]) == 0
    shown = capfd.readouterr()
    assert "sesame-1234" not in shown.out + shown.err


def test_the_server_list_and_the_doctor_name_the_fault_of_each_server(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "cfg" / "handrail.toml").write_text('[mcp]\nfiles = ["gone.json"]\n' + BY_HAND)
    assert run_command_line(["mcp", "list", "--json", *place_of(home)]) == 0
    rows = json.loads(capfd.readouterr().out)
    run_command_line(["doctor", "--json", *place_of(home)])
    checks = json.loads(capfd.readouterr().out)
    for shown in ([str(one["state"]) for one in rows], [str(one) for one in checks]):
        for text in (
            "either command or url",
            "did you mean 'command'?",
            "'two words' is not valid",
            "contains '..'",
            "No such file",
        ):
            assert sum(text in one for one in shown) >= 1, text


@pytest.fixture
def terminal(home: Path) -> Iterator[OnATerminal]:
    write_file(home, "cursor")
    write_file(home, "codex")
    write_file(home, "windsurf")
    environment = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "xdg"), "TERM": "xterm", "PATH": "/usr/bin:/bin"}
    command = [*prefork.COLD, "mcp", "import", "--no-install", *place_of(home)]
    found = OnATerminal(command, environment, home)
    yield found
    found.close()


def test_an_import_without_a_file_asks_which_of_the_found_files_to_import(home: Path, terminal: OnATerminal) -> None:
    shown = terminal.wait_for("nothing to stop): ")
    assert [f"{number}  {who}" in shown for number, who in ((1, "Cursor"), (2, "Codex"), (3, "Windsurf"))] == [True] * 3
    terminal.type("7\r")
    terminal.wait_for("Expected numbers from 1 to 3, or all.")
    terminal.wait_for("nothing to stop): ")
    terminal.type("2, 2\r")
    terminal.wait_for("into your configuration?")
    terminal.type("y\r")
    assert terminal.end() == 0
    assert {*tables(home)} == {"local", "remote"} and "2 of 2 servers imported." in terminal.shown


def test_an_empty_selection_imports_no_server(home: Path, terminal: OnATerminal) -> None:
    terminal.wait_for("nothing to stop): ")
    terminal.type("\r")
    assert terminal.end() == 0 and not tables(home)


SERVERS = {
    "local": UpstreamServerSettings.model_validate(
        {
            "command": "x",
            "args": ["-a", "b c"],
            "env": {"MODE": "dev", "T": {"secret": "T"}, "L": {"expand": "${L:-info}"}},
        }
    ),
    "remote": UpstreamServerSettings.model_validate(
        {
            "url": "https://a.example/mcp",
            "headers": {"Authorization": {"secret": "R", "prefix": "Bearer "}, "X-Region": "eu"},
        }
    ),
    "older": UpstreamServerSettings.model_validate(
        {"url": "https://b.example/sse", "transport": "sse", "enabled": False}
    ),
}
SECRETS = {"T": SecretReference(env="MY_TOKEN"), "R": SecretReference(file="/home/ann/secret")}


FURTHER = {
    "l": UpstreamServerSettings.model_validate(
        {"command": "x", "cwd": "/srv/x", "timeout_ms": 90_500, "connect_timeout_ms": 20_000}
    ),
    "r": UpstreamServerSettings.model_validate(
        {
            "url": "https://a.example/mcp",
            "oauth": {
                "client_id": "c-1",
                "callback_port": 8123,
                "scopes": ["a", "b"],
                "client_secret": {"secret": "S"},
            },
        }
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_each_further_setting_is_exported_or_named_as_ignored(tmp_path: Path, client: str) -> None:
    done = export_client_configuration(client, FURTHER, {})
    (file := tmp_path / ("config.toml" if client == "codex" else "mcp.json")).write_text(done.text)
    found = {one.name: one.table for one in import_mcp_servers(file, tmp_path, environment={})}
    for key in ("cwd", "timeout_ms", "connect_timeout_ms"):
        assert found["l"].get(key) == getattr(FURTHER["l"], key) or any(f"l: {key}: " in one for one in done.ignored)
    if client != "claude-desktop":
        is_named = any("r: oauth: " in one for one in done.ignored)
        assert is_named or found["r"]["oauth"]["client_id"] == "c-1"
    if client == "codex":
        assert not [one for one in done.ignored if one.startswith("l:")]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_default_of_a_variable_survives_the_export(tmp_path: Path, client: str) -> None:
    (file := tmp_path / ("config.toml" if client == "codex" else "mcp.json")).write_text(
        export_client_configuration(client, SERVERS, SECRETS).text
    )
    found = {one.name: one.table for one in import_mcp_servers(file, tmp_path, environment={})}
    assert found["local"]["env"]["L"] in ("info", {"expand": "${L:-info}"})


def test_every_export_client_has_its_configuration_file() -> None:
    assert {*CLIENTS} == {*CLIENT_FILES}


@pytest.mark.parametrize("client", CLIENTS)
def test_an_import_reads_an_exported_file(tmp_path: Path, client: str) -> None:
    done = export_client_configuration(client, SERVERS, SECRETS)
    file = (
        tmp_path
        / (".gemini" if client in ("gemini", "qwen") else "x")
        / ("config.toml" if client == "codex" else "mcp.json")
    )
    file.parent.mkdir()
    file.write_text(done.text)
    found = {one.name: one.table for one in import_mcp_servers(file, tmp_path, environment={})}
    assert {*found} | {*done.left_out} == {*SERVERS}
    assert (found["local"]["command"], found["local"]["args"]) == ("x", ["-a", "b c"])
    assert found["local"]["env"]["MODE"] == "dev" and "T" in found["local"]["env"]
    if client != "claude-desktop":
        assert found["remote"]["url"] == "https://a.example/mcp" and found["remote"]["headers"]["X-Region"] == "eu"
        assert found["remote"]["headers"]["Authorization"]["prefix"] == "Bearer "
        assert found["older"] == {"url": "https://b.example/sse", "transport": "sse", "enabled": False}
    assert any("MY_TOKEN" in name for name in done.placeholders) or client == "codex"


@pytest.mark.parametrize("client", CLIENTS)
def test_an_exported_server_entry_is_recognised_as_handrail_by_the_import(
    home: Path, client: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["mcp", "export", client, *place_of(home)]) == 0
    (file := home / ("config.toml" if client == "codex" else "mcp.json")).write_text(capfd.readouterr().out)
    (one,) = import_mcp_servers(file, home)
    assert (one.name, one.is_handrail) == ("handrail", True)


@pytest.mark.parametrize("client", CLIENTS)
def test_no_export_contains_a_secret(home: Path, client: str, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "cfg" / "secret").write_text("sesame-1234")
    (home / "cfg" / "handrail.toml").write_text(
        f'[secrets.S]\nfile = "{home / "cfg" / "secret"}"\n[mcp.servers.a]\ncommand = "x"\n'
        'env = { A = { secret = "S" }, TOKEN = "sesame-1234", B = "ghp_sesame-1234" }\n'
        '[mcp.servers.b]\ncommand = "x"\nargs = ["--token", "sesame-1234"]\n'
        '[mcp.servers.c]\nurl = "https://a.example/?key=sesame-1234"\n'
        '[mcp.servers.d]\nurl = "https://a.example/mcp"\nheaders = { Authorization = "Bearer sesame-1234" }\n'
    )
    assert run_command_line(["mcp", "export", client, "--servers", *place_of(home)]) == 1
    shown = capfd.readouterr()
    assert "sesame-1234" not in shown.out + shown.err and "b: left out" in shown.err and "c: left out" in shown.err
