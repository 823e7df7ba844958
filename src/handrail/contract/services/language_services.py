"""The language service of a runtime: what language servers know about the code below the roots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from handrail.contract.struct import Struct

DiagnosticSeverity = Literal["error", "warning", "information", "hint"]


class SymbolQuery(Struct, frozen=True):
    """The symbol of a question: by its position, by its name, or both.

    :param path: the file that has the symbol; None to search all files of the workspace
    :param line: the line of the symbol in the file, from 1
    :param symbol: the name, such as ``parse`` or ``Parser.parse``
    """

    path: str | None = None
    line: int | None = None
    symbol: str | None = None


class CodeLocation(Struct, frozen=True):
    """A place in a file, with its line.

    :param line: from 1
    :param column: of the first character, from 1
    :param text: the source line; None for a file outside the roots
    """

    path: str
    line: int
    column: int
    text: str | None


class CodeSymbol(Struct, frozen=True):
    """A symbol that a file defines.

    :param kind: such as ``function`` or ``class``
    :param container: the name of the symbol that contains it; empty if unknown
    """

    name: str
    kind: str
    location: CodeLocation
    container: str = ""


class CodeDiagnostic(Struct, frozen=True):
    """A problem that a language server found.

    :param code: of the rule; empty if there is none
    """

    severity: DiagnosticSeverity
    message: str
    location: CodeLocation
    code: str = ""


class RenameEdit(Struct, frozen=True):
    """A line that a renaming would change.

    :param location: of the first change in the line, with the line as it is
    :param new_text: the line as it would be
    """

    location: CodeLocation
    new_text: str


class ResultCompleteness(Struct, frozen=True):
    """The limits of an answer.

    :param servers: the programs that answered, such as ``ty``
    :param incomplete_reason: why results may be missing; empty if nothing suggests that
    :param hidden_count: how many results are in files that rules hide
    :param stale_reason: why diagnostics may be older than the file; empty if they are current
    """

    servers: tuple[str, ...] = ()
    incomplete_reason: str = ""
    hidden_count: int = 0
    stale_reason: str = ""


class LocationQueryResult(Struct, frozen=True):
    """Places, sorted by path and line."""

    locations: tuple[CodeLocation, ...]
    quality: ResultCompleteness


class SymbolQueryResult(Struct, frozen=True):
    """Symbols, in the order of a file or of a search."""

    symbols: tuple[CodeSymbol, ...]
    quality: ResultCompleteness


class HoverQueryResult(Struct, frozen=True):
    """The type and the documentation of a symbol; empty if there is none."""

    text: str
    location: CodeLocation
    quality: ResultCompleteness


class FileDiagnosticsResult(Struct, frozen=True):
    """The problems of one file, for its present content."""

    diagnostics: tuple[CodeDiagnostic, ...]
    quality: ResultCompleteness


class RenamePreview(Struct, frozen=True):
    """What a renaming would change. Nothing is changed.

    :param other_changes: changes of whole files, such as a new name of a file
    """

    edits: tuple[RenameEdit, ...]
    quality: ResultCompleteness
    other_changes: tuple[str, ...] = ()


class LanguageService(Protocol):
    """Questions to the language servers of the workspace.

    A server runs in a sandbox with a read-only workspace and without network, and is shared by the sessions that may see the
    same files. Before each question, it gets every change of the files since the last one. Every method raises
    :class:`~handrail.contract.errors.ToolError`: ``unavailable`` without a server, ``timeout`` for one that does not answer,
    ``invalid_input`` for a symbol that does not exist or is ambiguous, ``denied`` for a file that rules hide.
    """

    async def find_definitions(self, query: SymbolQuery) -> LocationQueryResult:
        """Return where a symbol is defined."""
        ...

    async def find_references(self, query: SymbolQuery) -> LocationQueryResult:
        """Return where a symbol is used, and its definition."""
        ...

    async def describe_symbol(self, query: SymbolQuery) -> HoverQueryResult:
        """Return the type and the documentation of a symbol."""
        ...

    async def list_symbols(self, path: str | None = None, *, name: str | None = None) -> SymbolQueryResult:
        """Return the symbols that a file defines, or those of all files with a name.

        :param name: a part of the name; required without ``path``
        """
        ...

    async def list_diagnostics(self, path: str) -> FileDiagnosticsResult:
        """Return the problems of a file."""
        ...

    async def preview_rename(self, query: SymbolQuery, new_name: str) -> RenamePreview:
        """Return what the renaming of a symbol would change."""
        ...


def convert_completeness_to_json(quality: ResultCompleteness) -> Mapping[str, object]:
    """Return the limits of an answer as members of a result."""
    found: dict[str, object] = {"servers": list(quality.servers)}
    if quality.incomplete_reason:
        found |= {"incomplete": True, "why": quality.incomplete_reason}
    if quality.stale_reason:
        found |= {"stale": True, "why": quality.stale_reason}
    if quality.hidden_count:
        found["hidden"] = quality.hidden_count
    return found
