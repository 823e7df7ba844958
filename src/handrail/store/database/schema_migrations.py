"""The database's schema, as ordered migration steps. A step that was shipped is never edited."""

from __future__ import annotations

APPLICATION_ID = 0x48_52_4C_31
"""Marks a file as ours in SQLite's own header ("HRL1")."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # Small values about the database itself; `written_by` names the version that last changed its shape.
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
        "INSERT INTO meta (key, value) VALUES ('token', 0), ('settled', 0), ('began', 0)",
        # The commit log. A row holds one record, or the records of one call that were written at once: `kinds` are their
        # kinds, separated by spaces, and `sequence` is the number of the first. `seal` is the commitment to the body (32
        # bytes), and in the last row of a group the group's hash after it (32); `body` is a salt (16) and the JSON array
        # of the bodies, NULL once redacted. As few rows and values as can be, since each costs the writer.
        """CREATE TABLE record (
            sequence INTEGER PRIMARY KEY,
            at_ns INTEGER NOT NULL,
            kinds TEXT NOT NULL,
            session TEXT NOT NULL,
            call TEXT NOT NULL,
            seal BLOB NOT NULL,
            body BLOB
        )""",
        "CREATE INDEX record_by_call ON record (call) WHERE call <> ''",
        "CREATE INDEX record_of_generation ON record (kinds) WHERE kinds = 'generation'",
        "CREATE INDEX record_by_session ON record (session) WHERE substr(kinds, 1, 8) = 'proposed'",
        # Records about a session that readers add to its calls: who opened it, and what its model used.
        "CREATE INDEX record_about_session ON record (session, kinds) WHERE kinds IN ('session-opened', 'turn-finished')",
        """CREATE TABLE session (
            id TEXT PRIMARY KEY,
            opened_ns INTEGER NOT NULL,
            closed_ns INTEGER,
            agent TEXT NOT NULL,
            topic TEXT,
            frontend TEXT NOT NULL,
            headless INTEGER NOT NULL,
            details BLOB NOT NULL,
            used_ns INTEGER NOT NULL,
            lease_token INTEGER, -- the fencing token of the process that has it open
            parent_session TEXT, -- the session whose call began it, for a sub-agent's
            parent_call TEXT
        ) WITHOUT ROWID""",
        "CREATE INDEX session_by_parent ON session (parent_session) WHERE parent_session IS NOT NULL",
        # The messages of a session: one per row, in a form that no provider defines.
        """CREATE TABLE message (
            session TEXT NOT NULL,
            position INTEGER NOT NULL,
            at_ns INTEGER NOT NULL,
            body BLOB NOT NULL
        )""",
        "CREATE UNIQUE INDEX message_in_order ON message (session, position)",
        # Rules that a user's answers "for this session" stored.
        """CREATE TABLE session_rule (
            session TEXT NOT NULL,
            text TEXT NOT NULL,
            PRIMARY KEY (session, text)
        ) WITHOUT ROWID""",
        # The files that a session has read, by hash, so that it may continue to edit them.
        """CREATE TABLE read_file (
            session TEXT NOT NULL,
            path TEXT NOT NULL,
            sha256 TEXT NOT NULL,
            at_ns INTEGER NOT NULL,
            PRIMARY KEY (session, path)
        ) WITHOUT ROWID""",
        # The values that tools keep in a session.
        """CREATE TABLE state (
            session TEXT NOT NULL,
            tool TEXT NOT NULL,
            key TEXT NOT NULL,
            value BLOB NOT NULL,
            PRIMARY KEY (session, tool, key)
        ) WITHOUT ROWID""",
        # Approval requests, one per row; `whole` tells whether the request's arguments are exactly the proposed ones
        # (no secret was redacted), `answered` whether the call has its result.
        """CREATE TABLE approval (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL,
            session TEXT NOT NULL,
            call TEXT NOT NULL,
            state TEXT NOT NULL,
            created_ns INTEGER NOT NULL,
            expires_ns INTEGER NOT NULL,
            grant_expires_ns INTEGER,
            exact_arguments INTEGER NOT NULL,
            answered INTEGER NOT NULL DEFAULT 0,
            request BLOB NOT NULL,
            decision BLOB
        )""",
        "CREATE INDEX approval_pending ON approval (created_ns) WHERE state = 'pending'",
        "CREATE INDEX approval_open ON approval (session, call) WHERE answered = 0",
        # Calls that outlive their turn; `told` tells whether their session was notified of their end.
        """CREATE TABLE job (
            id TEXT PRIMARY KEY,
            session TEXT NOT NULL,
            call TEXT NOT NULL,
            tool TEXT NOT NULL,
            state TEXT NOT NULL,
            created_ns INTEGER NOT NULL,
            ended_ns INTEGER,
            attempt INTEGER NOT NULL,
            notified INTEGER NOT NULL,
            details BLOB NOT NULL
        )""",
        "CREATE INDEX job_of_session ON job (session, created_ns)",
        "CREATE INDEX job_open ON job (created_ns) WHERE state IN ('pending', 'running')",
        "CREATE INDEX job_ended ON job (ended_ns)",
        # The tool sessions of stateful tools; `ended` is how one ended, '' while it is open.
        """CREATE TABLE tool_session (
            id TEXT PRIMARY KEY,
            session TEXT NOT NULL,
            call TEXT NOT NULL,
            tool TEXT NOT NULL,
            opened_ns INTEGER NOT NULL,
            ended_ns INTEGER,
            end_reason TEXT NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX tool_session_of_session ON tool_session (session, opened_ns)",
        # Notifications for the agents of sessions, and whether they were delivered; `id` is unique, so each comes once.
        """CREATE TABLE notification (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            session TEXT NOT NULL,
            delivered INTEGER NOT NULL,
            body BLOB NOT NULL
        )""",
        "CREATE INDEX notification_of_session ON notification (session, delivered, number)",
        # Channels between sessions. A scope is the root session of a tree, or '' for the workspace. Only broadcasts have
        # readers, with the number of the last message that each has read.
        """CREATE TABLE channel (
            scope TEXT NOT NULL,
            name TEXT NOT NULL,
            kind TEXT NOT NULL,
            sent INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (scope, name)
        ) WITHOUT ROWID""",
        # A number is never used again, since deliveries refer to it.
        """CREATE TABLE channel_message (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            scope TEXT NOT NULL,
            channel TEXT NOT NULL,
            at_ns INTEGER NOT NULL,
            consumed INTEGER NOT NULL,
            position INTEGER NOT NULL, -- in its channel
            body BLOB NOT NULL
        )""",
        "CREATE INDEX message_of_channel ON channel_message (scope, channel, consumed, number)",
        """CREATE TABLE channel_reader (
            scope TEXT NOT NULL,
            channel TEXT NOT NULL,
            reader TEXT NOT NULL,
            number INTEGER NOT NULL,
            position INTEGER NOT NULL,
            PRIMARY KEY (scope, channel, reader)
        ) WITHOUT ROWID""",
        # Messages delivered to calls whose outcome is not known yet; without a call: undelivered for the reader.
        """CREATE TABLE channel_delivery (
            scope TEXT NOT NULL,
            channel TEXT NOT NULL,
            number INTEGER NOT NULL,
            reader TEXT NOT NULL,
            call TEXT NOT NULL,
            PRIMARY KEY (scope, channel, number, reader)
        ) WITHOUT ROWID""",
        # Triggers: each notifies a session at a time or on a message.
        """CREATE TABLE session_trigger (
            session TEXT NOT NULL,
            name TEXT NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (session, name)
        ) WITHOUT ROWID""",
        # Rules that a user's answers "for this project" and "reject always" stored.
        """CREATE TABLE project_rule (
            id TEXT PRIMARY KEY,
            text TEXT NOT NULL UNIQUE,
            created_ns INTEGER NOT NULL,
            approval TEXT NOT NULL
        ) WITHOUT ROWID""",
    ),
    (
        # The tasks of the workspace, each as a JSON object. Sessions share them.
        "CREATE TABLE task (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    ),
)

VERSION = len(MIGRATIONS)
