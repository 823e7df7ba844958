"""Tool calls written as text, for models without tool calling: two forms, with explanation, writer and parser.

*Bracket*, after a closing tag that follows the name::

    [/edit]@@path=notes.md
    @@old<<END
    one line
    another
    END
    @@new=one line[edit/]

*XML*::

    <call name="edit"><arg name="path">notes.md</arg><arg name="old">one line</arg>…</call>

A call begins at the start of a line, outside code fences and ``<think>``, and counts once it is closed. A call that is
still open when the text ends never runs. The tool's schema decides whether a value is text or JSON: text is taken
unchanged, so no quoting is needed and the parser guesses nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, Protocol, cast, get_args

from handrail.agent.model_protocol import (
    AssistantMessage,
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResultsMessage,
    HistoryCallPart,
    Message,
    Model,
    ModelRequest,
    ReplyFinished,
    TextDelta,
    TextPart,
    UserMessage,
    UserPicture,
    get_model_origin,
    takes_pictures,
)
from handrail.agent.system_prompt import STRUCTURED_ONLY
from handrail.catalog.provider_dialects import TEXT, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool
from handrail.contract.text.strict_json import MAX_ARGUMENT_BYTES

# Parts of a reply in which no call begins: code fences, and a model's thoughts before its answer.

_FENCE = re.compile(r"[ \t]{0,3}(`{3,}(?=[^`]*$)|~{3,})")
_THOUGHTS = re.compile(r"[ \t]*<(think|thinking)>")
_MAX_LINE_START = 80
"""The characters at the beginning of a line that can contain a fence or an opening tag."""


class FenceAndThoughtTracker:
    """A tracker of code fences and thoughts in a reply, which arrives in pieces of any length."""

    def __init__(self) -> None:
        self._fence: str | None = None
        self._thoughts_end: str | None = None
        self._line = ""
        """The line so far, up to the length of a fence."""
        self._tail = ""
        """The end of the line, which may contain the beginning of the end of thoughts."""

    @property
    def is_inside(self) -> bool:
        """Whether the next line starts inside a code fence or thoughts."""
        return self._fence is not None or self._thoughts_end is not None

    def feed_line_piece(self, piece: str) -> None:
        """Process a further piece of a line, with its line feed if it has one."""
        text = piece.removesuffix("\n")
        self._line = (self._line + text[:_MAX_LINE_START])[:_MAX_LINE_START]
        if self._thoughts_end is None and self._fence is None and (begun := _THOUGHTS.match(self._line)) is not None:
            self._thoughts_end = f"</{begun[1]}>"
        if self._thoughts_end is not None:
            if self._thoughts_end in self._tail + text:
                self._thoughts_end, self._line = None, "-"  # no fence or thought can start in the rest of this line
            self._tail = (self._tail + text)[-len("</thinking>") :]
        if piece.endswith("\n"):
            if self._thoughts_end is None:
                self._end_of_line()
            self._line = self._tail = ""

    def _end_of_line(self) -> None:
        if self._fence is None:
            fence = _FENCE.match(self._line)
            self._fence = None if fence is None else fence[1]
        elif (line := self._line.strip()).startswith(self._fence) and not line.strip(self._fence[0]):
            self._fence = None


TextForm = Literal["bracket", "xml"]
TEXT_FORMS: tuple[TextForm, ...] = get_args(TextForm)

_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,63}"
_BLANK = r"[ \t]{0,16}"
# The valid names of arguments. The text dialect renames others.
_KEY = r'[^\s=<>"@]{1,128}'
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}
_ENTITY = re.compile("|".join(_ENTITIES))
JsonSchema = Mapping[str, Any]
ArgumentPairs = list[tuple[str, str]]
"""Arguments in order, including duplicates, with their values as JSON text."""


class TextCallGrammar(Protocol):
    """A text form of calls. A body is the text between the tags."""

    rules: str
    """The explanation of the form for the model."""
    opening: re.Pattern[str]
    """Matches the opening tag. The first group is the tool's wire name."""
    partial_opening: re.Pattern[str]
    """Matches a text that can still become an opening tag."""
    escapes: bool
    """Whether a backslash before a closing tag makes it plain text."""

    def closing_tag(self, name: str) -> str:
        """Return the tag that ends a call of this tool."""
        ...

    def parse_arguments(self, name: str, body: str, schema: JsonSchema) -> ArgumentPairs: ...

    def format_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Format a call as a model would write it."""
        ...


class BracketGrammar:
    """The form ``[/name]@@key=value … [name/]``."""

    rules = """\
[/tool_name]@@key=value
@@other_key<<END
a value of
several lines
END
[tool_name/]

Each argument starts a line with @@: @@key=value takes one line, @@key<<END continues until a line that is only END (any word \
works). Values that are not strings are JSON. If one required string is left, its text may follow the other arguments \
without a key. Inside a value, write \\[tool_name/] for the closing tag itself."""
    opening = re.compile(rf"{_BLANK}\[/({_NAME})\]")
    partial_opening = re.compile(rf"{_BLANK}(?:\[(?:/(?:{_NAME})?)?)?")
    escapes = True
    _argument = re.compile(rf"[ \t]*@@({_KEY})(=|<<)(.*)", re.DOTALL)

    def closing_tag(self, name: str) -> str:
        return f"[{name}/]"

    def parse_arguments(self, name: str, body: str, schema: JsonSchema) -> ArgumentPairs:
        # If the closing tag has a separate line, the body ends before that line.
        lines = iter(body.removesuffix("\n").split("\n"))
        given: ArgumentPairs = []
        rest: list[str] = []
        for line in lines:
            found = None if rest else self._argument.match(line)
            if found is None:
                if rest or line.strip():
                    rest.append(line)
                continue
            key, sign, value = found.groups()
            value = value.strip()
            if sign == "<<":
                word, body_of = value, _lines_until(lines, value)
                if body_of is None:  # the rest may be part of the intended value
                    given.append((f"{key} without a final line {word}", json.dumps(key)))
                    break
                value = "\n".join(body_of)
            given.append((key, encode_text_argument_as_json(self._format_plain(name, value), key, schema)))
        if rest:
            given.append((_find_body_key(schema, given), json.dumps(self._format_plain(name, "\n".join(rest)))))
        return given

    def format_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        parts = [f"[/{name}]"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text = re.sub(
                rf"(?<!\\)(\\*)({re.escape(self.closing_tag(name))})", lambda tag: tag[1] * 2 + "\\" + tag[2], text
            )
            if "\n" in text or text != text.strip() or not text:
                word = _find_unused_word(text)
                parts.append(f"@@{key}<<{word}\n{text}\n{word}\n")
            else:
                parts.append(f"@@{key}={text}\n")
        return "".join(parts) + self.closing_tag(name)

    def _format_plain(self, name: str, text: str) -> str:
        # Matches only at the first of several backslashes, so that one pass over the text is enough.
        return re.sub(
            rf"(?<!\\)(\\+)({re.escape(self.closing_tag(name))})", lambda tag: tag[1][: len(tag[1]) // 2] + tag[2], text
        )


class XmlGrammar:
    """The form ``<call name="…"><arg name="…">…</arg></call>``."""

    rules = """\
<call name="tool_name">
<arg name="key">value</arg>
<arg name="other_key">a value of
several lines</arg>
</call>

Values that are not strings are JSON. Inside a value, write &lt; for < and &amp; for & if they would read as a tag or an entity."""
    opening = re.compile(rf'{_BLANK}<call name="({_NAME})">')
    partial_opening = re.compile(
        rf'{_BLANK}(?:<|<c|<ca|<cal|<call|<call |<call n|<call na|<call nam|<call name|<call name=|<call name="(?:{_NAME})?"?)?'
    )
    escapes = False
    _argument = re.compile(rf'<arg name="({_KEY})">(.*?)</arg>', re.DOTALL)

    def closing_tag(self, name: str) -> str:
        return "</call>"

    def parse_arguments(self, name: str, body: str, schema: JsonSchema) -> ArgumentPairs:
        given: ArgumentPairs = []
        end = 0
        stray = ""
        last = body.rfind("</arg>") + len("</arg>") if "</arg>" in body else 0  # a later tag is never closed
        for found in self._argument.finditer(body, 0, last):
            stray += body[end : found.start()].strip()
            end = found.end()
            text = str(found[2])
            if "\n" in text:
                text = text.removeprefix("\n").removesuffix("\n")
            given.append((found[1], encode_text_argument_as_json(_ENTITY.sub(_decode_entity, text), found[1], schema)))
        stray += body[end:].strip()
        if stray:
            given.append(("text outside <arg>", json.dumps(stray[:200])))
        return given

    def format_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        parts = [f'<call name="{name}">']
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text = text.replace("&", "&amp;").replace("<", "&lt;")
            if text[:1] == "\n" or text[-1:] == "\n":
                text = f"\n{text}\n"
            parts.append(f'\n<arg name="{key}">{text}</arg>')
        return "".join(parts) + "\n</call>"


GRAMMARS: Mapping[TextForm, TextCallGrammar] = {"bracket": BracketGrammar(), "xml": XmlGrammar()}


class TextCallReader:
    """A reader of one reply's text that yields text and calls as block events.

    :param schemas: the parameters of the loaded tools, by wire name; all arguments of other tools are read as strings
    """

    def __init__(self, grammar: TextCallGrammar, schemas: Mapping[str, JsonSchema]) -> None:
        self._grammar = grammar
        self._schemas = schemas
        self._held = ""
        """The start of a line that may become an opening tag, or the text that may become a closing tag."""
        self._at_line_start = True
        self._quoting = FenceAndThoughtTracker()
        self._open: str | None = None
        """The tool of the call that is being read."""
        self._body: list[str] = []
        self._length = 0
        self.calls = 0

    def feed_text(self, text: str) -> Iterator[BlockEvent]:
        """Process a piece of text of any length."""
        text, self._held = self._held + text, ""
        left: str = text
        while left:
            left = yield from (self._read_text(left) if self._open is None else self._read_call(left))

    def end_text(self) -> Iterator[BlockEvent]:
        """Process the end of the text. An open call stays open, with the arguments so far."""
        held, self._held = self._held, ""
        if self._open is not None:
            yield CallArgumentsDelta(self.calls - 1, "".join(self._body) + held)
        elif held:
            yield TextDelta(held)

    def _read_text(self, text: str) -> Generator[BlockEvent, None, str]:
        """Process plain text, and return the rest of ``text`` if a call begins in it."""
        items: list[str] = []
        at = 0
        while at < len(text):
            if self._at_line_start and not self._quoting.is_inside:
                if (opening := self._grammar.opening.match(text, at)) is not None:
                    if items:
                        yield TextDelta("".join(items))
                    self._open = opening[1]
                    yield CallBlockOpened(self.calls, None, opening[1])
                    self.calls += 1
                    return text[opening.end() :]
                if self._grammar.partial_opening.fullmatch(text, at):
                    self._held = text[at:]
                    break
            begun, at = at, text.find("\n", at) + 1 or len(text)
            items.append(line := text[begun:at])
            self._quoting.feed_line_piece(line)
            self._at_line_start = line.endswith("\n")
        if items:
            yield TextDelta("".join(items))
        return ""

    def _read_call(self, text: str) -> Generator[BlockEvent, None, str]:
        """Process the text of a call, and return the rest of ``text`` if the call ends in it."""
        assert self._open is not None
        closing = self._grammar.closing_tag(self._open)
        at = _find_unescaped(text, closing) if self._grammar.escapes else text.find(closing)
        if at < 0:
            # An incomplete tag, or a backslash before it, is examined again with the next piece.
            keep = _partial_tag_length(text, closing)
            self._append_body(text[: len(text) - keep])
            self._held = text[len(text) - keep :]
            return ""
        self._append_body(text[:at])
        body, index = "".join(self._body), self.calls - 1
        if self._length > MAX_ARGUMENT_BYTES:
            yield CallArgumentsDelta(index, body)
        else:
            schema = self._schemas.get(self._open, {})
            pairs = self._grammar.parse_arguments(self._open, body, schema)
            yield CallArgumentsDelta(index, "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in pairs) + "}")
        yield CallBlockClosed(index)
        self._open, self._body, self._length = None, [], 0
        self._at_line_start = True
        return text[at + len(closing) :]

    def _append_body(self, piece: str) -> None:
        """Add a piece to the body, as far as needed to see that it is too long."""
        if piece and self._length <= MAX_ARGUMENT_BYTES:
            self._length += len(piece)
            self._body.append(piece)


def format_text_call_prompt(grammar: TextCallGrammar, views: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of the system text that explains these tools and how to call them."""
    lines = [
        "# Calling tools",
        "",
        "To call a tool, write this at the start of a line, outside code fences:",
        "",
        grammar.rules,
        "",
        "Write the calls at the end of your reply. The next message contains their results. The tools:",
    ]
    for view in views:
        parameters = json.dumps(view["parameters"], ensure_ascii=False, separators=(",", ":"))
        lines += ["", f"## {view['name']}", "", str(view["description"]), "", f"Arguments (JSON Schema): {parameters}"]
    return "\n".join(lines)


def encode_text_argument_as_json(text: str, key: str, schema: JsonSchema) -> str:
    """Return the value of ``text`` under ``key`` as JSON.

    It is a string if the schema accepts text, else the parsed JSON. Invalid JSON stays text, and the schema then rejects it
    with what it expects.
    """
    if not _accepts_text(_property_schema(schema, key)):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return text
    return json.dumps(text)


def _property_schema(schema: JsonSchema, key: str) -> object:
    properties = schema.get("properties")
    return cast("Mapping[str, object]", properties).get(key) if isinstance(properties, Mapping) else None


def _accepts_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return True
    node = cast("Mapping[str, Any]", schema)
    if "type" in node:
        return "string" in ([node["type"]] if isinstance(node["type"], str) else node["type"])
    if isinstance(values := node.get("enum"), list):
        return any(isinstance(value, str) for value in cast("list[object]", values))
    for word in ("anyOf", "oneOf"):
        if isinstance(choices := node.get(word), list):
            return any(_accepts_text(choice) for choice in cast("list[object]", choices))
    return not node.keys() & {"properties", "items", "prefixItems", "minimum", "maximum", "const", "$ref"}


def _find_body_key(schema: JsonSchema, given: ArgumentPairs) -> str:
    """Return the key of a text without a key: the only required string that was not given."""
    given_keys = {key for key, _ in given}
    required = cast("Sequence[str]", schema.get("required") or ())
    left = [key for key in required if key not in given_keys and _accepts_text(_property_schema(schema, key))]
    return left[0] if len(left) == 1 else "text without a key"


def _decode_entity(entity: re.Match[str]) -> str:
    return _ENTITIES[entity[0]]


def _lines_until(lines: Iterator[str], word: str) -> list[str] | None:
    """Return the lines before the line ``word``, or None if it is missing."""
    found: list[str] = []
    for line in lines:
        if line.strip() == word:
            return found
        found.append(line)
    return None


def _find_unused_word(text: str) -> str:
    word, lines = "END", {line.strip() for line in text.split("\n")}
    while word in lines:
        word += "_"
    return word


def _find_unescaped(text: str, tag: str) -> int:
    """Return the position of ``tag`` without an odd number of backslashes before it, or -1."""
    at = text.find(tag)
    while at >= 0:
        before = at
        while before and text[before - 1] == "\\":
            before -= 1
        if (at - before) % 2 == 0:
            return at
        at = text.find(tag, at + 1)
    return -1


def _partial_tag_length(text: str, tag: str) -> int:
    """Return how many characters at the end of ``text`` must be examined again with the next piece.

    These are an incomplete ``tag``, and a backslash before it that may escape it.
    """
    keep = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    head = text[: len(text) - keep]
    return keep + (len(head) - len(head.rstrip("\\"))) % 2


# A provider for models without tool calling: it describes tools in the system text and reads calls from the reply.


class TextCallModel:
    """A model whose calls are written as text, in one of the forms of :mod:`handrail.agent.text_tool_calls`.

    The provider gets no tools. Results go back in a user message, one line of JSON for each call.
    """

    def __init__(self, model: Model, form: TextForm) -> None:
        self._model = model
        self._grammar = GRAMMARS[form]

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def origin(self) -> str:
        return get_model_origin(self._model)

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return TEXT

    @property
    def takes_pictures(self) -> bool:
        return takes_pictures(self._model)

    async def aclose(self) -> None:
        await self._model.aclose()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        views = [adapt_tool(view, TEXT)[0] for view in request.tools]
        reader = TextCallReader(self._grammar, {view["name"]: view["inputSchema"] for view in views})
        events = cast(
            "AsyncGenerator[BlockEvent, None]", self._model.stream(self._convert_request_to_text(request, views))
        )
        over = False
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    for one in reader.feed_text(event.text):
                        yield one
                elif isinstance(event, ReplyFinished):
                    over = True
                    for one in reader.end_text():
                        yield one
                    yield ReplyFinished("calls") if event.reason == "end" and reader.calls else event
                else:
                    yield event
        if not over:
            for one in reader.end_text():
                yield one

    def _convert_request_to_text(self, request: ModelRequest, views: Sequence[Mapping[str, Any]]) -> ModelRequest:
        system = request.system.replace(STRUCTURED_ONLY, "")
        if views:
            items = [{**view, "parameters": view["inputSchema"]} for view in views]
            system = f"{system.rstrip()}\n\n{format_text_call_prompt(self._grammar, items)}\n"
        return replace(
            request, system=system, messages=list(_text_messages(request.messages, self._grammar)), tools=[], native=()
        )


def _text_messages(messages: Sequence[Message], grammar: TextCallGrammar) -> Iterator[Message]:
    """Yield the conversation as text alone.

    Consecutive user messages are joined, because some providers reject them.
    """
    names: dict[str, str] = {}
    waiting: list[str] = []
    pictures: list[UserPicture] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            if waiting:
                yield UserMessage("\n\n".join(waiting), tuple(pictures))
                waiting, pictures = [], []
            names = {call.wire_id: call.name for call in message.calls}
            yield AssistantMessage(tuple(_parts_without_calls(message, grammar)))
        elif isinstance(message, CallResultsMessage):
            pictures += [picture for result in message.results for picture in result.pictures]
            waiting.append(
                "\n".join(
                    f"Result of call {number} ({names.get(result.wire_id, 'unknown')}): {result.text}"
                    for number, result in enumerate(message.results, 1)
                )
            )
        else:
            waiting.append(message.text)
            pictures += message.pictures
    if waiting:
        yield UserMessage("\n\n".join(waiting), tuple(pictures))


def _parts_without_calls(message: AssistantMessage, grammar: TextCallGrammar) -> Iterator[Any]:
    text = ""
    for part in message.parts:
        if isinstance(part, TextPart):
            text += part.text
        elif isinstance(part, HistoryCallPart):
            text += (
                ("\n" if text and not text.endswith("\n") else "")
                + grammar.format_call(part.name, part.arguments)
                + "\n"
            )
        else:
            if text:
                yield TextPart(text)
            text = ""
            yield part
    if text:
        yield TextPart(text)
