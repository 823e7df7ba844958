"""Results, and the errors that become one."""

from __future__ import annotations

import pytest

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ERROR_KINDS, Diagnostic, LoadError, ToolError


@pytest.mark.proves("K-07")
def test_the_error_kinds_are_a_closed_set() -> None:
    assert {
        "invalid_input",
        "unknown_tool",
        "denied",
        "unavailable",
        "conflict",
        "timeout",
        "cancelled",
        "interrupted",
        "limit",
        "failed",
        "backend",
    } == ERROR_KINDS


@pytest.mark.proves("K-07")
def test_a_result_survives_a_round_trip_through_its_wire_form() -> None:
    for result in (
        Result.output({"a": 1}, duration_ms=3),
        Result.output(None),
        Result.error("failed", "no", duration_ms=1),
        Result.error("timeout", "slow", {"partial": "x"}),
    ):
        assert Result.from_dict(result.to_dict()) == result


@pytest.mark.proves("K-07")
def test_an_error_result_has_its_kind_and_only_present_data() -> None:
    assert Result.error("limit", "too much").to_dict() == {
        "type": "error",
        "error_text": "too much",
        "metadata": {"error_kind": "limit"},
    }
    assert Result.from_error(ToolError("no", kind="conflict", data=[1])).to_dict()["data"] == [1]
    assert Result.output(1).with_metadata(duration_ms=2).metadata == {"duration_ms": 2}


@pytest.mark.proves("R-01")
def test_a_load_error_lists_every_fault_with_its_place() -> None:
    error = LoadError([Diagnostic("a.json", "runtime.locks[0]", "is bad"), Diagnostic("b.json", "", "is gone")])
    assert str(error) == "2 faults:\n  - a.json: runtime.locks[0]: is bad\n  - b.json: is gone"
    assert str(LoadError([Diagnostic("a", "", "x")])).startswith("1 fault:")
