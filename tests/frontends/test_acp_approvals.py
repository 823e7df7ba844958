"""Approval requests and questions of the ACP agent, and the effect of the answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from acp import schema
from tests.frontends.acp_clients import Editor, EditorFixture, ask, call, played

from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("F-05")


@pytest.fixture
def desk(tmp_path: Path) -> EditorFixture:
    desk = EditorFixture(tmp_path)
    (desk.workspace / "note.txt").write_text("first\nsecond\n")
    return desk


async def test_an_edit_is_reported_as_the_diff_that_the_user_approved(desk: EditorFixture) -> None:
    turns = (
        {"calls": [call("read", path="note.txt")]},
        {
            "calls": [
                call("edit", path="note.txt", old="second", new="2nd"),
                call("write", path="new.txt", content="a\nb\n"),
            ]
        },
        {"text": "Done."},
    )
    editor = Editor()
    editor.answering = lambda _call, _options: "allow_once"
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    edit, write = editor.call(1), editor.call(2)
    path = str(desk.workspace / "note.txt")
    assert (edit["kind"], write["kind"]) == ("edit", "edit")
    difference = {"type": "diff", "path": path, "oldText": "first\nsecond", "newText": "first\n2nd"}
    assert edit["content"] == [difference]
    assert edit["locations"] == [{"path": path, "line": 2}]
    assert write["content"] == [{"type": "diff", "path": str(desk.workspace / "new.txt"), "newText": "a\nb"}]
    shown = [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in editor.asked[0][0].content or []]
    assert difference in shown
    assert (desk.workspace / "note.txt").read_text() == "first\n2nd\n"
    assert (desk.workspace / "new.txt").read_text() == "a\nb\n"


@pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine")
async def test_a_host_that_a_program_needs_is_requested_while_its_call_runs(desk: EditorFixture) -> None:
    (desk.workspace / "fetch.sh").write_text("curl -sS http://one.invalid/\nexit 3\n")
    turns = ({"calls": [call("bash", command="bash fetch.sh")]}, {"text": "Done."})
    editor = Editor()
    editor.answering = lambda _call, _options: "allow_once"
    async with desk.connected(*turns, editor=editor, rules=["allow bash bash fetch.sh"]) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    assert len(editor.asked) == 1
    assert "one.invalid" in str(editor.asked[0])
    assert "could not be resolved" in str(editor.call(0))


async def test_an_approval_request_shows_the_rule_that_allow_always_stores(desk: EditorFixture) -> None:
    turns = (
        {"calls": [call("write", path="a.txt", content="1")]},
        {"text": "One."},
        {"calls": [call("write", path="b.txt", content="1"), call("write", path="a.txt", content="2")]},
        {"text": "Two."},
    )
    editor = Editor()
    editor.answering = lambda _call, _options: "allow_always"
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        (_, options) = editor.asked[0]
        kinds = [option.kind for option in options]
        assert kinds[0] == "allow_once" and {"allow_always", "reject_once", "reject_always"} <= {*kinds}
        always = next(option for option in options if option.kind == "allow_always")
        assert "allow write a.txt" in always.name
        editor.answering = lambda _call, _options: "reject_once"
        await ask(client, opened.session_id)
    assert len(editor.asked) == 2, "the second write of a.txt needs nobody"
    assert (desk.workspace / "a.txt").read_text() == "2"
    assert not (desk.workspace / "b.txt").exists()
    assert editor.statuses(1) == ["pending", "failed"]


@pytest.mark.parametrize("kind", ["reject_once", "reject_always", "cancelled", "no such option"])
async def test_any_answer_except_an_approval_rejects_the_call(desk: EditorFixture, kind: str) -> None:
    editor = Editor()
    editor.answering = lambda _call, _options: kind
    turns = ({"calls": [call("write", path="a.txt", content="1")]}, {"text": "${0.error_text}"})
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    assert not (desk.workspace / "a.txt").exists()
    assert "rejected" in editor.said


async def test_several_approval_requests_are_open_together_and_answered_in_any_order(desk: EditorFixture) -> None:
    turns = (
        {"calls": [call("write", path=f"{name}.txt", content="x") for name in "abc"]},
        {"text": "Done."},
    )
    editor = Editor()
    editor.answering = lambda _call, _options: None
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        working = asyncio.create_task(ask(client, opened.session_id))
        await editor.until(lambda: len(editor.asked) == 3)
        by_path = {asked.raw_input["path"]: n for n, (asked, _) in enumerate(editor.asked) if asked.raw_input}
        editor.choose(by_path["c.txt"], "allow_once")
        editor.choose(by_path["b.txt"], "reject_once")
        editor.choose(by_path["a.txt"], "allow_once")
        assert (await working).stop_reason == "end_turn"
    assert sorted(path.name for path in desk.workspace.glob("?.txt")) == ["a.txt", "c.txt"]


QUESTION = call("question", questions=[{"question": "Which?", "options": [{"label": "red"}, {"label": "blue"}]}])


async def test_a_question_is_a_form_if_the_client_supports_forms(desk: EditorFixture) -> None:
    turns = ({"calls": [QUESTION]}, {"text": "${0.data.answers}"})
    editor = Editor()
    editor.filled = schema.AcceptElicitationResponse(action="accept", content={"q1": "blue"})
    offers = schema.ClientCapabilities(
        elicitation=schema.ElicitationCapabilities(form=schema.ElicitationFormCapabilities())
    )
    async with desk.connected(*turns, editor=editor, offers=offers) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    assert "blue" in editor.said
    assert "Which?" in editor.forms[0][0]


async def test_a_question_with_options_is_a_permission_request_without_form_support(desk: EditorFixture) -> None:
    turns = ({"calls": [QUESTION]}, {"text": "${0.data.answers}"})
    editor = Editor()
    editor.answering = lambda _call, options: next(one.option_id for one in options if one.name == "blue")
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    (asked, options) = editor.asked[0]
    assert "blue" in editor.said and "Which?" in str(asked.content)
    assert asked.tool_call_id == editor.call(0)["toolCallId"]
    assert [option.name for option in options] == ["red", "blue", "Decline to answer"]


@pytest.mark.parametrize("kind", ["reject_once", "cancelled", "no such option"])
async def test_a_declined_question_returns_an_error_to_the_model(desk: EditorFixture, kind: str) -> None:
    turns = ({"calls": [QUESTION]}, {"text": "${0.error_text}"})
    editor = Editor()
    editor.answering = lambda _call, _options: kind
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    assert "declined to answer" in editor.said


PLAN = call("plan_exit", plan="1. Read.\n2. Mend.")


@pytest.mark.proves("T-06p")
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        ("Carry out, and accept edits", "accept-edits"),
        ("Carry out, and ask before edits", "ask"),
        ("Leave plan mode only", "ask"),
        ("Keep planning", "plan"),
        ("Decline to answer", "plan"),
    ],
)
async def test_the_editor_shows_the_complete_plan_and_follows_the_chosen_mode(
    desk: EditorFixture, chosen: str, mode: str
) -> None:
    editor = Editor()
    editor.answering = lambda _call, options: next(one.option_id for one in options if one.name.startswith(chosen))
    async with desk.connected({"calls": [PLAN]}, {"text": "Done."}, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await client.set_session_mode(session_id=opened.session_id, mode_id="plan")
        await ask(client, opened.session_id)
    (asked, _) = editor.asked[0]
    assert "1. Read.\n2. Mend." in str(asked.content[0].content.text) and asked.kind == "switch_mode"  # type: ignore
    shown = [update.current_mode_id for update in editor.of("current_mode_update")]
    assert shown == (["plan"] if mode == "plan" else ["plan", mode])


async def test_a_question_without_options_is_unavailable_without_form_support(desk: EditorFixture) -> None:
    turns = ({"calls": [call("question", questions=[{"question": "Why?"}])]}, {"text": "${0.error_text}"})
    async with desk.connected(*turns) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        assert "question is unavailable: no user is attached to this session" in editor.said


async def test_a_headless_session_never_asks_the_user(desk: EditorFixture) -> None:
    turns = ({"calls": [call("write", path="a.txt", content="x")]}, {"text": "${0.error_text}"})
    async with desk.connected(*turns, headless=True) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        assert not editor.asked and "This session has no user to ask" in editor.said


async def test_a_call_awaiting_approval_runs_once_after_its_client_reconnects(
    desk: EditorFixture,
) -> None:
    editor = Editor()
    editor.answering = lambda _call, _options: None
    turns = ({"calls": [call("write", path="a.txt", content="x")]}, {"text": "never said"})
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        working = asyncio.create_task(ask(client, opened.session_id))
        await editor.until(lambda: editor.asked)
    with pytest.raises(ConnectionError):
        await working
    with desk.reading(str(desk.workspace)) as reader:
        facts = reader.get(opened.session_id)
    assert facts is not None and facts.state == "suspended" and len(facts.awaiting_approval) == 1
    back = Editor()
    back.answering = lambda _call, _options: "allow_once"
    async with desk.connected({"text": "It is written."}, editor=back) as (client, _):
        await client.load_session(cwd=str(desk.workspace), session_id=opened.session_id)
        assert back.call(0)["status"] == "pending" and not back.asked
        answer = await ask(client, opened.session_id, "go on")
        assert answer.stop_reason == "end_turn" and "It is written." in back.said
        assert len(back.asked) == 1 and back.call(0)["status"] == "completed"
        assert len(back.of("tool_call")) == 1
    assert (desk.workspace / "a.txt").read_text() == "x"


async def test_closing_a_session_that_asks_cancels_its_prompt_and_leaves_the_call_pending(
    desk: EditorFixture,
) -> None:
    editor = Editor()
    editor.answering = lambda _call, _options: None
    async with desk.connected({"calls": [call("write", path="made.txt", content="x")]}, editor=editor) as (client, _):
        session_id = (await client.new_session(cwd=str(desk.workspace))).session_id
        prompt = asyncio.create_task(ask(client, session_id))
        await editor.until(lambda: editor.asked)
        await client.close_session(session_id=session_id)
        assert (await prompt).stop_reason == "cancelled"
        editor.choose(0, "allow_once")
        await client.load_session(cwd=str(desk.workspace), session_id=session_id)
        await editor.until(lambda: len(editor.of("tool_call")) == 2)
        assert editor.statuses(1)[-1] == "pending"
    assert not (desk.workspace / "made.txt").exists(), "a yes that comes too late is none"


async def test_all_waiting_calls_are_asked_at_once_after_their_client_reconnects(
    desk: EditorFixture,
) -> None:
    editor, back = Editor(), Editor()
    editor.answering = back.answering = lambda _call, _options: None
    turns = ({"calls": [call("write", path=f"{name}.txt", content="x") for name in "abc"]}, {"text": "never said"})
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        working = asyncio.create_task(ask(client, opened.session_id))
        await editor.until(lambda: len(editor.asked) == 3)
    with pytest.raises(ConnectionError):
        await working
    async with desk.connected({"text": "They are written."}, editor=back) as (client, _):
        await client.load_session(cwd=str(desk.workspace), session_id=opened.session_id)
        working = asyncio.create_task(ask(client, opened.session_id, "go on"))
        await back.until(lambda: len(back.asked) == 3)
        second = back.of("tool_call")[1].tool_call_id  # requests are taken in no order of their own
        for number in (2, 1, 0):
            back.choose(number, "reject_once" if back.asked[number][0].tool_call_id == second else "allow_once")
        assert (await working).stop_reason == "end_turn" and "They are written." in back.said
        assert [back.call(number)["status"] for number in range(3)] == ["completed", "failed", "completed"]
    assert sorted(path.name for path in desk.workspace.glob("?.txt")) == ["a.txt", "c.txt"]


def with_a_writer(desk: EditorFixture) -> None:
    """An agent that asks its parent's users before it writes."""
    played(desk.folder, {"calls": [call("write", path="a.txt", content="x")]}, {"text": "Written."})
    (desk.folder / "script.json").rename(desk.folder / "writer.json")
    manifests = {
        "default": "[delegation]\ncan_ask_user = true",
        "writer": f'role = "subagent"\ndescription = "Writes."\nmodel = "script:{desk.folder}/writer.json"',
    }
    for name, text in manifests.items():
        folder = desk.folder / "config" / "agents" / name
        folder.mkdir(parents=True, mode=0o755)
        (folder / "agent.toml").write_text(f'id = "{name}"\n{text}\n')


async def test_a_client_that_disconnects_while_a_sub_agent_asks_leaves_no_pending_approval(
    desk: EditorFixture,
) -> None:
    with_a_writer(desk)
    editor = Editor()
    editor.answering = lambda _call, _options: None
    turns = ({"calls": [call("task", subagent_type="writer", prompt="Write.")]}, {"text": "never said"})
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        working = asyncio.create_task(ask(client, opened.session_id))
        await editor.until(lambda: editor.asked)
    with pytest.raises(ConnectionError):
        await working
    async with desk.connected({"text": "On."}) as (client, back):
        await client.load_session(cwd=str(desk.workspace), session_id=opened.session_id)
        told = back.call(0)
        assert told["status"] == "failed" and told["rawOutput"]["data"]["agent"] == "writer"
        with desk.reading(str(desk.workspace)) as reader:
            facts = reader.get(told["rawOutput"]["data"]["session_id"])
        assert facts is not None and facts.awaiting_approval == ()
        assert (await ask(client, opened.session_id)).stop_reason == "end_turn" and not back.asked
    assert not (desk.workspace / "a.txt").exists()


async def test_a_sub_agents_approval_request_names_the_sub_agent_in_the_users_session(desk: EditorFixture) -> None:
    with_a_writer(desk)
    editor = Editor()
    editor.answering = lambda _call, _options: "allow_once"
    turns = ({"calls": [call("task", subagent_type="writer", prompt="Write.")]}, {"text": "${0.data}"})
    async with desk.connected(*turns, editor=editor) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    assert (desk.workspace / "a.txt").read_text() == "x" and "Written." in editor.said
    ((asked, _),) = editor.asked
    assert asked.title == "sub-agent writer: write a.txt" and "sub-agent writer" in str(asked.content)
    assert editor.call(1)["title"] == "sub-agent writer: write a.txt"
    assert editor.statuses(1) == ["pending", "in_progress", "completed"]


async def test_only_sessions_that_can_be_loaded_are_listed_and_count_towards_the_limit(desk: EditorFixture) -> None:
    turns = ({"calls": [call("task", subagent_type="default", prompt="Rest.")]}, {"text": "Rested."}, {"text": "Done."})
    async with desk.connected(*turns) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        await client.new_session(cwd=str(desk.workspace))
        with desk.reading(str(desk.workspace)) as reader:
            assert len(reader.list_sessions()) == 3 and sum(one.messages > 0 for one in reader.list_sessions()) == 2
            assert [one.id for one in reader.list_resumable(limit=1)] == [opened.session_id]
        listed = await client.list_sessions(cwd=str(desk.workspace))
        assert [one.session_id for one in listed.sessions] == [opened.session_id]
