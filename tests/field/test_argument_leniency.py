"""Reports about arguments that arrive as the JSON text of the right value, or as null for an optional one."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent.provider_bench import Kind as ProviderKind
from tests.agent.provider_bench import bench, each_provider
from tests.upstream.scripted_mcp_servers import StdioServerProgram, approve_server_tools, make_tool_entry

from handrail.agent.agent_loop import Agent
from handrail.contract.schema.argument_repair import list_corrections, repair_arguments
from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_arguments_with_note
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.provider_servers import ReplyCall, ScriptedReply
from handrail.testing.scripted_kernel import temporary_kernel

RULES = ("allow edit", "allow multi_edit", "allow write", "allow demo.*", "allow mcp:t:*")
ITEM = {
    "type": "object",
    "properties": {"old": {"type": "string"}, "all": {"type": "boolean"}},
    "required": ["old"],
    "additionalProperties": False,
}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer", "minimum": 1},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array", "items": ITEM},
    "options": {"type": "object", "properties": {"depth": {"type": "integer"}}, "additionalProperties": False},
    "either": {"type": ["string", "integer"]},
    "choice": {"oneOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
    "short": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
    "level": {"enum": [1, 2]},
    "word": {"enum": ["on", "1"]},
    "nullable": {"type": ["integer", "null"]},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
    "shared": {"$ref": "#/$defs/shared"},
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["text"],
    "$defs": {"shared": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
}
TAKEN: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"count": "2"}, {"count": 2}, ["count"]),
    ({"count": " 2\n"}, {"count": 2}, ["count"]),
    ({"count": "2.0"}, {"count": 2}, ["count"]),
    ({"ratio": "2"}, {"ratio": 2}, ["ratio"]),
    ({"ratio": "-1.5e1"}, {"ratio": -15.0}, ["ratio"]),
    ({"flag": "true"}, {"flag": True}, ["flag"]),
    ({"items": '[{"old": "a"}]'}, {"items": [{"old": "a"}]}, ["items"]),
    (
        {"items": '[{"old": "a\nb", "all": "true"}]'},
        {"items": [{"old": "a\nb", "all": True}]},
        ["items", "items[0].all"],
    ),
    ({"items": [{"old": "1", "all": "false"}]}, {"items": [{"old": "1", "all": False}]}, ["items[0].all"]),
    ({"items": ['{"old": "x"}']}, {"items": [{"old": "x"}]}, ["items[0]"]),
    ({"options": '{"depth": "3"}'}, {"options": {"depth": 3}}, ["options", "options.depth"]),
    ({"choice": '["a"]'}, {"choice": ["a"]}, ["choice"]),
    ({"choice": "7"}, {"choice": 7}, ["choice"]),
    ({"level": "1"}, {"level": 1}, ["level"]),
    ({"shared": '{"n": "4"}'}, {"shared": {"n": 4}}, ["shared", "shared.n"]),
    ({"count": None, "items": None}, {}, ["count", "items"]),
    ({"options": {"depth": None}}, {"options": {}}, ["options.depth"]),
]
KEPT: list[dict[str, Any]] = [
    {"text": "12"},
    {"text": "[1]"},
    {"either": "3"},
    {"word": "1"},
    {"nullable": None},
    {"map": {"a": "1"}},
    {"short": "12"},
]
REFUSED: list[dict[str, Any]] = [
    {"count": "two"},
    {"count": "0"},
    {"count": "1.5"},
    {"count": "true"},
    {"count": "null"},
    {"count": ""},
    {"count": '1, "flag": true'},
    {"count": '"2"'},
    {"count": True},
    {"flag": "True"},
    {"flag": "1"},
    {"flag": 1},
    {"items": "a.txt"},
    {"items": '[{"old": "a"}'},
    {"items": '[{"old": "a", "old": "b"}]'},
    {"items": '{"old": "a"}'},
    {"items": [None]},
    {"items": [{"old": None}]},
    {"short": "123"},
    {"word": "2"},
    {"text": None},
    {"text": 5},
    {"map": {"a": None}},
    {"shared": {"n": None}},
    {"count": "2", "unknown": 1},
]


class Take(Tool):
    spec = ToolSpec(
        id="demo.take", description="Give the arguments back.", parameters=PARAMETERS, side_effect="write", locks=()
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return args


def as_type(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize(("sent", "taken", "paths"), TAKEN, ids=str)
async def test_a_value_sent_as_its_json_text_is_accepted_and_reported(
    sent: dict[str, Any], taken: dict[str, Any], paths: list[str], tmp_path: Path
) -> None:
    async with temporary_kernel(tmp_path, tools=[Take()], rules=RULES) as kernel:
        session = await kernel.session()
        result = await session.call("demo.take", {"text": "5", **sent})
        assert result.ok and as_type(result.data) == as_type({"text": "5", **taken}), result
        assert list(result.metadata["arguments_read_as"]) == paths
        await session.suspend()


@pytest.mark.parametrize("sent", KEPT, ids=str)
async def test_arguments_that_match_the_schema_are_passed_unchanged(sent: dict[str, Any], tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[Take()], rules=RULES) as kernel:
        session = await kernel.session()
        result = await session.call("demo.take", {"text": "5", "count": "2", **sent})
        assert result.ok and as_type(result.data) == as_type({"text": "5", "count": 2} | sent), result
        assert list(result.metadata["arguments_read_as"]) == ["count"]
        assert "arguments_read_as" not in (await session.call("demo.take", {"text": "5", **sent})).metadata
        await session.suspend()


ADVICE: list[tuple[dict[str, Any], str]] = [
    ({"flag": "True"}, "`flag`: send true or false, without quotes"),
    ({"flag": 1}, "`flag`: send true or false, without quotes"),
    ({"count": "two"}, "`count`: send a number, without quotes"),
    ({"count": 1.5}, "`count`: send a whole number"),
    ({"items": {"old": "a"}}, "`items`: send a list, also for one value"),
    ({"items": "a.txt"}, "`items`: send a list, also for one value"),
    ({"items": '[{"old": "a"}'}, "`items`: send the value itself, not its text"),
    ({"items": '[{"new": "a"}]'}, "`items[0].old` is missing"),
    ({"options": '{"deep": 1}'}, "unknown argument `options.deep`"),
    ({"text": ["5"]}, "`text`: send one value, not a list"),
    ({"text": 5}, "`text`: send text, in quotes"),
    ({"arguments": {"count": 2}}, "`text` is missing"),
]


@pytest.mark.parametrize(("sent", "advice"), ADVICE, ids=str)
async def test_refused_arguments_are_answered_with_what_to_send(
    sent: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    async with temporary_kernel(tmp_path, tools=[Take()], rules=RULES) as kernel:
        session = await kernel.session()
        given = sent if "arguments" in sent else {"text": "5"} | sent
        refused = await session.call("demo.take", given)
        assert refused.error_kind == "invalid_input" and advice in str(refused.error_text), refused.error_text
        await session.suspend()


@pytest.mark.parametrize("sent", REFUSED, ids=str)
async def test_arguments_that_cannot_be_repaired_are_refused_with_every_problem(
    sent: dict[str, Any], tmp_path: Path
) -> None:
    async with temporary_kernel(tmp_path, tools=[Take()], rules=RULES) as kernel:
        session = await kernel.session()
        result = await session.call("demo.take", {"text": "5"} | sent)
        assert result.error_kind == "invalid_input"
        for name in sent:
            assert f"`{name}" in str(result.error_text)
        await session.suspend()


@each_provider
async def test_a_call_with_values_sent_as_text_succeeds_without_a_retry(kind: ProviderKind, tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("one\ntwo\ntwo\n")
    read = ReplyCall("read", {"path": "a.txt", "offset": "1", "limit": None})
    edit = ReplyCall("edit", {"path": "a.txt", "old": "two", "new": "2", "replace_all": "true"})
    async with (
        temporary_kernel(tmp_path, rules=RULES) as kernel,
        bench(kind, ScriptedReply(read), ScriptedReply(edit), ScriptedReply("done")) as b,
    ):
        session = await kernel.session()
        outcome = await Agent(session, b.model).complete("go")
        assert outcome.ok and outcome.calls == 2
        assert "JSON text, read as boolean" in json.dumps(b.server.requests[2].body)
        await session.suspend()
    assert (tmp_path / "ws" / "a.txt").read_text() == "one\n2\n2\n"


async def test_rules_apply_to_the_converted_arguments_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("one\n")
    edits = json.dumps([{"old": "one", "new": "1"}])
    async with temporary_kernel(tmp_path, rules=[*RULES, "deny fs.write a.txt"]) as kernel:
        session = await kernel.session()
        await session.call("read", {"path": "a.txt"})
        assert (await session.call("multi_edit", {"path": "a.txt", "edits": edits})).error_kind == "denied"
        await session.suspend()
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        session = await kernel.session()
        await session.call("read", {"path": "a.txt"})
        assert (await session.call("multi_edit", {"path": "a.txt", "edits": edits})).ok
        await session.suspend()
    assert (tmp_path / "ws" / "a.txt").read_text() == "1\n"


async def test_an_mcp_tool_accepts_values_sent_as_json_text_too(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["text"],
    }
    server = StdioServerProgram(tmp_path, [make_tool_entry("echo", inputSchema=schema)])
    async with temporary_kernel(tmp_path, settings=server.settings_toml("t"), rules=RULES) as kernel:
        await approve_server_tools(kernel, "t")
        session = await kernel.session()
        result = await session.call("t_echo", {"text": "7", "n": "7"})
        assert result.ok and "7" in str(result.data)
        assert list(result.metadata["arguments_read_as"]) == ["n"]
        assert (await session.call("t_echo", {"text": "7", "n": "seven"})).error_kind == "invalid_input"
        await session.suspend()


async def test_an_accepted_json_text_costs_fewer_turns_and_tokens_than_a_refused_one(tmp_path: Path) -> None:
    async def measure(*arguments: Any) -> tuple[int, int]:
        replies = [call_reply(("demo__take", {"text": "x", "items": one})) for one in arguments]
        model = PlaybackModel(*replies, text_reply("done"))
        async with temporary_kernel(tmp_path, tools=[Take()], rules=RULES) as kernel:
            session = await kernel.session()
            outcome = await Agent(session, model).complete("go")
            assert outcome.ok
            await session.suspend()
        return outcome.turns, outcome.input_tokens

    items = [{"old": "a", "all": True}]
    taken = await measure(json.dumps(items))
    refused = await measure(f"{json.dumps(items)},", items)  # not JSON, so it is refused, then corrected
    assert taken[0] == 2 < refused[0] == 3 and taken[1] < refused[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SCHEMA = compile_schema(PARAMETERS)


ALMOST_JSON = {
    '{"path": "a.txt",}': "a trailing comma",
    "{'path': 'a.txt'}": "single quotes",
    "{'path': 'a.txt', 'limit': None}": "constants of Python",
    '{path: "a.txt"}': "names without quotes",
    '{"path": "a.txt" /* it */}': "comments",
    '[{"path": "a.txt"}]': "a list around it",
    '{"path": "a.txt"}{"path": "a.txt"}': "the same object again",
    '{}{"path": "a.txt"}': "an empty object next to it",
    '{"path": "a.txt"}{}': "an empty object next to it",
    '{"path": "a.txt"}<|im_end|>': "other text around it",
    '<tool_call>{"path": "a.txt"}</tool_call>': "other text around it",
    '```json5\n{"path": "a.txt"}\n```': "other text around it",
    '```json\n{"path": "a.txt"}\n```': "other text around it",
    '"{\\"path\\": \\"a.txt\\"}"': "JSON string",
    '{"arguments": {"path": "a.txt"}}': "the object in `arguments`",
    '{"input": "{\\"path\\": \\"a.txt\\"}"}': "the object in `input`",
}
NOT_JSON = {
    '{"path": "a.txt"': "ends too early",
    '{"path": "a.txt", "limit": 1': "ends too early",
    "{'path': 'a.txt": "send one JSON object",
    '{"path": "a.txt"}{"path": "b.txt"}': "a further call",
    '[{"path": "a.txt"}, {"path": "b.txt"}]': "array",
    '{"path": "a.txt"} I read it.': "nothing after it",
    '{"path": "a.txt"}}': "nothing after it",
    "{'path': 'it's'}": "send one JSON object",
    '{"path": "a.txt", "limit": 1 2}': "send one JSON object",
    '{"path": "a" "b"}': "send one JSON object",
    '{"path": "C:\\Users"}': "write each backslash in a string as two",
    "{'path': 'a.txt', 'path': 'b.txt'}": "send one JSON object",
    '{"path": "a.txt", "limit": NaN}': "use a number or null",
    "{'path': b'a.txt'}": "send one JSON object",
    '{"arguments": {"path": "a.txt", "unknown": 1}}': "unknown",
    "[]": "array",
}


@pytest.mark.parametrize("text", ALMOST_JSON)
async def test_arguments_that_are_almost_json_are_read_and_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("one\n")
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)
        result = await session.call("read", text)
        assert result.data["text"] == "one", result
        assert ALMOST_JSON[text] in result.metadata["arguments_read_as"]["(all arguments)"]
        assert "arguments_read_as" not in (await session.call("read", '{"path": "a.txt"}')).metadata


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["{" + " " * 60_000 + "x}", "```" * 20_000, "{" * 60_000, '{"a":1}{"b":2}' * 4_000, "{'a':" + "'b'," * 12_000,
     "/*" * 30_000, '{"a":' + "[1," * 20_000, "<｜" * 30_000, "```{" + "} " * 30_000],
)  # fmt: skip
def test_a_long_text_that_is_almost_json_is_refused_in_one_pass(text: str) -> None:
    with pytest.raises(InvalidJsonTextError):
        parse_arguments_with_note(text)


@pytest.mark.parametrize("text", NOT_JSON)
async def test_arguments_with_more_than_one_reading_are_refused_with_a_correction(text: str, tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("one\n")
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)
        refused = await session.call("read", text)
        assert refused.error_kind == "invalid_input" and NOT_JSON[text] in str(refused.error_text), refused


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda i: st.lists(i, max_size=3),
            max_leaves=4,
        ),
        max_size=3,
    )
)
def test_a_python_literal_is_read_as_its_value_or_refused(value: dict[str, Any]) -> None:
    for text in (repr(value), json.dumps(value)[:-1] + ",}", json.dumps(value) + json.dumps(value)):
        with suppress(InvalidJsonTextError):
            assert parse_arguments_with_note(text)[0] == value
    for cut in range(1, len(repr(value))):  # a text that was cut is never completed
        with pytest.raises(InvalidJsonTextError):
            parse_arguments_with_note(repr(value)[:cut])


@pytest.mark.parametrize(
    "text",
    [
        '"{\\"path\\": \\"a.txt\\"}"',
        '\ufeff{"path": "a.txt"}',
        '```json\n{"path": "a.txt"}\n```',
        '```\n{"path": "a.txt"}```\n',
    ],
)
async def test_arguments_in_a_wrapping_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("one\n")
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)
        assert (await session.call("read", text)).data["text"] == "one"


def test_a_place_that_a_schema_reports_twice_is_repaired_once() -> None:
    twice = compile_schema({"type": "object", "allOf": [{"properties": {"a": {"type": "integer"}}}] * 2})
    assert repair_arguments(twice, {"a": None}) == ({}, {"a": "null, left out"})
    assert repair_arguments(twice, {"a": "1"}) == ({"a": 1}, {"a": "JSON text, read as integer"})
    wrong = {"a": "two"}
    assert list_corrections(twice, wrong, twice.list_problems(wrong)) == ["`a`: send a number, without quotes"]


def test_a_value_of_the_right_type_gets_no_advice_about_its_type() -> None:
    schema = compile_schema({"type": "object", "properties": {"sure": {"const": True}, "way": {"enum": [1, 2]}}})
    wrong = {"sure": False, "way": 3}
    assert list_corrections(schema, wrong, schema.list_problems(wrong)) == []


OTHER_NAMES = {
    "read": ["Read", "READ", "read_file", "view", "functions.read", "default_api:read", "mcp__handrail__read", "read()",
             "functions.read:0", "<|channel|>read", "read<|channel|>commentary", "tools/read", " read "],
    "bash": ["Bash", "run_shell_command", "container.exec", "execute-command", "runTerminalCmd", "local_shell"],
    "glob": ["LS", "list_dir", "listFiles"],
    "edit": ["str_replace_editor", "replace", "handrail__Edit"],
    "git.status": ["git_status", "git__Status", "functions.git.status"],
}  # fmt: skip


async def test_a_name_of_another_agent_gets_the_matching_tool_as_suggestion(tmp_path: Path) -> None:
    (tmp_path / "ws" / ".git").mkdir(parents=True)
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)
        for meant, names in OTHER_NAMES.items():
            for name in names:
                refused = await session.call(name, {"path": "a.txt"})
                assert refused.error_kind == "unknown_tool" and f"Did you mean `{meant}`?" in str(refused.error_text), (
                    name
                )


@given(st.dictionaries(st.sampled_from(sorted(PROPERTIES)), JSON | JSON.map(json.dumps), max_size=4))
def test_repaired_arguments_match_the_schema_and_matching_arguments_stay_unchanged(sent: dict[str, Any]) -> None:
    sent = {"text": "x"} | sent
    before = json.dumps(sent)
    found = repair_arguments(SCHEMA, sent)
    assert json.dumps(sent) == before
    if not SCHEMA.list_problems(sent):
        assert found is None
    if found is not None:
        assert not SCHEMA.list_problems(found[0]) and found[1]
        assert found[0].keys() <= sent.keys()
        roots = {path.partition(".")[0].partition("[")[0] for path in found[1]}
        assert all(found[0][name] == sent[name] for name in found[0] if name not in roots)
