"""One process that joined, on the holder's side: what it brought, its sessions, and what it may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from handrail.catalog.interaction import Interaction
from handrail.contract.call import Answer, Event, ProposedCall, Result
from handrail.contract.doors.runtime import ClientContext
from handrail.contract.errors import HandrailError, UsageError
from handrail.contract.generation import Difference, Generation
from handrail.contract.rules import Mode, RuleEntry
from handrail.contract.session import StopReason
from handrail.contract.tool.settings import ToolConfig
from handrail.ipc import notices
from handrail.ipc.codec import mirror
from handrail.ipc.delegating import RemoteDelegates, a_delegation
from handrail.ipc.history import HeldHistories
from handrail.ipc.holder.brought import BroughtTools
from handrail.ipc.holder.entering import child_of, ruled_in, told_of
from handrail.ipc.holder.host import Handler, Host
from handrail.ipc.holder.people import RemotePerson
from handrail.ipc.holder.requests import (
    AT_ONCE,
    ENDING,
    HANDED_ON,
    NOTICES,
    REQUESTS,
    a_reply,
    answering,
    greeting,
    heeding,
)
from handrail.ipc.peers import RemotePeer
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import LEAVING, Op, Operations, Refused
from handrail.session.context import Brought, Context, Opening, SessionOptions
from handrail.session.events import PASSING
from handrail.session.session import HeldSession
from handrail.session.turn import HeldTurn

_KEPT_GENERATIONS = 16
"""Older generations that a turn of a joined process may still use."""
_MAX_FACE = 40
_MAX_PATIENCE_MS = 60_000


class Reception(Protocol):
    """The part of the server that a :class:`Guest` needs."""

    @property
    def host(self) -> Host: ...

    @property
    def leaving(self) -> bool: ...

    async def is_left(self, session_id: str) -> None:
        """Wait until nothing runs any more in a session whose process was lost."""
        ...

    def leave(self, guest: Guest, sessions: Iterable[HeldSession]) -> None:
        """The process is gone: let the calls of its sessions end, then suspend them and end what it brought."""
        ...


class Guest:
    """One process that joined.

    :raises Refused: for a greeting that asks for what is not there
    """

    def __init__(self, server: Reception, connection: Connection, hello: Message) -> None:
        self._server = server
        self._host = server.host
        self._connection = connection
        self._sessions: dict[str, HeldSession] = {}
        self._watched: dict[str, Callable[[], None]] = {}  # by session: how to stop
        self._histories = HeldHistories(self._session)
        self._streamed: dict[str, HeldTurn] = {}
        """Session to its last turn whose calls came one by one."""
        self._generations: dict[int, Generation] = {}
        self._reloading = asyncio.Lock()
        self._forgotten = 0
        """The number of the newest generation that is no longer kept."""
        self._contexts: dict[str, Context] = {}
        """Agent to context: that of the process, and those of further agents that its sessions name."""
        told = greeting(hello)
        self.face: str = told["face"][:_MAX_FACE]
        self._rules = tuple[str | RuleEntry, ...](told["rules"])
        self._mode: Mode | None = told["mode"]
        self._configured_mode: Mode | None = told["configured_mode"]
        self._tool_config: ToolConfig = told["tool_config"]
        try:
            self._brought = BroughtTools(connection, told["tools"], told["secrets"])
            self._host.learn(told["secrets"])
            self.context = self._context(told["agent"])
        except HandrailError as error:
            raise mirror.refusal_of(error) from None
        except ValueError as error:  # of a secret
            raise Refused("UsageError", f"secrets: {error}") from None
        self._token: int = self._host.welcome()["token"]
        self.operations = self._operations()

    def welcome(self) -> Message:
        """The answer to the process's greeting."""
        context = self.context
        return {
            **self._host.welcome(),
            "agent": context.manifest.as_data(),
            "generation": mirror.of_generation(context.generation),
            "rules": mirror.of_rules(context.rules),
        }

    def lost(self, reason: str) -> None:
        """Let go of the process, whose connection is lost: it is sent nothing more, and its sessions end with their calls."""
        for context in self._contexts.values():
            context.shelf.watchers.remove(self._published)
        sessions, self._sessions = self._sessions, {}
        for session_id in tuple(self._watched):
            self._unwatch(session_id)
        self._server.leave(self, sessions.values())

    async def aclose(self) -> None:
        """End what it brought, once nothing of it runs any more."""
        contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            await context.aclose()

    def _operations(self) -> Operations:
        handlers: dict[str, Handler] = {
            "open": self._open,
            "child": self._child,
            "begin": self._begin,
            "call": self._call,
            "keyed": self._keyed,
            "recall": self._recall,
            "waiting": self._waiting,
            "parked": self._parked,
            "instructions": self._instructions,
            "stop": self._stop,
            "suspend": self._suspend,
            "close": self._close,
            "explain": self._explain,
            "statuses": self._statuses,
            "find": self._find,
            "reload": self._reload,
            "flush": self._host.log.flush,
            **notices.handlers(self._session),
            **self._histories.handlers,
            **self._host.further_operations(),
        }
        told = {
            "watch": self._watch,
            "unwatch": self._unwatch,
            "rules": self._add_rules,
            "mode": self._set_mode,
            "client": self._client_told,
            "delegates": self._delegates,
        }
        requests = {
            name: answering(name, handlers[name], reads, self._is_leaving)
            for name, reads in REQUESTS.items()
            if name != "reply"
        }
        requests["reply"] = Op(self._reply, at_once="reply" in AT_ONCE)
        heard = {name: heeding(told[name], reads) for name, reads in NOTICES.items()}
        return Operations({**requests, **self._brought.requests}, {**heard, **self._brought.notices})

    def _is_leaving(self) -> bool:
        return self._server.leaving

    def _context(self, agent: str) -> Context:
        """The context of ``agent`` with what the process brought, made when the agent is first named."""
        context = self._contexts.get(agent)
        if context is None:
            context = self._fresh(agent)
            context.shelf.watchers.append(self._published)
            self._contexts[agent] = context
            self._keep(context.generation)
        return context

    def _fresh(self, agent: str) -> Context:
        tools = tuple(self._brought.tools)
        brought = Brought(self.face, tools=tools, rules=self._rules, mode=self._mode, tool_config=self._tool_config)
        return self._host.context_of(agent, brought, self._configured_mode)

    def _part(self) -> Difference:
        """Its first own tools: from here on its generations are no one else's."""
        fresh = {agent: self._fresh(agent) for agent in self._contexts}  # any fault leaves all as it was
        before = self.context.generation
        for agent, context in self._contexts.items():
            context.shelf.watchers.remove(self._published)
            context.part(fresh[agent])
            context.shelf.watchers.append(self._published)
            self._published(context.generation)
        return self.context.generation.difference(before)

    def _keep(self, generation: Generation) -> None:
        self._generations[generation.number] = generation
        while len(self._generations) > _KEPT_GENERATIONS:
            self._forgotten = next(iter(self._generations))
            del self._generations[self._forgotten]

    def _published(self, generation: Generation) -> None:
        self._keep(generation)
        told = mirror.of_generation(generation)
        for agent, context in self._contexts.items():
            if context.generation is generation:
                self._connection.notify("generation", {"agent": agent, "generation": told})

    @property
    def sessions(self) -> tuple[HeldSession, ...]:
        """Those it has open."""
        return tuple(self._sessions.values())

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def _open(
        self,
        id: str,
        agent: str | None,
        headless: bool,
        peer: Sequence[str] | None,
        topic: str | None,
        client: ClientContext | None,
        rules: Sequence[str | RuleEntry],
        mode: Mode | None,
        shared: bool,
        interaction: int,
        brought: Sequence[str],
    ) -> Message:
        await self._server.is_left(id)
        context = self.context if agent is None else self._context(agent)
        options: SessionOptions = {
            "attendant": None if headless else RemotePerson(self._connection, id, shared=shared),
            "peer": None if peer is None else RemotePeer(self._connection, id, peer),
        }
        options |= {"rules": rules, "mode": mode, "topic": topic, "client": client}
        opening = Opening(context, self._context, self.face, options)
        return self._entered(await self._host.open_session(opening, id), context, interaction, brought)

    async def _child(self, id: str, session: str, call: str, **told: Any) -> Message:
        parent = self._session(session)
        child = await child_of(self._host, self._context, self.face, id, parent, call, a_delegation(told))
        manifest = child.family.manifest
        return {**self._entered(child, self._context(manifest.id)), "agent": manifest.as_data()}

    def _delegates(self, session: str, there: bool) -> None:
        if session in self._sessions:
            self._sessions[session].delegate_to(RemoteDelegates(self._connection, session) if there else None)

    def _entered(
        self, session: HeldSession, context: Context, interaction: int = 0, brought: Sequence[str] = ()
    ) -> Message:
        if self._connection.lost is not None:
            self._server.leave(self, (session,))
        else:
            self._sessions[session.id] = session
        catalog = session.catalog
        if interaction or brought:  # it goes on with this holder; else with what was kept
            catalog.begin(interaction, brought)
        catalog.load_ahead(context.generation)
        session.news.when_brought = partial(self._brought_in, session.id, catalog)
        return told_of(session, context, own=context is self.context)

    async def _begin(self, session: str, interaction: int, text: str, headless: bool) -> list[Any]:
        begun = self._session(session)
        await begun.begin(text, interaction, headless=headless)
        return ruled_in(begun)

    def _brought_in(self, session_id: str, catalog: Interaction, steps: Sequence[str]) -> None:
        """On its way before the answer of the call that changed what is in view."""
        self._connection.notify(
            "brought", {"session_id": session_id, "interaction": catalog.number, "steps": list(steps)}
        )

    def _session(self, session_id: str) -> HeldSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise UsageError(f"session {session_id[:80]!r} is not open in this process")
        return session

    async def _reply(self, body: Any) -> list[Any]:
        """Its errors tell themselves whole by their class and text."""
        if self._server.leaving:
            raise Refused(LEAVING, ENDING)
        session, turn, token, generation, calls = a_reply(body)
        found = self._sessions.get(session) or self._session(session)
        tools = self._tools(found, token, generation)
        if len(calls) == 1:
            answers: Sequence[Answer] = (await found.call_of_turn(turn, tools, calls[0]),)
        else:
            answers = await found.turn_at(turn, tools).call_all(calls)
        if self._server.leaving and any(_cut_short(answer.result) for answer in answers):
            raise Refused(HANDED_ON, "the process that held the workspace has ended")
        return [mirror.of_answer(answer) for answer in answers]

    def _tools(self, session: HeldSession, token: int, generation: int) -> Generation:
        """Those of a turn. One that was taken with another holder, or over a connection before this one, goes on with what
        there is here."""
        tools = self._generations.get(generation) if token == self._token else session.generation
        if tools is None and generation > self._forgotten:
            tools = session.generation
        if tools is None:
            raise UsageError(f"generation {generation} of the tools is not kept any more; take a new turn")
        return tools

    async def _call(
        self, session: str, turn: int, position: int, token: int, generation: int, call: ProposedCall, behind: int
    ) -> Any:
        """The next call of a reply that still goes on. One whose first calls went to another holder is not known here: its
        calls are told by their records, or proposed anew."""
        found = self._session(session)
        if not self._histories.comes_behind(session, behind):
            raise Refused(
                HANDED_ON, f"what was said in session {session} before this call has not come, or was refused"
            )
        begun = self._streamed.get(session)
        if not position:
            tools = self._tools(found, token, generation)
            try:
                begun = self._streamed[session] = found.turn_at(turn, tools)
            except UsageError:
                if found.closed:
                    raise
                begun = None  # calls of it are on record, or in what was said: another holder's
        if begun is None or (begun.number, begun.proposed) != (turn, position):
            raise Refused(HANDED_ON, f"turn {turn} of session {session} did not begin here")
        answer = await begun.submit(call)
        if self._server.leaving and _cut_short(answer.result):
            raise Refused(HANDED_ON, "the process that held the workspace has ended")
        return mirror.of_answer(answer)

    async def _keyed(self, session: str, call: ProposedCall, key: str) -> Any:
        given = call.arguments
        arguments = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
        result = await self._session(session).call(call.name, arguments, key=key)
        if self._is_leaving() and _cut_short(result):  # asked again under its key, it is told by its record
            raise Refused(LEAVING, "the process that holds the workspace is ending")
        return result.to_dict()

    async def _recall(self, session: str, calls: Sequence[str]) -> Any:
        """The answers, each with whether the call had begun or waits: one that had not had no effect, and may be proposed
        anew."""
        answers = await self._session(session).recall_all(calls)
        return [[mirror.of_answer(answer), await self._has_begun(answer)] for answer in answers]

    async def _has_begun(self, answer: Answer) -> bool:
        outcome = await self._host.log.outcome_of(answer.call_id)
        # A refusal is the kernel's own word: stopped before it began, because a holder ended.
        stopped = outcome is not None and outcome.kind == "refused" and _cut_short(answer.result)
        return bool({"parked", "job"} & answer.result.metadata.keys()) or (outcome is not None and not stopped)

    async def _waiting(self, session: str) -> list[str]:
        return await self._session(session).parked()

    async def _parked(self, session: str) -> list[Any]:
        return [mirror.of_answer(answer) for answer in await self._session(session).resume_parked()]

    async def _instructions(self, session: str) -> list[Any]:
        return list(await self._session(session).instructions_above())

    async def _stop(self, session: str, reason: StopReason) -> int:
        return self._session(session).cancel(reason)

    async def _suspend(self, session: str, reason: StopReason, why: str) -> None:
        found = self._session(session)
        self._forget(session)
        await found.suspend(why, reason)

    async def _close(self, session: str) -> None:
        found = self._session(session)
        await found.close()
        self._forget(session)

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._streamed.pop(session_id, None)
        self._histories.forget(session_id)
        self._unwatch(session_id)

    def _watch(self, session: str) -> None:
        if session in self._sessions and session not in self._watched:
            self._watched[session] = self._sessions[session].watch(self._event)

    def _unwatch(self, session: str) -> None:
        if (stop := self._watched.pop(session, None)) is not None:
            stop()

    def _event(self, event: Event) -> None:
        self._connection.notify("event", mirror.of_event(event), may_be_left_out=event.kind in PASSING)

    def _add_rules(self, session: str, rules: Sequence[str]) -> None:
        if session in self._sessions:
            self._sessions[session].add_rules(*rules)

    def _set_mode(self, session: str, mode: Mode | None) -> None:
        if session in self._sessions and mode is not None:
            self._sessions[session].set_mode(mode)

    def _client_told(self, session: str, call: str, kinds: Sequence[str]) -> None:
        if session in self._sessions and isinstance(peer := self._sessions[session].lane.around.peer, RemotePeer):
            peer.told(call, kinds)

    # ── the kernel ───────────────────────────────────────────────────────────────────────────────

    async def _statuses(self) -> Any:
        return [list(one) for one in self._host.statuses_in(self.context)]

    async def _find(self, query: str, limit: int, patience_ms: int | None, by_words: bool) -> Any:
        patience_s = None if patience_ms is None else min(max(patience_ms, 0), _MAX_PATIENCE_MS) / 1000
        found = await self._host.find_in(
            self.context, query, limit=max(limit, 1), patience_s=patience_s, by_words=by_words
        )
        return asdict(found)

    async def _explain(
        self, tool: str, arguments: Mapping[str, Any], rules: Sequence[str | RuleEntry], headless: bool
    ) -> Any:
        explained = await self._host.explain_in(self.context, tool, arguments, rules=rules, headless=headless)
        return mirror.of_explanation(explained)

    async def _reload(self, tools: object) -> Any:
        async with self._reloading:
            before = self._brought.tools
            try:
                return mirror.of_difference(await self._reloaded(tools))
            except HandrailError:
                self._brought.tools = before
                raise

    async def _reloaded(self, tools: object) -> Difference:
        given = None if tools is None else self._brought.replaced(tools)
        if self.context.shared and given:
            return self._part()
        given = given if not self.context.shared else None
        for context in [one for one in self._contexts.values() if one is not self.context]:
            await context.shelf.reload(given)
        return await self.context.shelf.reload(given)


def _cut_short(result: Result) -> bool:
    """Whether a call was ended, or is parked, because the kernel was shutting down."""
    return result.metadata.get("stopped_by") == "shutdown" or "parked" in result.metadata
