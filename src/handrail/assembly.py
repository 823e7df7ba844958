"""The rooms, put together from the bottom up in the process that holds the workspace."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from handrail.arbiter.arbiter import Arbiter, Limits
from handrail.arbiter.locks import LockTable
from handrail.arbiter.output import Shaper
from handrail.arbiter.redaction import Redactor
from handrail.arbiter.requests import HOUR_NS, Lifetimes
from handrail.arbiter.resources import Resources
from handrail.config import Configuration
from handrail.contract.errors import Fault, LoadError
from handrail.contract.names import wire_name
from handrail.contract.requires import CapabilitySet, Layer, Requires, Variables
from handrail.contract.runtime import Runtime
from handrail.contract.sandbox import Profile, Sandbox
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.policy.authority import Authority
from handrail.policy.capabilities import agent_layer, call_set, ceiling_layer
from handrail.policy.defaults import default_book
from handrail.policy.external import ExternalWatchdog
from handrail.policy.rules import Rule, Scope, parse_rule
from handrail.policy.watchdog import Watchdog
from handrail.record.artifacts import Artifacts
from handrail.record.log import CommitLog, Interrupted, Record
from handrail.registry.generation import Difference, Generation, described
from handrail.registry.sources.all import ToolSources
from handrail.registry.sources.executables import Confinement
from handrail.registry.succession import Succession
from handrail.runtime.surface import CallRuntime
from handrail.sandbox import tiers
from handrail.session.context import Context, Shelf
from handrail.store.opening import Store


@dataclass(slots=True)
class Rooms:
    """Everything of one workspace in the process that holds it. Contexts are made from it, and given back to it."""

    store: Store
    config: Configuration
    log: CommitLog
    sandbox: Sandbox
    arbiter: Arbiter
    interrupted: tuple[Interrupted, ...]
    variables: Variables
    ceiling: Layer | None
    watchdogs: tuple[Watchdog, ...]
    """The operator's, which see the calls of every process."""
    shelves: dict[str, Shelf] = field(default_factory=dict[str, Shelf])
    """The shared ones, by agent."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def context(
        self,
        agent: str,
        *,
        tools: Iterable[Tool] = (),
        rules: Iterable[str] = (),
        watchdogs: Iterable[Watchdog] = (),
    ) -> Context:
        """What the sessions of one process work with.

        :param tools: that it brings; without any it shares its agent's generations with others
        :param rules: session rules of all its sessions
        :raises LoadError: with every fault of tools and rules
        """
        given = tuple(tools)
        texts = _rule_texts(self.config, rules)
        shared = not given
        shelf = self.shelves.get(agent) if shared else None
        if shelf is None:
            shelf, parsed = self._shelf(agent, given, texts)
            if shared:
                self.shelves[agent] = shelf
        else:
            parsed = parse_rules(texts, shelf.succession.current)
        layer = self._layer(agent, shelf.succession.living)
        authority = Authority(self.variables, layer, (*watchdogs, *self.watchdogs), ceiling=self.ceiling)
        return Context(agent, shelf, authority, default_book().with_rules(*parsed), shared=shared)

    async def aclose(self) -> None:
        """End the tools that stay up between calls."""
        for shelf in self.shelves.values():
            await shelf.succession.aclose()

    def _shelf(
        self, agent: str, given: tuple[Tool, ...], texts: Sequence[tuple[Scope, str, str]]
    ) -> tuple[Shelf, list[Rule]]:
        workspace = str(self.store.folders.workspace)
        (_, everybody), (_, of_agent) = self.config.tool_folders(agent)
        shelf: Shelf

        def own(spec: ToolSpec) -> tuple[CapabilitySet, Profile]:
            """The set and folders of a tool that stays up between calls: its own, whoever calls it."""
            scratch = self.store.folders.scratch(f"tool-{wire_name(spec.id)[-59:]}")
            hidden = (str(self.store.folders.state),)
            profile = Profile(workspace, str(scratch), spec.side_effect != "read", hidden=hidden)
            layer = self._layer(agent, shelf.succession.living)
            return call_set(spec, self.variables, layer, self.ceiling), profile

        sources = ToolSources(everybody, of_agent, workspace, Confinement(self.sandbox, _profile_of, own), given)
        generation, parsed = _loaded(sources, next(self.numbers), texts)
        self._published(generation)
        shelf = Shelf(
            sources,
            Succession(generation),
            lambda living: self._layer(agent, living),
            lambda: next(self.numbers),
            self._published,
        )
        return shelf, parsed

    def _layer(self, agent: str, generations: Iterable[Generation]) -> Layer:
        """What the agent's tools require, of the older generations too that a turn still holds."""
        specs = (entry.spec for generation in generations for entry in generation.entries.values())
        return agent_layer(agent, Requires(), specs, self.variables)

    def _published(self, generation: Generation, difference: Difference | None = None) -> None:
        self.log.append([Record("generation", "", "", described(generation, difference))])


async def assemble(store: Store, config: Configuration, secrets: Mapping[str, str]) -> Rooms:
    """The rooms of an open store, without any context yet.

    :raises LogUnavailable: when the log cannot take records
    """
    log = CommitLog(store.database)
    interrupted = tuple(await log.recover())
    settings, folders = config.settings, store.folders
    # What tools may reach of the outputs; which of them a session does reach is a matter of its rules and roots.
    variables = Variables(workspace=(str(folders.workspace),), ad_hoc=(str(folders.outputs),))
    shaper = Shaper(Redactor(secrets), Artifacts(folders.artifacts), folders.output)
    lasting = Lifetimes(
        int(settings.approvals.request_days * 24 * HOUR_NS), int(settings.approvals.grant_hours * HOUR_NS)
    )
    limits = Limits(settings.limits.lock_wait_ms, settings.limits.grace_ms, lifetimes=lasting)
    arbiter = Arbiter(log, LockTable(), Resources(), shaper, limits)
    arbiter.approvals.recover((lost.session_id, lost.call_id) for lost in interrupted)
    return Rooms(
        store,
        config,
        log,
        tiers.choose(),
        arbiter,
        interrupted,
        variables,
        ceiling_layer(settings.ceiling, variables),
        tuple(ExternalWatchdog(w.command, timeout_ms=w.timeout_ms) for w in settings.watchdogs),
    )


def parse_rules(texts: Iterable[tuple[Scope, str, str]], generation: Generation | None) -> list[Rule]:
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


def _loaded(tools: ToolSources, number: int, rules: Sequence[tuple[Scope, str, str]]) -> tuple[Generation, list[Rule]]:
    """A shelf's first generation, and the rules, which name its tools.

    :raises LoadError: with every fault of both
    """
    try:
        generation = tools.load(number)
    except LoadError as error:
        faults = list(error.faults)
    else:
        return generation, parse_rules(rules, generation)
    try:
        parse_rules(rules, None)
    except LoadError as error:
        faults += error.faults
    raise LoadError(faults)


def _profile_of(runtime: Runtime) -> Profile:
    """The folders of the session that ``runtime`` belongs to."""
    assert isinstance(runtime, CallRuntime)
    return runtime.profile


def _rule_texts(config: Configuration, rules: Iterable[str]) -> list[tuple[Scope, str, str]]:
    found: list[tuple[Scope, str, str]] = []
    for text in config.settings.rules:
        found.append(("project", str(config.file), text))
    for text in rules:
        found.append(("session", "given at the start", text))
    return found
