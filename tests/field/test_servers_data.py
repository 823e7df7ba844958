"""Results in odd forms: content that is not a list, unusual base64, and odd member types."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tests.field.odd_servers import odd_server

from handrail.contract.calls_and_results import Blob
from handrail.contract.result_conversions import convert_mcp_content_to_result, convert_result_to_mcp_content

BYTES = bytes(range(251)) * 4 + b"\xfb\xff\xfe"
PLAIN = base64.b64encode(BYTES).decode()
CODED = {
    "plain": PLAIN,
    "for URLs": base64.urlsafe_b64encode(BYTES).decode(),
    "without padding": PLAIN.rstrip("="),
    "for URLs without padding": base64.urlsafe_b64encode(BYTES).decode().rstrip("="),
    "lines": base64.encodebytes(BYTES).decode(),
    "MIME lines": base64.encodebytes(BYTES).decode().replace("\n", "\r\n"),
    "a data head": f"data:image/png;base64,{PLAIN}",
    "a data head with parameters": f"data:image/png;name=a.png;base64,{PLAIN}",
    "spaces around": f"  {PLAIN}\n",
}


@pytest.mark.parametrize("coded", CODED.values(), ids=CODED)
@pytest.mark.parametrize("kind", ["image", "audio", "resource"])
def test_every_variant_of_base64_is_decoded(kind: str, coded: str) -> None:
    block: dict[str, Any] = {"type": kind, "data": coded, "mimeType": "image/png"}
    if kind == "resource":
        block = {"type": kind, "resource": {"uri": "x:y", "blob": coded, "mimeType": "image/png"}}
    (part,) = convert_mcp_content_to_result({"content": [block]}).data
    blob = part["resource"]["blob"] if kind == "resource" else part
    assert isinstance(blob, Blob) and blob.data == BYTES and blob.media_type == "image/png"


def test_a_data_url_sets_the_media_type_and_undecodable_data_keeps_a_reason() -> None:
    (part,) = convert_mcp_content_to_result(
        {"content": [{"type": "image", "data": f"data:image/webp;base64,{PLAIN}"}]}
    ).data
    assert part.media_type == "image/webp"
    (text,) = convert_mcp_content_to_result({"content": [{"type": "image", "data": "data:text/plain,a%20b"}]}).data
    assert text.data == b"a b"
    for odd in ("!!!", 7, None, ["x"]):
        (left,) = convert_mcp_content_to_result(
            {"content": [{"type": "image", "data": odd, "mimeType": "image/png"}]}
        ).data
        assert "not base64" in left["problem"] and left.get("data") == odd


ANSWERS: dict[str, tuple[Any, Any]] = {
    "a text": ({"content": "said"}, "said"),
    "one block": ({"content": {"type": "text", "text": "said"}}, "said"),
    "texts": ({"content": ["a", "b"]}, ["a", "b"]),
    "an object": ({"content": {"rows": [1]}}, [{"rows": [1]}]),
    "a number": ({"content": 7}, "7"),
    "false": ({"content": False}, "false"),
    "a list with nothing": ({"content": [None, {"type": "text", "text": "a"}]}, ["null", "a"]),
    "a block without a type": ({"content": [{"text": "said"}]}, "said"),
    "a text that is none": ({"content": [{"type": "text", "text": {"a": 1}}]}, '{"a": 1}'),
    "an unknown block": ({"content": [{"type": "chart", "rows": 1}]}, [{"type": "chart", "rows": 1}]),
    "the first protocol": ({"toolResult": {"a": 1}}, [{"toolResult": {"a": 1}}]),
    "null": ({"content": None}, "The server sent a result without content."),
    "nothing": ({}, "The server sent a result without content."),
    "an empty list": ({"content": []}, None),
    "structured only": ({"structuredContent": {"a": 1}}, {"a": 1}),
    "a structured list": ({"content": [], "structuredContent": [1, 2]}, [1, 2]),
    "a structured text": ({"content": None, "structuredContent": "x"}, "x"),
    "structured nothing": ({"content": [{"type": "text", "text": "a"}], "structuredContent": None}, "a"),
    "members that are null": ({"content": [{"type": "text", "text": "a", "annotations": None, "_meta": None}]}, "a"),
    "isError false": ({"content": "a", "isError": "false"}, "a"),
    "isError null": ({"content": "a", "isError": None}, "a"),
}


@pytest.mark.parametrize(("answer", "data"), ANSWERS.values(), ids=ANSWERS)
def test_a_result_in_an_unusual_form_is_accepted(answer: Any, data: Any) -> None:
    result = convert_mcp_content_to_result(answer)
    assert result.ok and result.data == data
    assert isinstance(convert_result_to_mcp_content(result)["content"], list)


@pytest.mark.parametrize("flag", [True, 1, "true", "True"])
def test_every_form_of_the_error_flag_makes_an_error_result(flag: Any) -> None:
    result = convert_mcp_content_to_result({"content": "no such row", "isError": flag})
    assert not result.ok and result.error_text == "no such row"


@pytest.mark.parametrize(
    "answer", ["'just text'", "['a', {'type': 'text', 'text': 'b'}]", "None", "7", "{'content': 'x'}"]
)
async def test_a_call_with_an_odd_answer_succeeds_and_the_next_call_works(tmp_path: Path, answer: str) -> None:
    habit = f"""
count = [0]
def call(number, params):
    count[0] += 1
    answer(number, {answer} if count[0] == 1 else text("said hi"))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        first = await session.call("t_echo", {"text": "hi"})
        assert first.ok and first.data is not None
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


def test_annotations_of_content_blocks_are_preserved() -> None:
    about = {"annotations": {"audience": ["user"], "priority": 0.5}, "_meta": {"x": 1}}
    content = [
        {"type": "text", "text": "a", **about},
        {"type": "resource", "resource": {"uri": "x:y", "text": "t"}, **about},
        {"type": "resource_link", "uri": "x:y", "name": "y", **about},
    ]
    assert convert_result_to_mcp_content(convert_mcp_content_to_result({"content": content}))["content"] == content
    failed = convert_mcp_content_to_result({"content": content[:1], "isError": True})
    assert failed.error_text == "a"


OFFERS = """
CAPABILITIES = {"tools": {}, "resources": {}, "prompts": {}}
def other(number, method, params):
    lists = {"resources/list": {"resources": [{"uri": "x:one"}]}, "prompts/list": {"prompts": [{"name": "greet"}]}}
    if method in lists:
        answer(number, lists[method])
    elif method == "resources/read":
        answer(number, READ)
    elif method == "prompts/get":
        answer(number, PROMPT)
    elif number is not None:
        fail(number, -32601)
"""
READS: dict[str, tuple[str, Any]] = {
    "a text": ("'said'", "said"),
    "an object": ("{'uri': 'x:one', 'text': 'said'}", "said"),
    "without a uri": ("[{'text': 'said'}]", "said"),
    "a text that is none": ("[{'uri': 'x:one', 'text': {'a': 1}}]", '{"a": 1}'),
}
WHOLE_READS = {
    "a list": "[{'uri': 'x:one', 'text': 'said'}]",
    "a text": "'said'",
    "content": "{'content': [{'uri': 'x:one', 'text': 'said'}]}",
    "one content": "{'content': {'text': 'said'}}",
    "one resource": "{'resource': {'text': 'said'}}",
    "the content itself": "{'uri': 'x:one', 'text': 'said'}",
    "null and content": "{'contents': None, 'content': 'said'}",
}


@pytest.mark.parametrize("answer", WHOLE_READS.values(), ids=WHOLE_READS)
async def test_a_resource_in_another_answer_is_read(tmp_path: Path, answer: str) -> None:
    async with odd_server(tmp_path, f"{OFFERS}\nREAD = {answer}\n") as (kernel, _):
        (offering,) = (one for one in kernel.generation.resource_providers if one.source == "t")
        runtime: Any = None
        assert await offering.read("x:one", runtime) == {"contents": [{"uri": "x:one", "text": "said"}]}


@pytest.mark.parametrize("answer", ["['said']", "'said'", "{'content': 'said'}", "{'prompt': 'said'}"])
async def test_a_prompt_in_another_answer_is_accepted(tmp_path: Path, answer: str) -> None:
    async with odd_server(tmp_path, f"{OFFERS}\nPROMPT = {answer}\n") as (kernel, _):
        (offering,) = (one for one in kernel.generation.resource_providers if one.source == "t")
        runtime: Any = None
        got = await offering.get_prompt("t_greet", {}, runtime)
        assert got == {"messages": [{"role": "user", "content": {"type": "text", "text": "said"}}]}


async def test_arguments_of_a_prompt_by_name_are_listed(tmp_path: Path) -> None:
    arguments = "{'who': {'description': 'Name.', 'required': True}, 'how': None}"
    habit = OFFERS.replace('{"name": "greet"}', f'{{"name": "greet", "arguments": {arguments}}}')
    async with odd_server(tmp_path, habit) as (kernel, _):
        (offering,) = (one for one in kernel.generation.resource_providers if one.source == "t")
        (prompt,) = offering.prompts
        assert [(one.name, one.required) for one in prompt.arguments] == [("who", True), ("how", False)]


@pytest.mark.parametrize("token", ["str(token)", "float(token)"])
async def test_progress_with_a_token_in_another_form_belongs_to_its_call(tmp_path: Path, token: str) -> None:
    habit = f"""
def call(number, params):
    token = params["_meta"]["progressToken"]
    put(json.dumps({{"jsonrpc": "2.0", "method": "notifications/progress",
                    "params": {{"progressToken": {token}, "progress": 1, "total": 2, "message": "half"}}}}))
    answer(number, text("said hi"))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        told: list[str] = []
        session.watch_events(
            lambda event: told.append(str(event.data.get("message"))) if event.kind == "progress" else None
        )
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert told == ["half"]


@pytest.mark.parametrize(("contents", "text"), READS.values(), ids=READS)
async def test_a_resource_in_an_unusual_form_is_read(tmp_path: Path, contents: str, text: str) -> None:
    habit = f"{OFFERS}\nREAD = {{'contents': {contents}}}\n"
    async with odd_server(tmp_path, habit) as (kernel, _):
        (offering,) = (one for one in kernel.generation.resource_providers if one.source == "t")
        runtime: Any = None
        assert await offering.read("x:one", runtime) == {"contents": [{"uri": "x:one", "text": text}]}


@pytest.mark.parametrize(
    "messages",
    [
        "'said'",
        "['said']",
        "{'role': 'user', 'content': 'said'}",
        "[{'content': ['said']}]",
        "[{'role': 'system', 'content': [{'type': 'text', 'text': 'said'}]}]",
    ],
)
async def test_a_prompt_in_an_unusual_form_is_accepted(tmp_path: Path, messages: str) -> None:
    habit = f"{OFFERS}\nPROMPT = {{'messages': {messages}}}\n"
    async with odd_server(tmp_path, habit) as (kernel, _):
        (offering,) = (one for one in kernel.generation.resource_providers if one.source == "t")
        runtime: Any = None
        got = await offering.get_prompt("t_greet", {}, runtime)
        assert got == {"messages": [{"role": "user", "content": {"type": "text", "text": "said"}}]}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"code": -32602, "message": "Invalid params", "data": "text: is too long"}, ["Invalid params", "is too long"]),
        ({"code": -32602, "message": None, "data": {"why": "too long"}}, ["too long"]),
        ({"code": 7, "message": {"detail": "too long"}}, ["too long", "error 7"]),
        ({"code": "E7", "data": [{"path": ["text"], "message": "too long"}]}, ["too long"]),
        ({"message": "too long", "data": "too long"}, ["returned an error: too long (error"]),
        ("too long", ["too long"]),
        ({}, ["without a message"]),
    ],
)
async def test_the_details_of_an_error_are_lost(tmp_path: Path, error: object, words: list[str]) -> None:
    habit = f"""
def call(number, params):
    put(json.dumps({{"jsonrpc": "2.0", "id": number, "error": json.loads({json.dumps(json.dumps(error))})}}))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        said = (await session.call("t_echo", {"text": "hi"})).error_text
    assert said is not None and all(word in said for word in words) and "None" not in said, said
