"""The opening of a workspace: hold it, or join the process of the same user that does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar, cast

from handrail.contract.errors import UsageError
from handrail.contract.rules import AnyRule, rule_texts
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.settings import ToolConfig
from handrail.contract.tool.tool import Tool
from handrail.kernel.held import Hold, Join, hold
from handrail.kernel.kernel import Folder, Kernel
from handrail.origins.imports import opened
from handrail.policy.rules.rules import given
from handrail.policy.watchdogs.watchdog import ExternalWatchdog, Watchdog
from handrail.session.context import Brought
from handrail.store.folders import workspace_folder
from handrail.store.lease import Lease, WorkspaceHeld

T = TypeVar("T")

_BRIEF_S = 10.0
"""How long to wait for a process that only writes an answer."""
_LOOK_S = 0.02


@asynccontextmanager
async def open_kernel(
    workspace: Folder = ".",
    *,
    tools: Iterable[Tool] = (),
    offerings: Iterable[Offering] = (),
    rules: Iterable[AnyRule] = (),
    secrets: Mapping[str, str] | None = None,
    tool_config: Mapping[str, Mapping[str, str]] | None = None,
    state: Folder | None = None,
    config: Folder | None = None,
    watchdogs: Iterable[Watchdog] = (),
    agent: str | None = None,
    settings: Iterable[str] = (),
    mode: str | None = None,
    face: str = "library",
    allow_home: bool = False,
) -> AsyncGenerator[Kernel]:
    """Open ``workspace`` until the block ends: hold it, or join the process of the same user that does.

    What a process brings (tools, rules, watchdogs) is for the sessions that it opens itself.

    :param tools: tools given in code, beside the built-ins, the tool folders and entry points
    :param offerings: resources and prompts given in code, beside those of the tool folders
    :param rules: session rules, as ``"allow bash git status"``, or with examples, as ``{"rule": "…", "match": ["…"]}``
    :param secrets: name to value; tools of this process may be given those that they declare, and the values are
        redacted wherever they appear
    :param tool_config: by tool id, values of the settings that the tool declares and that are not secret. They hold for
        the sessions of this process, before those of the agent's manifest and of the configuration
    :param state: where state is kept instead of the platform's state folder
    :param config: the configuration file instead of the platform's
    :param watchdogs: see every call before it runs, in this order, and can only narrow
    :param agent: whose sessions it opens unless they name another; None for the configured one
    :param settings: ``KEY=VALUE`` texts, stronger than files and variables
    :param mode: how much its sessions do without asking: ``plan``, ``ask``, ``accept-edits`` or ``auto``; None for
        the agent's or the configured one
    :param face: how this process is reached, for others to know it by
    :param allow_home: open what is no project all the same, such as a home folder, ``~/.ssh`` or ``/``
    :raises LoadError: with every fault of configuration, agent, rules and tools
    :raises UsageError: for an argument of the wrong form
    :raises StartError: when state, lease or sandbox are not to be had
    """
    brought = Brought(
        face,
        agent,
        several("tools", tools),
        rule_texts(rules),
        secrets,
        _callable(several("watchdogs", watchdogs)),
        several("offerings", offerings),
        several("settings", settings),
        given(mode),
        values_of_tools(tool_config),
    )

    def holding(brought: Brought) -> AbstractAsyncContextManager[Kernel]:
        return hold(workspace, state, config, brought, joining, allow_home=allow_home)

    def joining(held: WorkspaceHeld, brought: Brought) -> AbstractAsyncContextManager[Kernel]:
        from handrail.kernel.joined import join  # most processes hold

        return join(held, config, brought, holding)

    async with AsyncExitStack() as stack:
        stack.enter_context(opened(workspace_folder(Path(workspace), allow_home=allow_home)))
        for one in brought.watchdogs:
            if isinstance(one, ExternalWatchdog):
                one.find()
        yield await _entered(stack, brought, holding, joining)


async def _entered(stack: AsyncExitStack, brought: Brought, hold: Hold, join: Join) -> Kernel:
    """The kernel of this process, with its end on ``stack``."""
    deadline = asyncio.get_running_loop().time() + _BRIEF_S
    while True:
        try:
            return await stack.enter_async_context(hold(brought))
        except WorkspaceHeld as held:
            if held.is_writing or not (held.holder.socket or held.holder.is_brief):
                raise
            if held.holder.socket:
                return await stack.enter_async_context(join(held, brought))
            if asyncio.get_running_loop().time() >= deadline:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await Lease.until_free(held.folders, interval_s=_LOOK_S)


def several(name: str, values: Iterable[T]) -> tuple[T, ...]:
    """What a program gives as a list, kept as it is now.

    :raises UsageError: for one value in its place, whose parts Python would take for values or which has none
    """
    one = cast("object", values)
    if isinstance(one, (str, bytes, Mapping)) or not isinstance(one, Iterable):
        raise UsageError(f"{name}={one!r} is no list; write {name}=[…], with each {name.removesuffix('s')} in it")
    return tuple(values)


def values_of_tools(given: Mapping[str, Mapping[str, str]] | None) -> ToolConfig:
    """The ``tool_config`` of a program, as it is now. Whether the tools take it is checked where they are known.

    :raises UsageError: for anything but texts by their keys, by the ids of tools
    """
    expected = 'expected {"TOOL ID": {"KEY": "VALUE"}}'
    if not isinstance(cast("object", given), Mapping | None):
        raise UsageError(f"tool_config={given!r:.80} is no mapping; {expected}")
    for tool, config in (given or {}).items():
        if not isinstance(cast("object", tool), str) or not isinstance(cast("object", config), Mapping):
            raise UsageError(f"tool_config[{tool!r:.80}] is no mapping; {expected}")
        for key, value in config.items():
            if not isinstance(cast("object", key), str) or not isinstance(cast("object", value), str):
                kind = type(cast("object", value)).__name__
                raise UsageError(
                    f"tool_config[{tool!r:.80}][{key!r:.80}] is {kind}, and every value is text; {expected}"
                )
            try:
                f"{tool}{key}{value}".encode()
            except UnicodeEncodeError:
                raise UsageError(f"tool_config[{tool!r:.80}][{key!r:.80}] holds half a character; {expected}") from None
    return {tool: dict(config) for tool, config in (given or {}).items()}


def _callable(watchdogs: tuple[Watchdog, ...]) -> tuple[Watchdog, ...]:
    """:raises UsageError: for what could not be asked, and would deny every call"""
    for one in watchdogs:
        if not callable(one):
            raise UsageError(f"watchdogs: {one!r} is no function that is given a call and answers with an opinion")
    return watchdogs
