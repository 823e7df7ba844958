"""Generate the pictures of the command line from its real terminal output.

``python -m tests.terminal_pictures`` draws ``docs/assets/terminal/*.svg`` again. Each picture is the output of a command on a
pseudo-terminal of 80 or 120 columns, with a scripted model. Ids, times, durations and paths are replaced by fixed ones, so
that ``tests/test_terminal_pictures.py`` can compare the pictures with what the commands write now.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import tempfile
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.prefork import command as prefork

from handrail.frontends.cli.text_layout import measure_display_width

FOLDER = Path(__file__).parent.parent / "docs" / "assets" / "terminal"
WIDTHS = (80, 120)
PATIENCE_S = 120

SCRIPT = '''
[[turns]]
text = """I look at the **price list** first."""
usage = { input = 1840, output = 96, cache_read = 1024, cost = 0.0031 }
[[turns.calls]]
name = "read"
arguments = { path = "prices.py" }
[[turns.calls]]
name = "bash"
arguments = { command = "git status && rm -rf reports" }

[[turns]]
text = "Ten pieces are a bulk order already. I change the condition."
usage = { input = 2210, output = 120, cache_read = 1840, cost = 0.0024 }
[[turns.calls]]
name = "edit"
arguments = { path = "prices.py", old = "if pieces > 10:", new = "if pieces >= 10:" }

[[turns]]
text = """
## Done

- `prices.py` now gives the discount from **10 pieces** on.
- I did not remove `reports`, because you rejected it.
"""
usage = { input = 2480, output = 64, cache_read = 2210, cost = 0.0019 }
'''
TWO_REQUESTS = """
[[turns]]
[[turns.calls]]
name = "read"
arguments = { path = "prices.py" }

[[turns]]
[[turns.calls]]
name = "bash"
arguments = { command = "git status && rm -rf reports" }
[[turns.calls]]
name = "edit"
arguments = { path = "prices.py", old = "if pieces > 10:", new = "if pieces >= 10:" }
"""
PRICES = """DISCOUNT = 0.15


def total(pieces, price):
    if pieces > 10:
        return pieces * price * (1 - DISCOUNT)
    return pieces * price
"""
TASK = "The discount should begin at 10 pieces"
_IDS = (
    (re.compile(r"ses_[0-9a-f]{22}"), "ses_01a21f1ae72f29faa5c4e2"),
    (re.compile(r"apr_[0-9a-z]{8}"), "apr_7k2m9x4q"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "2026-03-14 09:26:53"),
    (re.compile(r"(?<=[ m])\d+ ms\b"), "4 ms"),
    (re.compile(r"(?<=[ m])\d+\.\d s\b"), "2.1 s"),
    (re.compile(r"script:\S*s\.toml"), "script:s.toml"),
)
_SGR = re.compile(r"\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """A command on a pseudo-terminal of a given width."""

    def __init__(self, columns: int, command: Sequence[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HANDRAIL_", "XDG_"))}
        for name in ("CI", "NO_COLOR", "COLUMNS", "LINES"):
            kept.pop(name, None)
        environment = {**kept, "TERM": "xterm", "HOME": str(folder), "TZ": "UTC", "INPUTRC": os.devnull}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def answer(self, prompt: str, text: str) -> None:
        """Type a line once ``prompt`` is shown."""
        seen = self.shown.count(prompt)
        while self.shown.count(prompt) <= seen - 1 or not self.shown.rstrip(" ").endswith(prompt.rstrip(" ")):
            if not self._read():
                raise AssertionError(f"it ended without the prompt {prompt!r}:\n{self.shown}")
        os.write(self._master, f"{text}\n".encode())
        before = len(self.shown)
        while "\n" not in self.shown[before:]:
            self._read()

    def end(self) -> str:
        """Read to the end, and return everything that was shown."""
        while self._read():
            pass
        self._process.wait(PATIENCE_S)
        os.close(self._master)
        return self.shown

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
        if not ready:
            raise AssertionError(f"it said nothing for {PATIENCE_S} s:\n{self.shown}")
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def draw_all(columns: int) -> dict[str, str]:
    """Return the pictures of one width by the name of their command."""
    with tempfile.TemporaryDirectory(prefix="handrail-picture-") as name:
        folder = Path(name)
        workspace = folder / "shop"
        workspace.mkdir()
        (workspace / "prices.py").write_text(PRICES)
        (folder / "s.toml").write_text(SCRIPT)
        common = ["-C", "shop", "--state", "state"]
        handrail = [*prefork.handrail()]
        model = ["--model", "script:s.toml"]
        run = Screen(columns, [*handrail, "run", TASK, *model, *common], folder)
        run.answer("> ", "r keep the reports")
        run.answer("> ", "o")
        shown = {"run": f"$ handrail run {TASK!r}\n{run.end()}"}
        shown["log"] = f"$ handrail log\n{Screen(columns, [*handrail, 'log', *common], folder).end()}"
        (workspace / "prices.py").write_text(PRICES)
        (folder / "s.toml").write_text(TWO_REQUESTS)
        subprocess.run(
            [*handrail, "run", TASK, *model, *common],
            cwd=folder,
            env={**os.environ, "CI": "", "HANDRAIL_HEADLESS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,  # it ends with 4: its calls wait for approval
        )
        approve = Screen(columns, [*handrail, "approve", "list", *common], folder)
        shown["approve"] = f"$ handrail approve list\n{approve.end()}"
        (workspace / "prices.py").write_text(PRICES)
        (folder / "s.toml").write_text(SCRIPT)
        chat = Screen(columns, [*handrail, "chat", *model, *common, "--rule", "deny bash rm *"], folder)
        chat.answer("> ", TASK)
        chat.answer("> ", "s")
        chat.answer("> ", "/usage")
        chat.answer("> ", "/exit")
        shown["chat"] = f"$ handrail chat\n{chat.end()}"
    return {name: draw(make_stable(text), columns) for name, text in shown.items()}


def make_stable(text: str) -> str:
    """Return the output with fixed ids, times and paths of the same length."""
    for pattern, fixed in _IDS:
        text = pattern.sub(fixed, text)
    return text


_COLORS = {"31": "#e5534b", "32": "#57ab5a", "33": "#c69026", "34": "#539bf5", "35": "#b083f0", "36": "#39c5cf"}


def draw(text: str, columns: int) -> str:
    """Return an SVG picture of what a terminal shows."""
    lines = [*_styled_lines(text.rstrip("\n"), columns)]
    width, height = columns * 8.4 + 32, len(lines) * 18 + 32
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1c2128"/>',
    ]
    for number, line in enumerate(lines):
        y, x = number * 18 + 30, 16.0
        for piece, style in line:
            cells = measure_display_width(piece)
            if piece.strip():
                body.append(
                    f'<text x="{x:.1f}" y="{y}" textLength="{cells * 8.4:.1f}" xml:space="preserve"{style}>{escape(piece)}</text>'
                )
            x += cells * 8.4
    return "\n".join([*body, "</svg>"]) + "\n"


def _styled_lines(text: str, columns: int) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines of a terminal. Like a terminal, it continues a line that is too long on the next one."""
    codes: set[str] = set()
    for line in text.split("\n"):
        pieces: list[tuple[str, str]] = []
        end = 0
        for found in _SGR.finditer(line):
            pieces.append((line[end : found.start()], _attributes(codes)))
            end = found.end()
            for code in (found[1] or "").split(";") if found[1] is not None else ():
                codes = set() if code in ("", "0") else codes | {code}
        pieces.append((line[end:], _attributes(codes)))
        shown, used = list[tuple[str, str]](), 0
        for piece, style in pieces:
            for character in piece.replace("\r", ""):
                if used + measure_display_width(character) > columns:
                    yield shown
                    shown, used = [], 0
                used += measure_display_width(character)
                if shown and shown[-1][1] == style:
                    shown[-1] = (shown[-1][0] + character, style)
                else:
                    shown.append((character, style))
        yield shown


def _attributes(codes: set[str]) -> str:
    color = next((_COLORS[code] for code in sorted(codes) if code in _COLORS), "#adbac7")
    if "2" in codes:
        color = "#768390"
    extra = ' font-weight="bold"' * ("1" in codes) + ' font-style="italic"' * ("3" in codes)
    return f' fill="{color}"{extra}' + ' text-decoration="underline"' * ("4" in codes)


def pictures() -> dict[Path, str]:
    """Return each picture by its file."""
    return {FOLDER / f"{name}-{columns}.svg": text for columns in WIDTHS for name, text in draw_all(columns).items()}


def main() -> None:
    """Draw all pictures again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
