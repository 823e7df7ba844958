"""Servers that print lines outside the protocol, and invalid Unicode."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.field.odd_servers import odd_server

from handrail.contract.errors import ToolError
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.client.json_rpc_messages import encode_message, parse_json_rpc_messages

LINES = {
    "a log line in brackets": 'put("[db] Connected")',
    "a level": 'put("INFO: listening")',
    "a banner": 'put("=====\\n  My Server v1.0\\n=====\\n")',
    "blank lines": 'put("\\n\\n   ")',
    "a structured log": 'put(json.dumps({"level": "info", "id": 1, "result": "ok"}))',
    "a list": "put('[1, 2, 3]')",
    "a text": "put('\"ready\"')",
    "a number": 'put("42")',
    "null": 'put("null")',
    "half of an object": 'put("{")',
    "no version": 'put(json.dumps({"id": message.get("id"), "result": {"content": []}}))',
    "another version": 'put(json.dumps({"jsonrpc": "1.0", "id": message.get("id"), "result": {"content": []}}))',
    "neither result nor error": 'put(json.dumps({"jsonrpc": "2.0", "id": message.get("id")}))',
    "bytes": 'put_bytes(b"\\xff\\xfe\\x00\\x80")',
    "colours": 'put("\\x1b[32mready\\x1b[0m")',
    "many lines": 'put("\\n".join("line %d" % i for i in range(3000)))',
    "a huge line": 'put("x" * (17 << 20)) if message.get("method") == "initialize" else None',
    "a number nobody uses": 'put(json.dumps({"jsonrpc": "2.0", "id": 4711, "result": {}}))',
}


@pytest.mark.parametrize("printed", LINES.values(), ids=LINES)
async def test_a_printed_line_that_is_not_an_answer_is_skipped(tmp_path: Path, printed: str) -> None:
    habit = f"def before(message):\n    {printed}\n"
    async with odd_server(tmp_path, habit) as (kernel, session):
        for _ in range(2):
            result = await session.call("t_echo", {"text": "hi"})
            assert result.data == "said hi", result.error_text
        assert kernel.components.upstreams["t"].attempts == 1


AROUND = {
    "a prefix": 'put("log: " + whole)',
    "colours before": 'put("\\x1b[0m" + whole)',
    "a byte order mark": 'put("\\ufeff" + whole)',
    "text behind": 'put(whole + " done")',
    "other order": 'put(json.dumps({"result": text("said hi"), "id": number, "jsonrpc": "2.0"}))',
    "a list of one": 'put("[" + whole + "]")',
    "id as text": 'put(json.dumps({"jsonrpc": "2.0", "id": str(number), "result": text("said hi")}))',
    "carriage return": 'put(whole + "\\r")',
    "over several lines": "put(json.dumps(json.loads(whole), indent=2))",
    "over several lines of a list": "put(json.dumps([json.loads(whole)], indent=1))",
    "behind a lone brace": 'put("{\\n" + whole)',
    "id as a float": 'put(json.dumps({"jsonrpc": "2.0", "id": float(number), "result": text("said hi")}))',
    "behind a notification on the same line": (
        'put(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "{"}}) + whole)'
    ),
    "between two log texts": 'put("sending... " + whole + " [sent]" + " " + json.dumps({"level": "info"}))',
    "behind a list on the same line": 'put("[1, 2] " + whole)',
    "with an empty error": 'put(json.dumps({"jsonrpc": "2.0", "id": number, "result": text("said hi"), "error": {}}))',
    "with an empty error text": 'put(json.dumps({"jsonrpc": "2.0", "id": number, "result": text("said hi"), "error": ""}))',
    "with false for the error": 'put(json.dumps({"jsonrpc": "2.0", "id": number, "result": text("said hi"), "error": False}))',
    "behind the request, as a terminal repeats it": "put(line.strip()); put(whole)",
    "behind the beginning of another message": 'put(\'{"jsonrpc": "2.0", "id": 1, "resu\' + whole)',
    "with a line end in its text": 'put(whole.replace("said hi", "said\\nhi"))',
    "with several line ends in its text": 'put(whole.replace("said hi", "said\\n{}\\n\\n}\\n]\\nhi"))',
    "over lines that begin like any answer": 'put(whole.replace(", ", ",\\n"))',
    "without a line end": "sys.stdout.write(whole); sys.stdout.flush()",
    "with a carriage return alone": 'sys.stdout.write(whole + "\\r"); sys.stdout.flush()',
    "with a number for the protocol": 'put(json.dumps({"jsonrpc": 2.0, "id": number, "result": text("said hi")}))',
    "without an id": 'put(json.dumps({"jsonrpc": "2.0", "result": text("said hi")}))',
    "with null for the id": 'put(json.dumps({"jsonrpc": "2.0", "id": None, "result": text("said hi")}))',
    "with the method": 'put(json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "result": text("said hi")}))',
    "with zero bytes before it": 'put("\\0\\0" + whole)',
}


@pytest.mark.parametrize("printed", AROUND.values(), ids=AROUND)
async def test_an_answer_surrounded_by_other_output_is_accepted(tmp_path: Path, printed: str) -> None:
    habit = f"""
sys.stdout.reconfigure(encoding="utf-8")
def call(number, params):
    whole = json.dumps({{"jsonrpc": "2.0", "id": number, "result": text("said hi")}})
    {printed}
"""
    async with odd_server(tmp_path, habit) as (_, session):
        for _ in range(2):
            result = await session.call("t_echo", {"text": "hi"})
            words = str(result.data).split()
            assert (result.ok, words[0], words[-1]) == (True, "said", "hi"), result


@pytest.mark.parametrize(
    "answered",
    [
        '{"jsonrpc": "2.0", "id": None, "result": {}}',
        '{"jsonrpc": "2.0", "result": None}',
        '{"jsonrpc": "2.0", "id": None, "result": {"tools": []}}',
        '{"jsonrpc": "2.0", "id": None, "error": {"code": -32601, "message": "no such method"}}',
    ],
)
async def test_an_answer_to_a_notification_is_no_answer_to_a_request(tmp_path: Path, answered: str) -> None:
    habit = f"""
def before(message):
    if message.get("method", "").startswith("notifications/") or message.get("method") == "tools/list":
        put(json.dumps({answered}))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


async def test_a_broken_answer_fails_when_another_message_follows(tmp_path: Path) -> None:
    habit = """
def call(number, params):
    put('{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"ty' % number)
    put(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}))
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        result = await session.call("t_echo", {"text": "hi"})
        assert result.error_kind == "interrupted" and "not valid JSON" in str(result.error_text)
        assert kernel.components.upstreams["t"].attempts == 1


async def test_an_endless_answer_over_lines_fails_its_call_and_nothing_else(tmp_path: Path) -> None:
    habit = """
def call(number, params):
    if params["arguments"]["text"] == "hi":
        answer(number, text("said hi"))
    else:
        put('{"jsonrpc": "2.0", "id": %d, "result": {"content": [' % number + "\\n{}" * 400)
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        result = await session.call("t_echo", {"text": "ho"})
        assert result.error_kind == "interrupted" and "not valid JSON" in str(result.error_text)
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert kernel.components.upstreams["t"].attempts == 1


async def test_a_server_that_ends_after_each_answer_is_started_for_each_call(tmp_path: Path) -> None:
    habit = """
def call(number, params):
    answer(number, text("said hi"))
    sys.stdout.flush()
    os._exit(0)
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        upstream = kernel.components.upstreams["t"]
        upstream.backoff_s = (3600.0,)
        for _ in range(3):
            assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
            while upstream.state == "connected":
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "error",
    [
        '{"code": "-32601", "message": "no such row"}',
        '{"code": -32601.0, "message": "no such row"}',
        '{"code": null, "message": "no such row"}',
        '{"code": "ENOENT", "message": "no such row"}',
        '{"message": {"text": "no such row"}}',
        '"no such row"',
        '["no such row"]',
    ],
)
async def test_the_text_of_an_error_in_an_odd_form_reaches_the_caller(tmp_path: Path, error: str) -> None:
    habit = f"""
def call(number, params):
    put('{{"jsonrpc": "2.0", "id": %d, "error": {error}}}' % number)
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        result = await session.call("t_echo", {"text": "hi"})
        assert result.error_kind == "failed" and "no such row" in str(result.error_text)
        assert kernel.components.upstreams["t"].attempts == 1


async def test_a_server_that_repeats_every_line_it_reads_is_used(tmp_path: Path) -> None:
    """As a program does on a terminal, such as one of ``docker run -t``."""
    habit = "def before(message):\n    put(line.strip())\n"
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert kernel.components.upstreams["t"].attempts == 1


async def test_endless_output_lines_close_the_connection_with_a_reason(tmp_path: Path) -> None:
    habit = """
def call(number, params):
    while True:
        put("tick")
"""
    async with odd_server(tmp_path, habit) as (_, session):
        result = await session.call("t_echo", {"text": "hi"})
        assert result.error_kind == "interrupted" and "logs belong on stderr" in str(result.error_text)


async def test_a_truncated_answer_fails_only_its_own_call(tmp_path: Path) -> None:
    habit = """
def call(number, params):
    if params["arguments"]["text"] == "break":
        put('{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"ty' % number)
    else:
        answer(number, text("said hi"))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        broken = await session.call("t_echo", {"text": "break"})
        assert broken.error_kind == "interrupted" and "not valid JSON" in str(broken.error_text)
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


HALF = {
    "a result": 'put(\'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "cut off \\\\ud83d"}]}}\' % number)',
    "the second half": 'put(\'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "cut off \\\\ude00"}]}}\' % number)',
    "raw bytes": 'put_bytes(b\'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "cut off \\xff"}]}}\' % number)',
    "a key": 'answer(number, {"content": [{"type": "text", "text": "cut off \\ufffd"}], "_meta": {"\\ud83d": 1}})',
    "NaN beside it": 'answer(number, {"content": [{"type": "text", "text": "cut off \\ud83d"}], "_meta": {"x": float("nan")}})',
    "a notification": 'put(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "\\ud83d"}})); answer(number, text("cut off \\ufffd"))',
}


@pytest.mark.parametrize("written", HALF.values(), ids=HALF)
async def test_half_a_character_in_a_result_is_replaced(tmp_path: Path, written: str) -> None:
    habit = f"def call(number, params):\n    {written}\n"
    async with odd_server(tmp_path, habit) as (_, session):
        for _ in range(2):
            result = await session.call("t_echo", {"text": "hi"})
            assert result.data == "cut off \ufffd", result.error_text


async def test_half_a_character_in_an_error_or_tool_definition_does_no_harm(tmp_path: Path) -> None:
    habit = """
TOOLS += [{"name": "od\\ud83dd", "description": "Half \\ude00.", "inputSchema": {"type": "object"}}]
def call(number, params):
    fail(number, -32000, "broken \\ud83d")
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert "broken \ufffd" in str((await session.call("t_echo", {"text": "hi"})).error_text)
        assert len([one for one in kernel.generation.entries if one.startswith("t_")]) == 2


def test_numbers_outside_json_become_null_and_surrogate_pairs_become_characters() -> None:
    (message,) = parse_json_rpc_messages(
        b'{"jsonrpc": "2.0", "id": 1, "result": {"a": NaN, "b": "\\ud83d\\ude00 \\ud83d"}}'
    )
    assert message["result"] == {"a": None, "b": "😀 \ufffd"}
    assert encode_message({"a": "\ud83d"}) == '{"a":"\ufffd"}'.encode()


FRAMED = """
NAME, END, LINES = %r, %r, %r
def put(text):
    data = text.encode()
    head = NAME + ": " + str(len(data)) + "\\r\\n"
    if LINES:
        head = "Content-Type: application/vscode-jsonrpc; charset=utf-8\\r\\n" + head
    sys.stdout.buffer.write((head + "\\r\\n").encode() + data + END.encode())
    sys.stdout.buffer.flush()
def result(name, args):
    put(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x\\ny"}}, indent=2))
    return text("said " + str(args.get("text", "")))
"""


@pytest.mark.parametrize(
    ("name", "end", "lines"),
    [("Content-Length", "", False), ("content-length", "\n", True), ("CONTENT-LENGTH", "\r\n", False)],
)
async def test_messages_with_content_length_headers_are_accepted(
    tmp_path: Path, name: str, end: str, lines: bool
) -> None:
    async with odd_server(tmp_path, FRAMED % (name, end, lines)) as (kernel, session):
        for said in ("hi", "é" * 20_000):
            assert (await session.call("t_echo", {"text": said})).data == f"said {said}"
        assert kernel.components.upstreams["t"].attempts == 1


async def test_a_server_that_expects_content_length_headers_is_refused_with_a_reason(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        """
import sys
for line in sys.stdin:
    if line.startswith("Content-Length:"):
        print("never", flush=True)
"""
    )
    async with temporary_kernel(tmp_path) as kernel:
        connecting = kernel.mcp_servers.connect(
            "t", command=sys.executable, args=[str(program)], folders=[str(tmp_path)], connect_timeout_ms=500
        )
        with pytest.raises(ToolError, match=r"one JSON message a line.*Content-Length"):
            await connecting.__aenter__()


async def test_every_message_over_several_lines_leaves_the_server_usable(tmp_path: Path) -> None:
    habit = """
def answer(number, result):
    put(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}, indent=4))

def before(message):
    for _ in range(300 if message["method"] == "tools/call" else 0):
        put(json.dumps({"jsonrpc": "2.0", "method": "notifications/new", "params": {}}, indent=4))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


async def test_line_ends_in_the_text_of_an_answer_are_kept(tmp_path: Path) -> None:
    habit = """
def call(number, params):
    whole = json.dumps({"jsonrpc": "2.0", "id": number, "result": text("said hi")})
    put(whole.replace("said hi", "said\\n\\n}\\n \\n\\nhi"))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said\n\n}\n \n\nhi"


@pytest.mark.parametrize("number", ["1.5", "'a'", "0"])
async def test_a_request_of_the_server_with_an_unusual_id_is_answered_with_it(tmp_path: Path, number: str) -> None:
    habit = f"""
WAITING = []
def call(number, params):
    WAITING.append(number)
    put(json.dumps({{"jsonrpc": "2.0", "id": {number}, "method": "odd/method", "params": []}}))
def before(message):
    if message.get("id") == {number} and "method" not in message:
        answer(WAITING.pop(), text("code " + str(message["error"]["code"])))
"""
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "code -32601"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
async def test_a_number_that_is_too_large_becomes_text(tmp_path: Path, number: str) -> None:
    habit = f"""
def call(number, params):
    head = '{{"jsonrpc": "2.0", "id": ' + json.dumps(number) + ', "result": {{"content": [], "structuredContent": {{"n": '
    put(head + "{number}" + "}}}}}}")
"""
    async with odd_server(tmp_path, habit) as (_, session):
        result = await session.call("t_echo", {"text": "hi"})
        assert f'"{number}"' in json.dumps(result.data), result.error_text
