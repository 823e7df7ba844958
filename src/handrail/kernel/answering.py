"""Answering requests to people without opening a kernel: over a connection to the process that holds the workspace, or, where
no process holds it, in the database.

A holder makes nothing for such a connection: no context, no rules, no layers of capabilities. Where there is no holder, the
answer is written by what writes it in a kernel as well (:class:`~handrail.arbiter.approvals.desk.Approvals`), under a lease
that lasts as long as that takes.
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
"""How long a holder may take to greet before it is looked at again: one that is paused has no lease by then."""
_PATIENCE_S = 30.0
"""How long to look for a process that answers."""


class Place(NamedTuple):
    """A workspace, and how a process that writes in its database is configured.

    :param config: the configuration file instead of the platform's
    :param settings: ``KEY=VALUE`` texts, stronger than files and variables
    :param face: how this process is called, for others to know it by
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
"""Called with what people should know before anything is written."""


@contextmanager
def reading(folders: Folders) -> Generator[ApprovalReader]:
    """Read what is durable of a workspace's requests, whoever holds it.

    :raises NotMadeYet: where nothing was ever kept of it
    """
    connection = open_reader(folders.database)
    try:
        yield ApprovalReader(connection)
    finally:
        connection.close()


class Answers:
    """Answers the requests of a workspace like ``kernel.approvals``. Nothing is open or held between two answers.

    :param opened: opens a kernel and gives its desk, for what only a kernel can judge: arguments that a person gave, where no
        process holds the workspace
    """

    def __init__(
        self, place: Place, opened: Callable[[], AbstractAsyncContextManager[ApprovalDesk]], remark: Remark
    ) -> None:
        self._place = place
        self._folders = place.folders
        self._opened = opened
        self._remark = remark

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        """See :meth:`handrail.contract.approvals.ApprovalDesk.decide`."""
        await self._answered(
            ("approvals.decide", {"id": approval_id, "answer": asdict(answer), "by": by}),
            lambda desk: desk.decide(approval_id, answer, by=by),
            lambda reader: _is_answer(reader.get(approval_id), answer.choice, by),
            judged=answer.arguments is not None,
        )
        return self._as_answered(approval_id)

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        """See :meth:`handrail.contract.approvals.ApprovalDesk.answer`."""
        await self._answered(
            ("approvals.answer", {"id": approval_id, "answers": [list(one) for one in answers], "by": by}),
            lambda desk: desk.answer(approval_id, answers, by=by),
            lambda reader: _is_answer(reader.get(approval_id), None, by),
        )
        return self._as_answered(approval_id)

    async def forget_rule(self, rule_id: str) -> StoredRule:
        """See :meth:`handrail.contract.approvals.ApprovalDesk.forget_rule`."""
        with reading(self._folders) as reader:
            known = next((rule for rule in reader.rules() if rule.id == rule_id), None)
        await self._answered(
            ("approvals.forget", {"id": rule_id}),
            lambda desk: desk.forget_rule(rule_id),
            lambda reader: known is not None and not any(rule.id == rule_id for rule in reader.rules()),
        )
        assert known is not None, "what is not there cannot be forgotten"
        return known

    def _as_answered(self, approval_id: str) -> Approval:
        """What was answered; its call may have begun since."""
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
        """Have one answer taken.

        :param request: asked of a holder
        :param itself: done by this process where there is no holder
        :param is_done: whether it is on record, which a holder that goes may not come to say
        :param judged: whether it takes tools and rules
        :raises StartError: when no process can be asked, and this one cannot have the workspace
        :raises HandrailError: as the request was answered
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
                f"{', '.join(self._place.settings)} cannot be set here: {holder} holds this workspace, whose settings count; "
                "set it in handrail.toml"
            )
        if not holder.socket:
            from handrail.store.lease import WorkspaceHeld

            if not holder.is_brief:
                raise WorkspaceHeld(self._folders, holder)
            raise NoHolder(f"the workspace is in use by {holder}, which is about to be done")
        connection = await connect(self._folders.own, holder.socket, hello=ONLY_ANSWERS, seconds=_GREETING_S)
        try:
            await connection.request(op, body)
        except Refused as refused:
            if refused.kind == LEAVING:
                raise NotLetIn(LEAVING, refused.text) from None
            from handrail.ipc.codec.mirror import error_of  # loads much, and most are taken

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
            raise NoHolder(str(held)) from None  # another process was faster: it is looked at again


def _is_answer(row: Approval | None, choice: Choice | None, by: str) -> bool:
    return row is not None and not row.pending and row.decided_by == by and choice in (None, row.choice)


@asynccontextmanager
async def _desk(place: Place, remark: Remark) -> AsyncGenerator[Approvals]:
    """Hold a workspace for as long as an answer takes. Others who open it meanwhile wait for that.

    :raises LoadError: with every fault of the configuration
    :raises WorkspaceHeld: when another process holds it
    :raises StartError: when the state cannot be used
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
        for one in all_agents(config, folders):  # no program is taken from where their calls can write
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
    """All that is known, redacted from now on. A configured value that cannot be is not handed to any tool either.

    :param given: secrets that a program passed
    :raises UsageError: for a value among ``given`` that cannot be redacted
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
    """Redact a value that stands in a configuration of somebody else's form, where it can be."""
    with suppress(ValueError):
        redactor.learn({f"mcp-{hashlib.sha256(value.encode()).hexdigest()[:8]}": value})


def shaper_of(config: Configuration, folders: Folders, redactor: Redactor) -> Shaper:
    """What shapes and redacts the values that are written in a workspace."""
    from handrail.arbiter.output.shaper import Shaper
    from handrail.arbiter.output.sidecar import SidecarRoom
    from handrail.record.artifacts import Artifacts

    room = SidecarRoom(folders.outputs, config.settings.limits.cut_output_mib * 1024 * 1024)
    return Shaper(redactor, Artifacts(folders.artifacts), folders.output, room)


def lifetimes_of(config: Configuration) -> Lifetimes:
    """For how long people may answer, and what they answered holds."""
    from handrail.arbiter.approvals.desk import HOUR_NS, Lifetimes

    approvals = config.settings.approvals
    return Lifetimes(int(approvals.request_days * 24 * HOUR_NS), int(approvals.grant_hours * HOUR_NS))
