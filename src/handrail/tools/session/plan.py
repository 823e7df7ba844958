"""todo: the list of what is to be done, kept for the session."""

from __future__ import annotations

from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema

_KEY = "todos"


class Todo(Tool):
    spec = ToolSpec(
        id="todo",
        description=(
            "Keep this session's list of tasks. With todos, replaces the whole list; without, returns it as it is."
        ),
        parameters=object_schema(
            {
                "todos": {
                    "type": "array",
                    "maxItems": 500,
                    "items": object_schema(
                        {
                            "content": {"type": "string", "minLength": 1, "maxLength": 2_000},
                            "status": {"enum": ["pending", "in_progress", "completed"]},
                            "id": {
                                "type": "string",
                                "minLength": 1,
                                "maxLength": 100,
                                "description": "Given by the tool if left out",
                            },
                        },
                        ["content", "status"],
                    ),
                }
            }
        ),
        requires=Requires(capabilities=("state",)),
        side_effect="write",
        locks=(),
        idempotent=True,
        category="system",
        tier="core",
        kind="other",
        guidance="For work of several steps keep a list with todo, and mark each step as you begin and end it.",
    )

    def check(self, args: dict[str, Any]) -> None:
        taken = [todo["id"] for todo in args.get("todos", ()) if "id" in todo]
        twice = sorted({one for one in taken if taken.count(one) > 1})
        if twice:
            raise ToolError(
                f"the id {twice[0]!r} stands at {taken.count(twice[0])} tasks; give each its own, or none",
                kind="invalid_input",
            )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if "todos" not in args:
            return {"todos": await runtime.state.get(_KEY) or []}
        todos = _with_ids(args["todos"])
        await runtime.state.put(_KEY, todos)
        return {"todos": todos}


def _with_ids(todos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    taken = {todo["id"] for todo in todos if "id" in todo}
    free = (str(number) for number in range(1, 2 * len(todos) + 1) if str(number) not in taken)
    return [
        {"id": todo.get("id") or next(free), "content": todo["content"], "status": todo["status"]} for todo in todos
    ]
