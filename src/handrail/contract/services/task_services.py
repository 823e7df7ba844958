"""The tasks of a workspace, which all of its sessions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from handrail.contract.struct import Struct

TaskStatus = Literal["pending", "in_progress", "completed", "cancelled"]
TASK_STATUSES: tuple[TaskStatus, ...] = get_args(TaskStatus)


class WorkspaceTask(Struct, frozen=True):
    """One task.

    :param owner: who works on it; empty if no one does
    :param blocked_by: the tasks that must end before it starts
    :param open_blockers: those of them that are not completed or cancelled
    :param blocks: the tasks that it blocks
    :param version: counts the changes
    :param created_by: the session that created it
    :param is_foreign: whether another session wrote any part of it
    """

    id: int
    title: str
    description: str = ""
    status: TaskStatus = "pending"
    owner: str = ""
    blocked_by: tuple[int, ...] = ()
    version: int = 1
    created_ns: int = 0
    changed_ns: int = 0
    created_by: str = ""
    open_blockers: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    is_foreign: bool = False


class TaskQueryResult(Struct, frozen=True):
    """Some of the tasks that match.

    :param total: how many match
    """

    tasks: tuple[WorkspaceTask, ...]
    total: int


class TaskService(Protocol):
    """The tasks of the workspace. Changes are durable on return, and those of all processes come one after another."""

    async def create_task(
        self,
        title: str,
        *,
        description: str = "",
        status: TaskStatus = "pending",
        owner: str = "",
        blocked_by: Sequence[int] = (),
    ) -> WorkspaceTask:
        """Create a task.

        :raises ToolError: ``invalid_input`` for an unknown blocker, ``conflict`` for a started task with open blockers,
            ``limit`` if too many tasks are open
        """
        ...

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
        """Change some fields of a task.

        :param version: the version that the caller has read; required to change the owner of an owned task
        :raises ToolError: ``invalid_input`` for an unknown id or a circle of blockers, ``conflict`` if the task has
            another version or owner, or open blockers and shall start
        """
        ...

    async def get_task(self, task_id: int) -> WorkspaceTask:
        """Return a task.

        :raises ToolError: ``invalid_input`` for an unknown id
        """
        ...

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
        """Return tasks in the order of their ids.

        :param statuses: only tasks with one of these; empty for all
        :param owner: only tasks of this owner; empty for tasks without one
        :param ready_only: only pending tasks without open blockers
        :param words: only tasks whose title or description contains all of these words, in any case
        """
        ...
