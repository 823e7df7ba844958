"""A new tool of each kind works without changes, and so does its test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from handrail.authoring.tool_linter import lint_tools
from handrail.authoring.tool_templates import TOOL_KINDS, ToolKind, render_tool_files, write_tool_files
from handrail.contract.errors import UsageError
from handrail.sandbox import tier_probe

confined = pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}"
)


@confined
@pytest.mark.proves("R-13")
@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_a_new_tool_of_each_kind_passes_its_own_test(kind: ToolKind, tmp_path: Path) -> None:
    write_tool_files(tmp_path, render_tool_files(kind, "text.words"))
    assert "1 passed" in passed(tmp_path, "test_text_words.py")


@confined
@pytest.mark.proves("R-13")
@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_the_test_of_a_new_tool_fails_when_the_tool_is_wrong(kind: ToolKind, tmp_path: Path) -> None:
    """One more than the words that there are, and no answer at all."""
    *_, tool, test = write_tool_files(tmp_path, render_tool_files(kind, "text.words"))
    right = tool.read_text()
    for wrong in (right.replace("len(", "1 + len("), right.replace('"words": ', '"other": ')):
        assert wrong != right
        tool.write_text(wrong)
        assert "1 failed" in outcome(tmp_path, test.name)[1]


NAMES = {
    "function": ("class", "json", "test", "len", "temporary_kernel", "pydantic", "x-y.2"),
    "class": ("import", "test.words", "none", "words.test", "tool", "path"),
    "program": ("class", "json"),
    "persistent": ("import", "test"),
    "source": ("json", "test", "x-y.2"),
    "module": ("json", "test", "conftest", "handrail", "in"),
}


@confined
@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_ids_that_clash_with_other_names_still_give_tools_that_pass_their_tests(kind: ToolKind, tmp_path: Path) -> None:
    """All in one folder, as pytest collects it by default: files named like tests are no tools."""
    for tool_id in NAMES[kind]:
        written = write_tool_files(tmp_path, render_tool_files(kind, tool_id))
        assert lint_tools(written[0], tier_probe.choose_sandbox()) == ([tool_id], [])
    assert f"{len(NAMES[kind])} passed" in passed(tmp_path)


def passed(folder: Path, *names: str) -> str:
    """Return pytest's output for the tests in this folder, all of which pass."""
    code, said = outcome(folder, *names)
    assert code == 0, said
    return said


def outcome(folder: Path, *names: str) -> tuple[int, str]:
    """The exit code of pytest on the tests there, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # it needs none
            "PYTHONDONTWRITEBYTECODE": "1",  # a tool is changed within a second here
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.proves("R-13", "K-12")
@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_a_new_tool_has_no_lint_findings(kind: ToolKind, tmp_path: Path) -> None:
    written = write_tool_files(tmp_path, render_tool_files(kind, "text.words"))
    assert lint_tools(written[0], tier_probe.choose_sandbox()) == (["text.words"], [])


@pytest.mark.proves("R-13")
def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("mine")
    with pytest.raises(UsageError, match=r"already has words\.py\. Nothing was written"):
        write_tool_files(tmp_path, render_tool_files("function", "words"))
    assert (tmp_path / "words.py").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["words.py"]


@pytest.mark.parametrize(
    ("tool_id", "problem"),
    [
        ("9 lives", "is not an id"),
        ("bash", "is a locked id"),
        ("git.status", "is a built-in tool, which no tool may override"),
        ("find_tools", "is reserved for a built-in session tool"),
        ("get_git_status", "is an alias of the built-in tool 'git.status'"),
        ("git__status", "would have the same wire name 'git__status'"),
    ],
)
def test_an_invalid_tool_id_is_refused(tool_id: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        render_tool_files("function", tool_id)
