"""The corpus of shell commands and their decisions. Nothing here runs any of them."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet
from tests.policy import shell_cases
from tests.policy.desk import AuthorizerFixture
from tests.policy.shell_cases import ShellCase
from tests.policy.shell_program_cases import PROGRAMS, WRONG

pytestmark = [pytest.mark.attack("shell"), pytest.mark.proves("P-05")]

_CASES: list[ShellCase] = [
    *shell_cases.UNDERSTOOD,
    *shell_cases.DESTROYING,
    *shell_cases.NOT_DESTROYING,
    *shell_cases.EXPANSIONS,
    *shell_cases.STRUCTURE,
    *shell_cases.CHARACTERS,
    *shell_cases.REDIRECTED,
    *shell_cases.COMPOUND,
    *shell_cases.MISREAD,
    *(ShellCase(text, "ask", f"{one.program}: {why}") for one in PROGRAMS for text, why in one.harmful),
    *(ShellCase(text, "allow", f"{one.program}: harmless") for one in PROGRAMS for text in one.harmless),
]


def _parameter(case: ShellCase) -> ParameterSet:
    marks = [pytest.mark.xfail(reason=WRONG[case.text], strict=True)] if case.text in WRONG else []
    return pytest.param(case, id=f"{case.why}: {case.text[:40]!a}", marks=marks)


@pytest.mark.parametrize("case", [_parameter(case) for case in _CASES])
def test_each_shell_text_gets_the_decision_listed_in_the_corpus(desk: AuthorizerFixture, case: ShellCase) -> None:
    verdict = desk.bash(case.text, *case.rules)
    assert verdict.action == case.decision, f"{case.text!r} ({case.why}): {verdict.reason}"


def test_the_corpus_has_at_least_three_hundred_distinct_cases() -> None:
    keys = [(case.text, case.rules) for case in _CASES]
    assert len(keys) == len(set(keys)) >= 300
