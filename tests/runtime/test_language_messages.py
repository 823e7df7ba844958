"""Messages, positions and paths of the language server protocol, for any input."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.runtime.language_servers.code_positions import (
    PositionEncoding,
    convert_column_to_offset,
    convert_offset_to_column,
    convert_path_to_uri,
    convert_uri_to_path,
    parse_symbol_entries,
    parse_workspace_edit,
    split_lines,
)
from handrail.runtime.language_servers.server_connection import (
    MAX_MESSAGE_BYTES,
    MalformedMessage,
    ServerMessageReader,
    encode_message,
    parse_body,
)

pytestmark = pytest.mark.proves("T-06l")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), lambda inner: st.lists(inner, max_size=4)
)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), max_size=6)


@given(MESSAGES, st.lists(st.integers(1, 40), max_size=60))
def test_messages_are_read_correctly_in_pieces_of_any_size(messages: list[dict[str, object]], sizes: list[int]) -> None:
    output = b"".join(map(encode_message, messages))
    reader, found, at = ServerMessageReader(), list[object](), 0
    for size in [*sizes, len(output)]:
        found += [parse_body(body) for body in reader.feed(output[at : at + size])]
        at += size
    assert found == json.loads(json.dumps(messages).encode("utf-8", "replace"))


def test_a_message_header_may_have_other_fields_in_any_order_and_case() -> None:
    reader = ServerMessageReader()
    header = b"Content-Type: application/vscode-jsonrpc; charset=utf-8\r\ncontent-length:2\r\n\r\n"
    assert list(reader.feed(header + b"{}")) == [b"{}"]


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (b"Starting the server, please wait...\nReady.\n", "not the header of a message"),
        (b"x" * 9_000, "not the header of a message"),
        (b"Content-Length: none\r\n\r\n{}", "without exactly one Content-Length"),
        (b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", "without exactly one Content-Length"),
        (b"Content-Type: text\r\n\r\n{}", "without exactly one Content-Length"),
        (b"Content-Length: 1073741824\r\n\r\n{", "1,073,741,824 bytes"),
        (b"Content-Length: %d\r\n\r\n{" % (MAX_MESSAGE_BYTES + 1), "the maximum is 64 MiB"),
    ],
)
def test_malformed_server_output_raises_an_error_with_the_reason(output: bytes, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        list(ServerMessageReader().feed(output))


@given(st.binary(max_size=300))
def test_any_server_output_yields_messages_or_a_parse_error(output: bytes) -> None:
    reader = ServerMessageReader()
    try:
        for body in reader.feed(output):
            parse_body(body)
    except MalformedMessage as error:
        assert str(error).startswith("it ")


@pytest.mark.parametrize("body", [b"[]", b"1", b"", b"{", b"\xff", b"[" * 100_000])
def test_a_message_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_body(body)


def test_an_unpaired_surrogate_loses_no_message() -> None:
    assert parse_body(rb'{"text": "a\ud83d"}')["text"].startswith("a")
    assert b"Content-Length" in encode_message({"text": "a\ud83d"})


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(0, 60))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_a_column_survives_conversion_to_an_offset_and_back(encoding: PositionEncoding, line: str, column: int) -> None:
    column = min(column, len(line))
    assert convert_offset_to_column(line, convert_column_to_offset(line, column, encoding), encoding) == column


@pytest.mark.parametrize(("encoding", "offset"), [("utf-8", 6), ("utf-16", 3), ("utf-32", 2)])
def test_an_offset_counts_in_the_position_encoding_of_the_server(encoding: PositionEncoding, offset: int) -> None:
    assert convert_column_to_offset("é😀x", 2, encoding) == offset


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_path_survives_conversion_to_a_uri_and_back(name: str) -> None:
    path = f"/{name}"
    assert convert_uri_to_path(convert_path_to_uri(path)) == path


@pytest.mark.parametrize(
    "uri", ["http://example.org/a", "file://elsewhere/a", "file:a", "file:///a%00b", None, 7, "http://[::"]
)
def test_a_uri_that_is_not_a_local_file_has_no_path(uri: object) -> None:
    assert convert_uri_to_path(uri) is None


def test_lines_are_split_at_the_line_ends_of_the_protocol() -> None:
    assert split_lines("a\r\nb\rc\nd\u2028e\x0cf") == ["a", "b", "c", "d\u2028e\x0cf"]


@pytest.mark.parametrize(
    "result", [None, [], [None, 1, {}], [{"name": 3}], {"changes": []}, {"documentChanges": [1]}, "x"]
)
def test_malformed_server_answers_give_no_entries(result: object) -> None:
    assert list(parse_symbol_entries(result, "/a")) == []
    assert parse_workspace_edit(result) == ({}, [])


def test_a_nested_symbol_is_found_by_its_name_with_its_container() -> None:
    span = {"start": {"line": 0, "character": 0}, "end": {"line": 0, "character": 1}}
    method = {"name": "parse", "kind": 6, "selectionRange": span}
    (outer, inner) = parse_symbol_entries(
        [{"name": "Parser", "kind": 5, "selectionRange": span, "children": [method]}], "/a"
    )
    assert [outer.matches_qualified_name(one) for one in ("Parser", "parse", "x.Parser")] == [True, False, False]
    assert [inner.matches_qualified_name(one) for one in ("parse", "Parser.parse", "Parser::parse", "Lexer.parse")] == [
        True,
        True,
        True,
        False,
    ]
