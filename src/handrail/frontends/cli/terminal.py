"""The person at the terminal, who sees a call whole before it runs and answers one question at a time.

Nothing waits for the person in a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest, Choice
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import HandrailError, ToolError
from handrail.frontends.cli.show import note_block, one_line, prompt, spelled_out

# The effect of an edit on the file as it is now, for the person who approves it. Nothing is written.

MAX_PREVIEW_BYTES = 4 * 1024 * 1024
_EDITS = frozenset({"edit", "write", "file.patch"})


async def preview(request: ApprovalRequest, workspace: str) -> str | None:
    """A unified diff, or a sentence on why the call would fail as things are; None for calls that are no edits.

    The diff shows at most so many lines and says how many it leaves out: the arguments beside it are whole.
    """
    path = request.arguments.get("path")
    if request.tool_id not in _EDITS or not isinstance(path, str):
        return None
    try:
        before = await _content(path, workspace)
        return _difference(request.tool_id, path, before, request.arguments)
    except HandrailError as error:
        return f"as the file is now, this would fail: {error}"
    except (KeyError, TypeError, ValueError):  # arguments that were changed by hand since
        return None


async def _content(path: str, workspace: str) -> bytes | None:
    """What is in the file, found as the tools find it; None where there is none."""
    from handrail.runtime.files.files import RootedFiles, SeenFiles
    from handrail.runtime.files.roots import Roots

    files = RootedFiles(Roots(workspace), SeenFiles(), lambda _capability, _target: None)
    try:
        await files.stat(path)
    except ToolError as error:
        if error.kind == "denied":
            raise
        return None
    found = await files.read_bytes(path, max_bytes=MAX_PREVIEW_BYTES + 1)
    if found.size > MAX_PREVIEW_BYTES:
        raise ToolError(f"{path} has {found.size:,} bytes, too many to compare here", kind="limit")
    return found.data


def _difference(tool_id: str, path: str, before: bytes | None, arguments: Mapping[str, Any]) -> str:
    from handrail.tools.files.files import blocks_of_operations, replaced
    from handrail.tools.files.text import blocks_between, blocks_of_spans, decoded, lines_of, unified

    if tool_id == "write":
        lines = lines_of(decoded(before or b""))
        blocks = blocks_between(lines, lines_of(arguments["content"]))
        return unified(path, lines, blocks, created=before is None).text or "the file would stay as it is"
    if before is None:
        raise ToolError(f"there is no file {path}", kind="invalid_input")
    text = decoded(before)
    if tool_id == "edit":
        replace_all = bool(arguments.get("replace_all", False))
        done = replaced(path, text, arguments["old"], arguments["new"], replace_all=replace_all)
        if done.spans is None:
            return unified(path, lines_of(text), blocks_between(lines_of(text), lines_of(done.text))).text
        return unified(path, lines_of(text), blocks_of_spans(text, done.spans)).text
    return unified(path, lines_of(text), blocks_of_operations(text, arguments["operations"])).text


_KEYS: dict[str, Choice] = {
    **dict.fromkeys(("o", "once", "y", "yes"), "once"),
    **dict.fromkeys(("s", "session"), "session"),
    **dict.fromkeys(("p", "project"), "project"),
    **dict.fromkeys(("sw", "session-wider"), "session-wider"),
    **dict.fromkeys(("pw", "project-wider"), "project-wider"),
    **dict.fromkeys(("r", "reject", "n", "no"), "reject"),
    "never": "reject-always",
    "stop": "stop",
    "later": "later",
}
_WITH_A_MESSAGE: frozenset[Choice] = frozenset({"reject", "reject-always", "stop"})
_MOST_LINE_BYTES = 64 * 1024
_MOST_SHOWN_FILES = 20


class Closed(Exception):
    """The terminal's input has ended: nobody answers any more."""


class Terminal:
    """An :class:`~handrail.contract.approvals.Attendant` on the terminal of this process.

    Prompts are written to stderr, so that stdout stays for results. Answers are read from stdin on the event
    loop: a prompt ends at once when its call is stopped. What was typed before a prompt appeared is thrown away,
    so that nobody approves what they had not seen.
    """

    def __init__(self, input_fd: int | None = None, *, workspace: str | None = None) -> None:
        """
        :param input_fd: where answers are read; None for stdin
        :param workspace: where edits are compared with the file as it is now; None leaves the comparison out
        """
        self._workspace = workspace
        self._fd = sys.stdin.fileno() if input_fd is None else input_fd
        self._turn = asyncio.Lock()
        self._kept = b""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        async with self._turn:
            changes = None if self._workspace is None else await preview(request, self._workspace)
            self._forget_input()
            _write("", *request_lines(request, changes), "", *_choice_lines(request))
            try:
                return await self._decided(request)
            except Closed:
                _write("", "rejected: the terminal's input has ended")
                return ApprovalAnswer("reject", "nobody answered: the terminal's input has ended")
            except asyncio.CancelledError:
                _write("", f"  {request.id or 'this'} is no longer asked here")
                raise

    async def _decided(self, request: ApprovalRequest) -> ApprovalAnswer:
        while True:
            word, _, message = (await self._line("> ")).strip().partition(" ")
            message = message.strip()
            choice = _KEYS.get(word.lower())
            if word.lower() in ("c", "change") and message:
                try:
                    return ApprovalAnswer("once", arguments=changed_arguments(message))
                except ValueError as error:
                    _write(f"  {error}")
                    continue
            if choice is not None and _offered(request, choice) and (not message or choice in _WITH_A_MESSAGE):
                return ApprovalAnswer(choice, message)
            _write(f"  {_hint(request)}")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        async with self._turn:
            self._forget_input()
            answers: list[list[str]] = []
            for question in questions:
                _write("", *question_lines(question))
                try:
                    chosen = await self._chosen(question)
                    if chosen is None:
                        return None
                    answers.append(chosen)
                except asyncio.CancelledError:
                    _write("", "  this is no longer asked here")
                    raise
                except Closed:
                    _write("", "not answered: the terminal's input has ended")
                    raise ToolError("nobody answered: the terminal's input has ended", kind="unavailable") from None
            return answers

    async def _chosen(self, question: Question) -> list[str] | None:
        while True:
            text = (await self._line("> ")).strip()
            if not text:
                _write("  type an answer, or :later to leave it waiting")
                continue
            if text == ":later":
                return None
            if not question.options:
                return [text]
            numbers = _numbers_in(text.split(",") if question.multi_select else [text])
            if numbers is None:
                return [text]
            if all(1 <= number <= len(question.options) for number in numbers):
                return [question.options[number - 1].label for number in dict.fromkeys(numbers)]
            _write(f"  there are 1 to {len(question.options)}; or type an answer of your own")

    async def _line(self, ask: str) -> str:
        """One line of input, without its end.

        :raises Closed: at the end of input
        """
        prompt(ask)
        loop = asyncio.get_running_loop()
        while b"\n" not in self._kept:
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
            except OSError:  # a terminal that was hung up
                read = b""
            if not read or len(self._kept) > _MOST_LINE_BYTES:
                raise Closed
            self._kept += read
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode(errors="replace")

    def _forget_input(self) -> None:
        self._kept = b""
        try:
            import termios
        except ImportError:
            return  # Windows: nothing can be dropped, so the prompt's own end of line has to do
        with suppress(termios.error):  # stdin is no terminal of this kind
            termios.tcflush(self._fd, termios.TCIFLUSH)


def _hint(request: ApprovalRequest) -> str:
    rules = "s, p, " * (request.always is not None) + "sw, pw, " * (request.wider is not None)
    never = "never, " * (request.never is not None)
    return f"type o, {rules}c and JSON, r, {never}stop or later; after r what the model should know"


def _offered(request: ApprovalRequest, choice: Choice) -> bool:
    if request.shared and choice in ("session", "session-wider"):
        return False
    if choice in ("session-wider", "project-wider"):
        return request.wider is not None
    if choice in ("session", "project"):
        return request.always is not None
    return choice != "reject-always" or request.never is not None


def request_lines(request: ApprovalRequest, changes: str | None = None) -> list[str]:
    """A request, whole: who asks, why, every argument, and what an edit would change."""
    name = f"{request.id}  " if request.id else ""
    lines = [
        f"{name}{one_line(request.tool_id)} asks to run"
        + (f", for the {one_line(request.origin)}" * bool(request.origin)),
        *(f"  {part}" for part in spelled_out(request.reason).split("\n")),
    ]
    for name, value in request.arguments.items():
        lines += _argument_lines(one_line(name), value)
    lines += file_lines(request)
    if changes is not None:
        lines += ["  as the file is now:", *(f"  │ {part}" for part in spelled_out(changes).split("\n"))]
    return lines


def file_lines(request: ApprovalRequest) -> list[str]:
    """The files that the call runs, a bounded number of them, and what a stored rule means for them."""
    if not request.files:
        return []
    lines = ["  runs, or may run, these files of the workspace, and only as they are now:"]
    for path, mark in [*request.files.items()][:_MOST_SHOWN_FILES]:
        large = "" if not mark.startswith("identity:") else "  (large: known by its size and times, not by its content)"
        lines.append(f"  │ {one_line(path)}{large}")
    if (more := len(request.files) - _MOST_SHOWN_FILES) > 0:
        lines.append(f"  │ and {more} more")
    if request.always is not None or request.wider is not None:
        lines.append("  a stored rule is about the command: it holds whatever these files say later")
    return lines


def _choice_lines(request: ApprovalRequest) -> list[str]:
    lines = ["  o  once: this call with exactly these arguments"]
    if request.always is not None:
        rule = one_line(request.always)
        if not request.shared:
            lines.append(f"  s  for this session: stores the rule  {rule}")
        lines.append(f"  p  for this project, every session from now on: stores the rule  {rule}")
    if request.wider is not None:
        lines.append(f"  sw, pw  the same for more like it: stores the rule  {one_line(request.wider)}")
    lines.append("  c  and JSON: once, with these arguments instead")
    lines.append("  r  reject; text after it is told to the model")
    if request.never is not None:
        lines.append(f"  never  reject, in every session from now on: stores the rule  {one_line(request.never)}")
    lines.append("  stop  reject, and end the session's work")
    lines.append("  later  leave it waiting; handrail approve answers it from anywhere")
    return lines


def changed_arguments(text: str | bytes) -> dict[str, Any]:
    """Arguments that a person typed.

    :raises ValueError: in a sentence, when they are no JSON object
    """
    from handrail.contract.text.json import ArgumentText, parse_arguments

    try:
        return parse_arguments(text)
    except ArgumentText as error:
        raise ValueError(f"these are no arguments: {error}") from None


def _argument_lines(name: str, value: Any) -> list[str]:
    """An argument, whole. Text of several lines is set off line by line, so that it cannot look like the prompt."""
    if isinstance(value, str) and "\n" in value:
        parts = spelled_out(value).split("\n")
        return [f"  {name}: {len(parts)} lines", *(f"  │ {part}" for part in parts)]
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return [f"  {name}: {spelled_out(text)}"]


def question_lines(question: Question) -> list[str]:
    head = f"{one_line(question.header)}: " if question.header else ""
    lines = [
        line if number == 0 else f"│ {line}"
        for number, line in enumerate(f"{head}{spelled_out(question.question)}".split("\n"))
    ]
    for number, option in enumerate(question.options, 1):
        about = f"  {one_line(option.description)}" if option.description else ""
        lines.append(f"  {number}  {one_line(option.label)}{about}")
    if question.options:
        lines.append("  numbers separated by commas, or text" if question.multi_select else "  a number, or text")
    return lines


def _write(*lines: str) -> None:
    note_block("\n".join(lines))


def _numbers_in(parts: Sequence[str]) -> list[int] | None:
    """The numbers of options; None where a part is none."""
    bare = [part.strip() for part in parts]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in bare):
        return None
    return [int(part) for part in bare]
