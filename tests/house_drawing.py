"""Generate ``docs/house.svg``: the packages in their layers, drawn from their imports.

:mod:`tests.conformance` writes it and compares it, so the drawing shows the imports that there are.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

from tests.test_house import SOURCE, arrows

DRAWING = Path(__file__).parent.parent / "docs" / "house.svg"
_WIDTH, _LEFT, _ROOM, _HIGH, _GAP, _TOP = 1120, 52, 252, 78, 34, 84
_STYLE = (
    ".bg{fill:#fff}.box{fill:#f6f8fa;stroke:#d0d7de}.t{fill:#1f2328;font-weight:600;font-size:15px}"
    ".d{fill:#59636e;font-size:11.5px}.h{fill:#1f2328;font-size:17px;font-weight:700}.l{stroke:#8c959f;stroke-opacity:.55}"
    ".n{fill:#0969da;font-size:15px;font-weight:700}"
    "@media(prefers-color-scheme:dark){.bg{fill:#0d1117}.box{fill:#161b22;stroke:#30363d}.t,.h{fill:#e6edf3}.d{fill:#9198a1}}"
)


def rooms() -> dict[str, frozenset[str]]:
    """Each room, and the rooms that its files import."""
    found: dict[str, set[str]] = {path.parent.name: set() for path in SOURCE.glob("*/__init__.py")}
    for module, imported in arrows().items():
        parts = module.split(".")
        if len(parts) > 1 and parts[1] in found:
            found[parts[1]] |= {one.split(".")[1] for one in imported if one.count(".")} - {parts[1]}
    return {room: frozenset(below & found.keys()) for room, below in found.items()}


def floors(of: dict[str, frozenset[str]]) -> list[list[str]]:
    """The rooms, the lowest floor first: each is one above the highest that it imports."""

    @cache
    def floor(room: str) -> int:
        return max((floor(below) + 1 for below in of[room]), default=0)

    found: list[list[str]] = [[] for _ in range(max(map(floor, of)) + 1)]
    for room in sorted(of):
        found[floor(room)].append(room)
    return found


def question(room: str) -> str:
    """The first sentence that the room says of itself."""
    return (SOURCE / room / "__init__.py").read_text(encoding="utf-8").split('"""')[1].partition("?")[0].replace(
        "*", ""
    ).strip() + "?"


def render() -> str:
    of = rooms()
    levels = floors(of)
    height = _TOP + len(levels) * (_HIGH + _GAP)
    places: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(reversed(levels)):
        room_gap = (_WIDTH - _LEFT - len(level) * _ROOM) / (len(level) + 1)
        for at, room in enumerate(level):
            places[room] = (_LEFT + room_gap * (at + 1) + _ROOM * at, _TOP + number * (_HIGH + _GAP))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="ui-sans-serif,system-ui,Segoe UI,Helvetica,Arial,sans-serif" '
        f'aria-label="The rooms of Handrail on {len(levels)} floors; each imports from those below it only">',
        f"<style>{_STYLE}</style>",
        f'<rect class="bg" width="{_WIDTH}" height="{height}" rx="10"/>',
        f'<text class="h" x="40" y="34">The rooms of Handrail, on {len(levels)} floors</text>',
        '<text class="d" x="40" y="56">A room imports from the floors below it only. A line that other lines imply is left '
        "out.</text>",
    ]
    for room in sorted(of):
        x, y = places[room]
        for below in sorted(of[room]):
            if any(below in _reached(of, other) for other in of[room] - {below}):
                continue
            x2, y2 = places[below]
            lines.append(f'<path class="l" d="M{x + _ROOM / 2:.0f} {y + _HIGH:.0f}L{x2 + _ROOM / 2:.0f} {y2:.0f}"/>')
    for number, level in enumerate(reversed(levels)):
        y = _TOP + number * (_HIGH + _GAP)
        lines.append(f'<text class="n" x="18" y="{y + _HIGH / 2 + 5:.0f}">{len(levels) - number}</text>')
        for room in level:
            lines += _box(room, *places[room])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _reached(of: dict[str, frozenset[str]], room: str) -> set[str]:
    return {below for one in of[room] for below in (one, *_reached(of, one))}


def _box(room: str, x: float, y: float) -> list[str]:
    asked = question(room).split()
    first: list[str] = []
    while asked and len(" ".join([*first, asked[0]])) <= 34:
        first.append(asked.pop(0))
    texts = [" ".join(first), " ".join(asked)]
    return [
        f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{_ROOM}" height="{_HIGH}" rx="8"/>',
        f'<text class="t" x="{x + 14:.0f}" y="{y + 25:.0f}">{escape(room)}/</text>',
        *(
            f'<text class="d" x="{x + 14:.0f}" y="{y + 45 + 16 * row:.0f}">{escape(text)}</text>'
            for row, text in enumerate(texts)
            if text
        ),
    ]
