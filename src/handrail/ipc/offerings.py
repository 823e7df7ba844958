"""What sources have beside tools, as a process that joined sees it: what they list. Reading it is a call, which the holder
carries out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from handrail.contract.doors.offers import PromptSpec, ResourceSpec, ResourceTemplate
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import UsageError
from handrail.contract.tool.offering import Offering
from handrail.ipc.codec.adapters import adapter


@dataclass(frozen=True, slots=True)
class ShownOffering:
    """Implements :class:`~handrail.contract.tool.offering.Offering` as far as that is listing."""

    source: str
    foreign: bool
    resources: Sequence[ResourceSpec]
    templates: Sequence[ResourceTemplate]
    prompts: Sequence[PromptSpec]

    def has(self, uri: str) -> bool:
        return any(one.uri == uri for one in self.resources)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        self._refuse()

    async def prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        self._refuse()

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        self._refuse()

    async def subscribe(self, uri: str, updated: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError("what a source offers is read by a call, as session.call('resource.read', {'uri': …})")


def of_offerings(offerings: Iterable[Offering]) -> Any:
    """What they list, as data."""
    shown = (
        ShownOffering(one.source, one.foreign, tuple(one.resources), tuple(one.templates), tuple(one.prompts))
        for one in offerings
    )
    return adapter(tuple[ShownOffering, ...]).dump_python(tuple(shown), mode="json")


def offerings_of(data: Any) -> tuple[ShownOffering, ...]:
    """The inverse of :func:`of_offerings`."""
    return adapter(tuple[ShownOffering, ...]).validate_python(data)
