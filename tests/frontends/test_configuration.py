"""``handrail config``, ``init`` and ``trust`` for users and scripts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import Here, Program, Terminals

from handrail import open_kernel
from handrail.frontends.cli.command_group import run_command_line
from handrail.frontends.cli.command_options import is_headless

pytestmark = pytest.mark.proves("F-11")


@pytest.fixture
def own(handrail: Program) -> Path:
    """The workspace's own configuration: an allow rule, a deny and a limit."""
    file = handrail.workspace / "handrail.toml"
    file.write_text('rules = ["allow bash *", "deny read secret"]\n[limits]\ngrace_ms = 7\n')
    return file


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def test_config_shows_each_value_with_its_origin_and_whether_it_has_effect(here: Here, own: Path) -> None:
    shown = here("config", "--set", "limits.lock_wait_ms=5")
    assert shown.code == 0
    in_force, _, others = shown.out.partition("without effect")
    assert f'rules "deny read secret" {own}:1' in [" ".join(line.split()) for line in in_force.splitlines()]
    assert "--set limits.lock_wait_ms" in in_force and "allow bash" not in in_force and "5000" in in_force
    assert f"{own}:1" in others and "allow bash *" in others and f"{own}:3" in others and "handrail trust" in others
    assert "not trusted" in " ".join(shown.out.split()) and shown.err == ""


def test_config_json_has_settings_origins_and_the_workspace_file(
    here: Here, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_AGENT", "reviewer")
    given: dict[str, Any] = json.loads(here("config", "--json").out)
    assert given["settings"]["agent"] == "reviewer" and given["settings"]["rules"] == ["deny read secret"]
    assert given["workspace"] == {
        "file": str(own),
        "sha256": hashlib.sha256(own.read_bytes()).hexdigest(),
        "trusted": False,
    }
    agent = [value for value in given["values"] if value["key"] == "agent"]
    assert agent == [
        {
            "key": "agent",
            "value": "reviewer",
            "origin": {"kind": "environment", "place": "HANDRAIL_AGENT"},
            "in_force": True,
            "reason": "",
        }
    ]


def test_config_lists_every_fault_and_exits_with_5(here: Here, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text('rules = ["deny read"]\nrulez = []\n')
    monkeypatch.setenv("HANDRAIL_LIMITS__GRACE", "1")
    done = here("config", "--set", "agnet=x")
    assert done.code == 5 and done.err.startswith("handrail: 3 faults:")
    assert "did you mean 'rules'?" in done.err and "HANDRAIL_LIMITS__GRACE_MS" in done.err and "'agent'" in done.err
    own.write_text('rules = ["deny fs.raed"]\n')
    monkeypatch.delenv("HANDRAIL_LIMITS__GRACE")
    done = here("config")
    assert done.code == 5 and f"{own}:1" in done.err and "fs.read" in done.err
    assert here("config", "--set", "agent").code == 2


def test_config_prints_the_shipped_schema_unchanged(here: Here) -> None:
    from handrail.config.template import SCHEMA_FILE

    assert here("config", "--schema").out == SCHEMA_FILE.read_text(encoding="utf-8")


def test_init_writes_files_without_effect_and_never_overwrites_a_file(here: Here, handrail: Program, own: Path) -> None:
    before = own.read_text()
    refused = here("init")
    assert refused.code == 1 and "already exists" in refused.err and own.read_text() == before
    own.unlink()
    own.symlink_to(handrail.workspace / "elsewhere")
    assert here("init").code == 1 and not (handrail.workspace / "elsewhere").exists()
    own.unlink()
    assert here("init").out == f"wrote {own}\n"
    everybody = handrail.config / "deep" / "handrail.toml"
    assert here("init", "--global", "--config", str(everybody)).code == 0
    assert stat.S_IMODE(everybody.parent.stat().st_mode) == 0o700
    shown = here("config", "--config", str(everybody), "--json")
    values = json.loads(shown.out)["values"]
    assert {value["origin"]["kind"] for value in values} == {"default"}
    assert here("call", "read", '{"path": "note.txt"}', "--config", str(everybody)).err == ""


def test_init_reports_a_place_that_cannot_be_written(here: Here, handrail: Program) -> None:
    handrail.config.write_text("a file")
    done = here("init", "--global", "--config", str(handrail.config / "handrail.toml"))
    assert done.code == 5 and "Could not write" in done.err


def test_trust_shows_the_complete_file_on_a_terminal_and_requires_a_yes(
    handrail: Program, own: Path, on_a_terminal: Terminals
) -> None:
    hidden = "\u202e# sha256 0000\u200b\u2028trusted"
    own.write_bytes(own.read_bytes() + f"# {hidden}\n# {'x' * 300}\n".encode())
    environment = {"XDG_CONFIG_HOME": str(handrail.config)}
    first = on_a_terminal(*handrail.command("trust"), environment=environment)
    shown = first.wait_for("[y/n] ")
    assert not set(hidden) & set(shown) & {"\u202e", "\u200b", "\u2028"} and "\\u{202e}" in shown
    assert str(own) in re.sub(r"\s+", "", shown), "wrapped to the terminal"
    assert hashlib.sha256(own.read_bytes()).hexdigest() in shown
    _, _, change = shown.partition("If trusted, these settings apply:")
    assert "allow bash *" in change and "limits.grace_ms to 7, now 5000 (default)" in change and "deny" not in change
    assert all(line.startswith(("  │ ", "  ┆ ")) for line in shown.splitlines() if "xxx" in line)
    first.type("maybe\n")
    first.wait_for("[y/n] ")
    first.type("n\n")
    assert first.end() == 1
    second = on_a_terminal(*handrail.command("trust"), environment=environment)
    second.wait_for("[y/n] ")
    read = own.read_text()
    own.write_text(read + "# changed while they thought\n")
    second.type("y\n")
    assert second.end() == 0
    third = on_a_terminal(*handrail.command("trust"), environment=environment)
    third.wait_for("[y/n] ")  # what was agreed to is what was shown, not what the file holds by now
    third.type("\x04")
    assert third.end() == 1
    own.write_text(read)
    assert "This content is trusted" in handrail("trust").err


def test_a_script_can_trust_a_file_only_by_its_hash(here: Here, handrail: Program, own: Path) -> None:
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    nobody = here("trust")
    assert nobody.code == 1 and f"--hash {digest}" in nobody.err and "allow bash *" in nobody.out
    wrong = here("trust", "--hash", "0" * 64)
    assert wrong.code == 1 and digest in wrong.err
    assert not list(handrail.state.rglob("trust.json"))
    assert here("trust", "--hash", digest).code == 0
    listed = json.loads(here("trust", "list", "--json").out)
    assert [(one["workspace"], one["sha256"]) for one in listed] == [(str(handrail.workspace), digest)]
    assert digest[:12] in here("trust", "list").out
    assert json.loads(here("trust", "--json").out)["trusted"] is True
    assert "allow bash" in here("config").out.partition("without effect")[0]
    assert here("trust", "--revoke").out.startswith("revoked the trust")
    assert here("trust", "--revoke").out.startswith("no file was trusted")
    assert here("trust", "list").err == "No file is trusted.\n"
    assert here("trust", "list", "--revoke").code == 2


def test_trust_asks_no_question_if_trust_would_change_no_setting(here: Here, own: Path) -> None:
    own.write_text('rules = ["deny bash"]\n')
    done = here("trust")
    assert done.code == 0 and "Nothing to decide" in done.err
    own.write_text('rules = ["permit bash"]\n')
    assert here("trust", "--hash", hashlib.sha256(own.read_bytes()).hexdigest()).code == 5
    own.unlink()
    done = here("trust")
    assert done.code == 1 and "handrail init" in done.err


def test_values_of_an_untrusted_file_are_inert_on_the_terminal(
    handrail: Program, own: Path, on_a_terminal: Terminals
) -> None:
    own.write_text('rules = ["deny bash \\u001b[2Jx\\u202e *", "allow bash a\\nTrusted, it would do nothing"]\n')
    terminal = on_a_terminal(*handrail.command("config"), environment={"XDG_CONFIG_HOME": str(handrail.config)})
    assert terminal.end() == 0
    assert "\x1b" not in terminal.shown and "\u202e" not in terminal.shown and "\\u202e" in terminal.shown
    asked = on_a_terminal(*handrail.command("trust"), environment={"XDG_CONFIG_HOME": str(handrail.config)})
    assert "  allow bash a\\nTrusted, it would do nothing\n" in asked.wait_for("[y/n] ")


@pytest.mark.proves("F-11", "P-10")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"HANDRAIL_HEADLESS": "1"}, True),
        ({"HANDRAIL_HEADLESS": "yes", "CI": "false"}, True),
        ({"CI": "true"}, True),
        ({"CI": "1", "HANDRAIL_HEADLESS": ""}, True),
        ({"CI": "woodpecker"}, True),
        ({"CI": "true", "HANDRAIL_HEADLESS": "0"}, False),
        ({"CI": "false"}, False),
        ({"CI": ""}, False),
    ],
)
def test_the_environment_decides_whether_a_session_is_headless(environment: dict[str, str], expected: bool) -> None:
    assert is_headless(environment) is expected


@pytest.mark.proves("F-11", "P-10")
def test_a_terminal_is_not_asked_when_the_environment_is_headless(handrail: Program, on_a_terminal: Terminals) -> None:
    command = handrail.command("call", "write", '{"path": "new.txt", "content": "x"}')
    terminal = on_a_terminal(*command, environment={"HANDRAIL_HEADLESS": "1"})
    assert terminal.end() == 3 and "This session has no user to ask" in " ".join(terminal.shown.split())
    assert not (handrail.workspace / "new.txt").exists()


def test_an_invalid_value_of_handrail_headless_is_a_usage_error(
    handrail: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANDRAIL_HEADLESS", "maybe")
    assert run_command_line(["tools", *handrail.common]) == 2
    assert "Expected 1 or 0" in capsys.readouterr().err
    assert os.environ["HANDRAIL_HEADLESS"] == "maybe"


async def test_config_and_trust_warn_that_a_running_process_keeps_its_settings(
    here: Here, handrail: Program, own: Path
) -> None:
    hash_ = hashlib.sha256(own.read_bytes()).hexdigest()
    later = "holds this workspace, and still uses the settings from its start"
    async with open_kernel(handrail.workspace, state=handrail.state):
        for arguments in (["trust", "--hash", hash_], ["config"], ["trust", "--revoke"]):
            done = await asyncio.to_thread(here, *arguments)
            assert done.code == 0 and later in done.err, arguments
    assert later not in here("trust", "--hash", hash_).err + here("config").err
