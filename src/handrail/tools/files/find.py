"""glob, grep and tree: where files are, and where in them a text is."""

from __future__ import annotations

from typing import Any

from handrail.contract.doors.files import Found
from handrail.contract.doors.runtime import Runtime
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import MAX_PATH, MAX_PATTERN, file_reading, object_schema

_FOLDER = {
    "type": "string",
    "format": "path",
    "minLength": 1,
    "maxLength": MAX_PATH,
    "default": ".",
    "description": "The folder to look in; the workspace if left out",
}


class Glob(Tool):
    spec = file_reading(
        id="glob",
        description=(
            "List files by a pattern: `*` within a name, `**` across folders, as in `src/**/*.py`. "
            "Leaves out what ignore files name, and hidden files unless the pattern begins one with a dot."
        ),
        parameters=object_schema(
            {
                "pattern": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_PATTERN,
                    "description": "Matched against the path in the folder",
                },
                "path": _FOLDER,
            },
            ["pattern"],
        ),
        max_entries=1000,
        tier="core",
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        pattern: str = args["pattern"]
        hidden = any(part.startswith(".") and part not in (".", "..") for part in pattern.split("/"))
        found = await runtime.search.glob(pattern, args.get("path", "."), hidden=hidden)
        return {"paths": list(found.paths), **_bounds(found, "a narrower pattern or path")}


class Grep(Tool):
    spec = file_reading(
        id="grep",
        description=(
            "Search files for a regular expression, line by line (Rust syntax: no look-around, no back-references). "
            "Leaves out hidden and binary files and what ignore files name."
        ),
        parameters=object_schema(
            {
                "pattern": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 10_000,
                    "description": "The regular expression",
                },
                "path": {**_FOLDER, "description": "The file or folder to search; the workspace if left out"},
                "glob": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_PATTERN,
                    "description": "Only files like this, as in `*.py`",
                },
                "ignore_case": {"type": "boolean", "default": False},
                "literal": {"type": "boolean", "default": False, "description": "The pattern is plain text"},
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
        )
        return {
            "matches": [{"path": m.path, "line": m.line, "text": m.text} for m in found.matches],
            **_bounds(found, "a narrower pattern, path or glob"),
        }


class Tree(Tool):
    spec = file_reading(
        id="tree",
        description=(
            "Show the folders and files below a folder as an indented list, each folder with the number of files in it. "
            "Leaves out what ignore files name, hidden files unless asked for, and folders without files."
        ),
        parameters=object_schema(
            {
                "path": _FOLDER,
                "depth": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 20,
                    "default": 3,
                    "description": "Levels to show",
                },
                "hidden": {"type": "boolean", "default": False, "description": "Also names that begin with a dot"},
                "max_entries": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 2000,
                    "default": 400,
                    "description": "Lines",
                },
            }
        ),
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path: str = args.get("path", ".")
        found = await runtime.search.glob("**", path, hidden=args.get("hidden", False))
        below = "" if path in (".", "./") else path.rstrip("/").removeprefix("./") + "/"
        root = _Folder()
        for one in found.paths:
            root.put(one.removeprefix(below).split("/"))
        lines: list[str] = []
        cut = root.show(lines, 0, args.get("depth", 3), args.get("max_entries", 400))
        answer: dict[str, object] = {"path": path, "files": len(found.paths), "tree": "\n".join(lines)}
        if cut:
            answer["more"] = "not every line is shown; use a narrower path, a smaller depth or more max_entries"
        return {**answer, **_bounds(found, "a narrower path")}


class _Folder:
    """A folder in a tree, with what is in it by name: None for a file."""

    def __init__(self) -> None:
        self.entries: dict[str, _Folder | None] = {}
        self.files = 0

    def put(self, parts: list[str]) -> None:
        folder = self
        for name in parts[:-1]:
            folder.files += 1
            inner = folder.entries.get(name)
            if inner is None:
                inner = folder.entries[name] = _Folder()
            folder = inner
        folder.files += 1
        folder.entries.setdefault(parts[-1], None)

    def show(self, lines: list[str], level: int, depth: int, most: int) -> bool:
        """Add its lines, folders first. Gives whether they were cut at ``most``."""
        for name, inner in sorted(self.entries.items(), key=lambda entry: (entry[1] is None, entry[0])):
            if len(lines) >= most:
                return True
            if inner is None:
                lines.append(f"{'  ' * level}{name}")
                continue
            count = f"{inner.files} file{'s' if inner.files != 1 else ''}"
            lines.append(f"{'  ' * level}{name}/ ({count})")
            if level + 1 < depth and inner.show(lines, level + 1, depth, most):
                return True
        return False


def _bounds(found: Found, narrower: str) -> dict[str, object]:
    """What the list does not hold, said only where there is something to say."""
    said: dict[str, object] = {}
    if found.more:
        said["more"] = f"the search was stopped here; use {narrower}"
    if found.skipped:
        said["skipped"] = found.skipped
    return said
