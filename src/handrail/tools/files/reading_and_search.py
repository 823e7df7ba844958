"""Answers of ``read`` within their limits, also for binary files and images; glob, grep and tree."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import FileLineRange, FileSearchResult, SearchOmission
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.text_encodings import UTF_8, UTF_8_MARK
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.document_text import PDF_START, detect_image_type, read_pdf
from handrail.tools.tool_declarations import MAX_PATH, MAX_PATTERN, file_read_spec, make_closed_object_schema

MAX_IMAGE = 20 * 1024 * 1024
_METADATA_BYTES = 4_800
"""The most bytes of an answer that are not its text: the path, the positions and the sizes."""
_SNIFF_BYTES = 4096
_BINARIES = (
    (b"\x7fELF", "an ELF program or library"),
    (b"PK\x03\x04", "a ZIP archive, or an office document or package in one"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"(\xb5/\xfd", "zstd data"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\0asm", "a WebAssembly module"),
    (b"\xca\xfe\xba\xbe", "a Java class or a Mach-O library"),
    (b"MZ", "a Windows program or library"),
)
_OTHER_PICTURES = (
    *((b"BM", "a BMP picture"), (b"II*\0", "a TIFF picture"), (b"MM\0*", "a TIFF picture"), (b"\0\0\1\0", "an icon")),
    *((b"8BPS", "a Photoshop picture"), (b"\xff\x0a", "a JPEG XL picture"), (b"\0\0\0\x0cJXL ", "a JPEG XL picture")),
)
"""Pictures that no provider takes."""
_PICTURE_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"mif1", b"msf1"), "a HEIC picture"),
    **dict.fromkeys((b"avif", b"avis"), "an AVIF picture"),
}
"""The brands of pictures in the container of MP4."""


def compute_max_result_bytes(runtime: Runtime) -> int:
    """Return how many bytes of text, counted as JSON, fit into an answer.

    This is less than the output limit of the tool, so that an answer of whole lines is not truncated.
    """
    most = runtime.max_output_bytes
    return most - min(_METADATA_BYTES, most // 4)


async def read_lines_or_image(runtime: Runtime, path: str, first: int, count: int | None) -> dict[str, object]:
    """Read the lines from ``first`` on that fit into an answer, an image, or the pages of a PDF.

    :raises ToolError: ``invalid_input`` for another binary file, or lines beyond the end
    """
    most = compute_max_result_bytes(runtime)
    if path.lower().endswith(".pdf") and (await runtime.files.read_bytes(path, max_bytes=5)).data == PDF_START:
        return await read_pdf(runtime, path, first, count, most)
    found = await runtime.files.read_lines(path, first=first, count=count, max_bytes=most)
    if not found.lines and found.total:
        raise ToolError(
            f"`offset` is beyond the end of {found.path}: {first}. The file has {found.total} lines. Pass a smaller `offset`.",
            kind="invalid_input",
        )
    text = "\n".join(found.lines)
    if text.startswith(PDF_START.decode()):
        return await read_pdf(runtime, path, first, count, most)
    if _looks_binary(text) or text.startswith("\ufffdPNG"):
        return await _image_data(runtime, path, found.size)
    lines = found.lines
    if _MOST_JSON_BYTES * len(text) > most and _json_size(text) > most:
        lines = found.lines[: _count_fitting_lines(found.lines, most)]
        text = "\n".join(lines)
    return _lines_data(found, lines, text)


def _lines_data(found: FileLineRange, lines: Sequence[str], text: str) -> dict[str, object]:
    last = found.first + len(lines) - 1
    answer: dict[str, object] = {
        "path": found.path,
        "text": text,
        "first_line": found.first,
        "last_line": last,
        "next": found.next if len(lines) == len(found.lines) else last + 1,
        "size": found.size,
    }
    if found.total is not None:
        answer["total_lines"] = found.total
    if found.encoding not in (None, UTF_8.name):
        answer["encoding"] = found.encoding
    shortened = [number for number in found.truncated_lines if number <= last]
    if shortened:
        answer["truncated_lines"] = shortened[:100]
    return answer


async def read_bytes(runtime: Runtime, path: str, start: int, count: int | None) -> dict[str, object]:
    """Read a range of bytes: as text, cut at whole characters, if it is UTF-8, else in base64."""
    most = compute_max_result_bytes(runtime)
    found = await runtime.files.read_bytes(path, start=start, max_bytes=min(count or most, most))
    return {"path": found.path, **format_byte_range(found.data, found.start, found.size, most)}


def format_byte_range(data: bytes, begin: int, size: int, most: int) -> dict[str, object]:
    """Return a range of bytes in the form of :func:`read_bytes`.

    :param begin: the position of the range in the whole
    :param size: the bytes of the whole
    :param most: the most bytes of the answer
    """
    text = None
    if not begin and data.startswith(UTF_8_MARK):
        begin, data = len(UTF_8_MARK), data.removeprefix(UTF_8_MARK)
    if b"\0" not in data:
        head = _count_continuation_bytes(data) if begin else 0
        text, used = _decode_whole_characters(data[head:])
        if text is not None:
            while (length := _json_size(text)) > most:
                text, used = _decode_whole_characters(data[head : head + used * most // length])
                assert text is not None
            begin += head
            data = data[head : head + used]
    if text is None:
        data = data[: most * 3 // 4]
    end = begin + len(data)
    return {
        **({"text": text} if text is not None else {"base64": base64.b64encode(data).decode("ascii")}),
        "start": begin,
        "end": end,
        "next": end if end < size else None,
        "size": size,
    }


async def _image_data(runtime: Runtime, path: str, size: int) -> dict[str, object]:
    head = (await runtime.files.read_bytes(path, max_bytes=_SNIFF_BYTES)).data
    media_type = detect_image_type(head)
    if head.startswith(PDF_START):
        return await read_pdf(runtime, path, 1, None, compute_max_result_bytes(runtime))
    if media_type is None:
        if (picture := _name_other_picture(head)) is not None:
            raise ToolError(
                f"{path} is {picture} of {size:,} bytes. Only PNG, JPEG, GIF and WebP can be shown. Convert it to PNG with a "
                "program in bash, and read the copy.",
                kind="invalid_input",
            )
        what = next((name for magic, name in _BINARIES if head.startswith(magic)), "unknown type")
        raise ToolError(
            f"{path} is a binary file of {size:,} bytes ({what}). Read a range with `unit: bytes`, "
            "or inspect it with a program in bash.",
            kind="invalid_input",
        )
    if size > MAX_IMAGE:
        raise ToolError(
            f"Image {path} ({media_type}) has {size:,} bytes. The maximum is {MAX_IMAGE:,}. "
            "Make a smaller copy with a program in bash.",
            kind="limit",
        )
    whole = await runtime.files.read_bytes(path)
    return {"path": whole.path, "image": Blob(whole.data, media_type), "size": whole.size}


def _name_other_picture(head: bytes) -> str | None:
    """Return what kind of picture, which no provider takes, begins so; None if it is none."""
    if head[4:8] == b"ftyp":
        return _PICTURE_BRANDS.get(head[8:12])
    return next((name for magic, name in _OTHER_PICTURES if head.startswith(magic)), None)


def _looks_binary(text: str) -> bool:
    if "\0" in text:
        return True
    start = text[:_SNIFF_BYTES]
    return start.count("\ufffd") * 10 > len(start) * 3


_MOST_JSON_BYTES = 6
"""Bytes of one character in JSON, for an escaped control character."""


def _json_size(text: str) -> int:
    try:
        return len(orjson.dumps(text))
    except TypeError:  # half of a surrogate pair
        return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))


def _count_fitting_lines(lines: Sequence[str], most: int) -> int:
    """Return how many lines fit into ``most`` bytes, but at least one, so that reading can continue."""
    low, high = 1, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        if _json_size("\n".join(lines[:middle])) > most:
            high = middle - 1
        else:
            low = middle
    return low


def _count_continuation_bytes(data: bytes) -> int:
    """Return how many bytes at the start belong to a character that began before them."""
    for number, byte in enumerate(data[:4]):
        if byte & 0xC0 != 0x80:
            return number
    return 0


def _decode_whole_characters(data: bytes) -> tuple[str | None, int]:
    """Return the text without an incomplete last character, and its bytes; None if it is not UTF-8."""
    try:
        return data.decode(), len(data)
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and error.start > 0:
            return data[: error.start].decode(), error.start
        return None, 0


# glob, grep and tree: searches for files by name, and for text in them.

_FEW = 500
"""The most paths that are arranged on the event loop."""
_FOLDER = {
    "type": "string",
    "format": "path",
    "minLength": 1,
    "maxLength": MAX_PATH,
    "default": ".",
    "description": "Folder to search",
}
_HIDDEN = {
    "type": "boolean",
    "default": False,
    "description": "Include files and folders whose names start with a dot",
}
_IGNORED = {
    "type": "boolean",
    "default": False,
    "description": "Include files that an ignore file such as .gitignore excludes",
}


class GlobTool(Tool):
    spec = file_read_spec(
        id="glob",
        description=(
            "Find files by name or path pattern: `*` matches within a name, `**` across folders, e.g. "
            "`src/**/*.py`. Returns up to 1,000 paths, sorted. Skips ignored files, and hidden files unless "
            "a part of the pattern starts with a dot. A folder that you name is always searched."
        ),
        parameters=make_closed_object_schema(
            {
                "pattern": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_PATTERN,
                    "description": "Pattern for the path within `path`",
                },
                "path": _FOLDER,
                "hidden": _HIDDEN,
                "ignored": _IGNORED,
            },
            ["pattern"],
        ),
        max_entries=1000,
        tier="core",
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        found = await runtime.search.glob(
            args["pattern"],
            args.get("path", "."),
            hidden=args.get("hidden", False),
            ignored=args.get("ignored", False),
        )
        return {
            "paths": list(found.paths),
            **_describe_omitted_entries(found, "a narrower pattern or path", _find_glob_hints(args["pattern"])),
        }


class GrepTool(Tool):
    spec = file_read_spec(
        id="grep",
        description=(
            "Search file contents for a text or regular expression, e.g. where a function is used, line by "
            "line (Rust syntax: no look-around, no back-references). Returns up to 200 matches as path, line "
            "and text, sorted. Skips hidden, binary and ignored files, except in a folder that you name. Use it instead of "
            "grep in bash."
        ),
        parameters=make_closed_object_schema(
            {
                "pattern": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 10_000,
                    "description": "Regular expression",
                },
                "path": {**_FOLDER, "description": "File or folder to search"},
                "glob": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_PATTERN,
                    "description": "Only files with a matching name or path, e.g. `*.py` or `src/**/*.ts`. Default: all",
                },
                "ignore_case": {"type": "boolean", "default": False, "description": "Ignore upper and lower case"},
                "literal": {"type": "boolean", "default": False, "description": "Treat `pattern` as plain text"},
                "hidden": _HIDDEN,
                "ignored": _IGNORED,
            },
            ["pattern"],
        ),
        max_entries=200,
        tier="core",
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        found = await runtime.search.grep(
            args["pattern"],
            args.get("path", "."),
            glob=args.get("glob"),
            ignore_case=args.get("ignore_case", False),
            literal=args.get("literal", False),
            hidden=args.get("hidden", False),
            ignored=args.get("ignored", False),
        )
        return {
            "matches": [{"path": m.path, "line": m.line, "text": m.text} for m in found.matches],
            **_describe_encodings(found),
            **_describe_omitted_entries(
                found,
                "a narrower pattern, path or glob",
                [
                    *_find_glob_hints(args.get("glob", "").removeprefix("!")),
                    *([] if args.get("literal") else _find_regex_hints(args["pattern"])),
                ],
            ),
        }


class TreeTool(Tool):
    spec = file_read_spec(
        id="tree",
        description=(
            "Show the directory structure below a folder: an indented tree of folders and files, with the "
            "number of files in each folder. Skips ignored files and empty folders."
        ),
        parameters=make_closed_object_schema(
            {
                "path": _FOLDER,
                "depth": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 20,
                    "default": 3,
                    "description": "Levels to show",
                },
                "hidden": _HIDDEN,
                "ignored": _IGNORED,
                "max_entries": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 2000,
                    "default": 400,
                    "description": "Maximum number of lines",
                },
            }
        ),
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path: str = args.get("path", ".")
        found = await runtime.search.glob(
            "**", path, hidden=args.get("hidden", False), ignored=args.get("ignored", False)
        )
        folder = (await runtime.files.stat(path)).path
        below = "" if folder == "." else f"{folder}/"
        lines: list[str] = []

        def arrange() -> bool:
            root = FolderTreeNode()
            for one in found.paths:
                root.put(one.removeprefix(below).split("/"))
            return root.add_tree_lines(lines, 0, args.get("depth", 3), args.get("max_entries", 400))

        cut = await asyncio.to_thread(arrange) if len(found.paths) > _FEW else arrange()
        answer: dict[str, object] = {"path": folder, "files": len(found.paths), "tree": "\n".join(lines)}
        if cut:
            answer["has_more"] = "The tree is incomplete. Use a narrower path, a smaller depth or more max_entries."
        return {**answer, **_describe_omitted_entries(found, "a narrower path")}


class FolderTreeNode:
    """A folder of a tree with its entries by name. The value of a file is None."""

    def __init__(self) -> None:
        self.entries: dict[str, FolderTreeNode | None] = {}
        self.files = 0

    def put(self, parts: list[str]) -> None:
        folder = self
        for name in parts[:-1]:
            folder.files += 1
            inner = folder.entries.get(name)
            if inner is None:
                inner = folder.entries[name] = FolderTreeNode()
            folder = inner
        folder.files += 1
        folder.entries.setdefault(parts[-1], None)

    def add_tree_lines(self, lines: list[str], level: int, depth: int, most: int) -> bool:
        """Add the lines of the folder, folders first, and return whether they were cut at ``most``."""
        for name, inner in sorted(self.entries.items(), key=lambda entry: (entry[1] is None, entry[0])):
            if len(lines) >= most:
                return True
            if inner is None:
                lines.append(f"{'  ' * level}{name}")
                continue
            count = f"{inner.files} file{'s' if inner.files != 1 else ''}"
            lines.append(f"{'  ' * level}{name}/ ({count})")
            if level + 1 < depth and inner.add_tree_lines(lines, level + 1, depth, most):
                return True
        return False


def _describe_encodings(found: FileSearchResult) -> dict[str, object]:
    """Return the encodings of the files with a match that are not in UTF-8, and how many files were not searched."""
    fields: dict[str, object] = {}
    if encodings := {match.path: match.encoding for match in found.matches if match.encoding is not None}:
        fields["encodings"] = encodings
    if count := found.unsearched_count:
        fields["not_searched"] = f"{count} files in UTF-32, which grep does not search. Read them instead."
    return fields


def _find_glob_hints(pattern: str) -> Iterator[str]:
    """Yield what may be wrong with the form of a glob that found nothing."""
    outside = re.sub(r"\{[^{}]*\}|\[[^]]*\]", "", pattern)
    if "\\" in pattern:
        yield "A backslash does not separate folders. Write `/` between them."
    if ("(" in pattern and "|" in pattern) or re.search(r"[@?+*!]\(", pattern):
        yield "Parentheses are part of a name. Write alternatives as `{a,b}`."
    if "," in outside or re.search(r"\s\S*[*?]", outside):
        yield "The glob is one pattern. Write several as `{a,b}`, e.g. `{*.ts,*.tsx}`."
    if re.search(r"\{[^{},]*\.\.[^{},]*\}", pattern):
        yield "A range in braces is not expanded. Write `{1,2,3}`, or `[1-3]` for one character."
    if pattern.startswith("!"):
        yield "`!` is part of a name here. In the `glob` of grep, it excludes files."
    if pattern.startswith(("~", "$HOME")):
        yield "The home folder is not expanded. Write an absolute path."
    if "[" in outside or "{" in outside:
        yield "A bracket or brace of the glob is not closed. Close it, or write `[[]` or `[{]` for the character."


def _find_regex_hints(pattern: str) -> Iterator[str]:
    """Yield what may be wrong with the form of a regular expression that found nothing."""
    if re.search(r"(?<!\[)\\\|", pattern):
        yield "`\\|` is the character `|`. Write alternatives as `a|b`."
    if re.fullmatch(r"/(?:[^/\\]|\\.)+/[gimsuy]*", pattern):
        yield "Slashes are part of the text. Leave out the slashes around the pattern."


def _describe_omitted_entries(found: FileSearchResult, narrower: str, hints: Iterable[str] = ()) -> dict[str, object]:
    """Return what the list leaves out, if anything."""
    fields: dict[str, object] = {}
    if found.is_truncated:
        fields["has_more"] = f"The list is incomplete. Use {narrower}."
    if found.denied_count:
        fields["skipped"] = found.denied_count
    if not found.matches and not found.paths and not found.denied_count:
        fields["searched_files"] = found.searched_count
        left_out = [explain(count) for why, explain in _OMISSIONS.items() if (count := found.omissions.get(why, 0))]
        if left_out:
            fields["left_out"] = left_out
        elif given := list(hints):
            fields["hints"] = given
    return fields


def _explain_omission(what: str, remedy: str) -> Callable[[int], str]:
    return lambda count: f"{count:,} {'file' if count == 1 else 'files'} {what} would match. {remedy}"


_OMISSIONS: Mapping[SearchOmission, Callable[[int], str]] = {
    "hidden": _explain_omission("with a hidden name or folder", "To include them, set `hidden`."),
    "ignored": _explain_omission(
        "that an ignore file excludes", "To include them, set `ignored`, or name their folder in `path`."
    ),
    "binary": _explain_omission(
        "with binary content", "To see the content, use read with `unit: bytes`, or a program in bash."
    ),
    "deeper": _explain_omission("in deeper folders", "To include them, write `**/` before the name."),
    "inside": _explain_omission("in a folder of this name", "To include them, write `/**` after the name."),
    "case": _explain_omission("in another letter case", "To find them, write the pattern in their case."),
}
