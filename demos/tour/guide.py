"""The way through the tour: make the place, play the script in the real loop, check, conclude, clean up."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, chdir
from pathlib import Path

from demos.demonstration import CANNOT_START, ERROR, OUTPUT, Interruption, own_folder
from demos.tour import effects, project
from demos.tour.effects import Effect
from demos.tour.facts import Fact, Facts
from demos.tour.listener import Listener, PageServer
from demos.tour.project import Project
from demos.tour.scenes import COMMIT, TASK, Scene, scenes, script
from demos.tour.watching import View
from handrail import (
    Agent,
    ApprovalAnswer,
    ApprovalRequest,
    CallAnswered,
    CallProposed,
    Kernel,
    LogReader,
    LogVerification,
    ProposedCall,
    RunFinished,
    Session,
    StartError,
    TextDelta,
    TurnStarted,
    UserQuestion,
    open_kernel,
    verify_log,
)
from handrail.testing import ScriptedModel


class ScriptedPerson:
    """An attendant that says yes to one command, once, and no to everything else."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        if request.tool_id == "bash" and request.arguments.get("command") == COMMIT:
            return ApprovalAnswer("once")
        return ApprovalAnswer("reject", "no: nothing in this task needs that")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        return [[""] for _ in questions]


async def guided(interruption: Interruption, *, keep: bool) -> int:
    """Give the whole tour. Its exit code.

    :raises HandrailError: where it cannot begin
    """
    view = View()
    name = program()
    # Handrail starts no program of the current folder, and the language server may be in this checkout's .venv.
    with own_folder("handrail-tour-", keep=keep) as folder, chdir(folder):
        place = project.make(folder)
        facts = Facts()
        async with (
            _serving() as page,
            open_kernel(
                place.workspace,
                state=place.state,
                config=place.config,
                agent=project.make_agent(page.address),
                frontend="cli",
            ) as kernel,
        ):
            confined = kernel.sandbox_tier.is_confining
            _welcome(view, kernel, place)
            async with _listening(confined) as listener:
                session = await kernel.session(approval_handler=ScriptedPerson())
                played = scenes(place, listener.port, page.port, confined=confined)
                await _play(view, kernel, session, played, facts, interruption)
                if interruption.happened:
                    return ERROR
                _read_sidecar(facts)
                found = effects.while_open(place, facts, listener, page, confined=confined)
                diff = place.diff(committed=confined)
                await session.close()
            withheld = [entry for entry in kernel.generation.entries.values() if entry.unavailable_reason is not None]
            tier = kernel.sandbox_tier
            database = Path(kernel.state_folder) / "handrail.db"
        if confined:
            found.append(effects.nothing_left(place))
        with LogReader.open_database(database) as reader:
            verification = verify_log(reader)
            found += effects.afterwards(facts, reader, verification)
        _conclude(view, facts, diff, found, verification, confined=confined)
        if not confined:
            view.heading("Withheld", f"This machine cannot confine programs: {tier.detail}")
            for entry in withheld:
                view.text(f"{entry.id}: starts programs, and nothing is started unconfined", style="yellow")
            view.text("So the tests, the sandbox's network, the external tool and the commit could not be shown.")
            view.text(f"Remedy: {tier.remedy}", style="bold")
        _next(view, place, name, keep=keep)
    if effects.missing(found):
        return ERROR
    return OUTPUT if confined else CANNOT_START


async def _play(
    view: View, kernel: Kernel, session: Session, played: Sequence[Scene], facts: Facts, interruption: Interruption
) -> None:
    """Run the agent and show what happens, from its events and from the log."""
    model = ScriptedModel(script(played), source="the tour")
    agent = Agent(session, model, workspace=session.workdir)
    interruption.stop = agent.cancel
    unwatch = session.watch_events(view.watch)
    scene, said = played[0], ""
    try:
        async with aclosing(agent.run(TASK)) as events:
            async for event in events:
                match event:
                    case TurnStarted(number) if number <= len(played):
                        scene = played[number - 1]
                        view.heading(scene.title, scene.about, number)
                        said = ""
                    case TextDelta(text):
                        said += text
                        if len(said) >= len(scene.says):
                            view.said(said)
                    case CallProposed():
                        facts.proposed += 1
                    case CallAnswered(position, call, answer):
                        facts.answered += 1
                        await kernel.log.flush()
                        records = tuple(kernel.log.reader.records(call=answer.call_id))
                        label = scene.calls[position].label or answer.call_id
                        facts.calls[label] = fact = Fact(label, answer, records)
                        if (path := answer.result.metadata.get("output_path")) is not None:
                            view.name(str(Path(path).parent), "[output]")
                        view.fact(fact, answer.tool_id or call.name, in_a_line(call))
                    case RunFinished(outcome):
                        facts.outcome = outcome
                    case _:
                        pass
    finally:
        view.still()
        unwatch()
        interruption.stop = None
        facts.unplayed = model.remaining_turns


def in_a_line(call: ProposedCall) -> str:
    """A call's arguments for one line: the value where there is one that says it all."""
    try:
        arguments = json.loads(call.arguments) if isinstance(call.arguments, (str, bytes)) else call.arguments
    except ValueError:
        return str(call.arguments)
    first = ("command", "pattern", "path")
    values = [arguments[name] for name in first if name in arguments]
    values += [f"{name}={value}" for name, value in arguments.items() if name not in first]
    return "  ".join(str(value) for value in values)


def _read_sidecar(facts: Facts) -> None:
    cut = facts.calls.get("orders")
    path = None if cut is None else cut.result.metadata.get("output_path")
    if path is not None and Path(path).is_file():
        facts.sidecar = Path(path).read_text(encoding="utf-8")


def _welcome(view: View, kernel: Kernel, place: Project) -> None:
    tier = kernel.sandbox_tier
    view.title(
        "Handrail: the tour",
        "The model's replies are scripted, and so is the person who approves. Everything else is real: the loop, "
        "the rules, the locks, the sandbox, the log, and a git repository with two failing tests.",
    )
    view.heading("Where", "")
    view.text(f"[tour]      {place.folder}")
    view.name(str(place.folder), "[tour]")
    view.text(f"repository  {place.workspace}")
    view.text(f"sandbox     {tier.name}: {tier.detail}")
    view.text(f"task        {TASK}")
    view.text("rules       beside the shipped ones, from this tour's handrail.toml:")
    for rule in project.RULES:
        view.text(rule, indent=15)


def _conclude(
    view: View, facts: Facts, diff: str, found: Sequence[Effect], verification: LogVerification, *, confined: bool
) -> None:
    view.heading("What changed", "git diff, from the commit the model began with")
    view.diff(diff)
    view.heading("What did not happen")
    refused = (
        ("curl", "a rule"),
        ("outside", "the capability set"),
        ("key-read", "a person"),
        ("key-hook", "a name that no rule opens"),
    )
    for label, layer in refused:
        if (fact := facts.calls.get(label)) is not None and fact.refused:
            view.text(f"refused by {layer}: {fact.why}")
    if (publish := facts.calls.get("publish")) is not None:
        view.text("made impossible by the sandbox: the script was allowed, and reached nothing:")
        view.block(str(publish.field("output")).splitlines())
    view.heading("What ran at the same time")
    if effects.PARALLEL in {effect.name for effect in found if effect.there}:
        locks = [lock for label in ("edit-pricing", "edit-receipt") for lock in facts.locks_of(label)]
        view.text(f"two edits, under {' and '.join(locks)}: both were begun before either was done")
    if (after := facts.calls.get("tests-after")) is not None and after.lock_wait_ms:
        view.text(f"the tests, under workspace:X, waited {after.lock_wait_ms:.1f} ms for them")
    view.heading("The commit log")
    view.text(str(verification))
    view.text(f"{facts.proposed} calls, {facts.answered} answers")
    view.heading("Looked up afterwards", "in files, processes and the log, whatever the model said")
    for effect in found:
        view.checked(effect.name, effect.there, effect.found)
    if lacking := effects.missing(found):
        view.text(f"{len(lacking)} of {len(found)} effects are not there.", style="bold red")
    elif confined:
        view.text(f"All {len(found)} effects are there.", style="bold green")
    else:
        view.text(f"All {len(found)} effects that need no sandbox are there.", style="bold yellow")


def program() -> str:
    """How the ``handrail`` of this installation is called from here."""
    path = Path(sys.executable).with_name("handrail")
    if not path.exists():
        return "handrail"
    near = Path.cwd() in path.parents[:3]  # near enough to be written shorter
    return str(path.relative_to(Path.cwd()) if near else path)


def _next(view: View, place: Project, name: str, *, keep: bool) -> None:
    view.heading("Where to go next")
    if keep:
        where = f"--workspace {place.workspace} --state {place.state}"
        view.text("The repository, its state and its log are kept:")
        view.command(f"{name} log {where}")
        view.command(f"{name} log verify {where}")
    view.text("In a repository of yours:")
    view.command(f"{name} doctor")
    view.command(f'{name} explain bash \'{{"command": "git push"}}\'')
    view.command(f"{name} run 'Fix the failing test' --model anthropic:NAME")
    view.command(f"{name} mcp")


@asynccontextmanager
async def _listening(confined: bool) -> AsyncGenerator[Listener]:
    """The listener that the sandbox must not reach; without a sandbox nobody tries."""
    async with AsyncExitStack() as stack:
        try:
            listener = await stack.enter_async_context(Listener.open()) if confined else Listener()
        except OSError as error:
            raise _cannot_listen(error) from None
        yield listener


@asynccontextmanager
async def _serving() -> AsyncGenerator[PageServer]:
    """The server with the page that the agent may fetch."""
    async with AsyncExitStack() as stack:
        try:
            page = await stack.enter_async_context(PageServer.open())
        except OSError as error:
            raise _cannot_listen(error) from None
        yield page


def _cannot_listen(error: OSError) -> StartError:
    return StartError(f"The tour cannot listen on 127.0.0.1: {error.strerror}. Check the loopback interface.")
