"""The learned map from a request's vector to the vectors of tools that serve it, fitted on requests with known tools.

Two things are learned. The adapter turns every request the same way: a scale and a few directions. Then the requests that
are most like it and were served before say where the tools for such are: "do I need an umbrella" has nothing in common with
"forecast for a place", but much with other requests for which that was right. The other way round, tools are drawn a little to
what was asked of tools most like them. All of it was made by ``bench/finding/adapter.py``, and all of it helps on tools and
requests that it was not made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder import Vectors

ALIKE = 32
"""Served requests by which one is judged: those most like it."""

_NARROW = 0.05
"""Cosines by how much of which the likeness of two requests differs for one to count e times the other."""

_PART = 0.6
"""What the tools of like requests count, beside the request itself, where a like one is the same."""

_DRAWN, _KNOWN = 0.3, 8
"""What the requests for like tools count beside the tool itself, where a like one is the same; tools by which one is judged."""

_CHUNK = 512


@dataclass(frozen=True)
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
        best, counts = _most_alike(near, ALIKE)
        return numpy.einsum("ik,ikj->ij", counts, self.tools[self.whose[best]])

    def requests_for(self, tools: Vectors) -> Vectors:
        """Where the requests for the tools most like each of ``tools`` lie, as long as the likeness is great."""
        best, counts = _most_alike(tools @ self.tools.T, _KNOWN)
        return numpy.einsum("ik,ikj->ij", counts, self._asked[best])

    @cached_property
    def _asked(self) -> Any:
        """Of each tool where its requests lie."""
        out = numpy.zeros_like(self.tools)
        numpy.add.at(out, self.whose, self.requests)
        return _unit(out)


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
        return cls.read(Path(__file__).with_name("turn.npz"))

    @classmethod
    def read(cls, path: Path) -> Turn:
        """One that was kept."""
        with path.open("rb") as file:
            held: Any = numpy.load(file, allow_pickle=False)
            groups = len([name for name in held.files if name.startswith("whose")])
            served = [
                Served(_directions(held[f"requests{at}"]), _directions(held[f"tools{at}"]), held[f"whose{at}"])
                for at in range(groups)
            ]
            return cls(held["rows"].astype(numpy.float32), served)

    def keep(self, path: Path) -> None:
        """Write it as :meth:`read` reads it: a component of a direction is one byte."""
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

    def drawn(self, tools: Vectors) -> Vectors:
        """Directions of tools, each drawn to what is asked of tools like it; a row of zeros (no vector yet) stays zeros."""
        if not self.served:
            return tools
        out = numpy.empty_like(tools)
        for begin in range(0, len(tools), _CHUNK):
            some = tools[begin : begin + _CHUNK]
            out[begin : begin + _CHUNK] = _unit(some + _DRAWN * sum(group.requests_for(some) for group in self.served))
        return out


def _most_alike(near: Any, several: int) -> tuple[Any, Any]:
    """The ``several`` nearest of each row, and what each of them counts."""
    several = min(several, near.shape[1])
    best = numpy.argpartition(-near, several - 1, axis=1)[:, :several]
    likeness: Any = numpy.take_along_axis(near, best, axis=1)
    most = likeness.max(axis=1, keepdims=True)
    counts: Any = numpy.exp((likeness - most) / _NARROW)
    counts *= numpy.maximum(most, 0) / counts.sum(axis=1, keepdims=True)
    return best, counts


def _unit(rows: Any) -> Vectors:
    return (rows / numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(numpy.float32)


def _bytes(rows: Vectors) -> Any:
    return numpy.rint(rows * (127 / numpy.abs(rows).max(axis=1, keepdims=True))).astype(numpy.int8)


def _directions(rows: Any) -> Vectors:
    return _unit(rows.astype(numpy.float32))
