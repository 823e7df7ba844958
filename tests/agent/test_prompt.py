"""The system prompt is short, ordered and deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.agent.sessions import ECHO, SEND

from handrail import Agent, Tool, tool
from handrail.agent.run_events import TurnStarted
from handrail.agent.system_prompt import build_system_prompt
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel


def make_numbered_tool(number: int, **declared: Any) -> Tool:
    @tool(id=f"stock.t{number:02d}", side_effect="read", locks=[], category="stock", **declared)
    async def count() -> int:
        """Count the stock."""
        return number

    return count


def test_the_system_prompt_does_not_depend_on_the_order_of_the_tools() -> None:
    guided = replace(SEND, guidance="Ask before you send.")
    first = build_system_prompt("/w", [ECHO, guided])
    assert first == build_system_prompt("/w", [guided, ECHO])
    assert first.index("## echo") < first.index("## mail__send")


def test_the_system_prompt_contains_only_the_guidance_of_a_tool() -> None:
    secret = replace(ECHO, guidance="Be brief.", documentation="INTERNAL", secrets=("TOKEN",))
    text = build_system_prompt(None, [secret, SEND])
    assert "Be brief." in text
    assert "INTERNAL" not in text and "TOKEN" not in text and "mail" not in text
    assert "Workspace" not in text


def test_the_operators_instructions_come_last() -> None:
    assert build_system_prompt("/w", [ECHO], instructions=" Speak Dutch.\n").endswith(
        "# Instructions\n\nSpeak Dutch.\n"
    )


@pytest.mark.proves("D-12")
async def test_every_request_of_an_interaction_has_the_same_system_text(tmp_path: Path) -> None:
    """Whatever was loaded, found, written, asked for again or published meanwhile."""
    guided = [make_numbered_tool(number, guidance="Count slowly.") for number in range(12)]
    async with temporary_kernel(
        tmp_path, tools=[*guided, *(make_numbered_tool(n) for n in range(12, 24))], rules=["allow *"]
    ) as kernel:
        skill = "---\nname: new\ndescription: Something new.\n---\nDo it.\n"
        model = PlaybackModel(
            call_reply(
                ("load_tools", {"category": "stock"}), ("find_tools", {"query": "show the state of the repository"})
            ),
            call_reply(("write", {"path": "AGENTS.md", "content": "Be brief.\n"})),
            call_reply(("write", {"path": ".claude/skills/new/SKILL.md", "content": skill})),
            call_reply(("todo", {"todos": [{"id": "1", "content": "Count", "status": "pending"}]}), ("nothing", {})),
            call_reply(("info", {"tool": "stock.t01"})),
            text_reply("Done."),
        )
        async for event in Agent(await kernel.session(), model).run("Count the stock."):
            if isinstance(event, TurnStarted) and len(model.requests) == 2:
                await kernel.reload_tools(guided)  # which takes tools away
        first, *others = [request.system for request in model.requests]
        assert len(others) == 5 and all(text == first for text in others)
        assert len(model.requests[1].tools) > len(model.requests[0].tools), "what is in view is not the text"
