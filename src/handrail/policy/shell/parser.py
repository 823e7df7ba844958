"""A parser of shell text: a list of simple commands, or the reason why the text is unclear.

Two independent parsers must agree. One is tree-sitter's grammar for bash, of which only a closed list of node types is
accepted. For a text of plain words, one regular expression stands for it, because the grammar takes longer than all rules. The
other is :mod:`handrail.policy.shell.reader`, which reads exactly that subset and removes the quotes. An unknown
construct in either, or a word that they read differently, makes the whole text unclear. Nothing here runs or expands anything.
"""

from __future__ import annotations

import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING

from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import reader
from handrail.policy.shell.command_wrappers import (
    HARMLESS_VARIABLES,
    explain_variable_risk,
    is_harmless_variable,
    split_wrapper_layers,
)
from handrail.policy.shell.reader import MAX_COMMANDS, MOVES, UnclearSyntax, read_text
from handrail.policy.shell.simple_commands import (
    ShellCommand,
    ShellRedirection,
    get_redirection_capability,
    remove_quotes,
)

if TYPE_CHECKING:
    from tree_sitter import Node, Parser


MAX_CHARACTERS = 64 * 1024
MAX_SIGNS = 1_000
"""The maximum number of structural characters in a text that is not plain.

The grammar's time grows faster than their number, up to minutes for a text of ``MAX_CHARACTERS``.
"""
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
    | {"&&", "||", "|", ";", "\n", '"', ">", ">>", ">|", ">&", "&>", "&>>", "<", "&", "|&", "!", "$"}
    | {"simple_expansion", "expansion", "variable_name", "special_variable_name", "command_substitution", "regex"}
    | {"$(", "(", ")", "{", "}", "${", "#", "##", "%", "%%", ":-", ":+", "-", "+", "..", "brace_expression", "subshell"}
    | {"compound_statement", "negated_command", "if_statement", "elif_clause", "else_clause", "while_statement", "for_statement"}
    | {"do_group", "if", "then", "elif", "else", "fi", "while", "until", "for", "in", "do", "done", "variable_assignment"}
    | {"variable_assignments", "=", "+=", "declaration_command", "export", "heredoc_redirect", "heredoc_start", "heredoc_body"}
    | {"heredoc_content", "heredoc_end", "<<", "<<-", "herestring_redirect", "<<<", "test_command", "extglob_pattern"}
)  # fmt: skip
"""The closed list of supported node types. A text with any other type requires approval."""
_WORDS = frozenset(
    {"word", "string", "raw_string", "concatenation", "number", "simple_expansion", "expansion", "command_substitution"}
    | {"brace_expression"}
)
_NO_WORDS = frozenset({"variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect", "comment"})
_CONSTRUCTS = {
    "process_substitution": "a process substitution",
    "arithmetic_expansion": "an arithmetic expansion",
    "ansi_c_string": "a $'…' string",
    "translated_string": 'a $"…" string',
    "function_definition": "a function definition",
    "unset_command": "an unset",
    "declare": "a declaration",
    "typeset": "a declaration",
    "local": "a declaration",
    "readonly": "a declaration",
    "array": "an assignment of a list",
    "subscript": "an assignment to an element of a list",
    "c_style_for_statement": "a loop",
    "case_statement": "a case",
    ";;": "a ';;'",
}
_UNNAMED = "a construct of the kind"
_CONTROL = compile_regex_lazily(r"[\x00-\x08\x0b-\x1f\x7f]")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"})
_NOT_LITERAL = frozenset("*?[]~{}")
_SIGNS = "|&;<>()[]{}$`"
_MAX_RECOVERED = reader.MAX_READ
"""The maximum number of commands to recover from an unclear text."""


class ShellScript(Struct, frozen=True):
    """A parsed shell text.

    :param commands: every simple command if ``unclear`` is None. Otherwise the commands that could be recovered, which serve to
        find forbidden ones and never to allow anything
    :param unclear: why the text is not understood, as half a sentence; None if all is understood
    """

    commands: tuple[ShellCommand, ...]
    unclear: str | None = None
    files: tuple[ShellRedirection, ...] = ()
    """The redirections that open a file. For an unclear text, those that could be recovered."""
    is_plain: bool = True
    """Whether the text is a list of simple commands with literal words, without variables, loops and other structure."""


@lru_cache(maxsize=8)
def parse_script(text: str, most_signs: int = MAX_SIGNS) -> ShellScript:
    """Parse ``text`` as a shell would, without running it. Never raises.

    The result is cached, because several steps of one call parse the same text.

    :param most_signs: the maximum number of structural characters in a text that is not plain
    """
    if len(text) > MAX_CHARACTERS:
        return ShellScript(
            (), f"the command has {len(text):,} characters (the maximum is {MAX_CHARACTERS:,})", is_plain=False
        )
    if problem := _explain_misleading_character(text):
        return ShellScript((), problem, is_plain=False)
    read: reader.ParsedShellText | None = None
    not_plain = ""
    try:
        read = read_text(text)
    except UnclearSyntax as unclear:
        not_plain = str(unclear)
    if read is not None and (reason := _explain_export_risk(read.commands)) is not None:
        read, not_plain = None, reason
    if (read is None or not read.is_plain) and sum(map(text.count, _SIGNS)) > most_signs:
        not_plain = not_plain or "its structure is not simple"
        return ShellScript(
            (), f"the command has more than {most_signs:,} signs like {_SIGNS[:5]}, and {not_plain}", is_plain=False
        )
    if read is not None and len(read.commands) > MAX_COMMANDS:
        count = f"{len(read.commands)}{' or more' * (len(read.commands) == _MAX_RECOVERED)}"
        return ShellScript(
            read.commands,
            f"the command line has {count} commands (the maximum is {MAX_COMMANDS})",
            read.files,
            is_plain=False,
        )
    if read is not None and read.is_plain and read.commands and _list_plain_parts(text) == read.parts:
        return ShellScript(read.commands, None, read.files, read.is_plain)
    raw = text.encode("utf-8")
    root = _parse_syntax_tree(raw if text.isascii() else raw.translate(_STAND_INS))
    if root is None:
        return ShellScript((), "the command takes too long to parse", is_plain=False)
    problem = _find_unsupported_construct(root)
    if problem is not None and read is None and _UNNAMED in problem:
        problem = not_plain
    if problem is None:
        if read is None:
            problem = not_plain
        else:
            problem = _disagreement(root, raw, read)
            if problem is None:
                return ShellScript(read.commands, None, read.files, read.is_plain)
    commands = _recover_commands(root, raw)
    return ShellScript(commands, problem, _recover_redirections(root, raw, commands), is_plain=False)


def _explain_export_risk(commands: Sequence[ShellCommand]) -> str | None:
    """Return why a program of a text may run something else with a variable that the text exports, or None."""
    exports = [split_wrapper_layers(command.argv)[-1] for command in commands if "export" in command.argv]
    names = sorted(
        name
        for argv in exports
        if argv[0] == "export"
        for word in argv[1:]
        if (name := word.partition("=")[0]).isidentifier() and HARMLESS_VARIABLES.fullmatch(name) is None
    )
    if not names:
        return None
    # For variables outside the tables, the answer depends on the program alone, so the check of one of them is enough.
    name = next((name for name in names if not is_harmless_variable(name)), names[0])
    found = (explain_variable_risk(name, command.argv) for command in commands)
    return next((reason for reason in found if reason is not None), None)


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
        return f"the command contains the control character U+{ord(match.group()):04X}"
    if not text.isascii():
        for char in text:
            if char > "\x7f" and unicodedata.category(char) in _HIDDEN_CATEGORIES:
                return f"the command contains the invisible or misleading character U+{ord(char):04X}"
    return None


# The first parser for texts of plain words: one regular expression.

_MAX_PLAIN = 2_000
_SAFE_WORD = r"""(?:[A-Za-z0-9_./:@%+,=-]++|'[^'\n]*+'|"[^"$`\\!\n]*+")++"""
_TOKEN = rf"(?:&&|\|\||[;|]|(?:2>&1|[12]?>/dev/null)(?![^ ;|&])|{_SAFE_WORD})"
_PLAIN_TEXT = compile_regex_lazily(rf"(?: *+{_TOKEN})++ *+", re.ASCII)
_PLAIN_TOKENS = compile_regex_lazily(rf"({_TOKEN})", re.ASCII)
_OPERATORS = frozenset({"&&", "||", ";", "|"})
_PLAIN_REDIRECTIONS = frozenset({"2>&1", ">/dev/null", "1>/dev/null", "2>/dev/null"})


def _list_plain_parts(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Return the parts of a text of plain words as the reader names them; None for any other text.

    A word has only characters that no shell expands or splits, or quotes without expansions in them. A command begins with the
    name of a program, or of a builtin that takes its words as a program does.
    """
    if len(text) > _MAX_PLAIN or not text.isascii() or _PLAIN_TEXT.fullmatch(text) is None:
        return None
    parts: list[list[str]] = []
    command: list[str] | None = None
    redirected = False
    for token in _PLAIN_TOKENS.findall(text):
        if token in _OPERATORS:
            if command is None:
                return None
            command, redirected = None, False
        elif token in _PLAIN_REDIRECTIONS:
            if command is None:
                return None
            redirected = True
            parts.append(["redirection", token])
        elif command is not None:
            if redirected:
                return None  # the grammar takes the word for another target
            command.append(token)
        else:
            if token in _NO_PROGRAMS or token[0] == "-" or not _SIGNS_OF_NO_NAME.isdisjoint(token):
                return None
            command = ["command", token]
            parts.append(command)
    return None if command is None else tuple(map(tuple, parts))


_SIGNS_OF_NO_NAME = frozenset("='\"%+,:@")


# The first parser for all other texts: tree-sitter.


def _find_unsupported_construct(root: Node) -> str | None:
    """Return the first construct that is not supported, or None."""
    broken = root.has_error
    cursor = root.walk()
    while True:
        node = cursor.node
        kind = node.type if node is not None else ""
        if kind not in _SUPPORTED_NODES and not (broken and kind == "ERROR"):
            construct = _CONSTRUCTS.get(kind) or f"{_UNNAMED} {kind!r}"
            return f"the command contains {construct}, which is not supported"
        if (kind != "test_command" and cursor.goto_first_child()) or cursor.goto_next_sibling():
            continue  # the reader alone checks the words of a test
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return "the command is not valid shell syntax" if broken else None


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


def _disagreement(root: Node, raw: bytes, read: reader.ParsedShellText) -> str | None:
    """Return why the two parsers do not agree, or None."""
    if _parts(root, raw) == read.parts:
        return None if read.commands else "the command line has no command"
    return "the words of the command are ambiguous"


def _parts(root: Node, raw: bytes) -> tuple[tuple[str, ...], ...]:
    """Return the parts of a text as the reader names them, in the order of the text."""
    waiting = [root]
    found: list[tuple[int, tuple[str, ...]]] = []
    while waiting:
        node = waiting.pop()
        kind = node.type
        if kind in _LEAVES:
            continue
        children = node.named_children
        if kind == "command":
            if words := _command_words_as_written(node, raw):
                begins = next(child for child in children if child.type == "command_name")
                found.append((begins.start_byte, ("command", *words, *_lost_word(node, raw))))
        elif kind in _PARTS:
            found += ((node.start_byte, part) for part in _part_of(node, raw))
        waiting += children
    found.sort(key=_start)
    return tuple([part for _, part in found])


_PARTS = frozenset(
    {"declaration_command", "test_command", "file_redirect", "heredoc_redirect", "herestring_redirect"}
    | {"variable_assignment", "for_statement", "command_substitution"}
)
_LEAVES = frozenset({"word", "number", "raw_string", "string_content", "command_name", "file_descriptor", "comment"})
_start: Callable[[tuple[int, tuple[str, ...]]], int] = itemgetter(0)


def _part_of(node: Node, raw: bytes) -> Iterator[tuple[str, ...]]:
    match node.type:
        case "declaration_command":
            yield ("command", *(_text(child, raw) for child in node.children))
        case "file_redirect":
            yield ("redirection", str(_read_tree_redirection(node, raw)))
        case "heredoc_redirect":
            yield ("document", *(_text(child, raw) for child in node.named_children if child.type == "heredoc_start"))
        case "herestring_redirect":
            yield ("input", *(_text(child, raw) for child in node.named_children))
        case "variable_assignment":
            if node.parent is None or node.parent.type != "declaration_command":
                yield ("assignment", _text(node, raw))
        case "for_statement":
            values = [child for child in node.named_children if child.type in _WORDS]
            yield ("for", *(_text(child, raw) for child in (node.named_children[0], *values)))
        case "command_substitution":
            yield ("substitution",)
        case _:
            yield ("test", _text(node, raw))


def _lost_word(command: Node, raw: bytes) -> tuple[str, ...]:
    """Return the ``-`` between a command and its here-document, which the grammar leaves out."""
    if b"<<" not in raw:
        return ()
    after = command.next_named_sibling
    if after is None or after.type != "heredoc_redirect":
        return ()
    return tuple(raw[command.end_byte : after.start_byte].decode("utf-8", "replace").split())


def _read_tree_redirection(node: Node, raw: bytes) -> ShellRedirection:
    """Return a redirection as tree-sitter reads it.

    With more than one destination, the text equals nothing that the lexer reads.
    """
    parts = [(child.type in _WORDS, _text(child, raw)) for child in node.children]
    words = [part for is_word, part in parts if is_word]
    operator = "".join(part for is_word, part in parts if not is_word)
    target = "\0".join(remove_quotes(word) for word in words)
    return ShellRedirection(operator, target, get_redirection_capability(operator, target))


def _recover_commands(root: Node, raw: bytes) -> tuple[ShellCommand, ...]:
    """Return everything in the text that looks like a command, with words that are not literal as written."""
    found: list[ShellCommand] = []
    for node in _nodes(root, "command")[:_MAX_RECOVERED]:
        source = _command_words_as_written(node, raw, literal=False)
        found.append(ShellCommand(tuple(remove_quotes(word) for word in source), (), source))
    return tuple(found)


def _recover_redirections(root: Node, raw: bytes, commands: tuple[ShellCommand, ...]) -> tuple[ShellRedirection, ...]:
    """Return the redirections of an unclear text that plainly name their file."""
    moved = any(not MOVES.isdisjoint(command.argv) for command in commands)
    found = [_read_tree_redirection(node, raw) for node in _nodes(root, "file_redirect")[:MAX_COMMANDS]]
    return tuple(
        redirection
        for redirection in found
        if redirection.capability is not None
        and redirection.operator.lstrip("0123456789") in reader.OPENING
        and redirection.target
        and redirection.target.isprintable()
        and _NOT_LITERAL.isdisjoint(redirection.target)
        and not {"$", "`", "("} & set(redirection.target)
        and (redirection.target[:1] == "/" or not moved)
    )


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
_NO_PROGRAMS = SHELL_WORDS - {"cd", "echo", "exit", "false", "printf", "pwd", "true", "type"}
"""The words that do not begin a plain command."""


def get_simple_command_argv(script: ShellScript) -> tuple[str, ...] | None:
    """Return the argv of a script that is one program with literal arguments; None if it needs a shell."""
    if script.unclear is not None or not script.is_plain or len(script.commands) != 1:
        return None
    (command,) = script.commands
    if command.redirections or command.argv[0] in SHELL_WORDS:
        return None
    return command.argv


@lru_cache(maxsize=64)
def parse_single_program_argv(text: str) -> tuple[str, ...] | None:
    """Return :func:`get_simple_command_argv` of a text."""
    return get_simple_command_argv(parse_script(text))
