"""One connected client: its session, its calls in progress, and the requests sent to it on their behalf.

In the older era that is one connection; in the stateless one it is every request with the same credential.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from handrail.contract.approvals import ApprovalAnswer, ApprovalDesk, ApprovalRequest
from handrail.contract.call import Answer, ProposedCall, Result, call_id
from handrail.contract.doors.peer import Ask, AskMethod
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import ToolError
from handrail.frontends.cli.show import spelled_out
from handrail.frontends.cli.terminal import preview
from handrail.frontends.mcp.exchange import Exchange, Line
from handrail.frontends.mcp.forms import approval_answer, approval_form, question_answers, question_form

if TYPE_CHECKING:
    from handrail.contract.call import Event
    from handrail.contract.session import Session


MOST_CALLS = 1_000
"""Calls of one client in progress at once."""
MOST_HELD = 64
"""Calls of one client that wait for it to come back."""
MOST_PARKED = 1_000
_ROOT = re.compile(r"(.*/\d+\.\d+)(?:\.\d+)*", re.DOTALL)
FORM: AskMethod = "elicitation/create"


class Guest:
    """See the module. A :class:`~handrail.contract.approvals.Attendant` and a :class:`~handrail.contract.doors.peer.Peer` for its own
    session.

    :param desk: where what its questions wait on can be looked up
    :param wait_s: how long an approval or a question may take on an open request before its call is parked
    :param hold_s: the same where the call is held
    :param hold: whether one more call may be held, over all clients
    """

    def __init__(self, desk: ApprovalDesk, wait_s: float, hold_s: float, hold: Callable[[], bool]) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.held: dict[str, Exchange] = {}
        """Calls that wait for their client, by the state token that it holds."""
        self.changed: Callable[[], object] = lambda: None
        """Called when a listing may have changed."""
        self.updated: Callable[[str], object] = lambda _: None
        """Called with the URI of a resource that has changed."""
        self.parked: OrderedDict[str, str] = OrderedDict()
        """The calls that wait for a person, by tool and arguments."""
        self.kept_until = -math.inf
        """Until when, on the monotonic clock, somebody may still ask for the results of its tasks."""
        self.shared = False
        """It has shown no credential where several clients come, and a program between may send requests of several."""
        self.busy = 0
        """How many of its requests are being answered."""
        self._desk = desk
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._hold = hold
        self._session: Session | None = None
        self._asked: set[str] = set()
        """The questions that it is being asked."""

    @property
    def session(self) -> Session:
        assert self._session is not None, "it was given its session when it was made"
        return self._session

    def enter(self, session: Session) -> None:
        """Take ``session`` as its session."""
        self._session = session
        session.watch(self._happened)

    @property
    def idle(self) -> bool:
        return not (self.busy or self.exchanges or self.held) and time.monotonic() > self.kept_until

    # ── its calls ────────────────────────────────────────────────────────────────────────────────

    def begin(self, tool_id: str, proposed: ProposedCall, given: Mapping[str, Any] | None) -> Exchange | Result:
        """Make a call, or resume the parked call that it repeats. Gives an error result when it may make no more calls.

        :param tool_id: what the call's name stands for
        :param given: answers that came along, before anything was asked
        """
        if len(self.exchanges) >= MOST_CALLS:
            return Result.error("limit", f"{MOST_CALLS:,} calls of this client are on their way; wait for some of them")
        same = _fingerprint(tool_id, proposed)
        if (waiting := self.parked.get(same)) is not None and waiting not in self.exchanges:
            exchange = self.exchange(waiting, given)
            exchange.begin(self._collect(waiting, same))
            return exchange
        turn = self.session.turn()
        exchange = self.exchange(call_id(self.session.id, turn.number, 0), given)

        async def carried_out() -> Answer:
            (answer,) = await turn.call_all([proposed])
            self._keep_if_parked(same, answer)
            return answer

        exchange.begin(carried_out())
        return exchange

    def exchange(self, call: str, given: Mapping[str, Any] | None = None) -> Exchange:
        """The exchange of one of its calls, through which it is sent messages and requests from now on."""
        exchange = Exchange(call, given)
        exchange.may_hold = lambda: len(self.held) < MOST_HELD and self._hold()
        self.exchanges[call] = exchange
        return exchange

    async def _collect(self, call: str, same: str) -> Answer:
        """The answer to a parked call, given once, unless the call goes on waiting."""
        del self.parked[same]
        try:
            answer = await self.session.recall(call)
        except BaseException:
            self.parked[same] = call  # nobody has heard it
            raise
        self._keep_if_parked(same, answer)
        return answer

    def _keep_if_parked(self, same: str, answer: Answer) -> None:
        if answer.model.metadata.get("parked") is not None:
            self.parked[same] = answer.call_id
            while len(self.parked) > MOST_PARKED:
                self.parked.popitem(last=False)

    def end(self, exchange: Exchange) -> None:
        """Forget an exchange that has its answer, or whose answer nobody wants. A stopped call counts until it has ended."""
        task = exchange.task
        if task is None or task.done():
            self._forget(exchange)
        else:
            task.add_done_callback(lambda _: self._forget(exchange))

    def _forget(self, exchange: Exchange) -> None:
        if self.exchanges.get(exchange.call_id) is exchange:
            del self.exchanges[exchange.call_id]
        if exchange.task is not None and not exchange.task.cancelled():
            exchange.task.exception()  # whoever followed it has been told; where nobody did, nobody wants to know

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def _happened(self, event: Event) -> None:
        if event.kind in ("progress", "log"):
            if (exchange := self.exchanges.get(root_of(event.call_id))) is not None:
                exchange.happened(event)
        elif event.kind == "offers-changed":
            self.changed()
        elif event.kind == "resource-updated" and isinstance(uri := event.data.get("uri"), str):
            self.updated(uri)

    # ── the person at it ─────────────────────────────────────────────────────────────────────────

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        exchange = self.exchanges.get(root_of(request.call_id))
        if exchange is None or not exchange.offers(FORM, {}):
            return ApprovalAnswer("later")
        form = approval_form(request, await preview(request, self.session.workdir), _version(exchange))
        filled = await self._filled(exchange, f"approval-{request.id}", form)
        return ApprovalAnswer("later") if filled is None else approval_answer(request, filled)

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        asked = self._whose(questions)
        if asked is None:
            return None
        approval_id, exchange = asked
        self._asked.add(approval_id)
        try:
            if not exchange.offers(FORM, {}):
                return None
            version = _version(exchange)
            filled = await self._filled(exchange, f"question-{approval_id}", question_form(questions, version))
            answers = None if filled is None else question_answers(questions, filled, version)
        finally:
            self._asked.discard(approval_id)
        if isinstance(answers, str):
            raise ToolError(answers, kind="denied")
        return answers

    def _whose(self, questions: Sequence[Question]) -> tuple[str, Exchange] | None:
        """The call that asks these questions, since an attendant gets only the questions."""
        for row in self._desk.pending(self.session.id):
            if row.kind == "question" and row.id not in self._asked and tuple(row.questions) == tuple(questions):
                exchange = self.exchanges.get(root_of(row.request.call_id))
                if exchange is not None:
                    return row.id, exchange
        return None

    async def _filled(self, exchange: Exchange, key: str, form: Ask) -> Mapping[str, Any] | None:
        """The form as it was filled in; None when nobody did so in time."""
        held = exchange.latest is not None and exchange.latest.modern
        try:
            async with asyncio.timeout(self._hold_s if held else self._wait_s):
                return (await exchange.ask({key: form}, believed=False))[key]
        except (TimeoutError, ToolError):
            return None

    # ── the client itself ────────────────────────────────────────────────────────────────────────

    def offers(self, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
        exchange = self.exchanges.get(root_of(call_id))
        return exchange is not None and exchange.offers(method, params)

    async def ask(self, call_id: str, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        exchange = self.exchanges.get(root_of(call_id))
        if exchange is None:
            raise ToolError("the client that made this call has gone", kind="unavailable")
        return await exchange.ask({key: _with_origin(ask) for key, ask in asks.items()})

    def let_go(self, call_id: str) -> None:
        if (exchange := self.exchanges.get(root_of(call_id))) is not None:
            exchange.let_go()


def root_of(call: str) -> str:
    """The call that a client made, of one that this one makes."""
    match = _ROOT.fullmatch(call)
    return call if match is None else match.group(1)


def _version(exchange: Exchange) -> str:
    line: Line | None = exchange.latest
    return "" if line is None else line.context.protocol_version


def _with_origin(ask: Ask) -> Ask:
    """Whoever is asked by another server than the one they know is told which."""
    if not ask.origin:
        return ask
    meta: Any = ask.params.get("_meta")
    kept: dict[str, Any] = dict(meta) if isinstance(meta, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    params: dict[str, Any] = {**ask.params, "_meta": {**kept, "handrail/origin": ask.origin}}
    if ask.method == FORM and isinstance(message := params.get("message"), str):
        # Nothing that would hide or reorder who asks; and each further line is its words too.
        said = spelled_out(message).replace("\n", "\n| ")
        params["message"] = f"{ask.origin} asks: {said}"
    return Ask(ask.method, params, ask.origin)


def _fingerprint(tool_id: str, proposed: ProposedCall) -> str:
    """What makes two calls the same."""
    whole = orjson.dumps([tool_id, proposed.arguments], option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.sha256(whole).hexdigest()
