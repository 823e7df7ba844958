"""Tool folders: ``foo.json`` with its executable ``foo`` in any language, and Python modules as tools.

A folder is read once, when a generation is built, and only if no one but the operator can write there: another writer could
run programs as tools. Loose permissions, owners, or links that lead out are faults. ``resources.json`` in a folder holds
resources and prompts.
"""

from __future__ import annotations

import ast
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.result_conversions import convert_card_to_result
from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.contract.services.tool_runtime import Runtime, UserContext
from handrail.contract.struct import Struct
from handrail.contract.text.strict_json import parse_json_object
from handrail.contract.tool.manifest import (
    MAX_MANIFEST_BYTES,
    normalise_tool_relative_path,
    parse_manifest_data,
    parse_manifest_text,
)
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank
from handrail.registry.sources.executable_tools import PerCallExecutableTool, ToolConfinement
from handrail.registry.sources.operator_resources import (
    MAX_RESOURCES_FILE_BYTES,
    RESOURCES_FILE,
    FileResourceProvider,
    parse_resources,
)
from handrail.registry.sources.persistent_tools import PersistentProcessTool, fingerprint_program_files

# Python modules as tools: ``execute(topic, params, config=None, telemetry=None)`` and metadata, in a tool folder.
#
# The metadata is a manifest next to the module (``weather.json`` for ``weather.py``), or a literal ``METADATA = {…}`` in it,
# which is read without running the module. A module runs in a worker process in the sandbox of its requirements, as any
# program of a tool folder does, with the packages of the Python that Handrail runs on. ``config`` holds its settings and the
# secrets that it declares. ``telemetry`` is the user context that the client reports; each of its fields may be None.

METADATA_NAME = "METADATA"
_VIEWS = frozenset({"llm", "runtime"})
_LLM_KEYS = {"name": "name", "description": "description", "parameters": "parameters"}
_RENAMED_KEYS = {"config_schema": "config"}
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array"})


class PerCallModuleTool(PerCallExecutableTool):
    """A tool in a Python module, which a new worker process runs for each call."""

    def __init__(self, spec: ToolSpec, executable: str, folder: str, confinement: ToolConfinement, **more: Any) -> None:
        super().__init__(spec, executable, folder, confinement, **more)
        self.command = (
            _python_path_in_sandbox(),
            "-I",
            "-c",
            _worker(),
            executable,
            *(["serve"] if spec.persistent else []),
        )

    def build_program_input(self, args: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
        surroundings = asdict(runtime.user_context or UserContext())
        return {"topic": runtime.topic or "", "params": args, "telemetry": surroundings}

    def adapt_profile(
        self, profile: SandboxProfile, environment: Mapping[str, str], config: Mapping[str, str]
    ) -> SandboxProfile:
        profile = super().adapt_profile(profile, environment, config)
        return replace(profile, readable=(*profile.readable, *_list_interpreter_folders()))

    def parse_program_answer(self, answer: dict[str, Any]) -> object:
        return convert_card_to_result(answer)


class PersistentModuleTool(PerCallModuleTool, PersistentProcessTool):
    """A tool in a Python module, whose worker process stays running between calls."""


@lru_cache(maxsize=1)
def _worker() -> str:
    return Path(__file__).with_name("module_worker.py").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _python_path_in_sandbox() -> str:
    """Return the path of this Python in the sandbox, with links in the path to its folder resolved."""
    folder, name = os.path.split(sys.executable)
    return str(Path(os.path.realpath(folder)) / name)


@lru_cache(maxsize=1)
def _list_interpreter_folders() -> tuple[str, ...]:
    """Return the folders of this Python that are not part of the system."""
    found = dict.fromkeys(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix))
    return tuple(prefix for prefix in found if prefix not in ("/usr", "/"))


def is_module_for_worker(executable: Path) -> bool:
    """Return whether a manifest's file is a module for the worker, and not an executable program."""
    return executable.suffix == ".py" and executable.is_file() and not executable.lstat().st_mode & 0o111


def parse_module_tool_spec(content: bytes, place: str, name: str) -> ToolSpec | None:
    """Return the tool that a module declares in ``METADATA``, or None. The module is not run.

    :param name: the name of the tool if the metadata has none
    :raises LoadError: with every fault of the module and its metadata
    """
    tree = _parse_module(content, place)
    declared = [
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == METADATA_NAME for target in statement.targets)
    ]
    if not declared:
        return None
    faults = [] if (problem := _fault_in_execute(tree)) is None else [Diagnostic(place, "execute", problem)]
    try:
        data = ast.literal_eval(declared[-1])
    except (ValueError, RecursionError, MemoryError, TypeError):
        problem = (
            "is not a literal; write it without computed values, so that Handrail can read it without "
            "running the module"
        )
        raise LoadError([*faults, Diagnostic(place, METADATA_NAME, problem)]) from None
    if not isinstance(data, dict):
        raise LoadError([*faults, Diagnostic(place, METADATA_NAME, f"is a {type(data).__name__}; expected a dict")])
    try:
        spec = parse_manifest_data(_build_manifest(cast("dict[str, Any]", data), name), place)
    except LoadError as error:
        raise LoadError([*faults, *error.diagnostics]) from None
    if faults:
        raise LoadError(faults)
    return spec


def read_module_runtime_view(place: str) -> dict[str, Any]:
    """Return the runtime view that a valid module declares."""
    tree = ast.parse(Path(place).read_bytes())
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == METADATA_NAME:
            return _build_manifest(ast.literal_eval(statement.value), "")["runtime"]
    return {}


def explain_module_fault(content: bytes, place: str) -> str | None:
    """Return the reason why a module with a manifest cannot run as a tool, or None."""
    try:
        return _fault_in_execute(_parse_module(content, place))
    except LoadError as error:
        return error.diagnostics[0].problem


def _parse_module(content: bytes, place: str) -> ast.Module:
    if len(content) > MAX_MANIFEST_BYTES:
        raise LoadError([Diagnostic(place, "", "is larger than 1 MiB; move code into modules next to it")])
    try:
        return ast.parse(content)
    except SyntaxError as error:
        raise LoadError(
            [Diagnostic(place, "", f"is not Python {sys.version_info[0]}: line {error.lineno}: {error.msg}")]
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise LoadError([Diagnostic(place, "", f"cannot be read as Python: {error}")]) from None


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
        return f"requires {', '.join(unknown)}, which the worker does not pass; {expected}"
    return None


def _build_manifest(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the two views of a manifest for flat metadata, as modules write it."""
    if data.keys() & _VIEWS:
        return data
    llm = {"name": name, **{key: data[key] for key in _LLM_KEYS if key in data}}
    if isinstance(llm.get("parameters", {}), dict):
        llm["parameters"] = _parameters_to_json_schema(cast("dict[str, Any]", llm.get("parameters", {})))
    runtime = {
        _RENAMED_KEYS.get(key, key): value
        for key, value in data.items()
        if key not in _LLM_KEYS and key != "constraints"
    }
    if data.get("constraints") is not None:
        _add_constraints(runtime, data["constraints"])
    return {"llm": llm, "runtime": runtime}


def _add_constraints(runtime: dict[str, Any], constraints: object) -> None:
    if isinstance(constraints, dict):
        bounds = cast("dict[str, Any]", constraints)
        seconds = bounds.get("timeout_seconds")
        if isinstance(seconds, (int, float)) and not isinstance(seconds, bool):
            runtime.setdefault("timeout_ms", int(seconds * 1000))
            bounds = {key: value for key, value in bounds.items() if key != "timeout_seconds"}
        if not bounds:
            return
        constraints = bounds
    runtime["constraints"] = constraints  # the manifest's reader reports unknown constraints


def _parameters_to_json_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as a JSON Schema, also from ``{name: {type, description, required}}``."""
    if parameters.get("type") == "object" and not isinstance(parameters.get("properties", {}).get("type"), str):
        return parameters
    required: list[str] = []
    properties: dict[str, Any] = {}
    for name, declared in parameters.items():
        if not isinstance(declared, dict):
            return parameters  # neither form; the schema check reports the fault
        one = dict(cast("dict[str, Any]", declared))
        if one.get("type") in _TYPES and one.pop("required", False) is True:
            required.append(name)
        properties[name] = one
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


_OTHERS_MAY_WRITE = 0o022
_MOST_OFFERINGS = 64
_offerings: dict[Path, tuple[bytes, FileResourceProvider]] = {}
"""By file, its content and the parsed resources."""


class ToolFolderSource(Struct, frozen=True):
    """Every ``*.json`` and every module with metadata directly in a folder. A missing folder has no tools.

    :param path: absolute; the global and an agent's folder are in the configuration folder, never in a workspace
    :param confinement: the sandbox for the executables
    :param workspaces: the folders that a model can write to; a tool folder that overlaps one of them is refused
    :param find_previous_tool: returns the tool with an id from the previous load, or None
    """

    path: str | Path
    rank: SourceRank
    confinement: ToolConfinement
    workspaces: tuple[str, ...] = ()
    is_third_party: bool = False
    find_previous_tool: Callable[[str], Tool | None] = lambda _: None

    def load(self) -> SourceContents:
        if not os.path.lexists(self.path):
            return SourceContents()
        folder = Path(os.path.realpath(self.path))
        if problem := find_folder_tampering_risk(folder, self.workspaces):
            return SourceContents(faults=(Diagnostic(str(self.path), "", problem),))
        tools: list[DiscoveredTool] = []
        faults: list[Diagnostic] = []
        offering: FileResourceProvider | None = None
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if not name.endswith((".json", ".py")) or name.startswith("."):
                continue
            file = folder / name
            if name == RESOURCES_FILE:
                try:
                    offering = self._load_resources(folder, file)
                except LoadError as error:
                    faults += error.diagnostics
                continue
            try:
                tool = (
                    self._load_manifest_tool(folder, file)
                    if name.endswith(".json")
                    else self._load_module_tool(folder, file)
                )
            except LoadError as error:
                faults += error.diagnostics
            else:
                tools += [] if tool is None else [DiscoveredTool(tool, str(file))]
        return SourceContents(tuple(tools), tuple(faults), resource_provider=offering)

    def _load_resources(self, folder: Path, file: Path) -> FileResourceProvider:
        """Return the resources of a file. The object is the same while the file is unchanged."""
        content = read_file_within_limit(file, MAX_RESOURCES_FILE_BYTES)
        known = _offerings.get(file)
        if known is None or known[0] != content or any(known[1].find_faults(str(file))):
            known = (content, parse_resources(content, str(file), folder, read_file_within_limit))
            _offerings[file] = known
            while len(_offerings) > _MOST_OFFERINGS:
                del _offerings[next(iter(_offerings))]
        return known[1]

    def _load_module_tool(self, folder: Path, module: Path) -> PerCallExecutableTool | None:
        """Return the tool of a module with metadata, or None for other modules and those with a manifest.

        :raises LoadError: with all faults of its metadata
        """
        if not is_module_for_worker(module) or module.with_suffix(".json").exists():
            return None
        spec = parse_module_tool_spec(read_file_within_limit(module, MAX_MANIFEST_BYTES), str(module), module.stem)
        return None if spec is None else self._make_module_tool(spec, folder, module)

    def _make_module_tool(self, spec: ToolSpec, folder: Path, module: Path) -> PerCallExecutableTool:
        if not spec.persistent:
            return PerCallModuleTool(spec, str(module), str(folder), self.confinement)
        digest = fingerprint_program_files(module, folder, own=False)
        return self._reuse_previous(
            PersistentModuleTool(spec, str(module), str(folder), self.confinement, digest=digest)
        )

    def _reuse_previous(self, made: PersistentProcessTool) -> PersistentProcessTool:
        """Return the previous tool if it is equivalent, since it may have a running process."""
        before = self.find_previous_tool(made.spec.id)
        return before if isinstance(before, PersistentProcessTool) and before.has_equivalent_process(made) else made

    def _load_manifest_tool(self, folder: Path, manifest: Path) -> PerCallExecutableTool:
        """Return the tool of a manifest.

        :raises LoadError: with all faults of the manifest and of its executable
        """
        faults: list[Diagnostic] = []
        content = read_file_within_limit(manifest, MAX_MANIFEST_BYTES)
        spec = _spec_of(content, manifest, faults)
        named = _find_executable_name(content, spec, faults) or _default_executable(manifest)
        executable = _resolve_canonical(folder, named)
        if is_module_for_worker(executable) and executable.parent == folder:
            if spec is None:
                raise LoadError(faults)
            if problem := explain_module_fault(read_file_within_limit(executable, MAX_MANIFEST_BYTES), str(executable)):
                raise LoadError([*faults, Diagnostic(str(executable), "", problem)])
            return self._make_module_tool(spec, folder, executable)
        unbuilt = spec is not None and bool(spec.build) and not os.path.lexists(folder / named)
        if unbuilt:
            if (problem := _problem_with_sources(folder, named)) is not None:
                faults.append(Diagnostic(str(manifest), "runtime.build", problem))
        elif not _hides_executable(faults) and (problem := find_executable_problem(folder, named, executable)):
            faults.append(Diagnostic(str(manifest), "runtime.exec_path", problem))
        if faults or spec is None:
            raise LoadError(faults)
        return self._make_program_tool(spec, folder, executable, unbuilt=unbuilt)

    def _make_program_tool(
        self, spec: ToolSpec, folder: Path, executable: Path, *, unbuilt: bool
    ) -> PerCallExecutableTool:
        inner = () if executable.parent == folder else executable.relative_to(folder).parts[:-1]
        seen = folder.joinpath(*inner[:1])
        if not spec.persistent:
            return PerCallExecutableTool(spec, str(executable), str(seen), self.confinement)
        digest = None if unbuilt else fingerprint_program_files(executable, seen, own=seen != folder)
        return self._reuse_previous(
            PersistentProcessTool(spec, str(executable), str(seen), self.confinement, digest=digest)
        )


def _spec_of(content: bytes, manifest: Path, faults: list[Diagnostic]) -> ToolSpec | None:
    """Return the parsed manifest, or None if it has faults, which are added to ``faults``."""
    try:
        return parse_manifest_text(content, str(manifest))
    except LoadError as error:
        faults += error.diagnostics
        return None


def _resolve_canonical(folder: Path, named: str) -> Path:
    """Return the path of ``named`` in the canonical ``folder``, with links resolved."""
    place = folder / named
    return place if "/" not in named and not place.is_symlink() else Path(os.path.realpath(place))


def _default_executable(manifest: Path) -> str:
    """Return the executable of a manifest without ``exec_path``: the program or module of its name."""
    module = manifest.with_suffix(".py")
    return (
        module.name if is_module_for_worker(module) and not os.path.lexists(manifest.with_suffix("")) else manifest.stem
    )


def find_folder_tampering_risk(folder: Path, workspaces: Iterable[str]) -> str | None:
    """Return the reason why a model or another user could change the canonical ``folder``, or None."""
    if not folder.is_dir():
        return "is not a folder; tools are read from a folder of manifests and executables"
    for root in workspaces:
        workspace = Path(os.path.realpath(root))
        if folder.is_relative_to(workspace) or workspace.is_relative_to(folder):
            return (
                f"overlaps the workspace {workspace}, where a model can write; move it to a folder outside "
                "the workspace"
            )
    for ancestor in folder.parents:
        found = ancestor.lstat()
        if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
            return f"its parent folder {ancestor} is writable by every user; run: chmod o-w {ancestor}"
    return explain_unsafe_permissions(folder)


def explain_unsafe_permissions(path: Path) -> str | None:
    """Return the reason why another user could change the file or folder at ``path``, or None."""
    return _explain_loose_permissions(path, path.lstat())


def _explain_loose_permissions(path: Path, found: os.stat_result) -> str | None:
    if os.name != "posix":
        return None  # no sandbox tier exists there, so no tool starts
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}; expected this user or root. Run: chown {os.geteuid()} {path}"
    if found.st_mode & _OTHERS_MAY_WRITE:
        return f"is writable by its group or by others; run: chmod go-w {path}"
    return None


def read_file_within_limit(manifest: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file of the operator's; one more than ``max_bytes`` if it is larger.

    :raises LoadError: if it is not a regular file, or another user may write to it
    """
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        linked = manifest.is_symlink()
        problem = "is a link; replace it with the file itself" if linked else f"cannot be read: {error.strerror}"
        raise LoadError([Diagnostic(str(manifest), "", problem)]) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise LoadError([Diagnostic(str(manifest), "", "is not a regular file; expected a manifest")])
        if problem := _explain_loose_permissions(manifest, found):
            raise LoadError([Diagnostic(str(manifest), "", problem)])
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    finally:
        os.close(descriptor)


def _problem_with_sources(folder: Path, named: str) -> str | None:
    """Return the reason why the executable of a manifest cannot be built in its folder, or None."""
    own = folder / named.split("/", 1)[0]
    if own.is_symlink() or not own.is_dir():
        return f"the folder {own.name!r} next to the manifest is missing; put the sources of {named!r} there"
    problem = explain_unsafe_permissions(own)
    return None if problem is None else f"{own.name} {problem}"


def _hides_executable(faults: list[Diagnostic]) -> bool:
    """Return whether the faults of a manifest make its executable unknown."""
    return any(fault.location in ("", "runtime", "runtime.exec_path") for fault in faults)


def _find_executable_name(content: bytes, spec: ToolSpec | None, faults: list[Diagnostic]) -> str | None:
    """Return the executable that a manifest names, also if the manifest has faults elsewhere."""
    if spec is not None:
        return spec.exec_path
    if _hides_executable(faults):
        return None
    runtime: Any = parse_json_object(content, max_bytes=MAX_MANIFEST_BYTES).get("runtime", {})
    return normalise_tool_relative_path(runtime["exec_path"]) if runtime.get("exec_path") is not None else None


def find_executable_problem(folder: Path, named: str, executable: Path) -> str | None:
    """Return the reason why the file that a manifest names cannot be its executable, or None."""
    if not os.path.lexists(folder / named):
        return f"{named!r} next to the manifest is missing; put the executable there or name it in exec_path"
    if executable.parent != folder and not executable.is_relative_to(folder):
        return f"{named!r} leads out of the tool's folder to {executable}; put the executable itself into the folder"
    try:
        mode = executable.lstat().st_mode
    except OSError as error:
        return f"{named!r} cannot be read: {error.strerror}"
    if stat.S_ISDIR(mode):
        return f"{named!r} is a folder; name the executable in it, as in exec_path: {named + '/run'!r}"
    if not stat.S_ISREG(mode):
        return f"{named!r} is not a regular file; replace it with the executable"
    if not mode & 0o111 or not os.access(executable, os.X_OK):
        return f"{named!r} is not executable; run: chmod +x {executable}"
    part = executable
    while part != folder:
        if problem := explain_unsafe_permissions(part):
            return f"{part.relative_to(folder)} {problem}"
        part = part.parent
    return None
