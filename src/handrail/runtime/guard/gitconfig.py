"""git's configuration files: read as git reads them, and which of their entries run nothing.

The reader follows ``config.c`` of git and refuses what that refuses; it also refuses what only reads alike in some
versions (a NUL, an entry before the first section). The list of harmless entries is closed: it names keys, and for
each what its value may be. Whoever may write a key outside of it can have any program run by the next ``git status``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

MAX_CONFIG_BYTES = 1024 * 1024


class Entry(NamedTuple):
    """One line of configuration, as ``git config --list`` names it.

    :param key: ``section.name`` or ``section.subsection.name``; section and name in lower case
    :param value: None for a name without ``=``, which git reads as true
    """

    key: str
    value: str | None


class Unreadable(ValueError):
    """git would not read it, or not every git alike."""


def read(data: bytes) -> list[Entry]:
    """The entries of one file, in order; what it includes is not followed.

    :raises Unreadable: saying what is wrong in which line
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise Unreadable(f"it has {len(data)} bytes; {MAX_CONFIG_BYTES} are read")
    if b"\0" in data:
        raise Unreadable("it has a NUL character in it")
    text = data.decode("utf-8", "surrogateescape")
    return _Reader(text.removeprefix("\ufeff").replace("\r\n", "\n")).entries()


_SPACE = " \t\n\r"
_ESCAPES = {"t": "\t", "b": "\b", "n": "\n", "\\": "\\", '"': '"'}
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_KEY = _LETTERS | frozenset("0123456789-")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        section = ""
        while (char := self._next()) != "":
            if char in _SPACE:
                continue
            if char in "#;":
                self._rest_of_line()
            elif char == "[":
                section = self._section()
            elif char not in _LETTERS:
                raise self._fault(f"{char!r} begins no entry")
            elif not section:
                raise self._fault("an entry stands before the first section")
            else:
                found.append(self._entry(section, char))
        return found

    def _next(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        return char

    def _rest_of_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end + 1

    def _section(self) -> str:
        name = ""
        while True:
            char = self._next()
            if char == "]" and name:
                return name
            if char != "" and char in _SPACE:
                return f"{name}.{self._subsection(char)}"
            if (char not in _KEY and char != ".") or char == "":
                raise self._fault("a section's name is not closed, or has a character that none may have")
            name += char.lower()

    def _subsection(self, char: str) -> str:
        while char != "" and char in _SPACE:
            if char == "\n":
                raise self._fault("a section's name goes over the end of its line")
            char = self._next()
        if char != '"':
            raise self._fault("a subsection is not quoted")
        name = ""
        while (char := self._next()) != '"':
            if char == "\\":
                char = self._next()
            if char in ("", "\n"):
                raise self._fault("a subsection is not closed")
            name += char
        if self._next() != "]":
            raise self._fault("a section is not closed")
        return name

    def _entry(self, section: str, first: str) -> Entry:
        name = first.lower()
        char = self._next()
        while char != "" and char in _KEY:
            name += char.lower()
            char = self._next()
        while char != "" and char in " \t":
            char = self._next()
        if char in ("", "\n"):
            return Entry(f"{section}.{name}", None)
        if char != "=":
            raise self._fault(f"after {name!r} there is {char!r}; '=' was expected")
        return Entry(f"{section}.{name}", self._value())

    def _value(self) -> str:
        value: list[str] = []
        blanks = 0
        quoted = False
        while True:
            char = self._next()
            if char in ("", "\n"):
                if quoted:
                    raise self._fault("a quoted value is not closed")
                return "".join(value)
            if char in _SPACE and not quoted:
                blanks += bool(value)
                continue
            if char in "#;" and not quoted:
                self._rest_of_line()
                return "".join(value)
            value += " " * blanks
            blanks = 0
            if char == "\\":
                char = self._next()
                if char == "\n":
                    continue
                if char not in _ESCAPES:
                    raise self._fault(f"there is no escape \\{char}")
                value.append(_ESCAPES[char])
            elif char == '"':
                quoted = not quoted
            else:
                value.append(char)

    def _fault(self, what: str) -> Unreadable:
        line = self._text.count("\n", 0, min(self._at, len(self._text))) + 1
        return Unreadable(f"line {line}: {what}")


# ── what runs nothing ────────────────────────────────────────────────────────────────────────────

_FLAG = re.compile(r"true|false|yes|no|on|off|[0-9]{1,4}|", re.IGNORECASE)
_NAME = re.compile(r"(?!-)[A-Za-z0-9_][A-Za-z0-9._/+@-]*")
_REFERENCE = re.compile(r"(?!-)[^\x00-\x20\x7f\\?\[$`;|&<>\"'()!]+")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]*")
_SCHEME = re.compile(r"(?:https?|ssh|git|git\+ssh|ssh\+git|file)://(?!-)[^\s\x00-\x1f\x7f]+", re.IGNORECASE)
_SCP = re.compile(r"(?!-)[A-Za-z0-9._@\[\]-]+:(?![:-])[^\s\x00-\x1f\x7f]*")
_PATH = re.compile(r"(?!-)[^\s:\x00-\x1f\x7f][^:\x00-\x1f\x7f]*")


def harmless_url(value: str) -> bool:
    """Whether git reaches it by itself: no remote helper (``ext::``), no host that reads as an option."""
    if "::" in value:
        return False
    host = value.partition("://")[2].rpartition("@")[2] if "://" in value else value.rpartition("@")[2]
    if host.startswith("-"):
        return False
    return any(form.fullmatch(value) is not None for form in (_SCHEME, _SCP, _PATH)) and (
        "://" not in value or _SCHEME.fullmatch(value) is not None
    )


def _flag(value: str | None) -> bool:
    return value is None or _FLAG.fullmatch(value) is not None


def _one_of(*words: str) -> Callable[[str | None], bool]:
    return lambda value: _flag(value) or (value is not None and value.lower() in words)


def _like(form: re.Pattern[str]) -> Callable[[str | None], bool]:
    return lambda value: value is not None and form.fullmatch(value) is not None


def _url(value: str | None) -> bool:
    return value is not None and harmless_url(value)


def _remote(value: str | None) -> bool:
    """A remote's name, or this repository itself; never a URL, which would be one that nobody checked."""
    return value is not None and (value == "." or _NAME.fullmatch(value) is not None)


_PLAIN: Mapping[str, Callable[[str | None], bool]] = {
    **dict.fromkeys(
        ("core.bare", "core.filemode", "core.ignorecase", "core.precomposeunicode", "core.symlinks"), _flag
    ),
    "core.repositoryformatversion": _flag,
    "core.logallrefupdates": _one_of("always"),
    "extensions.objectformat": _one_of("sha1", "sha256"),
    "extensions.refstorage": _one_of("files", "reftable"),
    "extensions.worktreeconfig": _flag,
    "init.defaultbranch": _like(_REFERENCE),
    "pull.rebase": _one_of("merges", "interactive"),
    "push.default": _one_of("nothing", "current", "upstream", "simple", "matching"),
    "push.autosetupremote": _flag,
    "submodule.active": _like(_TEXT),
    "user.name": _like(_TEXT),
    "user.email": _like(_TEXT),
}
_NAMED: Mapping[tuple[str, str], Callable[[str | None], bool]] = {
    ("remote", "url"): _url,
    ("remote", "pushurl"): _url,
    ("remote", "fetch"): _like(_REFERENCE),
    ("remote", "push"): _like(_REFERENCE),
    ("remote", "tagopt"): lambda value: value in ("--tags", "--no-tags"),
    ("branch", "remote"): _remote,
    ("branch", "pushremote"): _remote,
    ("branch", "merge"): _like(_REFERENCE),
    ("branch", "rebase"): _one_of("merges", "interactive"),
    ("submodule", "url"): _url,
    ("submodule", "active"): _flag,
    ("submodule", "branch"): _like(_REFERENCE),
    ("submodule", "update"): lambda value: value in ("checkout", "rebase", "merge", "none"),
    ("submodule", "ignore"): lambda value: value in ("all", "dirty", "untracked", "none"),
}


def harmless(entry: Entry, inside: Callable[[str], bool]) -> bool:
    """Whether an entry runs nothing, whoever wrote it.

    :param inside: whether a path, relative to the git directory, stays in the folder that the tool may write
    """
    check = _PLAIN.get(entry.key)
    if check is not None:
        return check(entry.value)
    if entry.key == "core.worktree":
        return entry.value is not None and _TEXT.fullmatch(entry.value) is not None and inside(entry.value)
    section, _, rest = entry.key.partition(".")
    subsection, dot, name = rest.rpartition(".")
    check = _NAMED.get((section, name)) if dot else None
    return check is not None and _TEXT.fullmatch(subsection) is not None and check(entry.value)


def beyond_the_list(before: Sequence[Entry], after: Iterable[Entry], inside: Callable[[str], bool]) -> list[str]:
    """The keys outside the list whose entries are not as they were: added, removed, changed or put in another order."""
    had = [entry for entry in before if not harmless(entry, inside)]
    has = [entry for entry in after if not harmless(entry, inside)]
    if had == has:
        return []
    changed = [entry.key for entry in has if entry not in had] + [entry.key for entry in had if entry not in has]
    return list(dict.fromkeys(changed or [entry.key for entry in has]))
