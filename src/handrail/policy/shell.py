"""Shell text as a list of simple commands, or the reason why it cannot be read as one.

Two independent readers must agree: tree-sitter's grammar for bash, of whose node types only a closed list is
understood, and a small lexer of exactly that subset, which removes the quotes. What either does not know, and
any word they read differently, makes the whole text unclear. Nothing here runs or expands anything.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MAX_CHARACTERS = 64 * 1024
MAX_COMMANDS = 50

_UNDERSTOOD = frozenset(
    {"program", "list", "pipeline", "command", "command_name", "redirected_statement", "file_redirect", "comment"}
    | {"word", "string", "string_content", "raw_string", "concatenation", "number", "file_descriptor"}
    | {"&&", "||", "|", ";", "\n", '"', ">", ">>", ">&", "&>", "&>>", "<"}
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
class Command:
    """One simple command: ``argv`` without quotes, and the redirections as written (``2>&1``, ``>/dev/null``)."""

    argv: tuple[str, ...]
    redirections: tuple[str, ...] = ()
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


class _Unclear(Exception):
    """A condition rather than an error: this text is not plain."""


def parse(text: str) -> Script:
    """Read ``text`` as a shell would, without running it. Never raises."""
    if len(text) > MAX_CHARACTERS:
        return Script((), f"it is {len(text):,} characters long (at most {MAX_CHARACTERS:,} are judged)")
    if problem := _hidden(text):
        return Script((), problem)
    root = _parser().parse(text.encode("utf-8")).root_node
    problem = _outside_the_list(root)
    if problem is None:
        try:
            commands = _lexed(text)
        except _Unclear as unclear:
            problem = str(unclear)
        else:
            problem = _disagreement(root, commands)
            if problem is None:
                return Script(commands)
    return Script(_made_out(root), problem)


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


# ── the first reader: tree-sitter ────────────────────────────────────────────────────────────────


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


def _source(node: Node, *, literal: bool = True) -> tuple[str, ...]:
    """The words of a command node, as written; also those that are not literal if asked for."""
    words: list[Node] = []
    for child in node.named_children:
        words += child.named_children if child.type == "command_name" else [child]
    return tuple(
        (word.text or b"").decode("utf-8", "replace")
        for word in words
        if word.type in _WORDS or not (literal or word.type in _NO_WORDS)
    )


def _disagreement(root: Node, commands: tuple[Command, ...]) -> str | None:
    theirs = [_source(node) for node in _nodes(root, "command")]
    if theirs == [command.source for command in commands]:
        if len(commands) > MAX_COMMANDS:
            return f"it has {len(commands)} commands (at most {MAX_COMMANDS} are judged)"
        return None if commands else "it holds no command"
    return "its words can be read in more than one way"


def _made_out(root: Node) -> tuple[Command, ...]:
    """Whatever looks like a command anywhere in the text, words that are not literal left as written."""
    found: list[Command] = []
    for node in _nodes(root, "command")[: 4 * MAX_COMMANDS]:
        source = _source(node, literal=False)
        found.append(Command(tuple(_dequoted(word) for word in source), (), source))
    return tuple(found)


# ── the second reader: a lexer of the subset ─────────────────────────────────────────────────────


def _lexed(text: str) -> tuple[Command, ...]:
    """:raises _Unclear: for anything that is not plain"""
    commands: list[Command] = []
    argv: list[str] = []
    source: list[str] = []
    redirections: list[str] = []
    redirect: str | None = None
    after_operator = False
    position = 0

    def finish() -> None:
        if redirect is not None:
            raise _Unclear(f"the redirection {redirect!r} goes nowhere")
        if redirections and not argv:
            raise _Unclear("it has a redirection without a command")
        if argv:
            commands.append(Command(tuple(argv), tuple(redirections), tuple(source)))
            argv.clear()
            source.clear()
            redirections.clear()

    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _Unclear(f"it is not plain at {text[position : position + 20]!r}")
        glued = match.lastgroup == "word" and position > 0 and text[position - 1] not in " \t\n|;&<>"
        position = match.end()
        lexeme = match.group()
        kind = match.lastgroup
        if kind == "word" and glued:  # cannot be: a word takes all it can
            raise _Unclear("its words can be read in more than one way")
        if kind == "redirect":
            if redirect is not None:
                raise _Unclear(f"the redirection {redirect!r} goes nowhere")
            redirect = lexeme
        elif kind == "end":
            empty = not argv and not redirections
            finish()
            if empty and lexeme != "\n":
                raise _Unclear(f"there is no command before {lexeme!r}")
            after_operator = lexeme in ("&&", "||", "|") or (after_operator and lexeme == "\n")
        elif kind == "word":
            after_operator = False
            if redirect is not None:
                redirections.append(_redirection(redirect, lexeme))
                redirect = None
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


def _redirection(operator: str, target: str) -> str:
    sign = operator.lstrip("0123456789")
    if sign == ">&" and target.isascii() and target.isdigit():
        return operator + target
    if sign in (">", ">>", "<", "&>", "&>>", ">&") and target == "/dev/null":
        return operator + target
    raise _Unclear(f"it redirects with {operator!r} to {_short(target)}; only /dev/null and N>&M are judged")


def _short(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:60] + "…")
