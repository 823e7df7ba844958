"""Shared parts of tool declarations: closed objects, paths, and the requirements of reading and changing files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from handrail.contract.tool.requires import FsRequires, Requires
from handrail.contract.tool.spec import LockSpec, ToolSpec

MAX_OUTPUT = 200 * 1024
"""The most bytes of a result with the content of files, search results or program output."""
WORKSPACE = FsRequires(read=("{workspace}",), write=("{workspace}",))
"""The whole workspace. Tools that start programs need it, because the sandbox mounts only what the call requires."""
MAX_PATH = 4096
"""The most characters of a path, as on Linux."""
MAX_PATTERN = 1_000
"""The most characters of a glob pattern, which is compiled."""
FILE = {
    "type": "string",
    "format": "path",
    "minLength": 1,
    "maxLength": MAX_PATH,
    "description": "File path, relative to the workspace or absolute",
}


def make_closed_object_schema(properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """Return a JSON Schema of an object with these members and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        **({"required": list(required)} if required else {}),
        "additionalProperties": False,
    }


file_read_spec = partial(
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
"""Declares a tool that reads the file or folder in its argument ``path``."""

file_change_spec = partial(
    ToolSpec,
    requires=Requires(fs=WORKSPACE),
    side_effect="write",
    locks=(LockSpec("file:{path}", "X"),),
    targets={"fs.read": "{path}", "fs.write": "{path}"},
    max_output=MAX_OUTPUT,
    category="files",
    kind="edit",
)
"""Declares a tool that changes the file in its argument ``path``, which the session must have read."""
