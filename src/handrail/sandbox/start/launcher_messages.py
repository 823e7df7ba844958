"""The messages to a sandbox's first process, which restricts itself and becomes the program.

Its program is ``launcher.pl``, or ``launcher_python.py`` if the machine has no perl. It has three descriptors in addition to
the program's own:

- the *letter*, a file in memory. Its first part says how to restrict (Landlock, limits) and which namespaces it
  must not find itself in; that is known before the call is. Its second part is the call.
- the *channel*, a socket. One byte from here means that the letter's second part is written: ``e`` for a plain text to
  evaluate, ``g`` for any other call. The launcher answers ``T`` and a part
  (its mount table, and the device and inode of each path that it was asked to look at, as one text ``DEVICE:INODE``),
  ``r`` (ready, waiting for that byte), ``x`` (the program is about to be started), ``E`` and a text (it cannot be), or
  ``L`` after ``x`` (its arguments are longer than the system takes). The byte from here comes once the table is right.
- the *lifeline*, a socket whose other end only the holder has: when it hangs up, the first process ends and the kernel
  ends all others with it. So nothing outlives a killed holder, whichever moment it dies at. When the program has ended,
  the first process kills and waits for all others, and then sends the exit code here, in one byte. By then only the first
  process is left, and the namespaces can be taken down while the answer is on its way. If a mount ends or its mount point
  is moved away, it kills all others at once, even before the program has begun; then the mount point follows that byte.

A fourth number is of a descriptor that it closes at once; any others are the program's.

A call is that byte and then the second part. A part is its length and then items, each with its length (4 bytes,
big-endian).
"""

from __future__ import annotations

import os
import platform
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from handrail.contract.sandbox_protocol import SHELL_ARGV
from handrail.contract.struct import Struct
from handrail.origins.program_lookup import ProgramRefused, find_own_interpreter
from handrail.sandbox.filters import landlock
from handrail.sandbox.filters.landlock import LandlockRuleset
from handrail.sandbox.view import mount_comparison
from handrail.sandbox.view.mount_comparison import ExpectedMounts

LaunchMode = Literal["exec", "shell"]
"""``exec``: the launcher starts a program. ``shell``: it becomes bash, which reads a text."""

PERL = "/usr/bin/perl"
_EVALUATED = ("describer.pl", "watcher.pl", "mount_changes.pl")
MAX_ARGUMENT_BYTES = 32 * 4096 - 1
"""The limit of execve(2) for one argument, in bytes."""
MAX_TEXT_BYTES = MAX_ARGUMENT_BYTES - 4096
"""A longer shell text is passed in the letter and evaluated, since no argument can hold it."""

_PRLIMIT = {
    "x86_64": 302,
    "aarch64": 261,
    "riscv64": 261,
    "loongarch64": 261,
    "ppc64le": 325,
    "s390x": 334,
}
"""The number of prlimit64(2) by machine. Other machines use the launcher in Python."""
_SIGNALS = {
    "x86_64": (14, 289),
    "aarch64": (135, 74),
    "riscv64": (135, 74),
    "loongarch64": (135, 74),
    "ppc64le": (174, 313),
    "s390x": (175, 322),
}
"""The numbers of rt_sigprocmask(2) and signalfd4(2) by machine."""
_SETSID = {"x86_64": 112, "aarch64": 157, "riscv64": 157, "loongarch64": 157, "ppc64le": 66, "s390x": 66}
"""The number of setsid(2) by machine."""
_CAPSET = {"x86_64": 126, "aarch64": 91, "riscv64": 91, "loongarch64": 91, "ppc64le": 184, "s390x": 185}
"""The number of capset(2) by machine."""
_NO_BOUND = (1 << 64) - 1
_NAMESPACES = ("mnt", "net", "pid", "user")
_HEAD = 5
"""The length of a ``T`` with the length of its part."""
_CHANNEL, _LETTER = 3, 4
"""The descriptor numbers in a waiting shell."""

# The launcher first runs once through its later steps, so that their memory is there when a caller waits. One line, so
# that the text's own lines are counted from 1. The shell evaluates a text directly if no difference can be seen, mostly
# in the folder where the shell already is: that is the first way. Other texts get a new bash in place of this one.
_BEGIN = f"printf x >&{_CHANNEL};exec {_CHANNEL}<&- {_LETTER}<&-;"
_EVALUATE = 'SECONDS=0;: /bin/bash;eval -- "$BASH_EXECUTION_STRING";'
_BOOT = (
    f"IFS= read -rd ''</dev/null;exec 9<&{_LETTER} 9<&-;printf '' >&{_CHANNEL};eval -- :;unset REPLY;"
    f"printf r >&{_CHANNEL};IFS= read -rn1 -u{_CHANNEL} BASH_EXECUTION_STRING||exit 125;"
    f"case $BASH_EXECUTION_STRING in e)IFS= read -rd '' -u{_LETTER} BASH_EXECUTION_STRING;{_BEGIN}"
    f"{_EVALUATE};"
    f"*)IFS= read -rd '' -u{_LETTER};IFS= read -rd '' -u{_LETTER} BASH_EXECUTION_STRING;"
    'case $REPLY in ??*)cd -P -- "${REPLY#?}" 2>/dev/null||'
    f"{{ printf 'E%s cannot be entered' \"${{REPLY#?}}\" >&{_CHANNEL};exit 125;}};unset OLDPWD;declare -x OLDPWD;;esac;"
    f"{_BEGIN}"
    'case $REPLY in x*)unset REPLY;exec /bin/bash --noprofile --norc -c -- "$BASH_EXECUTION_STRING";;esac;'
    f"unset REPLY;{_EVALUATE};esac"
)
_OF_THE_SHELL = frozenset(
    ("ENV", "SHELLOPTS", "POSIXLY_CORRECT", "PS4", "CDPATH", "IFS", "OLDPWD", "PWD", "SHLVL", "REPLY", "SECONDS", "_")
)
"""Variables that a shell reads when it starts. With one of them, no shell is started before its text is known."""


class LauncherProgram(Struct, frozen=True):
    """A program that can be a sandbox's first process. Its descriptors are appended to ``argv``."""

    name: Literal["perl", "python"]
    argv: tuple[str, ...]


@lru_cache(maxsize=1)
def find_launcher() -> LauncherProgram | None:
    """Return the launcher for this machine; None without perl and without an interpreter in the sandbox."""
    # Perl first: it starts in a few milliseconds, and almost every Linux system has it.
    return find_perl_launcher() or find_python_launcher()


def find_perl_launcher() -> LauncherProgram | None:
    """Return the launcher in Perl; None if it cannot be used here."""
    # Perl makes system calls by number, and the numbers depend on the machine.
    if platform.machine() not in _PRLIMIT or not os.access(PERL, os.X_OK):
        return None
    return LauncherProgram(
        "perl", (PERL, "-f", "-e", _read_source("launcher.pl"), "--", *map(_read_source, _EVALUATED))
    )


def find_python_launcher() -> LauncherProgram | None:
    """Return the launcher for the interpreter that runs Handrail, which is mounted with the toolchains."""
    try:
        interpreter = os.path.realpath(find_own_interpreter())
    except ProgramRefused:
        return None
    # Isolated and without `site`: no variable and no file of the workspace can add code to the launcher.
    return LauncherProgram("python", (interpreter, "-I", "-S", "-c", _read_source("launcher_python.py")))


def _read_source(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


@lru_cache(maxsize=1)
def _read_own_namespaces() -> str:
    return " ".join(str(Path("/proc/self/ns", kind).readlink()) for kind in _NAMESPACES)


def encode_launcher_setup(
    mode: LaunchMode,
    ruleset: LandlockRuleset | None,
    limits: Mapping[int, tuple[int, int]],
    environment: Mapping[str, str],
    *,
    counts: Sequence[tuple[str, int]] = (),
    terminal: bool = False,
    table: ExpectedMounts | None = None,
) -> bytes:
    """Return the first part of the letter.

    :param table: what its mounts must be; None for no comparison
    :param limits: soft and hard value by RLIMIT_* number
    :param counts: file and value of the settings that the launcher writes before it gives up its one capability
    :param environment: that of a waiting shell; a program's environment comes with the call
    :param terminal: whether stdin is a terminal that becomes the controlling terminal
    """
    bounds: list[str | bytes] = []
    for number, (soft, hard) in limits.items():
        bounds += (str(number), struct.pack("=QQ", soft & _NO_BOUND, hard & _NO_BOUND))
    rules: list[str | bytes] = []
    if ruleset is not None:
        rules += (item for path, rights in ruleset.folders for item in ("path", path, struct.pack("=Q", rights)))
        rules += (
            item
            for port, rights in ruleset.ports
            for item in ("port", struct.pack("=Q", port), struct.pack("=Q", rights))
        )
    table = table or ExpectedMounts()
    looked = mount_comparison.list_paths_to_identify(table)
    folders = dict.fromkeys(path[: path.rindex("/") + 1] for path in table.kept)
    items: list[str | bytes] = [
        mode,
        _read_own_namespaces(),
        b"" if ruleset is None else ruleset.attributes,
        struct.pack("=Q", landlock.FILE_RIGHTS),
        str(_PRLIMIT.get(platform.machine(), 0)),
        str(_SETSID.get(platform.machine(), 1)) if terminal else "0",
        str(_CAPSET.get(platform.machine(), 0)),
        " ".join(map(str, _SIGNALS.get(platform.machine(), ()))),
        *(str(2 * len(counts)), *(str(item) for pair in counts for item in pair)),
        *(str(len(bounds)), *bounds),
        *(str(len(rules)), *rules),
        *(str(len(looked)), *looked),
        *(str(len(folders)), *folders),
    ]
    if mode == "shell":
        items += (_BOOT, *_format_environment(environment))
    return _encode_part(items)


def encode_program_start_message(folder: str, argv: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the message that starts a program."""
    return b"g" + _encode_part([folder, str(len(argv)), *argv, *_format_environment(environment)])


def encode_shell_start_message(folder: str, text: str) -> bytes:
    """Return the message that starts a waiting shell's text.

    :param folder: the folder to enter first; empty to stay
    """
    # A text that is too long for an argument is evaluated even if a difference could be seen: it would not run at all
    # otherwise.
    evaluated = is_safe_to_evaluate_text(text) or len(os.fsencode(text)) > MAX_TEXT_BYTES
    if evaluated and not folder:
        return b"e" + os.fsencode(text)
    return os.fsencode(f"g{'e' if evaluated else 'x'}{folder}\0{text}")


def find_prestartable_shell_text(argv: Sequence[str], environment: Iterable[str]) -> str | None:
    """Return the text of an ``argv`` that runs bash on one text, if bash can start before; else None."""
    if len(argv) != len(SHELL_ARGV) + 1 or tuple(argv[:-1]) != SHELL_ARGV:
        return None
    # `LD_` as well: the loader reads these before bash, so a shell that has started already would ignore them.
    if any(name in _OF_THE_SHELL or name.startswith(("BASH", "LD_")) for name in environment):
        return None
    return argv[-1]


# Never directly before another redirection, which would take digits there as its number.
# Atomic groups, since possessive ones around groups match too much before Python 3.11.5.
_WORD = r"""(?>(?:[\w.,/:@%+=^~*?\[\]-]|'[^']*'|"[^"$`\\!]*")+)(?![<>])"""
_ELEMENT = rf"(?:{_WORD}|\d?>&\d(?![<>])|\d?(?:>>?|<)[ \t]*+{_WORD})"
_COMMAND = rf"{_ELEMENT}(?>(?:[ \t]*+{_ELEMENT})*)"
_PLAIN = re.compile(
    rf"\s*+{_COMMAND}(?>(?:[ \t]*+(?:&&|\|\||;|\||\n)[ \t\n]*+{_COMMAND})*)[ \t]*+;?\s*+",
    re.ASCII,
)
_REVEALING = re.compile(
    r"(?<![\w-])(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|select|function|time|coproc|"
    r"set|shopt|eval|source|trap|exec|builtin|command|enable|alias)(?![\w-])|\[\[|\]\]|(?:^|[;&|\n])[ \t]*\.(?![\w./-])|"
    r"(?<![\w.,/:@%+=^~*?\[\]'\"-])[A-Za-z_]\w*\[",  # a possible array name is read up to its closing bracket
    re.ASCII,
)


def is_safe_to_evaluate_text(text: str) -> bool:
    """Return whether ``text`` behaves the same when it is evaluated and when a shell is started with it.

    The differences would be a syntax error, which names ``eval``, and the depth that tracing shows. So only texts that
    surely have neither are plain: plain and quoted words, redirections and the separators between commands.
    """
    return len(text) <= 4096 and _PLAIN.fullmatch(text) is not None and _REVEALING.search(text) is None


def _format_environment(environment: Mapping[str, str]) -> Iterable[str]:
    return (item for pair in environment.items() for item in pair)


def split_mount_report(output: bytes) -> tuple[bytes, bytes] | None:
    """Split a launcher's output into the part of its first ``T`` and the rest; None if it is incomplete."""
    # The report comes in pieces of any size, as bytes do in a pipe.
    if not output.startswith(b"T") or len(output) < _HEAD:
        return None
    end = _HEAD + int.from_bytes(output[1:_HEAD], "big")
    return None if len(output) < end else (output[_HEAD:end], output[end:])


def _encode_part(items: Iterable[str | bytes]) -> bytes:
    raw = [item if isinstance(item, bytes) else os.fsencode(item) for item in items]
    # Lengths, not separators: paths and variables may contain any byte except zero, and the rights of a rule contain
    # zeros.
    whole = b"".join(len(item).to_bytes(4, "big") + item for item in raw)
    return len(whole).to_bytes(4, "big") + whole
