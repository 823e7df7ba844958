"""What of a tool is searched: its fields as texts, each cut to a length that no honest tool needs.

Definitions come from anywhere, so nothing about them is taken for granted: a description that is a number, parameters
that are a list, a name of a megabyte, a schema that holds itself a thousand levels deep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from handrail.catalog.words.words import spelled, words

_NAME, _DESCRIPTION, _PARAMETER, _PARAMETERS = 200, 2_000, 300, 40
"""Characters of a name, of a description, of one parameter's text; parameters of one tool."""

_TAKEN = 20
"""Parameters of one tool whose names a model reads."""

_DEPTH, _VALUES = 3, 12
"""Levels of nested parameters; values of one enum."""


@dataclass(frozen=True, slots=True)
class Document:
    """One tool as the search sees it.

    :param parameters: its JSON schema, as it stands
    :param keywords: further words by which it should be found
    :param version: names this very definition (its hash); made from the content where empty
    """

    id: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    category: str = ""
    aliases: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    version: str = ""

    @property
    def key(self) -> str:
        """The same for two documents exactly when everything that is searched is the same."""
        version = self.version
        if not version:
            found = fields(self)
            content = "\0".join((found.description, found.parameter_names, found.parameter_texts))
            version = hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16).hexdigest()
        return "\0".join((self.id, self.category, *self.aliases, "", *self.keywords, "", version))


@dataclass(frozen=True, slots=True)
class Fields:
    """The searchable texts of one tool. ``also`` is aliases and keywords."""

    name: str
    description: str
    parameter_names: str
    parameter_texts: str
    also: str
    category: str


def fields(document: Document) -> Fields:
    """The fields of ``document``, cut to their lengths."""
    names: list[str] = []
    texts: list[str] = []
    for name, text in _parameters(document.parameters, _DEPTH):
        names.append(name)
        if text:
            texts.append(text)
        if len(names) == _PARAMETERS:
            break
    return Fields(
        document.id[:_NAME],
        _text(document.description)[:_DESCRIPTION],
        " ".join(names),
        " ".join(texts),
        " ".join((*document.aliases, *document.keywords))[:_DESCRIPTION],
        document.category[:_NAME],
    )


def passage(document: Document) -> str:
    """What a model reads of a tool: its name as words, what it says of itself, the names of what it takes."""
    name = " ".join(words(document.id[:_NAME]))
    description = _text(document.description)[:_DESCRIPTION]
    told = f"{name}: {description}" if description else name
    takes = (" ".join(words(each)) for each, _ in islice(_parameters(document.parameters, _DEPTH), _TAKEN))
    taken = ", ".join(dict.fromkeys(each for each in takes if each))
    return spelled(f"{told} ({taken})" if taken else told)


def _parameters(schema: object, depth: int) -> Iterator[tuple[str, str]]:
    """Name and text of each parameter, outer ones first."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    held = cast(Mapping[str, object], schema)
    properties = held.get("properties")
    if not isinstance(properties, Mapping):
        yield from _parameters(held.get("items"), depth - 1)
        return
    inner: list[object] = []
    for name, value in cast(Mapping[str, object], properties).items():
        if not isinstance(value, Mapping):
            yield str(name)[:_NAME], ""
            continue
        about = cast(Mapping[str, object], value)
        choices = about.get("enum")
        listed = cast(list[object], choices)[:_VALUES] if isinstance(choices, list) else []
        told = " ".join([_text(about.get("description")), *(str(each)[:_NAME] for each in listed)])
        yield str(name)[:_NAME], told.strip()[:_PARAMETER]
        inner.append(about)
    for about in inner:
        yield from _parameters(about, depth - 1)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
