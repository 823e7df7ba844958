"""A reply has the same result with and without prevalidation of its calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import tool
from handrail.agent import reply_assembly
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import (
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    ProviderBlock,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TokenUsage,
)
from handrail.agent.run_events import CallAnswered, CallProposed
from handrail.testing.provider_request_checks import PlaybackModel, Step, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

RULES = ("allow test.put", "allow test.look", "deny fs.write secret")
VARIES = {"duration_ms", "lock_wait_ms"}
ARGUMENTS = st.sampled_from(
    [
        '{"path":"a","n":1}',
        '{"path": "a", "n": 1.0}',
        '{"path":"b","more":{"n":[{}]}}',
        '{"path":"secret"}',
        '{"path":"a","n":"x"}',
        '{"path":"\u00e9\U0001f600","n":2} ',
        '{"path":"a","path":"b"}',
        '{"n":1}}',
        "{}",
        "[]",
        "",
        '{"path":"a","n":',
    ]
)
NAMES = st.sampled_from(["test__put", "test__look", "test.put", "nothing", ""])
IDS = st.sampled_from([None, "theirs", "call_1", "hr0000001", "not usable!"])
BESIDE = st.sampled_from(
    [TextDelta("so"), TextDelta("\ud83d"), TokenUsage(3, 4), ProviderBlock("played", {"type": "thinking"})]
)
ENDS = st.sampled_from(
    [
        ReplyFinished("calls"),
        ReplyFinished("end"),
        ReplyFinished("length"),
        ReplyFinished("refused"),
        ReplyStreamCut("gone"),
    ]
)


@tool(
    id="test.put", side_effect="write", locks=["file:{path}:X"], targets={"fs.write": "{path}"},
    requires={"fs": {"write": ["{workspace}"]}},
)  # fmt: skip
async def put(path: str, n: int = 0, more: dict[str, Any] | None = None) -> str:
    """Have an effect."""
    if more is not None:
        more.clear()  # its own, whoever else has these arguments
    return f"{path} {n}"


@tool(id="test.look", side_effect="read")
async def look(path: str, n: int = 0) -> str:
    """Have none."""
    return f"{path} {n}"


@st.composite
def replies(draw: st.DrawFn) -> list[Step]:
    """The blocks of one reply, cut into pieces: one after the other, or all named first and then taking turns."""
    blocks: list[list[Step]] = []
    for index, (name, wire_id, text) in enumerate(draw(st.lists(st.tuples(NAMES, IDS, ARGUMENTS), max_size=4))):
        cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        block: list[Step] = [
            CallBlockOpened(index, wire_id, name),
            *(CallArgumentsDelta(index, piece) for piece in pieces),
        ]
        blocks.append([*block, *draw(st.sampled_from([[CallBlockClosed(index)], [], [CallBlockClosed(index)] * 2]))])
    steps: list[Step] = []
    if draw(st.booleans()):
        steps = [block.pop(0) for block in blocks]
        while left := [block for block in blocks if block]:
            steps.append(draw(st.sampled_from(left)).pop(0))
    else:
        steps = [step for block in blocks for step in block]
    for beside in draw(st.lists(BESIDE, max_size=4)):
        steps.insert(draw(st.integers(0, len(steps))), beside)
    return [*steps[: draw(st.none() | st.integers(0, len(steps)))], draw(ENDS)]


def alike(value: Any, session_id: str) -> Any:
    """Without what no two runs have in common."""
    if isinstance(value, dict):
        return {key: alike(one, session_id) for key, one in value.items() if key not in VARIES}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [alike(one, session_id) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value.replace(session_id, "s") if isinstance(value, str) else value


async def became(reply: list[Step]) -> tuple[Any, ...]:
    """Return the log of each call, the stored conversation, and the events."""
    told: list[Any] = []
    with TemporaryDirectory() as folder:
        async with temporary_kernel(Path(folder), tools=[put, look], rules=RULES) as kernel:
            session = await kernel.session(headless=True)
            model = PlaybackModel(reply, text_reply("done"), text_reply("done"))
            async for event in Agent(session, model, system="").run("go"):
                match event:
                    case CallProposed(position, call):
                        told.append(("proposed", position, call))
                    case CallAnswered(position, call, answer):
                        told.append(("answered", position, call, answer.call_id, answer.result.to_dict()))
                    case _:
                        told.append(type(event).__name__)
            assert session.history is not None
            kept = list(await session.history.read_stored_messages())
            await kernel.log.flush()
            logged: dict[str, list[Any]] = {}
            for record in kernel.log.reader.records():
                if record.call_id:
                    logged.setdefault(record.call_id, []).append((record.kind, record.body))
            return tuple(alike(one, session.id) for one in (sorted(logged.items()), kept, told))


@pytest.mark.proves("X-09")
@settings(max_examples=15, deadline=None)
@given(replies())
def test_a_reply_has_the_same_outcome_with_and_without_prevalidation(reply: list[Step]) -> None:
    looked_at = asyncio.run(became(reply))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reply_assembly, "MAX_PREVALIDATIONS", 0)
        assert asyncio.run(became(reply)) == looked_at
