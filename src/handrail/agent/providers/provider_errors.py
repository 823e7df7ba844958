"""Errors for failed HTTP requests to a provider, in words for the operator and without keys. Readers of SDK objects."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

from handrail.agent.model_protocol import (
    ContextOverflow,
    ProviderBusy,
    ProviderDenied,
    ProviderError,
    RejectedPart,
    ReplyStreamCut,
    RequestRejected,
)

_BUSY_STATUS = frozenset({408, 409, 424, 425, 429, 498, 499})
_BUSY_TYPES = frozenset(
    {
        "rate_limit_error",
        "rate_limit_exceeded",
        "overloaded_error",
        "timeout_error",
        "engine_overloaded_error",
        "engine_overloaded",
        "rate_limit",
        "server_busy",
        "service_unavailable",
        "throttling",
        "unavailable",
        "too_many_requests",
        "resource_exhausted",
        "deadline_exceeded",
    }
)
_FAULT_TYPES = frozenset(
    {"api_error", "server_error", "internal", "internal_error", "internal_server_error", "internalservererror"}
)
"""Types that some servers also give a request that they refuse with another status."""
_SPENT_CODES = frozenset(
    {
        "insufficient_quota",
        "billing_error",
        "billing_hard_limit_reached",
        "billing_not_active",
        "budget_exceeded",
        "exceeded_current_quota_error",
        "arrearage",
        "allocationquota.freetieronly",
    }
)
_DENIED_CODES = frozenset(
    {"authentication_error", "permission_error", "invalid_api_key", "invalid_authentication_error"}
)
_UNREADABLE_CODES = frozenset({"tool_use_failed", "output_parse_failed", "json_validate_failed"})
"""Codes for a reply of the model that the provider could not read. The same request often succeeds the next time."""

# A request that is longer than the model's context, in the words of the providers and of the servers that people run.

_LENGTH_CODES = frozenset(
    {
        "context_length_exceeded",
        "context_too_long",
        "context_window_exceeded",
        "contextwindowexceedederror",
        "exceed_context_size_error",
        "model_max_prompt_tokens_exceeded",
        "prompt_too_long",
        "tokens_limit_reached",
        "request_too_large",
        "string_above_max_length",
        "1261",
        "3051",
    }
)
_LENGTH_WORDS = re.compile(
    r"""(?ix)
    (?:maximum|max|model|model's)\ (?:context|prompt|model)\ (?:length|window|size)
    | (?:context|prompt)\ (?:length|window|size|limit)\b.{0,60}?\b(?:exceed|reach|overflow|too\ (?:long|large|small)|limit)
    | (?:exceed\w*|longer\ than|larger\ than|over|beyond|greater\ than|overflow\w*)\b.{0,80}?\b(?:context|token\ limit|model\ (?:length|limit)|
        maximum\ (?:number\ of\ )?(?:input\ )?tokens|max_?(?:model_?len|seq_?len|input_?tokens))
    | (?:prompt|input|request|message|messages|conversation|text)\b.{0,40}?\bis\ too\ (?:long|large)
    | (?:prompt|input|inputs|context|conversation|history|request|messages|string|entity|body|payload|content)\ too\ (?:long|large)
    | (?:prompt|input|request|messages?)\b.{0,80}?\bsupports?\ (?:only\ )?(?:at\ most|up\ to)\ [\d,]{4,}\b(?!\ (?:completion|output))
    | (?:prompt|input)[\ _](?:length|size|tokens?)\b.{0,60}?\b(?:exceed|(?:must|should)\ be\ (?:less|at\ most|smaller|<))
    | (?:total|prompt|input)[\ _](?:length|tokens?)\b\D{0,12}[\d,]+\ ?>\ ?\d
    | tokens\b.{0,60}?\b(?:greater|more|larger)\ than\b.{0,20}?\d+\ (?:allowed|permitted|supported)
    | max_(?:prompt|input)_tokens\b.{0,20}?\bexceed | \bn_ctx\b | too\ many\ total\ text\ bytes
    | max_(?:completion_)?tokens\ must\ be\ at\ least\ 1,\ got\ -\d  # the prompt left less than nothing
    | (?:prompt|input|request|messages?|payload|body)\b.{0,20}?\bsize\b.{0,20}?\bexceed
    | inputs?`?\ must\ have\ less\ than
    | 超过模型.{0,6}?(?:长度|限制) | 上下文.{0,12}?(?:超|限制) | (?:输入|提示词|请求)[^频次速率并发]{0,8}?(?:过长|超长|超出|超过)
    | too\ many\ (?:input\ |prompt\ )?tokens
    | input\ length\ and\ `?max_tokens`?\ exceed
    | (?:token|tokens|token\ count)\b.{0,60}?(?:\bexceed\w*|\bmust\ be\ <=?|\bcannot\ exceed).{0,80}?\b(?:limit|maximum|tokens|\d{3,})
    | range\ of\ input\ length\ should\ be
    | reduce\ (?:the\ |your\ )?(?:length|size)\ of\ the\ (?:messages|prompt|input|conversation)
    | (?:input\ or\ output\ tokens|messages)\ must\ be\ reduced
    | context\ (?:shift\ is\ disabled|the\ overflows)
    | context(?:_|\ )?window(?:_|\ )?exceed
    | prompt\ ?超长 | maximum\ (?:prompt|input)\ length
    """
)
_OTHER_LIMIT_WORDS = re.compile(
    r"maximum tokens you requested|(?:\.|tool_)(?:call_)?(?:id|name|description)'?: string too long"
)
"""Refusals for another length than that of the conversation."""
_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d+)"
_LIMIT_IN_WORDS = (
    re.compile(rf"\bn_ctx\W{{1,3}}{_NUMBER}"),
    re.compile(rf"> ?{_NUMBER}\b"),
    re.compile(rf"(?i){_NUMBER} maximum context length"),
    re.compile(rf"(?i)(?:context|model) (?:length|window|size)(?: \w+)?(?: of only| of| is| was|:)? \(?{_NUMBER}"),
    re.compile(rf"\[1, ?{_NUMBER}\]"),
    re.compile(
        rf"(?i)(?:maximum|max|limit(?: is| of)?|allowed|exceed|must be|less than|only|at most|up to)\D{{0,60}}?[(: <=]{_NUMBER}"
    ),
)
_PICTURE_WORDS = re.compile(
    r"(?i)\bimages?\b|image_url|picture|\bvision\b|multi-?modal|media.?type|\bbase64|pixel|inline_?data"
)
_NO_PICTURES_WORDS = re.compile(
    r"(?i)(?:not|n't|no|without|un)\W?(?:\w+ ){0,4}?(?:support|available|allow|accept|capab|enabled|able)|mmproj|expected(?: a)? string|text.only|not a multi-?modal"
    r"|only supported by|expected `?text\b|at most 0 image|missing data required"
)
_PICTURE_FORM_WORDS = re.compile(
    r"(?i)\bmime|\bformats?\b|media.?type|content-type|image/(?:png|jpe?g|gif|webp)|dimension|pixel|corrupt|too (?:large|many)"
)
"""Refusals of one picture for its form, by a model that takes others."""
_REASONING_WORDS = re.compile(
    r"(?i)thinking|reasoning|signature|encrypted|thought|extra_content|unsupported propert|extra inputs|provider_specific|\brs_"
)
_BUSY_WORDS = re.compile(
    r"(?i)overloaded|rate.?limit|too many requests|try again|temporarily|timed? ?out|capacity|unavailable|bad gateway"
)

_OVERLOAD_WORDS = re.compile(
    r"(?i)too many requests|(?:server|service|system|model|engine) (?:is )?(?:currently |temporarily )?(?:busy|overloaded)|繁忙|访问量过大"
)
_RATE_WORDS = re.compile(r"(?i)\brate.?limit(?:s|ed|ing)?\b(?!\.?[/?#])|\bthrottl")
_SPENT_WORDS = re.compile(
    r"(?i)credit balance is too low|insufficient (?:balance|credits?|funds)|(?:balance|credits?) (?:is|are) insufficient"
    r"|out of credits|used all (?:\w+ ){0,2}credits|spend(?:ing)? limit|key limit exceeded|reached your specified API usage limits|余额不足|欠费"
)
_KEY_WORDS = re.compile(
    r"(?i)(?:incorrect|invalid|missing|expired|wrong) api[ _-]?key|api[ _-]?key (?:is )?(?:not valid|invalid|not found|expired|missing|required)|login fail|\bunauthori[sz]ed\b"
)
_UNREADABLE_WORDS = re.compile(
    r"failed_generation|(?i:error parsing tool call|failed to parse (?:the )?(?:tool|function) call)"
)
_UNSUPPORTED_WORDS = re.compile(
    r"(?i)\bnot (?:currently |yet )?support|n't support|\bunsupported\b|requires? (?:the )?--|not implemented"
)
_TOOL_WORDS = re.compile(r"(?i)\btools?\b|function.?call")

_TAGS = re.compile(r"(?is)<(script|style|head)\b.*?</\1\s*>|<[^>]{0,2000}>")
_TITLE = re.compile(r"(?is)<title[^>]{0,200}>(.{1,300}?)</title>")


def extract_html_page_text(text: str) -> str:
    """Return a text without markup if it is an HTML page: its title, or the words on it."""
    head = text[:20_000]
    if not re.match(
        r"(?is)\s*+(?:\ufeff)?\s*+(?:<!--.{0,2000}?-->\s*+)?<(?:!doctype\s+html|html|head|body|title|h1|center)\b", head
    ):
        return text
    title = _TITLE.search(head)
    return title[1].strip() if title is not None and title[1].strip() else _TAGS.sub(" ", head)


def make_reported_error(
    name: str, key_variable: str, error: object, status: int | None = None, headers: Mapping[str, str] | None = None
) -> ProviderError:
    """Return the error for what a provider reports: an object, a text, or a page of a server between.

    :param name: the model, as the operator wrote it
    :param error: the body of the answer, or its member ``error``
    :param status: the HTTP status; None or 200 for an error inside a stream
    """
    found: object = error
    if isinstance(error, list) and error:
        found = cast("list[object]", error)[0]
    # Gateways wrap the error of the provider behind them, sometimes more than once.
    for name_of_inner in ("error", "error", "error", "errors", "base_resp"):
        inner = get_sdk_field(found, name_of_inner)
        if isinstance(inner, list) and inner:
            inner = cast("list[object]", inner)[0]
        if inner and isinstance(inner, dict | str):
            found = cast("object", inner)
    code: str | None = None
    if isinstance(found, str):
        message = extract_html_page_text(found)
    else:
        given = get_sdk_field(found, "code") or get_sdk_field(found, "type") or get_sdk_field(found, "status")
        kind = get_nonempty_text_field(found, "type") or get_nonempty_text_field(found, "status")
        code = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else None
        message = extract_html_page_text(find_error_text(found))
        metadata = get_sdk_field(found, "metadata")  # of OpenRouter, with the words of the provider behind it
        if raw := get_nonempty_text_field(metadata, "raw"):
            message = f"{message}: {raw}" if message else raw
        if not message:
            plain = convert_to_json_object(found)
            message = json.dumps(plain, ensure_ascii=False)[:300] if plain else "no reason given"
        number = next(
            (one for key in _STATUS_FIELDS if 400 <= (one := parse_positive_count_field(found, key)) <= 599), None
        )
        if status in (None, 200):
            status = number or status
        if code is not None and code.isdigit():
            code = kind or code
        if isinstance(window := get_sdk_field(found, "n_ctx"), int):  # of llama.cpp
            message += f" (context size is {window})"
        inner_headers = get_sdk_field(metadata, "headers")
        if isinstance(inner_headers, dict):
            more = {str(key).lower(): str(value) for key, value in cast("dict[object, object]", inner_headers).items()}
            headers = {**more, **(headers or {})}
    if (wait := _find_reported_wait(cast("object", error))) and "retry-after" not in {
        key.lower() for key in headers or {}
    }:
        headers = {**(headers or {}), "retry-after": wait}
    return make_request_error(name, key_variable, status, code, message, headers or {})


_STATUS_FIELDS = ("code", "status", "status_code", "http_status_code")
_TEXT_FIELDS = ("message", "msg", "detail", "error_message", "error_msg", "status_msg", "error_description", "title")


def find_error_text(error: object) -> str:
    """Return the text of an error object, or ``""``."""
    texts = (get_sdk_field(error, key) for key in _TEXT_FIELDS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


_WAIT_FIELDS: Mapping[str, str] = {
    "retryafter": "",
    "retryafterseconds": "s",
    "retryafterms": "ms",
    "retrydelay": "",
    "resetsinseconds": "s",
    "estimatedtime": "s",
}
"""Fields of an error that tell when to ask again, without underscores, and the unit of a bare number."""


def _find_reported_wait(value: object, depth: int = 5) -> str:
    """Return when to ask again by the fields of an error, or ``""``."""
    if depth and isinstance(value, list):
        return next(
            (found for item in cast("list[object]", value) if (found := _find_reported_wait(item, depth - 1))), ""
        )
    if not depth or not isinstance(value, dict):
        return ""
    given = cast("dict[object, object]", value)
    for key, found in given.items():
        unit = _WAIT_FIELDS.get(str(key).lower().replace("_", "").replace("-", ""))
        if unit is not None and isinstance(found, int | float | str) and not isinstance(found, bool) and found:
            return f"{found}{unit}" if str(found).replace(".", "", 1).isdecimal() else str(found)
    return next((found for item in given.values() if (found := _find_reported_wait(item, depth - 1))), "")


def make_request_error(
    name: str, key_variable: str, status: int | None, code: str | None, message: str, headers: Mapping[str, str]
) -> ProviderError:
    """Return the error for a refused or failed request.

    :param name: the model, as the operator wrote it
    :param status: the HTTP status; None or 200 for an error inside a stream
    :param code: the provider's error code
    """
    # One bounded line, since it goes to terminals and logs.
    text = " ".join(extract_html_page_text(message).split())[:500]
    kind = (code or "").lower()
    is_in_stream = status is None or status < 400
    is_limited = status not in (404, 422) and (status is None or status < 500) and _find_limit_words(kind, text)
    if kind in _SPENT_CODES or status == 402 or (status != 401 and _SPENT_WORDS.search(text)):
        return ProviderDenied(f"{name}: The account's quota is used up ({text}). Check the provider's billing page.")
    is_denied = status in (401, 403) or (status in (None, 200, 400) and _KEY_WORDS.search(text) is not None)
    if kind in _DENIED_CODES or (is_denied and not (status == 403 and is_limited)):
        has_reason = status == 403 and not re.search(r"(?i)\bkey\b", text)  # a text about keys may contain one
        return ProviderDenied(
            f"{name}: The provider rejected the key ({f'403: {text}' if has_reason else status or code}). "
            f"Check {key_variable}, or the `api_key` that was passed, and the account's permissions."
        )
    if (too_long := _find_length_refusal(name, status, kind, text)) is not None:
        return too_long
    about = _find_rejected_part(text)
    if about == "no pictures" and (status or 0) >= 400 and status not in _BUSY_STATUS:
        return RequestRejected(
            f"{name}: The provider rejected the request ({status}: {text}). Remove the image, or choose a model that accepts images.",
            about=about,
        )
    is_unsupported = _UNSUPPORTED_WORDS.search(text) is not None and not _BUSY_WORDS.search(text)
    is_fault = (status or 0) >= 500 or (is_in_stream and kind in _FAULT_TYPES)
    if kind in _UNREADABLE_CODES or (_UNREADABLE_WORDS.search(text) and not is_fault):
        return ReplyStreamCut(
            f"{name}: The model wrote a call that the provider could not read ({text}). Resume the run to ask again."
        )
    if (
        status in _BUSY_STATUS
        or kind in _BUSY_TYPES
        or (is_fault and status != 501 and not is_unsupported)
        or (is_limited and not is_in_stream)
    ):
        return ProviderBusy(
            f"{name}: The provider is busy or failing ({status if not is_in_stream else code}: {text}). Try again later.",
            retry_after_s=parse_retry_after_s(headers, text),
        )
    if status == 404 and not re.search(r"\bItem with id\b", text):
        return RequestRejected(
            f"{name}: The provider does not know this model or address (404: {text}). Check the name and the base URL.",
            about="nothing",
        )
    if is_in_stream and not is_unsupported and not _is_rejection(kind):
        if _BUSY_WORDS.search(text):
            return ProviderBusy(
                f"{name}: The provider is busy or failing ({code or 'unnamed'}: {text}). Try again later.",
                retry_after_s=parse_retry_after_s(headers, text),
            )
        return ReplyStreamCut(
            f"{name}: The provider interrupted the reply with an error ({code or 'unnamed'}: {text}). Resume the run to ask again."
        )
    shown = (code or "unnamed") if is_in_stream else status
    advice = "Correct the setting or message that it names."
    if is_unsupported and _TOOL_WORDS.search(text):
        advice = "Choose a model that calls tools, or let this one write its calls as text with --text-tool-calls."
    return RequestRejected(f"{name}: The provider rejected the request ({shown}: {text}). {advice}", about=about)


def _find_rejected_part(text: str) -> RejectedPart:
    if _PICTURE_WORDS.search(text):
        takes_none = _NO_PICTURES_WORDS.search(text) and not _PICTURE_FORM_WORDS.search(text)
        return "no pictures" if takes_none else "pictures"
    return "reasoning" if _REASONING_WORDS.search(text) else "unknown"


def _find_limit_words(kind: str, text: str) -> bool:
    return bool(_OVERLOAD_WORDS.search(text) or (_RATE_WORDS.search(text) and not _is_rejection(kind)))


def _is_rejection(kind: str) -> bool:
    return "invalid" in kind or "badrequest" in kind or "bad_request" in kind or kind.startswith("not_found")


def _find_length_refusal(name: str, status: int | None, kind: str, text: str) -> ContextOverflow | None:
    """Return the error for a request that is too long, or None if it was refused for another reason."""
    is_about_tokens = re.search(r"(?i)\btokens?\b|\bcontext\b", text) is not None
    if status in (404, 408, 409) or _OTHER_LIMIT_WORDS.search(text):
        return None
    if kind not in _LENGTH_CODES and not is_about_tokens and _PICTURE_WORDS.search(text):
        return None
    # A limit on tokens per minute uses almost the same words as the limit of the context.
    is_limit_of_rate = (
        status == 429 or "rate_limit" in kind or re.search(r"(?i)per.minute|rate.?limit|wait before", text)
    )
    if is_limit_of_rate and not re.search(r"(?i)request too large|must be reduced", text):
        return None
    if kind not in _LENGTH_CODES and status != 413 and not _LENGTH_WORDS.search(text):
        return None
    if not is_about_tokens and re.search(r"\btools?(?:\[|\.\d)", text):  # one text of a tool is too long
        return None
    limit = next((found for pattern in _LIMIT_IN_WORDS if (found := pattern.search(text)) is not None), None)
    if re.search(r"(?i)\bbytes\b|\bstring\b|message size", text) and not is_about_tokens:
        limit = None  # it counts something else
    tokens = int(limit[1].replace(",", "")) if limit is not None and len(limit[1]) < 12 else 0
    return ContextOverflow(
        f"{name}: The conversation is longer than the model's context ({text}). Start a new session, set a smaller "
        "`context` in the agent's budget, or use a model with a larger context.",
        # A smaller number in the text is something else, such as a count of messages.
        max_tokens=tokens if tokens >= _LEAST_WINDOW else None,
    )


_LEAST_WINDOW = 256
"""The smallest number of tokens that is taken for a context window."""


def make_timeout_error(name: str, address: object) -> ProviderBusy:
    """Return the error for a time-out of the provider at ``address``."""
    return ProviderBusy(f"{name}: The provider did not answer in time ({address}). Try again later.")


def make_connection_error(name: str, address: object, error: Exception) -> ProviderBusy:
    """Return the error for a missing or lost connection to ``address``."""
    return ProviderBusy(
        f"{name}: The connection to {address} failed ({error.__cause__ or error}). Check the network and the address."
    )


def make_stream_format_error(name: str, error: Exception) -> ReplyStreamCut:
    """Return the error for a stream that does not have the provider's format."""
    return ReplyStreamCut(
        f"{name}: The provider sent an unreadable event ({str(error)[:300]}). Resume the run to ask again, and check the base URL if it happens each time."
    )


_LONGEST_HEADER = 1_000
"""The characters of a header that are read. The patterns below take the square of them in time."""


def parse_retry_after_s(headers: Mapping[str, str], text: str = "") -> float | None:
    """Return the seconds that a provider asks to wait, by its headers or by its words, or None."""
    given = {key.lower(): value[:_LONGEST_HEADER].strip() for key, value in headers.items()}
    for key in ("retry-after-ms", "x-ms-retry-after-ms", "retry-after", "x-retry-after"):
        scale = 1000.0 if key.endswith("-ms") else 1.0
        for value in (given.get(key, ""), given.get(key, "").partition(",")[0]):  # a proxy may repeat it
            if (seconds := _parse_wait_s(value, scale)) is not None:
                return seconds
    if (quota := re.search(r";\s*r=0\b.*?;\s*t=(\d+)", given.get("ratelimit", ""))) is not None:
        return _parse_wait_s(quota[1])
    resets = [
        seconds
        for key, value in given.items()
        if (match := _RESET_HEADER.fullmatch(key)) is not None
        and given.get(f"{match[1]}remaining{match[2] or ''}", given.get(f"{match[1]}{match[2] or ''}-remaining", ""))
        in ("0", "")
        and (seconds := _parse_wait_s(value)) is not None
    ]
    if resets:
        # Several limits may be used up. The request succeeds only after the last of them is reset.
        return max(resets)
    words = _TRY_AGAIN_IN.search(text)
    return None if words is None else _parse_wait_s(words[1])


_RESET_HEADER = re.compile(
    r"((?:x-|anthropic-)?ratelimit-(?:(?:requests|tokens|input-tokens|output-tokens)-)?)reset(-[\w-]+)?"
)
_TRY_AGAIN_IN = re.compile(
    r"(?i)(?:try again|retry|wait|available)\D{0,20}?(?:in|after|for)? ?"
    r"((?:\d+(?:\.\d+)? ?(?:ms|milliseconds?|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)(?![a-z]) ?)+)"
)
_DURATION = re.compile(r"(?i)(\d+(?:\.\d+)?) ?(ms|milliseconds?|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)")
_MOST_WAIT_S = 366 * 86400.0


def _parse_wait_s(value: str, scale: float = 1.0) -> float | None:
    """Return the seconds of a number, a duration such as ``1m30s``, a date or an epoch time, or None."""
    now = time.time()
    try:
        seconds = float(value) / scale
        if seconds > 1e11:  # milliseconds since 1970
            seconds = seconds / 1000 - now
        elif seconds > 1e9:
            seconds -= now
    except ValueError:
        if (parts := _DURATION.findall(value)) and not _DURATION.sub("", value).strip():
            seconds = sum(float(number) * _unit_s(unit.lower()) for number, unit in parts)
        # HTTP allows a date instead of a number of seconds.
        elif (at := _parse_date(value)) is not None:
            seconds = at.timestamp() - now
        else:
            return None
    return max(seconds, 0.0) if -_MOST_WAIT_S < seconds < _MOST_WAIT_S and not value.startswith("-") else None


def _unit_s(unit: str) -> float:
    if unit.startswith("mil") or unit == "ms":
        return 0.001
    return {"h": 3600.0, "m": 60.0}.get(unit[0], 1.0)


def _parse_date(value: str) -> datetime | None:
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            at = parse(value)
        except (ValueError, TypeError, OverflowError):
            continue
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return None


# Readers of the SDKs' objects, which are built from a server's data without validation.


def get_sdk_field(value: object, name: str) -> object:
    """Return a field of an SDK object or of plain JSON, or None if it is missing."""
    if isinstance(value, dict):
        return cast("dict[str, object]", value).get(name)
    return getattr(value, name, None)


def get_nonempty_text_field(value: object, name: str) -> str | None:
    """Return a field if it is a text that is not empty, else None."""
    found = get_sdk_field(value, name)
    return found if isinstance(found, str) and found else None


def encode_field_as_json(value: object, name: str) -> str | None:
    """Return a field as JSON text, or None if it is empty.

    Some servers send the object instead of the text, and some an empty list instead of an empty object.
    """
    found = get_sdk_field(value, name)
    if found is None or isinstance(found, str):
        return get_nonempty_text_field(value, name)
    return json.dumps(found, default=str) if found not in ({}, []) else None


def parse_positive_count_field(value: object, name: str) -> int:
    """Return a field if it is a positive integer, else 0. Some servers send it as a float or as text."""
    found = get_sdk_field(value, name)
    is_text = isinstance(found, str) and found.isdecimal() and len(found) < 16
    if isinstance(found, str | float) and (is_text or (isinstance(found, float) and found.is_integer())):
        found = int(found)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def get_nonnegative_number_field(value: object, name: str) -> float | None:
    """Return a field if it is a finite number that is not negative, else None."""
    found = get_sdk_field(value, name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if math.isfinite(found) and found >= 0 else None


def convert_to_json_object(block: object) -> dict[str, Any] | None:
    """Return the JSON of an SDK object, or None if it is not an object."""
    dump = getattr(block, "model_dump", None)
    if dump is None and not isinstance(block, dict):
        return None
    try:
        given = cast("Any", block) if dump is None else dump(mode="json", exclude_unset=True, warnings=False)
        # Through text, so that the copy shares nothing with the objects of the SDK and is surely plain JSON.
        plain: Any = json.loads(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", plain) if isinstance(plain, dict) else None
