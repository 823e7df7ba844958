"""The choice of the sandbox provider: this machine's own, or one that an installed package provides.

A package provides one by the entry point group ``handrail.sandboxes``: a callable without arguments that returns a
:class:`handrail.contract.sandbox.Sandbox`. Only an operator chooses it, by name (``[sandbox] provider``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from handrail.config import Configuration
from handrail.config.settings import OWN_SANDBOX
from handrail.contract.errors import StartError
from handrail.contract.sandbox import Sandbox, Tier
from handrail.sandbox.operated import Operated
from handrail.store.installed import entry_points as of_group

GROUP = "handrail.sandboxes"


def installed() -> Iterable[metadata.EntryPoint]:
    """What the packages in this environment offer."""
    return of_group(GROUP)


def provider_of(
    config: Configuration, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed
) -> Sandbox:
    """Who confines programs, without the operator's limits.

    :raises StartError: for a provider that is not there, or is none
    """
    settings = config.settings.sandbox
    if settings.provider != OWN_SANDBOX:
        return _provided(settings.provider, entry_points())
    from handrail.sandbox import tiers

    return tiers.choose(frozenset(settings.without))


def sandbox_of(
    config: Configuration, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed
) -> Operated:
    """What programs are started in.

    :raises StartError: as :func:`provider_of`
    """
    from handrail.sandbox.start.pool import pooled

    settings = config.settings.sandbox
    chosen = pooled(provider_of(config, entry_points))
    return Operated(chosen, settings.limits, unix_sockets=settings.unix_sockets, unconfined=settings.unconfined)


def _provided(name: str, offered: Iterable[metadata.EntryPoint]) -> Sandbox:
    points = {point.name: point for point in offered}
    if name not in points:
        there = ", ".join((OWN_SANDBOX, *sorted(points)))
        raise StartError(f"there is no sandbox {name!r} ([sandbox] provider); there are: {there}")
    try:
        made: Any = points[name].load()()
        tier = made.tier
    except Exception as error:
        raise StartError(
            f"the sandbox {name!r} from {points[name].value} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(tier, Tier) or not callable(getattr(made, "start", None)):
        raise StartError(
            f"the sandbox {name!r} from {points[name].value} is none: it needs a tier and a start, as "
            "handrail.contract.sandbox.Sandbox has them"
        )
    return made
