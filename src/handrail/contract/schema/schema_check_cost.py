"""Upper bounds of the cost of a schema check, and of the automata of its regular expressions.

The native checker is fast and has no budget: it blocks the process until it is done. So every check is estimated first,
by upper bounds: how often the checker reads a value, how many characters a pattern reads, how many errors arise. The
estimate follows each ``$ref``. It is computed from the schema alone, for each level of the arguments that it describes. A
call then only counts its values and characters by level.

The checker remembers its answer for each recursive definition and each container, but only while it decides whether a
value fits. While it collects errors, only the number of branches bounds the work, so errors have a separate estimate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, cast
from urllib.parse import unquote, urldefrag, urljoin

from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.strict_json import MAX_ARGUMENT_DEPTH

MAX_VALUES = 8_000
"""JSON values in a schema."""
MAX_RULES = 20_000
"""Rules that may apply to one value, with every reference written out."""
MAX_CHAIN = 32
"""References and combinations that may lie in each other without going into a value. The checker recurses."""
MAX_PATH = 256
"""Definitions that may lead from one to the next. The checker recurses here, too."""
MAX_PATTERN_STATES = 20_000
"""States of all patterns of a schema together. Each costs up to a microsecond to compile."""
CHECK_BUDGET = 2_000_000.0
"""Units of about 10 ns for the check whether arguments match."""
LIST_BUDGET = 2_000_000.0
"""Units of about 10 ns for the list of problems."""
MAX_COUNTED = 50_000
"""Values of arguments that a schema visits. Counting them costs about 100 ns each."""
BACKTRACKS = 1_000
"""Backtracking steps of a pattern with look-around in one text."""

STATE = 0.5
"""Units per state and character of a pattern."""
_FIRST_STEPS = 50
_MAX_APART = 20_000
"""Arguments times schemas up to which each argument is estimated by its own rules."""
_MAX_ARGUMENTS = 5_000
_SHORT = 2_000
_FEW = 64
_ONE_ERROR = 600.0
"""Units that one error costs."""
_CHARACTER = 0.02
"""Units per character of a text, for rules that read its length or copy it."""
_FORMAT = 4.0
_LEVELS = MAX_ARGUMENT_DEPTH + 2
_UNBOUNDED = 1e9
"""A cost that exceeds every budget."""
_MAX_ROWS = 15_000
"""Schemas times levels that are computed one by one. Deeper levels get the maximum."""
_METASCHEMA = 500
"""Rules of a published schema for schemas, which the checker knows."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_ALTERNATIVES = ("anyOf", "oneOf")
_OF_VALUES = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
)
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_LITERALS = ("enum", "const")
_NAMES = ("required", "dependentRequired", "dependencies")
_BY_LENGTH = ("minLength", "maxLength", *_LITERALS)
_METASCHEMAS = ("http://json-schema.org/draft", "https://json-schema.org/draft")

SchemaNode = Mapping[str, Any]
_Row = tuple[float, float, float, float, float]
"""The bounds of one level. For the check: rules, units per character, and patterns with look-around. For the list:
units of error, and errors."""


class SchemaTooCostly(ValueError):
    """A schema that exceeds the limits of a check. ``str()`` says which limit."""


class _SchemaRules(Struct, eq=False):
    """The rules of one schema within the whole, with the schemas that it leads to.

    :param beside: schemas that apply to the same value, and ``alternatives`` those whose errors are kept as a tree
    :param within: schemas that apply to a part of the value
    :param looking: patterns with look-around
    :param again: how often its neighbours are evaluated
    """

    own: float = 1.0
    errors: float = 1.0
    text: float = 0.0
    names: float = 0.0
    looking: float = 0.0
    looking_at_names: float = 0.0
    whole: bool = False
    again: int = 1
    beside: list[_SchemaRules] = field(default_factory=list["_SchemaRules"])
    alternatives: list[_SchemaRules] = field(default_factory=list["_SchemaRules"])
    within: list[_SchemaRules] = field(default_factory=list["_SchemaRules"])

    @property
    def same_value_schemas(self) -> Iterable[_SchemaRules]:
        return (*self.beside, *self.alternatives)

    @property
    def reachable_schemas(self) -> Iterable[_SchemaRules]:
        return (*self.beside, *self.alternatives, *self.within)

    def sum_cost_with_parts(self, parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
        """Return rules, units per character, and look-around patterns, including those of its parts."""
        own = (self.own, self.text + self.names, self.looking + self.looking_at_names)
        size, text, looking = (own[n] + self.again * sum(part[n] for part in parts) for n in range(3))
        return (min(size, _UNBOUNDED), min(text, _UNBOUNDED), min(looking, _UNBOUNDED))

    def compute_bounds_at_level(
        self, level: int, rows: Mapping[_SchemaRules, _Row], above: Mapping[_SchemaRules, _Row]
    ) -> _Row:
        """Return the bounds at ``level`` of a value that these rules check.

        :param rows: the bounds of the same level, by schemas of the same value
        :param above: the bounds of the level before
        """
        rules, text, looking, errors, branches = 0.0, 0.0, 0.0, 0.0, 0.0
        if level == 0:
            rules, text, looking = self.own, self.text, self.looking
            errors, branches = self.errors * _ONE_ERROR, self.errors
        elif self.whole:
            rules = 1.0
        if level == 1:
            text, looking = self.names, self.looking_at_names
        parts = [rows[one] for one in self.same_value_schemas]
        if level:
            parts += [above[one] for one in self.within]
        for part in parts:
            rules += part[0] * self.again
            text += part[1] * self.again
            looking += part[2] * self.again
            errors += part[3]
            branches += part[4]
        # An error is copied once more for each alternative that it is part of.
        errors += sum(rows[one][4] for one in self.alternatives) * _ONE_ERROR
        most = _UNBOUNDED
        return min(rules, most), min(text, most), min(looking, most), min(errors, most), min(branches, most)


ValueMeasure = Sequence[tuple[int, int, int]]
"""The size of a value, for each of its levels, outermost first: the number of values, the number of characters in
texts and keys, and the length of the longest text or key."""


class CostEstimate(Struct, frozen=True):
    """Upper bounds, in units of about 10 ns.

    :param check: to know whether arguments match
    :param listing: to list their problems
    """

    check: float
    listing: float

    def __add__(self, other: CostEstimate) -> CostEstimate:
        return CostEstimate(self.check + other.check, self.listing + other.listing)


_NOTHING = CostEstimate(0.0, 0.0)
_TOO_MANY_VALUES = CostEstimate(_UNBOUNDED, _UNBOUNDED)


class LevelCostBounds(Struct, frozen=True):
    """Upper bounds for each level of a value, outermost first. Nothing is checked below the last level.

    :param rules: rules for each value
    :param text: units per character
    :param looking: patterns with look-around, which step back at each character at most as often as the text is long
    :param errors: units of error for each value, and ``branches`` the maximum number of errors
    """

    rules: tuple[float, ...]
    text: tuple[float, ...]
    looking: tuple[float, ...]
    errors: tuple[float, ...]
    branches: tuple[float, ...]

    def estimate(self, measured: ValueMeasure) -> CostEstimate:
        check = listing = copied = 0.0
        for level, (values, characters, longest) in enumerate(measured[: len(self.rules)]):
            steps = self.looking[level] * min(longest + _FIRST_STEPS, BACKTRACKS)
            check += values * self.rules[level] + characters * (self.text[level] + steps)
            listing += values * self.errors[level]
        for values, characters, _ in measured:
            copied += values + characters * _CHARACTER
        # Each error holds a copy of its value; at one level, the copies of one rule's errors do not overlap.
        return CostEstimate(check, check + listing + copied * sum(self.branches[: len(measured)]))


class SchemaCheckCost:
    """The cost of checks by one schema of an object, computed on first use.

    :param costs: the units per character of each pattern in it
    :param looking: the patterns with look-around among them, which backtrack
    """

    def __init__(self, parameters: SchemaNode, costs: Mapping[str, float], looking: Collection[str] = ()) -> None:
        self._parameters = parameters
        self._costs, self._looking = costs, looking

    def require_bounded_cost(self) -> None:
        """Check that the cost of the schema has an acceptable bound.

        :raises SchemaTooCostly: if too many or too deep rules apply to one value, or references form a cycle
        """
        self._graph.check_cycles_and_sizes()

    @property
    def unresolvable_references(self) -> Sequence[str]:
        """References that cannot be followed."""
        return self._graph.unknown

    def is_check_cheap(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the check of ``arguments`` is cheap. A quick look is enough for most arguments."""
        if len(arguments) > _FEW or not self._is_cheap_for_short_values:
            return False
        for value in arguments.values():
            if isinstance(value, str):
                if len(value) > _SHORT:
                    return False
            elif not (value is None or isinstance(value, (int, float))):
                return False
        return True

    def estimate(self, arguments: Mapping[str, Any]) -> CostEstimate:
        if (measured := self._measure_arguments(arguments)) is None:
            return _TOO_MANY_VALUES
        whole = self._whole.estimate(_merge_measures(measured.values()))
        if whole.check <= CHECK_BUDGET and whole.listing <= LIST_BUDGET:
            return whole
        if not self._is_small:
            return whole
        # If the call has few of many arguments, the sum of their own estimates is smaller.
        apart = sum((self._levels_of(name).estimate([(1, 0, 0), *own]) for name, own in measured.items()), _NOTHING)
        return CostEstimate(min(whole.check, apart.check), min(whole.listing, apart.listing))

    def estimate_argument_cost(self, name: str, value: object) -> CostEstimate:
        """Estimate the cost to check one argument alone."""
        if (measured := self._measure_arguments({name: value})) is None:
            return _TOO_MANY_VALUES
        levels = self._levels_of(name) if self._is_small else self._whole
        return levels.estimate([(1, 0, 0), *measured[name]])

    @cached_property
    def _graph(self) -> _SchemaGraph:
        return _SchemaGraph(self._parameters, self._costs, self._looking)

    @cached_property
    def _whole(self) -> LevelCostBounds:
        return self._graph.compute_bounds_by_level(self._graph.root)

    @cached_property
    def _is_cheap_for_short_values(self) -> bool:
        """Whether a few short arguments without parts are cheap to check."""
        few = self._whole.estimate([(1, 0, 0), (_FEW, _FEW * _SHORT, _SHORT)])
        return few.check <= CHECK_BUDGET / 4 and few.listing <= LIST_BUDGET

    def _measure_arguments(self, arguments: Mapping[str, Any]) -> dict[str, ValueMeasure] | None:
        """Measure each argument, down to the last checked level; None if there are too many values to count."""
        if len(arguments) > _MAX_ARGUMENTS:
            return None
        found: dict[str, ValueMeasure] = {}
        left = MAX_COUNTED
        for name, value in arguments.items():
            own = found[name] = _measure_argument_levels(name, value, self._count_checked_levels(name, value), left)
            left -= sum(values for values, _, _ in own)
            if left < 0:
                return None
        return found

    def _count_checked_levels(self, name: str, value: object) -> int:
        """Return the number of levels of an argument that are checked at most."""
        levels = self._levels_of(name) if isinstance(value, (dict, list, tuple)) and self._is_small else self._whole
        return len(levels.rules) - 1

    @cached_property
    def _is_small(self) -> bool:
        return self._graph.size * (len(self._by_name) + 1) <= _MAX_APART

    def _levels_of(self, name: str) -> LevelCostBounds:
        if name not in self._by_name:
            name = ""
        if (found := self._by_name[name]) is None:
            found = self._by_name[name] = self._graph.compute_bounds_by_level(
                self._graph.build_property_rules(self._parameters, name)
            )
        return found

    @cached_property
    def _by_name(self) -> dict[str, LevelCostBounds | None]:
        properties = cast("SchemaNode", self._parameters.get("properties", {}))
        return dict.fromkeys(("", *properties))


def _merge_measures(measured: Iterable[ValueMeasure]) -> ValueMeasure:
    rows = list(zip_longest(*measured, fillvalue=(0, 0, 0)))
    return [
        (1, 0, 0),
        *((sum(v for v, _, _ in row), sum(c for _, c, _ in row), max(t for _, _, t in row)) for row in rows),
    ]


def list_possible_patterns(parameters: object) -> Iterator[str]:
    """Yield every text that could be a pattern, anywhere in the schema."""
    rest: list[Any] = [parameters]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            node = cast("SchemaNode", one)
            if isinstance(pattern := node.get("pattern"), str):
                yield pattern
            if isinstance(by_pattern := node.get("patternProperties"), Mapping):
                yield from (str(key) for key in cast("Mapping[Any, Any]", by_pattern))
            rest += node.values()
        elif isinstance(one, (list, tuple)):
            rest += cast("Sequence[Any]", one)


def count_json_values(value: object, enough: int) -> int:
    """Count the JSON values of ``value``. The count stops just past ``enough``."""
    count = 1
    rest: list[Any] = [value]
    while rest and count <= enough:
        one = rest.pop()
        if isinstance(one, Mapping):
            members: Sequence[Any] = list(cast("Mapping[Any, Any]", one).values())
        elif isinstance(one, (list, tuple)):
            members = cast("Sequence[Any]", one)
        else:
            continue
        count += len(members)
        rest += members if len(rest) + len(members) <= enough else members[:enough]
    return count


def _measure_argument_levels(name: str, value: object, levels: int, most: int) -> ValueMeasure:
    """Measure an argument, down to ``levels``. The count stops just past ``most`` values."""
    found: list[tuple[int, int, int]] = []
    level: list[Any] = [value]
    characters = longest = len(name)
    while level and len(found) < levels and most >= 0:
        inner: list[Any] = []
        of_keys = longest_key = 0
        for one in level:
            if isinstance(one, str):
                characters += len(one)
                longest = max(longest, len(one))
            elif len(found) + 1 == levels:
                continue  # nothing below it is checked
            elif isinstance(one, dict):
                members = cast("dict[str, Any]", one)
                inner += members.values()
                of_keys += sum(map(len, members))
                longest_key = max(longest_key, max(map(len, members), default=0))
            elif isinstance(one, (list, tuple)):
                inner += cast("Sequence[Any]", one)
            if len(inner) > most:
                return [*found, (len(level) + len(inner), characters, longest)]
        found.append((len(level), characters, longest))
        most -= len(level)
        level, characters, longest = inner, of_keys, longest_key
    return found


class _SchemaGraph:
    """The schemas within one schema, and which leads to which."""

    def __init__(self, parameters: SchemaNode, costs: Mapping[str, float], looking: Collection[str]) -> None:
        self._costs = costs
        self._looking = looking
        self._checks_formats = "draft-0" in str(parameters.get("$schema", ""))
        """Later dialects treat a format as an annotation."""
        self._resources: dict[str, SchemaNode | None] = {}
        self._anchors: dict[tuple[str, str], list[SchemaNode]] = {}
        self._dynamic: dict[str, list[SchemaNode]] = {}
        self._bases: dict[int, str] = {}
        self._made: dict[int, _SchemaRules] = {}
        self._unfilled: list[tuple[SchemaNode, _SchemaRules]] = []
        self._published: _SchemaRules | None = None
        self._boolean = _SchemaRules()
        self.unknown: list[str] = []
        self._index(parameters)
        self.root = self._get_schema_rules(parameters)
        self._fill_all()

    # --- locations ---------------------------------------------------------------------------------------------

    def _index(self, root: SchemaNode) -> None:
        self._resources[""] = root
        rest: list[tuple[Any, str]] = [(root, "")]
        while rest:
            one, base = rest.pop()
            if isinstance(one, Mapping):
                node = cast("SchemaNode", one)
                for keyword in ("$id", "id"):
                    if isinstance(named := node.get(keyword), str):
                        base = self._named(node, base, named)
                self._bases[id(node)] = base
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(name := node.get(keyword), str):
                        self._anchors.setdefault((base, name), []).append(node)
                if isinstance(name := node.get("$dynamicAnchor"), str):
                    self._dynamic.setdefault(name, []).append(node)
                if node.get("$recursiveAnchor") is True:
                    self._dynamic.setdefault("", []).append(node)
                rest += [(inner, base) for inner in node.values()]
            elif isinstance(one, (list, tuple)):
                rest += [(inner, base) for inner in cast("Sequence[Any]", one)]

    def _named(self, node: SchemaNode, base: str, named: str) -> str:
        if named.startswith("#"):
            self._anchors.setdefault((base, named[1:]), []).append(node)
            return base
        base, _ = urldefrag(urljoin(base, named))
        self._resources[base] = node if base not in self._resources or self._resources[base] is node else None
        return base

    def _resolve_reference(self, node: SchemaNode, reference: str) -> list[object]:
        base = self._bases[id(node)]
        whole, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        if (start := self._resources.get(whole)) is None:
            return []
        fragment = unquote(fragment)
        if not fragment:
            return [start]
        if not fragment.startswith("/"):
            return [*self._anchors.get((whole, fragment), ())]
        target = _resolve_pointer(start, fragment)
        return [target] if isinstance(target, (Mapping, bool)) else []

    def _targets(self, node: SchemaNode, keyword: str, reference: str) -> list[_SchemaRules]:
        found = self._resolve_reference(node, reference)
        if keyword != "$ref":
            found += self._dynamic.get(reference.rpartition("#")[2], ())
        if found:
            return [self._get_schema_rules(one) for one in {id(one): one for one in found}.values()]
        if reference.startswith(_METASCHEMAS):
            if self._published is None:
                self._published = _SchemaRules(_METASCHEMA, _METASCHEMA)
                self._published.within.append(self._published)
            return [self._published]
        self.unknown.append(reference)
        return []

    # --- references ------------------------------------------------------------------------------------------

    def _get_schema_rules(self, schema: object) -> _SchemaRules:
        """Return the rules of a schema. New ones are filled in later."""
        if not isinstance(schema, Mapping):
            return self._boolean
        node = cast("SchemaNode", schema)
        if (found := self._made.get(id(node))) is not None:
            return found
        self._made[id(node)] = rules = _SchemaRules()
        self._unfilled.append((node, rules))
        return rules

    @property
    def size(self) -> int:
        return len(self._made)

    def _fill_all(self) -> None:
        while self._unfilled:
            self._fill(*self._unfilled.pop())

    def build_property_rules(self, parameters: SchemaNode, name: str) -> _SchemaRules:
        """Return the root with one of its properties; with none for ``""``, so that its rules for others count."""
        properties = cast("SchemaNode", parameters.get("properties", {}))
        kept = {name: properties[name]} if name in properties else {}
        rules = _SchemaRules()
        part = {**parameters, "properties": kept}
        self._bases[id(part)] = self._bases[id(parameters)]
        self._fill(part, rules)
        rules.own += len(properties)
        return rules

    def _fill(self, node: SchemaNode, rules: _SchemaRules) -> None:
        self._fill_counts(node, rules)
        self._fill_per_character_costs(node, rules)
        self._fill_successor_schemas(node, rules)

    def _fill_counts(self, node: SchemaNode, rules: _SchemaRules) -> None:
        """Count the rules that apply to any value: the keywords, and their literals and names."""
        rules.own += len(node)
        rules.errors = 1.0 + sum(keyword in node for keyword in _ASSERTING)
        for keyword in _LITERALS:
            if keyword in node:
                weight = float(count_json_values(node[keyword], MAX_VALUES))
                rules.own += weight
                rules.errors += weight / 8
        for keyword in _NAMES:
            if isinstance(listed := node.get(keyword), (list, tuple, Mapping)):
                number = count_json_values(cast("object", listed), MAX_VALUES)
                rules.own += number
                rules.errors += number

    def _fill_per_character_costs(self, node: SchemaNode, rules: _SchemaRules) -> None:
        """Add the cost of rules that read each character, or visit each item again."""
        if any(keyword in node for keyword in _BY_LENGTH):
            rules.text += _CHARACTER
        if "format" in node and self._checks_formats:
            rules.text += _FORMAT
        if isinstance(pattern := node.get("pattern"), str):
            rules.text += self._costs[pattern]
            rules.looking += pattern in self._looking
        if isinstance(patterns := node.get("patternProperties"), Mapping):
            keys = [str(key) for key in cast("Mapping[Any, Any]", patterns)]
            rules.names += sum(self._costs[key] for key in keys)
            rules.looking_at_names += sum(key in self._looking for key in keys)
        rules.whole = node.get("uniqueItems") is True

    def _fill_successor_schemas(self, node: SchemaNode, rules: _SchemaRules) -> None:
        """Add the schemas that it leads to."""
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(reference := node.get(keyword), str):
                rules.beside += self._targets(node, keyword, reference)
        for keyword in _IN_PLACE:
            if keyword in node:
                into = rules.alternatives if keyword in _ALTERNATIVES else rules.beside
                into += map(self._get_schema_rules, _schemas_in_keyword(node[keyword], named=keyword.startswith("dep")))
        for keyword in _OF_VALUES:
            if keyword in node:
                parts = list(_schemas_in_keyword(node[keyword], named=keyword in ("properties", "patternProperties")))
                rules.within += map(self._get_schema_rules, parts)
                rules.own += len(parts)
        if "propertyNames" in node:
            rules.within.append(self._get_schema_rules(node["propertyNames"]))
        if any(keyword in node for keyword in _UNEVALUATED):
            rules.again = 3

    # --- bounds ------------------------------------------------------------------------------------------------

    def check_cycles_and_sizes(self) -> None:
        """Check for cycles that do not go into a value, for long paths, and for too many rules of one value.

        :raises SchemaTooCostly: otherwise
        """
        chains: dict[_SchemaRules, int] = {}
        for rules in self._order:
            chains[rules] = 1 + max((chains[one] for one in rules.same_value_schemas), default=0)
            if chains[rules] > MAX_CHAIN:
                raise SchemaTooCostly(
                    f"references and combinations (allOf, anyOf, …) are nested more than {MAX_CHAIN} levels deep; flatten them"
                )
        here: dict[_SchemaRules, float] = {}
        for rules in self._order:
            here[rules] = rules.own + rules.again * sum(here[one] for one in rules.same_value_schemas)
            if here[rules] > MAX_RULES:
                raise SchemaTooCostly(
                    f"over {MAX_RULES:,} rules apply to one value if all references are written out; "
                    "remove repeated rules"
                )
        _ = self._level_maxima

    @cached_property
    def _order(self) -> list[_SchemaRules]:
        return _sort_rules_in_place_first(
            [*self._made.values(), self._boolean, *([self._published] if self._published else ())]
        )

    @cached_property
    def _level_maxima(self) -> tuple[float, float, float]:
        """The maximum of rules, units per character, and look-around patterns at one level.

        It assumes that the checker remembers its answers: each recursive definition counts once, with everything down
        to the next recursive definition.
        """
        recursive: set[_SchemaRules] = set()
        done: dict[_SchemaRules, tuple[float, float, float]] = {}
        open_: set[_SchemaRules] = set()
        stack: list[tuple[_SchemaRules, bool]] = [(self.root, False)]
        while stack:
            rules, left = stack.pop()
            if left:
                open_.discard(rules)
                done[rules] = rules.sum_cost_with_parts(
                    [done.get(one, (0.0, 0.0, 0.0)) for one in rules.reachable_schemas if one not in recursive]
                )
            elif rules in open_:
                recursive.add(rules)
            elif rules not in done:
                if len(open_) >= MAX_PATH:
                    raise SchemaTooCostly(f"a chain of references has more than {MAX_PATH} definitions; flatten them")
                open_.add(rules)
                stack.append((rules, True))
                stack += [(one, False) for one in rules.reachable_schemas]
        counted = [done[self.root], *(done[one] for one in recursive if one is not self.root)]
        return sum(one[0] for one in counted), sum(one[1] for one in counted), sum(one[2] for one in counted)

    def compute_bounds_by_level(self, root: _SchemaRules) -> LevelCostBounds:
        order = self._order if root is self.root else [*self._order, root]
        most_rules, most_text, most_looking = self._level_maxima
        at_most: _Row = (most_rules, most_text, most_looking, _UNBOUNDED, _UNBOUNDED)
        above: dict[_SchemaRules, _Row] = {}
        found: list[_Row] = []
        while len(found) < _LEVELS:
            if len(found) * len(order) > _MAX_ROWS:
                found += [at_most] * (_LEVELS - len(found))
                break
            rows: dict[_SchemaRules, _Row] = {}
            for one in order:
                rows[one] = one.compute_bounds_at_level(len(found), rows, above)
            if found and not any(map(any, rows.values())):
                break
            rules, text, looking, errors, branches = rows[root]
            row = (min(rules, most_rules), min(text, most_text), min(looking, most_looking), errors, branches)
            if len(found) > 1 and rows == above:  # all further levels are equal
                found += [row] * (_LEVELS - len(found))
                break
            found.append(row)
            above = rows
        while len(found) > 1 and not any(found[-1]):
            found.pop()
        return LevelCostBounds(*(tuple(column) for column in zip(*found, strict=True)))


def _schemas_in_keyword(value: object, *, named: bool) -> Iterable[object]:
    """Return the schemas in a keyword's value: the value itself, a list, or by name."""
    if isinstance(value, (list, tuple)):
        return cast("Sequence[object]", value)
    if named:
        members = cast("SchemaNode", value).values() if isinstance(value, Mapping) else ()
        return [one for one in members if not isinstance(one, (list, tuple))]
    return (value,)


def _resolve_pointer(start: SchemaNode, pointer: str) -> object:
    found: Any = start
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = cast("SchemaNode", found).get(key)
        elif isinstance(found, (list, tuple)) and key.isdecimal() and len(key) < 9:
            items = cast("Sequence[Any]", found)
            found = items[int(key)] if int(key) < len(items) else None
        else:
            return None
    return found


def _sort_rules_in_place_first(every: Iterable[_SchemaRules]) -> list[_SchemaRules]:
    """Sort rules so that each follows all that apply to the same value for it.

    :raises SchemaTooCostly: if one of them depends on itself
    """
    order: list[_SchemaRules] = []
    placed: set[_SchemaRules] = set()
    open_: set[_SchemaRules] = set()
    stack = [(one, False) for one in every]
    while stack:
        rules, left = stack.pop()
        if left:
            open_.discard(rules)
            placed.add(rules)
            order.append(rules)
        elif rules in open_:
            raise SchemaTooCostly("a reference leads back to itself without entering a value; remove it")
        elif rules not in placed:
            open_.add(rules)
            stack.append((rules, True))
            stack += [(one, False) for one in rules.same_value_schemas if one not in placed]
    return order


_ASSERTING = frozenset(
    (
        *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "contains"),
        *("minProperties", "maxProperties", "propertyNames", "not", "anyOf", "oneOf"),
        *("additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems"),
    )
)


# The size of the automaton of a regular expression, estimated in one pass over its text.

MOST = 1e15
_COUNTED = compile_regex_lazily(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_CLASS_OF_UNICODE, _NEGATED_CLASS, _ANY, _BEYOND_ASCII = 400.0, 12.0, 10.0, 4.0


def estimate_regex_state_count(pattern: str) -> float:
    """Estimate the states that an engine without backtracking needs for ``pattern``.

    A repeated part counts as often as it is repeated.
    """
    total, last = [1.0], [0.0]
    index, length = 0, len(pattern)
    while index < length:
        char = pattern[index]
        if char == "(":
            total.append(0.0)
            last.append(0.0)
            index += 1
            continue
        if char == ")" and len(total) > 1:
            group = total.pop()
            last.pop()
            total[-1] += group
            last[-1] = group
        elif char == "{" and (counted := _COUNTED.match(pattern, index)):
            times = max(int(n) for n in counted.groups() if n)
            total[-1] = min(total[-1] + last[-1] * max(times - 1, 0), MOST)
            last[-1] *= max(times, 1)
            index = counted.end()
            continue
        else:
            weight, index = _pattern_element_states(pattern, index)
            total[-1] += weight
            if weight:
                last[-1] = weight
            continue
        index += 1
    return min(sum(total), MOST)


def _pattern_element_states(pattern: str, index: int) -> tuple[float, int]:
    """Return the states of the element at ``index``, and the position of the next one."""
    char = pattern[index]
    if char in "*+?|^$":
        return 0.0, index + 1
    if char == ".":
        return _ANY, index + 1
    if char == "\\":
        kind = pattern[index + 1 : index + 2]
        if kind in ("p", "P") and pattern[index + 2 : index + 3] == "{":
            return _CLASS_OF_UNICODE, max(pattern.find("}", index), index + 2) + 1
        return (2.0 if kind not in ("p", "P", "W", "D", "S") else _NEGATED_CLASS), index + 2
    if char == "[":
        return _pattern_set_states(pattern, index)
    return (1.0 if char.isascii() else _BEYOND_ASCII), index + 1


def _pattern_set_states(pattern: str, index: int) -> tuple[float, int]:
    """Return the states of the set that begins at ``index``, and the position of the next element."""
    end, weight = index + 1, 2.0
    if pattern[end : end + 1] == "^":
        end, weight = end + 1, _NEGATED_CLASS
    first = end
    while end < len(pattern) and (pattern[end] != "]" or end == first):
        if pattern[end] == "\\":
            weight += _CLASS_OF_UNICODE if pattern[end + 1 : end + 2] in ("p", "P") else 0.0
            end += 1
        elif not pattern[end].isascii():
            weight += _BEYOND_ASCII
        end += 1
    return weight, end + 1
