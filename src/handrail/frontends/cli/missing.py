"""What a reader of the log may miss after a crash: records that are noted, and on their way into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.frontends.cli.show import note

if TYPE_CHECKING:
    from handrail.record.reading import LogReader
    from handrail.store.folders import Folders


def say_what_is_missing(command: str, folders: Folders, reader: LogReader) -> None:
    """After a crash, what had just begun may not be in the log yet."""
    from sqlite3 import DatabaseError

    from handrail.contract.errors import StartError
    from handrail.record.noted import noted
    from handrail.store.holder import holder_of

    if holder_of(folders) is not None:
        return
    try:
        missing = noted(reader.connection, folders.own)
    except (DatabaseError, OSError, StartError) as error:
        note(f"handrail {command}: {error}")
        return
    if missing:
        calls = ", ".join(dict.fromkeys(record.call_id for record in missing if record.call_id))
        note(
            f"handrail {command}: {len(missing)} records are noted and not in the log yet ({calls}); the process that made them was "
            "killed, and the next one to open the workspace writes them"
        )
