"""Embeddings over HTTP, from real servers on loopback: good ones, and all that can be wrong with one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.catalog.texts_of import ALL, Directions

from handrail.catalog.embedder import EmbedderError
from handrail.catalog.encoding import Encoder
from handrail.catalog.endpoint import Endpoint
from handrail.catalog.fast import FastEmbed
from handrail.catalog.index import Index

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def _say(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def good(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    rows = Directions().encode(asked["input"])
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


def test_the_endpoints_vectors_are_those_of_the_texts_in_order_and_of_length_one() -> None:
    texts = [f"text about thing{n}" for n in range(70)]
    with server(good) as (url, asked):
        rows = Endpoint(url, "m", key="k").encode(texts)
    assert rows == pytest.approx(Directions().encode(texts), abs=1e-5)
    assert [len(body["input"]) for _, body in asked] == [64, 6]
    assert asked[0][0] == "Bearer k"
    assert asked[0][1]["model"] == "m"


def test_a_search_by_meaning_works_over_an_endpoint() -> None:
    with server(good) as (url, _):
        index = Index(ALL, encoder=Encoder(Endpoint(url, "m")))
        assert index.wait(60)
        found = index.search("hotel room", patience_s=60)
    assert (found.means, found.hits[0].id) == ("lexical and meaning", "book_hotel")


def _with(body: bytes, status: int = 200) -> Answer:
    return lambda handler, asked: _say(handler, body, status)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_with(b"down", 500), "answered 500"),
        (_with(b"", 302), "answered 302"),
        (_with(b"<html>"), "gave no embeddings"),
        (_with(b"[]"), "gave no embeddings"),
        (_with(b'{"data": []}'), "gave 0 embeddings for 1 texts"),
        (_with(b'{"data": [{"index": 0, "embedding": []}]}'), "or some that are none"),
        (_with(b'{"data": [{"index": 0, "embedding": ["a"]}]}'), "gave no embeddings"),
        (_with(b'{"data": [{"index": 0, "embedding": [1e999]}]}'), "embeddings"),
    ],
    ids=["500", "redirect", "html", "list", "none", "empty", "text", "infinite"],
)
def test_an_answer_that_is_no_embedding_is_told_without_the_key(answer: Answer, said: str) -> None:
    with server(answer) as (url, _), pytest.raises(EmbedderError) as told:
        Endpoint(url, "m", key="sk-secret").encode(["text"])
    assert said in str(told.value)
    assert "sk-secret" not in str(told.value)


def test_an_endpoint_that_hangs_is_given_up_and_no_search_waits_for_it() -> None:
    gone, entered = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        entered.set()
        gone.wait(60)

    with server(hang) as (url, _):
        try:
            index = Index(ALL, encoder=Encoder(Endpoint(url, "m", timeout_s=100)))
            assert entered.wait(60)
            assert index.search("hotel room", patience_s=100).hits[0].id == "book_hotel"
            with pytest.raises(EmbedderError, match=r"within 0\.2 s"):
                Endpoint(url, "m", timeout_s=0.2).encode(["text"])
        finally:
            gone.set()


def test_an_answer_that_drips_is_given_up_too() -> None:
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
            with pytest.raises(EmbedderError, match="no whole answer within"):
                Endpoint(url, "m", timeout_s=0.3).encode(["text"])
        finally:
            gone.set()


def test_nobody_there_is_told() -> None:
    with server(good) as (url, _):
        pass
    with pytest.raises(EmbedderError, match="cannot be reached"):
        Endpoint(url, "m", timeout_s=5).encode(["text"])


@pytest.mark.parametrize("url", ["", "localhost:8080", "file:///etc/passwd", "http://"])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(EmbedderError, match="is no address of an endpoint"):
        Endpoint(url, "m")


def test_a_key_inside_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(EmbedderError) as told:
        Endpoint("http://user:sk-secret@host/v1", "m")
    assert "sk-secret" not in str(told.value)


def test_two_endpoints_and_two_models_have_vectors_of_their_own() -> None:
    prints = {Endpoint(url, model).fingerprint for url in ("http://a/v1", "http://b/v1") for model in ("m", "n")}
    assert len(prints) == 4


def test_fastembed_that_is_not_installed_is_told() -> None:
    from importlib.util import find_spec

    if find_spec("fastembed") is not None:
        pytest.skip("fastembed is installed")
    with pytest.raises(EmbedderError, match="pip install fastembed"):
        FastEmbed()
