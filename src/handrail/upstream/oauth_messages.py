"""The messages of authorization servers, read as what they mean.

Authorization servers are other people's programs. An odd member of an answer costs at most itself: the flow of the SDK would end
at metadata with one invalid address, at a lifetime that is no integer, or at a token in the form of a query.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urljoin, urlsplit

import httpx2
import orjson

if TYPE_CHECKING:
    from pydantic import BaseModel

_MAX_LIFETIME_S = 10 * 365 * 24 * 3600
_SERVER_METADATA = ("oauth-authorization-server", "openid-configuration")
_ERROR_KEYS = ("error", "error_description")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BOUND_TYPES = ("dpop", "mac", "pop")
"""Types of tokens that a client has to prove with a key. The types that some servers invent are those of bearer tokens."""


def is_token_request(request: httpx2.Request) -> bool:
    """Return whether a request goes to a token endpoint."""
    return request.method == "POST" and request.headers.get("content-type", "").startswith(
        "application/x-www-form-urlencoded"
    )


def mend_oauth_request(request: httpx2.Request, server_url: str) -> httpx2.Request:
    """Return a request with an absolute address, which asks a token endpoint for JSON.

    :param server_url: the MCP server, which may name its metadata by a path
    """
    if is_token_request(request):
        request.headers["accept"] = "application/json"
    if not request.url.is_absolute_url:
        return httpx2.Request(request.method, urljoin(server_url, str(request.url)), headers=request.headers)
    return request


def mend_oauth_answer(response: httpx2.Response, server_url: str, expected_issuer: str) -> httpx2.Response:
    """Return the answer to a request of the SDK's flow in the form that the SDK reads.

    :param response: an answer whose body is read
    :param server_url: the MCP server, which is the resource if the metadata names none
    :param expected_issuer: the authorization server that the MCP server names
    """
    if is_token_request(response.request):
        return _mend_token(response) if response.status_code in (200, 201) else response
    if response.request.method == "POST":
        return _mend_registration(response) if response.status_code in (200, 201) else response
    if response.request.method != "GET":
        return response
    path = response.request.url.path
    if response.status_code >= 500 and any(f"/.well-known/{name}" in path for name in _SERVER_METADATA):
        return httpx2.Response(404, request=response.request)  # so that the next place is tried
    fields = _read_fields(response.content) if response.status_code == 200 else {}
    if "token_endpoint" in fields:
        return _mend_server_metadata(response, fields, expected_issuer)
    return _mend_resource_metadata(response, fields, server_url) if "authorization_servers" in fields else response


def _mend_token(response: httpx2.Response) -> httpx2.Response:
    """Return a token without odd members. An answer without a token becomes the error that it reports."""
    fields = _read_fields(response.content)
    token, kind = fields.get("access_token"), fields.get("token_type") or "Bearer"
    if not isinstance(token, str) or not token.strip():
        error = {
            "error": "the answer has no access token",
            **{key: fields[key] for key in _ERROR_KEYS if key in fields},
        }
        return _replace_body(response, error, 400)
    if _CONTROL.search(token.strip()) is not None:  # the error about a header would show it
        return _replace_body(response, {"error": "the access token has a character that no header can have"}, 400)
    if str(kind).strip().lower() in _BOUND_TYPES:
        return _replace_body(response, {"error": f"the token has the type {kind}; expected Bearer"}, 400)
    odd = ("expires_in", "refresh_token", "scope")
    mended = {key: value for key, value in fields.items() if key not in odd}
    mended |= {"access_token": token.strip(), "token_type": "Bearer"}
    if (lifetime := _read_lifetime(fields.get("expires_in"))) is not None:
        mended["expires_in"] = lifetime
    if isinstance(again := fields.get("refresh_token"), str) and again:
        mended["refresh_token"] = again
    if (scope := _read_scope(fields.get("scope"))) is not None:
        mended["scope"] = scope
    return _replace_body(response, mended)


def _mend_registration(response: httpx2.Response) -> httpx2.Response:
    """Return the registration of a client without odd members."""
    from mcp.shared.auth import OAuthClientInformationFull

    fields = _read_fields(response.content)
    client = fields.get("client_id")
    if isinstance(client, int) and not isinstance(client, bool):
        fields["client_id"] = str(client)
    if "scope" in fields:
        fields["scope"] = _read_scope(fields["scope"])
    if not fields.get("client_id"):
        return response
    return _replace_body(response, _select_valid_members(OAuthClientInformationFull, fields))


def _mend_server_metadata(response: httpx2.Response, fields: dict[str, Any], expected_issuer: str) -> httpx2.Response:
    """Return the metadata of an authorization server.

    An issuer that differs from the expected one only in a slash at its end becomes the expected one.
    """
    from mcp.shared.auth import OAuthMetadata

    issuer = fields.get("issuer")
    if isinstance(issuer, str) and is_same_issuer(issuer, expected_issuer):
        fields["issuer"] = expected_issuer
    return _replace_body(response, _select_valid_members(OAuthMetadata, fields))


def _mend_resource_metadata(response: httpx2.Response, fields: dict[str, Any], server_url: str) -> httpx2.Response:
    """Return the metadata of an MCP server, which may leave out its own address."""
    from mcp.shared.auth import ProtectedResourceMetadata

    servers = fields["authorization_servers"]
    several = cast("list[Any]", servers) if isinstance(servers, list) else [servers]
    fields["authorization_servers"] = [one for one in several if _is_http_address(one)]
    if not fields.get("resource"):
        fields["resource"] = server_url.partition("#")[0]
    return _replace_body(response, _select_valid_members(ProtectedResourceMetadata, fields))


def read_authentication_methods(response: httpx2.Response) -> list[str]:
    """Return how clients can authenticate at a token endpoint, from an authorization server's metadata; none for other answers."""
    fields = _read_fields(response.content) if response.status_code == 200 else {}
    found: object = fields.get("token_endpoint_auth_methods_supported")
    return [one for one in cast("list[object]", found) if isinstance(one, str)] if isinstance(found, list) else []


def is_same_issuer(issuer: str, other: str) -> bool:
    """Return whether two issuers are equal without regard to a slash at the end."""
    return issuer.rstrip("/") == other.rstrip("/")


def _read_fields(body: bytes) -> dict[str, Any]:
    """Return the members of an answer, which some token endpoints write like a query; empty for any other text."""
    try:
        found: object = orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:
        text = body[:1_000_000].decode("utf-8", "replace").strip()
        return dict(parse_qsl(text)) if "=" in text and not any(one in text for one in " <{") else {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _read_lifetime(given: object) -> int | None:
    """Return a lifetime in seconds; None if it is unknown, so that the token counts until the server refuses it."""
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return None
    try:
        seconds = float(given)
    except ValueError:
        return None
    return int(min(seconds, _MAX_LIFETIME_S)) if math.isfinite(seconds) and seconds >= 1 else None


def _read_scope(given: object) -> str | None:
    """Return scopes as a text, which some servers write as a list."""
    if isinstance(given, list):
        return " ".join(one for one in cast("list[object]", given) if isinstance(one, str)) or None
    return given if isinstance(given, str) else None


def _select_valid_members(model: type[BaseModel], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the members without those that a model refuses and does not need."""
    from pydantic import ValidationError

    try:
        model.model_validate(fields)
    except ValidationError as error:
        invalid = {str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"]}
        if not any(model.model_fields[name].is_required() for name in invalid if name in model.model_fields):
            return {key: value for key, value in fields.items() if key not in invalid}
    return fields


def _is_http_address(value: object) -> bool:
    try:
        return isinstance(value, str) and urlsplit(value).scheme in ("http", "https") and bool(urlsplit(value).hostname)
    except ValueError:
        return False


def _replace_body(response: httpx2.Response, fields: dict[str, Any], status: int = 200) -> httpx2.Response:
    headers = {"content-type": "application/json"}
    return httpx2.Response(status, headers=headers, content=orjson.dumps(fields), request=response.request)
