"""Reading under the roots: ranges, lines from either end, and folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.contract.text.text_encodings import UTF_8, TextEncoding
from handrail.runtime.files import rooted_file_service as files_module
from handrail.runtime.files.line_windows import INDEX_STEP_BYTES, LineIndex, read_line_window
from handrail.runtime.files.rooted_file_service import RootedFiles


async def test_a_byte_range_is_read_from_the_start_or_the_end(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_bytes(b"0123456789")
    assert (await files.read_bytes("f")).data == b"0123456789"
    middle = await files.read_bytes("f", start=3, max_bytes=4)
    assert (middle.data, middle.start, middle.end_offset, middle.size) == (b"3456", 3, 7, 10)
    assert (await files.read_bytes("f", start=-3)).data == b"789"
    assert (await files.read_bytes("f", start=-99)).data == b"0123456789"
    assert (await files.read_bytes("f", start=99)).data == b""


async def test_lines_are_read_from_either_end_with_the_number_of_the_next_line(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / "f").write_text("".join(f"line {n}\n" for n in range(1, 101)))
    head = await files.read_lines("f", count=3)
    assert (head.lines, head.first, head.last_line_number, head.next) == (("line 1", "line 2", "line 3"), 1, 3, 4)
    middle = await files.read_lines("f", first=50, count=2)
    assert (middle.lines, middle.next) == (("line 50", "line 51"), 52)
    tail = await files.read_lines("f", first=-2)
    assert (tail.lines, tail.first, tail.next, tail.total) == (("line 99", "line 100"), 99, None, 100)
    past = await files.read_lines("f", first=101)
    assert (past.lines, past.next, past.total) == ((), None, 100)


async def test_an_empty_file_has_no_lines(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").touch()
    got = await files.read_lines("f")
    assert (got.lines, got.total, got.next) == ((), 0, None)


async def test_a_long_line_is_truncated_and_its_number_reported(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_text("short\n" + "é" * 5000 + "\nend")
    got = await files.read_lines("f", max_line=100)
    assert got.lines == ("short", "é" * 100, "end")
    assert got.truncated_lines == (2,)


async def test_a_line_read_stops_at_the_byte_limit(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_text("x" * 9 + "\n" + "y" * 9 + "\n")
    got = await files.read_lines("f", max_bytes=10)
    assert (got.lines, got.next) == (("x" * 9,), 2)
    tiny = await files.read_lines("f", max_bytes=5)
    assert (tiny.lines, tiny.truncated_lines, tiny.next) == (("x" * 4,), (1,), 2)


async def test_invalid_utf8_is_replaced_and_crlf_ends_a_line(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\xffb\r\nc\rd\r\n")
    assert (await files.read_lines("f")).lines == ("a\ufffdb", "c\rd")


@given(
    st.lists(st.sampled_from(["", "a", "bb", "\r", "x" * 40]), max_size=30),
    st.booleans(),
    st.integers(-35, 35).filter(bool),
    st.integers(1, 10),
)
def test_any_line_window_is_a_slice_of_all_lines(parts: list[str], ended: bool, first: int, count: int) -> None:
    data = "\n".join(parts).encode() + (b"\n" if ended and parts else b"")
    every = [line.removesuffix(b"\r").decode() for line in data.split(b"\n")]
    if data.endswith(b"\n") or not data:
        every.pop()
    if not data.endswith(b"\n") and every and data.endswith(b"\r"):
        every[-1] += "\r"
    got = read_line_window(lambda o, n: data[o : o + n], LineIndex(len(data)), first, count, 10_000, 1_000)
    begin = first - 1 if first > 0 else max(0, len(every) + first)
    assert list(got.lines) == every[begin : begin + count]
    assert got.next == (begin + count + 1 if begin + count < len(every) else None)


@given(
    st.lists(st.sampled_from([b"", b"a", b"\xc3\xa9", b"\xff", b"\r", b"\n", b"\r\n", b"x" * 30]), max_size=40),
    st.integers(1, 45),
    st.none() | st.integers(1, 10),
    st.integers(1, 80),
    st.integers(1, 25),
)
def test_fast_and_slow_line_splitting_give_the_same_lines(
    parts: list[bytes], first: int, count: int | None, max_bytes: int, max_line: int
) -> None:
    data = b"".join(parts)
    at_once, one_by_one = (
        read_line_window(
            lambda o, n: data[o : o + n], LineIndex(len(data)), first, count, max_bytes, max_line, encoding
        )
        for encoding in (UTF_8, TextEncoding("UTF-8", "utf8", b""))  # a codec that is not known by this name
    )
    assert at_once == one_by_one


async def test_a_huge_file_is_read_in_steps_and_its_lines_are_counted_once(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = b"0123456789abcde\n"
    with (workspace / "big").open("wb") as out:
        for _ in range(20):
            out.write(line * (INDEX_STEP_BYTES // len(line)))
        out.write(b"the end")
    read: list[int] = []
    real = os.pread

    def counted(descriptor: int, count: int, offset: int) -> bytes:
        read.append(count)
        return real(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    tail = await files.read_lines("big", first=-1)
    total = 20 * INDEX_STEP_BYTES // len(line) + 1
    assert (tail.lines, tail.first, tail.total) == (("the end",), total, total)
    assert sum(read) >= 20 * INDEX_STEP_BYTES
    assert max(read) <= INDEX_STEP_BYTES
    read.clear()
    again = await files.read_lines("big", first=total // 2, count=1)
    assert again.lines == (line.decode().strip(),)
    assert sum(read) < 2 * INDEX_STEP_BYTES
    read.clear()
    part = await files.read_bytes("big", start=-7)
    assert (part.data, sum(read)) == (b"the end", 7)


async def test_a_sparse_terabyte_file_is_read_by_its_end_and_refused_by_lines(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (workspace / "sparse").open("wb") as out:
        out.truncate(1 << 40)
    assert (await files.read_bytes("sparse", start=-4)).data == b"\0" * 4
    monkeypatch.setattr("handrail.runtime.files.line_windows.MAX_SCAN_BYTES", 8 * INDEX_STEP_BYTES)
    for first in (1, -1):
        with pytest.raises(ToolError) as caught:
            await files.read_lines("sparse", first=first)
        assert caught.value.kind == "limit"
    with pytest.raises(ToolError) as caught:
        await files.read_bytes("sparse")
    assert caught.value.kind == "limit"


async def test_a_folder_lists_its_entries_in_order_without_following_links(files: RootedFiles, workspace: Path) -> None:
    (workspace / "d").mkdir()
    (workspace / "d" / "b").write_text("22")
    (workspace / "d" / "a\nb").touch()
    (workspace / "d" / "sub").mkdir()
    (workspace / "d" / "out").symlink_to("/etc/passwd")
    os.mkfifo(workspace / "d" / "pipe")
    (workspace / os.fsdecode(b"d/bad\xff")).touch()
    found = [(one.path, one.kind) for one in await files.list("d")]
    assert found == [
        ("d/a⟦U+000A⟧b", "file"),
        ("d/b", "file"),
        ("d/bad⟦U+DCFF⟧", "file"),
        ("d/out", "symlink"),
        ("d/pipe", "other"),
        ("d/sub", "directory"),
    ]
    assert next(one.size for one in await files.list("d") if one.path == "d/b") == 2
    assert [one.path for one in await files.list(".")] == ["d"]


async def test_a_listing_above_the_entry_limit_fails(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(5):
        (workspace / str(n)).touch()
    monkeypatch.setattr(files_module, "MAX_LIST_ENTRIES", 4)
    with pytest.raises(ToolError) as caught:
        await files.list(".")
    assert caught.value.kind == "limit"


async def test_stat_distinguishes_files_from_folders(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_text("abc")
    assert (await files.stat("f")).size == 3
    assert (await files.stat(".")).kind == "directory"


async def test_an_error_for_an_unreadable_path_names_the_path(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").touch()
    (workspace / "d").mkdir()
    for path, kind in (("absent", "failed"), ("f/x", "failed"), ("d", "invalid_input")):
        with pytest.raises(ToolError) as caught:
            await files.read_bytes(path)
        assert caught.value.kind == kind
        assert path in caught.value.text


async def test_a_file_five_hundred_folders_deep_is_written_and_read(files: RootedFiles) -> None:
    deep = "/".join(["d"] * 500) + "/f"
    assert (await files.write(deep, b"here")).created
    assert (await files.read_bytes(deep)).data == b"here"
