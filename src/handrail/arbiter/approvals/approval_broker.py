"""Approval requests: each is created once, answered once from any frontend, and used once.

A request is stored before any user sees it. The first answer changes its row; a later one gets ``conflict`` and the first
answer. An answer wakes a call that waits in this process, wherever the answer came from. A call whose process has ended is
resumed when its session is opened again. This module also applies what an answer changes beyond its call: the rules of open
sessions, and the stop of a session. Nothing here runs a call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handrail.arbiter.approvals.run_file_binding import ExecutedFileFinder
from handrail.arbiter.call_state import Call, Lane
from handrail.arbiter.output.shaper import OutputShaper
from handrail.contract.approval_requests import (
    APPROVAL_CHOICES,
    APPROVING_CHOICES,
    Approval,
    ApprovalAnswer,
    ApprovalChoice,
    ApprovalKind,
    ApprovalRequest,
    ApprovalState,
    StoredProjectRule,
)
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.services.file_services import PathResolver
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool_generation import Generation, ToolEntry
from handrail.policy import rule_suggestions
from handrail.policy.call_authorizer import CallAuthorizer, PolicyVerdict
from handrail.policy.rule_suggestions import PROJECT_SOURCE, REJECTION_SOURCE
from handrail.policy.rules.rules_and_modes import Rule, RuleBook, Scope, parse_rule
from handrail.record.commit_log import CommitLog, InterruptedCall, Record
from handrail.runtime.files.session_roots import SessionRoots
from handrail.store.database.workspace_database import TableWork
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.store.tables.approval_tables import ApprovalTable

# The content of a request: the answers that it offers, its lifetime, and its wording.

HOUR_NS = 3_600_000_000_000
ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's alphabet: no letter that resembles a digit or another letter."""


CHOICE_WITHOUT_RULE: dict[ApprovalChoice, ApprovalChoice] = {
    "session": "once",
    "project": "once",
    "session-wider": "once",
    "project-wider": "once",
    "reject-always": "reject",
}
"""The choice that an approval handler's answer counts as if the request offers no rule: never more than was said."""
_STORED: dict[ApprovalChoice, tuple[str, Scope]] = {
    "session": (rule_suggestions.SESSION_SOURCE, "session"),
    "project": (rule_suggestions.PROJECT_SOURCE, "project"),
    "session-wider": (rule_suggestions.SESSION_SOURCE, "session"),
    "project-wider": (rule_suggestions.PROJECT_SOURCE, "project"),
    "reject-always": (rule_suggestions.REJECTION_SOURCE, "project"),
}


_FOR_A_SESSION: frozenset[ApprovalChoice] = frozenset({"session", "session-wider"})


class ApprovalLifetimes(Struct, frozen=True):
    """How long a request can be answered, and how long an unused approval stays valid."""

    request_ns: int = 7 * 24 * HOUR_NS
    grant_ns: int = 24 * HOUR_NS


def generate_prefixed_id(prefix: str) -> str:
    """Return a new id with 40 random bits, short enough to type."""
    return f"{prefix}_{''.join(secrets.choice(ID_ALPHABET) for _ in range(8))}"


def check_answer_offered(row: Approval, answer: ApprovalAnswer) -> None:
    """Check that a request offers an answer.

    :raises ToolError: ``invalid_input`` if it does not
    """
    choice, request, problem = answer.choice, row.request, ""
    if choice not in APPROVAL_CHOICES:
        problem = f"does not accept `{escape_terminal_controls(str(choice)[:40])}`. Answer with one of: {', '.join(APPROVAL_CHOICES)}."
    elif row.kind == "question" and choice not in ("reject", "stop"):
        problem = "asks a question. Answer the question, or use reject or stop."
    # A session rule would apply to all clients of the session, and only one of them has answered.
    elif choice in _FOR_A_SESSION and request.is_shared:
        problem = (
            f"belongs to a session that several clients share, so `{choice}` is not available. Use once or project."
        )
    elif choice in ("session", "project") and request.suggested_rule is None:
        problem = f"has no rule that would allow only this call, so `{choice}` is not available. Use once or reject."
    elif choice in ("session-wider", "project-wider") and request.suggested_wider_rule is None:
        narrower = choice.removesuffix("-wider")
        problem = f"has no wider rule that is safe, so `{choice}` is not available. Use {narrower} or once."
    elif choice == "reject-always" and request.suggested_deny is None:
        problem = "has no rule that would deny only this call, so `reject-always` is not available. Use reject."
    elif answer.arguments is not None and choice != "once":
        problem = (
            f"does not accept changed arguments with `{choice}`: a rule covers only the shown arguments. Use once."
        )
    if problem:
        raise ToolError(f"Request {row.id} {problem}", kind="invalid_input")


def make_answer_record(row: Approval, body: dict[str, Any]) -> Record:
    request = row.request
    return Record("approval-responded", request.session_id, request.call_id, {"approval": row.id, **body})


def explain_closed_request(row: Approval, lifetimes: ApprovalLifetimes) -> str:
    """Return the error text for a request that can no longer be answered."""
    if row.is_pending or row.state == "expired":
        lasting = _describe_lifetime(lifetimes.request_ns)
        return (
            f"Request {row.id} expired after {lasting} without an answer. Run the call again to create a new request."
        )
    if row.state == "withdrawn":
        return f"Request {row.id} was withdrawn: its call was stopped or refused, or its session was closed."
    answer = row.choice or row.state
    return f"Request {row.id} was already answered with `{answer}` ({row.decided_by}). The first answer is final."


def explain_unusable_approval(approval_id: str, row: Approval | None, lifetimes: ApprovalLifetimes) -> str:
    """Return the error text for an approval that can no longer be used."""
    if row is not None and row.state == "approved":
        lasting = _describe_lifetime(lifetimes.grant_ns)
        return f"Approval {approval_id} expired unused after {lasting}. Nothing was run. Make the call again."
    state = "deleted" if row is None else row.state
    return f"Approval {approval_id} is {state} and is valid for one run. Nothing was run. Make the call again."


def _describe_lifetime(lifetime_ns: int) -> str:
    hours = lifetime_ns / HOUR_NS
    return f"{hours / 24:g} days" if hours >= 48 else f"{hours:g} hours"


def make_rule_from_answer(row: Approval) -> Rule | None:
    """Return the rule that an answer stores; None if it stores none."""
    text = None if row.choice is None else format_rule_for_choice(row.request, row.choice)
    if text is None or row.choice is None:
        return None
    source, scope = _STORED[row.choice]
    return parse_rule(text, scope=scope, source=source)


def format_rule_for_choice(request: ApprovalRequest, choice: ApprovalChoice) -> str | None:
    """Return the rule that this choice would store, as the request shows it."""
    if choice in _FOR_A_SESSION and request.is_shared:
        return None
    if choice in ("session", "project"):
        return request.suggested_rule
    if choice in ("session-wider", "project-wider"):
        return request.suggested_wider_rule
    return request.suggested_deny if choice == "reject-always" else None


def evaluate_changed_arguments(
    entry: ToolEntry, given: Mapping[str, Any], authority: CallAuthorizer, rules: RuleBook, roots: PathResolver
) -> PolicyVerdict:
    """Evaluate arguments that a user gives instead of the proposed ones.

    :raises ToolError: ``invalid_input`` if the tool does not accept them, ``denied`` if a rule denies them
    """
    arguments = entry.validate_arguments(dict(given))
    origin, behind = entry.tool.origin, entry.answering_spec
    verdict = authority.evaluate(entry.spec, arguments, rules=rules, roots=roots, origin=origin, substitute=behind)
    if verdict.action == "deny":
        raise ToolError(verdict.reason, kind="denied")
    return verdict


MAX_PENDING_PER_SESSION = 100
MAX_PENDING_PER_WORKSPACE = 1_000
"""Limits of pending requests. A flood of requests makes users approve without reading."""
_MOST_LEAVING = 10_000
_LONGEST_TIMER_S = 600.0
"""Expiry is checked again at least this often, since clocks can be set."""
_AGAIN_NS = 10_000_000_000
"""The next check of expiry if the database could not be read."""

EvaluateChanged = Callable[[Approval, Mapping[str, Any]], Mapping[str, str]]
"""Checks arguments that a user changed, and returns the files that a call with them runs.

:raises ToolError: ``invalid_input`` if they do not fit the schema, ``denied`` if a rule denies them
"""


class OpenSessionAccess(NamedTuple):
    """Access to the open sessions of the process that holds a workspace.

    :param find_lane: returns the lane of an open session, by its id
    :param list_lanes: returns the lanes of all open sessions
    :param current_policy: returns what evaluates a suspended call whose session is not open
    """

    find_lane: Callable[[str], Lane | None]
    list_lanes: Callable[[], Iterable[Lane]]
    current_policy: Callable[[], tuple[Generation, CallAuthorizer, RuleBook, SessionRoots]]


class ApprovalBroker:
    """The approval requests of one workspace, for all frontends. Use it on the kernel's event loop.

    :param clock: wall-clock time in nanoseconds
    :raises LogUnavailable: by every method that reads or writes, if the database fails
    """

    def __init__(
        self,
        table: ApprovalTable,
        log: CommitLog,
        shaper: OutputShaper,
        lifetimes: ApprovalLifetimes | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._table = table
        self._log = log
        self._shaper = shaper
        self.lifetimes = lifetimes or ApprovalLifetimes()
        self._clock = clock
        self._waiting: dict[str, _WaitingCall] = {}
        self._asking: dict[str, str] = {}
        """The sessions of requests that are being made durable, by request id."""
        self._leaving: set[str] = set()
        """Ids of withdrawn requests whose withdrawal may not be durable yet."""
        self._listeners: list[Callable[[Approval], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._sessions: OpenSessionAccess | None = None

    # ── for frontends ────────────────────────────────────────────────────────────────────────────

    def list_pending(self, session_id: str | None = None) -> list[Approval]:
        """Return the requests that can be answered now, the oldest first."""
        rows = self._table.reader.list_pending_requests(self._clock(), session_id=session_id)
        # A withdrawn request stays in the table until the write is durable. It must not be offered any more.
        return [row for row in rows if row.id not in self._leaving] if self._leaving else rows

    def get(self, approval_id: str) -> Approval:
        """Return one request, in any state.

        :raises ToolError: ``invalid_input`` if it does not exist
        """
        if (found := self._table.reader.get(approval_id)) is None:
            raise ToolError(
                f"Request `{escape_terminal_controls(approval_id[:40])}` does not exist in this workspace. List pending requests with `handrail approve`.",
                kind="invalid_input",
            )
        return self._row_after_pending_writes(found)

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """Answer a request. The answer is durable on return.

        This runs nothing: the call continues in the process where it waits, or when its session is resumed.

        :param by: the frontend, for the record
        :raises ToolError: ``invalid_input`` for an invalid answer; ``denied`` for changed arguments that a rule denies (the request
            stays pending); ``conflict`` if it was answered before, has expired, or its call was stopped
        """
        # The row is read before anything is computed, so the second of two answers gets a clear conflict.
        row = self._get_open(approval_id)
        if answer.choice == "defer":
            return row
        check_answer_offered(row, answer)
        now = self._clock()
        decided = replace(
            row,
            state="approved" if answer.choice in APPROVING_CHOICES else "rejected",
            choice=answer.choice,
            message=self._shaper.redactor.redact_text(answer.message),
            decided_ns=now,
            decided_by=by,
        )
        if decided.state == "approved":
            decided = replace(decided, grant_expires_ns=now + self.lifetimes.grant_ns)
        if answer.arguments is not None:
            decided = self._apply_changed_arguments(decided, answer.arguments)
        return await self._write_decision(decided, now, self._rule_works(decided, now))

    async def answer_questions(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """Answer the questions of a request with one list per question; see :meth:`decide`."""
        row = self._get_open(approval_id)
        if row.kind != "question":
            raise ToolError(
                f"Request {row.id} asks for approval of `{row.request.tool_id}` and has no questions. Answer with once, session, "
                "project, reject, reject-always or stop.",
                kind="invalid_input",
            )
        if len(answers) != len(row.questions):
            raise ToolError(
                f"Request {row.id} has {len(row.questions)} questions, but {len(answers)} answers were given. Pass one list of answers per question.",
                kind="invalid_input",
            )
        now = self._clock()
        text = self._shaper.redactor.redact_text
        decided = replace(
            row,
            state="approved",
            choice="once",
            decided_ns=now,
            decided_by=by,
            grant_expires_ns=now + self.lifetimes.grant_ns,
            answers=tuple(tuple(text(said) for said in answer) for answer in answers),
        )
        return await self._write_decision(decided, now, [])

    def list_rules(self) -> list[StoredProjectRule]:
        return self._table.reader.list_rules()

    async def revoke_rule(self, rule_id: str) -> StoredProjectRule:
        """Revoke a stored project rule and return it.

        :raises ToolError: ``invalid_input`` if no stored rule has that id
        """
        if (found := next((rule for rule in self.list_rules() if rule.id == rule_id), None)) is None:
            raise ToolError(
                f"Stored rule `{escape_terminal_controls(rule_id[:40])}` does not exist. List stored rules with `handrail approve --rules`.",
                kind="invalid_input",
            )
        record = Record("approval-responded", "", "", {"revoked": found.text, "rule": found.id})
        await self._table.commit(
            self._table.build_remove_rule_work(found.id), self._log.build_record_insert_work([record])
        )
        # Open sessions have their own copy of the rules, which would allow further calls.
        for lane in self._list_lanes():
            kept = tuple(
                r for r in lane.rules if r.text != found.text or r.source not in (PROJECT_SOURCE, REJECTION_SOURCE)
            )
            if len(kept) < len(lane.rules):
                lane.set_rules_including_child_lanes(lane.rules.with_replaced_rules(*kept))
        return found

    def subscribe_to_requests(self, listener: Callable[[Approval], None]) -> Callable[[], None]:
        """Call ``listener`` with each new or changed request, once it is durable.

        :return: a function that removes the listener
        """
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def attach_open_sessions(self, sessions: OpenSessionAccess) -> None:
        """Apply answers to the sessions of this process from now on."""
        self._sessions = sessions

    def stop_session_of_request(self, row: Approval, lane: Lane) -> None:
        """Stop the session of a request that was answered with ``stop``. Repeated calls have no further effect."""
        if row.choice == "stop" and row.state == "rejected":
            lane.closed_reason = lane.closed_reason or f"Session {lane.session_id} was stopped by the user."
            for call in tuple(lane.running_calls.values()):
                if call.id != row.request.call_id:  # that call receives the answer itself
                    call.execution.stop("user")

    # ── for calls ────────────────────────────────────────────────────────────────────────────────

    def create_unstored_request(
        self, request: ApprovalRequest, *, kind: ApprovalKind = "approval", questions: Sequence[UserQuestion] = ()
    ) -> Approval:
        """Return a new request with id and times, which is not stored yet."""
        now = self._clock()
        request = replace(
            request, id=generate_prefixed_id("apr"), created_ns=now, expires_ns=now + self.lifetimes.request_ns
        )
        return Approval(request, kind, questions=tuple(questions))

    async def store_request_with_records(self, asked: Approval, records: Sequence[Record], *, whole: bool) -> None:
        """Make a request durable, with the records of its call so far.

        :param whole: whether its arguments are exactly the proposed ones
        :raises ToolError: ``limit`` if too many requests are pending
        """
        # Requests that are being written count too, so parallel calls cannot exceed the limit.
        self._check_pending_limits(asked.request.session_id)
        self._asking[asked.id] = asked.request.session_id
        try:
            await self._table.commit(
                self._table.build_add_request_work(asked, whole=whole), self._log.build_record_insert_work(records)
            )
        finally:
            del self._asking[asked.id]
        self._notify_listeners(asked)

    def _check_pending_limits(self, session_id: str) -> None:
        """Check the limits of pending requests.

        :raises ToolError: ``limit`` if one is reached
        """
        now = self._clock()
        for whose, most in ((session_id, MAX_PENDING_PER_SESSION), (None, MAX_PENDING_PER_WORKSPACE)):
            coming = {one for one, session in self._asking.items() if whose in (None, session)}
            if len(coming | self._table.reader.read_pending_request_ids(now, whose)) >= most:
                where = "workspace" if whose is None else "session"
                raise ToolError(
                    f"{most:,} approval requests are pending in this {where}, which is the limit. Nothing was run. Ask the user "
                    "to answer some of them (`handrail approve`), then make the call again.",
                    kind="limit",
                )

    def register_decision_waiter(
        self, asked: Approval, check: EvaluateChanged | None = None, call: Call | None = None
    ) -> asyncio.Future[Approval]:
        """Return a future of the decision about a pending request. Call :meth:`remove_decision_waiter` afterwards.

        :param check: evaluates arguments that a user changes
        """
        # Another process may have answered between the write and this registration.
        now = self._table.reader.get(asked.id)
        waiting = _WaitingCall(asyncio.get_running_loop().create_future(), check, call)
        self._waiting[asked.id] = waiting
        if now is not None and not now.is_pending:  # answered while it was being made durable
            waiting.answered.set_result(now)
        self._set_timer()
        return waiting.answered

    def remove_decision_waiter(self, approval_id: str) -> None:
        self._waiting.pop(approval_id, None)

    def list_requests_of_call(self, session_id: str, call_id: str) -> list[Approval]:
        """Return the requests of a call that has no result yet, including those of a former process."""
        return self._table.reader.list_requests_of_call(session_id, call_id)

    def list_unresolved_requests(self, session_id: str) -> list[Approval]:
        """Return the requests of a session whose calls have no result yet, the oldest first.

        Requests for hosts are left out: their calls run, and an answer counts also after them.
        """
        return [row for row in self._table.reader.list_unresolved_requests(session_id) if row.kind != "host"]

    def are_arguments_unredacted(self, approval_id: str) -> bool:
        """Return whether the stored arguments are exactly the proposed ones."""
        return self._table.reader.are_arguments_unredacted(approval_id)

    async def consume_approvals(self, granted: Iterable[Approval], records: Sequence[Record]) -> None:
        """Use up approvals, together with the record that their call is about to start.

        On return both are durable; if it raises, neither is.

        :raises ToolError: ``conflict`` if one of them was used, has expired or was withdrawn
        """
        grants, now = tuple(granted), self._clock()
        try:
            await self._table.commit(
                *(self._table.use(one.id, now) for one in grants), self._log.build_record_insert_work(records)
            )
        # The transaction failed. If an approval is no longer valid, that is the reason, and not the disk.
        except LogUnavailable:
            for one in grants:
                row = self._table.reader.get(one.id)
                if row is None or row.state != "approved" or (row.grant_expires_ns or 0) <= now:
                    raise ToolError(explain_unusable_approval(one.id, row, self.lifetimes), kind="conflict") from None
            raise
        for one in grants:
            self._notify_listeners(replace(one, state="used", is_answered=True))

    async def expire_or_withdraw_request(self, row: Approval, state: ApprovalState, *records: Record) -> Approval:
        """Move an open request to ``expired`` or ``withdrawn``, and return its present state."""
        works = [self._table.build_expire_or_withdraw_work(row.id, row.state, state)]
        if records:
            works.append(self._log.build_record_insert_work(records))
        try:
            await self._table.commit(*works)
        except LogUnavailable:
            now = self._table.reader.get(row.id)
            # The state has not moved, so the database is the problem. Otherwise another process was faster.
            if now is None or now.state == row.state:
                raise
            return now
        ended = replace(row, state=state)
        self._finish_request(ended)
        return ended

    def withdraw(self, row: Approval) -> None:
        """Withdraw a request whose call is answered without using it.

        This does not wait. Until it is durable, the log shows that the call has ended.
        """
        self._table.write_soon(self._table.build_withdraw_if_open_work(row.id))
        if row.state in ("pending", "approved"):
            # The set only bridges the time until the write is durable. Old ids in it have no further use.
            if len(self._leaving) >= _MOST_LEAVING:
                self._leaving.clear()
            self._leaving.add(row.id)
            self._notify_listeners(replace(row, state="withdrawn", is_answered=True))

    async def reject_requests_of_session(
        self, session_id: str, why: str = "its session was closed", by: str = "user"
    ) -> None:
        """Record refusals for the open requests of a session that will not be resumed."""
        for row in self.list_unresolved_requests(session_id):
            text = f"The call was not run: {why}."
            result = Result.error("cancelled", text, stopped_by=by).to_dict()
            # The call may have ended already. A second outcome would contradict the first.
            if await self._log.find_outcome(row.request.call_id) is None:
                refused = {"step": "authorise", "result": result}
                self._log.record_soon([Record("rejected", session_id, row.request.call_id, refused)])
            self.withdraw(row)

    async def expire_overdue_requests(self) -> None:
        """Expire requests whose time is over."""
        for row in self._table.reader.list_overdue_requests(self._clock()):
            await self.expire_or_withdraw_request(row, "expired", make_answer_record(row, {"choice": "expired"}))

    async def withdraw_interrupted_requests(self, interrupted: Iterable[InterruptedCall]) -> None:
        """Withdraw requests of interrupted calls and of sub-agents of the former process. Call it at start."""
        for lost in interrupted:
            for row in self.list_requests_of_call(lost.session_id, lost.call_id):
                self.withdraw(row)
        for session_id in self._table.reader.list_subagents_awaiting_approval():
            await self.reject_requests_of_session(session_id, "its sub-agent ended when Handrail stopped", "parent")

    def close(self) -> None:
        """Stop checking for expiry."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sweeping is not None:
            self._sweeping.cancel()

    # ── internal ─────────────────────────────────────────────────────────────────────────────────

    def _row_after_pending_writes(self, row: Approval) -> Approval:
        """Return the row as it will be once pending writes are durable."""
        if row.id not in self._leaving:
            return row
        if row.state in ("pending", "approved"):
            return replace(row, state="withdrawn", is_answered=True)
        self._leaving.discard(row.id)
        return row

    def _get_open(self, approval_id: str) -> Approval:
        row = self.get(approval_id)
        # The row of an overdue request stays pending until the next sweep, but it must not be answered.
        if not row.is_pending or row.request.expires_ns <= self._clock():
            raise ToolError(explain_closed_request(row, self.lifetimes), kind="conflict")
        return row

    def _apply_changed_arguments(self, decided: Approval, given: Mapping[str, Any]) -> Approval:
        """Return the decision with the changed arguments, after their evaluation."""
        # The arguments are stored as JSON. A value that JSON changes would run in a form that the user has not seen.
        if decode_json_with_fallback(encode_json_with_fallback(dict(given), max_bytes=2**62)) != given:
            raise ToolError(
                f"The changed arguments for request {decided.id} have no JSON form. Pass a JSON object.",
                kind="invalid_input",
            )
        given = dict(given)
        if self._shaper.redact_to_json(given) != given:
            raise ToolError(
                f"The changed arguments for request {decided.id} contain a registered secret, which must not be stored. "
                "Remove it.",
                kind="invalid_input",
            )
        changed_hash = self._shaper.hash_canonical_json(given)
        # The user sent the same arguments, so this is a plain approval.
        if changed_hash == decided.request.arguments_hash:
            return decided
        waiting = self._waiting.get(decided.id)
        # A waiting call knows its own tool and rules. For a suspended one, those of its session or of the workspace
        # count.
        check = self._evaluate_suspended if waiting is None or waiting.check is None else waiting.check
        files = check(decided, given)
        return replace(decided, changed_arguments=given, changed_arguments_hash=changed_hash, changed_files=files)

    def _evaluate_suspended(self, row: Approval, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Evaluate changed arguments of a suspended call; see :data:`EvaluateChanged`."""
        if self._sessions is None:
            text = (
                f"The changed arguments for request {row.id} cannot be checked without the workspace's tools. Open the "
                "workspace, then answer the request there."
            )
            raise ToolError(text, kind="unavailable")
        lane = self._find_lane_of_request(row)
        generation, authority, rules, roots = self._sessions.current_policy()
        if lane is not None:
            authority, rules, roots = lane.authority, lane.rules, lane.environment.roots
            generation = lane.current_generation()
        entry = generation.resolve_tool_name(row.request.tool_id)
        if entry is None:  # the call is refused when its session is resumed
            return {}
        verdict = evaluate_changed_arguments(entry, given, authority, rules, roots)
        return ExecutedFileFinder(roots, None if lane is None else lane.environment.scratch).fingerprint_executed_files(
            verdict.targets, given
        )

    def _list_lanes(self) -> Iterable[Lane]:
        return () if self._sessions is None else self._sessions.list_lanes()

    def _find_lane_of_request(self, row: Approval) -> Lane | None:
        """Return the lane of the waiting call or of its session; None if neither is in this process."""
        if (waiting := self._waiting.get(row.id)) is not None and waiting.call is not None:
            return waiting.call.lane
        return None if self._sessions is None else self._sessions.find_lane(row.request.session_id)

    def _rule_works(self, decided: Approval, now: int) -> list[TableWork]:
        if (rule := make_rule_from_answer(decided)) is None:
            return []
        text = rule.text
        if rule.scope == "session":
            return [self._table.build_session_rule_work(decided.request.session_id, text)]
        return [
            self._table.build_store_rule_work(StoredProjectRule(generate_prefixed_id("rul"), text, now, decided.id))
        ]

    async def _write_decision(self, decided: Approval, now: int, works: Sequence[TableWork]) -> Approval:
        record = make_answer_record(
            decided,
            {
                "choice": decided.choice,
                "message": decided.message,
                "by": decided.decided_by,
                "arguments_hash": decided.request.arguments_hash,
                **({"answers": decided.answers} if decided.kind == "question" else {}),
                **(
                    {"changed": decided.changed_arguments, "changed_hash": decided.changed_arguments_hash}
                    if decided.changed_arguments is not None
                    else {}
                ),
            },
        )
        try:
            await self._table.commit(
                self._table.decide(decided, now), self._log.build_record_insert_work([record]), *works
            )
        except LogUnavailable:
            row = self._table.reader.get(decided.id)
            if row is not None and (not row.is_pending or row.request.expires_ns <= now):
                raise ToolError(explain_closed_request(row, self.lifetimes), kind="conflict") from None
            raise
        # Effects follow only after the answer is durable, so a crash cannot leave a rule without its answer.
        self._apply_rule_and_stop(decided)
        self._finish_request(decided)
        return decided

    def _apply_rule_and_stop(self, row: Approval) -> None:
        """Apply the effects of an answer beyond its call: stored rules and a stopped session."""
        lane = self._find_lane_of_request(row)
        if (rule := make_rule_from_answer(row)) is not None:
            further = [one for one in self._list_lanes() if one is not lane] if rule.scope == "project" else []
            for concerned in further if lane is None else (lane, *further):
                if rule not in concerned.rules.rules:
                    concerned.set_rules_including_child_lanes(concerned.rules.with_rules(rule))
        if lane is not None:
            self.stop_session_of_request(row, lane)

    def _finish_request(self, row: Approval) -> None:
        self._notify_listeners(row)
        if (waiting := self._waiting.get(row.id)) is not None and not waiting.answered.done():
            waiting.answered.set_result(row)

    def _notify_listeners(self, row: Approval) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(row)
            except Exception as error:  # a listener must not change a decision
                about = {"message": f"a listener to requests failed at {row.id}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(about)

    def _set_timer(self) -> None:
        """Set a timer for the next expiry if a call waits in this process."""
        if self._timer is not None or not self._waiting:
            return
        try:
            due = self._table.reader.read_next_expiry_ns()
        except LogUnavailable:
            due = self._clock() + _AGAIN_NS
        if due is not None:
            delay_s = min(max((due - self._clock()) / 1e9, 0.0) + 0.001, _LONGEST_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._sweeping = asyncio.get_running_loop().create_task(self._run_sweeps())

    async def _run_sweeps(self) -> None:
        try:
            await self.expire_overdue_requests()
        except LogUnavailable:
            pass  # the timer tries again; expired requests cannot be answered meanwhile
        self._set_timer()


class _WaitingCall(Struct):
    answered: asyncio.Future[Approval]
    check: EvaluateChanged | None
    call: Call | None
