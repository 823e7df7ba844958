"""URIs that match a server's templates, in bounded time."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.services.resource_services import SourceRequestSpec
from handrail.contract.tool.resource_provider import find_resource_provider
from handrail.registry.sources.operator_resources import compile_uri_template, parse_uri_template_shape
from handrail.upstream.mcp_source import McpResourceProvider
from handrail.upstream.server_definition import ServerDefinition, ServerListing

READ = SourceRequestSpec("resources/read", "uri")
MEANS = {
    "": "[^/?#]*",
    "+": ".*",
    "#": "(#.*)?",
    ".": r"(\.[^/?#]*)?",
    "/": "(/[^?#]*)?",
    ";": "(;[^/?#]*)?",
    "?": r"(\?[^#]*)?",
    "&": "(&[^#]*)?",
}


def offering(name: str, *, resources: tuple[str, ...] = (), templates: tuple[str, ...] = ()) -> McpResourceProvider:
    listing = ServerListing(
        resources=tuple[Any, ...]({"uri": uri, "name": uri} for uri in resources),
        templates=tuple[Any, ...]({"uriTemplate": template, "name": template} for template in templates),
    )
    return McpResourceProvider(listing, ServerDefinition(name, "here", "stdio", command="/x"), None)


def test_a_hostile_uri_template_of_a_server_is_matched_in_bounded_time() -> None:
    server = offering("s", templates=("x:" + "{+a}" * 8 + "!", "x:" + "{a}" * 8 + "!", "x:{+a}a{+b}a{+c}a{+d}a{+e}b"))
    assert not server.has_resource("x:" + "a" * 4_000)
    assert server.has_resource("x:" + "a" * 4_000 + "!")


@given(
    st.lists(st.tuples(st.text("a/", max_size=2), st.sampled_from(sorted(MEANS))), max_size=3),
    st.text("a/?#.;&", max_size=2),
    st.text("a/?#.;&", max_size=8),
)
def test_a_uri_template_produces_exactly_the_uris_of_its_expressions(
    parts: list[tuple[str, str]], last: str, uri: str
) -> None:
    template = "".join(f"{text}{{{kind}v}}" for text, kind in parts) + last
    means = "".join(re.escape(text) + MEANS[kind] for text, kind in parts) + re.escape(last)
    shape = parse_uri_template_shape(template)
    assert shape is not None and shape.can_produce_uri(uri) == (re.fullmatch(means, uri, re.DOTALL) is not None)


def test_a_hostile_uri_template_of_the_operator_is_matched_in_bounded_time() -> None:
    parts = "".join(f"{{+{name}}}/" for name in "abcdefg")
    assert compile_uri_template(f"x:{parts}!").match_uri("x:" + "/" * 4_000) is None
    found = compile_uri_template(f"x:{parts}{{h}}").match_uri("x:" + "/" * 4_000 + "end")
    assert found is not None and found["h"] == "end" and "".join(found.values()).count("/") == 4_000 - 7
    assert compile_uri_template("x:{+a}").match_uri("x:" + "a" * 4_095) is None, "longer than any URI"


@given(
    st.lists(st.tuples(st.text("a/", max_size=2), st.sampled_from(["", "+"])), min_size=1, max_size=3),
    st.text("a/?# ", max_size=2),
    st.text("a/?#. \n", max_size=9),
)
def test_a_uri_template_extracts_the_values_of_its_variables(parts: list[tuple[str, str]], last: str, uri: str) -> None:
    template = "".join(f"{text}{{{kind}v{at}}}" for at, (text, kind) in enumerate(parts)) + last
    means = re.escape(last)
    for at, (text, kind) in reversed(tuple(enumerate(parts))):
        value = ".+" if kind else r"[^/?#\s]+"
        means = f"{re.escape(text)}(?P<v{at}>{value}){means}"
    expected = re.fullmatch(means, uri)
    assert compile_uri_template(template).match_uri(uri) == (None if expected is None else expected.groupdict())


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("x:none", "at least one"),
        ("x:{?a}", "variables as {name}"),
        ("x:{a}{a}", "twice"),
        ("x:" + "".join(f"{{a{number}}}" for number in range(9)), "at most 8"),
    ],
)
def test_an_ambiguous_or_invalid_uri_template_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        compile_uri_template(template)


@pytest.mark.parametrize("first", ["greedy", "exact"])
def test_a_catch_all_template_takes_no_resource_that_another_server_lists(first: str) -> None:
    greedy, exact = offering("greedy", templates=("{+any}",)), offering("exact", resources=("memo://one",))
    ordered = [greedy, exact] if first == "greedy" else [exact, greedy]
    assert find_resource_provider(ordered, READ, "memo://one") == (exact, "memo://one")
    assert find_resource_provider(ordered, READ, "mcp+greedy:memo://one") == (greedy, "memo://one")
    assert find_resource_provider(ordered, READ, "memo://two") == (greedy, "memo://two")
