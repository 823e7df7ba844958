"""Shell texts that need no shell: one program with literal arguments, which is run as just that."""

from __future__ import annotations

from functools import lru_cache

from handrail.policy.shell.parse import Script, parse

OF_THE_SHELL = frozenset(
    (
        *(".", ":", "[", "alias", "bg", "bind", "break", "builtin", "caller", "cd", "command", "compgen", "complete"),
        *("compopt", "continue", "declare", "dirs", "disown", "echo", "enable", "eval", "exec", "exit", "export"),
        *("false", "fc", "fg", "getopts", "hash", "help", "history", "jobs", "kill", "let", "local", "logout"),
        *("mapfile", "popd", "printf", "pushd", "pwd", "read", "readarray", "readonly", "return", "set", "shift"),
        *("shopt", "source", "suspend", "test", "times", "trap", "true", "type", "typeset", "ulimit", "umask"),
        *("unalias", "unset", "wait", "time", "coproc", "!", "{", "}", "[[", "]]", "case", "do", "done", "elif"),
        *("else", "esac", "fi", "for", "function", "if", "in", "select", "then", "until", "while"),
    )
)
"""bash's builtins and its own words, which are no programs or other ones than those of the same name."""


def without_a_shell(script: Script) -> tuple[str, ...] | None:
    """The argv of a script that is one program with literal arguments; None where a shell has something to do."""
    if script.unclear is not None or len(script.commands) != 1:
        return None
    (command,) = script.commands
    if command.redirections or command.argv[0] in OF_THE_SHELL:
        return None
    return command.argv


@lru_cache(maxsize=64)
def argv_of(text: str) -> tuple[str, ...] | None:
    """:func:`without_a_shell` of a text."""
    return without_a_shell(parse(text))
