"""scratchpad: short notes by name, kept for the session."""

from __future__ import annotations

from typing import Any, cast

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.names import nearest
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema

_KEY = "notes"
MAX_KEYS = 500
MAX_VALUE = 64 * 1024
MAX_ALL = 1024 * 1024


class Scratchpad(Tool):
    spec = ToolSpec(
        id="scratchpad",
        description=(
            "Keep short notes under names, for this session: set, get, delete, list the names, clear. "
            "Names like __this__ are reserved."
        ),
        parameters=object_schema(
            {
                "action": {"enum": ["set", "get", "delete", "list", "clear"]},
                "key": {"type": "string", "minLength": 1, "maxLength": 200, "description": "For set, get and delete"},
                "value": {"type": "string", "maxLength": MAX_VALUE, "description": "For set"},
            },
            ["action"],
        ),
        requires=Requires(capabilities=("state",)),
        side_effect="write",
        locks=(),
        concurrency_safe=False,
        category="memory",
        kind="other",
    )

    def check(self, args: dict[str, Any]) -> None:
        action, key = args["action"], args.get("key")
        if action in ("list", "clear"):
            if key is not None or "value" in args:
                raise ToolError(f"{action} takes no key and no value", kind="invalid_input")
        elif key is None or ("value" in args) != (action == "set"):
            raise ToolError(
                f"{action} takes a key{' and a value' if action == 'set' else ' alone'}", kind="invalid_input"
            )
        elif key.startswith("__") and key.endswith("__"):
            raise ToolError(f"{key!r} is reserved; take a name without __ around it", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        notes = cast("dict[str, str]", await runtime.state.get(_KEY) or {})
        action = args["action"]
        if action == "list":
            return {"keys": sorted(notes)}
        if action == "clear":
            await runtime.state.put(_KEY, {})
            return {"cleared": len(notes)}
        key: str = args["key"]
        if action == "set":
            new = {**notes, key: args["value"]}
            if len(new) > MAX_KEYS or sum(map(len, new.values())) > MAX_ALL:
                text = f"the scratchpad is full ({MAX_KEYS} names, {MAX_ALL:,} characters); delete something, or write a file"
                raise ToolError(text, kind="limit")
            await runtime.state.put(_KEY, new)
            return {"key": key, "replaced": key in notes}
        if key not in notes:
            alike = ", ".join(nearest(key, list(notes))) or "nothing like it"
            raise ToolError(f"nothing is kept under {key!r}; there is {alike}", kind="invalid_input")
        if action == "get":
            return {"key": key, "value": notes[key]}
        await runtime.state.put(_KEY, {name: value for name, value in notes.items() if name != key})
        return {"key": key, "deleted": True}
