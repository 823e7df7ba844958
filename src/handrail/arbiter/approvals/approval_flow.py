"""Approval of one call: the request, the wait without locks or time-out, and the effect of the answer."""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from handrail.arbiter.approvals.approval_broker import (
    CHOICE_WITHOUT_RULE,
    ApprovalBroker,
    evaluate_changed_arguments,
    format_rule_for_choice,
)
from handrail.arbiter.approvals.run_file_binding import ExecutedFileFinder, explain_file_changes
from handrail.arbiter.call_locks import set_required_locks
from handrail.arbiter.call_state import Call, CallApprovals, CallRejection, Lane
from handrail.arbiter.lock_table import LockResolver
from handrail.arbiter.output.shaper import OutputShaper
from handrail.arbiter.stoppable_execution import await_deferring_cancellation
from handrail.arbiter.subagent_delegation import check_subagent_can_start
from handrail.contract.approval_requests import Approval, ApprovalAnswer, ApprovalHandler, ApprovalKind, ApprovalRequest
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.services.job_and_tool_services import DEFAULT_COMMAND, TERMINAL_START_ID, parse_key_names
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.origins.listed_paths import is_name_folding_folder
from handrail.policy import rule_suggestions
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.call_targets import CallTarget, format_command_for_message
from handrail.policy.shell import command_wrappers
from handrail.policy.shell.parser import ShellScript, parse_script
from handrail.policy.shell.risky_options import SHELLS
from handrail.policy.shell.simple_commands import ShellCommand
from handrail.record.commit_log import Record
from handrail.runtime.shell_service import (
    ENTER_KEYS,
    do_keys_submit_unknown_line,
    may_read_typed_input,
    normalise_shell_text_for_rules,
)

# Terminal input, as rules evaluate it: as shell text if a shell reads it. If the reader is unknown, a user must approve.

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
"""Shells, and programs that open one unless they are given a command."""
_SETTERS = frozenset(("set", "reset", "tset"))
_STTY_SHOWS = frozenset(("size", "speed", "-a", "--all", "-g", "--save"))
_UNFINISHED = (
    "the text is not a complete line, so the command is unknown; end it with a newline, or with enter in `keys`"
)
_ADDED = (
    "the terminal's line already contains text, which the shell reads together with this; press ctrl-c or enter first"
)
_TAKEN = (
    "the last program in the terminal may still run and read this input; check with terminal.read that the prompt is back "
    "(a shell without line editing, such as dash, does not show that)"
)
_STRUCTURE = "a terminal keeps variables, loops and here-documents between lines; send one plain command at a time"
_EDITS = "an interactive shell expands '!', a tab, and '^' at the beginning of a line"
_KEYS = "the keys may run a line that keys have edited, which is unknown here; send the line as `text`"
_LINES = "a quoted part spans several lines, so a program may read the first line and the shell the next one"
_AHEAD = "a program in one line may read the next lines before the shell does; send one line at a time"
_SETS = "the command changes how the shell or its terminal reads lines"
_FOLDER = "the command opens a file by a name that depends on the current folder of the terminal's shell"


def find_typed_command(call: Call) -> CallTarget | None:
    """Return the command that a call types into a shell, or starts a terminal with in another folder.

    Starting a terminal in a folder counts as ``cd`` followed by the command, since names depend on the folder.

    :return: None if the call runs no command, or another program than a shell reads the input
    """
    arguments = call.arguments
    assert arguments is not None
    is_folding = is_name_folding_folder(call.lane.environment.roots.workspace)
    if call.tool_id == TERMINAL_START_ID:
        folder, command = arguments.get("cwd"), str(arguments.get("command", DEFAULT_COMMAND))
        if folder is None:
            return None
        # Rules compare names of files, and a name means another file in another folder.
        whole = f"cd {shlex.quote(str(folder))} && {command}"
        script = parse_script(whole)
        return CallTarget("shell.run", command, format_command_for_message(whole), script, is_folding=is_folding)
    text, keys = str(arguments.get("text") or ""), parse_key_names(str(arguments.get("keys") or ""))
    shared, terminal_id = call.lane.environment.terminals, str(arguments.get("id"))
    terminal = shared.find(terminal_id)
    command = _find_start_command(call.lane, terminal_id) if terminal is None else terminal.command
    # The input of a program that is not a shell is not a command. The program itself was evaluated when the terminal
    # was started.
    if command is not None and not starts_interactive_shell(command):
        shared.non_shells.add(terminal_id)
        return None
    # An earlier call may have typed the beginning of this line.
    open_line = terminal is not None and terminal.line_open
    hidden = do_keys_submit_unknown_line(text, keys, open_line)
    if not text and not hidden:
        return None
    whole = text.endswith("\n") or (bool(keys) and keys[0] in ENTER_KEYS)
    taken = terminal is not None and terminal.has_uncertain_input_target
    script = (
        _parse_typed_text(text, whole=whole, added=_ADDED if open_line else _TAKEN if taken else None, hidden=hidden)
        if text
        else ShellScript((), _KEYS, is_plain=False)
    )
    shown = format_command_for_message(text or " ".join(keys))
    value = normalise_shell_text_for_rules(text, open_line=taken or hidden)
    return CallTarget("shell.run", value, shown, script, is_folding=is_folding)


def find_possible_shell_folders(call: Call) -> tuple[str | None, ...]:
    """Return the folders that the shell which a call types into may be in."""
    terminal = call.lane.environment.terminals.find(str((call.arguments or {}).get("id")))
    return () if terminal is None else terminal.process.current_folders()


def _find_start_command(lane: Lane, terminal_id: str) -> str | None:
    """Return the command of a terminal that is about to open; None if there is none."""
    for other in lane.running_calls.values():
        if other.job is not None and other.job.row.id == terminal_id:
            given = (other.arguments or {}).get("command", DEFAULT_COMMAND)
            return given if isinstance(given, str) else None
    return None


def _parse_typed_text(text: str, *, whole: bool, added: str | None, hidden: bool) -> ShellScript:
    script = parse_script(text)
    # The parser's reason comes first: it says what a model can write differently.
    if script.unclear is not None:
        return script
    unclear = (
        _STRUCTURE
        if not script.is_plain
        else added
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
        if may_read_typed_input(text.rstrip("\n").rpartition("\n")[0])
        else _SETS
        if any(map(_changes_terminal, script.commands))
        else _FOLDER
        if script.files
        else None
    )
    return script if unclear is None else replace(script, unclear=unclear, files=())


def _changes_terminal(command: ShellCommand) -> bool:
    *_, argv = command_wrappers.split_wrapper_layers(command.argv)
    program = posixpath.basename(argv[0]) if argv else ""
    return program in _SETTERS or (program == "stty" and any(word not in _STTY_SHOWS for word in argv[1:]))


@lru_cache(maxsize=256)
def starts_interactive_shell(command: str) -> bool:
    """Return whether a terminal that was started with this command reads shell commands.

    If that is unclear, the answer is yes.
    """
    script = parse_script(command)
    if script.unclear is not None or not script.is_plain:
        return True
    # Any word counts, because a shell can be an argument of a wrapper such as sudo.
    return any(posixpath.basename(word) in _SHELLS for one in script.commands for word in one.argv)


_MOST_FILES_ON_RECORD = 50
MAX_TRIES = 5
"""How many invalid argument changes an approval handler may send before the request is denied."""

EvaluateCall = Callable[[Call], PolicyVerdict]
ApplyWatchdogs = Callable[[Call, PolicyVerdict], Awaitable[PolicyVerdict]]


class CallSuspended(Exception):
    """The call is suspended until a user answers and its session is resumed; it has no outcome yet."""

    def __init__(self, approval_id: str) -> None:
        super().__init__(approval_id)
        self.approval_id = approval_id


class ApprovalFlow:
    """Obtains approvals and answers for calls.

    :param evaluate: evaluates the arguments of a call by the current rules
    :param apply_watchdogs: applies the watchdogs to a verdict
    """

    def __init__(
        self,
        broker: ApprovalBroker,
        shaper: OutputShaper,
        lock_resolver: LockResolver,
        evaluate: EvaluateCall,
        apply_watchdogs: ApplyWatchdogs,
    ) -> None:
        self.broker = broker
        self._shaper = shaper
        self._lock_resolver = lock_resolver
        self._evaluate = evaluate
        self._apply_watchdogs = apply_watchdogs

    # ── may it run? ──────────────────────────────────────────────────────────────────────────────

    async def request_permission(self, call: Call) -> None:
        """Obtain approval for ``call``, or apply the answer that an earlier process received.

        :raises CallRejection: if the answer is no, or the session has no user to ask
        :raises CallSuspended: if no user can answer now
        """
        assert call.verdict is not None
        call.copy_arguments()
        if (row := self._find_earlier_request(call, "approval")) is None:
            self._check_askable(call)
            row = await self._store_request_with_records(
                call, self._create_request(call, await self._find_run_files(call))
            )
        if row.is_pending:
            row = await self._wait_for_decision(call, row, self.ask_approval_handler)
        await self._apply_decision(call, row)
        call.queue_log_record("authorised", self._authorised_body(row))
        call.emit("approved", {"choice": row.choice, "approval": row.id})

    async def enforce_earlier_rejection(self, call: Call) -> None:
        """Apply an earlier rejection although the current rules allow the call.

        :raises CallRejection: ``denied``
        """
        row = self._find_earlier_request(call, "approval")
        # A rule may allow the call by now, but the user rejected exactly this call.
        if row is not None and not row.is_pending:
            await self._apply_decision(call, row)

    def _check_askable(self, call: Call) -> None:
        assert call.verdict is not None
        reason = call.verdict.reason
        # The user sees the request of a call, not the tool behind it. A question about a call within it would have no
        # context.
        if call.parent is not None:
            text = (
                f"{reason} A call that a tool makes cannot ask the user, so it is denied. Ask the user to add a rule that "
                "allows it."
            )
            raise CallRejection("authorise", "denied", text)
        if call.lane.approval_handler is None:
            raise CallRejection(
                "authorise",
                "denied",
                f"{reason} This session has no user to ask, so the call is denied. Continue without it and report what you "
                "could not run.",
            )

    async def _find_run_files(self, call: Call) -> Mapping[str, str]:
        """Return the workspace files that the call runs, with their present state.

        :raises CallRejection: if the command names too many files
        """
        if not _may_run_workspace_files(call):
            return {}  # without a wait, so that the requests of one reply keep its order
        try:
            # Reading and hashing the files can take long, so a thread does it.
            return await call.await_interruptible("authorise", lambda: asyncio.to_thread(self._run_files, call))
        except ToolError as error:
            raise CallRejection("authorise", error.kind, error.text) from None

    def _run_files(self, call: Call) -> Mapping[str, str]:
        assert call.verdict is not None and call.entry is not None and call.arguments is not None
        around, text = call.lane.environment, self._shaper.redactor.redact_text
        folders = find_possible_shell_folders(call) if call.entry.tool.types_input else ()
        found = ExecutedFileFinder(around.roots, around.scratch).fingerprint_executed_files(
            call.verdict.targets, call.arguments, folders
        )
        return {text(path): mark for path, mark in found.items()}

    async def check_approved_files_unchanged(self, call: Call) -> None:
        """Check that the files which the call runs are the same as when the user approved it.

        :raises CallRejection: ``conflict``
        """
        for row in call.approvals.granted:
            if row.kind != "approval":
                continue
            approved = row.request.files if row.changed_arguments is None else row.changed_files or {}
            if not approved and not _may_run_workspace_files(call):
                continue
            # The user approved a command together with the files that it runs. Another call may have changed them
            # since.
            now = await call.await_interruptible("intend", lambda: asyncio.to_thread(self._run_files, call))
            if (fault := explain_file_changes(approved, now)) is not None:
                raise CallRejection("intend", "conflict", fault)

    def _create_request(self, call: Call, files: Mapping[str, str]) -> Approval:
        assert call.verdict is not None
        # The three rules are computed when the user is asked, so a stored rule is always one that the user has seen.
        always, never, wider = (
            one(call.verdict)
            for one in (
                rule_suggestions.suggest_rule,
                rule_suggestions.suggest_exact_deny_rule,
                rule_suggestions.suggest_wider_rule,
            )
        )
        targets = (
            self._shaper.redact_to_json(f"{target.capability} {target.shown}") for target in call.verdict.targets
        )
        return self.broker.create_unstored_request(
            replace(
                self.build_approval_request(call),
                reason=self._shaper.redact_to_json(call.verdict.reason),
                suggested_rule=self._rule_without_secrets(always),
                suggested_deny=self._rule_without_secrets(never),
                suggested_wider_rule=self._rule_without_secrets(wider),
                targets=tuple(targets),
                files=files,
                concerns=tuple(map(self._shaper.redact_to_json, rule_suggestions.list_approval_reasons(call.verdict))),
            )
        )

    def _rule_without_secrets(self, rule: str | None) -> str | None:
        """Return the rule, or None if it contains a secret: rules are stored and shown in full."""
        return rule if rule is None or self._shaper.redact_to_json(rule) == rule else None

    def build_approval_request(self, call: Call) -> ApprovalRequest:
        """Build the request of a call.

        The shown arguments are a redacted copy. The hash covers the arguments that run.
        """
        assert call.entry is not None and call.arguments is not None
        return ApprovalRequest(
            call_id=call.id,
            session_id=call.lane.session_id,
            tool_id=call.entry.spec.id,
            arguments=self._shaper.redact_to_json(call.arguments),
            arguments_hash=self._shaper.hash_canonical_json(call.arguments),
            definition_hash=call.entry.definition_hash,
            reason="",
            origin=call.lane.origin,
            is_shared=bool(getattr(call.lane.approval_handler, "is_shared", False)),
        )

    async def _store_request_with_records(self, call: Call, asked: Approval) -> Approval:
        """Make the request durable, with the records of the call so far."""
        request = asked.request
        fields: dict[str, Any] = {
            "approval_id": asked.id,
            "reason": request.reason,
            "arguments_hash": request.arguments_hash,
            "suggested_rule": request.suggested_rule,
            "suggested_wider_rule": request.suggested_wider_rule,
        }
        # The record shows a part. The request in the database has all files.
        if request.files:
            fields["files"] = dict(islice(request.files.items(), _MOST_FILES_ON_RECORD))
        if asked.kind == "question":
            fields = {"approval_id": asked.id, "kind": asked.kind, "arguments_hash": request.arguments_hash}
        call.queue_log_record("approval-requested", fields)
        records, call.records = call.records, []
        # Redacted arguments cannot be run again, so a later process must know whether these are complete.
        whole = request.arguments == call.arguments
        try:
            await await_deferring_cancellation(
                self.broker.store_request_with_records(asked, records, whole=whole), call.execution
            )
        except ToolError as error:
            call.records = records[:-1]  # the request was not created
            raise CallRejection("authorise", error.kind, error.text) from None
        call.approvals = call.approvals._replace(requests=(*call.approvals.requests, asked))
        call.emit(
            "approval-requested",
            {"reason": request.reason, "suggested_rule": request.suggested_rule, "approval_id": asked.id},
        )
        return asked

    def _find_earlier_request(self, call: Call, kind: ApprovalKind) -> Approval | None:
        """Return the request that an earlier attempt at this call created; None if there is none.

        :raises CallRejection: ``conflict`` if the call differs from the request
        """
        if not call.resumed and not call.replayable:
            return None
        rows = self.broker.list_requests_of_call(call.lane.session_id, call.id)
        call.approvals = call.approvals._replace(requests=tuple(rows))
        row = next((row for row in rows if row.kind == kind), None)
        if row is None:
            return None
        assert call.entry is not None
        request, tool = row.request, call.entry.spec.id
        # The user approved what the tool did at that time. A new definition needs a new answer.
        if call.entry.definition_hash != request.definition_hash:
            why = (
                f"The definition of `{tool}` has changed since request {row.id}. Nothing was run. Make the call again."
            )
            raise CallRejection("authorise", "conflict", why)
        # A replayed call could otherwise use an approval for other arguments.
        if self._shaper.hash_canonical_json(call.arguments) != request.arguments_hash:
            why = f"The arguments of this call differ from those of request {row.id}. Nothing was run. Make the call again."
            raise CallRejection("authorise", "conflict", why)
        return row

    # ── the wait ─────────────────────────────────────────────────────────────────────────────────

    async def _wait_for_decision(
        self, call: Call, row: Approval, ask: Callable[[Call, ApprovalHandler, Approval], Awaitable[Approval | None]]
    ) -> Approval:
        """Wait for the first answer, from the approval handler or any other frontend.

        :raises CallSuspended: if no user can answer now, or the process ends
        :raises CallRejection: if the call was stopped, or its frontend cannot ask
        """
        if (attendant := call.lane.approval_handler) is None:
            raise CallSuspended(row.id)

        async def first() -> Approval | None:
            arrival = self.broker.register_decision_waiter(
                row, lambda asked, given: self._evaluate_changed(call, given), call
            )
            asking = asyncio.ensure_future(ask(call, attendant, row))
            try:
                await asyncio.wait((arrival, asking), return_when=asyncio.FIRST_COMPLETED)
                # If both are done, the stored decision counts: every frontend has seen that one.
                return arrival.result() if arrival.done() else asking.result()
            finally:
                self.broker.remove_decision_waiter(row.id)
                if not asking.done():
                    asking.cancel()
                    await asyncio.wait((asking,), timeout=call.execution.grace_s)
                elif not asking.cancelled():
                    asking.exception()  # retrieved, since another frontend answered

        try:
            decided = await call.await_interruptible("authorise", first)
        except CallRejection:
            # The request stays open over a restart, so the call is suspended instead of rejected.
            if call.execution.reason == "shutdown":
                raise CallSuspended(row.id) from None
            raise
        except LogUnavailable:
            raise
        except Exception as error:
            text = self._shaper.redact_to_json(str(error))[:300]  # redacted first: part of a secret would not be found
            error_text = error.text if isinstance(error, ToolError) else f"{type(error).__name__}: {text}"
            why = row.request.reason or f"`{call.tool_id}` asks a question."
            raise CallRejection(
                "authorise",
                "denied",
                f"{why} The user could not be asked ({error_text}), so the call is denied. Continue without it.",
            ) from None
        if decided is None:
            raise CallSuspended(row.id)
        return decided

    async def ask_approval_handler(self, call: Call, attendant: ApprovalHandler, row: Approval) -> Approval | None:
        """Return the decision of the approval handler; None if no user can answer now."""
        request = replace(row.request, arguments=self._shaper.redact_to_json(row.request.arguments))
        for _ in range(MAX_TRIES):
            answer = cast("object", await attendant.approve(request))
            if not isinstance(answer, ApprovalAnswer):
                raise TypeError(f"The approval handler returned a {type(answer).__name__}. Expected an ApprovalAnswer.")
            if answer.choice == "defer":
                return None
            if (narrowed := CHOICE_WITHOUT_RULE.get(answer.choice)) is not None and format_rule_for_choice(
                request, answer.choice
            ) is None:
                answer = replace(answer, choice=narrowed)
            try:
                return await self.broker.decide(row.id, answer, by="approval_handler")
            except ToolError as error:
                # Another frontend answered first, or the request expired.
                if error.kind == "conflict":
                    return await self._reload_request(row)
                # Without changed arguments, asking again would give the same error.
                if answer.arguments is None:
                    raise
                request = replace(request, reason=f"{row.request.reason}\nThese arguments are invalid: {error}")
        raise ToolError(
            f"The changed arguments were invalid {MAX_TRIES} times, so the call is not run. Make the call again.",
            kind="invalid_input",
        )

    async def _reload_request(self, row: Approval) -> Approval:
        """Return the current row after another answer or the expiry came first."""
        await self.broker.expire_overdue_requests()
        return self.broker.get(row.id)

    def _evaluate_changed(self, call: Call, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Evaluate arguments that a user changed, and return the files that a call with them runs."""
        assert call.entry is not None
        lane = call.lane
        evaluate_changed_arguments(call.entry, given, lane.authority, lane.rules, lane.environment.roots)
        # A copy: the arguments of the call change only after the answer is stored.
        changed = copy(call)
        changed.arguments = call.entry.validate_arguments(dict(given))
        changed.verdict = self._evaluate(changed)
        return self._run_files(changed)

    # ── what was answered ────────────────────────────────────────────────────────────────────────

    async def _apply_decision(self, call: Call, row: Approval) -> None:
        """Apply the answer to the call. An approval answers *ask*; it does not override *deny*.

        :raises CallRejection: if the answer is no, or a current rule denies the call
        """
        lane = call.lane
        if row.state != "approved":
            raise self._make_refusal(call, row)
        if row.changed_arguments is not None:
            await self._use_changed_arguments(call, row.changed_arguments)
        # A deny rule that was added during the wait is stronger than the approval.
        elif call.rules is not lane.rules and (verdict := self._evaluate(call)).action == "deny":
            raise CallRejection("authorise", "denied", verdict.reason)
        call.rules = lane.rules
        call.approvals = call.approvals._replace(granted=(*call.approvals.granted, row))

    async def _use_changed_arguments(self, call: Call, changed: Mapping[str, Any]) -> None:
        """Use the arguments that the user changed, and repeat steps 2 and 3 for them."""
        assert call.entry is not None
        try:
            call.arguments, call.owns_arguments = call.entry.validate_arguments(dict(changed)), True
        except ToolError as error:
            raise CallRejection("validate", error.kind, error.text) from None
        set_required_locks(call, self._lock_resolver)
        check_subagent_can_start(call)
        # The watchdogs saw other arguments. Their answer does not cover these.
        verdict = await self._apply_watchdogs(call, self._evaluate(call))
        if verdict.action == "deny":
            raise CallRejection("authorise", "denied", verdict.reason)
        call.verdict = verdict

    def _make_refusal(self, call: Call, row: Approval) -> CallRejection:
        message = f": {row.message}" if row.message else ". Do not try it another way."
        stopped = f": {row.message}" if row.message else ". Nothing was run."
        if row.choice == "stop" and row.state == "rejected":
            self.broker.stop_session_of_request(row, call.lane)
            return CallRejection(
                "authorise",
                "cancelled",
                f"The user stopped this session{stopped}",
                stopped_by="user",
                session_stopped=True,
            )
        if row.state == "rejected":
            text = f"The user rejected this call{message}"
            if row.kind == "question":
                text = (
                    f"The user did not answer{f': {row.message}' if row.message else '. Continue without the answer.'}"
                )
            return CallRejection("authorise", "denied", text)
        if row.state == "expired":
            text = f"Request {row.id} expired without an answer, so the call is denied. Nothing was run. Continue without it."
            return CallRejection("authorise", "denied", text)
        if row.state == "withdrawn":
            text = f"Request {row.id} was withdrawn. Nothing was run."
            return CallRejection("authorise", "cancelled", text, stopped_by="user")
        text = (
            f"Approval {row.id} is already {row.state} and is valid for one run. Nothing was run. Make the call again."
        )
        return CallRejection("authorise", "conflict", text)

    def _authorised_body(self, row: Approval) -> dict[str, Any]:
        fields = {
            "by": "person",
            "choice": row.choice,
            "approval": row.id,
            "arguments_hash": row.request.arguments_hash,
        }
        return fields if row.changed_arguments_hash is None else {**fields, "changed_hash": row.changed_arguments_hash}

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    async def ask_questions_before_run(self, call: Call) -> None:
        """Ask the questions of the tool before it runs, and keep the answers for it.

        :raises CallRejection: if a user declined, or the tool rejects these arguments
        :raises CallSuspended: if no user can answer now
        """
        assert call.entry is not None and call.arguments is not None
        call.copy_arguments()
        try:
            given = call.entry.tool.questions(call.arguments)
            # A tool may have to read its state before it knows what to ask.
            if isinstance(given, Awaitable):
                waits = given
                given = cast("Sequence[UserQuestion]", await call.await_interruptible("authorise", lambda: waits))
            asked = tuple(given)
        except ToolError as error:
            raise CallRejection("authorise", error.kind, error.text) from None
        if not asked:
            return
        if (row := self._find_earlier_request(call, "question")) is None:
            row = await self._store_request_with_records(
                call,
                self.broker.create_unstored_request(
                    self.build_approval_request(call), kind="question", questions=asked
                ),
            )
        if row.is_pending:
            row = await self._wait_for_decision(call, row, self._request_answers)
        if row.state != "approved":
            raise self._make_refusal(call, row)
        call.approvals = call.approvals._replace(granted=(*call.approvals.granted, row), answers=(asked, row.answers))

    async def _request_answers(self, call: Call, attendant: ApprovalHandler, row: Approval) -> Approval | None:
        if (answers := await attendant.answer_questions(call.lane.session_id, row.questions)) is None:
            return None
        try:
            return await self.broker.answer_questions(row.id, answers, by="approval_handler")
        except ToolError as error:
            if error.kind == "conflict":
                return await self._reload_request(row)
            raise

    async def ask_questions_during_run(self, call: Call, questions: Sequence[UserQuestion]) -> list[list[str]]:
        """Ask questions for a running tool. Any frontend can answer; the request ends with the call.

        :raises ToolError: ``unavailable`` if no user can answer now, ``denied`` if the user declined
        """
        attendant = call.lane.approval_handler
        assert attendant is not None
        asked = self.broker.create_unstored_request(
            self.build_approval_request(call), kind="question", questions=questions
        )
        records, call.records = call.records, []
        call_record = Record(
            "approval-requested", call.lane.session_id, call.id, {"approval_id": asked.id, "kind": asked.kind}
        )
        await self.broker.store_request_with_records(asked, [*records, call_record], whole=False)
        call.emit("approval-requested", {"reason": "", "suggested_rule": None, "approval_id": asked.id})
        arrival = self.broker.register_decision_waiter(asked, call=call)
        asking = asyncio.ensure_future(self._request_answers(call, attendant, asked))
        try:
            await asyncio.wait((arrival, asking), return_when=asyncio.FIRST_COMPLETED)
            row = arrival.result() if arrival.done() else asking.result()
        except BaseException:
            self.broker.withdraw(asked)
            raise
        finally:
            self.broker.remove_decision_waiter(asked.id)
            asking.cancel()
        # The answer is used up at once, since the tool runs already and cannot be resumed.
        if row is not None and row.state == "approved":
            await self.broker.consume_approvals((row,), ())
        else:
            self.broker.withdraw(row or asked)
        if row is None:
            raise ToolError(
                "No user can answer now, and a running tool cannot wait. Repeat the call when the user is available.",
                kind="unavailable",
            )
        if row.state != "approved":
            raise ToolError(self._make_refusal(call, row).text, kind="denied")
        return [list(answer) for answer in row.answers]

    # ── when the call starts or is answered ──────────────────────────────────────────────────────

    @staticmethod
    def check_definition_unchanged(call: Call) -> None:
        """Check that the tool is still defined as it was when the user approved the call.

        :raises CallRejection: ``conflict``
        """
        assert call.entry is not None
        # The generation may have changed while the call waited for its locks.
        now = call.lane.current_generation().resolve_tool_name(call.entry.id)
        if now is None or now.definition_hash != call.entry.definition_hash:
            why = f"The definition of `{call.tool_id}` has changed since this call was approved. Nothing was run. Make the call again."
            raise CallRejection("intend", "conflict", why)

    async def consume_approvals(self, call: Call, records: Sequence[Record]) -> None:
        """Use up the granted requests, together with the record of the call's intent; see :meth:`ApprovalBroker.consume_approvals`."""
        asked, granted, answers = call.approvals
        await self.broker.consume_approvals(granted, records)
        used = {row.id for row in granted}
        self.withdraw_unused_requests(row for row in asked if row.id not in used)  # a rule has answered these meanwhile
        call.approvals = CallApprovals(answers=answers)

    def withdraw_unused_requests(self, rows: Iterable[Approval]) -> None:
        """Withdraw requests whose call was answered without using them."""
        for row in rows:
            self.broker.withdraw(row)


def _may_run_workspace_files(call: Call) -> bool:
    """Return whether a call runs or types a command, and so may run files of the workspace."""
    assert call.verdict is not None and call.entry is not None
    return call.entry.tool.types_input or any(target.capability == "shell.run" for target in call.verdict.targets)
