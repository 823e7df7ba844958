"""What confines programs here: each layer with its state, its reason and its remedy, and what runs without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from handrail.contract.sandbox import Mechanism, Tier
from handrail.kernel.doctor.check import Check
from handrail.sandbox.view import identity

if TYPE_CHECKING:
    from handrail.config import Configuration


def of_sandbox(tier: Tier, workspace: str) -> Iterator[Check]:
    """The tier, and each mechanism that it is made of.

    :param workspace: whose owner programs may run as
    """
    yield Check("sandbox", "ok" if tier.confines else "problem", f"{tier.name}: {tier.detail}", tier.remedy)
    if not tier.mechanisms:
        return
    person = identity.person_for(workspace)
    for one in tier.mechanisms:
        if one.name == "processes" and one.held is False and person is not None:
            held = f"counted, since programs run as user {person.uid} and not as root"
            one = Mechanism("processes", True, held)  # noqa: PLW2901
        yield Check(f"sandbox {one.name}", _state(one, tier), one.detail, one.remedy)
    if tier.confines:
        who = identity.mechanism(workspace)
        yield Check("sandbox identity", _state(who, tier), who.detail, who.remedy)


def of_opt_outs(found: Configuration) -> Iterator[Check]:
    """What an operator does without, by name."""
    settings = found.settings.sandbox
    remedy = "take it out of [sandbox] in handrail.toml to have it confined"
    if settings.unconfined:
        named = ", ".join(settings.unconfined)
        yield Check("unconfined tools", "warning", f"{named}: their programs run without any sandbox", remedy)
    if settings.unix_sockets:
        about = "programs may make Unix sockets, and reach every server that listens in the workspace"
        yield Check("unix sockets", "warning", about, "set sandbox.unix_sockets to false to close it")


def _state(one: Mechanism, tier: Tier) -> Literal["ok", "warning", "problem"]:
    if one.held:
        return "ok"
    return "problem" if one.held is False and not tier.confines else "warning"
