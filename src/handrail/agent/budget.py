"""The budget of a run and its usage: turns, tokens, time and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from handrail.agent.model import (
    AssistantMessage,
    CallPart,
    Message,
    ResultsMessage,
    TextPart,
    Usage,
    UserMessage,
)
from handrail.agent.stream import Reply
from handrail.contract.agent import AgentBudgets, Compaction

T = TypeVar("T")
BudgetKind = Literal["turns", "tokens", "seconds", "calls"]
CHARACTERS_PER_TOKEN = 4
"""Characters of one token, for the estimate when a provider does not report tokens."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one run; None: no bound.

    :param turns: requests to the model, each with its calls
    :param tokens: input and output of all requests together
    :param seconds: wall time, waiting for people included
    :param calls: proposed calls, those that were refused included
    :param context: about how many tokens the messages of one request may take; of a longer conversation older exchanges are
        left out of it
    :param compaction: what stands in their place: an outline, or a summary that the model is asked for
    :param repeat_reads: give the model the text of a file again that it has read since the user's last message and that is
        unchanged; else it is told so
    """

    turns: int | None = 50
    tokens: int | None = None
    seconds: float | None = None
    calls: int | None = None
    context: int | None = 150_000
    compaction: Compaction = "outline"
    repeat_reads: bool = False

    @classmethod
    def of(
        cls,
        budgets: AgentBudgets,
        *,
        turns: int | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
        calls: int | None = None,
        context: int | None = None,
        compaction: Compaction | None = None,
    ) -> Budget:
        """The bounds given for one run; where none is given, the agent manifest's; otherwise the default."""
        default = cls()
        return cls(
            _first(turns, budgets.turns, default.turns),
            _first(tokens, budgets.tokens, default.tokens),
            _first(seconds, budgets.seconds, default.seconds),
            _first(calls, budgets.calls, default.calls),
            _first(context, budgets.context, default.context),
            compaction or budgets.compaction or default.compaction,
            default.repeat_reads if budgets.repeat_reads is None else budgets.repeat_reads,
        )

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds", "calls", "context"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"a budget of {value!r} {name} leaves no room for anything; give a positive number or None"
                )


class Spent:
    """What one run has used so far of its :class:`Budget`.

    :param began: when the run did, on the running loop's clock
    """

    def __init__(self, budget: Budget, began: float) -> None:
        self.budget = budget
        self.began = began
        self.deadline = None if budget.seconds is None else began + budget.seconds
        """When its time is used up; None: never."""
        self.numbers: set[int] = set()
        """Of its turns, among all of their session."""
        self.turns = 0
        self.calls = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.tokens_estimated = False

    def covers(self, call_id: str) -> bool:
        """Whether a call was made in one of its turns: one that goes on in the background may outlive the run."""
        return call_id.rpartition("/")[2].partition(".")[0] in map(str, self.numbers)

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def bounds_tokens(self) -> bool:
        return self.budget.tokens is not None

    def take_turn(self) -> tuple[BudgetKind, str] | None:
        """Count a request that is made now: others share the budget, and ask while this one is answered. Gives what it has
        no room left for, and why; then nothing is counted."""
        if (full := self.full()) is None:
            self.count_turn()
        return full

    def full(self) -> tuple[BudgetKind, str] | None:
        """What the budget has no room left for, where it has none for a further request, and why."""
        if (why := self.out_of_turns()) is not None:
            return "turns", why
        if (why := self.out_of_tokens()) is not None:
            return "tokens", why
        return None

    def count_turn(self) -> None:
        self.turns += 1

    def count_tokens(self, asked: int, reply: Reply) -> None:
        """Count the tokens of a request and its reply, which may be no turn.

        :param asked: about how many the request has, for a provider that does not say
        """
        if reply.usage is None and reply.reason is None and not reply.parts:
            return  # nothing came back
        if reply.usage is not None:
            self.input_tokens += reply.usage.input_tokens
            self.output_tokens += reply.usage.output_tokens
            return
        self.tokens_estimated = True
        self.input_tokens += asked
        self.output_tokens += estimated_tokens(len(reply.text) + sum(len(str(call.arguments)) for call in reply.calls))

    def out_of_turns(self) -> str | None:
        """Why the budget has no turn left for a further request; None if it has."""
        limit = self.budget.turns
        return None if limit is None or self.turns < limit else f"all {limit} turns of the budget are used"

    def out_of_tokens(self, usage: Usage | None = None) -> str | None:
        """Why the budget has no tokens left for anything further; None if it has.

        :param usage: what is known so far of a reply that is still read, and not counted yet
        """
        limit = self.budget.tokens
        if limit is None:
            return None
        used = self.tokens + (0 if usage is None else usage.input_tokens + usage.output_tokens)
        if used < limit:
            return None
        about = "about " if self.tokens_estimated else ""
        return f"{about}{used:,} tokens are used of a budget of {limit:,}"

    def take_calls(self, count: int) -> int:
        """Count ``count`` proposed calls; returns how many of them, from the first on, the budget has room for."""
        limit = self.budget.calls
        room = count if limit is None else max(0, min(count, limit - self.calls))
        self.calls += count
        return room

    def out_of_calls(self) -> str:
        return f"more calls were proposed than the budget of {self.budget.calls} has room for"

    def out_of_time(self) -> str:
        return f"the budget of {self.budget.seconds:g} seconds is used up"


def _first(*said: T | None) -> T | None:
    return next((value for value in said if value is not None), None)


OF_A_PICTURE = 6_000
"""What one counts, in characters: about what the providers take for a large one."""


def characters_of(message: Message) -> int:
    """How long a message is, about."""
    match message:
        case UserMessage(text, pictures):
            return len(text) + len(pictures) * OF_A_PICTURE
        case ResultsMessage(results):
            return sum(len(result.text) for result in results)
        case AssistantMessage(parts):
            return sum(
                len(part.text) if isinstance(part, TextPart) else len(str(part.arguments))
                for part in parts
                if isinstance(part, (TextPart, CallPart))
            )


def estimated_tokens(characters: int) -> int:
    """Return about how many tokens so many characters are."""
    return -(-characters // CHARACTERS_PER_TOKEN)
