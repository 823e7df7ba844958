"""A stream of what changes that tells of tasks too: the SDK's own knows of lists and resources alone.

Source: https://modelcontextprotocol.io/seps/2663-tasks-extension
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.session import ServerSession
    from mcp.server.subscriptions import ListenHandler

    Context = ServerRequestContext[dict[str, Any]]

logger = logging.getLogger("handrail.mcp")

TASK_TOLD = "notifications/tasks"


async def listened(
    listen: ListenHandler,
    context: Context,
    params: types.SubscriptionsListenRequestParams,
    tasks: Mapping[str, AsyncIterator[Mapping[str, Any]]],
) -> types.SubscriptionsListenResult:
    """Tell of everything that was asked for, until the client goes or the server ends it.

    :param listen: tells of everything but tasks
    :param tasks: by its id what there is to tell of each, from now on
    """
    if not tasks:
        return await listen(context, params)
    line = _Acknowledging(context.session, tuple(tasks))
    telling = [asyncio.create_task(_tell(context, line, states)) for states in tasks.values()]
    try:
        session: Any = line
        return await listen(replace(context, session=session), params)
    finally:
        for one in telling:
            one.cancel()


async def _tell(context: Context, line: _Acknowledging, states: AsyncIterator[Mapping[str, Any]]) -> None:
    await line.acknowledged.wait()
    meta = {SUBSCRIPTION_ID_META_KEY: context.request_id}
    try:
        async for state in states:
            told: Any = types.Notification[dict[str, Any], str](method=TASK_TOLD, params={**state, "_meta": meta})
            await context.session.send_notification(told, related_request_id=context.request_id)
    except Exception as error:  # mostly that the client has gone; the stream itself sees to that
        logger.info("a task is told of no more: %s", type(error).__name__)


class _Acknowledging:
    """A stream on which it is said first which tasks will be told of."""

    def __init__(self, session: ServerSession, task_ids: Sequence[str]) -> None:
        self.acknowledged = asyncio.Event()
        self._session = session
        self._task_ids = list(task_ids)

    async def send_notification(
        self, notification: types.ServerNotification, related_request_id: types.RequestId | None = None
    ) -> None:
        if isinstance(notification, types.SubscriptionsAcknowledgedNotification):
            agreed = notification.params.notifications.model_copy(update={"taskIds": self._task_ids})
            params = notification.params.model_copy(update={"notifications": agreed})
            notification = notification.model_copy(update={"params": params})
        await self._session.send_notification(notification, related_request_id)
        self.acknowledged.set()


__all__: Sequence[str] = ("TASK_TOLD", "listened")
