"""``handrail explain CALL_ID``: the outcome of a call, for people and for programs."""

from __future__ import annotations

import json

import pytest
from tests.frontends.conftest import Here, Program

from handrail.store.workspace_store import WorkspaceStore

pytestmark = pytest.mark.proves("P-13")


def last_call(here: Here) -> str:
    return json.loads(here("log", "--json").out.splitlines()[-1])["call_id"]


def test_a_finished_call_is_explained_with_the_rule_that_allowed_it(here: Here) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    done = here("explain", last_call(here))
    assert done.code == 0 and "read: output" in done.out
    assert "generation 1: read from built-in" in done.out and "note.txt:S" in done.out
    assert "authorised by rules" in done.out and "(default scope)" in done.out
    whole = json.loads(here("explain", last_call(here), "--json").out)
    assert whole["call"]["state"] == "output" and whole["arguments"] == {"path": "note.txt"}


def test_the_explanation_of_a_denied_call_points_to_the_cause(here: Here) -> None:
    assert here("call", "write", '{"path": "new.txt", "content": "x"}', "--headless").code == 3
    done = here("explain", last_call(here))
    assert "rejected at authorise" in done.out and "handrail explain write" in done.out
    assert here("call", "write", '{"path": "new.txt", "content": "x"}', "--rule", "deny write").code == 3
    assert "'deny write' (session scope)" in here("explain", last_call(here)).out


def test_a_waiting_call_is_explained_by_its_approval_id(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_HEADLESS", "0")
    waits = here("call", "write", '{"path": "new.txt", "content": "x"}')
    assert waits.code == 4
    done = here("explain", waits.out.strip())
    assert done.code == 0 and "requested approval" in done.out and waits.out.strip() in done.out
    unknown = here("explain", "apr_00000000")
    assert unknown.code == 1 and "Tool `apr_00000000` does not exist" in unknown.err


def test_explain_changes_no_record_and_works_while_the_workspace_is_held(here: Here, handrail: Program) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    call, before = last_call(here), here("log", "--records", "--json").out
    assert handrail("explain", call).code == 0
    assert here("log", "--records", "--json").out == before
    store = WorkspaceStore.open(handrail.workspace, handrail.state, frontend="mcp")
    try:
        assert handrail("explain", call).code == 0
    finally:
        store.database.close()
        store.lease.release()


def test_an_unknown_call_id_is_refused_in_one_line(here: Here) -> None:
    done = here("explain", "ses_none/1.0")
    assert done.code == 1 and "Call 'ses_none/1.0' is not in this workspace's log" in done.err
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    assert here("explain", "ses_none/1.0").code == 1
    done = here("explain", last_call(here), "{}")
    assert done.code == 2 and "Leave out the arguments" in done.err
