"""The tool manifest: a tool as JSON in two views, and a check that reports every fault at once.

``llm`` is the part that a model sees. ``runtime`` is everything else and never leaves the kernel. Both common forms are
accepted: ``parameters`` or ``input_schema``, ``secrets`` or ``secret_resources``, ``"file:{path}:S"`` or
``{"resource": "file:<path>", "mode": "S"}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any, cast, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.text.strict_json import InvalidJsonTextError, get_json_type_name, parse_json_object
from handrail.contract.text.text_encodings import decode_settings_text
from handrail.contract.tool.requires import NetRequires, Requires
from handrail.contract.tool.spec import FIELDS, ConfigKey, LockSpec, TargetTemplates, ToolSpec, find_spec_faults
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.contract.tool.tool_protocol import check_spec

# Checks of an untrusted JSON-like mapping by a model: every fault with its place, and the sound part.
#
# Nothing is coerced and no key is ignored. The message about an unknown key suggests the nearest known one.

Location = tuple[str | int, ...]


def find_model_validation_faults(
    model: type[BaseModel],
    data: Mapping[str, Any],
    prefix: tuple[str, ...] = (),
    missing: Mapping[Location, str] | None = None,
) -> dict[str, str]:
    """Return the problems of ``data`` that ``model`` does not accept, by place.

    :param data: JSON-able data
    :param prefix: the place of ``data`` in its file
    :param missing: texts for missing keys, by place, where they help more than "is missing"
    """
    try:
        model.model_validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as error:
        return {
            format_json_path((*prefix, *_strip_union_tags(fault["loc"]))): _text(dict(fault), model, missing or {})
            for fault in error.errors()
        }
    return {}


def _strip_union_tags(location: Location) -> Location:
    """Return the location without the names of a union's members, which do not occur in the data."""
    return tuple(part for part in location if not (isinstance(part, str) and part[:1] == "<"))


def repair_faulty_data(
    model: type[BaseModel], data: Mapping[str, Any], fillers: Mapping[str, object] | None = None
) -> Any:
    """Return ``data`` with faulty places filled or left out, so that one fault does not hide another.

    Missing required keys of the outermost level stay missing; the caller adds them.

    :param fillers: by outermost key, the replacement of a faulty list item, instead of ``"-"``
    """
    rest: dict[str, Any] = json.loads(json.dumps(data))
    while True:
        try:
            model.model_validate_json(json.dumps(rest), strict=True)
        except pydantic.ValidationError as error:
            found = [fault["loc"] for fault in error.errors() if fault["type"] != "missing" or len(fault["loc"]) > 1]
            if not found:
                return rest
            # One fault of each item: the others may disappear with it, and the next round shows them.
            for location in {_list_item(location): location for location in reversed(found)}.values():
                _remove_faulty_value(rest, location, (fillers or {}).get(str(location[0]), "-"))
        else:
            return rest


def _list_item(location: Location) -> Location:
    """Return the location of the list item that ``location`` is in, else ``location``."""
    return next((location[: i + 1] for i, part in enumerate(location) if isinstance(part, int)), location)


def describe_unknown_key(name: str, known: Mapping[str, object]) -> str:
    """Return the text about an unknown key, with the nearest known one."""
    close = nearest_names(name, known, cutoff=0.6)
    return f"unknown key; did you mean {close[0]!r}?" if close else f"unknown key; available: {', '.join(known)}"


def _text(fault: Mapping[str, Any], model: type[BaseModel], missing: Mapping[Location, str]) -> str:
    location = cast("Location", fault["loc"])
    if fault["type"] == "missing":
        return missing.get(location, "is missing")
    if fault["type"] == "extra_forbidden":
        return describe_unknown_key(str(location[-1]), _allowed_keys_at(model, location[:-1]))
    value = repr(fault["input"])
    shown = value if len(value) <= 80 else f"{value[:79]}…"
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    return message if message.startswith(shown) else f"is {shown}; {message}"


def _allowed_keys_at(model: type[BaseModel], location: Location) -> Mapping[str, object]:
    """Return the keys that are allowed at ``location``, through lists, mappings and unions of models."""
    annotation: object = model
    for part in location:
        fields = {name: f for m in _models_in(annotation) for name, f in m.model_fields.items()}
        if isinstance(part, str) and part in fields:
            annotation = fields[part].annotation
    return {name: f for m in _models_in(annotation) for name, f in m.model_fields.items()}


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _remove_faulty_value(view: dict[str, Any], location: Location, filler: object) -> None:
    """Remove the value at ``location``, or its parent if it has none.

    A list keeps its numbering if it can.
    """
    node: Any = view
    reached: list[tuple[Any, Any]] = []
    for part in location:
        if isinstance(node, str):
            break
        try:
            inner = node[part]
        except (KeyError, IndexError, TypeError):
            break
        reached.append((node, part))
        node = inner
    if not reached:
        return
    holder, key = reached[-1]
    if isinstance(holder, list) and node != filler:
        holder[key] = filler
    else:
        del holder[key]


MAX_MANIFEST_BYTES = 1024 * 1024
MAX_WORD = 10_000
"""Characters of a word of a build command."""
_MISSING: Mapping[Location, str] = {
    ("parameters",): 'is missing; for a tool without arguments write {"type": "object", "properties": {}}'
}
_FILLERS = {"locks": "-:S", "locks_background": "-:S"}
_OTHER_NAMES = {"llm": {"input_schema": "parameters"}, "runtime": {"secret_resources": "secrets"}}


class _ManifestView(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class DeclaredSettingView(_ManifestView):
    """A setting that a tool declares in its manifest."""

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


def normalise_tool_relative_path(value: object) -> str:
    """Return the path relative to the tool's own folder, whatever folder it had where it was written."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    path = value.rpartition("/")[2] if value.startswith("/") else value.removeprefix("./")
    if not path or not path.isprintable() or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("expected the name of a file, or a path below the tool's own folder without '..'")
    return path


def _templates(value: object) -> str | tuple[str, ...]:
    several = cast("list[object]", value) if isinstance(value, list) else [value]
    texts = [one for one in several if isinstance(one, str)]
    if len(texts) != len(several):
        raise ValueError('expected "{path}", or a list as in ["{path}", "{to}"]')
    return tuple(texts) if isinstance(value, list) else texts[0]


Lock = Annotated[LockSpec, PlainValidator(_lock)]
Templates = Annotated[str | tuple[str, ...], PlainValidator(_templates)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]
ExecPath = Annotated[str, PlainValidator(normalise_tool_relative_path)]


class LlmView(_ManifestView):
    """The part of a manifest that goes into a model's tools parameter."""

    name: str
    description: str
    parameters: dict[str, Any]


_AS_JSON: Mapping[Any, Any] = {
    Mapping[str, Any]: dict[str, Any],
    TargetTemplates: dict[str, Templates],
    Mapping[str, ConfigKey]: dict[str, DeclaredSettingView],
    tuple[LockSpec, ...]: tuple[Lock, ...],
}
"""The type in a manifest by the type in a spec. All others are the same in both."""
_AS_JSON_OF: Mapping[str, Any] = {"exec_path": ExecPath, "build": tuple[Word, ...]}
_OF_THE_LLM_VIEW = frozenset(LlmView.model_fields) | {"id"}
_CODE_ONLY_FIELDS = frozenset(
    {"step_parameters", "long_running", "single_command", "confinement_gap", "provider_support", "client_listing"}
)


def _manifest_fields() -> Iterator[tuple[str, Any]]:
    """Yield the fields of a spec that a manifest may set, each with its type in JSON and the spec's default."""
    for one in fields(ToolSpec):
        if one.name in _OF_THE_LLM_VIEW or one.name in _CODE_ONLY_FIELDS:
            continue
        held, may_be_none = FIELDS[one.name]
        annotation = _AS_JSON_OF.get(one.name) or _AS_JSON.get(held, held)
        default = one.default if one.default_factory is MISSING else Field(default_factory=one.default_factory)
        yield one.name, (annotation | None if may_be_none else annotation, default)


_SpecFields = pydantic.create_model("_SpecFields", __base__=_ManifestView, **dict(_manifest_fields()))


class RuntimeView(_SpecFields):
    """The part of a manifest that only the kernel sees.

    Each field has the type, default and meaning of :class:`~handrail.contract.tool.spec.ToolSpec`.
    """

    requires: Requires = Requires()
    config: dict[str, DeclaredSettingView] = Field(default_factory=dict[str, DeclaredSettingView])
    network: bool | None = None

    @pydantic.field_validator("network")
    @classmethod
    def _agrees_with_hosts(cls, network: bool | None, info: pydantic.ValidationInfo) -> bool | None:
        requires = info.data.get("requires")
        if network is False and isinstance(requires, Requires) and requires.net.hosts:
            raise ValueError("but requires.net.hosts names hosts; remove one of the two")
        return network


class ToolManifest(_ManifestView):
    """Both views of one tool."""

    llm: LlmView
    runtime: RuntimeView = RuntimeView()

    def spec(self) -> ToolSpec:
        """Return the described tool."""
        runtime: dict[str, Any] = {name: getattr(self.runtime, name) for name in RuntimeView.model_fields}
        network: bool | None = runtime.pop("network")
        if network and not self.runtime.requires.net.hosts:
            everywhere = NetRequires(hosts=("*",))
            runtime["requires"] = self.runtime.requires.model_copy(update={"net": everywhere})
        runtime["config"] = {key: ConfigKey(**value.model_dump()) for key, value in self.runtime.config.items()}
        return ToolSpec(id=self.llm.name, description=self.llm.description, parameters=self.llm.parameters, **runtime)


def parse_manifest_text(text: str | bytes, source: str) -> ToolSpec:
    """Parse the text of a manifest: at most 1 MiB of strict JSON.

    :raises LoadError: with every fault, each with ``source`` and the place in it
    """
    try:
        data = parse_json_object(text, what="the manifest's contents", max_bytes=MAX_MANIFEST_BYTES)
    except InvalidJsonTextError as error:
        raise LoadError([Diagnostic(source, "", str(error))]) from None
    return _read(data, decode_settings_text(text) if isinstance(text, bytes) else text, source)


def parse_manifest_data(data: Mapping[str, Any], source: str) -> ToolSpec:
    """Read a manifest from JSON-able data.

    :raises LoadError: with every fault, each with ``source`` and the place in it
    """
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LoadError([Diagnostic(source, "", f"is not JSON: {error}")]) from None
    return _read(data, text, source)


def _read(data: Mapping[str, Any], text: str | bytes, source: str) -> ToolSpec:
    """Read a manifest.

    :param text: ``data`` as JSON
    """
    try:
        sound = ToolManifest.model_validate_json(text, strict=True).spec()
    except pydantic.ValidationError:  # find the faults part by part, and accept the names of other systems
        sound, faults = _read_part_by_part(data)
    else:
        faults = dict[str, str]()
    for place, problem in _faults_beyond_form(sound, faults):
        faults.setdefault(place, problem)
    if faults:
        raise LoadError([Diagnostic(source, place, problem) for place, problem in faults.items()])
    return sound


def _read_part_by_part(data: Mapping[str, Any]) -> tuple[ToolSpec, dict[str, str]]:
    """Return the sound part of a manifest, and the faults of form of the rest, by place."""
    faults: dict[str, str] = {}
    views: dict[str, dict[str, Any]] = {}
    for key in data:
        if key not in ToolManifest.model_fields:
            faults[format_json_path([key])] = describe_unknown_key(key, ToolManifest.model_fields)
    for name, model in (("llm", LlmView), ("runtime", RuntimeView)):
        view = data.get(name, {} if name == "runtime" else None)
        if isinstance(view, dict):
            views[name] = _with_one_name(cast("dict[str, Any]", view), name, faults)
            faults.update(find_model_validation_faults(model, views[name], (name,), _MISSING))
        elif name in data:
            faults[name] = f"is a JSON {get_json_type_name(view)}; expected an object"
        else:
            faults[name] = "is missing; expected an object with name, description and parameters"
    return _repair_manifest_views(views), faults


def _with_one_name(view: dict[str, Any], name: str, faults: dict[str, str]) -> dict[str, Any]:
    view = dict(view)
    for other, ours in _OTHER_NAMES[name].items():
        if other in view:
            if ours in view:
                faults[f"{name}.{other}"] = f"is another name of {ours}; keep one of them"
                del view[other]
            else:
                view[ours] = view.pop(other)
    return view


def _repair_manifest_views(views: Mapping[str, dict[str, Any]]) -> ToolSpec:
    """Return the manifest with faulty places filled or left out, so that one fault does not hide another."""
    llm: dict[str, Any] = {"name": "unnamed", "description": "-", "parameters": {"type": "object"}}
    llm |= repair_faulty_data(LlmView, views.get("llm", {}))
    runtime = repair_faulty_data(RuntimeView, views.get("runtime", {}), _FILLERS)
    return ToolManifest.model_validate_json(json.dumps({"llm": llm, "runtime": runtime}), strict=True).spec()


def _faults_beyond_form(spec: ToolSpec, faults: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    described = "llm" not in faults and "llm.parameters" not in faults
    yield from check_spec(spec).problems if described else find_spec_faults(replace(spec, locks=(), targets={}))
