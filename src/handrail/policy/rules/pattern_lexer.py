"""The words of a rule pattern: quoted text is literal, everything else is a glob.

The pattern of ``allow bash git commit -m 'fix: *'`` has four words, the last with a literal star. So any argv, quoted as for a
shell, is a pattern that matches exactly itself.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence, Set

from handrail.contract.text.glob_patterns import (
    compile_text_glob,
    escape_glob_literal,
    extract_literal_prefix,
    has_wildcard,
)
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell.simple_commands import GLOB, has_marks, is_marked, is_open

_PART = compile_regex_lazily(
    r"""(?P<blank>[ \t\n]+)|'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|(?P<bare>[^\s'"\\]+)""",
    re.DOTALL,
)


ANY_ARGUMENTS = "…"
"""The last word of a pattern for any arguments at all, options too. ``...`` is another spelling."""
_SPELLINGS_OF_ANY = (ANY_ARGUMENTS, "...")


class PatternSyntaxError(ValueError):
    """The pattern cannot be split into words."""


def split_pattern(pattern: str) -> tuple[str, ...]:
    """Split ``pattern`` into words, each a glob in which quoted and escaped characters are literal.

    A bare word ``...`` becomes :data:`ANY_ARGUMENTS`, a bare ``**`` becomes ``*``, and a quoted ``…`` a glob that matches only
    itself.

    :raises PatternSyntaxError: for an unclosed quote
    """
    words: list[str] = []
    word: list[str] | None = None
    bare = False
    position = 0
    while position < len(pattern):
        match = _PART.match(pattern, position)
        if match is None:
            raise PatternSyntaxError(
                f"a quote is not closed at {pattern[position : position + 20]!r}. Close it, or escape it with a backslash."
            )
        position = match.end()
        kind = match.lastgroup
        if kind == "blank":
            if word is not None:
                words.append(_finish_word("".join(word), bare=bare))
            word = None
            continue
        word, bare = ([], kind == "bare") if word is None else (word, bare and kind == "bare")
        text = match.group(kind) if kind else ""
        if kind == "bare":
            word.append(text)
        else:
            word.append(
                escape_glob_literal(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL) if kind == "quoted" else text)
            )
    if word is not None:
        words.append(_finish_word("".join(word), bare=bare))
    return tuple(words)


def _finish_word(word: str, *, bare: bool) -> str:
    """Return a word of a pattern, with the one spelling of the word for any arguments."""
    if bare:
        if word == "**":
            return "*"
        return ANY_ARGUMENTS if word in _SPELLINGS_OF_ANY else word
    return f"[{word}]" if word == ANY_ARGUMENTS else word


def list_unquoted_words(pattern: str) -> tuple[str, ...]:
    """Return the words of ``pattern`` in which nothing is quoted or escaped.

    :raises PatternSyntaxError: for an unclosed quote
    """
    found: list[str] = []
    bare = ""
    plain = True
    position = 0
    while position < len(pattern):
        match = _PART.match(pattern, position)
        if match is None:
            raise PatternSyntaxError(
                f"a quote is not closed at {pattern[position : position + 20]!r}. Close it, or escape it with a backslash."
            )
        position = match.end()
        if match.lastgroup == "blank":
            found += [bare] if bare and plain else []
            bare, plain = "", True
        elif match.lastgroup == "bare":
            bare += match.group()
        else:
            plain = False
    return (*found, bare) if bare and plain else tuple(found)


def build_exact_argv_pattern(argv: Iterable[str]) -> str:
    """Return a pattern that matches exactly ``argv``."""
    return " ".join(f"'{word}'" if word in _SPELLINGS_OF_ANY else shlex.quote(word) for word in argv)


_Word = tuple[str, "re.Pattern[str] | None"]
"""A word of a pattern, and its regular expression if it has a wildcard."""


class ArgvPattern:
    """A command pattern, compared with an argv word by word.

    A last word ``*`` matches any further words, or none, and so does ``…``. A last word ``-*`` matches one or more further
    words that begin with ``-``.

    In an *allow* rule, a wildcard at the beginning of a word never matches a word that begins with ``-``, but ``…`` does. In
    other rules, ``*`` matches every word, and any words may follow the word that ``-*`` matched. The program may be in any standard folder, and
    options may be in any order and place, combined or separate: ``deny bash rm -rf *`` matches ``rm -f x -r``.
    """

    __slots__ = ("_most", "_operands", "_options", "_rest", "_strict", "_takes_any", "_words", "literal_words")

    def __init__(self, words: Sequence[str], *, allowing: bool) -> None:
        rest = words[-1] if words and words[-1] in ("*", "-*", ANY_ARGUMENTS) else None
        fixed = words[:-1] if rest is not None else words
        self._rest = rest
        self._strict = allowing
        self._most = sys.maxsize if rest is not None else len(fixed)
        """The maximum number of words in a matching argv."""
        self._takes_any = rest in (None, ANY_ARGUMENTS) or (rest == "*" and not allowing)
        """Whether the further words, if the pattern permits them, may be any words."""
        self._words: tuple[_Word, ...] = tuple(
            (_unescape(w), None) if not has_wildcard(w) else (w, compile_text_glob(w)) for w in fixed
        )
        self.literal_words = frozenset(i for i, (_, regex) in enumerate(self._words) if regex is None)
        """The positions of the words in a matching argv that literal words of the pattern name."""
        self._options, self._operands = (
            (frozenset[str](), self._words) if allowing else _split_pattern_options(self._words)
        )
        """The options of a pattern that does not allow, if all of them are literal, and its other words."""

    @property
    def program(self) -> str | None:
        """The first word of the pattern if it is literal, or None."""
        return self._words[0][0] if self._words and 0 in self.literal_words else None

    @property
    def literal_texts(self) -> tuple[str, ...]:
        """The words of the pattern without a wildcard."""
        return tuple(word for word, regex in self._words if regex is None)

    @property
    def program_prefix(self) -> str:
        """The literal beginning of the first word, with which the name of every matching program begins."""
        return extract_literal_prefix(self._words[0][0]) if self._words else ""

    def matches(self, argv: Sequence[str]) -> bool:
        """Return whether the pattern matches a command.

        An allow rule matches a word that only the shell knows with its last ``*`` alone, and only if the word cannot become an
        option or several words.
        """
        if self._strict:
            return self._matches_as_written(argv) and not (
                has_marks(argv[: len(self._words)]) or any(map(is_open, argv[len(self._words) :]))
            )
        if argv and argv[0][:1] == "/":
            argv = (strip_standard_program_folder(argv[0]), *argv[1:])
        return self._matches_as_written(argv) or (bool(self._options) and self._matches_in_any_order(argv))

    def may_match_after_expansion(self, argv: Sequence[str]) -> bool:
        """Return whether a pattern that does not allow may match a command, whatever the shell makes of its marked words."""
        if argv and argv[0][:1] == "/":
            argv = (strip_standard_program_folder(argv[0]), *argv[1:])
        if self._options and any(map(is_open, argv)):
            return self._words[0][0] == argv[0] or self._words[0][1] is not None
        for (want, regex), have in zip(self._words, argv, strict=False):
            if is_marked(have):
                if is_open(have) or GLOB in have:
                    return True
            elif have != want if regex is None else regex.match(have) is None:
                return False
        return len(argv) >= len(self._words)

    def _matches_as_written(self, argv: Sequence[str]) -> bool:
        count = len(self._words)
        if not count <= len(argv) <= self._most:
            return False
        for (want, regex), have in zip(self._words, argv, strict=False):
            if regex is None:
                if have != want:
                    return False
            elif regex.match(have) is None or (self._strict and have[:1] == "-" and want[:1] != "-"):
                return False
        if self._takes_any:
            return True
        are_options = [word[:1] == "-" for word in argv[count:]]
        if self._rest == "*":
            return True not in are_options
        return bool(are_options) and (all(are_options) if self._strict else are_options[0])

    def _matches_in_any_order(self, argv: Sequence[str]) -> bool:
        """Return whether the argv has all options of the pattern in any place, and its operands in order."""
        program, regex = self._operands[0]
        if not argv or (argv[0] != program if regex is None else regex.match(argv[0]) is None):
            return False
        options, operands = _split_argv_options(argv)
        if not all(_is_option_present(options, wanted) for wanted in self._options):
            return False
        if self._rest is None and (
            len(operands) > len(self._operands) - 1
            or not all(_is_option_present(self._options, option) for option in options)
        ):
            return False
        left = iter(operands)
        return all(
            any(have == want if regex is None else regex.match(have) is not None for have in left)
            for want, regex in self._operands[1:]
        )


def _split_pattern_options(words: tuple[_Word, ...]) -> tuple[frozenset[str], tuple[_Word, ...]]:
    """Return the options of a pattern, if all of them are literal, and its other words."""
    given = [(word, regex) for word, regex in words[1:] if word[:1] == "-" and len(word) > 1]
    if not given or not all(regex is None for _, regex in given):
        return frozenset(), words
    options = frozenset(part for word, _ in given for part in _split_option_cluster(word))
    return options, (words[0], *(pair for pair in words[1:] if pair not in given))


def _split_argv_options(argv: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the single options of an argv, and its operands with the values of ``--option=value``."""
    options: set[str] = set()
    operands: list[str] = []
    for index, word in enumerate(argv[1:], 1):
        if word == "--":
            operands += argv[index + 1 :]
            break
        if word[:1] == "-" and len(word) > 1:
            name, sign, value = word.partition("=")
            options.update(_split_option_cluster(name))
            if sign:
                operands.append(value)
        else:
            operands.append(word)
    return options, operands


STANDARD_FOLDERS = ("/bin/", "/usr/bin/", "/usr/local/bin/", "/sbin/", "/usr/sbin/", "/usr/local/sbin/")
"""The folders of the system's programs. A program in one of them is the one of its bare name."""


def strip_standard_program_folder(program: str) -> str:
    """Return the bare name of a program in a standard folder, and any other name unchanged."""
    folder, slash, name = program.rpartition("/")
    return name if slash and name and f"{folder}/" in STANDARD_FOLDERS else program


_SHORT_OPTIONS = compile_regex_lazily(r"-[A-Za-z0-9]{1,4}")
"""A cluster of short options; a longer word with one dash, such as ``-delete``, is one option."""
_SAME_OPTIONS = {
    "--force": "-f",
    "--recursive": "-r",
    "-R": "-r",
    "--verbose": "-v",
    "--quiet": "-q",
    "--yes": "-y",
    "--assume-yes": "-y",
    "--global": "-g",
    "--delete": "-d",
    "--all": "-a",
}
"""Long options and the letter that means the same in most programs."""


def _split_option_cluster(word: str) -> tuple[str, ...]:
    """Return the options in one word: ``-rf`` contains ``-r`` and ``-f``."""
    if word[:2] == "--":
        return (word,)
    if _SHORT_OPTIONS.fullmatch(word):
        return tuple(f"-{letter}" for letter in word[1:])
    return (word,)


def _is_option_present(options: Set[str], wanted: str) -> bool:
    """Return whether an option is present, also by its other name or shortened as GNU programs allow."""
    if wanted in options:
        return True
    same = _SAME_OPTIONS.get(wanted, wanted)
    if any(_SAME_OPTIONS.get(option, option) == same for option in options):
        return True
    names = [wanted, *(long for long, short in _SAME_OPTIONS.items() if short == same and long[:2] == "--")]
    return any(
        option[:2] == "--" and len(option) > 3 and any(name[:2] == "--" and name.startswith(option) for name in names)
        for option in options
    )


def _unescape(word: str) -> str:
    return re.sub(r"\[([*?[])\]", r"\1", word)
