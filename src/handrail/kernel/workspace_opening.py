"""The opening of a workspace: hold it, or connect to the process of the same user that holds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from handrail.contract.errors import UsageError
from handrail.contract.rule_forms import RuleLike, normalise_rules
from handrail.contract.tool.operator_tool_settings import ToolConfig
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.tool_protocol import Tool
from handrail.kernel.kernel_interface import FolderPath, Kernel
from handrail.kernel.local_kernel import OpenLocal, OpenRemote, open_local_kernel
from handrail.origins.import_guard import check_and_guard_workspace
from handrail.policy.rules.rules_and_modes import parse_optional_mode
from handrail.policy.watchdogs.api import ExternalWatchdog, Watchdog
from handrail.registry.agent_folders import parse_agent_tables
from handrail.session.session_context import ClientProcessRegistrations
from handrail.store.lease import WorkspaceAlreadyHeld, WorkspaceLease
from handrail.store.state_folders import resolve_workspace_path

T = TypeVar("T")

_BRIEF_WAIT_S = 10.0
"""The maximum wait for a process that only writes an answer."""
_POLL_INTERVAL_S = 0.02


@asynccontextmanager
async def open_kernel(
    workspace: FolderPath = ".",
    *,
    tools: Iterable[Tool] = (),
    resources: Iterable[ResourceProvider] = (),
    rules: Iterable[RuleLike] = (),
    secrets: Mapping[str, str] | None = None,
    tool_config: Mapping[str, Mapping[str, str]] | None = None,
    state: FolderPath | None = None,
    config: FolderPath | None = None,
    watchdogs: Iterable[Watchdog] = (),
    agent: str | Mapping[str, Any] | None = None,
    agents: Iterable[Mapping[str, Any]] = (),
    builtins: bool = True,
    settings: Iterable[str] = (),
    mode: str | None = None,
    frontend: str = "library",
    allow_home: bool = False,
) -> AsyncGenerator[Kernel]:
    """Open ``workspace`` until the block ends.

    This process holds the workspace, or connects to the process of the same user that holds it.

    The tools, rules and watchdogs that you pass apply only to the sessions that this process opens.

    :param tools: further tools, in addition to the built-ins, the tool folders and entry points
    :param resources: further resources and prompts, in addition to those of the tool folders
    :param rules: session rules, as ``"allow bash git status"``, or with examples, as ``{"rule": "…", "match": ["…"]}``
    :param secrets: values by name; tools of this process may receive those that they declare, and the values are redacted
        wherever they appear
    :param tool_config: by tool id, the values of non-secret settings that the tool declares. They apply to the sessions of
        this process, and override the agent's manifest and the configuration
    :param state: the state folder instead of the platform's
    :param config: the configuration file instead of the platform's
    :param watchdogs: check every call before it runs, in this order; they can only restrict
    :param agent: the default agent of its sessions: an id, or an agent in code with the keys of an ``agent.toml``; None: the
        configured one
    :param agents: further agents in code, for delegation or for single sessions. An agent in code replaces the one in the
        configuration with the same id
    :param builtins: False: its sessions have no built-in tools
    :param settings: ``KEY=VALUE`` texts, which override files and variables
    :param mode: how much its sessions may do without approval: ``plan``, ``ask``, ``accept-edits`` or ``auto``; None: the
        agent's or the configured mode
    :param frontend: the name of this process's frontend, shown to other processes
    :param allow_home: also open a folder that is not a project, such as a home folder, ``~/.ssh`` or ``/``
    :raises LoadError: with all faults of configuration, agent, rules and tools
    :raises UsageError: if an argument has the wrong form
    :raises StartError: if the state, the lease or the sandbox is not available
    """
    in_code = () if agent is None or isinstance(agent, str) else (agent,)
    given_agents = parse_agent_tables((*in_code, *validate_list_argument("agents", agents)))
    registrations = ClientProcessRegistrations(
        frontend,
        given_agents[0].id if in_code else cast("str | None", agent),
        validate_list_argument("tools", tools),
        normalise_rules(rules),
        secrets,
        _check_watchdogs(validate_list_argument("watchdogs", watchdogs)),
        validate_list_argument("resources", resources),
        validate_list_argument("settings", settings),
        parse_optional_mode(mode),
        validate_tool_config_argument(tool_config),
        given_agents,
        validate_bool_argument("builtins", builtins),
    )

    def holding(registrations: ClientProcessRegistrations) -> AbstractAsyncContextManager[Kernel]:
        return open_local_kernel(workspace, state, config, registrations, joining, allow_home=allow_home)

    def joining(
        held: WorkspaceAlreadyHeld, registrations: ClientProcessRegistrations
    ) -> AbstractAsyncContextManager[Kernel]:
        from handrail.kernel.remote_kernel import open_remote_kernel  # most processes hold the workspace

        return open_remote_kernel(held, config, registrations, holding)

    async with AsyncExitStack() as stack:
        stack.enter_context(check_and_guard_workspace(resolve_workspace_path(Path(workspace), allow_home=allow_home)))
        for one in registrations.watchdogs:
            if isinstance(one, ExternalWatchdog):
                one.resolve_program()
        yield await _enter_kernel(stack, registrations, holding, joining)


async def _enter_kernel(
    stack: AsyncExitStack, registrations: ClientProcessRegistrations, hold: OpenLocal, join: OpenRemote
) -> Kernel:
    deadline = asyncio.get_running_loop().time() + _BRIEF_WAIT_S
    while True:
        try:
            return await stack.enter_async_context(hold(registrations))
        except WorkspaceAlreadyHeld as held:
            if held.is_writing or not (held.holder.socket or held.holder.is_short_lived):
                raise
            if held.holder.socket:
                return await stack.enter_async_context(join(held, registrations))
            if asyncio.get_running_loop().time() >= deadline:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await WorkspaceLease.wait_until_free(held.folders, interval_s=_POLL_INTERVAL_S)


def validate_list_argument(name: str, values: Iterable[T]) -> tuple[T, ...]:
    """Return the list argument of a program as a tuple.

    :raises UsageError: if it is a text, a mapping or a single value
    """
    one = cast("object", values)
    if isinstance(one, (str, bytes, Mapping)) or not isinstance(one, Iterable):
        raise UsageError(f"Invalid `{name}`: {one!r}. Expected a list: {name}=[…]")
    return tuple(values)


def validate_bool_argument(name: str, value: bool) -> bool:
    """Return a flag of a program.

    :raises UsageError: if it is not True or False
    """
    if cast("object", value) not in (True, False):
        raise UsageError(f"Invalid `{name}`: {value!r:.80}. Expected True or False.")
    return bool(value)


def validate_tool_config_argument(given: Mapping[str, Mapping[str, str]] | None) -> ToolConfig:
    """Return a copy of the ``tool_config`` of a program.

    The tools' keys are checked later, when the tools are known.

    :raises UsageError: unless it maps tool ids to mappings of text keys and text values
    """
    expected = 'Expected {"TOOL ID": {"KEY": "VALUE"}}.'
    if not isinstance(cast("object", given), Mapping | None):
        raise UsageError(f"Invalid `tool_config`: {given!r:.80}. {expected}")
    for tool, config in (given or {}).items():
        if not isinstance(cast("object", tool), str) or not isinstance(cast("object", config), Mapping):
            raise UsageError(f"Invalid `tool_config[{tool!r:.80}]`: it is not a mapping. {expected}")
        for key, value in config.items():
            if not isinstance(cast("object", key), str) or not isinstance(cast("object", value), str):
                kind = type(cast("object", value)).__name__
                raise UsageError(
                    f"Invalid `tool_config[{tool!r:.80}][{key!r:.80}]`: the value has type {kind}. {expected}"
                )
            try:
                f"{tool}{key}{value}".encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"Invalid `tool_config[{tool!r:.80}][{key!r:.80}]`: it contains half a surrogate pair. {expected}"
                ) from None
    return {tool: dict(config) for tool, config in (given or {}).items()}


def _check_watchdogs(watchdogs: tuple[Watchdog, ...]) -> tuple[Watchdog, ...]:
    """Check that all watchdogs are callable: any other object would deny every call.

    :raises UsageError: if one is not callable
    """
    for one in watchdogs:
        if not callable(one):
            raise UsageError(
                f"Invalid watchdog in `watchdogs`: {one!r}. Expected a function that takes a call and returns a WatchdogDecision."
            )
    return watchdogs
