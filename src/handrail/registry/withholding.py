"""Whether a sound tool may run here, and its status: why it is withheld, and by whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from handrail.contract.generation import IN_PROCESS, UNCONFINED, Foreign, Status
from handrail.contract.sandbox import Tier
from handrail.contract.tool.native import AT_PROVIDER
from handrail.contract.tool.settings import line_to_add
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.registry.sources.executables import ExecutableTool
from handrail.runtime.secrets import NO_SECRETS, SecretStore, secret_settings


class Reason(NamedTuple):
    """Why a tool is off, and the status that gives it."""

    status: Status
    text: str


NOT_BUILT = "its executable is not built, and no start builds one: run handrail build AGENT, and start from the folder that it writes"
PROVIDER = "the model's provider"
"""``Entry.confined_by`` of what it carries out itself."""
_GRAVEST: tuple[Status, ...] = ("disabled", "quarantined", "offline", "error", "available")


def verdict(spec: ToolSpec, foreign: Foreign | None, reasons: Iterable[Reason]) -> tuple[str | None, Status]:
    """What keeps a tool from running here, as ``Entry.withheld`` says it, and the status that follows.

    Without anything in its way it is ``connected`` where somebody had to give it something first, else ``system``.
    """
    found = sorted(reasons, key=lambda reason: _GRAVEST.index(reason.status))
    if found:
        texts = [f"available, but {one.text}" if one.status == "available" else one.text for one in found]
        return "; ".join(texts), found[0].status
    if spec.provider_support:
        return AT_PROVIDER, "connected"
    given = foreign is not None or bool(spec.secrets or spec.config)
    return None, "connected" if given else "system"


def confinement_of(tool: Tool, tier: Tier) -> str:
    """Who holds a tool back, as every result says it: ``runtime``, the tier, or both for Python that runs programs."""
    if tool.spec.provider_support:
        return PROVIDER
    holder = UNCONFINED if tool.spec.id in tier.unconfined else tier.name
    if not tool.trusted:
        return holder
    return f"{IN_PROCESS}+{holder}" if tool.spec.requires.shell else IN_PROCESS


def reasons_to_withhold(
    tool: Tool, tier: Tier, spec: ToolSpec | None = None, *, secrets: SecretStore = NO_SECRETS
) -> list[Reason]:
    """Why this kernel must not run a sound tool, each in a sentence for its operator; none where it may.

    What cannot be enforced or served is refused; nothing runs with less than it declares, or less confined.

    :param spec: what is asked of the tool, where that is more than its own
    """
    spec = spec or tool.spec
    reasons: list[Reason] = []
    if unknown := _unknown_secrets(tool, spec, secrets):
        reasons.append(
            Reason("available", f"needs configuration: it declares secrets that are not known here: {unknown}")
        )
    if unset := _unset_secrets(tool, spec, secrets):
        reasons.append(Reason("available", f"needs configuration: it has secret settings without a value: {unset}"))
    needed = (key for key, one in spec.config.items() if one.required and one.default is None and not one.secret)
    if unset := [f"{key} ({spec.config[key].description}; add {line_to_add(spec.id, key)})" for key in needed]:
        text = f"needs configuration: it has settings without a value: {', '.join(unset)}"
        reasons.append(Reason("available", f"{text}. A program gives them with open_kernel(tool_config=…)"))
    if isinstance(tool, ExecutableTool) and tool.unbuilt:
        reasons.append(Reason("available", NOT_BUILT))
    starts_programs = spec.id not in tier.unconfined and (not tool.trusted or bool(spec.requires.shell))
    if spec.requires.net.hosts and starts_programs and tier.confines and not tier.opens_hosts:
        hosts = ", ".join(spec.requires.net.hosts)
        why = "; ".join(f"{one.detail} ({one.remedy})" for one in tier.mechanisms if one.name == "hosts")
        reasons.append(
            Reason(
                "error",
                f"it starts programs and requires hosts ({hosts}), and no sandbox here opens the network to single hosts"
                + (f": {why}" if why else ""),
            )
        )
    if spec.mode == "stateful" and not tool.trusted:
        text = f"its mode is {spec.mode!r}, which only Python tools can have: an executable that keeps something between calls is persistent"
        reasons.append(Reason("error", text))
    if tool.trusted and spec.cancellable == "process":
        reasons.append(
            Reason("error", "it asks for a worker process of its own, and functions run in this process only")
        )
    if not tier.confines and starts_programs:
        remedy = f" ({tier.remedy})" if tier.remedy else ""
        text = f"it starts programs, which cannot be confined on this machine: {tier.detail}{remedy}"
        reasons.append(Reason("error", text))
    return reasons


def _unknown_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """The secrets that cannot be handed over, each with what its operator does about it."""
    if tool.own_secrets is not None:
        return ", ".join(
            f"{name} (the process that brought the tool gave none of this name)"
            for name in spec.secrets
            if name not in tool.own_secrets
        )
    return ", ".join(why for name in spec.secrets if (why := secrets.reason_missing(name)) is not None)


def _unset_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """The same for settings that are secret and that it cannot do without."""
    needed = [key for key in secret_settings(spec) if spec.config[key].required]
    if tool.own_secrets is not None:
        return ", ".join(f"{key} (a tool that another process brought is given none)" for key in needed)
    return ", ".join(why for key in needed if (why := secrets.reason_unset(spec, key)) is not None)
