"""The programs that run other programs, write, or run given code, and the words that make them do so.

A plain ``find . -exec …`` or ``env X=1 …`` *parses* as one harmless command. :func:`find_hidden_program_risk` returns the words of an argv that
make it more than that. Such a command requires approval even under an allow rule, unless the rule names exactly these words
literally. ``allow bash python *`` does not cover ``python -c …``, but ``allow bash python -c 'print(1)'`` covers exactly that.
The tables list the known cases. The sandbox confines the unknown ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import command_wrappers, destroying_forms, nested_commands
from handrail.policy.shell import risky_options as program_forms
from handrail.policy.shell.command_wrappers import ENVIRONMENT_MANAGERS, RUNNERS
from handrail.policy.shell.nested_commands import program_name
from handrail.policy.shell.parser import SHELL_WORDS
from handrail.policy.shell.risky_options import CommandRisk, build_risk_naming_every_word, make_options_check
from handrail.policy.shell.simple_commands import ShellCommand, is_marked, is_open

MAX_WAIT_S = 10
_MAX_DEPTH = 3
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION = compile_regex_lazily(r"(\d+(?:\.\d*)?|\.\d+)([smhd]?)|inf(?:inity)?", re.IGNORECASE)

_RUN_VERBS = frozenset({"run", "exec", "x"})

_CHANGE_THE_SHELL = frozenset(
    {"source", ".", "trap", "alias", "unalias", "hash", "enable", "shopt", "bind", "complete", "compgen", "compopt"}
    | {"declare", "typeset", "local", "readonly", "unset", "let", "mapfile", "readarray", "getopts"}
    | {"fc", "history", "suspend", "logout"}
)
_OPEN_A_SHELL_INSIDE = frozenset(
    {"vi", "vim", "nvim", "view", "vimdiff", "ex", "ed", "emacs", "nano", "pico", "more", "sqlite3", "psql", "mysql"}
    | {"dc", "m4", "ftp", "telnet", "crontab", "xdg-open", "irb", "tclsh", "wish", "ghci", "osascript", "mail", "mutt"}
)

_PRINT_VERSION = frozenset({"vi", "vim", "nvim", "emacs", "nano", "sqlite3", "psql", "mysql", "ghci", "irb"})
_VERSION_WORDS = frozenset({("--version",), ("--help",)})
"""Words with which these programs only print something."""

_Form = Callable[[Sequence[str]], CommandRisk | None]
_COMPILER = program_forms.make_pattern_check(
    "runs a program or plugin",
    r"--?(?:wrapper|fplugin|fpass-plugin|iplugindir|specs|fuse-ld|ld-path|gcc-toolchain|gcc-install-dir|config|prefix|Xclang|Xlinker).*|-B.*|@.*"
    r"|-W[lap],.*(?:plugin|@|dynamic-linker).*",
)
_BUILD_SETTING = r"(?:-D)?\w*(?:COMPILER|LAUNCHER|PROGRAM|PROJECT\w*INCLUDE|TOOLCHAIN_FILE|LINKER|RULE|EMULATOR|EXECUTABLE)\w*(?::\w+)?=.*"
"""A variable of CMake that names a program or a script."""

_SSH = make_options_check("can run programs on this machine", "oFISEW")


def _unparsable_command_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of a command in the argv's words that cannot be parsed, or None.

    No rule can be applied to such a command.
    """
    reason = nested_commands.explain_inner_command_unparsable(argv)
    return None if reason is None else build_risk_naming_every_word(argv, reason)


_FORMS: Mapping[str, _Form] = {
    "git": program_forms.find_git_command_risk,
    "sed": program_forms.find_sed_risk,
    "gsed": program_forms.find_sed_risk,
    "find": program_forms.assess_find_command_risk,
    "tar": program_forms.find_tar_risk,
    "gtar": program_forms.find_tar_risk,
    "bsdtar": program_forms.find_tar_risk,
    "make": program_forms.assess_make_command_risk,
    "gmake": program_forms.assess_make_command_risk,
    "uniq": program_forms.find_second_operand_risk,
    "xxd": program_forms.find_second_operand_risk,
    "less": program_forms.find_less_risk,
    "rg": make_options_check("runs a program on each file", "z", "--pre", "--pre-glob", "--hostname-bin", "--search-zip"),
    "sort": make_options_check("writes a file or runs a program", "oT", "--output", "--compress-program", "--temporary-directory"),
    "man": make_options_check("runs a pager or browser", "PHCM", "--pager", "--html", "--config-file", "--manpath"),
    "ssh": lambda argv: program_forms.combine_risks(_SSH(argv), _unparsable_command_risk(argv)),
    "scp": make_options_check("can run programs on this machine", "oFSD"),
    "sftp": make_options_check("can run programs on this machine", "oFSDb"),
    "rsync": make_options_check("can run programs or write elsewhere", "eT", "--rsh", "--rsync-path", "--log-file", "--write-batch"),
    "curl": program_forms.find_curl_risk,
    "wget": make_options_check("writes files or runs a program", "OeiPao", "--save-cookies", "--load-cookies", "--rejected-log",
                    "--warc-file", "--warc-dedup", "--hsts-file", "--output-document", "--execute", "--use-askpass", "--config",
                    "--input-file", "--post-file", "--body-file", "--directory-prefix", "--append-output", "--output-file"),
    "split": make_options_check("runs a program", "", "--filter"),
    "tree": make_options_check("writes a file", "oR", "--output"),
    "shuf": make_options_check("writes a file", "o", "--output"),
    "yq": make_options_check("writes the file it reads, or runs a program", "is", "--inplace", "--in-place", "--split-exp", "--security-enable-system-operator"),
    "install": make_options_check("runs a program", "", "--strip-program"),
    "zip": make_options_check("runs a program", "T", "--unzip-command", "--test"),
    "date": make_options_check("sets the clock", "s", "--set"),
    "fd": make_options_check("runs a program on each file", "xX", "--exec", "--exec-batch"),
    "fdfind": make_options_check("runs a program on each file", "xX", "--exec", "--exec-batch"),
    "ack": make_options_check("runs a pager", "", "--pager"),
    "ag": make_options_check("runs a pager", "", "--pager"),
    "bat": make_options_check("runs a pager", "", "--pager"),
    "batcat": make_options_check("runs a pager", "", "--pager"),
    "cargo": program_forms.make_pattern_check("runs what a setting names", r"--conf.*|.*(?:linker|link-arg|wrapper).*=.*"),
    "npm": program_forms.find_package_runner_risk,
    "pnpm": program_forms.find_package_runner_risk,
    "yarn": program_forms.find_package_runner_risk,
    "bun": program_forms.find_package_runner_risk,
    "deno": program_forms.find_package_runner_risk,
    "uv": program_forms.find_package_runner_risk,
    "iconv": make_options_check("writes a file", "o", "--output"),
    "jobs": make_options_check("runs a command", "x"),
    "nm": make_options_check("loads a plugin", "", "--plugin"),
    "set": program_forms.find_shell_set_options_risk,
    "go": program_forms.make_pattern_check("runs a program", r"--?(?:exec|toolexec|vettool|overlay|modfile).*|.*-(?:extld|extar|toolexec)\b.*"),
    **dict.fromkeys(("gcc", "cc", "g++", "c++", "clang", "clang++", "gfortran"), _COMPILER),
    **dict.fromkeys(("ld", "ld.bfd", "ld.gold", "ld.lld", "gold"), program_forms.make_single_dash_check("loads a plugin", "-plugin", "@")),
    "rustc": make_options_check("runs a linker or plugin", "CZ", "--codegen", "--extern", "--sysroot"),
    "meson": make_options_check("runs the programs that a file names", "", "--native-file", "--cross-file"),
    "openssl": program_forms.make_single_dash_check("loads an engine or writes a file", "-engine", "-provider", "-out", "-rand", "-writerand"),
    "cmake": program_forms.make_pattern_check("runs a program or script", rf"-[EPC].*|--toolchain.*|{_BUILD_SETTING}"),
    "ssh-keygen": make_options_check("loads a library or writes a key", "DfsAG"),
    "sdiff": make_options_check("writes a file or runs a program", "o", "--output", "--diff-program"),
    "diff3": make_options_check("runs a program", "", "--diff-program"),
    "gnuplot": make_options_check("runs a program that its arguments name", "ec", "--eval"),
    **dict.fromkeys(("tex", "latex", "pdflatex", "xelatex", "lualatex"),
                    program_forms.make_single_dash_check("runs programs", "-shell-escape", "-enable-write18", "-output-directory")),
    "cpio": make_options_check("runs a program or writes elsewhere", "FO", "--rsh-command", "--file", "--no-absolute-filenames"),
    "patch": make_options_check("writes where its option says, or runs an editor", "eor", "--ed", "--output", "--reject-file"),
    "java": program_forms.make_single_dash_check("loads an agent or reads its words from a file", "-agentlib", "-agentpath", "-javaagent", "@"),
    "javac": program_forms.make_single_dash_check("runs a processor or plugin", "-processor", "-Xplugin", "-J", "@"),
    "printf": program_forms.find_printf_risk,
    "wait": program_forms.make_leading_option_check("sets a variable of the shell", "-p"),
    **dict.fromkeys(("test", "["), program_forms.find_test_command_risk),
    **dict.fromkeys(("export", "read"), program_forms.find_variable_setting_risk),
}  # fmt: skip


def find_hidden_program_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of an argv that its program's name does not show, or None.

    A rule has to name every word of a command that may destroy something. A word that only the shell knows is a risk if some
    word in its place could be one.
    """
    form = find_form_risk(argv)
    reason = destroying_forms.explain_irreversible_destruction(argv)
    destruction = None if reason is None else build_risk_naming_every_word(argv, reason)
    if form is not None and reason is not None and program_name(argv) == "find":
        destruction = CommandRisk(reason, form.words)  # the words of its tests only find fewer files
    return program_forms.combine_risks(destruction, make_unknown_word_risk(argv), form)


def make_unknown_word_risk(argv: Sequence[str]) -> CommandRisk | None:
    """Return the risk of words that only the shell knows, or None."""
    found = frozenset(index for index, word in enumerate(argv) if is_marked(word))
    if not found:
        return None
    program = program_name(argv)
    if program in ("test", "[", "[[", "export", "read"):
        return None  # their forms read the marks
    words = argv[: argv.index("--")] if "--" in argv and program not in _RUN_REST else argv
    if program in ("make", "gmake"):
        words = [word for word in words if not program_forms.is_job_count(word)]
    if not any(map(is_open, words)) and program not in _RUN_REST:
        return None
    if program not in _FORMS and program not in _RUN_REST and find_form_risk((argv[0], "-x", "x")) is None:
        return None
    reason = f"{program} can do something else with words that the shell expands"
    return CommandRisk(reason, frozenset({0, *found}))


_RUN_REST = (
    RUNNERS
    | ENVIRONMENT_MANAGERS
    | program_forms.SHELLS
    | command_wrappers.CODE_INTERPRETERS
    | frozenset(command_wrappers.WRAPPER_NAMES)
)
"""Programs for which any word may be a command or code, whatever stands before it."""


def find_form_risk(argv: Sequence[str], depth: int = _MAX_DEPTH) -> CommandRisk | None:
    """Return the risk of a form of a program that runs, writes or executes more than the program's name says, or None."""
    program = program_name(argv)
    if program in ENVIRONMENT_MANAGERS and (found := _environment_runner_risk(argv, depth)) is not None:
        return found
    form = _FORMS.get(program)
    if form is not None:
        return form(argv)
    if program in RUNNERS or program.startswith(nested_commands.PROGRAM_PREFIXES):
        return build_risk_naming_every_word(argv, f"{program} runs the command that its arguments name")
    if program in _CHANGE_THE_SHELL:
        return build_risk_naming_every_word(argv, f"{program} changes or runs something in the shell itself")
    if program in _OPEN_A_SHELL_INSIDE and not (program in _PRINT_VERSION and tuple(argv[1:]) in _VERSION_WORDS):
        return build_risk_naming_every_word(argv, f"{program} has its own commands, which can start a shell")
    return program_forms.find_interpreter_risk(program, argv) or _unparsable_command_risk(argv)


def _environment_runner_risk(argv: Sequence[str], depth: int) -> CommandRisk | None:
    """Return the risk of ``uv run PROGRAM …`` and similar commands, or None.

    A rule has to name the program, and those of the program's words that it would have to name without the manager.
    """
    at = next((index for index, word in enumerate(argv) if index and word in _RUN_VERBS), None)
    if at is None:
        return None
    reason = f"{argv[0]} {argv[at]} runs the program that its arguments name"
    if depth == 0 or at + 1 >= len(argv) or argv[at + 1][:1] == "-":
        return build_risk_naming_every_word(
            argv, reason
        )  # it is unknown which option takes a value, and so which word is the program
    program = argv[at + 1 :]
    destroys = destroying_forms.explain_irreversible_destruction(program)
    destruction = None if destroys is None else build_risk_naming_every_word(program, destroys)
    inner = program_forms.combine_risks(destruction, find_form_risk(program, depth - 1))
    if inner is None:
        return CommandRisk(reason, frozenset(range(at + 2)))
    return CommandRisk(inner.reason, frozenset(range(at + 1)) | {at + 1 + index for index in inner.words})


_HARMLESS_GIT_OPTIONS = frozenset({"--no-pager", "-P", "--no-optional-locks", "--literal-pathspecs"})
_OWN_FOLDERS = ("/bin/", "/usr/bin/")


def normalize_argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command as an allow rule would name it: bare name, no options without an effect.

    Only a program in a folder of the system gets its bare name. Only an option without any effect on what runs is removed.
    """
    program = argv[0] if argv else ""
    folder = next((folder for folder in _OWN_FOLDERS if program.startswith(folder)), None)
    if folder is not None:
        bare = program[len(folder) :]
        if not bare or "/" in bare or bare in SHELL_WORDS:
            return argv
        program = bare
    at = 1
    while program == "git" and at < len(argv) and argv[at] in _HARMLESS_GIT_OPTIONS:
        at += 1
    return (program, *argv[at:])


def pure_sleep_seconds(commands: Sequence[ShellCommand]) -> float | None:
    """Return how many seconds a script sleeps that does nothing else. What a ``&`` follows counts if a ``wait`` does too.

    :returns: None if the script does something else, or sleeps briefly
    """
    total = 0.0
    in_background = 0.0
    for command in commands:
        *_, argv = command_wrappers.split_wrapper_layers(command.argv)
        program = program_name(argv)
        if program == "sleep" and not any(word.endswith("timeout") for word in command.argv[: -len(argv)]):
            for word in argv[1:]:
                match = _DURATION.fullmatch(word)
                if match is None:
                    return None
                unit = _SECONDS[(match.group(2) or "s").lower()]
                seconds = float(match.group(1)) * unit if match.group(1) else float("inf")
                if command.in_background:
                    in_background += seconds
                else:
                    total += seconds
        elif program == "wait" and not command.in_background:
            total, in_background = total + in_background, 0.0
        elif program not in ("true", ":", "echo", "date", "wait"):
            return None
    return total if total > MAX_WAIT_S else None


class SleepCommandDenial(Struct, frozen=True):
    """The answer to a command that only waits.

    :param as_job: whether the command would run as a background job, which blocks nothing
    """

    seconds: float
    as_job: bool = False

    @property
    def denial_text_for_model(self) -> str:
        """The text of the refusal, for the model."""
        length = "for ever" if self.seconds == float("inf") else f"{self.seconds:g} s"
        if self.as_job:
            return (
                f"This command only waits ({length}), so a background job for it is useless. To wait for another job, use the "
                "wait tool. To get a notification after some time, use add_timer with once."
            )
        return (
            f"This command only waits ({length}) and keeps the turn and the workspace busy meanwhile. Run the command that you are "
            f"waiting for directly: its call returns when it ends. To wait for a background job, use the wait tool. A sleep of up to "
            f"{MAX_WAIT_S} s is allowed."
        )
