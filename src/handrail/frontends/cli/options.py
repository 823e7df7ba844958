"""The options that every command has, and what they say about the kernel to open."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec

import click

from handrail.contract.modes import MODES
from handrail.frontends.cli.completing import agents, files, folders
from handrail.origins.imports import guarded

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
