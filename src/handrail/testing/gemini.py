"""A loopback server that speaks the Gemini API, and refuses what the real one refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from handrail.testing.histories import check_name
from handrail.testing.models import Pause
from handrail.testing.provided import Cited, Provided
from handrail.testing.servers import Call, Chunk, Cut, ProviderServer, Reply, StreamError, Thinking, halves


class GeminiServer(ProviderServer):
    """Speaks ``POST /v1/models/NAME:streamGenerateContent?alt=sse``. A ``Thinking`` is a hidden thought, whose
    signature stands at the part that comes next; a call is one part."""

    @property
    def base_url(self) -> str:
        return self.address

    def takes(self, path: str) -> bool:
        return path.startswith(("/v1/models/", "/v1beta/models/")) and path.endswith(":streamGenerateContent")

    def _authorised(self, headers: Mapping[str, str]) -> bool:
        return headers.get("x-goog-api-key") == self.key

    def _faults(self, body: Mapping[str, Any]) -> list[str]:
        return faults_in_gemini_request(body)

    def _error(self, code: str, message: str) -> dict[str, Any]:
        return {"error": {"code": 400, "message": message, "status": code.upper()}}

    def _steps(self, reply: Reply, model: str) -> Iterator[Chunk | Pause | Cut]:
        def chunk(*parts: Mapping[str, Any], finish: str | None = None, **more: object) -> Chunk:
            candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
            candidate |= {"finishReason": finish} if finish else {}
            return Chunk(json.dumps({"candidates": [candidate], "modelVersion": model, **more}).encode())

        signed: dict[str, str] = {}
        for number, part in enumerate(reply.parts):
            match part:
                case str():
                    for piece in halves(part):
                        yield chunk({"text": piece, **signed})
                        signed = {}
                case Call():
                    if part.cut_after is not None:
                        yield Cut()
                    call: dict[str, Any] = {"args": json.loads("".join(part.texts()) or "{}")}
                    call_id = f"fc-{self._played}-{number}" if part.id is None else part.id
                    call |= {"name": part.name} if part.name is not None else {}
                    call |= {"id": call_id} if call_id else {}
                    yield chunk({"functionCall": call, **signed})
                    signed = {}
                case Thinking(text, signature):
                    yield chunk({"text": text, "thought": True})
                    signed = {"thoughtSignature": base64.b64encode(signature.encode()).decode()}
                case Provided() | Cited():
                    pass
                case StreamError(code, text):
                    yield Chunk(json.dumps({"error": {"code": 500, "status": code.upper(), "message": text}}).encode())
                case bytes():
                    yield Chunk(part)
                case _:
                    yield part
        if reply.ended:
            usage = {"promptTokenCount": reply.usage[0], "candidatesTokenCount": reply.usage[1]}
            yield chunk(finish=reply.finish or "STOP", usageMetadata=usage)


def faults_in_gemini_request(body: Mapping[str, Any]) -> list[str]:
    """Why a request would be refused: every fault found, none for a good one."""
    found: list[str] = []
    declared = [one for tool in body.get("tools") or () for one in tool.get("functionDeclarations") or ()]
    names = [cast("dict[str, Any]", one).get("name") for one in declared]
    for name in names:
        check_name(name, "tools", found)
    found += [f"tools: duplicate function declaration {name}" for name in set(names) if names.count(name) > 1]
    contents = [cast("dict[str, Any]", content) for content in body.get("contents") or ()]
    if not contents:
        found.append("contents is not specified")
    expected, waiting = "user", list[tuple[str, str]]()
    for number, content in enumerate(contents):
        where, role = f"contents[{number}]", content.get("role")
        if role != expected:
            found.append(f"{where}: please ensure that roles alternate; expected {expected!r}, found {role!r}")
        expected = "model" if role == "user" else "user"
        parts = [cast("dict[str, Any]", part) for part in content.get("parts") or ()]
        if not parts:
            found.append(f"{where}: parts is empty")
        answers = [part["functionResponse"] for part in parts if "functionResponse" in part]
        if sorted((str(one.get("id")), str(one.get("name"))) for one in answers) != sorted(waiting):
            found.append(f"{where}: function response parts must equal function call parts of the turn before")
        found += [
            f"{where}: a function response is no object" for one in answers if not isinstance(one.get("response"), dict)
        ]
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        for call in calls:
            check_name(call.get("name"), where, found)
        waiting = [(str(call.get("id")), str(call.get("name"))) for call in calls]
    found += [f"function call {call_id} has no response" for call_id, _ in waiting]
    return found
