"""The budget of a run and its usage: turns, tokens, time and calls."""

from __future__ import annotations

from typing import Literal, TypeVar

from handrail.agent.model_protocol import (
    AssistantMessage,
    CallResultsMessage,
    HistoryCallPart,
    Message,
    TextPart,
    TokenUsage,
    UserMessage,
)
from handrail.agent.reply_assembly import ModelReply
from handrail.contract.agent_manifest import AgentBudgets, Compaction
from handrail.contract.struct import Struct

T = TypeVar("T")
BudgetKind = Literal["turns", "tokens", "seconds", "calls"]
CHARACTERS_PER_TOKEN = 4
"""The characters of one token, for the estimate if a provider reports no tokens."""


class Budget(Struct, frozen=True):
    """The limits of one run. None means no limit.

    :param turns: requests to the model, each with its calls
    :param tokens: input and output tokens of all requests together
    :param seconds: wall time, including the time in which approval requests wait
    :param calls: proposed calls, including refused ones
    :param context: the approximate number of tokens in the messages of one request; older exchanges of a longer conversation
        are left out
    :param compaction: what replaces the messages that are left out: an outline, or a summary that the model writes
    :param repeat_reads: whether to repeat the text of a file that the model has read since the user's last message and that
        is unchanged; else the model gets a note
    """

    turns: int | None = 50
    tokens: int | None = None
    seconds: float | None = None
    calls: int | None = None
    context: int | None = 150_000
    compaction: Compaction = "outline"
    repeat_reads: bool = False

    @classmethod
    def combine_limits(
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
        """Combine the limits of one run with the agent manifest's, and with the defaults."""
        default = cls()
        return cls(
            _first_not_none(turns, budgets.turns, default.turns),
            _first_not_none(tokens, budgets.tokens, default.tokens),
            _first_not_none(seconds, budgets.seconds, default.seconds),
            _first_not_none(calls, budgets.calls, default.calls),
            _first_not_none(context, budgets.context, default.context),
            compaction or budgets.compaction or default.compaction,
            default.repeat_reads if budgets.repeat_reads is None else budgets.repeat_reads,
        )

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds", "calls", "context"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(
                    f"`{name}` of a budget is invalid: {value!r}. Pass a positive number, or None for no limit."
                )


class RunUsage:
    """The usage of one run: what it has used so far of its :class:`Budget`.

    :param started_at: the time when the run started, on the running loop's clock
    """

    def __init__(self, budget: Budget, started_at: float) -> None:
        self.budget = budget
        self.started_at = started_at
        self.deadline = None if budget.seconds is None else started_at + budget.seconds
        """The time when the run ends; None for never."""
        self.turn_numbers: set[int] = set()
        """The numbers of its turns within their session."""
        self.turns = 0
        self.calls = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.tokens_estimated = False
        self.cost: float | None = None
        """The sum of the costs that the provider reported; None if it reported none."""

    def includes_call(self, call_id: str) -> bool:
        """Return whether a call was made in one of the run's turns. A background call may outlive the run."""
        return call_id.rpartition("/")[2].partition(".")[0] in map(str, self.turn_numbers)

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def has_token_limit(self) -> bool:
        return self.budget.tokens is not None

    def reserve_turn_in_budget(self) -> tuple[BudgetKind, str] | None:
        """Count a request before it is sent, because sub-agents share the budget.

        :return: the limit that leaves no room and why, in which case nothing is counted; or None
        """
        if (full := self.find_exhausted_limit()) is None:
            self.count_turn()
        return full

    def find_exhausted_limit(self) -> tuple[BudgetKind, str] | None:
        """Return the limit that leaves no room for a further request and why, or None."""
        if (why := self.explain_spent_turns()) is not None:
            return "turns", why
        if (why := self.explain_spent_tokens()) is not None:
            return "tokens", why
        return None

    def count_turn(self) -> None:
        self.turns += 1

    def count_tokens(self, asked: int, reply: ModelReply) -> None:
        """Count the tokens of a request and its reply. A summary request is not a turn.

        :param asked: the estimated tokens of the request, if the provider reports none
        """
        if reply.usage is None and reply.reason is None and not reply.parts:
            return  # nothing came back
        if reply.usage is not None:
            self.input_tokens += reply.usage.input_tokens
            self.output_tokens += reply.usage.output_tokens
            if reply.usage.cost is not None:
                self.cost = (self.cost or 0.0) + reply.usage.cost
            return
        self.tokens_estimated = True
        self.input_tokens += asked
        self.output_tokens += estimate_tokens(len(reply.text) + sum(len(str(call.arguments)) for call in reply.calls))

    def explain_spent_turns(self) -> str | None:
        """Return why the budget leaves no turn for a further request, or None."""
        limit = self.budget.turns
        return None if limit is None or self.turns < limit else f"The budget of {limit} turns is used up."

    def explain_spent_tokens(self, usage: TokenUsage | None = None) -> str | None:
        """Return why the budget leaves no tokens, or None.

        :param usage: the usage so far of a reply that is still read and not counted yet
        """
        if (limit := self.budget.tokens) is None:
            return None
        used = self.tokens + (0 if usage is None else usage.input_tokens + usage.output_tokens)
        if used < limit:
            return None
        about = " about" if self.tokens_estimated else ""
        return f"The token budget is used up:{about} {used:,} of {limit:,} tokens."

    def count_proposed_calls(self, count: int) -> int:
        """Count ``count`` proposed calls, and return how many of them the budget has room for."""
        limit = self.budget.calls
        room = count if limit is None else max(0, min(count, limit - self.calls))
        self.calls += count
        return room

    def explain_spent_calls(self) -> str:
        return f"The budget of {self.budget.calls} calls is used up."

    def explain_spent_time(self) -> str:
        return f"The budget of {self.budget.seconds:g} seconds is used up."


def _first_not_none(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


PICTURE_CHARACTERS = 6_000
"""The characters that one picture counts for, near what providers charge for a large one."""


def count_message_characters(message: Message) -> int:
    """Return the approximate number of characters in a message."""
    match message:
        case UserMessage(text, pictures):
            return len(text) + len(pictures) * PICTURE_CHARACTERS
        case CallResultsMessage(results):
            return sum(len(result.text) + len(result.pictures) * PICTURE_CHARACTERS for result in results)
        case AssistantMessage(parts):
            return sum(
                len(part.text) if isinstance(part, TextPart) else len(str(part.arguments))
                for part in parts
                if isinstance(part, (TextPart, HistoryCallPart))
            )


def estimate_tokens(characters: int) -> int:
    """Return the approximate number of tokens in ``characters`` characters."""
    return -(-characters // CHARACTERS_PER_TOKEN)
