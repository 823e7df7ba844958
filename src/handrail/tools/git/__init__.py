"""The git tools, which run the git program in the sandbox, on repositories of the workspace, without other programs."""

from __future__ import annotations

from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.git.change_tools import (
    GitAddTool,
    GitCheckoutTool,
    GitCommitTool,
    GitCreateBranchTool,
    GitMergeTool,
    GitStashTool,
)
from handrail.tools.git.pull_requests import GitPullRequestTool
from handrail.tools.git.query_tools import (
    GitBlameTool,
    GitBranchesTool,
    GitDiffTool,
    GitLogTool,
    GitShowTool,
    GitStatusTool,
)
from handrail.tools.git.remote_tools import GitCloneTool, GitInitTool, GitPushTool

GIT_TOOLS: tuple[Tool, ...] = (
    *(GitStatusTool(), GitLogTool(), GitDiffTool(), GitShowTool(), GitBlameTool(), GitBranchesTool()),
    *(GitAddTool(), GitCommitTool(), GitCreateBranchTool(), GitCheckoutTool(), GitMergeTool(), GitStashTool()),
    *(GitInitTool(), GitCloneTool(), GitPushTool(), GitPullRequestTool()),
)
"""The git tools in the order of a catalog."""
