"""The run of a command on an event loop: its kernel, its session, and a clean stop of its calls on Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

from handrail.frontends.cli.app import INTERRUPTED
from handrail.frontends.cli.options import Setting
from handrail.frontends.cli.show import note, one_line

if TYPE_CHECKING:
    from handrail.config import Configuration
    from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalRequest, Attendant
    from handrail.contract.doors.runtime import Question
    from handrail.kernel.kernel import Kernel
    from handrail.record.log import Interrupted
    from handrail.record.reading import LogReader
    from handrail.session.past import SessionFacts, SessionReader
    from handrail.store.folders import Folders


Stop = Callable[[Literal["user", "shutdown"]], object]


class Interruption:
    """What a signal does. The first one stops calls, each of which is still answered and recorded; the second ends
    the program without waiting for them."""

    def __init__(self) -> None:
        self.happened = False
        self.stop: Stop | None = None
        """Set while there is something to stop; without it the first signal ends the program."""
        self._task: asyncio.Task[int] | None = None

    def watch(self, task: asyncio.Task[int]) -> None:
        """Listen to the signals on the running loop, for ``task``."""
        self._task = task
        if sys.platform == "win32":
            return  # its event loop takes no handlers: asyncio's own treatment of Ctrl-C stays
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        first = not self.happened
        self.happened = True
        if first and self.stop is not None:
            self.stop("user" if number == signal.SIGINT else "shutdown")
        elif self._task is not None:
            self._task.cancel()


class Warnings(logging.Handler):
    """What Handrail finds worth a warning while a command runs, as a line of the command's own."""

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            said += f" ({type(error).__name__}: {error})"
        note(f"handrail: {said}")


def drive(main: Callable[[Interruption], Awaitable[int]]) -> int:
    """Run ``main`` to its exit code, which becomes 130 when a signal came."""
    interruption = Interruption()
    warnings = Warnings(logging.WARNING)
    logging.getLogger("handrail").addHandler(warnings)
    last_resort, logging.lastResort = logging.lastResort, warnings  # a library would write to stderr as it is

    async def watched() -> int:
        task = asyncio.current_task()
        assert task is not None
        interruption.watch(task)
        return await main(interruption)

    try:
        code = asyncio.run(watched())
    except (asyncio.CancelledError, KeyboardInterrupt):
        code = INTERRUPTED
    finally:
        logging.getLogger("handrail").removeHandler(warnings)
        logging.lastResort = last_resort
    return INTERRUPTED if interruption.happened else code


@asynccontextmanager
async def opened(setting: Setting, face: str = "cli") -> AsyncGenerator[Kernel]:
    """The kernel that the options describe. Calls whose outcome the last process left unknown are told on stderr.

    :raises UsageError: with every ``--rule`` that is none
    :raises LoadError: with every fault of configuration, agent and tools
    :raises StartError: when state or sandbox are not to be had
    """
    from handrail.kernel.opening import open_kernel

    _check_rules(setting.rules)
    async with open_kernel(
        setting.workspace,
        rules=setting.rules,
        state=setting.state,
        config=setting.config,
        settings=setting.settings,
        agent=setting.agent,
        mode=setting.mode,
        face=face,
        allow_home=setting.allow_home,
    ) as kernel:
        tell_before(kernel.config, kernel.interrupted)
        yield kernel


def tell_before(config: Configuration, interrupted: Iterable[Interrupted]) -> None:
    """Tell what people should know before a command does anything: what of the workspace's file does not count, and which
    calls the last process left with an unknown outcome."""
    if (remark := config.remark) is not None:
        note(f"handrail: {remark}")
    for lost in interrupted:
        note(
            f"handrail: call {lost.call_id} ({one_line(str(lost.tool))}) was interrupted earlier; its outcome is unknown"
        )


def _check_rules(rules: Iterable[str]) -> None:
    from handrail.contract.errors import UsageError
    from handrail.policy.rules.rules import parse_rule

    faults: list[str] = []
    for text in rules:
        try:
            parse_rule(text, scope="session")
        except ValueError as error:
            faults.append(f"--rule {text!r}: {error}")
    if faults:
        raise UsageError("\n".join(faults))


def attendant(setting: Setting, *, waits: bool = False) -> Attendant | None:
    """Whoever sits at the terminal; without a terminal what is asked is parked for another door. None where the command
    was told that nobody will answer there either.

    :param waits: without a terminal, wait for the other door instead
    """
    if setting.headless:
        return None
    if sys.stdin.isatty() and sys.stderr.isatty():
        from handrail.frontends.cli.terminal import Terminal

        return Terminal(workspace=setting.workspace)
    from handrail.contract.approvals import Away

    return Elsewhere() if waits else Away()


class Elsewhere:
    """An :class:`~handrail.contract.approvals.Attendant` for somebody at another door: whatever is asked waits until they
    answer there."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        note(f"{request.id} waits: handrail approve {request.id}")
        raise await _never()

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        note(f"a question of session {session_id} waits: handrail approve")
        raise await _never()


async def _never() -> Exception:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


# Resuming a session: the choice of the session, and the agent that it belongs to.


@contextmanager
def reading(setting: Setting) -> Generator[tuple[SessionReader, LogReader]]:
    """What is kept of the workspace, whoever holds it.

    :raises NotMadeYet: where nothing was ever kept of it
    :raises StartError: where it cannot be read
    """
    from handrail.record.reading import LogReader
    from handrail.session.past import SessionReader
    from handrail.store.folders import locate
    from handrail.store.lease import Lease

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    with LogReader.at(folders.database) as log:
        holder = Lease.holder_of(folders)
        yield SessionReader(log.connection, None if holder is None else holder.token), log


def to_resume(setting: Setting, session_id: str) -> SessionFacts:
    """The session to go on with.

    :param session_id: ``""`` for the last one that nobody has open and in which something was said
    :raises UsageError: when there is none, or it cannot go on
    """
    from handrail.store.database.connection import NotMadeYet

    try:
        with reading(setting) as (reader, _):
            found = reader.get(session_id) if session_id else reader.latest()
            if found is None and session_id:
                raise unknown(reader, session_id)
    except NotMadeYet:
        found = None
    if found is None:
        raise click.UsageError("there is no session to go on with; handrail sessions lists those there are")
    if found.state == "closed":
        raise click.UsageError(f"session {session_id} was closed for good: nothing that was said in it is kept")
    if found.under:
        raise click.UsageError(
            f"session {session_id} is a sub-agent's and does not go on by itself; begin another with what was said in it: "
            f"handrail run --fork {session_id}"
        )
    if found.state == "open":
        raise click.UsageError(
            f"session {session_id} is open elsewhere; it goes on where it is, or when that has ended"
        )
    return found


def as_its_agent(setting: Setting, session_id: str) -> Setting:
    """The same options as the agent that a session is one of, which is known and need not be named once more.

    :raises UsageError: where another agent was named
    """
    from handrail.store.database.connection import NotMadeYet

    try:
        with reading(setting) as (reader, _):
            found = reader.get(session_id)
    except NotMadeYet:
        found = None
    if found is None:  # whoever opens it says so
        return setting
    if setting.agent not in (None, found.agent):
        raise click.UsageError(
            f"session {session_id} is one of the agent {found.agent!r}, not of {setting.agent!r}; leave --agent out"
        )
    return replace(setting, agent=found.agent)


def as_its_caller(setting: Setting, approval_id: str) -> Setting:
    """The same options as the agent whose call waits, or waited, under an id.

    :raises UsageError: where another agent was named
    """
    row = asked_as(setting, approval_id)
    return setting if row is None else as_its_agent(setting, row.request.session_id)


def asked_as(setting: Setting, approval_id: str) -> Approval | None:
    """What a person is or was asked under an id; None where nothing is known by it."""
    from handrail.store.database.connection import NotMadeYet
    from handrail.store.tables.approvals import ApprovalReader

    try:
        with reading(setting) as (_, log):
            return ApprovalReader(log.connection).get(approval_id)
    except NotMadeYet:
        return None


def unknown(reader: SessionReader, session_id: str) -> click.UsageError:
    from handrail.contract.tool.names import nearest

    near = nearest(session_id, [facts.id for facts in reader.all(limit=200)], 1)
    hint = f"did you mean {near[0]}?" if near else "handrail sessions lists those there are"
    return click.UsageError(f"there is no session {session_id[:80]!r}; {hint}")


# A note about records that a reader of the log may miss after a crash: they are in the journal, on their way into the log.


def say_what_is_missing(command: str, folders: Folders, reader: LogReader) -> None:
    """After a crash, what had just begun may not be in the log yet."""
    from sqlite3 import DatabaseError

    from handrail.contract.errors import StartError
    from handrail.record.log import noted
    from handrail.store.lease import holder_of

    if holder_of(folders) is not None:
        return
    try:
        missing = noted(reader.connection, folders.own)
    except (DatabaseError, OSError, StartError) as error:
        note(f"handrail {command}: {error}")
        return
    if missing:
        calls = ", ".join(dict.fromkeys(record.call_id for record in missing if record.call_id))
        note(
            f"handrail {command}: {len(missing)} records are noted and not in the log yet ({calls}); the process that made them was "
            "killed, and the next one to open the workspace writes them"
        )
