"""The events of a run, in order, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from handrail.agent.model_protocol import TextDelta
from handrail.agent.reply_stream import RetryDelayed
from handrail.agent.run_budget import BudgetKind
from handrail.contract.calls_and_results import CallAnswer, ProposedCall
from handrail.contract.services.channels_and_triggers import Notification
from handrail.contract.struct import Struct

RunStatus = Literal[
    "answered",  # the model ended with text and no calls
    "budget",  # turns, tokens, time or calls ran out
    "cancelled",  # the user or the program stopped the run
    "awaiting_approval",  # calls await approval; a later run of the same session continues with the decisions
    "length",  # the last reply reached the model's output limit
    "refused",  # the provider or the model declined
    "empty",  # the model returned neither text nor calls, also when it was asked once more
    "failed",  # the provider returned no complete reply; the text is for the operator
]


class TurnStarted(Struct, frozen=True):
    """A request is sent to the model. ``number`` counts from 1 within the run."""

    number: int


class CallProposed(Struct, frozen=True):
    """A call is proposed to the kernel. ``position`` counts from 0 within the reply."""

    position: int
    call: ProposedCall


class CallAnswered(Struct, frozen=True):
    """A call got its answer."""

    position: int
    call: ProposedCall
    answer: CallAnswer


class ProviderToolUnavailable(Struct, frozen=True):
    """A provider tool is not available to this model in this run."""

    tool_id: str
    reason: str


class ProviderToolUsed(Struct, frozen=True):
    """The provider ran one of its own tools.

    :param name: the provider's name of the tool
    :param tool_id: the registry's id; ``""`` for a tool that was not offered
    :param arguments: the model's arguments, if the provider reports them
    :param artifacts: references to the stored output: the provider's JSON first, then its binary parts
    :param failed: whether the provider reports a failure
    :param problem: why the output is not stored, or ``""``
    """

    name: str
    tool_id: str
    arguments: Mapping[str, Any]
    artifacts: tuple[str, ...] = ()
    failed: bool = False
    problem: str = ""


class ReplyInterrupted(Struct, frozen=True):
    """The reply was interrupted.

    If ``will_retry`` is true, the request is sent once more, and the text so far does not count.
    """

    reason: str
    will_retry: bool


class NotificationsDelivered(Struct, frozen=True):
    """Notifications were added to the conversation. The model reads them in its next turn."""

    notifications: tuple[Notification, ...]


class ConversationCompacted(Struct, frozen=True):
    """Older messages were replaced by an outline or a summary, because of their length or on request.

    :param removed_messages: the number of replaced messages; 0 if compaction was requested and nothing could be left out
    :param tokens_before: the approximate tokens of all messages before
    :param is_summarised: whether a model wrote a summary
    :param problem: why there is an outline instead of a requested summary, or ``""``
    :param kept_messages: the number of messages that stay
    :param was_requested: whether compaction was requested
    :param shortened_results: the number of kept results that are shortened, because the provider rejected a longer request
    """

    removed_messages: int
    tokens_before: int
    tokens_after: int
    is_summarised: bool = False
    problem: str = ""
    kept_messages: int = 0
    was_requested: bool = False
    shortened_results: int = 0

    def __str__(self) -> str:
        """Describe the compaction in one sentence."""
        if not self.removed_messages and self.shortened_results:
            return f"{self.shortened_results:,} long results are shortened: about {self.tokens_before:,} tokens become {self.tokens_after:,}."
        if not self.removed_messages:
            return f"Nothing to compact: all {self.kept_messages:,} messages of about {self.tokens_before:,} tokens are kept."
        how = (
            "summarised"
            if self.is_summarised
            else f"left out, without a summary ({self.problem.rstrip('.')})"
            if self.problem
            else "left out"
        )
        tokens = f"about {self.tokens_before:,} tokens become {self.tokens_after:,}"
        return f"{self.removed_messages:,} older messages are {how} and {self.kept_messages:,} are kept: {tokens}."


class AgentIdle(Struct, frozen=True):
    """The model has answered, and the agent waits for jobs, notifications or messages."""


class BudgetExhausted(Struct, frozen=True):
    """A limit of the budget was reached. The run ends when every proposed call is answered."""

    kind: BudgetKind
    text: str


class RunOutcome(Struct, frozen=True):
    """The outcome of a run.

    :param text: the text of the last reply; the answer if :attr:`ok`
    :param detail: why the run ended, for the user; ``""`` if it was answered
    :param seconds: wall time of the run
    :param pending_approvals: the ids of the approval requests that calls await
    :param cost: the price of the requests as the provider reports it, in its unit; None if it reports none
    """

    status: RunStatus
    text: str
    detail: str
    turns: int
    calls: int
    input_tokens: int
    output_tokens: int
    tokens_estimated: bool
    seconds: float
    budget: BudgetKind | None = None
    pending_approvals: tuple[str, ...] = ()
    cost: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the run ended with an answer."""
        return self.status == "answered"


class RunFinished(Struct, frozen=True):
    """A run has ended: the last event of a run, and of each piece of work of an agent that serves."""

    outcome: RunOutcome


AgentEvent = (
    TurnStarted
    | TextDelta
    | RetryDelayed
    | CallProposed
    | CallAnswered
    | ProviderToolUnavailable
    | ProviderToolUsed
    | ReplyInterrupted
    | NotificationsDelivered
    | ConversationCompacted
    | AgentIdle
    | BudgetExhausted
    | RunFinished
)
"""One event of a run, as :meth:`handrail.agent.agent_loop.Agent.run` yields it."""
