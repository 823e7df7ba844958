"""A session in the process that carries its calls out: its lane, turns, events, rules, and place among sub-agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets as randomness
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.call_state import Call, Lane
from handrail.arbiter.client_requests import make_progress_event_data
from handrail.arbiter.jobs.job_views import JobView
from handrail.arbiter.subagent_delegation import add_subagent_to_result
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.approval_requests import ApprovalHandler
from handrail.contract.calls_and_results import CallAnswer, Event, ProposedCall, Result
from handrail.contract.errors import LogUnavailable, ToolError, UsageError
from handrail.contract.permission_modes import Mode
from handrail.contract.services.channels_and_triggers import NotificationQueue
from handrail.contract.services.client_services import ClientHandler, EditorClientHandler
from handrail.contract.services.history_and_skill_services import ConversationHistory, SkillInfo
from handrail.contract.services.job_and_tool_services import Job, JobService
from handrail.contract.services.subagent_services import (
    MAX_DEPTH,
    DelegatedSession,
    SubagentRunner,
    SubagentTask,
    SubagentType,
    drop_delegation_tools,
)
from handrail.contract.session_protocols import CallProposal, ChildSession, ClientInfo, Session, StopReason, Turn
from handrail.contract.struct import Struct, field
from handrail.contract.tool.provider_tools import ProviderToolOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool_generation import Generation
from handrail.contract.undo_reports import UndoReport
from handrail.policy.call_authorizer import build_provider_tool_offer
from handrail.policy.rules.rule_sets import SET_SOURCE, parse_entry
from handrail.policy.rules.rules_and_modes import Rule, RuleBook, parse_mode, parse_optional_mode, parse_rule
from handrail.policy.rules.validation import extract_tool_specs, validate_rule_and_examples
from handrail.record.commit_log import Record
from handrail.session.call_recovery import EarlierCallRecovery
from handrail.session.instruction_files import make_read_permission_check, read_parent_instructions
from handrail.session.session_events import ChangeNotifier, EventQueue, add_listener, iterate_events
from handrail.session.turn import LocalTurn
from handrail.session.undo_service import UndoService

# Rules added to an open session: parsed, and rejected if they can match nothing.

SESSION_RULE_SOURCE = "session"
"""The source of the rules that the program gives a session."""


def parse_session_rules(texts: Iterable[str]) -> list[Rule]:
    """Parse rules of the session scope.

    :raises ValueError: if a text is not a rule
    """
    return [rule for text in texts for rule in parse_entry(text, scope="session", source=SESSION_RULE_SOURCE)]


def require_matchable_rules(rules: Iterable[Rule], tools: Generation) -> None:
    """Check that each rule can match a call of these tools.

    :raises ValueError: if a rule can match no call
    """
    known, specs = {*tools.entries, *tools.other_tool_ids}, extract_tool_specs(tools.entries)
    for rule in rules:
        if rule.source.startswith(SET_SOURCE):
            continue
        parse_rule(rule.text, scope="session", known=known)
        validate_rule_and_examples(rule, (), (), specs)


CLOSED = "is closed. Open another session with kernel.session()."
SUSPENDED = "is suspended. Open it again with its id."
ENDED = "has ended because its kernel is closed. Open a new kernel."
"""Texts of why a closed session refuses calls. Each follows the session's id."""
_MOST_SKIPPED = 1_000
"""The number of skipped turns that may still start after a later turn has started."""

ABORTED = "was aborted by its parent, whose session has ended."


class LocalSession:
    """A session in the process that runs its calls.

    Implements :class:`~handrail.contract.session_protocols.Session`. Use it from tasks of the kernel's event loop.

    :raises LogUnavailable: by every method that reads or writes, if the database fails
    """

    def __init__(
        self,
        arbiter: Arbiter,
        lane: Lane,
        on_close: Callable[[LocalSession], Awaitable[None]],
        on_suspend: Callable[[LocalSession], Awaitable[None]],
        turns: int,
        tree_node: SessionTreeNode,
        history: ConversationHistory,
        undo_service: UndoService,
    ) -> None:
        """Create the session of a lane.

        :param turns: the number of its last turn
        :param tree_node: its place in the tree of sub-agent sessions
        :param history: its stored conversation
        :param undo_service: undoes its calls
        """
        self._undo_service = undo_service
        self._arbiter = arbiter
        self._lane = lane
        self._generation = lane.current_generation
        self.catalog = lane.catalog
        self.change_notifier = ChangeNotifier(lane)
        """Sends events that belong to no call to the session's watchers."""
        self._approval_handler = lane.approval_handler
        """The approval handler, unless the interaction is headless."""
        self._on_close = on_close
        self._on_suspend = on_suspend
        self.last_turn = turns
        self._earlier_calls = EarlierCallRecovery(arbiter, lane, lane.current_generation)
        self._skipped: dict[int, None] = {}
        """The turns that have a number and have not started."""
        self.id = lane.session_id
        self._keys = WeakValueDictionary[str, asyncio.Lock]()
        """By idempotency key: the lock that lets its calls run one by one."""
        self._readers: list[EventQueue] = []
        self.is_closed = False
        self._is_suspended = False
        """Whether the session was suspended. Its jobs continue, with the sub-agents that work for them."""
        self.history: ConversationHistory | None = history
        self.notifications: NotificationQueue | None = lane.notifications
        """The notifications for its agent."""
        self.successor: Session | None = None
        self._stop_listeners: list[Callable[[], None]] = []
        """The same session in the process that now holds the workspace. It is set once this process is connected to that one."""
        self.tree_node = tree_node
        self.client_info: ClientInfo | None = None
        """What its client says about itself."""

    @property
    def generation(self) -> Generation:
        """The tools that the next turn gets."""
        return self._generation()

    @property
    def approval_handler(self) -> ApprovalHandler | None:
        """The approval handler of the interactions that are not headless."""
        return self._approval_handler

    @property
    def is_headless(self) -> bool:
        """Whether the current interaction has no user to ask."""
        if (successor := self.successor) is not None:
            return successor.is_headless
        return self._lane.approval_handler is None

    @property
    def workdir(self) -> str:
        """The canonical folder of the workspace."""
        return self._lane.environment.workdir

    @property
    def rules(self) -> RuleBook:
        """The rules in force now, including the user's answers "for this session"."""
        return self._lane.rules

    @property
    def program_rules(self) -> tuple[str, ...]:
        """The rules that the program gave the session. They are not stored."""
        return tuple(
            rule.text for rule in self._lane.rules if rule.scope == "session" and rule.source == SESSION_RULE_SOURCE
        )

    def add_rules(self, *texts: str) -> None:
        """Add rules of the session scope. They apply at once.

        :raises ValueError: if a text is not a rule (no rule is added), or if a rule can match no call of any tool (all rules
            are added)
        """
        if (successor := self.successor) is not None:
            successor.add_rules(*texts)
            return
        found = parse_session_rules(texts)
        self._lane.set_rules_including_child_lanes(self._lane.rules.with_rules(*found))
        require_matchable_rules(found, self._generation())

    @property
    def mode(self) -> Mode:
        return parse_mode(self._lane.rules.mode) if self.successor is None else self.successor.mode

    def set_mode(self, mode: str) -> None:
        """Switch to another mode. It applies at once.

        :raises UsageError: if the mode does not exist
        """
        if (successor := self.successor) is not None:
            successor.set_mode(mode)
            return
        if (wanted := parse_optional_mode(mode)) is not None:
            self._lane.set_permission_mode(wanted)

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        """Propose one call and wait for its result.

        :param key: an idempotency key; see :meth:`handrail.contract.session_protocols.Session.call`
        """
        if (successor := self.successor) is not None:
            return await successor.call(tool, arguments, key=key)
        if self._lane.closed_reason is not None:
            raise UsageError(self._lane.closed_reason)
        proposed = ProposedCall(tool, arguments)
        if key is not None:
            return await self._call_with_key(proposed, key)
        self.last_turn += 1
        call = self._arbiter.create_call(f"{self.id}/{self.last_turn}.0", proposed, self._lane, self._generation())
        return (await self._arbiter.carry_out(call)).result

    async def call_all(self, calls: Iterable[CallProposal]) -> list[Result]:
        """Propose calls as one reply and return one result each, in order."""
        if (successor := self.successor) is not None:
            return await successor.call_all(calls)
        return [answer.result for answer in await self.start_turn().call_all(calls)]

    async def start_interaction(self, text: str = "", number: int | None = None, *, headless: bool = False) -> None:
        """Start an interaction with the user's message ``text``.

        :param number: the number of the interaction, if another process counts them; the current number starts nothing
        :param headless: whether the interaction has no user to ask
        """
        if (successor := self.successor) is not None:
            await successor.start_interaction(text, headless=headless)
            return
        self._check_open()
        self._lane.approval_handler = self._lane.environment.approval_handler = (
            None if headless else self._approval_handler
        )
        if number is None or number != self.catalog.interaction_number:
            self.catalog.start_next_interaction(number)
            self.change_notifier.send_interaction_change()
        await self.catalog.preload_matching_tools(self._generation(), text)
        await self.catalog.store_loaded_tools()

    @property
    def active_tools(self) -> Sequence[ToolSpec]:
        """The tools that the model of the next turn sees."""
        if (successor := self.successor) is not None:
            return successor.active_tools
        generation = self._generation()
        self.catalog.preload_index(generation)
        return drop_delegation_tools(self.catalog.loaded_tool_specs(generation), self._lane.subagent_runner)

    @property
    def provider_tools(self) -> Sequence[ProviderToolOffer]:
        """The tools that the model's provider may run itself."""
        if (successor := self.successor) is not None:
            return successor.start_turn().provider_tools
        return [
            build_provider_tool_offer(spec, self._lane.rules, self._lane.named_hosts_of)
            for spec in self.catalog.provider_tools(self._generation())
        ]

    def start_turn(self) -> Turn:
        """Start the next turn with the current tools."""
        if (successor := self.successor) is not None:
            return successor.start_turn()
        return self.open_numbered_turn(self.last_turn + 1, self._generation())

    def open_numbered_turn(self, number: int, generation: Generation) -> LocalTurn:
        """Start a turn with a number from another process, on the generation that this process saw.

        Turns may start in another order than their numbers.

        :raises UsageError: if the turn of this number has started already
        """
        self._claim_turn_number(number)
        return LocalTurn(self._arbiter, self._lane, generation, number, self.catalog)

    def run_single_call_turn(
        self, number: int, generation: Generation, proposed: ProposedCall
    ) -> Coroutine[Any, Any, CallAnswer]:
        """Run the only call of a turn; see :meth:`open_numbered_turn`."""
        self._claim_turn_number(number)
        self.catalog.begin_turn(generation)
        return self._arbiter.carry_out(
            self._arbiter.create_call(f"{self.id}/{number}.0", proposed, self._lane, generation)
        )

    def _claim_turn_number(self, number: int) -> None:
        """Mark the turn of this number as started; see :meth:`open_numbered_turn`."""
        self._check_open()
        if number == self.last_turn + 1:
            self.last_turn = number
        elif number > self.last_turn:
            self._skipped |= dict.fromkeys(range(max(self.last_turn + 1, number - _MOST_SKIPPED), number))
            while len(self._skipped) > _MOST_SKIPPED:
                del self._skipped[next(iter(self._skipped))]
            self.last_turn = number
        elif number in self._skipped:
            del self._skipped[number]
        else:
            raise UsageError(
                f"Turn {number} of session {self.id} has already started. The last turn was {self.last_turn}. Use a higher number."
            )

    @property
    def lane(self) -> Lane:
        """The session as the arbiter sees it."""
        return self._lane

    async def recover_result(self, call_id: str) -> CallAnswer:
        """Return the answer to an earlier call, or resume the call if it awaits approval."""
        if (successor := self.successor) is not None:
            return await successor.recover_result(call_id)
        self._check_open()
        return (await self._earlier_calls.resume_or_read_answers((call_id,)))[0]

    async def recover_results(self, call_ids: Sequence[str]) -> list[CallAnswer]:
        """Return the answers to several earlier calls, in order; see :meth:`recover_result`."""
        if (successor := self.successor) is not None:
            return await successor.recover_results(call_ids)
        self._check_open()
        return await self._earlier_calls.resume_or_read_answers(call_ids)

    async def list_calls_awaiting_approval(self) -> list[str]:
        """Return the ids of the calls that :meth:`resume_suspended_calls` would resume."""
        return [call.id for call in await self._earlier_calls.find_calls_awaiting_approval()]

    async def resume_suspended_calls(self) -> list[CallAnswer]:
        """Resume all calls that await approval, as one reply, and return their answers."""
        if (successor := self.successor) is not None:
            return await successor.resume_suspended_calls()
        self._check_open()
        return await self._earlier_calls.resume_awaiting_calls()

    @property
    def jobs(self) -> JobService:
        """The background jobs of the session."""
        if (successor := self.successor) is not None:
            return successor.jobs
        return JobView(self._arbiter.jobs, self.id)

    async def undo(self, call: str | None = None, *, dry_run: bool = False, overwrite: bool = False) -> UndoReport:
        """Give back what a call of this session changed in the workspace; without one, all its calls.

        See :meth:`handrail.contract.session_protocols.Session.undo` for the errors.
        """
        if (successor := self.successor) is not None:
            return await successor.undo(call, dry_run=dry_run, overwrite=overwrite)
        session = self.id if call is None else None
        return await self._undo_service.undo(call, session, dry_run=dry_run, overwrite=overwrite)

    async def move_to_background(self, call_id: str) -> Job:
        """Move a running call to the background and return its job.

        See :meth:`handrail.contract.session_protocols.Session.move_to_background` for the errors.
        """
        if (successor := self.successor) is not None:
            return await successor.move_to_background(call_id)
        return await self._arbiter.jobs.move_to_background(self._lane, call_id)

    async def continue_in_new_holder(self, reopen: Callable[..., Awaitable[Session]]) -> None:
        """Continue as the same session of the process that now holds the workspace.

        The session keeps its rules and its mode. It stays headless if it is headless now.

        :param reopen: opens the session there, given ``rules=`` and ``mode=``
        :raises HandrailError: if the session cannot be opened there; then it does not continue
        """
        rules, mode = self.program_rules, self._lane.rules.mode
        successor = await reopen(rules=rules, mode=mode)
        if self._approval_handler is not None and self._lane.approval_handler is None:
            await successor.start_interaction(headless=True)
        if (now := self._lane.rules.mode) != mode:
            successor.set_mode(now)
        for text in self.program_rules:
            if text not in rules:
                with contextlib.suppress(ValueError):  # the rule is added there too, even if it can match no call
                    successor.add_rules(text)
        for listener in self._lane.listeners:
            successor.watch_events(listener)
        for stop_listener in self._stop_listeners:
            successor.watch_stop(stop_listener)
        if self._lane.subagent_runner is not None:
            successor.set_subagent_runner(self._lane.subagent_runner)
        self.history, self.notifications = successor.history, successor.notifications
        self.successor = successor

    def cancel_running_calls(self, reason: StopReason = "user") -> int:
        """Stop every call in flight, and those of its sub-agents.

        :return: the number of the session's own calls that it stopped
        """
        if self.successor is not None:
            self.successor.cancel_running_calls(reason)
        self.tree_node.cancel_child_calls()
        self._earlier_calls.stop_calls_in_lookup(reason)
        running = self._lane.awaited_calls
        for call in running:
            call.execution.stop(reason)
        return len(running)

    def stop_by_user(self) -> None:
        """Stop every call in flight, and accept no further calls until the session is resumed."""
        self._lane.closed_reason = self._lane.closed_reason or f"Session {self.id} was stopped by the user."
        self._lane.is_stopped = True
        for listener in tuple(self._stop_listeners):
            listener()
        self.cancel_running_calls("user")

    def watch_events(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event, and return a function that ends this."""
        if (successor := self.successor) is not None:
            return successor.watch_events(listener)
        return add_listener(self._lane.listeners, listener)

    def watch_stop(self, listener: Callable[[], None]) -> Callable[[], None]:
        if (successor := self.successor) is not None:
            return successor.watch_stop(listener)
        return add_listener(self._stop_listeners, listener)

    def events(self) -> AsyncIterator[Event]:
        """Iterate over the events from now on until the session is closed."""
        return iterate_events(self, self._readers)

    async def close(self) -> None:
        """Close the session for good and remove its output and scratch folders."""
        if (successor := self.successor) is not None:
            await successor.close()
            return
        if self.is_closed:
            return
        await _run_to_end(self._close())

    @property
    def subagent_types(self) -> Sequence[SubagentType]:
        """The agents to which the session's agent may delegate."""
        if (successor := self.successor) is not None:
            return successor.subagent_types
        return self._lane.agent_types()

    @property
    def skills(self) -> Sequence[SkillInfo]:
        """The skills that its model can load."""
        if (successor := self.successor) is not None:
            return successor.skills
        return self._lane.skills.readable_skills

    async def read_parent_instructions(self) -> Sequence[tuple[str, str]]:
        """Return the project's instruction files above the workspace, the farthest first."""
        if (successor := self.successor) is not None:
            return await successor.read_parent_instructions()
        reader = self._generation().resolve_tool_name("read")
        if reader is None or reader.unavailable_reason is not None:
            return ()
        log, redactor, workdir = self._arbiter.log, self._arbiter.shaper.redactor, Path(self.workdir)
        if log.unavailable_reason is not None:
            raise LogUnavailable(log.unavailable_reason)
        permitted = make_read_permission_check(reader.spec, self._lane.rules)
        found = await asyncio.to_thread(read_parent_instructions, workdir, permitted, redactor.redact_text)
        if found:
            redacted = redactor.redact_record_body({"files": [one.to_record() for one in found]})
            log.record_soon([Record("instructions-read", self.id, "", redacted)])
        return [(os.path.relpath(one.path, workdir), one.text) for one in found if one.text is not None]

    def set_subagent_runner(self, delegates: SubagentRunner | None) -> None:
        """Set the runner of sub-agents; with None the session's calls cannot delegate."""
        if (successor := self.successor) is not None:
            successor.set_subagent_runner(delegates)
            return
        self._lane.subagent_runner = delegates

    async def open_child(self, call_id: str, delegation: SubagentTask) -> ChildSession:
        """Open a session for the sub-agent that a call of this session starts.

        :param call_id: the id of a call in flight
        :raises ToolError: if the agent may not be started
        :raises UsageError: if the call is not in flight
        """
        if (successor := self.successor) is not None:
            return await successor.open_child(call_id, delegation)
        call = self._lane.delegating_calls.get(call_id)
        if call is None or not call.belongs_to_job or not self._is_suspended:
            self._check_open()
        return await self.tree_node.open_child(self, call_id, delegation)

    async def wait_until_idle(self) -> None:
        """Wait until no call is in flight."""
        await self._lane.wait_until_idle()

    async def suspend(self, why: str = SUSPENDED, reason: StopReason = "user") -> None:
        """Stop and answer the calls in flight, and keep the session so that it can be opened again.

        :param why: why the session refuses later calls; follows the session's id
        :param reason: why the calls in flight are stopped
        """
        if (successor := self.successor) is not None:
            await successor.suspend()
            return
        if self.is_closed:
            return
        await _run_to_end(self._suspend(why, reason))

    async def _close(self) -> None:
        await self.stop_and_refuse_calls("user", CLOSED)
        await self._on_close(self)

    async def _suspend(self, why: str, reason: StopReason) -> None:
        for call in self._lane.awaited_calls:
            if call.approvals.requests and self.tree_node.parent_ref is None:  # it awaits approval, which outlasts this
                call.execution.stop("shutdown")
        self._is_suspended = self.tree_node.parent_ref is None  # nothing continues for a sub-agent's session
        await self.stop_and_refuse_calls(reason, why)
        await self._on_suspend(self)

    def stop_unstarted_calls(self) -> None:
        """Stop the calls in flight that have not started to run."""
        for call in self._lane.awaited_calls:
            if not call.started:
                call.execution.stop("shutdown")

    async def stop_and_refuse_calls(self, reason: StopReason, why: str) -> None:
        """Accept no more calls, stop those in flight, and wait until each has its answer.

        The session's folders stay.

        :param why: why the session refuses later calls, such as ``is closed.``; follows the session's id
        """
        if self.tree_node.parent_ref is not None and reason == "shutdown":
            reason = "parent"  # its approval requests end with it: its calls are never resumed
        self.is_closed = True
        self._lane.closed_reason = f"Session {self.id} {why}"
        self.change_notifier.end()
        self.cancel_running_calls(reason)
        await self.tree_node.suspend_child_sessions(keep_jobs=self._is_suspended)
        if self._lane.subscriptions is not None:
            await self._lane.subscriptions.aclose()
        # A task that ignores its cancellation must not keep the session from ending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 + 3 * self._arbiter.limits.grace_ms / 1000):
                await self._lane.wait_until_idle()
        await self._arbiter.tool_sessions.end_tool_sessions_of_session(self.id)
        for reader in self._readers:
            reader.end()

    async def _call_with_key(self, proposed: ProposedCall, key: str) -> Result:
        if not key or len(key) > 200 or not key.isprintable() or "/" in key:
            raise UsageError(f"`key` is invalid: {key[:50]!r}. Use 1 to 200 printable characters without '/'.")
        async with self._keys.setdefault(key, asyncio.Lock()):
            self._check_open()
            call = self._arbiter.create_call(
                f"{self.id}/key:{key}", proposed, self._lane, self._generation(), replayable=True
            )
            return (await self._arbiter.carry_out(call)).result

    def _check_open(self) -> None:
        if self._lane.closed_reason is not None:
            raise UsageError(self._lane.closed_reason)


async def _run_to_end(ending: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if this task is cancelled meanwhile.

    A session that is half closed can neither be used nor closed nor opened again.
    """
    task = asyncio.get_running_loop().create_task(ending)
    owed: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as cancellation:
            owed = cancellation
    if owed is not None:
        raise owed
    task.result()


def generate_session_id() -> str:
    """Return an id that sorts by time and cannot be guessed."""
    return f"ses_{time.time_ns() // 1_000_000:012x}{randomness.token_hex(5)}"


SubagentOpener = Callable[["LocalSession", Call, SubagentTask], Awaitable[ChildSession]]
"""Opens the session of a sub-agent."""


class ParentRef(Struct, eq=False):
    """The parent session, call and delegation that created a sub-agent's session.

    :ivar parent: replaced if the parent is suspended and opened again
    """

    parent: LocalSession
    call: Call
    delegation: SubagentTask

    @property
    def root_session(self) -> LocalSession:
        """The session at the top of the tree."""
        above = self.parent.tree_node.parent_ref
        return self.parent if above is None else above.root_session

    @property
    def is_for_background_job(self) -> bool:
        """Whether the sub-agent works for a background job, so that no call waits for it."""
        above = self.parent.tree_node.parent_ref
        return self.call.belongs_to_job or (above is not None and above.is_for_background_job)


class SessionTreeNode(Struct):
    """A session's place in the tree of sub-agents: its parent and its children.

    :param manifest: the manifest of its agent
    :param opener: opens the sessions of sub-agents; None if the session can have none
    :param parent_ref: the parent and its call; None for a session that a user or a program opened
    """

    manifest: AgentManifest
    opener: SubagentOpener | None = None
    parent_ref: ParentRef | None = None
    children: list[LocalSession] = field(default_factory=list["LocalSession"])
    """The open sessions of its sub-agents."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session ends."""
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session is opened again after a suspension during which sub-agents worked in the background."""

    @property
    def manifests_up_to_root(self) -> tuple[AgentManifest, ...]:
        """The manifests of its agent and of all parent agents, the nearest first."""
        return (self.manifest, *list_parent_manifests(self.parent_ref))

    def check_subagent_depth(self) -> None:
        """Check that the session may have sub-agents of a further level.

        :raises ToolError: ``limit``, if it may not
        """
        if len(self.manifests_up_to_root) > MAX_DEPTH:
            raise ToolError(
                f"Sub-agents may be nested at most {MAX_DEPTH} levels deep, and this agent is at that level. Do the work yourself.",
                kind="limit",
            )

    def root_id(self, session_id: str) -> str:
        """Return the id of the session at the top of the tree.

        :param session_id: the id of the session at this place
        """
        return session_id if self.parent_ref is None else self.parent_ref.root_session.id

    async def open_child(
        self, of: LocalSession, call_id: str, delegation: SubagentTask, opener: SubagentOpener | None = None
    ) -> ChildSession:
        """Open the session of a sub-agent for a call of session ``of``.

        :param opener: replaces the opener of this place
        :raises ToolError: if the session can have no sub-agents, or the opener refuses
        :raises UsageError: if the call does not delegate now
        """
        opener = opener or self.opener
        if (call := of.lane.delegating_calls.get(call_id)) is None:
            raise UsageError(
                f"Call {call_id[:80]!r} of session {of.id} does not delegate now. "
                "Pass the id of a call in flight that starts a sub-agent."
            )
        if opener is None:
            raise ToolError("Sub-agents are not available in this session. Do the work yourself.", kind="unavailable")
        child = await opener(of, call, delegation)
        add_subagent_to_result(call, DelegatedSession(delegation.agent, child.session.id))
        if call.listeners:  # watchers of the call see the progress of the sub-agent
            child.session.watch_events(partial(_report_progress, call, delegation.agent))
        return child

    def cancel_child_calls(self) -> None:
        """Stop the calls of the child sessions, except of those that work for a job."""
        for child in self._select_children(keep_jobs=True):
            child.cancel_running_calls("parent")

    async def suspend_child_sessions(self, *, keep_jobs: bool = False) -> None:
        """End the child sessions because this session ends.

        :param keep_jobs: whether the sessions that work for a job continue
        """
        self.ended.set()
        await asyncio.gather(*(child.suspend(ABORTED, "parent") for child in self._select_children(keep_jobs)))

    def _select_children(self, keep_jobs: bool) -> list[LocalSession]:
        unders = ((child, child.tree_node.parent_ref) for child in self.children)
        return [child for child, under in unders if not (keep_jobs and under is not None and under.call.belongs_to_job)]

    def move_child_sessions(self, session: LocalSession, before: LocalSession) -> None:
        """Move the child sessions of ``before``, which was suspended, to ``session``, which replaces it.

        The sub-agents then follow the rules of ``session``, and use its editor and its approval handler.
        """
        for child in tuple(before.tree_node.children):
            child.tree_node.remove_from_parent(child)
            if child.tree_node.parent_ref is not None:
                child.tree_node.parent_ref.parent = session
            child.tree_node.add_to_parent(child)
        session.lane.set_rules_including_child_lanes(session.lane.rules)
        self._pass_editor_to_children()
        before.tree_node.resumed.set()

    def _pass_editor_to_children(self) -> None:
        for child in self.children:
            if child.tree_node.parent_ref is not None:
                child.lane.environment.client = find_parent_editor_client(child.tree_node.parent_ref)
            child.tree_node._pass_editor_to_children()

    def add_to_parent(self, session: LocalSession) -> None:
        """Add ``session``, which is open now, to its parent's children."""
        if self.parent_ref is not None:
            self.parent_ref.parent.tree_node.children.append(session)
            self.parent_ref.parent.lane.child_lanes.append(session.lane)

    def remove_from_parent(self, session: LocalSession) -> None:
        """Remove ``session``, which is no longer open, from its parent's children."""
        if self.parent_ref is not None and session in self.parent_ref.parent.tree_node.children:
            self.parent_ref.parent.tree_node.children.remove(session)
            below = self.parent_ref.parent.lane.child_lanes
            below[:] = [lane for lane in below if lane is not session.lane]


def list_parent_manifests(parent_ref: ParentRef | None) -> tuple[AgentManifest, ...]:
    """Return the manifests of the agents above a session, the nearest first."""
    return () if parent_ref is None else parent_ref.parent.tree_node.manifests_up_to_root


def find_parent_editor_client(parent_ref: ParentRef) -> ClientHandler | None:
    """Return the parent's client if it is an editor.

    A sub-agent does not overwrite unsaved changes of the editor's user either.
    """
    peer = parent_ref.parent.lane.environment.client
    return peer if isinstance(peer, EditorClientHandler) else None


def _report_progress(call: Call, agent: str, event: Event) -> None:
    if event.kind == "started":
        call.emit("progress", make_progress_event_data(f"{agent}: {event.tool_id}", None, None, None))
