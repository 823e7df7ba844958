"""What the README shows is run: its Python, its manifest, its client configuration, its commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from handrail.contract.manifest import parse_manifest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NEEDS_A_MODEL = "handrail run"


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("   #")[0].strip() for text in snippets("sh") for line in text.splitlines()]
    return [line for line in lines if line.startswith("handrail ")]


@pytest.mark.proves("F-01")
@pytest.mark.parametrize("snippet", snippets("python"))
def test_python_snippets_run(snippet: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    run = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "curl" in run.stdout


def test_commands_run_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for command in commands():
        if not command.startswith(NEEDS_A_MODEL):
            words = [sys.executable, "-m", "handrail.faces.cli", *shlex.split(command)[1:]]
            run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
            assert run.stdout.strip(), command


@pytest.mark.parametrize("text", snippets("json"))
def test_json_snippets_are_what_they_are_shown_as(text: str) -> None:
    value = json.loads(text)
    if "llm" in value:
        assert parse_manifest(text, "README.md").id == "text.count"
    else:
        assert value["mcpServers"]["handrail"]["args"][0] == "mcp"


def test_the_commands_with_a_model_are_real() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "handrail.faces.cli", "run", "--help"], capture_output=True, text=True, timeout=60
    )
    assert all(option in run.stdout for option in ("--model", "--base-url"))
