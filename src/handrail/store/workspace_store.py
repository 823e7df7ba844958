"""The opening of a workspace's state as a whole: folders, lease, database; closed in the opposite order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from handrail.contract.struct import Struct
from handrail.store.database.sqlite_connection import record_or_check_engine
from handrail.store.database.workspace_database import WorkspaceDatabase
from handrail.store.lease import WorkspaceLease
from handrail.store.project_identity import is_recorded_project_folder
from handrail.store.state_folders import StateFolders, prepare_folders
from handrail.store.tables.inbound_tables import ChannelTable, NotificationTable, TriggerTable
from handrail.store.tables.job_tables import JobTable
from handrail.store.tables.session_messages import SessionMessageTable
from handrail.store.tables.session_tables import (
    ReadFileHashTable,
    SessionRuleTable,
    SessionTable,
    SessionToolStateTable,
)
from handrail.store.tables.task_table import TaskTable


class WorkspaceStore(Struct, frozen=True):
    """The durable state of a workspace, held by this process."""

    folders: StateFolders
    lease: WorkspaceLease
    database: WorkspaceDatabase
    sessions: SessionTable
    session_values: SessionToolStateTable
    messages: SessionMessageTable
    session_rules: SessionRuleTable
    read_hashes: ReadFileHashTable
    notifications: NotificationTable
    channels: ChannelTable
    triggers: TriggerTable
    jobs: JobTable
    tasks: TaskTable

    @staticmethod
    def open(
        workspace: str | Path,
        state: str | Path | None = None,
        *,
        frontend: str = "library",
        allow_home: bool = False,
        clock: Callable[[], int] = time.time_ns,
        protocol: int = 0,
        socket: str = "",
        engine: str | None = None,
    ) -> WorkspaceStore:
        """Prepare the folders, acquire the lease, which creates the database, and open the database.

        :param protocol: the version of the protocol for client processes; 0: none can connect
        :param socket: the name of this process's socket in the workspace's private folder
        :param engine: the engine for its database (:mod:`handrail.store.database.sqlite_connection`); None for the one that created it
        :raises WorkspaceAlreadyHeld: if another process holds the workspace
        :raises StartError: with the problem and the next step
        """
        folders = prepare_folders(workspace, state, allow_home=allow_home)
        if engine is not None:
            record_or_check_engine(folders.database_file, engine)
        lease = WorkspaceLease.acquire(folders, frontend=frontend, clock=clock, protocol=protocol, socket=socket)
        is_recorded_project_folder(
            folders
        )  # records the folder at the first time, so that it is recognised if it is moved
        try:
            database = WorkspaceDatabase.open(folders, lease)
        except BaseException:
            lease.release()
            raise
        return WorkspaceStore(
            folders,
            lease,
            database,
            SessionTable(database),
            SessionToolStateTable(database),
            SessionMessageTable(database),
            SessionRuleTable(database),
            ReadFileHashTable(database),
            NotificationTable(database),
            ChannelTable(database),
            TriggerTable(database),
            JobTable(database),
            TaskTable(database),
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
