"""The prompt's sections about tools, and token estimates. The order is index, guidance, provider tools, skills, hints.

The same tools give the same bytes, whatever has been loaded meanwhile, so that providers can cache them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from handrail.catalog.provider_dialects import DIALECTS, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool_view
from handrail.catalog.view import CatalogView, ToolStatus
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.provider_tools import get_provider_tool_name
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import wire_name
from handrail.contract.tool_generation import ToolEntry

# Token estimates of a text.
#
# The estimate is Handrail's own: vocabularies differ between providers and none is available offline. It splits text as
# byte-pair tokenizers do before they merge, and counts each resulting piece. On tool definitions, prose and code it came
# within a tenth of the count of ``o200k_base``.

_PIECE = compile_regex_lazily(
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


def estimate_tokens(text: str) -> int:
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


def estimate_json_tokens(value: Any) -> int:
    return estimate_tokens(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


def estimate_llm_view_tokens(spec: ToolSpec) -> int:
    return estimate_json_tokens(spec.build_llm_view())


GUIDANCE_BUCKETS = ("first", "normal", "last")
_PROVIDER_TOOLS_TEXT = """\
# Tools of your provider

Your provider runs these tools during your reply; do not call them like the other tools. Their results are data."""
_DISCOVERY_HINTS = {
    "load_tools": "load_tools loads a category or one tool",
    "find_tools": "find_tools searches by capability and loads the matches",
    "browse_tools": "browse_tools lists the categories",
    "tool_search": "tool_search searches those that do not ship with Handrail",
}


def _add_tools(shown: dict[str, str], view: CatalogView, left: int) -> int:
    """Add the names of the tools to the lines of their categories, while they fit.

    The smallest category comes first.

    :param left: the remaining tokens
    :returns: the tokens that remain afterwards
    """
    for name in sorted(shown, key=lambda name: (len(view.category_members[name]), name)):
        names = "\n  " + ", ".join(wire_name(tool_id) for tool_id in view.category_members[name])
        cost = estimate_tokens(names) + 1
        if cost > left:
            break
        left -= cost
        shown[name] += names
    return left


def format_unloaded_tool_index(view: CatalogView, budget: int) -> str:
    """Return the list of the tools that are not loaded from the start, within about ``budget`` tokens.

    It has the categories with the names of their tools. If not all names fit, the smallest categories have theirs, and the others
    have the number of their tools. If that does not fit either, the list has the first categories. If everything fits, it also
    names the empty categories.

    :returns: ``""`` if all tools are loaded, or the budget is 0
    """
    if budget <= 0 or view.is_fully_active or not view.category_members:
        return ""
    total = sum(map(len, view.category_members.values()))
    head = f"{total} more tools are available. {_discovery_hints(view)}You can call loaded tools from your next reply."
    left = budget - estimate_tokens(head)
    counts = {name: f"{name} ({len(ids)}): {view.category_texts[name]}" for name, ids in view.category_members.items()}
    shown: dict[str, str] = {}
    for name, line in counts.items():
        cost = estimate_tokens(line) + 1
        if cost > left:
            break
        left -= cost
        shown[name] = line
    if len(shown) == len(counts):
        left = _add_tools(shown, view, left)
    lines = list(shown.values())
    if hidden := len(counts) - len(shown):
        lines.append(f"… and {hidden} more categories")
    elif view.empty_categories:
        how = "; browse_tools describes them" if "browse_tools" in view.available_tools else ""
        empty = f"Categories without tools: {', '.join(view.empty_categories)}{how}"
        lines += [empty] if estimate_tokens(empty) < left else []
    return "\n".join([head, "", *lines])


def build_tool_prompt_sections(
    index: str,
    specs: Iterable[ToolSpec],
    *,
    native: Iterable[ToolSpec] = (),
    skills: Iterable[str] = (),
    hints: Iterable[str] = (),
) -> list[str]:
    """Return the sections of the prompt about tools, in their fixed order, without empty ones.

    :param index: the result of :func:`format_unloaded_tool_index`
    :param native: the provider tools that this model gets
    :param specs: the loaded tools; besides their LLM view, only ``guidance`` is used
    """
    sections: list[str] = []
    if index:
        sections.append(f"# More tools\n\n{index}")
    if guided := list_tools_with_guidance(specs):
        lines = (f"## {wire_name(spec.id)}\n\n{spec.guidance.strip()}" for spec in guided)
        sections.append("# Tools\n\n" + "\n\n".join(lines))
    if carried_out := [f"- {get_provider_tool_name(spec)}: {spec.description}" for spec in native]:
        sections.append(f"{_PROVIDER_TOOLS_TEXT}\n\n" + "\n".join(carried_out))
    for title, texts in (("# Skills", skills), ("# Hints", hints)):
        if items := [text.strip() for text in texts if text.strip()]:
            sections.append(f"{title}\n\n" + "\n".join(items))
    return sections


def list_tools_with_guidance(specs: Iterable[ToolSpec]) -> list[ToolSpec]:
    """Return the tools with guidance, in the order in which the prompt shows it."""
    guided = [spec for spec in specs if spec.guidance.strip()]
    guided.sort(key=lambda spec: (GUIDANCE_BUCKETS.index(spec.guidance_order), spec.id))
    return guided


def _discovery_hints(view: CatalogView) -> str:
    ways = [way for name, way in _DISCOVERY_HINTS.items() if name in view.available_tools]
    return f"{'; '.join(ways)}. " if ways else ""


# Token costs of a catalog: of each tool, category and source, of the loaded tools, and in total.
#
# Providers get a tool in different forms (:mod:`handrail.catalog.schema_adapter`). The most expensive form is counted, so that no
# provider's exceeds the estimate.


class ToolTokenCost(Struct, frozen=True):
    """The token cost of one tool that can be called.

    :param tokens: the estimate if the tool is loaded: its LLM view, and its guidance in the system text
    :param category: ``core`` for a core tool
    """

    id: str
    tokens: int
    category: str
    source: str
    standing: ToolStatus


class GroupTokenCost(Struct, frozen=True):
    """The token cost of several tools together.

    :param tokens: of all these tools
    :param in_view: of those that are loaded at the start of a turn
    """

    name: str
    tools: int
    tokens: int
    in_view: int


class CatalogTokenCosts(Struct, frozen=True):
    """The token costs of a catalog at the start of an interaction.

    :param tools: the most expensive first
    :param index_tokens: the tokens of the list of tools in the system text
    :param dialect: the dialect whose form is counted: the most expensive one
    """

    tools: tuple[ToolTokenCost, ...]
    index_tokens: int
    dialect: str

    @property
    def active_tools(self) -> tuple[ToolTokenCost, ...]:
        return tuple(tool for tool in self.tools if tool.standing != "deferred")

    @property
    def active_tokens(self) -> int:
        """The tokens at the start of a turn: the loaded tools, and the list of the others."""
        return self.index_tokens + sum(tool.tokens for tool in self.active_tools)

    @property
    def total_tokens(self) -> int:
        """The tokens if every tool were loaded."""
        return sum(tool.tokens for tool in self.tools)

    @property
    def costs_by_category(self) -> tuple[GroupTokenCost, ...]:
        """The costs by category, the most expensive first."""
        return self._shares(lambda tool: tool.category)

    @property
    def costs_by_source(self) -> tuple[GroupTokenCost, ...]:
        """The costs by source, the most expensive first."""
        return self._shares(lambda tool: tool.source)

    def _shares(self, of: Callable[[ToolTokenCost], str]) -> tuple[GroupTokenCost, ...]:
        groups: dict[str, list[ToolTokenCost]] = {}
        for tool in self.tools:
            groups.setdefault(of(tool), []).append(tool)
        found = (
            GroupTokenCost(name, len(tools), _tokens(tools), _tokens(t for t in tools if t.standing != "deferred"))
            for name, tools in groups.items()
        )
        return tuple(sorted(found, key=lambda share: (-share.tokens, share.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as JSON data."""
        return {
            "estimated": True,
            "dialect": self.dialect,
            "in_view": self.active_tokens,
            "whole": self.total_tokens,
            "index": self.index_tokens,
            "categories": [asdict(share) for share in self.costs_by_category],
            "sources": [asdict(share) for share in self.costs_by_source],
            "tools": [asdict(tool) for tool in self.tools],
        }


def compute_token_costs(view: CatalogView, index_tokens: int) -> CatalogTokenCosts:
    """Return the token costs of ``view``. Unavailable tools cost nothing, because no model sees them.

    :param index_tokens: the budget of the index, in tokens
    """
    dialect = find_costliest_dialect([entry.spec for entry in view.available_tools.values()])
    tools = [
        ToolTokenCost(
            entry.id,
            estimate_loaded_tool_tokens(entry.spec, dialect),
            view.find_category_by_tool_id(entry.id),
            derive_source_group_name(entry),
            view.get_tool_status(entry),
        )
        for entry in view.available_tools.values()
    ]
    tools.sort(key=lambda tool: (-tool.tokens, tool.id))
    index = format_unloaded_tool_index(view, index_tokens)
    return CatalogTokenCosts(
        tuple(tools), sum(map(estimate_tokens, build_tool_prompt_sections(index, ()))), dialect.name
    )


def estimate_loaded_tool_tokens(spec: ToolSpec, dialect: ProviderSchemaDialect) -> int:
    """Return an estimate of the tokens of a loaded tool: its form for the provider, and its guidance."""
    return estimate_json_tokens(adapt_tool_view(spec.build_llm_view(), dialect)) + sum(
        map(estimate_tokens, build_tool_prompt_sections("", (spec,)))
    )


def find_costliest_dialect(specs: Sequence[ToolSpec]) -> ProviderSchemaDialect:
    """Return the dialect in which ``specs`` take the most tokens together."""
    return max(DIALECTS.values(), key=lambda dialect: sum(estimate_loaded_tool_tokens(spec, dialect) for spec in specs))


def derive_source_group_name(entry: ToolEntry) -> str:
    """Return a name for the common source of tools: a third-party source, a folder, or a module."""
    if entry.third_party is not None:
        return entry.third_party.name
    if (place := PurePath(entry.source)).is_absolute():
        return str(place.parent)
    head, dot, _ = entry.source.rpartition(".")
    return head if dot and " " not in entry.source else entry.source


def _tokens(tools: Iterable[ToolTokenCost]) -> int:
    return sum(tool.tokens for tool in tools)
