"""Embeddings over HTTP, from correct and faulty servers on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.catalog.texts_of import ALL, HOTEL, HashEmbedder, tool

from handrail.catalog.embedders.embedder_protocol import EmbedderError
from handrail.catalog.embedders.embedder_selection import EndpointEmbedder, FastEmbedEmbedder
from handrail.catalog.search.cache import SearchCache
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.tool_search_index import ToolIndex

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def _say(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def good(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    rows = HashEmbedder().encode(asked["input"])
    data = [{"index": at, "embedding": (3 * row).tolist()} for at, row in enumerate(rows)]
    _say(handler, json.dumps({"data": data[::-1]}).encode())


@contextmanager
def server(answer: Answer) -> Generator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers.get("Authorization", ""), body))
            answer(self, body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    held = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.daemon_threads = True
    thread = threading.Thread(target=held.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{held.server_address[1]}/v1", asked
    finally:
        held.shutdown()
        held.server_close()
        thread.join()


def test_the_endpoint_returns_normalised_vectors_in_the_order_of_the_texts() -> None:
    texts = [f"text about thing{n}" for n in range(70)]
    with server(good) as (url, asked):
        rows = EndpointEmbedder(url, "m", key="k").encode(texts)
    assert rows == pytest.approx(HashEmbedder().encode(texts), abs=1e-5)
    assert [len(body["input"]) for _, body in asked] == [64, 6]
    assert asked[0][0] == "Bearer k"
    assert asked[0][1]["model"] == "m"


def test_a_search_by_meaning_works_over_an_endpoint() -> None:
    with server(good) as (url, _):
        index = ToolIndex(ALL, encoder=EncoderThread(EndpointEmbedder(url, "m")))
        assert index.wait_until_complete(60)
        found = index.search("hotel room", patience_s=60)
    assert (found.search_method, found.hits[0].id) == ("lexical and meaning", "book_hotel")


def _with(body: bytes, status: int = 200) -> Answer:
    return lambda handler, asked: _say(handler, body, status)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_with(b"down", 500), "answered with status 500"),
        (_with(b"", 302), "answered with status 302"),
        (_with(b"<html>"), "returned no embeddings"),
        (_with(b"[]"), "returned no embeddings"),
        (_with(b'{"data": []}'), "returned 0 embeddings for 1 texts"),
        (_with(b'{"data": [{"index": 0, "embedding": []}]}'), "or invalid ones"),
        (_with(b'{"data": [{"index": 0, "embedding": ["a"]}]}'), "returned no embeddings"),
        (_with(b'{"data": [{"index": 0, "embedding": [1e999]}]}'), "embeddings"),
    ],
    ids=["500", "redirect", "html", "list", "none", "empty", "text", "infinite"],
)
def test_an_invalid_embedding_reply_is_reported_without_the_key(answer: Answer, said: str) -> None:
    with server(answer) as (url, _), pytest.raises(EmbedderError) as told:
        EndpointEmbedder(url, "m", key="sk-secret").encode(["text"])
    assert said in str(told.value)
    assert "sk-secret" not in str(told.value)


@pytest.mark.parametrize(
    ("vector", "said"),
    [([0.0] * 8, "returned a vector of zeros"), ([1.0] * 8, "returned the same vector for 2 different texts")],
)
def test_meaningless_vectors_are_refused_and_never_stored(vector: list[float], said: str, tmp_path: Path) -> None:
    def senseless(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        data = [{"index": at, "embedding": vector} for at in range(len(asked["input"]))]
        _say(handler, json.dumps({"data": data}).encode())

    with server(senseless) as (url, _):
        endpoint, cache = EndpointEmbedder(url, "m"), SearchCache(tmp_path)
        with pytest.raises(EmbedderError, match=said):
            endpoint.encode(["send a letter", "book a room"])
        index = ToolIndex(ALL, encoder=EncoderThread(endpoint, cache))
        assert not index.wait_until_complete()
        assert "check that 'm' is an embedding model" in index.search("hotel room").note
        assert cache.load_vectors(endpoint.fingerprint) == {}


def test_equal_texts_may_share_a_vector_and_large_numbers_are_accepted() -> None:
    def large(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        data = [{"index": at, "embedding": [1e200, -1e200]} for at in range(len(asked["input"]))]
        _say(handler, json.dumps({"data": data}).encode())

    with server(large) as (url, _):
        rows = EndpointEmbedder(url, "m").encode(["Send it", "send  it"])
    assert rows == pytest.approx(numpy.array([[0.5**0.5, -(0.5**0.5)]] * 2))


# --- texts that are refused ----------------------------------------------------------------------------------------


def taking(characters: int = 1_800, texts: int = 64, but: str = "\0", status: int = 400) -> Answer:
    """A server that refuses longer texts, more of them, and those with a word."""

    def answer(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        given = asked["input"]
        refused = len(given) > texts or any(len(text) > characters or but in text for text in given)
        _say(handler, b"", status) if refused else good(handler, asked)

    return answer


MANY = [tool(f"tool_{n}", f"Does thing {n} for account {n * n}.") for n in range(40)]
LONG = tool("widget.frobnicate", "Polishes a brass doorknob. " * 200)


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_a_text_too_long_for_the_model_is_shortened_without_affecting_other_texts(status: int, tmp_path: Path) -> None:
    with server(taking(status=status)) as (url, asked):
        index = ToolIndex([*MANY, *ALL, LONG], encoder=EncoderThread(EndpointEmbedder(url, "m"), SearchCache(tmp_path)))
        assert index.wait_until_complete(60)
        found = index.search("polishing brass doorknobs", patience_s=60)
        assert (found.search_method, found.note, found.hits[0].id) == ("lexical and meaning", "", LONG.id)
        assert any(reason.startswith("meaning") for reason in found.hits[0].reasons)
        assert index.search("hotel room", patience_s=60).search_method == "lexical and meaning"
        before = len(asked)
        again = ToolIndex([*MANY, *ALL, LONG], encoder=EncoderThread(EndpointEmbedder(url, "m"), SearchCache(tmp_path)))
        assert again.wait_until_complete(60)
        assert len(asked) == before, "the next start asks for nothing that is known"


def test_a_text_that_the_endpoint_refuses_is_searched_by_words_and_counted() -> None:
    with server(taking(but="frobnicate")) as (url, asked):
        encoder = EncoderThread(EndpointEmbedder(url, "m"))
        index = ToolIndex([*MANY, *ALL, LONG], encoder=encoder)
        assert index.wait_until_complete(60)
        found = index.search("polish brass doorknobs", patience_s=60)
        assert (found.search_method, found.hits[0].id) == ("lexical and meaning", LONG.id)
        assert found.note.startswith("1 tool is searched by words only") and encoder.state == found.note
        assert found.hits[0].reasons == ("description: polish, brass, doorknobs",)
        assert index.search("hotel room", patience_s=60).hits[0].id == HOTEL.id
        tried = sum(any("frobnicate" in text for text in body["input"]) for _, body in asked)
        changed = index.updated_copy([tool("new", "Something else.")])
        assert changed.wait_until_complete(60)
        assert tried == sum(any("frobnicate" in text for text in body["input"]) for _, body in asked)


def test_texts_are_sent_one_by_one_to_a_server_with_small_batches() -> None:
    with server(taking(texts=1)) as (url, _):
        index = ToolIndex([*MANY, *ALL], encoder=EncoderThread(EndpointEmbedder(url, "m")))
        assert index.wait_until_complete(60)
        found = index.search("hotel room", patience_s=60)
    assert (found.search_method, found.note, found.hits[0].id) == ("lexical and meaning", "", HOTEL.id)


def test_a_refused_request_is_shortened_and_meaning_search_stays_on() -> None:
    with server(taking()) as (url, _):
        index = ToolIndex(ALL, encoder=EncoderThread(EndpointEmbedder(url, "m")))
        assert index.wait_until_complete(60)
        found = index.search("hotel room " * 600, patience_s=60)
        assert (found.search_method, found.hits[0].id) == ("lexical and meaning", HOTEL.id)
    with server(taking(but="snow")) as (url, _):
        index = ToolIndex(ALL, encoder=EncoderThread(EndpointEmbedder(url, "m")))
        assert index.wait_until_complete(60)
        assert index.search("weather and snow", patience_s=60).search_method == "lexical"
        assert index.search("hotel room", patience_s=60).search_method == "lexical and meaning"


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_server_that_rejects_everything_gets_only_a_few_requests(status: int, tmp_path: Path) -> None:
    broken = threading.Event()

    def until(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        _say(handler, b"", status) if broken.is_set() else good(handler, asked)

    with server(until) as (url, asked):
        endpoint, encoder = EndpointEmbedder(url, "m"), EncoderThread(EndpointEmbedder(url, "m"), SearchCache(tmp_path))
        assert ToolIndex(ALL, encoder=encoder).wait_until_complete(60)
        encoder.close(60)
        broken.set()
        asked.clear()
        index = ToolIndex([*MANY, *ALL], encoder=EncoderThread(endpoint, SearchCache(tmp_path)))
        assert not index.wait_until_complete()
        found = index.search("hotel room", patience_s=60)
        assert (found.search_method, found.hits[0].id) == ("lexical", HOTEL.id)
        assert f"answered with status {status}" in found.note
        assert len(asked) <= 2


def test_an_endpoint_that_hangs_times_out_and_delays_no_search() -> None:
    gone, entered = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        entered.set()
        gone.wait(60)

    with server(hang) as (url, _):
        try:
            index = ToolIndex(ALL, encoder=EncoderThread(EndpointEmbedder(url, "m", timeout_s=100)))
            assert entered.wait(60)
            assert index.search("hotel room", patience_s=100).hits[0].id == "book_hotel"
            with pytest.raises(EmbedderError, match=r"within 0\.2 s"):
                EndpointEmbedder(url, "m", timeout_s=0.2).encode(["text"])
        finally:
            gone.set()


def test_an_endpoint_that_answers_too_slowly_times_out() -> None:
    gone = threading.Event()

    def drip(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        try:
            while not gone.wait(0.02):
                handler.wfile.write(b" ")
        except OSError:
            pass

    with server(drip) as (url, _):
        try:
            with pytest.raises(EmbedderError, match="did not complete its answer within"):
                EndpointEmbedder(url, "m", timeout_s=0.3).encode(["text"])
        finally:
            gone.set()


def test_an_unreachable_endpoint_is_reported() -> None:
    with server(good) as (url, _):
        pass
    with pytest.raises(EmbedderError, match="cannot be reached"):
        EndpointEmbedder(url, "m", timeout_s=5).encode(["text"])


@pytest.mark.parametrize("url", ["", "localhost:8080", "file:///etc/passwd", "http://"])
def test_an_invalid_endpoint_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(EmbedderError, match="is not a valid endpoint URL"):
        EndpointEmbedder(url, "m")


def test_an_address_that_contains_a_key_is_refused_and_the_error_omits_the_key() -> None:
    with pytest.raises(EmbedderError) as told:
        EndpointEmbedder("http://user:sk-secret@host/v1", "m")
    assert "sk-secret" not in str(told.value)


def test_vectors_of_different_endpoints_and_models_are_kept_apart() -> None:
    prints = {
        EndpointEmbedder(url, model).fingerprint for url in ("http://a/v1", "http://b/v1") for model in ("m", "n")
    }
    assert len(prints) == 4


def test_a_missing_fastembed_package_is_reported() -> None:
    from importlib.util import find_spec

    if find_spec("fastembed") is not None:
        pytest.skip("fastembed is installed")
    with pytest.raises(EmbedderError, match="pip install fastembed"):
        FastEmbedEmbedder()
