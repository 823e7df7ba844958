"""Rules from untrusted content only narrow, and one file is never writable, whatever the rules say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.desk import BASH, EDIT, MOVE, READ, TODO, TRANSFER, UPLOAD, WRITE, AuthorizerFixture, book, rule

from handrail.contract.tool.spec import ToolSpec
from handrail.policy.decision_explanation import trace_decision
from handrail.policy.rule_suggestions import suggest_rule
from handrail.policy.rules.rules_and_modes import STRICTNESS, Rule


def untrusted(*texts: str) -> list[Rule]:
    return [replace(rule(text, "project", "ws/handrail.toml:1"), narrows=True) for text in texts]


@pytest.mark.proves("F-11", "P-03")
@pytest.mark.parametrize(
    ("spec", "arguments", "deny", "ask"),
    [
        (BASH, {"command": "touch x"}, "deny bash touch *", "ask bash touch x"),
        (WRITE, {"path": "src/a.py"}, "deny fs.write src/**", "ask fs.write src/a.py"),
        (WRITE, {"path": "src/a.py"}, "deny write", "ask write src/a.py"),
        (TRANSFER, {"source": "a", "target": "b", "amount": "1"}, "deny bank.*", "ask bank.transfer source=a"),
        (TODO, {"todos": []}, "deny *", "ask todo"),
    ],
)
def test_an_untrusted_ask_rule_never_replaces_a_deny_and_an_untrusted_deny_rule_applies(
    desk: AuthorizerFixture, spec: ToolSpec, arguments: Mapping[str, Any], deny: str, ask: str
) -> None:
    denied = book(f"project: {deny}")
    assert desk.judge(spec, arguments, denied.with_rules(rule(ask, "project"))).action == "ask"  # what trust would do
    assert desk.judge(spec, arguments, denied.with_rules(*untrusted(ask))).action == "deny"
    permitted = book(f"allow {spec.id}")
    assert desk.judge(spec, arguments, permitted.with_rules(*untrusted(ask))).action == "ask"
    assert desk.judge(spec, arguments, permitted.with_rules(*untrusted(ask.replace("ask", "deny", 1)))).action == "deny"


SHELL = ("*", "bash", "bash *", "shell.run", "shell.*")
GIT = (*SHELL, "bash git *", "bash git push *", "bash git push -f origin", "shell.run git *", "shell.run git push -*")
FILES = (
    "*",
    "fs.read",
    "fs.write",
    "fs.*",
    "fs.read src/**",
    "fs.write src/**",
    "fs.read src/a.py",
    "fs.write src/a.py",
)
CALLS: list[tuple[ToolSpec, dict[str, Any], tuple[str, ...]]] = [
    (BASH, {"command": "git push -f origin"}, GIT),
    (BASH, {"command": "git push x && git push -f origin"}, GIT),
    (BASH, {"command": "git push -f origin > b"}, GIT),
    (BASH, {"command": "sleep 300"}, (*SHELL, "bash sleep *", "bash sleep 300", "shell.run sleep 300")),
    (READ, {"path": "src/a.py"}, (*FILES, "read", "read src/**", "read src/a.py", "re*")),
    (READ, {"path": ".env"}, (*FILES, "read", "read .env", "fs.read .env", "fs.read **/.env")),
    (EDIT, {"path": "src/a.py"}, (*FILES, "edit", "edit src/**", "edit src/a.py")),
    (MOVE, {"source": "src/a.py", "target": "b.py"}, (*FILES, "move", "move src/**", "fs.write b.py", "move b.py")),
    (
        UPLOAD,
        {"path": "src/a.py", "url": "https://a.example.org/x"},
        (*FILES, "upload", "up*", "net.fetch", "net.*", "net.fetch *.example.org", "net.fetch a.example.org:443"),
    ),
    (
        TRANSFER,
        {"source": "a", "target": "b", "amount": "1"},
        ("*", "bank.*", "bank.transfer", "bank.transfer source=a *", "bank.transfer source=a target=b amount=1"),
    ),
    (TODO, {"todos": []}, ("*", "todo", "to*", "todo todos=*")),
]
SCOPES = st.sampled_from(["project", "project", "session", "session", "manifest", "mode"])


@pytest.mark.proves("F-11", "P-03")
@settings(max_examples=3 * settings().max_examples)
@given(st.data(), st.sampled_from(CALLS))
def test_untrusted_rules_never_make_a_decision_milder(
    desk: AuthorizerFixture, data: st.DataObject, call: tuple[ToolSpec, dict[str, Any], tuple[str, ...]]
) -> None:
    spec, arguments, related = call
    about = st.sampled_from(related)
    trusted = data.draw(
        st.lists(st.tuples(SCOPES, st.sampled_from(["allow", "ask", "deny", "deny"]), about), max_size=3)
    )
    others = data.draw(st.lists(st.tuples(st.sampled_from(["ask", "ask", "deny"]), about), min_size=1, max_size=3))
    before = book(*(f"{scope}: {action} {text}" for scope, action, text in trusted))
    after = before.with_rules(*untrusted(*(f"{action} {text}" for action, text in others)))
    assert (
        STRICTNESS[desk.judge(spec, arguments, after).action] >= STRICTNESS[desk.judge(spec, arguments, before).action]
    )


@pytest.mark.proves("P-15")
@pytest.mark.parametrize("spec", [WRITE, EDIT, MOVE])
def test_writing_the_workspaces_configuration_is_denied_under_every_rule_without_asking(
    desk: AuthorizerFixture, spec: ToolSpec
) -> None:
    arguments = {"path": "src/../handrail.toml", "source": "src/a.py", "target": "./HANDRAIL.TOML"}
    rules = ("allow *", f"allow {spec.id}", "allow fs.write handrail.toml", "manifest: allow fs.*")
    verdict = desk.judge(spec, arguments, *rules)
    assert verdict.action == "deny" and "no rule can allow it" in verdict.reason and "the user" in verdict.reason
    assert suggest_rule(verdict) is None and any(
        "no rule can allow it" in step.text for step in trace_decision(verdict)
    )
    assert desk.judge(READ, {"path": "handrail.toml"}).action == "allow"


@pytest.mark.proves("P-15")
def test_a_running_call_cannot_write_the_workspace_file(desk: AuthorizerFixture) -> None:
    may = desk.may(WRITE, {"path": "src/a.py"}, "allow *", "allow fs.write")
    refused = may("fs.write", desk.path("handrail.toml"))
    assert refused is not None and "no rule can allow it" in refused
    assert (
        may("fs.write", desk.path("src/handrail.toml")) is None and may("fs.read", desk.path("handrail.toml")) is None
    )


def test_an_untrusted_rule_is_marked_as_narrowing_and_a_trusted_rule_is_not(tmp_path: Path) -> None:
    text = "ask bash"
    (narrowing,) = untrusted(text)
    assert narrowing.text == text and not rule(text).narrows
