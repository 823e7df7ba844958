"""``@tool``: a typed Python function with a docstring becomes a tool.

Parameters come from the signature, their descriptions from the docstring, and the runtime view from the decorator's
options. A call's arguments have passed the schema before they arrive here. Plain JSON types reach the function unchanged;
models, dataclasses, enums, dates and the like are built strictly from the checked JSON. A parameter annotated ``Runtime``
(or named ``runtime``) receives the call's runtime and is not an argument.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Union, Unpack, cast, overload

import pydantic
import pydantic_core
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.manifest import find_model_validation_faults
from handrail.contract.tool.requires import NO_REQUIREMENTS, Requires
from handrail.contract.tool.spec import (
    CallMode,
    ConfigKey,
    LockSpec,
    OutputExposure,
    PromptOrder,
    SideEffect,
    TargetTemplates,
    ToolKind,
    ToolSpec,
)
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.contract.tool.tool_protocol import Tool

# Parameters: a function's signature as a JSON Schema, and the conversion of JSON to its arguments.

_SCALARS = frozenset({str, int, float, bool, type(None), object, Any})
_CONTAINERS = frozenset({list, dict, Sequence, Mapping})
_PLACES_OF_MANY = ("properties", "$defs", "patternProperties")
_PLACES_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


class FunctionParameters(Struct, frozen=True):
    """The parameters of a function, as ``@tool`` uses them.

    :param adapters: the arguments that are not plain JSON in Python, each with the adapter that builds it
    """

    schema: Mapping[str, Any]
    runtime_name: str | None
    adapters: Mapping[str, pydantic.TypeAdapter[Any]]


class _UntitledSchemaGenerator(GenerateJsonSchema):
    """A schema generator without titles: a title that repeats a field's name costs tokens and says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def inspect_function_parameters(
    function: Callable[..., Any],
    shown: str,
    descriptions: Mapping[str, str],
    declared: Mapping[str, Any] | None,
    names: Mapping[str, Any],
) -> FunctionParameters:
    """Read the signature of ``function``.

    :param shown: the function's name for messages
    :param descriptions: parameter name to text
    :param declared: a schema that the author wrote; the signature must accept what it describes
    :param names: names for the annotations, in addition to the function's globals
    :raises UsageError: if a parameter cannot come from a JSON object; the text says what to write
    """
    taken: dict[str, inspect.Parameter] = {}
    annotations: dict[str, Any] = {}
    runtime_name: str | None = None
    for name, parameter in inspect.signature(function).parameters.items():
        _check_kind(parameter, shown)
        annotation = _resolve_annotation(function, parameter, shown, names)
        if annotation is Runtime or name == "runtime":
            if runtime_name is not None:
                raise UsageError(
                    f"Cannot make `{shown}` a tool: {runtime_name!r} and {name!r} both take the runtime. Keep one."
                )
            runtime_name = name
            continue
        if annotation is inspect.Parameter.empty:
            if declared is None:
                raise UsageError(
                    f"Cannot make `{shown}` a tool: parameter {name!r} has no type annotation. Annotate it, or pass parameters={{…}}."
                )
            annotation = Any
        taken[name], annotations[name] = parameter, annotation
    adapters = {name: _adapter(annotation, name, shown) for name, annotation in annotations.items()}
    if declared is None:
        schema = _schema(taken, annotations, adapters, descriptions, shown)
    else:
        _check_declared(declared, taken, shown)
        schema = declared
    return FunctionParameters(
        schema,
        runtime_name,
        {name: adapter for name, adapter in adapters.items() if not _needs_no_conversion(annotations[name])},
    )


def unwrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below ``functools.partial``, methods and ``functools.wraps``."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return inspect.unwrap(getattr(function, "__func__", function))


def _check_kind(parameter: inspect.Parameter, shown: str) -> None:
    name = parameter.name
    match parameter.kind:
        case inspect.Parameter.POSITIONAL_ONLY:
            raise UsageError(
                f"Cannot make `{shown}` a tool: parameter {name!r} is positional-only, but arguments are passed by name. Remove the '/'."
            )
        case inspect.Parameter.VAR_POSITIONAL:
            raise UsageError(
                f"Cannot make `{shown}` a tool: *{name} cannot come from a JSON object. Use a list, such as {name}: list[str]."
            )
        case inspect.Parameter.VAR_KEYWORD:
            raise UsageError(
                f"Cannot make `{shown}` a tool: **{name} hides the parameters of the tool. Name each parameter, or use {name}: dict[str, str]."
            )
        case _:
            if isinstance(parameter.default, FieldInfo):
                raise UsageError(
                    f"Cannot make `{shown}` a tool: parameter {name!r} has Field(…) as its default. "
                    f"Write {name}: Annotated[…, Field(…)], followed by '= default'."
                )


def _resolve_annotation(
    function: Callable[..., Any], parameter: inspect.Parameter, shown: str, names: Mapping[str, Any]
) -> Any:
    annotation: Any = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={parameter.name: annotation})
    owner = unwrap_function(function)
    namespace: dict[str, Any] = getattr(owner, "__globals__", None) or getattr(owner.__call__, "__globals__", {})
    try:
        return typing.get_type_hints(holder, namespace, {**names}, include_extras=True)[parameter.name]
    except Exception as error:
        if annotation.rpartition(".")[2] == "Runtime":  # imported for type checkers only
            return Runtime
        raise UsageError(
            f"Cannot make `{shown}` a tool: the annotation {annotation!r} of {parameter.name!r} cannot be resolved ({error}). "
            "Import or define the name before the function, not only under TYPE_CHECKING."
        ) from None


def _adapter(annotation: Any, name: str, shown: str) -> pydantic.TypeAdapter[Any]:
    try:
        return _shared_adapter(annotation) if _is_plain(annotation) else pydantic.TypeAdapter(annotation)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"Cannot make `{shown}` a tool: parameter {name!r} has a type that cannot come from JSON ({reason}). "
            "Use JSON types, a pydantic model or a dataclass."
        ) from None


def _is_plain(annotation: Any) -> bool:
    """Return whether an annotation is a scalar, or a list, dict or optional of one, so that equal ones are alike.

    The types of an equal union may have another order, which its schema shows. So only one type next to None is plain.
    """
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation in _PLAIN_TYPES
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is list or typing.get_origin(annotation) is dict:
        return all(one in _PLAIN_TYPES for one in inner)
    is_union = isinstance(annotation, types.UnionType)
    return is_union and len(inner) == 2 and inner[1] is type(None) and _is_plain(inner[0])


_PLAIN_TYPES = (str, int, float, bool, list, dict)


@functools.lru_cache(maxsize=256)
def _shared_adapter(annotation: Any) -> pydantic.TypeAdapter[Any]:
    """Return the adapter of a plain annotation, which all tools share. To make one takes longer than all else."""
    return pydantic.TypeAdapter(annotation)


@functools.lru_cache(maxsize=256)
def _shared_schema(annotation: Any) -> Mapping[str, Any]:
    """Return the schema of a plain annotation, which all tools share."""
    adapter = _shared_adapter(annotation)
    _, generated = next(iter(_generate_schemas({"value": adapter})[0].items()))
    return generated


def _generate_schemas(adapters: Mapping[str, pydantic.TypeAdapter[Any]]) -> tuple[dict[Any, Any], dict[str, Any]]:
    return pydantic.TypeAdapter.json_schemas(
        [(name, "validation", adapter) for name, adapter in adapters.items()], schema_generator=_UntitledSchemaGenerator
    )


def _schema(
    taken: Mapping[str, inspect.Parameter],
    annotations: Mapping[str, Any],
    adapters: Mapping[str, pydantic.TypeAdapter[Any]],
    descriptions: Mapping[str, str],
    shown: str,
) -> dict[str, Any]:
    plain = {name for name, annotation in annotations.items() if _is_plain(annotation)}
    others = {name: adapter for name, adapter in adapters.items() if name not in plain}
    try:
        generated, shared = _generate_schemas(others) if others else ({}, {})
    except pydantic.errors.PydanticUserError as error:
        raise UsageError(
            f"Cannot make `{shown}` a tool: a parameter has no JSON form ({str(error).splitlines()[0]}). Pass parameters={{…}}."
        ) from None
    properties: dict[str, Any] = {}
    for name, parameter in taken.items():
        schema = dict(_shared_schema(annotations[name]) if name in plain else generated[name, "validation"])
        if name in descriptions:
            schema.setdefault("description", descriptions[name])
        default: Any = parameter.default
        if type(default) is annotations[name] and type(default) in (str, int, bool):
            schema.setdefault("default", default)
        elif default is not inspect.Parameter.empty and default is not None:
            try:
                schema.setdefault("default", adapters[name].dump_python(default, mode="json", warnings="error"))
            except ValueError:  # a default without a JSON form works, but is not shown
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
    if others:
        _forbid_unknown_keys(whole)
    return whole


def _forbid_unknown_keys(schema: object) -> None:
    """Forbid unknown keys in every model and dataclass that does not allow them, so that none is ignored."""
    if not isinstance(schema, dict):
        return
    node = cast("dict[str, Any]", schema)
    if "properties" in node:
        node.setdefault("additionalProperties", False)
    for place in _PLACES_OF_MANY:
        for inner in cast("dict[str, object]", node.get(place, {})).values():
            _forbid_unknown_keys(inner)
    for place in _PLACES_OF_LISTS:
        for inner in cast("list[object]", node.get(place, [])):
            _forbid_unknown_keys(inner)
    _forbid_unknown_keys(node.get("items"))
    _forbid_unknown_keys(node.get("additionalProperties"))


def _check_declared(declared: Mapping[str, Any], taken: Mapping[str, inspect.Parameter], shown: str) -> None:
    described: Any = declared.get("properties", {})
    described = set(cast("Mapping[str, Any]", described)) if isinstance(described, Mapping) else set[str]()
    required: Any = declared.get("required", ())
    for name in described - set(taken):
        raise UsageError(
            f"Cannot make `{shown}` a tool: `parameters` describes {name!r}, which is not a parameter of the function. Remove it, or add the parameter."
        )
    for name, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and (name not in described or name not in required):
            raise UsageError(
                f"Cannot make `{shown}` a tool: the function needs {name!r}. List it under `required` in `parameters`, or give it a default."
            )
    if declared.get("additionalProperties"):
        raise UsageError(
            f"Cannot make `{shown}` a tool: `parameters` allows further arguments, which a function cannot accept. Write a subclass of Tool instead."
        )


def _needs_no_conversion(annotation: Any) -> bool:
    """Return whether JSON's own Python values already match the annotation."""
    try:
        if annotation in _SCALARS or annotation in _CONTAINERS:
            return True
    except TypeError:  # not hashable
        return False
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _needs_no_conversion(inner[0]) and all(isinstance(m, (str, FieldInfo)) for m in inner[1:])
    if origin is Literal:
        return not any(isinstance(value, (enum.Enum, bytes)) for value in inner)
    if origin is Union or origin is types.UnionType or origin in _CONTAINERS:
        return all(_needs_no_conversion(part) for part in inner)
    return False


# Docstrings: the description of a function and of its parameters, in Google or reST form.

_SECTION = compile_regex_lazily(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?):\s*\Z"
)
_ARGUMENT_SECTIONS = frozenset({"Args", "Arguments", "Parameters", "Params"})
_GOOGLE = compile_regex_lazily(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)\Z")
_REST = compile_regex_lazily(r":(\w+)\b([^:]*):\s*(.*)\Z")


class ParsedDocstring(Struct, frozen=True):
    """A parsed docstring: the first paragraph in one line, the prose after it, and texts by parameter."""

    summary: str
    body: str
    parameters: Mapping[str, str]


def parse_docstring(text: str | None) -> ParsedDocstring:
    """Parse a docstring. Sections and fields other than those of parameters are left out."""
    lines = inspect.cleandoc(text or "").splitlines()
    prose: list[str] = []
    found: dict[str, list[str]] = {}
    section: str | None = None  # inside "Args:" and the like, whose lines are indented
    entry: list[str] | None = None  # what a further-indented line continues
    entry_indent = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not (bare := line.strip()):
            if section is None:
                entry = None
                prose.append("")
            continue
        if entry is not None and indent > entry_indent:
            entry.append(bare)
            continue
        if match := _SECTION.match(line):
            section, entry = match.group(1), None
            continue
        if match := _REST.match(bare):
            section, entry_indent = None, indent
            name = _documented_parameter(match)
            entry = [] if name is None else found.setdefault(name, [])
            entry.append(match.group(3))
            continue
        if section is not None and indent > 0:
            if (match := _GOOGLE.match(bare)) and section in _ARGUMENT_SECTIONS:
                entry, entry_indent = found.setdefault(match.group(1), []), indent
                entry.append(match.group(2))
            continue
        section, entry = None, None
        prose.append(line.rstrip())
    return _build_docstring(prose, found)


def _documented_parameter(field: re.Match[str]) -> str | None:
    """Return the parameter of a field such as ``:param int limit:``; None for any other field."""
    words = field.group(2).split()
    return words[-1] if words and field.group(1) in ("param", "parameter", "arg", "argument") else None


def _build_docstring(prose: Sequence[str], parameters: Mapping[str, Sequence[str]]) -> ParsedDocstring:
    summary, _, body = "\n".join(prose).strip().partition("\n\n")
    return ParsedDocstring(
        " ".join(summary.split()), body.strip(), {name: " ".join(text).strip() for name, text in parameters.items()}
    )


P = ParamSpec("P")
R = TypeVar("R")

_VERBATIM_OPTIONS = frozenset({dict, list, str, int, float, bool, type(None), Result, Blob})


class ToolDecoratorOptions(TypedDict, total=False):
    """The options of ``@tool``; :class:`ToolSpec` defines their meanings.

    ``id`` defaults to the function's name, ``description`` to the docstring's first paragraph, ``documentation`` to
    the prose after it, ``parameters`` to the signature.
    """

    id: str
    description: str
    parameters: Mapping[str, Any]
    requires: Requires | Mapping[str, Any]
    side_effect: SideEffect
    locks: Sequence[str | LockSpec]
    targets: TargetTemplates
    timeout_ms: int
    timeout_argument: str
    idempotent: bool
    mode: CallMode
    step_parameters: Mapping[str, Any]
    background_argument: str
    concurrency_safe: bool
    promotable: bool
    locks_background: Sequence[str | LockSpec]
    secrets: Sequence[str]
    output_schema: Mapping[str, Any]
    config: Mapping[str, ConfigKey]
    max_output: int
    max_entries: int | None
    exposure: OutputExposure
    prompt_mask: bool
    version: str
    category: str | None
    tier: str | None
    kind: ToolKind
    guidance: str
    guidance_order: PromptOrder
    documentation: str
    documentation_required: bool


class FunctionTool(Tool, Generic[P, R]):
    """A function as a tool. Calling it still calls the function, with Python's own rules.

    :ivar blocking: whether it is a plain function: :meth:`execute` runs it in a thread, which continues after a
        cancellation until the function returns
    :ivar takes_runtime: whether it has a parameter for the runtime
    """

    def __init__(self, function: Callable[P, R], spec: ToolSpec, parameters: FunctionParameters) -> None:
        self.spec = spec
        self.function = function
        self.blocking = not _is_async(function)
        self._target = cast("Callable[..., Any]", function)
        self._runtime_name = parameters.runtime_name
        self.takes_runtime = parameters.runtime_name is not None
        self._adapters = parameters.adapters
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.spec.id}>"

    def check(self, args: dict[str, Any]) -> None:
        if self._adapters:
            self._build_arguments(args)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if self.blocking:
            return await asyncio.to_thread(self.run_in_current_thread, args, runtime)
        return self.convert_return_value_to_json(await self.start_call(args, runtime))

    def start_call(self, args: dict[str, Any], runtime: Runtime | None) -> Coroutine[Any, Any, Any]:
        """Return the function's coroutine, for callers that await it and pass its value to :meth:`convert_return_value_to_json`.

        Not for a :attr:`blocking` function.

        :param runtime: may be None unless :attr:`takes_runtime`
        """
        return self._target(**self._prepare_call(args, runtime))

    def convert_return_value_to_json(self, returned: object) -> object:
        """Convert the function's return value to JSON values."""
        return returned if type(returned) in _VERBATIM_OPTIONS else _jsonable(returned, self.spec.id)

    def run_in_current_thread(self, args: dict[str, Any], runtime: Runtime | None) -> object:
        """Run the whole call in the current thread, for callers with their own threads.

        Only for a :attr:`blocking` function.
        """
        return self.convert_return_value_to_json(self._target(**self._prepare_call(args, runtime)))

    def _prepare_call(self, args: dict[str, Any], runtime: Runtime | None) -> dict[str, Any]:
        if self._adapters:
            args = self._build_arguments(args)
        return args if self._runtime_name is None else {**args, self._runtime_name: runtime}

    def _build_arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        built = args
        problems: list[str] = []
        for name, adapter in self._adapters.items():
            if name not in args:
                continue
            try:
                value = adapter.validate_json(json.dumps(args[name]), strict=True)
            except pydantic.ValidationError as error:
                problems += [
                    f"{format_json_path((name, *fault['loc']))}: {fault['msg']}"
                    for fault in error.errors(include_input=False)
                ]
            else:
                built = {**built, name: value}
        if problems:
            raise ToolError("; ".join(problems[:20]), kind="invalid_input")
        return built


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(**options: Unpack[ToolDecoratorOptions]) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolDecoratorOptions]) -> Any:
    """Make a tool of a typed function, bare (``@tool``) or with options (``@tool(side_effect="read")``).

    :raises UsageError: when the function or an option cannot be used; the text says what to write instead
    """
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    if function is not None:
        return _make_tool(function, options, caller.f_locals if caller else {})

    def decorate(decorated: Callable[..., Any]) -> FunctionTool[..., Any]:
        here = inspect.currentframe()
        outer = here.f_back if here else None
        return _make_tool(decorated, options, outer.f_locals if outer else {})

    return decorate


def _make_tool(
    function: Callable[..., Any], options: ToolDecoratorOptions, names: Mapping[str, Any]
) -> FunctionTool[..., Any]:
    if not callable(function) or inspect.isclass(function):
        raise UsageError(
            f"Cannot make {function!r} a tool: @tool is for functions. Make a class a subclass of handrail.Tool."
        )
    shown = getattr(function, "__qualname__", repr(function))
    for option in options:
        if option not in ToolDecoratorOptions.__annotations__:
            close = nearest_names(option, ToolDecoratorOptions.__annotations__)
            hint = (
                f"Did you mean {close[0]!r}?"
                if close
                else f"Options: {', '.join(ToolDecoratorOptions.__annotations__)}."
            )
            raise UsageError(f"Cannot make `{shown}` a tool: unknown option {option!r}. {hint}")
    _check_steps(function, shown, stateful=options.get("mode") == "stateful")
    documented = parse_docstring(unwrap_function(function).__doc__)
    description = options.get("description") or documented.summary
    if not description:
        raise UsageError(
            f"Cannot make `{shown}` a tool: the docstring is missing. Write one: its first paragraph is the description for the model."
        )
    tool_id = options.get("id") or getattr(function, "__name__", "")
    if not tool_id or tool_id == "<lambda>":
        raise UsageError(f"Cannot make `{shown}` a tool: the function has no name. Write @tool(id=…).")
    parameters = inspect_function_parameters(function, shown, documented.parameters, options.get("parameters"), names)
    given = {name: value for name, value in options.items() if name in _PLAIN_OPTIONS}
    spec = ToolSpec(
        id=tool_id,
        description=description,
        parameters=parameters.schema,
        requires=_requires(options.get("requires"), shown),
        locks=_locks(options["locks"], shown) if "locks" in options else None,
        locks_background=_locks(options.get("locks_background", ()), shown),
        secrets=_names(options.get("secrets", ()), shown),
        documentation=options.get("documentation", documented.body),
        **cast("dict[str, Any]", given),
    )
    return FunctionTool(function, spec, parameters)


_PLAIN_OPTIONS = frozenset(ToolDecoratorOptions.__annotations__) - {
    "id",
    "description",
    "parameters",
    "requires",
    "locks",
    "locks_background",
    "secrets",
    "documentation",
}


def _requires(given: Requires | Mapping[str, Any] | None, shown: str) -> Requires:
    if given is None or isinstance(given, Requires):
        return given or NO_REQUIREMENTS
    try:
        return Requires.model_validate(given)
    except pydantic.ValidationError as error:
        try:
            found = find_model_validation_faults(Requires, given)
        except TypeError:  # it contains a value that is not JSON
            found = {format_json_path(f["loc"]): f["msg"] for f in error.errors(include_input=False)}
        faults = "; ".join(f"{place}: {problem}".removeprefix(": ") for place, problem in found.items())
        raise UsageError(f"Cannot make `{shown}` a tool: `requires` is invalid: {faults}. Correct it.") from None


def _locks(given: Sequence[str | LockSpec], shown: str) -> tuple[LockSpec, ...]:
    if isinstance(given, str):
        raise UsageError(f"Cannot make `{shown}` a tool: `locks` must be a list. Write [{given!r}].")
    try:
        return tuple(lock if isinstance(lock, LockSpec) else LockSpec.parse(lock) for lock in given)
    except ValueError as error:
        raise UsageError(f"Cannot make `{shown}` a tool: {error}") from None


def _names(given: Sequence[str], shown: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"Cannot make `{shown}` a tool: `secrets` must be a list of names. Write [{given!r}].")
    return tuple(given)


def _check_steps(function: Callable[..., Any], shown: str, *, stateful: bool) -> None:
    if stateful and not _is_async_generator(function):
        raise UsageError(
            f"Cannot make `{shown}` a tool: a stateful tool must yield its steps. Write it as async def, with yield."
        )
    if not stateful and (_is_async_generator(function) or inspect.isgeneratorfunction(function)):
        raise UsageError(
            f"Cannot make `{shown}` a tool: a function with yield is a stateful tool. Return one value and use runtime.progress(), or set "
            'mode="stateful" if each step is a separate call.'
        )


def _is_async_generator(function: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(type(function).__call__)


def _is_async(function: Callable[..., Any]) -> bool:
    by_call = type(function).__call__
    return (
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(by_call) or _is_async_generator(function)
    )


def is_generator_tool(tool: Tool) -> bool:
    """Return whether the tool is an async generator, which :func:`iterate_generator_steps` iterates."""
    return _is_async_generator(tool.function if isinstance(tool, FunctionTool) else tool.execute)


def iterate_generator_steps(tool: Tool, arguments: dict[str, Any], runtime: Runtime) -> AsyncGenerator[object, Any]:
    """Return the steps of one call of a tool that :func:`is_generator_tool`. None of it has run yet."""
    begun: Any = (
        tool.start_call(arguments, runtime) if isinstance(tool, FunctionTool) else tool.execute(arguments, runtime)
    )
    return begun


def _jsonable(value: object, tool_id: str) -> object:
    if isinstance(value, (Result, Blob, dict, list, str)):
        return cast("object", value)
    try:
        return pydantic_core.to_jsonable_python(value)
    except (pydantic_core.PydanticSerializationError, ValueError) as error:
        if inspect.iscoroutine(value):
            value.close()
            raise ToolError(
                f"{tool_id} returned a coroutine of {value.__qualname__} that was not awaited. Ask the user to add await to the tool.",
                kind="backend",
            ) from None
        raise ToolError(
            f"{tool_id} returned a value that is not JSON: {type(value).__name__} ({error}). Ask the user to fix the tool.",
            kind="backend",
        ) from None
