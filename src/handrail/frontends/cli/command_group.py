"""The commands by name, loaded on first use, with an exit code and one clear line for every failure."""

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

COMMAND_GROUPS = {
    "Work with agents": {
        "run": "Run a task with a model.",
        "chat": "Talk with a model in the terminal.",
        "sessions": "List, show, fork or close sessions.",
        "agents": "List and validate agents.",
        "skills": "List skills, or print the text of one.",
    },
    "See and stop": {
        "ps": "Show what agents do now, in all workspaces.",
        "stop": "Stop a call, a job, a session or everything.",
        "approve": "List and answer approval requests.",
        "jobs": "List, read, wait for or stop background jobs.",
        "memory": "List, confirm or forget what agents stored.",
        "undo": "Undo what a call changed in the workspace.",
        "log": "Show, verify or purge the log of a workspace.",
        "explain": "Explain how a call is decided, or what became of it.",
    },
    "Tools": {
        "call": "Call a tool and print the result.",
        "tools": "List tools and why some are unavailable.",
        "find": "Search tools by description.",
        "sources": "Review and approve third-party tools.",
    },
    "Serve clients": {
        "mcp": "Serve tools to MCP clients, and manage MCP servers.",
        "acp": "Serve an editor over the Agent Client Protocol.",
    },
    "Set up": {
        "init": "Write a commented handrail.toml.",
        "config": "Show each setting and its origin.",
        "modes": "List the permission modes and their rules.",
        "rules": "List the shipped rule sets, or print the rules of one.",
        "trust": "Review and trust the workspace's handrail.toml.",
        "doctor": "Check the sandbox, configuration and state.",
        "state": "List, move, copy or remove the stored state of workspaces.",
        "completion": "Print the completion script of a shell.",
    },
    "Write tools": {
        "new": "Create a tool from a template.",
        "lint": "Check tools, agents and rules for problems.",
        "build": "Freeze an agent and its tools into a portable folder.",
    },
}
"""Each command is in ``frontends/cli/commands/<name>.py`` as ``command``."""
COMMANDS = {name: about for commands in COMMAND_GROUPS.values() for name, about in commands.items()}

OUTPUT, ERROR, USAGE, DENIED, AWAITING_APPROVAL, CANNOT_START, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a file or disk that takes no more output. The store reports errors of the state files itself."""

_UNKNOWN_HOME = "Could not determine home directory."
"""What Python says about ``~`` without HOME, for a user who has no account on the machine."""

EPILOG = (
    "Exit codes: 0 success, 1 error result, 2 usage error, 3 denied, 4 waiting for approval, 5 cannot start "
    "(configuration, state, sandbox), 130 interrupted."
)


class LazyCommandGroup(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"handrail.frontends.cli.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for title, commands in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), about) for name, about in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=about) for name, about in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)  # click.Group's method loads all commands

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"The commands are: {', '.join(COMMANDS)}."
            ctx.fail(f"Unknown command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


@click.command(cls=LazyCommandGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="handrail", message="%(prog)s %(version)s")
def handrail() -> None:
    """Run tool calls of LLM agents safely: validated, authorised, locked, sandboxed and logged."""


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line, and return the exit code. Failures are written to stderr."""
    _make_output_writable()
    try:
        return _run_command(arguments)
    finally:
        _discard_output(sys.stderr)


def _run_command(arguments: Sequence[str]) -> int:
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
        _print_error(f"{where}{error.format_message()}")
        if context is not None:
            _print_error(f"Try: {context.command_path} --help")
        return USAGE
    except click.ClickException as error:
        _print_error(f"handrail: {error.format_message()}")
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        _print_error("handrail: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output(sys.stdout)  # the reader of the output has ended
        return ERROR
    except Exception as error:
        if os.environ.get("HANDRAIL_DEBUG") == "1":
            from traceback import format_exception

            _print_error("".join(format_exception(error)))
            return ERROR
        if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and error.filename is None:
            return _report_write_error(error)
        return _report_failure(error)


def _make_output_writable() -> None:
    """Make stdout and stderr writable for any text, and stdin readable, also if the parent process closed them."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - closed by the parent
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - open until the process ends
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - open until the process ends
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report_write_error(error: OSError) -> int:
    """Report output that could not be written, for example to a full disk."""
    _discard_output(sys.stdout)
    _print_error(f"handrail: Could not write the output: {error.strerror}. Check the target of the output.")
    return ERROR


def _discard_output(stream: TextIO) -> None:
    """Discard the rest of a stream that takes no more output.

    Otherwise Python tries again at exit, and changes the exit code.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _has_current_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - only whether there is one
    except OSError:
        return False
    return True


def _report_failure(error: Exception) -> int:
    from handrail.contract.errors import HandrailError, LoadError, LogUnavailable, StartError, UsageError

    if isinstance(error, RuntimeError) and str(error) == _UNKNOWN_HOME:
        error = StartError("A path begins with `~`, and no home folder is known. Set HOME, or write an absolute path.")
    if isinstance(error, FileNotFoundError) and not _has_current_folder():
        error = StartError(
            "The current folder no longer exists, so a relative path leads nowhere. Change to another folder, or pass absolute "
            "paths, as in --workspace DIR."
        )
    if not isinstance(error, HandrailError):
        _print_error(f"handrail: internal error: {type(error).__name__}: {error}")
        _print_error("This is a bug. Set HANDRAIL_DEBUG=1 to see the traceback, and report it.")
        return ERROR
    _print_error(f"handrail: {error}")
    if isinstance(error, UsageError):
        return USAGE
    return CANNOT_START if isinstance(error, (LoadError, StartError, LogUnavailable)) else ERROR


def _print_error(text: str) -> None:
    from handrail.frontends.cli.terminal_output import print_stderr_note

    print_stderr_note(text)
