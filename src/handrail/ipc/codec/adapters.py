"""How plain data becomes one of our values and back, for each kind of value: made when first needed.

A process that holds a workspace which nobody joins needs none of them, and they take longer to make than a call.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")

_made: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """The one adapter of this kind."""
    made = _made.get(kind)
    if made is None:
        made = _made[kind] = TypeAdapter(kind)
    return made
