"""A tool's own check of its arguments reports faults before the user is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator
from tests.kernel.guests import joined_kernel
from tests.kernel.test_agents import confined

from handrail import ApprovalAnswer, Runtime, Tool, ToolError, ToolSpec, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import CallArgumentsDelta, CallBlockClosed, CallBlockOpened, ReplyFinished
from handrail.testing.provider_request_checks import PlaybackModel, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = pytest.mark.proves("K-05")

NUMBERS = {
    "type": "object",
    "properties": {"low": {"type": "integer"}, "high": {"type": "integer", "default": 10}},
    "required": ["low"],
    "additionalProperties": False,
}


DEFECTS = {13: LookupError("a defect of its own"), 14: SystemExit(3), 15: asyncio.CancelledError()}


class Between(Tool):
    """Needs its numbers in order."""

    spec = ToolSpec(id="test.between", description="Two numbers.", parameters=NUMBERS, side_effect="external", locks=())

    def __init__(self) -> None:
        self.ran: list[dict[str, Any]] = []
        self.checked = 0

    def check(self, args: dict[str, Any]) -> None:
        self.checked += 1
        if args["low"] in DEFECTS:
            raise DEFECTS[args["low"]]
        if args["low"] > (high := args.get("high", 10)):
            text = f"low is {args['low']}, which is above high, {high}; give the smaller one first"
            raise ToolError(text, kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        self.ran.append(args)
        return args


async def test_a_failed_argument_check_is_an_input_error_and_asks_no_user(tmp_path: Path) -> None:
    between, person = Between(), ScriptedApprovalHandler([ApprovalAnswer("once")])
    async with temporary_kernel(tmp_path, tools=[between]) as kernel:
        session = await kernel.session(headless=False, approval_handler=person)
        result = await session.call("test.between", {"low": 11})
        assert result.error_text == "test.between: low is 11, which is above high, 10; give the smaller one first"
        assert result.metadata["error_kind"] == "invalid_input" and not person.requests
        assert (await session.call("test.between", {"low": 1})).ok
        assert len(person.requests) == 1 and between.ran == [{"low": 1}]
        kinds = [[record.kind for record in kernel.log.reader.records(call=f"{session.id}/{n}.0")] for n in (1, 2)]
        assert kinds[0] == ["proposed", "rejected"] and "committed" in kinds[1]
        with pytest.raises(ToolError, match="give the smaller one first") as refused:
            await kernel.explain_call("test.between", {"low": 11})
        assert refused.value.kind == "invalid_input"


@pytest.mark.parametrize("low", DEFECTS)
async def test_an_exception_in_the_check_of_a_tool_rejects_only_that_call(tmp_path: Path, low: int) -> None:
    between = Between()
    async with temporary_kernel(tmp_path, tools=[between], rules=["allow test.*"]) as kernel:
        session = await kernel.session()
        failed = await session.call("test.between", {"low": low})
        assert failed.metadata["error_kind"] == "backend" and type(DEFECTS[low]).__name__ in str(failed.error_text)
        steps = [
            CallBlockOpened(0, None, "test__between"),
            CallArgumentsDelta(0, f'{{"low":{low}}}'),
            CallBlockClosed(0),
        ]
        model = PlaybackModel([*steps, ReplyFinished("calls")], text_reply("done"))
        assert (await Agent(session, model).complete("go")).ok and not between.ran


async def test_a_user_cannot_approve_arguments_that_the_check_refuses(tmp_path: Path) -> None:
    between = Between()
    person = ScriptedApprovalHandler(ApprovalAnswer("once", arguments={"low": low}) for low in (20, 2))
    async with temporary_kernel(tmp_path, tools=[between]) as kernel:
        session = await kernel.session(headless=False, approval_handler=person)
        assert (await session.call("test.between", {"low": 1})).ok
        assert len(person.requests) == 2, "asked again after the first answer, which could not be taken"
        assert between.ran == [{"low": 2}]


def even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


@tool(id="test.halve", side_effect="external", locks=[])
async def halve(number: Annotated[int, AfterValidator(even)]) -> int:
    """Half of it."""
    return number // 2


async def test_a_value_that_a_functions_type_refuses_is_rejected_before_the_approval(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    async with temporary_kernel(tmp_path, tools=[halve]) as kernel:
        session = await kernel.session(headless=False, approval_handler=person)
        result = await session.call("test.halve", {"number": 3})
        assert result.metadata["error_kind"] == "invalid_input" and "3 is odd" in str(result.error_text)
        assert not person.requests
        assert (await session.call("test.halve", {"number": 4})).data == 2 and len(person.requests) == 1


async def test_a_failed_check_in_prevalidation_adds_no_records(tmp_path: Path) -> None:
    between = Between()
    looked = asyncio.Event()
    steps = [CallBlockOpened(0, None, "test__between"), CallArgumentsDelta(0, '{"low":11}')]
    async with temporary_kernel(tmp_path, tools=[between], rules=["allow test.*"]) as kernel:
        session = await kernel.session()
        model = PlaybackModel([*steps, CallBlockClosed(0), ReplyFinished("calls")], text_reply("done"))
        session.watch_events(lambda event: looked.set())
        outcome = await Agent(session, model).complete("go")
        assert outcome.ok and between.checked == 2 and not between.ran
        kinds = [record.kind for record in kernel.log.reader.records(session=session.id) if record.call_id]
        assert kinds == ["proposed", "rejected"]


async def test_a_tool_of_a_connected_process_is_checked_there_before_it_runs(tmp_path: Path) -> None:
    between = Between()
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path, tools=[between], rules=["allow test.*"]) as joined:
        session = await joined.session()
        result = await session.call("test.between", {"low": 11})
        assert result.metadata["error_kind"] == "invalid_input" and "give the smaller one first" in str(
            result.error_text
        )
        assert (await session.call("test.between", {"low": 1})).ok and between.ran == [{"low": 1}]


async def test_the_check_of_a_stateful_tool_runs_before_the_tool_opens(tmp_path: Path) -> None:
    class Counting(Between):
        spec = ToolSpec(
            id="test.counting",
            description="Counts.",
            parameters=NUMBERS,
            side_effect="external",
            locks=(),
            mode="stateful",
        )

        async def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.ran.append(args)
            yield args["low"]

    counting, person = (
        Counting(),
        ScriptedApprovalHandler(ApprovalAnswer("once", arguments={"low": low}) for low in (20, 2)),
    )
    async with temporary_kernel(tmp_path, tools=[counting]) as kernel:
        session = await kernel.session(headless=False, approval_handler=person)
        result = await session.call("test.counting", {"low": 11})
        assert "give the smaller one first" in str(result.error_text) and not person.requests
        assert (await session.call("test.counting", {"low": 1})).ok
        assert len(person.requests) == 2 and counting.ran == [{"low": 2}]


@pytest.mark.proves("T-10")
@pytest.mark.parametrize(
    ("tool_id", "arguments", "told"),
    [
        ("add_schedule", {"prompt": "p"}, "exactly one of"),
        ("add_schedule", {"prompt": "p", "cron": "0 0 30 2 *"}, "Invalid cron expression"),
        ("add_schedule", {"prompt": "p", "cron": "0 0 */30 2 1#5"}, "never occurs"),
        ("add_schedule", {"prompt": "p", "daily_at": "25:00"}, "`daily_at` is invalid"),
        ("edit", {"path": "a", "old": "x", "new": "x"}, "are equal"),
        ("file.patch", {"path": "a", "operations": [{"op": "append", "content": ""}]}, "empty `content`"),
        ("json_write", {"path": "a"}, "either `value`"),
        ("json_write", {"path": "a", "pointer": "b", "value": 1}, "`pointer` is invalid"),
        ("scratchpad", {"action": "get"}, "takes `key` only"),
        ("todo", {"todos": [{"id": "1", "content": "a", "status": "pending"}] * 2}, "has 2 tasks with the id"),
        ("git.add", {}, "either `paths`"),
        ("git.commit", {"message": " "}, "blank"),
        ("git.checkout", {}, "`ref` is missing"),
        ("git.checkout", {"ref": "a..b"}, "The revision is invalid"),
        ("git.merge", {}, "either `ref`"),
        ("git.stash", {"action": "list", "message": "m"}, "apply only to push"),
        ("git.clone", {}, "either `url`"),
        ("git.diff", {"to": "HEAD"}, "Pass `from` and `to`"),
        ("search_memory", {}, "Pass either `query`"),
        ("load_tools", {}, "Pass `category`"),
        ("wait", {"job_id": "job_1"}, "Job `job_1` does not exist"),
        ("read_job", {"job_id": "job_1"}, "does not exist"),
        ("stop_task", {"job_id": "job_1"}, "does not exist"),
        ("tool.step", {"id": "state_1"}, "Tool session `state_1` does not exist"),
        ("tool.close", {"id": "state_1"}, "Tool session `state_1` does not exist"),
        ("send_message", {"channel": "a b", "message": "m"}, "Invalid channel name: 'a b'"),
        ("wait_channel", {"channel": "/a"}, "Invalid channel name"),
        ("watch_channel", {"channel": "a/b", "prompt": "p"}, "Invalid channel name"),
        pytest.param("terminal.send", {"id": "x", "text": "ls\n"}, "Job `x` does not exist", marks=confined),
        pytest.param("terminal.read", {"id": "x"}, "Job `x` does not exist", marks=confined),
        pytest.param("terminal.resize", {"id": "x", "columns": 80, "rows": 24}, "does not exist", marks=confined),
        pytest.param("terminal.stop", {"id": "x"}, "does not exist", marks=confined),
    ],
)
async def test_a_built_in_tool_rejects_bad_arguments_beyond_its_schema_without_asking(
    tmp_path: Path, tool_id: str, arguments: dict[str, Any], told: str
) -> None:
    person = ScriptedApprovalHandler()
    async with temporary_kernel(tmp_path, rules=["ask *"]) as kernel:
        session = await kernel.session(headless=False, approval_handler=person)
        result = await session.call(tool_id, arguments)
        assert result.metadata["error_kind"] == "invalid_input" and told in str(result.error_text), result
        assert not person.requests


@confined
async def test_typing_into_a_job_or_an_ended_terminal_is_refused_without_asking(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler()
    rules = ["allow bash *", "allow terminal.start *", "ask terminal.send"]
    async with temporary_kernel(tmp_path, rules=rules) as kernel:
        session = await kernel.session(headless=False, approval_handler=person)
        job = (await session.call("bash", {"command": "true", "background": True})).data["job_id"]
        ended = (await session.call("terminal.start", {"command": "true"})).data["job_id"]
        assert (await session.jobs.wait(ended, timeout_ms=60_000)) is not None
        for terminal, kind, said in (
            (job, "invalid_input", "belongs to tool `bash`"),
            (ended, "conflict", "has ended (done)"),
        ):
            result = await session.call("terminal.send", {"id": terminal, "text": "ls\n"})
            assert result.metadata["error_kind"] == kind and said in str(result.error_text), result
        assert not person.requests
