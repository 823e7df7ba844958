"""The commands that an argv may run: its other spellings, and the command that its program would start.

:func:`find_possible_commands` returns them. Every rule that denies or asks is compared with each of them. A reading is *certain* if the
program is known to run it. Otherwise it is a guess: an unknown program may run any of its words.
:mod:`handrail.policy.shell.program_risks` answers the opposite question: which form of a program an allow rule covers.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import command_wrappers
from handrail.policy.shell.parser import parse_script
from handrail.policy.shell.risky_options import SHELLS

MAX_DEPTH = 3
"""The number of nested texts that are read."""
_MAX_OPTIONS = 64
_MAX_READINGS = 250
_MAX_TEXTS = 60
_MAX_SIGNS = 200
"""The maximum number of structural signs in a nested text, of which there may be many."""
_MAX_PIECES = 60

_CUT = compile_regex_lazily(r"[\n;|&(){}\[\]`!=:,\"'<>$\\@%^]+")
"""Signs at which a command may begin inside a text of any language."""
_GLOBS = compile_regex_lazily(r"[*?\[\]~{}]")
_LISTED = compile_regex_lazily(r"""["']\s*,\s*["']""")
"""The separator of two words in a list of literals, as in ``['rm', '-rf']``."""
_CALLS = compile_regex_lazily(
    r"system|exec|popen|spawn|subprocess|shell|\bsh\b|run\b|call|`|qx|fork|command|\bpipe|getline|\||program|process"
    r"|!|(?<![a-z])e\b|%x?\(|\bcmd|passthru|\bterm|syscmd|terminal|job_start|host\b|open\b",
    re.IGNORECASE,
)
"""What code in any language contains if it starts a program."""
_LEADS = frozenset(
    {"spawn", "exec", "execute", "execute-silent", "become", "transform", "reload", "shell", ".shell", ".sh", ".system", "system"}
    | {"run", "run-shell", "call", "host", "platform", "term", "terminal", "!", ".!", "e", "1e", "do", "then", "command", "child"}
    | {"cmd", "local", "-noecho", "localcommand", "proxycommand", "remotecommand", "knownhostscommand", "match"}
)  # fmt: skip
"""Words of other languages before a command."""
_UNQUOTED = str.maketrans("", "", "'\"\\")
_NOT_PLAIN = compile_regex_lazily(r"[\s;|&()<>`$=:!,'\"{}\[\]\\]")
_TAKES_SCRIPT = compile_regex_lazily(r"-[A-Za-z]*c|--?[Cc]ommands?")
_ASSIGNED = compile_regex_lazily(r"""(?<![\w-])[A-Za-z_]\w*\+?=(?P<value>'[^']*'|"(?:[^"\\]|\\.)*"|[^\s;|&()<>]+)""")
_NAMED_VALUE = compile_regex_lazily(r"[A-Za-z_]\w*\+?=")
_GIVES_WORK = compile_regex_lazily(r"-{1,2}(?:c|e|f|ex|cmd|command|execute|eval|file|query|Q|x|R|b|batch)(?:=.*)?")
_READS_INPUT = frozenset(
    (option, file)
    for option in ("-f", "--file", "--justfile", "--taskfile", "--makefile", "build", "run", "playbook")
    for file in ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
)
_CONTAINER_PROGRAMS = frozenset({"docker", "podman", "nerdctl", "finch", "kubectl", "oc", "ctr", "docker-compose"})
_KEEPS_INPUT = compile_regex_lazily(r"-[a-hj-z]*i[a-z]*|--interactive|--stdin")
_ALIAS = compile_regex_lazily(r"(?:-c)?alias\.(?P<name>[^=]+)=(?P<value>.*)", re.DOTALL)


class PossibleCommand(NamedTuple):
    """A command that an argv may run.

    :param certain: whether the program is known to run it; otherwise it may be only data
    :param spelling_of: the command that this is another spelling of; None for a command that another one runs
    """

    argv: tuple[str, ...]
    certain: bool = True
    spelling_of: tuple[str, ...] | None = None


class NestedCommandForm(Struct, frozen=True):
    """The places in a program's words where a command may begin.

    :param anywhere: any word after the program's name
    :param verbs: words after which a command may begin
    :param options: options whose value is a command, or is followed by one
    :param prefixes: beginnings of long options of the same kind
    :param assigned: the value of a word ``NAME=VALUE`` may be a command
    :param pairs: options with a name and a value, which may be a command
    :param built: sub-commands that run a program of the workspace with the words after them
    :param first: after a verb or the program's name, the command begins at the first word that is not an option
    :param code: the words are code of some language, which can start programs
    :param partly_known: the program may also run other words
    """

    anywhere: bool = False
    verbs: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    assigned: bool = False
    pairs: frozenset[str] = frozenset()
    built: frozenset[str] = frozenset()
    first: bool = False
    code: bool = False
    partly_known: bool = False


def _parse_form(text: str, *, first: bool = False) -> NestedCommandForm:
    pairs, built, options, prefixes, verbs = set[str](), set[str](), list[str](), list[str](), set[str]()
    for word in text.split():
        if word in ("*", "=", "?", "code"):
            continue
        if word[:2] == "2:":
            pairs.add(word[2:])
        elif word[:1] != "-" and word[-1] == "?":
            built.add(word[:-1])
        elif word[:1] != "-" or word == "--":
            verbs.add(word)
        elif word[-1] == "*":
            prefixes.append(word[:-1])
        else:
            options.append(word)
    words = text.split()
    return NestedCommandForm(
        anywhere="*" in words,
        verbs=frozenset(verbs),
        options=tuple(options),
        prefixes=tuple(prefixes),
        assigned="=" in words,
        pairs=frozenset(pairs),
        built=frozenset(built),
        first=first,
        code="code" in words,
        partly_known="?" in words,
    )


_FORMS: Mapping[str, NestedCommandForm] = {
    **{
        name: NestedCommandForm(anywhere=True, first=name in command_wrappers.PROGRAM_FIRST_RUNNERS)
        for name in command_wrappers.RUNNERS
    },
    **{
        name: _parse_form(text, first=name in command_wrappers.PROGRAM_FIRST_RUNNERS)
        for names, text in command_wrappers.COMMAND_PLACES.items()
        for name in names.split()
    },
}
_ANYWHERE = NestedCommandForm(anywhere=True)
_CODE = NestedCommandForm(code=True)
PROGRAM_PREFIXES = ("ld-linux", "ld-musl", "s6-", "qemu-", "proxychains", "ld.so")
_VERSIONED = compile_regex_lazily(r"(?P<name>[a-z][a-z+_-]*?)-?[0-9][0-9.]*[a-z]?(?:-(?:dbg|debug|intel64))?")
_PROGRAM_ENDINGS = (".exe", ".cmd", ".bat", ".com")
"""Endings of Windows programs, which WSL starts as well."""


def find_nested_command_form(program: str) -> NestedCommandForm | None:
    """Return where a program, given by its bare name, has the command that it runs; None if it is unknown."""
    form = _FORMS.get(program)
    if form is not None:
        return form
    if program.startswith(PROGRAM_PREFIXES):
        return _ANYWHERE
    if program in command_wrappers.CODE_INTERPRETERS:
        return _CODE
    if (match := _VERSIONED.fullmatch(program)) is not None and match.group(
        "name"
    ) in command_wrappers.CODE_INTERPRETERS:
        return _CODE
    return None


def program_name(argv: Sequence[str]) -> str:
    """Return the program's bare name, without its folder and its ending."""
    if not argv:
        return ""
    name = posixpath.basename(argv[0].lower()) if "/" in argv[0] else argv[0].lower()
    return name[:-4] if name[:-4] and name.endswith(_PROGRAM_ENDINGS) else name


class WatchedPrograms:
    """The programs that rules deny or ask about.

    It tells quickly that no such rule can be about a command, which is true for most commands.

    :param names: the beginnings of the names of programs in rules
    :param everything: whether a rule denies any program, whatever its name
    """

    __slots__ = ("_everything", "_names")

    def __init__(self, names: Iterable[str], *, everything: bool = False) -> None:
        self._everything = everything
        self._names = tuple(sorted({other for name in names for other in _all_names(name)}))

    def may_text_contain_program(self, text: str, *, certain: bool = True) -> bool:
        """Return whether such a rule may be about a command in this text."""
        if self._everything and certain:
            return True
        if not self._names:
            return False
        # Without quotes, since the shell joins `r'm'` to `rm`; in lower case for file systems that ignore case.
        plain = text.translate(_UNQUOTED).lower()
        return any(name in plain for name in self._names)

    def may_begin_watched_command(self, word: str, *, certain: bool) -> bool:
        """Return whether this word may begin a command that such a rule matches, or that runs one."""
        if self._everything and certain:
            return True
        name = posixpath.basename(word).lower()
        return (
            name.startswith(self._names or ("\0",))
            or name in _RUN_SOMETHING
            or find_nested_command_form(name) is not None
        )


def _all_names(program: str) -> Iterator[str]:
    bare = posixpath.basename(program.rstrip("/")).lower()
    yield bare
    for one, other in command_wrappers.PROGRAM_SYNONYMS:
        if bare in (one[0], other[0]):
            yield from (one[0], other[0])


_RUN_SOMETHING = SHELLS | command_wrappers.WRAPPER_NAMES | {"eval", "trap"}

TOO_MANY_READINGS = PossibleCommand((), certain=False)
"""The marker that not every command was found, because too many words may begin one."""


def find_possible_commands(argv: Sequence[str], watched: WatchedPrograms) -> Iterator[PossibleCommand]:
    """Yield the commands that ``argv`` may run and that ``watched`` may be about, without ``argv`` itself.

    :data:`TOO_MANY_READINGS` comes last if there are more of them than the search examines.
    """
    return _CommandSearch(watched).iterate_possible_commands(tuple(argv))


def find_possible_commands_in_text(text: str, watched: WatchedPrograms, *, fed: bool) -> Iterator[PossibleCommand]:
    """Yield the commands in the text of a script besides those that it plainly runs.

    The values of its variables may be commands, such as ``GIT_SSH_COMMAND``.

    :param fed: a command of the script runs its input, so that any words of the text may be a command
    """
    if not watched.may_text_contain_program(text):
        return
    search = _CommandSearch(watched)
    texts = [text] if fed else [match.group("value").strip("'\"") for match in _ASSIGNED.finditer(text)]
    for one in texts:
        for words in search.split_at_command_boundaries(one):
            for start in range(len(words)) if fed else (0,):
                if watched.may_begin_watched_command(words[start], certain=True):
                    yield PossibleCommand(words[start:])
                    yield from find_possible_commands(words[start:], watched)
    if not search.complete:
        yield TOO_MANY_READINGS


def executes_its_input(argv: Sequence[str], *, is_fed: bool = True) -> bool:
    """Return whether a command runs its input, or the output of another command.

    Examples are ``sh``, ``eval "$(x)"`` and ``$(x) y``.

    :param is_fed: whether its script feeds text to commands
    """
    if not argv:
        return False
    program = program_name(argv)
    if program in ("eval", "source", ".", "at", "batch") or not {"$", "`"}.isdisjoint(argv[0]):
        return True
    if (program in SHELLS or find_nested_command_form(program) is _CODE) and _runs_fed_code(argv):
        return True
    if program in command_wrappers.REMOTE_RUNNERS and len(argv) == 2:
        return True
    if program in command_wrappers.INPUT_RUNNERS and not any(
        _GIVES_WORK.fullmatch(word) or " " in word for word in argv
    ):
        return True
    if not _READS_INPUT.isdisjoint(pairwise(argv)):
        return True
    return _starts_fed_shell(program, argv) or (is_fed and _opens_fed_prompt(program, argv))


def _runs_fed_code(argv: Sequence[str]) -> bool:
    """Return whether an interpreter's code is its input, or the output of another command."""
    if any("$(" in word or "<(" in word or "`" in word for word in argv):
        return True
    return len(argv) == 1 or any(word in ("-", "-s", "/dev/stdin") for word in argv[1:])


def _starts_fed_shell(program: str, argv: Sequence[str]) -> bool:
    """Return whether one of the words is a shell without a script."""
    if program in ("xargs", "parallel") and not SHELLS.isdisjoint(argv):
        return True
    return any(
        posixpath.basename(word) in SHELLS and all(later[:1] == "-" for later in argv[at + 1 :])
        for at, word in enumerate(argv)
    )


def _opens_fed_prompt(program: str, argv: Sequence[str]) -> bool:
    """Return whether a command opens a prompt of an interpreter or of another machine, which runs its input."""
    if program in command_wrappers.DATA_PROGRAMS:
        return False
    form = find_nested_command_form(program)
    for at, word in enumerate(argv[1:], 1):
        if word in command_wrappers.PROMPT_WORDS and (form is None or form.code or word in form.verbs):
            return True
        name, rest = program_name((word,)), argv[at + 1 :]
        if form is None or program == "git":
            continue
        if _is_interpreter(name) and all(later[:1] == "-" for later in rest):
            return True
        if name in command_wrappers.INPUT_RUNNERS and not any(map(_GIVES_WORK.fullmatch, rest)):
            return True
    return program in _CONTAINER_PROGRAMS and any(map(_KEEPS_INPUT.fullmatch, argv))


class _CommandSearch:
    """A search for the commands in an argv, with its remaining budget."""

    __slots__ = ("_texts", "_watched", "complete")

    def __init__(self, watched: WatchedPrograms) -> None:
        self._watched = watched
        self._texts = _MAX_TEXTS
        self.complete = True

    def iterate_possible_commands(self, first: tuple[str, ...]) -> Iterator[PossibleCommand]:
        waiting: list[tuple[tuple[str, ...], int, bool]] = [(first, MAX_DEPTH, True)]
        known = {first: True}
        for words, left, certain in waiting:  # the loop appends to it
            for spelled in _other_command_spellings(words):
                yield PossibleCommand(spelled, certain, words)
            for inner, rest, runs in self._find_inner_commands(words, left):
                sure = runs and certain
                # A command that was only possible is examined again once it is certain, since more rules apply then.
                before = known.get(inner)
                if not inner or not inner[0] or before or before is sure:
                    continue
                # A bound and not an error: the marker at the end makes the caller ask, so that a long command cannot
                # hide one.
                if len(known) >= _MAX_READINGS:
                    self.complete = False
                    break
                known[inner] = sure
                yield PossibleCommand(inner, sure)
                waiting.append((inner, rest, sure))
        if not self.complete:
            yield TOO_MANY_READINGS

    def _find_inner_commands(self, words: tuple[str, ...], left: int) -> Iterator[tuple[tuple[str, ...], int, bool]]:
        """Yield the inner commands of a command, each with its remaining depth and whether it certainly runs."""
        at = command_wrappers.find_wrapped_command_start(words)
        if at is not None:  # every word of the wrapper is understood
            yield words[at:], left, True
            return
        program = program_name(words)
        form = find_nested_command_form(program)
        yield from self._commands_at_known_places(program, form, words, left)
        script = _first_word_after_options(words) if _is_interpreter(program) else None
        if script is not None:
            yield words[script:], left, True
            if words[script - 1] == "-m":
                return  # a module of Python's is the program
        if program == "nix" and "run" in words:
            yield from ((inner, left, True) for inner in _nix_flake_programs(words))
        yield from self._guess_unknown_commands(_words_without_meaning(program, form, words), left)

    def _commands_at_known_places(
        self, program: str, form: NestedCommandForm | None, words: tuple[str, ...], left: int
    ) -> Iterator[tuple[tuple[str, ...], int, bool]]:
        """Yield the commands at the known places of a program."""
        starts, texts = _starts_and_shell_texts(program, form, words)
        for start in starts:
            if self._watched.may_begin_watched_command(words[start], certain=True):
                yield words[start:], left, True
        if not left:
            return
        for text in texts:
            for inner in self._commands_in_shell_text(text, certain=True):
                yield inner, left - 1, True
        if form is not None and form.code:
            for inner in self._commands_in_code(words):
                yield inner, left - 1, True

    def _guess_unknown_commands(self, words: tuple[str, ...], left: int) -> Iterator[tuple[tuple[str, ...], int, bool]]:
        """Yield what an unknown program may run: any suffix of its words, and any text among them."""
        for start in range(1, len(words)):
            word = words[start]
            if self._watched.may_begin_watched_command(word, certain=False):
                yield words[start:], min(left, 1), False
            if left and _NOT_PLAIN.search(word):
                for inner in self._commands_in_shell_text(word, certain=False):
                    yield inner, 0, False

    def _commands_in_shell_text(self, text: str, *, certain: bool) -> Iterator[tuple[str, ...]]:
        """Yield the commands of a text for a shell.

        If the text is not plain, yield everything in it that may be a command.
        """
        if not self._may_read(text, certain=certain):
            return
        script = parse_script(text, _MAX_SIGNS)
        for command in script.commands:
            yield command.argv
            rest = command.argv
            while rest and rest[0].lower() in _LEADS:
                rest = rest[1:]
                yield rest
            if rest is not command.argv:
                for word in filter(_NOT_PLAIN.search, rest):
                    yield from self.split_at_command_boundaries(word)
        cut = any(_CUT.search(one.argv[0]) or any(map(_GLOBS.search, one.source)) for one in script.commands)
        if cut or not script.is_plain:
            yield from self.split_at_command_boundaries(text)

    def _commands_in_code(self, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield commands in code of another language, if the code may start programs."""
        texts = [word for word in words[1:] if _NOT_PLAIN.search(word)]
        if not any(map(_CALLS.search, texts)):
            return
        for word in texts:
            if self._may_read(word, certain=True):
                yield from self.split_at_command_boundaries(_LISTED.sub(" ", word))

    def _may_read(self, text: str, *, certain: bool) -> bool:
        if not self._watched.may_text_contain_program(text, certain=certain):
            return False
        if self._texts == 0:
            self.complete = False
            return False
        self._texts -= 1
        return True

    def split_at_command_boundaries(self, text: str) -> Iterator[tuple[str, ...]]:
        """Yield the pieces between the signs of a text at which a command may begin."""
        pieces = _CUT.split(text)
        if len(pieces) > _MAX_PIECES:
            pieces = [piece for piece in pieces if self._watched.may_text_contain_program(piece)]
            self.complete = self.complete and len(pieces) <= _MAX_PIECES
        for piece in pieces[:_MAX_PIECES]:
            words = piece.split()
            while words and words[0].lower() in _LEADS:
                words.pop(0)
            if words:
                yield tuple(words)


# Other spellings of one command.


def _other_command_spellings(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield other spellings of a command.

    They use the program's bare name, its other names, and no options before the sub-command.
    """
    if not words:
        return
    written = words[0]
    named = {written, posixpath.basename(written), program_name(words)} - {""}
    if "/" in written and written[:1] != "/":
        named.add("./" + posixpath.normpath(written))
    elif "/" not in written and "." in written:
        named.add("./" + written)  # a script for an interpreter
    for program in named:
        if program != written:
            yield (program, *words[1:])
        for rest in _words_without_early_options(program, words):
            yield (program, *rest)
            yield from _subcommand_aliases(program, rest)
        yield from _subcommand_aliases(program, words[1:])
    program = program_name(words)
    if (match := _VERSIONED.fullmatch(program)) is not None:
        yield (match["name"], *words[1:])
        yield from _subcommand_aliases(match["name"], words[1:])
    if program in ("git", "gh", "glab"):
        yield from _commands_of_git_aliases(words)
    head, dash, tail = program.partition("-")
    if dash and head in ("git", "docker", "kubectl", "cargo", "npm"):
        yield (head, tail, *words[1:])


def _words_without_early_options(program: str, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words after the program without options before its sub-command, also one level deeper.

    If it is unknown which option takes the next word as its value, this yields both variants.
    """
    for start in _places_after_options(program, words, 1):
        if start > 1:
            yield words[start:]
        if start + 1 < len(words) and words[start + 1][:1] in ("-", "+"):
            for second in _places_after_options(program, words, start + 1):
                if second > start + 1:
                    yield (words[start], *words[second:])


def _places_after_options(program: str, words: tuple[str, ...], start: int) -> Iterator[int]:
    """Yield the positions where the words after the options may begin.

    :param start: the position of the first option
    """
    with_value = command_wrappers.OPTIONS_WITH_VALUE.get(program)
    places = {start}
    for index in range(start, min(len(words), _MAX_OPTIONS)):
        if index not in places:
            continue
        word = words[index]
        if word[:1] not in ("-", "+") or word in ("-", "+"):
            yield index
        elif word == "--" or (word[:1] == "+" and program not in ("cargo", "rustc", "rustdoc")):
            places.add(index + 1)
        elif with_value is None or start > 1:
            places |= {index + 1} if "=" in word else {index + 1, index + 2}
        else:
            places.add(index + 2 if word in with_value else index + 1)


def _subcommand_aliases(program: str, rest: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the same sub-command by its other names."""
    for one, other in command_wrappers.SUBCOMMAND_SYNONYMS.get(program, ()):
        for have, instead in ((one, other), (other, one)):
            head = tuple(word for word in have if word[:1] != "-")
            flags = {word for word in have if word[:1] == "-"}
            tail = rest[len(head) :]
            if tuple(rest[: len(head)]) == head and flags <= {word.removesuffix("=true") for word in tail}:
                yield (program, *instead, *(word for word in tail if word.removesuffix("=true") not in flags))
    abbreviated = command_wrappers.ABBREVIATED_SUBCOMMANDS.get(program, frozenset[str]()) if rest else frozenset[str]()
    if rest and len(rest[0]) > 2 and rest[0] not in abbreviated:
        yield from ((program, name, *rest[1:]) for name in sorted(abbreviated) if name.startswith(rest[0]))
    for one, other in command_wrappers.PROGRAM_SYNONYMS:
        for have, instead in ((one, other), (other, one)):
            if (program, *rest)[: len(have)] == have:
                yield (*instead, *(program, *rest)[len(have) :])


def _commands_of_git_aliases(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the commands of git aliases in the words: ``git -c alias.x=push x`` is a ``git push``."""
    for index, word in enumerate(words):
        match = _ALIAS.fullmatch(word)
        # An alias with `!` runs a shell text, which is read elsewhere.
        if match is not None and match.group("value")[:1] != "!":
            rest = next(
                (
                    words[at + 1 :]
                    for at in range(index + 1, len(words))
                    if words[at].lower() == match.group("name").lower()
                ),
                (),
            )
            yield ("git", *match.group("value").split(), *rest)


# The positions in a command's words where another command may begin.


def _is_interpreter(program: str) -> bool:
    if program in SHELLS or program in command_wrappers.INTERPRETERS:
        return True
    match = _VERSIONED.fullmatch(program)
    return match is not None and match.group("name") in command_wrappers.INTERPRETERS


def _first_word_after_options(words: tuple[str, ...]) -> int | None:
    """Return the position of the first word after an interpreter's options, or None."""
    return next((index for index, word in enumerate(words) if index and word[:1] not in ("-", "+")), None)


def _words_without_meaning(program: str, form: NestedCommandForm | None, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words about which nothing is known, with the word before them."""
    if form is None or form is _CODE or form.partly_known:
        return () if program in command_wrappers.DATA_PROGRAMS else words
    return words[next((at for at, word in enumerate(words) if at and word in form.built), len(words)) :]


def _starts_and_shell_texts(
    program: str, form: NestedCommandForm | None, words: tuple[str, ...]
) -> tuple[Iterable[int], Iterable[str]]:
    """Return where a command may begin in a program's words, and the texts in them that a shell reads."""
    if program in SHELLS:
        texts = [word for at, word in enumerate(words[1:]) if at > 0 or _NOT_PLAIN.search(word)]
        script = next((index + 2 for index, word in enumerate(words) if _TAKES_SCRIPT.fullmatch(word)), len(words))
        return range(script, len(words)), texts  # the parameters of the script, as for `exec "$@"`
    if program in ("eval", "trap"):
        return (), (" ".join(words[1:]), *words[1:2])
    if form is None:
        return (), ()
    return _possible_command_starts(form, words), find_shell_texts(form, words)


def _possible_command_starts(form: NestedCommandForm, words: tuple[str, ...]) -> Iterator[int]:
    """Yield the positions in a program's words where a command may begin."""
    count = len(words)
    if form.anywhere:
        yield from _starts_after_options(words, 1) if form.first else range(1, count)
        return
    open_ = False
    for index in range(1, count):
        if open_ or _is_option_value(form, words, index):
            yield index
        if not open_ and words[index] in form.verbs:
            if form.first:
                starts = tuple(_starts_after_options(words, index + 1))
                yield from starts
                if not any(words[start] in form.verbs for start in starts):  # as in ``uv tool run``
                    return
            else:
                open_ = True


def _starts_after_options(words: tuple[str, ...], start: int) -> Iterator[int]:
    """Yield the positions after options and ``NAME=VALUE`` words where a command may begin.

    :param start: the position of the first word to consider
    """
    places = {start}
    for index in range(start, len(words)):
        if index not in places:
            continue
        word = words[index]
        if word == "--":
            places.add(index + 1)
        elif word in ("-m", "--module"):
            yield from range(index + 1, min(index + 2, len(words)))
        elif word[:1] in ("-", "+"):
            places |= (
                {index + 1} if "=" in word or word in command_wrappers.VALUELESS_OPTIONS else {index + 1, index + 2}
            )
        else:
            yield index
            if _NAMED_VALUE.match(word):
                places.add(index + 1)


def _nix_flake_programs(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the program of a nix flake: ``nix run nixpkgs#curl -- u`` is a ``curl u``."""
    for index, word in enumerate(words):
        if "#" in word:
            rest = words[index + 1 :]
            yield (word.rpartition("#")[2].rpartition(".")[2], *(rest[1:] if rest[:1] == ("--",) else rest))


def _is_option_value(form: NestedCommandForm, words: Sequence[str], index: int) -> bool:
    """Return whether the word is the value of one of the form's options."""
    return _is_option_with_next_value(form, words[index - 1]) or (index > 1 and words[index - 2] in form.pairs)


def _is_option_with_next_value(form: NestedCommandForm, word: str) -> bool:
    """Return whether the word is an option of the form whose value is the next word."""
    if word[:1] != "-":
        return False
    if word in form.options:
        return True
    if word[:2] != "--":  # a cluster whose last letter takes the value
        return len(word) > 2 and "-" + word[-1] in form.options and word[1:].isalpha()
    return len(word) > 3 and "=" not in word and _is_shortened(form, word)


def _is_shortened(form: NestedCommandForm, name: str) -> bool:
    return any(option.startswith(name) for option in form.options if option[:2] == "--") or name.startswith(
        form.prefixes or ("\0",)
    )


def find_shell_texts(form: NestedCommandForm, words: Sequence[str]) -> Iterator[str]:
    """Yield the texts that a program passes to a shell, or may pass.

    They are values of options, and words that are not plain.
    """
    first = 1 if form.anywhere else len(words)
    last = len(words)
    if form.first:  # the words after the command are its own
        last = max(_possible_command_starts(form, tuple(words)), default=last - 1) + 1
    for index in range(1, last):
        if words[index] in form.verbs:
            first = min(first, index + 1)
        yield from _shell_texts_in_word(form, words, index, behind_command=index >= first)
    rest = words[first:last]
    if len(rest) > 1 and any(_NOT_PLAIN.search(word) for word in rest):
        yield " ".join(rest)


def _shell_texts_in_word(
    form: NestedCommandForm, words: Sequence[str], index: int, *, behind_command: bool
) -> Iterator[str]:
    """Yield the texts in one word. A value, or a word after the command's name, is read as a whole."""
    word = words[index]
    value = _value_attached_to_option(form, word) if word[:1] == "-" else ""
    if value:
        yield value
    if _is_option_value(form, words, index) or (behind_command and _NOT_PLAIN.search(word)):
        yield word
        if form.anywhere and not value and word[:1] == "-" and word[:2] != "--":
            yield word[2:]
    elif not value:
        yield from _shell_text_after_name(form, word)


def _shell_text_after_name(form: NestedCommandForm, word: str) -> Iterator[str]:
    """Yield the text in a word such as ``NAME=TEXT``, ``ext::TEXT`` or ``!TEXT``."""
    if form.assigned and "=" in word:
        yield word.partition("=")[2]
    elif "::" in word or (word[:1] == "!" and not form.anywhere):
        yield word


def _option_values(form: NestedCommandForm, words: Sequence[str]) -> Iterator[str]:
    """Yield the values of the form's options."""
    for option, word in pairwise(words):
        if _is_option_with_next_value(form, option):
            yield word
        elif word[:1] == "-" and (value := _value_attached_to_option(form, word)):
            yield value


def _value_attached_to_option(form: NestedCommandForm, word: str) -> str:
    """Return the value in the same word as its option, or ``""``."""
    name, sign, value = word.partition("=")
    if sign and (name in form.options or (name[:2] == "--" and len(name) > 3 and _is_shortened(form, name))):
        return value
    return "" if word[:2] == "--" else _value_after_option_letters(form, word)


def _value_after_option_letters(form: NestedCommandForm, word: str) -> str:
    """Return the value in ``-ovalue`` or ``-optionvalue``, or ``""``."""
    letters = {option[1] for option in form.options if len(option) == 2}
    at = next((index for index in range(1, len(word)) if word[index] in letters), 0)
    if at and (at == 1 or word[1:at].isalpha()):
        return word[at + 1 :].removeprefix("=")
    for option in form.options:
        if len(option) > 2 and option[:2] != "--" and word.startswith(option):
            return word[len(option) :].lstrip("=:")
    return ""


def explain_inner_command_unparsable(argv: Sequence[str]) -> str | None:
    """Return why a command that the program runs cannot be parsed, as half a sentence, or None.

    This is for programs whose own words are otherwise covered by their rules alone, such as ``ssh`` and ``docker``.
    """
    program = program_name(argv)
    form = find_nested_command_form(program)
    if form is None or (form.anywhere and program not in command_wrappers.REMOTE_RUNNERS) or form.code:
        return None
    shells = list(_shell_commands_in_words(form, argv))
    if any(all(word[:1] == "-" for word in shell[1:]) for shell in shells):
        return f"{program} starts a shell that runs its standard input"
    for text in _texts_that_program_runs(form, argv, shells):
        if " " not in text:
            continue
        script = parse_script(text, _MAX_SIGNS)
        reason = script.unclear
        if not script.is_plain and any(program_name(command.argv) in _RUN_SOMETHING for command in script.commands):
            reason = reason or "the command runs words that the shell expands"
        if reason is not None:
            return f"{program} runs a script that cannot be evaluated: {reason}"
    if program == "ssh" and _has_no_command(argv):
        return "ssh without a command runs its standard input"
    return None


def _texts_that_program_runs(
    form: NestedCommandForm, argv: Sequence[str], shells: Iterable[Sequence[str]]
) -> Iterator[str]:
    """Yield the texts that the program runs: among its words, and in those of the shells that it starts."""
    yield from find_shell_texts(form, argv) if form.anywhere else _option_values(form, argv)
    for shell in shells:
        yield from (text for option, text in pairwise(shell) if _TAKES_SCRIPT.fullmatch(option))


def _shell_commands_in_words(form: NestedCommandForm, argv: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the commands of shells among a program's words.

    The first operand of the program counts only with its absolute path.
    """
    for start in _possible_command_starts(form, tuple(argv)):
        if program_name(argv[start:]) in SHELLS and (start > 1 or argv[start][:1] == "/"):
            yield argv[start:]


_SSH_WITH_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")
_SSH_RUNS_NOTHING = frozenset("NVGQOW")


def _has_no_command(argv: Sequence[str]) -> bool:
    index = 1
    while index < len(argv) and argv[index][:1] == "-" and argv[index] != "--":
        letters = argv[index][1:]
        if not _SSH_RUNS_NOTHING.isdisjoint(letters):
            return False
        at = next((place for place, letter in enumerate(letters) if letter in _SSH_WITH_VALUE), None)
        index += 2 if at is not None and at == len(letters) - 1 else 1
    index += index < len(argv) and argv[index] == "--"
    return index + 1 == len(argv)
