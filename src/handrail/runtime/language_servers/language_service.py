"""The language service of one call: questions by name or position, and answers with the source lines that the call may see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.services.language_services import (
    CodeDiagnostic,
    CodeLocation,
    CodeSymbol,
    DiagnosticSeverity,
    FileDiagnosticsResult,
    HoverQueryResult,
    LocationQueryResult,
    RenameEdit,
    RenamePreview,
    ResultCompleteness,
    SymbolQuery,
    SymbolQueryResult,
)
from handrail.contract.struct import Struct, field
from handrail.contract.tool.requires import AccessCheck, CapabilitySet
from handrail.runtime.files.session_roots import SessionRoots, is_beneath
from handrail.runtime.language_servers.code_positions import (
    SymbolEntry,
    convert_column_to_offset,
    convert_offset_to_column,
    extract_hover_text,
    find_whole_word_positions,
    parse_locations,
    parse_protocol_range,
    parse_symbol_entries,
    parse_workspace_edit,
    split_lines,
)
from handrail.runtime.language_servers.running_server import OpenDocument, RunningLanguageServer
from handrail.runtime.language_servers.server_connection import ServerErrorResponse
from handrail.runtime.language_servers.server_pool import LanguageServerEnvironment, LanguageServerPool
from handrail.runtime.language_servers.server_programs import LanguageDefinition
from handrail.runtime.language_servers.workspace_files import WorkspaceFileSnapshot

_MAX_LINE = 500
"""The most characters of a source line in an answer."""
_MAX_CANDIDATES = 10
_MAX_SEARCHED_FILES = 5
_MAX_OPENED_FILES = 50
"""How many files are opened for a server without an index of the project."""
_NAME_LINES = 30
"""How many lines of a declaration are searched for its name."""
_MOST_ATTEMPTS = 3
_HEADERS = frozenset(("h", "hh", "hpp", "hxx"))
_SEVERITIES: tuple[DiagnosticSeverity, ...] = ("error", "warning", "information", "hint")
_Span = tuple[int, int, int, int]
_T = TypeVar("_T")


class _SymbolPosition(Struct):
    """The place in a document that a request names."""

    document: OpenDocument
    line: int
    column: int

    def build_position_params(self, server: RunningLanguageServer) -> dict[str, Any]:
        """Return the place in the form of the protocol."""
        offset = convert_column_to_offset(self.document.lines[self.line], self.column, server.encoding)
        return {"textDocument": {"uri": self.document.uri}, "position": {"line": self.line, "character": offset}}


class _AnswerFiles(Struct):
    """The files that one answer names: whether the call may see them, and their lines.

    :ivar hidden_count: how many results are in files that the call may not see
    """

    ground: LanguageServerEnvironment
    may: AccessCheck
    server: RunningLanguageServer
    hidden_count: int = 0
    _located: dict[str, ResolvedPath | None] = field(default_factory=dict[str, ResolvedPath | None])
    _lines: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    def locate(self, path: str) -> ResolvedPath | None:
        """Return the location of a path; None if the call may not see it."""
        if path not in self._located:
            found: ResolvedPath | None = None
            try:
                found = self.ground.roots.resolve_exact_path(path)
                if found.is_inside and (
                    self.ground.is_hidden(found.absolute) or self.may("fs.read", found.absolute) is not None
                ):
                    found = None
            except ToolError:
                found = None
            self._located[path] = found
        return self._located[path]

    def read_lines(self, path: str) -> Sequence[str]:
        """Return the lines of a file that the call may see, as the server knows them."""
        if path not in self._lines:
            document = self.server.documents.get(path)
            try:
                self._lines[path] = document.lines if document is not None else split_lines(self.ground.read_text(path))
            except ToolError:
                self._lines[path] = ()
        return self._lines[path]

    def list_files_in_result(self) -> list[str]:
        """Return the files whose lines are in the answer."""
        return [*self._lines, *(one.path for one in self.server.documents.values() if one.path in self._located)]

    def make_visible_location(self, path: str, span: _Span) -> CodeLocation | None:
        """Return a place for an answer; None, and count it, if the call may not see the file."""
        if (located := self.locate(path)) is None:
            self.hidden_count += 1
            return None
        line, offset = span[0], span[1]
        if not located.is_inside:
            return CodeLocation(located.display_path, line + 1, offset + 1, None)
        lines = self.read_lines(located.absolute)
        text = lines[line] if line < len(lines) else ""
        column = convert_offset_to_column(text, offset, self.server.encoding)
        return CodeLocation(located.display_path, line + 1, column + 1, text[:_MAX_LINE])

    def make_visible_locations(self, places: Iterable[tuple[str, _Span]]) -> tuple[CodeLocation, ...]:
        """Return the places that the call may see, sorted and each once."""
        found = {
            one for path, span in dict.fromkeys(places) if (one := self.make_visible_location(path, span)) is not None
        }
        return tuple(sorted(found, key=lambda one: (one.text is None, one.path, one.line, one.column)))


class PooledLanguageService:
    """A language service that implements :class:`handrail.contract.services.language_services.LanguageService`.

    :param profile: of the session
    :param may: evaluates ``fs.read`` for the canonical path of each file in a question or an answer
    """

    def __init__(
        self,
        pool: LanguageServerPool,
        roots: SessionRoots,
        profile: SandboxProfile,
        capabilities: CapabilitySet,
        may: AccessCheck,
    ) -> None:
        self._pool = pool
        self._roots = roots
        self._profile = profile
        self._capabilities = capabilities
        self._may = may

    async def find_definitions(self, query: SymbolQuery) -> LocationQueryResult:
        async def ask(
            server: RunningLanguageServer, files: _AnswerFiles, target: _SymbolPosition
        ) -> LocationQueryResult:
            result, incomplete = await server.ask_all("textDocument/definition", target.build_position_params(server))
            places = list(parse_locations(result))
            locations = await asyncio.to_thread(files.make_visible_locations, places)
            return LocationQueryResult(locations, _make_quality(server, files, incomplete))

        async def choose(
            server: RunningLanguageServer, files: _AnswerFiles, entries: Sequence[SymbolEntry], incomplete: str
        ) -> LocationQueryResult:
            places = [(one.path, _find_name_span(one, files.read_lines(one.path), server)) for one in entries]
            locations = await asyncio.to_thread(files.make_visible_locations, places)
            return LocationQueryResult(locations, _make_quality(server, files, incomplete))

        return await self._ask_about(query, ask, choose)

    async def find_references(self, query: SymbolQuery) -> LocationQueryResult:
        async def ask(
            server: RunningLanguageServer, files: _AnswerFiles, target: _SymbolPosition
        ) -> LocationQueryResult:
            limit = await self._open_unindexed_files(server, target)
            params = {**target.build_position_params(server), "context": {"includeDeclaration": True}}
            result, incomplete = await server.ask_all("textDocument/references", params)
            locations = await asyncio.to_thread(files.make_visible_locations, list(parse_locations(result)))
            return LocationQueryResult(locations, _make_quality(server, files, incomplete or limit))

        return await self._ask_about(query, ask)

    async def describe_symbol(self, query: SymbolQuery) -> HoverQueryResult:
        async def ask(server: RunningLanguageServer, files: _AnswerFiles, target: _SymbolPosition) -> HoverQueryResult:
            await _check_declaration(server, files, target)
            result = await server.ask("textDocument/hover", target.build_position_params(server))
            contents = cast("dict[str, Any]", result).get("contents") if isinstance(result, dict) else None
            span = (
                target.line,
                convert_column_to_offset(target.document.lines[target.line], target.column, server.encoding),
                0,
                0,
            )
            if (location := files.make_visible_location(target.document.path, span)) is None:
                raise ToolError("The file of the symbol is hidden by a rule. Use another symbol.", kind="denied")
            return HoverQueryResult(extract_hover_text(contents).strip(), location, _make_quality(server, files, ""))

        return await self._ask_about(query, ask)

    async def preview_rename(self, query: SymbolQuery, new_name: str) -> RenamePreview:
        async def ask(server: RunningLanguageServer, files: _AnswerFiles, target: _SymbolPosition) -> RenamePreview:
            limit = await self._open_unindexed_files(server, target)
            params = {**target.build_position_params(server), "newName": new_name}
            try:
                result, incomplete = await server.ask_all("textDocument/rename", params)
            except ServerErrorResponse as refusal:
                raise ToolError(
                    f"The symbol cannot be renamed to `{new_name[:100]}`: {refusal}. Use another symbol or name.",
                    kind="invalid_input",
                ) from None
            if result is None:
                raise ToolError(
                    "The language server cannot rename this symbol. Name a symbol that the workspace defines.",
                    kind="invalid_input",
                )
            edits, others = parse_workspace_edit(result)
            found = await asyncio.to_thread(_make_rename_edits, files, edits)
            return RenamePreview(found, _make_quality(server, files, incomplete or limit), tuple(others[:20]))

        return await self._ask_about(query, ask)

    async def list_symbols(self, path: str | None = None, *, name: str | None = None) -> SymbolQueryResult:
        if path is None:
            if not name:
                raise ToolError("Both `path` and `name` are missing. Pass at least one of them.", kind="invalid_input")
            return await self._search_symbols(name)

        async def ask(server: RunningLanguageServer, files: _AnswerFiles, absolute: str) -> SymbolQueryResult:
            document = await server.open_document(absolute)
            entries = await _list_document_symbols(server, document)
            wanted = [one for one in entries if name is None or name.lower() in one.name.lower()]
            symbols = await asyncio.to_thread(_make_symbols, files, wanted)
            return SymbolQueryResult(symbols, _make_quality(server, files, ""))

        return await self._ask_about_file(path, ask)

    async def list_diagnostics(self, path: str) -> FileDiagnosticsResult:
        async def ask(server: RunningLanguageServer, files: _AnswerFiles, absolute: str) -> FileDiagnosticsResult:
            document = await server.open_document(absolute)
            found, stale = await server.fetch_diagnostics(document)
            diagnostics = await asyncio.to_thread(_make_diagnostics, files, document, found)
            quality = _make_quality(server, files, "")
            return FileDiagnosticsResult(
                diagnostics, ResultCompleteness(quality.servers, "", quality.hidden_count, stale)
            )

        return await self._ask_about_file(path, ask)

    # The file or the symbol of a question.

    def _resolve_file(self, path: str) -> ResolvedPath:
        located = self._roots.resolve_path(path)
        if not located.is_inside:
            raise ToolError(self._roots.explain_path_outside_roots(located), kind="denied")
        if (refusal := self._may("fs.read", located.absolute)) is not None:
            raise ToolError(refusal, kind="denied")
        if os.path.isdir(located.absolute):  # noqa: PTH112 - of a path that was just resolved
            raise ToolError(
                f"`{located.display_path}` is a folder. A file was expected. Name a file in it.", kind="invalid_input"
            )
        return located

    def _find_language(self, located: ResolvedPath) -> LanguageDefinition:
        if (definition := self._pool.find_language_of_file(located.absolute)) is None:
            known = ", ".join(f"{one.language} ({' '.join(one.files)})" for one in self._pool.languages)
            raise ToolError(
                f"No language server handles `{located.display_path}`. Languages with a server: {known}. Use grep and read, or ask "
                "the user to add the language to [language_servers].",
                kind="unavailable",
            )
        return definition

    def _make_server_environment(
        self, definition: LanguageDefinition, root: str, path: str = ""
    ) -> LanguageServerEnvironment:
        """Return the ground of a server: the root, or the nearest project in it if the server needs that."""
        folder = os.path.dirname(path)  # noqa: PTH120 - of a canonical path
        while definition.project_files and path and is_beneath(folder, root):
            if any(os.path.exists(f"{folder}/{name}") for name in definition.project_files):  # noqa: PTH110
                return LanguageServerEnvironment(folder, self._roots, self._profile, self._capabilities)
            if folder == root:
                break
            folder = os.path.dirname(folder)  # noqa: PTH120
        return LanguageServerEnvironment(root, self._roots, self._profile, self._capabilities)

    async def _ask_about_file(
        self, path: str, ask: Callable[[RunningLanguageServer, _AnswerFiles, str], Awaitable[_T]]
    ) -> _T:
        located = self._resolve_file(path)
        definition = self._find_language(located)
        assert located.root is not None
        ground = self._make_server_environment(definition, located.root, located.absolute)
        return await self._ask_server(definition, ground, lambda server, files: ask(server, files, located.absolute))

    async def _ask_server(
        self,
        definition: LanguageDefinition,
        ground: LanguageServerEnvironment,
        ask: Callable[[RunningLanguageServer, _AnswerFiles], Awaitable[_T]],
    ) -> _T:
        """Ask the server of a language, and again if files of the answer change meanwhile."""

        async def question(server: RunningLanguageServer) -> _T:
            for attempt in range(_MOST_ATTEMPTS):
                files = _AnswerFiles(ground, self._may, server)
                answer = await ask(server, files)
                if attempt == _MOST_ATTEMPTS - 1 or not server.have_files_changed(files.list_files_in_result()):
                    break
                await server.sync_files_before_request()
            else:
                raise AssertionError
            return answer

        slot = self._pool.get_or_create_slot(self._without_denied_programs(definition), ground)
        try:
            return await slot.ask(ground, question)
        except ServerErrorResponse as refusal:
            raise ToolError(
                f"The language server for {definition.language} refused the question: {refusal}. Ask about another symbol, or use "
                "grep and read.",
                kind="failed",
            ) from None

    def _without_denied_programs(self, definition: LanguageDefinition) -> LanguageDefinition:
        """Return a language without the servers that rules about programs deny. The operator chose all others.

        :raises ToolError: ``denied`` if no server is left
        """
        kept: list[tuple[str, ...]] = []
        refusal: str | None = None
        for command in definition.commands:
            is_declared = self._capabilities.allows("shell.run", command)
            reason = self._may("shell.run", command) if is_declared else None
            refusal = refusal or reason
            if reason is None:
                kept.append(command)
        if refusal is not None and not kept:
            raise ToolError(refusal, kind="denied")
        return definition if len(kept) == len(definition.commands) else replace(definition, commands=tuple(kept))

    async def _ask_about(
        self,
        query: SymbolQuery,
        ask: Callable[[RunningLanguageServer, _AnswerFiles, _SymbolPosition], Awaitable[_T]],
        choose: Callable[[RunningLanguageServer, _AnswerFiles, Sequence[SymbolEntry], str], Awaitable[_T]]
        | None = None,
    ) -> _T:
        """Ask about the symbol of a query.

        :param choose: answers for several symbols of the same name; None if there must be one
        """
        if query.path is None:
            if not query.symbol:
                raise ToolError("The symbol is missing. Pass `symbol`, or `path` and `line`.", kind="invalid_input")
            return await self._ask_by_name(query.symbol, ask, choose)

        async def ask_in_file(server: RunningLanguageServer, files: _AnswerFiles, path: str) -> _T:
            document = await server.open_document(path)
            return await ask(server, files, await _find_target(server, files, document, query))

        return await self._ask_about_file(query.path, ask_in_file)

    async def _ask_by_name(
        self,
        symbol: str,
        ask: Callable[[RunningLanguageServer, _AnswerFiles, _SymbolPosition], Awaitable[_T]],
        choose: Callable[[RunningLanguageServer, _AnswerFiles, Sequence[SymbolEntry], str], Awaitable[_T]] | None,
    ) -> _T:
        refusals: list[ToolError] = []
        name = _last_name(symbol)

        async def ask_named(server: RunningLanguageServer, files: _AnswerFiles) -> _T:
            entries, incomplete = await _find_named_entries(server, files, symbol)
            if not entries:
                raise _unknown_symbol(symbol, incomplete)
            if len(entries) > 1 and choose is not None:
                return await choose(server, files, entries, incomplete)
            if len(entries) > 1:
                raise _ambiguous_symbol(symbol, await asyncio.to_thread(_make_symbols, files, entries))
            document = await server.open_document(entries[0].path)
            span = _find_name_span(entries[0], document.lines, server)
            if span[0] >= len(document.lines):
                raise _unknown_symbol(symbol, incomplete)
            line = document.lines[span[0]]
            column = convert_offset_to_column(line, span[1], server.encoding)
            return await ask(server, files, _SymbolPosition(document, span[0], column))

        for definition, ground in await self._list_present_languages():
            try:
                return await self._ask_server(definition, ground, ask_named)
            except ToolError as error:
                if error.kind not in ("unavailable", "timeout") and error.data != {"unknown": name}:
                    raise
                refusals.append(error)
        if not refusals:
            raise ToolError(
                "The workspace has no file of a language with a server. Use grep, or ask the user to add the language to "
                "[language_servers].",
                kind="unavailable",
            )
        unknown = [one for one in refusals if one.data is not None]
        raise ToolError((unknown or refusals)[0].text, kind=(unknown or refusals)[0].kind)

    async def _search_symbols(self, name: str) -> SymbolQueryResult:
        async def ask(server: RunningLanguageServer, files: _AnswerFiles) -> SymbolQueryResult:
            result, incomplete = await server.ask_all("workspace/symbol", {"query": _last_name(name)})
            symbols = await asyncio.to_thread(_make_symbols, files, list(parse_symbol_entries(result)))
            return SymbolQueryResult(symbols, _make_quality(server, files, incomplete))

        answers: list[SymbolQueryResult] = []
        refusals: list[ToolError] = []
        for definition, ground in await self._list_present_languages():
            try:
                answers.append(await self._ask_server(definition, ground, ask))
            except ToolError as error:
                refusals.append(error)
        if not answers:
            raise (
                refusals[0]
                if refusals
                else ToolError("The workspace has no file of a language with a server. Use grep.", kind="unavailable")
            )
        reasons = [one.quality.incomplete_reason for one in answers] + [one.text for one in refusals]
        return SymbolQueryResult(
            tuple(symbol for one in answers for symbol in one.symbols),
            ResultCompleteness(
                tuple(name for one in answers for name in one.quality.servers),
                next(filter(None, reasons), ""),
                sum(one.quality.hidden_count for one in answers),
            ),
        )

    async def _list_present_languages(self) -> list[tuple[LanguageDefinition, LanguageServerEnvironment]]:
        """Return the languages of the workspace's files, the most frequent first, with one file's project each."""
        files = WorkspaceFileSnapshot(self._roots.workspace, lambda _: False)
        await asyncio.to_thread(files.look)
        counts: dict[str, int] = {}
        first: dict[str, tuple[LanguageDefinition, str]] = {}
        for path in sorted(files.stamps, key=lambda one: (one.count("/"), one)):
            if (definition := self._pool.find_language_of_file(path)) is not None:
                counts[definition.language] = counts.get(definition.language, 0) + 1
                first.setdefault(definition.language, (definition, path))
        ordered = sorted(first.values(), key=lambda one: -counts[one[0].language])
        return [(one, self._make_server_environment(one, self._roots.workspace, path)) for one, path in ordered]

    async def _open_unindexed_files(self, server: RunningLanguageServer, target: _SymbolPosition) -> str:
        """Open the files that have the name of a symbol, if the server knows only open files; return what is left out."""
        definition = server.definition
        root = server.files.root
        if not definition.index_files or any(os.path.exists(f"{root}/{name}") for name in definition.index_files):  # noqa: PTH110
            return ""
        line = target.document.lines[target.line]
        end = target.column
        while end < len(line) and (line[end].isalnum() or line[end] == "_"):
            end += 1
        paths = await asyncio.to_thread(_find_files_with, server, line[target.column : end], _MAX_OPENED_FILES + 1)
        for path in paths[:_MAX_OPENED_FILES]:
            await server.open_document(path)
        for path in paths[:_MAX_OPENED_FILES]:  # an answer for a document shows that the server has read it
            await server.ask("textDocument/documentSymbol", {"textDocument": {"uri": server.documents[path].uri}})
        return (
            f"{server.name} found no {definition.index_files[0]}, so it knows at most {_MAX_OPENED_FILES} files with this name, and "
            "may miss declarations in headers. Ask the user to create that file"
        )


async def _check_declaration(server: RunningLanguageServer, files: _AnswerFiles, target: _SymbolPosition) -> None:
    """Check that the call may see where a symbol is declared: a hover shows text from there.

    :raises ToolError: ``denied`` if it may not
    """
    try:
        result = await server.ask("textDocument/definition", target.build_position_params(server))
    except ServerErrorResponse:
        return  # it knows no declarations, so it shows none
    if any(files.locate(path) is None for path, _ in parse_locations(result)):
        raise ToolError("The symbol is declared in a file that a rule hides. Use another symbol.", kind="denied")


def _make_quality(server: RunningLanguageServer, files: _AnswerFiles, incomplete: str) -> ResultCompleteness:
    return ResultCompleteness((server.name,), incomplete, files.hidden_count)


def _last_name(symbol: str) -> str:
    return symbol.strip().replace("::", ".").rpartition(".")[2]


def _unknown_symbol(symbol: str, incomplete: str) -> ToolError:
    more = f" {incomplete}." if incomplete else ""
    return ToolError(
        f"No symbol `{symbol[:200]}` was found in the workspace.{more} Check the name, or use grep, then pass `path` and `line`.",
        kind="invalid_input",
        data={"unknown": _last_name(symbol)},
    )


def _ambiguous_symbol(symbol: str, found: Sequence[CodeSymbol]) -> ToolError:
    shown = ", ".join(
        f"{one.location.path}:{one.location.line} ({one.kind}{f' in {one.container}' if one.container else ''})"
        for one in found[:_MAX_CANDIDATES]
    )
    more = f" and {len(found) - _MAX_CANDIDATES} more" if len(found) > _MAX_CANDIDATES else ""
    return ToolError(
        f"`{symbol[:200]}` is the name of {len(found)} symbols: {shown}{more}. Pass `path` and `line` of the one that you mean.",
        kind="invalid_input",
    )


async def _list_document_symbols(server: RunningLanguageServer, document: OpenDocument) -> list[SymbolEntry]:
    result = await server.ask("textDocument/documentSymbol", {"textDocument": {"uri": document.uri}})
    return list(parse_symbol_entries(result, document.path))


async def _find_target(
    server: RunningLanguageServer, files: _AnswerFiles, document: OpenDocument, query: SymbolQuery
) -> _SymbolPosition:
    """Return the place that a query means in its file.

    :raises ToolError: ``invalid_input`` if there is none, or several
    """
    located = files.locate(document.path)
    shown = document.path if located is None else located.display_path
    if query.line is None:
        if not query.symbol:
            raise ToolError("The symbol is missing. Pass `line`, `symbol` or both.", kind="invalid_input")
        return await _find_symbol_in_file(server, files, document, query.symbol, shown)
    if not 0 < query.line <= len(document.lines):
        count = len(document.lines) - (not document.lines[-1])  # the text after the last line end is no line
        raise ToolError(
            f"`line` is not in {shown}: {query.line}. The file has {count:,} lines. Pass one of them.",
            kind="invalid_input",
        )
    line = query.line - 1
    text = document.lines[line]
    if query.symbol:
        if (column := next(find_whole_word_positions(text, _last_name(query.symbol)), None)) is None:
            raise ToolError(
                f"`{query.symbol[:200]}` is not in line {query.line} of {shown}: {text.strip()[:200]!r}. Pass the line that has it.",
                kind="invalid_input",
            )
        return _SymbolPosition(document, line, column)
    entries = [one for one in await _list_document_symbols(server, document) if one.is_name and one.span[0] == line]
    if not entries:
        raise ToolError(
            f"Line {query.line} of {shown} defines no symbol: {text.strip()[:200]!r}. Pass `symbol`, the name in that line.",
            kind="invalid_input",
        )
    return _SymbolPosition(document, line, convert_offset_to_column(text, entries[0].span[1], server.encoding))


async def _find_symbol_in_file(
    server: RunningLanguageServer, files: _AnswerFiles, document: OpenDocument, symbol: str, shown: str
) -> _SymbolPosition:
    entries = [one for one in await _list_document_symbols(server, document) if one.matches_qualified_name(symbol)]
    if len(entries) > 1:
        raise _ambiguous_symbol(symbol, await asyncio.to_thread(_make_symbols, files, entries))
    if entries:
        span = _find_name_span(entries[0], document.lines, server)
        if span[0] < len(document.lines):
            text = document.lines[span[0]]
            return _SymbolPosition(document, span[0], convert_offset_to_column(text, span[1], server.encoding))
    for number, text in enumerate(document.lines):
        for column in find_whole_word_positions(text, _last_name(symbol)):
            return _SymbolPosition(document, number, column)
    raise ToolError(
        f"`{symbol[:200]}` is not in {shown}. Check the name, or leave `path` out to search the workspace.",
        kind="invalid_input",
    )


async def _find_named_entries(
    server: RunningLanguageServer, files: _AnswerFiles, symbol: str
) -> tuple[list[SymbolEntry], str]:
    """Return the symbols of the workspace with a name, and why some may be missing.

    If the server's search finds none, a file that has the name is asked where it is defined.
    """
    name = _last_name(symbol)
    found: list[SymbolEntry] = []
    incomplete = ""
    try:
        result, incomplete = await server.ask_all("workspace/symbol", {"query": name})
        found = [one for one in parse_symbol_entries(result) if one.matches_qualified_name(symbol)]
    except ServerErrorResponse:
        pass  # it has no such search
    if (own := _keep_visible_entries(files, _drop_declarations(found), server)) or not name:
        return own, incomplete
    defined: list[SymbolEntry] = []
    used: list[_SymbolPosition] = []
    for path in await asyncio.to_thread(_find_files_with, server, name, _MAX_SEARCHED_FILES):
        document = await server.open_document(path)
        entries = await _list_document_symbols(server, document)
        defined += [one for one in entries if one.matches_qualified_name(symbol)]
        places = ((number, find_whole_word_positions(text, name)) for number, text in enumerate(document.lines))
        first = next(((number, column) for number, columns in places for column in columns), None)
        used += [] if first is None else [_SymbolPosition(document, *first)]
    if own := _keep_visible_entries(files, _drop_declarations(defined), server):
        return own, incomplete
    for position in used:
        result = await server.ask("textDocument/definition", position.build_position_params(server))
        entries = [SymbolEntry(name, None, where, span, True, "") for where, span in parse_locations(result)]
        if own := _keep_visible_entries(files, entries, server):
            return own, incomplete
    return [], incomplete


def _drop_declarations(entries: Sequence[SymbolEntry]) -> Sequence[SymbolEntry]:
    """Return the entries without those in headers of C, if others are left."""
    return [one for one in entries if one.path.rpartition(".")[2] not in _HEADERS] or entries


def _keep_visible_entries(
    files: _AnswerFiles, entries: Iterable[SymbolEntry], server: RunningLanguageServer
) -> list[SymbolEntry]:
    """Return the entries in files that the call may see, each place once."""
    kept: dict[tuple[str, int, int], SymbolEntry] = {}
    for one in entries:
        if (located := files.locate(one.path)) is None or not located.is_inside:
            continue
        one.path = located.absolute
        span = _find_name_span(one, files.read_lines(one.path), server)
        kept.setdefault((one.path, span[0], span[1]), one)
    return list(kept.values())


def _find_name_span(entry: SymbolEntry, lines: Sequence[str], server: RunningLanguageServer) -> _Span:
    """Return where the name of a symbol is, within the span of its declaration."""
    line, offset, last, _ = entry.span
    if entry.is_name or line >= len(lines):
        return entry.span
    name = entry.name.partition("(")[0].replace("::", ".").rpartition(".")[2]
    start = convert_offset_to_column(lines[line], offset, server.encoding)
    for number in range(line, min(max(last, line) + 1, line + _NAME_LINES, len(lines))):
        for column in find_whole_word_positions(lines[number], name):
            if number > line or column >= start:
                found = convert_column_to_offset(lines[number], column, server.encoding)
                return number, found, number, found + len(name)
    return entry.span


def _find_files_with(server: RunningLanguageServer, word: str, most: int) -> list[str]:
    wanted = word.encode()
    found: list[str] = []
    for path in sorted(server.files.stamps):
        if not server.definition.matches_file_name(path):
            continue
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
                content = file.read(1 << 22)
        except OSError:
            continue
        if wanted in content and any(True for _ in find_whole_word_positions(content.decode("utf-8", "replace"), word)):
            found.append(path)
            if len(found) >= most:
                break
    return found


def _make_symbols(files: _AnswerFiles, entries: Iterable[SymbolEntry]) -> tuple[CodeSymbol, ...]:
    found: list[CodeSymbol] = []
    for one in entries:
        located = files.locate(one.path)
        lines = files.read_lines(located.absolute) if located is not None and located.is_inside else ()
        location = files.make_visible_location(one.path, _find_name_span(one, lines, files.server))
        if location is not None:
            found.append(CodeSymbol(one.name, one.kind, location, one.container))
    return tuple(found)


def _make_diagnostics(files: _AnswerFiles, document: OpenDocument, found: Iterable[Any]) -> tuple[CodeDiagnostic, ...]:
    kept: list[CodeDiagnostic] = []
    for one in found:
        fields = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
        span = parse_protocol_range(fields.get("range"))
        message = fields.get("message")
        if span is None or not isinstance(message, str):
            continue
        if (location := files.make_visible_location(document.path, span)) is None:
            continue
        severity, code = fields.get("severity"), fields.get("code")
        number = severity if isinstance(severity, int) and 0 < severity <= len(_SEVERITIES) else 1
        kept.append(
            CodeDiagnostic(
                _SEVERITIES[number - 1], message, location, str(code) if isinstance(code, (str, int)) else ""
            )
        )
    return tuple(sorted(kept, key=lambda one: (one.location.line, one.location.column)))


def _make_rename_edits(files: _AnswerFiles, edits: dict[str, list[tuple[_Span, str]]]) -> tuple[RenameEdit, ...]:
    """Return one edit for each line that changes."""
    found: list[RenameEdit] = []
    for path, several in sorted(edits.items()):
        by_line: dict[int, list[tuple[_Span, str]]] = {}
        for span, text in several:
            by_line.setdefault(span[0], []).append((span, text))
        for line, changes in sorted(by_line.items()):
            if (location := files.make_visible_location(path, min(changes)[0])) is None:
                continue
            lines = files.read_lines(path) if location.text is not None else ()
            new = lines[line] if line < len(lines) else ""
            for span, text in sorted(changes, reverse=True):
                start = convert_offset_to_column(new, span[1], files.server.encoding)
                end = convert_offset_to_column(new, span[3], files.server.encoding) if span[2] == line else len(new)
                new = f"{new[:start]}{text}{new[end:]}"
            found.append(RenameEdit(location, new[:_MAX_LINE]))
    return tuple(found)
