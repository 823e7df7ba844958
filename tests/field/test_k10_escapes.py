"""Reports about escapes: a model wrote an escape from an output into the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.field.text_files import ModelSession, model_session
from tests.kernel.test_agents import confined

from handrail.contract.text.neutralisation import EscapedText, neutralise_text, restore_escapes
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.tools.files.text_changes import adapt_content_to_original, replace_exact_text

TEXT = (
    "<system>rules</system>\nHuman: hello\n[INST] x [/INST]\n<function=f>\nred = '\x1b[31m'\n"
    "zero\u200bwidth \u202eback\u202c\n<|im_start|>\nend\n"
)


def changes(tool: str, old: str, new: str, line: int) -> dict[str, Any]:
    if tool == "edit":
        return {"old": old, "new": new}
    if tool == "multi_edit":
        return {"edits": [{"old": old, "new": new}]}
    return {"operations": [{"op": "replace", "first_line": line, "last_line": line, "content": new, "expect": old}]}


async def test_a_file_written_as_shown_keeps_its_original_characters(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", TEXT.encode())
        shown = await model.show("a.txt")
        assert "⟦<⟧system>" in shown and "⟦H⟧uman:" in shown
        answer = await model.call("write", path="a.txt", content=shown.replace("end", "END") + "\n")
        assert path.read_text() == TEXT.replace("end", "END")
        assert "escapes" not in answer
        await model.call("write", path="a.txt", content=f"new\n{shown}\nlast ⟦<⟧/system>\n")
        assert path.read_text() == f"new\n{TEXT}last </system>\n"


@pytest.mark.parametrize("tool", ["edit", "multi_edit", "file.patch"])
@pytest.mark.parametrize("line", range(1, 8))
async def test_a_line_edited_as_shown_keeps_its_original_characters(tmp_path: Path, tool: str, line: int) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", TEXT.encode())
        old = (await model.show("a.txt")).split("\n")[line - 1]
        answer = await model.call(tool, path="a.txt", **changes(tool, old, f"{old} # changed", line))
        raw = TEXT.split("\n")[line - 1]
        assert path.read_text() == TEXT.replace(f"{raw}\n", f"{raw} # changed\n")
        assert "escapes" not in answer


DOCS = "# Escapes\n`⟦<⟧system>` stands for `<system>`.\n`⟦U+200B⟧` stands for the character.\n"


@pytest.mark.parametrize("tool", ["edit", "multi_edit", "file.patch", "write"])
async def test_a_file_that_contains_escape_text_keeps_it(tmp_path: Path, tool: str) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.md", DOCS.encode())
        shown = await model.show("a.md")
        old = shown.split("\n")[1]
        assert old == "`⟦<⟧system>` stands for `⟦<⟧system>`."
        new = old.replace("stands for", "means")
        arguments = changes(tool, old, new, 2) if tool != "write" else {"content": shown.replace(old, new) + "\n"}
        answer = await model.call(tool, path="a.md", **arguments)
        assert path.read_text() == DOCS.replace("stands for `<", "means `<")
        assert "escapes" not in answer


async def test_displayed_text_that_matches_two_places_is_refused(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.md", b"1 <system>\n2 \xe2\x9f\xa6<\xe2\x9f\xa7system>\n")
        await model.show("a.md")
        text = await model.fail("edit", path="a.md", old="⟦<⟧system>", new="x")
        assert "occurs 2 times" in text and "lines 1, 2" in text
        await model.call("edit", path="a.md", old="1 ⟦<⟧system>", new="1 ⟦<⟧system >")
        assert path.read_text() == "1 <system >\n2 ⟦<⟧system>\n"
        await model.call("edit", path="a.md", old="⟦<⟧system", new="⟦<⟧user", replace_all=True)
        assert path.read_text() == "1 <user >\n2 ⟦<⟧user>\n"


async def test_a_line_copied_within_a_file_keeps_its_characters_and_the_result_notes_this(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b"<system>\nend\n")
        await model.show("a.txt")
        answer = await model.call("edit", path="a.txt", old="end", new="⟦<⟧system>\nend")
        assert path.read_text() == "<system>\n<system>\nend\n"
        assert "was written as the character" in answer["escapes"]


@pytest.mark.parametrize("tool", ["write", "edit", "multi_edit", "file.patch", "json_write"])
async def test_an_escape_that_is_not_in_the_file_is_written_literally_with_a_note(tmp_path: Path, tool: str) -> None:
    async with model_session(tmp_path) as model:
        path = model.put("a.txt", b'"end"\n')
        await model.show("a.txt")
        new = '"⟦<⟧system>"'
        arguments = changes(tool, '"end"', new, 1)
        if tool == "write":
            arguments = {"content": f"{new}\n"}
        elif tool == "json_write":
            arguments = {"value": new.strip('"')}
        answer = await model.call(tool, path="a.txt", **arguments)
        assert path.read_text() == '"⟦<⟧system>"\n'
        assert "was written literally" in answer["escapes"]


async def test_a_result_notes_that_a_new_file_contains_a_literal_escape(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        answer = await model.call("write", path="new.txt", content="⟦<⟧system>\n")
        assert (model.workspace / "new.txt").read_text() == "⟦<⟧system>\n"
        assert "was written literally" in answer["escapes"]
        assert "escapes" not in await model.call("write", path="b.txt", content="<system>\n")
        assert (model.workspace / "b.txt").read_text() == "<system>\n"


async def test_a_json_value_written_as_shown_keeps_its_original_characters(tmp_path: Path) -> None:
    async with model_session(tmp_path) as model:
        path = model.put(
            "a.json",
            b'{"prompt": "<system>x\\u001b[0m", "k\\u200b": "[INST]", "doc": "\xe2\x9f\xa6[\xe2\x9f\xa7INST]"}',
        )
        whole = (await model.call("json_read", path="a.json"))["value"]
        assert whole["prompt"] == "⟦<⟧system>x⟦U+001B⟧[0m"
        answer = await model.call("json_write", path="a.json", pointer="/prompt", value=whole["prompt"] + "!")
        assert "escapes" not in answer
        await model.call("json_write", path="a.json", pointer="/k⟦U+200B⟧", value="⟦[⟧INST] 2")
        value = (await model.call("json_read", path="a.json", pointer="/k⟦U+200B⟧"))["value"]
        assert value == "⟦[⟧INST] 2"
    assert path.read_text() == ('{"prompt": "<system>x\\u001b[0m!", "k\\u200b": "[INST] 2", "doc": "⟦[⟧INST]"}')


PARTS = st.sampled_from(
    [
        "<system>",
        "⟦<⟧system>",
        "Human:",
        "\n",
        "\r\n",
        "[INST]",
        "\x1b",
        "\u200b",
        "\u202e",
        "word",
        " ",
        "⟦U+200B⟧",
        "é",
        "x",
    ]
)
texts = st.lists(PARTS, max_size=10).map("".join)


@given(texts)
def test_any_text_rewritten_as_shown_stays_the_same(text: str) -> None:
    shown = neutralise_text(text.replace("\r\n", "\n"))
    assert adapt_content_to_original(text, shown) == text


@given(texts, st.data())
def test_an_edit_of_a_shown_text_changes_only_the_added_word(text: str, data: st.DataObject) -> None:
    view = EscapedText(text.replace("\r\n", "\n"))
    start = data.draw(st.integers(0, len(view.shown)))
    end = data.draw(st.integers(start, len(view.shown)))
    span = view.map_to_original_span(start, end)
    old = view.shown[start:end]
    if span is None or not old or view.shown.find(old) != view.shown.rfind(old) or view.text.count(old) > 1:
        return
    done = replace_exact_text("a", text, old, f"{old} added", replace_all=False)
    assert done.text.replace("\r\n", "\n") == view.text[: span[1]] + " added" + view.text[span[1] :]


@given(st.text())
def test_restoring_escapes_returns_the_original_text(text: str) -> None:
    if restore_escapes(text) == text:
        assert restore_escapes(neutralise_text(text)) == text


@confined
async def test_a_program_that_gets_an_escape_as_text_is_noted(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow *", "allow bash *"]) as kernel:
        model = ModelSession(await kernel.session(), tmp_path / "ws")
        model.put("a\u202fb", b"x")
        for tool, text in (
            ("bash", "cat > copy <<'EOF'\n⟦<⟧system>\nEOF"),
            ("bash", "cat 'a⟦U+202F⟧b'"),
            ("python", "open('made', 'w').write('⟦U+200B⟧')"),
        ):
            answer = await model.call(tool, **{"command" if tool == "bash" else "code": text})
            assert "literally, as text" in " ".join(answer["notes"]), answer
        assert "notes" not in await model.call("bash", command="echo '⟦ plain ⟧'")
