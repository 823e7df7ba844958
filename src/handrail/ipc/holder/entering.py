"""A session that a process which joined has opened, as that process is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from handrail.arbiter.call import Call
from handrail.contract.doors.agents import Delegation
from handrail.contract.session import Child
from handrail.ipc.codec import mirror
from handrail.ipc.holder.host import Host
from handrail.ipc.wire.framing import Message
from handrail.session.context import Context
from handrail.session.session import HeldSession, Under


def told_of(session: HeldSession, context: Context, *, own: bool) -> Message:
    """
    :param own: its agent is that of the process, whose tools are told already
    """
    catalog = session.catalog
    told: Message = {
        "turns": session.turns,
        "catalog": mirror.of_catalog_options(catalog.options),
        "brought": list(catalog.active.steps()),
        "native": ruled_in(session),
        "skills": [asdict(skill) for skill in session.skills],
        "agents": [[one.id, one.description] for one in session.agents],
    }
    return told if own else told | {"generation": mirror.of_generation(context.generation)}


def ruled_in(session: HeldSession) -> list[Any]:
    """What a provider may carry out itself, by id, each with why the session's rules rule it out."""
    return [[offer.spec.id, offer.refused] for offer in session.native]


async def child_of(
    host: Host,
    context_of: Callable[[str], Context],
    face: str,
    id: str,
    parent: HeldSession,
    call_id: str,
    delegation: Delegation,
) -> HeldSession:
    """The session of a sub-agent that a call of ``parent`` begins; see :meth:`handrail.contract.session.Session.child`."""
    begun: list[HeldSession] = []

    async def opens(parent: HeldSession, call: Call, delegation: Delegation) -> Child:
        begun.append(await host.open_child(context_of, Under(parent, call, delegation), face, id))
        return Child(begun[0], begun[0].family.manifest)

    await parent.family.child(parent, call_id, delegation, opens)
    return begun[0]
