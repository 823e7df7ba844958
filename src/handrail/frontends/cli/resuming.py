"""Taking a session up again: which one is meant, and the agent that it is one of."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.options import Setting

if TYPE_CHECKING:
    from handrail.contract.approvals import Approval
    from handrail.record.reading import LogReader
    from handrail.session.past.facts import SessionFacts, SessionReader


@contextmanager
def reading(setting: Setting) -> Generator[tuple[SessionReader, LogReader]]:
    """What is kept of the workspace, whoever holds it.

    :raises NotMadeYet: where nothing was ever kept of it
    :raises StartError: where it cannot be read
    """
    from handrail.record.reading import LogReader
    from handrail.session.past.facts import SessionReader
    from handrail.store.folders import locate
    from handrail.store.lease import Lease

    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    with LogReader.at(folders.database) as log:
        holder = Lease.holder_of(folders)
        yield SessionReader(log.connection, None if holder is None else holder.token), log


def to_resume(setting: Setting, session_id: str) -> SessionFacts:
    """The session to go on with.

    :param session_id: ``""`` for the last one that nobody has open and in which something was said
    :raises UsageError: when there is none, or it cannot go on
    """
    from handrail.store.database.connection import NotMadeYet

    try:
        with reading(setting) as (reader, _):
            found = reader.get(session_id) if session_id else reader.latest()
            if found is None and session_id:
                raise unknown(reader, session_id)
    except NotMadeYet:
        found = None
    if found is None:
        raise click.UsageError("there is no session to go on with; handrail sessions lists those there are")
    if found.state == "closed":
        raise click.UsageError(f"session {session_id} was closed for good: nothing that was said in it is kept")
    if found.under:
        raise click.UsageError(
            f"session {session_id} is a sub-agent's and does not go on by itself; begin another with what was said in it: "
            f"handrail run --fork {session_id}"
        )
    if found.state == "open":
        raise click.UsageError(
            f"session {session_id} is open elsewhere; it goes on where it is, or when that has ended"
        )
    return found


def as_its_agent(setting: Setting, session_id: str) -> Setting:
    """The same options as the agent that a session is one of, which is known and need not be named once more.

    :raises UsageError: where another agent was named
    """
    from handrail.store.database.connection import NotMadeYet

    try:
        with reading(setting) as (reader, _):
            found = reader.get(session_id)
    except NotMadeYet:
        found = None
    if found is None:  # whoever opens it says so
        return setting
    if setting.agent not in (None, found.agent):
        raise click.UsageError(
            f"session {session_id} is one of the agent {found.agent!r}, not of {setting.agent!r}; leave --agent out"
        )
    return replace(setting, agent=found.agent)


def as_its_caller(setting: Setting, approval_id: str) -> Setting:
    """The same options as the agent whose call waits, or waited, under an id.

    :raises UsageError: where another agent was named
    """
    row = asked_as(setting, approval_id)
    return setting if row is None else as_its_agent(setting, row.request.session_id)


def asked_as(setting: Setting, approval_id: str) -> Approval | None:
    """What a person is or was asked under an id; None where nothing is known by it."""
    from handrail.store.database.connection import NotMadeYet
    from handrail.store.tables.approvals import ApprovalReader

    try:
        with reading(setting) as (_, log):
            return ApprovalReader(log.connection).get(approval_id)
    except NotMadeYet:
        return None


def unknown(reader: SessionReader, session_id: str) -> click.UsageError:
    from handrail.contract.tool.names import nearest

    near = nearest(session_id, [facts.id for facts in reader.all(limit=200)], 1)
    hint = f"did you mean {near[0]}?" if near else "handrail sessions lists those there are"
    return click.UsageError(f"there is no session {session_id[:80]!r}; {hint}")
