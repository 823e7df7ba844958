"""Conversion of results to and from the formats of other systems."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.result_conversions import (
    convert_known_result_shape,
    convert_parts_to_result,
    convert_result_to_parts,
    convert_result_to_status,
    convert_status_to_result,
)


@pytest.mark.proves("K-08")
def test_a_success_status_becomes_an_output_with_its_summary_in_the_metadata() -> None:
    result = convert_known_result_shape({"status": "success", "summary": "3 files", "artifact_ref": "hash123"})
    assert result is not None and result.ok
    assert result.data == {"summary": "3 files", "artifact_ref": "hash123"}
    assert result.metadata == {"summary": "3 files", "artifact_ref": "hash123"}


@pytest.mark.proves("K-08")
def test_an_error_status_becomes_an_error_result() -> None:
    result = convert_known_result_shape({"status": "error", "summary": "no such branch", "artifact_ref": None})
    assert result is not None
    assert (result.type, result.error_kind, result.error_text, result.data) == (
        "error",
        "failed",
        "no such branch",
        None,
    )


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    "wire",
    [
        {"status": "success", "summary": "s", "artifact_ref": "r"},
        {"status": "success", "summary": "", "artifact_ref": None},
        {"status": "error", "summary": "e", "artifact_ref": "r"},
        {"status": "error", "summary": "e", "artifact_ref": None},
    ],
)
def test_a_status_survives_a_round_trip_through_a_result(wire: dict[str, Any]) -> None:
    assert convert_result_to_status(convert_status_to_result(wire)) == wire


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    ("result", "wire"),
    [
        (Result.output("text"), ("success", "text", None)),
        (Result.output({"a": 1}), ("success", '{"a": 1}', None)),
        (Result.output({"artifact": "sha256:00"}), ("success", '{"artifact": "sha256:00"}', "sha256:00")),
        (Result.error("timeout", "took too long"), ("error", "took too long", None)),
    ],
)
def test_any_result_can_be_written_as_a_status(result: Result, wire: tuple[str, str, str | None]) -> None:
    assert convert_result_to_status(result) == dict(zip(("status", "summary", "artifact_ref"), wire, strict=True))


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    "answer",
    [
        {"status": "pending", "summary": "x"},
        {"status": "success"},
        {"status": "success", "summary": "x", "more": 1},
        {"type": "invoice", "data": 1},
        {"type": "output", "data": 1, "extra": 2},
        {},
        [],
        "text",
        None,
    ],
)
def test_data_that_only_resembles_a_result_shape_stays_data(answer: object) -> None:
    assert convert_known_result_shape(answer) is None


@pytest.mark.proves("K-07")
def test_an_envelope_from_a_tool_keeps_its_data_and_loses_its_metadata_claims() -> None:
    claims = {"duration_ms": 0, "truncated": True, "output_path": "/etc/passwd", "sandbox": "everything"}
    result = convert_known_result_shape({"type": "output", "data": [1], "metadata": claims})
    assert result == Result.output([1])
    failed = convert_known_result_shape(
        {"type": "error", "error_text": "no", "data": 2, "metadata": {**claims, "error_kind": "conflict"}}
    )
    assert failed == Result.error("conflict", "no", 2)


@pytest.mark.proves("K-07")
@pytest.mark.parametrize("kind", ["denied", "cancelled", "interrupted", "timeout", "unknown_tool", "nonsense", 3, None])
def test_a_tool_cannot_set_an_error_kind_of_the_kernel(kind: object) -> None:
    result = convert_known_result_shape({"type": "error", "error_text": "x", "metadata": {"error_kind": kind}})
    assert result is not None and result.error_kind == "failed"


@pytest.mark.parametrize("text", [None, "", "  ", 7, ["x"]])
def test_an_error_without_a_text_gets_a_default_text(text: object) -> None:
    result = convert_known_result_shape({"type": "error", "error_text": text})
    assert result is not None and result.error_text == "The tool failed without a reason."


def test_a_very_long_error_text_is_cut() -> None:
    result = convert_known_result_shape({"type": "error", "error_text": "x" * 10_000_000})
    assert result is not None and len(result.error_text or "") < 5_000


@pytest.mark.proves("K-08")
@pytest.mark.parametrize(
    ("exit_code", "error", "ok"),
    [(None, None, True), (0, None, True), (1, None, False), (0, "broke", False), (None, "broke", False)],
)
def test_parts_are_ok_unless_they_have_an_error_or_a_nonzero_exit_code(
    exit_code: int | None, error: str | None, ok: bool
) -> None:
    result = convert_parts_to_result("out", exit_code, error)
    assert result.ok is ok
    assert result.data == "out"
    wire = convert_result_to_parts(result)
    assert (wire["output"], wire["exit_code"], wire["error"] is None) == ("out", exit_code, ok)


@pytest.mark.proves("K-08")
def test_content_parts_with_an_image_survive_a_round_trip() -> None:
    parts = [
        {"type": "text", "text": "a cat"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]
    result = convert_parts_to_result(parts)
    assert result.data == ["a cat", Blob(b"hi", "image/png")]
    assert convert_result_to_parts(result)["output"] == parts


def test_image_parts_without_valid_image_data_are_not_decoded() -> None:
    link = {"type": "image_url", "image_url": {"url": "https://example.invalid/x.png"}}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}
    assert convert_parts_to_result([link, broken]).data == [
        link,
        {"type": "image_url", "problem": "The data: URL is not base64."},
    ]


@pytest.mark.proves("K-08")
def test_the_exit_code_of_a_command_is_a_separate_part() -> None:
    wire = convert_result_to_parts(Result.output({"output": "no match\n", "exit_code": 1}))
    assert (wire["output"], wire["exit_code"], wire["error"]) == ("no match\n", 1, None)


@given(st.binary(), st.sampled_from(["image/png", "audio/wav", "application/x-y"]))
def test_bytes_survive_a_round_trip_through_content_parts(data: bytes, media_type: str) -> None:
    blob = Blob(data, media_type)
    parts = convert_result_to_parts(Result.output(["x", blob]))["output"]
    assert convert_parts_to_result(parts).data == ["x", blob]
