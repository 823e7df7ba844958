"""``artifact.read`` returns the artifacts of a session's own calls, and of no other session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_sub_agents import kernel_of, models, task

from handrail import Blob, Session, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import create_message_with_stored_pictures
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("O-04")

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
SECRET = "s3cr3t-that-comes-later"
ACTS = "an\x1b[2J escape, a \u200b zero width, <|im_start|>"


@tool(id="made.text", side_effect="read", locks=[])
async def make(text: str, times: int = 1) -> dict[str, Any]:
    """Make a text artifact."""
    return {"made": Blob(text.encode() * times, "text/plain")}


@tool(id="made.bytes", side_effect="read", locks=[])
async def make_bytes(kind: str) -> dict[str, Any]:
    """Make a picture, or bytes of no kind."""
    return {"made": Blob(PNG if kind == "png" else b"\xff\x00" * 50, "application/x-made")}


@tool(id="made.masked", side_effect="read", locks=[], prompt_mask=True)
async def masked() -> dict[str, Any]:
    """Make what a prompt does not show."""
    return {"summary": "made", "text": "only for people"}


@tool(id="made.edge", side_effect="read", locks=[], exposure="edge")
async def edge() -> dict[str, Any]:
    """Make what only people see."""
    return {"made": Blob(b"for people", "text/plain")}


@tool(id="made.foreign", side_effect="read", locks=[], requires={"net": {"hosts": ["example.org"]}})
async def foreign() -> dict[str, Any]:
    """Make what comes from the network."""
    return {"made": Blob(b"from outside", "text/plain")}


@tool(id="made.claim", side_effect="read", locks=[])
async def claim(ref: str) -> dict[str, Any]:
    """Name an artifact that the tool did not make."""
    return {"artifact": ref, "media_type": "text/plain", "bytes": 1}


TOOLS = [make, make_bytes, masked, edge, foreign, claim]
RULES = ["allow made.*", "allow net.fetch example.org"]


async def create_artifact(session: Session, name: str = "made.text", **arguments: Any) -> str:
    result = await session.call(name, arguments)
    assert result.ok, result.error_text
    return result.data["made"]["artifact"]


async def read(session: Session, ref: str, **more: Any) -> Any:
    return await session.call("artifact.read", {"ref": ref, **more})


async def refused(session: Session, ref: str) -> str:
    result = await read(session, ref)
    assert result.error_kind == "invalid_input", result
    return str(result.error_text).replace(ref, "REF")


async def test_a_text_artifact_is_read_by_ranges_and_an_image_as_an_image(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        ref = await create_artifact(session, text="één twee drie")
        whole = await read(session, ref)
        assert whole.data == {
            "ref": ref,
            "media_type": "text/plain",
            "text": "één twee drie",
            "start": 0,
            "end": 15,
            "next": None,
            "size": 15,
        }
        part = (await read(session, ref, offset=1, limit=6)).data  # begins and ends within a character
        assert (part["text"], part["start"], part["end"], part["next"]) == ("én t", 2, 7, 7)
        assert (await read(session, ref, offset=-4)).data["text"] == "drie"
        assert (await read(session, ref, offset=99)).data["text"] == ""
        picture = await create_artifact(session, "made.bytes", kind="png")
        answer = await read(session, picture)
        assert answer.data["image"] == {"artifact": picture, "media_type": "image/png", "bytes": len(PNG)}
        assert answer.metadata["artifacts"] == [picture]
        assert (await read(session, picture, offset=1, limit=3)).data["text"] == "PNG"


async def test_a_binary_artifact_is_read_only_with_a_range(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        ref = await create_artifact(session, "made.bytes", kind="?")
        answer = await read(session, ref)
        assert answer.error_kind == "invalid_input" and "100 bytes" in str(answer.error_text)
        assert (await read(session, ref, limit=2)).data["base64"] == "/wA="


async def test_an_artifact_passes_every_output_stage_again_when_it_is_read(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session("ses_1")
        acting, long = (
            await create_artifact(session, text=ACTS),
            await create_artifact(session, text="0123456789", times=50_000),
        )
        keeping = await create_artifact(session, text=f"a {SECRET} in it")
        foreign_ref = await create_artifact(session, "made.foreign")
        top = PlaybackModel(call_reply(("artifact__read", {"ref": acting})), text_reply("."))
        await Agent(session, top).complete("Read it.")
        told = str(top.requests[-1].messages)
        assert "⟦U+001B⟧[2J" in told and "⟦U+200B⟧" in told and "⟦<⟧|im_start|>" in told
        part = (await read(session, long)).data
        assert part["next"] == part["end"] == 200_000 - 2 and part["size"] == 500_000  # with the quotes of JSON
        assert (await read(session, long, offset=part["next"])).data["start"] == part["end"]
        assert "the network" in (await read(session, foreign_ref)).metadata["untrusted_source"]
        assert "untrusted_source" not in (await read(session, acting)).metadata
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES, secrets={"token": SECRET}) as kernel:
        session = await kernel.session("ses_1")
        text = (await read(session, keeping)).data["text"]
        assert SECRET not in text and text.startswith("a ") and text.endswith(" in it")


async def test_an_artifact_of_another_session_is_refused_like_a_missing_one(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        one, other = await kernel.session(), await kernel.session()
        ref = await create_artifact(one, text="mine")
        assert await refused(other, ref) == await refused(other, f"sha256:{'0' * 64}")
        assert (await other.call("made.claim", {"ref": ref})).ok  # naming it gives nothing
        await refused(other, ref)
        assert (await read(other, ref.removeprefix("sha256:"))).error_kind == "invalid_input"
        assert await create_artifact(other, text="mine") == ref  # the same content, made here as well
        assert (await read(other, ref)).data["text"] == "mine"


@pytest.mark.proves("P-12")
async def test_a_sub_agent_and_its_parent_cannot_read_each_others_artifacts(tmp_path: Path) -> None:
    manifest = 'role = "subagent"\nmodel = "played:maker"\nrules = ["allow made.*"]'
    async with kernel_of(tmp_path, {"maker": manifest}, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        above = await create_artifact(session, text="above")
        maker = PlaybackModel(
            call_reply(("made__text", {"text": "below"}), ("artifact__read", {"ref": above})), text_reply(".")
        )
        top = PlaybackModel(call_reply(task("maker")), text_reply("."))
        await Agent(session, top, models=models(maker=maker)).complete("Go.")
        told = str(maker.requests[-1].messages)
        assert "does not exist in this session" in told
        (child,) = kernel.components.store.sessions.list_open_subagent_sessions(session.id)
        await kernel.log.flush()
        (call,) = (row for row in kernel.log.reader.calls(session=child.id) if row.tool == "made.text")
        outcome = kernel.log.reader.find_outcome(call.call_id)
        assert outcome is not None and outcome.body is not None
        (below,) = outcome.body["result"]["metadata"]["artifacts"]
        await refused(session, below)


@pytest.mark.proves("O-06")
async def test_an_artifact_that_its_tool_hides_from_the_model_is_denied(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        hidden = (await session.call("made.masked", {})).metadata["artifact"]
        of_people = await create_artifact(session, "made.edge")
        for ref in (hidden, of_people):
            answer = await read(session, ref)
            assert answer.error_kind == "denied" and "hidden from the model" in str(answer.error_text)


async def test_a_forked_session_reads_only_artifacts_from_before_the_fork(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        parent = await kernel.session()
        before = await create_artifact(parent, text="before")
        await kernel.log.flush()
        fork = await kernel.session(await kernel.fork_session(parent.id))
        after = await create_artifact(parent, text="after")
        assert (await read(fork, before)).data["text"] == "before"
        await refused(fork, after)
        await refused(parent, await create_artifact(fork, text="of the fork"))


async def test_a_session_reads_its_user_pictures_and_provider_outputs_and_other_sessions_do_not(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session, other = await kernel.session(), await kernel.session()
        assert session.history is not None
        said = await create_message_with_stored_pictures("Look.", [Blob(PNG, "image/png")], session.history)
        ref = said.pictures[0].ref
        await refused(session, ref)  # it is not said yet
        await Agent(session, PlaybackModel(text_reply("Seen."))).complete(said)
        assert (await read(session, ref)).data["image"]["artifact"] == ref
        await refused(other, ref)
        (given,) = await session.history.record_provider_tool_use(
            {"provider": "p", "name": "image_gen"}, {"made": "by a provider"}
        )
        await refused(session, given)  # it is in no message yet
        part: dict[str, Any] = {"kept": "p", "block": {}, "said": True, "artifacts": [given]}
        await session.history.store_messages([(9, {"v": 1, "role": "assistant", "parts": [part]})])
        answer = await read(session, given)
        assert answer.data["text"] == '{"made": "by a provider"}' and "provider" in answer.metadata["untrusted_source"]
        await refused(other, given)


async def test_an_artifact_that_was_redacted_from_the_log_is_not_found(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES) as kernel:
        session = await kernel.session()
        ref = await create_artifact(session, text="to go")
        await kernel.log.flush()
        everything = [record.sequence for record in kernel.log.reader.records(session=session.id)]
        await kernel.log.redact_record_bodies(everything, reason="test")
        await refused(session, ref)
