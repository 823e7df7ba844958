"""A loopback server that speaks OpenAI's responses API, and refuses what the real one refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from handrail.testing.histories import call_id_of, check_arguments, check_name, tool_faults
from handrail.testing.models import Pause
from handrail.testing.provided import Cited, Provided
from handrail.testing.servers import Call, Chunk, Cut, ProviderServer, Reply, StreamError, Thinking, halves

_NATIVE = frozenset({"web_search", "code_interpreter", "image_generation"})


class ResponsesServer(ProviderServer):
    """Speaks ``POST /v1/responses`` with ``stream: true``. ``Thinking`` is sent as an encrypted reasoning item, and
    ``Provided`` as an item of its tool's, with the fields of its ``content``."""

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def takes(self, path: str) -> bool:
        return path == "/v1/responses"

    def _authorised(self, headers: Mapping[str, str]) -> bool:
        return headers.get("authorization") == f"Bearer {self.key}"

    def _faults(self, body: Mapping[str, Any]) -> list[str]:
        found = faults_in_responses_request(body)
        return found if body.get("stream") is True else [*found, "this server streams only; send stream: true"]

    def _error(self, code: str, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}

    def _steps(self, reply: Reply, model: str) -> Iterator[Chunk | Pause | Cut]:
        sent = 0

        def event(kind: str, **more: object) -> Chunk:
            nonlocal sent
            sent += 1
            return Chunk(json.dumps({"type": kind, "sequence_number": sent, **more}).encode(), kind)

        response: dict[str, Any] = {"id": "resp_1", "object": "response", "model": model, "output": []}
        yield event("response.created", response={**response, "status": "in_progress"})
        for number, part in enumerate(reply.parts):
            item: dict[str, Any]
            match part:
                case str():
                    item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": []}
                    yield event("response.output_item.added", output_index=number, item=item)
                    for piece in halves(part):
                        yield event("response.output_text.delta", output_index=number, item_id=item["id"], delta=piece)
                    yield event("response.output_item.done", output_index=number, item=item)
                case Call():
                    item = {"type": "function_call", "id": f"fc_{number}", "arguments": "", "status": "in_progress"}
                    call_id = f"call_{self._played}_{number}" if part.id is None else part.id
                    item |= {"name": part.name} if part.name is not None else {}
                    item |= {"call_id": call_id} if call_id else {}
                    yield event("response.output_item.added", output_index=number, item=item)
                    for text in part.texts():
                        yield event("response.function_call_arguments.delta", output_index=number, delta=text)
                    if part.cut_after is not None:
                        yield Cut()
                    if part.closed:
                        limited = reply.finish is not None and number == len(reply.parts) - 1
                        whole = {**item, "arguments": "".join(part.texts())}
                        whole["status"] = "incomplete" if limited else "completed"
                        yield event("response.output_item.done", output_index=number, item=whole)
                case Thinking(text, signature):
                    item = {
                        "type": "reasoning",
                        "id": f"rs_{number}",
                        "summary": [{"type": "summary_text", "text": text}],
                    }
                    item["encrypted_content"] = signature
                    yield event("response.output_item.done", output_index=number, item=item)
                case Provided():
                    item = {"type": f"{part.name}_call", "id": f"ws_{number}", **cast("dict[str, Any]", part.content)}
                    yield event("response.output_item.done", output_index=number, item=item)
                case Cited():
                    pass
                case StreamError(code, text):
                    yield event("error", code=code, message=text, param=None)
                case bytes():
                    yield Chunk(part)
                case _:
                    yield part
        if reply.ended:
            usage = {"input_tokens": reply.usage[0], "output_tokens": reply.usage[1], "total_tokens": sum(reply.usage)}
            if reply.finish is None:
                yield event("response.completed", response={**response, "status": "completed", "usage": usage})
            else:
                ended = {**response, "status": "incomplete", "incomplete_details": {"reason": reply.finish}}
                yield event("response.incomplete", response={**ended, "usage": usage})


def faults_in_responses_request(body: Mapping[str, Any]) -> list[str]:
    """Why a request would be refused: every fault found, none for a good one."""
    tools = [cast("dict[str, Any]", tool) for tool in body.get("tools") or ()]
    own = [tool for tool in tools if tool.get("type") == "function"]
    found = tool_faults(
        [({k: v for k, v in tool.items() if k not in ("type", "strict")}, "parameters") for tool in own]
    )
    found += [f"tools: type {tool.get('type')!r}" for tool in tools if tool.get("type") not in (*_NATIVE, "function")]
    if any(tool.get("strict") is not False for tool in own):
        found.append("tools: strict would make every property required")
    if body.get("store") is not False:
        found.append("store: this test wants nothing stored")
    items = [cast("dict[str, Any]", item) for item in body.get("input") or ()]
    if not items:
        found.append("input: at least one item is required")
    seen: set[str] = set()
    waiting: list[str] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                if item.get("role") not in ("user", "assistant") or not _is_content(item):
                    found.append(f"{where}: no message: {item}")
            case "function_call":
                waiting.append(call_id_of(item.get("call_id"), where, seen, found))
                check_name(item.get("name"), where, found)
                check_arguments(item.get("arguments"), where, found)
            case "function_call_output":
                if item.get("call_id") in waiting:
                    waiting.remove(item["call_id"])
                else:
                    found.append(f"{where}: no tool call found for function call output {item.get('call_id')!r}")
                if not isinstance(item.get("output"), str):
                    found.append(f"{where}: output is not text")
            case "reasoning":
                if not item.get("encrypted_content"):
                    found.append(f"{where}: item {item.get('id')!r} not found: nothing is stored")
            case "web_search_call":
                pass
            case kind:
                found.append(f"{where}: type {kind!r}")
    found += [f"no tool output found for function call {call_id}" for call_id in waiting]
    return found


def _is_content(item: Mapping[str, Any]) -> bool:
    """A text, or, of the user's, a list of texts and images."""
    content = item.get("content")
    if isinstance(content, str):
        return True
    parts = cast("list[dict[str, Any]]", content) if isinstance(content, list) else []
    members = {"input_text": "text", "input_image": "image_url"}
    known = (isinstance(part.get(members.get(str(part.get("type")), "")), str) for part in parts)
    return item.get("role") == "user" and bool(parts) and all(known)
