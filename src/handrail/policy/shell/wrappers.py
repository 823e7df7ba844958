"""Programs that run the command in their last words, and change nothing about it that matters to a decision.

``timeout 5 nice git status`` is judged as ``git status``. Only forms that are understood word by word are unwrapped;
every other form, and every other program that runs what its words say, keeps its own policy
(:mod:`handrail.policy.shell.programs`), which is to ask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

MAX_DEPTH = 8
"""How many wrappers around one command are unwrapped."""

_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)[smhd]?")
_NUMBER = re.compile(r"[+-]?\d{1,9}")
_SIGNAL = re.compile(r"[A-Z]{2,10}\d?|\d{1,2}")
_MODE = re.compile(r"[0L]|\d{1,9}[KM]?")
_CLASS = re.compile(r"[0-3]")
_LEVEL = re.compile(r"[0-7]")
_RESERVED = frozenset(
    {"!", "{", "}", "[[", "]]", "case", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in"}
    | {"select", "then", "until", "while", "coproc"}
)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=", re.DOTALL)
_LOOKS_LIKE_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[.*\])?\+?=", re.DOTALL)

HARMLESS_VARIABLES = re.compile(
    r"LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|CLICOLOR(?:_FORCE)?|CI"
    r"|PYTHON(?:UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|UTF8)|RUST_BACKTRACE|CARGO_TERM_COLOR|NODE_ENV|NODE_NO_WARNINGS"
    r"|SOURCE_DATE_EPOCH|DEBIAN_FRONTEND|PIP_NO_INPUT|GIT_TERMINAL_PROMPT|GIT_OPTIONAL_LOCKS"
)
"""Variables that ``env`` may set in front of a command: none of them names a program, a file or an option."""

_Values = Mapping[str, re.Pattern[str]]


def _options(argv: Sequence[str], flags: frozenset[str], values: _Values) -> int | None:
    """The index of the first operand, after options of exactly these forms; None for any other option.

    :param values: option to what its value has to be; written ``-x V``, ``-xV``, ``--long V`` or ``--long=V``
    """
    index = 1
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return index + 1
        if word[:1] != "-" or word == "-":
            return index
        if word in flags:
            index += 1
            continue
        if word[:2] == "--":
            name, sign, value = word.partition("=")
        else:
            name, sign, value = word[:2], word[2:], word[2:]
        wanted = values.get(name)
        if wanted is None:
            return None
        if not sign:
            index += 1
            value = argv[index] if index < len(argv) else ""
        if wanted.fullmatch(value) is None:
            return None
        index += 1
    return index


def _form(flags: str = "", **values: re.Pattern[str]) -> Callable[[Sequence[str]], int | None]:
    known = frozenset(flags.split())
    by_option = {("-" if len(n) == 1 else "--") + n.replace("_", "-"): p for n, p in values.items()}
    return lambda argv: _options(argv, known, by_option)


_timeout_options = _form("--foreground --preserve-status -v --verbose -f -p", k=_DURATION, kill_after=_DURATION,
                         s=_SIGNAL, signal=_SIGNAL)  # fmt: skip


def _timeout(argv: Sequence[str]) -> int | None:
    at = _timeout_options(argv)
    return None if at is None or at >= len(argv) or _DURATION.fullmatch(argv[at]) is None else at + 1


_nice_options = _form(n=_NUMBER, adjustment=_NUMBER)


def _nice(argv: Sequence[str]) -> int | None:
    if len(argv) > 1 and re.fullmatch(r"-{1,2}\d{1,9}", argv[1]):  # the old spelling: nice -5
        return 2
    return _nice_options(argv)


def _time(argv: Sequence[str]) -> int | None:
    """As the shell's own word. As a program it has the same form without options."""
    at = 2 if list(argv[1:2]) == ["-p"] else 1
    return None if at < len(argv) and argv[at] == "time" else at


def _command(argv: Sequence[str]) -> int | None:
    return None if len(argv) > 1 and argv[1][:1] == "-" else 1


def _env(argv: Sequence[str]) -> int | None:
    index = 1
    while index < len(argv) and (match := _ASSIGNMENT.match(argv[index])) is not None:
        if HARMLESS_VARIABLES.fullmatch(match.group(1)) is None:
            return None
        index += 1
    return None if index < len(argv) and argv[index][:1] == "-" else index


_FORMS: Mapping[str, Callable[[Sequence[str]], int | None]] = {
    "timeout": _timeout,
    "nice": _nice,
    "nohup": _form(),
    "time": _time,
    "stdbuf": _form(i=_MODE, o=_MODE, e=_MODE, input=_MODE, output=_MODE, error=_MODE),
    "setsid": _form("-w --wait"),
    "ionice": _form("-t --ignore", c=_CLASS, n=_LEVEL, **{"class": _CLASS, "classdata": _LEVEL}),
    "command": _command,
    "env": _env,
}
NAMES = frozenset(_FORMS)
_BUILTINS = frozenset({"command", "time"})
"""The shell's own: any other program of that name, called by its path, is another one."""
_FOLDERS = ("/bin/", "/usr/bin/")


def inner(argv: Sequence[str]) -> int | None:
    """Where in ``argv`` the command begins that a wrapper runs; None where there is none, or it is not understood."""
    if not argv:
        return None
    name = argv[0]
    form = _FORMS.get(name)
    if form is None:
        for folder in _FOLDERS:
            if name.startswith(folder) and (bare := name[len(folder) :]) not in _BUILTINS:
                form = _FORMS.get(bare)
    if form is None:
        return None
    at = form(argv)
    if at is None or at >= len(argv) or not argv[at] or argv[at][:1] == "-":
        return None
    # The shell reads on behind its own words: what looks like an assignment or one of its words there is one.
    if argv[at] in _RESERVED or _LOOKS_LIKE_ASSIGNMENT.match(argv[at]):
        return None
    return at


def layers(argv: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The words of each wrapper, outermost first, and last the command itself."""
    found: list[tuple[str, ...]] = []
    while len(found) < MAX_DEPTH and (at := inner(argv)) is not None:
        found.append(tuple(argv[:at]))
        argv = argv[at:]
    return (*found, tuple(argv))
