"""One connected client: its session, its calls in progress, and the requests sent to it on their behalf.

With a handshake version, a client is one connection. With the stateless version, it is all requests with one credential.
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
"""Maximum number of concurrent calls of one client."""
MOST_HELD = 64
"""Maximum number of held calls of one client."""
MOST_PARKED = 1_000
_ROOT = re.compile(r"(.*/\d+\.\d+)(?:\.\d+)*", re.DOTALL)
FORM: AskMethod = "elicitation/create"


class Guest:
    """One connected client, with its session and its calls.

    It is the :class:`~handrail.contract.approvals.Attendant` and the :class:`~handrail.contract.doors.peer.Peer` of its
    session.

    :param desk: the approval service, to look up the call of a question
    :param wait_s: seconds that an approval or question may keep a request open
    :param hold_s: seconds that an approval or question may take while its call is held
    :param hold: returns whether one more call may be held, counted over all clients
    """

    def __init__(self, desk: ApprovalDesk, wait_s: float, hold_s: float, hold: Callable[[], bool]) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.held: dict[str, Exchange] = {}
        """Held calls by state token."""
        self.changed: Callable[[], object] = lambda: None
        """Called when a listing may have changed."""
        self.updated: Callable[[str], object] = lambda _: None
        """Called with the URI of a resource that has changed."""
        self.parked: OrderedDict[str, str] = OrderedDict()
        """IDs of the calls that wait for approval, by the fingerprint of tool and arguments."""
        self.kept_until = -math.inf
        """Time on the monotonic clock until which the results of its tasks can be requested."""
        self.shared = False
        """Whether several clients may share it, because it has no credential and a proxy may be in between."""
        self.busy = 0
        """Number of its requests that are being answered."""
        self._desk = desk
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._hold = hold
        self._session: Session | None = None
        self._asked: set[str] = set()
        """IDs of the questions that the client is being asked."""

    @property
    def session(self) -> Session:
        assert self._session is not None, "enter() sets the session"
        return self._session

    def enter(self, session: Session) -> None:
        """Set the session of this client, and watch its events."""
        self._session = session
        session.watch(self._happened)

    @property
    def idle(self) -> bool:
        return not (self.busy or self.exchanges or self.held) and time.monotonic() > self.kept_until

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def begin(self, tool_id: str, proposed: ProposedCall, given: Mapping[str, Any] | None) -> Exchange | Result:
        """Start a call, or resume the call that it repeats if that one waits for approval.

        :param tool_id: the tool that the call's name resolves to
        :param given: answers that the client sent before any question
        :return: the call, or an error result if the client has too many calls
        """
        if len(self.exchanges) >= MOST_CALLS:
            text = (
                f"Too many calls of this client are running. The limit is {MOST_CALLS:,}. Wait until some have ended."
            )
            return Result.error("limit", text)
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
        """Add a call whose messages and requests are sent to the client from now on."""
        exchange = Exchange(call, given)
        exchange.may_hold = lambda: len(self.held) < MOST_HELD and self._hold()
        self.exchanges[call] = exchange
        return exchange

    async def _collect(self, call: str, same: str) -> Answer:
        """Return the answer to a call that waited for approval, once, unless it still waits."""
        del self.parked[same]
        try:
            answer = await self.session.recall(call)
        except BaseException:
            self.parked[same] = call  # the client did not get the answer
            raise
        self._keep_if_parked(same, answer)
        return answer

    def _keep_if_parked(self, same: str, answer: Answer) -> None:
        if answer.model.metadata.get("parked") is not None:
            self.parked[same] = answer.call_id
            while len(self.parked) > MOST_PARKED:
                self.parked.popitem(last=False)

    def end(self, exchange: Exchange) -> None:
        """Remove an answered or abandoned call. A stopped call still counts until it has ended."""
        task = exchange.task
        if task is None or task.done():
            self._forget(exchange)
        else:
            task.add_done_callback(lambda _: self._forget(exchange))

    def _forget(self, exchange: Exchange) -> None:
        if self.exchanges.get(exchange.call_id) is exchange:
            del self.exchanges[exchange.call_id]
        if exchange.task is not None and not exchange.task.cancelled():
            exchange.task.exception()  # mark it as retrieved: the follower has it, and without a follower it is not needed

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _happened(self, event: Event) -> None:
        if event.kind in ("progress", "log"):
            if (exchange := self.exchanges.get(root_of(event.call_id))) is not None:
                exchange.happened(event)
        elif event.kind == "offers-changed":
            self.changed()
        elif event.kind == "resource-updated" and isinstance(uri := event.data.get("uri"), str):
            self.updated(uri)

    # ── the user ─────────────────────────────────────────────────────────────────────────────────

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
        """Return the approval ID and the call of these questions, or None.

        An attendant gets only the questions, without their call.
        """
        for row in self._desk.pending(self.session.id):
            if row.kind == "question" and row.id not in self._asked and tuple(row.questions) == tuple(questions):
                exchange = self.exchanges.get(root_of(row.request.call_id))
                if exchange is not None:
                    return row.id, exchange
        return None

    async def _filled(self, exchange: Exchange, key: str, form: Ask) -> Mapping[str, Any] | None:
        """Ask the client to fill in a form, and return the answer, or None after a timeout or an error."""
        held = exchange.latest is not None and exchange.latest.modern
        try:
            async with asyncio.timeout(self._hold_s if held else self._wait_s):
                return (await exchange.ask({key: form}, believed=False))[key]
        except (TimeoutError, ToolError):
            return None

    # ── requests to the client ───────────────────────────────────────────────────────────────────

    def offers(self, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
        exchange = self.exchanges.get(root_of(call_id))
        return exchange is not None and exchange.offers(method, params)

    async def ask(self, call_id: str, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        exchange = self.exchanges.get(root_of(call_id))
        if exchange is None:
            text = "The client that made this call has disconnected. Continue without its answer."
            raise ToolError(text, kind="unavailable")
        return await exchange.ask({key: _with_origin(ask) for key, ask in asks.items()})

    def let_go(self, call_id: str) -> None:
        if (exchange := self.exchanges.get(root_of(call_id))) is not None:
            exchange.let_go()


def root_of(call: str) -> str:
    """Return the ID of the client's call that a nested call belongs to."""
    match = _ROOT.fullmatch(call)
    return call if match is None else match.group(1)


def _version(exchange: Exchange) -> str:
    line: Line | None = exchange.latest
    return "" if line is None else line.context.protocol_version


def _with_origin(ask: Ask) -> Ask:
    """Return the request with the name of the upstream server that makes it, for the user to see."""
    if not ask.origin:
        return ask
    meta: Any = ask.params.get("_meta")
    kept: dict[str, Any] = dict(meta) if isinstance(meta, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    params: dict[str, Any] = {**ask.params, "_meta": {**kept, "handrail/origin": ask.origin}}
    if ask.method == FORM and isinstance(message := params.get("message"), str):
        # Hiding and reordering characters are written out, and each further line is marked as the server's text.
        said = spelled_out(message).replace("\n", "\n| ")
        params["message"] = f"{ask.origin} asks: {said}"
    return Ask(ask.method, params, ask.origin)


def _fingerprint(tool_id: str, proposed: ProposedCall) -> str:
    """Return a hash of tool and arguments, which is equal for equal calls."""
    whole = orjson.dumps([tool_id, proposed.arguments], option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.sha256(whole).hexdigest()
