"""What the pages of docs/ show is run: programs, tools, scripts, tests, and every line of the tables of rules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.snippets import Folder, commands, page, snippets

from handrail import tool
from handrail.contract.agent import parse_agent
from handrail.sandbox import tiers
from handrail.testing.kernels import temporary_kernel

PAGES = (
    "docs/start.md",
    "docs/agents.md",
    "docs/how-to/configure.md",
    "docs/how-to/share-settings.md",
    "docs/tools.md",
    "docs/how-to/write-rules.md",
    "docs/reference/rules.md",
    "docs/embedding.md",
    "docs/scripts.md",
    "docs/privacy.md",
    "docs/how-to/troubleshoot.md",
    "docs/how-to/approve-calls.md",
    "docs/how-to/use-git-tools.md",
    "docs/how-to/use-many-tools.md",
    "docs/how-to/connect-mcp-servers.md",
    "docs/how-to/serve-mcp-clients.md",
    "docs/how-to/use-in-an-editor.md",
    "docs/concepts/protected-paths.md",
    "docs/concepts/records.md",
    "docs/jobs.md",
)
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
def test_programs_run(name: str, text: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.prepare("")
    file = folder.workspace / "test_it.py"
    if "def test_" in text:
        file.write_text(text, encoding="utf-8")
        done = folder.python("-m", "pytest", "-q", "-p", "asyncio", "-o", "asyncio_mode=auto", file.name)
    else:
        done = folder.program(text)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_types_are_usable_as_they_are_shown(tmp_path: Path) -> None:
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


@pytest.mark.skipif(not tiers.probe_tier().is_confining, reason="programs cannot be confined on this machine")
@pytest.mark.parametrize("name", PAGES)
def test_commands_run_one_after_the_other_among_the_files_of_their_page(name: str, tmp_path: Path) -> None:
    text = page(name)
    folder = Folder(tmp_path)
    folder.prepare(text)
    for command in commands(text):
        folder.run(command)


def test_the_agent_manifests_that_are_shown_are_sound() -> None:
    blocks = [snippet.text for snippet in snippets(page("docs/agents.md"), "toml")]
    shown = [text for text in blocks if "id" in tomllib.loads(text)]  # the others are scripts
    for text in shown:
        checked = parse_agent(text.encode(), "agent.toml", tomllib.loads(text)["id"])
        assert checked.faults == ()
    assert len(shown) == 7


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
@pytest.mark.skipif(not tiers.probe_tier().is_confining, reason="bash is withheld on this machine")
async def test_every_line_of_the_tables_of_rules_is_decided_as_it_says() -> None:
    tables = "".join(TABLE.findall(page(RULES)))
    rows = ROW.findall(tables)
    assert len(rows) == len(tables.splitlines()) > 30
    async with temporary_kernel(tools=[transfer]) as kernel:
        for rules, call, decision in rows:
            name, about = CODE.findall(call)
            explained = await kernel.explain_call(
                name, arguments(name, about), rules=CODE.findall(rules), headless=False
            )
            assert explained.action == decision, f"{rules} {call}: {explained}"
