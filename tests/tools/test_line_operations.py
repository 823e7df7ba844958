"""Line operations on a text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.tools.files.lines_and_diffs import split_lines
from handrail.tools.files.text_changes import apply_line_replacements, check_patch_operations, convert_patch_operations

pytestmark = pytest.mark.proves("T-02a")


def patch(text: str, *operations: dict[str, Any]) -> str:
    check_patch_operations(operations)
    return apply_line_replacements(text, convert_patch_operations(text, operations))


def replace(first: int, last: int, content: str, **more: str) -> dict[str, Any]:
    return {"op": "replace", "first_line": first, "last_line": last, "content": content, **more}


def insert(line: int, content: str, **more: str) -> dict[str, Any]:
    return {"op": "insert", "line": line, "content": content, **more}


def append(content: str, **more: str) -> dict[str, Any]:
    return {"op": "append", "content": content, **more}


@pytest.mark.parametrize(
    ("text", "operations", "after"),
    [
        ("a\nb\nc\n", [replace(2, 2, "B")], "a\nB\nc\n"),
        ("a\nb\nc\n", [replace(1, 2, "")], "c\n"),
        ("a\nb\n", [insert(1, "0\n")], "0\na\nb\n"),
        ("a\nb\n", [insert(3, "c")], "a\nb\nc\n"),
        ("a\n", [append("b\nc")], "a\nb\nc\n"),
        ("", [append("a")], "a\n"),
        ("a\n", [append("\n")], "a\n\n"),
        ("a\nb\nc\nd\n", [replace(3, 3, "C"), insert(2, "x"), replace(1, 1, "A\nA")], "A\nA\nx\nb\nC\nd\n"),
        ("a\nb\n", [insert(2, "1"), insert(2, "2")], "a\n1\n2\nb\n"),
        ("a\nb\n", [replace(2, 2, "B"), insert(2, "before")], "a\nbefore\nB\n"),
    ],
)
def test_operations_refer_to_the_original_line_numbers(text: str, operations: list[dict[str, Any]], after: str) -> None:
    assert patch(text, *operations) == after


@pytest.mark.parametrize(
    ("text", "operation", "after"),
    [
        ("a\r\nb\r\n", append("c\nd"), "a\r\nb\r\nc\r\nd\r\n"),
        ("a\r\nb\r\n", replace(1, 1, "A\r\nA"), "a\r\nb\r\n".replace("a\r\n", "A\r\nA\r\n")),
        ("a\nb", append("c"), "a\nb\nc"),
        ("a\nb", replace(2, 2, "B\n"), "a\nB"),
        ("a\r\nb", append("c\n"), "a\r\nb\r\nc"),
        ("a\nb", insert(1, "0"), "0\na\nb"),
        ("a\nb", replace(2, 2, ""), "a\n"),
    ],
)
def test_line_endings_and_a_missing_final_newline_are_kept(text: str, operation: dict[str, Any], after: str) -> None:
    assert patch(text, operation) == after


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (replace(2, 4, "x"), "The file has 3 lines"),
        (replace(3, 2, "x"), "lines 3 to 2"),
        (insert(5, "x"), "at most 4"),
        (insert(1, ""), "empty `content`"),
        ({"op": "append", "content": "x", "line": 3}, "Pass content, and"),
        ({"op": "replace", "content": "x", "first_line": 1}, "Pass first_line, last_line and content"),
        ({"op": "insert", "content": "x"}, "wrong fields: content"),
    ],
)
def test_an_invalid_operation_is_refused_with_the_reason(operation: dict[str, Any], reason: str) -> None:
    with pytest.raises(ToolError, match=reason) as refused:
        patch("a\nb\nc\n", operation)
    assert refused.value.kind == "invalid_input"


@pytest.mark.parametrize("second", [replace(2, 3, "y"), insert(2, "y")])
def test_two_operations_on_one_line_are_refused(second: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match="Two operations change line 2"):
        patch("a\nb\nc\n", replace(1, 2, "x"), second)


def test_a_wrong_expected_text_is_a_conflict_that_shows_the_actual_text() -> None:
    for operation in (replace(1, 2, "x", expect="a\nB"), insert(2, "x", expect="B"), append("x", expect="B")):
        with pytest.raises(ToolError, match="does not match") as refused:
            patch("a\r\nb\r\n", operation)
        assert refused.value.kind == "conflict"
        assert "b" in str(refused.value)


def test_an_expected_text_matches_regardless_of_line_endings() -> None:
    assert patch("a\r\nb\r\n", replace(1, 2, "x", expect="a\nb\n")) == "x\r\n"


lines = st.lists(st.text(alphabet="ab", max_size=3), max_size=8)


@given(lines, st.booleans(), st.data())
def test_a_replacement_changes_exactly_its_range(body: list[str], ended: bool, data: st.DataObject) -> None:
    text = "\n".join(body) + ("\n" if ended and body else "")
    have = split_lines(text)
    if not have:
        return
    first = data.draw(st.integers(1, len(have)))
    last = data.draw(st.integers(first, len(have)))
    after = split_lines(patch(text, replace(first, last, "X\nY")))
    assert after[: first - 1] == have[: first - 1]
    assert [line.rstrip("\n") for line in after[first - 1 : first + 1]] == ["X", "Y"]
    assert after[first + 1 :] == have[last:]
    assert "".join(after).endswith("\n") == text.endswith("\n")
