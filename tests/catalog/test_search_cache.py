"""The stored search index across restarts, and invalid cache files."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy
import pytest
from tests.catalog.texts_of import ALL, WEATHER, HashEmbedder, tool

from handrail.catalog.search.cache import SearchCache, UnusableCacheFile, hash_text, read_cache_file, write_cache_file
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.lexical_index import LexicalIndex, TermVector, make_embedding_text
from handrail.catalog.search.tool_search_index import ToolIndex

VECTORS = {hash_text(name): numpy.arange(4, dtype=numpy.float16) + at for at, name in enumerate("abc")}


def _one(folder: Path, start: str) -> Path:
    (found,) = folder.glob(f"{start}*")
    return found


def test_the_cache_returns_vectors_as_stored(tmp_path: Path) -> None:
    SearchCache(tmp_path).store_vectors("model", VECTORS)
    found = SearchCache(tmp_path).load_vectors("model")
    assert found.keys() == VECTORS.keys()
    assert all((found[key] == VECTORS[key]).all() for key in VECTORS)


def test_each_model_has_its_own_vectors(tmp_path: Path) -> None:
    SearchCache(tmp_path).store_vectors("model", VECTORS)
    assert SearchCache(tmp_path).load_vectors("another") == {}
    assert SearchCache(tmp_path).load_vectors("model")


def test_a_cache_file_of_another_model_is_ignored(tmp_path: Path) -> None:
    told: list[str] = []
    cache = SearchCache(tmp_path, told.append)
    cache.store_vectors("model", VECTORS)
    mine = _one(tmp_path, "vectors")
    cache.store_vectors("another", VECTORS)
    (other,) = (path for path in tmp_path.glob("vectors*") if path != mine)
    other.replace(mine)
    assert cache.load_vectors("model") == {}
    assert "has another embedder" in told[0]


def test_cache_files_are_accessible_to_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    SearchCache(folder).store_vectors("model", VECTORS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(_one(folder, "vectors").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "foreign", "longer", "folder", "pipe", "link"])
def test_a_damaged_cache_file_is_reported_and_replaced(harm: str, tmp_path: Path) -> None:
    told: list[str] = []
    cache = SearchCache(tmp_path, told.append)
    cache.store_vectors("model", VECTORS)
    path = _one(tmp_path, "vectors")
    content = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "pipe":
        os.mkfifo(path)
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        middle = len(content) // 2
        path.write_bytes(
            {
                "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "cut": content[:-5],
                "empty": b"",
                "foreign": b"\x80\x04\x95pickle of somebody's",
                "longer": content + b"x",
            }[harm]
        )
    assert cache.load_vectors("model") == {}
    assert len(told) == 1
    assert told[0].endswith("It is rebuilt.")
    if harm != "folder":
        cache.store_vectors("model", VECTORS)
        assert cache.load_vectors("model").keys() == VECTORS.keys()


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_cache_file_that_another_user_can_write_is_not_used(mode: int, tmp_path: Path) -> None:
    told: list[str] = []
    cache = SearchCache(tmp_path, told.append)
    cache.store_vectors("model", VECTORS)
    _one(tmp_path, "vectors").chmod(mode)
    assert cache.load_vectors("model") == {}
    assert "can be written by another user" in told[0]


def test_processes_that_write_the_cache_concurrently_lose_no_vectors(tmp_path: Path) -> None:
    one, other = SearchCache(tmp_path), SearchCache(tmp_path)
    assert one.load_vectors("model") == other.load_vectors("model") == {}
    mine, theirs = hash_text("mine"), hash_text("theirs")
    one.store_vectors("model", {mine: numpy.ones(4, numpy.float16)})
    other.store_vectors("model", {theirs: numpy.zeros(4, numpy.float16)})
    assert SearchCache(tmp_path).load_vectors("model").keys() == {mine, theirs}
    assert SearchCache(tmp_path).load_vectors("model", [theirs]).keys() == {theirs}


def test_many_small_cache_files_are_merged_and_the_newest_vectors_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.catalog.search.cache._MOST_VECTORS", 12)
    cache = SearchCache(tmp_path)
    for number in range(20):
        assert cache.store_vectors("model", {hash_text(str(number)): numpy.full(4, number, numpy.float16)})
        for path in tmp_path.iterdir():  # a file system's clock may be coarse
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    found = cache.load_vectors("model")
    assert len(list(tmp_path.iterdir())) <= 8
    assert all(float(found[hash_text(str(number))][0]) == number for number in range(8, 20))
    assert hash_text("0") not in found


def test_cached_vectors_of_an_earlier_model_under_the_same_name_are_not_used(tmp_path: Path) -> None:
    cache = SearchCache(tmp_path)
    cache.store_vectors("model", {hash_text("old"): numpy.ones(8, numpy.float16)})
    os.utime(_one(tmp_path, "vectors"), ns=(0, 0))
    cache.store_vectors("model", VECTORS)
    assert cache.load_vectors("model").keys() == VECTORS.keys()


def test_several_catalogs_are_cached_and_the_least_recently_used_are_removed(tmp_path: Path) -> None:
    cache = SearchCache(tmp_path)
    made = LexicalIndex.build_from_vectors([TermVector({"cat": 1.0}, 1)])
    for number in range(10):
        cache.store_word_index([str(number)], made)
        for path in tmp_path.iterdir():
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
        assert cache.load_word_index(["0"]) == made, "it is used all the time"
    assert [number for number in range(10) if cache.load_word_index([str(number)]) is not None] == [0, 5, 6, 7, 8, 9]


def test_a_cache_file_whose_header_has_a_wrong_length_is_refused(tmp_path: Path) -> None:
    write_cache_file(tmp_path / "file", {"kind": "x", "sizes": []}, [b"abc"])
    content = (tmp_path / "file").read_bytes()
    assert read_cache_file(tmp_path / "file", {"kind": "x"}) is not None
    import hashlib

    lying = content[:-32].replace(b"[3]", b"[9]")
    (tmp_path / "file").write_bytes(lying + hashlib.blake2b(lying, digest_size=32).digest())
    with pytest.raises(UnusableCacheFile, match="has a different length than its header states"):
        read_cache_file(tmp_path / "file", {"kind": "x"})


def test_a_search_works_when_its_cache_cannot_be_written(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").write_text("in the way")
    index = ToolIndex(ALL, cache=SearchCache(tmp_path / "file", told.append))
    assert index.search("weather forecast").hits[0].id == "get_weather"
    assert any("cannot be" in text for text in told)


def test_the_word_index_of_a_catalog_is_cached_for_that_catalog_only(tmp_path: Path) -> None:
    cache = SearchCache(tmp_path)
    tools = sorted(ALL, key=lambda each: each.id)
    keys = [each.content_key for each in tools]
    made = LexicalIndex.build_from_vectors(
        [TermVector({"cat": 1.0}, 1), TermVector({"dog": 2.0}, 2), TermVector({"cat": 3.0}, 3), TermVector({}, 0)]
    )
    cache.store_word_index(keys, made)
    found = cache.load_word_index(keys)
    assert found is not None
    assert found == made
    assert cache.load_word_index(keys[:-1]) is None
    assert ToolIndex(ALL, cache=cache).search("dog").hits[0].id == tools[1].id  # what was kept is searched
    changed = [*tools[:-1], tool(tools[-1].id, "Something else by now.")]
    assert cache.load_word_index([each.content_key for each in changed]) is None


def test_a_second_start_encodes_only_new_tools(tmp_path: Path) -> None:
    first = HashEmbedder()
    encoder = EncoderThread(first, SearchCache(tmp_path))
    index = ToolIndex(ALL, encoder=encoder)
    assert index.wait_until_complete(60)
    encoder.close(60)
    second = HashEmbedder()
    more = tool("translate_text", "Translates text.")
    index = ToolIndex([*ALL, more], encoder=EncoderThread(second, SearchCache(tmp_path)))
    assert index.wait_until_complete(60)
    assert second.encoded == ["translate text: Translates text."]
    assert WEATHER.description in " ".join(first.encoded)


def test_texts_encoded_before_a_process_ends_are_not_encoded_by_the_next(tmp_path: Path) -> None:
    many = [tool(f"tool_{number}", f"Does thing {number}.") for number in range(64)]
    some, ended = threading.Event(), threading.Event()

    def told(done: int, total: int) -> None:
        some.set()
        ended.wait(60)

    first = HashEmbedder()
    encoder = EncoderThread(first, SearchCache(tmp_path), progress=told)
    index = ToolIndex(many, encoder=encoder)
    assert some.wait(60)
    encoder.close()
    ended.set()
    encoder.close(60)
    second = HashEmbedder()
    index = ToolIndex(many, encoder=EncoderThread(second, SearchCache(tmp_path)))
    assert index.wait_until_complete(60)
    of_tools = {make_embedding_text(each) for each in many}
    assert 0 < len(of_tools.intersection(first.encoded)) < 64
    assert of_tools.intersection(second.encoded) == of_tools.difference(first.encoded)
