"""The holder's side: those who joined, each with a context and sessions of its own, under the one arbiter.

A dropped connection is no abort. Calls that were proposed go on to their end and are recorded; the sessions they
belong to are suspended once the last has ended, and can be opened again by whoever joins next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from handrail.arbiter.execution import StopReason
from handrail.contract.errors import HandrailError, LoadError, UsageError
from handrail.contract.events import Event
from handrail.contract.people import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.runtime import ClientContext, Question
from handrail.contract.tool import Tool
from handrail.joining import mirror
from handrail.joining.address import Listener, listen
from handrail.joining.brought import BroughtTools
from handrail.joining.framing import Message
from handrail.joining.operations import Handler, Op, Operations, Refused
from handrail.joining.wire import Connection, ConnectionLost
from handrail.policy.explain import Explanation
from handrail.record.log import CommitLog
from handrail.registry.generation import Generation
from handrail.session.context import Context
from handrail.session.session import HeldSession

LEAVING = "leaving"
"""The refusal of a holder that ends: nothing was begun, and another holder will take it."""
_KEPT_GENERATIONS = 16
"""Older ones that a turn of a joined process may still be at."""

T = TypeVar("T")


class Host(Protocol):
    """What the server needs of the kernel that holds the workspace."""

    @property
    def log(self) -> CommitLog: ...

    def welcome(self) -> Message:
        """What a process that joins is told of this kernel."""
        ...

    def context_of(self, agent: str, tools: Iterable[Tool], rules: Iterable[str]) -> Context:
        """:raises LoadError: with every fault"""
        ...

    def learn(self, secrets: Mapping[str, str]) -> None:
        """:raises ValueError: for a value that cannot be redacted"""
        ...

    async def open_session(
        self,
        context: Context,
        id: str | None,
        *,
        attendant: Attendant | None,
        rules: Iterable[str],
        topic: str | None,
        client: ClientContext | None,
        face: str,
    ) -> HeldSession: ...

    async def explain_in(
        self, context: Context, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[str], headless: bool
    ) -> Explanation: ...

    def further_operations(self) -> Mapping[str, Handler]:
        """What else every process that joined may ask for."""
        ...


class Server:
    """Lets processes join one kernel."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.guests: set[Guest] = set()
        self.leaving = False
        self._listener: Listener | None = None
        self._left: dict[str, asyncio.Task[None]] = {}
        """Sessions whose process is gone while calls of theirs still run."""

    async def open(self, folder: Path, name: str) -> None:
        """:raises StartError: when no socket can be made"""
        self._listener = await listen(folder, name, self._accept)

    async def aclose(self) -> None:
        """Send everybody away. Their sessions are ended before by whoever ends the kernel."""
        self.leaving = True
        if self._listener is not None:
            await self._listener.aclose()
        if self._left:
            await asyncio.wait(self._left.values())
        for guest in tuple(self.guests):
            for context in guest.contexts:
                await context.aclose()

    def _accept(self, connection: Connection, hello: Message) -> tuple[Operations, Message]:
        if self.leaving:
            raise Refused(LEAVING, "the process that holds the workspace is ending; try again")
        guest = Guest(self, connection, hello)
        self.guests.add(guest)
        connection.when_lost(guest.lost)
        welcome = {**self.host.welcome(), "generation": mirror.of_generation(guest.context.generation)}
        welcome["agent"] = guest.context.manifest.as_data()
        welcome["rules"] = [[rule.text, rule.scope, rule.source] for rule in guest.context.rules]
        return guest.operations, welcome

    def leave(self, session: HeldSession) -> None:
        """The process of ``session`` is gone: let its calls end, then suspend it."""

        async def suspend() -> None:
            try:
                await session.settled()
                await session.suspend("was left by the process that had it open; open it again by its id")
            finally:
                del self._left[session.id]

        self._left[session.id] = asyncio.get_running_loop().create_task(suspend())

    async def is_left(self, session_id: str) -> None:
        """Wait until nothing runs any more in a session whose process was lost."""
        if (leaving := self._left.get(session_id)) is not None:
            await asyncio.wait((leaving,))


class Guest:
    """One process that joined."""

    def __init__(self, server: Server, connection: Connection, hello: Message) -> None:
        """
        :raises Refused: for a greeting that asks for what is not there
        """
        self._server = server
        self._host = server.host
        self._connection = connection
        self.face = _text(hello, "face", "library")[:40]
        self._sessions: dict[str, HeldSession] = {}
        self._watched: dict[str, Callable[[], None]] = {}
        self._generations: dict[int, Generation] = {}
        try:
            self._brought = BroughtTools(connection, hello.get("tools") or [])
            self._host.learn(cast("Mapping[str, str]", hello.get("secrets") or {}))
            self._rules = cast("Sequence[str]", hello.get("rules") or ())
            self.context = self._host.context_of(_text(hello, "agent", "default"), self._brought.tools, self._rules)
        except HandrailError as error:
            raise mirror.refusal_of(error) from None
        except ValueError as error:
            raise Refused("StartError", str(error)) from None
        self._token: int = self._host.welcome()["token"]
        self._keep(self.context.generation)
        self.context.shelf.watchers.append(self._published)
        self._others: dict[str, tuple[Context, Callable[[Generation], None]]] = {}
        """Contexts of further agents that its sessions name, by agent, and what tells it of their generations."""
        self._contexts: dict[str, Context] = {}
        """By session."""
        handlers: dict[str, Handler] = {
            "open": self._open,
            "reply": self._reply,
            "keyed": self._keyed,
            "recall": self._recall,
            "stop": self._stop,
            "close": self._close,
            "suspend": self._suspend,
            "explain": self._explain,
            "reload": self._reload,
            "flush": self._flush,
            "history": self._history,
            "keep": self._keep_messages,
            "parked": self._parked,
            **self._host.further_operations(),
        }
        requests = {name: Op(_told_apart(self, handler)) for name, handler in handlers.items()}
        self.operations = Operations(
            {**requests, **self._brought.requests},
            {"watch": self._watch, "unwatch": self._unwatch, "rules": self._add_rules, **self._brought.notices},
        )

    @property
    def leaving(self) -> bool:
        return self._server.leaving

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._server.guests.discard(self)
        self.context.shelf.watchers.remove(self._published)
        for session in self._sessions.values():
            self._server.leave(session)
        self._sessions.clear()
        for context, told in self._others.values():
            context.shelf.watchers.remove(told)
        if any(not context.shared for context in self.contexts):
            asyncio.get_running_loop().create_task(self._end_contexts())

    @property
    def contexts(self) -> list[Context]:
        """Its own, and those of further agents that its sessions name."""
        return [self.context, *(context for context, _ in self._others.values())]

    async def _end_contexts(self) -> None:
        for context in self.contexts:
            if not context.shared:
                await context.aclose()

    def _context(self, agent: object) -> Context:
        if agent is None or agent == self.context.agent:
            return self.context
        name = str(agent)
        if name not in self._others:
            context = self._host.context_of(name, self._brought.tools, self._rules)

            def told(generation: Generation) -> None:
                self._keep(generation)
                self._connection.notify("generation-of", {"agent": name, **mirror.of_generation(generation)})

            context.shelf.watchers.append(told)
            self._others[name] = (context, told)
            self._keep(context.generation)
        return self._others[name][0]

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def _open(self, body: Message) -> Message:
        session_id = body.get("id")
        if session_id is not None:
            await self._server.is_left(str(session_id))
        client = body.get("client")
        context = self._context(body.get("agent"))
        session = await self._host.open_session(
            context,
            session_id,
            attendant=None if body.get("headless", True) else RemotePerson(self._connection),
            rules=body.get("rules") or (),
            topic=body.get("topic"),
            client=None if client is None else ClientContext(**client),
            face=self.face,
        )
        self._sessions[session.id] = session
        self._contexts[session.id] = context
        if self._connection.lost is not None:
            self._server.leave(self._sessions.pop(session.id))
        told = {"id": session.id, "turns": session.turns}
        return told if context is self.context else {**told, "generation": mirror.of_generation(context.generation)}

    def _session(self, body: Message) -> HeldSession:
        session = self._sessions.get(str(body.get("session")))
        if session is None:
            raise UsageError(f"session {str(body.get('session'))[:80]!r} is not open in this process")
        return session

    async def _reply(self, body: Message) -> list[Any]:
        number = body["generation"]
        # A turn that was taken with another holder goes on with what there is here.
        session = self._session(body)
        now = self._contexts[session.id].generation
        generation = self._generations.get(number) if body["token"] == self._token else now
        if generation is None:
            raise UsageError(f"generation {number} of the tools is not kept any more; take a new turn")
        turn = session.turn_at(body["turn"], generation)
        answers = await turn.call_all([mirror.call_of(call) for call in body["calls"]])
        return [mirror.of_answer(answer) for answer in answers]

    async def _keyed(self, body: Message) -> Any:
        call = mirror.call_of(body["call"])
        text = call.arguments.decode("utf-8", "replace") if isinstance(call.arguments, bytes) else call.arguments
        return (await self._session(body).call(call.name, text, key=body["key"])).to_dict()

    async def _recall(self, body: Message) -> Any:
        """The answer, and whether the call had begun or waits: one that had not had no effect, and may be proposed anew."""
        call_id = str(body["call"])
        answer = await self._session(body).recall(call_id)
        begun = "parked" in answer.result.metadata or await self._host.log.outcome_of(call_id) is not None
        return [mirror.of_answer(answer), begun]

    async def _parked(self, body: Message) -> list[Any]:
        return [mirror.of_answer(answer) for answer in await self._session(body).resume_parked()]

    async def _stop(self, body: Message) -> int:
        return self._session(body).cancel(cast("StopReason", body.get("reason", "user")))

    async def _close(self, body: Message) -> None:
        session = self._session(body)
        await session.close()
        self._sessions.pop(session.id, None)
        self._contexts.pop(session.id, None)

    async def _suspend(self, body: Message) -> None:
        session = self._sessions.pop(self._session(body).id)
        await session.suspend("is suspended; open it again by its id")

    async def _history(self, body: Message) -> Any:
        history = self._session(body).history
        return [] if history is None else [[position, data] for position, data in await history.read()]

    async def _keep_messages(self, body: Message) -> None:
        history = self._session(body).history
        if history is not None:
            await history.keep([(position, data) for position, data in body["entries"]])

    def _watch(self, body: Message) -> None:
        session = self._sessions.get(str(body.get("session")))
        if session is not None and session.id not in self._watched:
            self._watched[session.id] = session.watch(self._event)

    def _unwatch(self, body: Message) -> None:
        if (stop := self._watched.pop(str(body.get("session")), None)) is not None:
            stop()

    def _event(self, event: Event) -> None:
        self._connection.notify("event", mirror.of_event(event), may_be_left_out=event.kind == "progress")

    def _add_rules(self, body: Message) -> None:
        session = self._sessions.get(str(body.get("session")))
        if session is not None:
            session.add_rules(*body["rules"])

    # ── the kernel ───────────────────────────────────────────────────────────────────────────────

    async def _explain(self, body: Message) -> Any:
        explanation = await self._host.explain_in(
            self.context, body["tool"], body["arguments"], rules=body["rules"], headless=body["headless"]
        )
        return mirror.of_explanation(explanation)

    async def _reload(self, body: Message) -> Any:
        tools = body.get("tools")
        if tools is not None and self.context.shared:
            raise UsageError("this process brought no tools when it joined, so it cannot bring any later")
        given = None if tools is None else self._brought.replaced(tools)
        for context, _ in self._others.values():
            context.shelf.reload(given)
        return mirror.of_difference(self.context.shelf.reload(given))

    async def _flush(self, body: object) -> None:
        await self._host.log.flush()

    def _keep(self, generation: Generation) -> None:
        self._generations[generation.number] = generation
        while len(self._generations) > _KEPT_GENERATIONS:
            del self._generations[next(iter(self._generations))]

    def _published(self, generation: Generation) -> None:
        self._keep(generation)
        self._connection.notify("generation", mirror.of_generation(generation))


class RemotePerson:
    """Whoever sits at a process that joined. When that is gone, nobody is here now: what was asked is parked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        try:
            return mirror.decision_of(await self._connection.request("approve", mirror.of_request(request)))
        except ConnectionLost:
            return ApprovalAnswer("later")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        body = {"session": session_id, "questions": [mirror.of_question(question) for question in questions]}
        try:
            return await self._connection.request("answer", body)
        except ConnectionLost:
            return None


def _told_apart(guest: Guest, handler: Handler) -> Handler:
    """Errors travel under their names; a body of the wrong shape is told, and no defect of ours."""

    def handled(body: Any) -> Coroutine[Any, Any, Any]:
        return _handled(guest, handler, body)

    return handled


async def _handled(guest: Guest, handler: Handler, body: Any) -> Any:
    if guest.leaving:
        raise Refused(LEAVING, "the process that holds the workspace is ending")
    try:
        return await handler(body)
    except Refused:
        raise
    except (LoadError, HandrailError) as error:
        raise mirror.refusal_of(error) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("UsageError", f"the request cannot be read: {type(error).__name__}: {str(error)[:200]}") from None


def _text(hello: Message, name: str, default: str) -> str:
    value = hello.get(name)
    return value if isinstance(value, str) else default
