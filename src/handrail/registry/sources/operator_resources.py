"""Resources and prompts of the operator, as data: ``resources.json`` in a tool folder. URI templates.

The file is checked as a whole when it is read; a fault stops start-up, as in a manifest. Content files are named relative to
the folder and read on request. ``{{name}}`` in a text is replaced by an argument, and the inserted text is not expanded again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import mimetypes
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, cast
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import Diagnostic, LoadError, ToolError
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.resource_services import PromptArgument, PromptSpec, ResourceSpec, ResourceTemplate
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_json_object
from handrail.contract.text.text_encodings import decode_file_text, detect_text_encoding, replace_invalid_bytes

# URI templates, matched in reverse: from a URI to the values that produce it.
#
# A template may come from a third-party server, and a URI from a model. So no expression backtracks, since the two together
# could make it run forever.
#
# Source: https://www.rfc-editor.org/rfc/rfc6570

MAX_URI = 4096
MAX_EXPRESSIONS = 8
VARIABLE = compile_regex_lazily(r"\{(\+?)([A-Za-z_][A-Za-z0-9_]*)\}")
"""A variable of an operator's template."""
_EXPRESSION = compile_regex_lazily(r"\{([+#./;?&]?)[^{}]*\}")
_STOPS = {"": "/?#", "+": "", "#": "", ".": "/?#", "/": "?#", ";": "/?#", "?": "#", "&": "#"}
"""By the kind of an expression, the characters that end a value. Kinds after the first two begin with their own character."""


class UriTemplateShape(Struct, frozen=True):
    """The URIs that a template can produce, by a permissive reading.

    The positions reached in a URI are the bits of one number.

    :param first: the text before the first expression
    :param rest: the kind of each expression, and the text after it
    """

    first: str
    rest: tuple[tuple[str, str], ...]

    def can_produce_uri(self, uri: str) -> bool:
        if not self.rest:
            return uri == self.first
        if not uri.startswith(self.first) or not uri.endswith(self.rest[-1][1]):
            return False
        reached = 1 << len(self.first)
        for kind, text in self.rest:
            free = _find_allowed_positions(uri, _STOPS[kind])
            begun = reached if kind in ("", "+") else (reached & _find_text_positions(uri, kind)) << 1
            # Adding carries each position over its run of allowed characters, and so over all that follows in the run.
            reached |= begun | (((begun & free) + free) ^ free)
            reached = (reached & _find_text_positions(uri, text)) << len(text)
        return bool(reached >> len(uri) & 1)


def parse_uri_template_shape(template: str) -> UriTemplateShape | None:
    """Return the shape of a template, or None if the template is too long or has too many expressions."""
    expressions = list(_EXPRESSION.finditer(template))
    if len(template) > MAX_URI or len(expressions) > MAX_EXPRESSIONS:
        return None
    texts = _split_literal_texts(template, expressions)
    kinds = [expression[1] for expression in expressions]
    return UriTemplateShape(texts[0], tuple(zip(kinds, texts[1:], strict=True)))


class UriTemplateMatcher(Struct, frozen=True):
    """The URIs that an operator's template produces from values that are not empty.

    Each variable takes as much as it can.

    :param rest: the kind and name of each variable, and the text after it
    """

    first: str
    rest: tuple[tuple[str, str, str], ...]

    def match_uri(self, uri: str) -> dict[str, str] | None:
        """Return the values that produce ``uri``, still encoded, or None if none do."""
        if len(uri) > MAX_URI or not uri.startswith(self.first):
            return None
        # From the end: the positions where each variable's value may end so that the rest matches, and where it may begin.
        begins = bytearray(len(uri) + 2)
        begins[len(uri)] = 1
        ends: list[bytearray] = []
        for kind, _, text in reversed(self.rest):
            end, at = bytearray(len(uri) + 2), uri.find(text)
            while at >= 0:
                end[at] = begins[at + len(text)]
                at = uri.find(text, at + 1)
            begins = bytearray(len(uri) + 2)
            for place in range(len(uri) - 1, -1, -1):
                if _may_be_in_value(uri[place], kind):
                    begins[place] = end[place + 1] or begins[place + 1]
            ends.append(end)
        at = len(self.first)
        if not begins[at]:
            return None
        found: dict[str, str] = {}
        for (kind, name, text), end in zip(self.rest, reversed(ends), strict=True):
            place = last = at
            while place < len(uri) and _may_be_in_value(uri[place], kind):
                place += 1
                last = place if end[place] else last
            found[name] = uri[at:last]
            at = last + len(text)
        return found


def compile_uri_template(template: str) -> UriTemplateMatcher:
    """Parse a template.

    :raises ValueError: with the reason, if :class:`UriTemplateMatcher` does not support the template
    """
    variables = list(VARIABLE.finditer(template))
    if not variables or set("{}") & set(VARIABLE.sub("", template)):
        raise ValueError("expected variables as {name} or {+name}, at least one")
    names = [variable[2] for variable in variables]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"has the variable {twice[0]!r} twice; name each variable once")
    if len(variables) > MAX_EXPRESSIONS:
        raise ValueError(f"has {len(variables)} variables; expected at most {MAX_EXPRESSIONS}")
    texts = _split_literal_texts(template, variables)
    rest = zip((one[1] for one in variables), names, texts[1:], strict=True)
    return UriTemplateMatcher(texts[0], tuple(rest))


def _split_literal_texts(template: str, expressions: list[re.Match[str]]) -> list[str]:
    """Return the text before the first expression and the text after each of them."""
    begins = [0, *(expression.end() for expression in expressions)]
    ends = [*(expression.start() for expression in expressions), len(template)]
    return [template[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _may_be_in_value(letter: str, kind: str) -> bool:
    """Return whether a character may be part of a value."""
    return letter != "\n" if kind == "+" else letter not in _STOPS[kind] and not letter.isspace()


@lru_cache(maxsize=64)
def _find_allowed_positions(uri: str, stops: str) -> int:
    """Return the positions of a URI whose character is not in ``stops``, as bits."""
    return int("0" + "".join("01"[one not in stops] for one in reversed(uri)), 2)


@lru_cache(maxsize=256)
def _find_text_positions(uri: str, text: str) -> int:
    found, at = 0, uri.find(text)
    while at >= 0:
        found |= 1 << at
        at = uri.find(text, at + 1)
    return found


RESOURCES_FILE = "resources.json"
MAX_RESOURCES_FILE_BYTES = 4 * 1024 * 1024
MAX_RESOURCE_BYTES = 16 * 1024 * 1024
_PLACEHOLDER = compile_regex_lazily(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*\}\}")
_TEXTUAL = compile_regex_lazily(r"text/|application/([^;]*\+)?(json|xml|yaml|toml|javascript|x-sh)\b")
_Text = Annotated[str, Field(min_length=1, max_length=4_096)]
_Uri = Annotated[str, Field(min_length=3, max_length=4_096, pattern=r"^[A-Za-z][A-Za-z0-9+.-]*:\S*$")]
ReadFile = Callable[[Path, int], bytes]
"""Reads a file of the operator's, up to the given number of bytes and one more; raises :class:`LoadError`."""


class _ResourcesModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class _ListedItem(_ResourcesModel):
    name: _Text
    title: str = ""
    description: str = ""
    annotations: dict[str, Any] | None = None
    icons: list[Any] | None = None
    meta: dict[str, Any] | None = Field(None, alias="_meta")

    def extra_fields(self) -> dict[str, Any]:
        fields = {"annotations": self.annotations, "icons": self.icons, "_meta": self.meta}
        return {key: value for key, value in fields.items() if value is not None}


class _ResourceItem(_ListedItem):
    uri: _Uri
    media_type: str = Field("", alias="mimeType")
    text: str | None = None
    blob: str | None = None
    file: str | None = None


class _TemplateItem(_ListedItem):
    uri_template: _Text = Field(alias="uriTemplate")
    media_type: str = Field("", alias="mimeType")
    text: str
    complete: dict[str, list[str]] = {}


class _PromptArgument(_ResourcesModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=128)]
    description: str = ""
    title: str = ""
    required: bool = False
    values: list[str] = []


class _ClientRequest(_ResourcesModel):
    method: Literal["elicitation/create", "sampling/createMessage", "roots/list"]
    params: dict[str, Any] = {}


class _PromptMessage(_ResourcesModel):
    role: Literal["user", "assistant"]
    content: str | dict[str, Any]


class _PromptItem(_ListedItem):
    arguments: list[_PromptArgument] = []
    ask: dict[str, _ClientRequest] = {}
    messages: Annotated[list[_PromptMessage], Field(min_length=1)]


class _ResourcesFile(_ResourcesModel):
    resources: list[_ResourceItem] = []
    templates: list[_TemplateItem] = Field([], alias="resourceTemplates")
    prompts: list[_PromptItem] = []


class FileResourceProvider:
    """The resources and prompts of one ``resources.json``. Made by :func:`parse_resources`."""

    source = ""
    is_third_party = False

    def __init__(self, parsed: _ResourcesFile, folder: Path, read_file: ReadFile) -> None:
        self._folder = folder
        self._read_file = read_file
        self._resources = {one.uri: one for one in parsed.resources}
        self._templates = [(one, compile_uri_template(one.uri_template)) for one in parsed.templates]
        self._prompts = {one.name: one for one in parsed.prompts}
        self.resources = tuple(
            ResourceSpec(one.uri, one.name, one.description, one.title, self._media_type(one), more=one.extra_fields())
            for one in parsed.resources
        )
        self.templates = tuple(
            ResourceTemplate(one.uri_template, one.name, one.description, one.title, one.media_type, one.extra_fields())
            for one in parsed.templates
        )
        self.prompts = tuple(
            PromptSpec(
                one.name,
                one.description,
                one.title,
                tuple(PromptArgument(a.name, a.description, a.required, a.title) for a in one.arguments),
                one.extra_fields(),
            )
            for one in parsed.prompts
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it names, relative to its folder."""
        named = [one.file for one in self._resources.values() if one.file is not None]
        contents = [message.content for prompt in self._prompts.values() for message in prompt.messages]
        named += [str(one["file"]) for one in contents if isinstance(one, dict) and one.get("file") is not None]
        return tuple(dict.fromkeys(named))

    def has_resource(self, uri: str) -> bool:
        return uri in self._resources or any(matching.match_uri(uri) is not None for _, matching in self._templates)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        if (one := self._resources.get(uri)) is not None:
            if one.text is not None:
                return _contents(uri, self._media_type(one), one.text)
            if one.blob is not None:
                return _contents(uri, self._media_type(one), base64.b64decode(one.blob))
            return _contents(uri, self._media_type(one), await asyncio.to_thread(self._file, one.file or ""))
        for template, matching in self._templates:
            if (found := matching.match_uri(uri)) is not None:
                values = {name: unquote(value) for name, value in found.items()}
                return _contents(uri, template.media_type, _fill_placeholders(template.text, values))
        raise ToolError(
            f"Resource {uri[:200]!r} does not exist. List the resources to get a valid URI.", kind="invalid_input"
        )

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        if (one := self._prompts.get(name)) is None:
            raise ToolError(
                f"Prompt {name[:200]!r} does not exist. List the prompts to get a valid name.", kind="invalid_input"
            )
        _check_arguments(one, arguments)
        values = {argument.name: arguments.get(argument.name, "") for argument in one.arguments}
        if one.ask:
            asks = {
                key: RequestToClient(asked.method, _fill_placeholders(asked.params, values))
                for key, asked in one.ask.items()
            }
            values |= _format_answers(await runtime.client.send_requests(asks))
        messages = [
            {"role": message.role, "content": await self._content(message.content, values)} for message in one.messages
        ]
        return {"description": one.description, "messages": messages} if one.description else {"messages": messages}

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        name, begun = argument.get("name", ""), argument.get("value", "")
        values: list[str] = []
        if ref.get("type") == "ref/prompt" and (prompt := self._prompts.get(str(ref.get("name")))) is not None:
            values = [value for one in prompt.arguments if one.name == name for value in one.values]
        elif ref.get("type") == "ref/resource":
            uri = str(ref.get("uri"))
            found = [one.complete for one, _ in self._templates if one.uri_template == uri]
            values = [value for one in found for value in one.get(name, ())]
        fitting = [value for value in values if value.casefold().startswith(begun.casefold())]
        return {"values": fitting, "total": len(fitting), "hasMore": False}

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        """Return a function that does nothing, since subscribers poll :meth:`quick_stamp` and :meth:`content_stamp`."""
        return _nothing

    def content_stamp(self, uri: str) -> str:
        """Return a hash that changes with the content of a resource."""
        if (one := self._resources.get(uri)) is None:
            return hashlib.sha256(repr([template for template, _ in self._templates]).encode()).hexdigest()
        try:
            content = self._file(one.file) if one.file is not None else b""
        except ToolError as error:
            content = error.text.encode()
        return hashlib.sha256(repr(one).encode("utf-8", "surrogatepass") + b"\0" + content).hexdigest()

    def quick_stamp(self, uri: str) -> str:
        """Return the file status of a resource's file, without opening it."""
        if (one := self._resources.get(uri)) is None or one.file is None:
            return ""
        try:
            about = os.lstat(self._folder / one.file)
        except (OSError, ValueError) as error:
            return type(error).__name__
        return f"{about.st_dev} {about.st_ino} {about.st_mode} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"

    def find_faults(self, place: str) -> Iterator[Diagnostic]:
        """Yield the faults in the files that it names."""
        for index, one in enumerate(self._resources.values()):
            if one.file is not None:
                try:
                    self._file(one.file)
                except ToolError as error:
                    yield Diagnostic(place, f"resources[{index}].file", error.text)
        for index, prompt in enumerate(self._prompts.values()):
            for number, message in enumerate(prompt.messages):
                file = message.content.get("file") if isinstance(message.content, dict) else None
                if file is not None:
                    try:
                        self._file(str(file))
                    except ToolError as error:
                        yield Diagnostic(place, f"prompts[{index}].messages[{number}].content.file", error.text)

    def _media_type(self, one: _ResourceItem) -> str:
        return one.media_type or (mimetypes.guess_type(one.file)[0] or "" if one.file is not None else "")

    async def _content(self, content: str | Mapping[str, Any], values: Mapping[str, str]) -> Any:
        if isinstance(content, str):
            return {"type": "text", "text": _fill_placeholders(content, values)}
        if content.get("type") in ("image", "audio"):
            media_type = str(content.get("mimeType") or mimetypes.guess_type(str(content.get("file", "")))[0] or "")
            named = content.get("file")
            data = base64.b64decode(content["data"]) if named is None else await asyncio.to_thread(self._file, named)
            rest = {key: value for key, value in content.items() if key not in ("file", "data", "mimeType")}
            return {**rest, "data": Blob(data, media_type), "mimeType": media_type}
        return _fill_placeholders(content, values)

    def _file(self, named: str) -> bytes:
        """Return the content of a file.

        :raises ToolError: if it is not a file of the operator's in this folder, or is too large
        """
        way = PurePosixPath(named)
        if way.is_absolute() or ".." in way.parts or not way.parts or "\0" in named:
            raise ToolError(
                f"{named[:200]!r} is not a file in the folder of {RESOURCES_FILE}. Use a relative path without `..`.",
                kind="unavailable",
            )
        path = self._folder / way
        if Path(path.parent.resolve()) != path.parent:
            raise ToolError(
                f"{named!r} leads through a link. Ask the user to put the file itself there.", kind="unavailable"
            )
        try:
            content = self._read_file(path, MAX_RESOURCE_BYTES)
        except LoadError as error:
            raise ToolError(f"{named}: {error.diagnostics[0].problem}", kind="unavailable") from None
        if len(content) > MAX_RESOURCE_BYTES:
            raise ToolError(
                f"File {named} is too large. The limit is {MAX_RESOURCE_BYTES:,} bytes. Ask the user to make it smaller.",
                kind="limit",
            )
        return content


async def _nothing() -> None:
    return


def parse_resources(content: bytes, place: str, folder: Path, read_file: ReadFile) -> FileResourceProvider:
    """Parse ``resources.json``.

    :param place: its path, for faults
    :param folder: canonical
    :raises LoadError: with every fault
    """
    try:
        parsed = parse_json_object(
            content, what="the file's contents", max_bytes=MAX_RESOURCES_FILE_BYTES, max_depth=64
        )
        resources_file = _ResourcesFile.model_validate(parsed)
    except InvalidJsonTextError as error:
        raise LoadError([Diagnostic(place, "", str(error))]) from None
    except ValidationError as error:
        faults = [
            Diagnostic(place, format_json_path(one["loc"]), one["msg"]) for one in error.errors(include_input=False)
        ]
        raise LoadError(faults) from None
    faults = [Diagnostic(place, where, problem) for where, problem in _faults(resources_file)]
    if faults:
        raise LoadError(faults)
    offering = FileResourceProvider(resources_file, folder, read_file)
    if faults := list(offering.find_faults(place)):
        raise LoadError(faults)
    return offering


def _faults(resources_file: _ResourcesFile) -> Iterator[tuple[str, str]]:
    yield from _faults_in_resources(resources_file.resources)
    for index, template in enumerate(resources_file.templates):
        variables = {name for _, name in VARIABLE.findall(template.uri_template)}
        try:
            compile_uri_template(template.uri_template)
        except ValueError as error:
            yield f"resourceTemplates[{index}].uriTemplate", str(error)
        for name in sorted((_find_placeholders(template.text) | set(template.complete)) - variables):
            yield (
                f"resourceTemplates[{index}]",
                f"names {name!r}, which is not in its uriTemplate; add the variable, or remove the name",
            )
    names: set[str] = set()
    for index, prompt in enumerate(resources_file.prompts):
        if prompt.name in names:
            yield f"prompts[{index}].name", f"{prompt.name!r} is listed twice"
        names.add(prompt.name)
        yield from _faults_in_messages(prompt, f"prompts[{index}]")


def _faults_in_resources(resources: Iterable[_ResourceItem]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for index, one in enumerate(resources):
        if one.uri in seen:
            yield f"resources[{index}].uri", f"{one.uri!r} is listed twice"
        seen.add(one.uri)
        if [one.text, one.blob, one.file].count(None) != 2:
            yield f"resources[{index}]", "expected exactly one of text, blob (base64) and file"
        if one.blob is not None and not _is_base64(one.blob):
            yield f"resources[{index}].blob", "is not valid base64"


def _faults_in_messages(prompt: _PromptItem, where: str) -> Iterator[tuple[str, str]]:
    arguments = {one.name for one in prompt.arguments}
    for number, message in enumerate(prompt.messages):
        for name in sorted(_find_placeholders(message.content) - arguments):
            if name.partition(".")[0] not in prompt.ask:
                yield f"{where}.messages[{number}]", f"names {name!r}, which is neither an argument nor a key of ask"
        if problem := _fault_in_content(message.content):
            yield f"{where}.messages[{number}].content", problem


def _fault_in_content(content: str | Mapping[str, Any]) -> str | None:
    if isinstance(content, str):
        return None
    if (kind := content.get("type")) == "text":
        return None if isinstance(content.get("text"), str) else "expected a string in text"
    if kind in ("image", "audio"):
        data, file = content.get("data"), content.get("file")
        if (data is None) == (file is None) or not isinstance(data or file, str):
            return "expected exactly one of data (base64) and file"
        return "has data that is not valid base64" if data is not None and not _is_base64(data) else None
    if kind == "resource":
        return None if isinstance(content.get("resource"), dict) else "expected an object in resource"
    return (
        None
        if kind == "resource_link"
        else "expected a string, or the type text, image, audio, resource or resource_link"
    )


def _find_placeholders(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(_PLACEHOLDER.findall(value))
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value).values()
    elif isinstance(value, list):
        inner = cast("list[Any]", value)
    return {name for one in inner for name in _find_placeholders(one)}


def _check_arguments(prompt: _PromptItem, given: Mapping[str, str]) -> None:
    known = dict.fromkeys(argument.name for argument in prompt.arguments)
    if odd := [name for name in given if name not in known]:
        there = ", ".join(known) or "none"
        raise ToolError(
            f"Prompt {prompt.name} has no argument {odd[0][:80]!r}. Valid arguments: {there}.", kind="invalid_input"
        )
    if missing := [one.name for one in prompt.arguments if one.required and one.name not in given]:
        raise ToolError(
            f"Arguments are missing for prompt {prompt.name}: {', '.join(missing)}. Provide them and try again.",
            kind="invalid_input",
        )


def _fill_placeholders(value: Any, values: Mapping[str, str]) -> Any:
    """Return a value with the placeholders in its strings replaced, in one pass."""
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda found: values.get(found[1], ""), value)
    if isinstance(value, Mapping):
        return {key: _fill_placeholders(inner, values) for key, inner in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_fill_placeholders(inner, values) for inner in cast("list[Any]", value)]
    return value


def _format_answers(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the client's answers, by the placeholder names that messages use for them.

    :raises ToolError: ``denied`` if the user declined
    """
    found: dict[str, str] = {}
    for key, answer in answers.items():
        if "action" in answer:
            if answer["action"] != "accept":
                raise ToolError(
                    f"The user did not answer the question {key!r} of this prompt. Continue without the prompt.",
                    kind="denied",
                )
            content: dict[str, Any] = answer.get("content") or {}
            found |= {f"{key}.{name}": str(value) for name, value in content.items()}
        elif "roots" in answer:
            found[key] = ", ".join(root["uri"] for root in answer["roots"])
        else:
            said: Any = answer["content"]
            blocks = cast("list[dict[str, Any]]", said if isinstance(said, list) else [said])
            found[key] = "".join(str(block.get("text", "")) for block in blocks)
    return found


def _contents(uri: str, media_type: str, content: str | bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {"uri": uri, **({"mimeType": media_type} if media_type else {})}
    if isinstance(content, bytes) and (not media_type or _TEXTUAL.match(media_type)):
        encoding = detect_text_encoding(content)
        if encoding is not None and (media_type or encoding.codec.startswith("utf-")):
            text = decode_file_text(content).text
            content = text if replace_invalid_bytes(text) == text else content
    if isinstance(content, str):
        return {"contents": [{**fields, "text": content}]}
    return {"contents": [{**fields, "blob": Blob(content, media_type or "application/octet-stream")}]}


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True
