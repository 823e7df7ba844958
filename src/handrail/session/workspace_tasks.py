"""The tasks of a workspace, for the tools of all sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.errors import ToolError
from handrail.contract.json_codec import MalformedDataError, reader_of
from handrail.contract.services.task_services import TaskQueryResult, TaskStatus, WorkspaceTask
from handrail.contract.struct import Struct
from handrail.store.database.sqlite_connection import make_damaged_row_error
from handrail.store.tables.task_table import TaskTable

MAX_TASKS = 5_000
"""The number of stored tasks. Beyond it, the oldest ended tasks that block no other are removed."""
_ENDED: frozenset[TaskStatus] = frozenset({"completed", "cancelled"})
_COMPUTED = ("open_blockers", "blocks", "is_foreign")


class _StoredTask(Struct, frozen=True):
    """A task, and whether more than one session wrote it."""

    task: WorkspaceTask
    is_shared: bool = False


class WorkspaceTasks:
    """The tasks of the workspace that this process holds. Use it on the kernel's event loop.

    :param redactor: removes registered secrets from texts before they are stored
    :param clock: returns wall-clock time in nanoseconds
    """

    def __init__(self, table: TaskTable, redactor: SecretRedactor, clock: Callable[[], int] = time.time_ns) -> None:
        self._table = table
        self._redactor = redactor
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: dict[int, _StoredTask] | None = None

    @property
    def _tasks(self) -> dict[int, _StoredTask]:
        """All tasks by id. No other process writes them while this one holds the workspace.

        :raises LogUnavailable: if they cannot be read
        """
        if self._known is None:
            self._known = {number: _read_task(number, fields) for number, fields in self._table.list_task_rows()}
        return self._known

    def for_session(self, session_id: str) -> SessionTasks:
        """Return the tasks as one session sees them."""
        return SessionTasks(self, session_id)

    async def put(self, session_id: str, task_id: int | None, version: int | None, **fields: Any) -> int:
        """Create a task, or change fields of one, and return its id.

        A stopped call does not stop a write that has started.

        :param task_id: None for a new task
        :param version: the version that the caller has read; None for any
        :raises ToolError: ``invalid_input`` for an unknown task or blocker, or a cycle; ``conflict`` for another version or
            owner, or open blockers; ``limit`` if the workspace has too many tasks
        :raises LogUnavailable: if the tasks cannot be read or written
        """
        return await asyncio.shield(asyncio.ensure_future(self._put(session_id, task_id, version, fields)))

    async def _put(self, session_id: str, task_id: int | None, version: int | None, fields: Mapping[str, Any]) -> int:
        async with self._lock:
            tasks, now = self._tasks, self._clock()
            given = {key: self._clean(value) for key, value in fields.items() if value is not None}
            if task_id is None:
                new = WorkspaceTask(id=max(tasks, default=0) + 1, title="", created_ns=now, created_by=session_id)
                changed, is_shared = replace(new, **given, changed_ns=now), False
            else:
                before = self._find(task_id)
                _check_version(before.task, version, given.get("owner"))
                changed = replace(before.task, **given, changed_ns=now, version=before.task.version + 1)
                is_shared = before.is_shared or before.task.created_by != session_id
            self._check_blockers(changed, tasks)
            removed = self._find_removable(tasks, changed) if task_id is None else ()
            stored = {key: value for key, value in asdict(changed).items() if key not in _COMPUTED}
            await self._table.store(changed.id, {**stored, "is_shared": is_shared}, removed)
            tasks[changed.id] = _StoredTask(changed, is_shared)
            for number in removed:
                del tasks[number]
            return changed.id

    def get(self, session_id: str, task_id: int) -> WorkspaceTask:
        """Return a task as one session sees it.

        :raises ToolError: ``invalid_input`` for an unknown task
        """
        return self._complete(self._find(task_id), session_id, self._list_blocked())

    def list_matching(self, session_id: str, accepts: Callable[[WorkspaceTask], bool]) -> list[WorkspaceTask]:
        """Return the tasks that ``accepts`` accepts, in the order of their ids."""
        blocked = self._list_blocked()
        every = (self._complete(stored, session_id, blocked) for _, stored in sorted(self._tasks.items()))
        return [task for task in every if accepts(task)]

    def _find(self, task_id: int) -> _StoredTask:
        if (found := self._tasks.get(task_id)) is not None:
            return found
        text = f"Task {task_id} does not exist. List the tasks with list_tasks, and use one of their ids."
        raise ToolError(text, kind="invalid_input")

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._redactor.redact_text(value)
        return tuple(sorted(set(value)))

    def _check_blockers(self, task: WorkspaceTask, tasks: Mapping[int, _StoredTask]) -> None:
        for blocker in task.blocked_by:
            if blocker == task.id:
                text = f"Task {task.id} cannot block itself. Remove it from `blocked_by`."
                raise ToolError(text, kind="invalid_input")
            if blocker not in tasks:
                text = f"Task {blocker} in `blocked_by` does not exist. List the tasks with list_tasks."
                raise ToolError(text, kind="invalid_input")
        if (cycle := _find_cycle(task, tasks)) is not None:
            shown = " waits for ".join(map(str, cycle))
            text = f"`blocked_by` forms a cycle: task {shown}. Remove one of these blockers."
            raise ToolError(text, kind="invalid_input")
        if task.status in ("in_progress", "completed") and (still := _list_open(task, tasks)):
            text = (
                f"Task {task.id} cannot be {task.status}: these tasks block it: {', '.join(map(str, still))}. Complete or "
                "cancel them first, or change `blocked_by`."
            )
            raise ToolError(text, kind="conflict")

    def _find_removable(self, tasks: Mapping[int, _StoredTask], new: WorkspaceTask) -> tuple[int, ...]:
        if len(tasks) < MAX_TASKS:
            return ()
        needed = {*new.blocked_by, *(one for stored in tasks.values() for one in stored.task.blocked_by)}
        for number, stored in sorted(tasks.items()):
            if stored.task.status in _ENDED and number not in needed:
                return (number,)
        text = f"This workspace has {len(tasks):,} tasks, the maximum. Complete or cancel some first. The oldest such task that blocks no other is then removed."
        raise ToolError(text, kind="limit")

    def _list_blocked(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, stored in sorted(self._tasks.items()):
            for blocker in stored.task.blocked_by:
                found.setdefault(blocker, []).append(number)
        return found

    def _complete(self, stored: _StoredTask, session_id: str, blocked: Mapping[int, Sequence[int]]) -> WorkspaceTask:
        task = stored.task
        return replace(
            task,
            open_blockers=_list_open(task, self._tasks),
            blocks=tuple(blocked.get(task.id, ())),
            is_foreign=stored.is_shared or task.created_by != session_id,
        )


class SessionTasks:
    """The tasks for one session: a :class:`~handrail.contract.services.task_services.TaskService`."""

    def __init__(self, tasks: WorkspaceTasks, session_id: str) -> None:
        self._tasks = tasks
        self._session_id = session_id

    async def create_task(
        self,
        title: str,
        *,
        description: str = "",
        status: TaskStatus = "pending",
        owner: str = "",
        blocked_by: Sequence[int] = (),
    ) -> WorkspaceTask:
        put = partial(self._tasks.put, self._session_id, None, None)
        return await self.get_task(
            await put(title=title, description=description, status=status, owner=owner, blocked_by=blocked_by)
        )

    async def edit_task(
        self,
        task_id: int,
        *,
        title: str | None = None,
        description: str | None = None,
        status: TaskStatus | None = None,
        owner: str | None = None,
        blocked_by: Sequence[int] | None = None,
        version: int | None = None,
    ) -> WorkspaceTask:
        put = partial(self._tasks.put, self._session_id, task_id, version)
        return await self.get_task(
            await put(title=title, description=description, status=status, owner=owner, blocked_by=blocked_by)
        )

    async def get_task(self, task_id: int) -> WorkspaceTask:
        return self._tasks.get(self._session_id, task_id)

    async def list_tasks(
        self,
        *,
        statuses: Sequence[TaskStatus] = (),
        owner: str | None = None,
        ready_only: bool = False,
        words: str = "",
        limit: int = 50,
        offset: int = 0,
    ) -> TaskQueryResult:
        wanted = words.casefold().split()

        def accepts(task: WorkspaceTask) -> bool:
            text = f"{task.title}\n{task.description}".casefold()
            return (
                (not statuses or task.status in statuses)
                and (owner is None or task.owner == owner)
                and (not ready_only or (task.status == "pending" and not task.open_blockers))
                and all(word in text for word in wanted)
            )

        found = self._tasks.list_matching(self._session_id, accepts)
        return TaskQueryResult(tuple(found[offset : offset + limit]), len(found))


def _read_task(number: int, fields: Mapping[str, Any]) -> _StoredTask:
    """Return a stored task.

    :raises LogUnavailable: if the row is damaged
    """
    plain: dict[str, Any] = {**fields, "id": number, "is_foreign": False}
    plain["open_blockers"] = plain["blocks"] = []
    is_shared = plain.pop("is_shared", True) is not False
    try:
        return _StoredTask(reader_of(WorkspaceTask)(plain), is_shared)
    except MalformedDataError:
        raise make_damaged_row_error(f"task {number}") from None


def _check_version(task: WorkspaceTask, version: int | None, owner: str | None) -> None:
    if version is not None and version != task.version:
        text = f"Task {task.id} has changed: its version is {task.version}, not {version}. Read it with get_task first."
        raise ToolError(text, kind="conflict")
    if version is None and owner is not None and task.owner not in ("", owner):
        text = (
            f"Task {task.id} has another owner, whom get_task names. Choose another task, or pass `version` {task.version} to "
            "change its owner."
        )
        raise ToolError(text, kind="conflict")


def _list_open(task: WorkspaceTask, tasks: Mapping[int, _StoredTask]) -> tuple[int, ...]:
    known = (tasks[one].task for one in task.blocked_by if one in tasks)
    return tuple(one.id for one in known if one.status not in _ENDED)


def _find_cycle(task: WorkspaceTask, tasks: Mapping[int, _StoredTask]) -> list[int] | None:
    """Return a path of blockers from the task to itself, or None."""
    came_from: dict[int, int] = dict.fromkeys(task.blocked_by, task.id)
    open_ids = list(task.blocked_by)
    while open_ids:
        number = open_ids.pop()
        further: Iterable[int] = tasks[number].task.blocked_by if number in tasks else ()
        for blocker in further:
            if blocker == task.id:
                path = [task.id, number]
                while path[-1] != task.id:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if blocker not in came_from:
                came_from[blocker] = number
                open_ids.append(blocker)
    return None
