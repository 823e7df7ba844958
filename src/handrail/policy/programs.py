"""What a parser alone cannot see: programs that run other programs, write, or run code they are given.

A plain ``find . -exec …`` or ``env X=1 …`` *parses* as one harmless command. :func:`concern` says which words
of an argv make it more than that. Such a command is asked about even under an allow rule, unless the rule names
those very words literally: ``allow bash python *`` does not cover ``python -c …``, ``allow bash python -c 'print(1)'``
covers exactly that. The tables are a first form: they make known ways visible, the sandbox confines the unknown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from handrail.policy import program_forms, wrappers
from handrail.policy.program_forms import Concern, all_words, options
from handrail.policy.shell import Command, parse

LONGEST_WAIT_S = 10
_MAX_DEPTH = 3
_MAX_SUFFIXES = 64
_MOST_READINGS = 250
"""Commands that the words of one may hold."""
_MOST_WORDS = 250
"""Of one command, when others are looked for in it."""
_MOST_SIGNS = 200
"""In a text within a text, of which there may be many."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([smhd]?)|inf(?:inity)?", re.IGNORECASE)

RUNNERS = frozenset(
    {
        "env",
        "sudo",
        "doas",
        "su",
        "runuser",
        "pkexec",
        "nice",
        "ionice",
        "chrt",
        "taskset",
        "setsid",
        "setarch",
        "stdbuf",
    }
    | {
        "unbuffer",
        "timeout",
        "xargs",
        "parallel",
        "nohup",
        "time",
        "coproc",
        "command",
        "builtin",
        "exec",
        "eval",
        "watch",
    }
    | {"strace", "ltrace", "gdb", "lldb", "perf", "valgrind", "script", "expect", "flock", "entr", "chroot", "unshare"}
    | {"nsenter", "firejail", "bwrap", "proot", "fakeroot", "systemd-run", "at", "batch", "busybox", "toybox", "tmux"}
    | {
        "screen",
        "socat",
        "nc",
        "ncat",
        "netcat",
        "npx",
        "bunx",
        "uvx",
        "pipx",
        "linux32",
        "linux64",
        "dbus-run-session",
    }
    | {"setpriv", "capsh", "sg", "newgrp", "hyperfine", "watchexec", "chpst", "gosu", "su-exec", "dumb-init", "tini"}
    | {
        "proxychains",
        "proxychains4",
        "torsocks",
        "torify",
        "tsocks",
        "trickle",
        "eatmydata",
        "cpulimit",
        "cgexec",
        "run0",
    }
    | {"chronic", "ifne", "mispipe", "pee", "lckdo", "sem", "zrun", "runcon", "ccache", "distcc", "icecc", "bear", "rr"}
    | {"heaptrack", "uftrace", "bpftrace", "scan-build", "intercept-build", "compiledb", "asciinema", "ttyrec", "vipe"}
    | {"xterm", "konsole", "gnome-terminal", "nix-shell", "toolbox", "distrobox"}
    | {"ssh-agent", "xvfb-run", "faketime", "numactl", "prlimit", "start-stop-daemon", "run-parts", "ld.so", "rlwrap"}
)
"""Run the command that their own words hold. Read through when something forbidden is looked for."""

_MANAGERS = frozenset(
    {"uv", "poetry", "pipenv", "pdm", "hatch", "rye", "pixi", "conda", "mamba", "micromamba", "mise", "asdf", "bundle"}
    | {"rbenv", "pyenv", "nodenv", "direnv", "opam"}
)
"""Managers of environments, whose ``run`` and ``exec`` start any program there is (``uv run rm``)."""
_RUN_IN_IT = frozenset({"run", "exec", "x"})

_CHANGE_THE_SHELL = frozenset(
    {"source", ".", "trap", "alias", "unalias", "hash", "enable", "shopt", "bind", "complete", "compgen", "compopt"}
    | {"declare", "typeset", "local", "export", "readonly", "unset", "let", "read", "mapfile", "readarray", "getopts"}
    | {"fc", "history", "jobs", "suspend", "logout", "[", "[["}
)
_OPEN_A_SHELL_INSIDE = frozenset(
    {"vi", "vim", "nvim", "view", "vimdiff", "ex", "ed", "emacs", "nano", "pico", "more", "sqlite3", "psql", "mysql"}
    | {"dc", "m4", "ftp", "telnet", "crontab", "xdg-open", "irb", "tclsh", "wish", "ghci", "osascript", "mail", "mutt"}
)

_Form = Callable[[Sequence[str]], Concern | None]
_COMPILER = program_forms.single_dash(
    "runs a program or plugin", "-wrapper", "-fplugin", "-B", "-specs", "-fuse-ld", "@"
)

_FORMS: Mapping[str, _Form] = {
    "git": program_forms.git,
    "sed": program_forms.sed,
    "gsed": program_forms.sed,
    "find": program_forms.find,
    "tar": program_forms.tar,
    "gtar": program_forms.tar,
    "bsdtar": program_forms.tar,
    "make": program_forms.make,
    "gmake": program_forms.make,
    "uniq": program_forms.second_operand_is_output,
    "xxd": program_forms.second_operand_is_output,
    "less": program_forms.less,
    "rg": options("runs a program on each file", "z", "--pre", "--pre-glob", "--hostname-bin", "--search-zip"),
    "sort": options("writes a file or runs a program", "oT", "--output", "--compress-program", "--temporary-directory"),
    "man": options("runs a pager or browser", "PHCM", "--pager", "--html", "--config-file", "--manpath"),
    "ssh": options("can run programs on this machine", "oFISEW"),
    "scp": options("can run programs on this machine", "oFSD"),
    "sftp": options("can run programs on this machine", "oFSDb"),
    "rsync": options("can run programs or write elsewhere", "eT", "--rsh", "--rsync-path", "--log-file", "--write-batch"),
    "curl": program_forms.curl,
    "wget": options("writes files or runs a program", "OeiPa", "--output-document", "--execute", "--use-askpass", "--config",
                    "--input-file", "--post-file", "--body-file", "--directory-prefix", "--append-output", "--output-file"),
    "split": options("runs a program", "", "--filter"),
    "tree": options("writes a file", "oR", "--output"),
    "shuf": options("writes a file", "o", "--output"),
    "yq": options("writes the file it reads", "is", "--inplace", "--in-place", "--split-exp"),
    "install": options("runs a program", "", "--strip-program"),
    "zip": options("runs a program", "T", "--unzip-command", "--test"),
    "date": options("sets the clock", "s", "--set"),
    "fd": options("runs a program on each file", "xX", "--exec", "--exec-batch"),
    "fdfind": options("runs a program on each file", "xX", "--exec", "--exec-batch"),
    "ack": options("runs a pager", "", "--pager"),
    "ag": options("runs a pager", "", "--pager"),
    "bat": options("runs a pager", "", "--pager"),
    "batcat": options("runs a pager", "", "--pager"),
    "cargo": options("runs what a setting names", "", "--config"),
    "npm": program_forms.package_runner,
    "pnpm": program_forms.package_runner,
    "yarn": program_forms.package_runner,
    "bun": program_forms.package_runner,
    "deno": program_forms.package_runner,
    "uv": program_forms.package_runner,
    "iconv": options("writes a file", "o", "--output"),
    "nm": options("loads a plugin", "", "--plugin"),
    "set": program_forms.shell_settings,
    "go": program_forms.single_dash("runs a program", "-exec", "-toolexec", "-vettool", "-overlay", "-modfile"),
    **dict.fromkeys(("gcc", "cc", "g++", "c++", "clang", "clang++", "gfortran"), _COMPILER),
    **dict.fromkeys(("ld", "ld.bfd", "ld.gold", "ld.lld", "gold"), program_forms.single_dash("loads a plugin", "-plugin", "@")),
    "rustc": options("runs a linker or plugin", "CZ", "--codegen"),
    "openssl": program_forms.single_dash("loads an engine or writes a file", "-engine", "-provider", "-out", "-rand", "-writerand"),
    "cmake": program_forms.single_dash("runs a program or script", "-E", "-P"),
    "ssh-keygen": options("loads a library or writes a key", "DfsAG"),
    "sdiff": options("writes a file or runs a program", "o", "--output", "--diff-program"),
    "diff3": options("runs a program", "", "--diff-program"),
    "gnuplot": options("runs what its words say", "ec", "--eval"),
    **dict.fromkeys(("tex", "latex", "pdflatex", "xelatex", "lualatex"),
                    program_forms.single_dash("runs programs", "-shell-escape", "-enable-write18", "-output-directory")),
    "cpio": options("runs a program or writes elsewhere", "FO", "--rsh-command", "--file", "--no-absolute-filenames"),
    "patch": options("writes where its option says, or runs an editor", "eor", "--ed", "--output", "--reject-file"),
    "java": program_forms.single_dash("loads an agent or reads its words from a file", "-agentlib", "-agentpath", "-javaagent", "@"),
    "javac": program_forms.single_dash("runs a processor or plugin", "-processor", "-Xplugin", "-J", "@"),
    "printf": program_forms.first_words("sets a variable of the shell", "-v"),
    "wait": program_forms.first_words("sets a variable of the shell", "-p"),
    "test": program_forms.single_dash("looks into the shell's variables, which can run code", "-v", "-R"),
}  # fmt: skip


def concern(argv: Sequence[str], depth: int = _MAX_DEPTH) -> Concern | None:
    """What makes this argv more than its first words show, or None."""
    program = program_name(argv)
    if program in _MANAGERS and (found := _in_environment(argv, depth)) is not None:
        return found
    form = _FORMS.get(program)
    if form is not None:
        return form(argv)
    if program in RUNNERS or program.startswith("ld-linux"):
        return all_words(argv, f"{program} runs the command in its own words")
    if program in _CHANGE_THE_SHELL:
        return all_words(argv, f"{program} changes or runs something in the shell itself")
    if program in _OPEN_A_SHELL_INSIDE:
        return all_words(argv, f"{program} takes commands of its own, a shell among them")
    return program_forms.interpreter(program, argv)


def _in_environment(argv: Sequence[str], depth: int) -> Concern | None:
    """``uv run PROGRAM …``: a rule has to name the program, and what it would have to name of the program's own words."""
    at = next((index for index, word in enumerate(argv) if index and word in _RUN_IN_IT), None)
    if at is None:
        return None
    reason = f"{argv[0]} {argv[at]} runs the program in its own words"
    if depth == 0 or at + 1 >= len(argv) or argv[at + 1][:1] == "-":
        return all_words(argv, reason)  # which option takes a value is not known, so neither is the program
    inner = concern(argv[at + 1 :], depth - 1)
    if inner is None:
        return Concern(reason, frozenset(range(at + 2)))
    return Concern(inner.reason, frozenset(range(at + 1)) | {at + 1 + index for index in inner.words})


def program_name(argv: Sequence[str]) -> str:
    """The program's bare name, whatever folder it is called from."""
    return posixpath.basename(argv[0]).lower() if argv else ""


def reachable(argv: Sequence[str], depth: int = _MAX_DEPTH) -> Iterator[tuple[str, ...]]:
    """Other ways to read ``argv`` that a prohibition must hold for: by bare name, and what a runner would run.

    Every rest of a runner's words is taken as a command it might run; a text for a shell is read as a script. This
    finds too much rather than too little and serves denying only.

    :param depth: how many texts within texts are read
    """
    waiting = [(tuple(argv[:_MOST_WORDS]), depth)]
    known = {waiting[0][0]}
    for words, left in waiting:  # which grows meanwhile
        program = program_name(words)
        if words and words[0] != program:
            yield (program, *words[1:])
        for start in _behind_options(words):
            yield (program, *words[start:])
        found: list[tuple[tuple[str, ...], int]] = []
        if len(known) >= _MOST_READINGS:
            continue
        if program in RUNNERS or program in _MANAGERS or program == "find":
            found = [(words[start:], left) for start in range(1, min(len(words), _MAX_SUFFIXES))]
        if left:
            found += [(inner, left - 1) for text in _texts(program, words) for inner in _commands(text)]
        for inner, rest in found:
            if inner and inner not in known and len(known) < _MOST_READINGS:
                known.add(inner)
                yield inner
                waiting.append((inner, rest))


def _texts(program: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Those words of a shell's that may be a script."""
    if program in program_forms.SHELLS:
        words = argv[1:_MAX_SUFFIXES]
        return tuple(word for at, word in enumerate(words) if at > 0 or " " in word)
    return (" ".join(argv[1:]), *argv[1:2]) if program in ("eval", "trap") else ()


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    return (command.argv for command in parse(text, _MOST_SIGNS).commands)


def _behind_options(argv: Sequence[str]) -> Iterator[int]:
    """Where a program's own words may begin after options of its own: ``git --no-pager push`` is a ``git push``.

    Which options take the next word as their value is not known, so both are tried.
    """
    places = {1}
    for index in range(1, min(len(argv), _MAX_SUFFIXES)):
        if index in places:
            if index > 1:
                yield index
            if argv[index][:1] == "-":
                places |= {index + 1, index + 2}


def pure_wait_s(commands: Sequence[Command]) -> float | None:
    """How many seconds a script sleeps that does nothing else; None if it does something, or sleeps briefly."""
    total = 0.0
    for command in commands:
        *_, argv = wrappers.layers(command.argv)
        program = program_name(argv)
        if program == "sleep" and not any(word.endswith("timeout") for word in command.argv[: -len(argv)]):
            for word in argv[1:]:
                match = _DURATION.fullmatch(word)
                if match is None:
                    return None
                total += (
                    float(match.group(1)) * _SECONDS[match.group(2).lower() or "s"] if match.group(1) else float("inf")
                )
        elif program not in ("true", ":", "echo", "date", "wait"):
            return None
    return total if total > LONGEST_WAIT_S else None


@dataclass(frozen=True, slots=True)
class PureWait:
    """The answer to a command that only waits.

    :param as_job: nobody would wait for it, nor would it hold up anything
    """

    seconds: float
    as_job: bool = False

    @property
    def text(self) -> str:
        length = "for ever" if self.seconds == float("inf") else f"{self.seconds:g} s"
        if self.as_job:
            return (
                f"this command only waits ({length}), and as a job it does nothing else. To be told when a job has ended, wait on it "
                "by its own tool (wait); to be told something after a while, use add_timer with once."
            )
        return (
            f"this command only waits ({length}) and keeps the turn and the workspace busy meanwhile. Run the command whose "
            f"end you want, which answers when it has ended; wait on a job by its own tool; a sleep of up to {LONGEST_WAIT_S} s is fine."
        )
