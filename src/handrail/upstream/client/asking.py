"""Requests that a server of the newer era answers by asking back: the client is asked everything at once, and it is tried again.

Source: https://modelcontextprotocol.io/specification/2026-07-28 (multi-round-trip requests)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.doors.peer import Ask, AskMethod
from handrail.contract.errors import ToolError
from handrail.upstream.client.conversation import ASKED_BY

if TYPE_CHECKING:
    from handrail.contract.doors.runtime import Runtime

MOST_ROUNDS = 10
_PAUSES_S = (0.05, 0.1, 0.2, 0.25)
"""Before trying again where the server asks nothing and only wants to be called once more."""


async def with_input(
    once: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]],
    params: Mapping[str, Any],
    runtime: Runtime | None,
    name: str,
    grants: frozenset[str],
) -> dict[str, Any]:
    """The result of a request, with whatever input its server wants on the way.

    :param once: sends it
    :param name: what the operator calls the server
    :param grants: what it may ask of a client
    :raises ToolError: ``denied`` for what it may not ask; as the client's door says; ``backend`` without an end
    """
    said: dict[str, Any] = dict(params)
    for turn in range(MOST_ROUNDS + 1):
        result = await once(said)
        if result.get("resultType") != "input_required":
            return result
        said = dict(params)
        if isinstance(state := result.get("requestState"), str):
            said["requestState"] = state
        wanted = result.get("inputRequests")
        if isinstance(wanted, dict) and wanted:
            said["inputResponses"] = await asked(cast("dict[str, Any]", wanted), runtime, name, grants)
        elif turn < MOST_ROUNDS:
            await asyncio.sleep(_PAUSES_S[min(turn, len(_PAUSES_S) - 1)])
    raise ToolError(f"mcp server {name} asked for input more than {MOST_ROUNDS} times in one call", kind="backend")


async def asked(
    requests: Mapping[str, Any], runtime: Runtime | None, name: str, grants: frozenset[str]
) -> dict[str, Mapping[str, Any]]:
    """What the client answers to a server's requests, by their keys.

    :raises ToolError: as :func:`with_input` does
    """
    asks: dict[str, Ask] = {}
    for key, request in requests.items():
        said = cast("dict[str, Any]", request) if isinstance(request, dict) else {}
        method, params = said.get("method"), said.get("params")
        grant = ASKED_BY.get(method) if isinstance(method, str) else None
        if grant is None or grant not in grants:
            shown = str(method)[:60]
            raise ToolError(
                f"mcp server {name} wants {shown} of the client, which it is not granted; an operator allows it with "
                f"{grant or 'no setting'} = true under [mcp.servers.{name}]"
                if grant
                else f"mcp server {name} wants {shown!r} of the client, which there is not",
                kind="denied",
            )
        given = dict(cast("dict[str, Any]", params)) if isinstance(params, dict) else {}
        given.pop("_meta", None)
        asks[key] = Ask(cast("AskMethod", method), given, name)
    if runtime is None:
        raise ToolError(f"mcp server {name} wants input, and nobody's call is under way", kind="unavailable")
    return dict(await runtime.peer.ask(asks))
