"""A rule, the text it is written as, and the book of all rules that hold for a session.

``ACTION PERMISSION [PATTERN]``, as in ``allow bash git status`` or ``deny fs.write secrets/**``. The permission is
a tool's id, a glob over ids, ``mcp:server:tool``, a capability, or ``*``. What a pattern is compared with depends
on what the call is about (see :mod:`handrail.policy.rules.matching`); without a pattern a rule is about every call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from handrail.contract.text.hosts import fault_in_host
from handrail.contract.text.patterns import WILDCARDS, fault_in_pattern
from handrail.contract.tool.names import ID_PATTERN, nearest
from handrail.contract.tool.requires import CAPABILITIES
from handrail.policy.rules.words import WordFault, bare_words, pattern_words

Action = Literal["allow", "ask", "deny"]
Scope = Literal["default", "manifest", "mode", "project", "session"]

ACTIONS: tuple[Action, ...] = get_args(Action)
STRICTNESS: dict[Action, int] = {"allow": 0, "ask": 1, "deny": 2}
FINAL_SCOPES: frozenset[Scope] = frozenset({"manifest", "mode"})
"""A deny of these is never outweighed by a more specific rule."""

EFFECT = "effect:"
READ_ONLY = "{read-only}"
"""The one variable of command patterns: every command that :mod:`handrail.policy.shell.read_only` proves to change nothing."""

WORKSPACE_VARIABLE = "{workspace}"
_VARIABLE = re.compile(r"(?<!\[)\{([^{}/\s]*)\}")
_OPERATOR = re.compile(r"&&|\|\|?|;|&|[0-9]*(?:>>?|>\||<|<<|<<<|>&|<&)\S*|&>>?\S*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_EFFECTS = ("effect:read", "effect:write", "effect:external")
_FAMILIES = frozenset(name.partition(".")[0] for name in CAPABILITIES)
_PERMISSION_CHARACTERS = re.compile(r"[A-Za-z0-9_.:*?\[\]!/-]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of policy.

    :param pattern: ``""`` when the rule is about every call of its permission
    :param source: where an operator finds it: a file, ``--rule``, "answered for this session"
    :param narrows: it comes from content that nobody trusted, so where it asks it never stands in for a deny
    :param any_case: its pattern of paths is compared without the case of ASCII letters
    """

    action: Action
    permission: str
    pattern: str = ""
    scope: Scope = "session"
    source: str = ""
    narrows: bool = False
    any_case: bool = False

    @property
    def text(self) -> str:
        """What :func:`parse_rule` reads back as the same rule, compared by letter case."""
        bare = f"{self.action} {self.permission}"
        return f"{bare} {self.pattern}" if self.pattern else bare

    @property
    def final(self) -> bool:
        return self.action == "deny" and self.scope in FINAL_SCOPES

    @property
    def effect(self) -> str:
        """The side effect that it is about, for a permission like ``effect:write``; else ``""``."""
        return self.permission[len(EFFECT) :] if self.permission.startswith(EFFECT) else ""

    @property
    def unconditional(self) -> bool:
        """Whether it is about every call of its permission, whatever the arguments."""
        return not self.pattern

    def __str__(self) -> str:
        where = f"{self.scope} scope, {self.source}" if self.source else f"{self.scope} scope"
        return f"{self.text!r} ({where})"


def parse_rule(text: str, *, scope: Scope, source: str = "", known: Iterable[str] | None = None) -> Rule:
    """Read ``ACTION PERMISSION [PATTERN]``.

    :param known: every tool id and alias there is; where given, a permission that names none of them is a fault
    :raises ValueError: naming the faulty word, what was expected, and the nearest word that would do
    """
    parts = text.strip(" \t").split(None, 2)
    if len(parts) < 2:
        raise ValueError(f"{text!r} is no rule; write ACTION PERMISSION [PATTERN], as in 'allow bash git status'")
    action, permission = parts[0], parts[1]
    pattern = parts[2] if len(parts) == 3 else ""
    if action not in ACTIONS:
        near = nearest(action.lower(), ACTIONS, 1)
        raise ValueError(
            f"{text!r} begins with {action!r}; a rule begins with allow, ask or deny"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if problem := _fault_in_permission(permission, known):
        raise ValueError(f"in the rule {text!r}, {problem}")
    if problem := _fault_in_pattern(permission, pattern):
        raise ValueError(f"in the rule {text!r}, {problem}")
    return Rule(action, permission, pattern, scope, source)


def is_glob(permission: str) -> bool:
    return not WILDCARDS.isdisjoint(permission)


def is_capability_glob(permission: str) -> bool:
    """Whether a glob is about capabilities too: it must name their family in full (``fs.*``, never ``f*``)."""
    head, dot, rest = permission.partition(".")
    return bool(dot) and head in _FAMILIES and is_glob(rest)


def _fault_in_permission(permission: str, known: Iterable[str] | None) -> str | None:
    if not _PERMISSION_CHARACTERS.fullmatch(permission):
        return (
            f"{permission!r} is no permission; it is a tool's id, a glob over ids, mcp:SERVER:TOOL, a capability or '*'"
        )
    if problem := fault_in_pattern(permission):
        return problem
    if "/" in permission and not permission.startswith("mcp:"):
        return f"{permission!r} is no tool's id; a '/' is only in mcp:SERVER:resources/read and the like"
    if permission.startswith("mcp:"):
        parts = permission.split(":")
        return None if len(parts) == 3 and all(parts) else f"{permission!r} is not of the form mcp:SERVER:TOOL"
    if permission.startswith(EFFECT):
        if permission in _EFFECTS:
            return None
        near = nearest(permission, _EFFECTS, 1)
        return f"{permission!r} is no side effect; there are {', '.join(_EFFECTS)}" + (
            f"; did you mean {near[0]!r}?" if near else ""
        )
    if permission in CAPABILITIES or is_glob(permission):
        return None
    if not ID_PATTERN.match(permission):
        return f"{permission!r} is no tool's id: letters, digits, '_', '-', in parts joined by '.'"
    names = list(known) if known is not None else []
    if permission in names:
        return None
    if known is None and permission.partition(".")[0] not in _FAMILIES:
        return None
    near = nearest(permission, (*CAPABILITIES, *names), 1)
    what = "a capability" if known is None else "a tool or a capability"
    return f"{permission!r} is not {what}" + (
        f"; did you mean {near[0]!r}?" if near else f"; capabilities are {', '.join(CAPABILITIES)}"
    )


def _fault_in_pattern(permission: str, pattern: str) -> str | None:
    if "\0" in pattern:
        return "the pattern has a NUL character in it"
    if not pattern:
        return None
    if permission.startswith(EFFECT):
        return f"a side effect takes no pattern, and {pattern!r} is one"
    if permission == "net.fetch":
        return fault_in_host(pattern)
    if permission in ("bash", "shell.run"):
        return fault_in_command(pattern)
    if permission in ("fs.read", "fs.write", "fs.*"):
        return fault_in_path(pattern)
    return None


@lru_cache(maxsize=4096)
def fault_in_command(pattern: str) -> str | None:
    """Why a command pattern can match no command, or None."""
    try:
        words = pattern_words(pattern)
        plain = bare_words(pattern)
    except WordFault as fault:
        return str(fault)
    if _VARIABLE.fullmatch(pattern) and pattern != READ_ONLY:
        return f"{pattern!r} is no variable of command patterns; there is {READ_ONLY}, for commands proved to change nothing"
    if operator := next((word for word in plain if _OPERATOR.fullmatch(word)), None):
        return (
            f"the pattern {pattern!r} has {operator!r} in it, and a rule is about one simple command; write one rule for "
            f"each, and rules of fs.read and fs.write for redirections (or quote it, where the character itself is meant)"
        )
    if words[0] == "":
        return f"the pattern {pattern!r} begins with an empty word, which is no program"
    return next((problem for word in words if (problem := fault_in_pattern(word))), None)


def fault_in_path(pattern: str) -> str | None:
    """Why a path pattern can match no path, or None."""
    if ".." in pattern.split("/"):
        return f"the path pattern {pattern!r} climbs with '..'; paths are compared after resolving, so it never matches"
    if _URL.match(pattern):
        return f"the path pattern {pattern!r} is a URL; paths are relative to the workspace, or begin with '/'"
    for match in _VARIABLE.finditer(pattern):
        if match.group() != WORKSPACE_VARIABLE:
            near = nearest(match.group(1), ("workspace",), 1)
            hint = f"; did you mean {WORKSPACE_VARIABLE!r}?" if near else f"; there is {WORKSPACE_VARIABLE}"
            return f"unknown variable {match.group()} in the path pattern {pattern!r}{hint} (a brace itself is written [{{])"
        if match.start() or pattern[match.end() : match.end() + 1] not in ("", "/"):
            return f"in {pattern!r} a variable is only part of a name; it stands first, alone or before a '/'"
    if pattern[:2] == "~/" or pattern == "~":
        return f"the path pattern {pattern!r} begins with '~', which nothing expands; write the folder itself"
    return fault_in_pattern(pattern)


@dataclass(frozen=True, slots=True, eq=False)
class RuleBook:
    """All rules of a session, as one value: adding rules makes another book. Order does not matter, specificity does.

    :param mode: the mode whose rules are among them (:mod:`handrail.policy.rules.modes`)
    :param above: of a sub-agent's session, the book of the session that handed the work over. Each question is put to both,
        and what a rule of that one denies or asks about no rule of this one opens, however specific
    """

    rules: tuple[Rule, ...] = ()
    mode: str = "ask"
    above: RuleBook | None = None

    def with_rules(self, *rules: Rule) -> RuleBook:
        return self.of(*self.rules, *(rule for rule in rules if rule not in self.rules))

    def of(self, *rules: Rule) -> RuleBook:
        """The same with these instead of its own."""
        return RuleBook(rules, self.mode, self.above)

    @property
    def binding(self) -> RuleBook:
        """What of it holds in the sessions below: not what ships, which every book has itself, nor what its mode asks
        about, since theirs is no wider and a narrower one asks less."""
        kept = (rule for rule in self.rules if rule.scope not in ("default", "mode") or _is_held_below(rule))
        return RuleBook(tuple(kept), self.mode, self.above)

    @property
    def chain(self) -> Iterator[Rule]:
        """Its rules, and those of the sessions above that hold in it."""
        yield from self.rules
        if self.above is not None:
            yield from self.above.binding.chain

    def of_scope(self, scope: Scope) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.scope == scope)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)


def _is_held_below(rule: Rule) -> bool:
    return rule.scope == "mode" and rule.action != "ask"
