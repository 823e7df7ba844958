"""Tools that a provider carries out itself, as the loopback servers play them and judge them in a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

_FORMS: Mapping[str, tuple[str, frozenset[str]]] = {
    "web_search_20250305": (
        "web_search",
        frozenset({"max_uses", "allowed_domains", "blocked_domains", "user_location"}),
    ),
    "web_fetch_20250910": (
        "web_fetch",
        frozenset({"max_uses", "max_content_tokens", "allowed_domains", "blocked_domains", "citations"}),
    ),
    "code_execution_20250825": ("code_execution", frozenset()),
}


@dataclass(frozen=True, slots=True)
class Provided:
    """A use of the provider's own tool in a reply, and what came of it (Anthropic).

    :param content: of the result block; None leaves the result out, as where the reply pauses or breaks off
    :param kind: of the result block; None makes it of ``name``
    :param used: False leaves the use out, so that the result stands alone
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    content: Any = None
    id: str = "srvtoolu_1"
    kind: str | None = None
    used: bool = True


@dataclass(frozen=True, slots=True)
class Cited:
    """Sources that a search of the provider's own is said to stand on (OpenAI)."""

    urls: Sequence[str]

    def annotations(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "url_citation",
                "url_citation": {"url": url, "title": url, "start_index": 0, "end_index": 1},
            }
            for url in self.urls
        ]


def blocks(part: Provided) -> Iterator[tuple[dict[str, Any], Mapping[str, Any] | None]]:
    """Each block as it starts, and the arguments that follow in pieces."""
    if part.used:
        yield {"type": "server_tool_use", "id": part.id, "name": part.name, "input": {}}, part.arguments
    if part.content is not None:
        kind = part.kind or f"{part.name}_tool_result"
        yield {"type": kind, "tool_use_id": part.id, "content": part.content}, None


def fault_in_form(tool: Mapping[str, Any]) -> list[str]:
    """Why Anthropic would refuse an entry of ``tools`` that has a ``type``."""
    kind = tool.get("type")
    if kind not in _FORMS:
        return [f"tools: Input tag {kind!r} does not match any of the expected tags"]
    name, options = _FORMS[cast("str", kind)]
    found = [
        f"tools: {kind}: {key}: Extra inputs are not permitted"
        for key in sorted(set(tool) - options - {"type", "name"})
    ]
    if tool.get("name") != name:
        found.append(f"tools: {kind}: name is {tool.get('name')!r}; expected {name!r}")
    if "allowed_domains" in tool and "blocked_domains" in tool:
        found.append(f"tools: {kind}: allowed_domains and blocked_domains together")
    return found


def faults_in_uses(blocks_of: Sequence[Mapping[str, Any]], where: str, *, role: object, last: bool) -> list[str]:
    """Why Anthropic would refuse the server tools' blocks of one message."""
    found: list[str] = []
    open_uses: list[object] = []
    for block in blocks_of:
        kind = str(block.get("type"))
        if kind == "server_tool_use":
            open_uses.append(block.get("id"))
            if role != "assistant":
                found.append(f"{where}: server_tool_use in a message of role {role!r}")
            if not isinstance(block.get("input"), dict):
                found.append(f"{where}: server_tool_use.input is not an object")
        elif kind.endswith("_tool_result") and kind != "tool_result":
            if block.get("tool_use_id") in open_uses:
                open_uses.remove(block.get("tool_use_id"))
            else:
                found.append(f"{where}: {kind} without its server_tool_use before it")
    if open_uses and not last:
        found.append(f"{where}: server_tool_use ids without their results: {', '.join(map(str, open_uses))}")
    return found


def faults_in_search(body: Mapping[str, Any]) -> list[str]:
    """Why OpenAI's chat completions would refuse ``web_search_options``."""
    given: Any = body.get("web_search_options")
    if given is None:
        return []
    if "search" not in str(body.get("model")):
        return ["Web search options not supported with this model."]
    options = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    strange = set(options) - {"search_context_size", "user_location"}
    found = [f"web_search_options: unknown parameter {key!r}" for key in sorted(strange)]
    place: Any = options.get("user_location")
    if place is not None and (
        not isinstance(place, dict) or set(cast("dict[str, Any]", place)) != {"type", "approximate"}
    ):
        found.append("web_search_options: user_location takes type and approximate")
    return found
