"""Parsing of git's output with any names, and addresses as git reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import decode_text
from handrail.tools.git import git_output_parsers, git_repository

pytestmark = pytest.mark.proves("T-05a", "S-07")

WORDS = st.binary(min_size=1, max_size=12).filter(lambda word: b"\0" not in word)


@given(st.lists(st.tuples(st.sampled_from(["A", "M", "D"]), WORDS), max_size=8), st.lists(WORDS, max_size=5))
def test_a_git_status_with_any_file_names_is_parsed(changes: list[tuple[str, bytes]], untracked: list[bytes]) -> None:
    rows = [b"# branch.oid " + b"a" * 40, b"# branch.head main"]
    rows += [
        b"1 %b. N... 100644 100644 100644 %b %b %b" % (c.encode(), b"0" * 40, b"0" * 40, name) for c, name in changes
    ]
    rows += [b"? " + name for name in untracked]
    found = git_output_parsers.parse_status(b"\0".join(rows) + b"\0")
    assert [(one.index, one.path) for one in found.changed] == changes
    assert found.untracked == untracked
    assert found.headers["branch.head"] == "main"


@given(
    st.lists(
        st.tuples(WORDS.filter(lambda word: word[:1] != b":"), st.integers(0, 99), st.booleans()),
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_a_git_diff_with_any_file_names_is_parsed(rows: list[tuple[bytes, int, bool]]) -> None:
    raw = [b":100644 100644 1 2 %b\0%b\0" % (b"R100\0old" if moved else b"M", name) for name, _, moved in rows]
    counts = [b"%d\t0\t%b\0" % (n, b"\0old\0" + name if moved else name) for name, n, moved in rows]
    found = git_output_parsers.parse_raw_diff(b"".join((*raw, *counts)))
    assert [(one.path, one.added, one.before) for one in found] == [
        (name, n, b"old" if moved else None) for name, n, moved in rows
    ]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://example.org/x", "web"), ("HTTP://example.org", "web"), ("ssh://x/y", "ssh"), ("git+ssh://x/y", "ssh"),
        ("git@example.org:x", "ssh"), ("host:x", "ssh"), ("../x", "path"), ("./a:b", "path"), ("file:///x", "path"),
        ("ext::sh -c x", "other"), ("https::x", "other"), ("git://x/y", "other"), ("ftp://x/y", "other"),
    ],
)  # fmt: skip
def test_the_transport_of_an_address_is_recognised_as_git_does(url: str, kind: str) -> None:
    assert git_repository.classify_git_transport(url) == kind


def test_addresses_are_compared_without_their_credentials() -> None:
    assert git_repository.is_same_web_url("https://example.org/x.git", "https://ann:TOP-SECRET@EXAMPLE.org:443/x.git")
    for other in (
        "http://example.org/x.git",
        "https://example.org/y.git",
        "https://example.org@evil.example/x.git",
        "/x.git",
    ):
        assert not git_repository.is_same_web_url("https://example.org/x.git", other)
    assert "TOP-SECRET" not in git_repository.strip_url_credentials("https://ann:TOP-SECRET@example.org/x")


@given(st.one_of(st.binary(max_size=60), st.text(max_size=30).map(str.encode)), st.integers(1, 9))
def test_a_long_output_decoded_in_pieces_gives_the_same_text(raw: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("handrail.contract.errors._CHUNK_BYTES", piece)
        assert git_repository.decode_git_output(raw) == raw.decode("utf-8", "backslashreplace")
        assert decode_text(raw, "replace") == raw.decode("utf-8", "replace")
