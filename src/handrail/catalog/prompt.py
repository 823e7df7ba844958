"""The prompt's part on tools: the index of what is not in view, guidance, what the provider has, skills, hints, always in this order.

The same tools give the same bytes, whatever has been brought into view meanwhile, so that providers can cache them.
"""

from __future__ import annotations

from collections.abc import Iterable

from handrail.catalog.tokens import estimated
from handrail.catalog.view import View
from handrail.contract.tool.names import wire_name
from handrail.contract.tool.native import native_name
from handrail.contract.tool.spec import ToolSpec

BUCKETS = ("first", "normal", "last")
_AT_PROVIDER = """\
# Tools of your provider

Your provider carries these out itself, in the middle of a reply; they are not among the tools that are called here. What \
they give is data, like any result."""
_WAYS = {
    "load_tools": "load_tools brings a category, or one tool, into view",
    "find_tools": "find_tools looks for what serves a need and brings it into view",
    "browse_tools": "browse_tools lists the categories",
    "tool_search": "tool_search looks among those that do not ship with Handrail",
}


def index_of(view: View, budget: int) -> str:
    """What there is beside the tools that are in view from the start, within about ``budget`` tokens.

    The names of the tools in each category; where they do not all fit, those of the smallest categories, and of the others
    how many there are; where that does not fit either, the first categories. Where all fit, the empty categories by name. ``""`` where everything is in view, or the
    budget is 0.
    """
    if budget <= 0 or view.whole or not view.members:
        return ""
    total = sum(map(len, view.members.values()))
    head = (
        f"{total} more tools can be called. {_ways(view)}What is brought into view can be used from your next reply on."
    )
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
        for name in sorted(shown, key=lambda name: (len(view.members[name]), name)):
            names = "\n  " + ", ".join(wire_name(tool_id) for tool_id in view.members[name])
            cost = estimated(names) + 1
            if cost > left:
                break
            left -= cost
            shown[name] += names
    lines = list(shown.values())
    if hidden := len(counts) - len(shown):
        lines.append(f"… and {hidden} more categories")
    elif view.empty:
        how = "; browse_tools says what belongs in them" if "browse_tools" in view.ready else ""
        empty = f"Without tools here: {', '.join(view.empty)}{how}"
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
    """The sections, in their fixed order; those without anything in them are left out.

    :param index: as :func:`index_of` makes it
    :param native: what the model's provider carries out itself, and this model is offered
    :param specs: the tools in view; only ``guidance`` is taken from beyond their LLM view
    """
    sections: list[str] = []
    if index:
        sections.append(f"# More tools\n\n{index}")
    guided = [spec for spec in specs if spec.guidance.strip()]
    guided.sort(key=lambda spec: (BUCKETS.index(spec.guidance_bucket), spec.id))
    if guided:
        lines = (f"## {wire_name(spec.id)}\n\n{spec.guidance.strip()}" for spec in guided)
        sections.append("# Tools\n\n" + "\n\n".join(lines))
    if carried_out := [f"- {native_name(spec)}: {spec.description}" for spec in native]:
        sections.append(f"{_AT_PROVIDER}\n\n" + "\n".join(carried_out))
    for title, texts in (("# Skills", skills), ("# Hints", hints)):
        if told := [text.strip() for text in texts if text.strip()]:
            sections.append(f"{title}\n\n" + "\n".join(told))
    return sections


def _ways(view: View) -> str:
    ways = [way for name, way in _WAYS.items() if name in view.ready]
    return f"{'; '.join(ways)}. " if ways else ""
