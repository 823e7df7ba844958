"""The undo of calls: which changes it takes back, its locks, and its records in the log."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.lock_table import WORKSPACE, LockTimeout
from handrail.contract.errors import ToolError
from handrail.contract.undo_reports import UndoPathResult, UndoReport
from handrail.record.commit_log import Record, RecordKind
from handrail.runtime.guard.running_programs import running_programs
from handrail.runtime.undo.undo_restoration import UndoPlan, execute_undo_plan, plan_undo
from handrail.runtime.undo.workspace_snapshots import WorkspaceSnapshots
from handrail.store.tables.session_tables import SessionTable
from handrail.store.undo_store import UndoableOperation

_MOST_RECORDED = 1_000
"""How many paths one record names."""


class UndoService:
    """Undoes calls of one workspace, in the process that holds it.

    :param snapshots: None if the operator switched undo off
    :param sessions: the sessions, to find those of sub-agents
    """

    def __init__(self, arbiter: Arbiter, snapshots: WorkspaceSnapshots | None, sessions: SessionTable) -> None:
        self._arbiter = arbiter
        self._snapshots = snapshots
        self._sessions = sessions

    async def undo(
        self, call: str | None = None, session: str | None = None, *, dry_run: bool = False, overwrite: bool = False
    ) -> UndoReport:
        """Undo a call, a session, or without either the last call whose changes are still in place.

        :param call: the id of a call, a job or an earlier undo
        :param session: the id of a session; an empty text for that of the last change
        :param overwrite: whether paths that changed since are given back, too
        :raises ToolError: ``unavailable`` if undo is switched off or nothing was kept, ``invalid_input`` for an unknown id,
            ``conflict`` if the call still runs, ``timeout`` if other calls hold the workspace
        :raises LogUnavailable: if the undo cannot be recorded
        """
        if (snapshots := self._snapshots) is None:
            raise ToolError(
                "Undo is switched off in this workspace. Set `enabled = true` under `[undo]` to undo later calls.",
                kind="unavailable",
            )
        if session == "":
            session = await asyncio.to_thread(_find_last_session, snapshots)
        undo_id = f"undo_{secrets.token_hex(8)}"
        request = self._arbiter.locks.queue_for_locks((((WORKSPACE,), "X"),), undo_id)
        try:
            grant = await request.wait_until_granted(self._arbiter.limits.lock_wait_ms / 1000)
        except LockTimeout as error:
            raise ToolError(
                f"The undo waited for other calls: {error}. Nothing was changed. Try again.", kind="timeout"
            ) from None
        try:
            children = tuple(self._list_children(session, None) if call is None else self._list_children(call, call))
            find = partial(self._make_plan, snapshots, call, session, children, overwrite=overwrite)
            plan = await asyncio.to_thread(find)
            if dry_run or not plan.steps:
                return UndoReport("", plan.calls, plan.preview(), plan.problems, dry_run)
            work = asyncio.ensure_future(self._carry_out(snapshots, plan, undo_id))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # half an undo would be worse than a whole one
                raise
        except OSError as error:
            raise ToolError(
                f"The kept files cannot be read or written: {error.strerror or error}. Check the state folder.",
                kind="unavailable",
            ) from error
        finally:
            self._arbiter.locks.release_grant(grant)

    async def _carry_out(self, snapshots: WorkspaceSnapshots, plan: UndoPlan, undo_id: str) -> UndoReport:
        paths = [f"{snapshots.root.rstrip('/')}/{path}" for path in plan.list_paths()]
        in_use = running_programs.find_mounted_paths(paths)
        await self._record("undo-intended", plan, undo_id, plan.preview())
        done = await asyncio.to_thread(execute_undo_plan, snapshots, plan, undo_id, in_use)
        changed = any(one.outcome in ("restored", "removed") for one in done)
        report = UndoReport(undo_id if changed else "", plan.calls, done, plan.problems)
        await self._record("undone", plan, undo_id, done)
        return report

    async def _record(self, kind: RecordKind, plan: UndoPlan, undo_id: str, paths: Sequence[UndoPathResult]) -> None:
        sessions = {one.session for one in plan.operations}
        named = [
            {"path": one.path, "outcome": one.outcome, **({"detail": one.detail} if one.detail else {})}
            for one in paths[:_MOST_RECORDED]
        ]
        body: dict[str, Any] = {"undo_id": undo_id, "calls": list(plan.calls), "paths": named, "path_count": len(paths)}
        redactor = self._arbiter.shaper.redactor
        body = redactor.redact_json(body) if redactor.active else body
        session = next(iter(sessions)) if len(sessions) == 1 else ""
        call = plan.calls[0] if len(plan.calls) == 1 and "/" in plan.calls[0] else ""
        await self._arbiter.log.commit([Record(kind, session, call, body)])

    # ── which changes ────────────────────────────────────────────────────────────────────────────

    def _make_plan(
        self,
        snapshots: WorkspaceSnapshots,
        call: str | None,
        session: str | None,
        children: Sequence[str],
        *,
        overwrite: bool,
    ) -> UndoPlan:
        snapshots.recover()
        store = snapshots.store
        if not store.exists:
            raise ToolError(
                "No call has changed this workspace yet, so nothing can be undone. `handrail log` lists the calls.",
                kind="unavailable",
            )
        plan = partial(plan_undo, snapshots, overwrite=overwrite)
        if call is None and session is None:
            return self._plan_last(snapshots, plan)
        if call is not None and snapshots.find_running_calls([call]):
            raise ToolError(
                f"{call} is still running, so its changes are not known yet. Stop it, or wait until it ends, then undo it.",
                kind="conflict",
            )
        found = store.find_operations(call=call) if call is not None else _find_session_calls(snapshots, session)
        for child in children:
            found += _find_session_calls(snapshots, child)
        if not found:
            what = f"call {call[:80]!r}" if call is not None else f"session {(session or '')[:80]!r}"
            raise ToolError(
                f"No change of {what} in the workspace is recorded and still in place. It changed nothing, it is undone or "
                "unknown, or its record was removed. `handrail log` lists the calls.",
                kind="invalid_input",
            )
        return plan(sorted({one.id: one for one in found}.values(), key=lambda one: one.id))

    def _plan_last(self, snapshots: WorkspaceSnapshots, plan: partial[UndoPlan]) -> UndoPlan:
        """Return the plan for the last call whose changes are still in place."""
        undone = snapshots.store.list_undone_operation_ids()
        for one in reversed(snapshots.store.find_operations()):
            if one.kind != "undo" and one.id not in undone:
                made = plan([other for other in snapshots.store.find_operations(call=one.name) if other.kind != "undo"])
                if made.steps or made.left:
                    return made
        raise ToolError(
            "The changes of all recorded calls are already undone. Nothing was changed. `handrail log` lists the calls.",
            kind="unavailable",
        )

    def _list_children(self, session: str | None, call: str | None) -> Iterator[str]:
        """Yield the sessions of sub-agents, those of a session or of one of its calls.

        :param session: its id, or a call's id, which begins with it
        """
        for row in self._sessions.list_subagent_sessions((session or "").partition("/")[0]):
            if call is None or row.parent_call == call:
                yield row.id
                yield from self._list_children(row.id, None)


def _find_session_calls(snapshots: WorkspaceSnapshots, session: str | None) -> list[UndoableOperation]:
    """Return what the calls of a session changed and is not undone."""
    undone = snapshots.store.list_undone_operation_ids()
    found = snapshots.store.find_operations(session=session)
    return [one for one in found if one.kind != "undo" and one.id not in undone]


def _find_last_session(snapshots: WorkspaceSnapshots) -> str | None:
    """Return the session of the last change, or None."""
    found = snapshots.store.find_operations() if snapshots.store.exists else []
    return next((one.session for one in reversed(found) if one.session), None)
