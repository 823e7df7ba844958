"""The options that commands share, and the kernel that they describe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from shlex import quote
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

import click

from handrail.contract.modes import MODES
from handrail.frontends.cli.completing import agents, files, folders
from handrail.origins.imports import guarded

if TYPE_CHECKING:
    from handrail.agent.budget import Budget
    from handrail.agent.model import Model
    from handrail.agent.text_calls import TextForm
    from handrail.contract.agent import AgentManifest


P = ParamSpec("P")

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a command works.

    :param state: the folder for state; None: ``HANDRAIL_STATE`` or the platform's
    :param config: the configuration file; None: the platform's
    :param rules: rules of the session scope, as ``ACTION PERMISSION [PATTERN]``
    :param headless: nobody is asked, even on a terminal
    :param json: machine-readable output
    :param allow_home: the workspace may be what is no project, such as a home folder or the whole file system
    :param settings: ``KEY=VALUE`` texts, stronger than files and variables
    :param agent: None: the configured one
    :param mode: None: the agent's or the configured one
    """

    workspace: str
    state: str | None
    config: str | None
    rules: tuple[str, ...]
    headless: bool
    json: bool
    allow_home: bool
    settings: tuple[str, ...] = ()
    agent: str | None = None
    mode: str | None = None


_PLACE = (
    click.option(
        "--workspace",
        "-C",
        default=".",
        metavar="DIR",
        shell_complete=folders,
        help="The folder to work in. Default: here.",
    ),
    click.option(
        "--state",
        metavar="DIR",
        shell_complete=folders,
        help="Where state is kept. Default: HANDRAIL_STATE, or the platform's.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON: one value, or one object a line."),
    click.option(
        "--allow-home", is_flag=True, help="Accept a workspace that is no project: a home folder, ~/.ssh, /etc, /."
    ),
)
_CONFIGURATION = (
    click.option(
        "--config",
        metavar="FILE",
        shell_complete=files,
        help="The configuration. Default: handrail.toml of the platform.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="A setting, such as limits.lock_wait_ms=20000. Can be repeated.",
    ),
)
_AGENT = click.option(
    "--agent",
    metavar="NAME",
    shell_complete=agents,
    help="The agent to work as: handrail agents lists them. Default: the configured one.",
)
_SESSION = (
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="RULE",
        help="A rule for this session, such as 'allow bash git status'. Can be repeated.",
    ),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        help="How much is done without asking: handrail modes lists them. Default: the agent's or the configured one.",
    ),
    click.option("--headless", is_flag=True, help="Ask nobody: what would be asked is denied."),
)


def alone(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that nobody can be asked: ``HANDRAIL_HEADLESS``, else ``CI`` as build machines set it.

    :raises UsageError: for a value that is neither yes nor no
    """
    given = environment.get("HANDRAIL_HEADLESS", "").strip().lower()
    if given in _YES or given in _NO:
        return given in _YES
    if given:
        raise click.UsageError(f"HANDRAIL_HEADLESS is {given!r}; 1 or 0 was expected")
    return environment.get("CI", "").strip().lower() not in ("", *_NO)


def common(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """Add the options of a command that makes calls, handed to it as one :class:`Setting`."""
    return _with(function, (*_PLACE[:2], *_CONFIGURATION, _AGENT, *_SESSION, *_PLACE[2:]))


def equipped(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """The options of a command that looks at an agent's tools, sessions or jobs, and makes no calls."""
    return _with(function, (*_PLACE[:2], *_CONFIGURATION, _AGENT, *_PLACE[2:]))


def configured(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """The options of a command that looks at a workspace and its configuration, and makes no calls."""
    return _with(function, (*_PLACE[:2], *_CONFIGURATION, *_PLACE[2:]))


def located(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """The options of a command that only looks at what is kept of a workspace."""
    return _with(function, _PLACE)


def _with(
    function: Callable[Concatenate[Setting, P], int],
    options: Sequence[Callable[[Callable[..., int]], Callable[..., int]]],
) -> Callable[..., int]:
    def gathered(
        workspace: str, state: str | None, as_json: bool, allow_home: bool, *args: P.args, **kwargs: P.kwargs
    ) -> int:
        given: Any = kwargs
        config, rules, settings = given.pop("config", None), given.pop("rules", ()), given.pop("settings", ())
        headless = given.pop("headless", False) or alone(os.environ)
        agent, mode = given.pop("agent", None), given.pop("mode", None)
        setting = Setting(workspace, state, config, rules, headless, as_json, allow_home, settings, agent, mode)
        with guarded(os.path.expanduser(workspace)):  # noqa: PTH111
            return function(setting, *args, **kwargs)

    wrapped: Callable[..., int] = update_wrapper(gathered, function)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


# Options with an amount of time: a finite number, at most ten years.

_TEN_YEARS = {"seconds": 10 * 365 * 86_400, "days": 10 * 365}


class Amount(click.FloatRange):
    """A number of a unit, up to ten years of it. It refuses what a range lets through: what is no number (``nan``), and what
    is more than a clock can be asked for.

    :param above: more than ``least``, not as much
    """

    def __init__(
        self, unit: Literal["seconds", "days"], least: int = 0, most: int | None = None, *, above: bool = False
    ) -> None:
        self._unit, self._least, self._most, self._above = unit, least, most or _TEN_YEARS[unit], above
        super().__init__(self._least, self._most, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if self._least <= number <= self._most and not (self._above and number == self._least):
            return number
        bounds = f"{'more than' if self._above else 'from'} {self._least:g} to {self._most:,.0f}"
        ten_years = " (ten years)" if self._most == _TEN_YEARS[self._unit] else ""
        expected = f"expected a number of {self._unit}, {bounds}{ten_years}"
        raise click.BadParameter(f"{str(value)[:80]!r} was given; {expected}", ctx, param)


# The options of every command that runs a model: its choice, its address, and its budget.


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
