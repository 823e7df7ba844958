"""The exceptions from the rules of :mod:`tests.test_house`. Each list may only become shorter."""

from __future__ import annotations

CIRCLES: tuple[frozenset[str], ...] = ()
"""Files that import each other."""

FULL: frozenset[str] = frozenset(("contract/tool",))
"""Folders with more files than a reader takes in."""

LONG: frozenset[str] = frozenset()
"""Files with more lines than one thing should need."""

SMALL: frozenset[str] = frozenset(
    (
        "agent.hearing",
        "agent.native",
        "agent.project",
        "agent.providers.anthropic_native",
        "agent.streaming.text_quoting",
        "arbiter.ahead",
        "arbiter.blind",
        "arbiter.calls.failures",
        "catalog.active",
        "catalog.embedders.fast",
        "catalog.embedders.wordpiece",
        "catalog.forms.placing",
        "catalog.search.fusion",
        "catalog.search.reading",
        "catalog.search.sealed",
        "contract.schema.integers",
        "contract.schema.regex_size",
        "contract.tool.docstring",
        "contract.tool.spec_types",
        "frontends.acp.buffers",
        "frontends.acp.choosing",
        "frontends.acp.screen",
        "frontends.cli.commands.acknowledging",
        "frontends.cli.commands.cost",
        "frontends.cli.commands.mcp_login",
        "frontends.mcp.http.replay",
        "frontends.mcp.pushing",
        "frontends.mcp.told",
        "ipc.holder.entering",
        "ipc.holder.people",
        "ipc.joiner.catalog",
        "ipc.joiner.stepping",
        "ipc.joiner.turns",
        "kernel.doctor.upstreams",
        "kernel.lanes",
        "registry.sources.agents",
        "registry.sources.plugins",
        "sandbox.filters.syscalls",
        "session.arrivals.schedules",
        "session.arrivals.watches",
        "session.news",
        "session.past.history",
        "session.past.provided",
        "session.project_files",
        "session.recalling",
        "session.taking_up",
        "upstream.pages",
    )
)
"""Small files that one neighbour alone imports, and that could be a part of it."""
