"""The commands by name, loaded on use, with an exit code and one clear line for every failure."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "call": "Carry out one tool call and print its result.",
    "tools": "List the tools there are, and what is withheld.",
    "find": "Find the tools that serve a need, said in plain words.",
    "agents": "List the agents there are, and what is wrong with them.",
    "skills": "List the skills there are, and who wrote each.",
    "run": "Give a task to a model and let it work through the tools.",
    "sessions": "List the sessions there are; show, fork or close some.",
    "jobs": "List the calls that run in the background; read, wait for or stop one.",
    "approve": "Show what waits for a person, and answer it.",
    "explain": "Say how a call would be decided, and by which rule.",
    "sources": "List sources of tools that are not your own; review and approve what they say.",
    "modes": "List the modes: how much is done without asking, as rules.",
    "log": "Show what happened in this workspace, verify the record of it, or purge it.",
    "acp": "Be the agent in an editor that speaks the Agent Client Protocol.",
    "mcp": "Serve the tools to MCP clients, and put other MCP servers behind them.",
    "config": "Show each setting and where it comes from.",
    "init": "Write a commented handrail.toml.",
    "trust": "Look at a workspace's handrail.toml and decide whether all of it counts.",
    "new": "Write a tool that works, with its test, to begin with.",
    "lint": "Check tools for their author: what keeps one from loading, and what could be better.",
    "build": "Freeze an agent with its tools into a folder that starts anywhere.",
    "doctor": "Say what this machine can enforce, and what to do about the rest.",
    "state": "List what is kept for which workspace, or remove it.",
    "completion": "Print the completion of a shell.",
}
"""Each is ``frontends/cli/commands/<name>.py`` with a ``command``."""

OUTPUT, ERROR, USAGE, DENIED, PARKED, CANNOT_START, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a file that output was sent into answers; of the state's own files the store tells it in other words."""

EPILOG = (
    "Exit codes: 0 output, 1 error result, 2 usage, 3 denied, 4 waits for a person, 5 cannot start (config, state, "
    "sandbox), 130 interrupted."
)


class Commands(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"handrail.frontends.cli.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=about) for name, about in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)  # the group's own would load all of them

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            ctx.fail(f"no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


@click.command(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="handrail", message="%(prog)s %(version)s")
def handrail() -> None:
    """A tool kernel for LLM agents: every tool call is checked, decided, locked, confined and recorded."""


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line. Gives the exit code; failures are written to stderr."""
    _open_streams()
    try:
        return _carried_out(arguments)
    finally:
        _give_up_on(sys.stderr)


def _carried_out(arguments: Sequence[str]) -> int:
    try:
        code = handrail.main(list(arguments), prog_name="handrail", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OUTPUT
    except click.UsageError as error:
        context = error.ctx
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
            return USAGE
        where = f"{context.command_path}: " if context is not None else "handrail: "
        _say(f"{where}{error.format_message()}")
        if context is not None:
            _say(f"Try: {context.command_path} --help")
        return USAGE
    except click.ClickException as error:
        _say(f"handrail: {error.format_message()}")
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        _say("handrail: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_on(sys.stdout)  # the reader went away; there is nobody to tell
        return ERROR
    except Exception as error:
        if os.environ.get("HANDRAIL_DEBUG") == "1":
            from traceback import format_exception

            _say("".join(format_exception(error)))
            return ERROR
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            return _unwritten(error)
        return _failed(error)


def _open_streams() -> None:
    """Have somewhere to write, also where whoever started this closed stdout or stderr, and nothing that cannot be written."""
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - open until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _unwritten(error: OSError) -> int:
    """The output goes nowhere, as on a disk that is full: no defect."""
    _give_up_on(sys.stdout)
    _say(f"handrail: the output could not be written: {error.strerror}")
    return ERROR


def _give_up_on(stream: TextIO) -> None:
    """Where a stream takes nothing more, Python would try once more as it ends, and exit with a code of its own."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _failed(error: Exception) -> int:
    from handrail.contract.errors import HandrailError, LoadError, LogUnavailable, StartError, UsageError

    if not isinstance(error, HandrailError):
        _say(f"handrail: internal error: {type(error).__name__}: {error}")
        _say("This is a defect. HANDRAIL_DEBUG=1 shows where it comes from.")
        return ERROR
    _say(f"handrail: {error}")
    if isinstance(error, UsageError):
        return USAGE
    return CANNOT_START if isinstance(error, (LoadError, StartError, LogUnavailable)) else ERROR


def _say(text: str) -> None:
    from handrail.frontends.cli.show import note

    note(text)
