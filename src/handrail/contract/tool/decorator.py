"""``@tool``: a typed Python function with a docstring becomes a tool.

Parameters come from the signature, their descriptions from the docstring, and everything of the runtime
view from the decorator's options. A call's arguments have passed the schema before they arrive here, so
plain JSON types go to the function as they are; models, dataclasses, enums, dates and the like are built
from the checked JSON, strictly. A parameter annotated ``Runtime`` (or named ``runtime``) is handed the
call's runtime and is no argument.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

import pydantic
import pydantic_core

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.result import Blob, Result
from handrail.contract.schema.schema import path_text
from handrail.contract.tool.checked import faults_of
from handrail.contract.tool.docstring import read_docstring
from handrail.contract.tool.names import nearest
from handrail.contract.tool.requires import NOTHING, Requires
from handrail.contract.tool.signature import Parameters, parameters_of, underlying
from handrail.contract.tool.spec import Bucket, ConfigKey, Exposure, Kind, LockSpec, Mode, SideEffect, ToolSpec
from handrail.contract.tool.tool import Tool

P = ParamSpec("P")
R = TypeVar("R")

_AS_THEY_ARE = frozenset({dict, list, str, int, float, bool, type(None), Result, Blob})


class ToolOptions(TypedDict, total=False):
    """Everything that can be said of a function beside its signature; the meanings are :class:`ToolSpec`'s.

    ``id`` defaults to the function's name, ``description`` to the docstring's first paragraph,
    ``documentation`` to the prose after it, ``parameters`` to the signature.
    """

    id: str
    description: str
    parameters: Mapping[str, Any]
    requires: Requires | Mapping[str, Any]
    side_effect: SideEffect
    locks: Sequence[str | LockSpec]
    targets: Mapping[str, str]
    timeout_ms: int
    timeout_argument: str
    idempotent: bool
    mode: Mode
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
    exposure: Exposure
    prompt_mask: bool
    version: str
    category: str | None
    tier: str | None
    kind: Kind
    guidance: str
    guidance_bucket: Bucket
    documentation: str
    manual_first: bool


class FunctionTool(Tool, Generic[P, R]):
    """A function as a tool. Calling it still calls the function, with Python's own rules.

    :ivar blocking: it is a plain function: :meth:`execute` runs it in a thread, which goes on after a
        cancellation until the function returns
    :ivar takes_runtime: it has a parameter for the runtime
    """

    def __init__(self, function: Callable[P, R], spec: ToolSpec, parameters: Parameters) -> None:
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
            self._built(args)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if self.blocking:
            return await asyncio.to_thread(self.run_blocking, args, runtime)
        return self.finished(await self.begun(args, runtime))

    def begun(self, args: dict[str, Any], runtime: Runtime | None) -> Coroutine[Any, Any, Any]:
        """The function's own coroutine, for whoever awaits it themselves and gives what it returns to :meth:`finished`.
        Not if :attr:`blocking`.

        :param runtime: may be None unless :attr:`takes_runtime`
        """
        return self._target(**self._prepared(args, runtime))

    def finished(self, returned: object) -> object:
        """What the function returned, as JSON values."""
        return returned if type(returned) in _AS_THEY_ARE else _jsonable(returned, self.spec.id)

    def run_blocking(self, args: dict[str, Any], runtime: Runtime | None) -> object:
        """The whole call in the current thread, for whoever keeps threads of its own. Only if :attr:`blocking`."""
        return self.finished(self._target(**self._prepared(args, runtime)))

    def _prepared(self, args: dict[str, Any], runtime: Runtime | None) -> dict[str, Any]:
        if self._adapters:
            args = self._built(args)
        return args if self._runtime_name is None else {**args, self._runtime_name: runtime}

    def _built(self, args: dict[str, Any]) -> dict[str, Any]:
        built = args
        problems: list[str] = []
        for name, adapter in self._adapters.items():
            if name not in args:
                continue
            try:
                value = adapter.validate_json(json.dumps(args[name]), strict=True)
            except pydantic.ValidationError as error:
                problems += [
                    f"{path_text((name, *fault['loc']))}: {fault['msg']}" for fault in error.errors(include_input=False)
                ]
            else:
                built = {**built, name: value}
        if problems:
            raise ToolError("; ".join(problems[:20]), kind="invalid_input")
        return built


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Make a tool of a typed function, bare (``@tool``) or with options (``@tool(side_effect="read")``).

    :raises UsageError: when the function or an option cannot be used; the text says what to write instead
    """
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    if function is not None:
        return _made(function, options, caller.f_locals if caller else {})

    def decorate(decorated: Callable[..., Any]) -> FunctionTool[..., Any]:
        here = inspect.currentframe()
        outer = here.f_back if here else None
        return _made(decorated, options, outer.f_locals if outer else {})

    return decorate


def _made(function: Callable[..., Any], options: ToolOptions, names: Mapping[str, Any]) -> FunctionTool[..., Any]:
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"@tool is for functions, not for {function!r}; a class derives from handrail.Tool instead")
    shown = getattr(function, "__qualname__", repr(function))
    for option in options:
        if option not in ToolOptions.__annotations__:
            close = nearest(option, ToolOptions.__annotations__)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(ToolOptions.__annotations__)}"
            raise UsageError(f"@tool on {shown}: unknown option {option!r}; {hint}")
    _check_steps(function, shown, stateful=options.get("mode") == "stateful")
    documented = read_docstring(underlying(function).__doc__)
    description = options.get("description") or documented.summary
    if not description:
        raise UsageError(f"@tool on {shown}: it has no docstring; its first paragraph tells the model when to use it")
    tool_id = options.get("id") or getattr(function, "__name__", "")
    if not tool_id or tool_id == "<lambda>":
        raise UsageError(f"@tool on {shown}: it has no name of its own; give @tool(id=…)")
    parameters = parameters_of(function, shown, documented.parameters, options.get("parameters"), names)
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


_PLAIN_OPTIONS = frozenset(ToolOptions.__annotations__) - {
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
        return given or NOTHING
    try:
        return Requires.model_validate(given)
    except pydantic.ValidationError as error:
        try:
            found = faults_of(Requires, given)
        except TypeError:  # it holds what is no JSON
            found = {path_text(f["loc"]): f["msg"] for f in error.errors(include_input=False)}
        faults = "; ".join(f"{place}: {problem}".removeprefix(": ") for place, problem in found.items())
        raise UsageError(f"@tool on {shown}: requires is not understood: {faults}") from None


def _locks(given: Sequence[str | LockSpec], shown: str) -> tuple[LockSpec, ...]:
    if isinstance(given, str):
        raise UsageError(f"@tool on {shown}: locks are a list; write [{given!r}]")
    try:
        return tuple(lock if isinstance(lock, LockSpec) else LockSpec.parse(lock) for lock in given)
    except ValueError as error:
        raise UsageError(f"@tool on {shown}: {error}") from None


def _names(given: Sequence[str], shown: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"@tool on {shown}: secrets are a list of names; write [{given!r}]")
    return tuple(given)


def _check_steps(function: Callable[..., Any], shown: str, *, stateful: bool) -> None:
    if stateful and not _yields(function):
        raise UsageError(f"@tool on {shown}: a stateful tool yields its steps; write it as async def, with yield")
    if not stateful and (_yields(function) or inspect.isgeneratorfunction(function)):
        raise UsageError(
            f"@tool on {shown}: it yields; return the whole value and report steps by runtime.progress(), or say "
            'mode="stateful" where each step is to be a call of its own'
        )


def _yields(function: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(type(function).__call__)


def _is_async(function: Callable[..., Any]) -> bool:
    by_call = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(by_call) or _yields(function)


def yields(tool: Tool) -> bool:
    """Whether what a tool does is an async generator, to be gone through by :func:`steps_of`."""
    return _yields(tool.function if isinstance(tool, FunctionTool) else tool.execute)


def steps_of(tool: Tool, arguments: dict[str, Any], runtime: Runtime) -> AsyncGenerator[object, Any]:
    """The steps of one call of a tool that :func:`yields`. Nothing of it has run."""
    begun: Any = tool.begun(arguments, runtime) if isinstance(tool, FunctionTool) else tool.execute(arguments, runtime)
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
                f"{tool_id} returned the coroutine of {value.__qualname__} without awaiting it; its author writes await",
                kind="backend",
            ) from None
        raise ToolError(
            f"{tool_id} returned a {type(value).__name__}, which is not JSON: {error}", kind="backend"
        ) from None
