"""Patterns: matches, mismatches, and no pattern with exponential cost."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handrail.contract.text.glob_patterns import (
    build_any_path_glob_expression,
    build_path_glob_expression,
    compile_path_glob,
    compile_text_glob,
    count_pattern_characters,
    escape_glob_literal,
    extract_literal_prefix,
    find_glob_pattern_fault,
    has_wildcard,
    matches_path_glob,
)
from handrail.contract.text.lazy_patterns import compile_regex_lazily

PARTS = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=8)
PATHS = st.lists(PARTS, min_size=1, max_size=5).map(lambda parts: "/" + "/".join(parts))
GLOBS = st.text(alphabet="ab/*?", max_size=10)
SHORT = st.text(alphabet="ab/", max_size=10)


def reference(pattern: str, text: str, *, paths: bool) -> bool:
    """The grammar again, by trying every way there is; small inputs only."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        run = len(pattern) - len(pattern.lstrip("*"))
        rest = pattern[run:]
        if paths and run == 1:
            return any(reference(rest, text[k:], paths=paths) for k in range(len(text) + 1) if "/" not in text[:k])
        return any(reference(rest, text[k:], paths=paths) for k in range(len(text) + 1))
    if not text:
        return False
    if pattern[0] == "?":
        return (not paths or text[0] != "/") and reference(pattern[1:], text[1:], paths=paths)
    return pattern[0] == text[0] and reference(pattern[1:], text[1:], paths=paths)


def reference_path(pattern: str, path: str) -> bool:
    """As :func:`reference`, with ``**/`` at the start of a part standing for whole folders, none included."""
    cut = re.search(r"(?:\A|(?<=/))\*\*+/", pattern)
    if cut is None:
        return reference(pattern, path, paths=True)
    head, tail = pattern[: cut.start()], pattern[cut.end() :]
    return any(
        reference(head, path[:k], paths=True) and reference_path(tail, path[j:])
        for k in range(len(path) + 1)
        for j in range(k, len(path) + 1)
        if j == k or path[j - 1] == "/"
    )


@pytest.mark.proves("K-09")
@given(PATHS)
@example("/a[b]*?/[!c]")
@example("/[*]")
def test_an_escaped_path_matches_itself_and_has_no_wildcard(path: str) -> None:
    pattern = escape_glob_literal(path)
    assert compile_path_glob(pattern, subtree=False).match(path)
    assert not has_wildcard(pattern)
    assert extract_literal_prefix(pattern) == path
    assert count_pattern_characters(pattern) == len(path)


@given(PATHS, PATHS)
@example("/a*", "/ab")
@example("/a[b]", "/ab")
def test_an_escaped_path_matches_only_itself(path: str, other: str) -> None:
    matched = compile_path_glob(escape_glob_literal(path), subtree=False).match(other) is not None
    assert matched == (path == other)


@given(st.text(max_size=20), st.text(max_size=20))
@example("a*", "ab")
@example("[x]", "x")
def test_an_escaped_text_matches_only_itself(text: str, other: str) -> None:
    assert compile_text_glob(escape_glob_literal(text)).match(text)
    assert (compile_text_glob(escape_glob_literal(text)).match(other) is not None) == (text == other)


@given(GLOBS, SHORT)
@example("**a*b", "a/ab")
@example("a*b/*c", "ab/xb/c")
@example("**/a*b/**/b", "a/ab/b")
@example("*a*b*", "bab")
def test_a_path_glob_agrees_with_the_reference_matcher(pattern: str, path: str) -> None:
    assert (compile_path_glob(pattern, subtree=False).match(path) is not None) == reference_path(pattern, path)


@given(st.text(alphabet="ab/*?", max_size=10), SHORT)
def test_a_text_glob_agrees_with_the_reference_matcher(pattern: str, text: str) -> None:
    assert (compile_text_glob(pattern).match(text) is not None) == reference(pattern, text, paths=False)


@given(st.lists(GLOBS, max_size=5), SHORT)
@example(["**/*"], "a/b")
@example(["**/*.a", "**/a", "a/**"], "b/a/b")
def test_a_combined_glob_matches_exactly_the_paths_that_any_of_its_globs_matches(
    patterns: list[str], path: str
) -> None:
    whole = re.compile(build_any_path_glob_expression(patterns) + r"\Z", re.DOTALL).match(path) is not None
    assert whole == any(matches_path_glob(pattern, path) for pattern in patterns)


@given(st.text(max_size=30))
def test_compiling_a_pattern_raises_only_the_reported_fault(pattern: str) -> None:
    try:
        compile_path_glob(pattern)
    except ValueError as error:
        assert find_glob_pattern_fault(pattern) == str(error)
    else:
        assert find_glob_pattern_fault(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 30 + "b", "**a" * 30 + "b", "**/a" * 30 + "b", "**/*a" * 20 + "*b", "**/" * 40 + "b", "?*" * 40 + "b"],
)
def test_hostile_patterns_end_on_hostile_paths(pattern: str) -> None:
    assert not matches_path_glob(pattern, "a" * 2_000 + "/" + "a/" * 500 + "c")
    assert compile_text_glob("*a" * 30 + "b").match("a" * 20_000) is None


@pytest.mark.proves("K-09")
@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/ws", "/ws", True),
        ("/ws", "/ws/a/b", True),
        ("/ws", "/ws_secret", False),
        ("/ws", "/ws_secret/a", False),
        ("/ws/", "/ws/a", True),
        ("/ws/**", "/ws_secret/a", False),
        ("/ws/**", "/ws/a/b", True),
        ("/ws/*", "/ws/a", True),
        ("/ws/*", "/ws/a/b", False),
        ("/ws/*.py", "/ws/a.py", True),
        ("/ws/**/*.py", "/ws/a.py", True),
        ("/ws/**/*.py", "/ws/x/y/a.py", True),
        ("/ws/**/*.py", "/ws/x/y/a.pyc", False),
        ("/ws/**/test", "/ws/test/deep/a", True),
        ("/ws/?", "/ws/a", True),
        ("/ws/?", "/ws//", False),
        ("/ws/[ab]", "/ws/a", True),
        ("/ws/[!ab]", "/ws/a", False),
        ("/ws/[!ab]", "/ws//", False),
        ("/ws/[a-c]x", "/ws/bx", True),
        ("/ws/[", "/ws/[", True),
        ("/ws/[*]", "/ws/*", True),
        ("/ws/[*]", "/ws/a", False),
        ("/ws/a.py", "/ws/a_py", False),
        ("/ws/a", "/ws/a\n", False),
        ("/", "/etc/passwd", True),
        ("**", "anything/at/all", True),
    ],
)
def test_a_path_pattern_matches_complete_path_segments(pattern: str, path: str, matches: bool) -> None:
    assert matches_path_glob(pattern, path) is matches


def test_a_reversed_character_range_is_a_fault_with_a_correction() -> None:
    problem = find_glob_pattern_fault("/ws/[z-a]")
    assert problem is not None
    assert "z-a" in problem
    assert "[[]" in problem


def test_a_compiled_path_glob_has_no_capture_groups() -> None:
    assert re.compile(build_path_glob_expression("**/[ab]*?/c")).groups == 0


def test_a_pattern_is_compiled_on_its_first_use() -> None:
    faulty = compile_regex_lazily("(")
    with pytest.raises(re.error):
        faulty.search("a")
    lazy = compile_regex_lazily("(?P<word>b+)", re.IGNORECASE)
    assert "search" not in vars(lazy)
    assert (match := lazy.search("aBBc")) is not None and match["word"] == "BB"
    assert "search" in vars(lazy) and lazy.pattern == "(?P<word>b+)"
    assert lazy.sub("-", "abc") == "a-c"
