"""MCP content, read into the envelope and written from it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.result import Blob, Result
from handrail.contract.shapes import from_content
from handrail.faces.mcp.server import as_result

PIXEL = base64.b64encode(b"\x89PNG").decode()
TEXT = {"type": "text", "text": "hello"}


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    ("wire", "result"),
    [
        ({"content": [TEXT]}, Result.output("hello")),
        ({"content": [TEXT, TEXT]}, Result.output(["hello", "hello"])),
        ({"content": []}, Result.output(None)),
        ({"content": [TEXT], "structuredContent": {"n": 1}}, Result.output({"n": 1})),
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
            Result.output([{"uri": "file:///a", "text": "in it"}]),
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": PIXEL, "mimeType": "x/y"}}]},
            Result.output([Blob(b"\x89PNG", "x/y")]),
        ),
        (
            {"content": [{"type": "resource_link", "uri": "file:///a", "name": "a"}]},
            Result.output([{"type": "resource_link", "uri": "file:///a", "name": "a"}]),
        ),
        ({"content": [TEXT], "isError": True}, Result.error("failed", "hello")),
        (
            {"content": [], "isError": True, "structuredContent": {"code": 7}},
            Result.error("failed", "it failed and did not say why", {"code": 7}),
        ),
        (
            {"content": [{"type": "image", "data": "no base64!"}]},
            Result.output([{"type": "image", "problem": "its data are not base64"}]),
        ),
        ({"content": "nonsense"}, Result.output(None)),
        ({"content": [7]}, Result.output([{"type": "unknown", "problem": "it is no object"}])),
    ],
)
def test_mcp_content_becomes_a_result(wire: dict[str, Any], result: Result) -> None:
    assert from_content(wire) == result


@pytest.mark.proves("K-08")
@given(
    data=st.recursive(
        st.none() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_a_result_goes_out_as_structured_content_and_as_its_text(data: Any) -> None:
    for result in (Result.output(data, duration_ms=1), Result.error("failed", "no", data)):
        wire = as_result(result).model_dump(mode="json", by_alias=True)
        assert json.loads(wire["content"][0]["text"]) == wire["structuredContent"] == result.to_dict()
        assert wire["isError"] is not result.ok
