"""The configuration file of a workspace: before it is trusted, after, and after a change."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from tests.config.places import Layers

from handrail.config import Settings
from handrail.store import operator_decisions

pytestmark = pytest.mark.proves("F-11")

WHOLE = """\
agent = "reviewer"
rules = [
  "allow bash *",
  "deny fs.write src/**",
  "ask read",
]
[limits]
grace_ms = 1
"""


def test_only_deny_and_ask_rules_of_an_untrusted_workspace_file_apply(layers: Layers) -> None:
    layers.own.write_text(WHOLE)
    config = layers.load()
    assert [rule.text for rule in config.rules] == ["deny fs.write src/**", "ask read"]
    assert [rule.text for rule in config.inactive_rules] == ["allow bash *"]
    assert config.settings == Settings(rules=("deny fs.write src/**", "ask read"))
    assert all(rule.is_narrowing for rule in config.rules)
    assert {value.key for value in config.untrusted_workspace_values} == {"agent", "rules", "limits.grace_ms"}
    remark = config.untrusted_workspace_warning
    assert remark is not None and "\n" not in remark
    assert "1 allow rule, agent, limits.grace_ms" in remark and "handrail trust" in remark


def test_a_trusted_workspace_file_applies_in_full_until_one_byte_changes(layers: Layers) -> None:
    layers.own.write_text(WHOLE)
    layers.trust()
    config = layers.load()
    assert (config.settings.agent, config.settings.limits.grace_ms) == ("reviewer", 1)
    assert "allow bash *" in config.settings.rules and not any(rule.is_narrowing for rule in config.rules)
    assert config.untrusted_workspace_warning is None and not config.untrusted_workspace_values
    layers.own.write_text(WHOLE + "\n")
    assert layers.load().settings.agent == "default"
    layers.own.write_text(WHOLE)
    assert layers.load().settings.agent == "reviewer"


@pytest.mark.parametrize(
    "text",
    [
        "allow bash *",
        " \t allow bash *",
        "allow\tbash *",
        "allow\u00a0bash *",
        "allow net.ping",
        "allow",
        "allow\nbash *",
    ],
)
def test_an_untrusted_workspace_cannot_add_an_allow_rule_in_any_spelling(layers: Layers, text: str) -> None:
    layers.own.write_text(f"rules = [{json.dumps(text)}]")
    config = layers.load()
    assert config.rules == () and len(config.inactive_rules) == 1


@pytest.mark.parametrize("text", ["Allow bash", "ALLOW bash", "", "  ", "\u200ballow bash", "permit bash"])
def test_a_rule_with_an_unknown_action_stops_the_start(layers: Layers, text: str) -> None:
    layers.own.write_text(f'rules = ["{text}"]\n', encoding="utf-8")
    (fault,) = layers.faults()
    assert fault.startswith(f"{layers.own}:1: rules[0]:") and "allow, ask or deny" in fault


def test_a_workspace_file_that_only_narrows_needs_no_trust(layers: Layers) -> None:
    layers.own.write_text('rules = ["deny bash"]\n')
    config = layers.load()
    assert (
        config.untrusted_workspace_warning is None and not config.untrusted_workspace_values and len(config.rules) == 1
    )


def test_a_faulty_workspace_file_stops_the_start_even_if_it_is_untrusted(layers: Layers) -> None:
    layers.own.write_text("rules = [\n")
    assert "is not TOML" in layers.faults()[0]
    layers.own.write_text('[[watchdogs]]\ncommand = ["./evil"]\n')
    assert "outside the sandbox" in layers.faults()[0]


@pytest.mark.parametrize("setting", ['unconfined = ["bash"]', 'without = ["landlock"]', "cpu_s = 0", "cpu_s = 1"])
def test_a_trusted_workspace_file_cannot_change_the_sandbox(layers: Layers, setting: str) -> None:
    content = f"[sandbox]\n{setting}\n"
    layers.own.write_text(content)
    operator_decisions.trust_workspace_content(
        layers.folders, hashlib.sha256(content.encode()).hexdigest(), clock=lambda: 1
    )
    (fault,) = layers.faults()
    assert fault.startswith(f"{layers.own}:1: sandbox:") and "cannot change the sandbox" in fault


def test_a_workspace_file_is_read_only_if_it_is_a_regular_file_without_links(layers: Layers) -> None:
    elsewhere = layers.folder / "elsewhere.toml"
    elsewhere.write_text('rules = ["deny bash"]\n')
    layers.own.symlink_to(elsewhere)
    assert "is a symbolic link" in layers.faults()[0]
    layers.own.unlink()
    os.link(elsewhere, layers.own)
    assert "2 hard links" in layers.faults()[0]
    layers.own.unlink()
    layers.own.symlink_to(layers.folder / "nothing")
    assert "is a symbolic link" in layers.faults()[0]
    layers.own.unlink()
    os.mkfifo(layers.own)
    assert "is not a regular file" in layers.faults()[0]
    layers.own.unlink()
    layers.own.mkdir()
    assert "is not a regular file" in layers.faults()[0]
    layers.own.rmdir()
    layers.own.write_bytes(b"#" * (256 * 1024 + 1))
    assert "limit is 256 KiB" in layers.faults()[0]
    layers.own.write_bytes(b"#" * 256 * 1024)
    assert layers.faults() == []


def test_trust_in_one_workspace_does_not_apply_to_another(layers: Layers) -> None:
    layers.own.write_text(WHOLE)
    layers.trust()
    other = Layers.beneath(layers.folder / "other")
    other.own.write_text(WHOLE)
    assert other.load().settings.agent == "default"
