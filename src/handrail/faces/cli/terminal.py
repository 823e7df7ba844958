"""The person at the terminal: shown a call whole before it runs, asked one thing at a time, never waited for in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.people import ApprovalAnswer, ApprovalRequest
from handrail.contract.runtime import Question
from handrail.faces.cli.show import spelled_out

_ONCE = ("o", "once", "y", "yes")
_SESSION = ("s", "session")
_REJECT = ("r", "reject", "n", "no")
_MOST_LINE_BYTES = 64 * 1024


class Closed(Exception):
    """The terminal's input has ended: nobody answers any more."""


class Terminal:
    """An :class:`~handrail.contract.people.Attendant` on the terminal of this process.

    Prompts are written to stderr, so that stdout stays for results. Answers are read from stdin on the event
    loop: a prompt ends at once when its call is stopped. What was typed before a prompt appeared is thrown away,
    so that nobody approves what they had not seen.
    """

    def __init__(self, input_fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if input_fd is None else input_fd
        self._turn = asyncio.Lock()
        self._kept = b""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        async with self._turn:
            self._forget_input()
            _write("", *_request_lines(request))
            while True:
                try:
                    answer = (await self._line("> ")).strip()
                except Closed:
                    _write("", "rejected: the terminal's input has ended")
                    return ApprovalAnswer("reject", "nobody answered: the terminal's input has ended")
                word, _, message = answer.partition(" ")
                word = word.lower()
                if word in _ONCE and not message:
                    return ApprovalAnswer("once")
                if word in _SESSION and not message and request.always is not None:
                    return ApprovalAnswer("session")
                if word in _REJECT:
                    return ApprovalAnswer("reject", message.strip())
                _write(
                    "  type o, s or r, and after r what the model should know" if request.always else "  type o or r"
                )

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]]:
        async with self._turn:
            self._forget_input()
            answers: list[list[str]] = []
            for question in questions:
                _write("", *_question_lines(question))
                try:
                    answers.append(await self._chosen(question))
                except Closed:
                    _write("", "not answered: the terminal's input has ended")
                    raise ToolError("nobody answered: the terminal's input has ended", kind="unavailable") from None
            return answers

    async def _chosen(self, question: Question) -> list[str]:
        while True:
            text = (await self._line("> ")).strip()
            if not text:
                _write("  type an answer")
                continue
            if not question.options:
                return [text]
            parts = [part.strip() for part in text.split(",")] if question.multi_select else [text]
            numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 4]
            if len(numbers) == len(parts) and all(1 <= number <= len(question.options) for number in numbers):
                return [question.options[number - 1].label for number in dict.fromkeys(numbers)]
            if len(numbers) == len(parts):
                _write(f"  there are 1 to {len(question.options)}; or type an answer of your own")
                continue
            return [text]

    async def _line(self, prompt: str) -> str:
        """One line of input, without its end.

        :raises Closed: at the end of input
        """
        sys.stderr.write(prompt)
        sys.stderr.flush()
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


def _request_lines(request: ApprovalRequest) -> list[str]:
    lines = [
        f"{spelled_out(request.tool_id)} asks to run",
        *(f"  {part}" for part in spelled_out(request.reason).split("\n")),
    ]
    for name, value in request.arguments.items():
        lines += _argument_lines(_one_line(name), value)
    lines += ["", "  o  once: this call with exactly these arguments"]
    if request.always is not None:
        lines.append(f"  s  for this session: stores the rule  {spelled_out(request.always)}")
    lines.append("  r  reject; text after it is told to the model")
    return lines


def _argument_lines(name: str, value: Any) -> list[str]:
    """An argument, whole. Text of several lines is set off line by line, so that it cannot look like the prompt."""
    if isinstance(value, str) and "\n" in value:
        parts = spelled_out(value).split("\n")
        return [f"  {name}: {len(parts)} lines", *(f"  │ {part}" for part in parts)]
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return [f"  {name}: {spelled_out(text)}"]


def _question_lines(question: Question) -> list[str]:
    head = f"{spelled_out(question.header)}: " if question.header else ""
    lines = [
        line if number == 0 else f"│ {line}"
        for number, line in enumerate(f"{head}{spelled_out(question.question)}".split("\n"))
    ]
    for number, option in enumerate(question.options, 1):
        about = f"  {_one_line(option.description)}" if option.description else ""
        lines.append(f"  {number}  {_one_line(option.label)}{about}")
    if question.options:
        lines.append("  numbers separated by commas, or text" if question.multi_select else "  a number, or text")
    return lines


def _one_line(text: str) -> str:
    """Whatever a model names cannot begin a line of its own, which could look like the prompt's."""
    return spelled_out(text).replace("\n", "\\n")


def _write(*lines: str) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
