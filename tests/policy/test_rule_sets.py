"""The shipped rule sets: what each allows in which mode, and how rules select one."""

from __future__ import annotations

import pytest
from tests.policy.desk import EDIT, FETCH, READ, WRITE, AuthorizerFixture, rule

from handrail.contract.permission_modes import Mode
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.rule_sets import RULE_SETS, list_selected_rule_sets, parse_entry, resolve_rule_set_reference
from handrail.policy.rules.rules_and_modes import MODES, RuleBook, build_default_rule_book, parse_rule, with_mode
from handrail.policy.rules.validation import find_contradictions, validate_rule_and_examples
from handrail.tools.files.moving_tools import FileDeleteTool, FileMoveTool
from handrail.tools.git import GIT_TOOLS
from handrail.tools.shell_tools import BashTool, PythonTool

pytestmark = pytest.mark.proves("P-18")

SHELL = BashTool().spec
PYTHON = PythonTool().spec
GIT = {tool.spec.id: tool.spec for tool in GIT_TOOLS}
SPECS = {spec.id: spec for spec in (*GIT.values(), SHELL, PYTHON, READ, WRITE, EDIT, FETCH)}


def chosen(*entries: str) -> RuleBook:
    return build_default_rule_book().with_rules(
        *(one for entry in entries for one in parse_entry(entry, scope="project"))
    )


@pytest.mark.parametrize(
    ("spec", "arguments", "developer", "reviewer", "ci"),
    [
        (SHELL, {"command": "git diff HEAD~1"}, "allow", "allow", "allow"),
        (SHELL, {"command": "git log -p -3"}, "allow", "allow", "allow"),
        (SHELL, {"command": "rg -n TODO src | head"}, "allow", "allow", "allow"),
        (SHELL, {"command": "pytest -k x -q"}, "allow", "ask", "allow"),
        (SHELL, {"command": "for f in a b; do python -m pytest $f; done"}, "allow", "ask", "allow"),
        (SHELL, {"command": "run='pytest -q'; $run tests"}, "allow", "ask", "allow"),
        (SHELL, {"command": "git commit -m x"}, "allow", "ask", "allow"),
        (SHELL, {"command": "git push origin main"}, "ask", "deny", "deny"),
        (SHELL, {"command": "npm publish --access public"}, "ask", "deny", "deny"),
        (SHELL, {"command": "ls > notes.txt"}, "allow", "deny", "allow"),
        (SHELL, {"command": "cat .env"}, "ask", "ask", "ask"),
        (PYTHON, {"code": "print(1)"}, "allow", "ask", "allow"),
        (WRITE, {"path": "src/a.py"}, "allow", "deny", "allow"),
        (WRITE, {"path": ".env"}, "ask", "deny", "ask"),
        (EDIT, {"path": "AGENTS.md"}, "ask", "deny", "ask"),
        (READ, {"path": "src/a.py"}, "allow", "allow", "allow"),
        (FETCH, {"url": "http://example.org/"}, "ask", "ask", "deny"),
        (GIT["git.commit"], {"message": "x"}, "allow", "deny", "allow"),
        (GIT["git.push"], {"remote": "origin"}, "ask", "deny", "deny"),
    ],
    ids=lambda value: value.id if isinstance(value, ToolSpec) else str(value),
)
def test_each_rule_set_gives_the_expected_decision_for_each_call(
    desk: AuthorizerFixture, spec: ToolSpec, arguments: dict[str, object], developer: str, reviewer: str, ci: str
) -> None:
    found = {name: desk.judge(spec, arguments, chosen(f"@{name}")).action for name in RULE_SETS}
    assert found == {"developer": developer, "reviewer": reviewer, "ci": ci}


def test_every_rule_of_a_rule_set_can_match(desk: AuthorizerFixture) -> None:
    for one in RULE_SETS.values():
        rules = [
            parse_rule(
                text,
                scope="session",
                known=SPECS
                | dict.fromkeys(
                    ("multi_edit", "file.patch", "apply_patch", "file.move", "file.delete", "json_write"), 0
                ),
            )
            for text in one.texts
        ]
        for each in rules:
            validate_rule_and_examples(each, (), (), SPECS)
        assert not find_contradictions(rules)
        assert len(set(one.texts)) == len(one.texts)


@pytest.mark.parametrize("mode", MODES)
def test_a_reviewer_writes_in_no_mode(desk: AuthorizerFixture, mode: Mode) -> None:
    rules = with_mode(chosen("@reviewer"), mode)
    repository = {"git.merge": {"ref": "x"}, "git.checkout": {"ref": "x"}, "git.create_branch": {"name": "x"}}
    for tool in ("git.add", "git.commit", "git.create_branch", "git.checkout", "git.merge", "git.stash", "git.init"):
        assert desk.judge(GIT[tool], repository.get(tool, {"message": "x"}), rules).action == "deny", tool
    for tool in (FileMoveTool(), FileDeleteTool()):
        assert desk.judge(tool.spec, {"path": "src/a.py", "to": "src/b.py"}, rules).action == "deny", tool.spec.id
    assert desk.judge(WRITE, {"path": "src/a.py"}, rules).action == "deny"
    for name in ("src/a.py", ".env.example", ".ENV.Example"):
        assert desk.judge(SHELL, {"command": f"echo x > {name}"}, rules).action == "deny", name


def test_rule_sets_allow_no_call_that_plan_mode_denies(desk: AuthorizerFixture) -> None:
    for name in RULE_SETS:
        for mode in MODES:
            rules = with_mode(chosen(f"@{name}"), mode)
            if mode == "plan":
                assert desk.judge(WRITE, {"path": "a"}, rules).action == "deny"
                assert desk.judge(SHELL, {"command": "make"}, rules).action == "deny"


def test_stricter_rules_of_the_user_override_a_rule_set(desk: AuthorizerFixture) -> None:
    rules = chosen("@developer").with_rules(
        rule("deny bash pytest *"), rule("ask write src/**"), rule("deny git.commit")
    )
    assert desk.judge(SHELL, {"command": "pytest -q"}, rules).action == "deny"
    assert desk.judge(SHELL, {"command": 'x=y; eval "pytest $x"'}, rules).action != "allow"
    assert desk.judge(WRITE, {"path": "src/a"}, rules).action == "ask"
    assert desk.judge(GIT["git.commit"], {"message": "x"}, rules).action == "deny"


def test_a_rule_set_is_selected_by_its_name() -> None:
    assert resolve_rule_set_reference("allow bash") is None
    assert list_selected_rule_sets(["@ci", "allow bash", "@ci"]) == ["ci"]
    with pytest.raises(ValueError, match="Did you mean '@developer'"):
        resolve_rule_set_reference("@devloper")
    found = parse_entry("@reviewer", scope="manifest")
    assert {one.source for one in found} == {"rule set reviewer"}
    assert all(one.is_final for one in found if one.action == "deny")
    named = parse_entry("@developer", scope="session", known={"write"})
    assert {one.permission for one in named} == {"write", "fs.write"}, (
        "rules about tools that are not there are left out"
    )
