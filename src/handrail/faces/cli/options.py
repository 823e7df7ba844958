"""The options that every command has, and what they say about the kernel to open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec

import click

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a command works.

    :param state: the folder for state; None: ``HANDRAIL_STATE`` or the platform's
    :param config: the configuration file; None: the platform's
    :param rules: rules of the session scope, as ``ACTION PERMISSION [PATTERN]``
    :param headless: nobody is asked, even on a terminal
    :param json: machine-readable output
    :param allow_home: the workspace may be a home folder or the whole file system
    """

    workspace: str
    state: str | None
    config: str | None
    rules: tuple[str, ...]
    headless: bool
    json: bool
    allow_home: bool


_PLACE = (
    click.option("--workspace", "-C", default=".", metavar="DIR", help="The folder to work in. Default: here."),
    click.option("--state", metavar="DIR", help="Where state is kept. Default: HANDRAIL_STATE, or the platform's."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--allow-home", is_flag=True, help="Accept a home folder or / as the workspace."),
)
_CONFIGURATION = click.option(
    "--config", metavar="FILE", help="The configuration. Default: handrail.toml of the platform."
)
_SESSION = (
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="RULE",
        help="A rule for this session, such as 'allow bash git status'. Can be repeated.",
    ),
    click.option("--headless", is_flag=True, help="Ask nobody: what would be asked is denied."),
)


def common(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """Add the options of a command that makes calls, handed to it as one :class:`Setting`."""
    return _with(function, (*_PLACE[:2], _CONFIGURATION, *_SESSION, *_PLACE[2:]))


def configured(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """The options of a command that looks at a workspace and its configuration, and makes no calls."""
    return _with(function, (*_PLACE[:2], _CONFIGURATION, *_PLACE[2:]))


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
        config, rules, headless = given.pop("config", None), given.pop("rules", ()), given.pop("headless", False)
        return function(Setting(workspace, state, config, rules, headless, as_json, allow_home), *args, **kwargs)

    wrapped: Callable[..., int] = update_wrapper(gathered, function)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped
