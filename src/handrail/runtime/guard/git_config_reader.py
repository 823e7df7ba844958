"""Git's configuration files: a strict reader, the harmless entries, and the files that settings name.

The reader follows ``config.c`` of git and refuses the files that git refuses. It also refuses files that git versions read
differently (a NUL, an entry before the first section). The list of harmless entries is closed: it names keys, and for
each its allowed values. A program that may write any other key could have any command run by the next ``git status``.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.sandbox.view.cached_folder_tree import raise_if_resource_shortage

MAX_CONFIG_BYTES = 1024 * 1024


class GitConfigLine(NamedTuple):
    """One line of configuration, as ``git config --list`` names it.

    :param key: ``section.name`` or ``section.subsection.name``; section and name in lower case
    :param value: None for a name without ``=``, which git reads as true
    """

    key: str
    value: str | None


class UnreadableGitConfigError(ValueError):
    """An error for a file that git, or some version of git, would not read."""


def parse_config(data: bytes) -> list[GitConfigLine]:
    """Return the entries of one file in order, without its includes.

    :raises UnreadableGitConfigError: with the problem and its line
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise UnreadableGitConfigError(f"it has {len(data)} bytes; the limit is {MAX_CONFIG_BYTES}")
    if b"\0" in data:
        raise UnreadableGitConfigError("it contains a NUL character")
    text = data.decode("utf-8", "surrogateescape")
    return _ConfigReader(text.removeprefix("\ufeff").replace("\r\n", "\n")).entries()


_SPACE = " \t\n\r"
_ESCAPES = {"t": "\t", "b": "\b", "n": "\n", "\\": "\\", '"': '"'}
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_KEY = _LETTERS | frozenset("0123456789-")


class _ConfigReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def entries(self) -> list[GitConfigLine]:
        found: list[GitConfigLine] = []
        section = ""
        while (char := self._next()) != "":
            if char in _SPACE:
                continue
            if char in "#;":
                self._rest_of_line()
            elif char == "[":
                section = self._section()
            elif char not in _LETTERS:
                raise self._fault(f"{char!r} cannot begin an entry")
            elif not section:
                raise self._fault("an entry comes before the first section")
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
            if (char := self._next()) == "]" and name:
                return name
            if char != "" and char in _SPACE:
                return f"{name}.{self._subsection(char)}"
            if (char not in _KEY and char != ".") or char == "":
                raise self._fault("a section name is not closed, or has an invalid character")
            name += char.lower()

    def _subsection(self, char: str) -> str:
        while char != "" and char in _SPACE:
            if char == "\n":
                raise self._fault("a section name continues on the next line")
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

    def _entry(self, section: str, first: str) -> GitConfigLine:
        name = first.lower()
        char = self._next()
        while char != "" and char in _KEY:
            name += char.lower()
            char = self._next()
        while char != "" and char in " \t":
            char = self._next()
        if char in ("", "\n"):
            return GitConfigLine(f"{section}.{name}", None)
        if char != "=":
            raise self._fault(f"{char!r} follows {name!r}; '=' was expected")
        return GitConfigLine(f"{section}.{name}", self._value())

    def _value(self) -> str:
        value: list[str] = []
        blanks = 0
        quoted = False
        while True:
            if (char := self._next()) in ("", "\n"):
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
                if (char := self._next()) == "\n":
                    continue
                if char not in _ESCAPES:
                    raise self._fault(f"\\{char} is not a valid escape")
                value.append(_ESCAPES[char])
            elif char == '"':
                quoted = not quoted
            else:
                value.append(char)

    def _fault(self, what: str) -> UnreadableGitConfigError:
        line = self._text.count("\n", 0, min(self._at, len(self._text))) + 1
        return UnreadableGitConfigError(f"line {line}: {what}")


# Harmless entries, which run nothing.

_FLAG = compile_regex_lazily(r"true|false|yes|no|on|off|[0-9]{1,4}|", re.IGNORECASE)
_NAME = compile_regex_lazily(r"(?!-)[A-Za-z0-9_][A-Za-z0-9._/+@-]*")
_REFERENCE = re.compile(r"(?!-)[^\x00-\x20\x7f\\?\[$`;|&<>\"'()!]+")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]*")
_SCHEME = re.compile(r"(?:https?|ssh|git|git\+ssh|ssh\+git|file)://(?!-)[^\s\x00-\x1f\x7f]+", re.IGNORECASE)
_SCP = re.compile(r"(?!-)[A-Za-z0-9._@\[\]-]+:(?![:-])[^\s\x00-\x1f\x7f]*")
_PATH = re.compile(r"(?!-)[^\s:\x00-\x1f\x7f][^:\x00-\x1f\x7f]*")


def is_harmless_url(value: str) -> bool:
    """Return whether git fetches a URL itself: no remote helper (``ext::``), no host like an option."""
    if "::" in value:
        return False
    host = value.partition("://")[2].rpartition("@")[2] if "://" in value else value.rpartition("@")[2]
    if host.startswith("-"):
        return False
    return any(form.fullmatch(value) is not None for form in (_SCHEME, _SCP, _PATH)) and (
        "://" not in value or _SCHEME.fullmatch(value) is not None
    )


def _is_flag(value: str | None) -> bool:
    return value is None or _FLAG.fullmatch(value) is not None


def _is_one_of(*words: str) -> Callable[[str | None], bool]:
    return lambda value: _is_flag(value) or (value is not None and value.lower() in words)


def _make_condition(form: re.Pattern[str]) -> Callable[[str | None], bool]:
    return lambda value: value is not None and form.fullmatch(value) is not None


def _is_url(value: str | None) -> bool:
    return value is not None and is_harmless_url(value)


def _is_remote_name(value: str | None) -> bool:
    """Return whether a value is the name of a remote or this repository; never an unchecked URL."""
    return value is not None and (value == "." or _NAME.fullmatch(value) is not None)


_HARMLESS_KEYS: Mapping[str, Callable[[str | None], bool]] = {
    **dict.fromkeys(
        ("core.bare", "core.filemode", "core.ignorecase", "core.precomposeunicode", "core.symlinks"), _is_flag
    ),
    "core.repositoryformatversion": _is_flag,
    "core.logallrefupdates": _is_one_of("always"),
    "extensions.objectformat": _is_one_of("sha1", "sha256"),
    "extensions.refstorage": _is_one_of("files", "reftable"),
    "extensions.worktreeconfig": _is_flag,
    "init.defaultbranch": _make_condition(_REFERENCE),
    "pull.rebase": _is_one_of("merges", "interactive"),
    "push.default": _is_one_of("nothing", "current", "upstream", "simple", "matching"),
    "push.autosetupremote": _is_flag,
    "submodule.active": _make_condition(_TEXT),
    "user.name": _make_condition(_TEXT),
    "user.email": _make_condition(_TEXT),
}
_HARMLESS_SUBSECTION_KEYS: Mapping[tuple[str, str], Callable[[str | None], bool]] = {
    ("remote", "url"): _is_url,
    ("remote", "pushurl"): _is_url,
    ("remote", "fetch"): _make_condition(_REFERENCE),
    ("remote", "push"): _make_condition(_REFERENCE),
    ("remote", "tagopt"): lambda value: value in ("--tags", "--no-tags"),
    ("branch", "remote"): _is_remote_name,
    ("branch", "pushremote"): _is_remote_name,
    ("branch", "merge"): _make_condition(_REFERENCE),
    ("branch", "rebase"): _is_one_of("merges", "interactive"),
    ("submodule", "url"): _is_url,
    ("submodule", "active"): _is_flag,
    ("submodule", "branch"): _make_condition(_REFERENCE),
    ("submodule", "update"): lambda value: value in ("checkout", "rebase", "merge", "none"),
    ("submodule", "ignore"): lambda value: value in ("all", "dirty", "untracked", "none"),
}


def is_harmless_git_setting(entry: GitConfigLine, inside: Callable[[str], bool]) -> bool:
    """Return whether an entry runs nothing, whatever program wrote it.

    :param inside: whether a path, relative to the git directory, stays in the folder that the tool may write
    """
    if (check := _HARMLESS_KEYS.get(entry.key)) is not None:
        return check(entry.value)
    if entry.key == "core.worktree":
        return entry.value is not None and _TEXT.fullmatch(entry.value) is not None and inside(entry.value)
    section, _, rest = entry.key.partition(".")
    subsection, dot, name = rest.rpartition(".")
    check = _HARMLESS_SUBSECTION_KEYS.get((section, name)) if dot else None
    return check is not None and _TEXT.fullmatch(subsection) is not None and check(entry.value)


def find_changed_unsafe_keys(
    before: Sequence[GitConfigLine], after: Iterable[GitConfigLine], inside: Callable[[str], bool]
) -> list[str]:
    """Return the keys outside the allow-list whose entries were added, removed, changed or reordered."""
    had = [entry for entry in before if not is_harmless_git_setting(entry, inside)]
    has = [entry for entry in after if not is_harmless_git_setting(entry, inside)]
    if had == has:
        return []
    changed = [entry.key for entry in has if entry not in had] + [entry.key for entry in had if entry not in has]
    return list(dict.fromkeys(changed or [entry.key for entry in has]))


# Files and folders that git's settings name, to execute them or to read settings and text from them.
#
# The settings of the repository, the user and the machine are read as git reads them, with included files, and without
# running git. A command is split into words, and each word that can be a path counts. So the result may contain a word
# too many but never one too few. Files are bounded, opened without waiting, and read again only after a change.

_DEEPEST_INCLUDE = 10
_MOST_FILES = 64
_MOST_CONFIGS = 1_000
_MOST_IN_ENVIRONMENT = 1_000
_SYSTEM = ("/etc/gitconfig", "/usr/local/etc/gitconfig", "/opt/homebrew/etc/gitconfig")
_PROGRAM_VARIABLES = {
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
"""Environment variables that stand for an entry."""

_PATH_KEYS = frozenset(
    (
        *("core.hookspath", "core.attributesfile", "core.excludesfile", "commit.template", "blame.ignorerevsfile"),
        *("init.templatedir", "gpg.ssh.allowedsignersfile", "gpg.ssh.revocationfile", "diff.orderfile", "mailmap.file"),
        *("format.signaturefile", "format.coverletterfile", "core.askpass"),
    )
)
"""Keys whose whole value is one path."""
_PATHLESS_KEYS = compile_regex_lazily(
    r"(?:user|author|committer|color|column|safe|branch|url|maintenance|gui|advice|transfer|extensions|i18n)\..*"
    r"|core\.worktree|remote\..*\.(?:url|pushurl|fetch|push|tagopt|skipfetchall|prune|mirror|promisor|partialclonefilter)"
    r"|submodule\..*\.(?:url|path|branch|active|ignore|fetchrecursesubmodules)|http\..*\.?(?:sslcert|sslkey|sslcainfo|proxy)"
    r"|color\..*|log\.date|format\.pretty|pretty\..*|log\.excludedecoration|protocol\..*",
    re.DOTALL,
)
"""Keys whose value is not a path that git runs or reads settings from."""
_PARTS = compile_regex_lazily(r"[\s;|&()<>\"'`$={},]+")
_RUNS_A_PROGRAM = compile_regex_lazily(
    r"(?:^|\s)(?:-[A-Za-z]*[cxO]|--(?:exec|extcmd|upload-pack|receive-pack|open-files-in-pager)(?:\s|=)|run\s|foreach\s)"
)
"""An option or word in an alias with which a command of git runs a program that the alias names."""
_HOME = compile_regex_lazily(r"\$(?:HOME\b|\{HOME\})")
_OTHER_FOLDER = compile_regex_lazily(r"(?:\$\w++|\$\{[^{}]*+\}|\$\([^()]*+\)|`[^`]*+`)\"?'?/")
"""A folder in a command that only a shell knows, such as ``$(git rev-parse --show-toplevel)/``; often the work tree."""
_OPTION_BEFORE_PATH = compile_regex_lazily(r"^-[A-Za-z](?=[^-])|^--?[\w-]*+(?=/)")
_MOST_FOLDERS = 8


class GitNamedPath(NamedTuple):
    """A path that settings name.

    :param base: the folder it is relative to; None for the work tree of the repository that uses the settings
    :param of_command: whether it is a word of a command; then a folder of that name is not run
    """

    value: str
    base: str | None
    of_command: bool = False


class _CachedConfig(NamedTuple):
    key: tuple[int, ...]
    entries: tuple[GitConfigLine, ...]


_CONFIG_CACHE: dict[str, _CachedConfig] = {}
"""By path of a settings file: its state when it was read, and its entries."""


def read_paths_named_in_file(
    path: str, *, follow: bool = False
) -> tuple[tuple[GitNamedPath, ...], tuple[GitConfigLine, ...]]:
    """Return the paths that one settings file names, includes followed, and its own entries.

    :param follow: whether the file may be a symbolic link, as in a home folder
    """
    found: dict[GitNamedPath, None] = {}
    entries = _read_config_entries(path, follow)
    _collect(entries, path, found, [_MOST_FILES], 0)
    return tuple(found), entries


def read_user_and_system_git_paths(environment: Mapping[str, str] | None = None) -> tuple[GitNamedPath, ...]:
    """Return the paths that the settings of the user and of the machine name, for any repository.

    :param environment: the environment of this process if None
    """
    env = os.environ if environment is None else environment
    found: dict[GitNamedPath, None] = {}
    budget = [_MOST_FILES]
    for path in _find_user_files(env):
        _collect(_read_config_entries(path, follow=True), path, found, budget, 0)
    _collect(_read_environment(env), None, found, budget, 0)
    return tuple(found)


def _find_user_files(env: Mapping[str, str]) -> Iterator[str]:
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


def _read_environment(env: Mapping[str, str]) -> tuple[GitConfigLine, ...]:
    found = [GitConfigLine(key, env[name]) for name, key in _PROGRAM_VARIABLES.items() if env.get(name)]
    count = env.get("GIT_CONFIG_COUNT", "")
    for number in range(min(int(count) if count.isdecimal() else 0, _MOST_IN_ENVIRONMENT)):
        if key := env.get(f"GIT_CONFIG_KEY_{number}"):
            found.append(GitConfigLine(_lowercase_key(key), env.get(f"GIT_CONFIG_VALUE_{number}")))
    try:
        words = shlex.split(env.get("GIT_CONFIG_PARAMETERS", ""))
    except ValueError:
        words = []
    for word in words[:_MOST_IN_ENVIRONMENT]:
        key, _, value = word.partition("=")
        found.append(GitConfigLine(_lowercase_key(key), value))
    return tuple(found)


def _lowercase_key(key: str) -> str:
    section, _, rest = key.partition(".")
    middle, dot, name = rest.rpartition(".")
    return f"{section.lower()}.{middle}{dot}{name.lower()}"


def _read_config_entries(path: str, follow: bool) -> tuple[GitConfigLine, ...]:
    """Return the entries of one file; none if git could not read it, or it is not a short regular file."""
    try:
        status = os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - on the way of each start
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if (known := _CONFIG_CACHE.get(path)) is not None and known.key == key:
            return known.entries
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CONFIG_BYTES:
            return ()
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except OSError as error:
        raise_if_resource_shortage(error, path)  # an answer given during a shortage is not cached
        return ()
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ()
        entries = tuple(parse_config(os.pread(descriptor, MAX_CONFIG_BYTES, 0)))
    except OSError as error:
        raise_if_resource_shortage(error, path)
        entries = ()
    except UnreadableGitConfigError:
        entries = ()
    finally:
        os.close(descriptor)
    if len(_CONFIG_CACHE) >= _MOST_CONFIGS:
        _CONFIG_CACHE.clear()
    _CONFIG_CACHE[path] = _CachedConfig(key, entries)
    return entries


def _collect(
    entries: Iterable[GitConfigLine], path: str | None, found: dict[GitNamedPath, None], budget: list[int], depth: int
) -> None:
    folder = None if path is None else path.rpartition("/")[0] or "/"
    for entry in entries:
        if not entry.value:
            continue
        if entry.key == "include.path" or (entry.key.startswith("includeif.") and entry.key.endswith(".path")):
            # The condition does not matter: it may be true where the user runs git.
            target = _expand_home(entry.value)
            found[GitNamedPath(target, folder)] = None
            included = os.path.join(folder or "/", target)  # noqa: PTH118 - keeps an absolute path as it is
            if depth < _DEEPEST_INCLUDE and budget[0] > 0:
                budget[0] -= 1
                _collect(_read_config_entries(included, follow=True), included, found, budget, depth + 1)
            continue
        whole = entry.key in _PATH_KEYS
        for value in (entry.value,) if whole else _find_program_path_words(entry):
            found[GitNamedPath(_expand_home(value), None, not whole)] = None


def _expand_home(value: str) -> str:
    """Return a path with the home folder in the place of ``~``, or of ``~USER``."""
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError:  # there is no such user
        return value


def _can_be_program_path(word: str, *, first: bool) -> bool:
    """Return whether git can find a program by this word from the folder it runs in.

    Git looks for a program without a slash in PATH, but not for a script that is an argument.

    :param first: whether the word is the program of a command
    """
    if "://" in word or "\0" in word or (word.startswith("-") and "/" not in word):
        return False
    return "/" in word or (not first and "." in word.strip(".") and not word.replace(".", "").isdecimal())


def _find_program_path_words(entry: GitConfigLine) -> Iterator[str]:
    """Yield the words of a value that can be paths which git runs."""
    value = entry.value or ""
    if _PATHLESS_KEYS.fullmatch(entry.key) or is_harmless_git_setting(entry, lambda _: True):
        return
    if entry.key.startswith("alias.") and not value.lstrip().startswith("!") and not _RUNS_A_PROGRAM.search(value):
        return  # a command of git itself
    text = _OTHER_FOLDER.sub("./", _HOME.sub("~", value.removeprefix("!")))
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    parts = [part for part in _PARTS.split(text) if part]
    folders = [*dict.fromkeys(parts[at + 1] for at, part in enumerate(parts[:-1]) if part in ("cd", "pushd"))]
    for number, part in enumerate((*parts, *words)):
        first = number == 0 or number == len(parts)
        if _can_be_program_path(part, first=first):
            named = _OPTION_BEFORE_PATH.sub("", part)
            yield named
            if not named.startswith(("/", "~")):
                yield from (f"{folder}/{named}" for folder in folders[:_MOST_FOLDERS])
