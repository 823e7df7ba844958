"""The options of every command that runs a model: which one, how it is reached, and what it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.amounts import Amount

if TYPE_CHECKING:
    from handrail.agent.budget import Budget
    from handrail.agent.model import Model
    from handrail.agent.streaming.text_calls import TextForm
    from handrail.contract.agent import AgentManifest


@dataclass(frozen=True, slots=True)
class Asked:
    """What was given; see :func:`handrail.agent.providers.open_model`. Without a model, the agent's; and so with each bound."""

    model: str | None
    base_url: str | None
    text_calls: TextForm | None
    max_turns: int | None
    max_tokens: int | None
    max_calls: int | None
    max_seconds: float | None

    def opened(self, manifest: AgentManifest, without: str) -> Model:
        """The model for an agent; the caller closes it.

        :param without: what to tell where none is named
        :raises UsageError: when there is none, or it cannot be had
        """
        from handrail.agent.providers import open_model
        from handrail.contract.errors import UsageError

        if (spec := self.model or manifest.model) is None:
            raise UsageError(without)
        its_own = manifest.base_url if self.model is None else None
        return open_model(spec, base_url=self.base_url or its_own or None, text_calls=self.text_calls)

    @property
    def again(self) -> str:
        """The options that reach the same model once more, to stand in a command that goes on."""
        given = {"--model": self.model, "--base-url": self.base_url, "--text-calls": self.text_calls}
        return "".join(f" {option} {quote(value)}" for option, value in given.items() if value is not None)

    def budget(self, manifest: AgentManifest) -> Budget:
        """What one run of an agent may use."""
        from handrail.agent.budget import Budget

        bounds: dict[str, Any] = {"turns": self.max_turns, "tokens": self.max_tokens}
        return Budget.of(manifest.budgets, **bounds, calls=self.max_calls, seconds=self.max_seconds)


def asked_for(of: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add these options to a command, handed to it as one :class:`Asked` by the name ``asked``.

    :param of: what each bound is of, as " for each prompt"; "" where a command is one run
    """
    options = (
        click.option(
            "--model",
            metavar="MODEL",
            envvar="HANDRAIL_MODEL",
            help="openai:, openai-responses:, anthropic: or gemini:NAME, or script:FILE. Default: HANDRAIL_MODEL, or the agent's.",
        ),
        click.option("--base-url", metavar="URL", help="Another server that speaks the provider's API."),
        click.option(
            "--text-calls",
            type=click.Choice(("bracket", "xml")),
            help="For a model without tool calling: it writes its calls into its text, in this form.",
        ),
        click.option(
            "--max-turns", type=click.IntRange(min=1), help=f"Requests to the model{of}. Default: the agent's, or 50."
        ),
        click.option("--max-tokens", type=click.IntRange(min=1), help=f"Tokens in and out, all requests together{of}."),
        click.option("--max-calls", type=click.IntRange(min=1), help=f"Tool calls{of}."),
        click.option("--max-seconds", type=Amount("seconds", above=True), help=f"Wall time{of}."),
    )

    def added(function: Callable[..., int]) -> Callable[..., int]:
        def gathered(*args: Any, **given: Any) -> int:
            kept = Asked(**{name: given.pop(name) for name in Asked.__slots__})
            return function(*args, **given, asked=kept)

        wrapped: Callable[..., int] = update_wrapper(gathered, function)
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return added
