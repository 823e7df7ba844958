"""Edits with the text that a model read, in which invisible characters are escaped."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.contract.calls_and_results import ProposedCall
from handrail.contract.session_protocols import Session
from handrail.contract.text.neutralisation import neutralise_text
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("O-04", "T-01a")
TEXT = 'RED = "\x1b[31m"\njoined = "a\u200db"\n<|im_start|> = 1\n// ok \u202e\r\nlast\n'


async def read(session: Session, path: str) -> str:
    (answer,) = await session.start_turn().call_all([ProposedCall("read", {"path": path})])
    return answer.model.data["text"]


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        ('RED = "⟦U+001B⟧[31m"', 'RED = "⟦U+001B⟧[91m"', ("\x1b[31m", "\x1b[91m")),
        ("[31m", "[91m", ("[31m", "[91m")),
        ('"a⟦U+200D⟧b"', '"ab⟦U+200D⟧"', ("a\u200db", "ab\u200d")),
        ("⟦<⟧|im_start|> = 1", "⟦<⟧|im_start|> = 2", ("<|im_start|> = 1", "<|im_start|> = 2")),
        ("// ok ⟦U+202E⟧", "// fine", ("// ok \u202e", "// fine")),
        ("last", "⟦U+001B⟧", ("last\n", "\x1b\n")),
        ("last", "⟦U+0007⟧", ("last\n", "⟦U+0007⟧\n")),
        ("\x1b[31m", "\x1b[0m", ("\x1b[31m", "\x1b[0m")),
    ],
)
async def test_edit_matches_escaped_text_from_read_and_keeps_literal_escapes(
    tmp_path: Path, old: str, new: str, after: tuple[str, str]
) -> None:
    file = tmp_path / "ws" / "a.txt"
    file.parent.mkdir()
    file.write_bytes(TEXT.encode())
    async with temporary_kernel(tmp_path, rules=["allow edit", "allow fs.write"]) as kernel:
        session = await kernel.session()
        shown = await read(session, "a.txt")
        assert shown == neutralise_text(TEXT.replace("\r\n", "\n").removesuffix("\n")) or "⟦U+001B⟧[31m" in shown
        result = await session.call("edit", {"path": "a.txt", "old": old, "new": new})
        assert result.ok, result.error_text
    assert file.read_bytes().decode() == TEXT.replace(*after)


async def test_literal_text_in_the_form_of_an_escape_can_be_edited(tmp_path: Path) -> None:
    file = tmp_path / "ws" / "a.txt"
    file.parent.mkdir()
    file.write_text("doc ⟦U+001B⟧ and \x1b")
    async with temporary_kernel(tmp_path, rules=["allow edit", "allow fs.write"]) as kernel:
        session = await kernel.session()
        await read(session, "a.txt")
        result = await session.call("edit", {"path": "a.txt", "old": "doc ⟦U+001B⟧", "new": "text ⟦U+001B⟧"})
        assert result.ok
        several = await session.call("edit", {"path": "a.txt", "old": "⟦U+001B⟧ and ⟦U+001B⟧", "new": "gone"})
        assert several.ok
    assert file.read_text() == "text gone"


async def test_line_patches_accept_the_escaped_text_shown_by_read(tmp_path: Path) -> None:
    file = tmp_path / "ws" / "a.txt"
    file.parent.mkdir()
    file.write_bytes(b'one\nRED = "\x1b[31m"\nthree\n')
    async with temporary_kernel(tmp_path, rules=["allow file.patch", "allow fs.write"]) as kernel:
        session = await kernel.session()
        await read(session, "a.txt")
        line = {"op": "replace", "first_line": 2, "last_line": 2}
        wrong = {**line, "expect": 'RED = "⟦U+0007⟧[31m"', "content": "x"}
        assert (await session.call("file.patch", {"path": "a.txt", "operations": [wrong]})).error_kind == "conflict"
        right = {**line, "expect": 'RED = "⟦U+001B⟧[31m"', "content": 'BOLD = "⟦U+001B⟧[1m"'}
        result = await session.call("file.patch", {"path": "a.txt", "operations": [right]})
        assert result.ok, result.error_text
    assert file.read_bytes() == b'one\nBOLD = "\x1b[1m"\nthree\n'
