"""The rules of an agent manifest: scope *manifest*, so that a deny among them is final."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from handrail.contract.agent import AgentManifest
from handrail.contract.rules import entry_of
from handrail.contract.text.patterns import text_regex
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.checking import check_loaded, contradictions, shadowed
from handrail.policy.rules.rules import Rule, is_capability_glob, is_glob, parse_rule


def rules_of_agent(
    agent: AgentManifest,
    source: str,
    known: Collection[str] | None,
    others: Collection[str] = (),
    specs: Mapping[str, ToolSpec] | None = None,
) -> tuple[list[Rule], list[tuple[str, str]]]:
    """The rules that are some, and ``(place, problem)`` for each text that is none or can never match.

    :param source: the manifest's file
    :param known: the ids of the agent's tools; None where nobody knows them
    :param others: the ids of tools that other agents may have and this one has not
    :param specs: the agent's tools; None where nobody knows them
    """
    rules: list[Rule] = []
    faults: list[tuple[str, str]] = []
    places: list[int] = []
    for index, given in enumerate(agent.rules):
        entry = entry_of(given)
        text = entry.rule
        try:
            rule = parse_rule(text, scope="manifest", source=source, known=known)
            if known is not None:
                _check_matches_some(rule, known)
            check_loaded(rule, entry.match, entry.not_match, specs)
        except ValueError as error:
            faults.append((f"rules[{index}]", _explained(text, agent, others, str(error))))
        else:
            rules.append(rule)
            places.append(index)
    for at, problem in (*contradictions(rules), *shadowed(rules)):
        faults.append((f"rules[{places[at]}]", problem))
    return rules, faults


def _check_matches_some(rule: Rule, known: Collection[str]) -> None:
    """:raises ValueError: for a glob over ids that none of the agent's tools has"""
    permission = rule.permission
    if permission == "*" or permission.startswith("mcp:") or not is_glob(permission) or is_capability_glob(permission):
        return
    pattern = text_regex(permission)
    if not any(pattern.match(tool_id) for tool_id in known):
        raise ValueError(f"in the rule {rule.text!r}, {permission!r} matches none of this agent's tools")


def _explained(text: str, agent: AgentManifest, others: Collection[str], problem: str) -> str:
    words = text.split(None, 2)
    permission = words[1] if len(words) > 1 else ""
    if permission in agent.aliases:
        return f"in the rule {text!r}, {permission!r} is an alias; a rule names the tool: {agent.aliases[permission]!r}"
    if permission in others:
        return f"in the rule {text!r}, {permission!r} is not among this agent's tools, so it would never match"
    return problem
