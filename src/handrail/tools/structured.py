"""json_read and json_write: one value of a JSON file, by where it stands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.jsontext import json_type
from handrail.contract.requires import FsRequires, Requires
from handrail.contract.runtime import Runtime
from handrail.contract.spec import LockSpec, ToolSpec
from handrail.contract.tool import Tool
from handrail.tools.json_text import put, removed, value_at
from handrail.tools.text import blocks_between, decoded, encoded, lines_of, unified

MAX_OUTPUT = 200 * 1024
MAX_FILE = 16 * 1024 * 1024
_PATH = {
    "type": "string",
    "format": "path",
    "minLength": 1,
    "description": "The file: relative to the workspace, or absolute",
}
_POINTER = {
    "type": "string",
    "default": "",
    "description": "Where, as a JSON Pointer: /servers/0/name; the whole file if left out",
}


class JsonRead(Tool):
    spec = ToolSpec(
        id="json_read",
        description="Read one value of a JSON file, by a JSON Pointer. Returns the value and what type it is.",
        parameters={
            "type": "object",
            "properties": {"path": _PATH, "pointer": _POINTER},
            "required": ["path"],
            "additionalProperties": False,
        },
        requires=Requires(fs=FsRequires(read=("{workspace}", "{ad-hoc}"))),
        side_effect="read",
        locks=(LockSpec("file:{path}", "S"),),
        targets={"fs.read": "{path}"},
        idempotent=True,
        max_output=MAX_OUTPUT,
        category="files",
        kind="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        found = await runtime.files.read_bytes(args["path"], max_bytes=MAX_FILE)
        if found.size > len(found.data):
            text = f"{found.path} has {found.size:,} bytes; a JSON file of up to {MAX_FILE:,} is read. Use grep, or read a part"
            raise ToolError(text, kind="limit")
        pointer: str = args.get("pointer", "")
        value = await asyncio.to_thread(lambda: value_at(_text(found.data), pointer))
        return {"path": found.path, "pointer": pointer, "type": json_type(value), "value": value}


class JsonWrite(Tool):
    spec = ToolSpec(
        id="json_write",
        description=(
            "Set or remove one value of a JSON file that you have read, by a JSON Pointer; everything else in the file stays as it "
            "is. /list/- appends. Without a pointer the whole file is the value, and may be new. Returns the change as a diff."
        ),
        parameters={
            "type": "object",
            "properties": {
                "path": _PATH,
                "pointer": _POINTER,
                "value": {"description": "Any JSON value"},
                "remove": {"type": "boolean", "default": False, "description": "Instead of setting it"},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
        requires=Requires(fs=FsRequires(read=("{workspace}",), write=("{workspace}",))),
        side_effect="write",
        locks=(LockSpec("file:{path}", "X"),),
        targets={"fs.read": "{path}", "fs.write": "{path}"},
        max_output=MAX_OUTPUT,
        category="files",
        kind="edit",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path, pointer, remove = args["path"], args.get("pointer", ""), args.get("remove", False)
        if remove == ("value" in args):
            raise ToolError("give either a value or remove: true", kind="invalid_input")
        if not pointer and not remove:
            text = json.dumps(args["value"], ensure_ascii=False, indent=2) + "\n"
            written = await runtime.files.write(path, encoded(text))
        else:
            before = await runtime.files.read_for_edit(path, max_bytes=MAX_FILE)

            def change() -> str:
                return removed(_text(before), pointer) if remove else put(_text(before), pointer, args["value"])

            text = await asyncio.to_thread(change)
            written = await runtime.files.write(path, encoded(text), over=before)
        old, new = lines_of(decoded(written.before or b"")), lines_of(text)
        created = written.before is None
        diff = await asyncio.to_thread(lambda: unified(written.path, old, blocks_between(old, new), created=created))
        return {"path": written.path, "pointer": pointer, "created": created, "size": written.size, **diff.fields()}


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolError(f"the file is no JSON: byte {error.start} is not UTF-8", kind="invalid_input") from None
