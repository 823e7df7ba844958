"""Descriptions of a function and its parameters from a docstring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.tool.decorator import parse_docstring

GOOGLE = """Find files by name
or by pattern.

Looks beneath one folder.

    indented prose stays prose

Args:
    path (str, optional): where to look,
        relative to the workspace
    limit: at most so many: really

    **options: more

Returns:
    paths: a list
"""

REST = """Find files by name
or by pattern.

:param path: where to look,
    relative to the workspace
:param int limit: at most so many: really
:type limit: int
:returns: a list
:raises ValueError: never
"""


@pytest.mark.proves("K-01")
@pytest.mark.parametrize("text", [GOOGLE, REST])
def test_summary_and_parameters_are_read_from_google_and_rest_docstrings(text: str) -> None:
    found = parse_docstring(text)
    assert found.summary == "Find files by name or by pattern."
    assert found.parameters["path"] == "where to look, relative to the workspace"
    assert found.parameters["limit"] == "at most so many: really"
    assert set(found.parameters) - {"options"} == {"path", "limit"}


def test_prose_after_the_summary_is_the_body_and_other_sections_are_left_out() -> None:
    assert parse_docstring(GOOGLE).body == "Looks beneath one folder.\n\n    indented prose stays prose"
    assert parse_docstring(REST).body == ""


@pytest.mark.parametrize("text", [None, "", "\n   \n"])
def test_a_missing_or_empty_docstring_yields_empty_texts(text: str | None) -> None:
    found = parse_docstring(text)
    assert (found.summary, found.body, dict(found.parameters)) == ("", "", {})


@given(st.text(alphabet="Args:pm\n  x()") | st.text())
def test_any_text_can_be_read_as_a_docstring(text: str) -> None:
    assert "\n" not in parse_docstring(text).summary
