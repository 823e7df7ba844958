"""web_search: results of the search service that the operator configured.

A session keeps one provider, chosen by a hash of its id among those that are ready, so that a provider that fails does so in
the same way in each call. No results, a limit, a blocked request, a wrong configuration and a silent provider are five
different answers: a model that takes a block page for "no results" searches in vain.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlencode

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
from handrail.contract.services.tool_runtime import HttpResponse, Runtime
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.requires import NetRequires, Requires
from handrail.contract.tool.spec import ConfigKey, ToolSpec
from handrail.contract.tool.tool_protocol import Tool

_SHAPE = LOCKED_SHAPES["web_search"]
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_SNIPPET = 500
_MAX_TITLE = 300
_DEFAULT_RESULTS = 10
_CALLS = "calls"
_TAG = compile_regex_lazily(r"<[^<>]{0,1000}>")

_Found = tuple[object, object, object]
"""Title, URL and snippet of one result, as the provider sent them."""


class _SearchRequest(NamedTuple):
    method: str
    url: str
    headers: Mapping[str, str] = {}
    body: bytes = b""


class _SearchProvider(Struct, frozen=True):
    """A search service.

    :param url: its address; empty if the operator must set it
    :param needs_key: whether it needs an API key
    :param build: returns the request for an address, a query, a number of results and a key
    :param read: returns the results in a decoded answer
    """

    url: str
    needs_key: bool
    build: Callable[[str, str, int, str], _SearchRequest]
    read: Callable[[Any], Sequence[_Found]]


def _get(url: str, parameters: Mapping[str, object], headers: Mapping[str, str] | None = None) -> _SearchRequest:
    joined = "&" if "?" in url else "?"
    return _SearchRequest(
        "GET", f"{url}{joined}{urlencode(parameters)}", {"accept": "application/json", **(headers or {})}
    )


def _post(url: str, content: object, headers: Mapping[str, str]) -> _SearchRequest:
    fields = {"accept": "application/json", "content-type": "application/json", **headers}
    return _SearchRequest("POST", url, fields, json.dumps(content).encode())


def _list_of(answer: Any, *path: str) -> list[dict[str, Any]]:
    """Return the list of objects at a path; an empty list if the answer has none there."""
    for name in path:
        answer = cast("dict[str, Any]", answer).get(name) if isinstance(answer, dict) else None
    items = cast("list[object]", answer) if isinstance(answer, list) else []
    return [cast("dict[str, Any]", one) for one in items if isinstance(one, dict)]


def _read_kagi(answer: Any) -> Sequence[_Found]:
    return [
        (one.get("title"), one.get("url"), one.get("snippet")) for one in _list_of(answer, "data") if one.get("t") == 0
    ]


def _fill_template(url: str, query: str, count: int, key: str) -> _SearchRequest:
    filled = (
        url.replace("{query}", quote(query, safe=""))
        .replace("{count}", str(count))
        .replace("{key}", quote(key, safe=""))
    )
    return _SearchRequest("GET", filled, {"accept": "application/json"})


def _read_template(answer: Any) -> Sequence[_Found]:
    items: list[dict[str, Any]] = []
    if isinstance(answer, list):
        parts = cast("list[Any]", answer)
        if len(parts) == 4 and all(isinstance(one, list) for one in parts[1:]):  # suggestions of OpenSearch
            return list(zip(parts[1], parts[3], parts[2], strict=False))
        items = _list_of(parts)
    for path in ("results", "items", "data", "hits"):
        items = items or _list_of(answer, path)
    return [
        (
            one.get("title") or one.get("name"),
            one.get("url") or one.get("link"),
            one.get("snippet") or one.get("content") or one.get("description"),
        )
        for one in items
    ]


_PROVIDERS: Mapping[str, _SearchProvider] = {
    "searxng": _SearchProvider(
        "",
        False,
        lambda url, query, count, key: _get(
            f"{url.rstrip('/').removesuffix('/search')}/search", {"q": query, "format": "json"}
        ),
        lambda answer: [(one.get("title"), one.get("url"), one.get("content")) for one in _list_of(answer, "results")],
    ),
    "brave": _SearchProvider(
        "https://api.search.brave.com/res/v1/web/search",
        True,
        lambda url, query, count, key: _get(url, {"q": query, "count": min(count, 20)}, {"x-subscription-token": key}),
        lambda answer: [
            (one.get("title"), one.get("url"), one.get("description")) for one in _list_of(answer, "web", "results")
        ],
    ),
    "tavily": _SearchProvider(
        "https://api.tavily.com/search",
        True,
        lambda url, query, count, key: _post(
            url, {"query": query, "max_results": min(count, 20)}, {"authorization": f"Bearer {key}"}
        ),
        lambda answer: [(one.get("title"), one.get("url"), one.get("content")) for one in _list_of(answer, "results")],
    ),
    "exa": _SearchProvider(
        "https://api.exa.ai/search",
        True,
        lambda url, query, count, key: _post(
            url,
            {"query": query, "numResults": count, "contents": {"text": {"maxCharacters": _MAX_SNIPPET}}},
            {"x-api-key": key},
        ),
        lambda answer: [(one.get("title"), one.get("url"), one.get("text")) for one in _list_of(answer, "results")],
    ),
    "kagi": _SearchProvider(
        "https://kagi.com/api/v0/search",
        True,
        lambda url, query, count, key: _get(url, {"q": query, "limit": count}, {"authorization": f"Bot {key}"}),
        _read_kagi,
    ),
    "serper": _SearchProvider(
        "https://google.serper.dev/search",
        True,
        lambda url, query, count, key: _post(url, {"q": query, "num": count}, {"x-api-key": key}),
        lambda answer: [(one.get("title"), one.get("link"), one.get("snippet")) for one in _list_of(answer, "organic")],
    ),
    "template": _SearchProvider("", False, _fill_template, _read_template),
}


def _make_config_keys() -> dict[str, ConfigKey]:
    names = ", ".join(_PROVIDERS)
    keys = {
        "providers": ConfigKey(description=f"Search providers, separated by commas: {names}"),
        "fallback": ConfigKey(
            description="true to use another provider if one fails. Default: false", required=False, default="false"
        ),
        "max_calls": ConfigKey(description="Searches of one session. Default: 25", required=False, default="25"),
        "timeout_ms": ConfigKey(
            description="Time-out of one search in milliseconds. Default: 15000", required=False, default="15000"
        ),
    }
    for name, provider in _PROVIDERS.items():
        address = f"Default: {provider.url}" if provider.url else "Required for this provider"
        if name == "template":
            address += ". {query}, {count} and {key} are replaced"
        keys[f"{name}_url"] = ConfigKey(description=f"Address of {name}. {address}", required=False)
        keys[f"{name}_key"] = ConfigKey(description=f"API key of {name}", secret=True, required=False)
    return keys


class WebSearchTool(Tool):
    spec = ToolSpec(
        id="web_search",
        description=_SHAPE.description,
        parameters=_SHAPE.parameters,
        requires=Requires(net=NetRequires(hosts=("*",)), capabilities=("state",)),
        side_effect="read",
        locks=(),
        targets=_SHAPE.targets,
        idempotent=True,
        timeout_ms=120_000,
        tier="core",
        kind=_SHAPE.kind,
        config=_make_config_keys(),
        documentation=(
            "Returns `results`, each with `title`, `url` and `snippet`, and the `provider`. The operator configures providers. A "
            "session keeps one of them.\n\n"
            "- An empty list means that the provider found nothing. Use other words.\n"
            "- An error of the kind `limit` means that the provider or the session allows no further search now. Do not repeat it.\n"
            "- An error of the kind `unavailable` names what the operator must change."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        query: str = args["query"]
        count: int = args.get("max_results", _DEFAULT_RESULTS)
        ready = _order_ready_providers(runtime)
        await _count_call(runtime)
        failed: list[str] = []
        for name, address, key in ready if runtime.config.get("fallback") == "true" else ready[:1]:
            try:
                found = await _search(runtime, name, address, key, query, count)
            except ToolError as error:
                if error.kind not in ("backend", "limit", "timeout", "unavailable") or len(failed) + 1 >= len(ready):
                    raise
                failed.append(f"{name} failed: {error.text}")
                if runtime.config.get("fallback") != "true":
                    raise
            else:
                notes = {"notes": failed} if failed else {}
                return {"results": found, "provider": name, **notes}
        raise AssertionError("the last provider returns or raises")


def _order_ready_providers(runtime: Runtime) -> list[tuple[str, str, str]]:
    """Return the ready providers with address and key, the one of this session first.

    :raises ToolError: ``unavailable`` if none is ready
    """
    named = [one.strip().lower() for one in runtime.config.get("providers", "").split(",") if one.strip()]
    ready: list[tuple[str, str, str]] = []
    problems: list[str] = []
    for name in dict.fromkeys(named):
        if (provider := _PROVIDERS.get(name)) is None:
            problems.append(f"{quote_text_or_length(name, 40)} is not a provider ({', '.join(_PROVIDERS)})")
            continue
        address = runtime.config.get(f"{name}_url") or provider.url
        key = _find_key(runtime, f"{name}_key")
        if not address:
            problems.append(f"{name} needs {name}_url")
        elif provider.needs_key and not key:
            problems.append(f"{name} needs {name}_key")
        else:
            ready.append((name, address, key))
    if not ready:
        raise ToolError(
            f"No search provider is ready: {'; '.join(problems) or 'none is configured'}. Ask the user to set it under "
            "[tools.web_search.config] of handrail.toml.",
            kind="unavailable",
        )
    return sorted(ready, key=lambda one: hashlib.sha256(f"{runtime.session_id} {one[0]}".encode()).digest())


def _find_key(runtime: Runtime, name: str) -> str:
    try:
        return runtime.secrets.get(name)
    except ToolError as error:
        if error.kind != "unavailable":
            raise
        return ""


async def _count_call(runtime: Runtime) -> None:
    most = int(runtime.config.get("max_calls", "25"))
    before: int = await runtime.state.get(_CALLS) or 0
    if before >= most:
        raise ToolError(
            f"This session has made {before} searches. The maximum is {most}. Work with the results that you have.",
            kind="limit",
        )
    await runtime.state.put(_CALLS, before + 1)


async def _search(runtime: Runtime, name: str, address: str, key: str, query: str, count: int) -> list[dict[str, str]]:
    """Return the results of one provider.

    :raises ToolError: ``limit`` if it allows no further request; ``unavailable`` if the configuration is wrong;
        ``backend`` or ``timeout`` if it does not answer as it should
    """
    provider = _PROVIDERS[name]
    request = provider.build(address, query, count, key)
    response = await runtime.net.request(
        request.method,
        request.url,
        headers=request.headers,
        body=request.body,
        max_bytes=_MAX_ANSWER_BYTES,
        timeout_ms=int(runtime.config.get("timeout_ms", "15000")),
        max_redirects=2,
    )
    _check_status(name, response)
    answer = _decode_answer(name, response)
    if name == "searxng" and isinstance(answer, dict):
        engines = cast("dict[str, Any]", answer).get("unresponsive_engines")
        if engines and not cast("dict[str, Any]", answer).get("results"):
            raise ToolError(
                f"No engine of {name} answered: {quote_text_or_length(json.dumps(engines), 200)}. Try again later.",
                kind="backend",
            )
    results: list[dict[str, str]] = []
    for title, url, snippet in provider.read(answer):
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            results.append(
                {
                    "title": _clean(title, _MAX_TITLE) or url[:_MAX_TITLE],
                    "url": url[:2048],
                    "snippet": _clean(snippet, _MAX_SNIPPET),
                }
            )
    return results[:count]


def _check_status(name: str, response: HttpResponse) -> None:
    status = response.status
    if status == 200:
        return
    wait = response.header("retry-after")
    if status in (402, 429, 432) or (status == 503 and wait):
        when = f" Retry after: {quote_text_or_length(wait, 40)}." if wait else ""
        raise ToolError(
            f"{name} does not accept further searches now: status {status}.{when} Continue without it, and do not repeat the search.",
            kind="limit",
        )
    if status in (401, 403):
        hint = (
            "This SearXNG does not offer JSON: add json to search.formats in its settings"
            if name == "searxng"
            else f"Ask the user to check {name}_key under [tools.web_search.config]"
        )
        raise ToolError(f"{name} refused the request: status {status}. {hint}.", kind="unavailable")
    if status in (404, 405, 410):
        raise ToolError(
            f"{name} was not found at its address: status {status}. Ask the user to check {name}_url under "
            "[tools.web_search.config].",
            kind="unavailable",
        )
    raise ToolError(f"{name} answered with status {status}. Try again later.", kind="backend")


def _decode_answer(name: str, response: HttpResponse) -> Any:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        pass
    start = response.body[:400].lstrip().lower()
    if start.startswith((b"<!doctype", b"<html")) or "html" in (response.header("content-type") or ""):
        what = "an HTML page instead of JSON. It may block automated clients, or its URL may be that of its web page"
    else:
        what = "invalid JSON"
    raise ToolError(
        f"{name} returned {what}. The search has no results. Ask the user to check the settings of {name} in handrail.toml.",
        kind="backend",
    )


def _clean(text: object, most: int) -> str:
    """Return a text without HTML, in one line."""
    plain = html.unescape(_TAG.sub("", text)) if isinstance(text, str) else ""
    line = " ".join(plain.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
