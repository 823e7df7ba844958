"""What is typed into a terminal, as the rules judge it: into a shell, as a shell's text, as far as that can be told."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from functools import lru_cache

from handrail.arbiter.call import Call, Lane
from handrail.contract.terminals import DEFAULT_COMMAND
from handrail.policy.program_forms import SHELLS
from handrail.policy.shell import Script, parse
from handrail.policy.targets import Target, shown_command
from handrail.runtime.terminals import typed_value

_ENTERS = frozenset(("enter", "ctrl-j", "ctrl-m"))
_UNFINISHED = (
    "it is not a whole line, so nobody can tell what will be run; end it with a newline, or with enter among keys"
)
_ADDED = "something stands in the terminal's line already, with which it is read; press ctrl-c first, or enter what stands there"
_EDITS = "'!', a tab, or '^' at the beginning of a line has an interactive shell put something else in its place"
_FOLDER = "it opens a file by a name that depends on the folder that the terminal's shell is in"


def typed_into(call: Call) -> Target | None:
    """The command that a call types into a shell; None where there is no text, or something else than a shell runs there."""
    arguments = call.arguments
    assert arguments is not None
    text = arguments.get("text")
    if not isinstance(text, str) or not text:
        return None
    shared, terminal_id = call.lane.around.terminals, str(arguments.get("id"))
    terminal = shared.find(terminal_id)
    command = _started_with(call.lane, terminal_id) if terminal is None else terminal.command
    if command is not None and not runs_a_shell(command):
        shared.no_shells.add(terminal_id)
        return None
    open_line = terminal is not None and terminal.line_open
    keys = str(arguments.get("keys", "")).split()
    script = _read(text, whole=text.endswith("\n") or keys[:1] in ([key] for key in _ENTERS), added=open_line)
    return Target("shell.run", typed_value(text, open_line=open_line), shown_command(text), script)


def _started_with(lane: Lane, terminal_id: str) -> str | None:
    """The command of a terminal that is about to be opened; None where there is none."""
    for other in lane.running.values():
        if other.job is not None and other.job.row.id == terminal_id:
            given = (other.arguments or {}).get("command", DEFAULT_COMMAND)
            return given if isinstance(given, str) else None
    return None


def _read(text: str, *, whole: bool, added: bool) -> Script:
    script = parse(text)
    if script.unclear is not None:
        return script
    unclear = (
        _ADDED
        if added
        else _UNFINISHED
        if not whole
        else _EDITS
        if "!" in text or "\t" in text or any(line.startswith("^") for line in text.split("\n"))
        else _FOLDER
        if script.files
        else None
    )
    return script if unclear is None else replace(script, unclear=unclear, files=())


@lru_cache(maxsize=256)
def runs_a_shell(command: str) -> bool:
    """Whether a terminal that was started with this reads commands. Where that is not clear, it does."""
    script = parse(command)
    if script.unclear is not None:
        return True
    return any(posixpath.basename(word) in SHELLS for one in script.commands for word in one.argv)
