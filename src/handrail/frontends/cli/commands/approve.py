"""``handrail approve``: the open approval requests of this workspace, answered from any terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.completing import approval_ids
from handrail.frontends.cli.driving import Interruption, drive, opened, tell_before
from handrail.frontends.cli.options import Setting, equipped
from handrail.frontends.cli.show import note, one_line, out, out_json

if TYPE_CHECKING:
    from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalDesk, Choice
    from handrail.kernel.answering import Answers
    from handrail.store.tables.approvals import ApprovalReader

DOOR = "handrail approve"
_LOOK_EVERY_S = 0.2


@click.command("approve")
@click.argument("request_id", metavar="[ID]", required=False, shell_complete=approval_ids)
@click.option("--once", "choice", flag_value="once", help="This call, with exactly these arguments.")
@click.option("--session", "choice", flag_value="session", help="And store the shown rule for the session.")
@click.option("--project", "choice", flag_value="project", help="And store it for every session of this workspace.")
@click.option(
    "--session-wider", "choice", flag_value="session-wider", help="And store the shown wider rule for the session."
)
@click.option(
    "--project-wider", "choice", flag_value="project-wider", help="And store it for every session of this workspace."
)
@click.option("--reject", "choice", flag_value="reject", help="Not this call.")
@click.option("--reject-always", "choice", flag_value="reject-always", help="And store the shown deny.")
@click.option("--stop-session", "choice", flag_value="stop", help="Not this call, and none after it in its session.")
@click.option("--message", metavar="TEXT", default="", help="With a rejection: what the model is told.")
@click.option("--arguments", metavar="JSON|-|@FILE", help="Once, with these arguments instead.")
@click.option("--answer", "answers", multiple=True, metavar="TEXT", help="To a question. Once for each, in order.")
@click.option("--list", "only_list", is_flag=True, help="List, and ask nothing.")
@click.option("--wait", is_flag=True, help="Wait until something is asked.")
@click.option("--rules", "rules_only", is_flag=True, help="List the rules that answers stored for this workspace.")
@click.option("--forget", metavar="RULE", help="Remove one of them, by its id.")
@equipped
def command(
    setting: Setting,
    request_id: str | None,
    choice: Choice | None,
    message: str,
    arguments: str | None,
    answers: tuple[str, ...],
    only_list: bool,
    wait: bool,
    rules_only: bool,
    forget: str | None,
) -> int:
    """Show what waits for a person, whole, and answer it.

    Without an ID everything that waits is listed, and on a terminal asked, one after the other. With an ID, that one:
    answered by the option, or shown and asked. Answering runs nothing: the call goes on where it waits, or when its
    session is taken up again (handrail call --resume ID, handrail run --resume).
    """
    given = _given(choice, message, arguments, answers)
    if given and request_id is None:
        raise click.UsageError("name the request that this answers: handrail approve ID --once")
    if forget is not None:
        return drive(lambda _: _forget(setting, forget))
    if rules_only:
        return _show_rules(setting)
    if given:
        assert request_id is not None
        return drive(lambda _: _decide(setting, request_id, choice, message, arguments, answers))
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (only_list or setting.json or setting.headless)
    return drive(lambda interruption: _go_through(setting, request_id, interruption, asks=asks, wait=wait))


def _given(choice: str | None, message: str, arguments: str | None, answers: Sequence[str]) -> bool:
    """Whether the options answer a request.

    :raises UsageError: for options that contradict each other
    """
    if arguments is not None and choice not in (None, "once"):
        raise click.UsageError(
            "--arguments goes with --once only: a stored rule is about the arguments that were shown"
        )
    if answers and (choice is not None or arguments is not None):
        raise click.UsageError("--answer answers a question; it goes with none of the others")
    if message and choice not in ("reject", "reject-always", "stop"):
        raise click.UsageError("--message goes with --reject, --reject-always or --stop-session")
    return choice is not None or arguments is not None or bool(answers)


async def _decide(
    setting: Setting,
    request_id: str,
    choice: Choice | None,
    message: str,
    arguments: str | None,
    answers: Sequence[str],
) -> int:
    from handrail.contract.approvals import ApprovalAnswer
    from handrail.contract.errors import ToolError

    changed = None
    if arguments is not None:
        from handrail.frontends.cli.commands.call import read_arguments
        from handrail.frontends.cli.terminal import changed_arguments

        try:
            changed = changed_arguments(read_arguments(arguments))
        except ValueError as error:
            raise click.UsageError(f"--arguments: {error}") from None
    desk = _desk(setting)
    if desk is None:
        return _no_request(request_id)
    try:
        if answers:
            told = [_answer_of(answer) for answer in answers]
            decided = await desk.answer(request_id, told, by=DOOR)
        else:
            answer = ApprovalAnswer(choice or "once", message, changed)
            decided = await desk.decide(request_id, answer, by=DOOR)
    except ToolError as error:
        note(f"{error.kind}: {error}")
        return ERROR
    _show_decided(setting, decided)
    return OUTPUT


def _answer_of(text: str) -> list[str]:
    """One question's answer: a text, or a JSON list of several."""
    if text.startswith("["):
        try:
            several: Any = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(several, list):
            return [str(one) for one in several]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [text]


def _show_decided(setting: Setting, decided: Approval) -> None:
    if setting.json:
        out_json(decided.to_dict())
        return
    rule = {
        "session": decided.request.always,
        "project": decided.request.always,
        "session-wider": decided.request.wider,
        "project-wider": decided.request.wider,
        "reject-always": decided.request.never,
    }
    stored = rule.get(decided.choice or "")
    out(f"{decided.id}  {decided.choice if decided.kind == 'approval' else decided.state}")
    if stored is not None:
        out(f"stored the rule  {one_line(stored)}")


async def _go_through(
    setting: Setting, request_id: str | None, interruption: Interruption, *, asks: bool, wait: bool
) -> int:
    """List what waits, or that one request, and ask where somebody is there to answer."""
    waits = wait and request_id is None
    if waits:
        note("waiting until something is asked")
        await _until_kept(setting)
    with _reading(setting) as (reader, workspace):
        if waits:
            await _until_asked(reader, interruption)
        rows = _chosen(reader, request_id)
        if rows is None:
            return ERROR
        if not rows:
            note("nothing waits for an answer")
        if setting.json:
            out_json([row.to_dict() for row in rows])
            return OUTPUT
        if not asks:
            for row in rows:
                await _show(row, workspace)
            return OUTPUT
    return await _ask(setting, rows, workspace) if rows else OUTPUT


def _chosen(reader: ApprovalReader | None, request_id: str | None) -> list[Approval] | None:
    """What is shown; None, with a word on why, where the named request cannot be answered."""
    if request_id is None:
        return [] if reader is None else reader.pending(time.time_ns())
    row = None if reader is None else reader.get(request_id)
    if row is None:
        _no_request(request_id)
        return None
    if not row.pending or row.request.expires_ns <= time.time_ns():
        state = "expired" if row.pending else row.state
        note(f"{row.id} is {state}" + (f", with {row.choice!r} at the door {row.decided_by!r}" if row.choice else ""))
        return None
    return [row]


def _no_request(request_id: str) -> int:
    note(f"there is no request {request_id[:40]!r} in this workspace; handrail approve lists those that wait")
    return ERROR


async def _ask(setting: Setting, rows: Sequence[Approval], workspace: str) -> int:
    from handrail.contract.errors import ToolError
    from handrail.frontends.cli.terminal import Terminal

    terminal = Terminal(workspace=workspace)
    code = OUTPUT
    desk = _desk(setting)
    assert desk is not None, "the rows are from its database"
    for row in rows:
        try:
            decided = await _asked(desk, terminal, row)
        except ToolError as error:
            note(f"{error.kind}: {error}")
            code = ERROR
            continue
        if decided is not None:
            _show_decided(setting, decided)
    return code


async def _asked(desk: Answers, terminal: Any, row: Approval) -> Approval | None:
    """What the person at the terminal makes of it; None when it stays."""
    if row.kind == "question":
        note(f"{row.id}  {one_line(row.request.tool_id)} asks, in session {one_line(row.request.session_id)}")
        answers = await terminal.answer(row.request.session_id, row.questions)
        return None if answers is None else await desk.answer(row.id, answers, by=DOOR)
    answer: ApprovalAnswer = await terminal.approve(row.request)
    return None if answer.choice == "later" else await desk.decide(row.id, answer, by=DOOR)


async def _show(row: Approval, workspace: str) -> None:
    from handrail.frontends.cli.terminal import preview, question_lines, request_lines

    request = row.request
    if row.kind == "question":
        lines = [f"{row.id}  {one_line(request.tool_id)} asks"]
        for question in row.questions:
            lines += [f"  {line}" for line in question_lines(question)]
        lines.append("  --answer TEXT answers it" + (", once for each question" if len(row.questions) > 1 else ""))
    else:
        lines = request_lines(request, await preview(request, workspace))
        if request.always is not None:
            given = "--project stores" if request.shared else "--session and --project store"
            lines.append(f"  {given} the rule  {one_line(request.always)}")
        if request.wider is not None:
            given = "--project-wider stores" if request.shared else "--session-wider and --project-wider store"
            lines.append(f"  {given} the rule  {one_line(request.wider)}")
        if request.never is not None:
            lines.append(f"  --reject-always stores the rule  {one_line(request.never)}")
    lines.append(f"  session {one_line(request.session_id)}, call {one_line(request.call_id)}, {_ages(row)}")
    for line in [*lines, ""]:
        out(line)


def _ages(row: Approval) -> str:
    now = time.time_ns()
    asked, left = (now - row.request.created_ns) / 1e9, (row.request.expires_ns - now) / 1e9
    return f"asked {_lasting(asked)} ago, can be answered for {_lasting(left)}"


def _lasting(seconds: float) -> str:
    for size, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            count = round(seconds / size)
            return f"{count} {name}{'' if count == 1 else 's'}"
    return "a moment"


def _show_rules(setting: Setting) -> int:
    with _reading(setting) as (reader, _):
        rules = [] if reader is None else reader.rules()
    if setting.json:
        out_json([asdict(rule) for rule in rules])
    elif not rules:
        note("no answer has stored a rule for this workspace")
    else:
        for rule in rules:
            out(f"{rule.id}  {one_line(rule.text)}  (answered to {rule.approval_id})")
    return OUTPUT


async def _forget(setting: Setting, rule_id: str) -> int:
    from handrail.contract.errors import ToolError

    desk = _desk(setting)
    if desk is None:
        note(f"there is no stored rule {rule_id[:40]!r}; handrail approve --rules lists them")
        return ERROR
    try:
        rule = await desk.forget_rule(rule_id)
    except ToolError as error:
        note(f"{error.kind}: {error}")
        return ERROR
    out_json(asdict(rule)) if setting.json else out(f"forgotten  {one_line(rule.text)}")
    return OUTPUT


async def _until_kept(setting: Setting) -> None:
    """Return when anything is kept of the workspace that can be read."""
    while True:
        with _reading(setting) as (reader, _):
            if reader is not None:
                return
        await asyncio.sleep(_LOOK_EVERY_S)


async def _until_asked(reader: ApprovalReader | None, interruption: Interruption) -> None:
    """Return when something can be answered. SQLite tells other processes of a change only when it is asked."""
    while reader is not None and not reader.pending(time.time_ns(), limit=1):
        version = reader.version()
        while reader.version() == version:  # noqa: ASYNC110 - no event reaches over to another process
            await asyncio.sleep(_LOOK_EVERY_S)


def _desk(setting: Setting) -> Answers | None:
    """What takes answers: the process that holds the workspace, else its database. None where nothing was ever kept of it."""
    from handrail.kernel.answering import Answers, Place

    with _reading(setting) as (reader, _):
        if reader is None:
            return None
    given = setting.workspace, setting.state, setting.config, setting.settings, setting.allow_home
    return Answers(Place(*given, face="approve"), lambda: _desk_of_a_kernel(setting), tell_before)


@asynccontextmanager
async def _desk_of_a_kernel(setting: Setting) -> AsyncGenerator[ApprovalDesk]:
    async with opened(setting) as kernel:
        yield kernel.approvals


@contextmanager
def _reading(setting: Setting) -> Generator[tuple[ApprovalReader | None, str]]:
    """What is durable, beside whoever holds the workspace; None where nothing was ever kept of it."""
    from handrail.kernel.answering import reading
    from handrail.store.database.connection import NotMadeYet
    from handrail.store.folders import locate

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(reading(folders))
        except NotMadeYet:
            reader = None
        yield reader, str(folders.workspace)
