"""Step 6, execute: run the tool within its time-out, and record how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from handrail.arbiter.approvals.asking import Asking
from handrail.arbiter.call import Call
from handrail.arbiter.delegating import CallAgents, naming
from handrail.arbiter.execution import (
    STOPPED_TEXT,
    Execution,
    HandedOver,
    StillRunning,
    Stopped,
    kind_of_stop,
    uninterrupted,
)
from handrail.arbiter.jobs.jobs import DetachedCalls
from handrail.arbiter.jobs.outflow import Outflow
from handrail.arbiter.jobs.views import SessionJobs
from handrail.arbiter.locks import LockTable
from handrail.arbiter.offers import CallOffers
from handrail.arbiter.output.exposure import SEEN_AT_FACE, SEEN_BY_MODEL
from handrail.arbiter.output.redaction import Redactor
from handrail.arbiter.peers import CallPeer, far_along, not_counted, on_the_loop, said
from handrail.arbiter.states import CallOpened, States
from handrail.contract.call import Answer, Result
from handrail.contract.doors.channels import Channels, Triggers
from handrail.contract.doors.jobs import Catalog, Jobs
from handrail.contract.doors.memory import Skills
from handrail.contract.doors.peer import LogLevel
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.sandbox import Attempt
from handrail.contract.session import StopReason
from handrail.contract.tool.decorator import FunctionTool
from handrail.contract.tool.requires import Capability, May
from handrail.policy.shell.parse import argv_of
from handrail.runtime.surface import CallRuntime

logger = logging.getLogger("handrail.arbiter")

SILENT_S = 1.0
"""How long the end of a kernel waits before it logs what it waits for."""
MAX_LAST_LINE = 200
_MOST_NAMED = 5
_MOST_REACHED = 100


class ToolRuns:
    """A runner of tools, which also keeps the locks of work that continues after its caller was answered.

    :param asking: asks users on behalf of running tools
    :param jobs: the background jobs
    :param nested: creates a nested call, with a fault if the tool has already ended
    :param carry_out: carries out a nested call
    """

    def __init__(
        self,
        locks: LockTable,
        asking: Asking,
        jobs: DetachedCalls,
        nested: Callable[[Call, str, Mapping[str, Any], str | None], Call],
        carry_out: Callable[[Call], Awaitable[Answer]],
    ) -> None:
        self.locks = locks
        self.asking = asking
        self.jobs = jobs
        self.nested = nested
        self.carry_out = carry_out
        self.states: States | None = None
        """The open tool sessions."""
        self._late: dict[asyncio.Task[Any], str] = {}

    async def run(self, call: Call) -> object:
        """Run the tool and return its value, or the error result of its failure."""
        entry, verdict, arguments = call.entry, call.verdict, call.arguments
        assert entry is not None and verdict is not None and arguments is not None
        spec, execution, tool = entry.spec, call.execution, entry.tool
        budget_ms: float = spec.timeout_ms
        runtime: CallRuntime | None = None
        finished: Callable[[object], object] | None = None
        work: Any = None
        left_off = call.left_off
        if left_off is not None:
            budget_ms, runtime, finished = left_off
        else:
            if spec.timeout_argument is not None:
                budget_ms = min(budget_ms, arguments.get(spec.timeout_argument, budget_ms))
            call.started_ns = time.monotonic_ns()
            if not isinstance(tool, FunctionTool) or tool.takes_runtime:
                runtime = CallRuntime(
                    entry.behind or spec, call.id, call.lane.around, verdict.capabilities, _Doors(self, call)
                )
                runtime.read_only = call.read_only
                runtime.as_argv = argv_of
        try:
            if left_off is not None:
                call.left_off = None
                value = await execution.to_its_end()
                return value if finished is None else finished(value)
            if isinstance(tool, FunctionTool):
                if tool.blocking:
                    work = in_a_thread_of_its_own(partial(tool.run_blocking, arguments, runtime), spec.id)
                else:
                    work, finished = tool.begun(arguments, runtime), tool.finished
            else:
                assert runtime is not None
                work = tool.execute(arguments, runtime)
            if entry.inline:
                try:
                    first = execution.first_step(work)
                except StopIteration as ended:
                    value = ended.value
                else:
                    call.flush()
                    value = await execution.rest(work, first, budget_ms / 1000)
            else:
                call.flush()
                value = await execution.apart(work, budget_ms / 1000, cancellable=not entry.blocking)
            return value if finished is None else finished(value)
        except HandedOver:
            call.left_off = (budget_ms, runtime, finished)
            raise
        except StillRunning as still:
            result = self._stop_result(call, still.reason, budget_ms, _kept(runtime), still_running=True)
            self._leave_behind(call, still, result)
            return result
        except Stopped as stopped:
            return self._stop_result(call, stopped.reason, budget_ms, _kept(runtime))
        except ToolError as error:
            return naming(Result.of(error), call.handed)
        except LogUnavailable as error:  # its stored values cannot be read or written
            if execution.reason is None:
                text = f"`{spec.id}` cannot continue, since the workspace's database failed: {error}. Ask the user to fix it."
                return Result.error("unavailable", text, _kept(runtime))
            return self._stop_result(call, execution.reason, budget_ms, _kept(runtime))
        except Exception as error:
            said = _defect(call, error, work)
            if execution.reason is None:
                return Result.error("backend", f"`{spec.id}` failed unexpectedly: {said}")
            stopped = self._stop_result(call, execution.reason, budget_ms, _kept(runtime))
            return stopped.with_metadata(failed_when_stopped=said)
        finally:
            if call.left_off is None:
                call.over = True
                if call.nested:
                    await self._end_nested(call)
                if call.outflow is not None:
                    call.outflow.finish()

    async def nest(self, parent: Call, make: Callable[[str | None], Call]) -> Result:
        """Carry out a nested call of the tool of ``parent``, which ends with that tool.

        :param make: creates the nested call, with a fault if the text is not None
        """
        stopped = parent.execution.reason
        over = f"was {STOPPED_TEXT[stopped]}" if stopped else "has ended"
        child = make(f"The calling tool `{parent.tool_id}` {over}." if parent.over or stopped else None)
        parent.nested = (*parent.nested, child)
        try:
            result = (await self.carry_out(child)).result
            if placed := result.metadata.get("artifacts"):
                parent.artifacts = (*parent.artifacts, *placed)
            return result
        finally:
            parent.nested = tuple(other for other in parent.nested if other is not child)
            if child.left is not None:
                child.left.set_result(None)

    async def _end_nested(self, call: Call) -> None:
        """Stop the nested calls that a tool left running, since their locks are about to be released."""
        for child in call.nested:
            child.left = asyncio.get_running_loop().create_future()
            child.execution.stop(call.execution.reason or "user")
        waiting = [child.left for child in call.nested if child.left is not None]
        await uninterrupted(_all(waiting), call.execution)

    def _stop_result(self, call: Call, reason: StopReason, budget_ms: float, kept: Any, **metadata: Any) -> Result:
        assert call.entry is not None
        spec = call.entry.spec
        if reason != "timeout":
            over = f" Its tool session `{call.ended_state}` has ended." if call.ended_state else ""
            text = f"`{spec.id}` was {STOPPED_TEXT[reason]}.{over}"
            return naming(Result.error(kind_of_stop(reason), text, kept, stopped_by=reason, **metadata), call.handed)
        if metadata:
            step = "It did not stop, and it holds its locks until it ends. Wait before you repeat the call."
        elif call.ended_state:
            step = f"Its tool session `{call.ended_state}` has ended. Open a new one if you still need it."
        elif spec.timeout_argument is not None and budget_ms < spec.timeout_ms:
            step = f"Request less at once, or increase `{spec.timeout_argument}` (maximum {spec.timeout_ms})."
        else:
            step = "Request less at once."
        text = f"`{spec.id}` timed out after {budget_ms:.0f} ms and was stopped. {step}"
        return naming(Result.error("timeout", text, kept, **metadata), call.handed)

    def _leave_behind(self, call: Call, still: StillRunning, answered: Result) -> None:
        """Keep the locks of work that continues after its answer, and record when it ends."""
        grant, call.grant = call.grant, None
        self._late[still.task] = f"{call.tool_id} ({call.id})"

        def over(task: asyncio.Task[Any]) -> None:
            del self._late[task]
            failure = None if task.cancelled() else task.exception()
            ended = (
                "cancelled"
                if task.cancelled()
                else "returned"
                if failure is None
                else f"failed: {type(failure).__name__}"
            )
            answer = Result(answered.type, None, answered.error_text, answered.metadata)
            call.note("committed", {"late": True, "ended": ended, "result": answer.to_dict()})
            call.flush()
            if grant is not None:
                self.locks.release(grant)

        still.task.add_done_callback(over)

    def wait_for(self, task: asyncio.Task[Any], name: str) -> None:
        """Make the end of the kernel wait for this task, too."""
        self._late[task] = name
        task.add_done_callback(lambda ended: self._late.pop(ended, None))

    async def settled(self) -> None:
        """Wait for work that continues after its answer, and log it if that takes long.

        The wait has no limit: the next holder of the workspace must not find such work running.
        """
        said = asyncio.get_running_loop().call_later(SILENT_S, self._tell_what_goes_on)
        try:
            while self._late:
                await asyncio.wait(tuple(self._late))
        finally:
            said.cancel()

    def _tell_what_goes_on(self) -> None:
        named = ", ".join(list(self._late.values())[:_MOST_NAMED])
        more = f" and {len(self._late) - _MOST_NAMED:,} more" if len(self._late) > _MOST_NAMED else ""
        logger.warning("the kernel waits for work that was asked to stop: %s%s", named, more)


def _defect(call: Call, error: Exception, work: object) -> str:
    """Return what a model reads of a defect in a tool: the class and text of the error, without a traceback.

    :param work: the return value of the tool's ``execute``; None if there is none
    """
    if work is not None and not hasattr(work, "send"):
        return f"its `execute` returned {type(work).__name__} instead of a coroutine. Ask the user to declare it `async def`."
    return f"{type(error).__name__}: {call.redactor.head(str(error), 500)}"


def _kept(runtime: CallRuntime | None) -> Any:
    return None if runtime is None else runtime.kept


class _Doors:
    """The services that a call's runtime gets from the arbiter."""

    __slots__ = ("of", "runs")

    def __init__(self, runs: ToolRuns, of: Call) -> None:
        self.runs = runs
        self.of = of

    @property
    def cancellation(self) -> Execution:
        return self.of.execution

    def may(self) -> May:
        call = self.of
        assert call.verdict is not None and call.entry is not None
        lane = call.lane
        may = lane.authority.may(call.verdict, call.entry.spec, rules=lane.rules, roots=lane.around.roots)
        return partial(_without_secrets, may, call.redactor) if call.redactor.active else may

    def tell(self, message: str, fraction: float | None, done: float | None, total: float | None) -> None:
        if self.of.watched:
            on_the_loop(self.of, partial(self.of.emit, "progress", far_along(message, fraction, done, total)))

    def output(self, piece: str | bytes) -> None:
        call = self.of
        if call.watched or call.job is not None or (call.entry is not None and call.entry.spec.promotable):
            on_the_loop(call, partial(_shown, call, piece))

    def jobs(self) -> Jobs:
        return SessionJobs(self.runs.jobs, self.of)

    @property
    def job_id(self) -> str | None:
        return None if self.of.job is None else self.of.job.row.id

    @property
    def callers(self) -> tuple[str, ...]:
        found: list[str] = []
        call: Call | None = self.of
        while call is not None:  # a call may have become a job since its program started
            found += (call.id,) if call.job is None else (call.id, call.job.row.id)
            call = call.parent
        return tuple(found)

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None:
        if self.of.watched:
            on_the_loop(self.of, partial(self.of.emit, "log", said(level, data, logger)))

    def offers(self, runtime: Runtime) -> CallOffers:
        return CallOffers(self.of, runtime)

    def opened(self, runtime: Runtime) -> CallOpened:
        assert self.runs.states is not None
        return CallOpened(self.of, self.runs.states, runtime)

    def peer(self, require: Callable[[str], None]) -> CallPeer:
        return CallPeer(self.of, require)

    def reached(self, attempt: Attempt) -> None:
        call = self.of
        if attempt not in call.reached and len(call.reached) < _MOST_REACHED:
            call.reached = (*call.reached, attempt)

    def answered(self, questions: Sequence[Question]) -> list[list[str]] | None:
        known = self.of.people.answers
        if known is None or tuple(known[0]) != tuple(questions):
            return None
        return [list(answer) for answer in known[1]]

    async def ask(self, questions: Sequence[Question]) -> list[list[str]]:
        with not_counted(self.of):
            return await self.runs.asking.during(self.of, questions)

    def catalog(self) -> Catalog:
        return self.of.lane.catalog.door(self.of.generation)

    def agents(self) -> CallAgents:
        return CallAgents(self.of)

    def channels(self) -> Channels:
        return self.of.lane.channels.of_call(self.of.id)

    def triggers(self) -> Triggers:
        return self.of.lane.triggers

    def skills(self) -> Skills:
        return self.of.lane.skills

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        return await self.runs.nest(self.of, partial(self.runs.nested, self.of, tool_id, arguments))


def _without_secrets(may: May, redactor: Redactor, capability: Capability, target: str | Sequence[str]) -> str | None:
    """Return what ``may`` returns, or an error text if a command or host name contains a registered secret."""
    words = (target,) if isinstance(target, str) else target
    if capability in ("shell.run", "net.fetch") and any(redactor.text(word) is not word for word in words):
        where = "the command" if capability == "shell.run" else "the host"
        return (
            f"{where} contains a registered secret, which others could read there. Remove the secret, or ask the user to "
            "declare it under `secrets` of the tool"
        )
    return may(capability, target)


async def _all(waiting: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.wait(waiting)


async def in_a_thread_of_its_own(work: Callable[[], object], name: str) -> object:
    """Run ``work`` in a daemon thread.

    A pool would not do: a function that hangs would occupy one of its threads and delay the end of the process.
    If the wait is cancelled, the thread continues alone.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(value)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            ended.set_exception(error)
        else:  # an exception that would end the event loop, or that a future does not accept
            ended.set_exception(RuntimeError(f"the function raised {type(error).__name__}: {error}"))

    def run() -> None:
        value, failure = None, None
        try:
            value = context.run(work)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(settle, value, failure)

    context = contextvars.copy_context()
    threading.Thread(target=run, name=f"handrail-{name}", daemon=True).start()
    return await ended


def flow_of(call: Call) -> Outflow:
    """Return the output stream of the call, created with the first piece. Use it on the kernel's event loop."""
    if call.outflow is None:
        assert call.entry is not None
        spec = call.entry.spec
        tell = partial(_told, call) if spec.exposure in SEEN_AT_FACE else None
        keep = spec.exposure in SEEN_BY_MODEL and not spec.prompt_mask and (call.job is not None or spec.promotable)
        call.outflow = Outflow(call.redactor, tell, keep=keep)
        if call.job is not None:
            call.outflow.into(call.job.output)
    return call.outflow


def _shown(call: Call, piece: str | bytes) -> None:
    if not call.over:  # the output of a thread that continues after the answer is dropped
        flow_of(call).feed(piece)


def _told(call: Call, text: str) -> None:
    if call.watched:
        last = text.rstrip().rpartition("\n")[2]
        call.emit("progress", {"message": last[:MAX_LAST_LINE], "fraction": None, "output": text})
