"""Takeover between real processes: races, kills and pauses lose no acknowledged write and write nothing stale."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from tests.store.contenders import PAUSED, RACER, WRITER, ContendingProcesses
from tests.store.places import Place

from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.lease import WorkspaceLease, find_lease_holder

pytestmark = pytest.mark.proves("L-07")


def marks(place: Place) -> list[str]:
    """The records of a log that verifies, in order."""
    with LogReader.open_database(place.folders.database_file) as reader:
        assert verify_log(reader).ok
        return [entry.call_id for entry in reader.records()]


def test_exactly_one_of_several_processes_started_at_once_holds_the_workspace(place: Place, tmp_path: Path) -> None:
    with ContendingProcesses(place) as racers:
        pids = [racers.start(RACER) for _ in range(4)]
        assert {racers.hear()[:2] for _ in pids} == {(pid, "ready") for pid in pids}
        for turn in range(60):
            workspace = tmp_path / f"ws{turn % 30}"  # each first as a new one, then with a database
            workspace.mkdir(exist_ok=True)
            for pid in pids:
                racers.tell(pid, str(workspace))
            told = [racers.hear()[1:] for _ in pids]
            token = str(1 + turn // 30)
            assert sorted(told) == [("holds", token)] + [("turned-away", token)] * 3
            for pid in pids:
                racers.tell(pid, "release")
            assert {racers.hear()[1] for _ in pids} == {"done"}


@pytest.mark.parametrize("case", ["one table", "several tables", "before the transaction"])
async def test_a_paused_lease_holder_is_replaced_and_its_queue_is_never_written(place: Place, case: str) -> None:
    with ContendingProcesses(place) as contenders:
        paused = contenders.start(PAUSED, case)
        assert contenders.hear_from(paused, "queued") == "True"
        contenders.stop(paused)
        await WorkspaceLease.wait_until_free(place.folders)
        former = find_lease_holder(place.folders)
        assert former is not None and former.pid == paused and former.state == "paused" and former.frontend == "mcp"
        store = place.open(frontend="cli")
        assert store.lease.token == 2
        contenders.tell(paused, "resume")
        contenders.signal(paused, signal.SIGCONT)
        assert contenders.hear_from(paused, "valid") == "False"
        refused = contenders.hear_from(paused, "refused")
        if case == "several tables":
            assert contenders.hear_from(paused, "refused") == refused
        assert "Another process (handrail cli, pid " in refused and "has taken over this workspace" in refused
        assert contenders.hear_from(paused, "lost") == refused
        assert contenders.hear_from(paused, "refusal") == refused
        assert contenders.hear_from(paused, "refused") == refused
        assert contenders.hear_from(paused, "valid") == "False"
        assert contenders.hear_from(paused, "closed") == "0"
        assert store.lease.is_valid
        await store.aclose()
    assert marks(place) == ["before"]
    assert not list(place.folders.workspace_state_folder.glob("holder-*"))


async def test_a_lease_holder_paused_without_a_rival_continues(place: Place) -> None:
    with ContendingProcesses(place) as contenders:
        paused = contenders.start(WRITER)
        while contenders.hear()[1] != "ack":
            pass
        contenders.stop(paused)
        await WorkspaceLease.wait_until_free(place.folders)
        contenders.forget()
        contenders.signal(paused, signal.SIGCONT)
        for _ in range(100):
            contenders.hear_from(paused, "ack")


def chaos(place: Place, deaths: int, paused_of: int, seed: int) -> None:
    chance = random.Random(seed)
    acknowledged: list[str] = []
    slowest = 0.0
    blocked = 0
    with ContendingProcesses(place) as contenders:

        def heard(pid: int, word: str, rest: str) -> None:
            if word == "ack":
                acknowledged.append(rest)
            else:
                assert word in ("ready", "holds", "blocked", "refused"), (pid, word, rest)
                assert word != "refused" or "has taken over this workspace" in rest

        def next_holder(former: int | None) -> int:
            nonlocal blocked
            while True:
                pid, word, rest = contenders.hear()
                heard(pid, word, rest)
                if word == "holds":
                    return pid
                if word == "blocked":  # it was paused in the middle of a write, and holds the database's lock
                    assert int(rest) == former
                    blocked += 1
                    if former in contenders.processes:
                        contenders.kill(former)

        for _ in range(3):
            contenders.start(WRITER)
        holder = next_holder(None)
        for _ in range(deaths):
            for _ in range(chance.randrange(1, 60)):
                heard(*contenders.hear())
            contenders.start(WRITER)
            paused = chance.randrange(paused_of) == 0
            if paused:
                contenders.stop(holder)
            else:
                contenders.kill(holder)
            began = time.monotonic()
            former, holder = holder, next_holder(holder)
            slowest = max(slowest, time.monotonic() - began)
            if former in contenders.processes:
                if chance.randrange(2):
                    contenders.signal(former, signal.SIGCONT)
                    while True:
                        pid, word, rest = contenders.hear()
                        heard(pid, word, rest)
                        if word == "refused" and pid == former:
                            break
                contenders.kill(former)
        for pid in list(contenders.processes):
            contenders.kill(pid)
        for line in contenders.rest():
            heard(*line)
    found = marks(place)
    assert len(found) == len(set(found))
    assert len(acknowledged) > deaths and set(acknowledged) <= set(found)
    assert [int(mark.partition("-")[0]) for mark in found] == sorted(int(mark.partition("-")[0]) for mark in found)
    print(f"{deaths} deaths, {len(acknowledged)} acknowledged, slowest takeover {slowest:.2f} s, {blocked} blocked")


def test_killed_or_paused_holders_lose_no_acknowledged_write(place: Place) -> None:
    chaos(place, 10, 4, seed=7)


@pytest.mark.slow
def test_a_thousand_killed_or_paused_holders_lose_no_acknowledged_write(place: Place) -> None:
    chaos(place, 1000, 40, seed=1007)
