"""Tests go on where a process of pytest-xdist dies: by a test's time-out, by a signal.

pytest-xdist 3.8 gives what a dead process had left to another, together with what it had finished (of which no word
comes back any more) and the test that it died in (of which the next one dies). Then everybody waits for everybody, for
ever: issues 1323, 1327 and 1378 of pytest-dev/pytest-xdist.
"""

# pyright: reportMissingTypeStubs=false
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController


class GoingOn(LoadGroupScheduling):
    """Of a dead process only what is left goes to another; the test that it died in failed, and is not tried again."""

    def remove_node(self, node: WorkerController) -> str | None:
        units = self.assigned_work[node]
        unfinished = {scope: unit for scope, unit in units.items() if not all(unit.values())}
        died_in = next((test for unit in unfinished.values() for test, done in unit.items() if not done), None)
        self.assigned_work[node] = {}
        super().remove_node(node)
        if died_in is None:
            return None
        for scope, unit in unfinished.items():
            left = {test: done for test, done in unit.items() if not done and test != died_in}
            if left:
                self.workqueue[scope] = left
        for other in self.nodes:
            self._reschedule(other)
        return died_in.removesuffix(f"@{self._split_scope(died_in)}")  # its name without that of its group

    def _reschedule(self, node: WorkerController) -> None:
        """A process begins a test when it knows the one after it, or that there is none."""
        if node not in self.registered_collections:
            return  # it has not said yet which tests it finds
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GoingOn | None:
    return GoingOn(config, log) if config.getoption("dist") == "loadgroup" else None
