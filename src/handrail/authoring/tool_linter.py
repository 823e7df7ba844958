"""The linter for tools: faults that prevent loading, and weaknesses.

An *error* is a fault that start-up would refuse, or a schema that no call can fit. A *warning* is a weakness that works: a
description that is too short for a model's choice, a side effect or a lock that was left to the strict default, a parameter
that nothing reads. Nothing runs, except Python files with tools given in code: those are imported, as their program would do.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, TypeGuard, cast
from urllib.parse import quote

from handrail.catalog.provider_dialects import DIALECTS
from handrail.catalog.schema_adapter import adapt_schema, adapt_tool_view
from handrail.catalog.tool_prompt import estimate_json_tokens, find_costliest_dialect
from handrail.contract.errors import Diagnostic, LoadError, UsageError
from handrail.contract.sandbox_protocol import Sandbox
from handrail.contract.schema.argument_validation import InvalidSchemaError, compile_schema
from handrail.contract.struct import Struct
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_json_object
from handrail.contract.tool.manifest import MAX_MANIFEST_BYTES
from handrail.contract.tool.spec import ToolSpec, extract_property_schemas
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank, ToolSource
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import sort_tools_and_faults
from handrail.registry.sources.executable_tools import PerCallExecutableTool, ToolConfinement
from handrail.registry.sources.operator_resources import RESOURCES_FILE
from handrail.registry.sources.tool_folder_source import (
    METADATA_NAME,
    PerCallModuleTool,
    ToolFolderSource,
    is_module_for_worker,
    read_module_runtime_view,
)

# Parameters that are a valid schema and still wrong: no call fits them, or a part of them contradicts itself.

SchemaNode = Mapping[str, Any]

_SCHEMAS_IN = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS_IN = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS_IN = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_INDIRECT_KEYWORDS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "dependentSchemas", "not")
"""Keywords under which a schema may have properties besides ``properties``."""
_BOUNDS = (
    ("minimum", "maximum", False),
    ("minimum", "exclusiveMaximum", True),
    ("exclusiveMinimum", "maximum", True),
    ("exclusiveMinimum", "exclusiveMaximum", True),
    ("minLength", "maxLength", False),
    ("minItems", "maxItems", False),
    ("minProperties", "maxProperties", False),
)
"""A lower bound, an upper bound, and whether no value is left if they are equal."""


class _InnerSchema(Struct, frozen=True):
    """A schema within parameters.

    :param path: the keys from the root to the schema
    :param place: the path as text, such as ``parameters.filter.field``
    :param is_required: whether every call has a value for this schema
    """

    path: tuple[str, ...]
    place: str
    node: SchemaNode
    is_required: bool


def find_unsatisfiable_schemas(parameters: SchemaNode) -> Iterator[tuple[str, str]]:
    """Yield ``(place, reason)`` for each schema that no call can fit."""
    for part in _iterate_schemas(parameters):
        if part.is_required:
            yield from _required_and_refused(part, parameters)


def find_unusable_parts(parameters: SchemaNode) -> Iterator[tuple[str, str]]:
    """Yield ``(place, reason)`` for each optional part that no value can fit, and each wrong default."""
    for part in _iterate_schemas(parameters):
        if not part.is_required:
            yield from _required_and_refused(part, parameters)
        if part.node.get("enum") == []:
            yield part.place, "has an empty enum, which no value fits; list its values, or remove it"
        yield from _find_crossed_bounds(part)
        yield from _wrong_default(part, parameters)


def _required_and_refused(part: _InnerSchema, root: SchemaNode) -> Iterator[tuple[str, str]]:
    node = part.node
    required: Any = node.get("required")
    if not isinstance(required, list) or not _refuses_unnamed_properties(node, whole=not part.path):
        return
    for name in cast("list[str]", required):
        if (
            name not in node.get("properties", ())
            and not _has_pattern(node, name)
            and not _may_be_defined_elsewhere(part, name)
        ):
            yield (
                f"{part.place}.required",
                (
                    f"names {name!r}, which is not in properties; additional properties are refused, so no call "
                    "can fit. Add it to properties, or remove it from required"
                ),
            )


def _refuses_unnamed_properties(node: SchemaNode, *, whole: bool) -> bool:
    """Return whether unnamed properties are refused. A tool's arguments are closed by default."""
    if "additionalProperties" in node:
        return node["additionalProperties"] is False
    return whole and "unevaluatedProperties" not in node


def _has_pattern(node: SchemaNode, name: str) -> bool:
    for pattern in node.get("patternProperties", ()):
        try:
            if re.search(pattern, name):
                return True
        except re.error:  # not a Python expression, so its matches are unknown
            return True
    return False


def _may_be_defined_elsewhere(part: _InnerSchema, name: str) -> bool:
    """Return whether another subschema could define the property.

    That is never so with ``additionalProperties``, which covers only the properties next to it.
    """
    if "additionalProperties" in part.node or not any(keyword in part.node for keyword in _INDIRECT_KEYWORDS):
        return False
    others = (one.node for one in _iterate_schemas(part.node) if one.path)
    return any(keyword in part.node for keyword in ("$ref", "$dynamicRef")) or any(
        name in other.get("properties", ()) or _has_pattern(other, name) or "$ref" in other for other in others
    )


def _find_crossed_bounds(part: _InnerSchema) -> Iterator[tuple[str, str]]:
    for low, high, exclusive in _BOUNDS:
        least, most = part.node.get(low), part.node.get(high)
        if not _is_number(least) or not _is_number(most):
            continue
        if least > most or (exclusive and least == most):
            yield part.place, f"has {low} {least} and {high} {most}, which no value fits; raise {high} or lower {low}"


def _wrong_default(part: _InnerSchema, root: SchemaNode) -> Iterator[tuple[str, str]]:
    if "default" not in part.node:
        return
    pointer = "".join("/" + quote(key.replace("~", "~0").replace("/", "~1"), safe="~") for key in part.path)
    dialect = str(root.get("$schema", "https://json-schema.org/draft/2020-12/schema"))
    named = "id" if "draft-04" in dialect else "$id"
    whole = {
        "$schema": dialect,
        "type": "object",
        "properties": {"default": {"$ref": f"urn:handrail:parameters#{pointer}"}},
        "$defs" if "/draft/20" in dialect else "definitions": {"all": {**root, named: "urn:handrail:parameters"}},
    }
    try:
        problems = compile_schema(whole).list_problems({"default": part.node["default"]})
    except InvalidSchemaError:  # it has its own ids, so its parts cannot be found from here
        return
    if problems:
        yield (
            part.place,
            (f"has a default that does not fit its schema: {'; '.join(problems)}; correct the default, or remove it"),
        )


def _iterate_schemas(root: SchemaNode) -> Iterator[_InnerSchema]:
    """Yield a schema and every schema within it, outer ones first."""
    rest = [_InnerSchema((), "parameters", root, True)]
    while rest:
        part = rest.pop(0)
        yield part
        rest += _list_inner_schemas(part)


def _list_inner_schemas(part: _InnerSchema) -> Iterator[_InnerSchema]:
    for keyword in _SCHEMAS_IN:
        yield from _inner(part, part.node.get(keyword), (keyword,), f"{part.place}.{keyword}")
    for keyword in _LISTS_IN:
        listed: Any = part.node.get(keyword)
        for at, one in enumerate(cast("list[object]", listed) if isinstance(listed, list) else ()):
            needed = keyword == "allOf"
            yield from _inner(part, one, (keyword, str(at)), f"{part.place}.{keyword}[{at}]", needed=needed)
    required: Any = part.node.get("required")
    for keyword in _MAPS_IN:
        held: Any = part.node.get(keyword)
        own = keyword == "properties"
        for name, one in cast("SchemaNode", held if isinstance(held, Mapping) else {}).items():
            place = f"{part.place}.{name}" if own else f"{part.place}.{keyword}.{name}"
            needed = own and isinstance(required, list) and name in required
            yield from _inner(part, one, (keyword, name), place, needed=needed)


def _inner(
    part: _InnerSchema, one: object, keys: tuple[str, ...], place: str, *, needed: bool = False
) -> Iterator[_InnerSchema]:
    if isinstance(one, Mapping):
        yield _InnerSchema((*part.path, *keys), place, cast("SchemaNode", one), part.is_required and needed)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Severity = Literal["error", "warning"]
LONG_DESCRIPTION = 1_024
"""The length in characters that OpenAI's models get of a description."""
SHORT_DESCRIPTION = 20
MANY_TOKENS = 600
"""The tokens of a model's context that a loaded tool may use without a warning."""
MAX_SOURCE_BYTES = 1024 * 1024
_SECRET_LIKE = re.compile(r"(?:^|_)(?:passwords?|passwd|passphrase|secret|tokens?|api_?key|credentials?)(?:$|_)")
_OF_PAGES = re.compile(r"(?:^|_)(?:page|next|prev|previous|continue|continuation|cursor|skip|sync|start|resume)_token$")
"""Names of pagination tokens, which are not secret."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_PATH_LIKE = re.compile(r"(?:^|_)(?:path|file|filename|folder|directory|dir)$", re.IGNORECASE)


class LintFinding(Struct, frozen=True):
    """A fault or a weakness of a tool.

    :param path: the place in the file, or ``""``
    :param tool: the tool's id, or ``""`` if it is unknown
    """

    severity: Severity
    source: str
    path: str
    text: str
    tool: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {f'{self.path}: ' if self.path else ''}{self.text}"


def lint_tools(path: Path, sandbox: Sandbox) -> tuple[list[str], list[LintFinding]]:
    """Check the tools at ``path``: a manifest, a module, a Python file with tools, or a folder of them.

    :param sandbox: the sandbox for programs; none is started
    :return: the ids of the checked tools, with the name of a resources file, and the findings, errors first
    :raises UsageError: if there is nothing to check
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist. Name a manifest, a Python file, or a folder of tools.")
    found = list(_sources(path, sandbox))
    findings: list[LintFinding] = []
    tools: list[str] = []
    for source in found:
        loaded = source.load()
        findings += [LintFinding("error", fault.source, fault.location, fault.problem) for fault in loaded.faults]
        if loaded.resource_provider is not None:
            tools.append(RESOURCES_FILE)
        for one in loaded.tools:
            tools.append(one.tool.spec.id)
            faults = list(_find_startup_faults(one, source.rank, sandbox))
            findings += [
                LintFinding("error", fault.source, fault.location, fault.problem, one.tool.spec.id) for fault in faults
            ]
            if not faults:
                spec = one.tool.spec
                findings += [
                    LintFinding("error", one.location, where, text, spec.id)
                    for where, text in find_unsatisfiable_schemas(spec.parameters)
                ]
                findings += find_tool_weaknesses(one)
    if not tools and not findings:
        raise UsageError(
            f"Folder {path} has no manifest and no module with {METADATA_NAME}. To check a Python file with "
            "@tool functions, name the file itself; it is imported."
            if path.is_dir()
            else f"{path} has no tool. Expected a manifest, a module with {METADATA_NAME}, or functions with @tool."
        )
    return tools, sorted(findings, key=lambda finding: finding.severity)


def find_tool_weaknesses(found: DiscoveredTool) -> list[LintFinding]:
    """Return the weaknesses of a tool that can be loaded."""
    spec, declared = found.tool.spec, _get_declared_view(found)
    items = [
        *_check_texts(spec),
        *_check_effects(spec, declared),
        *_check_build(spec, found),
        *_check_parameters(spec, found),
        *find_unusable_parts(spec.parameters),
        *_check_providers(spec),
    ]
    return [LintFinding("warning", found.location, where, text, spec.id) for where, text in items]


# The sources of the tools under a path.


class _SingleFileSource(Struct, frozen=True):
    """The part of a source that comes from one file."""

    source: ToolSource
    file: str
    rank: SourceRank = "global"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        loaded = self.source.load()
        return SourceContents(
            tuple(found for found in loaded.tools if found.location == self.file),
            tuple(fault for fault in loaded.faults if fault.source in (self.file, str(Path(self.file).parent))),
            resource_provider=loaded.resource_provider if Path(self.file).name == RESOURCES_FILE else None,
        )


class _PreloadedSource(Struct, frozen=True):
    """A source with content that is already loaded."""

    loaded: SourceContents
    rank: SourceRank = "code"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        return self.loaded


def _sources(path: Path, sandbox: Sandbox) -> Iterator[ToolSource]:
    confinement = ToolConfinement(sandbox, raise_on_program_start, raise_on_program_start)
    path = path.resolve()
    if path.is_dir():
        yield ToolFolderSource(path, "global", confinement)
        return
    folder = ToolFolderSource(path.parent, "global", confinement)
    if path.suffix == ".json" or (path.suffix == ".py" and _is_module_tool(path)):
        manifest = path.with_suffix(".json")
        yield _SingleFileSource(folder, str(manifest if manifest.exists() else path))
    elif path.suffix == ".py":
        yield _PreloadedSource(_import_tools(path))
    else:
        raise UsageError(f"{path} is neither a manifest (.json) nor Python (.py). Name the manifest of a program.")


def _is_module_tool(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes()[:MAX_SOURCE_BYTES])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # the source reports the fault
    names = {t.id for s in tree.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
    return is_module_for_worker(path) and (METADATA_NAME in names or path.with_suffix(".json").exists())


def _import_tools(path: Path) -> SourceContents:
    """Import a Python file and return its tools."""
    name = f"handrail_lint_{path.stem}"
    made = importlib.util.spec_from_file_location(name, path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module
    try:
        made.loader.exec_module(module)
    except LoadError as error:
        return SourceContents(faults=tuple(error.diagnostics))
    except (Exception, SystemExit) as error:
        return SourceContents(
            faults=(Diagnostic(str(path), "", f"cannot be imported: {type(error).__name__}: {error}"),)
        )
    finally:
        del sys.modules[name]
    return sort_tools_and_faults(_find_module_tools(module), str(path))


def _is_class_of_tools(value: object) -> TypeGuard[type[Tool]]:
    return inspect.isclass(value) and issubclass(value, Tool)


def _find_module_tools(module: ModuleType) -> list[Tool | type[Tool]]:
    """Return the tools of a module, and its classes of tools without an instance in the module."""
    values: list[object] = []
    for value in vars(module).values():
        values += cast("Iterable[object]", value) if isinstance(value, (list, tuple)) else (value,)
    classes = [value for value in values if _is_class_of_tools(value) and value.__module__ == module.__name__]
    bases = {base for one in classes for base in one.__mro__[1:]}
    given = [value for value in values if isinstance(value, Tool)]
    made_of = {type(tool) for tool in given}
    own = [one for one in classes if one not in made_of and _can_become_tool(one, bases)]
    return list(dict.fromkeys([*given, *own]))


def _can_become_tool(tool: type[Tool], bases: Collection[type]) -> bool:
    """Return whether a class can be made into a tool: it has a spec, or is not the base of another class."""
    return not inspect.isabstract(tool) and (isinstance(getattr(tool, "spec", None), ToolSpec) or tool not in bases)


def raise_on_program_start(_: object) -> NoReturn:
    """Raise an error, since the linter starts no program.

    :raises UsageError: always
    """
    raise UsageError("Tools cannot run here. Open a kernel to run one.")


def _find_startup_faults(found: DiscoveredTool, rank: SourceRank, sandbox: Sandbox) -> Iterable[Diagnostic]:
    """Return the faults for which start-up would refuse a tool."""
    try:
        load_generation([_PreloadedSource(SourceContents((found,)), rank)], tier=sandbox.tier)
    except LoadError as error:
        return error.diagnostics
    return ()


def _get_declared_view(found: DiscoveredTool) -> Mapping[str, Any] | None:
    """Return the runtime view as written by the author, or None if it is unknown."""
    if not found.location.endswith(".json"):
        return read_module_runtime_view(found.location) if isinstance(found.tool, PerCallExecutableTool) else None
    try:
        whole = parse_json_object(Path(found.location).read_bytes(), max_bytes=MAX_MANIFEST_BYTES)
    except (OSError, InvalidJsonTextError):
        return None
    runtime = whole.get("runtime", {})
    return cast("Mapping[str, Any]", runtime) if isinstance(runtime, Mapping) else None


# The checks of one tool.


def _check_texts(spec: ToolSpec) -> Iterator[tuple[str, str]]:
    description = spec.description.strip()
    if len(description) < SHORT_DESCRIPTION:
        yield (
            "description",
            (
                f"has {len(description)} characters, which is too short for a model to choose by; add a sentence on what "
                "it does and when to use it"
            ),
        )
    elif len(description) > LONG_DESCRIPTION:
        yield (
            "description",
            (
                f"has {len(description):,} characters, and some providers pass on only {LONG_DESCRIPTION:,}; "
                "keep the first sentences, and move the rest to documentation, which info shows"
            ),
        )
    dialect = find_costliest_dialect([spec])
    if (tokens := estimate_json_tokens(adapt_tool_view(spec.build_llm_view(), dialect))) > MANY_TOKENS:
        yield (
            "parameters",
            (
                f"use about {tokens} tokens in the form for {dialect.name}, in every request with the tool "
                "loaded; shorten repeated texts"
            ),
        )


def _check_effects(spec: ToolSpec, declared: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    reaches_out = bool(spec.requires.net.hosts) or declared is None
    if declared is not None and "side_effect" not in declared:
        yield "side_effect", "is missing, so it counts as external, the strictest; set read, write or external"
    elif spec.side_effect == "external" and not reaches_out:
        yield (
            "side_effect",
            ("is external, but the tool requires no hosts; a tool that changes only this machine is a write"),
        )
    if spec.locks is None and spec.side_effect != "read":
        yield (
            "locks",
            (
                "are missing, so each call locks the whole workspace; name the resources that it changes, or "
                "set locks: []"
            ),
        )
    if {"elicit", "sample"} & set(spec.requires.capabilities) and spec.effective_locks:
        held = ", ".join(map(str, spec.effective_locks))
        yield (
            "locks",
            f"{held} are held while the client decides, which blocks other calls; set locks: [] if possible",
        )
    if spec.side_effect == "read" and spec.requires.fs.write:
        yield "side_effect", "is read, but requires.fs.write names files; remove one of the two"
    if spec.timeout_ms > 600_000:
        yield (
            "timeout_ms",
            f"is {spec.timeout_ms / 60_000:.0f} minutes, which can block a turn; make it a background tool",
        )


def _check_build(spec: ToolSpec, found: DiscoveredTool) -> Iterator[tuple[str, str]]:
    if not spec.build or not isinstance(found.tool, PerCallExecutableTool):
        return
    folder, program = Path(found.tool.folder), spec.build[0]
    if "/" in program and not program.startswith("/"):
        if not os.access(folder / program, os.X_OK):
            yield (
                "build",
                (
                    f"starts {program}, which is not an executable file in {folder.name}; add it, or start it "
                    "with its interpreter"
                ),
            )
    elif not program.startswith("/") and (folder / program).is_file():
        yield "build", f"starts {program} from PATH, not from {folder.name}; write ./{program}"


def _check_parameters(spec: ToolSpec, found: DiscoveredTool) -> Iterator[tuple[str, str]]:
    text = _get_tool_source_text(found.tool)
    for name, schema in extract_property_schemas(spec.parameters).items():
        place = f"parameters.{name}"
        if not schema.get("description") and not schema.get("enum"):
            yield place, "has no description; describe the value, with its unit or format"
        if not schema.keys() & {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}:
            yield place, "has no type, so any value is accepted; add one"
        if _looks_secret(name, schema):
            yield place, "looks like a secret, which a model should never see; declare it under secrets"
        if schema.get("type") == "string" and _PATH_LIKE.search(name) and not schema.get("format") and not spec.targets:
            yield place, 'looks like a path; add "format": "path", so that rules and locks apply to it'
        if text is not None and name not in text:
            yield place, "does not occur in the implementation; remove it if nothing reads it"


def _looks_secret(name: str, schema: Mapping[str, Any]) -> bool:
    words = _HUMP.sub("_", name).lower()
    is_text = schema.get("type", "string") not in ("integer", "number", "boolean")
    return is_text and bool(_SECRET_LIKE.search(words)) and not _OF_PAGES.search(words)


def _check_providers(spec: ToolSpec) -> Iterator[tuple[str, str]]:
    for dialect in DIALECTS.values():
        fitted = adapt_schema(spec.parameters, dialect)
        for name in fitted.renamed.values():
            yield (
                "parameters",
                f"{dialect.name} does not accept the property name {name!r}; Handrail sends another name",
            )
        for note in fitted.notes:
            yield (
                "parameters",
                f"{dialect.name} does not accept alternatives at the top level; Handrail adds a text: {note}",
            )


def _get_tool_source_text(tool: Tool) -> str | None:
    """Return the source text that would name a parameter if it used it; None if that is unknown."""
    if isinstance(tool, PerCallExecutableTool):
        try:
            content = Path(tool.executable).read_bytes()[:MAX_SOURCE_BYTES]
        except OSError:
            return None
        if b"\0" in content:
            return None
        text = content.decode("utf-8", "replace")
        return _without_metadata(text) if isinstance(tool, PerCallModuleTool) else text
    function = inspect.unwrap(getattr(tool, "function", type(tool)))
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None
    return _parse_body_statements(source)


def _is_used_whole(statements: Iterable[ast.stmt], name: str) -> bool:
    """Return whether ``name`` is used as a whole, and not only for its members."""
    asked: set[int] = set()
    for node in (node for statement in statements for node in ast.walk(statement)):
        inner = node.value if isinstance(node, (ast.Subscript, ast.Attribute)) else None
        if (
            isinstance(node, ast.Compare)
            and len(node.comparators) == 1
            and isinstance(node.ops[0], (ast.In, ast.NotIn))
        ):
            inner = node.comparators[0]
        if isinstance(inner, ast.Name):
            asked.add(id(inner))
    names = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name))
    return any(node.id == name and id(node) not in asked for node in names)


def _without_metadata(text: str) -> str | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    if _is_used_whole(tree.body, "params"):
        return None
    kept = [s for s in tree.body if not (isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == METADATA_NAME)]
    return "\n".join(map(ast.unparse, kept))


def _parse_body_statements(source: str) -> str | None:
    """Return the statements of a function or class, without its signature, docstring and spec."""
    try:
        node = ast.parse(source).body[0]
    except (SyntaxError, IndexError):
        return None
    if isinstance(node, ast.ClassDef):
        methods = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return None if _is_used_whole(methods, "args") else "\n".join(map(ast.unparse, methods))
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    body = node.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    text = "\n".join(map(ast.unparse, body))
    # A function that passes on its arguments as a whole reads all of them.
    return None if node.args.kwarg is not None or "locals()" in text else text
