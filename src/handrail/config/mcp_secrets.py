"""What in a server's configuration is secret, though it stands there as plain text: to be redacted, whole and in parts.

A server may say back any part of what it was sent: the token without the word before it, the password out of the base64.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

_NAME = re.compile(r"token|key|secret|passw|auth|credential|cookie|(?:^|[_-])(?:pass|pwd)(?:[_-]|$)", re.IGNORECASE)
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
    """The secrets among the parameters of a URL, as they are and as they are written there."""
    try:
        query = urlsplit(url).query
    except ValueError:
        return
    for name, value in parse_qsl(query):
        yield from secrets_in(name, value)
    for part in query.split("&"):
        name, _, written = part.partition("=")
        if written != unquote(written):
            yield from secrets_in(unquote(name), written)


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
