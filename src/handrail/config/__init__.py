"""What has the operator set? The operator's configuration, checked whole, with every fault of every layer at once.

The layers, from weak to strong: defaults, ``handrail.toml`` in the platform's configuration folder (or a named file), the
workspace's own ``handrail.toml``, ``HANDRAIL_*`` variables, flags. Every value keeps its origin. The ``deny`` and ``ask``
rules of the workspace file always apply; the rest applies only after the user has trusted exactly this content
(:mod:`handrail.store.operator_decisions`). Tool folders are next to the first file, never in a workspace.
"""

from __future__ import annotations

from handrail.config.layers import LayerValue, SettingOrigin
from handrail.config.loader import (
    ConfiguredRule,
    MergedConfiguration,
    WorkspaceFile,
    check_outside_workspace,
    load_configuration,
)
from handrail.config.operator_settings import (
    FILE_NAME,
    ApprovalSettings,
    LimitSettings,
    SearchSettings,
    Settings,
    UndoSettings,
    WatchdogSettings,
)

__all__ = [
    "FILE_NAME",
    "ApprovalSettings",
    "ConfiguredRule",
    "LayerValue",
    "LimitSettings",
    "MergedConfiguration",
    "SearchSettings",
    "SettingOrigin",
    "Settings",
    "UndoSettings",
    "WatchdogSettings",
    "WorkspaceFile",
    "check_outside_workspace",
    "load_configuration",
]
