"""How rules judge input typed into a terminal: where a shell reads it, as shell text; where that is unknown, by asking."""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import replace
from functools import lru_cache

from handrail.arbiter.calls.call import Call, Lane
from handrail.contract.doors.terminals import DEFAULT_COMMAND, START
from handrail.policy.shell import wrappers
from handrail.policy.shell.forms import SHELLS
from handrail.policy.shell.parse import Command, Script, parse
from handrail.policy.targets import Target, shown_command
from handrail.runtime.terminals import ENTERS, runs_unseen, takes_input, typed_value

_SHELLS = (
    SHELLS
    | {
        "script",
        "screen",
        "tmux",
        "su",
        "sudo",
        "doas",
        "runuser",
        "newgrp",
        "sg",
        "login",
        "unshare",
        "chroot",
        "nsenter",
    }
    | {
        "nix-shell",
        "ssh-agent",
        "asciinema",
        "ttyrec",
        "busybox",
        "toybox",
        "fakeroot",
        "proot",
        "xonsh",
        "nu",
        "elvish",
    }
)
"""And what opens one where it is not told what to run."""
_SETTERS = frozenset(("set", "reset", "tset"))
_STTY_SHOWS = frozenset(("size", "speed", "-a", "--all", "-g", "--save"))
_UNFINISHED = (
    "it is not a whole line, so nobody can tell what will be run; end it with a newline, or with enter among keys"
)
_ADDED = "something stands in the terminal's line already, with which it is read; press ctrl-c first, or enter what stands there"
_TAKEN = (
    "what ran last in the terminal's shell may still be at work and take it, in whole or in part; look with terminal.read whether "
    "the prompt is there again (a shell without line editing, as dash, never shows that)"
)
_EDITS = "'!', a tab, or '^' at the beginning of a line has an interactive shell put something else in its place"
_KEYS = "its keys run, or may run, a line that keys have made, which nobody can read here; type it as text"
_LINES = (
    "a quoted part of it goes on over a line's end, where a program may take the first line, and the shell the next"
)
_AHEAD = (
    "a program of one of its lines may take part of the next ones before the shell reads them; send one line at a time"
)
_SETS = "it changes how the shell or its terminal reads lines"
_FOLDER = "it opens a file by a name that depends on the folder that the terminal's shell is in"


def typed_into(call: Call) -> Target | None:
    """The command that a call types into a shell; None where it runs none, or something else than a shell runs there.
    That a terminal is started in a folder is a command of its own, as it is in a shell: names mean something else there."""
    arguments = call.arguments
    assert arguments is not None
    if call.tool_id == START:
        folder, command = arguments.get("cwd"), str(arguments.get("command", DEFAULT_COMMAND))
        if folder is None:
            return None
        whole = f"cd {shlex.quote(str(folder))} && {command}"
        return Target("shell.run", command, shown_command(whole), parse(whole))
    text, keys = str(arguments.get("text") or ""), str(arguments.get("keys") or "").split()
    shared, terminal_id = call.lane.around.terminals, str(arguments.get("id"))
    terminal = shared.find(terminal_id)
    command = _started_with(call.lane, terminal_id) if terminal is None else terminal.command
    if command is not None and not runs_a_shell(command):
        shared.no_shells.add(terminal_id)
        return None
    open_line = terminal is not None and terminal.line_open
    hidden = runs_unseen(text, keys, open_line)
    if not text and not hidden:
        return None
    whole = text.endswith("\n") or (bool(keys) and keys[0] in ENTERS)
    taken = terminal is not None and terminal.taken
    script = (
        _read(text, whole=whole, added=_ADDED if open_line else _TAKEN if taken else None, hidden=hidden)
        if text
        else Script((), _KEYS)
    )
    shown = shown_command(text or " ".join(keys))
    return Target("shell.run", typed_value(text, open_line=taken or hidden), shown, script)


def typed_from(call: Call) -> tuple[str | None, ...]:
    """The folders in which the shell is that a call types into."""
    terminal = call.lane.around.terminals.find(str((call.arguments or {}).get("id")))
    return () if terminal is None else terminal.process.folders()


def _started_with(lane: Lane, terminal_id: str) -> str | None:
    """The command of a terminal that is about to be opened; None where there is none."""
    for other in lane.running.values():
        if other.job is not None and other.job.row.id == terminal_id:
            given = (other.arguments or {}).get("command", DEFAULT_COMMAND)
            return given if isinstance(given, str) else None
    return None


def _read(text: str, *, whole: bool, added: str | None, hidden: bool) -> Script:
    script = parse(text)
    if script.unclear is not None:
        return script
    unclear = (
        added
        if added
        else _UNFINISHED
        if not whole
        else _KEYS
        if hidden
        else _EDITS
        if "!" in text or "\t" in text or any(line.startswith("^") for line in text.split("\n"))
        else _LINES
        if any("\n" in word for command in script.commands for word in command.argv)
        else _AHEAD
        if takes_input(text.rstrip("\n").rpartition("\n")[0])
        else _SETS
        if any(map(_sets, script.commands))
        else _FOLDER
        if script.files
        else None
    )
    return script if unclear is None else replace(script, unclear=unclear, files=())


def _sets(command: Command) -> bool:
    *_, argv = wrappers.layers(command.argv)
    program = posixpath.basename(argv[0]) if argv else ""
    return program in _SETTERS or (program == "stty" and any(word not in _STTY_SHOWS for word in argv[1:]))


@lru_cache(maxsize=256)
def runs_a_shell(command: str) -> bool:
    """Whether a terminal that was started with this reads commands. Where that is not clear, it does."""
    script = parse(command)
    if script.unclear is not None:
        return True
    return any(posixpath.basename(word) in _SHELLS for one in script.commands for word in one.argv)
