"""The client that answers approval requests without a kernel: through the lease holder, or directly in the database.

For such a connection, the lease holder creates no context, no rules and no capability layers. Without a lease holder, this
process takes the lease for the duration of the answer, and writes it with the same code as a kernel
(:class:`~handrail.arbiter.approvals.approval_broker.ApprovalBroker`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from handrail.contract.approval_requests import (
    APPROVING_CHOICES,
    Approval,
    ApprovalAnswer,
    ApprovalChoice,
    ApprovalService,
    StoredProjectRule,
)
from handrail.contract.errors import StartError, ToolError, UsageError
from handrail.ipc.wire.operation_dispatch import LEAVING, RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost
from handrail.ipc.wire.socket_handshake import (
    CONTROL_GREETING,
    PROTOCOL_VERSION,
    ConnectionRejected,
    LeaseHolderNotResponding,
    NoLeaseHolder,
    connect_to_lease_holder,
)
from handrail.origins import program_lookup
from handrail.origins.import_guard import check_and_guard_workspace
from handrail.store.database.sqlite_connection import open_reader
from handrail.store.lease import LeaseHolder, WorkspaceAlreadyHeld, find_lease_holder
from handrail.store.state_folders import StateFolders, locate_folders
from handrail.store.tables.approval_tables import ApprovalReader, ApprovalTable

if TYPE_CHECKING:
    from handrail.arbiter.approvals.approval_broker import ApprovalBroker, ApprovalLifetimes
    from handrail.arbiter.output.secret_redaction import SecretRedactor
    from handrail.arbiter.output.shaper import OutputShaper
    from handrail.config import MergedConfiguration
    from handrail.record.commit_log import InterruptedCall
    from handrail.runtime.secret_store import SecretStore

_RETRY_S = 0.05
_GREETING_TIMEOUT_S = 2.0
"""The time limit for the handshake. After it, the lease is checked again: a paused process has lost it by then."""
_SEARCH_TIMEOUT_S = 30.0
"""The maximum time to search for a process that answers."""


class ApprovalWorkspaceSettings(NamedTuple):
    """A workspace, and the configuration of the process that writes its database.

    :param config: the configuration file instead of the platform's
    :param settings: ``KEY=VALUE`` texts, which override files and variables
    :param frontend: the name of this process's frontend, shown to other processes
    """

    workspace: str | Path
    state: str | Path | None = None
    config: str | Path | None = None
    settings: tuple[str, ...] = ()
    allow_home: bool = False
    frontend: str = "library"

    @property
    def folders(self) -> StateFolders:
        return locate_folders(self.workspace, self.state, allow_home=self.allow_home)


RemarkHandler = Callable[["MergedConfiguration", Iterable["InterruptedCall"]], None]
"""Called before the first write, to report remarks and interrupted calls to the user."""


@contextmanager
def open_approval_reader(folders: StateFolders) -> Generator[ApprovalReader]:
    """Open a reader of the durable approval requests, even while another process holds the workspace.

    :raises DatabaseNotCreated: if the workspace has no database yet
    """
    with closing(open_reader(folders.database_file)) as connection:
        yield ApprovalReader(connection)


class ApprovalResponder:
    """A client that answers the approval requests of a workspace like ``kernel.approvals``.

    Nothing stays open between two answers.

    :param open_kernel: opens a kernel and returns its approvals; used for answers with changed arguments if no process holds the
        workspace, because only a kernel can evaluate them
    """

    def __init__(
        self,
        options: ApprovalWorkspaceSettings,
        open_kernel: Callable[[], AbstractAsyncContextManager[ApprovalService]],
        remark: RemarkHandler,
    ) -> None:
        self._options = options
        self._folders = options.folders
        self._open_kernel = open_kernel
        self._remark = remark

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """Decide a request; see :meth:`handrail.contract.approval_requests.ApprovalService.decide`."""
        await self._submit_one_answer(
            ("approvals.decide", {"id": approval_id, "answer": asdict(answer), "by": by}),
            lambda desk: desk.decide(approval_id, answer, by=by),
            lambda reader: _is_answer(reader.get(approval_id), answer.choice, by),
            judged=answer.arguments is not None,
        )
        return self._read_answered_request(approval_id)

    async def answer_questions(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """Answer questions; see :meth:`handrail.contract.approval_requests.ApprovalService.answer_questions`."""
        await self._submit_one_answer(
            ("approvals.answer", {"id": approval_id, "answers": [list(one) for one in answers], "by": by}),
            lambda desk: desk.answer_questions(approval_id, answers, by=by),
            lambda reader: _is_answer(reader.get(approval_id), None, by),
        )
        return self._read_answered_request(approval_id)

    async def revoke_rule(self, rule_id: str) -> StoredProjectRule:
        """Revoke a stored rule; see :meth:`handrail.contract.approval_requests.ApprovalService.revoke_rule`."""
        with open_approval_reader(self._folders) as reader:
            known = next((rule for rule in reader.list_rules() if rule.id == rule_id), None)
        await self._submit_one_answer(
            ("approvals.forget", {"id": rule_id}),
            lambda desk: desk.revoke_rule(rule_id),
            lambda reader: known is not None and not any(rule.id == rule_id for rule in reader.list_rules()),
        )
        assert known is not None, "the rule existed before it was revoked"
        return known

    def _read_answered_request(self, approval_id: str) -> Approval:
        """Return the answered request; its call may have started since."""
        with open_approval_reader(self._folders) as reader:
            row = reader.get(approval_id)
        assert row is not None, "it was just answered"
        return replace(row, state="approved" if row.choice in APPROVING_CHOICES else "rejected", is_answered=False)

    async def _submit_one_answer(
        self,
        request: tuple[str, Mapping[str, Any]],
        itself: Callable[[ApprovalService], Awaitable[object]],
        is_done: Callable[[ApprovalReader], bool],
        *,
        judged: bool = False,
    ) -> None:
        """Submit one answer.

        :param request: the request to a lease holder
        :param itself: submits the answer in this process, if there is no lease holder
        :param is_done: returns whether the answer is recorded, in case the lease holder disconnects before it confirms
        :param judged: whether the answer needs an evaluation with tools and rules
        :raises StartError: if no process answers, and this one cannot take the workspace
        :raises HandrailError: the error of the request
        """
        loop = asyncio.get_running_loop()
        deadline, unsure = loop.time() + _SEARCH_TIMEOUT_S, False
        while True:
            holder = find_lease_holder(self._folders)
            try:
                if holder is None or holder.state != "alive":
                    return await self._submit_locally(itself, judged=judged)
                return await self._submit_to_holder(holder, *request)
            except ToolError:
                if unsure:
                    with open_approval_reader(self._folders) as reader:
                        if is_done(reader):
                            return None
                raise
            except ConnectionLost as lost:
                problem: StartError = NoLeaseHolder(str(lost))
                unsure = unsure or lost.sent
            except (NoLeaseHolder, LeaseHolderNotResponding) as error:
                problem = error
            except ConnectionRejected as error:
                if error.kind != LEAVING:
                    raise
                problem = error
            if loop.time() >= deadline:
                raise problem
            await asyncio.sleep(_RETRY_S)

    async def _submit_to_holder(self, holder: LeaseHolder, op: str, body: Mapping[str, Any]) -> None:
        if self._options.settings:
            raise UsageError(
                f"Cannot set {', '.join(self._options.settings)}: {holder} holds this workspace, and its settings apply. "
                "Set it in handrail.toml."
            )
        await send_lease_holder_request(self._folders, holder, op, body)

    async def _submit_locally(self, itself: Callable[[ApprovalService], Awaitable[object]], *, judged: bool) -> None:
        try:
            async with (
                self._open_kernel() if judged else _hold_workspace_for_answer(self._options, self._remark) as desk
            ):
                await itself(desk)
        except WorkspaceAlreadyHeld as held:
            if held.is_writing:
                raise
            raise NoLeaseHolder(str(held)) from None  # another process was faster: check again


async def send_lease_holder_request(
    folders: StateFolders, holder: LeaseHolder, op: str, body: Mapping[str, Any]
) -> Any:
    """Send one request to the process that holds a workspace, and return its answer.

    :raises WorkspaceAlreadyHeld: if other processes cannot connect to it
    :raises StartError: if it does not answer
    :raises HandrailError: the error of the request
    """
    if not holder.socket:
        if not holder.is_short_lived:
            raise WorkspaceAlreadyHeld(folders, holder)
        raise NoLeaseHolder(f"The workspace is briefly in use by {holder}. Try again.")
    connection = await connect_to_lease_holder(
        folders.workspace_state_folder, holder.socket, hello=CONTROL_GREETING, seconds=_GREETING_TIMEOUT_S
    )
    try:
        return await connection.request(op, body)
    except RemoteRequestError as refused:
        if refused.kind == LEAVING:
            raise ConnectionRejected(LEAVING, refused.text) from None
        from handrail.ipc.codec.wire_encoding import restore_error  # a large import, and most answers succeed

        raise restore_error(refused) from None
    finally:
        await connection.aclose("it was answered")


def _is_answer(row: Approval | None, choice: ApprovalChoice | None, by: str) -> bool:
    return row is not None and not row.is_pending and row.decided_by == by and choice in (None, row.choice)


@asynccontextmanager
async def _hold_workspace_for_answer(
    place: ApprovalWorkspaceSettings, remark: RemarkHandler
) -> AsyncGenerator[ApprovalBroker]:
    """Hold a workspace for the duration of an answer. Other processes that open it wait meanwhile.

    :raises LoadError: with all faults of the configuration
    :raises WorkspaceAlreadyHeld: if another process holds it
    :raises StartError: if the state cannot be used
    """
    from handrail import config as configuration
    from handrail.arbiter.approvals.approval_broker import ApprovalBroker
    from handrail.arbiter.output.secret_redaction import redact_logs
    from handrail.kernel.agent_loading import iterate_agents
    from handrail.record.commit_log import CommitLog
    from handrail.store.workspace_store import WorkspaceStore
    from handrail.upstream.server_config_loader import load_enabled_servers

    folders = place.folders
    with check_and_guard_workspace(folders.workspace):
        config = configuration.load_configuration(place.config, folders=folders, flags=place.settings)
        configuration.check_outside_workspace(config, folders.workspace)
        for one in iterate_agents(config, folders):  # never run a program from a folder that their calls can write
            program_lookup.register_workspaces_until_exit(one.further_roots.writable)
        redactor, known = await load_secrets_for_redaction(config, {})
        load_enabled_servers(config, known, lambda value: register_value_for_redaction(redactor, value))
        with redact_logs(redactor):
            store = WorkspaceStore.open(
                place.workspace,
                place.state,
                frontend=place.frontend,
                allow_home=place.allow_home,
                protocol=PROTOCOL_VERSION,
                engine=config.settings.state.store,
            )
            try:
                log = CommitLog(store.database)
                interrupted = await log.record_interrupted_calls()
                remark(config, interrupted)
                with closing(make_output_shaper(config, folders, redactor)) as shaper:
                    desk = ApprovalBroker(ApprovalTable(store.database), log, shaper, make_approval_lifetimes(config))
                    with closing(desk):
                        await desk.withdraw_interrupted_requests(interrupted)
                        yield desk
            finally:
                await store.aclose()


async def load_secrets_for_redaction(
    config: MergedConfiguration, given: Mapping[str, str]
) -> tuple[SecretRedactor, SecretStore]:
    """Load all secrets, and redact them from now on.

    No tool receives a configured value that cannot be redacted, except an ordinary short word, which is never redacted.

    :param given: secrets that a program passed
    :raises UsageError: if a value in ``given`` cannot be redacted
    """
    from handrail.arbiter.output.secret_redaction import create_redactor
    from handrail.config.secret_detection import is_ordinary_value
    from handrail.config.secret_references import resolve_secrets
    from handrail.kernel.agent_loading import map_settings_to_secrets

    configured = (await resolve_secrets(config.settings.secrets, os.environ)).with_secret_settings(
        map_settings_to_secrets(config)
    )
    redactor = create_redactor(given)
    values = configured.select(configured.names)
    values = {name: value for name, value in values.items() if not is_ordinary_value(value)}
    try:
        redactor.register_secrets(values)
    except ValueError:
        for name in sorted(values):
            try:
                redactor.register_secrets({name: values[name]})
            except ValueError as error:
                configured = configured.with_missing_secret(name, f"its value cannot be redacted: {error}")
    return redactor, configured


def register_value_for_redaction(redactor: SecretRedactor, value: str) -> None:
    """Redact a value from a third-party configuration, if possible and unless it is an ordinary word."""
    from handrail.config.secret_detection import is_ordinary_value

    if is_ordinary_value(value):
        return
    with suppress(ValueError):
        redactor.register_secrets({f"mcp-{hashlib.sha256(value.encode()).hexdigest()[:8]}": value})


def make_output_shaper(config: MergedConfiguration, folders: StateFolders, redactor: SecretRedactor) -> OutputShaper:
    """Return the shaper that formats and redacts the values of a workspace."""
    from handrail.arbiter.output.output_files import OutputFileQuota
    from handrail.arbiter.output.shaper import OutputShaper
    from handrail.record.artifacts import ArtifactStore

    room = OutputFileQuota(folders.session_outputs_folder, config.settings.limits.output_files_mib * 1024 * 1024)
    return OutputShaper(redactor, ArtifactStore(folders.artifact_folder), folders.prepare_session_output, room)


def make_approval_lifetimes(config: MergedConfiguration) -> ApprovalLifetimes:
    """Return how long approval requests and grants remain valid."""
    from handrail.arbiter.approvals.approval_broker import HOUR_NS, ApprovalLifetimes

    approvals = config.settings.approvals
    return ApprovalLifetimes(int(approvals.request_days * 24 * HOUR_NS), int(approvals.grant_hours * HOUR_NS))
