"""search_memory and artifact.read: finding again what was said and done in the session, and what its calls made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.doors.transcript import Passage
from handrail.contract.errors import ToolError
from handrail.contract.result import Blob, Result
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import MAX_OUTPUT, object_schema
from handrail.tools.files.reading import MAX_IMAGE, bytes_shown, image_type, most_bytes

MOST_HITS = 50
MOST_CHARACTERS = 16_000


class SearchMemory(Tool):
    spec = ToolSpec(
        id="search_memory",
        description=(
            "Search all that was said and done in this session, also what is no longer in your view: messages, calls and "
            "their results. Give words (or a phrase in double quotes), or the id of a hit to read it whole."
        ),
        parameters=object_schema(
            {
                "query": {"type": "string", "minLength": 1, "maxLength": 400},
                "kind": {
                    "enum": ["user", "assistant", "call", "notice"],
                    "description": "Only this: what the user said, what you said, calls with their results, notices",
                },
                "limit": {"type": "integer", "minimum": 1, "maximum": MOST_HITS, "default": 10},
                "id": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 300,
                    "description": "Of a hit, in place of query",
                },
                "offset": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "With id: the first character, as next said",
                },
            }
        ),
        requires=Requires(capabilities=("transcript",)),
        side_effect="read",
        locks=(),
        idempotent=True,
        category="memory",
        kind="search",
    )

    def check(self, args: dict[str, Any]) -> None:
        if ("query" in args) == ("id" in args) or ("offset" in args and "id" not in args):
            raise ToolError("give a query, or the id of a hit with or without an offset", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if "id" in args:
            found = await runtime.transcript.passage(args["id"], start=args.get("offset", 0), most=MOST_CHARACTERS)
            return {**_shown(found), "next": found.next}
        kinds = (args["kind"],) if "kind" in args else ()
        recalled = await runtime.transcript.search(args["query"], limit=args.get("limit", 10), kinds=kinds)
        answer: dict[str, object] = {
            "hits": [_shown(one) for one in recalled.passages],
            "found": recalled.found,
            "searched": recalled.searched,
        }
        if recalled.older_left_out:
            answer["older_left_out"] = True
        return answer


class ReadArtifact(Tool):
    spec = ToolSpec(
        id="artifact.read",
        description=(
            "Read an artifact of this session by its reference: the stored output that a result names as artifact "
            "`sha256:…`. An image is returned as an image, text as text; give offset and limit for a range of "
            "other bytes. Stops at about 200 KB; `next` is the offset to go on from, or null at the end."
        ),
        parameters=object_schema(
            {
                "ref": {
                    "type": "string",
                    "pattern": "^sha256:[0-9a-f]{64}$",
                    "description": "The reference, as the result of a call names it",
                },
                "offset": {
                    "type": "integer",
                    "description": "First byte, counted from 0; below 0 counts from the end. Default 0",
                },
                "limit": {"type": "integer", "minimum": 1, "description": "At most this many bytes"},
            },
            ["ref"],
        ),
        requires=Requires(capabilities=("transcript",)),
        side_effect="read",
        locks=(),
        idempotent=True,
        max_output=MAX_OUTPUT,
        category="memory",
        kind="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        found = await runtime.transcript.artifact(args["ref"])
        data, size = found.data, len(found.data)
        told: dict[str, object] = {"ref": found.ref, "media_type": found.media_type}
        image = image_type(data) if size <= MAX_IMAGE and not args.keys() & {"offset", "limit"} else None
        if image is not None:
            told |= {"image": Blob(data, image), "size": size}
        else:
            offset: int = args.get("offset", 0)
            begin = min(offset, size) if offset >= 0 else max(size + offset, 0)
            most = most_bytes(runtime)
            part = data[begin : begin + min(args.get("limit", most), most)]
            told |= bytes_shown(part, begin, size, most)
            if "base64" in told and not args.keys() & {"offset", "limit"}:
                raise ToolError(
                    f"{found.ref} is binary ({found.media_type}, {size:,} bytes). Give offset and limit to read a range of it "
                    "in base64.",
                    kind="invalid_input",
                )
        return Result.output(told) if found.untrusted is None else Result.output(told, untrusted=found.untrusted)


def _shown(one: Passage) -> dict[str, object]:
    at = datetime.fromtimestamp(one.at_ns / 1e9, UTC).isoformat(timespec="seconds")
    shown: dict[str, object] = {"id": one.id, "kind": one.kind, "at": at, "text": one.text}
    if one.tool is not None:
        shown["tool"] = one.tool
    if one.untrusted is not None:
        shown["untrusted"] = one.untrusted
    return shown
