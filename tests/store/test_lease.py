"""The lease: one process per workspace, with a clear line for the second, and nothing left after a crash."""

from __future__ import annotations

import os
import re

import pytest
from tests.store.places import Place

from handrail.contract.errors import StartError

HOLD = """
import sys
from handrail.store.opening import Store
store = Store.open(sys.argv[1], sys.argv[2], face="mcp")
print(store.lease.token, flush=True)
sys.stdin.readline()
"""
TRY = """
import sys
from handrail.contract.errors import StartError
from handrail.store.opening import Store
try:
    Store.open(sys.argv[1], sys.argv[2])
except StartError as error:
    print(error)
"""


def first_line(stream: object) -> str:
    return getattr(stream, "readline")()  # noqa: B009


@pytest.mark.proves("L-07a")
def test_a_second_process_is_told_in_one_line_who_holds_the_workspace(place: Place) -> None:
    with place.process(HOLD) as holder:
        assert first_line(holder.stdout).strip() == "1"
        said = place.finished(TRY).strip()
    assert "\n" not in said
    assert re.search(rf"in use by handrail mcp, pid {holder.pid}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", said), said
    assert "stop that process" in said


@pytest.mark.proves("L-07a")
async def test_a_killed_holder_leaves_the_workspace_free_and_the_token_grows(place: Place) -> None:
    with place.process(HOLD) as holder:
        assert first_line(holder.stdout).strip() == "1"
        holder.kill()
        holder.wait(timeout=60)
        store = place.open()
    assert store.lease.token == store.database.token == 2
    await store.aclose()
    again = place.open()
    assert again.lease.token == 3
    await again.aclose()


async def test_the_same_process_cannot_hold_a_workspace_twice(place: Place) -> None:
    store = place.open(face="cli")
    with pytest.raises(StartError, match=rf"handrail cli, pid {os.getpid()} \(this process\)"):
        place.open()
    await store.aclose()
    assert not store.lease.held
    await place.open().aclose()


async def test_workspaces_do_not_wait_for_each_other(place: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    one, two = place.open(), Place(other, place.state).open()
    await one.aclose()
    await two.aclose()


@pytest.mark.parametrize("note", [b"", b"not json", b"[1]", b'{"pid": "x", "face": "\\u001b[31m", "since_ns": -1}'])
async def test_a_note_that_says_nothing_useful_still_gives_a_clear_line(place: Place, note: bytes) -> None:
    store = place.open()
    store.folders.lease.write_bytes(note)
    with pytest.raises(StartError, match=r"is in use by another handrail process; stop that process"):
        place.open()
    await store.aclose()


async def test_no_lease_is_kept_when_the_database_cannot_be_opened(place: Place) -> None:
    await place.open().aclose()
    path = place.folders.database
    whole = path.read_bytes()
    path.write_bytes(b"no database at all, but long enough to be looked at" * 20)
    with pytest.raises(StartError):
        place.open()
    path.write_bytes(whole)
    await place.open().aclose()
