"""One line of a check-up, and a way to make it that never fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from handrail.contract.errors import HandrailError


@dataclass(frozen=True, slots=True)
class Check:
    """What was found about one thing. A ``warning`` may be as it should be; a ``problem`` keeps something from working."""

    name: str
    state: Literal["ok", "warning", "problem"]
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def alone(name: str, look: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The checks that ``look`` makes; where it fails, one that says how. The others go on."""
    try:
        yield from look()
    except HandrailError as error:
        yield Check(name, "problem", str(error))
    except Exception as error:  # a check-up is read by somebody to whom much is broken already
        said = getattr(error, "strerror", None) or error
        yield Check(name, "problem", f"could not be checked: {type(error).__name__}: {said}")
