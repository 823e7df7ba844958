"""A parser of shell text: a list of simple commands, or the reason why the text is unclear.

Two independent parsers must agree. One is tree-sitter's grammar for bash, of which only a closed list of node types is
accepted. The other is a small lexer of exactly that subset, which removes the quotes. An unknown construct in either, or a word
that they read differently, makes the whole text unclear. Nothing here runs or expands anything.
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
"""The maximum number of structural characters in a text that is not plain.

The grammar's time grows faster than their number, up to minutes for a text of ``MAX_CHARACTERS``.
"""
MAX_WORDS = 4_000
"""The maximum number of words, operators and line ends in a text that is evaluated."""
_MAX_NODES = 20_000
"""The maximum size of the grammar's tree, which is walked several times."""
_MAX_PARSE_S = 0.015
"""The maximum processor time of the grammar. After an error, it grows with the square of the text's length.

`<a href=` repeated to 8,000 characters took 65 ms. An ordinary script of that length takes 1 ms.
"""
_SHORT = 1_000
"""The number of any characters that the grammar reads within that time."""
_CHUNK = 4_096
"""The number of bytes that the grammar gets at once, also each time that it goes back."""

_SUPPORTED_NODES = frozenset(
    {"program", "list", "pipeline", "command", "command_name", "redirected_statement", "file_redirect", "comment"}
    | {"word", "string", "string_content", "raw_string", "concatenation", "number", "file_descriptor"}
    | {"&&", "||", "|", ";", "\n", '"', ">", ">>", ">|", ">&", "&>", "&>>", "<"}
)
"""The closed list of supported node types. A text with any other type requires approval."""
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
_MAX_RECOVERED = 4 * MAX_COMMANDS
"""The maximum number of commands to recover from an unclear text."""
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
class ShellRedirection:
    """One redirection of a command.

    :param operator: as written, with the number of the descriptor (``2>>``)
    :param target: without quotes: a path, or the number of another descriptor
    :param capability: the access to the file ``target``; None if no file of the user is opened (``/dev/null``, ``2>&1``)
    """

    operator: str
    target: str
    capability: Literal["fs.read", "fs.write"] | None = None

    def __str__(self) -> str:
        return f"{self.operator}{self.target}"


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command: ``argv`` without quotes, and its redirections."""

    argv: tuple[str, ...]
    redirections: tuple[ShellRedirection, ...] = ()
    source: tuple[str, ...] = ()
    """The words as written, quotes and all."""


@dataclass(frozen=True, slots=True)
class ShellScript:
    """A parsed shell text.

    :param commands: every simple command if ``unclear`` is None. Otherwise the commands that could be recovered, which serve to
        find forbidden ones and never to allow anything
    :param unclear: why the text is not understood, as half a sentence; None if all is understood
    """

    commands: tuple[ShellCommand, ...]
    unclear: str | None = None
    files: tuple[ShellRedirection, ...] = ()
    """The redirections that open a file. For an unclear text, those that could be recovered."""


class _UnclearText(Exception):
    """The text is not a plain list of simple commands. This is a condition rather than an error."""


@lru_cache(maxsize=8)
def parse_script(text: str, most_signs: int = MAX_SIGNS) -> ShellScript:
    """Parse ``text`` as a shell would, without running it. Never raises.

    The result is cached, because several steps of one call parse the same text.

    :param most_signs: the maximum number of structural characters in a text that is not plain
    """
    if len(text) > MAX_CHARACTERS:
        return ShellScript((), f"the text has {len(text):,} characters (the maximum is {MAX_CHARACTERS:,})")
    if problem := _explain_misleading_character(text):
        return ShellScript((), problem)
    commands: tuple[ShellCommand, ...] | None = None
    not_plain = ""
    try:
        commands = _lex_commands(text)
    except _UnclearText as unclear:
        not_plain = str(unclear)
        if sum(map(text.count, _SIGNS)) > most_signs:
            return ShellScript((), f"the text has more than {most_signs:,} signs like {_SIGNS[:5]}, and {not_plain}")
    if commands is not None and len(commands) > MAX_COMMANDS:
        count = f"{len(commands)}{' or more' * (len(commands) == _MAX_RECOVERED)}"
        return ShellScript(
            commands, f"the text has {count} commands (the maximum is {MAX_COMMANDS})", _file_redirections(commands)
        )
    raw = text.encode("utf-8")
    root = _parse_syntax_tree(raw if text.isascii() else raw.translate(_STAND_INS))
    if root is None:
        return ShellScript((), "the text takes too long to parse")
    problem = _find_unsupported_construct(root)
    if problem is None:
        if commands is None:
            problem = not_plain
        else:
            problem = _disagreement(root, raw, commands)
            if problem is None:
                return ShellScript(commands, None, _file_redirections(commands))
    commands = _recover_commands(root, raw)
    return ShellScript(commands, problem, _recover_redirections(root, raw, commands))


def _file_redirections(commands: Sequence[ShellCommand]) -> tuple[ShellRedirection, ...]:
    return tuple(r for command in commands for r in command.redirections if r.capability is not None)


def _parse_syntax_tree(raw: bytes) -> Node | None:
    """Return the grammar's tree of a text, or None if parsing takes too long or the tree is too large."""
    with _parser_lock:
        parser = _parser()
        if len(raw) <= _SHORT:
            return parser.parse(raw).root_node
        end = time.thread_time() + _MAX_PARSE_S
        try:
            tree = parser.parse(
                lambda at, _: raw[at : at + _CHUNK], progress_callback=lambda _at, _failed: time.thread_time() > end
            )
        except ValueError:  # the parser was stopped
            parser.reset()
            return None
    return tree.root_node if tree.root_node.descendant_count <= _MAX_NODES else None


_parser_lock = threading.Lock()
"""Lets one text be parsed at a time: watchdogs parse in their own threads, and a parser has one state."""
_STAND_INS = bytes(range(128)) + b"." * 128
"""The table that replaces bytes beyond ASCII before the grammar reads them.

To bash such a character is an ordinary part of a word. The grammar's scanner looks it up in a table of the C library that ends
at 255 (after a ``{``), which crashes the process, and otherwise depends on the locale. Positions stay the same, so words are
taken from the original text.
"""


def _text(node: Node, raw: bytes) -> str:
    """Return the text of a node as written."""
    return raw[node.start_byte : node.end_byte].decode("utf-8", "replace")


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _explain_misleading_character(text: str) -> str | None:
    """Return the problem with a character that misleads the reader, or None."""
    if match := _CONTROL.search(text):
        return f"the text contains the control character U+{ord(match.group()):04X}"
    if not text.isascii():
        for char in text:
            if char > "\x7f" and unicodedata.category(char) in _HIDDEN_CATEGORIES:
                return f"the text contains the invisible or misleading character U+{ord(char):04X}"
    if "\\\n" in text:
        return "the text contains a line continuation (a backslash at the end of a line)"
    return None


# The first parser: tree-sitter.


def _find_unsupported_construct(root: Node) -> str | None:
    """Return the first construct that is not supported, or None."""
    broken = root.has_error
    cursor = root.walk()
    while True:
        node = cursor.node
        kind = node.type if node is not None else ""
        if kind not in _SUPPORTED_NODES and not (broken and kind == "ERROR"):
            construct = _CONSTRUCTS.get(kind) or f"a construct of the kind {kind!r}"
            return f"the text contains {construct}, which is not supported"
        if cursor.goto_first_child() or cursor.goto_next_sibling():
            continue
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return "the text is not valid shell syntax" if broken else None


def _nodes(root: Node, kind: str) -> list[Node]:
    found: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.type == kind:
            found.append(node)
        waiting.extend(reversed(node.named_children))
    return found


def _command_words_as_written(node: Node, raw: bytes, *, literal: bool = True) -> tuple[str, ...]:
    """Return the words of a command node as written.

    :param literal: only words of literal kinds
    """
    words: list[Node] = []
    for child in node.named_children:
        words += child.named_children if child.type == "command_name" else [child]
    return tuple(_text(word, raw) for word in words if word.type in _WORDS or not (literal or word.type in _NO_WORDS))


def _disagreement(root: Node, raw: bytes, commands: tuple[ShellCommand, ...]) -> str | None:
    theirs = [_command_words_as_written(node, raw) for node in _nodes(root, "command")]
    if theirs == [command.source for command in commands] and _parsers_agree_on_redirections(root, raw, commands):
        return None if commands else "the text contains no command"
    return "the words of the text are ambiguous"


def _parsers_agree_on_redirections(root: Node, raw: bytes, commands: tuple[ShellCommand, ...]) -> bool:
    """Return whether both parsers see the same redirections, in the same order."""
    ours = [str(redirection) for command in commands for redirection in command.redirections]
    nodes = _nodes(root, "file_redirect") if ours or b">" in raw or b"<" in raw else []
    return ours == [str(_read_tree_redirection(node, raw)) for node in nodes]


def _read_tree_redirection(node: Node, raw: bytes) -> ShellRedirection:
    """Return a redirection as tree-sitter reads it.

    With more than one destination, the text equals nothing that the lexer reads.
    """
    parts = [(child.type in _WORDS, _text(child, raw)) for child in node.children]
    words = [part for is_word, part in parts if is_word]
    operator = "".join(part for is_word, part in parts if not is_word)
    target = "\0".join(_remove_quotes(word) for word in words)
    return ShellRedirection(operator, target, _capability_of_redirection(operator, target))


def _recover_commands(root: Node, raw: bytes) -> tuple[ShellCommand, ...]:
    """Return everything in the text that looks like a command, with words that are not literal as written."""
    found: list[ShellCommand] = []
    for node in _nodes(root, "command")[:_MAX_RECOVERED]:
        source = _command_words_as_written(node, raw, literal=False)
        found.append(ShellCommand(tuple(_remove_quotes(word) for word in source), (), source))
    return tuple(found)


def _recover_redirections(root: Node, raw: bytes, commands: tuple[ShellCommand, ...]) -> tuple[ShellRedirection, ...]:
    """Return the redirections of an unclear text that plainly name their file."""
    moved = any(command.argv and _may_move(command.argv) for command in commands)
    found = [_read_tree_redirection(node, raw) for node in _nodes(root, "file_redirect")[:MAX_COMMANDS]]
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


# The second parser: a lexer of the subset.


def _lex_commands(text: str) -> tuple[ShellCommand, ...]:
    """Return the commands. If there are too many, return just enough of them to show that.

    :raises _Unclear: for any text that is not plain
    """
    commands: list[ShellCommand] = []
    argv: list[str] = []
    source: list[str] = []
    redirections: list[ShellRedirection] = []
    redirect: str | None = None
    after_operator = moved = False
    position = tokens = 0

    def end_redirection() -> None:
        if redirect is not None:
            raise _UnclearText(f"the redirection {redirect!r} has no target")

    def finish() -> None:
        nonlocal moved
        end_redirection()
        if redirections and not argv:
            raise _UnclearText("the text contains a redirection without a command")
        if argv:
            for redirection in redirections:
                if moved and redirection.capability is not None and redirection.target[:1] != "/":
                    raise _UnclearText(
                        f"the text changes the folder before it redirects to {_short(redirection.target)}, so the file is "
                        "unknown (write its absolute path, or do not change the folder)"
                    )
            moved = moved or _may_move(argv)
            commands.append(ShellCommand(tuple(argv), tuple(redirections), tuple(source)))
            argv.clear()
            source.clear()
            redirections.clear()

    def separate(sign: str) -> None:
        nonlocal after_operator
        empty = not argv and not redirections
        finish()
        if empty and sign != "\n":
            raise _UnclearText(f"the text has no command before {sign!r}")
        after_operator = sign in ("&&", "||", "|") or (after_operator and sign == "\n")

    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _UnclearText(f"the text is not plain at {text[position : position + 20]!r}")
        kind = match.lastgroup
        tokens += kind != "blank"
        if tokens > MAX_WORDS:
            raise _UnclearText(f"the text has more than {MAX_WORDS:,} words")
        if (
            kind == "word" and position > 0 and text[position - 1] not in " \t\n|;&<>"
        ):  # impossible, because a word matches as much as it can
            raise _UnclearText("the words of the text are ambiguous")
        position = match.end()
        lexeme = match.group()
        if kind == "redirect":
            end_redirection()
            redirect = lexeme
        elif kind == "end":
            separate(lexeme)
            if len(commands) == _MAX_RECOVERED:
                return tuple(commands)
        elif kind == "word":
            after_operator = False
            if redirect is not None:
                redirections.append(_redirection(redirect, lexeme))
                redirect = None
                if len(redirections) > MAX_COMMANDS:
                    raise _UnclearText(f"one command has more than {MAX_COMMANDS} redirections")
            else:
                argv.append(_unquote_literal_word(lexeme, first=not argv))
                source.append(lexeme)
    finish()
    if after_operator:
        raise _UnclearText("the text ends with an operator")
    return tuple(commands)


def _unquote_literal_word(word: str, *, first: bool) -> str:
    """Return the word without its quotes.

    :raises _Unclear: if the shell would expand the word
    """
    out: list[str] = []
    for match in _PART.finditer(word):
        kind = match.lastgroup
        text = match.group(kind) if kind else ""
        if len(out) > MAX_WORDS:
            raise _UnclearText(f"one word has more than {MAX_WORDS:,} parts")
        if kind == "bare":
            if not _NOT_LITERAL.isdisjoint(text):
                char = next(c for c in text if c in _NOT_LITERAL)
                raise _UnclearText(
                    f"the word {_short(word)} has an unquoted {char!r}, which the shell may expand (quote it)"
                )
            out.append(text)
        elif kind == "quoted":
            out.append(_QUOTED_ESCAPE.sub(r"\1", text))
        else:
            out.append(text)
    if first and word in _RESERVED:
        raise _UnclearText(f"the text contains the shell keyword {word!r}, which is not supported")
    if first and _ASSIGNMENT.match(word):
        raise _UnclearText("the text contains a variable assignment, which is not supported")
    return "".join(out)


def _remove_quotes(word: str) -> str:
    """Return the word without its quotes, as far as possible."""
    out: list[str] = []
    for match in _PART.finditer(word):
        kind = match.lastgroup
        text: Any = match.group(kind) if kind else ""
        out.append(_QUOTED_ESCAPE.sub(r"\1", text) if kind == "quoted" else text)
    return "".join(out)


def _redirection(operator: str, word: str) -> ShellRedirection:
    sign = operator.lstrip("0123456789")
    if sign == ">&" and word.isascii() and word.isdigit():
        return ShellRedirection(operator, word)
    target = _unquote_literal_word(word, first=False)
    both = sign in ("&>", "&>>", ">&")
    if sign not in _OPENING or (both and operator != sign):
        raise _UnclearText(f"the text redirects with {operator!r}, which is not supported")
    if not target or (sign == ">&" and (target[0].isdigit() or target[0] == "-")):
        raise _UnclearText(f"the text redirects with {operator!r} to {_short(word)}, which is not supported")
    if target.startswith(("/dev/tcp/", "/dev/udp/")):
        raise _UnclearText(f"the text redirects to {_short(target)}, which the shell opens as a network connection")
    if target == "/dev/stdin" or target.startswith("/dev/fd/"):
        raise _UnclearText(f"the text redirects to {_short(target)}, which the shell opens as a descriptor")
    return ShellRedirection(operator, target, _capability_of_redirection(operator, target))


def _capability_of_redirection(operator: str, target: str) -> Literal["fs.read", "fs.write"] | None:
    """Return the access of a redirection to the file that it names."""
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

SHELL_WORDS = frozenset(
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
"""Builtins and keywords of bash. They are no programs, or differ from the programs of the same name."""


def argv_of_single_program(script: ShellScript) -> tuple[str, ...] | None:
    """Return the argv of a script that is one program with literal arguments; None if it needs a shell."""
    if script.unclear is not None or len(script.commands) != 1:
        return None
    (command,) = script.commands
    if command.redirections or command.argv[0] in SHELL_WORDS:
        return None
    return command.argv


@lru_cache(maxsize=64)
def argv_of_single_program_text(text: str) -> tuple[str, ...] | None:
    """Return :func:`argv_of_single_program` of a text."""
    return argv_of_single_program(parse_script(text))
