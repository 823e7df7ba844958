"""States of an approval: answered once, in time, used once; also against a model and under concurrency."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arbiter.shaping import ShaperFixture

from handrail.arbiter.approvals.approval_broker import HOUR_NS, ID_ALPHABET, ApprovalBroker, generate_prefixed_id
from handrail.contract.approval_requests import Approval, ApprovalAnswer, ApprovalChoice, ApprovalRequest
from handrail.contract.errors import ToolError
from handrail.record.commit_log import CommitLog, Record
from handrail.record.verification import verify_log
from handrail.store.tables.approval_tables import ApprovalTable
from handrail.store.workspace_store import WorkspaceStore


class Clock:
    now_ns = 1_000_000 * HOUR_NS

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class ApprovalFixture:
    """The requests of a workspace in a temporary folder, opened as often as wanted."""

    folder: Path
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        (self.folder / "ws").mkdir()
        self.shaper = ShaperFixture(self.folder).shaper

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[ApprovalBroker]:
        store = WorkspaceStore.open(self.folder / "ws", self.folder / "state")
        try:
            self.log = CommitLog(store.database)
            approvals = ApprovalBroker(ApprovalTable(store.database), self.log, self.shaper, clock=self.clock)
            yield approvals
            approvals.close()
            await self.log.flush()
        finally:
            await store.aclose()


def request(call_id: str = "ses_1/1.0") -> ApprovalRequest:
    arguments = {"source": "a"}
    return ApprovalRequest(call_id, "ses_1", "pay", arguments, "hash", "definition", "why", "allow pay", "deny pay")


async def store_request(approvals: ApprovalBroker, call_id: str = "ses_1/1.0") -> Approval:
    row = approvals.create_unstored_request(request(call_id))
    await approvals.store_request_with_records(
        row, [Record("approval-requested", "ses_1", call_id, {"approval": row.id})], whole=True
    )
    return row


async def is_refused(attempt: Callable[[], object], kind: str = "conflict") -> str:
    with pytest.raises(ToolError) as raised:
        await attempt()  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    assert raised.value.kind == kind
    return raised.value.text


ONCE = ApprovalAnswer("once")
INTENT = [Record("intended", "ses_1", "ses_1/1.0", {"locks": []})]

_numbers = st.integers(0, 5)
_steps = st.one_of(
    st.just(("ask",)),
    st.tuples(st.just("decide"), _numbers, st.sampled_from(["once", "session", "project", "reject", "stop", "defer"])),
    st.tuples(st.just("use"), _numbers),
    st.tuples(st.just("let go"), _numbers),
    st.tuples(st.just("advance"), st.sampled_from([1, 23, 25, 100, 169])),
    st.just(("sweep",)),
    st.just(("restart",)),
)


@dataclass
class ExpectedRequest:
    """The state of one request in the model."""

    state: str
    expires_ns: int
    grant_expires_ns: int = 0
    answered: bool = False


@pytest.mark.proves("P-07", "P-09")
@settings(max_examples=25, deadline=None)
@given(st.lists(_steps, min_size=5, max_size=40))
def test_an_approval_request_follows_its_state_model_under_any_sequence_of_operations(
    steps: list[tuple[object, ...]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_follow(ApprovalFixture(Path(folder)), steps))


async def _follow(desk: ApprovalFixture, steps: list[tuple[object, ...]]) -> None:
    model: dict[str, ExpectedRequest] = {}
    ids: list[str] = []
    left = list(steps)
    while left:
        async with desk.open() as approvals:
            while left:
                step = left.pop(0)
                if step[0] == "restart":
                    break
                await _take(desk, approvals, model, ids, step)
                now = desk.clock()
                pending = {row.id for row in approvals.list_pending()}
                assert pending == {
                    i for i, known in model.items() if known.state == "pending" and known.expires_ns > now
                }
                assert {i: approvals.get(i).state for i in ids} == {i: known.state for i, known in model.items()}
    async with desk.open():
        used = [known for known in model.values() if known.state == "used"]
        intents = list(desk.log.reader.records(kind="intended"))
        assert len(intents) == len(used)
        assert verify_log(desk.log.reader).ok


async def _take(
    desk: ApprovalFixture,
    approvals: ApprovalBroker,
    model: dict[str, ExpectedRequest],
    ids: list[str],
    step: tuple[object, ...],
) -> None:
    now = desk.clock()
    if step[0] == "ask":
        row = await store_request(approvals, f"ses_1/1.{len(ids)}")
        ids.append(row.id)
        model[row.id] = ExpectedRequest("pending", row.request.expires_ns)
    elif step[0] == "advance":
        desk.clock.now_ns += int(str(step[1])) * HOUR_NS
    elif step[0] == "sweep":
        await approvals.expire_overdue_requests()
        for known in model.values():
            if known.state == "pending" and known.expires_ns <= now:
                known.state = "expired"
    elif ids:
        chosen = ids[int(str(step[1])) % len(ids)]
        known = model[chosen]
        if step[0] == "let go":
            approvals.withdraw(approvals.get(chosen))
            known.answered = True
            if known.state in ("pending", "approved"):
                known.state = "withdrawn"
        elif step[0] == "use":
            can = known.state == "approved" and not known.answered and known.grant_expires_ns > now
            intent = [Record("intended", "ses_1", approvals.get(chosen).request.call_id, {})]
            if can:
                await approvals.consume_approvals([approvals.get(chosen)], intent)
                known.state, known.answered = "used", True
            else:
                await is_refused(lambda: approvals.consume_approvals([approvals.get(chosen)], intent))
        else:
            choice: ApprovalChoice = step[2]  # pyright: ignore[reportAssignmentType]
            if known.state != "pending" or known.expires_ns <= now:
                await is_refused(lambda: approvals.decide(chosen, ApprovalAnswer(choice), by="test"))
            else:
                decided = await approvals.decide(chosen, ApprovalAnswer(choice), by="test")
                if choice != "defer":
                    known.state = "rejected" if choice in ("reject", "stop") else "approved"
                    known.grant_expires_ns = decided.grant_expires_ns or 0


@pytest.mark.proves("P-09")
async def test_one_of_many_calls_uses_a_grant_and_the_others_leave_no_intent(tmp_path: Path) -> None:
    """Source: the approval check ran twice, and so did its side effect."""
    desk = ApprovalFixture(tmp_path)
    async with desk.open() as approvals:
        row = await store_request(approvals)
        granted = await approvals.decide(row.id, ONCE, by="test")
        uses = [approvals.consume_approvals([granted], INTENT) for _ in range(50)]
        outcomes = await asyncio.gather(*uses, return_exceptions=True)
        assert sum(outcome is None for outcome in outcomes) == 1
        assert {error.kind for error in outcomes if isinstance(error, ToolError)} == {"conflict"}
        assert sum(isinstance(error, ToolError) for error in outcomes) == 49
        assert len(list(desk.log.reader.records(kind="intended"))) == 1
        assert approvals.get(row.id).state == "used" and desk.log.unavailable_reason is None
        assert verify_log(desk.log.reader).ok


@pytest.mark.proves("P-09")
async def test_a_call_that_needs_two_grants_uses_neither_if_one_is_used_up(tmp_path: Path) -> None:
    desk = ApprovalFixture(tmp_path)
    async with desk.open() as approvals:
        first, second = await store_request(approvals), await store_request(approvals)
        rows = [await approvals.decide(row.id, ONCE, by="test") for row in (first, second)]
        await approvals.consume_approvals([rows[1]], [])
        await is_refused(lambda: approvals.consume_approvals(rows, INTENT))
        assert approvals.get(first.id).state == "approved"
        assert not list(desk.log.reader.records(kind="intended"))


@pytest.mark.proves("P-09")
async def test_an_approval_request_expires_after_seven_days_and_an_unused_grant_after_one(tmp_path: Path) -> None:
    desk = ApprovalFixture(tmp_path)
    async with desk.open() as approvals:
        late, used, unused = [await store_request(approvals, f"ses_1/1.{n}") for n in range(3)]
        desk.clock.now_ns += 7 * 24 * HOUR_NS - 1
        grant = await approvals.decide(used.id, ONCE, by="test")
        spare = await approvals.decide(unused.id, ONCE, by="test")
        desk.clock.now_ns += 1
        assert "expired after 7 days without an answer" in await is_refused(
            lambda: approvals.decide(late.id, ONCE, by="test")
        )
        assert approvals.list_pending() == []
        desk.clock.now_ns += 24 * HOUR_NS - 2
        await approvals.consume_approvals([grant], INTENT)
        desk.clock.now_ns += 1
        assert "expired unused after 24 hours" in await is_refused(lambda: approvals.consume_approvals([spare], INTENT))


async def test_a_waiter_gets_the_expired_state_of_an_overdue_approval_request(tmp_path: Path) -> None:
    desk = ApprovalFixture(tmp_path)
    async with desk.open() as approvals:
        row = await store_request(approvals)
        answered = approvals.register_decision_waiter(row)
        desk.clock.now_ns += 8 * 24 * HOUR_NS
        await approvals.expire_overdue_requests()
        assert (await answered).state == "expired"
        (record,) = desk.log.reader.records(kind="approval-responded")
        assert record.body is not None and record.body["choice"] == "expired"


async def test_an_answer_given_before_the_wait_is_returned(tmp_path: Path) -> None:
    async with ApprovalFixture(tmp_path).open() as approvals:
        row = await store_request(approvals)
        await approvals.decide(row.id, ApprovalAnswer("reject", "no"), by="test")
        assert (await approvals.register_decision_waiter(row)).message == "no"


@pytest.mark.parametrize(
    ("change", "choice", "said"),
    [
        ({"suggested_rule": None}, "session", "no rule that would allow"),
        ({"suggested_rule": None}, "project", "no rule that would allow"),
        ({"suggested_deny": None}, "reject-always", "no rule that would deny"),
        (
            {"suggested_wider_rule": None},
            "session-wider",
            "no wider rule that is safe, so `session-wider` is not available. Use session or once",
        ),
        (
            {"suggested_wider_rule": None},
            "project-wider",
            "no wider rule that is safe, so `project-wider` is not available. Use project or once",
        ),
        ({}, "sure", "does not accept `sure`. Answer with one of"),
    ],
)
async def test_an_answer_that_was_not_offered_is_refused(
    tmp_path: Path, change: dict[str, None], choice: ApprovalChoice, said: str
) -> None:
    async with ApprovalFixture(tmp_path).open() as approvals:
        row = approvals.create_unstored_request(replace(request(), **change))  # pyright: ignore[reportArgumentType]
        await approvals.store_request_with_records(row, [], whole=True)
        assert said in await is_refused(
            lambda: approvals.decide(row.id, ApprovalAnswer(choice), by="test"), "invalid_input"
        )
        assert approvals.get(row.id).is_pending


async def test_a_failing_watcher_does_not_affect_the_request_or_other_watchers(tmp_path: Path) -> None:
    told: list[str] = []
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))

    def fails(row: Approval) -> None:
        raise RuntimeError(row.state)

    async with ApprovalFixture(tmp_path).open() as approvals:
        approvals.subscribe_to_requests(fails)
        stop = approvals.subscribe_to_requests(lambda row: told.append(row.state))
        row = await store_request(approvals)
        await approvals.decide(row.id, ONCE, by="test")
        stop()
        approvals.withdraw(approvals.get(row.id))
    assert told == ["pending", "approved"] and len(problems) == 3


@given(st.integers(0, 100))
def test_an_approval_id_is_short_and_has_no_ambiguous_letters(again: int) -> None:
    prefix, _, rest = generate_prefixed_id("apr").partition("_")
    assert prefix == "apr" and len(rest) == 8 and set(rest) <= set(ID_ALPHABET)
