"""Wrappers are judged as the command that they run, if their form is understood."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import AuthorizerFixture

from handrail.policy.decision_explanation import trace_decision
from handrail.policy.rules.pattern_lexer import build_exact_argv_pattern
from handrail.policy.shell import command_wrappers

pytestmark = pytest.mark.proves("P-05")


@pytest.mark.parametrize(
    ("command", "rules", "answer"),
    [
        ("timeout 5 nice git status", ["allow bash git status"], "allow"),
        ("timeout 5 nice git status", ["allow bash git log"], "ask"),
        ("timeout 5 nice git status", ["allow shell.run git status"], "allow"),
        ("timeout 5 git status -s", ["allow bash git status"], "ask"),
        ("timeout 5 git push origin", ["allow bash", "deny bash git push *"], "deny"),
        ("timeout 5 git push origin", ["allow bash git *", "ask bash git push *"], "ask"),
        # the wrapper's own rule
        ("timeout 5 git status", ["allow bash git status", "ask bash timeout *"], "ask"),
        ("timeout 5 git status", ["allow bash git status", "deny bash timeout *"], "deny"),
        ("timeout 5 git status", ["allow bash git status", "deny bash"], "deny"),
        ("timeout 5 git status", ["allow bash git status", "ask bash"], "allow"),
        ("nice timeout 5 git status", ["allow bash git status", "ask bash timeout *"], "ask"),
        # a wrapper's allow rule does not stand for whatever it runs
        ("timeout 5 git status", ["allow bash timeout 5 *"], "ask"),
        ("timeout 5 git status", ["allow bash timeout *"], "ask"),
        ("timeout 5 git status", ["allow bash timeout 5 git status"], "allow"),
        ("timeout 5 python -c x", ["allow bash timeout 5 python -c x"], "allow"),
        ("timeout 5 python -c x", ["allow bash python -c x"], "allow"),
        ("timeout 5 python -c x", ["allow bash python *", "allow bash timeout *"], "ask"),
        ("nice sleep 300", ["allow bash"], "deny"),
        ("timeout 5 sleep 300", ["allow bash"], "allow"),
    ],
)
def test_the_rules_for_a_command_also_apply_to_its_wrapped_form(
    desk: AuthorizerFixture, command: str, rules: list[str], answer: str
) -> None:
    verdict = desk.bash(command, *rules)
    assert verdict.action == answer, verdict.reason


def test_the_trace_lists_the_wrappers_of_a_command(desk: AuthorizerFixture) -> None:
    verdict = desk.bash("timeout 5 nice git status", "allow bash git status")
    unwrapped = [step.text for step in trace_decision(verdict) if step.outcome == "unwrapped"]
    assert [text.split("`")[1] for text in unwrapped] == ["timeout 5", "nice"]


WRAPPERS = st.sampled_from(
    [
        ["timeout", "5"],
        ["timeout", "-k", "1", "-s", "KILL", "5m"],
        ["nice"],
        ["nice", "-n", "3"],
        ["nohup"],
        ["time"],
        ["time", "-p"],
        ["stdbuf", "-oL"],
        ["setsid"],
        ["ionice", "-c", "3"],
        ["command"],
        ["env"],
        ["env", "LC_ALL=C"],
    ]
)
COMMANDS = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1), min_size=1)


@given(st.lists(WRAPPERS, min_size=1, max_size=command_wrappers.MAX_DEPTH), COMMANDS)
def test_splitting_wrapper_layers_preserves_the_words(around: list[list[str]], command: list[str]) -> None:
    argv = [word for wrapper in around for word in wrapper] + command
    layers = command_wrappers.split_wrapper_layers(argv)
    assert [word for layer in layers for word in layer] == argv
    assert all(layer for layer in layers)


@given(st.lists(WRAPPERS, min_size=1, max_size=4), st.sampled_from(["rm -rf x", "sudo ls", "python -c x", "sh -c ls"]))
def test_a_wrapper_never_allows_a_command_that_needs_approval_without_it(
    desk: AuthorizerFixture, around: list[list[str]], command: str
) -> None:
    text = " ".join([*(build_exact_argv_pattern(wrapper) for wrapper in around), command])
    for rules in (["allow bash git status"], ["allow bash git *", "allow bash timeout *", "allow bash nice *"]):
        assert desk.bash(text, *rules).action == "ask"
    bare = desk.bash(command, "allow bash").action
    assert desk.bash(text, "allow bash").action in (bare, "ask")
    assert desk.bash(text, "allow bash", f"deny bash {command.split()[0]} *").action == "deny"


@given(st.lists(st.text(max_size=8), max_size=6))
def test_unwrapping_never_raises_on_any_argv(argv: list[str]) -> None:
    at = command_wrappers.find_wrapped_command_start(argv)
    assert at is None or (0 < at < len(argv) and argv[at][:1] not in ("", "-"))
