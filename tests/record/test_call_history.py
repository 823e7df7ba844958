"""The history of a call from the log alone, complete or as far as recorded."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.places import Place

from handrail.record.call_timeline import read_timeline
from handrail.record.commit_log import CommitLog, Record, RecordKind
from handrail.store.tables.session_tables import SessionRow
from handrail.store.workspace_store import WorkspaceStore

pytestmark = pytest.mark.proves("P-13")

CALL = "ses_1/2.0"


def record(kind: RecordKind, body: dict[str, Any], call: str = CALL) -> Record:
    return Record(kind, "ses_1" if call else "", call, body)


def generation(number: int, source: str) -> Record:
    return record(
        "generation",
        {"number": number, "tools": {"bash": {"source": source, "definition": f"{number}bcdef0123456789"}}},
        "",
    )


def proposed(number: int = 1) -> Record:
    return record(
        "proposed",
        {"tool": "bash", "arguments": {"command": "make"}, "generation": number},
    )


def change(number: int, after: int, **sources: str) -> Record:
    tools = {name: {"source": source} for name, source in sources.items()}
    return record("generation", {"number": number, "after": after, "tools": tools}, "")


async def test_an_unchanged_tool_keeps_the_source_of_an_earlier_generation(log: CommitLog) -> None:
    await log.commit([generation(1, "built-in"), generation(2, "another agent's"), change(3, 1, read="new")])
    await log.commit([change(4, 3, bash="changed"), change(5, 3), proposed(5)])
    account = read_timeline(log.reader, CALL)
    assert account is not None and account.source == "built-in"


async def test_a_calls_timeline_shows_tool_decision_locks_times_and_outcome(
    log: CommitLog, store: WorkspaceStore
) -> None:
    await store.sessions.record_opened(SessionRow("ses_1", 1, agent="builder", frontend="mcp", topic="the build"))
    metadata = {"duration_ms": 12.5, "sandbox": "bubblewrap", "output_path": "/out/1.txt"}
    await log.commit([generation(1, "built-in"), generation(2, "global")])
    await log.commit(
        [proposed(), record("approval-requested", {"approval_id": "apr_1", "reason": "no rule allows it"})]
    )
    await log.commit([record("approval-responded", {"approval": "apr_1", "choice": "once", "message": "go on"})])
    await log.commit(
        [
            record("authorised", {"by": "person", "choice": "once"}),
            record("intended", {"locks": ["workspace:X"], "lock_wait_ms": 41.5}),
            record("proposed", {"tool": "read", "parent": CALL}, f"{CALL}.1"),
            record("committed", {"result": {"type": "output", "data": "built", "metadata": metadata}}),
            generation(1, "another kernel's"),
        ]
    )
    account = read_timeline(log.reader, CALL)
    assert account is not None
    assert (account.generation, account.source, account.definition) == (1, "built-in", "1bcdef0123456789")
    assert (account.locks, account.lock_wait_ms, account.sandbox) == (("workspace:X",), 41.5, "bubblewrap")
    assert account.children == (f"{CALL}.1",) and account.result is not None and account.result["data"] == "built"
    page = str(account)
    for said in (
        f"{CALL}  bash: output",
        "agent builder, frontend mcp, topic the build",
        '{"command": "make"}',
        "generation 1: bash from built-in, definition 1bcdef012345",
        "workspace:X, waited 41.5 ms for them",
        "requested approval (apr_1): no rule allows it",
        "answered (apr_1): choice once, message go on",
        "authorised by person (once)",
        "ended: output, after 12.5 ms",
        "/out/1.txt",
    ):
        assert said in page, page
    nested = read_timeline(log.reader, f"{CALL}.1")
    assert nested is not None and nested.parent == CALL


async def test_the_timeline_of_a_refused_call_names_the_step_and_the_explain_command(log: CommitLog) -> None:
    result = {"type": "error", "error_text": "denied by the rule 'deny bash'", "metadata": {"error_kind": "denied"}}
    await log.commit([proposed(), record("rejected", {"step": "authorise", "result": result})])
    page = str(read_timeline(log.reader, CALL))
    assert "rejected at authorise: denied: denied by the rule 'deny bash'" in page
    assert """handrail explain bash '{"command": "make"}'""" in page


async def test_the_timeline_lists_every_attempt_of_an_interrupted_call_in_order(log: CommitLog) -> None:
    lost = {"reason": "the process ended", "outcome": "unknown", "tool": "bash"}
    await log.commit([proposed(), record("intended", {}), record("interrupted", lost), record("intended", {})])
    late: dict[str, Any] = {"late": True, "result": {"type": "output", "metadata": {}}}
    await log.commit([record("committed", {"result": {"type": "output"}}), record("committed", late)])
    account = read_timeline(log.reader, CALL)
    assert account is not None
    assert [one.what for one in account.happenings] == [
        "proposed", "started", "interrupted", "started", "ended", "ended late, after the answer",
    ]  # fmt: skip


async def test_the_timeline_of_a_redacted_call_marks_the_removed_parts(log: CommitLog) -> None:
    await log.commit([proposed(), record("committed", {"result": {"type": "output", "data": "secret"}})])
    await log.redact_record_bodies([1, 2], reason="test")
    account = read_timeline(log.reader, CALL)
    assert account is not None and account.arguments is None and account.result is None
    assert str(account).count("removed from the log") == 3 and "redacted" in str(account)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tool": 7, "arguments": [None], "generation": "x", "parent": 1},
        {"tool": "bash", "arguments": "\x1b[2J", "locks": "all", "lock_wait_ms": "long", "result": "?", "by": []},
    ],
)
async def test_the_timeline_tolerates_malformed_record_bodies(log: CommitLog, body: dict[str, Any]) -> None:
    kinds: tuple[RecordKind, ...] = (
        "proposed", "authorised", "approval-requested", "approval-responded", "intended", "committed",
        "rejected", "interrupted",
    )  # fmt: skip
    await log.commit([record(kind, body) for kind in kinds])
    account = read_timeline(log.reader, CALL)
    assert account is not None and str(account) and account.to_dict()


async def test_an_unknown_call_id_has_no_timeline(log: CommitLog, place: Place) -> None:
    for call_id in ("", "ses_1/9.9", "' OR 1=1 --"):
        assert read_timeline(log.reader, call_id) is None
