"""The file of facts about the user: concurrent writers, and deletion without a trace."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from handrail.store.memory import knowledge_store
from handrail.store.memory.knowledge_store import (
    KnowledgeEntry,
    KnowledgeStore,
    KnowledgeUnavailable,
    SessionWriteLimitError,
    UnknownKnowledgeEntry,
    compute_trigram_similarity,
    is_near_duplicate,
    parse_entry,
)
from handrail.store.memory.passage_index import parse_query

pytestmark = pytest.mark.proves("T-02b")

WRITER = """
import sys, time
from pathlib import Path
from handrail.store.memory.knowledge_store import KnowledgeEntry, KnowledgeStore

state, process, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sys.stdin.readline()
store = KnowledgeStore(state)
for number in range(count):
    text = f"Worker {process} has measured point {number} of the long survey of the northern field."
    new = KnowledgeEntry("", text, f"w/{process}/{number % 5}", (), time.time_ns(), "/w", f"ses_{process}_{number // 20}", "c", "a")
    assert not store.store(new).is_merged
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KnowledgeStore]:
    made = KnowledgeStore(tmp_path / "state")
    yield made
    made.close()


def entry(text: str, **more: object) -> KnowledgeEntry:
    fields: dict[str, object] = {"key": None, "tags": (), "created_ns": 1_700_000_000_000_000_000, "workspace": "/w"}
    fields |= {"id": "", "session": "ses_1", "call": "ses_1/1.0", "agent": "default", "text": text, **more}
    return KnowledgeEntry(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("processes", "count"), [(4, 25), pytest.param(8, 500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_concurrent_writers_lose_no_fact(tmp_path: Path, processes: int, count: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "state")]
    writers = [
        subprocess.Popen([*command, str(number), str(count)], stdin=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait() for writer in writers] == [0] * processes
    store = KnowledgeStore(tmp_path / "state")
    found = store.list_entries()
    wanted = {
        f"Worker {process} has measured point {number} of the long survey of the northern field."
        for process in range(processes)
        for number in range(count)
    }
    assert len(found) == processes * count and {one.text for one in found} == wanted
    assert len({one.id for one in found}) == len(found)
    keys = processes * min(count, 5)
    assert len(store.compact().folded) == len(found) - keys and store.count_entries() == keys
    assert len(store.find(parse_query("survey"))) == min(keys, 300)
    assert len(store.restore()) == len(found) - keys and store.count_entries() == len(found)
    store.close()


def test_a_forgotten_fact_and_all_its_former_versions_are_erased_from_the_files(store: KnowledgeStore) -> None:
    first = store.store(entry("The user keeps a xylophone in the attic.")).entry
    second = store.store(entry("The user keeps a xylophone and a zither in the attic.", replaces=first.id)).entry
    kept = store.store(entry("The user drinks green tea every morning.")).entry
    store.store_vectors({2: b"\x01" * 768}, "m")
    assert [one.id for one in store.list_replaced_entries(second.id)] == [first.id]
    assert set(store.forget([second.id])) == {first.id, second.id}
    content = b"".join(file.read_bytes() for file in store.path.parent.iterdir())
    assert b"xylophon" not in content and b"zither" not in content and b"\x01" * 64 not in content
    assert [one.id for one in store.list_entries(history=True)] == [kept.id] and store.load_vectors([2], "m") == {}
    assert store.forget([second.id]) == []


def test_a_forgotten_fact_that_a_reader_still_holds_on_disk_is_reported(
    store: KnowledgeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knowledge_store, "_PATIENCE_S", 0.01)
    id = store.store(entry("The user plays the xylophone at night.")).entry.id
    with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entry").fetchall()
        with pytest.raises(KnowledgeUnavailable, match="still has their text"):
            store.forget([id])
    store.close()
    assert not any(b"xylophon" in file.read_bytes() for file in store.path.parent.iterdir())
    assert store.get(id) is None


def test_a_purge_removes_untrusted_facts_and_keeps_user_facts_without_their_origin(store: KnowledgeStore) -> None:
    kept = store.store(entry("The user drinks green tea every morning.")).entry
    old = store.store(entry("The user has a red bicycle.")).entry
    store.store(entry("The user has sold the red bicycle.", replaces=old.id))
    store.store(entry("The page says that bicycles are blue.", untrusted="a result of web_fetch was in view"))
    store.store(entry("Another place has another fact to keep.", workspace="/other", untrusted="a page"))
    assert store.count_purgeable_entries("/w", session="ses_1") == store.purge("/w", session="ses_1") == 2
    found = {one.text: (one.session, one.call) for one in store.list_entries(history=True)}
    assert found.pop("Another place has another fact to keep.") == ("ses_1", "ses_1/1.0")
    assert found.keys() == {kept.text, "The user has sold the red bicycle."} and set(found.values()) == {("", "")}


def test_only_the_latest_fact_of_a_key_is_found_and_unconfirmed_facts_hide_none(store: KnowledgeStore) -> None:
    store.store(entry("The port of the service is 8080 today.", key="port"))
    store.store(entry("The port of the service is 9090 today.", key="port"))
    store.store(entry("The port of the service is 6666 today.", key="port", untrusted="a page"))
    ranked = [one.number for one in store.find(parse_query("service port"))]
    assert {one.text[-11:] for one in store.load(ranked).values()} == {"9090 today.", "6666 today."}
    assert len(store.compact().folded) == 1 and store.count_entries() == 2


def test_invalid_writes_and_a_damaged_file_raise_specific_errors(store: KnowledgeStore, tmp_path: Path) -> None:
    with pytest.raises(UnknownKnowledgeEntry):
        store.store(entry("This is no correction of anything.", replaces="mem_none"))
    for number in range(20):
        store.store(entry(f"The number {number} is a number among many."))
    with pytest.raises(SessionWriteLimitError):
        store.store(entry("One more thing that is too much."))
    damaged = KnowledgeStore(tmp_path / "other")
    damaged.path.parent.mkdir(parents=True, mode=0o700)
    damaged.path.write_bytes(b"no database at all" * 100)
    for use in (damaged.list_entries, lambda: damaged.store(entry("Nothing can be stored here."))):
        with pytest.raises(KnowledgeUnavailable, match="cannot be used"):
            use()


def test_a_removed_knowledge_file_is_created_again(store: KnowledgeStore) -> None:
    store.store(entry("The user drinks green tea every morning."))
    for file in [*store.path.parent.iterdir()]:
        file.unlink()
    assert store.list_entries() == []
    store.store(entry("The user drinks black tea in the evening."))
    assert store.path.exists() and store.count_entries() == 1
    assert (store.path.stat().st_mode & 0o777, store.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_fact_is_parsed_from_json_and_invalid_fields_are_refused() -> None:
    from dataclasses import asdict

    made = entry("The user drinks green tea.", id="mem_1", tags=("tea",), key="k")
    assert parse_entry({**asdict(made), "tags": ["tea"]}, "/new").workspace == "/new"
    for name in ("id", "text", "tags", "created_ns", "confirmed_ns", "key"):
        with pytest.raises(TypeError):
            parse_entry({**asdict(made), name: 1.5 if name != "tags" else [1]}, "/w")


def test_similar_texts_with_different_facts_are_not_duplicates() -> None:
    text = "The server of the project listens on port 8080 and belongs to Alice."
    assert is_near_duplicate(text, text.upper().lower().capitalize()) and compute_trigram_similarity(text, text) == 1.0
    for other in (
        text.replace("8080", "8081"),
        text.replace("Alice", "Alina"),
        text.replace("listens", "no longer listens"),
    ):
        assert not is_near_duplicate(text, other), other
