"""Large outputs are encoded in pieces: the JSON is the same, and the event loop stays free."""

from __future__ import annotations

import asyncio
import string
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.arbiter.shaping import ShaperFixture

from handrail.arbiter.output import json_conversion
from handrail.arbiter.output import secret_encodings as secret_forms
from handrail.testing.scripted_kernel import temporary_kernel

DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=8),
    max_leaves=40,
)
SECRET = "s3cr3t-Value-0123456789abcdef"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_conversion, "PIECE_CHARACTERS", 16)
    monkeypatch.setattr(secret_forms, "_SLICE", 16)


@pytest.mark.usefixtures("small_pieces")
class TestPieces:
    @given(DATA)
    def test_encoded_json_equals_the_output_of_orjson(self, value: Any) -> None:
        assert json_conversion.encode_json(value) == orjson.dumps(value)
        assert orjson.loads(json_conversion.encode_indented_json(value)) == orjson.loads(orjson.dumps(value))

    @given(DATA)
    def test_a_json_copy_is_equal_and_shares_no_container(self, value: Any) -> None:
        copy = json_conversion.copy_through_json(value)
        assert copy == value
        if isinstance(value, (list, dict)):
            assert copy is not value

    @given(st.text(string.ascii_letters, max_size=30), st.integers(0, 40), st.text("&#;6x5 a", max_size=30))
    def test_a_secret_written_as_numeric_references_is_found_at_any_position_in_a_text(
        self, before: str, zeros: int, after: str
    ) -> None:
        forms = secret_forms.SecretEncodingMatcher({"KEY": [SECRET]})
        numbered = "".join(f"&#{'0' * zeros}{ord(character)};" for character in SECRET)
        text = before + numbered + after
        assert forms.may_contain_secret(text)
        found = forms.find_secret_occurrences(text)[0]
        assert text[found.start : found.end] == numbered


NOT_PLAIN: list[Any] = [object(), (b"a",), {1: 2}, b"a"]
MUCH: list[Any] = ["a" * 101, ["a" * 60, "b" * 60], {"a": {"b": ["c" * 101]}}, [[]] * 101, [[0] * 60, [0] * 60]]


@pytest.mark.parametrize("value", NOT_PLAIN)
def test_a_value_that_json_would_change_is_not_copied(value: Any) -> None:
    with pytest.raises(json_conversion.NotPlainJson):
        json_conversion.copy_through_json(value)


@pytest.mark.parametrize("value", MUCH)
def test_the_size_estimate_counts_nested_values(value: Any) -> None:
    assert not json_conversion.is_estimated_within_size([value], 100)
    assert json_conversion.is_estimated_within_size([value], 1_000)


def test_a_value_that_contains_itself_is_not_estimated_as_small() -> None:
    value: list[Any] = []
    value.append(value)
    assert not json_conversion.is_estimated_within_size(value, 10_000)


@pytest.mark.parametrize("piece", ["a\u200b", "\x1b[31m", "\u202e "])
async def test_the_event_loop_runs_other_work_while_an_output_is_shaped(tmp_path: Path, piece: str) -> None:
    """Each of these, on the loop, would be done before anything else has its turn."""
    room = ShaperFixture(tmp_path, KEY=SECRET)
    working = asyncio.ensure_future(room.shape({"a": [{"b": piece * 10_000}]}, max_output=1 << 20))
    turns = 0
    while not working.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 2
    assert working.result().result.ok


async def test_arguments_with_too_many_numeric_character_references_are_refused(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, secrets={"KEY": SECRET}) as kernel:
        session = await kernel.session()
        small = await session.call("write", {"path": "a.html", "content": "&#65;" * 10_000})
        assert "numeric HTML references" not in str(small.error_text)
        large = await session.call("write", {"path": "a.html", "content": "&#65;" * 30_000})
        assert large.metadata["error_kind"] == "invalid_input"
        assert "30,000 numeric HTML references (&#…;). The limit is 20,000" in str(large.error_text)
