"""Splitting of text into words, and words that count as equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.catalog.search.lexical_index import SearchableTool, make_embedding_text
from handrail.catalog.search.word_analysis import (
    MAX_REQUEST_PARTS,
    extract_identifier_like_words,
    extract_stemmed_terms,
    find_uninformative_terms,
    join_e_mail_words,
    remove_filler_words,
    split_request_into_needs,
    split_words,
    stem_word,
)


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("getHTTPStatus_v2", "get http status v 2"),
        ("AI2sql", "ai 2 sql"),
        ("email.send", "email send"),
        ("AusPetrolPrices", "aus petrol prices"),
        ("mcp__server-tool", "mcp server tool"),
        ("Zürich café", "zurich cafe"),
        ("ﬁle ＡＢＣ", "file abc"),
        ("天気予報", "天気 気予 予報"),
        ("", ""),
        ("😀!?", ""),
    ],
)
def test_an_identifier_is_split_into_its_words(identifier: str, expected: str) -> None:
    assert " ".join(split_words(identifier)) == expected


_WORD = st.text("abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=8)


@given(st.lists(_WORD, min_size=1, max_size=5))
def test_words_joined_in_any_way_are_split_the_same(several: list[str]) -> None:
    camel = several[0] + "".join(word.capitalize() for word in several[1:])
    for joined in ("_".join(several), ".".join(several), "-".join(several), " ".join(several), camel):
        assert split_words(joined) == several


@given(st.text())
def test_any_text_is_split_into_short_non_empty_words(text: str) -> None:
    assert all(0 < len(word) <= 40 for word in split_words(text))
    assert len(extract_stemmed_terms(text)) <= 3 * len(split_words(text))


@pytest.mark.parametrize(
    ("word", "expected"),
    [  # Snowball's own sample vocabulary
        ("consistency", "consist"),
        ("consolations", "consol"),
        ("knightly", "knight"),
        ("knocked", "knock"),
        ("hopping", "hop"),
        ("hoping", "hope"),
        ("generously", "generous"),
        ("dying", "die"),
        ("exceeds", "exceed"),
        ("skies", "sky"),
        ("news", "news"),
        ("relational", "relat"),
        ("é", "é"),
    ],
)
def test_inflections_of_a_word_have_one_stem(word: str, expected: str) -> None:
    assert stem_word(word) == expected


def test_filler_words_are_not_terms() -> None:
    assert extract_stemmed_terms("Can you please tell me what the weather is?") == ["weather"]


@pytest.mark.parametrize(
    ("written", "as_one"),
    [
        ("e-mail", "email"),
        ("E‑Mail", "email"),
        ("sendEMail", "email"),
        ("send_e_mail", "email"),
        ("e mail", "email"),
        ("web-site", "website"),
        ("to-do", "todo"),
        ("to do list", "todo"),
        ("check out", "checkout"),
        ("sub-agent", "subagent"),
        ("café-bar", "cafebar"),
    ],
)
def test_a_compound_is_also_indexed_as_one_word(written: str, as_one: str) -> None:
    assert stem_word(as_one) in extract_stemmed_terms(written)


def test_an_e_mail_is_one_word_in_the_embedding_text() -> None:
    assert (
        join_e_mail_words("Send an e-mail, E-Books; re-use e-2, the-mail")
        == "Send an email, E-Books; re-use e-2, the-mail"
    )
    assert make_embedding_text(SearchableTool("send", "An e‑mail.")) == "send: An email."


@pytest.mark.parametrize("apart", ["get-current-weather", "a-1", "what to do", "x - y", "2-3"])
def test_a_hyphenated_name_of_many_parts_or_digits_is_not_a_compound(apart: str) -> None:
    assert extract_stemmed_terms(apart) == extract_stemmed_terms(apart.replace("-", " "))


def test_a_request_with_several_needs_is_split_at_sentences_and_at_further_requests() -> None:
    assert split_request_into_needs(
        "Book a room in Rome, and then tell me tomorrow's weather. Also send Dr. Who the bill!"
    ) == [
        "Book a room in Rome",
        "then tell me tomorrow's weather",
        "Also send Dr. Who the bill!",
    ]


@pytest.mark.parametrize(
    "single",
    [
        "What is the price of bread and butter at 3.50 per unit",
        'Send the message "Feed the cat. Then lock the door; and call me." to Ann',
        "weather",
        "",
        "   ",
    ],
)
def test_a_request_with_one_need_is_not_split(single: str) -> None:
    assert split_request_into_needs(single) == [single.strip()]


def test_quotation_marks_around_a_complete_request_do_not_prevent_its_split() -> None:
    assert split_request_into_needs('"Book a room in Rome. Then tell me the weather."') == [
        "Book a room in Rome",
        "Then tell me the weather",
    ]
    assert len(split_request_into_needs('"Feed the cat. Then call me." is what I said to "Ann"')) == 1


def test_a_request_with_many_needs_is_split_into_a_bounded_number_of_parts() -> None:
    found = split_request_into_needs("\n".join(f"Find the capital of country {number}." for number in range(50)))
    assert len(found) == MAX_REQUEST_PARTS
    assert "country 49" in found[-1]


@given(st.text(max_size=300) | st.text(" .,;\n'\"abAB1", max_size=300))
def test_any_request_is_split_into_at_least_one_part(text: str) -> None:
    assert 1 <= len(split_request_into_needs(text)) <= MAX_REQUEST_PARTS


def test_only_words_spelled_like_identifiers_are_found_as_names_in_a_text() -> None:
    assert extract_identifier_like_words(
        "Use get_time, then `clock.getDate`; e.g. and/or I.T. are none, nor get, 24/7 or Paris."
    ) == [
        "get_time",
        "clock.getDate",
    ]


def test_filler_is_removed_from_a_request_unless_nothing_remains() -> None:
    assert remove_filler_words("Could you please tell me: is it going to rain in Oslo?") == "going rain oslo"
    assert remove_filler_words("will you have it for me") == "will you have it for me"
    assert remove_filler_words("明日の天気は?") == "明日の天気は?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(.*)+$[a-z]{1000}\\", "1000 z"),
        (r"\d{3}-\d{4}", "3 4 d"),
        ("is it True or NULL", "null true"),
        ("list s3 buckets, sha256 of 2 files", "2"),
        ("s3 with 3 parts", ""),
        ("３ files", "3"),
        ("水", ""),
        ("send an e-mail", "e"),
        ("", ""),
    ],
)
def test_isolated_values_and_single_characters_are_hollow_but_parts_of_names_are_not(text: str, expected: str) -> None:
    assert " ".join(sorted(find_uninformative_terms(text))) == expected
