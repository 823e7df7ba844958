"""MCP tasks: a long call is a job, which its client follows by an unguessable ID."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, MCPError
from mcp.client.extension import ClientExtension, NotificationBinding, advertise
from pydantic import ConfigDict
from tests.frontends.mcp_clients import NAME, join_text_content, serving

from handrail import ToolError, tool
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.tool_runtime import Runtime
from handrail.frontends.mcp import task_extension as module
from handrail.frontends.mcp.client_manager import McpClientManager
from handrail.frontends.mcp.tool_listing import McpFrontendSettings
from handrail.kernel.local_kernel import LocalKernel

TASKS = "io.modelcontextprotocol/tasks"
FORM = {"message": "Who?", "requestedSchema": NAME}


class Gates:
    """The events that the tools wait for."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()


gates: list[Gates] = []


@tool(side_effect="external", locks=[], mode="background")
async def beside(runtime: Runtime, fails: bool = False) -> str:
    """Go on in the background."""
    runtime.report_progress("half way")
    gates[0].began.set()
    await gates[0].go.wait()
    if fails:
        raise ToolError("it came to nothing")
    return "done beside"


@tool(side_effect="external", locks=[], mode="background", requires={"capabilities": ["elicit", "roots"]})
async def asker(runtime: Runtime, what: str = "forms") -> str:
    """Ask in the background."""
    if what == "later":
        await gates[0].go.wait()
        return (await runtime.client.send_requests({"one": RequestToClient("elicitation/create", FORM)}))["one"][
            "content"
        ]["name"]
    if what == "roots":
        return str(await runtime.client.send_requests({"where": RequestToClient("roots/list", {})}))
    form = RequestToClient("elicitation/create", FORM)
    both = await runtime.client.send_requests({"one": form, "two": form})
    again = await runtime.client.send_requests({"one": form})
    return ", ".join(str(answer["content"]["name"]) for answer in (both["one"], both["two"], again["one"]))


@tool(side_effect="external", locks=[], promotable=True, requires={"capabilities": ["elicit"]})
async def long(runtime: Runtime, asks: bool = False) -> str:
    """Take as long as it takes."""
    who = ""
    if asks:
        who = (await runtime.client.send_requests({"who": RequestToClient("elicitation/create", FORM)}))["who"][
            "content"
        ]["name"]
    await gates[0].go.wait()
    return f"done at last {who}"


TOOLS = (beside, asker, long)
RULES = ("allow beside", "allow asker", "allow long", "allow bash", "allow wait")


class Anything(types.Result):
    """Whatever a result says."""

    model_config = ConfigDict(extra="allow")


class TaskClient:
    """A client that declares the extension, and asks for what it likes."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        request = types.Request[dict[str, Any], str](method=method, params=params)
        found = await self.client.session.send_request(request, Anything)
        return found.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return await self.ask("tools/call", name=name, arguments=arguments)

    async def until(self, task_id: str, *states: str) -> dict[str, Any]:
        """Look at a task until it is in one of these states."""
        while (found := await self.ask("tasks/get", taskId=task_id))["status"] not in states:
            await asyncio.sleep(0.01)
        return found


async def never(context: Any, params: Any) -> types.ElicitResult:
    raise AssertionError("a task asks through tasks/get")


@asynccontextmanager
async def following(
    folder: Path, *, after_s: float = 0.02, hold_s: float = 600.0
) -> AsyncGenerator[tuple[TaskClient, LocalKernel, McpClientManager, Callable[..., Client]]]:
    gates[:] = [Gates()]
    settings = McpFrontendSettings(discovery="all", task_after_s=after_s, hold_s=hold_s)
    async with (
        serving(folder, settings, RULES, TOOLS) as (kernel, house, client),
        Client(client("auto").server, extensions=[advertise(TASKS)], elicitation_callback=never) as one,
    ):
        yield TaskClient(one), kernel, house, client


@pytest.mark.proves("F-03", "X-02")
async def test_a_background_call_is_a_task_for_a_client_that_supports_tasks(tmp_path: Path) -> None:
    async with following(tmp_path) as (one, kernel, _, client):
        made = await one.call("beside")
        assert (made["resultType"], made["status"]) == ("task", "working")
        assert not {"result", "error", "inputRequests", "requestState", "content"} & made.keys()
        assert made["ttlMs"] >= 900_000 and made["pollIntervalMs"] > 0
        await gates[0].began.wait()
        working = await one.ask("tasks/get", taskId=made["taskId"])
        assert (working["resultType"], working["status"]) == ("complete", "working")
        assert working["statusMessage"] == "half way"
        (job,) = await kernel.jobs.list()
        assert made["_meta"]["handrail/job"] == job.id, "and it is a job like any other"
        gates[0].go.set()
        ended = await one.until(made["taskId"], "completed")
        assert ended["result"]["content"] == [{"type": "text", "text": "done beside"}]
        assert (await one.ask("tasks/cancel", taskId=made["taskId"])).keys() == {"resultType", "_meta"}
        async with client("auto") as plain:
            answer = await plain.call_tool("beside", {})
            assert json.loads(join_text_content(answer))["job_id"].startswith("beside_"), (
                "else it is answered with the job"
            )


async def test_a_tool_error_completes_the_task_and_a_missing_client_capability_fails_it(tmp_path: Path) -> None:
    async with following(tmp_path) as (one, _, _, _):
        gates[0].go.set()
        failed = await one.until((await one.call("beside", fails=True))["taskId"], "completed", "failed")
        assert failed["status"] == "completed" and failed["result"]["isError"]
        lacking = await one.until((await one.call("asker", what="roots"))["taskId"], "completed", "failed")
        assert lacking["status"] == "failed" and lacking["error"]["code"] == -32021
        assert lacking["error"]["data"] == {"requiredCapabilities": {"roots": {}}} and "result" not in lacking


@pytest.mark.proves("X-08")
async def test_a_cancelled_task_cancels_its_job(tmp_path: Path) -> None:
    async with following(tmp_path) as (one, kernel, _, _):
        made = await one.call("bash", command="echo begun; tail -f /dev/null", background=True)
        (job,) = await kernel.jobs.list()
        while "begun" not in (await kernel.jobs.read_output_bytes(job.id)).text:
            await asyncio.sleep(0.01)
        assert (await one.ask("tasks/cancel", taskId=made["taskId"]))["resultType"] == "complete"
        ended = await one.until(made["taskId"], "cancelled", "completed")
        assert ended["status"] == "cancelled" and "result" not in ended
        assert (await kernel.jobs.get(job.id)).state == "cancelled"


@pytest.mark.proves("X-04")
async def test_a_long_call_becomes_a_task_and_a_quick_call_returns_its_result(tmp_path: Path) -> None:
    async with following(tmp_path) as (one, kernel, _, client):
        made = await one.call("long")
        assert made["resultType"] == "task"
        gates[0].go.set()
        ended = await one.until(made["taskId"], "completed")
        assert ended["result"]["content"][0]["text"] == "done at last "
        assert "content" in await one.call("long"), "one that is quick has its result"
        async with client("auto") as plain:
            assert join_text_content(await plain.call_tool("long", {})) == "done at last "
        assert len(await kernel.jobs.list()) == 1


async def test_a_question_before_the_task_exists_is_asked_in_the_request(tmp_path: Path) -> None:
    async with following(tmp_path, after_s=0.05) as (one, _, _, _):
        first = await one.call("long", asks=True)
        while first["resultType"] == "task":  # the machine was slower than the client's patience
            await one.ask("tasks/cancel", taskId=first["taskId"])
            first = await one.call("long", asks=True)
        assert first["resultType"] == "input_required" and "taskId" not in first
        again = {"name": "long", "arguments": {"asks": True}, "requestState": first["requestState"]}
        filled = {"who": {"action": "accept", "content": {"name": "Ada"}}}
        made = await one.ask("tools/call", **again, inputResponses=filled)
        assert made["resultType"] == "task" and "requestState" not in made
        gates[0].go.set()
        ended = await one.until(made["taskId"], "completed")
        assert ended["result"]["content"][0]["text"] == "done at last Ada"


async def test_a_task_collects_answers_one_by_one_under_keys_that_never_repeat(tmp_path: Path) -> None:
    async with following(tmp_path) as (one, _, _, _):
        task = (await one.call("asker"))["taskId"]
        asking = await one.until(task, "input_required")
        assert set(asking["inputRequests"]) == {"one", "two"}
        assert asking["inputRequests"]["one"]["method"] == "elicitation/create"

        async def answered(**names: str) -> dict[str, Any]:
            given = {key: {"action": "accept", "content": {"name": name}} for key, name in names.items()}
            ack = await one.ask("tasks/update", taskId=task, inputResponses=given)
            assert ack.keys() == {"resultType", "_meta"}
            return await one.ask("tasks/get", taskId=task)

        assert set((await answered(nobody="x", one="Ada"))["inputRequests"]) == {"two"}
        assert set((await answered(one="Eve"))["inputRequests"]) == {"two"}, "an answer counts once"
        await answered(two="Bob")
        third = await one.until(task, "input_required", "completed")
        assert set(third["inputRequests"]) == {"one-2"}
        await answered(**{"one-2": "Cid"})
        ended = await one.until(task, "completed")
        assert ended["result"]["content"][0]["text"] == "Ada, Bob, Cid"


class Told(types.NotificationParams):
    """Whatever it says."""

    model_config = ConfigDict(extra="allow")


class NotifiedTaskClient(ClientExtension):
    """A client with the tasks extension that records task notifications."""

    identifier = TASKS

    def __init__(self) -> None:
        self.agreed: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._kept: list[dict[str, Any]] = []

    def notifications(self) -> list[NotificationBinding[Any]]:
        return [NotificationBinding(method="notifications/tasks", params_type=Told, handler=self._hear)]

    async def _hear(self, told: Told) -> None:
        self._told.put_nowait(told.model_dump(by_alias=True, mode="json", exclude_none=True))

    async def all(self, message: Any) -> None:
        if isinstance(message, types.SubscriptionsAcknowledgedNotification):
            agreed = message.params.notifications.model_dump(by_alias=True, exclude_none=True)
            self.agreed.put_nowait(agreed)

    async def until(self, task_id: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a matching state. The SDK may deliver states out of order."""
        while not (found := [one for one in self._kept if one["taskId"] == task_id and fits(one)]):
            self._kept.append(await self._told.get())
        return found[0]


async def test_a_subscriber_of_a_task_sees_the_same_state_as_a_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: asyncio.Queue[None] = asyncio.Queue()
    look: Any = module.McpTaskManager._check_client  # pyright: ignore[reportPrivateUsage]

    def counted(*given: Any) -> None:
        look(*given)
        due.put_nowait(None)

    monkeypatch.setattr(module.McpTaskManager, "_check_client", counted)
    monkeypatch.setattr(module, "NOTIFY_INTERVAL_S", 0)
    hearing = NotifiedTaskClient()
    async with (
        following(tmp_path, hold_s=0.02) as (_, _, _, client),
        Client(
            client("auto").server, extensions=[hearing], message_handler=hearing.all, elicitation_callback=never
        ) as listens,
    ):
        one = TaskClient(listens)
        task, other = (await one.call("asker", what="later"))["taskId"], (await one.call("beside"))["taskId"]
        wanted = {"taskIds": [task, "beside_1.forged", other, task], "toolsListChanged": True}
        listening = asyncio.create_task(one.ask("subscriptions/listen", notifications=wanted))
        assert await hearing.agreed.get() == {"taskIds": [task, other], "toolsListChanged": True}
        await hearing.until(other, lambda state: state.get("statusMessage") == "half way")
        gates[0].go.set()
        ended = await hearing.until(other, lambda state: state.get("status") == "completed")
        assert ended["result"]["content"][0]["text"] == "done beside"
        asks = await hearing.until(task, lambda state: "one" in state.get("inputRequests", ()))
        for _ in range(3):  # it was due to look, again and again: who listens looks on
            await due.get()
        looked = await one.ask("tasks/get", taskId=task)
        assert looked["status"] == "input_required" and looked["inputRequests"] == asks["inputRequests"]
        given = {"one": {"action": "accept", "content": {"name": "Ada"}}}
        await one.ask("tasks/update", taskId=task, inputResponses=given)
        ended = await hearing.until(task, lambda state: state.get("status") == "completed")
        assert ended["result"]["content"][0]["text"] == "Ada" and "resultType" not in ended
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_a_task_ends_when_its_client_sends_no_answer_in_time(tmp_path: Path) -> None:
    async with following(tmp_path, hold_s=0.02) as (one, kernel, _, _):
        made = await one.call("asker")
        result = await kernel.jobs.wait(made["_meta"]["handrail/job"], timeout_ms=60_000)
        assert result is not None and "did not send an answer in time" in (result.error_text or "")


async def test_a_client_without_task_support_is_refused_where_a_task_is_needed(tmp_path: Path) -> None:
    needed: dict[str, Any] = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
    async with following(tmp_path) as (one, kernel, _, client):
        task = (await one.call("beside"))["taskId"]
        async with client("auto") as plain:
            other = TaskClient(plain)
            for method in ("tasks/get", "tasks/update", "tasks/cancel"):
                with pytest.raises(MCPError) as refused:
                    await other.ask(method, taskId=task, inputResponses={})
                assert (refused.value.error.code, refused.value.error.data) == (-32021, needed)
            with pytest.raises(MCPError) as refused:
                await other.ask("subscriptions/listen", notifications={"taskIds": [task]})
            assert (refused.value.error.code, refused.value.error.data) == (-32021, needed)
            with pytest.raises(MCPError) as refused:
                await other.call("asker")
            assert (refused.value.error.code, refused.value.error.data) == (-32021, needed)
        async with client("legacy") as old:
            with pytest.raises(MCPError) as refused:
                await TaskClient(old).ask("tasks/get", taskId=task)
            assert refused.value.error.code == -32601
        for nonsense in (task, [7], [task] * 101):
            with pytest.raises(MCPError) as refused:
                await one.ask("subscriptions/listen", notifications={"taskIds": nonsense})
            assert refused.value.error.code == -32602
        for gone in ("tasks/list", "tasks/result"):
            with pytest.raises(MCPError) as refused:
                await one.ask(gone, taskId=task)
            assert refused.value.error.code == -32601
        assert len(await kernel.jobs.list()) == 1, "nothing of what was refused was begun"


async def test_a_task_is_found_only_by_its_owner_and_complete_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path) as (one, _, _, _):
        task: str = (await one.call("beside"))["taskId"]
        job_id = task.rpartition(".")[0]
        told: set[str] = set()
        for wrong in (
            job_id,
            f"{job_id}.",
            f"{job_id}.{'A' * 24}",
            task[:-1],
            f"{task}x",
            "x",
            "",
            "ä.b",
            "\ud800"[:0],
        ):
            with pytest.raises(MCPError) as refused:
                await one.ask("tasks/get", taskId=wrong)
            assert refused.value.error.code == -32602
            said_back = f"Task `{wrong}` was not found."
            assert refused.value.error.message.startswith(said_back), "the id is the caller's own"
            told.add(refused.value.error.message.removeprefix(said_back))
        assert len(told) == 1 and "beside" not in told.pop(), "nothing tells an id that is partly right"
        monkeypatch.setattr(module, "get_request_principal", lambda: ("somebody", None, "else"))
        with pytest.raises(MCPError):
            await one.ask("tasks/cancel", taskId=task)
        monkeypatch.undo()
        assert (await one.ask("tasks/get", taskId=task))["status"] == "working"


@tool(side_effect="external", locks=[], mode="background", idempotent=True)
async def again(runtime: Runtime) -> str:
    """Be run again after a restart."""
    gates[0].began.set()
    await gates[0].go.wait()
    return "done in the end"


@pytest.mark.proves("X-06")
async def test_a_task_of_a_background_job_outlasts_the_server_that_created_it(tmp_path: Path) -> None:
    gates[:] = [Gates()]

    @asynccontextmanager
    async def server() -> AsyncGenerator[TaskClient]:
        settings = McpFrontendSettings(discovery="all")
        async with (
            serving(tmp_path, settings, ("allow beside", "allow again"), (beside, again)) as (_, _, client),
            Client(client("auto").server, extensions=[advertise(TASKS)]) as one,
        ):
            yield TaskClient(one)

    async with server() as one:
        lost, kept = (await one.call("beside"))["taskId"], (await one.call("again"))["taskId"]
        await gates[0].began.wait()
    gates[:] = [Gates()]
    async with server() as one:
        assert (await one.ask("tasks/get", taskId=lost))["status"] == "cancelled"
        assert (await one.ask("tasks/get", taskId=kept))["status"] == "working"
        await gates[0].began.wait()
        gates[0].go.set()
        ended = await one.until(kept, "completed")
        assert ended["result"]["content"][0]["text"] == "done in the end"
    async with server() as one:
        assert (await one.ask("tasks/get", taskId=kept))["status"] == "completed", "and what it gave can be read again"
