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
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from handrail.contract.approvals import ApprovalAnswer, ApprovalDesk
from handrail.contract.errors import StartError, UsageError
from handrail.ipc.approvals import ONLY_ANSWERS, JoinedApprovals, handlers
from handrail.ipc.wire.connection import ConnectionLost
from handrail.ipc.wire.handshake import PROTOCOL, NoAnswer, NotLetIn
from handrail.ipc.wire.meeting import NoHolder, connect
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


def answers_in(
    place: Place, opened: Callable[[], AbstractAsyncContextManager[ApprovalDesk]], remark: Remark
) -> JoinedApprovals:
    """What waits for a person in a workspace, and the way to answer it. Nothing is open or held between two answers.

    :param opened: opens a kernel and gives its desk, for what only a kernel can judge: arguments that a person gave, where no
        process holds the workspace
    """
    return JoinedApprovals(lambda: reading(place.folders), _Answering(place, opened, remark))


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


class _Answering:
    """Has requests answered by the process that holds a workspace, or answers them in its database."""

    def __init__(
        self, place: Place, opened: Callable[[], AbstractAsyncContextManager[ApprovalDesk]], remark: Remark
    ) -> None:
        self._place = place
        self._folders = place.folders
        self._opened = opened
        self._remark = remark

    async def request(self, op: str, body: Any = None, *, repeatable: bool = False) -> Any:
        """Have one answer taken; see :data:`~handrail.ipc.approvals.ANSWERING`.

        :param repeatable: ask again also where nobody knows whether a holder that went has taken it
        :raises ConnectionLost: when the holder went after it was asked, unless that is ``repeatable``
        :raises StartError: when no process can be asked, and this one cannot have the workspace
        :raises HandrailError: as the request was answered
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE_S
        while True:
            holder = holder_of(self._folders)
            try:
                if holder is None or holder.state != "alive":
                    return await self._by_this_process(op, body)
                return await self._by_the_holder(holder, op, body)
            except ConnectionLost as lost:
                if lost.sent and not repeatable:
                    raise
                problem: StartError = NoHolder(str(lost))
            except (NoHolder, NoAnswer) as error:
                problem = error
            except NotLetIn as error:
                if error.kind != LEAVING:
                    raise
                problem = error
            if loop.time() >= deadline:
                raise problem
            await asyncio.sleep(_RETRY_S)

    async def _by_the_holder(self, holder: Holder, op: str, body: Any) -> Any:
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
            return await connection.request(op, body)
        except Refused as refused:
            if refused.kind == LEAVING:
                raise NotLetIn(LEAVING, refused.text) from None
            from handrail.ipc.codec.mirror import error_of  # loads much, and most are taken

            raise error_of(refused) from None
        finally:
            await connection.aclose("it was answered")

    async def _by_this_process(self, op: str, body: Any) -> Any:
        from handrail.store.lease import WorkspaceHeld

        given = dict(body)
        if "answer" in given:
            given["answer"] = ApprovalAnswer(**given["answer"])
        try:
            if "answer" in given and given["answer"].arguments is not None:
                async with self._opened() as whole:
                    return await handlers(whole)[op](**given)
            async with _desk(self._place, self._remark) as desk:
                return await handlers(desk)[op](**given)
        except WorkspaceHeld as held:
            if held.is_writing:
                raise
            raise NoHolder(str(held)) from None  # another process was faster: it is looked at again


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
