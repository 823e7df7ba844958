"""How the tour looks: headings, a line per call and what came of it; colours and a spinner on a terminal only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from handrail import Event, Result, TerminalRenderer

if TYPE_CHECKING:
    from demos.tour.facts import Decision, Fact

WIDTH = 100
"""Of plain text, and at most of a terminal: longer lines are hard to read."""
_COLOURS: dict[Decision, str] = {"allowed": "green", "approved": "green", "denied": "red", "withheld": "yellow"}


class View:
    """Writes the tour to one stream, as it happens, with the renderer of the command line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        to = sys.stdout if stream is None else stream
        columns = os.environ.get("COLUMNS", "")
        known = to.isatty() or (columns.isdigit() and int(columns) > 0)
        self.width = max(40, min(TerminalRenderer(to).width if known else WIDTH, WIDTH))
        self._to = TerminalRenderer(to, width=self.width)
        self.plain = not self._to.is_colored
        self._names: list[tuple[str, str]] = []
        self._running: dict[str, str] = {}

    def name(self, folder: str, short: str) -> None:
        """Show ``folder`` as ``short`` from now on. Inner folders are named after outer ones."""
        if (folder, short) not in self._names:
            self._names.insert(0, (folder, short))

    def title(self, text: str, about: str) -> None:
        self.text(text, indent=0, style="bold")
        self.text(about, indent=0, style="dim")

    def heading(self, text: str, about: str = "", number: int | None = None) -> None:
        """A new scene or section."""
        self._write()
        self.text(f"{number}  {text}" if number is not None else text, indent=0, style="bold cyan")
        if about:
            self.text(about, style="dim")

    def said(self, text: str) -> None:
        """What the model said, as Markdown."""
        self.still()
        self._to.print_markdown(f"model: {self._shown(text)}", indent="   ")

    def fact(self, fact: Fact, tool: str, arguments: str) -> None:
        """A call that is answered: tool, arguments, decision, time; who decided; the head of what came of it."""
        decision, ok = fact.decision, fact.result.ok
        took = "" if fact.refused else _duration(float(fact.result.metadata.get("duration_ms", 0)))
        right = "  ".join(part for part in (decision, took) if part)
        left = f"   {'→' if ok else '✗'} {tool}  "
        room = self.width - len(left) - len(right) - 2
        shown = _cut(self._shown(arguments).replace("\n", "\\n"), max(10, room))
        self._write(
            (left, "bold" if ok else "bold red"), (f"{shown:<{max(0, room)}}  ", ""), (right, _COLOURS[decision])
        )
        if fact.why:
            self.text(fact.why, indent=5, style="dim" if ok else "red")
        if fact.lock_wait_ms:
            waited = f"waited {_duration(fact.lock_wait_ms)} for its lock {', '.join(fact.locks)}"
            self.text(waited, indent=5, style="yellow")
        if not fact.refused:
            self.still()
            self._to.print_result(self._named(fact.result), mark="     │ ")

    def block(self, lines: Iterable[str]) -> None:
        """Foreign text, set off and cut at the edge."""
        for line in lines:
            self._write(("     │ ", "dim"), (_cut(self._shown(line).replace("\t", "    "), self.width - 7), ""))

    def diff(self, text: str) -> None:
        """A unified diff."""
        self.still()
        self._to.print_diff(self._shown(text), mark="   ")

    def text(self, text: str, *, indent: int = 3, style: str = "") -> None:
        self.still()
        self._to.print_text((self._shown(text), style), indent=" " * indent)

    def command(self, text: str) -> None:
        """Something to copy, so on a line of its own however long it is."""
        self._write((f"     {text}", "cyan"))

    def checked(self, name: str, there: bool, found: str) -> None:
        """One effect of the tour, looked up."""
        mark = "✓" if there else "✗"
        style = "green" if there else "bold red"
        self.still()
        told = f"{mark} {name}" + ("" if there else f". Instead: {found}")
        self._to.print_text((self._shown(told), style), indent="   ")

    def line(self, *pieces: tuple[str, str]) -> None:
        """One line of pieces with a style each, cut at the edge."""
        left = self.width
        cut: list[tuple[str, str]] = []
        for text, style in pieces:
            shown = _cut(self._shown(text).replace("\n", "\\n"), left) if left > 0 else ""
            cut.append((shown, style))
            left -= len(shown)
        self._write(*cut)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """Rows beneath their heads. What is too long for the terminal is broken between words.

        :param right: the columns of numbers
        """
        self.still()
        self._to.print_table(head, [[self._shown(cell) for cell in row] for row in rows], right=right, indent="   ")

    # ── what is under way ────────────────────────────────────────────────────────────────────────

    def watch(self, event: Event) -> None:
        """Tell, on a terminal, what is running now and what it waits for."""
        if self.plain:
            return
        match event.kind:
            case "proposed":
                self._running[event.call_id] = f"{event.tool_id}: on its way"
            case "awaiting-locks":
                self._running[event.call_id] = f"{event.tool_id}: waits for a lock"
            case "approval-requested":
                self._running[event.call_id] = f"{event.tool_id}: a person is asked"
            case "started":
                self._running[event.call_id] = f"{event.tool_id}: running"
            case "finished":
                self._running.pop(event.call_id, None)
            case _:
                return
        if not self._running:
            self.still()
            return
        self._to.show_status(" · ".join(self._running.values()))

    def still(self) -> None:
        """Nothing is under way any more."""
        self._to.clear_status()

    def _write(self, *pieces: tuple[str, str]) -> None:
        self.still()
        self._to.write_line(*pieces)

    def _shown(self, text: str) -> str:
        """``text`` with long folders by their short names."""
        for folder, name in self._names:
            text = text.replace(folder, name)
        return text

    def _named(self, result: Result) -> Result:
        """The result with long folders by their short names."""
        if not self._names or not result.ok:
            return result
        told = self._shown(json.dumps(result.to_dict(), ensure_ascii=False, default=str))
        return Result.from_dict(json.loads(told))


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
