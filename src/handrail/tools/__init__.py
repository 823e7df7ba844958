"""Which tools ship? The built-in tools, each written as a user would write one."""

from __future__ import annotations

from handrail.contract.tool.tool import Tool
from handrail.tools.agents import MemoryCompactTool, TaskTool
from handrail.tools.discovery import BrowseToolsTool, FindToolsTool, InfoTool, LoadToolsTool, ToolSearchTool
from handrail.tools.files.editing_tools import EditTool, FilePatchTool, MultiEditTool, ReadTool, WriteTool
from handrail.tools.files.file_queries import GlobTool, GrepTool, TreeTool
from handrail.tools.files.json_files import JsonReadTool, JsonWriteTool
from handrail.tools.git import GIT_TOOLS
from handrail.tools.jobs import JOB_TOOLS
from handrail.tools.resources import RESOURCE_TOOLS
from handrail.tools.session import (
    STATE_TOOLS,
    ArtifactReadTool,
    QuestionTool,
    ScratchpadTool,
    SearchMemoryTool,
    SkillTool,
    TodoTool,
)
from handrail.tools.shell import TERMINAL_TOOLS, BashTool, PythonTool
from handrail.tools.triggers import CHANNEL_TOOLS, TRIGGER_TOOLS

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
        QuestionTool(),
        TaskTool(),
        SkillTool(),
    ),
    *(BrowseToolsTool(), LoadToolsTool(), FindToolsTool(), ToolSearchTool(), InfoTool()),
    *(
        MultiEditTool(),
        TreeTool(),
        JsonReadTool(),
        JsonWriteTool(),
        PythonTool(),
        ScratchpadTool(),
        SearchMemoryTool(),
        ArtifactReadTool(),
        MemoryCompactTool(),
    ),
    *CHANNEL_TOOLS,
    *TRIGGER_TOOLS,
    *JOB_TOOLS,
    *TERMINAL_TOOLS,
    *STATE_TOOLS,
    *GIT_TOOLS,
    *RESOURCE_TOOLS,
)
"""In the order in which a catalog shows them."""

ALIASES = {"get_git_status": "git.status", "git_commit": "git.commit"}
"""Further names of these, by which other systems know them: alias to id."""
