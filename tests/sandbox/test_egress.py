"""The host check: the checked address is the dialled one, and no name reaches a private address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.contract.text.host_names import Address, HostAddress, parse_host_address
from handrail.contract.text.public_addresses import explain_blocked_address, list_embedded_ipv4
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.network.egress_check import EgressCheck, SystemResolver, is_address_of_this_machine
from handrail.testing.scripted_kernel import ScriptedResolver

pytestmark = pytest.mark.proves("S-02")

PUBLIC = "93.184.215.14"
OTHER_PUBLIC = "2606:2800:21f:cb07:6820:80da:af6b:8b2c"


def egress(
    *layers: Sequence[str],
    names: ScriptedResolver | None = None,
    gate: Callable[[str, int], str | None] | None = None,
    own: Sequence[str] = (),
) -> EgressCheck:
    owned = {ip_address(text) for text in own}
    capabilities = CapabilitySet(
        tuple(CapabilityLayer(f"layer {n}", hosts=tuple(hosts)) for n, hosts in enumerate(layers))
    )
    return EgressCheck(capabilities, gate, names or ScriptedResolver({}), owned.__contains__)


async def refused(judge: EgressCheck, host: str) -> str:
    with pytest.raises(ToolError) as raised:
        await judge.authorize_and_resolve_host(parse_host_address(host))
    return raised.value.text


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "127.1.2.3",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.1.1",
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:0:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::5db8:d70e",
        "2002:7f00:1::",
        "2002:5db8:d70e::1",
        "2001:0:7f00:1::",
        "2001:db8::1",
        "2606:2800::5efe:7f00:1",
        "2606:2800::200:5efe:a00:1",
        "fe80::1",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "ff02::1",
        "ff0e::1",
        "3fff::1",
        "5f00::1",
        "100::1",
        "4000::1",
    ],
)
def test_an_address_that_is_not_public_is_blocked_in_every_form(text: str) -> None:
    assert explain_blocked_address(ip_address(text)) is not None


@pytest.mark.parametrize("text", [PUBLIC, OTHER_PUBLIC, "1.1.1.1", "64:ff9b::5db8:d70e", "2a00:1450:4001:80b::200e"])
def test_a_public_address_is_not_blocked(text: str) -> None:
    assert explain_blocked_address(ip_address(text)) is None


@given(st.ip_addresses(v=4))
def test_every_ipv6_form_of_a_blocked_ipv4_address_is_blocked(address: IPv4Address) -> None:
    number = int(address)
    forms = {
        "mapped": 0xFFFF << 32 | number,
        "compatible": number,
        "translated": 0xFFFF << 48 | number,
        "nat64": 0x64FF9B << 96 | number,
        "6to4": 0x2002 << 112 | number << 80,
        "teredo server": 0x20010000 << 96 | number << 64,
        "teredo client": 0x20010000 << 96 | (~number & 0xFFFFFFFF),
        "isatap": 0x2606_2800 << 96 | 0x5EFE << 32 | number,
    }
    for name, bits in forms.items():
        form = IPv6Address(bits)
        assert address in list_embedded_ipv4(form), name
        if explain_blocked_address(address) is not None:
            assert explain_blocked_address(form) is not None, name


@given(st.ip_addresses(v=6))
def test_only_global_unicast_addresses_are_public(address: IPv6Address) -> None:
    if explain_blocked_address(address) is None:
        assert int(address) >> 125 == 1 or int(address) >> 32 == 0x64FF9B << 64
        assert all(explain_blocked_address(inner) is None for inner in list_embedded_ipv4(address))


async def test_a_granted_host_name_resolves_to_all_its_public_addresses() -> None:
    names = ScriptedResolver({"api.example.org": [PUBLIC, OTHER_PUBLIC]})
    way = await egress(["api.example.org"], ["*.example.org"], names=names).authorize_and_resolve_host(
        parse_host_address("api.example.org:443")
    )
    assert [str(address) for address in way.addresses] == [PUBLIC, OTHER_PUBLIC]
    assert names.queries == ["api.example.org"]


@pytest.mark.parametrize("host", ["evil.example:443", "api.example.org:22", "8.8.8.8:80", "example.org:443"])
async def test_a_host_missing_from_a_layer_is_refused_without_a_lookup(host: str) -> None:
    names = ScriptedResolver({"evil.example": [PUBLIC]})
    text = await refused(egress(["*"], ["api.example.org"], names=names), host)
    assert "layer 1" in text
    assert names.queries == []


async def test_an_empty_capability_set_reaches_no_host() -> None:
    assert "nothing" in await refused(egress(), "api.example.org:443")


async def test_rules_are_checked_for_the_host_and_its_port() -> None:
    asked: list[tuple[str, int]] = []

    def gate(host: str, port: int) -> str | None:
        asked.append((host, port))
        return "no rule speaks of it"

    assert "no rule" in await refused(egress(["*"], gate=gate), "[2606::1]:8443")
    assert asked == [("[2606::1]", 8443)]


@pytest.mark.parametrize("bad", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "64:ff9b::7f00:1", "fe80::1%lo"])
async def test_a_name_with_one_internal_address_is_refused(bad: str) -> None:
    names = ScriptedResolver({"api.example.org": [PUBLIC, bad]})
    text = await refused(egress(["*"], names=names), "api.example.org:443")
    assert "literal grant" in text
    assert "layer 0" in text


async def test_the_public_address_of_this_machine_is_blocked() -> None:
    names = ScriptedResolver({"api.example.org": [PUBLIC]})
    assert "this machine" in await refused(egress(["*"], names=names, own=[PUBLIC]), "api.example.org:443")


async def test_a_literal_grant_opens_one_address_and_port_when_every_layer_grants_it() -> None:
    both = egress(["127.0.0.1:8080"], ["127.0.0.1:8080", "*"])
    assert (await both.authorize_and_resolve_host(parse_host_address("127.0.0.1:8080"))).addresses == (
        ip_address("127.0.0.1"),
    )
    for other in ("127.0.0.1:8081", "127.0.0.2:8080", "[::ffff:127.0.0.1]:8080", "localhost:8080"):
        await refused(both, other)
    text = await refused(egress(["127.0.0.1:8080"], ["*"]), "127.0.0.1:8080")
    assert "layer 1" in text
    assert "127.0.0.1:8080" in text


async def test_a_granted_name_may_resolve_to_a_granted_private_address_that_rules_allow() -> None:
    names = ScriptedResolver({"intranet.example": ["10.0.0.5"]})
    hosts = ["intranet.example", "10.0.0.5"]
    way = await egress(hosts, names=names).authorize_and_resolve_host(parse_host_address("intranet.example:443"))
    assert str(way.addresses[0]) == "10.0.0.5"
    closed = egress(hosts, names=names, gate=lambda host, _port: "denied by a rule" if host == "10.0.0.5" else None)
    assert await refused(closed, "intranet.example:443") == "denied by a rule"


async def test_a_host_name_without_a_usable_address_gets_a_resolution_error() -> None:
    for names in (ScriptedResolver({}), ScriptedResolver({"api.example.org": [[]]})):
        assert "could not be resolved" in await refused(egress(["*"], names=names), "api.example.org:443")
    assert "not an IP address" in await refused(
        egress(["*"], names=ScriptedResolver({"a.example": ["what"]})), "a.example:443"
    )


async def test_the_checked_address_is_dialled_even_if_the_name_resolves_differently_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as meant, socket.create_server(("127.0.0.2", 0)) as inside:
        port = meant.getsockname()[1]
        names = ScriptedResolver({"rebinds.example": [["127.0.0.1"], ["127.0.0.2"]]})
        judge = egress([f"rebinds.example:{port}", f"127.0.0.1:{port}"], names=names)
        way = await judge.authorize_and_resolve_host(parse_host_address(f"rebinds.example:{port}"))
        with await judge.connect_to_checked_address(way) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
        assert names.queries == ["rebinds.example"]
        text = await refused(judge, f"rebinds.example:{port}")
        assert "127.0.0.2" in text
        inside.setblocking(False)
        with pytest.raises(BlockingIOError):
            inside.accept()


async def test_a_connection_tries_the_next_address_when_one_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names = ScriptedResolver({"two.example": ["127.0.0.9", "127.0.0.1"]})
        judge = egress([f"*:{port}", f"127.0.0.9:{port}", f"127.0.0.1:{port}"], names=names)
        with await judge.connect_to_checked_address(
            await judge.authorize_and_resolve_host(parse_host_address(f"two.example:{port}"))
        ) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ToolError, match="could not be reached") as raised:
        await judge.connect_to_checked_address(
            await judge.authorize_and_resolve_host(parse_host_address(f"two.example:{port}"))
        )
    assert raised.value.kind == "backend"


async def test_the_system_resolver_returns_addresses_or_raises_an_error() -> None:
    assert "127.0.0.1" in await SystemResolver().resolve("localhost")
    with pytest.raises(OSError, match=r"."):
        await SystemResolver().resolve("no-such-name.invalid")


async def test_an_unanswered_lookup_fails_at_its_timeout() -> None:
    with pytest.raises(OSError, match="within"):
        await SystemResolver(timeout_s=0).resolve("localhost")


def test_addresses_of_this_machine_are_recognised_without_a_list() -> None:
    assert is_address_of_this_machine(ip_address("127.0.0.1"))
    assert not is_address_of_this_machine(ip_address("192.0.2.1"))


@given(st.ip_addresses(), st.integers(1, 65535))
def test_a_wildcard_allows_exactly_the_addresses_that_are_not_blocked(address: Address, port: int) -> None:
    judge = egress(["*", "*:*", "*.example.org"])
    host = HostAddress(str(address), port, address)

    async def attempt() -> bool:
        try:
            await judge.authorize_and_resolve_host(host)
        except ToolError:
            return False
        return True

    assert asyncio.run(attempt()) is (explain_blocked_address(address) is None)
