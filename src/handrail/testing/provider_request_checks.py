"""Models in process for tests, and validation of requests by the rules of the providers' APIs.

The rules are a little stricter than the real ones: call IDs are unique within the whole conversation, and Anthropic's roles
alternate.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from handrail.agent.model_protocol import (
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    ModelRequest,
    ProviderError,
    ReplyFinished,
    TextDelta,
)
from handrail.catalog.provider_dialects import MCP, ProviderSchemaDialect

# Provider tools: the loopback servers send their use in a reply, and check it in a request.

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
class ServerToolUse:
    """A use of a provider tool in a reply, with its result (Anthropic).

    :param content: the content of the result block; None leaves out the result, as if the reply pauses or is cut off
    :param kind: the type of the result block; None derives it from ``name``
    :param is_used: False leaves out the use, and sends only the result
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    content: Any = None
    id: str = "srvtoolu_1"
    kind: str | None = None
    is_used: bool = True


@dataclass(frozen=True, slots=True)
class ScriptedSearchCitations:
    """The cited sources of a provider's search (OpenAI)."""

    urls: Sequence[str]

    def annotations(self) -> list[dict[str, Any]]:
        return [
            {"type": "url_citation", "url_citation": {"url": url, "title": url, "start_index": 0, "end_index": 1}}
            for url in self.urls
        ]


def stream_content_blocks(part: ServerToolUse) -> Iterator[tuple[dict[str, Any], Mapping[str, Any] | None]]:
    """Yield each block as it starts, with the arguments that follow in pieces."""
    if part.is_used:
        yield {"type": "server_tool_use", "id": part.id, "name": part.name, "input": {}}, part.arguments
    if part.content is not None:
        kind = part.kind or f"{part.name}_tool_result"
        yield {"type": kind, "tool_use_id": part.id, "content": part.content}, None


def find_server_tool_faults(tool: Mapping[str, Any]) -> list[str]:
    """Return the faults for which Anthropic would reject an entry of ``tools`` with a ``type``."""
    if (kind := tool.get("type")) not in _FORMS:
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


def find_server_tool_use_faults(
    blocks_of: Sequence[Mapping[str, Any]], where: str, *, role: object, last: bool
) -> list[str]:
    """Return the faults for which Anthropic would reject the server tool blocks of one message."""
    found: list[str] = []
    open_uses: list[object] = []
    for block in blocks_of:
        if (kind := str(block.get("type"))) == "server_tool_use":
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


def find_web_search_faults(body: Mapping[str, Any]) -> list[str]:
    """Return the faults for which OpenAI's chat completions would reject ``web_search_options``."""
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


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_ANY_ID = re.compile(r"\S+\Z")
"""Chat completions accept the ids of any server, such as ``functions.read:0``."""


def find_chat_completions_faults(body: Mapping[str, Any]) -> list[str]:
    """Return every fault of a chat completions request; none for a valid one."""
    found = find_tool_entry_faults([(_normalize_function(tool), "parameters") for tool in _dicts(body.get("tools"))])
    found += find_web_search_faults(body)
    if "tools" in body and not body["tools"]:
        found.append("[] is too short - 'tools'")
    if not (messages := _dicts(body.get("messages"))):
        found.append("'messages' is empty")
    seen: set[str] = set()
    waiting: list[str] = []
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if waiting and role != "tool":
            found.append(f"{where}: tool_call_ids without a response message before it: {', '.join(waiting)}")
            waiting = []
        match role:
            case "system" | "developer" | "user":
                collect_message_content_faults(message.get("content"), str(role), where, found)
            case "assistant":
                waiting += _check_assistant_message(message, where, seen, found)
            case "tool":
                answered = message.get("tool_call_id")
                if not _remove_answered_call(answered, waiting):
                    found.append(f"{where}: tool_call_id {answered!r} answers no open call of the message before")
                collect_message_content_faults(message.get("content"), "tool", where, found)
            case _:
                found.append(f"{where}: role {role!r}")
    if waiting:
        found.append(f"the last calls have no response messages: {', '.join(waiting)}")
    return found


def _check_assistant_message(message: Mapping[str, Any], where: str, seen: set[str], found: list[str]) -> list[str]:
    """Check an assistant's message, and return the IDs of its calls."""
    if message.get("content") is not None:
        collect_message_content_faults(message["content"], "assistant", where, found)
    calls = _dicts(message.get("tool_calls"))
    if "tool_calls" in message and not calls:
        found.append(f"{where}: tool_calls is empty")
    if not calls and not message.get("content"):
        found.append(f"{where}: an assistant message without content and tool_calls")
    ids: list[str] = []
    for call in calls:
        function = _dict(call.get("function"))
        ids.append(check_call_id(call.get("id"), where, seen, found, _ANY_ID))
        collect_tool_name_faults(function.get("name"), where, found)
        collect_arguments_json_faults(function.get("arguments"), where, found)
    return ids


def _remove_answered_call(answered: object, waiting: list[str]) -> bool:
    """Remove the answered call from the waiting ones, and return whether it was among them."""
    if answered not in waiting:
        return False
    waiting.remove(cast("str", answered))
    return True


_TEXT: Mapping[str, tuple[str, type]] = {"text": ("text", str)}
_PARTS: Mapping[str, Mapping[str, tuple[str, type]]] = {
    "system": _TEXT,
    "developer": _TEXT,
    "tool": _TEXT,
    "assistant": {**_TEXT, "refusal": ("refusal", str), "thinking": ("thinking", list)},
    "user": {**_TEXT, "image_url": ("image_url", dict), "input_audio": ("input_audio", dict), "file": ("file", dict)},
}
"""The allowed parts of a content by the role of its message, each with its required member."""


def collect_message_content_faults(content: object, role: str, where: str, found: list[str]) -> None:
    """Check that a message's content is text, or a list of the parts that its role allows."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        found.append(f"{where}: content of role {role} is neither text nor a list of parts")
        return
    for part in cast("list[object]", content):
        kind = _dict(part).get("type")
        if (known := _PARTS[role].get(str(kind))) is None:
            found.append(f"{where}: a part of type {kind!r} in a message of role {role}")
        elif not isinstance(_dict(part).get(known[0]), known[1]):
            found.append(f"{where}: a part of type {kind!r} without its {known[0]}")


def _normalize_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function for the check: without ``strict``, and with empty parameters by default."""
    function = _dict(tool.get("function"))
    kept = {key: value for key, value in function.items() if key != "strict" or not isinstance(value, bool | None)}
    return {"parameters": {"type": "object"}, **kept}


def find_anthropic_faults(body: Mapping[str, Any]) -> list[str]:
    """Return every fault of a messages request; none for a valid one."""
    found = _faults_in_tools(_dicts(body.get("tools")))
    if not isinstance(body.get("max_tokens"), int):
        found.append("max_tokens: Field required")
    if not (messages := _dicts(body.get("messages"))):
        found.append("messages: at least one message is required")
    seen: set[str] = set()
    waiting: list[str] = []
    expected = "user"
    for number, message in enumerate(messages):
        where, role = f"messages.{number}", message.get("role")
        if role != expected:
            found.append(f"{where}: roles must alternate; expected {expected!r}, found {role!r}")
        expected = "assistant" if role == "user" else "user"
        if not (blocks := _blocks(message.get("content"))):
            found.append(f"{where}: content is empty")
        found += find_server_tool_use_faults(blocks, where, role=role, last=number == len(messages) - 1)
        found += _find_result_faults(blocks, where, waiting)
        waiting = []
        for block in blocks:
            waiting += _check_block(block, role, where, seen, found)
    if waiting:
        found.append(f"the last tool_use ids have no tool_result blocks: {', '.join(waiting)}")
    return found


def _faults_in_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    found = find_tool_entry_faults([(tool, "input_schema") for tool in tools if "type" not in tool])
    for tool in tools:
        found += find_server_tool_faults(tool) if "type" in tool else []
    names = [str(tool.get("name")) for tool in tools if "name" in tool]
    found += [f"tools: Tool names must be unique: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    return found


def _find_result_faults(blocks: Sequence[Mapping[str, Any]], where: str, waiting: list[str]) -> list[str]:
    """Return the faults of the results in a message. Answered calls are removed from ``waiting``."""
    found: list[str] = []
    results = [block for block in blocks if block.get("type") == "tool_result"]
    if blocks[: len(results)] != results:
        found.append(f"{where}: tool_result blocks must come first in the content")
    for result in results:
        answered = result.get("tool_use_id")
        if not _remove_answered_call(answered, waiting):
            found.append(f"{where}: unexpected tool_use_id {answered!r} in tool_result blocks")
    if waiting:
        found.append(f"{where}: tool_use ids without tool_result blocks immediately after: {', '.join(waiting)}")
    return found


def _check_block(
    block: Mapping[str, Any], role: object, where: str, seen: set[str], found: list[str]
) -> tuple[str, ...]:
    """Check a text block or a call, and return the ID of a call."""
    if block.get("type") == "text" and not str(block.get("text", "")).strip():
        found.append(f"{where}: text content blocks must contain non-whitespace text")
    if block.get("type") != "tool_use":
        return ()
    call_id = check_call_id(block.get("id"), where, seen, found)
    collect_tool_name_faults(block.get("name"), where, found)
    if not isinstance(block.get("input"), dict):
        found.append(f"{where}: tool_use.input is not an object")
    if role != "assistant":
        found.append(f"{where}: tool_use in a message of role {role!r}")
    return (call_id,)


def find_tool_entry_faults(tools: list[tuple[Mapping[str, Any], str]]) -> list[str]:
    """Return the faults of tools, each given with the name of its schema's field."""
    found: list[str] = []
    names: set[str] = set()
    for tool, schema_key in tools:
        collect_tool_name_faults(tool.get("name"), "tools", found)
        if (name := str(tool.get("name"))) in names:
            found.append(f"tools: names must be unique, {name!r} is there twice")
        names.add(name)
        if _dict(tool.get(schema_key)).get("type") != "object":
            found.append(f"tools: {name}: {schema_key} is not the schema of an object")
        if strange := set(tool) - {"name", "description", schema_key}:
            found.append(f"tools: {name}: more than a name, a description and a schema: {', '.join(sorted(strange))}")
    return found


def check_call_id(value: object, where: str, seen: set[str], found: list[str], form: re.Pattern[str] = _ID) -> str:
    """Check the ID of a call in a history, which must differ from those ``seen``, and return it."""
    call_id = value if isinstance(value, str) else repr(value)
    if not form.match(call_id):
        found.append(f"{where}: {call_id!r} is not a call ID")
    if call_id in seen:
        found.append(f"{where}: call ids must be unique, {call_id!r} is there twice")
    seen.add(call_id)
    return call_id


def collect_tool_name_faults(name: object, where: str, found: list[str]) -> None:
    """Check that providers accept a tool's name."""
    if not isinstance(name, str) or not _NAME.match(name):
        found.append(f"{where}: {name!r} does not match '^[a-zA-Z0-9_-]{{1,64}}$'")


def collect_arguments_json_faults(arguments: object, where: str, found: list[str]) -> None:
    """Check that arguments are the JSON text of an object."""
    try:
        good = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except ValueError:
        good = False
    if not good:
        found.append(f"{where}: function.arguments is not the JSON text of an object")


def _dict(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [_dict(item) for item in cast("list[object]", value)] if isinstance(value, list) else []


def _blocks(content: object) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else _dicts(content)


# Models in process for tests: replies written in Python, and recorded requests.


@dataclass(slots=True)
class ReplyPause:
    """A pause in a reply until the test continues it: await :attr:`reached`, then set :attr:`proceed`."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    proceed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Signal that the reply has reached the pause, and wait for the test."""
        self.reached.set()
        await self.proceed.wait()


Step = BlockEvent | ReplyPause | Exception


def text_reply(text: str) -> list[BlockEvent]:
    """Return a complete reply with text."""
    return [TextDelta(text), ReplyFinished("end")]


def call_reply(*calls: tuple[str, Mapping[str, Any]], text: str = "") -> list[BlockEvent]:
    """Return a complete reply with calls after ``text``. Each call is ``(name, arguments)``."""
    events: list[BlockEvent] = [TextDelta(text)] if text else []
    for index, (name, arguments) in enumerate(calls):
        events.append(CallBlockOpened(index, None, name))
        events.append(CallArgumentsDelta(index, json.dumps(arguments)))
        events.append(CallBlockClosed(index))
    return [*events, ReplyFinished("calls")]


class PlaybackModel:
    """A model that plays one list of steps for each request.

    A step is a block event, a :class:`ReplyPause`, or an exception, which is raised. For a model that also checks its requests,
    see :class:`handrail.agent.providers.scripted_model.ScriptedModel`.
    """

    def __init__(self, *replies: Iterable[Step], dialect: ProviderSchemaDialect = MCP) -> None:
        """:param dialect: the dialect of the tool schemas"""
        self.dialect = dialect
        self._replies = [list(reply) for reply in replies]
        self.requests: list[ModelRequest] = []
        """The requests in order, including repeated attempts."""
        self.closed = False
        self.open_streams = 0
        """Number of started streams that neither ended nor were closed."""

    @property
    def name(self) -> str:
        """The name of the model."""
        return "played:model"

    async def aclose(self) -> None:
        """Mark the model as closed."""
        self.closed = True

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Play the next reply, as :meth:`handrail.agent.model_protocol.Model.stream`.

        :raises ProviderError: if no reply is left
        """
        self.requests.append(request)
        if len(self.requests) > len(self._replies):
            raise ProviderError(f"The played model has only {len(self._replies)} replies. Add one for this request.")
        steps: Sequence[Step] = self._replies[len(self.requests) - 1]
        self.open_streams += 1
        try:
            for step in steps:
                if isinstance(step, ReplyPause):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.open_streams -= 1
