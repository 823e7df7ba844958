"""The declaration of a tool: the part that a model sees, the part for the runtime, and the checks of both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args, get_origin, get_type_hints

from pydantic_core import to_json

from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.strict_json import encode_canonical_json
from handrail.contract.tool.requires import CAPABILITIES, NO_REQUIREMENTS, Requires
from handrail.contract.tool.tool_ids_and_wire_names import find_tool_id_fault, wire_name

# Stateful tools: one call opens a state, later calls take steps of it, and one closes it.
#
# A tool of ``mode="stateful"`` is an async generator. A call of it opens a *state* and is answered with the
# first step. Only the shapes are here, so that tools, the runtime and the arbiter agree on them.

STEP_INPUT = "step_input"
"""The name under which rules see the input of a step, next to the arguments that opened the tool session."""

StateEnd = Literal["done", "closed", "expired", "failed", "timeout", "cancelled", "suspended", "changed", "interrupted"]
"""How a tool session ended.

``done``: after its last step. ``closed``: by ``tool.close``. ``expired``: no step came in time. ``failed``,
``timeout``, ``cancelled``: a step raised, took too long or was stopped. ``suspended``: its session or kernel ended.
``changed``: its tool is no longer the same. ``interrupted``: unknown, because its process ended.
"""


class ToolSessionArgumentNames(Struct, frozen=True):
    """The arguments of a built-in tool that continues the tool session of another call.

    :param argument: the argument with the id of the tool session
    :param input: the argument with the input of the step; None for a tool that closes the session
    """

    argument: str
    input: str | None = None


class JobArgumentSpec(Struct, frozen=True):
    """The argument of a built-in tool that names a job of the session.

    :param argument: the argument with the id of the job
    :param tool_id: the tool that must run the job; None for any
    :param running: whether the job must be running
    """

    argument: str
    tool_id: str | None = None
    running: bool = False


class ToolSession(Protocol):
    """The tool session that a call continues. The call was evaluated as a call of the open tool."""

    async def step(self) -> object:
        """Send the input of the call and return its answer.

        :raises ToolError: as raised by the tool; ``conflict`` for a tool session that has ended
        """
        ...

    async def close(self) -> object:
        """End the tool session and return the answer."""
        ...


SideEffect = Literal["read", "write", "external"]
CallMode = Literal["direct", "background", "stateful"]
OutputExposure = Literal["edge", "core", "both", "none"]
LockMode = Literal["S", "X"]
ToolKind = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"]
"""ACP's kinds. They choose icons and diffs in editors."""
PromptOrder = Literal["first", "normal", "last"]
"""The position of a tool's guidance among that of the other tools."""
Cancellable = Literal["cooperative", "process"]
TargetTemplates = Mapping[str, str | Sequence[str]]
"""Capability to one argument template, or to several."""

DEFAULT_TIMEOUT_MS = 60_000
DEFAULT_BUILD_TIMEOUT_MS = 600_000
MAX_BUILD_TIMEOUT_MS = 3_600_000
DEFAULT_MAX_OUTPUT = 64 * 1024
_LLM_VIEW = frozenset({"id", "description", "parameters"})
MODEL_TEXT_FIELDS = (
    *("guidance", "documentation", "documentation_required", "step_parameters", "output_schema", "client_listing"),
)
"""Further texts of a tool that a model reads: in the prompt, in its documentation, with its first step and over MCP."""
_CAPABILITY_OF_FORMAT = {"host": "net.fetch", "uri": "net.fetch", "command": "shell.run"}
_CHOICES: Mapping[str, Sequence[str]] = {
    "side_effect": get_args(SideEffect),
    "mode": get_args(CallMode),
    "exposure": get_args(OutputExposure),
    "kind": get_args(ToolKind),
    "guidance_order": get_args(PromptOrder),
    "cancellable": get_args(Cancellable),
}
_WAITS_FOR = {"ask": "people", "jobs": "jobs", "agents": "agents"}
"""Capabilities with which a tool waits for work that may itself wait for locks."""
_CONTROL_IN_JSON = compile_regex_lazily(rb"\\[ubf]")
"""All control characters in JSON text except DEL, which is not escaped."""
_PLACEHOLDER = compile_regex_lazily(r"\{([^{}]+)\}|<([^<>]+)>")


class LockSpec(Struct, frozen=True):
    """A lock that a call holds while it runs, shared or exclusive. The resource is a template of arguments."""

    resource: str
    mode: LockMode

    @staticmethod
    def parse(text: str) -> LockSpec:
        """Parse ``"file:{path}:S"`` or ``"workspace:X"``.

        :raises ValueError: if the text does not end in ``:S`` or ``:X``
        """
        resource, colon, mode = text.rpartition(":")
        if not colon or not resource or mode not in ("S", "X"):
            raise ValueError(
                f"{text!r} is not a lock; write RESOURCE:S (shared) or RESOURCE:X (exclusive), as in 'file:{{path}}:S'"
            )
        return LockSpec(resource, mode)

    @property
    def required_argument_names(self) -> tuple[str, ...]:
        """The argument names that the template needs."""
        return extract_template_argument_names(self.resource)

    def fill_resource_template(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of the resource for these arguments. The arbiter makes paths canonical."""
        return fill_template(self.resource, arguments)

    def __str__(self) -> str:
        return f"{self.resource}:{self.mode}"


class ConfigKey(Struct, frozen=True):
    """A setting that an operator gives a tool."""

    description: str
    secret: bool = False
    required: bool = True
    default: str | None = None


class ToolSpec(Struct, frozen=True, weakref=True):
    """The declaration of one tool. Immutable: a change is another spec with another hash.

    The first three fields are the *LLM view*; of the others a model reads :data:`MODEL_TEXT_FIELDS`. ``parameters`` is a
    JSON Schema (2020-12) for one object. Times are milliseconds, sizes are bytes.
    """

    id: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    requires: Requires = NO_REQUIREMENTS

    side_effect: SideEffect = "external"
    locks: tuple[LockSpec, ...] | None = None
    """None: not declared, so ``workspace:S`` for reads and ``workspace:X`` otherwise. ``()``: no locks."""
    targets: TargetTemplates = field(default_factory=dict[str, str])
    """Capability to argument templates, ``{"fs.read": "{path}", "fs.write": ["{path}", "{to}"]}``; see
    :func:`infer_capability_targets`. A rule evaluates each of them. An empty tuple infers none for its capability."""
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    timeout_argument: str | None = None
    """The argument, in milliseconds, with which a caller may shorten ``timeout_ms``."""
    idempotent: bool = False
    mode: CallMode = "direct"
    step_parameters: Mapping[str, Any] | None = None
    """A JSON Schema of the input of a stateful tool's step; None: any JSON."""
    background_argument: str | None = None
    """The boolean argument with which a caller runs the call in the background."""
    concurrency_safe: bool = True
    promotable: bool = False
    locks_background: tuple[LockSpec, ...] = ()
    cancellable: Cancellable = "cooperative"
    persistent: bool = False
    long_running: bool = False
    """Whether its jobs run until they are stopped: an agent run does not wait for them, and the end of their output
    is kept. Only code can set it, not a manifest."""
    single_command: bool = False
    """Whether it only runs one command through ``runtime.shell``. A call whose command is proved to change nothing
    then runs read-only, in parallel with others. Only code can set it, not a manifest."""
    confinement_gap: str = ""
    """Why no rule with ``{confined}`` holds for its calls here, such as a sandbox without a layer; empty if one may. The
    loader sets it."""
    secrets: tuple[str, ...] = ()
    config: Mapping[str, ConfigKey] = field(default_factory=dict[str, ConfigKey])
    exec_path: str | None = None
    build: tuple[str, ...] = ()
    """The program and arguments with which ``handrail build`` makes the executable, in its folder. Empty: it exists
    already."""
    build_timeout_ms: int = DEFAULT_BUILD_TIMEOUT_MS
    output_schema: Mapping[str, Any] | None = None
    """A JSON Schema of the output, always an object, for MCP clients. None: not declared."""
    client_listing: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further members of the tool in the list for MCP clients, as an MCP server wrote them: its title, icons and ``_meta``."""
    provider_support: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Providers that run the tool themselves, each with its options; see :mod:`handrail.contract.tool.provider_tools`. Empty
    for every tool that runs here. Only an agent's manifest sets it."""

    max_output: int = DEFAULT_MAX_OUTPUT
    max_entries: int | None = None
    """Cut a list-shaped output after this many entries, in addition to the limit in bytes."""
    exposure: OutputExposure = "both"
    prompt_mask: bool = False

    version: str = ""
    category: str | None = None
    tier: str | None = None
    kind: ToolKind = "other"
    guidance: str = ""
    guidance_order: PromptOrder = "normal"
    documentation: str = ""
    documentation_required: bool = False
    """Whether a model must read the documentation, with ``info``, in the same session before it calls the tool."""

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
        """The locks of a call in the background, instead of :attr:`effective_locks`."""
        locks = self.locks_background
        return locks if self.concurrency_safe else (*locks, LockSpec("serial", "X"))

    @property
    def effective_targets(self) -> Mapping[str, tuple[str, ...]]:
        """The declared targets, or those inferred from the parameters, as all templates of each capability."""
        if not self.targets:
            return infer_capability_targets(self.parameters, self.side_effect)
        return {capability: normalise_target_templates(templates) for capability, templates in self.targets.items()}

    def build_llm_view(self) -> dict[str, Any]:
        """Return everything that goes into a model's tools parameter, built from a closed list."""
        return {"name": wire_name(self.id), "description": self.description, "parameters": dict(self.parameters)}

    def build_runtime_view(self) -> dict[str, Any]:
        """Return all other fields, JSON-able, as the log and ``handrail tools --json`` show them."""
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
        view["targets"] = {
            capability: templates if isinstance(templates, str) else list(templates)
            for capability, templates in self.targets.items()
        }
        view["provider_support"] = {provider: dict(options) for provider, options in self.provider_support.items()}
        return view

    @property
    def definition_hash(self) -> str:
        """The SHA-256 of the canonical JSON of both views. An approval is bound to it."""
        whole = {"id": self.id, "llm": self.build_llm_view(), "runtime": self.build_runtime_view()}
        return hashlib.sha256(encode_canonical_json(whole)).hexdigest()


MAX_DESCRIPTION = 50_000
MAX_DOCUMENTATION = 500_000
"""Characters. These texts are searched, compared and shown to people and models."""
_RUNTIME_VIEW = tuple(name for name in ToolSpec.__struct_fields__ if name not in _LLM_VIEW)


def normalise_target_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Return the templates of one capability in ``targets``, which may be a single text."""
    return (templates,) if isinstance(templates, str) else tuple(templates)


def infer_capability_targets(parameters: Mapping[str, Any], side_effect: SideEffect) -> dict[str, tuple[str, ...]]:
    """Infer targets from ``format: path | host | command`` of all top-level parameters, also within lists."""
    found: dict[str, tuple[str, ...]] = {}
    for name, schema in extract_property_schemas(parameters).items():
        for declared in _formats_of(schema):
            capability = (
                ("fs.read" if side_effect == "read" else "fs.write")
                if declared == "path"
                else _CAPABILITY_OF_FORMAT.get(declared)
            )
            if capability:
                found[capability] = (*found.get(capability, ()), f"{{{name}}}")
    return found


def find_path_arguments(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters with ``format: path``, or with a list of such texts."""
    properties = extract_property_schemas(parameters)
    return tuple(name for name, schema in properties.items() if "path" in _formats_of(schema))


def find_patch_arguments(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters with ``format: patch``: texts that name their files themselves.

    A template of one of them in ``targets`` or ``locks`` stands for the paths of the patch. For ``fs.read`` these are the files
    whose content decides about the change.
    """
    properties = extract_property_schemas(parameters)
    return frozenset(name for name, schema in properties.items() if schema.get("format") == "patch")


def _formats_of(schema: Mapping[str, Any]) -> Iterable[str]:
    """Return the formats of a text parameter, of its alternatives, and of the items of a list."""
    alternatives = [schema, *list_schema_branches(schema)]
    items = [cast("Mapping[str, Any]", one["items"]) for one in alternatives if isinstance(one.get("items"), Mapping)]
    return dict.fromkeys(str(one["format"]) for one in (*alternatives, *items) if "format" in one)


def extract_property_schemas(parameters: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the top-level properties that are objects."""
    properties: Any = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {
        str(name): schema
        for name, schema in cast("Mapping[Any, Any]", properties).items()
        if isinstance(schema, Mapping)
    }


def list_schema_branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives and parts of a schema that are written in it."""
    found = [one for keyword in ("anyOf", "oneOf", "allOf") for one in get_list_items_or_empty(schema.get(keyword))]
    return [cast("Mapping[str, Any]", one) for one in found if isinstance(one, Mapping)]


def get_list_items_or_empty(value: object) -> Sequence[object]:
    """Return the members of a list; nothing for any other value."""
    return cast("list[object]", value) if isinstance(value, list) else ()


def extract_template_argument_names(template: str) -> tuple[str, ...]:
    """Return the argument names in ``{name}`` or seed-style ``<name>`` of a template."""
    return tuple(a or b for a, b in _PLACEHOLDER.findall(template))


def fill_template(template: str, arguments: Mapping[str, Any]) -> str:
    """Fill a template with arguments. An absent optional argument becomes the empty text."""

    def value(match: re.Match[str]) -> str:
        return "" if (found := arguments.get(match.group(1) or match.group(2))) is None else str(found)

    return _PLACEHOLDER.sub(value, template)


def find_spec_faults(spec: ToolSpec) -> list[tuple[str, str]]:
    """Return ``(place, problem)`` for every fault of ``spec`` that needs no compiled schema."""
    found: list[tuple[str, str]] = []
    if problem := find_tool_id_fault(spec.id):
        found.append(("llm.name", problem))
    if not spec.description.strip():
        found.append(("llm.description", "is empty; write a sentence on when to use the tool"))
    for place, text, most in (
        ("llm.description", spec.description, MAX_DESCRIPTION),
        ("runtime.guidance", spec.guidance, MAX_DESCRIPTION),
        ("runtime.documentation", spec.documentation, MAX_DOCUMENTATION),
    ):
        if len(text) > most:
            return [*found, (place, f"has {len(text):,} characters; the maximum is {most:,}. Shorten it")]
    values = {"llm.description": spec.description, "llm.parameters": spec.parameters}
    values |= {f"runtime.{name}": getattr(spec, name) for name in MODEL_TEXT_FIELDS}
    if not _is_plain_ascii(values):
        for place, value in values.items():
            if value and (problem := explain_invisible_character(value)):
                found.append((place, problem))
    found += [(f"runtime.{place}", problem) for place, problem in spec.requires.find_faults()]
    for place, choices in _CHOICES.items():  # Python does not enforce a Literal
        if (chosen := getattr(spec, place)) not in choices:
            found.append((f"runtime.{place}", f"is {chosen!r}; expected {', '.join(choices)}"))
    known = extract_property_schemas(spec.parameters)
    for field_name in ("locks", "locks_background"):
        declared: Sequence[LockSpec] = getattr(spec, field_name) or ()
        for index, lock in enumerate(declared):
            found += [
                (f"runtime.{field_name}[{index}]", f"{lock} names the unknown parameter {name!r}")
                for name in lock.required_argument_names
                if name not in known
            ]
    if (argument := spec.background_argument) is not None and known.get(argument, {}).get("type") != "boolean":
        found.append(("runtime.background_argument", f"{argument!r} is not a boolean parameter"))
    if argument is not None and spec.mode != "direct":
        found.append(
            (
                "runtime.background_argument",
                f"requires the mode 'direct', and the mode is {spec.mode!r}; remove one of the two",
            )
        )
    found += _faults_in_steps(spec, known)
    for capability, templates in spec.targets.items():
        place = f"runtime.targets.{capability}"
        if capability not in CAPABILITIES:
            found.append((place, f"is not a capability; available: {', '.join(CAPABILITIES)}"))
        if not templates and templates != ():
            found.append((place, "is empty; name the arguments, as in '{path}', or remove the capability"))
        for template in normalise_target_templates(templates):
            found += [
                (place, f"{template!r} names the unknown parameter {name!r}")
                for name in extract_template_argument_names(template)
                if name not in known
            ]
    if spec.timeout_argument is not None and spec.timeout_argument not in known:
        found.append(("runtime.timeout_argument", f"{spec.timeout_argument!r} is not a parameter"))
    if spec.build and "/" not in (spec.exec_path or ""):
        found.append(
            ("runtime.build", "needs a folder for the executable and its sources, as in exec_path: 'NAME/run'")
        )
    if not 0 < spec.build_timeout_ms <= MAX_BUILD_TIMEOUT_MS:
        expected = f"expected 1 to {MAX_BUILD_TIMEOUT_MS} milliseconds"
        found.append(("runtime.build_timeout_ms", f"is {spec.build_timeout_ms}; {expected}"))
    if spec.timeout_ms <= 0:
        found.append(("runtime.timeout_ms", f"is {spec.timeout_ms}; expected a positive number of milliseconds"))
    if spec.output_schema is not None and spec.output_schema.get("type") != "object":
        found.append(("runtime.output_schema", 'has no "type": "object"; declare an object'))
    if spec.documentation_required and not spec.documentation.strip():
        found.append(
            (
                "runtime.documentation_required",
                "needs documentation that a model can read; write it under documentation",
            )
        )
    if spec.max_output <= 0:
        found.append(("runtime.max_output", f"is {spec.max_output}; expected a positive number of bytes"))
    for capability, what in _WAITS_FOR.items():
        if capability in spec.requires.capabilities and spec.effective_locks:
            found.append(("runtime.locks", f"a tool that waits for {what} cannot hold locks; declare locks: []"))
    return found


def _faults_in_steps(spec: ToolSpec, known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if spec.mode != "stateful":
        if spec.step_parameters is not None:
            yield "runtime.step_parameters", 'applies only to a tool with the mode "stateful"; remove it'
        return
    if spec.promotable:
        yield (
            "runtime.promotable",
            "is not possible for a stateful tool: its steps stay in their turns; remove one of the two",
        )
    if spec.output_schema is not None:
        yield "runtime.output_schema", "is not possible for a stateful tool: it returns a state and a step; remove it"
    if STEP_INPUT in known:
        yield f"llm.parameters.{STEP_INPUT}", "is reserved for the input of a step; choose another name"


def _is_plain_ascii(value: object) -> bool:
    """Return whether all texts in ``value`` are plain ASCII without control characters.

    Tabs and line ends are allowed. One quick look is enough, and most values pass.
    """
    try:
        text = to_json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    if not text.isascii() or b"\x7f" in text:
        return False
    return b"\\" not in text or _CONTROL_IN_JSON.search(text) is None


def explain_invisible_character(value: object) -> str | None:
    """Return the problem with the first character that people would not see, or see differently.

    Such a text could say something to the model that no user has approved.
    """
    if _is_plain_ascii(value):
        return None
    rest: list[Any] = [value]
    passed: set[int] = set()
    while rest:
        one = rest.pop()
        if not isinstance(one, str) and id(one) in passed:  # a value made in Python may contain itself
            continue
        passed.add(id(one))
        if isinstance(one, Mapping):
            members = cast("Mapping[Any, Any]", one)
            rest += [*members, *members.values()]
        elif isinstance(one, (list, tuple)):
            rest += cast("Sequence[Any]", one)
        elif isinstance(one, str) and not (one.isascii() and one.isprintable()):
            from handrail.contract.text.neutralisation import find_characters_to_escape

            for piece in find_characters_to_escape(one):
                if piece.kind in ("control", "invisible", "direction"):
                    return f"contains {piece.shown}, which a model reads and people do not see; remove it"
    return None


# Type checks of a spec's fields, since Python does not enforce annotations.


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in cast("tuple[Any, ...]", value))


def _are_locks(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, LockSpec) for one in cast("tuple[Any, ...]", value))


def _is_number(value: object) -> bool:
    return type(value) is int


def _is_flag(value: object) -> bool:
    return value is True or value is False


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _are_settings(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(one, ConfigKey) for one in cast("Mapping[Any, Any]", value).values()
    )


def _are_templates(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    found = cast("Mapping[Any, object]", value).values()
    listed = (tuple(cast("list[object]", one)) if isinstance(one, list) else one for one in found)
    return all(isinstance(one, str) or _are_texts(one) for one in listed)


class SpecFieldType(NamedTuple):
    """The type of one field of a spec, from its annotation in :class:`~handrail.contract.tool.spec.ToolSpec`.

    It is the one table of fields, for specs made in Python and for manifests.
    """

    type: Any
    is_optional: bool


def _field_type(annotation: Any) -> SpecFieldType:
    held = [one for one in get_args(annotation) if one is not NoneType]
    is_optional = isinstance(annotation, UnionType) and len(held) == 1
    return SpecFieldType(held[0] if is_optional else annotation, is_optional)


FIELDS: Mapping[str, SpecFieldType] = {name: _field_type(one) for name, one in get_type_hints(ToolSpec).items()}

_TEXT, _OBJECT = "text", "a mapping"
_BY_TYPE: Mapping[Any, tuple[Callable[[object], bool], str]] = {
    str: (_is_text, _TEXT),
    int: (_is_number, "a whole number"),
    bool: (_is_flag, "True or False"),
    Mapping[str, Any]: (_is_object, _OBJECT),
    Mapping[str, Mapping[str, Any]]: (_is_object, _OBJECT),
    TargetTemplates: (_are_templates, 'a mapping of texts or lists of texts, as in {"fs.read": "{path}"}'),
    Mapping[str, ConfigKey]: (
        _are_settings,
        'a mapping of ConfigKey, as in {"units": ConfigKey("metric or imperial")}',
    ),
    tuple[LockSpec, ...]: (_are_locks, 'a tuple of LockSpec, as in (LockSpec.parse("file:{path}:S"),)'),
    tuple[str, ...]: (_are_texts, "a tuple of texts"),
    Requires: (lambda value: isinstance(value, Requires), "Requires, as in Requires.model_validate({…})"),
}
"""The test of a value that is not None, and the text of what was expected."""
_SAID_OF = {
    "parameters": "a mapping: the JSON Schema of one object",
    "secrets": 'a tuple of names, as in ("API_KEY",)',
    "build": 'a tuple of words, as in ("make", "run")',
}

EXPECTED_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    name: (_BY_TYPE[one.type][0], _SAID_OF.get(name, _BY_TYPE[one.type][1]))
    for name, one in FIELDS.items()
    if get_origin(one.type) is not Literal
}
"""By field: the test of a value, and the text of what was expected. Fields with fixed words are left out."""
_NO_DEFAULT = object()
_DEFAULTS = dict(zip(reversed(ToolSpec.__struct_fields__), reversed(ToolSpec.__struct_defaults__), strict=False))
_OF_A_MODEL = {"id": "llm.name", "description": "llm.description", "parameters": "llm.parameters"}


def find_spec_type_faults(spec: ToolSpec) -> Iterator[tuple[str, str]]:
    """Yield ``(place, problem)`` for each field with a value of a wrong type.

    If there is any, the rest of the spec cannot be checked.
    """
    for name, (fits, expected) in EXPECTED_TYPES.items():
        value: object = getattr(spec, name)
        if value is _DEFAULTS.get(name, _NO_DEFAULT):
            continue
        if not (FIELDS[name].is_optional if value is None else fits(value)):
            place = _OF_A_MODEL.get(name) or f"runtime.{name}"
            yield place, f"is {_shown(value)}; expected {expected}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
