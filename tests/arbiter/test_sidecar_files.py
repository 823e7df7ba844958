"""The file with a complete output: written safely, limited, and without delaying the answer."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.arbiter.shaping import METADATA, ShaperFixture, bounded

from handrail.arbiter.output import output_files
from handrail.arbiter.output.output_files import make_file_name_for_call
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.arbiter.output.shaper import OutputShaper
from handrail.contract.tool.spec import ToolSpec
from handrail.record.artifacts import ArtifactStore


@pytest.mark.proves("O-01")
async def test_an_output_file_is_private_and_named_after_its_call(room: ShaperFixture) -> None:
    first, again = [await room.shape("x" * 20, "ses_1.2-3", max_output=10) for _ in range(2)]
    path = Path(first.result.metadata["output_path"])
    assert path.name == f"{make_file_name_for_call('ses_1.2-3')}.txt" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Path(again.result.metadata["output_path"]) != path, "another attempt's file is not overwritten"


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_a_call_id_maps_to_one_safe_file_name(one: str, other: str) -> None:
    name = make_file_name_for_call(one)
    assert name.isascii() and "/" not in name and "." not in name and 0 < len(name) < 120
    assert (name == make_file_name_for_call(other)) is (one == other)


@pytest.mark.proves("O-01")
async def test_a_link_in_place_of_an_output_file_is_not_followed(room: ShaperFixture, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (room.output / "call-1.txt").symlink_to(victim)
    shaped = await room.shape("x" * 20, max_output=10)
    assert not victim.exists() and room.sidecar(shaped) == "x" * 20


@pytest.mark.proves("O-01")
async def test_an_output_file_ends_at_its_limit_with_a_note(
    room: ShaperFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output_files.MAX_SIDECAR_BYTES == 64 * 1024 * 1024
    limit = 1000
    monkeypatch.setattr(output_files, "MAX_SIDECAR_BYTES", limit)
    text = "€" * limit
    shaped = await room.shape(text, max_output=10)
    metadata = shaped.result.metadata
    path = Path(metadata["output_path"])
    assert limit - 3 <= path.stat().st_size <= limit
    whole = path.read_bytes().decode()
    kept, _, note = whole.rpartition("\n[")
    assert text.startswith(kept) and "first 1,000 of 3,000 bytes" in note
    assert metadata["output_kept_bytes"] == len(kept.encode()) and "first" in metadata["output_save_error"]
    assert metadata["output_bytes"] == len(text.encode())


@pytest.mark.proves("O-01")
async def test_a_result_without_disk_space_for_its_output_file_reports_the_unsaved_output(room: ShaperFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        shaped = await room.shape({"output": "x" * 100_000, "exit_code": 0}, max_output=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shaped.result.ok and shaped.result.data["head"].startswith("xxx") and shaped.result.data["exit_code"] == 0
    assert shaped.result.metadata["truncated"] and "output_path" not in shaped.result.metadata
    assert "could not be saved: File too large" in shaped.result.metadata["output_save_error"]
    assert not list(room.output.iterdir()), "no part of a file is left on a full disk"


async def test_a_missing_output_folder_loses_only_the_omitted_part_of_a_result(tmp_path: Path) -> None:
    shaper = OutputShaper(
        SecretRedactor(), ArtifactStore(tmp_path / "none"), lambda session: tmp_path / "none", bounded(tmp_path)
    )
    spec = ToolSpec("tool", "…", max_output=10)
    shaped = await shaper.shape_output(spec, "x" * 20, METADATA, call_id="c", session_id="s")
    assert (
        shaped.result.data == {"head": "x" * 5, "tail": "x" * 5}
        and "No such file" in shaped.result.metadata["output_save_error"]
    )
    spec = ToolSpec("tool", "…")
    shaped = await shaper.shape_output(spec, b"bytes", METADATA, call_id="c", session_id="s")
    assert (
        shaped.result.ok
        and shaped.result.data["artifact"] is None
        and "Cannot store an output of 5 bytes" in shaped.result.data["save_error"]
    )


class Busy(ArtifactStore):
    """An artifact store that waits until it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go_on = threading.Event()

    def put(self, data: bytes, media_type: str = "") -> str:
        assert self.go_on.wait(60)
        return "sha256:0"


async def test_a_wait_cancelled_in_the_queue_still_writes_its_output_file(tmp_path: Path) -> None:
    busy = Busy(tmp_path)
    shaper = OutputShaper(SecretRedactor(), busy, lambda session: tmp_path, bounded(tmp_path))
    spec = ToolSpec("tool", "…", max_output=300)
    tasks = [
        asyncio.create_task(shaper.shape_output(spec, value, METADATA, call_id="c", session_id="s"))
        for value in [b"a", b"b", b"c", b"d", "x" * 400]
    ]
    await asyncio.sleep(0)
    tasks[-1].cancel()
    await asyncio.wait(tasks[-1:])
    busy.go_on.set()
    assert all(shaped.result.ok for shaped in await asyncio.gather(*tasks[:-1]))
    shaper.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [400]


async def test_a_cancelled_wait_still_writes_the_complete_output_file(room: ShaperFixture) -> None:
    task = asyncio.create_task(room.shape("x" * 5_000_000, max_output=10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    room.shaper.close()
    (path,) = room.output.iterdir()
    assert path.stat().st_size == 5_000_000
    assert (await room.shape("y" * 20, "call-2", max_output=10)).result.metadata["output_path"]


async def test_large_outputs_are_written_outside_the_main_thread(
    room: ShaperFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[threading.Thread] = []
    real = os.open

    def watched(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).startswith(str(room.output)):
            opened.append(threading.current_thread())
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", watched)
    await room.shape([{"a": None}] * 5_000, max_output=10)
    assert opened and threading.main_thread() not in opened
