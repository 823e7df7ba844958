"""The database's shape, as the ordered steps that lead to it. A step that was shipped is never edited."""

from __future__ import annotations

APPLICATION_ID = 0x48_52_4C_31
"""Marks a file as ours in SQLite's own header ("HRL1")."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # Small values about the database itself; `written_by` names the version that last changed its shape.
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
        "INSERT INTO meta (key, value) VALUES ('token', 0), ('settled', 0), ('began', 0)",
        # The commit log. `seal` is commitment (32 bytes), hash (32), and salt (16, gone once redacted): one value,
        # since every value of a row costs the writer. Body and salt stand apart from what is hashed.
        """CREATE TABLE record (
            sequence INTEGER PRIMARY KEY,
            at_ns INTEGER NOT NULL,
            kind TEXT NOT NULL,
            session TEXT NOT NULL,
            call TEXT NOT NULL,
            seal BLOB NOT NULL,
            body BLOB
        )""",
        "CREATE INDEX record_by_call ON record (call) WHERE call <> ''",
        "CREATE INDEX record_by_session ON record (session) WHERE kind = 'proposed'",
        """CREATE TABLE session (
            id TEXT PRIMARY KEY,
            opened_ns INTEGER NOT NULL,
            closed_ns INTEGER,
            agent TEXT NOT NULL,
            topic TEXT,
            face TEXT NOT NULL,
            headless INTEGER NOT NULL,
            details BLOB NOT NULL
        ) WITHOUT ROWID""",
        # What tools remember in a session.
        """CREATE TABLE state (
            session TEXT NOT NULL,
            tool TEXT NOT NULL,
            key TEXT NOT NULL,
            value BLOB NOT NULL,
            PRIMARY KEY (session, tool, key)
        ) WITHOUT ROWID""",
    ),
)

VERSION = len(MIGRATIONS)
