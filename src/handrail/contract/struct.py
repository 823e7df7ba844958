"""The base of classes that have fields only. msgspec makes them at a fraction of the cost of a dataclass.

Other code can treat them as dataclasses: ``dataclasses.fields``, ``replace`` and ``asdict`` accept them, and so does pydantic.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import msgspec
from msgspec import NODEFAULT, field


class _DataclassFields:
    """A class attribute with the fields of a struct as a dataclass has them, made when they are first read."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[type, dict[str, dataclasses.Field[Any]]] = WeakKeyDictionary()

    def __get__(self, instance: object, owner: type[msgspec.Struct]) -> dict[str, dataclasses.Field[Any]]:
        if (made := self._made.get(owner)) is None:
            made = self._made[owner] = _make_dataclass_fields(owner)
        return made


def _make_dataclass_fields(owner: type[msgspec.Struct]) -> dict[str, dataclasses.Field[Any]]:
    types: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        types |= inspect.get_annotations(base)
    names, defaults = owner.__struct_fields__, owner.__struct_defaults__
    padded = (NODEFAULT,) * (len(names) - len(defaults)) + defaults
    twin = dataclasses.make_dataclass(
        owner.__name__,
        [(name, types[name], _to_dataclass_field(default)) for name, default in zip(names, padded, strict=True)],
        kw_only=any(default is NODEFAULT for default in defaults),  # which only keyword arguments allow
    )
    return cast("dict[str, dataclasses.Field[Any]]", cast("Any", twin).__dataclass_fields__)


def _to_dataclass_field(default: Any) -> Any:
    if default is NODEFAULT:
        return dataclasses.field()
    if (factory := getattr(default, "factory", None)) is not None:
        return dataclasses.field(default_factory=factory)
    return dataclasses.field(default=default)


if TYPE_CHECKING:
    from msgspec import Struct  # of which frozen and other classes can be made
else:

    class Struct(msgspec.Struct):
        """A class whose constructor takes its fields, and whose instances are compared by them."""

        __dataclass_fields__ = _DataclassFields()


__all__ = ["Struct", "field"]
