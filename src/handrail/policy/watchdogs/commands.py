"""A shell text taken apart roughly: which programs it runs, what flows into which, and where a value is put together.

Not a parser and nothing to allow by: it looks for shapes also in text that no parser takes, and never raises.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

MAX_CHARACTERS = 100_000
_T = TypeVar("_T")
_SHORT = 4_000
"""Characters that are read within 10 ms."""
MADE = "\0"
"""Stands in a word for what a substitution gives."""
_WRAPPERS = {
    **dict.fromkeys(("sudo", "doas", "nohup", "time", "exec", "command", "builtin", "nice", "stdbuf", "setsid"), 0),
    **dict.fromkeys(("then", "do", "else", "if", "while", "until", "!", "{", "xargs", "ionice", "unbuffer"), 0),
    "timeout": 1,
}
"""Words before a program, and how many of their own arguments follow."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_PLAIN = re.compile(r"(?:[^\\'\"`$|;&\n() \t#<>]|\$(?!\())+")
_PLAIN_QUOTED = re.compile(r'(?:[^"\\`$]|\$(?!\())+')


@dataclass(slots=True)
class Part:
    """One command.

    :param words: without quotes; redirected output files are left out
    :param depth: how many substitutions it stands in; what it prints then ends up in the command around it
    """

    pipeline: int
    depth: int
    words: list[str] = field(default_factory=list[str])

    @property
    def argv(self) -> list[str]:
        """From the program on, behind assignments and wrappers."""
        words = self.words
        at = 0
        while at < len(words):
            word = words[at]
            name = word.rsplit("/", 1)[-1]
            if _ASSIGNMENT.match(word):
                at += 1
            elif name in _WRAPPERS or (name == "env" and at + 1 < len(words)):
                at += 1 + _WRAPPERS.get(name, 0)
                while at < len(words) and words[at].startswith("-"):
                    at += 1
            else:
                break
        return words[at:]

    @property
    def program(self) -> str:
        argv = self.argv
        return argv[0].rsplit("/", 1)[-1].lower() if argv else ""


async def read(reader: Callable[[str], _T], text: str) -> _T:
    """Return the result of ``reader`` for a shell text. A long text is read in a thread, so that the event loop continues."""
    return reader(text) if len(text) <= _SHORT else await asyncio.to_thread(reader, text)


def parts(text: str) -> list[Part]:
    """The commands of ``text``, those in substitutions among them."""
    reader = _Reader(text[:MAX_CHARACTERS])
    reader.read()
    return [part for part in reader.found if part.words]


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[Part] = []
        self._at: int = 0
        self._pipelines = 0

    def read(self) -> None:
        while self._at < len(self.text):
            self._commands("", 0, self._next_pipeline())
            self._at += 1  # a closing bracket too many

    def _next_pipeline(self) -> int:
        self._pipelines += 1
        return self._pipelines

    def _commands(self, until: str, depth: int, pipeline: int) -> None:
        """Read to the closing character, which is left to be read."""
        part = self._begin(pipeline, depth)
        word: list[str] | None = None
        redirected = False
        text, size = self.text, len(self.text)

        def done() -> None:
            nonlocal word, redirected
            if word is not None:
                if not redirected:
                    part.words.append("".join(word))
                redirected = False
            word = None

        while self._at < size:
            character = text[self._at]
            if character == until and until:
                break
            if character == "\\" and self._at + 1 < size:
                self._at += 1
                if text[self._at] != "\n":
                    word = _longer(word, text[self._at])
            elif character == "'":
                end = text.find("'", self._at + 1)
                end = size if end < 0 else end
                word = _longer(word, text[self._at + 1 : end])
                self._at = end
            elif character == '"':
                word = _longer(word, *self._quoted(depth, pipeline))
            elif character == "`" or text.startswith(("$(", "<("), self._at):
                word = _longer(word, self._substitution(depth, pipeline))
            elif character in " \t":
                done()
            elif character == "#" and word is None:
                end = text.find("\n", self._at)
                self._at = (size if end < 0 else end) - 1
            elif character in "|;&\n()":
                done()
                piped = character == "|" and not text.startswith("||", self._at)
                if text.startswith(("||", "&&", "|&", ";;"), self._at):
                    piped = text.startswith("|&", self._at)
                    self._at += 1
                if not piped and character not in "()":
                    pipeline = self._next_pipeline() if depth == 0 else pipeline
                if part.words or self.found[-1] is not part:
                    part = self._begin(pipeline, depth)
                else:
                    part.pipeline = pipeline
            elif character in "<>":
                if word is not None and "".join(word).isdigit():
                    word = None
                done()
                redirected = character == ">"
                while self._at + 1 < size and text[self._at + 1] in "<>&":
                    self._at += 1
            elif run := _PLAIN.match(text, self._at):
                word = _longer(word, run.group())
                self._at = run.end()
                continue
            else:
                word = _longer(word, character)
            self._at += 1
        done()

    def _begin(self, pipeline: int, depth: int) -> Part:
        part = Part(pipeline, depth)
        self.found.append(part)
        return part

    def _quoted(self, depth: int, pipeline: int) -> Iterator[str]:
        self._at += 1
        while self._at < len(self.text) and self.text[self._at] != '"':
            character = self.text[self._at]
            if character == "\\" and self._at + 1 < len(self.text):
                self._at += 1
                yield self.text[self._at]
            elif character == "`" or self.text.startswith("$(", self._at):
                yield self._substitution(depth, pipeline)
            elif run := _PLAIN_QUOTED.match(self.text, self._at):
                yield run.group()
                self._at = run.end()
                continue
            else:
                yield character
            self._at += 1

    def _substitution(self, depth: int, pipeline: int) -> str:
        if depth > 20:
            self._at = len(self.text)
            return MADE
        backtick = self.text[self._at] == "`"
        self._at += 1 if backtick else 2
        self._commands("`" if backtick else ")", depth + 1, pipeline)
        return MADE


def _longer(word: list[str] | None, *more: str) -> list[str]:
    """``word`` with more at its end; it is the same list, which a long word is built in."""
    word = [] if word is None else word
    word += more
    return word
