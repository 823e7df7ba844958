"""Outputs as the face, the model and the log get them: cut with the whole kept, without secrets, whatever comes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handrail.arbiter import sidecar
from handrail.arbiter.output import Shaped, Shaper
from handrail.arbiter.redaction import Redactor
from handrail.arbiter.sidecar import file_name
from handrail.contract.result import Blob, Result
from handrail.contract.spec import ToolSpec
from handrail.record.artifacts import Artifacts

SECRET = 'hunter2-"quoted"\\é'
METADATA = {"duration_ms": 1.5, "confined_by": "operator"}


class Room:
    """One kernel's shaper with real folders."""

    def __init__(self, folder: Path, **secrets: str) -> None:
        self.output = folder / "output"
        self.output.mkdir()
        (folder / "artifacts").mkdir()
        self.artifacts = Artifacts(folder / "artifacts")
        self.shaper = Shaper(Redactor(secrets), self.artifacts, lambda session: self.output)

    async def shape(self, value: object, call_id: str = "call-1", **spec: Any) -> Shaped:
        """As the arbiter does it: the quick way first."""
        tool = ToolSpec("tool", "…", **spec)
        small = self.shaper.shape_small(tool, value, dict(METADATA))
        return small or await self.shaper.shape(tool, value, METADATA, call_id=call_id, session_id="s")

    def sidecar(self, shaped: Shaped) -> str:
        path = Path(shaped.result.metadata["output_path"])
        assert path.parent == self.output
        return path.read_bytes().decode()

    def everything_written(self, shaped: Shaped) -> bytes:
        files = [path.read_bytes() for path in (self.output.parent).rglob("*") if path.is_file()]
        names = [str(path).encode() for path in self.output.parent.rglob("*")]
        texts = [orjson.dumps(part) for part in (shaped.result.to_dict(), shaped.model.to_dict(), shaped.logged)]
        return b"\0".join([*files, *names, *texts])


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


@pytest.fixture
def new_room(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Room]:
    def new(**secrets: str) -> Room:
        return Room(tmp_path_factory.mktemp("room"), **secrets)

    return new


def logged(shaped: Shaped) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(shaped.logged))["result"]


# ── the envelope ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("K-07")
@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", [1, "a"], {"a": [1, {"b": "c"}]}, {"a": None}])
async def test_a_plain_value_is_the_data_for_everybody(room: Room, value: Any) -> None:
    shaped = await room.shape(value)
    assert shaped.result.data == value and shaped.model is shaped.result
    assert shaped.result.metadata == METADATA
    assert logged(shaped) == shaped.result.to_dict()
    assert not list(room.output.iterdir())


async def test_what_the_tool_does_to_its_value_later_changes_nothing(room: Room) -> None:
    values: list[dict[str, Any]] = [{"a": [1]}, {"a": [1], "b": None}, {"a": [1], "b": (2,)}]
    for value in values:
        shaped = await room.shape(value)
        before = logged(shaped)
        value["a"].append(2)
        shaped.result.data["more"] = True
        assert logged(shaped) == before and shaped.result.data["a"] == [1]


@pytest.mark.proves("K-07")
async def test_a_whole_result_keeps_its_type_its_partial_data_and_its_metadata(room: Room) -> None:
    shaped = await room.shape(Result.error("conflict", "changed since", {"a": 1}, path="x", duration_ms=99))
    result = shaped.result
    assert (result.type, result.error_text, result.data) == ("error", "changed since", {"a": 1})
    assert result.metadata == {"path": "x", "error_kind": "conflict", **METADATA}
    assert logged(shaped) == result.to_dict()


async def test_an_error_of_no_known_kind_is_failed(room: Room) -> None:
    shaped = await room.shape(Result("error", None, None, {"error_kind": "strange"}))
    assert (shaped.result.error_kind, shaped.result.error_text) == ("failed", "tool failed")


@dataclasses.dataclass
class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


@pytest.mark.proves("K-07")
async def test_nothing_a_tool_returns_raises(room: Room) -> None:
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
        assert shaped.result.metadata.get("adapted") or not shaped.result.ok
        assert logged(shaped) == shaped.result.to_dict()
    assert (await room.shape(range(10**18))).result.error_kind == "limit"


# ── limits ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("O-01")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text('aé€😀\n"\\', max_size=400), limit=st.integers(1, 300), key=st.sampled_from([None, "output"]))
async def test_a_long_text_is_cut_between_characters_and_the_sidecar_has_all_of_it(
    new_room: Callable[..., Room], text: str, limit: int, key: str | None
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
        assert result.metadata["head_is"] == "JSON text"
        return
    head = result.data["head"]
    assert result.data == {"head": head, **beside}
    assert limit - taken - 3 <= len(head.encode()) <= limit - taken
    assert room.sidecar(shaped) == text and text.startswith(head)
    assert result.metadata["output_bytes"] == size
    assert result.metadata["omitted_bytes"] == size - len(head.encode()) > 0


@pytest.mark.proves("O-01")
async def test_what_fits_but_for_its_escapes_is_not_cut(room: Room) -> None:
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
async def test_a_long_list_is_cut_between_entries_and_the_sidecar_has_one_a_line(
    new_room: Callable[..., Room], items: list[Any], most: int, limit: int, key: str | None
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
async def test_the_first_entry_too_many_cuts(room: Room) -> None:
    paths = [f"src/{n}.py" for n in range(1001)]
    assert (await room.shape({"paths": paths[:1000]}, max_entries=1000)).result.data == {"paths": paths[:1000]}
    shaped = await room.shape({"paths": paths, "skipped": 2}, max_entries=1000)
    assert shaped.result.data == {"head": paths[:1000], "skipped": 2}
    assert shaped.result.metadata["head_is"] == "entries of 'paths'"
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
async def test_anything_else_is_cut_as_json_text(room: Room, value: object) -> None:
    shaped = await room.shape(value, max_output=500)
    head, whole = shaped.result.data["head"], room.sidecar(shaped)
    assert list(shaped.result.data) == ["head"] and shaped.result.metadata["head_is"] == "JSON text"
    assert orjson.loads(whole) == value
    assert whole.startswith(head) and 497 <= len(head.encode()) <= 500
    assert shaped.result.metadata["output_bytes"] == len(whole.encode())


@pytest.mark.proves("O-02")
async def test_an_error_is_cut_as_well(room: Room) -> None:
    text = "é" * 400
    shaped = await room.shape(Result.error("failed", text, {"output": "x" * 900}), max_output=301)
    metadata = shaped.result.metadata
    assert shaped.result.error_text == "é" * 150
    assert (metadata["error_bytes"], metadata["error_omitted_bytes"]) == (800, 500)
    assert Path(metadata["error_path"]).read_text() == text
    assert shaped.result.data == {"head": "x" * 301} and room.sidecar(shaped) == "x" * 900


@pytest.mark.proves("O-02")
async def test_metadata_of_a_tool_is_bounded_as_well(room: Room) -> None:
    shaped = await room.shape(Result.output(1, huge="x" * 20_000, small="y", odd=float("nan")))
    assert shaped.result.metadata == {"small": "y", "odd": "NaN", "metadata_dropped": ["huge"], **METADATA}


# ── sidecars ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("O-01")
async def test_a_sidecar_is_private_and_named_for_its_call(room: Room) -> None:
    first, again = [await room.shape("x" * 20, "ses_1.2-3", max_output=10) for _ in range(2)]
    path = Path(first.result.metadata["output_path"])
    assert path.name == f"{file_name('ses_1.2-3')}.txt" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Path(again.result.metadata["output_path"]) != path, "another attempt's file is not overwritten"


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_a_call_id_becomes_one_safe_file_name(one: str, other: str) -> None:
    name = file_name(one)
    assert name.isascii() and "/" not in name and "." not in name and 0 < len(name) < 120
    assert (name == file_name(other)) is (one == other)


@pytest.mark.proves("O-01")
async def test_a_link_in_the_sidecars_place_is_not_followed(room: Room, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (room.output / "call-1.txt").symlink_to(victim)
    shaped = await room.shape("x" * 20, max_output=10)
    assert not victim.exists() and room.sidecar(shaped) == "x" * 20


@pytest.mark.proves("O-01")
async def test_a_sidecar_ends_at_its_limit_and_says_so(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sidecar.MAX_SIDECAR == 64 * 1024 * 1024
    limit = 1000
    monkeypatch.setattr(sidecar, "MAX_SIDECAR", limit)
    text = "€" * limit
    shaped = await room.shape(text, max_output=10)
    metadata = shaped.result.metadata
    path = Path(metadata["output_path"])
    assert limit - 3 <= path.stat().st_size <= limit
    whole = path.read_bytes().decode()
    kept, _, note = whole.rpartition("\n[")
    assert text.startswith(kept) and "first 1,000 of 3,000 bytes" in note
    assert metadata["output_kept_bytes"] == len(kept.encode()) and "first" in metadata["output_lost"]
    assert metadata["output_bytes"] == len(text.encode())


@pytest.mark.proves("O-01")
async def test_without_room_for_the_sidecar_the_result_comes_and_says_what_is_lost(room: Room) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        shaped = await room.shape({"output": "x" * 100_000, "exit_code": 0}, max_output=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shaped.result.ok and shaped.result.data["head"].startswith("xxx") and shaped.result.data["exit_code"] == 0
    assert shaped.result.metadata["truncated"] and "output_path" not in shaped.result.metadata
    assert "could not be kept: File too large" in shaped.result.metadata["output_lost"]
    assert not list(room.output.iterdir()), "no part of a file is left on a full disk"


async def test_a_folder_that_cannot_be_had_loses_the_rest_only(tmp_path: Path) -> None:
    shaper = Shaper(Redactor(), Artifacts(tmp_path / "none"), lambda session: tmp_path / "none")
    spec = ToolSpec("tool", "…", max_output=10)
    shaped = await shaper.shape(spec, "x" * 20, METADATA, call_id="c", session_id="s")
    assert shaped.result.data == {"head": "x" * 10} and "No such file" in shaped.result.metadata["output_lost"]
    spec = ToolSpec("tool", "…")
    shaped = await shaper.shape(spec, b"bytes", METADATA, call_id="c", session_id="s")
    assert (
        shaped.result.ok and shaped.result.data["artifact"] is None and "cannot be stored" in shaped.result.data["lost"]
    )


class Busy:
    """Stores nothing before it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def put(self, data: bytes, media_type: str) -> str:
        assert self.go_on.wait(60)
        return "sha256:0"


async def test_a_cancelled_wait_whose_turn_has_not_come_still_leaves_its_file(tmp_path: Path) -> None:
    busy = Busy()
    shaper = Shaper(Redactor(), busy, lambda session: tmp_path)
    spec = ToolSpec("tool", "…", max_output=300)
    tasks = [
        asyncio.create_task(shaper.shape(spec, value, METADATA, call_id="c", session_id="s"))
        for value in [b"a", b"b", b"c", b"d", "x" * 400]
    ]
    await asyncio.sleep(0)
    tasks[-1].cancel()
    await asyncio.wait(tasks[-1:])
    busy.go_on.set()
    assert all(shaped.result.ok for shaped in await asyncio.gather(*tasks[:-1]))
    shaper.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [400]


async def test_a_cancelled_wait_still_leaves_the_whole_file(room: Room) -> None:
    task = asyncio.create_task(room.shape("x" * 5_000_000, max_output=10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    room.shaper.close()
    (path,) = room.output.iterdir()
    assert path.stat().st_size == 5_000_000
    assert (await room.shape("y" * 20, "call-2", max_output=10)).result.metadata["output_path"]


async def test_large_outputs_do_not_hold_the_event_loop_up(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[threading.Thread] = []
    real = os.open

    def watched(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).startswith(str(room.output)):
            opened.append(threading.current_thread())
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", watched)
    await room.shape([{"a": None}] * 5_000, max_output=10)
    assert opened and threading.main_thread() not in opened


# ── artifacts ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("O-03")
async def test_binary_parts_become_artifacts(room: Room) -> None:
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


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


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
async def test_a_secret_is_nowhere(tmp_path: Path, value: object, limit: int) -> None:
    room = Room(tmp_path, key=SECRET)
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
async def test_a_secret_is_gone_wherever_the_cut_falls(
    new_room: Callable[..., Room], pieces: list[str], limit: int, as_list: bool
) -> None:
    secret = 'abca"bc\\ab'
    room = new_room(key=secret)
    texts = [piece.replace("SECRET", secret) for piece in pieces]
    shaped = await room.shape(texts if as_list else "".join(texts), max_output=limit, max_entries=4)
    room.shaper.close()
    written = room.everything_written(shaped)
    assert secret.encode() not in written and orjson.dumps(secret)[1:-1] not in written


@pytest.mark.proves("O-07")
async def test_a_secret_across_the_borders_of_json_is_redacted_as_text(tmp_path: Path) -> None:
    room = Room(tmp_path, odd='":[1,2')
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
async def test_a_secret_that_only_the_sidecars_text_spells_is_redacted_there(
    tmp_path: Path, secret: str, value: object, most: int | None
) -> None:
    room = Room(tmp_path, key=secret)
    shaped = await room.shape(value, max_output=100 if most is None else 1000, max_entries=most)
    assert "[secret:key]" in room.sidecar(shaped)
    assert secret.encode() not in room.everything_written(shaped)
    assert "[secret:key]" in str(shaped.result.data["head"]) or most is not None


@pytest.mark.proves("O-07")
def test_arguments_and_texts_are_redacted_for_the_log(tmp_path: Path) -> None:
    shaper = Room(tmp_path, key=SECRET).shaper
    assert shaper.redact(f"a {SECRET}") == "a [secret:key]"
    arguments = {"a": [SECRET], "b": float("nan"), "c": {1}}
    assert shaper.redact(arguments) == {"a": ["[secret:key]"], "b": "NaN", "c": [1]}
    plain = {"a": [1]}
    assert shaper.redact(plain) == plain and shaper.redact(plain)["a"] is not plain["a"]
    assert shaper.redact(range(10**18)).startswith("<a range")


def test_a_hash_is_of_the_value_and_not_of_its_spelling(room: Room) -> None:
    hashed = room.shaper.hash
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


# ── views ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("O-06")
@pytest.mark.parametrize(
    ("exposure", "at_face", "by_model"),
    [("both", True, True), ("core", False, True), ("edge", True, False), ("none", False, False)],
)
@pytest.mark.parametrize("size", [5, 500])
async def test_exposure_decides_who_sees_the_output(
    room: Room, exposure: str, at_face: bool, by_model: bool, size: int
) -> None:
    text = "private " * size
    given = Result.output({"output": text}, detail="private detail")
    shaped = await room.shape(given, exposure=exposure, max_output=1000)
    for view, seen in ((shaped.result, at_face), (shaped.model, by_model)):
        assert (b"private" in orjson.dumps(view.to_dict())) is seen
        assert ("output_path" in view.metadata) is (seen and size == 500)
        assert view.ok and view.metadata["duration_ms"] == 1.5
        assert view.metadata.get("withheld") == (None if seen else f"exposure: {exposure}")
    assert "private" in str(logged(shaped)["data"])


@pytest.mark.proves("O-06")
async def test_an_error_is_told_to_everybody_and_its_data_is_not(room: Room) -> None:
    shaped = await room.shape(Result.error("failed", "no such city", {"rows": ["private"]}), exposure="edge")
    assert shaped.result.data == {"rows": ["private"]}
    assert (shaped.model.error_text, shaped.model.error_kind, shaped.model.data) == ("no such city", "failed", None)


@pytest.mark.proves("O-06")
async def test_a_masked_output_leaves_a_summary_and_a_reference_in_the_prompt(room: Room) -> None:
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
async def test_a_recorded_result_is_seen_as_it_was_then(room: Room) -> None:
    spec = ToolSpec("tool", "…", prompt_mask=True)
    shaped = await room.shaper.shape(spec, {"rows": [1]}, METADATA, call_id="c", session_id="s")
    assert room.shaper.views(spec, Result.from_dict(logged(shaped))) == (shaped.result, shaped.model)


def test_only_the_quick_and_open_goes_the_quick_way(room: Room) -> None:
    def small(value: object, **spec: Any) -> Shaped | None:
        return room.shaper.shape_small(ToolSpec("tool", "…", **spec), value, {})

    assert small({"a": 1}) and small("text") and small(3) and small(None) and small([1, "a"])
    for value in (
        {"a": None},
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


async def test_a_closed_shaper_still_answers(room: Room) -> None:
    room.shaper.close()
    assert (await room.shape("x" * 20, max_output=10)).result.metadata["output_path"]
