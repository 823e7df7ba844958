"""From a request to the tools for it: what was learned, on requests with known tools, of how one lies to the other.

Two things are learned. The adapter turns every request the same way: a scale and a few directions. Then the requests that
are most like it and were served before say where the tools for such are: "do I need an umbrella" has nothing in common with
"forecast for a place", but much with other requests for which that was right. Both were made by ``bench/finding/adapter.py``,
and both help on tools and requests that they were not made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from pathlib import Path

    from handrail.catalog.embedder import Vectors

ALIKE = 32
"""Served requests by which one is judged: those most like it."""

_NARROW = 0.05
"""Cosines by how much of which the likeness of two requests differs for one to count e times the other."""

_PART = 0.6
"""What the tools of like requests count, beside the request itself, where a like one is the same."""


@dataclass(frozen=True, slots=True)
class Served:
    """Requests with known tools.

    :param requests: their directions, turned by the adapter, one a row
    :param tools: directions of tools
    :param whose: of each request, its tool
    """

    requests: Vectors
    tools: Vectors
    whose: Any

    def tools_for(self, requests: Vectors) -> Vectors:
        """Where the tools of the requests most like each of ``requests`` lie, as long as the likeness is great."""
        near: Any = numpy.einsum("ij,kj->ik", requests, self.requests)
        several = min(ALIKE, near.shape[1])
        best = numpy.argpartition(-near, several - 1, axis=1)[:, :several]
        likeness: Any = numpy.take_along_axis(near, best, axis=1)
        most = likeness.max(axis=1, keepdims=True)
        counts: Any = numpy.exp((likeness - most) / _NARROW)
        counts *= numpy.maximum(most, 0) / counts.sum(axis=1, keepdims=True)
        return numpy.einsum("ik,ikj->ij", counts, self.tools[self.whose[best]])


@dataclass(frozen=True, slots=True)
class Turn:
    """What turns the directions of requests.

    :param rows: the adapter: a row that begins with the scale, then each direction's two sides
    :param served: groups of served requests; each counts the same, however many it has
    """

    rows: Vectors
    served: Sequence[Served] = ()

    @classmethod
    def shipped(cls) -> Turn:
        """The one beside this file, for the local model."""
        with files("handrail.catalog").joinpath("turn.npz").open("rb") as file:
            held: Any = numpy.load(file, allow_pickle=False)
            groups = len([name for name in held.files if name.startswith("whose")])
            served = [
                Served(_directions(held[f"requests{at}"]), _directions(held[f"tools{at}"]), held[f"whose{at}"])
                for at in range(groups)
            ]
            return cls(held["rows"].astype(numpy.float32), served)

    def keep(self, path: Path) -> None:
        """Write it as :meth:`shipped` reads it: a component of a direction is one byte."""
        out: dict[str, Any] = {"rows": self.rows.astype(numpy.float16)}
        for at, group in enumerate(self.served):
            out |= {f"requests{at}": _bytes(group.requests), f"tools{at}": _bytes(group.tools)}
            out[f"whose{at}"] = group.whose.astype(numpy.uint16)
        with path.open("wb") as file:
            numpy.savez_compressed(file, **out)

    def adapted(self, requests: Vectors) -> Vectors:
        """``requests`` by the adapter alone."""
        rank = len(self.rows) // 2
        first = numpy.einsum("ij,rj->ir", requests, self.rows[1 : rank + 1])
        return _unit(self.rows[0, 0] * requests + numpy.einsum("ir,rj->ij", first, self.rows[rank + 1 :]))

    def __call__(self, requests: Vectors) -> Vectors:
        """Directions of requests, each turned to where the tools for it are more likely to be."""
        adapted = self.adapted(requests)
        out = adapted
        for group in self.served:
            out = out + _PART * group.tools_for(adapted)
        return _unit(out)


def _unit(rows: Any) -> Vectors:
    return (rows / numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(numpy.float32)


def _bytes(rows: Vectors) -> Any:
    return numpy.rint(rows * (127 / numpy.abs(rows).max(axis=1, keepdims=True))).astype(numpy.int8)


def _directions(rows: Any) -> Vectors:
    return _unit(rows.astype(numpy.float32))
