"""The git tools: the git program in the sandbox, on repositories of the workspace, kept from running other programs."""

from __future__ import annotations

from handrail.contract.tool.tool import Tool
from handrail.tools.git.changing import Add, Checkout, Commit, CreateBranch
from handrail.tools.git.joining import Merge, Stash
from handrail.tools.git.reading import Blame, Branches, Log, Status
from handrail.tools.git.remotes import Clone, Init, Push
from handrail.tools.git.showing import Diff, Show

GIT_TOOLS: tuple[Tool, ...] = (
    *(Status(), Log(), Diff(), Show(), Blame(), Branches()),
    *(Add(), Commit(), CreateBranch(), Checkout(), Merge(), Stash()),
    *(Init(), Clone(), Push()),
)
"""In the order in which a catalog shows them."""
