"""The way through the show: open the doors, let them edit, kill the one that holds, look everything up, conclude."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress

from demos.demonstration import ERROR, OUTPUT, Interruption, Stuck, own_folder
from demos.doors import accounts, place
from demos.doors.accounts import Account
from demos.doors.journal import Journal
from demos.doors.opened import (
    AGAIN,
    PATIENCE_S,
    PROMPT,
    TRIES,
    YES,
    AgentDoor,
    Crew,
    EditorDoor,
    Heard,
    TerminalDoor,
)
from demos.doors.place import EDIT, EDITOR, HOLD_RULES, NAMES, ONE, TERMINAL, TWO, WAIT, Place
from demos.tour.effects import Effect, missing
from demos.tour.guide import program
from demos.tour.watching import View
from handrail import HandrailError, LogReader, LogVerification, StartError, verify_log
from handrail.sandbox import probe_tier

LAST = 2
"""Edits that the editor leaves for after the kill."""


async def shown(_interruption: Interruption, *, edits: int, keep: bool) -> int:
    """Give the show. Its exit code.

    :param edits: how many each door makes, about
    :raises StartError: where it cannot begin
    :raises Stuck: where it does not go on
    """
    tier = probe_tier()
    if not tier.is_confining:
        raise StartError(f"this machine cannot confine programs: {tier.detail}. Remedy: {tier.remedy}")
    view = View()
    with own_folder("handrail-doors-", keep=keep) as folder:
        there = place.make(folder, edits)
        _welcome(view, there)
        crew = Crew(there)
        try:
            async with Journal.follow(there, crew, view) as journal:
                heard = await _play(view, journal, crew)
        except BaseExceptionGroup as group:  # whatever was first is what went wrong
            raise _stuck(_first(group), crew) from group
        finally:
            await crew.end()
        journal.catch_up()
        with LogReader.open_database(journal.folders.database_file) as reader:
            verification = verify_log(reader)
            made = accounts.of(there, journal)
            found = accounts.effects(there, journal, made, heard, reader, verification)
        _conclude(view, journal, made, found, verification)
        if keep:
            _kept(view, there, verification)
    return ERROR if missing(found) else OUTPUT


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error  # pyright: ignore[reportUnknownArgumentType]


def _stuck(error: BaseException, crew: Crew) -> BaseException:
    """``error`` for whoever watches, with what the doors complained about."""
    if not isinstance(error, Exception) or isinstance(error, BrokenPipeError):
        return error
    told = str(error) if isinstance(error, HandrailError) else f"{type(error).__name__}: {error}"
    with suppress(OSError):
        told += "\n" + crew.complaints.read_text(encoding="utf-8", errors="replace")[-2_000:]
    return Stuck(told.strip())


async def _play(view: View, journal: Journal, crew: Crew) -> dict[str, Heard]:
    """Everything that is done; gives what each door was told."""
    there = crew.place
    begin, half = there.signal("begin"), there.signal("half")
    rest = there.signal("rest")  # held open, so that whoever reads there waits
    try:
        view.heading("Four doors", "Agent one comes first, so its process holds the workspace. The others join it.", 1)
        rules = [word for rule in (EDIT, *HOLD_RULES) for word in ("--rule", rule)]
        one = await AgentDoor.open(crew, ONE, place.script(there, ONE), "tick your boxes", *rules)
        await journal.until(lambda: WAIT in journal.running, "agent one's first call")
        journal.tell(ONE, "·", f"runs {WAIT}, which ends when all are here", "dim")
        journal.tell(TWO, "·", "starts", "dim")
        two = await AgentDoor.open(crew, TWO, place.script(there, TWO), "tick your boxes", "--rule", EDIT)
        journal.tell(EDITOR, "·", "starts handrail mcp", "dim")
        async with EditorDoor.open(crew) as editor:
            terminal = TerminalDoor(crew)
            killed = asyncio.Event()
            editing = asyncio.create_task(_edit(there, editor, killed))
            try:
                await _edit_together(view, journal, terminal, begin)
                await _kill(view, journal, terminal, one, half, killed)
                await _go_on(view, journal, crew, terminal, two)
                await editing
            finally:
                editing.cancel()
                await asyncio.gather(editing, return_exceptions=True)
    finally:
        for descriptor in (begin, half, rest):
            os.close(descriptor)
    return {ONE: one.heard, TWO: two.heard, EDITOR: editor.heard, TERMINAL: terminal.heard}


async def _edit(there: Place, editor: EditorDoor, killed: asyncio.Event) -> None:
    boxes = there.of(EDITOR)
    await editor.tick(boxes[:-LAST])
    await killed.wait()
    await editor.tick(boxes[-LAST:])


async def _edit_together(view: View, journal: Journal, terminal: TerminalDoor, begin: int) -> None:
    """The first command on the terminal, and all the others meanwhile."""
    box = journal.place.of(TERMINAL)[0]
    journal.tell(TERMINAL, "·", "starts handrail call bash", "dim")
    async with terminal.command(TERMINAL, "call", "bash", json.dumps(place.command("./tick", box))) as asked:
        await asked.wait_for(PROMPT)
        asked.type(YES)
        await journal.until(lambda: len(journal.here) == len(NAMES), "a call of every door")
        await journal.until(lambda: journal.stands(box) == "authorised", "the first yes")
        view.heading("All at once", f"They tick their boxes in one file, {place.BOARD}. Each reads before it edits.", 2)
        os.write(begin, b"go on\n")
        terminal.heard.landed[box] = await asked.ended() == OUTPUT


async def _kill(
    view: View, journal: Journal, terminal: TerminalDoor, one: AgentDoor, half: int, killed: asyncio.Event
) -> None:
    """kill -9, in the middle of a call of the process that holds, while another is asked about at the terminal."""
    box = journal.place.of(TERMINAL)[1]
    async with terminal.command(TERMINAL, "call", "bash", json.dumps(place.command("./tick", box))) as asked:
        await asked.wait_for(PROMPT)
        await _readable(half)
        await journal.until(lambda: journal.stands(box) == "awaiting-approval", "the second question")
        slow = journal.place.slow
        about = f"It has ticked {slow[0]} and not yet {slow[1]}. The terminal has not answered yet."
        view.heading(f"kill -9 {one.process.pid}: agent one, in the middle of a call", about, 3)
        one.kill()
        await one.ended()
        for held in journal.holders:
            held.killed = held.pid == one.process.pid
        await journal.until(
            lambda: journal.holder is not None and journal.holder.pid != one.process.pid, "that another one takes over"
        )
        killed.set()
        terminal.heard.landed[box] = await asked.ended(YES) == OUTPUT
    for _ in range(TRIES):
        await journal.until(lambda: journal.stands(box) in ("landed", "rejected"), "an end of the terminal's call")
        if journal.stands(box) == "landed" or journal.latest(box).kind not in AGAIN:
            break
        async with terminal.command(TERMINAL, "call", "bash", json.dumps(place.command("./tick", box))) as asked:
            terminal.heard.landed[box] = await asked.ended(YES) == OUTPUT


async def _go_on(view: View, journal: Journal, crew: Crew, terminal: TerminalDoor, two: AgentDoor) -> None:
    """Agent two has ended: its last call waits for a person. Answered at the terminal, it runs when it is taken up."""
    await two.ended()
    if not two.parked:
        raise Stuck("agent two did not end with a call that waits for a person")
    view.heading("A person", "Agent two has ended; its last call waits. It is answered with handrail approve.", 4)
    async with terminal.command(TERMINAL, "approve", two.parked[0]) as asked:
        await asked.ended(YES)
    again = await AgentDoor.open(
        crew,
        TWO,
        place.script(crew.place, "two-again"),
        *("--resume", two.session),
        took_up=place.command("./tick", crew.place.asked),
    )
    await again.ended()
    two.heard.landed.update(again.heard.landed)


async def _readable(descriptor: int) -> None:
    """:raises Stuck: when nobody ever writes"""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def come() -> None:
        with suppress(asyncio.InvalidStateError):
            ready.set_result(None)

    loop.add_reader(descriptor, come)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ready
    except TimeoutError:
        raise Stuck("agent one's last call did not begin") from None
    finally:
        loop.remove_reader(descriptor)


# ── what is shown ────────────────────────────────────────────────────────────────────────────────


def _welcome(view: View, there: Place) -> None:
    view.title(
        "Handrail: four doors, one kernel",
        "Two agents, an editor and a terminal work on one file at the same time, each in a process of its own. The one "
        "that holds the workspace is killed. What the models and the person do is scripted, all else is real.",
    )
    view.heading("Where")
    view.name(str(there.folder), "[doors]")
    view.text(f"{NAMES[ONE]:<12}  handrail run --model script:…, held to its rules")
    view.text(f"{NAMES[TWO]:<12}  the same; what no rule allows waits for a person")
    view.text(f"{NAMES[EDITOR]:<12}  an MCP client of handrail mcp, where nobody can be asked")
    view.text(f"{NAMES[TERMINAL]:<12}  handrail call and handrail approve, typed")
    view.text(f"{'the file':<12}  {there.board}, {len(there.boxes)} boxes")


def _conclude(
    view: View, journal: Journal, made: Sequence[Account], found: Sequence[Effect], verification: LogVerification
) -> None:
    view.heading("What became of the edits")
    view.table(
        ("door", "edits", "landed", "later", "not", "why"),
        [
            (
                NAMES[account.door],
                str(len(account.boxes)),
                str(len(account.landed)),
                str(account.later),
                str(len(account.boxes) - len(account.landed)),
                account.why,
            )
            for account in made
        ],
        right=(1, 2, 3, 4),
    )
    view.text(
        "later: landed when it was tried again, since somebody else had been faster or the holder was killed",
        style="dim",
    )
    view.heading("Who held the workspace")
    view.table(
        ("", "process", "who", "from", "to", "ended by"),
        [
            (
                str(held.token),
                str(held.pid),
                NAMES[held.door],
                f"{held.since_s:.2f} s",
                "" if held.until_s is None else f"{held.until_s:.2f} s",
                "kill -9" if held.killed else "its own end",
            )
            for held in journal.holders
        ],
        right=(0, 1, 3, 4),
    )
    view.heading("The one log")
    view.text(str(verification))
    view.heading("Looked up afterwards", "in the file, the processes and the log, whatever the doors said")
    for effect in found:
        view.checked(effect.name, effect.there, effect.found)
    if lacking := missing(found):
        view.text(f"{len(lacking)} of {len(found)} effects are not there.", style="bold red")
    else:
        view.text(f"All {len(found)} effects are there.", style="bold green")


def _kept(view: View, there: Place, verification: LogVerification) -> None:
    where = f"--workspace {there.workspace} --state {there.state}"
    view.heading("Where to go next")
    view.text("The repository, its state and its log are kept:")
    view.command(f"{program()} log {where}")
    view.command(f"{program()} log verify {where} --head {verification.head}")
    view.command(f"{program()} sessions {where}")
