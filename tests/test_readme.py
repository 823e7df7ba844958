"""Run the README's programs and commands, and check its client configuration and the links of all pages."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.snippets import ROOT, Folder, commands, page, snippets

README = page("README.md")
NEEDS_A_MODEL = ("handrail run", "handrail chat")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.prepare(README)
    (folder.workspace / "README.md").write_text(README, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=folder.workspace, check=True)
    return folder


@pytest.mark.proves("F-01")
@pytest.mark.parametrize("snippet", [snippet.text for snippet in snippets(README, "python")])
def test_the_python_snippets_of_the_readme_run(snippet: str, folder: Folder) -> None:
    done = folder.python("-c", snippet)
    assert done.returncode == 0, done.stderr
    assert "curl" in done.stdout


def test_the_commands_of_the_readme_run_in_order(folder: Folder) -> None:
    for command in commands(README):
        if not command.line.startswith(NEEDS_A_MODEL):
            done = folder.run(command)
            assert done.stdout.strip() or done.stderr.strip(), command.line


@pytest.mark.parametrize("text", [snippet.text for snippet in snippets(README, "json")])
def test_the_json_snippets_of_the_readme_configure_an_mcp_client(text: str) -> None:
    assert json.loads(text)["mcpServers"]["handrail"]["args"][0] == "mcp"


def test_the_commands_that_need_a_model_exist(folder: Folder) -> None:
    for command in ("run", "chat"):
        assert "--model" in folder.python("-m", "handrail", command, "--help").stdout


def test_links_lead_to_existing_files() -> None:
    docs = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("docs/**/*.md") if "_site" not in file.parts)
    missing = [
        f"{name}: {link}"
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", *docs)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page(name))
        if not ((ROOT / name).parent / link).exists()
    ]
    assert not missing, "\n".join(missing)
