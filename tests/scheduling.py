"""Continue after a pytest-xdist process dies by a timeout or signal, and distribute tests cheaply.

pytest-xdist 3.8 gives what a dead process had left to another, together with what it had finished (of which no word
comes back any more) and the test that it died in (of which the next one dies). Then everybody waits for everybody, for
ever: issues 1323, 1327 and 1378 of pytest-dev/pytest-xdist. And after each test it counts through all that were before
it, which is a tenth of the work of thousands of small ones.
"""

# pyright: reportMissingTypeStubs=false
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

AHEAD = 8
"""Tests that a process knows beyond the one it runs: while it knows none it waits for this one."""


class GoingOn(LoadGroupScheduling):
    """Only the remaining tests of a dead process move to another; the one it died in has failed and is not repeated.

    A process's assigned work is what it has not finished.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._places: dict[WorkerController, dict[str, int]] = {}

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        self._places[node] = {test: place for place, test in enumerate(collection)}

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        test = self.registered_collections[node][item_index]
        scope = self._split_scope(test)
        unit = self.assigned_work[node][scope]
        unit[test] = True
        if all(unit.values()):
            del self.assigned_work[node][scope]
        self._reschedule(node)

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
        """A process starts a test when it knows the next one, or that there is none.

        It is given several at a time, until so few are left that the last ones are better shared out one by one.
        """
        if node not in self.registered_collections or node.shutting_down:
            return  # it has not said yet which tests it finds, or it needs no more
        if not self.workqueue:
            node.shutdown()
            return
        known = self._pending_of(self.assigned_work[node])
        if known > 2:
            return
        wanted = AHEAD if len(self.workqueue) > 8 * AHEAD * len(self.nodes) else 3
        given: list[int] = []
        while self.workqueue and known < wanted:
            scope, unit = self.workqueue.popitem(last=False)
            self.assigned_work[node][scope] = unit
            given += (self._places[node][test] for test, done in unit.items() if not done)
            known += len(unit)
        node.send_runtest_some(given)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GoingOn | None:
    return GoingOn(config, log) if config.getoption("dist") == "loadgroup" else None
