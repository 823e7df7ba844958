"""The way through the show: wake the one by the other's messages, look everything up, conclude, clean up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from demos.demonstration import ERROR, OUTPUT, Interruption, own_folder
from demos.pair import accounts, parts
from demos.pair.parts import FIXER, MEND, REVIEW, REVIEWER
from demos.tour import effects
from demos.tour.facts import Fact, Facts
from demos.tour.guide import in_a_line, program
from demos.tour.project import Project
from demos.tour.watching import View
from handrail import (
    Agent,
    AgentEvent,
    AgentIdle,
    CallAnswered,
    CallProposed,
    Kernel,
    LogReader,
    LogVerification,
    Notification,
    NotificationsDelivered,
    RunFinished,
    Session,
    StartError,
    TextDelta,
    TurnStarted,
    open_kernel,
    verify_log,
)
from handrail.sandbox import probe_tier
from handrail.testing import ScriptedModel


@dataclass(slots=True)
class Worker:
    """One of the two, and what is known of what it did."""

    name: str
    session: Session
    model: ScriptedModel
    agent: Agent
    facts: Facts = field(default_factory=Facts)
    heard: list[Notification] = field(default_factory=list[Notification])
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it waits for something to be told, and once it does nothing any more."""


class Stage:
    """Both, and the terminal that they are watched on."""

    def __init__(self, view: View, kernel: Kernel) -> None:
        self._view = view
        self._kernel = kernel
        self._speaker = ""

    async def worker(self, name: str) -> Worker:
        session = await self._kernel.session(agent=name)
        model = ScriptedModel(parts.scripts()[name], source=name)
        return Worker(name, session, model, Agent(session, model, workspace=session.workdir))

    async def follow(self, worker: Worker, events: AsyncGenerator[AgentEvent, None]) -> None:
        """Show what happens, as it does. Returns when a run of it has failed, too."""
        said, labels = "", dict[int, str]()
        turns = parts.scripts()[worker.name].turns
        facts = worker.facts
        async with aclosing(events) as following:
            async for event in following:
                match event:
                    case TurnStarted():
                        worker.waits.clear()
                        played = turns[min(len(turns) - worker.model.remaining_turns, len(turns) - 1)]
                        said = ""
                        labels = {n: call.label or "" for n, call in enumerate(played.calls)}
                    case TextDelta(text):
                        said += text
                    case CallProposed():
                        facts.proposed += 1
                        said = self._says(worker, said)
                    case CallAnswered(position, call, answer):
                        facts.answered += 1
                        await self._kernel.log.flush()
                        records = tuple(self._kernel.log.reader.records(call=answer.call_id))
                        fact = Fact(labels.get(position) or answer.call_id, answer, records)
                        facts.calls[fact.label] = fact
                        self._turn_to(worker)
                        self._view.fact(fact, answer.tool_id or call.name, in_a_line(call))
                    case NotificationsDelivered(notices):
                        worker.heard += notices
                        for notice in notices:
                            self._turn_to(worker)
                            self._view.text(f"is woken by its trigger {notice.source}:", style="bold yellow")
                            self._view.block(notice.text.splitlines())
                    case AgentIdle():
                        said = self._says(worker, said)
                        self._turn_to(worker)
                        self._view.text("waits until a message comes", style="dim")
                        worker.waits.set()
                    case RunFinished(outcome):
                        said = self._says(worker, said)
                        facts.outcome = outcome
                        if not outcome.ok:
                            self._turn_to(worker)
                            self._view.text(f"{outcome.status}: {outcome.detail}", style="bold red")
                            break
                    case _:
                        pass
        worker.waits.set()

    def _says(self, worker: Worker, text: str) -> str:
        if text.strip():
            self._turn_to(worker)
            self._view.text(text, style="italic")
        return ""

    def _turn_to(self, worker: Worker) -> None:
        if self._speaker != worker.name:
            self._speaker = worker.name
            self._view.heading(worker.name)


async def shown(interruption: Interruption, *, keep: bool) -> int:
    """Give the show. Its exit code.

    :raises HandrailError: where it cannot begin
    """
    tier = probe_tier()
    if not tier.is_confining:
        raise StartError(f"this machine cannot confine programs: {tier.detail}. Remedy: {tier.remedy}")
    view = View()
    with own_folder("handrail-agents-", keep=keep) as folder:
        place = parts.make(folder)
        async with open_kernel(place.workspace, state=place.state, config=place.config, frontend="cli") as kernel:
            _welcome(view, place)
            stage = Stage(view, kernel)
            reviewer, fixer = await stage.worker(REVIEWER), await stage.worker(FIXER)
            await _play(stage, reviewer, fixer, interruption)
            database = Path(kernel.state_folder) / "handrail.db"
        if interruption.happened:
            return ERROR
        with LogReader.open_database(database) as reader:
            verification = verify_log(reader)
            found = accounts.effects(place, reviewer, fixer, reader, verification)
        _conclude(view, place, found, verification)
        if keep:
            where = f"--workspace {place.workspace} --state {place.state}"
            view.heading("Where to go next")
            view.text("The repository, its state and its log are kept:")
            for command in ("log", f"log --session {fixer.session.id}", "sessions"):
                view.command(f"{program()} {command} {where}")
    return ERROR if effects.missing(found) else OUTPUT


async def _play(stage: Stage, reviewer: Worker, fixer: Worker, interruption: Interruption) -> None:
    """The fixer lives on and waits; then the reviewer works to its end, and both leave."""

    def stop(reason: str) -> None:
        for worker in (reviewer, fixer):
            worker.agent.stop("user" if reason == "user" else "shutdown")

    interruption.stop = stop
    living = asyncio.create_task(
        stage.follow(fixer, fixer.agent.serve("Have yourself woken when there is work for you."))
    )
    living.add_done_callback(lambda _: reviewer.agent.stop("shutdown"))  # nobody would answer it any more
    try:
        await fixer.waits.wait()
        if not living.done():
            await stage.follow(reviewer, reviewer.agent.run(REVIEW))
            await fixer.waits.wait()
            fixer.agent.stop()
        await living
    finally:
        living.cancel()
        await asyncio.wait({living})
        interruption.stop = None
        for worker in (reviewer, fixer):
            worker.facts.unplayed = worker.model.remaining_turns
            await worker.session.suspend()


def _welcome(view: View, place: Project) -> None:
    view.title(
        "Handrail: two agents, one repository",
        "One reviews and may not write; the other mends. They hand the work to each other over channels. What the two "
        "models say is scripted, all else is real: the repository, the tests in their sandbox, the channels, the log.",
    )
    view.heading("Where")
    view.name(str(place.folder), "[agents]")
    view.text(f"{'repository':<12}{place.workspace}, git, two bugs, two failing tests")
    view.text(f"{REVIEWER:<12}may read, run `{parts.TESTS}` and commit")
    view.text(f"{FIXER:<12}may edit shop/** and run its tests. {MEND}")


def _conclude(view: View, place: Project, found: list[effects.Effect], verification: LogVerification) -> None:
    view.heading("What has changed in the repository")
    view.diff(place.diff(committed=True))
    view.heading("The log")
    view.text(str(verification))
    view.heading("Looked up afterwards", "in the files, the channels, the conversations and the log")
    for effect in found:
        view.checked(effect.name, effect.there, effect.found)
    if lacking := effects.missing(found):
        view.text(f"{len(lacking)} of {len(found)} effects are not there.", style="bold red")
    else:
        view.text(f"All {len(found)} effects are there.", style="bold green")
