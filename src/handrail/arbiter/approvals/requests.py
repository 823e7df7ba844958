"""An approval request's content: the answers it offers, how long it stays open, and its wording."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handrail.contract.approvals import CHOICES, Approval, ApprovalAnswer, ApprovalRequest, Choice
from handrail.contract.errors import ToolError
from handrail.contract.generation import Entry
from handrail.policy import suggestions
from handrail.policy.authority import Authority, Verdict
from handrail.policy.rules.rules import Rule, RuleBook, Scope, parse_rule
from handrail.policy.targets import PathRoots
from handrail.record.log import Record

HOUR_NS = 3_600_000_000_000
ID_CHARACTERS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's alphabet: no letter that is taken for a digit or for another one."""


WITHOUT_A_RULE: dict[Choice, Choice] = {
    "session": "once",
    "project": "once",
    "session-wider": "once",
    "project-wider": "once",
    "reject-always": "reject",
}
"""What an attendant's answer is worth where no rule was offered: never more than it said."""
_STORED: dict[Choice, tuple[str, Scope]] = {
    "session": (suggestions.SOURCE, "session"),
    "project": (suggestions.PROJECT, "project"),
    "session-wider": (suggestions.SOURCE, "session"),
    "project-wider": (suggestions.PROJECT, "project"),
    "reject-always": (suggestions.NEVER, "project"),
}


_FOR_A_SESSION: frozenset[Choice] = frozenset({"session", "session-wider"})


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """For how long a request can be answered, and for how long a yes that was not used holds."""

    request_ns: int = 7 * 24 * HOUR_NS
    grant_ns: int = 24 * HOUR_NS


def new_id(prefix: str) -> str:
    """Short enough to type: 40 random bits."""
    return f"{prefix}_{''.join(secrets.choice(ID_CHARACTERS) for _ in range(8))}"


def check_choice(row: Approval, answer: ApprovalAnswer) -> None:
    """:raises ToolError: ``invalid_input`` for an answer that this request does not offer"""
    choice, request, problem = answer.choice, row.request, ""
    if choice not in CHOICES:
        problem = f"is answered with one of {', '.join(CHOICES)}, not {str(choice)[:40]!r}"
    elif row.kind == "question" and choice not in ("reject", "stop"):
        problem = "asks a question: give its answers, or reject"
    elif choice in _FOR_A_SESSION and request.shared:
        problem = (
            "is of a session that several clients share, where one's yes is not the others': answer once or project"
        )
    elif choice in ("session", "project") and request.always is None:
        problem = "has no rule that would allow just this call; answer once or reject"
    elif choice in ("session-wider", "project-wider") and request.wider is None:
        problem = f"has no wider rule that is known to be safe; answer {choice.removesuffix('-wider')} or once"
    elif choice == "reject-always" and request.never is None:
        problem = "has no rule that would deny just this call; answer reject"
    elif answer.arguments is not None and choice != "once":
        problem = "takes other arguments with the answer once only: a stored rule is about those that were shown"
    if problem:
        raise ToolError(f"{row.id} {problem}", kind="invalid_input")


def responded(row: Approval, body: dict[str, Any]) -> Record:
    request = row.request
    return Record("approval-responded", request.session_id, request.call_id, {"approval": row.id, **body})


def why_not_open(row: Approval, lifetimes: Lifetimes) -> str:
    """Why a request cannot be answered any more."""
    if row.pending or row.state == "expired":
        return f"{row.id} has expired: nobody answered within {_lasting(lifetimes.request_ns)}"
    if row.state == "withdrawn":
        return f"{row.id} is no longer asked: its call was stopped or refused, or its session closed"
    said = row.choice or row.state
    return f"{row.id} was answered before, with {said!r} at the door {row.decided_by!r}; that answer stays"


def why_not_usable(approval_id: str, row: Approval | None, lifetimes: Lifetimes) -> str:
    """Why a grant cannot be used any more."""
    if row is not None and row.state == "approved":
        lasting = _lasting(lifetimes.grant_ns)
        return f"the approval {approval_id} was not used within {lasting} and has expired; nothing was run"
    state = "gone" if row is None else row.state
    return f"the approval {approval_id} cannot be used: it is {state}; it holds for one run. Nothing was run"


def _lasting(lifetime_ns: int) -> str:
    hours = lifetime_ns / HOUR_NS
    return f"{hours / 24:g} days" if hours >= 48 else f"{hours:g} hours"


def rule_of(row: Approval) -> Rule | None:
    """The rule that an answer stored, as it holds from then on."""
    text = None if row.choice is None else rule_offered(row.request, row.choice)
    if text is None or row.choice is None:
        return None
    source, scope = _STORED[row.choice]
    return parse_rule(text, scope=scope, source=source)


def rule_offered(request: ApprovalRequest, choice: Choice) -> str | None:
    """The rule that this answer would store, as it was shown."""
    if choice in _FOR_A_SESSION and request.shared:
        return None
    if choice in ("session", "project"):
        return request.always
    if choice in ("session-wider", "project-wider"):
        return request.wider
    return request.never if choice == "reject-always" else None


def check_changed(
    entry: Entry, given: Mapping[str, Any], authority: Authority, rules: RuleBook, roots: PathRoots
) -> Verdict:
    """Judge arguments that a person gives instead of those proposed.

    :raises ToolError: ``invalid_input`` where the tool does not take them, ``denied`` where a rule denies them
    """
    arguments = entry.admitted(dict(given))
    origin, behind = entry.tool.origin, entry.behind
    verdict = authority.judge(entry.spec, arguments, rules=rules, roots=roots, origin=origin, behind=behind)
    if verdict.action == "deny":
        raise ToolError(verdict.reason, kind="denied")
    return verdict
