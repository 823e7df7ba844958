"""Requests of running programs for hosts: each host is asked about once, while the connection to it waits.

A connection of a program waits in the proxy of its sandbox. All connections of a session to one host wait for the same
request. It is stored and answered like the request for a call: ``once`` counts until the call ends, a rule for as long as
it is stored, and a rejection for the rest of the session. A request that nobody answers in time stays pending. Its
connection is refused, and the answer counts for the next attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from handrail.arbiter.approvals.approval_flow import ApprovalFlow
from handrail.arbiter.call_state import Call
from handrail.arbiter.client_requests import pause_timeouts
from handrail.contract.approval_requests import Approval, ApprovalHandler
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.text.host_names import WEB_PORTS, bracket_ipv6_host, parse_host_address
from handrail.policy.call_authorizer import HostDecision, format_host_denial
from handrail.record.commit_log import Record

ANSWER_S = 300.0
"""How long a connection waits for the answer of a user who is asked now."""
DEFERRED_S = 20.0
"""How long it waits for an answer from elsewhere if the frontend of the session cannot ask."""


def make_host_rule_pattern(host: str) -> str:
    """Return the pattern of the rule that opens ``host:port``: without the port for a port of the web."""
    parsed = parse_host_address(host)
    return bracket_ipv6_host(parsed.name) if parsed.port in WEB_PORTS.values() else host


class HostAccessRequests:
    """The requests for hosts of all sessions.

    :param approval_flow: asks the users
    """

    def __init__(self, approval_flow: ApprovalFlow) -> None:
        self._flow = approval_flow
        self._broker = approval_flow.broker

    def explain_refusal(self, call: Call, host: str) -> str | None:
        """Return why the programs of ``call`` may not reach ``host:port`` now; None if they may."""
        decision = self._decide(call, host)
        return None if decision.action == "allow" else format_host_denial(decision, host)

    async def request(self, call: Call, host: str) -> str | None:
        """Do the same, and ask the user if no rule decides and a user can answer."""
        decision = self._decide(call, host)
        if decision.action == "allow":
            return None
        lane, name = call.lane, make_host_rule_pattern(host)
        if decision.action == "ask" and (refused := lane.refused_hosts.get(name)) is not None:
            return refused
        if decision.action == "deny" or lane.approval_handler is None or call.parent is not None:
            return format_host_denial(decision, host)
        with pause_timeouts(call):
            try:
                row = await self._wait_for_answer(call, lane.approval_handler, name, decision)
            except (ToolError, LogUnavailable) as error:
                return f"{decision.reason} The user could not be asked: {error} Continue without it."
        if row is None or row.is_pending:
            waiting = lane.host_requests.get(name)
            answer = "" if waiting is None else f"answer with `handrail approve {waiting}`, or to "
            return (
                f"{decision.reason} The user was asked and has not answered yet. Continue without it, or ask the user to "
                f"{answer}add the rule 'allow net.fetch {name}' to handrail.toml. Then try again."
            )
        if row.state == "approved":
            call.allowed_hosts = call.allowed_hosts | {name}
            return None
        if row.state != "rejected":
            return format_host_denial(decision, host)
        return lane.refused_hosts.setdefault(name, _describe_rejection(row, name))

    def _decide(self, call: Call, host: str) -> HostDecision:
        assert call.verdict is not None and call.entry is not None
        lane = call.lane
        if call.redactor.active and call.redactor.redact_text(host) is not host:
            return HostDecision("deny", "The host contains a registered secret. Remove the secret from its name.")
        decision = lane.authority.decide_host_access(call.verdict, call.entry.spec, host, rules=lane.rules)
        if decision.action == "ask" and make_host_rule_pattern(host) in call.allowed_hosts:
            return HostDecision("allow")
        return decision

    async def _wait_for_answer(
        self, call: Call, handler: ApprovalHandler, name: str, decision: HostDecision
    ) -> Approval | None:
        """Return the answer about a host; None if it did not come in time.

        :raises ToolError: if the user cannot be asked
        :raises LogUnavailable: if the request cannot be stored
        """
        loop, questions = asyncio.get_running_loop(), call.lane.host_questions
        until_s = loop.time() + ANSWER_S
        while True:
            if name not in questions:
                task = loop.create_task(self._ask(call, handler, name, decision))
                questions[name] = task, call
                call.host_questions = (*call.host_questions, task)
                task.add_done_callback(lambda _: questions.pop(name, None))
            task, asking = questions[name]
            await asyncio.wait((task,), timeout=max(until_s - loop.time(), 0.0))
            if not task.done():
                return None
            if task.cancelled():  # the call that asked has ended
                await asyncio.sleep(0)
                continue
            row = task.result()
            if asking is not call and row is not None and row.state == "approved" and row.choice == "once":
                await asyncio.sleep(0)
                continue  # the answer is for the other call alone
            return row

    async def _ask(self, call: Call, handler: ApprovalHandler, name: str, decision: HostDecision) -> Approval | None:
        lane, broker = call.lane, self._broker
        if (row := self._find_earlier(call, name)) is None:
            row = await self._submit(call, name, decision)
        elif row.is_pending and row.id in lane.deferred_requests:
            return None
        if row.is_pending:
            row = await self._wait_for_decision(call, handler, row)
        if row is None or row.is_pending:
            return None
        lane.host_requests.pop(name, None)
        if row.state == "approved":
            await broker.consume_approvals((row,), ())
        else:
            broker.withdraw(row)
        if row.choice == "stop" and row.state == "rejected":
            broker.stop_session_of_request(row, lane)
            call.execution.stop("user")
        return row

    def _find_earlier(self, call: Call, name: str) -> Approval | None:
        """Return the request for this host that an earlier attempt of the session made, unless it is over."""
        if (known := call.lane.host_requests.get(name)) is None:
            return None
        with suppress(ToolError):
            row = self._broker.get(known)
            if row.state in ("pending", "approved", "rejected"):
                return row
        return None

    async def _submit(self, call: Call, name: str, decision: HostDecision) -> Approval:
        """Make a request durable, with its record."""
        reason = f"{decision.reason} The running command waits for the answer. `once` applies until the command ends."
        request = replace(
            self._flow.build_approval_request(call),
            reason=reason,
            suggested_rule=f"allow net.fetch {name}",
            suggested_deny=f"deny net.fetch {name}",
            targets=(f"net.fetch {name}",),
        )
        row = self._broker.create_unstored_request(request, kind="host")
        event_data = {
            "approval_id": row.id,
            "kind": row.kind,
            "reason": reason,
            "suggested_rule": request.suggested_rule,
        }
        record = Record("approval-requested", call.lane.session_id, call.id, event_data)
        await self._broker.store_request_with_records(row, [record], whole=False)
        call.lane.host_requests[name] = row.id
        call.emit(
            "approval-requested", {"reason": reason, "suggested_rule": request.suggested_rule, "approval_id": row.id}
        )
        return row

    async def _wait_for_decision(self, call: Call, handler: ApprovalHandler, row: Approval) -> Approval | None:
        arrival = self._broker.register_decision_waiter(row, _refuse_changes, call)
        asking = asyncio.ensure_future(self._flow.ask_approval_handler(call, handler, row))
        try:
            await asyncio.wait((arrival, asking), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                return arrival.result()
            if (decided := self._take_answer(asking)) is not None:
                return decided
            call.lane.deferred_requests.add(row.id)
            await asyncio.wait((arrival,), timeout=DEFERRED_S)
            return arrival.result() if arrival.done() else None
        finally:
            self._broker.remove_decision_waiter(row.id)
            asking.cancel()

    @staticmethod
    def _take_answer(asking: asyncio.Future[Approval | None]) -> Approval | None:
        try:
            return asking.result()
        except (ToolError, LogUnavailable):
            raise
        except Exception as error:
            raise ToolError(
                f"{type(error).__name__} in the approval handler. The user can correct it; continue without this host.",
                kind="unavailable",
            ) from None


def _refuse_changes(row: Approval, _changed: Mapping[str, Any]) -> Mapping[str, str]:
    raise ToolError(
        f"Request {row.id} is about a host, and its command is already running. Answer without changed arguments.",
        kind="invalid_input",
    )


def _describe_rejection(row: Approval, name: str) -> str:
    reason = f": {row.message.rstrip('.')}" if row.message else ""
    return f"The user rejected the host {name}{reason}. Do not try to reach it another way in this session."
