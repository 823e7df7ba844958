"""Hosts: one strict form, so that the checked host is the one that is reached."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.text.host_names import (
    find_host_pattern_fault,
    grant_covers_host,
    grant_names_address,
    parse_host_address,
    parse_http_url,
    rule_matches_host,
)

LABELS = st.text("abcxyz019-_", min_size=1, max_size=12).filter(lambda label: label[0] != "-" and label[-1] != "-")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
NAMES = (
    st.lists(LABELS, min_size=1, max_size=5)
    .map(".".join)
    .filter(lambda name: not NUMBER.fullmatch(name.rsplit(".", 1)[-1]))
)
PORTS = st.integers(1, 65535)

NO_HOSTS = [
    "",
    ".",
    "..",
    "a..b",
    ".example.org",
    "-a.example.org",
    "exa mple.org",
    "a\0b",
    "api.example.org\0.evil.example",
    "a\r\nb",
    "a\tb",
    "user@example.org",
    "example.org/path",
    "example.org#x",
    "example.org?x",
    "example.org\\x",
    "%31.example.org",
    "①②⑦.0.0.1",
    "１２７.0.0.1",
    "127。0。0。1",
    "ex\u200bample.org",
    "0x7f.1",
    "0x7f000001",
    "0x",
    "2130706433",
    "0177.0.0.1",
    "127.1",
    "127.0.0.01",
    "1.2.3.4.5",
    "256.1.1.1",
    "a.0x1",
    "[::1",
    "::1",
    "[::1%25lo]",
    "[127.0.0.1]",
    "[]",
    "host:0",
    "host:65536",
    "host:",
    "host:+1",
    "host:1_0",
    "host:80:80",
    "x" * 64,
    "x." * 140,
]


@pytest.mark.proves("S-02")
@pytest.mark.parametrize("text", NO_HOSTS)
def test_an_ambiguous_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_host_address(text)
    assert not rule_matches_host("*", text)
    assert not grant_covers_host("*", text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("API.Example.ORG.", "api.example.org"),
        ("example.org:8443", "example.org:8443"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("[0:0:0:0:0:0:0:1]:80", "[::1]:80"),
        ("[FE80::1]", "[fe80::1]"),
        ("_dmarc.x_y.example", "_dmarc.x_y.example"),
        ("3com.com", "3com.com"),
    ],
)
def test_a_host_has_one_canonical_form(text: str, canonical: str) -> None:
    assert str(parse_host_address(text)) == canonical


@given(NAMES, PORTS)
def test_a_canonical_host_is_parsed_to_itself(name: str, port: int) -> None:
    host = parse_host_address(f"{name.upper()}.:{port}")
    assert str(host) == f"{name}:{port}"
    assert parse_host_address(str(host)) == host


@given(st.text(max_size=40))
def test_the_host_parser_returns_plain_names_and_raises_only_value_errors(text: str) -> None:
    try:
        host = parse_host_address(text)
    except ValueError:
        return
    assert host.name.isascii()
    assert host.name == host.name.lower()
    assert not set(host.name) & set("@/\\?#%[] \t\r\n\0")


@given(st.ip_addresses())
def test_every_ip_address_is_parsed_to_the_same_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    shown = f"[{address}]" if address.version == 6 else str(address)
    assert parse_host_address(shown).address == address
    assert parse_http_url(f"https://{shown}/").host.address == address


@pytest.mark.proves("K-09")
@pytest.mark.parametrize(
    ("pattern", "host", "matches"),
    [
        ("api.example.org", "api.example.org", True),
        ("api.example.org", "API.Example.ORG.", True),
        ("API.example.org.", "api.example.org", True),
        ("api.example.org", "api.example.org:443", True),
        ("api.example.org", "xapi.example.org", False),
        ("*.example.org", "a.example.org", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evil-example.org", False),
        ("*.example.org", ".example.org", False),
        ("host:8443", "host:8443", True),
        ("host:8443", "host", False),
        ("host:8443", "host:443", False),
        ("host:*", "host:1", True),
        ("*", "anything.example", True),
        ("*", "10.0.0.1", True),
        ("[::1]:80", "[::1]:80", True),
        ("[0::1]:80", "[::1]:80", True),
    ],
)
def test_a_host_pattern_matches_complete_labels_of_plain_hosts(pattern: str, host: str, matches: bool) -> None:
    assert rule_matches_host(pattern, host) is matches


@pytest.mark.proves("S-02")
@pytest.mark.parametrize(
    ("pattern", "host", "covered"),
    [
        ("api.example.org", "api.example.org:443", True),
        ("api.example.org", "api.example.org:80", True),
        ("api.example.org", "api.example.org", True),
        ("api.example.org", "api.example.org:22", False),
        ("api.example.org:22", "api.example.org:22", True),
        ("api.example.org:*", "api.example.org:25", True),
        ("*.example.org", "api.example.org:25", False),
        ("*", "api.example.org:25", True),
        ("*:443", "api.example.org:25", False),
        ("127.0.0.1:8080", "127.0.0.1:8080", True),
        ("127.0.0.1:8080", "127.0.0.1:8081", False),
        ("127.0.0.1:8080", "127.0.0.2:8080", False),
    ],
)
def test_a_host_grant_without_a_port_covers_ports_80_and_443(pattern: str, host: str, covered: bool) -> None:
    assert grant_covers_host(pattern, host) is covered


def test_only_a_pattern_that_is_the_exact_address_grants_an_ip_address() -> None:
    address = ipaddress.ip_address("10.0.0.5")
    assert grant_names_address("10.0.0.5:8080", address, 8080)
    assert grant_names_address("10.0.0.5", address, 443)
    for pattern in ("*", "*:*", "10.0.0.5", "10.0.0.50:8080", "ten.example:8080", "0x0a.0.0.5:8080"):
        assert not grant_names_address(pattern, address, 8080)
    assert grant_names_address("[fd00::1]:1", ipaddress.ip_address("fd00::1"), 1)


@pytest.mark.parametrize(
    "pattern",
    ["https://example.org", "a b", "ex*mple.org", "", "a/b", "①.org", "127.1", "*.0.0.1", "*.2.3.4.5", "host:99999"],
)
def test_a_host_pattern_that_can_never_match_is_a_fault(pattern: str) -> None:
    assert find_host_pattern_fault(pattern) is not None


@pytest.mark.parametrize("pattern", ["*", "*:*", "*.example.org", "example.org", "host:8443", "[::1]:80", "10.0.0.1"])
def test_a_host_pattern_that_can_match_has_no_fault(pattern: str) -> None:
    assert find_host_pattern_fault(pattern) is None


@pytest.mark.parametrize(
    ("url", "scheme", "host", "target", "authority"),
    [
        ("https://example.org", "https", "example.org:443", "/", "example.org"),
        ("HTTP://Example.org./a?b=c#d", "http", "example.org:80", "/a?b=c", "example.org"),
        ("https://example.org:8443?x", "https", "example.org:8443", "/?x", "example.org:8443"),
        ("https://example.org:/x", "https", "example.org:443", "/x", "example.org"),
        ("http://[::1]:443/", "http", "[::1]:443", "/", "[::1]:443"),
        ("http://[::1]/", "http", "[::1]:80", "/", "[::1]"),
        ("https://a.example#@b.example/", "https", "a.example:443", "/", "a.example"),
    ],
)
def test_a_url_is_parsed_in_one_way(url: str, scheme: str, host: str, target: str, authority: str) -> None:
    read = parse_http_url(url)
    assert (read.scheme, str(read.host), read.target, read.host_header_value) == (scheme, host, target, authority)


@pytest.mark.proves("S-02")
@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "//example.org/",
        "file:///etc/passwd",
        "ftp://example.org/",
        "https:/example.org",
        "https:///x",
        "https://user@example.org/",
        "https://example.org@evil.example/",
        "https://evil.example\\@example.org/",
        "https://exa\tmple.org/",
        "https://example.org/a b",
        "https://example.org/\r\nHost: evil.example",
        "https://①②⑦.0.0.1/",
        "https://2130706433/",
        "https://example.org:99999/",
        "javascript://example.org/",
        "https://example.org/ü",
    ],
)
def test_a_url_that_could_lead_to_another_host_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_http_url(url)


@given(st.text(max_size=60))
def test_the_url_parser_raises_only_value_errors(text: str) -> None:
    for candidate in (text, f"https://{text}", f"http://example.org{text}"):
        try:
            read = parse_http_url(candidate)
        except ValueError:
            continue
        assert read.target.startswith("/")
        assert read.host.port is not None


@given(st.text("ab0x9-_.:81", max_size=14) | NAMES)
def test_host_parsing_ignores_case(text: str) -> None:
    def reading(written: str) -> object:
        try:
            return parse_host_address(written)
        except ValueError:
            return None

    assert reading(text) == reading(text.upper())
