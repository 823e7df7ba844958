"""Checking an untrusted JSON-like mapping against a model: every fault with its place, and the part that is sound.

Nothing is coerced and no key is ignored; an unknown key is answered with the nearest one there is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

import pydantic
from pydantic import BaseModel

from handrail.contract.schema.schema import path_text
from handrail.contract.tool.names import nearest

Location = tuple[str | int, ...]


def faults_of(
    model: type[BaseModel],
    data: Mapping[str, Any],
    prefix: tuple[str, ...] = (),
    missing: Mapping[Location, str] | None = None,
) -> dict[str, str]:
    """Place to problem, for everything in ``data`` that ``model`` does not take.

    :param data: what JSON can say
    :param prefix: where ``data`` stands in its file
    :param missing: by place in ``data``, more than "is missing" where it helps
    """
    try:
        model.model_validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as error:
        return {
            path_text((*prefix, *_without_tags(fault["loc"]))): _text(dict(fault), model, missing or {})
            for fault in error.errors()
        }
    return {}


def _without_tags(location: Location) -> Location:
    """Without the names of a union's members, which nobody wrote."""
    return tuple(part for part in location if not (isinstance(part, str) and part[:1] == "<"))


def sound_part(model: type[BaseModel], data: Mapping[str, Any], fillers: Mapping[str, object] | None = None) -> Any:
    """``data`` with its faulty places filled or left out, so that one fault does not hide another.

    Required keys of the outermost level that are missing stay missing; the caller gives those.

    :param fillers: by outermost key, what stands for a faulty item of a list there, instead of ``"-"``
    """
    rest: dict[str, Any] = json.loads(json.dumps(data))
    while True:
        try:
            model.model_validate_json(json.dumps(rest), strict=True)
        except pydantic.ValidationError as error:
            found = [fault["loc"] for fault in error.errors() if fault["type"] != "missing" or len(fault["loc"]) > 1]
            if not found:
                return rest
            # One of each item: what else is wrong with it may be gone with the first, and the next look tells.
            for location in {_item(location): location for location in reversed(found)}.values():
                _blank(rest, location, (fillers or {}).get(str(location[0]), "-"))
        else:
            return rest


def _item(location: Location) -> Location:
    """The item of a list that ``location`` is in, else ``location``."""
    return next((location[: i + 1] for i, part in enumerate(location) if isinstance(part, int)), location)


def unknown_key(name: str, known: Mapping[str, object]) -> str:
    """What to say of a key that nobody knows."""
    close = nearest(name, known)
    return f"unknown key; did you mean {close[0]!r}?" if close else f"unknown key; there are {', '.join(known)}"


def _text(fault: Mapping[str, Any], model: type[BaseModel], missing: Mapping[Location, str]) -> str:
    location = cast("Location", fault["loc"])
    if fault["type"] == "missing":
        return missing.get(location, "is missing")
    if fault["type"] == "extra_forbidden":
        return unknown_key(str(location[-1]), _fields_at(model, location[:-1]))
    value = repr(fault["input"])
    shown = value if len(value) <= 80 else f"{value[:79]}…"
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    return message if message.startswith(shown) else f"is {shown}; {message}"


def _fields_at(model: type[BaseModel], location: Location) -> Mapping[str, object]:
    """The keys that may stand at ``location``: steps through lists, mappings and unions of models."""
    annotation: object = model
    for part in location:
        fields = {name: f for m in _models_in(annotation) for name, f in m.model_fields.items()}
        if isinstance(part, str) and part in fields:
            annotation = fields[part].annotation
    return {name: f for m in _models_in(annotation) for name, f in m.model_fields.items()}


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _blank(view: dict[str, Any], location: Location, filler: object) -> None:
    """Take out what stands at ``location``, or above it where nothing does. A list keeps its numbering if it can."""
    node: Any = view
    reached: list[tuple[Any, Any]] = []
    for part in location:
        if isinstance(node, str):
            break
        try:
            inner = node[part]
        except (KeyError, IndexError, TypeError):
            break
        reached.append((node, part))
        node = inner
    if not reached:
        return
    holder, key = reached[-1]
    if isinstance(holder, list) and node != filler:
        holder[key] = filler
    else:
        del holder[key]
