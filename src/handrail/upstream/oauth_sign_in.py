"""OAuth sign-in at an upstream server, by the SDK's client, with its tokens in the state root, mode 0600.

Each request gets a token without waiting. On a 401 the stored tokens are read again, since another process may have refreshed
them or the user may have signed in there. If they are the same, the token is refreshed once, under a lock across processes, else
the user signs in if possible. Then the request is tried once more. No token is ever logged or shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import orjson
from mcp.client.auth import OAuthClientProvider, OAuthFlowError, OAuthRegistrationError
from mcp.client.auth.utils import extract_scope_from_www_auth, issuers_match, union_scopes
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata

from handrail.contract.errors import StartError
from handrail.store import operator_decisions
from handrail.store.lease import try_lock_descriptor
from handrail.upstream.oauth_messages import (
    is_same_issuer,
    mend_oauth_answer,
    mend_oauth_request,
    read_authentication_methods,
)
from handrail.upstream.server_definition import OauthSignInOptions, ServerDefinition

if TYPE_CHECKING:
    from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
    from mcp.shared.auth import OAuthClientInformationFull, OAuthMetadata, OAuthToken


_MAX_BYTES = 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_SECRET = ("access_token", "refresh_token", "id_token", "client_secret", "registration_access_token")
LOCK_WAIT_S = 30.0
_LOCK_POLL_S = 0.05
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_LEAST_SECRET = 8
"""The minimum length in characters of a value to redact; a server could name a shorter one to hide ordinary text."""


class SignInRequired(Exception):
    """The server requires a sign-in that is not possible now; the text has the next step."""


class UnknownClientError(Exception):
    """The authorization server has dropped the registration of this client."""


class SignInPrompt:
    """The means by which a user signs in.

    :param redirect: the address to which the authorization server redirects the user
    :param open_browser: opens an address for the user, and returns the full address of the redirect
    """

    def __init__(self, redirect: str, open_browser: Callable[[str], Awaitable[str]]) -> None:
        self.redirect = redirect
        self._open_browser = open_browser
        self._limits: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def limit_time(self, limit_s: float) -> AsyncGenerator[None]:
        """Limit the time of a block in seconds, without the time that a user takes to sign in.

        :raises TimeoutError: when the time is over
        """
        async with asyncio.timeout(limit_s) as limit:
            self._limits[limit] = limit_s
            try:
                yield
            finally:
                del self._limits[limit]

    async def open_browser(self, address: str) -> str:
        """Open an address for the user, and return the full address of the redirect."""
        self._reschedule_limits(None)
        try:
            return await self._open_browser(address)
        finally:
            self._reschedule_limits(asyncio.get_running_loop().time())

    def _reschedule_limits(self, now: float | None) -> None:
        for limit, limit_s in self._limits.items():
            with contextlib.suppress(RuntimeError):  # its time is over
                limit.reschedule(None if now is None else now + limit_s)


class OauthTokenStore:
    """The client registration and the token of one server, in a private file of this user.

    Implements the SDK's ``TokenStorage``.

    :param register_secret: called with every secret value before it is sent
    """

    def __init__(
        self, definition: ServerDefinition, state: Path, register_secret: Callable[[str], None] = lambda value: None
    ) -> None:
        self._learn = register_secret
        self._path = definition.token_file(state)
        self._held: dict[str, Any] | None = None
        self._is_stored = True
        """Whether the file has what this process holds."""

    @property
    def access_token(self) -> str:
        """The access token; empty without one."""
        token: Any = self._all().get("tokens")
        found = cast("dict[str, Any]", token).get("access_token") if isinstance(token, dict) else None
        return found if isinstance(found, str) else ""

    def has_token_other_than(self, token: str) -> bool:
        """Return whether there is an access token that is not this one."""
        return self.access_token not in ("", token)

    def delete(self) -> bool:
        """Delete the tokens, and return whether any existed."""
        self._held = {}
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def reload(self) -> None:
        """Read the file again at the next access."""
        if self._is_stored:
            self._held = None

    @contextlib.asynccontextmanager
    async def lock_across_processes(self) -> AsyncGenerator[None]:
        """Keep other processes from using the refresh token, which many servers accept only once.

        :raises SignInRequired: if another process keeps the lock too long
        """
        descriptor = -1
        with contextlib.suppress(OSError):  # without a folder to write in, no other process stores tokens either
            folder = self._path.parent.parent / "locks"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder / f"{self._path.stem}.lock", _LOCK_FLAGS, 0o600)
        try:
            if descriptor >= 0:
                until = asyncio.get_running_loop().time() + LOCK_WAIT_S
                # The lock is polled, because waiting for it in the kernel would block the event loop.
                while not try_lock_descriptor(descriptor):
                    if asyncio.get_running_loop().time() > until:
                        raise SignInRequired("another process is refreshing the token and has not finished; try again")
                    await asyncio.sleep(_LOCK_POLL_S)
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def registered_redirect_uri(self) -> str:
        """The address of the last registration to which the browser returns; empty without one."""
        client: Any = self._all().get("client")
        uris: Any = cast("dict[str, Any]", client).get("redirect_uris") if isinstance(client, dict) else None
        return str(cast("list[Any]", uris)[0]) if isinstance(uris, list) and uris else ""

    @property
    def missing_scope(self) -> str:
        """The scopes that the server refused a request for, and that the next sign-in requests; empty without any."""
        found: Any = self._all().get("missing_scope")
        return found if isinstance(found, str) else ""

    def set_missing_scope(self, scope: str) -> None:
        """Store the scopes that the next sign-in requests in addition."""
        if scope != self.missing_scope:
            self._write("missing_scope", scope)

    def forget_client(self) -> None:
        """Delete the registration, and the tokens that only this client can use."""
        self._held = {}
        self._store()

    async def get_tokens(self) -> OAuthToken | None:
        from mcp.shared.auth import OAuthToken

        try:
            return OAuthToken.model_validate(self._all().get("tokens"))
        except ValueError:  # without a valid token, the user signs in
            return None

    async def set_tokens(self, tokens: OAuthToken) -> None:
        token_fields = tokens.model_dump(mode="json", exclude_none=True)
        self._register_secrets(token_fields)
        # Another process may have stored a registration since this one read the file.
        self.reload()
        self._held = {key: value for key, value in self._all().items() if key != "giver"} | {"tokens": token_fields}
        self._store()

    @property
    def token_issuer(self) -> dict[str, Any] | None:
        """The metadata of the authorization server that issued the token.

        Empty if it publishes none; None if it is not known which server issued the token.
        """
        found: Any = self._all().get("giver")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else None

    @property
    def resource(self) -> str:
        """The resource that the token is for; empty if it was requested without one."""
        found: Any = self._all().get("resource")
        return found if isinstance(found, str) else ""

    def set_token_issuer(self, metadata: OAuthMetadata | None, resource: str) -> None:
        """Store the issuer of the token.

        :param metadata: None for the server itself, at the endpoints that need no metadata
        :param resource: the resource that the token is for; empty if it was requested without one
        """
        self._write("resource", resource)
        self._write("giver", {} if metadata is None else metadata.model_dump(mode="json", exclude_none=True))

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        from mcp.shared.auth import OAuthClientInformationFull

        try:
            return OAuthClientInformationFull.model_validate(self._all().get("client"))
        except ValueError:  # without a valid registration, this client registers again
            return None

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        client_fields = client_info.model_dump(mode="json", exclude_none=True)
        self._register_secrets(client_fields)
        self._write("client", client_fields)

    def _register_secrets(self, fields: object) -> None:
        """Register the secret values in a message, so that they are redacted."""
        members = cast("dict[str, object]", fields) if isinstance(fields, dict) else {}
        for key in _SECRET:
            if isinstance(value := members.get(key), str) and len(value) >= _LEAST_SECRET:
                self._learn(value)

    def _all(self) -> dict[str, Any]:
        if self._held is None:
            content = operator_decisions.read_private_file(self._path, _MAX_BYTES)
            try:
                read: Any = json.loads(content) if content is not None else {}
            except (ValueError, RecursionError):
                read = {}
            self._held = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
            self._register_secrets(self._held.get("tokens"))
            self._register_secrets(self._held.get("client"))
        return self._held

    def _write(self, key: str, value: dict[str, Any] | str) -> None:
        self.reload()
        self._held = {**self._all(), key: value}
        self._store()

    def _store(self) -> None:
        """Write the file. If this is not possible, the tokens are held for the life of this process."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            operator_decisions.write_private_file(self._path, json.dumps(self._held).encode())
        except (OSError, StartError):
            # The held tokens are newer than the file now, so the file is not read again.
            self._is_stored = False


class UpstreamSignIn(httpx2.Auth):
    """The sign-in at one server. The SDK is imported when a server first asks for it."""

    def __init__(
        self,
        definition: ServerDefinition,
        state: Path,
        prompt: SignInPrompt | None = None,
        register_secret: Callable[[str], None] = lambda value: None,
    ) -> None:
        self._definition = definition
        self._tokens = OauthTokenStore(definition, state, register_secret)
        self._prompt = prompt
        self._turn = asyncio.Lock()
        self._visit_count = 0
        self._provider: OAuthClientProvider | None = None

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        sent = self._tokens.access_token
        needs_user = self._prompt is not None and self._tokens.missing_scope != ""
        _set_bearer_token(request, "" if needs_user else sent)
        response = yield request
        tried, visits = 0, self._visit_count
        # The first round refreshes the token, and the second one signs in. More would repeat a refusal.
        while _requires_more_scopes(response) and tried < 2:
            if response.status_code == 401 and self._visit_count > visits:
                return  # the server refuses even a new token
            tried += 1
            async with self._turn, contextlib.AsyncExitStack() as refreshing:
                await refreshing.enter_async_context(self._tokens.lock_across_processes())
                self._tokens.reload()
                # Another request or process may have refreshed the token during the wait for the lock. Then the new one
                # is tried first.
                if not self._tokens.has_token_other_than(sent):
                    await response.aread()
                    is_refresh = tried == 1 and response.status_code == 401 and not needs_user
                    flow = self._run_sdk_flow_after_401(request, response, refreshing=is_refresh)
                    try:
                        to_send, is_answered = await anext(flow), False
                        while to_send is not request or not (is_answered or self._tokens.has_token_other_than(sent)):
                            if to_send is request:
                                answer, is_answered = response, True  # the present response answers it
                            else:
                                answer = yield to_send
                                await answer.aread()
                            to_send = await flow.asend(answer)
                            await refreshing.aclose()  # a refresh is the first step; no other process waits for a user
                            self._tokens.reload()
                            if not is_answered and self._tokens.has_token_other_than(sent):
                                break  # the refresh was refused, and another process has a newer token
                    except StopAsyncIteration:
                        return
                    finally:
                        await flow.aclose()
            sent = self._tokens.access_token
            _set_bearer_token(request, sent)
            response = yield request

    async def _run_sdk_flow_after_401(
        self, request: httpx2.Request, response: httpx2.Response, *, refreshing: bool
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Run the SDK's flow from the point where the server has answered 401.

        If the authorization server does not know the client any more, it is registered again once.

        :param response: the answer of the server
        """
        provider = self._provider
        if provider is None:
            provider = self._provider = await asyncio.to_thread(self._make_provider)
        expect_issuer: Callable[[], str] = provider._expected_issuer  # pyright: ignore[reportPrivateUsage]
        if refreshing:
            with contextlib.suppress(ValueError):
                await self._pin_refresh_to_issuer(provider)
        before = self._tokens.access_token
        flow = provider.async_auth_flow(request)
        is_second = False
        try:
            answer: httpx2.Response | None = None
            while True:
                try:
                    to_send = await (anext(flow) if answer is None else flow.asend(answer))
                except UnknownClientError:
                    if is_second or self._definition.oauth.client_id or not isinstance(provider, BrowserSignIn):
                        raise
                    is_second = True
                    provider.drop_registration()
                    await flow.aclose()
                    flow = provider.async_auth_flow(request)
                    await anext(flow)  # the request, which has been answered
                    to_send = await flow.asend(response)
                if to_send is request:
                    answer = yield to_send
                else:
                    received = yield mend_oauth_request(to_send, self._definition.url)
                    answer = mend_oauth_answer(received, self._definition.url, expect_issuer())
                    self._select_client_authentication(provider, read_authentication_methods(answer))
        except StopAsyncIteration:
            return
        except SignInRequired:
            raise
        except OAuthRegistrationError as error:
            raise SignInRequired(
                f"the authorization server did not register Handrail: {str(error)[:300]}. Register it there, and set client_id "
                f"under [mcp.servers.{self._definition.name}.oauth]"
            ) from None
        except Exception as error:
            text = str(error)[:300]
            if (other := _OTHER_RESOURCE.match(text)) is not None:
                text += f"; if that is this server, set url = {other[1]!r} in [mcp.servers.{self._definition.name}]"
            raise SignInRequired(f"the sign-in failed: {text}") from None
        finally:
            await flow.aclose()  # it holds a lock until then
            # The next refresh goes to this server only, even if the MCP server names another one by then.
            if self._tokens.access_token != before:
                context = provider.context
                is_named = context.should_include_resource_param(context.protocol_version)
                self._tokens.set_token_issuer(context.oauth_metadata, context.get_resource_url() if is_named else "")

    def _select_client_authentication(self, provider: OAuthClientProvider, supported: Sequence[str]) -> None:
        """Send the configured client's secret in the form, if the authorization server does not read it in the header."""
        client = provider.context.client_info
        if client is None and isinstance(provider, BrowserSignIn):
            client = provider.known_client
        header, form = "client_secret_basic", "client_secret_post"
        if client is None or not self._definition.oauth.client_secret or header in supported or form not in supported:
            return
        if client.token_endpoint_auth_method == header:
            client.token_endpoint_auth_method = form

    async def _pin_refresh_to_issuer(self, provider: OAuthClientProvider) -> None:
        """Make the provider refresh the token at the server that issued it, and at no other.

        :raises ValueError: if the stored metadata is invalid
        """
        from mcp.client.auth.utils import issuers_match
        from mcp.shared.auth import OAuthMetadata, ProtectedResourceMetadata

        giver, trusted = self._tokens.token_issuer, self._definition.oauth.issuer
        # A refresh token must never reach a server that did not issue it.
        if giver is None or (trusted and not issuers_match(str(giver.get("issuer", "")), trusted)):
            return
        provider.context.oauth_metadata = OAuthMetadata.model_validate(giver) if giver else None
        if resource := self._tokens.resource:
            servers = [giver.get("issuer") or _origin(self._definition.url)]
            provider.context.protected_resource_metadata = ProtectedResourceMetadata.model_validate(
                {"resource": resource, "authorization_servers": servers}
            )
        provider.context.current_tokens = await self._tokens.get_tokens()
        provider.context.client_info = await self._tokens.get_client_info() or provider.context.client_info
        supported: object = giver.get("token_endpoint_auth_methods_supported")
        self._select_client_authentication(
            provider, cast("list[str]", supported) if isinstance(supported, list) else ()
        )
        provider.context.token_expiry_time = 1.0  # refused by the server, whatever its expiry time

    def _make_provider(self) -> OAuthClientProvider:
        """Return the SDK's provider for the configured grant. Loads the SDK, so call it in a thread."""
        logging.getLogger("mcp.client.auth").addHandler(logging.NullHandler())  # the error has the reason
        options = self._definition.oauth
        if options.grant == "identity_assertion":
            return self._make_identity_provider(options)
        if options.private_key or options.grant == "client_credentials":
            return self._make_credentials_provider(options)
        return self._make_browser_provider(options)

    def _make_identity_provider(self, options: OauthSignInOptions) -> OAuthClientProvider:
        """Return a provider that uses the assertion of an identity provider that both sides trust."""
        from handrail.upstream.identity_assertion import IdentityAssertionSignIn

        return IdentityAssertionSignIn(
            self._definition.url,
            self._tokens,
            client_id=options.client_id,
            client_secret=options.client_secret,
            id_token=options.identity_token,
            identity_client_id=options.identity_client_id,
            exchange=options.identity_exchange,
            issuer=options.issuer,
            scopes=options.scopes,
        )

    def _make_credentials_provider(self, options: OauthSignInOptions) -> OAuthClientProvider:
        """Return a provider that uses the client's own credentials: a signing key or a shared secret."""
        from mcp.client.auth.extensions.client_credentials import (
            ClientCredentialsOAuthProvider,
            PrivateKeyJWTOAuthProvider,
            SignedJWTParameters,
        )

        url, scope, issuer = self._definition.url, " ".join(options.scopes) or None, options.issuer or None
        if not options.private_key:
            return ClientCredentialsOAuthProvider(
                url, self._tokens, options.client_id, options.client_secret, scope=scope, issuer=issuer
            )
        signed = SignedJWTParameters(
            issuer=options.client_id,
            subject=options.client_id,
            signing_algorithm=options.signing_algorithm,
            signing_key=options.private_key,
        )
        prove = signed.create_assertion_provider()
        return PrivateKeyJWTOAuthProvider(url, self._tokens, options.client_id, prove, scope=scope, issuer=issuer)

    def _make_browser_provider(self, options: OauthSignInOptions) -> OAuthClientProvider:
        """Return a provider that lets the user sign in with a browser."""
        from mcp.shared.auth import OAuthClientInformationFull

        redirect = self._prompt.redirect if self._prompt is not None else "http://127.0.0.1:0/callback"
        metadata = OAuthClientMetadata.model_validate(
            {
                "client_name": "Handrail",
                "redirect_uris": [redirect],
                "grant_types": ["authorization_code", "refresh_token"],
                "response_types": ["code"],
                "scope": " ".join(options.scopes) or None,
            }
        )
        back: list[AuthorizationCodeResult] = []

        async def visit(address: str) -> None:
            if self._prompt is None:
                raise SignInRequired(_explain_absent_user(self._definition.name))
            self._visit_count += 1
            place, mark, query = address.partition("?")  # the endpoint may have a query, before that of the SDK
            back[:] = [_parse_redirect(await self._prompt.open_browser(place + mark + query.replace("?", "&")))]

        async def returned() -> AuthorizationCodeResult:
            metadata, result = provider.context.oauth_metadata, back[0]
            if metadata is not None and result.iss is not None and provider.is_issuer_spelled(result.iss):
                return result.model_copy(update={"iss": str(metadata.issuer)})
            return result

        known: OAuthClientInformationFull | None = None
        if options.client_id:
            known = OAuthClientInformationFull.model_validate(
                {
                    **metadata.model_dump(mode="json", exclude_none=True),
                    "client_id": options.client_id,
                    "client_secret": options.client_secret or None,
                    "token_endpoint_auth_method": "client_secret_basic" if options.client_secret else "none",
                }
            )
        at = options.client_metadata_url or None
        provider = BrowserSignIn(self._definition.url, metadata, self._tokens, visit, returned, client_metadata_url=at)
        provider.known_client, provider.trusted_issuer = known, options.issuer
        provider.configured_scope, provider.store = " ".join(options.scopes), self._tokens
        provider.absence = "" if self._prompt is not None else _explain_absent_user(self._definition.name)
        return provider


def _explain_absent_user(name: str) -> str:
    return f"the server requires a sign-in, and no user is present; sign in once with: handrail mcp login {name}"


def _parse_redirect(address: str) -> AuthorizationCodeResult:
    from mcp.client.auth import AuthorizationCodeResult

    fields = {key: values[0] for key, values in parse_qs(urlsplit(address).query).items()}
    if not fields.get("code") and "error" not in fields:
        raise SignInRequired("the authorization server sent the browser back without a code")
    # Servers forget registrations. The client then registers again, and the user signs in once more.
    if fields.get("error") in _UNKNOWN_CLIENT_ERRORS:
        raise UnknownClientError(f"the authorization server does not know this client: {fields['error']}")
    if "error" in fields:
        hint = "; set the scopes that it accepts under oauth" if fields["error"] == "invalid_scope" else ""
        raise SignInRequired(
            f"the sign-in was rejected: {fields.get('error_description', fields['error'])[:300]}{hint}"
        )
    return AuthorizationCodeResult.model_validate({key: fields.get(key) for key in ("code", "state", "iss")})


_UNKNOWN_CLIENT_ERRORS = ("invalid_client", "unauthorized_client")
_UNKNOWN_CLIENT_TEXT = re.compile(
    rb"invalid_client|unauthorized_client|(?i:client(?:[ _-]?id)?\W.{0,80}(?:not found|not registered|unknown|does not exist)"
    rb"|(?:unknown|unregistered) client)"
)


_OTHER_RESOURCE = re.compile(r"Protected resource (https?://\S+) does not match expected")


async def _is_client_unknown(response: httpx2.Response) -> bool:
    """Return whether an authorization server refuses this client because it does not know it."""
    if response.status_code not in (400, 401, 403, 404):
        return False
    return _UNKNOWN_CLIENT_TEXT.search((await response.aread())[:_MAX_ERROR_BYTES]) is not None


def _set_bearer_token(request: httpx2.Request, token: str) -> None:
    if token:
        request.headers["authorization"] = f"Bearer {token}"


def _requires_more_scopes(response: httpx2.Response) -> bool:
    if response.status_code == 401:
        return True
    return response.status_code == 403 and "insufficient_scope" in response.headers.get("www-authenticate", "")


_WELL_KNOWN = "/.well-known/oauth-authorization-server"


class BrowserSignIn(OAuthClientProvider):
    """The authorization code flow, also with a server of 2025-03-26 that is its own authorization server.

    Such a server publishes no protected-resource metadata, and its own metadata is at the root of its origin, whatever the path of
    its issuer. An issuer of the same origin is accepted; one of any other origin is refused.

    :ivar known_client: the client's id, if the operator has set one
    :ivar configured_scope: the scopes that the operator has set; empty for those that the server names
    :ivar store: the stored registration and tokens
    :ivar absence: the text for the operator if no user can sign in now; empty if one can
    :ivar trusted_issuer: the only authorization server to which the user and the client's secret may be sent; empty for the one that
        the server names
    """

    known_client: OAuthClientInformationFull | None = None
    configured_scope: str = ""
    store: OauthTokenStore
    trusted_issuer: str = ""
    absence: str = ""
    _is_step_up: bool = False
    """Whether the server refused a request for its scopes only."""
    _named_issuer: str = ""
    """The issuer as an authorization server of 2025-03-26 names itself."""

    async def _initialize(self) -> None:
        await super()._initialize()
        self.context.client_info = self.known_client or self.context.client_info

    def is_issuer_spelled(self, named: str) -> bool:
        """Return whether an issuer in a redirect is another spelling of the one in the metadata."""
        metadata = self.context.oauth_metadata
        return named == self._named_issuer or (metadata is not None and is_same_issuer(named, str(metadata.issuer)))

    async def _handle_refresh_response(self, response: httpx2.Response) -> bool:
        if response.status_code >= 500 or response.status_code == 429:
            raise SignInRequired(
                f"the token could not be refreshed: the authorization server answered {response.status_code}; try again later"
            )
        if await super()._handle_refresh_response(response):
            return True
        if await _is_client_unknown(response):
            self.drop_registration()
        return False

    async def _handle_token_response(self, response: httpx2.Response) -> None:
        if self.known_client is None and await _is_client_unknown(response):
            self.drop_registration()
            raise UnknownClientError(
                "the authorization server does not know this client, although it was just registered"
            )
        await super()._handle_token_response(response)

    def drop_registration(self) -> None:
        """Forget a registration that this client made itself, so that it registers again."""
        if self.known_client is None and self.context.client_info is not None:
            self.context.client_info = None
            self.store.forget_client()

    def _is_registered_for_redirect(self) -> bool:
        """Return whether the registration has the address to which the browser will return."""
        client = self.context.client_info
        wanted = [str(uri) for uri in self.context.client_metadata.redirect_uris or ()]
        return client is None or not client.redirect_uris or wanted[0] in map(str, client.redirect_uris)

    async def _make_registration_check(self, asked: httpx2.Request, response: httpx2.Response) -> httpx2.Request | None:
        """Return a request that shows whether the authorization server still knows this client.

        A browser would only show an error page there. None unless ``response`` has the server's metadata, with the address in the
        same place as the token endpoint, which is within reach.
        """
        client = self.context.client_info
        if self.known_client is not None or client is None or response.status_code != 200:
            return None
        if not any(name in asked.url.path for name in (_WELL_KNOWN, "/.well-known/openid-configuration")):
            return None
        try:
            metadata: Any = orjson.loads(await response.aread())
            address, token_endpoint = str(metadata["authorization_endpoint"]), str(metadata["token_endpoint"])
        except (orjson.JSONDecodeError, TypeError, KeyError):
            return None
        # The check is a request from this machine. Only a host that the sign-in needs anyway may get it.
        if _origin(address) != _origin(token_endpoint):
            return None
        fields = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": str((self.context.client_metadata.redirect_uris or [""])[0]),
            "state": "registration-check",
            "code_challenge": "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU",
            "code_challenge_method": "S256",
        }
        return httpx2.Request("GET", f"{address}{'&' if '?' in address else '?'}{urlencode(fields)}")

    async def _perform_authorization(self) -> httpx2.Request:
        metadata = self.context.oauth_metadata
        named = str(metadata.issuer) if metadata is not None else _origin(self.context.server_url)
        # The operator pinned the issuer, so a server cannot send the user to a page that collects the password.
        if self.trusted_issuer and not issuers_match(named, self.trusted_issuer):
            raise OAuthFlowError(
                f"the server names the authorization server {named}, but {self.trusted_issuer} is configured"
            )
        self.context.client_metadata.scope = self._select_scope()
        request = await super()._perform_authorization()
        self.store.set_missing_scope("")
        return request

    def _select_scope(self) -> str | None:
        """Return the scopes to request: the configured ones, or those that the server names, and those that were missing."""
        named = self.context.client_metadata.scope
        scope = self.configured_scope or named
        if self._is_step_up:
            scope = union_scopes(scope, named)
        return union_scopes(scope, self.store.missing_scope)

    def _prepare(self, outgoing: httpx2.Request) -> httpx2.Request:
        """Return a request of the SDK; the one of a registration has the configured scopes.

        :raises OAuthFlowError: for a registration at the MCP server in the place of an unreadable authorization server
        """
        is_json = outgoing.headers.get("content-type") == "application/json"
        if outgoing.method != "POST" or not is_json:
            return outgoing
        named = self.context.auth_server_url
        if self.context.oauth_metadata is None and named and _origin(named) != _origin(str(outgoing.url)):
            raise OAuthFlowError(f"the authorization server {named} has no metadata that can be read")
        if not self.configured_scope:
            return outgoing
        fields = {**orjson.loads(outgoing.content), "scope": self.configured_scope}
        return httpx2.Request("POST", outgoing.url, json=fields)

    async def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        flow = super()._auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                response = yield outgoing if outgoing is request else self._prepare(outgoing)
                if outgoing is request:
                    self._is_step_up = response.status_code == 403
                if self._is_step_up and outgoing is request and self.absence:
                    missing = extract_scope_from_www_auth(response) or ""
                    self.store.set_missing_scope(union_scopes(self.store.missing_scope, missing) or "")
                    raise SignInRequired(
                        f"the server requires further permissions{f' ({missing})' * bool(missing)}; {self.absence}"
                    )
                if outgoing is request and response.status_code == 401:  # the refresh was not possible, or was refused
                    # The page would wait for a user who is not there, until the call times out.
                    if self.absence:
                        raise SignInRequired(self.absence)
                    if not self._is_registered_for_redirect():
                        self.drop_registration()
                check = await self._make_registration_check(outgoing, response)
                if check is not None and await _is_client_unknown((yield check)):
                    self.drop_registration()
                if self._is_root_metadata(outgoing, response):
                    response = await self._issued_by_origin(outgoing, response)
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()

    def _is_root_metadata(self, asked: httpx2.Request, response: httpx2.Response) -> bool:
        legacy = self.context.auth_server_url is None and response.status_code == 200
        return legacy and str(asked.url) == _origin(self.context.server_url) + _WELL_KNOWN

    async def _issued_by_origin(self, asked: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        body = await response.aread()
        try:
            metadata: Any = orjson.loads(body)
            issuer = metadata["issuer"]
        except (orjson.JSONDecodeError, TypeError, KeyError):
            return response
        origin = _origin(self.context.server_url)
        if not isinstance(issuer, str) or _origin(issuer) != origin:
            return response
        self._named_issuer = issuer
        metadata_text = orjson.dumps({**metadata, "issuer": origin})
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=metadata_text, request=asked)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()
