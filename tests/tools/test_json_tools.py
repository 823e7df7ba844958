"""``json_read`` and ``json_write``: values by their path, and files that otherwise keep their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.tools.desk import BuiltinToolFixture, refused

from handrail.contract.errors import ToolError
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.tools.files.json_file_tools import extract_json_value, put_json_value, remove_json_value

pytestmark = pytest.mark.proves("T-03a")

CONFIG = """\
{
  "name": "demo",   "ratio": 1.10,
  "servers": [
    {"host": "a", "port": 1},
    {"host": "b"}
  ],
  "empty": {},
  "a/b": {"~": null}
}
"""


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("", json.loads(CONFIG)),
        ("/name", "demo"),
        ("/servers/1/host", "b"),
        ("/a~1b/~0", None),
        ("/empty", {}),
    ],
)
def test_a_json_pointer_returns_its_value(pointer: str, value: Any) -> None:
    assert extract_json_value(CONFIG, pointer) == value


@pytest.mark.parametrize(
    ("pointer", "said"),
    [
        ("name", "begins with /"),
        ("$.servers.0", "'/servers/0'"),
        ("/nam/x", "'name', 'ratio', 'servers'"),
        ("/servers/7/x", "has length 2"),
        ("/servers/01", "has length 2"),
        ("/name/x", "not an object or a list"),
    ],
)
def test_an_invalid_json_pointer_is_refused_with_a_specific_hint(pointer: str, said: str) -> None:
    with pytest.raises(ToolError) as caught:
        extract_json_value(CONFIG, pointer)
    assert said in caught.value.text and caught.value.kind == "invalid_input"


def test_overlong_numbers_are_refused_with_a_clear_error() -> None:
    for text, pointer, said in (
        ("[" + "1" * 5_000 + "]", "/0", "more than 4,300 digits"),
        ("[1]", "/" + "1" * 5_000, "has length 1"),
    ):
        with pytest.raises(ToolError, match=said):
            extract_json_value(text, pointer)


def test_a_json_change_keeps_every_other_character() -> None:
    assert put_json_value(CONFIG, "/servers/0/port", 8080) == CONFIG.replace('"port": 1', '"port": 8080')
    assert put_json_value(CONFIG, "/name", "é") == CONFIG.replace('"demo"', '"é"')
    assert put_json_value(CONFIG, "/servers/-", {"host": "c"}) == CONFIG.replace(
        '{"host": "b"}\n', '{"host": "b"},\n    {\n      "host": "c"\n    }\n'
    )
    assert remove_json_value(CONFIG, "/servers/0") == CONFIG.replace('{"host": "a", "port": 1},\n    ', "")
    assert remove_json_value(CONFIG, "/servers/1") == CONFIG.replace(',\n    {"host": "b"}', "")
    assert put_json_value("{}", "/a", [1]) == '{"a": [1]}'
    assert put_json_value('{\n\t"a": 1\n}', "/b", 2) == '{\n\t"a": 1,\n\t"b": 2\n}'


def test_a_value_put_into_a_text_with_windows_line_ends_has_windows_line_ends() -> None:
    windows = CONFIG.replace("\n", "\r\n")
    for pointer in ("/servers/-", "/servers/0/more", "/empty", "/empty/new", "/name", ""):
        value = {"host": "a\nb", "ports": [1, 2]}
        assert put_json_value(windows, pointer, value) == put_json_value(CONFIG, pointer, value).replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1e400, "b": 1}', "1e400, which is too large"),
        ('{"a": [-1e999], "b": 1}', "-1e999"),
        ('{"a": {"k": 1, "k": 2, "k": 3}, "b": 1}', "'k' occurs 3 times"),
    ],
)
def test_an_ambiguous_or_unrepresentable_value_is_refused_and_its_siblings_stay_usable(text: str, said: str) -> None:
    for pointer in ("", "/a"):
        with pytest.raises(ToolError, match=said) as caught:
            extract_json_value(text, pointer)
        assert caught.value.kind == "invalid_input"
    assert extract_json_value(text, "/b") == 1, "what stands beside it can be read"
    assert put_json_value(text, "/b", 2) == text.replace('"b": 1', '"b": 2'), "and changed, with all else as it is"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def _pointers(value: Any, at: str = "") -> list[str]:
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inner = [(str(k).replace("~", "~0").replace("/", "~1"), v) for k, v in value.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(value, list):
        inner = [(str(n), v) for n, v in enumerate(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [at, *(p for key, v in inner for p in _pointers(v, f"{at}/{key}"))]


@given(document=_JSON, value=_JSON, indent=st.sampled_from([None, 2, "\t"]), data=st.data())
def test_a_put_value_can_be_read_and_all_other_values_stay_unchanged(
    document: Any, value: Any, indent: Any, data: st.DataObject
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    pointers = _pointers(document)
    pointer = data.draw(st.sampled_from(pointers))
    after = put_json_value(text, pointer, value)
    assert extract_json_value(after, pointer) == value
    for other in pointers:
        if not other.startswith(pointer) and not pointer.startswith(other):
            assert extract_json_value(after, other) == extract_json_value(text, other)
    if pointer:
        less = remove_json_value(text, pointer)
        outer = pointer.rpartition("/")[0]
        assert len(extract_json_value(less, outer)) == len(extract_json_value(text, outer)) - 1


@given(st.text(max_size=40), st.text(alphabet="/~01-ab", max_size=8))
def test_invalid_json_text_is_refused(text: str, pointer: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        with pytest.raises(ToolError):
            extract_json_value(text, pointer)
    else:
        assume(False)


async def test_the_json_tools_read_and_change_a_file(desk: BuiltinToolFixture) -> None:
    path = desk.put("c.json", CONFIG)
    read = await desk.call("json_read", path="c.json", pointer="/servers/0")
    assert read == {"path": "c.json", "pointer": "/servers/0", "type": "object", "value": {"host": "a", "port": 1}}
    done = await desk.call("json_write", path="c.json", pointer="/servers/0/port", value=2)
    assert '+    {"host": "a", "port": 2},' in done["diff"] and not done["created"]
    assert path.read_text() == CONFIG.replace('"port": 1', '"port": 2')
    await desk.call("json_write", path="c.json", pointer="/empty", remove=True)
    assert "empty" not in path.read_text()
    new = await desk.call("json_write", path="new.json", value={"a": 1})
    assert new["created"] and json.loads((desk.workspace / "new.json").read_text()) == {"a": 1}


async def test_a_file_with_windows_line_ends_keeps_them_when_it_is_rewritten(desk: BuiltinToolFixture) -> None:
    path = desk.put("c.json", "")
    path.write_bytes(CONFIG.replace("\n", "\r\n").encode())
    await refused(desk.call("json_write", path="c.json", value={"a": 1}), "conflict")
    await desk.call("json_read", path="c.json")
    await desk.call("json_write", path="c.json", pointer="/servers/-", value={"host": "c"})
    assert path.read_bytes() == put_json_value(CONFIG, "/servers/-", {"host": "c"}).replace("\n", "\r\n").encode()
    await desk.call("json_write", path="c.json", value={"a": 1})
    assert path.read_bytes() == b'{\r\n  "a": 1\r\n}\r\n'


async def test_an_unread_or_invalid_json_file_is_not_changed(desk: BuiltinToolFixture) -> None:
    desk.put("c.json", CONFIG)
    await refused(desk.call("json_write", path="c.json", pointer="/name", value=1), "conflict")
    path = desk.put("bad.json", '{"a": 1,\n "b": }')
    await refused(desk.call("json_read", path="bad.json"), "invalid_input", "line 2, column 7")
    await desk.call("read", path="bad.json")
    await refused(desk.call("json_write", path="bad.json", pointer="/a", value=1), "invalid_input", "line 2")
    await refused(desk.call("json_write", path="bad.json", value=1, remove=True), "invalid_input", "not both")
    assert path.read_text() == '{"a": 1,\n "b": }'
    desk.put("nan.json", '{"a": NaN}')
    await refused(desk.call("json_read", path="nan.json"), "invalid_input", "NaN")
    desk.put("deep.json", "[" * 200_000)
    await refused(desk.call("json_read", path="deep.json"), "invalid_input", "too deeply")
    desk.put("twice.json", '{"a": 1, "a": 2}')
    await refused(desk.call("json_read", path="twice.json", pointer="/a"), "invalid_input", "2 times")


# ── multi_edit and tree ──────────────────────────────────────────────────────────────────────────


async def test_edits_apply_all_or_none_or_partially_according_to_the_mode(desk: BuiltinToolFixture) -> None:
    edits = [{"old": "one", "new": "1"}, {"old": "none", "new": "x"}, {"old": "two", "new": "2"}]
    for mode, after, failed in (("strict", "one two\n", None), ("partial", "1 two\n", 1), ("best_effort", "1 2\n", 0)):
        path = desk.put("a.txt", "one two\n")
        await desk.call("read", path="a.txt")
        if failed is None:
            await refused(
                desk.call("multi_edit", path="a.txt", edits=edits), "invalid_input", "Edit 2: `old` was not found in"
            )
        else:
            done = await desk.call("multi_edit", path="a.txt", edits=edits, mode=mode)
            assert [one["edit"] for one in done["failed"]] == [2] and done["not_applied"] == failed
        assert path.read_text() == after


async def test_each_edit_applies_to_the_result_of_the_edits_before_it(desk: BuiltinToolFixture) -> None:
    path = desk.put("a.txt", "a\nb\n")
    await desk.call("read", path="a.txt")
    done = await desk.call("multi_edit", path="a.txt", edits=[{"old": "a", "new": "c"}, {"old": "c\nb", "new": "d"}])
    assert path.read_text() == "d\n" and done["replacements"] == 2 and "failed" not in done


async def test_a_tree_shows_folders_with_file_counts_and_leaves_out_ignored_files(desk: BuiltinToolFixture) -> None:
    for name in ("src/a/one.py", "src/a/two.py", "src/b.py", "README.md", ".hidden/x", "out/big.bin"):
        desk.put(name, "x")
    desk.put(".ignore", "out/\n")
    shown = await desk.call("tree", depth=2)
    assert shown["tree"] == "src/ (3 files)\n  a/ (2 files)\n  b.py\nREADME.md" and shown["files"] == 4
    assert (await desk.call("tree", path="src", depth=5))["tree"] == "a/ (2 files)\n  one.py\n  two.py\nb.py"
    assert ".hidden/ (1 file)" in (await desk.call("tree", hidden=True))["tree"]
    cut = await desk.call("tree", max_entries=2)
    assert cut["tree"].count("\n") == 1 and "The tree is incomplete" in cut["has_more"]


# ── python ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_python_tool_runs_a_program_in_the_sandbox_only_when_allowed(tmp_path: Path) -> None:
    code = "import os\nopen('made.txt', 'w').write('x')\nprint(6 * 7)\ntry: open('/etc/made', 'w')\nexcept OSError as e: print(type(e).__name__)"
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(headless=True)
        refused_ = await session.call("python", {"code": code})
        assert refused_.error_kind == "denied" and not (tmp_path / "ws" / "made.txt").exists()
        session.add_rules("allow python")
        done = await session.call("python", {"code": code})
        assert done.data["exit_code"] == 0 and done.data["output"].split()[0] == "42", done
        assert len(done.data["output"].split()) == 2, "a file outside was written"
        failed = await session.call("python", {"code": "raise SystemExit(3)"})
        assert failed.ok and failed.data["exit_code"] == 3
        session.add_rules("deny shell.run python3 *")
        assert (await session.call("python", {"code": "print(1)"})).error_kind == "denied"
