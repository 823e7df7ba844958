"""The opening of a workspace's state as a whole: folders, lease, database; closed in the opposite order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from handrail.store.database.connection import settle
from handrail.store.database.database import Database
from handrail.store.folders import Folders, prepare
from handrail.store.lease import Lease
from handrail.store.tables.arrivals import ChannelTable, NoticeTable, TriggerTable
from handrail.store.tables.jobs import JobTable
from handrail.store.tables.messages import Messages
from handrail.store.tables.sessions import SeenHashes, SessionRules, Sessions, SessionState


@dataclass(frozen=True, slots=True)
class Store:
    """The durable state of a workspace, held by this process."""

    folders: Folders
    lease: Lease
    database: Database
    sessions: Sessions
    state: SessionState
    messages: Messages
    rules: SessionRules
    seen: SeenHashes
    notices: NoticeTable
    channels: ChannelTable
    triggers: TriggerTable
    jobs: JobTable

    @staticmethod
    def open(
        workspace: str | Path,
        state: str | Path | None = None,
        *,
        face: str = "library",
        allow_home: bool = False,
        clock: Callable[[], int] = time.time_ns,
        protocol: int = 0,
        socket: str = "",
        engine: str | None = None,
    ) -> Store:
        """Prepare the folders, acquire the lease, which creates the database, and open the database.

        :param protocol: the version of the protocol for client processes; 0: none can connect
        :param socket: the name of this process's socket in the workspace's private folder
        :param engine: the engine for its database (:mod:`handrail.store.database.connection`); None for the one that created it
        :raises WorkspaceHeld: if another process holds the workspace
        :raises StartError: with the problem and the next step
        """
        folders = prepare(workspace, state, allow_home=allow_home)
        if engine is not None:
            settle(folders.database, engine)
        lease = Lease.acquire(folders, face=face, clock=clock, protocol=protocol, socket=socket)
        try:
            database = Database.open(folders, lease)
        except BaseException:
            lease.release()
            raise
        return Store(
            folders,
            lease,
            database,
            Sessions(database),
            SessionState(database),
            Messages(database),
            SessionRules(database),
            SeenHashes(database),
            NoticeTable(database),
            ChannelTable(database),
            TriggerTable(database),
            JobTable(database),
        )

    async def aclose(self) -> None:
        """Write what is queued, close the database and release the lease."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # In one thread, so that even a cancelled caller releases the lease only after the last write.
        try:
            self.database.close()
        finally:
            self.lease.release()
