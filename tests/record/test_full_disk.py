"""A log that cannot write refuses new records, loses none, and recovers by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.store.places import Place

from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log

pytestmark = pytest.mark.proves("G-10")

BOUNDED = """
import asyncio, json, resource, sys
from handrail.contract.errors import LogUnavailable
from handrail.record.commit_log import CommitLog, Record
from handrail.record.verification import verify_log
from handrail.store.workspace_store import WorkspaceStore

def record(kind, call, size=2000):
    return Record(kind, "ses_1", call, {"tool": "write", "text": "x" * size})

def bound(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

async def main():
    store = WorkspaceStore.open(sys.argv[1], sys.argv[2])
    log = CommitLog(store.database)
    bound(300_000)
    durable = []
    said = {"refused": 0}
    for number in range(1000):
        try:
            await log.commit([record("intended", f"c{number}")])
            durable.append(f"c{number}")
        except LogUnavailable as error:
            said["error"] = str(error)
            said["refusal"] = log.unavailable_reason
            break
    bound(1000)
    for number in range(5):
        log.record_soon([record("refused", f"r{number}")])
        try:
            await log.commit([record("intended", f"never{number}")])
        except LogUnavailable:
            said["refused"] += 1
    bound(resource.RLIM_INFINITY)
    await log.commit([record("committed", "after")])
    said["refusal after"] = log.unavailable_reason
    said["durable"] = durable
    said["lost"] = store.database.writer.lost
    await store.aclose()
    print(json.dumps(said))

asyncio.run(main())
"""


def test_a_full_disk_fails_every_commit_until_space_is_free_again(place: Place) -> None:
    said: dict[str, Any] = json.loads(place.finished(BOUNDED))
    assert str(place.folders.database_file) in said["error"] and said["refusal"] == said["error"]
    assert said["refused"] == 5 and said["refusal after"] is None and said["lost"] == 0
    with LogReader.open_database(place.folders.database_file) as reader:
        assert verify_log(reader).ok
        calls = [entry.call_id for entry in reader.records()]
    durable: list[str] = said["durable"]
    assert len(durable) > 5
    assert calls[: len(durable)] == durable
    rest = calls[len(durable) :]
    assert rest == ["r0", "r1", "r2", "r3", "r4", "after"]
