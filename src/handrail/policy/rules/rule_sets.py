"""The rule sets that ship: named lists of rules for one kind of work.

A list of rules selects one by ``@NAME``, as in ``rules = ["@developer", "deny bash git push *"]``. Its rules are ordinary:
they are visible like all others, and a more specific or stricter rule wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.policy.rules.pattern_faults import READ_ONLY_VARIABLE
from handrail.policy.rules.rules_and_modes import (
    CONFINED_RULE_TEXTS,
    EXAMPLE_DENIALS,
    MODE_RULE_TEXTS,
    Rule,
    Scope,
    format_shipped_rules,
    is_permission_tool_id,
    parse_rule,
    parse_shipped_rule,
)

RuleSetName = Literal["developer", "reviewer", "ci"]
PREFIX = "@"
SET_SOURCE = "rule set "
"""The beginning of the source of every rule of a set."""


class RuleSet(NamedTuple):
    """A named list of rules.

    :param description: what the set is for, and what it allows, in sentences for people
    """

    name: RuleSetName
    description: str
    texts: tuple[str, ...]


_LOCAL_GIT = tuple(f"allow git.{verb}" for verb in ("add", "commit", "create_branch", "merge", "stash"))
_SHOWING_GIT = tuple(f"allow bash git {verb} …" for verb in ("diff", "log", "show", "blame", "grep"))
_WRITING = dict.fromkeys(
    text.partition(" ")[2]
    for text in (*MODE_RULE_TEXTS["accept-edits"], *MODE_RULE_TEXTS["auto"])
    if text.startswith("allow ") and text not in CONFINED_RULE_TEXTS and not text.startswith("allow fs.write **/")
)
"""The paths that the rules of a mode let a tool write. A rule that denies it has to be as exact as the one of the mode."""
_SENDING = ("bash git push …", "git.push", "bash npm publish …", "bash cargo publish …")

RULE_SETS: Mapping[RuleSetName, RuleSet] = {
    one.name: one
    for one in (
        RuleSet(
            "developer",
            "For an agent that changes code alongside you. Allows edits in the workspace, local git, and every command that stays confined: "
            "tests, builds, scripts. Asks before the network, before anything is sent, and before anything is destroyed.",
            (
                *MODE_RULE_TEXTS["accept-edits"],
                *CONFINED_RULE_TEXTS,
                *_SHOWING_GIT,
                *_LOCAL_GIT,
            ),
        ),
        RuleSet(
            "reviewer",
            "For an agent that only reads. Allows reading, and git commands that show history. Asks about every other "
            "command. Denies every write.",
            (
                *("deny effect:write", "ask bash", "ask python", f"allow bash {READ_ONLY_VARIABLE}"),
                *_SHOWING_GIT,
                *(f"deny {what}" for what in (*_WRITING, "file.delete **", *_SENDING)),
                *EXAMPLE_DENIALS,
            ),
        ),
        RuleSet(
            "ci",
            "For a run without a user. Allows what developer allows. Has a deny rule for the network and for each command that sends data, so that the log names the rule.",
            (
                *MODE_RULE_TEXTS["accept-edits"],
                *CONFINED_RULE_TEXTS,
                *_SHOWING_GIT,
                *_LOCAL_GIT,
                "deny net.fetch",
                *(f"deny {what}" for what in _SENDING),
            ),
        ),
    )
}
"""The shipped rule sets by name."""


def resolve_rule_set_reference(text: str) -> RuleSet | None:
    """Return the rule set that an entry of a list of rules selects, or None if the entry is a rule.

    :raises ValueError: if no set has this name
    """
    entry = text.strip()
    if not entry.startswith(PREFIX):
        return None
    for name, found in RULE_SETS.items():
        if entry == f"{PREFIX}{name}":
            return found
    near = nearest_names(entry.removeprefix(PREFIX), RULE_SETS, 1)
    hint = f" Did you mean '{PREFIX}{near[0]}'?" if near else ""
    known = ", ".join(f"{PREFIX}{name}" for name in RULE_SETS)
    raise ValueError(f"Unknown rule set: {entry[:80]!r}. Valid sets: {known}.{hint}")


def parse_entry(text: str, *, scope: Scope, source: str = "", known: Iterable[str] | None = None) -> list[Rule]:
    """Parse one entry of a list of rules: a rule, or all rules of the set that it selects.

    :param known: every known tool id and alias; if given, a rule whose permission names none of them is an error
    :raises ValueError: as :func:`~handrail.policy.rules.rules_and_modes.parse_rule`, or if no set has the name
    """
    chosen = resolve_rule_set_reference(text)
    if chosen is None:
        return [parse_rule(text, scope=scope, source=source, known=known)]
    found = (parse_shipped_rule(one, scope, f"{SET_SOURCE}{chosen.name}") for one in chosen.texts)
    return [
        rule
        for rule in found
        if known is None or rule.permission in known or not is_permission_tool_id(rule.permission)
    ]


def format_rule_set(chosen: RuleSet) -> list[str]:
    """Return the rules of a set as lines for people."""
    return format_shipped_rules(chosen.texts)


def list_selected_rule_sets(entries: Iterable[str]) -> list[RuleSetName]:
    """Return the sets that a list of rules selects, each once."""
    found = (resolve_rule_set_reference(entry) for entry in entries)
    return list(dict.fromkeys(one.name for one in found if one is not None))
