"""Reports about files in other encodings than UTF-8: refused, or converted without a notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.field.text_files import model_session

from handrail.agent.providers.scripted_model import read_model_script
from handrail.authoring.mcp_server_import import import_mcp_servers
from handrail.config.foreign_server_files import read_foreign_server_file
from handrail.config.toml_file import parse_config_file
from handrail.contract.agent_manifest import parse_agent_manifest
from handrail.contract.text.strict_json import parse_json_object
from handrail.contract.text.text_encodings import decode_file_text
from handrail.contract.tool.manifest import parse_manifest_text
from handrail.tools.files.text_changes import replace_exact_text

FRENCH = '# réglages\nnom = "André"\nville = "Orléans"\n'
JAPANESE = "# 設定ファイル\n名前 = テスト\n値 = これは値です。\n"
CHINESE = "# 配置文件\n名称 = 测试\n这是一个例子。\n"
KOREAN = "# 설정 파일\n이름 = 시험\n이것은 예입니다.\n"
RUSSIAN = "# Настройки программы\nимя = Тест\nэто пример строки\n"
FILES: list[tuple[str, str, str]] = [
    ("latin-1", "ISO-8859-1", FRENCH),
    ("cp1252", "WINDOWS-1252", "# “réglages” — 5 €\nnom = André\nx = 1\n"),
    ("cp932", "SHIFT_JIS", JAPANESE),
    ("euc_jp", "EUC-JP", JAPANESE),
    ("iso2022_jp", "ISO-2022-JP", JAPANESE),
    ("gb18030", "GB18030", CHINESE),
    ("big5", "BIG5", "# 設定檔案\n名稱 = 測試\n這是一個例子。\n"),
    ("cp949", "CP949", KOREAN),
    ("cp1251", "WINDOWS-1251", RUSSIAN),
    ("koi8-r", "KOI8-R", RUSSIAN),
    ("utf-16-le", "UTF-16LE", FRENCH),
    ("utf-16-be", "UTF-16BE", JAPANESE),
    ("utf-32-le", "UTF-32LE", FRENCH),
    ("utf-32-be", "UTF-32BE", RUSSIAN),
]
MARKED = [
    ("utf-8", "UTF-8", CHINESE),
    ("utf-16-le", "UTF-16LE", JAPANESE),
    ("utf-16-be", "UTF-16BE", FRENCH),
    ("utf-32-le", "UTF-32LE", KOREAN),
    ("utf-32-be", "UTF-32BE", FRENCH),
]
EVERY = [
    *((codec, name, text.encode(codec), text) for codec, name, text in FILES),
    *((codec, f"{name} with a byte order mark", f"\ufeff{text}".encode(codec), text) for codec, name, text in MARKED),
]
every_encoding = pytest.mark.parametrize(("codec", "label", "data", "text"), EVERY, ids=[one[1] for one in EVERY])


def change(tool: str, line: str, new: str) -> dict[str, Any]:
    """The arguments that replace one line of ``a.txt``, which is its second."""
    if tool == "edit":
        return {"old": line, "new": new}
    if tool == "multi_edit":
        return {"edits": [{"old": line, "new": new}]}
    return {"operations": [{"op": "replace", "first_line": 2, "last_line": 2, "content": new, "expect": line}]}


@every_encoding
async def test_a_file_is_read_in_its_encoding_and_the_result_names_the_encoding(
    tmp_path: Path, codec: str, label: str, data: bytes, text: str
) -> None:
    async with model_session(tmp_path) as model:
        model.put("a.txt", data)
        answer = await model.call("read", path="a.txt")
        assert (answer["text"], answer["encoding"]) == (text.removesuffix("\n"), label)
        assert (await model.call("read", path="a.txt", offset=2, limit=1))["text"] == text.split("\n")[1]
        assert (await model.call("read", path="a.txt", offset=-1))["text"] == text.split("\n")[2]


@every_encoding
@pytest.mark.parametrize("tool", ["edit", "multi_edit", "file.patch"])
async def test_an_edit_keeps_the_encoding_and_the_byte_order_mark(
    tmp_path: Path, codec: str, label: str, data: bytes, text: str, tool: str
) -> None:
    first, second, third = text.splitlines()
    new = second[::-1] + first
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", data)
        await model.show("a.txt")
        answer = await model.call(tool, path="a.txt", **change(tool, second, new))
        assert answer["encoding"] == label and f"+{new}" in answer["diff"]
        mark = "\ufeff" if "mark" in label else ""
        assert path.read_bytes() == f"{mark}{first}\n{new}\n{third}\n".encode(codec)


@every_encoding
async def test_a_rewritten_file_keeps_its_encoding_and_byte_order_mark(
    tmp_path: Path, codec: str, label: str, data: bytes, text: str
) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", data)
        await model.show("a.txt")
        answer = await model.call("write", path="a.txt", content=f"new\n{text}")
        assert answer["encoding"] == label
        assert path.read_bytes() == ("\ufeff" if "mark" in label else "").encode(codec) + f"new\n{text}".encode(codec)


@pytest.mark.parametrize("tool", ["edit", "multi_edit", "file.patch", "write"])
async def test_a_character_outside_the_file_encoding_is_refused_with_a_remedy(tmp_path: Path, tool: str) -> None:
    data = FRENCH.encode("latin-1")
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", data)
        await model.show("a.txt")
        arguments = {"content": "→"} if tool == "write" else change(tool, 'nom = "André"', 'nom = "→"')
        text = await model.fail(tool, path="a.txt", **arguments)
        assert "ISO-8859-1" in text and "U+2192" in text and "iconv" in text
        assert path.read_bytes() == data


async def test_a_best_effort_multi_edit_skips_an_edit_that_cannot_be_encoded(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", FRENCH.encode("latin-1"))
        await model.show("a.txt")
        edits = [{"old": "André", "new": "日本"}, {"old": "Orléans", "new": "Besançon"}]
        answer = await model.call("multi_edit", path="a.txt", edits=edits, mode="best_effort")
        assert answer["replacements"] == 1 and "U+65E5" in answer["failed"][0]["reason"]
        assert path.read_bytes() == FRENCH.replace("Orléans", "Besançon").encode("latin-1")


async def test_a_byte_order_mark_is_not_shown_and_is_preserved(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b"\xef\xbb\xbfone\ntwo\n")
        assert await model.show("a.txt") == "one\ntwo"
        assert (await model.call("read", path="a.txt", unit="bytes"))["text"] == "one\ntwo\n"
        assert (await model.call("grep", pattern="^one"))["matches"][0]["text"] == "one"
        operation = {"op": "replace", "first_line": 1, "last_line": 1, "content": "ONE", "expect": "one"}
        answer = await model.call("file.patch", path="a.txt", operations=[operation])
        assert "\ufeff" not in answer["diff"] and "U+FEFF" not in answer["diff"]
        await model.call("edit", path="a.txt", old="ONE\n", new="1\n")
        await model.call("file.patch", path="a.txt", operations=[{"op": "insert", "line": 1, "content": "0"}])
        assert path.read_bytes() == b"\xef\xbb\xbf0\n1\ntwo\n"


@pytest.mark.parametrize("mark", ["\ufeff", "⟦U+FEFF⟧"])
async def test_a_byte_order_mark_written_by_a_model_is_not_doubled(tmp_path: Path, mark: str) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b"\xef\xbb\xbfone\n")
        await model.show("a.txt")
        await model.call("edit", path="a.txt", old=f"{mark}one", new=f"{mark}two")
        assert path.read_bytes() == b"\xef\xbb\xbftwo\n"
        operation = {"op": "replace", "first_line": 1, "last_line": 1, "content": f"{mark}3", "expect": f"{mark}two"}
        await model.call("file.patch", path="a.txt", operations=[operation])
        assert path.read_bytes() == b"\xef\xbb\xbf3\n"
        await model.call("write", path="a.txt", content=f"{mark}four\n")
        assert path.read_bytes() == b"\xef\xbb\xbffour\n"


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("日本語\n", "cp932"),
        ("ｶﾅ テスト ①\n", "cp932"),
        ("日本語\n", "euc_jp"),
        ("中文\n", "gbk"),
        ("한국어\n", "cp949"),
        ("你好\n", "utf-16-le"),
        ("你好\n", "utf-16-be"),
        ("hello", "utf-16-le"),
        ("x = 'Müller'\n", "latin-1"),
        ("price: 5 €\n", "cp1252"),
        ("Øresund, blåbær\n", "latin-1"),
        ("Zażółć gęślą jaźń\n", "cp1250"),
        ("Zażółć gęślą jaźń\n", "iso8859-2"),
        ("Καλημέρα κόσμε\n", "cp1253"),
        ("Привет, мир\n", "cp866"),
        ("café\n", "mac_roman"),
        ("# Réglages généraux\nnom = 'élève'\n", "mac_roman"),
        ("Größe der Straße: äußerst schön\n", "mac_roman"),
        ("Não é possível, coração\n", "mac_roman"),
        ("på\n", "mac_roman"),
        ("déjà vu\n", "cp850"),
        ("Größe der Straße\n", "cp437"),
        ("Zmień hasło użytkownika\n", "cp852"),
        ("Proszę podać imię i nazwisko\n", "iso8859-2"),
        ("Proszę podać imię i nazwisko\n", "cp1250"),
        ("soubor nelze otevřít\n", "iso8859-2"),
        ("soubor nelze otevřít\n", "cp1250"),
        ("čeština\n", "iso8859-2"),
        ("Árvíztűrő tükörfúrógép\n", "iso8859-2"),
        ("őrség\n", "cp1250"),
        ("riječ će doći\n", "iso8859-2"),
        ("kôň ľan\n", "cp1250"),
        ("Fişierul nu poate fi găsit\n", "cp1250"),
        ("ação\n", "latin-1"),
        ("un cœur, “vite” à côté\n", "cp1252"),
        ("İstanbul'da değişiklik\n", "cp1254"),
    ],
)
def test_the_encoding_of_a_short_text_is_detected(text: str, codec: str) -> None:
    assert decode_file_text(text.encode(codec)).text == text


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "latin-1", "cp932"])
async def test_json_is_read_and_written_in_its_encoding(tmp_path: Path, codec: str) -> None:
    name = "名前" if codec == "cp932" else "é"
    text = f'{{\r\n "nom": "{name}",\r\n "list": [1]\r\n}}\r\n'
    async with model_session(tmp_path) as model:
        path = model.put("a.json", text.encode(codec))
        answer = await model.call("json_read", path="a.json", pointer="/nom")
        assert answer["value"] == name and answer["encoding"]
        await model.call("json_write", path="a.json", pointer="/nom", value=f"{name}{name} 😀")
        written = f"{name}{name} 😀" if codec.startswith("utf") else rf"{name}{name} \ud83d\ude00"
        assert path.read_bytes() == text.replace(f'"{name}"', f'"{written}"').encode(codec)
        await model.call("json_write", path="a.json", value={"nom": name})
        assert path.read_bytes() == f'{{\r\n "nom": "{name}"\r\n}}\r\n'.encode(codec)


async def test_a_json_write_keeps_the_indent_and_byte_order_mark_of_a_notebook(tmp_path: Path) -> None:
    text = '{\n "cells": [\n  {\n   "source": [\n    "print(1)"\n   ]\n  }\n ],\n "nbformat": 4\n}'
    async with model_session(tmp_path) as model:
        path = model.put("a.ipynb", b"\xef\xbb\xbf" + text.encode())
        await model.call("json_read", path="a.ipynb")
        await model.call("json_write", path="a.ipynb", pointer="/cells/0/source/0", value="print('é')")
        assert path.read_bytes() == b"\xef\xbb\xbf" + text.replace("print(1)", "print('é')").encode()


async def test_invalid_bytes_are_preserved_if_a_file_is_written_as_shown(tmp_path: Path) -> None:
    data = "é ü 日本\n".encode() + b"bad \xff\xfe here\nlast\n"
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", data)
        shown = await model.show("a.txt")
        assert "\ufffd" in shown
        await model.call("write", path="a.txt", content=shown.replace("last", "end") + "\n")
        assert path.read_bytes() == data.replace(b"last", b"end")


async def test_an_encoding_declared_in_a_file_is_used(tmp_path: Path) -> None:
    texts = {
        "a.py": ("# -*- coding: iso-8859-2 -*-\nx = 'ř'\n", "iso8859-2"),
        "a.xml": ('<?xml version="1.0" encoding="windows-1251"?>\n<a>Я</a>\n', "cp1251"),
        "a.html": ('<meta charset="gbk">\n<p>你好</p>\n', "gbk"),
    }
    async with model_session(tmp_path) as model:
        for name, (text, codec) in texts.items():
            path = model.put(name, text.encode(codec))
            assert await model.show(name) == text.removesuffix("\n"), name
            await model.call("edit", path=name, old=text, new=text * 2)
            assert path.read_bytes() == (text * 2).encode(codec)


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(256)) * 4,
        b"\x7fELF\x02\x01\x01" + bytes(60),
        b"PK\x03\x04\x14\0\x08\0\x21\x9c" + bytes(range(128, 255)) * 3,
    ],
)
async def test_a_binary_file_is_refused(tmp_path: Path, data: bytes) -> None:
    async with model_session(tmp_path) as model:
        model.put("a.bin", data)
        assert "is a binary file" in await model.fail("read", path="a.bin")


async def test_a_large_file_is_read_in_its_encoding(tmp_path: Path) -> None:
    line = "l’été à la plage, déjà vu\n".encode("cp1252")
    async with model_session(tmp_path) as model:
        model.put("a.txt", line * (17 * 1024 * 1024 // len(line)))
        answer = await model.call("read", path="a.txt", offset=600_000, limit=1)
        assert (answer["text"], answer["encoding"]) == ("l’été à la plage, déjà vu", "WINDOWS-1252")
        model.put("b.txt", "\ufeffl’été\n".encode("utf-16-le") * (1024 * 1024 * 3 // 2))
        text = await model.fail("read", path="b.txt")
        assert "UTF-16LE" in text and "iconv" in text


@given(
    st.sampled_from(EVERY),
    st.lists(st.sampled_from(["\n", "\r\n", "\r", "\x85", "\u2028", ""]), min_size=3, max_size=3),
    st.data(),
)
def test_an_edit_changes_the_replaced_bytes_only(
    case: tuple[str, str, bytes, str], ends: list[str], data: st.DataObject
) -> None:
    codec, _, whole, text = case
    mark = whole[: len(whole) - len(text.encode(codec))]
    try:
        before = mark + b"".join(
            f"{line}{end}".encode(codec) for line, end in zip(text.splitlines(), ends, strict=True)
        )
    except UnicodeEncodeError:
        return
    file = decode_file_text(before)
    assert file.encoding.encode(file.text) == before
    start = data.draw(st.integers(0, len(file.text) - 1))
    old = file.text[start : data.draw(st.integers(start + 1, len(file.text)))]
    if file.text.find(old) != file.text.rfind(old) or "\r" in old or "\n" in old:
        return
    after = file.encoding.encode(replace_exact_text("a", file.text, old, "[new]", replace_all=False).text)
    at = file.text.index(old)
    assert after == file.encoding.encode(file.text[:at] + "[new]" + file.text[at + len(old) :])
    if codec != "iso2022_jp":  # its shift sequences depend on what is around them
        own = file.encoding.codec
        head = len(file.encoding.encode(file.text[:at]))
        tail = len(old.encode(own, "surrogateescape"))
        assert after == before[:head] + "[new]".encode(own) + before[head + tail :]


@given(st.binary(max_size=300))
def test_any_bytes_survive_a_round_trip_through_text(data: bytes) -> None:
    file = decode_file_text(data)
    assert file.encoding.encode(file.text) == data


MARKS = pytest.mark.parametrize("codec", ["utf-8", "utf-16-le", "utf-16-be"])


def marked(text: str, codec: str) -> bytes:
    return f"\ufeff{text}".encode(codec)


@MARKS
def test_configuration_files_may_have_a_byte_order_mark(tmp_path: Path, codec: str) -> None:
    parameters = {"type": "object", "properties": dict[str, object]()}
    tool = {"name": "one", "description": "One.", "parameters": parameters}
    manifest = json.dumps({"llm": tool, "runtime": {"side_effect": "read"}}, indent=1)
    assert parse_manifest_text(marked(manifest, codec), "tool.json").id == "one"
    assert parse_agent_manifest(marked('description = "One."\n', codec), "agent.toml", "one").manifest.id == "one"
    path = tmp_path / "handrail.toml"
    assert parse_config_file(path, marked('[search]\r\nembedder = "none"\r\n', codec))[0] == {
        "search": {"embedder": "none"}
    }
    script = tmp_path / "script.toml"
    script.write_bytes(marked('[[turns]]\ntext = "hello"\n', codec))
    assert len(read_model_script(script).turns) == 1
    servers = tmp_path / ".mcp.json"
    servers.write_bytes(marked('{"mcpServers": {"one": {"command": "prog"}}}', codec))
    assert [one.name for one in import_mcp_servers(servers, tmp_path)] == ["one"]
    assert [one.name for one in read_foreign_server_file(servers, tmp_path).servers] == ["one"]
    assert parse_json_object(marked('{"resources": []}', codec)) == {"resources": []}


@every_encoding
async def test_a_search_finds_text_in_files_of_any_encoding_except_utf32(
    tmp_path: Path, codec: str, label: str, data: bytes, text: str
) -> None:
    line = text.split("\n")[1]
    async with model_session(tmp_path) as model:
        model.put("dir/a.txt", data)
        model.put("dir/b.txt", b"other\n")
        model.put("dir/c.bin", bytes(range(256)))
        for pattern in (line[-6:], line[0], "nothing"):
            answer = await model.call("grep", pattern=pattern, literal=True)
            if "UTF-32" in label:
                assert "UTF-32" in answer["not_searched"] and answer["matches"] == []
            elif pattern == "nothing":
                assert answer == {"matches": [], "searched_files": 3}
            else:
                assert {"path": "dir/a.txt", "line": 2, "text": line} in answer["matches"]
                assert answer.get("encodings", {"dir/a.txt": label}) == {"dir/a.txt": label}
        if "UTF-32" not in label:
            answer = await model.call("grep", pattern="^.", path="dir/a.txt", glob="*.txt")
            assert len(answer["matches"]) == 3


async def test_a_search_decodes_a_matching_line_in_another_encoding(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        model.put("a.txt", FRENCH.encode("latin-1"))
        answer = await model.call("grep", pattern="nom =")
        assert answer["matches"] == [{"path": "a.txt", "line": 2, "text": 'nom = "André"'}]
        assert answer["encodings"] == {"a.txt": "ISO-8859-1"}


async def test_a_write_that_replaces_an_invalid_byte_names_it_in_the_result(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", "é ü 日本\n".encode() + b"bad \xff here\n")
        shown = await model.show("a.txt")
        answer = await model.call("write", path="a.txt", content=shown.replace("here", "there"))
        assert "not text" in answer["invalid_bytes"]
        assert path.read_bytes() == "é ü 日本\nbad \ufffd there".encode()


@pytest.mark.parametrize(
    ("mark", "codec"), [(b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")]
)
async def test_a_file_with_only_a_byte_order_mark_is_read_and_written_as_empty(
    mark: bytes, codec: str, tmp_path: Path
) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", mark)
        assert await model.show("a.txt") == ""
        await model.call("write", path="a.txt", content="x\n")
        assert path.read_bytes() == mark + "x\n".encode(codec)
