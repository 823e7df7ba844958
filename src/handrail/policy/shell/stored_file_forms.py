"""The commands that print files as a git repository stores them, now or in its history.

The sandbox hides a file of the work tree, but not what the repository stores of it. A command that is not known to print no
stored file counts as one that prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import confinement_proof, destroying_forms, read_only_proof
from handrail.policy.shell.nested_commands import program_name
from handrail.policy.shell.parser import ShellScript
from handrail.policy.shell.simple_commands import is_marked

_Scope = Literal["", "index", "history", "unknown"]


class StoredContentAccess(NamedTuple):
    """The stored files of a repository that a command may print.

    :param scope: the files in the index, all of the history, or those of a repository that the words do not plainly name
    :param folders: where the command may run, relative to the first folder; empty if that is unknown
    :param shown: the command as a message names it
    """

    scope: _Scope
    folders: tuple[str, ...]
    shown: str


def find_stored_file_accesses(script: ShellScript, text: str) -> list[StoredContentAccess]:
    """Return what the commands of a text may print of stored files."""
    if script.unclear is not None:
        match = _PRINTING_WORDS.search(text)
        if match is None and not _computes_a_program(script, text):
            return []
        return [StoredContentAccess("history", (), "a computed command" if match is None else match.group())]
    found: list[StoredContentAccess] = []
    for command in script.commands:
        if "git" not in " ".join(command.argv):
            continue
        for argv in confinement_proof.unwrap_executed_commands(command.argv):
            access = _find_access(argv, command.folders)
            if access.scope:
                found.append(access)
    return found


def _computes_a_program(script: ShellScript, text: str) -> bool:
    """Return whether the shell computes a word of an unclear text that names a program, which may be git."""
    return "$'" in text or any(one.argv and _EXPANDED.search(one.argv[0]) is not None for one in script.commands)


def _find_access(argv: Sequence[str], folders: tuple[str, ...]) -> StoredContentAccess:
    if not argv:
        return StoredContentAccess("", folders, "")
    if program_name(argv) != "git":
        match = (
            _PRINTING_WORDS.search(" ".join(argv)) if not read_only_proof.is_command_provably_read_only(argv) else None
        )
        return StoredContentAccess("" if match is None else "history", folders, "" if match is None else match.group())
    index = destroying_forms.find_git_command_index(argv)
    if index is None:
        return StoredContentAccess("", folders, "git")
    verb, rest = argv[index], argv[index:]
    scope = "history" if is_marked(verb) else _SCOPES.get(verb, _history)(rest)
    for at, word in enumerate(argv[:index]):
        if word == "-C":
            folders = () if is_marked(argv[at + 1]) else tuple(_join(folder, argv[at + 1]) for folder in folders)
    if scope and any(word.startswith(_OTHER_REPOSITORIES) for word in argv):
        scope = "unknown"
    return StoredContentAccess(scope, folders, f"git {'…' if is_marked(verb) else verb}")


_OTHER_REPOSITORIES = ("--git-dir", "--work-tree", "--submodule=d", "--recurse-submodules")


def _join(folder: str, further: str) -> str:
    return further if further[:1] == "/" or folder == "." else f"{folder}/{further}"


_EXPANDED = compile_regex_lazily(r"[$`*?\[{]")
_PRINTING_WORDS = compile_regex_lazily(
    r"\bgit\b[^\n]*?\b(?:log|show|diff|blame|annotate|grep|cat-file|archive|format-patch|stash|range-diff|fast-export|bundle|whatchanged"
    r"|difftool|diff-tree|diff-index|diff-files|reflog|unpack-file|merge-tree)\b"
)

_Check = Callable[[Sequence[str]], _Scope]


def _nothing(_rest: Sequence[str]) -> _Scope:
    return ""


def _history(_rest: Sequence[str]) -> _Scope:
    return "history"


def _index(_rest: Sequence[str]) -> _Scope:
    return "index"


def _read_only_form(rest: Sequence[str]) -> _Scope:
    return "" if read_only_proof.explain_git_shows_stored_files(("git", *rest)) is None else "history"


def _diff(rest: Sequence[str]) -> _Scope:
    """Return the scope of ``git diff``: without a revision, it compares the index with files."""
    if read_only_proof.explain_git_shows_stored_files(("git", *rest)) is None:
        return ""
    options, operands = destroying_forms.split_words(rest)
    before = rest[: rest.index("--")] if "--" in rest else rest
    named = any(word in operands for word in before[1:])
    return (
        "history"
        if named or any(word.startswith(("--cached", "--staged", "--no-i", "--merge-b")) for word in options)
        else "index"
    )


def _grep(rest: Sequence[str]) -> _Scope:
    before = rest[: rest.index("--")] if "--" in rest else rest
    return "index" if len(destroying_forms.split_words(before)[1]) <= 1 else "history"


def _with_patch(*names: str, letters: str = "") -> _Check:
    """Return a check for an option that prints the changes of files, or for one of these words."""

    def check(rest: Sequence[str]) -> _Scope:
        for word in rest[1:]:
            if word == "--":
                break
            if (
                word in names
                or word in ("--patch", "--interactive")
                or word.startswith(("--show-current", "--unified"))
            ):
                return "history"
            if word[:1] == "-" and word[:2] != "--" and not {"p", *letters}.isdisjoint(word[1:]):
                return "history"
        return ""

    return check


def _with_words(*names: str) -> _Check:
    """Return a check for one of these words, also with a value attached."""
    return lambda rest: "history" if any(word.partition("=")[0] in names for word in rest[1:]) else ""


def _transfer(rest: Sequence[str]) -> _Scope:
    """Return the scope of a transfer: a repository in another folder has the same files under other paths."""
    return "history" if any(word[:1] in ("/", ".", "~") or word[:5] == "file:" for word in rest[1:]) else ""


def _clone(rest: Sequence[str]) -> _Scope:
    operands = destroying_forms.split_words(rest)[1]
    return "history" if _transfer(rest) or (operands and ":" not in operands[0]) else ""


_SCOPES: Mapping[str, _Check] = {
    **dict.fromkeys(
        ("am", "apply", "branch", "check-attr", "check-ignore", "check-ref-format", "cherry", "clean",
         "count-objects", "describe", "fsck", "gc", "hash-object", "help", "init", "lfs", "ls-files", "ls-remote", "ls-tree",
         "maintenance", "merge", "merge-base", "mktag", "mv", "name-rev", "notes", "pack-refs", "prune", "remote",
         "repack", "replace", "rev-parse", "revert", "rm", "shortlog", "show-branch", "show-ref", "sparse-checkout", "switch",
         "symbolic-ref", "update-ref", "var", "verify-commit", "verify-pack", "verify-tag", "version",
         "write-tree", "cherry-pick", "config", "--version"),
        _nothing,
    ),
    **dict.fromkeys(("log", "whatchanged", "show", "status", "cat-file", "rev-list", "for-each-ref"), _read_only_form),
    **dict.fromkeys(("blame", "annotate", "checkout-index"), _index),
    **dict.fromkeys(("fetch", "pull", "push"), _transfer),
    "clone": _clone,
    "worktree": _with_words("add", "move"),
    "bisect": _with_words("view", "visualize", "run"),
    "update-index": _with_words("--cacheinfo", "--index-info"),
    "diff": _diff,
    "grep": _grep,
    **dict.fromkeys(("add", "checkout", "restore", "reset", "rebase", "tag", "reflog"), _with_patch()),
    "commit": _with_patch("--dry-run", "--verbose", letters="v"),
    "stash": _with_patch("show"),
    "submodule": _with_patch("foreach", "summary"),
}  # fmt: skip
"""For each command of git, the stored files that its words may print. Others, such as aliases, may print all of them."""
