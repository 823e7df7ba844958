"""Output for users: readable, complete, and without control sequences."""

from __future__ import annotations

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.calls_and_results import Result
from handrail.frontends.cli.renderer import (
    MarkdownFormatter,
    TerminalRenderer,
    format_call_arguments,
    format_result_preview,
)
from handrail.frontends.cli.terminal_output import (
    escape_for_terminal,
    format_data_as_lines,
    print_escaped_line,
    print_escaped_lines,
    print_result,
)
from handrail.frontends.cli.text_layout import measure_display_width


@given(st.text(alphabet=st.characters()))
def test_no_control_or_invisible_character_reaches_a_terminal(text: str) -> None:
    shown = escape_for_terminal(text)
    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} and c not in "\n\t"]
    assert not any(0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 for c in shown)


_VARIATIONS = "".join(map(chr, range(0xE0100, 0xE01F0)))
"""Selectors of a glyph, which are drawn as nothing and can carry hidden text."""


@given(
    st.text(
        alphabet=st.characters(exclude_categories=["C", "Z"], exclude_characters=_VARIATIONS) | st.sampled_from(" \n\t")
    )
)
def test_ordinary_text_is_shown_unchanged(text: str) -> None:
    assert escape_for_terminal(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\e[31mred"),
        ("a\r\nb", "a\nb"),
        ("over\rwritten", "over\\rwritten"),
        ("\x9b2J", "\\x9b2J"),
        ("pay\u202elap", "pay\\u{202e}lap"),
        ("zero\u200bwidth", "zero\\u{200b}width"),
        ("tag\U000e0041", "tag\\u{e0041}"),
        ("\ud800", "\\u{d800}"),
    ],
)
def test_hidden_characters_are_shown_escaped(text: str, shown: str) -> None:
    assert escape_for_terminal(text) == shown


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ("text\nmore\n", ["text\nmore"]),
        ({"path": "a", "content": "x\ny"}, ["path: a", "content:", "  x", "  y"]),
        ({"lines": [1, "two", {"three": 3}]}, ["lines:", "  1", "  two", '  {"three": 3}']),
        ([], ["[]"]),
        ({}, ["{}"]),
        (None, ["null"]),
        (True, ["true"]),
    ],
)
def test_data_is_formatted_as_readable_lines(data: object, lines: list[str]) -> None:
    assert format_data_as_lines(data) == lines


def test_deeply_nested_data_is_formatted_once() -> None:
    data: object = "x"
    for _ in range(100):
        data = {"a": data, "b": ["c"]}
    lines = format_data_as_lines(data)
    assert len(lines) == 200 and lines == format_data_as_lines(data, 1_000)


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_and_results_fit_a_terminal_and_lose_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    note, long = "several words of a note " * 9, "word " * 50
    result = Result.output({"exit_code": 0, "notes": [note], "matches": [{"text": note}], "text": f"{long}\nend"})
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_escaped_line(f"{long}. To see more: handrail call info '{{}}'")
    print_escaped_lines(f"  step {long}")
    print_result(result)
    shown = capsys.readouterr().out
    payload = f"  {long}"
    assert all(len(line) <= columns for line in shown.split("\n") if line != payload)
    assert payload in shown.split("\n"), "a text of several lines is not changed"
    assert "  handrail call info '{}'" in shown.split("\n")
    assert (
        shown.split().count("word") == 3 * 50 and shown.split().count("several") + shown.split().count('"several') >= 9
    )


def test_a_pipe_gets_each_line_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 50 + "end"
    monkeypatch.setenv("COLUMNS", "40")
    print_escaped_line(long)
    print_escaped_lines(f"  {long}")
    print_result(Result.output({"notes": [long, "b"]}))
    assert capsys.readouterr().out == f"{long}\n  {long}\nnotes:\n  {long}\n  b\n"


def written(width: int | None = None) -> tuple[io.StringIO, TerminalRenderer]:
    stream = io.StringIO()
    return stream, TerminalRenderer(stream, width=width)


def test_columns_are_padded_except_the_last_and_wrapped_at_a_known_width() -> None:
    stream, view = written()
    view.print_table(("A", "B", "C"), [("a", "bb", "rest"), ("ccc", "d", "")])
    assert stream.getvalue() == "A    B   C\na    bb  rest\nccc  d\n"
    stream, view = written(40)
    view.print_table(("ID", "TEXT"), [("ses_01a21f1ae7", "a text of several words that is too long")])
    assert stream.getvalue().splitlines()[1:] == [
        "ses_01a21f1ae7  a text of several words",
        "                that is too long",
    ]


@given(st.text(alphabet=st.characters()), st.integers(20, 100))
def test_rendered_text_has_no_controls_keeps_its_words_and_fits_the_width(text: str, width: int) -> None:
    for method in ("print_text", "print_markdown", "print_diff", "print_block"):
        stream, view = written(width)
        getattr(view, method)(text)
        shown = stream.getvalue()
        assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} and c != "\n"]
        assert all(measure_display_width(line) <= width + 1 for line in shown.split("\n")), (method, shown)
        if method == "print_text":
            assert "".join(shown.split()) == "".join(escape_for_terminal(text).split())


@pytest.mark.parametrize(("indent", "further"), [("", None), ("  ! ", "      "), ("    ", "      "), ("  ", "")])
def test_further_lines_fit_the_width_also_if_they_are_indented_more(indent: str, further: str | None) -> None:
    words = [("word", "words of it", "a")[number % 3] for number in range(200)]
    for width in (80, 120):
        stream, view = written(width)
        view.print_text(" ".join(words), indent=indent, further=further)
        lines = stream.getvalue().splitlines()
        assert max(map(measure_display_width, lines)) <= width < min(map(measure_display_width, lines[:-1])) + 14, (
            "as long as words allow"
        )


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("# A title #", "A title"),
        ("**bold**, *italic*, __both__ and `code`", "bold, italic, both and code"),
        ("2 * 3 * 4 and snake_case_name", "2 * 3 * 4 and snake_case_name"),
        ("[here](https://a.example/x) and ![pic](p.png)", "here (https://a.example/x) and pic (p.png)"),
        ("[https://a.example](https://evil.example)", "https://a.example (https://evil.example)"),
        ("- one\n  * two\n3. three", "• one\n  • two\n3. three"),
        ("> said", "▌ said"),
        ("```py\nx = **1**\n```\nafter", "  │ x = **1**\nafter"),
        ("&#27;[2J <b>x</b> &#8238;", "&#27;[2J <b>x</b> &#8238;"),
        ("never closed ** and ` and [x](", "never closed ** and ` and [x]("),
    ],
)
def test_markdown_is_rendered_without_hiding_anything(markdown: str, shown: str) -> None:
    stream, view = written(100)
    view.print_markdown(markdown)
    assert stream.getvalue() == f"{shown}\n"


def test_many_blank_lines_are_collapsed_to_a_count() -> None:
    stream, view = written(80)
    view.print_block("harmless\n" + "\n" * 500 + "rm -rf /")
    assert stream.getvalue() == "  │ harmless\n  │ (500 blank lines)\n  │ rm -rf /\n"


def test_an_ascii_stream_receives_marks_of_the_same_width() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = TerminalRenderer(stream, width=80)
    view.print_call("→", "read", {"path": "a"})
    stream.flush()
    assert stream.buffer.getvalue() == b"> read  a\n"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"command": "ls -la", "timeout_ms": 5}, "ls -la  timeout_ms=5"),
        ({"content": "x" * 100, "path": "a.txt"}, f"a.txt  content={'x' * 60}…"),
        ({"todos": [1]}, "[1]"),
        ({}, ""),
    ],
)
def test_a_call_is_summarised_by_its_most_informative_argument(arguments: dict[str, object], shown: str) -> None:
    assert format_call_arguments(arguments) == shown


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ({"matches": [{"path": "a", "line": 1, "text": "one"}], "total": 1}, ["a:1: one"]),
        (
            {
                "diagnostics": [{"path": "a", "line": 2, "severity": "error", "message": "no x", "text": "x"}],
                "total": 1,
            },
            ["a:2: error: no x"],
        ),
        ({"locations": [{"path": "a", "line": 3, "column": 5, "text": "def x"}]}, ["a:3: def x"]),
        ({"hits": [{"id": "f1", "text": "a fact"}], "found": 1}, ["a fact"]),
        ({"tasks": []}, ['{"tasks": []}']),
    ],
)
def test_a_result_is_summarised_by_its_most_informative_list(data: dict[str, object], lines: list[str]) -> None:
    assert format_result_preview(data) == (lines, False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "line",
    [
        "# a " + "#" * 100_000 + "x",
        "# a" + " " * 100_000 + "x",
        "- " + " " * 100_000 + "x",
        "`" * 100_000,
        "**a" * 30_000,
    ],
)
def test_a_line_made_to_be_slow_is_formatted_in_one_pass(line: str) -> None:
    formatted = MarkdownFormatter().format_line(line)
    assert formatted is None or formatted[2]


def test_a_heading_has_no_closing_signs() -> None:
    shown = [MarkdownFormatter().format_line(line) for line in ("# a b ##", "## a#b", "# a #b")]
    assert [one[2][0][0] for one in shown if one is not None] == ["a b", "a#b", "a #b"]
