"""The decision about one call: capability check, rules, then watchdogs. Each step only narrows the previous one."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.services.file_services import PathResolver, ResolvedPath
from handrail.contract.text.glob_patterns import escape_glob_literal
from handrail.contract.text.host_names import grant_covers_host
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.provider_tools import ProviderToolOffer
from handrail.contract.tool.requires import AccessCheck, Capability, CapabilityLayer, CapabilitySet, PathVariables
from handrail.contract.tool.spec import ToolSpec
from handrail.origins.listed_paths import is_name_folding_folder
from handrail.policy.call_evaluation import PolicyVerdict, ToolPolicy
from handrail.policy.call_targets import (
    CallTarget,
    build_script_from_argv,
    compute_call_capabilities,
    compute_delegated_capabilities,
    explain_mandatory_denial,
    find_path_write_protection,
    find_redirection_targets,
    format_capability_denial,
    format_command_for_message,
    list_commands_needing_capability,
    make_path_subject,
)
from handrail.policy.confinement import ConfinedRuleToolPolicy
from handrail.policy.findings import PolicyFinding, format_reason
from handrail.policy.rule_suggestions import build_exact_target_pattern
from handrail.policy.rules.matchers import PathSubject, RankedRule
from handrail.policy.rules.pattern_lexer import build_exact_argv_pattern
from handrail.policy.rules.rules_and_modes import STRICTNESS, Action, Rule, RuleBook
from handrail.policy.shell.parser import parse_script
from handrail.policy.shell.program_risks import find_hidden_program_risk
from handrail.policy.stored_paths import PrintedRepository

if TYPE_CHECKING:
    from handrail.policy.watchdogs.api import Watchdog


K = TypeVar("K")
V = TypeVar("V")
_MAX_PREPARED = 4096
"""The policies that one authority keeps. Sessions with equal rules share them."""
_target_key: Callable[[CallTarget], tuple[str, str]] = itemgetter(0, 1)
"""A target's capability and value."""


class HostDecision(NamedTuple):
    """The decision about one host that the programs of a running call want to reach.

    :param reason: why it is not allowed; empty if it is
    """

    action: Action
    reason: str = ""


class CallAuthorizer:
    """Decides the calls of one agent.

    It holds no state of a session: the rule book and the roots come with each call.

    :param variables: the values of ``{workspace}`` and other variables
    :param agent_layer: see :func:`handrail.policy.call_targets.agent_layer`
    :param watchdogs: asked in this order, each only to narrow the decision
    :param ceiling: the host's limit, if the operator set one
    :param agent: the agent's manifest as data, for the watchdogs
    :param delegated: for a sub-agent, the capabilities that its parent delegates: the limit of each of its calls
    """

    base_authorizer: CallAuthorizer | None = None
    """If this is the authority of one sub-agent session: the authority of the agent itself. See :meth:`restrict_to_delegation`."""

    def __init__(
        self,
        variables: PathVariables,
        agent_layer: CapabilityLayer,
        watchdogs: Iterable[Watchdog] = (),
        *,
        ceiling: CapabilityLayer | None = None,
        agent: Mapping[str, Any] | None = None,
        delegated: CapabilitySet | None = None,
    ) -> None:
        self.variables = variables
        self.agent_layer = agent_layer
        self.watchdogs = tuple(watchdogs)
        self._watching: OrderedDict[int, tuple[ToolSpec, tuple[Watchdog, ...], tuple[Watchdog, ...]]] = OrderedDict()
        self.ceiling = ceiling
        self.agent: Mapping[str, Any] = agent if agent is not None else {"id": "default"}
        self.delegated = delegated
        self._narrower: weakref.WeakSet[CallAuthorizer] = weakref.WeakSet()
        # Keyed by identity for speed. The value keeps the objects of the key alive, so no id is used twice.
        self._prepared: OrderedDict[tuple[int, int, int, str | None], tuple[ToolPolicy, CapabilitySet | None]] = (
            OrderedDict()
        )

    @property
    def own_capability_layer(self) -> CapabilityLayer:
        """The current capability layer of the agent. :meth:`replace_capability_layer` replaces it."""
        return self.agent_layer if self.base_authorizer is None else self.base_authorizer.agent_layer

    def requires_folder(self, folder: str) -> bool:
        """Return whether the agent or one of its tools requires this folder, or a path in it."""
        start = escape_glob_literal(folder)
        patterns = (*self.own_capability_layer.fs_read, *self.own_capability_layer.fs_write)
        return any(pattern == start or pattern.startswith(f"{start}/") for pattern in patterns)

    def restrict_to_delegation(self, delegated: CapabilitySet) -> CallAuthorizer:
        """Return the authority of a sub-agent's session, limited to what its parent delegates."""
        narrower = CallAuthorizer(
            self.variables,
            self.agent_layer,
            self.watchdogs,
            ceiling=self.ceiling,
            agent=self.agent,
            delegated=delegated,
        )
        narrower.base_authorizer = base = self.base_authorizer or self
        base._narrower.add(narrower)
        return narrower

    def compute_delegable_capabilities(self, manifest: AgentManifest) -> CapabilitySet:
        """Return the capabilities that the agent can delegate to a sub-agent now.

        :param manifest: the manifest of this agent
        """
        has = CapabilitySet((self.own_capability_layer,))
        if self.ceiling is not None:
            has = has.with_added_layers(self.ceiling)
        # An empty delegation means no capabilities at all, not an unlimited set.
        if self.delegated is not None:
            has = has.with_added_layers(*self.delegated.layers) if self.delegated.layers else CapabilitySet()
        return compute_delegated_capabilities(manifest.id, manifest.delegation, has, self.variables)

    def replace_capability_layer(self, agent_layer: CapabilityLayer) -> None:
        """Use the capability layer of a new generation of tools, and drop what was prepared for the old one."""
        self.agent_layer = agent_layer
        # Sub-agents that work now have prepared policies with the old layer as well.
        for one in (self, *self._narrower):
            one._prepared.clear()
            one._watching.clear()

    def evaluate(
        self,
        spec: ToolSpec,
        arguments: Mapping[str, Any],
        *,
        rules: RuleBook,
        roots: PathResolver,
        located: dict[str, ResolvedPath] | None = None,
        parent: CapabilitySet | None = None,
        origin: str | None = None,
        substitute: ToolSpec | None = None,
    ) -> PolicyVerdict:
        """Decide one call by capabilities and rules. :meth:`ask_watchdogs` follows.

        Never raises for arguments that a model sent.

        :param arguments: the validated arguments
        :param located: paths resolved just now, for the locks of the call; None resolves all paths again
        :param parent: the capability set of the call that makes this one
        :param origin: ``mcp:server:tool`` for a tool of an MCP server
        :param substitute: the tool that answers in place of a locked id; a rule that denies it denies the call
        """
        found = {} if located is None else located
        shared = rules.shared
        known = self._prepared.get((id(spec), id(shared), id(parent), origin))
        prepared = self._get_tool_policy(spec, shared, parent, origin) if known is None else known[0]
        verdict = prepared.evaluate(arguments, roots, found)
        # All sessions share the policy without the rule about their own folder. Only a call that this rule could change
        # is evaluated again.
        if shared is not rules and _may_be_allowed_by_folder_rule(verdict, rules):
            verdict = self._get_tool_policy(spec, rules, parent, origin).evaluate(arguments, roots, found)
        # The tool that answers for a locked id is another program. A deny rule for it must hold under both names.
        if substitute is not None and verdict.action != "deny":
            own = self._get_tool_policy(substitute, rules, parent, origin).evaluate(arguments, roots, found)
            if own.action == "deny":
                return own
        return verdict

    @staticmethod
    def list_repositories_with_unread_history(verdict: PolicyVerdict) -> tuple[PrintedRepository, ...]:
        """Return the repositories whose history has to be read before the decision about a call is final."""
        return tuple(one for target in verdict.targets for one in target.printed if one.has_unread_history)

    def evaluate_running_shell_input(
        self,
        spec: ToolSpec,
        arguments: Mapping[str, Any],
        typed: CallTarget,
        *,
        rules: RuleBook,
        parent: CapabilitySet | None,
    ) -> PolicyVerdict:
        """Decide input typed into a running shell, as :meth:`evaluate` does.

        :param typed: the target, which comes from the terminal and not from the arguments
        """
        return self._get_tool_policy(spec, rules, parent, None).evaluate_targets(arguments, (typed,))

    def list_watchdogs_for(self, spec: ToolSpec, failing: bool = False) -> tuple[Watchdog, ...]:
        """Return the watchdogs that check calls of this tool.

        :param failing: include the watchdogs that check only calls that have failed before
        """
        found = self._watching.get(id(spec))
        if found is None:
            concerned = tuple(one for one in self.watchdogs if _watchdog_checks_tool(one, spec))
            always = tuple(one for one in concerned if not getattr(one, "after_failures", False))
            found = (spec, always, concerned)
            _keep_newest(self._watching, id(spec), found)
        return found[2] if failing else found[1]

    async def ask_watchdogs(
        self,
        verdict: PolicyVerdict,
        spec: ToolSpec,
        arguments: Mapping[str, Any],
        session_id: str,
        *,
        call_id: str = "",
        failed: tuple[int, int] = (0, 0),
        redact: Callable[[str], str] = str,
    ) -> PolicyVerdict:
        """Ask the watchdogs about a call that is not denied yet.

        An error or a time-out of a watchdog denies the call.

        :param failed: how often exactly this call has failed, and how many of these failures are in a row
        :param redact: removes registered secrets from the text of a failing watchdog
        """
        watchdogs = self.list_watchdogs_for(spec, failed != (0, 0))
        # A watchdog can only restrict, so there is nothing to ask about a denied call.
        if verdict.action == "deny" or not watchdogs:
            return verdict
        # Loading the module takes time, and a call that no watchdog checks does not need it.
        from handrail.policy.watchdogs.api import WatchdogCall, apply_watchdogs

        call = WatchdogCall(
            tool_id=spec.id,
            arguments=arguments,
            agent=self.agent,
            tool=spec.build_runtime_view(),
            session_id=session_id,
            call_id=call_id,
            decision=verdict.action,
            targets=tuple((target.capability, target.value) for target in verdict.targets),
            previous_failures=failed[0],
            consecutive_failures=failed[1],
        )
        return await apply_watchdogs(verdict, watchdogs, call, redact)

    def make_access_check(
        self, verdict: PolicyVerdict, spec: ToolSpec, *, rules: RuleBook, roots: PathResolver
    ) -> AccessCheck:
        """Return the runtime's check of everything that the call actually accesses. In it, ask counts as deny.

        The call is about to run, so a verdict of ask has been answered with yes. That answer covers the targets of the call. If
        no rule matches, it also covers the content of these targets. It never outweighs a deny.

        :param rules: the current rule book, which may have more rules than the verdict's
        """
        if verdict.action == "deny":
            reason = verdict.reason
            return lambda capability, target: reason
        return _AccessCheck(_prepare_again(verdict, spec, rules), verdict, rules, roots)

    def decide_host_access(self, verdict: PolicyVerdict, spec: ToolSpec, host: str, *, rules: RuleBook) -> HostDecision:
        """Decide whether the programs of a running call may reach ``host:port``, by its own rule.

        :param verdict: that of the call, whose tool requires hosts ``by_rule``
        :param rules: the current rule book
        """
        return _decide_host(_prepare_again(verdict, spec, rules), verdict.capabilities, host)

    def _get_tool_policy(
        self, spec: ToolSpec, rules: RuleBook, parent: CapabilitySet | None, origin: str | None
    ) -> ToolPolicy:
        key = (id(spec), id(rules), id(parent), origin)
        found = self._prepared.get(key)
        if found is not None:
            return found[0]
        # A nested call has at most the capabilities of the call that makes it.
        handed = self.delegated if parent is None else parent
        capabilities = compute_call_capabilities(spec, self.variables, self.own_capability_layer, self.ceiling, handed)
        prepared = ConfinedRuleToolPolicy(spec, rules, capabilities, origin)
        _keep_newest(self._prepared, key, (prepared, parent))
        return prepared


def _keep_newest(kept: OrderedDict[K, V], key: K, value: V) -> None:
    """Keep one more value, and drop the oldest one of too many."""
    if len(kept) >= _MAX_PREPARED:
        kept.popitem(last=False)
    kept[key] = value


def _may_be_allowed_by_folder_rule(verdict: PolicyVerdict, rules: RuleBook) -> bool:
    """Return whether the rule about the session's own folder may change a verdict that was made without it.

    That rule only allows reading in the folder, and every other scope outweighs it. So it changes nothing about a call that is
    denied, allowed without it, or names no path in the folder.
    """
    if verdict.action == "deny" or (verdict.action == "allow" and verdict.confinement is None):
        return False
    return any(_names_folder(target.value, rules) for target in verdict.targets)


def _names_folder(text: str, rules: RuleBook) -> bool:
    """Return whether a path or shell text contains the name of the session's own folder."""
    return rules.folder_rule is not None and rules.session_folder_name in text


def _prepare_again(verdict: PolicyVerdict, spec: ToolSpec, rules: RuleBook) -> ToolPolicy:
    """Return the policy of a call's tool under the current rules, which may leave out the rule about the session's folder."""
    prepared = verdict.prepared
    if prepared.rules is rules or prepared.rules is rules.shared:
        return prepared
    return ToolPolicy(spec, rules, verdict.capabilities, prepared.origin)


def _decide_host(prepared: ToolPolicy, capabilities: CapabilitySet, host: str) -> HostDecision:
    # The capability set comes first: no rule can allow more than the agent may do.
    layer = capabilities.find_denying_layer("net.fetch", host)
    if layer is not None:
        return HostDecision("deny", format_capability_denial(capabilities, layer, "net.fetch", host, prepared.spec))
    ranked = prepared.rank_capability_rules("net.fetch")[0].find_winner(host)
    # A pattern without a port allows the ports of the web only, as a declared host does.
    if ranked is None or (ranked.rule.action == "allow" and not grant_covers_host(ranked.rule.pattern or "*", host)):
        return HostDecision("ask", f"No rule allows programs to reach {host}.")
    if ranked.rule.action == "allow":
        return HostDecision("allow")
    target = CallTarget("net.fetch", host, host, host)
    reason = format_reason(PolicyFinding(ranked.rule.action, "rule", ranked.rule, target=target), prepared.spec.id)
    return HostDecision(ranked.rule.action, reason)


def format_host_denial(decision: HostDecision, host: str) -> str:
    """Return why a host is refused that no user can be asked about now, with the line that would allow it."""
    if decision.action == "deny":
        return decision.reason
    return (
        f"{decision.reason} Continue without it, or ask the user to add the rule 'allow net.fetch {host}' to "
        f'handrail.toml: rules = ["allow net.fetch {host}"].'
    )


def _watchdog_checks_tool(watchdog: Watchdog, spec: ToolSpec) -> bool:
    """Return whether a watchdog checks calls of this tool.

    A watchdog that fails to answer this is asked about each call, and denies it by failing again.
    """
    concerns: Any = getattr(watchdog, "concerns", None)
    if concerns is None:
        return True
    try:
        return concerns(spec) is not False
    except Exception:
        return True


class _AccessCheck:
    """The :data:`~handrail.contract.tool.requires.AccessCheck` of one running call."""

    __slots__ = ("_answered", "_exact", "_of_tool", "_prepared", "_roots", "_rules", "_verdict")

    def __init__(self, prepared: ToolPolicy, verdict: PolicyVerdict, rules: RuleBook, roots: PathResolver) -> None:
        self._prepared = prepared
        self._verdict = verdict
        self._rules = rules
        self._roots = roots
        self._answered = verdict.action == "ask"
        self._exact: set[tuple[str, str]] = set(map(_target_key, verdict.targets))
        self._of_tool: RankedRule | Literal[False] | None = False

    def __call__(self, capability: Capability, target: str | Sequence[str]) -> str | None:
        if capability == "shell.run":
            return self._check_command(target)
        value = target if isinstance(target, str) else "".join(target)
        # The shared policy does not know the session's own folder. The exact one is made only when a path names it.
        if self._prepared.rules is not self._rules and _names_folder(value, self._rules):
            self._prepared = self._prepared.with_rules(self._rules)
        prepared = self._prepared
        if capability == "net.fetch" and prepared.spec.requires.net.by_rule:
            decision = _decide_host(prepared, self._verdict.capabilities, value)
            return None if decision.action == "allow" else format_host_denial(decision, value)
        if (
            not prepared.is_covered_by_capabilities(capability, value)
            and (refused := self._check_capabilities(capability, value, value)) is not None
        ):
            return refused
        subject: PathSubject | str = (
            value if capability == "net.fetch" else make_path_subject(value, self._roots.workspace)
        )
        # Private keys and the like stay denied whatever the rules say.
        if (fixed := explain_mandatory_denial(capability, subject, escape_terminal_controls(value))) is not None:
            return f"{fixed.rstrip('.')}."
        same_kind = prepared.kind == ("host" if capability == "net.fetch" else "path")
        own = prepared.tool_rules
        tool = self._strictest_tool_rule if not same_kind else own.find_winner(subject) if own.ranked else None
        action, rule = prepared.decide_by_rules(tool, capability, subject)
        if (
            capability == "fs.write"
            and find_path_write_protection(capability, subject) is not None
            and (capability, value) not in self._exact
        ):
            # The user or a rule allowed another path. A deny counts as for any path.
            place = CallTarget(capability, value, self._roots.resolve_exact_path(value).display_path, subject)
            if (
                action != "deny"
                and (question := prepared.explain_protected_write_approval(place, tool if same_kind else None))
                is not None
            ):
                return self._refusal_text(PolicyFinding("ask", "protected", rule, question, target=place))
        if action == "allow" or (action == "ask" and self._is_covered_by_decision(capability, value, rule)):
            return None
        shown = subject if isinstance(subject, str) else subject.relative or subject.absolute
        return self._refusal(action, rule, CallTarget(capability, value, escape_terminal_controls(shown), subject))

    @property
    def _strictest_tool_rule(self) -> RankedRule | None:
        """The strictest of the rules about the tool in this call, if they matched every target, or None."""
        if self._of_tool is False:  # rarely needed: most calls access what their tool's own rules are about
            found = [finding.tool for finding in self._verdict.findings if not self._is_about_required_program(finding)]
            spoken = [ranked for ranked in found if ranked is not None]
            whole = bool(spoken) and len(spoken) == len(found)
            self._of_tool = max(spoken, key=lambda ranked: STRICTNESS[ranked.rule.action]) if whole else None
        return self._of_tool

    def _is_about_required_program(self, finding: PolicyFinding) -> bool:
        """Return whether a finding is about a program that the tool requires, and not about a target of the call."""
        target = finding.target
        named = self._prepared.spec.effective_targets
        return target is not None and target.capability == "shell.run" and "shell.run" not in named

    def _is_covered_by_decision(self, capability: Capability, value: str, rule: Rule | None) -> bool:
        """Return whether the decision on the call, or the user's answer, covers an access that no rule allows."""
        if (capability, value) in self._exact:
            return True
        if rule is not None:
            return False
        if capability == "fs.read" and ("fs.write", value) in self._exact:
            return True  # a tool that may replace a file may read it first
        if not self._answered:
            return False
        # A call without targets was approved as a whole, with whatever its tool accesses.
        if not self._verdict.targets:
            return True
        return any(
            used == capability and capability != "net.fetch" and value.startswith(folder.rstrip("/") + "/")
            for used, folder in self._exact
        )

    def _check_command(self, target: str | Sequence[str]) -> str | None:
        value = target if isinstance(target, str) else build_exact_argv_pattern(target)
        same_book = self._prepared.rules.shared is self._verdict.prepared.rules.shared
        if self._prepared.rules is not self._rules and _names_folder(value, self._rules):
            self._prepared = self._prepared.with_rules(self._rules)
        # The text is the same one that was evaluated. Parsing it again would give the same answer.
        if same_book and isinstance(target, str) and ("shell.run", value) in self._exact:
            return None  # evaluated before the call, command by command
        script = parse_script(target) if isinstance(target, str) else build_script_from_argv(tuple(target))
        folding = is_name_folding_folder(self._roots.workspace)
        whole = CallTarget("shell.run", value, format_command_for_message(value), script, is_folding=folding)
        # Every command in the text is tested, because a text that begins with an allowed program can run another one.
        for touch in list_commands_needing_capability(script):
            if (refused := self._check_capabilities("shell.run", touch, whole.shown)) is not None:
                return refused
        opened = find_redirection_targets(script, self._roots) if script.files else []
        for file in opened:
            if (beyond := self._prepared.find_capability_denial(file)) is not None:
                return self._refusal_text(beyond)
        findings = self._prepared.evaluate_script(whole, script, self._strictest_tool_rule)
        findings += [
            finding
            for file in opened
            for finding in self._prepared.evaluate_redirection(file)
            if finding.action == "deny" or (file.capability, file.value) not in self._exact
        ]
        # One denied command denies the text: its commands cannot be run apart.
        worst = max(findings, key=lambda finding: STRICTNESS[finding.action])
        if worst.action == "deny":
            return self._refusal_text(worst)
        if ("shell.run", value) in self._exact:
            return None
        asked = (finding for finding in findings if finding.action == "ask")
        left = next((finding for finding in asked if not self._is_covered_by_call(finding)), None)
        return None if left is None else self._refusal_text(left)

    def _is_covered_by_call(self, finding: PolicyFinding) -> bool:
        """Return whether the decision on the call covers a command or file that no rule matches.

        The file is one that the shell of a command opens. A tool works by the programs that its ``requires`` names, and by the
        files that they open. If a rule or the user allowed the call, these are allowed too. A rule with ``{confined}`` allows
        them as well, since its sandbox limits whatever a program does. If no rule about the tool did, this holds only for a
        tool that reads: its programs find everything read-only. A risky form is covered only if the tool's ``requires``
        names it word by word.
        """
        file = finding.target
        if file is not None and file.capability != "shell.run":  # one that the shell opens
            return self._is_covered_by_decision(file.capability, file.value, finding.rule)
        argv = finding.argv or ()
        confined = self._verdict.confinement is not None
        ruled = self._strictest_tool_rule is not None and self._strictest_tool_rule.rule.action == "allow"
        allowed = self._answered or confined or ruled
        # Such a form can do anything. A grant for any arguments of the program did not mean it.
        if finding.cause in ("program", "destroys"):
            return allowed and self._requires_program(argv, literally=True)
        if finding.cause == "rule":
            # The user who approved the call knows what it runs, and the rules that it was asked about.
            shown = finding.reading is not None or any(
                finding.rule in (one.rule, one.tool and one.tool.rule) for one in self._verdict.findings
            )
            return shown and self._answered and self._requires_program(argv)
        if finding.cause != "no rule":
            return False
        if self._answered and not self._verdict.targets:
            return True
        ruled = ruled and find_hidden_program_risk(argv) is None
        return (self._answered or self._only_reads or confined or ruled) and self._requires_program(argv)

    @property
    def _only_reads(self) -> bool:
        spec = self._prepared.spec
        return spec.side_effect == "read" and not spec.requires.net.hosts

    def _requires_program(self, argv: Sequence[str], *, literally: bool = False) -> bool:
        """Return whether the tool requires this program by its name, and its arguments name no command.

        :param literally: whether ``requires`` also has to name every word
        """
        spec = self._prepared.spec
        return "shell.run" not in spec.effective_targets and any(
            entry.cmd != "*" and entry.allows(argv) and not (literally and not entry.is_literal)
            for entry in spec.requires.shell
        )

    def _check_capabilities(self, capability: Capability, touch: str | Sequence[str], shown: str) -> str | None:
        capabilities = self._verdict.capabilities
        layer = capabilities.find_denying_layer(capability, touch)
        return (
            None
            if layer is None
            else format_capability_denial(
                capabilities, layer, capability, escape_terminal_controls(shown), self._prepared.spec
            )
        )

    def _refusal(self, action: Action, rule: Rule | None, target: CallTarget) -> str:
        return self._refusal_text(PolicyFinding(action, "no rule" if rule is None else "rule", rule, target=target))

    def _refusal_text(self, finding: PolicyFinding) -> str:
        text = format_reason(finding, self._prepared.spec.id)
        if finding.action == "deny":
            return text
        target = finding.target
        opens = ""
        if target is not None and target.capability == "net.fetch":
            opens = f", such as 'allow net.fetch {target.value}'"
        elif (
            target is not None
            and finding.cause == "protected"
            and (pattern := build_exact_target_pattern(target)) is not None
        ):
            opens = f", such as 'allow fs.write {escape_terminal_controls(pattern)}'"
        return (
            f"{text} A running call cannot ask for approval, so this access is denied. "
            f"Continue without it, or ask the user to add a rule that allows it{opens}."
        )


__all__ = ["CallAuthorizer", "PolicyVerdict"]


# Provider tools, as the rules of a session allow them.
#
# Their calls never reach the policy, so only a rule about all their calls can decide: a deny of the tool, of its side
# effect, or of the network for a search or a fetch.

_REACHES_OUT = ("native.web_search", "native.web_fetch")


def build_provider_tool_offer(
    spec: ToolSpec, rules: RuleBook, delegating_agent: str | None = None
) -> ProviderToolOffer:
    """Return the offer of a provider tool to a session under these rules.

    :param delegating_agent: an agent above that delegates hosts by name only
    """
    verdict = ToolPolicy(spec, rules, CapabilitySet()).evaluate_targets({}, ())
    if verdict.action == "deny":
        return ProviderToolOffer(spec, verdict.reason)
    if spec.id in _REACHES_OUT:
        if delegating_agent is not None:
            why = f"Agent {delegating_agent} delegates hosts by name, and Handrail cannot limit a provider tool to these hosts."
            return ProviderToolOffer(spec, why)
        for rule in rules.own_and_parent_rules:
            if rule.action == "deny" and rule.permission in ("net.fetch", "net.*") and rule.is_unconditional:
                return ProviderToolOffer(spec, f"The rule {rule.text!r} denies tools that reach the network.")
    return ProviderToolOffer(spec)
