"""Authentication over HTTP: bearer tokens that the operator issued, or tokens of an OAuth authorization server.

Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/authorization
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import quote_plus, urlsplit

import orjson
from mcp.server.auth.provider import AccessToken, TokenVerifier
from starlette.authentication import AuthenticationError
from starlette.responses import JSONResponse

from handrail.contract.errors import StartError, UsageError

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection
    from starlette.responses import Response


MAX_TOKEN_FILE_BYTES = 64 * 1024
MIN_TOKEN_LENGTH = 16
"""Minimum number of characters, because shorter tokens can be guessed."""
MAX_TOKEN_LENGTH = 16 * 1024
MAX_ANSWER_BYTES = 1024 * 1024
TIMEOUT_S = 10.0
KEY_CACHE_S = 600.0
KEY_REFRESH_S = 30.0
"""Seconds after which keys are fetched again for a token that an unknown key signed."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric algorithms only: a key that verifies tokens cannot sign them."""
LEEWAY_S = 30


class StaticTokenVerifier(TokenVerifier):
    """A verifier of tokens that the operator issued, in a file or as secrets.

    :param resource: the URL of this server, for which the tokens are valid
    :param scopes: the scopes that each token has
    """

    def __init__(self, tokens: Mapping[str, str], resource: str | None, scopes: Iterable[str] = ()) -> None:
        self._known = {hashlib.sha256(token.encode()).digest(): name for token, name in tokens.items()}
        self._resource = resource
        self._scopes = list(scopes)

    async def verify_token(self, token: str) -> AccessToken | None:
        given = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found: str | None = None
        for digest, name in self._known.items():  # compare all, so that the time reveals nothing
            if hmac.compare_digest(digest, given):
                found = name
        if found is None:
            return None
        return AccessToken(token="", client_id=found, scopes=self._scopes, resource=self._resource)


def read_token_file(path: str) -> dict[str, str]:
    """Return the tokens of a private file, each with its name.

    :raises StartError: for a file that cannot be read, or that other users can read
    :raises UsageError: for an invalid line, and for a file without tokens or with too many
    """
    try:
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise StartError(f"{path} is not a regular file. Pass a file with one token on each line.")
            if os.name != "nt" and stat.S_IMODE(about.st_mode) & 0o077:
                raise StartError(f"Other users can read {path}. Run `chmod 600` on it.")
            text = file.read(MAX_TOKEN_FILE_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeError) as error:
        raise StartError(f"Could not read the tokens in {path}: {error}. Check the path and its permissions.") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, token = (words[0], words[1]) if len(words) == 2 else (f"token-{number}", words[0])
        if len(words) > 2 or len(token) < MIN_TOKEN_LENGTH or token in found:
            raise UsageError(
                f"Invalid line {number} in {path}. Expected TOKEN or NAME TOKEN, with at least {MIN_TOKEN_LENGTH} characters in "
                "the token, and each token once."
            )
        found[token] = name
    if not found or len(text) > MAX_TOKEN_FILE_BYTES:
        raise UsageError(
            f"{path} has no tokens, or is larger than {MAX_TOKEN_FILE_BYTES:,} bytes. Expected one token on each line."
        )
    return found


class JwtTokenVerifier(TokenVerifier):
    """A verifier of signed access tokens of one authorization server, with the server's public keys.

    :param issuer: the authorization server
    :param resource: the audience that a token must have: the URL of this server
    """

    def __init__(self, issuer: str, resource: str) -> None:
        self._issuer = issuer.rstrip("/")
        self._resource = resource
        self._keys: Mapping[str, Any] = {}
        self._fetched = -KEY_CACHE_S
        self._fetching = asyncio.Lock()

    async def verify_token(self, token: str) -> AccessToken | None:
        import jwt

        if len(token) > MAX_TOKEN_LENGTH:
            return None
        try:
            header = jwt.get_unverified_header(token)
            key = await self._signing_key(header.get("kid"))
            if key is None or header.get("alg") not in ALGORITHMS:
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=[self._resource, self._resource.rstrip("/")],
                issuer=[self._issuer, f"{self._issuer}/"],
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError):
            return None
        client = claims.get("client_id") or claims.get("azp") or claims.get("sub")
        subject = claims.get("sub")
        if not isinstance(client, str):
            return None
        return AccessToken(
            token="",
            client_id=client,
            scopes=parse_token_scopes(claims),
            expires_at=int(claims["exp"]) + LEEWAY_S,
            resource=self._resource,
            subject=subject if isinstance(subject, str) else None,
            claims={"iss": self._issuer},
        )

    async def _signing_key(self, key_id: object) -> Any:
        """Return the key that signed a token, or the server's only key if the token names none."""
        async with self._fetching:
            age = time.monotonic() - self._fetched
            unknown = key_id is not None and key_id not in self._keys
            if age > KEY_CACHE_S or (unknown and age > KEY_REFRESH_S):
                self._fetched = time.monotonic()
                self._keys = await self._fetch_keys() or self._keys
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id) if isinstance(key_id, str) else None

    async def _fetch_keys(self) -> Mapping[str, Any]:
        """Return the server's keys by ID, or an empty mapping if they cannot be fetched."""
        import jwt

        if (where := await discover_auth_endpoint(self._issuer, "jwks_uri")) is None:
            return {}
        found: dict[str, Any] = {}
        for number, key in enumerate(cast("list[Any]", (await _fetch_json(where)).get("keys") or [])):
            if isinstance(key, dict) and cast("dict[str, Any]", key).get("kty") != "oct":
                try:
                    read = jwt.PyJWK.from_dict(cast("dict[str, Any]", key))
                except jwt.PyJWTError:
                    continue
                found[read.key_id or f"#{number}"] = read
        return found


class CombinedTokenVerifier(TokenVerifier):
    """A verifier that accepts each token that one of several verifiers accepts."""

    def __init__(self, verifiers: Sequence[TokenVerifier]) -> None:
        self._verifiers = verifiers

    async def verify_token(self, token: str) -> AccessToken | None:
        for verifier in self._verifiers:
            if (found := await verifier.verify_token(token)) is not None:
                return found
        return None


def require_secure_url(url: str, what: str) -> str:
    """Check that a URL is safe for tokens and keys: https, or http on this machine.

    :param what: the name of the option or setting
    :return: the URL
    :raises UsageError: for any other URL
    """
    if not is_secure_url(url):
        raise UsageError(
            f"Invalid value for `{what}`: {url!r}. Expected an https:// URL, or http:// on 127.0.0.1, [::1] or localhost."
        )
    return url


def is_secure_url(url: object) -> bool:
    """Return whether a URL is protected against reading and changes on the network."""
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.username is not None or parts.fragment or not host:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in ("127.0.0.1", "::1", "localhost"))


async def discover_auth_endpoint(issuer: str, name: str) -> str | None:
    """Return an endpoint from the metadata of an authorization server, or None if it is not available.

    Metadata of another issuer do not count.

    :param issuer: the server's URL, without a slash at the end
    :param name: the metadata key, such as ``jwks_uri``
    """
    for about in _metadata_urls(issuer):
        metadata = await _fetch_json(about)
        if str(metadata.get("issuer", "")).rstrip("/") == issuer and is_secure_url(found := metadata.get(name)):
            return cast("str", found)
    return None


def _metadata_urls(issuer: str) -> list[str]:
    """Return the metadata URLs of an authorization server, in the order to try.

    They follow RFC 8414 and OpenID Connect Discovery.
    """
    parts = urlsplit(issuer)
    base, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    return [
        f"{base}/.well-known/oauth-authorization-server{path}",
        f"{base}/.well-known/openid-configuration{path}",
        f"{base}{path}/.well-known/openid-configuration",
    ]


async def _fetch_json(url: str) -> dict[str, Any]:
    """Return the JSON object at a URL, or an empty one if it is not available."""
    import httpx2

    try:
        async with (
            httpx2.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
            client.stream("GET", url, headers={"Accept": "application/json"}) as response,
        ):
            if response.status_code != 200:
                return {}
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    return {}
        import orjson

        found = orjson.loads(body)
    except (httpx2.HTTPError, OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def parse_token_scopes(claims: Mapping[str, Any]) -> list[str]:
    """Return the scopes of a token, from any of the forms in use."""
    given: Any = claims.get("scope") or claims.get("scp") or []
    words = given.split() if isinstance(given, str) else cast("list[Any]", given) if isinstance(given, list) else []
    return [word for word in words if isinstance(word, str)]


# Opaque access tokens: Handrail queries the authorization server about each.
#
# If the server cannot be reached, no client is accepted. Such a request is answered with 503, so that the client does not
# discard a token that may be valid. Answers are cached for a short time, and concurrent requests with one token share a query.
#
# Source: RFC 7662; https://modelcontextprotocol.io/specification/2025-11-25/basic/authorization

INTROSPECTION_TIMEOUT_S = 5.0
"""Seconds for one answer of the authorization server, and for its metadata."""
MAX_INTROSPECTIONS = 64
"""Maximum number of concurrent queries."""
MAX_CACHED_TOKENS = 1_000
"""Maximum number of cached answers."""
NEGATIVE_CACHE_S = 10.0
"""Maximum seconds for which a rejected token is cached."""
RETRY_S = 5
_log = logging.getLogger("handrail.mcp")


class TokenCheckFailed(AuthenticationError):
    """A token could not be checked with the authorization server.

    The message gives the operator the reason.
    """


@dataclass(frozen=True, slots=True)
class IntrospectionSettings:
    """How to query the authorization server about a token.

    :param url: the introspection endpoint; empty for the one in the server's metadata
    :param method: how the client credentials are sent: HTTP basic authentication or form fields
    :param cache_s: seconds for which an answer is cached
    """

    client_id: str
    client_secret: str = field(repr=False)
    url: str = ""
    method: Literal["basic", "post"] = "basic"
    cache_s: float = 30.0


class _CachedToken(NamedTuple):
    found: AccessToken | None
    until: float


class IntrospectionTokenVerifier(TokenVerifier):
    """A verifier that queries one authorization server about each access token.

    :param issuer: the authorization server
    :param resource: the audience that a token must have: the URL of this server
    """

    def __init__(self, issuer: str, resource: str, how: IntrospectionSettings) -> None:
        self._issuer = issuer.rstrip("/")
        self._resource = resource.rstrip("/")
        self._settings = how
        self._url = how.url
        self._known: OrderedDict[bytes, _CachedToken] = OrderedDict()
        self._queries: dict[bytes, asyncio.Task[AccessToken | None]] = {}
        self._last_warning = ""

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the access that a token gives, or None for a rejected one.

        :raises TokenCheckFailed: if the authorization server cannot be reached, or does not answer
        """
        if not token or len(token) > MAX_TOKEN_LENGTH or not (token.isascii() and token.isprintable()):
            return None
        key = hashlib.sha256(token.encode()).digest()
        if (known := self._known.get(key)) is not None:
            if known.until > time.monotonic():
                return known.found
            del self._known[key]
        task = self._queries.get(key)
        if task is None:
            if len(self._queries) >= MAX_INTROSPECTIONS:
                raise TokenCheckFailed(f"Too many queries about tokens are running. The limit is {MAX_INTROSPECTIONS}.")
            task = self._queries[key] = asyncio.create_task(
                self._introspect(key, token), name="mcp: asks about a token"
            )
            task.add_done_callback(lambda done: self._on_introspected(key, done))
        return await asyncio.shield(task)

    def _on_introspected(self, key: bytes, done: asyncio.Task[AccessToken | None]) -> None:
        del self._queries[key]
        if not done.cancelled():
            done.exception()  # mark it as retrieved: the waiting request has it, and without one it is not needed

    async def _introspect(self, key: bytes, token: str) -> AccessToken | None:
        try:
            async with asyncio.timeout(INTROSPECTION_TIMEOUT_S):
                claims = await self._fetch_claims(token)
        except (TokenCheckFailed, TimeoutError) as error:
            why = str(error) or f"{self._issuer} did not answer within {INTROSPECTION_TIMEOUT_S:g} s."
            if why != self._last_warning:  # once, because any client can cause a query
                self._last_warning = why
                _log.warning("Tokens of %s are not accepted: %s", self._issuer, why)
            raise TokenCheckFailed(why) from None
        self._last_warning = ""
        found = self._access_token(claims)
        good_s = self._settings.cache_s if found is not None else min(self._settings.cache_s, NEGATIVE_CACHE_S)
        if found is not None and found.expires_at is not None:
            good_s = min(good_s, found.expires_at - time.time())
        if good_s > 0:
            self._known[key] = _CachedToken(found, time.monotonic() + good_s)
            while len(self._known) > MAX_CACHED_TOKENS:
                self._known.popitem(last=False)
        return found

    async def _fetch_claims(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token, as the authorization server reports them.

        :raises TokenCheckFailed: if the server cannot be reached, or its answer is invalid
        """
        import httpx2

        if not self._url:
            where = await discover_auth_endpoint(self._issuer, "introspection_endpoint")
            if where is None:
                raise TokenCheckFailed(
                    "Its metadata has no introspection endpoint. Set `url` in [mcp.serve.introspection]."
                )
            self._url = where
        how = self._settings
        form = {"token": token, "token_type_hint": "access_token"}
        headers = {"accept": "application/json"}
        if how.method == "post":
            form |= {"client_id": how.client_id, "client_secret": how.client_secret}
        else:
            pair = f"{quote_plus(how.client_id)}:{quote_plus(how.client_secret)}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        body = b""
        try:
            async with (
                httpx2.AsyncClient(timeout=INTROSPECTION_TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
                client.stream("POST", self._url, data=form, headers=headers) as response,
            ):
                if response.status_code != 200:
                    raise TokenCheckFailed(f"It answered a query about a token with HTTP {response.status_code}.")
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise TokenCheckFailed(f"Its answer is longer than {MAX_ANSWER_BYTES:,} bytes.")
            fields = orjson.loads(body)
        except (httpx2.HTTPError, OSError) as error:
            raise TokenCheckFailed(f"The authorization server could not be reached: {type(error).__name__}.") from None
        except ValueError:
            raise TokenCheckFailed("Its answer is not JSON.") from None
        claims = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
        if not isinstance(claims.get("active"), bool):
            raise TokenCheckFailed("Its answer does not contain `active`.")
        return claims

    def _access_token(self, claims: Mapping[str, Any]) -> AccessToken | None:
        """Return the access that the claims of a token give here, or None."""
        if claims["active"] is not True or not _is_in_time(claims, time.time()):
            return None
        if claims.get("iss") is not None and str(claims["iss"]).rstrip("/") != self._issuer:
            return None
        if str(claims.get("token_type") or "bearer").lower() not in ("bearer", "access_token"):
            return None  # a key-bound token, whose proof is not checked here, or not an access token
        if claims.get("cnf") is not None or self._resource not in _audience(claims):
            return None
        subject = claims.get("sub")
        client = claims.get("client_id") or claims.get("azp") or subject
        if not isinstance(client, str):
            return None
        ends = claims.get("exp")
        return AccessToken(
            token="",
            client_id=client,
            scopes=parse_token_scopes(claims),
            expires_at=None if ends is None else int(ends),
            resource=self._resource,
            subject=subject if isinstance(subject, str) else None,
            claims={"iss": self._issuer},
        )


def make_token_check_failure_response(_connection: HTTPConnection, _error: AuthenticationError) -> Response:
    """Return the answer to a client whose token could not be checked. Only the operator gets the reason."""
    text = "The authorization server cannot be reached to check this token. Try again later."
    return JSONResponse(
        {"error": "temporarily_unavailable", "error_description": text}, 503, {"retry-after": str(RETRY_S)}
    )


def _is_in_time(claims: Mapping[str, Any], now: float) -> bool:
    ends, begins = claims.get("exp"), claims.get("nbf")
    if not all(one is None or _is_time(one) for one in (ends, begins)):
        return False
    return (ends is None or ends > now) and (begins is None or begins <= now + LEEWAY_S)


def _audience(claims: Mapping[str, Any]) -> list[str]:
    given: Any = claims.get("aud")
    named = cast("list[Any]", given) if isinstance(given, list) else [given]
    return [one.rstrip("/") for one in named if isinstance(one, str)]


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**53
