"""The layers that bound what a call may touch: the tool's own, its agent's, its parent's, the host's ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from handrail.contract.agent import Delegable
from handrail.contract.requires import Capability, CapabilitySet, Layer, Requires, Variables, expand, union
from handrail.contract.spec import ToolSpec

CEILING = "the host's ceiling"
VERBS: Mapping[Capability, str] = {
    "fs.read": "reading",
    "fs.write": "writing",
    "net.fetch": "reaching",
    "shell.run": "running",
}


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


def refusal(capabilities: CapabilitySet, layer: Layer, capability: Capability, shown: str) -> str:
    """Why ``layer`` stops a touch, and which line would let it."""
    section = {
        "fs.read": 'fs.read, as in {"fs": {"read": ["{workspace}"]}}',
        "fs.write": 'fs.write, as in {"fs": {"write": ["{workspace}"]}}',
        "net.fetch": 'net.hosts, as in {"net": {"hosts": ["api.example.org"]}}',
        "shell.run": 'shell, as in {"shell": [{"cmd": "git"}]}',
    }[capability]
    verb = VERBS[capability]
    if not capabilities.layers or layer.owner == "nothing":
        return f"{verb} {shown} is not possible: this call has no capabilities at all."
    if layer.owner == CEILING:
        return f"{verb} {shown} exceeds the host's ceiling; its operator would widen [ceiling] in handrail.toml ({section})."
    if layer.owner.startswith(PASSED_ON):
        return f"{verb} {shown} is outside {layer.owner}; its operator would widen [delegable] in its manifest ({section})."
    return f"{verb} {shown} is outside what {layer.owner} requires; its author would add it to requires: {section}."
