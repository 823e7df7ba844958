"""A model with fourteen of a thousand tools in view completes a task that needs three others."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from handrail import Agent, Tool
from handrail.agent.providers.scripted_model import ScriptedModel
from handrail.catalog.tool_prompt import estimate_json_tokens, estimate_llm_view_tokens, estimate_tokens
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.spec import ToolSpec
from handrail.testing.scripted_kernel import temporary_kernel

AREAS = ("invoice", "calendar", "parcel", "garden", "museum", "vehicle", "patient", "recipe", "hotel", "library")
THINGS = ("order", "visitor", "report", "label", "budget", "photo", "ticket", "schedule", "address", "note")
DEEDS = ("create", "list", "update", "archive", "share", "translate", "verify", "schedule", "export", "count")


class GeneratedTool(Tool):
    """One of many: says what it was asked for."""

    def __init__(self, area: str, thing: str, deed: str) -> None:
        self.spec = ToolSpec(
            id=f"{area}.{deed}_{thing}",
            description=f"{deed.capitalize()} the {thing} of a {area}. Gives what was done and when it will be settled.",
            parameters={
                "type": "object",
                "properties": {
                    thing: {"type": "string", "minLength": 3, "description": f"Which {thing}, by its number or name"},
                    "on": {"type": "string", "format": "date", "description": "The day it is for"},
                    "urgent": {"type": "boolean", "description": "Whether somebody waits for it"},
                },
                "required": [thing],
                "additionalProperties": False,
            },
            side_effect="read",
            locks=(),
        )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {"tool": self.spec.id, "args": args}


THOUSAND = [GeneratedTool(area, thing, deed) for area, thing, deed in product(AREAS, THINGS, DEEDS)]
WANTED = ["museum.translate_label", "parcel.verify_address", "garden.count_photo"]
TASK = "Translate the museum's label L-17, verify the parcel's address, and count the photos of the garden."


def script(folder: Path) -> Path:
    """Three ways to a tool that is not loaded: by its function, its category, and its name."""
    turns: list[dict[str, Any]] = [
        {
            "expect": {"tools": ["read", "find_tools", "load_tools"], "absent": WANTED, "prompt": r"10\d\d more tools"},
            "calls": [{"name": "find_tools", "arguments": {"query": "translate a label in a museum", "limit": 1}}],
        },
        {
            "expect": {
                "tools": [WANTED[0]],
                "absent": WANTED[1:],
                "result": [{"call": "0", "path": "data.tools.0.id", "equals": WANTED[0]}],
            },
            "calls": [
                {"name": "museum__translate_label", "arguments": {"label": "L-17"}},
                {"name": "load_tools", "arguments": {"category": "parcel"}},
            ],
        },
        {
            "expect": {
                "tools": WANTED[:2],
                "absent": WANTED[2:],
                "result": [
                    {"call": "0", "path": "data.tool", "equals": WANTED[0]},
                    {"call": "1", "path": "data.message", "equals": "100 parcel tools are now available."},
                ],
            },
            "calls": [
                {"name": "parcel__verify_address", "arguments": {"address": "Mill Lane 3"}},
                {"name": "garden__count_photo", "arguments": {"photos": "all"}},
            ],
        },
        {
            "expect": {
                "tools": WANTED,
                "result": [
                    {"call": "0", "path": "data.args.address", "equals": "Mill Lane 3"},
                    {"call": "1", "path": "metadata.error_kind", "equals": "invalid_input"},
                    {"call": "1", "path": "data.parameters.required.0", "equals": "photo"},
                ],
            },
            "calls": [{"name": "garden__count_photo", "arguments": {"photo": "all"}}],
        },
        {
            "expect": {"tools": WANTED, "result": [{"call": "0", "path": "data.tool", "equals": WANTED[2]}]},
            "text": "All three are done.",
        },
        {"expect": {"tools": ["find_tools"], "absent": WANTED}, "text": "Nothing of it is left in view."},
    ]
    file = folder / "script.json"
    file.write_text(json.dumps({"turns": turns}))
    return file


@pytest.mark.proves("D-03", "D-04", "D-05")
async def test_a_model_finds_the_three_tools_it_needs_among_a_thousand(tmp_path: Path) -> None:
    model = ScriptedModel.from_file(script(tmp_path))
    async with temporary_kernel(tmp_path, tools=THOUSAND, rules=["allow *"]) as kernel:
        session = await kernel.session()
        agent = Agent(session, model, workspace=session.workdir)
        outcome = await agent.complete(TASK)
        assert outcome.ok and outcome.text == "All three are done.", outcome.detail
        assert (outcome.calls, outcome.turns) == (6, 5)
        again = await agent.complete("And now?")
        assert again.ok and model.remaining_turns == 0, again.detail


@pytest.mark.proves("D-08")
async def test_a_session_with_a_thousand_tools_sends_under_three_percent_of_their_tokens(tmp_path: Path) -> None:
    """The loaded schemas and the index, compared with all schemas."""
    async with temporary_kernel(tmp_path, tools=THOUSAND) as kernel:
        session = await kernel.session()
        turn = session.start_turn()
        whole = estimate_json_tokens([entry.spec.build_llm_view() for entry in kernel.generation.entries.values()])
        in_view = sum(estimate_llm_view_tokens(spec) for spec in turn.tool_specs) + estimate_tokens(turn.tool_index)
        assert "invoice (100)" in turn.tool_index
        assert len(turn.tool_specs) < 20 and in_view / whole < 0.03
