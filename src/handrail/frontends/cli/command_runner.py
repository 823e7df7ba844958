"""A command's run on an event loop: its kernel, its session, and a clean stop of its calls on Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

from handrail.contract.errors import HandrailError, StartError, UsageError
from handrail.frontends.cli.command_group import INTERRUPTED
from handrail.frontends.cli.command_options import CommandOptions
from handrail.frontends.cli.terminal_output import ask_yes_or_no, escape_to_one_line, print_stderr_note

if TYPE_CHECKING:
    from handrail.config import MergedConfiguration
    from handrail.contract.approval_requests import Approval, ApprovalAnswer, ApprovalHandler, ApprovalRequest
    from handrail.contract.services.tool_runtime import UserQuestion
    from handrail.kernel.kernel_interface import Kernel
    from handrail.record.commit_log import InterruptedCall
    from handrail.record.log_reader import LogReader
    from handrail.session.transcript_search import StoredSessionReader, StoredSessionSummary
    from handrail.store.state_folders import StateFolders


StopCallback = Callable[[Literal["user", "shutdown"]], object]


class InterruptHandler:
    """A handler of signals for a command.

    The first signal stops the calls, each of which is still answered and recorded. The second ends the program without
    waiting for them.
    """

    def __init__(self) -> None:
        self.is_interrupted = False
        self.stop: StopCallback | None = None
        """The function that stops the calls. Without it the first signal ends the program."""
        self._task: asyncio.Task[int] | None = None

    def install_signal_handlers(self, task: asyncio.Task[int]) -> None:
        """Handle the signals on the running loop, for ``task``."""
        self._task = task
        if sys.platform == "win32":
            return  # the event loop supports no handlers, so asyncio handles Ctrl-C
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        first = not self.is_interrupted
        self.is_interrupted = True
        if first and self.stop is not None:
            self.stop("user" if number == signal.SIGINT else "shutdown")
        elif self._task is not None:
            self._task.cancel()


class WarningPrinter(logging.Handler):
    """A logging handler that prints Handrail's warnings as notes of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            message += f" ({type(error).__name__}: {error})"
        print_stderr_note(f"handrail: {message}")


def run_on_event_loop(main: Callable[[InterruptHandler], Awaitable[int]]) -> int:
    """Run ``main`` on an event loop, and return its exit code, or 130 after a signal."""
    interruption = InterruptHandler()
    warnings = WarningPrinter(logging.WARNING)
    logging.getLogger("handrail").addHandler(warnings)
    last_resort, logging.lastResort = logging.lastResort, warnings  # libraries would write to stderr unescaped

    async def watched() -> int:
        task = asyncio.current_task()
        assert task is not None
        interruption.install_signal_handlers(task)
        return await main(interruption)

    try:
        code = asyncio.run(watched())
    except (asyncio.CancelledError, KeyboardInterrupt):
        code = INTERRUPTED
    finally:
        logging.getLogger("handrail").removeHandler(warnings)
        logging.lastResort = last_resort
    return INTERRUPTED if interruption.is_interrupted else code


@asynccontextmanager
async def open_configured_kernel(setting: CommandOptions, frontend: str = "cli") -> AsyncGenerator[Kernel]:
    """Open the kernel that the options describe, and print its startup notes on stderr.

    :param frontend: the frontend's name for the log
    :raises UsageError: with every invalid ``--rule``
    :raises LoadError: with every fault of configuration, agent and tools
    :raises StartError: if the state folder or the sandbox is not available
    """
    from handrail.kernel.workspace_opening import open_kernel

    _check_rules(setting.rules)
    offer_moved_workspace_state(setting)
    async with open_kernel(
        setting.workspace,
        rules=setting.rules,
        state=setting.state,
        config=setting.config,
        settings=setting.settings,
        agent=setting.agent,
        mode=setting.mode,
        frontend=frontend,
        allow_home=setting.allow_home,
    ) as kernel:
        gc.freeze()  # also forgets that a collection is due
        gc.set_threshold(25_000, 10, 10)
        print_startup_warnings(kernel.config, kernel.interrupted_calls)
        _print_project_note(setting)
        yield kernel


def offer_moved_workspace_state(setting: CommandOptions) -> None:
    """Offer the state of the former path, if the folder of the workspace was moved and has no state yet.

    On a terminal, the user is asked. Otherwise a note names the command.
    """
    from handrail.store.state_adoption import (
        adopt_state,
        find_adoptable_states,
        has_workspace_database,
        select_adoptable_state,
    )

    try:
        folders = setting.folders
        if has_workspace_database(folders) or not (found := find_adoptable_states(folders)):
            return
    except HandrailError:  # opening the workspace reports it
        return
    former = found[0].stored.workspace or "another path"
    question = f"handrail: {folders.workspace} was at {former} before, where it has a log, sessions and stored answers."
    if len(found) == 1 and sys.stdin.isatty() and sys.stderr.isatty():
        print_stderr_note(question)
        if ask_yes_or_no("Continue with them here?", err=True):
            adopt_state(folders, select_adoptable_state(folders, None))
    else:
        print_stderr_note(f"{question} To continue with them, run first: handrail state adopt")


def print_former_paths(folders: StateFolders) -> None:
    """Print a note for each stored state whose folder was moved to the path of this workspace."""
    from handrail.store.state_adoption import find_adoptable_states

    for one in find_adoptable_states(folders):
        where = "an unknown path" if one.stored.workspace is None else str(one.stored.workspace)
        print_stderr_note(
            f"This folder was at {escape_to_one_line(where)} before. To continue with its state: handrail state adopt {one.stored.key}"
        )


def _print_project_note(setting: CommandOptions) -> None:
    """Print a note if the stored answers were given for another folder."""
    from handrail.store.project_identity import is_recorded_project_folder

    folders = setting.folders
    if not is_recorded_project_folder(folders):
        print_stderr_note(
            f"handrail: The stored answers of {escape_to_one_line(str(folders.workspace))} were given for another "
            "folder at this path, so the answers that allow do not apply. To apply them here, run: handrail rules "
            "--adopt"
        )


def print_startup_warnings(config: MergedConfiguration, interrupted: Iterable[InterruptedCall]) -> None:
    """Print a note about ignored workspace settings, and about earlier calls with an unknown outcome."""
    if (remark := config.untrusted_workspace_warning) is not None:
        print_stderr_note(f"handrail: {remark}")
    for lost in interrupted:
        print_stderr_note(
            f"handrail: Call {lost.call_id} ({escape_to_one_line(str(lost.tool))}) was interrupted earlier. Its outcome is unknown."
        )


def _check_rules(rules: Iterable[str]) -> None:
    from handrail.policy.rules.rule_sets import parse_entry

    faults: list[str] = []
    for text in rules:
        try:
            parse_entry(text, scope="session")
        except ValueError as error:
            faults.append(f"--rule {text!r}: {error}")
    if faults:
        raise UsageError("\n".join(faults))


def choose_approval_handler(setting: CommandOptions, *, waits: bool = False) -> ApprovalHandler | None:
    """Return the approval handler of a command, or None in headless mode.

    On a terminal it asks the user there. Without one it defers the requests.

    :param waits: without a terminal, wait until the request is answered elsewhere, instead of deferring it
    """
    if setting.headless:
        return None
    if sys.stdin.isatty() and sys.stderr.isatty():
        from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler

        return TerminalApprovalHandler(workspace=setting.workspace)
    from handrail.contract.approval_requests import DeferApprovals

    return WaitingApprovalHandler() if waits else DeferApprovals()


class WaitingApprovalHandler:
    """An :class:`~handrail.contract.approval_requests.ApprovalHandler` that waits until a request is answered elsewhere."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        print_stderr_note(f"{request.id} waits for approval. To answer: handrail approve {request.id}")
        raise await _wait_forever()

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        print_stderr_note(f"Session {session_id} has a question for you. To answer: handrail approve")
        raise await _wait_forever()


async def _wait_forever() -> Exception:
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


# The choice of the session to resume, and of the agent that it belongs to.


@contextmanager
def open_session_and_log_readers(setting: CommandOptions) -> Generator[tuple[StoredSessionReader, LogReader]]:
    """Open the stored sessions and the log of a workspace, also while another process holds it.

    :raises DatabaseNotCreated: if the workspace has no stored state
    :raises StartError: if the state cannot be read
    """
    from handrail.record.log_reader import LogReader
    from handrail.session.transcript_search import StoredSessionReader
    from handrail.store.lease import find_lease_holder

    folders = setting.folders
    with LogReader.open_database(folders.database_file) as log:
        holder = find_lease_holder(folders)
        yield StoredSessionReader(log.connection, None if holder is None else holder.token), log


def find_resumable_session(setting: CommandOptions, session_id: str) -> StoredSessionSummary:
    """Return the session to resume.

    :param session_id: ``""`` for the last one that is not open and has messages
    :raises UsageError: if the session does not exist, or cannot be resumed
    """
    from handrail.store.database.sqlite_connection import DatabaseNotCreated

    try:
        with open_session_and_log_readers(setting) as (reader, _):
            found = reader.get(session_id) if session_id else reader.find_latest_resumable()
            if found is None and session_id:
                raise make_unknown_session_error(reader, session_id)
    except DatabaseNotCreated:
        found = None
    if found is None:
        raise click.UsageError("No session can be resumed. `handrail sessions` lists the sessions.")
    if found.state == "closed":
        raise click.UsageError(f"Session {session_id} is closed, and its messages were removed. Start a new session.")
    if found.parent_session:
        raise click.UsageError(
            f"Session {session_id} belongs to a sub-agent and cannot be resumed. To start a new session with its "
            f"messages: handrail run --fork {session_id}"
        )
    if found.state == "open":
        raise click.UsageError(
            f"Session {session_id} is open in another process. Continue it there, or end that process first."
        )
    return found


def apply_session_agent(setting: CommandOptions, session_id: str) -> CommandOptions:
    """Return the options with the agent of a session.

    :raises UsageError: if the options name another agent
    """
    from handrail.store.database.sqlite_connection import DatabaseNotCreated

    try:
        with open_session_and_log_readers(setting) as (reader, _):
            found = reader.get(session_id)
    except DatabaseNotCreated:
        found = None
    if found is None:  # opening the session reports it
        return setting
    if setting.agent not in (None, found.agent):
        raise click.UsageError(
            f"Session {session_id} belongs to agent {found.agent!r}, not to {setting.agent!r}. Leave out `--agent`."
        )
    return replace(setting, agent=found.agent)


def apply_approval_request_agent(setting: CommandOptions, approval_id: str) -> CommandOptions:
    """Return the options with the agent of an approval request.

    :raises UsageError: if the options name another agent
    """
    row = find_approval_request(setting, approval_id)
    return setting if row is None else apply_session_agent(setting, row.request.session_id)


def find_approval_request(setting: CommandOptions, approval_id: str) -> Approval | None:
    """Return the approval request with an ID, answered or not, or None."""
    from handrail.store.database.sqlite_connection import DatabaseNotCreated
    from handrail.store.tables.approval_tables import ApprovalReader

    try:
        with open_session_and_log_readers(setting) as (_, log):
            return ApprovalReader(log.connection).get(approval_id)
    except DatabaseNotCreated:
        return None


def make_unknown_session_error(reader: StoredSessionReader, session_id: str) -> click.UsageError:
    from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

    near = nearest_names(session_id, [facts.id for facts in reader.list_sessions(limit=200)], 1)
    hint = f"Did you mean {near[0]}?" if near else "`handrail sessions` lists the sessions."
    return click.UsageError(f"Session {session_id[:80]!r} does not exist. {hint}")


# A note about records that are only in the journal after a crash, and not in the log yet.


def warn_about_missing_records(command: str, folders: StateFolders, reader: LogReader) -> None:
    """Print a note if records of a killed process are not in the log yet."""
    from sqlite3 import DatabaseError

    from handrail.record.commit_log import read_unwritten_records
    from handrail.store.lease import find_lease_holder

    if find_lease_holder(folders) is not None:
        return
    try:
        missing = read_unwritten_records(reader.connection, folders.workspace_state_folder)
    except (DatabaseError, OSError, StartError) as error:
        print_stderr_note(f"handrail {command}: {error}")
        return
    if missing:
        calls = ", ".join(dict.fromkeys(record.call_id for record in missing if record.call_id))
        print_stderr_note(
            f"handrail {command}: {len(missing)} records are not in the log yet ({calls}). Their process was killed. The "
            "next process that opens the workspace writes them."
        )
