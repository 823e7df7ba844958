"""Conversions between the result envelope and the result shapes of other systems.

The kernel itself uses only :class:`~handrail.contract.calls_and_results.Result`. Five shapes meet it at the edges:

- the *envelope* on the wire: ``{type, data | error_text, metadata}``;
- the *status* shape: ``{status, summary, artifact_ref}``;
- *parts*: text or a list of content parts, with an exit code and an error text;
- the *card*: ``{text, html, title, error}``;
- MCP's *content*: ``{content, structuredContent, isError}``.

Results from outside are not trusted: of their metadata only the keys that describe the tool's own answer are kept,
never those that the kernel measures or decides.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.errors import ERROR_KINDS, ErrorKind
from handrail.contract.schema.mcp_members import select_valid_members
from handrail.contract.text.lazy_patterns import compile_regex_lazily

_ENVELOPE_KEYS = frozenset({"type", "data", "error_text", "metadata"})
_STATUS_KEYS = frozenset({"status", "summary", "artifact_ref"})
_CONTENT_KEYS = frozenset({"content", "structuredContent", "isError", "_meta"})
_GOOD = frozenset({"success", "ok"})
_BAD = frozenset({"error", "failure", "failed"})
_NOT_A_TOOLS_TO_SAY = frozenset({"denied", "unknown_tool", "cancelled", "interrupted", "timeout"})
"""Kinds that state an act of the kernel or the user. If a tool claims one, it is read as ``failed``."""

_BLOCKS = frozenset({"text", "image", "audio", "resource", "resource_link"})
_PLACE_KEYS = frozenset({"artifact", "media_type", "bytes"})
_NOTHING_STORED: Mapping[str, bytes] = MappingProxyType({})
MAX_BLOCKS = 100
"""A longer list is data, not parts."""
ARTIFACT_URI = "handrail://artifact/"

_EXTRAS = ("annotations", "_meta")
_TEXT_KEYS = frozenset({"type", "text"})
_TRUE: tuple[object, ...] = (True, 1, "true", "True", "yes")
_NO_CONTENT = "The server sent a result without content."
_DATA_HEAD = compile_regex_lazily(
    r"\s*data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;(?!base64,)[^,;]*)*(?P<base64>;base64)?,", re.IGNORECASE
)
_FROM_URL_ALPHABET = str.maketrans("-_", "+/")

_NO_REASON = "The tool failed without a reason."

MAX_TOOL_ERROR = 4_000
"""Characters of a tool's own error text that are kept."""


def convert_known_result_shape(answer: object) -> Result | None:
    """Convert ``answer`` to a result if it has the shape of an envelope, a status or MCP's content.

    :return: None for any other shape, which is plain data
    """
    if not isinstance(answer, Mapping):
        return None
    wire = cast("Mapping[str, Any]", answer)
    if (keys := set(wire)) <= _ENVELOPE_KEYS and wire.get("type") in ("output", "error"):
        return convert_envelope_to_result(wire)
    if {"status", "summary"} <= keys <= _STATUS_KEYS and wire["status"] in _GOOD | _BAD:
        return convert_status_to_result(wire)
    if (
        "content" in keys <= _CONTENT_KEYS
        and _are_mcp_content_blocks(wire["content"])
        and (wire["content"] or len(keys) > 1)
    ):
        return convert_mcp_content_to_result(wire)
    return None


def _are_mcp_content_blocks(content: object) -> bool:
    """Return whether ``content`` is a list of MCP content blocks, judged by their types."""
    return isinstance(content, list) and all(
        isinstance(block, Mapping) and cast("Mapping[str, Any]", block).get("type") in _BLOCKS
        for block in cast("list[object]", content)
    )


def convert_envelope_to_result(wire: Mapping[str, Any]) -> Result:
    """Convert an envelope that a tool wrote about itself."""
    metadata_value: Any = wire.get("metadata")
    metadata = cast("Mapping[str, Any]", metadata_value) if isinstance(metadata_value, Mapping) else dict[str, Any]()
    if wire["type"] == "output":
        return Result.output(wire.get("data"))
    return Result.error(_kind(metadata.get("error_kind")), _error_words(wire.get("error_text")), wire.get("data"))


def convert_status_to_result(wire: Mapping[str, Any]) -> Result:
    """Convert ``{status, summary, artifact_ref}``.

    The summary and the reference stay next to the data, where a prompt mask leaves them. The reference is the tool's
    own and is not looked up here.
    """
    kept = {key: wire[key] for key in ("summary", "artifact_ref") if wire.get(key) is not None}
    if wire["status"] in _GOOD:
        return Result.output(kept, **kept)
    reference = {key: value for key, value in kept.items() if key == "artifact_ref"}
    return Result.error("failed", _error_words(wire.get("summary")), reference or None, **reference)


def convert_card_to_result(wire: Mapping[str, Any]) -> Result:
    """Convert ``{text, html, title, error}``.

    An error suppresses the rest. ``html`` is for people, so it becomes an artifact, and a model reads only its
    reference.
    """
    if wire.get("error"):
        return Result.error("failed", _error_words(wire["error"]))
    data = {key: value for key, value in wire.items() if key != "error"}
    if isinstance(html := data.get("html"), str):
        data["html"] = Blob(html.encode("utf-8", "replace"), "text/html")
    return Result.output(data)


def convert_result_to_card(result: Result) -> dict[str, Any]:
    """Convert a result to ``{text, html, error}``."""
    if not result.ok:
        return {"error": result.error_text or _NO_REASON}
    content: object = result.data
    if isinstance(content, Mapping) and isinstance(cast("Mapping[str, Any]", content).get("text"), str):
        return dict(cast("Mapping[str, Any]", content))
    return {"text": format_text_or_json(cast("object", content))}


def convert_mcp_content_to_result(wire: Mapping[str, Any]) -> Result:
    """Convert MCP's ``{content, structuredContent, isError}``; the inverse of :func:`convert_result_to_mcp_content`.

    Structured content is the data if there is some. If the parts say more, the data is ``structured`` and ``parts``.
    Otherwise one text is the data itself, and several parts are a list. Images, sounds and embedded files become
    :class:`Blob`.

    Source: https://modelcontextprotocol.io/specification/2025-11-25/server/tools#tool-result
    """
    parts = [_content_part(part) for part in _list_content(wire)]
    structured: Any = wire.get("structuredContent")
    if wire.get("isError") in _TRUE:
        return _error_from_parts(parts, structured)
    if structured is None:
        return Result.output(parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts or None)
    more = [part for part in parts if not (isinstance(part, str) and _repeats_structured(part, structured))]
    return Result.output({"structured": structured, "parts": more} if more else structured)


def _list_content(wire: Mapping[str, Any]) -> Sequence[object]:
    """Return the content blocks of a result, also if the server wrote something else than a list.

    Without content and structured content, the other members are the content, as in the first version of the protocol.
    """
    content: Any = wire.get("content")
    if isinstance(content, list):
        return cast("list[object]", content)
    if content is not None:
        return [cast("object", content)]
    if wire.get("structuredContent") is not None:
        return []
    rest = {key: value for key, value in wire.items() if key not in _CONTENT_KEYS | {"resultType"}}
    return [rest] if rest else [_NO_CONTENT]


def _error_from_parts(parts: Sequence[object], structured: object) -> Result:
    """Return an error with the texts of the parts.

    Its data is the structured content, or else the other parts.
    """
    text = "\n".join(text for part in parts if (text := _text_of(part)) is not None)
    rest = [part for part in parts if _text_of(part) is None]
    return Result.error("failed", _error_words(text), structured if structured is not None else rest or None)


def _repeats_structured(text: str, structured: object) -> bool:
    """Return whether a text is only the JSON of the structured content."""
    try:
        return json.loads(text) == structured
    except (ValueError, RecursionError):
        return False


def _content_part(part: object) -> object:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return format_text_or_json(part)
    fields = {key: value for key, value in cast("Mapping[str, Any]", part).items() if value is not None}
    match fields.get("type"):
        case "text" | None if isinstance(fields.get("text"), str) and fields.keys() <= _TEXT_KEYS:
            return fields["text"]
        case "text" if "text" in fields and not isinstance(fields["text"], str):
            return format_text_or_json(fields["text"])
        case "image" | "audio":
            blob = _blob(fields.get("data"), fields.get("mimeType"), fields)
            extras = _select_extras(fields)
            return {"type": fields["type"], "data": blob, **extras} if extras and isinstance(blob, Blob) else blob
        case "resource" if isinstance(fields.get("resource"), Mapping):
            resource = dict(cast("Mapping[str, Any]", fields["resource"]))
            if not isinstance(resource.get("text"), str):
                resource["blob"] = _blob(resource.get("blob"), resource.get("mimeType"), {"type": "resource"})
            return {"type": "resource", "resource": resource, **_select_extras(fields)}
        case _:
            return fields


def _select_extras(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a block says about itself, which travels with it."""
    return select_valid_members({key: fields[key] for key in _EXTRAS if key in fields})


def _text_of(part: object) -> str | None:
    """Return the text of a text block, with annotations or without; None for any other block."""
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, Any]", part)
        return fields["text"] if fields.get("type") == "text" and isinstance(fields.get("text"), str) else None
    return part if isinstance(part, str) else None


def _blob(data: object, media_type: object, part: Mapping[str, Any]) -> object:
    found = decode_base64_or_data_uri(data) if isinstance(data, str) else None
    if found is None:
        return {**part, "problem": "The data is not base64."}
    body, own = found
    return Blob(body, media_type if isinstance(media_type, str) and media_type else own or "application/octet-stream")


def decode_base64_or_data_uri(text: str) -> tuple[bytes, str] | None:
    """Return the bytes of a base64 text and the media type of its ``data:`` head; None if it is not base64.

    Line breaks, the alphabet for URLs, and missing padding are accepted.
    """
    head = _DATA_HEAD.match(text)
    media_type = head["type"] or "" if head else ""
    body = text[head.end() :] if head else text
    if head and not head["base64"]:
        return unquote_to_bytes(body), media_type
    body = "".join(body.split()).rstrip("=").translate(_FROM_URL_ALPHABET)
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True), media_type
    except (binascii.Error, ValueError):
        return None


def convert_result_to_mcp_content(result: Result, stored: Mapping[str, bytes] = _NOTHING_STORED) -> dict[str, Any]:
    """Convert a result to MCP's ``{content, structuredContent?, isError?}``, without metadata.

    A text becomes one text block, a list of parts those parts, an object structured content and its JSON text. An
    artifact becomes an image, sound or file if its bytes are given, else a link.

    :param stored: the bytes of artifacts, by their reference
    """
    if not result.ok:
        text = {"type": "text", "text": result.error_text or _NO_REASON}
        found = _content(result.data, stored) if result.data is not None else {"content": list[Any]()}
        return {**found, "content": [text, *found["content"]], "isError": True}
    return _content(result.data, stored)


def list_artifact_refs(data: object) -> list[str]:
    """Return the references of the artifacts in a result's data, each once."""
    return list(dict.fromkeys(ref for ref, _ in list_artifact_media_types(data)))


def _content(data: object, stored: Mapping[str, bytes]) -> dict[str, Any]:
    if data is None:
        return {"content": []}
    if isinstance(data, str):
        return {"content": [{"type": "text", "text": data}]}
    if isinstance(data, Mapping):
        return _content_of_members(cast("Mapping[str, object]", data), stored)
    if isinstance(data, list):
        parts = cast("list[object]", data)
        if 0 < len(parts) <= MAX_BLOCKS and _are_content_parts(parts):
            return {"content": [_block(part, stored) for part in parts]}
    return {"content": [{"type": "text", "text": format_text_or_json(cast("object", data))}]}


def _content_of_members(members: Mapping[str, object], stored: Mapping[str, bytes]) -> dict[str, Any]:
    if _is_content_part(members):
        return {"content": [_block(members, stored)]}
    if set(members) == {"structured", "parts"} and isinstance(members["parts"], list):
        blocks = [_block(part, stored) for part in cast("list[object]", members["parts"])]
        if not any(block["type"] == "text" for block in blocks):
            blocks.insert(0, {"type": "text", "text": format_text_or_json(members["structured"])})
        structured = members["structured"]
        return {"content": blocks} | ({"structuredContent": structured} if isinstance(structured, dict) else {})
    pictures = [
        _block({"artifact": ref, "media_type": kind}, stored) for ref, kind in list_artifact_media_types(members)
    ]
    return {
        "content": [{"type": "text", "text": format_text_or_json(members)}, *pictures],
        "structuredContent": members,
    }


def _are_content_parts(parts: Sequence[object]) -> bool:
    """Return whether a list has parts of a content. If it has one that only a content has, an odd one becomes a text."""
    if all(_is_content_part(part) for part in parts):
        return True
    is_content = any(isinstance(part, Mapping) and _is_content_part(cast("object", part)) for part in parts)
    return is_content and all(isinstance(part, (str, Mapping)) for part in parts)


def _is_content_part(part: object) -> bool:
    """Return whether ``part`` is a text, an artifact reference, or a block that only MCP has."""
    if isinstance(part, str):
        return True
    if not isinstance(part, Mapping):
        return False
    fields = cast("Mapping[str, object]", part)
    if (kind := fields.get("type")) == "resource":
        return isinstance(fields.get("resource"), Mapping)
    if kind == "text":
        return isinstance(fields.get("text"), str) and fields.keys() <= _TEXT_KEYS | set(_EXTRAS)
    if kind in ("image", "audio") and isinstance(data := fields.get("data"), Mapping):
        return _artifact_ref_and_type(cast("Mapping[str, object]", data)) is not None
    if kind == "resource_link":
        return isinstance(fields.get("uri"), str) and isinstance(fields.get("name"), str)
    return _artifact_ref_and_type(fields) is not None and fields.keys() <= _PLACE_KEYS


def _block(part: object, stored: Mapping[str, bytes]) -> dict[str, Any]:
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, Any]", part)
        if (place := _artifact_ref_and_type(fields)) is not None:
            return _binary_block(*place, stored)
        if fields.get("type") == "resource" and isinstance(fields.get("resource"), Mapping):
            return _resource_block(cast("Mapping[str, Any]", fields["resource"]), stored) | _select_extras(fields)
        if fields.get("type") in ("image", "audio") and _is_content_part(fields):
            return _block(fields["data"], stored) | _select_extras(fields)
        if fields.get("type") in ("text", "resource_link") and _is_content_part(fields):
            return select_valid_members(fields)
    return {"type": "text", "text": format_text_or_json(cast("object", part))}


def _resource_block(resource: Mapping[str, Any], stored: Mapping[str, bytes]) -> dict[str, Any]:
    place = (
        _artifact_ref_and_type(cast("Mapping[str, object]", blob))
        if isinstance(blob := resource.get("blob"), Mapping)
        else None
    )
    if place is None:
        if isinstance(resource.get("text"), str) and isinstance(resource.get("uri"), str):
            return {"type": "resource", "resource": select_valid_members(resource)}
        return {"type": "text", "text": format_text_or_json(resource)}
    uri = resource.get("uri")
    if (body := stored.get(place[0])) is None:
        return _binary_block(*place, stored)
    own = {"uri": uri if isinstance(uri, str) else build_artifact_uri(place[0]), "mimeType": place[1]}
    return {
        "type": "resource",
        "resource": {**select_valid_members(resource), **own, "blob": base64.b64encode(body).decode()},
    }


def _binary_block(ref: str, media_type: str, stored: Mapping[str, bytes]) -> dict[str, Any]:
    if (body := stored.get(ref)) is None:
        return {"type": "resource_link", "uri": build_artifact_uri(ref), "name": ref, "mimeType": media_type}
    data = base64.b64encode(body).decode()
    kind = media_type.partition("/")[0]
    if kind in ("image", "audio"):
        return {"type": kind, "data": data, "mimeType": media_type}
    return {"type": "resource", "resource": {"uri": build_artifact_uri(ref), "mimeType": media_type, "blob": data}}


def build_artifact_uri(ref: str) -> str:
    return f"{ARTIFACT_URI}{ref}"


def _artifact_ref_and_type(members: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the reference and media type of an artifact part, else None."""
    ref, media_type = members.get("artifact"), members.get("media_type")
    if isinstance(ref, str) and isinstance(media_type, str) and ref.startswith("sha256:"):
        return ref, media_type
    return None


def list_artifact_media_types(data: object) -> list[tuple[str, str]]:
    """Return the reference and media type of each artifact anywhere in a result's data."""
    found: dict[tuple[str, str], None] = {}
    rest: list[object] = [data]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            members = cast("Mapping[str, object]", one)
            if (place := _artifact_ref_and_type(members)) is not None:
                found[place] = None
            else:
                rest += reversed(list(members.values()))
        elif isinstance(one, list):
            rest += reversed(cast("list[object]", one))
    return list(found)


def convert_result_to_status(result: Result) -> dict[str, Any]:
    """Convert a result to the status shape.

    The summary is the tool's own if it gave one, else the data as text.
    """
    summary: Any = result.metadata.get("summary")
    reference: Any = result.metadata.get("artifact_ref")
    content: object = result.data
    if isinstance(content, Mapping):
        data = cast("Mapping[str, Any]", content)
        summary = data.get("summary") if summary is None else summary
        reference = data.get("artifact_ref", data.get("artifact")) if reference is None else reference
    if not result.ok:
        return {"status": "error", "summary": result.error_text or "", "artifact_ref": reference}
    return {
        "status": "success",
        "summary": summary if isinstance(summary, str) else format_text_or_json(cast("object", content)),
        "artifact_ref": reference,
    }


def convert_parts_to_result(
    output: str | Sequence[Mapping[str, Any]], exit_code: int | None = None, error: str | None = None
) -> Result:
    """Convert text or content parts.

    It is a success without an error text and with exit code 0 or none. Images given as ``data:`` URLs become
    :class:`Blob`; links stay links.
    """
    data: object = output if isinstance(output, str) else [_part(p) for p in output]
    more: dict[str, Any] = {} if exit_code is None else {"exit_code": exit_code}
    if error:
        return Result.error("failed", _error_words(error), data or None, **more)
    if exit_code:
        return Result.error("failed", f"The program ended with exit code {exit_code}.", data or None, **more)
    return Result.output(data, **more)


def convert_result_to_parts(result: Result) -> dict[str, Any]:
    """Convert a result to ``{output, exit_code, error, metadata}``.

    ``output`` is text, or parts if it has binary content.
    """
    content: object = result.data
    exit_code: Any = result.metadata.get("exit_code")
    if isinstance(content, Mapping) and {"exit_code", "output"} <= set(cast("Mapping[str, Any]", content)):
        command = cast("Mapping[str, Any]", content)
        exit_code, content = command["exit_code"], command["output"]
    data: object = cast("object", content)
    items = cast("Sequence[object]", data) if isinstance(data, (list, tuple)) else (data,)
    if any(isinstance(item, Blob) for item in items):
        output: str | list[dict[str, Any]] = [_as_part(item) for item in items]
    else:
        output = "" if data is None else format_text_or_json(cast("object", data))
    return {
        "output": output,
        "exit_code": exit_code,
        "error": None if result.ok else result.error_text,
        "metadata": dict(result.metadata),
    }


def _part(part: Mapping[str, Any]) -> object:
    if part.get("type") == "text":
        return str(part.get("text", ""))
    target: Any = part.get("image_url")
    url: Any = cast("Mapping[str, Any]", target).get("url") if isinstance(target, Mapping) else part.get("url", target)
    if isinstance(url, str) and url.startswith("data:"):
        head, comma, body = url[5:].partition(",")
        media_type, _, coding = head.rpartition(";")
        if comma and coding == "base64":
            try:
                return Blob(base64.b64decode(body, validate=True), media_type or "application/octet-stream")
            except binascii.Error:
                return {"type": "image_url", "problem": "The data: URL is not base64."}
    return dict(part)


def _as_part(item: object) -> dict[str, Any]:
    if isinstance(item, Blob):
        body = base64.b64encode(item.data).decode()
        return {"type": "image_url", "image_url": {"url": f"data:{item.media_type};base64,{body}"}}
    return {"type": "text", "text": format_text_or_json(item)}


def format_text_or_json(data: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, default=repr)


def _error_words(text: object) -> str:
    words = text if isinstance(text, str) and text.strip() else _NO_REASON
    return words if len(words) <= MAX_TOOL_ERROR else f"{_cut_at_word_end(words)} […]"


def _cut_at_word_end(text: str) -> str:
    """Cut a long text at the end of a word: redaction would not find half a secret."""
    head = text[:MAX_TOOL_ERROR]
    return head[: max(head.rfind(" "), head.rfind("\n"), 0)]


def _kind(kind: object) -> ErrorKind:
    if isinstance(kind, str) and kind in ERROR_KINDS and kind not in _NOT_A_TOOLS_TO_SAY:
        return cast("ErrorKind", kind)
    return "failed"
