"""Python modules as tools: ``execute(topic, params, config=None, telemetry=None)`` and metadata, in a tool folder.

The metadata stands beside the module as a manifest (``weather.json`` for ``weather.py``), or in it as a literal
``METADATA = {…}``, which is read without running anything. A module runs in a worker process in the sandbox of what it
requires, like any program of a tool folder, with the packages of the Python that Handrail runs on. ``config`` holds its
settings and the secrets that it declares, ``telemetry`` what the face knows of the person's surroundings; each of its
fields may be None.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from handrail.contract.doors.runtime import ClientContext, Runtime
from handrail.contract.envelopes import from_card
from handrail.contract.errors import Fault, LoadError
from handrail.contract.sandbox import Profile
from handrail.contract.tool.manifest import MAX_MANIFEST_BYTES, read_manifest
from handrail.contract.tool.spec import ToolSpec
from handrail.registry.sources.executables import Confinement, ExecutableTool
from handrail.registry.sources.persistent.persistent import PersistentTool

METADATA = "METADATA"
_VIEWS = frozenset({"llm", "runtime"})
_LLM = {"name": "name", "description": "description", "parameters": "parameters"}
_RENAMED = {"config_schema": "config"}
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array"})


class ModuleTool(ExecutableTool):
    """One module, started for each call."""

    def __init__(self, spec: ToolSpec, executable: str, folder: str, confinement: Confinement, **more: Any) -> None:
        super().__init__(spec, executable, folder, confinement, **more)
        self.command = (_python(), "-I", "-c", _worker(), executable, *(["serve"] if spec.persistent else []))

    def payload(self, args: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
        surroundings = asdict(runtime.client or ClientContext())
        return {"topic": runtime.topic or "", "params": args, "telemetry": surroundings}

    def around(self, profile: Profile, environment: Mapping[str, str], config: Mapping[str, str]) -> Profile:
        profile = super().around(profile, environment, config)
        return replace(profile, readable=(*profile.readable, *_interpreter()))

    def recognised(self, answer: dict[str, Any]) -> object:
        return from_card(answer)


class PersistentModuleTool(ModuleTool, PersistentTool):
    """One module, kept running between calls."""


@lru_cache(maxsize=1)
def _worker() -> str:
    return Path(__file__).with_name("module_worker.py").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _python() -> str:
    """This Python as the sandbox has it: an environment's own, in the folder that a link to the environment leads to."""
    folder, name = os.path.split(sys.executable)
    return str(Path(os.path.realpath(folder)) / name)


@lru_cache(maxsize=1)
def _interpreter() -> tuple[str, ...]:
    """The folders of this Python, where they are none of the system's own."""
    found = dict.fromkeys(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix))
    return tuple(prefix for prefix in found if prefix not in ("/usr", "/"))


def is_module(executable: Path) -> bool:
    """Whether a manifest's file is a module that a worker runs, and not a program of its own."""
    return executable.suffix == ".py" and executable.is_file() and not executable.lstat().st_mode & 0o111


def metadata_in(content: bytes, place: str, name: str) -> ToolSpec | None:
    """The tool that a module declares in itself, or None for a module that declares none. Runs nothing.

    :param name: what it is called where it does not say so
    :raises LoadError: with every fault of the module and its metadata
    """
    tree = _parsed(content, place)
    declared = [
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == METADATA for target in statement.targets)
    ]
    if not declared:
        return None
    faults = [] if (problem := _fault_in_execute(tree)) is None else [Fault(place, "execute", problem)]
    try:
        data = ast.literal_eval(declared[-1])
    except (ValueError, RecursionError, MemoryError, TypeError):
        problem = "is not a literal; nothing in it is computed, so that it can be read without running the module"
        raise LoadError([*faults, Fault(place, METADATA, problem)]) from None
    if not isinstance(data, dict):
        raise LoadError([*faults, Fault(place, METADATA, f"is a {type(data).__name__}; expected a dict")])
    try:
        spec = read_manifest(_manifest(cast("dict[str, Any]", data), name), place)
    except LoadError as error:
        raise LoadError([*faults, *error.faults]) from None
    if faults:
        raise LoadError(faults)
    return spec


def declared_in(place: str) -> dict[str, Any]:
    """The runtime view as a sound module wrote it."""
    tree = ast.parse(Path(place).read_bytes())
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == METADATA:
            return _manifest(ast.literal_eval(statement.value), "")["runtime"]
    return {}


def fault_in_module(content: bytes, place: str) -> str | None:
    """Why a module whose metadata stand beside it cannot be run as a tool, or None."""
    try:
        return _fault_in_execute(_parsed(content, place))
    except LoadError as error:
        return error.faults[0].problem


def _parsed(content: bytes, place: str) -> ast.Module:
    if len(content) > MAX_MANIFEST_BYTES:
        raise LoadError([Fault(place, "", "is larger than 1 MiB; put what it needs into modules beside it")])
    try:
        return ast.parse(content)
    except SyntaxError as error:
        raise LoadError(
            [Fault(place, "", f"is not Python {sys.version_info[0]}: line {error.lineno}: {error.msg}")]
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise LoadError([Fault(place, "", f"cannot be read as Python: {error}")]) from None


def _fault_in_execute(tree: ast.Module) -> str | None:
    found = [s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef)) and s.name == "execute"]
    expected = "expected def execute(topic, params, config=None, telemetry=None)"
    if not found:
        return f"is missing; {expected}"
    given = found[-1].args
    positional = [one.arg for one in (*given.posonlyargs, *given.args)]
    if len(positional) < 2 and given.vararg is None:
        return f"takes {', '.join(positional) or 'nothing'}; {expected}"
    needed = positional[2 : len(positional) - len(given.defaults)]
    needed += [one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    if unknown := [name for name in needed if name not in ("config", "telemetry")]:
        return f"needs {', '.join(unknown)}, which nobody gives it; {expected}"
    return None


def _manifest(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Metadata in one level, as modules write them, in the two views of a manifest."""
    if data.keys() & _VIEWS:
        return data
    llm = {"name": name, **{key: data[key] for key in _LLM if key in data}}
    if isinstance(llm.get("parameters", {}), dict):
        llm["parameters"] = _as_schema(cast("dict[str, Any]", llm.get("parameters", {})))
    runtime = {_RENAMED.get(key, key): value for key, value in data.items() if key not in _LLM and key != "constraints"}
    constraints = data.get("constraints")
    if isinstance(constraints, dict):
        bounds = cast("dict[str, Any]", constraints)
        seconds = bounds.get("timeout_seconds")
        if isinstance(seconds, (int, float)) and not isinstance(seconds, bool):
            runtime.setdefault("timeout_ms", int(seconds * 1000))
            bounds = {key: value for key, value in bounds.items() if key != "timeout_seconds"}
        if bounds:
            runtime["constraints"] = bounds  # what is left is not understood, and the manifest's reader says so
    elif constraints is not None:
        runtime["constraints"] = constraints
    return {"llm": llm, "runtime": runtime}


def _as_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema as it is; ``{name: {type, description, required}}`` as one."""
    if parameters.get("type") == "object" and not isinstance(parameters.get("properties", {}).get("type"), str):
        return parameters
    required: list[str] = []
    properties: dict[str, Any] = {}
    for name, declared in parameters.items():
        if not isinstance(declared, dict):
            return parameters  # neither form: the schema's own check says what is wrong
        one = dict(cast("dict[str, Any]", declared))
        if one.get("type") in _TYPES and one.pop("required", False) is True:
            required.append(name)
        properties[name] = one
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}
