"""Import of MCP servers from other programs: imported, separated and skipped settings."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.authoring.mcp_server_import import ImportedMcpServer, format_server_tables, import_mcp_servers
from handrail.config.foreign_server_files import expand_variables
from handrail.config.mcp_settings import ExpandableText
from handrail.config.operator_settings import Settings
from handrail.contract.errors import UsageError


def read(folder: Path, servers: object, key: str = "mcpServers") -> dict[str, ImportedMcpServer]:
    file = folder / "other.json"
    file.write_text(json.dumps({key: servers}))
    return {one.name: one for one in import_mcp_servers(file, folder)}


def test_servers_with_a_command_and_servers_with_a_url_are_imported(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {
            "time": {
                "command": "uvx",
                "args": ["mcp-server-time"],
                "env": {"TZ": "UTC"},
                "disabled": True,
                "timeout": 30,
            },
            "old": {"type": "sse", "url": "https://example.org/sse"},
        },
    )
    assert found["time"].table == {
        "command": "uvx",
        "args": ["mcp-server-time"],
        "env": {"TZ": "UTC"},
        "enabled": False,
        "timeout_ms": 30_000,
    }
    assert found["old"].table == {"url": "https://example.org/sse", "transport": "sse"}


@pytest.mark.parametrize("key", ["mcpServers", "servers"])
def test_server_lists_under_the_keys_of_several_programs_are_read(tmp_path: Path, key: str) -> None:
    assert list(read(tmp_path, {"a": {"command": "x"}}, key)) == ["a"]


def test_json_comments_and_trailing_commas_are_accepted_and_strings_stay_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text('{ // mine\n "servers": {"a": {"command": "x", "args": ["//not", "/* a comment */", ",}"],},},}')
    (one,) = import_mcp_servers(file, tmp_path)
    assert one.table["args"] == ["//not", "/* a comment */", ",}"]


def test_servers_of_a_project_in_a_shared_file_are_imported_for_that_project_only(tmp_path: Path) -> None:
    file = tmp_path / "claude.json"
    other = {"mcpServers": {"theirs": {"command": "x"}}}
    own = {"mcpServers": {"ours": {"command": "y"}}}
    file.write_text(
        json.dumps({"mcpServers": {"all": {"command": "z"}}, "projects": {str(tmp_path): own, "/other": other}})
    )
    assert [one.name for one in import_mcp_servers(file, tmp_path)] == ["all", "ours"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("API_KEY", "0123"),
        ("GITHUB_TOKEN", "ghp_abcdefghijklmnop"),
        ("PLAIN", "sk-abcdefghijklmnop"),
        ("URL", "postgres://somebody:hunter2@db/x"),
        ("CACHE", "redis://:hunter2@db/0"),
        ("DATABASE", "postgres://db/x?user=u&password=hunter2"),
        ("CONNECTION", "Server=db;Password=hunter2"),
        ("HEADERS", "Authorization: Basic aHVudGVyMg=="),
    ],
)
def test_an_imported_value_that_looks_like_a_secret_is_replaced_by_its_name(
    tmp_path: Path, key: str, value: str
) -> None:
    one = read(tmp_path, {"a": {"command": "x", "env": {key: value}}})["a"]
    (name,) = one.secrets
    assert one.table["env"] == {key: {"secret": name}}
    text = format_server_tables([one], {name: tmp_path / name})
    assert value not in text
    assert value not in repr(one)
    assert tomllib.loads(text)["secrets"][name] == {"file": str(tmp_path / name)}


def test_only_the_token_of_a_bearer_header_becomes_a_secret(tmp_path: Path) -> None:
    one = read(tmp_path, {"a": {"url": "https://x.example/mcp", "headers": {"Authorization": "Bearer abc.def"}}})["a"]
    assert one.table["headers"] == {"Authorization": {"secret": "A_AUTHORIZATION", "prefix": "Bearer "}}
    assert one.secrets == {"A_AUTHORIZATION": "abc.def"}


@pytest.mark.parametrize(
    ("value", "name", "variable"),
    [
        ("${MY_KEY}", "A_KEY", "MY_KEY"),
        ("${env:MY_KEY}", "A_KEY", "MY_KEY"),
        ("${input:my-key}", "MCP_A_KEY", "MCP_A_KEY"),
    ],
)
def test_a_variable_reference_is_imported_as_an_environment_variable(
    tmp_path: Path, value: str, name: str, variable: str
) -> None:
    one = read(tmp_path, {"a": {"command": "x", "env": {"KEY": value}}})["a"]
    assert one.table["env"] == {"KEY": {"secret": name}}
    assert tomllib.loads(format_server_tables([one], {}))["secrets"] == {name: {"env": variable}}


def values_of(servers: list[ImportedMcpServer], environment: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the values of each server's variables and header fields, by their configuration."""
    files = {name: Path(f"/s/{name}") for one in servers for name in one.secrets}
    contents = {str(files[name]): value for one in servers for name, value in one.secrets.items()}
    written = tomllib.loads(format_server_tables(servers, files))
    settings = Settings.model_validate(written)
    found: dict[str, dict[str, str]] = {}
    for name, server in settings.mcp.servers.items():
        found[name] = {}
        for key, said in {**server.env, **server.headers}.items():
            if isinstance(said, str):
                found[name][key] = said
                continue
            if isinstance(said, ExpandableText):
                found[name][key] = expand_variables(said.expand, environment)
                continue
            where = settings.secrets[said.secret]
            found[name][key] = said.prefix + (
                contents[where.file] if where.file is not None else environment.get(where.env or "", "")
            )
    return found


MEETINGS: dict[str, tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]] = {
    "one name of a variable": (
        {"a": {"API_KEY": "of a"}, "b": {"API_KEY": "of b"}},
        {"a": {"API_KEY": "of a"}, "b": {"API_KEY": "of b"}},
    ),
    "a border between server and variable": (
        {"a": {"B_KEY": "of a"}, "a_b": {"KEY": "of a_b"}},
        {"a": {"B_KEY": "of a"}, "a_b": {"KEY": "of a_b"}},
    ),
    "punctuation of a server": (
        {"a-b": {"KEY": "of a-b"}, "a_b": {"KEY": "of a_b"}},
        {"a-b": {"KEY": "of a-b"}, "a_b": {"KEY": "of a_b"}},
    ),
    "case of a server": (
        {"git": {"KEY": "of git"}, "GIT": {"KEY": "of GIT"}},
        {"git": {"KEY": "of git"}, "GIT": {"KEY": "of GIT"}},
    ),
    "case and punctuation of a variable": (
        {"a": {"API_KEY": "1", "api_key": "2", "API-KEY": "3", "API.KEY": "4"}},
        {"a": {"API_KEY": "1", "api_key": "2", "API-KEY": "3", "API.KEY": "4"}},
    ),
    "a variable of the environment and a value": (
        {"api": {"KEY": "of api"}, "b": {"X": "${API_KEY}"}},
        {"api": {"KEY": "of api"}, "b": {"X": "the operator's"}},
    ),
    "an input and a variable of the environment": (
        {"a": {"X": "${input:api_key}"}, "b": {"X": "${API_KEY}"}},
        {"a": {"X": ""}, "b": {"X": "the operator's"}},
    ),
    "an input and a variable of another server": (
        {"a": {"KEY": "${input:key}"}, "b": {"X": "${MCP_A_KEY}", "Y": "y-${MCP_A_KEY_2}"}},
        {"a": {"KEY": ""}, "b": {"X": "the operator's", "Y": "y-the operator's"}},
    ),
    "a variable in a text and a value": (
        {"api": {"KEY": "of api"}, "b": {"X": "x-${API_KEY}", "TOKEN": "${API_KEY}"}},
        {"api": {"KEY": "of api"}, "b": {"X": "x-the operator's", "TOKEN": "the operator's"}},
    ),
    "two inputs": (
        {"a": {"X": "${input:the-key}", "Y": "${input:the.key}"}, "b": {"X": "${input:THE_KEY}"}},
        {"a": {"X": "", "Y": ""}, "b": {"X": ""}},
    ),
    "a number that is part of a name": (
        {"a": {"KEY": "1", "key": "2", "KEY_2": "3", "key_2": "4"}},
        {"a": {"KEY": "1", "key": "2", "KEY_2": "3", "key_2": "4"}},
    ),
    "names that are cut": (
        {"a": {"KEY" + "x" * 200: "1", "KEY" + "x" * 201: "2"}},
        {"a": {"KEY" + "x" * 200: "1", "KEY" + "x" * 201: "2"}},
    ),
    "letters beyond ASCII": (
        {"a": {"SCHLÜSSEL_KEY": "1", "SCHLÖSSEL_KEY": "2", "SCHL_SSEL_KEY": "3"}},
        {"a": {"SCHLÜSSEL_KEY": "1", "SCHLÖSSEL_KEY": "2", "SCHL_SSEL_KEY": "3"}},
    ),
}


@pytest.mark.parametrize(("given", "own"), MEETINGS.values(), ids=MEETINGS.keys())
@pytest.mark.parametrize("place", ["env", "headers"])
def test_each_server_gets_exactly_its_own_secrets(
    tmp_path: Path, given: dict[str, dict[str, str]], own: dict[str, dict[str, str]], place: str
) -> None:
    if place == "headers" and any(len({key.lower() for key in values}) < len(values) for values in given.values()):
        with pytest.raises(AssertionError, match="twice"):
            _all_good(tmp_path, given, place)
        return
    found = _all_good(tmp_path, given, place)
    known: dict[str, str] = dict.fromkeys(("API_KEY", "THE_KEY", "MCP_A_KEY", "MCP_A_KEY_2"), "the operator's")
    assert values_of(found, known) == own
    variables = [variable for one in found for variable in one.variables.values()]
    inputs = [variable for variable in variables if variable not in known]
    assert len(inputs) == len(set(inputs))


def _all_good(tmp_path: Path, given: dict[str, dict[str, str]], place: str) -> list[ImportedMcpServer]:
    how = {"env": {"command": "x"}, "headers": {"url": "https://x.example/mcp"}}[place]
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"mcpServers": {name: {**how, place: values} for name, values in given.items()}}))
    found = import_mcp_servers(file, tmp_path)
    assert not [one.problem for one in found if one.problem]
    return found


def test_an_input_never_gets_a_variable_that_is_set(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"servers": {"a": {"command": "x", "env": {"KEY": "${input:k}"}}}}))
    (one,) = import_mcp_servers(file, tmp_path, (), {"MCP_A_KEY": "of another", "A_KEY": "of another"})
    assert one.variables == {"MCP_A_KEY_2": "MCP_A_KEY_2"}


@pytest.mark.parametrize("text", ["${input:host}/${input:pin}", "${input:host}/${input:other}", "${input:host_token}"])
@pytest.mark.parametrize("key", ["args", "command", "cwd"])
def test_an_argument_gets_the_default_of_its_own_input_alone(tmp_path: Path, text: str, key: str) -> None:
    inputs = [
        {"id": "host", "default": "h.example"},
        {"id": "pin", "password": True, "default": "sesame99"},
        {"id": "host_token", "default": "sesame99"},
    ]
    server = {"command": "x", key: [text] if key == "args" else text}
    (tmp_path / "other.json").write_text(json.dumps({"inputs": inputs, "servers": {"s": server}}))
    (one,) = import_mcp_servers(tmp_path / "other.json", tmp_path, (), {})
    assert "possible only in env and headers" in f"{one.problem} {one.ignored_keys}"
    assert "sesame99" not in str(one.table) and "h.example" not in str(one.table)


def test_a_list_keeps_each_of_its_servers(tmp_path: Path) -> None:
    listed = [{"name": name, "command": f"x{number}"} for number, name in enumerate(("a", "a 3", "a", "a 3 3"))]
    (tmp_path / "other.json").write_text(json.dumps({"servers": listed}))
    found = import_mcp_servers(tmp_path / "other.json", tmp_path, (), {})
    assert {one.table["command"] for one in found} == {"x0", "x1", "x2", "x3"}


def test_an_imported_secret_gets_a_name_that_is_not_in_use(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"mcpServers": {"a": {"command": "x", "env": {"KEY": "v", "TOKEN": "${T}"}}}}))
    (one,) = import_mcp_servers(file, tmp_path, ["a_key", "A_KEY_2", "A_Token"])
    assert list(one.secrets) == ["A_KEY_3"] and one.variables == {"A_TOKEN_2": "T"}


@pytest.mark.parametrize(
    "server",
    [
        {"url": "https://x.example/mcp", "headers": {"X-Key": "1", "x-key": "2"}},
        {"url": "https://x.example/mcp", "headers": ["X-Key: 1", "X-Key: 2"]},
        {"url": "https://x.example/mcp", "headers": [{"name": "X-Key", "value": "1"}, "x-key: 2"]},
        {"url": "https://x.example/mcp", "headers": {"X-Key": "1"}, "env_http_headers": {"x-key": "HOME"}},
        {"command": "npx", "args": ["mcp-remote", "https://x.example/mcp", "--header", "A: 1", "--header", "a: 2"]},
        {"command": "x", "env": ["A=1", "A=2"]},
        {"command": "x", "env": [{"name": "A", "value": "1"}, "A=1"]},
    ],
)
def test_a_header_field_or_variable_with_two_values_is_refused(tmp_path: Path, server: dict[str, object]) -> None:
    assert "twice" in read(tmp_path, {"a": server})["a"].problem


def test_an_authorization_field_in_any_case_replaces_the_token_of_a_key(tmp_path: Path) -> None:
    one = {
        "url": "https://x.example/mcp",
        "headers": {"authorization": "plain"},
        "apiKey": "k",
        "bearer_token_env_var": "T",
    }
    assert list(read(tmp_path, {"a": one})["a"].table["headers"]) == ["authorization"]


def test_the_sign_in_of_an_imported_server_has_the_values_of_its_variables(tmp_path: Path) -> None:
    oauth = {"clientId": "${env:CLIENT}", "scopes": ["read:${PART}", "x"]}
    (file := tmp_path / "other.json").write_text(
        json.dumps({"mcpServers": {"a": {"url": "https://x.example/mcp", "oauth": oauth}}})
    )
    (known,) = import_mcp_servers(file, tmp_path, environment={"CLIENT": "c-1", "PART": "all"})
    assert known.table["oauth"] == {"client_id": "c-1", "scopes": ["read:all", "x"]}
    (unknown,) = import_mcp_servers(file, tmp_path, environment={})
    assert not unknown.problem and "CLIENT" in str(unknown.ignored_keys)


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"command": "x", "args": ["--api-key", "abc"]}, "looks like a secret"),
        ({"command": "x", "args": ["--token=abc"]}, "looks like a secret"),
        ({"command": "x", "args": ["ghp_abcdefghijklmnop"]}, "looks like a secret"),
        ({"command": "docker", "args": ["run", "-e", "API_KEY=abc", "i"]}, "looks like a secret"),
        ({"command": "npx", "args": ["bridge", "https://x", "--header", "Authorization: Bearer abc"]}, "a secret"),
        ({"command": "npx", "args": ["bridge", "https://x", "--header", "X-Api-Key:abc"]}, "a secret"),
        ({"command": "x", "args": ["redis://:abc@h/0"]}, "looks like a secret"),
        ({"command": "x", "args": ["Server=h;User=u;Password=abc"]}, "looks like a secret"),
        ({"command": "npx", "args": ["mcp-remote", "https://x.example/mcp?api_key=abc"]}, "looks like a secret"),
        ({"url": "https://x.example/mcp?apiKey=abc"}, "looks like a secret"),
        ({"url": "https://x.example/mcp#token=abc"}, "looks like a secret"),
        ({"url": "https://abc@x.example/mcp"}, "looks like a secret"),
        ({"url": "https://u:abc@x.example/mcp"}, "looks like a secret"),
        ({"url": "https://x.example/s/sk-abcdefghijkl/mcp"}, "looks like a secret"),
        ({"url": "https://x.example/mcp?v=sk-abcdefghijkl"}, "looks like a secret"),
        ({"command": "x", "args": ["${input:where}"]}, "only in env and headers"),
        ({"command": "x", "args": "not a list"}, "not a list"),
        ({"url": "https://x.example", "type": "ws"}, "'http' or 'sse'"),
        ({"env": {}}, "neither command nor url"),
        ("text", "not an object"),
    ],
)
def test_a_server_that_cannot_be_imported_is_left_out_with_a_reason(tmp_path: Path, server: object, why: str) -> None:
    assert why in read(tmp_path, {"a": server})["a"].problem


def test_permissions_of_other_programs_are_listed_and_not_imported(tmp_path: Path) -> None:
    one = read(tmp_path, {"a": {"command": "x", "autoApprove": ["*"], "alwaysAllow": ["y"], "cwd": "/"}})["a"]
    assert one.table == {"command": "x", "cwd": "/"}
    assert [left.partition(":")[0] for left in one.ignored_keys][:2] == ["autoApprove", "alwaysAllow"]


def test_imported_server_names_are_changed_to_valid_names(tmp_path: Path) -> None:
    assert list(read(tmp_path, {"my server!": {"command": "x"}})) == ["my-server"]
    assert read(tmp_path, {"!!": {"command": "x"}})["!!"].problem


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"{", b'{"mcpServers": []}', b"\xff"])
def test_a_file_without_servers_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content)
    with pytest.raises(UsageError):
        import_mcp_servers(file, tmp_path)


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(command=TEXT.filter(bool), args=st.lists(TEXT, max_size=3), env=st.dictionaries(TEXT, TEXT, max_size=3))
def test_written_server_tables_read_back_unchanged(command: str, args: list[str], env: dict[str, str]) -> None:
    table: dict[str, Any] = {"command": command, "args": args, "env": env}
    written = format_server_tables([ImportedMcpServer("a", table)], {})
    server = Settings.model_validate(tomllib.loads(written)).mcp.servers["a"]
    assert (server.command, list(server.args), dict(server.env)) == (command, args, env)
