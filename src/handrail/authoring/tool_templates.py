"""Templates of a new tool: a working tool, in each form that a tool can have, with its test.

Each counts the words of a text, so that an author changes a few lines of a working tool.
"""

from __future__ import annotations

import builtins
import json
import keyword
import re
import stat
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, Literal

from handrail.contract.errors import LoadError, UsageError
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import find_tool_id_fault
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import BuiltinSource

ToolKind = Literal["function", "class", "program", "persistent", "source", "module"]
TOOL_KINDS: Mapping[ToolKind, str] = {
    "function": "a typed Python function, in the program that passes it to the kernel",
    "class": "a Python class, for a tool that keeps state between calls",
    "program": "an executable in any language, started for each call in a sandbox (here: sh and python3)",
    "persistent": "an executable that stays running between calls, in its own sandbox",
    "source": (
        "a folder of sources, from which handrail build makes the executable (here: Python, packed by a shell script)"
    ),
    "module": "a Python module with execute(topic, params, config, telemetry), run in a sandbox",
}
_RESERVED_NAMES = frozenset({"handrail", "conftest", "temporary_kernel", "called"})
"""Names that a new tool's test uses for something else."""
_DESCRIPTION = "Count the words of a text. Use it when the user asks for the length of a text."


class NewToolFile(Struct, frozen=True):
    """A file to write for a new tool."""

    name: str
    text: str
    executable: bool = False


def render_tool_files(kind: ToolKind, tool_id: str) -> list[NewToolFile]:
    """Return the files of a new tool, its own first and its test last.

    :raises UsageError: for an invalid or reserved id
    """
    if problem := find_tool_id_fault(tool_id) or _find_start_fault(tool_id):
        raise UsageError(problem)
    word = _make_free_python_name(tool_id)
    match kind:
        case "function":
            own = [NewToolFile(f"{word}.py", _FUNCTION.format(id=tool_id, word=word))]
        case "class":
            own = [NewToolFile(f"{word}.py", _CLASS.format(id=tool_id, word=word, name=_class_name(word)))]
        case "program":
            own = [
                NewToolFile(f"{tool_id}.json", _format_manifest(tool_id, word)),
                NewToolFile(word, _PROGRAM, executable=True),
            ]
        case "persistent":
            manifest = _format_manifest(tool_id, word, persistent=True)
            own = [NewToolFile(f"{tool_id}.json", manifest), NewToolFile(word, _PERSISTENT, executable=True)]
        case "source":
            manifest = _format_manifest(tool_id, f"{word}/run", build=["sh", "build.sh"])
            own = [
                NewToolFile(f"{tool_id}.json", manifest),
                NewToolFile(f"{word}/build.sh", _BUILD),
                NewToolFile(f"{word}/src/__main__.py", _SOURCE),
            ]
        case "module":
            own = [NewToolFile(f"{word}.py", _MODULE.format(id=tool_id))]
    test = {"function": _TEST_OF_CODE, "class": _TEST_OF_CODE, "source": _TEST_OF_SOURCES}.get(kind, _TEST_OF_FILES)
    made = f"{_class_name(word)}()" if kind == "class" else word
    imported = _class_name(word) if kind == "class" else word
    names = ", ".join(repr(file.name) for file in own)
    text = test.format(id=tool_id, word=word, made=made, imported=imported, names=names)
    return [*own, NewToolFile(f"test_{word}.py", text)]


class _ProbeSource(Struct, frozen=True):
    """A source with one tool of the new id, to check it together with the built-in tools."""

    tool_id: str
    rank: SourceRank = "global"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        class Blank(Tool):
            spec = ToolSpec(
                id=self.tool_id, description=_DESCRIPTION, parameters={"type": "object"}, side_effect="read", locks=()
            )

            async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
                return None  # never called

        return SourceContents((DiscoveredTool(Blank(), "the new tool"),))


def _find_start_fault(tool_id: str) -> str | None:
    """Return the fault with which a kernel would refuse to start with this id, or None."""
    try:
        load_generation([BuiltinSource(), _ProbeSource(tool_id)], tier=SandboxTier("any", "no tool runs"))
    except LoadError as error:
        return "; ".join(fault.problem for fault in error.diagnostics)
    return None


def _make_free_python_name(tool_id: str) -> str:
    """Return a free name for the tool's file and function, without a meaning for Python or pytest."""
    word = re.sub(r"\W", "_", tool_id)
    low = word.lower()
    taken = (
        keyword.iskeyword(word)
        or keyword.iskeyword(_class_name(word))
        or hasattr(builtins, word)
        or low in sys.stdlib_module_names
        or low in _RESERVED_NAMES
        or low in {name.lower() for name in packages_distributions()}
        or low.startswith("test")
    )
    return f"tool_{word}" if taken else word


def write_tool_files(folder: Path, files: list[NewToolFile]) -> list[Path]:
    """Write the files of a new tool, or none if any of them exists.

    :raises UsageError: with the names of the existing files
    :raises OSError: if the folder cannot be written
    """
    folder.mkdir(parents=True, exist_ok=True)
    if taken := [file.name for file in files if (folder / file.name).exists() or (folder / file.name).is_symlink()]:
        raise UsageError(
            f"{folder} already has {', '.join(taken)}. Nothing was written. Choose another name or folder."
        )
    written: list[Path] = []
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as opened:
            opened.write(file.text)
        mode = 0o755 if file.executable else 0o644
        path.chmod(mode & ~stat.S_IWGRP & ~stat.S_IWOTH)
        written.append(path)
    return written


def _class_name(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_") if part) or "Tool"


def _format_manifest(tool_id: str, word: str, **more: object) -> str:
    llm = {
        "name": tool_id,
        "description": _DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The text to count"}},
            "required": ["text"],
        },
    }
    runtime: dict[str, object] = {"exec_path": word, **more, "side_effect": "read", "locks": [], "timeout_ms": 5000}
    return json.dumps({"llm": llm, "runtime": runtime}, indent=2) + "\n"


_FUNCTION = '''"""{id}: pass it to the kernel with open_kernel(tools=[{word}])."""

from typing import Annotated

from pydantic import Field

from handrail import tool


@tool(id="{id}", side_effect="read", locks=[])
async def {word}(text: Annotated[str, Field(max_length=100_000)]) -> dict[str, int]:
    """Count the words of a text. Use it when the user asks for the length of a text.

    Args:
        text: The text to count
    """
    return {{"words": len(text.split())}}
'''

_CLASS = '''"""{id}: pass it to the kernel with open_kernel(tools=[{name}()])."""

from typing import Any

from handrail import Runtime, Tool, ToolSpec


class {name}(Tool):
    spec = ToolSpec(
        id="{id}",
        description="Count the words of a text. Use it when the user asks for the length of a text.",
        parameters={{
            "type": "object",
            "properties": {{"text": {{"type": "string", "description": "The text to count"}}}},
            "required": ["text"],
        }},
        side_effect="read",
        locks=(),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {{"words": len(args["text"].split())}}
'''

_PROGRAM = """#!/bin/sh
# The arguments are one JSON object on stdin; the answer is one JSON object on stdout. Diagnostics go to stderr.
exec python3 -c '
import json, sys
text = json.load(sys.stdin)["text"]
print(json.dumps({"words": len(text.split())}))
'
"""

_PERSISTENT = """#!/usr/bin/env python3
# One JSON object per line, both ways, one call at a time. Diagnostics go to stderr.
import json
import sys

for line in sys.stdin:
    call = json.loads(line)
    text = call["arguments"]["text"]
    print(json.dumps({"id": call["id"], "result": {"words": len(text.split())}}), flush=True)
"""

_BUILD = """#!/bin/sh
# handrail build runs this on a copy of the folder, without network; it writes the executable that the manifest names.
set -eu
python3 -m zipapp src --output run --python '/usr/bin/env python3'
chmod +x run
"""

_SOURCE = """# The arguments are one JSON object on stdin; the answer is one JSON object on stdout. Diagnostics go to stderr.
import json
import sys

text = json.load(sys.stdin)["text"]
print(json.dumps({"words": len(text.split())}))
"""

_MODULE = """METADATA = {{
    "name": "{id}",
    "description": "Count the words of a text. Use it when the user asks for the length of a text.",
    "parameters": {{"text": {{"type": "string", "description": "The text to count", "required": True}}}},
    "side_effect": "read",
    "locks": [],
    "constraints": {{"timeout_seconds": 5}},
}}


def execute(topic: str, params: dict, config: dict = None, telemetry: dict = None) -> dict:
    return {{"text": "counted", "words": len(params["text"].split())}}
"""

_TEST_OF_CODE = '''"""Test {id} through a temporary kernel."""

import asyncio
from pathlib import Path

from {word} import {imported}

from handrail.testing.scripted_kernel import temporary_kernel


def test_{word}_counts_words(tmp_path: Path) -> None:
    async def called() -> object:
        async with temporary_kernel(tmp_path, tools=[{made}], rules=["allow {id}"]) as kernel:
            result = await (await kernel.session()).call("{id}", {{"text": "one two three"}})
            assert result.ok, result.error_text
            return result.data["words"]

    assert asyncio.run(called()) == 3
'''

_TEST_OF_FILES = '''"""Test {id} through a temporary kernel, in its sandbox."""

import asyncio
import shutil
from pathlib import Path

from handrail.testing.scripted_kernel import temporary_kernel

HERE = Path(__file__).parent


def test_{word}_counts_words(tmp_path: Path) -> None:
    tools = tmp_path / "config" / "tools"
    tools.mkdir(parents=True)
    for name in ({names},):
        shutil.copy(HERE / name, tools / name)

    async def called() -> object:
        async with temporary_kernel(tmp_path, rules=["allow {id}"]) as kernel:
            result = await (await kernel.session()).call("{id}", {{"text": "one two three"}})
            assert result.ok, result.error_text
            return result.data["words"]

    assert asyncio.run(called()) == 3
'''

_TEST_OF_SOURCES = '''"""Build {id} and call it through a kernel, in its sandbox."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from handrail import open_kernel

HERE = Path(__file__).parent


def test_{word}_counts_words(tmp_path: Path) -> None:
    config, workspace, bundle = tmp_path / "config", tmp_path / "ws", tmp_path / "bundle"
    workspace.mkdir()
    (config / "tools").mkdir(parents=True)
    (config / "handrail.toml").write_text("")
    shutil.copy(HERE / "{id}.json", config / "tools")
    shutil.copytree(HERE / "{word}", config / "tools" / "{word}")
    places = ["--workspace", str(workspace), "--state", str(tmp_path / "state")]
    built = ["build", "default", "--output", str(bundle), "--config", str(config / "handrail.toml"), *places]
    subprocess.run([sys.executable, "-m", "handrail", *built], check=True)

    async def called() -> object:
        settings = bundle / "handrail.toml"
        async with open_kernel(workspace, rules=["allow {id}"], state=tmp_path / "state", config=settings) as kernel:
            result = await (await kernel.session()).call("{id}", {{"text": "one two three"}})
            assert result.ok, result.error_text
            return result.data["words"]

    assert asyncio.run(called()) == 3
'''
