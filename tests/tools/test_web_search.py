"""``web_search`` with small servers of each provider's form: results and five kinds of failure."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.kernel.test_agents import put_agent
from tests.web import Answer, LoopbackServer, ok

from handrail.contract.calls_and_results import Result
from handrail.contract.session_protocols import Session
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("T-09")

JSON = "Content-Type: application/json"
FORMS: dict[str, tuple[Any, str]] = {
    "searxng": ({"results": [{"title": "Ships", "url": "https://a.example/", "content": "About <b>ships</b>"}]}, ""),
    "brave": (
        {"web": {"results": [{"title": "Ships", "url": "https://a.example/", "description": "About <b>ships</b>"}]}},
        "x-subscription-token",
    ),
    "tavily": (
        {"results": [{"title": "Ships", "url": "https://a.example/", "content": "About ships"}]},
        "authorization",
    ),
    "exa": ({"results": [{"title": "Ships", "url": "https://a.example/", "text": "About ships"}]}, "x-api-key"),
    "kagi": (
        {
            "data": [
                {"t": 1, "list": []},
                {"t": 0, "title": "Ships", "url": "https://a.example/", "snippet": "About ships"},
            ]
        },
        "authorization",
    ),
    "serper": ({"organic": [{"title": "Ships", "link": "https://a.example/", "snippet": "About ships"}]}, "x-api-key"),
    "template": ({"items": [{"name": "Ships", "link": "https://a.example/", "description": "About ships"}]}, ""),
}


@asynccontextmanager
async def searching(folder: Path, *sites: LoopbackServer, names: str, more: str = "") -> AsyncGenerator[Session]:
    """A session whose searches go to these sites, one for each provider."""
    folder.mkdir(exist_ok=True)
    hosts = json.dumps([site.authority for site in sites])
    put_agent(folder, "searcher", f"[requires.tools.web_search.net]\nhosts = {hosts}")
    providers = names.split(",")
    settings = ["[tools.web_search.config]", f'providers = "{names}"', more]
    for site, name in zip(sites, providers, strict=True):
        path = "/?q={query}&n={count}" if name == "template" else "/"
        settings.append(f'{name}_url = "{site.url(path)}"')
        if FORMS[name][1]:
            settings.append(f'{name}_key = {{ secret = "{name.upper()}" }}')
    secrets = {name.upper(): f"key-of-{name}-0123456789" for name in providers if FORMS[name][1]}
    async with temporary_kernel(
        folder, settings="\n".join(settings), secrets=secrets, rules=["allow web_search"]
    ) as kernel:
        yield await kernel.session(agent="searcher")


async def search(folder: Path, name: str, answer: Answer) -> Result:
    async with LoopbackServer({"*": answer}) as site, searching(folder, site, names=name) as session:
        return await session.call("web_search", {"query": "ships & seas", "max_results": 3})


@pytest.mark.parametrize("name", FORMS)
async def test_each_search_provider_gets_its_request_format_and_results_have_one_shape(
    tmp_path: Path, name: str
) -> None:
    answer, key_field = FORMS[name]
    async with (
        LoopbackServer({"*": ok(json.dumps(answer).encode(), JSON)}) as site,
        searching(tmp_path, site, names=name) as session,
    ):
        found = await session.call("web_search", {"query": "ships & seas", "max_results": 3})
        (asked,) = site.asked
    assert found.data == {
        "results": [{"title": "Ships", "url": "https://a.example/", "snippet": "About ships"}],
        "provider": name,
    }, found
    method, target, _ = asked.line.split(" ")
    sent = json.loads(asked.body) if method == "POST" else parse_qs(urlsplit(target).query)
    assert sent.get("q", sent.get("query")) in ("ships & seas", ["ships & seas"])
    if key_field:
        assert asked.fields[key_field].endswith(f"key-of-{name}-0123456789")


@pytest.mark.parametrize(
    ("answer", "kind", "part"),
    [
        (ok(b'{"results": []}', JSON), None, ""),
        (
            ok(b"<!doctype html><title>Captcha</title>", "Content-Type: text/html"),
            "backend",
            "an HTML page instead of JSON",
        ),
        (ok(b"", JSON, "Retry-After: 60", status="429 Too Many"), "limit", "60"),
        (ok(b"", JSON, status="403 Forbidden"), "unavailable", "search.formats"),
        (ok(b"", JSON, status="404 Not Found"), "unavailable", "searxng_url"),
        (ok(b"", JSON, status="500 Oops"), "backend", "500"),
        (ok(b"[1", JSON), "backend", "invalid JSON"),
        (ok(b'{"results": [], "unresponsive_engines": [["bing", "timeout"]]}', JSON), "backend", "bing"),
        (ok(b'{"results": "none"}', JSON), None, ""),
        (ok(b'{"results": [{"title": 1}, 7, {"url": "javascript:x"}]}', JSON), None, ""),
    ],
)
async def test_an_empty_search_and_each_kind_of_failure_give_different_results(
    tmp_path: Path, answer: bytes, kind: str | None, part: str
) -> None:
    found = await search(tmp_path, "searxng", answer)
    if kind is None:
        assert found.data == {"results": [], "provider": "searxng"}
    else:
        assert found.error_kind == kind and part in str(found.error_text), found


async def test_a_session_keeps_its_search_provider(tmp_path: Path) -> None:
    searxng, template = (ok(json.dumps(FORMS[one][0]).encode(), JSON) for one in ("searxng", "template"))
    async with (
        LoopbackServer({"*": searxng}) as one,
        LoopbackServer({"*": template}) as other,
        searching(tmp_path, one, other, names="searxng,template") as session,
    ):
        chosen = [(await session.call("web_search", {"query": str(n)})).data["provider"] for n in range(4)]
        assert len(set(chosen)) == 1
        assert [len(one.asked), len(other.asked)] in ([4, 0], [0, 4])


async def test_another_search_provider_is_used_only_with_the_fallback_setting(tmp_path: Path) -> None:
    bad, good = ok(b"", JSON, status="500 Oops"), ok(json.dumps(FORMS["searxng"][0]).encode(), JSON)
    for fallback in ("false", "true"):
        folder = tmp_path / fallback
        async with LoopbackServer({"*": bad}) as one, LoopbackServer({"*": good}) as other:
            more = f'fallback = "{fallback}"'
            async with searching(folder, one, other, names="template,searxng", more=more) as session:
                found = await session.call("web_search", {"query": "x"})
                was_bad = bool(one.asked)
        if not was_bad:
            assert found.data["provider"] == "searxng"
        elif fallback == "true":
            assert "template failed" in found.data["notes"][0] and found.data["provider"] == "searxng"
        else:
            assert found.error_kind == "backend"


async def test_a_session_has_a_search_limit(tmp_path: Path) -> None:
    answer = ok(json.dumps(FORMS["searxng"][0]).encode(), JSON)
    async with (
        LoopbackServer({"*": answer}) as site,
        searching(tmp_path, site, names="searxng", more='max_calls = "2"') as session,
    ):
        kinds = [(await session.call("web_search", {"query": str(n)})).error_kind for n in range(3)]
    assert kinds == [None, None, "limit"] and len(site.asked) == 2


async def test_a_missing_search_provider_is_reported_with_the_required_setting(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow web_search"]) as kernel:
        assert "providers" in str(kernel.generation.entries["web_search"].unavailable_reason)
        found = await (await kernel.session()).call("web_search", {"query": "x"})
    assert found.error_kind == "unavailable" and "providers" in str(found.error_text)
    settings = '[tools.web_search.config]\nproviders = "brave,altavista"'
    async with temporary_kernel(tmp_path / "b", settings=settings, rules=["allow web_search"]) as kernel:
        found = await (await kernel.session()).call("web_search", {"query": "x"})
    assert found.error_kind == "unavailable"
    assert "brave_key" in str(found.error_text) and "altavista" in str(found.error_text)
