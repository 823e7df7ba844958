"""A process that kills itself at a named step, and the agent, tools and user of its successor.

Run as ``killed.py FOLDER CASE STEP``. A step is a function of the program, entered or just left, for the first time: what
is durable then is what it is at that very step, and nothing else in the process goes on for a moment.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, cast

from handrail import ApprovalAnswer, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import BlockEvent, CallArgumentsDelta, ModelRequest, ReplyFinished, TextDelta
from handrail.contract.tool.tool_protocol import Tool
from handrail.kernel.local_kernel import LocalKernel
from handrail.session.local_session import LocalSession
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

SESSION = "ses_killed"
JOBS = "handrail.arbiter.jobs.background_jobs:BackgroundJobManager"
ASKING = "handrail.arbiter.approvals.approval_broker:ApprovalBroker"
BEFORE, AFTER = "before", "after"
OF_A_JOB: Mapping[str, tuple[str, str]] = {
    "proposed": (BEFORE, f"{JOBS}.start_call_as_job"),
    "detached": (AFTER, f"{JOBS}._store_new"),
    "answered": (BEFORE, "handrail.agent.conversation:Conversation.add_call_answers"),
    "intended": (BEFORE, "handrail.arbiter.tool_runner:ToolRunner.run"),
    "running": (BEFORE, ""),
    "ended": (BEFORE, f"{JOBS}._store_end"),
    "row ended": (BEFORE, f"{JOBS}.notify_or_defer_job_end"),
    "notice written": (AFTER, "handrail.session.inbound.channel_broker:WorkspaceNotifications.store_notification"),
    "notice given": (BEFORE, "handrail.session.inbound.channel_broker:SessionNotifications.mark_delivered"),
    "notice taken": (AFTER, "handrail.session.inbound.channel_broker:SessionNotifications.mark_delivered"),
}
OF_ASKING: Mapping[str, tuple[str, str]] = {
    "asked": (AFTER, f"{ASKING}.store_request_with_records"),
    "decided": (AFTER, f"{ASKING}._write_decision"),
    "taken up": (AFTER, f"{ASKING}.consume_approvals"),
    "running": (BEFORE, ""),
    "done": (BEFORE, "handrail.agent.conversation:Conversation.add_call_answers"),
}
OF_A_TASK: Mapping[str, tuple[str, str]] = {
    "created": (AFTER, "handrail.kernel.session_manager:SessionManager.open_child_session"),
    "in the model's turn": (BEFORE, ""),
    "asked": (AFTER, f"{ASKING}.store_request_with_records"),
    "running": (BEFORE, ""),
    "told": (BEFORE, "handrail.session.local_session:LocalSession.suspend"),
    "done": (BEFORE, "handrail.agent.subagents:_outcome_to_result"),
}
STEPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "job": OF_A_JOB,
    "job that may be run again": OF_A_JOB,
    "approval": OF_ASKING,
    "question": {step: at for step, at in OF_ASKING.items() if step != "running"},
    "job that is waited for": {
        "told": (AFTER, "handrail.tools.job_tools:WaitForJobTool.execute"),
        "answer on record": (AFTER, f"{JOBS}.record_call_end_and_delivery"),
    },
    "task": {**OF_A_TASK, "answered": OF_A_JOB["answered"]},
    "task in the background": {
        **OF_A_TASK,
        **{step: OF_A_JOB[step] for step in ("detached", "ended", "row ended", "notice written", "notice given")},
    },
    "task whose session is left": {
        "left": (AFTER, "handrail.session.local_session:LocalSession.suspend"),
        **{step: OF_A_TASK[step] for step in ("asked", "running", "done")},
        **{step: OF_A_JOB[step] for step in ("ended", "row ended", "notice written", "notice given", "notice taken")},
    },
    "task whose agent has a job": {step: OF_A_JOB[step] for step in ("detached", "running", "ended", "row ended")},
}
"""By case, each step at which the process is killed."""
THE_JOB = "the job"
QUESTION = ("question", {"questions": [{"question": "Which colour?"}]})
CALLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "job": ("once", {"name": "work"}),
    "job that may be run again": ("again", {"name": "work"}),
    "job that is waited for": ("once", {"name": "work"}),
    "approval": ("pay", {"name": "work"}),
    "question": QUESTION,
    "task": ("task", {"subagent_type": "worker", "prompt": "Work."}),
    "task whose agent has a job": ("task", {"subagent_type": "worker", "prompt": "Work."}),
    "task in the background": ("task", {"subagent_type": "worker", "prompt": "Work.", "background": True}),
    "task whose session is left": ("task", {"subagent_type": "worker", "prompt": "Work.", "background": True}),
}
RULES = ("allow once", "allow again")
AGENTS = {
    "default": "[delegation]\ncan_ask_user = true",
    "worker": 'role = "subagent"\ntools = ["pay", "again"]\nmodel = "played:worker"',
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillPoint(ReplyPause):
    """A place in a model's reply at which the process is killed."""

    async def wait(self) -> None:
        die()


class JobWaiter(PlaybackModel):
    """Knows the job that its first call has become."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        job = re.search(r"once_[0-9a-f]{8}", str(request.messages))
        async with aclosing(super().stream(request)) as events:
            async for event in events:
                if isinstance(event, CallArgumentsDelta) and job is not None:
                    event = replace(event, text=event.text.replace(THE_JOB, job[0]))  # noqa: PLW2901
                yield event


def tools_in(folder: Path, step: str = "") -> list[Tool]:
    """Each leaves a line in the file ``effects`` when it runs."""

    async def ran(name: str) -> str:
        with (folder / "effects").open("a") as file:
            file.write(f"{name}\n")
        if step == "running":
            die()
        return f"{name} is done"

    @tool(id="once", side_effect="external", mode="background", locks=[])
    async def once(name: str) -> str:
        """Work once."""
        return await ran(name)

    @tool(id="again", side_effect="external", mode="background", locks=[], idempotent=True)
    async def again(name: str) -> str:
        """Work as often as needed."""
        return await ran(name)

    @tool(id="pay", side_effect="external", locks=[])
    async def pay(name: str) -> str:
        """Work that has to be approved."""
        return await ran(name)

    return [once, again, pay]


@asynccontextmanager
async def workplace(folder: Path, step: str = "") -> AsyncGenerator[LocalKernel]:
    for agent, text in AGENTS.items():
        place = folder / "config" / "agents" / agent
        place.mkdir(parents=True, exist_ok=True, mode=0o755)
        (place / "agent.toml").write_text(f'id = "{agent}"\n{text}')
    async with temporary_kernel(folder, tools=tools_in(folder, step), rules=RULES) as kernel:
        yield kernel


def person() -> ScriptedApprovalHandler:
    """Says yes to everything."""
    return ScriptedApprovalHandler([ApprovalAnswer("once")] * 5, [[["blue"]]] * 5)


def agent_in(session: LocalSession, case: str, step: str = "") -> Agent:
    """The one that is killed."""
    replies = [call_reply(CALLS[case]), *(text_reply(f"Reply {n}.") for n in range(1, 4))]
    working: list[BlockEvent | ReplyPause] = [TextDelta("I begin."), ReplyFinished("end")]
    if step == "in the model's turn":
        working.insert(1, KillPoint())
    does = "again" if "has a job" in case else "pay"
    worker = PlaybackModel(call_reply((does, {"name": "work"})), working)
    if case == "job that is waited for":
        return Agent(session, JobWaiter(replies[0], call_reply(("wait", {"job_id": THE_JOB})), *replies[1:]))
    return Agent(session, PlaybackModel(*replies), models=lambda _: worker)


def kill_at(step: tuple[str, str]) -> None:
    """Have this process killed where the function is entered, or has done its work, for the first time."""
    when, name = step
    if not name:
        return
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    found = cast("Callable[..., Any]", getattr(owner, attribute))

    @wraps(found)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if when == AFTER:
            await found(*args, **kwargs)
        die()

    @wraps(found)
    def called(*args: Any, **kwargs: Any) -> Any:
        die()

    setattr(owner, attribute, awaited if inspect.iscoroutinefunction(found) else called)


async def live(folder: Path, case: str, step: str) -> None:
    """Work until the step comes; returning from here means that it never did."""
    kill_at(STEPS[case][step])
    async with workplace(folder, step) as kernel:
        session = await kernel.session(SESSION, approval_handler=person())
        if case == "task whose session is left":
            await leave(kernel, session)
        else:
            await agent_in(session, case, step).complete("Begin.", until="idle")


async def leave(kernel: LocalKernel, session: LocalSession) -> None:
    """Suspend a session while a sub-agent works for it, answer what that asks from another door, and take it up again."""
    left, asked = ReplyPause(), asyncio.Event()
    kernel.approvals.subscribe_to_requests(lambda _: asked.set())
    worker = PlaybackModel([left, *call_reply(("pay", {"name": "work"}))], text_reply("I have done it."))
    model = PlaybackModel(call_reply(CALLS["task in the background"]), text_reply("Begun."))
    await Agent(session, model, models=lambda _: worker).complete("Begin.")
    await left.reached.wait()
    await session.suspend()
    left.proceed.set()
    await asked.wait()
    (row,) = kernel.approvals.list_pending()
    await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="another door")
    (job,) = await kernel.jobs.list()
    await kernel.jobs.wait(job.id, timeout_ms=60_000)
    again = await kernel.session(SESSION, approval_handler=person())
    await Agent(again, PlaybackModel(text_reply("Heard."))).complete("Go on.")


async def live_awhile(folder: Path, life: str, seconds: str) -> None:
    """Have everything at work at once until the process is killed after so long, wherever it is then."""
    names = (f"{life}-worker-{n}" for n in range(10))
    calls = [(name, {"name": f"{life}-{name}"}) for name in ("once", "again", "pay")]
    calls += [CALLS["task"], CALLS["task in the background"]]

    def worker(_: str) -> PlaybackModel:
        return PlaybackModel(call_reply(("pay", {"name": next(names)})), text_reply("Worked."))

    async with workplace(folder) as kernel:
        session = await kernel.session(SESSION, approval_handler=person())
        model = PlaybackModel(call_reply(*calls), *(text_reply("On.") for _ in range(20)))
        threading.Timer(float(seconds), die).start()
        await Agent(session, model, models=worker).complete(f"Life {life}.", until="idle")
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[2] == "awhile":
        asyncio.run(live_awhile(Path(sys.argv[1]), *sys.argv[3:5]))
    else:
        asyncio.run(live(Path(sys.argv[1]), *sys.argv[2:4]))
