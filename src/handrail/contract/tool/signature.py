"""A function's signature as a JSON Schema, and how its arguments are built from JSON."""

from __future__ import annotations

import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, cast

import pydantic
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import UsageError

_SCALARS = frozenset({str, int, float, bool, type(None), object, Any})
_CONTAINERS = frozenset({list, dict, Sequence, Mapping})
_PLACES_OF_MANY = ("properties", "$defs", "patternProperties")
_PLACES_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


@dataclass(frozen=True, slots=True)
class Parameters:
    """What ``@tool`` needs to know of a signature.

    :param adapters: the arguments that are not plain JSON in Python, and what builds them
    """

    schema: Mapping[str, Any]
    runtime_name: str | None
    adapters: Mapping[str, pydantic.TypeAdapter[Any]]


class _WithoutTitles(GenerateJsonSchema):
    """A title that repeats a field's name costs tokens and says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def parameters_of(
    function: Callable[..., Any],
    shown: str,
    descriptions: Mapping[str, str],
    declared: Mapping[str, Any] | None,
    names: Mapping[str, Any],
) -> Parameters:
    """Read ``function``'s signature.

    :param shown: the function's name for messages
    :param descriptions: parameter name to text
    :param declared: a schema that the author wrote by hand; the signature must then take what it describes
    :param names: what the annotations may refer to beside the function's own globals
    :raises UsageError: when a parameter cannot come from a JSON object; the text says what to write
    """
    taken: dict[str, inspect.Parameter] = {}
    annotations: dict[str, Any] = {}
    runtime_name: str | None = None
    for name, parameter in inspect.signature(function).parameters.items():
        _check_kind(parameter, shown)
        annotation = _resolved(function, parameter, shown, names)
        if annotation is Runtime or name == "runtime":
            if runtime_name is not None:
                raise UsageError(f"@tool on {shown}: {runtime_name!r} and {name!r} both take the runtime; keep one")
            runtime_name = name
            continue
        if annotation is inspect.Parameter.empty:
            if declared is None:
                raise UsageError(
                    f"@tool on {shown}: parameter {name!r} has no type annotation; annotate it or give parameters={{…}}"
                )
            annotation = Any
        taken[name], annotations[name] = parameter, annotation
    adapters = {name: _adapter(annotation, name, shown) for name, annotation in annotations.items()}
    if declared is None:
        schema = _schema(taken, adapters, descriptions, shown)
    else:
        _check_declared(declared, taken, shown)
        schema = declared
    return Parameters(
        schema,
        runtime_name,
        {name: adapter for name, adapter in adapters.items() if not _is_plain(annotations[name])},
    )


def underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it was written, beneath ``functools.partial``, methods and ``functools.wraps``."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return inspect.unwrap(getattr(function, "__func__", function))


def _check_kind(parameter: inspect.Parameter, shown: str) -> None:
    name = parameter.name
    match parameter.kind:
        case inspect.Parameter.POSITIONAL_ONLY:
            raise UsageError(
                f"@tool on {shown}: {name!r} is positional-only, and arguments come by name; remove the '/'"
            )
        case inspect.Parameter.VAR_POSITIONAL:
            raise UsageError(
                f"@tool on {shown}: *{name} cannot come from a JSON object; take a list: {name}: list[str]"
            )
        case inspect.Parameter.VAR_KEYWORD:
            raise UsageError(
                f"@tool on {shown}: **{name} hides what the tool takes; name each parameter, or take {name}: dict[str, str]"
            )
        case _:
            if isinstance(parameter.default, FieldInfo):
                raise UsageError(
                    f"@tool on {shown}: {name!r} has Field(…) as its default; "
                    f"write {name}: Annotated[…, Field(…)], and '= default' after it"
                )


def _resolved(function: Callable[..., Any], parameter: inspect.Parameter, shown: str, names: Mapping[str, Any]) -> Any:
    annotation: Any = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={parameter.name: annotation})
    owner = underlying(function)
    namespace: dict[str, Any] = getattr(owner, "__globals__", None) or getattr(owner.__call__, "__globals__", {})
    try:
        return typing.get_type_hints(holder, namespace, {**names}, include_extras=True)[parameter.name]
    except Exception as error:
        if annotation.rpartition(".")[2] == "Runtime":  # imported for type checkers only
            return Runtime
        raise UsageError(
            f"@tool on {shown}: the annotation {annotation!r} of {parameter.name!r} cannot be resolved ({error}); "
            "import or define what it names before the function, not only under TYPE_CHECKING"
        ) from None


def _adapter(annotation: Any, name: str, shown: str) -> pydantic.TypeAdapter[Any]:
    try:
        return pydantic.TypeAdapter(annotation)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"@tool on {shown}: parameter {name!r} has a type that cannot come from JSON ({reason}); "
            "use JSON types, a pydantic model or a dataclass"
        ) from None


def _schema(
    taken: Mapping[str, inspect.Parameter],
    adapters: Mapping[str, pydantic.TypeAdapter[Any]],
    descriptions: Mapping[str, str],
    shown: str,
) -> dict[str, Any]:
    try:
        generated, shared = pydantic.TypeAdapter.json_schemas(
            [(name, "validation", adapter) for name, adapter in adapters.items()], schema_generator=_WithoutTitles
        )
    except pydantic.errors.PydanticUserError as error:
        raise UsageError(
            f"@tool on {shown}: a parameter has no JSON form ({str(error).splitlines()[0]}); give parameters={{…}}"
        ) from None
    properties: dict[str, Any] = {}
    for name, parameter in taken.items():
        schema = dict(generated[name, "validation"])
        if name in descriptions:
            schema.setdefault("description", descriptions[name])
        default: Any = parameter.default
        if default is not inspect.Parameter.empty and default is not None:
            try:
                schema.setdefault("default", adapters[name].dump_python(default, mode="json", warnings="error"))
            except ValueError:  # a default that has no JSON form works all the same; it is not shown
                schema.pop("default", None)
        properties[name] = schema
    whole: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": [name for name, p in taken.items() if p.default is inspect.Parameter.empty],
        "additionalProperties": False,
    }
    if shared.get("$defs"):
        whole["$defs"] = shared["$defs"]
    _close(whole)
    return whole


def _close(schema: object) -> None:
    """Forbid unknown keys in every model and dataclass that does not allow them: none is silently ignored."""
    if not isinstance(schema, dict):
        return
    node = cast("dict[str, Any]", schema)
    if "properties" in node:
        node.setdefault("additionalProperties", False)
    for place in _PLACES_OF_MANY:
        for inner in cast("dict[str, object]", node.get(place, {})).values():
            _close(inner)
    for place in _PLACES_OF_LISTS:
        for inner in cast("list[object]", node.get(place, [])):
            _close(inner)
    _close(node.get("items"))
    _close(node.get("additionalProperties"))


def _check_declared(declared: Mapping[str, Any], taken: Mapping[str, inspect.Parameter], shown: str) -> None:
    described: Any = declared.get("properties", {})
    described = set(cast("Mapping[str, Any]", described)) if isinstance(described, Mapping) else set[str]()
    required: Any = declared.get("required", ())
    for name in described - set(taken):
        raise UsageError(f"@tool on {shown}: parameters describes {name!r}, which the function does not take")
    for name, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and (name not in described or name not in required):
            raise UsageError(
                f"@tool on {shown}: the function needs {name!r}; list it under required in parameters, or give it a default"
            )
    if declared.get("additionalProperties"):
        raise UsageError(
            f"@tool on {shown}: parameters allows further arguments, which a function cannot take; derive from Tool instead"
        )


def _is_plain(annotation: Any) -> bool:
    """Whether JSON's own Python values are already what the annotation asks for."""
    try:
        if annotation in _SCALARS or annotation in _CONTAINERS:
            return True
    except TypeError:  # not hashable
        return False
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _is_plain(inner[0]) and all(isinstance(m, (str, FieldInfo)) for m in inner[1:])
    if origin is Literal:
        return not any(isinstance(value, (enum.Enum, bytes)) for value in inner)
    if origin is Union or origin is types.UnionType or origin in _CONTAINERS:
        return all(_is_plain(part) for part in inner)
    return False
