"""A session resumed in another process has its messages, decisions, read files and notes, and nothing more."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.record.sealing import seal_anew

from handrail import ApprovalAnswer, UsageError, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import AssistantMessage, CallResultsMessage, UserMessage
from handrail.contract.session_protocols import Session
from handrail.record.hash_chain import SALT_BYTES
from handrail.session.transcript_search import StoredSessionReader
from handrail.store.state_folders import locate_folders
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, find_chat_completions_faults, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

SECRET = "correct-horse-battery"


@tool(id="test.count", side_effect="external", locks=[])
async def count(n: int) -> int:
    """Count."""
    return n + 1


@tool(id="test.masked", side_effect="external", locks=[], exposure="edge")
async def masked() -> str:
    """Something that only people may see."""
    return "for people only"


TOOLS = [count, masked]
RULES = ["allow test.*"]


def opened(folder: Path, **further: Any):
    return temporary_kernel(folder, tools=TOOLS, rules=further.pop("rules", RULES), **further)


def database(folder: Path) -> Path:
    (found,) = (folder / "state").rglob("handrail.db")
    return found


async def talk(session: Session, *replies: Any, task: str | None = "go on") -> Agent:
    """One run to its end, whatever it is."""
    agent = Agent(session, PlaybackModel(*replies))
    await agent.complete(task)
    return agent


@pytest.mark.proves("A-10")
async def test_a_conversation_resumes_with_its_whole_history(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session()
        first = await talk(
            session, call_reply(("test.count", {"n": 1}), text="I count"), text_reply("two"), task="count"
        )
        assert len(first.messages) == 4
    async with opened(tmp_path) as kernel:
        model = PlaybackModel(text_reply("as I said: two"))
        agent = Agent(await kernel.session(session.id), model)
        assert (await agent.complete("and?")).ok
        assert model.requests[0].messages == (*first.messages, UserMessage("and?"))


def forget_head(folder: Path) -> None:
    """Remove how far the log was written: the log was made shorter on purpose."""
    for head in (folder / "state" / "heads").iterdir():
        head.unlink()


@pytest.mark.proves("A-10")
async def test_call_ids_continue_after_the_last_turn_even_when_the_log_lacks_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        await talk(session, call_reply(("test.count", {"n": 1})), call_reply(("test.count", {"n": 2})), text_reply("x"))
    with sqlite3.connect(database(tmp_path)) as connection:  # what a kill leaves where calls were not yet on record
        connection.execute("DELETE FROM record WHERE call LIKE 'ses_1/2%'")
        connection.execute("DELETE FROM record WHERE sequence > (SELECT max(sequence) FROM record WHERE call <> '')")
        seal_anew(connection)
    forget_head(tmp_path)
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        agent = await talk(session, call_reply(("test.count", {"n": 5})), text_reply("six"))
        await kernel.log.flush()
        ids = {row.call_id for row in kernel.log.reader.calls(session="ses_1")}
        assert ids == {"ses_1/1.0", "ses_1/3.0"}  # 2 is in the kept reply
        assert len(agent.messages) == 10


@pytest.mark.proves("A-10")
@pytest.mark.parametrize("kept", range(1, 6))
async def test_a_truncated_history_resumes_with_every_call_answered_from_the_log(tmp_path: Path, kept: int) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        calls = call_reply(("test.count", {"n": 1}), ("test.masked", {}), ("nothing", {}))
        await talk(session, calls, text_reply("done"), task="count")
        await talk(session, text_reply("more"), task="go on")
    with sqlite3.connect(database(tmp_path)) as connection:
        connection.execute("DELETE FROM message WHERE position >= ?", (kept,))
    async with opened(tmp_path) as kernel:
        model = PlaybackModel(text_reply("end"))
        agent = Agent(await kernel.session("ses_1"), model)
        assert (await agent.complete("again")).ok
        ids_and_texts = {
            result.wire_id: result.text
            for message in agent.messages
            if isinstance(message, CallResultsMessage)
            for result in message.results
        }
        if kept > 1:
            number, hidden, unknown = ids_and_texts.values()
            assert '"data":2' in number
            assert "people only" not in hidden and hidden
            assert "unknown_tool" in unknown
        asked = [message for message in agent.messages if isinstance(message, UserMessage)]
        assert asked[0].text == "count" and asked[-1].text == "again"
        from handrail.agent.providers.openai import _messages  # pyright: ignore[reportPrivateUsage]

        assert find_chat_completions_faults({"messages": list(_messages(model.requests[0]))}) == []


async def test_a_session_without_a_task_continues_where_it_stopped_unless_it_was_answered(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        with pytest.raises(UsageError, match="there is nothing to continue"):
            await talk(session, task=None)
        await talk(session, task="count")  # its model has no reply: the run fails with the task said
        agent = await talk(session, text_reply("one"), task=None)
        assert agent.messages[-1] == AssistantMessage(agent.messages[-1].parts, "played:model")  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="Pass a task"):
            await talk(session, task=None)


@pytest.mark.proves("A-10")
async def test_a_file_read_before_a_restart_can_be_written_unless_it_has_changed(tmp_path: Path) -> None:
    rules = [*RULES, "allow write", "allow fs.write"]
    async with opened(tmp_path, rules=rules) as kernel:
        for name in ("a.txt", "b.txt"):
            Path(kernel.workdir, name).write_text("old")
        session = await kernel.session("ses_1")
        assert (await session.call("read", {"path": "a.txt"})).ok
        assert (await session.call("read", {"path": "b.txt"})).ok
    async with opened(tmp_path, rules=rules) as kernel:
        Path(kernel.workdir, "b.txt").write_text("changed by somebody")
        session, other = await kernel.session("ses_1"), await kernel.session("ses_2")
        refused = await other.call("write", {"path": "a.txt", "content": "new"})
        assert refused.error_kind == "conflict"
        assert (await session.call("write", {"path": "a.txt", "content": "new"})).ok
        assert (await session.call("write", {"path": "b.txt", "content": "new"})).error_kind == "conflict"


@pytest.mark.proves("A-10")
async def test_todos_and_folders_of_a_session_are_kept_until_the_session_is_closed(tmp_path: Path) -> None:
    todos = [{"id": "1", "content": "go on", "status": "pending"}]
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        assert (await session.call("todo", {"todos": todos})).ok
        places = locate_folders(tmp_path / "ws", tmp_path / "state")
        folders = [places.prepare_session_output("ses_1"), places.prepare_session_scratch("ses_1")]
        (folders[0] / "kept").write_text("x")
        await session.suspend()
        with pytest.raises(UsageError, match="suspended"):
            await session.call("todo", {})
        session = await kernel.session("ses_1")
        assert (await session.call("todo", {})).data == {"todos": todos}
    assert (folders[0] / "kept").exists() and folders[1].exists()
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        await talk(session, text_reply("hello"))
        with pytest.raises(UsageError, match="open"):
            await kernel.close_session("ses_1")
        await session.suspend()
        await kernel.close_session("ses_1")
        assert not any(folder.exists() for folder in folders)
        with pytest.raises(UsageError, match="is closed"):
            await kernel.close_session("ses_1")
        with pytest.raises(UsageError, match="is closed"):
            await kernel.fork_session("ses_1")
        with pytest.raises(UsageError, match="does not exist"):
            await kernel.close_session("ses_nobody")
        session = await kernel.session("ses_1")
        assert (await session.call("todo", {})).data == {"todos": []}
        assert (await talk(session, text_reply("hello"))).messages[0] == UserMessage("go on")


@pytest.mark.proves("A-10")
async def test_a_session_grant_survives_a_restart_but_is_not_copied_to_a_fork(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session")])
    async with opened(tmp_path, rules=["ask test.count"]) as kernel:
        session = await kernel.session("ses_1", approval_handler=person, rules=["allow test.masked"])
        assert (await session.call("test.count", {"n": 1})).ok
        assert (await session.call("test.masked", {})).ok
    async with opened(tmp_path, rules=["ask test.count"]) as kernel:
        forked = await kernel.session(await kernel.fork_session("ses_1"))
        assert (await forked.call("test.count", {"n": 1})).error_kind == "denied"
        session = await kernel.session("ses_1")
        assert (await session.call("test.count", {"n": 1})).ok
        assert (
            await session.call("test.masked", {})
        ).error_kind == "denied"  # came with the door, not with the session


@pytest.mark.proves("A-10")
async def test_a_fork_starts_with_the_history_of_its_parent_and_diverges_from_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1", topic="counting")
        await session.call("todo", {"todos": [{"id": "1", "content": "go on", "status": "pending"}]})
        parent = await talk(session, call_reply(("test.count", {"n": 1})), text_reply("two"), task="count")
        forked = await kernel.session(await kernel.fork_session("ses_1"))
        child = await talk(forked, text_reply("elsewhere"), task="go elsewhere")
        assert child.messages[:4] == parent.messages
        assert (await forked.call("todo", {})).data["todos"][0]["content"] == "go on"
        await forked.call("todo", {"todos": []})
        assert (await session.call("todo", {})).data["todos"] != []
        again = await talk(session, text_reply("here"), task="go on here")
        assert again.messages[:4] == parent.messages and "elsewhere" not in str(again.messages)
    with sqlite3.connect(database(tmp_path)) as connection:
        facts = StoredSessionReader(connection, None).get(forked.id)
    assert facts is not None and (facts.forked_from, facts.topic, facts.state) == ("ses_1", "counting", "suspended")


async def test_a_forked_session_does_not_run_a_call_left_open_by_its_parent(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        await talk(session, call_reply(("test.count", {"n": 1})), text_reply("two"), task="count")
    with sqlite3.connect(database(tmp_path)) as connection:
        connection.execute("DELETE FROM message WHERE position > 1")
        connection.execute("DELETE FROM record WHERE kinds IN ('intended', 'committed')")
        rows = connection.execute("SELECT sequence, kinds, body FROM record WHERE call <> ''").fetchall()
        for at, kinds, body in rows:
            left = [
                one
                for one in zip(kinds.split(" "), orjson.loads(body[SALT_BYTES:]), strict=True)
                if one[0] != "intended"
            ]
            values = (
                " ".join(kind for kind, _ in left),
                body[:SALT_BYTES] + orjson.dumps([one for _, one in left]),
                at,
            )
            connection.execute("UPDATE record SET kinds = ?, body = ? WHERE sequence = ?", values)
        connection.execute("DELETE FROM record WHERE sequence > (SELECT max(sequence) FROM record WHERE call <> '')")
        seal_anew(connection)
        connection.execute("UPDATE meta SET value = 0 WHERE key IN ('settled', 'began')")
        at = connection.execute("SELECT count(*) FROM record").fetchone()
    assert at[0] > 0
    forget_head(tmp_path)
    async with opened(tmp_path) as kernel:
        forked = await kernel.session(await kernel.fork_session("ses_1"))
        agent = await talk(forked, text_reply("so be it"))
        (results,) = [message for message in agent.messages if isinstance(message, CallResultsMessage)]
        assert "forked from" in results.results[0].text and results.results[0].is_error


@pytest.mark.proves("A-10")
async def test_the_stored_history_contains_no_secrets(tmp_path: Path) -> None:
    async with opened(tmp_path, secrets={"horse": SECRET}) as kernel:
        session = await kernel.session("ses_1")
        replies = (
            call_reply(("test.count", {"n": 1, "x": SECRET}), text=f"I use {SECRET}"),
            text_reply(f"it is {SECRET}"),
        )
        await talk(session, *replies, task=f"the password is {SECRET}")
        Path(kernel.workdir, SECRET).write_text("x")
        assert (await session.call("read", {"path": SECRET})).ok
    for file in (tmp_path / "state").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    async with opened(tmp_path) as kernel:
        agent = await talk(await kernel.session("ses_1"), text_reply("end"))
        assert agent.messages[0] == UserMessage("the password is [secret:horse]")
        assert len(agent.messages) == 6


async def test_a_session_is_opened_once_at_a_time_and_only_by_its_agent(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1")
        with pytest.raises(UsageError, match="already open"):
            await kernel.session("ses_1")
        await session.suspend()
        await session.suspend()
        await (await kernel.session("ses_1")).suspend()
    with sqlite3.connect(database(tmp_path)) as connection:
        connection.execute("UPDATE session SET agent = 'careful'")
    async with opened(tmp_path) as kernel:
        with pytest.raises(UsageError, match="'careful'"):
            await kernel.session("ses_1")


async def test_any_process_can_read_the_states_of_sessions(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session("ses_1", topic="counting")
        await talk(session, call_reply(("test.count", {"n": 1})), text_reply("two"), task="count\nto two")
        await kernel.session("ses_2")
        await (await kernel.session("ses_3")).close()
        await kernel.log.flush()
        token = int(
            sqlite3.connect(database(tmp_path))
            .execute("SELECT lease_token FROM session WHERE id = 'ses_2'")
            .fetchone()[0]
        )
        with sqlite3.connect(database(tmp_path)) as connection:
            reader = StoredSessionReader(connection, token)
            assert {facts.id: facts.state for facts in reader.list_sessions()} == {
                "ses_1": "open",
                "ses_2": "open",
                "ses_3": "closed",
            }
            assert reader.find_latest_resumable() is None
            # As after a kill: nobody holds the workspace, or somebody else does.
            assert {f.state for f in StoredSessionReader(connection, None).list_sessions()} == {"suspended", "closed"}
            latest = StoredSessionReader(connection, token + 1).find_latest_resumable()
    assert latest is not None and latest.id == "ses_1"
    assert (latest.messages, latest.calls, latest.task, latest.topic) == (4, 1, "count to two", "counting")
    with sqlite3.connect(database(tmp_path)) as connection:
        assert StoredSessionReader(connection, token).get("ses_1").state == "suspended"  # type: ignore[union-attr]
