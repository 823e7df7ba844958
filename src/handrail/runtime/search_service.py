"""The search service of the runtime: ripgrep in the sandbox, each result authorised and verified.

The sandbox contains only the roots. Files that rules hide are masked, except those that this very call may read. Ripgrep
opens files by the names that it listed before. So each result is verified afterwards (:mod:`handrail.runtime.ripgrep`): the
authorised file, opened without links, must hold the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, ProgramSpec, Sandbox, SandboxProfile
from handrail.contract.services.file_services import (
    FileSearchResult,
    FileSurvey,
    LineMatch,
    RankedFile,
    ResolvedPath,
    SearchOmission,
    SurveyedFile,
)
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import AccessCheck, CapabilitySet
from handrail.origins.listed_paths import is_name_folding_folder
from handrail.origins.program_lookup import ProgramRefused, find_program
from handrail.runtime.files import secure_open
from handrail.runtime.files.session_roots import SessionRoots, is_beneath
from handrail.runtime.guard.guarded_sandbox import GuardedProcess
from handrail.runtime.repository_index import (
    HISTORY_ARGUMENTS,
    HISTORY_ENVIRONMENT,
    MAX_TEXT_BYTES,
    CommitHistory,
    IndexedFileState,
    RepositoryWordIndex,
    decode_text,
    outline,
    parse_history,
)
from handrail.runtime.ripgrep import (
    HiddenFileRecord,
    RipgrepOutputParser,
    SearchPathFilter,
    UnverifiedMatch,
    build_arguments_for_encoding,
    build_encoding_probe_arguments,
    build_files_arguments,
    build_grep_arguments,
    escape_brackets_in_file_names,
    filter_verified_matches,
    find_ripgrep,
    group_by_encoding,
    has_dot_component,
    is_searchable_encoding,
    make_ripgrep_exit_error,
    split_complete_names,
    stat_regular_unlinked_files,
)

_PIECE = 64 * 1024
_SORTED_AT_ONCE = 10_000
_MOST_PROBED = 2_000
"""The most files whose encoding is looked at for one search."""
_FILES_AT_ONCE = 200
_EXPLANATION_TIMEOUT_S = 10.0
"""How long a search without results may look for the reason."""
_MOST_LISTED = 200_000
"""How many files are listed for it."""
_HISTORY_TIMEOUT_S = 5.0
"""How long a survey waits for the commits of a large repository."""
_MAX_HISTORY_BYTES = 16 * 1024 * 1024
_MOST_SURVEYED = 50_000
"""How many files one survey lists."""
_T = TypeVar("_T")


class _ArgumentBuilder(Protocol):
    def __call__(self, wanted: SearchPathFilter, *, names_only: bool = False) -> Sequence[str]: ...


class RipgrepSearch:
    """A search service that implements :class:`handrail.contract.services.file_services.SearchService` with ripgrep.

    :param profile: of the session; the search runs with a read-only workspace
    :param may: evaluates ``fs.read`` for the canonical path of each file with a result
    :param hidden: the hidden files that the session has met
    :param index: the words of files that earlier surveys have read
    """

    def __init__(
        self,
        roots: SessionRoots,
        sandbox: Sandbox,
        profile: SandboxProfile,
        capabilities: CapabilitySet,
        may: AccessCheck,
        hidden: HiddenFileRecord,
        index: RepositoryWordIndex | None = None,
    ) -> None:
        self._index = index or RepositoryWordIndex()
        self._roots = roots
        self._sandbox = sandbox
        self._profile = profile
        self._capabilities = capabilities
        self._may = may
        self._hidden = hidden

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        hidden: bool = False,
        ignored: bool = False,
        max_matches: int = 10_000,
    ) -> FileSearchResult:
        place = self._resolve_target(path)
        if place.file is not None:
            self._check_readable(place.file)
        wanted = SearchPathFilter(hidden=hidden or place.file is not None, ignores="none" if ignored else "all")
        if glob is not None:
            any_case = is_name_folding_folder(place.folder.absolute)
            glob = escape_brackets_in_file_names(glob, place.folder.absolute)
            wanted = SearchPathFilter.parse(
                glob, hidden=wanted.hidden, ignored=ignored, anywhere=True, any_case=any_case
            )
            place, wanted = self._enter_named_folder(place, wanted)

        def build(wanted: SearchPathFilter, *, names_only: bool = False) -> Sequence[str]:
            return build_grep_arguments(
                pattern, wanted, ignore_case=ignore_case, literal=literal, target=place.target, names_only=names_only
            )

        hits, unsearched = await self._find_lines(place, wanted, build(wanted), max_matches, pattern)
        if hits:
            found = await _run_in_thread(lambda: _collect_matches(hits, max_matches))
        else:
            found = await self._explain_no_lines(place, wanted, build, max_matches, pattern)
        return dataclasses.replace(found, unsearched_count=unsearched)

    async def _find_lines(
        self, place: _SearchTarget, wanted: SearchPathFilter, arguments: Sequence[str], max_matches: int, pattern: str
    ) -> tuple[list[UnverifiedMatch], int]:
        """Return the matches, and how many files have an encoding that ripgrep does not know."""
        judge = _ShownFileFilter(self._roots, self._may, self._hidden, place.folder.absolute)
        records = RipgrepOutputParser()
        hits: list[UnverifiedMatch] = []

        def look(piece: bytes) -> None:
            reported: list[UnverifiedMatch] = []
            for found in records.feed(piece):
                located = judge.resolve_visible_path(found.path, wanted)
                if located is None or (
                    found.raw_path != found.path and judge.resolve_visible_path(found.raw_path, None) is None
                ):
                    continue
                reported.append(UnverifiedMatch(located, found.line, found.column, found.offset, found.text))
            hits.extend(islice(filter_verified_matches(reported, self._hidden, self._may), max_matches + 1 - len(hits)))

        async with contextlib.aclosing(self._stream_output(place, arguments, records)) as output:
            async for piece in output:
                await _run_in_thread(lambda piece=piece: look(piece))
                if len(hits) > max_matches:
                    break
        unsearched = 0
        if not hits or not pattern.isascii() or place.file is not None or any(hit.encoding for hit in hits):
            others, unsearched = await self._search_other_encodings(place, wanted, judge, arguments, max_matches)
            searched_again = {hit.located for hit in others}
            hits[:] = [*(hit for hit in hits if hit.located not in searched_again), *others]
        return hits, unsearched

    async def _search_other_encodings(
        self,
        place: _SearchTarget,
        wanted: SearchPathFilter,
        judge: _ShownFileFilter,
        arguments: Sequence[str],
        max_matches: int,
    ) -> tuple[list[UnverifiedMatch], int]:
        """Search the text files that are not in UTF-8, and return how many have an encoding that ripgrep does not know."""
        records = RipgrepOutputParser()
        files: dict[str, ResolvedPath] = {} if place.file is None else {place.target: place.file}
        hits: list[UnverifiedMatch] = []

        def list_files(piece: bytes) -> None:
            names, records.rest = split_complete_names(records.rest, piece)
            for raw in names:
                located = judge.resolve_visible_path(raw, wanted if wanted.patterns else None)
                if located is not None and len(files) < _MOST_PROBED:
                    files[os.fsdecode(raw)] = located

        if place.file is None:
            probe = build_encoding_probe_arguments(wanted, place.target)
            async with contextlib.aclosing(self._stream_output(place, probe, records)) as output:
                async for piece in output:
                    await _run_in_thread(lambda piece=piece: list_files(piece))
        groups = await _run_in_thread(lambda: group_by_encoding(files, self._hidden, self._may))
        unsearched = sum(len(group) for encoding, group in groups.items() if not is_searchable_encoding(encoding))
        for encoding, group in groups.items():
            names = list(group) if is_searchable_encoding(encoding) else []
            for at in range(0, len(names), _FILES_AT_ONCE):
                records = RipgrepOutputParser()
                chosen = build_arguments_for_encoding(arguments, encoding, names[at : at + _FILES_AT_ONCE])
                async with contextlib.aclosing(self._stream_output(place, chosen, records)) as output:
                    async for piece in output:
                        reported = [
                            UnverifiedMatch(group[name], found.line, found.column, found.offset, found.text, encoding)
                            for found in records.feed(piece)
                            if (name := os.fsdecode(found.path)) in group
                        ]
                        left = max(0, max_matches + 1 - len(hits))
                        kept = islice(filter_verified_matches(reported, self._hidden, self._may), left)
                        hits += await _run_in_thread(lambda kept=kept: list(kept))
        return hits, unsearched

    async def _explain_no_lines(
        self, place: _SearchTarget, wanted: SearchPathFilter, build: _ArgumentBuilder, max_matches: int, pattern: str
    ) -> FileSearchResult:
        """Return a result without matches that says what was searched, or the matches of a named ignored folder."""
        count: int | None = None
        omissions: Counter[str] = Counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXPLANATION_TIMEOUT_S):
                if place.file is None:
                    listed = await self._list_shown(place, build_files_arguments(wanted), wanted)
                    if not listed and place.is_named and wanted.ignores == "all":
                        wanted = dataclasses.replace(wanted, ignores="below")
                        if listed := await self._list_shown(place, build_files_arguments(wanted), wanted):
                            hits, _ = await self._find_lines(place, wanted, build(wanted), max_matches, pattern)
                            if hits:
                                return await _run_in_thread(lambda: _collect_matches(hits, max_matches))
                else:
                    listed = {place.file.absolute} if wanted.matches(Path(place.file.absolute).name) else set[str]()
                count = len(listed)
                whole = dataclasses.replace(wanted, hidden=True, ignores="none")
                for one in await self._list_shown(place, build(whole, names_only=True), whole):
                    omissions["binary" if one in listed else self._classify_omission(place, wanted, one)] += 1
                if not omissions and not listed and wanted.patterns and not wanted.negated:
                    start = len(place.folder.absolute.rstrip("/")) + 1
                    every = dataclasses.replace(wanted, patterns=(), compiled=())
                    for one in await self._list_shown(place, build(every, names_only=True), every):
                        if (why := wanted.find_near_match_reason(one[start:])) is not None:
                            omissions[why] += 1
        return FileSearchResult(searched_count=count, omissions=omissions)

    async def glob(
        self, pattern: str, path: str = ".", *, hidden: bool = False, ignored: bool = False, max_paths: int = 100_000
    ) -> FileSearchResult:
        place = self._resolve_target(path)
        if place.file is not None:
            raise ToolError(
                f"`{place.file.display_path}` is a file. glob lists folders. Use read to see a file.",
                kind="invalid_input",
            )
        any_case = is_name_folding_folder(place.folder.absolute)
        pattern = escape_brackets_in_file_names(pattern, place.folder.absolute)
        wanted = SearchPathFilter.parse(pattern, hidden=hidden, ignored=ignored, any_case=any_case)
        place, wanted = self._enter_named_folder(place, wanted)
        found = await self._find_paths(place, wanted, max_paths)
        return found if found.paths or found.denied_count else await self._explain_no_paths(place, wanted, max_paths)

    async def _find_paths(self, place: _SearchTarget, wanted: SearchPathFilter, max_paths: int) -> FileSearchResult:
        judge = _ShownFileFilter(self._roots, self._may, self._hidden, place.folder.absolute)
        records = RipgrepOutputParser()
        paths: list[str] = []

        def look(piece: bytes) -> int:
            """Add the paths in a piece of output, and give how many of it may not be shown."""
            found, records.rest = split_complete_names(records.rest, piece)
            judged = [
                judge.resolve_visible_path(raw, None)
                for raw in found
                if wanted.matches(os.fsdecode(raw.removeprefix(b"./")))
            ]
            there = [one for one in judged if one is not None]
            found_files = stat_regular_unlinked_files(there)
            paths.extend(one.display_path for one, _ in islice(found_files, max_paths + 1 - len(paths)))
            return len(judged) - len(there)

        skipped = 0
        async with contextlib.aclosing(self._stream_output(place, build_files_arguments(wanted), records)) as output:
            async for piece in output:
                skipped += await _run_in_thread(lambda piece=piece: look(piece))
                if len(paths) > max_paths:
                    break
        more = len(paths) > max_paths
        shown = await _run_in_thread(lambda: tuple(_sort_paths(paths[:max_paths])))
        return FileSearchResult(paths=shown, is_truncated=more, denied_count=skipped)

    async def _explain_no_paths(
        self, place: _SearchTarget, wanted: SearchPathFilter, max_paths: int
    ) -> FileSearchResult:
        """Return a result without paths that says what was searched, or the paths of a named ignored folder."""
        count: int | None = None
        omissions: Counter[str] = Counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXPLANATION_TIMEOUT_S):
                listed = await self._list_shown(place, build_files_arguments(wanted, by_name=False), None)
                if not listed and place.is_named and wanted.ignores == "all":
                    wanted = dataclasses.replace(wanted, ignores="below")
                    if (found := await self._find_paths(place, wanted, max_paths)).paths:
                        return found
                    listed = await self._list_shown(place, build_files_arguments(wanted, by_name=False), None)
                count = len(listed)
                whole = dataclasses.replace(wanted, hidden=True, ignores="none")
                start = len(place.folder.absolute.rstrip("/")) + 1
                for one in await self._list_shown(place, build_files_arguments(whole, by_name=False), None):
                    if whole.matches(one[start:]):
                        omissions[self._classify_omission(place, wanted, one)] += 1
                    elif one in listed and (why := wanted.find_near_match_reason(one[start:])) is not None:
                        omissions[why] += 1
        return FileSearchResult(searched_count=count, omissions=omissions)

    async def survey_files(
        self, path: str = ".", *, focus: str = "", limit: int = 10, read_names: Sequence[str] = ()
    ) -> FileSurvey:
        place = self._resolve_target(path)
        if place.file is not None:
            text = f"`{place.file.display_path}` is a file. A folder was expected. Use read to see a file."
            raise ToolError(text, kind="invalid_input")
        wanted = SearchPathFilter()
        history_task = asyncio.ensure_future(self._load_history(place, wanted=bool(focus)))
        try:
            found, denied, more = await self._list_files(place, wanted)
            if not found and place.is_named:
                found, denied, more = await self._list_files(place, dataclasses.replace(wanted, ignores="below"))
            history = await history_task
        finally:
            history_task.cancel()  # if the list failed; git must not outlive the call
            await asyncio.wait((history_task,))
        return await _run_in_thread(
            lambda: self._survey(place, found, focus, limit, frozenset(read_names), denied, more, history)
        )

    async def _load_history(self, place: _SearchTarget, *, wanted: bool) -> CommitHistory | None:
        """Return the commits of the repository that a folder is in; None without one, without a sandbox, or if git fails.

        git reads the configuration of the repository, so it runs only in the sandbox, with a read-only workspace.
        """
        folder = place.folder.absolute
        if not wanted or not self._sandbox.tier.is_confining:
            return None
        state = await _run_in_thread(lambda: _read_branch_state(place.folder))
        if state is not None and (known := self._index.find_history(folder, state)) is not None:
            return known
        output = bytearray()
        try:
            program = find_program("git", outside=(self._roots.workspace,))
            async with asyncio.timeout(_HISTORY_TIMEOUT_S):
                process = await self._start_confined(place, program, HISTORY_ARGUMENTS, HISTORY_ENVIRONMENT)
                try:
                    while len(output) < _MAX_HISTORY_BYTES and (piece := await process.read(_PIECE)):
                        output += piece
                finally:
                    await asyncio.shield(asyncio.ensure_future(process.kill()))
        except TimeoutError:
            pass  # the newest commits are there
        except (ProgramRefused, ToolError, OSError):
            return None  # the overview is complete without it, and the next one tries again
        commits = await _run_in_thread(lambda: list(parse_history(bytes(output))))
        return await _run_in_thread(lambda: self._index.index_history(folder, state, commits))

    async def _list_files(
        self, place: _SearchTarget, wanted: SearchPathFilter
    ) -> tuple[list[tuple[ResolvedPath, os.stat_result]], int, bool]:
        """Return the files below a folder, how many may not be read, and whether there are more."""
        judge = _ShownFileFilter(self._roots, self._may, self._hidden, place.folder.absolute)
        records = RipgrepOutputParser()
        files: list[tuple[ResolvedPath, os.stat_result]] = []

        def look(piece: bytes) -> int:
            names, records.rest = split_complete_names(records.rest, piece)
            judged = [judge.resolve_visible_path(raw, None) for raw in names]
            there = [one for one in judged if one is not None]
            files.extend(
                (one, status)
                for one, status in stat_regular_unlinked_files(there)
                if self._hidden.explain_read_refusal(status, one, self._may) is None
            )
            return len(judged) - len(there)

        denied = 0
        async with contextlib.aclosing(self._stream_output(place, build_files_arguments(wanted), records)) as output:
            async for piece in output:
                denied += await _run_in_thread(lambda piece=piece: look(piece))
                if len(files) > _MOST_SURVEYED:
                    break
        return files[:_MOST_SURVEYED], denied, len(files) > _MOST_SURVEYED

    def _survey(
        self,
        place: _SearchTarget,
        found: list[tuple[ResolvedPath, os.stat_result]],
        focus: str,
        limit: int,
        read_names: frozenset[str],
        denied: int,
        more: bool,
        history: CommitHistory | None,
    ) -> FileSurvey:
        """Index what has changed, and rank the files. Blocks, so call it in a thread."""
        top = len(place.folder.absolute.rstrip("/")) + 1
        below = len(place.folder.root or "") + 1
        states = [(one.absolute, one.absolute[below:], IndexedFileState.of(status)) for one, status in found]
        is_full = self._index.update(states, lambda index: self._read_beginning(found[index][0]))
        located = {one.absolute: one for one, _ in found}
        ranked: list[RankedFile] = []
        texts: dict[str, str] = {}
        for absolute, score in self._index.rank(list(located), focus, limit, history) if focus else ():
            text = decode_text(self._read_beginning(located[absolute]) or b"")
            entries = () if text is None else tuple(outline(absolute, text))
            ranked.append(RankedFile(located[absolute].display_path, score, entries))
        for absolute, one in located.items():
            if absolute[top:] in read_names:
                texts[absolute[top:]] = decode_text(self._read_beginning(one) or b"") or ""
        files = sorted(SurveyedFile(one.display_path, self._index.count_lines(one.absolute)) for one, _ in found)
        return FileSurvey(
            place.folder.display_path, tuple(files), tuple(ranked), texts, denied, more, is_partial=is_full
        )

    def _read_beginning(self, located: ResolvedPath) -> bytes | None:
        """Return the first bytes of a file; None if it cannot be read, or may not be read any more."""
        try:
            descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            if self._hidden.explain_read_refusal(status, located, self._may) is not None:
                return None
            return os.pread(descriptor, MAX_TEXT_BYTES, 0)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    async def _list_shown(
        self, place: _SearchTarget, arguments: Sequence[str], wanted: SearchPathFilter | None
    ) -> set[str]:
        """Return the files that ripgrep lists with these arguments, as far as they may be shown."""
        judge = _ShownFileFilter(self._roots, self._may, self._hidden, place.folder.absolute)
        records = RipgrepOutputParser()
        listed: set[str] = set()

        def look(piece: bytes) -> None:
            found, records.rest = split_complete_names(records.rest, piece)
            located = (judge.resolve_visible_path(raw, wanted) for raw in found)
            listed.update(one.absolute for one in located if one is not None)

        async with contextlib.aclosing(self._stream_output(place, arguments, records)) as output:
            async for piece in output:
                await _run_in_thread(lambda piece=piece: look(piece))
                if len(listed) > _MOST_LISTED:
                    raise TimeoutError
        return listed

    @staticmethod
    def _classify_omission(place: _SearchTarget, wanted: SearchPathFilter, absolute: str) -> SearchOmission:
        relative = absolute[len(place.folder.absolute.rstrip("/")) + 1 :]
        return "hidden" if has_dot_component(relative) and not wanted.hidden else "ignored"

    def _enter_named_folder(
        self, place: _SearchTarget, wanted: SearchPathFilter
    ) -> tuple[_SearchTarget, SearchPathFilter]:
        """Return the folder that the patterns name, and the filter below it.

        The folder may be hidden, ignored or a link, or be named by its absolute path.

        :raises ToolError: ``invalid_input`` if it is not below the folder of the search
        """
        if not (named := wanted.find_common_folder()) or place.file is not None:
            return place, wanted
        top = place.folder.absolute.rstrip("/")
        located = self._roots.resolve_path(named)
        if not (is_absolute := named.startswith("/")) or not located.is_inside:
            outside, located = located, self._roots.resolve_path(f"{top}/{named.lstrip('/')}")
            if not located.is_inside or (is_absolute and Path(outside.absolute).is_dir()):
                place_outside = outside if is_absolute else located
                raise ToolError(self._roots.explain_path_outside_roots(place_outside), kind="denied")
        if not located.is_inside or not Path(located.absolute).is_dir():
            return place, wanted
        if not is_beneath(located.absolute, place.folder.absolute):
            raise ToolError(
                f"The pattern leads to `{located.display_path}`, which is outside `{place.folder.display_path}`. Pass that "
                "folder in `path`, and a pattern relative to it.",
                kind="invalid_input",
            )
        return _SearchTarget(located, None, is_named=True), wanted.make_relative_to(named)

    def _resolve_target(self, path: str) -> _SearchTarget:
        located = self._roots.resolve_path(path)
        if not located.is_inside:
            raise ToolError(self._roots.explain_path_outside_roots(located), kind="denied")
        try:
            mode = Path(located.absolute).lstat().st_mode
        except OSError as error:
            raise secure_open.translate_os_error_for_model(error, located, "searching") from error
        if stat.S_ISDIR(mode):
            return _SearchTarget(located, None, is_named=located.absolute not in self._roots.writable)
        if not stat.S_ISREG(mode):
            raise secure_open.build_not_regular_file_error(located)
        return _SearchTarget(self._roots.locate_canonical_path(str(Path(located.absolute).parent)), located)

    def _check_readable(self, file: ResolvedPath) -> None:
        if (refusal := self._may("fs.read", file.absolute)) is not None:
            raise ToolError(refusal, kind="denied")

    async def _stream_output(
        self, place: _SearchTarget, arguments: Sequence[str], records: RipgrepOutputParser
    ) -> AsyncGenerator[bytes]:
        """Run ripgrep and yield its output in pieces; closing the generator ends ripgrep.

        :raises ToolError: if ripgrep reports an error
        """
        process = await self._start_ripgrep(place, arguments)
        try:
            while piece := await process.read(_PIECE):
                yield piece
            error = make_ripgrep_exit_error(await process.wait(), records.rest)
        finally:
            await asyncio.shield(asyncio.ensure_future(process.kill()))  # a second cancellation does not stop it
        if error is not None:
            raise error

    async def _start_ripgrep(self, place: _SearchTarget, arguments: Sequence[str]) -> _SearchProcess:
        confined = self._sandbox.tier.is_confining
        program = find_ripgrep(self._roots.workspace, confined=confined)
        if not confined:
            return await _DirectProcess.start(program, arguments, place.folder)
        return await self._start_confined(place, program, arguments, {})

    async def _start_confined(
        self, place: _SearchTarget, program: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> Process:
        """Start a program that reads the folder in the sandbox, with a read-only workspace and stderr in its output."""
        beside = [
            str(Path(one).parent)
            for one in dict.fromkeys((program, os.path.realpath(program)))
            if not is_beneath(one, "/usr")
        ]
        profile = dataclasses.replace(
            self._profile,
            workspace_writable=False,
            may_read=self._make_hidden_path_exemption(place),
            cwd=place.folder.absolute,
            readable=(*self._profile.readable, *beside),
            environment={**self._profile.environment, **environment},
        )
        program_run = ProgramSpec((program, *arguments), merge_stderr=True)
        process = await self._sandbox.start(self._capabilities, profile, program_run)
        if isinstance(process, GuardedProcess):
            self._hidden.record_hidden_files(process.profile.masked)
        return process

    def _make_hidden_path_exemption(self, place: _SearchTarget) -> Callable[[str], bool]:
        """Return a function that tells which hidden paths this search may read anyway.

        A rule about the tool, or the user's answer to this call, can allow that.
        """
        searched = (place.file or place.folder).absolute

        def shows(path: str) -> bool:
            if self._may("fs.read", path) is None:
                return True
            return is_beneath(searched, path) and self._may("fs.read", searched) is None

        return shows


def _read_branch_state(folder: ResolvedPath) -> object:
    """Return what changes with each commit in the repository that a folder is in; None if that is unknown."""
    parts = [] if folder.relative_path == "." else folder.relative_path.split("/")
    for count in range(len(parts), -1, -1):
        git = "/".join((*parts[:count], ".git"))
        try:
            head, _ = _read_start(folder, f"{git}/HEAD")
        except FileNotFoundError:
            continue
        except OSError:  # a linked work tree, or a link, whose repository may be elsewhere
            return None
        state: list[object] = [git, head]
        branch = os.fsdecode(head.removeprefix(b"ref: ").strip()) if head.startswith(b"ref: ") else ""
        # The journal of HEAD changes also if its branch is a link to another one. Some repositories keep branches in tables.
        for name in (branch, "packed-refs", "logs/HEAD", "reftable/tables.list"):
            try:
                state.append(_read_start(folder, f"{git}/{name}"))
            except (OSError, ValueError):
                state.append(None)
        return state
    return None


def _read_start(folder: ResolvedPath, relative: str) -> tuple[bytes, tuple[int, int]]:
    """Return the first bytes of a regular file below the root of a folder, with its time of change and size."""
    descriptor = secure_open.open_beneath(folder._replace(relative_path=relative), secure_open.READ_FLAGS)
    try:
        status = os.fstat(descriptor)
        start = os.pread(descriptor, 4096, 0) if stat.S_ISREG(status.st_mode) else b""
        return start, (status.st_mtime_ns, status.st_size)
    finally:
        os.close(descriptor)


class _SearchTarget(Struct, frozen=True):
    """The target of a search: a folder, and the one file in it if a file was named.

    :param is_named: whether the call names the folder, so that it is searched even if it is ignored
    """

    folder: ResolvedPath
    file: ResolvedPath | None
    is_named: bool = False

    @property
    def target(self) -> str:
        return "." if self.file is None else f"./{Path(self.file.absolute).name}"


class _ShownFileFilter:
    """A filter that decides once per file whether its results may be shown."""

    def __init__(self, roots: SessionRoots, may: AccessCheck, hidden: HiddenFileRecord, folder: str) -> None:
        self._roots = roots
        self._may = may
        self._hidden = hidden
        self._folder = folder.rstrip("/")
        self._known: dict[tuple[bytes, bool], ResolvedPath | None] = {}

    def resolve_visible_path(self, raw: bytes, wanted: SearchPathFilter | None) -> ResolvedPath | None:
        """Return the file at a reported path; None if it is not wanted or may not be shown."""
        key = (raw, wanted is None)
        if key in self._known:
            return self._known[key]
        path = os.fsdecode(raw.removeprefix(b"./"))
        absolute = f"{self._folder}/{path}"
        answer = None
        if wanted is None or wanted.matches(path):
            located = self._roots.locate_canonical_path(absolute)
            if located.is_inside and self._may("fs.read", absolute) is not None:
                self._hidden.record_hidden_files([absolute])
            elif located.is_inside:
                answer = located
        self._known[key] = answer
        return answer


def _collect_matches(hits: Sequence[UnverifiedMatch], most: int) -> FileSearchResult:
    matches = [
        LineMatch(
            hit.located.display_path,
            hit.line,
            hit.text.decode("utf-8", "replace").removesuffix("\r"),
            None if hit.encoding is None else hit.encoding.label,
        )
        for hit in hits[:most]
    ]
    matches.sort(key=lambda match: (match.path, match.line))
    return FileSearchResult(matches=tuple(matches), is_truncated=len(hits) > most)


def _sort_paths(paths: Sequence[str]) -> list[str]:
    """Return the paths sorted.

    One large sort would block the interpreter for too long. Sorting and merging parts takes a fraction of that time.
    """
    return sorted(
        path for at in range(0, len(paths), _SORTED_AT_ONCE) for path in sorted(paths[at : at + _SORTED_AT_ONCE])
    )


async def _run_in_thread(work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


class _SearchProcess(Protocol):
    async def read(self, max_bytes: int) -> bytes: ...

    async def wait(self) -> int: ...

    async def kill(self) -> None: ...


class _DirectProcess:
    """A ripgrep process without a sandbox. It starts no other process, so killing it ends all of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @staticmethod
    async def start(program: str, arguments: Sequence[str], folder: ResolvedPath) -> _DirectProcess:
        try:
            descriptor = secure_open.open_beneath(folder, secure_open.FOLDER_FLAGS)
        except OSError as error:
            raise secure_open.translate_os_error_for_model(error, folder, "searching") from error
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=f"/proc/self/fd/{descriptor}",
                env={"LC_ALL": "C.UTF-8"},
                start_new_session=True,
                limit=4 * _PIECE,
            )
        finally:
            os.close(descriptor)
        return _DirectProcess(process)

    async def read(self, max_bytes: int) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(max_bytes)

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            while await self.read(_PIECE):  # asyncio sees the end of a process only once its output is read to the end
                pass
            await self._process.wait()
