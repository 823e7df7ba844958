"""Conversion of the contract's types to JSON data and back, by their annotations.

It serves the wire between processes and stored rows. A reader is closed. It accepts what the writer of the same type
produces and rejects everything else, with the place of the problem. It never follows a text of the data to a name in
the code.
"""

from __future__ import annotations

import base64
import binascii
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from msgspec.structs import asdict as to_fields
from pydantic import BaseModel, ValidationError

from handrail.contract.struct import Struct

T = TypeVar("T")

Reader = Callable[[Any], T]
"""A function that checks decoded JSON and returns a value. Its argument is ``Any`` because it may be anything."""


class MalformedDataError(ValueError):
    """Data that does not have the expected form. The text says what it is and what was expected."""


class JsonTypeCodec(Struct, Generic[T], frozen=True):
    """The JSON form of one type.

    :param kinds: the Python classes of its values, by which a union finds the writer
    :param write: converts a value for the JSON encoder; None if the encoder takes the values unchanged
    """

    read: Reader[T]
    kinds: tuple[type, ...]
    write: Callable[[T], Any] | None = None


class Codec:
    """A cache of forms, each made when its type is first used.

    :param own: the forms of types that are not written by their annotations
    """

    def __init__(self, own: Mapping[Any, JsonTypeCodec[Any]] | None = None) -> None:
        self._made: dict[Any, JsonTypeCodec[Any]] = {**_SIMPLE, **(own or {})}

    def get_type_codec(self, kind: Any) -> JsonTypeCodec[Any]:
        """Return the form of a type.

        :raises TypeError: for a type without a JSON form
        """
        if (made := self._made.get(kind)) is None:
            made = self._made[kind] = self._form(kind)
        return made

    def get_type_reader(self, kind: type[T]) -> Reader[T]:
        """Return the reader of a type; see :meth:`get_type_codec`."""
        return self.get_type_codec(kind).read

    def encode_value(self, kind: Any, value: Any) -> Any:
        """Convert ``value`` of this type for the JSON encoder."""
        return value if (write := self.get_type_codec(kind).write) is None else write(value)

    def _form(self, kind: Any) -> JsonTypeCodec[Any]:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return _add_annotated_checks(self.get_type_codec(arguments[0]), arguments[1:])
        if origin is Literal:
            return _words(arguments)
        if origin is Union or origin is types.UnionType:
            return _union_form([self.get_type_codec(one) for one in arguments])
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return _sequence_form(self.get_type_codec(arguments[0]), tuple)
        if origin is tuple:
            return _tuple_form(tuple, [self.get_type_codec(one) for one in arguments])
        if origin in (list, Sequence, Collection, frozenset):
            return _sequence_form(self.get_type_codec(arguments[0]), frozenset if origin is frozenset else list)
        if origin in (dict, Mapping):
            if arguments[0] is not str:
                raise TypeError(f"{kind} has no JSON form: its keys are not texts")
            return _mapping_form(self.get_type_codec(arguments[1]))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return _model(kind)
        if isinstance(kind, type) and is_dataclass(kind):
            return self._fields(kind)
        if isinstance(kind, type) and hasattr(kind, "_fields"):  # a NamedTuple
            hints, made = get_type_hints(kind, include_extras=True), cast("Any", kind)
            return _tuple_form(made._make, [self.get_type_codec(hints[name]) for name in made._fields], kind)
        raise TypeError(f"{kind} has no JSON form")

    def _fields(self, kind: type) -> JsonTypeCodec[Any]:
        hints = get_type_hints(kind, include_extras=True)
        every = fields(cast("Any", kind))
        forms = {one.name: self.get_type_codec(hints[one.name]) for one in every if one.init}
        readers = {name: form.read for name, form in forms.items()}
        writers = {name: form.write for name, form in forms.items()}

        def read(value: Any) -> Any:
            return kind(**decode_exact_fields(value, readers))

        def write(value: Any) -> Any:
            given = {name: getattr(value, name) for name in writers}  # names of the class, as its author wrote them
            return {name: one if (by := writers[name]) is None else by(one) for name, one in given.items()}

        if len(forms) < len(every) or any(writers.values()):
            return JsonTypeCodec(read, (kind,), write)
        return JsonTypeCodec(read, (kind,), to_fields if issubclass(kind, Struct) else None)


def decode_exact_fields(value: Any, readers: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    """Return the members of an object that must have exactly these fields.

    :raises MalformedDataError: with the name of the member
    """
    given = expect_json_object(value)
    if given.keys() != readers.keys():
        odd = sorted(given.keys() ^ readers.keys())
        raise MalformedDataError(
            f"expected the fields {', '.join(readers) or 'none'}; differs in {', '.join(odd)[:200]}"
        )
    return {name: _read_at(name, reader, given[name]) for name, reader in readers.items()}


def _read_at(name: str, reader: Reader[T], value: Any) -> T:
    try:
        return reader(value)
    except MalformedDataError as error:
        raise MalformedDataError(f"{name[:80]}: {error}") from None


def expect_json_object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise MalformedDataError(f"expected an object, not {_describe_kind(value)}")
    return value  # pyright: ignore[reportUnknownVariableType]


def expect_json_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise MalformedDataError(f"expected a list, not {_describe_kind(value)}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _describe_kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _plain_json_form(expected: str, *kinds: type) -> JsonTypeCodec[Any]:
    """Return the form of values that JSON has itself."""

    def read(value: Any) -> Any:
        if type(value) not in kinds:  # the exact type: True is not a number
            raise MalformedDataError(f"expected {expected}, not {_describe_kind(value)}")
        return value

    return JsonTypeCodec(read, kinds)


def _bytes(value: Any) -> bytes:
    marked = expect_json_object(value)
    if marked.keys() != {"$bytes"} or type(marked["$bytes"]) is not str:
        raise MalformedDataError('expected bytes as {"$bytes": "<base64>"}')
    try:
        return base64.b64decode(marked["$bytes"], validate=True)
    except (binascii.Error, ValueError):
        raise MalformedDataError("bytes are not base64") from None


_SIMPLE: Mapping[Any, JsonTypeCodec[Any]] = {
    Any: JsonTypeCodec(lambda value: value, (object,)),
    str: _plain_json_form("text", str),
    int: _plain_json_form("a whole number", int),
    float: _plain_json_form("a number", int, float),
    bool: _plain_json_form("true or false", bool),
    types.NoneType: _plain_json_form("null", types.NoneType),
    bytes: JsonTypeCodec(_bytes, (bytes, bytearray, memoryview)),  # the JSON encoder marks them
}


def _add_annotated_checks(form: JsonTypeCodec[Any], checks: Sequence[Any]) -> JsonTypeCodec[Any]:
    """Return ``form`` with the checks of an ``Annotated`` type.

    Each check receives the value that was read, and returns it or raises :class:`MalformedDataError`.
    """

    def read(value: Any) -> Any:
        found = form.read(value)
        for check in checks:
            found = check(found)
        return found

    return JsonTypeCodec(read, form.kinds, form.write)


def _words(words: Sequence[Any]) -> JsonTypeCodec[Any]:
    known = frozenset(words)

    def read(value: Any) -> Any:
        if type(value) is not str or value not in known:
            raise MalformedDataError(f"expected one of {', '.join(map(str, words))}")
        return value

    return JsonTypeCodec(read, (str,))


def _union_form(forms: Sequence[JsonTypeCodec[Any]]) -> JsonTypeCodec[Any]:
    """Return the form of a union.

    The first form that accepts a value reads it. The first form of its class writes it.
    """
    last = forms[-1].read if forms[-1].kinds != (types.NoneType,) else forms[0].read
    may_be_none = any(form.kinds == (types.NoneType,) for form in forms)
    readers = [form.read for form in forms if form.kinds != (types.NoneType,) and form.read is not last]

    def read(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        for reader in readers:
            try:
                return reader(value)
            except MalformedDataError:
                continue
        return last(value)

    def write(value: Any) -> Any:
        for form in forms:
            if isinstance(value, form.kinds):
                return value if form.write is None else form.write(value)
        return value

    kinds = tuple(kind for form in forms for kind in form.kinds)
    return JsonTypeCodec(read, kinds, write if any(form.write for form in forms) else None)


def _sequence_form(form: JsonTypeCodec[Any], made: Callable[[Any], Any]) -> JsonTypeCodec[Any]:
    inner, writes = form.read, form.write

    def read(value: Any) -> Any:
        return made([inner(one) for one in expect_json_list(value)])

    def write(value: Any) -> Any:
        return list(value) if writes is None else [writes(one) for one in value]

    kinds = (frozenset,) if made is frozenset else (list, tuple)
    return JsonTypeCodec(read, kinds, write if writes is not None or made is frozenset else None)


def _tuple_form(
    made: Callable[[Any], Any], forms: Sequence[JsonTypeCodec[Any]], kind: type = tuple
) -> JsonTypeCodec[Any]:
    """Return the form of a tuple with fixed positions, each with its own form."""
    readers, writers = [form.read for form in forms], [form.write for form in forms]

    def read(value: Any) -> Any:
        given = expect_json_list(value)
        if len(given) != len(readers):
            raise MalformedDataError(f"expected a list of {len(readers)}, not of {len(given)}")
        return made([reader(one) for reader, one in zip(readers, given, strict=True)])

    def write(value: Any) -> Any:
        return [one if by is None else by(one) for by, one in zip(writers, value, strict=True)]

    return JsonTypeCodec(read, (kind,), write if kind is not tuple or any(writers) else None)


def _mapping_form(form: JsonTypeCodec[Any]) -> JsonTypeCodec[Any]:
    inner, writes = form.read, form.write

    def read(value: Any) -> Any:
        given = expect_json_object(value)
        return (
            given if inner is _SIMPLE[Any].read else {name: _read_at(name, inner, one) for name, one in given.items()}
        )

    def write(value: Any) -> Any:
        return dict(value) if writes is None else {name: writes(one) for name, one in value.items()}

    return JsonTypeCodec(read, (Mapping,), write)  # a view of a mapping is none to the encoder


def _model(kind: type[BaseModel]) -> JsonTypeCodec[Any]:
    def read(value: Any) -> Any:
        try:
            return kind.model_validate(expect_json_object(value))
        except ValidationError as error:
            found = error.errors(include_input=False, include_url=False)[:3]
            raise MalformedDataError(
                "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)
            ) from None

    return JsonTypeCodec(read, (kind,), lambda value: value.model_dump(mode="json"))


_CODEC = Codec()
reader_of = _CODEC.get_type_reader
"""Return the reader of a type as its annotations have it; see :meth:`Codec.get_type_reader`."""
write = _CODEC.encode_value
"""See :meth:`Codec.encode_value`."""
