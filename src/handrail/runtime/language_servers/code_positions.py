"""Positions in source text: the protocol's URIs and character offsets, and words at a place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, cast
from urllib.parse import quote, unquote_to_bytes, urlsplit

PositionEncoding = Literal["utf-8", "utf-16", "utf-32"]
_SAFE = "/-._~!$&'()*+,;=:@"
_MAX_DEPTH = 60
SYMBOL_KINDS = (
    *("file", "module", "namespace", "package", "class", "method", "property", "field", "constructor", "enum"),
    *("interface", "function", "variable", "constant", "string", "number", "boolean", "array", "object", "key", "null"),
    *("enum member", "struct", "event", "operator", "type parameter"),
)
"""The protocol's kinds of symbols, from 1 on."""


def convert_path_to_uri(path: str) -> str:
    return f"file://{quote(path.encode('utf-8', 'surrogateescape'), safe=_SAFE)}"


def convert_uri_to_path(uri: object) -> str | None:
    """Return the absolute path of a URI; None if it is not that of a file on this machine."""
    if not isinstance(uri, str):
        return None
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    path = unquote_to_bytes(parts.path).decode("utf-8", "surrogateescape")
    return path if path.startswith("/") and "\0" not in path else None


def convert_column_to_offset(line: str, column: int, encoding: PositionEncoding) -> int:
    """Return the protocol's offset of the character before which there are ``column`` characters."""
    if encoding == "utf-32" or line.isascii():
        return column
    before = line[:column]
    return len(before.encode(encoding if encoding == "utf-8" else "utf-16-le", "surrogatepass")) // (
        1 if encoding == "utf-8" else 2
    )


def convert_offset_to_column(line: str, offset: int, encoding: PositionEncoding) -> int:
    """Return how many characters are before the protocol's offset."""
    if encoding == "utf-32" or line.isascii():
        return min(offset, len(line))
    count = 0
    for number, character in enumerate(line):
        if count >= offset:
            return number
        code = ord(character)
        if encoding == "utf-16":
            count += 2 if code > 0xFFFF else 1
        else:
            count += 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4
    return len(line)


def split_lines(text: str) -> list[str]:
    r"""Return the lines of a text, as the protocol counts them: they end with ``\n``, ``\r\n`` or ``\r``."""
    return re.split(r"\r\n|\n|\r", text)


def find_whole_word_positions(line: str, word: str) -> Iterator[int]:
    """Yield where a word begins in a line, not as a part of another word."""
    for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", line):
        yield match.start()


def parse_protocol_range(value: Any) -> tuple[int, int, int, int] | None:
    """Return a range of the protocol as the line and offset of its start and end; None if it is malformed."""
    try:
        start, end = value["start"], value["end"]
        found = (start["line"], start["character"], end["line"], end["character"])
    except (TypeError, KeyError):
        return None
    return found if all(type(one) is int and one >= 0 for one in found) else None


def parse_locations(result: Any) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield the path and the range of each place in an answer: locations, or links to them."""
    several = cast("list[Any]", result) if isinstance(result, list) else [result]
    for one in several:
        if not isinstance(one, dict):
            continue
        fields = cast("dict[str, Any]", one)
        path = convert_uri_to_path(fields.get("uri", fields.get("targetUri")))
        found = parse_protocol_range(fields.get("range", fields.get("targetSelectionRange")))
        if path is not None and found is not None:
            yield path, found


class SymbolEntry:
    """A symbol in an answer of a server.

    :ivar span: the line and offset of its start and end, of the name if the server says it
    :ivar is_name: whether the span is that of the name
    """

    __slots__ = ("container", "is_name", "kind", "name", "path", "span")

    def __init__(
        self, name: str, kind: object, path: str, span: tuple[int, int, int, int], is_name: bool, container: str
    ) -> None:
        self.name = name
        self.kind = SYMBOL_KINDS[kind - 1] if isinstance(kind, int) and 0 < kind <= len(SYMBOL_KINDS) else "symbol"
        self.path = path
        self.span = span
        self.is_name = is_name
        self.container = container

    def matches_qualified_name(self, wanted: str) -> bool:
        """Return whether this is the symbol that a name such as ``Parser.parse`` means."""
        container, _, name = wanted.replace("::", ".").rpartition(".")
        own = self.name.partition("(")[0].replace("::", ".").rpartition(".")
        if own[2] != name:
            return False
        if not container:
            return True
        around = ".".join(filter(None, (self.container.replace("::", "."), own[0])))
        return around == container or around.endswith(f".{container}")


def parse_symbol_entries(
    result: Any, path: str | None = None, container: str = "", depth: int = 0
) -> Iterator[SymbolEntry]:
    """Yield the symbols of an answer, with those that they contain.

    :param path: of the file, for symbols without a location
    """
    if not isinstance(result, list) or depth > _MAX_DEPTH:
        return
    for one in cast("list[Any]", result):
        if not isinstance(one, dict):
            continue
        fields = cast("dict[str, Any]", one)
        name = fields.get("name")
        if not isinstance(name, str) or not name:
            continue
        location: Any = fields.get("location")
        if isinstance(location, dict):
            place = cast("dict[str, Any]", location)
            where, span = (
                convert_uri_to_path(place.get("uri")),
                parse_protocol_range(place.get("range")) or (0, 0, 0, 0),
            )
            around = str(fields.get("containerName") or container)
            if where is not None:
                yield SymbolEntry(name, fields.get("kind"), where, span, False, around)
        elif path is not None and (span := parse_protocol_range(fields.get("selectionRange"))) is not None:
            yield SymbolEntry(name, fields.get("kind"), path, span, True, container)
        inner = f"{container}.{name}" if container else name
        yield from parse_symbol_entries(fields.get("children"), path, inner, depth + 1)


def parse_workspace_edit(result: Any) -> tuple[dict[str, list[tuple[tuple[int, int, int, int], str]]], list[str]]:
    """Return the edits of a workspace edit by path, and its changes of whole files as texts."""
    edits: dict[str, list[tuple[tuple[int, int, int, int], str]]] = {}
    others: list[str] = []
    fields = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
    several: list[tuple[Any, Any]] = []
    documents: Any = fields.get("documentChanges")
    if isinstance(documents, list):
        for one in cast("list[Any]", documents):
            change = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
            if "kind" in change:
                named = convert_uri_to_path(change.get("oldUri", change.get("uri"))) or "?"
                new = convert_uri_to_path(change.get("newUri"))
                others.append(f"{change['kind']} {named}" + (f" to {new}" if new else ""))
            else:
                document = change.get("textDocument")
                uri = cast("dict[str, Any]", document).get("uri") if isinstance(document, dict) else None
                several.append((uri, change.get("edits")))
    elif isinstance(changes := fields.get("changes"), dict):
        several += cast("dict[str, Any]", changes).items()
    for uri, found in several:
        path = convert_uri_to_path(uri)
        for one in cast("list[Any]", found) if isinstance(found, list) and path is not None else []:
            edit = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
            span, text = parse_protocol_range(edit.get("range")), edit.get("newText")
            if span is not None and isinstance(text, str) and path is not None:
                edits.setdefault(path, []).append((span, text))
    return edits, others


def extract_hover_text(contents: Any) -> str:
    if isinstance(contents, list):
        return "\n\n".join(filter(None, map(extract_hover_text, cast("list[Any]", contents))))
    if isinstance(contents, dict):
        fields = cast("dict[str, Any]", contents)
        value = fields.get("value")
        text = value if isinstance(value, str) else ""
        return f"```{fields['language']}\n{text}\n```" if "language" in fields and text else text
    return contents if isinstance(contents, str) else ""
