"""The repository with its checklist, what each door is to tick there, and the scripts that the agents play."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demos.demonstration import git, put

ONE, TWO, EDITOR, TERMINAL = "one", "two", "editor", "terminal"
NAMES: Mapping[str, str] = {
    ONE: "agent one",
    TWO: "agent two",
    EDITOR: "the editor",
    TERMINAL: "the terminal",
}
BOARD = "BOARD.md"
BOX = re.compile(r"\b(?:one|two|editor|terminal)-[0-9]+\b")

EDIT = f"allow edit {BOARD}"
ASK_RULES = ("ask bash ./tick …",)
HOLD_RULES = ("allow bash ./wait-for-all", "allow bash ./tick-slowly *")
WAIT = "./wait-for-all"

_TICK = """#!/bin/sh
# Tick boxes of the checklist.
for box; do sed -i "s/^- \\[ \\] $box\\$/- [x] $box/" BOARD.md; done
"""
_TICK_SLOWLY = """#!/bin/sh
# Tick the first box, be at it for as long as nobody says go on, and tick the second.
./tick "$1"
echo "ticked $1" > .signals/half
read -r _ < .signals/rest
./tick "$2"
"""
_WAIT_FOR_ALL = """#!/bin/sh
# End when the others are here.
read -r _ < .signals/begin
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Everything lies beneath :attr:`folder`: nothing of the user's is read or written.

    :param edits: how many boxes an agent and the editor tick with the ``edit`` tool
    """

    folder: Path
    edits: int

    @property
    def workspace(self) -> Path:
        return self.folder / "project"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def config(self) -> Path:
        return self.folder / "config" / "handrail.toml"

    @property
    def board(self) -> Path:
        return self.workspace / BOARD

    @property
    def common(self) -> list[str]:
        """The options that every door is started with."""
        places = {"--workspace": self.workspace, "--state": self.state, "--config": self.config}
        return [word for option, path in places.items() for word in (option, str(path))]

    def signal(self, name: str) -> int:
        """A named pipe that the scripts of the repository wait at, open for both ways so that nobody blocks."""
        return os.open(self.workspace / ".signals" / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def of(self, door: str) -> list[str]:
        """The boxes that a door is to tick, in order."""
        return [f"{door}-{number}" for number in range(1, self._boxes(door) + 1)]

    def edited(self, door: str) -> list[str]:
        """Those of them that it ticks with ``edit``."""
        return self.of(door)[: self.edits]

    @property
    def slow(self) -> list[str]:
        """The two boxes of the call in the middle of which the holder is killed."""
        return self.of(ONE)[-2:]

    @property
    def asked(self) -> str:
        """The box of agent two that waits for a person."""
        return self.of(TWO)[-1]

    @property
    def boxes(self) -> list[str]:
        return [box for door in NAMES for box in self.of(door)]

    def _boxes(self, door: str) -> int:
        return {ONE: self.edits + 2, TWO: self.edits + 1, EDITOR: self.edits, TERMINAL: 2}[door]

    def text(self, ticked: Sequence[str]) -> str:
        """What the checklist says when exactly these boxes are ticked."""
        return _board({box: box in ticked for box in self.boxes})


def make(folder: Path, edits: int) -> Place:
    """Make the repository, the configuration and the scripts beneath ``folder``.

    :raises StartError: where there is no git
    """
    place = Place(folder, edits)
    put(place.board, place.text(()))
    for name, text in (("tick", _TICK), ("tick-slowly", _TICK_SLOWLY), ("wait-for-all", _WAIT_FOR_ALL)):
        put(place.workspace / name, text)
        (place.workspace / name).chmod(0o755)
    put(place.workspace / ".gitignore", ".signals/\n")
    (place.workspace / ".signals").mkdir()
    for name in ("begin", "half", "rest"):
        os.mkfifo(place.workspace / ".signals" / name)
    git(place.workspace, "init", "--quiet")
    git(place.workspace, "add", "--all")
    git(place.workspace, "commit", "--quiet", "--message", "A checklist")
    put(place.config, f"rules = {json.dumps(ASK_RULES, ensure_ascii=False)}\n")
    place.config.parent.chmod(0o700)
    for name, turns in _scripts(place).items():
        put(script(place, name), json.dumps({"version": 1, "turns": turns}, indent=1))
    return place


def script(place: Place, name: str) -> Path:
    return place.folder / "scripts" / f"{name}.json"


def ticking(box: str) -> dict[str, str]:
    """The arguments of ``edit`` that tick a box."""
    return {"path": BOARD, "old": f"- [ ] {box}\n", "new": f"- [x] {box}\n"}


def command(*words: str) -> dict[str, str]:
    """The arguments of ``bash``."""
    return {"command": " ".join(words)}


def _scripts(place: Place) -> dict[str, list[dict[str, Any]]]:
    """What the two agents say: each edit beside a read of its own in one reply, since others change the file too."""
    end = {"text": "That is all."}
    return {
        ONE: [
            _turn("I wait until everybody is here.", ("bash", command(WAIT))),
            *_edits(place, ONE),
            _turn("Two more, which takes a while.", ("bash", command("./tick-slowly", *place.slow))),
            end,
        ],
        TWO: [
            *_edits(place, TWO),
            _turn("The last one, with the project's script.", ("bash", command("./tick", place.asked))),
            end,
        ],
        "two-again": [end],
    }


def _edits(place: Place, door: str) -> list[dict[str, Any]]:
    return [_turn(f"{box}.", ("read", {"path": BOARD}), ("edit", ticking(box))) for box in place.edited(door)]


def _turn(text: str, *calls: tuple[str, dict[str, str]]) -> dict[str, Any]:
    return {"text": text, "calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}


def _board(ticked: Mapping[str, bool]) -> str:
    lines = ["# Before the release"]
    door = ""
    for box, done in ticked.items():
        if box.partition("-")[0] != door:
            door = box.partition("-")[0]
            lines += ["", f"## {NAMES[door]}", ""]
        lines.append(f"- [{'x' if done else ' '}] {box}")
    return "\n".join(lines) + "\n"
