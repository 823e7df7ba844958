"""Faults of rule patterns: why a pattern can match no command, path or host, and what to write instead.

A fault names a pattern that no call can match, or one that another program would read in another way.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import lru_cache

from handrail.contract.text.glob_patterns import escape_glob_literal, find_glob_pattern_fault
from handrail.contract.text.host_names import find_host_pattern_fault
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.origins.program_lookup import find_home_folder
from handrail.policy.rules.pattern_lexer import ANY_ARGUMENTS, PatternSyntaxError, list_unquoted_words, split_pattern

READ_ONLY_VARIABLE = "{read-only}"
"""A variable of command patterns. It matches commands that are proved to change nothing (see ``read_only_proof``)."""
CONFINED_VARIABLE = "{confined}"
"""A variable of command patterns. It answers for calls that stay confined (see :mod:`handrail.policy.confinement`)."""
_COMMAND_VARIABLES = f"{READ_ONLY_VARIABLE}, for commands that provably change nothing, and {CONFINED_VARIABLE}, for calls that stay confined"
WORKSPACE_VARIABLE = "{workspace}"

_HOME_SPELLINGS = compile_regex_lazily(r"(?:~|\$HOME|\$\{HOME\})(?=/|$)")
_HOME_WORDS = compile_regex_lazily(r"(?<!\S)(?:~|\$HOME|\$\{HOME\})(?=[/\s]|$)")


def expand_home(pattern: str) -> str:
    """Return a path pattern with the user's home folder in place of ``~``, ``$HOME`` or ``${HOME}`` at its beginning.

    If no home folder is known, the pattern stays as it is.
    """
    if not _HOME_SPELLINGS.match(pattern) or (home := find_home_folder()) is None:
        return pattern
    return _HOME_SPELLINGS.sub(lambda _: escape_as_path_pattern(home), pattern, count=1)


# Paths.

_VARIABLE = compile_regex_lazily(r"(?<!\[)\{([^{}/\s]*)\}")
_URL = compile_regex_lazily(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PATH_VARIABLE = compile_regex_lazily(r"^~[^/]*(?=/|$)|(?:^|(?<=/))\$\{?[A-Za-z_]\w*\}?(?=/|$)")
"""A name in a path pattern that a shell expands."""
_ESCAPED_WILDCARD = compile_regex_lazily(r"\\[*?\[{]")
_BACKSLASH = compile_regex_lazily(r"(?<!\[)\\")
_QUOTED_PATH = compile_regex_lazily(r"(?P<quote>['\"])(?P<inner>[^'\"]+)(?P=quote)(?P<rest>/.*|)")
_SEVERAL_PATHS = compile_regex_lazily(
    r",(?:\s+\S|[./~]|[^\s,]*/)|\*\*,\S|/\*\*\s+\S|\s(?:[./~]|\*\*)|\S[|;]\s*\S|\{[^{}\s]*,[^{}\s]*\}"
)
"""Text that looks like a list of paths: a comma or a space before a further path, another sign between two, or braces."""
_SEPARATORS = compile_regex_lazily(r"[,;|\s]")
_BRACKETS = compile_regex_lazily(r"\[[^\]]+\]")


def escape_as_path_pattern(path: str) -> str:
    """Return a path pattern that matches exactly ``path``."""
    escaped = "".join(f"[{c}]" if c in "{\\$" else c for c in escape_glob_literal(path))
    if _names_several_paths(escaped):
        escaped = _SEPARATORS.sub(r"[\g<0>]", escaped)
    return f"./{escaped}" if escaped[:1] in ("~", "'", '"', "!", "^") else escaped


def _names_several_paths(pattern: str) -> bool:
    return _SEVERAL_PATHS.search(_BRACKETS.sub("_", pattern)) is not None


def explain_path_pattern_fault(pattern: str) -> str | None:
    """Return why a path pattern can match no path, or None."""
    if ".." in pattern.split("/"):
        return f"the path pattern {pattern!r} contains '..', so it never matches. Write the resolved path."
    if _URL.match(pattern):
        return f"the path pattern {pattern!r} is a URL. Write a path relative to the workspace, or one that begins with '/'."
    if _HOME_SPELLINGS.match(pattern):
        if (home := expand_home(pattern)) == pattern:
            return (
                f"the path pattern {pattern!r} names the home folder, which is not known. Set HOME, or write the path."
            )
        return f"the path pattern {pattern!r} is not expanded in a rule about a tool. Write the path: {home!r}."
    return (
        _find_other_syntax_in_path(pattern)
        or _find_unknown_path_variable(pattern)
        or _find_escape_in_path(pattern)
        or find_glob_pattern_fault(pattern)
    )


def _find_other_syntax_in_path(pattern: str) -> str | None:
    """Return what in a path pattern is the syntax of another program, or None."""
    if (quoted := _QUOTED_PATH.fullmatch(pattern)) is not None:
        meant = quoted["inner"] + quoted["rest"]
        return f"the path pattern {pattern!r} has quotes, but a path needs none. Write {meant!r}."
    if _names_several_paths(pattern):
        return f"the path pattern {pattern!r} names several paths. Write one rule for each path. In the name of one file, write the sign in brackets, such as [,]."
    if pattern[0] == "!":
        return f"a path pattern has no negation. Write a rule that denies or asks about {pattern[1:]!r}. For a name with '!', write {'./' + pattern!r}."
    if pattern[0] == "^":
        return f"the path pattern {pattern!r} is not a regular expression. Write '*' and '**' for any text. For a name with '^', write {'./' + pattern!r}."
    return None


def _find_unknown_path_variable(pattern: str) -> str | None:
    """Return what is wrong with the variables of a path pattern, or None."""
    if (variable := _PATH_VARIABLE.search(pattern)) is not None:
        return (
            f"the path pattern {pattern!r} contains {variable.group()!r}, which a rule does not expand. Write the path. "
            "Only ~ and $HOME at the beginning are expanded. (Write a literal dollar as [$].)"
        )
    for match in _VARIABLE.finditer(pattern):
        if match.group() != WORKSPACE_VARIABLE:
            near = nearest_names(match.group(1), ("workspace",), 1)
            hint = f"Did you mean {WORKSPACE_VARIABLE!r}?" if near else f"The only variable is {WORKSPACE_VARIABLE}."
            return f"unknown variable {match.group()} in the path pattern {pattern!r}. {hint} (Write a literal brace as [{{].)"
        if match.start() or pattern[match.end() : match.end() + 1] not in ("", "/"):
            return f"the variable in {pattern!r} is only part of a name. Write it first, alone or before a '/'."
    return None


def _find_escape_in_path(pattern: str) -> str | None:
    """Return what is wrong with the backslashes of a path pattern, or None."""
    if _ESCAPED_WILDCARD.search(pattern):
        return f"the path pattern {pattern!r} contains a backslash, which escapes nothing. Write a literal wildcard as [*]."
    if not _BACKSLASH.search(pattern):
        return None
    meant = pattern.replace("\\ ", " ").replace("\\", "/")
    write = "a path relative to the workspace" if pattern[1:2] == ":" else repr(meant)
    return f"the path pattern {pattern!r} contains a backslash, which escapes nothing. Write {write}. (Write a literal backslash as [\\].)"


# Hosts.

_HOST_WITH_LABEL = compile_regex_lazily(r"(?:domain|host|url)[:=](?=.*\D)")


def explain_host_pattern_fault(pattern: str) -> str | None:
    """Return why a host pattern can match no host, with the host that it may mean, or None."""
    fault = find_host_pattern_fault(pattern)
    if fault is None:
        return None
    named = pattern.replace(",", " ").split()
    if len(named) > 1:
        return f"{pattern!r} names several hosts. Write one rule for each host."
    meant = next((host for host in _guess_hosts(pattern) if find_host_pattern_fault(host) is None), None)
    if meant is None or meant == pattern:
        return fault
    return (
        f"{pattern!r} is not a host pattern. A rule has a host alone, without scheme, path and quotes. Write {meant!r}."
    )


def _guess_hosts(pattern: str) -> Iterator[str]:
    """Yield the host patterns that a faulty one may mean."""
    text = _HOST_WITH_LABEL.sub("", pattern.strip("'\""), count=1)
    text = _URL.sub("", text)
    if text.rpartition("/")[2].isdecimal() and find_host_pattern_fault(text.partition("/")[0]) is None:
        return  # a network: no rule names one
    text = text.partition("/")[0].rpartition("@")[2]
    yield text
    if text.count(":") > 1:
        yield f"[{text}]"
    if text[:1] in ("*", "."):
        yield f"*.{text.lstrip('*.')}"
    try:
        yield text.encode("idna").decode("ascii")
    except UnicodeError:
        return


# Commands.

_COMMAND_VARIABLE = compile_regex_lazily(r"\{[^{}/\s]+\}")
_OPERATOR = compile_regex_lazily(
    r"&&|\|\|?|;|&|[0-9]*(?:>>?|>\||<|<<|<<<|>&|<&)\S*|&>>?\S*|.*[^\\];|.*[^&\\]&|\w[\w.-]*\|[\w.|-]*\w"
)
"""A bare word that a shell reads as an operator, or that has one at its end."""
_EXPANSION = compile_regex_lazily(r"^~|`|\$[A-Za-z0-9_{(@*#?!$'\"-]|\{[^{}]*(?:,|\.\.)[^{}]*\}|^[()]|[()]$")
"""The characters that a shell expands in a bare word of a command."""
_ASSIGNMENT = compile_regex_lazily(r"[A-Za-z_]\w*=.*")
_ANY_AFTER_COLON = compile_regex_lazily(r"(?P<word>[A-Za-z0-9_./-]+):\*")
"""The ``git:*`` of another program's rules, for any arguments."""
_KEYWORDS = frozenset(
    (
        *("!", "{", "}", "[[", "case", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in"),
        *("select", "then", "until", "while"),
    )
)
_BARE_VARIABLES = {
    "confined": CONFINED_VARIABLE,
    "read-only": READ_ONLY_VARIABLE,
    "readonly": READ_ONLY_VARIABLE,
    "read_only": READ_ONLY_VARIABLE,
}
"""The variable that a pattern of one word means if its braces are missing."""


@lru_cache(maxsize=4096)
def explain_command_pattern_fault(pattern: str) -> str | None:
    """Return why a command pattern can match no command, or None."""
    try:
        words = split_pattern(pattern)
        plain = list_unquoted_words(pattern)
    except PatternSyntaxError as fault:
        return str(fault)
    if pattern in (READ_ONLY_VARIABLE, CONFINED_VARIABLE):
        return None
    checks: tuple[Callable[[str, tuple[str, ...], tuple[str, ...]], str | None], ...] = (
        _find_operator,
        _find_expansion,
        _find_unknown_variable,
        _find_fault_in_program,
    )
    found = next((problem for check in checks if (problem := check(pattern, words, plain))), None)
    return found or next((problem for word in words if (problem := find_glob_pattern_fault(word))), None)


def _find_operator(pattern: str, _words: tuple[str, ...], plain: tuple[str, ...]) -> str | None:
    """Return what is wrong if a pattern has an operator of the shell, or None."""
    operator = next((word for word in plain if _OPERATOR.fullmatch(word)), None)
    if operator is None:
        return None
    return (
        f"the pattern {pattern!r} contains {operator!r}, but a rule matches one simple command. Write one rule for each "
        "command, and rules of fs.read and fs.write for redirections. If you mean the character itself, quote it."
    )


def _find_expansion(pattern: str, _words: tuple[str, ...], plain: tuple[str, ...]) -> str | None:
    """Return what is wrong if a pattern has a word that a shell expands, or None."""
    bare = next((word for word in plain if _EXPANSION.search(word)), None)
    if bare is None:
        return None
    home = find_home_folder()
    meant = pattern if home is None else _HOME_WORDS.sub(lambda _: shlex.quote(home), pattern)
    write = (
        f"Write {meant!r}."
        if meant != pattern and explain_command_pattern_fault(meant) is None
        else f"Write the words themselves, or {ANY_ARGUMENTS!r} for any arguments."
    )
    return (
        f"the pattern {pattern!r} contains {bare!r}, which a shell expands, and a rule is compared with the words after that. "
        f"{write} If you mean the character itself, quote it."
    )


def _find_unknown_variable(_pattern: str, words: tuple[str, ...], plain: tuple[str, ...]) -> str | None:
    """Return what is wrong with the variables of a command pattern, or None."""
    if (variable := _COMMAND_VARIABLE.search(" ".join(plain))) is not None:
        if variable.group() in (READ_ONLY_VARIABLE, CONFINED_VARIABLE):
            return f"{variable.group()} is a whole pattern, and has no words next to it. Remove the other words."
        return f"unknown variable {variable.group()!r}. Command patterns have {_COMMAND_VARIABLES}. If you mean the braces, quote them."
    meant = _BARE_VARIABLES.get(words[0]) if plain[:1] == words[:1] else None
    if meant is not None and (len(words) == 1 or words[0] != "readonly"):  # which is a builtin of the shell
        return (
            f"{words[0]!r} is not a command here. Write the variable with its braces: {meant!r}. For a program of that name, "
            f"write {repr(words[0])!r}."
        )
    return None


def _find_fault_in_program(pattern: str, words: tuple[str, ...], plain: tuple[str, ...]) -> str | None:
    """Return why no command begins with the first words of a pattern, or None."""
    first, is_bare = words[0], plain[:1] == words[:1]
    if is_bare and first in _KEYWORDS:
        return (
            f"{first!r} is a word of the shell, and a rule is about one command in it. Write a rule for that command. For a program "
            f"of that name, write {repr(first)!r}."
        )
    if ANY_ARGUMENTS in words[:-1] or words == (ANY_ARGUMENTS,):
        return f"{ANY_ARGUMENTS!r} stands for any arguments, so it is the last word after a program, as in 'pytest {ANY_ARGUMENTS}'."
    if first == "":
        return f"the pattern {pattern!r} begins with an empty word. Begin it with the name of a program."
    if is_bare and _ASSIGNMENT.fullmatch(first):
        rest = pattern.strip().removeprefix(first).strip() or first.partition("=")[2]
        return f"{first!r} sets a variable, and a rule is compared with the command after it. Write {rest!r}."
    if is_bare and first[0] == "^":
        return f"the pattern {pattern!r} is not a regular expression. Write the words of a command, and {ANY_ARGUMENTS!r} for any arguments."
    place = 1 if words[:1] == ("git",) and len(words) == 2 else 0
    if len(words) == place + 1 and (other := _ANY_AFTER_COLON.fullmatch(words[place])) is not None:
        meant = " ".join((*words[:place], other["word"], ANY_ARGUMENTS))
        return f"{words[place]!r} is the form of another program. Write {meant!r}."
    return None
