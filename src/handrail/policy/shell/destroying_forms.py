"""The commands that delete or overwrite what cannot be brought back: programs, sub-commands and options.

They require approval in every mode, also under a rule that allows the program. Only a rule that names every word allows them.
:func:`explain_irreversible_destruction` decides by the words alone. :func:`find_replaced_paths` and :func:`find_removed_paths` return the
paths of which the file system decides whether something is lost.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell.nested_commands import program_name
from handrail.policy.shell.simple_commands import ANY_TEXT, GLOB, has_marks, is_marked

_MOST_REMOVED = 3
"""The number of files that one command may remove by their names."""
CACHES = frozenset(
    {
        "__pycache__",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".hypothesis",
        ".tox",
        ".nox",
        ".turbo",
        ".parcel-cache",
    }
    | {".nyc_output", "htmlcov", ".coverage", ".eggs", ".gradle", ".ipynb_checkpoints", ".pytype", ".DS_Store"}
)
"""Names of files and folders that programs make again, and that hold nothing else."""
BUILD_OUTPUTS = frozenset(
    {
        "build",
        "dist",
        "node_modules",
        "target",
        "out",
        "bin",
        "obj",
        "coverage",
        ".next",
        ".nuxt",
        ".svelte-kit",
        ".output",
    }
    | {
        ".venv",
        "venv",
        "site",
        "_build",
        "cmake-build-debug",
        "cmake-build-release",
        ".cache",
        "public",
        ".vite",
        ".angular",
    }
)
"""Names of folders that hold only build outputs if git ignores them."""
_GENERATED = compile_regex_lazily(r".*\.(?:py[cod]|o|obj|class|egg-info|tsbuildinfo)")
_Check = Callable[[Sequence[str]], str | None]


def explain_irreversible_destruction(argv: Sequence[str]) -> str | None:
    """Return why a command may delete or overwrite what cannot be brought back, as half a sentence, or None."""
    check = _PROGRAMS.get(program_name(argv))
    return None if check is None else check(argv)


def may_command_destroy_data(argv: Sequence[str]) -> bool:
    """Return whether a command may delete or overwrite something by its words, also what can be brought back."""
    return (
        explain_irreversible_destruction(argv) is not None
        or bool(find_removed_paths(argv))
        or any(find_replaced_paths(argv))
    )


def is_cache(path: str) -> bool:
    """Return whether a path inside the workspace names something that a program makes again."""
    names = path.rstrip("/").split("/")
    if path[:1] == "/" or ".." in names or ".git" in names:
        return False
    return not CACHES.isdisjoint(names) or _GENERATED.fullmatch(names[-1]) is not None


def is_build_output(path: str) -> bool:
    """Return whether a path inside the workspace has the name of a folder for build outputs."""
    names = path.rstrip("/").split("/")
    return path[:1] != "/" and not is_marked(path) and ".." not in names and not BUILD_OUTPUTS.isdisjoint(names)


# The words of one program.


def split_words(argv: Sequence[str], with_value: str = "") -> tuple[list[str], list[str]]:
    """Return the options and the operands among the words after the program.

    :param with_value: the letters and names of options whose value is the next word, separated by spaces
    """
    values = with_value.split()
    options: list[str] = []
    operands: list[str] = []
    words = iter(argv[1:])
    for word in words:
        if word == "--":
            operands += words
        elif word[:1] != "-" or word == "-":
            operands.append(word)
        else:
            options.append(word)
            if word in values:
                next(words, None)
    return options, operands


def _has(options: Sequence[str], letters: str, *names: str) -> bool:
    """Return whether one of these options is present, alone, in a cluster, or shortened."""
    for option in options:
        if option[:2] == "--":
            name = option.partition("=")[0]
            if len(name) > 3 and any(long.startswith(name) for long in names):
                return True
        elif not set(letters).isdisjoint(option[1:]):
            return True
    return False


def _always(why: str) -> _Check:
    return lambda argv: f"{argv[0]} {why}"


def _rm(argv: Sequence[str]) -> str | None:
    options, operands = split_words(argv)
    operands = [_find_globbed_folder(word) or word for word in operands]
    if all(map(is_cache, operands)):
        return None
    if any(word[-1:] == "\x04" or is_marked(word) for word in (*operands, *options)):
        return f"{argv[0]} removes files that the command does not name"
    if _has(options, "rR", "--recursive"):
        if all(is_cache(word) or is_build_output(word) for word in operands):
            return None  # the file system decides
        return f"{argv[0]} removes folders with their content"
    if len(operands) > _MOST_REMOVED:
        return f"{argv[0]} removes many files"
    if any(_is_repository(word) for word in operands):
        return f"{argv[0]} removes version control data"
    return None


def _find_globbed_folder(word: str) -> str | None:
    """Return the folder of build outputs of which a word names entries by a pattern, as in ``build/*``; None for any other word."""
    folder, mark, rest = word.partition(GLOB)
    plain = bool(mark) and not rest and folder[-1:] == "/" and not is_marked(folder)
    return folder if plain and is_build_output(folder) else None


def _is_repository(word: str) -> bool:
    return any(name.rstrip(".").lower() in (".git", ".hg", ".svn", ".jj") for name in word.split("/"))


def _explain_dd(argv: Sequence[str]) -> str | None:
    if any(word.startswith("of=") and word != "of=/dev/null" for word in argv) or has_marks(argv):
        return "dd overwrites its output"
    return None


def _find(argv: Sequence[str]) -> str | None:
    if "-delete" in argv and not is_find_limited_to_caches(argv) and not _finds_only_empty_folders(argv):
        return "find -delete deletes every file that it finds"
    return None


def _finds_only_empty_folders(argv: Sequence[str]) -> bool:
    """Return whether ``find`` with these words finds only folders without any content."""
    if not {"-o", "-or", ",", "!", "-not", "(", ")"}.isdisjoint(argv) or has_marks(argv) or argv[-1] != "-delete":
        return False
    if any(word[:1] == "/" or ".." in word.split("/") for word in argv[1:]):
        return False
    return "-empty" in argv and ("-type", "d") in itertools.pairwise(argv)


def is_find_limited_to_caches(argv: Sequence[str]) -> bool:
    """Return whether ``find`` with these words finds only files that a program makes again."""
    if not {"-o", "-or", ",", "!", "-not", "(", ")"}.isdisjoint(argv) or has_marks(argv):
        return False
    if any(word[:1] == "/" or ".." in word.split("/") for word in argv[1:2]):
        return False
    for option, name in itertools.pairwise(argv):
        if option == "-name" and (name in CACHES or re.fullmatch(r"\*\.(?:py[cod]|o|obj|class)", name)):
            return True
    return False


def _mv(argv: Sequence[str]) -> str | None:
    options, operands = split_words(argv, "-t -S --target-directory --suffix")
    if has_marks(argv):
        return "mv moves files that the command does not name"
    if any(map(_is_repository, operands)):
        return "mv moves version control data"
    target = operands[-1] if operands else ""
    if target[:1] == "/" or target[:2] == "..":
        return "mv moves files out of the workspace"
    if _has(options, "t", "--target-directory"):
        return "mv with a target folder can overwrite files"
    return None


def _copies(argv: Sequence[str]) -> str | None:
    if is_marked(argv[-1]) or _has(split_words(argv)[0], "t", "--target-directory"):
        return f"{argv[0]} writes to a place that the command does not name exactly"
    return None


def _explain_unnamed_output(argv: Sequence[str]) -> str | None:
    return f"{argv[0]} writes to files that the command does not name" if has_marks(argv) else None


def _explain_truncation(argv: Sequence[str]) -> str | None:
    operands = split_words(argv, _TRUNCATE_VALUES)[1]
    if all(map(is_build_output, operands)):
        return None  # the file system decides
    return f"{argv[0]} removes or overwrites its arguments"


_TRUNCATE_VALUES = "-s --size -r --reference"


def _with_options(letters: str, *names: str, why: str) -> _Check:
    return lambda argv: f"{argv[0]} {why}" if _has(split_words(argv)[0], letters, *names) else None


def _chmod(argv: Sequence[str]) -> str | None:
    options, operands = split_words(argv)
    if not _has(options, "R", "--recursive"):
        return None
    if has_marks(argv) or any(word in (".", "/", "*", "..") for word in operands[1:]):
        return f"{argv[0]} -R changes the modes of many files"
    mode = next((word for word in argv[1:] if not re.fullmatch(r"-[Rcfv]+|--.*", word)), "")
    return f"{argv[0]} -R removes permissions" if re.match(r"[0-3]\d\d\Z|0[0-3]\d\d\Z|[ugoa]*[-=]", mode) else None


_SED_WHOLE = compile_regex_lazily(
    r"(?:(?:0|1),\$!?|/\.?\*?/)?\s*\{?\s*d\s*;?\s*\}?|\$!\s*d|/\^/\s*d|s(?P<sign>[/|#,])\^?\.[*+]\$?(?P=sign)(?P=sign)g?"
)


def _explain_sed(argv: Sequence[str]) -> str | None:
    options, operands = split_words(argv, "-e -f --expression --file")
    if not _has(options, "i", "--in-place"):
        return None
    if _has([option for option in options if option[:2] != "-i"], "n", "--quiet", "--silent"):
        return "sed -i with -n deletes every line that the script does not print"
    scripts = [after for word, after in itertools.pairwise(argv) if word in ("-e", "--expression")] or operands[:1]
    return "this sed script deletes every line" if any(map(_SED_WHOLE.fullmatch, scripts)) else None


def _edits_in_place(argv: Sequence[str]) -> str | None:
    """Check ``perl`` and ``ruby``, which with ``-i`` and ``-n`` keep only what their code prints."""
    options = split_words(argv)[0]
    clusters = [match.group() for option in options if (match := re.match(r"-[a-zA-Z0-9]+", option))]
    if any("i" in one for one in clusters) and any("n" in one.partition("i")[0] or one == "-n" for one in clusters):
        return f"{argv[0]} -i with -n deletes every line that the code does not print"
    return None


def _awk(argv: Sequence[str]) -> str | None:
    if "inplace" in argv and not any("print" in word for word in argv[1:]):
        return f"{argv[0]} -i inplace deletes every line that the code does not print"
    return None


def _rsync(argv: Sequence[str]) -> str | None:
    if any(word.startswith(("--del", "--remove-source", "--rem")) for word in argv):
        return "rsync deletes files"
    return "rsync writes to a place that the command does not name" if has_marks(argv) else None


def _tar(argv: Sequence[str]) -> str | None:
    if any(word.startswith(("--remove-files", "--recursive-unlink", "--unlink-first", "--overwrite")) for word in argv):
        return f"{argv[0]} removes or overwrites files"
    return None


def _ends_every_process(argv: Sequence[str]) -> str | None:
    return "kill -1 ends every process" if len(argv) > 2 and "-1" in argv[2:] else None


# Git and its like.


def _git(argv: Sequence[str]) -> str | None:
    index = find_git_command_index(argv)
    if index is None:
        return None
    command, rest = argv[index], argv[index:]
    if is_marked(command):
        return "git runs a command that the command line does not name"
    check = _GIT.get(command)
    return None if check is None else check(rest)


def find_git_command_index(argv: Sequence[str]) -> int | None:
    """Return the position of git's sub-command, or None."""
    index = 1
    while index < len(argv) and argv[index][:1] == "-":
        index += 2 if argv[index] in _GIT_WITH_VALUE else 1
    return index if index < len(argv) else None


_GIT_WITH_VALUE = frozenset(
    {"-c", "-C", "--git-dir", "--work-tree", "--exec-path", "--namespace", "--config-env", "--attr-source"}
)


def _git_clean(rest: Sequence[str]) -> str | None:
    return None if _has(split_words(rest)[0], "n", "--dry-run") else "git clean deletes files that are not tracked"


def _git_checkout(rest: Sequence[str]) -> str | None:
    options, operands = split_words(rest, "-b -B --orphan --conflict")
    if _has(options, "fpB", "--force", "--patch", "--ours", "--theirs", "--pathspec-from-file") or "--" in rest[:-1]:
        return "git checkout can discard changes"
    if len(operands) > 1 and not _has(options, "b", "--orphan"):
        return "git checkout can discard changes"
    if any(is_marked(word) or word in (".", "*", ":/", "..") or word[:2] == ":(" for word in operands):
        return "git checkout can discard changes"
    return None


def _git_restore(rest: Sequence[str]) -> str | None:
    options, _ = split_words(rest)
    if _has(options, "S", "--staged") and not _has(options, "W", "--worktree") and not has_marks(rest):
        return None
    return "git restore discards changes"


def _git_branch(rest: Sequence[str]) -> str | None:
    options, _ = split_words(rest)
    if _has(options, "DMCf", "--force") or (has_marks(rest) and _has(options, "d", "--delete")):
        return "git branch can remove or move a branch with its commits"
    return None


def _git_stash(rest: Sequence[str]) -> str | None:
    return (
        f"git stash {rest[1]} removes stored changes"
        if rest[1:2] in (("drop",), ["drop"], ("clear",), ["clear"])
        else None
    )


def _git_push(rest: Sequence[str]) -> str | None:
    options, operands = split_words(rest, "-o --push-option --repo")
    if _has(options, "fd", "--force", "--force-with-lease", "--force-if-includes", "--delete", "--mirror", "--prune"):
        return "git push with this option replaces or removes commits of the other repository"
    if any(word[:1] in (":", "+") or is_marked(word) for word in operands):
        return "git push can replace or remove a branch of the other repository"
    return None


def _git_rm(rest: Sequence[str]) -> str | None:
    options, operands = split_words(rest)
    if _has(options, "", "--cached"):
        return None
    if _has(options, "rf", "--force") or has_marks(rest) or len(operands) > _MOST_REMOVED:
        return "git rm removes many files, or files that are not committed"
    return None


def _git_option(letters: str, *names: str, why: str) -> _Check:
    return lambda rest: (
        f"git {rest[0]} {why}" if _has(split_words(rest)[0], letters, *names) or has_marks(rest[1:2]) else None
    )


def _git_words(*words: str, why: str) -> _Check:
    """Return a check for one of these words anywhere after the sub-command."""
    return lambda rest: (
        f"git {rest[0]} {why}" if any(word.partition("=")[0] in words or is_marked(word) for word in rest[1:]) else None
    )


_LOSES = "can lose commits or changes"
_GIT: Mapping[str, _Check] = {
    "clean": _git_clean,
    "checkout": _git_checkout,
    "co": _git_checkout,
    "switch": _git_option("fC", "--force", "--discard-changes", "--force-create", why=_LOSES),
    "restore": _git_restore,
    "reset": _git_words("--hard", "--merge", "--keep", "--h", "--ha", "--har", why="discards changes"),
    "stash": _git_stash,
    "branch": _git_branch,
    "tag": _git_option("df", "--delete", "--force", why="removes or moves a tag"),
    "push": _git_push,
    "rm": _git_rm,
    "worktree": _git_words("-f", "--force", "-ff", why="removes a folder with changes"),
    "reflog": _git_words("expire", "delete", why="removes the record of lost commits"),
    "repack": _git_option("a", why="removes objects that no branch reaches"),
    "mv": _git_option("f", "--force", why="overwrites a file"),
    "gc": _git_words("--prune", "--aggressive", why="removes objects that no branch reaches"),
    "update-ref": lambda rest: "git update-ref moves or removes a branch",
    "symbolic-ref": _git_option("d", "--delete", why="removes a reference"),
    "submodule": _git_words("deinit", why="removes a folder"),
    "read-tree": _git_words("-u", "--reset", "-m", why=_LOSES),
    "checkout-index": _git_option("fa", "--force", "--all", why="overwrites files"),
    "notes": _git_words("remove", "prune", "-f", why="removes notes"),
    "replace": _git_option("df", "--delete", "--force", why=_LOSES),
    "lfs": _git_words("prune", why="removes stored files"),
    "fast-import": _git_option("", "--force", why=_LOSES),
    **dict.fromkeys(("prune", "prune-packed", "filter-branch", "filter-repo", "delete", "obliterate"),
                    lambda rest: f"git {rest[0]} removes stored objects"),
}  # fmt: skip


def _subcommands(*names: str, why: str) -> _Check:
    def check(argv: Sequence[str]) -> str | None:
        found = next((word for word in argv[1:] if word[:1] != "-"), "")
        return f"{argv[0]} {found} {why}" if found in names or is_marked(found) else None

    return check


_PROGRAMS: Mapping[str, _Check] = {
    **dict.fromkeys(("rm", "unlink", "grm"), _rm),
    **dict.fromkeys(("shred", "srm", "wipe", "scrub", "blkdiscard", "wipefs", "fdisk", "sfdisk", "parted", "dropdb"),
                    _always("removes or overwrites its arguments")),
    **dict.fromkeys(("mkfs", "mke2fs", "mkswap", "mkfs.ext4", "mkfs.xfs", "mkfs.vfat", "mkfs.btrfs"), _always("overwrites what it names")),
    **dict.fromkeys(("rename", "prename", "mmv", "detox"), _always("renames files by a pattern, and may overwrite others")),
    "dd": _explain_dd,
    **dict.fromkeys(("find", "gfind", "bfs"), _find),
    **dict.fromkeys(("mv", "gmv"), _mv),
    **dict.fromkeys(("cp", "gcp", "install", "ln"), _copies),
    **dict.fromkeys(("tee", "sponge"), _explain_unnamed_output),
    **dict.fromkeys(("truncate", "gtruncate"), _explain_truncation),
    **dict.fromkeys(("rimraf", "del-cli", "shx", "trash-empty"), _always("removes files")),
    **dict.fromkeys(("chmod", "chown", "chgrp"), _chmod),
    **dict.fromkeys(("sed", "gsed"), _explain_sed),
    **dict.fromkeys(("perl", "ruby"), _edits_in_place),
    **dict.fromkeys(("awk", "gawk"), _awk),
    "rsync": _rsync,
    **dict.fromkeys(("tar", "gtar", "bsdtar"), _tar),
    "zip": _with_options("m", "--move", why="removes the files that it packs"),
    "kill": _ends_every_process,
    **dict.fromkeys(("pkill", "killall"), _with_options("uU", "--euid", "--uid", "--user", why="ends all processes of a user")),
    "fallocate": _with_options("pcdz", "--punch-hole", "--collapse-range", "--zero-range", "--dig-holes", why="overwrites a file"),
    "git": _git,
    "hg": _subcommands("purge", "revert", "strip", "rollback", "clean", why=_LOSES),
    "svn": _subcommands("revert", "cleanup", "delete", "rm", why=_LOSES),
    "jj": _subcommands("abandon", "restore", why=_LOSES),
    "redis-cli": _subcommands("flushall", "flushdb", "FLUSHALL", "FLUSHDB", why="removes all data"),
    "crontab": _with_options("r", why="removes the table"),
}  # fmt: skip
PROGRAM_NAMES = frozenset(_PROGRAMS)
"""The programs with a form that destroys."""


# What the file system decides.

_ARCHIVERS = frozenset({"tar", "gtar", "bsdtar", "unzip", "cpio", "7z", "7za", "7zz"})
WRITING_PROGRAMS = frozenset({"sort", "gsort", "shuf", "iconv", "uniq", "xxd", "mawk", "nawk"}) | _ARCHIVERS
"""Further programs for which :func:`find_replaced_paths` has an answer."""


def find_removed_paths(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the paths whose files a command removes by their names, or replaces by a committed version."""
    if program_name(argv) == "git":
        index = find_git_command_index(argv)
        is_checkout = index is not None and argv[index] in ("checkout", "co")
        return tuple(split_words(argv[index:], "-b -B --orphan --conflict")[1]) if is_checkout else ()
    if program_name(argv) not in ("rm", "unlink", "grm"):
        return ()
    return tuple(_find_globbed_folder(word) or word for word in split_words(argv)[1] if not is_cache(word))


def find_replaced_paths(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each path that a command replaces if there is a file.

    :returns: pairs of the path, and of the name within it if it is a folder
    """
    program = program_name(argv)
    if program in ("mv", "gmv", "cp", "gcp", "install", "ln"):
        options, operands = split_words(argv, "-t -S -m -o -g --suffix --target-directory --mode --owner --group")
        if program == "ln" and not _has(options, "f", "--force"):
            return
        if len(operands) < 2 or (program != "install" and _keeps_replaced_file(program, options)):
            return
        for source in operands[:-1]:
            yield operands[-1], posixpath.basename(source.rstrip("/"))
    elif program in ("tee", "sponge"):
        options, operands = split_words(argv)
        if not _has(options, "a", "--append"):
            yield from ((word, "") for word in operands)
    elif program == "rsync":
        operands = split_words(argv)[1]
        if operands:
            yield operands[-1], posixpath.basename(operands[0])
    elif program in ("sort", "gsort", "shuf", "iconv"):
        for word, after in zip(argv, [*argv[1:], ""], strict=True):
            if word in ("-o", "--output"):
                yield after, ""
            elif word[:2] == "-o" or word.startswith("--output="):
                yield word.removeprefix("--output=").removeprefix("-o"), ""
    elif program in ("awk", "gawk", "mawk", "nawk"):
        yield from ((match.group("path"), "") for word in argv[1:] for match in _AWK_OUTPUT.finditer(word))
    elif program in ("truncate", "gtruncate"):
        yield from ((word, "") for word in split_words(argv, _TRUNCATE_VALUES)[1])
    elif program in _ARCHIVERS:
        yield from _find_unpacked_folders(program, argv)
    elif program in ("uniq", "xxd"):
        operands = split_words(argv, "-f -s -w -c -l")[1]
        yield from ((word, "") for word in operands[1:2])


def _keeps_replaced_file(program: str, options: Sequence[str]) -> bool:
    """Return whether ``cp``, ``mv`` or ``ln`` with these options leaves a file, or keeps it under another name."""
    backups = [word for word in options if word.startswith("--b") or (word[:2] != "--" and "b" in word)]
    if backups and not any(word.partition("=")[2] in ("none", "off") for word in backups):
        return True
    if program == "ln" or not _has(options, "n", "--no-clobber"):
        return False
    return not _has(options, "fi", "--force", "--interactive")  # for mv, the last one counts


def _find_unpacked_folders(program: str, argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each folder that an archive is unpacked into, over files in it, with a mark for the unknown names."""
    words = [*argv[1:], ""]
    options, operands = split_words(argv, _ARCHIVE_VALUES.get(program, "-C -f --directory --file"))
    if program in ("tar", "gtar", "bsdtar"):
        clusters = [_TAR_VALUE.sub(r"\1", word) for word in options]
        old = words[0] if words[0][:1] != "-" else ""  # each letter of the first word is an option
        unpacks = "x" in old or _has(clusters, "x", "--extract", "--get")
        keeps = _has(clusters, "kO", "--keep-old-files", "--skip-old-files", "--to-stdout")
        keeps = (keeps or not set("kO").isdisjoint(old)) and not (
            "U" in old
            or _has(clusters, "U", "--overwrite", "--unlink-first", "--recursive-unlink", "--keep-newer-files")
        )
        folders = [after for word, after in itertools.pairwise(words) if word in ("-C", "--directory")]
        folders += [word.partition("=")[2] for word in words if word.startswith("--d") and "=" in word]
        folders += [word[2:] for word in words if word[:2] == "-C" and len(word) > 2]
    elif program == "unzip":
        unpacks, keeps = _has(options, "o"), _has(options, "plt")
        folders = [after for word, after in itertools.pairwise(words) if word == "-d"]
    elif program == "cpio":
        copies = _has(options, "p", "--pass-through")
        unpacks = (copies or _has(options, "i", "--extract")) and _has(options, "u", "--unconditional")
        keeps, folders = False, operands if copies else []
    else:
        unpacks, keeps = operands[:1] in (["x"], ["e"]) and not {"-y", "-aoa"}.isdisjoint(words), False
        folders = [word[2:] for word in words if word[:2] == "-o"]
    if unpacks and not keeps:
        yield from ((folder, ANY_TEXT) for folder in folders or ["."])


_ARCHIVE_VALUES = {"unzip": "-d", "cpio": "-C -E -F -H -I -M -O -R", **dict.fromkeys(("7z", "7za", "7zz"), "")}
_TAR_VALUE = compile_regex_lazily(r"\A(-[a-zA-Z]*?[bCfFgHIKLNTVX]).+", re.DOTALL)
"""A cluster of ``tar`` whose last option has its value attached, such as the file in ``-xfbackup.tar``."""


_AWK_OUTPUT = re.compile(r'\bprintf?\b[^;{}>]*(?<!>)>\s*"(?P<path>[^"\\]+)"')
