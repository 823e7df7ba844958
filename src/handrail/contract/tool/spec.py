"""The declaration of a tool: the part that a model sees, the part for the runtime, and the checks of both."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args, get_origin, get_type_hints

from pydantic_core import to_json

from handrail.contract.tool.names import fault_in_id, wire_name
from handrail.contract.tool.requires import CAPABILITIES, NOTHING, Requires

# Stateful tools: one call opens a state, later calls take steps of it, and one closes it.
#
# A tool of ``mode="stateful"`` is an async generator. A call of it opens a *state* and is answered with the
# first step. Only the shapes are here, so that tools, the runtime and the arbiter agree on them.

STEP_INPUT = "step_input"
"""The name under which what a step is sent is judged, beside the arguments that the state was opened with."""

StateEnd = Literal["done", "closed", "expired", "failed", "timeout", "cancelled", "suspended", "changed", "interrupted"]
"""How a state ended: it gave its last step; ``tool.close``; no step came in time; a step raised, took too long or was stopped;
its session or kernel ended; its tool is no longer the same; nobody knows, since its process ended."""


@dataclass(frozen=True, slots=True)
class GoesOn:
    """Says that a tool goes on with a state that another call opened. Only built-in tools do.

    :param argument: which of its arguments is the state's id
    :param input: which one the tool is sent; None for one that ends the state
    """

    argument: str
    input: str | None = None


@dataclass(frozen=True, slots=True)
class OfJob:
    """Says that a call is about a job of its session. Only built-in tools do.

    :param argument: which of its arguments is the job's ID
    :param tool_id: the tool whose job it has to be; None for any
    :param running: it has to be running still
    """

    argument: str
    tool_id: str | None = None
    running: bool = False


class Opened(Protocol):
    """What the call of a tool that goes on with a state goes on with. It was judged as a call of the tool that is open."""

    async def step(self) -> object:
        """Send the call's input, and give what its caller is answered.

        :raises ToolError: as the tool raised it; ``conflict`` for a state that has ended
        """
        ...

    async def close(self) -> object:
        """End the state, and give what the caller is answered."""
        ...


SideEffect = Literal["read", "write", "external"]
Mode = Literal["direct", "background", "stateful"]
Exposure = Literal["edge", "core", "both", "none"]
LockMode = Literal["S", "X"]
Kind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "other"]
"""ACP's kinds; they drive icons and diffs in editors."""
Bucket = Literal["first", "normal", "last"]
"""Where a tool's guidance stands among that of the others."""
Cancellable = Literal["cooperative", "process"]

DEFAULT_TIMEOUT_MS = 60_000
DEFAULT_BUILD_TIMEOUT_MS = 600_000
MAX_BUILD_TIMEOUT_MS = 3_600_000
DEFAULT_MAX_OUTPUT = 64 * 1024
_LLM_VIEW = frozenset({"id", "description", "parameters"})
TOLD_BESIDE = ("guidance", "documentation", "manual_first", "step_parameters", "output_schema")
"""What else a model is told in a tool's own words, by the prompt, by its manual, by its first step and over MCP; and what
has it read that."""
_CAPABILITY_OF_FORMAT = {"host": "net.fetch", "uri": "net.fetch", "command": "shell.run"}
_CHOICES: Mapping[str, Sequence[str]] = {
    "side_effect": get_args(SideEffect),
    "mode": get_args(Mode),
    "exposure": get_args(Exposure),
    "kind": get_args(Kind),
    "guidance_bucket": get_args(Bucket),
    "cancellable": get_args(Cancellable),
}
_WAITS_FOR = {"ask": "people", "jobs": "jobs", "agents": "agents"}
"""Capabilities by which a tool waits for what may itself have to wait for locks."""
_CONTROL_IN_JSON = re.compile(rb"\\[ubf]")
"""In text that JSON spells: every control but DEL, which stands as itself."""
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}|<([^<>]+)>")


@dataclass(frozen=True, slots=True)
class LockSpec:
    """One resource a call holds while it runs: a template over its arguments, shared or exclusive."""

    resource: str
    mode: LockMode

    @staticmethod
    def parse(text: str) -> LockSpec:
        """Read ``"file:{path}:S"`` or ``"workspace:X"``.

        :raises ValueError: when the text does not end in ``:S`` or ``:X``
        """
        resource, colon, mode = text.rpartition(":")
        if not colon or not resource or mode not in ("S", "X"):
            raise ValueError(
                f"{text!r} is not a lock; write RESOURCE:S (shared) or RESOURCE:X (exclusive), as in 'file:{{path}}:S'"
            )
        return LockSpec(resource, mode)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The argument names the template needs."""
        return placeholders(self.resource)

    def filled(self, arguments: Mapping[str, Any]) -> str:
        """The resource's text for these arguments; canonical paths are the arbiter's part."""
        return fill(self.resource, arguments)

    def __str__(self) -> str:
        return f"{self.resource}:{self.mode}"


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A setting that an operator gives a tool."""

    description: str
    secret: bool = False
    required: bool = True
    default: str | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ToolSpec:
    """Everything declared about one tool. Immutable: a change is another spec with another hash.

    The first three fields are the *LLM view*; of the others a model is told :data:`TOLD_BESIDE`. ``parameters`` is a JSON Schema
    (2020-12) for one object. Times are milliseconds, sizes are bytes.
    """

    id: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    requires: Requires = NOTHING

    side_effect: SideEffect = "external"
    locks: tuple[LockSpec, ...] | None = None
    """None: not declared, so ``workspace:S`` for reading and ``workspace:X`` otherwise; ``()``: none."""
    targets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Capability to argument template, ``{"fs.read": "{path}"}``; see :func:`inferred_targets`."""
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    timeout_argument: str | None = None
    """The argument, in milliseconds, by which a caller may ask for less time than ``timeout_ms``."""
    idempotent: bool = False
    mode: Mode = "direct"
    step_parameters: Mapping[str, Any] | None = None
    """A JSON Schema of what a step of a stateful tool is sent; None: any JSON."""
    background_argument: str | None = None
    """The boolean argument by which a caller asks for the call to run in the background."""
    concurrency_safe: bool = True
    promotable: bool = False
    locks_background: tuple[LockSpec, ...] = ()
    cancellable: Cancellable = "cooperative"
    persistent: bool = False
    open_ended: bool = False
    """Its jobs go on until somebody ends them: a run does not wait for them, and of their output the end is kept. Said in
    code only, never by a manifest."""
    only_its_command: bool = False
    """It does nothing but run its one command through ``runtime.shell``: a call whose command is proved to change
    nothing then runs read-only, beside others. Said in code only, never by a manifest."""
    secrets: tuple[str, ...] = ()
    config: Mapping[str, ConfigKey] = field(default_factory=dict[str, ConfigKey])
    exec_path: str | None = None
    build: tuple[str, ...] = ()
    """The program and its arguments by which ``handrail build`` makes the executable, in the folder that this lies in. Empty: it is there."""
    build_timeout_ms: int = DEFAULT_BUILD_TIMEOUT_MS
    output_schema: Mapping[str, Any] | None = None
    """A JSON Schema of what it gives, always an object; an MCP client is told of it. None: it says nothing of that."""
    provider_support: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Providers that carry it out themselves, each with the options that it is given; see :mod:`handrail.contract.tool.native`.
    Empty for every tool that runs here. An agent's manifest alone says it."""

    max_output: int = DEFAULT_MAX_OUTPUT
    max_entries: int | None = None
    """Cut a list-shaped output after this many entries, instead of after bytes only."""
    exposure: Exposure = "both"
    prompt_mask: bool = False

    version: str = ""
    category: str | None = None
    tier: str | None = None
    kind: Kind = "other"
    guidance: str = ""
    guidance_bucket: Bucket = "normal"
    documentation: str = ""
    manual_first: bool = False
    """A model may call it only once it has read its manual, by ``info``, in the same session."""

    @property
    def effective_locks(self) -> tuple[LockSpec, ...]:
        """The declared locks or the strict default, with ``serial:X`` for a tool that is not concurrency-safe."""
        if self.locks is None:
            locks: tuple[LockSpec, ...] = (LockSpec("workspace", "S" if self.side_effect == "read" else "X"),)
        else:
            locks = self.locks
        return locks if self.concurrency_safe else (*locks, LockSpec("serial", "X"))

    @property
    def background_locks(self) -> tuple[LockSpec, ...]:
        """What a call in the background takes instead of :attr:`effective_locks`."""
        locks = self.locks_background
        return locks if self.concurrency_safe else (*locks, LockSpec("serial", "X"))

    @property
    def effective_targets(self) -> Mapping[str, str]:
        return self.targets or inferred_targets(self.parameters, self.side_effect)

    def llm_view(self) -> dict[str, Any]:
        """The whole of what a model is told: a list of what goes in, so nothing else can."""
        return {"name": wire_name(self.id), "description": self.description, "parameters": dict(self.parameters)}

    def runtime_view(self) -> dict[str, Any]:
        """Everything else, JSON-able, as the log and ``handrail tools --json`` show it to an operator."""
        view = {name: getattr(self, name) for name in _RUNTIME_VIEW}
        view["requires"] = self.requires.model_dump(mode="json")
        view["locks"] = None if self.locks is None else [str(lock) for lock in self.locks]
        view["locks_background"] = [str(lock) for lock in self.locks_background]
        view["config"] = {
            key: {
                "description": c.description,
                "secret": c.secret,
                "required": c.required,
                "default": None if c.secret else c.default,
            }
            for key, c in self.config.items()
        }
        view["targets"] = dict(self.targets)
        view["provider_support"] = {provider: dict(options) for provider, options in self.provider_support.items()}
        return view

    @property
    def definition_hash(self) -> str:
        """SHA-256 over the canonical JSON of both views: an approval is bound to it."""
        whole = {"id": self.id, "llm": self.llm_view(), "runtime": self.runtime_view()}
        return hashlib.sha256(_canonical(whole).encode("utf-8", "surrogatepass")).hexdigest()


MAX_DESCRIPTION = 50_000
MAX_DOCUMENTATION = 500_000
"""Characters. They are searched, compared and shown to people and models."""
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
"""Made once: ``json.dumps`` makes one for every text."""
_RUNTIME_VIEW = tuple(f.name for f in fields(ToolSpec) if f.name not in _LLM_VIEW)


def inferred_targets(parameters: Mapping[str, Any], side_effect: SideEffect) -> dict[str, str]:
    """Targets from ``format: path | host | command`` of top-level string parameters."""
    found: dict[str, str] = {}
    for name, schema in properties_of(parameters).items():
        declared = schema.get("format")
        capability = (
            ("fs.read" if side_effect == "read" else "fs.write")
            if declared == "path"
            else _CAPABILITY_OF_FORMAT.get(str(declared))
        )
        if capability:
            found.setdefault(capability, f"{{{name}}}")
    return found


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The top-level properties that are written as objects."""
    properties: Any = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {
        str(name): schema
        for name, schema in cast("Mapping[Any, Any]", properties).items()
        if isinstance(schema, Mapping)
    }


def branches_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives and parts that a schema is made of, as far as they are written in it."""
    found = [one for keyword in ("anyOf", "oneOf", "allOf") for one in values_of(schema.get(keyword))]
    return [cast("Mapping[str, Any]", one) for one in found if isinstance(one, Mapping)]


def values_of(value: object) -> Sequence[object]:
    """The members of what is a list; nothing else has any."""
    return cast("list[object]", value) if isinstance(value, list) else ()


def placeholders(template: str) -> tuple[str, ...]:
    """The argument names in ``{name}`` or seed-style ``<name>`` of a template."""
    return tuple(a or b for a, b in _PLACEHOLDER.findall(template))


def fill(template: str, arguments: Mapping[str, Any]) -> str:
    """Put arguments into a template; an absent optional argument becomes the empty text."""

    def value(match: re.Match[str]) -> str:
        found = arguments.get(match.group(1) or match.group(2))
        return "" if found is None else str(found)

    return _PLACEHOLDER.sub(value, template)


def faults_in(spec: ToolSpec) -> list[tuple[str, str]]:
    """``(place, problem)`` for everything in ``spec`` that can be judged without compiling its schema."""
    found: list[tuple[str, str]] = []
    if problem := fault_in_id(spec.id):
        found.append(("llm.name", problem))
    if not spec.description.strip():
        found.append(("llm.description", "is empty; say in a sentence when to use the tool"))
    for place, text, most in (
        ("llm.description", spec.description, MAX_DESCRIPTION),
        ("runtime.guidance", spec.guidance, MAX_DESCRIPTION),
        ("runtime.documentation", spec.documentation, MAX_DOCUMENTATION),
    ):
        if len(text) > most:
            return [*found, (place, f"has {len(text):,} characters; at most {most:,} are taken. Say less")]
    told = {"llm.description": spec.description, "llm.parameters": spec.parameters}
    told |= {f"runtime.{name}": getattr(spec, name) for name in TOLD_BESIDE}
    for place, value in told.items():
        if value and (problem := _unseen_in(value)):
            found.append((place, problem))
    found += [(f"runtime.{place}", problem) for place, problem in spec.requires.faults()]
    for place, choices in _CHOICES.items():  # Python does not hold anybody to a Literal
        if (chosen := getattr(spec, place)) not in choices:
            found.append((f"runtime.{place}", f"is {chosen!r}; expected {', '.join(choices)}"))
    known = properties_of(spec.parameters)
    for field_name in ("locks", "locks_background"):
        declared: Sequence[LockSpec] = getattr(spec, field_name) or ()
        for index, lock in enumerate(declared):
            found += [
                (
                    f"runtime.{field_name}[{index}]",
                    f"{lock} names the argument {name!r}, which the parameters do not have",
                )
                for name in lock.arguments
                if name not in known
            ]
    if (argument := spec.background_argument) is not None and known.get(argument, {}).get("type") != "boolean":
        found.append(("runtime.background_argument", f"{argument!r} is not one of the parameters that are a boolean"))
    if argument is not None and spec.mode != "direct":
        found.append(("runtime.background_argument", f"its mode is {spec.mode!r} anyway; drop one of the two"))
    found += _faults_in_steps(spec, known)
    for capability, template in spec.targets.items():
        if capability not in CAPABILITIES:
            found.append((f"runtime.targets.{capability}", f"is not a capability; there are {', '.join(CAPABILITIES)}"))
        for name in placeholders(template):
            if name not in known:
                found.append(
                    (
                        f"runtime.targets.{capability}",
                        f"{template!r} names the argument {name!r}, which the parameters do not have",
                    )
                )
    if spec.timeout_argument is not None and spec.timeout_argument not in known:
        found.append(("runtime.timeout_argument", f"{spec.timeout_argument!r} is not one of the parameters"))
    if spec.build and "/" not in (spec.exec_path or ""):
        found.append(
            (
                "runtime.build",
                "the executable has no folder for its sources; put both into a folder, as in exec_path: 'NAME/run'",
            )
        )
    if not 0 < spec.build_timeout_ms <= MAX_BUILD_TIMEOUT_MS:
        expected = f"expected 1 to {MAX_BUILD_TIMEOUT_MS} milliseconds"
        found.append(("runtime.build_timeout_ms", f"is {spec.build_timeout_ms}; {expected}"))
    if spec.timeout_ms <= 0:
        found.append(("runtime.timeout_ms", f"is {spec.timeout_ms}; expected a positive number of milliseconds"))
    if spec.output_schema is not None and spec.output_schema.get("type") != "object":
        found.append(("runtime.output_schema", 'has no "type": "object"; only an object can be promised'))
    if spec.manual_first and not spec.documentation.strip():
        found.append(("runtime.manual_first", "there is no manual to read first; write it under documentation"))
    if spec.max_output <= 0:
        found.append(("runtime.max_output", f"is {spec.max_output}; expected a positive number of bytes"))
    for capability, what in _WAITS_FOR.items():
        if capability in spec.requires.capabilities and spec.effective_locks:
            found.append(("runtime.locks", f"a tool that waits for {what} may hold no locks; declare locks: []"))
    return found


def _faults_in_steps(spec: ToolSpec, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if spec.mode != "stateful":
        if spec.step_parameters is not None:
            yield "runtime.step_parameters", 'only a tool with the mode "stateful" has steps; leave it out'
        return
    if spec.promotable:
        yield "runtime.promotable", "a stateful tool's steps stay in their turns; drop one of the two"
    if spec.output_schema is not None:
        yield "runtime.output_schema", "a stateful tool gives a state and a step; leave it out"
    if STEP_INPUT in known:
        yield f"llm.parameters.{STEP_INPUT}", "is the name of what steps are sent; choose another"


def _plain(value: object) -> bool:
    """Whether all its texts are seen to be ASCII without controls (tabs and line ends are none) at one look; most are."""
    try:
        text = to_json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    if not text.isascii() or b"\x7f" in text:
        return False
    return b"\\" not in text or _CONTROL_IN_JSON.search(text) is None


def _unseen_in(value: object) -> str | None:
    """What in the texts that a model is told people would not see, or see otherwise: it could say what nobody approved."""
    if _plain(value):
        return None
    rest: list[Any] = [value]
    passed: set[int] = set()
    while rest:
        one = rest.pop()
        if not isinstance(one, str) and id(one) in passed:  # a value made in Python may hold itself
            continue
        passed.add(id(one))
        if isinstance(one, Mapping):
            members = cast("Mapping[Any, Any]", one)
            rest += [*members, *members.values()]
        elif isinstance(one, (list, tuple)):
            rest += cast("Sequence[Any]", one)
        elif isinstance(one, str) and not (one.isascii() and one.isprintable()):
            from handrail.contract.text.neutral import found

            for piece in found(one):
                if piece.kind in ("control", "invisible", "direction"):
                    return f"holds {piece.shown}, which people do not see and a model reads; write it without"
    return None


# Type checks of a spec's fields, since Python does not enforce annotations.


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in cast("tuple[Any, ...]", value))


def _locks(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, LockSpec) for one in cast("tuple[Any, ...]", value))


def _number(value: object) -> bool:
    return type(value) is int


def _flag(value: object) -> bool:
    return value is True or value is False


def _text(value: object) -> bool:
    return isinstance(value, str)


def _object(value: object) -> bool:
    return isinstance(value, Mapping)


def _settings(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(one, ConfigKey) for one in cast("Mapping[Any, Any]", value).values()
    )


def _templates(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, str) for one in cast("Mapping[Any, Any]", value).values())


class FieldType(NamedTuple):
    """What one field of a spec holds, by its annotation in :class:`~handrail.contract.tool.spec.ToolSpec`: the one table of
    fields, for specs made in Python and for manifests."""

    type: Any
    may_be_none: bool


def _field_type(annotation: Any) -> FieldType:
    held = [one for one in get_args(annotation) if one is not NoneType]
    is_optional = isinstance(annotation, UnionType) and len(held) == 1
    return FieldType(held[0] if is_optional else annotation, is_optional)


FIELDS: Mapping[str, FieldType] = {name: _field_type(one) for name, one in get_type_hints(ToolSpec).items()}

_TEXT, _OBJECT = "text", "a mapping"
_BY_TYPE: Mapping[Any, tuple[Callable[[object], bool], str]] = {
    str: (_text, _TEXT),
    int: (_number, "a whole number"),
    bool: (_flag, "True or False"),
    Mapping[str, Any]: (_object, _OBJECT),
    Mapping[str, Mapping[str, Any]]: (_object, _OBJECT),
    Mapping[str, str]: (_templates, 'a mapping of texts, as in {"fs.read": "{path}"}'),
    Mapping[str, ConfigKey]: (
        _settings,
        'a mapping of ConfigKey, as in {"units": ConfigKey("metric or imperial")}',
    ),
    tuple[LockSpec, ...]: (_locks, 'a tuple of LockSpec, as in (LockSpec.parse("file:{path}:S"),)'),
    tuple[str, ...]: (_texts, "a tuple of texts"),
    Requires: (lambda value: isinstance(value, Requires), "Requires, as in Requires.model_validate({…})"),
}
"""The test of a value that is not None, and what to say was expected."""
_SAID_OF = {
    "parameters": "a mapping: the JSON Schema of one object",
    "secrets": 'a tuple of names, as in ("API_KEY",)',
    "build": 'a tuple of words, as in ("make", "run")',
}

EXPECTED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    name: (_BY_TYPE[one.type][0], _SAID_OF.get(name, _BY_TYPE[one.type][1]))
    for name, one in FIELDS.items()
    if get_origin(one.type) is not Literal
}
"""By field: the test of a value, and what to say was expected. Fields of fixed words are judged by these."""
_OF_A_MODEL = {"id": "llm.name", "description": "llm.description", "parameters": "llm.parameters"}


def of_wrong_type(spec: ToolSpec) -> Iterator[tuple[str, str]]:
    """``(place, problem)`` for each field whose value is none that it can have. With any, the rest cannot be judged."""
    for name, (fits, expected) in EXPECTED.items():
        value: object = getattr(spec, name)
        if not (FIELDS[name].may_be_none if value is None else fits(value)):
            place = _OF_A_MODEL.get(name) or f"runtime.{name}"
            yield place, f"is {_shown(value)}; expected {expected}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
