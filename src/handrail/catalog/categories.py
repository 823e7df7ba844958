"""Which category a tool is in: exactly one, and what models are told of each.

The text of each of the seven that ship is put together from fixed words, and promises only what a tool in it does. A foreign
source is one category by the name that its operator gave it, with the operator's text: nothing that a server says of itself or
of its tools moves them to another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from handrail.contract.generation import Entry


@dataclass(frozen=True, slots=True)
class Topic:
    """The subject of a shipped category.

    :param about: what belongs in it
    :param offers: what its tools do, each in a few words with the ids of the tools that do it. An id that ends in ``.*``
        means every tool below
    """

    about: str
    offers: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def text(self, ids: Collection[str]) -> str:
        """The text that models read of the category if its tools are ``ids``: it promises nothing without a tool."""
        offers = [words for words, doing in self.offers if any(_is_one_of(tool_id, doing) for tool_id in ids)]
        return f"{self.about}: {', '.join(offers)}." if offers else f"{self.about}."

    def has(self, tool_id: str) -> bool:
        """Whether the tool is one of those that ship in this category."""
        return any(_is_one_of(tool_id, doing) for _, doing in self.offers)


SHIPPED: Mapping[str, Topic] = MappingProxyType(
    {
        "git": Topic(
            "Version control with git",
            (
                ("status", ("git.status",)),
                ("history", ("git.log", "git.show")),
                ("differences", ("git.diff",)),
                ("authors of lines", ("git.blame",)),
                ("branches", ("git.branches", "git.create_branch", "git.checkout")),
                ("commits", ("git.add", "git.commit")),
                ("merges", ("git.merge",)),
                ("stashes", ("git.stash",)),
                ("new repositories and clones", ("git.init", "git.clone")),
                ("push", ("git.push",)),
            ),
        ),
        "project": Topic("Projects and workspaces"),
        "agent": Topic(
            "Other agents",
            (
                ("work for an agent by its name", ("agent.*",)),
                ("messages over channels", ("send_message", "wait_channel")),
            ),
        ),
        "hooks": Topic(
            "Triggers that notify you later",
            (
                ("timers", ("add_timer",)),
                ("schedules", ("add_schedule",)),
                ("watched channels", ("watch_channel",)),
                ("a list of them", ("list_triggers", "remove_trigger")),
            ),
        ),
        "memory": Topic(
            "Notes and memory",
            (
                ("notes of this session", ("scratchpad",)),
                ("search of the conversation", ("search_memory",)),
                ("what its calls made", ("artifact.read",)),
                ("room in the conversation", ("memory.compact",)),
            ),
        ),
        "files": Topic(
            "Files of the workspace",
            (
                ("several edits at once", ("multi_edit",)),
                ("changes by line number", ("file.patch",)),
                ("folder trees", ("tree",)),
                ("values in JSON files", ("json_read", "json_write")),
            ),
        ),
        "system": Topic(
            "Programs and this session",
            (
                ("Python code", ("python",)),
                ("background jobs", ("jobs", "read_job", "wait", "stop_task")),
                ("terminals", ("terminal.*",)),
                ("steps of stateful tools", ("tool.step", "tool.close")),
                ("resources", ("resource.*",)),
                ("prompts", ("prompt.*",)),
            ),
        ),
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


def about(name: str, ids: Collection[str], entry: Entry, texts: Mapping[str, str]) -> str:
    """What models are told of the category ``name``.

    :param ids: of the tools in it
    :param entry: any of them
    :param texts: the operator's, by name; those of the categories that ship are fixed
    """
    if (topic := SHIPPED.get(name)) is not None:
        return topic.text(ids)
    given = texts.get(name) or (entry.foreign.about if entry.foreign is not None else "")
    line = " ".join(given.split())
    if line:
        return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
    if entry.foreign is not None:
        return f"Tools of {name}, a source outside this installation."
    return _OWN_TEXT if name == OWN else f"Tools of this installation for {name}."


def about_empty(name: str, withheld: Iterable[Entry], beyond: Iterable[str]) -> str:
    """What models are told of a category that ships and has no tools here: what belongs in it, and how it gets tools.

    :param withheld: the tools of it that cannot be called
    :param beyond: ids of the tools that only other agents have
    """
    topic, without = SHIPPED[name], list(withheld)
    if without:
        line = " ".join(str(without[0].withheld).split())
        reason = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
        how = f"its {len(without)} tools are withheld" if len(without) > 1 else "its tool is withheld"
        return f"{topic.about}. Empty here, because {how}: {reason}"
    if any(topic.has(tool_id) for tool_id in beyond):
        return f"{topic.about}. Empty here, because this agent has none of its tools. The user can name them in `tools` of its manifest."
    return f'{topic.about}. Empty here. The user can add a tool to it: one whose definition says category "{name}".'


def _is_one_of(tool_id: str, patterns: Iterable[str]) -> bool:
    return any(tool_id.startswith(one[:-1]) if one.endswith(".*") else tool_id == one for one in patterns)


@lru_cache(maxsize=4_096)
def _name(text: str) -> str:
    return _NOT_IN_A_NAME.sub("-", text.strip())[:MAX_NAME].strip("-._")
