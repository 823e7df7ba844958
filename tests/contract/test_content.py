"""MCP content: decoded into a result and encoded from it."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.types import CallToolResult

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.result_conversions import (
    convert_known_result_shape,
    convert_mcp_content_to_result,
    convert_result_to_mcp_content,
    list_artifact_refs,
)

PIXEL = base64.b64encode(b"\x89PNG").decode()
TEXT = {"type": "text", "text": "hello"}


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    ("wire", "result"),
    [
        ({"content": [TEXT]}, Result.output("hello")),
        ({"content": [TEXT, TEXT]}, Result.output(["hello", "hello"])),
        ({"content": []}, Result.output(None)),
        ({"content": [{"type": "text", "text": '{"n":1}'}], "structuredContent": {"n": 1}}, Result.output({"n": 1})),
        (
            {"content": [TEXT], "structuredContent": {"n": 1}},
            Result.output({"structured": {"n": 1}, "parts": ["hello"]}),
        ),
        (
            {"content": [{"type": "image", "data": PIXEL, "mimeType": "image/png"}], "structuredContent": {"n": 1}},
            Result.output({"structured": {"n": 1}, "parts": [Blob(b"\x89PNG", "image/png")]}),
        ),
        (
            {"content": [{"type": "audio", "data": PIXEL}]},
            Result.output([Blob(b"\x89PNG", "application/octet-stream")]),
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "in it"}}]},
            Result.output([{"type": "resource", "resource": {"uri": "file:///a", "text": "in it"}}]),
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": PIXEL, "mimeType": "x/y"}}]},
            Result.output(
                [
                    {
                        "type": "resource",
                        "resource": {"uri": "file:///a", "mimeType": "x/y", "blob": Blob(b"\x89PNG", "x/y")},
                    }
                ]
            ),
        ),
        (
            {"content": [{"type": "resource_link", "uri": "file:///a", "name": "a"}]},
            Result.output([{"type": "resource_link", "uri": "file:///a", "name": "a"}]),
        ),
        ({"content": [TEXT], "isError": True}, Result.error("failed", "hello")),
        (
            {"content": [], "isError": True, "structuredContent": {"code": 7}},
            Result.error("failed", "The tool failed without a reason.", {"code": 7}),
        ),
        (
            {"content": [{"type": "image", "data": "no base64!"}]},
            Result.output([{"type": "image", "data": "no base64!", "problem": "The data is not base64."}]),
        ),
        ({"content": "nonsense"}, Result.output("nonsense")),
        ({"content": [7]}, Result.output("7")),
    ],
)
def test_mcp_content_becomes_a_result(wire: dict[str, Any], result: Result) -> None:
    assert convert_mcp_content_to_result(wire) == result


@pytest.mark.proves("K-08")
@given(
    data=st.recursive(
        st.none() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_tool_output_becomes_valid_mcp_content(data: Any) -> None:
    for result in (Result.output(data), Result.error("failed", "no", data)):
        wire = convert_result_to_mcp_content(result)
        CallToolResult.model_validate(wire)
        assert wire.get("isError", False) is not result.ok
        if isinstance(data, str) and result.ok:
            assert wire["content"] == [{"type": "text", "text": data}]
        if not result.ok:
            assert wire["content"][0]["text"] == "no"


def as_stored(data: Any) -> tuple[Any, dict[str, bytes]]:
    """Return binary parts as the arbiter stores them: placeholders, and the data by reference."""
    kept: dict[str, bytes] = {}

    def put(value: Any) -> Any:
        if isinstance(value, Blob):
            ref = f"sha256:{hashlib.sha256(value.data).hexdigest()}"
            kept[ref] = value.data
            return {"artifact": ref, "media_type": value.media_type, "bytes": len(value.data)}
        if isinstance(value, dict):
            return {key: put(one) for key, one in cast("dict[str, Any]", value).items()}
        return [put(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value

    return put(data), kept


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    "wire",
    [
        {"content": [TEXT]},
        {"content": [TEXT, TEXT]},
        {"content": []},
        {"content": [{"type": "text", "text": '{"n": 1}'}], "structuredContent": {"n": 1}},
        {"content": [TEXT], "structuredContent": {"n": 1}},
        {"content": [TEXT, {"type": "image", "data": PIXEL, "mimeType": "image/png"}, TEXT]},
        {"content": [{"type": "audio", "data": PIXEL, "mimeType": "audio/wav"}]},
        {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "in it", "mimeType": "x/y"}}]},
        {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": PIXEL, "mimeType": "x/y"}}]},
        {"content": [{"type": "resource_link", "uri": "file:///a", "name": "a"}]},
        {"content": [TEXT], "isError": True},
    ],
)
def test_mcp_content_is_written_as_it_was_read(wire: dict[str, Any]) -> None:
    read = convert_mcp_content_to_result(wire)
    data, kept = as_stored(read.data)
    assert sorted(list_artifact_refs(data)) == sorted(kept)
    assert convert_result_to_mcp_content(Result(read.type, data, read.error_text, read.metadata), kept) == wire


def test_an_artifact_without_its_bytes_becomes_a_resource_link() -> None:
    data, _ = as_stored([Blob(b"x", "image/png")])
    (block,) = convert_result_to_mcp_content(Result.output(data))["content"]
    assert block["type"] == "resource_link" and block["uri"].startswith("handrail://artifact/sha256:")


@pytest.mark.parametrize(
    "answer", [{"content": [TEXT]}, {"content": [], "structuredContent": {}}, {"content": [TEXT], "isError": False}]
)
def test_a_tool_may_return_a_result_in_the_shape_of_mcp(answer: dict[str, Any]) -> None:
    assert convert_known_result_shape(answer) == convert_mcp_content_to_result(answer)


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "text"},
        {"content": []},
        {"content": [{"type": "chapter"}]},
        {"content": [TEXT], "name": "a"},
        {"content": 7},
    ],
)
def test_data_that_only_resembles_mcp_content_stays_plain_data(answer: dict[str, Any]) -> None:
    assert convert_known_result_shape(answer) is None
