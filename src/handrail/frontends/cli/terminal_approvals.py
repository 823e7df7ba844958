"""The user at the terminal, who sees each call in full before it runs, and answers one question at a time.

The answers are read on the event loop, without a thread.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalChoice, ApprovalRequest
from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.services.file_services import FileService
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_arguments
from handrail.contract.text.text_encodings import decode_file_text, strip_byte_order_mark
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import (
    escape_invisible_characters,
    escape_to_one_line,
    print_prompt,
    print_stderr_block,
)

# The effect of an edit on the current file, for the user who approves it. Nothing is written.

MAX_PREVIEW_BYTES = 4 * 1024 * 1024
_EDITS = frozenset({"edit", "write", "file.patch"})


async def preview_edit_diff(request: ApprovalRequest, workspace: str) -> str | None:
    """Return the diff of an edit, the reason why it would fail now, or None for other calls.

    A long diff is cut, with the number of left-out lines. The request shows the arguments in full.
    """
    if request.tool_id == "apply_patch":
        return await _preview_patch(request.arguments.get("patch"), workspace)
    path = request.arguments.get("path")
    if request.tool_id not in _EDITS or not isinstance(path, str):
        return None
    try:
        before = await _read_current(path, workspace)
        return _edit_diff(request.tool_id, path, before, request.arguments)
    except HandrailError as error:
        return f"With the current file, this call would fail: {error}"
    except (KeyError, TypeError, ValueError):  # the user changed the arguments
        return None


def _open_files(workspace: str) -> FileService:
    """Return a service that finds files as the tools find them."""
    from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
    from handrail.runtime.files.session_roots import SessionRoots

    return RootedFiles(SessionRoots(workspace), SeenFileHashes(), lambda _capability, _target: None)


async def _preview_patch(patch: object, workspace: str) -> str | None:
    from handrail.tools.files.patch_plan import plan_patch
    from handrail.tools.files.patch_tool import format_patch_diffs

    if not isinstance(patch, str):
        return None
    try:
        plan = await plan_patch(patch, _open_files(workspace))
        return (
            await asyncio.to_thread(format_patch_diffs, plan) or "The patch is already applied. No file would change."
        )
    except HandrailError as error:
        return f"With the current files, this call would fail: {error}"


async def _read_current(path: str, workspace: str) -> bytes | None:
    """Return the content of a file, or None if it does not exist."""
    files = _open_files(workspace)
    try:
        await files.stat(path)
    except ToolError as error:
        if error.kind == "denied":
            raise
        return None
    found = await files.read_bytes(path, max_bytes=MAX_PREVIEW_BYTES + 1)
    if found.size > MAX_PREVIEW_BYTES:
        text = f"{path} has {found.size:,} bytes. Files over {MAX_PREVIEW_BYTES:,} bytes are not compared."
        raise ToolError(text, kind="limit")
    return found.data


def _edit_diff(tool_id: str, path: str, before: bytes | None, arguments: Mapping[str, Any]) -> str:
    from handrail.tools.files.lines_and_diffs import make_diff_of_texts
    from handrail.tools.files.text_changes import (
        adapt_content_to_original,
        apply_line_replacements,
        convert_patch_operations,
        replace_exact_text,
    )

    file = decode_file_text(before or b"")
    given = {key: strip_byte_order_mark(one, file.encoding) for key, one in arguments.items() if isinstance(one, str)}
    if tool_id == "write":
        after = given["content"] if before is None else adapt_content_to_original(file.text, given["content"])
    elif before is None:
        raise ToolError(
            f"The file {path} does not exist. Reject the call, or create the file first.", kind="invalid_input"
        )
    elif tool_id == "edit":
        replace_all = bool(arguments.get("replace_all", False))
        after = replace_exact_text(path, file.text, given["old"], given["new"], replace_all=replace_all).text
    else:
        after = apply_line_replacements(file.text, convert_patch_operations(file.text, arguments["operations"]))
    file.encoding.encode(after)
    shown = make_diff_of_texts(path, file.text, after, created=before is None).text
    return shown or "The file would not change."


_KEYS: dict[str, ApprovalChoice] = {
    **dict.fromkeys(("o", "once", "y", "yes"), "once"),
    **dict.fromkeys(("s", "session"), "session"),
    **dict.fromkeys(("p", "project"), "project"),
    **dict.fromkeys(("sw", "session-wider"), "session-wider"),
    **dict.fromkeys(("pw", "project-wider"), "project-wider"),
    **dict.fromkeys(("r", "reject", "n", "no"), "reject"),
    "never": "reject-always",
    "stop": "stop",
    "defer": "defer",
}
_WITH_A_MESSAGE: frozenset[ApprovalChoice] = frozenset({"reject", "reject-always", "stop"})
_MAX_LINE_BYTES = 64 * 1024
_MAX_SHOWN_FILES = 20
_MAX_SHOWN_CONCERNS = 12
_UNLIMITED = 1 << 30
"""Columns of a client that wraps lines itself."""


class TerminalInputClosed(Exception):
    """The input of the terminal has ended."""


class TerminalApprovalHandler:
    """The :class:`~handrail.contract.approval_requests.ApprovalHandler` on the terminal of this process.

    Prompts are written to stderr, and stdout is kept for results. Answers are read from stdin on the event loop, so a
    prompt ends at once if its call is stopped. Input from before a prompt is discarded, so that the user cannot approve an
    unseen call.
    """

    def __init__(
        self, input_fd: int | None = None, *, workspace: str | None = None, waiting: int = 0, asker: str = ""
    ) -> None:
        """Open the terminal.

        :param input_fd: the file descriptor for answers; None for stdin
        :param workspace: the workspace, to show edits as diffs; None shows no diffs
        :param waiting: the number of requests that will follow; 0 counts those that have arrived
        :param asker: who asks, if it is not a sub-agent; shown with each request
        """
        self.asker = asker
        self._waiting = waiting
        self._is_counted = bool(waiting)
        self._shown = 0
        self._workspace = workspace
        self._fd = sys.stdin.fileno() if input_fd is None else input_fd
        self._turn = asyncio.Lock()
        self._is_typing = False
        self._unread = b""

    @asynccontextmanager
    async def typing(self) -> AsyncGenerator[None]:
        """Show no request in the block, because the user types something else. A note tells of each that waits."""
        async with self._turn:
            self._is_typing = True
            try:
                yield
            finally:
                self._is_typing = False

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        if not self._is_counted:
            self._waiting += 1
        if self._is_typing:
            _print_lines(
                "", f"{escape_to_one_line(request.tool_id)} requires approval. Press Enter to see the request."
            )
        async with self._turn, self._enter_request_queue() as place:
            changes = None if self._workspace is None else await preview_edit_diff(request, self._workspace)
            self._forget_input()
            with suppress(OSError):
                view = TerminalRenderer(sys.stderr)
                view.write_line()
                print_approval_request(view, request, changes, place=place, asker=self.asker)
                view.write_line()
                _print_choices(view, request)
                sys.stderr.flush()
            try:
                return await self._read_decision(request)
            except TerminalInputClosed:
                _print_lines("", "Rejected: the input of the terminal has ended.")
                return ApprovalAnswer("reject", "The user did not answer: the input of the terminal has ended.")
            except asyncio.CancelledError:
                _print_lines("", f"  {request.id or 'The request'} no longer needs an answer here.")
                raise

    @asynccontextmanager
    async def _enter_request_queue(self) -> AsyncGenerator[str]:
        """Yield the place of the next request among those that wait, such as ``2 of 4``; "" for a single one."""
        self._shown += 1
        try:
            yield f"{self._shown} of {self._waiting}" if self._waiting > 1 else ""
        finally:
            if not self._is_counted and self._shown >= self._waiting:
                self._shown = self._waiting = 0

    async def _read_decision(self, request: ApprovalRequest) -> ApprovalAnswer:
        while True:
            word, _, message = (await self._read_line("> ")).strip().partition(" ")
            message = message.strip()
            choice = _KEYS.get(word.lower())
            if word.lower() in ("c", "change") and message:
                try:
                    return ApprovalAnswer("once", arguments=parse_changed_arguments(message))
                except ValueError as error:
                    _print_lines(f"  {error}")
                    continue
            if choice is not None and _is_offered(request, choice) and (not message or choice in _WITH_A_MESSAGE):
                return ApprovalAnswer(choice, message)
            _print_lines(f"  {_answer_hint(request)}")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        async with self._turn:
            self._forget_input()
            answers: list[list[str]] = []
            for question in questions:
                with suppress(OSError):
                    view = TerminalRenderer(sys.stderr)
                    view.write_line()
                    print_user_question(view, question)
                    sys.stderr.flush()
                try:
                    if (chosen := await self._read_choice(question)) is None:
                        return None
                    answers.append(chosen)
                except asyncio.CancelledError:
                    _print_lines("", "  The question no longer needs an answer here.")
                    raise
                except TerminalInputClosed:
                    _print_lines("", "Not answered: the input of the terminal has ended.")
                    ended = "The user did not answer: the input of the terminal has ended. Continue without the answer."
                    raise ToolError(ended, kind="unavailable") from None
            return answers

    async def _read_choice(self, question: UserQuestion) -> list[str] | None:
        while True:
            if not (text := (await self._read_line("> ")).strip()):
                _print_lines("  Type an answer, or :defer to defer it.")
                continue
            if text == ":defer":
                return None
            if (chosen := parse_question_answer(question, text)) is not None:
                return chosen
            _print_lines(f"  Type numbers from 1 to {len(question.options)}, or your own answer.")

    async def _read_line(self, ask: str) -> str:
        """Read one line of input, without its line end.

        :raises TerminalInputClosed: at the end of input
        """
        print_prompt(ask)
        loop = asyncio.get_running_loop()
        while b"\n" not in self._unread:
            readable: asyncio.Future[None] = loop.create_future()

            def ready(waiting: asyncio.Future[None] = readable) -> None:
                if not waiting.done():
                    waiting.set_result(None)

            loop.add_reader(self._fd, ready)
            try:
                await readable
            finally:
                loop.remove_reader(self._fd)
            try:
                read = os.read(self._fd, 4096)
            except OSError:  # the terminal was closed
                read = b""
            if not read or len(self._unread) > _MAX_LINE_BYTES:
                raise TerminalInputClosed
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _forget_input(self) -> None:
        self._unread = b""
        try:
            import termios
        except ImportError:
            return  # Windows cannot discard input
        with suppress(termios.error):  # stdin is not a POSIX terminal
            termios.tcflush(self._fd, termios.TCIFLUSH)


def _answer_hint(request: ApprovalRequest) -> str:
    rules = "s, p, " * (request.suggested_rule is not None) + "sw, pw, " * (request.suggested_wider_rule is not None)
    never = "never, " * (request.suggested_deny is not None)
    return f"Type o, {rules}c and JSON, r, {never}stop or defer. Text after r is sent to the model."


def _is_offered(request: ApprovalRequest, choice: ApprovalChoice) -> bool:
    if request.is_shared and choice in ("session", "session-wider"):
        return False
    if choice in ("session-wider", "project-wider"):
        return request.suggested_wider_rule is not None
    if choice in ("session", "project"):
        return request.suggested_rule is not None
    return choice != "reject-always" or request.suggested_deny is not None


def print_approval_request(
    view: TerminalRenderer, request: ApprovalRequest, changes: str | None = None, *, place: str = "", asker: str = ""
) -> None:
    """Print the whole request: the tool, who asks, why, every argument, and the diff of an edit.

    :param place: the place among several requests, such as ``2 of 4``
    :param asker: who asks, if it is not a sub-agent
    """
    heading = [(f"  {place}", "bold cyan")] if place else []
    heading += [(f"  {request.id}", "dim")] if request.id else []
    view.print_text((f"{escape_to_one_line(request.tool_id)} requires approval", "bold yellow"), *heading)
    if who := request.origin or asker:
        view.print_text((f"asked by {escape_to_one_line(who)}", "dim"), indent="  ", further="    ")
    concerns = request.concerns or (request.reason,)
    for number, concern in enumerate(concerns[:_MAX_SHOWN_CONCERNS]):
        mark = "" if len(concerns) == 1 else "  " if number else "! "
        view.print_text((mark, "bold red"), escape_invisible_characters(concern), indent="  ", further="      ")
    if (more := len(concerns) - _MAX_SHOWN_CONCERNS) > 0:
        view.print_text(f"and {more:,} more parts", indent="    ")
    for name, value in request.arguments.items():
        _print_argument(view, _format_argument_name(name), value)
    print_program_files(view, request)
    if changes is not None:
        view.print_text("changes to the current file:", indent="  ")
        view.print_diff(escape_invisible_characters(changes))


def format_approval_request_lines(request: ApprovalRequest, changes: str | None = None) -> list[str]:
    """Return the whole request as lines, for a client that wraps them itself."""
    return _written_lines(lambda view: print_approval_request(view, request, changes))


def format_program_files(request: ApprovalRequest) -> list[str]:
    """Return the files that the call runs as lines; see :func:`print_program_files`."""
    return _written_lines(lambda view: print_program_files(view, request))


def _written_lines(write: Callable[[TerminalRenderer], None]) -> list[str]:
    written = io.StringIO()
    write(TerminalRenderer(written, width=_UNLIMITED))
    return written.getvalue().splitlines()


def print_program_files(view: TerminalRenderer, request: ApprovalRequest) -> None:
    """Print the files that the call runs, up to a limit, and the effect of a stored rule on them."""
    if not request.files:
        return
    view.print_text("may run these files of the workspace, only with their current content:", indent="  ")
    for path, mark in [*request.files.items()][:_MAX_SHOWN_FILES]:
        large = "" if not mark.startswith("identity:") else "  (large: checked by size and times, not by content)"
        view.print_block(f"{escape_to_one_line(path)}{large}")
    if (more := len(request.files) - _MAX_SHOWN_FILES) > 0:
        view.print_block(f"and {more} more")
    if request.suggested_rule is not None or request.suggested_wider_rule is not None:
        view.print_text("a stored rule applies to the command, even if these files change later", indent="  ")


def _print_choices(view: TerminalRenderer, request: ApprovalRequest) -> None:
    """Print the keys, the narrowest answer first."""
    choices = [("o", "allow once, with exactly these arguments")]
    if (rule := request.suggested_rule) is not None:
        if not request.is_shared:
            choices.append(("s", f"allow in this session: stores the rule  {escape_to_one_line(rule)}"))
        choices.append(("p", f"allow in every session: stores the rule  {escape_to_one_line(rule)}"))
    if (wider := request.suggested_wider_rule) is not None:
        keys = "pw" if request.is_shared else "sw, pw"
        choices.append((keys, f"the same with a wider rule: stores the rule  {escape_to_one_line(wider)}"))
    choices.append(("c JSON", "allow once, with these arguments instead"))
    choices.append(("r TEXT", "reject; the model gets TEXT"))
    if request.suggested_deny is not None:
        choices.append(
            ("never", f"reject in every session: stores the rule  {escape_to_one_line(request.suggested_deny)}")
        )
    choices.append(("stop", "reject, and stop the session's work"))
    choices.append(("defer", "answer later: handrail approve, in any terminal"))
    for key, effect in choices:
        view.print_text((key.ljust(6), "bold"), f"  {effect}", indent="  ", further=" " * 12)


def parse_changed_arguments(text: str | bytes) -> dict[str, Any]:
    """Parse arguments that the user typed.

    :raises ValueError: if they are not a JSON object; the text is a full sentence
    """
    try:
        return parse_arguments(text)
    except InvalidJsonTextError as error:
        raise ValueError(f"Invalid arguments: {error}") from None


def _format_argument_name(name: str) -> str:
    """Return the name on one line, in quotes if it is not a single word, so that none looks like a choice."""
    shown = escape_to_one_line(name)
    return shown if len(shown.split()) == 1 and shown == shown.strip() else f'"{shown}"'


def _print_argument(view: TerminalRenderer, name: str, value: Any) -> None:
    """Print an argument in full.

    Each of several lines is marked, so that none looks like the prompt.
    """
    if isinstance(value, str) and "\n" in value:
        view.print_text((f"{name}:", "bold"), f" {value.count(chr(10)) + 1:,} lines", indent="  ")
        view.print_block(escape_invisible_characters(value))
        return
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    style = "bold" if name == "command" else ""
    view.print_text((f"{name}: ", "bold"), (escape_invisible_characters(text), style), indent="  ", further="    ")


def print_user_question(view: TerminalRenderer, question: UserQuestion, *, indent: str = "") -> None:
    head = f"{escape_to_one_line(question.header)}: " if question.header else ""
    first, *further = escape_invisible_characters(question.question).split("\n")
    view.print_text((f"{head}{first}", "bold"), indent=indent)
    for line in further:
        view.print_block(line, mark=f"{indent}│ ")
    for number, option in enumerate(question.options, 1):
        about = f"  {escape_to_one_line(option.description)}" if option.description else ""
        view.print_text(
            (str(number), "bold"), f"  {escape_to_one_line(option.label)}", (about, "dim"), indent=f"{indent}  "
        )
    if question.options:
        instruction = "Type numbers with commas, or text." if question.multi_select else "Type a number, or text."
        view.print_text((instruction, "dim"), indent=f"{indent}  ")


def parse_question_answer(question: UserQuestion, text: str) -> list[str] | None:
    """Return the answer that a text gives: the labels of the numbered options, or the text itself.

    :return: None if a number has no option
    """
    numbers = _parse_numbers(text.split(",") if question.multi_select else [text]) if question.options else None
    if numbers is None:
        return [text]
    if not all(1 <= number <= len(question.options) for number in numbers):
        return None
    return [question.options[number - 1].label for number in dict.fromkeys(numbers)]


def _print_lines(*lines: str) -> None:
    print_stderr_block("\n".join(lines))


def _parse_numbers(parts: Sequence[str]) -> list[int] | None:
    """Return the parts as option numbers, or None if a part is not a number."""
    bare = [part.strip() for part in parts]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in bare):
        return None
    return [int(part) for part in bare]
