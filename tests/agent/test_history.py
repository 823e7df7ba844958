"""A conversation is restored unchanged, and each provider accepts every restored part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.agent.conversation import LOST, VERSION, encode_message, restore_conversation
from handrail.agent.model_protocol import (
    AssistantMessage,
    CallResult,
    CallResultsMessage,
    HistoryCallPart,
    Message,
    ModelRequest,
    ProviderBlock,
    TextPart,
    UserMessage,
)
from handrail.agent.providers import anthropic as anthropic_provider
from handrail.agent.providers import openai as openai_provider
from handrail.contract.services.history_and_skill_services import HistoryEntry
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.testing.provider_request_checks import find_anthropic_faults, find_chat_completions_faults

_TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_SAID = _TEXTS.filter(lambda text: bool(text.strip()))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)
_OBJECTS = st.dictionaries(_TEXTS, _JSON, max_size=3)
_NAMES = st.text("abcXYZ09_-", min_size=1, max_size=64)
_PARTS = st.one_of(
    st.builds(TextPart, _SAID),
    st.builds(ProviderBlock, st.sampled_from(["anthropic", "openai"]), st.just({"type": "thinking", "signature": "s"})),
    st.tuples(_NAMES, _OBJECTS),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Whole exchanges, as a run leaves them."""
    messages: list[Message] = []
    count = 0
    for _ in range(draw(st.integers(0, 4))):
        messages.append(UserMessage(draw(_TEXTS)))
        for _ in range(draw(st.integers(0, 3))):
            parts: list[TextPart | HistoryCallPart | ProviderBlock] = []
            results: list[CallResult] = []
            for part in draw(st.lists(_PARTS, max_size=4)):
                if isinstance(part, tuple):
                    count += 1
                    parts.append(HistoryCallPart(f"call_{count}", *part))
                    results.append(CallResult(f"call_{count}", draw(_TEXTS), draw(st.booleans())))
                else:
                    parts.append(part)
            if any(not isinstance(part, ProviderBlock) for part in parts):
                messages.append(AssistantMessage(tuple(parts)))
                messages += [CallResultsMessage(tuple(results))] if results else []
    return messages


def rows_of(messages: list[Message]) -> list[HistoryEntry]:
    """The messages as they come back out of the database."""
    rows: list[HistoryEntry] = []
    for position, message in enumerate(messages):
        calls = message.calls if isinstance(message, AssistantMessage) else ()
        data = encode_message(message, [f"s/{position}.{n}" for n in range(len(calls))])
        rows.append((position, decode_json_with_fallback(encode_json_with_fallback(data))))
    return rows


def faults_in(messages: list[Message]) -> list[str]:
    """Return why a provider would refuse to continue from here."""
    request = ModelRequest("system", [*messages, UserMessage("go on")], [])
    openai = {"messages": list(openai_provider._messages(request))}  # pyright: ignore[reportPrivateUsage]
    anthropic = {
        "max_tokens": 1,
        "messages": anthropic_provider._messages(request.messages),  # pyright: ignore[reportPrivateUsage]
    }
    return find_chat_completions_faults(openai) + find_anthropic_faults(anthropic)


@pytest.mark.proves("A-10")
@given(conversations())
def test_any_stored_conversation_is_restored_unchanged(messages: list[Message]) -> None:
    found = restore_conversation(rows_of(messages))
    assert found.messages == messages
    assert found.open is None
    assert found.next_position == len(messages)


@pytest.mark.proves("A-10")
@given(conversations(), st.data())
def test_any_subset_of_the_stored_rows_restores_to_a_history_that_a_provider_accepts(
    messages: list[Message], data: st.DataObject
) -> None:
    rows = rows_of(messages)
    kept = [row for row in rows if data.draw(st.booleans(), label=f"row {row[0]} is there")]
    found = restore_conversation(kept)
    history = list(found.messages)
    if found.open is not None:
        assert found.open.unanswered_calls
        history += (found.open.message, found.open.build_call_results_message())
    assert faults_in(history) == []
    assert isinstance(history[0], UserMessage) if history else True
    users = [message for message in messages if isinstance(message, UserMessage)]
    assert sum(isinstance(message, UserMessage) for message in history) <= len(users)


@given(conversations(), st.data())
def test_a_truncated_history_keeps_every_exchange_before_the_cut(messages: list[Message], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(messages)))
    found = restore_conversation(rows_of(messages)[:end])
    if end and isinstance(messages[end - 1], AssistantMessage) and messages[end - 1].calls:  # type: ignore[union-attr]
        assert found.open is not None and found.open.message == messages[end - 1]
        assert [call_id for _, _, call_id in found.open.unanswered_calls] == [
            f"s/{end - 1}.{n}" for n in range(len(found.open.call_ids))
        ]
        assert found.messages == messages[: end - 1]
    else:
        assert found.open is None
        assert found.messages == messages[:end]


_HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", "a", "a b", "user", "x" * 70, "\ud800"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "v",
                    "role",
                    "text",
                    "parts",
                    "results",
                    "of",
                    "error",
                    "call",
                    "name",
                    "arguments",
                    "id",
                    "kept",
                    "block",
                    "partial",
                ]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)
_ROWS = st.one_of(
    st.dictionaries(st.text(max_size=3), _HOSTILE, max_size=3),
    st.fixed_dictionaries({"v": st.just(VERSION), "role": st.just("user"), "text": _HOSTILE}),
    st.fixed_dictionaries(
        {
            "v": st.just(VERSION),
            "role": st.just("assistant"),
            "parts": st.lists(
                st.one_of(
                    _HOSTILE,
                    st.fixed_dictionaries(
                        {
                            "call": st.sampled_from(["a", "b", "a b", ""]),
                            "name": _TEXTS,
                            "arguments": _HOSTILE,
                            "id": _HOSTILE,
                        }
                    ),
                    st.fixed_dictionaries({"text": _TEXTS}),
                ),
                max_size=4,
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "v": st.just(VERSION),
            "role": st.just("results"),
            "results": st.lists(
                st.fixed_dictionaries(
                    {"of": st.sampled_from(["a", "b", "a b", ""]), "text": _TEXTS, "error": _HOSTILE}
                ),
                max_size=4,
            ),
        }
    ),
)


@given(st.lists(_ROWS, max_size=8))
def test_foreign_rows_are_restored_to_a_history_that_providers_accept(
    rows: list[dict[str, Any]],
) -> None:
    found = restore_conversation(enumerate(rows))
    history = list(found.messages)
    if found.open is not None:
        history += (found.open.message, found.open.build_call_results_message())
    assert faults_in(history) == []


def test_answers_in_a_partial_row_are_not_requested_again() -> None:
    reply = AssistantMessage((HistoryCallPart("a", "read", {}), HistoryCallPart("b", "write", {})))
    partial = encode_message(CallResultsMessage((CallResult("b", "done", False),)), partial=True)
    rows: list[HistoryEntry] = [
        (0, encode_message(UserMessage("task"))),
        (1, encode_message(reply, ["s/1.0", "s/1.1"])),
        (2, partial),
    ]
    found = restore_conversation(rows)
    assert found.open is not None
    assert [(position, call_id) for position, _, call_id in found.open.unanswered_calls] == [(0, "s/1.0")]
    whole = encode_message(CallResultsMessage((CallResult("a", "seen", False), CallResult("b", "done", False))))
    again = restore_conversation([*rows, (3, whole)])
    assert again.open is None and again.messages[-1] == CallResultsMessage(
        (CallResult("a", "seen", False), CallResult("b", "done", False))
    )


def test_a_call_whose_answer_was_lost_gets_an_error_result() -> None:
    reply = AssistantMessage((HistoryCallPart("a", "write", {}),))
    rows: list[HistoryEntry] = [
        (0, encode_message(UserMessage("task"))),
        (1, encode_message(reply, ["s/1.0"])),
        (5, encode_message(UserMessage("?"))),
    ]
    found = restore_conversation(rows)
    assert found.messages[2] == CallResultsMessage((CallResult("a", LOST, True),))
    assert found.next_position == 6


def test_a_history_row_of_a_later_version_is_ignored() -> None:
    rows: list[HistoryEntry] = [
        (0, encode_message(UserMessage("task"))),
        (1, {**encode_message(UserMessage("later")), "v": VERSION + 1}),
    ]
    assert restore_conversation(rows).messages == [UserMessage("task")]
