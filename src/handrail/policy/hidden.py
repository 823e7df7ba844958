"""What a session's rules keep from every program in a sandbox, whichever call started it.

A rule about a command says that a program may run, not what it may read: what nobody may read is not there for it,
and what nobody may write cannot be written. Decided by the rules about ``fs.read`` and ``fs.write`` alone; a rule about
one tool (``allow read .env``) is about that tool.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

from handrail.contract.protected.protected import INSTALLED, is_key
from handrail.contract.text.patterns import text_regex
from handrail.contract.tool.requires import Capability
from handrail.policy.rules.matching import PathSubject, Ranked, Ranking, names_path, ranking
from handrail.policy.rules.rules import Rule, RuleBook, is_capability_glob

_ALL = frozenset(("", "*", "**", ".", "./"))


class Hidden:
    """Implements :class:`handrail.contract.sandbox.Denials` for the rules about paths of one book.

    :ivar key: the rules and the workspace, equal for equal answers
    """

    def __init__(
        self,
        workspace: str,
        reading: tuple[Rule, ...],
        writing: tuple[Rule, ...],
        everything: tuple[Rule, ...],
        above: Hidden | None = None,
    ) -> None:
        self.key: Hashable = (workspace, reading, writing, everything, None if above is None else above.key)
        self._above = above
        self._workspace = workspace
        self._inner = workspace.rstrip("/") + "/"
        self._own = ranking(tuple(rule for rule in reading if rule.scope != "default"), "path")
        self._shipped = ranking(tuple(rule for rule in reading if rule.scope == "default"), "path")
        self._everything = Ranking(everything, "path")
        self._writing = Ranking(writing, "path")
        self.fixes_any = any(rule.action == "deny" for rule in writing) or (above is not None and above.fixes_any)

    def hides(self, path: str) -> bool:
        """A key; what a rule denies or asks about by its name; what looks like a secret, and no rule allows it."""
        subject = self._subject(path)
        if subject.relative is not None and is_key(subject.relative):
            return True
        if self._above is not None and self._above.speaks_against(subject):
            return True
        used = self._spoken(subject)
        if used is not None:
            return used.rule.action != "allow"
        used = self._everything.winner(subject)
        if used is not None and used.rule.action == "allow":
            return False
        used = self._shipped.winner(subject)
        if used is None or used.rule.action == "allow":
            return False
        # What looks like a secret in an installed package is none, and programs need it.
        return INSTALLED.isdisjoint((subject.relative or subject.absolute).split("/"))

    def speaks_against(self, subject: PathSubject) -> bool:
        """Whether one of its rules, or of those above, denies reading a path or asks about it by its name."""
        used = self._spoken(subject)
        if used is not None and used.rule.action != "allow":
            return True
        return self._above is not None and self._above.speaks_against(subject)

    def _spoken(self, subject: PathSubject) -> Ranked | None:
        used = self._own.winner(subject)
        if used is not None and used.rule.action == "ask" and used.rule.pattern in _ALL:
            return None  # asking about all reading is about tools that read; a program would see nothing at all
        return used

    def fixes(self, path: str) -> bool:
        """What a rule denies writing."""
        if not self.fixes_any:
            return False
        if self._above is not None and self._above.fixes(path):
            return True
        used = self._writing.winner(self._subject(path))
        return used is not None and used.rule.action == "deny"

    def opens(self, path: str) -> bool:
        """A protected path that a rule of ``fs.write`` names and allows, and that no session above speaks against."""
        subject = self._subject(path)
        used = self._writing.winner(subject)
        if used is None or not names_path(used.rule, subject):
            return False
        return self._above is None or not self._above.speaks_against_writing(subject)

    def speaks_against_writing(self, subject: PathSubject) -> bool:
        """Whether one of its rules, or of those above, denies writing a path or asks about it."""
        used = self._writing.winner(subject)
        if used is not None and used.rule.action != "allow":
            return True
        return self._above is not None and self._above.speaks_against_writing(subject)

    def _subject(self, path: str) -> PathSubject:
        if path.startswith(self._inner):
            return PathSubject(path, path[len(self._inner) :])
        return PathSubject(path, "." if path == self._workspace else None)


def hidden(rules: RuleBook, workspace: str) -> Hidden:
    """What these rules keep from programs; the same object for books that say the same of paths."""
    reading = tuple(rule for rule in rules if _is_about(rule, "fs.read"))
    writing = tuple(rule for rule in rules if _is_about(rule, "fs.write"))
    everything = tuple(rule for rule in rules if rule.permission == "*" and rule.unconditional)
    above = None if rules.above is None else hidden(rules.above.binding, workspace)
    return _made(workspace, reading, writing, everything, above)


@lru_cache(maxsize=64)
def _made(
    workspace: str,
    reading: tuple[Rule, ...],
    writing: tuple[Rule, ...],
    everything: tuple[Rule, ...],
    above: Hidden | None,
) -> Hidden:
    return Hidden(workspace, reading, writing, everything, above)


def _is_about(rule: Rule, capability: Capability) -> bool:
    if is_capability_glob(rule.permission):
        return text_regex(rule.permission).match(capability) is not None
    return rule.permission == capability


class HiddenNow:
    """:func:`hidden` of a book that may be replaced by another at any time, made once for each."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace
        self._last: tuple[RuleBook, Hidden] | None = None

    def of(self, rules: RuleBook) -> Hidden:
        if self._last is None or self._last[0] is not rules:
            self._last = (rules, hidden(rules, self._workspace))
        return self._last[1]
