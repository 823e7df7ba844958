"""Records that only the journal has: of calls that had just begun when their process ended, or begin at this moment."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.record.log import Record, records_noted
from handrail.store.database.connection import journalled
from handrail.store.database.journal import journals, outstanding, unreadable


def noted(connection: sqlite3.Connection, folder: Path) -> list[Record]:
    """Records that the log has not got and calls may rest on, in order. Whoever opens the workspace next puts them there.

    :param folder: the workspace's private one
    :raises sqlite3.Error: when the database cannot be read
    :raises OSError: when the folder cannot be read
    :raises StartError: when a journal cannot be read
    """
    before = journals(folder)  # looked at first: what the database gets meanwhile is no longer missing
    records: list[Record] = []
    for path, note in outstanding(before, journalled(connection)):
        try:
            records += records_noted(note)
        except (LookupError, TypeError, ValueError):
            raise StartError(unreadable(path)) from None
    return records
