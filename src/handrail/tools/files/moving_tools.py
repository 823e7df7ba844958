"""file.move and file.delete: renaming and removing files and folders."""

from __future__ import annotations

from typing import Any

from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.spec import LockSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import FILE, file_change_spec, make_closed_object_schema


class FileMoveTool(Tool):
    spec = file_change_spec(
        id="file.move",
        description=(
            "Move or rename a file or folder, with everything in it. Creates parent folders, and never replaces an existing "
            "file. Folders have at most 1,000 entries. Use it instead of mv in bash."
        ),
        parameters=make_closed_object_schema(
            {
                "path": {**FILE, "description": "Present path of the file or folder"},
                "to": {**FILE, "description": "New path, which must not exist yet"},
            },
            ["path", "to"],
        ),
        locks=(LockSpec("file:{path}", "X"), LockSpec("file:{to}", "X")),
        targets={"fs.read": "{path}", "fs.write": ("{path}", "{to}")},
        kind="move",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        moved = await runtime.files.move(args["path"], args["to"])
        return {"path": moved.path, "kind": moved.kind, "entries": moved.entries, "size": moved.size}


class FileDeleteTool(Tool):
    spec = file_change_spec(
        id="file.delete",
        description=(
            "Delete a file or an empty folder. Set `recursive` to delete a folder with everything in it, at most 1,000 "
            "entries. Use it instead of rm in bash."
        ),
        parameters=make_closed_object_schema(
            {
                "path": {**FILE, "description": "File or folder to delete"},
                "recursive": {
                    "type": "boolean",
                    "default": False,
                    "description": "Delete a folder with everything in it. Default false",
                },
            },
            ["path"],
        ),
        targets={"fs.write": "{path}"},
        kind="delete",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        deleted = await runtime.files.delete(args["path"], recursive=args.get("recursive", False))
        return {"path": deleted.path, "kind": deleted.kind, "entries": deleted.entries, "size": deleted.size}
