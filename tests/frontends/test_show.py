"""What is printed for a person: readable, whole, and unable to act on the terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.frontends.cli.terminal_output import align_columns, escape_controls, format_data_as_lines


@given(st.text(alphabet=st.characters()))
def test_no_control_or_invisible_character_reaches_a_terminal(text: str) -> None:
    shown = escape_controls(text)
    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} and c not in "\n\t"]
    assert not any(0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 for c in shown)


_VARIATIONS = "".join(map(chr, range(0xE0100, 0xE01F0)))
"""Selectors of a glyph, which are drawn as nothing and can carry hidden text."""


@given(
    st.text(
        alphabet=st.characters(exclude_categories=["C", "Z"], exclude_characters=_VARIATIONS) | st.sampled_from(" \n\t")
    )
)
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert escape_controls(text) == text


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
def test_hidden_characters_are_written_out(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


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
def test_data_is_laid_out_for_a_person(data: object, lines: list[str]) -> None:
    assert format_data_as_lines(data) == lines


def test_columns_are_padded_but_for_the_last() -> None:
    assert align_columns([("a", "bb", "rest"), ("ccc", "d", "")]) == ["a    bb  rest", "ccc  d"]
