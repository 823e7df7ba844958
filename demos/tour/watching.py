"""How the tour looks: headings, a line per call and what came of it; colours and a spinner on a terminal only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO, cast

from demos.demonstration import visible
from handrail import Event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from demos.tour.facts import Decision, Fact

WIDTH = 100
"""Of plain text, and at most of a terminal: longer lines are hard to read."""
HEAD = 6
"""Lines of a result that are shown."""
_COLOURS: dict[Decision, str] = {"allowed": "green", "approved": "green", "denied": "red", "withheld": "yellow"}
_ASCII = str.maketrans({"→": ">", "✗": "x", "✓": "+", "│": "|", "…": "~", "◆": "*", "·": "-"})
"""For a stream that cannot take the others; one character each, so that nothing is moved."""
_DIFF = {"+": "green", "-": "red", "@": "cyan"}


class View:
    """Writes the tour to one stream, as it happens."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console

        to = sys.stdout if stream is None else stream
        self.plain = not to.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        shown: dict[str, Any] = {"file": to, "highlight": False, "markup": False, "emoji": False}
        if self.plain:
            shown |= {"force_terminal": False, "color_system": None, "legacy_windows": False}
        self._ascii = (to.encoding or "").lower().replace("-", "") != "utf8"
        self._console: Console = Console(**shown)
        columns = os.environ.get("COLUMNS", "")
        known = self._console.width if to.isatty() else int(columns) if columns.isdigit() else WIDTH
        self.width = max(40, min(known, WIDTH))
        self._names: list[tuple[str, str]] = []
        self._status: Status | None = None
        self._running: dict[str, str] = {}

    def name(self, folder: str, short: str) -> None:
        """Show ``folder`` as ``short`` from now on. Inner folders are named after outer ones."""
        if (folder, short) not in self._names:
            self._names.insert(0, (folder, short))

    def title(self, text: str, about: str) -> None:
        self._line(text, style="bold")
        self._line(about, style="dim")

    def heading(self, text: str, about: str = "", number: int | None = None) -> None:
        """A new scene or section."""
        self._console.print()
        self._line(f"{number}  {text}" if number is not None else text, style="bold cyan")
        if about:
            self._line(about, indent=3, style="dim")

    def said(self, text: str) -> None:
        """What the model said."""
        self._line(f"model: {text}", indent=3, style="italic")

    def fact(self, fact: Fact, tool: str, arguments: str) -> None:
        """A call that is answered: tool, arguments, decision, time; who decided; the head of what came of it."""
        decision, ok = fact.decision, fact.result.ok
        took = "" if fact.refused else _duration(float(fact.result.metadata.get("duration_ms", 0)))
        right = "  ".join(part for part in (decision, took) if part)
        left = f"   {'→' if ok else '✗'} {tool}  "
        room = self.width - len(left) - len(right) - 2
        shown = _cut(self._shown(arguments).replace("\n", "\\n"), max(10, room))
        self._pieces(
            (left, "bold" if ok else "bold red"), (f"{shown:<{max(0, room)}}  ", ""), (right, _COLOURS[decision])
        )
        if fact.why:
            self._line(fact.why, indent=5, style="dim" if ok else "red")
        if fact.lock_wait_ms:
            self._line(
                f"waited {_duration(fact.lock_wait_ms)} for its lock {', '.join(fact.locks)}", indent=5, style="yellow"
            )
        if not fact.refused:
            self.block(head_of(fact))

    def block(self, lines: Iterable[str]) -> None:
        """Foreign text, set off and cut at the edge."""
        for line in lines:
            self._pieces(("     │ " + _cut(self._shown(line).replace("\t", "    "), self.width - 7), ""))

    def diff(self, text: str) -> None:
        """A unified diff."""
        for line in visible(text).splitlines():
            meta = line.startswith(("diff ", "index ", "--- ", "+++ "))
            self._pieces((f"   {line}", "bold" if meta else _DIFF.get(line[:1], "")))

    def text(self, text: str, *, indent: int = 3, style: str = "") -> None:
        self._line(text, indent=indent, style=style)

    def command(self, text: str) -> None:
        """Something to copy, so on a line of its own however long it is."""
        self._pieces((f"     {visible(text)}", "cyan"))

    def checked(self, name: str, there: bool, found: str) -> None:
        """One effect of the tour, looked up."""
        mark = "✓" if there else "✗"
        self._line(
            f"{mark} {name}" + ("" if there else f". Instead: {found}"),
            indent=3,
            style="green" if there else "bold red",
        )

    def line(self, *pieces: tuple[str, str]) -> None:
        """One line of pieces with a style each, cut at the edge."""
        left = self.width
        cut: list[tuple[str, str]] = []
        for text, style in pieces:
            shown = _cut(self._shown(text).replace("\n", "\\n"), left) if left > 0 else ""
            cut.append((shown, style))
            left -= len(shown)
        self._pieces(*cut)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """Rows beneath their heads. What is too long for the terminal is broken between words.

        :param right: the columns of numbers
        """
        from rich import box
        from rich.padding import Padding
        from rich.table import Table

        table = Table(box=box.ASCII if self._ascii else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number in right else "left", overflow="fold")
        for row in rows:
            told = [self._shown(entry) for entry in row]
            table.add_row(*(entry.translate(_ASCII) if self._ascii else entry for entry in told))
        self.still()
        self._console.print(Padding(table, (0, 0, 0, 2)), width=self.width)

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
        told = visible(" · ".join(self._running.values()))
        if self._status is None:
            self._status = self._console.status(told)
            self._status.start()
        else:
            self._status.update(told)

    def still(self) -> None:
        """Nothing is under way any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _line(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """Text in lines of its own, broken between words; what is one long word is left whole, to be copied."""
        for given in self._shown(text).split("\n"):
            for line in wrap(given, self.width - indent, break_long_words=False, break_on_hyphens=False) or [""]:
                self._pieces((" " * indent + line, style))

    def _shown(self, text: str) -> str:
        """``text`` without what could act on the terminal, long folders by their short names."""
        for folder, name in self._names:
            text = text.replace(folder, name)
        return visible(text)

    def _pieces(self, *pieces: tuple[str, str]) -> None:
        from rich.text import Text

        self.still()
        line = Text(no_wrap=True, overflow="ignore")
        for text, style in pieces:
            line.append(text.translate(_ASCII) if self._ascii else text, style="" if self.plain else style)
        line.rstrip()
        self._console.print(line, soft_wrap=True)


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def head_of(fact: Fact) -> list[str]:
    """The beginning of a result, by what it is."""
    data: object = fact.result.data
    if not fact.result.ok:
        return [f"{fact.result.error_kind}: {fact.result.error_text}"]
    if not isinstance(data, dict):
        return _first(str(data).splitlines())
    members = cast("dict[str, Any]", data)
    if (changes := members.get("diff", members.get("patch"))) is not None:
        around = ("diff ", "index ", "---", "+++", "@@", " ")
        return [line for line in str(changes).splitlines() if not line.startswith(around)]
    if "exit_code" in members:
        output = [line for line in str(members["output"]).splitlines() if line.strip(" -=")]
        told = _last(output) if members["exit_code"] else _first(output)
        return [f"exit code {members['exit_code']}", *told]
    entries = members.get("paths") or members.get("matches") or members.get("head")
    if isinstance(entries, list):
        return [*_first([_entry(one) for one in cast("list[Any]", entries)]), *_cut_note(fact)]
    if "text" in members:
        return _first(str(members["text"]).splitlines())
    return [json.dumps(members, ensure_ascii=False, default=str)]


def _cut_note(fact: Fact) -> list[str]:
    metadata = fact.result.metadata
    if not metadata.get("truncated"):
        return []
    return [
        f"[truncated: {metadata.get('omitted_entries')} of {metadata.get('entries')} are not in the result; all are in",
        f" {metadata.get('output_path')}]",
    ]


def _entry(entry: Any) -> str:
    if isinstance(entry, dict) and "text" in entry:
        match = cast("dict[str, Any]", entry)
        return f"{match.get('path')}:{match.get('line')}: {match['text']}"
    return entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False, default=str)


def _first(lines: Sequence[str]) -> list[str]:
    return list(lines) if len(lines) <= HEAD else [*lines[: HEAD - 2], f"… {len(lines) - HEAD + 2} more"]


def _last(lines: Sequence[str]) -> list[str]:
    return list(lines) if len(lines) <= HEAD else [f"… {len(lines) - HEAD + 1} before", *lines[1 - HEAD :]]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
