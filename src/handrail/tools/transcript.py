"""search_memory: finding again what was said and done in the session."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.requires import Requires
from handrail.contract.runtime import Runtime
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.contract.transcript import Passage
from handrail.tools.declaring import object_schema

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


def _shown(one: Passage) -> dict[str, object]:
    at = datetime.fromtimestamp(one.at_ns / 1e9, UTC).isoformat(timespec="seconds")
    shown: dict[str, object] = {"id": one.id, "kind": one.kind, "at": at, "text": one.text}
    if one.tool is not None:
        shown["tool"] = one.tool
    if one.untrusted is not None:
        shown["untrusted"] = one.untrusted
    return shown
