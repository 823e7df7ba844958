"""Generate the reference of shipped tools from their specs, results and recorded calls.

``python -m tests.conformance`` writes the page to ``docs/reference/tools.md`` and compares it with ``--check``. The meanings of
result keys are in :mod:`tests.tool_results`. The examples and errors are recorded calls, which
:mod:`tests.tools.example_calls` writes and ``tests/tools/test_reference.py`` runs again.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from tests.tool_results import always, meanings

from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.tool.spec import ToolSpec, extract_property_schemas
from handrail.contract.tool_generation import Generation, ToolEntry
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import BuiltinSource

TABLE = Path(__file__).parent.parent / "docs" / "reference" / "tools.md"
EXAMPLES = Path(__file__).parent / "tools" / "examples.json"

_HEAD = """\
# Tools

This page describes every tool that ships with Handrail. `make docs` writes it from the tools themselves, and `make lint` fails
if it is out of date. A test runs each example and each error again.

Each section has these parts:

- **Parameters** lists the arguments. *Required* in the column "default" means that a call must have the argument.
- **Result** lists the keys of `data` in the [result envelope](results.md). *Sometimes* marks keys that only some calls return.
- **Example** is a real call with the `data` that it returned. `…` marks a text that is shortened here.
- **Typical errors** are real answers to the calls in the table. Every tool also answers wrong arguments with `invalid_input`.
- **Permission** says what the tool requires and how Handrail decides the example in the mode `ask` without rules of yours. See
  [Permissions](../concepts/permissions.md) and [Rules](rules.md).
- **Limits** are defaults. You can change them for one tool in [`[tools]`](configuration.md#tools).

`info` shows a model the same facts. `handrail tools --json` prints them for you.
"""
_EFFECTS = {
    "read": "only reads",
    "write": "changes the workspace or the session",
    "external": "can change anything that its permissions allow",
}
_LOCKS = {"S": "shared", "X": "exclusive"}
_JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_ANY_TYPE = frozenset({"value", "step", "result", "message", "next", "closed"})
"""Keys of results that hold what another tool or file contains."""
OUTPUT_SCHEMAS = Path(__file__).parent.parent / "src" / "handrail" / "tools" / "output_schemas.json"
_MOST = 160
"""Characters of a text in an example before it is shortened."""


def shipped() -> Generation:
    """Return all shipped tools, on a machine that can confine programs."""
    return load_generation([BuiltinSource()], tier=SandboxTier("sandbox", ""))


@cache
def examples() -> dict[str, Any]:
    """Return the recorded calls by tool."""
    return json.loads(EXAMPLES.read_text(encoding="utf-8"))


def sections() -> dict[str, str]:
    """Return the section of each tool, by id."""
    generation = shipped()
    names: dict[str, list[str]] = {}
    for alias, tool_id in generation.aliases.items():
        names.setdefault(tool_id, []).append(alias)
    return {entry.id: "\n".join(_section(entry, names.get(entry.id, []))) for entry in generation.entries.values()}


def render() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD, "## Overview", ""]
    by_category: dict[str, list[str]] = {}
    for entry in shipped().entries.values():
        by_category.setdefault(str(entry.spec.category), []).append(entry.id)
    parts += ["| category | tools |", "|---|---|"]
    for category, ids in by_category.items():
        parts.append(f"| {category} | {', '.join(f'[`{one}`](#{anchor(one)})' for one in ids)} |")
    return "\n".join([*parts, "", *sections().values()])


def render_output_schemas() -> str:
    """Return the output schemas that MCP clients get, as JSON.

    No key is required, because an error and a truncated result have other keys. Where a key has values of several types, or
    its example shows none, it has no type.
    """
    schemas: dict[str, Any] = {}
    for tool_id in shipped().entries:
        data: Mapping[str, Any] = examples()[tool_id]["data"]
        properties: dict[str, Any] = {}
        for key, meaning in meanings(tool_id).items():
            value: object = data.get(key)
            kind = next((name for of, name in _JSON_TYPES.items() if isinstance(value, of)), None)
            typed: dict[str, Any] = {} if kind is None or key in _ANY_TYPE else {"type": kind}
            if typed and "null" in meaning:
                typed = {"type": [kind, "null"]}
            properties[key] = {**typed, "description": meaning}
        schemas[tool_id] = {"type": "object", "properties": properties, "additionalProperties": True}
    return json.dumps(schemas, ensure_ascii=False, indent=1) + "\n"


def anchor(tool_id: str) -> str:
    """Return the name of the section in the page's address."""
    return re.sub(r"[^\w-]", "", tool_id.lower())


def where(spec: ToolSpec) -> str:
    """Return where the tool does its work."""
    places = ["in the process of the kernel"]
    if spec.requires.shell:
        places.append("its programs in the sandbox")
    if spec.requires.net.hosts:
        places.append("network access through Handrail's proxy" if spec.requires.shell else "network access")
    return ", ".join(places)


def _section(entry: ToolEntry, aliases: Sequence[str]) -> Iterator[str]:
    spec, recorded = entry.spec, examples()[entry.id]
    yield f"## `{spec.id}`"
    yield ""
    yield spec.description
    yield ""
    loading = (
        "It is a core tool, which a model always sees."
        if spec.tier == "core"
        else "It is a deferred tool, which a model can load."
    )
    named = f" Another name is {' and '.join(f'`{one}`' for one in aliases)}." if aliases else ""
    yield f"Category: {spec.category}. {loading}{named}"
    yield ""
    yield "**Parameters**"
    yield ""
    yield from _parameters(spec)
    yield "**Result**"
    yield ""
    known = always(spec.id)
    yield from _table(
        ("key", "present", "meaning"),
        [[f"`{key}`", "always" if key in known else "sometimes", text] for key, text in meanings(spec.id).items()],
    )
    yield "**Example**"
    yield ""
    yield from _block(f"{spec.id} {json.dumps(recorded['arguments'], ensure_ascii=False)}", "text")
    yield from _block(json.dumps(shortened(recorded["data"]), indent=2, ensure_ascii=False), "json")
    if recorded["errors"]:
        yield "**Typical errors**"
        yield ""
        yield from _table(("call", "kind", "text"), [_error(one) for one in recorded["errors"]])
    yield "**Permission, locks and limits**"
    yield ""
    yield from _facts(spec, recorded["decision"])
    yield ""


def _parameters(spec: ToolSpec) -> Iterator[str]:
    rows = list(_rows(spec.parameters, ""))
    if not rows:
        yield "None."
        yield ""
        return
    yield from _table(("name", "type", "default", "meaning"), rows)


def _rows(schema: Mapping[str, Any], prefix: str) -> Iterator[list[str]]:
    required = set(schema.get("required", ()))
    for name, inner in extract_property_schemas(schema).items():
        meaning, default = _default(inner)
        shown = "required" if name in required else default or ("–" if prefix else "none")
        yield [f"`{prefix}{name}`", _type(inner), shown, f"{meaning}{_range(inner)}"]
        if "properties" in inner:
            yield from _rows(inner, f"{prefix}{name}.")
        elif "properties" in (items := cast("dict[str, Any]", inner.get("items", {}))):
            yield from _rows(items, f"{prefix}{name}[].")


def _default(schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the meaning without its default, and the default."""
    text = str(schema.get("description", "")).rstrip(".")
    meaning, _, default = text.partition("Default: ")
    if "default" in schema:
        return text, f"`{json.dumps(schema['default'])}`"
    return (meaning.rstrip(" .;") if default else text), default


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f". From {low} to {high}"
    if low is not None:
        return f". At least {low}"
    sizes = {"maxLength": "characters", "maxItems": "items", "maxProperties": "members"}
    most = next((f"{schema[key]:,} {unit}" for key, unit in sizes.items() if key in schema), "")
    return f". At most {most}" if most else ""


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)  # pyright: ignore[reportUnknownArgumentType]


def _error(error: Mapping[str, Any]) -> list[str]:
    return [_code(json.dumps(error["arguments"], ensure_ascii=False)), f"`{error['kind']}`", _escaped(error["text"])]


def _facts(spec: ToolSpec, decision: str) -> Iterator[str]:
    yield f"- Effect: `{spec.side_effect}`, the tool {_EFFECTS[spec.side_effect]}."
    yield f"- Requires: {', '.join(_requires(spec)) or 'nothing'}."
    answer = "runs without approval" if decision == "allow" else "requires approval"
    yield f"- Decision in the mode `ask`: `{decision}`. The example {answer}."
    locks = [f"`{one.resource}` ({_LOCKS[one.mode]})" for one in spec.effective_locks]
    yield f"- Locks: {', '.join(locks) or 'none'}."
    yield f"- Runs: {where(spec)}."
    most = [f"time-out {spec.timeout_ms:,} ms", f"{spec.max_output:,} bytes of output"]
    if spec.max_entries is not None:
        most.append(f"{spec.max_entries:,} entries")
    yield f"- Limits: {', '.join(most)}."


def _requires(spec: ToolSpec) -> Iterable[str]:
    requires = spec.requires
    for access in ("read", "write"):
        if patterns := getattr(requires.fs, access):
            yield f"`fs.{access}` for " + ", ".join(f"`{pattern}`" for pattern in patterns)
    if requires.net.hosts:
        yield "`net.fetch` for " + ", ".join(f"`{host}`" for host in requires.net.hosts)
    if requires.shell:
        yield "`shell.run` for " + ", ".join(f"`{one.cmd}`" for one in requires.shell)
    yield from (f"`{capability}`" for capability in requires.capabilities)


def shortened(value: Any) -> Any:
    """Return a value with its long texts shortened."""
    if isinstance(value, str):
        return value if len(value) <= _MOST else f"{value[:_MOST].rstrip()}…"
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in cast("dict[str, Any]", value).items()}
    return [shortened(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def _block(text: str, language: str) -> Iterator[str]:
    yield from (f"```{language}", text, "```", "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _code(text: str) -> str:
    """Return a text as code in a table, which a bar would end."""
    return f"`{text}`" if "|" not in text else f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def _escaped(text: str) -> str:
    return re.sub(r"([|\[\]*_<])", r"\\\1", text).replace("\n", "<br>")
