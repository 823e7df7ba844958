"""All settings, with their meaning and their defaults: the one list behind files, variables and flags."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from handrail.catalog.view import CatalogOptions
from handrail.config.mcp import NAME as SERVER_NAME
from handrail.config.mcp import McpServe, McpServer
from handrail.contract.modes import DEFAULT_MODE, Mode
from handrail.contract.protected.protected import WORKSPACE_FILE
from handrail.contract.rules import GivenRule
from handrail.contract.sandbox import Limits
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.settings import ToolSettings
from handrail.store.database.connection import OWN as OWN_STORE

FILE_NAME = WORKSPACE_FILE
_HOUR_MS = 3_600_000
_WEEK_MS = 7 * 24 * _HOUR_MS
OWN_SANDBOX = "machine"
"""``[sandbox] provider`` for what the operating system gives."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A part of a key that TOML reads without quotes."""
_MIB = 1024 * 1024
_MANY = 2**31 - 1


SHIPPED: tuple[Literal["exfiltration", "secrets", "repeats"], ...] = ("exfiltration", "secrets", "repeats")
"""The watchdogs that are there unless they are taken away."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class LimitSettings(_Table):
    """``[limits]``: budgets of every call."""

    lock_wait_ms: Annotated[
        int, Field(gt=0, le=_WEEK_MS, description="How long a call waits for its locks, in milliseconds.")
    ] = 60_000
    grace_ms: Annotated[
        int, Field(gt=0, le=_HOUR_MS, description="How long a stopped call may take to end by itself, in milliseconds.")
    ] = 5_000
    state_idle_ms: Annotated[
        int, Field(gt=0, le=_WEEK_MS, description="How long what a stateful tool has open waits for a step.")
    ] = 900_000
    open_states: Annotated[
        int, Field(gt=0, le=1_000, description="How many states of stateful tools one session may have open.")
    ] = 32
    job_output_mib: Annotated[
        int,
        Field(
            gt=0,
            le=_MANY,
            description="What the outputs of all jobs of a workspace may take on the disk together, in MiB; those of the jobs that ended first are removed.",
        ),
    ] = 1024
    cut_output_mib: Annotated[
        int,
        Field(
            gt=0,
            le=_MANY,
            description="What the files with the whole of outputs that were cut may take on the disk together, in MiB; the oldest of sessions that nobody has open are removed.",
        ),
    ] = 1024


class ApprovalSettings(_Table):
    """``[approvals]``: how long a person's part in a call stays good."""

    request_days: Annotated[int, Field(gt=0, le=3650, description="After how many days a question lapses.")] = 7
    grant_hours: Annotated[
        int, Field(gt=0, le=87600, description="After how many hours an approval that was not used lapses.")
    ] = 24


class SandboxSettings(_Table):
    """``[sandbox]``: what the programs of a call may use up, and what of their confinement an operator does without."""

    provider: Annotated[
        str,
        Field(
            min_length=1,
            description="Who confines programs: this machine, or what an installed package offers by that name.",
        ),
    ] = OWN_SANDBOX
    cpu_s: Annotated[
        int, Field(ge=0, le=_MANY, description="Processor time of each process, in seconds; 0 for no bound.")
    ] = 3600
    memory_mib: Annotated[
        int, Field(ge=0, le=_MANY, description="Private memory of each process, in MiB; 0 for no bound.")
    ] = 8192
    call_memory_mib: Annotated[
        int,
        Field(
            ge=0,
            le=_MANY,
            description="Memory of all processes of one call together, shared memory included, in MiB; 0 for no bound. At most three quarters of the machine's.",
        ),
    ] = 16384
    processes: Annotated[
        int, Field(ge=0, le=_MANY, description="Processes and threads of one call together; 0 for no bound.")
    ] = 2048
    file_mib: Annotated[
        int, Field(ge=0, le=_MANY, description="The longest file that a program may write, in MiB; 0 for no bound.")
    ] = 16384
    open_files: Annotated[
        int, Field(ge=0, le=_MANY, description="Files that a process may have open; 0 for no bound of its own.")
    ] = 4096
    tmp_mib: Annotated[int, Field(gt=0, le=_MANY, description="The private /tmp of each call, in MiB.")] = 256
    shm_mib: Annotated[int, Field(gt=0, le=_MANY, description="The private /dev/shm of each call, in MiB.")] = 64
    unix_sockets: Annotated[
        bool,
        Field(
            description="Whether programs may make Unix sockets, and so reach every server that listens in the workspace."
        ),
    ] = False
    without: Annotated[
        tuple[Literal["landlock", "seccomp"], ...],
        Field(
            description="Layers that this machine may lack: programs run without them, and every result says so. Where there is one, it is used."
        ),
    ] = ()
    unconfined: Annotated[
        tuple[str, ...],
        Field(
            description="Ids of tools whose programs run without any sandbox, with all that you may do. Every result and record of theirs says so."
        ),
    ] = ()

    @property
    def limits(self) -> Limits:
        """As a sandbox takes them."""
        return Limits(
            cpu_s=self.cpu_s or None,
            memory_bytes=self.memory_mib * _MIB or None,
            call_memory_bytes=self.call_memory_mib * _MIB or None,
            processes=self.processes or None,
            file_bytes=self.file_mib * _MIB or None,
            open_files=self.open_files or None,
            tmp_bytes=self.tmp_mib * _MIB,
            shm_bytes=self.shm_mib * _MIB,
        )


class StateSettings(_Table):
    """``[state]``: where it is kept is said by ``--state`` and ``HANDRAIL_STATE``."""

    store: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="What opens the databases of workspaces that have none yet: sqlite, or what an installed package offers by that name.",
        ),
    ] = OWN_STORE


class SearchSettings(_Table):
    """``[search]``: what finds tools by meaning."""

    embedder: Annotated[
        str,
        Field(
            min_length=1,
            description="What encodes texts: local (a small model that runs here), endpoint, fastembed, the name of one that a package adds, or none.",
        ),
    ] = "local"
    url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s@]+)?$",
            description="endpoint: a server that speaks OpenAI's POST /embeddings; its address, ending before that. What tools say and what is searched for is sent there.",
        ),
    ] = ""
    model: Annotated[str, Field(description="endpoint, fastembed: the model's name there.")] = ""
    secret: Annotated[str, Field(description="endpoint: the secret that is sent as its key.")] = ""


class CatalogSettings(_Table):
    """``[catalog]``: what a model sees of many tools."""

    index_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="About how many tokens the names of the tools that are not in view may take in the system text; "
            "0: nothing is said of them.",
        ),
    ] = 1_000
    preload: Annotated[
        int,
        Field(
            ge=0,
            le=50,
            description="How many tools are brought into view by what a user says, before the model is asked; 0 for none.",
        ),
    ] = 0
    preload_tokens: Annotated[
        int, Field(ge=0, le=1_000_000, description="About how many tokens these may take together.")
    ] = 2_000
    categories: Annotated[
        dict[str, str],
        Field(
            description="What models are told of categories of yours and of foreign sources, by name. The texts of those that ship are fixed."
        ),
    ] = {}

    def options(self, core: tuple[str, ...]) -> CatalogOptions:
        """As a catalog takes them.

        :param core: what an agent's manifest names
        """
        texts = tuple(self.categories.items())
        return CatalogOptions(core, texts, self.index_tokens, self.preload, self.preload_tokens)


class WatchdogSettings(_Table):
    """``[[watchdogs]]``: something that sees each call before it runs and can only narrow: shipped, or a command."""

    use: Annotated[
        Literal["exfiltration", "secrets", "repeats"] | None,
        Field(description="One that ships, to set it otherwise: all three are on. exfiltration, secrets or repeats."),
    ] = None
    action: Annotated[
        Literal["ask", "deny", "off"],
        Field(description="What a shipped one answers to what it finds; off takes it away."),
    ] = "ask"
    failures: Annotated[
        int, Field(gt=0, le=1000, description="repeats: after how many failures in a row of exactly one call.")
    ] = 5
    command: Annotated[
        tuple[str, ...] | None, Field(min_length=1, description="Or a program of your own, and its arguments.")
    ] = None
    timeout_ms: Annotated[
        int, Field(gt=0, le=_HOUR_MS, description="After how many milliseconds without an answer the call is denied.")
    ] = 5_000

    @model_validator(mode="after")
    def _one_of_them(self) -> WatchdogSettings:
        if (self.use is None) == (self.command is None):
            raise ValueError("expected either use, with the name of one that ships, or command")
        given = self.model_fields_set
        if self.command is not None and (more := sorted(given & {"action", "failures"})):
            raise ValueError(f"{' and '.join(more)} are for watchdogs that ship; a command says itself what it answers")
        if "failures" in given and self.use != "repeats":
            raise ValueError("failures is for use = 'repeats'")
        return self


class McpSettings(_Table):
    """``[mcp]``: upstream MCP servers, and who may come to Handrail's own."""

    files: Annotated[
        tuple[str, ...],
        Field(
            description="Files with an mcpServers object, as other programs have them; what they may do is said under servers, by the same name."
        ),
    ] = ()
    servers: Annotated[
        dict[Annotated[str, Field(pattern=SERVER_NAME)], McpServer],
        Field(description="The servers, by name: [mcp.servers.NAME] with command or url, and what it may do."),
    ] = {}
    serve: Annotated[
        McpServe,
        Field(
            description="Who may come to handrail mcp --http: tokens, or an authorization server; what its options say counts before this."
        ),
    ] = McpServe()


class SecretReference(_Table):
    """Where the value of a secret stands: exactly one of these."""

    env: Annotated[str | None, Field(description="The variable that holds it.")] = None
    file: Annotated[str | None, Field(description="A file of mode 0600 that holds it.")] = None
    command: Annotated[tuple[str, ...] | None, Field(description="A program that prints it, and its arguments.")] = None


class Settings(_Table):
    """All settings of a Handrail configuration."""

    agent: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$",
            description="The agent that sessions have unless they name one: a folder agents/NAME beside the configuration.",
        ),
    ] = "default"
    mode: Annotated[
        Mode,
        Field(
            description="How much is done without asking: plan (only looks), ask, accept-edits or auto. A set of rules: handrail modes shows them. Of a workspace's file that nobody trusted, only a narrower one counts."
        ),
    ] = DEFAULT_MODE
    rules: Annotated[
        tuple[GivenRule, ...],
        Field(
            description="Rules, as 'ACTION PERMISSION [PATTERN]', or as a table with examples that are checked. Those of all layers hold together."
        ),
    ] = ()
    ceiling: Annotated[
        Requires | None,
        Field(description="What no agent on this machine may exceed; left out, what its tools declare is the bound."),
    ] = None
    secrets: Annotated[
        dict[str, SecretReference],
        Field(
            description="Secrets that tools may be given by name, each by where its value stands; the value itself is never written here. Not in a workspace's file."
        ),
    ] = {}
    tools: Annotated[
        dict[str, ToolSettings],
        Field(
            description="Tools one by one, by the tool's id: whether agents have it (enabled), values for its settings (config), its time-out (timeout_ms), and how much of an output a model reads (max_output in bytes, max_entries in entries of a list). For web_search and web_fetch, which no built-in tool answers, also the tool that does (answered_by). Each setting of each tool is overridden by itself. Not in a workspace's file."
        ),
    ] = {}
    limits: Annotated[LimitSettings, Field(description="Budgets of every call.")] = LimitSettings()
    approvals: Annotated[ApprovalSettings, Field(description="How long a person's part in a call stays good.")] = (
        ApprovalSettings()
    )
    sandbox: Annotated[
        SandboxSettings,
        Field(
            description="What the programs of a call may use up, and what of their confinement you do without. Not in a workspace's file."
        ),
    ] = SandboxSettings()
    state: Annotated[StateSettings, Field(description="How state is kept. Not in a workspace's file.")] = (
        StateSettings()
    )
    catalog: Annotated[CatalogSettings, Field(description="What a model sees of many tools.")] = CatalogSettings()
    search: Annotated[SearchSettings, Field(description="What finds tools by meaning. Not in a workspace's file.")] = (
        SearchSettings()
    )
    mcp: Annotated[
        McpSettings,
        Field(
            description="Upstream MCP servers, whose tools come in behind the same rules, and who may come to Handrail's own. Not in a workspace's file: it would choose which programs are started with which of your secrets."
        ),
    ] = McpSettings()
    watchdogs: Annotated[
        tuple[WatchdogSettings, ...],
        Field(
            description="What sees each call before it runs and can only narrow: three that ship, and commands of your own. Not in a workspace's file: commands run unconfined."
        ),
    ] = ()


LISTS = ("rules", "watchdogs")
"""Keys whose items add up over the layers."""


OPERATORS = {
    "watchdogs": "cannot name watchdogs: they run outside the sandbox",
    "secrets": "cannot name secrets: whoever wrote it would choose which of your files and programs are read",
    "tools": "cannot set up tools: whoever wrote it would choose which of your secrets they are given",
    "search": "cannot choose what searches: whoever wrote it would choose where the texts of tools and requests are sent",
    "mcp": "cannot name MCP servers: whoever wrote it would choose which programs are started with which of your secrets",
    "state": "cannot say how state is kept: whoever wrote it would choose what holds the record of what was done",
    "sandbox": "cannot change the sandbox: whoever wrote it would choose what confines the programs that they wrote",
}
"""Keys that a workspace's file cannot have, trusted or not, and why."""


def tables() -> dict[str, type[BaseModel]]:
    """The keys that are tables of settings of their own, each of which is overridden by itself."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Table):
            found[name] = field.annotation
    return found


def path_of(key: str) -> tuple[str, ...]:
    """The parts of a setting's key: ``tools."mail.send".timeout_ms`` has three.

    :raises ValueError: for what TOML does not read as a key
    """
    if '"' not in key and "'" not in key:
        return tuple(key.split("."))
    node: Any = tomllib.loads(f"{key} = 0")
    parts: list[str] = []
    while isinstance(node, dict):
        ((part, node),) = cast("dict[str, Any]", node).items()
        parts.append(part)
    return tuple(parts)


def key_of(path: Iterable[str]) -> str:
    """The inverse of :func:`path_of`."""
    return ".".join(part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in path)


def keys() -> Iterator[str]:
    """Every setting as ``key`` or ``table.key``, in the order of the models."""
    inner = tables()
    for name in Settings.model_fields:
        if name in inner:
            yield from (f"{name}.{key}" for key in inner[name].model_fields)
        else:
            yield name
