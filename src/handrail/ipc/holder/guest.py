"""One client process on the lease holder's side: its registrations, its sessions, and the requests that it may send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from operator import itemgetter
from typing import Annotated, Any, Protocol, cast

from handrail.arbiter.approvals.desk import Approvals
from handrail.arbiter.call import Call
from handrail.catalog.interaction import Interaction
from handrail.catalog.view import CatalogOptions
from handrail.contract.call import DEFAULT_FAULT_KIND, Answer, Event, ProposedCall, Result
from handrail.contract.codec import Malformed, Reader, read_fields
from handrail.contract.doors.agents import AgentType, Delegation
from handrail.contract.doors.channels import Notices
from handrail.contract.doors.jobs import Findings
from handrail.contract.doors.memory import Entry, History, Skill
from handrail.contract.doors.peer import AskKind
from handrail.contract.doors.runtime import ClientContext
from handrail.contract.errors import HandrailError, UsageError
from handrail.contract.generation import Difference, Generation, ToolStatus
from handrail.contract.modes import Mode
from handrail.contract.rules import RuleEntry
from handrail.contract.session import Child, StopReason
from handrail.contract.tool.offering import Offering
from handrail.ipc.codec import mirror
from handrail.ipc.codec.interfaces import ENDING, WIRE, Request, heeding, op_of, request, served
from handrail.ipc.holder.brought import BroughtTools
from handrail.ipc.holder.remote import (
    RemoteDelegates,
    RemoteEditor,
    RemoteOffering,
    RemotePeer,
    RemotePerson,
    RemoteWatchdog,
    Subscribed,
    remote_offering,
)
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import HANDED_ON, LEAVING, Op, Operations, Refused
from handrail.policy.explain import Explanation
from handrail.record.log import CommitLog
from handrail.session.context import Brought, Context, Opening, SessionOptions
from handrail.session.events import PASSING
from handrail.session.session import HeldSession, Under
from handrail.session.turn import HeldTurn

_KEPT_GENERATIONS = 16
"""The number of older generations that a turn of a client process may still use."""
_MAX_FACE = 40
_MAX_PATIENCE_MS = 60_000
MAX_TURNS = 1_000_000_000
"""The maximum turn number of a session. Turn numbers are part of call ids, which are compared and stored."""
AT_ONCE = ("reply", "call", "keyed", "keep")
"""Calls, which usually end without waiting, so that their answers need not wait for the next iteration of the event loop; and
messages that are stored before these calls, so that the order is preserved."""
ENDLESS = ("notices.arrived", "notices.awaited")
"""Waits that may never end: they are cancelled with the connection."""

_tuple: Any = tuple
_new_call: Callable[..., ProposedCall] = _tuple.__new__
"""Create a ``ProposedCall`` in half the time of its constructor."""


def _a_turn(number: int) -> int:
    if not 0 < number < MAX_TURNS:
        raise Malformed(f"expected a number from 1 to {MAX_TURNS - 1:,}")
    return number


def _an_entry(entry: Entry) -> Entry:
    if not 0 <= entry[0] < 1 << 62:
        raise Malformed("expected a message as position (from 0) and data")
    return entry


Turn = Annotated[int, _a_turn]
"""The number of a turn."""
KeptEntry = Annotated[Entry, _an_entry]
"""A message of a session with its position."""

_REPLY: Mapping[str, Any] = {
    "session": str,
    "turn": Turn,
    "token": int,
    "generation": int,
    "calls": Sequence[ProposedCall],
}
_parts_of_a_reply = cast("Callable[[Any], tuple[Any, ...]]", itemgetter(*_REPLY))


@cache
def _readers_of_a_reply() -> Mapping[str, Reader[Any]]:
    return {name: WIRE.form_of(kind).read for name, kind in _REPLY.items()}


def a_reply(body: Any) -> tuple[str, int, int, int, Sequence[ProposedCall]]:
    """Read the fields of a ``reply`` request, in the order of their table.

    Nearly all requests of client processes are replies, so a valid reply with one call takes a fast path.

    :raises Refused: if a field is invalid; the text names it
    """
    try:
        session, turn, token, generation, calls = _parts_of_a_reply(body)
        [[name, arguments, provider_id, fault, kind]] = calls
        if (
            type(session) is type(name) is type(arguments) is str
            and type(turn) is type(token) is type(generation) is int
            and type(calls) is type(calls[0]) is list
            and 0 < turn < MAX_TURNS
            and provider_id is fault is None
            and kind == DEFAULT_FAULT_KIND
            and arguments.isascii()
            and len(body) == len(_REPLY)
        ):
            return session, turn, token, generation, (_new_call(ProposedCall, (name, arguments, None, None, kind)),)
    except (KeyError, TypeError, ValueError):
        pass
    try:
        session, turn, token, generation, calls = read_fields(body, _readers_of_a_reply()).values()
    except Malformed as error:
        raise Refused("UsageError", f"Invalid request `reply`: {error}.") from None
    return session, turn, token, generation, calls


class Host(Protocol):
    """The parts of the local kernel that client processes need."""

    @property
    def log(self) -> CommitLog: ...

    def welcome(self) -> Message:
        """Return the description of this kernel for a client process."""
        ...

    @property
    def approvals(self) -> Approvals: ...

    def context_of(self, agent: str, brought: Brought) -> Context:
        """Return a new context of an agent with the registrations of a process.

        :raises LoadError: with all faults
        """
        ...

    def learn(self, secrets: Mapping[str, str]) -> None:
        """Redact these secrets from now on.

        :raises ValueError: if a value cannot be redacted
        """
        ...

    async def open_session(self, opening: Opening, id: str | None = None) -> HeldSession: ...

    async def open_child(
        self, context_of: Callable[[str], Context], under: Under, face: str, id: str | None = None
    ) -> HeldSession:
        """Open the session of a sub-agent; see :meth:`handrail.contract.session.Session.child`."""
        ...

    async def explain_in(
        self,
        context: Context,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        rules: Iterable[str | RuleEntry],
        headless: bool,
    ) -> Explanation: ...

    def statuses_in(self, context: Context) -> Sequence[ToolStatus]: ...

    async def find_in(self, context: Context, query: str, **how: Any) -> Findings: ...

    def further_requests(self, guest: Guest) -> Mapping[str, Request]:
        """Return the further requests that a client process may send, by name."""
        ...


class Reception(Protocol):
    """The parts of the server that a :class:`Guest` needs."""

    @property
    def host(self) -> Host: ...

    @property
    def leaving(self) -> bool: ...

    async def is_left(self, session_id: str) -> None:
        """Wait until no call runs in a session whose client process has disconnected."""
        ...

    def leave(self, guest: Guest, sessions: Iterable[HeldSession]) -> None:
        """Release a client process that has disconnected.

        Its sessions are suspended after their calls have ended. Then its registrations end.
        """
        ...


class Guest:
    """A connected client process, with its registrations and sessions.

    :raises Refused: if the greeting is invalid or the requested agent cannot be loaded
    """

    def __init__(self, server: Reception, connection: Connection, hello: Message) -> None:
        self._server = server
        self._host = server.host
        self._connection = connection
        self._sessions: dict[str, HeldSession] = {}
        self._watched: dict[str, Callable[[], None]] = {}  # by session: the function that stops watching
        self._kept: dict[str, int] = {}
        """By session: the number of the last ``keep`` request that was accepted."""
        self._streamed: dict[str, HeldTurn] = {}
        """By session: the last turn whose calls arrived one by one."""
        self._generations: dict[int, Generation] = {}
        self._reloading = asyncio.Lock()
        self._forgotten = 0
        """The number of the newest generation that was dropped."""
        self._contexts: dict[str, Context] = {}
        """By agent: the context of the process, and those of further agents that its sessions use."""
        told = mirror.hello_of(hello)
        self.face: str = told.face[:_MAX_FACE]
        self._secrets = told.secrets
        self._ends: list[Callable[[], Awaitable[object]]] = []
        self._subscribed = Subscribed()
        try:
            self._brought = brought = BroughtTools(connection, told.tools, told.secrets)
            self._host.learn(told.secrets)
            self._contribution = Brought(
                self.face,
                tools=tuple(brought.tools),
                rules=tuple(told.rules),
                watchdogs=tuple(RemoteWatchdog(connection, number, one) for number, one in enumerate(told.watchdogs)),
                offerings=self._offerings(told.offerings),
                mode=told.mode,
                configured_mode=told.configured_mode,
                tool_config=told.tool_config,
                tool_settings=told.tool_settings,
                catalog=told.catalog,
            )
            self.context = self._context(told.agent)
        except HandrailError as error:
            raise mirror.refusal_of(error) from None
        except ValueError as error:  # a secret that cannot be redacted
            raise Refused("UsageError", f"Invalid `secrets`: {error}") from None
        self._token: int = self._host.welcome()["token"]
        self.requests: Mapping[str, Request] = {
            "open": request(self._open),
            "child": request(self._child),
            "begin": request(self._begin),
            "call": request(self._call),
            "keyed": request(self._keyed),
            "recall": request(self._recall),
            "waiting": request(self._waiting),
            "parked": request(self._parked),
            "instructions": request(self._instructions),
            "stop": request(self._stop),
            "suspend": request(self._suspend),
            "close": request(self._close),
            "explain": request(self._explain),
            "statuses": request(self._statuses),
            "find": request(self._find),
            "reload": request(self._reload),
            "flush": request(self._flush),
            "keep": request(self._keep),
            **served(History, "history.", self._history),
            **served(Notices, "notices.", self._notices),
            **self._host.further_requests(self),
        }
        """The requests of the process, except replies and the runtime services of the calls that it runs."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "watch": heeding(self._watch),
            "unwatch": heeding(self._unwatch),
            "rules": heeding(self._add_rules),
            "mode": heeding(self._set_mode),
            "client": heeding(self._client_told),
            "delegates": heeding(self._delegates),
            "offering.updated": heeding(self._subscribed.updated),
        }
        self.operations = self._operations()

    def welcome(self) -> Message:
        """Return the answer to the greeting of the process."""
        context = self.context
        return {
            **self._host.welcome(),
            "agent": context.manifest.as_data(),
            "generation": mirror.of_generation(context.generation),
            "rules": mirror.of_rules(context.rules),
        }

    def lost(self, reason: str) -> None:
        """Release the process, whose connection is lost.

        It receives nothing more. Its sessions end with their calls.
        """
        for context in self._contexts.values():
            context.shelf.watchers.remove(self._published)
        sessions, self._sessions = self._sessions, {}
        for session_id in tuple(self._watched):
            self._unwatch(session_id)
        self._server.leave(self, sessions.values())

    async def aclose(self) -> None:
        """End the registrations of the process. None of its calls may be running."""
        contexts, self._contexts = self._contexts, {}
        async with AsyncExitStack() as steps:
            for context in contexts.values():
                steps.push_async_callback(context.aclose)
            for end in self._ends:
                steps.push_async_callback(end)

    @property
    def connection(self) -> Connection:
        """The connection to the process."""
        return self._connection

    @property
    def secrets(self) -> Mapping[str, str]:
        """The secrets that the process registered, by name."""
        return self._secrets

    def at_end(self, end: Callable[[], Awaitable[object]]) -> None:
        """Call ``end`` after the process has disconnected."""
        self._ends.append(end)

    def _operations(self) -> Operations:
        is_leaving = self._is_leaving
        ops = {
            name: op_of(name, one, is_leaving=is_leaving, at_once=name in AT_ONCE, cancel_when_lost=name in ENDLESS)
            for name, one in self.requests.items()
        }
        ops["reply"] = Op(self._reply, at_once="reply" in AT_ONCE)
        return Operations({**ops, **self._brought.requests}, {**self.notices, **self._brought.notices})

    def _is_leaving(self) -> bool:
        return self._server.leaving

    def _context(self, agent: str) -> Context:
        """Return the context of ``agent`` with the registrations of the process, created at its first use."""
        context = self._contexts.get(agent)
        if context is None:
            context = self._fresh(agent)
            context.shelf.watchers.append(self._published)
            self._contexts[agent] = context
            self._keep_generation(context.generation)
        return context

    def _fresh(self, agent: str) -> Context:
        return self._host.context_of(agent, replace(self._contribution, tools=tuple(self._brought.tools)))

    def _offerings(self, told: Sequence[mirror.ToldOffering]) -> tuple[Offering, ...]:
        offer = self._brought.offer
        return tuple(
            remote_offering(self._connection, number, one, offer, self._subscribed) for number, one in enumerate(told)
        )

    def _part(self) -> Difference:
        """Give the process its own generations, because it registered its first tools."""
        fresh = {agent: self._fresh(agent) for agent in self._contexts}  # a fault changes nothing
        before = self.context.generation
        for agent, context in self._contexts.items():
            context.shelf.watchers.remove(self._published)
            context.part(fresh[agent])
            context.shelf.watchers.append(self._published)
            self._published(context.generation)
        return self.context.generation.difference(before)

    def _keep_generation(self, generation: Generation) -> None:
        self._generations[generation.number] = generation
        while len(self._generations) > _KEPT_GENERATIONS:
            self._forgotten = next(iter(self._generations))
            del self._generations[self._forgotten]

    def _published(self, generation: Generation) -> None:
        self._keep_generation(generation)
        told = mirror.of_generation(generation)
        for agent, context in self._contexts.items():
            if context.generation is generation:
                self._connection.notify("generation", {"agent": agent, "generation": told})

    @property
    def sessions(self) -> tuple[HeldSession, ...]:
        """The open sessions of the process."""
        return tuple(self._sessions.values())

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def _open(
        self,
        id: str,
        agent: str | None,
        headless: bool,
        peer: Sequence[AskKind] | None,
        editor: bool,
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
        kind = RemoteEditor if editor else RemotePeer
        options: SessionOptions = {
            "attendant": None if headless else RemotePerson(self._connection, id, shared=shared),
            "peer": None if peer is None else kind(self._connection, id, peer),
        }
        options |= {"rules": rules, "mode": mode, "topic": topic, "client": client}
        opening = Opening(context, self._context, self.face, options)
        return self._entered(await self._host.open_session(opening, id), context, interaction, brought)

    async def _child(self, id: str, session: str, call: str, delegation: Delegation) -> Message:
        """Open the session of a sub-agent for a call; see :meth:`handrail.contract.session.Session.child`."""
        parent = self._session(session)
        begun: list[HeldSession] = []

        async def opens(parent: HeldSession, call: Call, delegation: Delegation) -> Child:
            begun.append(await self._host.open_child(self._context, Under(parent, call, delegation), self.face, id))
            return Child(begun[0], begun[0].family.manifest)

        await parent.family.child(parent, call, delegation, opens)
        (child,) = begun
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
        if interaction or brought:  # the interaction continues here; otherwise its stored state counts
            catalog.begin(interaction, brought)
        catalog.load_ahead(context.generation)
        session.news.when_brought = partial(self._brought_in, session.id, catalog)
        told: Message = {
            "turns": session.turns,
            "catalog": WIRE.write(CatalogOptions, catalog.options),
            "brought": list(catalog.active.steps()),
            "native": _ruled_in(session),
            "skills": WIRE.write(Sequence[Skill], session.skills),
            "agents": WIRE.write(Sequence[AgentType], session.agents),
        }
        if context is self.context:  # the process knows these tools already
            return told
        return told | {"generation": mirror.of_generation(context.generation)}

    async def _begin(self, session: str, interaction: int, text: str, headless: bool) -> Any:
        begun = self._session(session)
        await begun.begin(text, interaction, headless=headless)
        return _ruled_in(begun)

    def _brought_in(self, session_id: str, catalog: Interaction, steps: Sequence[str]) -> None:
        """Send the change of the loaded tools, before the answer of the call that made it."""
        self._connection.notify(
            "brought", {"session_id": session_id, "interaction": catalog.number, "steps": list(steps)}
        )

    def _session(self, session_id: str) -> HeldSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise UsageError(f"Session {session_id[:80]!r} is not open in this process. Open it first.")
        return session

    async def _reply(self, body: Any) -> list[Any]:
        """Answer all calls of one reply. Every error is sent by its class and text."""
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
            raise Refused(HANDED_ON, "The process that held the workspace has ended.")
        return [mirror.of_answer(answer) for answer in answers]

    def _tools(self, session: HeldSession, token: int, generation: int) -> Generation:
        """Return the tools of a turn.

        A turn that started with another lease holder, or over an earlier connection, continues with the current tools.
        """
        tools = self._generations.get(generation) if token == self._token else session.generation
        if tools is None and generation > self._forgotten:
            tools = session.generation
        if tools is None:
            raise UsageError(f"Generation {generation} of the tools is no longer available. Start a new turn.")
        return tools

    async def _call(
        self, session: str, turn: Turn, position: int, token: int, generation: int, call: ProposedCall, behind: int
    ) -> Any:
        """Answer the next call of a reply that is still arriving.

        If another lease holder received the first calls of the turn, this one does not know the turn: the client reads the
        results from the log, or proposes the calls again.
        """
        found = self._session(session)
        if behind not in (0, self._kept.get(session)):
            raise Refused(
                HANDED_ON, f"The messages of session {session} before this call did not arrive, or were refused."
            )
        begun = self._streamed.get(session)
        if not position:
            tools = self._tools(found, token, generation)
            try:
                begun = self._streamed[session] = found.turn_at(turn, tools)
            except UsageError:
                if found.closed:
                    raise
                begun = None  # the log or the history has calls of the turn: another lease holder received them
        if begun is None or (begun.number, begun.proposed) != (turn, position):
            raise Refused(HANDED_ON, f"Turn {turn} of session {session} did not start with this lease holder.")
        answer = await begun.submit(call)
        if self._server.leaving and _cut_short(answer.result):
            raise Refused(HANDED_ON, "The process that held the workspace has ended.")
        return mirror.of_answer(answer)

    async def _keyed(self, session: str, call: ProposedCall, key: str) -> Result:
        given = call.arguments
        arguments = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
        result = await self._session(session).call(call.name, arguments, key=key)
        if self._is_leaving() and _cut_short(result):  # repeated with its key, the log answers it
            raise Refused(LEAVING, ENDING)
        return result

    async def _recall(self, session: str, calls: Sequence[str]) -> Any:
        """Return the answers, each with whether the call has started or waits.

        A call that has not started had no effect and may be proposed again.
        """
        answers = await self._session(session).recall_all(calls)
        return [[mirror.of_answer(answer), await self._has_begun(answer)] for answer in answers]

    async def _has_begun(self, answer: Answer) -> bool:
        outcome = await self._host.log.outcome_of(answer.call_id)
        # The kernel records `refused` for a call that it stopped before the start, because the lease holder shut down.
        stopped = outcome is not None and outcome.kind == "refused" and _cut_short(answer.result)
        return bool({"parked", "job"} & answer.result.metadata.keys()) or (outcome is not None and not stopped)

    async def _waiting(self, session: str) -> list[str]:
        return await self._session(session).parked()

    async def _parked(self, session: str) -> list[Any]:
        return [mirror.of_answer(answer) for answer in await self._session(session).resume_parked()]

    async def _instructions(self, session: str) -> Sequence[tuple[str, str]]:
        return await self._session(session).instructions_above()

    # ── messages and notifications ───────────────────────────────────────────────────────────────

    def _history(self, session: str) -> History:
        if (history := self._session(session).history) is None:
            raise UsageError(f"Session {session} has no stored history.")
        return history

    async def _keep(self, session: str, entries: Sequence[KeptEntry], number: int) -> None:
        kept = self._history(session).keep(entries)
        self._kept[session] = number
        await kept

    def _notices(self, session: str) -> Notices:
        if (notices := self._session(session).notices) is None:
            raise UsageError(f"Session {session} receives no notifications.")
        return notices

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
        self._kept.pop(session_id, None)
        self._unwatch(session_id)

    def _watch(self, session: str) -> None:
        if session in self._sessions and session not in self._watched:
            self._watched[session] = self._sessions[session].watch(self._event)

    def _unwatch(self, session: str) -> None:
        if (stop := self._watched.pop(session, None)) is not None:
            stop()

    def _event(self, event: Event) -> None:
        self._connection.notify("event", asdict(event), may_be_left_out=event.kind in PASSING)

    def _add_rules(self, session: str, rules: Sequence[str]) -> None:
        if session in self._sessions:
            self._sessions[session].add_rules(*rules)

    def _set_mode(self, session: str, mode: Mode | None) -> None:
        if session in self._sessions and mode is not None:
            self._sessions[session].set_mode(mode)

    def _client_told(self, session: str, call: str, kinds: Sequence[AskKind]) -> None:
        if session in self._sessions and isinstance(peer := self._sessions[session].lane.around.peer, RemotePeer):
            peer.told(call, kinds)

    # ── the kernel ───────────────────────────────────────────────────────────────────────────────

    async def _flush(self) -> None:
        await self._host.log.flush()

    async def _statuses(self) -> Sequence[ToolStatus]:
        return self._host.statuses_in(self.context)

    async def _find(self, query: str, limit: int, patience_ms: int | None, by_words: bool) -> Findings:
        patience_s = None if patience_ms is None else min(max(patience_ms, 0), _MAX_PATIENCE_MS) / 1000
        return await self._host.find_in(
            self.context, query, limit=max(limit, 1), patience_s=patience_s, by_words=by_words
        )

    async def _explain(
        self, tool: str, arguments: Mapping[str, Any], rules: Sequence[str | RuleEntry], headless: bool
    ) -> Explanation:
        return await self._host.explain_in(self.context, tool, arguments, rules=rules, headless=headless)

    async def _reload(self, tools: Sequence[Any] | None, offerings: Sequence[mirror.ToldOffering]) -> Difference:
        async with self._reloading:
            before = self._brought.tools
            try:
                return await self._reloaded(tools, offerings)
            except HandrailError:
                self._brought.tools = before
                raise

    async def _reloaded(self, tools: Sequence[Any] | None, offerings: Sequence[mirror.ToldOffering]) -> Difference:
        given = None if tools is None else self._brought.replaced(tools)
        for one, told in zip(self._contribution.offerings, offerings, strict=False):
            cast("RemoteOffering", one).lists = told.lists
        if self.context.shared and given:
            return self._part()
        given = given if not self.context.shared else None
        for context in [one for one in self._contexts.values() if one is not self.context]:
            await context.shelf.reload(given)
        return await self.context.shelf.reload(given)


def _cut_short(result: Result) -> bool:
    """Return whether a call was stopped or suspended because the kernel was shutting down."""
    return result.metadata.get("stopped_by") == "shutdown" or "parked" in result.metadata


def _ruled_in(session: HeldSession) -> list[Any]:
    """Return the provider tools by id, each with the reason why the session's rules exclude it, or None."""
    return [[offer.spec.id, offer.refused] for offer in session.native]
