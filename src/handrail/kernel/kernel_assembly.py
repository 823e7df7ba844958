"""The assembly of all rooms, from the bottom up, in the lease holder."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from handrail.arbiter.arbiter import Arbiter, ArbiterLimits
from handrail.arbiter.lock_table import LockResolver, LockTable
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.catalog.embedders.embedder_selection import (
    ENDPOINT,
    FASTEMBED,
    LOCAL,
    NONE,
    EmbedderSettings,
    make_embedder,
    make_encoder_factory,
)
from handrail.catalog.search.search_indexes import AHEAD_S, KernelSearchIndexes
from handrail.config import MergedConfiguration, SearchSettings, Settings, UndoSettings, WatchdogSettings
from handrail.config.operator_settings import SHIPPED_WATCHDOGS
from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.network_route import OutboundConnectionSettings
from handrail.contract.rule_forms import RuleWithExamples, to_rule_with_examples
from handrail.contract.sandbox_protocol import Sandbox, SandboxProfile
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct, field
from handrail.contract.tool.operator_tool_settings import ToolSettingsLayer, build_tool_settings_layer
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, PathVariables
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool_generation import Generation, ToolSource
from handrail.kernel.agent_loading import LoadedAgent, load_agent, load_tools_and_rules, make_tool_sources
from handrail.kernel.approval_client import (
    load_secrets_for_redaction,
    make_approval_lifetimes,
    make_output_shaper,
    register_value_for_redaction,
)
from handrail.kernel.sandbox_selection import make_limited_sandbox_in_thread
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.call_targets import agent_layer, build_ceiling_capability_layer, compute_call_capabilities
from handrail.policy.path_denials import build_hidden_path_rules as hides
from handrail.policy.rules.rule_sets import parse_entry, resolve_rule_set_reference
from handrail.policy.rules.rules_and_modes import Rule, RuleBook, Scope, build_default_rules, with_mode
from handrail.policy.rules.validation import (
    explain_inaccessible_rule_path,
    extract_tool_specs,
    find_contradictions,
    validate_rule_and_examples,
)
from handrail.policy.watchdogs import ExfiltrationWatchdog, OutgoingSecretsWatchdog, RepeatedFailuresWatchdog
from handrail.policy.watchdogs.api import ExternalWatchdog, Watchdog
from handrail.record.commit_log import CommitLog, InterruptedCall, Record
from handrail.registry.generation_lifecycle import GenerationLifecycle, SharedToolUses
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.registry.sources.tool_sources import AgentToolSources
from handrail.runtime.call_runtime import CallRuntime
from handrail.runtime.files.joint_changes import MultiFileChangeJournal
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.runtime.secret_store import SecretStore, read_passthrough_variables
from handrail.runtime.undo.workspace_snapshots import UndoRetentionLimits, WorkspaceSnapshots
from handrail.sandbox.configured_sandbox import ConfiguredSandbox
from handrail.session.memory.meaning_comparer import EmbeddingComparer
from handrail.session.session_context import AgentContext, AgentGenerations, ClientProcessRegistrations
from handrail.store.json_fallback_encoding import encode_json_with_fallback
from handrail.store.memory.knowledge_store import KnowledgeStore
from handrail.store.state_folders import StateFolders
from handrail.store.undo_store import UndoStore
from handrail.store.workspace_store import WorkspaceStore
from handrail.upstream.network_route import make_network_route, make_server_route
from handrail.upstream.server_config_loader import load_enabled_servers
from handrail.upstream.upstream_registry import UpstreamDependencies, UpstreamRegistry

if TYPE_CHECKING:
    from handrail.runtime.language_servers.server_pool import LanguageServerPool

MAX_RULES = 2_000
"""The maximum number of rules of an agent, a project and a process together. Each call is matched against them."""


class KernelComponents(Struct):
    """The components of one workspace in the lease holder. They create the contexts of sessions."""

    store: WorkspaceStore
    config: MergedConfiguration
    log: CommitLog
    sandbox: Sandbox
    arbiter: Arbiter
    interrupted_calls: tuple[InterruptedCall, ...]
    variables: PathVariables
    ceiling: CapabilityLayer | None
    secrets: SecretStore
    """The secrets of the operator, which tools of every process may receive."""
    watchdogs: tuple[Watchdog, ...]
    """The watchdogs of the operator, which check the calls of every process."""
    program_sandbox: ConfiguredSandbox
    """The sandbox below ``sandbox``, with the sandboxes that are ready for the next calls."""
    finder: KernelSearchIndexes
    """The search over the tools of all generations."""
    upstreams: UpstreamRegistry
    """The MCP servers whose tools every agent may have."""
    snapshots: WorkspaceSnapshots | None
    """Keeps what calls change in the workspace; None if the operator switched it off."""
    route: OutboundConnectionSettings
    """The way to hosts outside."""
    change_journal: MultiFileChangeJournal
    """The journal of changes of several files. At the start, it has finished what a killed process left."""
    knowledge: KnowledgeStore
    """The facts that agents stored for the user, in all workspaces."""
    comparer: EmbeddingComparer
    """Compares the meaning of passages of conversations and facts."""
    shared_shelves: dict[str, tuple[LoadedAgent, AgentGenerations]] = field(
        default_factory=dict[str, tuple[LoadedAgent, AgentGenerations]]
    )
    """The shared shelves by agent, each with the agent that it was created for."""
    all_shelves: weakref.WeakSet[AgentGenerations] = field(default_factory=weakref.WeakSet[AgentGenerations])
    """All shelves, including those of single processes."""
    outdated_shelves: list[AgentGenerations] = field(default_factory=list[AgentGenerations])
    """The shelves whose manifest has changed; sessions may still use them."""
    server_pool: LanguageServerPool | None = None
    """The language servers; None before the first question to one."""
    open_tools: SharedToolUses = field(default_factory=SharedToolUses)
    generation_numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _context_lock: threading.Lock = field(default_factory=threading.Lock)
    """Locked while a thread creates a context, so that the contexts of one agent share a shelf."""

    def create_agent_environment(
        self, agent: str, registrations: ClientProcessRegistrations | None = None
    ) -> AgentContext:
        """Return the context of an agent for the sessions of one process.

        :param registrations: the registrations of the process. Without tools, offerings, secrets and tool settings, the process
            shares the generations of the agent with others
        :raises LoadError: with all faults of the agent's manifest, tools and rules
        :raises UsageError: if the agent does not exist
        """
        with self._context_lock, _collector_paused():
            return self._make_context(agent, registrations or ClientProcessRegistrations())

    def _make_context(self, agent: str, registrations: ClientProcessRegistrations) -> AgentContext:
        texts = collect_process_rules(self.config, registrations.rules)
        values = (
            ToolSettingsLayer(_STARTUP_SOURCE, registrations.tool_settings, known=True),
            build_tool_settings_layer("open_kernel", registrations.tool_config, known=True),
        )
        shared = (
            not registrations.tools
            and not registrations.offerings
            and not registrations.secrets
            and not any(layer.tools for layer in values)
        )
        shared = shared and registrations.builtins and not registrations.agents
        store = self.secrets.with_added_secrets(registrations.secrets or {})
        loaded = load_agent(self.config, agent, self.store.folders, registrations.agents)
        before, shelf = self.shared_shelves.get(agent, (None, None)) if shared else (None, None)
        if shelf is not None and before == loaded:
            current = shelf.succession.current
            parsed = _combine_with_rule_texts(
                *loaded.parse_manifest_rules(current.entries, current.other_tool_ids, current), texts, current
            )
        else:
            fresh, parsed = self._make_agent_generations(loaded, registrations, texts, store, values)
            if shelf is not None:
                self.outdated_shelves.append(shelf)
            if shared:
                self.shared_shelves[agent] = (loaded, fresh)
            shelf = fresh
        authority = CallAuthorizer(
            loaded.get_requirement_variables(self.variables),
            self._make_requirement_layer(loaded, shelf.succession.generations_in_use),
            (*registrations.watchdogs, *self.watchdogs),
            ceiling=self.ceiling,
            agent=loaded.manifest.to_data(),
        )
        _check_folders(parsed, authority.own_capability_layer, str(self.store.folders.workspace))
        chosen = (
            registrations.mode or loaded.manifest.mode or registrations.configured_mode or self.config.settings.mode
        )
        book = with_mode(RuleBook(loaded.make_default_rules()).with_rules(*parsed), chosen)
        return AgentContext(
            loaded.manifest,
            shelf,
            authority,
            book,
            loaded.further_roots,
            shared=shared,
            secrets=store,
            catalog=(registrations.catalog or self.config.settings.catalog).to_catalog_options(
                loaded.manifest.core_tools
            ),
            given_agents=registrations.agents,
        )

    async def publish_source_tools(self, source: ToolSource) -> None:
        """Publish the current tools of a source to all agents. Faults of one agent do not affect the others."""
        shelves = [shelf for shelf in self.all_shelves if not shelf.succession.closed]
        await asyncio.gather(*(shelf.reload_changed_sources([source]) for shelf in shelves), return_exceptions=True)

    def get_server_pool(self) -> LanguageServerPool:
        """Return the language servers of this kernel. None of them runs before its first question."""
        if self.server_pool is None:
            from handrail.runtime.language_servers.server_pool import LanguageServerPool
            from handrail.runtime.language_servers.server_programs import ConfiguredServer

            settings, folders = self.config.settings, self.store.folders
            redact = self.arbiter.shaper.redactor.redact_text
            self.server_pool = LanguageServerPool(
                self.sandbox,
                partial(folders.prepare_tool_home, "language-servers"),
                {name: ConfiguredServer(**one.model_dump()) for name, one in settings.language_servers.items()},
                read_passthrough_variables(settings.env.passed_variable_names, redact),
            )
        return self.server_pool

    async def aclose(self) -> None:
        """End all persistent tools and prepared sandboxes, even if some of them fail."""
        async with AsyncExitStack() as ends:
            if self.snapshots is not None:
                ends.callback(self.snapshots.store.close)  # the last
            ends.callback(self.knowledge.close)
            ends.push_async_callback(asyncio.to_thread, self.comparer.close)
            ends.push_async_callback(self.program_sandbox.aclose)
            ends.push_async_callback(self.upstreams.aclose)
            if self.server_pool is not None:
                ends.push_async_callback(self.server_pool.aclose)
            ends.push_async_callback(self.finder.aclose)
            for shelf in (*self.outdated_shelves, *(shelf for _, shelf in self.shared_shelves.values())):
                ends.push_async_callback(shelf.succession.aclose)

    def _make_agent_generations(
        self,
        loaded: LoadedAgent,
        registrations: ClientProcessRegistrations,
        texts: Sequence[RuleText],
        secrets: SecretStore,
        values: Sequence[ToolSettingsLayer],
    ) -> tuple[AgentGenerations, list[Rule]]:
        workspace, further = str(self.store.folders.workspace), loaded.further_roots
        variables = loaded.get_requirement_variables(self.variables)
        shelf: AgentGenerations

        def own(spec: ToolSpec) -> tuple[CapabilitySet, SandboxProfile]:
            """Return the capabilities and folders of a persistent tool, which do not depend on the caller."""
            scratch = self.store.folders.prepare_tool_home(spec.id)
            hidden = (str(self.store.folders.state),)
            profile = SandboxProfile(
                workspace,
                scratch,
                spec.side_effect != "read",
                writable=further.writable,
                read_only_roots=further.readable,
                hidden=hidden,
                secrets=secrets.get_secret_values_for_tool(spec),
                denials=hides(RuleBook(loaded.make_default_rules()).with_rules(*parsed), workspace),
            )
            layer = self._make_requirement_layer(loaded, shelf.succession.generations_in_use)
            return compute_call_capabilities(spec, variables, layer, self.ceiling), profile

        confinement = ToolConfinement(self.sandbox, _get_session_folders, own)
        upstreams = self.upstreams
        sources = make_tool_sources(
            self.config,
            loaded.checked_agent,
            self.store.folders,
            confinement,
            secrets,
            registrations.tools,
            registrations.offerings,
            lambda: upstreams.sources,
            values,
            registrations.agents,
            registrations.builtins,
        )
        generation, parsed = _load_first_generation(sources, next(self.generation_numbers), loaded, texts)
        shelf = AgentGenerations(
            sources,
            GenerationLifecycle(generation, self.open_tools, self._loop),
            lambda living: self._make_requirement_layer(loaded, living),
            lambda: next(self.generation_numbers),
            self._record_generation,
        )
        self.all_shelves.add(shelf)
        return shelf, parsed

    def _make_requirement_layer(self, loaded: LoadedAgent, generations: Iterable[Generation]) -> CapabilityLayer:
        """Return the requirements of the agent and its tools, including generations that turns still use."""
        specs = (entry.spec for generation in generations for entry in generation.entries.values())
        manifest = loaded.manifest
        return agent_layer(manifest.id, manifest.requires, specs, loaded.get_requirement_variables(self.variables))

    def _record_generation(self, fields: Mapping[str, Any]) -> None:
        self.log.record_soon([Record("generation", "", "", fields)])


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause the garbage collector while tools are loaded: they stay, so repeated searches of them find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def assemble_components(
    store: WorkspaceStore, config: MergedConfiguration, secrets: Mapping[str, str]
) -> KernelComponents:
    """Assemble the components for an open store, without contexts.

    :raises LogUnavailable: if the log cannot take records
    :raises UsageError: if a secret cannot be redacted
    """
    trial = asyncio.create_task(make_limited_sandbox_in_thread(config))
    try:  # to try a program in the sandbox is mostly waiting, so the tools are loaded meanwhile
        await asyncio.to_thread(import_module, "handrail.tools")
    finally:
        programs = await trial
    log = CommitLog(store.database)
    interrupted = tuple(await log.record_interrupted_calls())
    settings, folders = config.settings, store.folders
    variables = folders.requirement_path_variables
    redactor, known = await load_secrets_for_redaction(config, secrets)
    limits = ArbiterLimits(**settings.limits.model_dump(), approval_lifetimes=make_approval_lifetimes(config))
    shaper = make_output_shaper(config, folders, redactor)
    arbiter = Arbiter(log, store.lease, LockTable(), LockResolver(), shaper, limits)
    arbiter.jobs.tree = store.sessions
    snapshots = _make_snapshots(settings.undo, folders)
    journal = MultiFileChangeJournal(folders.change_journal_folder)
    await asyncio.to_thread(journal.recover)
    ceiling = build_ceiling_capability_layer(settings.ceiling, variables)
    learned = partial(register_value_for_redaction, redactor)
    route = make_network_route(settings.network, known, learned)
    upstreams = UpstreamRegistry(
        UpstreamDependencies(
            folders,
            GuardedSandbox(programs, snapshots),
            variables,
            ceiling,
            await asyncio.to_thread(_make_rules_without_call, config),
            learned,
            make_server_route(settings, known, learned),
        ),
        load_enabled_servers(config, known, learned),
        version=version("handrail"),
    )
    rooms = KernelComponents(
        store,
        config,
        log,
        GuardedSandbox(programs, snapshots),
        arbiter,
        interrupted,
        variables,
        ceiling,
        known,
        tuple(_make_watchdogs(settings, redactor)),
        programs,
        KernelSearchIndexes(
            folders.search_cache_folder,
            make_encoder_factory(_choose_search_embedder(settings.search, known)),
            ahead_s=None
            if settings.search.embedder == ENDPOINT
            else AHEAD_S,  # send nothing to an endpoint before a search
        ),
        upstreams,
        snapshots,
        route,
        journal,
        KnowledgeStore(folders.state, settings.state.store),
        _make_comparer(settings.search),
    )
    upstreams.on_listing_changed = rooms.publish_source_tools
    upstreams.connect_unlisted_servers()
    return rooms


def _make_snapshots(settings: UndoSettings, folders: StateFolders) -> WorkspaceSnapshots | None:
    """Return the snapshots of the workspace for undo, unless the operator switched them off."""
    if not settings.enabled:
        return None
    store = UndoStore(folders.undo_folder, settings.max_mib * 1024 * 1024)
    limits = UndoRetentionLimits(settings.file_mib * 1024 * 1024, settings.files, settings.keep_ms)
    return WorkspaceSnapshots(str(folders.workspace), store, limits)


def _make_rules_without_call(config: MergedConfiguration) -> RuleBook:
    """Return the rules for programs without a call: the default rules and the project's rules."""
    texts = [one for one in collect_process_rules(config, ()) if not one.is_ignored]
    try:
        own = parse_rule_texts(texts, None)
    except LoadError:
        own = []  # the faults are reported with those of the agent
    return RuleBook(build_default_rules()).with_rules(*own)


def _make_comparer(settings: SearchSettings) -> EmbeddingComparer:
    """Return the comparer of memories. What users and agents say is sent to no endpoint."""
    name = settings.embedder if settings.embedder in (LOCAL, FASTEMBED) else NONE
    why = "memories are compared by a model on this machine only"
    return EmbeddingComparer(partial(make_embedder, EmbedderSettings(name, model=settings.model, why_none=why)))


def _choose_search_embedder(settings: SearchSettings, known: SecretStore) -> EmbedderSettings:
    if settings.embedder != ENDPOINT:
        return EmbedderSettings(settings.embedder, model=settings.model)
    if not settings.url or not settings.model:
        return EmbedderSettings(
            NONE, why_none="`embedder` is `endpoint`, but `url` or `model` is missing under [search]"
        )
    if not settings.secret:
        return EmbedderSettings(ENDPOINT, settings.url, settings.model)
    if (why := known.explain_missing_secret(settings.secret)) is not None:
        return EmbedderSettings(NONE, why_none=f"the key of the endpoint is not available: {why}")
    return EmbedderSettings(ENDPOINT, settings.url, settings.model, known.select([settings.secret])[settings.secret])


def _make_watchdogs(settings: Settings, redactor: SecretRedactor) -> Iterator[Watchdog]:
    """Yield the built-in watchdogs with their last settings, and then the operator's commands."""
    chosen: dict[str | None, WatchdogSettings] = {use: WatchdogSettings(use=use) for use in SHIPPED_WATCHDOGS}
    chosen |= {one.use: one for one in settings.watchdogs if one.use is not None}
    for use, one in chosen.items():
        if one.action == "off":
            continue
        if use == "exfiltration":
            yield ExfiltrationWatchdog(one.action)
        elif use == "secrets":
            yield OutgoingSecretsWatchdog(
                partial(encode_json_with_fallback, max_bytes=2**62),
                lambda encoded: redactor.active and redactor.contains_secret(encoded),
                one.action,
            )
        else:
            yield RepeatedFailuresWatchdog(one.failures, one.action)
    for one in settings.watchdogs:
        if one.command is not None:
            watchdog = ExternalWatchdog(one.command, timeout_ms=one.timeout_ms)
            watchdog.resolve_program()
            yield watchdog


_STARTUP_SOURCE = "given at the start"


class RuleText(NamedTuple):
    """A rule as text, with its source.

    :param narrows: whether it may only restrict, because its file is not trusted
    :param is_ignored: whether it is checked but not used
    """

    scope: Scope
    source: str
    text: str
    narrows: bool = False
    is_ignored: bool = False
    match: tuple[Any, ...] = ()
    not_match: tuple[Any, ...] = ()


def parse_rule_texts(texts: Iterable[RuleText], generation: Generation | None) -> list[Rule]:
    """Parse rule texts, and return the rules without those that are left out.

    :param generation: the tools that they may name, including those of other agents; None if the tools are unknown
    :raises LoadError: with all invalid texts, or if there are more than :data:`MAX_RULES`
    """
    texts = tuple(texts)
    if len(texts) > MAX_RULES:
        raise LoadError([_too_many_rules(len(texts), texts[-1].source)])
    known = None if generation is None else {*generation.entries, *generation.other_tool_ids}
    specs = None if generation is None else extract_tool_specs(generation.entries)
    found: list[Rule] = []
    faults: list[Diagnostic] = []
    for given in texts:
        try:
            parsed = parse_entry(given.text, scope=given.scope, source=given.source, known=known)
            for rule in (
                parsed if resolve_rule_set_reference(given.text) is None else ()
            ):  # shipped rules are checked by tests
                validate_rule_and_examples(rule, given.match, given.not_match, specs)
        except ValueError as error:
            faults.append(Diagnostic(given.source, "", str(error)))  # which names the rule
            continue
        if not given.is_ignored:
            found += (replace(rule, narrows=given.narrows) for rule in parsed)
    for together in _group_rules_by_file(found):
        faults += [Diagnostic(together[at].source, "", problem) for at, problem in find_contradictions(together)]
    if faults:
        raise LoadError(faults)
    return found


def _check_folders(rules: Iterable[Rule], layer: CapabilityLayer, workspace: str) -> None:
    """Check that rules written for this workspace match its folders.

    The user's own file is left out: its rules apply to all workspaces.

    :raises LoadError: with each rule that no call can match
    """
    mine = (rule for rule in rules if rule.scope != "project" or rule.source.startswith(f"{workspace}/"))
    here = (rule for rule in mine if rule.action == "allow")  # others may be about instruction files above
    faults = ((rule, explain_inaccessible_rule_path(rule, layer)) for rule in here)
    if found := [Diagnostic(rule.source, "", fault) for rule, fault in faults if fault is not None]:
        raise LoadError(found)


def _too_many_rules(count: int, source: str) -> Diagnostic:
    problem = f"Too many rules: {count:,}. The maximum is {MAX_RULES:,}. Use one rule with a pattern for many (allow bash git log *)."
    return Diagnostic(source, "", problem)


def _group_rules_by_file(rules: Iterable[Rule]) -> Iterable[list[Rule]]:
    """Group rules by their place, because rules in one place must not contradict each other.

    The rules from the start of a process are left out: they come from variables, flags and the files of a client process.
    """
    places: dict[tuple[str, str], list[Rule]] = {}
    for rule in (one for one in rules if one.source != _STARTUP_SOURCE):
        file, colon, line = rule.source.rpartition(":")
        places.setdefault((rule.scope, file if colon and line.isdigit() else rule.source), []).append(rule)
    return places.values()


def _load_first_generation(
    tools: AgentToolSources, number: int, loaded: LoadedAgent, texts: Sequence[RuleText]
) -> tuple[Generation, list[Rule]]:
    """Load the first generation of a shelf, and the rules that refer to its tools.

    :raises LoadError: with all faults of both
    """
    generation, rules, faults = load_tools_and_rules(tools, number, loaded)
    parsed = _combine_with_rule_texts(rules, faults, texts, generation)
    assert generation is not None, "without faults there is one"
    return generation, parsed


def _combine_with_rule_texts(
    rules: list[Rule], faults: list[Diagnostic], texts: Sequence[RuleText], generation: Generation | None
) -> list[Rule]:
    """Combine ``rules`` with the rules in ``texts``.

    :raises LoadError: with ``faults`` and all invalid texts
    """
    try:
        rules = rules + parse_rule_texts(texts, generation)
    except LoadError as error:
        faults = [*faults, *error.diagnostics]
    if len(rules) > MAX_RULES:
        faults = [*faults, _too_many_rules(len(rules), rules[0].source)]
    if faults:
        raise LoadError(faults)
    return rules


def _get_session_folders(runtime: Runtime) -> SandboxProfile:
    assert isinstance(runtime, CallRuntime)
    return runtime.profile


def collect_process_rules(config: MergedConfiguration, rules: Iterable[str | RuleWithExamples]) -> list[RuleText]:
    """Return the project's rules and those of one process."""
    found = [
        RuleText("project", rule.source, rule.text, rule.is_narrowing, match=rule.match, not_match=rule.not_match)
        for rule in config.project_rules
    ]
    found += [
        RuleText("project", rule.source, rule.text, is_ignored=True, match=rule.match, not_match=rule.not_match)
        for rule in config.inactive_rules
    ]
    return found + make_session_rule_texts(rules, _STARTUP_SOURCE)


def make_session_rule_texts(rules: Iterable[str | RuleWithExamples], source: str) -> list[RuleText]:
    """Return the rules of a program as texts in the session scope."""
    entries = map(to_rule_with_examples, rules)
    return [RuleText("session", source, entry.rule, match=entry.match, not_match=entry.not_match) for entry in entries]
