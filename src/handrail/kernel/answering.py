"""The client that answers approval requests without a kernel: through the lease holder, or directly in the database.

For such a connection, the lease holder creates no context, no rules and no capability layers. Without a lease holder, this
process takes the lease for the duration of the answer, and writes it with the same code as a kernel
(:class:`~handrail.arbiter.approvals.desk.Approvals`).
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

from handrail.contract.approvals import APPROVING, Approval, ApprovalAnswer, ApprovalDesk, Choice, StoredRule
from handrail.contract.errors import StartError, ToolError, UsageError
from handrail.ipc.wire.connection import ConnectionLost
from handrail.ipc.wire.meeting import ONLY_ANSWERS, PROTOCOL, NoAnswer, NoHolder, NotLetIn, connect
from handrail.ipc.wire.operations import LEAVING, Refused
from handrail.store.database.connection import open_reader
from handrail.store.folders import Folders, locate
from handrail.store.lease import Holder, holder_of
from handrail.store.tables.approvals import ApprovalReader

if TYPE_CHECKING:
    from handrail.arbiter.approvals.desk import Approvals, Lifetimes
    from handrail.arbiter.output.redaction import Redactor
    from handrail.arbiter.output.shaper import Shaper
    from handrail.config import Configuration
    from handrail.record.log import Interrupted
    from handrail.runtime.secrets import SecretStore

_RETRY_S = 0.05
_GREETING_S = 2.0
"""The time limit for the handshake. After it, the lease is checked again: a paused process has lost it by then."""
_PATIENCE_S = 30.0
"""The maximum time to search for a process that answers."""


class Place(NamedTuple):
    """A workspace, and the configuration of the process that writes its database.

    :param config: the configuration file instead of the platform's
    :param settings: ``KEY=VALUE`` texts, which override files and variables
    :param face: the name of this process's frontend, shown to other processes
    """

    workspace: str | Path
    state: str | Path | None = None
    config: str | Path | None = None
    settings: tuple[str, ...] = ()
    allow_home: bool = False
    face: str = "library"

    @property
    def folders(self) -> Folders:
        return locate(self.workspace, self.state, allow_home=self.allow_home)


Remark = Callable[["Configuration", Iterable["Interrupted"]], None]
"""Called before the first write, to report remarks and interrupted calls to the user."""


@contextmanager
def reading(folders: Folders) -> Generator[ApprovalReader]:
    """Open a reader of the durable approval requests, even while another process holds the workspace.

    :raises NotMadeYet: if the workspace has no database yet
    """
    connection = open_reader(folders.database)
    try:
        yield ApprovalReader(connection)
    finally:
        connection.close()


class Answers:
    """A client that answers the approval requests of a workspace like ``kernel.approvals``.

    Nothing stays open between two answers.

    :param opened: opens a kernel and returns its approvals; used for answers with changed arguments if no process holds the
        workspace, because only a kernel can evaluate them
    """

    def __init__(
        self, place: Place, opened: Callable[[], AbstractAsyncContextManager[ApprovalDesk]], remark: Remark
    ) -> None:
        self._place = place
        self._folders = place.folders
        self._opened = opened
        self._remark = remark

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """Decide a request; see :meth:`handrail.contract.approvals.ApprovalDesk.decide`."""
        await self._answered(
            ("approvals.decide", {"id": approval_id, "answer": asdict(answer), "by": by}),
            lambda desk: desk.decide(approval_id, answer, by=by),
            lambda reader: _is_answer(reader.get(approval_id), answer.choice, by),
            judged=answer.arguments is not None,
        )
        return self._as_answered(approval_id)

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """Answer questions; see :meth:`handrail.contract.approvals.ApprovalDesk.answer`."""
        await self._answered(
            ("approvals.answer", {"id": approval_id, "answers": [list(one) for one in answers], "by": by}),
            lambda desk: desk.answer(approval_id, answers, by=by),
            lambda reader: _is_answer(reader.get(approval_id), None, by),
        )
        return self._as_answered(approval_id)

    async def forget_rule(self, rule_id: str) -> StoredRule:
        """Revoke a stored rule; see :meth:`handrail.contract.approvals.ApprovalDesk.forget_rule`."""
        with reading(self._folders) as reader:
            known = next((rule for rule in reader.rules() if rule.id == rule_id), None)
        await self._answered(
            ("approvals.forget", {"id": rule_id}),
            lambda desk: desk.forget_rule(rule_id),
            lambda reader: known is not None and not any(rule.id == rule_id for rule in reader.rules()),
        )
        assert known is not None, "the rule existed before it was revoked"
        return known

    def _as_answered(self, approval_id: str) -> Approval:
        """Return the answered request; its call may have started since."""
        with reading(self._folders) as reader:
            row = reader.get(approval_id)
        assert row is not None, "it was just answered"
        return replace(row, state="approved" if row.choice in APPROVING else "rejected", answered=False)

    async def _answered(
        self,
        request: tuple[str, Mapping[str, Any]],
        itself: Callable[[ApprovalDesk], Awaitable[object]],
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
        deadline, unsure = loop.time() + _PATIENCE_S, False
        while True:
            holder = holder_of(self._folders)
            try:
                if holder is None or holder.state != "alive":
                    return await self._by_this_process(itself, judged=judged)
                return await self._by_the_holder(holder, *request)
            except ToolError:
                if unsure:
                    with reading(self._folders) as reader:
                        if is_done(reader):
                            return None
                raise
            except ConnectionLost as lost:
                problem: StartError = NoHolder(str(lost))
                unsure = unsure or lost.sent
            except (NoHolder, NoAnswer) as error:
                problem = error
            except NotLetIn as error:
                if error.kind != LEAVING:
                    raise
                problem = error
            if loop.time() >= deadline:
                raise problem
            await asyncio.sleep(_RETRY_S)

    async def _by_the_holder(self, holder: Holder, op: str, body: Mapping[str, Any]) -> None:
        if self._place.settings:
            raise UsageError(
                f"Cannot set {', '.join(self._place.settings)}: {holder} holds this workspace, and its settings apply. "
                "Set it in handrail.toml."
            )
        if not holder.socket:
            from handrail.store.lease import WorkspaceHeld

            if not holder.is_brief:
                raise WorkspaceHeld(self._folders, holder)
            raise NoHolder(f"The workspace is briefly in use by {holder}. Try again.")
        connection = await connect(self._folders.own, holder.socket, hello=ONLY_ANSWERS, seconds=_GREETING_S)
        try:
            await connection.request(op, body)
        except Refused as refused:
            if refused.kind == LEAVING:
                raise NotLetIn(LEAVING, refused.text) from None
            from handrail.ipc.codec.mirror import error_of  # a large import, and most answers succeed

            raise error_of(refused) from None
        finally:
            await connection.aclose("it was answered")

    async def _by_this_process(self, itself: Callable[[ApprovalDesk], Awaitable[object]], *, judged: bool) -> None:
        from handrail.store.lease import WorkspaceHeld

        try:
            async with self._opened() if judged else _desk(self._place, self._remark) as desk:
                await itself(desk)
        except WorkspaceHeld as held:
            if held.is_writing:
                raise
            raise NoHolder(str(held)) from None  # another process was faster: check again


def _is_answer(row: Approval | None, choice: Choice | None, by: str) -> bool:
    return row is not None and not row.pending and row.decided_by == by and choice in (None, row.choice)


@asynccontextmanager
async def _desk(place: Place, remark: Remark) -> AsyncGenerator[Approvals]:
    """Hold a workspace for the duration of an answer. Other processes that open it wait meanwhile.

    :raises LoadError: with all faults of the configuration
    :raises WorkspaceHeld: if another process holds it
    :raises StartError: if the state cannot be used
    """
    from handrail import config as configuration
    from handrail.arbiter.approvals.desk import Approvals
    from handrail.arbiter.output.redaction import redacted_logs
    from handrail.kernel.agents import all_agents
    from handrail.origins import programs
    from handrail.origins.imports import opened
    from handrail.record.log import CommitLog
    from handrail.store.opening import Store
    from handrail.store.tables.approvals import ApprovalTable
    from handrail.upstream.configured import configured

    folders = place.folders
    with opened(folders.workspace):
        config = configuration.load(place.config, folders=folders, flags=place.settings)
        configuration.check_apart(config, folders.workspace)
        for one in all_agents(config, folders):  # never run a program from a folder that their calls can write
            programs.add(one.further.writable)
        redactor, known = await registered_secrets(config, {})
        configured(config, known, lambda value: learn(redactor, value))
        with redacted_logs(redactor):
            store = Store.open(
                place.workspace,
                place.state,
                face=place.face,
                allow_home=place.allow_home,
                protocol=PROTOCOL,
                engine=config.settings.state.store,
            )
            try:
                log = CommitLog(store.database)
                interrupted = await log.recover()
                remark(config, interrupted)
                with closing(shaper_of(config, folders, redactor)) as shaper:
                    desk = Approvals(ApprovalTable(store.database), log, shaper, lifetimes_of(config))
                    with closing(desk):
                        await desk.recover(interrupted)
                        yield desk
            finally:
                await store.aclose()


async def registered_secrets(config: Configuration, given: Mapping[str, str]) -> tuple[Redactor, SecretStore]:
    """Load all secrets, and redact them from now on.

    No tool receives a configured value that cannot be redacted.

    :param given: secrets that a program passed
    :raises UsageError: if a value in ``given`` cannot be redacted
    """
    from handrail.arbiter.output.redaction import redactor_of
    from handrail.config.secrets import resolve
    from handrail.kernel.agents import named_secrets

    configured = (await resolve(config.settings.secrets, os.environ)).with_settings(named_secrets(config))
    redactor = redactor_of(given)
    try:
        redactor.learn(configured.chosen(configured.names))
    except ValueError:
        for name in sorted(configured.names):
            try:
                redactor.learn(configured.chosen((name,)))
            except ValueError as error:
                configured = configured.without(name, f"its value cannot be redacted: {error}")
    return redactor, configured


def learn(redactor: Redactor, value: str) -> None:
    """Redact a value from a third-party configuration, if possible."""
    with suppress(ValueError):
        redactor.learn({f"mcp-{hashlib.sha256(value.encode()).hexdigest()[:8]}": value})


def shaper_of(config: Configuration, folders: Folders, redactor: Redactor) -> Shaper:
    """Return the shaper that formats and redacts the values of a workspace."""
    from handrail.arbiter.output.shaper import Shaper
    from handrail.arbiter.output.sidecar import SidecarRoom
    from handrail.record.artifacts import Artifacts

    room = SidecarRoom(folders.outputs, config.settings.limits.cut_output_mib * 1024 * 1024)
    return Shaper(redactor, Artifacts(folders.artifacts), folders.output, room)


def lifetimes_of(config: Configuration) -> Lifetimes:
    """Return how long approval requests and grants remain valid."""
    from handrail.arbiter.approvals.desk import HOUR_NS, Lifetimes

    approvals = config.settings.approvals
    return Lifetimes(int(approvals.request_days * 24 * HOUR_NS), int(approvals.grant_hours * HOUR_NS))
