"""The line of each value in a TOML text."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.config.toml_file import find_toml_value_lines

TEXT = '''\
# agent = "no"
agent = "a # [b]" # c
rules = [
  "allow a", # x ]
  'deny "b',
  """more
lines \\""" ] """, "last", ["in", "ner"],
]
a."b c".'d.e' = { x = [1, 2], y = "}" }
[limits]
lock_wait_ms = 3

[[watchdogs]]
command = ["a"]
[watchdogs.sub]
k = \'\'\'
'''
REST = """''' # three lines on
[[watchdogs]]
timeout_ms = 4
"""


def test_every_key_and_element_and_table_has_its_first_line_number() -> None:
    whole = TEXT + REST
    tomllib.loads(whole)
    assert find_toml_value_lines(whole) == {
        "agent": 2,
        "rules": 3,
        **{f"rules[{number}]": line for number, line in enumerate((4, 5, 6, 7, 7))},
        "a['b c']['d.e']": 9,
        "limits": 10,
        "limits.lock_wait_ms": 11,
        "watchdogs[0]": 13,
        "watchdogs[0].command": 14,
        "watchdogs[0].command[0]": 14,
        "watchdogs[0].sub": 15,
        "watchdogs[0].sub.k": 16,
        "watchdogs[1]": 18,
        "watchdogs[1].timeout_ms": 19,
    }


VALUES = st.sampled_from(
    [
        "1",
        '"#"',
        "'a\"['",
        '"""\n]\n"""',
        "'''\n'\n'''",
        '"""a""""',
        "[]",
        '[1, "]", [2, 3]]',
        "[ # c\n1,\n\n2\n]",
        "{ a = '}' }",
        "1979-05-27 07:32:00",
        "true # x = 2",
    ]
)
GAPS = st.sampled_from(["", "\n", "# a = 1\n", "   \n\t\n", "#[x]\n"])


@given(st.lists(st.tuples(GAPS, VALUES), min_size=1, max_size=8), st.sampled_from(["", "[t]\n", "[[t]]\n"]))
def test_the_line_of_a_key_is_found_after_any_content(parts: list[tuple[str, str]], head: str) -> None:
    text, expected = head, dict[str, int]()
    prefix = {"": "", "[t]\n": "t.", "[[t]]\n": "t[0]."}[head]
    for number, (gap, value) in enumerate(parts):
        text += gap
        expected[f"{prefix}k{number}"] = text.count("\n") + 1
        text += f"k{number} = {value}\n"
    tomllib.loads(text)
    found = find_toml_value_lines(text)
    assert {key: line for key, line in found.items() if key in expected} == expected


@given(st.text(alphabet="ab=[]{}\"'#\\\n., ", max_size=60))
def test_the_line_finder_reads_any_text_and_returns_only_existing_lines(text: str) -> None:
    lines = find_toml_value_lines(text).values()
    assert all(1 <= line <= text.count("\n") + 1 for line in lines)


@pytest.mark.parametrize("text", ["", "\n", "a", "[", "[[", "[]]", "a =", 'a = "', "a = [", '"'])
def test_the_line_finder_returns_for_broken_text_too(text: str) -> None:
    find_toml_value_lines(text)
