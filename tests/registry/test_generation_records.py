"""Records of generations in the log: each tool once, then changes, and a full list from time to time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from handrail.contract.tool_generation import Generation
from handrail.registry.generation_lifecycle import MAX_CONSECUTIVE_CHANGES, GenerationRecorder
from handrail.registry.generation_loader import LoadCache, load_generation
from handrail.registry.sources.code_sources import PassedToolsSource

from .conftest import CONFINING, SimpleTool

pytestmark = pytest.mark.proves("R-06")


class GenerationSequence:
    """Successive generations of ten and more tools, as recorded."""

    def __init__(self) -> None:
        self.chronicle, self.memory = GenerationRecorder(), LoadCache()
        self.tools = [SimpleTool(f"t{number}") for number in range(10)]
        self.current: Generation | None = None
        self.number = 0

    def next(self, **instead: SimpleTool) -> dict[str, Any]:
        self.tools = [instead.get(tool.spec.id, tool) for tool in self.tools]
        self.number += 1
        source = PassedToolsSource(tuple(self.tools))
        new = load_generation([source], tier=CONFINING, number=self.number, cache=self.memory)
        difference = None if self.current is None else new.compute_diff_from(self.current)
        self.current = new
        return self.chronicle.build_generation_record_body(new, difference)


def reconstructed(told: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the tools of the last record, as a reader of the log finds them."""
    tools: dict[str, Any] = {}
    for body in told:
        if "after" not in body:
            tools = {}
        gone = body["difference"]["removed"] if "after" in body else ()
        tools = {tool_id: one for tool_id, one in {**tools, **body["tools"]}.items() if tool_id not in gone}
    return tools


def test_generation_records_after_the_first_list_only_the_changes() -> None:
    line = GenerationSequence()
    first, second, third = (
        line.next(),
        line.next(t3=SimpleTool("t3", description="Another.")),
        line.next(t4=SimpleTool("new")),
    )
    assert len(first["tools"]) == 10 and "after" not in first
    assert (second["after"], list(second["tools"])) == (1, ["t3"])
    assert (third["after"], list(third["tools"]), third["difference"]["removed"]) == (2, ["new"], ("t4",))
    whole = GenerationRecorder().build_generation_record_body(line.current) if line.current else {}
    assert reconstructed([first, second, third]) == whole["tools"]


def test_the_log_repeats_the_full_tool_list_after_a_bounded_number_of_changes() -> None:
    line = GenerationSequence()
    told = [line.next() for _ in range(MAX_CONSECUTIVE_CHANGES + 3)]
    assert [body["number"] for body in told if "after" not in body] == [1, MAX_CONSECUTIVE_CHANGES + 2]
    line = GenerationSequence()
    told = [line.next(t1=SimpleTool("t1", description=f"As of {number}.")) for number in range(30)]
    whole = [body["number"] for body in told if "after" not in body]
    assert whole == [1, 11, 21], "changes never name more tools than there are"
