"""Canonical tool ids, and the reversible wire names that each provider accepts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from itertools import pairwise

from handrail.contract.text.lazy_patterns import compile_regex_lazily

MAX_WIRE_NAME = 64
ID_PATTERN = compile_regex_lazily(r"[A-Za-z][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*\Z")
LOCKED_IDS = (
    "read",
    "write",
    "edit",
    "glob",
    "grep",
    "bash",
    "todo",
    "task",
    "question",
    "web_search",
    "web_fetch",
    "skill",
    "tool_search",
)
"""Ids with a fixed meaning and shape. Only a built-in tool may have one, whether it exists yet or not."""
FRONTEND_IDS = ("call_tool",)
"""Names of functions that a frontend itself offers to its clients. No third-party tool may take such a name."""
SESSION_INTERNAL = (
    *("todo", "question", "task", "skill", "tool_search", "find_tools", "browse_tools", "load_tools", "tool_status"),
    *("info", "agent.*", "tool.step", "tool.close"),
    *(
        "scratchpad",
        "scratchpad.*",
        "search_memory",
        "artifact.read",
        "memory.query",
        "memory.upsert",
        "memory.compact",
        "jobs",
        "read_job",
        "wait",
        "stop_task",
    ),
    *("terminal.read", "terminal.resize", "terminal.stop", "plan", "plan_exit"),
    *("create_task", "list_tasks", "edit_task", "get_task"),
    *("browse_rules", "load_rule", "save_rule", "delete_rule"),
    *("send_message", "wait_channel", "list_triggers", "remove_trigger"),
)
"""Built-in tools that touch nothing but the session and its task list. The shipped rules allow these names for them alone."""
TERMINAL_IDS = ("terminal.start", "terminal.send", "terminal.read", "terminal.resize", "terminal.stop")
"""Built-in tools for terminals. The shipped rules allow these names for them alone."""
JOB_IDS = ("jobs", "read_job", "wait", "stop_task")
"""Built-in tools for jobs, which are loaded with the first job."""
STATE_IDS = ("tool.step", "tool.close")
"""Built-in tools that continue a tool session, loaded with the first one. The shipped rules allow their names, and a
call is evaluated as a call of the open tool."""
RESOURCE_IDS = (
    *("resource.list", "resource.read", "resource.subscribe", "resource.unsubscribe"),
    *("prompt.list", "prompt.get", "prompt.complete"),
)
"""Built-in tools for resources and prompts. The shipped rules allow them for the operator's own; those of a server
require approval."""
_INTERNAL = frozenset(SESSION_INTERNAL)
_INTERNAL_FAMILIES = tuple(one[:-1] for one in SESSION_INTERNAL if one.endswith("*"))
_NOT_ON_THE_WIRE = compile_regex_lazily(r"[^A-Za-z0-9_-]")


def is_session_internal_tool(tool_id: str) -> bool:
    """Return whether a tool is one of :data:`SESSION_INTERNAL`."""
    return tool_id in _INTERNAL or tool_id.startswith(_INTERNAL_FAMILIES)


def find_tool_id_fault(tool_id: str) -> str | None:
    """Return why ``tool_id`` is not a valid id of a tool, or None if it is."""
    if len(tool_id) > 128:
        return f"the id has {len(tool_id)} characters; the maximum is 128"
    if not ID_PATTERN.match(tool_id):
        return f"{tool_id!r} is not an id; use letters, digits, '_' and '-' in parts joined by '.', and start with a letter"
    return None


def wire_name(tool_id: str) -> str:
    """Return the name of ``tool_id`` for providers: ``[A-Za-z0-9_-]``, at most 64 characters, stable.

    Ids that already fit are unchanged. A dot becomes ``__``; a long name keeps its beginning and ends in a hash of
    the whole id.
    """
    name = _NOT_ON_THE_WIRE.sub("_", tool_id.replace(".", "__"))
    if len(name) <= MAX_WIRE_NAME:
        return name
    digest = hashlib.sha256(tool_id.encode()).hexdigest()[:10]
    return f"{name[: MAX_WIRE_NAME - 11]}_{digest}"


_OTHER_NAMES: Mapping[str, str] = {
    other: tool_id
    for tool_id, others in {
        "read": "cat fsread openfile readfile readtextfile view viewfile",
        "write": "createfile fswrite savefile writefile writetofile",
        "edit": "applydiff editfile replace replaceinfile replacestringinfile searchreplace strreplace strreplacebasededittool "
        "strreplaceeditor",
        "bash": "command exec execbash execcommand executebash executecommand localshell runbash runcommand runinterminal "
        "runshellcommand runterminalcmd runterminalcommand sh shell shellcommand terminal",
        "glob": "filesearch findfiles globfilesearch list listdir listdirectory listfiles ls",
        "grep": "codesearch grepsearch rg ripgrep search searchcode searchfilecontent searchfiles searchtext",
        "todo": "managetodolist todoread todowrite updateplan updatetodolist writetodos",
        "web_fetch": "fetch fetchurl fetchwebpage openurl readurl visiturl",
        "web_search": "googlesearch googlewebsearch searchweb",
        "task": "agent delegate dispatchagent runsubagent spawnagent subagent",
        "question": "askfollowupquestion askuser askuserquestion requestuserinput",
    }.items()
    for other in others.split()
}
"""Names that other agents have for a tool, in lower case and without signs."""
_MARKS = compile_regex_lazily(r"<\|[^|<>]{0,40}\|>.*\Z|\(.*\Z|:\d+\Z")
_SEPARATORS = compile_regex_lazily(r"[.:/]|__")
_PREFIXES = frozenset({"container", "default_api", "functions", "handrail", "mcp", "repo_browser", "tool", "tools"})
_SIGNS = compile_regex_lazily(r"[^a-z0-9]+")


def guess_intended_tool_id(name: str, known: Iterable[str]) -> str | None:
    """Return the known id that an unknown name means: in another spelling, with a prefix, or of another agent."""
    wanted = name[:_COMPARED].strip()
    while wanted.startswith("<|") and "|>" in wanted:
        wanted = wanted.partition("|>")[2]
    wanted = _MARKS.sub("", wanted).lower()
    ids = {_SIGNS.sub("", one.lower()): one for one in known}
    parts = itertools.dropwhile(_PREFIXES.__contains__, filter(None, _SEPARATORS.split(wanted)))
    spelling = _SIGNS.sub("", "".join(parts))
    return ids.get(spelling) or ids.get(_SIGNS.sub("", _OTHER_NAMES.get(spelling, "")))


def nearest_names(name: str, known: Iterable[str], count: int = 3, *, cutoff: float = 0.5) -> list[str]:
    """Return the known names most similar to ``name``, best first, for 'did you mean' texts.

    The work is bounded for any input. Only the beginnings of names are compared. Of many names, only those with the
    same first letter count, and only those with most letter pairs in common are compared closely.
    """
    wanted = name[:_COMPARED]
    candidates = list(known)
    if len(candidates) > _MOST_CANDIDATES:
        alike = [one for one in candidates if one[:1] == wanted[:1]]
        candidates = (alike or candidates)[:_MOST_CANDIDATES]
    pairs = _letter_pairs(wanted)
    by_pairs = [(_overlap(pairs, _letter_pairs(one[:_COMPARED])), one) for one in candidates]
    by_pairs.sort(key=lambda found: -found[0])
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    scored: list[tuple[float, str]] = []
    for _, one in by_pairs[:_MOST_COMPARED]:
        matcher.set_seq1(one[:_COMPARED])
        if (
            matcher.real_quick_ratio() >= cutoff
            and matcher.quick_ratio() >= cutoff
            and (ratio := matcher.ratio()) >= cutoff
        ):
            scored.append((ratio, one))
    return [one for _, one in sorted(scored, reverse=True)[:count]]


_COMPARED = 64
"""Characters of a name that are compared."""
_MOST_CANDIDATES = 2_000
_MOST_COMPARED = 24


def _letter_pairs(name: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(name))) | frozenset(name)


def _overlap(some: frozenset[str], others: frozenset[str]) -> float:
    """Return how much two sets have in common, from 0 to 1."""
    return 2 * len(some & others) / (len(some) + len(others) or 1)
