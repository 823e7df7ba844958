"""What the writer writes to, and how that says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


class SinkUnavailable(Exception):
    """The sink as a whole cannot take anything now (full disk, read-only, damaged); the text says why."""


class SinkLost(SinkUnavailable):
    """The sink will never take anything again from this process; what waits for it is dropped."""


class Sink(Protocol[T_contra]):
    """Where groups go. Used by the writer's thread only."""

    def promise(self, batch: Sequence[T_contra]) -> bool:
        """Make a batch durable in a quicker way, before it is written. It is given to :meth:`write` soon, as the first of a
        group and behind what was promised before; if that never happens, whoever opens the sink next writes it.

        Raises nothing: False where it cannot be, and then nothing is promised
        """
        ...

    def rouse(self) -> None:
        """A promise may be asked for soon: do what can be done for it. Raises nothing."""
        ...

    def write(self, batch: Sequence[T_contra]) -> None:
        """Make the whole batch durable, or none of it.

        :raises SinkUnavailable: for a failure that no other batch would escape. Any other exception is taken
            for a fault of an item, and the batch is tried again item by item
        """
        ...

    def reopen(self) -> None:
        """After :class:`SinkUnavailable`: begin anew, and prove that writing works.

        :raises SinkUnavailable: when it does not
        """
        ...

    def close(self) -> None: ...
