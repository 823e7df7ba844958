"""Modes are rules in their own scope: what each allows, and what applies in all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import ALL, BASH, EDIT, FETCH, READ, TODO, TRANSFER, WRITE, AuthorizerFixture, book

from handrail.contract.errors import UsageError
from handrail.contract.permission_modes import MODES, Mode
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.rules_and_modes import (
    MODE_DESCRIPTIONS,
    MODE_RULE_TEXTS,
    SECRET_FILE_NAMES,
    SECRET_NAME_EXCEPTIONS,
    build_default_rule_book,
    parse_mode,
    parse_rule,
    with_mode,
)
from handrail.policy.rules.rules_and_modes import parse_optional_mode as named
from handrail.tools.git import GIT_TOOLS
from handrail.tools.shell_tools import BashTool

pytestmark = pytest.mark.proves("P-14")

SHELL = BashTool().spec
GIT = {tool.spec.id: tool.spec for tool in GIT_TOOLS}


@pytest.mark.parametrize(
    ("spec", "arguments", "plan", "ask", "edits", "auto"),
    [
        (SHELL, {"command": "git status"}, "allow", "allow", "allow", "allow"),
        (SHELL, {"command": "timeout 5 grep -rn x src"}, "allow", "allow", "allow", "allow"),
        (SHELL, {"command": "make test"}, "deny", "ask", "ask", "allow"),
        (SHELL, {"command": "ls > src/list"}, "deny", "ask", "ask", "allow"),
        (SHELL, {"command": "ls > .env"}, "deny", "ask", "ask", "ask"),
        (SHELL, {"command": "cat .env"}, "ask", "ask", "ask", "ask"),
        (SHELL, {"command": "grep TOKEN --include=.env -r ."}, "ask", "ask", "ask", "ask"),
        (SHELL, {"command": 'eval "$x"'}, "deny", "ask", "ask", "ask"),
        (SHELL, {"command": "echo $(ls)"}, "allow", "allow", "allow", "allow"),
        (SHELL, {"command": "$(ls) x"}, "deny", "ask", "ask", "allow"),
        (SHELL, {"command": "python -c 'print(1)'"}, "deny", "ask", "ask", "allow"),
        (SHELL, {"command": "sudo ls"}, "deny", "ask", "ask", "ask"),
        (SHELL, {"command": "ls > handrail.toml"}, "deny", "deny", "deny", "deny"),
        (SHELL, {"command": "ls > /etc/x"}, "deny", "deny", "deny", "deny"),
        (WRITE, {"path": "src/a.py"}, "deny", "ask", "allow", "allow"),
        (EDIT, {"path": "src/a.py"}, "deny", "ask", "allow", "allow"),
        (WRITE, {"path": ".env"}, "deny", "ask", "ask", "ask"),
        (WRITE, {"path": ".git/hooks/pre-commit"}, "deny", "deny", "deny", "deny"),
        (READ, {"path": "src/a.py"}, "allow", "allow", "allow", "allow"),
        (READ, {"path": ".env"}, "ask", "ask", "ask", "ask"),
        (TODO, {"todos": []}, "allow", "allow", "allow", "allow"),
        (TRANSFER, {"source": "a", "target": "b"}, "deny", "ask", "ask", "ask"),
        (FETCH, {"url": "http://example.org/"}, "ask", "ask", "ask", "ask"),
        (GIT["git.status"], {}, "allow", "allow", "allow", "allow"),
        (GIT["git.show"], {"file": ".env"}, "ask", "ask", "ask", "ask"),
        (GIT["git.commit"], {"message": "x"}, "deny", "ask", "ask", "allow"),
        (GIT["git.clone"], {"source": "."}, "deny", "ask", "ask", "ask"),
    ],
    ids=lambda value: value.id if isinstance(value, ToolSpec) else str(value),
)
def test_each_mode_gives_the_expected_decision_for_each_tool(
    desk: AuthorizerFixture, spec: ToolSpec, arguments: dict[str, object], plan: str, ask: str, edits: str, auto: str
) -> None:
    wanted = dict(zip(MODES, (plan, ask, edits, auto), strict=True))
    assert {mode: desk.judge(spec, arguments, with_mode(book(), mode)).action for mode in MODES} == wanted


def test_a_mode_consists_only_of_its_rules(desk: AuthorizerFixture) -> None:
    for mode in MODES:
        rules = with_mode(book(), mode)
        assert tuple(rule.text for rule in rules.list_rules_of_scope("mode")) == MODE_RULE_TEXTS[mode]
        assert {rule.source for rule in rules.list_rules_of_scope("mode")} <= {f"mode {mode}"}
        for rule in rules.list_rules_of_scope("mode"):
            read = parse_rule(rule.text, scope="mode", source=rule.source)
            assert (
                replace(
                    read, any_case=rule.pattern.removeprefix("**/") in (*SECRET_FILE_NAMES, *SECRET_NAME_EXCEPTIONS)
                )
                == rule
            )
        assert rules.mode == mode
    assert with_mode(with_mode(book(), "auto"), "ask").rules == book().rules


@given(
    st.sampled_from(ALL),
    st.sampled_from(["allow *", "allow write", "allow fs.*", "allow bash", "allow effect:external"]),
)
def test_plan_mode_denies_writes_under_every_rule(desk: AuthorizerFixture, spec: ToolSpec, rule: str) -> None:
    arguments = {
        "path": "a",
        "source": "a",
        "target": "b",
        "command": "touch a",
        "argv": ["git", "x"],
        "url": "http://a.b",
    }
    given = {name: value for name, value in arguments.items() if name in spec.parameters["properties"]}
    verdict = desk.judge(spec, given, with_mode(book(rule), "plan"))
    writes = spec.side_effect != "read" and spec is not TODO
    assert verdict.action == "deny" if writes else True, verdict.reason


def test_more_specific_project_rules_override_the_rules_of_a_mode(desk: AuthorizerFixture) -> None:
    for mode in ("accept-edits", "auto"):
        rules = with_mode(
            book("project: ask bash git *", "project: deny write src/secret", "project: ask edit src/**"), mode
        )
        assert desk.judge(SHELL, {"command": "git status"}, rules).action == "ask"
        assert desk.judge(WRITE, {"path": "src/secret"}, rules).action == "deny"
        assert desk.judge(EDIT, {"path": "src/a.py"}, rules).action == "ask"


def test_plan_mode_fetches_only_from_hosts_that_a_rule_allows(desk: AuthorizerFixture) -> None:
    assert FETCH.side_effect == "read"
    rules = with_mode(book("allow net.fetch example.org"), "plan")
    assert desk.judge(FETCH, {"url": "http://example.org/"}, rules).action == "allow"
    assert desk.judge(FETCH, {"url": "http://example.com/"}, rules).action == "ask"
    assert desk.judge(TRANSFER, {"source": "a", "target": "b"}, with_mode(book("allow *"), "plan")).action == "deny"
    assert "reach hosts that a rule allows" in MODE_DESCRIPTIONS["plan"]


def test_a_running_call_writes_nothing_in_plan_mode(desk: AuthorizerFixture) -> None:
    rules = with_mode(book(), "plan")
    verdict = desk.judge(READ, {"path": "src/a.py"}, rules)
    may = desk.authority.make_access_check(verdict, READ, rules=rules, roots=desk.roots)
    assert may("fs.read", desk.path("src/a.py")) is None
    assert may("fs.write", desk.path("src/a.py")) is not None


def test_plan_mode_denies_a_shell_tool_even_for_a_reading_command(desk: AuthorizerFixture) -> None:
    rules = with_mode(book(), "plan")
    assert not BASH.single_command
    assert desk.judge(BASH, {"command": "ls"}, rules).action == "deny"


def test_a_mode_is_parsed_by_its_full_name_and_a_typo_gets_a_suggestion() -> None:
    assert [parse_mode(mode) for mode in MODES] == list(MODES)
    with pytest.raises(ValueError, match="Did you mean 'accept-edits'"):
        parse_mode("accept_edits")
    with pytest.raises(UsageError, match="Valid modes: plan, ask, accept-edits, auto"):
        named("yolo")
    assert named(None) is None


def test_the_modes_are_ordered_from_narrowest_to_widest(desk: AuthorizerFixture) -> None:
    """No call that a narrower mode lets run is held back by a wider one."""
    order: list[Mode] = ["plan", "ask", "accept-edits", "auto"]
    assert list(MODES) == order
    for command in ("ls", "git status", "make", "rm x", "echo $x", "sudo ls"):
        actions = [desk.judge(SHELL, {"command": command}, with_mode(book(), mode)).action for mode in order[1:]]
        assert actions == sorted(actions, key=["ask", "allow"].index)


def test_the_reason_names_a_command_that_changes_something_and_none_that_only_reads(desk: AuthorizerFixture) -> None:
    spec = replace(BASH, single_command=True)
    for command, begin in (
        ("ls build && rm -rf build", "`rm -rf build`"),
        ("cd src; echo x; make", "`make`"),
        ("make; touch x", "`make`"),
    ):
        for rules in (
            with_mode(build_default_rule_book(), "plan"),
            build_default_rule_book().with_rules(parse_rule("ask bash", scope="session")),
        ):
            verdict = desk.authority.evaluate(spec, {"command": command}, rules=rules, roots=desk.roots)
            assert verdict.reason.startswith(begin), verdict.reason
