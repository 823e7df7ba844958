"""The contract of the built-in tools: IDs, parameters, requirements and locks."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import handrail.tools
from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.tool.spec import ToolSpec, find_spec_faults
from handrail.tools import BUILTINS

WORKSPACE = ("{workspace}",)
READABLE = ("{workspace}", "{ad-hoc}", "{output}")
CLIENT = ("elicit", "sample", "roots")
"""What is read or got of a server may make it ask the client."""


@dataclass(frozen=True)
class Row:
    """``parameters`` in order, a required one with a star."""

    parameters: str
    kind: str
    side_effect: str
    locks: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shell: bool = False
    capabilities: tuple[str, ...] = ()
    max_entries: int | None = None
    targets: tuple[str, ...] = ()


def file_reading(parameters: str, kind: str = "read", max_entries: int | None = None) -> Row:
    return Row(
        parameters, kind, "read", ("file:{path}:S",), READABLE, max_entries=max_entries, targets=("fs.read={path}",)
    )


def file_changing(parameters: str) -> Row:
    targets = ("fs.read={path}", "fs.write={path}")
    return Row(parameters, "edit", "write", ("file:{path}:X",), WORKSPACE, WORKSPACE, targets=targets)


def git_reading(parameters: str, about: str) -> Row:
    return Row(parameters, "read", "read", ("workspace:S",), WORKSPACE, shell=True, targets=(f"fs.read={{{about}}}",))


def git_changing(
    parameters: str,
    kind: str = "other",
    side_effect: str = "write",
    capabilities: tuple[str, ...] = (),
    targets: tuple[str, ...] = (),
) -> Row:
    return Row(parameters, kind, side_effect, ("workspace:X",), WORKSPACE, WORKSPACE, True, capabilities, None, targets)


TABLE = {
    "read": file_reading("path* offset limit unit"),
    "write": Row(
        "path* content*", "edit", "write", ("file:{path}:X",), WORKSPACE, WORKSPACE, targets=("fs.write={path}",)
    ),
    "edit": file_changing("path* old* new* replace_all"),
    "file.patch": file_changing("path* operations*"),
    "glob": file_reading("pattern* path hidden ignored", "search", max_entries=1000),
    "grep": file_reading("pattern* path glob ignore_case literal hidden ignored", "search", max_entries=200),
    "bash": Row(
        "command* timeout_ms background",
        "execute",
        "external",
        ("workspace:X",),
        reads=WORKSPACE,
        writes=WORKSPACE,
        shell=True,
        targets=("shell.run={command}",),
    ),
    "todo": Row("todos", "other", "write", (), capabilities=("state",)),
    "question": Row("questions*", "other", "read", (), capabilities=("ask",)),
    "task": Row(
        "subagent_type* prompt* description background metadata", "other", "external", (), capabilities=("agents",)
    ),
    "skill": Row("name*", "think", "read", (), capabilities=("skills",)),
    "web_search": Row("query* max_results", "search", "read", (), capabilities=("state",)),
    "web_fetch": Row("url*", "fetch", "read", (), targets=("net.fetch={url}",)),
    "browse_tools": Row("", "search", "read", (), capabilities=("catalog",)),
    "load_tools": Row("category tool", "search", "read", (), capabilities=("catalog",)),
    "find_tools": Row("query queries limit", "search", "read", (), capabilities=("catalog",)),
    "tool_search": Row("query*", "search", "read", (), capabilities=("catalog",)),
    "info": Row("tool*", "search", "read", (), capabilities=("catalog",)),
    "multi_edit": file_changing("path* edits* mode"),
    "apply_patch": Row(
        *("patch*", "edit", "write", ("file:{patch}:X",), WORKSPACE, WORKSPACE),
        targets=("fs.read={patch}", "fs.write={patch}"),
    ),
    "file.move": Row(
        "path* to*",
        "move",
        "write",
        ("file:{path}:X", "file:{to}:X"),
        WORKSPACE,
        WORKSPACE,
        targets=("fs.read={path}", "fs.write={path}", "fs.write={to}"),
    ),
    "file.delete": Row(
        "path* recursive", "delete", "write", ("file:{path}:X",), WORKSPACE, WORKSPACE, targets=("fs.write={path}",)
    ),
    "tree": file_reading("path depth hidden ignored max_entries", "search"),
    "lsp": Row(
        "action* path line symbol new_name",
        "search",
        "read",
        ("file:{path}:S",),
        WORKSPACE,
        shell=True,
        max_entries=200,
        targets=("fs.read={path}",),
    ),
    "repo_overview": file_reading("path focus max_tokens", "search"),
    "json_read": file_reading("path* pointer"),
    "json_write": file_changing("path* pointer value remove"),
    "python": Row(
        "code* timeout_ms", "execute", "external", ("workspace:X",), reads=WORKSPACE, writes=WORKSPACE, shell=True
    ),
    "scratchpad": Row("action* key value", "other", "write", ("serial:X",), capabilities=("state",)),
    "search_memory": Row("query kind limit id offset", "search", "read", (), capabilities=("transcript",)),
    "artifact.read": Row("ref* offset limit", "read", "read", (), capabilities=("transcript",)),
    "memory.query": Row(
        "query mode store from to limit",
        "search",
        "read",
        ("memory:S",),
        capabilities=("memory", "transcript", "state"),
    ),
    "memory.upsert": Row("text* key tags replaces", "other", "write", ("memory:X",), capabilities=("memory",)),
    "memory.compact": Row("store", "other", "write", (), capabilities=("agents", "memory")),
    "plan": Row("", "switch_mode", "read", (), capabilities=("ask", "mode", "catalog")),
    "plan_exit": Row("plan*", "switch_mode", "read", (), capabilities=("ask", "mode")),
    "create_task": Row("title* description status owner blocked_by", "other", "write", (), capabilities=("tasks",)),
    "list_tasks": Row("status owner ready query limit offset", "other", "read", (), capabilities=("tasks",)),
    "edit_task": Row(
        "id* title description status owner blocked_by version", "other", "write", (), capabilities=("tasks",)
    ),
    "get_task": Row("id*", "other", "read", (), capabilities=("tasks",)),
    "send_message": Row("channel* message* kind", "other", "write", (), capabilities=("channels",)),
    "wait_channel": Row("channel* timeout_ms sender", "other", "write", (), capabilities=("channels",)),
    "add_timer": Row("interval* prompt* once immediate name", "other", "write", (), capabilities=("triggers",)),
    "add_schedule": Row(
        "every_minutes hourly_at daily_at cron prompt* name", "other", "write", (), capabilities=("triggers",)
    ),
    "watch_channel": Row("channel* prompt* filter_sender name", "other", "write", (), capabilities=("triggers",)),
    "list_triggers": Row("", "other", "read", (), capabilities=("triggers",)),
    "remove_trigger": Row("name*", "other", "write", (), capabilities=("triggers",)),
    "jobs": Row("running_only", "other", "read", (), capabilities=("jobs",), max_entries=200),
    "read_job": Row("job_id* cursor offset lines", "read", "read", (), capabilities=("jobs",)),
    "wait": Row("job_id* timeout_ms", "other", "read", (), capabilities=("jobs",)),
    "stop_task": Row("job_id*", "other", "write", (), capabilities=("jobs",)),
    "terminal.start": Row(
        "command cwd columns rows name",
        "execute",
        "external",
        ("workspace:X",),
        reads=WORKSPACE,
        writes=WORKSPACE,
        shell=True,
        capabilities=("terminals",),
        targets=("shell.run={command}",),
    ),
    "terminal.send": Row(
        "id* text keys",
        "execute",
        "external",
        (),
        reads=WORKSPACE,
        writes=WORKSPACE,
        shell=True,
        capabilities=("jobs", "terminals"),
    ),
    "terminal.read": Row("id* cursor wait_ms lines", "read", "read", (), capabilities=("jobs", "terminals")),
    "terminal.resize": Row("id* columns* rows*", "other", "write", (), capabilities=("jobs", "terminals")),
    "terminal.stop": Row("id*", "other", "write", (), capabilities=("jobs", "terminals")),
    "tool.step": Row("id* input", "other", "external", ()),
    "tool.close": Row("id*", "other", "external", ()),
    "git.status": git_reading("repository untracked", "repository"),
    "git.log": git_reading("repository ref paths limit skip", "repository"),
    "git.diff": git_reading("from to repository staged paths context counts_only", "paths"),
    "git.show": git_reading("repository ref file paths context counts_only", "file"),
    "git.blame": git_reading("path* ref first count", "path"),
    "git.branches": git_reading("repository remote", "repository"),
    "git.add": git_changing("repository paths all"),
    "git.commit": git_changing("repository message* all amend"),
    "git.create_branch": git_changing("repository name* start track", capabilities=("vcs.config",)),
    "git.checkout": git_changing("repository ref track paths", "edit", capabilities=("vcs.config",)),
    "git.merge": git_changing("repository ref message fast_forward abort", "edit"),
    "git.stash": git_changing("repository action index message untracked", "edit"),
    "git.init": git_changing("path branch", capabilities=("vcs.config",)),
    "git.clone": git_changing(
        "url source path branch depth",
        "fetch",
        side_effect="external",
        capabilities=("vcs.config",),
        targets=("net.fetch={url}",),
    ),
    "git.push": git_changing(
        "repository remote url branch set_upstream",
        side_effect="external",
        capabilities=("vcs.config",),
        targets=("net.fetch={url}",),
    ),
    "git.pr": Row(
        "repository title* body base head draft remote into",
        "other",
        "external",
        ("workspace:S",),
        WORKSPACE,
        shell=True,
    ),
    "http.post": Row("url* json form body headers", "other", "external", (), targets=("net.fetch={url}",)),
    "resource.list": Row("source", "search", "read", (), capabilities=("resources",)),
    "resource.read": Row("uri*", "read", "external", (), capabilities=("resources", *CLIENT)),
    "resource.subscribe": Row("uri*", "other", "external", (), capabilities=("resources",)),
    "resource.unsubscribe": Row("uri*", "other", "read", (), capabilities=("resources",)),
    "prompt.list": Row("source", "search", "read", (), capabilities=("resources",)),
    "prompt.get": Row("name* arguments", "read", "external", (), capabilities=("resources", *CLIENT)),
    "prompt.complete": Row("ref* argument* context", "search", "external", (), capabilities=("resources",)),
}
SPECS = {tool.spec.id: tool.spec for tool in BUILTINS}


@pytest.mark.proves("T-01a")
def test_the_built_in_tools_match_the_table() -> None:
    assert list(SPECS) == list(TABLE)


@pytest.mark.proves("T-01a", "K-09")
@pytest.mark.parametrize("tool_id", TABLE)
def test_each_tool_matches_its_row_of_the_declaration_table(tool_id: str) -> None:
    assert row_of(SPECS[tool_id]) == TABLE[tool_id]


def row_of(spec: ToolSpec) -> Row:
    required = spec.parameters.get("required", [])
    return Row(
        " ".join(f"{name}*" if name in required else name for name in spec.parameters["properties"]),
        spec.kind,
        spec.side_effect,
        tuple(str(lock) for lock in spec.effective_locks),
        spec.requires.fs.read,
        spec.requires.fs.write,
        bool(spec.requires.shell),
        spec.requires.capabilities,
        spec.max_entries,
        tuple(
            f"{capability}={template}"
            for capability, templates in sorted(spec.effective_targets.items())
            for template in templates
        ),
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_tool_declaration_is_valid_and_rejects_unknown_arguments(spec: ToolSpec) -> None:
    assert find_spec_faults(spec) == []
    schema = compile_schema(spec.parameters)
    assert schema.list_problems({"no_such_argument": 1})
    online = ("git.clone", "git.push", "git.pr", "web_search", "web_fetch", "http.post")
    assert spec.requires.net.hosts == (("*",) if spec.id in online else ())
    assert spec.build_llm_view().keys() == {"name", "description", "parameters"}


@pytest.mark.proves("O-01")
def test_output_limits_match_the_table_of_defaults() -> None:
    kilobytes = {name: spec.max_output // 1024 for name, spec in SPECS.items()}
    assert {name: kilobytes[name] for name in ("read", "bash", "glob", "grep")} == dict.fromkeys(
        ("read", "bash", "glob", "grep"), 200
    )


@pytest.mark.proves("T-01a")
def test_the_question_tool_has_exactly_the_published_parameters() -> None:
    one = SPECS["question"].parameters["properties"]["questions"]["items"]
    assert {name: field["type"] for name, field in one["properties"].items()} == {
        "question": "string",
        "header": "string",
        "options": "array",
        "multi_select": "boolean",
    }
    assert one["required"] == ["question"]
    option = one["properties"]["options"]["items"]
    assert list(option["properties"]) == ["label", "description"]
    assert option["required"] == ["label"]


def test_a_built_in_tool_imports_only_the_contract_and_other_tools() -> None:
    folder = Path(inspect.getfile(handrail.tools)).parent
    allowed = ("handrail.contract.", "handrail.tools.")
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            for name in names:
                assert not name.startswith("handrail") or name.startswith(allowed), f"{path.name} imports {name}"
                assert name.partition(".")[0] not in ("os", "pathlib", "subprocess", "socket", "shutil"), path.name


def test_loading_the_built_in_tools_loads_no_heavy_module() -> None:
    heavy = "mcp openai anthropic rich tree_sitter sqlite3 httpx2 handrail.runtime handrail.sandbox click"
    program = f"import sys, handrail.tools; print([n for n in {heavy.split()!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_STATES_NO_DEFAULT: frozenset[str] = frozenset()
"""Optional parameters that say nothing of their default, as ``tool: parameter``. This list only shrinks."""


def _parameters(schema: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Path, schema and whether it is optional, of every parameter and of what is within it."""
    for name, about in cast("Mapping[str, Any]", schema.get("properties", {})).items():
        yield f"{within}{name}", about, name not in schema.get("required", ())
        yield from _parameters(about, f"{within}{name}.")
        yield from _parameters(about.get("items", {}), f"{within}{name}[].")


def test_every_parameter_has_a_description_and_every_optional_parameter_states_its_default() -> None:
    """By the schema's ``default``, or by its text: its default, or when it is required."""
    silent = {
        f"{one.spec.id}: {name}"
        for one in BUILTINS
        for name, about, optional in _parameters(one.spec.parameters)
        if optional
        and "default" not in about
        and not re.search(r"Default: |Required (for|unless) ", about.get("description", ""))
    }
    assert silent == _STATES_NO_DEFAULT
    for one in BUILTINS:
        assert all(about.get("description") for _, about, _ in _parameters(one.spec.parameters)), one.spec.id


PRIVATE = re.compile(
    r"\b(in(to)? view|as (it|they) (is|are)|so (many|long)|told|what came|stands?|goes? on|of its own|whoever|nobody|if left out)\b"
)


def test_no_model_text_of_a_built_in_tool_uses_private_jargon() -> None:
    for one in BUILTINS:
        texts = [one.spec.description, one.spec.guidance]
        texts += [str(about.get("description")) for _, about, _ in _parameters(one.spec.parameters)]
        assert not [text for text in texts if PRIVATE.search(text)], one.spec.id
        assert one.spec.description[0].isupper() and one.spec.description.endswith("."), one.spec.id
