"""The git tools, which run the git program in the sandbox, on repositories of the workspace, without other programs."""

from __future__ import annotations

from handrail.contract.tool.tool import Tool
from handrail.tools.git.changing import Add, Checkout, Commit, CreateBranch, Merge, Stash
from handrail.tools.git.reading import Blame, Branches, Diff, Log, Show, Status
from handrail.tools.git.remotes import Clone, Init, Push

GIT_TOOLS: tuple[Tool, ...] = (
    *(Status(), Log(), Diff(), Show(), Blame(), Branches()),
    *(Add(), Commit(), CreateBranch(), Checkout(), Merge(), Stash()),
    *(Init(), Clone(), Push()),
)
"""The git tools in the order of a catalog."""
