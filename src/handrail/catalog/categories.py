"""Which category a tool is in: exactly one, and what models are told of each.

The seven that ship have fixed texts. A foreign source is one category by the name that its operator gave it, with the
operator's text: nothing that a server says of itself or of its tools moves them to another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from handrail.registry.generation import Entry

SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        "git": "Version control with git: status, history, differences, branches, commits, merges, stashes, push.",
        "project": "Projects and workspaces: create, list, change and organise them.",
        "agent": "Agents and their profiles: hand work over, list, create and change agents.",
        "hooks": "What runs by itself: hooks, triggers, timers, schedules.",
        "memory": "Notes, profiles and what is remembered across sessions, beyond a search of it.",
        "files": "Files of the workspace, beyond reading, writing, editing and searching: patches and the like.",
        "system": "The system itself: configuration, diagnostics, token use, jobs, prompts.",
    }
)
"""By name, in the order in which they are shown."""

CORE = "core"
"""What a core tool has in place of a category."""
OWN = "own"
"""The category of operators' tools that say none, and whose ids have no first part to go by."""
_OWN_TEXT = "Tools of this installation."
MAX_NAME = 64
MAX_TEXT = 200
"""Characters of a text that an operator gave."""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def category_of(entry: Entry) -> str:
    """The name of the category that ``entry`` is in, unless it is core.

    A foreign tool's is its source's. An operator's tool may name one; else the first part of its id does
    (``email`` of ``email.send``).
    """
    if entry.foreign is not None:
        name = _name(entry.foreign.name) or "foreign"
        return f"{name}-source" if name.lower() in (*SHIPPED, CORE, OWN) else name
    spec = entry.spec
    name = _name(spec.category or "") or (_name(spec.id.partition(".")[0]) if "." in spec.id else OWN)
    return f"{name}-tools" if name == CORE else name


def about(name: str, entry: Entry, texts: Mapping[str, str]) -> str:
    """What models are told of the category ``name``.

    :param entry: any tool in it
    :param texts: the operator's, by name; those of the categories that ship are fixed
    """
    if (fixed := SHIPPED.get(name)) is not None:
        return fixed
    given = texts.get(name) or (entry.foreign.about if entry.foreign is not None else "")
    line = " ".join(given.split())
    if line:
        return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
    if entry.foreign is not None:
        return f"Tools of {name}, a source outside this installation."
    return _OWN_TEXT if name == OWN else f"Tools of this installation for {name}."


@lru_cache(maxsize=4_096)
def _name(text: str) -> str:
    return _NOT_IN_A_NAME.sub("-", text.strip())[:MAX_NAME].strip("-._")
