"""The options of single programs that run, write or execute more than the program's name says."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from handrail.contract.protected.path_protection import SERVER_OPTIONS
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell.command_wrappers import is_harmless_variable
from handrail.policy.shell.simple_commands import ANY_TEXT, GLOB, NO_OPTION, SPLIT, has_marks, is_marked, show_marks


class CommandRisk(Struct, frozen=True):
    """The reason why a command is risky, and the words that an allow rule has to name literally for it."""

    reason: str
    words: frozenset[int]


def combine_risks(*found: CommandRisk | None) -> CommandRisk | None:
    """Return all risks as one, with the first one's reason. A rule has to name the words of each."""
    there = [one for one in found if one is not None]
    return CommandRisk(there[0].reason, frozenset[int]().union(*(one.words for one in there))) if there else None


SHELLS = frozenset(
    (
        *(
            "sh",
            "bash",
            "dash",
            "zsh",
            "ksh",
            "mksh",
            "ash",
            "fish",
            "csh",
            "tcsh",
            "rbash",
            "pwsh",
            "powershell",
            "nu",
        ),
        *(
            "xonsh",
            "elvish",
            "osh",
            "ysh",
            "yash",
            "posh",
            "es",
            "rc",
            "lksh",
            "oksh",
            "loksh",
            "ksh93",
            "pdksh",
            "hush",
        ),
    )
)
_STANDARD_INPUT = compile_regex_lazily(r"-|/dev/stdin|/dev/fd/\d+|/proc/.+/fd/\d+")


def _is_standard_input(word: str) -> bool:
    """Return whether this file is the standard input, however its path is written."""
    return (
        _STANDARD_INPUT.fullmatch(word if word[:1] != "/" else "/" + posixpath.normpath(word).lstrip("/")) is not None
    )


def build_risk_naming_every_word(argv: Sequence[str], reason: str) -> CommandRisk:
    """Return a risk for which a rule has to name every word."""
    return CommandRisk(reason, frozenset(range(len(argv))))


def _risk_from(argv: Sequence[str], start: int, reason: str) -> CommandRisk:
    return CommandRisk(reason, frozenset((0, *range(start, len(argv)))))


def _risk_of_options(argv: Sequence[str], found: Iterable[int], reason: str) -> CommandRisk | None:
    """Return a risk of the option words ``found``, each with the next word unless its value is attached."""
    words = {0}
    for index in found:
        words.add(index)
        if "=" not in argv[index] and index + 1 < len(argv):
            words.add(index + 1)
    return CommandRisk(reason, frozenset(words)) if len(words) > 1 else None


def _is_long_option(word: str, names: Iterable[str]) -> bool:
    """Return whether ``word`` is one of the long options, in full or shortened as GNU programs allow."""
    if word[:2] != "--" or len(word) < 3:
        return False
    name = word.partition("=")[0]
    return any(long.startswith(name) for long in names)


def make_options_check(what: str, short: str, *long: str) -> Callable[[Sequence[str]], CommandRisk | None]:
    """Return a check for any of these options, alone, in a cluster, or shortened."""
    letters = frozenset(short)

    def form(argv: Sequence[str]) -> CommandRisk | None:
        found = [
            index
            for index, word in enumerate(argv)
            if index
            and word[:1] == "-"
            and (_is_long_option(word, long) if word[:2] == "--" else not letters.isdisjoint(word[1:]))
        ]
        return _risk_of_options(argv, found, f"{argv[0]} {argv[found[0]]} {what}") if found else None

    return form


def make_single_dash_check(what: str, *names: str) -> Callable[[Sequence[str]], CommandRisk | None]:
    """Return a check for any word that begins with one of these names."""

    def form(argv: Sequence[str]) -> CommandRisk | None:
        found = [index for index, word in enumerate(argv) if index and word.replace("--", "-", 1).startswith(names)]
        return _risk_of_options(argv, found, f"{argv[0]} {argv[found[0]]} {what}") if found else None

    return form


def make_pattern_check(what: str, pattern: str) -> Callable[[Sequence[str]], CommandRisk | None]:
    """Return a check for any word that matches a regular expression as a whole."""
    compiled = compile_regex_lazily(pattern, re.DOTALL)

    def form(argv: Sequence[str]) -> CommandRisk | None:
        found = [index for index, word in enumerate(argv) if index and compiled.fullmatch(word)]
        return _risk_of_options(argv, found, f"{argv[0]} {argv[found[0]]} {what}") if found else None

    return form


def make_leading_option_check(what: str, name: str) -> Callable[[Sequence[str]], CommandRisk | None]:
    """Return a check for an option that the program accepts only before its operands."""

    def form(argv: Sequence[str]) -> CommandRisk | None:
        found: list[int] = []
        index = 1
        while index < len(argv) and argv[index][:1] == "-" and argv[index] != "--":
            if name[1] in argv[index]:
                found.append(index)
                index += argv[index].find(name[1]) == len(argv[index]) - 1  # its value is the next word
            index += 1
        return _risk_of_options(argv, found, f"{argv[0]} {argv[found[0]]} {what}") if found else None

    return form


def find_shell_set_options_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of ``set`` options that change how the shell reads later commands, or None.

    ``set -k`` treats ``NAME=value`` anywhere in later commands as a variable. ``set -a`` exports every variable. ``set -P`` changes to other folders. ``set -H`` with ``-o history`` replaces ``!:1`` by
    words of earlier commands, after the commands were evaluated.
    """
    for word in argv[1:]:
        if word == "--":
            return None
        named = word in ("keyword", "histexpand", "history", "allexport", "physical")
        if named or (word[:1] in ("-", "+") and not {"a", "k", "H", "P"}.isdisjoint(word)):
            return build_risk_naming_every_word(
                argv, f"{argv[0]} {word} changes how the words of later commands are read"
            )
    return None


_SETS_VARIABLE = make_leading_option_check("sets a variable of the shell", "-v")
_COUNTS_INTO_VARIABLE = compile_regex_lazily(r"%[-#+ 0'*.\d]*[hjlLtz]*n")


def find_printf_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of ``printf``, which sets the variable that an option or an argument names, or None."""
    if (found := _SETS_VARIABLE(argv)) is not None:
        return found
    at = 2 if argv[1:2] in (("--",), ["--"]) else 1
    if len(argv) < at + 2 or not (_COUNTS_INTO_VARIABLE.search(argv[at].replace("%%", "")) or is_marked(argv[at])):
        return None
    if all(_NO_NAME.search(word) for word in argv[at + 1 :]):
        return None
    return build_risk_naming_every_word(argv, f"{argv[0]} %n sets the variable of the shell that an argument names")


_NO_NAME = compile_regex_lazily(r"\A\d|\A\Z|[^\w\x01-\x04]", re.ASCII)
"""A word that is no name of a variable."""
_TEST_SIGNS = frozenset(
    {"=", "==", "!=", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef", "-a", "-o"}
)


def find_test_command_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of ``test`` and ``[``, which can look into the shell's variables and so run code, or None."""
    words = [word for word in argv[1:] if word != "]"]
    while words[:1] == ["!"]:
        words = words[1:]
    if any(word in ("-v", "-R") for word in words):
        return build_risk_naming_every_word(argv, f"{argv[0]} looks into the shell's variables, which can run code")
    if not has_marks(words) or (len(words) == 1 and not _SPLITS.search(words[0])):
        return None
    fits = (len(words) == 2 and words[0][:1] == "-" and not is_marked(words[0])) or (
        len(words) == 3 and words[1] in _TEST_SIGNS
    )
    if fits and not any(map(_SPLITS.search, words)):
        return None
    return build_risk_naming_every_word(
        argv, f"{argv[0]} has words that the shell expands, where an operator may be (quote them)"
    )


_SPLITS = compile_regex_lazily(f"[{GLOB}{SPLIT}]")
_VARIABLE_NAME = compile_regex_lazily(r"([A-Za-z_]\w*)(?:=.*)?", re.DOTALL | re.ASCII)


def find_variable_setting_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of ``export`` and ``read``, which set variables of the shell, or None."""
    for word in argv[1:]:
        match = _VARIABLE_NAME.fullmatch(word)
        if match is not None and is_harmless_variable(match.group(1)) and not is_marked(word.partition("=")[0]):
            continue
        if argv[0] == "read" and word == "-r":
            continue
        if argv[0] == "export" and word == "-p":
            continue
        return build_risk_naming_every_word(argv, f"{argv[0]} {show_marks(word)} changes the shell itself")
    return None


def find_second_operand_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of ``uniq`` and ``xxd``, which write to their second operand, or None.

    The value of an option may look like an operand.
    """
    operands = [index for index, word in enumerate(argv) if index and (word == "-" or word[:1] != "-")]
    if len(operands) < 2:
        return None
    return CommandRisk(f"{argv[0]} writes to its second operand", frozenset((0, *operands)))


_CURL = make_options_check(
    "writes or sends files, or reaches a host that no argument names",
    "oOKTDFdJcnEb",
    *("--output", "--output-dir", "--remote-name", "--remote-name-all", "--remote-header-name", "--config", "--dump-header"),
    *("--upload-file", "--cookie", "--cookie-jar", "--trace", "--trace-ascii", "--stderr", "--libcurl", "--etag-save"),
    *("--etag-compare", "--hsts", "--alt-svc", "--data", "--data-ascii", "--data-binary", "--data-raw", "--data-urlencode"),
    *("--json", "--form", "--form-string", "--url-query", "--variable", "--netrc", "--netrc-file", "--netrc-optional"),
    *("--unix-socket", "--abstract-unix-socket", "--cert", "--key", "--engine", "--proto-redir", "--create-dirs", "--ssl-sessions"),
)  # fmt: skip
_READS_OR_WRITES_FILE = compile_regex_lazily(r"(?!https?:)[A-Za-z][A-Za-z0-9+.-]*:/|@|-[A-Za-z]*[Hw]@|--[a-z-]+=@")
"""An address of another scheme, or the value of an option, such as ``-H @file``, that is read from a file."""


def find_curl_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``curl`` command, or None."""
    found = [i for i, word in enumerate(argv) if i and (_READS_OR_WRITES_FILE.match(word) or "%output{" in word)]
    past = (
        CommandRisk(
            f"curl {argv[found[0]]} reads or writes files that no rule about files covers", frozenset((0, *found))
        )
        if found
        else None
    )
    return combine_risks(past, _CURL(argv))


_LESS = frozenset("NRSFXi")


def find_less_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``less`` command, or None."""
    found = [
        i for i, word in enumerate(argv) if i and (word[:1] == "+" or (word[:1] == "-" and not set(word[1:]) <= _LESS))
    ]
    return _risk_of_options(argv, found, f"less {argv[found[0]]} can run a command or write a file") if found else None


def assess_find_command_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``find`` command, or None."""
    for index, word in enumerate(argv):
        if word in ("-exec", "-execdir", "-ok", "-okdir"):
            return _risk_from(argv, index, f"find {word} runs a program on each file")
        if word in ("-delete", "-fls", "-fprint", "-fprint0", "-fprintf"):
            return _risk_from(argv, index, f"find {word} deletes or writes files")
    return None


def iterate_find_exec_commands(argv: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the commands of ``find -exec``, with a mark for each file that it finds."""
    index = 1
    while index < len(argv):
        if argv[index] in ("-exec", "-execdir", "-ok", "-okdir"):
            end = next((at for at in range(index + 1, len(argv)) if argv[at] in (";", "+")), len(argv))
            words = argv[index + 1 : end]
            yield tuple(word.replace("{}", NO_OPTION if word[:2] == "{}" else ANY_TEXT) for word in words)
            index = end
        index += 1


def iterate_fd_exec_commands(argv: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the commands of ``fd --exec`` and ``fd --exec-batch``, with a mark for the files that it finds."""
    index = 1
    while index < len(argv):
        if argv[index] in ("-x", "-X", "--exec", "--exec-batch"):
            end = next((at for at in range(index + 1, len(argv)) if argv[at] == ";"), len(argv))
            words = argv[index + 1 : end]
            given = tuple(_FD_PLACE.sub(ANY_TEXT, word) for word in words)
            yield given if given != tuple(words) else (*given, SPLIT)
            index = end
        elif argv[index][:1] == "-" and _FD_EXEC.match(argv[index]):
            yield (ANY_TEXT,)  # the option is in a cluster, or has its value attached
        index += 1


_FD_PLACE = compile_regex_lazily(r"\{(?:/|//|\.|/\.)?\}")
_FD_EXEC = compile_regex_lazily(r"-[a-zA-Z]*[xX]|--exec|--e(?:x|xe)?\Z")


def find_tar_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``tar`` command, or None."""
    names = ("--checkpoint-action", "--use-compress-program", "--to-command", "--info-script", "--new-volume-script")
    found = [
        index
        for index, word in enumerate(argv)
        if index
        and (
            _is_long_option(word, (*names, "--rsh-command", "--rmt-command", "--absolute-names"))
            or ((word[:1] == "-" or index == 1) and word[:2] != "--" and not {"I", "F", "P"}.isdisjoint(word))
        )
    ]
    return _risk_from(argv, found[0], f"tar {argv[found[0]]} can run a program or write elsewhere") if found else None


def is_job_count(word: str) -> bool:
    """Return whether a word of ``make`` is the number of jobs, of which only the shell knows the value, as in ``-j"$n"``."""
    return word[:2] == "-j" and _SPLITS.search(word) is None


def assess_make_command_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``make`` command, or None."""
    found = [
        index
        for index, word in enumerate(argv)
        if index
        and (
            "=" in word
            or word in ("-", "-f-", "--file=-", "--makefile=-", "/dev/stdin")
            or _is_long_option(word, ("--eval",))
            or (word[:1] == "-" and word[:2] != "--" and "E" in word)
        )
    ]
    return _risk_of_options(argv, found, f"make {argv[found[0]]} sets the commands of its recipes") if found else None


def find_package_runner_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a sub-command that runs any program or code (``npm exec``), or None.

    Only options may stand before the sub-command.
    """
    for word in argv[1:]:
        if word[:1] == "-":
            if word in ("-c", "-e", "-p", "--call", "--eval", "--print"):
                return build_risk_naming_every_word(argv, f"{argv[0]} {word} runs code given on the command line")
            continue
        if word in ("exec", "x", "dlx", "eval", "repl", "config", "set-script", "tool"):
            return build_risk_naming_every_word(
                argv, f"{argv[0]} {word} can run any program, or change which program runs"
            )
        return None
    return None


# Git.

_GIT_HARMLESS = frozenset(
    {"--no-pager", "-P", "--version", "-v", "--help", "-h", "--no-optional-locks", "--literal-pathspecs"}
)
_GIT_FLAGS = frozenset(
    {"-p", "--paginate", "--bare", "--no-replace-objects", "--no-lazy-fetch", "--no-advice"}
    | {"--glob-pathspecs", "--noglob-pathspecs", "--icase-pathspecs"}
)
_GIT_WITH_VALUE = frozenset({"-c", "-C", "--git-dir", "--work-tree", "--exec-path", "--namespace", "--config-env"})
_GIT_LONG = (
    *("--ext-diff", "--textconv", "--output", "--output-directory", "--open-files-in-pager", "--upload-pack", "--exec"),
    *("--receive-pack", "--config", "--config-env", "--template", "--extcmd", "--separate-git-dir", "--sendmail-cmd"),
    *("--smtp-server", "--to-cmd", "--cc-cmd", "--remote", "--paginate", "--tool"),
)
_GIT_SHORT = {
    "rebase": "x",
    "difftool": "xt",
    "clone": "cu",
    "ls-remote": "u",
    "archive": "o",
    "format-patch": "o",
    "submodule": "c",
}
_GIT_RUNS = frozenset(
    {"filter-branch", "filter-repo", "hook", "daemon", "send-email", "instaweb", "difftool", "mergetool", "shell", "gui"}
    | {"credential", "remote-ext", "remote-fd", "for-each-repo", "maintenance", "p4", "svn", "cvsserver", "web--browse"}
    | {"upload-pack", "receive-pack", "interpret-trailers", "citool", "http-backend", "fsmonitor--daemon", "var"}
)  # fmt: skip
_GIT_HARMLESS_SETTING = compile_regex_lazily(
    r"(?:(?:color|advice|column)\.\w+(?:\.\w+)?|(?:user|author|committer)\.(?:name|email)|init\.defaultbranch|push\.default|pull\.(?:rebase|ff)"
    r"|core\.(?:quotepath|abbrev|autocrlf|safecrlf|eol|filemode|ignorecase|precomposeunicode|commentchar|longpaths|whitespace)"
    r"|diff\.(?:renames|renamelimit|algorithm|context|interhunkcontext|noprefix|mnemonicprefix|colormoved|indentheuristic|statgraphwidth)"
    r"|merge\.(?:conflictstyle|renames|renamelimit|ff|stat|log)|rebase\.(?:autostash|autosquash|updaterefs|stat)|rerere\.enabled"
    r"|log\.(?:date|decorate|abbrevcommit|follow|mailmap|diffmerges)|grep\.(?:linenumber|patterntype|fullname|column|extendedregexp)"
    r"|status\.(?:short|branch|showuntrackedfiles|relativepaths|renames|aheadbehind|showstash)|blame\.(?:date|showemail|blankboundary)"
    r"|gc\.auto|fetch\.(?:prune|prunetags)|versionsort\.suffix)=.*"
    r"|(?:commit\.gpgsign|tag\.gpgsign|log\.showsignature|core\.fsmonitor|maintenance\.auto|submodule\.recurse|pager\.\w+)=(?:false|no|off|0)"
    r"|(?:core\.pager|pager\.\w+)=(?:cat)?|(?:core|sequence)\.editor=(?:true|:)",
    re.IGNORECASE | re.DOTALL,
)
"""Settings of ``git -c`` after which git starts no other program and opens no other file."""
_GIT_READS_CONFIG = frozenset({"--get", "--get-all", "--get-regexp", "--list", "-l", "get", "list"})
_GIT_CONFIG_SCOPES = frozenset(
    {"--global", "--system", "--local", "--worktree", "-z", "--null", "--name-only", "--show-origin", "--show-scope"}
    | {"--bool", "--int", "--path", "--type=bool", "--type=int", "--type=path", "--includes", "--no-includes"}
)
_GIT_CONFIG_KEY = compile_regex_lazily(r"[A-Za-z][\w-]*(?:\..+)?\.[A-Za-z][\w-]*")


def find_git_command_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``git`` command, or None."""
    before: list[CommandRisk] = []
    index = 1
    while index < len(argv) and argv[index][:1] == "-":
        word = argv[index]
        span = 2 if word in _GIT_WITH_VALUE else 1
        if word not in _GIT_HARMLESS and not is_harmless_git_option(argv, index):
            why = f"git {word} changes the configuration of git, which can name programs to run"
            known = span == 2 or "=" in word or word in _GIT_FLAGS
            end = index + span if known else len(argv)  # otherwise it is unknown which word is git's command
            before.append(CommandRisk(why, frozenset((0, *range(index, min(end, len(argv)))))))
        index += span
    return combine_risks(*before, *(_git_subcommand_risks(argv, index) if index < len(argv) else ()))


def is_harmless_git_option(argv: Sequence[str], index: int) -> bool:
    """Return whether git's option at ``index`` is one of two words that change nothing but a folder below or the form of texts.

    ``-C`` changes to a folder as ``cd`` does. ``-c`` sets a key that names neither a program nor a file, or turns one off.
    """
    if argv[index] not in ("-C", "-c") or index + 1 >= len(argv):
        return False
    value = argv[index + 1]
    if argv[index] == "-c":
        return _GIT_HARMLESS_SETTING.fullmatch(value) is not None
    return value[:1] not in ("/", "-", "") and ".." not in value.split("/") and not is_marked(value)


def _git_subcommand_risks(argv: Sequence[str], index: int) -> Iterator[CommandRisk | None]:
    """Return the risks of git's sub-command, at ``index``, and of each of the words after it."""
    command, rest = argv[index], argv[index + 1 :]
    if command in _GIT_RUNS or (command == "config" and not git_config_only_reads(rest)):
        yield _risk_from(argv, index, f"git {command} runs programs, or configures which programs run")
        return
    if (command == "bisect" and tuple(rest[:1]) == ("run",)) or (command == "submodule" and "foreach" in rest):
        yield _risk_from(argv, index, f"git {command} runs a program")
        return
    for offset, word in enumerate(rest, index + 1):
        if re.match(r"[A-Za-z0-9+-]+::", word):
            yield CommandRisk(f"git {command} with {word!r} runs a transport program", frozenset((0, index, offset)))
        if _is_risky_for_git(command, word):
            why = f"git {command} {word} can write a file or run a program"
            yield _risk_of_options(argv, [offset], why)
            yield CommandRisk(why, frozenset((0, index)))


def _is_risky_for_git(command: str, word: str) -> bool:
    """Return whether the word is an option with which the sub-command writes a file or runs a program."""
    if word[:2] == "--" and not word.startswith("--output-indicator"):
        return word not in SERVER_OPTIONS and _is_long_option(word, _GIT_LONG)
    letters = _GIT_SHORT.get(command, "") + "O"
    return word[:1] == "-" and word[:2] != "--" and not frozenset(letters).isdisjoint(word[1:])


def git_config_only_reads(words: Sequence[str]) -> bool:
    """Return whether ``git config`` only reads, by the first word that is not a scope.

    Further words do not count: ``git config KEY VALUE get`` writes. A key alone is read.
    """
    rest = [word for word in words if word not in _GIT_CONFIG_SCOPES]
    return bool(rest) and (
        rest[0] in _GIT_READS_CONFIG or (len(rest) == 1 and bool(_GIT_CONFIG_KEY.fullmatch(rest[0])))
    )


# Sed and awk.

_BRACKET = r"\[\^?\]?(?:\[:[a-z]+:\]|\[(?![.:=])|[^\[\]\n/|#,\\])*\]"
"""A bracket expression that ends for sed where it ends here: in ``[[:alpha:]/x]`` the slash ends nothing."""


def _between(delimiter: str) -> str:
    return rf"(?:[^{delimiter}\\\n\[]|\\[^\n]|{_BRACKET})*"


_ADDRESS = rf"(?:\d+|\$|/{_between('/')}/)"
_SUBSTITUTE = "|".join(rf"s{d}{_between(d)}{d}(?:[^{d}\\\n]|\\[^\n])*{d}[gpiI0-9]*" for d in ("/", r"\|", "#", ","))
_PLAIN_SED = compile_regex_lazily(
    rf"(?:(?:{_ADDRESS}(?:,{_ADDRESS})?!?)?(?:[pdqlnN=]|{_SUBSTITUTE}|[ai][ ]*[^ \\\n][^\\\n]*\Z)(?:;[ ]*|\Z))+"
)
_SED_PLAIN_OPTIONS = frozenset(
    {"--quiet", "--silent", "--regexp-extended", "--posix", "--null-data", "--version", "--help"}
)
_SED_PLAIN_CLUSTER = compile_regex_lazily(r"-[nErsuz]+")
_SED_WITH_VALUE = compile_regex_lazily(r"-[nErsuzb]*(?:(?P<script>[ef])|l)|--(?:l[a-z-]*)")
"""Options whose value is the next word. For ``-i`` it is the rest of the same word."""
_AWK_RUNS = compile_regex_lazily(r"system|getline|[|>@]|fflush|close")


def find_sed_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a ``sed`` command, or None."""
    found: list[CommandRisk | None] = []
    scripts: list[int] = []
    operands: list[int] = []
    index = 1
    while index < len(argv):
        word = argv[index]
        if word == "--":
            operands += range(index + 1, len(argv))
            break
        if word[:1] != "-" or word == "-":
            operands.append(index)
        elif word in ("-e", "-ne", "-Ee", "-nEe", "-re", "--expression"):
            index += 1
            scripts.append(index)
        elif word.startswith("--expression="):
            found.append(CommandRisk("a sed script attached to its option is not checked", frozenset((0, index))))
            scripts.append(index)
        elif word not in _SED_PLAIN_OPTIONS and not _SED_PLAIN_CLUSTER.fullmatch(word):
            found.append(_risk_of_options(argv, [index], f"sed {word} can write files or run commands"))
            if (option := _SED_WITH_VALUE.fullmatch(word)) is not None:
                index += 1
                scripts += [index] if option.group("script") else []
        index += 1
    return combine_risks(*found, *_unplain_sed_scripts(argv, scripts or operands[:1]))


def _unplain_sed_scripts(argv: Sequence[str], places: Sequence[int]) -> Iterator[CommandRisk]:
    for place in places:
        if place < len(argv) and not _PLAIN_SED.fullmatch(argv[place]):
            why = "this sed script is not simple: sed can write files (w) and run commands (e)"
            yield CommandRisk(why, frozenset((0, place)))


def _without_awk_comparisons(program: str) -> str:
    """Return an awk program without the ``>`` that compare: those outside braces, if no text or pattern has a brace."""
    if ">" not in program or not {"/", '"', "\\", "#"}.isdisjoint(program):
        return program
    depth = 0
    out: list[str] = []
    for char in program:
        depth += (char == "{") - (char == "}")
        if char != ">" or depth > 0:
            out.append(char)
    return "".join(out)


def find_awk_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of an ``awk`` command, or None."""
    index = 1
    while index < len(argv) and argv[index][:1] == "-" and argv[index] != "-":
        word = argv[index]
        if word == "--":
            index += 1
            break
        if word[:2] not in ("-F", "-v"):
            return build_risk_naming_every_word(argv, f"awk {word} can run code from a file")
        index += 2 if len(word) == 2 else 1
    if index < len(argv) and _AWK_RUNS.search(_without_awk_comparisons(argv[index])):
        return CommandRisk("this awk program can run commands or write files", frozenset((0, index)))
    return None


# Interpreters.

_PYTHON = compile_regex_lazily(r"(?:python|pypy)[0-9.]*(?:\.exe)?")
_VERSIONED = compile_regex_lazily(r"(?P<name>[a-z]+?)[0-9.]+")
_PYTHON_CODE_MODULES = frozenset({"timeit", "pdb", "code", "codeop", "asyncio", "idlelib", "ipython", "trace"})
_ENDS_AT_ONCE = frozenset({"--version", "--help"})
"""Alone, these print something and exit. ``-v`` and ``-h`` do not: python and bash then read their input."""
_NODE_HARMLESS = compile_regex_lazily(
    r"-v|-h|-c|--check|--test|--no-warnings|--trace-warnings|--enable-source-maps|--watch|--experimental-test-coverage"
    r"|--test-(?:only|force-exit|concurrency|timeout|(?:name|skip)-pattern|shard|isolation)(?:=.*)?|--test-reporter=(?:spec|tap|dot|junit|lcov)"
)
_HARMLESS: dict[str, re.Pattern[str]] = {
    **dict.fromkeys(("node", "nodejs"), _NODE_HARMLESS),
    "perl": compile_regex_lazily(r"-[wWtT]+"),
    "ruby": compile_regex_lazily(r"-w|-W[0-9]?"),
    "php": compile_regex_lazily(r"-l|-q"),
    "lua": compile_regex_lazily(r"(?!)"),
    "luajit": compile_regex_lazily(r"(?!)"),
    "rscript": compile_regex_lazily(r"--vanilla"),
    "julia": compile_regex_lazily(r"--project|-q"),
    **dict.fromkeys(
        ("guile", "racket", "octave", "ocaml", "elixir", "erl", "clojure", "clj", "scala", "raku", "sbcl"),
        compile_regex_lazily(r"(?!)"),
    ),
    "groovy": compile_regex_lazily(r"(?!)"),
    "jshell": compile_regex_lazily(r"(?!)"),
}
_SHELL_HARMLESS = compile_regex_lazily(r"-[eunx]+")


def find_interpreter_risk(program: str, argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of an interpreter, or None.

    An interpreter that runs a file is named by that file. Code in its words or on its standard input is not.
    """
    if program in ("awk", "gawk", "mawk", "nawk", "original-awk"):
        return find_awk_risk(argv)
    if _PYTHON.fullmatch(program):
        return _python_risk(argv)
    if program in SHELLS:
        return _by_options(argv, _SHELL_HARMLESS)
    harmless = _HARMLESS.get(program)
    if harmless is None and (match := _VERSIONED.fullmatch(program)):
        harmless = _HARMLESS.get(match.group("name"))
    return _by_options(argv, harmless) if harmless is not None else None


def _by_options(argv: Sequence[str], harmless: re.Pattern[str]) -> CommandRisk | None:
    finds_files = False
    for word in argv[1:]:
        if word in _ENDS_AT_ONCE and len(argv) == 2:
            return None
        if _is_standard_input(word):
            break
        if word[:1] not in ("-", "+"):
            return None
        if not harmless.fullmatch(word):
            return build_risk_naming_every_word(argv, f"{argv[0]} {word} can run code given on the command line")
        finds_files = finds_files or word == "--test"
    if finds_files:
        return None
    return build_risk_naming_every_word(argv, f"{argv[0]} without a file runs its standard input")


def _python_risk(argv: Sequence[str]) -> CommandRisk | None:
    index = 1
    while index < len(argv):
        word = argv[index]
        if (word in _ENDS_AT_ONCE or word in ("-V", "-VV", "-h")) and len(argv) == 2:
            return None
        if _is_standard_input(word):
            break
        if word[:1] != "-":
            return None
        if word in ("-W", "-X"):
            index += 2
            continue
        if word[:2] == "-m":
            module = word[2:] or (argv[index + 1] if index + 1 < len(argv) else "")
            if module.partition(".")[0].lower() in _PYTHON_CODE_MODULES or not module:
                return build_risk_naming_every_word(argv, f"{argv[0]} -m {module} runs code given on the command line")
            return None
        if not re.fullmatch(r"-[bBdEIOPqsSu]+|-[WX].+", word):
            return build_risk_naming_every_word(argv, f"{argv[0]} {word} can run code given on the command line")
        index += 1
    return build_risk_naming_every_word(argv, f"{argv[0]} without a file runs its standard input")
