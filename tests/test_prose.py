"""The prose of pages, commands, tools and errors keeps to the style: short sentences with a named subject.

``tests/prose_budgets.json`` holds the faults that are left. It only shrinks: a test fails for a budget that is too large.
"""

from __future__ import annotations

import pytest
from tests.prose import budgets, counts, error_faults, faults, measured, paragraphs


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("The kernel records the call. A rule decides it.", []),
        ("What waits for a user is listed in the log.", ["clause"]),
        ("What does the kernel record in this case?", []),
        ("A tool of its own stands beside it here.", ["word", "word", "word"]),
        ("The call " + "is recorded and " * 12 + "answered.", ["long"]),
    ],
)
def test_a_style_fault_of_a_sentence_is_found(text: str, kinds: list[str]) -> None:
    assert [fault.kind for fault in faults(text)] == kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("File `{}` does not exist. Check the path.", []),
        ("`{}` was not found: {}", []),
        ("there is no job {}", ["begin", "word"]),
        ("It has ended already.", ["begin"]),
        ("Use a path inside the workspace", ["end"]),
    ],
)
def test_a_style_fault_of_an_error_text_is_found(text: str, kinds: list[str]) -> None:
    assert [fault.kind for fault in error_faults(text)] == kinds


def test_code_tables_and_headings_are_not_checked_as_prose() -> None:
    text = "# What it is\n\nA page.\n\n- One item\n  of two lines\n\n| a |\n|---|\n\n```sh\nnobody\n```\nMore [text](a.md) `told`.\n"
    assert list(paragraphs(text)) == ["A page.", "One item of two lines", "More text Code."]


def test_no_text_exceeds_its_fault_budget_and_no_budget_is_too_large() -> None:
    found, allowed = measured(), budgets()
    problems: list[str] = []
    for name in sorted({*found, *allowed}):
        now, before = counts(found.get(name, ())), allowed.get(name, {})
        for kind in sorted({*now, *before}):
            if now.get(kind, 0) > before.get(kind, 0):
                texts = [f"    {fault.text}" for fault in found[name] if fault.kind == kind]
                problems += [f"{name}: {now[kind]} faults of kind {kind!r}, {before.get(kind, 0)} allowed", *texts]
            elif now.get(kind, 0) < before.get(kind, 0):
                problems.append(f"{name}: fewer faults of kind {kind!r} than its budget; run: python -m tests.prose")
    assert not problems, "\n".join(problems)
