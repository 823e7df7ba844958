"""Reports about secrets of imported servers: detection, owner, and values that are never redacted."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import config
from handrail.authoring.mcp_server_import import import_mcp_servers
from handrail.config.secret_detection import is_ordinary_value, is_secret_name
from handrail.frontends.cli.command_group import run_command_line
from handrail.kernel.approval_client import load_secrets_for_redaction, register_value_for_redaction
from handrail.runtime.secret_store import SecretStore
from handrail.upstream.server_config_loader import load_enabled_servers
from handrail.upstream.server_definition import ServerDefinition

SERVER_NAMES = st.sampled_from(
    ["git", "Git", "GIT", "git-hub", "git_hub", "git.hub", "github", "a", "a-b", "a_b", "A.B", "ab", "a b", "é", "日本"]
)
KEYS = st.sampled_from(
    [
        "TOKEN",
        "token",
        "B_TOKEN",
        "b-token",
        "HUB_TOKEN",
        "API_KEY",
        "API-KEY",
        "api.key",
        "GIT_TOKEN",
        "TOKEN_2",
        "TÖKEN",
        "MODE",
    ]
)
FILES = st.lists(
    st.dictionaries(SERVER_NAMES, st.sets(KEYS, min_size=1, max_size=4), min_size=1, max_size=4), max_size=3
)


def run(folder: Path, *words: str) -> int:
    """Run a command with a configuration, state and workspace in ``folder``."""
    for name in ("ws", "cfg"):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
    place = ["-C", str(folder / "ws"), "--state", str(folder / "st"), "--config", str(folder / "cfg" / "handrail.toml")]
    if not (own := folder / "cfg" / "handrail.toml").exists():
        own.write_text("")
    return run_command_line([*words, *place])


def import_servers(folder: Path, servers: object) -> int:
    (file := folder / "other.json").write_text(json.dumps({"mcpServers": servers}))
    return run(folder, "mcp", "import", str(file), "--yes", "--no-install")


@given(FILES)
def test_no_server_gets_a_value_that_belongs_to_another_server(files: list[dict[str, set[str]]]) -> None:
    """Whatever names and keys meet, in one file or in several, and where a faulty server waits for its secret."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "cfg").mkdir(mode=0o700)
        waiting = (
            '[mcp.servers.waiting]\ncommand = "x"\nurl = "https://x.example"\nenv = { K = { secret = "GIT_TOKEN" } }\n'
        )
        (folder / "cfg" / "handrail.toml").write_text(waiting)
        known: dict[str, set[str]] = {}
        for number, servers in enumerate(files):
            given_env = {
                name: {key: f"value {number} of {name} for {key}" for key in sorted(keys)}
                for name, keys in servers.items()
            }
            for name, env in given_env.items():
                known.setdefault(name, set()).update(env.values())
            import_servers(folder, {name: {"command": "/x", "env": env} for name, env in given_env.items()})
        written = tomllib.loads((folder / "cfg" / "handrail.toml").read_text())
        secrets = {name: Path(one["file"]).read_text() for name, one in written.get("secrets", {}).items()}
        assert "GIT_TOKEN" not in secrets
        for name, server in written["mcp"]["servers"].items():
            for key, value in server.get("env", {}).items():
                if name != "waiting":
                    text = value if isinstance(value, str) else secrets[value["secret"]]
                    (owner,) = [given for given, values in known.items() if text in values]
                    assert text.endswith(f" for {key}") and re.sub(r"[^A-Za-z0-9_-]+", "-", owner) == name


@pytest.mark.parametrize(
    ("key", "value", "is_secret"),
    [
        ("LOG_LEVEL", "info", False),
        ("NODE_ENV", "production", False),
        ("REGION", "us-east-1", False),
        ("AUTH_MODE", "none", False),
        ("USE_TOKEN", "true", False),
        ("MAX_TOKENS", "4096", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("KEYCLOAK_URL", "https://sso.example", False),
        ("KEYBOARD", "german-layout", False),
        ("AUTHOR", "Ann Example", False),
        ("SSH_KEY_PATH", "/home/ann/.ssh/id", False),
        ("GOOGLE_KEY", "~/keys/service.json", False),
        ("GITHUB_TOKEN", "abcdefgh1234", True),
        ("githubToken", "abcdefgh1234", True),
        ("X-Api-Key", "abcdefgh1234", True),
        ("ACCESSKEY", "abcdefgh1234", True),
        ("DB_PASS", "abcdefgh1234", True),
        ("POSTGRES_PASSWORD", "postgres", True),
        ("DATABASE", "postgres://ann:sesame99@db/x", True),
        ("WHATEVER", "ghp_abcdefghijklmnop", True),
        ("WHATEVER", "0123456789abcdef0123456789abcdef", True),
        ("WHATEVER", "aB3dE5fG7hI9jK1lM3nO5pQ7", True),
    ],
)
def test_a_value_is_stored_as_a_secret_if_its_name_or_form_indicates_one(
    tmp_path: Path, key: str, value: str, is_secret: bool
) -> None:
    assert import_servers(tmp_path, {"s": {"command": "/x", "env": {key: value}}}) == 0
    text = (tmp_path / "cfg" / "handrail.toml").read_text()
    assert (value not in text) is is_secret


@pytest.mark.parametrize("form", ["${LOG_LEVEL}", "${LOG_LEVEL:-warning}", "${env:LOG_LEVEL}"])
async def test_a_plain_value_from_an_environment_variable_is_not_redacted(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "very-verbose-level")
    assert import_servers(tmp_path, {"s": {"command": "/x", "env": {"LOG_LEVEL": form}}}) == 0
    (definition,), redacted = await load_with_redactions(tmp_path)
    assert definition.environment == {"LOG_LEVEL": "very-verbose-level"}
    assert redacted("very-verbose-level") == "very-verbose-level"


async def load_with_redactions(folder: Path) -> tuple[list[ServerDefinition], Callable[[str], str]]:
    """Return the servers as a kernel loads them, and the redaction of a text."""
    read = config.load_configuration(folder / "cfg" / "handrail.toml")
    redactor, known = await load_secrets_for_redaction(read, {})
    found = load_enabled_servers(read, known, lambda value: register_value_for_redaction(redactor, value))
    return found, redactor.redact_text


@pytest.mark.parametrize(
    "value", ["info", "debug", "test", "admin", "postgres", "Bearer", "TRUE", "8080", "production"]
)
@pytest.mark.parametrize("place", ["secret", "variable", "file"])
async def test_an_ordinary_word_is_never_redacted_and_still_reaches_the_server(
    tmp_path: Path, value: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", value)
    (tmp_path / "cfg").mkdir(mode=0o700)
    own = tmp_path / "cfg" / "handrail.toml"
    if place == "file":
        (own.parent / "mcp.json").write_text(
            json.dumps({"mcpServers": {"s": {"command": "/x", "env": {"TOKEN": "${MY_TOKEN}"}}}})
        )
        own.write_text('[mcp]\nfiles = ["mcp.json"]\n')
    else:
        written = '{ secret = "T" }' if place == "secret" else '{ expand = "${MY_TOKEN}" }'
        own.write_text(
            f'[secrets.T]\nenv = "MY_TOKEN"\n[mcp.servers.s]\ncommand = "/x"\nenv = {{ TOKEN = {written} }}\n'
        )
    (definition,), redacted = await load_with_redactions(tmp_path)
    assert (definition.environment, definition.missing_reason) == ({"TOKEN": value}, "")
    assert redacted(f"import logging; logging.{value}('x')") == f"import logging; logging.{value}('x')"


@pytest.mark.parametrize("form", ["${A_TOKEN}", "${A_TOKEN:-}", "Bearer ${A_TOKEN}", "x-${A_TOKEN}-y"])
async def test_a_secret_in_a_variable_is_redacted_in_every_form(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "sesame-1234")
    assert import_servers(tmp_path, {"s": {"command": "/x", "env": {"VALUE": form}}}) == 0
    (definition,), redacted = await load_with_redactions(tmp_path)
    assert "sesame-1234" in definition.environment["VALUE"]
    assert "sesame-1234" not in redacted("it said sesame-1234")


@given(st.text(max_size=12))
def test_an_ordinary_value_is_short_and_alphanumeric(text: str) -> None:
    if is_ordinary_value(text):
        assert len(text.strip()) <= 11 and text.strip().lstrip("+-").isalnum()


def test_names_of_numbers_and_descriptions_are_not_secret_names() -> None:
    def names(*words: str) -> Iterable[bool]:
        return map(is_secret_name, words)

    assert not any(
        names("MAX_TOKENS", "TOKEN_FILE", "AUTH_TYPE", "KEY_ID", "MONKEY", "COMPASS", "tokenizer", "AUTHORS")
    )
    assert all(names("API_KEYS", "AuthToken", "OAUTH", "PGPASSWORD", "passwd", "SLACK_BOT_TOKEN", "dsn", "Cookie"))


def test_a_missing_secret_disables_only_its_own_server(tmp_path: Path) -> None:
    (tmp_path / "cfg").mkdir(mode=0o700)
    (own := tmp_path / "cfg" / "handrail.toml").write_text(
        '[mcp.servers.a]\ncommand = "/x"\nenv = { K = { expand = "${NOT_SET_ANYWHERE}" } }\n[mcp.servers.b]\ncommand = "/y"\n'
    )
    found = {
        one.name: one.missing_reason for one in load_enabled_servers(config.load_configuration(own), SecretStore())
    }
    assert "NOT_SET_ANYWHERE" in found["a"] and found["b"] == ""


def test_neither_an_input_default_nor_an_env_file_names_the_secret_of_another_server(tmp_path: Path) -> None:
    inputs = [{"id": "t", "password": True}, {"id": "f", "default": "${MCP_A_TOKEN}"}]
    (tmp_path / "e.env").write_text("X=${MCP_A_TOKEN}\n")
    first = {"command": "x", "env": {"TOKEN": "${input:t}"}}
    for other in (
        {"command": "y", "env": {"X": "${input:f}", "Y": "z-${input:f}"}},
        {"command": "y", "envFile": str(tmp_path / "e.env")},
    ):
        for servers in ({"a": first, "b": other}, {"b": other, "a": first}):
            (tmp_path / "mcp.json").write_text(json.dumps({"inputs": inputs, "servers": servers}))
            found = {one.name: one for one in import_mcp_servers(tmp_path / "mcp.json", tmp_path, (), {})}
            mine = {*found["a"].variables, *found["a"].variables.values()}
            theirs = {*found["b"].variables, *found["b"].variables.values(), *found["b"].required}
            assert mine and not mine & theirs, (servers, mine, theirs)


def test_a_home_folder_that_is_not_known_costs_only_its_server(tmp_path: Path) -> None:
    servers = {
        "odd": {"command": "~nobody-here/x y"},
        "long": {"command": "node -e " + "x" * 5_000},
        "file": {"command": "z", "envFile": "~nobody-here/e"},
        "good": {"command": "x"},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"servers": servers}))
    found = {one.name: one for one in import_mcp_servers(tmp_path / "mcp.json", tmp_path, (), {})}
    assert found["good"].table["command"] == "x" and not found["good"].problem and len(found) == 4


def test_the_path_of_a_program_in_the_workspace_may_have_spaces(tmp_path: Path) -> None:
    (tmp_path / "my tools").mkdir()
    (tmp_path / "my tools" / "srv").write_text("")
    written = {
        "a": {"command": "${workspaceFolder}/my tools/srv"},
        "b": {"command": "./my tools/srv"},
        "c": {"command": ["my prog"]},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"servers": written}))
    found = [one.table for one in import_mcp_servers(tmp_path / "mcp.json", tmp_path, (), {})]
    assert [one["command"] for one in found] == [f"{tmp_path}/my tools/srv", "./my tools/srv", "my prog"]
    assert not any("args" in one for one in found)
