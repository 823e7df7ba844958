"""Reports about PDFs and notebooks that a model gets as bytes, base64 or nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.field.pictures import GIF, JPEG, WEBP, make_png

from handrail.contract.session_protocols import Session
from handrail.runtime.documents.document_service import MAX_PAGES
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
async def session(tmp_path: Path) -> AsyncGenerator[Session]:
    async with temporary_kernel(tmp_path, rules=["allow *"]) as kernel:
        session = await kernel.session(headless=True)
        yield session
        await session.suspend()


async def read(session: Session, path: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call("read", {"path": path, **arguments})
    assert result.ok, result
    data: dict[str, Any] = result.data  # type: ignore[assignment]
    return data


async def refused(session: Session, path: str, **arguments: Any) -> tuple[str | None, str]:
    result = await session.call("read", {"path": path, **arguments})
    assert not result.ok, result
    return result.error_kind, str(result.error_text)


def make_pdf(contents: Sequence[bytes], *, parent: str = "2 0 R", filters: bytes = b"") -> bytes:
    """A document with one page for each content stream."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * at) for at in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for at, content in enumerate(contents):
        page = b"<< /Type /Page /Parent %s /MediaBox [0 0 612 792] /Contents %d 0 R " % (parent.encode(), 5 + 2 * at)
        objects.append(page + b"/Resources << /Font << /F1 3 0 R >> >> >>")
        objects.append(b"<< /Length %d %s>>\nstream\n%s\nendstream" % (len(content), filters, content))
    data = bytearray(b"%PDF-1.4\n")
    offsets: list[int] = []
    for number, one in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(data)


def say(text: str) -> bytes:
    return b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode("latin-1")


PAGES = [say(f"Text of page {number}.") for number in range(1, 6)]


@pytest.mark.parametrize("name", ["report.pdf", "REPORT.PDF", "report"])
async def test_a_pdf_is_read_by_page(session: Session, ws: Path, name: str) -> None:
    (ws / name).write_bytes(make_pdf(PAGES))
    found = await read(session, name)
    assert found["text"].startswith("--- page 1 ---\nText of page 1.\n\n--- page 2 ---")
    assert "Text of page 5." in found["text"]
    assert (found["first_page"], found["last_page"], found["total_pages"], found["next"]) == (1, 5, 5, None)


async def test_a_range_of_pages_is_read(session: Session, ws: Path) -> None:
    (ws / "a.pdf").write_bytes(make_pdf(PAGES))
    found = await read(session, "a.pdf", offset=2, limit=2)
    assert found["text"] == "--- page 2 ---\nText of page 2.\n\n--- page 3 ---\nText of page 3."
    assert found["next"] == 4
    assert (await read(session, "a.pdf", offset=-1))["text"] == "--- page 5 ---\nText of page 5."
    kind, text = await refused(session, "a.pdf", offset=6)
    assert kind == "invalid_input" and "The document has 5 pages" in text
    assert (await read(session, "a.pdf", unit="bytes", limit=8))["text"] == "%PDF-1.4"


async def test_a_page_without_text_is_marked_as_a_possible_scan(session: Session, ws: Path) -> None:
    (ws / "scan.pdf").write_bytes(make_pdf([b"0 0 612 792 re f", say("Some text.")]))
    text = (await read(session, "scan.pdf"))["text"]
    assert "--- page 1 ---\n(This page has no text. It may be a scan" in text and "Some text." in text


@pytest.mark.parametrize(("password", "is_readable"), [("", True), ("secret", False)])
@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
async def test_an_encrypted_document_is_refused_only_if_a_password_is_required(
    session: Session, ws: Path, password: str, is_readable: bool, algorithm: str
) -> None:
    from pypdf import PdfReader, PdfWriter

    (ws / "plain.pdf").write_bytes(make_pdf(PAGES))
    writer = PdfWriter(clone_from=PdfReader(ws / "plain.pdf"))
    writer.encrypt(password, owner_password="owner", algorithm=algorithm)
    writer.write(ws / "a.pdf")
    if is_readable:
        assert "Text of page 5." in (await read(session, "a.pdf"))["text"]
    else:
        kind, text = await refused(session, "a.pdf")
        assert kind == "unavailable" and "encrypted with a password" in text and "copy without" in text


async def test_a_missing_pdf_extra_is_reported_with_its_name(
    session: Session, ws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ws / "a.pdf").write_bytes(make_pdf(PAGES))
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "site-packages" not in one])
    kind, text = await refused(session, "a.pdf")
    assert kind == "unavailable" and "extra 'pdf' (handrail doctor shows the command)" in text and "pdftotext" in text


async def test_a_long_document_is_read_in_parts(session: Session, ws: Path) -> None:
    (ws / "long.pdf").write_bytes(make_pdf([say(f"{number} " + "x" * 3_000) for number in range(1, 201)]))
    found = await read(session, "long.pdf")
    assert 1 < found["last_page"] < 200 and found["next"] == found["last_page"] + 1
    rest = await read(session, "long.pdf", offset=found["next"])
    assert rest["text"].startswith(f"--- page {found['next']} ---\n{found['next']} xxx")


async def test_a_read_of_a_pdf_with_ten_thousand_pages_is_bounded(session: Session, ws: Path) -> None:
    (ws / "many.pdf").write_bytes(make_pdf([say("x")] * 10_000))
    found = await read(session, "many.pdf")
    assert found["total_pages"] == 10_000 and 0 < found["last_page"] <= MAX_PAGES
    assert (await read(session, "many.pdf", offset=9_999))["last_page"] == 10_000


def compress(piece: bytes, times: int) -> bytes:
    made = zlib.compressobj(1)
    return b"".join((*(made.compress(piece * 1_000) for _ in range(times // 1_000)), made.flush()))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "bomb": lambda: make_pdf([compress(b"0 ", 100_000_000)], filters=b"/Filter /FlateDecode "),
    "many operators": lambda: make_pdf([compress(b"(x) Tj ", 5_000_000)], filters=b"/Filter /FlateDecode "),
    "page tree in a circle": lambda: make_pdf(PAGES).replace(b"/Kids [4 0 R", b"/Kids [2 0 R"),
    "cut": lambda: make_pdf(PAGES)[:700],
    "only the mark": lambda: b"%PDF-1.7\n",
    "noise": lambda: b"%PDF-1.7\n" + bytes(range(256)) * 400,
    "cross-references in a circle": lambda: make_pdf(PAGES).replace(b"/Root 1 0 R", b"/Root 1 0 R /Prev 9"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_read_of_a_hostile_pdf_ends_with_a_result_or_an_error(session: Session, ws: Path, name: str) -> None:
    (ws / "a.pdf").write_bytes(HOSTILE[name]())
    result = await session.call("read", {"path": "a.pdf"})
    assert "Traceback" not in str(result)
    assert result.ok or result.error_kind in ("failed", "limit"), result
    (ws / "a.pdf").write_bytes(make_pdf(PAGES))
    assert "Text of page 1." in (await read(session, "a.pdf"))["text"]


async def test_the_pages_before_a_too_expensive_page_are_returned(session: Session, ws: Path) -> None:
    pages = [zlib.compress(say("Before.")), compress(b"(x) Tj ", 1_000_000)]
    (ws / "a.pdf").write_bytes(make_pdf(pages, filters=b"/Filter /FlateDecode "))
    found = await read(session, "a.pdf")
    assert (found["text"], found["last_page"], found["next"]) == ("--- page 1 ---\nBefore.", 1, 2)


async def test_a_pdf_above_the_size_limit_is_refused_with_a_remedy(session: Session, ws: Path) -> None:
    for name, mib in (("large", 40), ("huge", 129)):
        (ws / f"{name}.pdf").write_bytes(make_pdf([say("Some text."), b"%" * (mib << 20)]))
    assert (await read(session, "large.pdf", limit=1))["text"] == "--- page 1 ---\nSome text."
    kind, text = await refused(session, "huge.pdf", limit=1)
    assert kind == "limit" and "134,217,728" in text and "pdftotext" in text


async def test_a_deny_rule_applies_to_a_pdf(tmp_path: Path, ws: Path) -> None:
    (ws / "a.pdf").write_bytes(make_pdf(PAGES))
    async with temporary_kernel(tmp_path, rules=["allow *", "deny fs.read a.pdf"]) as kernel:
        session = await kernel.session(headless=True)
        assert (await refused(session, "a.pdf"))[0] == "denied"
        await session.suspend()


IMAGE = base64.b64encode(make_png()).decode()
BROKEN = "iVBORw0KGgo!" * 5_000
NOTEBOOK: dict[str, Any] = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "Some text."]},
        {
            "cell_type": "code",
            "execution_count": 1,
            "metadata": {},
            "source": "print('hello')",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["hel", "lo\n"]},
                {
                    "output_type": "execute_result",
                    "data": {"text/plain": "<Figure>", "image/png": BROKEN},
                    "metadata": {},
                },
                {"output_type": "display_data", "data": {"text/html": "<b>x</b>"}, "metadata": {}},
            ],
        },
        {
            "cell_type": "code",
            "metadata": {},
            "source": [],
            "outputs": [
                {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["\x1b[31mE\x1b[0m: v", "line"]},
                {"output_type": "stream", "name": "stdout", "text": "y" * 50_000},
            ],
        },
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}


async def test_a_notebook_is_read_by_cell(session: Session, ws: Path) -> None:
    (ws / "a.ipynb").write_text(json.dumps(NOTEBOOK))
    found = await read(session, "a.ipynb")
    text: str = found["text"]
    assert text.startswith("--- cell 1 (markdown) ---\n# Title\nSome text.\n\n--- cell 2 (code) ---\nprint('hello')\n")
    assert "--- output of cell 2 ---\nhello\n" in text and "<Figure>\n(image/png, 60,000 characters, not shown)" in text
    assert "(text/html, 8 characters, not shown)" in text
    assert "E: v\nline\n" in text and "(40,000 more characters of this output are not shown)" in text
    assert "iVBOR" not in text
    assert (found["first_cell"], found["last_cell"], found["total_cells"], found["next"]) == (1, 3, 3, None)


async def test_a_range_of_cells_is_read(session: Session, ws: Path) -> None:
    (ws / "a.ipynb").write_text(json.dumps(NOTEBOOK))
    found = await read(session, "a.ipynb", offset=1, limit=1)
    assert found["text"] == "--- cell 1 (markdown) ---\n# Title\nSome text." and found["next"] == 2
    assert (await read(session, "a.ipynb", offset=-1))["first_cell"] == 3
    kind, text = await refused(session, "a.ipynb", offset=4)
    assert kind == "invalid_input" and "3 cells" in text


async def test_a_notebook_can_be_edited_as_text_and_as_json(session: Session, ws: Path) -> None:
    original = json.dumps(NOTEBOOK, indent=1) + "\n"
    (ws / "a.ipynb").write_text(original)
    await read(session, "a.ipynb")
    assert (await session.call("edit", {"path": "a.ipynb", "old": "print('hello')", "new": "print('you')"})).ok
    assert (ws / "a.ipynb").read_text() == original.replace("print('hello')", "print('you')")
    assert (
        await session.call("json_write", {"path": "a.ipynb", "pointer": "/cells/1/source", "value": "print('me')"})
    ).ok
    assert '"cell_type": "markdown"' in (await read(session, "a.ipynb", unit="lines", limit=5))["text"]


@pytest.mark.parametrize(
    "text",
    ["", "not json\n", "[]", "{}", '{"cells": 1}', '{"cells": [1]}', '{"worksheets": [1]}', "[" * 100_000],
)
async def test_an_invalid_notebook_is_read_as_text(session: Session, ws: Path, text: str) -> None:
    (ws / "a.ipynb").write_text(text)
    assert (await read(session, "a.ipynb"))["first_line"] == 1


@pytest.mark.parametrize(
    "cell",
    [
        {},
        {"cell_type": "code", "source": 1, "outputs": 2},
        {"cell_type": "code", "source": [1, None], "outputs": [1, None, {}, {"data": 1}, {"output_type": "error"}]},
        {"cell_type": ["x"], "source": {"a": 1}, "outputs": [{"data": {"image/png": ["a", "b"]}}]},
    ],
)
async def test_a_malformed_notebook_cell_does_not_prevent_the_read_of_others(
    session: Session, ws: Path, cell: dict[str, Any]
) -> None:
    (ws / "a.ipynb").write_text(json.dumps({"cells": [cell, {"cell_type": "markdown", "source": "last"}]}))
    assert (await read(session, "a.ipynb"))["text"].endswith("--- cell 2 (markdown) ---\nlast")


async def test_an_old_notebook_is_read_by_cell(session: Session, ws: Path) -> None:
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["1 + 1"], "outputs": [{"text": ["2"]}]}]}]}
    (ws / "a.ipynb").write_text(json.dumps(old))
    assert (await read(session, "a.ipynb"))["text"] == "--- cell 1 (code) ---\n1 + 1\n--- output of cell 1 ---\n2"


def figure(data: object, kind: str = "image/png") -> dict[str, Any]:
    return {"cell_type": "code", "source": "plot()", "outputs": [{"output_type": "display_data", "data": {kind: data}}]}


def encode(data: bytes) -> str:
    return base64.encodebytes(data).decode()


@pytest.mark.parametrize(
    ("cell", "image"),
    [
        (figure(encode(make_png())), make_png()),
        (figure(encode(JPEG).splitlines(keepends=True), "image/jpeg"), JPEG),
        (figure(encode(GIF), "image/gif"), GIF),
        (figure(encode(WEBP), "image/png"), WEBP),
        ({"cell_type": "markdown", "source": "![](a)", "attachments": {"a": {"image/png": IMAGE}}}, make_png()),
        ({"cell_type": "code", "input": "x", "outputs": [{"output_type": "display_data", "png": IMAGE}]}, make_png()),
    ],
    ids=["png", "lines of jpeg", "gif", "another type than named", "attachment", "before version 4"],
)
async def test_an_image_in_a_notebook_is_returned_as_an_image(
    session: Session, ws: Path, cell: dict[str, Any], image: bytes
) -> None:
    (ws / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    found = await read(session, "a.ipynb")
    assert "(image 1 of this answer: " in found["text"] and len(found["images"]) == 1
    assert hashlib.sha256(image).hexdigest() in json.dumps(found["images"])


async def test_images_over_the_limit_of_one_answer_are_returned_with_later_cells(session: Session, ws: Path) -> None:
    cells = [figure(encode(make_png(side))) for side in range(1, 11)]
    (ws / "a.ipynb").write_text(json.dumps({"cells": cells}))
    found = await read(session, "a.ipynb")
    assert len(found["images"]) == 8
    assert "(image/png, not shown: an answer has at most 8 images; read with `offset: 9`)" in found["text"]
    assert len((await read(session, "a.ipynb", offset=9))["images"]) == 2
    assert len((await read(session, "a.ipynb", limit=3))["images"]) == 3
    long = {"cell_type": "markdown", "source": "x" * 300_000}
    (ws / "b.ipynb").write_text(json.dumps({"cells": [cells[0], long, cells[1]]}))
    found = await read(session, "b.ipynb")
    assert (found["last_cell"], found["next"], len(found["images"])) == (1, 2, 1)


@pytest.mark.parametrize("data", ["", "%%%", encode(b"<svg/>"), {"a": 1}, None, encode(b"\x89PNG")])
async def test_notebook_data_that_is_not_an_image_is_noted(session: Session, ws: Path, data: object) -> None:
    (ws / "a.ipynb").write_text(json.dumps({"cells": [figure(data)]}))
    found = await read(session, "a.ipynb")
    assert "characters, not shown)" in found["text"] and "images" not in found


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\0\0\0\x18ftypheic", "a HEIC picture"),
        (b"\0\0\0\x1cftypavif", "an AVIF picture"),
        (b"BM\x3a\0\0\0", "a BMP picture"),
        (b"II*\0\x08\0", "a TIFF picture"),
        (b"\0\0\1\0\1\0", "an icon"),
    ],
)
async def test_a_picture_that_no_provider_takes_is_named_with_a_way(
    session: Session, ws: Path, start: bytes, kind: str
) -> None:
    (ws / "picture").write_bytes(start + bytes(60))
    result = await session.call("read", {"path": "picture"})
    assert f"picture is {kind}" in str(result.error_text) and "Convert it to PNG" in str(result.error_text), result
