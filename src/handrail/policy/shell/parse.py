"""A parser of shell text: a list of simple commands, or the reason why the text is unclear.

Two independent readers must agree: tree-sitter's grammar for bash, of which only a closed list of node types is
accepted, and a small lexer of exactly that subset, which removes the quotes. An unknown construct in either, or a word that
they read differently, makes the whole text unclear. Nothing here runs or expands anything.
"""

from __future__ import annotations

import re
import threading
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tree_sitter import Node, Parser


MAX_CHARACTERS = 64 * 1024
MAX_COMMANDS = 50
MAX_SIGNS = 1_000
"""The most of the characters that structure is made of in a text that is not plain: what the grammar makes of them takes
it more than their number of steps, up to minutes for a text of this length."""
MAX_WORDS = 4_000
"""Words, operators and line ends of a text that is judged, all together."""
_MAX_NODES = 20_000
"""Of the tree that the grammar makes, which is walked several times."""
_MAX_PARSE_S = 0.015
"""Processor time of the grammar, which after an error grows with the square of the text: `<a href=` repeated to 8,000
characters took 65 ms, an ordinary script of that length takes 1 ms."""
_SHORT = 1_000
"""Characters that the grammar reads within that time whatever they are."""
_CHUNK = 4_096
"""Bytes that the grammar is given at once, each time that it goes back."""

_UNDERSTOOD = frozenset(
    {"program", "list", "pipeline", "command", "command_name", "redirected_statement", "file_redirect", "comment"}
    | {"word", "string", "string_content", "raw_string", "concatenation", "number", "file_descriptor"}
    | {"&&", "||", "|", ";", "\n", '"', ">", ">>", ">|", ">&", "&>", "&>>", "<"}
)
"""The closed list of node types; every other one is asked about until it is understood and tested."""
_WORDS = frozenset({"word", "string", "raw_string", "concatenation", "number"})
_NO_WORDS = frozenset({"variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect", "comment"})
_CONSTRUCTS = {
    "command_substitution": "a command substitution",
    "process_substitution": "a process substitution",
    "simple_expansion": "a variable expansion",
    "expansion": "a variable expansion",
    "arithmetic_expansion": "an arithmetic expansion",
    "ansi_c_string": "a $'…' string",
    "translated_string": 'a $"…" string',
    "$": "a '$'",
    "brace_expression": "a brace expansion",
    "subshell": "a subshell",
    "(": "a subshell",
    "compound_statement": "a group of commands in braces",
    "function_definition": "a function definition",
    "heredoc_redirect": "a here-document",
    "herestring_redirect": "a here-string",
    "variable_assignment": "a variable assignment",
    "variable_assignments": "a variable assignment",
    "declaration_command": "a declaration",
    "unset_command": "an unset",
    "negated_command": "a '!'",
    "test_command": "a [ … ] test",
    "if_statement": "an if",
    "while_statement": "a loop",
    "for_statement": "a loop",
    "c_style_for_statement": "a loop",
    "case_statement": "a case",
    "&": "a command in the background ('&')",
    "|&": "a '|&' pipe",
    ";;": "a ';;'",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"})
_RESERVED = frozenset(
    {"!", "{", "}", "[", "[[", "]]", "case", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in"}
    | {"select", "then", "until", "while"}
)
_NOT_LITERAL = frozenset("*?[]~{}")
_SIGNS = "|&;<>()[]{}$`"
_MOST_MADE_OUT = 4 * MAX_COMMANDS
"""Commands that are looked for in a text of which nothing is allowed."""
_OPENING = frozenset({">", ">>", ">|", "<", "&>", "&>>", ">&"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[.*\])?\+?=", re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+)
      |(?P<redirect>[0-9]*(?:>>|>&|>\||<&|<>|<|>)|&>>|&>)
      |(?P<end>&&|\|\||\||;|\n)
      |(?P<comment>\#[^\n]*)
      |(?P<word>(?:[^\s'"\\|&;()<>`$]|\\[^\n]|'[^']*'|"(?:[^"\\$`]|\\[^\n])*")+)""",
    re.VERBOSE,
)
_PART = re.compile(r"""\\(?P<escaped>.)|'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^'"\\]+)""", re.DOTALL)
_QUOTED_ESCAPE = re.compile(r'\\([\\"$`])')


@dataclass(frozen=True, slots=True)
class Redirection:
    """One redirection of a command.

    :param operator: as written, with the descriptor's number (``2>>``)
    :param target: without quotes: a path, or the number of another descriptor
    :param capability: what it does to the file ``target``; None where it opens none of anybody's (``/dev/null``, ``2>&1``)
    """

    operator: str
    target: str
    capability: Literal["fs.read", "fs.write"] | None = None

    def __str__(self) -> str:
        return f"{self.operator}{self.target}"


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command: ``argv`` without quotes, and its redirections."""

    argv: tuple[str, ...]
    redirections: tuple[Redirection, ...] = ()
    source: tuple[str, ...] = ()
    """The words as written, quotes and all."""


@dataclass(frozen=True, slots=True)
class Script:
    """A shell text, read.

    :param commands: every simple command there is, when ``unclear`` is None; otherwise only what could be made
        out, good for finding something forbidden and never for allowing anything
    :param unclear: what could not be read or is not judged, as half a sentence; None when all is understood
    """

    commands: tuple[Command, ...]
    unclear: str | None = None
    files: tuple[Redirection, ...] = ()
    """The redirections that open a file; of a text that is unclear, what could be made out."""


class _Unclear(Exception):
    """A condition rather than an error: this text is not plain."""


@lru_cache(maxsize=8)
def parse(text: str, most_signs: int = MAX_SIGNS) -> Script:
    """Read ``text`` as a shell would, without running it. Never raises. A call is judged in several steps, each of which
    reads its text."""
    if len(text) > MAX_CHARACTERS:
        return Script((), f"it is {len(text):,} characters long (at most {MAX_CHARACTERS:,} are judged)")
    if problem := _hidden(text):
        return Script((), problem)
    commands: tuple[Command, ...] | None = None
    not_plain = ""
    try:
        commands = _lexed(text)
    except _Unclear as unclear:
        not_plain = str(unclear)
        if sum(map(text.count, _SIGNS)) > most_signs:
            return Script((), f"it has more than {most_signs:,} signs like {_SIGNS[:5]} in it, and {not_plain}")
    if commands is not None and len(commands) > MAX_COMMANDS:
        count = f"{len(commands)}{' or more' * (len(commands) == _MOST_MADE_OUT)}"
        return Script(commands, f"it has {count} commands (at most {MAX_COMMANDS} are judged)", _opened(commands))
    raw = text.encode("utf-8")
    root = _tree(raw if text.isascii() else raw.translate(_STAND_INS))
    if root is None:
        return Script((), "it takes too long to be read")
    problem = _outside_the_list(root)
    if problem is None:
        if commands is None:
            problem = not_plain
        else:
            problem = _disagreement(root, raw, commands)
            if problem is None:
                return Script(commands, None, _opened(commands))
    commands = _made_out(root, raw)
    return Script(commands, problem, _files_made_out(root, raw, commands))


def _opened(commands: Sequence[Command]) -> tuple[Redirection, ...]:
    return tuple(r for command in commands for r in command.redirections if r.capability is not None)


def _tree(raw: bytes) -> Node | None:
    """The grammar's tree of a text; None if making it takes too long, or it is too large."""
    with _reading:
        parser = _parser()
        if len(raw) <= _SHORT:
            return parser.parse(raw).root_node
        end = time.thread_time() + _MAX_PARSE_S
        try:
            tree = parser.parse(
                lambda at, _: raw[at : at + _CHUNK], progress_callback=lambda _at, _failed: time.thread_time() > end
            )
        except ValueError:  # how it says that it was ended
            parser.reset()
            return None
    return tree.root_node if tree.root_node.descendant_count <= _MAX_NODES else None


_reading = threading.Lock()
"""One text at a time: watchdogs read on threads of their own, and a parser has one state."""
_STAND_INS = bytes(range(128)) + b"." * 128
"""What the grammar is shown of a character beyond ASCII. To bash it is a part of a word like any other; the grammar's
scanner looks it up in a table of the C library that ends at 255 (after a ``{``), which ends the process, and takes what
it does with the others from the locale. What a word is, is read from the text itself: the places are the same."""


def _text(node: Node, raw: bytes) -> str:
    """A node as it was written."""
    return raw[node.start_byte : node.end_byte].decode("utf-8", "replace")


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _hidden(text: str) -> str | None:
    """Characters that show one thing and do another."""
    if match := _CONTROL.search(text):
        return f"it has the control character U+{ord(match.group()):04X} in it"
    if not text.isascii():
        for char in text:
            if char > "\x7f" and unicodedata.category(char) in _HIDDEN_CATEGORIES:
                return f"it has the invisible or misleading character U+{ord(char):04X} in it"
    if "\\\n" in text:
        return "it has a line continuation (a backslash at a line's end)"
    return None


# The first reader: tree-sitter.


def _outside_the_list(root: Node) -> str | None:
    """The first construct that is not understood, or None."""
    broken = root.has_error
    cursor = root.walk()
    while True:
        node = cursor.node
        kind = node.type if node is not None else ""
        if kind not in _UNDERSTOOD and not (broken and kind == "ERROR"):
            construct = _CONSTRUCTS.get(kind) or f"a construct of the kind {kind!r}"
            return f"it has {construct}, which is not judged"
        if cursor.goto_first_child() or cursor.goto_next_sibling():
            continue
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return "it is not understood as shell syntax" if broken else None


def _nodes(root: Node, kind: str) -> list[Node]:
    found: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.type == kind:
            found.append(node)
        waiting.extend(reversed(node.named_children))
    return found


def _source(node: Node, raw: bytes, *, literal: bool = True) -> tuple[str, ...]:
    """The words of a command node, as written; also those that are not literal if asked for."""
    words: list[Node] = []
    for child in node.named_children:
        words += child.named_children if child.type == "command_name" else [child]
    return tuple(_text(word, raw) for word in words if word.type in _WORDS or not (literal or word.type in _NO_WORDS))


def _disagreement(root: Node, raw: bytes, commands: tuple[Command, ...]) -> str | None:
    theirs = [_source(node, raw) for node in _nodes(root, "command")]
    if theirs == [command.source for command in commands] and _agrees_on_files(root, raw, commands):
        return None if commands else "it holds no command"
    return "its words can be read in more than one way"


def _agrees_on_files(root: Node, raw: bytes, commands: tuple[Command, ...]) -> bool:
    """Whether both readers see the same redirections, in the same order."""
    ours = [str(redirection) for command in commands for redirection in command.redirections]
    nodes = _nodes(root, "file_redirect") if ours or b">" in raw or b"<" in raw else []
    return ours == [str(_redirect_of(node, raw)) for node in nodes]


def _redirect_of(node: Node, raw: bytes) -> Redirection:
    """As tree-sitter reads it. More than one destination leaves a text that equals nothing the lexer reads."""
    parts = [(child.type in _WORDS, _text(child, raw)) for child in node.children]
    words = [part for is_word, part in parts if is_word]
    operator = "".join(part for is_word, part in parts if not is_word)
    target = "\0".join(_dequoted(word) for word in words)
    return Redirection(operator, target, _opens(operator, target))


def _made_out(root: Node, raw: bytes) -> tuple[Command, ...]:
    """Whatever looks like a command anywhere in the text, words that are not literal left as written."""
    found: list[Command] = []
    for node in _nodes(root, "command")[:_MOST_MADE_OUT]:
        source = _source(node, raw, literal=False)
        found.append(Command(tuple(_dequoted(word) for word in source), (), source))
    return tuple(found)


def _files_made_out(root: Node, raw: bytes, commands: tuple[Command, ...]) -> tuple[Redirection, ...]:
    """The files that redirections plainly name, as far as it is known which they are."""
    moved = any(command.argv and _may_move(command.argv) for command in commands)
    found = [_redirect_of(node, raw) for node in _nodes(root, "file_redirect")[:MAX_COMMANDS]]
    return tuple(
        redirection
        for redirection in found
        if redirection.capability is not None
        and redirection.operator.lstrip("0123456789") in _OPENING
        and redirection.target
        and redirection.target.isprintable()
        and _NOT_LITERAL.isdisjoint(redirection.target)
        and not {"$", "`", "("} & set(redirection.target)
        and (redirection.target[:1] == "/" or not moved)
    )


# The second reader: a lexer of the subset.


def _lexed(text: str) -> tuple[Command, ...]:
    """The commands, of more than are judged only so many that this is seen.

    :raises _Unclear: for anything that is not plain
    """
    commands: list[Command] = []
    argv: list[str] = []
    source: list[str] = []
    redirections: list[Redirection] = []
    redirect: str | None = None
    after_operator = moved = False
    position = tokens = 0

    def end_redirection() -> None:
        if redirect is not None:
            raise _Unclear(f"the redirection {redirect!r} goes nowhere")

    def finish() -> None:
        nonlocal moved
        end_redirection()
        if redirections and not argv:
            raise _Unclear("it has a redirection without a command")
        if argv:
            for redirection in redirections:
                if moved and redirection.capability is not None and redirection.target[:1] != "/":
                    raise _Unclear(
                        f"it changes the folder before it redirects to {_short(redirection.target)}, so the file is not known; "
                        "name it by its whole path, or change no folder"
                    )
            moved = moved or _may_move(argv)
            commands.append(Command(tuple(argv), tuple(redirections), tuple(source)))
            argv.clear()
            source.clear()
            redirections.clear()

    def separate(sign: str) -> None:
        nonlocal after_operator
        empty = not argv and not redirections
        finish()
        if empty and sign != "\n":
            raise _Unclear(f"there is no command before {sign!r}")
        after_operator = sign in ("&&", "||", "|") or (after_operator and sign == "\n")

    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _Unclear(f"it is not plain at {text[position : position + 20]!r}")
        kind = match.lastgroup
        tokens += kind != "blank"
        if tokens > MAX_WORDS:
            raise _Unclear(f"it has more than {MAX_WORDS:,} words")
        if (
            kind == "word" and position > 0 and text[position - 1] not in " \t\n|;&<>"
        ):  # cannot be: a word takes all it can
            raise _Unclear("its words can be read in more than one way")
        position = match.end()
        lexeme = match.group()
        if kind == "redirect":
            end_redirection()
            redirect = lexeme
        elif kind == "end":
            separate(lexeme)
            if len(commands) == _MOST_MADE_OUT:
                return tuple(commands)
        elif kind == "word":
            after_operator = False
            if redirect is not None:
                redirections.append(_redirection(redirect, lexeme))
                redirect = None
                if len(redirections) > MAX_COMMANDS:
                    raise _Unclear(f"it redirects more than {MAX_COMMANDS} times in one command")
            else:
                argv.append(_literal(lexeme, first=not argv))
                source.append(lexeme)
    finish()
    if after_operator:
        raise _Unclear("it ends in an operator")
    return tuple(commands)


def _literal(word: str, *, first: bool) -> str:
    """The word without its quotes; refused where the shell would make something else of it."""
    out: list[str] = []
    for match in _PART.finditer(word):
        kind = match.lastgroup
        text = match.group(kind) if kind else ""
        if len(out) > MAX_WORDS:
            raise _Unclear(f"it has a word of more than {MAX_WORDS:,} parts")
        if kind == "bare":
            if not _NOT_LITERAL.isdisjoint(text):
                char = next(c for c in text if c in _NOT_LITERAL)
                raise _Unclear(
                    f"the word {_short(word)} has an unquoted {char!r}, which the shell may expand; quote it"
                )
            out.append(text)
        elif kind == "quoted":
            out.append(_QUOTED_ESCAPE.sub(r"\1", text))
        else:
            out.append(text)
    if first and word in _RESERVED:
        raise _Unclear(f"it has the shell's own word {word!r}, which is not judged")
    if first and _ASSIGNMENT.match(word):
        raise _Unclear("it has a variable assignment, which is not judged")
    return "".join(out)


def _dequoted(word: str) -> str:
    """The word without its quotes, as far as that can be said."""
    out: list[str] = []
    for match in _PART.finditer(word):
        kind = match.lastgroup
        text: Any = match.group(kind) if kind else ""
        out.append(_QUOTED_ESCAPE.sub(r"\1", text) if kind == "quoted" else text)
    return "".join(out)


def _redirection(operator: str, word: str) -> Redirection:
    sign = operator.lstrip("0123456789")
    if sign == ">&" and word.isascii() and word.isdigit():
        return Redirection(operator, word)
    target = _literal(word, first=False)
    both = sign in ("&>", "&>>", ">&")
    if sign not in _OPENING or (both and operator != sign):
        raise _Unclear(f"it redirects with {operator!r}, which is not judged")
    if not target or (sign == ">&" and (target[0].isdigit() or target[0] == "-")):
        raise _Unclear(f"it redirects with {operator!r} to {_short(word)}, which is not judged")
    if target.startswith(("/dev/tcp/", "/dev/udp/")):
        raise _Unclear(f"it redirects to {_short(target)}, which the shell takes for a network connection")
    if target == "/dev/stdin" or target.startswith("/dev/fd/"):
        raise _Unclear(f"it redirects to {_short(target)}, which the shell takes for an open descriptor")
    return Redirection(operator, target, _opens(operator, target))


def _opens(operator: str, target: str) -> Literal["fs.read", "fs.write"] | None:
    """What a redirection does to the file it names."""
    if target in ("/dev/null", "/dev/stdout", "/dev/stderr"):
        return None
    if operator.endswith(">&") and target.isascii() and target.isdigit():
        return None
    return "fs.read" if operator.lstrip("0123456789") == "<" else "fs.write"


_MOVES = frozenset({"cd", "pushd", "popd", "source", ".", "eval"})
"""Builtins after which a relative path may name another file."""


def _may_move(argv: Sequence[str]) -> bool:
    return argv[0] in _MOVES or (argv[0] in ("command", "builtin", "time") and not _MOVES.isdisjoint(argv))


def _short(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:60] + "…")


# Texts that need no shell: one program with literal arguments, which the kernel runs directly.

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
