"""Reports about odd forms in imported files: only the odd value is affected."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from handrail import config
from handrail.authoring.mcp_server_import import ImportedMcpServer, format_server_tables, import_mcp_servers
from handrail.config.operator_settings import Settings
from handrail.contract.errors import UsageError
from handrail.upstream.server_config_loader import load_enabled_servers

ENVIRONMENT = {"HOST": "h.example", "PORT": "8080", "A_TOKEN": "sesame-1234", "EMPTY": ""}


def read(folder: Path, servers: object, name: str = "mcp.json", **whole: object) -> dict[str, ImportedMcpServer]:
    """Import servers, and check that each good one is a valid table."""
    (file := folder / name).write_text(json.dumps({"mcpServers": servers, **whole}))
    return read_file(file)


def read_file(file: Path) -> dict[str, ImportedMcpServer]:
    found = import_mcp_servers(file, file.parent, environment=ENVIRONMENT)
    good = [one for one in found if not one.problem and not one.is_handrail]
    text = format_server_tables(good, {name: Path("/s", name) for one in good for name in one.secrets})
    assert {*Settings.model_validate(tomllib.loads(text)).mcp.servers} == {one.name for one in good}
    return {one.name: one for one in found}


@pytest.mark.parametrize(
    ("server", "table"),
    [
        ({"command": "x", "url": ""}, {"command": "x"}),
        ({"command": "x", "url": None, "args": None, "env": None, "headers": None, "cwd": None}, {"command": "x"}),
        ({"command": "", "url": "https://a.example/mcp"}, {"url": "https://a.example/mcp"}),
        ({"command": None, "url": " https://a.example/mcp\n"}, {"url": "https://a.example/mcp"}),
        ({"command": "x", "url": "https://a.example", "type": "stdio"}, {"command": "x"}),
        ({"command": "x", "url": "https://a.example", "type": "http"}, {"url": "https://a.example"}),
        ({"type": "streamableHttp", "url": "https://a.example"}, {"url": "https://a.example"}),
        ({"type": "Streamable-HTTP", "url": "https://a.example"}, {"url": "https://a.example"}),
        ({"transport": "streamable_http", "url": "https://a.example"}, {"url": "https://a.example"}),
        ({"transport": {"type": "sse", "url": "https://a.example"}}, {"url": "https://a.example", "transport": "sse"}),
        ({"type": "SSE", "serverUrl": "https://a.example"}, {"url": "https://a.example", "transport": "sse"}),
        ({"type": "local", "command": ["x", "-a"], "args": ["b"]}, {"command": "x", "args": ["-a", "b"]}),
        ({"command": {"path": "x", "args": ["a"], "env": {"A": "1"}}}, {"command": "x", "args": ["a"], "env": {"A": "1"}}),
        ({"command": "x", "args": ["-p", 8080, 1.5, True, None]}, {"command": "x", "args": ["-p", "8080", "1.5", "true"]}),
        ({"command": "x", "env": {"A": 1, "B": False, "C": None, "D": ""}}, {"command": "x", "env": {"A": "1", "B": "false", "D": ""}}),
        ({"command": "x", "env": {"A": {"deep": 1}, "B": "2"}}, {"command": "x", "env": {"B": "2"}}),
        ({"command": "x", "env": [{"name": "A", "value": "1"}]}, {"command": "x", "env": {"A": "1"}}),
        ({"command": "x", "env": {"A=B": "1", "": "2", "C": "3"}}, {"command": "x", "env": {"C": "3"}}),
        ({"command": "x", "env": {"A": "half \ud83d", "B": "nul \0", "C": "3"}}, {"command": "x", "env": {"C": "3"}}),
        ({"command": "x", "disabled": True}, {"command": "x", "enabled": False}),
        ({"command": "x", "disabled": "true"}, {"command": "x", "enabled": False}),
        ({"command": "x", "disabled": 1}, {"command": "x", "enabled": False}),
        ({"command": "x", "disabled": "false", "enabled": "yes"}, {"command": "x"}),
        ({"command": "x", "enabled": "False"}, {"command": "x", "enabled": False}),
        ({"command": "x", "isActive": False}, {"command": "x", "enabled": False}),
        ({"command": "npx -y @scope/server --flag"}, {"command": "npx", "args": ["-y", "@scope/server", "--flag"]}),
        ({"command": "x 'a b'"}, {"command": "x", "args": ["a b"]}),
        ({"command": "C:\\Program Files\\x.exe"}, {"command": "C:\\Program Files\\x.exe"}),
        ({"command": "my program", "args": ["a"]}, {"command": "my program", "args": ["a"]}),
        ({"command": "cmd", "args": ["/c", "npx", "-y", "@a/b"]}, {"command": "npx", "args": ["-y", "@a/b"]}),
        ({"command": "C:\\Windows\\System32\\cmd.exe", "args": ["/C", "node", "s.js"]}, {"command": "node", "args": ["s.js"]}),
        ({"command": "cmd /c npx -y a"}, {"command": "npx", "args": ["-y", "a"]}),
        ({"command": ["cmd", "/c", "npx", "a"]}, {"command": "npx", "args": ["a"]}),
        ({"command": "cmd", "args": ["/C", "npx -y a"]}, {"command": "npx", "args": ["-y", "a"]}),
        ({"command": "cmd", "args": ["/d", "/s", "/c", "npx", "-y", "a"]}, {"command": "npx", "args": ["-y", "a"]}),
        ({"command": "cmd", "args": ["/c"]}, {"command": "cmd", "args": ["/c"]}),
        ({"command": "cmd", "args": ["/k", "x"]}, {"command": "cmd", "args": ["/k", "x"]}),
        ({"command": "npx", "args": ["-y", "mcp-remote", "https://a.example/mcp", "9696", "--debug", "--host", "127.0.0.1"]}, {"url": "https://a.example/mcp"}),
        ({"command": "cmd", "args": ["/c", "npx", "mcp-remote@latest", "https://a.example/sse", "--auth-timeout", "60"]}, {"url": "https://a.example/sse", "transport": "sse"}),
        ({"transportType": "sse", "url": "https://a.example/x"}, {"url": "https://a.example/x", "transport": "sse"}),
        ({"transportType": "stdio", "command": "x"}, {"command": "x"}),
        ({"command": "x", "env": ["A=1", "B=2=3", {"key": "C", "value": "4"}]}, {"command": "x", "env": {"A": "1", "B": "2=3", "C": "4"}}),
        ({"url": "https://a.example", "headers": ["X-A: b", "X-C:d"]}, {"url": "https://a.example", "headers": {"X-A": "b", "X-C": "d"}}),
        ({"url": "https://a.example", "requestInit": {"headers": {"X-A": "b"}}}, {"url": "https://a.example", "headers": {"X-A": "b"}}),
        ({"url": "https://a.example", "authorization_token": "Bearer ${A_TOKEN}"}, {"url": "https://a.example", "headers": {"Authorization": {"secret": "ODD_AUTHORIZATION", "prefix": "Bearer "}}}),
        ({"url": "HTTPS://A.example/mcp"}, {"url": "https://A.example/mcp"}),
        ({"command": "x", "timeout": "30s"}, {"command": "x", "timeout_ms": 30_000}),
        ({"command": "x", "timeout": "30"}, {"command": "x", "timeout_ms": 30_000}),
        ({"command": "x", "timeoutMs": "1500ms"}, {"command": "x", "timeout_ms": 1_500}),
        ({"command": "x", "enabled": False}, {"command": "x", "enabled": False}),
        ({"command": "x", "disabled": False, "timeout": 60}, {"command": "x", "timeout_ms": 60_000}),
        ({"command": "x", "timeout": "soon"}, {"command": "x"}),
        ({"command": "x", "timeout": -1}, {"command": "x"}),
        ({"command": "x", "timeout": 10**12}, {"command": "x", "timeout_ms": 86_400_000}),
    ],
    ids=str,
)  # fmt: skip
def test_an_unusual_server_entry_is_read_with_the_meaning_of_its_client(
    tmp_path: Path, server: object, table: dict[str, Any]
) -> None:
    found = read(tmp_path, {"odd": server, "plain": {"command": "y"}})
    assert (found["odd"].problem, found["odd"].table) == ("", table)
    assert found["plain"].table == {"command": "y"}


REPEATED = {
    "an unrelated setting": ('{"a": 1, "a": 2, "mcpServers": {"s": {"command": "x"}}}', {"s": ""}),
    "a setting of an unrelated table": ('{"b": {"a": 1, "a": 2}, "mcpServers": {"s": {"command": "x"}}}', {"s": ""}),
    "a server": (
        '{"mcpServers": {"s": {"command": "x"}, "s": {"command": "y"}, "t": {"command": "z"}}}',
        {"s": "'s' occurs twice", "t": ""},
    ),
    "a setting of a server": (
        '{"mcpServers": {"s": {"command": "x", "command": "y"}, "t": {"command": "z"}}}',
        {"s": "'command' occurs twice", "t": ""},
    ),
    "a variable of a server": (
        '{"mcpServers": {"s": {"command": "x", "env": {"K": "1", "K": "2"}}, "t": {"command": "z"}}}',
        {"s": "'K' occurs twice", "t": ""},
    ),
}


@pytest.mark.parametrize(("text", "problems"), REPEATED.values(), ids=REPEATED)
def test_a_key_that_occurs_twice_costs_at_most_its_server(tmp_path: Path, text: str, problems: dict[str, str]) -> None:
    (file := tmp_path / "mcp.json").write_text(text)
    found = {one.name: one.problem.partition(" in one")[0] for one in import_mcp_servers(file, tmp_path)}
    assert found == problems


def test_a_key_in_a_deep_value_of_a_server_is_found(tmp_path: Path) -> None:
    deep = '{"a":' * 400 + '{"k": 1, "k": 2}' + "}" * 400
    text = '{"mcpServers": {"s": {"command": "x", "more": ' + deep + "}}}"
    (file := tmp_path / "mcp.json").write_text(text)
    (one,) = import_mcp_servers(file, tmp_path)
    assert "'k' occurs twice" in one.problem


def test_a_table_of_servers_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "mcp.json").write_text('{"mcpServers": {}, "mcpServers": {"s": {"command": "x"}}}')
    with pytest.raises(UsageError, match="'mcpServers' occurs twice"):
        import_mcp_servers(file, tmp_path)


PLACES: dict[str, object] = {
    "Continue, older": {
        "experimental": {"modelContextProtocolServers": [{"transport": {"type": "stdio", "command": "x"}}]}
    },
    "a container of VS Code": {"customizations": {"vscode": {"mcp": {"servers": {"server-1": {"command": "x"}}}}}},
    "a workspace of VS Code": {"folders": [], "settings": {"mcp": {"servers": {"server-1": {"command": "x"}}}}},
    "Warp": {"server-1": {"command": "x", "args": [], "env": {}, "working_directory": None, "start_on_launch": True}},
}


@pytest.mark.parametrize("whole", PLACES.values(), ids=PLACES)
def test_servers_in_further_places_are_found(tmp_path: Path, whole: object) -> None:
    (file := tmp_path / "mcp.json").write_text(json.dumps(whole))
    (one,) = import_mcp_servers(file, tmp_path)
    assert (one.name, one.table, one.problem) == ("server-1", {"command": "x"}, "")


@pytest.mark.parametrize(
    ("server", "left_out"),
    [
        ({"command": "x", "env": {"A": None}}, "A: null"),
        ({"command": "x", "args": [None]}, "args: null"),
        ({"command": "x", "env": {"A": [1]}}, "A: it is not a string"),
        ({"command": "x", "env": {"A": "${config:editor.x}"}}, "A: it has ${config:editor.x}"),
        ({"command": "x", "env": {"A": "{file:~/.secret}"}}, "A: it has {file:~/.secret}"),
        ({"command": "x", "headers": {"A": "b"}}, "headers: the server has a command"),
        ({"url": "https://a.example", "env": {"A": "b"}}, "env: the server has a url"),
        ({"command": "x", "envFile": "/nowhere/.env"}, "envFile: /nowhere/.env cannot be read"),
        ({"command": "x", "autoApprove": ["*"]}, "autoApprove: rules grant permissions"),
        ({"command": "x", "alwaysAllow": ["*"]}, "alwaysAllow: rules grant permissions"),
        ({"command": "x", "trust": True}, "trust: rules grant permissions"),
        ({"command": "x", "colour": "red"}, "colour: Handrail has no such setting"),
    ],
    ids=str,
)
def test_an_unsupported_part_of_a_server_entry_is_left_out_and_named(
    tmp_path: Path, server: object, left_out: str
) -> None:
    one = read(tmp_path, {"odd": server})["odd"]
    assert one.problem == "" and any(text.startswith(left_out) for text in one.ignored_keys), one.ignored_keys


@pytest.mark.parametrize(
    "server",
    [
        None,
        [],
        5,
        "text",
        {},
        {"command": 5.5, "args": {"a": 1}},
        {"command": []},
        {"command": "x", "args": "a b"},
        {"command": "x", "args": [["a"]]},
        {"command": "x", "env": "A=1"},
        {"command": "x", "args": ["\ud83d"]},
        {"url": "https://a.example", "type": "websocket"},
        {"source": "extension", "settings": {}},
        {"command": "x", "args": ["${NOT_SET_ANYWHERE}"]},
        {"command": "x", "args": ["--dir", "${config:x}"]},
        {"command": "x", "args": ["--db", "${A_TOKEN}"]},
        {"url": "https://a.example/${A_TOKEN}"},
    ],
    ids=str,
)
def test_an_invalid_server_is_left_out_with_a_reason_and_the_others_are_imported(
    tmp_path: Path, server: object
) -> None:
    found = read(tmp_path, {"before": {"command": "x"}, "odd": server, "after": {"command": "y"}})
    assert found["odd"].problem and "sesame-1234" not in found["odd"].problem
    assert [found[name].problem for name in ("before", "after")] == ["", ""]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("${HOST}", {"expand": "${HOST}"}),
        ("${env:HOST}", {"expand": "${HOST}"}),
        ("{env:HOST}", {"expand": "${HOST}"}),
        ("${HOST:-localhost}", {"expand": "${HOST:-localhost}"}),
        ("http://${HOST}:${PORT:-80}/", {"expand": "http://${HOST}:${PORT:-80}/"}),
        ("${workspaceFolder}/data", "WS/data"),
        ("${workspaceFolder:root}${/}data", "WS/data"),
        ("$HOST and ${", "$HOST and ${"),
        ("${A_TOKEN}", {"secret": "S_VALUE"}),
        ("Bearer ${env:A_TOKEN}", {"secret": "S_VALUE", "prefix": "Bearer "}),
        ("${A_TOKEN:-}", {"expand": "${A_TOKEN:-}"}),
        ("${A_TOKEN:-fallback-9876}", {"expand": "${A_TOKEN}"}),
        ("pg://u:${A_TOKEN}@h/d", {"expand": "pg://u:${A_TOKEN}@h/d"}),
    ],
)
def test_variables_in_server_entries_keep_their_meaning(tmp_path: Path, text: str, written: object) -> None:
    one = read(tmp_path, {"s": {"command": "x", "env": {"VALUE": text}}})["s"]
    expected = written.replace("WS", str(tmp_path)) if isinstance(written, str) else written
    assert (one.problem, one.table["env"]) == ("", {"VALUE": expected})


def test_variables_in_arguments_are_replaced_by_their_current_values(tmp_path: Path) -> None:
    args = ["--host=${HOST}", "${env:PORT}", "${NONE:-d}", "${EMPTY:-e}", "${workspaceFolder}"]
    one = read(tmp_path, {"s": {"command": "x", "args": args}})["s"]
    assert one.table["args"] == ["--host=h.example", "8080", "d", "e", str(tmp_path)]
    assert any("written as --host=h.example" in text for text in one.ignored_keys)


def test_inputs_of_a_client_file_become_variables_or_their_defaults(tmp_path: Path) -> None:
    inputs = [{"id": "pat", "password": True}, {"id": "region", "default": "eu"}, {"id": "team"}, "odd", {"id": 5}]
    env = {"GH": "${input:pat}", "REGION": "${input:region}", "TEAM": "${input:team}", "OTHER": "${input:unknown}"}
    one = read(tmp_path, {"s": {"command": "x", "args": ["${input:region}"], "env": env}}, inputs=inputs)["s"]
    assert one.table["args"] == ["eu"]
    assert one.table["env"] == {
        "GH": {"secret": "MCP_S_GH"},
        "REGION": "eu",
        "TEAM": {"expand": "${MCP_S_TEAM}"},
        "OTHER": {"expand": "${MCP_S_OTHER}"},
    }
    assert one.variables == {"MCP_S_GH": "MCP_S_GH"} and {"MCP_S_GH", "MCP_S_TEAM", "MCP_S_OTHER"} == {*one.required}


def test_an_input_may_have_any_id(tmp_path: Path) -> None:
    inputs = [{"id": "Api Key", "password": True}, {"id": "päth/x:y", "default": "d"}]
    env = {"K": "${input:Api Key}", "P": "${input:päth/x:y}", "O": "a${input:other one}b"}
    one = read(tmp_path, {"s": {"command": "x", "env": env}}, inputs=inputs)["s"]
    assert one.table["env"] == {"K": {"secret": "MCP_S_K"}, "P": "d", "O": {"expand": "a${MCP_S_O}b"}}


SIGN_INS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Cursor": ({"auth": {"CLIENT_ID": "c", "CLIENT_SECRET": "s", "scopes": ["x"]}}, {"client_id": "c", "scopes": ["x"]}, "oauth: its client secret"),
    "opencode": ({"oauth": {"clientId": "{env:HOST}", "scope": "a b"}}, {"client_id": "h.example", "scopes": ["a", "b"]}, "oauth ${HOST}: written"),
    "opencode, without": ({"oauth": False}, {}, ""),
    "opencode, with a secret": ({"oauth": {"clientId": "c", "clientSecret": "{env:A_TOKEN}"}}, {"client_id": "c"}, "oauth: its client secret"),
    "a variable that is not set": ({"oauth": {"clientId": "${env:NOWHERE}", "callbackPort": 81}}, {"callback_port": 81}, "oauth: its oauth names"),
    "a token": ({"auth": {"type": "bearer", "token": "sesame-1234"}}, {}, "auth: Handrail has no such setting"),
    "a client that is no text": ({"oauth": {"clientId": {"a": 1}}}, {}, "oauth: it is not a string"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "table", "left_out"), SIGN_INS.values(), ids=SIGN_INS)
def test_the_sign_in_of_a_server_is_read_and_what_is_left_out_is_named(
    tmp_path: Path, more: dict[str, Any], table: dict[str, Any], left_out: str
) -> None:
    one = read(tmp_path, {"s": {"url": "https://a.example", **more}})["s"]
    assert (one.problem, one.table.get("oauth", {})) == ("", table)
    assert any(text.startswith(left_out) for text in one.ignored_keys) or not left_out, one.ignored_keys
    assert "sesame-1234" not in str(one)


def test_variables_of_an_env_file_are_read_and_the_server_overrides_them(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(
        "# mine\nexport MODE=dev # now\nA_TOKEN='abc def 123'\nTEXT=\"two\\nlines\"\n\nbroken line\nPORT = 1\nMODE2=\n"
    )
    server = {"command": "x", "envFile": "${workspaceFolder}/.env", "env": {"PORT": "2"}}
    one = read(tmp_path, {"s": server})["s"]
    assert one.table["env"] == {
        "MODE": "dev",
        "A_TOKEN": {"secret": "S_A_TOKEN"},
        "TEXT": "two\nlines",
        "PORT": "2",
        "MODE2": "",
    }
    assert one.secrets == {"S_A_TOKEN": "abc def 123"}


@pytest.mark.parametrize("place", ["pipe", "device", "folder"])
@pytest.mark.parametrize("subject", ["file", "envFile"])
def test_a_file_that_is_no_regular_file_is_never_waited_for(tmp_path: Path, place: str, subject: str) -> None:
    odd = tmp_path / "odd.json"
    if place == "pipe":
        os.mkfifo(odd)
    elif place == "device":
        odd.symlink_to("/dev/zero")
    else:
        odd.mkdir()
    reason = "Is a directory" if place == "folder" else "is not a regular file"
    if subject == "file":
        with pytest.raises(UsageError, match=reason):
            import_mcp_servers(odd, tmp_path)
        return
    one = read(tmp_path, {"s": {"command": "x", "envFile": str(odd)}})["s"]
    assert not one.problem and [why for why in one.ignored_keys if reason in why]
    configured = tmp_path / "handrail.toml"
    configured.write_text('[mcp]\nfiles = ["mcp.json"]\n')
    configured.chmod(0o600)
    (loaded,) = load_enabled_servers(config.load_configuration(configured))
    assert reason in loaded.missing_reason


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_comments_and_trailing_commas_and_byte_order_marks_are_accepted(tmp_path: Path, encoding: str) -> None:
    text = (
        '// a\n{ "mcpServers": { /* b, */ "s": { "command": "x", "args": ["a//b", "/*", ",]", "\\",}"], }, }, } // end'
    )
    (file := tmp_path / "mcp.json").write_bytes(text.encode(encoding))
    assert read_file(file)["s"].table["args"] == ["a//b", "/*", ",]", '",}']


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"{", b"[1]", b"null", b'"x"', b'{"mcp": 5, "servers": [1]}', b"{" * 100_000]
)
def test_an_invalid_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (file := tmp_path / "mcp.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"mcp\.json"):
        import_mcp_servers(file, tmp_path)


def test_a_bridge_to_a_remote_server_is_imported_as_the_remote_server(tmp_path: Path) -> None:
    def bridge(*args: str, **more: object) -> dict[str, object]:
        return {"command": "npx", "args": ["-y", "mcp-remote@latest", "https://a.example/mcp", *args], **more}

    found = read(
        tmp_path,
        {
            "plain": bridge(),
            "header": bridge("--header", "Authorization:${AUTH}", env={"AUTH": "Bearer sesame-1234"}),
            "odd": bridge("--static-oauth-client-info", "{}"),
        },
    )
    assert found["plain"].table == {"url": "https://a.example/mcp"}
    assert found["header"].table["headers"] == {
        "Authorization": {"secret": "HEADER_AUTHORIZATION", "prefix": "Bearer "}
    }
    assert found["header"].secrets == {"HEADER_AUTHORIZATION": "sesame-1234"}
    assert found["odd"].table["command"] == "npx"


@pytest.mark.parametrize(
    "server",
    [
        {"command": "handrail", "args": ["mcp"]},
        {"command": "/opt/x/bin/handrail", "args": ["mcp", "-C", "/work"]},
        {"command": "C:\\tools\\handrail.exe", "args": ["mcp"]},
        {"command": "uvx", "args": ["--from", "handrail[mcp]", "handrail", "mcp"]},
        {"command": "uvx", "args": ["handrail[mcp]==1.0", "mcp"]},
        {"command": "uv", "args": ["run", "--directory", "/x", "handrail", "mcp"]},
        {"command": "python3.12", "args": ["-m", "handrail", "mcp"]},
        {"command": "/x/.venv/bin/python", "args": ["-m", "handrail", "mcp"]},
        {"command": "sh", "args": ["-c", "cd /x && exec handrail mcp"]},
        {"command": "env", "args": ["A=1", "handrail", "mcp"]},
        {"command": ["handrail", "mcp"]},
    ],
    ids=str,
)
def test_an_entry_that_starts_handrail_itself_is_recognised(tmp_path: Path, server: object) -> None:
    assert read(tmp_path, {"tools": server})["tools"].is_handrail


@pytest.mark.parametrize(
    "server",
    [
        {"command": "mcp-files", "args": ["/home/ann/handrail"]},
        {"command": "npx", "args": ["handrail-docs", "mcp"]},
        {"command": "python", "args": ["-m", "handrail_notes"]},
        {"url": "https://handrail.example/mcp"},
    ],
    ids=str,
)
def test_a_server_that_only_looks_like_handrail_is_not_taken_for_it(tmp_path: Path, server: object) -> None:
    found = read(tmp_path, {"tools": server})["tools"]
    assert not found.is_handrail and not found.problem


@pytest.mark.parametrize(
    "servers",
    [
        {"odd": {"command": "x", "url": ""}, "ok": {"command": "y", "args": [1, None]}},
        {"odd": {"command": "x", "env": {"A": None}}, "ok": {"url": "https://a.example", "type": "Streamable-HTTP"}},
        {"odd": None, "ok": {"command": "y"}},
        {"odd": {"command": "x", "args": ["${NOT_SET_ANYWHERE}"]}, "ok": {"command": "y"}},
        {"bad name": {"command": "x"}, "ok": {"command": "y"}},
    ],
    ids=str,
)
def test_a_file_listed_in_mcp_files_is_read_with_the_same_tolerance(tmp_path: Path, servers: object) -> None:
    (tmp_path / "mcp.json").write_text("﻿// mine\n" + json.dumps({"mcpServers": servers}))
    (own := tmp_path / "handrail.toml").write_text('[mcp]\nfiles = ["mcp.json"]\n')
    found = {one.name: one for one in load_enabled_servers(config.load_configuration(own), environment={})}
    assert found["ok"].missing_reason == ""


@pytest.mark.parametrize(
    "whole",
    [
        {"a": {"command": "x"}, "b": {"url": "https://b.example"}},
        [{"name": "a", "command": "x"}, {"name": "b", "url": "https://b.example"}],
        {"mcpServers": [{"name": "a", "command": "x"}, {"name": "b", "url": "https://b.example"}]},
    ],
)
def test_a_file_that_is_the_list_of_servers_itself_has_them(tmp_path: Path, whole: object) -> None:
    (file := tmp_path / "mcp.json").write_text(json.dumps(whole))
    found = read_file(file)
    assert {name: one.table for name, one in found.items()} == {
        "a": {"command": "x"},
        "b": {"url": "https://b.example"},
    }


def test_a_file_with_other_objects_has_no_servers(tmp_path: Path) -> None:
    (file := tmp_path / "other.json").write_text('{"a": {"command": "x"}, "b": {"colour": "red"}}')
    with pytest.raises(UsageError):
        read_file(file)
