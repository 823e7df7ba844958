"""No part of an output contains a registered secret, wherever it is truncated."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.arbiter.shaping import SECRET, ShaperFixture

from handrail.arbiter.output import shaper
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract import calls_and_results
from handrail.contract.calls_and_results import Blob, LargeText, Result


@pytest.mark.proves("O-07")
@pytest.mark.parametrize("limit", [15, 40, 200, 10_000])
@pytest.mark.parametrize(
    "value",
    [
        f"before {SECRET} after {SECRET}",
        {"output": f"x{SECRET}y" * 20, "code": 1},
        {SECRET: [SECRET, {"k": SECRET}], "n": None},
        [f"{SECRET}:{n}" for n in range(50)],
        {"json": orjson.dumps({"inner": SECRET}).decode()},
        {"blob": Blob(f"key={SECRET}".encode(), "text/plain")},
        f"key={SECRET}".encode(),
        Result.error("failed", f"bad {SECRET}", {"partial": SECRET}, note=SECRET, more={SECRET: SECRET}),
        {"notes": {SECRET: float("nan")}},
        [{"path": "a", "line": 1, "text": SECRET}] * 30,
        [SECRET[:7], SECRET[7:]],
    ],
)
async def test_no_part_of_an_output_contains_a_secret(tmp_path: Path, value: object, limit: int) -> None:
    room = ShaperFixture(tmp_path, key=SECRET)
    shaped = await room.shape(value, max_output=limit, max_entries=10)
    room.shaper.close()
    written = room.everything_written(shaped)
    assert SECRET.encode() not in written and orjson.dumps(SECRET)[1:-1] not in written
    if limit == 10_000 and isinstance(value, str):
        assert shaped.result.data == "before [secret:key] after [secret:key]"


@pytest.mark.proves("O-07")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.text('abc"\\\n', max_size=8) | st.just("SECRET"), max_size=30),
    limit=st.integers(4, 80),
    as_list=st.booleans(),
)
async def test_a_secret_is_redacted_wherever_the_output_is_truncated(
    new_room: Callable[..., ShaperFixture], pieces: list[str], limit: int, as_list: bool
) -> None:
    secret = 'abca"bc\\ab'
    room = new_room(key=secret)
    texts = [piece.replace("SECRET", secret) for piece in pieces]
    shaped = await room.shape(texts if as_list else "".join(texts), max_output=limit, max_entries=4)
    room.shaper.close()
    written = room.everything_written(shaped)
    assert secret.encode() not in written and orjson.dumps(secret)[1:-1] not in written


@pytest.mark.proves("O-07")
async def test_a_secret_that_spans_json_syntax_is_redacted_as_text(tmp_path: Path) -> None:
    room = ShaperFixture(tmp_path, odd='":[1,2')
    shaped = await room.shape({"a": [1, 2, 3]})
    assert shaped.result.data == '{"a[secret:odd],3]}'


@pytest.mark.proves("O-07")
@pytest.mark.parametrize(
    ("secret", "value", "most"),
    [
        ("a.py:12:x", [{"path": "a.py", "line": 12, "text": "xyz"}] * 30, 10),
        ("ab\nabc", ["ab", "abc"] * 30, 10),
        ("[\n    1,\n", {"k": [1, 2] * 30}, None),
    ],
)
async def test_a_secret_that_appears_only_in_an_output_file_is_redacted_there(
    tmp_path: Path, secret: str, value: object, most: int | None
) -> None:
    room = ShaperFixture(tmp_path, key=secret)
    shaped = await room.shape(value, max_output=100 if most is None else 1000, max_entries=most)
    assert "[secret:key]" in room.sidecar(shaped)
    assert secret.encode() not in room.everything_written(shaped)
    assert "[secret:key]" in str(shaped.result.data["head"]) or most is not None


@pytest.mark.proves("O-07")
def test_arguments_and_texts_are_redacted_before_they_are_logged(tmp_path: Path) -> None:
    shaper = ShaperFixture(tmp_path, key=SECRET).shaper
    assert shaper.redact_to_json(f"a {SECRET}") == "a [secret:key]"
    arguments = {"a": [SECRET], "b": float("nan"), "c": {1}}
    assert shaper.redact_to_json(arguments) == {"a": ["[secret:key]"], "b": "NaN", "c": [1]}
    plain = {"a": [1]}
    assert shaper.redact_to_json(plain) == plain and shaper.redact_to_json(plain)["a"] is not plain["a"]
    assert shaper.redact_to_json(range(10**18)).startswith("<a range")


def test_a_hash_of_arguments_depends_on_the_value_and_not_on_its_key_order(room: ShaperFixture) -> None:
    hashed = room.shaper.hash_canonical_json
    assert hashed({"a": 1, "b": [None]}) == hashed({"b": [None], "a": 1})
    different = [
        {"a": 1},
        {"a": "1"},
        {"a": None},
        {"a": float("nan")},
        {"a": b"1"},
        {"a": b"2"},
        {},
        "a",
        None,
        10**30,
    ]
    assert len({hashed(value) for value in different}) == len(different)


PLAIN = "s3cr3t-QZ"
TEXTS = st.lists(st.sampled_from([PLAIN, PLAIN[:4], PLAIN[4:], "é", "x", "\n", "s3", "Z"]), max_size=40).map("".join)


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaper, "_PIECE_BYTES", 3)
    for module in (shaper, calls_and_results):
        monkeypatch.setattr(module, "LONGEST_SECRET_BYTES", len(PLAIN))


@pytest.mark.proves("O-07")
@pytest.mark.usefixtures("tiny_pieces")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, in_file=st.integers(0, 400), limit=st.integers(30, 200))
async def test_a_large_text_read_in_chunks_is_redacted_like_the_full_text(
    new_room: Callable[..., ShaperFixture], text: str, in_file: int, limit: int
) -> None:
    room, raw = new_room(key=PLAIN), text.encode()
    whole = SecretRedactor({"key": PLAIN}).redact_text(text)
    large = LargeText(io.BytesIO(raw[:in_file]), len(raw[in_file:]), raw[in_file:])
    shaped = await room.shape({"output": large, "code": 1}, max_output=limit)
    room.shaper.close()
    data, metadata = shaped.result.data, shaped.result.metadata
    assert room.sidecar(shaped) == whole
    start, end = metadata["omitted_at"], metadata["omitted_at"] + metadata["omitted_bytes"]
    assert whole.encode()[:start].decode() == data["head"] and whole.encode()[end:].decode() == data["tail"]
    assert metadata["output_bytes"] == len(whole.encode()) and data["code"] == 1
    assert large.file.closed


@pytest.mark.proves("O-07")
@pytest.mark.usefixtures("tiny_pieces")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, cut=st.integers(0, 200), missing=st.integers(1, 40))
async def test_a_truncated_output_shows_no_part_of_a_secret_at_the_cut(
    new_room: Callable[..., ShaperFixture], text: str, cut: int, missing: int
) -> None:
    room, raw = new_room(key=PLAIN), text.encode()
    whole = SecretRedactor({"key": PLAIN}).redact_text(text).encode()
    rest = raw[cut:]
    large = LargeText(io.BytesIO(raw[:cut]), len(rest), rest[missing:])
    shaped = await room.shape({"output": large}, max_output=1000)
    room.shaper.close()
    written = room.sidecar(shaped)
    if not large.omitted_byte_count:
        assert written.encode() == whole
        return
    note = f"\n[{large.omitted_byte_count:,} bytes are left out here]\n"
    before, _, after = written.partition(note)
    assert note in written
    assert whole.startswith(before.removesuffix("\ufffd").encode())  # a character that the cut falls into
    assert whole.endswith(after.removeprefix("\ufffd").encode())
    assert PLAIN not in written
