"""Where a schema asks for integers, and values with their whole numbers as such: JSON Schema counts ``1.0`` as one, Python
does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic_core import to_json

from handrail.contract.tool.spec import branches_of, properties_of, values_of

_EXACT = 2.0**53
"""Below it a float is the whole number that was written."""


def places_of_integers(parameters: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The arguments that may be integers, and those that may hold some; None for the latter: any may."""
    if not _speaks_of(parameters, b'"integer"'):
        return (), ()
    integers: list[str] = []
    within: list[str] = []
    for name, told in properties_of(parameters).items():
        refers = _speaks_of(told, b'ef":')  # $ref, $dynamicRef: to what is looked up nowhere here
        kinds = {
            kind
            for one in (told, *branches_of(told))
            for kind in (one.get("type"), *values_of(one.get("type")))
            if isinstance(kind, str)
        }
        if refers or ("integer" in kinds and "number" not in kinds):
            integers.append(name)
        if refers or any(_speaks_of(one, b'"integer"') for one in _parts(told)):
            within.append(name)
    beside = {key: value for key, value in parameters.items() if key not in ("properties", "$defs", "definitions")}
    anywhere = _speaks_of(beside, b'"integer"') or _speaks_of(beside, b'ef":')
    return tuple(integers), None if anywhere else tuple(within)


def _speaks_of(schema: object, what: bytes) -> bool:
    return what in to_json(schema, fallback=dict)


def _parts(told: Mapping[str, Any]) -> Iterator[object]:
    """What a schema says of the inside of a value, not of the value itself."""
    for one in (told, *branches_of(told)):
        yield {key: value for key, value in one.items() if key not in ("type", "anyOf", "oneOf", "allOf")}


def counted(value: Any) -> Any:
    """``value`` with its whole numbers as ``int``, as far as every reader of JSON takes one for the other; itself where that
    is how it is."""
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        made = {key: counted(one) for key, one in given.items()}
        return made if any(made[key] is not one for key, one in given.items()) else given
    if isinstance(value, (list, tuple)):
        held = cast("Sequence[Any]", value)
        several = [counted(one) for one in held]
        return several if any(new is not old for new, old in zip(several, held, strict=True)) else held
    return value
