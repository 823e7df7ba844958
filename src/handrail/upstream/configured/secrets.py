"""Finding secrets that stand as plain text in a server's configuration, so that they are redacted, whole and in parts.

A server may say back any part of what it was sent: the token without the word before it, the password out of the base64.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from typing import cast
from urllib.parse import parse_qsl, unquote, urlsplit

_NAME = re.compile(r"token|key|secret|passw|auth|credential|cookie|(?:^|[_-])(?:pass|pwd)(?:[_-]|$)", re.IGNORECASE)
_NO_SECRET = re.compile(r"(?:file|path|dir|folder|type|mode|method|name|id|url|uri|scheme|env|var)$", re.IGNORECASE)
"""What an option's name ends with that says where or of which kind a secret is."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_WORD = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
LEAST = 8
"""Characters; what is shorter stands in ordinary text too."""
LEAST_PASSWORD = 6
"""The same of what is sure to be a password."""


def secrets_in(name: str, value: str) -> Iterator[str]:
    """The secrets in a variable, a header field or a parameter of a URL.

    :param name: of the field; one that does not sound like it holds none
    """
    if not _NAME.search(name):
        return
    if len(value) >= LEAST:
        yield value
    if name.lower() == "cookie":
        parts = [part.partition("=")[2].strip() for part in value.split(";")]
        yield from (part for part in parts if len(part) >= LEAST)
        return
    scheme, _, credentials = value.strip().partition(" ")
    credentials = credentials.strip()
    if not scheme.isalpha() or not credentials or "=" in scheme:
        return
    if len(credentials) >= LEAST:
        yield credentials
    if scheme.lower() == "basic":
        yield from _of_basic(credentials)


def secrets_in_url(url: str) -> Iterator[str]:
    """The secrets among the parameters of a URL and before its host, as they are and as they are written there."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    for name, value in parse_qsl(parts.query):
        yield from secrets_in(name, value)
    for part in parts.query.split("&"):
        name, _, written = part.partition("=")
        if written != unquote(written):
            yield from secrets_in(unquote(name), written)
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    for written in {password, unquote(password)}:
        if len(written) >= LEAST_PASSWORD:
            yield written
    if not colon and parts.scheme in ("http", "https"):  # elsewhere a name alone is one
        yield from (written for written in {user, unquote(user)} if len(written) >= LEAST)


def secrets_in_text(text: str) -> Iterator[str]:
    """The secrets in the URLs of a value, whatever its name."""
    for found in _URL.finditer(text):
        yield from secrets_in_url(found[0])


def secrets_in_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """The secrets in a program's arguments: ``--token X``, ``--token=X``, ``-e TOKEN=X``, ``--header 'Authorization: X'``,
    ``{"token": "X"}``, and those in URLs."""
    option = ""
    for argument in arguments:
        yield from secrets_in_text(argument)
        name, equals, value = argument.partition("=")
        field, colon, rest = argument.partition(":")
        if argument.startswith("{"):
            yield from _of_json(argument)
        elif option and not argument.startswith("-"):
            yield from _of_option(option, argument)
        if equals and _WORD.fullmatch(name):
            yield from _of_option(name, value)
            field, colon, rest = value.partition(":")  # --header=Authorization:X
        if colon and _WORD.fullmatch(field):
            yield from secrets_in(field, rest.strip())
        option = name if argument.startswith("-") and not equals else ""


def _of_option(name: str, value: str) -> Iterator[str]:
    if not _NO_SECRET.search(name):
        yield from secrets_in(name.lstrip("-"), value)


def _of_json(text: str) -> Iterator[str]:
    try:
        waiting: list[tuple[str, object]] = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += cast("dict[str, object]", value).items()
        elif isinstance(value, list):
            waiting += ((name, one) for one in cast("list[object]", value))
        elif isinstance(value, str):
            yield from _of_option(name, value)


def _of_basic(credentials: str) -> Iterator[str]:
    try:
        both = base64.b64decode(credentials + "=" * (-len(credentials) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return
    if len(both) >= LEAST:
        yield both
    password = both.partition(":")[2]
    if len(password) >= LEAST_PASSWORD:
        yield password
