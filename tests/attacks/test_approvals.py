"""The approved call is the one that runs, and the request shows all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx2
import mcp.types as types
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from tests.frontends.mcp_clients import ERAS, Era, FormUser, filled, launch, ran

from handrail import tool
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.frontends.mcp.http.http_server import HttpFrontendSettings, open_http_server
from handrail.frontends.mcp.tool_listing import McpFrontendSettings
from handrail.policy.watchdogs.api import WatchdogCall, WatchdogDecision, allow
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = [pytest.mark.proves("P-07"), pytest.mark.attack("permission")]


@tool(id="bank.transfer", side_effect="external", locks=["account:{source}:X"])
async def transfer(source: str, steps: list[dict[str, int]]) -> dict[str, Any]:
    """Pay."""
    return {"source": source, "steps": steps}


class TamperingFrontend(ScriptedApprovalHandler):
    """A face that changes the request it was shown."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        shown = cast("dict[str, Any]", request.arguments)
        shown["source"] = "changed"
        shown["steps"][0]["amount"] = 999
        return await super().approve(request)


@pytest.mark.parametrize("person", [ScriptedApprovalHandler, TamperingFrontend])
async def test_arguments_changed_during_an_approval_do_not_run(
    tmp_path: Path, person: type[ScriptedApprovalHandler]
) -> None:
    """Source: time of check to time of use, between the approval and the call."""
    asked = person([ApprovalAnswer("once")])
    asked.may_answer.clear()
    arguments: dict[str, Any] = {"source": "a", "steps": [{"amount": 1}]}
    async with temporary_kernel(tmp_path, tools=[transfer]) as kernel:
        session = await kernel.session(approval_handler=asked)
        call = asyncio.create_task(session.call("bank.transfer", arguments))
        await asked.request_received.wait()
        arguments["source"] = "b"
        arguments["steps"][0]["amount"] = 999
        asked.may_answer.set()
        result = await call
    assert result.data == {"source": "a", "steps": [{"amount": 1}]}


async def test_arguments_changed_during_a_watchdog_check_do_not_run(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"source": "a", "steps": [{"amount": 1}]}

    async def slow(_call: WatchdogCall) -> WatchdogDecision:
        arguments["steps"][0]["amount"] = 999
        return allow()

    async with temporary_kernel(tmp_path, tools=[transfer], rules=["allow bank.transfer"], watchdogs=[slow]) as kernel:
        result = await (await kernel.session()).call("bank.transfer", arguments)
    assert result.data["steps"] == [{"amount": 1}]


async def test_arguments_changed_during_a_lock_wait_do_not_run(tmp_path: Path) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    @tool(id="hold", side_effect="external", locks=["account:a:X"])
    async def hold() -> None:
        """Hold the lock."""
        entered.set()
        await leave.wait()

    arguments: dict[str, Any] = {"source": "a", "steps": [{"amount": 1}]}
    rules = ["allow bank.transfer", "allow hold"]
    async with temporary_kernel(tmp_path, tools=[transfer, hold], rules=rules) as kernel:
        session = await kernel.session()
        waiting = asyncio.Event()
        session.watch_events(lambda event: waiting.set() if event.kind == "awaiting-locks" else None)
        holding = asyncio.create_task(session.call("hold", {}))
        await entered.wait()
        call = asyncio.create_task(session.call("bank.transfer", arguments))
        await waiting.wait()
        arguments["steps"][0]["amount"] = 999
        leave.set()
        await holding
        assert (await call).data["steps"] == [{"amount": 1}]


@pytest.mark.usefixtures("confining")
async def test_a_once_approval_covers_one_call_and_a_session_approval_only_the_shown_rule(tmp_path: Path) -> None:
    """Source: "allow once" keyed by the tool's name, so that one approved command approved every other."""
    person = ScriptedApprovalHandler([ApprovalAnswer("once"), ApprovalAnswer("session")])
    async with temporary_kernel(tmp_path, rules=["ask bash"]) as kernel:
        session = await kernel.session(approval_handler=person)
        other = await kernel.session(approval_handler=ScriptedApprovalHandler())
        command = {"command": "mkdir -p '*'"}
        assert (await session.call("bash", command)).ok
        assert (await session.call("bash", command)).ok
        assert person.requests[1].suggested_rule == "allow bash mkdir -p '*'"
        assert (await session.call("bash", command)).ok
        assert len(person.requests) == 2
        for more in ("mkdir -p b", "mkdir -p '*' b", "mkdir -p '*' && make", "mkdir -p '*' > f", "mkdir"):
            assert (await session.call("bash", {"command": more})).error_kind == "denied", more
        assert (await other.call("bash", command)).error_kind == "denied"


@pytest.mark.parametrize("tokens", [False, True])
@ERAS
async def test_an_approval_of_one_client_does_not_allow_calls_of_another_client(
    tmp_path: Path, era: Era, tokens: bool
) -> None:
    """Source: one session for all clients of an HTTP server. Here both may have the same token and send the same call."""
    ran.clear()
    token = "sesame-0123456789abcdef"
    settings = HttpFrontendSettings("127.0.0.1", 0, tokens={token: "all"} if tokens else {})
    headers = {"Authorization": f"Bearer {token}"} if tokens else {}
    first, second = (
        FormUser([filled(decision="session"), filled(decision="once")]),
        FormUser([types.ElicitResult(action="decline")]),
    )
    async with (
        temporary_kernel(tmp_path, tools=[launch], rules=["ask launch"]) as kernel,
        open_http_server(kernel, McpFrontendSettings(), settings) as (url, _),
        httpx2.AsyncClient(headers=headers) as one_http,
        httpx2.AsyncClient(headers=headers) as other_http,
        Client(streamable_http_client(url, http_client=one_http), mode=era, elicitation_callback=first.elicit) as one,
        Client(
            streamable_http_client(url, http_client=other_http), mode=era, elicitation_callback=second.elicit
        ) as other,
    ):
        await one.call_tool("launch", {"what": "kite"})
        before = list(ran)
        refused = await other.call_tool("launch", {"what": "kite"})
        assert refused.is_error and len(second.seen) == 1 and ran == before
        (row,) = kernel.approvals.list_pending()
        assert row.request.is_shared == (era == "auto"), "an answer for such a session is not offered anywhere"
