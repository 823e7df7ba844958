"""Shared parts of tool declarations: closed objects, paths, and the requirements of reading and changing files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from handrail.contract.tool.requires import FsRequires, Requires
from handrail.contract.tool.spec import LockSpec, ToolSpec

MAX_OUTPUT = 200 * 1024
"""Bytes of a result that shows a file, a search or what a program wrote."""
WORKSPACE = FsRequires(read=("{workspace}",), write=("{workspace}",))
"""The whole workspace. A tool that starts programs needs it too: they see only what the sandbox mounts for the call."""
MAX_PATH = 4096
"""Characters of a path, as systems have it."""
MAX_PATTERN = 1_000
"""Characters of a glob, which is compiled."""
FILE = {
    "type": "string",
    "format": "path",
    "minLength": 1,
    "maxLength": MAX_PATH,
    "description": "File path, relative to the workspace or absolute",
}


def object_schema(properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON Schema of an object with these members and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        **({"required": list(required)} if required else {}),
        "additionalProperties": False,
    }


file_reading = partial(
    ToolSpec,
    requires=Requires(fs=FsRequires(read=("{workspace}", "{ad-hoc}", "{output}"))),
    side_effect="read",
    locks=(LockSpec("file:{path}", "S"),),
    targets={"fs.read": "{path}"},
    idempotent=True,
    max_output=MAX_OUTPUT,
    category="files",
    kind="read",
)
"""The declaration of a tool that reads the file or folder in its argument ``path``."""

file_changing = partial(
    ToolSpec,
    requires=Requires(fs=WORKSPACE),
    side_effect="write",
    locks=(LockSpec("file:{path}", "X"),),
    targets={"fs.read": "{path}", "fs.write": "{path}"},
    max_output=MAX_OUTPUT,
    category="files",
    kind="edit",
)
"""The declaration of a tool that changes the file in its argument ``path``, which it has to have read."""
