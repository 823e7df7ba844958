"""About how many tokens a catalog costs: each tool, each category, each source, what of it is in view, and in all.

Providers are given one tool in forms of their own (:mod:`handrail.catalog.forms.fitting`); what is counted is the form in which
it takes the most, so that no provider's takes more than is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from handrail.catalog.forms.dialects import DIALECTS, Dialect
from handrail.catalog.forms.fitting import told
from handrail.catalog.prompt import index_of, tool_part
from handrail.catalog.tokens import estimated, of_json
from handrail.catalog.view import Standing, View
from handrail.contract.generation import Entry
from handrail.contract.tool.spec import ToolSpec


@dataclass(frozen=True, slots=True)
class ToolCost:
    """One tool that can be called.

    :param tokens: what it takes where it is in view: its LLM view, and its guidance in the system text
    :param category: ``core`` for a core tool
    """

    id: str
    tokens: int
    category: str
    source: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class Share:
    """Several tools together.

    :param tokens: of all of them
    :param in_view: of those that are in view at the start of a turn
    """

    name: str
    tools: int
    tokens: int
    in_view: int


@dataclass(frozen=True, slots=True)
class Costs:
    """A catalog's, at the start of an interaction.

    :param tools: the dearest first
    :param index: what the list of names in the system text takes
    :param dialect: whose form of the tools is counted: of all providers, who is given the most
    """

    tools: tuple[ToolCost, ...]
    index: int
    dialect: str

    @property
    def shown(self) -> tuple[ToolCost, ...]:
        """Those in view."""
        return tuple(tool for tool in self.tools if tool.standing != "to be loaded")

    @property
    def in_view(self) -> int:
        """What a turn begins with: the tools in view, and the index of the others."""
        return self.index + sum(tool.tokens for tool in self.shown)

    @property
    def whole(self) -> int:
        """What it would be with every tool in view."""
        return sum(tool.tokens for tool in self.tools)

    @property
    def categories(self) -> tuple[Share, ...]:
        """The dearest first."""
        return self._shares(lambda tool: tool.category)

    @property
    def sources(self) -> tuple[Share, ...]:
        """The dearest first."""
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
        """As JSON-able data."""
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
    """What ``view`` costs. Withheld tools, which no model is told of, cost nothing.

    :param index_tokens: about how many tokens the index may take
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
    """About how many tokens a tool takes where it is in view: what the provider is told of it, and its guidance."""
    return of_json(told(spec.llm_view(), dialect)) + sum(map(estimated, tool_part("", (spec,))))


def dearest(specs: Sequence[ToolSpec]) -> Dialect:
    """The dialect in which ``specs`` take the most tokens together."""
    return max(DIALECTS.values(), key=lambda dialect: sum(tokens_of(spec, dialect) for spec in specs))


def source_of(entry: Entry) -> str:
    """Where ``entry`` comes from, together with the others from there: a foreign source by its name, a folder, a module."""
    if entry.foreign is not None:
        return entry.foreign.name
    if (place := PurePath(entry.source)).is_absolute():
        return str(place.parent)
    head, dot, _ = entry.source.rpartition(".")
    return head if dot and " " not in entry.source else entry.source


def _tokens(tools: Iterable[ToolCost]) -> int:
    return sum(tool.tokens for tool in tools)
