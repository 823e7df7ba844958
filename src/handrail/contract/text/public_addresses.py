"""Which addresses are public. A declaration has to name any other address itself."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_METADATA = frozenset(
    ip_address(text)
    for text in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")
)
_V4_REFUSED = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "100.64.0.0/10")))
_V6_UNICAST = IPv6Network("2000::/3")
_V6_REFUSED = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")
_V4_IN_LAST_BITS = tuple(
    map(IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"))
)
_6TO4, _TEREDO = IPv6Network("2002::/16"), IPv6Network("2001::/32")
_ISATAP = (0x00005EFE, 0x02005EFE)


@lru_cache(maxsize=1024)
def explain_blocked_address(address: IPv4Address | IPv6Address) -> str | None:
    """Return why ``address`` needs a literal grant; None for a public address."""
    if address in _METADATA:
        return "the address of a cloud's metadata service"
    if isinstance(address, IPv4Address):
        return _explain_blocked_range(address, any(address in network for network in _V4_REFUSED))
    for inner in list_embedded_ipv4(address):
        if (fault := explain_blocked_address(inner)) is not None:
            return f"another form of {inner}, {fault}"
    if address in _NAT64:
        return None
    return _explain_blocked_range(
        address, address not in _V6_UNICAST or any(address in network for network in _V6_REFUSED)
    )


def _explain_blocked_range(address: IPv4Address | IPv6Address, refused: bool) -> str | None:
    """Return why an address is not public; None if it is.

    :param refused: whether it lies in a denied range, or outside the permitted ones
    """
    if address.is_multicast:
        return "a multicast address"
    if not address.is_global or refused:
        return "a private, local or reserved address"
    return None


def list_embedded_ipv4(address: IPv6Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that ``address`` may be another form of."""
    bits = int(address)
    found: list[int] = []
    if any(address in network for network in _V4_IN_LAST_BITS):
        found.append(bits & 0xFFFFFFFF)
    if address in _6TO4:
        found.append(bits >> 80 & 0xFFFFFFFF)
    if address in _TEREDO:
        found += [bits >> 64 & 0xFFFFFFFF, ~bits & 0xFFFFFFFF]
    if bits >> 32 & 0xFFFFFFFF in _ISATAP:
        found.append(bits & 0xFFFFFFFF)
    return [IPv4Address(number) for number in found]
