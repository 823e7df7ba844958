"""``handrail chat``: a conversation with a model in the terminal, with approvals inline."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import click

from handrail.contract.errors import HandrailError
from handrail.frontends.cli.command_group import INTERRUPTED, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, ModelOptions, add_call_options, add_model_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    apply_session_agent,
    choose_approval_handler,
    find_resumable_session,
    open_configured_kernel,
    run_on_event_loop,
)
from handrail.frontends.cli.renderer import TerminalRenderer, format_undo_report
from handrail.frontends.cli.run_view import JsonLinesRunView, TerminalRunView
from handrail.frontends.cli.shell_completion import resumable_ids
from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler
from handrail.frontends.cli.terminal_output import escape_to_one_line, print_stderr_note, read_line_with_editing

if TYPE_CHECKING:
    from handrail.agent.agent_loop import Agent
    from handrail.contract.session_protocols import Session
    from handrail.kernel.kernel_interface import Kernel

PROMPT = "> "
_CONTINUED = "… "
HELP = {
    "/help": "show these commands",
    "/mode [MODE]": "show or set the permission mode: plan, ask, accept-edits or auto",
    "/usage": "show the tokens of this session, and the cost if the provider reports it",
    "/undo": "undo what the last call of this session changed in the workspace",
    "/compact": "replace older messages with an outline or a summary",
    "/exit": "leave; handrail chat --resume continues the session",
}


@click.command("chat")
@click.argument("message", required=False)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    shell_complete=resumable_ids,
    help="Session to resume. Without ID: the last one that is not open.",
)
@add_model_options(" for each message")
@add_call_options
def command(setting: CommandOptions, message: str | None, resume: str | None, asked: ModelOptions) -> int:
    """Talk with a model in the terminal.

    Each of your messages is a run of the agent: its text, its calls and their results are shown as in `handrail run`. If a
    call requires approval, you are asked in place. MESSAGE is your first message. End a line with a backslash to continue
    it. A text that you paste is one message. /help shows further commands.

    Ctrl-C interrupts the running turn, and a second one leaves. The conversation is saved: handrail chat --resume continues
    it. Without a terminal, each line of stdin is a message.
    """
    if resume is not None:
        resume = find_resumable_session(setting, resume).id
        setting = apply_session_agent(setting, resume)
    return run_on_event_loop(lambda interruption: _chat(setting, message, resume, asked, interruption))


async def _chat(
    setting: CommandOptions,
    message: str | None,
    resume: str | None,
    asked: ModelOptions,
    interruption: InterruptHandler,
) -> int:
    from handrail.agent.agent_loop import Agent
    from handrail.agent.providers import MODEL_FORMS

    async with AsyncExitStack() as at_the_end, open_configured_kernel(setting) as kernel:
        manifest = kernel.default_agent
        missing = f"No model is set. Pass --model {MODEL_FORMS}, or set HANDRAIL_MODEL or the agent's model."
        model = asked.open_model_for(manifest, missing)
        at_the_end.push_async_callback(model.aclose)
        people = choose_approval_handler(setting)
        session = await kernel.session(resume, approval_handler=people)
        budget = asked.make_run_budget(manifest)
        agent = Agent(session, model, workspace=session.workdir, instructions=manifest.prompt, budget=budget)
        view = JsonLinesRunView() if setting.json else TerminalRunView(None)
        view.receive_session_opened(session.id)
        reader = StdinMessageReader(people if isinstance(people, TerminalApprovalHandler) else None)
        chat = ChatConversation(kernel, session, agent, view, reader, interruption)
        if not setting.json:
            chat.introduce(model.name, resumed=resume is not None)
        async with _restored_terminal():
            code = await chat.hold(message)
        interruption.stop = None
        await session.suspend()
    if not setting.json:
        print_stderr_note(f"to resume: handrail chat --resume {session.id}{asked.resume_command_arguments}")
    interruption.is_interrupted = code == INTERRUPTED
    return code


class ChatConversation:
    """One conversation: messages in turn with runs of the agent."""

    def __init__(
        self,
        kernel: Kernel,
        session: Session,
        agent: Agent,
        view: JsonLinesRunView | TerminalRunView,
        reader: StdinMessageReader,
        interruption: InterruptHandler,
    ) -> None:
        self._kernel = kernel
        self._session = session
        self._agent = agent
        self._view = view
        self._reader = reader
        self._interruption = interruption
        self._has_ended = False
        self._kept_calls: set[str] = set()
        """The calls that could not be undone since the last message. A further undo skips them."""

    def introduce(self, model: str, *, resumed: bool) -> None:
        """Print what the user talks with."""
        view = TerminalRenderer(sys.stderr)
        introduction = (
            f"  {model}, mode {self._session.mode}, session {self._session.id}{' (resumed)' if resumed else ''}"
        )
        view.print_text(("handrail chat", "bold"), (introduction, "dim"), further="  ")
        view.print_text(("/help shows the commands. Ctrl-C interrupts a turn, Ctrl-D leaves.", "dim"))
        sys.stderr.flush()

    async def hold(self, message: str | None) -> int:
        """Read messages and answer them until the user leaves, and return the exit code."""
        if await self._agent.has_unanswered():
            await self._answer(None)
        warned = False
        while not self._has_ended:
            if message is None:
                self._interruption.stop = self._reader.interrupt
                message = await self._reader.read()
                self._interruption.stop = None
                if message is None:
                    if self._reader.has_ended or warned:
                        return INTERRUPTED if self._reader.is_interrupted else OUTPUT
                    warned, self._interruption.is_interrupted = True, False
                    print_stderr_note("Press Ctrl-C again to leave, or type a message.")
                    continue
            text, message, warned = message.strip(), None, False
            if text.startswith("/") and not text.startswith("//"):
                await self._run_command(text)
            elif text:
                await self._answer(text.removeprefix("/") if text.startswith("//") else text)
            if self._session.is_closed:
                print_stderr_note("The session was stopped. Resume it to continue.")
                break
        return OUTPUT

    async def _answer(self, text: str | None) -> None:
        """Run the agent with a message. An interruption ends the run, and the conversation continues."""
        self._kept_calls.clear()
        self._interruption.stop = self._agent.cancel
        async with aclosing(self._agent.run(text)) as events:
            async for event in events:
                self._view.show(event)
        self._interruption.stop = None
        self._interruption.is_interrupted = False

    async def _run_command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        try:
            if word == "/help":
                self._print_help()
            elif word == "/mode":
                self._set_mode(rest.strip())
            elif word == "/usage":
                await self._print_usage()
            elif word == "/undo":
                await self._undo_last_call()
            elif word == "/compact":
                self._view.show(await self._agent.compact())
            elif word in ("/exit", "/quit"):
                self._has_ended = True
            else:
                known = ", ".join(name.partition(" ")[0] for name in HELP)
                print_stderr_note(
                    f"Unknown command {escape_to_one_line(word, 40)}. The commands are: {known}. To send it as text: /{text[:40]}"
                )
        except HandrailError as error:
            print_stderr_note(str(error))

    def _print_help(self) -> None:
        view = TerminalRenderer(sys.stderr)
        widest = max(map(len, HELP))
        for name, effect in HELP.items():
            view.print_text((name.ljust(widest), "bold"), f"  {effect}", indent="  ", further=" " * (widest + 4))
        help_line = "End a line with \\ to continue it. Pasted lines are one message. // begins a message with a slash."
        view.print_text((help_line, "dim"), indent="  ", further="  ")
        sys.stderr.flush()

    def _set_mode(self, mode: str) -> None:
        if mode:
            self._session.set_mode(mode)
            print_stderr_note(f"mode {mode}, for this session")
        else:
            print_stderr_note(
                f"mode {self._session.mode}. Pass a mode: /mode plan, ask, accept-edits or auto. `handrail modes` explains them."
            )

    async def _undo_last_call(self) -> None:
        in_place = await self._session.undo(dry_run=True)
        if not (left := [one for one in in_place.calls if one not in self._kept_calls]):
            print_stderr_note(
                f"Nothing more to undo. The changes of {', '.join(in_place.calls[-3:])} have newer versions, or are not known. "
                f"`handrail undo {in_place.calls[-1]} --overwrite` also undoes files that changed since."
            )
            return
        report = await self._session.undo(left[-1])
        if not report.is_complete:
            self._kept_calls.add(left[-1])
        for line in format_undo_report(report):
            print_stderr_note(escape_to_one_line(line))
        if report.id:
            print_stderr_note(f"To undo this: handrail undo {report.id}")

    async def _print_usage(self) -> None:
        await self._kernel.log.flush()
        used = self._kernel.log.reader.read_session_model_usage(self._session.id)
        for one in used:
            print_stderr_note(str(one))
        if not used:
            print_stderr_note("No model request was made yet.")


class StdinMessageReader:
    """A reader of the user's messages from stdin.

    On a terminal, Python's readline edits the line and keeps a history, in a thread that does not stop the event loop. Elsewhere,
    lines are read as they are.

    :param terminal: the handler of approvals on the same terminal; it waits while a message is typed
    """

    def __init__(self, terminal: TerminalApprovalHandler | None) -> None:
        self._terminal = terminal
        self._is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
        self._answered: asyncio.Future[str | None] | None = None
        self._line: asyncio.Future[str | None] | None = None
        self._is_waiting_again = False
        """Whether the prompt was interrupted, and its line is still being edited."""
        self.has_ended = False
        """Whether no further message will come."""
        self.is_interrupted = False
        """Whether the user interrupted the last prompt."""

    def interrupt(self, reason: Literal["user", "shutdown"]) -> None:
        """End the wait for a message."""
        self.is_interrupted = True
        self.has_ended = self.has_ended or reason == "shutdown" or self._is_waiting_again
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    async def read(self) -> str | None:
        """Return the next message; None if the user interrupted the prompt or the input has ended."""
        lines: list[str] = []
        self.is_interrupted = False
        async with self._claim_terminal():
            while True:
                if (line := await self._read_line(_CONTINUED if lines else PROMPT)) is None:
                    return None
                if line.endswith("\\"):
                    lines.append(line[:-1])
                    continue
                return "\n".join([*lines, line])

    @asynccontextmanager
    async def _claim_terminal(self) -> AsyncGenerator[None]:
        """Keep approval requests away from the terminal while a message is typed."""
        if self._terminal is None:
            yield
            return
        async with self._terminal.typing():
            yield

    async def _read_line(self, prompt: str) -> str | None:
        loop = asyncio.get_running_loop()
        if (coming := self._line) is None or not self._is_waiting_again:
            coming = self._line = loop.create_future()
            target = self._read_edited if self._is_terminal else self._read_plain
            threading.Thread(target=target, args=(prompt, loop, coming), daemon=True).start()
        self._answered = loop.create_future()
        coming.add_done_callback(self._take_line)
        line = await self._answered
        self._is_waiting_again = not coming.done()
        self.has_ended = self.has_ended or (coming.done() and line is None)
        return line

    def _take_line(self, line: asyncio.Future[str | None]) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(line.result())

    @staticmethod
    def _read_edited(prompt: str, loop: asyncio.AbstractEventLoop, line: asyncio.Future[str | None]) -> None:
        """Read one line with line editing, in a thread."""
        _deliver(lambda: read_line_with_editing(prompt), loop, line)

    @staticmethod
    def _read_plain(prompt: str, loop: asyncio.AbstractEventLoop, line: asyncio.Future[str | None]) -> None:
        """Read one line of a pipe or a file, in a thread."""

        def read() -> str:
            if not (text := sys.stdin.readline()):
                raise EOFError
            return text.removesuffix("\n")

        _deliver(read, loop, line)


def _deliver(read: Callable[[], str], loop: asyncio.AbstractEventLoop, line: asyncio.Future[str | None]) -> None:
    """Read a line and give it to the event loop; None at the end of the input."""
    text: str | None = None
    with suppress(EOFError, OSError, ValueError):
        text = read().encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def take() -> None:
        if not line.done():
            line.set_result(text)

    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(take)


@asynccontextmanager
async def _restored_terminal() -> AsyncGenerator[None]:
    """Restore the modes of the terminal afterwards: a line that is still edited has changed them."""
    before: Any = None
    with suppress(Exception):  # no POSIX terminal
        import termios

        before = termios.tcgetattr(sys.stdin.fileno())
    try:
        yield
    finally:
        if before is not None:
            import termios

            with suppress(termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)
