"""The table of ``make attack``: how many attacks of each class were tried, stopped, or not possible here.

A pytest plugin. A test is an attack of the class that its ``attack`` marker names.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_STATES = ("tried", "held", "not held", "not applicable")


class Table:
    """Collects the outcome of every marked test, also from other processes."""

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = {}
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.broken: list[tuple[str, str, str]] = []

    def take(self, group: str, name: str, outcome: str, why: str) -> None:
        row = self.rows.setdefault(group, Counter())
        if outcome == "skipped":
            row["not applicable"] += 1
            self.reasons[(group, why)] += 1
            return
        row["tried"] += 1
        row["held" if outcome == "passed" else "not held"] += 1
        if outcome != "passed":
            self.broken.append((group, name, why))

    def text(self) -> str:
        total: Counter[str] = sum(self.rows.values(), Counter[str]())
        rows = [*sorted(self.rows.items()), ("all", total)]
        width = max(map(len, self.rows), default=0) + 2
        lines = ["".join([f"{'class':<{width}}", *(f"{state:>16}" for state in _STATES)])]
        lines += ["".join([f"{group:<{width}}", *(f"{row[state]:>16}" for state in _STATES)]) for group, row in rows]
        if self.reasons:
            lines += ["", "not applicable here:"]
            lines += [f"  {group}, {count} times: {why}" for (group, why), count in sorted(self.reasons.items())]
        if self.broken:
            lines += ["", "not held:", *(f"  {group}: {name}: {why}" for group, name, why in self.broken)]
        who = "root" if os.geteuid() == 0 else f"an unprivileged user ({os.geteuid()})"
        return "\n".join([f"Attacks, tried by {who}", "", *lines])

    def data(self) -> dict[str, Any]:
        return {
            "uid": os.geteuid(),
            "classes": {group: {state: row[state] for state in _STATES} for group, row in sorted(self.rows.items())},
            "not applicable": [
                {"class": group, "reason": why, "count": count} for (group, why), count in sorted(self.reasons.items())
            ],
            "not held": [{"class": group, "attack": name, "why": why} for group, name, why in self.broken],
        }


_table = Table()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    report: pytest.TestReport = (yield).get_result()
    marker = item.get_closest_marker("attack")
    if marker is not None:
        report.user_properties.append(("attack", marker.args[0]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    group = dict(report.user_properties).get("attack")
    if group is None or not (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
        return
    outcome: str = report.outcome
    why = ""
    if hasattr(report, "wasxfail"):
        outcome, why = ("passed" if outcome == "passed" else "failed"), str(report.wasxfail)
    elif outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = report.longrepr[2].removeprefix("Skipped: ")
    elif outcome == "failed":
        why = (report.longreprtext.strip().splitlines() or [""])[-1][:300]
    _table.take(str(group), report.nodeid.rpartition("::")[2], outcome, why)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _table.rows:
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(_table.text())
    if path := os.environ.get("HANDRAIL_ATTACK_JSON"):
        Path(path).write_text(json.dumps(_table.data(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
