"""Checks of arguments by JSON Schema (2020-12): compiled once, nothing fetched, every problem at once.

A schema is read more strictly than the standard in one place only: an object schema without ``additionalProperties``
accepts none at its *top level*. So a misspelt argument is an error and is never silently dropped. The model still
sees the schema as it was declared.

Every check has a bound. Patterns run on an engine that reads each character once. Patterns with look-around are
accepted too, and stop after a fixed number of steps. Back-references are rejected. A schema that exceeds every budget
is rejected when it is loaded. A check beyond the budget does not run here; it gives :class:`CoarseProblemList` (see
:mod:`handrail.contract.schema.schema_check_cost`), and the arbiter has a bounded process make the check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast
from weakref import WeakValueDictionary

import jsonschema_rs as rs
from pydantic_core import to_json

from handrail.contract.errors import ToolError
from handrail.contract.schema.foreign_schemas import find_dialect
from handrail.contract.schema.schema_check_cost import (
    BACKTRACKS,
    CHECK_BUDGET,
    LIST_BUDGET,
    MAX_CHAIN,
    MAX_PATTERN_STATES,
    MAX_VALUES,
    STATE,
    SchemaCheckCost,
    SchemaTooCostly,
    count_json_values,
    estimate_regex_state_count,
    list_possible_patterns,
)
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.strict_json import MAX_ARGUMENT_DEPTH, get_json_type_name
from handrail.contract.tool.spec import extract_property_schemas, get_list_items_or_empty, list_schema_branches
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

# Integers: the places where a schema asks for them, and a conversion of whole numbers. JSON Schema counts ``1.0`` as an
# integer, Python does not.

_EXACT = 2.0**53
"""Below it a float is exactly the whole number that was written."""


def find_possible_integer_arguments(parameters: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the arguments that may be integers, and those that may contain some; None: any may."""
    if not _mentions_type(parameters, b'"integer"'):
        return (), ()
    integers: list[str] = []
    within: list[str] = []
    for name, property_schema in extract_property_schemas(parameters).items():
        refers = _mentions_type(property_schema, b'ef":')  # $ref, $dynamicRef: to what is looked up nowhere here
        kinds = {
            kind
            for one in (property_schema, *list_schema_branches(property_schema))
            for kind in (one.get("type"), *get_list_items_or_empty(one.get("type")))
            if isinstance(kind, str)
        }
        if refers or ("integer" in kinds and "number" not in kinds):
            integers.append(name)
        if refers or any(_mentions_type(one, b'"integer"') for one in _inner_schemas(property_schema)):
            within.append(name)
    beside = {key: value for key, value in parameters.items() if key not in ("properties", "$defs", "definitions")}
    anywhere = _mentions_type(beside, b'"integer"') or _mentions_type(beside, b'ef":')
    return tuple(integers), None if anywhere else tuple(within)


def _mentions_type(schema: object, what: bytes) -> bool:
    return what in to_json(schema, fallback=dict)


def _inner_schemas(fields: Mapping[str, Any]) -> Iterator[object]:
    """Yield the parts of a schema about the inside of a value, not about the value itself."""
    for one in (fields, *list_schema_branches(fields)):
        yield {key: value for key, value in one.items() if key not in ("type", "anyOf", "oneOf", "allOf")}


def convert_whole_floats_to_int(value: Any) -> Any:
    """Return ``value`` with its whole numbers as ``int``; the same object if nothing changes.

    Only numbers are converted that every reader of JSON takes for the same.
    """
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        made = {key: convert_whole_floats_to_int(one) for key, one in given.items()}
        return made if any(made[key] is not one for key, one in given.items()) else given
    if isinstance(value, (list, tuple)):
        held = cast("Sequence[Any]", value)
        several = [convert_whole_floats_to_int(one) for one in held]
        return several if any(new is not old for new, old in zip(several, held, strict=True)) else held
    return value


MAX_SCHEMA_DEPTH = 128
MAX_SCHEMA_BYTES = 400_000
MAX_PROBLEMS = 50
_TOO_DEEP = f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels, or contains itself; flatten it"
_NOT_TOGETHER = "the combination of arguments does not match the schema, which is too large to explain why; read the schema and call again"
_LONE_SURROGATE = "the arguments contain half of a surrogate pair, which is not a character; send whole characters"
_MANY = 1_000
"""Arguments that are checked one by one."""
_MAX_NODES = 200_000
_MAX_VALUES_LISTED = 1_000
_MAX_DEPTH_LISTED = 24
"""Depth of a schema whose faults are listed. Each fault costs about 20 µs, and more if it is deep in alternatives."""
_HARMLESS: frozenset[object] = frozenset({int, bool, type(None)})
_LINEAR = rs.RegexOptions(size_limit=1024 * 1024, dfa_size_limit=1024 * 1024)
_BOUNDED = rs.FancyRegexOptions(backtrack_limit=BACKTRACKS, size_limit=1024 * 1024, dfa_size_limit=1024 * 1024)
_BACK_REFERENCE = compile_regex_lazily(r"(?:[^\\]|^)(?:\\\\)*\\(?:[1-9]|k[<{'])")
_OF_SEVERAL = frozenset(
    (
        *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    )
)
"""Keywords about several arguments together."""
_DIALECTS: Mapping[str, Callable[..., rs.Validator]] = {
    "https://json-schema.org/draft/2020-12/schema": rs.Draft202012Validator,
    "https://json-schema.org/draft/2019-09/schema": rs.Draft201909Validator,
    "http://json-schema.org/draft-07/schema": rs.Draft7Validator,
    "http://json-schema.org/draft-06/schema": rs.Draft6Validator,
    "http://json-schema.org/draft-04/schema": rs.Draft4Validator,
}
_DIALECT_BY_NAME = {find_dialect(uri): uri for uri in _DIALECTS}
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_APPLICATORS = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"}
)

Path = Sequence[str | int]


class InvalidSchemaError(ValueError):
    """A schema that cannot be used. ``problems`` has every ``(place, problem)``."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{place}: {problem}" if place else problem for place, problem in problems))


class CoarseProblemList(list[str]):
    """Coarse problems: the check exceeded the budget, or the list of problems did.

    :param checked: whether the arguments are known not to match
    """

    def __init__(self, texts: Iterable[str], *, checked: bool) -> None:
        super().__init__(texts)
        self.checked = checked


class ArgumentCheckBudgetError(ToolError):
    """An error for arguments whose check exceeds the budget. A bounded process may finish the check."""

    def __init__(
        self, text: str, schema: ParametersSchema, arguments: dict[str, Any], problems: CoarseProblemList
    ) -> None:
        super().__init__(text, kind="invalid_input")
        self.schema = schema
        self.arguments = arguments
        self.problems = problems


class ParametersSchema:
    """The compiled schema of one tool's parameters. Made by :func:`compile_schema`."""

    __slots__ = ("__weakref__", "_accepts", "_effort", "_integers", "_of_each", "_validator", "_within", "parameters")

    def __init__(
        self,
        parameters: Mapping[str, Any],
        validator: rs.Validator,
        effort: SchemaCheckCost,
        of_each: Callable[[], rs.Validator],
    ) -> None:
        self.parameters = parameters
        self._validator = validator
        self._accepts = validator.is_valid
        self._effort = effort
        self._of_each = of_each
        self._integers, self._within = find_possible_integer_arguments(parameters)

    def list_problems(self, arguments: dict[str, Any], *, parsed: bool = False) -> list[str]:
        """Return everything wrong with ``arguments``; empty if they match.

        Each text names the JSON path, the type of the value (never the value itself) and what was expected. The list
        has at most :data:`MAX_PROBLEMS` texts, then the number of the others. If the check or the list exceeds the
        budget, the problems are :class:`CoarseProblemList`.

        :param parsed: whether they come from :func:`~handrail.contract.text.strict_json.parse_arguments`, so that they are
            JSON
        """
        if not parsed and (fault := _explain_non_json_arguments(arguments)):
            return [fault]
        estimate = None if self._effort.is_check_cheap(arguments) else self._effort.estimate(arguments)
        if estimate is not None and estimate.check > CHECK_BUDGET:
            return CoarseProblemList([self._explain_costly_argument(arguments)], checked=False)
        try:
            if self._accepts(arguments):
                return []
            if estimate is None or estimate.listing <= LIST_BUDGET:
                return _list_error_texts(self._validator.iter_errors(arguments), self.parameters)
            return CoarseProblemList(self._problems_by_argument(arguments), checked=True)
        except UnicodeEncodeError:
            return [_LONE_SURROGATE]
        except ValueError as error:
            return [f"the arguments are not JSON values ({str(error)[:200]})"]

    def iterate_errors_within_budget(self, arguments: dict[str, Any]) -> Iterator[rs.ValidationError]:
        """Yield the errors of JSON ``arguments``; none if listing them exceeds the budget."""
        if self._effort.is_check_cheap(arguments) or self._effort.estimate(arguments).listing <= LIST_BUDGET:
            yield from self._validator.iter_errors(arguments)

    def matches_without_budget(self, arguments: dict[str, Any]) -> bool:
        """Return whether ``arguments`` match, at any cost. For a process with its own limits."""
        return self._accepts(arguments)

    def list_problems_without_budget(self, arguments: dict[str, Any]) -> list[str]:
        """Return the problems of ``arguments``, at any cost. For a process with its own limits."""
        return _list_error_texts(self._validator.iter_errors(arguments), self.parameters)

    def _explain_costly_argument(self, arguments: Mapping[str, Any]) -> str:
        """Return a text about the argument that is too large for its schema."""
        if len(arguments) > _MANY:
            return f"too many arguments to check: {len(arguments):,}; split the call into several smaller ones"
        name = max(arguments, key=lambda one: self._effort.estimate_argument_cost(one, arguments[one]).check)
        value = arguments[name]
        characters = (
            f"string of {len(value):,} characters"
            if isinstance(value, str)
            else f"{_describe_size(value)} or what is in it"
        )
        return (
            f"`{format_json_path([name])}`: the {characters} is too large to check against the patterns, alternatives or rules of "
            "its schema; split the call into several smaller ones"
        )

    def _problems_by_argument(self, arguments: dict[str, Any]) -> list[str]:
        """Return texts about missing and wrong arguments, with details where they cost little."""
        properties = extract_property_schemas(self.parameters)
        texts = [
            f"`{format_json_path([name])}` is missing (expected {_expected_of(properties.get(name, {}))})"
            for name in get_list_items_or_empty(self.parameters.get("required"))
            if isinstance(name, str) and name not in arguments
        ]
        try:
            validator = self._of_each()
        except (ValueError, rs.ReferencingError):  # a reference leads to a keyword about several arguments
            return texts or [_NOT_TOGETHER]
        left = LIST_BUDGET
        for count, (name, value) in enumerate(arguments.items()):
            if len(texts) >= MAX_PROBLEMS or count >= _MANY:
                return [*texts[:MAX_PROBLEMS], "more problems may exist"]
            if validator.is_valid({name: value}):
                continue
            if (cost := self._effort.estimate_argument_cost(name, value).listing) <= left:
                left -= cost
                texts += _list_error_texts(validator.iter_errors({name: value}), self.parameters)
            else:
                texts.append(
                    f"`{format_json_path([name])}`: the {_describe_size(value)} does not match its schema, and it is too large to list every "
                    "problem; send it in smaller parts"
                )
        return texts or [_NOT_TOGETHER]

    def coerce_integers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return valid ``arguments`` with whole numbers as ``int`` where the schema asks for integers.

        JSON Schema takes ``1.0`` for an integer; a tool in Python and a lock named by it do not. The given object
        stays unchanged.
        """
        for name in self._integers:
            value = arguments.get(name)
            if type(value) is float and value.is_integer():
                arguments = {**arguments, name: int(value)}
        for name in arguments if self._within is None else self._within:
            value = arguments.get(name)
            if isinstance(value, (dict, list, tuple)) and (made := convert_whole_floats_to_int(value)) is not value:
                arguments = {**arguments, name: made}
        return arguments


_compiled_schemas: WeakValueDictionary[bytes, ParametersSchema] = WeakValueDictionary()
"""The schemas in use, by their JSON. Tools with equal parameters share one."""


def compile_schema(parameters: Mapping[str, Any]) -> ParametersSchema:
    """Check and compile a tool's ``parameters``.

    A dialect named by ``$schema`` (drafts 4 to 2020-12) is respected; the default is 2020-12.

    :raises InvalidSchemaError: (a ``ValueError``) if it is not a valid schema, describes something other than one object,
        refers to anything outside itself, or has a pattern that no bounded engine accepts
    """
    text = _schema_as_json(parameters)
    if (known := _compiled_schemas.get(text)) is not None:
        return known
    if (problem := _fault_in_size(parameters, text)) is not None:
        raise InvalidSchemaError([("", problem)])
    written = str(parameters.get("$schema", _NEWEST))
    declared = _DIALECT_BY_NAME.get(find_dialect(written), "")
    if (validator_of := _DIALECTS.get(declared)) is None:
        raise InvalidSchemaError(
            [("$schema", f"is {written[:200]!r}, which is not a known dialect; leave it out for {_NEWEST}")]
        )
    problems: dict[str, str] = {}
    if (kind := parameters.get("type")) != "object":
        got = f"is {kind!r}"[:200] if "type" in parameters else "is missing"
        problems["type"] = f'{got}; the arguments of a tool are one object, so write "type": "object"'
    try:
        costs, looking = (
            _compute_pattern_costs(parameters) if b'"pattern' in text or not text else (dict[str, float](), set[str]())
        )
        problems = _faults_by_metaschema(dict(parameters), declared) | problems
    except SchemaTooCostly as error:
        problems[""] = str(error)
    except ValueError as error:
        problems[""] = f"is not JSON: {str(error)[:200]}"
    else:
        if not problems:
            compounds = not text or b'ef":' in text or b'"unevaluated' in text or _nesting_upper_bound(text) > MAX_CHAIN
            made = _compiled(parameters, declared, validator_of, costs, looking, compounds=compounds)
            if text:
                _compiled_schemas[text] = made
            return made
    raise InvalidSchemaError(list(problems.items()))


def _fault_in_size(parameters: Mapping[str, Any], text: bytes) -> str | None:
    if (len(text) > 2 * MAX_VALUES or not text) and count_json_values(parameters, MAX_VALUES) > MAX_VALUES:
        deep = _deeper_than(parameters, MAX_SCHEMA_DEPTH)
        return _TOO_DEEP if deep else f"the schema has more than {MAX_VALUES:,} values; simplify it"
    if len(text) > MAX_SCHEMA_BYTES:
        return f"the schema has {len(text):,} bytes; the maximum is {MAX_SCHEMA_BYTES:,}"
    if (not text or _nesting_upper_bound(text) > MAX_SCHEMA_DEPTH) and _deeper_than(parameters, MAX_SCHEMA_DEPTH):
        return _TOO_DEEP
    return None


def _compiled(
    parameters: Mapping[str, Any],
    declared: str,
    validator_of: Callable[..., rs.Validator],
    costs: Mapping[str, float],
    looking: Collection[str],
    *,
    compounds: bool,
) -> ParametersSchema:
    """Compile a checked schema.

    :param compounds: whether rules could add up beyond what is written, or lie too deep in each other
    """

    def made(schema: Mapping[str, Any]) -> rs.Validator:
        return validator_of(schema, retriever=_refuse, pattern_options=_BOUNDED)

    whole = _forbid_unknown_arguments(parameters, declared)
    try:
        effort = SchemaCheckCost(whole, costs, looking)
        if compounds:
            effort.require_bounded_cost()
        validator = made(whole)
    except SchemaTooCostly as error:
        raise InvalidSchemaError([("", str(error))]) from None
    except rs.ValidationError as error:
        raise InvalidSchemaError([(format_json_path(error.instance_path), _compile_fault(error))]) from None
    except (ValueError, rs.ReferencingError) as error:
        raise InvalidSchemaError([("", str(error)[:300])]) from None
    if compounds and effort.unresolvable_references:
        names = ", ".join(repr(one[:100]) for one in effort.unresolvable_references[:5])
        raise InvalidSchemaError([("", f"unresolvable references: {names}; write a reference as '#/$defs/NAME'")])
    return ParametersSchema(
        parameters,
        validator,
        effort,
        lambda: made({key: value for key, value in whole.items() if key not in _OF_SEVERAL}),
    )


def _compute_pattern_costs(parameters: Mapping[str, Any]) -> tuple[dict[str, float], set[str]]:
    """Return the cost per character of each pattern, and the patterns with look-around.

    :raises SchemaTooCostly: for a pattern with a back-reference, and if they are too large together
    """
    costs: dict[str, float] = {}
    looking: set[str] = set()
    together = 0.0
    for pattern in list_possible_patterns(parameters):
        if pattern in costs:
            continue
        states = estimate_regex_state_count(pattern)
        together += states
        if together > MAX_PATTERN_STATES:
            raise SchemaTooCostly(
                f"the pattern {pattern[:80]!r} is too large: over {MAX_PATTERN_STATES:,} states, alone or with those before it; "
                "use fewer repetitions, or minLength and maxLength"
            )
        costs[pattern] = states * STATE
        if not _is_linear(pattern):
            if _BACK_REFERENCE.search(pattern):
                raise SchemaTooCostly(
                    f"the pattern {pattern[:80]!r} has a back-reference, which takes too long to match; write it without one"
                )
            looking.add(pattern)
    return costs, looking


def _is_linear(pattern: str) -> bool:
    if "(?" not in pattern and "\\" not in pattern and "+" not in pattern:
        return True
    try:
        rs.Draft202012Validator({"pattern": pattern}, pattern_options=_LINEAR)
    except (rs.ValidationError, ValueError):
        return False
    return True


def build_step_input_schema(step_parameters: Mapping[str, Any], name: str = "input") -> dict[str, Any]:
    """Return a schema with the one argument ``name``: the input of a stateful tool's step.

    The schema may refer to its own parts.
    """
    own = dict(step_parameters)
    dialect = str(own.pop("$schema", _NEWEST))
    own = _forbid_unknown_arguments(own, dialect) if own.get("type") == "object" else own
    return {"$schema": dialect, "type": "object", "properties": {name: {"$id": "urn:handrail:step", **own}}}


def format_json_path(path: Path) -> str:
    """Return ``a.b[2]`` for a JSON path; the empty text for the root.

    Odd keys are quoted. Long keys are replaced by their length: redaction would not find a part of a secret.
    """
    out = ""
    for part in path:
        if isinstance(part, int):
            out += f"[{part}]"
        elif len(part) > 80:
            out += f"[a name of {len(part)} characters]"
        elif part.removeprefix("$").isidentifier():
            out += f".{part}" if out else part
        else:
            out += f"[{part!r}]"
    return out


def _refuse(uri: str) -> rs.JSONType:
    raise ValueError(f"the external reference {uri[:200]!r} is not allowed")


def _compile_fault(error: rs.ValidationError) -> str:
    match error.kind:
        case rs.ValidationErrorKind.Referencing():
            text = error.message.replace("ValueError: ", "")
            return f"{text[:300]}. A schema must be self-contained: put the referenced definition under $defs"
        case rs.ValidationErrorKind.Format(format="regex"):
            return "is not a regular expression that can be matched in bounded time; write a simpler one"
        case _:
            return error.message[:300]


@lru_cache(maxsize=len(_DIALECTS))
def _rules_for_schemas(dialect: str) -> rs.Validator:
    uri = dialect if dialect.startswith("https:") else f"{dialect}#"
    return _DIALECTS[dialect]({"$ref": uri}, retriever=_refuse, validate_formats=True, pattern_options=_BOUNDED)


def _faults_by_metaschema(parameters: dict[str, Any], dialect: str) -> dict[str, str]:
    rules = _rules_for_schemas(dialect)
    if rules.is_valid(parameters):
        return {}
    if count_json_values(parameters, _MAX_VALUES_LISTED) > _MAX_VALUES_LISTED or _deeper_than(
        parameters, _MAX_DEPTH_LISTED
    ):
        return {"": f"is not a valid schema of {dialect}, and too large to list its faults"}
    found: dict[str, str] = {}
    for error in rules.iter_errors(parameters):
        found.setdefault(format_json_path(error.instance_path), _compile_fault(error))
    return dict(list(found.items())[:MAX_PROBLEMS])


def _forbid_unknown_arguments(parameters: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """Return the schema with unknown top-level arguments forbidden, unless it has a rule about them."""
    parameters = {"properties": {}, **parameters}  # without it, unknown arguments are reported without their names
    if "additionalProperties" in parameters or "unevaluatedProperties" in parameters:
        return dict(parameters)
    if not _APPLICATORS.intersection(parameters):
        return {**parameters, "additionalProperties": False}
    if dialect.startswith("https:"):  # 2019-09 and later: sees through allOf, $ref and the like
        return {**parameters, "unevaluatedProperties": False}
    return dict(parameters)  # older drafts cannot express it next to an applicator


def _list_error_texts(errors: Iterable[rs.ValidationError], schema: Mapping[str, Any]) -> list[str]:
    texts: dict[str, None] = {}
    more = 0
    for error in errors:
        for text in _problem_texts(error, schema):
            if text in texts:
                continue
            if len(texts) < MAX_PROBLEMS:
                texts[text] = None
            else:
                more += 1
    return [*texts, f"{more} more problems"] if more else list(texts)


def _problem_texts(error: rs.ValidationError, schema: Mapping[str, Any]) -> Iterator[str]:
    path = format_json_path(error.instance_path)
    place = f"`{path}`" if path else "the arguments"
    kinds = rs.ValidationErrorKind
    match error.kind:
        case kinds.AdditionalProperties(unexpected=names) | kinds.UnevaluatedProperties(unexpected=names):
            known = list(_sibling_properties(schema, error.schema_path))
            for name in names:
                yield f"unknown argument `{format_json_path([*error.instance_path, name])}` ({_suggest_name(name, known)})"
        case kinds.Required(property=name):
            wanted = _expected_of(_sibling_properties(schema, error.schema_path).get(name, {}))
            yield f"`{format_json_path([*error.instance_path, name])}` is missing (expected {wanted})"
        case kinds.BacktrackLimitExceeded() | kinds.RegexEngineFailure():
            yield f"{place}: the {get_json_type_name(error.instance)} takes too long to match against its pattern; send a simpler one"
        case kinds.Not(schema=unwanted) if together := _find_mutually_exclusive_keys(unwanted, error.instance):
            yield f"{place}: {' and '.join(f'`{one}`' for one in together)} exclude each other; pass only one of them"
        case kinds.AnyOf(context=branches) | kinds.OneOfNotValid(context=branches):
            yield f"{place}: expected {_alternatives(error, branches, schema)}, got {_describe_size(error.instance)}"
        case _:
            yield f"{place}: expected {_expectation(error)}, got {_describe_size(error.instance)}"


_LIMITS: Mapping[type[rs.ValidationErrorKind], str] = {
    rs.ValidationErrorKind.Minimum: "at least {}",
    rs.ValidationErrorKind.Maximum: "at most {}",
    rs.ValidationErrorKind.ExclusiveMinimum: "more than {}",
    rs.ValidationErrorKind.ExclusiveMaximum: "less than {}",
    rs.ValidationErrorKind.MinLength: "at least {} characters",
    rs.ValidationErrorKind.MaxLength: "at most {} characters",
    rs.ValidationErrorKind.MinItems: "at least {} items",
    rs.ValidationErrorKind.MaxItems: "at most {} items",
    rs.ValidationErrorKind.MinProperties: "at least {} keys",
    rs.ValidationErrorKind.MaxProperties: "at most {} keys",
}


def _expectation(error: rs.ValidationError) -> str:
    kinds = rs.ValidationErrorKind
    match error.kind:
        case kinds.Type(types=types):
            return " or ".join(types)
        case kinds.Enum(options=options):
            return f"one of {_shorten_schema_values(options)}"
        case kinds.Constant(expected_value=value):
            return _shorten_schema_values([value])
        case kinds.MultipleOf(multiple_of=n):
            return f"a multiple of {n}"
        case (
            kinds.Minimum(limit=n) | kinds.Maximum(limit=n) | kinds.ExclusiveMinimum(limit=n) | kinds.ExclusiveMaximum(limit=n)
            | kinds.MinLength(limit=n) | kinds.MaxLength(limit=n) | kinds.MinItems(limit=n) | kinds.MaxItems(limit=n)
            | kinds.MinProperties(limit=n) | kinds.MaxProperties(limit=n)
        ):  # fmt: skip
            return _LIMITS[type(error.kind)].format(n)
        case kinds.UniqueItems():
            return "items that are all different"
        case kinds.Pattern(pattern=pattern):
            return f"text that matches the pattern {pattern[:200]!r}"
        case kinds.Format(format=name):
            return f"the format {name!r}"
        case kinds.OneOfMultipleValid():
            return "exactly one matching alternative, not several"
        case kinds.PropertyNames(error=inner):
            return f"keys of this form: {_expectation(inner)}"
        case kinds.FalseSchema():
            return "no keys" if error.schema_path[-1:] == ["additionalProperties"] else "no value"
        case _:
            return f"a value that satisfies {error.kind.name!r} of the schema"


def _find_mutually_exclusive_keys(unwanted: object, given: object) -> list[str]:
    """Return the keys of ``given`` that exclude each other, if the schema says that."""
    if not isinstance(unwanted, Mapping) or not isinstance(given, Mapping):
        return []
    fields = cast("Mapping[str, Any]", unwanted)
    for one in (fields, *list_schema_branches(fields)):
        names = [str(name) for name in get_list_items_or_empty(one.get("required"))]
        if len(names) > 1 and all(name in given for name in names):
            return names
    return []


def _alternatives(
    whole: rs.ValidationError, branches: Sequence[Sequence[rs.ValidationError]], schema: Mapping[str, Any]
) -> str:
    wanted: dict[str, None] = {}
    for branch in branches[:8]:
        if not branch:
            continue
        first = branch[0]
        if isinstance(first.kind, rs.ValidationErrorKind.Type) and first.instance_path == whole.instance_path:
            wanted[_expectation(first)] = None
        else:
            wanted["(" + ", ".join(text for error in branch[:4] for text in _problem_texts(error, schema)) + ")"] = None
    return " or ".join(wanted)[:1000] or "one of its alternatives"


def _sibling_properties(schema: Mapping[str, Any], schema_path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the properties declared next to the keyword at ``schema_path``."""
    node: Any = schema
    for part in schema_path[:-1]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return {}
    return extract_property_schemas(cast("Mapping[str, Any]", node)) if isinstance(node, Mapping) else {}


_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "bashid": ("job_id", "id"),
    "body": ("content", "message", "text"),
    "caseinsensitive": ("ignore_case",),
    "chars": ("text",),
    "cmd": ("command",),
    "commit": ("ref",),
    "contents": ("content",),
    "cwd": ("path", "repository"),
    "diff": ("patch",),
    "dir": ("path", "repository", "cwd"),
    "directory": ("path", "repository", "cwd"),
    "dirpath": ("path", "repository", "cwd"),
    "file": ("path", "paths"),
    "filename": ("path",),
    "filepath": ("path",),
    "files": ("paths", "path"),
    "filetext": ("content",),
    "find": ("old",),
    "folder": ("path", "repository", "cwd"),
    "headlimit": ("limit",),
    "id": ("job_id",),
    "include": ("glob",),
    "input": ("text", "patch"),
    "instructions": ("prompt",),
    "isbackground": ("background",),
    "items": ("todos",),
    "maxresults": ("limit",),
    "newstr": ("new",),
    "newstring": ("new",),
    "oldstr": ("old",),
    "oldstring": ("old",),
    "patchtext": ("patch",),
    "query": ("pattern",),
    "regex": ("pattern",),
    "replacement": ("new",),
    "revision": ("ref",),
    "runinbackground": ("background",),
    "script": ("command", "code"),
    "search": ("pattern", "query", "old"),
    "sessionid": ("id", "job_id"),
    "shellid": ("job_id", "id"),
    "startline": ("offset", "first_line", "first"),
    "subagent": ("subagent_type",),
    "target": ("ref",),
    "task": ("prompt",),
    "taskid": ("job_id",),
    "tasks": ("todos",),
    "text": ("content", "message"),
    "timeout": ("timeout_ms", "wait_ms"),
    "timeoutseconds": ("timeout_ms", "wait_ms"),
    "workdir": ("cwd", "path", "repository"),
}
"""Arguments of other agents' tools, in lower case without separators, with ours for the same purpose. They are
suggested only if the tool has the argument: their spelling is often too different for :func:`nearest_names`."""


def _suggest_name(name: str, known: list[str]) -> str:
    if not known:
        return "no arguments are accepted here"
    plain = name[:40].replace("_", "").replace("-", "").lower()
    close = [one for one in _ELSEWHERE.get(plain, ()) if one in known][:1] or nearest_names(name, known)
    if close:
        return f"did you mean {' or '.join(f'`{c}`' for c in close)}?"
    return f"available: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"


def _expected_of(schema: Mapping[str, Any]) -> str:
    kind: object = schema.get("type")
    if isinstance(kind, str):
        return kind
    options = schema.get("enum")
    return f"one of {_shorten_schema_values(cast('list[Any]', options))}" if isinstance(options, list) else "a value"


def _shorten_schema_values(options: Sequence[Any]) -> str:
    """Return values that the *schema* names, shortened. They are the operator's, so they may be shown."""
    shown = ", ".join(repr(o)[:60] if isinstance(o, str) else str(o)[:60] for o in options[:12])
    return f"{shown}, …" if len(options) > 12 else shown


def _describe_size(value: object) -> str:
    if isinstance(value, str):
        return f"string of {len(value)} characters"
    if isinstance(value, list):
        return f"array of {len(cast('list[object]', value))} items"
    return get_json_type_name(value)


def _explain_non_json_arguments(arguments: dict[str, Any]) -> str | None:
    """Return why a program's ``arguments`` could not have come from JSON text, or None.

    The native checker looks only at values that its schema describes, and it recurses, so this check comes first.
    """
    for value in arguments.values():
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is str:
            if not value.isascii():
                break
        elif kind not in _HARMLESS:
            break
    else:
        return None
    if _deeper_than(arguments, MAX_ARGUMENT_DEPTH):
        return f"the arguments are nested deeper than {MAX_ARGUMENT_DEPTH} levels, or too many; flatten them"
    return _find_non_json(arguments)


def _find_non_json(arguments: dict[str, Any]) -> str | None:
    """Return a text about the first value, at any depth, that is not JSON; None if all are."""
    stack: list[Any] = [arguments]
    while stack:
        for value in _container_members(stack.pop()):
            if isinstance(value, (dict, list, tuple)):
                stack.append(value)
            elif isinstance(value, str):
                if not (value.isascii() or _is_text(value)):
                    return _LONE_SURROGATE
            elif isinstance(value, float):
                if not math.isfinite(value):
                    return f"the arguments contain {value}, which is not JSON; use a number or null"
            elif value is not None and not isinstance(value, int):
                return f"the arguments contain a {type(value).__name__}, which is not JSON; use text, numbers, lists and objects"
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _schema_as_json(schema: Mapping[str, Any]) -> bytes:
    """Return a schema as JSON; empty if it is not JSON."""
    try:
        return to_json(schema)
    except (TypeError, ValueError, RecursionError):  # it contains itself, or a value that only Python has
        return b""


def _nesting_upper_bound(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _deeper_than(value: object, limit: int) -> bool:
    level: list[Any] = [value]
    depth = seen = 0
    while level:
        depth += 1
        if depth > limit:
            return True
        inner: list[Any] = [
            m
            for container in level
            for m in _container_members(container)
            if not isinstance(m, str)
            and isinstance(m, (Mapping, list, tuple))  # most are texts, which is a quick check
        ]
        seen += len(inner)
        if seen > _MAX_NODES:
            return True
        level = inner
    return False


def _container_members(container: Any) -> Collection[Any]:
    return cast("Collection[Any]", container.values() if isinstance(container, Mapping) else container)
