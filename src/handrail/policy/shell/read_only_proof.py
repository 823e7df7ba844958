"""A proof that a command changes nothing. A command that is not in the table below has no proof.

The proof is about the effect of a program with exactly these words. It ignores the effects of configuration (git's fsmonitor,
textconv, external diff and pager; a shell's aliases). So a call counts as read-only only if it also *runs* read-only: with the
workspace mounted read-only, without network and secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from handrail.contract.errors import quote_text_or_length
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import command_wrappers, program_risks, risky_options
from handrail.policy.shell.parser import ShellScript

_Check = Callable[[Sequence[str]], str | None]


def explain_command_not_read_only(argv: Sequence[str]) -> str | None:
    """Return why this command is not proved to change nothing, as half a sentence, or None."""
    return _why_not(tuple(argv))


def is_command_provably_read_only(argv: Sequence[str]) -> bool:
    """Return whether this command is proved to change nothing."""
    return _why_not(tuple(argv)) is None


@lru_cache(maxsize=512)
def _why_not(argv: tuple[str, ...]) -> str | None:
    *around, inner = command_wrappers.split_wrapper_layers(argv)
    if any(layer[0].endswith("nohup") for layer in around):
        return "nohup can write the output of its command to a file"
    if not inner or "/" in inner[0]:
        return f"{inner[0] if inner else 'the program'} is not known by its plain name"
    check = _PROGRAMS.get(inner[0])
    if check is None:
        return f"{inner[0]} may change something"
    find_risk = (
        program_risks.make_unknown_word_risk if inner[0] in _NARROWER_CHECKS else program_risks.find_hidden_program_risk
    )
    if (concern := find_risk(inner)) is not None:
        return concern.reason
    return check(inner)


def explain_script_not_read_only(script: ShellScript) -> str | None:
    """Return why a shell text is not proved to change nothing, or None.

    The proof needs every command and redirection of the text.
    """
    if script.unclear is not None:
        return script.unclear
    for file in script.files:
        if file.capability != "fs.read":
            return f"the command redirects into {file.target!r}"
    for command in script.commands:
        if (reason := explain_command_not_read_only(command.argv)) is not None:
            return reason
    return None if script.commands else "the command line has no command"


# Checks of the words of one program.


def _accept_any(_argv: Sequence[str]) -> None:
    return None


def _check_for_known_options(short: str = "", *long: str) -> _Check:
    """Return a check that accepts only these options.

    Short ones are letters, alone or in a cluster, also with a number. Long ones are written in full. Operands may be anything,
    and so may every word after ``--``.
    """
    letters = frozenset(short)
    names = frozenset(long)

    def check(argv: Sequence[str]) -> str | None:
        for word in argv[1:]:
            if word == "--":
                return None
            if word[:2] == "--":
                if word.partition("=")[0] not in names:
                    return f"the option {word} of {argv[0]} may change something"
            elif word[:1] == "-" and not all(c in letters or c.isdigit() for c in word[1:]):
                return f"the option {word} of {argv[0]} may change something"
        return None

    return check


def _check_for_risky_options(short: str, *long: str) -> _Check:
    """Return a check that accepts any options but these.

    A shortened long option counts as written in full. It is for programs whose other options are all harmless.
    """
    letters = frozenset(short)

    def check(argv: Sequence[str]) -> str | None:
        for word in argv[1:]:
            name = word.partition("=")[0]
            if word[:2] == "--":
                bad = len(word) > 2 and any(one.startswith(name) for one in long)
            else:
                bad = word[:1] == "-" and not letters.isdisjoint(word[1:])
            if bad:
                return f"{argv[0]} {word} can write or run something"
        return None

    return check


def _no_operands(argv: Sequence[str]) -> str | None:
    return None if len(argv) == 1 else f"{argv[0]} with arguments can change something"


def _find(argv: Sequence[str]) -> str | None:
    words: list[str] = []
    runs = False
    for word in argv[1:]:
        runs = (runs and word not in (";", "+")) or word in ("-exec", "-execdir")
        if not runs:
            words.append(word)
    for inner in risky_options.iterate_find_exec_commands(argv):
        if inner[:1] == ("find",):
            return "find runs find on each file"
        if (reason := explain_command_not_read_only(inner)) is not None:
            return reason
    for word in words:
        if word[:1] == "-" and word not in _FIND and not re.fullmatch(r"-O[0-3]|-[0-9]+|-newer[aBcmt]{2}", word):
            return f"find {word} may change something"
    return None


_FIND = frozenset(
    {"-name", "-iname", "-path", "-ipath", "-wholename", "-regex", "-iregex", "-regextype", "-type", "-xtype", "-size"}
    | {"-empty", "-newer", "-mtime", "-mmin", "-atime", "-amin", "-ctime", "-cmin", "-maxdepth", "-mindepth", "-depth"}
    | {"-print", "-print0", "-printf", "-ls", "-prune", "-quit", "-not", "-and", "-or", "-a", "-o", "-perm", "-user"}
    | {"-group", "-uid", "-gid", "-links", "-inum", "-samefile", "-readable", "-writable", "-executable", "-true"}
    | {"-false", "-follow", "-xdev", "-mount", "-daystart", "-noleaf", "-L", "-P", "-H", "-lname", "-ilname", "-nouser"}
    | {"-nogroup", "-anewer", "-cnewer", "-used", "-warn", "-nowarn", "--"}
)  # fmt: skip


def _date(argv: Sequence[str]) -> str | None:
    if any(word[:1] not in ("-", "+") for word in argv[1:]):
        return "date with an argument that is not a format can set the clock"
    return _check_for_known_options("uRI", "--utc", "--iso-8601", "--rfc-3339", "--rfc-email")(argv)


def _check_for_exact_word(*forms: str) -> _Check:
    """Return a check for exactly one of these words after the program."""
    return lambda argv: (
        None if len(argv) == 2 and argv[1] in forms else f"{argv[0]} runs the program that its arguments name"
    )


def _command(argv: Sequence[str]) -> str | None:
    return None if tuple(argv[1:2]) in (("-v",), ("-V",)) else "command runs the program that its arguments name"


def _listing(*forms: str) -> _Check:
    """Return a check for one of these forms, each with further operands that are no options."""
    known = [tuple(form.split()) for form in forms]

    def check(argv: Sequence[str]) -> str | None:
        if any(
            tuple(argv[1 : 1 + len(form)]) == form and all(word[:1] != "-" for word in argv[1 + len(form) :])
            for form in known
        ):
            return None
        return f"{argv[0]} only reads in some of its forms"

    return check


def _env(argv: Sequence[str]) -> str | None:
    return None if len(argv) == 1 else "env runs the program that its arguments name"


def _at_most_one_operand(argv: Sequence[str]) -> str | None:
    operands = [word for word in argv[1:] if word[:1] != "-" or word == "-"]
    return f"{argv[0]} writes to its second operand" if len(operands) > 1 else None


def _xargs(argv: Sequence[str]) -> str | None:
    """Check ``xargs`` with a program whose options never change anything, because its words are unknown."""
    index = 1
    while index < len(argv) and argv[index][:1] == "-":
        word = argv[index]
        if word in ("-n", "-P", "-L", "-I", "-d", "-s", "-E"):
            index += 2
        elif re.fullmatch(
            r"-[0rtx]+|-[nPLs]\d+|-I.+|-d.+|--null|--no-run-if-empty|--max-(?:args|procs|lines)=\d+", word
        ):
            index += 1
        else:
            return f"xargs {word} may change something"
    command = argv[index : index + 1]
    if not command or command[0] not in _HARMLESS_WITH_ANY_WORDS:
        return "xargs adds unknown words to its command"
    return explain_command_not_read_only(tuple(argv[index:]))


_GIT_GLOBAL = frozenset({"--no-pager", "-P", "--no-optional-locks", "--literal-pathspecs", "--no-replace-objects"})
_LOG = (
    *("--oneline", "--stat", "--shortstat", "--numstat", "--summary", "--name-only", "--name-status", "--graph", "--all"),
    *("--decorate", "--no-decorate", "--abbrev-commit", "--no-abbrev-commit", "--abbrev", "--date", "--format", "--pretty"),
    *("--author", "--committer", "--grep", "--since", "--until", "--after", "--before", "--max-count", "--skip", "--reverse"),
    *("--merges", "--no-merges", "--first-parent", "--follow", "--patch", "--no-patch", "--cached", "--staged", "--unified"),
    *("--color", "--no-color", "--word-diff", "--color-words", "--ignore-all-space", "--ignore-space-change", "--minimal"),
    *("--ignore-blank-lines", "--find-renames", "--find-copies", "--no-renames", "--diff-filter", "--check", "--exit-code"),
    *("--quiet", "--raw", "--patch-with-stat", "--dirstat", "--text", "--binary", "--full-index", "--relative", "--merge-base"),
    *("--no-ext-diff", "--no-textconv", "--histogram", "--patience", "--diff-algorithm", "--function-context", "--branches"),
    *("--tags", "--remotes", "--topo-order", "--date-order", "--no-notes", "--source", "--cc", "--root"),
)  # fmt: skip
_GIT: Mapping[str, _Check] = {
    "status": _check_for_known_options("sbuvz", "--short", "--branch", "--porcelain", "--untracked-files", "--ignored", "--long", "--verbose",
                     "--show-stash", "--ahead-behind", "--no-ahead-behind", "--renames", "--no-renames", "--null", "--column"),
    "log": _check_for_known_options("pnsSGLiEFPMCwbU-zcm", *_LOG),
    "show": _check_for_known_options("pnsSGLiEFPMCwbUzcm", *_LOG),
    "diff": _check_for_known_options("psSGiMCwbUzRWD", *_LOG, "--no-index"),
    "shortlog": _check_for_known_options("nsecw", "--numbered", "--summary", "--email", "--all", "--since", "--until"),
    "blame": _check_for_known_options("LlswMCeftbn", "--line-porcelain", "--porcelain", "--show-name", "--show-number", "--date", "--abbrev"),
    "grep": _check_for_known_options("niIlLcwvEFPhHeoWABCaqz", "--line-number", "--ignore-case", "--cached", "--untracked", "--count",
                   "--files-with-matches", "--name-only", "--word-regexp", "--fixed-strings", "--extended-regexp",
                   "--perl-regexp", "--show-function", "--heading", "--break", "--no-color", "--color", "--and", "--or",
                   "--not", "--all-match", "--column", "--context", "--after-context", "--before-context", "--max-depth"),
    "ls-files": _check_for_known_options("cdmoiustzvfk", "--cached", "--deleted", "--modified", "--others", "--ignored", "--stage", "--unmerged",
                       "--exclude-standard", "--exclude", "--full-name", "--error-unmatch", "--directory", "--eol"),
    "ls-tree": _check_for_known_options("drtlz", "--name-only", "--name-status", "--long", "--full-name", "--full-tree", "--abbrev"),
    "rev-parse": _check_for_known_options("q", "--abbrev-ref", "--short", "--verify", "--show-toplevel", "--git-dir", "--is-inside-work-tree",
                        "--symbolic-full-name", "--show-prefix", "--quiet", "--is-bare-repository", "--git-common-dir"),
    "rev-list": _check_for_known_options("n", *_LOG, "--count", "--objects"),
    "describe": _check_for_known_options("", "--tags", "--always", "--long", "--dirty", "--abbrev", "--match", "--exact-match", "--all"),
    "cat-file": _check_for_known_options("tsep"),
    "merge-base": _check_for_known_options("a", "--is-ancestor", "--all", "--fork-point"),
    "name-rev": _check_for_known_options("", "--name-only", "--tags", "--refs"),
    "show-ref": _check_for_known_options("dsq", "--heads", "--tags", "--verify", "--dereference", "--hash", "--head"),
    "for-each-ref": _check_for_known_options("", "--format", "--sort", "--count", "--contains", "--merged", "--no-merged", "--points-at"),
    "count-objects": _check_for_known_options("vH", "--verbose"),
    "check-ignore": _check_for_known_options("vnq", "--verbose", "--non-matching", "--no-index", "--quiet"),
    "whatchanged": _check_for_known_options("pns", *_LOG),
    "version": _accept_any,
}  # fmt: skip


def _git(argv: Sequence[str]) -> str | None:
    index = 1
    while index < len(argv) and (argv[index] in _GIT_GLOBAL or risky_options.is_harmless_git_option(argv, index)):
        index += 1 if argv[index] in _GIT_GLOBAL else 2
    if index == len(argv):
        return None
    command, rest = argv[index], argv[index:]
    if command == "--version":
        return None
    if command in ("branch", "tag", "remote", "stash", "worktree", "config", "reflog", "submodule", "notes"):
        return (
            None
            if tuple(rest) in _GIT_LISTINGS or _git_only_lists(rest)
            else f"git {command} lists only in some of its forms"
        )
    check = _GIT.get(command)
    if check is None:
        return f"git {quote_text_or_length(command, 40)} may change something"
    return check(rest)


_SUMMARY_OPTIONS = frozenset(_LOG) - {
    *("--patch", "--unified", "--word-diff", "--color-words", "--binary", "--text", "--check", "--patch-with-stat", "--cc"),
    "--function-context",
}  # fmt: skip
_NO_CONTENTS = _check_for_known_options("nsiEFPMCwbz", *_SUMMARY_OPTIONS)
"""A check for options of ``git log`` and ``git diff`` with which no line of a file is printed or searched."""
_SUMMARIES = frozenset(
    {
        "--stat",
        "--shortstat",
        "--numstat",
        "--summary",
        "--name-only",
        "--name-status",
        "--dirstat",
        "--raw",
        "--no-patch",
    }
    | {"--quiet", "-s"}
)
_HEAD = compile_regex_lazily(r"(?:HEAD|@)(?:[~^][0-9]*)*")


def explain_git_shows_stored_files(argv: Sequence[str]) -> str | None:
    """Return why a git command can show files that the repository stores, as half a sentence, or None.

    The sandbox hides a file of the work tree. No mask covers what the repository stores of it, now or in its history. A path
    among the words is no limit: it may be a folder, and it is relative to a folder that is unknown here.
    """
    *_, inner = command_wrappers.split_wrapper_layers(argv)
    if not inner or inner[0] != "git":
        return None
    index = 1
    while index < len(inner) and (inner[index] in _GIT_GLOBAL or risky_options.is_harmless_git_option(inner, index)):
        index += 1 if inner[index] in _GIT_GLOBAL else 2
    rest = inner[index:]
    shows = _SHOWS_CONTENTS.get(rest[0]) if rest else None
    if shows is None or not shows(rest):
        return None
    return f"git {rest[0]} can show hidden files as the repository stores them"


def _always(_rest: Sequence[str]) -> bool:
    return True


def _log_shows_contents(rest: Sequence[str]) -> bool:
    return _NO_CONTENTS(rest) is not None


def _diff_shows_contents(rest: Sequence[str]) -> bool:
    return _NO_CONTENTS(rest) is not None or _SUMMARIES.isdisjoint(_option_names_in_words(rest))


def _show_shows_contents(rest: Sequence[str]) -> bool:
    operands = [word for word in rest[1:] if word[:1] != "-"]
    return _diff_shows_contents(rest) or not all(map(_HEAD.fullmatch, operands))


def _status_shows_contents(rest: Sequence[str]) -> bool:
    return any(word == "--verbose" or (word[:1] == "-" and word[:2] != "--" and "v" in word) for word in rest[1:])


def _cat_file_shows_contents(rest: Sequence[str]) -> bool:
    return not any(word in ("-t", "-s", "-e") for word in rest[1:2])


def _rev_list_shows_contents(rest: Sequence[str]) -> bool:
    return "--objects" in rest or _NO_CONTENTS([word for word in rest if word != "--count"]) is not None


def _for_each_ref_shows_contents(rest: Sequence[str]) -> bool:
    return any("%(raw" in word or "%(*raw" in word for word in rest)


def _stash_shows_contents(rest: Sequence[str]) -> bool:
    return "show" in rest


_SHOWS_CONTENTS: Mapping[str, Callable[[Sequence[str]], bool]] = {
    "log": _log_shows_contents,
    "whatchanged": _log_shows_contents,
    "diff": _diff_shows_contents,
    "show": _show_shows_contents,
    "status": _status_shows_contents,
    "cat-file": _cat_file_shows_contents,
    "rev-list": _rev_list_shows_contents,
    "for-each-ref": _for_each_ref_shows_contents,
    "stash": _stash_shows_contents,
    "blame": _always,
    "grep": _always,  # which reads the index for a file marked as unchanged
    "ls-tree": _always,
}
"""For each command of git, a test whether its words can show files that the repository stores."""


def _option_names_in_words(words: Sequence[str]) -> frozenset[str]:
    """Return the options among the words of a command, without their values."""
    options = words[: words.index("--")] if "--" in words else words
    return frozenset(word.partition("=")[0] for word in options if word[:1] == "-")


_GIT_LISTINGS = frozenset(
    {
        ("branch",),
        ("tag",),
        ("remote",),
        ("stash", "list"),
        ("worktree", "list"),
    }
    | {
        ("reflog",),
        ("submodule", "status"),
        ("notes", "list"),
        ("remote", "-v"),
        ("remote", "--verbose"),
        ("stash", "show"),
    }
)


def _git_only_lists(rest: Sequence[str]) -> bool:
    """Return whether ``git branch``, ``git tag`` or ``git config`` only lists.

    An operand of ``git branch`` or ``git tag`` would name something new.
    """
    if rest[0] == "branch":
        listing = {
            "-a",
            "-r",
            "-v",
            "-vv",
            "-l",
            "--list",
            "--all",
            "--remotes",
            "--show-current",
            "--no-color",
            "--verbose",
        }
        lists = not {"--list", "-l", "--merged", "--no-merged", "--contains"}.isdisjoint(rest)
        return all(
            word in listing
            or word.startswith(("--sort=", "--format=", "--merged", "--no-merged", "--contains"))
            or (lists and word[:1] != "-")
            for word in rest[1:]
        )
    if rest[0] == "tag":
        lists = not {"--list", "-l"}.isdisjoint(rest)
        return all(
            word in ("-l", "--list", "-n") or word.startswith(("--sort=", "--format=")) or (lists and word[:1] != "-")
            for word in rest[1:]
        )
    if rest[0] == "remote":
        return tuple(rest[1:2]) == ("get-url",) and len(rest) == 3 and rest[2][:1] != "-"
    if rest[0] in ("reflog", "worktree", "stash"):
        return rest[1:2] in (["list"], ("list",), ["show"], ("show",)) and all(
            word[:1] != "-" or word in ("--porcelain", "-v", "--stat", "--oneline", "-p") for word in rest[2:]
        )
    is_option = [word[:1] == "-" for word in rest[2:]]
    return rest[0] == "config" and not any(is_option) and risky_options.git_config_only_reads(rest[1:])


_PROGRAMS: Mapping[str, _Check] = {
    **dict.fromkeys(("grep", "egrep", "fgrep"), _accept_any),
    **dict.fromkeys(("cat", "head", "wc", "ls", "stat", "du", "df", "basename", "dirname", "realpath", "readlink"), _accept_any),
    **dict.fromkeys(("echo", "true", "false", ":", "pwd", "printf", "uname", "whoami", "id", "nproc", "tac", "nl"), _accept_any),
    **dict.fromkeys(("md5sum", "sha1sum", "sha224sum", "sha256sum", "sha384sum", "sha512sum", "b2sum", "cksum", "sum"), _accept_any),
    **dict.fromkeys(("cut", "paste", "tr", "rev", "fold", "fmt", "expand", "unexpand", "column", "comm", "join", "seq"), _accept_any),
    **dict.fromkeys(("cmp", "od", "strings", "hexdump", "test", "which", "type", "getconf", "printenv", "locale"), _accept_any),
    "tail": _accept_any,  # with -f, it ends at the time-out of the call
    "diff": _check_for_risky_options("", "--output"),
    "file": _check_for_risky_options("C", "--compile"),
    "sort": _check_for_risky_options("oTS", "--output", "--temporary-directory", "--compress-program", "--files0-from"),
    "uniq": _check_for_known_options("cdDuizfsw", "--count", "--repeated", "--unique", "--ignore-case", "--skip-fields", "--skip-chars"),
    "rg": _check_for_risky_options("z", "--pre", "--pre-glob", "--hostname-bin", "--search-zip", "--generate"),
    "find": _find,
    "fd": _check_for_risky_options("xX", "--exec", "--exec-batch"),
    "tree": _check_for_risky_options("oR", "--output"),
    **dict.fromkeys(("sed", "awk", "gawk", "mawk"), _accept_any),  # programs.concern() checks their scripts
    "jq": _check_for_known_options("rcnsjaSeMCR", "--raw-output", "--compact-output", "--null-input", "--slurp", "--arg", "--argjson", "--sort-keys",
                 "--exit-status", "--tab", "--indent", "--raw-input", "--args", "--jsonargs", "--join-output", "--monochrome-output"),
    "date": _date,
    "command": _command,
    **dict.fromkeys(("[", "[[", "read", "export", "sleep", "exit", "break", "continue", "return", "wait", "jobs", "ps"), _accept_any),
    **dict.fromkeys(("set", "uptime", "free", "groups", "lscpu", "expr", "bc", "base64", "base32", "zcat", "tty", "cal"), _accept_any),
    **dict.fromkeys(("readelf", "size", "numfmt", "factor", "tsort", "pidof", "pgrep"), _accept_any),
    "env": _env,
    **dict.fromkeys(("xxd",), _at_most_one_operand),
    **dict.fromkeys(("iconv", "shuf", "yq"), _accept_any),  # program_risks.find_risk() checks their options
    **dict.fromkeys(("pip", "pip3"), _listing("list", "show", "freeze", "--version", "-V", "check")),
    **dict.fromkeys(("npm", "pnpm"), _listing("ls", "list", "--version", "-v", "root", "prefix")),
    **dict.fromkeys(("cargo", "rustc", "uv", "ruff", "mypy", "black", "yarn", "gcc", "clang", "java", "ruby", "php", "cmake", "docker"),
                    _listing("--version")),
    "go": _listing("version", "env", "list"),
    **dict.fromkeys(("hostname", "arch"), _no_operands),  # on macOS, arch runs a program
    "cd": _accept_any,
    "xargs": _xargs,
    "git": _git,
    **dict.fromkeys(("python", "python3"), _check_for_exact_word("--version", "-V")),
    "node": _check_for_exact_word("--version", "-v"),
}  # fmt: skip
"""The check of each program, by bare name.

Folders of the workspace come last on the sandbox's PATH. A program there may replace one that the machine does not have, but it
runs read-only, too.
"""

_NARROWER_CHECKS = frozenset({"xargs", "command", "find", "env"})
"""Programs whose general policy asks for approval in every form. Their checks above are narrower."""
_HARMLESS_WITH_ANY_WORDS = frozenset(
    {
        "cat",
        "head",
        "tail",
        "wc",
        "ls",
        "stat",
        "du",
        "grep",
        "egrep",
        "fgrep",
        "basename",
        "dirname",
        "realpath",
        "readlink",
    }
    | {"md5sum", "sha1sum", "sha256sum", "sha512sum", "cksum", "echo", "cut", "nl", "tac", "od", "strings"}
)
"""Programs without any option that writes, runs or reaches something."""


def find_possible_path_words(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command that may name files: operands and values attached to options."""
    found: list[str] = []
    for word in argv[1:]:
        if word[:1] != "-":
            found.append(word)
            if argv[0] == "git" and ":" in word:  # a file of a revision
                found.append(word.partition(":")[2])
        elif "=" in word:
            found.append(word.partition("=")[2])
        elif len(word) > 2 and word[:2] != "--":
            found.append(word[2:])
    return tuple(word for word in found if word)
