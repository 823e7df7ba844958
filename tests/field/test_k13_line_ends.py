"""Reports about line endings: edits with mixed endings, and endings that changed without a notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.field.text_files import model_session

from handrail.tools.files.lines_and_diffs import detect_line_separator, normalise_line_ends, split_lines
from handrail.tools.files.text_changes import (
    adapt_content_to_original,
    apply_line_replacements,
    convert_patch_operations,
    replace_exact_text,
)

MIXED = b"a\r\nb\r\nc\r\nd\ne\n"


def edits(tool: str, old: str, new: str) -> dict[str, Any]:
    return {"old": old, "new": new} if tool == "edit" else {"edits": [{"old": old, "new": new}]}


@pytest.mark.parametrize("tool", ["edit", "multi_edit"])
@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (MIXED, "d\ne", "D\nE", b"a\r\nb\r\nc\r\nD\nE\n"),
        (MIXED, "c\nd\ne", "C\nD\nE", b"a\r\nb\r\nC\r\nD\nE\n"),
        (MIXED, "c\nd", "c\nx\nd", b"a\r\nb\r\nc\r\nx\r\nd\ne\n"),
        (MIXED, "b\nc\nd\ne\n", "c\ne\n", b"a\r\nc\r\ne\n"),
        (MIXED, "e\n", "e\nf\n", b"a\r\nb\r\nc\r\nd\ne\nf\n"),
        (MIXED, "a", "0\na", b"0\r\na\r\nb\r\nc\r\nd\ne\n"),
        (MIXED, "d\r\ne", "D\r\nE", b"a\r\nb\r\nc\r\nD\nE\n"),
        (b"a\nb\nc\r\n", "b\nc\n", "", b"a\n"),
        (b"a\nb\nc\n", "a\r\nb", "x\r\ny", b"x\ny\nc\n"),
        (b"a\rb\rc\r", "a\nb", "x\ny\nz", b"x\ry\rz\rc\r"),
        (b"a\rb\rc", "b\rc", "x\ny", b"a\rx\ry"),
        (b"10%\r20%\r100%\nend\n", "20%\r100%\nend", "30%\r100%\nEND", b"10%\r30%\r100%\nEND\n"),
        (b"a\r\nb\nc\rd\n", "c\nd", "C\nD", b"a\r\nb\nC\rD\n"),
        (b"a\nc\rd\ne\n", "c\nd\ne", "C\nD\nE", b"a\nC\rD\nE\n"),
        (b"a\r\nb", "b", "x\ny", b"a\r\nx\r\ny"),
        (b"a\r\nb\nc\n", "a\nb", "a\nb\nx", b"a\r\nb\nx\nc\n"),
        (b"a\nb\r\nc\n", "a\nb", "a\nb\nx\ny", b"a\nb\r\nx\r\ny\r\nc\n"),
        (b"a\r\nb\nc\r\n", "b", "b\nx", b"a\r\nb\nx\nc\r\n"),
        (b"a\r\nbcd\n", "a\nb", "a\nx\nb", b"a\r\nx\r\nbcd\n"),
        (b"a\r\nb\n", "a\r\nb\n", "a\nb\n", b"a\nb\n"),
        (b"a\nb\n", "a\nb", "a\r\nb", b"a\r\nb\n"),
        ("a\x85b\u2028c\r\nd\ne".encode(), "c\nd", "C\nD", "a\x85b\u2028C\r\nD\ne".encode()),
    ],
)
async def test_an_edit_finds_text_across_mixed_line_ends_and_each_line_keeps_its_end(
    tmp_path: Path, tool: str, before: bytes, old: str, new: str, after: bytes
) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", before)
        await model.show("a.txt")
        await model.call(tool, path="a.txt", **edits(tool, old, new))
        assert path.read_bytes() == after


async def test_every_occurrence_is_replaced_in_a_file_with_mixed_line_ends(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b"x\r\ny\r\nx\ny\nx\r\nz\n")
        await model.show("a.txt")
        text = await model.fail("edit", path="a.txt", old="x\ny", new="X\nY")
        assert "occurs 2 times" in text and "lines 1, 3" in text
        answer = await model.call("edit", path="a.txt", old="x\ny", new="X\nY", replace_all=True)
        assert answer["replacements"] == 2 and answer["line_ends"] == "mixed (3 CRLF, 3 LF)"
        assert path.read_bytes() == b"X\r\nY\r\nX\nY\nx\r\nz\n"


async def test_a_pattern_for_the_end_of_a_line_matches_every_kind_of_line_end(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        model.put("a.txt", b"a foo\r\nfoo b\r\nfoo\nfoo")
        model.put("b.txt", "a foo\r\nfoo é\r\n".encode("utf-16"))
        model.put("c.txt", "é foo\r\nfoo b\r\n".encode("latin-1"))
        answer = await model.call("grep", pattern="foo$")
        assert [(one["path"], one["line"], one["text"]) for one in answer["matches"]] == [
            ("a.txt", 1, "a foo"),
            ("a.txt", 3, "foo"),
            ("a.txt", 4, "foo"),
            ("b.txt", 1, "a foo"),
            ("c.txt", 1, "é foo"),
        ]


@pytest.mark.parametrize(
    ("before", "operation", "after"),
    [
        (MIXED, {"op": "replace", "first_line": 3, "last_line": 4, "content": "C\nD", "expect": "c\nd"}, b"C\r\nD\n"),
        (MIXED, {"op": "replace", "first_line": 3, "last_line": 4, "content": "C\nx\nd"}, b"C\r\nx\r\nd\n"),
        (MIXED, {"op": "insert", "line": 4, "content": "x"}, b"c\r\nx\r\nd\n"),
        (MIXED, {"op": "insert", "line": 5, "content": "x"}, b"c\r\nd\nx\n"),
    ],
)
async def test_patched_lines_get_the_line_ends_of_the_lines_that_they_replace(
    tmp_path: Path, before: bytes, operation: dict[str, Any], after: bytes
) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", before)
        await model.call("read", path="a.txt")
        await model.call("file.patch", path="a.txt", operations=[operation])
        assert path.read_bytes() == b"a\r\nb\r\n" + after + b"e\n"


async def test_a_file_with_cr_line_ends_is_read_and_patched_by_lines(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b"one\rtwo\rthree")
        answer = await model.call("read", path="a.txt")
        assert (answer["text"], answer["total_lines"]) == ("one\ntwo\nthree", 3)
        operations = [
            {"op": "replace", "first_line": 2, "last_line": 2, "content": "2\n2b", "expect": "two"},
            {"op": "append", "content": "four"},
        ]
        answer = await model.call("file.patch", path="a.txt", operations=operations)
        assert path.read_bytes() == b"one\r2\r2b\rthree\rfour"
        assert answer["line_ends"] == "CR"
        assert answer["diff"].split("\n")[3:7] == [" one", "-two", "+2", "+2b"]
        await model.call("write", path="a.txt", content="x\ntwo\n")
        assert path.read_bytes() == b"x\rtwo\r"


@pytest.mark.parametrize(
    ("before", "content", "after", "said"),
    [
        (b"a\r\nb\r\n", "a\nB\nc\n", b"a\r\nB\r\nc\r\n", "CRLF"),
        (MIXED, "a\nb\nC\nd\ne\nf\n", b"a\r\nb\r\nC\r\nd\ne\nf\n", "mixed (3 CRLF, 3 LF)"),
        (b"a\nb\n", "a\r\nb\r\n", b"a\r\nb\r\n", "changed from LF to CRLF"),
        (b"a\r\nb\r\n", "a\nb\r\n", b"a\nb\r\n", "changed from CRLF to mixed (1 CRLF, 1 LF)"),
        (b"a\r\nb", "a\nb\nc", b"a\r\nb\r\nc", "CRLF"),
    ],
)
async def test_a_write_keeps_line_ends_or_reports_the_change(
    tmp_path: Path, before: bytes, content: str, after: bytes, said: str
) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", before)
        await model.show("a.txt")
        answer = await model.call("write", path="a.txt", content=content)
        assert path.read_bytes() == after
        assert answer["line_ends"] == said


async def test_a_diff_shows_changed_line_ends_together_with_other_changes(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        model.put("a.txt", b"a\nb\nc\n")
        await model.show("a.txt")
        answer = await model.call("write", path="a.txt", content="a\r\nB\r\nc\r\n")
        assert answer["diff"].split("\n")[3:] == ["-a", "-b", "-c", "+a\r", "+B\r", "+c\r"]


ends = st.sampled_from(["\n", "\r\n", "\x85", "\u2028"])
lines = st.lists(st.tuples(st.text(alphabet="ab ", max_size=3), ends), max_size=8)
bodies = st.text(alphabet="abx\n ", max_size=8)


@given(lines, st.booleans(), st.data())
def test_an_edit_of_displayed_text_changes_only_its_own_place(
    parts: list[tuple[str, str]], ended: bool, data: st.DataObject
) -> None:
    text = "".join(body + end for body, end in parts) + ("" if ended else "z")
    shown = normalise_line_ends(text)
    if not shown:
        return
    start = data.draw(st.integers(0, len(shown) - 1))
    old = shown[start : data.draw(st.integers(start + 1, len(shown)))]
    new = data.draw(bodies)
    if old == new or any(shown.startswith(old, at) for at in range(len(shown)) if at != start):
        return
    after = replace_exact_text("a", text, old, new, replace_all=False).text
    assert normalise_line_ends(after) == shown[:start] + new + shown[start + len(old) :] or "\r" not in after
    head = split_lines(text)[: shown.count("\n", 0, start)]
    tail = split_lines(text)[shown.count("\n", 0, start + len(old)) + 1 :]
    assert after.startswith("".join(head)) and after.endswith("".join(tail))


@given(lines, bodies)
def test_a_rewritten_text_has_the_new_content_and_restores_the_old_line_ends(
    parts: list[tuple[str, str]], content: str
) -> None:
    before = "".join(body + end for body, end in parts)
    after = adapt_content_to_original(before, content)
    assert after.replace("\r\n", "\n") == content
    assert adapt_content_to_original(before, normalise_line_ends(before)) == before


@given(lines, st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_a_patch_of_lines_keeps_all_other_lines_unchanged(
    parts: list[tuple[str, str]], only: str, data: st.DataObject
) -> None:
    text = "".join(body + (only if only == "\r" else end) for body, end in parts)
    if only == "\r":
        text = text.replace("\r\n", "\r").replace("\n", "\r")
    have = split_lines(text, detect_line_separator(text))
    if not have:
        return
    first = data.draw(st.integers(1, len(have)))
    last = data.draw(st.integers(first, len(have)))
    operation = {"op": "replace", "first_line": first, "last_line": last, "content": "X\nY"}
    after = apply_line_replacements(text, convert_patch_operations(text, [operation]))
    assert after.startswith("".join(have[: first - 1])) and after.endswith("".join(have[last:]))
    assert len(split_lines(after, detect_line_separator(after))) == len(have) - (last - first + 1) + 2


async def test_a_carriage_return_within_a_line_is_not_a_line_end(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b"a\rx\r\nb\r\nc\r\n")
        shown = await model.show("a.txt")
        answer = await model.call("write", path="a.txt", content=f"{shown}\n".replace("b", "B"))
        assert path.read_bytes() == b"a\rx\r\nB\r\nc\r\n" and answer["line_ends"] == "CRLF"
