"""The output file of a job that keeps the end: each part stays at its offset."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.arbiter.jobs import output_stream
from handrail.arbiter.jobs.output_stream import JobOutputFile, read_output_from_cursor, read_output_lines

SMALL = {"MIN_RETAINED_BYTES": 128 * 1024, "PUNCH_INTERVAL_BYTES": 64 * 1024}


@contextmanager
def small() -> Generator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(output_stream, name, value)
        yield patch


@pytest.mark.proves("X-11")
@given(pieces=st.lists(st.integers(1, 90_000), max_size=12), cursor=st.integers(0, 10**6))
def test_a_job_output_keeps_its_end_at_the_same_cursors_and_counts_skipped_bytes(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], cursor: int
) -> None:
    path = tmp_path_factory.mktemp("ring") / "out"
    with small():
        output, whole = JobOutputFile(path, ring=True), ""
        for number, length in enumerate(pieces):
            piece = f"{number % 10}" * (length - 1) + "\n"
            output.append_piece(piece)
            whole += piece
        output.close()
    found = read_output_from_cursor(str(path), cursor, 1 << 20, grows=False)
    start = min(cursor, len(whole)) + found.skipped_bytes
    assert (found.text, found.cursor, found.has_more) == (whole[start:], len(whole), False)
    assert not found.skipped_bytes or len(whole) - start >= SMALL["MIN_RETAINED_BYTES"]
    if whole:
        assert os.stat(path).st_blocks * 512 <= sum(SMALL.values()) + max(pieces) + 64 * 1024
        assert read_output_lines(str(path), -1, 1, grows=False).text == whole[-pieces[-1] :][-(1 << 20) :]


def test_a_job_output_keeps_its_beginning_if_the_file_system_cannot_punch_holes(tmp_path: Path) -> None:
    def refused(descriptor: int, mode: int, start: int, length: int) -> int:
        return -1

    with small() as patch:
        patch.setattr(output_stream, "_load_fallocate", lambda: refused)
        patch.setattr(output_stream, "MAX_SIDECAR_BYTES", 300_000)
        output = JobOutputFile(tmp_path / "out", ring=True)
        for _ in range(5):
            output.append_piece("x" * 100_000)
        output.close()
    found = read_output_from_cursor(str(tmp_path / "out"), 0, 1 << 20, grows=False)
    assert found.skipped_bytes == 0 and found.text.startswith("x" * 300_000) and "are stored]" in found.text
