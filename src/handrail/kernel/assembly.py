"""The assembly of all rooms, from the bottom up, in the lease holder."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

from handrail.arbiter.arbiter import Arbiter, Limits
from handrail.arbiter.locks import LockTable, Resources
from handrail.arbiter.output.redaction import Redactor
from handrail.catalog.embedders.choosing import ENDPOINT, NONE, Chosen, encoder_of
from handrail.catalog.search.finding import AHEAD_S, Searches
from handrail.config import Configuration, SearchSettings, Settings, WatchdogSettings
from handrail.config.settings import SHIPPED
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import Fault, LoadError
from handrail.contract.generation import Generation, Source
from handrail.contract.rules import RuleEntry, entry_of
from handrail.contract.sandbox import Profile, Sandbox
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.requires import CapabilitySet, Layer, Variables
from handrail.contract.tool.settings import SettingsLayer, given_layer
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.kernel.agents import Appointed, appoint, equipped, sources_of
from handrail.kernel.answering import learn, lifetimes_of, registered_secrets, shaper_of
from handrail.kernel.sandbox import sandbox_of
from handrail.policy.authority import Authority
from handrail.policy.authority import hidden as hides
from handrail.policy.rules.checking import check_loaded, contradictions, specs_of
from handrail.policy.rules.rules import Rule, RuleBook, Scope, default_rules, in_mode, parse_rule
from handrail.policy.targets import agent_layer, call_set, ceiling_layer
from handrail.policy.watchdogs import Exfiltration, OutgoingSecrets, RepeatedFailures
from handrail.policy.watchdogs.watchdog import ExternalWatchdog, Watchdog
from handrail.record.log import CommitLog, Interrupted, Record
from handrail.registry.generations import OpenTools, Succession
from handrail.registry.sources.all import ToolSources
from handrail.registry.sources.executables import Confinement
from handrail.runtime.guard.guard import Guarded
from handrail.runtime.secrets import SecretStore
from handrail.runtime.surface import CallRuntime
from handrail.sandbox.operated import Operated
from handrail.session.context import Brought, Context, Shelf
from handrail.store.encoding import encode
from handrail.store.opening import Store
from handrail.upstream.configured import configured
from handrail.upstream.servers import Ground, Upstreams

_Given = tuple[tuple[Tool, ...], tuple[Offering, ...]]

MOST_RULES = 2_000
"""The maximum number of rules of an agent, a project and a process together. Each call is matched against them."""


@dataclass(slots=True)
class Rooms:
    """The components of one workspace in the lease holder. They create the contexts of sessions."""

    store: Store
    config: Configuration
    log: CommitLog
    sandbox: Sandbox
    arbiter: Arbiter
    interrupted: tuple[Interrupted, ...]
    variables: Variables
    ceiling: Layer | None
    secrets: SecretStore
    """The secrets of the operator, which tools of every process may receive."""
    watchdogs: tuple[Watchdog, ...]
    """The watchdogs of the operator, which check the calls of every process."""
    programs: Operated
    """The sandbox below ``sandbox``, with the sandboxes that are ready for the next calls."""
    finder: Searches
    """The search over the tools of all generations."""
    upstreams: Upstreams
    """The MCP servers whose tools every agent may have."""
    shelves: dict[str, tuple[Appointed, Shelf]] = field(default_factory=dict[str, tuple[Appointed, Shelf]])
    """The shared shelves by agent, each with the agent that it was created for."""
    every: weakref.WeakSet[Shelf] = field(default_factory=weakref.WeakSet[Shelf])
    """All shelves, including those of single processes."""
    outdated: list[Shelf] = field(default_factory=list[Shelf])
    """The shelves whose manifest has changed; sessions may still use them."""
    open_tools: OpenTools = field(default_factory=OpenTools)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _making: threading.Lock = field(default_factory=threading.Lock)
    """Locked while a thread creates a context, so that the contexts of one agent share a shelf."""

    def context(
        self,
        agent: str,
        brought: Brought | None = None,
    ) -> Context:
        """Return the context of an agent for the sessions of one process.

        :param brought: the registrations of the process. Without tools, offerings, secrets and tool settings, the process
            shares the generations of the agent with others
        :raises LoadError: with all faults of the agent's manifest, tools and rules
        :raises UsageError: if the agent does not exist
        """
        with self._making:
            return self._context(agent, brought or Brought())

    def _context(self, agent: str, brought: Brought) -> Context:
        given = (brought.tools, brought.offerings)
        texts = configured_rules(self.config, brought.rules)
        values = (
            SettingsLayer(_AT_THE_START, brought.tool_settings, known=True),
            given_layer("open_kernel", brought.tool_config, known=True),
        )
        shared = given == ((), ()) and not brought.secrets and not any(layer.tools for layer in values)
        store = self.secrets.with_values(brought.secrets or {})
        appointed = appoint(self.config, agent, self.store.folders)
        before, shelf = self.shelves.get(agent, (None, None)) if shared else (None, None)
        if shelf is not None and before == appointed:
            current = shelf.succession.current
            parsed = _together(*appointed.rules(current.entries, current.beyond, current), texts, current)
        else:
            fresh, parsed = self._shelf(appointed, given, texts, store, values)
            if shelf is not None:
                self.outdated.append(shelf)
            if shared:
                self.shelves[agent] = (appointed, fresh)
            shelf = fresh
        authority = Authority(
            appointed.variables(self.variables),
            self._layer(appointed, shelf.succession.living),
            (*brought.watchdogs, *self.watchdogs),
            ceiling=self.ceiling,
            agent=appointed.manifest.as_data(),
        )
        chosen = brought.mode or appointed.manifest.mode or brought.configured_mode or self.config.settings.mode
        book = in_mode(RuleBook(appointed.shipped_rules()).with_rules(*parsed), chosen)
        return Context(
            appointed.manifest,
            shelf,
            authority,
            book,
            appointed.further,
            shared=shared,
            secrets=store,
            catalog=(brought.catalog or self.config.settings.catalog).options(appointed.manifest.core),
        )

    async def look_again(self, source: Source) -> None:
        """Publish the current tools of a source to all agents. Faults of one agent do not affect the others."""
        shelves = [shelf for shelf in self.every if not shelf.succession.closed]
        await asyncio.gather(*(shelf.refresh([source]) for shelf in shelves), return_exceptions=True)

    async def aclose(self) -> None:
        """End all persistent tools and prepared sandboxes, even if some of them fail."""
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self.programs.aclose)  # the last
            ends.push_async_callback(self.upstreams.aclose)
            ends.push_async_callback(self.finder.aclose)
            for shelf in (*self.outdated, *(shelf for _, shelf in self.shelves.values())):
                ends.push_async_callback(shelf.succession.aclose)

    def _shelf(
        self,
        appointed: Appointed,
        given: _Given,
        texts: Sequence[RuleText],
        secrets: SecretStore,
        values: Sequence[SettingsLayer],
    ) -> tuple[Shelf, list[Rule]]:
        workspace, further = str(self.store.folders.workspace), appointed.further
        variables = appointed.variables(self.variables)
        shelf: Shelf

        def own(spec: ToolSpec) -> tuple[CapabilitySet, Profile]:
            """Return the capabilities and folders of a persistent tool, which do not depend on the caller."""
            scratch = self.store.folders.home_of(spec.id)
            hidden = (str(self.store.folders.state),)
            profile = Profile(
                workspace,
                scratch,
                spec.side_effect != "read",
                writable=further.writable,
                further=further.readable,
                hidden=hidden,
                secrets=secrets.given(spec),
                denials=hides(RuleBook(appointed.shipped_rules()).with_rules(*parsed), workspace),
            )
            layer = self._layer(appointed, shelf.succession.living)
            return call_set(spec, variables, layer, self.ceiling), profile

        confinement = Confinement(self.sandbox, _profile_of, own)
        upstreams = self.upstreams
        sources = sources_of(
            self.config,
            appointed.checked,
            self.store.folders,
            confinement,
            secrets,
            *given,
            lambda: upstreams.sources,
            values,
        )
        generation, parsed = _loaded(sources, next(self.numbers), appointed, texts)
        shelf = Shelf(
            sources,
            Succession(generation, self.open_tools, self._loop),
            lambda living: self._layer(appointed, living),
            lambda: next(self.numbers),
            self._published,
        )
        self.every.add(shelf)
        return shelf, parsed

    def _layer(self, appointed: Appointed, generations: Iterable[Generation]) -> Layer:
        """Return the requirements of the agent and its tools, including generations that turns still use."""
        specs = (entry.spec for generation in generations for entry in generation.entries.values())
        manifest = appointed.manifest
        return agent_layer(manifest.id, manifest.requires, specs, appointed.variables(self.variables))

    def _published(self, told: Mapping[str, Any]) -> None:
        self.log.append([Record("generation", "", "", told)])


async def assemble(store: Store, config: Configuration, secrets: Mapping[str, str]) -> Rooms:
    """Assemble the components for an open store, without contexts.

    :raises LogUnavailable: if the log cannot take records
    :raises UsageError: if a secret cannot be redacted
    """
    log = CommitLog(store.database)
    interrupted = tuple(await log.recover())
    settings, folders = config.settings, store.folders
    variables = folders.variables
    redactor, known = await registered_secrets(config, secrets)
    limits = Limits(**settings.limits.model_dump(), lifetimes=lifetimes_of(config))
    shaper = shaper_of(config, folders, redactor)
    arbiter = Arbiter(log, store.lease, LockTable(), Resources(), shaper, limits)
    arbiter.jobs.tree = store.sessions
    programs = sandbox_of(config)
    ceiling = ceiling_layer(settings.ceiling, variables)
    learned = partial(learn, redactor)
    upstreams = Upstreams(
        Ground(folders, Guarded(programs), variables, ceiling, await asyncio.to_thread(_project_book, config), learned),
        configured(config, known, learned),
        version=version("handrail"),
    )
    rooms = Rooms(
        store,
        config,
        log,
        Guarded(programs),
        arbiter,
        interrupted,
        variables,
        ceiling,
        known,
        tuple(_watchdogs(settings, redactor)),
        programs,
        Searches(
            folders.search,
            encoder_of(_embedder(settings.search, known)),
            ahead_s=None
            if settings.search.embedder == ENDPOINT
            else AHEAD_S,  # send nothing to an endpoint before a search
        ),
        upstreams,
    )
    upstreams.when_changed = rooms.look_again
    upstreams.look_at_new()
    return rooms


def _project_book(config: Configuration) -> RuleBook:
    """Return the rules for programs without a call: the default rules and the project's rules."""
    texts = [one for one in configured_rules(config, ()) if not one.left_out]
    try:
        own = parse_rules(texts, None)
    except LoadError:
        own = []  # the faults are reported with those of the agent
    return RuleBook(default_rules()).with_rules(*own)


def _embedder(settings: SearchSettings, known: SecretStore) -> Chosen:
    """Choose the embedder for the search by meaning."""
    if settings.embedder != ENDPOINT:
        return Chosen(settings.embedder, model=settings.model)
    if not settings.url or not settings.model:
        return Chosen(NONE, why_none="`embedder` is `endpoint`, but `url` or `model` is missing under [search]")
    if not settings.secret:
        return Chosen(ENDPOINT, settings.url, settings.model)
    if (why := known.reason_missing(settings.secret)) is not None:
        return Chosen(NONE, why_none=f"the key of the endpoint is not available: {why}")
    return Chosen(ENDPOINT, settings.url, settings.model, known.chosen([settings.secret])[settings.secret])


def _watchdogs(settings: Settings, redactor: Redactor) -> Iterator[Watchdog]:
    """Yield the built-in watchdogs with their last settings, and then the operator's commands."""
    chosen: dict[str | None, WatchdogSettings] = {use: WatchdogSettings(use=use) for use in SHIPPED}
    chosen |= {one.use: one for one in settings.watchdogs if one.use is not None}
    for use, one in chosen.items():
        if one.action == "off":
            continue
        if use == "exfiltration":
            yield Exfiltration(one.action)
        elif use == "secrets":
            yield OutgoingSecrets(
                partial(encode, max_bytes=2**62),
                lambda encoded: redactor.active and redactor.found_in(encoded),
                one.action,
            )
        else:
            yield RepeatedFailures(one.failures, one.action)
    for one in settings.watchdogs:
        if one.command is not None:
            watchdog = ExternalWatchdog(one.command, timeout_ms=one.timeout_ms)
            watchdog.find()
            yield watchdog


_AT_THE_START = "given at the start"


class RuleText(NamedTuple):
    """A rule as text, with its source.

    :param narrows: whether it may only restrict, because its file is not trusted
    :param left_out: whether it is checked but not used
    """

    scope: Scope
    source: str
    text: str
    narrows: bool = False
    left_out: bool = False
    match: tuple[Any, ...] = ()
    not_match: tuple[Any, ...] = ()


def parse_rules(texts: Iterable[RuleText], generation: Generation | None) -> list[Rule]:
    """Parse rule texts, and return the rules without those that are left out.

    :param generation: the tools that they may name, including those of other agents; None if the tools are unknown
    :raises LoadError: with all invalid texts, or if there are more than :data:`MOST_RULES`
    """
    texts = tuple(texts)
    if len(texts) > MOST_RULES:
        raise LoadError([_too_many(len(texts), texts[-1].source)])
    known = None if generation is None else {*generation.entries, *generation.beyond}
    specs = None if generation is None else specs_of(generation.entries)
    found: list[Rule] = []
    faults: list[Fault] = []
    for given in texts:
        try:
            rule = parse_rule(given.text, scope=given.scope, source=given.source, known=known)
            check_loaded(rule, given.match, given.not_match, specs)
        except ValueError as error:
            faults.append(Fault(given.source, "", str(error)))  # which names the rule
            continue
        if not given.left_out:
            found.append(replace(rule, narrows=given.narrows))
    for together in _by_file(found):
        faults += [Fault(together[at].source, "", problem) for at, problem in contradictions(together)]
    if faults:
        raise LoadError(faults)
    return found


def _too_many(count: int, source: str) -> Fault:
    problem = f"Too many rules: {count:,}. The maximum is {MOST_RULES:,}. Use one rule with a pattern for many (allow bash git log *)."
    return Fault(source, "", problem)


def _by_file(rules: Iterable[Rule]) -> Iterable[list[Rule]]:
    """Group rules by their place, because rules in one place must not contradict each other.

    The rules from the start of a process are left out: they come from variables, flags and the files of a client process.
    """
    places: dict[tuple[str, str], list[Rule]] = {}
    for rule in (one for one in rules if one.source != _AT_THE_START):
        file, colon, line = rule.source.rpartition(":")
        places.setdefault((rule.scope, file if colon and line.isdigit() else rule.source), []).append(rule)
    return places.values()


def _loaded(
    tools: ToolSources, number: int, appointed: Appointed, texts: Sequence[RuleText]
) -> tuple[Generation, list[Rule]]:
    """Load the first generation of a shelf, and the rules that refer to its tools.

    :raises LoadError: with all faults of both
    """
    generation, rules, faults = equipped(tools, number, appointed)
    parsed = _together(rules, faults, texts, generation)
    assert generation is not None, "without faults there is one"
    return generation, parsed


def _together(
    rules: list[Rule], faults: list[Fault], texts: Sequence[RuleText], generation: Generation | None
) -> list[Rule]:
    """Combine ``rules`` with the rules in ``texts``.

    :raises LoadError: with ``faults`` and all invalid texts
    """
    try:
        rules = rules + parse_rules(texts, generation)
    except LoadError as error:
        faults = [*faults, *error.faults]
    if len(rules) > MOST_RULES:
        faults = [*faults, _too_many(len(rules), rules[0].source)]
    if faults:
        raise LoadError(faults)
    return rules


def _profile_of(runtime: Runtime) -> Profile:
    """Return the folders of the session that ``runtime`` belongs to."""
    assert isinstance(runtime, CallRuntime)
    return runtime.profile


def configured_rules(config: Configuration, rules: Iterable[str | RuleEntry]) -> list[RuleText]:
    """Return the project's rules and those of one process."""
    found = [
        RuleText("project", rule.source, rule.text, rule.narrows, match=rule.match, not_match=rule.not_match)
        for rule in config.project_rules
    ]
    found += [
        RuleText("project", rule.source, rule.text, left_out=True, match=rule.match, not_match=rule.not_match)
        for rule in config.held_rules
    ]
    return found + given_rules(rules, _AT_THE_START)


def given_rules(rules: Iterable[str | RuleEntry], source: str) -> list[RuleText]:
    """Return the rules of a program as texts in the session scope."""
    entries = map(entry_of, rules)
    return [RuleText("session", source, entry.rule, match=entry.match, not_match=entry.not_match) for entry in entries]
