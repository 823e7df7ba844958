"""The desk of approval requests: each is asked once, answered once from any frontend, and used once.

A request is stored before anyone sees it. The first answer changes its row; a later one gets ``conflict`` and the earlier
answer. An answer wakes a call that waits in this process, wherever the answer came from. A call whose process has ended is
resumed when its session is opened again. The desk also applies what an answer changes beyond its call: the rules of open
sessions, and the stop of a session. Nothing here runs a call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from handrail.arbiter.approvals.binding import RunFiles
from handrail.arbiter.call import Call, Lane
from handrail.arbiter.output.shaper import Shaper
from handrail.contract.approvals import (
    APPROVING,
    CHOICES,
    Approval,
    ApprovalAnswer,
    ApprovalKind,
    ApprovalRequest,
    ApprovalState,
    Choice,
    StoredRule,
)
from handrail.contract.call import Result
from handrail.contract.doors.files import PathRoots
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.generation import Entry, Generation
from handrail.policy import suggestions
from handrail.policy.authority import Authority, Verdict
from handrail.policy.rules.rules import Rule, RuleBook, Scope, parse_rule
from handrail.policy.suggestions import NEVER, PROJECT
from handrail.record.log import CommitLog, Interrupted, Record
from handrail.runtime.files.roots import Roots
from handrail.store.database.database import Work
from handrail.store.encoding import decode, encode
from handrail.store.tables.approvals import ApprovalTable

# The content of a request: the answers that it offers, its lifetime, and its wording.

HOUR_NS = 3_600_000_000_000
ID_CHARACTERS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's alphabet: no letter that is taken for a digit or for another one."""


WITHOUT_A_RULE: dict[Choice, Choice] = {
    "session": "once",
    "project": "once",
    "session-wider": "once",
    "project-wider": "once",
    "reject-always": "reject",
}
"""What an attendant's answer is worth where no rule was offered: never more than it said."""
_STORED: dict[Choice, tuple[str, Scope]] = {
    "session": (suggestions.SOURCE, "session"),
    "project": (suggestions.PROJECT, "project"),
    "session-wider": (suggestions.SOURCE, "session"),
    "project-wider": (suggestions.PROJECT, "project"),
    "reject-always": (suggestions.NEVER, "project"),
}


_FOR_A_SESSION: frozenset[Choice] = frozenset({"session", "session-wider"})


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """For how long a request can be answered, and for how long a yes that was not used holds."""

    request_ns: int = 7 * 24 * HOUR_NS
    grant_ns: int = 24 * HOUR_NS


def new_id(prefix: str) -> str:
    """Short enough to type: 40 random bits."""
    return f"{prefix}_{''.join(secrets.choice(ID_CHARACTERS) for _ in range(8))}"


def check_choice(row: Approval, answer: ApprovalAnswer) -> None:
    """:raises ToolError: ``invalid_input`` for an answer that this request does not offer"""
    choice, request, problem = answer.choice, row.request, ""
    if choice not in CHOICES:
        problem = f"is answered with one of {', '.join(CHOICES)}, not {str(choice)[:40]!r}"
    elif row.kind == "question" and choice not in ("reject", "stop"):
        problem = "asks a question: give its answers, or reject"
    elif choice in _FOR_A_SESSION and request.shared:
        problem = (
            "is of a session that several clients share, where one's yes is not the others': answer once or project"
        )
    elif choice in ("session", "project") and request.always is None:
        problem = "has no rule that would allow just this call; answer once or reject"
    elif choice in ("session-wider", "project-wider") and request.wider is None:
        problem = f"has no wider rule that is known to be safe; answer {choice.removesuffix('-wider')} or once"
    elif choice == "reject-always" and request.never is None:
        problem = "has no rule that would deny just this call; answer reject"
    elif answer.arguments is not None and choice != "once":
        problem = "takes other arguments with the answer once only: a stored rule is about those that were shown"
    if problem:
        raise ToolError(f"{row.id} {problem}", kind="invalid_input")


def responded(row: Approval, body: dict[str, Any]) -> Record:
    request = row.request
    return Record("approval-responded", request.session_id, request.call_id, {"approval": row.id, **body})


def why_not_open(row: Approval, lifetimes: Lifetimes) -> str:
    """Why a request cannot be answered any more."""
    if row.pending or row.state == "expired":
        return f"{row.id} has expired: nobody answered within {_lasting(lifetimes.request_ns)}"
    if row.state == "withdrawn":
        return f"{row.id} is no longer asked: its call was stopped or refused, or its session closed"
    said = row.choice or row.state
    return f"{row.id} was answered before, with {said!r} at the door {row.decided_by!r}; that answer stays"


def why_not_usable(approval_id: str, row: Approval | None, lifetimes: Lifetimes) -> str:
    """Why a grant cannot be used any more."""
    if row is not None and row.state == "approved":
        lasting = _lasting(lifetimes.grant_ns)
        return f"the approval {approval_id} was not used within {lasting} and has expired; nothing was run"
    state = "gone" if row is None else row.state
    return f"the approval {approval_id} cannot be used: it is {state}; it holds for one run. Nothing was run"


def _lasting(lifetime_ns: int) -> str:
    hours = lifetime_ns / HOUR_NS
    return f"{hours / 24:g} days" if hours >= 48 else f"{hours:g} hours"


def rule_of(row: Approval) -> Rule | None:
    """The rule that an answer stored, as it holds from then on."""
    text = None if row.choice is None else rule_offered(row.request, row.choice)
    if text is None or row.choice is None:
        return None
    source, scope = _STORED[row.choice]
    return parse_rule(text, scope=scope, source=source)


def rule_offered(request: ApprovalRequest, choice: Choice) -> str | None:
    """The rule that this answer would store, as it was shown."""
    if choice in _FOR_A_SESSION and request.shared:
        return None
    if choice in ("session", "project"):
        return request.always
    if choice in ("session-wider", "project-wider"):
        return request.wider
    return request.never if choice == "reject-always" else None


def check_changed(
    entry: Entry, given: Mapping[str, Any], authority: Authority, rules: RuleBook, roots: PathRoots
) -> Verdict:
    """Judge arguments that a person gives instead of those proposed.

    :raises ToolError: ``invalid_input`` where the tool does not take them, ``denied`` where a rule denies them
    """
    arguments = entry.admitted(dict(given))
    origin, behind = entry.tool.origin, entry.behind
    verdict = authority.judge(entry.spec, arguments, rules=rules, roots=roots, origin=origin, behind=behind)
    if verdict.action == "deny":
        raise ToolError(verdict.reason, kind="denied")
    return verdict


MOST_OF_A_SESSION = 100
MOST_OF_A_WORKSPACE = 1_000
"""Requests that wait for a person at once. A model that asks more floods whoever answers, who then looks at none."""
_MOST_LEAVING = 10_000
_LONGEST_TIMER_S = 600.0
"""Expiry is checked again at least this often, since clocks can be set."""
_AGAIN_NS = 10_000_000_000
"""Expiry is checked again after this long when the database could not be read."""

CheckChanged = Callable[[Approval, Mapping[str, Any]], Mapping[str, str]]
"""Checks arguments that a person gave instead of those proposed. Gives the files that a call with them runs, as they are now.

:raises ToolError: ``invalid_input`` when they do not fit the schema, ``denied`` when a rule denies them
"""


class OpenSessions(NamedTuple):
    """The sessions of the process that holds a workspace, as far as answers concern them.

    :param lane: of one that is open, by its id
    :param lanes: of all that are open
    :param judged_by: what a parked call of no open session is judged by
    """

    lane: Callable[[str], Lane | None]
    lanes: Callable[[], Iterable[Lane]]
    judged_by: Callable[[], tuple[Generation, Authority, RuleBook, Roots]]


class Approvals:
    """The requests of one workspace, as every door uses them. Bound to the event loop of the kernel.

    :param clock: wall-clock time in nanoseconds
    """

    def __init__(
        self,
        table: ApprovalTable,
        log: CommitLog,
        shaper: Shaper,
        lifetimes: Lifetimes | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._table = table
        self._log = log
        self._shaper = shaper
        self.lifetimes = lifetimes or Lifetimes()
        self._clock = clock
        self._waiting: dict[str, _Wait] = {}
        self._asking: dict[str, str] = {}
        """The sessions of requests that are being made durable, by the requests' ids."""
        self._leaving: set[str] = set()
        """Requests that were let go of, which may not be durable yet."""
        self._listeners: list[Callable[[Approval], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._sessions: OpenSessions | None = None

    # ── the doors ────────────────────────────────────────────────────────────────────────────────

    def pending(self, session_id: str | None = None) -> list[Approval]:
        """What can be answered now, the oldest first."""
        rows = self._table.reader.pending(self._clock(), session_id=session_id)
        return [row for row in rows if row.id not in self._leaving] if self._leaving else rows

    def get(self, approval_id: str) -> Approval:
        """One request, in whatever state.

        :raises ToolError: ``invalid_input`` when there is none
        """
        found = self._table.reader.get(approval_id)
        if found is None:
            raise ToolError(
                f"there is no request {approval_id[:40]!r} in this workspace; handrail approve lists those that wait",
                kind="invalid_input",
            )
        return self._as_known(found)

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """Answer a request; durable on return. This runs nothing: the call goes on in the process that waits, or when resumed.

        :param by: the door, for the record
        :raises ToolError: ``invalid_input`` for an answer that cannot be, ``denied`` for changed arguments that a rule
            denies (the request stays), ``conflict`` when it was answered before, expired, or its call was stopped
        :raises LogUnavailable: when it cannot be made durable
        """
        row = self._open(approval_id)
        if answer.choice == "later":
            return row
        check_choice(row, answer)
        now = self._clock()
        decided = replace(
            row,
            state="approved" if answer.choice in APPROVING else "rejected",
            choice=answer.choice,
            message=self._shaper.redactor.text(answer.message),
            decided_ns=now,
            decided_by=by,
        )
        if decided.state == "approved":
            decided = replace(decided, grant_expires_ns=now + self.lifetimes.grant_ns)
        if answer.arguments is not None:
            decided = self._changed(decided, answer.arguments)
        return await self._decided(decided, now, self._rule_works(decided, now))

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """Answer the questions of a request, one list for each; see :meth:`decide`."""
        row = self._open(approval_id)
        if row.kind != "question":
            raise ToolError(
                f"{row.id} asks whether {row.request.tool_id} may run; answer it once, session, project, reject, "
                "reject-always or stop",
                kind="invalid_input",
            )
        if len(answers) != len(row.questions):
            raise ToolError(
                f"{row.id} has {len(row.questions)} questions and {len(answers)} answers were given; give one list for each",
                kind="invalid_input",
            )
        now = self._clock()
        text = self._shaper.redactor.text
        decided = replace(
            row,
            state="approved",
            choice="once",
            decided_ns=now,
            decided_by=by,
            grant_expires_ns=now + self.lifetimes.grant_ns,
            answers=tuple(tuple(text(said) for said in answer) for answer in answers),
        )
        return await self._decided(decided, now, [])

    def rules(self) -> list[StoredRule]:
        """The project's rules that people's answers stored."""
        return self._table.reader.rules()

    async def forget_rule(self, rule_id: str) -> StoredRule:
        """Remove one of :meth:`rules`. Gives what it was.

        :raises ToolError: ``invalid_input`` when there is none of that id
        """
        found = next((rule for rule in self.rules() if rule.id == rule_id), None)
        if found is None:
            raise ToolError(
                f"there is no stored rule {rule_id[:40]!r}; handrail approve --rules lists them", kind="invalid_input"
            )
        record = Record("approval-responded", "", "", {"forgotten": found.text, "rule": found.id})
        await self._table.commit(self._table.forget_rule(found.id), self._log.work([record]))
        for lane in self._lanes():
            kept = tuple(r for r in lane.rules if r.text != found.text or r.source not in (PROJECT, NEVER))
            if len(kept) < len(lane.rules):
                lane.rule_by(lane.rules.of(*kept))
        return found

    def watch(self, listener: Callable[[Approval], None]) -> Callable[[], None]:
        """Call ``listener`` with each new request and each change of one, once it is durable. Gives a function that stops it."""
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def attach(self, sessions: OpenSessions) -> None:
        """Let answers take effect in the sessions of this process from now on."""
        self._sessions = sessions

    def stop_session(self, row: Approval, lane: Lane) -> None:
        """Stop the session of a call whose request was answered with ``stop``; also when it is opened again after that.
        Twice is once."""
        if row.choice == "stop" and row.state == "rejected":
            lane.closed = lane.closed or f"session {lane.session_id} was stopped by the user"
            for call in tuple(lane.running.values()):
                if call.id != row.request.call_id:  # which hears of it by itself
                    call.execution.stop("user")

    # ── the calls ────────────────────────────────────────────────────────────────────────────────

    def new(
        self, request: ApprovalRequest, *, kind: ApprovalKind = "approval", questions: Sequence[Question] = ()
    ) -> Approval:
        """A request with its id and times, not yet asked."""
        now = self._clock()
        request = replace(request, id=new_id("apr"), created_ns=now, expires_ns=now + self.lifetimes.request_ns)
        return Approval(request, kind, questions=tuple(questions))

    async def ask(self, asked: Approval, records: Sequence[Record], *, whole: bool) -> None:
        """Make a request durable, with the records of its call up to here.

        :param whole: whether its arguments are the very ones that were proposed
        :raises ToolError: ``limit`` where as many wait already as a person is asked at once
        :raises LogUnavailable: when it cannot be
        """
        self._check_room(asked.request.session_id)
        self._asking[asked.id] = asked.request.session_id
        try:
            await self._table.commit(self._table.add(asked, whole=whole), self._log.work(records))
        finally:
            del self._asking[asked.id]
        self._tell(asked)

    def _check_room(self, session_id: str) -> None:
        """:raises ToolError: ``limit``"""
        now = self._clock()
        for whose, most in ((session_id, MOST_OF_A_SESSION), (None, MOST_OF_A_WORKSPACE)):
            coming = {one for one, session in self._asking.items() if whose in (None, session)}
            if len(coming | self._table.reader.pending_ids(now, whose)) >= most:
                where = "workspace" if whose is None else "session"
                raise ToolError(
                    f"{most:,} requests of this {where} wait for a person already, which is the most; nothing was asked and "
                    "nothing was run. Wait until some are answered (handrail approve)",
                    kind="limit",
                )

    def wait(
        self, asked: Approval, check: CheckChanged | None = None, call: Call | None = None
    ) -> asyncio.Future[Approval]:
        """A future of what becomes of a pending request, in this process. Call :meth:`stop_waiting` afterwards.

        :param check: judges arguments that a person gives instead
        :raises LogUnavailable: when the database cannot be read
        """
        now = self._table.reader.get(asked.id)
        waiting = _Wait(asyncio.get_running_loop().create_future(), check, call)
        self._waiting[asked.id] = waiting
        if now is not None and not now.pending:  # answered while it was being made durable
            waiting.answered.set_result(now)
        self._set_timer()
        return waiting.answered

    def stop_waiting(self, approval_id: str) -> None:
        self._waiting.pop(approval_id, None)

    def of_call(self, session_id: str, call_id: str) -> list[Approval]:
        """The requests of a call that has no result yet, those of a former process too."""
        return self._table.reader.of_call(session_id, call_id)

    def unanswered(self, session_id: str) -> list[Approval]:
        """The requests of a session whose calls have no result yet, in the order they were asked."""
        return self._table.reader.unanswered(session_id)

    def is_whole(self, approval_id: str) -> bool:
        """Whether the arguments in the row are the very ones that were proposed."""
        return self._table.reader.is_whole(approval_id)

    async def use(self, granted: Iterable[Approval], records: Sequence[Record]) -> None:
        """Use up grants, with the record that their call is about to begin: both are durable on return, or neither.

        :raises ToolError: ``conflict`` when one of them was used, has expired or was withdrawn
        :raises LogUnavailable: when it cannot be made durable
        """
        grants, now = tuple(granted), self._clock()
        try:
            await self._table.commit(*(self._table.use(one.id, now) for one in grants), self._log.work(records))
        except LogUnavailable:
            for one in grants:
                row = self._table.reader.get(one.id)
                if row is None or row.state != "approved" or (row.grant_expires_ns or 0) <= now:
                    raise ToolError(why_not_usable(one.id, row, self.lifetimes), kind="conflict") from None
            raise
        for one in grants:
            self._tell(replace(one, state="used", answered=True))

    async def end(self, row: Approval, state: ApprovalState, *records: Record) -> Approval:
        """Move a request that is still open on to ``expired`` or ``withdrawn``; one that is not stays as it is.

        Gives what it is now.
        """
        works = [self._table.end(row.id, row.state, state)]
        if records:
            works.append(self._log.work(records))
        try:
            await self._table.commit(*works)
        except LogUnavailable:
            now = self._table.reader.get(row.id)
            if now is None or now.state == row.state:
                raise
            return now
        ended = replace(row, state=state)
        self._settled(ended)
        return ended

    def let_go(self, row: Approval) -> None:
        """Withdraw a request whose call has its result, or is about to, without having used it. This is not waited for:
        until it is durable, the log shows that the call has ended."""
        self._table.append(self._table.let_go(row.id))
        if row.state in ("pending", "approved"):
            if len(self._leaving) >= _MOST_LEAVING:
                self._leaving.clear()
            self._leaving.add(row.id)
            self._tell(replace(row, state="withdrawn", answered=True))

    async def close_session(self, session_id: str, why: str = "its session was closed", by: str = "user") -> None:
        """Refuse, on record, the requests of a session that nobody will resume."""
        for row in self.unanswered(session_id):
            result = Result.error("cancelled", f"{why} before it could run; nothing was run", stopped_by=by).to_dict()
            if await self._log.outcome_of(row.request.call_id) is None:
                refused = {"step": "authorise", "result": result}
                self._log.append([Record("refused", session_id, row.request.call_id, refused)])
            self.let_go(row)

    async def sweep(self) -> None:
        """Expire requests that nobody answered in time."""
        for row in self._table.reader.due(self._clock()):
            await self.end(row, "expired", responded(row, {"choice": "expired"}))

    async def recover(self, interrupted: Iterable[Interrupted]) -> None:
        """At the start: what was asked in the middle of calls that are ``interrupted``, or by sub-agents of the process
        before, concerns nobody any more.

        :raises LogUnavailable: when the log cannot tell
        """
        for lost in interrupted:
            for row in self.of_call(lost.session_id, lost.call_id):
                self.let_go(row)
        for session_id in self._table.reader.below():
            await self.close_session(session_id, "its sub-agent ended with Handrail", "parent")

    def close(self) -> None:
        """Stop checking for expiry."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sweeping is not None:
            self._sweeping.cancel()

    # ── within ───────────────────────────────────────────────────────────────────────────────────

    def _as_known(self, row: Approval) -> Approval:
        """The row as it will be once pending writes are durable."""
        if row.id not in self._leaving:
            return row
        if row.state in ("pending", "approved"):
            return replace(row, state="withdrawn", answered=True)
        self._leaving.discard(row.id)
        return row

    def _open(self, approval_id: str) -> Approval:
        row = self.get(approval_id)
        if not row.pending or row.request.expires_ns <= self._clock():
            raise ToolError(why_not_open(row, self.lifetimes), kind="conflict")
        return row

    def _changed(self, decided: Approval, given: Mapping[str, Any]) -> Approval:
        """The decision with other arguments, once those have been judged."""
        if decode(encode(dict(given), max_bytes=2**62)) != given:
            raise ToolError(f"the arguments for {decided.id} are not plain JSON; give an object", kind="invalid_input")
        given = dict(given)
        if self._shaper.redact(given) != given:
            raise ToolError(
                f"the arguments for {decided.id} hold a registered secret, which is never stored; leave it out",
                kind="invalid_input",
            )
        changed_hash = self._shaper.hash(given)
        if changed_hash == decided.request.arguments_hash:
            return decided
        waiting = self._waiting.get(decided.id)
        check = self._check_parked if waiting is None or waiting.check is None else waiting.check
        files = check(decided, given)
        return replace(decided, changed=given, changed_hash=changed_hash, changed_files=files)

    def _check_parked(self, row: Approval, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Judge changed arguments of a call that no process carries, as :data:`CheckChanged` does."""
        if self._sessions is None:
            text = (
                f"other arguments for {row.id} cannot be judged here, where no tools are; open the workspace for that"
            )
            raise ToolError(text, kind="unavailable")
        lane = self._lane(row)
        generation, authority, rules, roots = self._sessions.judged_by()
        if lane is not None:
            authority, rules, roots = lane.authority, lane.rules, lane.around.roots
            generation = lane.current()
        entry = generation.resolve(row.request.tool_id)
        if entry is None:  # it is refused when it is taken up
            return {}
        verdict = check_changed(entry, given, authority, rules, roots)
        return RunFiles(roots, None if lane is None else lane.around.scratch).of(verdict.targets, given)

    def _lanes(self) -> Iterable[Lane]:
        return () if self._sessions is None else self._sessions.lanes()

    def _lane(self, row: Approval) -> Lane | None:
        """That of the call that waits, or of its session; None where neither is in this process."""
        waiting = self._waiting.get(row.id)
        if waiting is not None and waiting.call is not None:
            return waiting.call.lane
        return None if self._sessions is None else self._sessions.lane(row.request.session_id)

    def _rule_works(self, decided: Approval, now: int) -> list[Work]:
        rule = rule_of(decided)
        if rule is None:
            return []
        text = rule.text
        if rule.scope == "session":
            return [self._table.store_session_rule(decided.request.session_id, text)]
        return [self._table.store_rule(StoredRule(new_id("rul"), text, now, decided.id))]

    async def _decided(self, decided: Approval, now: int, works: Sequence[Work]) -> Approval:
        record = responded(
            decided,
            {
                "choice": decided.choice,
                "message": decided.message,
                "by": decided.decided_by,
                "arguments_hash": decided.request.arguments_hash,
                **({"answers": decided.answers} if decided.kind == "question" else {}),
                **(
                    {"changed": decided.changed, "changed_hash": decided.changed_hash}
                    if decided.changed is not None
                    else {}
                ),
            },
        )
        try:
            await self._table.commit(self._table.decide(decided, now), self._log.work([record]), *works)
        except LogUnavailable:
            row = self._table.reader.get(decided.id)
            if row is not None and (not row.pending or row.request.expires_ns <= now):
                raise ToolError(why_not_open(row, self.lifetimes), kind="conflict") from None
            raise
        self._take_effect(decided)
        self._settled(decided)
        return decided

    def _take_effect(self, row: Approval) -> None:
        """Apply what an answer changes beside its own call."""
        lane = self._lane(row)
        if (rule := rule_of(row)) is not None:
            further = [one for one in self._lanes() if one is not lane] if rule.scope == "project" else []
            for concerned in further if lane is None else (lane, *further):
                if rule not in concerned.rules.rules:
                    concerned.rule_by(concerned.rules.with_rules(rule))
        if lane is not None:
            self.stop_session(row, lane)

    def _settled(self, row: Approval) -> None:
        self._tell(row)
        waiting = self._waiting.get(row.id)
        if waiting is not None and not waiting.answered.done():
            waiting.answered.set_result(row)

    def _tell(self, row: Approval) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(row)
            except Exception as error:  # whoever watches has no say in what was decided
                about = {"message": f"a listener to requests failed at {row.id}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(about)

    def _set_timer(self) -> None:
        """Set a timer for the next expiry, while somebody waits in this process."""
        if self._timer is not None or not self._waiting:
            return
        try:
            due = self._table.reader.next_due_ns()
        except LogUnavailable:
            due = self._clock() + _AGAIN_NS
        if due is not None:
            delay_s = min(max((due - self._clock()) / 1e9, 0.0) + 0.001, _LONGEST_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._sweeping = asyncio.get_running_loop().create_task(self._swept())

    async def _swept(self) -> None:
        try:
            await self.sweep()
        except LogUnavailable:
            pass  # it is tried again, and expired requests cannot be answered meanwhile
        self._set_timer()


@dataclass(slots=True)
class _Wait:
    answered: asyncio.Future[Approval]
    check: CheckChanged | None
    call: Call | None
