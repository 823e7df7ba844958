"""Reports about authorization servers whose answers are odd, and about users who take their time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from tests.field.sign_in_server import Browser, request_page
from tests.field.test_servers_over_http import OlderServer
from tests.field.test_sign_in import bench
from tests.upstream.scripted_mcp_servers import HttpResponseWriter, ReceivedHttpRequest, approve_server_tools

from handrail import ToolError, UsageError
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.oauth_sign_in import SignInPrompt

Change = Callable[[dict[str, Any]], object]

TOKENS: dict[str, Change] = {
    "no lifetime": lambda it: {key: one for key, one in it.items() if key != "expires_in"},
    "lifetime 0": lambda it: {**it, "expires_in": 0},
    "negative lifetime": lambda it: {**it, "expires_in": -1},
    "lifetime as text": lambda it: {**it, "expires_in": "3600"},
    "lifetime as other text": lambda it: {**it, "expires_in": "never"},
    "empty lifetime": lambda it: {**it, "expires_in": ""},
    "fractional lifetime": lambda it: {**it, "expires_in": 3599.7},
    "huge lifetime": lambda it: {**it, "expires_in": 1e300},
    "null lifetime": lambda it: {**it, "expires_in": None},
    "lower case type": lambda it: {**it, "token_type": "bearer"},
    "upper case type": lambda it: {**it, "token_type": "BEARER"},
    "null type": lambda it: {**it, "token_type": None},
    "no type": lambda it: {key: one for key, one in it.items() if key != "token_type"},
    "own type": lambda it: {**it, "token_type": "user"},
    "scopes as a list": lambda it: {**it, "scope": ["a", "b"]},
    "scope as an object": lambda it: {**it, "scope": {"a": True}},
    "empty refresh token": lambda it: {**it, "refresh_token": ""},
    "number as refresh token": lambda it: {**it, "refresh_token": 5},
    "form": lambda it: urlencode(it).encode(),
    "byte order mark": lambda it: b"\xef\xbb\xbf" + json.dumps(it).encode(),
    "status 201": lambda it: (201, it),
}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a client's secret."""
    monkeypatch.setenv("A_CLIENT_SECRET", "sesame-1234")


@pytest.mark.parametrize("odd", TOKENS.values(), ids=TOKENS)
async def test_an_odd_token_answer_still_signs_the_user_in(tmp_path: Path, odd: Change) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["token"] = odd
        assert await it.sign_in() == 1
        assert len(it.browser.shown) == 1


METADATA: dict[str, tuple[str, Change]] = {
    "slash after the issuer": ("oauth-authorization-server", lambda it: {**it, "issuer": it["issuer"] + "/"}),
    "slash after the named server": (
        "oauth-protected-resource",
        lambda it: {**it, "authorization_servers": [it["authorization_servers"][0] + "/"]},
    ),
    "no address of the resource": (
        "oauth-protected-resource",
        lambda it: {"authorization_servers": it["authorization_servers"]},
    ),
    "one server without a list": (
        "oauth-protected-resource",
        lambda it: {**it, "authorization_servers": it["authorization_servers"][0]},
    ),
    "an invalid server before the valid one": (
        "oauth-protected-resource",
        lambda it: {**it, "authorization_servers": ["main", *it["authorization_servers"]]},
    ),
    "scopes as a text": ("oauth-protected-resource", lambda it: {**it, "scopes_supported": "a b"}),
    "invalid documentation": ("oauth-authorization-server", lambda it: {**it, "service_documentation": "n/a"}),
    "empty addresses": (
        "oauth-authorization-server",
        lambda it: {**it, "revocation_endpoint": "", "op_tos_uri": "", "introspection_endpoint": ""},
    ),
    "no list of challenge methods": (
        "oauth-authorization-server",
        lambda it: {key: one for key, one in it.items() if key != "code_challenge_methods_supported"},
    ),
    "challenge methods as a text": (
        "oauth-authorization-server",
        lambda it: {**it, "code_challenge_methods_supported": "S256"},
    ),
}


@pytest.mark.parametrize("odd", METADATA.values(), ids=METADATA)
async def test_odd_metadata_costs_only_its_odd_members(tmp_path: Path, odd: tuple[str, Change]) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd[odd[0]] = odd[1]
        assert await it.sign_in() == 1
        assert [*it.guard.clients] == ["c-1"]


async def test_metadata_of_another_issuer_ends_the_sign_in(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["oauth-authorization-server"] = lambda said: {**said, "issuer": "http://127.0.0.1:9"}
        with pytest.raises(UsageError, match="issuer mismatch"):
            await it.sign_in()
        assert not it.browser.shown


async def test_a_challenge_may_name_its_metadata_by_a_path(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.challenge = 'Bearer resource_metadata="/.well-known/oauth-protected-resource"'
        assert await it.sign_in() == 1


PLACES: dict[str, tuple[str, list[str]]] = {
    "at the root": ("", ["/.well-known/oauth-authorization-server"]),
    "as OpenID at the root": ("", ["/.well-known/openid-configuration"]),
    "before a path": ("/a", ["/.well-known/oauth-authorization-server/a"]),
    "as OpenID before a path": ("/a", ["/.well-known/openid-configuration/a"]),
    "as OpenID behind a path": ("/a/b", ["/a/b/.well-known/openid-configuration"]),
}


@pytest.mark.parametrize(("path", "places"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("challenge", ["", "Bearer", 'Basic realm="x"', "bearer error=invalid_token"])
async def test_metadata_is_found_at_each_place(tmp_path: Path, path: str, places: list[str], challenge: str) -> None:
    async with bench(tmp_path) as it:
        it.guard.issuer_path, it.guard.metadata_places, it.guard.challenge = path, places, challenge
        assert await it.sign_in() == 1
        assert [*it.guard.clients] == ["c-1"]


async def test_an_error_at_one_place_of_metadata_leads_to_the_next(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.metadata_places.append("/.well-known/openid-configuration")
        it.guard.odd["oauth-authorization-server"] = lambda _: (500, {"error": "down"})
        assert await it.sign_in() == 1


async def test_the_resource_is_named_in_each_request_for_a_token(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        it.guard.expire_token()
        assert await it.sign_in() == 1
        assert it.guard.grants == ["authorization_code", "refresh_token"]
        asked = [one for one in it.guard.asked if one.get("state") != "registration-check"]
        assert [one.get("resource") for one in asked] == [it.http.url] * 3


async def test_a_secret_is_sent_as_the_authorization_server_reads_it(tmp_path: Path) -> None:
    for number, (methods, in_header) in enumerate(
        [(None, True), (["client_secret_basic"], True), (["client_secret_post"], False)]
    ):
        async with bench(tmp_path / str(number)) as it:
            it.folder.mkdir()
            it.secrets = '[secrets.S]\nenv = "A_CLIENT_SECRET"\n'
            it.oauth = 'client_id = "mine"\nclient_secret = { secret = "S" }'
            it.guard.clients["mine"] = []
            it.guard.any_redirect = True
            if methods is not None:
                it.guard.odd["oauth-authorization-server"] = lambda said, methods=methods: {
                    **said,
                    "token_endpoint_auth_methods_supported": methods,
                }
            assert await it.sign_in() == 1
            it.guard.expire_token()
            assert await it.sign_in() == 1
            assert it.guard.grants == ["authorization_code", "refresh_token"]
            assert [one.startswith("Basic ") for one in it.guard.authorizations] == [in_header] * 2
            asked = [one for one in it.guard.asked if "grant_type" in one]
            assert [one.get("client_secret") == "sesame-1234" for one in asked] == [not in_header] * 2


async def test_a_refused_scope_is_named_with_the_setting(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.browser = StrayBrowser("error=invalid_scope&error_description=No+such+scope")
        with pytest.raises(UsageError, match="No such scope; set the scopes"):
            await it.sign_in()


async def test_a_token_that_needs_a_key_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["token"] = lambda said: {**said, "token_type": "DPoP"}
        with pytest.raises(UsageError, match="type DPoP; expected Bearer"):
            await it.sign_in()


async def test_a_token_that_no_header_can_have_is_refused_without_its_text(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["token"] = lambda said: {**said, "access_token": "not-for\nyour-eyes"}
        with pytest.raises(UsageError, match="a character that no header can have") as raised:
            await it.sign_in()
        assert "your-eyes" not in str(raised.value)


async def test_a_token_error_with_status_200_is_shown_without_any_secret(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["token"] = lambda said: {"error": "bad_code", "refresh_token": "not-for-your-eyes"}
        with pytest.raises(UsageError, match="bad_code") as raised:
            await it.sign_in()
        assert "not-for-your-eyes" not in str(raised.value)


async def test_a_refresh_refused_with_status_200_lets_the_user_sign_in(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        it.guard.expire_token()
        it.guard.odd["token"] = lambda said: (200, said)
        it.guard._refresh = ""  # pyright: ignore[reportPrivateUsage] - the whole sign-in has ended
        assert await it.sign_in() == 1
        assert it.guard.grants == ["authorization_code"] * 2


async def test_a_refresh_that_fails_for_now_asks_for_no_sign_in(tmp_path: Path) -> None:
    async with bench(tmp_path) as it, temporary_kernel(tmp_path, settings=it.settings) as kernel:
        assert await it.sign_in() == 1
        it.guard.expire_token()
        it.guard.odd["token"] = lambda _: (503, {"error": "temporarily_unavailable"})
        with pytest.raises(ToolError, match="answered 503; try again later") as raised:
            await kernel.components.upstreams["h"].ensure_connected()
        assert "login" not in str(raised.value)


async def test_a_server_that_registers_no_clients_is_named_with_the_setting(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["registration"] = lambda _: (403, {"error": "registration is closed"})
        with pytest.raises(UsageError, match=r"registration is closed.*client_id under \[mcp.servers.h.oauth\]"):
            await it.sign_in()


async def test_configured_scopes_are_requested_instead_of_those_of_the_server(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.oauth = 'scopes = ["read", "write"]'
        it.guard.odd["oauth-protected-resource"] = lambda said: {**said, "scopes_supported": ["everything"]}
        assert await it.sign_in() == 1
        assert it.guard.granted == "read write" and it.guard.registered[0]["scope"] == "read write"


async def test_a_missing_scope_is_requested_by_the_next_sign_in(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.oauth = 'scopes = ["read"]'
        assert await it.sign_in() == 1
        async with temporary_kernel(tmp_path, settings=it.settings, rules=["allow mcp:h:*"]) as kernel:
            await approve_server_tools(kernel, "h")
            session = await kernel.session()
            it.guard.required_scope = "write"
            refused = str((await session.call("h_echo", {"text": "x"})).error_text)
            assert "further permissions (write)" in refused and "handrail mcp login h" in refused
            assert await it.sign_in() == 1
            assert it.guard.granted.split() == ["read", "write"] and len(it.browser.shown) == 2
            assert (await session.call("h_echo", {"text": "x"})).ok
        assert await it.sign_in() == 1 and len(it.browser.shown) == 2, "nothing is missing any more"


async def test_a_user_is_asked_for_missing_scopes_at_once_if_present(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        it.guard.required_scope = "write"
        assert await it.sign_in() == 1
        assert it.guard.granted == "write" and len(it.browser.shown) == 2


async def test_a_server_that_refuses_a_new_token_does_not_ask_the_user_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["token"] = lambda said: {**said, "access_token": "another"}
        with pytest.raises(UsageError, match="rejected the authorization"):
            await it.sign_in()
        assert len(it.browser.shown) <= 3  # one a connection, and not two


async def test_the_time_that_a_user_takes_does_not_count(tmp_path: Path) -> None:
    class SlowBrowser(Browser):
        def open(self, address: str) -> None:
            asyncio.get_running_loop().call_later(1.5, super().open, address)

    async with bench(tmp_path) as it:
        it.browser = SlowBrowser()
        it.connection = "connect_timeout_ms = 2000"
        assert await it.sign_in() == 1
        assert len(it.browser.shown) == 1


async def test_a_time_limit_still_ends_what_no_user_delays() -> None:
    async def agree_slowly(address: str) -> str:
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, done.set)
        await done.wait()
        return address

    prompt = SignInPrompt("http://127.0.0.1:9/callback", agree_slowly)
    async with prompt.limit_time(0.01):
        assert await prompt.open_browser("x") == "x"
    with pytest.raises(TimeoutError):
        async with prompt.limit_time(0.01):
            await asyncio.Event().wait()


class StrayBrowser(Browser):
    """A browser that first restores the page of an earlier sign-in."""

    def __init__(self, stray: str) -> None:
        super().__init__()
        self.stray = stray
        self.pages: list[int] = []

    async def _follow(self, address: str) -> None:
        back = parse_qs(urlsplit(address).query)["redirect_uri"][0]
        self.pages.append((await request_page(f"{back}?{self.stray}"))[0])
        self.pages.append((await request_page(await self.agree(address)))[0])


@pytest.mark.parametrize("stray", ["code=old&state=old", "code=old", "error=access_denied&state=old"])
async def test_a_redirect_of_another_sign_in_does_not_end_this_one(tmp_path: Path, stray: str) -> None:
    async with bench(tmp_path) as it:
        it.browser = browser = StrayBrowser(stray)
        assert await it.sign_in() == 1
        assert browser.pages == [400, 200]


async def test_a_redirect_with_an_error_ends_the_sign_in_with_its_reason(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.browser = StrayBrowser("error=access_denied&error_description=Not+today")
        with pytest.raises(UsageError, match="rejected: Not today"):
            await it.sign_in()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"tokens": {"access_token": 5}}',
        b'{"tokens": [], "client": 7, "giver": "x", "missing_scope": 1}',
        b'{"client": {"client_id": "c-9", "redirect_uris": ["http://127.0.0.1:99999/callback"]}}',
    ],
)
async def test_a_damaged_token_file_leads_to_a_new_sign_in(tmp_path: Path, content: bytes) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        (kept,) = (tmp_path / "state" / "mcp" / "tokens").iterdir()
        kept.write_bytes(content)
        assert await it.sign_in() == 1
        assert json.loads(kept.read_text())["tokens"]["access_token"].startswith("token-")


@pytest.mark.parametrize("transport", ["", 'transport = "sse"'])
async def test_a_user_signs_in_at_a_server_with_only_the_older_transport(tmp_path: Path, transport: str) -> None:
    async with bench(tmp_path) as it:
        older = OlderServer(405, "/messages")

        async def answer(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
            if not asked.path.startswith("/messages") and await it.guard(asked, answering):
                return True
            return await older(asked, answering)

        it.http.any_request, it.connection = answer, transport
        assert await it.sign_in() == 1
        assert len(it.browser.shown) == 1 and it.guard.grants == ["authorization_code"]


async def test_a_sign_in_that_is_stopped_keeps_its_registration_and_closes_its_port(tmp_path: Path) -> None:
    shown = asyncio.Event()

    class AbsentBrowser(Browser):
        def open(self, address: str) -> None:
            self.shown.append(address)
            shown.set()

    async with bench(tmp_path) as it:
        it.browser = AbsentBrowser()
        signing_in = asyncio.create_task(it.sign_in())
        await shown.wait()
        signing_in.cancel()
        with pytest.raises(asyncio.CancelledError):
            await signing_in
        (port,) = it.ports
        with socket.create_server(("127.0.0.1", port or 0)):
            pass
        it.browser = Browser()
        assert await it.sign_in() == 1
        assert [*it.guard.clients] == ["c-1"] and it.ports == [port]


async def test_a_sign_in_that_nobody_answers_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.kernel.upstream_mcp_servers.SIGN_IN_TIMEOUT_S", 0.05)

    class AbsentBrowser(Browser):
        def open(self, address: str) -> None:
            self.shown.append(address)

    async with bench(tmp_path) as it:
        it.browser = AbsentBrowser()
        with pytest.raises(UsageError, match=r"did not return within 0\.05 s"):
            await it.sign_in()


async def test_an_authorization_server_elsewhere_is_named_with_the_setting(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        elsewhere = "http://127.0.0.2:9"
        it.guard.odd["oauth-protected-resource"] = lambda said: {**said, "authorization_servers": [elsewhere]}
        with pytest.raises(UsageError, match=r"127\.0\.0\.2") as raised:
            await it.sign_in()
        assert "hosts of [mcp.servers.h]" in str(raised.value) and "requires" not in str(raised.value)


@pytest.mark.parametrize(
    ("supported", "client"),
    [
        (True, "https://a.example/handrail.json"),
        (False, "c-1"),
        (None, "c-1"),
        ("true", "https://a.example/handrail.json"),
        ("maybe", "c-1"),
    ],
)
async def test_a_metadata_document_is_the_client_only_where_the_server_reads_it(
    tmp_path: Path, supported: object, client: str
) -> None:
    async with bench(tmp_path) as it:
        it.oauth = 'client_metadata_url = "https://a.example/handrail.json"'
        it.guard.clients["https://a.example/handrail.json"] = []
        it.guard.any_redirect = True
        it.guard.odd["oauth-authorization-server"] = lambda said: {
            **said,
            **({} if supported is None else {"client_id_metadata_document_supported": supported}),
        }
        assert await it.sign_in() == 1
        it.guard.expire_token()
        assert await it.sign_in() == 1
        assert {one["client_id"] for one in it.guard.asked} == {client}
        assert it.guard.grants == ["authorization_code", "refresh_token"] and "client_secret" not in str(it.guard.asked)


@pytest.mark.parametrize("rotated", [True, False])
async def test_a_refresh_token_is_kept_or_replaced_as_the_server_says(tmp_path: Path, rotated: bool) -> None:
    async with bench(tmp_path) as it:
        assert await it.sign_in() == 1
        first = it.guard._refresh  # pyright: ignore[reportPrivateUsage]
        if not rotated:
            it.guard.odd["token"] = lambda said: {key: one for key, one in said.items() if key != "refresh_token"}
        for _ in range(2):
            it.guard.expire_token()
            if not rotated:
                it.guard._refresh = first  # pyright: ignore[reportPrivateUsage]
            assert await it.sign_in() == 1
        assert it.guard.grants == ["authorization_code", "refresh_token", "refresh_token"] and not it.guard.refused
        sent = [one["refresh_token"] for one in it.guard.asked if "refresh_token" in one]
        assert sent == ([first, "refresh-2"] if rotated else [first, first])


@pytest.mark.parametrize("field", ["code", "state", "iss"])
async def test_a_redirect_without_its_fields_or_with_a_wrong_issuer_signs_nobody_in(tmp_path: Path, field: str) -> None:
    class OddBrowser(Browser):
        async def _follow(self, address: str) -> None:
            back = await self.agree(address)
            given = {key: one[0] for key, one in parse_qs(urlsplit(back).query).items() if key != field}
            more = {"iss": "http://127.0.0.1:9"} if field == "iss" else {}
            status, _ = await request_page(f"{back.partition('?')[0]}?{urlencode({**given, **more})}")
            if field == "state":
                assert status == 400
                self.shown.append("refused")
                await request_page(await self.agree(address))

    async with bench(tmp_path) as it:
        it.browser = OddBrowser()
        if field == "state":
            assert await it.sign_in() == 1 and "refused" in it.browser.shown
            return
        with pytest.raises(UsageError, match="without a code" if field == "code" else "iss mismatch"):
            await it.sign_in()
        assert not it.guard.grants


REGISTRATIONS: dict[str, Change] = {
    "placeholders": lambda it: (
        201,
        {**it, "client_secret": "", "contacts": None, "redirect_uris": None, "scope": None},
    ),
    "lists for texts": lambda it: (
        201,
        {**it, "scope": ["a", "b"], "grant_types": "authorization_code", "response_types": "code"},
    ),
    "a number for the id": lambda it: (201, {**it, "client_id": 1}),
    "texts for times": lambda it: (201, {**it, "client_id_issued_at": "now", "client_secret_expires_at": "never"}),
    "invalid addresses": lambda it: (201, {**it, "client_uri": "n/a", "jwks_uri": "-", "logo_uri": 5}),
    "another address": lambda it: (201, {**it, "redirect_uris": ["http://localhost/callback", "urn:x"]}),
    "status 200": lambda it: it,
}


@pytest.mark.parametrize("odd", REGISTRATIONS.values(), ids=REGISTRATIONS)
async def test_an_odd_registration_is_used(tmp_path: Path, odd: Change) -> None:
    async with bench(tmp_path) as it:
        it.guard.clients["1"] = []
        it.guard.any_redirect = True
        it.guard.odd["registration"] = odd
        assert await it.sign_in() == 1 and len(it.browser.shown) == 1


async def test_an_authorization_endpoint_may_have_a_query(tmp_path: Path) -> None:
    async with bench(tmp_path) as it:
        it.guard.odd["oauth-authorization-server"] = lambda said: {
            **said,
            "authorization_endpoint": said["authorization_endpoint"] + "?tenant=blue",
        }
        assert await it.sign_in() == 1
        query = parse_qs(urlsplit(it.browser.shown[0]).query)
        assert query["tenant"] == ["blue"] and query["response_type"] == ["code"]


@pytest.mark.parametrize(("before", "after"), [("127.0.0.1", "localhost"), ("/mcp", "/other")])
async def test_a_server_that_names_itself_otherwise_is_refused_with_the_setting(
    tmp_path: Path, before: str, after: str
) -> None:
    async with bench(tmp_path) as it:
        named = it.http.url.replace(before, after)
        it.guard.odd["oauth-protected-resource"] = lambda said: {**said, "resource": named}
        with pytest.raises(UsageError) as raised:
            await it.sign_in()
        assert f"set url = '{named}' in [mcp.servers.h]" in str(raised.value) and not it.browser.shown
