"""``handrail log acknowledge``: going on with a log that ends earlier than it was written, on a person's word."""

from __future__ import annotations

import asyncio

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.purge import agreed, check_alone
from handrail.frontends.cli.options import Setting
from handrail.frontends.cli.show import note, out, out_json


def acknowledge(setting: Setting, *, yes: bool) -> int:
    """Carry the command out. Gives its exit code.

    :raises UsageError: when nobody can be asked and there is no ``--yes``
    :raises StartError: when another process holds the workspace, or the log cannot be written
    """
    from handrail.contract.errors import StartError
    from handrail.record.log import CommitLog
    from handrail.record.reading import LogReader
    from handrail.store.database.head import written
    from handrail.store.folders import locate
    from handrail.store.opening import Store

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    check_alone(folders, "this")
    store = Store.open(setting.workspace, setting.state, face="log acknowledge", allow_home=setting.allow_home)
    try:
        log = CommitLog(store.database, acknowledged=True)
        reader = LogReader(store.database.reading)
        try:
            known = written(folders)
            missing = reader.missing(known)
        except StartError as error:  # the file that tells it is damaged
            known, missing = None, str(error)
        if missing is None:
            note("the log holds all that is known to have been written; there is nothing to acknowledge")
            return OUTPUT
        if not setting.json:
            out(f"the log {folders.database}: {missing}")
        agreed(yes, "Go on with it?", "acknowledged")
        count = max(0, (0 if known is None else known[0]) - reader.head().sequence)
        asyncio.run(_acknowledged(log, store, count, missing))
    finally:
        asyncio.run(store.aclose())
    if setting.json:
        out_json({"acknowledged": missing, "records": count})
    else:
        out(
            f"acknowledged; the log says that {count:,} records are missing, and handrail log verify counts them as lost"
        )
    return OUTPUT


async def _acknowledged(log: object, store: object, count: int, missing: str) -> None:
    """Record it, and begin with what the log holds then."""
    from handrail.record.log import CommitLog, Record
    from handrail.store.database.head import HeadFile
    from handrail.store.opening import Store

    assert isinstance(log, CommitLog)
    assert isinstance(store, Store)
    await log.recover()
    await log.commit([Record("lost", "", "", {"records": count, "acknowledged": missing})])
    head = log.reader.head()
    file = HeadFile(store.folders)
    try:
        file.replace(head.sequence, bytes.fromhex(head.hash))
    finally:
        file.close()
