"""Which embedder a search by meaning uses: the local model, a server, fastembed, a package's own, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from handrail.catalog.embedders.embedder import EmbedderError
from handrail.store.installed import entry_points as of_group

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder import Embedder
    from handrail.catalog.search.cache import Cache
    from handrail.catalog.search.encoding import Encoder

GROUP = "handrail.embedders"
"""Entry points: each an :class:`~handrail.catalog.embedders.embedder.Embedder`, or a function without arguments that makes one."""
LOCAL, NONE, ENDPOINT, FASTEMBED = "local", "none", "endpoint", "fastembed"
SHIPPED = (LOCAL, NONE, ENDPOINT, FASTEMBED)

_ELSEWHERE_S = 5.0
"""How long the end waits for an answer from an endpoint."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What an operator has chosen.

    :param name: one of :data:`SHIPPED`, or an entry point of :data:`GROUP`
    :param url: of the endpoint
    :param model: of the endpoint or of fastembed
    :param key: of the endpoint
    :param why_none: what is told where the name is :data:`NONE`
    """

    name: str = LOCAL
    url: str = ""
    model: str = ""
    key: str | None = None
    why_none: str = "turned off: embedder = 'none' under [search]"

    def __repr__(self) -> str:
        return f"<embedder {self.name}>"


def installed() -> Iterable[metadata.EntryPoint]:
    """The entry points of the packages in this environment."""
    return of_group(GROUP)


def encoder_of(
    chosen: Chosen, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed
) -> Callable[[Cache | None], tuple[Encoder | None, str]]:
    """Makes the encoder for the first index, or says why there is none."""

    def made(cache: Cache | None) -> tuple[Encoder | None, str]:
        try:
            embedder, why = _embedder(chosen, entry_points)
        except EmbedderError as error:
            return None, str(error)
        if embedder is None:
            return None, why
        from handrail.catalog.search.encoding import HANGS_S, Encoder

        return Encoder(embedder, cache, hangs_s=_ELSEWHERE_S if chosen.name == ENDPOINT else HANGS_S), ""

    return made


def _embedder(chosen: Chosen, entry_points: Callable[[], Iterable[metadata.EntryPoint]]) -> tuple[Embedder | None, str]:
    match chosen.name:
        case "none":
            return None, chosen.why_none
        case "local":
            from handrail.catalog.embedders import minilm

            return (None, why) if (why := minilm.missing()) is not None else (minilm.MiniLM(), "")
        case "endpoint":
            from handrail.catalog.embedders.endpoint import Endpoint

            return Endpoint(chosen.url, chosen.model, key=chosen.key), ""
        case "fastembed":
            from handrail.catalog.embedders.fast import FastEmbed

            return FastEmbed(chosen.model) if chosen.model else FastEmbed(), ""
        case name:
            return _of_a_package(name, entry_points)


def _of_a_package(name: str, entry_points: Callable[[], Iterable[metadata.EntryPoint]]) -> tuple[Embedder | None, str]:
    points = {point.name: point for point in sorted(entry_points(), key=lambda one: one.value, reverse=True)}
    if name not in points:
        there = ", ".join((*SHIPPED, *sorted(points)))
        return None, f"there is no embedder {name!r}; embedder under [search] is one of {there}"
    try:
        found: Any = points[name].load()
        if isinstance(found, type) or not hasattr(found, "encode"):
            found = found()
    except Exception as error:
        return None, f"the embedder {name!r} cannot be made: {type(error).__name__}: {error}"
    if not (callable(getattr(found, "encode", None)) and isinstance(getattr(found, "fingerprint", None), str)):
        return None, f"the embedder {name!r} is a {type(found).__name__}; expected fingerprint, load() and encode()"
    return found, ""
