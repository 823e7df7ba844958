"""Which tools ship? The built-in tools, each written as a user would write one."""

from __future__ import annotations

from collections.abc import Mapping

from handrail.contract.agent_manifest import ToolProfile
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.delegation_tools import DelegateTaskTool
from handrail.tools.discovery_tools import (
    ExtensionToolSearchTool,
    FindToolsTool,
    ListToolCategoriesTool,
    LoadToolsTool,
    ToolDocumentationTool,
)
from handrail.tools.files.editing_tools import EditTool, FilePatchTool, MultiEditTool, ReadTool, WriteTool
from handrail.tools.files.json_file_tools import JsonReadTool, JsonWriteTool
from handrail.tools.files.moving_tools import FileDeleteTool, FileMoveTool
from handrail.tools.files.patch_tool import ApplyPatchTool
from handrail.tools.files.reading_and_search import GlobTool, GrepTool, TreeTool
from handrail.tools.files.repository_overview import RepositoryOverviewTool
from handrail.tools.git import GIT_TOOLS
from handrail.tools.job_tools import JOB_TOOLS
from handrail.tools.language_tool import LanguageServerTool
from handrail.tools.memory_tools import MEMORY_TOOLS
from handrail.tools.planning_tools import RULE_TOOLS, TASK_TOOLS, EnterPlanModeTool, ExitPlanModeTool
from handrail.tools.resource_tools import RESOURCE_TOOLS
from handrail.tools.session_tools import (
    STATE_TOOLS,
    ArtifactReadTool,
    AskUserTool,
    LoadSkillTool,
    ScratchpadTool,
    SessionHistorySearchTool,
    TodoTool,
)
from handrail.tools.shell_tools import TERMINAL_TOOLS, BashTool, PythonTool
from handrail.tools.trigger_and_channel_tools import CHANNEL_TOOLS, TRIGGER_TOOLS
from handrail.tools.web_search import WebSearchTool
from handrail.tools.web_tools import HttpPostTool, WebFetchTool

BUILTINS: tuple[Tool, ...] = (
    *(
        ReadTool(),
        WriteTool(),
        EditTool(),
        FilePatchTool(),
        GlobTool(),
        GrepTool(),
        BashTool(),
        TodoTool(),
        AskUserTool(),
        DelegateTaskTool(),
        LoadSkillTool(),
        WebSearchTool(),
        WebFetchTool(),
    ),
    *(ListToolCategoriesTool(), LoadToolsTool(), FindToolsTool(), ExtensionToolSearchTool(), ToolDocumentationTool()),
    *(
        MultiEditTool(),
        ApplyPatchTool(),
        FileMoveTool(),
        FileDeleteTool(),
        TreeTool(),
        LanguageServerTool(),
        RepositoryOverviewTool(),
        JsonReadTool(),
        JsonWriteTool(),
        PythonTool(),
        ScratchpadTool(),
        SessionHistorySearchTool(),
        ArtifactReadTool(),
        *MEMORY_TOOLS,
    ),
    *(EnterPlanModeTool(), ExitPlanModeTool()),
    *TASK_TOOLS,
    *CHANNEL_TOOLS,
    *TRIGGER_TOOLS,
    *JOB_TOOLS,
    *TERMINAL_TOOLS,
    *STATE_TOOLS,
    *GIT_TOOLS,
    HttpPostTool(),
    *RESOURCE_TOOLS,
)
"""In the order in which a catalog shows them."""

PROFILE_BUILTINS: Mapping[ToolProfile, tuple[Tool, ...]] = {"tiered-tools": RULE_TOOLS}
"""The built-in tools that exist in one profile only."""

ALIASES = {
    "get_git_status": "git.status",
    "git_commit": "git.commit",
    "repo_clone": "git.clone",
    "memory_search": "memory.query",
}
"""Further names of these, by which other systems know them: alias to id."""
