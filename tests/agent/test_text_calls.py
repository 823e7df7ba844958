"""Calls that a model writes in its text: which are recognised, and that they round-trip."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent.test_script import model_of

from handrail import open_kernel
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import (
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    ModelRequest,
    TextDelta,
)
from handrail.agent.text_tool_calls import GRAMMARS, TEXT_FORMS, TextCallModel, TextCallReader, TextForm

SCHEMAS: dict[str, dict[str, Any]] = {
    "edit": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
        "required": ["path", "old", "new"],
    },
    "put": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "list": {"type": "array"}, "any": {}, "on": {"type": "boolean"}},
    },
}
FORM = pytest.mark.parametrize("form", TEXT_FORMS)
pytestmark = pytest.mark.proves("A-09")

Call = tuple[str, dict[str, Any]]


def read(form: TextForm, pieces: Iterable[str]) -> tuple[str, list[Call], list[int]]:
    """The text, the calls, and the positions of those that were closed. Arguments that are no JSON stand under ``raw``."""
    reader = TextCallReader(GRAMMARS[form], SCHEMAS)
    events: list[BlockEvent] = [event for piece in pieces for event in reader.feed_text(piece)]
    events += reader.end_text()
    said, names, arguments, closed = "", list[str](), dict[int, str](), list[int]()
    for event in events:
        match event:
            case TextDelta(text):
                said += text
            case CallBlockOpened(index, _, name):
                assert index == len(names)
                names.append(name)
            case CallArgumentsDelta(index, text):
                arguments[index] = arguments.get(index, "") + text
            case CallBlockClosed(index):
                closed.append(index)
            case _:
                pytest.fail(f"unexpected {event}")
    calls: list[Call] = []
    for n, name in enumerate(names):
        try:
            calls.append((name, json.loads(arguments.get(n, "{}"))))
        except ValueError:
            calls.append((name, {"raw": arguments[n]}))
    return said, calls, closed


def test_calls_in_the_bracket_form_are_read() -> None:
    text = "Let me look.\n[/bash]@@command=ls -la [bash/]\n"
    assert read("bracket", [text]) == ("Let me look.\n\n", [("bash", {"command": "ls -la"})], [0])
    text = "[/edit]@@path=a.py\n@@old<<END\nx = 1\n\ny = 2\nEND\n@@new=x = 3\n[edit/]"
    assert read("bracket", [text])[1] == [("edit", {"path": "a.py", "old": "x = 1\n\ny = 2", "new": "x = 3"})]
    text = "[/edit]@@path=a.py\n@@old=b\ntwo\n@@lines=1\n[edit/]"  # the one text that is left may stand as it is
    assert read("bracket", [text])[1] == [("edit", {"path": "a.py", "old": "b", "new": "two\n@@lines=1"})]


def test_calls_in_the_xml_form_are_read() -> None:
    text = 'Now:\n<call name="edit">\n<arg name="path">a.py</arg>\n<arg name="old">\nif a &lt; b & c:\n</arg>\n<arg name="new">if a < b:</arg>\n</call>'
    said, calls, closed = read("xml", [text])
    assert (said, closed) == ("Now:\n", [0])
    assert calls == [("edit", {"path": "a.py", "old": "if a < b & c:", "new": "if a < b:"})]


@FORM
def test_values_of_text_calls_have_the_types_of_the_schema(form: TextForm) -> None:
    values = {"bracket": "[/put]@@n=3\n@@list=[1, 2]\n@@on=yes\n@@any=3\n[put/]"}
    values["xml"] = (
        '<call name="put"><arg name="n">3</arg><arg name="list">[1, 2]</arg><arg name="on">yes</arg><arg name="any">3</arg></call>'
    )
    assert read(form, [values[form]])[1] == [("put", {"n": 3, "list": [1, 2], "on": "yes", "any": "3"})]


@FORM
def test_a_call_in_a_code_block_or_within_a_line_is_text(form: TextForm) -> None:
    call = GRAMMARS[form].format_call("edit", {"path": "a"})
    for text in (f"as in {call}", f"```\n{call}\n```\n", f"~~~ text\n{call}\n```\n{call}\n~~~\nafter"):
        assert read(form, [text]) == (text, [], [])
    assert read(form, [f"```\nx\n```\n{call}"])[1] == [("edit", {"path": "a"})]
    assert read(form, [f"```not a fence``` \n{call}"])[1] == [("edit", {"path": "a"})]


@FORM
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_inside_a_longer_fence_or_thoughts_is_text(form: TextForm, size: int) -> None:
    call = GRAMMARS[form].format_call("edit", {"path": "a"})
    long = "and so on " * 20
    for quoted in (
        f"````md\n```\n{call}\n```\n{call}\n````\n",
        f"~~~~\n~~~\n{call}\n~~~~~\n",
        f"<think>\nI could write\n{call}\n```\nor not. {long}</think>\n",
        f"<thinking>{long}\n{call}\n</think>\n{call}</thinking>\n",
        f"<think>{long}</think>\n",
    ):
        cut = [quoted[at : at + size] for at in range(0, len(quoted), size)]
        assert read(form, cut) == (quoted, [], [])
        assert read(form, [*cut, call]) == (quoted, [("edit", {"path": "a"})], [0])


def test_a_multi_line_value_without_an_end_marker_is_refused() -> None:
    """The model wrote the closing tag in it and did not mark that."""
    text = "[/edit]@@path=a\n@@old<<END\nfirst [edit/] second\nEND\n@@new=x[edit/]"
    (_, arguments), *_ = read("bracket", [text])[1]
    assert arguments.keys() == {"path", "old without a final line END"}


@FORM
def test_a_text_call_that_is_not_closed_is_never_complete(form: TextForm) -> None:
    call = GRAMMARS[form].format_call("edit", {"path": "a", "old": "b", "new": "c"})
    for cut in range(1, len(call)):
        _, calls, closed = read(form, [call[:cut]])
        assert closed == [] and len(calls) <= 1


@FORM
def test_text_outside_the_arguments_of_a_call_is_kept_under_an_unknown_name(form: TextForm) -> None:
    stray = {"bracket": "[/put]loose words[put/]", "xml": '<call name="put">loose words</call>'}
    (_, arguments), *_ = read(form, [stray[form]])[1]
    assert list(arguments.values()) == ["loose words"] and not arguments.keys() & SCHEMAS["put"]["properties"].keys()


def test_a_repeated_key_stays_in_the_arguments_twice() -> None:
    reader = TextCallReader(GRAMMARS["bracket"], SCHEMAS)
    events = list(reader.feed_text("[/edit]@@path=a\n@@path=b\n[edit/]"))
    assert CallArgumentsDelta(0, '{"path":"a","path":"b"}') in events


_TEXT = st.text(alphabet=st.sampled_from("ab \n\t\\@<>&;[]/=`'\"é=END_")) | st.text(
    alphabet=st.characters(exclude_categories=("Cs",))
)
_TRICKY = st.sampled_from(
    ["[edit/]", "\\[edit/]", "\\\\[edit/]", "</arg>", "</call>", "&lt;", "\n", "END\nEND", "@@path=x"]
)


@FORM
@given(texts=st.lists(_TEXT | _TRICKY, min_size=3, max_size=3), cuts=st.sets(st.integers(0, 200)))
def test_a_written_text_call_reads_back_in_pieces_of_any_size(form: TextForm, texts: list[str], cuts: set[int]) -> None:
    arguments: dict[str, Any] = dict(zip(("path", "old", "new"), texts, strict=True))
    text = f"Before.\n{GRAMMARS[form].format_call('edit', arguments)}\nAfter."
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    assert read(form, pieces) == ("Before.\n\nAfter.", [("edit", arguments)], [0])


@FORM
@given(
    st.dictionaries(
        st.sampled_from(["n", "list", "on"]), st.recursive(st.none() | st.booleans() | st.integers() | _TEXT, st.lists)
    )
)
def test_json_values_survive_formatting_and_reading(form: TextForm, values: dict[str, Any]) -> None:
    quoted = {key: value for key, value in values.items() if not isinstance(value, str)}
    assert read(form, [GRAMMARS[form].format_call("put", quoted)])[1] == [("put", quoted)]


@FORM
@given(st.text(alphabet=st.sampled_from('ab[]/\\<>call arg name="edit"@=`~\n')), st.integers(1, 7))
def test_any_text_is_read_the_same_in_one_piece_and_in_fragments(form: TextForm, text: str, size: int) -> None:
    whole = read(form, [text])
    assert read(form, [text[n : n + size] for n in range(0, len(text), size)]) == whole


@FORM
def test_a_hostile_stream_is_read_with_a_bounded_buffer(form: TextForm) -> None:
    reader = TextCallReader(GRAMMARS[form], SCHEMAS)
    held = 0
    opening = {"bracket": "[/edit]", "xml": '<call name="edit">'}[form]
    for piece in (" " * 50_000, "\n", opening, "\\" * 50_000, opening[0] * 50_000):
        for character in piece if piece[0] in " \\[<" and len(piece) > 100 else [piece]:
            for _ in reader.feed_text(character):
                pass
            held = max(held, len(reader._held))  # pyright: ignore[reportPrivateUsage]
    assert held <= 100


@FORM
def test_a_hostile_call_body_is_written_and_read_back_unchanged(form: TextForm) -> None:
    slashes, unclosed = "\\" * 200_000, '<arg name="a">' * 20_000
    opening = {"bracket": "[/edit]", "xml": '<call name="edit">'}[form]
    closing = GRAMMARS[form].closing_tag("edit")
    for hostile in (slashes, unclosed, "@@a<<END\n" * 20_000):
        assert read(form, [f"{opening}{hostile}\n{closing}"])[2] == [0]
        written = GRAMMARS[form].format_call("edit", {"path": "a", "old": "b", "new": hostile})
        assert read(form, [written])[1] == [("edit", {"path": "a", "old": "b", "new": hostile})]
    assert read(form, ["\n" * 500_000])[1] == []


@FORM
async def test_an_agent_runs_with_a_model_that_writes_its_calls_as_text(form: TextForm, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("seven\n")
    grammar = GRAMMARS[form]
    read_it = grammar.format_call("read", {"path": "note.txt"})
    write_it = grammar.format_call("write", {"path": "new.txt", "content": "line\n"})
    model = model_of(
        {"text": f"First I look.\n{read_it}\n", "expect": {"prompt": "Calling tools"}},
        {"text": f"{write_it}\n{write_it[:-3]}", "expect": {"task": "seven"}},
        {"text": "Done."},
    )
    seen: list[ModelRequest] = []
    stream = model.stream

    def watched(request: ModelRequest) -> Any:
        seen.append(request)
        return stream(request)

    model.stream = watched
    async with open_kernel(workspace=tmp_path / "work", state=tmp_path / "state", rules=["allow write"]) as kernel:
        session = await kernel.session(headless=True)
        outcome = await Agent(session, TextCallModel(model, form), workspace=session.workdir).complete(
            "look, then write"
        )
    assert outcome.status == "answered" and outcome.calls == 3
    assert (tmp_path / "work" / "new.txt").read_text() == "line\n"
    assert all(not request.tools and "does nothing" not in request.system for request in seen)
    told = seen[2].messages[-1]
    assert "Result of call 1 (write)" in str(told) and "it is incomplete" in str(told)
