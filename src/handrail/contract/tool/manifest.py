"""The tool manifest: a tool as JSON in two views, checked whole, with every fault named at once.

``llm`` is what a model is told; ``runtime`` is everything else and never leaves the kernel. Both of the
forms that are in use are read: ``parameters`` or ``input_schema``, ``secrets`` or ``secret_resources``,
``"file:{path}:S"`` or ``{"resource": "file:<path>", "mode": "S"}``. Nothing is coerced and no key is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from handrail.contract.errors import Fault, LoadError
from handrail.contract.schema.schema import path_text
from handrail.contract.text.json import ArgumentText, json_type, parse_object
from handrail.contract.tool.checked import Location, faults_of, sound_part, unknown_key
from handrail.contract.tool.checking import checked
from handrail.contract.tool.requires import NetRequires, Requires
from handrail.contract.tool.spec import (
    DEFAULT_BUILD_TIMEOUT_MS,
    DEFAULT_MAX_OUTPUT,
    DEFAULT_TIMEOUT_MS,
    Bucket,
    ConfigKey,
    Exposure,
    Kind,
    LockSpec,
    Mode,
    SideEffect,
    ToolSpec,
    faults_in,
)

MAX_MANIFEST_BYTES = 1024 * 1024
MAX_WORD = 10_000
"""Characters of a word of a build command."""
_MISSING: Mapping[Location, str] = {
    ("parameters",): 'is missing; a tool without arguments has {"type": "object", "properties": {}}'
}
_FILLERS = {"locks": "-:S", "locks_background": "-:S"}
_OTHER_NAMES = {"llm": {"input_schema": "parameters"}, "runtime": {"secret_resources": "secrets"}}


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ConfigView(_View):
    description: str
    secret: bool = False
    required: bool = True
    default: str | None = None


def _lock(value: object) -> LockSpec:
    if isinstance(value, str):
        return LockSpec.parse(value)
    if isinstance(value, dict):
        entry = cast("dict[str, object]", value)
        resource, mode = entry.get("resource"), entry.get("mode")
        if set(entry) == {"resource", "mode"} and isinstance(resource, str) and resource and mode in ("S", "X"):
            return LockSpec(resource, mode)
    raise ValueError('expected "RESOURCE:S", "RESOURCE:X" or {"resource": "…", "mode": "S" or "X"}')


def own_exec_path(value: object) -> str:
    """Beneath the tool's own folder, whatever folder it had where it was written."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    path = value.rpartition("/")[2] if value.startswith("/") else value.removeprefix("./")
    if not path or not path.isprintable() or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("expected a file's name, or a path beneath the tool's own folder without '..'")
    return path


Lock = Annotated[LockSpec, PlainValidator(_lock)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]
ExecPath = Annotated[str, PlainValidator(own_exec_path)]


class LlmView(_View):
    """What goes into a model's tools parameter, and all of it."""

    name: str
    description: str
    parameters: dict[str, Any]


class RuntimeView(_View):
    """The part that only the kernel sees; each field's meaning is that of :class:`~handrail.contract.tool.spec.ToolSpec`."""

    exec_path: ExecPath | None = None
    build: tuple[Word, ...] = ()
    build_timeout_ms: int = DEFAULT_BUILD_TIMEOUT_MS
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    timeout_argument: str | None = None
    locks: tuple[Lock, ...] | None = None
    locks_background: tuple[Lock, ...] = ()
    requires: Requires = Requires()
    network: bool | None = None
    targets: dict[str, str] = Field(default_factory=dict[str, str])
    secrets: tuple[str, ...] = ()
    side_effect: SideEffect = "external"
    idempotent: bool = False
    version: str = ""
    config: dict[str, ConfigView] = Field(default_factory=dict[str, ConfigView])
    mode: Mode = "direct"
    background_argument: str | None = None
    concurrency_safe: bool = True
    promotable: bool = False
    cancellable: Literal["cooperative", "process"] = "cooperative"
    persistent: bool = False
    output_schema: dict[str, Any] | None = None
    exposure: Exposure = "both"
    prompt_mask: bool = False
    category: str | None = None
    tier: str | None = None
    kind: Kind = "other"
    max_output: int = DEFAULT_MAX_OUTPUT
    max_entries: int | None = None
    guidance: str = ""
    guidance_bucket: Bucket = "normal"
    documentation: str = ""
    manual_first: bool = False

    @pydantic.field_validator("network")
    @classmethod
    def _agrees_with_hosts(cls, network: bool | None, info: pydantic.ValidationInfo) -> bool | None:
        requires = info.data.get("requires")
        if network is False and isinstance(requires, Requires) and requires.net.hosts:
            raise ValueError("and yet requires.net.hosts names hosts; drop one of the two")
        return network


class ToolManifest(_View):
    """Both views of one tool."""

    llm: LlmView
    runtime: RuntimeView = RuntimeView()

    def spec(self) -> ToolSpec:
        """The tool that is described."""
        runtime: dict[str, Any] = {name: getattr(self.runtime, name) for name in RuntimeView.model_fields}
        network: bool | None = runtime.pop("network")
        if network and not self.runtime.requires.net.hosts:
            everywhere = NetRequires(hosts=("*",))
            runtime["requires"] = self.runtime.requires.model_copy(update={"net": everywhere})
        runtime["config"] = {key: ConfigKey(**value.model_dump()) for key, value in self.runtime.config.items()}
        return ToolSpec(id=self.llm.name, description=self.llm.description, parameters=self.llm.parameters, **runtime)


def parse_manifest(text: str | bytes, source: str) -> ToolSpec:
    """Read a manifest's text, at most 1 MiB of strict JSON.

    :raises LoadError: with every fault, each naming ``source`` and the place in it
    """
    try:
        data = parse_object(text, what="the manifest's contents", max_bytes=MAX_MANIFEST_BYTES)
    except ArgumentText as error:
        raise LoadError([Fault(source, "", str(error))]) from None
    return _read(data, text, source)


def read_manifest(data: Mapping[str, Any], source: str) -> ToolSpec:
    """Read a manifest.

    :raises LoadError: with every fault, each naming ``source`` and the place in it
    """
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LoadError([Fault(source, "", f"is not JSON: {error}")]) from None
    return _read(data, text, source)


def _read(data: Mapping[str, Any], text: str | bytes, source: str) -> ToolSpec:
    """:param text: ``data`` as JSON"""
    try:
        sound = ToolManifest.model_validate_json(text, strict=True).spec()
    except pydantic.ValidationError:  # what is wrong is found part by part, and names of other makers are taken
        sound, faults = _part_by_part(data)
    else:
        faults = dict[str, str]()
    for place, problem in _faults_beyond_form(sound, faults):
        faults.setdefault(place, problem)
    if faults:
        raise LoadError([Fault(source, place, problem) for place, problem in faults.items()])
    return sound


def _part_by_part(data: Mapping[str, Any]) -> tuple[ToolSpec, dict[str, str]]:
    """What of a manifest is sound, and what is wrong with the form of the rest, by place."""
    faults: dict[str, str] = {}
    views: dict[str, dict[str, Any]] = {}
    for key in data:
        if key not in ToolManifest.model_fields:
            faults[path_text([key])] = unknown_key(key, ToolManifest.model_fields)
    for name, model in (("llm", LlmView), ("runtime", RuntimeView)):
        view = data.get(name, {} if name == "runtime" else None)
        if isinstance(view, dict):
            views[name] = _with_one_name(cast("dict[str, Any]", view), name, faults)
            faults.update(faults_of(model, views[name], (name,), _MISSING))
        elif name in data:
            faults[name] = f"is a JSON {json_type(view)}; expected an object"
        else:
            faults[name] = "is missing; expected an object with name, description and parameters"
    return _sound_part(views), faults


def _with_one_name(view: dict[str, Any], name: str, faults: dict[str, str]) -> dict[str, Any]:
    view = dict(view)
    for other, ours in _OTHER_NAMES[name].items():
        if other in view:
            if ours in view:
                faults[f"{name}.{other}"] = f"says the same as {ours}; keep one of them"
                del view[other]
            else:
                view[ours] = view.pop(other)
    return view


def _sound_part(views: Mapping[str, dict[str, Any]]) -> ToolSpec:
    """The manifest with its faulty places filled or left out, so that one fault does not hide another."""
    llm: dict[str, Any] = {"name": "unnamed", "description": "-", "parameters": {"type": "object"}}
    llm |= sound_part(LlmView, views.get("llm", {}))
    runtime = sound_part(RuntimeView, views.get("runtime", {}), _FILLERS)
    return ToolManifest.model_validate_json(json.dumps({"llm": llm, "runtime": runtime}), strict=True).spec()


def _faults_beyond_form(spec: ToolSpec, faults: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    described = "llm" not in faults and "llm.parameters" not in faults
    yield from checked(spec).problems if described else faults_in(replace(spec, locks=(), targets={}))
