"""What git's settings name: the files and folders that git executes, or takes settings and words from.

A repository's settings, the person's and the machine's are read as git reads them, with what they include, and without
running git. A command is taken apart into words, and each word that can be a path counts. So a word too many is
protected, and no word too few. Files are bounded, opened without waiting, and read again only where they have changed.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from handrail.runtime.guard.gitconfig import MAX_CONFIG_BYTES, Entry, Unreadable, harmless, read
from handrail.sandbox.view.tree import check_passing

_DEEPEST_INCLUDE = 10
_MOST_FILES = 64
_MOST_CONFIGS = 1_000
_MOST_IN_ENVIRONMENT = 1_000
_SYSTEM = ("/etc/gitconfig", "/usr/local/etc/gitconfig", "/opt/homebrew/etc/gitconfig")
_PROGRAMS = {
    "GIT_EDITOR": "core.editor",
    "GIT_SEQUENCE_EDITOR": "sequence.editor",
    "GIT_PAGER": "core.pager",
    "GIT_SSH_COMMAND": "core.sshcommand",
    "GIT_SSH": "core.sshcommand",
    "GIT_ASKPASS": "core.askpass",
    "GIT_PROXY_COMMAND": "core.gitproxy",
    "GIT_EXTERNAL_DIFF": "diff.external",
    "GIT_TEMPLATE_DIR": "init.templatedir",
    "GIT_EXEC_PATH": "core.hookspath",
    "EDITOR": "core.editor",
    "VISUAL": "core.editor",
    "PAGER": "core.pager",
}
"""Variables that stand for an entry."""

_WHOLE_PATHS = frozenset(
    (
        *("core.hookspath", "core.attributesfile", "core.excludesfile", "commit.template", "blame.ignorerevsfile"),
        *("init.templatedir", "gpg.ssh.allowedsignersfile", "gpg.ssh.revocationfile", "diff.orderfile", "mailmap.file"),
        *("format.signaturefile", "format.coverletterfile", "core.askpass"),
    )
)
"""Keys whose whole value is one path."""
_NAMES_NOTHING = re.compile(
    r"(?:user|author|committer|color|column|safe|branch|url|maintenance|gui|advice|transfer|extensions|i18n)\..*"
    r"|core\.worktree|remote\..*\.(?:url|pushurl|fetch|push|tagopt|skipfetchall|prune|mirror|promisor|partialclonefilter)"
    r"|submodule\..*\.(?:url|path|branch|active|ignore|fetchrecursesubmodules)|http\..*\.?(?:sslcert|sslkey|sslcainfo|proxy)"
    r"|color\..*|log\.date|format\.pretty|pretty\..*|log\.excludedecoration|protocol\..*",
    re.DOTALL,
)
"""Keys whose value is no path that git executes or reads settings from."""
_PARTS = re.compile(r"[\s;|&()<>\"'`$={},]+")


class Named(NamedTuple):
    """A path as settings name it.

    :param base: the folder it is relative to; None for the work tree of the repository that the settings are used in
    :param of_command: it is a word of a command, so a folder of that name is not executed
    """

    value: str
    base: str | None
    of_command: bool = False


class _Read(NamedTuple):
    key: tuple[int, ...]
    entries: tuple[Entry, ...]


_files: dict[str, _Read] = {}
"""By path of a file of settings: what it was when it was read, and its entries."""


def of_file(path: str, *, follow: bool = False) -> tuple[tuple[Named, ...], tuple[Entry, ...]]:
    """Return what one file of settings names, with what it includes, and its own entries.

    :param follow: whether it may be a symbolic link, as in a person's home
    """
    found: dict[Named, None] = {}
    entries = _entries(path, follow)
    _collect(entries, path, found, [_MOST_FILES], 0)
    return tuple(found), entries


def of_person(environment: Mapping[str, str] | None = None) -> tuple[Named, ...]:
    """Return what the settings of the person and of the machine name, for whichever repository they use git in.

    :param environment: this process's where None
    """
    env = os.environ if environment is None else environment
    found: dict[Named, None] = {}
    budget = [_MOST_FILES]
    for path in _files_of_person(env):
        _collect(_entries(path, follow=True), path, found, budget, 0)
    _collect(_of_environment(env), None, found, budget, 0)
    return tuple(found)


def _files_of_person(env: Mapping[str, str]) -> Iterator[str]:
    if env.get("GIT_CONFIG_NOSYSTEM", "").lower() not in ("1", "true", "yes", "on"):
        yield from (env["GIT_CONFIG_SYSTEM"],) if env.get("GIT_CONFIG_SYSTEM") else _SYSTEM
    if chosen := env.get("GIT_CONFIG_GLOBAL"):
        yield chosen
        return
    home = env.get("HOME", "")
    if elsewhere := env.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else ""):
        yield f"{elsewhere}/git/config"
    if home:
        yield f"{home}/.gitconfig"


def _of_environment(env: Mapping[str, str]) -> tuple[Entry, ...]:
    found = [Entry(key, env[name]) for name, key in _PROGRAMS.items() if env.get(name)]
    count = env.get("GIT_CONFIG_COUNT", "")
    for number in range(min(int(count) if count.isdecimal() else 0, _MOST_IN_ENVIRONMENT)):
        if key := env.get(f"GIT_CONFIG_KEY_{number}"):
            found.append(Entry(_lowered(key), env.get(f"GIT_CONFIG_VALUE_{number}")))
    try:
        words = shlex.split(env.get("GIT_CONFIG_PARAMETERS", ""))
    except ValueError:
        words = []
    for word in words[:_MOST_IN_ENVIRONMENT]:
        key, _, value = word.partition("=")
        found.append(Entry(_lowered(key), value))
    return tuple(found)


def _lowered(key: str) -> str:
    section, _, rest = key.partition(".")
    middle, dot, name = rest.rpartition(".")
    return f"{section.lower()}.{middle}{dot}{name.lower()}"


def _entries(path: str, follow: bool) -> tuple[Entry, ...]:
    """Return the entries of one file; none where git could not read it, or it is no plain file of some length."""
    try:
        status = os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - on the way of each start
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = _files.get(path)
        if known is not None and known.key == key:
            return known.entries
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CONFIG_BYTES:
            return ()
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except OSError as error:
        check_passing(error, path)  # no answer is remembered that a shortage gave
        return ()
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ()
        entries = tuple(read(os.pread(descriptor, MAX_CONFIG_BYTES, 0)))
    except OSError as error:
        check_passing(error, path)
        entries = ()
    except Unreadable:
        entries = ()
    finally:
        os.close(descriptor)
    if len(_files) >= _MOST_CONFIGS:
        _files.clear()
    _files[path] = _Read(key, entries)
    return entries


def _collect(
    entries: Iterable[Entry], path: str | None, found: dict[Named, None], budget: list[int], depth: int
) -> None:
    folder = None if path is None else path.rpartition("/")[0] or "/"
    for entry in entries:
        if not entry.value:
            continue
        if entry.key == "include.path" or (entry.key.startswith("includeif.") and entry.key.endswith(".path")):
            # Whatever the condition is: it may hold where the person uses git.
            target = _expanded(entry.value)
            found[Named(target, folder)] = None
            included = os.path.join(folder or "/", target)  # noqa: PTH118 - keeps an absolute path as it is
            if depth < _DEEPEST_INCLUDE and budget[0] > 0:
                budget[0] -= 1
                _collect(_entries(included, follow=True), included, found, budget, depth + 1)
            continue
        whole = entry.key in _WHOLE_PATHS
        for value in (entry.value,) if whole else _words(entry):
            found[Named(_expanded(value), None, not whole)] = None


def _expanded(value: str) -> str:
    return str(Path(value).expanduser()) if value.startswith("~/") else value


def _words(entry: Entry) -> Iterator[str]:
    """Yield the words of a value that can be paths which git executes."""
    value = entry.value or ""
    if _NAMES_NOTHING.fullmatch(entry.key) or harmless(entry, lambda _: True):
        return
    if entry.key.startswith("alias.") and not value.lstrip().startswith("!") and " -c" not in f" {value}":
        return  # a command of git's own
    try:
        words = shlex.split(value.removeprefix("!"))
    except ValueError:
        words = []
    parts = [part for part in _PARTS.split(value.removeprefix("!")) if part]
    for number, part in enumerate((*parts, *words)):
        first = number == 0 or number == len(parts)
        if part.startswith("-") or "://" in part or "\0" in part:
            continue
        # A program without a slash is looked for in PATH; a script that one is given as an argument is not.
        if "/" in part or (not first and "." in part.strip(".") and not part.replace(".", "").isdecimal()):
            yield part
