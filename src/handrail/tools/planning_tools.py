"""plan, plan_exit, create_task, list_tasks, edit_task, get_task: plans that the user decides on, and tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.permission_modes import Mode
from handrail.contract.services.task_services import TASK_STATUSES, WorkspaceTask
from handrail.contract.services.tool_runtime import QuestionOption, Runtime, UserQuestion
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import make_closed_object_schema

# plan and plan_exit: into the mode plan and out of it, as the user decides.

_WEEK_MS = 7 * 24 * 60 * 60 * 1000
_MAX_PLAN = 100_000

_ENTER = "Enter plan mode"
_STAY = "Keep the current mode"
_ENTRY_QUESTION = UserQuestion(
    "The agent asks to plan first. In plan mode it only reads, until you answer its plan.",
    "Plan mode",
    (
        QuestionOption(_ENTER, "Calls that write or have external effects are denied"),
        QuestionOption(_STAY, "Type words for the agent in place of a choice"),
    ),
)


class EnterPlanModeTool(Tool):
    session_modes = ("ask", "accept-edits", "auto")
    spec = ToolSpec(
        id="plan",
        description=(
            "Ask the user to switch this session to plan mode, in which you can only read. Use it before a larger change, so "
            "that the user can review your plan first. Call plan_exit with the complete plan when it is ready."
        ),
        parameters=make_closed_object_schema({}),
        requires=Requires(capabilities=("ask", "mode", "catalog")),
        side_effect="read",
        locks=(),
        timeout_ms=_WEEK_MS,
        category="system",
        kind="switch_mode",
        documentation=(
            "Returns `entered`, the new `mode` if it was entered, and the `reason` of the user if there is one.\n\n"
            "- Plan mode denies every call that writes or has external effects.\n"
            "- If no user is attached, the tool is unavailable, and the mode stays."
        ),
    )

    def questions(self, args: dict[str, Any]) -> Sequence[UserQuestion]:
        return (_ENTRY_QUESTION,)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        label, words = await _ask(_ENTRY_QUESTION, runtime, "Plan mode was not entered")
        if label != _ENTER:
            return {"entered": False, **_reason(words), "next": "Continue without plan mode."}
        await runtime.mode.change("plan")
        with contextlib.suppress(ToolError):  # this agent may not have it, and the user can leave plan mode as well
            await runtime.catalog.load("plan_exit", kind="tool")
        return {
            "mode": "plan",
            "entered": True,
            **_reason(words),
            "next": "From now on, only read. Call plan_exit with the complete plan when it is ready.",
        }


_ASK = "Carry out, and ask before edits"
_ACCEPT = "Carry out, and accept edits"
_LEAVE = "Leave plan mode only"
_KEEP = "Keep planning"
_EXIT_OPTIONS = (
    QuestionOption(_ASK, "The plan is approved. Edits need your approval, as in the mode ask"),
    QuestionOption(_ACCEPT, "The plan is approved. Edits in the workspace run without approval"),
    QuestionOption(_LEAVE, "Return to the mode before plan mode. The plan is not approved"),
    QuestionOption(_KEEP, "The mode stays plan. Type words for the agent in place of a choice"),
)


class ExitPlanModeTool(Tool):
    session_modes = ("plan",)
    spec = ToolSpec(
        id="plan_exit",
        description=(
            "Show your complete plan to the user, who decides whether you carry it out. Works in plan mode only. Write a plan "
            "that the user can understand without this conversation."
        ),
        parameters=make_closed_object_schema(
            {
                "plan": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": _MAX_PLAN,
                    "description": "Complete plan, as Markdown. The user sees all of it",
                }
            },
            ["plan"],
        ),
        requires=Requires(capabilities=("ask", "mode")),
        side_effect="read",
        locks=(),
        timeout_ms=_WEEK_MS,
        category="system",
        kind="switch_mode",
        documentation=(
            "Returns `approved`, the `mode` of the session after the answer, and the `reason` of the user if there is one.\n\n"
            "- `approved` is true only if the user chose to carry out the plan.\n"
            "- Leaving plan mode does not approve the plan.\n"
            "- If the user wants to keep planning, the mode stays plan. Change the plan and call plan_exit again.\n"
            "- If no user is attached, the tool is unavailable, and the mode stays."
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        if not args["plan"].strip():
            raise ToolError("`plan` is empty. Pass the complete plan as text.", kind="invalid_input")

    def questions(self, args: dict[str, Any]) -> Sequence[UserQuestion]:
        return (UserQuestion(f"The agent has finished its plan:\n\n{args['plan']}", "Plan", _EXIT_OPTIONS),)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        label, words = await _ask(self.questions(args)[0], runtime, "The plan was not shown")
        if label in (_ASK, _ACCEPT):
            _, mode = await runtime.mode.change("ask" if label == _ASK else "accept-edits")
            return _exit_result(True, mode, words, "The user approved the plan. Carry it out.")
        if label == _LEAVE:
            _, mode = await runtime.mode.change(None)
            return _exit_result(False, mode, words, "The user did not approve the plan. Wait for instructions.")
        return _exit_result(False, "plan", words, "Change the plan and call plan_exit again.")


def _exit_result(approved: bool, mode: Mode, words: str, further: str) -> dict[str, Any]:
    return {"approved": approved, "mode": mode, **_reason(words), "next": further}


async def _ask(question: UserQuestion, runtime: Runtime, failure: str) -> tuple[str | None, str]:
    """Return the label that the user chose, or None, and the user's further words.

    :raises ToolError: ``unavailable`` if no user can answer
    """
    try:
        answers = await runtime.user.ask((question,))
    except ToolError as error:
        if error.kind != "unavailable":
            raise
        reason = error.text.removeprefix("question is unavailable: ").rstrip(".")
        text = f"{failure}: {reason}. The mode stays. Continue without it, or ask the user in your reply."
        raise ToolError(text, kind="unavailable") from None
    given = [one.strip() for answer in answers for one in answer]
    labels = [option.label for option in question.options if option.label in given]
    words = "\n".join(one for one in given if one and one not in labels)
    return (labels[0] if len(labels) == 1 else None), words


def _reason(words: str) -> dict[str, str]:
    return {"reason": words} if words else {}


# create_task, list_tasks, edit_task, get_task: the tasks that all sessions of the workspace share.

_MAX_TITLE = 300
_MAX_DESCRIPTION = 20_000
_MAX_BLOCKERS = 50
_MOST_LISTED = 200
_FOREIGN = "tasks that other sessions wrote"

_FIELDS: dict[str, Any] = {
    "title": {"type": "string", "minLength": 1, "maxLength": _MAX_TITLE, "description": "Short title of the task"},
    "description": {
        "type": "string",
        "maxLength": _MAX_DESCRIPTION,
        "description": "All details of the task, and when it counts as completed",
    },
    "status": {"enum": list(TASK_STATUSES), "description": "Progress of the task"},
    "owner": {"type": "string", "maxLength": 200, "description": "Name of the agent or person who works on it"},
    "blocked_by": {
        "type": "array",
        "maxItems": _MAX_BLOCKERS,
        "items": {"type": "integer", "minimum": 1},
        "description": "IDs of the tasks that must be completed or cancelled first",
    },
}
_TASK_ID = {"type": "integer", "minimum": 1, "description": "ID of the task"}

_task_spec = partial(
    ToolSpec,
    requires=Requires(capabilities=("tasks",)),
    locks=(),
    category="project",
    kind="other",
)


def _with_default(name: str, text: str) -> dict[str, Any]:
    return {**_FIELDS[name], "description": f"{_FIELDS[name]['description']}. {text}"}


class CreateWorkspaceTaskTool(Tool):
    spec = _task_spec(
        id="create_task",
        description=(
            "Create a task that all sessions of this workspace see, such as work for later or for another agent. For the steps "
            "of your own work use todo."
        ),
        parameters=make_closed_object_schema(
            {
                "title": _FIELDS["title"],
                "description": _with_default("description", "Default: none"),
                "status": _with_default("status", "Default: pending"),
                "owner": _with_default("owner", "Default: none"),
                "blocked_by": _with_default("blocked_by", "Default: none"),
            },
            ["title"],
        ),
        side_effect="write",
        documentation=(
            "Returns the `task` with its `id` and `version`. A workspace has at most 5,000 tasks. For a new one, Handrail then "
            "removes the oldest completed or cancelled task that blocks no other."
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        _check_title(args)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return _task_result(await runtime.tasks.create_task(**args))


class EditWorkspaceTaskTool(Tool):
    spec = _task_spec(
        id="edit_task",
        description=(
            "Change a task of this workspace: its title, description, status, owner or blockers. Set `owner` and the status "
            "in_progress before you work on it. Omitted fields do not change."
        ),
        parameters=make_closed_object_schema(
            {
                "id": _TASK_ID,
                "title": _with_default("title", "Default: unchanged"),
                "description": _with_default("description", "Default: unchanged"),
                "status": _with_default("status", "Default: unchanged"),
                "owner": _with_default("owner", "Empty for none. Default: unchanged"),
                "blocked_by": _with_default("blocked_by", "The complete list. Default: unchanged"),
                "version": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Version that you have read. Required to change the owner of an owned task. Default: any",
                },
            },
            ["id"],
        ),
        side_effect="write",
        documentation=(
            "Returns the changed `task`.\n\n"
            "- An owned task keeps its owner, unless you pass its `version`.\n"
            "- A task with open blockers cannot be in_progress or completed.\n"
            "- Blockers must not form a cycle."
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        _check_title(args)
        if not args.keys() & _FIELDS.keys():
            text = f"Task {args['id']} was not changed: no field is given. Pass at least one of {', '.join(_FIELDS)}."
            raise ToolError(text, kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        fields = {name: value for name, value in args.items() if name != "id"}
        return _task_result(await runtime.tasks.edit_task(args["id"], **fields))


class GetWorkspaceTaskTool(Tool):
    spec = _task_spec(
        id="get_task",
        description="Return a task of this workspace with all of its fields, its open blockers and the tasks that it blocks.",
        parameters=make_closed_object_schema({"id": _TASK_ID}, ["id"]),
        side_effect="read",
        idempotent=True,
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return _task_result(await runtime.tasks.get_task(args["id"]))


class ListWorkspaceTasksTool(Tool):
    spec = _task_spec(
        id="list_tasks",
        description=(
            "List the tasks of this workspace, filtered by status, owner or words. Without filters it lists all of them. "
            "get_task returns the description."
        ),
        parameters=make_closed_object_schema(
            {
                "status": {
                    "type": "array",
                    "items": {"enum": list(TASK_STATUSES)},
                    "maxItems": len(TASK_STATUSES),
                    "description": "Only tasks with one of these statuses. Default: all",
                },
                "owner": _with_default("owner", "Empty for tasks without an owner. Default: all"),
                "ready": {
                    "type": "boolean",
                    "description": "Only pending tasks without open blockers. Default: false",
                },
                "query": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 400,
                    "description": "Words that the title or description must contain. Default: none",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": _MOST_LISTED,
                    "default": 50,
                    "description": "Maximum number of tasks",
                },
                "offset": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "Number of tasks to skip, the previous `next`. Default: 0",
                },
            }
        ),
        side_effect="read",
        idempotent=True,
        documentation="Returns `tasks`, `total` matches, and `next`, the offset to continue from, or null at the end.",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        offset: int = args.get("offset", 0)
        page = await runtime.tasks.list_tasks(
            statuses=args.get("status", ()),
            owner=args.get("owner"),
            ready_only=args.get("ready", False),
            words=args.get("query", ""),
            limit=args.get("limit", 50),
            offset=offset,
        )
        after = offset + len(page.tasks)
        data = {
            "tasks": [
                {
                    "id": task.id,
                    "title": task.title,
                    "status": task.status,
                    "owner": task.owner or None,
                    "open_blockers": list(task.open_blockers),
                }
                for task in page.tasks
            ],
            "total": page.total,
            "next": after if page.tasks and after < page.total else None,
        }
        return _labelled(data, any(task.is_foreign for task in page.tasks))


def _check_title(args: dict[str, Any]) -> None:
    if "title" in args and not args["title"].strip():
        raise ToolError("`title` is empty. Pass a short text.", kind="invalid_input")


def _task_result(task: WorkspaceTask) -> Result:
    data = {
        "task": {
            "id": task.id,
            "title": task.title,
            "description": task.description,
            "status": task.status,
            "owner": task.owner or None,
            "blocked_by": list(task.blocked_by),
            "open_blockers": list(task.open_blockers),
            "blocks": list(task.blocks),
            "version": task.version,
            "created_at": _format_time(task.created_ns),
            "changed_at": _format_time(task.changed_ns),
        }
    }
    return _labelled(data, task.is_foreign)


def _labelled(data: dict[str, Any], is_foreign: bool) -> Result:
    return Result.output(data, untrusted_source=_FOREIGN) if is_foreign else Result.output(data)


def _format_time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="seconds")


TASK_TOOLS: tuple[Tool, ...] = (
    CreateWorkspaceTaskTool(),
    ListWorkspaceTasksTool(),
    EditWorkspaceTaskTool(),
    GetWorkspaceTaskTool(),
)


# browse_rules, load_rule, save_rule, delete_rule: deprecated names, which only the profile tiered-tools has.


class DeprecatedRuleTool(Tool):
    """A deprecated tool for rules, whose answer names the skills that replace them."""

    def __init__(self, tool_id: str, doing: str) -> None:
        self.spec = ToolSpec(
            id=tool_id,
            description=f"Deprecated: {doing}. Returns a redirect to playbooks, which are skills here. Use skill instead.",
            parameters={
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 1_000, "description": "Ignored. Default: none"}},
                "additionalProperties": True,
            },
            side_effect="read",
            locks=(),
            idempotent=True,
            category="system",
            kind="think",
        )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {
            "deprecated": True,
            "redirect": "playbooks",
            "message": (
                f"`{runtime.tool_id}` is deprecated and did nothing. Playbooks, here called skills, replace rules. Call skill "
                "with a name that the system prompt lists. The user can add skills in the folder skills/."
            ),
        }


RULE_TOOLS: tuple[Tool, ...] = (
    DeprecatedRuleTool("browse_rules", "list rules"),
    DeprecatedRuleTool("load_rule", "load a rule"),
    DeprecatedRuleTool("save_rule", "create or change a rule"),
    DeprecatedRuleTool("delete_rule", "remove a rule"),
)
