"""Building a session's lane when it is opened: its surroundings, its rules, and the bounds of a sub-agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from handrail.arbiter.calls.call import Lane
from handrail.arbiter.secrets.redaction import RedactedValues
from handrail.catalog.interaction import Interaction
from handrail.contract.agent import DEFAULT_AGENT, AgentManifest
from handrail.contract.doors.agents import AgentType
from handrail.kernel.assembly import Rooms, given_rules, parse_rules
from handrail.kernel.kernel import rule_texts
from handrail.policy.hidden import HiddenNow
from handrail.policy.rules.defaults import reading, reading_as_in_workspace
from handrail.policy.rules.modes import given, in_mode, read_mode, within
from handrail.policy.rules.rules import Rule
from handrail.registry.agents import find_agents
from handrail.runtime.files.roots import FurtherRoots, Roots
from handrail.runtime.surface import Surroundings
from handrail.session.family import named_hosts_of, origin_of, secrets_for
from handrail.session.opening import Opening
from handrail.session.parked import project_rules
from handrail.session.past.lasting import Lasting
from handrail.session.reach import GIVEN
from handrail.session.session import above, editor_of
from handrail.session.skills.skills import SessionSkills
from handrail.store.tables.sessions import SessionRow

_ANYTHING = (
    "An agent like this one, with a conversation of its own: for a part of the work whose details you need not see."
)
"""What the default agent is for, as another one's model is told, where its manifest says nothing."""


def lane_of(rooms: Rooms, lasting: Lasting, opening: Opening, row: SessionRow) -> Lane:
    """The lane of a session that is kept as ``row``.

    :raises LoadError: for a rule that is none
    :raises LogUnavailable: when what is kept of it cannot be read
    """
    context, under, folders = opening.context, opening.under, rooms.store.folders
    workdir, session_id = str(folders.workspace), row.id
    output, scratch = folders.output(session_id), folders.scratch(session_id)
    further, kept, shipped = context.further, str(folders.user_data), list[Rule]()
    if context.authority.names(kept):
        folders.make_user_data()
        further = FurtherRoots(further.readable, (*further.writable, kept))
        shipped = reading_as_in_workspace(kept)
    around = Surroundings(
        session_id=session_id,
        agent=context.agent,
        workdir=workdir,
        scratch=str(scratch),
        roots=Roots(workdir, (str(output),), further),
        sandbox=rooms.sandbox,
        values=RedactedValues(rooms.store.state, rooms.arbiter.shaper.redactor),
        attendant=opening.people,
        peer=opening.peer if under is None else editor_of(under),
        topic=row.topic,
        client=opening.client,
        seen=lasting.seen(session_id),
        hidden=(str(folders.state),),
        secrets=context.secrets if under is None else secrets_for(context.secrets, under),
    )
    own = parse_rules(given_rules(rule_texts(opening.rules), GIVEN), context.generation)
    own += [*lasting.rules(session_id), *project_rules(rooms.arbiter.approvals)]
    around.quarantine = str(output / "quarantine")
    around.home_of = folders.home_of
    book = context.rules.with_rules(reading(str(output)), *shipped, *own)
    if (wanted := given(opening.mode)) is not None:
        book = in_mode(book, wanted)
    authority, own_mode = context.authority, None
    if under is not None:
        parent = under.parent.lane
        own_mode, book = read_mode(book.mode), within(book, parent.rules)
        authority = authority.within(parent.authority.passes_on(under.parent.family.manifest))
    lane = Lane(around, authority, book, opening.people, own_mode)
    options = replace(context.catalog, above=tuple(one.delegable.agents for one in above(under)))
    lane.catalog = Interaction(session_id, options, around.values, rooms.finder)
    lane.skills = SessionSkills(session_id, workdir, rooms.config.folder, around.values)
    lane.agent_types = lambda: agent_types(rooms, context.manifest, *above(opening.under))
    if under is not None:
        lane.origin = origin_of(context.agent, under)
        lane.named_hosts_of = named_hosts_of(under)
    hidden = HiddenNow(workdir)
    around.denials = lambda: hidden.of(lane.rules)
    return lane


def agent_types(rooms: Rooms, of: AgentManifest, *above: AgentManifest) -> Sequence[AgentType]:
    """The agents that one may hand work to, without those whose manifest is faulty.

    :param above: for whom it works, up to the top
    """
    found = find_agents(rooms.config.folder, (str(rooms.store.folders.workspace),)).values()
    return tuple(
        AgentType(one.manifest.id, one.manifest.description.strip() or _described(one.manifest))
        for one in found
        if not one.faults and one.manifest.takes_work_of(of, *above)
    )


def _described(manifest: AgentManifest) -> str:
    return _ANYTHING if manifest.id == DEFAULT_AGENT else ""


def parent_of(row: SessionRow) -> dict[str, Any]:
    """Where a session comes from, for its record."""
    if row.under is not None:
        return {"under": row.under, "under_call": row.under_call}
    return {"parent": row.details["parent"]} if "parent" in row.details else {}
