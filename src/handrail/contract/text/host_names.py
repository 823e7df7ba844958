r"""Host names: one strict reading for rules, grants, proxies and fetches.

A host is plain ASCII: a DNS name, a dotted IPv4 address or a bracketed IPv6 address, each in one canonical form.
Names that a resolver reads differently than people do (``0x7f.1``, ``2130706433``, ``0177.0.0.1``, ``①②⑦.0.0.1``,
``a\0b``, ``user@host``) are not hosts, so the kernel reaches exactly the host that the policy checked.

Patterns match exactly or at a label boundary: ``*.example.org`` covers ``a.example.org`` and not ``example.org``;
``*`` covers every host. A *rule*'s pattern without a port is about every port. A *grant* that names a host without a
port opens the ports of the web. Only a grant that is itself an address opens an address that is not public.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Literal, NamedTuple, cast

from handrail.contract.errors import quote_text_or_length
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.public_addresses import explain_blocked_address

Address = IPv4Address | IPv6Address

WEB_PORTS = {"http": 80, "https": 443}
"""The supported schemes, each with its port."""

_LABEL = compile_regex_lazily(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = compile_regex_lazily(r"(?:[0-9]+|0x[0-9a-f]*)")
_PORT = compile_regex_lazily(r"[1-9][0-9]{0,4}")
_URL = compile_regex_lazily(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(\?[^#]*)?(#.*)?")
_PLAIN = compile_regex_lazily(rf"((?:{_LABEL.pattern}\.)*(?![0-9]){_LABEL.pattern})(?::([1-9][0-9]{{0,4}}))?")
"""The form of nearly every host: a lower-case name whose last label is not a number, with an optional port."""
_MAX_NAME = 253
_LAST_PORT = 65_535
_WEB_OR_ANY = (None, *WEB_PORTS.values())


class HostAddress(NamedTuple):
    """One host in canonical form: lower case, no final dot, an address as its shortest text.

    :param name: ``api.example.org``, ``127.0.0.1`` or ``::1``
    :param address: the value of ``name``, if it is an address
    """

    name: str
    port: int | None = None
    address: Address | None = None

    def __str__(self) -> str:
        shown = bracket_ipv6_host(self.name)
        return shown if self.port is None else f"{shown}:{self.port}"


class ParsedUrl(NamedTuple):
    """The parts of an ``http`` or ``https`` URL.

    :param host: with an explicit port
    :param target: path and query as they go into a request; never empty, no fragment
    """

    scheme: Literal["http", "https"]
    host: HostAddress
    target: str

    @property
    def host_header_value(self) -> str:
        """The value of a request's ``Host`` header: without the port if it is the scheme's own."""
        if self.host.port == WEB_PORTS[self.scheme]:
            return bracket_ipv6_host(self.host.name)
        return str(self.host)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header_value}{self.target}"


class HostPattern(NamedTuple):
    """A parsed host pattern.

    :param kind: ``every`` host, hosts that end with ``name`` (``beneath``, dot included), or ``name`` itself
        (``exact``)
    """

    kind: Literal["every", "beneath", "exact"]
    name: str
    port: int | Literal["any"] | None

    def matches_as_rule(self, host: HostAddress) -> bool:
        """Return whether it matches as a rule's pattern; see :func:`rule_matches_host`."""
        return self.port in (None, "any", host.port) and self._names(host)

    def matches_as_grant(self, host: HostAddress) -> bool:
        """Return whether it matches as a declared pattern; see :func:`grant_covers_host`."""
        if self.port is None:
            opened = self.kind == "every" or host.port in _WEB_OR_ANY
        else:
            opened = self.port in ("any", host.port)
        return opened and self._names(host)

    def opens(self, host: HostAddress) -> bool:
        """Return whether a capability with this pattern covers a host; see :func:`capability_covers_host`."""
        return self.matches_as_grant(host) and (self.kind == "exact" or _explain_private(host) is None)

    def _names(self, host: HostAddress) -> bool:
        if self.kind == "every":
            return True
        if self.kind == "exact":
            return host.name == self.name
        return host.address is None and host.name.endswith(self.name) and len(host.name) > len(self.name)


def bracket_ipv6_host(name: str) -> str:
    """Return ``name`` in the form before a port."""
    return f"[{name}]" if ":" in name else name


@lru_cache(maxsize=4096)
def parse_host_address(text: str) -> HostAddress:
    """Parse ``host`` or ``host:port``, an IPv6 address in brackets.

    :raises ValueError: with the reason, for a text that readers may understand differently
    """
    if len(text) <= _MAX_NAME and (plain := _PLAIN.fullmatch(text)) is not None:
        name, number = plain.groups()
        if number is None:
            return HostAddress(name)
        if (port := int(number)) <= _LAST_PORT:
            return HostAddress(name, port)
    name, port = _split_port(text)
    if port == "any":
        raise ValueError(f"Invalid host: {_shown(text)}. Write a port number after the colon.")
    canonical, address = _canonical_name(name)
    return HostAddress(canonical, port, address)


@lru_cache(maxsize=1024)
def parse_http_url(text: str) -> ParsedUrl:
    """Parse a whole URL.

    :raises ValueError: for a text that two readers might take for different hosts
    """
    if not text.isascii() or not text.isprintable() or "\\" in text or " " in text:
        raise ValueError(f"Invalid URL: {_shown(text)}. Use ASCII without blanks or backslashes.")
    if (match := _URL.fullmatch(text)) is None or (scheme := match[1].lower()) not in WEB_PORTS:
        raise ValueError(f"Invalid URL: {_shown(text)}. Use an http or https URL.")
    authority, path, query = match.group(2, 3, 4)
    if "@" in authority:
        raise ValueError(f"Invalid URL: {_shown(text)}. Remove the user name before the host.")
    authority, port = authority.removesuffix(":"), WEB_PORTS[scheme]
    try:  # in the form that the policy evaluates, which is parsed again there
        host = parse_host_address(authority if ":" in authority else f"{authority}:{port}")
    except ValueError:
        host = parse_host_address(authority)  # which says what is wrong with it as it was written
    if host.port is None:
        host = HostAddress(host.name, port, host.address)
    return ParsedUrl(cast("Literal['http', 'https']", scheme), host, (path or "/") + (query or ""))


def rule_matches_host(pattern: str, host: str) -> bool:
    """Return whether a rule's ``pattern`` matches ``host[:port]``. No pattern matches an invalid host."""
    try:
        return parse_host_pattern(pattern).matches_as_rule(parse_host_address(host))
    except ValueError:
        return False


def grant_covers_host(pattern: str, host: str) -> bool:
    """Return whether a declared ``pattern`` opens ``host[:port]``.

    A pattern without a port opens 80 and 443, only ``*`` every port.
    """
    try:
        return parse_host_pattern(pattern).matches_as_grant(parse_host_address(host))
    except ValueError:
        return False


def capability_covers_host(pattern: str, host: str) -> bool:
    """Return whether a capability with ``pattern`` covers ``host[:port]``: a wildcard covers no private host."""
    try:
        return parse_host_pattern(pattern).opens(parse_host_address(host))
    except ValueError:
        return False


def explain_private_refusal(patterns: Iterable[str], host: str) -> str | None:
    """Return why a wildcard among these patterns does not cover ``host[:port]``; None if that is not the reason."""
    if not any(grant_covers_host(pattern, host) for pattern in patterns):
        return None
    return _explain_private(parse_host_address(host))


def _explain_private(host: HostAddress) -> str | None:
    if host.address is not None:
        return explain_blocked_address(host.address)
    is_loopback = host.name == "localhost" or host.name.endswith(".localhost")
    return "a name of this machine" if is_loopback else None


def grant_names_address(pattern: str, address: Address, port: int) -> bool:
    """Return whether ``pattern`` names this very address, and opens ``port`` of it."""
    try:
        want = parse_host_pattern(pattern)
    except ValueError:
        return False
    return want.kind == "exact" and grant_covers_host(pattern, f"{bracket_ipv6_host(str(address))}:{port}")


def find_host_pattern_fault(pattern: str) -> str | None:
    """Return why ``pattern`` can cover no host, or None."""
    try:
        parse_host_pattern(pattern)
    except ValueError:
        return (
            f"{pattern!r} is not a host pattern; write 'api.example.org', '*.example.org', 'host:8443', '10.0.0.1', "
            f"or '*' for every public host"
        )
    return None


@lru_cache(maxsize=4096)
def parse_host_pattern(pattern: str) -> HostPattern:
    """Parse a host pattern of a rule or a declaration.

    :raises ValueError: if it can cover nothing
    """
    name, port = _split_port(pattern)
    if name == "*":
        return HostPattern("every", "", port)
    beneath = name.startswith("*.")
    canonical, address = _canonical_name(name[2:] if beneath else name)
    if beneath and address is not None:
        raise ValueError(f"Invalid host pattern: {_shown(pattern)}. A wildcard cannot match a part of an address.")
    return HostPattern("beneath" if beneath else "exact", f".{canonical}" if beneath else canonical, port)


def _split_port(text: str) -> tuple[str, int | Literal["any"] | None]:
    if not text or len(text) > 300 or not text.isascii() or not text.isprintable():
        raise ValueError(f"Invalid host: {_shown(text)}. Use ASCII without blanks.")
    head, colon, tail = text.rpartition(":")
    if not colon or (":" in head and not head.endswith("]")) or tail.endswith("]"):
        return text, None
    if tail == "*":
        return head, "any"
    if not _PORT.fullmatch(tail) or int(tail) > _LAST_PORT:
        raise ValueError(f"Invalid host: {_shown(text)}. Use a port number from 1 to 65535 after the colon.")
    return head, int(tail)


def _canonical_name(name: str) -> tuple[str, Address | None]:
    text = name.lower()
    if text.startswith("["):
        try:
            if not text.endswith("]") or "%" in text:
                raise AddressValueError
            address = IPv6Address(text[1:-1])
        except AddressValueError:
            raise ValueError(
                f"Invalid IPv6 address: {_shown(name)}. Write it in brackets, as in '[2001:db8::1]'."
            ) from None
        return str(address), address
    text = text.removesuffix(".")
    labels = text.split(".")
    if len(text) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"Invalid host: {_shown(name)}. Write a name such as 'api.example.org'.")
    if not _NUMBER.fullmatch(labels[-1]):
        return text, None
    try:
        return text, IPv4Address(text)
    except AddressValueError:
        raise ValueError(f"Ambiguous address: {_shown(name)}. Write an IPv4 address as '192.0.2.1'.") from None


def _shown(text: str) -> str:
    return quote_text_or_length(text, 200)
