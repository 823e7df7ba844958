"""Errors for failed HTTP requests to a provider, in words for the operator and without keys. Readers of SDK objects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from handrail.agent.model_protocol import ProviderBusy, ProviderDenied, ProviderError, ReplyStreamCut, RequestRejected

_BUSY_STATUS = frozenset({408, 409, 425, 429})
_BUSY_TYPES = frozenset(
    {"rate_limit_error", "rate_limit_exceeded", "overloaded_error", "api_error", "server_error", "timeout_error"}
)
_SPENT_CODES = frozenset({"insufficient_quota", "billing_error", "billing_hard_limit_reached"})


def make_request_error(
    name: str, key_variable: str, status: int | None, code: str | None, message: str, headers: Mapping[str, str]
) -> ProviderError:
    """Return the error for a refused or failed request.

    :param name: the model, as the operator wrote it
    :param status: the HTTP status; None or 200 for an error inside a stream
    :param code: the provider's error code
    """
    said = " ".join(message.split())[:500]
    if status in (401, 403) or code in ("authentication_error", "permission_error", "invalid_api_key"):
        return ProviderDenied(
            f"{name}: The provider rejected the key ({status or code}). Check {key_variable} and the account's permissions."
        )
    if code in _SPENT_CODES or status == 402:
        return ProviderDenied(f"{name}: The account's quota is used up ({said}). Check the provider's billing page.")
    if status in _BUSY_STATUS or (status is not None and status >= 500) or code in _BUSY_TYPES:
        return ProviderBusy(
            f"{name}: The provider is busy or failing ({status or code}: {said}). Try again later.",
            retry_after_s=_retry_after_s(headers),
        )
    if status == 404:
        return RequestRejected(
            f"{name}: The provider does not know this model or address (404: {said}). Check the name."
        )
    if status is None or status == 200:
        return ProviderError(f"{name}: The provider interrupted the reply with an error ({code or 'unnamed'}: {said}).")
    return RequestRejected(f"{name}: The provider rejected the request ({status}: {said}).")


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
    return ReplyStreamCut(f"{name}: The provider sent an unreadable event ({str(error)[:300]}).")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for key, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(key)
        try:
            seconds = float(value) / scale if value is not None else -1.0
        except ValueError:  # a date, for which the usual delay is enough
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    return None


# Readers of the SDKs' objects, which are built from a server's data without validation.


def get_sdk_field(value: object, name: str) -> object:
    """Return a field, or None if it is missing."""
    return getattr(value, name, None)


def get_nonempty_text(value: object, name: str) -> str | None:
    """Return a field if it is a text that is not empty, else None."""
    found = get_sdk_field(value, name)
    return found if isinstance(found, str) and found else None


def get_json_text(value: object, name: str) -> str | None:
    """Return a field as JSON text, or None if it is empty.

    Some servers send the object instead of the text.
    """
    found = get_sdk_field(value, name)
    return get_nonempty_text(value, name) if found is None or isinstance(found, str) else json.dumps(found, default=str)


def get_positive_count(value: object, name: str) -> int:
    """Return a field if it is a positive integer, else 0."""
    found = get_sdk_field(value, name)
    return found if isinstance(found, int) and found > 0 else 0


def get_amount(value: object, name: str) -> float | None:
    """Return a field if it is a finite number that is not negative, else None."""
    found = get_sdk_field(value, name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if math.isfinite(found) and found >= 0 else None


def to_plain_json(block: object) -> dict[str, Any] | None:
    """Return the JSON of an SDK object, or None if it is not an object."""
    dump = getattr(block, "model_dump", None)
    if dump is None and not isinstance(block, dict):
        return None
    try:
        given = cast("Any", block) if dump is None else dump(mode="json", exclude_unset=True, warnings=False)
        plain: Any = json.loads(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", plain) if isinstance(plain, dict) else None
