"""The agent manifest: an agent described in TOML, and a check that reports every fault at once.

The manifest holds the operator's settings for one agent. Names that lead out of it, to a tool or a folder, are
checked by the rooms that know tools and folders.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from handrail.contract.errors import Diagnostic
from handrail.contract.permission_modes import Mode
from handrail.contract.rule_forms import RuleInput
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.struct import Struct
from handrail.contract.text.glob_patterns import compile_text_glob, find_glob_pattern_fault
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.text_encodings import decode_settings_text
from handrail.contract.tool.manifest import find_model_validation_faults, repair_faulty_data
from handrail.contract.tool.provider_tools import find_provider_tool_faults, make_provider_tool_id
from handrail.contract.tool.requires import FsRequires, NetRequires, Requires, ShellRequires
from handrail.contract.tool.tool_ids_and_wire_names import LOCKED_IDS, find_tool_id_fault

MAX_AGENT_BYTES = 256 * 1024
DEFAULT_AGENT = "default"
"""The agent that exists without a manifest."""
AGENT_TOOL_PREFIX = "agent."
"""The prefix of the ids of agents as tools."""
Role = Literal["primary", "subagent", "all"]
"""Who opens an agent's sessions: users and programs, other agents, or both."""

_NAME = compile_regex_lazily(r"[A-Za-z][A-Za-z0-9_-]{0,63}\Z")
_TOOL_PATTERN = compile_regex_lazily(r"[A-Za-z0-9_.*?\[\]!-]+\Z")
_MODEL = compile_regex_lazily(r"[a-z][a-z-]*:\S(?:.*\S)?\Z")
_ITEM = compile_regex_lazily(r"\w+\[[^\]]*\]")
_MAX_DEPTH = 16


ToolProfile = Literal["innate-skills", "tiered-tools"]
PROFILE_TOOLS: Mapping[ToolProfile, tuple[str, ...]] = {
    "innate-skills": (
        *("memory", "memory.query", "memory.upsert", "memory.compact", "search_memory", "introspect", "info", "jobs"),
        *("schedule", "add_schedule", "add_timer", "list_triggers", "remove_trigger", "list", "todo", "goal_pursuit"),
        *("goals", "create_task", "list_tasks", "edit_task", "get_task", "document", "read", "find_tools"),
        *("rich_render", "review_tool_calls"),
    ),
    "tiered-tools": (
        *("create_task", "list_tasks", "edit_task", "get_task", "browse_tools", "load_tools", "memory_search"),
        *("send_message", "browse_rules", "load_rule", "save_rule", "delete_rule"),
    ),
}
"""The tools that each profile keeps active, by id. A tool that is added later becomes active in its profiles."""


class _TomlTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class AdditionalToolHosts(_TomlTable):
    """``[requires.tools.ID]``: what the agent gives one tool beyond the tool's declaration. Hosts only."""

    net: NetRequires = NetRequires()


class AgentRequires(Requires):
    """``[requires]``: what the agent has in addition to the declarations of its tools."""

    tools: dict[str, AdditionalToolHosts] = Field(default_factory=dict[str, AdditionalToolHosts])
    """Additions by tool id. A tool has only what it requires itself, so hosts for ``bash`` are given to it by name."""


class AgentAdditionalRoot(_TomlTable):
    """``[[roots]]``: a folder in addition to the workspace."""

    path: str
    """Absolute, or beginning with ``~/``."""
    access: Literal["read", "write"] = "read"


Compaction = Literal["outline", "summary"]


class AgentBudgets(_TomlTable):
    """``[budgets]`` of each run. A missing value keeps the default of the program that runs the agent.

    :param turns: requests to the model
    :param tokens: input and output of all requests together
    :param seconds: wall time, including waits for the user
    :param calls: proposed calls
    :param context: about how many tokens the messages of one request may take
    :param compaction: what replaces older messages that do not fit: an outline, or a summary by the model
    :param repeat_reads: whether an unchanged file is given again to a model that reads it again, instead of a note
    :param shared: whether a sub-agent also uses the rest of its parent's budgets
    """

    turns: Annotated[int, Field(gt=0)] | None = None
    tokens: Annotated[int, Field(gt=0)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    calls: Annotated[int, Field(gt=0)] | None = None
    context: Annotated[int, Field(gt=0)] | None = None
    compaction: Compaction | None = None
    repeat_reads: bool | None = None
    shared: bool = True


class DelegablePaths(_TomlTable):
    """Path patterns that sub-agents may have at most; None: as the agent itself."""

    read: tuple[str, ...] | None = None
    write: tuple[str, ...] | None = None


class DelegableHosts(_TomlTable):
    """Hosts that sub-agents may have at most; None: as the agent itself."""

    hosts: tuple[str, ...] | None = None


class DelegationPolicy(_TomlTable):
    """``[delegation]``: what an agent may pass on to its sub-agents.

    A missing value passes on all that the agent has itself. Secrets and the right to ask the user are passed on by
    name only.
    """

    fs: DelegablePaths = DelegablePaths()
    net: DelegableHosts = DelegableHosts()
    shell: tuple[ShellRequires, ...] | None = None
    capabilities: tuple[str, ...] | None = None
    secrets: tuple[str, ...] = ()
    """Names of secrets that the tools of sub-agents may get if they declare them."""
    can_ask_user: bool = False
    """Whether sub-agents may ask the user."""
    agents: tuple[str, ...] = ("*",)
    """Patterns of agent ids: to whom this agent and its sub-agents may delegate, among agents that accept tasks."""

    def to_requires(self) -> Requires:
        """Return the named values as requirements. A missing value is empty."""
        return Requires(
            fs=FsRequires(read=self.fs.read or (), write=self.fs.write or ()),
            net=NetRequires(hosts=self.net.hosts or ()),
            shell=self.shell or (),
            capabilities=self.capabilities or (),
        )


class AgentManifest(_TomlTable):
    """The manifest of one agent."""

    id: str = DEFAULT_AGENT
    """The name of its folder."""
    description: str = ""
    """For people, and for the models of agents that delegate."""
    prompt: str = ""
    """The operator's instructions, which follow the standard system text."""
    model: str | None = None
    """``PROVIDER:NAME``, for runs that name no model."""
    base_url: str | None = Field(default=None, pattern=r"\A(https?://[^\s]+)?\z")
    """Another server that speaks the provider's API, or ``""`` for the provider's own. None: for a sub-agent the
    parent's server, if both use one provider."""
    requires: AgentRequires = AgentRequires()
    tools: tuple[str, ...] = ("*",)
    """Patterns of tool ids. The agent does not have other tools; an empty list leaves no tools."""
    core: tuple[str, ...] = ()
    """Ids of tools that are always active."""
    profile: ToolProfile | None = None
    """A shipped list of tools that are always active, in addition to ``core``."""
    mode: Mode | None = None
    """The mode of its sessions if none is given; None for the configured one."""
    rules: tuple[RuleInput, ...] = ()
    """Rules of the scope *manifest*, as ``ACTION PERMISSION [PATTERN]`` or with examples. A deny among them is final."""
    roots: tuple[AgentAdditionalRoot, ...] = ()
    role: Role | None = None
    """None: ``primary``, so that other agents get an agent's rights only if it says so; ``all`` for the default
    agent."""
    delegation: DelegationPolicy = DelegationPolicy()
    budgets: AgentBudgets = AgentBudgets()
    aliases: dict[str, str] = Field(default_factory=dict[str, str])
    """Alias to id."""
    tool_config: dict[str, dict[str, str]] = Field(default_factory=dict[str, dict[str, str]])
    """Values of tool settings that are not secret, by tool id. They take precedence over the configuration."""
    native: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict[str, dict[str, dict[str, Any]]])
    """Tools that a model's provider runs itself: name, then provider, then options. A model is offered only these."""

    @property
    def core_tools(self) -> tuple[str, ...]:
        """The ids of ``core`` and ``profile``. A tool that does not exist, or that the agent does not have, is ignored."""
        return tuple(dict.fromkeys((*self.core, *(PROFILE_TOOLS[self.profile] if self.profile else ()))))

    def has_tool(self, tool_id: str) -> bool:
        """Return whether ``tools`` or ``native`` names the tool."""
        if any(matches_tool_pattern(pattern, tool_id) for pattern in self.tools):
            return True
        return bool(self.native) and any(make_provider_tool_id(name) == tool_id for name in self.native)

    @property
    def effective_role(self) -> Role:
        """The role, with its default."""
        return self.role or ("all" if self.id == DEFAULT_AGENT else "primary")

    def accepts_delegation_from(self, other: AgentManifest, *above: AgentManifest) -> bool:
        """Return whether ``other`` may delegate to this agent.

        :param above: the agents above ``other``, up to the top; each must allow the delegation too
        """
        if self.effective_role == "primary":
            return False
        return all(
            any(matches_tool_pattern(pattern, self.id) for pattern in one.delegation.agents) for one in (other, *above)
        )

    def to_data(self) -> dict[str, Any]:
        """Return the manifest as JSON-able data, for watchdogs and listings."""
        return self.model_dump(mode="json")


class CheckedAgentManifest(Struct, frozen=True):
    """The sound part of a manifest, and the faults of the rest. Without faults it is the whole manifest.

    :param source: the file, or ``""`` for the agent that needs none
    """

    manifest: AgentManifest
    source: str = ""
    faults: tuple[Diagnostic, ...] = ()

    def with_added_faults(self, problems: Iterable[tuple[str, str]]) -> CheckedAgentManifest:
        """Return a copy with further ``(place, problem)`` pairs.

        Problems that only follow from a known fault are left out.
        """
        places = [fault.location for fault in self.faults]
        items = {_top_level_item_of(place) for place in places}
        further = (
            Diagnostic(self.source, place, problem)
            for place, problem in problems
            if _top_level_item_of(place) not in items and not any(place.startswith((f"{p}.", f"{p}[")) for p in places)
        )
        return CheckedAgentManifest(self.manifest, self.source, (*self.faults, *further))


def matches_tool_pattern(pattern: str, tool_id: str) -> bool:
    """Return whether an item of ``tools`` matches ``tool_id``. ``*`` matches anything, also dots."""
    return pattern == tool_id or compile_text_glob(pattern).match(tool_id) is not None


def _top_level_item_of(place: str) -> str:
    """Return the top-level item of a list or table that ``place`` is in, else ``place``.

    For example, ``roots[1]`` for ``roots[1].path``.
    """
    return place if (found := _ITEM.match(place)) is None else found.group()


def find_agent_id_fault(agent: str) -> str | None:
    """Return why ``agent`` is not a valid id of an agent, or None if it is."""
    if _NAME.match(agent):
        return None
    return f"{agent[:80]!r} is not an agent's id; use at most 64 letters, digits, '_' and '-', and start with a letter"


def parse_agent_manifest(content: bytes, source: str, expected_id: str) -> CheckedAgentManifest:
    """Parse the bytes of an agent manifest. Never raises: the faults are in the result.

    :param source: the file, as the operator knows it
    :param expected_id: the name of the folder that has the file
    """
    try:
        table = _parse_manifest_toml(content)
    except ValueError as error:
        return CheckedAgentManifest(AgentManifest(id=expected_id), source, (Diagnostic(source, "", str(error)),))
    return check_agent_manifest_table(table, source, expected_id)


def check_agent_manifest_table(table: Mapping[str, Any], source: str, expected_id: str) -> CheckedAgentManifest:
    """Check a parsed TOML table; see :func:`parse_agent_manifest`."""
    data, faults = _drop_toml_only_values(table)
    for place, problem in find_model_validation_faults(AgentManifest, data).items():
        faults.setdefault(place, problem)
    if "id" not in table:
        faults["id"] = f"is missing; expected id = {expected_id!r}, the name of its folder"
    sound = AgentManifest.model_validate(
        {"id": expected_id, **_lists_to_tuples(repair_faulty_data(AgentManifest, data, {"roots": {"path": "/"}}))}
    )
    for place, problem in _find_semantic_faults(sound, expected_id):
        faults.setdefault(place, problem)
    if "id" in faults:
        sound = sound.model_copy(update={"id": expected_id})
    found = (Diagnostic(source, place, problem) for place, problem in faults.items())
    return CheckedAgentManifest(sound, source, tuple(found))


def _parse_manifest_toml(content: bytes) -> dict[str, Any]:
    """Parse the TOML of a manifest.

    :raises ValueError: with the reason if it is not a table
    """
    if len(content) > MAX_AGENT_BYTES:
        raise ValueError(f"is larger than the maximum of {MAX_AGENT_BYTES // 1024} KiB")
    try:
        return tomllib.loads(decode_settings_text(content))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: invalid byte at {error.start}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not TOML: {error}") from None


def _drop_toml_only_values(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``table`` without values that only TOML has, and a fault for each."""
    faults: dict[str, str] = {}
    return cast("dict[str, Any]", _without_toml_types(table, (), faults)), faults


def _without_toml_types(value: object, place: tuple[str | int, ...], faults: dict[str, str]) -> object:
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, object]", value)
        if len(place) < _MAX_DEPTH:
            return {key: _without_toml_types(item, (*place, key), faults) for key, item in inner.items()}
        faults[format_json_path(place)] = "is nested too deeply"
        return {}
    if isinstance(value, list):
        if len(place) < _MAX_DEPTH:
            items = cast("list[object]", value)
            return [_without_toml_types(item, (*place, index), faults) for index, item in enumerate(items)]
        faults[format_json_path(place)] = "is nested too deeply"
        return []
    if isinstance(value, float) and not math.isfinite(value):
        faults[format_json_path(place)] = f"is {value}; expected a finite number"
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    faults[format_json_path(place)] = f"is a {type(value).__name__}; an agent manifest has no dates or times"
    return None


def _lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, as the models need them."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(item) for key, item in cast("dict[str, Any]", value).items()}
    return tuple(_lists_to_tuples(item) for item in cast("list[Any]", value)) if isinstance(value, list) else value


def _find_semantic_faults(agent: AgentManifest, expected_id: str) -> Iterator[tuple[str, str]]:
    """Yield the faults that types do not show. Uses neither the disk nor the registry."""
    if problem := find_agent_id_fault(agent.id):
        yield "id", problem
    elif agent.id != expected_id:
        yield "id", f"is {agent.id!r}, but its folder is {expected_id!r}; use the same name for both"
    if agent.model is not None and not _MODEL.match(agent.model):
        yield "model", f"is {agent.model[:80]!r}; expected PROVIDER:NAME, as in 'openai:gpt-5'"
    yield from _faults_in_requirements(agent)
    for place, patterns in (("tools", agent.tools), ("delegation.agents", agent.delegation.agents)):
        for index, pattern in enumerate(patterns):
            if problem := _fault_in_tool_pattern(pattern):
                yield f"{place}[{index}]", problem
    for index, root in enumerate(agent.roots):
        if problem := _fault_in_root(root.path):
            yield f"roots[{index}].path", problem
    yield from _faults_in_aliases(agent)
    for steps, problem in find_provider_tool_faults(agent.native):
        yield format_json_path(("native", *steps)), problem


def _faults_in_requirements(agent: AgentManifest) -> Iterator[tuple[str, str]]:
    """Yield the faults of the agent's requirements and of its delegation."""
    yield from agent.requires.find_faults()
    for tool_id, addition in agent.requires.tools.items():
        for place, problem in Requires(net=addition.net).find_faults():
            yield f"{format_json_path(('requires', 'tools', tool_id))}.{place.removeprefix('requires.')}", problem
    for place, problem in agent.delegation.to_requires().find_faults():
        yield place.replace("requires.", "delegation.", 1), problem


def _faults_in_aliases(agent: AgentManifest) -> Iterator[tuple[str, str]]:
    for alias, tool_id in agent.aliases.items():
        if problem := find_tool_id_fault(alias):
            yield format_json_path(("aliases", alias)), problem
        elif alias in LOCKED_IDS:
            yield (
                format_json_path(("aliases", alias)),
                f"{alias!r} is a locked id; choose another alias for {tool_id!r}",
            )


def _fault_in_tool_pattern(pattern: str) -> str | None:
    if not _TOOL_PATTERN.match(pattern):
        return f"{pattern[:80]!r} is not a pattern of tool ids; use an id, or letters with '*', '?' and [sets]"
    return find_glob_pattern_fault(pattern)


def _fault_in_root(path: str) -> str | None:
    if "\0" in path:
        return "contains a NUL character; remove it"
    if path != "~" and not path.startswith(("/", "~/")):
        return f"is {path[:80]!r}; expected an absolute path, or one that begins with '~/'"
    if ".." in path.split("/"):
        return f"{path[:80]!r} contains '..'; name the folder itself"
    return None


# Instruction files of a project, such as AGENTS.md: text for the model, which grants no permission.

MANIFEST_KEYS = ("AGENTS.md", "CLAUDE.md", "CONTEXT.md")
