"""The tokenizer returns the IDs of the reference implementation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.catalog.embedders.minilm import WordPieceTokenizer

PIECES = WordPieceTokenizer.load_bert_uncased()

REFERENCE = {
    "Get the weather, please!": [101, 2131, 1996, 4633, 1010, 3531, 999, 102],
    "naïve café Zürich": [101, 15743, 7668, 10204, 102],
    "東京の天気は？": [101, 1879, 1755, 1671, 1811, 100, 1672, 1994, 102],
    "getHTTPStatus_v2": [101, 2131, 11039, 25856, 9153, 5809, 1035, 1058, 2475, 102],
    "😀 ok": [101, 100, 7929, 102],
    "unaffable": [101, 14477, 20961, 3468, 102],
    "a\tb\nc\x00d\x1ce": [101, 1037, 1038, 3729, 2063, 102],
    "ﬁancé İstanbul": [101, 1984, 6651, 9960, 102],
    "$5.00 — “quoted”": [101, 1002, 1019, 1012, 4002, 1517, 1523, 9339, 1524, 102],
    "": [101, 102],
    "x" * 101: [101, 100, 102],
    "한국어 뉴스": [101, 1469, 30006, 30021, 29991, 30014, 30020, 29999, 30008, 1456, 30016, 29997, 30017, 102],
}


@pytest.mark.parametrize("text", REFERENCE, ids=range(len(REFERENCE)))
def test_the_tokenizer_encodes_a_text_to_the_ids_of_the_reference_implementation(text: str) -> None:
    assert PIECES.encode_piece_ids(text, 512) == REFERENCE[text]


def test_the_tokenizer_has_the_vocabulary_of_bert_base_uncased() -> None:
    assert len(PIECES) == 30522
    assert (PIECES.pad, PIECES.unknown, PIECES.start, PIECES.end) == (0, 100, 101, 102)


def test_a_long_text_is_cut_and_still_ends_with_the_end_token() -> None:
    ids = PIECES.encode_piece_ids("weather " * 1_000, 256)
    assert len(ids) == 256
    assert ids[-1] == PIECES.end


@given(st.text(), st.integers(2, 40))
def test_any_text_is_encoded_to_known_ids_between_start_and_end_tokens(text: str, longest: int) -> None:
    ids = PIECES.encode_piece_ids(text, longest)
    assert ids[0] == PIECES.start
    assert ids[-1] == PIECES.end
    assert len(ids) <= longest
    assert all(0 <= each < len(PIECES) for each in ids)


def test_a_vocabulary_without_the_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid vocabulary: .*CLS"):
        WordPieceTokenizer(["[PAD]", "[UNK]", "hello"])
