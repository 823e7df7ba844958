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

from handrail.arbiter.approvals.approval_flow import ApprovalFlow
from handrail.arbiter.approvals.host_requests import HostAccessRequests
from handrail.arbiter.call_state import Call, CallRejection
from handrail.arbiter.client_requests import (
    CallClientService,
    make_log_event_data,
    make_progress_event_data,
    pause_timeouts,
    post_to_kernel_loop,
)
from handrail.arbiter.jobs.background_jobs import BackgroundJobManager
from handrail.arbiter.jobs.job_views import SessionJobView
from handrail.arbiter.jobs.output_stream import CallOutputWriter
from handrail.arbiter.lock_table import LockTable
from handrail.arbiter.output.audience_views import SEEN_BY_FRONTEND, SEEN_BY_MODEL
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.arbiter.resource_access import CallResourceAccess
from handrail.arbiter.stoppable_execution import (
    STOPPED_TEXT,
    StoppableTaskRunner,
    WorkStillRunning,
    WorkStopped,
    WorkTransferred,
    await_deferring_cancellation,
    get_stop_error_kind,
)
from handrail.arbiter.subagent_delegation import CallSubagentService, add_subagent_sessions_to_error
from handrail.arbiter.tool_sessions import CallToolSession, ToolSessionManager
from handrail.contract.calls_and_results import CallAnswer, Result
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.permission_modes import DEFAULT_MODE, MODES, Mode
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.services.channels_and_triggers import ChannelService, TriggerService
from handrail.contract.services.client_services import LogLevel, UnsupportedClientRequest
from handrail.contract.services.history_and_skill_services import SkillService
from handrail.contract.services.job_and_tool_services import CatalogService, JobService
from handrail.contract.services.task_services import TaskService
from handrail.contract.services.tool_runtime import Runtime, UserQuestion
from handrail.contract.session_protocols import StopReason
from handrail.contract.tool.decorator import FunctionTool
from handrail.contract.tool.requires import AccessCheck, Capability
from handrail.policy.rules.rules_and_modes import parse_mode
from handrail.policy.shell.parser import parse_single_program_argv
from handrail.runtime.call_runtime import CallRuntime

logger = logging.getLogger("handrail.arbiter")

SETTLE_WARNING_S = 1.0
"""How long the end of a kernel waits before it logs what it waits for."""
MAX_LAST_LINE_CHARACTERS = 200
_MOST_NAMED = 5
_MOST_REACHED = 100


class ToolRunner:
    """A runner of tools, which also keeps the locks of work that continues after its caller was answered.

    :param approval_flow: asks users on behalf of running tools
    :param jobs: the background jobs
    :param create_nested: creates a nested call, with a fault if the tool has already ended
    :param carry_out: carries out a nested call
    """

    def __init__(
        self,
        locks: LockTable,
        approval_flow: ApprovalFlow,
        jobs: BackgroundJobManager,
        create_nested: Callable[[Call, str, Mapping[str, Any], str | None], Call],
        carry_out: Callable[[Call], Awaitable[CallAnswer]],
    ) -> None:
        self.locks = locks
        self.approval_flow = approval_flow
        self.host_requests = HostAccessRequests(approval_flow)
        self.jobs = jobs
        self.create_nested = create_nested
        self.carry_out = carry_out
        self.tool_sessions: ToolSessionManager | None = None
        """The open tool sessions."""
        self._running_late: dict[asyncio.Task[Any], str] = {}

    async def run(self, call: Call) -> object:
        """Run the tool and return its value, or the error result of its failure."""
        entry, verdict, arguments = call.entry, call.verdict, call.arguments
        assert entry is not None and verdict is not None and arguments is not None
        spec, execution, tool = entry.spec, call.execution, entry.tool
        budget_ms: float = spec.timeout_ms
        runtime: CallRuntime | None = None
        finished: Callable[[object], object] | None = None
        work: Any = None
        left_off = call.handed_over_run
        # The tool runs already, in a task of an earlier turn. It keeps its budget and its runtime.
        if left_off is not None:
            budget_ms, runtime, finished = left_off
        else:
            if spec.timeout_argument is not None:
                budget_ms = min(budget_ms, arguments.get(spec.timeout_argument, budget_ms))
            call.started_ns = time.monotonic_ns()
            # Making a runtime costs more than many functions take, so a function without one gets none.
            if not isinstance(tool, FunctionTool) or tool.takes_runtime:
                runtime = CallRuntime(
                    entry.answering_spec or spec,
                    call.id,
                    call.lane.environment,
                    verdict.capabilities,
                    _CallServices(self, call),
                )
                runtime.read_only = call.read_only
                runtime.confinement = call.confinement
                runtime.client_meta = call.proposed.client_meta or runtime.client_meta
                runtime.split_shell_text = parse_single_program_argv
        try:
            if left_off is not None:
                call.handed_over_run = None
                value = await execution.wait_for_separate_task()
                return value if finished is None else finished(value)
            if isinstance(tool, FunctionTool):
                # A blocking function would stop every other call of the kernel, so it runs in a thread.
                if tool.blocking:
                    work = run_in_daemon_thread(partial(tool.run_in_current_thread, arguments, runtime), spec.id)
                else:
                    work, finished = tool.start_call(arguments, runtime), tool.convert_return_value_to_json
            else:
                assert runtime is not None
                work = tool.execute(arguments, runtime)
            # A short tool ends in its first step. Running it in this task saves two turns of the loop.
            if entry.is_inline:
                try:
                    first = execution.run_first_step(work)
                except StopIteration as ended:
                    value = ended.value
                else:
                    call.schedule_record_submission()
                    value = await execution.run_remaining_steps(work, first, budget_ms / 1000)
            else:
                call.schedule_record_submission()
                value = await execution.run_in_separate_task(work, budget_ms / 1000, cancellable=not entry.is_blocking)
            return value if finished is None else finished(value)
        except WorkTransferred:
            # The job that takes over continues with the same budget: moving to the background does not start the time again.
            call.handed_over_run = (budget_ms, runtime, finished)
            raise
        except WorkStillRunning as still:
            result = self._stop_result(call, still.reason, budget_ms, _last_output(runtime), still_running=True)
            self._keep_locks_of_late_work(call, still, result)
            return result
        except WorkStopped as stopped:
            return self._stop_result(call, stopped.reason, budget_ms, _last_output(runtime))
        except ToolError as error:
            if isinstance(error, UnsupportedClientRequest):
                call.unsupported_requests = call.unsupported_requests.union(error.methods)
            return add_subagent_sessions_to_error(Result.from_error(error), call.subagents)
        except LogUnavailable as error:  # its stored values cannot be read or written
            # If the call was stopped, the failure is a consequence of the stop, and the stop is the better reason.
            if execution.reason is None:
                text = f"`{spec.id}` cannot continue, since the workspace's database failed: {str(error).rstrip('.')}. Ask the user to fix it."
                return Result.error("unavailable", text, _last_output(runtime))
            return self._stop_result(call, execution.reason, budget_ms, _last_output(runtime))
        except Exception as error:
            description = _describe_defect(call, error, work)
            if execution.reason is None:
                return Result.error("backend", f"`{spec.id}` failed unexpectedly: {description}")
            stopped = self._stop_result(call, execution.reason, budget_ms, _last_output(runtime))
            return stopped.with_metadata(stop_error=description)
        finally:
            if call.handed_over_run is None:
                call.tool_ended = True
                for question in call.host_questions:  # its request stays pending, and can be answered elsewhere
                    question.cancel()
                # Nested calls use the locks of this call, which are released next.
                if call.nested_calls:
                    await self._stop_leftover_nested_calls(call)
                if call.output_stream is not None:
                    call.output_stream.flush_held_output()

    async def run_nested_call(self, parent: Call, make: Callable[[str | None], Call]) -> Result:
        """Carry out a nested call of the tool of ``parent``, which ends with that tool.

        :param make: creates the nested call, with a fault if the text is not None
        """
        stopped = parent.execution.reason
        over = f"was {STOPPED_TEXT[stopped]}" if stopped else "has ended"
        child = make(f"The calling tool `{parent.tool_id}` {over}." if parent.tool_ended or stopped else None)
        parent.nested_calls = (*parent.nested_calls, child)
        try:
            result = (await self.carry_out(child)).result
            # The outer answer refers to the artifacts of its nested calls, so they must live as long.
            if placed := result.metadata.get("artifacts"):
                parent.artifacts = (*parent.artifacts, *placed)
            return result
        finally:
            parent.nested_calls = tuple(other for other in parent.nested_calls if other is not child)
            if child.answered is not None:
                child.answered.set_result(None)

    async def _stop_leftover_nested_calls(self, call: Call) -> None:
        """Stop the nested calls that a tool left running, since their locks are about to be released."""
        for child in call.nested_calls:
            child.answered = asyncio.get_running_loop().create_future()
            child.execution.stop(call.execution.reason or "user")
        waiting = [child.answered for child in call.nested_calls if child.answered is not None]
        await await_deferring_cancellation(_wait_all(waiting), call.execution)

    def _stop_result(self, call: Call, reason: StopReason, budget_ms: float, kept: Any, **metadata: Any) -> Result:
        assert call.entry is not None
        spec = call.entry.spec
        if call.lane.is_stopped:
            metadata["session_stopped"] = True
        if reason != "timeout":
            over = f" Its tool session `{call.ended_tool_session_id}` has ended." if call.ended_tool_session_id else ""
            text = f"`{spec.id}` was {STOPPED_TEXT[reason]}.{over}"
            return add_subagent_sessions_to_error(
                Result.error(get_stop_error_kind(reason), text, kept, stopped_by=reason, **metadata), call.subagents
            )
        if metadata:
            step = "It is still running and keeps its locks until it ends. Wait before you repeat the call."
        elif call.ended_tool_session_id:
            step = f"Its tool session `{call.ended_tool_session_id}` has ended. Open a new one if you still need it."
        elif spec.timeout_argument is not None and budget_ms < spec.timeout_ms:
            step = f"Request less at a time, or increase `{spec.timeout_argument}` (maximum {spec.timeout_ms})."
        else:
            step = "Request less at a time."
        text = f"`{spec.id}` timed out after {budget_ms:.0f} ms and was stopped. {step}"
        return add_subagent_sessions_to_error(Result.error("timeout", text, kept, **metadata), call.subagents)

    def _keep_locks_of_late_work(self, call: Call, still: WorkStillRunning, answered: Result) -> None:
        """Keep the locks of work that continues after its answer, and record when it ends."""
        grant, call.grant = call.grant, None
        self._running_late[still.task] = f"{call.tool_id} ({call.id})"

        def over(task: asyncio.Task[Any]) -> None:
            del self._running_late[task]
            failure = None if task.cancelled() else task.exception()
            ended = (
                "cancelled"
                if task.cancelled()
                else "returned"
                if failure is None
                else f"failed: {type(failure).__name__}"
            )
            answer = Result(answered.type, None, answered.error_text, answered.metadata)
            # The caller was answered long ago. The record shows when the effects really ended.
            call.queue_log_record("committed", {"late": True, "ended": ended, "result": answer.to_dict()})
            call.submit_queued_records()
            if grant is not None:
                self.locks.release_grant(grant)

        still.task.add_done_callback(over)

    def track_task_until_shutdown(self, task: asyncio.Task[Any], name: str) -> None:
        """Make the end of the kernel wait for this task, too."""
        self._running_late[task] = name
        task.add_done_callback(lambda ended: self._running_late.pop(ended, None))

    async def wait_for_late_work(self) -> None:
        """Wait for work that continues after its answer, and log it if that takes long.

        The wait has no limit: the next holder of the workspace must not find such work running.
        """
        warning_timer = asyncio.get_running_loop().call_later(SETTLE_WARNING_S, self._warn_running)
        try:
            while self._running_late:
                await asyncio.wait(tuple(self._running_late))
        finally:
            warning_timer.cancel()

    def _warn_running(self) -> None:
        named = ", ".join(list(self._running_late.values())[:_MOST_NAMED])
        more = f" and {len(self._running_late) - _MOST_NAMED:,} more" if len(self._running_late) > _MOST_NAMED else ""
        logger.warning("the kernel waits for work that was asked to stop: %s%s", named, more)


def _describe_defect(call: Call, error: Exception, work: object) -> str:
    """Return what a model reads of a defect in a tool: the class and text of the error, without a traceback.

    :param work: the return value of the tool's ``execute``; None if there is none
    """
    if work is not None and not hasattr(work, "send"):
        return f"its `execute` returned {type(work).__name__} instead of a coroutine. Ask the user to declare it `async def`."
    return f"{type(error).__name__}: {call.redactor.redact_text_head(str(error), 500)}"


def _last_output(runtime: CallRuntime | None) -> Any:
    return None if runtime is None else runtime.partial_result


class _CallServices:
    """The services that a call's runtime gets from the arbiter."""

    __slots__ = ("of", "runs")

    def __init__(self, runs: ToolRunner, of: Call) -> None:
        self.runs = runs
        self.of = of

    @property
    def cancellation(self) -> StoppableTaskRunner:
        return self.of.execution

    def build_access_check(self) -> AccessCheck:
        call = self.of
        assert call.verdict is not None and call.entry is not None
        lane = call.lane
        may = lane.authority.make_access_check(
            call.verdict, call.entry.spec, rules=lane.rules, roots=lane.environment.roots
        )
        return partial(_check_without_secrets, may, call.redactor) if call.redactor.active else may

    def report_progress(self, message: str, fraction: float | None, done: float | None, total: float | None) -> None:
        if self.of.listeners:
            post_to_kernel_loop(
                self.of, partial(self.of.emit, "progress", make_progress_event_data(message, fraction, done, total))
            )

    def output(self, piece: str | bytes) -> None:
        call = self.of
        # Without a listener and without a job, this output can never be read.
        if call.listeners or call.job is not None or (call.entry is not None and call.entry.spec.promotable):
            post_to_kernel_loop(call, partial(_feed_output, call, piece))

    def jobs(self) -> JobService:
        return SessionJobView(self.runs.jobs, self.of)

    @property
    def job_id(self) -> str | None:
        return None if self.of.job is None else self.of.job.row.id

    @property
    def calling_call_ids(self) -> tuple[str, ...]:
        found: list[str] = []
        call: Call | None = self.of
        while call is not None:  # a call may have become a job since its program started
            found += (call.id,) if call.job is None else (call.id, call.job.row.id)
            call = call.parent
        return tuple(found)

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None:
        if self.of.listeners:
            post_to_kernel_loop(self.of, partial(self.of.emit, "log", make_log_event_data(level, data, logger)))

    def resources(self, runtime: Runtime) -> CallResourceAccess:
        return CallResourceAccess(self.of, runtime)

    def tool_session(self, runtime: Runtime) -> CallToolSession:
        assert self.runs.tool_sessions is not None
        return CallToolSession(self.of, self.runs.tool_sessions, runtime)

    def client(self, require: Callable[[str], None]) -> CallClientService:
        return CallClientService(self.of, require)

    def explain_host_refusal(self, host: str) -> str | None:
        return self.runs.host_requests.explain_refusal(self.of, host)

    async def request_host(self, host: str) -> str | None:
        return await self.runs.host_requests.request(self.of, host)

    def record_attempt(self, attempt: ConnectionAttempt) -> None:
        call = self.of
        if attempt not in call.network_attempts and len(call.network_attempts) < _MOST_REACHED:
            call.network_attempts = (*call.network_attempts, attempt)

    def find_answers(self, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        known = self.of.approvals.answers
        # The stored answers fit only these questions. A tool that asks something else must ask again.
        if known is None or tuple(known[0]) != tuple(questions):
            return None
        return [list(answer) for answer in known[1]]

    async def ask_user(self, questions: Sequence[UserQuestion]) -> list[list[str]]:
        with pause_timeouts(self.of):
            return await self.runs.approval_flow.ask_questions_during_run(self.of, questions)

    def catalog(self) -> CatalogService:
        return self.of.lane.catalog.make_call_catalog(self.of.generation)

    def subagents(self) -> CallSubagentService:
        return CallSubagentService(self.of)

    def mode(self) -> CallModeService:
        return CallModeService(self.of)

    def tasks(self) -> TaskService:
        assert self.of.lane.tasks is not None
        return self.of.lane.tasks

    def channels(self) -> ChannelService:
        return self.of.lane.channels.for_call(self.of.id)

    def triggers(self) -> TriggerService:
        return self.of.lane.triggers

    def skills(self) -> SkillService:
        return self.of.lane.skills

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        return await self.runs.run_nested_call(self.of, partial(self.runs.create_nested, self.of, tool_id, arguments))


def check_session_mode(call: Call, modes: Sequence[Mode]) -> None:
    """Check that a tool which changes the mode is called where it has something to change.

    :raises CallRejection: ``conflict``
    """
    current = parse_mode(call.lane.rules.mode)
    if call.parent is not None:
        text = f"`{call.tool_id}` cannot be called by another tool. Call it directly."
        raise CallRejection("validate", "conflict", text)
    if current not in modes:
        text = f"This session is in the mode {current}. `{call.tool_id}` works in the mode {' or '.join(modes)} only. Continue without it."
        raise CallRejection("validate", "conflict", text)


class CallModeService:
    """The mode of the session, for one call: :class:`~handrail.contract.services.tool_runtime.ModeService`."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def change(self, mode: Mode | None) -> tuple[Mode, Mode]:
        call, lane = self._call, self._call.lane
        current = parse_mode(lane.rules.mode)
        wanted = mode or lane.previous_mode or DEFAULT_MODE
        # A wider mode is a permission, which only the user can give. A narrower one needs no answer.
        if call.parent is not None or (MODES.index(wanted) > MODES.index(current) and call.approvals.answers is None):
            text = f"The mode stays {current}: the user has not answered a question of this call. Ask the user in your reply."
            raise ToolError(text, kind="denied")
        return lane.set_permission_mode(wanted), wanted


def _check_without_secrets(
    may: AccessCheck, redactor: SecretRedactor, capability: Capability, target: str | Sequence[str]
) -> str | None:
    """Return what ``may`` returns, or an error text if a command or host name contains a registered secret."""
    words = (target,) if isinstance(target, str) else target
    # Arguments of a program and names of hosts leave the process: other users and name servers can read them.
    if capability in ("shell.run", "net.fetch") and any(redactor.redact_text(word) is not word for word in words):
        where = "the command" if capability == "shell.run" else "the host"
        return (
            f"{where} contains a registered secret, which others could read there. Remove the secret, or ask the user to "
            "declare it under `secrets` of the tool"
        )
    return may(capability, target)


async def _wait_all(waiting: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.wait(waiting)


async def run_in_daemon_thread(work: Callable[[], object], name: str) -> object:
    """Run ``work`` in a daemon thread.

    A pool would not do: a function that hangs would occupy one of its threads and delay the end of the process.
    If the wait is cancelled, the thread continues alone.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: BaseException | None) -> None:
        # The caller has been cancelled, and the thread ends alone.
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

    # The function sees the context variables of its caller, as it would in the same thread.
    context = contextvars.copy_context()
    threading.Thread(target=run, name=f"handrail-{name}", daemon=True).start()
    return await ended


def get_or_create_output_writer(call: Call) -> CallOutputWriter:
    """Return the output stream of the call, created with the first piece. Use it on the kernel's event loop."""
    if call.output_stream is None:
        assert call.entry is not None
        spec = call.entry.spec
        tell = partial(_emit_output, call) if spec.exposure in SEEN_BY_FRONTEND else None
        keep = spec.exposure in SEEN_BY_MODEL and not spec.prompt_mask and (call.job is not None or spec.promotable)
        call.output_stream = CallOutputWriter(call.redactor, tell, keep=keep)
        if call.job is not None:
            call.output_stream.start_storing_in_file(call.job.output)
    return call.output_stream


def _feed_output(call: Call, piece: str | bytes) -> None:
    if not call.tool_ended:  # the output of a thread that continues after the answer is dropped
        get_or_create_output_writer(call).feed(piece)


def _emit_output(call: Call, text: str) -> None:
    if call.listeners:
        # A progress line in an interface shows only one line. The complete piece is in the field output.
        last = text.rstrip().rpartition("\n")[2]
        call.emit("progress", {"message": last[:MAX_LAST_LINE_CHARACTERS], "fraction": None, "output": text})
