"""One connected client: its session, its calls in progress, and the requests sent to it on their behalf.

With a handshake version, a client is one connection. With the stateless version, it is all requests with one credential.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest, ApprovalService
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result, make_call_id
from handrail.contract.errors import ToolError
from handrail.contract.services.client_services import ClientMethod, RequestToClient
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.frontends.cli.terminal_approvals import preview_edit_diff
from handrail.frontends.cli.terminal_output import escape_invisible_characters
from handrail.frontends.mcp.approval_forms import (
    make_approval_form,
    make_question_form,
    parse_approval_form_answer,
    parse_question_form_answers,
)
from handrail.frontends.mcp.client_call import McpClientCall, OpenClientRequest

if TYPE_CHECKING:
    from handrail.contract.calls_and_results import Event
    from handrail.contract.session_protocols import Session


MAX_CALLS = 1_000
"""Maximum number of concurrent calls of one client."""
MAX_HELD_CALLS = 64
"""Maximum number of held calls of one client."""
MAX_AWAITING_APPROVAL = 1_000
_ROOT = re.compile(r"(.*/\d+\.\d+)(?:\.\d+)*", re.DOTALL)
FORM_METHOD: ClientMethod = "elicitation/create"


class ConnectedMcpClient:
    """One connected client, with its session and its calls.

    It is the :class:`~handrail.contract.approval_requests.ApprovalHandler` and the :class:`~handrail.contract.services.client_services.ClientHandler` of its
    session.

    :param desk: the approval service, to look up the call of a question
    :param wait_s: seconds that an approval or question may keep a request open
    :param hold_s: seconds that an approval or question may take while its call is held
    :param hold: returns whether one more call may be held, counted over all clients
    """

    def __init__(self, desk: ApprovalService, wait_s: float, hold_s: float, hold: Callable[[], bool]) -> None:
        self.calls: dict[str, McpClientCall] = {}
        self.held_calls: dict[str, McpClientCall] = {}
        """Held calls by state token."""
        self.on_listing_changed: Callable[[], object] = lambda: None
        """Called when a listing may have changed."""
        self.on_resource_updated: Callable[[str], object] = lambda _: None
        """Called with the URI of a resource that has changed."""
        self.awaiting_approval: OrderedDict[str, str] = OrderedDict()
        """IDs of the calls that wait for approval, by the fingerprint of tool and arguments."""
        self.declined_requests: set[str] = set()
        """IDs of the approval requests whose form the client declined."""
        self.waiting_answers = Counter[str]()
        """How often the client got the answer that an approval request is open, by its ID."""
        self.kept_until = -math.inf
        """Time on the monotonic clock until which the results of its tasks can be requested."""
        self.is_shared = False
        """Whether several clients may share it, because it has no credential and a proxy may be in between."""
        self.active_requests = 0
        """Number of its requests that are being answered."""
        self._desk = desk
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._hold = hold
        self._session: Session | None = None
        self._open_questions: set[str] = set()
        """IDs of the questions that the client is being asked."""

    @property
    def session(self) -> Session:
        assert self._session is not None, "enter() sets the session"
        return self._session

    def set_and_watch_session(self, session: Session) -> None:
        """Set the session of this client, and watch its events."""
        self._session = session
        session.watch_events(self._on_event)

    @property
    def is_idle(self) -> bool:
        return not (self.active_requests or self.calls or self.held_calls) and time.monotonic() > self.kept_until

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def start_call(
        self, tool_id: str, proposed: ProposedCall, given: Mapping[str, Any] | None
    ) -> McpClientCall | Result:
        """Start a call, or resume the call that it repeats if that one waits for approval.

        :param tool_id: the tool that the call's name resolves to
        :param given: answers that the client sent before any question
        :return: the call, or an error result if the client has too many calls
        """
        if len(self.calls) >= MAX_CALLS:
            text = f"Too many calls of this client are running. The limit is {MAX_CALLS:,}. Wait until some have ended."
            return Result.error("limit", text)
        same = _hash_call(tool_id, proposed)
        if (waiting := self.awaiting_approval.get(same)) is not None and waiting not in self.calls:
            client_call = self.register_client_call(waiting, given)
            client_call.start(self._collect_answer(waiting, same))
            return client_call
        turn = self.session.start_turn()
        client_call = self.register_client_call(make_call_id(self.session.id, turn.number, 0), given)

        async def carried_out() -> CallAnswer:
            (answer,) = await turn.call_all([proposed])
            self._keep_if_awaiting_approval(same, answer)
            return answer

        client_call.start(carried_out())
        return client_call

    def keep_answer_awaiting_approval(self, tool_id: str, proposed: ProposedCall, answer: CallAnswer) -> None:
        """Keep the answer to a call that was made before this client was known, if the call waits for approval."""
        self._keep_if_awaiting_approval(_hash_call(tool_id, proposed), answer)

    def register_client_call(self, call: str, given: Mapping[str, Any] | None = None) -> McpClientCall:
        """Add a call whose messages and requests are sent to the client from now on."""
        client_call = McpClientCall(call, given)
        client_call.may_hold = lambda: len(self.held_calls) < MAX_HELD_CALLS and self._hold()
        self.calls[call] = client_call
        return client_call

    async def _collect_answer(self, call: str, same: str) -> CallAnswer:
        """Return the answer to a call that waited for approval, once, unless it still waits."""
        del self.awaiting_approval[same]
        try:
            answer = await self.session.recover_result(call)
        except BaseException:
            self.awaiting_approval[same] = call  # the client did not get the answer
            raise
        self._keep_if_awaiting_approval(same, answer)
        return answer

    def _keep_if_awaiting_approval(self, same: str, answer: CallAnswer) -> None:
        if (approval_id := answer.model.metadata.get("awaiting_approval")) is not None:
            self.waiting_answers[str(approval_id)] += 1
            self.awaiting_approval[same] = answer.call_id
            while len(self.awaiting_approval) > MAX_AWAITING_APPROVAL:
                self.awaiting_approval.popitem(last=False)
            if len(self.waiting_answers) > MAX_AWAITING_APPROVAL:
                self.waiting_answers.clear()
                self.declined_requests.clear()

    def end_call(self, call: McpClientCall) -> None:
        """Remove an answered or abandoned call. A stopped call still counts until it has ended."""
        task = call.task
        if task is None or task.done():
            self._remove_call(call)
        else:
            task.add_done_callback(lambda _: self._remove_call(call))

    def _remove_call(self, call: McpClientCall) -> None:
        if self.calls.get(call.call_id) is call:
            del self.calls[call.call_id]
        if call.task is not None and not call.task.cancelled():
            call.task.exception()  # mark it as retrieved: the follower has it, and without a follower it is not needed

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _on_event(self, event: Event) -> None:
        if event.kind in ("progress", "log"):
            if (client_call := self.calls.get(get_root_call_id(event.call_id))) is not None:
                client_call.queue_call_event(event)
        elif event.kind == "list-changed":
            self.on_listing_changed()
        elif event.kind == "resource-updated" and isinstance(uri := event.data.get("uri"), str):
            self.on_resource_updated(uri)

    # ── the user ─────────────────────────────────────────────────────────────────────────────────

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        client_call = self.calls.get(get_root_call_id(request.call_id))
        if client_call is None or not client_call.supports(FORM_METHOD, {}):
            return ApprovalAnswer("defer")
        form = make_approval_form(
            request, await preview_edit_diff(request, self.session.workdir), _version(client_call)
        )
        filled = await self._ask_form(client_call, f"approval-{request.id}", form)
        if filled is not None and filled.get("action") == "decline":
            self.declined_requests.add(request.id)
        return ApprovalAnswer("defer") if filled is None else parse_approval_form_answer(request, filled)

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        asked = self._find_asking_call(questions)
        if asked is None:
            return None
        approval_id, client_call = asked
        self._open_questions.add(approval_id)
        try:
            if not client_call.supports(FORM_METHOD, {}):
                raise ToolError("The client does not show questions. Ask the user in your reply.", kind="unavailable")
            version = _version(client_call)
            filled = await self._ask_form(
                client_call, f"question-{approval_id}", make_question_form(questions, version)
            )
            answers = None if filled is None else parse_question_form_answers(questions, filled, version)
        finally:
            self._open_questions.discard(approval_id)
        if isinstance(answers, str):
            raise ToolError(answers, kind="denied")
        return answers

    def _find_asking_call(self, questions: Sequence[UserQuestion]) -> tuple[str, McpClientCall] | None:
        """Return the approval ID and the call of these questions, or None.

        An attendant gets only the questions, without their call.
        """
        for row in self._desk.list_pending(self.session.id):
            if (
                row.kind == "question"
                and row.id not in self._open_questions
                and tuple(row.questions) == tuple(questions)
            ):
                client_call = self.calls.get(get_root_call_id(row.request.call_id))
                if client_call is not None:
                    return row.id, client_call
        return None

    async def _ask_form(self, call: McpClientCall, key: str, form: RequestToClient) -> Mapping[str, Any] | None:
        """Ask the client to fill in a form, and return the answer, or None after a timeout or an error."""
        held = call.last_request is not None and call.last_request.is_stateless
        try:
            async with asyncio.timeout(self._hold_s if held else self._wait_s):
                return (await call.send_requests({key: form}, believed=False))[key]
        except (TimeoutError, ToolError):
            return None

    # ── requests to the client ───────────────────────────────────────────────────────────────────

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        client_call = self.calls.get(get_root_call_id(call_id))
        return client_call is not None and client_call.supports(method, params)

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        client_call = self.calls.get(get_root_call_id(call_id))
        if client_call is None:
            text = "The client that made this call has disconnected. Continue without its answer."
            raise ToolError(text, kind="unavailable")
        return await client_call.send_requests({key: _with_origin(ask) for key, ask in requests.items()})

    def detach(self, call_id: str) -> None:
        if (client_call := self.calls.get(get_root_call_id(call_id))) is not None:
            client_call.close_client_stream()


def get_root_call_id(call: str) -> str:
    """Return the ID of the client's call that a nested call belongs to."""
    match = _ROOT.fullmatch(call)
    return call if match is None else match.group(1)


def _version(call: McpClientCall) -> str:
    line: OpenClientRequest | None = call.last_request
    return "" if line is None else line.context.protocol_version


def _with_origin(ask: RequestToClient) -> RequestToClient:
    """Return the request with the name of the upstream server that makes it, for the user to see."""
    if not ask.origin:
        return ask
    meta: Any = ask.params.get("_meta")
    kept: dict[str, Any] = dict(meta) if isinstance(meta, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    params: dict[str, Any] = {**ask.params, "_meta": {**kept, "handrail/origin": ask.origin}}
    if ask.method == FORM_METHOD and isinstance(message := params.get("message"), str):
        # Hiding and reordering characters are written out, and each further line is marked as the server's text.
        text = escape_invisible_characters(message).replace("\n", "\n| ")
        params["message"] = f"{ask.origin} asks: {text}"
    return RequestToClient(ask.method, params, ask.origin)


def _hash_call(tool_id: str, proposed: ProposedCall) -> str:
    """Return a hash of tool and arguments, which is equal for equal calls."""
    whole = json.dumps([tool_id, proposed.arguments], sort_keys=True, default=str)  # orjson has no large integers
    return hashlib.sha256(whole.encode()).hexdigest()
