"""The table of protected names: each row is well formed and effective, and well-known names are in it."""

from __future__ import annotations

from collections import Counter

import pytest
from tests import protected_names
from tests.contract import protected_lists as lists

from handrail.contract.protected.approval_required import APPROVAL_REQUIRED, UNPROTECTED
from handrail.contract.protected.never_written import KIND_DESCRIPTIONS, NEVER_WRITTEN, ProtectedProgramFiles
from handrail.contract.protected.path_protection import (
    find_path_protection,
    find_tool_write_protection,
    has_path_dependent_entries,
    needs_full_path_check,
    normalise_file_name,
)

pytestmark = pytest.mark.proves("P-15")

_NEVER = [
    *lists.AGENTS_NEVER.split(),
    *lists.EDITORS.split(),
    *lists.ENTERING.split(),
    *lists.HOOKS.split(),
    *lists.REPL.split(),
]
_ASK = [*lists.AGENTS_ASK.split(), *lists.ENTERING_ASK.split(), *lists.HOOKS_ASK.split(), *lists.TOOLS.split()]


def answer(path: str) -> str:
    found = find_tool_write_protection(path)
    return "free" if found is None else "ask" if found.requires_approval else "never"


def examples(rows: tuple[ProtectedProgramFiles, ...]) -> list[str]:
    return [name.replace("*", "zz") for row in rows for name in row.names.split()]


def test_each_row_has_names_a_program_and_a_source() -> None:
    for row in (*NEVER_WRITTEN, *APPROVAL_REQUIRED, *UNPROTECTED):
        assert row.program and row.names.split() and len(row.source) > 8, row
        assert row.kind in KIND_DESCRIPTIONS or row.kind == "free"
    assert all(not find_path_protection(name).requires_approval for name in examples(NEVER_WRITTEN))  # type: ignore[union-attr]


def test_each_protected_name_is_listed_once_in_its_normalised_form() -> None:
    counted = Counter(name for row in (*NEVER_WRITTEN, *APPROVAL_REQUIRED, *UNPROTECTED) for name in row.names.split())
    assert [name for name, count in counted.items() if count > 1] == []
    for name in counted:
        assert name.count("*") <= 1 and "*" not in name.rpartition("/")[0], name
        written = name.replace("*", "zz")
        assert [normalise_file_name(part) for part in written.split("/")] == written.split("/"), name


@pytest.mark.parametrize(
    ("rows", "wanted"), [(NEVER_WRITTEN, "never"), (APPROVAL_REQUIRED, "ask"), (UNPROTECTED, "free")]
)
def test_each_protected_name_applies_at_any_depth_and_in_any_spelling(
    rows: tuple[ProtectedProgramFiles, ...], wanted: str
) -> None:
    for name in examples(rows):
        for path in (name, f"a/b/{name}", name.upper(), f"{name}. ", f"{name}::$DATA", f"{name[:1]}\u200b{name[1:]}"):
            assert answer(path) == wanted, path
        if wanted != "free":
            assert answer(f"{name}/in/it") in (wanted, "never"), name


def test_a_folder_walk_checks_each_protected_name() -> None:
    for name in examples((*NEVER_WRITTEN, *APPROVAL_REQUIRED)):
        assert any(map(needs_full_path_check, name.split("/"))) or any(
            map(has_path_dependent_entries, name.split("/")[:-1])
        ), name


@pytest.mark.parametrize("path", _NEVER)
def test_no_tool_writes_files_that_run_automatically(path: str) -> None:
    assert answer(path) == "never" and answer(f"packages/a/{path}") == "never"


@pytest.mark.parametrize("path", _ASK)
def test_writing_files_that_other_agents_and_tools_follow_requires_approval(path: str) -> None:
    assert answer(path) == "ask" and answer(f"packages/a/{path}") == "ask"


@pytest.mark.parametrize("path", lists.ORDINARY.split())
def test_ordinary_names_are_not_protected(path: str) -> None:
    assert answer(path) == "free"


@pytest.mark.parametrize(
    "path", [".github/workflows/.envrc", ".agents/.git/config", ".clinerules/hooks/x", "gradle/wrapper/.vscode"]
)
def test_a_path_has_the_strictest_protection_of_its_names(path: str) -> None:
    assert answer(path) == "never"


def test_programs_are_held_to_the_strictest_name_in_a_path() -> None:
    for path in (".github/workflows/AGENTS.md", ".storybook/CLAUDE.md", ".terraform/.npmrc"):
        found = find_path_protection(path)
        assert found is not None and found.requires_approval and found.applies_to_programs


def test_the_page_of_protected_names_matches_the_tables() -> None:
    assert protected_names.TABLE.read_text(encoding="utf-8") == protected_names.render(), "run: make docs"


def test_instructions_and_settings_inside_installed_packages_are_not_protected() -> None:
    for folder in ("node_modules", ".venv/lib/python3.12/site-packages", "dist-packages"):
        assert answer(f"{folder}/x/AGENTS.md") == answer(f"{folder}/x/.npmrc") == "free"
        assert answer(f"{folder}/x/.envrc") == "never"
    assert answer(".venv/lib/python3.12/site-packages/x.pth") == "ask"
