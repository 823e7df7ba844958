"""The activity in every workspace of a state folder, read from their files, and the requests that stop it.

Reading works without the processes that hold the workspaces. Only those processes can stop what they run.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handrail.contract.approval_requests import Approval
from handrail.contract.errors import StartError
from handrail.contract.services.job_and_tool_services import Job
from handrail.contract.session_protocols import StoppedWork
from handrail.contract.struct import Struct
from handrail.record.log_reader import LogReader, ModelUsage, SessionOpener
from handrail.session.transcript_search import StoredSessionReader
from handrail.store.lease import LeaseHolder, find_lease_holder
from handrail.store.state_folders import StateFolders
from handrail.store.state_inventory import list_workspace_state_folders
from handrail.store.tables.approval_tables import ApprovalReader
from handrail.store.tables.job_tables import read_unfinished_jobs

_MAX_SESSIONS = 200
_STOP_TIMEOUT_S = 20.0
"""The maximum time to reach a process that is alive. A paused one is not waited for."""
_RETRY_S = 0.05
_LATEST_CALLS = 20
"""The latest calls of a session, which are searched for waiting ones."""


class ActiveCallStatus(Struct, frozen=True):
    """A call that has no result yet.

    :param since_ns: the wall-clock time at which it started, or was proposed
    :param is_running: whether it has started; otherwise it waits for locks or for a decision
    """

    call_id: str
    session_id: str
    tool: str | None
    arguments: Mapping[str, Any] | None
    since_ns: int
    is_running: bool


class SessionActivity(Struct, frozen=True):
    """An open session, with its running calls and what its models used.

    :param task: the beginning of its first message; None if it has none
    """

    id: str
    agent: str
    opener: SessionOpener | None
    opened_ns: int
    task: str | None
    parent_session: str | None
    calls: tuple[ActiveCallStatus, ...]
    usage: tuple[ModelUsage, ...]


class WorkspaceActivity(Struct, frozen=True):
    """The activity in one workspace.

    :param holder: the process that holds it; None if none does, so that nothing runs
    :param approvals: the requests that wait for a user
    :param jobs: the unfinished jobs; without a holder they wait for their session to be resumed
    :param problem: why the state cannot be read, or ``""``
    """

    folders: StateFolders
    holder: LeaseHolder | None
    sessions: tuple[SessionActivity, ...] = ()
    approvals: tuple[Approval, ...] = ()
    jobs: tuple[Job, ...] = ()
    problem: str = ""

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is held."""
        return not (self.holder or self.sessions or self.approvals or self.jobs or self.problem)


def list_active_workspaces(state: Path) -> list[WorkspaceActivity]:
    """Return the activity in each workspace of a state folder, without the idle ones.

    :raises StartError: if the state folder cannot be read
    """
    found = [read_workspace_activity(folders) for folders in list_workspace_state_folders(state)]
    return [one for one in found if not one.is_idle]


def read_workspace_activity(folders: StateFolders) -> WorkspaceActivity:
    """Return the activity in one workspace. A problem with its state is part of the result."""
    holder: LeaseHolder | None = None
    try:
        holder = find_lease_holder(folders)
        with LogReader.open_database(folders.database_file) as log:
            return _read_database(folders, holder, log)
    except (StartError, sqlite3.Error, OSError) as error:
        return WorkspaceActivity(folders, holder, problem=str(error))


def _read_database(folders: StateFolders, holder: LeaseHolder | None, log: LogReader) -> WorkspaceActivity:
    approvals = ApprovalReader(log.connection).list_pending_requests(time.time_ns())
    jobs = tuple(row.job for row in read_unfinished_jobs(log.connection))
    if holder is None:
        return WorkspaceActivity(folders, None, (), tuple(approvals), jobs)
    in_background = {job.call_id for job in jobs}
    calls = [
        ActiveCallStatus(
            one.call_id, one.session_id, one.tool, _arguments_of(log, one.call_id), one.at_ns, is_running=True
        )
        for one in log.list_unfinished_intents()
        if one.call_id not in in_background
    ]
    reader = StoredSessionReader(log.connection, holder.token)
    sessions = tuple(
        SessionActivity(
            facts.id,
            facts.agent,
            next(reversed(log.list_session_openers(facts.id)), None),
            facts.opened_ns,
            facts.task,
            facts.parent_session,
            (*(call for call in calls if call.session_id == facts.id), *_list_waiting(log, facts.id)),
            tuple(log.read_session_model_usage(facts.id)),
        )
        for facts in reader.list_sessions(limit=_MAX_SESSIONS, closed=False)
        if facts.state == "open"
    )
    return WorkspaceActivity(folders, holder, sessions, tuple(approvals), jobs)


def _list_waiting(log: LogReader, session_id: str) -> list[ActiveCallStatus]:
    """Return the latest calls of a session that wait for locks or for the rules, not for a user."""
    return [
        ActiveCallStatus(row.call_id, session_id, row.tool, row.arguments, row.proposed_ns, is_running=False)
        for row in log.calls(session=session_id, limit=_LATEST_CALLS)
        if row.state in ("proposed", "authorised")
    ]


def _arguments_of(log: LogReader, call_id: str) -> Mapping[str, Any] | None:
    proposal = log.find_proposal(call_id)
    given: object = None if proposal is None or proposal.body is None else proposal.body.get("arguments")
    return given if isinstance(given, dict) else None  # pyright: ignore[reportUnknownVariableType]


async def stop_work_through_lease_holder(activity: WorkspaceActivity, target: str, *, by: str) -> StoppedWork:
    """Ask the process that holds a workspace to stop work there, and return what it stopped.

    :param target: the id of a call, a job or a session; ``""`` for everything
    :param by: the frontend in which the user asks
    :raises ToolError: if nothing of that name runs there
    :raises StartError: if the process does not answer
    """
    from handrail.ipc.codec.protocol_rpc import WIRE_CODEC
    from handrail.ipc.wire.socket_handshake import ConnectionRejected, LeaseHolderNotResponding, NoLeaseHolder
    from handrail.kernel.approval_client import send_lease_holder_request

    holder, body = activity.holder, {"target": target, "by": by}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _STOP_TIMEOUT_S
    while holder is not None:
        try:
            response = await send_lease_holder_request(activity.folders, holder, "stop-work", body)
            return WIRE_CODEC.get_type_reader(StoppedWork)(response)
        except (NoLeaseHolder, LeaseHolderNotResponding, ConnectionRejected):
            if holder.state != "alive" or loop.time() >= deadline:
                raise
        await asyncio.sleep(_RETRY_S)  # it may be busy, or another process may have taken over
        holder = find_lease_holder(activity.folders)
    return StoppedWork()
