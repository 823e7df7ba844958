"""How likely a hit serves the request, and when to say that nothing does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one hit.

    :param near: similarity of meaning, -1 to 1, or None where only words were searched
    :param shared: the part of what words could score at most, 0 to 1
    :param standing: how far it stands out among all tools, in standard deviations
    """

    near: float | None
    shared: float
    standing: float


def confidence(evidence: Evidence) -> float:
    """The share of hits with such evidence that serve their request."""
    if evidence.near is None:
        return _logistic(-2.0 + 6.0 * evidence.shared)
    return _logistic(-4.0 + 8.0 * evidence.near + 3.0 * evidence.shared)


def fits(evidence: Sequence[Evidence]) -> bool:
    """Whether the best hits of a request are good enough to be offered."""
    return any(confidence(each) > 0.1 for each in evidence)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))
