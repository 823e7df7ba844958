"""Every stream of a provider gives one proposal for each call that it opened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.agent.conversation import Conversation, format_result_for_model
from handrail.agent.model_protocol import (
    AssistantMessage,
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    FinishReason,
    ProviderBlock,
    ReplyFinished,
    TextDelta,
    TokenUsage,
)
from handrail.agent.reply_assembly import (
    MAX_CALLS,
    MAX_REPLY_UNITS,
    HistoryCallIdAllocator,
    ModelReply,
    ReplyAssembler,
    ReplyTooLong,
    make_history_call,
)
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.text.strict_json import MAX_ARGUMENT_BYTES


def assemble(*events: BlockEvent, cut: str | None = None) -> ModelReply:
    assembly = ReplyAssembler()
    for event in events:
        assembly.feed_event(event)
    return assembly.get_reply_so_far(cut)


def call(index: int, name: str, arguments: str, provider_id: str | None = None) -> list[BlockEvent]:
    return [CallBlockOpened(index, provider_id, name), CallArgumentsDelta(index, arguments), CallBlockClosed(index)]


@pytest.mark.proves("A-01")
def test_text_and_calls_keep_the_order_they_came_in() -> None:
    reply = assemble(
        TextDelta("I "),
        TextDelta("look."),
        *call(0, "read", '{"path":"a"}', "x"),
        *call(1, "read", '{"path":"b"}'),
        TokenUsage(7, 3),
        ReplyFinished("calls"),
    )
    assert reply.text == "I look."
    assert [(c.name, c.arguments, c.provider_id, c.problem) for c in reply.calls] == [
        ("read", '{"path":"a"}', "x", None),
        ("read", '{"path":"b"}', None, None),
    ]
    assert reply.usage == TokenUsage(7, 3)
    assert reply.reason == "calls"


def test_a_call_is_complete_only_when_its_block_closes() -> None:
    assembly = ReplyAssembler()
    assert assembly.feed_event(CallBlockOpened(0, None, "rm")) is None
    assert assembly.feed_event(CallArgumentsDelta(0, "{}")) is None
    assert assembly.feed_event(CallArgumentsDelta(0, "")) is None
    assert assembly.feed_event(CallBlockClosed(0)) == 0
    assert assembly.get_reply_until_call(1).calls == (ProposedCall("rm", "{}"),)


def test_an_interrupted_call_is_proposed_with_a_problem_and_complete_calls_without_one() -> None:
    reply = assemble(
        *call(0, "read", "{}"),
        CallBlockOpened(1, "b", "write"),
        CallArgumentsDelta(1, "{}"),
        cut="The connection was lost.",
    )
    assert reply.calls[0].problem is None
    assert "interrupted during the call. The connection was lost." in (reply.calls[1].problem or "")
    assert reply.reason is None


def test_a_call_that_the_provider_never_closed_does_not_run_even_in_a_finished_reply() -> None:
    reply = assemble(CallBlockOpened(0, "a", "read"), CallArgumentsDelta(0, "{}"), ReplyFinished("calls"))
    assert "it is incomplete" in (reply.calls[0].problem or "")


@pytest.mark.parametrize("name", ["", "  \n"])
def test_a_call_without_a_tool_name_is_one_call_with_a_problem(name: str) -> None:
    reply = assemble(*call(0, name, "{}"), ReplyFinished("calls"))
    assert len(reply.calls) == 1
    assert "has no tool name" in (reply.calls[0].problem or "")


def test_arguments_without_an_opened_block_become_one_faulty_call() -> None:
    reply = assemble(CallArgumentsDelta(4, "{}"), CallBlockClosed(4), ReplyFinished("calls"))
    assert [bool(c.problem) for c in reply.calls] == [True]


def test_arguments_after_the_end_of_a_block_make_the_call_invalid() -> None:
    reply = assemble(*call(0, "read", "{"), CallArgumentsDelta(0, "}"), ReplyFinished("calls"))
    assert reply.calls[0].arguments == "{"
    assert "had closed it" in (reply.calls[0].problem or "")


def test_a_reused_block_number_makes_two_calls() -> None:
    reply = assemble(CallBlockOpened(0, "a", "read"), *call(0, "grep", "{}", "b"), ReplyFinished("calls"))
    assert [(c.name, c.problem is None) for c in reply.calls] == [("read", False), ("grep", True)]


@pytest.mark.parametrize(
    ("arguments", "whole"), [("", False), ('{"path": "a', False), ('{"path": "a"}', True), ("{}", True)]
)
def test_the_last_call_of_a_reply_at_its_output_limit_runs_only_if_complete(arguments: str, whole: bool) -> None:
    reply = assemble(*call(0, "read", "{}"), *call(1, "write", arguments), ReplyFinished("length"))
    assert reply.calls[0].problem is None
    assert (reply.calls[1].problem is None) is whole


def test_arguments_beyond_the_size_limit_are_dropped_as_they_arrive() -> None:
    piece = "x" * (1024 * 1024)
    events = [CallArgumentsDelta(0, piece) for _ in range(MAX_ARGUMENT_BYTES // len(piece) + 1)]
    reply = assemble(CallBlockOpened(0, None, "write"), *events, CallBlockClosed(0), ReplyFinished("calls"))
    assert "longer than" in (reply.calls[0].problem or "")
    assert len(reply.calls[0].arguments) <= 2_000


def test_a_reply_beyond_the_size_limit_is_cut() -> None:
    assembly = ReplyAssembler()
    piece = "x" * (1024 * 1024)
    with pytest.raises(ReplyTooLong):
        for _ in range(MAX_REPLY_UNITS // len(piece) + 1):
            assembly.feed_event(TextDelta(piece))


def test_calls_beyond_the_limit_of_a_reply_are_cut() -> None:
    assembly = ReplyAssembler()
    with pytest.raises(ReplyTooLong, match=str(MAX_CALLS)):
        for index in range(MAX_CALLS + 1):
            assembly.feed_event(CallBlockOpened(index, None, "read"))
    assert len(assembly.get_reply_so_far("too long").calls) == MAX_CALLS


def test_a_character_split_over_two_events_is_one_character() -> None:
    assembly = ReplyAssembler()
    seen = [assembly.feed_event(TextDelta("a\ud83d")), assembly.feed_event(TextDelta("\ude00b"))]
    assert seen == ["a", "😀b"]
    assert assembly.get_reply_so_far().text == "a😀b"


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    assert assemble(TextDelta("a\ud83d"), ReplyFinished("end")).text == "a\ufffd"


_EVENTS = st.lists(
    st.one_of(
        st.builds(TextDelta, st.text(alphabet=st.characters(), max_size=8)),
        st.builds(
            CallBlockOpened,
            st.integers(0, 4),
            st.none() | st.sampled_from(["", "a", "b", "x y", "é", "z" * 90]),
            st.sampled_from(["read", "", "a b", "\ud800", "n" * 90]),
        ),
        st.builds(
            CallArgumentsDelta, st.integers(0, 4), st.sampled_from(["{", "}", "{}", '"a":1', "NaN", "\udc00", "[]"])
        ),
        st.builds(CallBlockClosed, st.integers(0, 4)),
        st.builds(ProviderBlock, st.just("anthropic"), st.just({"type": "thinking"})),
        st.builds(TokenUsage, st.integers(0, 9), st.integers(0, 9)),
        st.builds(ReplyFinished, st.sampled_from(["end", "calls", "length", "refused", "other"])),
    ),
    max_size=30,
)


@given(st.lists(_EVENTS, max_size=4), st.none() | st.just("lost"))
def test_any_stream_gives_one_result_per_call_and_a_history_that_can_be_sent(
    replies: list[list[BlockEvent]], cut: str | None
) -> None:
    conversation = Conversation()
    conversation.add_user_message("task")
    ids: list[str] = []
    for events in replies:
        reply = assemble(*events, cut=cut)
        answers = [CallAnswer(str(n), c.name, Result.output(n), Result.output(n)) for n, c in enumerate(reply.calls)]
        conversation.add_reply(reply, [answer.call_id for answer in answers])
        conversation.add_call_answers(dict(enumerate(answers)))
        reply.text.encode()
    for before, message in zip((None, *conversation.messages), conversation.messages, strict=False):
        if isinstance(message, AssistantMessage):
            ids += [part.wire_id for part in message.calls]
            for part in message.calls:
                assert 0 < len(part.name) <= 64
                assert part.name.isascii()
        elif before is not None and not hasattr(message, "text"):
            assert isinstance(before, AssistantMessage)
    assert len(ids) == len(set(ids))


def test_a_usable_and_unused_provider_id_is_kept() -> None:
    ids = HistoryCallIdAllocator()
    assert ids.allocate_unique_id("call_1") == "call_1"
    second, third, fourth = (
        ids.allocate_unique_id("call_1"),
        ids.allocate_unique_id(None),
        ids.allocate_unique_id("not an id"),
    )
    assert len({"call_1", second, third, fourth}) == 4
    assert all(len(wire_id) == 9 and wire_id.isalnum() for wire_id in (second, third, fourth))


def test_a_generated_call_id_never_repeats_an_id_of_the_provider() -> None:
    ids = HistoryCallIdAllocator()
    assert ids.allocate_unique_id("hr0000001") == "hr0000001"
    assert ids.allocate_unique_id(None) == "hr0000002"


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}', '{"a":1,"a":2}', "[" * 9_999])
def test_arguments_that_are_not_an_object_are_stored_as_an_object(arguments: str) -> None:
    part = make_history_call(ProposedCall("read", arguments), "w")
    assert part.arguments == {"unreadable_arguments": arguments[:2_000]}


def test_equal_results_give_the_model_the_same_text() -> None:
    first = Result.output({"b": 1, "a": "é"}, duration_ms=1.0, truncated=True, output_path="/o/1")
    again = Result.output({"b": 1, "a": "é"}, duration_ms=2.0, output_path="/o/1", truncated=True)
    assert format_result_for_model(first) == format_result_for_model(again)
    assert (
        format_result_for_model(first)
        == '{"type":"output","data":{"b":1,"a":"é"},"metadata":{"output_path":"/o/1","truncated":true}}'
    )


def test_the_text_of_an_error_has_its_kind_and_partial_data() -> None:
    text = format_result_for_model(Result.error("timeout", "too slow", {"so": "far"}, duration_ms=3))
    assert text == '{"type":"error","error_text":"too slow","data":{"so":"far"},"metadata":{"error_kind":"timeout"}}'


def test_a_reply_keeps_each_known_finish_reason() -> None:
    reasons: list[FinishReason] = ["end", "calls", "length", "refused", "other"]
    assert [assemble(ReplyFinished(reason)).reason for reason in reasons] == reasons
