"""json_read and json_write: one value of a JSON file, by where it stands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.text.json import json_type
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import FILE, file_changing, file_reading, object_schema
from handrail.tools.files.json_text import put, removed, steps, value_at
from handrail.tools.files.text import blocks_between, decoded, encoded, line_end, lines_of, unified, with_line_end

MAX_FILE = 4 * 1024 * 1024
_POINTER = {
    "type": "string",
    "maxLength": 10_000,
    "default": "",
    "description": "Where, as a JSON Pointer: /servers/0/name; the whole file if left out",
}


class JsonRead(Tool):
    spec = file_reading(
        id="json_read",
        description="Read one value of a JSON file, by a JSON Pointer. Returns the value and what type it is.",
        parameters=object_schema({"path": FILE, "pointer": _POINTER}, ["path"]),
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
    spec = file_changing(
        id="json_write",
        description=(
            "Set or remove one value of a JSON file that you have read, by a JSON Pointer; everything else in the file stays as it "
            "is. /list/- appends. Without a pointer the whole file is the value, and may be new. Returns the change as a diff."
        ),
        parameters=object_schema(
            {
                "path": FILE,
                "pointer": _POINTER,
                "value": {"description": "Any JSON value"},
                "remove": {"type": "boolean", "default": False, "description": "Instead of setting it"},
            },
            ["path"],
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        if args.get("remove", False) == ("value" in args):
            raise ToolError("give either a value or remove: true", kind="invalid_input")
        steps(args.get("pointer", ""))

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path, pointer, remove = args["path"], args.get("pointer", ""), args.get("remove", False)
        if not pointer and not remove:
            text = json.dumps(args["value"], ensure_ascii=False, indent=2) + "\n"
            text = with_line_end(text, await _line_end(path, runtime))
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


async def _line_end(path: str, runtime: Runtime) -> str:
    """The one that the file has; where it is new, or may not be changed, as writing then says, the usual one."""
    try:
        return line_end(decoded(await runtime.files.read_for_edit(path, max_bytes=MAX_FILE)))
    except ToolError:
        return "\n"


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolError(f"the file is no JSON: byte {error.start} is not UTF-8", kind="invalid_input") from None
