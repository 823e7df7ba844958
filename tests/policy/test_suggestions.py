"""What "always" would store: a rule that, read again from its text, is about exactly the call that was approved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.policy.desk import BASH, TRANSFER, WRITE, Desk

pytestmark = pytest.mark.proves("P-08")

_NAMES = st.text(st.sampled_from("ab*?[]{}!-^ .'\"\\$é|&;>"), min_size=1, max_size=6)
_WORDS = st.lists(
    st.text(st.sampled_from("ab*?[]{}!-^ .'\"\\$é|&;>=/"), min_size=1, max_size=5), min_size=1, max_size=4
)


def _mutated(text: str) -> list[str]:
    """Texts beside ``text``: one character less, more, or another."""
    return [
        text[1:],
        text[:-1],
        text + "x",
        "x" + text,
        text.replace("*", "aa"),
        text.replace("?", "a"),
        text.swapcase(),
    ]


@given(_NAMES)
def test_for_a_path_it_is_about_that_path(desk: Desk, name: str) -> None:
    path = f"src/{name}"
    verdict = desk.judge(WRITE, {"path": path})
    assume(verdict.action == "ask" and verdict.always is not None)
    rule = str(verdict.always)
    assert desk.judge(WRITE, {"path": path}, rule).action == "allow"
    target = verdict.targets[0].value
    for other in _mutated(name):
        judged = desk.judge(WRITE, {"path": f"src/{other}"}, rule)
        if (
            judged.targets
            and judged.targets[0].value != target
            and not judged.targets[0].value.startswith(f"{target}/")
        ):
            assert judged.action != "allow", (rule, other)


@given(_WORDS)
def test_for_a_command_it_is_about_those_words(desk: Desk, words: list[str]) -> None:
    def quoted(argv: list[str]) -> str:
        return " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in argv)

    argv = ["tool", *words]
    verdict = desk.bash(quoted(argv))
    assume(verdict.action == "ask" and verdict.always is not None)
    rule = str(verdict.always)
    assert desk.bash(quoted(argv), rule).action == "allow"
    others = [[*argv, "x"], argv[:-1], ["x", *argv], *([*argv[:-1], other] for other in _mutated(argv[-1]))]
    for other in others:
        if other != argv:
            assert desk.judge(BASH, {"command": quoted(other)}, rule).action != "allow", (rule, other)


@given(st.fixed_dictionaries({"source": _NAMES, "target": _NAMES}, optional={"amount": st.integers(0, 99)}))
def test_for_other_arguments_it_is_about_those_values(desk: Desk, arguments: dict[str, Any]) -> None:
    verdict = desk.judge(TRANSFER, arguments)
    assume(verdict.always is not None)
    rule = str(verdict.always)
    assert desk.judge(TRANSFER, arguments, rule).action == "allow"
    for other in _mutated(arguments["source"]):
        if other != arguments["source"]:
            assert desk.judge(TRANSFER, {**arguments, "source": other}, rule).action == "ask"
    assert desk.judge(TRANSFER, {**arguments, "amount": 100}, rule).action == "ask"
    assert desk.judge(TRANSFER, {**arguments, "more": 1}, rule).action == "ask"
