"""Any change as a patch in either format gives exactly that change or is refused."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.contract.text.patch_text import PatchHunk, PatchSection, extract_patch_paths, parse_patch
from handrail.contract.text.text_encodings import decode_file_text
from handrail.tools.files.hunk_locator import FileLines, locate_hunks
from handrail.tools.files.patch_plan import apply_hunks

LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "",
                "-",
                "- a",
                "-- b",
                "+",
                "++ c",
                "@@",
                "@@ -1 +1 @@",
                "*** End Patch",
                "\\ x",
                "}",
                "  }",
                "a",
                "--- a",
            ]
        ),
        st.text(
            st.characters(codec="utf-8", exclude_characters="\r\n", exclude_categories=("Cc", "Cf", "Cs")), max_size=12
        ),
    ),
    max_size=25,
)


def join(lines: Sequence[str], *, has_end: bool = True) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return text if has_end else text.removesuffix("\n")


def make_diff(before: str, after: str, context: int) -> list[str]:
    out: list[str] = []
    for line in difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/f.txt", "b/f.txt", n=context
    ):
        out += [line.removesuffix("\n")] if line.endswith("\n") else [line, "\\ No newline at end of file"]
    return out


def run(section: PatchSection, before: str) -> str | None:
    """The text after a patch; None if it is refused."""
    return apply_hunks(section, section.hunks, before.encode()).text


def is_plain(lines: Sequence[str]) -> bool:
    return all(line == line.strip("\x1c\x1d\x1e\x1f\x85\u2028\u2029") and len(line.splitlines()) < 2 for line in lines)


@settings(max_examples=3 * settings().max_examples)
@given(LINES, LINES, st.booleans(), st.booleans(), st.integers(0, 2**32))
@example([""], ["-", ""], True, True, 0)  # the last line of the diff is one blank
def test_a_unified_diff_of_two_texts_turns_one_into_the_other(
    before: list[str], after: list[str], old_end: bool, new_end: bool, seed: int
) -> None:
    if not is_plain((*before, *after)):
        return
    old, new = join(before, has_end=old_end), join(after, has_end=new_end)
    lines = make_diff(old, new, 3)
    if not lines or not old or not new:
        return
    (section,) = parse_patch("\n".join(lines) + "\n")
    assert section.path == "f.txt" and extract_patch_paths("\n".join(lines)).written == ("f.txt",)
    assert run(section, old) == new


@given(LINES.filter(lambda lines: not any(line.startswith(("-", "+")) for line in lines)), st.integers(0, 2**32))
def test_wrong_line_counts_do_not_change_the_result(lines: list[str], seed: int) -> None:
    if not is_plain(lines):
        return
    chance = random.Random(seed)
    before = [f"{number} {line}" for number, line in enumerate(lines)]
    after = [line for line in before if chance.random() < 0.8] + ["new"]
    out = make_diff(join(before), join(after), 3)
    spoiled = [
        f"@@ -{chance.randint(1, 99)},{chance.randint(0, 9)} +1,{chance.randint(0, 9)} @@"
        if line.startswith("@@")
        else line
        for line in out
    ]
    if not before:
        return
    (section,) = parse_patch("\n".join(spoiled) + "\n")
    assert run(section, join(before)) == join(after)


@settings(max_examples=3 * settings().max_examples)
@given(LINES, LINES)
def test_a_marked_patch_makes_the_change_or_is_refused_as_ambiguous(before: list[str], after: list[str]) -> None:
    if not is_plain((*before, *after)) or not before:
        return
    out = make_diff(join(before), join(after), 3)[2:]
    if not out:
        return
    text = "\n".join(
        (
            "*** Begin Patch",
            "*** Update File: f.txt",
            *("@@" if line.startswith("@@ -") and line.endswith(" @@") else line for line in out),
            "*** End Patch",
        )
    )
    (section,) = parse_patch(text)
    file = FileLines(before)
    _, problems = locate_hunks(file, section.hunks)
    if problems:
        assert all("times, at" in one or "no context shows" in one for one in problems.values())
        return
    assert run(section, join(before)) == join(after)


@given(st.text(max_size=400))
def test_the_parser_parses_any_text_or_refuses_it_with_a_tool_error(text: str) -> None:
    for prefix in (
        "",
        "*** Begin Patch\n*** Update File: a\n",
        "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n",
        "diff --git a/x b/x\n",
    ):
        try:
            sections = parse_patch(prefix + text)
        except ToolError as error:
            assert error.kind in ("invalid_input", "limit") and error.text.rstrip("`)").endswith(".")
        else:
            assert sections and all(isinstance(hunk, PatchHunk) for one in sections for hunk in one.hunks)
            assert all(
                ".." not in path.split("/") and path[0] != "/" for path in extract_patch_paths(prefix + text).named
            )


@given(LINES, LINES)
def test_a_text_that_already_has_the_change_is_not_changed(before: list[str], after: list[str]) -> None:
    if not is_plain((*before, *after)) or not before or not after:
        return
    out = make_diff(join(before), join(after), 3)
    if not out:
        return
    (section,) = parse_patch("\n".join(out) + "\n")
    lines = FileLines(decode_file_text(join(after).encode()).text.splitlines())
    places, problems = locate_hunks(lines, section.hunks)
    if not problems and all(place.is_applied for place in places):
        assert apply_hunks(section, section.hunks, join(after).encode()).text == join(after)
