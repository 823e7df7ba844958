"""Rules that are given to a session while it is open: parsed, and checked for any that can match nothing."""

from __future__ import annotations

from collections.abc import Iterable

from handrail.contract.generation import Generation
from handrail.policy.rules.checking import check_loaded, specs_of
from handrail.policy.rules.rules import Rule, parse_rule

GIVEN = "session"
"""The source of the rules that a program gives a session, when it opens it and later."""


def rules_of(texts: Iterable[str]) -> list[Rule]:
    """Rules of the session scope.

    :raises ValueError: for a text that is no rule
    """
    return [parse_rule(text, scope="session", source=GIVEN) for text in texts]


def check_reach(rules: Iterable[Rule], tools: Generation) -> None:
    """:raises ValueError: for a rule that can match no call of these tools"""
    known, specs = {*tools.entries, *tools.beyond}, specs_of(tools.entries)
    for rule in rules:
        parse_rule(rule.text, scope="session", known=known)
        check_loaded(rule, (), (), specs)
