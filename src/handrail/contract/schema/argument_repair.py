"""Arguments that a model sent as JSON text or as null, in the form that the schema asks for. Nothing is guessed.

Several models send ``edits='[{…}]'``, ``offset="2"`` or ``null`` for an optional argument. There is one rule for all tools:

- If the schema accepts no string at a place, and the string there is the JSON text of a value of an accepted type, that
  value is taken.
- If a property may be missing and may not be null, a null is left out.
- If the only argument is an unknown one such as ``arguments``, and its value is the object that the schema asks for, that
  object is taken.

The rule applies only to arguments that do not match the schema, and only if they match after it. The caller says in the
result what was read differently.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, cast

import jsonschema_rs as rs

from handrail.contract.schema.argument_validation import ParametersSchema, format_json_path
from handrail.contract.text.strict_json import InvalidJsonTextError, get_json_type_name, parse_json_object
from handrail.contract.tool.spec import extract_property_schemas

_MAX_ROUNDS = 4
"""A value that was read can contain more such values."""
_MAX_REPAIRS = 100
_MAX_CORRECTIONS = 5
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_MAX_TEXT_BYTES = 256 * 1024
_WRAPPERS = frozenset({"arguments", "args", "parameters", "params", "input", "kwargs"})
ALL_ARGUMENTS = "(all arguments)"
"""The path of a note about the arguments as a whole."""


def repair_arguments(
    schema: ParametersSchema, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return matching arguments, and by path what was read differently; None if the rule does not make them match."""
    try:
        repaired, notes = _repair_in_rounds(schema, arguments)
        return (repaired, notes) if notes and not schema.list_problems(repaired) else None
    except (ValueError, TypeError, RecursionError):  # values of a program's own call that no JSON text could hold
        return None


def list_corrections(schema: ParametersSchema, arguments: Mapping[str, Any], problems: Collection[str]) -> list[str]:
    """Return what to send instead of arguments that :func:`repair_arguments` cannot make match.

    :param problems: the known problems. Those that only the repaired arguments show are returned, too
    """
    try:
        errors = list(islice(schema.iterate_errors_within_budget(dict(arguments)), _MAX_CORRECTIONS))
        found = dict.fromkeys(
            f"`{format_json_path(error.instance_path)}`: {advice}" for error in errors if (advice := _advise(error))
        )
        repaired, notes = _repair_in_rounds(schema, arguments)
        return [*found, *(one for one in (schema.list_problems(repaired) if notes else ()) if one not in problems)]
    except (ValueError, TypeError, RecursionError):
        return []


def _advise(error: rs.ValidationError) -> str:
    accepted, value = _accepted(error), error.instance
    if not accepted or not error.instance_path:
        return ""
    text = value.strip() if isinstance(value, str) else None
    if isinstance(value, bool) and "boolean" in accepted:
        return ""
    if "boolean" in accepted and (value in (0, 1) or (text or "").lower() in _BOOLEAN_WORDS):
        return "send true or false, without quotes"
    if text is not None and "string" not in accepted:
        if (text[:1] == "[" and "array" in accepted) or (text[:1] == "{" and "object" in accepted):
            return "send the value itself, not its text"
        if accepted & {"integer", "number"}:
            return "send a number, without quotes"
    if "array" in accepted and value is not None:
        return "send a list, also for one value"
    if isinstance(value, list) and accepted <= {"string", "integer", "number", "boolean", "null"}:
        return "send one value, not a list"
    if "string" in accepted and isinstance(value, bool | int | float):
        return "send text, in quotes"
    return "send a whole number" if "integer" in accepted and isinstance(value, float) else ""


def _repair_in_rounds(schema: ParametersSchema, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments as far as the rule repairs them, and by path what was read differently."""
    inner = _find_wrapped_arguments(schema, arguments)
    repaired: dict[str, Any] = copy.deepcopy(dict(arguments if inner is None else inner))
    notes: dict[str, str] = {} if inner is None else {ALL_ARGUMENTS: f"the object in `{next(iter(arguments))}`"}
    for _ in range(_MAX_ROUNDS):
        wrong = [(error, _accepted(error)) for error in schema.iterate_errors_within_budget(repaired)]
        if not wrong:
            break
        done = [_repair(repaired, error, accepted, notes) for error, accepted in wrong if len(notes) < _MAX_REPAIRS]
        if not any(done):
            break
    return repaired, notes


def _find_wrapped_arguments(schema: ParametersSchema, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the object in the only argument, if the tool has no argument of its name."""
    name, value = next(iter(arguments.items()), ("", None))
    if len(arguments) != 1 or name not in _WRAPPERS or name in extract_property_schemas(schema.parameters):
        return None
    value = _read_json(value) if isinstance(value, str) else value
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _accepted(error: rs.ValidationError) -> frozenset[str]:
    """Return the types that are accepted at the place of an error; empty if its value is not repaired."""
    kinds = rs.ValidationErrorKind
    match error.kind:
        case kinds.Type(types=types):
            return frozenset(types)
        case kinds.AnyOf(context=branches) | kinds.OneOfNotValid(context=branches):
            return _accepted_by_branches(error, branches)
        case kinds.Enum(options=options):
            return frozenset(get_json_type_name(option) for option in options)
        case kinds.Constant(expected_value=value):
            return frozenset((get_json_type_name(value),))
        case _:
            return frozenset()


def _accepted_by_branches(
    whole: rs.ValidationError, branches: Sequence[Sequence[rs.ValidationError]]
) -> frozenset[str]:
    """Return the types that the alternatives accept at the place of the whole; empty if one fails for another reason."""
    found: set[str] = set()
    for branch in branches:
        types = [_accepted(error) for error in branch if error.instance_path == whole.instance_path]
        if not types or not all(types):
            return frozenset()
        found.update(one for one in types[0] if all(one in others for others in types))
    return frozenset(found)


def _repair(
    arguments: dict[str, Any], error: rs.ValidationError, accepted: frozenset[str], notes: dict[str, str]
) -> bool:
    """Change the value at the place of an error by the rule, and return whether that was possible."""
    if not (path := error.instance_path):
        return False
    *parents, last = path
    holder: Any = arguments
    try:
        for part in parents:
            holder = holder[part]
        value = holder[last]
    except (LookupError, TypeError):  # a schema may report one place twice, and the first repair has changed it
        return False
    shown = format_json_path(path)
    is_declared = ("properties", last) in pairwise(error.schema_path)  # a key of a map is not a property
    if value is None and isinstance(last, str) and is_declared and accepted and "null" not in accepted:
        del cast("dict[str, Any]", holder)[last]
        notes[shown] = "null, left out"
        return True
    if not isinstance(value, str) or not accepted or "string" in accepted:
        return False
    read = _read_json(value)
    kind = get_json_type_name(read)
    if kind == "number" and "number" not in accepted and read.is_integer():
        kind = "integer"
    if read is None or not (kind in accepted or (kind == "integer" and "number" in accepted)):
        return False
    holder[last] = read
    notes[shown] = f"JSON text, read as {kind}"
    return True


def _read_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is null or not JSON."""
    try:
        read = parse_json_object(f'{{"value":{text}}}', max_bytes=_MAX_TEXT_BYTES, raw_controls=True)
    except InvalidJsonTextError:
        return None
    return read["value"] if read.keys() == {"value"} else None
