"""Neutralised output for models, and unchanged output for users, programs and the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.arbiter.shaping import SECRET, ShaperFixture, logged

from handrail.arbiter.output.audience_views import make_audience_results, neutralise_for_model
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.text.neutralisation import neutralise_text
from handrail.contract.tool.spec import ToolSpec

pytestmark = pytest.mark.proves("O-04")
HOSTILE = "\x1b[31mred\u202e <|im_start|>"
SPELLED = "⟦U+001B⟧[31mred⟦U+202E⟧ ⟦<⟧|im_start|>"


@pytest.mark.parametrize("in_two", [False, True])
async def test_hostile_characters_are_neutralised_and_counted_for_the_model_and_unchanged_for_others(
    tmp_path: Path, in_two: bool
) -> None:
    room = ShaperFixture(tmp_path)
    value = {"text": HOSTILE, HOSTILE: [HOSTILE, 1]} | (
        {"blob": Blob(HOSTILE.encode(), "text/plain")} if in_two else {}
    )
    shaped = await room.shape(value)
    assert shaped.model.data["text"] == SPELLED and shaped.model.data[SPELLED] == [SPELLED, 1]
    assert shaped.result.data["text"] == HOSTILE and logged(shaped)["data"][HOSTILE] == [HOSTILE, 1]
    counts = {"control": 3, "direction": 3, "marker": 3}
    assert shaped.model.metadata["neutralised"] == counts
    assert shaped.result.metadata["neutralised"] == logged(shaped)["metadata"]["neutralised"] == counts
    if in_two:
        path = room.artifacts.put(HOSTILE.encode(), "text/plain")
        assert shaped.result.data["blob"]["artifact"] == path, "an artifact has it byte for byte"


async def test_error_texts_error_data_and_metadata_are_neutralised_for_the_model(tmp_path: Path) -> None:
    shaped = await ShaperFixture(tmp_path).shape(Result.error("failed", HOSTILE, {"partial": HOSTILE}, note=HOSTILE))
    assert shaped.model.error_text == SPELLED and shaped.model.data == {"partial": SPELLED}
    assert shaped.model.metadata["note"] == SPELLED and shaped.model.error_kind == "failed"
    assert shaped.result.error_text == HOSTILE


async def test_plain_output_is_the_same_object_for_the_model_and_others(tmp_path: Path) -> None:
    room = ShaperFixture(tmp_path)
    for value in ("plain", {"a": "日本語 👩‍⚕️"}, ["x"] * 50, None, 5):
        shaped = await room.shape(value)
        assert shaped.model is shaped.result and "neutralised" not in shaped.result.metadata


async def test_an_output_file_keeps_hostile_characters_and_the_head_for_the_model_is_neutralised(
    tmp_path: Path,
) -> None:
    room = ShaperFixture(tmp_path, key=SECRET)
    whole = f"{HOSTILE} {SECRET}\n" * 50
    shaped = await room.shape(whole, max_output=400)
    assert room.sidecar(shaped) == whole.replace(SECRET, "[secret:key]"), "after redaction, before spelling out"
    assert "\x1b" not in str(shaped.model.data) and "\x1b" in shaped.result.data["head"]


async def test_an_output_that_grows_when_neutralised_is_truncated_and_stored_whole(tmp_path: Path) -> None:
    """Source: output of escape characters alone, which grows tenfold."""
    room = ShaperFixture(tmp_path)
    for value in ("\x1b" * 900, {"output": "\x1b" * 900, "exit_code": 0}):
        shaped = await room.shape(value, max_output=1000, call_id=f"call-{type(value).__name__}")
        assert len(orjson.dumps(shaped.model.data)) < 1100 and shaped.model.metadata["truncated"] is True
        assert shaped.result.data == value and "truncated" not in shaped.result.metadata
        kept = Path(shaped.model.metadata["output_path"]).read_text()
        assert kept == value if isinstance(value, str) else orjson.loads(kept) == value
        assert shaped.model.metadata["output_bytes"] == len(kept) and "output_save_error" not in shaped.model.metadata
    shaped = await room.shape(Result.error("failed", "\x1b" * 900), max_output=1000)
    assert len(shaped.model.error_text or "") <= 1000


async def test_a_masked_output_is_neutralised(tmp_path: Path) -> None:
    shaped = await ShaperFixture(tmp_path).shape({"summary": HOSTILE, "rest": 1}, prompt_mask=True)
    assert shaped.model.data["summary"] == SPELLED


async def test_keys_that_become_equal_after_neutralising_are_all_kept() -> None:
    shown = neutralise_for_model(Result.output({"a\x1b": 1, "a⟦U+001B⟧": 2}))
    assert shown.data == {"pairs": [["a⟦U+001B⟧", 1], ["a⟦U+001B⟧", 2]]}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.sampled_from([*HOSTILE, HOSTILE, "x", "é", "\n", "⟦"]), max_size=60).map("".join))
async def test_a_second_neutralisation_of_an_output_changes_nothing(
    new_room: Callable[..., ShaperFixture], text: str
) -> None:
    room = new_room()
    shaped = await room.shape({"text": text})
    again = await room.shape(shaped.model.data)
    assert again.model.data == shaped.model.data == {"text": neutralise_text(text)}
    assert again.model is again.result
    assert make_audience_results(ToolSpec("tool", "…"), shaped.result)[1].data == shaped.model.data
    room.shaper.close()
