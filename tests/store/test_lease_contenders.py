"""Several processes that contend for a lease, paused and killed at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.store.leases import ManualClock, abandon, acquire_lease
from tests.store.places import Place

from handrail.store.lease import STALE_NS, VALID_NS, WorkspaceAlreadyHeld, WorkspaceLease
from handrail.store.state_folders import prepare_folders


class LeaseContenders(RuleBasedStateMachine):
    """Several processes, paused and killed at any moment: never two that may act."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.room = tempfile.TemporaryDirectory()
        place = Place.beneath(Path(self.room.name))
        self.folders = prepare_folders(place.workspace, place.state)
        self.time = ManualClock()
        self.leases: list[WorkspaceLease] = []
        self.tokens: list[int] = []

    @rule(ns=st.sampled_from([1, VALID_NS // 3, VALID_NS - 1, VALID_NS, STALE_NS - 1, STALE_NS, 10**15]))
    def pass_time(self, ns: int) -> None:
        self.time.now += ns

    @rule()
    def acquire(self) -> None:
        free = not any(lease.is_valid for lease in self.leases)
        try:
            lease = acquire_lease(self.folders, self.time)
        except WorkspaceAlreadyHeld:
            return
        assert free
        self.leases.append(lease)
        self.tokens.append(lease.token)

    @rule(data=st.data(), pause=st.sampled_from([0, VALID_NS, STALE_NS]), rival=st.booleans())
    def renew(self, data: st.DataObject, pause: int, rival: bool) -> None:
        if not self.leases:
            return

        def meanwhile() -> None:
            self.time.now += pause
            if rival:
                self.acquire()

        self.time.then = meanwhile
        data.draw(st.sampled_from(self.leases)).renew()
        self.time.then = None

    @rule(data=st.data(), killed=st.booleans())
    def end(self, data: st.DataObject, killed: bool) -> None:
        if self.leases:
            lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            abandon(lease) if killed else lease.release()

    @invariant()
    def at_most_one_may_act(self) -> None:
        valid = [lease for lease in self.leases if lease.is_valid]
        assert len(valid) <= 1
        assert not valid or valid[0].token == max(self.tokens)
        assert self.tokens == sorted(set(self.tokens))

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        self.room.cleanup()


@pytest.mark.proves("L-07")
def test_at_most_one_of_several_contending_processes_may_act() -> None:
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        LeaseContenders, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
