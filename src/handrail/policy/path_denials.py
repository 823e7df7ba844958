"""The paths that a session's rules hide from every program in a sandbox, or protect from writing, whichever call started it.

A rule about a command lets a program run. It does not say what the program may read, so the sandbox hides each file that
no tool may read, and write-protects each file that no tool may write. Only rules about ``fs.read`` and ``fs.write``
decide here; a rule about one tool (``allow read .env``) is about that tool.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import lru_cache

from handrail.contract.protected.path_protection import INSTALLED_PACKAGES, is_private_key_path
from handrail.contract.text.glob_patterns import extract_literal_prefix
from handrail.contract.tool.spec import ToolSpec
from handrail.origins.program_lookup import is_inside_folder
from handrail.policy.call_targets import make_path_subject
from handrail.policy.rules.matchers import (
    PathSubject,
    RankedRule,
    RuleRanking,
    compile_ranked_rule,
    rank_rules,
    rule_names_protected_path,
)
from handrail.policy.rules.rules_and_modes import Rule, RuleBook

_MAX_CHECKED = 64
_MAX_QUICK = 250
"""The most names that are checked at once. Each takes about 50 microseconds."""
_MATCH_ALL_PATTERNS = frozenset(("", "*", "**", ".", "./"))


class _HashedKey:
    """A key that is hashed once. All rules are in it, and each program looks things up by it several times."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _HashedKey) and self._hash == other._hash and self._parts == other._parts
        )


class HiddenPathRules:
    """The paths that a rule book hides from programs, or protects from writing.

    Implements :class:`handrail.contract.sandbox_protocol.PathDenials`.

    :ivar key: the rules and the workspace, equal for equal answers
    :ivar read_denials_cache_key: the same for the answers about reading below the workspace
    """

    def __init__(
        self,
        workspace: str,
        reading: tuple[Rule, ...],
        writing: tuple[Rule, ...],
        everything: tuple[Rule, ...],
        above: HiddenPathRules | None = None,
    ) -> None:
        self.key: Hashable = _HashedKey((workspace, reading, writing, everything, None if above is None else above.key))
        # Each session has a rule about its own output folder. Without it, the cached answers about the workspace serve
        # all sessions.
        about_here = tuple(rule for rule in reading if not _only_shows_elsewhere(rule, workspace))
        self.read_denials_cache_key: Hashable = _HashedKey(
            (workspace, about_here, everything, None if above is None else above.read_denials_cache_key)
        )
        self._above = above
        self._workspace = workspace
        self._own = rank_rules(tuple(rule for rule in reading if rule.scope != "default"), "path")
        self._shipped = rank_rules(tuple(rule for rule in reading if rule.scope == "default"), "path")
        self._everything = RuleRanking(everything, "path")
        self._writing = RuleRanking(writing, "path")
        self.has_read_only = any(rule.action == "deny" for rule in writing) or (
            above is not None and above.has_read_only
        )
        self._checked: dict[str, tuple[frozenset[str], str]] = {}
        self._folder_rule: RankedRule | None = None
        """The shipped rule about the session's own folder."""

    def with_folder_rule(self, rule: Rule) -> HiddenPathRules:
        """Return the same denials in a session with this rule about its own folder. Both share what is prepared."""
        other = copy.copy(self)
        other.key = (self.key, rule)
        other._folder_rule = compile_ranked_rule(rule, "path")
        other._checked = {}
        return other

    def is_hidden(self, path: str) -> bool:
        """Return whether programs must not see this path.

        Hidden are private keys, paths that a rule about them denies or asks about, and names that look like secrets and that
        no rule allows.
        """
        subject = self._subject(path)
        if subject.relative is not None and is_private_key_path(subject.relative):
            return True
        # A sub-agent must not see what its parent may not read.
        if self._above is not None and self._above.has_read_restriction(subject):
            return True
        used = self._find_read_rule(subject)
        if used is not None:
            return used.rule.action != "allow"
        # An operator who allows everything also means files with the names of secrets.
        used = self._everything.find_winner(subject)
        if used is not None and used.rule.action == "allow":
            return False
        used = self._shipped.find_winner(subject)
        if used is None or used.rule.action == "allow":
            return False
        folder = self._folder_rule
        # The saved outputs of a session can have any name. The shipped names of secrets must not hide them from their
        # own session.
        if folder is not None and folder.rank > used.rank and folder.matches(subject):
            return False
        # A file of an installed package may have the name of a secret file. It is no secret, and programs need it.
        return INSTALLED_PACKAGES.isdisjoint((subject.relative or subject.absolute).split("/"))

    def find_hidden(self, folder: str, names: frozenset[str]) -> str:
        """Return one of these names of files in a folder that programs must not see; empty if there is none.

        The answer for the last names of a folder is kept, and of further ones only the new names are checked.
        """
        known, hidden = self._checked.get(folder, (frozenset[str](), ""))
        # The set is compared by identity: it is made again only when the index of the repository changes.
        if known is not names:
            if hidden not in names:
                new = names - known
                hidden = min((name for name in new if self.is_hidden(f"{folder}/{name}")), default="")
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[folder] = names, hidden
        return hidden

    def is_hidden_path_search_cheap(self, folder: str, names: frozenset[str]) -> bool:
        """Return whether :meth:`find_hidden` has the answer, or has only a few names to check."""
        known, hidden = self._checked.get(folder, (frozenset[str](), ""))
        if known is names or hidden in names:
            return True
        return len(names) - len(known) <= _MAX_QUICK and len(names - known) <= _MAX_QUICK

    def has_read_restriction(self, subject: PathSubject) -> bool:
        """Return whether a rule of this book, or of a parent's, denies or asks about reading this path."""
        used = self._find_read_rule(subject)
        if used is not None and used.rule.action != "allow":
            return True
        return self._above is not None and self._above.has_read_restriction(subject)

    def _find_read_rule(self, subject: PathSubject) -> RankedRule | None:
        used = self._own.find_winner(subject)
        if used is not None and used.rule.action == "ask" and used.rule.pattern in _MATCH_ALL_PATTERNS:
            return None  # a rule that asks about all reading is about tools; otherwise a program would see nothing
        return used

    def is_read_only(self, path: str) -> bool:
        """Return whether a rule denies writing this path."""
        if not self.has_read_only:
            return False
        if self._above is not None and self._above.is_read_only(path):
            return True
        used = self._writing.find_winner(self._subject(path))
        return used is not None and used.rule.action == "deny"

    def is_protected_write_allowed(self, path: str) -> bool:
        """Return whether a rule names and allows writing this protected path, and no parent's rule restricts it."""
        subject = self._subject(path)
        used = self._writing.find_winner(subject)
        if used is None or not rule_names_protected_path(used.rule, subject):
            return False
        return self._above is None or not self._above.has_write_restriction(subject)

    def has_write_restriction(self, subject: PathSubject) -> bool:
        """Return whether a rule of this book, or of a parent's, denies or asks about writing this path."""
        used = self._writing.find_winner(subject)
        if used is not None and used.rule.action != "allow":
            return True
        return self._above is not None and self._above.has_write_restriction(subject)

    def _subject(self, path: str) -> PathSubject:
        return make_path_subject(path, self._workspace)


def build_hidden_path_rules(rules: RuleBook, workspace: str) -> HiddenPathRules:
    """Return what these rules hide from programs.

    :returns: the same object for books with the same rules about paths
    """
    shared = rules.shared
    denials = shared.prepare(("path denials", workspace), lambda: _make_path_denials(shared, workspace))
    if (rule := rules.folder_rule) is None:
        return denials
    return rules.prepare(("path denials", workspace), lambda: denials.with_folder_rule(rule))


def _make_path_denials(rules: RuleBook, workspace: str) -> HiddenPathRules:
    reading, writing = rules.list_rules_about_capability("fs.read"), rules.list_rules_about_capability("fs.write")
    everything = tuple(rule for rule in rules if rule.permission == "*" and rule.is_unconditional)
    above = None if rules.parent is None else build_hidden_path_rules(rules.parent.inheritable_rule_book, workspace)
    return _cached_hidden_paths(workspace, reading, writing, everything, above)


@lru_cache(maxsize=64)
def _cached_hidden_paths(
    workspace: str,
    reading: tuple[Rule, ...],
    writing: tuple[Rule, ...],
    everything: tuple[Rule, ...],
    above: HiddenPathRules | None,
) -> HiddenPathRules:
    return HiddenPathRules(workspace, reading, writing, everything, above)


def list_implied_deletion_rules(book: RuleBook, spec: ToolSpec, counted: Iterable[Rule]) -> list[Rule]:
    """Return the rules about ``file.delete`` for the files that a call of another tool deletes.

    :param counted: rules that already answer for the call
    """
    found = book.list_rules_about_tool(replace(spec, id="file.delete"), None)
    others = frozenset(counted)
    return [rule for rule in found if rule not in others]


def _only_shows_elsewhere(rule: Rule, workspace: str) -> bool:
    """Return whether a rule is a shipped one that allows reading a folder outside the workspace, as for outputs."""
    folder = extract_literal_prefix(rule.pattern)
    is_shipped = rule.scope == "default" and rule.action == "allow"
    return is_shipped and folder.startswith("/") and not is_inside_folder(folder, workspace)


class HiddenPathRulesCache:
    """The last result of :func:`build_hidden_path_rules`, made again when the rule book is another one."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace
        self._last: tuple[RuleBook, HiddenPathRules] | None = None

    def get_hidden_path_rules(self, rules: RuleBook) -> HiddenPathRules:
        """Return what these rules hide."""
        if self._last is None or self._last[0] is not rules:
            self._last = (rules, build_hidden_path_rules(rules, self._workspace))
        return self._last[1]
