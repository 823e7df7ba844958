"""The table of attacks on a whole Handrail in the outer sandbox: as a user, a mapped root and real root."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tests.attacks import outer
from tests.attacks.case import Case
from tests.attacks.cases import every_case
from tests.attacks.outer import MODES, Mode, NotApplicable, Outcome
from tests.attacks.pending import PENDING

_CASES = every_case()


@cache
def _outcomes(mode: Mode, *, slow: bool) -> dict[str, Outcome]:
    """All cases of one kind in one outer sandbox: building it costs more than most of them."""
    wanted = [case.id for case in _CASES if case.slow == slow and (mode != "real root" or case.harmless)]
    return {outcome.case: outcome for outcome in outer.run(mode, "cases", wanted)}


@cache
def _controls() -> dict[str, Outcome]:
    return {outcome.case: outcome for outcome in outer.run("user", "controls")}


def _parameters() -> list[object]:
    found: list[object] = []
    for mode in MODES:
        for case in _CASES:
            if mode == "real root" and not case.harmless:
                continue
            marks = [pytest.mark.attack(case.group), pytest.mark.xdist_group(f"attacks as {mode}")]
            if case.slow or mode == "mapped root":
                marks.append(pytest.mark.slow)
            if case.id in PENDING:
                marks.append(pytest.mark.xfail(reason=PENDING[case.id], strict=True))
            found.append(pytest.param(mode, case, id=f"{mode}: {case.id}", marks=marks))
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mode", "case"), _parameters())
def test_an_attack_does_not_get_through(mode: Mode, case: Case) -> None:
    try:
        outcome = _outcomes(mode, slow=case.slow)[case.id]
    except NotApplicable as reason:
        pytest.skip(str(reason))
    if outcome.state == "not applicable":
        pytest.skip(outcome.detail)
    assert outcome.state == "held", f"{case.id} ({case.source}; expected: {case.expected}): {outcome.detail}"


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("attacks as user")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in _CASES if case.control is not None])
def test_each_attack_reaches_its_target_without_confinement(case: Case) -> None:
    """Otherwise it would see an open door as little as a closed one."""
    try:
        outcome = _controls()[case.id]
    except NotApplicable as reason:
        pytest.skip(str(reason))
    if outcome.state == "not applicable":
        pytest.skip(outcome.detail)
    assert outcome.state == "held", outcome.detail


def test_each_attack_has_a_source_and_an_expected_outcome() -> None:
    assert len({case.id for case in _CASES}) == len(_CASES)
    assert all(case.source and case.expected for case in _CASES)


def test_no_attack_starts_in_the_namespaces_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run: a case that would start in the machine's namespaces stops."""
    if (why := outer.unavailable("user")) is not None:
        pytest.skip(why)
    real = outer._options  # pyright: ignore[reportPrivateUsage]

    def with_the_machines_name(made: Path, *, as_root: bool) -> list[str]:
        options = real(made, as_root=as_root)
        return [option for option in options if option not in ("--unshare-uts", "--hostname", "outer")]

    monkeypatch.setattr(outer, "_options", with_the_machines_name)
    with pytest.raises(RuntimeError, match="refused: the namespaces uts are the machine's own"):
        outer.run("user", "cases", ["dot-dot"])
