"""Semantic search: the tools whose vectors point in the direction of a request's.

Up to a few thousand tools are compared one by one, which a CPU does in half a millisecond. With more tools, each vector is first
compared by the signs of its components (one bit each, 48 bytes a tool), and the best few hundred exactly. On 10,000 real
definitions, that found the same tools for 750 real requests as an exact comparison, in a fourth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from handrail.catalog.search.lexical_index import DocumentScores, find_top_value_indices
from handrail.contract.struct import Struct

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Vectors


EXACT_UP_TO = 5_000
"""The maximum number of documents that are all compared exactly."""

_RESCORED = 400
"""The number of documents with the best signs to compare exactly."""

_SAMPLE = 2_000
"""The number of documents from which the deviation of the similarities is estimated, if not all are compared."""

_CHUNK = 8_192

_SHARP = 11.0
"""The sharpness of the soft maximum over common tools: a cosine that is lower by 1/11 counts e times less."""


def center_and_normalize(rows: Vectors, center: Vectors) -> Vectors:
    """Return ``rows`` relative to ``center``, each of length 1. A row of zeros (no vector) stays zeros."""
    out = rows - center
    out[~rows.any(axis=1)] = 0
    norms = numpy.linalg.norm(out, axis=1, keepdims=True)
    return (out / numpy.maximum(norms, 1e-9)).astype(numpy.float32)


def compute_smoothed_mean(rows: Vectors, usual: Vectors) -> Vectors:
    """Return the mean of ``rows`` and of ``usual`` ones, which stabilize it while there are few rows."""
    known = rows[rows.any(axis=1)].sum(axis=0, dtype=numpy.float64)
    count = int(rows.any(axis=1).sum())
    return ((known + usual.sum(axis=0)) / (count + len(usual))).astype(numpy.float32)


class VectorIndex:
    """The vectors of all documents, ready to be compared with a request's.

    :param rows: one for each document, of length 1; zeros for a document without a vector yet
    :param usual: vectors of typical texts of tools, to remove what all tools have in common
    :param out_of_domain: vectors of common tools; default: the usual ones
    :param adapt_tools: moves directions of tools towards requests for them
    :param exact_up_to: the maximum number of documents for an exact comparison
    """

    def __init__(
        self,
        rows: Vectors,
        usual: Vectors,
        *,
        out_of_domain: Vectors | None = None,
        adapt_tools: Callable[[Vectors], Vectors] | None = None,
        exact_up_to: int = EXACT_UP_TO,
    ) -> None:
        center = compute_smoothed_mean(rows, usual)
        self._elsewhere = center_and_normalize(usual if out_of_domain is None else out_of_domain, center)
        self._plain: Any = None if adapt_tools is None else numpy.empty(rows.shape, numpy.int8)
        seen = (self._adapt_chunk(rows, begin, center, adapt_tools) for begin in range(0, len(rows), _CHUNK))
        self._held = (_ExactVectors if len(rows) <= exact_up_to else _SignedVectors)(rows.shape, seen)

    def _adapt_chunk(
        self, rows: Vectors, begin: int, center: Vectors, drawn: Callable[[Vectors], Vectors] | None
    ) -> Vectors:
        """Return the search directions of some documents.

        The plain ones are stored with one byte for each component.
        """
        plain = center_and_normalize(rows[begin : begin + _CHUNK], center)
        if drawn is None:
            return plain
        most = numpy.maximum(numpy.abs(plain).max(axis=1, keepdims=True), 1e-9)
        self._plain[begin : begin + _CHUNK] = numpy.rint(plain * (127 / most))
        return drawn(plain)

    def score_by_similarity(self, request: Vectors, pool: int, asked: Sequence[int] = ()) -> DocumentScores:
        """Return the similarity of every document to ``request`` (a direction), with the ``pool`` best ones.

        :param asked: documents whose scores the caller needs besides the best ones
        """
        return self._held.score_by_similarity(request, pool, asked)

    def compute_document_similarities(self, numbers: Sequence[int], requests: Vectors) -> tuple[Vectors, Vectors]:
        """Return the similarity of each of these documents to each request, and to each of the documents.

        The documents have their plain directions here.
        """
        several = list(numbers)
        rows: Any = (
            self._held.get_directions(several) if self._plain is None else self._plain[several].astype(numpy.float32)
        )
        rows /= numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
        return numpy.einsum("ij,kj->ik", rows, requests), numpy.einsum("ij,kj->ik", rows, rows)

    def compute_common_tool_similarity(self, requests: Vectors) -> Vectors:
        """Return the similarity of each request to the nearest common tools.

        It is a soft maximum that does not depend on their number.
        """
        near: Any = numpy.einsum("ij,kj->ik", requests, self._elsewhere)
        most = near.max(axis=1, keepdims=True)
        return most[:, 0] + numpy.log(numpy.exp((near - most) * _SHARP).mean(axis=1)) / _SHARP


class _ExactVectors:
    """Directions that are all compared exactly.

    :param shape: the number of directions, and of their components
    :param chunks: the directions, some at a time
    """

    def __init__(self, shape: tuple[int, ...], chunks: Iterable[Vectors]) -> None:
        self._rows: Any = numpy.empty(shape, numpy.float32)
        begin = 0
        for rows in chunks:
            self._rows[begin : begin + len(rows)] = rows
            begin += len(rows)

    def get_directions(self, numbers: Any) -> Any:
        """Return the directions of some documents."""
        return self._rows[numbers]

    def score_by_similarity(self, request: Vectors, pool: int, _asked: Sequence[int]) -> DocumentScores:
        """Implement :meth:`VectorIndex.score_by_similarity`."""
        # numpy's own loop, because the threads of BLAS wait for each other on a busy machine
        total = numpy.einsum("ij,j->i", self._rows, request)
        best = find_top_value_indices(numpy, total, pool)
        return DocumentScores(best, float(total.mean()), float(total.std()), lambda number: float(total[number]))


class _SignedVectors:
    """Directions that are first compared by the signs of their components.

    Only the best ones are then compared exactly. Each component is stored as the upper half of a 32-bit float. That needs as
    much memory as a 16-bit float, and reads ten times as fast.
    """

    def __init__(self, shape: tuple[int, ...], chunks: Iterable[Vectors]) -> None:
        """Store the directions; see :class:`_ExactVectors`."""
        count, width = shape
        self._halves: Any = numpy.empty(shape, numpy.uint16)
        self._codes: Any = numpy.empty((-(-width // 64), count), numpy.uint64)
        """The first word of signs of every document, then the next word of each, and so on."""
        total: Any = numpy.zeros(width)
        begin = 0
        for rows in chunks:
            end = begin + len(rows)
            self._halves[begin:end] = (rows.view(numpy.uint32) + 0x8000) >> 16  # to the nearest
            self._codes[:, begin:end] = self._pack_signs(rows).T
            total += rows.sum(axis=0, dtype=numpy.float64)
            begin = end
        self._mean: Any = (total / count).astype(numpy.float32)
        sample = self.get_directions(numpy.arange(0, count, max(1, count // _SAMPLE)))
        about: Any = (sample - sample.mean(axis=0)) / math.sqrt(len(sample))
        self._spread: Any = numpy.linalg.qr(about, mode="r")
        """A triangular matrix. The length of its product with a request's direction is the deviation of the similarities."""

    def get_directions(self, numbers: Any) -> Any:
        """Return the directions of some documents."""
        whole = self._halves.take(numbers, axis=0).astype(numpy.uint32)
        whole <<= 16
        return whole.view(numpy.float32)

    def score_by_similarity(self, request: Vectors, pool: int, asked: Sequence[int]) -> DocumentScores:
        """Implement :meth:`VectorIndex.score_by_similarity`. The deviation of the scores comes from a sample."""
        count = self._halves.shape[0]
        mean, deviation = float(self._mean @ request), float(numpy.linalg.norm(self._spread @ request))
        if pool >= count:
            chunks = [self._near(numpy.arange(at, min(at + _CHUNK, count)), request) for at in range(0, count, _CHUNK)]
            total = numpy.concatenate(chunks)
            return DocumentScores(
                find_top_value_indices(numpy, total, pool), mean, deviation, lambda number: float(total[number])
            )
        numbers = numpy.concatenate((self._find_candidates_for(request), numpy.array(asked, numpy.intp)))
        near = self._near(numbers, request)
        order = numpy.lexsort((numbers, -near))[: pool + len(asked)]  # an asked document may also be a likely one
        known: dict[int, float] = dict(zip(numbers[order].tolist(), near[order].tolist(), strict=True))
        best = list(known)[:pool]
        known.update(zip(asked, near[len(near) - len(asked) :].tolist(), strict=True))

        def score(number: int) -> float:
            found = known.get(number)
            return float(self._near([number], request)[0]) if found is None else found

        return DocumentScores(best, mean, deviation, score)

    def _near(self, numbers: Any, request: Vectors) -> Any:
        return numpy.einsum("ij,j->i", self.get_directions(numbers), request)

    def _find_candidates_for(self, request: Vectors) -> Any:
        apart = numpy.zeros(self._codes.shape[1], numpy.int16)
        for held, word in zip(self._codes, self._pack_signs(request[None])[0], strict=True):
            apart += numpy.bitwise_count(held ^ word)
        several = min(_RESCORED, len(apart))
        return numpy.argpartition(apart, several - 1)[:several]

    def _pack_signs(self, rows: Vectors) -> Any:
        """Return one bit for each component, in words of 64 bits."""
        packed = numpy.zeros((len(rows), 8 * len(self._codes)), numpy.uint8)
        bits = numpy.packbits(rows > 0, axis=1)
        packed[:, : bits.shape[1]] = bits
        return packed.view(numpy.uint64)


# Background vectors: typical requests and tools, against which a particular text stands out.
#
# A model's vectors of requests all share the direction "a user asks for something", those of tools "this does something".
# Without this direction, the rest distinguishes them, and a tool that resembles every request (one that praises itself as good
# for everything) loses that advantage. Every embedder's background is computed from these texts.
#
# Common tools show when nothing in the catalogue fits: a request that is closer to a tool outside the catalogue than to any
# inside asks for that one. For the local model, a thousand such tools are stored as vectors, made by
# ``bench/finding/elsewhere.py``.


def load_common_tool_vectors() -> Vectors:
    """Return the local model's vectors of common tools, one in each row, each of length 1."""
    import numpy

    with Path(__file__).with_name("elsewhere.npy").open("rb") as file:
        rows: Any = numpy.load(file, allow_pickle=False).astype(numpy.float32)
    return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


BACKGROUND_REQUESTS = (
    "What's the weather going to be like tomorrow?",
    "Can you find me a good place to eat nearby?",
    "I need to send an email to my colleague.",
    "Calculate the result for these numbers.",
    "Please book a room for two nights.",
    "Show me the latest news about the economy.",
    "How much is this stock worth today?",
    "Create a new file and write the report into it.",
    "Remind me to call my sister at five.",
    "Translate this sentence into another language.",
    "I want to buy a new phone within my budget.",
    "Get the details of the order with this ID.",
    "Could you recommend a movie for tonight?",
    "List all open tasks of the project.",
    "Search the web for information about this topic.",
    "What is the fastest way to get there?",
    "Turn on the lights in the living room.",
    "Delete the old records from the database.",
    "Summarize this document for me.",
    "Help me plan a trip for next weekend.",
    "Analyze the data and draw a chart.",
    "Check whether the server is running.",
    "Who won the game last night?",
    "I'd like to learn more about a healthy diet.",
    "Convert this amount to another currency.",
    "Update the customer's address and phone number.",
    "Run the tests and tell me what fails.",
    "Play some relaxing music, please.",
    "I'm looking for a job in marketing.",
    "Generate an image of a cat on a beach.",
    "Evaluate the effect of the new policy on the population.",
    "Retrieve the patient's medical history.",
    "Write a short story about a dragon.",
    "Compare the prices of these two products.",
    "What are the opening hours of the museum?",
    "Schedule a meeting with the team on Monday.",
)

BACKGROUND_TOOLS = (
    "get weather: Returns the current weather for a location.",
    "search restaurants: Find restaurants near a place by cuisine and rating.",
    "send email: Sends an e-mail to one or more recipients.",
    "calculate sum: Adds numbers and returns the result.",
    "book hotel: Reserve a hotel room for given dates.",
    "get news: Retrieve recent news articles about a topic.",
    "stock price: Get the latest price of a stock by its symbol.",
    "write file: Create a file or overwrite its content.",
    "create reminder: Set a reminder for a given time.",
    "translate text: Translate text from one language to another.",
    "search products: Search a shop for products within a price range.",
    "get order: Retrieve an order by its identifier.",
    "recommend movies: Suggest films by genre and year.",
    "list issues: List the issues of a repository.",
    "web search: Search the internet and return the results.",
    "get directions: Get a route between two places.",
    "control device: Switch a smart home device on or off.",
    "delete record: Delete a row from a table.",
    "summarize document: Produce a summary of a document.",
    "plan trip: Create an itinerary for a destination.",
    "plot data: Draw a chart from a data set.",
    "server status: Check the status of a server.",
    "sports results: Get the results of recent matches.",
    "nutrition facts: Look up the calories and nutrients of a food.",
    "convert currency: Convert an amount between currencies.",
    "update customer: Change the details of a customer.",
    "run tests: Run a project's tests and report failures.",
    "play music: Play a song or playlist.",
    "job search: Find job openings by title and place.",
    "generate image: Generate a picture from a description.",
    "evaluate policy: Evaluate the effectiveness of a policy by an indicator.",
    "get patient history: Retrieve the medical records of a patient.",
    "generate story: Write a story from a prompt.",
    "compare products: Compare features and prices of products.",
    "opening hours: Get the opening hours of a place.",
    "create event: Add an event to a calendar.",
)


# The learned map from a request's vector to the vectors of tools that serve it, fitted on requests with known tools.
#
# Two parts are learned. The adapter changes every request in the same way: by a scale and a few directions. Then the most
# similar known requests show where the right tools are: "do I need an umbrella" has nothing in common with "forecast for a
# place", but much with other requests that this tool served. Conversely, tools move a little towards the requests for the tools
# most similar to them. ``bench/finding/adapter.py`` made both parts, and both help on tools and requests outside its training
# data.

MAX_ALIKE_REQUESTS = 32
"""The number of known requests to compare a request with: the most similar ones."""

_NARROW = 0.05
"""The difference in cosine by which one of two known requests counts e times as much as the other."""

_PART = 0.6
"""The weight of the tools of an identical known request, relative to the request itself."""

_DRAWN, _KNOWN = 0.3, 8
"""The weight of the requests for an identical known tool, relative to the tool itself, and the number of known tools to use."""

_TURNED_CHUNK = 512


@dataclass(frozen=True)
class LabelledToolRequests:
    """Requests with known tools.

    :param requests: their directions, moved by the adapter, one in each row
    :param tools: directions of tools
    :param whose: the tool of each request
    """

    requests: Vectors
    tools: Vectors
    whose: Any

    def compute_tool_direction(self, requests: Vectors) -> Vectors:
        """Return the direction of the tools of the most similar known requests, for each of ``requests``."""
        near: Any = numpy.einsum("ij,kj->ik", requests, self.requests)
        best, counts = _find_nearest(near, MAX_ALIKE_REQUESTS)
        return numpy.einsum("ik,ikj->ij", counts, self.tools[self.whose[best]])

    def compute_request_direction(self, tools: Vectors) -> Vectors:
        """Return the direction of the requests for the most similar known tools, for each of ``tools``."""
        best, counts = _find_nearest(tools @ self.tools.T, _KNOWN)
        return numpy.einsum("ik,ikj->ij", counts, self._request_directions[best])

    @cached_property
    def _request_directions(self) -> Any:
        out = numpy.zeros_like(self.tools)
        numpy.add.at(out, self.whose, self.requests)
        return _unit(out)


class RequestVectorAdapter(Struct, frozen=True):
    """The learned adapter of requests.

    :param rows: a row that begins with the scale, then both sides of each direction
    :param served: groups of served requests; each group counts the same, whatever its size
    """

    rows: Vectors
    served: Sequence[LabelledToolRequests] = ()

    @classmethod
    def load_shipped(cls) -> RequestVectorAdapter:
        """Return the shipped adapter for the local model."""
        return cls.load(Path(__file__).with_name("turn.npz"))

    @classmethod
    def load(cls, path: Path) -> RequestVectorAdapter:
        with path.open("rb") as file:
            held: Any = numpy.load(file, allow_pickle=False)
            groups = len([name for name in held.files if name.startswith("whose")])
            served = [
                LabelledToolRequests(
                    _directions(held[f"requests{at}"]), _directions(held[f"tools{at}"]), held[f"whose{at}"]
                )
                for at in range(groups)
            ]
            return cls(held["rows"].astype(numpy.float32), served)

    def save(self, path: Path) -> None:
        """Store the adapter, with one byte for each component of a direction."""
        out: dict[str, Any] = {"rows": self.rows.astype(numpy.float16)}
        for at, group in enumerate(self.served):
            out |= {f"requests{at}": _bytes(group.requests), f"tools{at}": _bytes(group.tools)}
            out[f"whose{at}"] = group.whose.astype(numpy.uint16)
        with path.open("wb") as file:
            numpy.savez_compressed(file, **out)

    def adapt_linearly(self, requests: Vectors) -> Vectors:
        """Return ``requests`` after the linear part of the adapter."""
        rank = len(self.rows) // 2
        first = numpy.einsum("ij,rj->ir", requests, self.rows[1 : rank + 1])
        return _unit(self.rows[0, 0] * requests + numpy.einsum("ir,rj->ij", first, self.rows[rank + 1 :]))

    def __call__(self, requests: Vectors) -> Vectors:
        """Return directions of requests, each moved to where its tools are more likely to be."""
        adapted = self.adapt_linearly(requests)
        out = adapted
        for group in self.served:
            out = out + _PART * group.compute_tool_direction(adapted)
        return _unit(out)

    def adapt_tool_vectors(self, tools: Vectors) -> Vectors:
        """Return directions of tools, each moved towards requests for similar tools. Rows of zeros stay zeros."""
        if not self.served:
            return tools
        out = numpy.empty_like(tools)
        for begin in range(0, len(tools), _TURNED_CHUNK):
            some = tools[begin : begin + _TURNED_CHUNK]
            out[begin : begin + _TURNED_CHUNK] = _unit(
                some + _DRAWN * sum(group.compute_request_direction(some) for group in self.served)
            )
        return out


def _find_nearest(near: Any, several: int) -> tuple[Any, Any]:
    """Return the ``several`` nearest of each row, and their weights."""
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
