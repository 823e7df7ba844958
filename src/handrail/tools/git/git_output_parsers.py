"""Shared parts of the git tools: parsers of git's output, parts of answers, and parts of declarations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct, field
from handrail.contract.tool.requires import FsRequires, Requires, ShellRequires
from handrail.contract.tool.spec import LockSpec, ToolSpec
from handrail.tools.git.git_repository import GitRepository, decode_git_output
from handrail.tools.tool_declarations import MAX_OUTPUT, WORKSPACE

# Parsers of git's machine-readable output.

_CHANGES = {
    "A": "added",
    "M": "modified",
    "D": "deleted",
    "R": "renamed",
    "C": "copied",
    "T": "type changed",
    "U": "unmerged",
}
_CONFLICTS = {
    "DD": "deleted by both",
    "AU": "added by us",
    "UD": "deleted by them",
    "UA": "added by them",
    "DU": "deleted by us",
    "AA": "added by both",
    "UU": "modified by both",
}
LINK, SUBMODULE = b"120000", b"160000"

COMMIT = "%H%x00%P%x00%an%x00%ae%x00%aI%x00%cn%x00%ce%x00%cI%x00%D%x00%B"
_COMMIT_FIELDS = 10


def describe_status_letter(letter: str) -> str:
    """Return the word for a status letter of git."""
    return _CHANGES.get(letter[:1], letter)


class ChangedGitPath(Struct, frozen=True):
    """A path that differs from the last commit or the index.

    :param index: how the index differs from the last commit, by git's letter; ``.`` for not at all
    :param worktree: how the file differs from the index
    :param mode: the mode in the work tree
    """

    path: bytes
    index: str
    worktree: str
    mode: bytes = b""
    before: bytes | None = None

    @property
    def is_file(self) -> bool:
        return self.mode not in (LINK, SUBMODULE)


class ParsedGitStatus(Struct):
    """The output of ``git status --porcelain=v2 --branch -z``."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    changed: list[ChangedGitPath] = field(default_factory=list[ChangedGitPath])
    unmerged: list[tuple[bytes, str]] = field(default_factory=list[tuple[bytes, str]])
    untracked: list[bytes] = field(default_factory=list[bytes])


def parse_status(output: bytes) -> ParsedGitStatus:
    found = ParsedGitStatus()
    words = iter(output.split(b"\0"))
    for word in words:
        kind, _, rest = word.partition(b" ")
        if kind == b"#":
            name, _, value = decode_git_output(rest).partition(" ")
            found.headers[name] = value
        elif kind == b"1":
            parts = rest.split(b" ", 7)
            found.changed.append(ChangedGitPath(parts[7], *_parse_letters(parts[0]), parts[4]))
        elif kind == b"2":
            parts = rest.split(b" ", 8)
            found.changed.append(ChangedGitPath(parts[8], *_parse_letters(parts[0]), parts[4], next(words, b"")))
        elif kind == b"u":
            parts = rest.split(b" ", 9)
            found.unmerged.append((parts[9], _CONFLICTS.get(decode_git_output(parts[0]), decode_git_output(parts[0]))))
        elif kind == b"?":
            found.untracked.append(rest)
    return found


def _parse_letters(pair: bytes) -> tuple[str, str]:
    letters = decode_git_output(pair)
    return letters[:1], letters[1:2]


class DiffPathEntry(Struct):
    """A path of a diff."""

    path: bytes
    change: str
    modes: tuple[bytes, bytes]
    before: bytes | None = None
    added: int | None = None
    """None for a file that is not text."""
    deleted: int | None = None

    @property
    def is_file(self) -> bool:
        return not {LINK, SUBMODULE} & set(self.modes)


def parse_raw_diff(output: bytes) -> list[DiffPathEntry]:
    """Parse the output of ``--raw --numstat -z``, or of ``--raw -z`` alone."""
    found: list[DiffPathEntry] = []
    counts: dict[bytes, tuple[bytes, bytes]] = {}
    words = iter(output.split(b"\0"))
    for word in words:
        if word[:1] == b":":
            parts = word[1:].split(b" ")
            letter, path, before = decode_git_output(parts[4])[:1], next(words, b""), None
            if letter in "RC":
                before, path = path, next(words, b"")
            found.append(DiffPathEntry(path, describe_status_letter(letter), (parts[0], parts[1]), before))
        elif word:
            added, deleted, path = word.split(b"\t", 2)
            if not path:
                next(words, b"")
                path = next(words, b"")
            counts[path] = added, deleted
    for one in found:
        added, deleted = counts.get(one.path, (b"-", b"-"))
        if added != b"-":
            one.added, one.deleted = int(added), int(deleted)
    return found


def parse_commit_log(output: bytes) -> list[dict[str, Any]]:
    """Parse the output of ``git log -z --format=COMMIT``."""
    fields = output.split(b"\0")
    return [
        _parse_commit(fields[at : at + _COMMIT_FIELDS])
        for at in range(0, len(fields) - _COMMIT_FIELDS + 1, _COMMIT_FIELDS)
    ]


def _parse_commit(fields: list[bytes]) -> dict[str, Any]:
    number, parents, name, address, date, other, other_address, committed, references, message = map(
        decode_git_output, fields
    )
    subject, _, body = message.strip("\n").partition("\n")
    found: dict[str, Any] = {
        "commit": number,
        "parents": parents.split(),
        "author": f"{name} <{address}>",
        "date": date,
        "subject": subject,
    }
    if body.strip("\n"):
        found["body"] = body.strip("\n")
    if (other, other_address) != (name, address):
        found["committer"] = f"{other} <{other_address}>"
    if committed != date:
        found["committed"] = committed
    if references:
        found["refs"] = references.split(", ")
    return found


def parse_blame(output: bytes) -> list[tuple[str, int, dict[str, str], str]]:
    """Parse the output of ``git blame --porcelain`` into ``(commit, line, data of the commit, text)``."""
    found: list[tuple[str, int, dict[str, str], str]] = []
    known: dict[str, dict[str, str]] = {}
    number, line = "", 0
    for row in output.split(b"\n"):
        if row[:1] == b"\t":
            found.append((number, line, known[number], decode_git_output(row[1:])))
            number = ""
        elif not number:
            words = decode_git_output(row).split(" ")
            if len(words) >= 3:
                number, line = words[0].lstrip("^"), int(words[2])
                known.setdefault(number, {})
        else:
            key, _, value = decode_git_output(row).partition(" ")
            known[number][key] = value
    return found


_T = TypeVar("_T")
MOST_LISTED = 500
STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=dirty", "--find-renames")


def make_limited_list_fields(name: str, found: Sequence[_T], row: Callable[[_T], Any]) -> dict[str, Any]:
    """Return the rows of ``found`` under ``name``, and the number of rows beyond the limit."""
    fields: dict[str, Any] = {name: [row(one) for one in found[:MOST_LISTED]]}
    if len(found) > MOST_LISTED:
        fields[f"{name}_not_listed"] = len(found) - MOST_LISTED
    return fields


def describe_hidden_paths(repository: GitRepository, paths: Iterable[bytes], consequence: str) -> dict[str, Any]:
    """Return the paths that rules hide, if any, and the consequence for the answer."""
    kept = sorted(map(repository.to_display_path, paths))[:MOST_LISTED]
    return {"redacted_paths": {"paths": kept, "why": f"Rules deny reading these files. {consequence}"}} if kept else {}


def describe_conflict(repository: GitRepository, one: tuple[bytes, str]) -> dict[str, str]:
    """Return a file with a conflict, and what each side did to it."""
    path, how = one
    return {"path": repository.to_display_path(path), "change": how}


async def require_conflict_free_status(repository: GitRepository, problem: str, then: str) -> ParsedGitStatus:
    """Return the state of the tracked files, if they have no conflicts.

    :param problem: the first sentence of the error; ``{}`` in it is the number of files
    :param then: the next step, a sentence
    :raises ToolError: ``conflict`` with the files, if there are any
    """
    state = await repository.run_and_parse_git(parse_status, *STATUS, "--untracked-files=no")
    if state.unmerged:
        text = f"{problem.format(len(state.unmerged))} {then}"
        found = [describe_conflict(repository, one) for one in state.unmerged[:MOST_LISTED]]
        raise ToolError(text, kind="conflict", data={"conflicts": found})
    return state


def describe_skipped_filters(repository: GitRepository) -> dict[str, Any]:
    """Return a note for the result if filters were not run."""
    if not repository.unrun_filters:
        return {}
    names = ", ".join(sorted(repository.unrun_filters)[:5])
    return {
        "skipped_filters": f"{names}: The repository configures programs for these filters, and Handrail does not run them. "
        "Files with these filters may appear as changed although they are not."
    }


# Shared parts of the declarations: requirements for reading and changing a repository, and common arguments.

TIMEOUT_MS = 120_000
"""The time-out of tools that write many files."""
FOLDER: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 4096,
    "default": ".",
    "description": "Folder in the repository",
}
READ_FOLDER: dict[str, Any] = {**FOLDER, "format": "path"}
"""The same, for tools whose reading is subject to the rules about files."""
PATHS: dict[str, Any] = {
    "type": "array",
    "maxItems": 2_000,
    "items": {"type": "string", "minLength": 1, "maxLength": 4096},
}
"""Files and folders of the repository. Each tool adds a description."""
WRITES = Requires(fs=WORKSPACE, shell=(ShellRequires(cmd="git"),))  # noqa: S604 - a declaration, nothing is run
READS = WRITES.model_copy(update={"fs": FsRequires(read=("{workspace}",))})
WRITES_CONFIG = WRITES.model_copy(update={"capabilities": ("vcs.config",)})
"""The requirements of tools that also write the repository's configuration, e.g. to track a remote branch."""

git_read_spec = partial(
    ToolSpec,
    requires=READS,
    side_effect="read",
    locks=(LockSpec("workspace", "S"),),
    idempotent=True,
    max_output=MAX_OUTPUT,
    category="git",
    kind="read",
)
"""Declares a tool that only reads a repository."""

git_change_spec = partial(
    ToolSpec, requires=WRITES, side_effect="write", locks=(LockSpec("workspace", "X"),), category="git"
)
"""Declares a tool that changes a repository or its files."""
