"""Messages, read hashes and forks as rows: ordered, replaceable, limited, and removed with their session."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.places import Place

from handrail.contract.errors import LogUnavailable
from handrail.store.database.workspace_database import make_statement_work
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.store.tables import session_tables
from handrail.store.tables.session_messages import read_session_messages
from handrail.store.tables.session_tables import SessionRow


async def test_messages_are_read_by_position_and_a_repeated_position_replaces_its_message(place: Place) -> None:
    store = place.open()
    await store.sessions.record_opened(SessionRow("ses_1", 1))
    await store.messages.queue_message_writes("ses_1", [(0, {"a": 1}), (2, {"c": 3})], 50)
    await store.messages.queue_message_writes("ses_1", [(1, {"b": 2}), (2, {"c": "again"})], 60)
    await store.messages.queue_message_writes("ses_2", [(0, {"other": True})], 70)
    await store.messages.queue_message_writes("ses_1", [], 99)
    await store.aclose()
    store = place.open()
    assert await store.messages.read("ses_1") == [(0, {"a": 1}), (1, {"b": 2}), (2, {"c": "again"})]
    assert store.messages.read_latest_messages("ses_1", 2) == [{"c": "again"}, {"b": 2}]
    row = store.sessions.get("ses_1")
    assert row is not None and row.used_ns == 60
    await store.sessions.close("ses_1", 80)
    assert await store.messages.read("ses_1") == []
    assert await store.messages.read("ses_2") == [(0, {"other": True})]
    await store.aclose()
    with pytest.raises(LogUnavailable):
        await store.messages.queue_message_writes("ses_1", [(0, {})], 1)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_a_message_with_any_json_is_decoded_unchanged(value: object) -> None:
    assert decode_json_with_fallback(encode_json_with_fallback({"value": value}, max_bytes=2**62)) == {"value": value}


async def test_a_damaged_row_is_read_as_an_empty_message_and_hides_no_other(place: Place) -> None:
    store = place.open()
    await store.messages.queue_message_writes("ses_1", [(0, {"a": 1}), (1, {"b": 2}), (2, {"c": 3}), (3, {"d": 4})], 1)
    with sqlite3.connect(store.database.path) as other:
        other.execute("UPDATE message SET body = X'FF00' WHERE position = 1")
        other.execute("UPDATE message SET body = 'text' WHERE position = 2")
        other.execute("UPDATE message SET body = ? WHERE position = 3", (b"[1]",))
    assert await store.messages.read("ses_1") == [(0, {"a": 1}), (1, {}), (2, {}), (3, {})]
    assert read_session_messages(store.database.shared_read_connection, "ses_1", limit=1) == [(0, {"a": 1})]
    await store.aclose()


async def test_hashes_of_read_files_are_kept_with_the_latest_last_and_bounded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_tables, "MAX_HASHES", 50)
    monkeypatch.setattr(session_tables, "_TRIMMED_EVERY", 100)
    store = place.open()
    for n in range(300):
        store.read_hashes.queue_file_hash_write("ses_1", f"/ws/{n}", f"{n:064x}")
    store.read_hashes.queue_file_hash_write("ses_1", "/ws/299", None)
    store.read_hashes.queue_file_hash_write("ses_1", "half a pair \ud800", "0" * 64)
    store.read_hashes.queue_file_hash_write("ses_2", "/ws/1", "1" * 64)
    await store.aclose()
    store = place.open()
    found = store.read_hashes.list_path_hash_pairs("ses_1")
    assert found[-1] == ("/ws/298", f"{298:064x}")
    assert 45 <= len(found) <= 50
    with sqlite3.connect(store.database.path) as other:
        (rows,) = other.execute("SELECT count(*) FROM read_file WHERE session = 'ses_1'").fetchone()
    assert rows <= 150
    assert store.read_hashes.list_path_hash_pairs("ses_2") == [("/ws/1", "1" * 64)]
    await store.aclose()


async def test_a_fork_copies_messages_values_and_file_hashes_but_no_rules(place: Place) -> None:
    store = place.open()
    await store.sessions.record_opened(SessionRow("ses_1", 1))
    await store.messages.queue_message_writes("ses_1", [(n, {"n": n, "odd": "é\ud800"}) for n in range(100)], 5)
    await store.messages.queue_message_writes("ses_1", [(100, {"said": "see /out/ses_1/a.txt, ses_1"})], 6)
    await store.session_values.put("ses_1", "todo", "items", ["x"])
    store.read_hashes.queue_file_hash_write("ses_1", "/ws/a", "0" * 64)
    await store.database.writer.flush()
    with sqlite3.connect(store.database.path) as other:
        other.execute("INSERT INTO session_rule (session, text) VALUES ('ses_1', 'allow bash ls')")
    assert store.session_rules.list_rules("ses_1") == ("allow bash ls",)
    await store.sessions.fork(
        "ses_1", SessionRow("ses_2", 9, details={"parent": "ses_1"}), ("/out/ses_1/", "/out/ses_2/")
    )
    *copied, (_, last) = await store.messages.read("ses_2")
    assert copied == (await store.messages.read("ses_1"))[:-1]
    assert last == {"said": "see /out/ses_2/a.txt, ses_1"}
    assert await store.session_values.get("ses_2", "todo", "items") == ["x"]
    assert store.read_hashes.list_path_hash_pairs("ses_2") == [("/ws/a", "0" * 64)]
    assert store.session_rules.list_rules("ses_2") == ()
    row = store.sessions.get("ses_2")
    assert row is not None and row.holder is None and row.details == {"parent": "ses_1"}
    await store.sessions.close("ses_1", 10)
    assert store.session_rules.list_rules("ses_1") == () and store.read_hashes.list_path_hash_pairs("ses_1") == []
    assert len(await store.messages.read("ses_2")) == 101
    await store.aclose()


async def test_only_the_process_that_has_a_session_open_can_suspend_it(place: Place) -> None:
    store = place.open()
    await store.sessions.record_opened(SessionRow("ses_1", 1))
    with sqlite3.connect(store.database.path) as other:
        other.execute("UPDATE session SET lease_token = lease_token + 1")  # a later holder opened it meanwhile
    await store.sessions.record_suspended("ses_1", 7)
    row = store.sessions.get("ses_1")
    assert row is not None and row.holder == store.database.token + 1 and row.used_ns == 1
    await store.sessions.record_opened(SessionRow("ses_1", 8))
    await store.sessions.record_suspended("ses_1", 9)
    row = store.sessions.get("ses_1")
    assert row is not None and (row.holder, row.used_ns, row.opened_ns) == (None, 9, 1)
    await store.aclose()


async def test_works_of_several_tables_are_written_in_their_order(place: Place) -> None:
    store = place.open()
    store.messages.queue_message_writes("ses_1", [(0, {"text": "before"})], 1)
    store.sessions.write_soon(make_statement_work(("DELETE FROM message WHERE session = ?", ("ses_1",))))
    await store.messages.queue_message_writes("ses_1", [(1, {"text": "after"})], 2)
    assert await store.messages.read("ses_1") == [(1, {"text": "after"})]
    await store.aclose()
