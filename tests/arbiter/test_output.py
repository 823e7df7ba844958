"""Outputs for the frontend, the model and the log: truncation, output files and artifacts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.arbiter.shaping import METADATA, ShaperFixture, logged

from handrail.arbiter.output.audience_views import make_audience_results
from handrail.arbiter.output.shaper import AudienceOutputs
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.tool.spec import ToolSpec


@pytest.mark.proves("K-07")
@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", [1, "a"], {"a": [1, {"b": "c"}]}, {"a": None}])
async def test_a_plain_value_is_the_data_for_the_model_and_the_caller(room: ShaperFixture, value: Any) -> None:
    shaped = await room.shape(value)
    assert shaped.result.data == value and shaped.model is shaped.result
    assert shaped.result.metadata == METADATA
    assert logged(shaped) == shaped.result.to_dict()
    assert not list(room.output.iterdir())


async def test_later_changes_to_a_returned_value_do_not_affect_the_record(room: ShaperFixture) -> None:
    values: list[dict[str, Any]] = [{"a": [1]}, {"a": [1], "b": None}, {"a": [1], "b": (2,)}]
    for value in values:
        shaped = await room.shape(value)
        before = logged(shaped)
        value["a"].append(2)
        shaped.result.data["has_more"] = True
        assert logged(shaped) == before and shaped.result.data["a"] == [1]


@pytest.mark.proves("K-07")
async def test_a_result_keeps_its_type_and_its_partial_data_and_metadata(room: ShaperFixture) -> None:
    shaped = await room.shape(Result.error("conflict", "changed since", {"a": 1}, path="x", duration_ms=99))
    result = shaped.result
    assert (result.type, result.error_text, result.data) == ("error", "changed since", {"a": 1})
    assert result.metadata == {"path": "x", "error_kind": "conflict", **METADATA}
    assert logged(shaped) == result.to_dict()


async def test_an_error_of_an_unknown_kind_becomes_failed(room: ShaperFixture) -> None:
    shaped = await room.shape(Result("error", None, None, {"error_kind": "strange"}))
    assert (shaped.result.error_kind, shaped.result.error_text) == ("failed", "`tool` failed.")


@dataclasses.dataclass
class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


@pytest.mark.proves("K-07")
async def test_no_return_value_of_a_tool_raises_an_exception(room: ShaperFixture) -> None:
    ring: list[Any] = []
    ring.append(ring)
    for value in (
        ring,
        Hostile(),
        float("nan"),
        {"a": float("nan"), 2: {1}},
        "\udc80",
        10**30,
        object(),
        range(10**18),
    ):
        shaped = await room.shape(value)
        assert shaped.result.metadata.get("conversions") or not shaped.result.ok
        assert logged(shaped) == shaped.result.to_dict()
    assert (await room.shape(range(10**18))).result.error_kind == "limit"


@pytest.mark.proves("O-01")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text('aé€😀\n"\\', max_size=400), limit=st.integers(1, 300), key=st.sampled_from([None, "output"]))
async def test_a_long_text_is_truncated_between_characters_and_its_output_file_is_complete(
    new_room: Callable[..., ShaperFixture], text: str, limit: int, key: str | None
) -> None:
    room = new_room()
    beside: dict[str, Any] = {} if key is None else {"n": 1}
    shaped = await room.shape(text if key is None else {key: text, **beside}, max_output=limit)
    room.shaper.close()
    result, size = shaped.result, len(text.encode())
    taken = len(orjson.dumps(beside)) if beside else 0
    if not result.metadata.get("truncated"):
        assert result.data == (text if key is None else {key: text, **beside})
        assert len(orjson.dumps(result.data)) <= limit or size + taken <= limit
        return
    if beside and taken > limit // 4:
        assert result.metadata["truncated_as"] == "JSON text"
        return
    head, tail = result.data["head"], result.data["tail"]
    assert result.data == {"head": head, "tail": tail, **beside}
    kept = len(head.encode()) + len(tail.encode())
    assert limit - taken - 6 <= kept <= limit - taken
    assert room.sidecar(shaped) == text and text.startswith(head) and text.endswith(tail)
    assert result.metadata["output_bytes"] == size
    assert result.metadata["omitted_bytes"] == size - kept > 0
    assert result.metadata["omitted_at"] == len(head.encode())


@pytest.mark.proves("O-01")
async def test_an_output_that_fits_without_its_json_escapes_is_not_truncated(room: ShaperFixture) -> None:
    text = "\n" * 100
    assert (await room.shape(text, max_output=100)).result.data == text
    assert (await room.shape({"output": text, "exit_code": 0}, max_output=120)).result.data["output"] == text


entries = st.one_of(
    st.lists(st.text("ab\n:é", max_size=12), max_size=60),
    st.lists(
        st.fixed_dictionaries(
            {"path": st.text("ab/", min_size=1), "line": st.integers(1, 9), "text": st.text("x :é\n")}
        ),
        max_size=40,
    ),
    st.lists(st.integers(-(2**53), 2**53) | st.lists(st.booleans()), max_size=60),
)


@pytest.mark.proves("O-01")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=entries, most=st.integers(1, 20), limit=st.integers(150, 600), key=st.sampled_from([None, "matches"]))
async def test_a_long_list_is_truncated_between_entries_and_its_output_file_has_every_entry(
    new_room: Callable[..., ShaperFixture], items: list[Any], most: int, limit: int, key: str | None
) -> None:
    room = new_room()
    beside: dict[str, Any] = {} if key is None else {"more": False}
    value = items if key is None else {key: items, **beside}
    shaped = await room.shape(value, max_output=limit, max_entries=most)
    room.shaper.close()
    result = shaped.result
    if not result.metadata.get("truncated"):
        assert result.data == value and len(items) <= most
        return
    head = result.data["head"]
    if isinstance(head, str):
        assert "omitted_entries" not in result.metadata
        return
    assert result.data == {"head": head, **beside}
    assert head == items[: len(head)] and 0 < len(head) <= most
    assert len(orjson.dumps(head)) <= limit
    assert result.metadata["entries"] == len(items)
    assert result.metadata["omitted_entries"] == len(items) - len(head) > 0
    lines = room.sidecar(shaped).removesuffix("\n").split("\n")
    assert len(lines) == len(items)
    for line, item in zip(lines, items, strict=True):
        if isinstance(item, str) and "\n" not in item:
            assert line == item
        elif isinstance(item, dict) and "\n" not in item["text"]:
            assert line == f"{item['path']}:{item['line']}:{item['text']}"
        else:
            assert orjson.loads(line) == item


@pytest.mark.proves("O-01")
async def test_a_list_one_entry_above_the_limit_is_truncated(room: ShaperFixture) -> None:
    paths = [f"src/{n}.py" for n in range(1001)]
    assert (await room.shape({"paths": paths[:1000]}, max_entries=1000)).result.data == {"paths": paths[:1000]}
    shaped = await room.shape({"paths": paths, "skipped": 2}, max_entries=1000)
    assert shaped.result.data == {"head": paths[:1000], "skipped": 2}
    assert shaped.result.metadata["truncated_as"] == "entries of 'paths'"
    nested: Any = {"paths": tuple(paths)}
    assert (await room.shape(nested, max_entries=1000)).result.metadata["omitted_entries"] == 1


@pytest.mark.proves("O-01")
@pytest.mark.parametrize(
    "value",
    [
        {"a": "x" * 300, "b": "y" * 300},
        {"head": "small", "body": "x" * 600},
        [{"n": n, "é": "€"} for n in range(100)],
        {"deep": {"er": ["😀" * 50] * 20}},
        [["x" * 600], [1]],
    ],
)
async def test_other_large_values_are_truncated_as_json_text(room: ShaperFixture, value: object) -> None:
    shaped = await room.shape(value, max_output=500)
    head, whole = shaped.result.data["head"], room.sidecar(shaped)
    assert list(shaped.result.data) == ["head"] and shaped.result.metadata["truncated_as"] == "JSON text"
    assert orjson.loads(whole) == value
    assert whole.startswith(head) and 497 <= len(head.encode()) <= 500
    assert shaped.result.metadata["output_bytes"] == len(whole.encode())


@pytest.mark.proves("O-02")
async def test_a_long_error_text_is_truncated_too(room: ShaperFixture) -> None:
    text = "é" * 400
    shaped = await room.shape(Result.error("failed", text, {"output": "x" * 900}), max_output=301)
    metadata = shaped.result.metadata
    assert shaped.result.error_text == "é" * 150
    assert (metadata["error_bytes"], metadata["error_omitted_bytes"]) == (800, 500)
    assert Path(metadata["error_path"]).read_text() == text
    assert shaped.result.data == {"head": "x" * 151, "tail": "x" * 150} and room.sidecar(shaped) == "x" * 900


@pytest.mark.proves("O-02")
async def test_oversized_metadata_of_a_tool_is_dropped(room: ShaperFixture) -> None:
    shaped = await room.shape(Result.output(1, huge="x" * 20_000, small="y", odd=float("nan")))
    assert shaped.result.metadata == {"small": "y", "odd": "NaN", "dropped_metadata": ["huge"], **METADATA}


@pytest.mark.proves("O-03")
async def test_binary_parts_become_artifacts(room: ShaperFixture) -> None:
    image = b"\x89PNG\r\n" + bytes(range(256)) * 1000
    shaped = await room.shape({"image": Blob(image, "image/png"), "caption": "a cat"})
    data = shaped.result.data
    assert data == {
        "image": {"artifact": data["image"]["artifact"], "media_type": "image/png", "bytes": len(image)},
        "caption": "a cat",
    }
    stored = room.artifacts.get(data["image"]["artifact"])
    assert (stored.data, stored.media_type) == (image, "image/png")
    assert not shaped.result.metadata.get("truncated"), "what is stored does not count against the limit"
    raw = await room.shape(b"\0\1")
    assert room.artifacts.get(raw.result.data["artifact"]).data == b"\0\1"


async def test_result_metadata_lists_only_artifacts_that_the_kernel_stored(room: ShaperFixture) -> None:
    made_up = {"artifact": "sha256:" + "0" * 64, "media_type": "image/png"}
    shaped = await room.shape(Result.output([Blob(b"a", "image/png"), made_up], artifacts=[made_up["artifact"]]))
    ref = shaped.result.data[0]["artifact"]
    for metadata in (shaped.result.metadata, shaped.model.metadata, logged(shaped)["metadata"]):
        assert metadata["artifacts"] == [ref]
    assert "artifacts" not in (await room.shape([made_up])).result.metadata
    cut = await room.shape([Blob(bytes([n]), "image/png") for n in range(100)], max_output=1_000)
    assert "artifacts" not in cut.result.metadata or len(cut.result.metadata["artifacts"]) < 10
    masked = await room.shape({"picture": Blob(b"b", "image/png")}, prompt_mask=True)
    assert "artifacts" not in masked.model.metadata


@pytest.mark.proves("O-06")
@pytest.mark.parametrize(
    ("exposure", "at_face", "by_model"),
    [("both", True, True), ("core", False, True), ("edge", True, False), ("none", False, False)],
)
@pytest.mark.parametrize("size", [5, 500])
async def test_exposure_decides_who_sees_the_output(
    room: ShaperFixture, exposure: str, at_face: bool, by_model: bool, size: int
) -> None:
    text = "private " * size
    given = Result.output({"output": text}, detail="private detail")
    shaped = await room.shape(given, exposure=exposure, max_output=1000)
    for view, seen in ((shaped.result, at_face), (shaped.model, by_model)):
        assert (b"private" in orjson.dumps(view.to_dict())) is seen
        assert ("output_path" in view.metadata) is (seen and size == 500)
        assert view.ok and view.metadata["duration_ms"] == 1.5
        assert view.metadata.get("hidden_by") == (None if seen else f"exposure: {exposure}")
    assert "private" in str(logged(shaped)["data"])


@pytest.mark.proves("O-06")
async def test_an_error_text_reaches_the_model_but_its_private_data_does_not(room: ShaperFixture) -> None:
    shaped = await room.shape(Result.error("failed", "no such city", {"rows": ["private"]}), exposure="edge")
    assert shaped.result.data == {"rows": ["private"]}
    assert (shaped.model.error_text, shaped.model.error_kind, shaped.model.data) == ("no such city", "failed", None)


@pytest.mark.proves("O-06")
async def test_a_masked_output_leaves_only_a_summary_and_a_reference_for_the_model(room: ShaperFixture) -> None:
    rows = ["private"] * 5
    shaped = await room.shape({"summary": "5 rows", "rows": rows}, prompt_mask=True)
    reference = shaped.result.metadata["artifact"]
    assert shaped.result.data["rows"] == rows == logged(shaped)["data"]["rows"]
    assert shaped.model.data == {"summary": "5 rows", "artifact": reference}
    assert orjson.loads(room.artifacts.get(reference).data) == {"summary": "5 rows", "rows": rows}

    shaped = await room.shape(["private"] * 500, prompt_mask=True, max_output=1000)
    assert b"private" not in orjson.dumps(shaped.model.to_dict())
    assert shaped.model.metadata["output_path"] == shaped.result.metadata["output_path"]
    assert "kept out of the prompt" in shaped.model.data["summary"]

    image = await room.shape(Blob(b"image", "image/png"), prompt_mask=True)
    assert image.model.data["artifact"] == image.result.data["artifact"]
    assert (await room.shape(None, prompt_mask=True)).model.data is None


@pytest.mark.proves("O-06")
async def test_a_recorded_result_gives_the_caller_and_the_model_the_original_views(room: ShaperFixture) -> None:
    spec = ToolSpec("tool", "…", prompt_mask=True)
    shaped = await room.shaper.shape_output(spec, {"rows": [1]}, METADATA, call_id="c", session_id="s")
    assert make_audience_results(spec, Result.from_dict(logged(shaped))) == (shaped.result, shaped.model)


def test_only_small_unrestricted_outputs_take_the_fast_path(room: ShaperFixture) -> None:
    def small(value: object, **spec: Any) -> AudienceOutputs | None:
        return room.shaper.try_shape_small_output(ToolSpec("tool", "…", **spec), value, {})

    assert small({"a": 1}) and small("text") and small(3) and small(None) and small([1, "a"])
    assert small({"a": None, "b": "text", "c": None})
    for value in (
        {"a": float("nan")},
        {"a": None, "b": float("inf")},
        {"a": None, "b": [float("nan")]},
        {"a": None, "b": "null"},
        {1: 2},
        {"a": {1}},
        (1,),
        "x" * 70_000,
        {"a": "x" * 70_000},
        b"",
        object(),
        "\udc80",
        2**70,
    ):
        assert small(value) is None
    assert small({"a": 1}, exposure="edge") is None and small({"a": 1}, prompt_mask=True) is None
    assert small([1] * 11, max_entries=10) is None and small([1] * 10, max_entries=10)


async def test_a_closed_output_shaper_still_produces_results(room: ShaperFixture) -> None:
    room.shaper.close()
    assert (await room.shape("x" * 20, max_output=10)).result.metadata["output_path"]
