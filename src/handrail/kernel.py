"""How it is all put together: the one composition root.

:meth:`Kernel.open` builds the rooms from the bottom up (state, log, sandbox, registry, policy, arbiter) and
takes them down in reverse. Nothing else in the project constructs more than its own room.
"""

from __future__ import annotations

import asyncio
import secrets as randomness
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail import config as configuration
from handrail.arbiter.arbiter import Arbiter, Limits
from handrail.arbiter.call import Lane
from handrail.arbiter.locks import LockTable
from handrail.arbiter.output import Shaper
from handrail.arbiter.redaction import RedactedValues, Redactor
from handrail.arbiter.resources import Resources
from handrail.config import Configuration
from handrail.contract.errors import Fault, LoadError, ToolError, UsageError
from handrail.contract.names import wire_name
from handrail.contract.people import Attendant
from handrail.contract.requires import CapabilitySet, Layer, Requires, Variables
from handrail.contract.runtime import ClientContext, Runtime
from handrail.contract.sandbox import Profile, Sandbox
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.policy.authority import Authority
from handrail.policy.capabilities import agent_layer, call_set, ceiling_layer
from handrail.policy.defaults import default_book, reading
from handrail.policy.external import ExternalWatchdog
from handrail.policy.rules import Rule, RuleBook, Scope, parse_rule
from handrail.policy.watchdog import Watchdog
from handrail.record.artifacts import Artifacts
from handrail.record.log import CommitLog, Interrupted, Record
from handrail.registry.generation import Difference, Generation, described
from handrail.registry.sources.all import ToolSources
from handrail.registry.sources.executables import Confinement
from handrail.registry.succession import Succession
from handrail.runtime.roots import Roots
from handrail.runtime.surface import CallRuntime, Surroundings
from handrail.sandbox import tiers
from handrail.session.session import Session
from handrail.store.opening import Store
from handrail.store.sessions import SessionRow

if TYPE_CHECKING:
    from handrail.doctor import Check
    from handrail.policy.explain import Explanation

AGENT = "default"
"""The one agent there is without agent manifests."""

Folder = str | Path


class Kernel:
    """An open workspace: its tools, its log, its sessions. Made by :meth:`open`; bound to one event loop."""

    def __init__(
        self,
        store: Store,
        log: CommitLog,
        arbiter: Arbiter,
        succession: Succession,
        tools: ToolSources,
        rules: RuleBook,
        sandbox: Sandbox,
        config: Configuration,
        interrupted: Sequence[Interrupted],
    ) -> None:
        self.log = log
        self.config = config
        self.interrupted = tuple(interrupted)
        """Calls that had begun when the last process ended: their outcome is unknown and they are not run again."""
        self._store = store
        self._arbiter = arbiter
        self._succession = succession
        self._tools = tools
        self._rules = rules
        self._sandbox = sandbox
        self._sessions: dict[str, Session] = {}

    @staticmethod
    @asynccontextmanager
    async def open(
        workspace: Folder = ".",
        *,
        tools: Iterable[Tool] = (),
        rules: Iterable[str] = (),
        secrets: Mapping[str, str] | None = None,
        state: Folder | None = None,
        config: Folder | None = None,
        watchdogs: Iterable[Watchdog] = (),
        face: str = "library",
        allow_home: bool = False,
    ) -> AsyncGenerator[Kernel]:
        """Open ``workspace`` and hold it until the block ends.

        :param tools: tools given in code, beside the built-ins, the tool folders and entry points
        :param rules: session rules, as ``"allow bash git status"``
        :param secrets: name to value; the values are redacted wherever they appear
        :param state: where state is kept instead of the platform's state folder
        :param config: the configuration file instead of the platform's
        :param watchdogs: see every call before it runs, in this order, and can only narrow
        :param allow_home: open a home folder or ``/`` all the same
        :raises LoadError: with every fault of configuration, rules and tools
        :raises UsageError: for an argument of the wrong form
        :raises StartError: when state, lease or sandbox are not to be had
        """
        settings = configuration.load(config)
        async with AsyncExitStack() as stack:
            store = Store.open(workspace, state, face=face, allow_home=allow_home)
            stack.push_async_callback(store.aclose)
            configuration.check_apart(settings, store.folders.workspace)
            kernel = await _assemble(store, settings, tuple(tools), _texts(rules), secrets or {}, tuple(watchdogs))
            stack.push_async_callback(kernel._shut_down)  # pyright: ignore[reportPrivateUsage]
            yield kernel

    @property
    def generation(self) -> Generation:
        """The tools there are now. A turn keeps those there were when it began."""
        return self._succession.current

    @property
    def workdir(self) -> str:
        """The workspace's canonical folder."""
        return str(self._store.folders.workspace)

    @property
    def sandbox(self) -> Sandbox:
        return self._sandbox

    @property
    def authority(self) -> Authority:
        return self._arbiter.authorisation.authority

    @property
    def state_folder(self) -> str:
        """Where this workspace's log and database are."""
        return str(self._store.folders.own)

    def reload(self, tools: Iterable[Tool] | None = None) -> Difference:
        """Look through the sources of tools again and publish what they have as the next generation, in one step.

        Turns and calls that have begun go on with the tools they began with. The log names the new generation.
        Tool folders are read while the event loop waits.

        :param tools: instead of the tools given in code before; None leaves those as they are
        :raises LoadError: with every fault; the current generation stays
        """
        sought = self._tools if tools is None else replace(self._tools, given=tuple(tools))
        generation = sought.load(self.generation.number + 1)
        difference = self._succession.publish(generation)
        self._tools = sought
        self.authority.agent_layer = _agent_layer(self._succession.living, self.authority.variables)
        self.log.append([Record("generation", "", "", described(generation, difference))])
        return difference

    async def explain(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[str] = (), headless: bool = True
    ) -> Explanation:
        """How a call would be decided in a new session, by what, and what would change it. Runs and records nothing.

        :raises ToolError: ``unknown_tool``, ``unavailable`` or ``invalid_input``, as the call itself would be answered
        """
        from handrail.policy.explain import explain

        entry = self.generation.resolve(tool)
        if entry is None:
            nearest = " or ".join(self.generation.nearest(tool))
            raise ToolError(
                f"there is no tool {tool[:80]!r}" + (f"; did you mean {nearest}?" if nearest else ""),
                kind="unknown_tool",
            )
        if entry.withheld is not None:
            raise ToolError(f"{entry.id} is withheld: {entry.withheld}", kind="unavailable")
        if problems := entry.schema.problems(dict(arguments)):
            raise ToolError(f"{entry.id}: " + "; ".join(problems), kind="invalid_input")
        return await explain(
            self.authority,
            entry.spec,
            arguments,
            rules=self._rules.with_rules(
                *_parsed([("session", "session", text) for text in _texts(rules)], self.generation)
            ),
            roots=Roots(self.workdir),
            headless=headless,
        )

    def doctor(self) -> list[Check]:
        """What this machine and this kernel can do, what is withheld, and the remedies."""
        from handrail import doctor

        return [*doctor.of_machine(self.workdir), *doctor.of_kernel(self)]

    @property
    def rules(self) -> RuleBook:
        """The rules every session starts with."""
        return self._rules

    async def session(
        self,
        id: str | None = None,
        *,
        headless: bool = True,
        attendant: Attendant | None = None,
        rules: Iterable[str] = (),
        topic: str | None = None,
        client: ClientContext | None = None,
    ) -> Session:
        """Open a session, or one that was open before, by its ``id``.

        :param headless: nobody can be asked; ignored when there is an ``attendant``
        :param attendant: how to reach the person who can be asked
        :param rules: further rules of this session only
        """
        if attendant is None and not headless:
            raise UsageError("a session that is not headless needs an attendant=… who can be asked")
        if id is not None and id in self._sessions:
            raise UsageError(f"session {id!r} is open already")
        session_id = id or _new_session_id()
        folders = self._store.folders
        output, scratch = folders.output(session_id), folders.scratch(session_id)
        around = Surroundings(
            session_id=session_id,
            agent=AGENT,
            workdir=self.workdir,
            scratch=str(scratch),
            roots=Roots(self.workdir, (str(output),)),
            sandbox=self._sandbox,
            values=RedactedValues(self._store.state, self._arbiter.shaper.redactor),
            attendant=attendant,
            topic=topic,
            client=client,
            hidden=(str(folders.state),),
        )
        own = _parsed([("session", "session", text) for text in _texts(rules)], self.generation)
        lane = Lane(around, self._rules.with_rules(reading(str(output)), *own), attendant)
        # Call ids stay unique when a session goes on.
        turns = self.log.last_turn(session_id) if id is not None else 0
        session = Session(self._arbiter, lane, lambda: self.generation, self._closed, turns)
        self._sessions[session_id] = session
        try:
            await self._store.sessions.open(
                SessionRow(session_id, time.time_ns(), agent=AGENT, topic=topic, headless=attendant is None)
            )
        except BaseException:
            del self._sessions[session_id]
            raise
        self.log.append([Record("session-opened", session_id, "", {"agent": AGENT, "headless": attendant is None})])
        return session

    async def _closed(self, session: Session) -> None:
        """Taken from the list last: until its folders are gone nobody may open it again."""
        self.log.append([Record("session-closed", session.id, "", {})])
        try:
            await self._store.sessions.close(session.id, time.time_ns())
        finally:
            await asyncio.to_thread(self._store.folders.discard, session.id)
            self._sessions.pop(session.id, None)

    async def _shut_down(self) -> None:
        """Stop what runs, wait for its answers, write what is left. Sessions are suspended, not closed."""
        why = "has ended with its kernel, which is closed; open a kernel anew"
        try:
            await asyncio.gather(*(session.end("shutdown", why) for session in self._sessions.values()))
            await self._arbiter.runs.settled()
            await self._succession.aclose()
        finally:
            try:
                await self.log.flush()
            finally:
                self._arbiter.shaper.close()


async def _assemble(
    store: Store,
    settings: Configuration,
    tools: tuple[Tool, ...],
    rules: tuple[str, ...],
    secrets: Mapping[str, str],
    watchdogs: tuple[Watchdog, ...],
) -> Kernel:
    workspace = str(store.folders.workspace)
    log = CommitLog(store.database)
    interrupted = await log.recover()
    sandbox = tiers.choose()
    # What tools may reach of the outputs; which of them a session does reach is a matter of its rules and roots.
    variables = Variables(workspace=(workspace,), ad_hoc=(str(store.folders.outputs),))
    ceiling = ceiling_layer(settings.settings.ceiling, variables)

    def own(spec: ToolSpec) -> tuple[CapabilitySet, Profile]:
        """The set and folders of a tool that stays up between calls: its own, whoever calls it."""
        scratch = store.folders.scratch(f"tool-{wire_name(spec.id)[-59:]}")
        hidden = (str(store.folders.state),)
        profile = Profile(workspace, str(scratch), spec.side_effect != "read", hidden=hidden)
        return call_set(spec, variables, authority.agent_layer, ceiling), profile

    (_, everybody), (_, of_agent) = settings.tool_folders(AGENT)
    sources = ToolSources(everybody, of_agent, workspace, Confinement(sandbox, _profile_of, own), tools)
    generation, own_rules = _loaded(sources, _rule_texts(settings, rules))
    external = (ExternalWatchdog(w.command, timeout_ms=w.timeout_ms) for w in settings.settings.watchdogs)
    agent = _agent_layer([generation], variables)
    authority = Authority(variables, agent, (*watchdogs, *external), ceiling=ceiling)
    shaper = Shaper(Redactor(secrets), Artifacts(store.folders.artifacts), store.folders.output)
    limits = Limits(settings.settings.limits.lock_wait_ms, settings.settings.limits.grace_ms)
    arbiter = Arbiter(log, authority, LockTable(), Resources(), shaper, limits)
    log.append([Record("generation", "", "", described(generation))])
    book = default_book().with_rules(*own_rules)
    return Kernel(store, log, arbiter, Succession(generation), sources, book, sandbox, settings, interrupted)


def _loaded(tools: ToolSources, rules: Sequence[tuple[Scope, str, str]]) -> tuple[Generation, list[Rule]]:
    """The first generation, and the rules, which name its tools.

    :raises LoadError: with every fault of both
    """
    try:
        generation = tools.load(1)
    except LoadError as error:
        faults = list(error.faults)
    else:
        return generation, _parsed(rules, generation)
    try:
        _parsed(rules, None)
    except LoadError as error:
        faults += error.faults
    raise LoadError(faults)


def _agent_layer(generations: Iterable[Generation], variables: Variables) -> Layer:
    """What the agent's tools require, of the older generations too that a turn still holds."""
    specs = (entry.spec for generation in generations for entry in generation.entries.values())
    return agent_layer(AGENT, Requires(), specs, variables)


def _profile_of(runtime: Runtime) -> Profile:
    """The folders of the session that ``runtime`` belongs to."""
    assert isinstance(runtime, CallRuntime)
    return runtime.profile


def _texts(rules: Iterable[str]) -> tuple[str, ...]:
    """:raises UsageError: for a single text, whose letters Python would take for rules"""
    if isinstance(rules, str):
        raise UsageError(f"rules={rules!r} is one text; give a list of rules, as in rules=[{rules!r}]")
    return tuple(rules)


def _rule_texts(settings: Configuration, rules: Iterable[str]) -> list[tuple[Scope, str, str]]:
    found: list[tuple[Scope, str, str]] = []
    for text in settings.settings.rules:
        found.append(("project", str(settings.file), text))
    for text in rules:
        found.append(("session", "given at the start", text))
    return found


def _parsed(texts: Iterable[tuple[Scope, str, str]], generation: Generation | None) -> list[Rule]:
    """Rules from ``(scope, source, text)``.

    :param generation: the tools that they may name; None where nobody knows
    :raises LoadError: with every text that is no rule
    """
    known = None if generation is None else generation.entries
    found: list[Rule] = []
    faults: list[Fault] = []
    for scope, source, text in texts:
        try:
            found.append(parse_rule(text, scope=scope, source=source, known=known))
        except ValueError as error:
            faults.append(Fault(source, "", str(error)))  # which names the rule
    if faults:
        raise LoadError(faults)
    return found


def _new_session_id() -> str:
    """Sorts by time, and cannot be guessed."""
    return f"ses_{time.time_ns() // 1_000_000:012x}{randomness.token_hex(5)}"
