"""The options that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from shlex import quote
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

import click

from handrail.contract.errors import UsageError
from handrail.contract.permission_modes import MODES
from handrail.contract.struct import Struct
from handrail.frontends.cli.shell_completion import agents, complete_files, complete_folders
from handrail.frontends.cli.text_layout import apply_color_option
from handrail.origins.import_guard import guard_imports_and_programs

if TYPE_CHECKING:
    from handrail.agent.model_protocol import Model
    from handrail.agent.run_budget import Budget
    from handrail.agent.text_tool_calls import TextForm
    from handrail.contract.agent_manifest import AgentManifest
    from handrail.store.state_folders import StateFolders


P = ParamSpec("P")

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class CommandOptions(Struct, frozen=True):
    """The common options of a command.

    :param state: the state folder; None for ``HANDRAIL_STATE`` or the platform's
    :param config: the configuration file; None for the platform's
    :param rules: rules of the session scope, as ``ACTION PERMISSION [PATTERN]``
    :param headless: never ask the user, even on a terminal
    :param json: print JSON
    :param allow_home: accept a workspace that is not a project, such as a home folder or the whole file system
    :param settings: ``KEY=VALUE`` texts, which override files and variables
    :param agent: the agent; None for the configured one
    :param mode: the mode; None for the agent's or the configured one
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

    @property
    def folders(self) -> StateFolders:
        """The state folders of the workspace."""
        from handrail.store.state_folders import locate_folders

        return locate_folders(self.workspace, self.state, allow_home=self.allow_home)


_WORKSPACE = (
    click.option(
        "--workspace",
        "-C",
        default=".",
        metavar="DIR",
        shell_complete=complete_folders,
        help="Workspace folder. Default: the current folder.",
    ),
    click.option(
        "--state",
        metavar="DIR",
        shell_complete=complete_folders,
        help="State folder. Default: HANDRAIL_STATE, or the platform's.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON: one value, or one object per line."),
    click.option("--no-color", is_flag=True, help="Write without colors, as with the variable NO_COLOR."),
    click.option("--allow-home", is_flag=True, help="Accept a home folder, ~/.ssh, /etc or / as the workspace."),
)
_CONFIGURATION = (
    click.option(
        "--config",
        metavar="FILE",
        shell_complete=complete_files,
        help="Configuration file. Default: the platform's handrail.toml.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Setting, such as limits.lock_wait_ms=20000. Can be repeated.",
    ),
)
_AGENT = click.option(
    "--agent", metavar="NAME", shell_complete=agents, help="Agent; see handrail agents. Default: the configured one."
)
_SESSION = (
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="RULE",
        help="Rule for this session, such as 'allow bash git status'. Can be repeated.",
    ),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        help="Permission mode; see handrail modes. Default: the agent's or the configured one.",
    ),
    click.option("--headless", is_flag=True, help="Never ask for approval; deny instead."),
)


def is_headless(environment: Mapping[str, str]) -> bool:
    """Return whether ``HANDRAIL_HEADLESS``, or else ``CI``, sets headless mode. Build machines set ``CI``.

    :raises UsageError: for an invalid value of ``HANDRAIL_HEADLESS``
    """
    if (given := environment.get("HANDRAIL_HEADLESS", "").strip().lower()) in _YES or given in _NO:
        return given in _YES
    if given:
        raise click.UsageError(f"Invalid value of HANDRAIL_HEADLESS: {given!r}. Expected 1 or 0.")
    return environment.get("CI", "").strip().lower() not in ("", *_NO)


def add_call_options(function: Callable[Concatenate[CommandOptions, P], int]) -> Callable[..., int]:
    """Add the options of a command that makes calls, and pass them as one :class:`CommandOptions`."""
    return _add_options(function, (*_WORKSPACE[:2], *_CONFIGURATION, _AGENT, *_SESSION, *_WORKSPACE[2:]))


def add_agent_options(function: Callable[Concatenate[CommandOptions, P], int]) -> Callable[..., int]:
    """Add the options of a command that uses an agent's tools, sessions or jobs, and makes no calls."""
    return _add_options(function, (*_WORKSPACE[:2], *_CONFIGURATION, _AGENT, *_WORKSPACE[2:]))


def add_configuration_options(function: Callable[Concatenate[CommandOptions, P], int]) -> Callable[..., int]:
    """Add the options of a command that reads a workspace and its configuration, and makes no calls."""
    return _add_options(function, (*_WORKSPACE[:2], *_CONFIGURATION, *_WORKSPACE[2:]))


def add_workspace_options(function: Callable[Concatenate[CommandOptions, P], int]) -> Callable[..., int]:
    """Add the options of a command that only reads the stored state of a workspace."""
    return _add_options(function, _WORKSPACE)


def _add_options(
    function: Callable[Concatenate[CommandOptions, P], int],
    options: Sequence[Callable[[Callable[..., int]], Callable[..., int]]],
) -> Callable[..., int]:
    def gathered(
        workspace: str,
        state: str | None,
        as_json: bool,
        no_color: bool,
        allow_home: bool,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> int:
        given: Any = kwargs
        config, rules, settings = given.pop("config", None), given.pop("rules", ()), given.pop("settings", ())
        headless = given.pop("headless", False) or is_headless(os.environ)
        agent, mode = given.pop("agent", None), given.pop("mode", None)
        setting = CommandOptions(workspace, state, config, rules, headless, as_json, allow_home, settings, agent, mode)
        with guard_imports_and_programs(os.path.expanduser(workspace)), apply_color_option(is_off=no_color):  # noqa: PTH111
            return function(setting, *args, **kwargs)

    wrapped: Callable[..., int] = update_wrapper(gathered, function)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


# Options with a duration: a finite number, at most ten years.

_TEN_YEARS = {"seconds": 10 * 365 * 86_400, "days": 10 * 365}


class DurationParamType(click.FloatRange):
    """An option type for a duration in seconds or days, up to ten years.

    Unlike :class:`click.FloatRange` it rejects ``nan`` and infinite values.

    :param above: whether ``least`` itself is excluded
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
        expected = f"Expected a number of {self._unit}, {bounds}{ten_years}."
        raise click.BadParameter(f"{str(value)[:80]!r}. {expected}", ctx, param)


# The options of every command that runs a model: the model, its address, and its budget.


class ModelOptions(Struct, frozen=True):
    """The options for a model; None means the agent's value.

    See :func:`handrail.agent.providers.open_model` for their meaning.
    """

    model: str | None
    base_url: str | None
    text_calls: TextForm | None
    max_turns: int | None
    max_tokens: int | None
    max_calls: int | None
    max_seconds: float | None

    def open_model_for(self, manifest: AgentManifest, without: str) -> Model:
        """Open the model for an agent. The caller closes it.

        :param without: the error text if no model is set
        :raises UsageError: if no model is set, or it is not available
        """
        from handrail.agent.providers import open_model

        if (spec := self.model or manifest.model) is None:
            raise UsageError(without)
        its_own = manifest.base_url if self.model is None else None
        return open_model(spec, base_url=self.base_url or its_own or None, text_calls=self.text_calls)

    @property
    def resume_command_arguments(self) -> str:
        """The options for the same model, for the command that resumes a session."""
        given = {"--model": self.model, "--base-url": self.base_url, "--text-tool-calls": self.text_calls}
        return "".join(f" {option} {quote(value)}" for option, value in given.items() if value is not None)

    def make_run_budget(self, manifest: AgentManifest) -> Budget:
        from handrail.agent.run_budget import Budget

        bounds: dict[str, Any] = {"turns": self.max_turns, "tokens": self.max_tokens}
        return Budget.combine_limits(manifest.budgets, **bounds, calls=self.max_calls, seconds=self.max_seconds)


def add_model_options(of: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add the model options to a command, and pass them as one :class:`ModelOptions` in the keyword argument ``asked``.

    :param of: the scope of each limit, such as " for each prompt"; "" if the command is one run
    """
    options = (
        click.option(
            "--model",
            metavar="MODEL",
            envvar="HANDRAIL_MODEL",
            help="Model: openai:, openai-responses:, anthropic: or gemini:NAME, or script:FILE. Default: HANDRAIL_MODEL, or "
            "the agent's.",
        ),
        click.option("--base-url", metavar="URL", help="Base URL of another server with the provider's API."),
        click.option(
            "--text-tool-calls",
            "text_calls",
            type=click.Choice(("bracket", "xml")),
            help="Form of tool calls in the text, for a model without tool calling. Default: none.",
        ),
        click.option(
            "--max-turns",
            type=click.IntRange(min=1),
            help=f"Maximum number of model requests{of}. Default: the agent's, or 50.",
        ),
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            help=f"Maximum number of input and output tokens{of}. Default: the agent's, or no limit.",
        ),
        click.option(
            "--max-calls",
            type=click.IntRange(min=1),
            help=f"Maximum number of tool calls{of}. Default: the agent's, or no limit.",
        ),
        click.option(
            "--max-seconds",
            type=DurationParamType("seconds", above=True),
            help=f"Maximum wall-clock time in seconds{of}. Default: the agent's, or no limit.",
        ),
    )

    def added(function: Callable[..., int]) -> Callable[..., int]:
        def gathered(*args: Any, **given: Any) -> int:
            kept = ModelOptions(**{name: given.pop(name) for name in ModelOptions.__struct_fields__})
            return function(*args, **given, asked=kept)

        wrapped: Callable[..., int] = update_wrapper(gathered, function)
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return added
