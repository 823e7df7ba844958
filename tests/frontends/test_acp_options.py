"""Options of a user in an editor: skills as slash commands, the mode and the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from acp import RequestError
from tests.frontends.acp_clients import EditorFixture, ask

from handrail.agent.model_protocol import ModelRequest, UserMessage
from handrail.testing.provider_request_checks import PlaybackModel, text_reply

pytestmark = pytest.mark.proves("F-05")


@pytest.fixture
def desk(tmp_path: Path) -> EditorFixture:
    desk = EditorFixture(tmp_path)
    skill = desk.workspace / ".agents" / "skills" / "deploy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: deploy\ndescription: How we deploy.\n---\nSlowly.\n")
    return desk


def get_last_user_text(request: ModelRequest) -> str:
    """Return the last text of the user."""
    return [message.text for message in request.messages if isinstance(message, UserMessage)][-1]


@pytest.mark.proves("A-04")
async def test_skills_are_slash_commands_that_ask_the_model_to_read_them(desk: EditorFixture) -> None:
    model = PlaybackModel(*[text_reply("Done.")] * 3)
    async with desk.connected(model=lambda _: model) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await editor.until(lambda: editor.of("available_commands_update"))
        (update,) = editor.of("available_commands_update")
        told = {one.name: one for one in update.available_commands}
        assert "of the workspace" in told["deploy"].description
        assert told["deploy"].field_meta == {
            "handrail/skill": "workspace",
            "handrail/untrusted_source": "the workspace",
        }
        assert "handrail/untrusted_source" not in told["tool-builder"].field_meta
        for said in ("/deploy the docs\nand no more", "/deploy", "/etc/hosts says what?"):
            await ask(client, opened.session_id, said)
        first, bare, other = map(get_last_user_text, model.requests)
        assert "'deploy'" in first and "the tool skill" in first and first.endswith("\n\nthe docs\nand no more")
        assert "'deploy'" in bare and "Slowly" not in first + bare, "what a workspace wrote is not the user's word"
        assert other == "/etc/hosts says what?"


async def test_mode_and_model_are_options_and_a_new_model_continues_the_conversation(desk: EditorFixture) -> None:
    one, two = PlaybackModel(text_reply("One.")), PlaybackModel(text_reply("Two."))
    async with desk.connected(model=lambda _: one, named={"second": lambda _: two}) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        found = {option.id: option for option in opened.config_options or []}
        assert {name: option.current_value for name, option in found.items()} == {"mode": "ask", "model": "first"}
        await ask(client, opened.session_id, "alpha")
        changed = await client.set_config_option(config_id="model", session_id=opened.session_id, value="second")
        assert changed is not None and changed.config_options[1].current_value == "second"
        await ask(client, opened.session_id, "beta")
        (request,) = two.requests
        assert [message.text for message in request.messages if isinstance(message, UserMessage)] == ["alpha", "beta"]
        assert one.closed, "the one before is let go"
        await client.set_config_option(config_id="mode", session_id=opened.session_id, value="plan")
        await editor.until(lambda: editor.of("current_mode_update"))
        (mode,) = editor.of("current_mode_update")
        assert mode.current_mode_id == "plan", "an editor that knows modes only hears of it too"
        await client.set_session_mode(session_id=opened.session_id, mode_id="auto")
        await editor.until(lambda: len(editor.of("config_option_update")) == 3)
        last = editor.of("config_option_update")[-1].config_options
        assert [option.current_value for option in last] == ["auto", "second"]
        for config, value in (("model", "third"), ("mode", "any"), ("speed", "high"), ("mode", True)):
            with pytest.raises(RequestError):
                await client.set_config_option(config_id=config, session_id=opened.session_id, value=value)


async def test_a_single_model_is_not_offered_as_an_option(desk: EditorFixture) -> None:
    async with desk.connected({"text": "Done."}) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        assert [option.id for option in opened.config_options or []] == ["mode"]


@pytest.mark.proves("A-08")
async def test_a_slash_command_compacts_the_session_and_reports_the_outcome(desk: EditorFixture) -> None:
    skill = desk.workspace / ".agents" / "skills" / "compact"
    skill.mkdir()
    (skill / "SKILL.md").write_text("---\nname: compact\ndescription: Take the command's place.\n---\nNo.\n")
    model = PlaybackModel(*[text_reply("Said. " + "x" * 400)] * 4)
    async with desk.connected(model=lambda _: model) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await editor.until(lambda: editor.of("available_commands_update"))
        (update,) = editor.of("available_commands_update")
        (command,) = [one for one in update.available_commands if one.name == "compact"]
        assert "Free up context" in command.description and "skill" not in command.description
        for said in ("one", "two", "three"):
            await ask(client, opened.session_id, said)
        answer = await ask(client, opened.session_id, "/compact")
        assert answer.stop_reason == "end_turn" and len(model.requests) == 3, "no model was asked"
        said = "".join(chunk.content.text for chunk in editor.of("agent_message_chunk"))
        assert "5 older messages are left out and 1 are kept" in said
        await ask(client, opened.session_id, "four")
        assert len(model.requests[-1].messages) == 3
        await ask(client, opened.session_id, " /compact\n")
        await ask(client, opened.session_id, "/compact")
        assert "Nothing to compact" in "".join(chunk.content.text for chunk in editor.of("agent_message_chunk"))
