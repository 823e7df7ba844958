"""The targets of one call, as canonical paths, hosts and scripts, and the capability layers that bound them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from handrail.contract.agent_manifest import DelegationPolicy
from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.protected import path_protection
from handrail.contract.protected.path_protection import PathProtection
from handrail.contract.services.file_services import PathResolver, ResolvedPath
from handrail.contract.text.host_names import explain_private_refusal, parse_host_address, parse_http_url
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.text.patch_text import extract_patch_paths
from handrail.contract.tool.requires import (
    Capability,
    CapabilityLayer,
    CapabilitySet,
    PathVariables,
    Requires,
    expand_requires,
    unite_capability_layers,
)
from handrail.contract.tool.spec import (
    ToolSpec,
    extract_property_schemas,
    extract_template_argument_names,
    fill_template,
    find_patch_arguments,
)
from handrail.origins.listed_paths import is_name_folding_folder, resolve_name_folding_path
from handrail.policy.file_losses import find_irrecoverable_file_losses, is_lost_by_deletion
from handrail.policy.rules.matchers import PathSubject, SubjectKind
from handrail.policy.rules.pattern_lexer import build_exact_argv_pattern
from handrail.policy.shell import command_wrappers, destroying_forms, read_only_proof
from handrail.policy.shell.parser import ShellScript, parse_script
from handrail.policy.shell.simple_commands import SPLIT, ShellCommand, has_marks, show_marks
from handrail.policy.stored_paths import PrintedRepository, find_printed_repositories

_Getter = Callable[[Mapping[str, Any]], object]
_MAX_SHOWN = 400
_SSH = compile_regex_lazily(r"(?:git\+)?ssh(?:\+git)?://|[^/@:\s]+@[^/@:\s]+:(?!//)", re.IGNORECASE)
_DATA_URL = compile_regex_lazily(r"data:[^,]{0,100},", re.IGNORECASE)
"""A ``data:`` URL, which contains its own content (RFC 2397), so that fetching it reaches no host."""


class CallTarget(NamedTuple):
    """A path, host or command that a call would access.

    :param value: canonical: an absolute path, ``host[:port]``, or the command as given
    :param shown: the target as a message names it
    :param subject: what rule patterns are compared with
    :param redirected: set for a file that a shell opens for a command: ``plain``, or ``guessed`` from an unclear text
    """

    capability: Capability
    value: str
    shown: str
    subject: PathSubject | ShellScript | str
    redirected: Literal["", "plain", "guessed"] = ""
    is_folding: bool = False
    """Whether a command runs in a workspace that takes several spellings for one name."""
    losses: tuple[str, ...] | None = None
    """The files that a shell text, or a tool that deletes, removes or replaces for good. None if the file system was not asked."""
    printed: tuple[PrintedRepository, ...] = ()
    """The repositories of which a shell text may print stored files."""


def get_rule_subject_kind(spec: ToolSpec) -> SubjectKind:
    """Return the kind of subject that the rules about this tool are compared with.

    If the tool has targets of several families, its rules are compared with the arguments.
    """
    families = {capability.partition(".")[0] for capability in spec.effective_targets}
    if families == {"shell"}:
        return "command"
    if families == {"fs"}:
        return "path"
    return "host" if families == {"net"} else "arguments"


def make_path_subject(absolute: str, workspace: str) -> PathSubject:
    """Return a canonical path as rules see it: relative to the workspace if it lies in it."""
    spelling = resolve_name_folding_path(absolute, is_listed=True)
    exact = None if spelling is None else spelling.exact_names
    length = len(workspace)
    if absolute.startswith(workspace):
        if absolute[length : length + 1] == "/":
            return PathSubject(absolute, absolute[length + 1 :], exact)
        if len(absolute) == length:
            return PathSubject(absolute, ".", exact)
        if workspace == "/":
            return PathSubject(absolute, absolute[1:], exact)
    return PathSubject(absolute, None, exact)


class CallTargetExtractor:
    """Reads the targets of one tool from the arguments of its calls."""

    __slots__ = ("_getters", "_is_deleting", "_patches", "_path")

    def __init__(self, spec: ToolSpec) -> None:
        self._is_deleting = spec.kind == "delete"
        self._patches = find_patch_arguments(spec.parameters)
        self._getters: tuple[tuple[Capability, tuple[_Getter, ...]], ...] = tuple(
            (cast("Capability", capability), tuple(_getter(template, spec, capability) for template in templates))
            for capability, templates in spec.effective_targets.items()
        )
        only_a_path = (
            len(self._getters) == 1 and self._getters[0][0] in ("fs.read", "fs.write") and len(self._getters[0][1]) == 1
        )
        self._path: tuple[Capability, str, object] | None = None
        """If the only target is a path in one argument, as for most file tools: its capability, argument and default."""
        if (
            only_a_path
            and (name := _sole_template_argument(next(iter(spec.effective_targets.values()))[0])) is not None
            and name not in self._patches
        ):
            self._path = (self._getters[0][0], name, _default_of(name, spec))

    def __bool__(self) -> bool:
        return bool(self._getters)

    def extract_call_targets(
        self, arguments: Mapping[str, Any], roots: PathResolver, located: dict[str, ResolvedPath]
    ) -> list[CallTarget]:
        """Return the targets of a call.

        :param located: paths resolved for this call already, by their texts; this method adds further ones
        :raises ToolError: ``invalid_input`` for an invalid path or host
        """
        if self._path is not None:
            capability, name, default = self._path
            value = arguments.get(name, default)
            if isinstance(value, str):
                where = located.get(value)
                if where is None:
                    where = located[value] = roots.resolve_path(value)
                subject = make_path_subject(where.absolute, roots.workspace)
                target = CallTarget(capability, where.absolute, where.display_path, subject)
                return [self._add_losses(target, where, roots) if self._is_deleting else target]
        found: list[CallTarget] = []
        removed = self._list_removed(arguments)
        for capability, getters in self._getters:
            # An argument that is left out names nothing, unless it is the only one.
            values = [value for getter in getters if (value := getter(arguments)) is not None] or [None]
            if capability == "shell.run":
                for value in values:
                    command = _command(value)._replace(is_folding=is_name_folding_folder(roots.workspace))
                    if isinstance(command.subject, ShellScript):
                        command = command._replace(
                            losses=find_irrecoverable_file_losses(command.subject, roots),
                            printed=find_printed_repositories(command.subject, command.value, roots.workspace),
                        )
                    found.append(command)
                    if isinstance(command.subject, ShellScript) and command.subject.files:
                        found += find_redirection_targets(command.subject, roots)
                continue
            if capability == "net.fetch":
                texts = [text for value in values for text in _texts(value, None)]
                hosts = [extract_host_and_port(text) for text in texts if not _DATA_URL.match(text)]
                found += [CallTarget("net.fetch", host, host, host) for host in hosts]
                continue
            for text in [text for value in values for text in _texts(value, ".")]:
                where = located.get(text)
                if where is None:
                    where = located[text] = roots.resolve_path(text)
                subject = make_path_subject(where.absolute, roots.workspace)
                target = CallTarget(cast("Capability", capability), where.absolute, where.display_path, subject)
                is_removed = self._is_deleting or text in removed
                found.append(self._add_losses(target, where, roots) if is_removed else target)
        return found

    def _list_removed(self, arguments: Mapping[str, Any]) -> frozenset[str]:
        """Return the paths of the files that the patches of a call delete."""
        texts = (arguments.get(name) for name in self._patches)
        return frozenset(path for text in texts if isinstance(text, str) for path in extract_patch_paths(text).removed)

    @staticmethod
    def _add_losses(target: CallTarget, where: ResolvedPath, roots: PathResolver) -> CallTarget:
        is_lost = target.capability == "fs.write" and is_lost_by_deletion(where, roots)
        return target._replace(losses=(target.shown,) if is_lost else ())


def _getter(template: str, spec: ToolSpec, capability: str) -> _Getter:
    name = _sole_template_argument(template)
    if name is not None and name in find_patch_arguments(spec.parameters):
        return lambda arguments: _list_patched_paths(arguments.get(name), is_written=capability == "fs.write")
    if name is not None:
        default = _default_of(name, spec)
        return lambda arguments: arguments.get(name, default)
    return lambda arguments: fill_template(template, arguments)


def _list_patched_paths(text: object, *, is_written: bool) -> list[str] | None:
    if not isinstance(text, str):
        return None
    paths = extract_patch_paths(text)
    return [*(paths.written if is_written else paths.read)]


def _sole_template_argument(template: str) -> str | None:
    """Return the argument that a template consists of, or None if it has other text."""
    names = extract_template_argument_names(template)
    return names[0] if len(names) == 1 and template[1:-1] == names[0] else None


def _default_of(name: str, spec: ToolSpec) -> object:
    return extract_property_schemas(spec.parameters).get(name, {}).get("default")


def _texts(value: object, missing: str | None) -> list[str]:
    if isinstance(value, str):
        return [value]
    if value is None:
        return [] if missing is None else [missing]
    if isinstance(value, (list, tuple)):
        return [str(item) for item in cast("list[object]", value)]
    return [str(value)]


def _command(value: object) -> CallTarget:
    if isinstance(value, (list, tuple)):
        argv = tuple(str(word) for word in cast("list[object]", value))
        return CallTarget(
            "shell.run", build_exact_argv_pattern(argv), format_argv_for_message(argv), build_script_from_argv(argv)
        )
    text = "" if value is None else str(value)
    return CallTarget("shell.run", text, format_command_for_message(text), parse_script(text))


def find_redirection_targets(script: ShellScript, roots: PathResolver) -> list[CallTarget]:
    """Return the files that a script's redirections open, each once.

    :raises ToolError: ``invalid_input`` for an invalid file name
    """
    found: dict[tuple[str, str], CallTarget] = {}
    how = "plain" if script.unclear is None else "guessed"
    for redirection in script.files:
        assert redirection.capability is not None
        try:
            where = roots.resolve_exact_path(redirection.target)
        except ToolError:
            if how == "guessed":
                continue
            raise
        subject = make_path_subject(where.absolute, roots.workspace)
        target = CallTarget(redirection.capability, where.absolute, where.display_path, subject, how)
        found[target.capability, target.value] = target
    return list(found.values())


def build_script_from_argv(argv: tuple[str, ...]) -> ShellScript:
    """Return an argv that runs without a shell as a script of one command."""
    return (
        ShellScript((ShellCommand(argv, (), argv),))
        if argv and argv[0]
        else ShellScript((), "the command names no program", is_plain=False)
    )


UNNAMEABLE_ARGV = ("\0",)
"""An argv that no literal word matches: a rule that matches it matches every command."""


def list_commands_needing_capability(script: ShellScript) -> list[tuple[str, ...]]:
    """Return the commands that a capability layer has to cover: those of a text, or one that only every program covers.

    A layer that limits the arguments of a program never covers words that only the shell knows.
    """
    if script.unclear is not None:
        return [UNNAMEABLE_ARGV]
    touches: list[tuple[str, ...]] = []
    for command in script.commands:
        touches.append(command.argv)
        if has_marks(command.argv):
            touches.append((*command.argv, SPLIT))
    return touches


def find_paths_lost_by_script(target: CallTarget, script: ShellScript) -> tuple[str, ...]:
    """Return what a text removes or replaces for good, as far as it is known."""
    if target.losses is not None:
        return target.losses
    argvs = [command_wrappers.split_wrapper_layers(command.argv)[-1] for command in script.commands]
    return tuple(
        path
        for argv in argvs
        for path in destroying_forms.find_removed_paths(argv)
        if destroying_forms.is_build_output(path)
    )


def is_call_provably_read_only(targets: Sequence[CallTarget]) -> bool:
    """Return whether a call that only runs its command provably changes nothing."""
    return bool(targets) and all(
        target.redirected == "plain"
        if not isinstance(target.subject, ShellScript)
        else read_only_proof.explain_script_not_read_only(target.subject) is None
        for target in targets
    )


_PRIVATE_FOLDER = "/tmp/"  # noqa: S108 - nothing is made there


def is_in_private_tmp(target: CallTarget) -> bool:
    """Return whether the target lies in ``/tmp``, of which every sandbox has a private one."""
    subject = target.subject
    return (
        isinstance(subject, PathSubject) and subject.relative is None and subject.absolute.startswith(_PRIVATE_FOLDER)
    )


def format_command_for_message(text: str) -> str:
    """Return ``text`` for a message: one line, printable, and limited in length.

    Approval requests show the full arguments instead. The text is cut between words and escaped as in JSON, because registered
    secrets are found only in their known forms.
    """
    shown = text if len(text) <= _MAX_SHOWN else text[: text.rfind(" ", 0, _MAX_SHOWN) + 1]
    flat = shown if shown.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in shown)
    return f"`{flat}`" if len(shown) == len(text) else f"`{flat}…`"


def format_argv_for_message(argv: Sequence[str]) -> str:
    """Return an argv for a message, quoted so that the limits of each word are clear."""
    return format_command_for_message(
        show_marks(build_exact_argv_pattern(argv)) if has_marks(argv) else build_exact_argv_pattern(argv)
    )


def extract_host_and_port(text: str) -> str:
    """Return ``host:port`` of a URL, or the host itself if ``text`` is not a URL.

    :raises ToolError: if two readers might take the text for different hosts
    """
    if ("@" in text or "://" in text) and _SSH.match(text):
        raise ToolError(
            f"SSH addresses are not supported: {quote_text_or_length(text, 200)}. Use the HTTPS address instead.",
            kind="unavailable",
        )
    try:
        return str(parse_http_url(text).host if "//" in text else parse_host_address(text))
    except ValueError as error:
        raise ToolError(str(error), kind="invalid_input") from None


# The layers that bound a call: the tool's own, its agent's, its parent's, the host's ceiling.

CEILING_OWNER = "the host's ceiling"
VERBS: Mapping[Capability, str] = {
    "fs.read": "reading",
    "fs.write": "writing",
    "net.fetch": "reaching",
    "shell.run": "running",
}
_WORKSPACE_PATTERNS = ("{workspace}", "{workspace}/**", ".", "**")
"""Patterns for the whole workspace. A tool with one of them also has every further root."""
_ACCESS_HINTS: Mapping[Capability, str] = {"fs.read": "", "fs.write": ', with access = "write"'}


def agent_layer(agent: str, requires: Requires, specs: Iterable[ToolSpec], variables: PathVariables) -> CapabilityLayer:
    """Return what an agent has: what it and all of its tools declare. A further tool extends it."""
    owner = f"agent {agent}"
    of_tools = {id(spec.requires): spec.requires for spec in specs}  # thousands may share one, and most need nothing
    every = (requires, *(one for one in of_tools.values() if not one.is_empty))
    return unite_capability_layers(owner, [expand_requires(one, variables, owner) for one in every])


def build_ceiling_capability_layer(requires: Requires | None, variables: PathVariables) -> CapabilityLayer | None:
    """Return the limit of every agent on this host, or None if the operator set none."""
    return None if requires is None else expand_requires(requires, variables, CEILING_OWNER)


def compute_call_capabilities(
    spec: ToolSpec,
    variables: PathVariables,
    agent: CapabilityLayer,
    ceiling: CapabilityLayer | None = None,
    parent: CapabilitySet | None = None,
) -> CapabilitySet:
    """Return what one call has: the common part of the layers of its tool, agent, parent and the ceiling.

    Layers are never merged. So tool A does not get the hosts of tool B, and disjoint layers leave nothing.
    """
    own = CapabilitySet((expand_requires(spec.requires, variables, f"tool {spec.id}"), agent))
    if ceiling is not None:
        own = own.with_added_layers(ceiling)
    if parent is None:
        return own
    # A parent without any layer allows nothing, and so must its children.
    return own.with_added_layers(*parent.layers) if parent.layers else CapabilitySet()


DELEGATION_OWNER = "the delegation of agent"
ASKING_CAPABILITIES = frozenset({"ask", "elicit"})
"""Named capabilities with which a call asks the users of a session."""
MODE_CAPABILITY = "mode"
"""The named capability that no agent delegates: a sub-agent's mode follows that of its parent."""


def compute_delegated_capabilities(
    agent: str, delegation: DelegationPolicy, has: CapabilitySet, variables: PathVariables
) -> CapabilitySet:
    """Return what an agent may delegate to its sub-agents: what it has, limited by its manifest.

    A sub-agent has what this, the host's ceiling and its own declaration agree on. Secrets are never part of a capability set:
    a tool gets the secrets that it declares.

    :param has: all that bounds the agent itself: what it and its tools require, the ceiling, what its parent delegated
    :param variables: the agent's own
    """
    if not has.layers:
        return CapabilitySet()
    owner = f"{DELEGATION_OWNER} {agent}"
    named = expand_requires(delegation.to_requires(), variables, owner)
    own = has.layers[0]
    kept = (own.capabilities if delegation.capabilities is None else named.capabilities) - {MODE_CAPABILITY}
    if not delegation.can_ask_user:
        kept -= ASKING_CAPABILITIES
    cut = CapabilityLayer(
        owner,
        fs_read=own.fs_read if delegation.fs.read is None else named.fs_read,
        fs_write=own.fs_write if delegation.fs.write is None else named.fs_write,
        hosts=own.hosts if delegation.net.hosts is None else named.hosts,
        shell=own.shell if delegation.shell is None else named.shell,
        capabilities=kept,
    )
    return has.with_added_layers(cut)


def format_capability_denial(
    capabilities: CapabilitySet,
    layer: CapabilityLayer,
    capability: Capability,
    shown: str,
    spec: ToolSpec,
    *,
    most: int = 5,
) -> str:
    """Return why ``layer`` refuses an access, for the model: what it can do, or ask the user for.

    :param most: the maximum number of folders to name
    """
    doing = VERBS[capability].capitalize()
    if not capabilities.layers or layer.owner == "nothing":
        return (
            f"{doing} {shown} is not possible: this call has no access to files, hosts or programs. "
            "Continue without it, and tell the user what you could not do."
        )
    if layer.owner == CEILING_OWNER:
        return (
            f"{doing} {shown} exceeds the host's ceiling ([ceiling] in handrail.toml), which limits every agent. "
            "Continue without it, and tell the user what you could not do."
        )
    if layer.owner.startswith(DELEGATION_OWNER):
        folders = _path_patterns_clause(layer, capability, most)
        return f"{doing} {shown} is outside {layer.owner}{folders}. Continue without it, and say so in your answer to that agent."
    if capability == "net.fetch" and (fault := explain_private_refusal(layer.hosts, shown)) is not None:
        return (
            f"{shown} is {fault}. Tool {spec.id} reaches such a host only if the agent's manifest names it. Continue without it, or "
            f"ask the user to add it to [requires.tools.{spec.id}.net] there."
        )
    if capability == "net.fetch":
        return (
            f"Tool {spec.id} cannot reach {shown}, which is not among its hosts. Continue without it, or ask the user to add the "
            f"host to [requires.tools.{spec.id}.net] in the agent's manifest."
        )
    if capability == "shell.run":
        return (
            f"Tool {spec.id} cannot run {shown}, which is not among its programs. Use another tool, or tell the user."
        )
    verb = "read" if capability == "fs.read" else "write"
    within = (
        f"{shown} is outside the folders that tool {spec.id} can {verb}{_path_patterns_clause(layer, capability, most)}"
    )
    if not _covers_further_roots(spec, capability):
        return f"{within}. Use a path inside these folders, or another tool."
    return (
        f"{within}. Use a path inside these folders, or ask the user to add the folder to [[roots]] in the agent's manifest"
        f"{_ACCESS_HINTS[capability]}."
    )


def format_capability_grant_line(layer: CapabilityLayer, capability: Capability, spec: ToolSpec) -> str:
    """Return the line that would grant an access that ``layer`` refuses.

    It is for the author of the tool or the operator of the agent.
    """
    section = {
        "fs.read": 'fs.read, as in {"fs": {"read": ["{workspace}"]}}',
        "fs.write": 'fs.write, as in {"fs": {"write": ["{workspace}"]}}',
        "net.fetch": 'net.hosts, as in {"net": {"hosts": ["api.example.org"]}}',
        "shell.run": 'shell, as in {"shell": [{"cmd": "git"}]}',
    }[capability]
    if layer.owner == CEILING_OWNER:
        return f"In [ceiling] of handrail.toml: {section}"
    if layer.owner.startswith(DELEGATION_OWNER):
        agent = layer.owner.removeprefix(DELEGATION_OWNER).strip()
        return f"In [delegation] of the manifest of agent {agent}: {section}"
    if _covers_further_roots(spec, capability):
        return f"The folder in [[roots]] of the agent's manifest{_ACCESS_HINTS[capability]}; or, in the `requires` of {layer.owner}: {section}"
    return f"In the `requires` of {layer.owner}: {section}"


def _covers_further_roots(spec: ToolSpec, capability: Capability) -> bool:
    """Return whether the tool also has every further root as a folder."""
    wanted = {"fs.read": spec.requires.fs.read, "fs.write": spec.requires.fs.write}.get(capability, ())
    return any(pattern in _WORKSPACE_PATTERNS for pattern in wanted)


def _path_patterns_clause(layer: CapabilityLayer, capability: Capability, most: int) -> str:
    """Return the path patterns of a layer for the end of a clause; empty for other capabilities."""
    if capability not in ("fs.read", "fs.write"):
        return ""
    patterns = layer.fs_read if capability == "fs.read" else layer.fs_write
    more = f" and {len(patterns) - most} more" if len(patterns) > most else ""
    return f" ({', '.join(map(escape_terminal_controls, patterns[:most])) or 'none'}{more})"


def explain_mandatory_denial(capability: Capability, subject: object, shown: str) -> str | None:
    """Return why a protected path or a private key is refused whatever the rules say, or None."""
    if not isinstance(subject, PathSubject) or subject.relative is None:
        return None
    if capability == "fs.write":
        found = path_protection.find_tool_write_protection(subject.relative)
        return None if found is None or found.requires_approval else found.format_write_denial(shown)
    return (
        path_protection.format_private_key_denial(shown)
        if path_protection.is_private_key_path(subject.relative)
        else None
    )


_MAX_OUTER_NAMES = 3
"""The number of last names of a path outside the workspace that are compared. The user chose the names of its parent folders."""


def find_path_write_protection(capability: Capability, subject: object) -> PathProtection | None:
    """Return why writing a path requires approval whatever allows ``fs.write``; None for any other path."""
    if capability != "fs.write" or not isinstance(subject, PathSubject):
        return None
    if subject.relative is not None:
        found = path_protection.find_tool_write_protection(subject.relative)
        return found if found is not None and found.requires_approval else None
    names = subject.absolute.split("/")[-_MAX_OUTER_NAMES:]
    for count in range(1, len(names) + 1):
        found = path_protection.find_tool_write_protection("/".join(names[-count:]))
        if found is not None and found.requires_approval:
            return found
    return None
