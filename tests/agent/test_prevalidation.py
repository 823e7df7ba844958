"""The validation of a call before its block is complete: it has no visible effect and decides nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession
from tests.store.test_write_guarantees import asleep

from handrail import tool
from handrail.agent import conversation
from handrail.agent.agent_loop import Agent
from handrail.agent.conversation import Conversation
from handrail.agent.model_protocol import (
    AssistantMessage,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResultsMessage,
    HistoryCallPart,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TextPart,
)
from handrail.agent.reply_assembly import MAX_AHEAD_UNITS, MAX_PREVALIDATIONS, ModelReply, make_history_call
from handrail.arbiter.lock_table import LockResolver
from handrail.contract.calls_and_results import ProposedCall
from handrail.contract.text import strict_json as json_reader
from handrail.kernel.local_kernel import LocalKernel
from handrail.session.local_session import LocalSession
from handrail.store.database import group_writer as writing
from handrail.store.database.journal import Journal
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, Step, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("X-09")


def opened(name: str, *pieces: str) -> list[Step]:
    return [CallBlockOpened(0, None, name), *(CallArgumentsDelta(0, piece) for piece in pieces)]


CLOSED: list[Step] = [CallBlockClosed(0), ReplyFinished("calls")]


@tool(id="test.note", side_effect="write", locks=["file:{path}:X"])
async def note(path: str, n: int) -> str:
    """Have an effect."""
    return f"{path} {n}"


@asynccontextmanager
async def held_open(
    folder: Path, *steps: Step, rules: tuple[str, ...] = ("allow test.note",), closes: bool = True
) -> AsyncGenerator[tuple[LocalKernel, LocalSession, asyncio.Task[Any]]]:
    """A run whose only call is whole, while its block is open; it closes behind the test's part."""
    pause = ReplyPause()
    async with temporary_kernel(folder, tools=[note], rules=rules) as kernel:
        session = await kernel.session()
        last = CLOSED if closes else [ReplyStreamCut("gone")]
        model = PlaybackModel([*steps, pause, *last], text_reply("done"))
        run = asyncio.create_task(Agent(session, model).complete("go"))
        await pause.reached.wait()
        yield kernel, session, run
        pause.proceed.set()
        await run


def records(kernel: LocalKernel) -> list[tuple[str, Mapping[str, Any]]]:
    return [(record.kind, record.body or {}) for record in kernel.log.reader.records() if record.call_id]


async def left_of(folder: Path) -> list[tuple[str, Mapping[str, Any]]]:
    async with temporary_kernel(folder, tools=[note]) as kernel:
        return records(kernel)


async def test_a_call_is_prevalidated_once_as_soon_as_its_arguments_are_complete() -> None:
    session = RecordingSession()
    pieces = ('{"n":', '{"m":1}', "}")
    model = PlaybackModel([*opened("echo", *pieces), *CLOSED], text_reply("ok"))
    assert (await Agent(session, model).complete("go")).ok
    assert session.looked_at == session.calls == [ProposedCall("echo", '{"n":{"m":1}}')]


async def test_a_call_after_a_very_long_text_is_not_prepared_ahead() -> None:
    session = RecordingSession()
    model = PlaybackModel([TextDelta("x" * MAX_AHEAD_UNITS), *opened("echo", '{"n":1}'), *CLOSED], text_reply("ok"))
    assert (await Agent(session, model).complete("go")).ok
    assert session.looked_at == [] and len(session.calls) == 1


@pytest.mark.parametrize(
    "pieces",
    [
        ('{"n":1', "} "),
        ('{"n":1}}',),
        ("[]",),
        ("}" * 70_000,),
        ('{"n":[{}', *([",{}"] * MAX_PREVALIDATIONS), "]}"),
    ],
)
async def test_arguments_that_are_not_one_object_or_too_costly_are_not_prevalidated(pieces: tuple[str]) -> None:
    session = RecordingSession()
    model = PlaybackModel([*opened("echo", *pieces), *CLOSED], text_reply("ok"))
    assert (await Agent(session, model).complete("go")).ok
    assert session.looked_at == [] and len(session.calls) == 1


async def test_prevalidation_resolves_locks_early_without_records_or_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    wants = LockResolver.resolve

    def counted(self: LockResolver, *args: Any, **more: Any) -> Any:
        asked.append(args)
        return wants(self, *args, **more)

    monkeypatch.setattr(LockResolver, "resolve", counted)
    told: list[str] = []
    async with held_open(tmp_path, *opened("test__note", '{"path":"a","n":1.0}')) as (kernel, session, _):
        session.watch_events(lambda event: told.append(event.kind))
        await kernel.log.flush()
        assert len(asked) == 1 and records(kernel) == [] and told == []
    assert len(asked) == 1 and told == ["proposed", "started", "finished"]


@tool(id="test.see", side_effect="read", locks=[])
async def see(n: int) -> int:
    """Have none."""
    return n


@tool(id="test.warm", side_effect="write", locks=[])
async def warm() -> None:
    """Have the journal made, and its disk known to be quick."""


@pytest.mark.parametrize(
    ("name", "arguments", "rules", "rouses"),
    [
        ("test__note", '{"path":"a","n":1}', ["allow test.*"], True),
        ("test__note", '{"path":"a","n":1}', ["allow test.*", "ask test.note"], False),
        ("test__note", '{"path":"a"}', ["allow test.*"], False),
        ("test__see", '{"n":1}', ["allow test.*"], False),
    ],
)
async def test_the_disk_is_woken_early_only_for_a_call_that_needs_a_durable_intent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: str, rules: list[str], rouses: bool
) -> None:
    heard, rouse = threading.Event(), Journal.wake_disk

    def roused(self: Journal) -> None:
        rouse(self)
        heard.set()

    monkeypatch.setattr(Journal, "wake_disk", roused)
    monkeypatch.setattr(writing, "PROMISE_GRACE_S", 300.0)  # whatever else this machine does
    before, pause = ReplyPause(), ReplyPause()
    async with temporary_kernel(tmp_path, tools=[note, see, warm], rules=rules) as kernel:
        session = await kernel.session()
        for _ in range(3):
            assert (await session.call("test.warm", {})).ok
            await kernel.log.flush()
        model = PlaybackModel([before, *opened(name, arguments), pause, *CLOSED], text_reply("done"))
        run = asyncio.create_task(Agent(session, model).complete("go"))
        await before.reached.wait()
        await kernel.log.flush()  # the turn's own beginning is written too
        await asleep(kernel.log._writer)  # pyright: ignore[reportPrivateUsage] - a disk at work is not roused
        before.proceed.set()
        await pause.reached.wait()
        assert await asyncio.to_thread(heard.wait, 60 if rouses else 0) == rouses
        pause.proceed.set()
        await run
        assert heard.is_set() == rouses


async def test_a_prevalidated_call_leaves_the_same_records_as_any_other_call(tmp_path: Path) -> None:
    found: list[list[tuple[str, Mapping[str, Any]]]] = []
    for folder, pieces in (("looked at", ['{"path":"b/../a","n":1.0}']), ("not", ['{"path":"b/../a","n":1.0', "} "])):
        async with held_open(tmp_path / folder, *opened("test__note", *pieces)):
            pass
        found.append(await left_of(tmp_path / folder))
    kinds, bodies = zip(*found[0], strict=True)
    assert kinds == ("proposed", "authorised", "intended", "committed") and bodies[3]["result"]["data"] == "b/../a 1"
    assert bodies[0]["arguments"] == {"path": "b/../a", "n": 1.0} and bodies[2]["locks"] == ["workspace/a:X"]
    assert found[1][:3] == found[0][:3]


async def test_a_rule_added_before_the_call_block_closes_decides_the_call(tmp_path: Path) -> None:
    async with held_open(tmp_path, *opened("test__note", '{"path":"a","n":1}')) as (_, session, __):
        session.set_mode("plan")
    kinds = dict(await left_of(tmp_path))
    assert "committed" not in kinds and kinds["rejected"]["result"]["metadata"]["error_kind"] == "denied"


@pytest.mark.parametrize("pieces", [("x",), (" ", "}")])
async def test_a_prevalidated_call_is_rejected_if_later_pieces_make_its_arguments_invalid(
    tmp_path: Path, pieces: tuple[str, ...]
) -> None:
    async with held_open(tmp_path, *opened("test__note", '{"path":"a","n":1}', *pieces)):
        pass
    kinds = dict(await left_of(tmp_path))
    assert "committed" not in kinds and kinds["rejected"]["result"]["metadata"]["error_kind"] == "invalid_input"


async def test_a_prevalidated_block_that_never_closes_is_rejected(tmp_path: Path) -> None:
    async with held_open(tmp_path, *opened("test__note", '{"path":"a","n":1}'), closes=False):
        pass
    found = await left_of(tmp_path)
    assert [kind for kind, _ in found] == ["proposed", "rejected"]


async def test_a_link_changed_before_the_call_block_closes_leads_to_no_write(tmp_path: Path) -> None:
    inside, outside, link = tmp_path / "ws" / "inside", tmp_path / "outside", tmp_path / "ws" / "link"
    inside.mkdir(parents=True)
    outside.mkdir()
    link.symlink_to("inside")
    arguments = '{"path":"link/a.txt","content":"here"}'
    async with held_open(tmp_path, *opened("write", arguments), rules=("allow write", "allow fs.write")) as (
        _,
        __,
        run,
    ):
        link.unlink()
        link.symlink_to(outside)
    assert run.result().calls == 1
    assert not list(outside.iterdir()) and not list(inside.iterdir())


def reply_of(arguments: str) -> ModelReply:
    return ModelReply((TextPart("I see"), 0), (ProposedCall("echo", arguments, "theirs"),), None, None)


def test_a_precomputed_reply_equals_one_that_was_not_precomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ProposedCall] = []

    def counted(call: ProposedCall, wire_id: str) -> HistoryCallPart:
        made.append(call)
        return make_history_call(call, wire_id)

    monkeypatch.setattr(conversation, "make_history_call", counted)
    said: list[Any] = []
    for ahead in (True, False):
        talk = Conversation()
        if ahead:
            talk.prepare_reply_draft(reply_of('{"n":1}'), ["s1/1.0"])
        before = len(made)
        talk.add_reply(reply_of('{"n":1}'), ["s1/1.0"])
        said.append(talk.open_exchange)
        assert len(made) - before == (0 if ahead else 1)
    assert said[0] == said[1] and said[0].message.calls[0].wire_id == "theirs"


@pytest.mark.parametrize(("arguments", "ids"), [('{"n":1} ', ["s1/1.0"]), ('{"n":1}', ["s1/2.0"])])
def test_a_reply_that_differs_from_the_precomputed_one_is_added_as_it_arrived(arguments: str, ids: list[str]) -> None:
    talk = Conversation()
    talk.prepare_reply_draft(reply_of('{"n":1}'), ["s1/1.0"])
    talk.add_reply(reply_of(arguments), ids)
    assert talk.open_exchange is not None and talk.open_exchange.call_ids == (ids[0],)
    assert talk.open_exchange.message.calls[0].wire_id == "theirs", "nobody has that id"


@contextmanager
def parsers_at_work() -> Generator[list[str]]:
    """The functions of the JSON reader that had a parser read a text, in this thread."""
    found: list[str] = []

    def heard(frame: FrameType, event: str, argument: Any) -> None:
        of_parser = event == "c_call" and getattr(argument, "__name__", "") == "loads"
        if of_parser and frame.f_code.co_filename == json_reader.__file__:
            found.append(frame.f_code.co_name)

    sys.setprofile(heard)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("count", [1, 3])
async def test_the_arguments_of_a_streamed_call_are_parsed_once(tmp_path: Path, count: int) -> None:
    numbered: list[Step] = []
    for n in range(count):
        arguments = ('{"path":"a",', f'"n":{n}}}')
        numbered += [CallBlockOpened(n, None, "test__note"), *(CallArgumentsDelta(n, piece) for piece in arguments)]
    async with temporary_kernel(tmp_path, tools=[note], rules=("allow test.note",)) as kernel:
        model = PlaybackModel(
            [*numbered, *(CallBlockClosed(n) for n in range(count)), ReplyFinished("calls")], text_reply("done")
        )
        agent = Agent(await kernel.session(), model)
        with parsers_at_work() as found:
            outcome = await agent.complete("go")
    assert outcome.ok and outcome.calls == count
    assert found == ["try_parse_model_json_fast"] * count


@tool(id="test.keep", side_effect="read", locks=[])
async def keep(items: list[str]) -> list[str]:
    """Change what it is handed."""
    items.append("changed")
    return items


async def test_the_history_keeps_the_original_arguments_if_a_tool_changes_them(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[keep], rules=("allow test.keep",)) as kernel:
        model = PlaybackModel([*opened("test__keep", '{"items":["a"]}'), *CLOSED], text_reply("done"))
        agent = Agent(await kernel.session(), model)
        await agent.complete("go")
    (call,) = [call for message in agent.messages if isinstance(message, AssistantMessage) for call in message.calls]
    assert call.arguments == {"items": ["a"]}
    (results,) = [message for message in agent.messages if isinstance(message, CallResultsMessage)]
    assert "changed" in results.results[0].text
