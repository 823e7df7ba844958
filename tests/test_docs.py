"""The examples of docs/ run: programs, tools, scripts, tests, and every line of the rule tables."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.snippets import ROOT, Folder, commands, page, snippets

from handrail import ToolSpec, tool
from handrail.contract.agent_manifest import AgentBudgets, AgentManifest, parse_agent_manifest
from handrail.contract.tool.requires import NAMED_CAPABILITIES
from handrail.policy.rules.rules_and_modes import CONFINED_RULE_TEXTS
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import temporary_kernel

GENERATED = {
    "cli.md",
    "configuration.md",
    "conformance.md",
    "events.md",
    "protected-names.md",
    "records.md",
    "results.md",
    "tools.md",
}
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path.parent.name not in ("adr", "api") and path.name not in GENERATED
)
"""Every page that a person wrote, decisions apart."""
PROGRAMS = [
    pytest.param(name, snippet.text, id=f"{name}-{number}")
    for name in PAGES
    for number, snippet in enumerate(snippets(page(name), "python"), 1)
]
RULES = "docs/how-to/write-rules.md"
TABLE = re.compile(r"^\| rules \| call \| decision \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| (.*?) ?\| (`.+`) \| (allow|ask|deny) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")


@pytest.mark.parametrize(("name", "text"), PROGRAMS)
def test_the_programs_of_the_pages_run(name: str, text: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.prepare("")
    file = folder.workspace / "test_it.py"
    if "def test_" in text:
        file.write_text(text, encoding="utf-8")
        done = folder.python("-m", "pytest", "-q", "-p", "asyncio", "-o", "asyncio_mode=auto", file.name)
    else:
        done = folder.program(text)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_snippets_of_the_pages_pass_the_type_checker(tmp_path: Path) -> None:
    shown = [snippet.text for name in ("README.md", *PAGES) for snippet in snippets(page(name), "python")]
    for number, text in enumerate(shown):
        (tmp_path / f"shown_{number}.py").write_text(text, encoding="utf-8")
    settings = {"include": ["."], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--project", str(tmp_path), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine")
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_each_page_run_in_order_with_the_files_of_the_page(name: str, tmp_path: Path) -> None:
    text = page(name)
    folder = Folder(tmp_path)
    folder.prepare(text)
    for command in commands(text):
        folder.run(command)


def test_every_name_of_a_module_or_entry_point_group_in_the_pages_exists() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    shown = {found for name in ("README.md", *PAGES) for found in re.findall(r"`(handrail(?:\.\w+)+)[`(]", page(name))}
    assert "handrail.tools" in shown
    for name in shown - {"handrail.toml"}:
        assert f'"{name}"' in source or _is_importable(name), name


def _is_importable(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_agent_manifests_of_the_pages_are_valid() -> None:
    blocks = [snippet.text for name in PAGES for snippet in snippets(page(name), "toml")]
    shown = [text for text in blocks if "id" in tomllib.loads(text)]  # the others are scripts and settings
    for text in shown:
        checked = parse_agent_manifest(text.encode(), "agent.toml", tomllib.loads(text)["id"])
        assert checked.faults == ()
    assert len(shown) >= 9


def keys(name: str) -> set[str]:
    """The names in the first column of a page's tables."""
    cells = re.findall(r"^\| (`[^|]*`) \|", page(name), re.MULTILINE)
    return {key for cell in cells for key in CODE.findall(cell)}


def test_the_reference_of_tool_manifests_has_every_key() -> None:
    names = {field.name for field in fields(ToolSpec)} - {"id"}  # "name" in a manifest
    assert names - keys("docs/reference/tool-manifest.md") == set()
    assert set(NAMED_CAPABILITIES) - keys("docs/reference/tool-manifest.md") == set()


def test_the_reference_of_agent_manifests_has_every_key() -> None:
    text, tables = page("docs/reference/agent-manifest.md"), {"requires", "roots", "budgets", "delegation"}
    known = keys("docs/reference/agent-manifest.md")
    for name in AgentManifest.model_fields:
        assert name in known or f"[{name}" in text, name
    assert set(AgentBudgets.model_fields) | {"path", "access", "can_ask_user", "secrets", "agents"} <= known
    assert all(f"[{table}]" in text for table in tables)


@tool(id="bank.transfer", side_effect="external", locks=["account:{source}:X"])
def transfer(source: str, target: str) -> str:
    """Move money."""
    return f"{source} to {target}"


def arguments(name: str, about: str) -> Mapping[str, Any]:
    """The call that a row of a table is about."""
    match name:
        case "bash":
            return {"command": about.replace(r"\|", "|")}
        case "read":
            return {"path": about}
        case "write":
            return {"path": about, "content": "x"}
        case "edit":
            return {"path": about, "old": "a", "new": "b"}
        case _:
            return json.loads(about)


@pytest.mark.proves("P-13")
@pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="bash is withheld on this machine")
async def test_every_row_of_the_rule_tables_gives_the_documented_decision() -> None:
    tables = "".join(TABLE.findall(page(RULES)))
    rows = ROW.findall(tables)
    assert len(rows) == len(tables.splitlines()) > 30
    async with temporary_kernel(tools=[transfer]) as kernel:
        shipped = kernel.own_context.rules
        kernel.own_context.rules = shipped.with_replaced_rules(
            *(one for one in shipped if one.text not in CONFINED_RULE_TEXTS)
        )
        for rules, call, decision in rows:
            name, about = CODE.findall(call)
            explained = await kernel.explain_call(
                name, arguments(name, about), rules=CODE.findall(rules), headless=False
            )
            assert explained.action == decision, f"{rules} {call}: {explained}"
