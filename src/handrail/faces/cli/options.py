"""The options that every command has, and what they say about the kernel to open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Concatenate, ParamSpec

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


def common(function: Callable[Concatenate[Setting, P], int]) -> Callable[..., int]:
    """Add the common options to a command, handed to it as one :class:`Setting`."""

    def gathered(
        workspace: str,
        state: str | None,
        config: str | None,
        rules: tuple[str, ...],
        headless: bool,
        as_json: bool,
        allow_home: bool,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> int:
        return function(Setting(workspace, state, config, rules, headless, as_json, allow_home), *args, **kwargs)

    options = [
        click.option("--workspace", "-C", default=".", metavar="DIR", help="The folder to work in. Default: here."),
        click.option("--state", metavar="DIR", help="Where state is kept. Default: HANDRAIL_STATE, or the platform's."),
        click.option("--config", metavar="FILE", help="The configuration. Default: handrail.toml of the platform."),
        click.option(
            "--rule",
            "rules",
            multiple=True,
            metavar="RULE",
            help="A rule for this session, such as 'allow bash git status'. Can be repeated.",
        ),
        click.option("--headless", is_flag=True, help="Ask nobody: what would be asked is denied."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--allow-home", is_flag=True, help="Accept a home folder or / as the workspace."),
    ]
    wrapped: Callable[..., int] = update_wrapper(gathered, function)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped
