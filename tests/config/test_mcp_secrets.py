"""Detection of secrets in the settings of an upstream server."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.config.places import Layers

from handrail.config.secret_detection import (
    find_argument_secrets,
    find_secrets_in_named_value,
    find_url_secrets,
)
from handrail.upstream.server_config_loader import load_enabled_servers

BASIC = base64.b64encode(b"ann:open-sesame").decode()


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("Authorization", "Bearer abcdefgh1234", {"Bearer abcdefgh1234", "abcdefgh1234"}),
        ("authorization", f"Basic {BASIC}", {f"Basic {BASIC}", BASIC, "ann:open-sesame", "open-sesame"}),
        ("Authorization", f"Basic {BASIC.rstrip('=')}", {f"Basic {BASIC.rstrip('=')}", BASIC.rstrip("=")} | {"ann:open-sesame", "open-sesame"}),
        ("Authorization", "Basic no-base64-at-all", {"Basic no-base64-at-all", "no-base64-at-all"}),
        ("Authorization", "Bearer abc", {"Bearer abc"}),
        ("X-API-Key", "abcdefgh1234", {"abcdefgh1234"}),
        ("Cookie", "a=1; session=abcdefgh1234", {"a=1; session=abcdefgh1234", "abcdefgh1234"}),
        ("DB_PASS", "abcdefgh1234", {"abcdefgh1234"}),
        ("GITHUB_TOKEN", "short", set[str]()),
        ("COMPASS", "abcdefgh1234", set[str]()),
        ("X-Team", "the blue team of all", set[str]()),
    ],
)  # fmt: skip
def test_a_field_with_a_secret_name_yields_its_value_and_its_parts(name: str, value: str, found: set[str]) -> None:
    assert set(find_secrets_in_named_value(name, value)) == found


def test_secret_url_parameters_are_found_decoded_and_as_written() -> None:
    url = "https://s.example/mcp?api_key=abc%2Fdefgh1&team=the-blue-one&token=ijklmnop#top"
    assert set(find_url_secrets(url)) == {"abc/defgh1", "abc%2Fdefgh1", "ijklmnop"}
    assert set(find_url_secrets("https://[")) == set()
    assert set(find_url_secrets("https://ann:open%2Dsesame@s.example/mcp")) == {"open%2Dsesame", "open-sesame"}
    assert set(find_url_secrets("https://abcdefgh1234@s.example/mcp")) == {"abcdefgh1234"}
    assert set(find_url_secrets("ssh://a-long-name@s.example/mcp")) == set()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--api-key", "abcdefgh1234", "--verbose"], {"abcdefgh1234"}),
        (["--api-key=abcdefgh1234"], {"abcdefgh1234"}),
        (["run", "-e", "GITHUB_TOKEN=abcdefgh1234", "image:tag"], {"abcdefgh1234"}),
        (["--header", "Authorization: Bearer abcdefgh1234"], {"Bearer abcdefgh1234", "abcdefgh1234"}),
        (["--header=Authorization:Bearer abcdefgh1234"], {"Bearer abcdefgh1234", "abcdefgh1234"}),
        (["--config", '{"a": [{"apiKey": "abcdefgh1234"}], "b": "ordinary words"}'], {"abcdefgh1234"}),
        (["postgres://ann:p@ssword@db.example/shop"], {"p@ssword"}),
        (["--db=postgres://ann:sesame@db.example/shop"], {"sesame"}),
        (["--token-file", "/etc/a-token-of-mine", "--auth-type=oauth-device"], set[str]()),
        (["--token", "--verbose", "ordinary-words"], set[str]()),
        (["-y", "@scope/secret-server@1.2.3", "{not json", "=", ":", "--", ""], set[str]()),
    ],
)
def test_secrets_are_found_in_program_arguments(arguments: list[str], found: set[str]) -> None:
    assert set(find_argument_secrets(arguments)) == found


@given(st.lists(st.text()))
def test_any_program_arguments_can_be_searched_for_secrets(arguments: list[str]) -> None:
    assert all(find_argument_secrets(arguments))


@pytest.mark.proves("F-04")
def test_server_secrets_are_registered_from_an_imported_file_and_from_a_table(layers: Layers) -> None:
    server = {"url": "https://a.example/mcp?key=abcdefgh", "headers": {"Authorization": "Bearer ${WHO:-ijklmnopq}"}}
    (layers.config.parent / "mcp.json").write_text(json.dumps({"mcpServers": {"a": server}}))
    table = f'[mcp.servers.b]\nurl = "https://b.example/mcp"\nheaders = {{ Authorization = "Basic {BASIC}" }}\n'
    table += '[mcp.servers.c]\ncommand = "c"\nargs = ["--key", "of-the-args"]\nenv = { DB = "pg://u:of-the-url@h/d" }\n'
    layers.config.write_text('[mcp]\nfiles = ["mcp.json"]\n' + table)
    learned: list[str] = []
    load_enabled_servers(layers.load(), register_secret=learned.append, environment={})
    assert {"abcdefgh", "ijklmnopq", "open-sesame", "of-the-args", "of-the-url"} <= set(learned)
