"""Files and folders that nothing on record refers to any more: artifacts, sidecars, and what ended sessions left behind."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from handrail.store.folders import Folders, remove_tree
from handrail.store.inventory import tree_bytes

_REF = re.compile(rb"sha256:([0-9a-f]{64})")
_HEX = re.compile(r"[0-9a-f]+")
_OF_A_TOOL = "tool-"
"""Scratch folders of tools that stay up between calls; they belong to no session."""
_NOTE = ".removed"
"""Follows the name of a job's output that made room for others, in that of the note that says so."""
_PLAIN = ("record", "meta", "session")

Condition = tuple[str, list[str | int]]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Files and whole folders, and how many bytes are in them."""

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    bytes: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.files, *self.folders)

    def remove(self) -> list[str]:
        """Remove all of them, following no link; says what could not be."""
        problems: list[str] = []
        for file in self.files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                problems.append(f"{file}: {error.strerror or error}")
        for folder in self.folders:
            remove_tree(folder)
            if folder.exists():
                problems.append(f"{folder}: could not be removed")
        return problems


def leftovers(
    connection: sqlite3.Connection, folders: Folders, ending: Sequence[str], without: Condition | None = None
) -> Leftovers:
    """Look for them. No call may be running, or its output would look unreferred to.

    :param ending: sessions that count as gone
    :param without: records that count as gone
    """
    refs, outputs = _references(connection, folders, frozenset(ending), without)
    sessions = {str(row[0]) for row in connection.execute("SELECT id FROM session")} - set(ending)
    files: list[Path] = []
    whole: list[Path] = []
    for file in _files(folders.artifacts):
        digest = f"{file.parent.name}{file.name.removesuffix('.type')}"
        if digest not in refs:
            files.append(file)
    for part in ("output", "scratch"):
        for folder in _subfolders(folders.state / part / folders.key):
            if folder.name not in sessions and not (part == "scratch" and folder.name.startswith(_OF_A_TOOL)):
                whole.append(folder)
            elif part == "output":
                names = ((file, file.name.removesuffix(_NOTE)) for file in _plain_files(folder))
                files += (file for file, name in names if f"{folder.name}/{name}" not in outputs)
    size = sum(_size(file) for file in files) + sum(tree_bytes(folder) for folder in whole)
    return Leftovers(tuple(files), tuple(whole), size)


def tables_of_sessions(connection: sqlite3.Connection) -> Iterator[str]:
    """The tables, but the log, that keep something of sessions."""
    for table in _tables(connection):
        if table not in _PLAIN and "session" in _columns(connection, table):
            yield table


def _references(
    connection: sqlite3.Connection, folders: Folders, ending: frozenset[str], without: Condition | None
) -> tuple[set[str], set[str]]:
    """Hashes of the artifacts, and ``session/file`` of the outputs, that anything kept names."""
    outputs = str(folders.outputs)
    # A path as each of the two encoders of the log writes it.
    spellings = {json.dumps(outputs, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (True, False)}
    output = re.compile(b"(?:" + b"|".join(map(re.escape, sorted(spellings))) + rb")/([\w-]+/[\w.-]+)")
    refs: set[str] = set()
    named: set[str] = set()

    def look(value: object) -> None:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace") if isinstance(value, str) else b""
        refs.update(match.decode() for match in _REF.findall(raw))
        named.update(match.decode() for match in output.findall(raw))

    where, values = ("body IS NOT NULL", list[str | int]()) if without is None else (f"NOT ({without[0]})", without[1])
    for (body,) in connection.execute(f"SELECT body FROM record WHERE body IS NOT NULL AND {where}", values):  # noqa: S608
        look(body)
    for table in _tables(connection):
        columns = _columns(connection, table)
        if table in _PLAIN or not columns:
            continue
        owner = columns.index("session") if "session" in columns else None
        for row in connection.execute(f'SELECT * FROM "{table}"'):  # noqa: S608
            if owner is None or row[owner] not in ending:
                for value in row:
                    look(value)
    return refs, named


def _tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return [str(row[0]) for row in rows.fetchall() if '"' not in row[0]]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")')]


def _files(folder: Path) -> Iterator[Path]:
    for inner in _subfolders(folder):
        if len(inner.name) == 2 and _HEX.fullmatch(inner.name):
            yield from _plain_files(inner)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path, is_folder in _entries(folder) if is_folder]


def _plain_files(folder: Path) -> list[Path]:
    return [path for path, is_folder in _entries(folder) if not is_folder]


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError:
        return []


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0
