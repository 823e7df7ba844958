"""The choice of the sandbox provider: the one of this machine, or one of an installed package.

A package provides one through the entry point group ``handrail.sandboxes``: a callable without arguments that returns a
:class:`handrail.contract.sandbox_protocol.Sandbox`. Only an operator can choose it, by name (``[sandbox] provider``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from handrail.config import MergedConfiguration
from handrail.config.operator_settings import MACHINE_SANDBOX
from handrail.contract.errors import StartError
from handrail.contract.sandbox_protocol import Sandbox, SandboxTier
from handrail.sandbox.configured_sandbox import ConfiguredSandbox
from handrail.sandbox.start.ready_sandbox_pool import wrap_bubblewrap_in_pool
from handrail.store.entry_point_cache import list_entry_points_outside_workspaces as of_group

ENTRY_POINT_GROUP = "handrail.sandboxes"


def list_sandbox_entry_points() -> Iterable[metadata.EntryPoint]:
    """Return the providers of the installed packages."""
    return of_group(ENTRY_POINT_GROUP)


def choose_unlimited_sandbox(
    config: MergedConfiguration, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_sandbox_entry_points
) -> Sandbox:
    """Return the sandbox that confines programs, without the operator's limits.

    :raises StartError: if the provider does not exist or is invalid
    """
    settings = config.settings.sandbox
    if settings.provider != MACHINE_SANDBOX:
        return _load_provider(settings.provider, entry_points())
    from handrail.sandbox import tier_probe

    return tier_probe.choose_sandbox(frozenset(settings.without))


def make_limited_sandbox(
    config: MergedConfiguration, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_sandbox_entry_points
) -> ConfiguredSandbox:
    """Return the sandbox that starts programs, with the operator's limits.

    :raises StartError: if the provider does not exist or is invalid
    """
    return _limit_sandbox(config, choose_unlimited_sandbox(config, entry_points))


async def make_limited_sandbox_in_thread(
    config: MergedConfiguration, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_sandbox_entry_points
) -> ConfiguredSandbox:
    """Return the sandbox of :func:`make_limited_sandbox`, and let the event loop run while a program is tried in it.

    :raises StartError: if the provider does not exist or is invalid
    """
    return _limit_sandbox(config, await asyncio.to_thread(choose_unlimited_sandbox, config, entry_points))


def _limit_sandbox(config: MergedConfiguration, chosen: Sandbox) -> ConfiguredSandbox:
    settings = config.settings.sandbox
    return ConfiguredSandbox(
        wrap_bubblewrap_in_pool(chosen),
        settings.limits,
        unix_sockets=settings.unix_sockets,
        unconfined=settings.unconfined,
    )


def _load_provider(name: str, offered: Iterable[metadata.EntryPoint]) -> Sandbox:
    points = {point.name: point for point in offered}
    if name not in points:
        there = ", ".join((MACHINE_SANDBOX, *sorted(points)))
        raise StartError(f"Unknown sandbox provider: {name!r}. Set `[sandbox] provider` to one of: {there}.")
    try:
        made: Any = points[name].load()()
        tier = made.tier
    except Exception as error:
        raise StartError(
            f"Cannot load the sandbox provider {name!r} from {points[name].value}: {type(error).__name__}: {error}. "
            "Upgrade its package, or set `[sandbox] provider` to another one."
        ) from error
    if not isinstance(tier, SandboxTier) or not callable(getattr(made, "start", None)):
        raise StartError(
            f"Invalid sandbox provider: {name!r} from {points[name].value}. Expected an object with `tier` and `start`, "
            "as in handrail.contract.sandbox_protocol.Sandbox."
        )
    return made
