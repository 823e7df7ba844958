"""Records that only the journal has: of calls that had just begun when their process ended, or begin at this moment."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from handrail.record.log import Record, records_noted
from handrail.store.connection import journalled
from handrail.store.journal import journals, outstanding


def noted(connection: sqlite3.Connection, folder: Path) -> list[Record]:
    """Records that the log has not got and calls may rest on, in order. Whoever opens the workspace next puts them there.

    :param folder: the workspace's private one
    :raises sqlite3.Error: when the database cannot be read
    :raises OSError: when a journal cannot be read
    :raises StartError: when a journal is another version's
    """
    before = journals(folder)  # looked at first: what the database gets meanwhile is no longer missing
    return [record for _, note in list(outstanding(before, journalled(connection))) for record in records_noted(note)]
