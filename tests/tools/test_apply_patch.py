"""apply_patch: both formats, graded matching, and files that are changed together or not at all."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from tests.tools.desk import BuiltinToolFixture

from handrail.contract.errors import ToolError
from handrail.contract.text.patch_text import MAX_LINES
from handrail.runtime.files.joint_changes import MultiFileChangeJournal

TWINS = """\
class First:
    def run(self):
        value = 1
        return value


class Second:
    def run(self):
        value = 1
        return value
"""


@pytest.fixture
def desk(desk: BuiltinToolFixture, tmp_path: Path) -> BuiltinToolFixture:
    desk.around.change_journal = MultiFileChangeJournal(tmp_path / "journal")
    return desk


def tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


async def apply(desk: BuiltinToolFixture, *lines: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", await desk.call("apply_patch", patch="\n".join(lines) + "\n"))


async def refuse(desk: BuiltinToolFixture, *lines: str) -> ToolError:
    """The error for a patch, which changes nothing."""
    before = tree(desk.workspace)
    with pytest.raises(ToolError) as caught:
        await apply(desk, *lines)
    assert tree(desk.workspace) == before
    return caught.value


def marked(*lines: str) -> tuple[str, ...]:
    return "*** Begin Patch", *lines, "*** End Patch"


def diff(path: str, *lines: str) -> tuple[str, ...]:
    return f"--- a/{path}", f"+++ b/{path}", *lines


# ── both formats ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("T-06a")
async def test_one_call_creates_changes_moves_and_deletes_files(desk: BuiltinToolFixture) -> None:
    changed, moved, gone = desk.put("a.py", "one\ntwo\nthree\n"), desk.put("b.py", "x = 1\n"), desk.put("c.py", "c\n")
    moved.chmod(0o755)
    answer = await apply(
        desk,
        *marked("*** Add File: new/d.py", "+fresh", "*** Update File: a.py", "@@", " one", "-two", "+2", " three"),
        *("*** Update File: b.py", "*** Move to: lib/b.py", "@@", "-x = 1", "+x = 2", "*** Delete File: c.py"),
    )
    lib = desk.workspace / "lib/b.py"
    assert tree(desk.workspace) == {"a.py": b"one\n2\nthree\n", "lib/b.py": b"x = 2\n", "new/d.py": b"fresh\n"}
    assert stat.S_IMODE(lib.stat().st_mode) == 0o755 and changed.exists() and not gone.exists()
    assert [(one["path"], one["action"]) for one in answer["files"]] == [
        *(("new/d.py", "created"), ("a.py", "updated"), ("lib/b.py", "moved"), ("c.py", "deleted")),
    ]
    for part in ("--- /dev/null\n+++ b/new/d.py", "-two\n+2", "rename from b.py\nrename to lib/b.py", "+++ /dev/null"):
        assert part in answer["diff"]
    assert (answer["lines_added"], answer["lines_removed"]) == (3, 3)


async def test_a_git_diff_creates_renames_and_deletes_files_and_sets_execute_permission(
    desk: BuiltinToolFixture,
) -> None:
    desk.put("old name.py", "a\nb\n")
    desk.put("gone.txt", "1\n2\n")
    script = desk.put("run.sh", "true\n")
    await apply(
        desk,
        *("diff --git a/old name.py b/new name.py", "similarity index 50%", "rename from old name.py"),
        *("rename to new name.py", "--- a/old name.py", "+++ b/new name.py", "@@ -1,2 +1,2 @@", " a", "-b", "+c"),
        *("diff --git a/gone.txt b/gone.txt", "deleted file mode 100644", "--- a/gone.txt", "+++ /dev/null"),
        *("@@ -1,2 +0,0 @@", "-1", "-2", "diff --git a/run.sh b/run.sh", "old mode 100644", "new mode 100755"),
        *("diff --git a/tool b/tool", "new file mode 100755", "--- /dev/null", "+++ b/tool", "@@ -0,0 +1 @@"),
        *("+#!/bin/sh", "\\ No newline at end of file", "diff --git a/empty b/empty", "new file mode 100644"),
    )
    assert tree(desk.workspace) == {"new name.py": b"a\nc\n", "run.sh": b"true\n", "tool": b"#!/bin/sh", "empty": b""}
    assert script.stat().st_mode & 0o111 and (desk.workspace / "tool").stat().st_mode & 0o111


@pytest.mark.parametrize("head", ["@@ -1,9 +1,2 @@", "@@ -1 +1 @@", "@@ -90,3 +90,3 @@", "@@ ... @@", "@@"])
async def test_wrong_line_counts_and_numbers_are_ignored(desk: BuiltinToolFixture, head: str) -> None:
    desk.put("a.sql", "one\n-- two\n\nthree\nfour\n")
    desk.put("b.txt", "b\n")
    await apply(desk, *diff("a.sql", head, " one", "--- two", "+-- 2", "", " three"), *diff("b.txt", head, "-b", "+B"))
    assert tree(desk.workspace) == {"a.sql": b"one\n-- 2\n\nthree\nfour\n", "b.txt": b"B\n"}


async def test_a_code_fence_a_here_document_and_mail_headers_around_a_patch_are_ignored(
    desk: BuiltinToolFixture,
) -> None:
    desk.put("a.txt", "a\n")
    await apply(desk, "```diff", *diff("a.txt", "@@ -1 +1 @@", "-a", "+b"), "```")
    await apply(desk, "apply_patch <<'EOF'", *marked("*** Update File: a.txt", "-b", "+c"), "EOF")
    await apply(
        desk,
        "From 1 Mon",
        "Subject: x",
        "---",
        " a.txt | 2 +-",
        *diff("a.txt", "@@ -1,4 +1,4 @@", "-c", "+d"),
        "-- ",
        "2.39",
    )
    assert (desk.workspace / "a.txt").read_text() == "d\n"


async def test_two_update_sections_for_one_file_are_applied_together(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\nc\n")
    await apply(desk, *marked("*** Update File: a.txt", "-a", "+A", "*** Update File: ./a.txt", "-c", "+C"))
    assert (desk.workspace / "a.txt").read_text() == "A\nb\nC\n"
    error = await refuse(desk, *marked("*** Delete File: a.txt", "*** Add File: a.txt", "+x"))
    assert "Two sections" in error.text and "write" in error.text


# ── places ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("T-06a")
@pytest.mark.parametrize(
    ("before", "hunk", "after", "grade"),
    [
        ("a  \nb\n", (" a", "-b", "+c"), "a  \nc\n", "whitespace"),
        ("if x:\n    a\n    b\n", (" a", "-b", "+c"), "if x:\n    a\n    c\n", "indent"),
        ("\tif x:\n\t\ta\n", ("-if x:", "-\ta", "+if y:", "+\tb"), "\tif y:\n\t\tb\n", "indent"),
        ("it’s – “so”\nb\n", (' it\'s - "so"', "-b", "+c"), "it’s – “so”\nc\n", "typography"),
        ("    a\n    b\n", ("   a", "-    b", "+    c"), "    a\n    c\n", "indent"),
    ],
)
async def test_similar_lines_are_matched_and_the_grade_of_the_match_is_reported(
    desk: BuiltinToolFixture, before: str, hunk: tuple[str, ...], after: str, grade: str
) -> None:
    desk.put("a.txt", before)
    answer = await apply(desk, *diff("a.txt", "@@", *hunk))
    assert (desk.workspace / "a.txt").read_text() == after
    assert answer["files"][0]["matched"] == grade


async def test_added_lines_with_an_ambiguous_indentation_are_refused(desk: BuiltinToolFixture) -> None:
    desk.put("a.py", "if x:\n    a\n    b\n")
    error = await refuse(desk, *diff("a.py", "@@", " a", "+new", " b"))
    assert "4 in the file" in error.text


@pytest.mark.proves("T-06a")
async def test_an_ambiguous_hunk_is_refused_with_all_matching_lines(desk: BuiltinToolFixture) -> None:
    desk.put("a.py", TWINS)
    hunk = ("         value = 1", "-        return value", "+        return 2")
    error = await refuse(desk, *marked("*** Update File: a.py", "@@", *hunk))
    assert "a.py, hunk 1" in error.text and "lines 3, 9" in error.text
    await apply(desk, *marked("*** Update File: a.py", "@@ class Second:", "@@     def run(self):", *hunk))
    assert (desk.workspace / "a.py").read_text() == TWINS.removesuffix("value\n") + "2\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("@@ -7,4 +7,4 @@", " class Second:", "     def run(self):", "-        value = 1", "+        value = 2"), 9),
        (("@@ -9,2 +9,2 @@", "-        value = 1", "+        value = 2", "         return value"), 9),
        (("@@ -400,2 +400,2 @@ class Second:", "-        value = 1", "+        value = 2", "         return value"), 9),
    ],
)
async def test_line_numbers_and_headings_choose_among_equal_matches(
    desk: BuiltinToolFixture, lines: tuple[str, ...], expected: int
) -> None:
    desk.put("a.py", TWINS)
    await apply(desk, *diff("a.py", *lines))
    assert (desk.workspace / "a.py").read_text().splitlines()[expected - 1].strip() == "value = 2"


async def test_the_order_of_hunks_chooses_among_equal_matches(desk: BuiltinToolFixture) -> None:
    desk.put("a.py", TWINS)
    hunk = ("@@", "-        value = 1", "+        value = 2")
    await apply(desk, *marked("*** Update File: a.py", *hunk, *hunk))
    assert (desk.workspace / "a.py").read_text() == TWINS.replace("value = 1", "value = 2")
    error = await refuse(desk, *marked("*** Update File: a.py", "@@", "-        value = 2", "+        value = 3"))
    assert "lines 3, 9" in error.text


async def test_added_lines_without_context_are_refused_unless_a_heading_gives_the_position(
    desk: BuiltinToolFixture,
) -> None:
    desk.put("a.py", "def f():\n    pass\n")
    error = await refuse(desk, *marked("*** Update File: a.py", "@@", "+x = 1"))
    assert "no context shows where" in error.text
    await refuse(desk, *diff("a.py", "@@ -1,0 +2 @@", "+x = 1"))
    await apply(desk, *marked("*** Update File: a.py", "@@ def f():", "+    x = 1"))
    await apply(desk, *marked("*** Update File: a.py", "@@", "+y = 2", "*** End of File"))
    assert (desk.workspace / "a.py").read_text() == "def f():\n    x = 1\n    pass\ny = 2\n"
    desk.put("empty.py", "")
    await apply(desk, *diff("empty.py", "@@ -0,0 +1 @@", "+x"))
    assert (desk.workspace / "empty.py").read_text() == "x\n"


async def test_a_failed_hunk_error_names_the_file_hunk_nearby_lines_and_next_step(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "".join(f"line {number}\n" for number in range(1, 21)))
    desk.put("b.txt", "b\n")
    error = await refuse(
        desk,
        *diff("b.txt", "@@", "-b", "+c"),
        *diff("a.txt", "@@ -9,3 +9,3 @@", " line 9", "-line ten", "+x", " line 11"),
    )
    assert error.kind == "invalid_input"
    for part in ("a.txt, hunk 1", "Line 10 is 'line 10'", "expects 'line ten'", "8: line 8\n9: line 9\n10: line 10"):
        assert part in error.text
    assert error.text.count("\n") == 8 and "13: line 13" in error.text and "whole patch again" in error.text


async def test_overlapping_hunks_are_refused(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\nc\n")
    error = await refuse(desk, *marked("*** Update File: a.txt", "@@", "-a", "-b", "+1", "@@", "-b", "+2", " c"))
    assert "hunk 2" in error.text and "Merge both hunks" in error.text


async def test_two_hunks_may_share_a_context_line(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\nc\nd\ne\n")
    await apply(desk, *marked("*** Update File: a.txt", "@@", " a", "-b", "+B", " c", "@@", " c", "-d", "+D", " e"))
    assert (desk.workspace / "a.txt").read_text() == "a\nB\nc\nD\ne\n"


# ── applied already ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("T-06a")
async def test_a_patch_that_was_already_applied_succeeds_and_reports_it(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\nc\n")
    desk.put("b.txt", "b\n")
    desk.put("c.txt", "c\n")
    patch = marked(
        *("*** Update File: a.txt", "@@", " a", "-b", "+B", " c", "*** Add File: new.txt", "+n"),
        *("*** Update File: b.txt", "*** Move to: d.txt", "@@", "-b", "+D", "*** Delete File: c.txt"),
    )
    assert "already_applied" not in await apply(desk, *patch)
    after = tree(desk.workspace)
    again = await apply(desk, *patch)
    assert again["already_applied"] is True and again["diff"] == "" and tree(desk.workspace) == after
    assert all(one["already_applied"] for one in again["files"])


async def test_an_already_applied_hunk_is_skipped_and_the_other_hunks_are_applied(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nB\nc\nd\n")
    answer = await apply(desk, *marked("*** Update File: a.txt", "@@", " a", "-b", "+B", " c", "@@", "-d", "+D"))
    assert (desk.workspace / "a.txt").read_text() == "a\nB\nc\nD\n"
    assert answer["files"][0]["already_applied_hunks"] == [1]


async def test_a_repeated_insertion_at_the_end_of_a_hunk_is_not_applied_twice(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\n")
    patch = marked("*** Update File: a.txt", "@@", " a", "+new")
    await apply(desk, *patch)
    assert (await apply(desk, *patch))["already_applied"] is True
    assert (desk.workspace / "a.txt").read_text() == "a\nnew\nb\n"


async def test_removed_lines_that_never_existed_do_not_count_as_already_applied(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\n")
    await refuse(desk, *marked("*** Update File: a.txt", "@@", " a", "-never", " b"))
    await refuse(desk, *marked("*** Delete File: missing.txt"))


# ── bytes that stay ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("T-06a")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\r\nb\r\nc\r\n", b"a\r\nB\r\nb2\r\nc\r\n"),
        (b"\xef\xbb\xbfa\nb\nc\n", b"\xef\xbb\xbfa\nB\nb2\nc\n"),
        ("a\nb\nc\n".encode("utf-16"), "a\nB\nb2\nc\n".encode("utf-16")),
        (b"a\nb\nc", b"a\nB\nb2\nc"),
        (b"a\rb\rc\r", b"a\rB\rb2\rc\r"),
        (b"a\nb\nc\n\xff\xfe caf\xe9\n", b"a\nB\nb2\nc\n\xff\xfe caf\xe9\n"),
        (b"a\nb\r\nc\n", b"a\nB\r\nb2\r\nc\n"),
    ],
    ids=["CRLF", "mark", "UTF-16", "no final newline", "CR", "invalid bytes", "mixed"],
)
async def test_a_patch_keeps_line_endings_encoding_and_final_newline(
    desk: BuiltinToolFixture, before: bytes, after: bytes
) -> None:
    file = desk.put("a.txt", before)
    await apply(desk, *diff("a.txt", "@@ -1,3 +1,4 @@", " a", "-b", "+B", "+b2", " c"))
    assert file.read_bytes() == after


@pytest.mark.parametrize(
    ("before", "lines", "after"),
    [
        ("a\nb", (" a", "-b", "\\ No newline at end of file", "+b"), "a\nb\n"),
        ("a\nb\n", (" a", "-b", "+b", "\\ No newline at end of file"), "a\nb"),
        ("a\nb", (" a", "-b", "\\ No newline at end of file", "+c", "\\ No newline at end of file"), "a\nc"),
        ("a\nb", (" a", " b", "\\ No newline at end of file", "+c", "\\ No newline at end of file"), "a\nb\nc"),
        ("a\nb", (" a", "-b"), "a\n"),
    ],
)
async def test_a_patch_adds_and_removes_the_final_newline(
    desk: BuiltinToolFixture, before: str, lines: tuple[str, ...], after: str
) -> None:
    file = desk.put("a.txt", before)
    await apply(desk, *diff("a.txt", "@@ -1,2 +1,2 @@", *lines))
    assert file.read_text() == after


async def test_a_new_file_keeps_line_endings_that_only_its_content_in_the_patch_has(desk: BuiltinToolFixture) -> None:
    await apply(desk, "--- /dev/null", "+++ b/a.bat", "@@ -0,0 +1,2 @@", "+a\r", "+b\r")
    await desk.call("apply_patch", patch="--- /dev/null\r\n+++ b/b.txt\r\n@@ -0,0 +1 @@\r\n+a\r\n")
    assert tree(desk.workspace) == {"a.bat": b"a\r\nb\r\n", "b.txt": b"a\n"}


async def test_escapes_shown_by_read_match_and_are_written_as_their_characters(desk: BuiltinToolFixture) -> None:
    file = desk.put("a.txt", "a\u200bb\nc\n")
    await apply(desk, *diff("a.txt", "@@", "-a⟦U+200B⟧b", "+x⟦U+200B⟧y", " c"))
    assert file.read_text() == "x\u200by\nc\n"


async def test_a_patch_requires_no_read_and_does_not_count_as_a_read(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\nb\n")
    await apply(desk, *diff("a.txt", "@@", "-a", "+A"))
    with pytest.raises(ToolError, match="has not been read"):
        await desk.call("write", path="a.txt", content="x")
    await desk.call("read", path="a.txt")
    await apply(desk, *diff("a.txt", "@@", "-b", "+B"))
    await desk.call("edit", path="a.txt", old="B", new="C")
    await apply(desk, *marked("*** Add File: new.txt", "+n"))
    await desk.call("write", path="new.txt", content="m\n")


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (("",), "empty"),
        (("hello",), "names no file"),
        (("@@ -1 +1 @@", "-a", "+b"), "no file is named before it"),
        (marked("*** Update File: a.txt"), "no hunk"),
        (marked("*** Update File: a.txt", "@@"), "has no lines"),
        (marked("*** Update File: a.txt", "@@", " a", "oops"), "Begin each line"),
        (marked("*** Update File: a.txt", "@@", " a"), "change nothing"),
        (marked("*** Add File: b.txt", "text"), "Begin each line of a new file"),
        (marked("*** Update File: /etc/passwd", "-a", "+b"), "absolute path"),
        (marked("*** Add File: ../out.txt", "+b"), "without `..`"),
        (marked("*** Update File: a.txt", "*** Move to: x/../../b", "-a", "+b"), "without `..`"),
        (marked("*** Delete File: "), "invalid"),
        (diff("/etc/passwd", "@@ -1 +1 @@", "-a", "+b"), "absolute path"),
        (("diff --git a/x.png b/x.png", "index 1..2 100644", "GIT binary patch", "literal 1"), "'x.png' is binary"),
        (("diff --git a/x b/x", "Binary files a/x and b/x differ"), "'x' is binary"),
        (
            ("diff --git a/l b/l", "new file mode 120000", "--- /dev/null", "+++ b/l", "@@ -0,0 +1 @@", "+/etc"),
            "120000",
        ),
        (("--- a/x.py", "+++ b/y.py", "@@ -1 +1 @@", "-a", "+b"), "rename from"),
        (diff("a.txt", "@@ -1 +1 @@", "-a", "+a\r"), "only line ends"),
        (marked("*** Update File: folder", "-a", "+b"), "folder"),
        (marked("*** Delete File: folder"), "folder"),
        (marked("*** Update File: missing.txt", "-a", "+b"), "does not exist"),
        (marked("*** Delete File: missing.txt"), "does not exist"),
        (marked("*** Add File: a.txt", "+other"), "already exists"),
        (marked("*** Add File: a.txt/b", "+other"), "not a folder"),
        (marked("*** Update File: a.txt", "*** Move to: b.txt", "-a", "+b"), "already exists"),
        (marked("*** Update File: binary", "-a", "+b"), "binary file"),
        (
            (
                "diff --git a/a.txt b/a.txt",
                "deleted file mode 100644",
                *("--- a/a.txt", "+++ /dev/null", "@@ -1 +0,0 @@", "-x"),
            ),
            "differ",
        ),
    ],
)
async def test_an_invalid_patch_changes_no_file_and_its_error_names_the_fix(
    desk: BuiltinToolFixture, lines: tuple[str, ...], part: str
) -> None:
    desk.put("a.txt", "a\n")
    desk.put("b.txt", "b\n")
    desk.put("folder/x", "x\n")
    desk.put("binary", b"\0\1\2\xff" * 100)
    error = await refuse(desk, *lines)
    assert part in error.text, error.text
    assert error.text.rstrip("`").endswith(".")


async def test_a_patch_follows_links_only_inside_the_workspace_and_refuses_hard_links(
    desk: BuiltinToolFixture, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("a\n")
    desk.put("real.txt", "a\n")
    (desk.workspace / "link.txt").symlink_to("real.txt")
    (desk.workspace / "out.txt").symlink_to(outside)
    os.link(desk.workspace / "real.txt", desk.workspace / "hard.txt")
    for path in ("out.txt", "hard.txt"):
        await refuse(desk, *marked(f"*** Update File: {path}", "-a", "+b"))
    await refuse(desk, *marked("*** Delete File: link.txt"))
    (desk.workspace / "hard.txt").unlink()
    await apply(desk, *marked("*** Update File: link.txt", "-a", "+b"))
    assert (desk.workspace / "real.txt").read_text() == "b\n" and (desk.workspace / "link.txt").is_symlink()
    error = await refuse(
        desk, *marked("*** Update File: link.txt", "-b", "+c", "*** Update File: real.txt", "-b", "+d")
    )
    assert "Two changes" in error.text
    assert outside.read_text() == "a\n"


async def test_a_file_moved_onto_itself_is_only_changed(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\n")
    await apply(desk, *marked("*** Update File: a.txt", "*** Move to: ./a.txt", "-a", "+b"))
    (desk.workspace / "link").symlink_to(".")
    await apply(desk, *marked("*** Update File: a.txt", "*** Move to: link/a.txt", "-b", "+c"))
    assert (desk.workspace / "a.txt").read_text() == "c\n"


@pytest.mark.parametrize("path", [".git/config", ".git/hooks/pre-commit", "handrail.toml"])
@pytest.mark.parametrize("is_moved", [False, True])
async def test_one_protected_path_refuses_the_whole_patch(desk: BuiltinToolFixture, path: str, is_moved: bool) -> None:
    desk.put("a.txt", "a\n")
    (desk.workspace / ".git").mkdir()
    moved = ("*** Update File: a.txt", f"*** Move to: {path}", "-a", "+b")
    section = moved if is_moved else (f"*** Add File: {path}", "+x")
    error = await refuse(desk, *marked("*** Add File: ok.txt", "+x", *section))
    assert error.kind == "denied"


async def test_one_path_denied_by_a_rule_refuses_the_whole_patch(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\n")
    desk.put("secret.txt", "s\n")
    desk.refuse[str(desk.workspace / "secret.txt")] = "a rule denies it"
    error = await refuse(desk, *marked("*** Update File: a.txt", "-a", "+b", "*** Update File: secret.txt", "-s", "+t"))
    assert error.kind == "denied" and "a rule denies it" in error.text


async def test_a_patch_that_cannot_create_a_file_restores_the_files_before_it(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "a\n")
    error = await refuse(
        desk, *marked("*** Update File: a.txt", "-a", "+b", "*** Add File: x", "+1", "*** Add File: x/y", "+2")
    )
    assert error.kind in ("conflict", "failed", "invalid_input")
    assert sorted(os.listdir(desk.workspace)) == ["a.txt"]


async def test_two_thousand_hunks_take_linear_time(desk: BuiltinToolFixture) -> None:
    def patch(count: int) -> str:
        return "\n".join(
            diff(
                "big.txt",
                *(
                    line
                    for number in range(count)
                    for line in ("@@", f"-line {5 * number}", "+x", f" line {5 * number + 1}")
                ),
            )
        )

    took: list[float] = []
    for count in (500, 2_000):
        desk.put("big.txt", "".join(f"line {number}\n" for number in range(5 * count)))
        began = time.process_time()
        answer = await desk.call("apply_patch", patch=patch(count))
        took.append(time.process_time() - began)
        assert answer["lines_added"] == count and (desk.workspace / "big.txt").read_text().count("x\n") == count
    assert took[1] < 12 * took[0] + 1


async def test_hostile_patches_are_refused_in_bounded_time(desk: BuiltinToolFixture) -> None:
    desk.put("same.txt", "x\n" * 200_000)
    for lines in (
        marked("*** Update File: same.txt", *(("@@", " x", "-x", "+y", " x") * 2_000)),
        marked("*** Update File: same.txt", *(("@@ x", " x", "-x", "+y") * 300)),
        diff("same.txt", *(("@@ -1,4 +1,4 @@ x", " x", "-x", " q", "+y") * 2_000)),
    ):
        assert (await refuse(desk, *lines)).kind in ("limit", "invalid_input")
    for text in (
        "\n" * MAX_LINES + "\n",
        "*** Update File: a\n" * 30_000,
        "--- a\n+++ a\n" * 20_000,
        "diff --git a b\n" * 30_000,
        "```\n" * 40_000,
        "<<E\n" * 20_000 + "E\n" * 20_000,
        "*** Update File: a\n@@\n+x\n" * 12_000,
        f"--- a{' ' * 200_000}x\n+++ a\n@@ -1 +1 @@\n-a\n+b\n",
        f"--- a\n+++ a{' 2020-01-01' * 20_000}x\n@@ -1 +1 @@\n-a\n+b\n",
    ):
        with pytest.raises(ToolError):
            await desk.call("apply_patch", patch=text)


@pytest.mark.parametrize("head", ["-{0} +1", "-1 +{0}", "-1,{0} +1", "-1 +1,{0}"])
async def test_line_numbers_too_large_for_any_file_are_ignored(desk: BuiltinToolFixture, head: str) -> None:
    desk.put("a.txt", "a\n")
    await apply(desk, *diff("a.txt", f"@@ {head.format('9' * 5_000)} @@", "-a", "+b"))
    assert (desk.workspace / "a.txt").read_text() == "b\n"
