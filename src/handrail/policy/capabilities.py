"""The layers that bound what a call may touch: the tool's own, its agent's, its parent's, the host's ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from handrail.contract.agent import Delegable
from handrail.contract.text.neutral import visible
from handrail.contract.tool.requires import Capability, CapabilitySet, Layer, Requires, Variables, expand, union
from handrail.contract.tool.spec import ToolSpec

CEILING = "the host's ceiling"
VERBS: Mapping[Capability, str] = {
    "fs.read": "reading",
    "fs.write": "writing",
    "net.fetch": "reaching",
    "shell.run": "running",
}
_WHOLE = ("{workspace}", "{workspace}/**", ".", "**")
"""Patterns by which a tool has the workspace, and with it every further root."""
_ACCESS: Mapping[Capability, str] = {"fs.read": "", "fs.write": ', with access = "write"'}


def agent_layer(agent: str, requires: Requires, specs: Iterable[ToolSpec], variables: Variables) -> Layer:
    """What an agent has: what it declares itself and what all of its tools declare. Adding a tool extends it."""
    owner = f"agent {agent}"
    of_tools = {id(spec.requires): spec.requires for spec in specs}  # thousands may share one, and most need nothing
    every = (requires, *(one for one in of_tools.values() if not one.empty))
    return union(owner, [expand(one, variables, owner) for one in every])


def ceiling_layer(requires: Requires | None, variables: Variables) -> Layer | None:
    """What no agent on this host may exceed; None where the operator set no bound."""
    return None if requires is None else expand(requires, variables, CEILING)


def call_set(
    spec: ToolSpec,
    variables: Variables,
    agent: Layer,
    ceiling: Layer | None = None,
    parent: CapabilitySet | None = None,
) -> CapabilitySet:
    """What one call has: every one of its tool's, its agent's, its parent's layers and the ceiling must agree.

    Nothing is ever merged, so tool A does not get tool B's hosts, and disjoint layers leave nothing.
    """
    own = CapabilitySet((expand(spec.requires, variables, f"tool {spec.id}"), agent))
    if ceiling is not None:
        own = own.narrowed(ceiling)
    if parent is None:
        return own
    # A parent without any layer allows nothing, and so must its children.
    return own.narrowed(*parent.layers) if parent.layers else CapabilitySet()


PASSED_ON = "what is passed on by agent"
PRESENCE = frozenset({"ask", "elicit"})
"""Named capabilities by which a call reaches the people of a session."""


def passed_on(agent: str, delegable: Delegable, has: CapabilitySet, variables: Variables) -> CapabilitySet:
    """What an agent may hand to the agents below it: what it has, cut to what its manifest lets it pass on.

    What a sub-agent has is what this, the host's ceiling, and what it declares itself agree on. Secrets are no part of a
    set: they go to the tools that declare them, never along with one.

    :param has: all that bounds the agent itself: what it and its tools require, the ceiling, what it was handed
    :param variables: the agent's own
    """
    if not has.layers:
        return CapabilitySet()
    owner = f"{PASSED_ON} {agent}"
    named = expand(delegable.as_requires(), variables, owner)
    own = has.layers[0]
    kept = own.capabilities if delegable.capabilities is None else named.capabilities
    if not delegable.presence:
        kept -= PRESENCE
    cut = Layer(
        owner,
        fs_read=own.fs_read if delegable.fs.read is None else named.fs_read,
        fs_write=own.fs_write if delegable.fs.write is None else named.fs_write,
        hosts=own.hosts if delegable.net.hosts is None else named.hosts,
        shell=own.shell if delegable.shell is None else named.shell,
        capabilities=kept,
    )
    return has.narrowed(cut)


def refusal(
    capabilities: CapabilitySet, layer: Layer, capability: Capability, shown: str, spec: ToolSpec, *, most: int = 5
) -> str:
    """Why ``layer`` stops a touch, for the model that proposed it: what it may do instead, and what it may ask the user for.

    :param most: how many folders are named
    """
    doing = VERBS[capability]
    if not capabilities.layers or layer.owner == "nothing":
        return (
            f"{doing} {shown} is not possible: this call may touch nothing at all. Tell the user what you could not do."
        )
    if layer.owner == CEILING:
        return f"{doing} {shown} is more than the host's ceiling ([ceiling] in handrail.toml) allows any agent. Do without it, and tell the user."
    if layer.owner.startswith(PASSED_ON):
        folders = _folders(layer, capability, most)
        return f"{doing} {shown} is outside {layer.owner}{folders}. Do without it, and say so in your answer to that agent."
    if capability == "net.fetch":
        return (
            f"tool {spec.id} cannot reach {shown}, which is not among its hosts. Do without it, or ask the user to add the host to "
            f"[requires.tools.{spec.id}.net] in the agent's manifest."
        )
    if capability == "shell.run":
        return (
            f"tool {spec.id} cannot run {shown}, which is not among its programs. Use another tool, or tell the user."
        )
    verb = "read" if capability == "fs.read" else "write"
    within = f"{shown} is outside the folders that tool {spec.id} can {verb}{_folders(layer, capability, most)}"
    if not _follows_roots(spec, capability):
        return f"{within}. Use a path there, or another tool."
    return f"{within}. Use a path there, or ask the user to add the folder to [[roots]] in the agent's manifest{_ACCESS[capability]}."


def remedy(layer: Layer, capability: Capability, spec: ToolSpec) -> str:
    """Which line would let a touch through that ``layer`` stops, for the person who wrote the tool or operates the agent."""
    section = {
        "fs.read": 'fs.read, as in {"fs": {"read": ["{workspace}"]}}',
        "fs.write": 'fs.write, as in {"fs": {"write": ["{workspace}"]}}',
        "net.fetch": 'net.hosts, as in {"net": {"hosts": ["api.example.org"]}}',
        "shell.run": 'shell, as in {"shell": [{"cmd": "git"}]}',
    }[capability]
    if layer.owner == CEILING:
        return f"in [ceiling] of handrail.toml: {section}"
    if layer.owner.startswith(PASSED_ON):
        agent = layer.owner.removeprefix(PASSED_ON).strip()
        return f"in [delegable] of the manifest of agent {agent}: {section}"
    if _follows_roots(spec, capability):
        return f"the folder in [[roots]] of the agent's manifest{_ACCESS[capability]}; or, in what {layer.owner} requires: {section}"
    return f"in what {layer.owner} requires: {section}"


def _follows_roots(spec: ToolSpec, capability: Capability) -> bool:
    """Whether a further root is one of a tool's folders, too."""
    wanted = {"fs.read": spec.requires.fs.read, "fs.write": spec.requires.fs.write}.get(capability, ())
    return any(pattern in _WHOLE for pattern in wanted)


def _folders(layer: Layer, capability: Capability, most: int) -> str:
    """The patterns of paths that a layer has, for the end of a clause; nothing for what is no path."""
    if capability not in ("fs.read", "fs.write"):
        return ""
    patterns = layer.fs_read if capability == "fs.read" else layer.fs_write
    more = f" and {len(patterns) - most} more" if len(patterns) > most else ""
    return f" ({', '.join(map(visible, patterns[:most])) or 'none'}{more})"
