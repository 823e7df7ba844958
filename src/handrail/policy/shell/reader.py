"""The second parser of shell text: a reader of exactly the constructs that are understood.

It removes the quotes, follows ``if``, loops, groups and substitutions, and returns every simple command in the order of the
text. A part of a word that only the shell knows becomes a *mark* in the word. Nothing here runs or expands anything.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell.command_wrappers import RESERVED_WORDS, explain_variable_risk
from handrail.policy.shell.simple_commands import (
    ANY_TEXT,
    GLOB,
    NO_OPTION,
    QUOTED_ESCAPE,
    SPLIT,
    SPLIT_OR_EXPANDED,
    ShellCommand,
    ShellRedirection,
    classify_printed_word_count,
    count_assignable_names,
    get_redirection_capability,
    is_marked,
    merge_loop_values,
    merge_possible_working_folders,
    remove_quotes,
)

MAX_COMMANDS = 50
MAX_WORDS = 4_000
"""The maximum number of words, operators and line ends in a text that is evaluated."""
MAX_READ = 4 * MAX_COMMANDS
"""The number of commands after which reading stops, because the text has too many."""
_MAX_DEPTH = 16


CHANGES_FOLDER = "the command changes the folder"  # so the file of a redirection is unknown


class UnclearSyntax(Exception):
    """The text has a construct that is not understood. This is a condition rather than an error."""


class ParsedShellText(NamedTuple):
    """What the reader found in a text.

    :param parts: what the other parser has to agree on, in the order of the text
    :param files: the redirections that open a file, with targets relative to the first folder
    :param is_plain: whether the text is a list of simple commands with literal words
    """

    commands: tuple[ShellCommand, ...]
    files: tuple[ShellRedirection, ...]
    parts: tuple[tuple[str, ...], ...]
    is_plain: bool


def read_text(text: str) -> ParsedShellText:
    """Return the commands of a text. If there are too many, return just enough of them to show that.

    :raises UnclearSyntax: for any other text than those that are understood
    """
    reader = _TextReader(text)
    reader.read_list(())
    if reader.documents:
        raise UnclearSyntax("the command contains a here-document without its content")
    for found in (reader.commands, reader.files, reader.parts):
        if len(found) > 1:
            found.sort(key=itemgetter(0))
    return ParsedShellText(
        tuple([command for _, command in reader.commands]),
        tuple([file for _, file in reader.files]),
        tuple([part for _, part in reader.parts]),
        reader.is_plain,
    )


_BLANK = compile_regex_lazily(r"(?:[ \t]|(?<=[ \t])\\\n)+")
_SIGN = compile_regex_lazily(r"&&|\|\||\|&|;;|[|;&\n()]")
_REDIRECT = compile_regex_lazily(r"[0-9]*(?:<<<|<<-|<<|>>|>&|>\||<&|<>|<|>)|&>>|&>")
_LITERAL = compile_regex_lazily(
    r"""(?:[^\s'"\\|&;()<>`$*?\[\]~{}]|\\[^\n]|'[^']*'|"(?:[^"\\$`]|\\[^\n])*")+""",
)
_PLAIN_WORD = compile_regex_lazily(r"[ \t]*([\w./:@%+,-]+)(?=[ \t\n|&;]|\Z)")
"""A word without any special character. No number of a descriptor precedes a redirection in it."""
_BARE = compile_regex_lazily(r"""[^\s'"\\|&;()<>`$]+""")
_SKIPPED = frozenset(" \t\n#")
_ENDS = frozenset(" \t\n|&;()<>")
_QUOTED_TEXT = compile_regex_lazily(r'(?:[^"\\$`]|\\[^\n])+')
_HERE_TEXT = compile_regex_lazily(r"(?:[^\\$`]|\\[^\n])+")
_NAME = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETER = compile_regex_lazily(
    r"\$(?:(?P<special>[?#$!])|(?P<other>[@*_0-9-])|(?P<name>[A-Za-z_]\w*)"
    r"|\{(?P<braced>[A-Za-z_]\w*|[?#$!@*0-9])(?::?[-+][\w./:@% -]*|%%?[\w.*?/:@-]*|\#\#?[\w.*?/:@-]*)?\}|\{\#[A-Za-z_]\w*\})",
    re.ASCII,
)
_ASSIGNMENT = compile_regex_lazily(r"([A-Za-z_][A-Za-z0-9_]*)\+?=")
_LOOKS_LIKE_ASSIGNMENT = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_]*(?:\[.*\])?\+?=", re.DOTALL)
_HOME_IN_VALUE = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_]*\+?=(?:.*:)?~")
_DESCRIPTOR_NAME = compile_regex_lazily(r"\{[A-Za-z_]\w*\}")
_NUMBERS = compile_regex_lazily(r"\{\d+\.\.\d+\}")
_WILDCARDS = compile_regex_lazily(r"[*?]+")
_HEREDOC_WORD = compile_regex_lazily(r"""(?:'([\w.-]+)'|"([\w.-]+)"|\\?([\w.-]+))""", re.ASCII)
_RESERVED_INITIALS = frozenset(word[0] for word in RESERVED_WORDS)
OPENING = frozenset({">", ">>", ">|", "<", "&>", "&>>", ">&"})
MOVES = frozenset({"cd", "pushd", "popd", "source", ".", "eval"})
"""Builtins after which a relative path may name another file."""
_ARITHMETIC = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})
_NUMBER = compile_regex_lazily(rf"-?\d+|{NO_OPTION}")


class _HereDocument(NamedTuple):
    """A here-document whose text begins on the next line."""

    end: str
    is_literal: bool
    strips_tabs: bool


class _TextReader:
    """One pass over a text, by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.commands: list[tuple[int, ShellCommand]] = []
        self.files: list[tuple[int, ShellRedirection]] = []
        self.parts: list[tuple[int, tuple[str, ...]]] = []
        self.is_plain = True
        self._folders: tuple[str, ...] = (".",)
        self.documents: list[_HereDocument] = []
        self._values: dict[str, str] = {}
        self._names: Mapping[str, int] | None = None
        self._assigned: tuple[str, str] | None = None
        """The variable that the last command only sets, and its literal value."""
        self._depth = 0
        self._tokens = 0

    # ── lists and compound commands ──────────────────────────────────────────────────────────────

    def read_list(self, ends: Sequence[str]) -> str:
        """Read commands up to a word or sign of ``ends``, or to the end of the text if there is none.

        :returns: the word or sign at which the list ended
        """
        text = self.text
        found = False
        joined = ""
        start = self._folders
        begun = len(self.commands)
        while True:
            self._skip_blanks(lines=True)
            if self.at >= len(text):
                if ends:
                    raise UnclearSyntax(f"the command has no {ends[0]!r} at its end")
                if joined:
                    raise UnclearSyntax("the command ends with an operator")
                return ""
            if ends and (end := self._take_end(ends)) is not None:
                if joined or not found:
                    raise UnclearSyntax(f"no command comes before {end!r}")
                return end
            if len(self.commands) >= MAX_READ:
                self.at = len(text)
                return ends[0] if ends else ""
            if not joined:
                begun = len(self.commands)
            is_single = self._read_pipeline() == 1
            assigned = self._assigned if is_single and not joined and self._depth == 0 else None
            self._assigned = None
            found = True
            self._skip_blanks()
            joined = self._take_operator(("&&", "||", ";", "&", "\n"))
            if assigned is not None and joined != "&" and self._is_assigned_once(assigned[0]):
                self._values[assigned[0]] = assigned[1]
            if joined == "&":
                self.is_plain = False
                self._folders = start
                self.commands[begun:] = [(at, replace(one, in_background=True)) for at, one in self.commands[begun:]]
            elif joined != "&&":
                self._folders = merge_possible_working_folders(start, self._folders)
            if joined != "&&":
                start = self._folders
            if joined not in ("&&", "||"):
                if not joined and not (self.at >= len(text) or self._is_at_end(ends)):
                    raise UnclearSyntax(f"the command has unsupported syntax at {text[self.at : self.at + 20]!r}")
                joined = ""

    def _is_at_end(self, ends: Sequence[str]) -> bool:
        return ")" in ends and self.text.startswith(")", self.at)

    def _take_end(self, ends: Sequence[str]) -> str | None:
        if ")" in ends:
            if self.text.startswith(")", self.at):
                self.at += 1
                return ")"
            return None
        match = _LITERAL.match(self.text, self.at) or _BARE.match(self.text, self.at)
        if match is not None and match.group() in ends and self._ends_at(match.end()):
            self.at = match.end()
            return match.group()
        return None

    def _ends_at(self, at: int) -> bool:
        return at >= len(self.text) or self.text[at] in _ENDS

    def _read_pipeline(self) -> int:
        """Read commands with pipes between them, and return their number."""
        before = self._folders
        count = 1
        if self.text[self.at] == "!" and self._take_word("!"):
            self.is_plain = False
            self._skip_blanks()
        self._read_command()
        while self.at < len(self.text):
            self._skip_blanks()
            sign = self._take_operator(("|", "|&"))
            if not sign:
                break
            self.is_plain = self.is_plain and sign == "|"
            count += 1
            self._skip_blanks(lines=True)
            self._folders = before
            self._read_command()
        if count > 1:
            self._folders = before
        return count

    def _read_command(self) -> None:
        if self._depth >= _MAX_DEPTH:
            raise UnclearSyntax(f"the command is nested more than {_MAX_DEPTH} levels deep")
        self._depth += 1
        if self.text.startswith("(", self.at):
            if self.text.startswith("((", self.at):
                raise UnclearSyntax("the command contains an arithmetic command, which is not supported")
            self.at += 1
            before = self._folders
            self._read_nested((")",))
            self._folders = before
            self._read_redirections()
        elif (word := self._peek_reserved()) is None:
            self._read_simple_command()
        elif word == "[[":
            self._read_double_brackets()
        else:
            self._read_compound(word)
            self._read_redirections()
        self._depth -= 1

    def _read_compound(self, word: str) -> None:
        self.at += len(word)
        before = self._folders
        match word:
            case "{":
                self._read_nested(("}",))
                return
            case "if":
                end = "elif"
                while end == "elif":
                    self._read_nested(("then",))
                    end = self._read_nested(("elif", "else", "fi"))
                if end == "else":
                    self._read_nested(("fi",))
                self._folders = merge_possible_working_folders(before, self._folders)
            case "while" | "until":
                first = (len(self.commands), len(self.files))
                self._read_nested(("do",))
                self._read_nested(("done",))
                self._leave_loop(before, first)
            case "for":
                self._read_for(before)
            case _:
                raise UnclearSyntax(f"the command contains the shell keyword {word!r}, which is not supported")

    def _read_nested(self, ends: Sequence[str]) -> str:
        self.is_plain = False
        return self.read_list(ends)

    def _read_for(self, before: tuple[str, ...]) -> None:
        start = self.at
        self._skip_blanks()
        match = _NAME.match(self.text, self.at)
        if match is None or not self._ends_at(match.end()):
            raise UnclearSyntax("the command contains a loop without a simple variable")
        name = match.group()
        self._check_variable(name)
        self.at = match.end()
        self._skip_blanks()
        if not self._take_word("in"):
            raise UnclearSyntax("the command contains a loop over the arguments of the shell, which is not supported")
        words: list[str] = []
        sources: list[str] = []
        while True:
            self._skip_blanks()
            if self.at >= len(self.text) or self.text[self.at] in ";\n":
                break
            if self.text[self.at] in _ENDS:
                raise UnclearSyntax("the command contains a loop of an unsupported form")
            word, source = self._read_word()
            words.append(word)
            sources.append(source)
        self.parts.append((start, ("for", name, *sources)))
        self._take_operator((";", "\n"))
        self._skip_blanks(lines=True)
        if not self._take_word("do"):
            raise UnclearSyntax("the command contains a loop without 'do'")
        known = self._values.get(name)
        self._values[name] = merge_loop_values(words) if self._is_assigned_once(name) else ANY_TEXT
        first = (len(self.commands), len(self.files))
        self._read_nested(("done",))
        if known is None:
            del self._values[name]
        else:
            self._values[name] = known
        self._leave_loop(before, first)

    def _is_assigned_once(self, name: str) -> bool:
        """Return whether nothing in the text but one loop or assignment can set this variable."""
        if self._names is None:
            self._names = count_assignable_names(self.text)
        return self._names.get(name) == 1

    def _leave_loop(self, before: tuple[str, ...], first: tuple[int, int]) -> None:
        """Leave a loop. If it changes the folder, no folder of its commands is known."""
        if self._folders == before:
            return
        commands, files = first
        if any(file.target[:1] != "/" for _, file in self.files[files:]):
            raise UnclearSyntax(f"{CHANGES_FOLDER} in a loop that redirects, so the file is unknown")
        self.commands[commands:] = [(at, replace(one, folders=())) for at, one in self.commands[commands:]]
        self._folders = ()

    def _read_double_brackets(self) -> None:
        start = self.at
        self.is_plain = False
        self.at += 2
        words = ["[["]
        while True:
            self._skip_blanks(lines=True)
            if self.at >= len(self.text):
                raise UnclearSyntax("the command contains a [[ without ]]")
            if self._take_word("]]"):
                break
            sign = self._take_operator(("&&", "||", "(", ")")) or ("!" if self._take_word("!") else "")
            if sign:
                words.append(sign)
                continue
            if self.text[self.at] in "<>":
                self.at += 1
                words.append(self.text[self.at - 1])
                continue
            if self.text[self.at] in _ENDS:
                raise UnclearSyntax("the command contains a [[ … ]] test of an unsupported form")
            words.append(self._read_word()[0].replace(SPLIT, ANY_TEXT))
        words.append("]]")
        for before, word, after in zip(words, words[1:], words[2:], strict=False):
            if word in _ARITHMETIC and not (_NUMBER.fullmatch(before) and _NUMBER.fullmatch(after)):
                raise UnclearSyntax("the command compares values as numbers in [[ … ]], which can run code in a value")
            if word in ("-v", "-R"):
                raise UnclearSyntax(f"the command contains a test with {word}, which can run code in a subscript")
        source = self.text[start : self.at]
        self.parts.append((start, ("test", source)))
        self.commands.append((start, ShellCommand(tuple(words), (), (source,), self._folders)))
        self._read_redirections()

    # ── simple commands ──────────────────────────────────────────────────────────────────────────

    def _read_simple_command(self) -> None:
        argv: list[str] = []
        source: list[str] = []
        redirections: list[ShellRedirection] = []
        start = self.at
        first = last = -1
        assigned: list[str] = []
        value = ""
        text = self.text
        while True:
            match = _PLAIN_WORD.match(text, self.at)
            if match is not None and (argv or match.group(1) not in RESERVED_WORDS):
                self._tokens += 1
                if self._tokens > MAX_WORDS:
                    raise UnclearSyntax(f"the command has more than {MAX_WORDS:,} words")
                if not argv:
                    first = match.start(1)
                argv.append(match.group(1))
                source.append(match.group(1))
                self.at = last = match.end()
                continue
            self._skip_blanks()
            if self.at >= len(text):
                break
            char = text[self.at]
            if (char in "<>&" or char.isdigit()) and (match := _REDIRECT.match(text, self.at)) is not None:
                redirections += self._read_redirection(match.group(), match.end())
                if len(redirections) > MAX_COMMANDS:
                    raise UnclearSyntax(f"one command has more than {MAX_COMMANDS} redirections")
                continue
            if char in _ENDS:
                break
            at = self.at
            if not argv and (match := _ASSIGNMENT.match(text, at)) is not None:
                assigned.append(match.group(1))
                value = self._read_assignment(match)
                continue
            word, written = self._read_word()
            if written[0] == "{" and _DESCRIPTOR_NAME.fullmatch(written) and text[self.at : self.at + 1] in ("<", ">"):
                raise UnclearSyntax(f"the command sets the variable {written} to a descriptor, which is not supported")
            if not argv:
                first = at
                if _LOOKS_LIKE_ASSIGNMENT.match(written):
                    raise UnclearSyntax("the command contains a variable assignment of an unsupported form")
                if is_marked(word):
                    raise UnclearSyntax(f"the word {_short(written)} names a command that the shell may expand")
                if written in RESERVED_WORDS:
                    raise UnclearSyntax(f"the command contains the shell keyword {written!r} where it has no meaning")
            argv.append(word)
            source.append(written)
            last = self.at
        if not argv and not assigned:
            if not redirections:
                raise UnclearSyntax(f"no command comes before {text[self.at : self.at + 1] or 'its end'!r}")
            argv.append(":")  # a shell opens the files, and runs nothing
        if not argv and redirections:
            raise UnclearSyntax("the command contains a redirection without a command")
        for name in assigned:
            if not (name == "IFS" and argv[:1] == ["read"] and self.text[start : start + 5] == "IFS= "):
                self._check_variable(name, argv)
        if not argv:
            if len(assigned) == 1 and value and not is_marked(value) and not redirections:
                self._assigned = (assigned[0], value)
            return
        if argv[0] == "[":
            self.is_plain = False
            if argv[-1] != "]":
                raise UnclearSyntax("the command contains a [ without ]")
            self.parts.append((first, ("test", text[first:last])))
        elif source:
            self.parts.append((first, ("command", *source)))
        command = ShellCommand(tuple(argv), tuple(redirections), tuple(source), self._folders)
        self.commands.append((start if first < 0 else first, command))
        self._move(argv)

    def _check_variable(self, name: str, argv: Sequence[str] = ()) -> None:
        if (reason := explain_variable_risk(name, argv)) is not None:
            raise UnclearSyntax(reason)

    def _read_assignment(self, match: re.Match[str]) -> str:
        """Read ``NAME=VALUE``, and return the value with its marks; empty if it is added to another one."""
        self.is_plain = False
        start = self.at
        value = ""
        self.at = match.end()
        if self.at < len(self.text) and self.text[self.at] == "(":
            raise UnclearSyntax("the command contains an assignment of a list, which is not supported")
        if not self._ends_at(self.at):
            value = self._read_word()[0]
        self.parts.append((start, ("assignment", self.text[start : self.at])))
        return "" if match.group().endswith("+=") else value

    def _move(self, argv: Sequence[str]) -> None:
        """Follow a change of the folder."""
        if argv[0] not in MOVES and not (argv[0] in ("command", "builtin", "time") and not MOVES.isdisjoint(argv)):
            return
        if argv[0] != "cd" or len(argv) != 2 or argv[1][:1] in ("-", "") or is_marked(argv[1]):
            self._folders = ()
            return
        self._folders = tuple(
            dict.fromkeys(posixpath.normpath(posixpath.join(folder, argv[1])) for folder in self._folders)
        )

    # ── redirections ─────────────────────────────────────────────────────────────────────────────

    def _read_redirections(self) -> None:
        """Read the redirections after a compound command."""
        while True:
            self._skip_blanks()
            match = _REDIRECT.match(self.text, self.at)
            if match is None:
                return
            self._read_redirection(match.group(), match.end())

    def _read_redirection(self, operator: str, end: int) -> list[ShellRedirection]:
        start = self.at
        self.at = end
        self._tokens += 1
        sign = operator.lstrip("0123456789")
        self._skip_blanks()
        if sign in ("<<", "<<-"):
            self._open_document(start, sign)
            return []
        if self.at >= len(self.text) or self.text[self.at] in _ENDS:
            raise UnclearSyntax(f"the redirection {operator!r} has no target")
        word, written = self._read_word()
        if sign == "<<<":
            self.is_plain = False
            self.parts.append((start, ("input", written)))
            return []
        redirection = _redirection(operator, word, written)
        self.parts.append((start, ("redirection", f"{redirection.operator}{remove_quotes(written)}")))
        if redirection.capability is not None:
            target = redirection.target
            if target[:1] != "/" and not self._folders:
                raise UnclearSyntax(
                    f"{CHANGES_FOLDER} before it redirects to {_short(target)}, so the file is unknown (write "
                    "its absolute path, or do not change the folder)"
                )
            for folder in self._folders if target[:1] != "/" else (".",):
                path = target if folder == "." or target[:1] == "/" else f"{folder}/{target}"
                self.files.append((start, replace(redirection, target=path)))
        return [redirection]

    def _open_document(self, start: int, sign: str) -> None:
        match = _HEREDOC_WORD.match(self.text, self.at)
        if match is None or not self._ends_at(match.end()):
            raise UnclearSyntax("the command contains a here-document with an unclear end")
        self.is_plain = False
        self.at = match.end()
        end = next(group for group in match.groups() if group is not None)
        self.documents.append(_HereDocument(end, match.group()[0] in "'\"\\", sign == "<<-"))
        self.parts.append((start, ("document", match.group())))

    def _read_documents(self) -> None:
        """Read the here-documents that begin at the line which begins here."""
        documents, self.documents = self.documents, []
        for document in documents:
            start = self.at
            while True:
                if self.at >= len(self.text):
                    raise UnclearSyntax(f"the command contains a here-document without its end {document.end!r}")
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                if (line.lstrip("\t") if document.strips_tabs else line) == document.end:
                    break
                self.at = end + 1
            if not document.is_literal:
                self._read_expanded(start, self.at)
            self.at = min(end + 1, len(self.text))

    def _read_expanded(self, start: int, end: int) -> None:
        """Read the text of a here-document in which the shell expands variables and substitutions."""
        after = self.at
        self.at = start
        while self.at < end:
            match = _HERE_TEXT.match(self.text, self.at, end)
            if match is not None:
                self.at = match.end()
            elif self.text[self.at] == "$":
                self._read_expansion(quoted=True)
            else:
                raise UnclearSyntax("the command contains a here-document with a backquote or a line continuation")
        if self.at != end:
            raise UnclearSyntax("the command contains a here-document of an unsupported form")
        self.at = after

    # ── words ────────────────────────────────────────────────────────────────────────────────────

    def _read_word(self) -> tuple[str, str]:
        """Read a word. Return it without its quotes and with its marks, and as written."""
        text, start = self.text, self.at
        self._tokens += 1
        if self._tokens > MAX_WORDS:
            raise UnclearSyntax(f"the command has more than {MAX_WORDS:,} words")
        match = _LITERAL.match(text, start)
        if match is not None and self._ends_at(match.end()):
            self.at = match.end()
            written = match.group()
            if len(written) > MAX_WORDS and sum(map(written.count, "'\"\\")) > 2 * MAX_WORDS:
                raise UnclearSyntax(f"one word has more than {MAX_WORDS:,} parts")
            return remove_quotes(written), written
        pieces: list[tuple[str, bool]] = []
        while self.at < len(text) and (char := text[self.at]) not in _ENDS:
            if len(pieces) > MAX_WORDS:
                raise UnclearSyntax(f"one word has more than {MAX_WORDS:,} parts")
            if char == "'":
                end = text.find("'", self.at + 1)
                if end < 0:
                    raise UnclearSyntax("the command has an unclosed quote")
                pieces.append((text[self.at + 1 : end], True))
                self.at = end + 1
            elif char == '"':
                pieces.append((self._read_quoted(), True))
            elif char == "\\":
                if self.at + 1 >= len(text) or text[self.at + 1] == "\n":
                    raise UnclearSyntax("the command contains a line continuation (a backslash at its end) in a word")
                pieces.append((text[self.at + 1], True))
                self.at += 2
            elif char == "$":
                pieces.append((self._read_expansion(quoted=False), True))
            elif char == "`":
                raise UnclearSyntax("the command contains a command substitution in backquotes (write it as $(…))")
            else:
                match = _BARE.match(text, self.at)
                assert match is not None
                pieces.append((match.group(), False))
                self.at = match.end()
        if self.at == start:
            raise UnclearSyntax(f"the command has unsupported syntax at {text[start : start + 20]!r}")
        written = text[start : self.at]
        word = _mark_expansions(pieces, written)
        if is_marked(word):
            self.is_plain = False
        return word, written

    def _read_quoted(self) -> str:
        text = self.text
        self.at += 1
        out: list[str] = []
        while True:
            match = _QUOTED_TEXT.match(text, self.at)
            if match is not None:
                out.append(QUOTED_ESCAPE.sub(r"\1", match.group()))
                self.at = match.end()
            if self.at >= len(text):
                raise UnclearSyntax("the command has an unclosed quote")
            char = text[self.at]
            if char == '"':
                self.at += 1
                return "".join(out)
            if char == "$":
                out.append(self._read_expansion(quoted=True))
            elif char == "`":
                raise UnclearSyntax("the command contains a command substitution in backquotes (write it as $(…))")
            else:
                raise UnclearSyntax("the command contains a line continuation (a backslash at its end) in quotes")

    def _read_expansion(self, *, quoted: bool) -> str:
        """Read what begins with ``$``, and return a mark for it."""
        text, start = self.text, self.at
        if text.startswith("$(", start):
            return self._read_substitution(quoted=quoted)
        match = _PARAMETER.match(text, start)
        if match is None:
            following = text[start + 1 : start + 2]
            if following in ("{", "[") or (following in ("'", '"') and not quoted):
                raise UnclearSyntax(f"the expansion {_short(text[start : start + 20])} is not supported")
            self.at += 1
            return "$"
        self.is_plain = False
        self.at = match.end()
        name = match.group("name") or match.group("braced") or match.group("special") or match.group("other") or "#"
        if name in ("@", "*"):
            return SPLIT
        if name in ("?", "#", "$", "!", "-"):
            return NO_OPTION
        if not quoted and "{" in match.group() and match.group()[2:-1] != name:
            return SPLIT
        value = self._values.get(name) if match.group() in (f"${name}", f"${{{name}}}") else None
        if value is None and name in ("PWD", "HOME", "OLDPWD") and match.group() in (f"${name}", f"${{{name}}}"):
            value = NO_OPTION if quoted else SPLIT
        if value is None:
            return ANY_TEXT if quoted else SPLIT
        if not quoted and (SPLIT in value or GLOB in value or ANY_TEXT in value or SPLIT_OR_EXPANDED.search(value)):
            return SPLIT
        return value.replace(SPLIT, ANY_TEXT).replace(GLOB, ANY_TEXT)

    def _read_substitution(self, *, quoted: bool) -> str:
        text, start = self.text, self.at
        if text.startswith("$((", start):
            raise UnclearSyntax("the command contains an arithmetic expansion, which is not supported")
        if self._depth >= _MAX_DEPTH:
            raise UnclearSyntax(f"the command is nested more than {_MAX_DEPTH} levels deep")
        self._depth += 1
        self.is_plain = False
        self.at += 2
        before, documents = self._folders, self.documents
        self.documents = []
        first = len(self.commands)
        self.parts.append((start, ("substitution",)))
        self.read_list((")",))
        if self.documents:
            raise UnclearSyntax("the command contains a here-document without its content")
        self._folders, self.documents = before, documents
        self._depth -= 1
        inner = [command.argv for _, command in self.commands[first:]]
        if len(inner) == 1 and (words := classify_printed_word_count(inner[0])):
            return NO_OPTION if quoted or words == 1 else SPLIT
        return ANY_TEXT if quoted else SPLIT

    # ── signs ────────────────────────────────────────────────────────────────────────────────────

    def _skip_blanks(self, *, lines: bool = False) -> None:
        """Skip blanks and comments.

        :param lines: also skip line ends
        """
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char not in _SKIPPED:
                return
            if char in " \t":
                match = _BLANK.match(text, self.at)
                assert match is not None
                self.at = match.end()
            elif char == "#" and (self.at == 0 or text[self.at - 1] in _ENDS or text[self.at - 1] == "\n"):
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
                self._tokens += 1
            elif char == "\n" and lines:
                self._end_line()
            else:
                return

    def _end_line(self) -> None:
        self._tokens += 1
        if self._tokens > MAX_WORDS:
            raise UnclearSyntax(f"the command has more than {MAX_WORDS:,} words")
        self.at += 1
        if self.documents:
            self._read_documents()

    def _take_operator(self, signs: Sequence[str]) -> str:
        """Take one of these signs if it comes next, and return it; otherwise ``""``."""
        match = _SIGN.match(self.text, self.at)
        if match is None or match.group() not in signs:
            return ""
        if match.group() == "\n":
            self._end_line()
        else:
            self._tokens += 1
            self.at = match.end()
        return match.group()

    def _take_word(self, word: str) -> bool:
        """Take exactly this unquoted word if it comes next."""
        if self.text.startswith(word, self.at) and self._ends_at(self.at + len(word)):
            self.at += len(word)
            return True
        return False

    def _peek_reserved(self) -> str | None:
        if self.text[self.at : self.at + 1] not in _RESERVED_INITIALS:
            return None
        match = _BARE.match(self.text, self.at)
        word = "" if match is None else match.group()
        return word if match is not None and word in RESERVED_WORDS and self._ends_at(match.end()) else None


def _mark_expansions(pieces: Sequence[tuple[str, bool]], written: str) -> str:
    """Return a word with marks for its wildcards, braces and home folder.

    :param pieces: the texts of the word, each with whether it is quoted, or marked already
    """
    out: list[str] = []
    if not pieces[0][1] and pieces[0][0][:1] == "~":
        name, slash, rest = pieces[0][0].partition("/")
        pieces = ((NO_OPTION, True), (slash + rest, False), *pieces[1:])
        if not name[1:].replace("-", "").replace("_", "").replace(".", "").isalnum() and name != "~":
            raise UnclearSyntax(f"the word {_short(written)} begins with a '~' that the shell may expand (quote it)")
    if _HOME_IN_VALUE.match(written):
        raise UnclearSyntax(f"the word {_short(written)} has a '~' after '=', which the shell may expand (quote it)")
    if _NUMBERS.fullmatch(written):
        return NO_OPTION
    bare = [text for text, is_literal in pieces if not is_literal]
    _, opened, rest = "".join(bare).partition("{")
    inner = rest[: max(rest.rfind("}"), 0)] if opened else ""
    cuts = "{[" if "," in inner or ".." in inner else "["
    closing = max((at for at, (text, is_literal) in enumerate(pieces) if not is_literal and "]" in text), default=-1)
    for place, (text, is_literal) in enumerate(pieces):
        if is_literal:
            out.append(text)
            continue
        found = [text.index(sign) for sign in cuts if sign in text and (sign == "{" or place <= closing)]
        out.append(_WILDCARDS.sub(GLOB, text[: min(found)] if found else text))
        if found:
            left = text[min(found) :] + "".join(later for later, _ in pieces[place + 1 :])
            return "".join((*out, GLOB, *(("/", GLOB) if "/" in left else ())))
    return "".join(out)


def _redirection(operator: str, target: str, written: str) -> ShellRedirection:
    sign = operator.lstrip("0123456789")
    if sign == ">&" and written.isascii() and written.isdigit():
        return ShellRedirection(operator, written)
    if is_marked(target):
        raise UnclearSyntax(f"the command redirects to {_short(written)}, which the shell may expand (quote it)")
    both = sign in ("&>", "&>>", ">&")
    if sign not in OPENING or (both and operator != sign):
        raise UnclearSyntax(f"the command redirects with {operator!r}, which is not supported")
    if not target or (sign == ">&" and (target[0].isdigit() or target[0] == "-")):
        raise UnclearSyntax(f"the command redirects with {operator!r} to {_short(written)}, which is not supported")
    if target.startswith(("/dev/tcp/", "/dev/udp/")):
        raise UnclearSyntax(f"the command redirects to {_short(target)}, which the shell opens as a network connection")
    if target == "/dev/stdin" or target.startswith("/dev/fd/"):
        raise UnclearSyntax(f"the command redirects to {_short(target)}, which the shell opens as a descriptor")
    return ShellRedirection(operator, target, get_redirection_capability(operator, target))


def _short(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:60] + "…")
