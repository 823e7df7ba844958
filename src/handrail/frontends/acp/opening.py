"""How clients are served, and how a session of a workspace becomes a conversation with one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acp import schema
from acp.agent.connection import AgentSideConnection

from handrail.agent.loop import Agent
from handrail.contract.session import Session
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.acp.asking import Person
from handrail.frontends.acp.buffers import Editor
from handrail.frontends.acp.conversation import Conversation
from handrail.frontends.acp.places import Opening
from handrail.frontends.acp.screens import Screens, how_shown
from handrail.frontends.acp.telling import Telling, Update
from handrail.policy.rules.modes import read_mode

if TYPE_CHECKING:
    from handrail.agent.budget import Budget
    from handrail.agent.model import Model
    from handrail.contract.agent import AgentManifest
    from handrail.kernel.kernel import Kernel
    from handrail.session.past.facts import SessionReader


@dataclass(frozen=True, slots=True)
class Serving:
    """How clients are served.

    :param opening: opens a workspace
    :param reading: what is kept of a workspace's sessions, whoever holds it
    :param model: the model that an agent works with; raises ``HandrailError`` where there is none
    :param budget: bounds of each prompt
    :param only: the one workspace that may be worked in, canonical; None for any
    :param headless: nobody is asked
    :param models: the names of those that an editor may choose from, for an agent; the one that it begins with first
    :param named: opens one of them
    """

    opening: Opening
    reading: Callable[[str], AbstractContextManager[SessionReader]]
    model: Callable[[AgentManifest], Model]
    budget: Callable[[AgentManifest], Budget]
    only: str | None = None
    headless: bool = False
    models: Callable[[AgentManifest], Sequence[str]] = lambda _: ()
    named: Callable[[str], Model] | None = None


async def converse(
    kernel: Kernel,
    folder: str,
    session_id: str | None,
    model: Model,
    serving: Serving,
    offered: schema.ClientCapabilities,
    client: AgentSideConnection,
) -> Conversation:
    """Open a session for one client, with an agent that works in it. Where it cannot be, no session is left open.

    :param folder: the workspace, canonical
    :param session_id: one that was open before; None for a new one
    :param offered: what the client can do
    :raises HandrailError: when there is no such session or agent
    """

    def spec_of(name: str) -> ToolSpec | None:
        entry = kernel.generation.resolve(name)
        return None if entry is None else entry.spec

    async def send(update: Update) -> None:
        await client.session_update(person.session_id, update)

    screens = Screens(client, how_shown(offered))
    telling = Telling(send, spec_of, kernel.workdir, screens)
    forms = offered.elicitation is not None and offered.elicitation.form is not None
    person = Person(client, kernel.workdir, spec_of, forms=forms, introduce=telling.introduce, decided=telling.decided)
    editor = Editor(client) if offered.fs is not None and offered.fs.read_text_file else None
    try:
        session = await kernel.session(
            session_id,
            peer=editor,
            headless=serving.headless,
            attendant=None if serving.headless else person,
        )
        try:
            conversation = _conversation(kernel, session, model, telling, folder, serving, person)
        except BaseException:
            await session.suspend()
            raise
    except BaseException:
        await telling.aclose()
        raise
    person.session_id = screens.session_id = session.id
    if editor is not None:
        editor.session_id = session.id
    session.watch(telling.happened)
    return conversation


def _conversation(
    kernel: Kernel, session: Session, model: Model, telling: Telling, folder: str, serving: Serving, person: Person
) -> Conversation:
    manifest = kernel.agent

    def working(model: Model) -> Agent:
        bounds = serving.budget(manifest)
        return Agent(session, model, workspace=session.workdir, instructions=manifest.prompt, budget=bounds)

    def other(name: str) -> tuple[Agent, Model]:
        assert serving.named is not None
        opened = serving.model(manifest) if name == models[0] else serving.named(name)
        return working(opened), opened

    models = tuple(serving.models(manifest) if serving.named is not None else ()) or ("",)
    mode, begins_with = read_mode(kernel.rules.mode), models[0]
    return Conversation(
        session, working(model), model, telling, folder, mode, person.there, models, other, named=begins_with
    )
