"""The events of a run, in order, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from handrail.agent.budget import BudgetKind
from handrail.agent.model import TextDelta
from handrail.agent.pump import Delayed
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.doors.channels import Notice

RunStatus = Literal[
    "answered",  # the model ended with text and no calls
    "budget",  # turns, tokens, time or calls ran out
    "cancelled",  # somebody stopped the run
    "parked",  # calls wait for a person; a later run of the same session goes on with what was decided
    "length",  # the last reply met the model's output limit
    "refused",  # the provider or the model declined
    "failed",  # no whole reply could be had; the text is for the operator
]


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A request is sent to the model. ``number`` counts from 1 within the run."""

    number: int


@dataclass(frozen=True, slots=True)
class CallProposed:
    """A call is proposed to the kernel. ``position`` counts from 0 within the reply."""

    position: int
    call: ProposedCall


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """The one answer of a call."""

    position: int
    call: ProposedCall
    answer: Answer


@dataclass(frozen=True, slots=True)
class NativeWithheld:
    """A tool that the provider would carry out itself is not offered to this model in this run."""

    tool_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NativeUsed:
    """The provider carried out a tool of its own.

    :param name: as the provider calls it
    :param tool_id: the registry's id; ``""`` for one that was not offered
    :param arguments: what the model asked of it, as far as the provider says so
    :param artifacts: references to what came of it: the provider's JSON first, then what is binary in it
    :param failed: the provider says that it did not work
    :param problem: why nothing of it is kept, or ``""``
    """

    name: str
    tool_id: str
    arguments: Mapping[str, Any]
    artifacts: tuple[str, ...] = ()
    failed: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReplyCut:
    """The reply broke off. With ``again`` the same request is sent once more, and the text so far does not count."""

    reason: str
    again: bool


@dataclass(frozen=True, slots=True)
class NoticesHeard:
    """Notices were added to the conversation, which the model reads in its next turn."""

    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The conversation has grown too long, or compaction was asked for: from now on an outline or a summary is sent to the
    model in place of its oldest messages.

    :param messages: how many; 0 where it was asked for and there was nothing to leave out
    :param tokens_before: about what all of them took
    :param summary: the model has summed them up
    :param problem: why there is an outline where a summary was to be, or ``""``
    :param kept: how many messages are sent as they are
    :param asked: it was asked for
    """

    messages: int
    tokens_before: int
    tokens_after: int
    summary: bool = False
    problem: str = ""
    kept: int = 0
    asked: bool = False

    def __str__(self) -> str:
        """The compaction in one sentence, for people."""
        if not self.messages:
            return f"Nothing to compact: {self.kept:,} messages of about {self.tokens_before:,} tokens are kept as they are."
        how = (
            "summed up"
            if self.summary
            else f"left out, with no summary ({self.problem})"
            if self.problem
            else "left out"
        )
        tokens = f"about {self.tokens_before:,} tokens become {self.tokens_after:,}"
        return f"{self.messages:,} older messages are {how} and {self.kept:,} are kept: {tokens}."


@dataclass(frozen=True, slots=True)
class AgentIdle:
    """The model has answered, and what still runs, or may yet be said, is waited for."""


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """A budget ran out; the run ends when every proposed call is answered."""

    kind: BudgetKind
    text: str


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    :param text: the last reply's text, the answer when :attr:`ok`
    :param detail: why it ended, in a sentence for a person; ``""`` when answered
    :param seconds: wall time of the run
    :param parked: the ids of the requests to people that calls wait for
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
    parked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == "answered"


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last event of a run, and of each piece of work of an agent that lives on."""

    outcome: RunOutcome


LoopEvent = (
    TurnStarted
    | TextDelta
    | Delayed
    | CallProposed
    | CallAnswered
    | NativeWithheld
    | NativeUsed
    | ReplyCut
    | NoticesHeard
    | Compacted
    | AgentIdle
    | BudgetSpent
    | RunFinished
)
