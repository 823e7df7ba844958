"""What a server lists, page by page, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from handrail.upstream.client.channel import RpcError
from handrail.upstream.listing import MOST_ITEMS, Item, Kept, Listing

if TYPE_CHECKING:
    from handrail.upstream.client.conversation import Conversation

MOST_PAGES = 1_000
_LISTS = (
    ("tools", "tools", "tools/list", "tools"),
    ("resources", "resources", "resources/list", "resources"),
    ("templates", "resources", "resources/templates/list", "resourceTemplates"),
    ("prompts", "prompts", "prompts/list", "prompts"),
)


async def listed(conversation: Conversation) -> Listing:
    """Everything that the server says it has.

    :raises RpcError: where it refuses to list its tools
    :raises Lost: when the connection ends
    """
    found: dict[str, tuple[Item, ...]] = {}
    left_out = 0
    for key, capability, method, field in _LISTS:
        if capability not in conversation.capabilities:
            continue
        try:
            found[key], more = await _all_of(conversation, method, field)
        except RpcError:
            if key == "tools":
                raise
            continue  # some say that they have resources and know no list of them
        left_out += more
    return Listing(
        **found,
        capabilities=dict(conversation.capabilities),
        server=dict(conversation.server),
        protocol=conversation.protocol,
        left_out=left_out,
    )


async def _all_of(conversation: Conversation, method: str, field: str) -> tuple[tuple[Item, ...], int]:
    kept = Kept()
    seen: set[str] = set()
    params: dict[str, Any] = {}
    for _ in range(MOST_PAGES):
        page = await conversation.request(method, params)
        given = page.get(field)
        kept.add(cast("list[Any]", given) if isinstance(given, list) else ())
        cursor = page.get("nextCursor")
        if not isinstance(cursor, str) or cursor in seen or len(kept.items) + kept.left_out > MOST_ITEMS:
            break
        seen.add(cursor)
        params = {"cursor": cursor}
    return tuple(kept.items), kept.left_out
