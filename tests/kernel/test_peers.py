"""Requests and messages of tools to the client: authorized, limited, and not counted as the tool's time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors

from handrail import Event, Runtime, ToolError, tool
from handrail.contract.services.client_services import CLIENT_REQUEST_KINDS, RequestToClient, classify_client_request
from handrail.contract.tool.requires import Requires
from handrail.testing.scripted_kernel import ScriptedClient, temporary_kernel

FORM = RequestToClient(
    "elicitation/create",
    {"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}},
)
SAMPLE = RequestToClient("sampling/createMessage", {"messages": [], "maxTokens": 9})
ROOTS = RequestToClient("roots/list", {})
SAID = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "yes"}}
ALL = Requires(capabilities=("elicit", "sample", "roots"))

kernel_in = by_both_doors(rules=["allow test.*"])

Puts = Callable[[Runtime], Any]


def asking(work: Callable[[Runtime], Any], requires: Requires = ALL, **spec: Any) -> Any:
    @tool(id="test.ask", side_effect="read", locks=[], requires=requires, **spec)
    async def ask(runtime: Runtime) -> object:
        """Ask the client."""
        return await work(runtime)

    return ask


@pytest.mark.proves("K-11c")
async def test_a_client_answer_reaches_the_tool_that_asked(tmp_path: Path, kernel_in: Opens) -> None:
    peer = ScriptedClient(
        [
            {
                "who": {"action": "accept", "content": {"name": "Ada"}},
                "what": SAID,
                "where": {"roots": [{"uri": "file:///w", "name": "w"}]},
            }
        ]
    )

    async def work(runtime: Runtime) -> object:
        runtime.client.detach()
        return dict(await runtime.client.send_requests({"who": FORM, "what": SAMPLE, "where": ROOTS}))

    async with kernel_in(tmp_path, tools=[asking(work)]) as kernel:
        session = await kernel.session(client=peer)
        result = await session.call("test.ask", {})
        assert result.ok, result.error_text
        assert result.data["who"] == {"action": "accept", "content": {"name": "Ada"}}
        assert result.data["what"] == SAID and result.data["where"]["roots"][0]["uri"] == "file:///w"
        assert peer.calls == peer.detached == [f"{session.id}/1.0"]
        assert peer.asks == [{"who": FORM, "what": SAMPLE, "where": ROOTS}]
        await kernel.log.flush()
        (body,) = (record.body for record in kernel.log.reader.records() if record.kind == "client-request")
        assert body is not None
        assert [one["method"] for one in body["asks"]] == [FORM.method, SAMPLE.method, ROOTS.method]


async def test_a_tool_sees_the_request_kinds_that_its_client_supports_and_it_required(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async def work(runtime: Runtime) -> object:
        return [
            kind for kind, (method, params) in CLIENT_REQUEST_KINDS.items() if runtime.client.supports(method, params)
        ]

    peer = ScriptedClient(kinds=["form", "sample"])
    async with kernel_in(tmp_path, tools=[asking(work, Requires(capabilities=("elicit", "roots")))]) as kernel:
        session = await kernel.session(client=peer)
        assert (await session.call("test.ask", {})).data == ["form"]
        peer.kinds = frozenset({"url", "roots"})  # a client without a session says it anew with each request
        assert (await session.call("test.ask", {})).data == ["url", "roots"]
        assert (await (await kernel.session()).call("test.ask", {})).data == []


@pytest.mark.proves("K-11c")
async def test_a_tool_may_send_its_client_only_the_requests_that_it_requires(tmp_path: Path, kernel_in: Opens) -> None:
    async def work(runtime: Runtime) -> object:
        found: list[str] = []
        for ask in (
            SAMPLE,
            FORM,
            RequestToClient("elicitation/create", {"mode": "url", "message": "m", "url": "https://a.example"}),
        ):
            try:
                await runtime.client.send_requests({"a": ask})
                found.append("answered")
            except ToolError as error:
                found.append(error.kind)
        return found

    peer = ScriptedClient(kinds=["form", "sample"])
    async with kernel_in(tmp_path, tools=[asking(work, Requires(capabilities=("elicit",)))]) as kernel:
        asked = await (await kernel.session(client=peer)).call("test.ask", {})
        assert asked.data == ["denied", "answered", "unavailable"], asked.error_text
        assert (await (await kernel.session()).call("test.ask", {})).data == ["denied", "unavailable", "unavailable"]


@pytest.mark.proves("X-13")
async def test_the_time_that_a_client_takes_does_not_count_towards_the_tools_timeout(
    tmp_path: Path, kernel_in: Opens
) -> None:
    over: asyncio.Future[None] | None = None

    async def work(runtime: Runtime) -> object:
        nonlocal over
        over = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.25, over.set_result, None)  # beyond the time-out, on the same clock
        return dict(await runtime.client.send_requests({"a": FORM}))

    @tool(
        id="test.outer",
        side_effect="read",
        locks=[],
        timeout_ms=100,
        requires=Requires(capabilities=("call", "elicit")),
    )
    async def outer(runtime: Runtime) -> object:
        """Have another tool ask."""
        result = await runtime.call("test.ask", {})
        return result.data if result.ok else result.error_text

    peer = ScriptedClient()
    peer.may_answer.clear()
    async with kernel_in(tmp_path, tools=[asking(work, timeout_ms=100), outer]) as kernel:
        session = await kernel.session(client=peer)
        call = asyncio.create_task(session.call("test.outer", {}))
        await peer.request_received.wait()
        assert over is not None
        await over
        assert not call.done()
        peer.may_answer.set()
        assert (await call).data == {"a": {"action": "decline"}}
        assert peer.calls == [f"{session.id}/1.0"]  # of the call that the client made


async def test_a_stopped_call_cancels_its_client_request(tmp_path: Path, kernel_in: Opens) -> None:
    ended = asyncio.Event()

    class Patient(ScriptedClient):
        async def send_requests(
            self, call_id: str, requests: Mapping[str, RequestToClient]
        ) -> Mapping[str, Mapping[str, Any]]:
            try:
                self.request_received.set()
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

    async def work(runtime: Runtime) -> object:
        return dict(await runtime.client.send_requests({"a": FORM}))

    peer = Patient()
    async with kernel_in(tmp_path, tools=[asking(work)]) as kernel:
        session = await kernel.session(client=peer)
        call = asyncio.create_task(session.call("test.ask", {}))
        await peer.request_received.wait()
        session.cancel_running_calls()
        assert (await call).error_kind == "cancelled"
        await ended.wait()


GARBAGE: list[tuple[str, RequestToClient, Any]] = [
    ("nothing at all", FORM, None),
    ("under another key", FORM, {"b": {"action": "decline"}}),
    ("no object", FORM, {"a": "yes"}),
    ("another action", FORM, {"a": {"action": "yes"}}),
    ("content of another type", FORM, {"a": {"action": "accept", "content": {"name": 7}}}),
    ("what was not asked for", FORM, {"a": {"action": "accept", "content": {"name": "x", "more": "y"}}}),
    ("content that is nested", FORM, {"a": {"action": "accept", "content": {"name": {"a": 1}}}}),
    ("far too much", FORM, {"a": {"action": "accept", "content": {"name": "x" * (17 << 20)}}}),
    ("a message without a role", SAMPLE, {"a": {"model": "m", "content": {"type": "text", "text": "x"}}}),
    ("a message of no model", SAMPLE, {"a": {"role": "assistant", "content": {"type": "text", "text": "x"}}}),
    ("a block of no known type", SAMPLE, {"a": {**SAID, "content": [{"type": "code"}]}}),
    ("a text block without text", SAMPLE, {"a": {**SAID, "content": {"type": "text"}}}),
    ("roots elsewhere", ROOTS, {"a": {"roots": [{"uri": "https://a.example"}]}}),
    ("no roots", ROOTS, {"a": {"roots": "none"}}),
]


@pytest.mark.proves("K-11c")
@pytest.mark.parametrize(("what", "ask", "answer"), GARBAGE, ids=[one[0] for one in GARBAGE])
async def test_an_invalid_answer_of_the_client_fails_the_call(what: str, ask: RequestToClient, answer: Any) -> None:
    peer = ScriptedClient([answer])

    async def work(runtime: Runtime) -> object:
        return dict(await runtime.client.send_requests({"a": ask}))

    async with temporary_kernel(tools=[asking(work)], rules=["allow test.*"]) as kernel:
        result = await (await kernel.session(client=peer)).call("test.ask", {})
        assert result.error_kind == "backend", what
        assert "The client returned an invalid answer" in (result.error_text or "")


@pytest.mark.proves("K-11c")
async def test_a_tool_that_sends_too_many_or_invalid_client_requests_is_refused(tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> object:
        found: list[str] = []
        for asks in (
            {},
            {str(number): FORM for number in range(17)},
            {"a": RequestToClient("elicitation/create", {**FORM.params, "message": "x" * (9 << 20)})},
            {"a": RequestToClient("elicitation/create", {"message": "m", "requestedSchema": {"type": "no such"}})},
            {"a": RequestToClient("elicitation/create", {"mode": "url", "message": "m", "url": "file:///etc/passwd"})},
            {"\n": FORM},
            {"a": "not an ask"},
        ):
            with pytest.raises(ToolError) as refused:
                await runtime.client.send_requests(asks)  # pyright: ignore[reportArgumentType]
            found.append(refused.value.kind)
        answered = 0
        for _ in range(10_000):
            try:
                await runtime.client.send_requests({str(number): FORM for number in range(16)})
                answered += 16
            except ToolError as error:
                return [*found, error.kind, answered]
        return None

    peer = ScriptedClient()
    async with temporary_kernel(tmp_path, tools=[asking(work)], rules=["allow test.*"]) as kernel:
        result = await (await kernel.session(client=peer)).call("test.ask", {})
        assert result.data == [*["invalid_input", "invalid_input", "limit"], *["invalid_input"] * 4, "limit", 256]
        assert sum(map(len, peer.asks)) == 256


@pytest.mark.proves("O-07")
async def test_client_requests_log_messages_and_progress_contain_no_secret(tmp_path: Path, kernel_in: Opens) -> None:
    secret = "correct-horse-battery"

    async def work(runtime: Runtime) -> object:
        runtime.log("warning", {"said": [secret]}, "part")
        runtime.report_progress(f"at {secret}", done=1, total=4)
        await runtime.client.send_requests(
            {"a": RequestToClient("elicitation/create", {**FORM.params, "message": secret})}
        )

    peer, seen = ScriptedClient(), list[Event]()
    async with kernel_in(tmp_path, tools=[asking(work)], secrets={"KEY": secret}) as kernel:
        session = await kernel.session(client=peer)
        told = asyncio.Event()
        session.watch_events(seen.append)
        session.watch_events(lambda event: told.set() if event.kind == "finished" else None)
        assert (await session.call("test.ask", {})).ok
        await told.wait()
        assert peer.asks and secret not in str(peer.asks) and secret not in str(seen)
        (log,) = (event.data for event in seen if event.kind == "log")
        assert (log["level"], log["logger"]) == ("warning", "part") and log["data"]["said"] != [secret]
        (far,) = (event.data for event in seen if event.kind == "progress")
        assert (far["fraction"], far["done"], far["total"]) == (0.25, 1, 4)


async def test_an_unknown_log_level_is_refused_and_a_long_log_message_is_truncated(tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> object:
        runtime.log("info", "x" * 100_000)
        runtime.report_progress(done=float("nan"), total=0)
        with pytest.raises(ToolError, match="not a log level"):
            runtime.log("loud", "x")  # pyright: ignore[reportArgumentType]

    seen: list[Event] = []
    async with temporary_kernel(tmp_path, tools=[asking(work)], rules=["allow test.*"]) as kernel:
        session = await kernel.session()
        session.watch_events(seen.append)
        assert (await session.call("test.ask", {})).ok
        data = {event.kind: event.data for event in seen}
        assert len(str(data["log"]["data"])) < 200
        assert data["progress"]["done"] is None and data["progress"]["fraction"] is None


async def test_a_tool_in_a_thread_can_log_detach_and_ask_its_client(tmp_path: Path, kernel_in: Opens) -> None:
    threads: list[int] = []

    @tool(id="test.thread", side_effect="read", locks=[], requires=ALL)
    def work(runtime: Runtime) -> str:
        """Tell from a thread."""
        threads.append(threading.get_ident())
        runtime.log("info", "from a thread")
        runtime.client.detach()
        return asyncio.run(_ask(runtime))

    peer, kinds, told = ScriptedClient(), list[str](), asyncio.Event()
    async with kernel_in(tmp_path, tools=[work]) as kernel:
        session = await kernel.session(client=peer)
        session.watch_events(lambda event: kinds.append(event.kind))
        session.watch_events(lambda event: told.set() if event.kind == "finished" else None)
        assert (await session.call("test.thread", {})).data == "decline"
        await told.wait()
        assert threads != [threading.get_ident()] and "log" in kinds and len(peer.detached) == 1


async def _ask(runtime: Runtime) -> str:
    return (await runtime.client.send_requests({"a": FORM}))["a"]["action"]


def test_each_client_request_is_classified_as_its_kind() -> None:
    assert all(
        classify_client_request(method, params) == kind for kind, (method, params) in CLIENT_REQUEST_KINDS.items()
    )
