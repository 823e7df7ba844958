"""The shipped rules, visible like any other: they answer only where no other rule matches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from handrail.contract.text.patterns import escape
from handrail.contract.tool.names import OFFER_IDS, SESSION_INTERNAL
from handrail.policy.rules.rules import Rule, RuleBook
from handrail.policy.secret_names import EXCEPT, ROWS

SOURCE = "shipped with Handrail"

SECRET_LIKE: tuple[str, ...] = tuple(dict.fromkeys(name for row in ROWS for name in row.names.split()))
"""Files that tend to hold secrets; asked about, at any depth and in any letter case, unless a rule speaks of them."""


def default_rules(readable: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The shipped rules.

    :param readable: absolute folders outside the workspace that the session may read, such as its saved outputs
    """
    texts = [f"allow {permission}" for permission in (*SESSION_INTERNAL, *OFFER_IDS)]
    names: list[str] = []
    texts += [f"ask {tool} channel=shared/*" for tool in ("send_message", "wait_channel")]  # other sessions' too
    texts.append("allow terminal.send id=* keys=ctrl-c")  # to interrupt is to stop
    for root in ("", *(escape(folder.rstrip("/")) + "/" for folder in readable)):
        texts.append(f"allow fs.read {root.rstrip('/') or '**'}")  # the folder itself and all in it
        names += [f"ask fs.read {root}**/{name}" for name in SECRET_LIKE]
        names += [f"allow fs.read {root}**/{name}" for name in EXCEPT]
    # Written as rules rather than read from text: a folder's name may hold what a text cannot.
    return (*map(_rule, texts), *(replace(_rule(text), any_case=True) for text in names))


def reading(folder: str) -> Rule:
    """The shipped permission to read in an absolute ``folder`` outside the workspace, such as a session's outputs."""
    return _rule(f"allow fs.read {escape(folder.rstrip('/'))}/**")


def reading_as_in_workspace(folder: str) -> list[Rule]:
    """The shipped rules for reading, of an absolute ``folder`` outside the workspace alone."""
    own = escape(folder.rstrip("/"))
    rules = (rule for rule in default_rules((folder,)) if rule.permission == "fs.read")
    return [rule for rule in rules if rule.pattern == own or rule.pattern.startswith(f"{own}/")]


def default_book(readable: Iterable[str] = ()) -> RuleBook:
    """A book that holds the shipped rules only."""
    return RuleBook(default_rules(readable))


def _rule(text: str) -> Rule:
    action, permission, pattern = (*text.split(" ", 2), "")[:3]
    return Rule("allow" if action == "allow" else "ask", permission, pattern, "default", SOURCE)
