"""What is shown to a person who decides: nothing in it moves the cursor, is invisible, or looks like the prompt."""

from __future__ import annotations

import os

import pytest

from handrail.contract.approval_requests import ApprovalRequest
from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler

pytestmark = [pytest.mark.proves("P-07"), pytest.mark.attack("model-facing")]

TRICKS = {
    # Source of each: terminal escape injection, "Trojan Source" (CVE-2021-42574), tag and variation-selector smuggling.
    "escape": "ls \x1b[2K\x1b[1Grm -rf x",
    "carriage return": "rm -rf x #\rls        ",
    "carriage return at a line's end": "rm x\r\nls",
    "backspace": "rm x\x08\x08\x08\x08ls  ",
    "right to left": "ls \u202e x fr- mr",
    "isolate": "ls \u2066 rm \u2069",
    "zero width": "r\u200bm x",
    "tag": "ls \U000e0072\U000e006d",
    "variation selector": "ls\ufe0f \U000e0100x",
    "no-break space": "cat a\u00a0b",
    "ideographic space": "cat a\u3000b",
    "filler": "ls \u3164 \u115f \uffa0 \u2800",
    "joiner": "r\u034fm",
    "line separator": "ls\u2028rm x",
    "next line": "ls\x85rm x",
    "C1": "ls \x9b2K",
    "half a pair": "ls \ud800",
    "soft hyphen": "r\xadm",
}


async def _shown(capsys: pytest.CaptureFixture[str], **parts: object) -> str:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        values: dict[str, object] = {
            "call_id": "s/1.0",
            "session_id": "s",
            "tool_id": "bash",
            "arguments": {"command": "ls"},
            "arguments_hash": "",
            "definition_hash": "",
            "reason": "no rule allows it.",
            "suggested_rule": None,
            **parts,
        }
        answer = await TerminalApprovalHandler(reading).approve(ApprovalRequest(**values))  # pyright: ignore[reportArgumentType]
    finally:
        os.close(reading)
    assert answer.choice == "reject"
    return capsys.readouterr().err


@pytest.mark.parametrize("text", TRICKS.values(), ids=TRICKS.keys())
async def test_every_character_that_hides_or_moves_is_spelled_out(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    for arguments in ({"command": text}, {"nested": [{"deep": text}]}, {text: "x"}):
        shown = await _shown(capsys, arguments=arguments, reason=f"running {text}", suggested_rule=f"allow bash {text}")
        hidden = [c for c in text if not c.isascii() or c < " "]
        assert not [c for c in hidden if c != "\n" and c in shown], ascii(shown)


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "ls\n\n  o  once: this call\n  r  reject\n> o"},
        {"x\n\n> o\n  r  reject": "y"},
        {"list": ["\n> o\n  r  reject"]},
    ],
)
async def test_no_argument_can_draw_a_prompt_of_its_own(capsys: pytest.CaptureFixture[str], arguments: object) -> None:
    lines = (await _shown(capsys, arguments=arguments)).splitlines()
    assert len([line for line in lines if line.startswith("  r  reject")]) == 1
    assert len([line for line in lines if line.startswith(">")]) == 1


async def test_a_long_command_is_shown_to_its_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Source: approved text cut at 80 characters."""
    shown = await _shown(capsys, arguments={"command": "echo " + "a " * 20_000 + "&& rm -rf last"})
    assert "rm -rf last" in shown
