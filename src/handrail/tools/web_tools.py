"""Tools of the web: web_fetch returns the text of a page, and http.post sends data to an HTTP service."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlencode

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
from handrail.contract.services.tool_runtime import ExtractedWebPage, HttpResponse, Runtime
from handrail.contract.text.host_names import parse_host_address, parse_http_url
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.requires import NetRequires, Requires
from handrail.contract.tool.spec import ConfigKey, ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.document_text import PDF_START, detect_image_type, extract_pdf_text
from handrail.tools.files.reading_and_search import compute_max_result_bytes
from handrail.tools.tool_declarations import MAX_OUTPUT, make_closed_object_schema

_MAX_PAGE_BYTES = 16 * 1024 * 1024
_MAX_ERROR_TEXT = 2_000
_MAX_SENT_BYTES = 1024 * 1024
_TIMEOUT_MS = 60_000
_ANY_PUBLIC_HOST = Requires(net=NetRequires(hosts=("*",)))
"""Any public host may be requested. The rules or the user decide on each host by its name."""
_FETCH = LOCKED_SHAPES["web_fetch"]
_ACCEPT = (
    "text/markdown, text/html;q=0.9, application/xhtml+xml;q=0.9, application/json;q=0.8, text/plain;q=0.8, */*;q=0.5"
)
_FEW_CHARACTERS, _MUCH_HTML = 600, 20_000
"""A page of scripts: less text than this from more HTML than this."""
_BLOCK_PAGE = compile_regex_lazily(
    r"just a moment|attention required|access denied|are you (?:a )?(?:human|robot)|verify (?:that )?you are (?:a )?human|"
    r"checking your browser|enable javascript and cookies|captcha|unusual traffic|request blocked|pardon our interruption",
    re.IGNORECASE,
)
_TEXT_TYPES = compile_regex_lazily(
    r"text/.*|application/(?:.*\+)?(?:json|xml|yaml|x-yaml|toml|javascript|x-sh|sql|graphql)"
)
_CREDENTIALS = ("credential", *(f"credential_{number}" for number in range(2, 9)))
"""The settings of credentials, each with the host that gets it."""
_CREDENTIAL_FIELDS = frozenset(("authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"))


class WebFetchTool(Tool):
    spec = ToolSpec(
        id="web_fetch",
        description=_FETCH.description,
        parameters=_FETCH.parameters,
        requires=_ANY_PUBLIC_HOST,
        side_effect="read",
        locks=(),
        targets=_FETCH.targets,
        idempotent=True,
        timeout_ms=_TIMEOUT_MS,
        max_output=MAX_OUTPUT,
        tier="core",
        kind="fetch",
        guidance="web_fetch returns the main text of a page, with its links. It runs no scripts of the page.",
        documentation=(
            "Returns `url` (of the last redirect), `status`, `content_type`, `title`, `text` and `links`.\n\n"
            "- HTML: the main content as text, with tables and code. Navigation and hidden elements are left out.\n"
            "- PDF: the text of the first pages that fit, with `last_page` and `total_pages`.\n"
            "- JSON is indented. Other text is returned as it is. Images are returned as images.\n"
            "- `notes` says what limits the text: a page drawn by scripts, a page that blocks programs, hidden elements.\n"
            "- A longer text is cut, and `output_path` in the metadata names the file with the rest. Read it with `read`.\n"
            "- A status of 400 or more is an error, with the beginning of the page."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        url: str = args["url"]
        response = await runtime.net.request(
            "GET", url, headers={"accept": _ACCEPT}, max_bytes=_MAX_PAGE_BYTES, timeout_ms=_TIMEOUT_MS - 5_000
        )
        answer = _describe_response(response)
        if response.status >= 400:
            try:
                text = (await _read_text(runtime, response, {}))[:_MAX_ERROR_TEXT]
            except ToolError:  # the status matters more than the reason why its page has no text
                text = ""
            raise ToolError(_explain_status(response), kind="backend", data={**answer, "text": text})
        if (media_type := detect_image_type(response.body)) is not None:
            return {**answer, "image": Blob(response.body, media_type)}
        if _is_pdf(response):
            return {**answer, **await _read_pdf(runtime, response)}
        text = await _read_text(runtime, response, answer)
        notes: list[str] = answer.pop("notes", [])
        if response.is_truncated:
            notes.append(f"The page is longer than {_MAX_PAGE_BYTES:,} bytes. The rest was not read.")
        return {**answer, "text": text, **({"notes": notes} if notes else {})}


def _describe_response(response: HttpResponse) -> dict[str, Any]:
    answer: dict[str, Any] = {"url": response.url, "status": response.status}
    if content_type := response.header("content-type"):
        answer["content_type"] = content_type[:200]
    if response.redirects:
        answer["redirects"] = list(response.redirects)
    return answer


def _explain_status(response: HttpResponse) -> str:
    status, url = response.status, response.url
    if status in (404, 410):
        step = "Check the URL, or search for the page."
    elif status in (401, 403):
        step = "The page needs a sign-in, or the server refuses programs. Use another source."
    elif status == 429 or (status == 503 and response.header("retry-after")):
        wait = response.header("retry-after")
        step = f"Try again {f'after {quote_text_or_length(wait, 40)} (Retry-After)' if wait else 'later'}."
    elif status >= 500:
        step = "Try again later, or use another source."
    else:
        step = "Check the URL."
    return f"{url} answered with status {status}. {step}"


async def _read_text(runtime: Runtime, response: HttpResponse, answer: dict[str, Any]) -> str:
    """Return the text of a response, and add the title, the links and the notes to ``answer``.

    :raises ToolError: ``invalid_input`` for content without text
    """
    kind, charset = _parse_content_type(response.header("content-type") or "")
    body = response.body
    if not kind or kind in ("application/octet-stream", "text/plain"):
        start = body[:2048].lstrip().lower()
        if not kind and start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
            kind = "text/html"
    if kind in ("text/html", "application/xhtml+xml"):
        page = await runtime.documents.extract_page(body, charset=charset, url=response.url)
        _add_page_details(page, len(body), answer)
        return page.text
    if b"\0" in body[:4096] and charset is None and not body.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ToolError(
            f"{response.url} is not text: {kind or 'unknown type'}, {len(body):,} bytes. Use the URL of a page, or download it "
            "with a program in bash.",
            kind="invalid_input",
        )
    if kind and not _TEXT_TYPES.fullmatch(kind) and charset is None and not _is_utf8(body):
        raise ToolError(
            f"{response.url} is not text: {kind}, {len(body):,} bytes. Use the URL of a page, or download it with a program in "
            "bash.",
            kind="invalid_input",
        )
    text = _decode(body, charset)
    if kind == "application/json" or kind.endswith("+json"):
        try:
            return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            return text
    return text


def _is_pdf(response: HttpResponse) -> bool:
    kind, _ = _parse_content_type(response.header("content-type") or "")
    return kind in ("application/pdf", "application/x-pdf") or response.body.startswith(PDF_START)


async def _read_pdf(runtime: Runtime, response: HttpResponse) -> dict[str, Any]:
    """Return the text of the first pages of a PDF that fit into an answer."""
    if response.is_truncated:
        raise ToolError(
            f"{response.url} is a PDF of more than {_MAX_PAGE_BYTES:,} bytes. Download it with a program in bash, and read "
            "the file with read.",
            kind="limit",
        )
    found = await extract_pdf_text(runtime, response.body, response.url, 1, None, compute_max_result_bytes(runtime))
    last, total = found["last_page"], found["total_pages"]
    answer: dict[str, Any] = {"text": found["text"], "last_page": last, "total_pages": total}
    if found["next"] is not None:
        answer["notes"] = [
            f"The text covers the first {last} of {total} pages. For the rest, download the document with a program in "
            "bash, and read the file with read."
        ]
    return answer


def _add_page_details(page: ExtractedWebPage, size: int, answer: dict[str, Any]) -> None:
    if page.title:
        answer["title"] = page.title[:500]
    if page.links:
        answer["links"] = [{"text": text, "url": url} for text, url in page.links]
    notes: list[str] = []
    if page.part == "whole":
        notes.append("The text covers the whole page: no main content was found.")
    if page.is_simplified:
        notes.append("The page is too complex to extract its main content. Only its tags were removed.")
    if len(page.text) < _FEW_CHARACTERS and size > _MUCH_HTML and page.scripts:
        notes.append(
            "Scripts render most of this page, and web_fetch does not run scripts. Look for an API, a feed or a raw file."
        )
    if len(page.text) < 5 * _FEW_CHARACTERS and _BLOCK_PAGE.search(f"{page.title}\n{page.text[:1000]}"):
        notes.append("This looks like a page that blocks programs, not like the content. Do not fetch it again.")
    if page.keeps_hidden:
        notes.append("The page hides most of its text until a script shows it. The hidden text is included.")
    elif page.hidden_elements:
        notes.append(f"{page.hidden_elements} hidden elements with text were left out.")
    if notes:
        answer["notes"] = notes


def _parse_content_type(value: str) -> tuple[str, str | None]:
    kind, *parameters = (part.strip() for part in value.split(";"))
    for one in parameters:
        name, _, given = one.partition("=")
        if name.strip().lower() == "charset" and given:
            return kind.lower(), given.strip().strip("\"'")[:40] or None
    return kind.lower(), None


def _decode(body: bytes, charset: str | None) -> str:
    for mark, name in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    try:
        return body.decode(charset or "utf-8", "replace")
    except (LookupError, UnicodeError):
        return body.decode("utf-8", "replace")


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(body) - 4
    return True


def _make_credential_keys() -> dict[str, ConfigKey]:
    keys: dict[str, ConfigKey] = {}
    for name in _CREDENTIALS:
        keys[f"{name}_host"] = ConfigKey(description=f"Host that gets {name}, such as api.example.org", required=False)
        keys[f"{name}_header"] = ConfigKey(
            description=f"Header field of {name}", required=False, default="authorization"
        )
        keys[name] = ConfigKey(
            description="Value of that header field, such as Bearer TOKEN", secret=True, required=False
        )
    return keys


def _find_credentials(url: str, runtime: Runtime) -> dict[str, str]:
    """Return the header fields with the operator's credentials for the host of a URL.

    :raises ToolError: ``denied`` if the URL does not use https; ``unavailable`` if two credentials have the same field
    """
    found: dict[str, str] = {}
    try:
        asked = parse_http_url(url).host.name
    except ValueError:  # the request itself says what is wrong with it
        return found
    for name in _CREDENTIALS:
        host = runtime.config.get(f"{name}_host")
        if not host or parse_host_address(host).name != asked:
            continue
        if not url.lower().startswith("https://"):
            raise ToolError(f"The credential for {host} is sent with https only. Use an https:// URL.", kind="denied")
        header = runtime.config.get(f"{name}_header", "authorization").lower()
        if header in found:
            text = (
                f"Two credentials for {host} have the header field {header!r}. Ask the user to correct {name}_host or "
                f'{name}_header under [tools."http.post".config] of handrail.toml.'
            )
            raise ToolError(text, kind="unavailable")
        found[header] = runtime.secrets.get(name)
    return found


class HttpPostTool(Tool):
    spec = ToolSpec(
        id="http.post",
        description=(
            "Send data to an HTTP service with POST, and return its answer. Pass exactly one of `json`, `form` and `body`."
        ),
        parameters=make_closed_object_schema(
            {
                "url": {
                    "type": "string",
                    "format": "uri",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "URL of the service, starting with https:// or http://",
                },
                "json": {
                    "description": "Any JSON value, sent as application/json. Required unless `form` or `body` is given"
                },
                "form": {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                    "maxProperties": 1000,
                    "description": "Fields of a form and their values, sent as application/x-www-form-urlencoded. Required unless `json` or `body` is given",
                },
                "body": {
                    "type": "string",
                    "maxLength": _MAX_SENT_BYTES,
                    "description": "Text of at most 1 MiB, sent as text/plain unless `headers` has another content-type. Required unless `json` or `form` is given",
                },
                "headers": {
                    "type": "object",
                    "additionalProperties": {"type": "string", "maxLength": 4096},
                    "maxProperties": 40,
                    "description": "Further header fields. Credentials are not accepted: the operator configures them. Default: none",
                },
            },
            ("url",),
        ),
        requires=_ANY_PUBLIC_HOST,
        side_effect="external",
        locks=(),
        targets={"net.fetch": "{url}"},
        idempotent=False,
        timeout_ms=_TIMEOUT_MS,
        category="system",
        kind="other",
        config=_make_credential_keys(),
        documentation=(
            "Returns `url`, `status`, `content_type`, and the answer as `json` or `text`, whatever the status is.\n\n"
            "- A redirect that would send the data to another host is not followed: the answer has its `location`.\n"
            "- An Idempotency-Key is sent, so that a service that supports it can recognise a repeated request.\n"
            "- After a failure in the middle of a request, its effect is unknown. Check it before you send it again."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        url: str = args["url"]
        body, content_type = _build_body(args)
        headers = _check_headers(args.get("headers", {}))
        headers.setdefault("content-type", content_type)
        headers.setdefault("idempotency-key", runtime.call_id)
        headers |= _find_credentials(url, runtime)
        response = await runtime.net.request(
            "POST",
            url,
            headers=headers,
            body=body,
            max_bytes=runtime.max_output_bytes,
            timeout_ms=_TIMEOUT_MS - 5_000,
        )
        answer = _describe_response(response)
        if location := response.header("location"):
            answer["location"] = location
        kind, charset = _parse_content_type(response.header("content-type") or "")
        if response.is_truncated:
            answer["notes"] = [f"The answer is longer than {runtime.max_output_bytes:,} bytes. The rest was not read."]
        text = _decode(response.body, charset)
        if (kind == "application/json" or kind.endswith("+json")) and not response.is_truncated:
            try:
                return {**answer, "json": json.loads(text)}
            except (ValueError, RecursionError):
                pass
        return {**answer, "text": text}


def _build_body(args: dict[str, Any]) -> tuple[bytes, str]:
    given = [name for name in ("json", "form", "body") if name in args]
    if len(given) != 1:
        what = "none of them" if not given else " and ".join(f"`{name}`" for name in given)
        raise ToolError(
            f"The data is ambiguous: you passed {what}. Pass exactly one of `json`, `form` and `body`.",
            kind="invalid_input",
        )
    if "json" in args:
        body, content_type = json.dumps(args["json"], ensure_ascii=False).encode(), "application/json"
    elif "form" in args:
        body, content_type = urlencode(args["form"]).encode(), "application/x-www-form-urlencoded"
    else:
        body, content_type = args["body"].encode(), "text/plain; charset=utf-8"
    if len(body) > _MAX_SENT_BYTES:
        raise ToolError(
            f"The data has {len(body):,} bytes. The maximum is {_MAX_SENT_BYTES:,}. Send less.", kind="limit"
        )
    return body, content_type


def _check_headers(given: dict[str, str]) -> dict[str, str]:
    headers = {name.lower(): value for name, value in given.items()}
    for name in headers:
        if name in _CREDENTIAL_FIELDS:
            raise ToolError(
                f"The header field {name!r} is a credential, which only the operator sets: credential_host and credential "
                'under [tools."http.post".config] of handrail.toml. Leave it out.',
                kind="denied",
            )
    return headers
