"""The prompt's sections about tools, and token estimates. The order is index, guidance, provider tools, skills, hints.

The same tools give the same bytes, whatever has been loaded meanwhile, so that providers can cache them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from handrail.catalog.dialects import DIALECTS, Dialect
from handrail.catalog.fitting import told
from handrail.catalog.view import Standing, View
from handrail.contract.generation import Entry
from handrail.contract.tool.names import wire_name
from handrail.contract.tool.native import native_name
from handrail.contract.tool.spec import ToolSpec

# Token estimates of a text.
#
# The estimate is Handrail's own: vocabularies differ between providers and none is available offline. It splits text as
# byte-pair tokenizers do before they merge, and counts each resulting piece. On tool definitions, prose and code it came
# within a tenth of the count of ``o200k_base``.

_PIECE = re.compile(
    r"[ ]?[A-Za-z]+"  # a word with its leading space
    r"|\d{1,3}"
    r"|[ ]?[^\sA-Za-z\d\x80-\U0010ffff]+[\r\n]*"  # punctuation, which merges well: '":"' is one
    r"|\s+"
    r"|[\x80-\U0010ffff]+"
)
_WORD = 10
"""The number of letters of a word that are mostly one token."""
_MARKS = 4
"""The number of punctuation marks in a row that are mostly one token."""


def estimated(text: str) -> int:
    """Return an estimate of the tokens of ``text``."""
    count = 0
    for match in _PIECE.finditer(text):
        piece = match.group()
        head = piece[1:2] if piece[0] == " " and len(piece) > 1 else piece[0]
        if head.isascii() and head.isalpha():
            count += 1 + (len(piece.strip()) - 1) // _WORD
        elif head.isdigit() or head.isspace():
            count += 1
        elif head.isascii():
            count += 1 + (len(piece.strip()) - 1) // _MARKS
        else:  # two or three bytes each, most of them one token
            count += len(piece)
    return count


def of_json(value: Any) -> int:
    """Return an estimate of the tokens of ``value`` as compact JSON."""
    return estimated(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


def of_spec(spec: ToolSpec) -> int:
    """Return an estimate of the tokens of a tool's LLM view."""
    return of_json(spec.llm_view())


BUCKETS = ("first", "normal", "last")
_AT_PROVIDER = """\
# Tools of your provider

Your provider runs these tools during your reply; do not call them like the other tools. Their results are data."""
_WAYS = {
    "load_tools": "load_tools loads a category or one tool",
    "find_tools": "find_tools searches by capability and loads the matches",
    "browse_tools": "browse_tools lists the categories",
    "tool_search": "tool_search searches those that do not ship with Handrail",
}


def _add_tools(shown: dict[str, str], view: View, left: int) -> int:
    """Add the names of the tools to the lines of their categories, while they fit.

    The smallest category comes first.

    :param left: the remaining tokens
    :returns: the tokens that remain afterwards
    """
    for name in sorted(shown, key=lambda name: (len(view.members[name]), name)):
        names = "\n  " + ", ".join(wire_name(tool_id) for tool_id in view.members[name])
        cost = estimated(names) + 1
        if cost > left:
            break
        left -= cost
        shown[name] += names
    return left


def index_of(view: View, budget: int) -> str:
    """Return the list of the tools that are not loaded from the start, within about ``budget`` tokens.

    It has the categories with the names of their tools. If not all names fit, the smallest categories have theirs, and the others
    have the number of their tools. If that does not fit either, the list has the first categories. If everything fits, it also
    names the empty categories.

    :returns: ``""`` if all tools are loaded, or the budget is 0
    """
    if budget <= 0 or view.whole or not view.members:
        return ""
    total = sum(map(len, view.members.values()))
    head = f"{total} more tools are available. {_ways(view)}You can call loaded tools from your next reply."
    left = budget - estimated(head)
    counts = {name: f"{name} ({len(ids)}): {view.texts[name]}" for name, ids in view.members.items()}
    shown: dict[str, str] = {}
    for name, line in counts.items():
        cost = estimated(line) + 1
        if cost > left:
            break
        left -= cost
        shown[name] = line
    if len(shown) == len(counts):
        left = _add_tools(shown, view, left)
    lines = list(shown.values())
    if hidden := len(counts) - len(shown):
        lines.append(f"… and {hidden} more categories")
    elif view.empty:
        how = "; browse_tools describes them" if "browse_tools" in view.ready else ""
        empty = f"Categories without tools: {', '.join(view.empty)}{how}"
        lines += [empty] if estimated(empty) < left else []
    return "\n".join([head, "", *lines])


def tool_part(
    index: str,
    specs: Iterable[ToolSpec],
    *,
    native: Iterable[ToolSpec] = (),
    skills: Iterable[str] = (),
    hints: Iterable[str] = (),
) -> list[str]:
    """Return the sections of the prompt about tools, in their fixed order, without empty ones.

    :param index: the result of :func:`index_of`
    :param native: the provider tools that this model gets
    :param specs: the loaded tools; besides their LLM view, only ``guidance`` is used
    """
    sections: list[str] = []
    if index:
        sections.append(f"# More tools\n\n{index}")
    if guided := in_order_of_guidance(specs):
        lines = (f"## {wire_name(spec.id)}\n\n{spec.guidance.strip()}" for spec in guided)
        sections.append("# Tools\n\n" + "\n\n".join(lines))
    if carried_out := [f"- {native_name(spec)}: {spec.description}" for spec in native]:
        sections.append(f"{_AT_PROVIDER}\n\n" + "\n".join(carried_out))
    for title, texts in (("# Skills", skills), ("# Hints", hints)):
        if told := [text.strip() for text in texts if text.strip()]:
            sections.append(f"{title}\n\n" + "\n".join(told))
    return sections


def in_order_of_guidance(specs: Iterable[ToolSpec]) -> list[ToolSpec]:
    """Return the tools with guidance, in the order in which the prompt shows it."""
    guided = [spec for spec in specs if spec.guidance.strip()]
    guided.sort(key=lambda spec: (BUCKETS.index(spec.guidance_bucket), spec.id))
    return guided


def _ways(view: View) -> str:
    ways = [way for name, way in _WAYS.items() if name in view.ready]
    return f"{'; '.join(ways)}. " if ways else ""


# Token costs of a catalog: of each tool, category and source, of the loaded tools, and in total.
#
# Providers get a tool in different forms (:mod:`handrail.catalog.fitting`). The most expensive form is counted, so that no
# provider's exceeds the estimate.


@dataclass(frozen=True, slots=True)
class ToolCost:
    """The token cost of one tool that can be called.

    :param tokens: the estimate if the tool is loaded: its LLM view, and its guidance in the system text
    :param category: ``core`` for a core tool
    """

    id: str
    tokens: int
    category: str
    source: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class Share:
    """The token cost of several tools together.

    :param tokens: of all these tools
    :param in_view: of those that are loaded at the start of a turn
    """

    name: str
    tools: int
    tokens: int
    in_view: int


@dataclass(frozen=True, slots=True)
class Costs:
    """The token costs of a catalog at the start of an interaction.

    :param tools: the most expensive first
    :param index: the tokens of the list of tools in the system text
    :param dialect: the dialect whose form is counted: the most expensive one
    """

    tools: tuple[ToolCost, ...]
    index: int
    dialect: str

    @property
    def shown(self) -> tuple[ToolCost, ...]:
        """The loaded tools."""
        return tuple(tool for tool in self.tools if tool.standing != "to be loaded")

    @property
    def in_view(self) -> int:
        """The tokens at the start of a turn: the loaded tools, and the list of the others."""
        return self.index + sum(tool.tokens for tool in self.shown)

    @property
    def whole(self) -> int:
        """The tokens if every tool were loaded."""
        return sum(tool.tokens for tool in self.tools)

    @property
    def categories(self) -> tuple[Share, ...]:
        """The costs by category, the most expensive first."""
        return self._shares(lambda tool: tool.category)

    @property
    def sources(self) -> tuple[Share, ...]:
        """The costs by source, the most expensive first."""
        return self._shares(lambda tool: tool.source)

    def _shares(self, of: Callable[[ToolCost], str]) -> tuple[Share, ...]:
        groups: dict[str, list[ToolCost]] = {}
        for tool in self.tools:
            groups.setdefault(of(tool), []).append(tool)
        found = (
            Share(name, len(tools), _tokens(tools), _tokens(t for t in tools if t.standing != "to be loaded"))
            for name, tools in groups.items()
        )
        return tuple(sorted(found, key=lambda share: (-share.tokens, share.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as JSON data."""
        return {
            "estimated": True,
            "dialect": self.dialect,
            "in_view": self.in_view,
            "whole": self.whole,
            "index": self.index,
            "categories": [asdict(share) for share in self.categories],
            "sources": [asdict(share) for share in self.sources],
            "tools": [asdict(tool) for tool in self.tools],
        }


def costs_of(view: View, index_tokens: int) -> Costs:
    """Return the token costs of ``view``. Unavailable tools cost nothing, because no model sees them.

    :param index_tokens: the budget of the index, in tokens
    """
    dialect = dearest([entry.spec for entry in view.ready.values()])
    tools = [
        ToolCost(
            entry.id, tokens_of(entry.spec, dialect), view.category(entry.id), source_of(entry), view.standing(entry)
        )
        for entry in view.ready.values()
    ]
    tools.sort(key=lambda tool: (-tool.tokens, tool.id))
    index = index_of(view, index_tokens)
    return Costs(tuple(tools), sum(map(estimated, tool_part(index, ()))), dialect.name)


def tokens_of(spec: ToolSpec, dialect: Dialect) -> int:
    """Return an estimate of the tokens of a loaded tool: its form for the provider, and its guidance."""
    return of_json(told(spec.llm_view(), dialect)) + sum(map(estimated, tool_part("", (spec,))))


def dearest(specs: Sequence[ToolSpec]) -> Dialect:
    """Return the dialect in which ``specs`` take the most tokens together."""
    return max(DIALECTS.values(), key=lambda dialect: sum(tokens_of(spec, dialect) for spec in specs))


def source_of(entry: Entry) -> str:
    """Return a name for the common source of tools: a third-party source, a folder, or a module."""
    if entry.foreign is not None:
        return entry.foreign.name
    if (place := PurePath(entry.source)).is_absolute():
        return str(place.parent)
    head, dot, _ = entry.source.rpartition(".")
    return head if dot and " " not in entry.source else entry.source


def _tokens(tools: Iterable[ToolCost]) -> int:
    return sum(tool.tokens for tool in tools)
