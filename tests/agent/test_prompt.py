"""The system text is short, ordered and the same bytes each time."""

from __future__ import annotations

from dataclasses import replace

from tests.agent.sessions import ECHO, SEND

from handrail.agent.prompt import system_prompt


def test_the_same_workspace_and_tools_give_the_same_bytes_in_any_order() -> None:
    guided = replace(SEND, guidance="Ask before you send.")
    first = system_prompt("/w", [ECHO, guided])
    assert first == system_prompt("/w", [guided, ECHO])
    assert first.index("## echo") < first.index("## mail__send")


def test_of_a_tool_only_its_guidance_is_added() -> None:
    secret = replace(ECHO, guidance="Be brief.", documentation="INTERNAL", secrets=("TOKEN",))
    text = system_prompt(None, [secret, SEND])
    assert "Be brief." in text
    assert "INTERNAL" not in text and "TOKEN" not in text and "mail" not in text
    assert "Workspace" not in text


def test_the_operators_instructions_come_last() -> None:
    assert system_prompt("/w", [ECHO], instructions=" Speak Dutch.\n").endswith("# Instructions\n\nSpeak Dutch.\n")
