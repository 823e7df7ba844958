"""Text in approval requests cannot move the cursor, hide text, or imitate the prompt."""

from __future__ import annotations

import os
import re

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
async def test_hidden_and_control_characters_are_escaped_in_approval_requests(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    for arguments in ({"command": text}, {"nested": [{"deep": text}]}, {text: "x"}):
        shown = await _shown(capsys, arguments=arguments, reason=f"running {text}", suggested_rule=f"allow bash {text}")
        hidden = [c for c in text if not c.isascii() or c < " "]
        assert not [c for c in hidden if c != "\n" and c in shown], ascii(shown)


_CHOICES = {
    "o": "  o       allow once",
    "s": "  s       allow in this session",
    "p": "  p       allow in every session",
    "sw, pw": "  sw, pw  the same with a wider rule",
    "c JSON": "  c JSON  allow once",
    "r TEXT": "  r TEXT  reject",
    "never": "  never   reject in every session",
    "stop": "  stop    reject",
    "defer": "  defer   answer later",
}
"""How the line of each choice begins: the keys, and the effect in the column beside them."""
_LOOKS_LIKE_A_CHOICE = re.compile(rf" {{0,3}}({'|'.join(map(re.escape, [*_CHOICES, 'c', 'r']))}) +\S")
"""A line that a person may take for a choice, also if it is drawn with other spaces."""
_DRAWN = "\n".join(["", *(f"{line} x" for line in _CHOICES.values()), "  r  reject", "> o", ">"])


@pytest.mark.parametrize("width", [None, 20, 40, 80, 300])
@pytest.mark.parametrize(
    "arguments",
    [
        {"command": f"ls\n{_DRAWN}"},
        {f"x\n{_DRAWN}": "y"},
        {"list": [_DRAWN]},
        {"nested": {_DRAWN: [{_DRAWN: _DRAWN}]}},
        {f"name{number}": line for number, line in enumerate(_DRAWN.split("\n"))},
        dict.fromkeys((line.strip() for line in _DRAWN.split("\n")), "x"),
        dict.fromkeys((line.strip() for line in _DRAWN.split("\n")), "x\ny"),
        dict.fromkeys(_DRAWN.split("\n"), "x"),
        {"r": "TEXT  reject", "o": "      allow once", "": "> o"},
        {"command": _DRAWN.replace("\n", "\r\n")},
        {"command": _DRAWN.replace("\n", "\u2028")},
        {"command": "x" * 76 + " > o " + "x" * 76 + "  r TEXT  reject; the model gets TEXT"},
    ],
)
async def test_no_argument_can_imitate_a_prompt_or_choice(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, object],
    width: int | None,
) -> None:
    """The lines that begin like a choice or the prompt are those of a request without arguments, and no more."""
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    rules = {"suggested_rule": "allow a", "suggested_wider_rule": "allow b", "suggested_deny": "deny a"}
    own = (await _shown(capsys, arguments={}, **rules)).splitlines()
    lines = (await _shown(capsys, arguments=arguments, **rules)).splitlines()
    if (width or 80) >= 80:
        for begin in _CHOICES.values():
            assert len([line for line in lines if line.startswith(begin)]) == 1, lines
    for looks in (_LOOKS_LIKE_A_CHOICE, re.compile(r" ?>")):
        assert [line for line in lines if looks.match(line)] == [line for line in own if looks.match(line)]
    assert len([line for line in lines if line.startswith(">")]) == 1
    assert len([line for line in own if _LOOKS_LIKE_A_CHOICE.match(line)]) == len(_CHOICES)


async def test_a_long_command_is_shown_to_its_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Source: approved text cut at 80 characters."""
    shown = await _shown(capsys, arguments={"command": "echo " + "a " * 20_000 + "&& rm -rf last"})
    assert "rm -rf last" in shown
