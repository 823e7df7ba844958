"""The Protocols of a session and its turns, as frontends and agents use them, in this process or another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.calls_and_results import CallAnswer, Event, ProposedCall, Result
from handrail.contract.permission_modes import Mode
from handrail.contract.services.channels_and_triggers import NotificationQueue
from handrail.contract.services.history_and_skill_services import ConversationHistory, SkillInfo
from handrail.contract.services.job_and_tool_services import Job, JobService
from handrail.contract.services.subagent_services import SubagentRunner, SubagentTask, SubagentType
from handrail.contract.struct import Struct
from handrail.contract.tool.provider_tools import ProviderToolOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.undo_reports import UndoReport

CallProposal = tuple[str, Mapping[str, Any] | str] | ProposedCall
"""``(tool, arguments)``, or a :class:`ProposedCall`, which also carries what a provider adds to a call."""
StopReason = Literal["timeout", "budget", "user", "call", "shutdown", "parent"]
"""Why a call or session was stopped.

``timeout``: the tool's time-out. ``budget``: the time of the run that the call belongs to. ``call``: a call of the
same session requested it. ``parent``: the session is a sub-agent's, and its parent was stopped or has ended.
"""


class ClientInfo(Struct, frozen=True):
    """The name and version by which a client introduces itself, as in MCP and ACP. Nothing proves them."""

    name: str
    version: str = ""


class StoppedWork(Struct, frozen=True):
    """The ids of the sessions, calls and jobs that a user's request has stopped."""

    sessions: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()


class Turn(Protocol):
    """One model request with its calls. It pins one generation of the registry."""

    @property
    def number(self) -> int:
        """The number of the turn in its session, from 1."""
        ...

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        """The active tools that the model sees: the core tools, then the loaded ones in loading order.

        Unavailable tools are left out. The order is stable.
        """
        ...

    @property
    def tool_index(self) -> str:
        """The index of the tools beyond :attr:`tool_specs`, for the system text; ``""`` if all tools are active."""
        ...

    @property
    def provider_tools(self) -> Sequence[ProviderToolOffer]:
        """The tools that the model's provider may run itself.

        A tool that this session excludes has the reason with it.
        """
        ...

    async def call_all(self, calls: Iterable[CallProposal]) -> Sequence[CallAnswer]:
        """Run the calls of a whole reply and return one answer for each, in order."""
        ...

    def prepare_likely_call(self, call: CallProposal) -> None:
        """Prepare a call that the streamed reply will probably propose next.

        The arguments are complete, but the block of the call is still open. The kernel may do work that does not
        depend on the time of submission, so that the call starts sooner. This runs and records nothing, and another
        call may be submitted instead.
        """

    def start_streamed_call(self, call: CallProposal) -> Awaitable[CallAnswer]:
        """Start the next call of a reply that is still streaming.

        Calls enter the lock queue in the order of submission, like those of :meth:`call_all`.

        :return: an awaitable of the answer
        """
        ...


class Session(Protocol):
    """One conversation with a workspace. Made by :meth:`handrail.kernel.kernel_interface.Kernel.session`.

    Use it only from tasks of the kernel's event loop.
    """

    @property
    def id(self) -> str:
        """The id of the session."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the session accepts no more calls."""
        ...

    @property
    def is_headless(self) -> bool:
        """Whether the session has no user to ask. Ask then means deny, and ``question`` returns a fixed error."""
        ...

    @property
    def workdir(self) -> str:
        """The canonical path of the workspace."""
        ...

    def add_rules(self, *texts: str) -> None:
        """Add rules of the session scope.

        They apply at once, also to calls that wait for a lock.

        :raises ValueError: for a text that is not a rule
        """

    @property
    def mode(self) -> Mode:
        """The current mode, which a tool may also change if the user answers so."""
        ...

    def set_mode(self, mode: str) -> None:
        """Switch to another mode: ``plan``, ``ask``, ``accept-edits`` or ``auto``.

        The mode applies at once, also to calls that wait for a lock.

        :raises UsageError: for an unknown mode; the text names the available modes
        """

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        """Propose one call and wait for its answer.

        :param tool: id, alias or wire name
        :param arguments: an object, or its JSON text
        :param key: an idempotency key. The same key with the same arguments returns the recorded result without
            running anything again, also after a restart. With other arguments the call is a ``conflict``
        """
        ...

    async def call_all(self, calls: Iterable[CallProposal]) -> list[Result]:
        """Propose calls as one reply and return one result for each, in order.

        The calls run in parallel where their locks allow it.
        """
        ...

    def start_turn(self) -> Turn:
        """Start the next turn. The turn keeps the current generation and the current active tools."""
        ...

    async def start_interaction(self, text: str = "", *, headless: bool = False) -> None:
        """Start an interaction with the user's message ``text``.

        Tools that the previous interaction loaded are no longer active. A session that never calls this method is one
        interaction.

        :param headless: whether this interaction has no user to ask, for example because a trigger started it
        """

    @property
    def active_tools(self) -> Sequence[ToolSpec]:
        """The active tools: those that the model of the next turn will see if nothing changes."""
        ...

    @property
    def history(self) -> ConversationHistory | None:
        """The stored conversation, or None if it is not stored."""
        ...

    @property
    def notifications(self) -> NotificationQueue | None:
        """The notifications for the session's agent, or None if none are kept."""
        ...

    async def recover_result(self, call_id: str) -> CallAnswer:
        """Return the recorded answer of an earlier call whose answer was lost.

        The answer is ``interrupted`` if the outcome is unknown. A call that awaits approval is resumed: after the
        approval it runs once. While it still waits, the answer has ``awaiting_approval`` in its metadata.

        :raises LogUnavailable: if the log cannot be read
        """
        ...

    async def recover_results(self, call_ids: Sequence[str]) -> list[CallAnswer]:
        """Return the recorded answers of several calls, in the order of their proposals; see :meth:`recover_result`.

        Calls that await approval are resumed together, as one reply, and all their requests are asked at once.

        :raises LogUnavailable: if the log cannot be read; then no call is resumed
        """
        ...

    async def resume_suspended_calls(self) -> list[CallAnswer]:
        """Resume every call that awaits approval, as one reply, and return the answers in order.

        Approved calls run once. Rejected calls are answered as rejected. Undecided calls wait for the approval
        handler, or continue to await approval.

        :raises LogUnavailable: if the log cannot be read
        """
        ...

    @property
    def jobs(self) -> JobService:
        """The background jobs of the session."""
        ...

    async def undo(self, call: str | None = None, *, dry_run: bool = False, overwrite: bool = False) -> UndoReport:
        """Give back what a call changed in the workspace; without one, what all calls of the session changed.

        A path that has changed since is a conflict and stays as it is. An undo has an id and can itself be undone.

        :param call: the id of a call, of a job, or of an earlier undo
        :param dry_run: only report what would happen
        :param overwrite: whether paths that have changed since are given back, too
        :raises ToolError: ``unavailable`` if nothing was kept, ``invalid_input`` for an unknown id, ``conflict`` if the
            call still runs, ``timeout`` if other calls hold the workspace
        :raises LogUnavailable: if the undo cannot be recorded
        """
        ...

    async def move_to_background(self, call_id: str) -> Job:
        """Move a running call to the background. The job becomes the answer for its caller.

        A second call of this method for the same call has no further effect.

        :raises ToolError: ``invalid_input`` if no such call is running, or its tool is not promotable; ``conflict``
            if the call has ended or is about to end, so that its answer is its result; ``limit`` if too many jobs
            exist
        :raises LogUnavailable: if the move cannot be made durable; the call then continues in its turn
        """
        ...

    def cancel_running_calls(self, reason: StopReason = "user") -> object:
        """Stop every running call, and those of the sub-agents. Each still gets its result. Jobs continue."""
        ...

    @property
    def subagent_types(self) -> Sequence[SubagentType]:
        """The agents to which the session's agent may delegate tasks."""
        ...

    @property
    def skills(self) -> Sequence[SkillInfo]:
        """The skills that the model can read, the nearest first.

        The list stays the same while the session is open.
        """
        ...

    async def read_parent_instructions(self) -> Sequence[tuple[str, str]]:
        """Return the instruction files in the parent folders of the workspace, the farthest first.

        The search ends at the top of the repository. Files that a rule denies are left out, and secrets are removed.
        The log records all of it.

        :return: the path of each file, relative to the workspace, and its text
        :raises LogUnavailable: if the log takes no records
        """
        ...

    def set_subagent_runner(self, delegates: SubagentRunner | None) -> None:
        """Set the runner of sub-agents for this session's calls, or None to end delegation."""

    async def open_child(self, call_id: str, delegation: SubagentTask) -> ChildSession:
        """Open a session for the sub-agent that a call of this session starts.

        The child session ends with this one at the latest. Its calls may touch at most what the agent of this session
        delegates.

        :param call_id: the id of the call, which must be running
        :raises ToolError: as :meth:`handrail.contract.services.subagent_services.SubagentService.run` does
        :raises UsageError: if no such call is running
        """
        ...

    def watch_events(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event, in order, as it happens.

        An exception of the listener goes to the exception handler of the event loop and does not affect the call.

        :return: a function that removes the listener
        """
        ...

    def watch_stop(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when a user stops the session, for example with ``handrail stop``.

        :return: a function that removes the listener
        """
        ...

    def events(self) -> AsyncIterator[Event]:
        """Iterate over the events from now until the session or its kernel is closed.

        A reader that falls 10,000 events behind misses progress events only. A reader that falls 20,000 events behind
        is cut off.

        :raises UsageError: if the reader was cut off, after the events up to that point
        """
        ...

    async def suspend(self) -> None:
        """Leave the session so that it can be opened again by its id.

        It accepts no more calls, and running calls are stopped and answered. Calls that await approval continue to
        wait. The state of the session is kept.
        """

    async def close(self) -> None:
        """Close the session permanently.

        Running calls are stopped and answered. The output and scratch folders are removed.
        """


class ChildSession(NamedTuple):
    """The session of a sub-agent that a call opened, and the manifest of its agent."""

    session: Session
    manifest: AgentManifest


class SessionValueStore(Protocol):
    """A store of session values: one JSON value for each session, tool and key."""

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        """Return the value, or None if there is none."""
        ...

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        """Store the value."""
