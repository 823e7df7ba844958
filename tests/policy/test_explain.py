"""``explain``: the deciding rule, scope, capability or watchdog, and the change for another decision."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from tests.policy.desk import BASH, READ, TODO, TRANSFER, WRITE, AuthorizerFixture, book, rule

from handrail.contract.tool.requires import FsRequires, Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.decision_explanation import PolicyExplanation, explain
from handrail.policy.watchdogs.api import deny


async def explained(
    desk: AuthorizerFixture, spec: ToolSpec, arguments: dict[str, Any], *rules: str, headless: bool = False
) -> PolicyExplanation:
    return await explain(desk.authority, spec, arguments, rules=book(*rules), roots=desk.roots, headless=headless)


def suggested(explanation: PolicyExplanation) -> str | None:
    for change in explanation.possible_changes:
        if match := re.search(r"--rule (.*)\Z", change):
            (text,) = shlex.split(match.group(1))
            return text
    return None


@pytest.mark.proves("P-13")
@pytest.mark.parametrize(
    ("spec", "arguments", "rules", "action", "decided_by"),
    [
        (BASH, {"command": "ls -l"}, [], "ask", "no rule"),
        (BASH, {"command": "git push"}, ["deny bash git *"], "deny", "rule 'deny bash git *' (session scope, --rule)"),
        (BASH, {"command": "git push"}, ["project: ask bash git *"], "ask", "project scope"),
        (BASH, {"command": "python -c 1"}, ["allow bash"], "ask", "policy for this program"),
        (BASH, {"command": "ls"}, ["allow bash"], "allow", "rule 'allow bash'"),
        (READ, {"path": ".env"}, [], "ask", "shipped with Handrail"),
        (READ, {"path": "src/a.py"}, [], "allow", "'allow fs.read **' (default scope"),
        (WRITE, {"path": "src/a.py"}, ["allow write", "deny fs.write src/**"], "deny", "'deny fs.write src/**'"),
        (TRANSFER, {"amount": 5}, [], "ask", "no rule"),
        (TODO, {}, [], "allow", "default scope"),
    ],
)
async def test_explain_names_the_deciding_rule_and_a_rule_that_reverses_the_decision(
    desk: AuthorizerFixture, spec: ToolSpec, arguments: dict[str, Any], rules: list[str], action: str, decided_by: str
) -> None:
    explanation = await explained(desk, spec, arguments, *rules)
    assert explanation.action == action
    assert decided_by in explanation.decided_by
    text = suggested(explanation)
    assert text is not None
    assert (await explained(desk, spec, arguments, *rules, text)).action == ("deny" if action == "allow" else "allow")


@pytest.mark.proves("P-13")
async def test_explain_agrees_with_the_actual_decision(desk: AuthorizerFixture) -> None:
    for command in ("ls", "ls && rm x", "ls $X", "sleep 300"):
        explanation = await explained(desk, BASH, {"command": command}, "allow bash", "deny bash rm *")
        assert explanation.action == desk.bash(command, "allow bash", "deny bash rm *").action


@pytest.mark.proves("P-13", "P-10")
async def test_an_explanation_shows_an_ask_in_a_headless_session_as_deny(desk: AuthorizerFixture) -> None:
    explanation = await explained(desk, BASH, {"command": "ls"}, headless=True)
    assert (explanation.action, explanation.effective_action) == ("ask", "deny")
    assert "headless: deny" in str(explanation)


@pytest.mark.proves("P-13")
async def test_explain_reports_a_final_deny_as_final(desk: AuthorizerFixture) -> None:
    explanation = await explain(
        desk.authority,
        BASH,
        {"command": "ls"},
        rules=book("allow bash ls").with_rules(rule("deny bash", "manifest", "agent.toml")),
        roots=desk.roots,
    )
    assert explanation.rule is not None
    assert explanation.rule.is_final
    assert suggested(explanation) is None
    assert "agent.toml" in explanation.possible_changes[0]
    assert "final" in explanation.possible_changes[0]


@pytest.mark.proves("P-13")
async def test_an_explanation_names_the_refusing_capability_layer_and_the_change_to_make(
    desk: AuthorizerFixture,
) -> None:
    explanation = await explained(desk, READ, {"path": "/etc/passwd"}, "allow *")
    assert explanation.decided_by == "the capability check"
    assert any(step.stage == "capability" and step.outcome == "refused" for step in explanation.steps)
    assert "`requires` of tool read" in explanation.possible_changes[0]
    low = AuthorizerFixture(desk.workspace, ceiling=Requires(fs=FsRequires(read=("src",))))
    assert "ceiling" in (await explained(low, READ, {"path": "a"})).possible_changes[0]


@pytest.mark.proves("P-13", "P-11")
async def test_an_explanation_names_the_watchdog_that_decided_and_suggests_no_rule(desk: AuthorizerFixture) -> None:
    def guard(call: object) -> Any:
        return deny("not on Fridays")

    own = AuthorizerFixture(desk.workspace, (guard,))
    explanation = await explained(own, BASH, {"command": "ls"}, "allow bash")
    assert explanation.action == "deny"
    assert explanation.decided_by == "watchdog guard: not on Fridays"
    assert explanation.rule is None
    assert suggested(explanation) is None


@pytest.mark.proves("P-13")
async def test_an_explanation_lists_every_candidate_rule_with_the_reason_it_lost(desk: AuthorizerFixture) -> None:
    explanation = await explained(
        desk,
        BASH,
        {"command": "git push origin"},
        "allow *",
        "allow bash git *",
        "ask bash git push *",
        "deny bash rm *",
        "allow shell.run",
    )
    fared = {step.text.partition(": ")[2]: step.outcome for step in explanation.steps if step.stage == "rule"}
    assert fared["'ask bash git push *' (session scope, --rule)"] == "won"
    assert any(text.startswith("'allow bash git *'") and "literal characters" in text for text in fared)
    assert any(text.startswith("'allow *'") and "permission" in text for text in fared)
    assert fared["'deny bash rm *' (session scope, --rule)"] == "no match"
    assert fared["'allow shell.run' (session scope, --rule)"] == "won"


async def test_an_explanation_counts_rules_that_do_not_match_and_lists_them_in_json(desk: AuthorizerFixture) -> None:
    others = [f"deny bash rm {number}" for number in range(30)]
    explanation = await explained(desk, BASH, {"command": "git push"}, *others, "ask bash git push")
    assert "30 rules; --json lists each" in str(explanation)
    assert "deny bash rm 7" not in str(explanation)
    assert sum(step["outcome"] == "no match" for step in explanation.to_dict()["steps"]) == 30


async def test_an_explanation_converts_to_plain_text_and_json(desk: AuthorizerFixture) -> None:
    explanation = await explained(desk, BASH, {"command": "rm x && ls\tb"}, "deny bash rm *")
    assert str(explanation).startswith("bash: deny\n")
    assert "changes that would reverse it:" in str(explanation)
    as_json = json.loads(json.dumps(explanation.to_dict()))
    assert as_json["rule"]["text"] == "deny bash rm *"
    assert as_json["steps"][0]["stage"] == "target"


async def test_an_explanation_of_an_unreadable_command_advises_how_to_write_it(desk: AuthorizerFixture) -> None:
    explanation = await explained(desk, BASH, {"command": "ls $X\x1b[2J"}, "allow bash")
    assert "simple commands" in explanation.possible_changes[0]
    assert "\x1b" not in str(explanation)


async def test_a_very_long_rule_list_gives_a_bounded_explanation(desk: AuthorizerFixture) -> None:
    explanation = await explained(desk, BASH, {"command": "ls"}, *(f"deny bash never-{n}" for n in range(1_000)))
    assert len(explanation.steps) < 500
