"""The table ``[tools."ID"]``: an operator's settings for one tool, and the declaration that results from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from handrail.contract.errors import Diagnostic
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.tool.manifest import describe_unknown_key
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import LOCKED_IDS, find_tool_id_fault

SHORTEST_TIMEOUT_MS, LONGEST_TIMEOUT_MS = 100, 7 * 24 * 3_600_000
LEAST_OUTPUT, MOST_OUTPUT = 1_024, 16 * 1024 * 1024
MAX_ENTRIES = 100_000
MAX_CONFIG_BYTES = 64 * 1024
"""Bytes of a tool's values as JSON. A program gets them in one variable, which the system limits."""
LIMITS = ("timeout_ms", "max_output", "max_entries")
"""The fields of a declaration that an operator may override."""


class _ToolSettingsTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class NamedSecretReference(_ToolSettingsTable):
    """``{ secret = "NAME" }``: a setting whose value is that of a secret."""

    secret: Annotated[str, Field(description="Name of the secret under [secrets].")]


class ToolSettings(_ToolSettingsTable):
    """``[tools."ID"]``: an operator's settings for one tool."""

    enabled: Annotated[bool, Field(description="Whether agents have the tool. Default: true.")] = True
    config: Annotated[
        dict[str, str | NamedSecretReference],
        Field(
            description='Values for the settings that the tool declares: KEY = "VALUE", or KEY = { secret = "NAME" } for a secret setting.'
        ),
    ] = {}
    timeout_ms: Annotated[
        int | None,
        Field(
            ge=SHORTEST_TIMEOUT_MS,
            le=LONGEST_TIMEOUT_MS,
            description="Time-out of a call in milliseconds. Default: the tool's own.",
        ),
    ] = None
    max_output: Annotated[
        int | None,
        Field(
            ge=LEAST_OUTPUT,
            le=MOST_OUTPUT,
            description="Maximum bytes of an output that a model reads. A file keeps the whole output. Default: the tool's own.",
        ),
    ] = None
    max_entries: Annotated[
        int | None,
        Field(
            ge=1, le=MAX_ENTRIES, description="Maximum entries of a list that a model reads. Default: the tool's own."
        ),
    ] = None
    answered_by: Annotated[
        str | None,
        Field(
            description="For web_search and web_fetch only: the id of the tool that answers. Default: the built-in tool, if there is one."
        ),
    ] = None

    @field_validator("answered_by")
    @classmethod
    def _check_answering_id(cls, tool: str | None) -> str | None:
        if tool in LOCKED_IDS:
            raise ValueError("is a locked id itself; expected the id of another tool")
        if tool is not None and (problem := find_tool_id_fault(tool)) is not None:
            raise ValueError(problem)
        return tool

    @property
    def explicit_limits(self) -> dict[str, int]:
        """The fields of :data:`LIMITS` that are set."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}


ToolConfig = Mapping[str, Mapping[str, str]]
"""Values of tool settings that are not secret: by tool id, then by key."""


class ToolSettingsLayer(NamedTuple):
    """The settings of tools from one place.

    :param source: the place, as the operator knows it
    :param where: the prefix of places in faults
    :param known: whether each id must be the id of a tool
    """

    source: str
    tools: Mapping[str, ToolSettings]
    where: tuple[str, ...] = ("tools",)
    known: bool = False

    def build_setting_fault(self, tool: str, problem: str, *, key: str | None = None) -> Diagnostic:
        """Return a fault in the layer's settings for ``tool``."""
        inner = () if key is None else ("config", key) if self.where == ("tools",) else (key,)
        return Diagnostic(self.source, format_json_path((*self.where, tool, *inner)), problem)


def build_tool_settings_layer(source: str, values: ToolConfig, *, known: bool = False) -> ToolSettingsLayer:
    """Return a layer of the ``tool_config`` values of an agent's manifest or a program.

    :param known: whether each id must be the id of a tool
    """
    tools = {tool: ToolSettings(config=dict(config)) for tool, config in values.items()}
    return ToolSettingsLayer(source, tools, ("tool_config",), known)


def apply_tool_settings(spec: ToolSpec, layers: Iterable[ToolSettingsLayer]) -> tuple[ToolSpec, list[Diagnostic]]:
    """Return the declaration with the operator's limits and values, and the faults of invalid values.

    :param layers: the weakest first
    :return: ``spec`` itself if nothing is set
    """
    changes: dict[str, Any] = {}
    values: dict[str, str] = {}
    faults: list[Diagnostic] = []
    for layer in layers:
        if (own := layer.tools.get(spec.id)) is None:
            continue
        if (limits := own.explicit_limits) and spec.provider_support:
            problem = f"{' and '.join(limits)}: the provider of the model runs this tool, so limits of the kernel do not apply; remove the setting"
            faults.append(layer.build_setting_fault(spec.id, problem))
        changes |= limits
        for key, given in own.config.items():
            if (problem := _fault_in_value(spec, key, given)) is not None:
                faults.append(layer.build_setting_fault(spec.id, problem, key=key))
            elif isinstance(given, str):
                values[key] = given
        if (size := len(json.dumps(values))) > MAX_CONFIG_BYTES:
            problem = f"the values of the settings have {size:,} bytes together; the maximum for a program is {MAX_CONFIG_BYTES:,}. Put the rest into a file, and its path here"
            return spec, [*faults, layer.build_setting_fault(spec.id, problem)]
    if values:
        changes["config"] = {
            key: replace(one, default=values[key]) if key in values else one for key, one in spec.config.items()
        }
    return (replace(spec, **changes) if changes else spec), faults


def format_tool_setting_line(tool: str, key: str, *, secret: bool = False) -> str:
    """Return the configuration line that sets one setting of a tool, for texts to the operator."""
    value = '{ secret = "…" }' if secret else '"…"'
    return f'{key} = {value} under [tools."{tool}".config] of handrail.toml'


def _fault_in_value(spec: ToolSpec, key: str, given: str | NamedSecretReference) -> str | None:
    """Return why ``key`` cannot have the value, or None. The text never repeats a value: it may be a secret."""
    if (declared := spec.config.get(key)) is None:
        known = describe_unknown_key(key, spec.config) if spec.config else "unknown key; the tool declares no settings"
        return f"{known}{' ' if known.endswith('?') else '; '}handrail tools --json lists the settings of each tool"
    if declared.secret and isinstance(given, str):
        return (
            "is a secret setting, so its value cannot be written here; expected "
            f'{key} = {{ secret = "NAME" }} under [tools."{spec.id}".config], and NAME under [secrets] of handrail.toml'
        )
    if not declared.secret and isinstance(given, NamedSecretReference):
        return f'is not a secret setting; expected text, as in {key} = "…"'
    return None
