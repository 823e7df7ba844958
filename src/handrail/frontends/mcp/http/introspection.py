"""Access tokens that say nothing by themselves: their authorization server is asked what each is good for.

Nobody is let in while it cannot be asked: such a request is answered 503, so that no client throws away a token that may
be good. An answer is believed for a short while, and many who come with one token are one question.

Source: RFC 7662; https://modelcontextprotocol.io/specification/2025-11-25/basic/authorization
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import quote_plus

import orjson
from mcp.server.auth.provider import AccessToken, TokenVerifier
from starlette.authentication import AuthenticationError
from starlette.responses import JSONResponse

from handrail.frontends.mcp.http.tokens import LEEWAY_S, MAX_ANSWER, MAX_TOKEN, endpoint_of, scopes_in

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection
    from starlette.responses import Response

TIMEOUT_S = 5.0
"""How long the authorization server may take for one answer, and to say where it is asked."""
MOST_ASKED = 64
"""Tokens that are asked about at once."""
MOST_KNOWN = 1_000
"""Answers that are believed at once."""
REFUSED_S = 10.0
"""How long at most a token is known to be good for nothing."""
RETRY_S = 5
_log = logging.getLogger("handrail.mcp")


class Unchecked(AuthenticationError):
    """What a token is good for cannot be learned now. The message says why, to the operator."""


@dataclass(frozen=True, slots=True)
class Introspection:
    """How the authorization server is asked.

    :param url: where; empty: where its metadata say
    :param cache_s: how long an answer is believed
    """

    client_id: str
    client_secret: str = field(repr=False)
    url: str = ""
    method: Literal["basic", "post"] = "basic"
    cache_s: float = 30.0


class _Known(NamedTuple):
    found: AccessToken | None
    until: float


class IntrospectedTokens(TokenVerifier):
    """Access tokens of one authorization server, made for this server, as that one says when it is asked.

    :param issuer: the authorization server
    :param resource: what a token has to be made for
    """

    def __init__(self, issuer: str, resource: str, how: Introspection) -> None:
        self._issuer = issuer.rstrip("/")
        self._resource = resource.rstrip("/")
        self._how = how
        self._url = how.url
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[AccessToken | None]] = {}
        self._told = ""

    async def verify_token(self, token: str) -> AccessToken | None:
        """
        :raises Unchecked: where the authorization server cannot be asked, or does not answer the question
        """
        if not token or len(token) > MAX_TOKEN or not (token.isascii() and token.isprintable()):
            return None
        key = hashlib.sha256(token.encode()).digest()
        if (known := self._known.get(key)) is not None:
            if known.until > time.monotonic():
                return known.found
            del self._known[key]
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= MOST_ASKED:
                raise Unchecked(f"{MOST_ASKED} tokens are being asked about already")
            task = self._asking[key] = asyncio.create_task(self._asked(key, token), name="mcp: asks about a token")
            task.add_done_callback(lambda done: self._answered(key, done))
        return await asyncio.shield(task)

    def _answered(self, key: bytes, done: asyncio.Task[AccessToken | None]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; where nobody did, nobody wants to know

    async def _asked(self, key: bytes, token: str) -> AccessToken | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                claims = await self._claims(token)
        except (Unchecked, TimeoutError) as error:
            why = str(error) or f"{self._issuer} did not answer within {TIMEOUT_S:g} s"
            if why != self._told:  # once: every stranger can have it asked
                self._told = why
                _log.warning("no token of %s is taken: %s", self._issuer, why)
            raise Unchecked(why) from None
        self._told = ""
        found = self._good(claims)
        good_s = self._how.cache_s if found is not None else min(self._how.cache_s, REFUSED_S)
        if found is not None and found.expires_at is not None:
            good_s = min(good_s, found.expires_at - time.time())
        if good_s > 0:
            self._known[key] = _Known(found, time.monotonic() + good_s)
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return found

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """What the authorization server says of a token.

        :raises Unchecked: where it says nothing that can be understood
        """
        import httpx2

        if not self._url:
            where = await endpoint_of(self._issuer, "introspection_endpoint")
            if where is None:
                raise Unchecked("it does not say where it is asked; set url under [mcp.serve.introspection]")
            self._url = where
        how = self._how
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
                httpx2.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
                client.stream("POST", self._url, data=form, headers=headers) as response,
            ):
                if response.status_code != 200:
                    raise Unchecked(f"asked about a token it answered HTTP {response.status_code}")
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER:
                        raise Unchecked(f"its answer is longer than {MAX_ANSWER:,} bytes")
            said = orjson.loads(body)
        except (httpx2.HTTPError, OSError) as error:
            raise Unchecked(f"it cannot be asked: {type(error).__name__}") from None
        except ValueError:
            raise Unchecked("it answered something that is no JSON") from None
        claims = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        if not isinstance(claims.get("active"), bool):
            raise Unchecked("it does not say whether the token is active")
        return claims

    def _good(self, claims: Mapping[str, Any]) -> AccessToken | None:
        """What an active token lets in here; None where it does not."""
        now = time.time()
        ends, begins = claims.get("exp"), claims.get("nbf")
        if claims["active"] is not True or not all(one is None or _is_time(one) for one in (ends, begins)):
            return None
        if (ends is not None and ends <= now) or (begins is not None and begins > now + LEEWAY_S):
            return None
        if claims.get("iss") is not None and str(claims["iss"]).rstrip("/") != self._issuer:
            return None
        if str(claims.get("token_type") or "bearer").lower() not in ("bearer", "access_token"):
            return None  # one that is bound to a key, of which nobody here asks for a proof, or none of access
        if claims.get("cnf") is not None or self._resource not in _audience(claims):
            return None
        subject = claims.get("sub")
        client = claims.get("client_id") or claims.get("azp") or subject
        if not isinstance(client, str):
            return None
        return AccessToken(
            token="",
            client_id=client,
            scopes=scopes_in(claims),
            expires_at=None if ends is None else int(ends),
            resource=self._resource,
            subject=subject if isinstance(subject, str) else None,
            claims={"iss": self._issuer},
        )


def unchecked(_connection: HTTPConnection, _error: AuthenticationError) -> Response:
    """What a client is told whose token could not be checked; why is the operator's matter."""
    text = "the authorization server cannot be asked about this token now"
    return JSONResponse(
        {"error": "temporarily_unavailable", "error_description": text}, 503, {"retry-after": str(RETRY_S)}
    )


def _audience(claims: Mapping[str, Any]) -> list[str]:
    given: Any = claims.get("aud")
    named = cast("list[Any]", given) if isinstance(given, list) else [given]
    return [one.rstrip("/") for one in named if isinstance(one, str)]


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**53
