"""A sandbox as its operator has set it: with their limits, and beside it the tools that they named to run without one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from handrail.contract.sandbox import Limits, Process, Profile, Program, Sandbox, Tier
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.start.pool import Pooled
from handrail.sandbox.unconfined import Unconfined


class Operated:
    """Implements :class:`handrail.contract.sandbox.Sandbox` on another one.

    :param limits: of every program
    :param unix_sockets: whether programs may make Unix sockets
    :param unconfined: ids of the tools whose programs run without ``sandbox``
    """

    def __init__(
        self, sandbox: Sandbox, limits: Limits, *, unix_sockets: bool = False, unconfined: Iterable[str] = ()
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._unix_sockets = unix_sockets
        self._unconfined = frozenset(unconfined)
        self._free = Unconfined()
        self._tier = replace(sandbox.tier, unconfined=self._unconfined)

    @property
    def tier(self) -> Tier:
        return self._tier

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        chosen = self._free if profile.tool in self._unconfined else self._sandbox
        profile = replace(profile, limits=self._limits, unix_sockets=self._unix_sockets)
        return await chosen.start(capabilities, profile, program)

    async def release(self, scratch: str) -> None:
        """End what is ready for the session with this scratch folder."""
        if isinstance(self._sandbox, Pooled):
            await self._sandbox.release(scratch)

    async def aclose(self) -> None:
        """End what is ready for any."""
        if isinstance(self._sandbox, Pooled):
            await self._sandbox.aclose()
