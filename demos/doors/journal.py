"""What happens, as it happens: read from the log and from who holds the workspace, not from what the doors say."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from demos.demonstration import Stuck
from demos.doors.opened import PATIENCE_S, Crew, door_of
from demos.doors.place import BOX, NAMES, TERMINAL, Place
from demos.tour.watching import View
from handrail import LoggedRecord, LogReader, StartError, StateFolders, find_lease_holder, locate_folders

LOOK_S = 0.01
_WIDTH = max(map(len, NAMES.values()))


@dataclass(slots=True)
class Attempt:
    """One call that was to change the file."""

    door: str
    boxes: list[str]
    tool: str
    call_id: str
    ended: int = 0
    """The sequence of the record that tells how it ended."""
    state: str = "proposed"
    kind: str = ""
    """Of its error."""
    why: str = ""


@dataclass(slots=True)
class Held:
    """One process that held the workspace."""

    token: int
    pid: int | None
    door: str
    since_s: float
    until_s: float | None = None
    killed: bool = False


@dataclass(slots=True)
class Journal:
    """Follows one workspace; times are seconds since the beginning."""

    place: Place
    crew: Crew
    view: View
    began: float = field(default_factory=time.monotonic)
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    holders: list[Held] = field(default_factory=list[Held])
    running: set[str] = field(default_factory=set[str])
    """Texts of the commands that have begun and not ended."""
    here: set[str] = field(default_factory=set[str])
    """The sessions that have proposed something."""
    _read: int = 0
    _commands: dict[str, str] = field(default_factory=dict[str, str])
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @staticmethod
    @asynccontextmanager
    async def follow(place: Place, crew: Crew, view: View) -> AsyncGenerator[Journal]:
        """Follow what happens until the block ends, and then to the end of the log."""
        journal = Journal(place, crew, view)
        async with asyncio.TaskGroup() as tasks:  # a fault in following ends what waits for it
            following = tasks.create_task(journal._follow())
            yield journal
            following.cancel()

    @property
    def folders(self) -> StateFolders:
        return locate_folders(self.place.workspace, self.place.state)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def holder(self) -> Held | None:
        """Who holds the workspace now."""
        last = self.holders[-1] if self.holders else None
        return last if last is not None and last.until_s is None else None

    def stands(self, box: str) -> str:
        """How the latest call about a box stands; empty where there is none."""
        return next((a.state for a in reversed(self.attempts.values()) if box in a.boxes), "")

    def latest(self, box: str) -> Attempt:
        """The latest call about a box, of which there is one."""
        return next(a for a in reversed(self.attempts.values()) if box in a.boxes)

    async def until(self, so: Callable[[], bool], what: str) -> None:
        """Wait until something is so.

        :raises Stuck: when it never is
        """
        try:
            async with asyncio.timeout(PATIENCE_S), self._news:
                await self._news.wait_for(so)
        except TimeoutError:
            raise Stuck(f"{what} did not happen within {PATIENCE_S:.0f} s") from None

    def tell(self, door: str, mark: str, text: str, style: str = "") -> None:
        """One line of what happens now."""
        self.view.line(
            (f"   {self.now_s:7.2f} s  ", "dim"), (f"{NAMES[door]:<{_WIDTH}}  ", "bold"), (f"{mark} {text}", style)
        )

    def catch_up(self) -> None:
        """Read what is new."""
        self._look_at_holder()
        database = self.folders.database_file
        if database.exists():
            try:
                with LogReader.open_database(database) as reader:
                    self._read_on(reader)
            except StartError:
                if self._read:
                    raise  # before the first record it is only being made

    async def _follow(self) -> None:
        while True:
            before = (self._read, len(self.holders), self.holder)
            self.catch_up()
            if before != (self._read, len(self.holders), self.holder):
                async with self._news:
                    self._news.notify_all()
            await asyncio.sleep(LOOK_S)

    def _look_at_holder(self) -> None:
        holder, known = find_lease_holder(self.folders), self.holder
        if known is not None and (holder is None or holder.token != known.token):
            known.until_s = self.now_s
        if holder is None or holder.token is None or holder.pid is None:
            return  # nobody, or somebody who is about to say so
        if any(held.token == holder.token for held in self.holders):
            return
        held = Held(holder.token, holder.pid, door_of(holder.pid, self.crew), self.now_s)
        again = "now " if self.holders else ""
        self.holders.append(held)
        self.tell(held.door, "◆", f"holds the workspace {again}(process {held.pid})", "cyan")

    # ── the log ──────────────────────────────────────────────────────────────────────────────────

    def _read_on(self, reader: LogReader) -> None:
        for record in reader.records(since=self._read):
            self._read = record.sequence
            if record.kind == "proposed":
                self._proposed(record)
            elif record.kind == "intended" and record.call_id in self._commands:
                self.running.add(self._commands[record.call_id])
            elif record.kind in ("committed", "rejected", "interrupted"):
                self.running.discard(self._commands.get(record.call_id, ""))
                self._ended(record)
            elif (attempt := self.attempts.get(record.call_id)) is not None:
                self._asked(attempt, record)

    def _proposed(self, record: LoggedRecord) -> None:
        self.here.add(record.session_id)
        arguments = _mapping((record.body or {}).get("arguments"))
        if (command := arguments.get("command")) is not None:
            self._commands[record.call_id] = str(command)
        boxes = BOX.findall(json.dumps({name: arguments.get(name) for name in ("old", "command")}))
        if not boxes:
            return
        door = str(boxes[0]).partition("-")[0]
        self.attempts[record.call_id] = Attempt(door, boxes, record.tool or "", record.call_id)

    def _asked(self, attempt: Attempt, record: LoggedRecord) -> None:
        body = record.body or {}
        if record.kind == "approval-requested":
            attempt.state = "awaiting-approval"
            self.tell(attempt.door, "?", f"{_boxes(attempt)}  waits for a person, as {body.get('approval')}", "yellow")
        elif record.kind == "approval-responded":
            attempt.state = "answered"
            self.tell(TERMINAL, "!", f"answers for {NAMES[attempt.door]}: {body.get('choice')}", "yellow")
        elif record.kind == "authorised":
            attempt.state = "authorised"
        elif record.kind == "intended":
            attempt.state = "running"

    def _ended(self, record: LoggedRecord) -> None:
        attempt = self.attempts.get(record.call_id)
        if attempt is None:
            return
        attempt.ended = record.sequence
        if record.kind == "interrupted":
            attempt.state, attempt.kind, attempt.why = "interrupted", "interrupted", "its outcome is unknown"
        else:
            result = _mapping((record.body or {}).get("result"))
            attempt.state = "landed" if result.get("type") == "output" and _well(result) else "rejected"
            attempt.kind = str(_mapping(result.get("metadata")).get("error_kind") or "")
            attempt.why = str(result.get("error_text") or "")
        if attempt.state == "landed":
            self.tell(attempt.door, "✓", _boxes(attempt), "green")
        else:
            style = "yellow" if attempt.kind == "conflict" else "red"
            self.tell(attempt.door, "✗", f"{_boxes(attempt)}  {attempt.kind}: {attempt.why.partition(';')[0]}", style)


def _boxes(attempt: Attempt) -> str:
    return " ".join(attempt.boxes)


def _well(result: Mapping[str, Any]) -> bool:
    """A command's result says how it ended; that of an edit has no exit code."""
    return _mapping(result.get("data")).get("exit_code", 0) == 0


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
