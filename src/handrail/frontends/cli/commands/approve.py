"""``handrail approve``: the open approval requests of a workspace, answered from any terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from handrail.contract.errors import ToolError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_agent_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    open_configured_kernel,
    open_session_and_log_readers,
    print_startup_warnings,
    run_on_event_loop,
)
from handrail.frontends.cli.shell_completion import approval_ids
from handrail.frontends.cli.terminal_output import escape_to_one_line, print_escaped_line, print_json, print_stderr_note

if TYPE_CHECKING:
    from handrail.contract.approval_requests import (
        Approval,
        ApprovalAnswer,
        ApprovalChoice,
        ApprovalRequest,
        ApprovalService,
    )
    from handrail.contract.services.tool_runtime import UserQuestion
    from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler
    from handrail.kernel.approval_client import ApprovalResponder
    from handrail.store.tables.approval_tables import ApprovalReader

ANSWERED_BY = "handrail approve"
_POLL_INTERVAL_S = 0.2


@click.command("approve")
@click.argument("request_id", metavar="[list|ID]", required=False, shell_complete=approval_ids)
@click.option("--once", "choice", flag_value="once", help="Allow this call, with exactly these arguments.")
@click.option("--session", "choice", flag_value="session", help="Allow, and store the shown rule for the session.")
@click.option("--project", "choice", flag_value="project", help="Allow, and store the rule for all sessions.")
@click.option(
    "--session-wider", "choice", flag_value="session-wider", help="Allow, and store the wider rule for the session."
)
@click.option(
    "--project-wider", "choice", flag_value="project-wider", help="Allow, and store the wider rule for all sessions."
)
@click.option("--reject", "choice", flag_value="reject", help="Reject this call.")
@click.option("--reject-always", "choice", flag_value="reject-always", help="Reject, and store the shown deny rule.")
@click.option("--stop-session", "choice", flag_value="stop", help="Reject this call, and stop its session's work.")
@click.option("--message", metavar="TEXT", default="", help="Message to the model with a rejection. Default: none.")
@click.option("--arguments", metavar="JSON|-|@FILE", help="New arguments: allow the call once with these.")
@click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="TEXT",
    help="Answer to a question: an option's number, or text. Repeatable.",
)
@click.option("--wait", is_flag=True, help="Wait for the next request.")
@click.option("--rules", "rules_only", is_flag=True, help="List the rules that answers stored for this workspace.")
@click.option("--revoke", metavar="RULE", help="ID of a stored rule to remove.")
@add_agent_options
def command(
    setting: CommandOptions,
    request_id: str | None,
    choice: ApprovalChoice | None,
    message: str,
    arguments: str | None,
    answers: tuple[str, ...],
    wait: bool,
    rules_only: bool,
    revoke: str | None,
) -> int:
    """List and answer approval requests.

    Without an ID, lists all open requests. On a terminal, asks you about each of them; list only lists them. With an ID, shows that request, or
    answers it if you pass an option such as --once. An answer does not run the call. The call continues in the process where
    it waits, or when its session is resumed (handrail call --resume ID, handrail run --resume).
    """
    only_list, request_id = request_id == "list", None if request_id == "list" else request_id
    if (given := _has_answer(choice, message, arguments, answers)) and request_id is None:
        raise click.UsageError("The ID of the request is missing. Pass it, as in: handrail approve ID --once")
    if revoke is not None:
        return run_on_event_loop(lambda _: _revoke(setting, revoke))
    if rules_only:
        return _show_rules(setting)
    if given:
        assert request_id is not None
        return run_on_event_loop(lambda _: _decide(setting, request_id, choice, message, arguments, answers))
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (only_list or setting.json or setting.headless)
    return run_on_event_loop(
        lambda interruption: _review_requests(setting, request_id, interruption, asks=asks, wait=wait)
    )


def _has_answer(choice: str | None, message: str, arguments: str | None, answers: Sequence[str]) -> bool:
    """Return whether the options answer a request.

    :raises UsageError: for options that exclude each other
    """
    if arguments is not None and choice not in (None, "once"):
        raise click.UsageError(
            f"`--arguments` cannot be combined with `{choice}`: a stored rule applies to the shown arguments. Pass `--once`."
        )
    if answers and (choice is not None or arguments is not None):
        raise click.UsageError(
            "`--answer` is for questions, and `--once` and `--arguments` are for approvals. Pass only one kind."
        )
    if message and choice not in ("reject", "reject-always", "stop"):
        raise click.UsageError(
            "`--message` is only for rejections. Add `--reject`, `--reject-always` or `--stop-session`."
        )
    return choice is not None or arguments is not None or bool(answers)


async def _decide(
    setting: CommandOptions,
    request_id: str,
    choice: ApprovalChoice | None,
    message: str,
    arguments: str | None,
    answers: Sequence[str],
) -> int:
    from handrail.contract.approval_requests import ApprovalAnswer

    changed = None
    if arguments is not None:
        from handrail.frontends.cli.commands.call import read_json_argument
        from handrail.frontends.cli.terminal_approvals import parse_changed_arguments

        try:
            changed = parse_changed_arguments(read_json_argument(arguments))
        except ValueError as error:
            raise click.UsageError(f"Invalid value for `--arguments`. {error}") from None
    if (approvals := _answer_service(setting)) is None:
        return _report_unknown_request(request_id)
    try:
        if answers:
            items = _parse_answers(setting, request_id, answers)
            decided = await approvals.answer_questions(request_id, items, by=ANSWERED_BY)
        else:
            answer = ApprovalAnswer(choice or "once", message, changed)
            decided = await approvals.decide(request_id, answer, by=ANSWERED_BY)
    except ToolError as error:
        print_stderr_note(f"{error.kind}: {error}")
        return ERROR
    _show_decided(setting, decided)
    return OUTPUT


def _parse_answers(setting: CommandOptions, request_id: str, answers: Sequence[str]) -> list[list[str]]:
    """Return the answer to each question.

    :raises UsageError: for a number without an option
    """
    with _open_approval_reader(setting) as (reader, _):
        row = None if reader is None else reader.get(request_id)
    questions = () if row is None else row.questions
    return [_parse_answer(text, question) for text, question in zip_longest(answers, questions[: len(answers)])]


def _parse_answer(text: str, question: UserQuestion | None) -> list[str]:
    """Return the answer to one question: a text, the options with the given numbers, or the items of a JSON list.

    :raises UsageError: for a number without an option
    """
    from handrail.frontends.cli.terminal_approvals import parse_question_answer

    if text.startswith("["):
        try:
            several: Any = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(several, list):
            return [str(one) for one in several]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if question is None:
        return [text]
    if (chosen := parse_question_answer(question, text.strip())) is None:
        raise click.UsageError(
            f"Invalid value for `--answer`: {text}. Expected a number from 1 to {len(question.options)}, or text."
        )
    return chosen


def _show_decided(setting: CommandOptions, decided: Approval) -> None:
    if setting.json:
        print_json(decided.to_dict())
        return
    rule = {
        "session": decided.request.suggested_rule,
        "project": decided.request.suggested_rule,
        "session-wider": decided.request.suggested_wider_rule,
        "project-wider": decided.request.suggested_wider_rule,
        "reject-always": decided.request.suggested_deny,
    }
    stored = rule.get(decided.choice or "")
    print_escaped_line(f"{decided.id}  {decided.state if decided.kind == 'question' else decided.choice}")
    if stored is not None:
        print_escaped_line(f"stored rule  {escape_to_one_line(stored)}")


async def _review_requests(
    setting: CommandOptions, request_id: str | None, interruption: InterruptHandler, *, asks: bool, wait: bool
) -> int:
    """List the open requests, or one of them, and ask the user about each if ``asks``."""
    waits = wait and request_id is None
    if waits:
        print_stderr_note("Waiting for a request. Press Ctrl-C to stop.")
        await _wait_for_state(setting)
    with _open_approval_reader(setting) as (reader, workspace):
        if waits:
            await _wait_for_request(reader, interruption)
        if (rows := _select_requests(reader, request_id)) is None:
            return ERROR
        if not rows:
            print_stderr_note("No request is open.")
        if setting.json:
            print_json([row.to_dict() for row in rows])
            return OUTPUT
        if not asks:
            agents = _describe_askers(setting, rows)
            for number, row in enumerate(rows, 1):
                await _show(row, workspace, f"{number} of {len(rows)}" if len(rows) > 1 else "", agents)
            return OUTPUT
    return await _ask(setting, rows, workspace) if rows else OUTPUT


def _describe_askers(setting: CommandOptions, rows: Sequence[Approval]) -> dict[str, str]:
    """Return who asks, by session: its agent, and its client."""
    if not rows:
        return {}
    with open_session_and_log_readers(setting) as (reader, log):
        descriptions: dict[str, str] = {}
        for session_id in {row.request.session_id for row in rows}:
            if (facts := reader.get(session_id)) is not None:
                opener = next(reversed(log.list_session_openers(session_id)), None)
                client = facts.frontend if opener is None else str(opener)
                descriptions[session_id] = f"agent {facts.agent} of session {session_id}, in {client}"
    return descriptions


def _select_requests(reader: ApprovalReader | None, request_id: str | None) -> list[Approval] | None:
    """Return the requests to show, or None, with a note, if the named request cannot be answered."""
    if request_id is None:
        return [] if reader is None else sort_approvals_by_reply(reader.list_pending_requests(time.time_ns()))
    row = None if reader is None else reader.get(request_id)
    if row is None:
        _report_unknown_request(request_id)
        return None
    if not row.is_pending or row.request.expires_ns <= time.time_ns():
        state = "expired" if row.is_pending else row.state
        how = f" ({row.choice!r} by {row.decided_by!r})" if row.choice else ""
        print_stderr_note(f"Request {row.id} cannot be answered: it is {state}{how}.")
        return None
    return [row]


def sort_approvals_by_reply(rows: Sequence[Approval]) -> list[Approval]:
    """Return requests by the age of their reply, and those of one reply in the order of its calls."""
    oldest: dict[str, int] = {}
    for row in rows:
        reply = row.request.call_id.partition(".")[0]
        oldest[reply] = min(row.request.created_ns, oldest.get(reply, row.request.created_ns))

    def key(row: Approval) -> tuple[int, str, list[int]]:
        reply, _, position = row.request.call_id.partition(".")
        return oldest[reply], reply, [int(part) for part in position.split(".") if part.isascii() and part.isdigit()]

    return sorted(rows, key=key)


def _report_unknown_request(request_id: str) -> int:
    print_stderr_note(
        f"Request {request_id[:40]!r} does not exist in this workspace. `handrail approve` lists the open requests."
    )
    return ERROR


async def _ask(setting: CommandOptions, rows: Sequence[Approval], workspace: str) -> int:
    from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler

    approvals = sum(row.kind == "approval" for row in rows)
    terminal = TerminalApprovalHandler(workspace=workspace, waiting=approvals)
    askers = _describe_askers(setting, rows)
    code = OUTPUT
    approvals = _answer_service(setting)
    assert approvals is not None, "the rows are from its database"
    for row in rows:
        terminal.asker = askers.get(row.request.session_id, "")
        try:
            decided = await _ask_user(approvals, terminal, row)
        except ToolError as error:
            print_stderr_note(f"{error.kind}: {error}")
            code = ERROR
            continue
        if decided is not None:
            _show_decided(setting, decided)
    return code


async def _ask_user(approvals: ApprovalResponder, terminal: TerminalApprovalHandler, row: Approval) -> Approval | None:
    """Ask the user at the terminal, and return the answered request, or None if it stays open."""
    if row.kind == "question":
        print_stderr_note(
            f"{row.id}  {escape_to_one_line(row.request.tool_id)} asks a question, in session {escape_to_one_line(row.request.session_id)}"
        )
        answers = await terminal.answer_questions(row.request.session_id, row.questions)
        return None if answers is None else await approvals.answer_questions(row.id, answers, by=ANSWERED_BY)
    answer: ApprovalAnswer = await terminal.approve(row.request)
    return None if answer.choice == "defer" else await approvals.decide(row.id, answer, by=ANSWERED_BY)


async def _show(row: Approval, workspace: str, place: str, agents: Mapping[str, str]) -> None:
    from handrail.frontends.cli.renderer import TerminalRenderer
    from handrail.frontends.cli.terminal_approvals import preview_edit_diff, print_approval_request, print_user_question

    request, view = row.request, TerminalRenderer()
    if row.kind == "question":
        view.print_text(
            (f"{escape_to_one_line(request.tool_id)} asks a question", "bold yellow"), (f"  {row.id}", "dim")
        )
        for question in row.questions:
            print_user_question(view, question, indent="  ")
        several = ", once for each question" if len(row.questions) > 1 else ""
        form = "NUMBER|TEXT" if any(question.options for question in row.questions) else "TEXT"
        view.print_text(f"to answer: --answer {form}{several}", indent="  ")
    else:
        changes = await preview_edit_diff(request, workspace)
        print_approval_request(view, request, changes, place=place, asker=agents.get(request.session_id, ""))
        for options, verb, rule in _stored_rules(request):
            view.print_text(
                (options, "bold"), f" {verb} the rule  {escape_to_one_line(rule)}", indent="  ", further="      "
            )
    heading = (
        f"session {escape_to_one_line(request.session_id)}, call {escape_to_one_line(request.call_id)}, {_ages(row)}"
    )
    view.print_text((heading, "dim"), indent="  ", further="    ")
    view.write_line()


def _stored_rules(request: ApprovalRequest) -> Generator[tuple[str, str, str]]:
    """Yield the options that store a rule, each with the rule."""
    for suffix, rule in (("", request.suggested_rule), ("-wider", request.suggested_wider_rule)):
        if rule is not None:
            both = f"--session{suffix} and --project{suffix}"
            yield (f"--project{suffix}", "stores", rule) if request.is_shared else (both, "store", rule)
    if request.suggested_deny is not None:
        yield "--reject-always", "stores", request.suggested_deny


def _ages(row: Approval) -> str:
    now = time.time_ns()
    asked, left = (now - row.request.created_ns) / 1e9, (row.request.expires_ns - now) / 1e9
    return f"requested {_format_duration(asked)} ago, expires in {_format_duration(left)}"


def _format_duration(seconds: float) -> str:
    for size, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            count = round(seconds / size)
            return f"{count} {name}{'' if count == 1 else 's'}"
    return "a moment"


def _show_rules(setting: CommandOptions) -> int:
    with _open_approval_reader(setting) as (reader, _):
        rules = [] if reader is None else reader.list_rules()
    if setting.json:
        print_json([asdict(rule) for rule in rules])
    elif not rules:
        print_stderr_note("No rules are stored for this workspace.")
    else:
        for rule in rules:
            print_escaped_line(f"{rule.id}  {escape_to_one_line(rule.text)}  (from request {rule.approval_id})")
    return OUTPUT


async def _revoke(setting: CommandOptions, rule_id: str) -> int:
    if (approvals := _answer_service(setting)) is None:
        print_stderr_note(f"Rule {rule_id[:40]!r} does not exist. `handrail approve --rules` lists the stored rules.")
        return ERROR
    try:
        rule = await approvals.revoke_rule(rule_id)
    except ToolError as error:
        print_stderr_note(f"{error.kind}: {error}")
        return ERROR
    print_json(asdict(rule)) if setting.json else print_escaped_line(f"removed  {escape_to_one_line(rule.text)}")
    return OUTPUT


async def _wait_for_state(setting: CommandOptions) -> None:
    """Wait until the workspace has stored state."""
    while True:
        with _open_approval_reader(setting) as (reader, _):
            if reader is not None:
                return
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _wait_for_request(reader: ApprovalReader | None, interruption: InterruptHandler) -> None:
    """Wait until a request is open. SQLite does not notify other processes of changes, so this polls."""
    while reader is not None and not reader.list_pending_requests(time.time_ns(), limit=1):
        version = reader.data_version()
        while reader.data_version() == version:  # noqa: ASYNC110 - an event cannot cross processes
            await asyncio.sleep(_POLL_INTERVAL_S)


def _answer_service(setting: CommandOptions) -> ApprovalResponder | None:
    """Return the service that takes answers, or None if the workspace has no stored state.

    The process that holds the workspace takes them, or else the database.
    """
    from handrail.kernel.approval_client import ApprovalResponder, ApprovalWorkspaceSettings

    with _open_approval_reader(setting) as (reader, _):
        if reader is None:
            return None
    given = setting.workspace, setting.state, setting.config, setting.settings, setting.allow_home
    return ApprovalResponder(
        ApprovalWorkspaceSettings(*given, frontend="approve"),
        lambda: _open_kernel_approvals(setting),
        print_startup_warnings,
    )


@asynccontextmanager
async def _open_kernel_approvals(setting: CommandOptions) -> AsyncGenerator[ApprovalService]:
    async with open_configured_kernel(setting) as kernel:
        yield kernel.approvals


@contextmanager
def _open_approval_reader(setting: CommandOptions) -> Generator[tuple[ApprovalReader | None, str]]:
    """Open the stored requests, also while another process holds the workspace, and yield its path too.

    The reader is None if the workspace has no stored state.
    """
    from handrail.kernel.approval_client import open_approval_reader
    from handrail.store.database.sqlite_connection import DatabaseNotCreated

    folders = setting.folders
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(open_approval_reader(folders))
        except DatabaseNotCreated:
            reader = None
        yield reader, str(folders.workspace)
