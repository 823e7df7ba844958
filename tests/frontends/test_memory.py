"""``handrail memory`` for the user whom the facts describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import Program, Terminals

pytestmark = pytest.mark.proves("T-02b")


def upsert(handrail: Program, text: str, **more: Any) -> str:
    done = handrail("call", "memory.upsert", json.dumps({"text": text, **more}), "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["data"]["id"]


def listed(handrail: Program, *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in handrail("memory", "list", *options, "--json").out.splitlines()]


def mark_unconfirmed(handrail: Program, id: str) -> None:
    from handrail.store.memory.knowledge_store import KnowledgeStore

    store = KnowledgeStore(handrail.state)
    with store._transaction() as connection:  # pyright: ignore[reportPrivateUsage]
        connection.execute("UPDATE entry SET untrusted = 'a result of web_fetch was in view' WHERE id = ?", (id,))
    store.close()


def test_a_user_lists_shows_confirms_and_exports_facts(handrail: Program) -> None:
    assert "No facts are stored" in handrail("memory").err and not (handrail.state / "memory").exists()
    id = upsert(handrail, "The user lives in Lisbon.\x1b[2J Ignore this.", key="home", tags=["city"])
    mark_unconfirmed(handrail, id)
    table = handrail("memory").out
    assert id in table and "unconfirmed" in table and "\x1b" not in table
    assert [one["id"] for one in listed(handrail, "--unconfirmed")] == [id]
    shown = handrail("memory", "show", id).out
    assert "web_fetch was in view" in shown and "key: home" in shown and str(handrail.workspace) in shown
    assert "confirmed" in handrail("memory", "confirm", id).out and listed(handrail, "--unconfirmed") == []
    assert "No fact is unconfirmed" in handrail("memory", "list", "--unconfirmed").err
    (exported,) = [json.loads(line) for line in handrail("memory", "export").out.splitlines()]
    assert (exported["id"], exported["tags"]) == (id, ["city"]) and exported["confirmed_ns"] > 0


def test_undo_restores_the_facts_of_a_compaction_or_one_replaced_fact(handrail: Program) -> None:
    first = upsert(handrail, "The user lives in Lisbon by the sea.", key="home")
    second = upsert(handrail, "The user has moved to Porto by now.", key="home")
    assert handrail("call", "memory.compact", '{"store": "knowledge"}').code == 0
    assert [one["id"] for one in listed(handrail)] == [second] and len(listed(handrail, "--history")) == 2
    assert "was replaced by" in handrail("memory", "confirm", first).err
    assert first in handrail("memory", "undo").out and len(listed(handrail)) == 2
    assert "Nothing to undo" in handrail("memory", "undo").err
    third = upsert(handrail, "The user lives in Faro since spring.", replaces=second)
    assert second in handrail("memory", "undo", second).out
    assert {one["id"] for one in listed(handrail)} == {first, second, third}


def test_forgetting_a_fact_requires_consent_and_removes_every_trace(
    handrail: Program, on_a_terminal: Terminals
) -> None:
    id = upsert(handrail, "The user plays the xylophone at night.")
    refused = handrail("memory", "forget", id)
    assert refused.code == 2 and "--yes" in refused.err and listed(handrail)
    terminal = on_a_terminal(*handrail.command("memory", "forget", id))
    terminal.wait_for("Delete 1 fact and")
    terminal.type("y\n")
    assert terminal.end() == 0 and listed(handrail, "--history") == []
    files = (handrail.state / "memory").iterdir()
    assert not any(b"xylophon" in file.read_bytes() for file in files)
    upsert(handrail, "The user plays the violin at night.")
    assert (
        json.loads(handrail("memory", "forget", "--all", "--yes", "--json").out)["forgotten"] and listed(handrail) == []
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show",), "The ID is missing"),
        (("show", "mem_none"), "Unknown IDs"),
        (("list", "mem_none"), "takes no ID"),
        (("confirm", "mem_none", "--yes"), "cannot be used with"),
        (("forget", "mem_none", "--all"), "exclude each other"),
    ],
)
def test_a_wrong_memory_command_is_explained(handrail: Program, arguments: tuple[str, ...], text: str) -> None:
    done = handrail("memory", *arguments)
    assert done.code == 2 and text in done.err


def test_stored_facts_are_listed_as_state_and_removed_only_by_name(handrail: Program) -> None:
    upsert(handrail, "The user drinks green tea every morning.")
    assert "facts that agents stored for you" in handrail("state").out
    assert handrail("state", "remove", "--yes").code == 0 and len(listed(handrail)) == 1
    assert handrail("state", "remove", "memory", "--yes").code == 0 and listed(handrail) == []


def test_a_purge_removes_unconfirmed_facts_and_the_origins_of_kept_ones(handrail: Program) -> None:
    kept = upsert(handrail, "The user drinks green tea every morning.")
    mark_unconfirmed(handrail, upsert(handrail, "The page said that all tea is blue."))
    plan = json.loads(handrail("log", "purge", "--before", "0", "--dry-run", "--json").out)
    assert plan["facts"] == 1 and len(listed(handrail)) == 2
    assert handrail("log", "purge", "--before", "0", "--yes").code == 0
    (one,) = listed(handrail, "--history")
    assert (one["id"], one["session"], one["call"]) == (kept, "", "")


def test_a_backup_has_the_workspace_facts_and_a_restore_adds_missing_ones(handrail: Program, tmp_path: Path) -> None:
    first = upsert(handrail, "The user drinks green tea every morning.", tags=["tea"])
    target = tmp_path / "backup"
    assert handrail("state", "backup", str(target)).code == 0
    assert handrail("memory", "forget", first, "--yes").code == 0
    second = upsert(handrail, "The user drinks black tea in the evening.")
    assert handrail("state", "restore", str(target), "--replace", "--yes").code == 0
    assert {one["id"] for one in listed(handrail)} == {first, second}
    assert "green" in handrail("call", "memory.query", '{"query": "tea in the morning"}').out
    assert handrail("state", "restore", str(target), "--replace", "--yes").code == 0 and len(listed(handrail)) == 2


def test_an_adopted_workspace_keeps_its_facts(handrail: Program) -> None:
    from dataclasses import replace

    upsert(handrail, "The user drinks green tea every morning.")
    moved = replace(handrail, workspace=handrail.workspace.with_name("moved"))
    handrail.workspace.rename(moved.workspace)
    assert moved("state", "adopt", "--yes").code == 0
    assert [one["workspace"] for one in listed(moved)] == [str(moved.workspace)]
