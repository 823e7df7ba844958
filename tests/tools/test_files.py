"""read, write, edit and file.patch on real files."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from typing import Any

import pytest
from tests.tools.desk import BuiltinToolFixture, refused

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import ToolError

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(40)


# ── read ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_complete_file_is_read_with_its_line_range_and_size(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "one\ntwo\r\n\tthree")
    assert await desk.call("read", path="a.txt") == {
        "path": "a.txt",
        "text": "one\ntwo\n\tthree",
        "first_line": 1,
        "last_line": 3,
        "next": None,
        "size": 15,
        "total_lines": 3,
    }


async def test_lines_are_read_from_the_start_or_the_end_of_a_file(desk: BuiltinToolFixture) -> None:
    desk.put("n.txt", "".join(f"{n}\n" for n in range(1, 101)))
    middle = await desk.call("read", path="n.txt", offset=10, limit=2)
    assert (middle["text"], middle["first_line"], middle["last_line"], middle["next"]) == ("10\n11", 10, 11, 12)
    tail = await desk.call("read", path="n.txt", offset=-2)
    assert (tail["text"], tail["first_line"], tail["next"]) == ("99\n100", 99, None)
    assert (await desk.call("read", path="n.txt", offset=0, limit=1))["first_line"] == 1
    await refused(desk.call("read", path="n.txt", offset=101), "invalid_input", "has 100 lines")


async def test_bytes_are_read_from_the_start_or_the_end_of_a_file(desk: BuiltinToolFixture) -> None:
    desk.put("a.txt", "0123456789")
    part = await desk.call("read", path="a.txt", unit="bytes", offset=2, limit=3)
    assert part == {"path": "a.txt", "text": "234", "start": 2, "end": 5, "next": 5, "size": 10}
    tail = await desk.call("read", path="a.txt", unit="bytes", offset=-4)
    assert (tail["text"], tail["next"]) == ("6789", None)


@pytest.mark.proves("O-01")
@pytest.mark.parametrize("unit", ["lines", "bytes"])
@pytest.mark.parametrize("line", ["plain text\n", "\x01\x02\x1b[0m\n", "grüße € 𝄞\n", '"\\"\\\n'])
async def test_a_large_file_is_read_in_bounded_parts_that_join_without_gaps(
    desk: BuiltinToolFixture, unit: str, line: str
) -> None:
    text = line * (600_000 // len(line.encode()))
    desk.put("big.txt", text)
    parts: list[str] = []
    offset: int | None = 1 if unit == "lines" else 0
    while offset is not None:
        answer = await desk.call("read", path="big.txt", unit=unit, offset=offset)
        assert len(json.dumps(answer, ensure_ascii=False).encode()) <= 200 * 1024
        parts.append(answer["text"])
        offset = answer["next"]
    assert len(parts) > 2
    assert ("\n".join(parts) + "\n" if unit == "lines" else "".join(parts)) == text


async def test_a_byte_range_that_splits_a_character_is_moved_to_character_boundaries(desk: BuiltinToolFixture) -> None:
    desk.put("u.txt", "€€€")
    part = await desk.call("read", path="u.txt", unit="bytes", offset=1, limit=6)
    assert (part["text"], part["start"], part["end"], part["next"]) == ("€", 3, 6, 6)


async def test_binary_content_is_read_as_base64(desk: BuiltinToolFixture) -> None:
    data = random.Random(7).randbytes(400_000)
    desk.put("x.bin", data)
    got, offset = b"", 0
    while offset is not None:
        part = await desk.call("read", path="x.bin", unit="bytes", offset=offset)
        assert len(json.dumps(part)) <= 200 * 1024
        got, offset = got + base64.b64decode(part["base64"]), part["next"]
    assert got == data


async def test_an_empty_file_is_read_as_no_lines(desk: BuiltinToolFixture) -> None:
    desk.put("empty", "")
    answer = await desk.call("read", path="empty")
    assert (answer["text"], answer["last_line"], answer["next"], answer["size"]) == ("", 0, None, 0)
    assert (await desk.call("read", path="empty", unit="bytes"))["text"] == ""


async def test_a_truncated_line_is_listed_in_the_result(desk: BuiltinToolFixture) -> None:
    desk.put("min.js", "short\n" + "x" * 5_000 + "\nshort\n")
    answer = await desk.call("read", path="min.js")
    assert answer["truncated_lines"] == [2]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(60), "an ELF program"),
        (b"SQLite format 3\0" + bytes(60), "an SQLite database"),
        (b"text with a \0 in it", "unknown type"),
        (bytes(range(128, 256)) * 7, "unknown type"),
    ],
)
async def test_a_binary_file_is_refused_with_its_type_and_the_next_step(
    desk: BuiltinToolFixture, content: bytes, what: str
) -> None:
    desk.put("file", content)
    await refused(
        desk.call("read", path="file"), "invalid_input", "binary", f"{len(content)} bytes", what, "`unit: bytes`"
    )


@pytest.mark.proves("O-03")
@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(40), "image/jpeg"),
        (b"GIF89a" + bytes(40), "image/gif"),
        (b"RIFF\x24\0\0\0WEBPVP8 " + bytes(40), "image/webp"),
    ],
)
async def test_an_image_is_returned_as_an_image(desk: BuiltinToolFixture, content: bytes, media_type: str) -> None:
    desk.put("picture", content)
    assert await desk.call("read", path="picture") == {
        "path": "picture",
        "image": Blob(content, media_type),
        "size": len(content),
    }


async def test_a_huge_image_is_refused(desk: BuiltinToolFixture) -> None:
    with desk.put("picture", PNG).open("r+b") as file:
        file.truncate(30_000_000)
    await refused(desk.call("read", path="picture"), "limit", "image/png", "smaller copy")


async def test_a_folder_is_refused_with_the_tool_that_lists_it(desk: BuiltinToolFixture) -> None:
    desk.put("src/a.py", "")
    for tool, more in (("read", {}), ("edit", {"old": "a", "new": "b"})):
        await refused(desk.call(tool, path="src", **more), "invalid_input", "is a folder", "glob")


async def test_a_missing_file_is_refused_with_the_nearest_names(desk: BuiltinToolFixture) -> None:
    desk.put("src/handler.py", "")
    desk.put("src/README.md", "")
    await refused(desk.call("read", path="src/handlers.py"), "failed", "src/handler.py")
    await refused(desk.call("edit", path="src/handlr.py", old="a", new="b"), "failed", "src/handler.py")
    error = await refused(desk.call("read", path="nowhere/x.py"), "failed")
    assert "nearest" not in str(error)


async def test_a_denied_read_reports_only_the_denial(desk: BuiltinToolFixture) -> None:
    path = desk.put("key.pem", "secret")
    desk.refuse[str(path)] = "no rule allows key.pem"
    error = await refused(desk.call("read", path="key.pem"), "denied")
    assert str(error) == "no rule allows key.pem"
    await refused(desk.call("read", path="../scratch/x"), "denied", "outside")


async def test_a_read_only_root_can_be_read_and_not_written(desk: BuiltinToolFixture) -> None:
    sidecar = desk.workspace.parent / "output" / "1.txt"
    sidecar.write_text("rest")
    assert (await desk.call("read", path=str(sidecar)))["text"] == "rest"
    await refused(desk.call("write", path=str(sidecar), content="x"), "denied")


# ── write ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("T-07")
async def test_a_new_file_is_written_with_its_parent_folders_and_returned_as_a_diff(desk: BuiltinToolFixture) -> None:
    answer = await desk.call("write", path="a/b/c.py", content="x = 1\n")
    assert answer == {
        "path": "a/b/c.py",
        "created": True,
        "size": 6,
        "diff": "--- /dev/null\n+++ b/a/b/c.py\n@@ -0,0 +1 @@\n+x = 1",
        "lines_added": 1,
        "lines_removed": 0,
    }
    assert (desk.workspace / "a/b/c.py").read_text() == "x = 1\n"


@pytest.mark.proves("T-07")
async def test_a_file_is_overwritten_only_if_unchanged_since_it_was_read(desk: BuiltinToolFixture) -> None:
    path = desk.put("a.txt", "one\n")
    await refused(desk.call("write", path="a.txt", content="two\n"), "conflict")
    await desk.call("read", path="a.txt")
    path.write_text("xxx\n")
    await refused(desk.call("write", path="a.txt", content="two\n"), "conflict")
    assert path.read_text() == "xxx\n"
    await desk.call("read", path="a.txt")
    answer = await desk.call("write", path="a.txt", content="two\n")
    assert (answer["created"], answer["diff"].splitlines()[3:]) == (False, ["-xxx", "+two"])
    await desk.call("write", path="a.txt", content="three\n")  # its own writing counts as seen


# ── edit ─────────────────────────────────────────────────────────────────────────────────────────


async def edited(desk: BuiltinToolFixture, content: str | bytes, **arguments: Any) -> tuple[bytes, dict[str, Any]]:
    path = desk.put("f", content)
    await desk.call("read", path="f", unit="bytes")
    answer = await desk.call("edit", path="f", **arguments)
    return path.read_bytes(), answer


@pytest.mark.proves("T-07")
async def test_an_exact_text_is_replaced_and_the_result_has_the_diff(desk: BuiltinToolFixture) -> None:
    after, answer = await edited(desk, "a\nb\nc\n", old="b\n", new="B\nB\n")
    assert after == b"a\nB\nB\nc\n"
    assert answer == {
        "replacements": 1,
        "path": "f",
        "size": 8,
        "diff": "--- a/f\n+++ b/f\n@@ -1,3 +1,4 @@\n a\n-b\n+B\n+B\n c",
        "lines_added": 2,
        "lines_removed": 1,
    }


async def test_all_occurrences_are_replaced_when_asked(desk: BuiltinToolFixture) -> None:
    after, answer = await edited(desk, "a b a\na", old="a", new="aa", replace_all=True)
    assert after == b"aa b aa\naa"
    assert answer["replacements"] == 3


async def test_an_edit_of_a_repeated_text_is_refused_with_its_lines(desk: BuiltinToolFixture) -> None:
    desk.put("f", "x\ny\nx\n")
    await desk.call("read", path="f")
    await refused(desk.call("edit", path="f", old="x", new="z"), "invalid_input", "2 times", "lines 1, 3")
    desk.put("many", "x\n" * 50)
    await desk.call("read", path="many")
    await refused(desk.call("edit", path="many", old="x", new="z"), "invalid_input", "50 times", "and more")
    desk.put("overlap", "aaa")
    await desk.call("read", path="overlap")
    await refused(desk.call("edit", path="overlap", old="aa", new="b"), "invalid_input", "2 times")


async def test_an_edit_of_a_missing_text_is_refused_with_a_hint(desk: BuiltinToolFixture) -> None:
    path = desk.put("f", "def f():\n\treturn 1\n")
    await desk.call("read", path="f")
    await refused(desk.call("edit", path="f", old="    return 1", new="x"), "invalid_input", "Line 2", "whitespace")
    await refused(desk.call("edit", path="f", old="return 1", new="return 1"), "invalid_input", "are equal")
    assert path.read_text() == "def f():\n\treturn 1\n"


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a\r\nb\r\nc\r\n", "a\nb", "x\ny", b"x\r\ny\r\nc\r\n"),
        (b"a\r\nb\r\n", "b", "x\ny", b"a\r\nx\r\ny\r\n"),
        (b"a\r\nb\r\n", "a\r\nb", "x", b"x\r\n"),
        (b"a\nb\r\nc\nd\n", "b\nc", "x\ny", b"a\nx\r\ny\nd\n"),
        (b"a\nb", "b", "x", b"a\nx"),
        (b"\xff text \x80\n", "text", "word", b"\xff word \x80\n"),
        (b"\xef\xbb\xbfa\n", "a", "b", b"\xef\xbb\xbfb\n"),
        ("é\n".encode(), "é", "ü€", "ü€\n".encode()),
    ],
)
async def test_an_edit_keeps_line_endings_and_undecodable_bytes(
    desk: BuiltinToolFixture, before: bytes, old: str, new: str, after: bytes
) -> None:
    assert (await edited(desk, before, old=old, new=new))[0] == after


async def test_an_edit_of_an_unread_file_is_refused(desk: BuiltinToolFixture) -> None:
    desk.put("f", "a\n")
    await refused(desk.call("edit", path="f", old="a", new="b"), "conflict")
    await refused(desk.call("file.patch", path="f", operations=[{"op": "append", "content": "b"}]), "conflict")


async def test_a_large_file_is_edited_correctly(desk: BuiltinToolFixture) -> None:
    after, answer = await edited(desk, "line of text\n" * 100_000 + "end\n", old="end", new="END")
    assert after.endswith(b"text\nEND\n")
    assert (answer["lines_added"], answer["lines_removed"]) == (1, 1)


@pytest.mark.proves("T-07")
async def test_fifty_parallel_edits_of_one_file_succeed_or_report_a_conflict(desk: BuiltinToolFixture) -> None:
    """Without the arbiter's locks: each reported success is in the file, and the others report a conflict."""
    path = desk.put("f", "".join(f"slot {n} empty\n" for n in range(50)))
    await desk.call("read", path="f")
    todo = set(range(50))
    rounds = 0
    while todo:
        rounds += 1
        order = sorted(todo)
        results = await asyncio.gather(
            *(desk.call("edit", path="f", old=f"slot {n} empty", new=f"slot {n} taken") for n in order),
            return_exceptions=True,
        )
        landed: set[int] = set()
        for n, result in zip(order, results, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, ToolError)
                assert result.kind == "conflict"
            else:
                landed.add(n)
        text = path.read_text()
        assert landed, "somebody gets through in each round"
        assert all((f"slot {n} taken" in text) == (n not in todo or n in landed) for n in range(50))
        todo -= landed
        await desk.call("read", path="f")
    assert path.read_text() == "".join(f"slot {n} taken\n" for n in range(50))


# ── file.patch ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("T-02a", "T-07")
async def test_lines_are_patched_and_the_result_has_the_diff(desk: BuiltinToolFixture) -> None:
    path = desk.put("f", "a\r\nb\r\nc")
    await desk.call("read", path="f")
    answer = await desk.call(
        "file.patch",
        path="f",
        operations=[
            {"op": "replace", "first_line": 1, "last_line": 1, "content": "A", "expect": "a"},
            {"op": "insert", "line": 3, "content": "between"},
            {"op": "append", "content": "d"},
        ],
    )
    assert path.read_bytes() == b"A\r\nb\r\nbetween\r\nc\r\nd"
    assert answer["diff"].splitlines()[3:] == [
        "-a",
        "+A",
        " b",
        "+between",
        "-c",
        "\\ No newline at end of file",
        "+c",
        "+d",
        "\\ No newline at end of file",
    ]


async def test_a_patch_with_a_failing_operation_changes_no_line(desk: BuiltinToolFixture) -> None:
    path = desk.put("f", "a\nb\n")
    await desk.call("read", path="f")
    operations = [
        {"op": "append", "content": "c"},
        {"op": "replace", "first_line": 1, "last_line": 1, "content": "A", "expect": "B"},
    ]
    await refused(desk.call("file.patch", path="f", operations=operations), "conflict", "operation 2")
    assert path.read_text() == "a\nb\n"
