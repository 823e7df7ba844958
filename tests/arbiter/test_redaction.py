"""Registered secrets are redacted in every encoding, nesting and split."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.arbiter.output.secret_redaction import SecretRedactor

pytestmark = pytest.mark.proves("O-07")

# A small alphabet, so that values overlap, contain each other and occur often; no bracket, so that no label's edge
# and the text beside it spell a value by chance.
LETTERS = 'ab"\\\né1'
secrets = st.dictionaries(
    st.sampled_from(["A", "B", "C"]), st.text(LETTERS, min_size=4, max_size=7).filter(str.strip), min_size=1
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(LETTERS + " "),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(LETTERS, max_size=8), inner, max_size=4),
    max_leaves=12,
)


def with_secrets(draw: st.DrawFn) -> tuple[dict[str, str], str]:
    known = draw(secrets)
    pieces = draw(st.lists(st.text(LETTERS, max_size=6) | st.sampled_from(list(known.values())), max_size=8))
    return known, "".join(pieces)


secret_texts = st.composite(with_secrets)()


def test_a_secret_is_replaced_by_its_name_and_the_longest_match_wins() -> None:
    redactor = SecretRedactor({"short": "hunter2", "long": "hunter2-extended"})
    assert redactor.redact_text("a hunter2 and a hunter2-extended.") == "a [secret:short] and a [secret:long]."


def test_overlapping_secrets_are_redacted_completely() -> None:
    redactor = SecretRedactor({"A": "abcdef", "B": "efghij"})
    assert redactor.redact_text("-abcdefghij-") == "-[secret:A]-"
    assert redactor.redact_bytes(b"-abcdefghij-") == b"-[secret:A]-"
    assert redactor.redact_text("abcdefefghij") == "[secret:A][secret:B]"


@pytest.mark.parametrize("value", ['pa"ss\\word', "line\nbreak", "pä$$wörd", "tab\tand é\u2028", "a/b?c d"])
def test_a_secret_is_found_in_json_and_in_a_url(value: str) -> None:
    redactor = SecretRedactor({"key": value})
    once = json.dumps({"k": value})
    for text in (
        value,
        once,
        json.dumps(once),
        orjson.dumps(once).decode(),
        f"https://u:{quote(value, safe='')}@host/",
    ):
        shown = redactor.redact_text(f"<{text}>")
        assert "[secret:key]" in shown
        for form in (value, json.dumps(value)[1:-1], quote(value, safe="")):
            assert form not in shown


@given(secret_texts)
def test_a_redacted_text_contains_no_secret(case: tuple[dict[str, str], str]) -> None:
    known, text = case
    redactor = SecretRedactor(known)
    shown = redactor.redact_text(text)
    assert all(value not in shown for value in known.values())
    assert redactor.redact_bytes(text.encode()).decode() == shown
    assert redactor.redact_text(shown) == shown
    if not any(value in text for value in known.values()) and "\\" not in text:
        assert shown is text


@given(secret_texts, st.lists(st.integers(0, 60), max_size=10))
def test_redaction_of_a_stream_equals_redaction_of_the_full_text(
    case: tuple[dict[str, str], str], cuts: list[int]
) -> None:
    known, text = case
    redactor = SecretRedactor(known)
    stream = redactor.create_stream_redactor()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [stream.redact_piece(text[a:b]) for a, b in pairwise(places)]
    assert "".join([*pieces, stream.flush_held_text()]) == redactor.redact_text(text)


def test_a_stream_holds_back_only_text_that_may_be_a_secret() -> None:
    stream = SecretRedactor({"key": "hunter2"}).create_stream_redactor()
    assert stream.redact_piece("hello hun") == "hello "
    assert stream.redact_piece("ter") == ""
    assert stream.redact_piece("mint hunter") == "huntermint "
    assert stream.redact_piece("2!") == "[secret:key]!"
    assert stream.redact_piece("hunt") == ""
    assert stream.flush_held_text() == "hunt"


values = st.text("abcXYZ019+/=&<>\"' é€\\\n%-_.~", min_size=6, max_size=90).filter(lambda v: len(v.strip()) > 5)


def wrapped(encoded: bytes, width: int, end: str) -> str:
    text = encoded.decode()
    return end.join(text[at : at + width] for at in range(0, len(text), width))


def ways(value: str) -> dict[str, str]:
    """The secret on its way, by how it goes."""
    raw = value.encode()
    percent = "".join(f"%{byte:02X}" for byte in raw)
    found = {
        "as it is": value,
        "JSON": json.dumps(value),
        "JSON in JSON": json.dumps(json.dumps(value, ensure_ascii=False)),
        "orjson": orjson.dumps(value).decode(),
        "quote": quote(value),
        "quote, all": quote(value, safe=""),
        "quote, lower": re.sub("%[0-9A-F]{2}", lambda m: m[0].lower(), quote(value, safe="")),
        "quote_plus": quote_plus(value),
        "percent": percent,
        "percent, mixed": "".join(c.lower() if i % 5 else c for i, c in enumerate(percent)),
        "hex": raw.hex(),
        "HEX": raw.hex().upper(),
        "HTML": html.escape(value),
        "HTML by number": "".join(f"&#{ord(c)};" for c in value),
        "HTML by hexadecimal number": "".join(f"&#x{ord(c):x};" for c in value),
        "HTML by padded number": "".join(f"&#{ord(c):07};" for c in value),
        "HTML by padded hexadecimal number": "".join(f"&#X{ord(c):08X};" for c in value),
        "HTML by number, some": "".join(f"&#{ord(c)};" if i % 3 else html.escape(c) for i, c in enumerate(value)),
        "HTML by number, unfinished": " ".join("".join(f"&#{ord(c)}" for c in value).split(" ")),
        "repr": repr(value),
        "HTML without quotes": html.escape(value, quote=False),
        "JSON of HTML": json.dumps(html.escape(value)),
        "base64": base64.b64encode(raw).decode(),
        "base64 without padding": base64.b64encode(raw).decode().rstrip("="),
        "URL-safe": base64.urlsafe_b64encode(raw).decode(),
        "base64 in a URL": quote(base64.b64encode(raw).decode(), safe=""),
    }
    for before in range(4):
        for after in range(3):
            whole = b"u" * before + raw + b"!" * after
            found[f"in base64 {before} {after}"] = base64.b64encode(whole).decode()
            found[f"in URL-safe {before} {after}"] = base64.urlsafe_b64encode(whole).decode().rstrip("=")
    return found


@given(values)
def test_a_secret_is_found_in_every_encoding(value: str) -> None:
    redactor = SecretRedactor({"key": value})
    for name, form in ways(value).items():
        for text in (form, f"<{form}>", f"x={form}&y", json.dumps(form)):
            assert "[secret:key]" in redactor.redact_text(text), name
            assert b"[secret:key]" in redactor.redact_bytes(text.encode()), name
            assert redactor.contains_secret(text.encode()), name


def test_only_valid_numeric_references_are_decoded_to_find_a_secret() -> None:
    redactor = SecretRedactor({"key": "stop now"})
    assert redactor.redact_text("&#115;t&#x6F;p&#32no&#000000000119;!") == "[secret:key]!"
    assert redactor.redact_text("a&#99999999;&#xD800;&#115;top now&#33;") == "a&#99999999;&#xD800;[secret:key]&#33;"
    for text in ("&#1150;top now", "&#;stop&#32;", "&#xZ;", "&#115;top &#1101;ow"):
        assert redactor.redact_text(text) is text
    stream = redactor.create_stream_redactor()
    assert [stream.redact_piece(piece) for piece in ("a&", "#1", "15;t&#x6", "f;p &#110", "o", "w", "&amp;")] == [
        "a", "", "", "", "", "[secret:key]", "&amp;"
    ]  # fmt: skip


@given(values, st.integers(0, 120), st.sampled_from([64, 76]), st.sampled_from(["\n", "\r\n"]))
def test_a_secret_is_found_in_wrapped_base64(value: str, before: int, width: int, end: str) -> None:
    """Source: MIME and PEM wrap their lines at 76 and 64 characters."""
    redactor = SecretRedactor({"key": value})
    text = wrapped(base64.b64encode(b"b" * before + value.encode() + b"after"), width, end)
    for form in (text, json.dumps(text)):
        shown = redactor.redact_text(form)
        assert "[secret:key]" in shown
        for line in form.split(end):  # nothing of it is left but the two characters that it shares with others
            inner = base64.b64encode(b"\0" * (before % 3) + value.encode()).decode()[2:-2]
            assert len(line) < 8 or line not in shown or line not in inner


@given(values, st.data())
def test_redaction_of_encoded_secrets_in_a_stream_equals_redaction_of_the_full_text(
    value: str, data: st.DataObject
) -> None:
    redactor = SecretRedactor({"key": value})
    forms = list(ways(value).values())
    pieces = data.draw(st.lists(st.sampled_from(forms) | st.text("ab%2&=+ \\nYQ", max_size=6), max_size=5))
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    stream = redactor.create_stream_redactor()
    places = [0, *sorted(cuts), len(text)]
    shown = [stream.redact_piece(text[a:b]) for a, b in pairwise(places)]
    assert "".join([*shown, stream.flush_held_text()]) == redactor.redact_text(text)
    assert value not in "".join(shown)


def test_a_long_secret_of_many_lines_is_found_in_every_encoding() -> None:
    lines = [base64.b64encode(bytes(range(n, n + 48))).decode() for n in range(24)]
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""])
    redactor = SecretRedactor({"pem": key})
    for name, form in ways(key).items():
        shown = redactor.redact_text(f"before {form} after")
        assert "[secret:pem]" in shown and len(shown) < 40, name
    text = wrapped(base64.b64encode(b"x" + key.encode()), 76, "\n")
    assert len(redactor.redact_text(text)) < 24


def test_text_without_secrets_is_returned_unchanged() -> None:
    redactor = SecretRedactor({f"key{n}": hashlib.sha256(bytes([n])).hexdigest()[:20] for n in range(20)})
    text = Path(json.__file__).read_text() * 3
    assert redactor.redact_text(text) is text
    data = {"text": text, "n": [1, 2]}
    assert redactor.redact_json(data) is data and redactor.redact_record_body(data) is data


@given(secrets, plain)
def test_redacted_nested_data_contains_no_secret(known: dict[str, str], data: Any) -> None:
    redactor = SecretRedactor(known)
    shown = redactor.redact_json(data)

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for key, item in value.items() for text in [key, *texts(item)]]  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]  # pyright: ignore[reportUnknownVariableType]
        return [value if isinstance(value, str) else json.dumps(value)]

    assert all(value not in text for value in known.values() for text in texts(shown))

    def leaves(value: Any) -> int:
        if isinstance(value, dict):
            return sum(1 + leaves(item) for item in value.values())  # pyright: ignore[reportUnknownVariableType]
        return sum(leaves(item) for item in value) if isinstance(value, list) else 1  # pyright: ignore[reportUnknownVariableType]

    assert leaves(shown) == leaves(data), "nothing else is lost"
