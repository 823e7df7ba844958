"""The layers that bound what a call may touch: the tool's own, its agent's, its parent's, the host's ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    return union(
        owner,
        [expand(requires, variables, owner), *(expand(spec.requires, variables, spec.id) for spec in specs)],
    )


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
    return f"{verb} {shown} is outside what {layer.owner} requires; its author would add it to requires: {section}."
