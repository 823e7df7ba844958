"""Matching of rule patterns with an argv, a path, a host, or the arguments by name.

Paths that look the same are one path for a rule: how an accent is encoded, and which space is used, does not matter.
A :class:`RuleRanking` has the rules that can matter to one question, most specific first, and finds the first that matches a
subject. One regular expression tries all path patterns at once. Other patterns are tried one by one.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

from handrail.contract.protected.path_protection import find_path_protection, normalise_file_name
from handrail.contract.services.resource_services import SOURCE_PREFIX
from handrail.contract.struct import Struct
from handrail.contract.text.glob_patterns import (
    WILDCARDS,
    build_any_path_glob_expression,
    compile_text_glob,
    count_pattern_characters,
    escape_glob_literal,
    extract_literal_prefix,
    find_glob_pattern_fault,
    has_wildcard,
    matches_path_glob,
)
from handrail.contract.text.host_names import HostPattern, parse_host_address, parse_host_pattern, rule_matches_host
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import normalise_unicode_spelling, unescape_displayed_path
from handrail.contract.tool.requires import Capability
from handrail.policy.rules.pattern_faults import CONFINED_VARIABLE, READ_ONLY_VARIABLE, WORKSPACE_VARIABLE
from handrail.policy.rules.pattern_lexer import (
    ANY_ARGUMENTS,
    ArgvPattern,
    PatternSyntaxError,
    split_pattern,
    strip_standard_program_folder,
)
from handrail.policy.rules.rules_and_modes import (
    STRICTNESS,
    Rule,
    RuleBook,
    is_glob,
)
from handrail.policy.shell import read_only_proof

SubjectKind = Literal["command", "path", "host", "arguments"]

SUBJECT_KINDS: Mapping[Capability, SubjectKind] = {
    "fs.read": "path",
    "fs.write": "path",
    "net.fetch": "host",
    "shell.run": "command",
}
"""The kind of subject that patterns about a capability are compared with."""

_LITERAL_RANK = 1_000_000
"""The rank of a command pattern without wildcards: it matches one whole command, so it outranks every glob."""
_ARGV_CACHE = 256


class PathSubject(NamedTuple):
    """A canonical path. ``relative`` is relative to the workspace, and None outside it.

    :param exact_names: if folders on its way fold names: how many names from the beginning are compared exactly; else None
    """

    absolute: str
    relative: str | None
    exact_names: int | None = None


RuleSubject = Sequence[str] | PathSubject | str | Mapping[str, Any]


class RankedRule(Struct, frozen=True):
    """A rule with its rank in the order of precedence.

    The rank consists of: final deny, class of permission, literal characters before the first wildcard, length, strictness.
    """

    rule: Rule
    rank: tuple[int, int, int, int, int]
    matches: Callable[[Any], bool]
    argv: ArgvPattern | None = None


class RuleRanking:
    """The rules of one question about one kind of subject, most specific first."""

    __slots__ = ("_beneath", "_by_program", "_hosts", "_inside", "_outside", "kind", "ranked")

    def __init__(self, rules: Iterable[Rule], kind: SubjectKind) -> None:
        rules = tuple(rules)
        self.kind: SubjectKind = kind
        self._beneath: RuleRanking | None = None
        """The ranking without the ask rules of an untrusted workspace file; None when there are none."""
        # An untrusted file may only make things stricter. Its ask must not win over a deny of the operator that it
        # outranks.
        if any(_only_asks(rule) for rule in rules):
            self._beneath = RuleRanking([rule for rule in rules if not _only_asks(rule)], kind)
        self.ranked = sorted((compile_ranked_rule(rule, kind) for rule in rules), key=lambda r: r.rank, reverse=True)
        self._by_program: dict[str, list[RankedRule]] = {}
        self._inside: _RankedPathRules | None = None
        self._outside: _RankedPathRules | None = None
        self._hosts = _RankedHostRules(self.ranked) if kind == "host" else None

    @property
    def has_one_answer(self) -> bool:
        """Whether every subject gets the same answer."""
        if not self.ranked or not self.ranked[0].rule.is_unconditional:
            return not self.ranked
        return self._beneath is None or not _only_asks(self.ranked[0].rule) or self._beneath.has_one_answer

    def find_winner(self, subject: RuleSubject) -> RankedRule | None:
        """Return the most specific rule that matches, or None.

        If that rule is an untrusted ask, a deny that it would hide wins instead.
        """
        if not self.ranked:
            return None
        if self.kind == "path" and type(subject) is PathSubject:  # nearly every call about files
            table, relative = self._inside, subject.relative
            if table is None or relative is None or subject.exact_names is not None:
                found = self._find_winning_path_rule(subject)
            else:
                found = table.find_winner(relative, subject.absolute)
        else:
            found = self._most_specific(subject)
        if self._beneath is not None and found is not None and _only_asks(found.rule):
            beneath = self._beneath.find_winner(subject)
            return beneath if beneath is not None and beneath.rule.action == "deny" else found
        return found

    def find_unconditional(self) -> RankedRule | None:
        """Return the winner among the rules that match every call, or None."""
        found = next((ranked for ranked in self.ranked if ranked.rule.is_unconditional), None)
        if self._beneath is not None and found is not None and _only_asks(found.rule):
            beneath = self._beneath.find_unconditional()
            return beneath if beneath is not None and beneath.rule.action == "deny" else found
        return found

    def _most_specific(self, subject: RuleSubject) -> RankedRule | None:
        if self.kind == "path":
            return self._find_winning_path_rule(cast("PathSubject", subject))
        if self._hosts is not None:
            return self._hosts.find_winner(cast("str", subject))
        candidates = self._rules_for_program(cast("Sequence[str]", subject)) if self.kind == "command" else self.ranked
        for candidate in candidates:
            if candidate.matches(subject):
                return candidate
        return None

    def _find_winning_path_rule(self, path: PathSubject) -> RankedRule | None:
        # The indexes compare exact names. A folder that ignores letter case needs the slow comparison.
        if path.exact_names is not None:
            return next((candidate for candidate in self.ranked if candidate.matches(path)), None)
        if path.relative is None:
            if self._outside is None:
                self._outside = _RankedPathRules(self.ranked, inside=False)
            return self._outside.find_winner(path.absolute, path.absolute)
        if self._inside is None:
            self._inside = _RankedPathRules(self.ranked, inside=True)
        return self._inside.find_winner(path.relative, path.absolute)

    def _rules_for_program(self, argv: Sequence[str]) -> list[RankedRule]:
        program = argv[0] if argv else ""
        found = self._by_program.get(program)
        if found is None:
            names = (None, program, strip_standard_program_folder(program))
            found = [r for r in self.ranked if r.argv is None or r.argv.program in names]
            # The names of programs come from a model, so their number has no natural limit.
            if len(self._by_program) >= _ARGV_CACHE:
                self._by_program.clear()
            self._by_program[program] = found
        return found


class SubagentRuleRanking(RuleRanking):
    """The rules of one question in a sub-agent's session: its own, and those of its parent session.

    The stricter answer of the two wins, however specific the other rule is. It is a separate class, so that other sessions have
    no extra cost.
    """

    __slots__ = ("_above", "_own")

    def __init__(self, own: RuleRanking, above: RuleRanking) -> None:
        self.kind = own.kind
        self.ranked = [*own.ranked, *above.ranked]
        self._own = own
        self._above = above

    @property
    def has_one_answer(self) -> bool:
        return self._own.has_one_answer and self._above.has_one_answer

    def find_winner(self, subject: RuleSubject) -> RankedRule | None:
        return _pick_stricter_parent_rule(self._own.find_winner(subject), self._above.find_winner(subject))

    def find_unconditional(self) -> RankedRule | None:
        return _pick_stricter_parent_rule(self._own.find_unconditional(), self._above.find_unconditional())


def _pick_stricter_parent_rule(own: RankedRule | None, above: RankedRule | None) -> RankedRule | None:
    """Return the parent's rule if it is stricter than the own one. A parent's allow never counts."""
    strictness = 0 if own is None else STRICTNESS[own.rule.action]
    return above if above is not None and STRICTNESS[above.rule.action] > strictness else own


@lru_cache(maxsize=128)
def rank_rules(rules: tuple[Rule, ...], kind: SubjectKind) -> RuleRanking:
    """Return the ranking of these rules, cached for all tools that they apply to."""
    return RuleRanking(rules, kind)


def rank_rule_book(book: RuleBook, pick: Callable[[RuleBook], Iterable[Rule]], kind: SubjectKind) -> RuleRanking:
    """Return the ranking of one question's rules in a book, bounded by the books of the parent sessions.

    :param pick: returns the rules of a book that the question is about
    """
    own = rank_rules(tuple(pick(book)), kind)
    return (
        own
        if book.parent is None
        else SubagentRuleRanking(own, rank_rule_book(book.parent.inheritable_rule_book, pick, kind))
    )


@lru_cache(maxsize=16_384)  # checked where rules are loaded, which may be a thread, and needed again by each tool
def compile_ranked_rule(rule: Rule, kind: SubjectKind) -> RankedRule:
    """Prepare ``rule`` for the comparison with subjects of ``kind``.

    A pattern that makes no sense for the kind matches nothing. In a deny it matches everything, because its intended meaning is
    unknown.
    """
    written = rule.pattern.removeprefix(f"{WORKSPACE_VARIABLE}/") if kind == "path" else rule.pattern
    literal, length = len(extract_literal_prefix(written)), count_pattern_characters(written)
    argv: ArgvPattern | None = None
    matches: Callable[[Any], bool]
    if rule.is_unconditional:
        matches = _always
    elif kind == "path":
        matches = _path_test(rule)
    elif kind == "host":
        matches = _host_test(rule.pattern)
    elif (argument := _whole_compared_argument(rule)) is not None:
        matches = _named_test(argument, compile_text_glob(rule.pattern))
    elif rule.pattern == CONFINED_VARIABLE:  # compared with a whole call, see policy/confinement.py
        matches = _never
    # A low rank: any rule that names a command is more exact than a proof about its effect.
    elif kind == "command" and rule.pattern == READ_ONLY_VARIABLE:
        literal, length, matches = 0, 1, read_only_proof.is_command_provably_read_only
    else:
        try:
            words = _pattern_words_of_rule(rule, kind)
            whole = " ".join((*words[:-1], "*") if words[-1:] == (ANY_ARGUMENTS,) else words)
            literal, length = len(extract_literal_prefix(whole)), count_pattern_characters(whole)
            if kind == "command":
                literal = literal if has_wildcard(whole) else _LITERAL_RANK
                argv = ArgvPattern(words, allowing=rule.action == "allow")
                matches = argv.matches
            else:
                matches = _arguments_test(words, allowing=rule.action == "allow")
        except (PatternSyntaxError, ValueError):
            # A broken pattern fails closed: a deny covers too much, and an allow covers nothing.
            matches = _always if rule.action == "deny" else _never
    permission = rank_permission_specificity(rule)
    rank = (int(rule.is_final), permission, literal, length, STRICTNESS[rule.action])
    return RankedRule(rule, rank, matches, argv)


def rank_permission_specificity(rule: Rule) -> int:
    """Return how exactly a rule names its permission: 0 for ``*``, 1 for a glob or side effect, 2 for a name."""
    if rule.permission == "*":
        return 0
    return 1 if is_glob(rule.permission) or rule.governed_side_effect else 2


def _pattern_words_of_rule(rule: Rule, kind: SubjectKind) -> tuple[str, ...]:
    """Return the words of the rule's pattern.

    In a deny or ask rule, a program in a standard folder loses its path, which makes the rule no more specific.

    :raises PatternSyntaxError: for a pattern that cannot be split
    """
    words = split_pattern(rule.pattern)
    if kind == "command" and rule.action != "allow" and words:
        return (strip_standard_program_folder(words[0]), *words[1:])
    return words


def _only_asks(rule: Rule) -> bool:
    return rule.narrows and rule.action == "ask"


def _always(_subject: object) -> bool:
    return True


def _never(_subject: object) -> bool:
    return False


# Paths.


class _RankedPathRules:
    """Path rules in order of rank, up to the first that matches every path.

    Most paths match none of the others. If the last name of a pattern is not ``**``, the pattern matches only paths that contain
    such a name, so these rules are found by name. One expression tests whether any of the rest matches.
    """

    __slots__ = ("_any_absolute", "_any_relative", "_names", "_others", "_rest", "_split_absolute", "_tests")

    def __init__(self, ranked: Sequence[RankedRule], *, inside: bool) -> None:
        self._rest: RankedRule | None = None
        self._tests: list[RankedRule] = []
        self._others: list[int] = []
        """The positions of the rules that cannot be found by a name."""
        self._names = _GlobNameIndex()
        self._split_absolute = not inside
        patterns: dict[_Form, list[str]] = {"relative": [], "absolute": []}
        any_case = False
        for candidate in ranked:
            form, pattern = _compared_path_pattern(candidate.rule, inside=inside)
            # Rules behind this one can never win, so the index ends here.
            if form == "every":
                self._rest = candidate
                break
            if form == "none":
                continue
            place = len(self._tests)
            self._tests.append(candidate)
            if (name := _required_last_name(pattern)) is not None:
                self._names.add(name, place)
                self._split_absolute = self._split_absolute or form == "absolute"
            else:
                self._others.append(place)
                patterns[form].append(pattern)
                any_case = any_case or candidate.rule.any_case
        self._any_relative = _regex_for_any_pattern(patterns["relative"], any_case=any_case)
        self._any_absolute = _regex_for_any_pattern(patterns["absolute"], any_case=any_case)

    def find_winner(self, relative: str, absolute: str) -> RankedRule | None:
        """Return the first rule that matches a path, or the one that matches every path."""
        if not absolute.isascii():
            is_outside = relative is absolute
            absolute = normalise_unicode_spelling(absolute)
            relative = absolute if is_outside else normalise_unicode_spelling(relative)
        places = self._names.find_candidate_globs(absolute if self._split_absolute else relative)
        if (self._any_relative is not None and self._any_relative.match(relative) is not None) or (
            self._any_absolute is not None and self._any_absolute.match(absolute) is not None
        ):
            places.update(self._others)
        if places:
            path = PathSubject(absolute, None if relative is absolute else relative)
            # The positions are the order of rank, so the first match is the winner.
            for place in sorted(places):
                if self._tests[place].matches(path):
                    return self._tests[place]
        return self._rest


def _required_last_name(pattern: str) -> str | None:
    """Return the last name of a path pattern if every matching path contains such a name; else None."""
    if "[" in pattern and "/" in pattern[pattern.index("[") :]:
        return None  # the ``/`` may be a character of a set
    name = pattern.rpartition("/")[2]
    return None if not name or "**" in name else name


_WILDCARD_PARTS = compile_regex_lazily(r"\[.[^\]]*\]|[*?\[]")
"""The separators between the literal texts of a glob: a set, or a wildcard."""


class _GlobNameIndex:
    """An index from names to positions of globs that could match them.

    It may return more positions than match, because it ignores letter case.
    """

    __slots__ = ("_exact", "_heads", "_inner", "_tails")

    _KEY = 3

    def __init__(self) -> None:
        self._exact: dict[str, list[int]] = {}
        self._heads: dict[str, list[tuple[str, int]]] = {}
        self._tails: dict[str, list[tuple[str, int]]] = {}
        self._inner: list[tuple[str, int]] = []
        """The longest text between wildcards, of each glob that neither begins nor ends with literal text."""

    def add(self, name: str, place: int) -> None:
        # The index ignores letter case, so that one index serves rules of both kinds. The exact test follows.
        name = name.casefold()
        if not has_wildcard(name):
            self._exact.setdefault(extract_literal_prefix(name), []).append(place)
            return
        first = min(at for sign in WILDCARDS if (at := name.find(sign)) >= 0)
        last = max(name.rfind(sign) for sign in (*WILDCARDS, "]"))
        head, tail = name[:first], name[last + 1 :]
        if len(head) >= self._KEY:
            self._heads.setdefault(head[: self._KEY], []).append((head, place))
        elif len(tail) >= self._KEY:
            self._tails.setdefault(tail[-self._KEY :], []).append((tail, place))
        else:
            self._inner.append((max(_WILDCARD_PARTS.split(name), key=len), place))

    def find_candidate_globs(self, path: str) -> set[int]:
        """Return the positions of every glob that a name of ``path`` could match."""
        path = path.casefold()
        found: set[int] = set()
        for text, place in self._inner:
            if text in path:
                found.add(place)
        exact, heads, tails, key = self._exact, self._heads, self._tails, self._KEY
        for name in path.split("/"):
            if name in exact:
                found.update(exact[name])
            if (begins := heads.get(name[:key])) is not None:
                found.update(place for head, place in begins if name.startswith(head))
            if (ends := tails.get(name[-key:])) is not None:
                found.update(place for tail, place in ends if name.endswith(tail))
        return found


_Form = Literal["every", "relative", "absolute", "none"]


def _regex_for_any_pattern(patterns: Sequence[str], *, any_case: bool) -> re.Pattern[str] | None:
    """Return an expression for any of these patterns.

    It may match more, because each match is compared again.
    """
    flags = re.DOTALL | re.IGNORECASE | re.ASCII if any_case else re.DOTALL
    return re.compile(build_any_path_glob_expression(patterns) + r"\Z", flags) if patterns else None


def _compared_path_pattern(rule: Rule, *, inside: bool) -> tuple[_Form, str]:
    """Return what a path rule's pattern is compared with, for paths inside or outside the workspace.

    A relative pattern applies to the workspace only. But a deny or ask that begins with ``**`` is about every folder.
    """
    if not rule.pattern or rule.pattern == "*":
        return "every", ""
    pattern = normalise_unicode_spelling(unescape_displayed_path(normalize_path_pattern(rule.pattern)))
    if find_glob_pattern_fault(pattern) is not None:
        return ("every" if rule.action == "deny" else "none"), ""
    if pattern.startswith("/"):
        return "absolute", pattern
    if inside:
        return ("every" if pattern == "**" else "relative"), pattern
    # An allow for **/x is meant for the workspace. A deny for it is meant for every such file.
    return ("absolute" if pattern.startswith("**") and rule.action != "allow" else "none"), pattern


def normalize_path_pattern(pattern: str) -> str:
    """Return the normal spelling of a path pattern.

    ``./src/`` and ``src`` are one pattern, and ``.`` is the workspace with all its content.
    """
    absolute = "/" if pattern.startswith("/") else ""
    if pattern.startswith(WORKSPACE_VARIABLE):
        pattern = pattern[len(WORKSPACE_VARIABLE) :].lstrip("/")
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    return absolute + "/".join(parts) if parts else absolute or "**"


def rule_names_protected_path(rule: Rule, path: PathSubject) -> bool:
    """Return whether an allow rule names a protected path.

    Its pattern has no wildcard, and is the path or a protected folder of it.
    """
    if rule.action != "allow" or not rule.pattern:
        return False
    pattern = normalize_path_pattern(rule.pattern)
    # A wildcard can match a protected path by accident. Only its exact name shows that the operator means it.
    if find_glob_pattern_fault(pattern) is not None or has_wildcard(pattern):
        return False
    literal = extract_literal_prefix(pattern)
    place = path.absolute if literal.startswith("/") or path.relative is None else path.relative
    if literal == place:
        return True
    names = place.split("/")
    below = len(names) - literal.count("/") - 1
    head = "/".join(names[: len(names) - below])
    exact = None if path.exact_names is None else _exact_names_of(path, place)
    if literal != head and (exact is None or not _matches_same_letters(escape_glob_literal(literal), head, exact)):
        return False
    if below == 0:
        return True
    inside = (path.relative or place).split("/")[:-below]
    found = find_path_protection("/".join(inside[-_MAX_PROTECTED_NAMES:] if path.relative is None else inside))
    return found is not None and found.requires_approval


_MAX_PROTECTED_NAMES = 3
"""The maximum number of names in a protected path."""


def _path_test(rule: Rule) -> Callable[[Any], bool]:
    inside, outside = _compared_path_pattern(rule, inside=True), _compared_path_pattern(rule, inside=False)

    def test(path: PathSubject) -> bool:
        form, pattern = outside if path.relative is None else inside
        if form in ("every", "none"):
            return form == "every"
        place = path.absolute if form == "absolute" or path.relative is None else path.relative
        if matches_path_glob(pattern, normalise_unicode_spelling(place), any_case=rule.any_case):
            return True
        if path.exact_names is None:
            return False
        if rule.action == "allow":
            return _matches_same_letters(pattern, place, _exact_names_of(path, place))
        return _matches_folded(pattern, place)

    return test


# Paths below a folder that accepts several spellings of one name. File systems differ in the spellings that they accept. A
# rule that denies or asks matches every spelling that any file system accepts. A rule that allows matches the same letters in
# another case or normal form, and only in folders that fold names.


def _exact_names_of(path: PathSubject, place: str) -> int:
    """Return how many names from the beginning of ``place``, a form of ``path``, are compared exactly."""
    assert path.exact_names is not None
    left_out = path.absolute.count("/") + 1 - (0 if place == "." else place.count("/") + 1)
    return max(0, path.exact_names + 1 - left_out)


def _matches_same_letters(pattern: str, place: str, exact: int) -> bool:
    """Return whether a pattern matches a path in another case or normal form.

    :param exact: how many names from the beginning the pattern has to name as they are
    """
    wanted, names = pattern.split("/"), place.split("/")
    if wanted[:exact] != names[:exact] or len(wanted) <= exact:
        return False
    left = _fold_letters("/".join(wanted[exact:]))
    return find_glob_pattern_fault(left) is None and matches_path_glob(left, _fold_letters("/".join(names[exact:])))


def _fold_letters(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


def _matches_folded(pattern: str, place: str) -> bool:
    """Return whether a pattern matches a path as the least exact file system compares names."""
    folded = "/".join(
        _fold_pattern_part(part) if has_wildcard(part) else normalise_file_name(part) for part in pattern.split("/")
    )
    return find_glob_pattern_fault(folded) is not None or matches_path_glob(
        folded, "/".join(map(normalise_file_name, place.split("/")))
    )


def _fold_pattern_part(part: str) -> str:
    return unicodedata.normalize("NFKC", part).casefold()


# Hosts and arguments.


class _RankedHostRules:
    """Rules about hosts, indexed by the name they end with."""

    __slots__ = ("_every", "_named", "_ranked")

    def __init__(self, ranked: Sequence[RankedRule]) -> None:
        self._ranked = ranked
        self._every: list[tuple[int, HostPattern | None]] = []
        """Positions in the order, each with a pattern to compare; None for any text, even an invalid host."""
        self._named: dict[str, list[tuple[int, HostPattern]]] = {}
        for place, candidate in enumerate(ranked):
            if candidate.rule.is_unconditional:
                self._every.append((place, None))
                break
            try:
                pattern = parse_host_pattern(candidate.rule.pattern)
            except ValueError:
                continue  # the pattern matches no host
            if pattern.kind == "every":
                self._every.append((place, pattern))
            else:
                self._named.setdefault(pattern.name, []).append((place, pattern))

    def find_winner(self, host: str) -> RankedRule | None:
        """Return the first rule that matches a host, or None.

        :param host: in the form of :func:`handrail.policy.call_targets.extract_host_and_port`
        """
        try:
            have = parse_host_address(host)
        except ValueError:
            have = None
        first = len(self._ranked)
        for place, pattern in self._every:
            if pattern is None or (have is not None and pattern.matches_as_rule(have)):
                first = place
                break
        if self._named and have is not None:
            name, at = have.name, 0
            while True:
                for place, pattern in self._named.get(name[at:], ()):
                    if place < first and pattern.matches_as_rule(have):
                        first = place
                        break
                # The next turn looks up the name without its first label, for patterns such as *.example.org.
                if (at := name.find(".", at + 1)) < 0:
                    break
        return self._ranked[first] if first < len(self._ranked) else None


def _host_test(pattern: str) -> Callable[[Any], bool]:
    def test(host: str) -> bool:
        return rule_matches_host(pattern, host)

    return test


def _arguments_test(words: Sequence[str], *, allowing: bool) -> Callable[[Any], bool]:
    """Return a test for ``key=value …``: each named argument is present and its value matches.

    In an allow rule no other arguments may be present, unless the last word is ``*`` or ``…``. In other rules, further arguments never
    matter.
    """
    named = [word for word in words if word not in ("*", ANY_ARGUMENTS)]
    if any("=" not in word for word in named):
        raise ValueError("a word is not of the form key=value")
    long_running = not allowing or len(named) < len(words)
    wanted = {key: compile_text_glob(glob) for key, _, glob in (word.partition("=") for word in named)}

    def test(arguments: Mapping[str, Any]) -> bool:
        # An argument that the rule does not name could change what the call does.
        if not long_running and any(key not in wanted for key in arguments):
            return False
        return all(
            key in arguments and regex.match(format_value_for_rule(arguments[key])) for key, regex in wanted.items()
        )

    return test


_REQUEST_ARGUMENTS = {"resources/read": "uri", "resources/subscribe": "uri", "prompts/get": "name"}


def _whole_compared_argument(rule: Rule) -> str | None:
    """Return the argument that is compared as a whole, for a pattern about a request to a server."""
    return _REQUEST_ARGUMENTS.get(rule.permission.rpartition(":")[2]) if rule.permission.startswith("mcp:") else None


def build_exact_server_request_pattern(origin: str | None, arguments: Mapping[str, Any]) -> str | None:
    """Return a pattern for exactly what a request to a server is about; None for any other call."""
    argument = None if origin is None else _REQUEST_ARGUMENTS.get(origin.rpartition(":")[2])
    named = None if argument is None else arguments.get(argument)
    if not isinstance(named, str):
        return None
    return escape_glob_literal(named.partition(":")[2] if named.startswith(SOURCE_PREFIX) else named)


def _named_test(argument: str, regex: re.Pattern[str]) -> Callable[[Any], bool]:
    def test(arguments: Mapping[str, Any]) -> bool:
        named = arguments.get(argument)
        if not isinstance(named, str):
            return False
        if named.startswith(SOURCE_PREFIX):  # the server was compared already
            named = named.partition(":")[2]
        return regex.match(named) is not None

    return test


def format_value_for_rule(value: object) -> str:
    """Return an argument's value as a rule writes it: text unchanged, everything else as compact JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
