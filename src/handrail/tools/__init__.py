"""Which tools ship? The built-in tools, each written as a user would write one."""

from __future__ import annotations

from handrail.contract.tool.tool import Tool
from handrail.tools.agents import Compact, Task
from handrail.tools.discovery import BrowseTools, FindTools, Info, LoadTools, ToolSearch
from handrail.tools.files.files import Edit, FilePatch, MultiEdit, Read, Write
from handrail.tools.files.reading import Glob, Grep, Tree
from handrail.tools.files.structured import JsonRead, JsonWrite
from handrail.tools.git import GIT_TOOLS
from handrail.tools.jobs import JOB_TOOLS
from handrail.tools.offers import OFFER_TOOLS
from handrail.tools.session import STATE_TOOLS, Ask, ReadArtifact, Scratchpad, SearchMemory, SkillTool, Todo
from handrail.tools.shell import TERMINAL_TOOLS, Bash, Python
from handrail.tools.triggers import CHANNEL_TOOLS, TRIGGER_TOOLS

BUILTINS: tuple[Tool, ...] = (
    *(Read(), Write(), Edit(), FilePatch(), Glob(), Grep(), Bash(), Todo(), Ask(), Task(), SkillTool()),
    *(BrowseTools(), LoadTools(), FindTools(), ToolSearch(), Info()),
    *(MultiEdit(), Tree(), JsonRead(), JsonWrite(), Python(), Scratchpad(), SearchMemory(), ReadArtifact(), Compact()),
    *CHANNEL_TOOLS,
    *TRIGGER_TOOLS,
    *JOB_TOOLS,
    *TERMINAL_TOOLS,
    *STATE_TOOLS,
    *GIT_TOOLS,
    *OFFER_TOOLS,
)
"""In the order in which a catalog shows them."""

ALIASES = {"get_git_status": "git.status", "git_commit": "git.commit"}
"""Further names of these, by which other systems know them: alias to id."""
