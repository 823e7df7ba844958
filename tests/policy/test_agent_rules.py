"""The rules of an agent manifest: their scope, and rules that can never match."""

from __future__ import annotations

import pytest

from handrail.contract.agent_manifest import AgentManifest
from handrail.policy.rules.validation import parse_agent_rules

KNOWN = ("read", "bash", "notes.add")


def agent(*rules: str, **aliases: str) -> AgentManifest:
    return AgentManifest(id="reviewer", rules=rules, aliases=aliases)


def test_a_manifest_rule_has_the_manifest_scope_and_names_its_file() -> None:
    rules, faults = parse_agent_rules(agent("deny bash", "allow fs.write docs/**", "ask notes.*"), "agent.toml", KNOWN)
    assert faults == []
    assert [(rule.text, rule.scope, rule.source) for rule in rules] == [
        ("deny bash", "manifest", "agent.toml"),
        ("allow fs.write docs/**", "manifest", "agent.toml"),
        ("ask notes.*", "manifest", "agent.toml"),
    ]
    assert [rule.is_final for rule in rules] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("bash", "Invalid rule"),
        ("dney bash", "Did you mean 'deny'?"),
        ("deny bsah", "Did you mean 'bash'?"),
        ("deny notse.*", "'notse.*' matches none of this agent's tools"),
        ("deny mail.send", "is not among this agent's tools, so the rule would never match"),
        ("deny shell", "is an alias. Write the tool's id: 'bash'"),
        ("deny fs.write ../x", "never matches"),
        ("deny *x*y*z", "matches none of this agent's tools"),
    ],
)
def test_an_invalid_or_unmatchable_agent_rule_is_a_fault_with_its_key(text: str, part: str) -> None:
    rules, faults = parse_agent_rules(agent("allow read", text, shell="bash"), "agent.toml", KNOWN, ("mail.send",))
    assert [rule.text for rule in rules] == ["allow read"]
    [(place, problem)] = faults
    assert place == "rules[1]"
    assert part in problem


@pytest.mark.parametrize("text", ["deny *", "deny mcp:github:*", "ask fs.*", "deny net.fetch *.example.org"])
def test_rules_about_capabilities_or_all_tools_need_no_matching_tool(text: str) -> None:
    assert parse_agent_rules(agent(text), "agent.toml", KNOWN)[1] == []


def test_only_the_form_of_a_rule_is_checked_when_the_tools_are_unknown() -> None:
    _, faults = parse_agent_rules(agent("deny mail.send", "deny x.*", "nope"), "agent.toml", None)
    assert [place for place, _ in faults] == ["rules[2]"]
