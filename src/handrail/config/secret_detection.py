"""The search for secrets in plain text in the configuration of an MCP server, by the name or by the form of a value.

The import keeps such a value apart, and the kernel redacts it, whole and in parts: a server may send back the token without the
scheme, or the password decoded from base64.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from typing import cast
from urllib.parse import parse_qsl, unquote, urlsplit

from handrail.contract.text.lazy_patterns import compile_regex_lazily

_SECRET_WORD = compile_regex_lazily(
    r"(?:token|secret|passw(?:or)?d|passphrase|passcode|api_?key|access_?key|credential|cookie|auth)s?$"
    r"|^(?:keys?|pass|pwd|pat|jwt|dsn|bearer|authorization|authentication)$|^passw"
)
_WORD_BORDER = compile_regex_lazily(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_SECRET = compile_regex_lazily(
    r"(?:file|path|dir|folder|type|mode|method|name|id|url|uri|scheme|env|var)$", re.IGNORECASE
)
"""Endings of names that describe a secret and do not contain one."""
_SECRET_VALUE = compile_regex_lazily(
    r"^(sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|ya29\.|hf_|npm_|pypi-|ntn_|secret_|eyJ)[\w.-]{8,}"
    r"|^[A-Za-z][\w+.-]*://[^/\s:@]*:[^/\s@]+@"
    r"|(?i:(?:^|[?&;\s])[\w.-]*(?:token|secret|key|passwo?r?d|pwd)\s*=\s*[^\s&;]"
    r"|^(?:(?:proxy-)?authorization|cookie|[\w-]*(?:token|secret|key))\s*:\s*\S)"
    r"|^(?i:bearer|basic)\s+\S{6,}$"
    r"|^[0-9A-Fa-f]{32,}$"
    r"|^(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=\D*\d)[A-Za-z0-9_+]{24,}={0,2}$"
)
"""Tokens by their first characters or their randomness, and a password or key in a URL, an assignment or a header field."""
_ORDINARY_WORD = compile_regex_lazily(
    r"(?=.*[aeiouyAEIOUY])(?!.*[^aeiouyAEIOUY]{5})(?:[A-Za-z][a-z]{0,7}|[A-Z]{1,8})"
    r"|(?i:production|development|localhost|undefined|anonymous|information)|[+-]?\d{1,5}"
)
_URL = compile_regex_lazily(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_OPTION = compile_regex_lazily(r"-{0,2}[A-Za-z][\w.-]*")
MIN_SECRET_CHARS = 8
"""The minimum length in characters of a secret to redact; shorter texts occur in ordinary text."""
MIN_PASSWORD_CHARS = 6
"""The minimum length in characters of a known password."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable, a field or an option says that its value is a secret."""
    if _NO_SECRET.search(name):
        return False
    words = [word.lower() for word in _WORD_BORDER.split(name) if word]
    if words[:1] and words[0] in ("max", "min", "num", "total"):  # a number of tokens or keys
        return False
    return any(map(_SECRET_WORD.search, words)) or "connection_string" in "_".join(words)


def is_secret_value(value: str) -> bool:
    """Return whether a value has the form of a secret, whatever its name."""
    return _SECRET_VALUE.search(value) is not None


def is_ordinary_value(value: str) -> bool:
    """Return whether a value is an ordinary short word or number, such as ``info``, ``true`` or ``5432``.

    Such a value occurs in ordinary text. It is never redacted, whatever its name.
    """
    return _ORDINARY_WORD.fullmatch(value.strip()) is not None


def find_secrets_in_named_value(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in a variable, a header field or a parameter of a URL.

    :param name: the name of the field, which decides whether it may have a secret
    """
    if not is_secret_name(name):
        return
    if len(value) >= MIN_SECRET_CHARS:
        yield value
    if name.lower() == "cookie":
        parts = [part.partition("=")[2].strip() for part in value.split(";")]
        yield from (part for part in parts if len(part) >= MIN_SECRET_CHARS)
        return
    scheme, _, credentials = value.strip().partition(" ")
    credentials = credentials.strip()
    if not scheme.isalpha() or not credentials or "=" in scheme:
        return
    if len(credentials) >= MIN_SECRET_CHARS:
        yield credentials
    if scheme.lower() == "basic":
        yield from _find_basic_secrets(credentials)


def find_url_secrets(url: str) -> Iterator[str]:
    """Yield the secrets in a URL's parameters and before its host, both decoded and as written."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    for name, value in parse_qsl(parts.query):
        yield from find_secrets_in_named_value(name, value)
    for part in parts.query.split("&"):
        name, _, written = part.partition("=")
        if written != unquote(written):
            yield from find_secrets_in_named_value(unquote(name), written)
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    for written in {password, unquote(password)}:
        if len(written) >= MIN_PASSWORD_CHARS:
            yield written
    if not colon and parts.scheme in ("http", "https"):  # in other schemes, a name alone is not a secret
        yield from (written for written in {user, unquote(user)} if len(written) >= MIN_SECRET_CHARS)


def find_secrets_in_text_urls(text: str) -> Iterator[str]:
    """Yield the secrets in the URLs of a value, whatever its name."""
    for found in _URL.finditer(text):
        yield from find_url_secrets(found[0])


def find_argument_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the secrets in a program's arguments, such as ``--token X``, ``-e TOKEN=X`` and those in URLs.

    Also ``--token=X``, ``--header 'Authorization: X'`` and ``{"token": "X"}``.
    """
    option = ""
    for argument in arguments:
        yield from find_secrets_in_text_urls(argument)
        name, equals, value = argument.partition("=")
        field, colon, rest = argument.partition(":")
        if argument.startswith("{"):
            yield from _find_json_secrets(argument)
        elif option and not argument.startswith("-"):
            yield from find_secrets_in_named_value(option, argument)
        if equals and _OPTION.fullmatch(name):
            yield from find_secrets_in_named_value(name, value)
            field, colon, rest = value.partition(":")  # --header=Authorization:X
        if colon and _OPTION.fullmatch(field):
            yield from find_secrets_in_named_value(field, rest.strip())
        option = name if argument.startswith("-") and not equals else ""


def _find_json_secrets(text: str) -> Iterator[str]:
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
            yield from find_secrets_in_named_value(name, value)


def _find_basic_secrets(credentials: str) -> Iterator[str]:
    try:
        both = base64.b64decode(credentials + "=" * (-len(credentials) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return
    if len(both) >= MIN_SECRET_CHARS:
        yield both
    password = both.partition(":")[2]
    if len(password) >= MIN_PASSWORD_CHARS:
        yield password
