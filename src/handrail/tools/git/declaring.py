"""What the git tools declare alike: what reading and changing a repository takes, and the arguments that several of them have."""

from __future__ import annotations

from functools import partial
from typing import Any

from handrail.contract.tool.requires import FsRequires, Requires, ShellRequires
from handrail.contract.tool.spec import LockSpec, ToolSpec
from handrail.tools.declaring import MAX_OUTPUT, WORKSPACE

TIMEOUT_MS = 120_000
"""For what writes many files."""
FOLDER: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 4096,
    "default": ".",
    "description": "A folder in the repository; the workspace if left out",
}
READ_FOLDER: dict[str, Any] = {**FOLDER, "format": "path"}
"""The same, where reading it is judged by the rules about reading files."""
PATHS: dict[str, Any] = {
    "type": "array",
    "maxItems": 2_000,
    "items": {"type": "string", "minLength": 1, "maxLength": 4096},
}
"""Files and folders of the repository; each tool adds a description."""
WRITES = Requires(fs=WORKSPACE, shell=(ShellRequires(cmd="git"),))  # noqa: S604 - a declaration, nothing is run
WRITES_CONFIG = WRITES.model_copy(update={"capabilities": ("vcs.config",)})
"""What a tool needs that also writes the repository's configuration, as following a remote's branch does."""

reading = partial(
    ToolSpec,
    requires=WRITES.model_copy(update={"fs": FsRequires(read=("{workspace}",))}),
    side_effect="read",
    locks=(LockSpec("workspace", "S"),),
    idempotent=True,
    max_output=MAX_OUTPUT,
    category="git",
    kind="read",
)
"""The declaration of a tool that only looks into a repository."""

changing = partial(ToolSpec, requires=WRITES, side_effect="write", locks=(LockSpec("workspace", "X"),), category="git")
"""The declaration of a tool that changes a repository or its files."""
