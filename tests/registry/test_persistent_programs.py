"""Tool programs that keep running between calls."""

from __future__ import annotations

import asyncio
import fcntl
import sys
from dataclasses import replace
from typing import Any

import pytest

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.registry.sources.persistent_tools import PersistentProcessTool
from handrail.registry.sources.tool_folder_source import ToolFolderSource
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.sandbox import tier_probe

from .conftest import ExecutableFixture

pytestmark = pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}"
)

SERVER = f"""#!{sys.executable} -S
import json, os, sys, time
count = 0
for line in sys.stdin:
    call = json.loads(line)
    args = call["arguments"]
    count += 1
    do = args.get("do")
    if do == "die":
        once = args.get("once")
        if not once or not os.path.exists(once):
            if once:
                open(once, "w").close()
            os._exit(7)
    if do == "hang":
        open(args["mark"], "w").close()
        time.sleep(1000)
    if do == "raw":
        sys.stdout.write(args["text"])
    elif do == "error":
        print(json.dumps({{"id": call["id"], "error": args["error"]}}))
    else:
        print(json.dumps({{"id": call["id"], "result": {{"count": count, "pid": os.getpid(), "args": args}}}}))
    sys.stdout.flush()
    if do == "leave":
        os._exit(0)
"""


def load_persistent_tool(
    place: ExecutableFixture, script: str = SERVER, backoff_ms: tuple[int, ...] = (0,), **runtime: Any
) -> PersistentProcessTool:
    place.put("srv", script, persistent=True, **runtime)
    loaded = ToolFolderSource(place.tools, "global", place.confinement()).load()
    assert loaded.faults == ()
    [found] = loaded.tools
    tool = found.tool
    assert isinstance(tool, PersistentProcessTool)
    return PersistentProcessTool(tool.spec, tool.executable, tool.folder, tool.confinement, backoff_ms=backoff_ms)


async def call(
    place: ExecutableFixture, tool: PersistentProcessTool, call_id: str = "ses_1/1.0", **arguments: Any
) -> Any:
    return await tool.execute(arguments, place.runtime(tool.spec, call_id))


async def failure(place: ExecutableFixture, tool: PersistentProcessTool, **arguments: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await call(place, tool, **arguments)
    return caught.value


@pytest.mark.proves("R-03")
async def test_one_process_serves_successive_calls(place: ExecutableFixture) -> None:
    tool = load_persistent_tool(place)
    answers = [await call(place, tool, n=n) for n in range(3)]
    assert [answer["count"] for answer in answers] == [1, 2, 3]
    assert [answer["args"] for answer in answers] == [{"n": 0}, {"n": 1}, {"n": 2}]
    await tool.aclose()


@pytest.mark.proves("R-03")
async def test_parallel_calls_of_a_persistent_program_run_in_turn_with_their_own_answers(
    place: ExecutableFixture,
) -> None:
    tool = load_persistent_tool(place)
    answers = await asyncio.gather(*(call(place, tool, f"ses_1/1.{n}", n=n) for n in range(10)))
    assert [answer["args"]["n"] for answer in answers] == list(range(10))
    assert [answer["count"] for answer in answers] == list(range(1, 11))
    await tool.aclose()


@pytest.mark.proves("R-03", "S-05")
async def test_a_closed_persistent_tool_ends_its_process_and_refuses_calls(place: ExecutableFixture) -> None:
    tool = load_persistent_tool(place)
    await call(place, tool)
    process = tool._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    await tool.aclose()
    assert await process.wait() != 0
    assert (await failure(place, tool)).kind == "unavailable"
    await tool.aclose()


@pytest.mark.proves("R-03")
async def test_a_side_effect_call_that_crashes_is_interrupted_and_not_retried(place: ExecutableFixture) -> None:
    tool = load_persistent_tool(place, side_effect="write")
    await call(place, tool)
    error = await failure(place, tool, do="die")
    assert error.kind == "interrupted"
    assert "exit code 7" in error.text and "unknown" in error.text
    assert (await call(place, tool))["count"] == 1
    await tool.aclose()


@pytest.mark.proves("R-03")
@pytest.mark.parametrize("spec", [{"side_effect": "read"}, {"side_effect": "write", "idempotent": True}])
async def test_a_repeatable_call_that_crashes_is_retried_once(place: ExecutableFixture, spec: dict[str, Any]) -> None:
    tool = load_persistent_tool(place, **spec)
    answer = await call(place, tool, do="die", once=f"{place.scratch}/crashed")
    assert answer["count"] == 1
    error = await failure(place, tool, do="die")
    assert error.kind == "backend" and "twice" in error.text
    await tool.aclose()


@pytest.mark.proves("R-03")
async def test_a_process_that_exited_between_calls_is_replaced_silently(place: ExecutableFixture) -> None:
    tool = load_persistent_tool(place, side_effect="write")
    await call(place, tool, do="leave")
    noticed = tool._exit  # pyright: ignore[reportPrivateUsage]
    assert noticed is not None
    await noticed
    assert (await call(place, tool))["count"] == 1
    await tool.aclose()


@pytest.mark.proves("R-03")
async def test_a_cancelled_call_ends_the_process_and_the_next_call_starts_another(place: ExecutableFixture) -> None:
    tool = load_persistent_tool(place)
    first = await call(place, tool)
    mark = place.scratch / "hanging"
    hanging = asyncio.ensure_future(call(place, tool, do="hang", mark=str(mark)))
    while not mark.exists():
        await asyncio.sleep(0.001)
    waiting = asyncio.ensure_future(call(place, tool, n=1))
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (await waiting)["count"] == 1
    assert first["count"] == 1
    await tool.aclose()


@pytest.mark.proves("R-03")
async def test_cancelling_a_queued_call_does_not_affect_the_running_call(place: ExecutableFixture) -> None:
    tool = load_persistent_tool(place)
    mark = place.scratch / "hanging"
    hanging = asyncio.ensure_future(call(place, tool, do="hang", mark=str(mark)))
    while not mark.exists():
        await asyncio.sleep(0.001)
    waiting = asyncio.ensure_future(call(place, tool))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    await tool.aclose()


@pytest.mark.proves("R-03")
@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        "[]\n",
        "{}\n",
        '{"id": "another", "result": 1}\n',
        '{"id": "ses_1/1.0"}\n',
        '{"id": "ses_1/1.0", "result": 1, "error": 2}\n',
        '{"id": "ses_1/1.0", "result": NaN}\n',
        "\n",
    ],
)
async def test_an_answer_that_breaks_the_protocol_ends_the_process(place: ExecutableFixture, text: str) -> None:
    tool = load_persistent_tool(place)
    await call(place, tool)
    assert (await failure(place, tool, do="raw", text=text)).kind == "backend"
    assert (await call(place, tool))["count"] == 1
    await tool.aclose()


@pytest.mark.proves("R-03", "K-08")
@pytest.mark.parametrize(
    ("error", "result"),
    [
        ("no", Result.error("failed", "no")),
        ({"text": "gone", "kind": "conflict", "data": [1]}, Result.error("conflict", "gone", [1])),
        ({"message": "no", "kind": "denied"}, Result.error("failed", "no")),
    ],
)
async def test_an_error_answer_keeps_the_process_running(place: ExecutableFixture, error: Any, result: Result) -> None:
    tool = load_persistent_tool(place)
    assert await call(place, tool, do="error", error=error) == result
    assert (await call(place, tool))["count"] == 2
    await tool.aclose()


@pytest.mark.proves("R-03")
async def test_restarts_after_crashes_wait_longer_up_to_a_limit(
    place: ExecutableFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_persistent_tool(place, backoff_ms=(0, 10, 20), side_effect="write")
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("handrail.registry.sources.persistent_tools.asyncio.sleep", noted)
    for _ in range(4):
        assert (await failure(place, tool, do="die")).kind == "interrupted"
    assert waits == [0.01, 0.02, 0.02]
    await call(place, tool)
    assert (await failure(place, tool, do="die")).kind == "interrupted"
    await call(place, tool)  # the one before had answered, so this start is an ordinary one
    assert waits == [0.01, 0.02, 0.02, 0.02]
    await tool.aclose()


async def test_large_output_on_stderr_does_not_block_a_call(place: ExecutableFixture) -> None:
    script = SERVER.replace("count += 1", "count += 1; sys.stderr.write('x' * 300000); sys.stderr.flush()")
    tool = load_persistent_tool(place, script)
    for n in range(1, 4):
        assert (await call(place, tool))["count"] == n
    await tool.aclose()


PLANTS = f"""#!{sys.executable} -S
import fcntl, json, sys
planting = open("planting", "a")
fcntl.flock(planting, fcntl.LOCK_EX)
for number, line in enumerate(sys.stdin):
    print(json.dumps({{"id": json.loads(line)["id"], "result": {{"number": number}}}}), flush=True)
    if number == 0:
        fcntl.flock(open("between"), fcntl.LOCK_EX)  # held by the test until the call is over
        open(".envrc", "w").close()
        planting.close()
"""


@pytest.mark.proves("R-03", "S-07")
async def test_a_protected_file_created_between_calls_fails_the_next_call(
    place: ExecutableFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = GuardedSandbox(tier_probe.choose_sandbox())
    confinement = replace(place.confinement(), sandbox=sandbox)

    def guarded(self: ExecutableFixture) -> ToolConfinement:
        return confinement

    monkeypatch.setattr(ExecutableFixture, "confinement", guarded)
    tool = load_persistent_tool(place, PLANTS, side_effect="write", requires={"fs": {"read": ["."], "write": ["."]}})
    with (place.workspace / "between").open("w") as between:
        fcntl.flock(between, fcntl.LOCK_EX)
        assert await call(place, tool) == {"number": 0}
    with (place.workspace / "planting").open() as planting:
        await asyncio.to_thread(fcntl.flock, planting, fcntl.LOCK_EX)
    error = await failure(place, tool)
    assert error.kind == "conflict" and ".envrc" in error.text
    assert await call(place, tool) == {"number": 1}
    await tool.aclose()
