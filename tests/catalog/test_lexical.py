"""BM25 against an example calculated by hand, in any order of insertion."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.catalog.texts_of import MAIL, tool

from handrail.catalog.search import lexical_index as module
from handrail.catalog.search.lexical_index import (
    K1,
    B,
    LexicalIndex,
    SearchableTool,
    TermVector,
    extract_searchable_fields,
    has_all_tool_name_words,
    make_term_vector,
)


def of(weights: Mapping[str, float]) -> TermVector:
    return TermVector(weights, sum(weights.values()))


THREE = [of({"cat": 2.0, "dog": 1.0}), of({"cat": 1.0}), of({"bird": 4.0, "fish": 2.0})]


def test_bm25_scores_equal_those_of_an_example_calculated_by_hand() -> None:
    index = LexicalIndex.build_from_vectors(THREE)
    found = index.score_documents(["cat", "dog", "cow"], 10)
    average = (3 + 1 + 6) / 3
    idf_cat = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    idf_dog = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    norm = K1 * (1 - B + B * 3 / average)
    first = idf_cat * 2 * (K1 + 1) / (2 + norm) + idf_dog * 1 * (K1 + 1) / (1 + norm)
    second = idf_cat * 1 * (K1 + 1) / (1 + K1 * (1 - B + B * 1 / average))
    assert found.score(0) == pytest.approx(first)
    assert found.score(1) == pytest.approx(second)
    assert found.score(2) == 0
    assert list(found.best) == [0, 1]
    assert found.mean == pytest.approx((first + second) / 3)
    assert found.deviation == pytest.approx(math.sqrt((first**2 + second**2) / 3 - ((first + second) / 3) ** 2))


def test_scores_are_the_same_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    index = LexicalIndex.build_from_vectors([of({f"t{n % 7}": 1.0 + n % 3, f"u{n % 5}": 2.0}) for n in range(200)])
    several: list[tuple[str, ...]] = [(), ("u3",), ("t1", "t2", "u3")]
    plains = [index.score_documents(["t1", "t2", "u3", "none"], 20, hollow) for hollow in several]
    monkeypatch.setattr(module, "_BY_NUMPY", 0)
    for hollow, plain in zip(several, plains, strict=True):
        quick = index.score_documents(["t1", "t2", "u3", "none"], 20, hollow)
        assert list(quick.best) == list(plain.best)
        assert [quick.score(n) for n in range(200)] == pytest.approx([plain.score(n) for n in range(200)], rel=1e-6)
        assert (quick.mean, quick.deviation) == pytest.approx((plain.mean, plain.deviation), rel=1e-6)


def test_hollow_terms_count_with_other_terms_but_hardly_alone() -> None:
    index = LexicalIndex.build_from_vectors(
        [of({"cat": 1.0}), of({"cat": 1.0, "3": 1.0}), of({"3": 1.0}), of({"bird": 1.0})]
    )
    whole, found = index.score_documents(["cat", "3"], 4), index.score_documents(["cat", "3"], 4, {"3"})
    assert list(found.best) == [1, 0, 2]
    assert [found.score(n) for n in (0, 1)] == [whole.score(n) for n in (0, 1)]
    assert 0 < found.score(2) < whole.score(2) / 50
    alone = index.score_documents(["3"], 4, {"3"})
    assert alone.best and max(alone.compute_z_score(n) for n in range(4)) <= 0 < index.score_documents(
        ["3"], 4
    ).compute_z_score(2)


def test_numpy_that_another_thread_is_still_importing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModuleType("numpy")
    half.__spec__ = ModuleSpec("numpy", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined] # as the import system says it
    monkeypatch.setitem(sys.modules, "numpy", half)
    monkeypatch.setattr("handrail.catalog.search.lexical_index._BY_NUMPY", 0)
    index = LexicalIndex.build_from_vectors(THREE)
    assert list(index.score_documents(["bird"], 5).best) == [2]


def test_names_weigh_more_than_descriptions_and_parameters_are_indexed() -> None:
    terms = make_term_vector(extract_searchable_fields(MAIL)).weights
    assert terms["email"] > terms["sent" if "sent" in terms else "recipi"]
    assert terms["subject"] == 1.0 + 0.5


def test_nested_parameters_and_their_enum_values_are_indexed() -> None:
    inner = {"type": "object", "properties": {"colour": {"enum": ["crimson", "teal"]}}}
    found = make_term_vector(
        extract_searchable_fields(
            SearchableTool("paint", parameters={"properties": {"what": {"type": "array", "items": inner}}})
        )
    ).weights
    assert {"colour", "crimson", "teal"} <= set(found)


_BAG = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from([0.5, 1.0, 3.0]), max_size=4).map(of)


@given(st.lists(_BAG, max_size=8), st.lists(_BAG, max_size=4), st.data())
def test_an_updated_word_index_equals_a_newly_built_one(
    before: list[TermVector], new: list[TermVector], data: st.DataObject
) -> None:
    stays = data.draw(st.lists(st.sampled_from(range(len(before))), unique=True) if before else st.just([]))
    order = data.draw(st.permutations([("old", n) for n in stays] + [("new", n) for n in range(len(new))]))
    kept = {n: at for at, (kind, n) in enumerate(order) if kind == "old"}
    added = {at: new[n] for at, (kind, n) in enumerate(order) if kind == "new"}
    changed = LexicalIndex.build_from_vectors(before).updated_copy(kept, added)
    anew = LexicalIndex.build_from_vectors([before[n] if kind == "old" else new[n] for kind, n in order])
    assert changed.average == anew.average
    for wanted in (["a"], ["a", "b", "c"], list("abcdefgh")):
        one, other = changed.score_documents(wanted, 10), anew.score_documents(wanted, 10)
        assert list(one.best) == list(other.best)
        assert [one.score(n) for n in range(len(order))] == [other.score(n) for n in range(len(order))]


def test_an_empty_index_finds_nothing() -> None:
    found = LexicalIndex.build_from_vectors([]).score_documents(["cat"], 5)
    assert (list(found.best), found.mean, found.deviation) == ([], 0.0, 0.0)


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"properties": 5}, {"properties": {"a": None, "b": {"description": 5, "enum": "no"}}}, {"items": [1]}],
)
def test_a_malformed_parameter_schema_is_indexed_as_far_as_possible(parameters: dict[str, object] | None) -> None:
    assert (
        "thing" in make_term_vector(extract_searchable_fields(SearchableTool("thing", parameters=parameters))).weights
    )


def test_a_schema_that_contains_itself_is_read_to_a_limited_depth() -> None:
    schema: dict[str, object] = {"type": "object"}
    schema["properties"] = {"again": schema}
    assert extract_searchable_fields(SearchableTool("loop", parameters=schema)).parameter_names == "again again again"


def test_further_repetitions_of_a_term_add_only_to_the_length() -> None:
    few, many = (
        make_term_vector(extract_searchable_fields(tool("x", "rain " * 3))),
        make_term_vector(extract_searchable_fields(tool("x", "rain " * 100))),
    )
    assert few.weights["rain"] == many.weights["rain"] == 3
    assert many.length > few.length + 90


COMPOUNDS = LexicalIndex.build_from_vectors(
    [
        make_term_vector(extract_searchable_fields(tool(name, description)))
        for name, description in (
            ("send", "Sends an e-mail."),
            ("note", "Writes into the to-do list."),
            ("look", "Looks at a web page of a hotel."),
            ("pay", "Goes to the checkout."),
            ("ride", "Rents a car."),
            ("feed", "Feeds a pet."),
        )
    ]
)


@pytest.mark.parametrize(
    ("request_", "number"),
    [
        ("email", 0),
        ("e-mail", 0),
        ("e mail", 0),
        ("my todos", 1),
        ("to-do", 1),
        ("a webpage", 2),
        ("web-page", 2),
        ("check out", 3),
    ],
)
def test_a_compound_word_is_found_in_any_spelling(request_: str, number: int) -> None:
    assert list(COMPOUNDS.score_documents(COMPOUNDS.extract_request_terms(request_), 5).best) == [number]


def test_a_very_long_request_is_read_up_to_the_term_limit() -> None:
    assert (
        len(COMPOUNDS.extract_request_terms(" ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(600))))
        == 64
    )


def test_words_that_no_tool_joins_are_not_a_compound() -> None:
    assert COMPOUNDS.extract_request_terms("a carpet") == ["carpet"]
    assert COMPOUNDS.extract_request_terms("well-known") == ["well", "known"]


def test_only_the_beginning_of_a_very_long_description_is_indexed() -> None:
    huge = tool("huge", "word " * 100_000)
    assert len(extract_searchable_fields(huge).description) <= 2_000


@pytest.mark.parametrize(
    ("request_", "name", "category"),
    [
        ("send an e-mail with the report to my boss", "sendEmail", ""),
        ("please SEND two emails", "send_e_mail", ""),
        ("an email is to be sent: send it", "email.send", ""),
        ("create an issue about the crash", "github.create_issue", ""),
        ("create an issue about the crash", "mcp__github__create_issue", ""),
        ("create an issue about the crash", "github_create_issue", "github"),
        ("create an issue about the crash", "hub.github_create_issue", "github"),
        ("capture the web page", "captureWebpage", ""),
        ("capture the webpage", "capture_web_page", ""),
        ("list who is online", "list_on_line", ""),
        ("who is the owner of my account?", "get_account_owner", ""),
    ],
)
def test_a_request_contains_a_tool_name_in_any_order_and_spelling(request_: str, name: str, category: str) -> None:
    understood = LexicalIndex.build_from_vectors(
        [make_term_vector(extract_searchable_fields(SearchableTool(name)))]
    ).extract_request_terms(request_)
    assert has_all_tool_name_words(understood, name, category)


@pytest.mark.parametrize(
    ("request_", "name", "category"),
    [
        ("send an e-mail to my boss", "sendEngagementEmail", ""),
        ("send it to my boss", "email.send", "email"),  # one word tells too little
        ("email me", "e_mail", ""),
        ("search, and search again", "search_search", ""),
        ("create an issue", "github_create_issue", "git"),  # no server that anybody knows of
        ("get it", "get_it", ""),
        ("", "", ""),
        ("a b", "a_b" * 100_000, "a" * 100_000),
    ],
)
def test_an_incomplete_or_one_word_name_does_not_count_as_a_tool_name(request_: str, name: str, category: str) -> None:
    understood = LexicalIndex.build_from_vectors(
        [make_term_vector(extract_searchable_fields(SearchableTool(name)))]
    ).extract_request_terms(request_)
    assert not has_all_tool_name_words(understood, name, category)
