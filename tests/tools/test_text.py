"""Splices, diffs and hints, on any text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.contract.text.text_encodings import decode_file_text
from handrail.tools.files.lines_and_diffs import (
    MAX_DIFF_LINES,
    MAX_LINES,
    LineReplacement,
    SpanReplacement,
    UnifiedDiff,
    apply_span_replacements,
    check_line_count,
    compute_line_replacements,
    explain_missing_text,
    find_line_numbers_of_text,
    find_replaced_lines,
    make_diff_of_replacements,
    make_diff_of_texts,
    replace_all_occurrences,
    split_lines,
)
from handrail.tools.files.text_changes import replace_exact_text

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\Z")
texts = st.text(alphabet="ab\n", max_size=60)
spans = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 5), st.text(alphabet="xy\n", max_size=5)), max_size=6)


def applied(before: str, diff: str) -> str:
    """Apply a patch strictly: every context line, number and count must be correct."""
    lines = split_lines(before)
    out: list[str] = []
    at = 0
    body = diff.split("\n")[2:] if diff else []
    index = 0
    while index < len(body):
        header = _HUNK.match(body[index])
        assert header, body[index]
        index += 1
        old_start, old_count = int(header[1]), int(header[2] or 1)
        new_start, new_count = int(header[3]), int(header[4] or 1)
        begin = old_start - 1 if old_count else old_start
        out += lines[at:begin]
        at = begin
        assert len(out) == (new_start - 1 if new_count else new_start)
        old_seen = new_seen = 0
        while index < len(body) and not body[index].startswith("@@"):
            sign, text = body[index][:1], body[index][1:]
            index += 1
            end = "\n"
            if index < len(body) and body[index].startswith("\\ No newline"):
                end = ""
                index += 1
            if sign in " -":
                assert lines[at] == text + end
                at += 1
                old_seen += 1
            if sign in " +":
                out.append(text + end)
                new_seen += 1
        assert (old_seen, new_seen) == (old_count, new_count)
    return "".join(out + lines[at:])


def ascending(text: str, wanted: list[tuple[int, int, str]]) -> list[SpanReplacement]:
    found: list[SpanReplacement] = []
    for start, length, new in sorted(wanted):
        end = min(start + length, len(text))
        if start <= len(text) and (not found or start >= found[-1].end):
            found.append(SpanReplacement(start, end, new))
    return found


@given(texts, spans)
def test_a_diff_of_spans_turns_the_old_text_into_the_new_one(text: str, wanted: list[tuple[int, int, str]]) -> None:
    made = ascending(text, wanted)
    after = apply_span_replacements(text, made)
    diff = make_diff_of_replacements("f", split_lines(text), find_replaced_lines(text, made))
    assert applied(text, diff.text) == after


@given(texts, texts)
def test_a_diff_of_two_texts_turns_one_into_the_other(before: str, after: str) -> None:
    blocks = compute_line_replacements(split_lines(before), split_lines(after))
    diff = make_diff_of_replacements("f", split_lines(before), blocks)
    assert applied(before, diff.text) == after
    assert diff.added - diff.removed == len(split_lines(after)) - len(split_lines(before))


@given(st.binary(max_size=200))
def test_bytes_that_are_not_utf8_survive_decoding_and_encoding(data: bytes) -> None:
    file = decode_file_text(data)
    assert file.encoding.encode(file.text) == data


def test_a_diff_contains_only_the_changed_lines_and_their_context() -> None:
    before = "".join(f"line {n}\n" for n in range(100))
    start = before.index("line 50")
    diff = make_diff_of_replacements(
        "f.py", split_lines(before), find_replaced_lines(before, [SpanReplacement(start, start + 7, "LINE 50")])
    )
    assert diff.text.split("\n") == [
        "--- a/f.py",
        "+++ b/f.py",
        "@@ -48,7 +48,7 @@",
        " line 47",
        " line 48",
        " line 49",
        "-line 50",
        "+LINE 50",
        " line 51",
        " line 52",
        " line 53",
    ]
    assert (diff.added, diff.removed, diff.left_out) == (1, 1, 0)


@pytest.mark.proves("T-07")
def test_a_long_diff_is_truncated_and_the_remaining_lines_are_counted() -> None:
    after = tuple(f"{n}\n" for n in range(1_000))
    diff = make_diff_of_replacements("f", [], [LineReplacement(0, 0, after)], created=True)
    lines = diff.text.split("\n")
    assert lines[0] == "--- /dev/null"
    assert len(lines) == 2 + MAX_DIFF_LINES + 1
    assert diff.left_out == 1_000 + 1 - MAX_DIFF_LINES
    assert lines[-1] == f"… {diff.left_out} more lines of this diff are not shown"
    assert diff.added == 1_000


def test_a_change_of_only_line_endings_is_visible_in_the_diff() -> None:
    diff = make_diff_of_replacements("f", ["a\r\n"], [LineReplacement(0, 1, ("a\n",))])
    assert diff.text.split("\n")[3:] == ["-a\r", "+a"]


@pytest.mark.parametrize(
    ("text", "part", "hint"),
    [
        (
            "def f():\n\treturn 1\n",
            "def f():\n    return 1\n",
            r"Line 2 differs only in whitespace: it is '\treturn 1'",
        ),
        ("Hello World\n", "hello world", "Line 1 has it in a different case"),
        ("one\nreturn value + 1\n", "return value + 2", "The most similar line is 2: 'return value + 1'"),
        ("one\n", "something entirely else", "No similar text exists"),
        ("a\n", "a \ufffd", "U+FFFD"),
        ("  a\n", "\n\na\n", "Line 1 differs only in whitespace"),
    ],
)
def test_the_hint_for_a_missing_text_explains_the_difference(text: str, part: str, hint: str) -> None:
    assert hint in explain_missing_text(text, part)


def test_the_hint_for_a_long_repetitive_text_takes_linear_time() -> None:
    assert "most similar line" in explain_missing_text("a\n" * 150_000, "a\n" * 100_000 + "b")
    assert (
        explain_missing_text(" a\n" * 9 + "b\n", "a\na\nb") == "Line 8 differs only in whitespace: it is ' a', not 'a'."
    )


@given(texts, st.text(alphabet="ab\n ", min_size=1, max_size=20))
def test_every_missing_text_gets_an_explanation(text: str, part: str) -> None:
    assert explain_missing_text(text, part)


def test_overlapping_occurrences_are_all_found() -> None:
    assert find_line_numbers_of_text("aaa\naa", "aa") == [1, 1, 2]


def test_a_replacement_that_would_make_a_text_too_large_is_refused() -> None:
    for old, text in (("a", "a" * 100_000), ("ab", "ab-" * 200)):
        with pytest.raises(ToolError, match="The edited text would have") as raised:
            replace_exact_text("f", text, old, "b" * 500_000, replace_all=True)
        assert raised.value.kind == "limit"


def test_many_occurrences_are_replaced_in_one_step() -> None:
    done = replace_exact_text("f", "ab\n" * 50_000, "a", "xy", replace_all=True)
    assert (done.text, done.count, done.spans) == ("xyb\n" * 50_000, 50_000, None)
    few = replace_exact_text("f", "ab\nab\n", "a", "x", replace_all=True)
    assert (few.text, few.count) == ("xb\nxb\n", 2) and few.spans is not None


def test_the_nearest_line_is_searched_with_bounded_work() -> None:
    lines = "\n".join("ab" * 150 for _ in range(5_000))
    assert explain_missing_text(lines, "ba" * 100_000 + "c").startswith(
        ("The most similar line is 1", "No similar text")
    )
    assert explain_missing_text("first line\nsecond line here\n", "secnd line here").startswith(
        "The most similar line is 2"
    )


@given(
    texts,
    spans,
    st.text(alphabet="ab\n", min_size=1, max_size=4),
    st.text(alphabet="ab", max_size=3),
    st.integers(1, 9),
)
def test_a_long_text_processed_in_pieces_gives_the_same_result(
    text: str, wanted: list[tuple[int, int, str]], old: str, new: str, piece: int
) -> None:
    made = ascending(text, wanted)
    whole = split_lines(text), find_replaced_lines(text, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("handrail.tools.files.lines_and_diffs._PIECE", piece)
        patch.setattr("handrail.tools.files.lines_and_diffs._LINES", piece)
        assert (split_lines(text), find_replaced_lines(text, made)) == whole
        assert replace_all_occurrences(text, old, new) == text.replace(old, new)


def test_a_file_with_too_many_lines_is_refused_and_its_diff_has_only_counts() -> None:
    many = "\n" * (MAX_LINES + 1)
    with pytest.raises(ToolError, match=r"a\.txt has 1,000,001 lines\. The maximum for edits is 1,000,000"):
        check_line_count("a.txt", many.encode())
    check_line_count("a.txt", b"\n" * MAX_LINES)
    found = make_diff_of_texts("a.txt", many, "short\n", created=False)
    assert found == UnifiedDiff("", 1, MAX_LINES + 1, MAX_LINES + 2)
    assert make_diff_of_texts("a.txt", "a\nb\n", "a\nc\n", created=False).text.endswith("\n a\n-b\n+c")
