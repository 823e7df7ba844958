"""Canonical tool ids, and the reversible wire names that each provider accepts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import pairwise

MAX_WIRE_NAME = 64
ID_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*\Z")
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
"""Ids whose meaning and shape are fixed: only a built-in may have one, whether it is built yet or not."""
FACE_IDS = ("call_tool",)
"""Names under which a face itself has a door for its clients: somebody else's tool by one would stand in the door's place."""
SESSION_INTERNAL = (
    *("todo", "question", "task", "skill", "tool_search", "find_tools", "browse_tools", "load_tools", "tool_status"),
    *("info", "agent.*", "tool.step", "tool.close"),
    *(
        "scratchpad",
        "scratchpad.*",
        "search_memory",
        "artifact.read",
        "memory.compact",
        "jobs",
        "read_job",
        "wait",
        "stop_task",
    ),
    *("terminal.read", "terminal.resize", "terminal.stop"),
    *("send_message", "wait_channel", "list_triggers", "remove_trigger"),
)
"""Built-in tools that touch nothing but the session itself; what the shipped rules allow by these names is theirs alone."""
TERMINAL_IDS = ("terminal.start", "terminal.send", "terminal.read", "terminal.resize", "terminal.stop")
"""Built-in tools for programs that are typed to; likewise."""
JOB_IDS = ("jobs", "read_job", "wait", "stop_task")
"""Built-in tools for jobs, which come into a model's view with its first one."""
STATE_IDS = ("tool.step", "tool.close")
"""Built-in tools that go on with what a stateful tool has opened; they come into a model's view with the first one. The
shipped rules allow them by their names, and they are judged as the tool that is open."""
OFFER_IDS = (
    *("resource.list", "resource.read", "resource.subscribe", "resource.unsubscribe"),
    *("prompt.list", "prompt.get", "prompt.complete"),
)
"""Built-in tools for what sources have beside tools. The shipped rules allow them for the operator's own; what a server
gives is asked about."""
_INTERNAL = frozenset(SESSION_INTERNAL)
_INTERNAL_FAMILIES = tuple(one[:-1] for one in SESSION_INTERNAL if one.endswith("*"))
_NOT_ON_THE_WIRE = re.compile(r"[^A-Za-z0-9_-]")


def is_session_internal(tool_id: str) -> bool:
    """Whether a tool is one of :data:`SESSION_INTERNAL`."""
    return tool_id in _INTERNAL or tool_id.startswith(_INTERNAL_FAMILIES)


def fault_in_id(tool_id: str) -> str | None:
    """Why ``tool_id`` cannot be a tool's id, or None if it can."""
    if len(tool_id) > 128:
        return f"an id has at most 128 characters, this one has {len(tool_id)}"
    if not ID_PATTERN.match(tool_id):
        return f"{tool_id!r} is not an id: letters, digits, '_', '-', in parts joined by '.', starting with a letter"
    return None


def wire_name(tool_id: str) -> str:
    """What a provider sees for ``tool_id``: ``[A-Za-z0-9_-]``, at most 64 characters, stable.

    Ids that already fit stay as they are. A dot becomes ``__``; a long name keeps its head and ends
    in a hash of the whole id.
    """
    name = _NOT_ON_THE_WIRE.sub("_", tool_id.replace(".", "__"))
    if len(name) <= MAX_WIRE_NAME:
        return name
    digest = hashlib.sha256(tool_id.encode()).hexdigest()[:10]
    return f"{name[: MAX_WIRE_NAME - 11]}_{digest}"


def nearest(name: str, known: Iterable[str], count: int = 3, *, cutoff: float = 0.5) -> list[str]:
    """The few known names most like ``name``, best first; for 'did you mean' texts.

    The work is bounded, whatever is asked and known: the beginnings of names are compared, of many only those that begin
    alike, and closely only those that have most pairs of letters in common.
    """
    wanted = name[:_COMPARED]
    candidates = list(known)
    if len(candidates) > _MOST_CANDIDATES:
        alike = [one for one in candidates if one[:1] == wanted[:1]]
        candidates = (alike or candidates)[:_MOST_CANDIDATES]
    pairs = _pairs(wanted)
    by_pairs = [(_shared(pairs, _pairs(one[:_COMPARED])), one) for one in candidates]
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


def _pairs(name: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(name))) | frozenset(name)


def _shared(some: frozenset[str], others: frozenset[str]) -> float:
    """How much of two sets is in both, from 0 to 1."""
    return 2 * len(some & others) / (len(some) + len(others) or 1)
